/*
 * Split keys of float32's forward kernels on Hopper, forward_tf32_sm90 and forward_f16x3_sm90, where work tiles leave many
 * multiprocessors idle: in a launch with fewer work tiles than multiprocessors, or in its last round. The work tiles of that
 * round are cut into parts of their keys, and a second launch merges the parts (split_rounds.h). A model of the time decides how
 * many work tiles are cut, and into how many parts.
 */
#include "cuda/plan_split_float32.h"

#include <inttypes.h>
#include <math.h>

#include "../../kernels/forward_sm90/split_rounds.h"
#include "cuda/family.h"
#include "cuda/parameters.h"
#include "cuda/plan_sm90.h"

/* The model of the time, for an H200: what a work tile takes besides its key tiles; the second launch; and the rate at which
 * sums are stored and loaded, in bytes a second. Of 77 random shapes in both precisions (head dims 64 to 512, n 140 to 5,000, a
 * third of them with options) the choice takes 1.002 times as long as the better one of the two in the geometric mean, at most 1.083. */
static const double task_seconds = 4e-6, merge_seconds = 7e-6, sums_rate = 4.5e12;
static const double device_multiprocessors = 132; /* with which the device has these rates */
static const double options_share = 0.85;         /* of the rate without options */
static const double share_of_one_consumer =
    1.44; /* of the time that half of the queries take by two */

/* The model must be so many times as fast with split keys: it is not exact. */
static const double least_gain = 1.03;

enum {
    MOST_ROUNDS = 6,           /* with more, the last one can hardly be a tenth of the time */
    MOST_WORKSPACE = 256 << 20 /* bytes */
};

/* ---- What can be split ----------------------------------------------------------------------- */

static bool refuse_split(const fa_problem *p, char *why, size_t size)
{
    const char *option = fa_cuda_has_own_lengths(p) ? "lengths are on the device"
                         : p->block_table           ? "block_table is given"
                         : p->batch_invariant       ? "options.flags has FA_BATCH_INVARIANT"
                         : p->window_left >= 0 || (p->window_right >= 0 && !p->causal)
                             ? "there is a window"
                         : p->n_k < 1 || p->rows_q < 1 || p->batch * p->heads_q < 1
                             ? "there are no queries or no keys"
                             : NULL;
    if (option) fa_cuda_say(why, size, "%s: keys are not split", option);
    return option;
}

/* ---- The work -------------------------------------------------------------------------------- */

/* Query tiles in the order of their tasks: `heads` tiles after each other have equally many keys. */
typedef struct work {
    const fa_variant *variant;
    int64_t heads, tiles;  /* query tiles of a head */
    int64_t n_k, first_hi; /* under a causal mask query i sees first_hi + i keys, at most n_k */
    int64_t blocks;        /* or clusters: so many run at once */
    int64_t rows_q;
    int queries, keys; /* of a tile */
    bool causal;
    double tile_seconds; /* of a key tile */
    double row_bytes;    /* of a row's sums */
} work;

static double find_rate(const fa_variant *v)
{
    if (v->cluster > 1) return v->element == FA_ELEMENT_TF32 ? 135e12 : 105e12;
    if (v->element == FA_ELEMENT_TF32)
        return v->head_dim <= 64 ? 250e12 : v->head_dim <= 128 ? 300e12 : 240e12;
    return v->head_dim <= 64 ? 120e12 : v->head_dim <= 128 ? 145e12 : 128e12;
}

static int pitch_of(const fa_problem *p) { return (int)((p->d_v + 7) / 8 * 8); }

static work find_work(const fa_problem *p, const fa_variant *v, const fa_cuda_device *device)
{
    work w = {.variant = v,
              .heads = p->batch * p->heads_q,
              .n_k = p->n_k,
              .blocks = (device->multiprocessors + v->cluster - 1) / v->cluster,
              .rows_q = p->rows_q,
              .queries = FA_SM90_QUERIES(v->consumers),
              .keys = v->keys,
              .causal = p->causal,
              .row_bytes = pitch_of(p) * 4.0 + sizeof(fa_sm90_row_sum)};
    w.tiles = fa_cuda_count_tiles(p->rows_q, w.queries);
    w.first_hi = (p->diagonal_given ? p->diagonal : p->n_k - p->rows_q) + 1;
    const double rate =
        find_rate(v) * (v->options ? options_share : 1) * v->cluster / device_multiprocessors;
    w.tile_seconds = 4.0 * w.queries * w.keys * v->head_dim / rate;
    if (v->consumers == 1) w.tile_seconds *= share_of_one_consumer;
    return w;
}

