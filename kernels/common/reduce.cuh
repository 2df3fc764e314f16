/*
 * Reductions over lanes of a warp.
 */
#ifndef FA_KERNELS_COMMON_REDUCE_CUH
#define FA_KERNELS_COMMON_REDUCE_CUH

#include "common/device.cuh"

/* The max over so many neighbouring lanes, a power of two; all of them get it. */
FA_DEVICE float fa_max_over_lanes(float x, int lanes)
{
#pragma unroll
    for (int other = 1; other < lanes; other *= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, other));
    return x;
}

/* The sum, from neighbours to distant lanes. */
FA_DEVICE float fa_sum_over_lanes(float x, int lanes)
{
#pragma unroll
    for (int other = 1; other < lanes; other *= 2) x += __shfl_xor_sync(0xffffffffu, x, other);
    return x;
}

/* The same over the whole warp, from distant lanes to neighbours: another order of rounding. */
FA_DEVICE float fa_warp_max(float x)
{
#pragma unroll
    for (int other = 16; other > 0; other /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, other));
    return x;
}

FA_DEVICE float fa_warp_sum(float x)
{
#pragma unroll
    for (int other = 16; other > 0; other /= 2) x += __shfl_xor_sync(0xffffffffu, x, other);
    return x;
}

#endif
