/*
 * How the sums of a row's parts are merged (split.h): shared by the second launches of forward_sm90_split and
 * forward_sm80_split. A part's sums have a base of their own, so they are multiplied by 2^(base - top), where top is the
 * largest base. This is exact where bases are large, while weights from rounded log-sum-exps would not be.
 */
#ifndef FA_KERNELS_FORWARD_SM90_MERGE_PARTS_CUH
#define FA_KERNELS_FORWARD_SM90_MERGE_PARTS_CUH

#include "common/rows.cuh"
#include "common/x2.cuh"
#include "forward_sm90/finish.cuh"
#include "forward_sm90/split.h"
#include "ptx/convert.cuh"
#include "ptx/store.cuh"

enum { COLUMNS = FA_SM90_MERGE_COLUMNS /* of a thread */ };

/* Where a thread's columns of a row are in the results. */
typedef struct merged_columns {
    int batch, head, row, column;
    bool no_query; /* the outputs are zeros: it is behind the last query of its sequence */
    int64_t lse;   /* among the rows of all heads */
} merged_columns;

FA_DEVICE void add_part(float *out, float factor, const float4 *x)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        out[4 * i] = fmaf(factor, x[i].x, out[4 * i]);
        out[4 * i + 1] = fmaf(factor, x[i].y, out[4 * i + 1]);
        out[4 * i + 2] = fmaf(factor, x[i].z, out[4 * i + 2]);
        out[4 * i + 3] = fmaf(factor, x[i].w, out[4 * i + 3]);
    }
}

/* Whether a row sees no key of the part: its outputs are not used. */
FA_DEVICE bool sees_nothing(const fa_sm90_row_sum *s)
{
    return s->base == NO_KEY_SEEN && s->sum == s->sum;
}

/* Adds `ahead` parts to those before: outputs and sums are relative to the largest base so far. */
FA_DEVICE void add_parts(fa_sm90_row_sum *all, float *out, const fa_sm90_row_sum *parts, int ahead,
                         const float4 *x)
{
    float base = all->base;
#pragma unroll
    for (int i = 0; i < ahead; i++) base = fmaxf(base, parts[i].base);
    const float before = ptx_ex2(all->base - base);
    all->sum *= before;
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) out[i] *= before;
#pragma unroll
    for (int i = 0; i < ahead; i++) {
        if (sees_nothing(&parts[i])) continue;
        const float factor = ptx_ex2(parts[i].base - base);
        all->sum = fmaf(factor, parts[i].sum, all->sum);
        add_part(out, factor, x + 2 * i);
    }
    all->base = base;
}

FA_DEVICE void store_columns(const fa_attention_params *p, const merged_columns *at,
                             const float *out, float factor)
{
    char *row = fa_view_row(&p->out, at->batch, at->row, at->head);
    uint32_t words[COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) /* a factor of 0 gives 0, even for NaN */
        words[i] = factor == 0.0f ? 0 : fa_pack_x2(out[2 * i] * factor, out[2 * i + 1] * factor);
    if (p->out.vector == COLUMNS) {
        ptx_store_global_16(row + 2 * at->column,
                            make_uint4(words[0], words[1], words[2], words[3]));
        return;
    }
#pragma unroll
    for (int i = 0; i < COLUMNS; i++)
        if (at->column + i < p->d_v)
            ((uint16_t *)row)[at->column + i] = (uint16_t)(words[i / 2] >> 16 * (i % 2));
}

FA_DEVICE void finish_columns(const fa_attention_params *p, const merged_columns *at,
                              const fa_sm90_row_sum *all, const float *out)
{
    float lse;
    const float sink = p->sinks ? p->sinks[at->head] : -INFINITY;
    float factor = finish_sum(all->base, all->sum, sink, false, &lse);
    if (at->no_query) factor = 0.0f, lse = -INFINITY;
    store_columns(p, at, out, factor);
    if (p->lse && at->column == 0) p->lse[at->lse] = lse;
}

#endif