/* The key tiles of query tile n in the order of tasks. */
static int64_t count_key_tiles(const work *w, int64_t n)
{
    if (!w->causal) return fa_cuda_count_tiles(w->n_k, w->keys);
    const int64_t tile = w->tiles - 1 - n / w->heads, end = (tile + 1) * w->queries,
                  last = (end < w->rows_q ? end : w->rows_q) - 1;
    int64_t keys = w->first_hi + last;
    if (keys > w->n_k) keys = w->n_k;
    return keys < 1 ? 1 : fa_cuda_count_tiles(keys, w->keys);
}

static int64_t count_work_tiles(const work *w) { return w->heads * w->tiles; }

/* ---- The choice ------------------------------------------------------------------------------ */

typedef struct choice {
    int64_t whole, part_tiles, parts; /* parts 0: none fits into the workspace */
    double seconds;
} choice;

/* Rounds are as long as the longest of their tasks. Tasks with all keys come first, then the first parts, and so on; each kind has
 * its longest first. */
static double seconds_of_rounds(const work *w, const choice *c)
{
    const int64_t cut = count_work_tiles(w) - c->whole, all = c->whole + cut * c->parts;
    double seconds = 0;
    for (int64_t from = 0; from < all; from += w->blocks) {
        int64_t longest = 0;
        if (from < c->whole) longest = count_key_tiles(w, from);
        const int64_t first = from > c->whole ? (from - c->whole) / cut : 0;
        for (int64_t part = first; part < c->parts; part++) {
            const int64_t begin = c->whole + part * cut, at = from > begin ? from - begin : 0;
            if (begin >= from + w->blocks) break;
            int64_t tiles = count_key_tiles(w, c->whole + at) - part * c->part_tiles;
            if (tiles > c->part_tiles) tiles = c->part_tiles;
            if (tiles > longest) longest = tiles;
            if (longest == c->part_tiles) break;
        }
        if (longest) seconds += (double)longest * w->tile_seconds + task_seconds;
    }
    return seconds;
}

static double count_bytes(const work *w, const choice *c)
{
    return (double)((count_work_tiles(w) - c->whole) * c->parts * w->queries) * w->row_bytes;
}

static void try_choice(const work *w, choice c, choice *best)
{
    const double bytes = count_bytes(w, &c);
    if (bytes > MOST_WORKSPACE) return;
    c.seconds = seconds_of_rounds(w, &c) + merge_seconds + 2 * bytes / sums_rate;
    if (c.seconds < best->seconds) *best = c;
}

/* Under a causal mask all query tiles are cut: those with few keys have one part. */
static choice choose(const work *w)
{
    const int64_t work_tiles = count_work_tiles(w), most = count_key_tiles(w, 0);
    const int64_t rounds = w->causal ? 0 : work_tiles / w->blocks;
    choice best = {0, 0, 0, INFINITY};
    for (int64_t parts = 2; parts <= FA_SM90_PARTS && parts <= most; parts++) {
        const int64_t part_tiles = fa_cuda_count_tiles(most, parts);
        if (fa_cuda_count_tiles(most, part_tiles) < parts) continue;
        for (int64_t n = rounds > 1 ? rounds - 1 : 0; n <= rounds; n++)
            if (n * w->blocks < work_tiles)
                try_choice(w, (choice){n * w->blocks, part_tiles, parts, 0}, &best);
    }
    return best;
}

/* Without split keys. Under a causal mask a block takes pairs of a long and a short work tile. */
static double plain_seconds(const work *w)
{
    const int64_t work_tiles = count_work_tiles(w),
                  rounds = fa_cuda_count_tiles(work_tiles, w->blocks);
    const double longest = (double)count_key_tiles(w, 0) * w->tile_seconds + task_seconds;
    if (!w->causal || rounds <= 1) return (double)rounds * longest;
    const double shortest =
        (double)count_key_tiles(w, work_tiles - 1) * w->tile_seconds + task_seconds;
    const double pairs = (double)fa_cuda_count_tiles(fa_cuda_count_tiles(work_tiles, 2), w->blocks);
    const double average = (longest + shortest) / 2 * (double)work_tiles / (double)w->blocks;
    return fmax(longest, fmin(pairs * (longest + shortest), average + 0.3 * longest));
}

