/*
 * Products of float32 by three of tf32. x = big + small, both tf32: big is x rounded, small the
 * rest, whose last bit or two mma drops (2^-23 of x at most). Then x y = big big + big small +
 * small big, but for small small, 2^-24 of it at most.
 *
 * Tensor cores do not round sums to the nearest: they cut them off, so that errors add up and do
 * not cancel. So who uses this keeps sums short, a chain of few steps from 0, and adds them up
 * outside, rounded (Ootomo and Yokota 2022, arXiv:2203.03341, had the idea for whole matrices).
 *
 * The rest of an infinity is NaN. `careful`: what is not finite has no small part, and no products
 * with small parts.
 */
#ifndef FA_KERNELS_COMMON_THREE_PRODUCTS_CUH
#define FA_KERNELS_COMMON_THREE_PRODUCTS_CUH

#include "common/mma.cuh"
#include "ptx/convert.cuh"

/* Rounded to tf32, whose last 13 bits are 0. What is not finite may become another such number. */
FA_DEVICE uint32_t fa_big_part(uint32_t x)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    return ptx_round_tf32(fa_bits_float(x)); /* one instruction for two */
#else
    return (x + 0x1000u) & 0xffffe000u;
#endif
}

typedef struct fa_parts {
    uint32_t big[4], small[4], big_finite[4]; /* big_finite: as big, unless careful */
} fa_parts;

FA_DEVICE void fa_split_four(fa_parts *parts, const uint32_t x[4], bool careful)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const bool whole = careful && (x[i] & 0x7f800000u) == 0x7f800000u;
        const uint32_t big = whole ? x[i] : fa_big_part(x[i]);
        const float rest = fa_bits_float(x[i]) - fa_bits_float(big);
        parts->big[i] = big;
        parts->big_finite[i] = whole ? 0 : big;
        parts->small[i] = whole ? 0 : __float_as_uint(rest);
    }
}

/* c += a b by words first and second of b. */
FA_DEVICE void fa_multiply_parts(float c[4], const fa_parts *a, const fa_parts *b, int first,
                                 int second)
{
    fa_mma(c, a->small, b->big_finite[first], b->big_finite[second]);
    fa_mma(c, a->big_finite, b->small[first], b->small[second]);
    fa_mma(c, a->big, b->big[first], b->big[second]);
}

#endif
