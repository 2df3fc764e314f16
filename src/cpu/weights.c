/*
 * The attention weights of chosen rows: p_ij = exp(logit_ij - lse_i), a row at a time. A row's logits
 * need n_k floats of scratch; nothing grows with n_q * n_k.
 */
#include "isa.h"
#include "logits.h"
#include "softmax.h"
#include "work.h"

/* x[j] = q . k_j for the keys that the row may see. */
static void score_row(const fa_problem *p, const fa_row *row, const float *q, float *k, float *x)
{
    const int64_t padded = fa_round_up(p->d, VL);
    const int64_t head_kv = row->head / (p->heads_q / p->heads_kv);
    for (int64_t j = row->visible.lo; j < row->visible.hi; j++) {
        fa_load_scaled_row(k, fa_key_row(p, &p->k, row->sequence, row->batch, j, head_kv),
                           p->k.dtype, p->d, padded,
                           fa_key_scale(p, &p->k_scale, row->sequence, row->batch, j, head_kv));
        vf sum = v_zero();
        for (int64_t c = 0; c < padded; c += VL) sum = v_fma(v_load(q + c), v_load(k + c), sum);
        x[j] = v_sum(sum);
    }
}

/* One row of weights. scratch: two rows of d, then a row of keys with a vector to spare. */
static void weight_row(const fa_problem *p, int64_t b, int64_t head, int64_t r, float *scratch)
{
    const fa_sequence s = fa_problem_sequence(p, b);
    const int64_t padded = fa_round_up(p->d, VL);
    float *q = scratch, *k = scratch + padded, *x = k + padded;
    char *out = fa_score_address(&p->weights, b, head, r, 0);
    fa_row row = {b, head, p->weight_rows ? p->weight_rows[r] : r, {0, 0}, &s};
    fa_zero_row(out, p->weights.dtype, p->n_k);
    if (row.query >= s.n_q) return;
    row.visible = fa_visible(p, &s, row.query);
    if (row.visible.hi <= row.visible.lo) return;

    fa_load_row(q, fa_view_row(&p->q, s.block_q, s.start_q + row.query, head), p->q.dtype, p->d,
                padded);
    score_row(p, &row, q, k, x);
    const float scale = fa_effective_scale(p, b, head / (p->heads_q / p->heads_kv));
    const int64_t lo = row.visible.lo, n = row.visible.hi - lo;
    fa_scores_to_logits(p, &row, scale, x + lo, lo, n, NULL);
    float maximum = -INFINITY, sum = 0, lse;
    float *weights = x + lo / VL * VL; /* whole vectors, as the softmax wants them */
    const fa_span span = {0, fa_round_up(lo % VL + n, VL), lo % VL, lo % VL + n};
    fa_softmax_row(weights, span, 1.0f, &maximum, &sum);
    float factor =
        fa_softmax_finish(maximum, sum, 1.0f, p->sinks ? p->sinks[head] : -INFINITY, &lse);
    if (factor == 0.0f) return;
    fa_store_row(fa_score_address(&p->weights, b, head, r, lo), p->weights.dtype, x + lo, factor,
                 n);
}

typedef struct fa_weights_job {
    const fa_problem *p;
    char *scratch;
    size_t bytes; /* of it for each thread */
} fa_weights_job;

static void weights_item(void *context, int64_t index, int thread)
{
    const fa_weights_job *job = context;
    const fa_problem *p = job->p;
    weight_row(p, index / (p->heads_q * p->num_weight_rows),
               index / p->num_weight_rows % p->heads_q, index % p->num_weight_rows,
               (float *)(void *)(job->scratch + (size_t)thread * job->bytes));
}

fa_status FA_NAME(weights)(const fa_problem *p)
{
    const double scores =
        (double)p->batch * (double)p->heads_q * (double)p->num_weight_rows * (double)p->n_k;
    const int64_t total = p->batch * p->heads_q * p->num_weight_rows;
    if (total == 0) return FA_OK;
    const int wanted = fa_cpu_threads(p->threads, 2 * scores * (double)p->d);
    const int threads = fa_team_reserve((int)fa_min(wanted, total));
    const int64_t row = fa_round_up(p->n_k, VL) + VL + 2 * fa_round_up(p->d, VL);
    fa_weights_job job = {p, NULL, fa_lines(fa_bytes(row, sizeof(float)))};
    job.scratch = fa_allocate(fa_bytes(threads, job.bytes));
    if (!job.scratch) return FA_ERROR_MEMORY;
    fa_team_run(threads, total, 4, weights_item, &job);
    free(job.scratch);
    return FA_OK;
}
