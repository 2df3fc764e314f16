/*
 * Parameters of the kernels of backward_sm80, and sizes that follow from the numbers of a variant.
 * The kernels and the planner share them.
 *
 * There are three or four launches. `prepare` writes each query's log-sum-exp and delta, zeros to
 * the sums of the gradients of queries, and in float32 the parts of queries and dout;
 * `backward_sm80` computes all gradients; `finish` rounds those of the queries. In float32 the sums
 * may be in the caller's dq, and then there is no `finish`. If there are too few key tiles to keep
 * the multiprocessors busy, several blocks share one: each takes some of the query heads, and
 * `finish_keys` adds up their sums of the gradients of keys and values, in one order. The workspace
 * consists of tiles of FA_BACKWARD_SM80_TILE rows; the last tile of a sequence is padded. Tile i of
 * a sequence has the number that common/packed.h computes, or i; the tiles of a head are
 * contiguous, and the next head's tiles follow.
 *
 *   sums        of a tile: a float for each query and column, in the order of the accumulators
 *               (sums.cuh)
 *   rows        of a tile: for each query the log-sum-exp in units of log 2 (infinity if weights
 *               must be 0), and delta. Weights are computed 2^FA_BACKWARD_SM80_WEIGHT_BITS times as
 *               large. So these bits are subtracted from the log-sum-exp, and delta is multiplied
 *               by 2^-bits
 *   factors     of a tile, if a launch after `prepare` computes them: the factors of each query's
 *               weights (weight_sums.cu)
 *   norms       of a tile, behind all tiles' factors: of its longest query and of the longest of its
 *               share of the keys, if an option changes scores (norms.cuh)
 *   parts       of a tile, in float32: queries and dout as float16 parts, rows of the variant's
 *               head dim times 4 bytes (high_low.cuh); powers: the powers of two of each query's
 *               parts
 *   key_sums    of a split and a block's keys: rows of the variant's head dim in floats, of dK,
 *               then of dV
 *   semaphores  of a tile, if sums have one order: how many blocks have added, for each warp of
 *               each of the tile's parts
 *
 * Numbers of kernels/variants.h:
 *   keys        of a block
 *   queries     of a tile: FA_BACKWARD_SM80_TILE, or half of it
 *   warps       of a block
 *   group_rows  keys of a warp, or of the warps that share them: 16 or 32
 *   stages      buffers of queries and of dout: 1 or 2
 *   slices      of the head dim, if warps share the products of scores; 0: each warp has its own
 *               scores
 *   blocks      of a multiprocessor, at least, which limits the registers
 */
#ifndef FA_KERNELS_BACKWARD_SM80_BACKWARD_SM80_H
#define FA_KERNELS_BACKWARD_SM80_BACKWARD_SM80_H

#include "../backward_simt/backward_simt.h"
#include "../common/element.h"
#include "../common/key_work.h"

#define FA_BACKWARD_SM80_TILE 64          /* rows of a tile of the workspace */
#define FA_BACKWARD_SM80_PASS_THREADS 256 /* of a block of prepare and finish */

#define FA_BACKWARD_SM80_SUM_BYTES(dim) (FA_BACKWARD_SM80_TILE * (dim)*4)
#define FA_BACKWARD_SM80_ROW_BYTES (FA_BACKWARD_SM80_TILE * 8)
#define FA_BACKWARD_SM80_FACTOR_BYTES (FA_BACKWARD_SM80_TILE * 4)
#define FA_BACKWARD_SM80_NORM_BYTES 8

/* Semaphores of a tile, 4 bytes each: one for each warp of each part of it. */
#define FA_BACKWARD_SM80_SEMAPHORES(element, dim)                                                  \
    (FA_ELEMENT_BYTES(element) == 4 && (dim) > 256 ? 32 : 16)

/* Blocks of finish_keys for the keys of a block of the kernel. */
#define FA_BACKWARD_SM80_KEY_SLICES 8

#define FA_BACKWARD_SM80_THREADS(warps) (32 * (warps))

/* Weights are computed 2 to this power times as large, so that small ones keep their bits in
 * float16, which ends at 2^16 and becomes less exact below 2^-14. */
#define FA_BACKWARD_SM80_WEIGHT_BITS(element) ((element) == FA_ELEMENT_FLOAT16 ? 10 : 0)

/* In float32, scores and dP are computed 2 to minus this power times as large (split.cuh). */
#define FA_BACKWARD_SM80_SCORE_BITS 11

/* The number of warps that share keys. Each has a share of the queries and of the columns. */
#define FA_BACKWARD_SM80_SPLIT(keys, warps, group_rows) ((warps) / ((keys) / (group_rows)))

