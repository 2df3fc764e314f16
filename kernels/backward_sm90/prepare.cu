/*
 * The first launch of backward_sm90: computes the log-sum-exp and delta of a tile of queries, and
 * clears the sums of dQ. If needed, it also stores delta for later launches, and clears the
 * counters of dS that is left. Bound by memory. The last heads come first, so that the heads with
 * which the next launch begins are in the L2 cache then.
 */
#include "backward_sm90/backward_sm90.h"

#define QUERIES FA_BACKWARD_SM90_QUERIES

#include "backward_sm90/prepare_row.cuh"
#include "backward_simt/row_product.cuh"
#include "common/reduce.cuh"
#include "common/rows.cuh"
#include "common/sequence.cuh"
#include "ptx/grid.cuh"

enum {
    THREADS = FA_BACKWARD_SM90_PASS_THREADS,
    WARPS = THREADS / 32,
    LANES = HEAD_DIM > 128 ? 32 : HEAD_DIM / 8, /* that share a row */
    ROWS_OF_LANE = 4 < QUERIES * LANES / THREADS ? 4 : QUERIES * LANES / THREADS, /* at once */
    SUM_VECTORS = FA_BACKWARD_SM90_SUM_BYTES(HEAD_DIM) / 16
};

/* Rows that are loaded with eight elements at once, by LANES lanes each. All loads are issued
 * before the first is used. from: the first of the rows. */
FA_DEVICE void prepare_vectors(const fa_backward_params *p, const fa_tile *t, float *rows, int from)
{
    const int lane = threadIdx.x % LANES, first = from + (int)(threadIdx.x / LANES);
    const bool has_columns = 8 * lane < p->a.d_v;
    uint4 dout[ROWS_OF_LANE], out[ROWS_OF_LANE];
    float lse[ROWS_OF_LANE];
#pragma unroll
    for (int n = 0; n < ROWS_OF_LANE; n++) {
        const int row = first + n * (THREADS / LANES);
        const int64_t i = t->first + row;
        const uint4 zero = {0, 0, 0, 0};
        dout[n] = out[n] = zero;
        lse[n] = lane == 0 ? load_row_lse(p, t, row) : 0.0f;
        if (i >= t->n_q || !has_columns) continue;
        dout[n] = *(const uint4 *)(fa_view_row(&p->dout, t->block_q, t->start_q + i, t->head) +
                                   16 * lane);
        out[n] = *(const uint4 *)(fa_view_row(&p->a.out, t->block_q, t->start_q + i, t->head) +
                                  16 * lane);
    }
#pragma unroll
    for (int n = 0; n < ROWS_OF_LANE; n++) {
        const int row = first + n * (THREADS / LANES);
        const uint32_t x[4] = {dout[n].x, dout[n].y, dout[n].z, dout[n].w};
        const uint32_t y[4] = {out[n].x, out[n].y, out[n].z, out[n].w};
        const float sum = multiply_row(x, y, LANES);
        if (lane == 0) prepare_row(p, t, row, lse[n], sum, rows);
    }
}

/* All other rows: a warp for each. */
FA_DEVICE void prepare_rows(const fa_backward_params *p, const fa_tile *t, float *rows)
{
#pragma unroll 1
    for (int r = (int)threadIdx.x / 32; r < QUERIES; r += WARPS) {
        const int64_t i = t->first + r;
        const float product = fa_warp_sum(i < t->n_q ? fa_row_product(p, t, i) : 0.0f);
        if (threadIdx.x % 32 == 0) prepare_row(p, t, r, load_row_lse(p, t, r), product, rows);
    }
}

/* Stores delta of the tile's rows, which the block has prepared, for launches that need it. */
FA_DEVICE void leave_delta(const fa_backward_params *p, const fa_tile *t, const float *rows,
                           float *delta)
{
    const int row = (int)threadIdx.x;
    const int64_t i = t->first + row;
    if (row >= QUERIES || i >= t->room_q) return;
    const int64_t at = (t->block_q * p->a.heads_q + t->head) * p->a.rows_q + t->start_q + i;
    delta[at] = rows[QUERIES + FA_BACKWARD_SM90_ROW_AT(row)] *
                (float)(1 << FA_BACKWARD_SM90_WEIGHT_BITS(ELEMENT));
}

FA_DEVICE void clear_counters(int32_t *counters, int64_t count)
{
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * THREADS)
        counters[i] = 0;
}

FA_KERNEL __launch_bounds__(THREADS)
    backward_sm90_prepare(const __grid_constant__ fa_backward_params p,
                          const __grid_constant__ fa_backward_sm90_params s)
{
    __shared__ fa_tile tile;
    const int64_t task = p.a.tasks - 1 - blockIdx.x, outer = fa_divide(task, s.q_tiles);
    const int64_t number = outer * s.q_tiles + s.q_tiles - 1 - (task - outer * s.q_tiles);
    float4 *sums = (float4 *)s.sums + number * SUM_VECTORS;
    const bool reads = fa_reads_lengths(&p.a);
    if (threadIdx.x == 0 && !reads) tile = fa_find_tile(&p.a, task, QUERIES);
    /* Blocks of the next grid read keys before they wait. So none of them may start before the grids in front of this one
     * have ended. */
    ptx_wait_for_grids();
    ptx_let_next_grid_start();
    if (s.next_work && blockIdx.x == 0 && threadIdx.x == 0) *s.next_work = 0;
    if (s.left.units > 0) clear_counters(s.left.counters, 2 * s.left.units);
    if (s.cleared) clear_counters(s.cleared, s.groups);
    if (threadIdx.x == 0 && reads) tile = fa_find_tile(&p.a, task, QUERIES);
    const bool clears = p.dq.data && !s.first_stored && number < s.prepared_tiles;
    const int vectors = clears ? s.head_dim * (QUERIES / 4) : 0;
#pragma unroll
    for (int i = 0; i < SUM_VECTORS / THREADS; i++)
        if (i * THREADS + (int)threadIdx.x < vectors)
            sums[i * THREADS + threadIdx.x] = make_float4(0, 0, 0, 0);
    if (s.semaphores && threadIdx.x < FA_BACKWARD_SM90_SEMAPHORES)
        s.semaphores[number * FA_BACKWARD_SM90_SEMAPHORES + threadIdx.x] = 0;
    __syncthreads();
    float *rows = s.rows + number * (2 * QUERIES);
    if (p.dout.vector == 8 && p.a.out.vector == 8) {
#pragma unroll 1
        for (int from = 0; from < QUERIES; from += ROWS_OF_LANE * (THREADS / LANES))
            prepare_vectors(&p, &tile, rows, from);
    } else prepare_rows(&p, &tile, rows);
    if (!s.delta) return;
    __syncthreads();
    leave_delta(&p, &tile, rows, s.delta);
}
