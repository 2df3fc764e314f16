/*
 * forward_sm80_split: the forward pass on Ampere with split keys, for problems with too few work tiles for all
 * multiprocessors. Each work tile has a part of the keys, and a second launch merges the parts. A model of the time decides
 * how many parts there are, how many heads share query tiles, and whether this is faster than forward_sm80 at all.
 */
#include "cuda/plan_split_sm80.h"

#include <inttypes.h>
#include <math.h>

#include "cuda/family.h"
#include "cuda/parameters.h"
#include "cuda/plan_decode.h"
#include "cuda/plan_sm80.h"

/* The model, for an H200: fitted to the times of 36 shapes with several tiles and numbers of parts, of which it chooses ones
 * that take 0.7% longer than the best on average. Of a multiprocessor: products, floating-point operations a second; of a
 * score's softmax, seconds. */
static const double products_rate = 3.0e12;
static const double score_seconds = 3.9e-11;

/* The same of other devices, relative to that, by their data sheets. */
static const double speed_of_a100 = 0.62, speed_of_ada = 0.35;

/* With 16 rows a warp, products take so many times as long: each fragment of keys and values serves one mma. */
static const double cost_of_few_rows = 1.23;

/* With two of four warps that share rows (head dim 192) so many times, and so much longer for a key tile alone: 2 heads of
 * 2,000 queries 83 us without split keys, 4,096 of 40 heads 1,800 us. */
static const double cost_of_sharing = 1.2, sharing_seconds = 0.4e-6;

/* With key tiles of 32 keys also so many times: 147 queries of 64 heads for 8 at 32,105, head dim 256, 1,195 us, with 64 keys
 * and 128 rows 1,052. */
static const double cost_of_short_tiles = 1.1;

static const double tile_seconds =
    0.44e-6; /* of a key tile besides, if nothing else runs on the multiprocessor */
static const double block_seconds = 6e-6; /* of a block besides its key tiles */
static const double second_seconds =
    1.7e-6; /* of its second key tile, whose code is another one than the first one's */
static const double merge_seconds = 4.1e-6; /* of the second launch besides its loads, */
static const double loads_seconds = 0.8e-6; /* which are issued so many parts at a time; */
enum { LOADED_PARTS = 8 };
static const double memory_rate = 6e12; /* and bytes a second, of sums that are stored and loaded */

/* The model must be so many times as fast with split keys: it is not exact. */
static const double least_gain = 1.1;

/* Query tiles of several heads must leave so many times fewer of them: their queries take longer to load. */
static const double least_gain_of_sharing = 1.05;

enum {
    LEAST_ROWS = 12, /* of a sequence and key head */
    MOST_LANE_BITS = 2,
    FEW_THREADS = 32768, /* of a merge: some 250 for each multiprocessor */
    MOST_GROUP_BITS = 6,
    MOST_WORKSPACE = 256 << 20, /* bytes */
    MOST_ROUNDS = 4,            /* with more, the last one can hardly be a tenth of the time */
    ROW_SUM_BYTES = sizeof(fa_sm90_row_sum)
};

/* ---- What can be split ----------------------------------------------------------------------- */

/* Few queries are refused where decode_sm80 takes them, if not before their data are known: then the workspace would have
 * room for these kernels, which never run them. */
static bool has_too_few_queries(const fa_problem *p)
{
    const int64_t rows = p->max_q * fa_divide(p->heads_q, p->heads_kv ? p->heads_kv : 1);
    return p->max_q <= fa_cuda_most_few(p) &&
           (p->pass == FA_PASS_DECODE || p->max_q < 2 || rows < LEAST_ROWS);
}

static bool refuse_split(const fa_problem *p, char *why, size_t size)
{
    if (has_too_few_queries(p) || p->n_k < 1 || p->batch < 1 || p->heads_q < 1 || p->d < 1 ||
        p->d_v < 1) {
        fa_cuda_say(why, size, "q has %" PRId64 " queries a sequence: expected more", p->max_q);
        return true;
    }
    const char *option = p->batch_invariant           ? "options.flags has FA_BATCH_INVARIANT"
                         : fa_cuda_sm80_is_general(p) ? "an option changes scores or weights"
                                                      : NULL;
    if (option) fa_cuda_say(why, size, "%s: keys are not split", option);
    return option;
}

