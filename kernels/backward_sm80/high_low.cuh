/*
 * Float32 operands as float16 parts, high parts and for three products also low parts; and the
 * products of wide heads (own_parts.cuh has the others). Keys and values are split once, in shared
 * memory. `prepare` splits queries and dout, so their rows are copied from the workspace unchanged.
 * Weights and dS are split when they are stored. So no product splits its operands, 16 elements are
 * multiplied where tf32 has 8, and ldmatrix can transpose them. docs/kernels/backward_sm80.md has
 * the budget.
 *
 * 32 columns of a row, 128 bytes, become 64 bytes of high parts and 64 bytes of low parts. The
 * address of a low part is that of its high part, ^ 64. The 32 columns are eight units of four
 * columns. Element 8 c + i of the parts is column c of unit gradient_unit(i / 2, i % 2). So the
 * columns of gradients are in the registers that multiply.cuh specifies. Sums over the head dim
 * have another order of columns, which is the same for all operands.
 *
 * Before a row is split, it is multiplied by its own power of two, which brings its largest number
 * near 2^15. So rows of different sizes may be in one tile, and large numbers of a key that no
 * query sees cost the others no bits. A product of two rows is multiplied by both inverse powers.
 * If a product sums over rows, its other operand is multiplied by their inverse powers first:
 * weights by those of dout (dV), dS by those of queries (dK) or of keys (dQ). So dS differs for dK
 * and dQ. Rows of these three operands have their own powers, too: the largest number of each row
 * is found in each tile.
 */
#ifndef FA_KERNELS_BACKWARD_SM80_HIGH_LOW_CUH
#define FA_KERNELS_BACKWARD_SM80_HIGH_LOW_CUH

#include "backward_sm80/layout.cuh"
#include "backward_sm80/load.cuh"
#include "backward_sm80/multiply.cuh"
#include "backward_sm80/split.cuh"
#include "backward_sm80/tile_part.cuh"
#include "common/reduce.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"

#if HIGH_LOW

/* Of 16 x 16 elements, as ldmatrix loads them. */
typedef struct high_low {
    uint32_t high[4], low[4];
} high_low;

/* ---- Powers of two --------------------------------------------------------------------------- */

/* Inverse powers of keys g and g + 8 and of their values, times KEY_UNIT. */
typedef struct key_powers {
    float key[2], value[2];
} key_powers;

/* Those of two adjacent queries and of their dout, times SPLIT_UNIT. */
typedef struct query_powers {
    float query[2], dout[2];
} query_powers;

FA_DEVICE key_powers load_key_powers(uint32_t at)
{
    const float2 x = ptx_ld_shared_f32x2(at), y = ptx_ld_shared_f32x2(at + 64);
    const key_powers powers = {{x.x, y.x}, {x.y, y.y}};
    return powers;
}

FA_DEVICE query_powers load_query_powers(uint32_t at)
{
    const uint4 x = ptx_ld_shared_v4(at);
    const query_powers powers = {{fa_bits_float(x.x), fa_bits_float(x.z)},
                                 {fa_bits_float(x.y), fa_bits_float(x.w)}};
    return powers;
}

/* A block of one gradient has many keys for few warps. */
enum { ROWS_OF_POWERS = ONE_GRADIENT ? 4 : 1 };

/* Finds the powers of rows of keys or values, with a warp for each row, and stores their inverses,
 * times KEY_UNIT: the one of row r at offset 8 r. */
FA_DEVICE void find_row_powers(uint32_t inverses, uint32_t at, int rows)
{
    const int lane = ptx_thread_id() % 32;
#pragma unroll ROWS_OF_POWERS
    for (int row = ptx_thread_id() / 32; row < rows; row += WARPS) {
        float largest = 0.0f;
#pragma unroll
        for (int unit = lane; unit < ROW_VECTORS; unit += 32) {
            const uint4 four = ptx_ld_shared_v4(at + (uint32_t)(row * PITCH + unit / 8 * 128) +
                                                permuted(row, unit & 7, PITCH) * 16);
            largest = find_larger(largest, fa_bits_float(four.x));
            largest = find_larger(largest, fa_bits_float(four.y));
            largest = find_larger(largest, fa_bits_float(four.z));
            largest = find_larger(largest, fa_bits_float(four.w));
        }
        largest = fa_warp_max(largest);
        if (lane == 0)
            ptx_st_shared_f32(inverses + 8 * (uint32_t)row,
                              invert_power(find_power(largest)) * KEY_UNIT);
    }
}

