/*
 * What the kernels of backward_sm80 are told, and what follows from the numbers of a variant. Shared by the kernels and the
 * planner.
 *
 * Three launches, or four. `prepare` writes a query's log-sum-exp and delta, and zeros where the gradients of queries are to be
 * summed, and in float32 the parts of queries and dout; `backward_sm80` computes all gradients; `finish` rounds those of the queries. In float32 the sums may be in the
 * caller's dq, and `finish` is not there. Where few key tiles keep few multiprocessors busy, several blocks share one: each takes
 * some of the query heads, and `finish_keys` adds up what they leave of the gradients of keys and values, in one order. The workspace is made of tiles of FA_BACKWARD_SM80_TILE rows, the last one of a sequence padded. Tile i of a sequence has the number that
 * common/packed.h gives it, or i; the tiles of a head follow each other, then those of the next head.
 *
 *   sums   of a tile: a float for each query and column, in the order of the accumulators that hold them (sums.cuh)
 *   rows   of a tile: for each query the log-sum-exp in units of log 2 (infinity where weights are to be 0), and delta, both as
 *          weights that are larger than they should be want them: less FA_BACKWARD_SM80_WEIGHT_BITS, times 2^-bits
 *   factors   of a tile, where a launch behind `prepare` finds them: what the weights of each query are multiplied by
 *             (weight_sums.cu)
 *   parts   of a tile, in float32: queries and dout as float16 parts, rows of the variant's head dim times 4 bytes
 *           (high_low.cuh); powers: of each query the powers of two of these
 *   key_sums   of a split, and of a block's keys: rows of the variant's head dim in floats, of dK, then of dV
 *   semaphores   of a tile, where sums have one order: how many blocks have added, for each warp of each of its parts
 *
 * Of kernels/variants.h:
 *   keys        of a block
 *   queries     of a tile: FA_BACKWARD_SM80_TILE, or half of it
 *   warps       of a block
 *   group_rows  keys of a warp, or of the warps that share them: 16 or 32
 *   stages      buffers of queries and of dout: 1 or 2
 *   slices      of the head dim, whose products of scores warps share; 0: each warp has scores of its own
 *   blocks      of a multiprocessor, at least, which bounds the registers
 */
#ifndef FA_KERNELS_BACKWARD_SM80_BACKWARD_SM80_H
#define FA_KERNELS_BACKWARD_SM80_BACKWARD_SM80_H

#include "../backward_simt/backward_simt.h"
#include "../common/element.h"

#define FA_BACKWARD_SM80_TILE 64          /* rows of a tile of the workspace */
#define FA_BACKWARD_SM80_PASS_THREADS 256 /* of a block of prepare and finish */

#define FA_BACKWARD_SM80_SUM_BYTES(dim) (FA_BACKWARD_SM80_TILE * (dim)*4)
#define FA_BACKWARD_SM80_ROW_BYTES (FA_BACKWARD_SM80_TILE * 8)
#define FA_BACKWARD_SM80_FACTOR_BYTES (FA_BACKWARD_SM80_TILE * 4)

/* Semaphores of a tile, 4 bytes each: one for each warp of each part of it. */
#define FA_BACKWARD_SM80_SEMAPHORES(element, dim)                                                  \
    (FA_ELEMENT_BYTES(element) == 4 && (dim) > 256 ? 32 : 16)

#define FA_BACKWARD_SM80_THREADS(warps) (32 * (warps))

/* Weights are computed 2 to this power times as large, so that small ones keep their bits in float16, whose numbers end at 2^16
 * and become less exact below 2^-14. */
#define FA_BACKWARD_SM80_WEIGHT_BITS(element) ((element) == FA_ELEMENT_FLOAT16 ? 10 : 0)

/* In float32 scores and dP are 2 to minus this power times what they are (split.cuh). */
#define FA_BACKWARD_SM80_SCORE_BITS 11

/* Warps that share keys: they have shares of the queries and of the columns. */
#define FA_BACKWARD_SM80_SPLIT(keys, warps, group_rows) ((warps) / ((keys) / (group_rows)))

