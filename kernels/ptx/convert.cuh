/*
 * Conversions and arithmetic of one instruction (PTX ISA: cvt, prmt, ex2, rcp, max, mul.wide).
 */
#ifndef FA_KERNELS_PTX_CONVERT_CUH
#define FA_KERNELS_PTX_CONVERT_CUH

#include "common/dialect.h"

#ifdef FA_CUDA_ON_CPU
#include "ptx_on_cpu/convert.h"
#else

/* Two floats rounded to float16; low goes to the lower half. From Ampere on. */
FA_DEVICE uint32_t ptx_pack_f16x2(float low, float high)
{
    uint32_t x2;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x2) : "f"(high), "f"(low));
    return x2;
}

/* The same for Turing, in three instructions. */
FA_DEVICE uint32_t ptx_pack_f16x2_turing(float low, float high)
{
    uint32_t x2;
    asm("{\n.reg .b16 l, h;\ncvt.rn.f16.f32 l, %1;\ncvt.rn.f16.f32 h, %2;\nmov.b32 %0, {l, h};\n}"
        : "=r"(x2)
        : "f"(low), "f"(high));
    return x2;
}

/* Two floats rounded to bfloat16. From Ampere on. */
FA_DEVICE uint32_t ptx_pack_bf16x2(float low, float high)
{
    uint32_t x2;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x2) : "f"(high), "f"(low));
    return x2;
}

/* Rounded to tf32, whose last 13 bits are 0; ties to even. From Hopper on. */
FA_DEVICE uint32_t ptx_round_tf32(float x)
{
    uint32_t tf32;
    asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(tf32) : "f"(x));
    return tf32;
}

/* float16 to float32. */
FA_DEVICE float ptx_half_to_float(uint16_t h)
{
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
}

/* Converts four float8 e4m3 numbers to float16, which is exact: the two of the lower half of x, and the two
 * of the upper half. From Ada on. */
FA_DEVICE void ptx_unpack_e4m3x4(uint32_t x, uint32_t *low, uint32_t *high)
{
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\n"
        "cvt.rn.f16x2.e4m3x2 %1, h;\n}"
        : "=r"(*low), "=r"(*high)
        : "r"(x));
}

/* Four bytes of eight. Each digit of the selector, a constant in hexadecimal, is the number of a
 * byte: 0 to 3 are those of x, 4 to 7 those of y. */
FA_DEVICE uint32_t ptx_permute_bytes(uint32_t x, uint32_t y, uint32_t selector)
{
    return __byte_perm(x, y, selector);
}

/* Two products and two differences in float16. */
FA_DEVICE uint32_t ptx_mul_f16x2(uint32_t a, uint32_t b)
{
    uint32_t x2;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(x2) : "r"(a), "r"(b));
    return x2;
}

FA_DEVICE uint32_t ptx_sub_f16x2(uint32_t a, uint32_t b)
{
    uint32_t x2;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(x2) : "r"(a), "r"(b));
    return x2;
}

/* All bits of each half of x as its sign bit. */
FA_DEVICE uint32_t ptx_spread_signs(uint32_t x)
{
    uint32_t mask;
    asm("prmt.b32 %0, %1, %1, 0xbb99;" : "=r"(mask) : "r"(x));
    return mask;
}

/* 2^x by the special-function unit; 2^-infinity is 0. */
FA_DEVICE float ptx_ex2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* 1 / x by the special-function unit, to 1 ulp; 0 for x above 2^126. */
FA_DEVICE float ptx_rcp(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The larger of each half, as unsigned numbers. From Hopper on. */
FA_DEVICE uint32_t ptx_max_u16x2(uint32_t a, uint32_t b)
{
    uint32_t x2;
    asm("max.u16x2 %0, %1, %2;" : "=r"(x2) : "r"(a), "r"(b));
    return x2;
}

/* The 64 bits of a product. The compiler makes two instructions of one by a constant. */
FA_DEVICE uint64_t ptx_mul_wide(uint32_t a, uint32_t b)
{
    uint64_t product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
}

#endif

#endif
