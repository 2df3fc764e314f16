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
 * block's columns; columns: their number; vectors: it is aligned for pairs. */
FA_DEVICE void store_row(bool vectors, const float *out, int r, float factor, float *row,
                         int columns)
{
    const int first = (int)threadIdx.x % 4 * 2;
    if (vectors) {
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

/* The first row of a part's sums among the rows of all parts; -1: the work tile has all of its keys. */
FA_DEVICE int find_part_row(const fa_sm90_split *split, const work_tile *w)
{
    if (split->parts == 0) return -1;
    const int64_t at = w->out - (char *)split->out, row = 4 * split->value_dim;
    const int64_t rows = (int64_t)(split->first_task[1] - split->first_task[0]) * QUERIES;
    return at < 0 || at >= rows * row ? -1 : (int)((uint64_t)at / (uint64_t)row);
}

/* Stores the bases and the sums of a part's rows. Their outputs are stored as they are: all parts are divided together. */
FA_DEVICE void store_sums(const fa_sm90_split *split, const work_tile *w, const row_state *rows,
                          int first, int part_row)
{
    float sum[2];
    find_sums(rows, sum);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const fa_sm90_row_sum both = {rows->base[r], sum[r]};
        if (first + 8 * r < w->rows && threadIdx.x % 4 == 0 && FIRST_COLUMN == 0)
            split->sums[part_row + first + 8 * r] = both;
    }
}

/* Stores a consumer's outputs and log-sum-exp; zeros and -infinity in rows without a query. Of a part of the keys its sums. */
FA_DEVICE void store_outputs(const fa_attention_params *p, const fa_sm90_params *s,
                             const work_tile *w, const row_state *rows, const float *out,
                             int consumer)
{
    const int first = row_of(consumer, 0), part_row = find_part_row(&s->split, w);
    const bool whole = part_row < 0;
    float factor[2] = {1.0f, 1.0f};
    if (whole) find_factors(p, w, rows, first, factor);
    else store_sums(&s->split, w, rows, first, part_row);
    const int64_t pitch = whole ? p->out.stride[1] : s->split.value_dim;
    const int columns = whole ? (int)p->d_v : s->split.value_dim;
    const bool vectors = !whole || p->out.vector;
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (first + 8 * r < w->rows)
            store_row(vectors, out, r, factor[r],
                      (float *)w->out + (first + 8 * r) * pitch + FIRST_COLUMN,
                      columns - FIRST_COLUMN);
}

#endif
