/*
 * Values that are the same in all lanes of a warp (warp-uniform), and which rows are a thread's.
 */
#ifndef FA_KERNELS_FORWARD_SM90_WARP_CUH
#define FA_KERNELS_FORWARD_SM90_WARP_CUH

#include "forward_sm90/config.cuh"
#include "common/device.cuh"

/* Tells the compiler that x is warp-uniform: the result is lane 0's. */
FA_DEVICE int warp_uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }

FA_DEVICE float warp_uniform_float(float x)
{
    return __int_as_float(warp_uniform(__float_as_int(x)));
}

/* Row r (0 or 1) of the thread among the queries of the work tile. wgmma gives a thread two rows of the
 * consumer's 64: a warp has 16 of them, and four lanes share a row. */
FA_DEVICE int row_of(int consumer, int r)
{
    return consumer * ROWS + (int)threadIdx.x % WARPGROUP / 32 * 16 + (int)threadIdx.x % 32 / 4 +
           8 * r;
}

#endif
