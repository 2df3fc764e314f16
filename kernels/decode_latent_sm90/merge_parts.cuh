/*
 * Results of merged parts, or zeros of rows without keys. What is added up, and in which order, is as in decode_sm80/merge.cuh.
 * But a thread has all loads of some columns on their way at the same time.
 */
#ifndef FA_KERNELS_DECODE_LATENT_SM90_MERGE_PARTS_CUH
#define FA_KERNELS_DECODE_LATENT_SM90_MERGE_PARTS_CUH

#include "decode_latent_sm90/config.cuh"

#include "decode_latent_sm90/pipeline.cuh"
#include "decode_latent_sm90/results.cuh"
#include "decode_sm80/merge.cuh"

/* What a thread loads at once: vectors of four columns, of so many parts. */
enum { VECTORS_AT_ONCE = 2, PARTS_AT_ONCE = 8, ROW_VECTORS = VALUE_DIM / 4 };

/* Vectors i and i + THREADS of the rows, of at most PARTS_AT_ONCE parts. end: the rows' vectors. */
FA_DEVICE void merge_vectors(const fa_decode_params *d, const fa_work *w, const fa_sources *from,
                             const fa_merged *merged, int i, int end)
{
    float4 x[VECTORS_AT_ONCE][PARTS_AT_ONCE];
#pragma unroll
    for (int n = 0; n < VECTORS_AT_ONCE; n++) {
        const int own = i + n * THREADS, r = own / ROW_VECTORS, column = own % ROW_VECTORS * 4;
        const float *at = from->first + r * ROW_FLOATS + column;
#pragma unroll
        for (int part = 0; part < PARTS_AT_ONCE; part++, at += from->stride)
            if (own < end && part < from->count && column < d->attention.d_v)
                x[n][part] = *(const float4 *)at;
    }
#pragma unroll
    for (int n = 0; n < VECTORS_AT_ONCE; n++) {
        const int own = i + n * THREADS, r = own / ROW_VECTORS, column = own % ROW_VECTORS * 4;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (own >= end || column >= d->attention.d_v) continue;
#pragma unroll
        for (int part = 0; part < PARTS_AT_ONCE; part++)
            if (part < from->count)
                add_scaled(&sum, merged->factors[r * from->count + part], x[n][part]);
        write_output(d, w, r, column, merged->rows[2 * r], sum);
    }
}

/* By all consumers. */
FA_DEVICE void merge_rows(const pipeline *pipe, const fa_decode_params *d)
{
    const fa_work *w = &pipe->state->work;
    const fa_merged merged = {(float *)(void *)pipe->pairs, (float *)(void *)pipe->scores};
    fa_sources parts = {NULL, 0, 0};
    if (w->parts > 1) parts = (fa_sources){find_part(d, w, 0), part_floats(d), w->parts};
    if (parts.count > PARTS_AT_ONCE) {
        merge(d, w, &parts, &merged, NULL);
        return;
    }
    weigh_sources(d, w, &parts, true, &merged);
#pragma unroll 1
    for (int i = FIRST_ROW(w) * ROW_VECTORS + thread_id(); i < w->rows * ROW_VECTORS;
         i += VECTORS_AT_ONCE * THREADS)
        merge_vectors(d, w, &parts, &merged, i, w->rows * ROW_VECTORS);
}

#endif