/* ---- The launches ---------------------------------------------------------------------------- */

fa_sm90_split fa_cuda_split_float32_of(const fa_problem *p, const fa_cuda_plan_launch *l)
{
    fa_sm90_split split = l->sm90.split;
    const int64_t rows = (int64_t)(split.first_task[1] - split.first_task[0]) * split.queries;
    split.out = (float *)(void *)((char *)p->workspace + l->workspace_offset);
    split.sums = (fa_sm90_row_sum *)(void *)(split.out + rows * split.value_dim);
    return split;
}

bool fa_cuda_split_float32_params(const fa_problem *p, const fa_cuda_plan_launch *l,
                                  fa_cuda_encoder *encode, fa_sm90_params *params,
                                  fa_cuda_fault *fault)
{
    if (!fa_cuda_sm90_params(p, l, encode, params, fault)) return false;
    params->split = fa_cuda_split_float32_of(p, l);
    params->task_kind = FA_SM90_WORK_TILES;
    params->tasks = params->split.first_task[1];
    params->balanced_heads = params->alternating_heads = 0;
    return true;
}

void fa_cuda_merge_float32_params(const fa_problem *p, const fa_cuda_plan_launch *l,
                                  fa_sm90_params *params)
{
    const int64_t diagonal = p->diagonal_given ? p->diagonal : p->n_k - p->rows_q;
    params->split = fa_cuda_split_float32_of(p, l);
    params->reach = fa_sm90_find_reach(p->causal, -1, -1, diagonal);
    params->tasks = (int64_t)params->split.part_tiles * l->tile_k;
}

static bool queue_split(void *kernel, const fa_cuda_plan *plan, const fa_cuda_plan_launch *l,
                        const fa_cuda_call *call, fa_cuda_fault *fault)
{
    fa_attention_params attention;
    fa_sm90_params params;
    fa_cuda_set_params(call->problem, l, &attention);
    return fa_cuda_split_float32_params(call->problem, l, fa_cuda_encode_map, &params, fault) &&
           fa_cuda_queue(kernel, plan, l, call->stream, (void *[]){&attention, &params}, fault);
}

static bool queue_merge(void *kernel, const fa_cuda_plan *plan, const fa_cuda_plan_launch *l,
                        const fa_cuda_call *call, fa_cuda_fault *fault)
{
    fa_attention_params attention;
    fa_sm90_params params;
    fa_cuda_set_params(call->problem, l, &attention);
    fa_cuda_merge_float32_params(call->problem, l, &params);
    return fa_cuda_queue(kernel, plan, l, call->stream, (void *[]){&attention, &params}, fault);
}

/* ---- The plan -------------------------------------------------------------------------------- */

void fa_cuda_cut_split_float32(const fa_problem *p, const fa_cuda_device *device, int64_t whole,
                               int64_t part_tiles, fa_cuda_plan *plan)
{
    enum { MERGE_ROWS = FA_SM90_MERGE_THREADS / 32 /* of a block */ };
    fa_cuda_plan_launch *l = &plan->launches[0], *merge = &plan->launches[1];
    const work w = find_work(p, &fa_variants[l->variant], device);
    const int64_t cut = count_work_tiles(&w) - whole,
                  parts = fa_cuda_count_tiles(count_key_tiles(&w, 0), part_tiles);
    fa_sm90_split split = {.parts = (int32_t)parts,
                           .part_tiles = (int32_t)part_tiles,
                           .heads = (int32_t)w.heads,
                           .tiles = (int32_t)w.tiles,
                           .queries = w.queries,
                           .value_dim = pitch_of(p)};
    split.first_tile[0] = p->causal;
    split.first_tile[1] = w.variant->options != 0;
    split.first_task[0] = (int32_t)whole;
    split.first_task[1] = (int32_t)(whole + cut * parts);
    l->sm90.split = merge->sm90.split = split;
    const int64_t blocks = split.first_task[1] < w.blocks ? split.first_task[1] : w.blocks;
    l->grid = (uint32_t)blocks * l->cluster;
    merge->grid = fa_cuda_grid(fa_cuda_count_tiles(cut * w.queries, MERGE_ROWS));
    merge->tiles = l->tiles;
    merge->tasks = l->tasks;
    merge->tile_q = l->tile_q;
    merge->tile_k = l->tile_k;
    plan->workspace_bytes = l->workspace_bytes = merge->workspace_bytes =
        (size_t)(cut * parts * w.queries) * (size_t)w.row_bytes;
}

