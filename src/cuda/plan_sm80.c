/*
 * forward_sm80: tensor cores by mma.sync, float16 and bfloat16. The same source makes other families:
 * sm75, for Turing, which has only float16 and no asynchronous copies; tf32, for float32 inputs whose
 * operands may be rounded to tf32; and tf32x3, which computes each float32 product as three products in
 * tf32.
 */
#include "cuda/plan_sm80.h"

#include <inttypes.h>

#include "../../kernels/common/causal_schedule.h"
#include "cuda/family.h"
#include "cuda/parameters.h"

int fa_cuda_sm80_queries(const fa_variant *v)
{
    return FA_SM80_QUERIES(v->warps, v->split, v->group_rows);
}

int fa_cuda_sm80_smem(const fa_variant *v)
{
    return FA_SM80_SMEM(v->element, v->head_dim, v->warps, v->split, v->group_rows, v->keys,
                        v->stages, v->ahead);
}

/* The kernel counts rows of a sequence, plus a tile, in 32 bits. */
static const int64_t max_rows = INT32_MAX - 4096;

bool fa_cuda_sm80_refuse_sizes(const fa_problem *p, int widest, char *why, size_t size)
{
    const int64_t dim = p->d > p->d_v ? p->d : p->d_v;
    if (dim > widest) {
        fa_cuda_say(why, size, "the head dim is %" PRId64 ", above %d", dim, widest);
        return true;
    }
    return fa_cuda_refuse_rows(p, max_rows, why, size);
}

bool fa_cuda_sm80_is_general(const fa_problem *p)
{
    return fa_cuda_changes_scores(p) || !(p->scale >= 0);
}

int fa_cuda_sm80_room(const fa_cuda_device *device, const fa_variant *v)
{
    const int bytes = fa_cuda_sm80_smem(v) + FA_CUDA_STATIC_SMEM + 1024; /* the driver's own */
    const int fitting = device->smem_per_sm / bytes;
    return fitting < 1 ? 1 : fitting < v->blocks ? fitting : v->blocks;
}

/* Tiles of keys of a task, on average. */
static int64_t count_keys(const fa_problem *p, const fa_variant *v)
{
    int64_t keys = p->n_k;
    if (p->window_left >= 0 && p->window_left < keys)
        keys = p->window_left + fa_cuda_sm80_queries(v);
    else if (p->causal) keys = (keys + fa_cuda_sm80_queries(v)) / 2;
    return keys / v->keys;
}

/* If tasks are short, as many blocks as fit on the device do all of them: the data of a task is loaded while the
 * previous task ends. If tasks are long, each task has a block, and the device starts a block when another has
 * ended, because two blocks on a multiprocessor are not equally fast. Under a causal mask a long and a short task
 * are a causal pair. If lengths are unknown, each task has a block. */
static void share_out(const fa_problem *p, const fa_cuda_device *device, const fa_variant *v,
                      fa_cuda_plan_launch *l)
{
    enum { LONG = 24 };
    const bool differ = p->causal && p->window_left < 0 && l->tiles > 1;
    const int room = fa_cuda_sm80_room(device, v);
    const int64_t blocks = (int64_t)room * device->multiprocessors;
    const int64_t heads = p->batch * p->heads_q;
    l->sm80.causal_pairs = l->sm80.full_heads = 0;
    if (fa_cuda_has_own_lengths(p)) return;
    if ((differ ? fa_causal_pairs(l->tiles) * heads : l->tasks) <= blocks) return;
    if (differ) {
        l->sm80.full_heads = fa_causal_full_heads(l->tiles, heads, blocks);
        l->sm80.causal_pairs = fa_causal_pairs_of_heads(l->tiles, heads, l->sm80.full_heads);
    }
    const bool split = room > 1 && count_keys(p, v) >= LONG;
    l->grid = fa_cuda_grid(!split ? blocks : differ ? l->sm80.causal_pairs : l->tasks);
}

/* ---- The launch ------------------------------------------------------------------------------ */

void fa_cuda_set_sm80_params(const fa_problem *p, const fa_cuda_plan_launch *l,
                             fa_sm80_params *params)
{
    fa_cuda_set_params(p, l, &params->attention);
    params->causal_pairs = l->sm80.causal_pairs;
    params->full_heads = l->sm80.full_heads;
}

static bool queue_sm80(void *kernel, const fa_cuda_plan *plan, const fa_cuda_plan_launch *l,
                       const fa_cuda_call *call, fa_cuda_fault *fault)
{
    fa_sm80_params params;
    fa_cuda_set_sm80_params(call->problem, l, &params);
    return fa_cuda_queue(kernel, plan, l, call->stream, (void *[]){&params}, fault);
}

/* ---- The plan -------------------------------------------------------------------------------- */

