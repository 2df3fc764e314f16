/*
 * combine_few and combine_many: fa_combine. The parts' addresses are parameters of the kernel, which takes max_parts of
 * them. For more parts the launch is queued in several rounds. Each round after the first takes the result of the
 * previous one as one of its parts: from out and lse, if those keep sums unrounded, else from the workspace.
 */
#include "cuda/plan_combine.h"

#include "cuda/family.h"
#include "cuda/parameters.h"

/* ---- The launch ------------------------------------------------------------------------------ */

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

/* Where sums are kept between rounds. */
static fa_view kept_sums(const fa_combine_problem *c, const fa_cuda_plan_launch *l, float **lse)
{
    *lse = c->lse;
    if (l->workspace_bytes == 0) return c->out;
    float *sums = (float *)(void *)((char *)c->workspace + l->workspace_offset);
    *lse = sums + c->batch * c->n_q * c->heads * c->d_v;
    return (fa_view){
        (char *)sums, FA_FLOAT32, {c->n_q * c->heads * c->d_v, c->heads * c->d_v, c->d_v, 1}};
}

int64_t fa_cuda_set_combine_params(const fa_combine_problem *c, const fa_cuda_plan_launch *l,
                                   int64_t done, fa_combine_launch *params)
{
    const int64_t max_parts = fa_variants[l->variant].max_parts;
    int64_t n = 0;
    float *sums_lse;
    const fa_view sums = kept_sums(c, l, &sums_lse);
    if (done > 0) params->parts[n++] = make_part(c, &sums, sums_lse);
    while (n < max_parts && done < c->num_parts) params->parts[n++] = make_tensor_part(c, done++);
    const bool last = done == c->num_parts;
    params->head = (fa_combine_head){.out = fa_cuda_view(last ? &c->out : &sums, c->d_v),
                                     .lse = last ? c->lse : sums_lse,
                                     .batch = c->batch,
                                     .heads = c->heads,
                                     .rows = c->n_q,
                                     .tasks = l->tasks,
                                     .columns = (int32_t)c->d_v,
                                     .parts = (int32_t)n};
    return done;
}

/* Without parts there is still one round, which writes zeros. */
static bool queue_combine(void *kernel, const fa_cuda_plan *plan, const fa_cuda_plan_launch *l,
                          const fa_cuda_call *call, fa_cuda_fault *fault)
{
    fa_combine_launch params;
    int64_t done = 0;
    do {
        done = fa_cuda_set_combine_params(call->combine, l, done, &params);
        if (!fa_cuda_queue(kernel, plan, l, call->stream, (void *[]){&params}, fault)) return false;
    } while (done < call->combine->num_parts);
    return true;
}

/* ---- The plan -------------------------------------------------------------------------------- */

bool fa_cuda_plan_combine(const fa_combine_problem *c, const fa_cuda_device *device,
                          fa_cuda_plan *plan, char *why, size_t size)
{
    const int64_t rows = c->batch * c->heads * c->n_q;
    const int64_t tiles = fa_cuda_count_tiles(rows, FA_COMBINE_ROWS);
    const fa_variant *v = &fa_variants[FA_FIRST_combine_simt];
    while (v < &fa_variants[FA_LAST_combine_simt] && v->max_parts < c->num_parts) v++;
    plan->passed_over[0] = 0;
    fa_cuda_plan_begin(device, NULL, plan);
    fa_cuda_plan_launch *l =
        fa_cuda_plan_add(v, FA_COMBINE_THREADS, 0, queue_combine, device, plan, why, size);
    if (!l) return false;
    fa_cuda_set_tasks(l, tiles, tiles);
    if (c->num_parts > v->max_parts && (c->out.dtype != FA_FLOAT32 || !c->lse))
        l->workspace_bytes = (size_t)rows * (size_t)(c->d_v + 1) * sizeof(float);
    plan->workspace_bytes = l->workspace_bytes;
    return true;
}
