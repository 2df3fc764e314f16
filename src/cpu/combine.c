/*
 * Merging partial attention by log-sum-exp: out = sum_p exp(lse_p - lse) * part_p, with
 * lse = log sum_p exp(lse_p). A part with lse = -infinity is empty and its values are not read.
 */
#include "isa.h"
#include "work.h"

/* The largest log-sum-exp of one query's parts; NaN if any is. */
static float largest_lse(const fa_combine_problem *p, int64_t b, int64_t h, int64_t i)
{
    float top = -INFINITY;
    for (int64_t part = 0; part < p->num_parts; part++) {
        const float lse = p->part_lse[part][fa_part_lse_offset(p, part, b, h, i)];
        if (isnan(lse)) return lse;
        top = fmaxf(top, lse);
    }
    return top;
}

/* Weights are relative to the largest log-sum-exp, not to the joint one: that one is rounded, and if it
 * is large the error would be visible. */
static void combine_row(const fa_combine_problem *p, float *row, float *sum, int64_t b, int64_t h,
                        int64_t i)
{
    const float top = largest_lse(p, b, h, i);
    float total = 0;
    memset(sum, 0, (size_t)p->d_v * sizeof *sum);
    for (int64_t part = 0; part < p->num_parts; part++) {
        const float part_lse = p->part_lse[part][fa_part_lse_offset(p, part, b, h, i)];
        if (part_lse == -INFINITY) continue;
        const fa_tensor *t = &p->parts[part];
        const fa_view view = {
            t->data, t->dtype, {t->stride[0], t->stride[1], t->stride[2], t->stride[3]}};
        const float weight = expf(part_lse - top);
        total += weight;
        fa_load_row(row, fa_view_row(&view, b, i, h), t->dtype, p->d_v, p->d_v);
        for (int64_t c = 0; c < p->d_v; c++) sum[c] += weight * row[c];
    }
    const bool empty = top == -INFINITY;
    fa_store_row(fa_view_row(&p->out, b, i, h), p->out.dtype, sum, empty ? 0.0f : 1.0f / total,
                 p->d_v);
    if (p->lse) p->lse[(b * p->heads + h) * p->n_q + i] = empty ? top : top + logf(total);
}

typedef struct fa_combine_job {
    const fa_combine_problem *p;
    char *scratch;
    size_t row_bytes; /* two rows for each thread */
} fa_combine_job;

static void combine_item(void *context, int64_t index, int thread)
{
    const fa_combine_job *job = context;
    const fa_combine_problem *p = job->p;
    char *mine = job->scratch + (size_t)thread * 2 * job->row_bytes;
    combine_row(p, (float *)(void *)mine, (float *)(void *)(mine + job->row_bytes),
                index / (p->heads * p->n_q), index / p->n_q % p->heads, index % p->n_q);
}

fa_status FA_NAME(combine)(const fa_combine_problem *p)
{
    const double values = (double)p->batch * (double)p->heads * (double)p->n_q * (double)p->d_v;
    const int wanted = fa_cpu_threads(p->threads, values * (double)p->num_parts);
    const int64_t rows = p->batch * p->heads * p->n_q;
    const int threads = fa_team_reserve((int)fa_min(wanted, rows));
    fa_combine_job job = {p, NULL, fa_lines((size_t)p->d_v * sizeof(float))};
    job.scratch = fa_allocate((size_t)threads * 2 * job.row_bytes);
    if (!job.scratch) return FA_ERROR_MEMORY;
    fa_team_run(threads, rows, fa_team_share(threads, rows), combine_item, &job);
    free(job.scratch);
    return FA_OK;
}
