/*
 * The softmax: computes weights from logits, 2^(logit - base). The base of a row is its running
 * max, or near it. The division at the end of a work tile cancels it.
 *
 * Tracked key tiles maintain the running max, as in FlashAttention-2's algorithm 1. Untracked ones
 * do without it, so that the weights of a chunk of keys can be computed while tensor cores multiply
 * those of the previous chunk by V:
 *
 *       S = Q K^T | weights 0 | O += P V of 0, weights 1 | O += P V of 1, weights 2 | ...
 *
 * common/flat_rows.h explains when rows need no running max. The sum of a chunk's weights is known
 * before they are used. If it is above a bound, the weights of the rest of the key tile are
 * computed with new bases, from its max.
 */
#ifndef FA_KERNELS_FORWARD_SM80_SOFTMAX_CUH
#define FA_KERNELS_FORWARD_SM80_SOFTMAX_CUH

#include "common/flat_rows.h"
#include "common/reduce.cuh"
#include "common/softmax.cuh"
#include "common/x2.cuh"
#include "forward_sm80/load.cuh"
#include "forward_sm80/multiply.cuh"

/* The max of a row that has seen no key. With -infinity its weights would be NaN;
 * 2^(-infinity - NOTHING_SEEN) is 0. */
#define NOTHING_SEEN (-3.402823466e38f)

/* When a row's max is found, its largest weight is LARGEST = 2^HEADROOM: float16 keeps more of the
 * small weights if the large ones are near its limit, 2^16. The max stays until logits exceed it by
 * RESCALE_ABOVE. */
#if ELEMENT != FA_ELEMENT_FLOAT16
#define HEADROOM 0.0f
#define LARGEST 1.0f
#else
#define HEADROOM 7.0f
#define LARGEST 128.0f
#endif
/* In 16 bits every new max is used (common/flat_rows.h). */
#define RESCALE_ABOVE (HEADROOM + (ELEMENT == FA_ELEMENT_FLOAT32 ? 0.5f : 0.0f))

/* ---- The running max ------------------------------------------------------------------------- */

FA_DEVICE void clear_output(fa_output *o)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            o->max[m][half] = NOTHING_SEEN;
            o->sum[m][half] = 0.0f;
        }
#pragma unroll
        for (int n = 0; n < D_TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) o->at[m][n][e] = 0.0f;
    }
}

/* The max of this tile's scores in row g (half 0) or g + 8, in all four lanes. */
FA_DEVICE float row_max(const fa_scores *s, int m, int half)
{
    float top = s->at[m][0][2 * half];
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++)
        top = fmaxf(top, fmaxf(s->at[m][n][2 * half], s->at[m][n][2 * half + 1]));
    return fa_max_over_lanes(top, 4);
}

/* Makes `top` the max of rows whose old one is too far below it, and rescales the sums. */
FA_DEVICE void raise_max(fa_output *o, float top[M_TILES][2])
{
    int summed = 0;
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float old = o->max[m][half];
            const float now = top[m][half] > old + RESCALE_ABOVE ? top[m][half] - HEADROOM : old;
            const float factor = ptx_ex2(old - now);
            summed |= old != NOTHING_SEEN;
            o->max[m][half] = now;
            o->sum[m][half] *= factor;
            top[m][half] = factor;
        }
    if (!__any_sync(0xffffffffu, summed)) return; /* there is nothing to rescale */
#pragma unroll
    for (int i = 0; i < M_TILES * D_TILES * 4; i++)
        o->at[i / 4 / D_TILES][i / 4 % D_TILES][i % 4] *= top[i / 4 / D_TILES][i % 4 / 2];
}

FA_DEVICE void update_max(const fa_memory *at, fa_output *o, const fa_scores *s, float scale)
{
    float top[M_TILES][2];
    int grown = 0;
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) top[m][half] = row_max(s, m, half) * scale;
    if (SPLIT > 1) {
        share_with_group(at, top);
#pragma unroll
        for (int i = 0; i < M_TILES * 2; i++)
#pragma unroll
            for (int share = 0; share < SPLIT; share++)
                top[i / 2][i % 2] = fmaxf(top[i / 2][i % 2], read_from_group(at, share, i));
    }
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++)
        grown |= top[i / 2][i % 2] > o->max[i / 2][i % 2] + RESCALE_ABOVE;
    if (__any_sync(0xffffffffu, grown)) raise_max(o, top);
}

/* ---- Weights --------------------------------------------------------------------------------- */

