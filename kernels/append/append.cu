/*
 * fa_append: new keys and values into the cache, with rotary embedding of keys and queries and conversion to the cache's
 * type, all in one launch.
 *
 * A warp has a row of one head. Its columns are units: pairs of columns that are rotated, then single columns. A lane
 * reads both columns of a pair before it writes them, so queries may be rotated where they are. Types are looked at when
 * the kernel runs: the time is that of a launch and of reading.
 */
#include "append/append.h"

#include "common/divide.h"
#include "common/reduce.cuh"
#include "common/rows.cuh"

/* A row of one head, and what becomes of it. */
typedef struct fa_append_item {
    const char *from, *cos, *sin;
    char *to;
    float *scale; /* NULL: 1 */
} fa_append_item;

/* Two columns; y is no column (count 1) behind the pairs. */
typedef struct fa_append_unit {
    int column[2], count;
    float value[2];
} fa_append_unit;

FA_DEVICE void store_element(char *data, int dtype, int64_t i, float x)
{
    if (dtype == FA_KERNEL_FLOAT8_E4M3) ((uint8_t *)data)[i] = fa_float_to_e4m3(x);
    else if (dtype == FA_KERNEL_INT8) ((int8_t *)data)[i] = fa_float_to_int8(x);
    else fa_store_element(data, dtype, i, x);
}

/* Units of a row. */
FA_DEVICE int count_units(const fa_append_kind *k) { return k->columns - k->rotary_dim / 2; }

/* Reads unit n, and rotates it. */
FA_DEVICE fa_append_unit read_unit(const fa_append_params *p, const fa_append_kind *k,
                                   const fa_append_item *item, int n)
{
    const int half = k->rotary_dim / 2;
    fa_append_unit u;
    if (n >= half) { /* the columns in front of the pairs and those behind */
        u.count = 1;
        u.column[0] = n - half < p->rotary_offset || !half ? n - half : n + half;
        u.column[1] = u.column[0];
        u.value[0] = fa_load_element(item->from, k->from.dtype, u.column[0]);
        u.value[1] = 0.0f;
        return u;
    }
    u.count = 2;
    u.column[0] = p->rotary_offset + (p->interleaved ? 2 * n : n);
    u.column[1] = u.column[0] + (p->interleaved ? 1 : half);
    const float x = fa_load_element(item->from, k->from.dtype, u.column[0]);
    const float y = fa_load_element(item->from, k->from.dtype, u.column[1]);
    const float c = fa_load_element(item->cos, p->cos.dtype, n);
    const float s = fa_load_element(item->sin, p->sin.dtype, n);
    u.value[0] = x * c - y * s;
    u.value[1] = y * c + x * s;
    return u;
}

/* The scale with which the row's largest element just fits; NaN if one is not finite. */
FA_DEVICE float find_scale(const fa_append_params *p, const fa_append_kind *k,
                           const fa_append_item *item)
{
    float largest = 0.0f;
#pragma unroll 1
    for (int n = (int)threadIdx.x % 32; n < count_units(k); n += 32) {
        const fa_append_unit u = read_unit(p, k, item, n);
#pragma unroll
        for (int e = 0; e < 2; e++)
            largest = isfinite(u.value[e]) ? fmaxf(largest, fabsf(u.value[e])) : INFINITY;
    }
    largest = fa_warp_max(largest);
    if (largest == INFINITY) return NAN;
    return largest / (k->to.dtype == FA_KERNEL_INT8 ? 127.0f : 448.0f);
}

FA_DEVICE void write_row(const fa_append_params *p, const fa_append_kind *k,
                         const fa_append_item *item)
{
    float scale = 1.0f;
    if (item->scale && p->write_scales) {
        scale = find_scale(p, k, item);
        if (threadIdx.x % 32 == 0) *item->scale = scale;
    } else if (item->scale) {
        scale = *item->scale;
    }
#pragma unroll 2
    for (int n = (int)threadIdx.x % 32; n < count_units(k); n += 32) {
        const fa_append_unit u = read_unit(p, k, item, n);
#pragma unroll
        for (int e = 0; e < 2; e++)
            if (e < u.count)
                store_element(item->to, k->to.dtype, u.column[e],
                              scale == 0.0f ? 0.0f : u.value[e] / scale);
    }
}

