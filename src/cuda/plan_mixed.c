/*
 * Mixed batches of a server: packed queries over a cache, where some sequences have few queries
 * (decode) and others many (a part of a prompt). Two launches share the sequences: one of decode_sm80, and
 * one of the forward kernels. Only the device knows which sequence belongs to which launch, from
 * cu_seqlens_q. Where there are few work tiles, all sequences have split keys instead (plan_split_sm90.c).
 *
 * mixed_beside: on Hopper both launches may run at the same time. decode_sm90, which waits for memory,
 * runs on some multiprocessors. forward_sm90, which computes, runs on the others, and on all when
 * decode_sm90 has ended. Neither reads what the other writes. The second launch overlaps the first:
 *
 * - It starts when each block of the first launch has allowed it. The blocks do this after they have
 *   waited for all earlier work, so that work has ended when the second launch starts. All blocks of
 *   the first launch are then already running, so none has to wait for a place that the second launch
 *   has taken. Because they start first, the hardware gives each its own multiprocessor, and the second
 *   launch gets the others.
 * - Later work waits only for the second launch. So the last block of the second launch ends by waiting
 *   for the first launch, which might otherwise end later.
 */
#include <inttypes.h>

#include "cuda/family.h"
#include "cuda/plan_decode.h"
#include "cuda/plan_decode_sm90.h"
#include "cuda/plan_sm90.h"
#include "cuda/plan_split_sm90.h"

/*
 * One of this many multiprocessors has a block of decode_sm90. Its three groups of warps read some 62 GB/s
 * together, so half of an H200's multiprocessors read nearly at the full rate of memory. With fewer
 * blocks, the few queries cost about the same (multiprocessors times time), but they end last if the
 * sequences of many queries have little work.
 */
enum { SHARE_OF_DEVICE = 2 };

/* The kernels for many queries, fastest first. */
static const fa_cuda_family *const for_many[] = {&fa_cuda_forward_sm90, &fa_cuda_forward_sm80,
                                                 &fa_cuda_forward_simt};

/* Whether no sequence of such a batch can have few queries, although the longest may have more: the rows
 * that do not fit into the other sequences are left for this one. */
static bool has_none_of_few(const fa_problem *p, int64_t few)
{
    return p->batch <= INT64_MAX / p->max_q && p->batch * p->max_q - p->rows_q < p->max_q - few;
}

/* Whether a single kernel is better: the sequences are all of one kind, or a result must not depend on
 * other sequences. No reason is given for this refusal. */
static bool is_uniform(const fa_problem *p, const fa_cuda_device *device, char *why, size_t size)
{
    const int64_t few = fa_cuda_most_few(p);
    (void)device, (void)why, (void)size;
    return p->pass != FA_PASS_FORWARD || !p->cu_seqlens_q || p->cu_seqlens_k ||
           p->batch_invariant || fa_cuda_is_latent(p) || p->max_q <= few || p->rows_q == 0 ||
           has_none_of_few(p, few);
}

/*
 * Whether decode_sm90 beside forward_sm90 reads the keys of many sequences of few queries faster than one launch for all of them,
 * in which heads share query tiles or keys are split. It only does if it has several pairs of a sequence and a key head for each of its groups of warps
 * (three a block), which differ in length; and if most sequences seem to have few queries. (H200, page 64, us, both at the same
 * time, one launch, FlashAttention-3: 60 decodes at 8k and 4 prompts of 2k, 32 heads of 8, 606, 724, 738; 256 decodes at 1k and
 * these prompts 462, 503, 574; 8 heads of 1, 136, 108, 120; 45 sequences, most of one query, 64 heads of 32, 85, 105, 104; but 19
 * decodes and 3 prompts, 16 heads, 330, 239, 275; 16 and 10 of 10, 119, 104, 113.)
 */
