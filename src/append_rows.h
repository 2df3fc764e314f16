/*
 * Where fa_append writes: maps a row of the new keys or of the queries to its sequence, and then to a row of the cache.
 * Every backend uses this code, including kernels. Whatever the arrays hold, the result is never outside the cache.
 */
#ifndef FA_APPEND_ROWS_H
#define FA_APPEND_ROWS_H

#include <stdbool.h>
#include <stdint.h>

/* Kernels define this themselves before they include this header. */
#ifndef FA_SHARED_FUNCTION
#define FA_SHARED_FUNCTION static inline
#endif

/* The lengths and tables of one call; arrays that are not given are NULL. */
typedef struct fa_append_arrays {
    int64_t batch;
    int64_t rows_new, rows_q; /* rows of axis 1 of the new keys and of the queries */
    int64_t cache_blocks,
        cache_rows; /* entries of axis 0 and 1 of the cache; paged: pages and their rows */
    int64_t block_table_stride, block_table_rows;
    int64_t positions; /* rows of the rotary tables */
    const int32_t *lengths, *left_padding, *cache_index;
    const int32_t *cu_seqlens_new, *seqlens_new, *cu_seqlens_q, *seqlens_q;
    const int32_t *block_table, *rotary_positions;
    int32_t *lengths_after, *block_table_after; /* written, or NULL */
} fa_append_arrays;

/* A row of the new keys or of the queries: its sequence, and its index in the sequence. */
typedef struct fa_append_row {
    int64_t sequence, number;
} fa_append_row;

/* Finds the sequence of row `row` of axis-0 entry `block`. False: it belongs to no sequence. */
FA_SHARED_FUNCTION bool fa_append_find(const fa_append_arrays *a, const int32_t *cu_seqlens,
                                       const int32_t *seqlens, int64_t block, int64_t row,
                                       fa_append_row *found)
{
    int64_t low = 0, high = a->batch;
    found->sequence = block;
    found->number = row;
    if (cu_seqlens) {
        while (high - low > 1) {
            const int64_t middle = low + (high - low) / 2;
            if (cu_seqlens[middle] <= row) low = middle;
            else high = middle;
        }
        if (a->batch == 0 || row < cu_seqlens[low] || row >= cu_seqlens[low + 1]) return false;
        found->sequence = low;
        found->number = row - cu_seqlens[low];
    }
    return !seqlens || found->number < seqlens[found->sequence];
}

/* Keys that sequence b has in the cache before the call. */
FA_SHARED_FUNCTION int64_t fa_append_length(const fa_append_arrays *a, int64_t b)
{
    return a->lengths ? a->lengths[b] : 0;
}

/* New keys of sequence b. */
FA_SHARED_FUNCTION int64_t fa_append_count(const fa_append_arrays *a, int64_t b)
{
    int64_t first = 0, end = a->rows_new;
    if (a->cu_seqlens_new) {
        first = a->cu_seqlens_new[b] > 0 ? a->cu_seqlens_new[b] : 0;
        if (a->cu_seqlens_new[b + 1] < end) end = a->cu_seqlens_new[b + 1];
    }
    int64_t count = end - first;
    if (a->seqlens_new && a->seqlens_new[b] < count) count = a->seqlens_new[b];
    return count > 0 ? count : 0;
}

/* Keys that sequence b has in the cache after the call. */
FA_SHARED_FUNCTION int32_t fa_append_length_after(const fa_append_arrays *a, int64_t b)
{
    const int64_t padding = a->left_padding && a->left_padding[b] > 0 ? a->left_padding[b] : 0;
    const int64_t length = fa_append_length(a, b), after = length + fa_append_count(a, b);
    int64_t room = a->cache_rows;
    if (a->block_table) room *= a->block_table_stride;
    room -= padding;
    if (room > INT32_MAX) room = INT32_MAX;
    if (length < 0 || room < 0) return 0;
    return (int32_t)(after < room ? after : room);
}

/* Entry i of the row of the block table that sequence b has; of the nearest row if it has none. */
FA_SHARED_FUNCTION int32_t fa_append_table_entry(const fa_append_arrays *a, int64_t b, int64_t i)
{
    int64_t row = a->cache_index ? a->cache_index[b] : b;
    if (row >= a->block_table_rows) row = a->block_table_rows - 1;
    if (row < 0) row = 0;
    return a->block_table[row * a->block_table_stride + i];
}

/* The place of a new key: entry of axis 0 and row of axis 1 of the cache. False: it would be outside the cache. */
FA_SHARED_FUNCTION bool fa_append_place(const fa_append_arrays *a, const fa_append_row *key,
                                        int64_t *block, int64_t *row)
{
    const int64_t b = key->sequence,
                  entries = a->block_table ? a->block_table_rows : a->cache_blocks;
    const int64_t entry = a->cache_index ? a->cache_index[b] : b;
    *row = (a->left_padding ? a->left_padding[b] : 0) + fa_append_length(a, b) + key->number;
    *block = entry;
    if (fa_append_length(a, b) < 0) return false; /* also of a key that would come to row 0 */
    if (entry < 0 || entry >= entries || *row < 0) return false;
    if (a->block_table) {
        const int64_t page = *row / a->cache_rows;
        if (page >= a->block_table_stride) return false;
        *block = a->block_table[entry * a->block_table_stride + page];
        *row -= page * a->cache_rows;
    }
    return *block >= 0 && *block < a->cache_blocks && *row < a->cache_rows;
}

/* The row of the rotary tables for a key or a query, clamped to the tables. */
FA_SHARED_FUNCTION int64_t fa_append_position(const fa_append_arrays *a, int64_t b, int64_t number)
{
    const int64_t start = a->rotary_positions ? a->rotary_positions[b] : fa_append_length(a, b);
    const int64_t position = start + number;
    if (position >= a->positions) return a->positions - 1;
    return position < 0 ? 0 : position;
}

#endif
