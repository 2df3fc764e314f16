/*
 * The product of scores on the FMA units. It is a separate header because the order of definitions determines how the
 * compiler vectorizes loads of backward_dkv_simt_d256: there it must come after fa_shared_of.
 */
#ifndef FA_KERNELS_COMMON_SIMT_SCORES_CUH
#define FA_KERNELS_COMMON_SIMT_SCORES_CUH

#include "common/simt.cuh"

/* Columns of scores in one chain of fused multiply-adds: errors grow with the chain's length. Forward and backward use
 * the same length, so that their scores have the same errors, which cancel in exp(S - lse). */
enum { CHAIN = 64 };

/* Steps of 4 columns in the loop's body; 1 if two steps would need too many registers. */
#ifndef CHAIN_STEPS
#define CHAIN_STEPS 2
#endif
enum { STEPS = CHAIN_STEPS }; /* a macro is not replaced in a pragma */

/* chain += own other^T over columns [from, to) of the chunk. */
FA_DEVICE void add_chain(const fa_shared *shared, int from, int to, float chain[ROWS][COLUMNS])
{
    const float *own = shared->own + row_of(0) * PITCH;
    const float *other = shared->other + across() * PITCH;
#pragma unroll STEPS
    for (int at = from; at < to; at += 4) {
        float4 a[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) a[r] = *(const float4 *)(own + r * DOWN * PITCH + at);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const float4 b = *(const float4 *)(other + c * ACROSS * PITCH + at);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float sum = fmaf(a[r].x, b.x, chain[r][c]);
                sum = fmaf(a[r].y, b.y, sum);
                sum = fmaf(a[r].z, b.z, sum);
                chain[r][c] = fmaf(a[r].w, b.w, sum);
            }
        }
    }
}

#if defined(HEAD_DIM) && HEAD_DIM <= 64
#define ONE_CHAIN 1
#else
#define ONE_CHAIN 0
#endif

/* scores += own other^T over the first columns of the chunk. */
FA_DEVICE void add_scores(const fa_shared *shared, int columns, float scores[ROWS][COLUMNS])
{
    if (ONE_CHAIN) {
        add_chain(shared, 0, columns, scores);
        return;
    }
#pragma unroll 1
    for (int from = 0; from < columns; from += CHAIN) {
        float chain[ROWS][COLUMNS];
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) chain[r][c] = 0.0f;
        add_chain(shared, from, from + CHAIN < columns ? from + CHAIN : columns, chain);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) scores[r][c] += chain[r][c];
    }
}

#endif
