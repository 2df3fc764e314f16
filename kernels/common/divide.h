/*
 * Division of 64-bit numbers that mostly fit into 32 bits. Shared by the kernels and the planner.
 */
#ifndef FA_KERNELS_COMMON_DIVIDE_H
#define FA_KERNELS_COMMON_DIVIDE_H

#include <stdint.h>

#if defined(__CUDACC__) || defined(FA_CUDA_ON_CPU)
#include "dialect.h"
#endif

#ifndef FA_SHARED_FUNCTION
#define FA_SHARED_FUNCTION static inline
#endif

/* a / b for numbers from 0 on. On a GPU a division of 32 bits is much cheaper. */
FA_SHARED_FUNCTION int64_t fa_divide(int64_t a, int64_t b)
{
    if (((uint64_t)a | (uint64_t)b) >> 32) return a / b;
    return (uint32_t)a / (uint32_t)b;
}

/* Division by a number from 1 to 2^31 - 1 that the host knows: a product and a shift. */
typedef struct fa_reciprocal {
    uint32_t factor, shift;
} fa_reciprocal;

FA_SHARED_FUNCTION fa_reciprocal fa_reciprocal_of(int64_t b)
{
    fa_reciprocal r = {0, 31};
    while ((int64_t)1 << (r.shift - 31) < b) r.shift++;
    r.factor = (uint32_t)(((uint64_t)1 << r.shift) / (uint64_t)b + 1);
    return r;
}

/* a / b for numbers from 0 to 2^31 - 1. */
FA_SHARED_FUNCTION int64_t fa_divide_by(int64_t a, fa_reciprocal r)
{
    return (int64_t)((uint64_t)(uint32_t)a * r.factor >> r.shift);
}

#endif
