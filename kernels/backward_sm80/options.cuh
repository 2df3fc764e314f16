/*
 * The options that change scores or weights: softcap, ALiBi, bias, boolean mask, dropout. The
 * kernel is compiled without any option, or for all of them, each of which may be present or not.
 *
 * A set of elements is stored as a word: element [m][n][2r + i] is bit BIT(n, m, r, i).
 */
#ifndef FA_KERNELS_BACKWARD_SM80_OPTIONS_CUH
#define FA_KERNELS_BACKWARD_SM80_OPTIONS_CUH

#include "backward_sm80/multiply.cuh"
#include "backward_sm80/split.cuh"
#include "backward_sm80/work.cuh"
#include "common/score_options.cuh"
#include "common/softmax.cuh"
#include "common/x2.cuh"
#include "ptx/convert.cuh"
#include "ptx/reduce.cuh"
#include "ptx/shared.cuh"

/* The factor by which scores become their true values. */
#define INVERSE_SCORE_UNIT (HIGH_LOW ? 1.0f / SCORE_UNIT : 1.0f)

FA_DEVICE bool has_softcap(const fa_attention_params *p)
{
    return OPTIONS && !BIAS_ALONE && p->softcap > 0.0f;
}

FA_DEVICE bool has_dropout(const fa_attention_params *p)
{
    return OPTIONS && !BIAS_ALONE && p->dropout_threshold;
}

FA_DEVICE bool has_mask(const fa_attention_params *p) { return !BIAS_ALONE && p->mask.data; }

/* The factor of scores, and of the sums of the gradients of values. */
FA_DEVICE float inner_scale(const fa_attention_params *p)
{
    return has_softcap(p) ? p->scale / p->softcap * INVERSE_SCORE_UNIT
                          : p->scale * (FA_LOG2E * INVERSE_SCORE_UNIT);
}

/* The factor of dP in dS. In float32 it is a parameter, so it takes no register. */
FA_DEVICE float ds_unit(const fa_backward_sm80_params *s)
{
    return HIGH_LOW ? s->ds_unit : WEIGHT_UNIT;
}

FA_DEVICE float value_scale(const fa_attention_params *p)
{
    return WEIGHT_UNIT * (has_dropout(p) ? p->dropout_scale : 1.0f);
}

/* 2^exponent. Errors of one product may raise an exponent far above 0 if logits are large; a weight
 * must be finite anyway. */
FA_DEVICE float find_weight(float exponent)
{
    return ptx_ex2(HIGH_LOW && exponent > 1.0f ? 1.0f : exponent);
}

#if OPTIONS

/* The options of a thread's scores, of a tile or of a chunk of it. */
typedef struct tile_options {
    /* Pairs of a query and a key that are not hidden, except by a bias of -infinity. */
    uint32_t sees;
    uint32_t keeps; /* those that dropout keeps */
    int query, key; /* the thread's first ones: in the sequence; in the block */
    int head;
} tile_options;

#define BIT(n, m, r, i) (1u << (16 * (i) + 4 * (n) + 2 * (m) + (r)))

/* ---- What is seen ---------------------------------------------------------------------------- */

/* Bit 4n is set if the number 8n + i, n < 4, is less than `end`. */
FA_DEVICE uint32_t bits_before(int end, int i)
{
    const int count = (end - i + 7) >> 3;
    return 0x1111u & ((1u << 4 * (count < 0 ? 0 : count > 4 ? 4 : count)) - 1);
}