/* Bytes from one row to the next, in whole groups of banks. */
#define FA_BACKWARD_SM80_PITCH(element, dim) ((FA_ELEMENT_BYTES(element) * (dim) + 127) / 128 * 128)

/* Buffers of dS. In float32 as many as stages: with one the next tile's copies are under way while
 * dQ is made of it. */
#define FA_BACKWARD_SM80_DS_BUFFERS(element, stages) (FA_ELEMENT_BYTES(element) == 4 ? (stages) : 2)

/* Bytes of a stage's factors, in whole groups of banks. Kernels of three products have them. */
#define FA_BACKWARD_SM80_FACTORS(element, queries)                                                 \
    ((element) == FA_ELEMENT_TF32X3 ? ((queries)*4 + 127) / 128 * 128 : 0)

/* Bytes from one row of weights or dS to the next: those of 32 queries at least, as the permutation of their units wants them. */
#define FA_BACKWARD_SM80_SCORE_PITCH(element, queries)                                             \
    (FA_ELEMENT_BYTES(element) * ((queries) > 32 ? (queries) : 32))

/* Bytes of the parts of scores and of dP that slices of the head dim have. */
#define FA_BACKWARD_SM80_SLICES(keys, queries, slices) (2 * (slices) * (keys) * (queries)*4)

/* Whether operands are float16 parts; and whether a warp has scores of its own of these (own_parts.cuh). */
#define FA_BACKWARD_SM80_HAS_PARTS(element) (FA_ELEMENT_BYTES(element) == 4)
#define FA_BACKWARD_SM80_HAS_OWN_PARTS(element, slices)                                            \
    (FA_BACKWARD_SM80_HAS_PARTS(element) && (slices) == 0)

/* One product has no low parts. So rows of queries, dout and dS have room for two tiles, and the second stage takes none. */
#define FA_BACKWARD_SM80_TAKES_TURNS(element) ((element) == FA_ELEMENT_TF32)
#define FA_BACKWARD_SM80_ROOM(element, buffers)                                                    \
    (FA_BACKWARD_SM80_TAKES_TURNS(element) ? 1 : (buffers))

/* Bytes of dS and, where warps share keys, of weights, and of dS for dK where it differs from dQ's. Those of wide heads lie where
 * the parts of scores and of dP were. */
#define FA_BACKWARD_SM80_SCORES(element, keys, queries, warps, group_rows, stages, slices)         \
    ((slices) > 0                                                                                  \
         ? FA_BACKWARD_SM80_SLICES(keys, queries, slices)                                          \
         : (FA_BACKWARD_SM80_ROOM(element, FA_BACKWARD_SM80_DS_BUFFERS(element, stages)) +         \
            (FA_BACKWARD_SM80_SPLIT(keys, warps, group_rows) == 1 ? 0                              \
             : FA_BACKWARD_SM80_HAS_OWN_PARTS(element, slices)    ? 2                              \
                                                                  : 1)) *                             \
               (keys)*FA_BACKWARD_SM80_SCORE_PITCH(element, queries))

/* Of float16 parts, bytes of the powers of two of each key and value, and of each query of a stage and its dout. Wide heads also have there
 * what the powers of weights and dS follow from: the largest numbers of tiles of 16 keys and 8 queries,
 * and a factor for each row of a gradient. */
#define FA_BACKWARD_SM80_POWERS(element, keys, queries, stages)                                    \
    (FA_BACKWARD_SM80_HAS_PARTS(element) ? ((keys) + (stages) * (queries)) * 8 : 0)
#define FA_BACKWARD_SM80_LARGEST(keys, queries, slices)                                            \
    ((slices) > 0 ? (keys) * ((queries) / 8) * 8 + (queries) * ((keys) / 16) * 4 +                 \
                        (2 * (keys) + (queries)) * 4                                               \
                  : 0)

/* Bytes of the factors of a warp's own parts: of dS for dQ, of each query for each group of warps; where warps share keys,
 * of weights and of dS: of each key for 16 queries. */
