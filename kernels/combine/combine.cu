/*
 * Merging partial attention by log-sum-exp: out = sum_p exp(lse_p - lse) * part_p, with
 * lse = log sum_p exp(lse_p). A part whose lse is -infinity is empty and its values are not read.
 *
 * A warp computes a row (batch item, query, head), and a lane four columns at a time. Nearly all
 * the time is spent on reading. The parts' addresses are parameters of the kernel, so nothing has
 * to be copied to the device first. If there are too many parts for one launch, there are several:
 * the first part of each is the result of the previous one, in out and lse or in the workspace.
 *
 * Compile-time parameter: MAX_PARTS, the most parts of a launch (kernels/variants.h).
 */
#include "common/reduce.cuh"
#include "common/rows.cuh"
#include "combine/combine.h"

/* Bytes of a launch's parameters, with drivers up to CUDA 12.0 and later ones. */
#if MAX_PARTS == FA_COMBINE_FEW
#define PARAMETER_BYTES 4096
#else
#define PARAMETER_BYTES 32764
#endif

enum {
    THREADS = FA_COMBINE_THREADS,
    TILE = FA_COMBINE_ROWS,
    STEP = 4 * 32 /* columns of a warp at a time */
};

typedef struct fa_combine_params {
    fa_combine_head head;
    fa_combine_part parts[MAX_PARTS];
} fa_combine_params;
static_assert(sizeof(fa_combine_params) <= PARAMETER_BYTES, "parameters of a launch");

/* A row: where it is in a tensor, and in the log-sum-exp that is written. */
typedef struct fa_row {
    int64_t batch, row, head, lse;
} fa_row;

FA_DEVICE fa_row find_row(const fa_combine_head *h, int64_t n)
{
    fa_row at;
    at.lse = n;
    at.row = n % h->rows;
    at.head = n / h->rows % h->heads;
    at.batch = n / h->rows / h->heads;
    return at;
}

FA_DEVICE float part_lse(const fa_combine_part *part, const fa_row *at)
{
    return part->lse[at->batch * part->lse_stride[0] + at->head * part->lse_stride[1] +
                     at->row * part->lse_stride[2]];
}

/* The max of the parts' log-sum-exps, with a lane for each part; NaN if any of them is NaN. */
FA_DEVICE float largest_lse(const fa_combine_params *p, const fa_row *at)
{
    float top = -INFINITY, bad = 0.0f;
#pragma unroll 1
    for (int n = (int)threadIdx.x % 32; n < p->head.parts; n += 32) {
        const float lse = part_lse(&p->parts[n], at);
        top = fmaxf(top, lse);
        if (isnan(lse)) bad = 1.0f;
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, lanes));
        bad = fmaxf(bad, __shfl_xor_sync(0xffffffffu, bad, lanes));
    }
    return bad != 0.0f ? NAN : top;
}

/* Weights are relative to the max, because the joint log-sum-exp is rounded, and its error would be
 * visible if it is large. */
FA_DEVICE float sum_weights(const fa_combine_params *p, const fa_row *at, float top)
{
    float sum = 0.0f;
#pragma unroll 1
    for (int n = (int)threadIdx.x % 32; n < p->head.parts; n += 32) {
        const float lse = part_lse(&p->parts[n], at);
        if (lse != -INFINITY) sum += expf(lse - top);
    }
    return fa_warp_sum(sum);
}

FA_DEVICE float4 fetch_part(const fa_combine_part *part, const fa_row *at, int column, int columns)
{
    const int64_t first =
        at->batch * part->stride[0] + at->row * part->stride[1] + at->head * part->stride[2];
    const int kind = part->vector ? part->dtype : FA_FETCH_ANY;
    return fa_fetch4(part->data + first * fa_element_size(part->dtype), kind, part->dtype, column,
                     columns);
}

/* Four columns of the sum over all parts. */
FA_DEVICE float4 sum_parts(const fa_combine_params *p, const fa_row *at, float top, int column)
{
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int n = 0; n < p->head.parts; n++) {
        const float lse = part_lse(&p->parts[n], at);
        if (lse == -INFINITY) continue;
        const float w = expf(lse - top);
        const float4 x = fetch_part(&p->parts[n], at, column, p->head.columns);
        sum.x = fmaf(w, x.x, sum.x);
        sum.y = fmaf(w, x.y, sum.y);
        sum.z = fmaf(w, x.z, sum.z);
        sum.w = fmaf(w, x.w, sum.w);
    }
    return sum;
}

FA_DEVICE void combine_row(const fa_combine_params *p, const fa_row *at)
{
    const fa_combine_head *h = &p->head;
    const float top = largest_lse(p, at);
    const bool empty = top == -INFINITY;
    const float total = empty ? 1.0f : sum_weights(p, at, top);
    char *row = fa_view_row(&h->out, at->batch, at->row, at->head);
#pragma unroll 1
    for (int c = (int)threadIdx.x % 32 * 4; c < h->columns; c += STEP) {
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (!empty) x = sum_parts(p, at, top, c);
        fa_store4(row, &h->out, c, h->columns,
                  make_float4(x.x / total, x.y / total, x.z / total, x.w / total));
    }
    __syncwarp(); /* lse may be the first part's, which every lane reads */
    if (h->lse && threadIdx.x % 32 == 0) h->lse[at->lse] = empty ? top : top + logf(total);
}

FA_KERNEL __launch_bounds__(THREADS) combine(const __grid_constant__ fa_combine_params p)
{
#pragma unroll 1
    for (int64_t task = blockIdx.x; task < p.head.tasks; task += gridDim.x) {
        const int64_t n = task * TILE + threadIdx.x / 32;
        const fa_row at = find_row(&p.head, n);
        if (at.batch < p.head.batch) combine_row(&p, &at);
    }
}