/* ---- Parts ----------------------------------------------------------------------------------- */

/* Splits 32 columns of a row. at: their address; row: its number. */
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
            high[t] = split_two(x[gradient_unit(t, 0)][c], x[gradient_unit(t, 1)][c], &low[t]);
        const uint32_t to = at + permuted(row, c, PITCH) * 16;
        ptx_st_shared_v4(to, make_uint4(high[0], high[1], high[2], high[3]));
        if (THREE_PRODUCTS) ptx_st_shared_v4(to ^ 64, make_uint4(low[0], low[1], low[2], low[3]));
    }
}

/* Splits rows in place. columns: the number of columns that exist; after them there are zeros,
 * which stay. Eight lanes that load or store at the same time access eight rows. */
FA_DEVICE void split_rows(uint32_t inverses, uint32_t at, int rows, int columns)
{
    const int items = (columns + 31) / 32 * rows;
#pragma unroll 1
    for (int item = ptx_thread_id(); item < items; item += THREADS) {
        const int row = item % rows;
        const float inverse = ptx_ld_shared_f32(inverses + 8 * (uint32_t)row) * (1 / KEY_UNIT);
        split_columns(at + (uint32_t)(row * PITCH + item / rows * 128), row, invert_power(inverse));
    }
}

/* at: the address of the lane's first fragment; offset: in whole groups of banks. One product has
 * no low parts. */
FA_DEVICE void load_high_low(high_low *x, uint32_t at, int offset)
{
    ptx_ldmatrix_x4(x->high, at + (uint32_t)offset);
    if (THREE_PRODUCTS) ptx_ldmatrix_x4(x->low, (at ^ 64) + (uint32_t)offset);
}

FA_DEVICE void load_high_low_trans(high_low *x, uint32_t at, int offset)
{
    ptx_ldmatrix_x4_trans(x->high, at + (uint32_t)offset);
    if (THREE_PRODUCTS) ptx_ldmatrix_x4_trans(x->low, (at ^ 64) + (uint32_t)offset);
}

/* Multiplies columns of two tiles. */
FA_DEVICE void multiply_pair(float sum[2][4], const uint32_t a[4], const uint32_t b[4])
{
    ptx_mma_m16n8k16_f16(sum[0], a, b[0], b[1]);
    ptx_mma_m16n8k16_f16(sum[1], a, b[2], b[3]);
}

/* The product of two operands is the sum of this many products of their parts. */
enum { PRODUCTS = THREE_PRODUCTS ? 3 : 1 };

/* One of these products, the smallest first, for columns of two tiles. */
FA_DEVICE void multiply_parts(float sum[2][4], const high_low *a, const high_low *b, int product)
{
    if (product == PRODUCTS - 1) multiply_pair(sum, a->high, b->high);
    else multiply_pair(sum, product ? a->high : a->low, product ? b->low : b->high);
}

#if SLICES

/* ---- Products -------------------------------------------------------------------------------- */

/* The products of 32 columns. With three products, sums start from 0 for each 16 columns. rows,
 * columns: where the lane's fragments of keys and of queries begin. */
