/*
 * A vector of VL floats and the few operations that the engine uses. One header for each instruction
 * set defines the same names:
 *   v_zero v_set1 v_load v_store v_load_n v_store_n      the _n forms touch only the first n lanes
 *   v_add v_sub v_mul v_div v_fma(a, b, c) = a*b + c  v_abs
 *   v_max(a, b), v_min(a, b): b where either is NaN
 *   v_fms(a, b, c) = a*b - c  v_scale(x, n) = x * 2^n for integral -151 <= n <= 128, +inf above
 *   v_less v_equal v_select(mask, yes, no)  v_iota = {0, 1, ...}
 *   v_sum v_maximum                                       over the lanes; v_sum4 of four vectors
 *   v_load_half v_store_half v_load_bfloat v_store_bfloat 16-bit types, round to nearest even
 *   v_load_bfloat_pairs                                  2*VL of them: the even ones, the odd ones
 *   v_transpose(dst, dst_stride, src, src_stride)         VL x VL words of 32 bits
 */
#ifndef FA_CPU_SIMD_H
#define FA_CPU_SIMD_H

#include "simd_base.h"

#if defined(FA_ISA_AVX512)
#include "simd_avx512.h"
#elif defined(FA_ISA_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

#endif
