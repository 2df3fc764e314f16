/*
 * Merging: a block's warps have sums over different keys, and so have the parts of a sequence. Both are rows of ROW_FLOATS
 * floats, of warps in shared memory and of parts in the workspace: unnormalized outputs, the base of their weights and
 * the weights' sum. Sources are added up by number, so a result is the same in every run.
 */
#ifndef FA_KERNELS_DECODE_SM80_MERGE_CUH
#define FA_KERNELS_DECODE_SM80_MERGE_CUH

#include "common/reduce.cuh"
#include "common/rows.cuh"
#include "common/softmax.cuh"
#include "decode_sm80/config.cuh"
#include "decode_sm80/logits.cuh"
#include "decode_sm80/work.cuh"

#define LN2 0.69314718055994530942f

/* The sums of some sources: row r of source 0 is at first + r * ROW_FLOATS, of source i behind it at
 * second + (i - 1) * stride + r * ROW_FLOATS. */
typedef struct fa_sources {
    const float *first, *second;
    int64_t stride;
    int count;
} fa_sources;

FA_DEVICE const float *find_source(const fa_sources *from, int i)
{
    return i == 0 ? from->first : from->second + (i - 1) * from->stride;
}

#if !LATENT /* in latent.cuh sums are the block's */
/* ---- The warps' sums ------------------------------------------------------------------------- */

#if EIGHT_BITS
/* The columns of eight rows, of a transposed output. */
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

/* To the warp's own part of shared memory. */
FA_DEVICE void store_warp(const fa_output *o, float *to)
{
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) {
        const float sum = fa_sum_over_lanes(o->sum[i / 2][i % 2], 4);
        store_half(o, i, to);
        if (lane_id() % 4 == 0)
            *(float2 *)(to + row_of(i / 2, i % 2) * ROW_FLOATS + VALUE_DIM) =
                make_float2(o->base[i / 2][i % 2], sum);
    }
}

#endif

/* ---- The end of a row ------------------------------------------------------------------------- */

/* Returns the factor of row r's output. writes: and writes its log-sum-exp. */
FA_DEVICE float finish_row(const fa_decode_params *d, const fa_work *w, int r, float base,
                           float sum, bool writes)
{
    const fa_attention_params *p = &d->attention;
    const fa_tile *t = &w->tile;
    const int64_t head = t->head + head_of(d, r), i = t->first + query_of(d, r);
    if (head_of(d, r) >= w->heads || i >= t->room_q) return 0.0f;
    float lse, factor = fa_softmax_finish(base == NOTHING_SEEN ? -INFINITY : base * LN2, sum,
                                          p->sinks ? p->sinks[head] : -INFINITY, &lse);
    if (i >= t->n_q) lse = -INFINITY, factor = 0.0f;
#if EIGHT_BITS
    if (factor != 0.0f) factor *= w->value_scale;
#endif
    if (p->lse && writes)
        p->lse[(t->block_q * p->heads_q + head) * p->rows_q + t->start_q + i] = lse;
    return factor;
}

/* ---- Sums ------------------------------------------------------------------------------------ */

/* Sources that a thread reads at once, before it waits for any of them. */
enum { SOURCES_AT_ONCE = EIGHT_BITS ? 8 : 16 };

/* Four columns of a row, added up; and the base and the sum of its weights. */
typedef struct fa_merged {
    float4 x;
    float base, sum;
} fa_merged;

FA_DEVICE void scale_merged(fa_merged *m, float factor)
{
    m->x = make_float4(m->x.x * factor, m->x.y * factor, m->x.z * factor, m->x.w * factor);
    m->sum *= factor;
}

FA_DEVICE void add_source(fa_merged *m, float factor, float4 x, float sum)
{
    m->x.x = fmaf(factor, x.x, m->x.x);
    m->x.y = fmaf(factor, x.y, m->x.y);
    m->x.z = fmaf(factor, x.z, m->x.z);
    m->x.w = fmaf(factor, x.w, m->x.w);
    m->sum = fmaf(factor, sum, m->sum);
}

/* at_once: a constant, at most SOURCES_AT_ONCE. */
FA_DEVICE fa_merged add_sources(const fa_sources *from, int at_once, int r, int column)
{
    fa_merged m = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), NOTHING_SEEN, 0.0f};
