/*
 * The first launch of backward_sm80: computes the log-sum-exp and delta of a tile of queries, and
 * clears the sums of dQ; in float32 it also stores the float16 parts of queries and dO, and their
 * powers of two. Bound by memory.
 */
#include "backward_sm80/backward_sm80.h"
#include "backward_sm80/split.cuh"
#include "backward_sm80/sums.cuh"
#include "backward_simt/row_product.cuh"
#include "common/reduce.cuh"
#include "common/rows.cuh"
#include "common/sequence.cuh"
#include "common/softmax.cuh"

enum {
    TILE = FA_BACKWARD_SM80_TILE,
    THREADS = FA_BACKWARD_SM80_PASS_THREADS,
    LANES = HEAD_DIM <= 64    ? 8
            : HEAD_DIM <= 128 ? 16
                              : 32,                    /* that share a row */
    VECTOR = 16 / FA_ELEMENT_BYTES(ELEMENT),           /* elements of 16 bytes */
    VECTORS = (HEAD_DIM / VECTOR + LANES - 1) / LANES, /* of a lane */
    ROWS_A_PASS = THREADS / LANES,
    PASSES = TILE / ROWS_A_PASS,
    MOST =
        VECTOR == 4 ? 8 : 16, /* vectors of a tensor in flight; float32 needs room for two blocks */
    TOGETHER = PASSES * VECTORS <= MOST ? PASSES : 4, /* passes whose loads fit in registers */
    LSE_EARLY = HEAD_DIM <= 256, /* with the rows: wider ones would take registers of a block */
    SUM_VECTORS = FA_BACKWARD_SM80_SUM_BYTES(HEAD_DIM) / 16,
    SEMAPHORES = FA_BACKWARD_SM80_SEMAPHORES(ELEMENT, HEAD_DIM)
};

/* The row's log-sum-exp; -infinity after the last query. */
FA_DEVICE float load_row_lse(const fa_backward_params *p, const fa_tile *t, int64_t i)
{
    return i < t->n_q ? p->a.lse[fa_row_index(&p->a, t, i)] : -INFINITY;
}

/* The log-sum-exp becomes infinity for rows whose weights must be 0: those without keys, and those
 * after the last query. If the caller's log-sum-exp is infinity, then the scores are infinite and
 * weights are NaN. */
FA_DEVICE float2 prepare_row(const fa_backward_params *p, const fa_backward_sm80_params *s,
                             const fa_tile *t, int64_t i, float lse, float product)
{
    if (lse == -INFINITY) return make_float2(INFINITY, 0.0f);
    if (lse == INFINITY) return make_float2(NAN, NAN);
    const int bits = FA_BACKWARD_SM80_WEIGHT_BITS(ELEMENT);
    const float dlse = p->dlse ? p->dlse[fa_row_index(&p->a, t, i)] : 0.0f;
    const float delta = (product - dlse) * ds_scale(&p->a, s);
    return make_float2(fmaf(lse, FA_LOG2E, (float)-bits), delta / (float)(1 << bits));
}

/* Whether rows consist of whole, aligned vectors. */
FA_DEVICE bool has_vectors(const fa_kernel_view *view)
{
    return VECTOR == 4 ? view->vector != 0 : view->vector == 8;
}

/* The sum of products of the elements of a vector. */
FA_DEVICE float multiply_vectors(uint4 a, uint4 b)
{
    const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (VECTOR == 4) {
            sum = fmaf(fa_bits_float(x[k]), fa_bits_float(y[k]), sum);
            continue;
        }
        const float2 c = fa_unpack_x2(x[k], ELEMENT), d = fa_unpack_x2(y[k], ELEMENT);
        sum = fmaf(c.x, d.x, fmaf(c.y, d.y, sum));
    }
    return sum;
}

/* TOGETHER passes, from row `first` on. All loads are issued before the first is used. */
FA_DEVICE void prepare_passes(const fa_backward_params *p, const fa_backward_sm80_params *s,
                              const fa_tile *t, float2 *rows, int first)
{
    const int lane = threadIdx.x % LANES;
    uint4 dout[TOGETHER][VECTORS], out[TOGETHER][VECTORS];
    float lse[TOGETHER];
#pragma unroll
    for (int pass = 0; pass < TOGETHER && LSE_EARLY; pass++)
        lse[pass] = lane == 0 ? load_row_lse(p, t, t->first + first + pass * ROWS_A_PASS) : 0.0f;
#pragma unroll
    for (int n = 0; n < TOGETHER * VECTORS; n++) {
        const int pass = n / VECTORS, vector = n % VECTORS,
                  column = VECTOR * (lane + vector * LANES);
        const int64_t i = t->first + first + pass * ROWS_A_PASS;
        dout[pass][vector] = out[pass][vector] = make_uint4(0, 0, 0, 0);
        if (i >= t->n_q || column >= p->a.d_v) continue;
        dout[pass][vector] = *(const uint4 *)(const void *)(fa_view_row(&p->dout, t->block_q,
                                                                        t->start_q + i, t->head) +
                                                            16 / VECTOR * column);
        out[pass][vector] = *(const uint4 *)(const void *)(fa_view_row(&p->a.out, t->block_q,
                                                                       t->start_q + i, t->head) +
                                                           16 / VECTOR * column);
    }
#pragma unroll
    for (int pass = 0; pass < TOGETHER; pass++) {
        const int row = first + pass * ROWS_A_PASS;
        float sum = 0.0f;
#pragma unroll
        for (int vector = 0; vector < VECTORS; vector++)
            sum += multiply_vectors(dout[pass][vector], out[pass][vector]);
#pragma unroll
        for (int other = LANES / 2; other > 0; other /= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, other);
        if (lane != 0) continue;
        if (!LSE_EARLY) lse[pass] = load_row_lse(p, t, t->first + row);
        rows[row] = prepare_row(p, s, t, t->first + row, lse[pass], sum);
    }
}

