/*
 * What a block leaves: results, if it has all keys of its work tile, or a part's sums
 * (decode_sm80/merge.cuh).
 */
#ifndef FA_KERNELS_DECODE_LATENT_SM90_STORE_CUH
#define FA_KERNELS_DECODE_LATENT_SM90_STORE_CUH

#include "decode_latent_sm90/config.cuh"

#include "common/exchange.cuh"
#include "common/reduce.cuh"
#include "decode_latent_sm90/pipeline.cuh"
#include "decode_latent_sm90/values.cuh"
#include "decode_sm80/merge.cuh"
#include "ptx/store.cuh"

/* The sums of the weights of the thread's two rows. */
FA_DEVICE void find_row_sums(const row_sums *own, float sum[2])
{
#pragma unroll
    for (int half = 0; half < 2; half++) sum[half] = fa_sum_over_lanes(own->at[half], 4);
}

/* ---- Results, from registers ----------------------------------------------------------------- */

/* Whether rows of results are stored from registers: in vectors of 16 bytes. */
FA_DEVICE bool stores_vectors(const fa_decode_params *d, const fa_work *w)
{
    return w->parts == 1 && d->attention.out.vector == 8;
}

/* The result's row r of the work tile; NULL: there is none. */
FA_DEVICE char *find_result(const fa_decode_params *d, const fa_work *w, int r)
{
    const fa_tile *t = &w->tile;
    const int head = head_of(d, r);
    const int64_t i = t->first + query_of(d, r);
    if (r >= w->rows || head >= w->heads || i >= t->room_q) return NULL;
    return fa_view_row(&d->attention.out, t->block_q, t->start_q + i, t->head + head);
}

/* Two results; zeros for a factor of 0, whatever the sums are. */
FA_DEVICE uint32_t scaled_x2(const float *sums, float factor)
{
    return factor == 0.0f ? 0 : fa_pack_x2(sums[0] * factor, sums[1] * factor);
}

/* By a consumer of values: its half of the columns. A lane stores eight columns of a row at
 * a time. */
FA_DEVICE void store_result_columns(const pipeline *pipe, const fa_decode_params *d,
                                    const fa_work *w, const float *out, int half,
                                    const float sum[2])
{
    const int t = lane_id() % 4, first = half * GROUP_COLUMNS + 8 * t;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int r = row_of(0, i);
        char *row = find_result(d, w, r);
        const float factor = row ? finish_row(d, w, r, pipe->rows[r].base, sum[i]) : 0.0f;
#pragma unroll
        for (int j = 0; j < OUTPUTS / 4; j += 4) {
            uint32_t x[4];
#pragma unroll
            for (int n = 0; n < 4; n++) x[n] = scaled_x2(out + 4 * (j + n) + 2 * i, factor);
            fa_exchange_words(x, t);
            if (row && first + 8 * j < d->attention.d_v)
                ptx_store_global_16(row + 2 * (first + 8 * j), make_uint4(x[0], x[1], x[2], x[3]));
        }
    }
}

/* ---- Parts, and results in other rows, through shared memory --------------------------------- */

/* By a consumer of values: the ends of rows. factors: of the rows of results. */
FA_DEVICE void store_row_ends(const pipeline *pipe, const fa_decode_params *d, const fa_work *w,
                              const float sum[2], float *factors)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int r = row_of(0, half);
        const float base = pipe->rows[r].base;
        if (lane_id() % 4 > 0 || r >= w->rows) continue;
        if (w->parts == 1) factors[r] = finish_row(d, w, r, base, sum[half]);
        else
            *(float2 *)(find_part(d, w, w->part) + r * ROW_FLOATS + VALUE_DIM) =
                make_float2(base, sum[half]);
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
    char *row = find_result(d, w, r);
    if (!row) return;
#pragma unroll 1
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
