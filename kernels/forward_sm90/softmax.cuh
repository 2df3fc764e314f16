/*
 * Softmax with a running max only for peaked rows, where it matters (common/flat_rows.h explains why). A row's weights
 * are 2^(x - base), where x are its logits as exponents of 2.
 *
 * A warpgroup tracks the max while some of its rows are peaked. The sum of a tile's weights, which is needed anyway,
 * distinguishes flat rows from peaked ones. It also shows when a weight has grown beyond the others: then the warp
 * renews its bases.
 *
 * Weights overwrite the scores, so the scores no longer exist when the sum is known. A warp whose weights are immense
 * computes the tile's scores again.
 */
#ifndef FA_KERNELS_FORWARD_SM90_SOFTMAX_CUH
#define FA_KERNELS_FORWARD_SM90_SOFTMAX_CUH

#include "forward_sm90/config.cuh"
#include "common/flat_rows.h"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "common/sequence.cuh"
#include "common/softmax.cuh"
#include "common/x2.cuh"
#include "forward_sm90/finish.cuh"
#include "forward_sm90/warp.cuh"
#include "forward_sm90/work_tile.cuh"
#include "ptx/convert.cuh"

/* A row's largest weight is 2 to this power if its base is its max. float16 loses small numbers, so its weights are
 * larger. */
#ifndef HEADROOM
#define HEADROOM (ELEMENT == FA_ELEMENT_FLOAT16 ? 8.0f : 0.0f)
#endif
#define MAX_WEIGHT (ELEMENT == FA_ELEMENT_FLOAT16 ? 256.0f : 1.0f)

/* Rows are flat by FA_FLAT_SUM. But if the weights of one row of a warp add up to less than this many times its
 * largest, none of the warp's rows counts as flat. One in a thousand standard normal rows is below it. */
#define PEAKED_SUM 2.5f

/* The bound of peaked rows that are not tracked: the largest weight plus this many times the average. Flat rows have
 * FA_FLAT_GROWTH. */
#define PEAKED_GROWTH 2.0f

/* Upper limit of the average: rows after the last query, whose scores are all equal, would have more. */
#define MAX_AVERAGE (KEYS / 25.0f)

/* The base of a flat row may grow by this many powers of two at once. If it grows by more, the row is no longer
 * flat. */
#define MAX_FLAT_GROWTH 7.0f

/* A warpgroup stops tracking the max after this many tiles without a new max. */
enum { TRACKED_TILES = 4 };

/* The state of a thread's two rows between tiles. */
typedef struct row_state {
    float base[2], sum[2]; /* sum: of the thread's columns only */
#if EXACT_SUMS
    float rest[2]; /* what rounding has taken from it */
#endif
#if HAS_SERIES
    float bound[2]; /* of a thread's sum of weights in a tile: allow_series */
#endif
} row_state;

/* A score s of row r means the exponent scale * s - shift[r] of 2. In plain tiles where tanh is a series, it means
 * (scale + third * s^2 + fifth * s^4) * s. */
typedef struct exponent_units {
    float scale, shift[2];
#if HAS_SERIES
    float third, fifth, seventh, ninth; /* the last two where the series is exact */
#endif
} exponent_units;

/* The exponent relative to the base. */
FA_DEVICE float exponent(float s, const exponent_units *u, float base)
{
    return fmaf(s, u->scale, -base);
}

#if HAS_SERIES

/* The same by the series, which grows with the score. */
FA_DEVICE float series_exponent(float s, const exponent_units *u, bool exact, float base)
{
    const float y = s * s;
    const float fifth = exact ? fmaf(fmaf(u->ninth, y, u->seventh), y, u->fifth) : u->fifth;
    return fmaf(s, fmaf(fmaf(fifth, y, u->third), y, u->scale), -base);
}

#endif

/* ---- Max ------------------------------------------------------------------------------------- */

/* The max of a thread's scores in row r. */
FA_DEVICE float max_of_scores(const float *s, int r)
{
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < FRAGMENT_KEYS / 8; j++)
#pragma unroll
        for (int c = 0; c < 2; c++) top[c] = fmaxf(top[c], s[4 * j + 2 * r + c]);
    return fmaxf(top[0], top[1]);
}

/* The same by comparing the bits as integers. This takes half the instructions, because one instruction
 * finds the max of three integers. If all scores are negative, the result is negative, but it may not be
 * their max. */
