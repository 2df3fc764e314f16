/*
 * What every kind of vector uses. See simd.h.
 */
#ifndef FA_CPU_SIMD_BASE_H
#define FA_CPU_SIMD_BASE_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "../convert.h"

#define FA_INLINE static inline __attribute__((always_inline, unused))
#define FA_UNROLL _Pragma("GCC unroll 64")

#endif
