/*
 * The options that change scores and weights, for forward_tf32_sm90 and forward_f16x3_sm90. Scores
 * are scaled before any option is applied, because in the latter each row and each tile has its own
 * unit. After that they are logits in float32, and options apply as in float32 arithmetic
 * (common/score_fragments.cuh). All branches test parameters, so that the compiler knows that all warps
 * take the same path.
 */
#ifndef FA_KERNELS_FORWARD_SM90_FLOAT32_OPTIONS_CUH
#define FA_KERNELS_FORWARD_SM90_FLOAT32_OPTIONS_CUH

#include "forward_sm90/config.cuh"
#include "common/device.cuh"
#include "common/reduce.cuh"
#include "common/score_fragments.cuh"
#include "common/softmax.cuh"
#include "forward_sm90/cursor.cuh"
#include "forward_sm90/options.cuh"
#include "forward_sm90/softmax.cuh"
#include "forward_sm90/warp.cuh"
#include "forward_sm90/work_tile.cuh"

/* The factor of a score, besides the units of its row and its tile. Without options the score becomes an
 * exponent of 2; with options, a logit or the argument of the softcap's tanh. */
FA_DEVICE float score_factor(const fa_attention_params *p, const work_tile *w,
                             const tile_limits *limits)
{
#if OPTIONS
    (void)limits;
    return p->softcap > 0.0f ? w->inner : fa_effective_scale(p, &w->query_tile);
#else
    (void)p, (void)w;
    return limits->scale;
#endif
}

#if OPTIONS == FA_SM90_FLOAT32_ALL

FA_DEVICE void scale_rows_of_scores(float *s, const float *unit)
{
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) s[i] *= unit[i / 2 % 2];
}

/* ---- Softcap --------------------------------------------------------------------------------- */

/* If no score of the warp exceeds 0.75 of the cap, the series is enough. */
FA_DEVICE void cap_exactly(float *s, float cap)
{
    if (__any_sync(0xffffffff, !(max_absolute_score(s) < 0.75f))) {
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) s[i] = cap * fa_tanh(s[i]);
        return;
    }
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) s[i] = cap * fa_tanh_series(s[i]);
}

/* ---- Bias and boolean mask ------------------------------------------------------------------- */

/* Whether two neighbours can be loaded at once, in both rows and all lanes: the warp sees all keys
 * of the tile, the last of which is number KEYS - 7 of a lane's, and they are aligned. */
FA_DEVICE bool is_whole(const fa_fragment_row *rows, const char *const *first, int64_t stride,
                        int size)
{
    bool whole = stride == 1;
#pragma unroll
    for (int r = 0; r < 2; r++)
        whole = whole && rows[r].lo <= 0 && rows[r].hi > KEYS - 7 &&
                (uintptr_t)first[r] % (uintptr_t)(2 * size) == 0;
    return !__any_sync(0xffffffff, !whole);
}

#if LOADS_EARLY

typedef enum early_kind {
    EARLY_NOTHING,
    BIAS_OF_SCORES, /* float32: a word for each score */
    BIAS_OF_PAIRS,  /* 16 bits: a word for scores 2i and 2i + 1 */
    MASK_OF_PAIRS   /* the same */
} early_kind;

/* The bias of a key tile's scores as it is in memory; without a bias the mask. It is loaded before the products that take
 * place meanwhile. */
typedef struct early_words {
    early_kind kind;
    uint32_t at[KEYS / 2];
} early_words;

FA_DEVICE void find_bias_rows(const fa_attention_params *p, const work_tile *w, int tile,
                              int consumer, fa_fragment_row rows[2], const char *first[2])
{
    const int column = tile * KEYS + (int)threadIdx.x % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        rows[r] = find_fragment_row(p, w, consumer, r, column);
        first[r] =
            rows[r].logit.bias + rows[r].j * p->bias.stride[3] * fa_element_size(p->bias.dtype);
    }
}

/* Scores of keys that a row does not see are hidden afterwards: their bias is not read. */
FA_DEVICE void load_bias_of_scores(early_words *bias, const fa_fragment_row *rows,
                                   const char *const *first, int64_t stride)
{
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) {
        const int r = i / 2 % 2, key = i / 4 * 8 + i % 2;
        bias->at[i] = 0;
        if (key >= rows[r].lo && key < rows[r].hi)
            bias->at[i] = ((const uint32_t *)(const void *)first[r])[key * stride];
    }
}

