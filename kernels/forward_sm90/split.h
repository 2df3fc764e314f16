/*
 * Split keys: tasks of forward_sm90_split, and where their sums are in the workspace. Shared by the kernels and the
 * planner.
 *
 * The key tiles that a query tile sees are cut into parts of `part_tiles` tiles; the last part has fewer. A task is a
 * part of a query tile of a head. Tasks are numbered part by part, so that most of the first ones have whole parts.
 * Among the tasks of a part the last query tile comes first, because it sees the most keys under a causal mask, and all
 * heads of a query tile follow each other:
 *
 *     task = first_task[part] + (tiles - 1 - tile) * heads + head
 *
 * Under a causal mask, query tiles before first_tile[part] do not have the part, and there is no task for it. Some
 * tasks may be superfluous, because a window hides their keys.
 *
 * If lengths are on the device, only the device knows how many key tiles a query tile sees. Then all query tiles have the
 * same number of parts, which have equal shares of its key tiles: part_tiles is 0, and all of first_tile. Shares are empty
 * where there are fewer key tiles than parts. The second launch has a variant of its own (own_lengths in variants.h), whose
 * blocks find their rows by the lengths.
 *
 * If queries are packed, heads are those of one batch item. Tiles are numbered over all rows (common/packed.h), where some
 * numbers have no rows, or by sequence: tile t is number t % sequence_tiles of sequence t / sequence_tiles. The planner
 * chooses what has fewer numbers, because a block without rows takes a multiprocessor for some microseconds.
 *
 * Task n leaves the sums of its rows, before they are divided, in slot n of the workspace.
 */
#ifndef FA_KERNELS_FORWARD_SM90_SPLIT_H
#define FA_KERNELS_FORWARD_SM90_SPLIT_H

#include <stdint.h>

#include "../common/divide.h"

enum {
    FA_SM90_PARTS = 16,          /* of a query tile, at most */
    FA_SM90_MERGE_THREADS = 128, /* of a block of forward_sm90_merge */
    FA_SM90_MERGE_COLUMNS = 8    /* of such a thread */
};

/* Rows of a query tile that a block of forward_sm90_merge has if lengths are on the device. */
#define FA_SM90_MERGE_ROWS(value_dim)                                                              \
    (FA_SM90_MERGE_THREADS / (((value_dim) + FA_SM90_MERGE_COLUMNS - 1) / FA_SM90_MERGE_COLUMNS))

/* A row's base, an exponent of 2, and the sum of its weights 2^(x - base). */
typedef struct fa_sm90_row_sum {
#ifdef __cplusplus
    alignas(8)
#else
    _Alignas(8)
#endif
        float base;
    float sum;
} fa_sm90_row_sum;

typedef struct fa_sm90_split {
    float *out;                 /* of each slot: rows of a query tile, value_dim columns */
    fa_sm90_row_sum *sums;      /* of each slot: of its rows */
    int32_t part_tiles, parts;  /* part_tiles 0: parts are equal shares */
    int32_t heads, tiles;       /* of all batch items; query tiles of a head */
    int32_t queries, value_dim; /* of a query tile; columns of a slot */
    int32_t sequence_tiles;     /* of a packed sequence; 0: tiles are numbered over all rows */
    int32_t first_tile[FA_SM90_PARTS],
        first_task[FA_SM90_PARTS + 1]; /* the last one: the number of tasks */
} fa_sm90_split;

typedef struct fa_sm90_part {
    int32_t number, tile, head;
} fa_sm90_part;

/* The task's part, query tile and head. */
FA_SHARED_FUNCTION fa_sm90_part fa_sm90_find_part(const fa_sm90_split *split, int32_t task)
{
    fa_sm90_part found = {0, 0, 0};
    while (found.number + 1 < split->parts && task >= split->first_task[found.number + 1])
        found.number++;
    const uint32_t i = (uint32_t)(task - split->first_task[found.number]),
                   heads = (uint32_t)split->heads;
    found.tile = split->tiles - 1 - (int32_t)(i / heads);
    found.head = (int32_t)(i % heads);
    return found;
}

/* The number of parts of a query tile: these are the first ones. */
FA_SHARED_FUNCTION int32_t fa_sm90_count_parts(const fa_sm90_split *split, int32_t tile)
{
    int32_t parts = 1;
    while (parts < split->parts && tile >= split->first_tile[parts]) parts++;
    return parts;
}

/* The opposite of fa_sm90_find_part. */
FA_SHARED_FUNCTION int32_t fa_sm90_task_of(const fa_sm90_split *split, int32_t part, int32_t tile,
                                           int32_t head)
{
    return split->first_task[part] + (split->tiles - 1 - tile) * split->heads + head;
}

#endif
