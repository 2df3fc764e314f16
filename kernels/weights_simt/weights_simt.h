/*
 * The parameters of weights_simt, shared by the kernel and the planner.
 */
#ifndef FA_KERNEL_WEIGHTS_SIMT_H
#define FA_KERNEL_WEIGHTS_SIMT_H

#include "../common/params.h"
#include "../common/pass_tiles.h"

typedef struct fa_weights_params {
    fa_attention_params a;
    int64_t num_rows, keys; /* of weights                   */
    fa_kernel_view weights; /* (batch, heads_q, rows, keys) */
    const int64_t *rows;    /* NULL: row r is query r       */
} fa_weights_params;

/* Bytes of dynamic shared memory: the tiles, and three numbers of 64 bits for each row. */
#define FA_WEIGHTS_SMEM(own) (FA_PASS_SMEM(own) + 3 * 8 * (own))

#endif