FA_DEVICE void add_high_low_scores(fa_score_sums *s, uint32_t rows, uint32_t columns)
{
    high_low b[(N_TILES + 1) / 2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        high_low a[M_TILES];
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
            load_high_low(&a[m], fragment_at(rows, 2 * i), m * 16 * PITCH);
#pragma unroll
        for (int n = 0; n < N_TILES; n += 2)
            if (i == 0 || !PAIRS)
                load_high_low(&b[n / 2], fragment_at(columns, 2 * i), n / 2 * 16 * PITCH);
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

/* sum += a b, for columns of two tiles. */
FA_DEVICE void multiply_high_low(float sum[2][4], const high_low *a, const high_low *b)
{
#pragma unroll
    for (int product = 0; product < PRODUCTS; product++) multiply_parts(sum, a, b, product);
}

#if !SCORES_ALONE

/* The products of all queries. weights: where the lane's fragments of weights or dS begin; tile:
 * where those of dout or of queries begin, of the warp's share; factors: those of the lane's first
 * row of the gradient; columns: those of the share that exist, in a kernel of one gradient. */
FA_DEVICE void add_high_low_gradient(fa_gradient *g, uint32_t weights, uint32_t tile,
                                     uint32_t factors, int columns)
{
    enum { STEPS = QUERIES / STEP };
    high_low a[STEPS][M_TILES];
    float factor[2 * M_TILES];
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; i++) factor[i] = ptx_ld_shared_f32(factors + 32 * (uint32_t)i);
#pragma unroll
    for (int i = 0; i < STEPS * M_TILES; i++)
        load_high_low(&a[i / M_TILES][i % M_TILES], fragment_at(weights, i / M_TILES * 2),
                      i % M_TILES * 16 * SCORE_PITCH);
#pragma unroll
    for (int n = 0; n < D_TILES; n += 2) {
        if (ONE_GRADIENT && n > 0 && n % COLUMN_TILES == 0 && 8 * n >= columns) break;
        float sum[M_TILES][2][4] = {{{0.0f}}};
        high_low b[STEPS];
#pragma unroll
        for (int i = 0; i < STEPS * M_TILES; i++) {
            const int step = i / M_TILES, m = i % M_TILES;
            if (m == 0)
                load_high_low_trans(&b[step], fragment_at(tile, high_unit(n)), step * STEP * PITCH);
            multiply_high_low(sum[m], &a[step][m], &b[step]);
        }
#pragma unroll
        for (int i = 0; i < M_TILES * 8; i++) {
            float *x = &g->at[i / 8][n + i / 4 % 2][i % 4];
            *x = fmaf(sum[i / 8][i / 4 % 2][i % 4], factor[i / 8 * 2 + i / 2 % 2], *x);
        }
    }
}

/* Like make_dq. keys: where the lane's fragments of keys begin; column: the warp's first tile of
 * columns, an even number; factors: those of the lane's first row of dQ. */
FA_DEVICE void make_high_low_dq(fa_dq *dq, uint32_t ds, uint32_t keys, int column, uint32_t factors,
                                int block)
{
    /* Of 32 columns, the first two tiles and the others. */
    const int odd = DQ_N_TILES % COLUMN_TILES != 0 ? column & 2 : 0;
    const uint32_t own = keys + (uint32_t)((column - odd) * 8 * ELEMENT_BYTES);
    const uint32_t at[2] = {fragment_at(own, high_unit(odd)), fragment_at(own, high_unit(odd + 2))};
    clear_dq(dq);
#pragma unroll
    for (int step = 0; step < KEYS / STEP; step++) {
        high_low a[DQ_M_TILES];
#pragma unroll
        for (int m = 0; m < DQ_M_TILES; m++)
            load_high_low_trans(&a[m], fragment_at(ds, 2 * (block + m)), step * STEP * SCORE_PITCH);
#pragma unroll
        for (int n = 0; n < DQ_N_TILES; n += 2) {
            high_low b;
            load_high_low_trans(&b, at[n / 2 % 2], n / 4 * 128 + step * STEP * PITCH);
#pragma unroll
            for (int m = 0; m < DQ_M_TILES; m++) multiply_high_low(dq->at[m] + n, &a[m], &b);
        }
    }
#pragma unroll
    for (int r = 0; r < 2 * DQ_M_TILES; r++) {
        const float factor = ptx_ld_shared_f32(factors + 32 * (uint32_t)r);
#pragma unroll
        for (int i = 0; i < DQ_N_TILES * 2; i++) dq->at[r / 2][i / 2][r % 2 * 2 + i % 2] *= factor;
    }
}

/* ---- Weights and dS as operands -------------------------------------------------------------- */

/* What a lane has of the warp's 16 keys and 8 queries, times the inverse powers of the rows over
 * which a product sums: element [2 i + r] is key g + 8 r and query 2 t + i. */
typedef struct fa_operands {
    float dv[4], dk[4], dq[4];
} fa_operands;

/* Powers of the lane's keys, for rows of dV and dK, and of its queries, for those of dQ. */
typedef struct fa_operand_powers {
    float dv[2], dk[2], dq[2];
} fa_operand_powers;

/* weights, ds: words of the warp's tile, in the order of fa_weights. */
FA_DEVICE fa_operands make_operands(const tile_part *part, const uint32_t weights[4],
                                    const uint32_t ds[4])
{
    const key_powers keys = load_key_powers(part->key_powers);
    const query_powers queries = load_query_powers(part->query_powers);
    fa_operands x;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float y = fa_bits_float(ds[e]);
        x.dv[e] = fa_bits_float(weights[e]) * queries.dout[e / 2];
        x.dk[e] = y * queries.query[e / 2];
        x.dq[e] = y * (keys.key[e % 2] * (SPLIT_UNIT / KEY_UNIT));
    }
    return x;
}

