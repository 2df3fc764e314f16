/* forward_simt: every problem, in float32 on the FMA units of any GPU. */
#include "../../kernels/forward_simt/forward_simt.h"
#include "cuda/family.h"
#include "cuda/parameters.h"

static bool queue_simt(void *kernel, const fa_cuda_plan *plan, const fa_cuda_plan_launch *l,
                       const fa_cuda_call *call, fa_cuda_fault *fault)
{
    fa_attention_params params;
    fa_cuda_set_params(call->problem, l, &params);
    return fa_cuda_queue(kernel, plan, l, call->stream, (void *[]){&params}, fault);
}

/* The widest variant takes any head dim of queries and keys, which it multiplies chunk by chunk; it is as wide as values
 * can be. */
static bool plan_simt(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                      char *why, size_t size)
{
    const fa_variant *v = fa_cuda_narrowest(p, FA_FIRST_forward_simt, FA_LAST_forward_simt);
    fa_cuda_plan_launch *l =
        fa_cuda_plan_add(v, FA_SIMT_THREADS, FA_SIMT_SMEM(v->keys, v->chunk, v->rows), queue_simt,
                         device, plan, why, size);
    if (!l) return false;
    plan->arithmetic = "float32 sums on FMA units";
    l->tile_k = v->keys;
    fa_cuda_set_query_tasks(p, FA_SIMT_QUERIES(v->rows), l);
    return true;
}

const fa_cuda_family fa_cuda_forward_simt = {
    .name = "simt",
    .oldest = 0,
    .newest = FA_CUDA_NEWEST,
    .plan = plan_simt,
};
