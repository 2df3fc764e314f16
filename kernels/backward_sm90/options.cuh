/*
 * The options that change scores or weights: softcap, ALiBi, bias, boolean mask, dropout. The
 * kernel is compiled without any option, for one option alone, or for all of them, each of which
 * may be present or not.
 *
 * Scores are transposed: element 4j + 2r + i of a thread's tile is query 8j + 2 (lane % 4) + i and
 * key r of the thread. The second key comes 8 keys after the first. A set of elements is stored as
 * a word: an element is bit 16i + 2j + r.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_OPTIONS_CUH
#define FA_KERNELS_BACKWARD_SM90_OPTIONS_CUH

#include "backward_sm90/config.cuh"
#include "backward_sm90/pipeline.cuh"
#include "backward_sm90/rows.cuh"
#include "backward_sm90/work.cuh"
#include "common/at_least_x2.cuh"
#include "common/rows.cuh"
#include "common/score_options.cuh"
#include "common/softmax.cuh"
#include "common/x2.cuh"
#include "ptx/convert.cuh"
#include "ptx/reduce.cuh"
#include "ptx/shared.cuh"

/* Whether an option is present. */
FA_DEVICE bool has_softcap(const fa_attention_params *p)
{
    return OPTIONS == FA_SM90_SOFTCAP || ((OPTIONS & FA_SM90_SOFTCAP) && p->softcap > 0.0f);
}

FA_DEVICE bool has_alibi(const fa_attention_params *p)
{
    return OPTIONS == FA_SM90_ALIBI || ((OPTIONS & FA_SM90_ALIBI) && p->alibi_slopes);
}

FA_DEVICE bool has_dropout(const fa_attention_params *p)
{
    return OPTIONS == FA_SM90_DROPOUT || ((OPTIONS & FA_SM90_DROPOUT) && p->dropout_threshold);
}

/* The factor of scores, and of the sums of the gradients of values. */
FA_DEVICE float inner_scale(const fa_attention_params *p)
{
    return has_softcap(p) ? p->scale / p->softcap : p->scale * FA_LOG2E;
}

FA_DEVICE float value_scale(const fa_attention_params *p)
{
    return WEIGHT_UNIT * (has_dropout(p) ? p->dropout_scale : 1.0f);
}

/* The options of a thread's elements of a tile. */
typedef struct tile_options {
    uint32_t sees;  /* pairs that are not hidden, except by a bias of -infinity */
    uint32_t keeps; /* those that dropout keeps */
    int query, key; /* the thread's first ones: in the sequence; in the block */
    int head;
    bool hides; /* whether some pair may be hidden from the warp */
} tile_options;

#if OPTIONS

#define BIT(j, r, i) (1u << (16 * (i) + 2 * (j) + (r)))

/* ---- What is seen ---------------------------------------------------------------------------- */

/* Bit 2j is set if the number 8j + i, j < 8, is less than `end`. */
FA_DEVICE uint32_t bits_before(int end, int i)
{
    const int count = (end - i + 7) >> 3;
    return 0x5555u & ((1u << 2 * (count < 0 ? 0 : count > 8 ? 8 : count)) - 1);
}

/* What queries see by position and lengths. */
FA_DEVICE uint32_t find_seen(const block_work *w, int query, int key)
{
    uint32_t sees = 0;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int own = key + 8 * r;
        const int from = w->first_query + own - query;
        const int end = w->end_query + own, last = (int)w->sequence.n_q;
        const int to = own < w->num_keys ? (end < last ? end : last) - query : -1;
#pragma unroll
        for (int i = 0; i < 2; i++)
            sees |= (bits_before(to, i) & ~bits_before(from, i)) << (16 * i + r);
    }
    return sees;
}

/* The sequence with the tile's head, for functions that get no other description of the tile. */
FA_DEVICE fa_tile sequence_of(const block_work *w, const tile_options *o)
{
    fa_tile t;
    t.batch = w->sequence.batch;
    t.head = o->head;
    return t;
}

/* The element of a bias or a mask for the thread's first query and key r. */
FA_DEVICE int64_t first_index(const fa_kernel_view *view, const block_work *w,
                              const tile_options *o, int r)
{
    const fa_tile t = sequence_of(w, o);
    return fa_score_index(view, &t, o->query, w->keys.first + o->key + 8 * r);
}

/* Clears the bits of elements that the mask hides. Elements that are hidden already are not
 * read. */
