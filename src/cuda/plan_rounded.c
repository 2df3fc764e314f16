/*
 * forward_sm90 and forward_sm90_wide for float32 inputs of FA_PRECISION_TF32: queries, keys and values are rounded to float16
 * first, once (kernels/forward_sm90_wide/round.h), if that is faster than rounding them in each work tile.
 */
#include "cuda/plan_rounded.h"

#include <inttypes.h>
#include <math.h>

#include "../../kernels/forward_sm90_wide/round.h"
#include "cuda/family.h"
#include "cuda/parameters.h"
#include "cuda/plan_sm90.h"

/* An H200's rates, with so many multiprocessors, to a head dim: operations a second of float16's products, and of the kernels that
 * round numbers in each work tile, in long rows; bytes a second that are rounded, read and written; and the time of the two
 * additional launches. Short rows have lower rates: a work tile takes as long as if it had so many more keys. */
static const struct {
    int head_dim;
    double rounded, others;
} rates[] = {
    {128, 680e12, 350e12}, {192, 750e12, 285e12}, {256, 780e12, 235e12}, {512, 620e12, 140e12}};
static const double device_multiprocessors = 132, round_rate = 3.2e12, more_launches = 8e-6,
                    more_keys = 270, others_keys = 150,
                    least_gain = 1.03; /* the model is not exact */
enum {
    NARROWEST = 65,
    NARROW = 256,
    WIDEST = 512,
    LEAST_KEYS = 256, /* with fewer little is won */
    MOST_HEADS = 65535
};
static const double most_rows =
    64.0 * INT32_MAX; /* of all heads: the tiles are numbered with 32 bits */

/* ---- The workspace --------------------------------------------------------------------------- */

static fa_sm90_rounded_sizes sizes_of(const fa_problem *p)
{
    const int64_t q = p->batch * p->heads_q, k = p->batch * p->heads_kv;
    return (fa_sm90_rounded_sizes){
        {q, k, k}, {p->rows_q, p->n_k, p->n_k}, {(int32_t)p->d, (int32_t)p->d, (int32_t)p->d_v}};
}

/* The rounded numbers as the caller's float16 tensors. */
static fa_problem halves_of(const fa_problem *p, char *workspace)
{
    const fa_sm90_rounded_sizes sizes = sizes_of(p);
    fa_problem halves = *p;
    fa_view *const views[] = {&halves.q, &halves.k, &halves.v};
    for (int i = 0; i < 3; i++) {
        const fa_sm90_rounded x = fa_sm90_find_rounded(&sizes, i);
        const int64_t head = x.rows * x.pitch, heads = i ? p->heads_kv : p->heads_q;
        *views[i] = (fa_view){
            workspace ? workspace + x.offset : NULL, FA_FLOAT16, {heads * head, x.pitch, head, 1}};
    }
    return halves;
}

/* ---- The launches ---------------------------------------------------------------------------- */

bool fa_cuda_rounded_params(const fa_problem *p, const fa_cuda_plan_launch *l,
                            fa_cuda_encoder *encode, fa_sm90_params *params, fa_cuda_fault *fault)
{
    char *workspace = (char *)p->workspace + l->workspace_offset;
    if (fa_variants[l->variant].rounded) {
        const fa_problem halves = halves_of(p, workspace);
        fa_cuda_plan_launch now = *l;
        now.sm90.maps[0].base = halves.q.data;
        now.sm90.maps[1].base = halves.k.data;
        now.sm90.maps[2].base = halves.v.data;
        if (!fa_cuda_sm90_params(&halves, &now, encode, params, fault)) return false;
    }
    params->split.parts = 0;
    params->split.out = (float *)(void *)workspace;
    return true;
}

static bool queue_rounded(void *kernel, const fa_cuda_plan *plan, const fa_cuda_plan_launch *l,
                          const fa_cuda_call *call, fa_cuda_fault *fault)
{
    fa_attention_params attention;
    fa_sm90_params params;
    fa_cuda_set_params(call->problem, l, &attention);
    return fa_cuda_rounded_params(call->problem, l, fa_cuda_encode_map, &params, fault) &&
           fa_cuda_queue(kernel, plan, l, call->stream, (void *[]){&attention, &params}, fault);
}

static bool add_round(int variant, int64_t blocks, const fa_cuda_device *device, fa_cuda_plan *plan,
                      char *why, size_t size)
{
    fa_cuda_plan_launch *l = fa_cuda_plan_add(&fa_variants[variant], FA_SM90_ROUND_THREADS, 0,
                                              queue_rounded, device, plan, why, size);
    if (!l) return false;
    fa_cuda_set_tasks(l, blocks, blocks);
    return true;
}

/* ---- The plan -------------------------------------------------------------------------------- */

/* Whether heads or items share memory, of which each would have a rounded copy. Under FA_BATCH_INVARIANT other items do not count. */
static bool is_shared(const fa_problem *p, const fa_view *v, int64_t heads)
{
    return (p->batch > 1 && v->stride[0] == 0 && !p->batch_invariant) ||
           (heads > 1 && v->stride[2] == 0);
}

