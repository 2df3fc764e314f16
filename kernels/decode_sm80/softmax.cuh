/*
 * Weights are powers of two of logits above a row's base, which follows the running max.
 */
#ifndef FA_KERNELS_DECODE_SM80_SOFTMAX_CUH
#define FA_KERNELS_DECODE_SM80_SOFTMAX_CUH

#include "decode_sm80/config.cuh"

#include "common/device.cuh"
#include "common/mma.cuh"
#include "common/nonfinite_values.cuh"
#include "common/reduce.cuh"
#include "decode_sm80/fragments.cuh"
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
    for (int i = 0; i < M_TILES * D_TILES * 4; i++) {
#if EIGHT_BITS
        o->at[i / 4 / D_STEPS][i / 4 % D_STEPS][i % 4] = 0.0f;
#else
        o->at[i / 4 / D_TILES][i / 4 % D_TILES][i % 4] = 0.0f;
#endif
    }
}

/* Multiplies the sums of some halves of 16 rows each by the rows' factors. */
FA_DEVICE void rescale_output(fa_output *o, int halves, float factor[M_TILES][2])
{
#if EIGHT_BITS /* other lanes have these rows' factors */
#pragma unroll
    for (int i = 0; i < halves; i++) {
        const int lane = lane_id() % 4 * 8;
        const float first = __shfl_sync(0xffffffffu, factor[i / 2][i % 2], lane);
        const float second = __shfl_sync(0xffffffffu, factor[i / 2][i % 2], lane + 4);
#pragma unroll
        for (int e = 0; e < D_STEPS * 4; e++) o->at[i][e / 4][e % 4] *= e % 2 ? second : first;
    }
#else
    (void)halves;
#pragma unroll
    for (int i = 0; i < M_TILES * D_TILES * 4; i++)
        o->at[i / 4 / D_TILES][i / 4 % D_TILES][i % 4] *= factor[i / 4 / D_TILES][i % 4 / 2];
#endif
}

/* Raises the bases of rows whose logits exceed the old ones too far, and rescales the sums. */
FA_DEVICE void raise_bases(fa_output *o, int halves, float top[M_TILES][2])
{
#pragma unroll
    for (int i = 0; i < halves; i++) {
        float *base = &o->base[i / 2][i % 2], *x = &top[i / 2][i % 2];
        const float now = *x > *base + RESCALE_ABOVE ? *x - HEADROOM : *base;
        *x = ptx_ex2(*base - now);
        *base = now;
        o->sum[i / 2][i % 2] *= *x;
    }
    rescale_output(o, halves, top);
}

#if !LATENT /* otherwise bases are the block's */
/* The largest of this lane's logits of a row. */
FA_DEVICE float find_top(const fa_scores *s, int m, int half)
{
    float x = s->at[m][0][half * 2];
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++)
        x = fmaxf(x, fmaxf(s->at[m][n][half * 2], s->at[m][n][half * 2 + 1]));
    return x;
}

/* Updates the bases for a tile's logits. Usually none is raised, and lanes need not exchange their
 * maxima. */
FA_DEVICE void update_bases(fa_output *o, const fa_scores *s, int halves)
{
    float top[M_TILES][2];
    bool grown = false;
#pragma unroll
    for (int i = 0; i < halves; i++) {
        top[i / 2][i % 2] = find_top(s, i / 2, i % 2);
        grown |= top[i / 2][i % 2] > o->base[i / 2][i % 2] + RESCALE_ABOVE;
    }
    if (!__any_sync(0xffffffffu, grown)) return;
#pragma unroll
    for (int i = 0; i < halves; i++) top[i / 2][i % 2] = fa_max_over_lanes(top[i / 2][i % 2], 4);
    raise_bases(o, halves, top);
}

/* The A fragments of the weights of 16 keys. */
FA_DEVICE void make_weights(const fa_scores *s, int step, int halves, fa_output *o,
                            uint32_t a[M_TILES][4])
{
#pragma unroll
    for (int i = 0; i < M_TILES * 4; i++) {
        const int m = i / 4, half = i % 2;
        a[m][i % 4] = 0;
        if (2 * m + half >= halves) continue;
        const float *x = s->at[m][2 * step + i % 4 / 2] + 2 * half;
        const float first = ptx_ex2(x[0] - o->base[m][half]);
        const float second = ptx_ex2(x[1] - o->base[m][half]);
        o->sum[m][half] += first + second;
        a[m][i % 4] = fa_pack_x2(first, second);
    }
}
#endif

#if !EIGHT_BITS
/* O += P V for 16 keys. v: the address of this lane's values; carefully: some values are not
 * finite. */
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

#endif
