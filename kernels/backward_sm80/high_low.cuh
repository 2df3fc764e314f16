/*
 * Products of wide heads, in float32: operands are float16 parts, high ones and for three products
 * low ones. Keys and values are split in shared memory, once; queries and dout by `prepare`, so that
 * their rows are copied from the workspace as they are; weights and dS where they are stored. So no
 * product splits anything, 16 elements are multiplied where tf32 has 8, and ldmatrix transposes.
 * docs/kernels/backward_sm80.md has the budget.
 *
 * 32 columns of a row, 128 bytes, become 64 bytes of high parts and 64 of low ones: a low part is at
 * its high part's address ^ 64. Of these columns, eight units of four, 8 c + i of the parts is number
 * c of unit gradient_unit(i / 2, i % 2): so gradients have their columns in the same registers as in
 * tf32 (multiply.cuh). Sums over the head dim have another order of columns, all operands the same.
 *
 * Before it is split a tensor's tile is multiplied by a power of two, which brings its largest number
 * near 2^15. Low parts of weights and dS, whose largest numbers are bounded and not known, are 2^11
 * times as large as they should be, so that they have all their bits where the high part has: down to
 * 2^-27 of the bound. They are there with one product, too: weights and dS reach over more powers of
 * two than float16 does.
 */
#ifndef FA_KERNELS_BACKWARD_SM80_HIGH_LOW_CUH
#define FA_KERNELS_BACKWARD_SM80_HIGH_LOW_CUH

#include "backward_sm80/layout.cuh"
#include "backward_sm80/load.cuh"
#include "backward_sm80/multiply.cuh"
#include "backward_sm80/split.cuh"
#include "common/reduce.cuh"
#include "ptx/convert.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"

#if HIGH_LOW

/* Of 16 x 16 elements, as ldmatrix loads them. */
typedef struct high_low {
    uint32_t high[4], low[4];
} high_low;

#if SLICES

/* What weights are multiplied by: they are 1 at most, but for rounding and a log-sum-exp that is not
 * theirs. */
#define WEIGHT_POWER 0x1p13f

/* What the low parts of weights and dS are multiplied by, besides. */
#define LOW_POWER 0x1p11f

/* ---- Powers of two --------------------------------------------------------------------------- */

/* The largest finite number of those rows that the thread has copied. Infinities are left out if
 * `finite`. */
FA_DEVICE float find_largest(uint32_t at, int rows, bool finite)
{
    const int thread = ptx_thread_id(), unit = thread % ROW_VECTORS, first = thread / ROW_VECTORS;
    float largest = 0.0f;
    if ((int)COPIERS < (int)THREADS && thread >= COPIERS) return 0.0f;
#pragma unroll 4
    for (int row = first; row < rows; row += ROWS_A_PASS) {
        const uint4 four = ptx_ld_shared_v4(at + (uint32_t)(row * PITCH + unit / 8 * 128) +
                                            permuted(row, unit & 7, PITCH) * 16);
        const uint32_t x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float y = fabsf(fa_bits_float(x[i])); /* fmaxf leaves out NaN */
            largest = fmaxf(largest, finite && y == INFINITY ? 0.0f : y);
        }
    }
    return largest;
}

/* Notes the largest number of rows whose copies the thread has waited for. place: KEY_LARGEST or
 * VALUE_LARGEST. */
FA_DEVICE void note_largest(uint32_t powers, uint32_t at, int rows, int place)
{
    const int thread = ptx_thread_id();
    float largest = find_largest(at, rows, false);
    if (largest == INFINITY) largest = find_largest(at, rows, true);
    largest = fa_warp_max(largest);
    if (thread % 32 == 0)
        ptx_st_shared_f32(powers + (uint32_t)place + (uint32_t)(thread / 32) * 4, largest);
}

/* The power of what all warps have noted. */
FA_DEVICE float find_noted_power(uint32_t powers, int place)
{
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; i += 4) {
        const uint4 x = ptx_ld_shared_v4(powers + (uint32_t)(place + 4 * i));
        largest = fmaxf(largest, fmaxf(fmaxf(fa_bits_float(x.x), fa_bits_float(x.y)),
                                       fmaxf(fa_bits_float(x.z), fa_bits_float(x.w))));
    }
    return find_power(largest);
}

FA_DEVICE float load_power(uint32_t powers, int place)
{
    return ptx_ld_shared_f32(powers + (uint32_t)place);
}