FA_DEVICE float max_of_bits(const float *s, int r)
{
    int top[2] = {__float_as_int(-0.0f), __float_as_int(-0.0f)};
#pragma unroll
    for (int j = 0; j < FRAGMENT_KEYS / 8; j++) {
        const float *two = s + 4 * j + 2 * r;
        top[j % 2] = max(max(top[j % 2], __float_as_int(two[0])), __float_as_int(two[1]));
    }
    return __int_as_float(max(top[0], top[1]));
}

FA_DEVICE bool is_negative(float x) { return __float_as_int(x) < 0; }

/* The exponent of `top`, the largest of a thread's scores in row r. */
FA_DEVICE float max_exponent(float top, int r, const exponent_units *u, bool exact)
{
    (void)exact;
#if HAS_SERIES
    (void)r;
    return series_exponent(top, u, exact, 0.0f);
#else
    return fmaf(top, u->scale, -u->shift[r]);
#endif
}

/* Raises the bases to this tile's max. top: the max of a thread's scores in each of its rows, which four
 * lanes share. Sets rescale, by which the outputs so far must be multiplied; sums are multiplied here. A
 * row that has seen no key keeps NO_KEY_SEEN. */
FA_DEVICE void raise_bases(const float *top, row_state *rows, float *rescale,
                           const exponent_units *u, bool exact)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float largest = fa_max_over_lanes(max_exponent(top[r], r, u, exact), 4);
        const float base = fmaxf(rows->base[r], largest - HEADROOM);
        rescale[r] = ptx_ex2(rows->base[r] - base);
        rows->base[r] = base;
        rows->sum[r] *= rescale[r];
    }
}

FA_DEVICE void rescale_outputs(float *out, const float *rescale)
{
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) out[i] *= rescale[i / 2 % 2];
}

/* ---- Weights --------------------------------------------------------------------------------- */

/* A thread's scores of a tile are processed in pairs: pair i is columns 8 (i / 2) + {0, 1} of row i % 2, and becomes
 * weights[i], packed. This is the number of pairs: */
#define WEIGHTS_X2 (FRAGMENT_KEYS / 4)

/* Sums of a thread's weights in a tile: of each row, even and odd columns. */
typedef struct partial_sums {
    float of[2][2];
} partial_sums;

/* Exponents [from, to) become weights. */
FA_DEVICE void exponentiate(float *s, int from, int to, partial_sums *sums)
{
#pragma unroll
    for (int i = 2 * from; i < 2 * to; i++) {
        s[i] = ptx_ex2(s[i]);
        sums->of[i / 2 % 2][i % 2] += s[i];
    }
}

/* Scores [from, to) become weights. */
FA_DEVICE void weigh_range(float *s, const row_state *rows, const exponent_units *u, int from,
                           int to, partial_sums *sums)
{
#if OPTIONS
    const float base[2] = {rows->base[0] + u->shift[0], rows->base[1] + u->shift[1]};
#else
    const float *base = rows->base;
#endif
#pragma unroll
    for (int i = 2 * from; i < 2 * to; i++) s[i] = exponent(s[i], u, base[i / 2 % 2]);
    exponentiate(s, from, to, sums);
}

#if HAS_SERIES

/* The same by the series. */
FA_DEVICE void weigh_range_by_series(float *s, const row_state *rows, const exponent_units *u,
                                     bool exact, int from, int to, partial_sums *sums)
{
#pragma unroll
    for (int i = 2 * from; i < 2 * to; i++)
        s[i] = series_exponent(s[i], u, exact, rows->base[i / 2 % 2]);
    exponentiate(s, from, to, sums);
}

#endif

FA_DEVICE void add_partial_sums(const partial_sums *sums, float *sum)
{
    sum[0] = sums->of[0][0] + sums->of[0][1];
    sum[1] = sums->of[1][0] + sums->of[1][1];
}

/* All scores of a tile. sum: of both rows. */
FA_DEVICE void weigh(float *s, const row_state *rows, const exponent_units *u, float *sum)
{
    partial_sums sums = {{{0, 0}, {0, 0}}};
    weigh_range(s, rows, u, 0, WEIGHTS_X2, &sums);
    add_partial_sums(&sums, sum);
}

FA_DEVICE void add_sums(row_state *rows, const float *sum)
{
#if EXACT_SUMS
#pragma unroll
    for (int r = 0; r < 2; r++) fa_add_exactly(&rows->sum[r], &rows->rest[r], sum[r]);
#else
    rows->sum[0] += sum[0];
    rows->sum[1] += sum[1];
#endif
}

#if ELEMENT != FA_ELEMENT_TF32

