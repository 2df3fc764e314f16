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
    int32_t *lengths_after, *block_table_after;  /* written, or NULL */
    int32_t *row_table_after, *cu_seqlens_after; /* the same */
    int64_t rows_apart;           /* rows from one block of the cache to the next, for these two */
    int32_t lengths_with_padding; /* lengths count the rows of left_padding */
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

/* Rows that each sequence has room for. */
FA_SHARED_FUNCTION int64_t fa_append_room(const fa_append_arrays *a)
{
    return a->block_table ? a->cache_rows * a->block_table_stride : a->cache_rows;
}

/* Rows before the first key of sequence b, clamped to its rows. */
FA_SHARED_FUNCTION int64_t fa_append_padding(const fa_append_arrays *a, int64_t b)
{
    const int64_t padding = a->left_padding ? a->left_padding[b] : 0, room = fa_append_room(a);
    if (padding < 0) return 0;
    return padding < room ? padding : room;
}

/* Keys that sequence b has in the cache after the call. */
FA_SHARED_FUNCTION int32_t fa_append_length_after(const fa_append_arrays *a, int64_t b)
{
    const int64_t length = fa_append_length(a, b), padding = fa_append_padding(a, b);
    const int64_t room = fa_append_room(a) - padding;
    int64_t after = length + fa_append_count(a, b);
    if (a->lengths_with_padding) after -= padding;
    if (after > room) after = room;
    if (after > INT32_MAX) after = INT32_MAX;
    return length < 0 || after < 0 ? 0 : (int32_t)after;
}

/* Entry i of the row of the block table that sequence b has; of the nearest row if it has none. */
FA_SHARED_FUNCTION int32_t fa_append_table_entry(const fa_append_arrays *a, int64_t b, int64_t i)
{
    int64_t row = a->cache_index ? a->cache_index[b] : b;
    if (row >= a->block_table_rows) row = a->block_table_rows - 1;
    if (row < 0) row = 0;
    return a->block_table[row * a->block_table_stride + i];
}

/* Where key j of sequence b is, for j below fa_append_length_after(): its block times rows_apart, plus its row. Wrong
 * blocks are clamped to the cache, which has fewer than 2^31 rows in all. */
FA_SHARED_FUNCTION int32_t fa_append_key_row(const fa_append_arrays *a, int64_t b, int64_t j)
{
    int64_t row = fa_append_padding(a, b) + j, block = a->cache_index ? a->cache_index[b] : b;
    if (a->block_table) {
        const int64_t page = (uint32_t)row / (uint32_t)a->cache_rows; /* cheaper than 64 bits */
        block = fa_append_table_entry(a, b, page);
        row -= page * a->cache_rows;
    }
    if (block >= a->cache_blocks) block = a->cache_blocks - 1;
    if (block < 0) block = 0;
    return (int32_t)(block * a->rows_apart + row);
}

/* Where the keys of sequence b begin; of sequence `batch`: where the last one ends. */
FA_SHARED_FUNCTION int32_t fa_append_start_after(const fa_append_arrays *a, int64_t b)
{
    if (b < a->batch) return (int32_t)(b * a->rows_apart + fa_append_padding(a, b));
    return (int32_t)(b > 0 ? (b - 1) * a->rows_apart + a->cache_rows : 0);
}

/* The place of a new key: entry of axis 0 and row of axis 1 of the cache. False: it would be outside the cache. */
FA_SHARED_FUNCTION bool fa_append_place(const fa_append_arrays *a, const fa_append_row *key,
                                        int64_t *block, int64_t *row)
{
    const int64_t b = key->sequence,
                  entries = a->block_table ? a->block_table_rows : a->cache_blocks;
    const int64_t entry = a->cache_index ? a->cache_index[b] : b;
    *row = fa_append_length(a, b) + key->number;
    if (a->left_padding && !a->lengths_with_padding) *row += a->left_padding[b];
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
