/*
 * backward_sm90 for head dims from 129 to 256: its parameters and its workspace (backward_sm90.h), with the numbers of a wide
 * variant. Shared by the kernels and the planner.
 */
#ifndef FA_KERNEL_BACKWARD_SM90_WIDE_H
#define FA_KERNEL_BACKWARD_SM90_WIDE_H

#include "../backward_sm90/backward_sm90.h"

#define FA_BACKWARD_SM90_WIDE_KEYS 64 /* of a block */
#define FA_BACKWARD_SM90_WIDE_THREADS 512
#define FA_BACKWARD_SM90_WIDE_DS_BUFFERS(dim) ((dim) == 256 ? 2 : 1) /* as there is room for */
#define FA_BACKWARD_SM90_WIDE_WEIGHT_BYTES                                                         \
    (FA_BACKWARD_SM90_WIDE_KEYS * FA_BACKWARD_SM90_QUERIES * 4)

/* Bytes of dynamic shared memory, with room to align to 1024: keys and values; stages of queries, of dout and of their
 * rows; weights, in float32; buffers of dS. */
#define FA_BACKWARD_SM90_WIDE_SMEM(element, dim, value_dim, stages)                                \
    ((FA_BACKWARD_SM90_WIDE_KEYS + (stages)*FA_BACKWARD_SM90_QUERIES) *                            \
         (FA_SM90_ROW_BYTES(dim, element) + FA_SM90_ROW_BYTES(value_dim, element)) +               \
     (stages)*FA_BACKWARD_SM90_ROW_BYTES + FA_BACKWARD_SM90_WIDE_WEIGHT_BYTES +                    \
     FA_BACKWARD_SM90_WIDE_DS_BUFFERS(dim) * FA_BACKWARD_SM90_QUERIES *                            \
         FA_BACKWARD_SM90_WIDE_KEYS * FA_ELEMENT_BYTES(element) +                                  \
     1024)

#endif
