/*
 * forward_sm80: tensor cores by mma.sync, float16 and bfloat16. The same source compiled for Turing,
 * which knows float16 alone and no asynchronous copies, is the family sm75.
 */
#include <inttypes.h>

#include "../../kernels/forward_sm80/forward_sm80.h"
#include "cuda/family.h"

static int count_queries(const fa_variant *v)
{
    return FA_SM80_QUERIES(v->warps, v->split, v->group_rows);
}

static int count_smem(const fa_variant *v)
{
    return FA_SM80_SMEM(v->element, v->head_dim, v->warps, v->split, v->group_rows, v->keys,
                        v->stages, v->ahead);
}

/* The kernel counts rows of a sequence in 32 bits, and a tile more. */
static const int64_t most_rows = INT32_MAX - 4096;

static bool refuse_sizes(const fa_problem *p, int widest, char *why, size_t size)
{
    const int64_t dim = p->d > p->d_v ? p->d : p->d_v;
    if (dim > widest) {
        fa_cuda_say(why, size, "the head dim is %" PRId64 ", above %d", dim, widest);
        return true;
    }
    return fa_cuda_refuse_rows(p, most_rows, why, size);
}

/* Whether a score needs more than a scale and masks by position. The plain kernel takes the largest
 * score for the largest logit, which a negative scale would turn round. */
static bool is_general(const fa_problem *p)
{
    return fa_cuda_changes_scores(p) || !(p->scale >= 0);
}

/* Blocks that a multiprocessor has room for. */
static int count_places(const fa_cuda_device *device, const fa_variant *v)
{
    const int bytes = count_smem(v) + FA_CUDA_STATIC_SMEM + 1024; /* the driver's own */
    const int fitting = device->smem_per_sm / bytes;
    return fitting < 1 ? 1 : fitting < v->blocks ? fitting : v->blocks;
}

/* Tiles of keys of a task, on average. */
static int64_t count_keys(const fa_problem *p, const fa_variant *v)
{
    int64_t keys = p->n_k;
    if (p->window_left >= 0 && p->window_left < keys) keys = p->window_left + count_queries(v);
    else if (p->causal) keys = (keys + count_queries(v)) / 2;
    return keys / v->keys;
}

/* Pairs of a head whose long and short tiles have as much work as all its tiles and one. */
static int64_t count_pairs(int64_t tiles) { return (tiles + 1) / 2; }

/* Of all heads, if those behind the first paired_heads have pairs that are a tile shorter, and so a few more
 * (forward_sm80.cu). */
static int64_t count_all_pairs(int64_t tiles, int64_t heads, int64_t paired_heads)
{
    const int64_t own = count_pairs(tiles), rest = heads - paired_heads;
    return paired_heads * own + rest / 2 * (tiles + 1) + rest % 2 * (own + (tiles % 2 == 0));
}

/* The heads behind the last round that all blocks have pairs for get shorter ones, if that is no further
 * round. */
static void pair_tiles(int64_t tiles, int64_t heads, int64_t blocks, fa_cuda_plan *plan)
{
    const int64_t own = count_pairs(tiles), rounds = heads * own / blocks;
    plan->paired_heads = rounds * blocks / own;
    if (count_all_pairs(tiles, heads, plan->paired_heads) > (rounds + 1) * blocks)
        plan->paired_heads = heads;
    plan->pairs = count_all_pairs(tiles, heads, plan->paired_heads);
}

/* Where tasks are short, as many blocks as there are places do all of them: what a task needs is on its way
 * while the one before it ends. Where they are long, the device starts a block where one has ended, for two
 * blocks on a multiprocessor are not equally fast. Under a causal mask a long task and a short one are a
 * pair. Where lengths are unknown each task has a block. */
static void share_out(const fa_problem *p, const fa_cuda_device *device, const fa_variant *v,
                      fa_cuda_plan *plan)
{
    enum { LONG = 24 };
    const bool differ = p->causal && p->window_left < 0 && plan->tiles > 1;
    const int places = count_places(device, v);
    const int64_t blocks = (int64_t)places * device->multiprocessors;
    const int64_t heads = p->batch * p->heads_q;
    if (fa_cuda_has_own_lengths(p)) return;
    if ((differ ? count_pairs(plan->tiles) * heads : plan->tasks) <= blocks) return;
    if (differ) pair_tiles(plan->tiles, heads, blocks, plan);
    const bool split = places > 1 && count_keys(p, v) >= LONG;
    plan->grid = fa_cuda_grid(!split ? blocks : differ ? plan->pairs : plan->tasks);
}

/* Whether a variant is for the problem; one with every option also does without. */
static bool takes(const fa_variant *v, const fa_problem *p, int64_t dim, bool general)
{
    if (v->head_dim < dim || v->element != (fa_element)p->q.dtype) return false;
    return v->options == FA_SM80_ALL || !general;
}

/* Takes the first variant whose shared memory the device has. */
static bool plan_variants(const fa_problem *p, int first, int end, const fa_cuda_device *device,
                          fa_cuda_plan *plan, char *why, size_t size)
{
    const int64_t dim = p->d > p->d_v ? p->d : p->d_v;
    const bool general = is_general(p);
    for (const fa_variant *v = &fa_variants[first]; v < &fa_variants[end]; v++) {
        if (!takes(v, p, dim, general)) continue;
        if (!fa_cuda_plan_variant(v, count_smem(v), device, plan, why, size)) {
            why = NULL; /* why not the narrowest is what counts */
            continue;
        }
        plan->arithmetic = v->element == FA_ELEMENT_BFLOAT16
                               ? "bfloat16 products (mma.sync), float32 sums"
                               : "float16 products (mma.sync), float32 sums";
        plan->tile_k = v->keys;
        plan->threads = (uint32_t)FA_SM80_THREADS(v->warps);
        fa_cuda_plan_tiles(p, count_queries(v), plan);
        share_out(p, device, v, plan);
        return true;
    }
    return false;
}

static bool plan_sm80(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                      char *why, size_t size)
{
    const int first = FA_FIRST_forward_sm80, end = FA_END_forward_sm80;
    if (fa_cuda_refuse_dtypes(p, true, why, size) || refuse_sizes(p, 512, why, size)) return false;
    return plan_variants(p, first, end, device, plan, why, size);
}

static bool plan_sm75(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                      char *why, size_t size)
{
    const int first = FA_FIRST_forward_sm75, end = FA_END_forward_sm75;
    if (fa_cuda_refuse_dtypes(p, false, why, size) || refuse_sizes(p, 256, why, size)) return false;
    return plan_variants(p, first, end, device, plan, why, size);
}

const fa_cuda_family fa_cuda_family_sm80 = {
    .name = "sm80",
    .oldest = 80,
    .newest = FA_CUDA_NEWEST,
    .plan = plan_sm80,
    .launch = fa_cuda_launch_plain,
};

const fa_cuda_family fa_cuda_family_sm75 = {
    .name = "sm75",
    .oldest = 75,
    .newest = 79,
    .plan = plan_sm75,
    .launch = fa_cuda_launch_plain,
};
