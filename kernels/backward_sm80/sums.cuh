/*
 * The sums of dQ in the workspace, in the order of the accumulators that hold them, so that a warp adds to whole lines of memory.
 * A tile of TILE queries is made of fragments of 16 queries and 8 columns: those of the first columns, then those of the next. Of a
 * fragment each lane has four numbers, as mma leaves them. They lie together where four can be added at once, from Hopper on;
 * elsewhere all lanes' first ones, then all second ones.
 */
#ifndef FA_KERNELS_BACKWARD_SM80_SUMS_CUH
#define FA_KERNELS_BACKWARD_SM80_SUMS_CUH

#include "backward_sm80/backward_sm80.h"
#include "common/device.cuh"
#include "ptx/reduce.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define SUMS_TOGETHER 0
#else
#define SUMS_TOGETHER 1
#endif

enum { SUMS_OF_FRAGMENT = 128, ROW_FRAGMENTS = FA_BACKWARD_SM80_TILE / 16 };

/* Where the lane's part of a fragment begins. block: of 16 queries; column: of 8 columns. */
FA_DEVICE float *fragment_sums(float *tile, int block, int column)
{
    return tile + (column * ROW_FRAGMENTS + block) * SUMS_OF_FRAGMENT +
           threadIdx.x % 32 * (SUMS_TOGETHER ? 4 : 1);
}

FA_DEVICE void add_to_sums(float *sums, const float x[4])
{
#if SUMS_TOGETHER
    ptx_reduce_add_4(sums, x);
#else
#pragma unroll
    for (int i = 0; i < 4; i++) ptx_reduce_add(sums + 32 * i, x[i]);
#endif
}

FA_DEVICE float4 load_sums(const float *sums)
{
#if SUMS_TOGETHER
    return *(const float4 *)(const void *)sums;
#else
    return make_float4(sums[0], sums[32], sums[64], sums[96]);
#endif
}

#endif