/* The same, and whatever the kernels cannot run. */
static bool refuse(const fa_problem *p, char *why, size_t size)
{
    return fa_cuda_refuse_dtypes(p, true, why, size) || fa_cuda_refuse_options(p, why, size) ||
           fa_cuda_sm80_refuse_sizes(p, 256, why, size) || refuse_split(p, why, size);
}

/* The variants for the problem's heads: from this one on, while they have the same head dim. NULL: there is none. */
static const fa_variant *find_variant(const fa_problem *p)
{
    const int64_t dim = p->d > p->d_v ? p->d : p->d_v;
    for (int i = FA_FIRST_forward_sm80_split; i < FA_END_forward_sm80_split; i++)
        if (fa_variants[i].element == (fa_element)p->q.dtype && fa_variants[i].head_dim >= dim)
            return &fa_variants[i];
    return NULL;
}

/* ---- Query tiles ----------------------------------------------------------------------------- */

/* The work, as far as the host knows: lengths on the device are at most these. */
typedef struct shape {
    int64_t tiles;        /* query tiles of all heads that have queries, at most */
    double average_tiles; /* key tiles that a query tile sees; */
    int64_t most_tiles;   /* at most */
    double rows;          /* of all heads and sequences */
} shape;

static int64_t clamp(int64_t x, int64_t least, int64_t most)
{
    return x < least ? least : x > most ? most : x;
}

/* The key tiles that the query tile of this last query sees. */
static int64_t count_key_tiles(const fa_problem *p, int64_t last, int64_t n_q, int64_t n_k,
                               const fa_variant *v)
{
    const int64_t unbounded = INT64_C(1) << 40;
    const int64_t diagonal =
        clamp(p->diagonal_given ? p->diagonal : n_k - n_q, -unbounded, unbounded);
    int64_t right = p->causal ? 0 : unbounded, keys = n_k;
    if (p->window_right >= 0 && p->window_right < right) right = p->window_right;
    if (right < unbounded) keys = clamp(last + diagonal + right + 1, 0, n_k);
    if (right < unbounded && p->window_left >= 0 && p->window_left < n_k) {
        const int64_t span = p->window_left + right + fa_cuda_sm80_queries(v) + 32;
        if (span < keys) keys = span;
    }
    return keys < 1 ? 1 : fa_cuda_count_tiles(keys, v->keys);
}

static shape find_shape(const fa_problem *p, const fa_variant *v, int group_bits)
{
    const int64_t queries = fa_cuda_sm80_queries(v) >> group_bits;
    const int64_t n_q = p->max_q, each = fa_cuda_count_tiles(n_q, queries);
    const int64_t n_k = p->cu_seqlens_k ? fa_cuda_count_tiles(p->rows_k, p->batch) : p->n_k;
    int64_t tiles = each * p->batch;
    if (p->cu_seqlens_q && p->rows_q / queries + p->batch < tiles)
        tiles = p->rows_q / queries + p->batch;
    const int64_t first = count_key_tiles(p, (queries < n_q ? queries : n_q) - 1, n_q, n_k, v),
                  most = count_key_tiles(p, n_q - 1, n_q, n_k, v);
    return (shape){.tiles = tiles * (p->heads_q >> group_bits),
                   .average_tiles = (double)(first + most) / 2,
                   .most_tiles = most,
                   .rows = (double)p->rows_q * (double)p->heads_q *
                           (double)(p->cu_seqlens_q ? 1 : p->batch)};
}