/* Rows whose elements are loaded 16 bytes at once. */
FA_DEVICE void prepare_vectors(const fa_backward_params *p, const fa_backward_sm80_params *s,
                               const fa_tile *t, float2 *rows)
{
    const int first = (int)(threadIdx.x / LANES);
#pragma unroll 1
    for (int pass = 0; pass < PASSES; pass += TOGETHER)
        prepare_passes(p, s, t, rows, first + pass * ROWS_A_PASS);
}

/* All other rows: a warp for each. */
FA_DEVICE void prepare_rows(const fa_backward_params *p, const fa_backward_sm80_params *s,
                            const fa_tile *t, float2 *rows)
{
#pragma unroll 1
    for (int r = (int)threadIdx.x / 32; r < TILE; r += THREADS / 32) {
        const int64_t i = t->first + r;
        const float product = fa_warp_sum(i < t->n_q ? fa_row_product(p, t, i) : 0.0f);
        if (threadIdx.x % 32 == 0)
            rows[r] = prepare_row(p, s, t, i, load_row_lse(p, t, i), product);
    }
}

#if FA_ELEMENT_BYTES(ELEMENT) == 4

/* Stores zeros in the caller's rows of dq, if these are the sums. Rows after the last query keep
 * them. */
FA_DEVICE void clear_rows(const fa_backward_params *p, const fa_tile *t)
{
    enum { ROW_VECTORS = HEAD_DIM / 4 };
#pragma unroll
    for (int n = 0; n < SUM_VECTORS / THREADS; n++) {
        const int at = n * THREADS + (int)threadIdx.x;
        const int64_t i = t->first + at / ROW_VECTORS;
        if (i >= t->room_q) return;
        fa_store4_float32(fa_view_row(&p->dq, t->block_q, t->start_q + i, t->head),
                          p->dq.vector != 0, 4 * (at % ROW_VECTORS), p->a.d,
                          make_float4(0, 0, 0, 0));
    }
}

/* ---- Queries and dout as float16 parts ------------------------------------------------------- */

/* A lane processes one number of each unit of 32 columns, which together are a unit of high parts
 * and one of low parts. It does this LANE_ITEMS times. A warp processes WARP_ROWS rows side by side. */
enum {
    ROW_ITEMS = HEAD_DIM / 32 * 4,
    ROW_LANES = ROW_ITEMS < 32 ? ROW_ITEMS : 32,
    LANE_ITEMS = (ROW_ITEMS + ROW_LANES - 1) / ROW_LANES,
    WARP_ROWS = 32 / ROW_LANES,
    ROWS_AT_ONCE = THREADS / ROW_LANES
};

typedef struct row_numbers {
    float at[LANE_ITEMS][8];
} row_numbers;

/* Whether a row of the tile has weights. Other rows may hold anything, and become zeros. */
FA_DEVICE bool has_weights(const float2 *rows, int row) { return rows[row].x != INFINITY; }

/* The numbers of a row, if it exists. */
FA_DEVICE void load_numbers(row_numbers *x, const fa_kernel_view *view, const fa_tile *t, int row,
                            int columns)
{
    const int64_t at = t->first + row;
    const float *from =
        (const float *)(const void *)fa_view_row(view, t->block_q, t->start_q + at, t->head);
#pragma unroll
    for (int i = 0; i < LANE_ITEMS * 8; i++) {
        const int item = (int)threadIdx.x % ROW_LANES + i / 8 * ROW_LANES;
        const int column = item / 4 * 32 + i % 8 * 4 + item % 4;
        x->at[i / 8][i % 8] = at < t->n_q && column < columns ? from[column] : 0.0f;
    }
}

/* Numbers of a row without weights become zeros. */
FA_DEVICE void hide_numbers(row_numbers *x, bool seen)
{
#pragma unroll
    for (int i = 0; i < LANE_ITEMS * 8; i++)
        x->at[i / 8][i % 8] = seen ? x->at[i / 8][i % 8] : 0.0f;
}

