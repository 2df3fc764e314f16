/*
 * The parameters of decode_sm80, and sizes that follow from the numbers of a variant. The kernel
 * and the planner share them.
 *
 * Numbers of kernels/variants.h:
 *   group_rows  rows of a work tile, a multiple of 16: every query head of a group of the same
 *               key/value head, for as many queries as there is room for
 *   warps       of a block; each has its own key tiles
 *   keys        of a warp's key tile: a multiple of 16
 *   stages      key tiles of a warp in shared memory
 *   blocks      of a multiprocessor, at least, which limits the registers
 *   options     FA_DECODE_BY_ROWS: also ALiBi, a bias and a mask
 *   value_dim   only for latent attention, whose values are the first columns of the keys. All
 *               warps of a block share its key tiles and stages
 *   cache       the type of keys and values, if it has 8 bits. Then products are of float16
 *               (element), and queries have either 16-bit type
 */
#ifndef FA_KERNELS_DECODE_SM80_DECODE_SM80_H
#define FA_KERNELS_DECODE_SM80_DECODE_SM80_H

#include "../common/divide.h"
#include "../common/element.h"
#include "../common/params.h"

/* Where the parts of a sequence's keys are merged. */
enum {
    FA_DECODE_LAST = 0,  /* by the last block of a work tile, found by a counter */
    FA_DECODE_STORE = 1, /* by a second launch: this one stores the parts, */
    FA_DECODE_MERGE = 2  /* and this is the second one, which only merges them */
};

/* The kernel's parameter. */
typedef struct fa_decode_params {
    fa_attention_params attention; /* tasks: work tiles */
    int32_t heads, queries; /* of a work tile: query heads of a group, queries of a sequence */
    int32_t chunks;         /* work tiles that share the query heads of a group */
    /* So many work tiles are not cut: block b < whole has number b. Of the others, block whole + b has part
     * b / (tasks - whole) of number whole + b % (tasks - whole). */
    int32_t whole;
    int32_t parts; /* of the others: the largest number of parts of a sequence's keys */
    int32_t least; /* the smallest number of key tiles of a block in a part */
    /* The most queries of a packed sequence. Another launch computes longer ones, and this launch
     * does not write their rows. Work tiles are numbered by sequence. 0: work tiles are numbered
     * among all rows (common/packed.h). */
    int32_t most_queries;
    int32_t step;     /* FA_DECODE_... */
    int32_t counters; /* FA_DECODE_LAST: the set of counters; below 0: there is none */
    float *sums;      /* the parts' results, if there can be several */
} fa_decode_params;

/* For decode_sm90: reciprocals of the numbers by which a block's number is divided. */
typedef struct fa_decode_divisors {
    fa_reciprocal tasks, tiles, units, chunks, parts; /* tasks: those that are cut */
    int32_t units_of_batch;                           /* key/value heads times chunks */
    int32_t group;                                    /* query heads of a key/value head */
    fa_reciprocal page_rows;                          /* rows of a page; 1: there are no pages */
} fa_decode_divisors;

/* most_queries of a launch that has all sequences, and also the rows before the first and after the
 * last sequence. For decode_sm90. */
#define FA_DECODE_ALL_QUERIES INT32_MAX

#define FA_DECODE_BY_ROWS 1

/* The largest number of parts. A warp merges four for each lane. */
#define FA_DECODE_PARTS 128

/* The sets of counters of a kernel, for launches that may run at the same time; and the counters of
 * a set, one for each work tile of a launch that can be counted. */
#define FA_DECODE_COUNTER_SETS 2048
#define FA_DECODE_COUNTERS 512

#define FA_DECODE_THREADS(warps) (32 * (warps))

/* Bytes from one row to the next in shared memory, as in forward_sm80. */
#define FA_DECODE_PITCH(dim, element) (FA_ELEMENT_BYTES(element) * (dim) + 16)

/* With keys and values of 8 bits: bytes of a key tile, whose elements are followed by a scale for
 * each key; and of the queries, which are followed by a factor for each row. */
#define FA_DECODE_TILE_8BIT(dim, keys) ((keys) * ((dim) + 4))
#define FA_DECODE_QUERIES_8BIT(dim, rows) ((rows) * (2 * (dim) + 4))

/* With latent attention: bytes of the warps' exchange area, which has the weights of a key tile and
 * each warp's maxima; and of all dynamic shared memory. */
#define FA_DECODE_EXCHANGE(rows, keys, warps) (2 * (rows) * (keys) + 4 * (rows) * (warps))
#define FA_DECODE_SMEM_LATENT(element, dim, rows, warps, keys, stages)                             \
    (FA_DECODE_EXCHANGE(rows, keys, warps) + (stages) * (keys)*FA_DECODE_PITCH(dim, element))

/* Floats of a row's sums, of a part in the workspace or of a warp in shared memory. The columns are
 * followed by the base of the weights, as an exponent of 2, and the sum of the weights. */
#define FA_DECODE_ROW(dim) ((dim) + 4)

/* Bytes of dynamic shared memory: queries; for each warp and stage a tile of keys and one of
 * values. */
#define FA_DECODE_SMEM(element, dim, rows, warps, keys, stages)                                    \
    (FA_DECODE_PITCH(dim, element) * ((rows) + 2 * (warps) * (stages) * (keys)))

#define FA_DECODE_SMEM_8BIT(dim, rows, warps, keys, stages)                                        \
    (FA_DECODE_QUERIES_8BIT(dim, rows) + 2 * (warps) * (stages)*FA_DECODE_TILE_8BIT(dim, keys))

#endif