/* log2 of the heads that share query tiles: none if that leaves hardly fewer of them. */
static int choose_group_bits(const fa_problem *p, const fa_variant *v)
{
    const int64_t group = fa_divide(p->heads_q, p->heads_kv);
    int64_t least = find_shape(p, v, 0).tiles;
    int best = 0;
    for (int bits = 1; bits <= MOST_GROUP_BITS && (group >> bits) << bits == group; bits++) {
        const int64_t tiles = find_shape(p, v, bits).tiles;
        if (least_gain_of_sharing * (double)tiles > (double)least) continue;
        least = tiles;
        best = bits;
    }
    return best;
}

/* ---- The model of the time ------------------------------------------------------------------- */

static double speed_of(const fa_cuda_device *device)
{
    const int architecture = fa_cuda_architecture(device);
    return architecture == 80                          ? speed_of_a100
           : architecture == 90 || architecture == 100 ? 1.0
                                                       : speed_of_ada;
}

/* Of a key tile of each of so many blocks on a multiprocessor. */
static double seconds_of_tiles(const fa_cuda_device *device, const fa_variant *v, int64_t blocks)
{
    const double scores = (double)fa_cuda_sm80_queries(v) * v->keys;
    const bool shares = v->split == 2 && v->warps == 4;
    const double cost = (v->group_rows == 16 ? cost_of_few_rows : 1.0) *
                        (v->keys < 64 ? cost_of_short_tiles : 1.0) *
                        (shares ? cost_of_sharing : 1.0);
    const double work = (cost * 4 * scores * v->head_dim / products_rate + scores * score_seconds) /
                        speed_of(device);
    return fmax((double)blocks * work, work + tile_seconds + (shares ? sharing_seconds : 0));
}

/* Of so many blocks, which have so many key tiles on average and at most. Blocks of rather different lengths leave no gap
 * between rounds. */
static double seconds_of_blocks(const fa_cuda_device *device, const fa_variant *v, int64_t blocks,
                                double average, double most)
{
    const int64_t sms = device->multiprocessors, room = fa_cuda_sm80_room(device, v);
    const int64_t rounds = fa_divide(blocks, room * sms), rest = blocks - rounds * room * sms;
    const double round = average * seconds_of_tiles(device, v, room) + block_seconds;
    const double last =
        average * seconds_of_tiles(device, v, fa_cuda_count_tiles(rest, sms)) + block_seconds;
    const double others =
        (most - average) * seconds_of_tiles(device, v, 1) + (most > 1 ? second_seconds : 0);
    if (most > 1.25 * average && rounds > 0)
        return (double)blocks / (double)(room * sms) * round + others;
    return (double)rounds * round + (rest > 0 ? last : 0) + others;
}

/* log2 of the lanes that share the parts of a row: some, if there are so few rows that the loads of one after the other would
 * be most of the time. */
static int choose_lane_bits(const fa_problem *p, int parts)
{
    const int64_t columns = fa_cuda_count_tiles(p->d_v, FA_SM90_MERGE_COLUMNS),
                  rows = p->rows_q * p->heads_q * (p->cu_seqlens_q ? 1 : p->batch);
    int bits = 0;
    while (bits < MOST_LANE_BITS && parts > LOADED_PARTS << bits &&
           rows * columns << bits <= FEW_THREADS)
        bits++;
    return bits;
}

static double split_seconds(const fa_problem *p, const fa_cuda_device *device, const fa_variant *v,
                            const shape *s, int64_t parts)
{
    const double bytes = s->rows * (double)parts * ((double)p->d_v * sizeof(float) + ROW_SUM_BYTES);
    const int64_t loads =
        fa_cuda_count_tiles(parts, LOADED_PARTS << choose_lane_bits(p, (int)parts));
    return seconds_of_blocks(device, v, s->tiles * parts, ceil(s->average_tiles / (double)parts),
                             (double)fa_cuda_count_tiles(s->most_tiles, parts)) +
           merge_seconds + (double)loads * loads_seconds + 2 * bytes / memory_rate;
}

/* The tasks of a part, with the numbers of packed tiles that have no rows. */
static int64_t count_tasks(const fa_problem *p, const fa_variant *v, int group_bits)
{
    fa_cuda_plan_launch l;
    fa_cuda_set_query_tasks(p, fa_cuda_sm80_queries(v) >> group_bits, &l);
    return l.tasks >> group_bits;
}

