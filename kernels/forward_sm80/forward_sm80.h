/*
 * Sizes that follow from the numbers of a variant of forward_sm80. The kernel and the planner share
 * them.
 *
 * Numbers of kernels/variants.h:
 *   warps       of a block
 *   split       warps that share rows: each computes the scores of its share of a tile's keys, and
 *               its share of the output's columns, whose accumulator fits into its registers
 *   group_rows  of a warp, or of the warps that share them: a multiple of 16
 *   keys        a multiple of 32
 *   stages      1: values are loaded while their keys are used, and the next keys while these
 *               values are used
 *   blocks      of a multiprocessor, at least, which limits the registers
 *   ahead       tasks are described this many at a time, at most twice as many ahead
 */
#ifndef FA_KERNELS_FORWARD_SM80_FORWARD_SM80_H
#define FA_KERNELS_FORWARD_SM80_FORWARD_SM80_H

#include "../common/element.h"
#include "../common/params.h"

/* The kernel's parameter. */
typedef struct fa_sm80_params {
    fa_attention_params attention;
    /* Tasks under a causal mask, for all batch items (common/causal_schedule.h): the number of
     * pairs (0: tasks are single work tiles), and the number of heads with full pairs. Without pairs
     * the number of all heads if the first work tiles of all of them come first, 0: one head after
     * the other. */
    int64_t causal_pairs, full_heads;
} fa_sm80_params;

/* Every option that changes scores or weights may be present. 0: none of them. */
#define FA_SM80_ALL 1

/* Bytes from one row to the next: 16 more than the row has, which is an odd number of 16-byte
 * units. So units of 8 adjacent rows are in 8 different groups of banks. */
#define FA_SM80_PITCH(dim, element) (FA_ELEMENT_BYTES(element) * (dim) + 16)

#define FA_SM80_THREADS(warps) (32 * (warps))
#define FA_SM80_QUERIES(warps, split, group_rows) ((group_rows) * (warps) / (split))

/* Bytes that warps that share rows exchange: weights, and a number for each warp and row. */
#define FA_SM80_WEIGHTS_PITCH(keys, element) (FA_ELEMENT_BYTES(element) * (keys) + 16)
#define FA_SM80_SHARED(element, warps, split, group_rows, keys)                                    \
    ((split) == 1                                                                                  \
         ? 0                                                                                       \
         : FA_SM80_QUERIES(warps, split, group_rows) * FA_SM80_WEIGHTS_PITCH(keys, element) +      \
               4 * (group_rows) * (warps))

/* Bytes of a work tile's description. */
#define FA_SM80_ENTRY_BYTES 288

/* Bytes of dynamic shared memory: queries, keys, values, the warps' exchange area, the work-tile
 * queue. */
#define FA_SM80_SMEM(element, dim, warps, split, group_rows, keys, stages, ahead)                  \
    (FA_SM80_PITCH(dim, element) *                                                                 \
         (FA_SM80_QUERIES(warps, split, group_rows) + 2 * (stages) * (keys)) +                     \
     FA_SM80_SHARED(element, warps, split, group_rows, keys) + 2 * (ahead)*FA_SM80_ENTRY_BYTES)

#endif
