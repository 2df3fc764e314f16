/*
 * What the kernels of fa_backward, fa_weights and fa_combine are told, and the shapes of their
 * tiles. Shared by the kernels, the planner and the launch.
 */
#ifndef FA_KERNELS_PASSES_H
#define FA_KERNELS_PASSES_H

#include "common/params.h"

/* ---- Backward -------------------------------------------------------------------------------- */

typedef struct fa_backward_params {
    fa_attention_params a; /* out and lse: what forward wrote. tiles, tasks: of the kernel */
    fa_kernel_view dout, dq, dk, dv, dbias;
    int64_t dbias_shape[4]; /* each the full extent, or 1: summed over that axis */
    const float *dlse;
    float *delta; /* like lse: rowsum(dout * out) - dlse, 0 in rows of no sequence */
    float *dsinks;
    int64_t blocks_q, blocks_k; /* entries of axis 0 of q and of k; paged: pages */
} fa_backward_params;

/* ---- Weights --------------------------------------------------------------------------------- */

typedef struct fa_weights_params {
    fa_attention_params a;
    fa_kernel_view weights; /* (batch, heads_q, rows, keys) */
    const int64_t *rows;    /* NULL: row r is query r       */
    int64_t num_rows, keys; /* of weights                   */
} fa_weights_params;

/* ---- Combine --------------------------------------------------------------------------------- */

/* Parameters of a kernel end at 4 KiB; from CUDA 12.1 on at 32764 bytes. */
#define FA_COMBINE_FEW 48
#define FA_COMBINE_MANY 448

typedef struct fa_combine_part {
    char *data;
    const float *lse;
    int64_t stride[3];
    int64_t lse_stride[3]; /* of batch, head, query */
    int32_t dtype, vector;
} fa_combine_part;

/* Everything but the parts, which follow. */
typedef struct fa_combine_head {
    fa_kernel_view out;
    float *lse; /* NULL: not wanted */
    int64_t batch, heads, rows, tasks;
    int32_t columns, parts;
} fa_combine_head;

/* As the kernel with room for most has it; one with room for fewer takes the front of it. */
typedef struct fa_combine_launch {
    fa_combine_head head;
    fa_combine_part parts[FA_COMBINE_MANY];
} fa_combine_launch;

/* ---- Shapes of tiles ------------------------------------------------------------------------- */

/* Kernels on FMA units, see common/simt.cuh. */
#define FA_PASS_THREADS 128
#define FA_PASS_OTHERS 64 /* rows of the tile that is walked over */
#define FA_PASS_CHUNK 64  /* columns in shared memory at a time */
#define FA_PASS_PITCH 68  /* words from one row to the next */
/* `own` of kernels/variants.h: the rows that a block computes results for, as many as registers have room for. */

/* Bytes of dynamic shared memory: own rows, other rows, weights, what is known of each query, where
 * operands lie, flags of the threads. */
#define FA_PASS_OPERANDS 256
#define FA_PASS_SMEM(own)                                                                          \
    (4 * ((2 * (own) + FA_PASS_OTHERS) * FA_PASS_PITCH + 4 * FA_PASS_OTHERS + FA_PASS_THREADS) +   \
     FA_PASS_OPERANDS)

/* The same for weights_simt, and three numbers of 64 bits for each row. */
#define FA_WEIGHTS_SMEM(own) (FA_PASS_SMEM(own) + 3 * 8 * (own))

#define FA_DELTA_ROWS 32      /* of a block of FA_PASS_THREADS */
#define FA_DSINKS_THREADS 512 /* a block for each head */
#define FA_DSINKS_SMEM (8 * FA_DSINKS_THREADS)
#define FA_COMBINE_ROWS 4 /* of a block of FA_PASS_THREADS: a warp each */

#endif