#pragma unroll 1
    for (int first = 0; first < from->count; first += at_once) {
        float4 x[SOURCES_AT_ONCE];
        float2 end[SOURCES_AT_ONCE];
        float base = m.base;
#pragma unroll
        for (int n = 0; n < SOURCES_AT_ONCE; n++) {
            if (n >= at_once) continue;
            x[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            end[n] = make_float2(NOTHING_SEEN, 0.0f);
            if (first + n >= from->count) continue;
            const float *row = find_source(from, first + n) + r * ROW_FLOATS;
            x[n] = *(const float4 *)(row + column);
            end[n] = *(const float2 *)(row + VALUE_DIM);
        }
#pragma unroll
        for (int n = 0; n < SOURCES_AT_ONCE; n++)
            if (n < at_once) base = fmaxf(base, end[n].x);
        scale_merged(&m, ptx_ex2(m.base - base));
        m.base = base;
#pragma unroll
        for (int n = 0; n < SOURCES_AT_ONCE; n++)
            if (n < at_once) add_source(&m, ptx_ex2(end[n].x - base), x[n], end[n].y);
    }
    return m;
}

/* Zeros for a factor of 0, whatever the row holds. */
FA_DEVICE void write_output(const fa_decode_params *d, const fa_work *w, int r, int column,
                            float factor, float4 x)
{
    const fa_attention_params *p = &d->attention;
    const fa_tile *t = &w->tile;
    const int64_t i = t->first + query_of(d, r);
    if (head_of(d, r) >= w->heads || i >= t->room_q) return;
    if (factor == 0.0f) x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    else x = make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
    fa_store4(fa_view_row(&p->out, t->block_q, t->start_q + i, t->head + head_of(d, r)), &p->out,
              column, p->d_v, x);
}

/* Merges the sources: into a part's record, or, with to NULL, into results. All threads. at_once: as above. */
FA_DEVICE void merge(const fa_decode_params *d, const fa_work *w, const fa_sources *from,
                     int at_once, float *to)
{
#pragma unroll 1
    for (int i = FIRST_ROW(w) * (VALUE_DIM / 4) + thread_id(); i < w->rows * (VALUE_DIM / 4);
         i += THREADS) {
        const int r = i / (VALUE_DIM / 4), column = i % (VALUE_DIM / 4) * 4;
        if (column >= d->attention.d_v) continue;
        const fa_merged m = add_sources(from, at_once, r, column);
        if (!to) {
            const float factor = finish_row(d, w, r, m.base, m.sum, column == 0);
            write_output(d, w, r, column, factor, m.x);
            continue;
        }
        *(float4 *)(to + r * ROW_FLOATS + column) = m.x;
        if (column == 0) *(float2 *)(to + r * ROW_FLOATS + VALUE_DIM) = make_float2(m.base, m.sum);
    }
}

/* ---- Parts ----------------------------------------------------------------------------------- */

/* Where parts are in the workspace: of a work tile one behind the other. Of shares, block b stores part i > 0 of a work tile at
 * number b, and part 0 of another one behind those of all blocks. */
FA_DEVICE int64_t number_of_part(const fa_decode_params *d, const fa_work *w, int part)
{
#if HAS_SHARES
    if (d->shares) return w->task + (part == 0 ? d->shares : part * d->abreast);
#endif
    return w->task * d->parts + part;
}

/* Floats of a part's sums of a work tile, whose rows are at most so many. */
FA_DEVICE int64_t part_floats(const fa_decode_params *d)
{
    return (int64_t)d->heads * d->queries * ROW_FLOATS;
}

FA_DEVICE float *find_part(const fa_decode_params *d, const fa_work *w, int part)
{
    return d->sums + number_of_part(d, w, part) * part_floats(d);
}

/* All parts of a work tile. */
FA_DEVICE fa_sources find_parts(const fa_decode_params *d, const fa_work *w)
{
    fa_sources parts = {find_part(d, w, 0), find_part(d, w, 1), part_floats(d), w->parts};
#if HAS_SHARES
    if (d->shares) parts.stride *= d->abreast;
#endif
    return parts;
}

#endif
