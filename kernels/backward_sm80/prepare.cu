/*
 * The first launch of backward_sm80: computes the log-sum-exp and delta of a tile of queries, and
 * clears the sums of dQ; in float32 it also stores the float16 parts of queries and dO, and their
 * powers of two. Bound by memory.
 */
#include "backward_sm80/backward_sm80.h"
#include "backward_sm80/norms.cuh"
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
    TOGETHER = PASSES * VECTORS <= 16 ? PASSES : 4, /* passes whose loads fit in registers */
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

#if FA_ELEMENT_BYTES(ELEMENT) == 2

/* Whether rows consist of whole, aligned vectors. */
FA_DEVICE bool has_vectors(const fa_kernel_view *view) { return view->vector == 8; }

/* The sum of products of the elements of a vector. */
FA_DEVICE float multiply_vectors(uint4 a, uint4 b)
{
    const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < 4; k++) {
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
        sum = fa_sum_from_far(sum, LANES);
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

#else

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

/* ---- Rows, and queries and dout as float16 parts --------------------------------------------- */

/* A lane has every ROW_LANES-th unit of four columns of a row. A block has ROWS_AT_ONCE rows side by side; the loads of
 * ROWS_TOGETHER of these are issued before the first is used. */
enum {
    ROW_LANES = HEAD_DIM / 4 < 32        ? HEAD_DIM / 4
                : HEAD_DIM / 4 % 32 == 0 ? 32
                                         : 16,
    ROW_UNITS = HEAD_DIM / 4 / ROW_LANES,
    ROWS_AT_ONCE = THREADS / ROW_LANES,
    ROWS_TOGETHER = ROW_UNITS == 1   ? 4
                    : ROW_UNITS == 2 ? 2
                                     : 1
};
static_assert(ROW_LANES * ROW_UNITS * 4 == HEAD_DIM && TILE % (ROWS_AT_ONCE * ROWS_TOGETHER) == 0,
              "whole passes");

typedef struct row_numbers {
    float4 at[ROW_UNITS];
} row_numbers;

/* The lane's numbers of a row, if it exists. vectors: rows consist of whole, aligned vectors. */
FA_DEVICE void load_row(row_numbers *x, const char *row, bool exists, bool vectors, int columns)
{
    const float *from = (const float *)(const void *)row;
#pragma unroll
    for (int n = 0; n < ROW_UNITS; n++) {
        const int column = 4 * ((int)threadIdx.x % ROW_LANES + n * ROW_LANES);
        x->at[n] = make_float4(0, 0, 0, 0);
        if (!exists || column >= columns) continue;
        if (vectors) {
            x->at[n] = *(const float4 *)(const void *)(from + column);
            continue;
        }
        x->at[n].x = from[column];
        if (column + 1 < columns) x->at[n].y = from[column + 1];
        if (column + 2 < columns) x->at[n].z = from[column + 2];
        if (column + 3 < columns) x->at[n].w = from[column + 3];
    }
}

/* Those of row i of queries, dout or outputs. */
FA_DEVICE void load_numbers(row_numbers *x, const fa_kernel_view *view, const fa_tile *t, int64_t i,
                            int columns)
{
    load_row(x, fa_view_row(view, t->block_q, t->start_q + i, t->head), i < t->n_q,
             view->vector != 0, columns);
}

/* The sum of the products of two rows' numbers. */
FA_DEVICE float multiply_numbers(const row_numbers *x, const row_numbers *y)
{
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < ROW_UNITS; n++) {
        sum = fmaf(x->at[n].x, y->at[n].x, sum);
        sum = fmaf(x->at[n].y, y->at[n].y, sum);
        sum = fmaf(x->at[n].z, y->at[n].z, sum);
        sum = fmaf(x->at[n].w, y->at[n].w, sum);
    }
    return fa_sum_from_far(sum, ROW_LANES);
}

