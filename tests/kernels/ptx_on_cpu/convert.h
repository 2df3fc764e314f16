/*
 * kernels/ptx/convert.cuh in C.
 */
#ifndef TEST_PTX_ON_CPU_CONVERT_H
#define TEST_PTX_ON_CPU_CONVERT_H

#include <float.h>

#include "../../../src/convert.h" /* not the header in this folder */

FA_DEVICE uint32_t ptx_pack_f16x2(float low, float high)
{
    return fa_float_to_half(low) | (uint32_t)fa_float_to_half(high) << 16;
}

FA_DEVICE uint32_t ptx_pack_bf16x2(float low, float high)
{
    return fa_float_to_bfloat(low) | (uint32_t)fa_float_to_bfloat(high) << 16;
}

FA_DEVICE float ptx_half_to_float(uint16_t h) { return fa_half_to_float(h); }

FA_DEVICE float ampere_half(uint32_t x2, int half)
{
    return fa_half_to_float((uint16_t)(x2 >> 16 * half));
}
FA_DEVICE uint32_t ptx_mul_f16x2(uint32_t a, uint32_t b)
{
    return ptx_pack_f16x2(ampere_half(a, 0) * ampere_half(b, 0),
                          ampere_half(a, 1) * ampere_half(b, 1));
}
FA_DEVICE uint32_t ptx_sub_f16x2(uint32_t a, uint32_t b)
{
    return ptx_pack_f16x2(ampere_half(a, 0) - ampere_half(b, 0),
                          ampere_half(a, 1) - ampere_half(b, 1));
}

FA_DEVICE uint32_t ptx_permute_bytes(uint32_t x, uint32_t y, uint32_t selector)
{
    const uint64_t bytes = x | (uint64_t)y << 32;
    uint32_t chosen = 0;
    for (int i = 0; i < 4; i++)
        chosen |= (uint32_t)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return chosen;
}

FA_DEVICE uint32_t ptx_spread_signs(uint32_t x) { return (x >> 15 & 0x00010001u) * 0xffffu; }

/* Subnormal results become 0. */
FA_DEVICE float ampere_flushed(float x) { return fabsf(x) < FLT_MIN ? 0.0f : x; }
FA_DEVICE float ptx_ex2(float x) { return ampere_flushed(exp2f(x)); }
FA_DEVICE float ptx_rcp(float x) { return ampere_flushed(1.0f / x); }
FA_DEVICE uint32_t ptx_max_u16x2(uint32_t a, uint32_t b)
{
    const uint32_t low = a & 0xffffu, other = b & 0xffffu;
    const uint32_t high = a >> 16 > b >> 16 ? a >> 16 : b >> 16;
    return (low > other ? low : other) | high << 16;
}
FA_DEVICE uint64_t ptx_mul_wide(uint32_t a, uint32_t b) { return (uint64_t)a * b; }

#endif
