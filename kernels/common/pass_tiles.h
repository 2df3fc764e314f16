/*
 * The tiles of the kernels on FMA units of backward and weights (pass_tiles.cuh). The number of own rows is `own` of
 * kernels/variants.h: as many as fit into registers. Shared by the kernels and the planner.
 */
#ifndef FA_KERNEL_PASS_TILES_H
#define FA_KERNEL_PASS_TILES_H

#define FA_PASS_THREADS 128
#define FA_PASS_OTHERS 64 /* rows of the tile that is walked over */
#define FA_PASS_CHUNK 64  /* columns in shared memory at a time */
#define FA_PASS_PITCH 68  /* words from one row to the next */

/* Bytes of dynamic shared memory: own rows, other rows, weights, data of each query, places of
 * operands, flags of the threads. */
#define FA_PASS_OPERANDS 256
#define FA_PASS_SMEM(own)                                                                          \
    (4 * ((2 * (own) + FA_PASS_OTHERS) * FA_PASS_PITCH + 4 * FA_PASS_OTHERS + FA_PASS_THREADS) +   \
     FA_PASS_OPERANDS)

#endif