/* What queries see by position and lengths. */
FA_DEVICE uint32_t find_seen(const block_work *w, int query, int key)
{
    uint32_t sees = 0;
#pragma unroll
    for (int mr = 0; mr < WEIGHT_M_TILES * 2; mr++) {
        const int own = key + 8 * mr;
        const int from = w->first_query + own - query;
        const int end = w->end_query + own, last = (int)w->sequence.n_q;
        const int to = own < w->num_keys ? (end < last ? end : last) - query : -1;
#pragma unroll
        for (int i = 0; i < 2; i++)
            sees |= (bits_before(to, i) & ~bits_before(from, i)) << (16 * i + mr);
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

/* The element of a bias or a mask for the thread's first query and key 8 mr. */
FA_DEVICE int64_t first_index(const fa_kernel_view *view, const block_work *w,
                              const tile_options *o, int mr)
{
    const fa_tile t = sequence_of(w, o);
    return fa_score_index(view, &t, o->query, w->keys.first + o->key + 8 * mr);
}

/* Clears the bits of elements that the mask hides. Elements that are hidden already are not
 * read. */
FA_DEVICE uint32_t read_mask(const fa_kernel_view *mask, const block_work *w, const tile_options *o)
{
    uint32_t sees = o->sees;
#pragma unroll
    for (int mr = 0; mr < WEIGHT_M_TILES * 2; mr++) {
        const uint8_t *first = (const uint8_t *)mask->data + first_index(mask, w, o, mr);
#pragma unroll
        for (int n = 0; n < WEIGHT_N_TILES; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t bit = BIT(n, 0, mr, i);
                uint32_t shows = 0;
                if (o->sees & bit) shows = first[(8 * n + i) * mask->stride[2]];
                if (shows == 0) sees &= ~bit;
            }
    }
    return sees;
}

/* ---- Dropout --------------------------------------------------------------------------------- */

/* A block of random bits covers a query and all of a thread's keys, for two lanes that differ in
 * bit 2, whose keys are adjacent. So each of the two computes the blocks of every second query, i,
 * and they exchange their results. */
FA_DEVICE uint32_t find_kept(const fa_attention_params *p, const block_work *w,
                             const tile_options *o)
{
    const fa_tile t = sequence_of(w, o);
    const fa_dropout d = fa_dropout_of(p, &t);
    const int64_t key = w->keys.first + o->key;
    const int odd = o->key & 1;
    uint32_t own = 0, other = 0;
#pragma unroll 1
    for (int n = 0; n < WEIGHT_N_TILES; n++) {
        uint32_t block[4];
        fa_dropout_block(d.seed, d.offset, d.batch_head, o->query + 8 * n + odd, key >> 5,
                         (int)(key >> 1) & 3, block);
#pragma unroll
        for (int mr = 0; mr < WEIGHT_M_TILES * 2; mr++) {
            const uint32_t word = WEIGHT_M_TILES == 1 && key & 16 ? block[2 + mr % 2] : block[mr];
            const uint32_t low = (word & 0xffffu) >= p->dropout_threshold,
                           high = (word >> 16) >= p->dropout_threshold;
            own |= (odd ? high : low) << (4 * n + mr);
            other |= (odd ? low : high) << (4 * n + mr);
        }
    }
    const uint32_t theirs = __shfl_xor_sync(0xffffffffu, other, 4);
    return odd ? theirs | own << 16 : own | theirs << 16;
}

/* ---- A tile ---------------------------------------------------------------------------------- */

/* query, key: the thread's first ones. */
FA_DEVICE tile_options find_tile_options(const fa_attention_params *p, const block_work *w,
                                         int head, int query, int key)
{
    tile_options o;
    o.query = query;
    o.key = key;
    o.head = (int)w->sequence.head + head;
    o.sees = find_seen(w, o.query, o.key);
    o.keeps = ~0u; /* until scores are known: find_kept takes time */
    if (has_mask(p) && p->bias.data) o.sees = read_mask(&p->mask, w, &o);
    return o;
}

/* ---- Scores ---------------------------------------------------------------------------------- */

/* Scores whose options are applied together: fragment m of the keys, and those of the queries from
 * n on. */
enum { GROUP = WEIGHT_N_TILES < 2 ? WEIGHT_N_TILES : 2 };

typedef struct score_group {
    float (*s)[4]; /* the first fragment of GROUP */
    int m, n;
} score_group;

/* NaN for a key that is not finite. Its row in shared memory is 0, because it may be hidden from
 * some queries: their weights of it are 0, and 0 times NaN would be NaN. */
FA_DEVICE float find_poison(const block_work *w, int key) { return w->bad_keys[key] ? NAN : 0.0f; }

/* Replaces scores by exponents of 2. slopes: the derivative of the softcap. */
FA_DEVICE void cap_scores(const fa_attention_params *p, const block_work *w, const tile_options *o,
                          const score_group *g, float slopes[GROUP][4], float scale)
{
    const float cap = p->softcap * FA_LOG2E;
    const float poison[2] = {find_poison(w, o->key + 16 * g->m),
                             find_poison(w, o->key + 16 * g->m + 8)};
#pragma unroll
    for (int e = 0; e < 4 * GROUP; e++) {
        g->s[e / 4][e % 4] = fmaf(g->s[e / 4][e % 4], scale, poison[e / 2 % 2]);
        slopes[e / 4][e % 4] = 1.0f;
    }
    if (!has_softcap(p)) return;
#pragma unroll
    for (int e = 0; e < 4 * GROUP; e++) {
        const float y = fa_tanh_fast(g->s[e / 4][e % 4]);
        g->s[e / 4][e % 4] = cap * y;
        slopes[e / 4][e % 4] = fmaf(-y, y, 1.0f);
    }
}

FA_DEVICE void add_alibi(const fa_attention_params *p, const block_work *w, const tile_options *o,
                         const score_group *g)
{
    const int64_t batch = w->sequence.batch * p->alibi_batch_stride;
    const int center = saturate(w->sequence.diagonal - w->keys.first);
    const float factor = -FA_LOG2E * p->alibi_slopes[batch + o->head];
    const int first = center + o->query + 8 * g->n - o->key - 16 * g->m;
#pragma unroll
    for (int e = 0; e < 4 * GROUP; e++) {
        const int distance = first + 8 * (e / 4) + e % 2 - e / 2 % 2 * 8;
        g->s[e / 4][e % 4] = fa_alibi_score(g->s[e / 4][e % 4], factor, (float)distance);
    }
}

/* The bias of the thread's scores as it is in memory, a word for each element [m][n][2r + i]; without a bias the
 * mask. It is loaded before the products that take place meanwhile. */
typedef struct tile_bias {
    uint32_t at[WEIGHT_M_TILES][WEIGHT_N_TILES][4];
} tile_bias;

/* The compiler knows the size of an element. What no query sees is not read. */
FA_DEVICE void load_bias_of(tile_bias *to, const fa_kernel_view *bias, const block_work *w,
                            const tile_options *o, int size)
{
#pragma unroll
    for (int mr = 0; mr < WEIGHT_M_TILES * 2; mr++) {
        const char *from = bias->data + first_index(bias, w, o, mr) * size;
#pragma unroll
        for (int n = 0; n < WEIGHT_N_TILES; n++, from += 8 * bias->stride[2] * size)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const char *x = from + i * bias->stride[2] * size;
                uint32_t *word = &to->at[mr / 2][n][mr % 2 * 2 + i];
                *word = 0;
                if (!(o->sees & BIT(n, 0, mr, i))) continue;
                *word = size == 4   ? *(const uint32_t *)(const void *)x
                        : size == 2 ? *(const uint16_t *)(const void *)x
                                    : *(const uint8_t *)(const void *)x;
            }
    }
}

FA_DEVICE void load_bias(tile_bias *to, const fa_attention_params *p, const block_work *w,
                         const tile_options *o)
{
    if (BIAS_ALONE) load_bias_of(to, &p->bias, w, o, 4);
    else if (!p->bias.data) {
        if (p->mask.data) load_bias_of(to, &p->mask, w, o, 1);
    } else if (p->bias.dtype == FA_KERNEL_FLOAT32) load_bias_of(to, &p->bias, w, o, 4);
    else load_bias_of(to, &p->bias, w, o, 2);
}

/* Hides what a mask without a bias hides. */
FA_DEVICE void apply_loaded_mask(const fa_attention_params *p, const tile_bias *mask,
                                 tile_options *o)
{
    if (!has_mask(p) || p->bias.data) return;
#pragma unroll
    for (int i = 0; i < WEIGHT_M_TILES * WEIGHT_N_TILES * 4; i++) {
        const int m = i / 4 / WEIGHT_N_TILES, n = i / 4 % WEIGHT_N_TILES, e = i % 4;
        if (mask->at[m][n][e] == 0) o->sees &= ~BIT(n, m, e / 2, e % 2);
    }
}

/* The compiler knows dtype. */
FA_DEVICE void add_bias_of(const tile_bias *bias, const score_group *g, int dtype)
{
#pragma unroll
    for (int e = 0; e < 4 * GROUP; e++) {
        const uint32_t word = bias->at[g->m][g->n + e / 4][e % 4];
        const float x = dtype == FA_KERNEL_FLOAT32    ? fa_bits_float(word)
                        : dtype == FA_KERNEL_BFLOAT16 ? fa_bits_float(word << 16)
                                                      : ptx_half_to_float((uint16_t)word);
        g->s[e / 4][e % 4] = fa_bias_score(g->s[e / 4][e % 4], x, FA_LOG2E);
    }
}

FA_DEVICE void add_bias(const fa_attention_params *p, const tile_bias *bias, const score_group *g)
{
    if (BIAS_ALONE) add_bias_of(bias, g, FA_KERNEL_FLOAT32);
    else if (p->bias.dtype == FA_KERNEL_BFLOAT16) add_bias_of(bias, g, FA_KERNEL_BFLOAT16);
    else if (p->bias.dtype == FA_KERNEL_FLOAT16) add_bias_of(bias, g, FA_KERNEL_FLOAT16);
    else add_bias_of(bias, g, FA_KERNEL_FLOAT32);
}

/* ---- Weights and dS -------------------------------------------------------------------------- */

/* Replaces scores by logits, as exponents of 2. slopes: the derivative of the softcap. */
FA_DEVICE void make_logits(const fa_attention_params *p, const block_work *w, const tile_options *o,
                           const tile_bias *bias, const score_group *g, float slopes[GROUP][4],
                           float scale)
{
    cap_scores(p, w, o, g, slopes, scale);
    if (!BIAS_ALONE && p->alibi_slopes) add_alibi(p, w, o, g);
    if (BIAS_ALONE || p->bias.data) add_bias(p, bias, g);
}

/* A hidden element has the weight 0, whatever its score and the log-sum-exp are. */
FA_DEVICE float weigh_score(float score, bool sees, float lse)
{
#if THREE_PRODUCTS
    score =
        fa_bits_float(fa_opaque(__float_as_uint(score))); /* the same bits in all kernels: no fma */
#endif
    const float logit = fa_mask_score(score, sees);
    return logit == -INFINITY ? 0.0f : find_weight(logit - lse);
}

/* Replaces scores by two results: packed weights without those that are dropped, and weights times
 * the softcap's slope, from which dS is computed. */
FA_DEVICE void weigh_group(const tile_options *o, const score_group *g, float slopes[GROUP][4],
                           fa_weights *weights, uint32_t rows, uint32_t factors)
{
#pragma unroll
    for (int j = 0; j < GROUP; j++) {
        const uint4 two = ptx_ld_shared_v4(rows + 64 * (uint32_t)(g->n + j));
        const float lse[2] = {fa_bits_float(two.x), fa_bits_float(two.z)};
#if THREE_PRODUCTS
        const float2 corrections = ptx_ld_shared_f32x2(factors + 32 * (uint32_t)(g->n + j));
#else
        (void)factors;
#endif
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float kept[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t bit = BIT(g->n + j, g->m, r, i);
                float *y = &g->s[j][2 * r + i];
                float weight = weigh_score(*y, (o->sees & bit) != 0, lse[i]);
#if THREE_PRODUCTS
                weight *= i ? corrections.y : corrections.x;
#endif
                kept[i] = o->keeps & bit ? weight : 0.0f;
                /* The slope of a hidden score may be NaN. */
                *y = weight == 0.0f ? 0.0f : weight * slopes[j][2 * r + i];
            }
#if HIGH_LOW
            weights->at[g->m][g->n + j][r] = __float_as_uint(kept[0]);
            weights->at[g->m][g->n + j][2 + r] = __float_as_uint(kept[1]);
#else
            weights->at[g->m][g->n + j][r] = fa_pack_x2(kept[0], kept[1]);
#endif
        }
    }
}

