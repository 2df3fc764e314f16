/*
 * kernels/common/hopper.cuh in C.
 */
#ifndef TEST_HOPPER_ON_CPU_H
#define TEST_HOPPER_ON_CPU_H

#include <float.h>

#include "common/rows.cuh"

static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }

FA_DEVICE float __int_as_float(int bits) { return fa_bits_float((uint32_t)bits); }
FA_DEVICE float __uint_as_float(uint32_t bits) { return fa_bits_float(bits); }
FA_DEVICE int __float_as_int(float x) { return (int)fa_float_bits(x); }
FA_DEVICE uint32_t __float_as_uint(float x) { return fa_float_bits(x); }

FA_DEVICE uint32_t pack_pair(float low, float high)
{
    return fa_pack(BFLOAT16 ? FA_KERNEL_BFLOAT16 : FA_KERNEL_FLOAT16, low, high);
}

FA_DEVICE uint32_t spread_signs(uint32_t x)
{
    return (x & 0x8000 ? 0xffffu : 0) | (x & 0x80000000u ? 0xffff0000u : 0);
}

FA_DEVICE float exp2_fast(float x)
{
    const float y = exp2f(x);
    return y < FLT_MIN ? 0.0f : y;
}

FA_DEVICE float reciprocal_fast(float x)
{
    const float y = 1.0f / x;
    return y < FLT_MIN ? 0.0f : y;
}

#endif
