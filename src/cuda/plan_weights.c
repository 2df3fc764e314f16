/* weights_simt: fa_weights, in float32 on the FMA units of any GPU. */
#include "cuda/plan_weights.h"

#include "cuda/family.h"
#include "cuda/parameters.h"

/* max_k comes from k, as for the other passes: weights may have more columns than keys. */
void fa_cuda_set_weights_params(const fa_problem *p, const fa_cuda_plan_launch *l,
                                fa_weights_params *params)
{
    const int64_t room = p->block_table ? p->block_table_stride * p->rows_k : p->rows_k;
    *params = (fa_weights_params){.weights = fa_cuda_view(&p->weights, p->n_k),
                                  .rows = p->weight_rows,
                                  .num_rows = p->num_weight_rows,
                                  .keys = p->n_k};
    fa_cuda_set_params(p, l, &params->a);
    if (params->a.max_k > room) params->a.max_k = room;
}

static bool queue_weights(void *kernel, const fa_cuda_plan *plan, const fa_cuda_plan_launch *l,
                          const fa_cuda_call *call, fa_cuda_fault *fault)
{
    fa_weights_params params;
    fa_cuda_set_weights_params(call->problem, l, &params);
    return fa_cuda_queue(kernel, plan, l, call->stream, (void *[]){&params}, fault);
}

static bool plan_weights(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                         char *why, size_t size)
{
    const fa_variant *v = &fa_variants[FA_VARIANT_weights_simt];
    fa_cuda_plan_launch *l = fa_cuda_plan_add(v, FA_PASS_THREADS, FA_WEIGHTS_SMEM(v->own),
                                              queue_weights, device, plan, why, size);
    if (!l) return false;
    plan->arithmetic = "float32 sums on FMA units";
    l->tile_q = v->own;
    l->tile_k = FA_PASS_OTHERS;
    const int64_t tiles = fa_cuda_count_tiles(p->num_weight_rows, l->tile_q);
    fa_cuda_set_tasks(l, tiles, p->n_k > 0 ? tiles * p->heads_q * p->batch : 0);
    l->idle = l->idle || !p->weights.data;
    return true;
}

const fa_cuda_family fa_cuda_weights_simt = {
    .name = "simt",
    .oldest = 0,
    .newest = FA_CUDA_NEWEST,
    .plan = plan_weights,
};
