/*
 * A consumer's queries. The consumer itself splits them in place. Each row has its own power of
 * two, so that no row depends on others.
 */
#ifndef FA_KERNELS_FORWARD_F16X3_SM90_QUERIES_CUH
#define FA_KERNELS_FORWARD_F16X3_SM90_QUERIES_CUH

#include "forward_f16x3_sm90/config.cuh"
#include "forward_f16x3_sm90/parts.cuh"
#include "forward_f16x3_sm90/pipeline.cuh"
#include "common/device.cuh"
#include "ptx/address.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"

/* Splits 4 rows of queries; returns the unit of the lane's row. rows: the address of 8 rows. */
FA_DEVICE float split_query_step(uint32_t rows, int step)
{
    const uint32_t changed = step ? STEP_1 : 0;
    const uint32_t source = rows + (split_source(Q_BLOCK) ^ changed);
    const uint32_t target = rows + (split_target() ^ changed);
    eight x[PAIRS];
    float largest = 0;
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
        x[pair] = load_eight(source + 2 * pair * Q_BLOCK);
        largest = largest_finite(&x[pair], largest);
    }
    const float scale = scale_of(__float_as_uint(largest_of_row(largest)));
    __syncwarp(); /* all floats have been read into registers */
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++)
        store_parts(target + 2 * pair * Q_BLOCK, Q_BLOCK, &x[pair], scale);
    return unit_of(scale);
}

/* Splits the consumer's queries, and finds the units of the thread's two rows. A warp splits its
 * own 16 rows. */
FA_DEVICE void split_queries(const pipeline *pipe, int consumer, float *unit)
{
    const int row = (int)threadIdx.x % 32 / 4, of_step = row < 4 ? row : row ^ 5;
    const int lane = of_step % 2 * 16 + (row < 4 ? 0 : 4);
    const uint32_t at =
        ptx_shared_address(pipe->q + consumer * Q_BYTES) + threadIdx.x % WARPGROUP / 32 * 16 * 128;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float of[2];
#pragma unroll
        for (int step = 0; step < 2; step++)
            of[step] = __shfl_sync(0xffffffff, split_query_step(at + r * 1024, step), lane);
        unit[r] = of_step < 2 ? of[0] : of[1];
    }
    ptx_fence_proxy_async();
    ptx_named_barrier_sync(NAMED_BARRIER_QUERIES + consumer, WARPGROUP);
}

#endif
