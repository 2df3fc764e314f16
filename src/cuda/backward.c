/* From a problem and its plan to the launches of backward, weights and combine. */
#include <string.h>

#include "cuda/forward.h"
#include "cuda/passes.h"

static bool launch(void *kernel, const fa_cuda_step *step, void *stream, void *params,
                   fa_cuda_fault *fault)
{
    void *parameters[] = {params};
    const fa_cuda_launch launch = {.device = step->device,
                                   .grid = {step->grid, 1, 1},
                                   .threads = step->threads,
                                   .smem_bytes = step->smem_bytes,
                                   .stream = stream};
    return fa_cuda_launch_kernel(kernel, &launch, parameters, fault);
}

static fa_attention_params attention_params(const fa_problem *p, const fa_cuda_step *step)
{
    fa_attention_params params;
    fa_cuda_set_params(p, step->tiles, step->tasks, &params);
    return params;
}

fa_backward_params fa_cuda_backward_params(const fa_problem *p, const fa_cuda_step *step)
{
    fa_backward_params params = {.a = attention_params(p, step),
                                 .dout = fa_cuda_view(&p->dout, p->d_v),
                                 .dq = fa_cuda_view(&p->dq, p->d),
                                 .dk = fa_cuda_view(&p->dk, p->d),
                                 .dv = fa_cuda_view(&p->dv, p->d_v),
                                 .dbias = fa_cuda_view(&p->dbias, 0),
                                 .dlse = p->dlse,
                                 .delta = p->workspace,
                                 .dsinks = p->dsinks,
                                 .blocks_q = p->blocks_q,
                                 .blocks_k = p->blocks_k};
    memcpy(params.dbias_shape, p->dbias_shape, sizeof params.dbias_shape);
    return params;
}

/* most_k comes from k, as for the other passes: weights may have more columns than keys. */
fa_weights_params fa_cuda_weights_params(const fa_problem *p, const fa_cuda_step *step)
{
    fa_weights_params params = {.a = attention_params(p, step),
                                .weights = fa_cuda_view(&p->weights, p->n_k),
                                .rows = p->weight_rows,
                                .num_rows = p->num_weight_rows,
                                .keys = p->n_k};
    const int64_t room = p->block_table ? p->block_table_stride * p->rows_k : p->rows_k;
    if (params.a.most_k > room) params.a.most_k = room;
    return params;
}

bool fa_cuda_run_passes(void *const kernels[FA_CUDA_STEPS], const fa_problem *p,
                        const fa_cuda_passes *passes, fa_cuda_fault *fault)
{
    for (int i = 0; i < FA_CUDA_STEPS; i++) {
        const fa_cuda_step *step = &passes->steps[i];
        if (!fa_cuda_step_runs(p, passes, i)) continue;
        fa_backward_params backward;
        fa_weights_params weights;
        void *params = &backward;
        if (i == FA_STEP_WEIGHTS) weights = fa_cuda_weights_params(p, step), params = &weights;
        else backward = fa_cuda_backward_params(p, step);
        if (!launch(kernels[i], step, p->stream, params, fault)) return false;
    }
    return true;
}

/* ---- Combine --------------------------------------------------------------------------------- */

/* A tensor of out's shape and its log-sum-exp, as one of the parts. */
static fa_combine_part make_part(const fa_combine_problem *c, const fa_view *view, const float *lse)
{
    const fa_kernel_view v = fa_cuda_view(view, c->d_v);
    return (fa_combine_part){.data = v.data,
                             .lse = lse,
                             .stride = {v.stride[0], v.stride[1], v.stride[2]},
                             .lse_stride = {c->heads * c->n_q, c->n_q, 1},
                             .dtype = v.dtype,
                             .vector = v.vector};
}

static fa_combine_part make_tensor_part(const fa_combine_problem *c, int64_t n)
{
    const fa_tensor *t = &c->parts[n];
    const fa_view view = {
        t->data, t->dtype, {t->stride[0], t->stride[1], t->stride[2], t->stride[3]}};
    fa_combine_part part = make_part(c, &view, c->part_lse[n]);
    for (int axis = 0; c->part_lse_stride && axis < 3; axis++)
        part.lse_stride[axis] = c->part_lse_stride[3 * n + axis];
    return part;
}

/* Where sums are kept between launches. */
static fa_view kept_sums(const fa_combine_problem *c, const fa_cuda_combining *how, float **lse)
{
    *lse = c->lse;
    if (how->workspace_bytes == 0) return c->out;
    *lse = (float *)c->workspace + c->batch * c->n_q * c->heads * c->d_v;
    return (fa_view){
        c->workspace, FA_FLOAT32, {c->n_q * c->heads * c->d_v, c->heads * c->d_v, c->d_v, 1}};
}

int64_t fa_cuda_combine_params(const fa_combine_problem *c, const fa_cuda_combining *how,
                               int64_t done, fa_combine_launch *params)
{
    int64_t n = 0;
    float *sums_lse;
    const fa_view sums = kept_sums(c, how, &sums_lse);
    if (done > 0) params->parts[n++] = make_part(c, &sums, sums_lse);
    while (n < how->most && done < c->num_parts) params->parts[n++] = make_tensor_part(c, done++);
    const bool last = done == c->num_parts;
    params->head = (fa_combine_head){.out = fa_cuda_view(last ? &c->out : &sums, c->d_v),
                                     .lse = last ? c->lse : sums_lse,
                                     .batch = c->batch,
                                     .heads = c->heads,
                                     .rows = c->n_q,
                                     .tasks = how->step.tasks,
                                     .columns = (int32_t)c->d_v,
                                     .parts = (int32_t)n};
    return done;
}

/* Without parts there is one launch all the same: it writes zeros. */
bool fa_cuda_combine(void *kernel, const fa_combine_problem *c, const fa_cuda_combining *how,
                     fa_cuda_fault *fault)
{
    fa_combine_launch params;
    int64_t done = 0;
    do {
        done = fa_cuda_combine_params(c, how, done, &params);
        if (!launch(kernel, &how->step, c->stream, &params, fault)) return false;
    } while (done < c->num_parts);
    return true;
}
