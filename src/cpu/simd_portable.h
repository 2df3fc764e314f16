/* 4 floats in the compiler's own vectors: SSE2, NEON, or whatever the machine has. See simd.h. */
#ifndef FA_CPU_SIMD_PORTABLE_H
#define FA_CPU_SIMD_PORTABLE_H

#include "simd_base.h"

enum { VL = 4 };
typedef float vf __attribute__((vector_size(16), aligned(16)));
typedef int32_t vm __attribute__((vector_size(16), aligned(16)));

FA_INLINE vf v_set1(float x) { return (vf){x, x, x, x}; }
FA_INLINE vf v_zero(void) { return v_set1(0); }
FA_INLINE vf v_load(const float *p)
{
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}
FA_INLINE void v_store(float *p, vf x) { memcpy(p, &x, sizeof x); }
FA_INLINE vf v_load_n(const float *p, int n)
{
    vf x = v_zero();
    for (int i = 0; i < n; i++) x[i] = p[i];
    return x;
}
FA_INLINE void v_store_n(float *p, vf x, int n)
{
    for (int i = 0; i < n; i++) p[i] = x[i];
}
FA_INLINE vf v_add(vf a, vf b) { return a + b; }
FA_INLINE vf v_sub(vf a, vf b) { return a - b; }
FA_INLINE vf v_mul(vf a, vf b) { return a * b; }
FA_INLINE vf v_div(vf a, vf b) { return a / b; }
FA_INLINE vf v_fma(vf a, vf b, vf c) { return a * b + c; } /* fused where the machine can */
/* The exponential needs a*b - c, c near a*b, without the product's rounding: in two halves each, where
 * the machine has no fused step. */
FA_INLINE vf v_fms(vf a, vf b, vf c)
{
#ifdef FP_FAST_FMAF
    return a * b - c;
#else
    const vm upper = {-4096, -4096, -4096, -4096};
    const vf a_high = (vf)((vm)a & upper), b_high = (vf)((vm)b & upper);
    return ((a_high * b_high - c) + a_high * (b - b_high)) + (a - a_high) * b;
#endif
}
FA_INLINE vm v_less(vf a, vf b) { return a < b; }
FA_INLINE vm v_equal(vf a, vf b) { return a == b; }
FA_INLINE vf v_select(vm m, vf yes, vf no) { return (vf)((m & (vm)yes) | (~m & (vm)no)); }
FA_INLINE vf v_max(vf a, vf b) { return v_select(a > b, a, b); }
FA_INLINE vf v_min(vf a, vf b) { return v_select(a < b, a, b); }
FA_INLINE vf v_abs(vf a) { return (vf)((vm)a & 0x7fffffff); }
FA_INLINE vf v_scale(vf x, vf n)
{
    vm whole;
    for (int i = 0; i < VL; i++) whole[i] = n[i] == n[i] ? (int32_t)n[i] : 0;
    vm half = whole >> 1;
    vm rest = whole - half;
    return x * (vf)((half + 127) << 23) * (vf)((rest + 127) << 23);
}
FA_INLINE vf v_iota(void) { return (vf){0, 1, 2, 3}; }
FA_INLINE float v_sum(vf a) { return (a[0] + a[2]) + (a[1] + a[3]); }
FA_INLINE float v_maximum(vf a)
{
    float x = a[0] > a[1] ? a[0] : a[1];
    float y = a[2] > a[3] ? a[2] : a[3];
    return x > y ? x : y;
}
FA_INLINE void v_sum4(const vf x[4], float *sums)
{
    for (int i = 0; i < 4; i++) sums[i] = v_sum(x[i]);
}

FA_INLINE vf v_load_half(const uint16_t *p)
{
    vf x;
    for (int i = 0; i < VL; i++) x[i] = fa_half_to_float(p[i]);
    return x;
}
FA_INLINE void v_store_half(uint16_t *p, vf x)
{
    for (int i = 0; i < VL; i++) p[i] = fa_float_to_half(x[i]);
}
FA_INLINE vf v_load_bfloat(const uint16_t *p)
{
    vf x;
    for (int i = 0; i < VL; i++) x[i] = fa_bfloat_to_float(p[i]);
    return x;
}
FA_INLINE void v_load_bfloat_pairs(const uint16_t *p, vf *even, vf *odd)
{
    *even = (vf){fa_bfloat_to_float(p[0]), fa_bfloat_to_float(p[2]), fa_bfloat_to_float(p[4]),
                 fa_bfloat_to_float(p[6])};
    *odd = (vf){fa_bfloat_to_float(p[1]), fa_bfloat_to_float(p[3]), fa_bfloat_to_float(p[5]),
                fa_bfloat_to_float(p[7])};
}
FA_INLINE void v_store_bfloat(uint16_t *p, vf x)
{
    for (int i = 0; i < VL; i++) p[i] = fa_float_to_bfloat(x[i]);
}

FA_INLINE void v_transpose(uint32_t *dst, int64_t dst_stride, const uint32_t *src,
                           int64_t src_stride)
{
    for (int i = 0; i < VL; i++)
        for (int j = 0; j < VL; j++) dst[i * dst_stride + j] = src[j * src_stride + i];
}

#endif
