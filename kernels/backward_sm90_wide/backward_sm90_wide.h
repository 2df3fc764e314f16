/*
 * backward_sm90 for head dims from 129 to 256: its parameters and its workspace (backward_sm90.h),
 * with the numbers of a wide variant. The kernels and the planner share them.
 */
#ifndef FA_KERNEL_BACKWARD_SM90_WIDE_H
#define FA_KERNEL_BACKWARD_SM90_WIDE_H

#include "../backward_sm90/backward_sm90.h"

#define FA_BACKWARD_SM90_WIDE_KEYS                                                                 \
    64 /* of a block; those of a cluster's blocks follow each other */
#define FA_BACKWARD_SM90_WIDE_THREADS 512
#define FA_BACKWARD_SM90_WIDE_DS_BUFFERS 2
/* The blocks of 64 columns of the peer's keys that a block loads. It computes dQ of all keys of the
 * cluster in half of the columns. */
#define FA_BACKWARD_SM90_WIDE_PEER_BLOCKS 2
#define FA_BACKWARD_SM90_WIDE_WEIGHT_BYTES                                                         \
    (FA_BACKWARD_SM90_WIDE_KEYS * FA_BACKWARD_SM90_QUERIES * 4)

/* Bytes of dynamic shared memory, with room to align to 1024: keys and stages of queries; values
 * and stages of dout; the peer's keys; rows of the queries; weights, in float32; buffers of dS, for
 * all keys of the cluster; numbers of work tiles, which the peer sends. */
#define FA_BACKWARD_SM90_WIDE_SMEM(element, dim, value_dim, q_stages, stages, cluster)             \
    ((FA_BACKWARD_SM90_WIDE_KEYS + (q_stages)*FA_BACKWARD_SM90_QUERIES) *                          \
         FA_SM90_ROW_BYTES(dim, element) +                                                         \
     (FA_BACKWARD_SM90_WIDE_KEYS + (stages)*FA_BACKWARD_SM90_QUERIES) *                            \
         FA_SM90_ROW_BYTES(value_dim, element) +                                                   \
     FA_BACKWARD_SM90_WIDE_PEER_BLOCKS * FA_BACKWARD_SM90_WIDE_KEYS * 128 +                        \
     (q_stages)*FA_BACKWARD_SM90_ROW_BYTES + FA_BACKWARD_SM90_WIDE_WEIGHT_BYTES +                  \
     FA_BACKWARD_SM90_WIDE_DS_BUFFERS * FA_BACKWARD_SM90_QUERIES * FA_BACKWARD_SM90_WIDE_KEYS *    \
         (cluster)*FA_ELEMENT_BYTES(element) +                                                     \
     16 + 1024)

#endif