static double count_bytes(const fa_variant *v, int64_t tasks, int64_t parts)
{
    return (double)tasks * (double)parts * fa_cuda_sm80_queries(v) *
           (v->head_dim * (double)sizeof(float) + ROW_SUM_BYTES);
}

/* A variant, how it is used, and the time. variant NULL: sums of parts do not fit into the workspace. */
typedef struct choice {
    const fa_variant *variant;
    int parts, group_bits;
    double seconds;
} choice;

static void try_variant(const fa_problem *p, const fa_cuda_device *device, const fa_variant *v,
                        choice *best)
{
    const int group_bits = choose_group_bits(p, v);
    const shape s = find_shape(p, v, group_bits);
    const int64_t tasks = count_tasks(p, v, group_bits);
    int64_t length = 0;
    for (int parts = 1; parts <= FA_SM80_MOST_PARTS && parts <= s.most_tiles; parts++) {
        const int64_t before = length;
        length = fa_cuda_count_tiles(s.most_tiles, parts);
        if (length == before) continue;
        if (count_bytes(v, tasks, parts) > MOST_WORKSPACE) return;
        const double seconds = split_seconds(p, device, v, &s, parts);
        if (seconds < best->seconds) *best = (choice){v, parts, group_bits, seconds};
    }
}

static choice choose(const fa_problem *p, const fa_cuda_device *device)
{
    choice best = {NULL, 0, 0, INFINITY};
    const fa_variant *first = find_variant(p), *end = &fa_variants[FA_END_forward_sm80_split];
    for (const fa_variant *v = first; v && v < end && v->head_dim == first->head_dim; v++)
        if (v->element == first->element &&
            fa_cuda_sm80_smem(v) + fa_cuda_static_smem(v) <= device->smem_per_block)
            try_variant(p, device, v, &best);
    return best;
}

/* ---- The launches ---------------------------------------------------------------------------- */

void fa_cuda_set_split_sm80_params(const fa_problem *p, const fa_cuda_plan_launch *l,
                                   fa_sm80_split_params *params)
{
    const fa_sm80_split *split = &l->sm80.split;
    fa_attention_params *a = &params->attention;
    fa_cuda_set_params(p, l, a);
    params->split = *split;
    params->split.head_stride = a->q.stride[2];
    params->split.out = (float *)(void *)((char *)p->workspace + l->workspace_offset);
    params->split.sums =
        (fa_sm90_row_sum *)(void *)(params->split.out +
                                    l->tasks * split->parts * split->queries * split->value_dim);
    a->q.stride[2] *= INT64_C(1) << split->group_bits;
    a->heads_q >>= split->group_bits;
}

static bool queue_split(void *kernel, const fa_cuda_plan *plan, const fa_cuda_plan_launch *l,
                        const fa_cuda_call *call, fa_cuda_fault *fault)
{
    fa_sm80_split_params params;
    fa_cuda_set_split_sm80_params(call->problem, l, &params);
    return fa_cuda_queue(kernel, plan, l, call->stream, (void *[]){&params}, fault);
}

/* ---- The plan -------------------------------------------------------------------------------- */

void fa_cuda_cut_split_sm80(const fa_problem *p, int parts, int group_bits, fa_cuda_plan *plan)
{
    fa_cuda_plan_launch *l = &plan->launches[0], *merge = l + 1;
    const fa_variant *v = &fa_variants[l->variant];
    const int queries = fa_cuda_sm80_queries(v), lane_bits = choose_lane_bits(p, parts);
    const int64_t columns = fa_cuda_count_tiles(p->d_v, FA_SM90_MERGE_COLUMNS),
                  threads = queries * columns << lane_bits,
                  tile_blocks = fa_cuda_count_tiles(threads, FA_SM80_MERGE_THREADS);
    fa_cuda_set_query_tasks(p, queries >> group_bits, l);
    l->tasks >>= group_bits;
    l->sm80.split = (fa_sm80_split){.parts = parts,
                                    .queries = queries,
                                    .value_dim = v->head_dim,
                                    .group_bits = group_bits,
                                    .lane_bits = lane_bits,
                                    .tile_blocks = (int32_t)tile_blocks};
    l->grid = fa_cuda_grid(l->tasks * parts);
    merge->tiles = l->tiles;
    merge->tasks = l->tasks;
    merge->sm80.split = l->sm80.split;
    merge->grid = fa_cuda_grid(l->tasks * tile_blocks);
    merge->idle = l->idle;
    l->workspace_bytes = merge->workspace_bytes = (size_t)count_bytes(v, l->tasks, parts);
    plan->workspace_bytes = l->workspace_bytes;
}