FA_DEVICE void weigh_with_options(const fa_attention_params *p, const block_work *w,
                                  const tile_options *o, const tile_bias *bias, fa_scores *scores,
                                  fa_weights *weights, float scale, uint32_t rows, uint32_t factors)
{
#pragma unroll
    for (int i = 0; i < WEIGHT_M_TILES * WEIGHT_N_TILES / GROUP; i++) {
        const int m = i / (WEIGHT_N_TILES / GROUP), n = i % (WEIGHT_N_TILES / GROUP) * GROUP;
        const score_group g = {&scores->at[m][n], m, n};
        float slopes[GROUP][4];
        make_logits(p, w, o, bias, &g, slopes, scale);
        weigh_group(o, &g, slopes, weights, rows, factors);
    }
}

/* Applies dropout to dP. The product of a dropped weight and its dP is 0, whatever dP is. */
FA_DEVICE void drop_gradients(const fa_attention_params *p, const tile_options *o, fa_scores *dp)
{
    if (!has_dropout(p)) return;
#pragma unroll
    for (int m = 0; m < WEIGHT_M_TILES; m++)
#pragma unroll
        for (int e = 0; e < 4 * WEIGHT_N_TILES; e++)
            dp->at[m][e / 4][e % 4] = o->keeps & BIT(e / 4, m, e / 2 % 2, e % 2)
                                          ? dp->at[m][e / 4][e % 4] * p->dropout_scale
                                          : 0.0f;
}