FA_DEVICE uint32_t read_mask(const fa_kernel_view *mask, const block_work *w, const tile_options *o)
{
    const int64_t step = mask->stride[2];
    uint32_t hidden = 0;
#pragma unroll 1
    for (int r = 0; r < 2; r++) {
        const uint8_t *from = (const uint8_t *)mask->data + first_index(mask, w, o, r);
        const uint32_t sees = o->sees >> r;
        uint32_t hides = 0;
#pragma unroll
        for (int j = 0; j < QUERIES / 8; j++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t shows = 1;
                if (sees & BIT(j, 0, i)) shows = from[i * step];
                if (shows == 0) hides |= BIT(j, 0, i);
            }
            from += 8 * step;
            __asm__ volatile(
                ""
                : "+l"(from)); /* keeps the compiler from holding an address for each */
        }
        hidden |= hides << r;
    }
    return o->sees & ~hidden;
}

/* ---- Dropout --------------------------------------------------------------------------------- */

/* Blocks of random bits that are computed at the same time: seven rounds follow each other, and a warp has no other work to
 * hide what each of them takes. */
enum { KEPT_AT_ONCE = HEAD_DIM == 128 ? 2 : HEAD_DIM == 64 ? 8 : 4 };

/* A block of random bits covers a query and both of a thread's keys, for two lanes that differ in
 * bit 2, whose keys are adjacent. So each of the two computes the blocks of every second query, i,
 * and they exchange their results. */
FA_DEVICE uint32_t find_kept(const fa_attention_params *p, const block_work *w,
                             const tile_options *o)
{
    const fa_tile t = sequence_of(w, o);
    const fa_dropout d = fa_dropout_of(p, &t);
    const int64_t key = w->keys.first + o->key;
    const int odd = o->key & 1;
    const bool upper = o->key & 16; /* blocks of keys begin at multiples of 32 */
    const uint32_t threshold = p->dropout_threshold * 0x10001u;
    uint32_t own = 0; /* bit 2j + r is for the even key, bit 16 + 2j + r for the odd one */
#pragma unroll KEPT_AT_ONCE
    for (int j = 0; j < QUERIES / 8; j++) {
        uint32_t block[4];
        fa_dropout_block(d.seed, d.offset, d.batch_head, o->query + 8 * j + odd, key >> 5,
                         (int)(key >> 1) & 3, block);
        const uint32_t first = fa_at_least_x2(upper ? block[2] : block[0], threshold),
                       second = fa_at_least_x2(upper ? block[3] : block[1], threshold);
        own = (own >> 2 & 0x3fff3fffu) | (first >> 1 & 0x40004000u) | (second & 0x80008000u);
    }
    const uint32_t theirs = __shfl_xor_sync(0xffffffffu, own, 4);
    return odd ? (own & 0xffff0000u) | theirs >> 16 : (own & 0xffffu) | theirs << 16;
}

/* ---- A tile ---------------------------------------------------------------------------------- */

/* The position of the thread's first elements. */
FA_DEVICE tile_options find_tile_place(const block_work *w, const tile_cursor *at, int consumer)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32;
    const tile_options o = {.query = at->tile * QUERIES + lane % 4 * 2,
                            .key = consumer * OWN_KEYS + warp * 16 + lane / 4,
                            .head = (int)w->sequence.head + at->head};
    return o;
}

/* The pairs of a tile that dropout keeps. */
FA_DEVICE uint32_t find_tile_kept(const fa_attention_params *p, const block_work *w,
                                  const tile_cursor *at, int consumer)
{
    const tile_options o = find_tile_place(w, at, consumer);
    return has_dropout(p) ? find_kept(p, w, &o) : ~0u;
}

/* hides: whether some query may not see some key. keeps: find_tile_kept. */
FA_DEVICE tile_options find_tile_options(const fa_attention_params *p, const block_work *w,
                                         const tile_cursor *at, int consumer, bool hides,
                                         uint32_t keeps)
{
    tile_options o = find_tile_place(w, at, consumer);
    /* Behind the last query TMA, or load_bias, gives a bias alone zeros, and the log-sum-exp is infinity. */
    const bool all = !hides || (HIDES && sees_all(w, consumer, at->tile) &&
                                (BIAS_ALONE || (at->tile + 1) * QUERIES <= w->sequence.n_q));
    o.sees = all ? ~0u : find_seen(w, o.query, o.key);
    o.keeps = keeps;
    o.hides = true;
    if (HIDES && !BIAS_ALONE && p->mask.data) o.sees = read_mask(&p->mask, w, &o);
    return o;
}

