/*
 * Weights are powers of two of logits above a row's base, which follows the running max.
 */
#ifndef FA_KERNELS_DECODE_SM80_SOFTMAX_CUH
#define FA_KERNELS_DECODE_SM80_SOFTMAX_CUH

#include "decode_sm80/config.cuh"

#include "common/device.cuh"
#include "common/mma.cuh"
#include "common/nonfinite_values.cuh"
#include "decode_sm80/logits.cuh"
#include "ptx/ldmatrix.cuh"

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

/* O += P V of 16 keys. v: where this lane's values are; carefully: some values are not finite. */
FA_DEVICE void add_products(fa_output *o, uint32_t a[M_TILES][4], uint32_t v, bool carefully)
{
    if (carefully) {
        fa_add_values_carefully(o->at, a, v);
        return;
    }
#pragma unroll
    for (int block = 0; block < D_TILES / 2; block++) {
        uint32_t b[4];
        ptx_ldmatrix_x4_trans(b, v + (uint32_t)(block * 32));
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            fa_mma(o->at[m][2 * block], a[m], b[0], b[1]);
            fa_mma(o->at[m][2 * block + 1], a[m], b[2], b[3]);
        }
    }
}

#endif
