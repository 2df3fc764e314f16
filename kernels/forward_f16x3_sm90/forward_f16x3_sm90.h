/*
 * Sizes that follow from the numbers of a variant of forward_f16x3_sm90. Its second parameter is
 * that of forward_sm90. The kernel and the planner share this file.
 *
 * Numbers of kernels/variants.h:
 *
 *   head_dim             of queries, keys and values: value_dim times cluster
 *   value_dim            columns of these that a block has, a multiple of 64, in a cluster also of 32
 *   cluster              1, or 2 blocks, which share a work tile
 *   consumers            warpgroups that compute, 64 queries each: 2, or 1 for few short rows; two others load and split
 *   options              FA_SM90_FLOAT32_ALL, or 0
 *   keys                 of a key tile, a multiple of 16; with options of 32
 *   stages               for a tile of keys or values, or for a chunk of its columns
 *   chunk                bytes of one, in a cluster and where tiles are wide
 *   q_stages             1
 *   for_bias             1: for problems with a bias, perhaps with other options
 */
#ifndef FA_KERNEL_FORWARD_F16X3_SM90_H
#define FA_KERNEL_FORWARD_F16X3_SM90_H

#include "../forward_sm90/forward_sm90.h"

enum {
    FA_F16X3_SM90_PRODUCERS = 2,    /* warpgroups that load and split */
    FA_F16X3_SM90_QUEUE_ENTRIES = 4 /* of the work-tile queue: an even number */
};

/* Threads of a block. */
#define FA_F16X3_SM90_THREADS(consumers) (128 * (FA_F16X3_SM90_PRODUCERS + (consumers)))

/* Columns for which a block has room: two blocks of 32 floats become one of high parts and one of low parts. */
#define FA_F16X3_SM90_ROOM(value_dim) (((value_dim) + 63) / 64 * 64)

/* Bytes of dynamic shared memory, with room to align to 1024: queries, keys and values, work
 * tiles. chunk: 0 if a chunk is a tile. */
#define FA_F16X3_SM90_SMEM(dim, consumers, keys, stages, chunk)                                    \
    (FA_SM90_QUERIES(consumers) * (dim)*4 +                                                        \
     (stages) * ((chunk) > 0 ? (chunk) : (keys) * (dim)*4) +                                       \
     FA_F16X3_SM90_QUEUE_ENTRIES * FA_SM90_ENTRY_BYTES + 1024)

/* The same for a block of a cluster, which also has a buffer for the scores of its peer. */
#define FA_F16X3_SM90_CLUSTER_SMEM(value_dim, consumers, keys, stages, chunk)                      \
    (FA_SM90_QUERIES(consumers) * (FA_F16X3_SM90_ROOM(value_dim) + (keys)) * 4 +                   \
     (stages) * (chunk) + FA_F16X3_SM90_QUEUE_ENTRIES * FA_SM90_ENTRY_BYTES + 1024)

#endif
