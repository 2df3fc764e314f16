/*
 * Split keys: the parameter of forward_sm80_split and forward_sm80_merge, and where sums are in the workspace. Shared by
 * the kernels and the planner.
 *
 * The key tiles that a query tile sees are cut into `parts` equal parts. A task is a part of a query tile of a head:
 *
 *     task = (the query tile's number, as of fa_find_tile) * parts + part
 *
 * Where a part begins follows from the keys that the query tile sees, so lengths may be on the device. A query tile that
 * sees few key tiles has parts without keys; their rows have the base of a row that has seen no key, and the second launch
 * ignores them. Task n leaves the sums of its rows, before they are divided, in slot n of the workspace.
 *
 * Query heads that have a key head in common may share query tiles, one after the other for each query (FlashAttention-3
 * calls this PackGQA): row r is query r >> group_bits of the tile, and head r % 2^group_bits of the group. To the kernels the
 * problem then has a head for each group.
 */
#ifndef FA_KERNELS_FORWARD_SM80_SPLIT_H
#define FA_KERNELS_FORWARD_SM80_SPLIT_H

#include "../common/params.h"
#include "../forward_sm90/split.h"

enum {
    FA_SM80_MOST_PARTS = 64, /* of a query tile */
    FA_SM80_MERGE_THREADS =
        128 /* of a block of forward_sm80_merge, with FA_SM90_MERGE_COLUMNS columns each */
};

typedef struct fa_sm80_split {
    float *out;                 /* of each slot: rows of a query tile, value_dim columns */
    fa_sm90_row_sum *sums;      /* of each slot: of its rows */
    int32_t parts;              /* of a query tile */
    int32_t queries, value_dim; /* rows of a query tile; columns of a slot */
    int32_t group_bits;         /* log2 of the query heads that share query tiles */
    int32_t lane_bits;   /* log2 of the lanes of the second launch that share the parts of a row */
    int32_t tile_blocks; /* blocks of the second launch that merge a query tile's rows */
    int64_t head_stride; /* from the queries of a head to those of the next */
} fa_sm80_split;

/* The kernels' parameter. */
typedef struct fa_sm80_split_params {
    /* heads_q and q.stride[2] are of groups, tiles and tasks of query tiles with all keys. */
    fa_attention_params attention;
    fa_sm80_split split;
} fa_sm80_split_params;

#endif