/* Whether a variant can run the problem; a variant with every option also runs problems without options. */
static bool takes(const fa_variant *v, const fa_problem *p, int64_t dim, bool general)
{
    const bool float32 = p->q.dtype == FA_FLOAT32; /* the families tf32 and tf32x3 */
    if (v->head_dim < dim || (!float32 && v->element != (fa_element)p->q.dtype)) return false;
    return v->options == FA_SM80_ALL || !general;
}

const char *fa_cuda_sm80_arithmetic(const fa_variant *v)
{
    switch (v->element) {
    case FA_ELEMENT_TF32X3: return "three tf32 products for each (mma.sync), float32 sums";
    case FA_ELEMENT_TF32: return "tf32 products (mma.sync), float32 sums";
    case FA_ELEMENT_BFLOAT16: return "bfloat16 products (mma.sync), float32 sums";
    default: return "float16 products (mma.sync), float32 sums";
    }
}

/* Takes the first variant whose shared memory the device has. */
static bool plan_variants(const fa_problem *p, int first, int end, const fa_cuda_device *device,
                          fa_cuda_plan *plan, char *why, size_t size)
{
    const int64_t dim = p->d > p->d_v ? p->d : p->d_v;
    const bool general = fa_cuda_sm80_is_general(p);
    for (const fa_variant *v = &fa_variants[first]; v < &fa_variants[end]; v++) {
        if (!takes(v, p, dim, general)) continue;
        fa_cuda_plan_launch *l =
            fa_cuda_plan_add(v, FA_SM80_THREADS(v->warps), fa_cuda_sm80_smem(v), queue_sm80, device,
                             plan, why, size);
        if (!l) {
            why = NULL; /* why not the narrowest is what counts */
            continue;
        }
        plan->arithmetic = fa_cuda_sm80_arithmetic(v);
        l->tile_k = v->keys;
        fa_cuda_set_query_tasks(p, fa_cuda_sm80_queries(v), l);
        share_out(p, device, v, l);
        return true;
    }
    return false;
}

static bool plan_sm80(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                      char *why, size_t size)
{
    const int first = FA_FIRST_forward_sm80, end = FA_END_forward_sm80;
    if (fa_cuda_refuse_dtypes(p, true, why, size) || fa_cuda_refuse_options(p, why, size) ||
        fa_cuda_sm80_refuse_sizes(p, 512, why, size))
        return false;
    return plan_variants(p, first, end, device, plan, why, size);
}

static bool plan_sm75(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                      char *why, size_t size)
{
    const int first = FA_FIRST_forward_sm75, end = FA_END_forward_sm75;
    if (fa_cuda_refuse_dtypes(p, false, why, size) || fa_cuda_refuse_options(p, why, size) ||
        fa_cuda_sm80_refuse_sizes(p, 256, why, size))
        return false;
    return plan_variants(p, first, end, device, plan, why, size);
}

static bool plan_tf32(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                      char *why, size_t size)
{
    const int first = FA_FIRST_forward_tf32, end = FA_END_forward_tf32;
    if (fa_cuda_refuse_tf32(p, why, size) || fa_cuda_refuse_options(p, why, size) ||
        fa_cuda_sm80_refuse_sizes(p, 512, why, size))
        return false;
    return plan_variants(p, first, end, device, plan, why, size);
}

static bool plan_tf32x3(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                        char *why, size_t size)
{
    const int first = FA_FIRST_forward_tf32x3, end = FA_END_forward_tf32x3;
    if (fa_cuda_refuse_other_than_float32(p, why, size) || fa_cuda_refuse_options(p, why, size))
        return false;
    if (p->precision == FA_PRECISION_IEEE) {
        fa_cuda_say(why, size, "options.precision is FA_PRECISION_IEEE");
        return false;
    }
    if (fa_cuda_sm80_refuse_sizes(p, 256, why, size)) return false;
    return plan_variants(p, first, end, device, plan, why, size);
}

const fa_cuda_family fa_cuda_forward_tf32 = {
    .name = "tf32",
    .oldest = 80,
    .newest = FA_CUDA_NEWEST,
    .plan = plan_tf32,
};

const fa_cuda_family fa_cuda_forward_tf32x3 = {
    .name = "tf32x3",
    .oldest = 80,
    .newest = FA_CUDA_NEWEST,
    .plan = plan_tf32x3,
};

const fa_cuda_family fa_cuda_forward_sm80 = {
    .name = "sm80",
    .oldest = 80,
    .newest = FA_CUDA_NEWEST,
    .plan = plan_sm80,
};

const fa_cuda_family fa_cuda_forward_sm75 = {
    .name = "sm75",
    .oldest = 75,
    .newest = 79,
    .plan = plan_sm75,
};
