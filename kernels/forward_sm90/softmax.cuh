/*
 * Softmax that finds maxima only where they matter. A row's weights are 2^(x - base). Any base is exact in
 * float32, for the final division takes it out again. But weights are rounded to 16 bits for the product with
 * the values, and a weight that is a power of two needs no rounding. So a row that a few keys dominate is as
 * exact as it can be only if its largest weight is one: if its base is its maximum, as in the online softmax
 * (FlashAttention-2, section 3.1, arXiv:2307.08691). In a row that many keys share, one weight hardly counts.
 *
 * So a warpgroup tracks maxima while some of its rows are peaked, at the price of up to a sixth of the speed,
 * and does without them while all are flat. The sum of a tile's weights, which is needed anyway,
 * tells the two apart, and tells when a weight has grown beyond the others: then the warp's bases are renewed.
 *
 * Weights take the place of the scores, which are gone when the sum is known. Where weights are immense, the
 * warp makes the tile's scores again.
 */
#ifndef FA_KERNELS_FORWARD_SM90_SOFTMAX_CUH
#define FA_KERNELS_FORWARD_SM90_SOFTMAX_CUH

/* A warp's own products, by mma.sync: accumulators lie as wgmma's do. */
#include "common/ampere.cuh"

/* The largest weight of a row is 2 to this when its base is its maximum. float16 loses what is small. */
#define HEADROOM (ELEMENT == FA_ELEMENT_BFLOAT16 ? 0.0f : 8.0f)
#define LARGEST (ELEMENT == FA_ELEMENT_BFLOAT16 ? 1.0f : 256.0f)

/* The bound of a thread's sum of weights in a tile, whatever the row is like: float16 ends at 2^16. */
#define SUM_BOUND 0x1p15f

/* A row is flat if a thread's weights of a tile, on average, add up to this times the largest. Standard normal
 * scores give 4.2 with 128 keys a tile and 3.1 with 80; scores 1.15 times as large give 3.4 and 2.5. */
#define FLAT_SUM (0.7f + KEYS / 56.0f)

/* But no row of a warp is, if the weights of one of them add up to less than this times its largest. Of standard
 * normal rows one in a thousand does. */
#define PEAKED_SUM 2.5f

/* Of a thread's sum in a tile, in times the average: what is beyond it renews the bases of flat rows, and of
 * peaked ones, each on top of the largest weight. */
#define FLAT_GROWTH 6.0f
#define PEAKED_GROWTH 2.0f

/* The average that counts, at most: rows behind the last query, whose scores are all the same, have a larger one. */
#define MOST_SUM (KEYS / 25.0f)

/* By how many powers of two the base of a flat row may grow at once. Beyond that it is flat no longer. */
#define FLAT_LIMIT 7.0f

/* For so many tiles without a new maximum a warpgroup goes on tracking them. */
enum { QUIET_TILES = 4 };

/* The base of a row that has seen nothing: no score lies below it, and -infinity still gives 0. */
#define NOTHING_SEEN (-3.402823466e38f)

/* Whether a series in the scores may take the place of a softcap's tanh: see scores.cuh. */
#define HAS_SERIES (OPTIONS == FA_SM90_SOFTCAP)

/* What a row carries from tile to tile. Its weights are 2^(x - base), x = scale * score. */
typedef struct row_state {
    float base[2], sum[2]; /* sum: of the thread's columns only */
#if HAS_SERIES
    float bound[2]; /* of a thread's sum of weights in a tile: see allow_series */
#endif
} row_state;

/* A thread's score s of row r stands for the exponent scale * s - shift[r] of 2; in plain tiles, where there
 * is a series, (scale + third * s^2 + fifth * s^4) * s. */
typedef struct units {
    float scale, shift[2];
#if HAS_SERIES
    float third, fifth;
#endif
} units;

/* The exponent, less the row's base. */
FA_DEVICE float exponent(float s, const units *u, float base) { return fmaf(s, u->scale, -base); }

#if HAS_SERIES

/* The same where it is a series, which grows with the score. */
FA_DEVICE float series_exponent(float s, const units *u, float base)
{
    const float y = s * s;
    return fmaf(s, fmaf(fmaf(u->fifth, y, u->third), y, u->scale), -base);
}

