/*
 * The end of a row: its outputs' factor, which divides them by the sum of weights, and the
 * log-sum-exp.
 */
#ifndef FA_KERNELS_FORWARD_SM90_FACTORS_CUH
#define FA_KERNELS_FORWARD_SM90_FACTORS_CUH

#include "forward_sm90/config.cuh"
#include "forward_sm90/finish.cuh"
#include "forward_sm90/softmax.cuh"
#include "forward_sm90/work_tile.cuh"
#include "ptx/convert.cuh"

/* The sums of both rows' weights, over the four lanes that share a row. */
FA_DEVICE void find_sums(const row_state *rows, float *sum)
{
#pragma unroll
    for (int r = 0; r < 2; r++) sum[r] = rows->sum[r];
#pragma unroll
    for (int apart = 1; apart < 4; apart *= 2)
#pragma unroll
        for (int r = 0; r < 2; r++) sum[r] += __shfl_xor_sync(0xffffffff, sum[r], apart);
}

/* A row's factor if the log-sum-exp is wanted; stores it. i: the row's number in the work tile. */
FA_DEVICE float finish_row(const fa_attention_params *p, const work_tile *w, float base, float sum,
                           int i)
{
    const fa_tile *t = &w->query_tile;
    float lse;
    const int64_t head = t->head + head_of(w, i), query = t->first + query_of(w, i);
    const float sink = p->sinks ? p->sinks[head] : -INFINITY;
    const float factor = finish_sum(base, sum, sink, NATURAL_BASES, &lse);
    if (i >= w->queries) lse = -INFINITY;
    if (i < end_of_rows(w, i / ROWS) && p->lse && FIRST_COLUMN == 0 && threadIdx.x % 4 == 0)
        p->lse[(t->block_q * p->heads_q + head) * p->rows_q + t->start_q + query] = lse;
    return factor;
}

/* Adds the weights of sinks to the sums of both rows. */
FA_DEVICE void add_sinks(const fa_attention_params *p, const work_tile *w, const row_state *rows,
                         int first, float *sum)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float sink = p->sinks[w->query_tile.head + head_of(w, first + 8 * r)];
        sum[r] += ptx_ex2(fmaf(sink, FA_LOG2E, -rows->base[r]));
    }
}

/* The factors of both rows' outputs. Without lse there are hardly any branches, because the tensor
 * cores are waiting. first: the number of the thread's first row in the work tile. */
FA_DEVICE void find_factors(const fa_attention_params *p, const work_tile *w, const row_state *rows,
                            int first, float *factor)
{
    const int queries = w->queries;
    float sum[2];
    find_sums(rows, sum);
    if (p->lse || (!HAS_FAST_SINKS && p->sinks)) {
#pragma unroll
        for (int r = 0; r < 2; r++)
            factor[r] = finish_row(p, w, rows->base[r], sum[r], first + 8 * r);
    } else {
        if (p->sinks) add_sinks(p, w, rows, first, sum);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const bool unseen = rows->base[r] == NO_KEY_SEEN && sum[r] == sum[r];
            factor[r] = unseen ? 0.0f : ptx_rcp(sum[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (OPTIONS && p->dropout_threshold) factor[r] *= p->dropout_scale;
        if (first + 8 * r >= queries) factor[r] = 0.0f;
    }
}

#endif