/* ---- Scores ---------------------------------------------------------------------------------- */

/* Queries whose options are applied together: 8 GROUP. */
#define GROUP (HEAD_DIM == 64 ? 8 : HEAD_DIM == 256 || OPTIONS == FA_SM90_SOFTCAP ? 1 : 2)

/* NaN for a key that is not finite. Its row in shared memory is 0, because it may be hidden from
 * some queries: their weights of it are 0, and 0 times NaN would be NaN. */
FA_DEVICE float find_poison(const shared_state *state, int key)
{
#if HIDES
    return state->bad_keys[key / 16] >> key % 16 & 1 ? NAN : 0.0f;
#else
    (void)state, (void)key;
    return 0.0f;
#endif
}

#if OPTIONS == FA_SM90_SOFTCAP

/* Replaces the scores of a tile by tanh. If none exceeds 0.75, as with most models, a polynomial takes half the time. */
FA_DEVICE void cap_tile(float *scores, float inner)
{
    float top[2] = {0.0f, 0.0f};
#pragma unroll
    for (int e = 0; e < SCORES; e++) top[e % 2] = fmaxf(top[e % 2], fabsf(scores[e]));
    if (__any_sync(0xffffffffu, !(fmaxf(top[0], top[1]) * fabsf(inner) <= 0.75f))) {
#pragma unroll
        for (int e = 0; e < SCORES; e++) scores[e] = fa_tanh_fast(scores[e] * inner);
        return;
    }
#pragma unroll
    for (int e = 0; e < SCORES; e++) scores[e] = fa_tanh_small(scores[e] * inner);
}

#endif

/* Replaces scores by exponents of 2. slopes: the derivative of the softcap. poison: NaN for a key
 * that is not finite. */
FA_DEVICE void cap_scores(const fa_attention_params *p, float *scores, float *slopes, float scale,
                          const float poison[2])
{
    const float cap = p->softcap * FA_LOG2E;
#if OPTIONS == FA_SM90_SOFTCAP
    (void)scale, (void)poison;
#pragma unroll
    for (int e = 0; e < 4 * GROUP; e++) { /* tanh, of cap_tile */
        slopes[e] = fmaf(-scores[e], scores[e], 1.0f);
        scores[e] *= cap;
    }
#else
#pragma unroll
    for (int e = 0; e < 4 * GROUP; e++) {
        scores[e] = HIDES ? fmaf(scores[e], scale, poison[e / 2 % 2]) : scores[e] * scale;
        slopes[e] = 1.0f;
    }
    if (!has_softcap(p)) return;
#pragma unroll
    for (int e = 0; e < 4 * GROUP; e++) {
        const float y = fa_tanh_fast(scores[e]);
        scores[e] = cap * y;
        slopes[e] = fmaf(-y, y, 1.0f);
    }
#endif
}

/* first: the first of the queries 8j, counted from the tile's first query. */
FA_DEVICE void add_alibi(const fa_attention_params *p, const block_work *w, const tile_options *o,
                         float *scores, int first)
{
    const int64_t batch = w->sequence.batch * p->alibi_batch_stride;
    const int center = saturate(w->sequence.diagonal - w->keys.first);
    const float factor = -FA_LOG2E * p->alibi_slopes[batch + o->head];
    const float distance = (float)(center + o->query - o->key);
#pragma unroll
    for (int e = 0; e < 4 * GROUP; e++)
        scores[e] = fa_alibi_score(scores[e], factor,
                                   distance + (float)(8 * (first + e / 4) + e % 2 - e / 2 % 2 * 8));
}

/* Elements of a 16-bit bias. The two elements that differ in i share word 2j + r. A bias that no
 * query sees is not read. */
