/*
 * Merging: a block's warps have sums over different keys, and so have the parts of a sequence. Both
 * are rows of ROW_FLOATS floats, of warps in shared memory and of parts in the workspace:
 * unnormalized outputs, the base of their weights and the weights' sum. Sources are added up in the
 * order of their numbers, so a result is the same in every run.
 */
#ifndef FA_KERNELS_DECODE_SM80_MERGE_CUH
#define FA_KERNELS_DECODE_SM80_MERGE_CUH

#include "common/reduce.cuh"
#include "common/rows.cuh"
#include "common/softmax.cuh"
#include "decode_sm80/bases.cuh"
#include "decode_sm80/config.cuh"
#include "decode_sm80/fragments.cuh"
#include "decode_sm80/work.cuh"

/* Kernels with their own finish_row and write_output define this. */
#ifndef OWN_RESULTS
#define OWN_RESULTS 0
#endif

/* The sums of some sources: row r of source i is at first + i * stride + r * ROW_FLOATS. */
typedef struct fa_sources {
    const float *first;
    int64_t stride;
    int count;
} fa_sources;

/* For the merged rows, in shared memory: each source's factor; and for each row the base and the
 * sum of weights, or at the end the factor of the output. */
typedef struct fa_merged {
    float *factors, *rows;
} fa_merged;

#if !LATENT /* in latent.cuh warps share the sums */
/* ---- The warps' sums ------------------------------------------------------------------------- */

#if EIGHT_BITS
/* Stores the columns of eight rows, of a transposed output. */
FA_DEVICE void store_half(const fa_output *o, int i, float *to)
{
    float *row = to + (8 * i + lane_id() % 4 * 2) * ROW_FLOATS + lane_id() / 4 * 2;
#pragma unroll
    for (int n = 0; n < D_STEPS; n++) {
        const float *x = o->at[i][n];
        *(float2 *)(row + 16 * n) = make_float2(x[0], x[2]);
        *(float2 *)(row + 16 * n + ROW_FLOATS) = make_float2(x[1], x[3]);
    }
}
#else
FA_DEVICE void store_half(const fa_output *o, int i, float *to)
{
    float *row = to + row_of(i / 2, i % 2) * ROW_FLOATS + lane_id() % 4 * 2;
#pragma unroll
    for (int n = 0; n < D_TILES; n++)
        *(float2 *)(row + 8 * n) =
            make_float2(o->at[i / 2][n][i % 2 * 2], o->at[i / 2][n][i % 2 * 2 + 1]);
}
#endif

/* Stores the sums in the warp's own part of shared memory. */
FA_DEVICE void store_warp(const fa_output *o, float *to)
{
#pragma unroll
    for (int i = 0; i < ROWS / 8; i++) {
        const float sum = fa_sum_over_lanes(o->sum[i / 2][i % 2], 4);
        store_half(o, i, to);
        if (lane_id() % 4 == 0)
            *(float2 *)(to + row_of(i / 2, i % 2) * ROW_FLOATS + VALUE_DIM) =
                make_float2(o->base[i / 2][i % 2], sum);
    }
}

#endif

/* ---- Factors --------------------------------------------------------------------------------- */

#if !OWN_RESULTS
/* Row r of the output; NULL: there is none. */
FA_DEVICE char *find_output_row(const fa_decode_params *d, const fa_work *w, int r)
{
    const fa_tile *t = &w->tile;
    const int head = head_of(d, r);
    const int64_t i = t->first + query_of(d, r);
    if (head >= w->heads || i >= t->room_q) return NULL;
    return fa_view_row(&d->attention.out, t->block_q, t->start_q + i, t->head + head);
}

/* Where the results of a row go. */
typedef struct fa_result {
    char *out;  /* NULL: the row does not exist */
    float *lse; /* NULL: not wanted */
    float sink;
    bool has_query; /* else zeros are written */
} fa_result;

FA_DEVICE fa_result find_result(const fa_decode_params *d, const fa_work *w, int r)
{
    const fa_attention_params *p = &d->attention;
    const fa_tile *t = &w->tile;
    const int64_t head = t->head + head_of(d, r), i = t->first + query_of(d, r);
    fa_result to = {find_output_row(d, w, r), NULL, -INFINITY, i < t->n_q};
    if (!to.out) return to;
    if (p->lse) to.lse = p->lse + (t->block_q * p->heads_q + head) * p->rows_q + t->start_q + i;
    if (p->sinks) to.sink = p->sinks[head];
    return to;
}

/* Finishes a row that exists; returns the factor of its output. */
FA_DEVICE float finish_result(const fa_work *w, const fa_result *to, float base, float sum,
                              float *lse)
{
    float factor =
        fa_softmax_finish(base == NOTHING_SEEN ? -INFINITY : base * LN2, sum, to->sink, lse);
    if (!to->has_query) *lse = -INFINITY, factor = 0.0f;
#if EIGHT_BITS
    if (factor != 0.0f) factor *= w->value_scale;
#else
    (void)w;
#endif
    return factor;
}