FA_DEVICE void find_mask_rows(const fa_attention_params *p, const work_tile *w, int tile,
                              int consumer, fa_fragment_row rows[2], const char *first[2])
{
    const int column = tile * KEYS + (int)threadIdx.x % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        rows[r] = find_fragment_row(p, w, consumer, r, column);
        first[r] = (const char *)rows[r].logit.mask + rows[r].j * p->mask.stride[3];
    }
}

FA_DEVICE void load_early_mask(const fa_attention_params *p, const work_tile *w, int tile,
                               int consumer, early_words *mask)
{
    fa_fragment_row rows[2];
    const char *first[2];
    if (!MASKS_EARLY || !p->mask.data) return;
    find_mask_rows(p, w, tile, consumer, rows, first);
    if (!is_whole(rows, first, p->mask.stride[3], 1)) return;
    mask->kind = MASK_OF_PAIRS;
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++)
        mask->at[i] = *(const uint16_t *)(const void *)(first[i % 2] + i / 2 * 8);
}

/* Loads the bias of a tile, unless it has 16 bits and is not in whole pairs; without a bias the mask, if it is in whole
 * pairs. All loads are in flight at the same time. */
FA_DEVICE void load_early(const fa_attention_params *p, const work_tile *w, int tile, int consumer,
                          early_words *bias)
{
    fa_fragment_row rows[2];
    const char *first[2];
    bias->kind = EARLY_NOTHING;
    if (!HAS_BIAS || !p->bias.data) {
        load_early_mask(p, w, tile, consumer, bias);
        return;
    }
    find_bias_rows(p, w, tile, consumer, rows, first);
    const int64_t stride = p->bias.stride[3];
    if (p->bias.dtype != FA_KERNEL_FLOAT32) {
        if (!is_whole(rows, first, stride, 2)) return;
        bias->kind = BIAS_OF_PAIRS;
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++)
            bias->at[i] = *(const uint32_t *)(const void *)(first[i % 2] + i / 2 * 16);
        return;
    }
    bias->kind = BIAS_OF_SCORES;
    if (!is_whole(rows, first, stride, 4)) {
        load_bias_of_scores(bias, rows, first, stride);
        return;
    }
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) {
        const uint2 two = *(const uint2 *)(const void *)(first[i % 2] + i / 2 * 32);
        bias->at[2 * i] = two.x, bias->at[2 * i + 1] = two.y;
    }
}

/* A bias of 16 bits that is not in whole pairs. The compiler knows dtype. */
FA_DEVICE void add_late_bias(const fa_attention_params *p, const work_tile *w, float *s, int tile,
                             int consumer, int dtype)
{
    fa_fragment_row rows[2];
    const char *first[2];
    find_bias_rows(p, w, tile, consumer, rows, first);
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (!fa_sees_nothing(&rows[r]))
            fa_add_bias_of(s, r, &rows[r], first[r], p->bias.stride[3], 1.0f, dtype, false);
}

FA_DEVICE void add_bias_of_tile(const fa_attention_params *p, const work_tile *w, float *s,
                                const early_words *bias, int tile, int consumer)
{
    const int dtype = p->bias.dtype;
    if (bias->kind == BIAS_OF_SCORES) {
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++)
            s[i] = fa_bias_score(s[i], fa_bits_float(bias->at[i]), 1.0f);
    } else if (bias->kind == BIAS_OF_PAIRS) {
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++) {
            const float2 two = fa_unpack_x2(bias->at[i], dtype);
            s[2 * i] = fa_bias_score(s[2 * i], two.x, 1.0f);
            s[2 * i + 1] = fa_bias_score(s[2 * i + 1], two.y, 1.0f);
        }
    } else if (dtype == FA_KERNEL_BFLOAT16) {
        add_late_bias(p, w, s, tile, consumer, FA_KERNEL_BFLOAT16);
    } else {
        add_late_bias(p, w, s, tile, consumer, FA_KERNEL_FLOAT16);
    }
}

