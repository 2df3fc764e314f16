/* forward_simt: everything, in float32 on the FMA units of any GPU. */
#include "../../kernels/forward_simt.h"
#include "cuda/family.h"

/* The shapes that it is compiled for, narrowest first. */
#define SHAPE(dim)                                                                                 \
    {                                                                                              \
        "forward_simt_d" #dim, dim, FA_SIMT_QUERIES(dim), FA_SIMT_KEYS(dim), FA_SIMT_SMEM(dim)     \
    }
static const struct shape {
    const char *image;
    int dim, queries, keys, smem_bytes;
} shapes[] = {SHAPE(64), SHAPE(128), SHAPE(256), SHAPE(512)};

static const struct shape *find_shape(const fa_problem *p)
{
    const int64_t dim = p->d > p->d_v ? p->d : p->d_v;
    size_t i = 0;
    while (shapes[i].dim < dim) i++; /* head dims end at 512 */
    return &shapes[i];
}

static bool plan_simt(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                      char *why, size_t size)
{
    const struct shape *shape = find_shape(p);
    if (!fa_cuda_plan_image(shape->image, shape->smem_bytes, device, plan, why, size)) return false;
    plan->arithmetic = "float32 sums on FMA units";
    plan->tile_k = shape->keys;
    plan->threads = FA_SIMT_THREADS;
    fa_cuda_plan_tiles(p, shape->queries, plan);
    return true;
}

const fa_cuda_family fa_cuda_family_simt = {
    .name = "simt",
    .oldest = 0,
    .newest = FA_CUDA_NEWEST,
    .plan = plan_simt,
    .launch = fa_cuda_launch_plain,
};