#if HIGH_LOW

/* ---- The gradient of the bias ---------------------------------------------------------------- */

/* Stores dS of a tile in a float32 dbias, or adds it. factor: of dS. A sequence that is longer than dbias, which the API
 * forbids, is cut. */
FA_DEVICE void put_dbias(const fa_backward_params *p, const block_work *w, const tile_options *o,
                         const fa_scores *ds, float factor)
{
    const bool adds = p->dbias_sums.data;
    const int queries = (int)(fa_min64(w->sequence.n_q, p->dbias_shape[2]) - o->query);
    const int keys = (int)fa_min64(w->num_keys, p->dbias_shape[3] - w->keys.first) - o->key;
    const int64_t step = p->dbias.stride[2];
#pragma unroll
    for (int mr = 0; mr < WEIGHT_M_TILES * 2; mr++) {
        if (8 * mr >= keys) continue;
        float *to = (float *)(void *)p->dbias.data + first_index(&p->dbias, w, o, mr);
#pragma unroll
        for (int n = 0; n < WEIGHT_N_TILES; n++, to += 8 * step)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float x = ds->at[mr / 2][n][mr % 2 * 2 + i] * factor;
                if (8 * n + i >= queries) continue;
                if (adds) ptx_reduce_add(to + i * step, x);
                else to[i * step] = x;
            }
    }
}

#endif

#endif

#endif
