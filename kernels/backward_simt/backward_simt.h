/*
 * Parameters of the kernels of backward_simt, shared by the kernels and the planner.
 */
#ifndef FA_KERNEL_BACKWARD_SIMT_H
#define FA_KERNEL_BACKWARD_SIMT_H

#include "../common/params.h"
#include "../common/pass_tiles.h"

typedef struct fa_backward_params {
    /* out and lse: as forward wrote them; tiles, tasks: of the kernel. */
    fa_attention_params a;
    int64_t blocks_q, blocks_k; /* entries of axis 0 of q and of k; paged: pages */
    fa_kernel_view dout, dq, dk, dv, dbias;
    int64_t dbias_shape[4]; /* each the full extent, or 1: summed over that axis */
    const float *dlse;
    float *delta; /* like lse: rowsum(dout * out) - dlse; 0 in rows without a sequence */
    float *dsinks;
    int32_t dbias_by_others; /* the kernel of the other gradients also computes dbias: */
    /* float32 sums to which it adds; data NULL: it stores dbias itself. */
    fa_kernel_view dbias_sums;
} fa_backward_params;

#define FA_DELTA_ROWS 32                     /* of a block of FA_PASS_THREADS */
#define FA_DBIAS_ROWS (FA_PASS_THREADS / 32) /* of dbias_clear and dbias_round: one for each warp */
#define FA_DSINKS_THREADS 512                /* a block for each head */
#define FA_DSINKS_SMEM (8 * FA_DSINKS_THREADS)

#endif
