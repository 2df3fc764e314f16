/* 16 floats: AVX-512 F, BW, VL, DQ. See simd.h for what each name does. */
#ifndef FA_CPU_SIMD_AVX512_H
#define FA_CPU_SIMD_AVX512_H

#include <immintrin.h>

#include "simd_base.h"

enum { VL = 16 };
typedef __m512 vf;
typedef __mmask16 vm;

FA_INLINE vf v_zero(void) { return _mm512_setzero_ps(); }
FA_INLINE vf v_set1(float x) { return _mm512_set1_ps(x); }
FA_INLINE vf v_load(const float *p) { return _mm512_loadu_ps(p); }
FA_INLINE void v_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
FA_INLINE vm v_first(int n) { return (vm)((1u << n) - 1u); }
FA_INLINE vf v_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps(v_first(n), p); }
FA_INLINE void v_store_n(float *p, vf x, int n) { _mm512_mask_storeu_ps(p, v_first(n), x); }
FA_INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
FA_INLINE vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
FA_INLINE vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
FA_INLINE vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
FA_INLINE vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
FA_INLINE vf v_fms(vf a, vf b, vf c) { return _mm512_fmsub_ps(a, b, c); }
FA_INLINE vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
FA_INLINE vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
FA_INLINE vf v_abs(vf a) { return _mm512_abs_ps(a); }
FA_INLINE vf v_scale(vf x, vf n) { return _mm512_scalef_ps(x, n); }
FA_INLINE vm v_less(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
FA_INLINE vm v_equal(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
FA_INLINE vf v_select(vm m, vf yes, vf no) { return _mm512_mask_blend_ps(m, no, yes); }
FA_INLINE vf v_iota(void)
{
    return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
FA_INLINE float v_sum(vf a) { return _mm512_reduce_add_ps(a); }
FA_INLINE float v_maximum(vf a) { return _mm512_reduce_max_ps(a); }
/* Pairs of lanes are added while the four vectors are woven into one of a, b, c, d, a, b, ... */
FA_INLINE void v_sum4(const vf x[4], float *sums)
{
    vf ab = v_add(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    vf cd = v_add(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    vf abcd = v_add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

FA_INLINE vf v_load_half(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
FA_INLINE void v_store_half(uint16_t *p, vf x)
{
    _mm256_storeu_si256((__m256i *)p,
                        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
FA_INLINE vf v_load_bfloat(const uint16_t *p)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
FA_INLINE void v_load_bfloat_pairs(const uint16_t *p, vf *even, vf *odd)
{
    const __m512i pairs = _mm512_loadu_si512(p);
    *even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    *odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
}
FA_INLINE __m256i v_to_bfloat(vf x)
{
#ifdef FA_ISA_AVX512_BF16
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    vm nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(nan, up, quiet), 16));
#endif
}
FA_INLINE void v_store_bfloat(uint16_t *p, vf x)
{
    _mm256_storeu_si256((__m256i *)p, v_to_bfloat(x));
}

#ifdef FA_ISA_AVX512_BF16
/* Pairs of bfloat16 (low[i], high[i]), as many of n as fill vectors: *done. Returns whether one of these
 * numbers is not finite. */
FA_INLINE uint32_t v_pair_bfloats(uint32_t *dst, const uint16_t *low, const uint16_t *high,
                                  int64_t n, int64_t *done)
{
    /* so that unpacking, which looks at each 128 bits alone, gives the pairs in their order */
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    __m512i largest = _mm512_setzero_si512();
    int64_t i = 0;
    for (; i + 2 * VL <= n; i += 2 * VL) {
        __m512i a = _mm512_loadu_si512(low + i), b = _mm512_loadu_si512(high + i);
        largest = _mm512_max_epu16(largest, _mm512_and_si512(a, magnitude));
        largest = _mm512_max_epu16(largest, _mm512_and_si512(b, magnitude));
        a = _mm512_permutexvar_epi64(order, a);
        b = _mm512_permutexvar_epi64(order, b);
        _mm512_storeu_si512(dst + i, _mm512_unpacklo_epi16(a, b));
        _mm512_storeu_si512(dst + i + VL, _mm512_unpackhi_epi16(a, b));
    }
    *done = i;
    return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(0x7f80)) != 0;
}
#endif

/* 16 x 16 words: pairs of rows, then pairs of pairs, then 128-bit lanes. */
FA_INLINE void v_transpose(uint32_t *dst, int64_t dst_stride, const uint32_t *src,
                           int64_t src_stride)
{
    __m512i a[16], b[16];
    FA_UNROLL
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(src + i * src_stride);
    FA_UNROLL
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    FA_UNROLL
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    FA_UNROLL
    for (int i = 0; i < 4; i++) /* a[4g + i] holds columns i, 4+i, 8+i, 12+i of rows 4g.. */
    {
        b[i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88);
        b[4 + i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
        b[8 + i] = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
        b[12 + i] = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
    }
    FA_UNROLL
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_si512(dst + i * dst_stride, _mm512_shuffle_i32x4(b[i], b[8 + i], 0x88));
        _mm512_storeu_si512(dst + (8 + i) * dst_stride, _mm512_shuffle_i32x4(b[i], b[8 + i], 0xdd));
        _mm512_storeu_si512(dst + (4 + i) * dst_stride,
                            _mm512_shuffle_i32x4(b[4 + i], b[12 + i], 0x88));
        _mm512_storeu_si512(dst + (12 + i) * dst_stride,
                            _mm512_shuffle_i32x4(b[4 + i], b[12 + i], 0xdd));
    }
}

#endif