FA_DEVICE void apply_mask_of_tile(const fa_attention_params *p, const work_tile *w, float *s,
                                  const early_words *mask, int tile, int consumer)
{
    if (mask->kind == MASK_OF_PAIRS) {
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++) {
            s[2 * i] = fa_mask_score(s[2 * i], (mask->at[i] & 0xff) != 0);
            s[2 * i + 1] = fa_mask_score(s[2 * i + 1], mask->at[i] >> 8 != 0);
        }
        return;
    }
    const int column = tile * KEYS + (int)threadIdx.x % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const fa_fragment_row row = find_fragment_row(p, w, consumer, r, column);
        fa_apply_mask(&p->mask, s, r, &row);
    }
}

#else

/* Both rows' bias of a tile that they see completely: all loads are in flight at the same time. */
FA_DEVICE void add_whole_bias(float *s, const fa_fragment_row *rows, const char *const *first,
                              int dtype)
{
    float2 b[KEYS / 8][2];
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++)
        b[i / 2][i % 2] = fa_fetch_two(first[i % 2], dtype, 1, &rows[i % 2], i / 2, true);
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) {
        s[2 * i] = fa_bias_score(s[2 * i], b[i / 2][i % 2].x, 1.0f);
        s[2 * i + 1] = fa_bias_score(s[2 * i + 1], b[i / 2][i % 2].y, 1.0f);
    }
}

/* The compiler knows dtype. */
FA_DEVICE void add_bias_as(float *s, const fa_fragment_row *rows, const char *const *first,
                           int64_t stride, int dtype)
{
    if (is_whole(rows, first, stride, fa_element_size(dtype))) {
        add_whole_bias(s, rows, first, dtype);
        return;
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (!fa_sees_nothing(&rows[r]))
            fa_add_bias_of(s, r, &rows[r], first[r], stride, 1.0f, dtype, false);
}

FA_DEVICE void add_bias_of_rows(const fa_kernel_view *bias, float *s, const fa_fragment_row *rows)
{
    const int64_t stride = bias->stride[3];
    const int64_t step = stride * fa_element_size(bias->dtype);
    const char *const first[2] = {rows[0].logit.bias + rows[0].j * step,
                                  rows[1].logit.bias + rows[1].j * step};
    if (bias->dtype == FA_KERNEL_FLOAT32) add_bias_as(s, rows, first, stride, FA_KERNEL_FLOAT32);
    else if (bias->dtype == FA_KERNEL_BFLOAT16)
        add_bias_as(s, rows, first, stride, FA_KERNEL_BFLOAT16);
    else add_bias_as(s, rows, first, stride, FA_KERNEL_FLOAT16);
}

/* Both rows' mask of a tile that they see completely, two keys at a time. */
FA_DEVICE void apply_whole_mask(float *s, const char *const *first)
{
    uint32_t sees[KEYS / 4];
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) sees[i] = *(const uint16_t *)(first[i % 2] + i / 2 * 8);
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) {
        s[2 * i] = fa_mask_score(s[2 * i], (sees[i] & 0xff) != 0);
        s[2 * i + 1] = fa_mask_score(s[2 * i + 1], sees[i] >> 8 != 0);
    }
}

FA_DEVICE void apply_mask_of_rows(const fa_kernel_view *mask, float *s, const fa_fragment_row *rows)
{
    const int64_t stride = mask->stride[3];
    const char *const first[2] = {(const char *)rows[0].logit.mask + rows[0].j * stride,
                                  (const char *)rows[1].logit.mask + rows[1].j * stride};
    if (is_whole(rows, first, stride, 1)) {
        apply_whole_mask(s, first);
        return;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) fa_apply_mask(mask, s, r, &rows[r]);
}

#endif

/* ---- All options of a tile's scores ---------------------------------------------------------- */

/* Scores become logits, but for a bias and a mask. unit: of scores of the thread's rows, with score_factor. */
FA_DEVICE void apply_computed_options(const fa_attention_params *p, const work_tile *w, float *s,
                                      const float *unit, int column, int consumer)
{
    scale_rows_of_scores(s, unit);
    if (p->softcap > 0.0f) cap_exactly(s, p->softcap);
    if (p->alibi_slopes) {
        const fa_tile *t = &w->query_tile;
        const int center = (int)saturate(t->first + t->diagonal - w->first_key);
#pragma unroll
        for (int r = 0; r < 2; r++)
            fa_add_alibi(s, r, w->slope, (float)(center + row_of(consumer, r) - column));
    }
}