FA_DEVICE float max_of_sizes(float x, float y) { return fmaxf(fabsf(x), fabsf(y)); }

/* Lane t of four adjacent lanes gets the max of their four numbers t. */
FA_DEVICE float max_of_own(const float x[4])
{
    const bool upper = (ptx_thread_id() & 2) != 0, odd = (ptx_thread_id() & 1) != 0;
    const float a =
        fmaxf(upper ? x[2] : x[0], __shfl_xor_sync(0xffffffffu, upper ? x[0] : x[2], 2));
    const float b =
        fmaxf(upper ? x[3] : x[1], __shfl_xor_sync(0xffffffffu, upper ? x[1] : x[3], 2));
    return fmaxf(odd ? b : a, __shfl_xor_sync(0xffffffffu, odd ? a : b, 1));
}

/* Stores the largest numbers of the warp's tiles: for its keys, of their rows of weights and dS; for
 * its queries, of their rows of dS. */
FA_DEVICE void store_largest(uint32_t largest, const tile_part *part,
                             const fa_operands operands[WEIGHT_M_TILES])
{
    const int lane = ptx_thread_id() % 32, t = lane % 4, g = lane / 4;
    const int query = 8 * part->unit + 2 * t + g;
    float first = 0.0f, second = 0.0f;
#pragma unroll
    for (int m = 0; m < WEIGHT_M_TILES; m++) {
        const fa_operands *x = &operands[m];
        const float own[4] = {max_of_sizes(x->dv[0], x->dv[2]), max_of_sizes(x->dv[1], x->dv[3]),
                              max_of_sizes(x->dk[0], x->dk[2]), max_of_sizes(x->dk[1], x->dk[3])};
        const int key = t / 2 * KEYS + part->key + 16 * m + 8 * (t % 2);
        ptx_st_shared_f32(largest + KEY_LARGEST + (uint32_t)(key * TILES_ACROSS + part->unit) * 4,
                          max_of_own(own));
        const float a = max_of_sizes(x->dq[0], x->dq[1]), b = max_of_sizes(x->dq[2], x->dq[3]);
        first = m == 0 ? a : fmaxf(first, a), second = m == 0 ? b : fmaxf(second, b);
    }
    float y =
        fmaxf(g % 2 ? second : first, __shfl_xor_sync(0xffffffffu, g % 2 ? first : second, 4));
    y = fmaxf(y, __shfl_xor_sync(0xffffffffu, y, 8));
    y = fmaxf(y, __shfl_xor_sync(0xffffffffu, y, 16));
    if (g < 2)
        ptx_st_shared_f32(largest + QUERY_LARGEST +
                              (uint32_t)(query * 2 + part->key / (16 * WEIGHT_M_TILES)) * 4,
                          y);
}

/* The power of row `key` of dV or dK. */
FA_DEVICE float load_key_power(uint32_t largest, int key)
{
    const uint32_t at = largest + KEY_LARGEST + (uint32_t)(key * TILES_ACROSS) * 4;
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < TILES_ACROSS; i += 2) {
        const float2 x = ptx_ld_shared_f32x2(at + 4 * (uint32_t)i);
        most = fmaxf(most, fmaxf(x.x, x.y));
    }
    return find_power(most);
}

static_assert(TILES_DOWN == 2 * WEIGHT_M_TILES && TILES_ACROSS % 2 == 0,
              "largest numbers are loaded together");

/* Loads the powers that follow from what all warps have stored: those of the warp's keys. */
FA_DEVICE void load_powers_of_keys(fa_operand_powers *powers, uint32_t largest,
                                   const tile_part *part)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        powers->dv[r] = load_key_power(largest, part->key + 8 * r);
        powers->dk[r] = load_key_power(largest, KEYS + part->key + 8 * r);
    }
}

/* Those of its queries. */
FA_DEVICE void load_powers_of_queries(fa_operand_powers *powers, uint32_t largest,
                                      const tile_part *part)
{
    const int query = 8 * part->unit + ptx_thread_id() % 4 * 2;
    const uint4 x = ptx_ld_shared_v4(largest + QUERY_LARGEST + (uint32_t)query * 8);
    powers->dq[0] = find_power(fmaxf(fa_bits_float(x.x), fa_bits_float(x.y)));
    powers->dq[1] = find_power(fmaxf(fa_bits_float(x.z), fa_bits_float(x.w)));
}

