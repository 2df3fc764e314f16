/*
 * Softmax of a key tile. The max is always tracked (forward_sm90/softmax.cuh), because the
 * exponentials of one consumer overlap with the products of the other. The unit of a score depends
 * on its row and its tile. With options a score is a logit already
 * (forward_sm90/float32_options.cuh).
 */
#ifndef FA_KERNELS_FORWARD_F16X3_SM90_SOFTMAX_CUH
#define FA_KERNELS_FORWARD_F16X3_SM90_SOFTMAX_CUH

#include "forward_f16x3_sm90/config.cuh"
#include "forward_f16x3_sm90/parts.cuh"
#include "common/reduce.cuh"
#include "forward_sm90/softmax.cuh"
#include "ptx/convert.cuh"

/* The unit of a score: without options as an exponent of 2. It is neither 0 nor infinite, because a
 * hidden score is -infinity and other scores may be 0. */
FA_DEVICE float score_unit(float of_row, float of_tile)
{
    const float unit = of_row * of_tile;
    return unit < 0x1p-126f ? 0x1p-126f : unit > 0x1p127f ? 0x1p127f : unit; /* NaN stays NaN */
}

#if OPTIONS

/* The largest of the weights that dropout keeps, for each row so far. rescale: of the rows'
 * bases. */
FA_DEVICE void find_kept(const float *s, const float *rescale, float *kept)
{
#pragma unroll
    for (int r = 0; r < 2; r++) kept[r] = fmaxf(kept[r] * rescale[r], max_of_bits(s, r));
}

/* Whether the kept weights of a row are so small that their parts have lost bits, because dropped
 * ones are 2^15 times as large. */
FA_DEVICE bool keeps_too_little(float kept)
{
    const float largest = fa_max_over_lanes(kept, 4);
    return largest > 0.0f && largest < 1.0f;
}

#else

/* Raises the bases to this tile's max. Sets rescale, the factor of the outputs so far; sums are
 * multiplied here. A row that has seen no key keeps NO_KEY_SEEN. */
FA_DEVICE void raise_row_bases(const float *s, const float *unit, row_state *rows, float *rescale)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float largest = fa_max_over_lanes(max_of_scores(s, r) * unit[r], 4);
        const float base = fmaxf(rows->base[r], largest - HEADROOM);
        rescale[r] = ptx_ex2(rows->base[r] - base);
        rows->base[r] = base;
        rows->sum[r] *= rescale[r];
        rows->rest[r] *= rescale[r];
    }
}

/* Replaces scores by weights, and adds them to the rows' sums. */
FA_DEVICE void weigh_rows(float *s, const float *unit, row_state *rows)
{
    partial_sums sums = {{{0, 0}, {0, 0}}};
    float sum[2];
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) s[i] = fmaf(s[i], unit[i / 2 % 2], -rows->base[i / 2 % 2]);
    exponentiate(s, 0, WEIGHTS_X2, &sums);
    add_partial_sums(&sums, sum);
    add_sums(rows, sum);
}

#endif

/* Splits weights into the A operands. */
FA_DEVICE void split_weights(const float *s, uint32_t *high, uint32_t *low)
{
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) high[i] = split_two(s[2 * i], s[2 * i + 1], &low[i]);
}

#endif
