/*
 * Sizes that follow from the numbers of a variant of forward_simt. The kernel and the planner share
 * this file.
 *
 * Numbers of kernels/variants.h:
 *   keys   a multiple of 32
 *   chunk  columns in shared memory at a time
 *   rows   of a thread
 */
#ifndef FA_KERNELS_FORWARD_SIMT_FORWARD_SIMT_H
#define FA_KERNELS_FORWARD_SIMT_FORWARD_SIMT_H

#define FA_SIMT_THREADS 128
#define FA_SIMT_ACROSS 8 /* threads that share a row */
#define FA_SIMT_DOWN (FA_SIMT_THREADS / FA_SIMT_ACROSS)

#define FA_SIMT_QUERIES(rows) (FA_SIMT_DOWN * (rows)) /* of a tile */

/* Words from one row to the next. */
#define FA_SIMT_PITCH(chunk) ((chunk) + 4)
#define FA_SIMT_WEIGHTS_PITCH(keys) ((keys) + 4)

/* Bytes of dynamic shared memory: queries, keys or values, weights. */
#define FA_SIMT_SMEM(keys, chunk, rows)                                                            \
    (4 * ((FA_SIMT_QUERIES(rows) + (keys)) * FA_SIMT_PITCH(chunk) +                                \
          FA_SIMT_QUERIES(rows) * FA_SIMT_WEIGHTS_PITCH(keys)))

#endif