/* Bytes from one row to the next, in whole groups of banks. */
#define FA_BACKWARD_SM80_PITCH(element, dim) ((FA_ELEMENT_BYTES(element) * (dim) + 127) / 128 * 128)

/* Buffers of dS. In float32 there are as many as stages: with one, the next tile's copies are in
 * progress while dQ is computed from it. */
#define FA_BACKWARD_SM80_DS_BUFFERS(element, stages) (FA_ELEMENT_BYTES(element) == 4 ? (stages) : 2)

/* Bytes of a stage's factors, in whole groups of banks. Only kernels of three products have
 * them. */
#define FA_BACKWARD_SM80_FACTORS(element, queries)                                                 \
    ((element) == FA_ELEMENT_TF32X3 ? ((queries)*4 + 127) / 128 * 128 : 0)

/* Bytes from one row of weights or dS to the next: at least those of 32 queries, because the
 * permutation of units needs them. */
#define FA_BACKWARD_SM80_SCORE_PITCH(element, queries)                                             \
    (FA_ELEMENT_BYTES(element) * ((queries) > 32 ? (queries) : 32))

/* Bytes of the parts of scores and of dP from slices of the head dim. */
#define FA_BACKWARD_SM80_SLICES(keys, queries, slices) (2 * (slices) * (keys) * (queries)*4)

/* Whether operands are float16 parts; and whether a warp computes whole scores of its own from them
 * (own_parts.cuh). */
#define FA_BACKWARD_SM80_HAS_PARTS(element) (FA_ELEMENT_BYTES(element) == 4)
#define FA_BACKWARD_SM80_HAS_OWN_PARTS(element, slices)                                            \
    (FA_BACKWARD_SM80_HAS_PARTS(element) && (slices) == 0)

/* One product has no low parts. So rows of queries, dout and dS have room for two tiles, and the
 * second stage needs no memory. */
#define FA_BACKWARD_SM80_TAKES_TURNS(element) ((element) == FA_ELEMENT_TF32)
#define FA_BACKWARD_SM80_ROOM(element, buffers)                                                    \
    (FA_BACKWARD_SM80_TAKES_TURNS(element) ? 1 : (buffers))

/* If warps also share the products of scores, a tile of queries and its dout take one area, each half of its rows. The next
 * tile's are in the halves of keys and values that would hold their low parts. With twice as many keys as queries these have
 * room for both tiles. */
#define FA_BACKWARD_SM80_BESIDE_KEYS(element, slices)                                              \
    (FA_BACKWARD_SM80_TAKES_TURNS(element) && (slices) > 0)
#define FA_BACKWARD_SM80_BOTH_BESIDE_KEYS(element, keys, queries, slices)                          \
    (FA_BACKWARD_SM80_BESIDE_KEYS(element, slices) && (keys) >= 2 * (queries))
#define FA_BACKWARD_SM80_Q_AREAS(element, keys, queries, stages, slices)                           \
    (FA_BACKWARD_SM80_BOTH_BESIDE_KEYS(element, keys, queries, slices) ? 0                         \
     : FA_BACKWARD_SM80_BESIDE_KEYS(element, slices)                   ? 1                         \
                                                     : 2 * FA_BACKWARD_SM80_ROOM(element, stages))

/* Bytes of dS; if warps share keys, also of weights, and of dS for dK if it differs from dS for dQ.
 * With wide heads these replace the parts of scores and of dP. */
#define FA_BACKWARD_SM80_SCORES(element, keys, queries, warps, group_rows, stages, slices)         \
    ((slices) > 0                                                                                  \
         ? FA_BACKWARD_SM80_SLICES(keys, queries, slices)                                          \
         : (FA_BACKWARD_SM80_ROOM(element, FA_BACKWARD_SM80_DS_BUFFERS(element, stages)) +         \
            (FA_BACKWARD_SM80_SPLIT(keys, warps, group_rows) == 1 ? 0                              \
             : FA_BACKWARD_SM80_HAS_OWN_PARTS(element, slices)    ? 2                              \
                                                                  : 1)) *                             \
               (keys)*FA_BACKWARD_SM80_SCORE_PITCH(element, queries))

/* With float16 parts, bytes of the powers of two of each key and value, and of each query of a
 * stage and its dout. For wide heads, also the numbers from which the powers of weights and dS
 * follow: for each key the largest numbers of its tiles of 8 queries, for each query those of each
 * half of the keys, and a factor for each row of a gradient. */
#define FA_BACKWARD_SM80_POWERS(element, keys, queries, stages)                                    \
    (FA_BACKWARD_SM80_HAS_PARTS(element) ? ((keys) + (stages) * (queries)) * 8 : 0)