FA_DEVICE void read_bias_x2(const fa_kernel_view *bias, const block_work *w, const tile_options *o,
                            uint32_t *x2)
{
    const int64_t step = bias->stride[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const uint16_t *from =
            (const uint16_t *)(const void *)bias->data + first_index(bias, w, o, r);
        if (step == 0) { /* all queries have the same */
            const bool sees = (o->sees & 0x55555555u << r) != 0;
            const uint32_t x = sees ? *from * 0x10001u : 0;
#pragma unroll
            for (int j = 0; j < QUERIES / 8; j++) x2[2 * j + r] = x;
            continue;
        }
#pragma unroll
        for (int j = 0; j < QUERIES / 8; j++) {
            const uint32_t low = o->sees & BIT(j, r, 0) ? from[0] : 0,
                           high = o->sees & BIT(j, r, 1) ? from[step] : 0;
            x2[2 * j + r] = low | high << 16;
            from += 8 * step;
            __asm__ volatile(
                ""
                : "+l"(from)); /* keeps the compiler from holding an address for each */
        }
    }
}

/* Adds elements that read_bias_x2, or another function, has loaded. */
FA_DEVICE void add_bias_x2(const uint32_t *x2, float *scores, int dtype)
{
#pragma unroll
    for (int n = 0; n < 2 * GROUP; n++) {
        const float2 x = fa_unpack_x2(x2[n], dtype);
        scores[2 * n] = fa_bias_score(scores[2 * n], x.x, FA_LOG2E);
        scores[2 * n + 1] = fa_bias_score(scores[2 * n + 1], x.y, FA_LOG2E);
    }
}

/* Whether a 32-bit bias is added before everything else: there is no softcap, and registers are
 * scarce. */
#define FLOATS_FIRST (OPTIONS == FA_SM90_BY_ROWS)

/* Replaces scores by exponents of 2, with a 32-bit bias, 16 of a thread's elements at a time. */
FA_DEVICE void add_float_bias(const fa_kernel_view *bias, const block_work *w,
                              const tile_options *o, float *scores, float scale)
{
    enum { AT_ONCE = 4 };
#pragma unroll
    for (int first = 0; first < QUERIES / 8; first += AT_ONCE) {
        float x[4 * AT_ONCE];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float *from = (const float *)(const void *)bias->data +
                                first_index(bias, w, o, r) + 8 * first * bias->stride[2];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
#pragma unroll
                for (int i = 0; i < 2; i++)
                    x[4 * j + 2 * r + i] =
                        o->sees & BIT(first + j, r, i) ? from[i * bias->stride[2]] : 0.0f;
                from += 8 * bias->stride[2];
                __asm__ volatile(
                    ""
                    : "+l"(from)); /* keeps the compiler from holding an address for each */
            }
        }
#pragma unroll
        for (int e = 0; e < 4 * AT_ONCE; e++) {
            float *to = scores + 4 * first + e;
            *to = fa_bias_score(*to * scale, x[e], FA_LOG2E);
        }
    }
}

/* The compiler knows dtype. A bias that no query sees is not read. */
FA_DEVICE void add_bias_of(const fa_kernel_view *bias, const block_work *w, const tile_options *o,
                           float *scores, int first, int dtype)
{
    const int size = fa_element_size(dtype);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const char *from = bias->data + first_index(bias, w, o, r) * size;
#pragma unroll
        for (int j = 0; j < GROUP; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float x = 0.0f;
                if (o->sees & BIT(first + j, r, i))
                    x = fa_load_element(from, dtype, (8 * (first + j) + i) * bias->stride[2]);
                float *to = scores + 4 * j + 2 * r + i;
                *to = fa_bias_score(*to, x, FA_LOG2E);
            }
    }
}

/* x2: the elements that read_bias_x2 has loaded, or NULL. */
FA_DEVICE void add_bias(const fa_kernel_view *bias, const block_work *w, const tile_options *o,
                        const uint32_t *x2, float *scores, int first)
{
    if (x2 && bias->dtype == FA_KERNEL_BFLOAT16)
        add_bias_x2(x2 + 2 * first, scores, FA_KERNEL_BFLOAT16);
    else if (!FLOATS_FIRST && x2 && bias->dtype == FA_KERNEL_FLOAT16)
        add_bias_x2(x2 + 2 * first, scores, FA_KERNEL_FLOAT16);
    else if (FLOATS_FIRST) add_bias_x2(x2 + 2 * first, scores, FA_KERNEL_FLOAT16);
    else if (!x2 && bias->dtype == FA_KERNEL_BFLOAT16)
        add_bias_of(bias, w, o, scores, first, FA_KERNEL_BFLOAT16);
    else if (!x2 && bias->dtype == FA_KERNEL_FLOAT16)
        add_bias_of(bias, w, o, scores, first, FA_KERNEL_FLOAT16);
    else add_bias_of(bias, w, o, scores, first, FA_KERNEL_FLOAT32);
}

