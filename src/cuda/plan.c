#include "cuda/plan.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "../../kernels/forward_simt.h"

/* What the build compiles, kernels/variants.h. */
typedef struct variant {
    const char *name, *file;
    int architecture;
} variant;

#define KERNEL(name, file, architecture, definition) {#name, #file, architecture},
static const variant variants[] = {
#include "../../kernels/variants.h"
};
#undef KERNEL

/* The shapes that forward_simt is compiled for, narrowest first. */
#define SIMT_SHAPE(dim)                                                                            \
    {                                                                                              \
        "forward_simt_d" #dim, dim, FA_SIMT_QUERIES(dim), FA_SIMT_KEYS(dim), FA_SIMT_SMEM(dim)     \
    }
static const struct simt_shape {
    const char *image;
    int dim, queries, keys, smem_bytes;
} simt_shapes[] = {SIMT_SHAPE(64), SIMT_SHAPE(128), SIMT_SHAPE(256), SIMT_SHAPE(512)};

enum { STATIC_SMEM = 256 }; /* at most, of any kernel here */

static const int64_t most_blocks = 2147483647; /* of a grid's first axis */

static const variant *find_variant(const char *name)
{
    for (size_t i = 0; i < sizeof variants / sizeof variants[0]; i++)
        if (strcmp(variants[i].name, name) == 0) return &variants[i];
    return NULL;
}

static const struct simt_shape *find_simt_shape(const fa_problem *p)
{
    const int64_t dim = p->d > p->d_v ? p->d : p->d_v;
    size_t i = 0;
    while (simt_shapes[i].dim < dim) i++; /* head dims end at 512 */
    return &simt_shapes[i];
}

/* Tiles of queries, see kernels/common/sequence.cuh. */
static int64_t count_tiles(const fa_problem *p, int tile)
{
    if (p->cu_seqlens_q) return p->rows_q / tile + p->batch + 2;
    return (p->rows_q + tile - 1) / tile;
}

static bool refuse_pass(const fa_problem *p, char *why, size_t size)
{
    const char *call = p->pass == FA_PASS_BACKWARD  ? "fa_backward"
                       : p->pass == FA_PASS_WEIGHTS ? "fa_weights"
                                                    : NULL;
    if (!call) return false;
    snprintf(why, size,
             "options.device is FA_DEVICE_CUDA: %s is not there yet on CUDA; it works on the CPU",
             call);
    return true;
}

static bool refuse_device(const variant *v, const struct simt_shape *shape,
                          const fa_cuda_device *device, char *why, size_t size)
{
    const int architecture = 10 * device->major + device->minor;
    if (architecture < v->architecture) {
        snprintf(why, size,
                 "CUDA device %" PRId32 " (%s) has architecture %d.%d: expected %d.%d or later",
                 device->ordinal, device->name, (int)device->major, (int)device->minor,
                 v->architecture / 10, v->architecture % 10);
        return true;
    }
    if (shape->smem_bytes + STATIC_SMEM > device->smem_per_block) {
        snprintf(why, size,
                 "CUDA device %" PRId32 " (%s) has %d bytes of shared memory for a block: expected "
                 "%d for a head dim of %d",
                 device->ordinal, device->name, (int)device->smem_per_block,
                 shape->smem_bytes + STATIC_SMEM, shape->dim);
        return true;
    }
    return false;
}

bool fa_cuda_plan_make(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                       char *why, size_t size)
{
    memset(plan, 0, sizeof *plan);
    if (refuse_pass(p, why, size)) return false;
    const struct simt_shape *shape = find_simt_shape(p);
    const variant *v = find_variant(shape->image);
    if (refuse_device(v, shape, device, why, size)) return false;
    plan->image = v->name;
    plan->entry = v->file;
    plan->tile_q = shape->queries;
    plan->tile_k = shape->keys;
    plan->tiles = count_tiles(p, shape->queries);
    plan->tasks = plan->tiles * p->heads_q * (p->cu_seqlens_q ? 1 : p->batch);
    plan->grid = (uint32_t)(plan->tasks < most_blocks ? plan->tasks : most_blocks);
    plan->threads = FA_SIMT_THREADS;
    plan->smem_bytes = (uint32_t)shape->smem_bytes;
    return true;
}

void fa_cuda_plan_describe(const fa_problem *p, const fa_cuda_device *device,
                           const fa_cuda_plan *plan, char *text, size_t size)
{
    const bool decode = p->pass == FA_PASS_DECODE;
    snprintf(text, size,
             "cuda %s %s: float32 sums on FMA units, query tile %d, key tile %d, %" PRIu32
             " blocks of %" PRIu32 " threads on sm_%d%d%s",
             decode ? "decode" : "forward", plan->image, plan->tile_q, plan->tile_k, plan->grid,
             plan->threads, (int)device->major, (int)device->minor,
             decode ? ", the forward kernel: keys are not split yet" : "");
}