#define FA_BACKWARD_SM80_LARGEST(keys, queries, slices)                                            \
    ((slices) > 0 ? (keys) * ((queries) / 8) * 8 + (queries)*8 + (2 * (keys) + (queries)) * 4 : 0)

/* Bytes of the factors if a warp has its own parts: of dS for dQ, one for each query and group of
 * warps; if warps share keys, of weights and of dS, one for each key and 16 queries. */
#define FA_BACKWARD_SM80_OWN_FACTORS(element, keys, queries, warps, group_rows, stages, slices)    \
    (!FA_BACKWARD_SM80_HAS_OWN_PARTS(element, slices)                                              \
         ? 0                                                                                       \
         : FA_BACKWARD_SM80_DS_BUFFERS(element, stages) * ((keys) / (group_rows)) * (queries)*4 +  \
               (FA_BACKWARD_SM80_SPLIT(keys, warps, group_rows) > 1 ? (queries) / 16 * (keys)*8    \
                                                                    : 0))

/* Bytes of dynamic shared memory, with room to align to 128: keys and values; stages of queries, of
 * dout and of their rows and factors; dS, weights and parts of scores; powers of two and the
 * numbers from which they follow. */
#define FA_BACKWARD_SM80_SMEM(element, dim, keys, queries, warps, group_rows, stages, slices)      \
    ((2 * (keys) + FA_BACKWARD_SM80_Q_AREAS(element, keys, queries, stages, slices) * (queries)) * \
         FA_BACKWARD_SM80_PITCH(element, dim) +                                                    \
     (stages) * ((queries)*8 + FA_BACKWARD_SM80_FACTORS(element, queries)) +                       \
     FA_BACKWARD_SM80_SCORES(element, keys, queries, warps, group_rows, stages, slices) +          \
     FA_BACKWARD_SM80_POWERS(element, keys, queries, stages) +                                     \
     FA_BACKWARD_SM80_LARGEST(keys, queries, slices) +                                             \
     FA_BACKWARD_SM80_OWN_FACTORS(element, keys, queries, warps, group_rows, stages, slices) +     \
     128)

/* The same for weight_sums: two key tiles; a tile of queries and their rows; for each group of
 * warps, a sum for each query and its rounding error; powers of two. */
#define FA_BACKWARD_SM80_WEIGHT_SUMS_SMEM(element, dim, keys, queries, group_rows)                 \
    ((2 * (keys) + (queries)) * FA_BACKWARD_SM80_PITCH(element, dim) + (queries)*8 +               \
     (keys) / (group_rows) * (queries)*8 + FA_BACKWARD_SM80_POWERS(element, keys, queries, 1) +    \
     128)

/* Bytes of the float16 parts of queries or of dout, for a tile of the workspace, and of its
 * powers. */
#define FA_BACKWARD_SM80_PART_BYTES(dim) (FA_BACKWARD_SM80_TILE * (dim)*4)
#define FA_BACKWARD_SM80_POWER_BYTES (FA_BACKWARD_SM80_TILE * 8)

/* The factors that turn the parts of a query, and of its dout, into numbers again, times SPLIT_UNIT
 * (split.cuh). */
typedef struct fa_backward_sm80_powers {
    float query_inverse, dout_inverse;
} fa_backward_sm80_powers;

/* The number of floats that a block writes for its keys. */
#define FA_BACKWARD_SM80_KEY_SUMS(keys, dim) (2 * (keys) * (dim))

/* Every option that changes scores or weights may be present. 0: none of them. */
#define FA_BACKWARD_SM80_ALL 1
/* A float32 bias, and none of the others. */
#define FA_BACKWARD_SM80_BIAS 2

/* The second parameter of all of these kernels. */
typedef struct fa_backward_sm80_params {
    int64_t q_tiles; /* tiles of the workspace for a head */
    float *sums;     /* NULL, only in float32: the sums are the caller's rows of dq */
    float *rows;
    float *factors; /* NULL: all factors are 1 */
    char *parts;    /* of a tile's queries, then of its dout; NULL in 16 bits */
    fa_backward_sm80_powers *powers;
    int32_t *semaphores; /* NULL: sums are added in any order */
    /* Key/value heads of the batch whose blocks take turns; 1: one head after the other. */
    int64_t heads_together;
    int64_t low_parts; /* whether low parts are read */
    /* Blocks that share the keys of a key/value head, each with some of the query heads; keys of a
     * block, and columns of its sums. */
    int32_t splits, keys, head_dim;
    /* Blocks of a head's keys that share its queries; splits is a multiple of it. */
    int32_t query_parts;
    float *key_sums; /* NULL: there is one split */
    float ds_unit;   /* the factor of dP in dS, in float32 */
    fa_key_divisors divisors;
    fa_uniform_lengths uniform;
} fa_backward_sm80_params;

#endif