/* Finds where item number n of a kind is read and written. False: it is not written. */
FA_DEVICE bool find_item(const fa_append_params *p, const fa_append_kind *k, int64_t n,
                         fa_append_item *item)
{
    const fa_append_arrays *a = &p->arrays;
    const int64_t outer = fa_divide(n, k->heads), head = n - outer * k->heads;
    const int64_t block = fa_divide(outer, k->rows), row = outer - block * k->rows;
    fa_append_row found;
    int64_t to_block = block, to_row = row;
    if (!fa_append_find(a, k->cu_seqlens, k->seqlens, block, row, &found)) return false;
    if (k->cached && !fa_append_place(a, &found, &to_block, &to_row)) return false;
    item->from = fa_view_row(&k->from, block, row, head);
    item->to = fa_view_row(&k->to, to_block, to_row, head);
    item->scale =
        k->scale.data ? (float *)(void *)fa_view_row(&k->scale, to_block, to_row, head) : 0;
    item->cos = item->sin = 0;
    if (k->rotary_dim) {
        const int64_t number = p->one_position && !k->cached ? 0 : found.number;
        const int64_t position = fa_append_position(a, found.sequence, number);
        item->cos = fa_view_row(&p->cos, 0, position, 0);
        item->sin = fa_view_row(&p->sin, 0, position, 0);
    }
    return true;
}

/* Several warps write the row of a sequence in the table of rows, up to its last key. */
FA_DEVICE void write_row_table(const fa_append_arrays *a, int64_t warps)
{
    const int64_t step = (int64_t)gridDim.x * FA_APPEND_ITEMS;
#pragma unroll 1
    for (int64_t n = (int64_t)blockIdx.x * FA_APPEND_ITEMS + threadIdx.x / 32; n < a->batch * warps;
         n += step) {
        const int64_t b = fa_divide(n, warps), length = fa_append_length_after(a, b);
        int32_t *row = a->row_table_after + b * fa_append_room(a);
#pragma unroll 1
        for (int64_t j = (n - b * warps) * 32 + threadIdx.x % 32; j < length; j += warps * 32)
            row[j] = fa_append_key_row(a, b, j);
    }
}

/* The lengths and the tables of the attention that follows. */
FA_DEVICE void write_arrays(const fa_append_arrays *a, int64_t table_warps)
{
    const int64_t step = (int64_t)gridDim.x * FA_APPEND_THREADS;
    const int64_t first = (int64_t)blockIdx.x * FA_APPEND_THREADS + threadIdx.x;
#pragma unroll 1
    for (int64_t b = first; a->lengths_after && b < a->batch; b += step)
        a->lengths_after[b] = fa_append_length_after(a, b);
#pragma unroll 1
    for (int64_t b = first; a->cu_seqlens_after && b <= a->batch; b += step)
        a->cu_seqlens_after[b] = fa_append_start_after(a, b);
#pragma unroll 1
    for (int64_t n = first; a->block_table_after && n < a->batch * a->block_table_stride;
         n += step) {
        const int64_t b = fa_divide(n, a->block_table_stride);
        a->block_table_after[n] = fa_append_table_entry(a, b, n - b * a->block_table_stride);
    }
    if (a->row_table_after) write_row_table(a, table_warps);
}

FA_KERNEL __launch_bounds__(FA_APPEND_THREADS)
    append_simt(const __grid_constant__ fa_append_params p)
{
    write_arrays(&p.arrays, p.table_warps);
#pragma unroll 1
    for (int64_t task = blockIdx.x; task < p.tasks; task += gridDim.x) {
        int64_t n = task * FA_APPEND_ITEMS + threadIdx.x / 32, before = 0;
        int kind = FA_APPEND_KEYS;
        while (kind < FA_APPEND_KINDS && n >= p.kinds[kind].end) before = p.kinds[kind++].end;
        if (kind == FA_APPEND_KINDS) continue;
        fa_append_item item;
        if (find_item(&p, &p.kinds[kind], n - before, &item)) write_row(&p, &p.kinds[kind], &item);
    }
}
