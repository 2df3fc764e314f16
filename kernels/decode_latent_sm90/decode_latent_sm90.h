/*
 * What the kernel of decode_latent_sm90 is told, and what follows from the numbers of a variant.
 * Shared by the kernel and the planner.
 *
 * Of kernels/variants.h:
 *   head_dim    of queries and keys, a multiple of 64
 *   value_dim   columns of the values, which are the first ones of the keys: 512
 *   group_rows  rows of a work tile: 64, as decode_sm80 has them
 *   keys        of a key tile: 64
 *   stages      for two blocks of 64 columns of a key tile each, a fourth of its values
 *   own_blocks  blocks of 64 columns of the queries that are in registers; the others are in shared
 *               memory
 */
#ifndef FA_KERNELS_DECODE_LATENT_SM90_DECODE_LATENT_SM90_H
#define FA_KERNELS_DECODE_LATENT_SM90_DECODE_LATENT_SM90_H

#include "../decode_sm80/decode_sm80.h"
#include "../forward_sm90/forward_sm90.h"

/* One warpgroup loads, one has the scores, two have half of the values' columns each. */
#define FA_DECODE_LATENT_SM90_THREADS (4 * 128)

/* Stages of key columns after those of the values. */
enum { FA_DECODE_LATENT_SM90_TAILS = 2 };

/* Bytes of 64 columns of 64 rows of queries or keys. */
enum { FA_DECODE_LATENT_SM90_BLOCK = 64 * 128 };

/* Bytes of a key tile's scores, as floats, and of four numbers for each of their rows. */
enum { FA_DECODE_LATENT_SM90_SCORES = 64 * 64 * 4, FA_DECODE_LATENT_SM90_ROWS = 64 * 16 };

/* Bytes of dynamic shared memory, with room to align to 1024. */
#define FA_DECODE_LATENT_SM90_SMEM(dim, own_blocks, stages)                                        \
    (FA_DECODE_LATENT_SM90_BLOCK *                                                                 \
         ((dim) / 64 - (own_blocks) + 2 * (stages) + FA_DECODE_LATENT_SM90_TAILS) +                \
     FA_DECODE_LATENT_SM90_SCORES + FA_DECODE_LATENT_SM90_ROWS + 1024)

/* The most work tiles of a launch that merges parts. */
enum { FA_DECODE_LATENT_SM90_COUNTERS = 256 };

/* The kernel's second parameter. Its first one is that of decode_sm80. With FA_DECODE_LAST and 64 rows
 * in a work tile, there are at most two parts, and results are stored in vectors. With another step,
 * parts are merged by a second launch, in which several blocks share a work tile's rows. */
typedef struct fa_decode_latent_sm90_params {
    fa_sm90_map q, k;             /* boxes of the rows of a work tile; of box_rows rows */
    fa_sm90_steps q_step, k_step; /* factors of their indices; q_step.head is that of rows */
    int32_t maps_queries;         /* 0: there is no map of q */
    int32_t box_rows;             /* 64, or a divisor of it and of a page's rows: 32, 16 or 8 */
    int32_t merged_rows;          /* of a block that merges */
    int32_t cluster;              /* blocks that load key tiles for each other: 2, or 1 */
    fa_decode_divisors divisors;
} fa_decode_latent_sm90_params;

#endif
