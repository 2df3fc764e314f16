/*
 * Backward: the gradient of the sinks. A sink's weight exp(sink - lse) takes part in the
 * denominator of every row of its head, so dsink = -sum exp(sink - lse) * delta.
 *
 * A block computes a head. Threads sum rows in a fixed order, in double precision. Rows without a
 * sequence have a delta of 0 and are left out, because their log-sum-exp may be anything.
 */
#include "common/rows.cuh"
#include "backward_simt/backward_simt.h"

enum { THREADS = FA_DSINKS_THREADS };

FA_DEVICE double row_term(const fa_backward_params *p, int64_t at, float sink)
{
    const float lse = p->a.lse[at], delta = p->delta[at];
    if (delta == 0.0f || lse == -INFINITY) return 0.0;
    return (double)expf(sink - lse) * (double)delta;
}

FA_DEVICE double head_sum(const fa_backward_params *p, int64_t head)
{
    const float sink = p->a.sinks[head];
    double sum = 0.0;
#pragma unroll 1
    for (int64_t block = 0; block < p->blocks_q; block++) {
        const int64_t row = (block * p->a.heads_q + head) * p->a.rows_q;
#pragma unroll 4
        for (int64_t i = threadIdx.x; i < p->a.rows_q; i += THREADS)
            sum -= row_term(p, row + i, sink);
    }
    return sum;
}

FA_KERNEL __launch_bounds__(THREADS) backward_dsinks(const __grid_constant__ fa_backward_params p)
{
    FA_DYNAMIC_SHARED(memory);
    double *sums = (double *)(void *)memory;
#pragma unroll 1
    for (int64_t head = blockIdx.x; head < p.a.tasks; head += gridDim.x) {
        sums[threadIdx.x] = head_sum(&p, head);
#pragma unroll 1
        for (unsigned half = THREADS / 2; half > 0; half /= 2) {
            __syncthreads();
            if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        }
        if (threadIdx.x == 0) p.dsinks[head] = (float)sums[0];
        __syncthreads();
    }
}
