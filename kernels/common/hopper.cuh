/*
 * 16-bit pairs and exponentials.
 */
#ifndef FA_KERNELS_HOPPER_CUH
#define FA_KERNELS_HOPPER_CUH

#include "common/device.cuh"

#ifdef FA_CUDA_ON_CPU
#include "hopper_on_cpu.h"
#else

/* Two floats rounded to 16 bits; low lies at the lower address. */
FA_DEVICE uint32_t pack_pair(float low, float high)
{
    uint32_t pair;
#if BFLOAT16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}

/* The sign of each half of x in all of its bits. */
FA_DEVICE uint32_t spread_signs(uint32_t x)
{
    uint32_t mask;
    asm("prmt.b32 %0, %1, %1, 0xbb99;" : "=r"(mask) : "r"(x));
    return mask;
}

/* 2^x by the special-function unit; 2^-infinity is 0. */
FA_DEVICE float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* 1 / x by the special-function unit, to 1 ulp; 0 for what is above 2^126. */
FA_DEVICE float reciprocal_fast(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif

#endif