#if LOADS_EARLY

/* Scores become logits. early: the tile's. */
FA_DEVICE void apply_options(const fa_attention_params *p, const work_tile *w, float *s,
                             const float *unit, const early_words *early, int tile, int consumer)
{
    apply_computed_options(p, w, s, unit, tile * KEYS + (int)threadIdx.x % 4 * 2, consumer);
    if (HAS_BIAS && p->bias.data) add_bias_of_tile(p, w, s, early, tile, consumer);
    if (p->mask.data) apply_mask_of_tile(p, w, s, early, tile, consumer);
}

#else

/* Scores become logits. */
FA_DEVICE void apply_options(const fa_attention_params *p, const work_tile *w, float *s,
                             const float *unit, int tile, int consumer)
{
    const int column = tile * KEYS + (int)threadIdx.x % 4 * 2;
    apply_computed_options(p, w, s, unit, column, consumer);
    if (!p->bias.data && !p->mask.data) return;
    const fa_fragment_row rows[2] = {find_fragment_row(p, w, consumer, 0, column),
                                     find_fragment_row(p, w, consumer, 1, column)};
    if (p->bias.data) add_bias_of_rows(&p->bias, s, rows);
    if (p->mask.data) apply_mask_of_rows(&p->mask, s, rows);
}

#endif

/* ---- Softmax --------------------------------------------------------------------------------- */

/* Raises the bases to this tile's max. Sets rescale, by which the outputs so far must be multiplied;
 * sums are multiplied here. A row that has seen no key keeps NO_KEY_SEEN. */
FA_DEVICE void raise_row_bases(const float *s, row_state *rows, float *rescale)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float base = fmaxf(rows->base[r], fa_max_over_lanes(max_of_scores(s, r), 4));
        rescale[r] = ptx_ex2((rows->base[r] - base) * FA_LOG2E);
        rows->base[r] = base;
        rows->sum[r] *= rescale[r];
#if EXACT_SUMS
        rows->rest[r] *= rescale[r];
#endif
    }
}

/* Logits become weights, which are added to the rows' sums. Logits are rounded before the base is
 * subtracted: in one fused multiply-add, a huge logit would differ from the base that is equal to it. */
FA_DEVICE void weigh_rows(float *s, row_state *rows)
{
    partial_sums sums = {{{0, 0}, {0, 0}}};
    float sum[2];
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) {
        const float x = __uint_as_float(fa_opaque(__float_as_uint(s[i])));
        s[i] = fmaf(x - rows->base[i / 2 % 2], FA_LOG2E, HEADROOM);
    }
    exponentiate(s, 0, WEIGHTS_X2, &sums);
    add_partial_sums(&sums, sum);
    add_sums(rows, sum);
}

/* ---- Dropout --------------------------------------------------------------------------------- */

/* Clears the weights that dropout drops; the others are scaled with the outputs. 32 columns of a row use
 * bits from four blocks, one for each of the row's lanes. */
FA_DEVICE void drop_weights_of_rows(const fa_attention_params *p, const work_tile *w, float *s,
                                    int tile, int consumer)
{
    const fa_dropout d = fa_dropout_of(p, &w->query_tile);
    const int64_t first = w->query_tile.first + row_of(consumer, 0);
    const int group = (w->first_key + tile * KEYS) / 32;
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) {
        float *x = s + i / 2 * 16 + i % 2 * 2; /* group i / 2, row i % 2 */
        uint32_t block[4];
        fa_dropout_block(d.seed, d.offset, d.batch_head, first + i % 2 * 8, group + i / 2,
                         (int)threadIdx.x % 4, block);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if ((block[j] & 0xffff) < p->dropout_threshold) x[4 * j] = 0;
            if (block[j] >> 16 < p->dropout_threshold) x[4 * j + 1] = 0;
        }
    }
}

/* ---- The end of a row ------------------------------------------------------------------------- */

/* The base of a row whose largest logit equals NO_KEY_SEEN, for example in a bias that is used as a mask. */
#define SMALLEST_SEEN (-3.402823264e38f)

/* sum: of a row's weights, in all lanes. */
FA_DEVICE float find_seen_base(float base, float sum)
{
    return base == NO_KEY_SEEN && sum > 0.0f ? SMALLEST_SEEN : base;
}

#endif

#endif
