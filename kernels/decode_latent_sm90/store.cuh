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

/* Zeros for a factor of 0, whatever x is. */
FA_DEVICE float4 scaled(float4 x, float factor)
{
    if (factor == 0.0f) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
}

/* A row of results, by a warp. */
FA_DEVICE void store_result(const fa_decode_params *d, const fa_work *w, int r, const float *sums,
                            float factor)
{
    const fa_attention_params *p = &d->attention;
    const fa_tile *t = &w->tile;
    const int head = head_of(d, r);
    const int64_t i = t->first + query_of(d, r);
    if (head >= w->heads || i >= t->room_q) return;
    char *row = fa_view_row(&p->out, t->block_q, t->start_q + i, t->head + head);
#pragma unroll
    for (int column = lane_id() * 4; column < VALUE_DIM; column += 32 * 4)
        fa_store4(row, &p->out, column, p->d_v, scaled(*(const float4 *)(sums + column), factor));
}

/* The same of a part. */
FA_DEVICE void store_part(const fa_decode_params *d, const fa_work *w, int r, const float *sums)
{
    float *row = find_part(d, w, w->part) + r * ROW_FLOATS;
#pragma unroll
    for (int column = lane_id() * 4; column < VALUE_DIM; column += 32 * 4)
        if (column < d->attention.d_v) *(float4 *)(row + column) = *(const float4 *)(sums + column);
}

/* By all consumers: from there to global memory, whole rows a warp. */
FA_DEVICE void store_sums(const fa_decode_params *d, const fa_work *w, const float *sums,
                          const float *factors)
{
#pragma unroll 1
    for (int r = warp_id(); r < w->rows; r += WARPS) {
        if (w->parts > 1) store_part(d, w, r, sums + r * ROW_FLOATS);
        else store_result(d, w, r, sums + r * ROW_FLOATS, factors[r]);
    }
}

#endif
