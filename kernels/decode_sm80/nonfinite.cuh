/*
 * Finds elements of keys and values that are not finite. Shared with decode_sm90 for 8-bit caches.
 */
#ifndef FA_KERNELS_DECODE_SM80_NONFINITE_CUH
#define FA_KERNELS_DECODE_SM80_NONFINITE_CUH

#include "decode_sm80/config.cuh"

#include "common/x2.cuh"

/* The top bit of each element that is not finite. */
FA_DEVICE uint32_t find_nonfinite(uint32_t x)
{
#if EIGHT_BITS
    return ((x & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u; /* NaN; there is no infinity */
#else
    return fa_x2_not_finite(x);
#endif
}

#endif
