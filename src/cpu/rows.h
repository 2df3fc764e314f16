/*
 * Moving rows between the caller's tensors and the engine's tiles: any dtype in, float32 words (or
 * pairs of bfloat16) out, padded with zeros to whole vectors.
 */
#ifndef FA_CPU_ROWS_H
#define FA_CPU_ROWS_H

#include "../problem.h"
#include "simd.h"

FA_INLINE int64_t fa_round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
FA_INLINE int64_t fa_min(int64_t a, int64_t b) { return a < b ? a : b; }
FA_INLINE int64_t fa_max(int64_t a, int64_t b) { return a > b ? a : b; }

/* The distance between rows of a tile of n columns: whole vectors, and one more. Without it, rows could
 * be a power of two apart and share cache sets. */
FA_INLINE int64_t fa_pitch(int64_t n) { return fa_round_up(n, VL) + VL; }

FA_INLINE float fa_element(const char *data, fa_dtype dtype, int64_t index)
{
    switch (dtype) {
    case FA_FLOAT32: return ((const float *)(const void *)data)[index];
    case FA_FLOAT16: return fa_half_to_float(((const uint16_t *)(const void *)data)[index]);
    case FA_BFLOAT16: return fa_bfloat_to_float(((const uint16_t *)(const void *)data)[index]);
    case FA_FLOAT8_E4M3: return fa_e4m3_to_float(((const uint8_t *)data)[index]);
    case FA_INT8: return (float)((const int8_t *)data)[index];
    default: return ((const uint8_t *)data)[index] ? 1.0f : 0.0f;
    }
}

/* n contiguous elements as floats; dst is padded with zeros to padded elements. */
static inline void fa_load_row(float *dst, const char *src, fa_dtype dtype, int64_t n,
                               int64_t padded)
{
    int64_t i = 0;
    if (dtype == FA_FLOAT32) {
        for (; i + VL <= n; i += VL) v_store(dst + i, v_load((const float *)(const void *)src + i));
    } else if (dtype == FA_FLOAT16) {
        for (; i + VL <= n; i += VL)
            v_store(dst + i, v_load_half((const uint16_t *)(const void *)src + i));
    } else if (dtype == FA_BFLOAT16) {
        for (; i + VL <= n; i += VL)
            v_store(dst + i, v_load_bfloat((const uint16_t *)(const void *)src + i));
    } else if (dtype == FA_FLOAT8_E4M3) { /* loops that the compiler makes vectors of */
        for (; i < n; i++) dst[i] = fa_e4m3_to_float(((const uint8_t *)src)[i]);
    } else if (dtype == FA_INT8) {
        for (; i < n; i++) dst[i] = (float)((const int8_t *)src)[i];
    }
    for (; i < n; i++) dst[i] = fa_element(src, dtype, i);
    for (; i < padded; i++) dst[i] = 0.0f;
}

/* A row of keys or values times the scale of its elements. */
static inline void fa_load_scaled_row(float *dst, const char *src, fa_dtype dtype, int64_t n,
                                      int64_t padded, float scale)
{
    fa_load_row(dst, src, dtype, n, padded);
    for (int64_t i = 0; scale != 1.0f && i < n; i++) dst[i] *= scale;
}

/* n elements a stride apart; as above without padding. */
static inline void fa_load_strided(float *dst, const char *src, fa_dtype dtype, int64_t stride,
                                   int64_t n)
{
    if (stride == 1) {
        fa_load_row(dst, src, dtype, n, n);
        return;
    }
    for (int64_t i = 0; i < n; i++) dst[i] = fa_element(src, dtype, i * stride);
}

FA_INLINE void fa_store_element(char *data, fa_dtype dtype, int64_t index, float x)
{
    if (dtype == FA_FLOAT32) ((float *)(void *)data)[index] = x;
    else
        ((uint16_t *)(void *)data)[index] =
            dtype == FA_FLOAT16 ? fa_float_to_half(x) : fa_float_to_bfloat(x);
}

/* n floats, times a factor, as n contiguous elements. */
static inline void fa_store_row(char *dst, fa_dtype dtype, const float *src, float factor,
                                int64_t n)
{
    const vf f = v_set1(factor);
    int64_t i = 0;
    if (dtype == FA_FLOAT32) {
        for (; i + VL <= n; i += VL) v_store((float *)(void *)dst + i, v_mul(f, v_load(src + i)));
    } else if (dtype == FA_FLOAT16) {
        for (; i + VL <= n; i += VL)
            v_store_half((uint16_t *)(void *)dst + i, v_mul(f, v_load(src + i)));
    } else {
        for (; i + VL <= n; i += VL)
            v_store_bfloat((uint16_t *)(void *)dst + i, v_mul(f, v_load(src + i)));
    }
    for (; i < n; i++) fa_store_element(dst, dtype, i, factor * src[i]);
}

static inline void fa_zero_row(char *dst, fa_dtype dtype, int64_t n)
{
    memset(dst, 0, (size_t)n * (dtype == FA_FLOAT32 ? 4 : 2));
}

/* src: rows of `depth` words at `pitch`, both padded to whole vectors and `rows` too. dst: depth rows
 * of `rows` words at dst_pitch. */
static inline void fa_transpose(uint32_t *dst, int64_t dst_pitch, const uint32_t *src,
                                int64_t pitch, int64_t rows, int64_t depth)
{
    for (int64_t k = 0; k < depth; k += VL)
        for (int64_t j = 0; j < rows; j += VL)
            v_transpose(dst + k * dst_pitch + j, dst_pitch, src + j * pitch + k, pitch);
}

/* Copies n floats (whole vectors). Adds x * 0, which is 0 or NaN, to `seen`: two sums, so that fewer
 * additions wait for each other. */
FA_INLINE void fa_copy_seen(float *dst, const float *src, int64_t n, vf seen[2])
{
    int64_t i = 0;
    for (; i + 2 * VL <= n; i += 2 * VL) {
        const vf x = v_load(src + i), y = v_load(src + i + VL);
        v_store(dst + i, x);
        v_store(dst + i + VL, y);
        seen[0] = v_fma(x, v_zero(), seen[0]);
        seen[1] = v_fma(y, v_zero(), seen[1]);
    }
    if (i == n) return;
    const vf x = v_load(src + i);
    v_store(dst + i, x);
    seen[0] = v_fma(x, v_zero(), seen[0]);
}

/* Whether all n floats (whole vectors) are finite: x * 0 is 0 or NaN. */
static inline bool fa_all_finite(const float *x, int64_t n)
{
    vf seen = v_zero();
    for (int64_t i = 0; i < n; i += VL) seen = v_fma(v_load(x + i), v_zero(), seen);
    return v_sum(seen) == 0.0f;
}

#endif
