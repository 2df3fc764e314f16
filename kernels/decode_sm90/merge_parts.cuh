/*
 * Writes sums of a part to the workspace, and computes results of merged parts. For the results, a thread has four
 * columns of a row. It reads them and the row's bases at the same time, SOURCES parts at once. So nothing goes
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

/* Where the results of a row go, with a lane for each row. */
FA_DEVICE void find_results(const fa_decode_params *d, const fa_work *w, fa_result *results)
{
    if (lane_id() < w->rows) results[lane_id()] = find_result(d, w, lane_id());
}

/* The results of sums over all keys. All rows are finished at the same time, with a thread for each. In merge()
 * a warp finishes them one after another, which took longer than a key tile with 32 rows. factors: of the rows,
 * in shared memory. */
FA_DEVICE void write_sums(const fa_decode_params *d, const fa_work *w, const float *sums,
                          const fa_result *results, float *factors)
{
    const bool seen = w->parts > 0; /* else there are no sums */
    if (thread_id() < w->rows && results[thread_id()].out) {
        const int r = thread_id();
        float2 end = make_float2(NOTHING_SEEN, 0.0f);
        float lse;
        if (seen) end = *(const float2 *)(sums + r * ROW_FLOATS + VALUE_DIM);
        factors[r] = finish_result(w, &results[r], end.x, end.y, &lse);
        if (results[r].lse) *results[r].lse = lse;
    }
    sync_threads();
#pragma unroll 1 /* less code, which a block runs once */
    for (int i = thread_id(); i < w->rows * (VALUE_DIM / 4); i += THREADS) {
        const int r = i / (VALUE_DIM / 4), column = i % (VALUE_DIM / 4) * 4;
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (column >= d->attention.d_v || !results[r].out) continue;
        if (seen) x = *(const float4 *)(sums + r * ROW_FLOATS + column);
        write_columns(&d->attention, results[r].out, column, factors[r], x);
    }
}
#endif

/* Parts that are loaded at once. A lane of those that have a row loads the base and the sum of one of them. */
enum { SOURCES = 16, ROW_LANES = VALUE_DIM % 128 == 0 ? 32 : 16 };
static_assert((int)SOURCES <= (int)ROW_LANES, "a lane for each part");

/* What a thread finishes: four columns of a row. */
typedef struct merged_columns {
    const char *parts; /* the row in part 0 */
    uint32_t stride;   /* from part to part, in bytes */
    int column;
    fa_result to;
} merged_columns;

FA_DEVICE merged_columns find_columns(const fa_decode_params *d, const fa_work *w, int number)
{
    const int r = number / (VALUE_DIM / 4), column = number % (VALUE_DIM / 4) * 4;
    merged_columns own = {.stride = (uint32_t)(4 * part_floats(d)), .column = column};
    own.parts = (const char *)(find_part(d, w, 0) + min(r, w->rows - 1) * ROW_FLOATS);
    if (r < w->rows) own.to = find_result(d, w, r);
    return own;
}

/* The sum of some parts of a row. */
typedef struct merged_row {
    float base, sum;
    float4 columns;
} merged_row;

/* Adds `count` parts, at most SOURCES. from: the row in the first of them. Executed by whole warps. */
FA_DEVICE void add_parts(const merged_columns *own, const char *from, int count, merged_row *row)
{
    const int lane = lane_id() % ROW_LANES, first = lane_id() - lane;
    float2 end = make_float2(NOTHING_SEEN, 0.0f); /* of the lane's part */
    float4 columns[SOURCES];
    if (lane < count) end = *(const float2 *)(from + (uint32_t)lane * own->stride + 4 * VALUE_DIM);
    from += 4 * own->column;
#pragma unroll
    for (int i = 0; i < SOURCES; i++, from += own->stride) {
        columns[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i < count) columns[i] = *(const float4 *)from;
    }
    float base = end.x;
#pragma unroll
    for (int other = 1; other < ROW_LANES; other *= 2)
        base = fmaxf(base, __shfl_xor_sync(0xffffffffu, base, other));
    base = fmaxf(base, row->base);
    const float factor = ptx_ex2(end.x - base), before = ptx_ex2(row->base - base);
    float sum = factor * end.y;
#pragma unroll
    for (int other = 1; other < ROW_LANES; other *= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, other);
    merged_row to = {base, fmaf(before, row->sum, sum), make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
    add_scaled(&to.columns, before, row->columns);
#pragma unroll
    for (int i = 0; i < SOURCES; i++)
        add_scaled(&to.columns, __shfl_sync(0xffffffffu, factor, first + i), columns[i]);
    *row = to;
}

/* Executed by all threads of a block; each finishes its columns of a row, then those of another row. begin: the number of
 * the columns that the block's first thread finishes first; step: the threads of all blocks that merge the work tile. first: the
 * thread's first columns, which it finds before it knows whether its block merges. */
FA_DEVICE void merge_parts(const fa_decode_params *d, const fa_work *w, int begin, int step,
                           const merged_columns *first)
{
    merged_columns own = *first;
#pragma unroll 1
    for (int number = begin + thread_id(); number / 32 * 32 < w->rows * (VALUE_DIM / 4);
         number += step) {
        if (number >= begin + THREADS) own = find_columns(d, w, number);
        merged_row row = {NOTHING_SEEN, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
        const char *from = own.parts;
#pragma unroll 1
        for (int left = w->parts; left > 0; left -= SOURCES, from += SOURCES * own.stride)
            add_parts(&own, from, min(left, (int)SOURCES), &row);
        if (own.to.out) {
            float lse;
            const float factor = finish_result(w, &own.to, row.base, row.sum, &lse);
            write_columns(&d->attention, own.to.out, own.column, factor, row.columns);
            if (own.to.lse && own.column == 0) *own.to.lse = lse;
        }
    }
}

#endif