/* Writes a row's parts; those of a row without weights, which may hold anything, are zeros. Returns the inverse of its power,
 * times SPLIT_UNIT. */
FA_DEVICE float split_row(row_numbers *x, bool seen, int columns, char *to, bool has_low)
{
    const int lane = (int)threadIdx.x % ROW_LANES;
    float largest = 0.0f;
#pragma unroll
    for (int n = 0; n < ROW_UNITS; n++) {
        if (!seen) x->at[n] = make_float4(0, 0, 0, 0);
        largest = find_larger(largest, x->at[n].x);
        largest = find_larger(largest, x->at[n].y);
        largest = find_larger(largest, x->at[n].z);
        largest = find_larger(largest, x->at[n].w);
    }
    const float power = find_power(fa_max_from_far(largest, ROW_LANES));
    to += unit_of_parts(lane) * 16 + byte_in_unit(lane);
#pragma unroll
    for (int n = 0; n < ROW_UNITS; n++) {
        const int group = (lane + n * ROW_LANES) / 8; /* of 32 columns */
        const lane_parts parts = split_unit(x->at[n], power, lane);
        if (32 * group >= columns) continue;
        *(uint2 *)(void *)(to + 128 * group) = make_uint2(parts.high[0], parts.high[1]);
        if (has_low)
            *(uint2 *)(void *)(to + 128 * group + 64) = make_uint2(parts.low[0], parts.low[1]);
    }
    return invert_power(power) * SPLIT_UNIT;
}

/* The squared norms of the longest rows that the thread has seen, of queries that have weights and of keys. */
typedef struct squared_norms {
    float query, key;
} squared_norms;

/* Rows of the tile, from `first` on, ROWS_AT_ONCE apart. needs_norms: whether norms are wanted. */
FA_DEVICE void prepare_rows(const fa_backward_params *p, const fa_backward_sm80_params *s,
                            const fa_tile *t, float2 *rows, int first, int64_t number,
                            bool needs_norms, squared_norms *norms)
{
    char *parts = s->parts + number * 2 * FA_BACKWARD_SM80_PART_BYTES(HEAD_DIM);
    const int d = (int)p->a.d, d_v = (int)p->a.d_v;
    row_numbers query[ROWS_TOGETHER], dout[ROWS_TOGETHER], out[ROWS_TOGETHER];
    float lse[ROWS_TOGETHER];
#pragma unroll
    for (int r = 0; r < ROWS_TOGETHER; r++) {
        const int64_t i = t->first + first + r * ROWS_AT_ONCE;
        lse[r] = load_row_lse(p, t, i);
        load_numbers(&dout[r], &p->dout, t, i, d_v);
        load_numbers(&out[r], &p->a.out, t, i, d_v);
        load_numbers(&query[r], &p->a.q, t, i, d);
    }
#pragma unroll
    for (int r = 0; r < ROWS_TOGETHER; r++) {
        const int row = first + r * ROWS_AT_ONCE;
        const bool seen = lse[r] != -INFINITY;
        const float product = multiply_numbers(&dout[r], &out[r]);
        if (needs_norms) {
            const float square = multiply_numbers(&query[r], &query[r]);
            if (seen) norms->query = fmaxf(norms->query, square);
        }
        char *to = parts + row * 4 * HEAD_DIM;
        fa_backward_sm80_powers inverses;
        inverses.query_inverse = split_row(&query[r], seen, d, to, s->low_parts);
        inverses.dout_inverse = split_row(&dout[r], seen, d_v,
                                          to + FA_BACKWARD_SM80_PART_BYTES(HEAD_DIM), s->low_parts);
        if (threadIdx.x % ROW_LANES != 0) continue;
        rows[row] = prepare_row(p, s, t, t->first + row, lse[r], product);
        s->powers[number * TILE + row] = inverses;
    }
}

/* ---- Norms ----------------------------------------------------------------------------------- */

