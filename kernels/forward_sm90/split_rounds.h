/*
 * Split keys of the kernels for float32 on Hopper, forward_tf32_sm90 and forward_f16x3_sm90: shared by the kernels and the
 * planner. They use these fields of fa_sm90_split (split.h):
 *
 *   parts          of a query tile, at most; 0: keys are not split, and nothing else is read
 *   part_tiles     key tiles of a part
 *   first_task[0]  query tiles with all of their keys: tasks 0, 1, ...
 *   first_task[1]  the number of all tasks
 *   heads, tiles   of all batch items; query tiles of a head
 *   queries        of a query tile
 *   first_tile[0]  1: the order of query tiles, below
 *   first_tile[1]  1: bases of rows are logits, not exponents of 2
 *   out, sums      of each part: rows of value_dim columns, and a base and a sum for each row
 *
 * So the query tiles that fill whole rounds of blocks cost nothing more, and those of the last round are cut into parts. Their
 * tasks are numbered part by part. Query tiles are in the order of fa_find_tile, head by head; or, under a causal mask, the last
 * tile of all heads comes first, because it has the most keys.
 *
 * Task n leaves its sums in slot n - first_task[0]. A second launch, forward_sm90_merge_float32, merges the parts of each row.
 */
#ifndef FA_KERNELS_FORWARD_SM90_SPLIT_ROUNDS_H
#define FA_KERNELS_FORWARD_SM90_SPLIT_ROUNDS_H

#include "split.h"

typedef struct fa_split_task {
    int64_t tile;       /* the number of its query tile for fa_find_tile */
    int32_t part, slot; /* slot -1: all keys */
} fa_split_task;

/* Query tile n in the order of tasks, as a number for fa_find_tile. */
FA_SHARED_FUNCTION int64_t fa_split_tile(const fa_sm90_split *split, int32_t n)
{
    const uint32_t heads = (uint32_t)split->heads, tile = (uint32_t)n / heads;
    if (!split->first_tile[0]) return n;
    return (int64_t)((uint32_t)n - tile * heads) * split->tiles + tile;
}

/* Query tiles that are cut. */
FA_SHARED_FUNCTION int32_t fa_count_cut_tiles(const fa_sm90_split *split)
{
    return split->heads * split->tiles - split->first_task[0];
}

FA_SHARED_FUNCTION fa_split_task fa_find_split_task(const fa_sm90_split *split, int32_t task)
{
    const int32_t whole = split->first_task[0];
    fa_split_task found = {0, 0, -1};
    if (task >= whole) {
        found.slot = task - whole;
        found.part = (int32_t)((uint32_t)found.slot / (uint32_t)fa_count_cut_tiles(split));
        task -= found.part * fa_count_cut_tiles(split);
    }
    found.tile = fa_split_tile(split, task);
    return found;
}

/* The parts of a query tile whose last query sees so many keys, at least one; part_keys: of a part. */
FA_SHARED_FUNCTION int32_t fa_count_split_parts(const fa_sm90_split *split, int64_t keys,
                                                int32_t part_keys)
{
    if (keys <= part_keys) return 1;
    const int64_t parts = (keys + part_keys - 1) / part_keys;
    return parts < split->parts ? (int32_t)parts : split->parts;
}

#endif
