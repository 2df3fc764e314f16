/*
 * Definitions for all vector types. See simd.h.
 */
#ifndef FA_CPU_SIMD_BASE_H
#define FA_CPU_SIMD_BASE_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "../convert.h"

/* An instruction set includes those on which it is based. */
#if defined(FA_ISA_AMX) && !defined(FA_ISA_AVX512_BF16)
#define FA_ISA_AVX512_BF16 1
#endif
#if defined(FA_ISA_AVX512_BF16) && !defined(FA_ISA_AVX512)
#define FA_ISA_AVX512 1
#endif

#define FA_INLINE static inline __attribute__((always_inline, unused))
#define FA_UNROLL _Pragma("GCC unroll 64")

#endif
