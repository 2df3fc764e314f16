/*
 * forward_sm80: tensor cores by mma.sync, float16 and bfloat16. The same source makes other families:
 * sm75, for Turing, which has only float16 and no asynchronous copies; tf32, for float32 inputs whose
 * operands may be rounded to tf32; and tf32x3, which computes each float32 product as three products in
 * tf32.
 */
#include "cuda/plan_sm80.h"

#include <inttypes.h>
#include <math.h>

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

/* Key tiles of the work tile of this rank of a head under a causal mask: 0 is the last and longest one. */
static double count_causal(const fa_problem *p, const fa_variant *v, int64_t tiles, int64_t rank)
{
    const int64_t rows = (tiles - rank) * fa_cuda_sm80_queries(v);
    const int64_t diagonal = p->diagonal_given ? p->diagonal : p->n_k - p->rows_q;
    const int64_t keys = (rows < p->rows_q ? rows : p->rows_q) + diagonal;
    if (keys < 1) return 0;
    return (double)fa_cuda_count_tiles(keys < p->n_k ? keys : p->n_k, v->keys);
}

/* How blocks share the work under a causal mask: causal pairs; or the longest work tiles of all heads first, shared out in turn or
 * as the device starts blocks. */
enum { PAIRS, IN_TURN, AS_BLOCKS_END };

/* The fastest, by the time in key tiles of a block. A task takes some more than its key tiles: `more` of a block that has
 * several, `started` of one that begins with it. Pairs win ties: the last round's may be shorter. H200, of FlashAttention-2's rate in this order: head dim 128 n 795, 220
 * heads 0.94, 1.25, 1.22; n 2k, 48 heads 0.96, 1.10, 1.20; n 4k, 64 heads 1.10, 1.08, 1.13; 96 n 312, 2,440 heads 0.82, 1.10, 0.94;
 * 256 n 640, 456 heads 0.70, 0.84, 0.79, n 1k, 80 heads 0.89, 0.92, 0.99; 64 n 2k, 256 heads 0.96, 0.96, 0.92, n 5,222, 20
 * heads 1.04, 1.09, 1.26; 28 heads of n 2k, whose pairs run at once, 1.19, 1.00, 1.24 (and 0.91 with a block for each task). */
static int choose_order(const fa_problem *p, const fa_variant *v, int64_t tiles, int64_t heads,
                        int64_t blocks)
{
    enum {
        FEWEST_PAIRS =
            55, /* percent of the blocks: with fewer, many multiprocessors have one block */
        MOST_ROUNDS = 64,
        MOST_STARTED = 12 /* more tasks would read more keys than the L2 cache holds */
    };
    static const double least_of_pairs = 0.975;
    const double more = 0.6 + 64.0 / v->head_dim, started = 0.7 + 128.0 / v->head_dim;
    const double longest = count_causal(p, v, tiles, 0),
                 shortest = count_causal(p, v, tiles, tiles - 1);
    const int64_t pairs = fa_causal_pairs(tiles) * heads, tasks = tiles * heads;
    const double rounds = (double)tasks / (double)blocks;
    if (rounds > MOST_ROUNDS) return PAIRS;
    const double of_pairs =
        100 * pairs < FEWEST_PAIRS * blocks
            ? INFINITY
            : (double)fa_cuda_count_tiles(pairs, blocks) * (longest + shortest + 2 * more);
    double in_turn = 0, as_they_end = rounds * ((longest + shortest) / 2 + started) + 1;
    for (int64_t first = 0; first < tasks; first += blocks)
        in_turn += count_causal(p, v, tiles, fa_divide(first, heads)) + more;
    if (as_they_end < longest + started) as_they_end = longest + started;
    if (rounds > MOST_STARTED) as_they_end = INFINITY;
    if (least_of_pairs * of_pairs <= fmin(in_turn, as_they_end)) return PAIRS;
    return in_turn <= as_they_end ? IN_TURN : AS_BLOCKS_END;
}

/* Whether the device starts a block for each task that is not causal, although tasks are not long: their second or third round is far
 * from full (H200, head dim 128: n 1,024, 48 heads 0.77 to 0.89 of FlashAttention-2, n 1,000, 80 heads 0.78 to 0.87; with at most 8 key
 * tiles, or more rounds, 0.93 to 0.98 times as fast). */
static bool is_uneven(const fa_variant *v, int64_t tasks, int64_t blocks, int64_t keys)
{
    const double rounds = (double)tasks / (double)blocks, part = rounds - floor(rounds);
    return v->split == 1 && keys >= 14 && rounds < 3 && part > 0.2 && part < 0.7;
}

/* If tasks are short, as many blocks as fit on the device do all of them: the data of a task is loaded while the
 * previous task ends. If tasks are long, each task has a block, and the device starts a block when another has
 * ended, because two blocks on a multiprocessor are not equally fast. If lengths are unknown, each task has a block. */