static bool plan_split(const fa_cuda_family *whole, const fa_problem *p,
                       const fa_cuda_device *device, fa_cuda_plan *plan, char *why, size_t size)
{
    if (refuse_split(p, why, size) || !whole->plan(p, device, plan, why, size)) return false;
    fa_cuda_plan_launch *l = &plan->launches[0];
    const work w = find_work(p, &fa_variants[l->variant], device);
    if (w.heads > INT32_MAX / FA_SM90_PARTS / (w.tiles + 1)) {
        fa_cuda_say(why, size, "there are %" PRId64 " work tiles", l->tasks);
        return false;
    }
    const choice c = choose(&w);
    if (c.parts == 0) {
        fa_cuda_say(why, size, "queries see one key tile, or sums of parts need more than %d MiB",
                    (int)(MOST_WORKSPACE >> 20));
        return false;
    }
    l->queue = queue_split;
    fa_cuda_plan_launch *merge =
        fa_cuda_plan_add(&fa_variants[FA_VARIANT_forward_sm90_merge_float32], FA_SM90_MERGE_THREADS,
                         0, queue_merge, device, plan, why, size);
    if (!merge) return false;
    merge->overlaps = true;
    merge->idle = false;
    fa_cuda_cut_split_float32(p, device, c.whole, c.part_tiles, plan);
    return true;
}

/* Whether the kernel is faster without split keys. Most problems have so many work tiles that the model is not needed. */
static bool is_slower(const fa_problem *p, const fa_variant *v, const fa_cuda_device *device)
{
    if (!v || refuse_split(p, NULL, 0)) return true;
    const work w = find_work(p, v, device);
    if (count_work_tiles(&w) > MOST_ROUNDS * w.blocks || count_key_tiles(&w, 0) < 2) return true;
    const double plain = plain_seconds(&w);
    return plain < merge_seconds + task_seconds || plain < least_gain * choose(&w).seconds;
}

static bool is_tf32_slower(const fa_problem *p, const fa_cuda_device *device, char *why,
                           size_t size)
{
    (void)why, (void)size;
    const bool own = !fa_cuda_refuse_tf32(p, NULL, 0);
    return is_slower(p, own ? fa_cuda_find_tf32_sm90(p, device) : NULL, device);
}

static bool plan_tf32(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                      char *why, size_t size)
{
    return plan_split(&fa_cuda_forward_tf32_sm90, p, device, plan, why, size);
}

static bool is_f16x3_slower(const fa_problem *p, const fa_cuda_device *device, char *why,
                            size_t size)
{
    (void)why, (void)size;
    const bool own =
        !fa_cuda_refuse_other_than_float32(p, NULL, 0) && p->precision == FA_PRECISION_FLOAT32;
    return is_slower(p, own ? fa_cuda_find_f16x3_sm90(p, device) : NULL, device);
}

static bool plan_f16x3(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                       char *why, size_t size)
{
    if (p->precision != FA_PRECISION_FLOAT32) { /* another family's, which comes first */
        fa_cuda_say(why, size, "options.precision is not FA_PRECISION_FLOAT32");
        return false;
    }
    return plan_split(&fa_cuda_forward_f16x3_sm90, p, device, plan, why, size);
}

const fa_cuda_family fa_cuda_forward_split_tf32_sm90 = {
    .name = "tf32_split",
    .oldest = 90,
    .newest = 90,
    .does_few = true,
    .slower = is_tf32_slower,
    .without_workspace = &fa_cuda_forward_tf32_sm90,
    .plan = plan_tf32,
};

const fa_cuda_family fa_cuda_forward_split_f16x3_sm90 = {
    .name = "f16x3_split",
    .oldest = 90,
    .newest = 90,
    .does_few = true,
    .slower = is_f16x3_slower,
    .without_workspace = &fa_cuda_forward_f16x3_sm90,
    .plan = plan_f16x3,
};