/* Computes two adjacent weights of a thread's row. */
FA_DEVICE void make_weight_x2(fa_weights *p, const fa_scores *s, const fa_output *o, float scale,
                              int m, int n, int half, float sum[M_TILES][2])
{
    const float *x = s->at[m][n] + 2 * half;
    const float first = ptx_ex2(fmaf(x[0], scale, -o->max[m][half]));
    const float second = ptx_ex2(fmaf(x[1], scale, -o->max[m][half]));
    sum[m][half] += first + second;
#if TF32
    /* The sum shows whether one is NaN. */
    set_weight(p, m, n, half, 0, __float_as_uint(first) + (THREE_PRODUCTS ? 0 : 0x1000u));
    set_weight(p, m, n, half, 1, __float_as_uint(second) + (THREE_PRODUCTS ? 0 : 0x1000u));
#else
    set_x2(p, m, n, half, fa_pack_x2(first, second));
#endif
}

FA_DEVICE void make_weights(fa_weights *p, const fa_scores *s, fa_output *o, float scale)
{
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
        for (int i = 0; i < M_TILES * 2; i++)
            make_weight_x2(p, s, o, scale, i / 2, n, i % 2, o->sum);
}

#if PLAIN_LOOP

/* ---- Flat rows ------------------------------------------------------------------------------- */

/* Rows are flat from this average of a thread's sum of weights in a key tile on. */
#define FLAT_SUM (LARGEST * FA_FLAT_SUM(KEYS) / SPLIT)

/* If the sum of a row's weights is less than twice its largest weight, the rows of its warp count
 * as peaked. */
#define PEAKED_SUM (0.5f * LARGEST / SPLIT)

/* The average of the threads' sums of weights, over the warp; and the min of the row quarters. */
FA_DEVICE float average_sum(const fa_output *o, float *min_row)
{
    float sum = 0.0f;
    *min_row = INFINITY;
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) {
        const float row = fa_sum_over_lanes(o->sum[i / 2][i % 2], 4);
        *min_row = fminf(*min_row, 0.25f * row);
        sum += 0.25f * row;
    }
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        *min_row = fminf(*min_row, __shfl_xor_sync(0xffffffffu, *min_row, lanes));
    }
    return sum / (8 * M_TILES * 2);
}

/* Decides whether the warp's rows are flat, from the key tiles so far, which were tracked. Warps
 * that share rows agree on the result. */
FA_DEVICE void judge_rows(const fa_output *o, int tiles, bool short_rows, fa_path *path)
{
    float min_row;
    const float average = average_sum(o, &min_row) / (float)tiles;
    path->peaked = !(average >= FLAT_SUM && min_row >= PEAKED_SUM * (float)tiles) || short_rows;
    if (SPLIT > 1) path->peaked = ptx_named_barrier_or(1 + group_id(), 32 * SPLIT, path->peaked);
    path->bound = fminf(LARGEST + FA_FLAT_GROWTH * average * CHUNK_KEYS / OWN_KEYS, FA_SUM_BOUND);
}

/* ---- Untracked key tiles --------------------------------------------------------------------- */

/* A key tile has CHUNKS chunks of keys. A thread has UNITS x2 of weights in a chunk. While these
 * are computed, the products of the previous chunk continue: PARTS times one ldmatrix and the mma
 * that use it. */
enum {
    CHUNKS = OWN_KEYS / CHUNK_KEYS,
    CHUNK_STEPS = CHUNK_KEYS / STEP,
    PARTS = CHUNK_STEPS * D_TILES / VALUE_TILES,
    UNITS = M_TILES * CHUNK_KEYS / 8 * 2,
    UNITS_A_PART = (UNITS + PARTS - 1) / PARTS
};

#if SPLIT == 1

FA_DEVICE void weigh_unit(fa_weights *p, const fa_scores *s, const fa_output *o, float scale,
                          int chunk, int unit, float sum[M_TILES][2])
{
    const int n = chunk * (CHUNK_KEYS / 8) + unit / (2 * M_TILES);
    make_weight_x2(p, s, o, scale, unit / 2 % M_TILES, n, unit % 2, sum);
}

#if !THREE_PRODUCTS
/* O += P V for one chunk, interleaved with the weights of the next chunk. */
FA_DEVICE void add_values_and_weigh(fa_output *o, fa_weights *p, const fa_scores *s, float scale,
                                    uint32_t v, int chunk, float sum[M_TILES][2])
{
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const int step = chunk * CHUNK_STEPS + part / (D_TILES / VALUE_TILES);
        uint32_t a[M_TILES][4];
        get_weight_fragments(a, p, 0, step);
        add_values_step(o, a, v, step, part % (D_TILES / VALUE_TILES));
        if (chunk + 1 == CHUNKS) continue;
#pragma unroll
        for (int i = 0; i < UNITS_A_PART; i++)
            if (part * UNITS_A_PART + i < UNITS)
                weigh_unit(p, s, o, scale, chunk + 1, part * UNITS_A_PART + i, sum);
    }
}

