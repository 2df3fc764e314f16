/*
 * Sizes that follow from the numbers of a variant of forward_tf32_sm90. Its second parameter is
 * that of forward_sm90. The kernel and the planner share this file.
 *
 * Numbers of kernels/variants.h:
 *
 *   head_dim, value_dim  the same multiple of 32
 *   consumers            warpgroups that compute, 64 queries each; one more loads, rounds and
 *                        transposes
 *   options              FA_SM90_FLOAT32_ALL, or 0
 *   keys                 of a key tile, a multiple of 32
 *   stages               for a tile of keys or values
 *   q_stages             1
 */
#ifndef FA_KERNEL_FORWARD_TF32_SM90_H
#define FA_KERNEL_FORWARD_TF32_SM90_H

#include "../forward_sm90/forward_sm90.h"

enum {
    FA_TF32_SM90_VALUE_ROWS = 32,  /* that are loaded at once */
    FA_TF32_SM90_QUEUE_ENTRIES = 4 /* of the work-tile queue: an even number */
};

/* Bytes of dynamic shared memory, with room to align to 1024: queries, keys and values, work
 * tiles. */
#define FA_TF32_SM90_SMEM(element, dim, consumers, keys, stages)                                   \
    ((FA_SM90_QUERIES(consumers) + (stages) * (keys)) * FA_SM90_ROW_BYTES(dim, element) +          \
     FA_TF32_SM90_QUEUE_ENTRIES * FA_SM90_ENTRY_BYTES + 1024)

#endif