#define FA_BACKWARD_SM80_OWN_FACTORS(element, keys, queries, warps, group_rows, stages, slices)    \
    (!FA_BACKWARD_SM80_HAS_OWN_PARTS(element, slices)                                              \
         ? 0                                                                                       \
         : FA_BACKWARD_SM80_DS_BUFFERS(element, stages) * ((keys) / (group_rows)) * (queries)*4 +  \
               (FA_BACKWARD_SM80_SPLIT(keys, warps, group_rows) > 1 ? (queries) / 16 * (keys)*8    \
                                                                    : 0))

/* Bytes of dynamic shared memory, with room to align to 128: keys and values; stages of queries, of dout and of their rows
 * and factors; dS, weights and parts of scores; powers of two and what they follow from. */
#define FA_BACKWARD_SM80_SMEM(element, dim, keys, queries, warps, group_rows, stages, slices)      \
    ((2 * (keys) + 2 * FA_BACKWARD_SM80_ROOM(element, stages) * (queries)) *                       \
         FA_BACKWARD_SM80_PITCH(element, dim) +                                                    \
     (stages) * ((queries)*8 + FA_BACKWARD_SM80_FACTORS(element, queries)) +                       \
     FA_BACKWARD_SM80_SCORES(element, keys, queries, warps, group_rows, stages, slices) +          \
     FA_BACKWARD_SM80_POWERS(element, keys, queries, stages) +                                     \
     FA_BACKWARD_SM80_LARGEST(keys, queries, slices) +                                             \
     FA_BACKWARD_SM80_OWN_FACTORS(element, keys, queries, warps, group_rows, stages, slices) +     \
     128)

/* The same for weight_sums: two key tiles; a tile of queries and their rows; of each group of warps
 * a sum for each query, and what rounding has taken from it; powers of two. */
#define FA_BACKWARD_SM80_WEIGHT_SUMS_SMEM(element, dim, keys, queries, group_rows)                 \
    ((2 * (keys) + (queries)) * FA_BACKWARD_SM80_PITCH(element, dim) + (queries)*8 +               \
     (keys) / (group_rows) * (queries)*8 + FA_BACKWARD_SM80_POWERS(element, keys, queries, 1) +    \
     128)

/* Bytes of the float16 parts of queries or of dout, of a tile of the workspace, and of its powers. */
#define FA_BACKWARD_SM80_PART_BYTES(dim) (FA_BACKWARD_SM80_TILE * (dim)*4)
#define FA_BACKWARD_SM80_POWER_BYTES (FA_BACKWARD_SM80_TILE * 8)

/* What the parts of a query, and of its dout, are multiplied by to be numbers again, times SPLIT_UNIT
 * (split.cuh). */
typedef struct fa_backward_sm80_powers {
    float query_inverse, dout_inverse;
} fa_backward_sm80_powers;

/* Floats that a block leaves of its keys. */
#define FA_BACKWARD_SM80_KEY_SUMS(keys, dim) (2 * (keys) * (dim))

/* Every option that changes scores or weights may be there. 0: none of them. */
#define FA_BACKWARD_SM80_ALL 1

/* The second parameter of all of them. */
typedef struct fa_backward_sm80_params {
    int64_t q_tiles; /* of the workspace, of a head */
    float *sums;     /* NULL, of float32 alone: the caller's rows of dq are the sums */
    float *rows;
    float *factors; /* NULL: all are 1 */
    char *parts;    /* of a tile's queries, then of its dout; NULL in 16 bits */
    fa_backward_sm80_powers *powers;
    int32_t *semaphores; /* NULL: sums are added in any order */
    /* Key/value heads of the batch whose blocks take turns; 1: head follows head. */
    int64_t heads_together;
    int64_t low_parts; /* whether low parts are read */
    /* Blocks that share the keys of a key/value head, each with some of the query heads; keys of a
     * block, and columns of its sums. */
    int32_t splits, keys, head_dim;
    float *key_sums; /* NULL: there is one split */
    float ds_unit;   /* what dP is multiplied by in dS, in float32 */
} fa_backward_sm80_params;

#endif