static bool plan_split(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                       char *why, size_t size)
{
    static const int merges[] = {FA_VARIANT_forward_sm80_merge_f16,
                                 FA_VARIANT_forward_sm80_merge_bf16};
    if (refuse(p, why, size)) return false;
    const choice best = choose(p, device);
    const fa_variant *v = best.variant;
    if (!v) {
        fa_cuda_say(why, size,
                    "a block needs more shared memory, or sums of parts more than %d MiB",
                    (int)(MOST_WORKSPACE >> 20));
        return false;
    }
    const int merge = merges[p->q.dtype != FA_FLOAT16];
    if (!fa_cuda_plan_add(v, FA_SM80_THREADS(v->warps), fa_cuda_sm80_smem(v), queue_split, device,
                          plan, why, size) ||
        !fa_cuda_plan_add(&fa_variants[merge], FA_SM80_MERGE_THREADS, 0, queue_split, device, plan,
                          why, size))
        return false;
    plan->arithmetic = fa_cuda_sm80_arithmetic(v);
    plan->launches[0].tile_k = v->keys;
    fa_cuda_cut_split_sm80(p, best.parts, best.group_bits, plan);
    return true;
}

/* Whether decode_sm80 runs few queries as fast. From 12 rows on it is 1.03 to 2.4 times as slow with few sequences (H200, us:
 * 5 queries of 8 sequences of 661 keys, 4 heads of 1, 26.2 and 12.6; 6 of 8 at 8,265, 16 of 4, 63 and 54; 15 of one at
 * 6,610, 16 of 8, 45 and 23): the last block of a work tile merges its parts, alone. */
static bool is_for_decode(const fa_problem *p, const fa_cuda_device *device)
{
    return p->max_q <= fa_cuda_most_few(p) &&
           (p->cu_seqlens_q || p->batch * p->heads_kv > device->multiprocessors);
}

/* Whether forward_sm80 or decode_sm80 is faster. Most problems have so many query tiles that the model is not needed. */
static bool is_slower(const fa_problem *p, const fa_cuda_device *device, char *why, size_t size)
{
    (void)why, (void)size;
    if (refuse(p, NULL, 0) || is_for_decode(p, device)) return true;
    const fa_variant *v = find_variant(p), *plain = fa_cuda_sm80_variant(p, device);
    if (!v || !plain) return true;
    const int64_t room = fa_cuda_sm80_room(device, v);
    if (find_shape(p, v, choose_group_bits(p, v)).tiles >
        MOST_ROUNDS * room * device->multiprocessors)
        return true;
    const shape alone = find_shape(p, plain, 0);
    const double plain_seconds = seconds_of_blocks(device, plain, alone.tiles, alone.average_tiles,
                                                   (double)alone.most_tiles);
    const choice best = choose(p, device);
    return (best.parts < 2 && best.group_bits == 0) || plain_seconds <= least_gain * best.seconds;
}

const fa_cuda_family fa_cuda_forward_split_sm80 = {
    .name = "sm80_split",
    .oldest = 80,
    .newest = FA_CUDA_NEWEST,
    .except =
        90, /* what forward_sm90_split refuses there is rare, and would need room in each workspace */
    .does_few = true,
    .slower = is_slower,
    .without_workspace = &fa_cuda_forward_sm80,
    .plan = plan_split,
};