#endif

/* Over the four lanes that share a row. */
FA_DEVICE float quad_maximum(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

/* Of scale * s - shift, with scale > 0; each thread has its shift. */
FA_DEVICE float row_maximum(const float *s, int r, float scale, float shift)
{
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < FRAGMENT_KEYS / 8; j++)
#pragma unroll
        for (int c = 0; c < 2; c++) top[c] = fmaxf(top[c], s[4 * j + 2 * r + c]);
    return quad_maximum(fmaf(fmaxf(top[0], top[1]), scale, -shift));
}

/* The exponent of a row's largest score. */
FA_DEVICE float top_exponent(const float *s, int r, const units *u)
{
#if HAS_SERIES
    const float top = row_maximum(s, r, 1.0f, 0.0f);
    return series_exponent(top, u, 0.0f);
#else
    return row_maximum(s, r, u->scale, u->shift[r]);
#endif
}

/* Bases that fit this tile's scores, and by what earlier outputs are to be multiplied. A row
 * without scores keeps NOTHING_SEEN, below which is no score but -infinity. */
FA_DEVICE void move_bases(const float *s, row_state *rows, float *rescale, const units *u)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float top = top_exponent(s, r, u);
        const float base = fmaxf(rows->base[r], top - HEADROOM);
        rescale[r] = exp2_fast(rows->base[r] - base);
        rows->base[r] = base;
        rows->sum[r] *= rescale[r];
    }
}

FA_DEVICE void rescale_outputs(float *out, const float *rescale)
{
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) out[i] *= rescale[i / 2 % 2];
}

/* Pairs of scores in a thread's tile: pair i is columns 8 (i / 2) + {0, 1} of row i % 2. */
#define PAIRS (FRAGMENT_KEYS / 4)

/* Sums of a thread's weights: of each row, even and odd columns. */
typedef struct partial_sums {
    float of[2][2];
} partial_sums;

/* The pairs [from, to) of scores become weights, by their exponents. */
FA_DEVICE void raise_pairs(float *s, int from, int to, partial_sums *sums)
{
#pragma unroll
    for (int i = 2 * from; i < 2 * to; i++) {
        s[i] = exp2_fast(s[i]);
        sums->of[i / 2 % 2][i % 2] += s[i];
    }
}

FA_DEVICE void weigh_pairs(float *s, const row_state *rows, const units *u, int from, int to,
                           partial_sums *sums)
{
#if OPTIONS
    const float base[2] = {rows->base[0] + u->shift[0], rows->base[1] + u->shift[1]};
#else
    const float *base = rows->base;
#endif
#pragma unroll
    for (int i = 2 * from; i < 2 * to; i++) s[i] = exponent(s[i], u, base[i / 2 % 2]);
    raise_pairs(s, from, to, sums);
}

#if HAS_SERIES

/* The same where the exponent is a series. */
FA_DEVICE void weigh_pairs_by_series(float *s, const row_state *rows, const units *u, int from,
                                     int to, partial_sums *sums)
{
#pragma unroll
    for (int i = 2 * from; i < 2 * to; i++) s[i] = series_exponent(s[i], u, rows->base[i / 2 % 2]);
    raise_pairs(s, from, to, sums);
}

#endif

FA_DEVICE void add_up(const partial_sums *sums, float *sum)
{
    sum[0] = sums->of[0][0] + sums->of[0][1];
    sum[1] = sums->of[1][0] + sums->of[1][1];
}

/* All of a tile. */
FA_DEVICE void weigh(float *s, const row_state *rows, const units *u, float *sum)
{
    partial_sums sums = {{{0, 0}, {0, 0}}};
    weigh_pairs(s, rows, u, 0, PAIRS, &sums);
    add_up(&sums, sum);
}

/* A thread's sum of weights in a row of a tile: the average over the warp, but MOST_SUM at most. */
FA_DEVICE float average_sum(const float *sum)
{
    const float unit = 1024.0f / LARGEST, most = 0x1p20f;
    const uint32_t all =
        __reduce_add_sync(0xffffffff, (uint32_t)fminf((sum[0] + sum[1]) * unit, most));
    return fminf((float)all * (1.0f / (64.0f * unit)), MOST_SUM * LARGEST);
}

