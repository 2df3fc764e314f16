/*
 * A row that is computed key by key, in float32, by a warp (recompute.cuh). Macros: VALUE_DIM, CLUSTER, and FIRST_COLUMN, of the
 * outputs that a block computes, as in config.cuh.
 */
#ifndef FA_KERNELS_FORWARD_SM90_RECOMPUTE_ROW_CUH
#define FA_KERNELS_FORWARD_SM90_RECOMPUTE_ROW_CUH

#include "common/reduce.cuh"
#include "common/score_options.cuh"
#include "common/softmax.cuh"
#include "ptx/convert.cuh"

#ifndef FIRST_COLUMN
#define FIRST_COLUMN 0
#endif

/* The logit of one key, as an exponent of 2; every lane gets it. __fmul_rn rounds it before a base is
 * subtracted: in one fused multiply-add, a huge logit would differ from the base that is equal to it. */
FA_DEVICE float recompute_logit(const fa_attention_params *p, const fa_tile *t,
                                const fa_logit_row *row, const char *q, int64_t j)
{
    const char *k = fa_key_row(p, &p->k, t, j);
    float sum = 0;
    for (int c = threadIdx.x % 32; c < p->d; c += 32)
        sum = fmaf(fa_load_element(q, p->q.dtype, c), fa_load_element(k, p->k.dtype, c), sum);
    sum = fa_warp_sum(sum);
    const float distance = (float)(row->center - j);
    const float logit = fa_row_logit(p, row, j, distance, sum * fa_effective_scale(p, t));
    return __fmul_rn(logit, FA_LOG2E);
}

FA_DEVICE bool is_dropped(const fa_attention_params *p, const fa_dropout *d, int64_t i, int64_t j)
{
    if (!p->dropout_threshold) return false;
    return fa_dropout_bits(d->seed, d->offset, d->batch_head, i, j) < p->dropout_threshold;
}

/* The columns of values and outputs that the block has: from FIRST_COLUMN up to here. */
FA_DEVICE int columns_to(const fa_attention_params *p)
{
    return CLUSTER > 1 ? min(p->d_v, FIRST_COLUMN + VALUE_DIM) : p->d_v;
}

/* The lane's columns: every 32nd. */
enum { LANE_COLUMNS = (VALUE_DIM + 31) / 32 };

/* out += weight * value, of the lane's columns. */
FA_DEVICE void add_value(const fa_attention_params *p, float *out, float weight, const char *v)
{
#pragma unroll
    for (int n = 0; n < LANE_COLUMNS; n++) {
        const int c = FIRST_COLUMN + 32 * n + (int)threadIdx.x % 32;
        if (c < columns_to(p)) out[n] = fmaf(weight, fa_load_element(v, p->v.dtype, c), out[n]);
    }
}

/* Query i of a sequence: a warp's work. Returns its log-sum-exp. */
FA_DEVICE float recompute_row(const fa_attention_params *p, const fa_tile *t, int64_t i, char *to)
{
    const fa_dropout d = fa_dropout_of(p, t);
    const fa_range visible = fa_tile_visible(p, t, i);
    const fa_logit_row row = fa_logit_row_of(p, t, i);
    const char *q = fa_view_row(&p->q, t->block_q, t->start_q + i, t->head);
    float out[LANE_COLUMNS] = {0}, top = -INFINITY, sum = 0, lse;
    for (int64_t j = visible.lo; j < visible.hi; j++)
        top = fmaxf(top, recompute_logit(p, t, &row, q, j));
    for (int64_t j = visible.lo; j < visible.hi; j++) {
        const float weight = ptx_ex2(recompute_logit(p, t, &row, q, j) - fa_softmax_base(top));
        sum += weight;
        if (weight != 0.0f && !is_dropped(p, &d, i, j))
            add_value(p, out, weight, fa_key_row(p, &p->v, t, j));
    }
    float factor = fa_softmax_finish(top == -INFINITY ? top : top / FA_LOG2E, sum,
                                     p->sinks ? p->sinks[t->head] : -INFINITY, &lse);
    if (p->dropout_threshold) factor *= p->dropout_scale;
#pragma unroll
    for (int n = 0; n < LANE_COLUMNS; n++) {
        const int c = FIRST_COLUMN + 32 * n + (int)threadIdx.x % 32;
        const float x = factor == 0.0f ? 0.0f : out[n] * factor;
        if (c < columns_to(p)) fa_store_element(to, p->out.dtype, c, x);
    }
    return lse;
}

#endif