static void share_out(const fa_problem *p, const fa_cuda_device *device, const fa_variant *v,
                      fa_cuda_plan_launch *l)
{
    enum { LONG = 24 };
    const bool differ = p->causal && p->window_left < 0 && l->tiles > 1;
    const int room = fa_cuda_sm80_room(device, v);
    const int64_t blocks = (int64_t)room * device->multiprocessors;
    const int64_t heads = p->batch * p->heads_q, keys = count_keys(p, v);
    const bool split = room > 1 && keys >= LONG;
    l->sm80.causal_pairs = l->sm80.full_heads = 0;
    if (fa_cuda_has_own_lengths(p) || l->tasks <= blocks) return;
    if (!differ) {
        if (!split && !is_uneven(v, l->tasks, blocks, keys)) l->grid = fa_cuda_grid(blocks);
        return;
    }
    const int order = choose_order(p, v, l->tiles, heads, blocks);
    if (order != PAIRS) {
        l->sm80.full_heads = heads;
        if (order == IN_TURN) l->grid = fa_cuda_grid(blocks);
        return;
    }
    l->sm80.full_heads = fa_causal_full_heads(l->tiles, heads, blocks);
    l->sm80.causal_pairs = fa_causal_pairs_of_heads(l->tiles, heads, l->sm80.full_heads);
    const bool one_round = l->sm80.causal_pairs <= blocks;
    l->grid = fa_cuda_grid(split || one_round ? l->sm80.causal_pairs : blocks);
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

/* forward_sm80_d256_rows64: with two blocks on a multiprocessor one computes while the other begins or ends a task, but a key
 * serves half as many queries. H200, of FlashAttention-2's rate with these and with 128 queries: causal n 640, 456 heads 0.86,
 * 0.70; n 128, 668 heads 0.82, 0.74; without a mask n 128 0.88, 0.86; n 512 0.84, 0.86; n 4k 0.97, 1.02; few blocks (53 heads, n 256)
 * 0.79, 0.84. */
static bool is_for_short_tasks(const fa_variant *v)
{
    return v->element != FA_ELEMENT_TF32 && v->head_dim == 256 && v->split == 2 && v->warps == 4;
}

static bool has_short_tasks(const fa_problem *p, const fa_cuda_device *device, const fa_variant *v)
{
    enum { SHORT = 6 };
    const int64_t tiles = fa_cuda_count_tiles(p->rows_q, fa_cuda_sm80_queries(v)),
                  tasks = tiles * p->heads_q * (p->cu_seqlens_q ? 1 : p->batch);
    return !p->batch_invariant && count_keys(p, v) <= SHORT &&
           tasks > (int64_t)fa_cuda_sm80_room(device, v) * device->multiprocessors;
}

/* The narrowest variant for the problem that a block's shared memory has room for; of the same head dim rather one that has as
 * many blocks on a multiprocessor as it is made for. Without any the narrowest one, which is refused. */
static const fa_variant *find_variant(const fa_problem *p, int first, int end,
                                      const fa_cuda_device *device)
{
    const int64_t dim = p->d > p->d_v ? p->d : p->d_v;
    const bool general = fa_cuda_sm80_is_general(p);
    const fa_variant *found = NULL, *narrowest = NULL;
    for (const fa_variant *v = &fa_variants[first]; v < &fa_variants[end]; v++) {
        if (!takes(v, p, dim, general)) continue;
        if (is_for_short_tasks(v) && !has_short_tasks(p, device, v)) continue;
        if (found && v->head_dim > found->head_dim) break;
        if (!narrowest) narrowest = v;
        if (fa_cuda_sm80_smem(v) + fa_cuda_static_smem(v) > device->smem_per_block) continue;
        if (fa_cuda_sm80_room(device, v) == v->blocks) return v;
        if (!found) found = v;
    }
    return found ? found : narrowest;
}

const fa_variant *fa_cuda_sm80_variant(const fa_problem *p, const fa_cuda_device *device)
{
    return find_variant(p, FA_FIRST_forward_sm80, FA_END_forward_sm80, device);
}

static bool plan_variants(const fa_problem *p, int first, int end, const fa_cuda_device *device,
                          fa_cuda_plan *plan, char *why, size_t size)
{
    const fa_variant *v = find_variant(p, first, end, device);
    if (!v) return false;
    fa_cuda_plan_launch *l = fa_cuda_plan_add(v, FA_SM80_THREADS(v->warps), fa_cuda_sm80_smem(v),
                                              queue_sm80, device, plan, why, size);
    if (!l) return false;
    plan->arithmetic = fa_cuda_sm80_arithmetic(v);
    l->tile_k = v->keys;
    fa_cuda_set_query_tasks(p, fa_cuda_sm80_queries(v), l);
    share_out(p, device, v, l);
    return true;
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
    .without_workspace = &fa_cuda_forward_simt,
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
    .split = &fa_cuda_forward_split_sm80,
    .plan = plan_sm80,
};

const fa_cuda_family fa_cuda_forward_sm75 = {
    .name = "sm75",
    .oldest = 75,
    .newest = 79,
    .plan = plan_sm75,
};
