/*
 * The product of scores on the FMA units. It has a header of its own as the order of definitions decides how the compiler
 * vectorizes loads of backward_dkv_simt_d256: there it must follow fa_shared_of.
 */
#ifndef FA_KERNELS_COMMON_SIMT_SCORES_CUH
#define FA_KERNELS_COMMON_SIMT_SCORES_CUH

#include "common/simt.cuh"

/* scores += own other^T over the first so many columns of the chunk. */
FA_DEVICE void add_scores(const fa_shared *shared, int columns, float scores[ROWS][COLUMNS])
{
    const float *own = shared->own + row_of(0) * PITCH;
    const float *other = shared->other + across() * PITCH;
#pragma unroll 2
    for (int at = 0; at < columns; at += 4) {
        float4 a[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) a[r] = *(const float4 *)(own + r * DOWN * PITCH + at);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const float4 b = *(const float4 *)(other + c * ACROSS * PITCH + at);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float sum = fmaf(a[r].x, b.x, scores[r][c]);
                sum = fmaf(a[r].y, b.y, sum);
                sum = fmaf(a[r].z, b.z, sum);
                scores[r][c] = fmaf(a[r].w, b.w, sum);
            }
        }
    }
}

#endif