/* Writes a row's parts. Returns the inverse of its power, times SPLIT_UNIT. */
FA_DEVICE float split_row(const row_numbers *x, int columns, char *to, bool has_low)
{
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_ITEMS * 8; i++) largest = find_larger(largest, x->at[i / 8][i % 8]);
#pragma unroll
    for (int other = ROW_LANES / 2; other > 0; other /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, other));
    const float power = find_power(largest);
#pragma unroll
    for (int i = 0; i < LANE_ITEMS; i++) {
        const int item = (int)threadIdx.x % ROW_LANES + i * ROW_LANES;
        uint32_t high[4], low[4];
        if (item >= (columns + 31) / 32 * 4) break;
#pragma unroll
        for (int j = 0; j < 4; j++)
            high[j] = split_two(x->at[i][gradient_unit(j, 0)] * power,
                                x->at[i][gradient_unit(j, 1)] * power, &low[j]);
        char *unit = to + item / 4 * 128 + item % 4 * 16;
        *(uint4 *)(void *)unit = make_uint4(high[0], high[1], high[2], high[3]);
        if (has_low) *(uint4 *)(void *)(unit + 64) = make_uint4(low[0], low[1], low[2], low[3]);
    }
    return invert_power(power) * SPLIT_UNIT;
}

/* rows: of the tile, which the block writes. The loads of SPLIT_TOGETHER passes are issued before the first is used; those of
 * the first passes before the block waits for `rows`. */
FA_DEVICE void split_tiles(const fa_backward_params *p, const fa_backward_sm80_params *s,
                           const fa_tile *t, const float2 *rows, int64_t number)
{
    enum {
        SPLIT_PASSES = TILE / ROWS_AT_ONCE,
        SPLIT_TOGETHER = LANE_ITEMS > 1     ? 2
                         : SPLIT_PASSES < 4 ? SPLIT_PASSES
                                            : 4
    };
    char *parts = s->parts + number * 2 * FA_BACKWARD_SM80_PART_BYTES(HEAD_DIM);
    const int d = (int)p->a.d, d_v = (int)p->a.d_v;
#pragma unroll 1
    for (int first = 0; first < SPLIT_PASSES; first += SPLIT_TOGETHER) {
        row_numbers query[SPLIT_TOGETHER], dout[SPLIT_TOGETHER];
        const int first_row = (int)threadIdx.x / ROW_LANES + first * ROWS_AT_ONCE;
#pragma unroll
        for (int i = 0; i < SPLIT_TOGETHER; i++) {
            load_numbers(&query[i], &p->a.q, t, first_row + i * ROWS_AT_ONCE, d);
            load_numbers(&dout[i], &p->dout, t, first_row + i * ROWS_AT_ONCE, d_v);
        }
        if (first == 0) __syncthreads();
#pragma unroll
        for (int i = 0; i < SPLIT_TOGETHER; i++) {
            const int row = first_row + i * ROWS_AT_ONCE;
            char *to = parts + row * 4 * HEAD_DIM;
            const bool seen = has_weights(rows, row);
            fa_backward_sm80_powers inverses;
            hide_numbers(&query[i], seen);
            hide_numbers(&dout[i], seen);
            inverses.query_inverse = split_row(&query[i], d, to, s->low_parts);
            inverses.dout_inverse =
                split_row(&dout[i], d_v, to + FA_BACKWARD_SM80_PART_BYTES(HEAD_DIM), s->low_parts);
            if (threadIdx.x % ROW_LANES == 0) s->powers[number * TILE + row] = inverses;
        }
    }
}

#endif

FA_KERNEL __launch_bounds__(THREADS, 1)
    backward_sm80_prepare(const __grid_constant__ fa_backward_params p,
                          const __grid_constant__ fa_backward_sm80_params s)
{
    __shared__ fa_tile tile;
    const int64_t number = find_own_tile(&s, blockIdx.x);
    float4 *sums = (float4 *)(void *)s.sums + number * SUM_VECTORS;
    float2 *rows = (float2 *)(void *)s.rows + number * TILE;
    if (threadIdx.x == 0) tile = fa_find_tile(&p.a, blockIdx.x, TILE);
#pragma unroll
    for (int i = 0; i < SUM_VECTORS / THREADS; i++)
        if (p.dq.data && !is_in_place(&s))
            sums[i * THREADS + threadIdx.x] = make_float4(0, 0, 0, 0);
    if (s.semaphores && threadIdx.x < SEMAPHORES)
        s.semaphores[number * SEMAPHORES + threadIdx.x] = 0;
    __syncthreads();
#if FA_ELEMENT_BYTES(ELEMENT) == 4
    if (p.dq.data && is_in_place(&s)) clear_rows(&p, &tile);
#endif
    if (has_vectors(&p.dout) && has_vectors(&p.a.out)) prepare_vectors(&p, &s, &tile, rows);
    else prepare_rows(&p, &s, &tile, rows);
#if FA_ELEMENT_BYTES(ELEMENT) == 4
    if (s.parts) split_tiles(&p, &s, &tile, rows, number);
#endif
}
