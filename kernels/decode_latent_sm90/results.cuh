/*
 * How rows are finished and written: the same as in decode_sm80/merge.cuh, in another form. With that one the compiler
 * makes a kernel that is 1 to 4% slower (H200).
 */
#ifndef FA_KERNELS_DECODE_LATENT_SM90_RESULTS_CUH
#define FA_KERNELS_DECODE_LATENT_SM90_RESULTS_CUH

#include "decode_latent_sm90/config.cuh"

#include "common/rows.cuh"
#include "common/softmax.cuh"
#include "decode_sm80/bases.cuh"
#include "decode_sm80/work.cuh"

/* Finishes row r, with its log-sum-exp; returns the factor of its output. */
FA_DEVICE float finish_row(const fa_decode_params *d, const fa_work *w, int r, float base,
                           float sum)
{
    const fa_attention_params *p = &d->attention;
    const fa_tile *t = &w->tile;
    const int64_t head = t->head + head_of(d, r), i = t->first + query_of(d, r);
    if (head_of(d, r) >= w->heads || i >= t->room_q) return 0.0f;
    float lse, factor = fa_softmax_finish(base == NOTHING_SEEN ? -INFINITY : base * LN2, sum,
                                          p->sinks ? p->sinks[head] : -INFINITY, &lse);
    if (i >= t->n_q) lse = -INFINITY, factor = 0.0f;
    if (p->lse) p->lse[(t->block_q * p->heads_q + head) * p->rows_q + t->start_q + i] = lse;
    return factor;
}

/* Writes zeros if the factor is 0, whatever the row holds. */
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

#endif
