/*
 * The end of a work tile: outputs are divided by the sums of weights and stored, with the
 * log-sum-exp.
 */
#ifndef FA_KERNELS_FORWARD_TF32_SM90_STORE_CUH
#define FA_KERNELS_FORWARD_TF32_SM90_STORE_CUH

#include "forward_tf32_sm90/config.cuh"
#include "forward_sm90/factors.cuh"
#include "forward_sm90/warp.cuh"
#include "forward_sm90/work_tile.cuh"
#include "ptx/store.cuh"

/* Two adjacent outputs of a row, times its factor. If the factor is 0 the result is 0, whatever the
 * outputs are. */
FA_DEVICE uint2 finish_outputs(const float *x, float factor)
{
    if (factor == 0.0f) return make_uint2(0, 0);
    return make_uint2(__float_as_uint(x[0] * factor), __float_as_uint(x[1] * factor));
}

/* The thread's part of row r: four lanes store 32 contiguous bytes. row: its first element in the
 * block's columns; columns: their number. */
FA_DEVICE void store_row(const fa_attention_params *p, const float *out, int r, float factor,
                         float *row, int columns)
{
    const int first = (int)threadIdx.x % 4 * 2;
    if (p->out.vector) {
#pragma unroll
        for (int j = 0; j < VALUE_DIM / 8; j++)
            if (8 * j + first < columns)
                ptx_store_global_8(row + 8 * j + first,
                                   finish_outputs(out + 4 * j + 2 * r, factor));
        return;
    }
#pragma unroll
    for (int j = 0; j < VALUE_DIM / 8; j++) {
        const uint2 two = finish_outputs(out + 4 * j + 2 * r, factor);
        if (8 * j + first < columns) row[8 * j + first] = __uint_as_float(two.x);
        if (8 * j + first + 1 < columns) row[8 * j + first + 1] = __uint_as_float(two.y);
    }
}

/* Stores a consumer's outputs and log-sum-exp; zeros and -infinity in rows without a query. */
FA_DEVICE void store_outputs(const fa_attention_params *p, const work_tile *w,
                             const row_state *rows, const float *out, int consumer)
{
    const int first = row_of(consumer, 0);
    float factor[2];
    find_factors(p, w, rows, first, factor);
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (first + 8 * r < w->rows)
            store_row(p, out, r, factor[r],
                      (float *)w->out + (first + 8 * r) * p->out.stride[1] + FIRST_COLUMN,
                      p->d_v - FIRST_COLUMN);
}

#endif