#endif

/* ---- Parts ----------------------------------------------------------------------------------- */

/* Splits a row's 32 columns. at: where they begin; row: its number. */
FA_DEVICE void split_columns(uint32_t at, int row, float power)
{
    float x[8][4];
#pragma unroll
    for (int unit = 0; unit < 8; unit++) {
        const uint4 four = ptx_ld_shared_v4(at + permuted(row, unit, PITCH) * 16);
        x[unit][0] = fa_bits_float(four.x) * power, x[unit][1] = fa_bits_float(four.y) * power;
        x[unit][2] = fa_bits_float(four.z) * power, x[unit][3] = fa_bits_float(four.w) * power;
    }
#pragma unroll
    for (int c = 0; c < 4; c++) {
        uint32_t high[4], low[4];
#pragma unroll
        for (int t = 0; t < 4; t++)
            high[t] =
                split_two(x[gradient_unit(t, 0)][c], x[gradient_unit(t, 1)][c], 1.0f, &low[t]);
        const uint32_t to = at + permuted(row, c, PITCH) * 16;
        ptx_st_shared_v4(to, make_uint4(high[0], high[1], high[2], high[3]));
        if (THREE_PRODUCTS) ptx_st_shared_v4(to ^ 64, make_uint4(low[0], low[1], low[2], low[3]));
    }
}

#if SLICES

/* Splits rows in their place. columns: that there are; behind them are zeros, which stay. Eight lanes
 * that load or store at once have eight rows. */
FA_DEVICE void split_rows(uint32_t at, int rows, int columns, float power)
{
    const int items = (columns + 31) / 32 * rows;
#pragma unroll 1
    for (int item = ptx_thread_id(); item < items; item += THREADS) {
        const int row = item % rows;
        split_columns(at + (uint32_t)(row * PITCH + item / rows * 128), row, power);
    }
}

#endif

/* at: of the lane's first fragment; offset: in whole groups of banks; low: whether there are low parts.
 */
FA_DEVICE void load_high_low(high_low *x, uint32_t at, int offset, bool low)
{
    ptx_ldmatrix_x4(x->high, at + (uint32_t)offset);
    if (low) ptx_ldmatrix_x4(x->low, (at ^ 64) + (uint32_t)offset);
}

FA_DEVICE void load_high_low_trans(high_low *x, uint32_t at, int offset, bool low)
{
    ptx_ldmatrix_x4_trans(x->high, at + (uint32_t)offset);
    if (low) ptx_ldmatrix_x4_trans(x->low, (at ^ 64) + (uint32_t)offset);
}

/* Columns of two tiles. */
FA_DEVICE void multiply_pair(float sum[2][4], const uint32_t a[4], const uint32_t b[4])
{
    ptx_mma_m16n8k16_f16(sum[0], a, b[0], b[1]);
    ptx_mma_m16n8k16_f16(sum[1], a, b[2], b[3]);
}

#if SLICES

/* ---- Products -------------------------------------------------------------------------------- */

/* The products of 32 columns. Sums of three products begin from 0 for each 16. rows, columns: where
 * the lane's fragments of keys and of queries begin. */
FA_DEVICE void add_high_low_scores(fa_score_sums *s, uint32_t rows, uint32_t columns)
{
    high_low b[(N_TILES + 1) / 2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        high_low a[M_TILES];
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
            load_high_low(&a[m], fragment_at(rows, 2 * i), m * 16 * PITCH, THREE_PRODUCTS);
#pragma unroll
        for (int n = 0; n < N_TILES; n += 2)
            if (i == 0 || !PAIRS)
                load_high_low(&b[n / 2], fragment_at(columns, 2 * i), n / 2 * 16 * PITCH,
                              THREE_PRODUCTS);
#pragma unroll
        for (int j = 0; j < N_TILES * M_TILES; j++) {
            const int m = j % M_TILES, n = j / M_TILES, word = 2 * (PAIRS ? i : n % 2);
            const high_low *x = &a[m], *y = &b[n / 2];
#if THREE_PRODUCTS
            float sum[4] = {0.0f};
            ptx_mma_m16n8k16_f16(sum, x->low, y->high[word], y->high[word + 1]);
            ptx_mma_m16n8k16_f16(sum, x->high, y->low[word], y->low[word + 1]);
            ptx_mma_m16n8k16_f16(sum, x->high, y->high[word], y->high[word + 1]);
#pragma unroll
            for (int e = 0; e < 4; e++) s->at[m][n][e] += sum[e];
#else
            ptx_mma_m16n8k16_f16(s->at[m][n], x->high, y->high[word], y->high[word + 1]);
#endif
        }
    }
}