/* ---- Weights and dS -------------------------------------------------------------------------- */

/* Replaces scores by two results: packed weights without those that are dropped, and weights times
 * the softcap's slope, from which dS is computed. bias_x2: a 16-bit bias that has been loaded, or
 * NULL. A hidden element has the weight 0, whatever its score and the log-sum-exp are. */
FA_DEVICE void weigh_with_options(const fa_attention_params *p, const shared_state *state,
                                  const block_work *w, const tile_options *o, uint32_t *bias_x2,
                                  float *scores, uint32_t *weights, float scale, uint32_t rows,
                                  bool hides)
{
    const float poison[2] = {find_poison(state, o->key), find_poison(state, o->key + 8)};
    float row[4];
#if OPTIONS == FA_SM90_SOFTCAP
    cap_tile(scores, scale);
#endif
    if (FLOATS_FIRST && p->bias.data && p->bias.dtype == FA_KERNEL_FLOAT32) {
        add_float_bias(&p->bias, w, o, scores, scale);
        scale = 1.0f;
#pragma unroll
        for (int n = 0; n < SCORES / 2; n++) bias_x2[n] = 0; /* the bias has been added */
    }
#pragma unroll
    for (int first = 0; first < QUERIES / 8; first += GROUP) {
        float *x = scores + 4 * first, slopes[4 * GROUP];
        cap_scores(p, x, slopes, scale, poison);
        if (has_alibi(p)) add_alibi(p, w, o, x, first);
        if (BIAS_ALONE) add_bias_x2(bias_x2 + 2 * first, x, ELEMENT);
        else if (HIDES && p->bias.data) add_bias(&p->bias, w, o, bias_x2, x, first);
#pragma unroll
        for (int j = 0; j < GROUP; j++) {
            if ((first + j) % 2 == 0) load_four_rows(row, rows + 32 * (uint32_t)(first + j));
            const float *lse = row + (first + j) % 2 * 2;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float kept[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const uint32_t bit = BIT(first + j, r, i);
                    float *y = x + 4 * j + 2 * r + i;
                    const float logit = hides ? fa_mask_score(*y, (o->sees & bit) != 0) : *y;
                    const float weight =
                        hides && logit == -INFINITY ? 0.0f : ptx_ex2(logit - lse[i]);
                    kept[i] = !has_dropout(p) || (o->keeps & bit) ? weight : 0.0f;
                    /* The slope of a hidden score may be NaN. */
                    const float slope = slopes[4 * j + 2 * r + i];
                    const bool slopes_are_1 = !(OPTIONS & FA_SM90_SOFTCAP);
                    *y = slopes_are_1 || (hides && weight == 0.0f) ? weight : weight * slope;
                }
                weights[2 * (first + j) + r] = fa_pack_x2(kept[0], kept[1]);
            }
        }
    }
}

#if BIAS_ALONE

/* Whether no element of a warp's bias is -infinity, and its consumer's keys are finite. */
FA_DEVICE bool shows_all_pairs(const shared_state *state, const tile_options *o,
                               const uint32_t *bias_x2)
{
    const uint16_t *bad_keys = &state->bad_keys[o->key / OWN_KEYS * (OWN_KEYS / 16)];
    /* Of a bias as unsigned numbers, -infinity is larger than all but NaN. */
    uint32_t most = 0;
#pragma unroll
    for (int n = 0; n < SCORES / 2; n++) most = ptx_max_u16x2(most, bias_x2[n]);
    const bool shows = (most & 0xffffu) < FA_NEGATIVE_INFINITY && most >> 16 < FA_NEGATIVE_INFINITY;
    const bool finite = (bad_keys[0] | bad_keys[1] | bad_keys[2] | bad_keys[3]) == 0;
    return !__any_sync(0xffffffffu, !finite || !shows);
}

