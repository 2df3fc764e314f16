/* forward_simt: everything, in float32 on the FMA units of any GPU. */
#include "../../kernels/forward_simt.h"
#include "cuda/family.h"

/* The narrowest that both head dims fit into; the widest takes the largest head dim that there is. */
static const fa_variant *find_variant(const fa_problem *p)
{
    const int64_t dim = p->d > p->d_v ? p->d : p->d_v;
    const fa_variant *v = &fa_variants[FA_FIRST_forward_simt];
    while (v->head_dim < dim) v++;
    return v;
}

static bool plan_simt(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                      char *why, size_t size)
{
    const fa_variant *v = find_variant(p);
    const int smem_bytes = FA_SIMT_SMEM(v->keys, v->chunk, v->rows);
    if (!fa_cuda_plan_variant(v, smem_bytes, device, plan, why, size)) return false;
    plan->arithmetic = "float32 sums on FMA units";
    plan->tile_k = v->keys;
    plan->threads = FA_SIMT_THREADS;
    fa_cuda_plan_tiles(p, FA_SIMT_QUERIES(v->rows), plan);
    return true;
}

const fa_cuda_family fa_cuda_family_simt = {
    .name = "simt",
    .oldest = 0,
    .newest = FA_CUDA_NEWEST,
    .plan = plan_simt,
    .launch = fa_cuda_launch_plain,
};
