/*
 * The first step of backward: delta = rowsum(dout * out) - dlse, one number for each query and head
 * (FlashAttention-2, algorithm 2, arXiv:2307.08691, line 4). Rows without a sequence get 0.
 *
 * A block computes a tile of queries of one head, with a warp for each row. Bound by reads.
 */
#include "common/reduce.cuh"
#include "common/sequence.cuh"
#include "backward_simt/row_product.cuh"

enum { THREADS = FA_PASS_THREADS, WARPS = THREADS / 32, TILE = FA_DELTA_ROWS };

/* All lanes of a warp call it for the same row. */
FA_DEVICE void run_tile(const fa_backward_params *p, const fa_tile *t)
{
#pragma unroll 1
    for (int r = (int)threadIdx.x / 32; r < TILE; r += WARPS) {
        const int64_t i = t->first + r;
        const float sum = fa_warp_sum(i < t->n_q ? fa_row_product(p, t, i) : 0.0f);
        if (i >= t->room_q || threadIdx.x % 32 != 0) continue;
        const int64_t at = fa_row_index(&p->a, t, i);
        p->delta[at] = i >= t->n_q ? 0.0f : sum - (p->dlse ? p->dlse[at] : 0.0f);
    }
}

FA_KERNEL __launch_bounds__(THREADS) backward_delta(const __grid_constant__ fa_backward_params p)
{
    __shared__ fa_tile tile;
#pragma unroll 1
    for (int64_t task = blockIdx.x; task < p.a.tasks; task += gridDim.x) {
        if (threadIdx.x == 0) tile = fa_find_tile(&p.a, task, TILE);
        __syncthreads();
        run_tile(&p, &tile);
        __syncthreads();
    }
}
