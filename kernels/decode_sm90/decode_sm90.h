/*
 * The parameters of decode_sm90, and sizes that follow from the numbers of a variant. Shared by the
 * kernel and the planner.
 *
 * Numbers of kernels/variants.h:
 *   head_dim    64, 128 or 256: of keys and values
 *   group_rows  rows of a work tile, as in decode_sm80: 8 or 32; with 8-bit caches 8 or 16
 *   keys        keys of a key tile: 64, or 128 with a head dim of 64; with 8-bit caches 128
 *   stages      stages of the pipeline that fit with the most blocks on a multiprocessor; the planner may
 *               use more or fewer
 *   blocks      the most blocks of a multiprocessor, which limits the registers
 *   copied      1: four warps copy keys and values by cp.async, row by row, from pages of any size (copy.cuh);
 *               otherwise a warp loads them by TMA
 *   groups      only of decode_sm90_persistent: warpgroups of a block that have a part each
 *   cache       the type of keys and values, if it has 8 bits, as in decode_sm80
 */
#ifndef FA_KERNELS_DECODE_SM90_DECODE_SM90_H
#define FA_KERNELS_DECODE_SM90_DECODE_SM90_H

#include "../decode_sm80/decode_sm80.h"
#include "../forward_sm90/forward_sm90.h"

/* A warpgroup computes, and the warp after it loads, or the four warps after it. copied: of the variant. */
#define FA_DECODE_SM90_THREADS(copied) (128 + ((copied) ? 128 : 32))

/* Bytes of a stage: two blocks of 64 rows of 64 columns, of keys or of values. */
#define FA_DECODE_SM90_STAGE (2 * 64 * 128)

/* Bytes of the scales of a stage's keys, with 8-bit caches. */
#define FA_DECODE_SM90_SCALES (4 * 128)

/* All bytes of a stage. cache: of the variant. */
#define FA_DECODE_SM90_STAGE_ROOM(cache)                                                           \
    (FA_DECODE_SM90_STAGE + ((cache) ? FA_DECODE_SM90_SCALES : 0))

/* The largest number of stages of a block. */
#define FA_DECODE_SM90_STAGES 12

/* Bytes of the exchange area of warps: for each row, a number of each of four warps and four more numbers. */
#define FA_DECODE_SM90_EXCHANGE(rows) (8 * 4 * (rows))

/* Bytes of dynamic shared memory: queries, two buffers of weights, the exchange area, stages; and room
 * to align to 1024. */
#define FA_DECODE_SM90_SMEM(dim, rows, keys, stages)                                               \
    (2 * (rows) * (dim) + 2 * 2 * (rows) * (keys) + FA_DECODE_SM90_EXCHANGE(rows) +                \
     (stages)*FA_DECODE_SM90_STAGE + 1024)

/* The same for 8-bit caches: queries, stages and scales. */
#define FA_DECODE_SM90_SMEM_8BIT(dim, stages)                                                      \
    (FA_DECODE_QUERIES_8BIT(dim, 16) + (stages)*FA_DECODE_SM90_STAGE_ROOM(1) + 1024)

/* ---- decode_sm90_persistent ------------------------------------------------------------------- */

/* Each group of a block has a warpgroup that computes and a warp that loads. */
#define FA_DECODE_SM90_PERSISTENT_THREADS(groups) ((groups)*FA_DECODE_SM90_THREADS(0))

/* The largest size in bytes of a group's barriers and descriptions of parts. */
#define FA_DECODE_SM90_STATE 832

/* Bytes of a group: those of a block above, then a part's sums and the state. The sums need their own
 * memory because the stages already receive the next part's keys. A multiple of 1024. */
#define FA_DECODE_SM90_GROUP(dim, rows, keys, stages)                                              \
    ((2 * (rows) * (dim) + 2 * 2 * (rows) * (keys) + FA_DECODE_SM90_EXCHANGE(rows) +               \
      4 * (rows)*FA_DECODE_ROW(dim) + FA_DECODE_SM90_STATE + 1023) /                               \
         1024 * 1024 +                                                                             \
     (stages)*FA_DECODE_SM90_STAGE)

/* Bytes of dynamic shared memory, with room to align to 1024. */
#define FA_DECODE_SM90_SMEM_PERSISTENT(dim, rows, keys, stages, groups)                            \
    ((groups)*FA_DECODE_SM90_GROUP(dim, rows, keys, stages) + 1024)

/* The number of sets of counters, and of counters in a set: as in decode_sm80, with larger sets because
 * there are more work tiles here. */
#define FA_DECODE_SM90_COUNTERS 2048
#define FA_DECODE_SM90_COUNTER_SETS                                                                \
    (FA_DECODE_COUNTER_SETS * FA_DECODE_COUNTERS / FA_DECODE_SM90_COUNTERS)

/* What all work tiles have in common, if the host knows all lengths and a work tile has all queries of its sequence: as in fa_work.
 * tiles: 0 if they differ; parts, per_part: of those that are cut. */
typedef struct fa_decode_common {
    int32_t from, to, all_from, all_to, start, tiles, parts, per_part;
} fa_decode_common;

/* The kernel's second parameter. Its first one is that of decode_sm80. */
typedef struct fa_decode_sm90_params {
    fa_sm90_map k, v;             /* boxes of box_rows rows */
    fa_sm90_steps k_step, v_step; /* factors of their indices */
    int32_t box_rows;             /* a key tile's, or a divisor of them and of a page's */
    int32_t box_shift;            /* box_rows is 2 to that power */
    int32_t stages;               /* that are used; there may be shared memory for more */
    fa_decode_divisors divisors;
    fa_decode_common common;
    int32_t alone; /* the next grid does not start before this one's blocks end */
} fa_decode_sm90_params;

#endif