static bool has_many_of_few(const fa_problem *p, const fa_cuda_device *device)
{
    enum { GROUPS_OF_BLOCK = 3, MUCH_LONGER = 8 };
    const int64_t groups = GROUPS_OF_BLOCK * (int64_t)device->multiprocessors / SHARE_OF_DEVICE;
    return 2 * p->batch * p->heads_kv >= 5 * groups &&
           MUCH_LONGER * fa_cuda_count_tiles(p->rows_q, p->batch) <= p->max_q;
}

/* Whether a single launch of forward_sm90_split is faster for all sequences. */
static bool is_slower_than_split(const fa_problem *p, const fa_cuda_device *device)
{
    const fa_cuda_family *const split = &fa_cuda_forward_split_sm90,
                                *const beside = &fa_cuda_forward_mixed_beside;
    fa_cuda_plan other;
    if (!fa_cuda_is_tried(split, device) || p->pass != FA_PASS_FORWARD || p->batch == 0)
        return false;
    fa_cuda_plan_begin(device, beside, &other);
    if (has_many_of_few(p, device) && beside->plan(p, device, &other, NULL, 0)) return false;
    fa_cuda_plan_begin(device, split, &other);
    return split->plan(p, device, &other, NULL, 0);
}

static bool refuse_uniform(const fa_problem *p, char *why, size_t size)
{
    if (!is_uniform(p, NULL, NULL, 0)) return false;
    fa_cuda_say(why, size,
                "sequences are not packed queries over a cache, some with more than %" PRId64
                " queries",
                fa_cuda_most_few(p));
    return true;
}

static bool add_many(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                     char *why, size_t size)
{
    const int count = plan->count;
    for (size_t i = 0; i < sizeof for_many / sizeof for_many[0]; i++) {
        if (!fa_cuda_is_tried(for_many[i], device)) continue;
        plan->count = count;
        if (!for_many[i]->plan(p, device, plan, why, size)) continue;
        plan->launches[count].fewest_queries = fa_cuda_most_few(p) + 1;
        return true;
    }
    return false;
}

static bool plan_mixed(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                       char *why, size_t size)
{
    if (refuse_uniform(p, why, size) || fa_cuda_refuse_decode(p, INT64_MAX, why, size) ||
        !fa_cuda_add_few(p, device, plan, why, size))
        return false;
    const char *arithmetic = plan->arithmetic;
    if (!add_many(p, device, plan, why, size)) return false;
    plan->arithmetic = arithmetic;
    return true;
}

static bool is_slower(const fa_problem *p, const fa_cuda_device *device, char *why, size_t size)
{
    return is_uniform(p, device, why, size) || is_slower_than_split(p, device);
}

const fa_cuda_family fa_cuda_forward_mixed = {
    .name = "mixed",
    .oldest = 80,
    .newest = FA_CUDA_NEWEST,
    .slower = is_slower,
    .plan = plan_mixed,
};

/* ---- Both at the same time ------------------------------------------------------------------- */

static bool plan_beside(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                        char *why, size_t size)
{
    if (fa_cuda_architecture(device) != 90 || !device->overlaps) {
        fa_cuda_say(why, size, "launches cannot overlap on this device, or by this driver");
        return false;
    }
    const int32_t blocks = (int32_t)fa_cuda_count_tiles(device->multiprocessors, SHARE_OF_DEVICE);
    if (refuse_uniform(p, why, size) || fa_cuda_refuse_decode(p, INT64_MAX, why, size) ||
        !fa_cuda_add_few_sm90(p, blocks, device, plan, why, size) ||
        !fa_cuda_add_beside(p, device, plan, why, size))
        return false;
    plan->launches[1].fewest_queries = fa_cuda_most_few(p) + 1;
    return true;
}

const fa_cuda_family fa_cuda_forward_mixed_beside = {
    .name = "mixed_beside",
    .oldest = 90,
    .newest = 90,
    .does_few = true,
    .slower = is_slower,
    .plan = plan_beside,
};
