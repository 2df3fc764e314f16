/*
 * What a block leaves: results, if it has all keys of its work tile, or a part's sums
 * (decode_sm80/merge.cuh).
 */
#ifndef FA_KERNELS_DECODE_LATENT_SM90_STORE_CUH
#define FA_KERNELS_DECODE_LATENT_SM90_STORE_CUH

#include "decode_latent_sm90/config.cuh"

#include "common/reduce.cuh"
#include "decode_latent_sm90/pipeline.cuh"
#include "decode_latent_sm90/scores.cuh"
#include "decode_sm80/merge.cuh"

/* By the consumer of scores: the ends of rows. factors: of the rows of results. */
FA_DEVICE void store_row_ends(const fa_decode_params *d, const fa_work *w, const row_sums *rows,
                              float *factors)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int r = row_of(0, half);
        const float base = rows->base[half], sum = fa_sum_over_lanes(rows->sum[half], 4);
        if (lane_id() % 4 > 0 || r >= w->rows) continue;
        if (w->parts == 1) factors[r] = finish_row(d, w, r, base, sum);
        else
            *(float2 *)(find_part(d, w, w->part) + r * ROW_FLOATS + VALUE_DIM) =
                make_float2(base, sum);
    }
}

/* By the consumers of values: their half of the columns, to shared memory. */
FA_DEVICE void share_sums(const float *out, int half, float *sums)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float *row = sums + row_of(0, i) * ROW_FLOATS + half * GROUP_COLUMNS + lane_id() % 4 * 2;
#pragma unroll
        for (int j = 0; j < OUTPUTS / 4; j++)
            *(float2 *)(row + 8 * j) = make_float2(out[4 * j + 2 * i], out[4 * j + 2 * i + 1]);
    }
}

/* By all consumers: from there to global memory, whole rows at a time. */
FA_DEVICE void store_sums(const fa_decode_params *d, const fa_work *w, const float *sums,
                          const float *factors)
{
    float *const part = w->parts > 1 ? find_part(d, w, w->part) : NULL;
#pragma unroll 4
    for (int i = thread_id(); i < w->rows * (VALUE_DIM / 4); i += THREADS) {
        const int r = i / (VALUE_DIM / 4), column = i % (VALUE_DIM / 4) * 4;
        const float4 x = *(const float4 *)(sums + r * ROW_FLOATS + column);
        if (column >= d->attention.d_v) continue;
        if (part) *(float4 *)(part + r * ROW_FLOATS + column) = x;
        else write_output(d, w, r, column, factors[r], x);
    }
}

#endif