#endif

/* Whether all rows' sums of a chunk are within the bound, or the tile is tracked, in which case
 * there are no better bases. If so, the sums are added. NaN is not within the bound. */
FA_DEVICE bool take_sums(fa_output *o, float sum[M_TILES][2], float bound, bool tracked)
{
    int large = 0;
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) large |= !(sum[i / 2][i % 2] <= bound);
    if (__any_sync(0xffffffffu, large && !tracked)) return false;
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) {
        o->sum[i / 2][i % 2] += sum[i / 2][i % 2];
        sum[i / 2][i % 2] = 0.0f;
    }
    return true;
}

/* The softmax of a tile whose first chunk of weights has been computed, and O += P V. Returns how
 * many chunks have been added: not all if the next one's weights are too large for their bases. */
FA_DEVICE int multiply_chunks(fa_output *o, fa_weights *p, const fa_scores *s, float scale,
                              uint32_t v, float sum[M_TILES][2], float bound, bool tracked)
{
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        if (!take_sums(o, sum, bound, tracked)) return chunk;
#if THREE_PRODUCTS
        (void)s, (void)scale; /* all weights have been computed */
        add_values(o, p, 0, v);
#else
        add_values_and_weigh(o, p, s, scale, v, chunk, sum);
#endif
    }
    return CHUNKS;
}

FA_DEVICE void weigh_first_chunk(fa_weights *p, const fa_scores *s, const fa_output *o, float scale,
                                 float sum[M_TILES][2])
{
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++) weigh_unit(p, s, o, scale, 0, unit, sum);
}

/* The softmax of a tile with the rows' current bases, and O += P V. Returns how many chunks have
 * been added: none if a row has no base yet, because its weights are infinite then. */
FA_DEVICE int weigh_tile(fa_output *o, const fa_scores *s, float scale, const fa_memory *at,
                         uint32_t v, float bound, bool tracked)
{
    fa_weights weights;
    float sum[M_TILES][2] = {{0.0f}};
    (void)at;
    weigh_first_chunk(&weights, s, o, scale, sum);
    return multiply_chunks(o, &weights, s, scale, v, sum, bound, tracked);
}

#else

/* The same for warps that share rows. They store all weights before the first product. If one warp
 * has a weight that is too large, none of them continues. */
FA_DEVICE int weigh_tile(fa_output *o, const fa_scores *s, float scale, const fa_memory *at,
                         uint32_t v, float bound, bool tracked)
{
    fa_weights weights = find_weights(at);
    float sum[M_TILES][2] = {{0.0f}};
    int large = 0;
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
        for (int i = 0; i < M_TILES * 2; i++)
            make_weight_x2(&weights, s, o, scale, i / 2, n, i % 2, sum);
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) large |= !(sum[i / 2][i % 2] <= bound);
    if (ptx_named_barrier_or(1 + group_id(), 32 * SPLIT, large && !tracked)) return 0;
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) o->sum[i / 2][i % 2] += sum[i / 2][i % 2];
    add_values(o, &weights, weight_rows(at), v);
    return CHUNKS;
}

#endif

/* Hides the keys of the chunks that have been added. */
FA_DEVICE void hide_chunks(fa_scores *s, int done)
{
#pragma unroll
    for (int i = 0; i < M_TILES * KEY_TILES * 4; i++)
        if (i / 4 % KEY_TILES / (CHUNK_KEYS / 8) < done)
            s->at[i / 4 / KEY_TILES][i / 4 % KEY_TILES][i % 4] = -INFINITY;
}

#endif

/* ---- The end of a work tile ------------------------------------------------------------------ */

/* Replaces o->sum by the sums of whole rows. */
FA_DEVICE void sum_rows(const fa_memory *at, fa_output *o)
{
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) {
        float *sum = &o->sum[i / 2][i % 2];
        *sum = fa_sum_over_lanes(*sum, 4);
    }
    if (SPLIT == 1) return;
    share_with_group(at, o->sum);
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) {
        o->sum[i / 2][i % 2] = 0.0f;
#pragma unroll
        for (int share = 0; share < SPLIT; share++)
            o->sum[i / 2][i % 2] += read_from_group(at, share, i);
    }
}

/* Whether the largest weight of a row, which should be 1, is less or infinite: its logit is so
 * large that the rounded base differs from it by more than 1. Needs sums of whole rows. */
FA_DEVICE bool has_lost_bases(const fa_output *o)
{
    bool found = false;
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) {
        const float sum = o->sum[i / 2][i % 2];
        found |= o->max[i / 2][i % 2] != NOTHING_SEEN && !(sum >= 0.5f && sum < INFINITY);
    }
    return found;
}

#endif
