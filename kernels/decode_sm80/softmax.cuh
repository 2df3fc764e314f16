/*
 * Weights are powers of two of logits above a row's base, which follows the running max.
 */
#ifndef FA_KERNELS_DECODE_SM80_SOFTMAX_CUH
#define FA_KERNELS_DECODE_SM80_SOFTMAX_CUH

#include "decode_sm80/config.cuh"

#include "common/device.cuh"
#include "decode_sm80/logits.cuh"

FA_DEVICE void clear_output(fa_output *o)
{
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) {
        o->base[i / 2][i % 2] = NOTHING_SEEN;
        o->sum[i / 2][i % 2] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < M_TILES * D_TILES * 4; i++)
        o->at[i / 4 / D_TILES][i / 4 % D_TILES][i % 4] = 0.0f;
}

/* New bases for rows whose logits are too far beyond the old ones; what has been summed is
 * rescaled. */
FA_DEVICE void raise_bases(fa_output *o, float top[M_TILES][2])
{
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) {
        float *base = &o->base[i / 2][i % 2], *x = &top[i / 2][i % 2];
        const float now = *x > *base + RESCALE_ABOVE ? *x - HEADROOM : *base;
        *x = ptx_ex2(*base - now);
        *base = now;
        o->sum[i / 2][i % 2] *= *x;
    }
#pragma unroll
    for (int i = 0; i < M_TILES * D_TILES * 4; i++)
        o->at[i / 4 / D_TILES][i / 4 % D_TILES][i % 4] *= top[i / 4 / D_TILES][i % 4 / 2];
}

#endif