/* Rounds the weights [from, to) to 16 bits: the A operand of wgmma. */
FA_DEVICE void pack_weights(uint32_t *weights, const float *s, int from, int to)
{
#pragma unroll
    for (int i = from; i < to; i++) weights[i] = fa_pack_x2(s[2 * i], s[2 * i + 1]);
}

/* ---- Flat or peaked -------------------------------------------------------------------------- */

/* A thread's sum of weights in a row of a tile: the average over the warp, or MAX_AVERAGE if it is more. */
FA_DEVICE float average_sum(const float *sum)
{
    const float unit = 1024.0f / MAX_WEIGHT, limit = 0x1p20f;
    const uint32_t all =
        __reduce_add_sync(0xffffffff, (uint32_t)fminf((sum[0] + sum[1]) * unit, limit));
    return fminf((float)all * (1.0f / (64.0f * unit)), MAX_AVERAGE * MAX_WEIGHT);
}

/* Whether a row of the warp is peaked, even if all others are flat, because its outputs are larger. Rows after the last
 * query, whose scores are all equal, count as the flattest. */
FA_DEVICE bool has_peaked_row(const float *sum)
{
    float smallest = INFINITY;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        smallest = fminf(smallest, fa_sum_over_lanes(sum[r], 4));
    }
    return __any_sync(0xffffffff, smallest < PEAKED_SUM * MAX_WEIGHT);
}

/* ---- Weights that are too large -------------------------------------------------------------- */

/* Two elements of a row of queries or keys; zeros after the last. */
FA_DEVICE uint32_t load_x2(const char *row, int column, int columns)
{
    const uint16_t *x = (const uint16_t *)row + column;
    uint32_t two = 0;
    if (column < columns) two = x[0];
    if (column + 1 < columns) two |= (uint32_t)x[1] << 16;
    return two;
}

/* Computes the warp's rows of S = Q K^T again, from global memory, because the stages may have been overwritten. */
FA_DEVICE void recompute_scores(const fa_attention_params *p, const work_tile *w, int tile,
                                float *s, int consumer)
{
    const int lane = (int)threadIdx.x % 32;
    const fa_tile *t = &w->query_tile;
    const char *q[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = row_of(consumer, r);
        const int64_t i = fa_min64(t->first + query_of(w, row), t->n_q - 1);
        q[r] = fa_view_row(&p->q, t->block_q, t->start_q + i, t->head + head_of(w, row));
    }
#pragma unroll
    for (int i = 0; i < FRAGMENT_KEYS / 2; i++) s[i] = 0;
#pragma unroll 1
    for (int step = 0; step < HEAD_DIM;
         step += 16) { /* a constant: wgmma must not be in divergent code */
        const int column = step + lane % 4 * 2;
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = load_x2(q[i % 2], column + i / 2 * 8, p->d);
#pragma unroll
        for (int j = 0; j < FRAGMENT_KEYS / 8; j++) {
            const int64_t key = w->first_key + tile * FRAGMENT_KEYS + 8 * j + lane / 4;
            const char *k = fa_key_row(p, &p->k, t, fa_min64(key, t->n_k - 1));
            fa_mma(s + 4 * j, a, load_x2(k, column, p->d), load_x2(k, column + 8, p->d));
        }
    }
}

/* Multiplies all sums and outputs of the rows so far, and this tile's weights. */
FA_DEVICE void rescale_rows(float *s, float *out, row_state *rows, const float *factor)
{
#pragma unroll
    for (int i = 0; i < FRAGMENT_KEYS / 2; i++) s[i] *= factor[i / 2 % 2];
    rows->sum[0] *= factor[0];
    rows->sum[1] *= factor[1];
    rescale_outputs(out, factor);
}

/* Dividing by weights of this size or more would lose other weights. */
#define IMMENSE 1e30f

/* Raises bases to the largest weights s if these have grown, and rescales the rows. Returns false, and does nothing,
 * if a weight is immense. A weight of NaN is ignored, because no base would help. */
FA_DEVICE bool renew_bases(float *s, float *out, row_state *rows)
{
    float largest[2], factor[2];
#pragma unroll
    for (int r = 0; r < 2; r++)
        largest[r] = fmaxf(fa_max_over_lanes(max_of_scores(s, r), 4), MAX_WEIGHT);
    if (__any_sync(0xffffffff, fmaxf(largest[0], largest[1]) >= IMMENSE)) return false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float base = rows->base[r] + (log2f(largest[r]) - HEADROOM);
        factor[r] = ptx_ex2(rows->base[r] - base);
        rows->base[r] = base;
    }
    rescale_rows(s, out, rows, factor);
    return true;
}

#endif

#endif
