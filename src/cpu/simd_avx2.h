/* 8 floats: AVX2, FMA, F16C. See simd.h for what each name does. */
#ifndef FA_CPU_SIMD_AVX2_H
#define FA_CPU_SIMD_AVX2_H

#include <immintrin.h>

#include "simd_base.h"

enum { VL = 8 };
typedef __m256 vf;
typedef __m256 vm;

FA_INLINE vf v_zero(void) { return _mm256_setzero_ps(); }
FA_INLINE vf v_set1(float x) { return _mm256_set1_ps(x); }
FA_INLINE vf v_load(const float *p) { return _mm256_loadu_ps(p); }
FA_INLINE void v_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
FA_INLINE __m256i v_first(int n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
FA_INLINE vf v_load_n(const float *p, int n) { return _mm256_maskload_ps(p, v_first(n)); }
FA_INLINE void v_store_n(float *p, vf x, int n) { _mm256_maskstore_ps(p, v_first(n), x); }
FA_INLINE vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
FA_INLINE vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
FA_INLINE vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
FA_INLINE vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
FA_INLINE vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
FA_INLINE vf v_fms(vf a, vf b, vf c) { return _mm256_fmsub_ps(a, b, c); }
FA_INLINE vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
FA_INLINE vf v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
FA_INLINE vf v_abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
/* In two steps, so that neither factor leaves the range of normal numbers. */
FA_INLINE vf v_scale(vf x, vf n)
{
    __m256i whole = _mm256_cvtps_epi32(n);
    __m256i half = _mm256_srai_epi32(whole, 1);
    __m256i rest = _mm256_sub_epi32(whole, half);
    __m256i bias = _mm256_set1_epi32(127);
    __m256 a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    __m256 b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
    return _mm256_mul_ps(_mm256_mul_ps(x, a), b);
}
FA_INLINE vm v_less(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
FA_INLINE vm v_equal(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
FA_INLINE vf v_select(vm m, vf yes, vf no) { return _mm256_blendv_ps(no, yes, m); }
FA_INLINE vf v_iota(void) { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
FA_INLINE float v_sum(vf a)
{
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
FA_INLINE float v_maximum(vf a)
{
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
/* Pairs of lanes are added while the four vectors are woven into one of a, b, c, d, a, b, ... */
FA_INLINE void v_sum4(const vf x[4], float *sums)
{
    vf ab = v_add(_mm256_unpacklo_ps(x[0], x[1]), _mm256_unpackhi_ps(x[0], x[1]));
    vf cd = v_add(_mm256_unpacklo_ps(x[2], x[3]), _mm256_unpackhi_ps(x[2], x[3]));
    vf abcd = v_add(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
}

FA_INLINE vf v_load_half(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
FA_INLINE void v_store_half(uint16_t *p, vf x)
{
    _mm_storeu_si128((__m128i *)p,
                     _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
FA_INLINE vf v_load_bfloat(const uint16_t *p)
{
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
FA_INLINE void v_load_bfloat_pairs(const uint16_t *p, vf *even, vf *odd)
{
    const __m256i pairs = _mm256_loadu_si256((const __m256i *)p);
    *even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    *odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000)));
}
FA_INLINE void v_store_bfloat(uint16_t *p, vf x)
{
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    __m256i top = _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(top, top), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(packed));
}

/* 8 x 8 words. */
FA_INLINE void v_transpose(uint32_t *dst, int64_t dst_stride, const uint32_t *src,
                           int64_t src_stride)
{
    __m256i a[8], b[8];
    FA_UNROLL
    for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_si256((const __m256i *)(src + i * src_stride));
    FA_UNROLL
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
    FA_UNROLL
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    FA_UNROLL
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_si256((__m256i *)(dst + i * dst_stride),
                            _mm256_permute2x128_si256(a[i], a[4 + i], 0x20));
        _mm256_storeu_si256((__m256i *)(dst + (4 + i) * dst_stride),
                            _mm256_permute2x128_si256(a[i], a[4 + i], 0x31));
    }
}

#endif