/* Finds the longest of the tile's share of the sequence's keys: all tiles of a head together have all of them. */
FA_DEVICE void find_key_norms(const fa_backward_params *p, const fa_tile *t, squared_norms *norms)
{
    const int64_t tiles = (t->n_q + TILE - 1) / TILE, tile = t->first / TILE;
    if (tile >= tiles) return;
    const int64_t end = t->n_k * (tile + 1) / tiles;
    int64_t first = t->n_k * tile / tiles;
#pragma unroll 1
    for (; first < end; first += ROWS_AT_ONCE * ROWS_TOGETHER) {
        row_numbers x[ROWS_TOGETHER];
#pragma unroll
        for (int r = 0; r < ROWS_TOGETHER; r++) {
            const int64_t j = first + (int)threadIdx.x / ROW_LANES + r * ROWS_AT_ONCE;
            load_row(&x[r], fa_view_row(&p->a.k, t->block_k, t->start_k + j, t->head_kv), j < end,
                     p->a.k.vector != 0, (int)p->a.d);
        }
#pragma unroll
        for (int r = 0; r < ROWS_TOGETHER; r++)
            norms->key = fmaxf(norms->key, multiply_numbers(&x[r], &x[r]));
    }
}

/* Stores the norms of the longest rows of all threads. */
FA_DEVICE void store_norms(const fa_backward_params *p, const fa_backward_sm80_params *s,
                           int64_t number, const squared_norms *norms)
{
    __shared__ squared_norms of_warps[THREADS / 32];
    squared_norms all = {fa_warp_max(norms->query), fa_warp_max(norms->key)};
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = all;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int i = 0; i < THREADS / 32; i++) {
        all.query = fmaxf(all.query, of_warps[i].query);
        all.key = fmaxf(all.key, of_warps[i].key);
    }
    *find_norms(&p->a, s, number) = make_float2(sqrtf(all.query), sqrtf(all.key));
}

#endif

/* The vectors of a tile's sums that are needed. In float32 columns that do not exist are not read. */
FA_DEVICE int count_sums(const fa_backward_params *p)
{
    const int columns = FA_ELEMENT_BYTES(ELEMENT) == 4 ? ((int)p->a.d + 31) / 32 * 32 : HEAD_DIM;
    return TILE / 4 * columns;
}

/* Blocks that a multiprocessor has room for: with two of them 320 tiles, of short rows, need two rounds. */
enum { PREPARE_BLOCKS = FA_ELEMENT_BYTES(ELEMENT) == 4 && HEAD_DIM <= 256 ? 3 : 1 };

FA_KERNEL __launch_bounds__(THREADS, PREPARE_BLOCKS)
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
        if (p.dq.data && !is_in_place(&s) && i * THREADS < count_sums(&p))
            sums[i * THREADS + threadIdx.x] = make_float4(0, 0, 0, 0);
    if (s.semaphores && threadIdx.x < SEMAPHORES)
        s.semaphores[number * SEMAPHORES + threadIdx.x] = 0;
    __syncthreads();
#if FA_ELEMENT_BYTES(ELEMENT) == 4
    if (p.dq.data && is_in_place(&s)) clear_rows(&p, &tile);
    squared_norms norms = {0.0f, 0.0f};
    const bool needs_norms = needs_norms_of_rows(&p.a, &s);
#pragma unroll 1
    for (int row = 0; row < TILE; row += ROWS_AT_ONCE * ROWS_TOGETHER)
        prepare_rows(&p, &s, &tile, rows, (int)threadIdx.x / ROW_LANES + row, number, needs_norms,
                     &norms);
    if (needs_norms) {
        find_key_norms(&p, &tile, &norms);
        store_norms(&p, &s, number, &norms);
    }
#else
    if (has_vectors(&p.dout) && has_vectors(&p.a.out)) prepare_vectors(&p, &s, &tile, rows);
    else prepare_rows(&p, &s, &tile, rows);
#endif
}