/* sum += a b, but for the products of a's low parts: those are added to low_sum. Columns of two
 * tiles. */
FA_DEVICE void multiply_high_low(float sum[2][4], float low_sum[2][4], const high_low *a,
                                 const high_low *b)
{
    multiply_pair(low_sum, a->low, b->high);
    if (THREE_PRODUCTS) multiply_pair(sum, a->high, b->low);
    multiply_pair(sum, a->high, b->high);
}

#if !SCORES_ALONE

/* Both sums. */
FA_DEVICE float add_low(float sum, float low_sum) { return fmaf(low_sum, 1.0f / LOW_POWER, sum); }

/* All queries' products. weights: where the lane's fragments of weights or dS begin; tile: those of
 * dout or of queries, of the warp's share; factor: what the units of both are in the gradient's. */
FA_DEVICE void add_high_low_gradient(fa_gradient *g, uint32_t weights, uint32_t tile, float factor)
{
    enum { STEPS = QUERIES / STEP };
    high_low a[STEPS][M_TILES];
#pragma unroll
    for (int i = 0; i < STEPS * M_TILES; i++)
        load_high_low(&a[i / M_TILES][i % M_TILES], fragment_at(weights, i / M_TILES * 2),
                      i % M_TILES * 16 * SCORE_PITCH, true);
#pragma unroll
    for (int n = 0; n < D_TILES; n += 2) {
        float sum[M_TILES][2][4] = {{{0.0f}}};
        high_low b[STEPS];
#pragma unroll
        for (int i = 0; i < STEPS * M_TILES; i++) {
            const int step = i / M_TILES, m = i % M_TILES;
            if (m == 0)
                load_high_low_trans(&b[step], fragment_at(tile, high_unit(n)), step * STEP * PITCH,
                                    THREE_PRODUCTS);
            multiply_pair(sum[m], a[step][m].low, b[step].high);
        }
#pragma unroll
        for (int i = 0; i < M_TILES * 8; i++) sum[i / 8][i / 4 % 2][i % 4] *= 1.0f / LOW_POWER;
#pragma unroll
        for (int i = 0; i < STEPS * M_TILES; i++) {
            const int step = i / M_TILES, m = i % M_TILES;
            if (THREE_PRODUCTS) multiply_pair(sum[m], a[step][m].high, b[step].low);
            multiply_pair(sum[m], a[step][m].high, b[step].high);
        }
#pragma unroll
        for (int i = 0; i < M_TILES * 8; i++) {
            float *x = &g->at[i / 8][n + i / 4 % 2][i % 4];
            *x = fmaf(sum[i / 8][i / 4 % 2][i % 4], factor, *x);
        }
    }
}

/* As make_dq, in the units of both operands. keys: where the lane's fragments of the warp's columns
 * begin. */
FA_DEVICE void make_high_low_dq(fa_dq *dq, uint32_t ds, uint32_t keys, int block)
{
    fa_dq low;
    clear_dq(dq);
    clear_dq(&low);
#pragma unroll
    for (int step = 0; step < KEYS / STEP; step++) {
        high_low a[DQ_M_TILES];
#pragma unroll
        for (int m = 0; m < DQ_M_TILES; m++)
            load_high_low_trans(&a[m], fragment_at(ds, 2 * (block + m)), step * STEP * SCORE_PITCH,
                                true);
#pragma unroll
        for (int n = 0; n < DQ_N_TILES; n += 2) {
            high_low b;
            load_high_low_trans(&b, fragment_at(keys, high_unit(n)), step * STEP * PITCH,
                                THREE_PRODUCTS);
#pragma unroll
            for (int m = 0; m < DQ_M_TILES; m++)
                multiply_high_low(dq->at[m] + n, low.at[m] + n, &a[m], &b);
        }
    }
#pragma unroll
    for (int i = 0; i < DQ_M_TILES * DQ_N_TILES * 4; i++) {
        float *x = &dq->at[i / 4 / DQ_N_TILES][i / 4 % DQ_N_TILES][i % 4];
        *x = add_low(*x, low.at[i / 4 / DQ_N_TILES][i / 4 % DQ_N_TILES][i % 4]);
    }
}

