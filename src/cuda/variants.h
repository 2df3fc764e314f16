/*
 * The rows of kernels/variants.h for the host: a variant is a compiled kernel, and its id is its number in that table.
 */
#ifndef FA_CUDA_VARIANTS_H
#define FA_CUDA_VARIANTS_H

#include "../../kernels/common/element.h"

/* FA_VARIANT_<name>, the id of each variant; FA_FIRST_<pass>_<family> and FA_END_<pass>_<family>, the ids of a family's
 * first variant and of the variant after its last one. */
enum {
#define VARIANT(name, ...) FA_VARIANT_##name,
#define FAMILY(pass, name)                                                                         \
    FA_FIRST_##pass##_##name, FA_BEFORE_##pass##_##name = FA_FIRST_##pass##_##name - 1,
#define END(pass, name)                                                                            \
    FA_END_##pass##_##name, FA_LAST_##pass##_##name = FA_END_##pass##_##name - 1,
#include "../../kernels/variants.h"
#undef VARIANT
#undef FAMILY
#undef END
    FA_VARIANTS,
    FA_NO_VARIANT = -1
};

/* A row; fields that it does not name are 0. kernels/variants.h explains the fields. Those that planners read while they
 * search come first. */
typedef struct fa_variant {
    fa_element element, cache;
    int head_dim, value_dim, columns, options;
    int single_tiles, short_rows, few_queries, tracked, overlapped, copied;
    int keys, stages, q_stages, static_smem, ordered, persistent, joined, dq_buffers, dq_transposed,
        chained, rounding;
    int cluster, consumers, chunk, v_rows, rounded, for_bias;                 /* sm90 */
    int warps, split, group_rows, queries, blocks, ahead, slices, split_keys; /* sm80, sm75 */
    int groups, beside;                                                       /* of mixed batches */
    int own_lengths;    /* forward_sm90_merge */
    int own_blocks;     /* decode_latent_sm90 */
    int rows;           /* simt */
    int own, max_parts; /* other passes */
    int architecture, each_architecture;
    const char *name, *file, *kernel;
} fa_variant;

extern const fa_variant fa_variants[FA_VARIANTS];

#endif
