/*
 * What follows from the numbers of a variant of forward_sm90, and what it is told besides fa_attention_params. Shared by
 * the kernel and the planner.
 *
 * Of kernels/variants.h:
 *   head_dim, value_dim  multiples of 16
 *   consumers            warpgroups that compute, 64 queries each; one more loads
 *   keys                 a multiple of 16: the more, the fewer barriers; the fewer, the less is wasted at the end of a
 *                        row. `stages` tiles of keys and as many of values fit into shared memory beside the queries;
 *                        scores, weights and outputs into the consumers' registers
 *   q_stages             with more than one, the queries of the next work tiles are there when they are needed. 1 with
 *                        a bias, of which each consumer has a tile instead
 *   single_tiles         1: only for rows whose keys are one tile
 *   short_rows           1: only for rows that are short, or whose last queries would be few (src/cuda/plan_sm90.c)
 */
#ifndef FA_KERNEL_FORWARD_SM90_H
#define FA_KERNEL_FORWARD_SM90_H

#include <stdint.h>

#include "../common/element.h"

#define FA_SM90_QUERIES(consumers) (64 * (consumers)) /* of a work tile */
#define FA_SM90_THREADS(consumers) (128 * (1 + (consumers)))

/* Options that change scores and weights. */
#define FA_SM90_SOFTCAP 1
#define FA_SM90_SCALED 2 /* a scale that scores are multiplied by on their own */
#define FA_SM90_ALIBI 4
#define FA_SM90_BIAS 8     /* one that TMA loads */
#define FA_SM90_BY_ROWS 16 /* a boolean mask, any other bias */
#define FA_SM90_DROPOUT 32
#define FA_SM90_ALL 63

/* Scores are in units of the scale or the softcap when they come to the softmax, which multiplies by it
 * anyway; but not of a scale so small that a bias in such units overflows, or below 0, which would turn
 * round what is the largest. */
#define FA_SM90_LEAST_SCALE 1e-6f

enum {
    FA_SM90_ALIGN = 32,         /* the first key of a piece is a multiple of it */
    FA_SM90_MOST_DEALERS = 160, /* blocks of a launch that deals pieces out */
    FA_SM90_MOST_DEALT = 64     /* of these pieces, so many a block */
};

/* Bytes of a row in shared memory: blocks of 128 bytes, over which the swizzle goes. */
#define FA_SM90_ROW_BYTES(dim, element) (((dim)*FA_ELEMENT_BYTES(element) + 127) / 128 * 128)

/* Bytes through which a consumer's results go out, 64 columns at a time, where there is room. */
#define FA_SM90_STAGING(dim, consumers) ((dim) <= 192 ? FA_SM90_QUERIES(consumers) * 128 : 0)

/* Work tiles that are described ahead, as many as there is room for: an even number; bytes of each, at most. */
#define FA_SM90_SLOTS(dim, dim_v) ((dim) > 192 ? 6 : (dim) > 128 && (dim_v) <= 128 ? 4 : 16)
#define FA_SM90_SLOT 192

/* Bytes of a consumer's tile of the bias, in 16 bits, for all consumers. */
#define FA_SM90_BIAS_BYTES(consumers, keys, options)                                               \
    ((options)&FA_SM90_BIAS ? FA_SM90_QUERIES(consumers) * (keys)*2 : 0)

/* Bytes of dynamic shared memory, with room to align to 1024: queries, keys and values, results, work tiles, bias. */
#define FA_SM90_SMEM(element, dim, dim_v, options, consumers, keys, stages, q_stages)              \
    ((q_stages)*FA_SM90_QUERIES(consumers) * FA_SM90_ROW_BYTES(dim, element) +                     \
     (stages) * (keys) * (FA_SM90_ROW_BYTES(dim, element) + FA_SM90_ROW_BYTES(dim_v, element)) +   \
     FA_SM90_STAGING(dim, consumers) + FA_SM90_SLOTS(dim, dim_v) * FA_SM90_SLOT +                  \
     FA_SM90_BIAS_BYTES(consumers, keys, options) + 1024)

/* A map of the copy engine with the axes (dim, row, head, block), that is the axes (3, 1, 2, 0) of
 * the caller's tensors; boxes of 64 columns. */
typedef struct fa_sm90_map {
#ifdef __cplusplus
    alignas(64)
#else
    _Alignas(64)
#endif
        uint64_t opaque[16];
} fa_sm90_map;

/* What an index of a head or a block is multiplied by to be the map's: 0 for an axis that is
 * broadcast. */
typedef struct fa_sm90_steps {
    int32_t head, block;
} fa_sm90_steps;

/* Counters of an image, from which blocks draw pieces: one for launches that follow each other. */
#define FA_SM90_COUNTERS 16384

/* How blocks go through pieces: one by one; or those of a head in pairs of equal length under a causal mask,
 * the first and the last, the second and the last but one ... */
enum { FA_SM90_IN_ORDER, FA_SM90_PAIRS };

/* The kernel's second parameter. */
typedef struct fa_sm90_params {
    fa_sm90_map q, k, v; /* boxes of 64 rows of q, of as many of k and v as are loaded at once */
    fa_sm90_steps q_step, k_step, v_step;
    int32_t box_rows; /* rows of v's boxes; paged: of k's, too, a divisor of the page's rows */
    int32_t order;    /* FA_SM90_IN_ORDER ... */
    int64_t tasks;    /* pieces, or pairs of them */
    fa_sm90_map bias; /* with the axes (key, query, head, batch), boxes of 64 x 64 */
    fa_sm90_steps bias_step;
    int32_t bias_mapped; /* 0: it is read by its strides, or there is none */
    int32_t mixed;       /* FA_SM90_PAIRS: last heads, no part of tasks (forward_sm90/pieces.cuh) */
    int32_t counter; /* from which blocks draw their pieces, FA_SM90_IN_ORDER; below 0: from none */
} fa_sm90_params;

#endif
