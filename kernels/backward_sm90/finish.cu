/*
 * The last launch of backward_sm90: the sums of dQ, times the scale, become the caller's rows. Bound by memory.
 */
#include "backward_sm90/backward_sm90.h"
#include "common/exchange.cuh"
#include "common/rows.cuh"
#include "common/sequence.cuh"
#include "common/x2.cuh"

#define QUERIES FA_BACKWARD_SM90_QUERIES

enum {
    THREADS = FA_BACKWARD_SM90_PASS_THREADS,
    GROUPS = THREADS / 128, /* that share the columns */
    NUM_BLOCKS = HEAD_DIM / 8,
    SUM_VECTORS = FA_BACKWARD_SM90_SUM_BYTES(HEAD_DIM) / 16
};

/* Four words of row r of a thread, of four blocks of columns. */
FA_DEVICE void store_words(const fa_backward_params *p, const fa_tile *t, int64_t i, uint32_t x[4],
                           int block)
{
    const int lane = threadIdx.x % 4;
    const bool exists = i < t->room_q, whole = p->dq.vector == 8;
    char *row = exists ? fa_view_row(&p->dq, t->block_q, t->start_q + i, t->head) : NULL;
    if (whole) {
        fa_exchange_words(x, lane);
        if (exists && 8 * (block + lane) < p->a.d)
            *(uint4 *)(row + 16 * (block + lane)) = make_uint4(x[0], x[1], x[2], x[3]);
        return;
    }
#pragma unroll
    for (int n = 0; n < 4; n++)
        if (exists) fa_scatter_x2(row, 8 * (block + n) + 2 * lane, p->a.d, x[n]);
}

FA_KERNEL __launch_bounds__(THREADS)
    backward_sm90_finish(const __grid_constant__ fa_backward_params p,
                         const __grid_constant__ fa_backward_sm90_params s)
{
    __shared__ fa_tile tile;
    const int64_t task = p.a.tasks - 1 - blockIdx.x, outer = fa_divide(task, s.q_tiles);
    const int64_t number = outer * s.q_tiles + s.q_tiles - 1 - (task - outer * s.q_tiles);
    const int thread = threadIdx.x % 128, group = threadIdx.x / 128;
    const float4 *sums = (const float4 *)s.sums + number * SUM_VECTORS + thread;
    float4 x[NUM_BLOCKS / GROUPS];
    if (threadIdx.x == 0) tile = fa_find_tile(&p.a, task, QUERIES);
#pragma unroll
    for (int j = 0; j < NUM_BLOCKS / GROUPS; j++)
        x[j] = sums[(group * (NUM_BLOCKS / GROUPS) + j) * 128];
    __syncthreads();
#pragma unroll
    for (int j = 0; j < NUM_BLOCKS / GROUPS; j += 4)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int64_t i = tile.first + thread / 32 * 16 + thread % 32 / 4 + 8 * r;
            const float scale = p.a.scale;
            uint32_t words[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float4 y = x[j + n];
                const float low = r ? y.z : y.x, high = r ? y.w : y.y;
                /* Rows behind the last query get zeros, whatever keys they met. */
                words[n] = i < tile.n_q ? fa_pack_x2(low * scale, high * scale) : 0;
            }
            store_words(&p, &tile, i, words, group * (NUM_BLOCKS / GROUPS) + j);
        }
}
