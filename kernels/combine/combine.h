/*
 * The parameters of the kernel of fa_combine, shared by the kernel and the planner.
 */
#ifndef FA_KERNEL_COMBINE_H
#define FA_KERNEL_COMBINE_H

#include "../common/params.h"

/* A kernel has at most 4 KiB of parameters; from CUDA 12.1 on, 32764 bytes. */
#define FA_COMBINE_FEW 48
#define FA_COMBINE_MANY 448

typedef struct fa_combine_part {
    char *data;
    const float *lse;
    int64_t stride[3];
    int64_t lse_stride[3]; /* of batch, head, query */
    int32_t dtype, vector;
} fa_combine_part;

/* All parameters except the parts, which follow. */
typedef struct fa_combine_head {
    fa_kernel_view out;
    float *lse; /* NULL: it is not wanted */
    int64_t batch, heads, rows, tasks;
    int32_t columns, parts;
} fa_combine_head;

/* The parameters of the kernel with the most parts. A kernel with fewer parts uses only the
 * beginning of them. */
typedef struct fa_combine_launch {
    fa_combine_head head;
    fa_combine_part parts[FA_COMBINE_MANY];
} fa_combine_launch;

#define FA_COMBINE_THREADS 128
#define FA_COMBINE_ROWS 4 /* of a block: one for each warp */

#endif
