/*
 * The softmax of a tile of 8-bit keys, and O += P V. Shared with decode_sm90.
 */
#ifndef FA_KERNELS_DECODE_SM80_BYTES_SOFTMAX_CUH
#define FA_KERNELS_DECODE_SM80_BYTES_SOFTMAX_CUH

#include "decode_sm80/config.cuh"
#include "decode_sm80/fragments.cuh"

#if EIGHT_BITS
#include "decode_sm80/bytes.cuh"
#include "decode_sm80/softmax.cuh"

/* ---- Values with scales ---------------------------------------------------------------------- */

/* Updates bases for weights that will be multiplied by the values' scales. If no row's largest
 * logit exceeds its base even with the largest scale, there is nothing to do. This is checked
 * first. */
FA_DEVICE void update_scaled_bases(fa_output *o, int halves, const fa_scores *s,
                                   const float2 scale[KEY_TILES])
{
    fa_scores raised;
    float largest = 0.0f;
    bool grown = false;
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++)
        largest = fmaxf(largest, fmaxf(fabsf(scale[n].x), fabsf(scale[n].y)));
    const float by = scale_exponent(largest);
#pragma unroll
    for (int i = 0; i < halves; i++)
        grown |= find_top(s, i / 2, i % 2) + by > o->base[i / 2][i % 2] + RESCALE_ABOVE;
    if (!__any_sync(0xffffffffu, grown)) return;
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++) {
        const float each[2] = {scale_exponent(scale[n].x), scale_exponent(scale[n].y)};
#pragma unroll
        for (int i = 0; i < 2 * halves; i++)
            raised.at[i / 4][n][i % 4] = s->at[i / 4][n][i % 4] + each[i % 2];
    }
    update_bases(o, &raised, halves);
}

/* A weight of 0 removes its value, whatever the scale is. */
FA_DEVICE float scale_weight(float weight, float scale)
{
    return weight != 0.0f ? weight * scale : weight;
}

/* Like make_weights, times the scales of the values. */
FA_DEVICE void make_scaled_weights(const fa_scores *s, const float2 scale[KEY_TILES], int step,
                                   int halves, fa_output *o, uint32_t a[M_TILES][4])
{
#pragma unroll
    for (int i = 0; i < M_TILES * 4; i++) {
        const int m = i / 4, half = i % 2, n = 2 * step + i % 4 / 2;
        a[m][i % 4] = 0;
        if (2 * m + half >= halves) continue;
        const float first = ptx_ex2(s->at[m][n][2 * half] - o->base[m][half]);
        const float second = ptx_ex2(s->at[m][n][2 * half + 1] - o->base[m][half]);
        o->sum[m][half] += first + second;
        a[m][i % 4] = fa_pack_x2(scale_weight(first, scale[n].x), scale_weight(second, scale[n].y));
    }
}

/* The softmax of a tile and O += P V. scaled: each value has its own scale, at `scales`; carefully:
 * some values are NaN and hidden from some rows. */
FA_DEVICE void add_tile(bool scaled, int halves, const fa_scores *s, const fa_vectors *at,
                        uint32_t tile, uint32_t scales, bool carefully, fa_output *o)
{
    uint32_t a[KEY_STEPS][M_TILES][4];
    if (scaled) {
        float2 scale[KEY_TILES];
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++) scale[n] = get_scales(scales, n);
        update_scaled_bases(o, halves, s, scale);
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++)
            make_scaled_weights(s, scale, step, halves, o, a[step]);
    } else {
        update_bases(o, s, halves);
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++) make_weights(s, step, halves, o, a[step]);
    }
    if (carefully) {
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++)
            add_values_carefully(o, halves, a[step], at, tile, step);
        return;
    }
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++) add_values(o, halves, a[step], at, tile, step);
}
#endif

#endif
