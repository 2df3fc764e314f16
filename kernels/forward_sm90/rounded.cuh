/*
 * Float32 inputs that have been rounded to float16, in units of each head (forward_sm90_wide/round.h): scores and outputs get
 * their units, outputs are float32, and rows that float16 could not compute are computed again in float32.
 */
#ifndef FA_KERNELS_FORWARD_SM90_ROUNDED_CUH
#define FA_KERNELS_FORWARD_SM90_ROUNDED_CUH

#include "forward_sm90/config.cuh"

#if ROUNDED

#include "forward_sm90/cursor.cuh"
#include "forward_sm90/softmax.cuh"
#include "forward_sm90/work_tile.cuh"
#define FA_KERNELS_FORWARD_TF32_SM90_CONFIG_CUH /* keeps that file out: only its store.cuh is used */
#include "forward_tf32_sm90/store.cuh"

/* The largest weight of a row is near MAX_WEIGHT. If all are less, its logit is so large that the rounded base differs from it. */
#define LEAST_SUM (MAX_WEIGHT / 2)

/* Gives scores the units of the work tile's queries and keys, by the scale. It becomes neither 0 nor infinite, because a hidden
 * score is -infinity and others may be 0; NaN stays NaN. Returns the unit of values. */
FA_DEVICE float apply_units(const fa_attention_params *p, const fa_sm90_params *s,
                            const work_tile *w, tile_limits *limits)
{
    const fa_tile *t = &w->query_tile;
    const int64_t query_head = t->batch * p->heads_q + t->head,
                  key_head = p->batch * p->heads_q + t->batch * p->heads_kv + t->head_kv,
                  value_head = key_head + p->batch * p->heads_kv;
    const float *units = s->split.out;
    const double scale = (double)limits->scale * units[query_head] * units[key_head];
    limits->scale = (float)(scale < 0x1p-126 ? 0x1p-126 : scale > 0x1p127 ? 0x1p127 : scale);
    return units[value_head];
}

/* Whether rows of the warp must be recomputed, because they are not finite, or their weights were rounded away. If only the sum
 * shows that, it becomes NaN, and so do the results. */
FA_DEVICE bool finds_bad_rows(const work_tile *w, row_state *rows, float unit, const float *out,
                              int consumer)
{
    float seen[2] = {unit * 0.0f, unit * 0.0f}, sum[2];
    bool found = false;
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) seen[i / 2 % 2] += out[i] * 0.0f;
    find_sums(rows, sum);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const bool wrong =
            rows->base[r] != NO_KEY_SEEN && !(sum[r] >= LEAST_SUM && sum[r] < INFINITY);
        /* Such a row has no products, so its accumulators may hold anything. */
        const bool unseen = rows->base[r] == NO_KEY_SEEN && sum[r] == 0.0f;
        if (wrong) rows->sum[r] = NAN;
        found |= (wrong || (seen[r] != 0.0f && !unseen)) && row_of(consumer, r) < w->queries;
    }
    return __any_sync(0xffffffff, found);
}

/* Stores outputs and log-sum-exp. Returns whether rows must be recomputed. Outputs are only read: products that write to other
 * accumulators may be running. */
FA_DEVICE bool store_rounded(const fa_attention_params *p, const work_tile *w,
                             const row_state *rows, float unit, const float *out, int consumer)
{
    int first = row_of(consumer, 0);
    row_state all = *rows;
    float factor[2];
    /* Hides from the compiler that all work tiles have the same: otherwise it would keep the offset of each store. */
    __asm__ volatile("" : "+r"(first));
    const bool recompute = finds_bad_rows(w, &all, unit, out, consumer);
    find_factors(p, w, &all, first, factor);
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (first + 8 * r < w->rows)
            store_row(p->out.vector, out, r, factor[r] == 0.0f ? 0.0f : factor[r] * unit,
                      (float *)w->out + (first + 8 * r) * p->out.stride[1] + FIRST_COLUMN,
                      (int)p->d_v - FIRST_COLUMN);
    return recompute;
}

#endif

#endif
