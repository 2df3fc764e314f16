/*
 * The shapes that forward_sm90 is compiled for, and what it is told besides fa_attention_params.
 * Shared by the kernel and the planner.
 *
 *   FA_SM90_CONSUMERS_<d>_<d_v>  warpgroups that compute, 64 queries each, for head dims up to d (queries,
 *                                keys) and d_v (values); one more warpgroup loads
 *   FA_SM90_KEYS_<d>_<d_v>       keys of a tile, a multiple of 16: the more, the fewer barriers. Two tiles
 *                                of keys and two of values fit into shared memory beside the queries;
 *                                scores, weights and outputs into the consumers' registers
 */
#ifndef FA_KERNEL_FORWARD_SM90_H
#define FA_KERNEL_FORWARD_SM90_H

#include <stdint.h>

#ifndef FA_SM90_KEYS_64_64
#define FA_SM90_KEYS_64_64 128
#define FA_SM90_CONSUMERS_64_64 3
#endif
#define FA_SM90_KEYS_96_96 176
#define FA_SM90_CONSUMERS_96_96 2
#ifndef FA_SM90_KEYS_128_128
#define FA_SM90_KEYS_128_128 176
#define FA_SM90_CONSUMERS_128_128 2
#endif
#define FA_SM90_KEYS_192_128 128
#define FA_SM90_CONSUMERS_192_128 2
#define FA_SM90_KEYS_192_192 112
#define FA_SM90_CONSUMERS_192_192 2
#ifndef FA_SM90_KEYS_256_256
#define FA_SM90_KEYS_256_256 80
#define FA_SM90_CONSUMERS_256_256 2
#endif

#define FA_SM90_LOOK_UP(what, dim, dim_v) FA_SM90_##what##_##dim##_##dim_v
#define FA_SM90_KEYS(dim, dim_v) FA_SM90_LOOK_UP(KEYS, dim, dim_v)
#define FA_SM90_CONSUMERS(dim, dim_v) FA_SM90_LOOK_UP(CONSUMERS, dim, dim_v)

#define FA_SM90_QUERIES(dim, dim_v) (64 * FA_SM90_CONSUMERS(dim, dim_v)) /* of a piece of work */
#define FA_SM90_THREADS(dim, dim_v) (128 * (1 + FA_SM90_CONSUMERS(dim, dim_v)))

enum {
    FA_SM90_STAGES = 2, /* tiles of keys, and of values, in shared memory */
    FA_SM90_ALIGN = 32  /* the first key of a piece is a multiple of it   */
};

/* Bytes of a row in shared memory: blocks of 64 columns. */
#define FA_SM90_ROW_BYTES(dim) (((dim) + 63) / 64 * 128)

/* Bytes through which a consumer's results go out, 64 columns at a time, where there is room. */
#define FA_SM90_STAGING(dim, dim_v) ((dim) <= 192 ? FA_SM90_QUERIES(dim, dim_v) * 128 : 0)

/* Bytes of dynamic shared memory, with room to align to 1024. */
#define FA_SM90_SMEM(dim, dim_v)                                                                   \
    (FA_SM90_QUERIES(dim, dim_v) * FA_SM90_ROW_BYTES(dim) +                                        \
     FA_SM90_STAGES * FA_SM90_KEYS(dim, dim_v) *                                                   \
         (FA_SM90_ROW_BYTES(dim) + FA_SM90_ROW_BYTES(dim_v)) +                                     \
     FA_SM90_STAGING(dim, dim_v) + 1024)

/* The kernel's second parameter. Maps of the copy engine with the axes (dim, row, head, block), that is
 * the axes (3, 1, 2, 0) of the caller's tensors; boxes of 64 columns. */
typedef struct fa_sm90_map {
#ifdef __cplusplus
    alignas(64)
#else
    _Alignas(64)
#endif
        uint64_t opaque[16];
} fa_sm90_map;

typedef struct fa_sm90_params {
    fa_sm90_map q, k, v; /* boxes of 64 rows of q, of box_rows rows of k and v  */
    int32_t box_rows;    /* KEYS; paged: a divisor of it and of the page's rows */
    int32_t pairs;       /* 1: a head's pieces are done in pairs, first and last, second and last but
                          * one, ..., which are equally long under a causal mask; tasks counts pairs */
    int64_t tasks;
} fa_sm90_params;

#endif
