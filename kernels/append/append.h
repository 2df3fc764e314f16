/*
 * What the kernel of fa_append is told. Shared by the kernel and the planner.
 */
#ifndef FA_KERNEL_APPEND_H
#define FA_KERNEL_APPEND_H

#include "../common/divide.h" /* makes FA_SHARED_FUNCTION what it is in kernels */

#include "../../src/append_rows.h"
#include "../common/params.h"

/* Rows of one kind: new keys, new values, or queries. */
typedef struct fa_append_kind {
    fa_kernel_view from, to, scale; /* scale without data: 1 */
    const int32_t *cu_seqlens, *seqlens;
    int64_t rows, heads; /* rows of axis 1 of from */
    int64_t end;         /* items, a row of one head each, of this kind and those before it */
    int32_t columns;
    int32_t rotary_dim; /* 0: not rotated */
    int32_t cached;     /* to is the cache */
} fa_append_kind;

enum { FA_APPEND_KEYS, FA_APPEND_VALUES, FA_APPEND_QUERIES, FA_APPEND_KINDS };

typedef struct fa_append_params {
    fa_append_arrays arrays;
    fa_append_kind kinds[FA_APPEND_KINDS];
    fa_kernel_view cos, sin;
    int64_t tasks;
    int64_t table_warps; /* for the row of a sequence in row_table_after */
    int32_t rotary_offset, interleaved, one_position, write_scales;
} fa_append_params;

#define FA_APPEND_THREADS 128
#define FA_APPEND_ITEMS 4 /* of a block: a warp each */

/* Entries of row_table_after for a lane, and warps of all rows, beyond which lanes write more entries. */
#define FA_APPEND_LANE_ENTRIES 8
#define FA_APPEND_TABLE_WARPS 16384

#endif
