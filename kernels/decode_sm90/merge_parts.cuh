/*
 * Writes sums of a part to the workspace, and computes results of merged parts. For the results, a thread has four
 * columns of a row. It reads their sums and the row's bases at the same time, SOURCES parts at once. So nothing goes
 * through shared memory, and with few parts there is only one wait for memory.
 */
#ifndef FA_KERNELS_DECODE_SM90_MERGE_PARTS_CUH
#define FA_KERNELS_DECODE_SM90_MERGE_PARTS_CUH

#include "decode_sm90/config.cuh"

#include "decode_sm80/merge.cuh"

#if !EIGHT_BITS
/* Writes the sums of a part to the workspace, in the same form. */
FA_DEVICE void store_part(const fa_decode_params *d, const fa_work *w, const float *sums)
{
    float *const to = find_part(d, w, w->part);
#pragma unroll 1
    for (int i = 4 * thread_id(); i < w->rows * ROW_FLOATS; i += 4 * THREADS)
        *(float4 *)(to + i) = *(const float4 *)(sums + i);
}

/* The results of sums over all keys. All rows are finished at the same time, with a thread for each. In merge()
 * a warp finishes them one after another, which took longer than a key tile with 32 rows. factors: of the rows,
 * in shared memory. */
FA_DEVICE void write_sums(const fa_decode_params *d, const fa_work *w, const float *sums,
                          float *factors)
{
    const bool seen = w->parts > 0; /* else there are no sums */
    if (thread_id() < w->rows) {
        const int r = thread_id();
        float2 end = make_float2(NOTHING_SEEN, 0.0f);
        if (seen) end = *(const float2 *)(sums + r * ROW_FLOATS + VALUE_DIM);
        factors[r] = finish_row(d, w, r, end.x, end.y);
    }
    sync_threads();
#pragma unroll 4
    for (int i = thread_id(); i < w->rows * (VALUE_DIM / 4); i += THREADS) {
        const int r = i / (VALUE_DIM / 4), column = i % (VALUE_DIM / 4) * 4;
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (column >= d->attention.d_v) continue;
        if (seen) x = *(const float4 *)(sums + r * ROW_FLOATS + column);
        write_output(d, w, r, column, factors[r], x);
    }
}
#endif

enum { SOURCES = 16 };

/* The sum of some parts of a row. */
typedef struct merged_row {
    float base, sum;
    float4 columns;
} merged_row;

FA_DEVICE void add_scaled(float4 *sum, float factor, float4 x)
{
    sum->x = fmaf(factor, x.x, sum->x);
    sum->y = fmaf(factor, x.y, sum->y);
    sum->z = fmaf(factor, x.z, sum->z);
    sum->w = fmaf(factor, x.w, sum->w);
}

/* Adds the parts from `part` on, at most SOURCES, by number. from: the row in part 0. */
FA_DEVICE void add_parts(const float *from, int64_t stride, int part, int count, int column,
                         merged_row *row)
{
    float2 ends[SOURCES];
    float4 columns[SOURCES];
    float base = row->base;
#pragma unroll
    for (int i = 0; i < SOURCES; i++) {
        const float *at = from + (part + i) * stride;
        ends[i] = make_float2(NOTHING_SEEN, 0.0f);
        columns[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (part + i >= count) continue;
        ends[i] = *(const float2 *)(at + VALUE_DIM);
        columns[i] = *(const float4 *)(at + column);
    }
#pragma unroll
    for (int i = 0; i < SOURCES; i++) base = fmaxf(base, ends[i].x);
    const float before = ptx_ex2(row->base - base);
    merged_row to = {base, before * row->sum, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
    add_scaled(&to.columns, before, row->columns);
#pragma unroll
    for (int i = 0; i < SOURCES; i++) {
        const float factor = ptx_ex2(ends[i].x - base);
        to.sum = fmaf(factor, ends[i].y, to.sum);
        add_scaled(&to.columns, factor, columns[i]);
    }
    *row = to;
}

/* Executed by all threads of a block; each finishes its columns of a row. */
FA_DEVICE void merge_parts(const fa_decode_params *d, const fa_work *w)
{
    const float *first = find_part(d, w, 0);
    const int64_t stride = part_floats(d);
#pragma unroll 1
    for (int i = thread_id(); i < w->rows * (VALUE_DIM / 4); i += THREADS) {
        const int r = i / (VALUE_DIM / 4), column = i % (VALUE_DIM / 4) * 4;
        merged_row row = {NOTHING_SEEN, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
        if (column >= d->attention.d_v) continue;
#pragma unroll 1
        for (int part = 0; part < w->parts; part += SOURCES)
            add_parts(first + r * ROW_FLOATS, stride, part, w->parts, column, &row);
        write_output(d, w, r, column, finish_row(d, w, r, row.base, row.sum), row.columns);
    }
}

#endif
