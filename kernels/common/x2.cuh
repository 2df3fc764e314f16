/*
 * Two 16-bit numbers in a register ("x2"), in the kernel's element type. The including file defines ELEMENT
 * (common/element.h).
 */
#ifndef FA_KERNELS_COMMON_X2_CUH
#define FA_KERNELS_COMMON_X2_CUH

#include "common/element.h"
#include "ptx/convert.cuh"

#ifndef ELEMENT
#error "common/x2.cuh: ELEMENT is missing"
#endif

/* Of both numbers: the exponent's bits, its lowest bit, and one. */
#if ELEMENT == FA_ELEMENT_BFLOAT16
#define FA_X2_EXPONENTS 0x7f807f80u
#define FA_X2_CARRY 0x00800080u
#define FA_X2_ONES 0x3f803f80u
#else
#define FA_X2_EXPONENTS 0x7c007c00u
#define FA_X2_CARRY 0x04000400u
#define FA_X2_ONES 0x3c003c00u
#endif

/* -infinity. */
#define FA_NEGATIVE_INFINITY (0x8000u | (FA_X2_EXPONENTS & 0xffffu))

/* Two floats, rounded; low goes to the lower half. */
FA_DEVICE uint32_t fa_pack_x2(float low, float high)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    return ptx_pack_f16x2_turing(low, high);
#else
    return ELEMENT == FA_ELEMENT_BFLOAT16 ? ptx_pack_bf16x2(low, high) : ptx_pack_f16x2(low, high);
#endif
}

/* The top bit of each half that is infinite or NaN: adding one to the exponent carries into it. */
FA_DEVICE uint32_t fa_x2_not_finite(uint32_t x2)
{
    return ((x2 & FA_X2_EXPONENTS) + FA_X2_CARRY) & 0x80008000u;
}

/* The top bit of each half that is not 0, for both signs. */
FA_DEVICE uint32_t fa_x2_not_zero(uint32_t x2)
{
    return ((x2 & 0x7fff7fffu) + 0x7fff7fffu) & 0x80008000u;
}

/* All bits of the halves whose top bit is set. */
FA_DEVICE uint32_t fa_x2_spread(uint32_t top_bits) { return (top_bits >> 15) * 0xffffu; }

#endif
