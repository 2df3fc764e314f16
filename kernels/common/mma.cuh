/*
 * The product of a warp in the kernel's element type. The including file defines ELEMENT (common/element.h).
 */
#ifndef FA_KERNELS_COMMON_MMA_CUH
#define FA_KERNELS_COMMON_MMA_CUH

#include "common/device.cuh"
#include "common/element.h"
#include "ptx/mma.cuh"

#ifndef ELEMENT
#error "common/mma.cuh: ELEMENT is missing"
#endif

/* Rounds to tf32, to the nearest, ties away from 0, like cvt.rna.tf32: mma drops the last 13 bits. Infinities and NaN do
 * not change, because rounding would turn a NaN of all ones into 0. */
FA_DEVICE uint32_t fa_to_tf32(uint32_t x)
{
    return fabsf(fa_bits_float(x)) < INFINITY ? x + 0x1000u : x;
}

/* The same in one instruction, which keeps infinities and NaN: it adds 0.375 to 0.75 of the last place instead of a half.
 * The error is at most 0.625 of the last place. Its variance is that of rounding, and numbers that are exact in tf32 do not
 * change. */
FA_DEVICE uint32_t fa_near_tf32(uint32_t x)
{
    return __float_as_uint(fa_bits_float(x) * (1.0f + 3.0f / 8192.0f));
}

/* c (16 x 8) += a (16 x 16) b (16 x 8); in tf32 a (16 x 8) b (8 x 8). Fragments as in ptx/mma.cuh. */
FA_DEVICE void fa_mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    ptx_mma_m16n8k8_f16(c, a[0], a[1],
                        b0); /* fragments are halves of those of the larger product */
    ptx_mma_m16n8k8_f16(c, a[2], a[3], b1);
#else
    if (ELEMENT == FA_ELEMENT_TF32 || ELEMENT == FA_ELEMENT_TF32X3)
        ptx_mma_m16n8k8_tf32(c, a, b0, b1);
    else if (ELEMENT == FA_ELEMENT_BFLOAT16) ptx_mma_m16n8k16_bf16(c, a, b0, b1);
    else ptx_mma_m16n8k16_f16(c, a, b0, b1);
#endif
}

#endif