/* Whether some row of the warp is peaked, however flat the others are: its outputs are the larger ones. Rows behind
 * the last query, whose scores are all the same, are the flattest of all. */
FA_DEVICE bool has_peaked_row(const float *sum)
{
    float least = INFINITY;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float whole = sum[r] + __shfl_xor_sync(0xffffffff, sum[r], 1);
        whole += __shfl_xor_sync(0xffffffff, whole, 2);
        least = fminf(least, whole);
    }
    return __any_sync(0xffffffff, least < PEAKED_SUM * LARGEST);
}

FA_DEVICE void add_sums(row_state *rows, const float *sum)
{
    rows->sum[0] += sum[0];
    rows->sum[1] += sum[1];
}

/* The pairs [from, to) of an A operand of wgmma. */
FA_DEVICE void round_pairs(uint32_t *weights, const float *s, int from, int to)
{
#pragma unroll
    for (int i = from; i < to; i++) weights[i] = pack_pair(s[2 * i], s[2 * i + 1]);
}

/* ---- Weights that are too large -------------------------------------------------------------- */

/* Two elements of a row of queries or keys, zeros behind the last. */
FA_DEVICE uint32_t fetch_pair(const char *row, int column, int columns)
{
    const uint16_t *x = (const uint16_t *)row + column;
    uint32_t pair = 0;
    if (column < columns) pair = x[0];
    if (column + 1 < columns) pair |= (uint32_t)x[1] << 16;
    return pair;
}

/* The warp's rows of S = Q K^T, from global memory: what the tile was made of may be gone. */
FA_DEVICE void multiply_again(const fa_attention_params *p, const piece *w, int tile, float *s,
                              int consumer)
{
    const int lane = (int)threadIdx.x % 32;
    const char *q[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int64_t i = fa_min64(w->tile.first + row_of(consumer, r), w->tile.n_q - 1);
        q[r] = fa_view_row(&p->q, w->tile.block_q, w->tile.start_q + i, w->tile.head);
    }
#pragma unroll
    for (int i = 0; i < FRAGMENT_KEYS / 2; i++) s[i] = 0;
#pragma unroll 1
    for (int step = 0; step < HEAD_DIM; step += 16) { /* as often in each lane, as wgmma wants it */
        const int column = step + lane % 4 * 2;
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = fetch_pair(q[i % 2], column + i / 2 * 8, p->d);
#pragma unroll
        for (int j = 0; j < FRAGMENT_KEYS / 8; j++) {
            const int64_t key = w->start + tile * FRAGMENT_KEYS + 8 * j + lane / 4;
            const char *k = fa_key_row(p, &p->k, &w->tile, fa_min64(key, w->tile.n_k - 1));
            fa_mma(s + 4 * j, a, fetch_pair(k, column, p->d), fetch_pair(k, column + 8, p->d));
        }
    }
}

/* Multiplies what a row has so far, weights of this tile as well. */
FA_DEVICE void rescale_rows(float *s, float *out, row_state *rows, const float *factor)
{
#pragma unroll
    for (int i = 0; i < FRAGMENT_KEYS / 2; i++) s[i] *= factor[i / 2 % 2];
    rows->sum[0] *= factor[0];
    rows->sum[1] *= factor[1];
    rescale_outputs(out, factor);
}

/* Weights from here on lose others when they are multiplied by what makes them small enough. */
#define IMMENSE 1e30f

/* Bases that fit the largest weights s, where these have grown: all is multiplied accordingly. Returns
 * false, and does nothing, if some are immense. NaN, which nothing helps, counts for nothing. */
FA_DEVICE bool renew_bases(float *s, float *out, row_state *rows)
{
    float largest[2], factor[2];
#pragma unroll
    for (int r = 0; r < 2; r++) largest[r] = fmaxf(row_maximum(s, r, 1.0f, 0.0f), LARGEST);
    if (__any_sync(0xffffffff, fmaxf(largest[0], largest[1]) >= IMMENSE)) return false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float base = rows->base[r] + (log2f(largest[r]) - HEADROOM);
        factor[r] = exp2_fast(rows->base[r] - base);
        rows->base[r] = base;
    }
    rescale_rows(s, out, rows, factor);
    return true;
}

#endif