/* Finishes row r, with its log-sum-exp; returns the factor of its output. */
FA_DEVICE float finish_row(const fa_decode_params *d, const fa_work *w, int r, float base,
                           float sum)
{
    const fa_result to = find_result(d, w, r);
    if (!to.out) return 0.0f;
    float lse;
    const float factor = finish_result(w, &to, base, sum, &lse);
    if (to.lse) *to.lse = lse;
    return factor;
}
#endif

/* Executed with a warp for each row and a lane for each source. last: the row is complete. */
FA_DEVICE void weigh_sources(const fa_decode_params *d, const fa_work *w, const fa_sources *from,
                             bool last, const fa_merged *to)
{
#pragma unroll 1
    for (int r = FIRST_ROW(w) + warp_id(); r < w->rows; r += WARPS) {
        float2 of[FA_DECODE_PARTS / 32];
        float base = NOTHING_SEEN, sum = 0.0f;
#pragma unroll
        for (int n = 0; n < FA_DECODE_PARTS / 32; n++) {
            const int i = 32 * n + lane_id();
            of[n] = make_float2(NOTHING_SEEN, 0.0f);
            if (i < from->count)
                of[n] =
                    *(const float2 *)(from->first + i * from->stride + r * ROW_FLOATS + VALUE_DIM);
            base = fmaxf(base, of[n].x);
        }
        base = fa_warp_max(base);
#pragma unroll
        for (int n = 0; n < FA_DECODE_PARTS / 32; n++) {
            const int i = 32 * n + lane_id();
            const float factor = ptx_ex2(of[n].x - base);
            sum = fmaf(factor, of[n].y, sum);
            if (i < from->count) to->factors[r * from->count + i] = factor;
        }
        sum = fa_warp_sum(sum);
        if (lane_id() > 0) continue;
        to->rows[2 * r] = last ? finish_row(d, w, r, base, sum) : base;
        to->rows[2 * r + 1] = sum;
    }
    sync_threads();
}

/* ---- Sums ------------------------------------------------------------------------------------ */

FA_DEVICE void add_scaled(float4 *sum, float factor, float4 x)
{
    sum->x = fmaf(factor, x.x, sum->x);
    sum->y = fmaf(factor, x.y, sum->y);
    sum->z = fmaf(factor, x.z, sum->z);
    sum->w = fmaf(factor, x.w, sum->w);
}

/* Four columns of a row. */
FA_DEVICE float4 add_sources(const fa_sources *from, const float *factors, int r, int column)
{
    const float *at = from->first + r * ROW_FLOATS + column;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 16
    for (int i = 0; i < from->count; i++, at += from->stride) {
        const float4 x = *(const float4 *)at;
        const float factor = factors[r * from->count + i];
        sum.x = fmaf(factor, x.x, sum.x);
        sum.y = fmaf(factor, x.y, sum.y);
        sum.z = fmaf(factor, x.z, sum.z);
        sum.w = fmaf(factor, x.w, sum.w);
    }
    return sum;
}

#if !OWN_RESULTS
/* Writes four columns: zeros if the factor is 0, whatever the row holds. row: of the output. */
FA_DEVICE void write_columns(const fa_attention_params *p, char *row, int column, float factor,
                             float4 x)
{
    if (factor == 0.0f) x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    else x = make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
    fa_store4(row, &p->out, column, p->d_v, x);
}

/* The same of row r, if it exists. */
FA_DEVICE void write_output(const fa_decode_params *d, const fa_work *w, int r, int column,
                            float factor, float4 x)
{
    char *row = find_output_row(d, w, r);
    if (row) write_columns(&d->attention, row, column, factor, x);
}
#endif

/* Merges the sources: into a part's row of sums, or, if `to` is NULL, into results. Executed by all
 * threads. */
FA_DEVICE void merge(const fa_decode_params *d, const fa_work *w, const fa_sources *from,
                     const fa_merged *merged, float *to)
{
    weigh_sources(d, w, from, !to, merged);
#pragma unroll 1
    for (int i = FIRST_ROW(w) * (VALUE_DIM / 4) + thread_id(); i < w->rows * (VALUE_DIM / 4);
         i += THREADS) {
        const int r = i / (VALUE_DIM / 4), column = i % (VALUE_DIM / 4) * 4;
        if (column >= d->attention.d_v) continue;
        const float4 x = add_sources(from, merged->factors, r, column);
        if (to) *(float4 *)(to + r * ROW_FLOATS + column) = x;
        else write_output(d, w, r, column, merged->rows[2 * r], x);
    }
    if (!to) return;
#pragma unroll 1
    for (int r = FIRST_ROW(w) + thread_id(); r < w->rows; r += THREADS)
        *(float2 *)(to + r * ROW_FLOATS + VALUE_DIM) =
            make_float2(merged->rows[2 * r], merged->rows[2 * r + 1]);
}

/* ---- Parts ----------------------------------------------------------------------------------- */

/* The floats of a part's sums of a work tile, whose number of rows this bounds. */
FA_DEVICE int64_t part_floats(const fa_decode_params *d)
{
    return (int64_t)d->heads * d->queries * ROW_FLOATS;
}

FA_DEVICE float *find_part(const fa_decode_params *d, const fa_work *w, int part)
{
    return d->sums + ((w->task - d->whole) * d->parts + part) * part_floats(d);
}

#endif
