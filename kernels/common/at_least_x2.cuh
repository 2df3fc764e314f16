/*
 * Comparisons of pairs of unsigned 16-bit numbers, such as dropout's random bits.
 */
#ifndef FA_KERNELS_COMMON_AT_LEAST_X2_CUH
#define FA_KERNELS_COMMON_AT_LEAST_X2_CUH

#include "common/device.cuh"

/* The sign bits of those halves of x that are not smaller, unsigned, than those of threshold; its other bits mean nothing. A
 * subtraction compares the lower 15 bits and leaves the result in the top bit; then the top bits are compared. */
FA_DEVICE uint32_t fa_at_least_x2(uint32_t x, uint32_t threshold)
{
    const uint32_t sign = 0x80008000u, rest = (x | sign) - (threshold & ~sign);
    return (x & rest) | (~threshold & (x | rest));
}

#endif