static bool refuse_rounded(const fa_problem *p, char *why, size_t size)
{
    if (fa_cuda_refuse_tf32(p, why, size) || fa_cuda_refuse_options(p, why, size)) return true;
    const char *option =
        fa_cuda_has_own_lengths(p) ? "lengths are on the device"
        : p->block_table           ? "block_table is given"
        : fa_cuda_sm90_options(p, NULL)
            ? "an option changes scores or weights, or the scale is not positive"
        : p->d < NARROWEST && p->d_v < NARROWEST ? "the head dims are narrow"
        : p->d > WIDEST || p->d_v > WIDEST       ? "the head dims are wide"
        : (double)p->batch * (double)p->heads_q > MOST_HEADS ||
                (double)p->batch * (double)p->heads_q * (double)p->rows_q > most_rows ||
                (double)p->batch * (double)p->heads_kv * (double)p->n_k > most_rows
            ? "there are many heads or rows"
        : is_shared(p, &p->q, p->heads_q) || is_shared(p, &p->k, p->heads_kv) ||
                is_shared(p, &p->v, p->heads_kv)
            ? "heads or batch items share memory"
        : p->d < 1 || p->d_v < 1 || p->n_k < 1 || p->rows_q < 1 || p->batch * p->heads_q < 1
            ? "there are no queries, keys or columns"
            : NULL;
    if (option) fa_cuda_say(why, size, "%s: inputs are not rounded first", option);
    return option;
}

/* Blocks of a head in the second launch: many if there are few heads. Most heads need no second rounding; their blocks only read
 * ranges. */
static int64_t count_rescale_blocks(int64_t heads)
{
    const int64_t many = 1024, blocks = many / heads;
    return blocks < 1 ? 1 : blocks > FA_SM90_RESCALE_BLOCKS ? FA_SM90_RESCALE_BLOCKS : blocks;
}

static bool plan_rounded(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                         char *why, size_t size)
{
    if (refuse_rounded(p, why, size)) return false;
    const fa_sm90_rounded_sizes sizes = sizes_of(p);
    const fa_sm90_rounded end = fa_sm90_find_rounded(&sizes, 3);
    const int64_t heads = sizes.heads[0] + 2 * sizes.heads[1];
    const int64_t tiles = end.range - (heads + 1) / 2,
                  rescale = heads * count_rescale_blocks(heads);
    const fa_problem halves = halves_of(p, NULL);
    if (tiles > fa_cuda_grid(tiles) || rescale > fa_cuda_grid(rescale)) {
        fa_cuda_say(why, size, "there are %" PRId64 " tiles", tiles);
        return false;
    }
    if (!add_round(FA_VARIANT_forward_tf32_rounded_round, tiles, device, plan, why, size) ||
        !add_round(FA_VARIANT_forward_tf32_rounded_rescale, rescale, device, plan, why, size) ||
        !fa_cuda_add_rounded(&halves, device, plan, why, size))
        return false;
    plan->launches[1].overlaps = plan->launches[2].overlaps = true;
    plan->launches[2].queue = queue_rounded;
    plan->arithmetic = "inputs rounded to float16, float16 products (wgmma), float32 sums";
    plan->workspace_bytes = (size_t)end.offset;
    for (int i = 0; i < plan->count; i++) plan->launches[i].workspace_bytes = plan->workspace_bytes;
    return true;
}

/* How much longer products take because work tiles leave multiprocessors idle: because there are fewer work tiles than
 * multiprocessors, or, where all are equally long and the keys are not split, in the last round. */
static double slowness_of_tiles(const fa_problem *p, const fa_cuda_device *device, bool rounds)
{
    const int64_t cluster = p->d > NARROW || p->d_v > NARROW ? 2 : 1,
                  blocks = device->multiprocessors / cluster,
                  tiles = p->batch * p->heads_q * fa_cuda_count_tiles(p->rows_q, 128);
    if (p->batch_invariant || (tiles > blocks && !rounds)) return 1;
    return (double)(fa_cuda_count_tiles(tiles, blocks) * blocks) / (double)tiles;
}

/* Whether rounding, which takes time for each row, saves less than its products take. Under FA_BATCH_INVARIANT only the numbers of
 * an item and head decide. */
static bool is_slower(const fa_problem *p, const fa_cuda_device *device, char *why, size_t size)
{
    (void)why, (void)size;
    if (refuse_rounded(p, NULL, 0) || p->n_k < LEAST_KEYS) return true;
    const double of_device = device->multiprocessors / device_multiprocessors;
    const double heads = p->batch_invariant ? 1 : (double)(p->batch * p->heads_q),
                 share = (double)p->heads_kv / (double)p->heads_q; /* heads of keys */
    const double bytes =
        6 * heads *
        ((double)p->rows_q * (double)p->d + share * (double)p->n_k * (double)(p->d + p->d_v));
    double keys = (double)p->n_k * (p->causal && p->rows_q == p->n_k ? 0.5 : 1); /* of a query */
    const int64_t right = p->causal ? 0 : p->window_right;
    if (p->window_left >= 0 && right >= 0)
        keys = fmin(keys, (double)p->window_left + (double)right + 1);
    const double work = 2 * heads * (double)p->rows_q * (double)(p->d + p->d_v) / of_device;
    const double rounding = bytes / round_rate + (p->batch_invariant ? 0 : more_launches);
    int of = 0;
    while (rates[of].head_dim < p->d || rates[of].head_dim < p->d_v) of++;
    const double products = work * (keys + more_keys) / rates[of].rounded,
                 others = work * (keys + others_keys) / rates[of].others;
    return least_gain * (rounding + products * slowness_of_tiles(p, device, !p->causal)) >
           others * slowness_of_tiles(p, device, false);
}

const fa_cuda_family fa_cuda_forward_tf32_rounded = {
    .name = "tf32_rounded",
    .oldest = 90,
    .newest = 90,
    .does_few = true,
    .slower = is_slower,
    .without_workspace = &fa_cuda_forward_tf32_sm90,
    .plan = plan_rounded,
};
