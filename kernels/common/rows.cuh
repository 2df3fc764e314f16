/*
 * Rows of the caller's tensors, of any dtype, as float32 and back.
 */
#ifndef FA_KERNELS_COMMON_ROWS_CUH
#define FA_KERNELS_COMMON_ROWS_CUH

#include "common/device.cuh"
#include "common/params.h"

FA_DEVICE int fa_element_size(int dtype)
{
    return dtype == FA_KERNEL_FLOAT32 ? 4 : dtype <= FA_KERNEL_BFLOAT16 ? 2 : 1;
}

/* int8 only in kernels that define HAS_INT8: the planners of the others refuse it. */
FA_DEVICE float fa_load_element(const char *data, int dtype, int64_t index)
{
    switch (dtype) {
    case FA_KERNEL_FLOAT32: return ((const float *)data)[index];
    case FA_KERNEL_FLOAT16: return fa_half_to_float(((const uint16_t *)data)[index]);
    case FA_KERNEL_BFLOAT16: return fa_bfloat_to_float(((const uint16_t *)data)[index]);
#ifdef HAS_INT8
    case FA_KERNEL_INT8: return (float)((const int8_t *)data)[index];
#endif
    default: return fa_e4m3_to_float(((const uint8_t *)data)[index]);
    }
}

/* Two 16-bit numbers as floats. */
FA_DEVICE float2 fa_unpack_x2(uint32_t x2, int dtype)
{
    if (dtype == FA_KERNEL_BFLOAT16)
        return make_float2(fa_bits_float(x2 << 16), fa_bits_float(x2 & 0xffff0000u));
    return make_float2(ptx_half_to_float((uint16_t)x2), ptx_half_to_float((uint16_t)(x2 >> 16)));
}

FA_DEVICE void fa_store_element(char *data, int dtype, int64_t index, float x)
{
    if (dtype == FA_KERNEL_FLOAT32) ((float *)data)[index] = x;
    else
        ((uint16_t *)data)[index] =
            dtype == FA_KERNEL_FLOAT16 ? fa_float_to_half(x) : fa_float_to_bfloat(x);
}

FA_DEVICE char *fa_view_row(const fa_kernel_view *v, int64_t block, int64_t row, int64_t head)
{
    return v->data + (block * v->stride[0] + row * v->stride[1] + head * v->stride[2]) *
                         fa_element_size(v->dtype);
}

/* How four neighbours are fetched. A kernel branches on this once and then loops, so that all loads of
 * a loop can be in flight at the same time. */
enum { FA_FETCH_FLOAT32, FA_FETCH_FLOAT16, FA_FETCH_BFLOAT16, FA_FETCH_ANY };

FA_DEVICE int fa_fetch_kind(const fa_kernel_view *v)
{
    return v->vector && v->dtype <= FA_KERNEL_BFLOAT16 ? v->dtype : FA_FETCH_ANY;
}

FA_DEVICE float4 fa_fetch_each(const char *row, int dtype, int column, int columns)
{
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (column < columns) x.x = fa_load_element(row, dtype, column);
    if (column + 1 < columns) x.y = fa_load_element(row, dtype, column + 1);
    if (column + 2 < columns) x.z = fa_load_element(row, dtype, column + 2);
    if (column + 3 < columns) x.w = fa_load_element(row, dtype, column + 3);
    return x;
}

/* Elements column .. column+3 of a row of this many columns; zeros after its end. */
FA_DEVICE float4 fa_fetch4(const char *row, int kind, int dtype, int column, int columns)
{
    if (kind == FA_FETCH_ANY) return fa_fetch_each(row, dtype, column, columns);
    if (column >= columns) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (kind == FA_FETCH_FLOAT32) return *(const float4 *)(row + 4 * (int64_t)column);
    uint2 two = *(const uint2 *)(row + 2 * (int64_t)column);
    if (kind == FA_FETCH_BFLOAT16)
        return make_float4(fa_bits_float(two.x << 16), fa_bits_float(two.x & 0xffff0000u),
                           fa_bits_float(two.y << 16), fa_bits_float(two.y & 0xffff0000u));
    return make_float4(
        fa_half_to_float((uint16_t)(two.x & 0xffffu)), fa_half_to_float((uint16_t)(two.x >> 16)),
        fa_half_to_float((uint16_t)(two.y & 0xffffu)), fa_half_to_float((uint16_t)(two.y >> 16)));
}

FA_DEVICE uint32_t fa_pack(int dtype, float low, float high)
{
    uint32_t a = dtype == FA_KERNEL_FLOAT16 ? fa_float_to_half(low) : fa_float_to_bfloat(low);
    uint32_t b = dtype == FA_KERNEL_FLOAT16 ? fa_float_to_half(high) : fa_float_to_bfloat(high);
    return a | b << 16;
}

/* The opposite of fa_fetch4. Elements after the row's end are not written. */
FA_DEVICE void fa_store4(char *row, const fa_kernel_view *v, int column, int columns, float4 x)
{
    if (v->vector && column + 3 < columns) {
        if (v->dtype == FA_KERNEL_FLOAT32) *(float4 *)(row + 4 * (int64_t)column) = x;
        else
            *(uint2 *)(row + 2 * (int64_t)column) =
                make_uint2(fa_pack(v->dtype, x.x, x.y), fa_pack(v->dtype, x.z, x.w));
        return;
    }
    if (column < columns) fa_store_element(row, v->dtype, column, x.x);
    if (column + 1 < columns) fa_store_element(row, v->dtype, column + 1, x.y);
    if (column + 2 < columns) fa_store_element(row, v->dtype, column + 2, x.z);
    if (column + 3 < columns) fa_store_element(row, v->dtype, column + 3, x.w);
}

/* The same for a row of float32, for kernels that support no other type. whole: rows consist of
 * aligned vectors of 16 bytes. */
FA_DEVICE void fa_store4_float32(char *row, bool whole, int column, int columns, float4 x)
{
    float *to = (float *)(void *)row;
    if (whole) {
        if (column < columns) *(float4 *)(void *)(to + column) = x;
        return;
    }
    if (column < columns) to[column] = x.x;
    if (column + 1 < columns) to[column + 1] = x.y;
    if (column + 2 < columns) to[column + 2] = x.z;
    if (column + 3 < columns) to[column + 3] = x.w;
}

/* Eight 16-bit elements one by one, for rows that are not aligned to 16 bytes or end within a vector. */
FA_DEVICE uint4 fa_gather_vector(const char *row, int column, int columns)
{
    uint32_t x2[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint16_t *x = (const uint16_t *)row + column + 2 * i;
        const uint32_t low = column + 2 * i < columns ? x[0] : 0;
        const uint32_t high = column + 2 * i + 1 < columns ? x[1] : 0;
        x2[i] = low | high << 16;
    }
    return make_uint4(x2[0], x2[1], x2[2], x2[3]);
}

#endif
