/*
 * The shape of forward_simt's tiles, for a compiled head dim. Shared by the kernel and the planner.
 */
#ifndef FA_KERNEL_FORWARD_SIMT_H
#define FA_KERNEL_FORWARD_SIMT_H

#define FA_SIMT_THREADS 128
#define FA_SIMT_ACROSS 8 /* threads that share a row */
#define FA_SIMT_DOWN (FA_SIMT_THREADS / FA_SIMT_ACROSS)

#define FA_SIMT_CHUNK(dim) ((dim) < 128 ? (dim) : 128) /* columns in shared memory at a time */
#define FA_SIMT_ROWS(dim) ((dim) > 256 ? 2 : 4)        /* of a thread */
#define FA_SIMT_QUERIES(dim) (FA_SIMT_DOWN * FA_SIMT_ROWS(dim)) /* of a tile */
#define FA_SIMT_KEYS(dim) ((dim) > 64 ? 32 : 64)                /* of a tile, a multiple of 32 */

/* Words from one row to the next. */
#define FA_SIMT_PITCH(dim) (FA_SIMT_CHUNK(dim) + 4)
#define FA_SIMT_WEIGHTS_PITCH(dim) (FA_SIMT_KEYS(dim) + 4)

/* Bytes of dynamic shared memory: queries, keys or values, weights. */
#define FA_SIMT_SMEM(dim)                                                                          \
    (4 * ((FA_SIMT_QUERIES(dim) + FA_SIMT_KEYS(dim)) * FA_SIMT_PITCH(dim) +                        \
          FA_SIMT_QUERIES(dim) * FA_SIMT_WEIGHTS_PITCH(dim)))

#endif