FA_DEVICE void scale_dq(fa_dq *dq, float factor)
{
#pragma unroll
    for (int i = 0; i < DQ_M_TILES * DQ_N_TILES * 4; i++)
        dq->at[i / 4 / DQ_N_TILES][i / 4 % DQ_N_TILES][i % 4] *= factor;
}

/* To shared memory, a row for each key. to: where the lane's word of the first key and of query 0 of
 * the tile goes; unit: of the first query. */
FA_DEVICE void share_high_low(const fa_weights *x, uint32_t to, int unit, float power)
{
#pragma unroll
    for (int i = 0; i < 2;
         i++) { /* keys g and g + 8; in [i] and [2 + i] two neighbouring queries */
        const float first = fa_bits_float(x->at[0][0][i]) * power;
        const float second = fa_bits_float(x->at[0][0][2 + i]) * power;
        const uint32_t at = fragment_at(to + (uint32_t)(8 * i * SCORE_PITCH), unit);
        uint32_t low;
        ptx_st_shared_u32(at, split_two(first, second, LOW_POWER, &low));
        ptx_st_shared_u32(at ^ 64, low);
    }
}

/* ---- Powers of a tile ------------------------------------------------------------------------ */

FA_DEVICE fa_backward_sm80_powers load_tile_powers(uint32_t memory, int count)
{
    const uint4 x = ptx_ld_shared_v4(tile_powers_at(memory, count));
    const fa_backward_sm80_powers powers = {fa_bits_float(x.x), fa_bits_float(x.y),
                                            fa_bits_float(x.z), 0.0f};
    return powers;
}

/* The power of dS, by a bound: |P (dP - delta)| <= |dP| + |delta|, and |dP| is at most d_v times the
 * largest numbers of dout and of the values. unit: what dP is multiplied by. */
FA_DEVICE float find_ds_power(const fa_attention_params *p, uint32_t memory,
                              const fa_backward_sm80_powers *tile, float unit)
{
    const float values = load_power(memory + POWERS_AT, VALUE_INVERSE) * 0x1p15f;
    float dp = tile->dout_inverse * 0x1p15f * values * fabsf(unit) * (float)p->d_v;
    if (OPTIONS && p->dropout_threshold) dp *= p->dropout_scale;
    return find_power(fminf(dp + tile->largest_delta, 0x1p127f)) * 0.25f;
}

/* What the sums of tile number `count` are multiplied by to leave their operands' units. */
FA_DEVICE float find_dv_factor(uint32_t memory, int count)
{
    return load_tile_powers(memory, count).dout_inverse / WEIGHT_POWER;
}

FA_DEVICE float find_dk_factor(const fa_attention_params *p, uint32_t memory, int count, float unit)
{
    const fa_backward_sm80_powers powers = load_tile_powers(memory, count);
    return powers.query_inverse * invert_power(find_ds_power(p, memory, &powers, unit));
}

FA_DEVICE float find_dq_factor(const fa_attention_params *p, uint32_t memory, int count, float unit)
{
    const fa_backward_sm80_powers powers = load_tile_powers(memory, count);
    return load_power(memory + POWERS_AT, KEY_INVERSE) *
           invert_power(find_ds_power(p, memory, &powers, unit));
}

/* Splits keys and values, once. The thread's copies are there. */
FA_DEVICE void split_keys(const fa_attention_params *p, uint32_t memory)
{
    const uint32_t powers = memory + POWERS_AT;
    note_largest(powers, memory + K_AT, KEYS, KEY_LARGEST);
    note_largest(powers, memory + V_AT, KEYS, VALUE_LARGEST);
    __syncthreads();
    const float keys = find_noted_power(powers, KEY_LARGEST);
    const float values = find_noted_power(powers, VALUE_LARGEST);
    split_rows(memory + K_AT, KEYS, p->d, keys);
    split_rows(memory + V_AT, KEYS, p->d_v, values);
    if (ptx_thread_id() == 0) {
        ptx_st_shared_f32(powers + KEY_INVERSE, invert_power(keys));
        ptx_st_shared_f32(powers + VALUE_INVERSE, invert_power(values));
    }
    __syncthreads();
}

#endif

#endif

#endif

#endif
