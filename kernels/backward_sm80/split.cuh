/*
 * Numbers of wide heads as float16 parts, and the powers of two that they are multiplied by first.
 * high_low.cuh says where the parts lie. `prepare` splits queries and dout, the kernels keys and
 * values.
 */
#ifndef FA_KERNELS_BACKWARD_SM80_SPLIT_CUH
#define FA_KERNELS_BACKWARD_SM80_SPLIT_CUH

#include "common/device.cuh"
#include "common/params.h"
#include "common/rows.cuh"
#include "ptx/convert.cuh"

/* The power of two that brings a number to [2^14, 2^15), or below if it is tiny. */
FA_DEVICE float find_power(float largest)
{
    const int exponent = (int)(__float_as_uint(largest) >> 23) - 127;
    return fa_bits_float((uint32_t)(141 - max(exponent, -112)) << 23);
}

/* 1 / a power of two. */
FA_DEVICE float invert_power(float power)
{
    return fa_bits_float((254u << 23) - __float_as_uint(power));
}

/* The larger one, unless it is not finite. */
FA_DEVICE float find_larger(float largest, float x)
{
    return fabsf(x) < INFINITY ? fmaxf(largest, fabsf(x)) : largest;
}

/* The high parts of two numbers, and their low ones times low_power. The rest of an infinity is
 * NaN. */
FA_DEVICE uint32_t split_two(float x, float y, float low_power, uint32_t *low)
{
    const uint32_t high = ptx_pack_f16x2(x, y);
    const float2 z = fa_unpack_x2(high, FA_KERNEL_FLOAT16);
    *low = ptx_pack_f16x2((x - z.x) * low_power, (y - z.y) * low_power);
    return high;
}

#endif