/* The warps with the tile's first queries store those of rows of dV and dK, and the warps with the
 * first keys those of rows of dQ. */
FA_DEVICE void store_factors_of_rows(uint32_t largest, const tile_part *part,
                                     const fa_operand_powers *powers)
{
    const int lane = ptx_thread_id() % 32, t = lane % 4, g = lane / 4;
    const float dv = t % 2 ? powers->dv[1] : powers->dv[0];
    const float dk = t % 2 ? powers->dk[1] : powers->dk[0];
    if (part->unit == 0)
        ptx_st_shared_f32(largest + (t < 2 ? DV_FACTORS : DK_FACTORS) +
                              (uint32_t)(part->key + t % 2 * 8) * 4,
                          find_gradient_factor(t < 2 ? dv : dk));
    if (part->key < 16 && g < 2)
        ptx_st_shared_f32(largest + DQ_FACTORS + (uint32_t)(8 * part->unit + 2 * t + g) * 4,
                          find_gradient_factor(g ? powers->dq[1] : powers->dq[0]));
}

/* Stores the parts of two adjacent queries in a key's row. */
FA_DEVICE void store_parts(uint32_t row, int unit, float first, float second)
{
    const uint32_t at = fragment_at(row, unit);
    uint32_t low;
    ptx_st_shared_u32(at, split_two(first, second, &low));
    if (THREE_PRODUCTS) ptx_st_shared_u32(at ^ 64, low);
}

/* Stores the parts of a tile of 16 keys and 8 queries. */
FA_DEVICE void store_operands(const tile_part *part, const fa_operands *x,
                              const fa_operand_powers *powers)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const uint32_t row = part->weights_word + (uint32_t)(8 * r * SCORE_PITCH);
        store_parts(row, part->unit, x->dv[r] * powers->dv[r], x->dv[2 + r] * powers->dv[r]);
        store_parts(row + DS_AT - WEIGHTS_AT, part->unit, x->dk[r] * powers->dk[r],
                    x->dk[2 + r] * powers->dk[r]);
        store_parts(row + DQ_DS_AT - WEIGHTS_AT, part->unit, x->dq[r] * powers->dq[0],
                    x->dq[2 + r] * powers->dq[1]);
    }
}

/* Stores weights and dS in shared memory, a row for each key: all warps need them for dV, dK and
 * dQ. All warps have stored their largest numbers. So all parts of scores have been read, and
 * weights and dS overwrite them. */
FA_DEVICE void share_operands(uint32_t memory, const tile_part *part,
                              const fa_operands operands[WEIGHT_M_TILES])
{
    const uint32_t largest = memory + LARGEST_AT;
    fa_operand_powers powers;
    load_powers_of_queries(&powers, largest, part);
#pragma unroll
    for (int m = 0; m < WEIGHT_M_TILES; m++) {
        const tile_part own = find_keys_part(part, m);
        load_powers_of_keys(&powers, largest, &own);
        store_factors_of_rows(largest, &own, &powers);
        store_operands(&own, &operands[m], &powers);
    }
}

#endif

#endif

#if ONE_GRADIENT

/* Splits keys or values, once. The copies of all threads have arrived. at: K_AT or V_AT. */
FA_DEVICE void split_key_rows(uint32_t memory, uint32_t at, int columns)
{
    const uint32_t inverses = memory + POWERS_AT + KEY_POWERS + (at == V_AT ? 4 : 0);
    find_row_powers(inverses, memory + at, KEYS);
    __syncthreads();
    split_rows(inverses, memory + at, KEYS, columns);
}

#else

/* Splits keys and values, once. The copies of all threads have arrived. */
FA_DEVICE void split_keys(const fa_attention_params *p, uint32_t memory)
{
    const uint32_t inverses = memory + POWERS_AT + KEY_POWERS;
    find_row_powers(inverses, memory + K_AT, KEYS);
    find_row_powers(inverses + 4, memory + V_AT, KEYS);
    __syncthreads();
    split_rows(inverses, memory + K_AT, KEYS, p->d);
    split_rows(inverses + 4, memory + V_AT, KEYS, p->d_v);
}

#endif

#endif

#endif
