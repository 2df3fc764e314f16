/*
 * Included by the device code of every kernel: the dialect, and the headers of src/ that host and device share.
 */
#ifndef FA_KERNELS_COMMON_DEVICE_CUH
#define FA_KERNELS_COMMON_DEVICE_CUH

#include "common/dialect.h"
#include "ptx/convert.cuh"

#define FA_WIDE_PRODUCT(a, b) ptx_mul_wide(a, b)

#include "convert.h"
#include "mask.h"
#include "philox.h"

FA_DEVICE int64_t fa_min64(int64_t a, int64_t b) { return a < b ? a : b; }
FA_DEVICE int64_t fa_max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* Returns x, but hides its computation from the compiler, so that it keeps x in a register instead of computing it
 * again. */
FA_DEVICE uint32_t fa_opaque(uint32_t x)
{
    __asm__ volatile("" : "+r"(x));
    return x;
}

#endif