/* The same as weigh_with_options for such pairs, with the same bits. masked: some may be hidden by position. */
FA_DEVICE void weigh_with_bias(const uint32_t *bias_x2, float *scores, uint32_t *weights,
                               float scale, uint32_t rows, uint32_t sees, bool masked)
{
    float row[4];
#pragma unroll
    for (int j = 0; j < QUERIES / 8; j++) {
        if (j % 2 == 0) load_four_rows(row, rows + 32 * (uint32_t)j);
        const float *lse = row + j % 2 * 2;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float *x = scores + 4 * j + 2 * r;
            const float2 bias = fa_unpack_x2(bias_x2[2 * j + r], ELEMENT);
            x[0] = ptx_ex2(fa_bias_score(x[0] * scale, bias.x, FA_LOG2E) - lse[0]);
            x[1] = ptx_ex2(fa_bias_score(x[1] * scale, bias.y, FA_LOG2E) - lse[1]);
            if (masked && !(sees & BIT(j, r, 0))) x[0] = 0.0f;
            if (masked && !(sees & BIT(j, r, 1))) x[1] = 0.0f;
            weights[2 * j + r] = fa_pack_x2(x[0], x[1]);
        }
    }
}

/* Replaces scores of a tile by weights, as weigh_with_options does. shows: shows_all_pairs. o->hides becomes whether some pair may be
 * hidden. */
FA_DEVICE void weigh_with_bias_alone(const fa_attention_params *p, const shared_state *state,
                                     const block_work *w, tile_options *o, bool shows,
                                     uint32_t *bias_x2, float *scores, uint32_t *weights,
                                     float scale, uint32_t rows)
{
    o->hides = !shows || __any_sync(0xffffffffu, o->sees != ~0u);
    if (!o->hides) weigh_with_bias(bias_x2, scores, weights, scale, rows, ~0u, false);
    else if (shows) weigh_with_bias(bias_x2, scores, weights, scale, rows, o->sees, true);
    else weigh_with_options(p, state, w, o, bias_x2, scores, weights, scale, rows, true);
}

#endif

/* Applies dropout to dP. The product of a dropped weight and its dP is 0, whatever dP is. */
FA_DEVICE void drop_gradients(const fa_attention_params *p, const tile_options *o, float *dp)
{
    if (!has_dropout(p)) return;
#pragma unroll
    for (int e = 0; e < SCORES; e++)
        dp[e] = o->keeps & BIT(e / 4, e / 2 % 2, e % 2) ? dp[e] * p->dropout_scale : 0.0f;
}

/* ---- The gradient of the bias ---------------------------------------------------------------- */

/* Stores dS of a tile in dbias, or adds it to the sums of dbias. The compiler knows dtype and adds.
 * A sequence that is longer than dbias, which the API forbids, is cut. */
FA_DEVICE void put_bias_gradients(const fa_backward_params *p, const fa_kernel_view *dbias,
                                  const block_work *w, const tile_options *o, const float *ds,
                                  int dtype, bool adds)
{
    const int size = fa_element_size(dtype);
    const int queries = (int)(fa_min64(w->sequence.n_q, p->dbias_shape[2]) - o->query);
    const int64_t keys =
        fa_min64(w->num_keys, p->dbias_shape[3] - w->keys.first); /* from the block's first on */
    const int64_t step = dbias->stride[2] * size;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (o->key + 8 * r >= keys) continue;
        char *to = dbias->data + first_index(dbias, w, o, r) * size;
#pragma unroll
        for (int j = 0; j < QUERIES / 8; j++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float x = ds[4 * j + 2 * r + i];
                char *own = to + i * step;
                if (8 * j + i >= queries) continue;
                if (!adds) fa_store_element(own, dtype, 0, x);
                else if (x != 0.0f) ptx_reduce_add((float *)(void *)own, x);
            }
            to += 8 * step;
            __asm__ volatile(""
                             : "+l"(to)); /* keeps the compiler from holding an address for each */
        }
    }
}

FA_DEVICE void put_dbias(const fa_backward_params *p, const block_work *w, const tile_options *o,
                         const float *ds)
{
    if (p->dbias_sums.data)
        put_bias_gradients(p, &p->dbias_sums, w, o, ds, FA_KERNEL_FLOAT32, true);
    else if (p->dbias.dtype == FA_KERNEL_BFLOAT16)
        put_bias_gradients(p, &p->dbias, w, o, ds, FA_KERNEL_BFLOAT16, false);
    else if (p->dbias.dtype == FA_KERNEL_FLOAT16)
        put_bias_gradients(p, &p->dbias, w, o, ds, FA_KERNEL_FLOAT16, false);
    else put_bias_gradients(p, &p->dbias, w, o, ds, FA_KERNEL_FLOAT32, false);
}

#endif

#endif
