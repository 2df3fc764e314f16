/*
 * Sizes that follow from the numbers of a variant of forward_sm90_wide. Its second parameter is
 * that of forward_sm90. The kernel and the planner share this file.
 *
 * Numbers of kernels/variants.h:
 *
 *   head_dim   a multiple of 64
 *   value_dim  head_dim / cluster: each block computes its share of the columns
 *   cluster    2 blocks share a work tile; each computes the weights of half of its keys
 *   consumers  warpgroups that compute, 64 queries each
 *   stages     for a chunk of keys or values
 *   chunk      bytes of a chunk. A chunk of keys is whole blocks of 64 columns of the block's keys
 *              of a tile
 *   v_rows     rows of a chunk of values, with the block's columns
 *   rounded    1: of float32 inputs, which launches before have rounded to float16 (round.h)
 */
#ifndef FA_KERNEL_FORWARD_SM90_WIDE_H
#define FA_KERNEL_FORWARD_SM90_WIDE_H

#include "../forward_sm90/forward_sm90.h"

/* Bytes that the blocks of a cluster send each other: two numbers for each query. */
#define FA_SM90_WIDE_EXCHANGE(consumers) (2 * FA_SM90_QUERIES(consumers) * 4)

/* Bytes of dynamic shared memory, with room to align to 1024: queries, chunks, weights,
 * exchange. */
#define FA_SM90_WIDE_SMEM(element, dim, consumers, keys, stages, chunk)                            \
    (FA_SM90_QUERIES(consumers) * FA_SM90_ROW_BYTES(dim, element) + (stages) * (chunk) +           \
     FA_SM90_QUERIES(consumers) * (keys)*FA_ELEMENT_BYTES(element) +                               \
     FA_SM90_WIDE_EXCHANGE(consumers) + 1024)

#endif
