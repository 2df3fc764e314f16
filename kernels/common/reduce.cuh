/*
 * Reductions over lanes of a warp.
 */
#ifndef FA_KERNELS_COMMON_REDUCE_CUH
#define FA_KERNELS_COMMON_REDUCE_CUH

#include "common/device.cuh"

/* The max over `lanes` neighbouring lanes, 4 or 8; all of them get it. */
FA_DEVICE float fa_max_over_lanes(float x, int lanes)
{
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
    return lanes > 4 ? fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 4)) : x;
}

/* The sum, from neighbours to distant lanes. */
FA_DEVICE float fa_sum_over_lanes(float x, int lanes)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    x += __shfl_xor_sync(0xffffffffu, x, 2);
    return lanes > 4 ? x + __shfl_xor_sync(0xffffffffu, x, 4) : x;
}

/* The same over any power of two of lanes, from distant lanes to neighbours: another order of rounding. */
FA_DEVICE float fa_max_from_far(float x, int lanes)
{
#pragma unroll
    for (int other = lanes / 2; other > 0; other /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, other));
    return x;
}

FA_DEVICE float fa_sum_from_far(float x, int lanes)
{
#pragma unroll
    for (int other = lanes / 2; other > 0; other /= 2) x += __shfl_xor_sync(0xffffffffu, x, other);
    return x;
}

FA_DEVICE float fa_warp_max(float x) { return fa_max_from_far(x, 32); }
FA_DEVICE float fa_warp_sum(float x) { return fa_sum_from_far(x, 32); }

#endif
