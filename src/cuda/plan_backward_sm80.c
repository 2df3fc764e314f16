/*
 * backward_sm80: gradients on tensor cores by mma.sync, float16 and bfloat16, in three launches.
 * The same source compiled for float32 inputs whose operands may be rounded to tf32 is the family
 * tf32 (one product in float16), and with three products in float16 for each of float32 the family tf32x3. With sums of dQ in the
 * caller's dq these two are the family tf32_in_place, in two launches. tf32x3_corrected is tf32x3
 * with a launch that corrects the weights of rows with large scores.
 */
#include "cuda/plan_backward_sm80.h"

#include <inttypes.h>
#include <math.h>

#include "cuda/family.h"
#include "cuda/plan_backward.h"

/* The kernel counts rows and keys of a sequence in 32 bits, with room for a tile and a mask's edge. */
static const int64_t max_rows = (1 << 30) - 4096;

/* ---- The launches ---------------------------------------------------------------------------- */

void fa_cuda_backward_sm80_params(const fa_problem *p, const fa_cuda_plan_launch *l,
                                  fa_backward_sm80_params *params)
{
    const fa_cuda_backward_sm80_launch *x = &l->backward_sm80;
    char *workspace = (char *)p->workspace + l->workspace_offset;
    params->q_tiles = x->q_tiles;
    params->sums = x->in_place ? NULL : (float *)(void *)workspace;
    params->rows = (float *)(void *)(workspace + x->rows_offset);
    params->factors = x->corrected ? (float *)(void *)(workspace + x->factors_offset) : NULL;
    params->parts = x->split ? workspace + x->parts_offset : NULL;
    params->powers =
        x->split ? (fa_backward_sm80_powers *)(void *)(workspace + x->powers_offset) : NULL;
    params->semaphores = x->ordered ? (int32_t *)(void *)(workspace + x->semaphores_offset) : NULL;
    params->heads_together = x->heads_together;
    params->divisors = fa_cuda_key_divisors(l->tiles, l->tasks, p->heads_q / p->heads_kv,
                                            p->heads_kv, x->heads_together);
    params->uniform = fa_cuda_uniform_lengths(p);
    params->low_parts = x->low_parts;
    params->splits = x->splits;
    params->query_parts = x->query_parts;
    params->keys = x->keys;
    params->head_dim = x->head_dim;
    params->key_sums = x->splits > 1 ? (float *)(void *)(workspace + x->key_sums_offset) : NULL;
    params->ds_unit = (x->in_place ? p->scale : 1.0f) * (1 << FA_BACKWARD_SM80_SCORE_BITS);
}

static bool queue_sm80(void *kernel, const fa_cuda_plan *plan, const fa_cuda_plan_launch *l,
                       const fa_cuda_call *call, fa_cuda_fault *fault)
{
    fa_backward_params backward;
    fa_backward_sm80_params params;
    fa_cuda_set_backward_params(call->problem, l, &backward);
    fa_cuda_backward_sm80_params(call->problem, l, &params);
    return fa_cuda_queue(kernel, plan, l, call->stream, (void *[]){&backward, &params}, fault);
}

/* ---- The plan -------------------------------------------------------------------------------- */

/* The variants of a family: those of the kernel, and the first ones of the launches before and
 * behind it. */
typedef struct rows {
    int first, end, prepare, finish;
} rows;

static const rows of_16_bits = {FA_FIRST_backward_sm80, FA_END_backward_sm80,
                                FA_FIRST_backward_prepare_sm80, FA_FIRST_backward_finish_sm80};
static const rows of_tf32 = {FA_FIRST_backward_tf32, FA_END_backward_tf32,
                             FA_FIRST_backward_prepare_tf32, FA_FIRST_backward_finish_tf32};
static const rows of_tf32x3 = {FA_FIRST_backward_tf32x3, FA_END_backward_tf32x3,
                               FA_FIRST_backward_prepare_tf32, FA_FIRST_backward_finish_tf32};

/* What a family has beside the kernel and prepare. */
enum {
    PLAIN = 0,
    IN_PLACE = 1, /* sums of dQ in dq, and no finish */
    CORRECTED = 2 /* weight_sums */
};

/* Whether a variant has the type of the problem. All rows of the families tf32 and tf32x3 have
 * float32. */
static bool has_type(const fa_variant *v, const fa_problem *p)
{
    return p->q.dtype == FA_FLOAT32 || v->element == (fa_element)p->q.dtype;
}

/* The narrowest of a pass's variants that has the type of the problem. */
static const fa_variant *find_pass(const fa_problem *p, int first, int dim)
{
    const fa_variant *v = &fa_variants[first];
    while (v->head_dim < dim || !has_type(v, p)) v++;
    return v;
}

static int count_smem(const fa_variant *v)
{
    return FA_BACKWARD_SM80_SMEM(v->element, v->head_dim, v->keys, v->queries, v->warps,
                                 v->group_rows, v->stages, v->slices);
}

/* Pairs of a query and a key of a head that tiles of so many keys compute. */
static int64_t count_pairs(const fa_problem *p, int keys)
{
    const int64_t tiles = fa_cuda_count_tiles(p->n_k, keys);
    if (!p->causal) return tiles * keys * p->n_q;
    int64_t diagonal = p->diagonal_given ? p->diagonal : p->n_k - p->n_q;
    if (diagonal < -p->n_q) diagonal = -p->n_q;
    if (diagonal > p->n_k) diagonal = p->n_k;
    /* Tiles that all queries see, and the end of those that some see: each of these has `keys` queries fewer than the one before. */
    int64_t whole = diagonal < 0 ? 0 : diagonal / keys + 1,
            end = fa_cuda_count_tiles(p->n_q + diagonal, keys);
    if (whole > tiles) whole = tiles;
    if (end > tiles) end = tiles;
    int64_t pairs = whole * keys * p->n_q;
    if (end > whole)
        pairs += keys * ((end - whole) * (p->n_q + diagonal) -
                         keys * ((whole + end - 1) * (end - whole) / 2));
    return pairs;
}

/* Whether a variant of short sequences is better than one with twice as many keys in a tile, although it computes a pair in some
 * 6% more time (H200, tf32, head dim 64, with the faster `prepare`, 1.09 of it: causal n 128, 300, 512 1.33, 1.27, 1.12, n 1k 0.95; full n 130, 300 1.46, 1.25). If
 * lengths are on the device, the longest sequence is another item's, which must not matter. */
static bool wants_short(const fa_problem *p, const fa_variant *v)
{
    if (fa_cuda_has_own_lengths(p) || p->window_left >= 0 || p->n_k > 1024) return false;
    return 100 * count_pairs(p, 2 * v->keys) >= 108 * count_pairs(p, v->keys);
}

/* Blocks with so much dynamic shared memory that a multiprocessor has room for. */
static int count_fitting(const fa_cuda_device *device, const fa_variant *v, int smem)
{
    return device->smem_per_sm / (smem + fa_cuda_static_smem(v) + 1024); /* the driver's own */
}

/* Blocks that the device runs at once. */
static int64_t count_running(const fa_cuda_device *device, const fa_variant *v, int smem)
{
    const int fitting = count_fitting(device, v, smem);
    const int resident = fitting < 1 ? 1 : fitting < v->blocks ? fitting : v->blocks;
    return (int64_t)device->multiprocessors * resident;
}

/* Blocks that share the keys of a key/value head: each has some of its query heads, and one of `query_parts` parts of their
 * queries. */
typedef struct shares {
    int of_heads, query_parts;
} shares;

/* Blocks that share the queries of a head, if a round of blocks has places left. With fewer queries the launch that adds up
 * gradients of keys would take longer than is won. */
static int count_query_parts(const fa_problem *p, int64_t tasks, int64_t running)
{
    const int64_t least = 128, most = p->max_q / least; /* queries of a part */
    if (tasks == 0 || p->batch_invariant) return 1;
    const int64_t parts = running / tasks;
    return (int)(parts < 1 || most < 1 ? 1 : parts < most ? parts : most);
}

static bool is_ordered(const fa_problem *p) { return p->deterministic || p->batch_invariant; }

static bool is_packed(const fa_problem *p) { return p->cu_seqlens_q && p->cu_seqlens_k; }

/* Whether the time of blocks is known well enough to choose by it: sums have any order, and lengths are known, or of packed
 * sequences their sum and the longest. */
static bool has_times(const fa_problem *p, const fa_variant *v)
{
    const bool known =
        is_packed(p) ? p->max_q < p->rows_q || p->batch == 1 : !fa_cuda_has_own_lengths(p);
    return known && !is_ordered(p) && p->max_q > 0 && p->n_k > 0 && p->heads_kv > 0 &&
           p->batch > 0 && v->head_dim <= 256;
}

/* Tasks of the launch before blocks share keys: of packed sequences as many as there may be. */
static int64_t count_launch_tasks(const fa_problem *p, const fa_variant *v)
{
    fa_cuda_plan_launch l;
    fa_cuda_set_key_tasks(p, v->keys, &l);
    return l.tasks;
}

/* Key tiles of all heads. Of each packed sequence the last one is half a tile on average. */
static double count_tasks(const fa_problem *p, const fa_variant *v)
{
    const double tiles = is_packed(p) ? (double)p->rows_k / v->keys + (double)p->batch / 2
                                      : (double)(p->batch * fa_cuda_count_tiles(p->n_k, v->keys));
    return tiles * (double)p->heads_kv;
}

/* The arithmetic of a multiprocessor, in millions of operations a us, and the time of a block besides its tiles. */
typedef struct pace {
    double rate, block;
} pace;

static pace find_pace(const fa_variant *v)
{
    const double block = v->blocks > 1 ? 4.3 : v->head_dim <= 128 ? 7.3 : 10.0;
    if (v->element == FA_ELEMENT_TF32) return (pace){1.2, block};
    if (v->element == FA_ELEMENT_TF32X3) return (pace){0.65, block};
    const bool large = v->keys == 128 && v->queries == 64;
    if (v->head_dim == 96) return (pace){large ? 2.36 : 1.93, block};
    return (pace){large ? 2.55 : 2.25, block};
}

/* Queries that a key tile sees: at most, and on average. Packed sequences count as long ones. */
typedef struct seen {
    double most, average;
} seen;

static seen count_seen(const fa_problem *p, const fa_variant *v)
{
    const double all = (double)(fa_cuda_count_tiles(p->max_q, v->queries) * v->queries);
    const int64_t right = p->causal ? 0 : p->window_right;
    seen s = {all, all};
    if (p->causal && is_packed(p)) s.average = fmin(all, (all + v->keys) / 2);
    else if (p->causal)
        s.average = (double)count_pairs(p, v->keys) /
                    (double)(fa_cuda_count_tiles(p->n_k, v->keys) * v->keys);
    if (p->window_left < 0 || right < 0) return s;
    const double near = (double)p->window_left + (double)right + v->keys + 64;
    s.most = fmin(s.most, near), s.average = fmin(s.average, near);
    return s;
}

/* The time of the blocks, and of adding up what they leave, in us. Blocks of one length run in rounds. Under a causal mask, with a
 * window and in packed sequences lengths differ, and some blocks have no queries of their part. There the last blocks end
 * alone: packed sequences are in any order, otherwise long blocks come first. */
static double shares_us(const fa_problem *p, const fa_cuda_device *device, const fa_variant *v,
                        const seen *s, shares by)
{
    static const double alone = 0.72; /* the time of a block that has a multiprocessor for itself */
    static const double adding = 1.5, bytes_a_us = 4.2e6, end = 0.3, end_packed = 0.35;
    const pace pace = find_pace(v);
    const bool window = p->window_left >= 0;
    const double splits = (double)by.of_heads * by.query_parts, parts = by.query_parts,
                 blocks = count_tasks(p, v) * splits, places = device->multiprocessors;
    double running = (double)count_running(device, v, count_smem(v)),
           query = 10e-6 * v->head_dim * v->keys * running / places / pace.rate;
    if (running > places && blocks <= places) query *= alone, running = places;
    query *= (double)p->heads_q / ((double)p->heads_kv * by.of_heads);
    const int64_t tiles = fa_cuda_count_tiles(p->max_q, v->queries);
    const double of_part = (double)(fa_cuda_count_tiles(tiles, by.query_parts) * v->queries);
    const double longest = query * fmin(s->most, of_part) + pace.block;
    double us = longest * ceil(blocks / running);
    if (p->causal || window || is_packed(p)) {
        const double busy = parts == 1 ? blocks
                            : window   ? fmin(blocks, (s->most / of_part + 1) / parts * blocks)
                                       : (parts + 1) / (2 * parts) * blocks; /* have queries */
        const double usual = query * s->average * blocks / (busy * parts) + pace.block;
        const double last = is_packed(p) ? end_packed * longest : end * usual;
        us = busy <= running ? longest : fmax(longest, usual * busy / running + last);
    }
    if (splits <= 1) return us;
    return us + adding + 2 * blocks * v->keys * 2 * v->head_dim * sizeof(float) / bytes_a_us;
}

/* Whether the sums of blocks that share keys take at most as many bytes as 16-bit gradients of each query head, or 128 MiB. */
static bool has_room_for_sums(const fa_problem *p, const fa_variant *v, int64_t splits,
                              int64_t blocks)
{
    const int64_t bytes =
        blocks * FA_BACKWARD_SM80_KEY_SUMS((int64_t)v->keys, v->head_dim) * (int64_t)sizeof(float);
    return 2 * splits * p->heads_kv <= p->heads_q || bytes <= (int64_t)128 << 20;
}

/* The shares with the least time, and this time. In 312 shapes (H200, 16 bits, head dims 64 to 256, groups of 1 to 16 heads, windows), to
 * which the numbers are fitted, it takes 1.018 times as long as the best of all shares and variants, in 202 others 1.016; by the number of key
 * tiles alone, at most half of a group's heads, and parts only for blocks that run at once, 1.18. 84 packed batches, 1.01 and 1.04; float32,
 * 60 shapes, 1.03 with one product, 1.01 with three. That number decides where has_times says so. */
static shares choose_shares(const fa_problem *p, const fa_cuda_device *device, const fa_variant *v,
                            double *least)
{
    enum { MOST_PARTS = 24, LEAST_ROWS = 64 };
    const int64_t running = count_running(device, v, count_smem(v)),
                  tasks = count_launch_tasks(p, v),
                  group = p->heads_kv > 0 ? p->heads_q / p->heads_kv : 1;
    shares best = {1, 1};
    *least = 0;
    if (tasks == 0 || !has_times(p, v)) {
        best.of_heads = fa_cuda_count_splits(p, tasks, running);
        best.query_parts = count_query_parts(p, tasks * best.of_heads, running);
        return best;
    }
    const seen s = count_seen(p, v);
    *least = shares_us(p, device, v, &s, best);
    for (int of_heads = 1; of_heads <= group && of_heads <= FA_CUDA_MOST_SPLITS; of_heads++) {
        if (group % of_heads) continue;
        for (int parts = 1; parts <= (is_packed(p) ? 1 : MOST_PARTS); parts++) {
            const int64_t splits = (int64_t)of_heads * parts, blocks = tasks * splits;
            if (parts > 1 && (blocks > 2 * running || p->max_q < LEAST_ROWS * parts)) break;
            if (splits == 1 || !has_room_for_sums(p, v, splits, blocks)) continue;
            const double us = shares_us(p, device, v, &s, (shares){of_heads, parts});
            if (us < *least) best = (shares){of_heads, parts}, *least = us;
        }
    }
    return best;
}

/* The time of the blocks of a variant, without options: pairs of a query and a key that a multiprocessor computes. */
static double count_pairs_of_rounds(const fa_problem *p, const fa_cuda_device *device,
                                    const fa_variant *v)
{
    const int64_t running = count_running(device, v, count_smem(v)),
                  tasks = count_launch_tasks(p, v);
    double us;
    const shares by = choose_shares(p, device, v, &us);
    const int64_t splits = (int64_t)by.of_heads * by.query_parts, blocks = tasks * splits;
    if (blocks == 0) return 0;
    const double longest =
        (double)v->keys * (double)p->n_q * (double)p->heads_q / (double)(p->heads_kv * splits);
    const double all = (double)count_pairs(p, v->keys) * (double)p->heads_q * (double)p->batch;
    const int64_t turns = fa_cuda_count_tiles(blocks, running);
    const double rounds = (double)turns * all / (double)blocks;
    return rounds > longest ? rounds : longest;
}

/* Whether a variant's warps have columns of one gradient each. It adds to no rows of the caller, and has 64 keys where the
 * variant of wider heads has 32: so it computes a pair in 1 / 1.4 of the time (H200, head dims 264 and 320, n 4k), but has half
 * as many blocks. With few blocks the other one is faster (head dim 320, 4 heads, n 2k: causal 1.33, full 0.73; 2 heads, n 512
 * 1.13). If lengths are on the device, or an item's bits must not depend on the batch, the number of blocks must not matter. */
static bool has_one_gradient(const fa_variant *v)
{
    return FA_BACKWARD_SM80_BOTH_BESIDE_KEYS(v->element, v->keys, v->queries, v->slices);
}

static bool wants_one_gradient(const fa_problem *p, const fa_cuda_device *device,
                               const fa_variant *v, int with)
{
    const fa_variant *other = &fa_variants[FA_VARIANT_backward_tf32_d384];
    if (with & IN_PLACE) return false;
    if (fa_cuda_has_own_lengths(p)) return true;
    if (p->batch_invariant) return p->n_k > other->keys;
    return count_pairs_of_rounds(p, device, v) <= 1.4 * count_pairs_of_rounds(p, device, other);
}

/* Whether a float32 bias is all that changes scores. */
static bool has_bias_alone(const fa_problem *p)
{
    return p->bias.data && p->bias.dtype == FA_FLOAT32 && !p->mask.data && !(p->softcap > 0) &&
           !p->alibi_slopes && !p->dropout_threshold;
}

/* Whether a variant is for the problem; one with every option also does without. */
static bool takes(const fa_variant *v, const fa_problem *p, const fa_cuda_device *device, int with)
{
    const int64_t dim = p->d > p->d_v ? p->d : p->d_v;
    return v->head_dim >= dim && has_type(v, p) && (!v->short_rows || wants_short(p, v)) &&
           (!has_one_gradient(v) || wants_one_gradient(p, device, v, with)) &&
           (v->options == FA_BACKWARD_SM80_ALL || !fa_cuda_changes_scores(p) ||
            (v->options == FA_BACKWARD_SM80_BIAS && has_bias_alone(p)));
}

/* Whether a multiprocessor has room for so many blocks. */
static bool has_room(const fa_cuda_device *device, const fa_variant *v, int blocks)
{
    const int smem = count_smem(v);
    return smem + fa_cuda_static_smem(v) <= device->smem_per_block &&
           blocks <= count_fitting(device, v, smem);
}

/* The first variant that does the problem and that a block's shared memory has room for; of the same head dim rather one that
 * has as many blocks on a multiprocessor as it is made for. Without any the first that does the problem, which is refused. */
static const fa_variant *find_main(const fa_problem *p, const rows *of, int with,
                                   const fa_cuda_device *device)
{
    const fa_variant *found = NULL, *first = NULL;
    for (int i = of->first; i < of->end; i++) {
        const fa_variant *v = &fa_variants[i];
        if (!takes(v, p, device, with) || (found && v->head_dim > found->head_dim)) continue;
        if (has_room(device, v, v->blocks)) return v;
        if (!found && has_room(device, v, 1)) found = v;
        if (!first) first = v;
    }
    return found ? found : first;
}

/* Another variant than the first one, if the time of its blocks is less: with tiles of 32 queries, and above head dim 64 of 64
 * keys and two blocks on a multiprocessor (H200, us with the first one and with this: head dim 128, packed sequences of 172 keys on
 * average 802, 776, 48 of 189 467, 428, n 192 469, 408, a window of 104 keys 278, 214; with ALiBi n 282 194, 161, with a softcap n 346
 * 126, 110; head dim 96, three query heads for a key head, n 193 and a window of 129 keys 183, 154). With 45 shapes of head dims 72 to 96 it makes
 * 1.02 of the rate, with 36 shapes with options 1.02. */
static const fa_variant *find_faster(const fa_problem *p, const rows *of, int with,
                                     const fa_cuda_device *device, const fa_variant *first)
{
    const fa_variant *best = first;
    double least, us;
    if (p->q.dtype == FA_FLOAT32 || first->head_dim > 128 || !has_times(p, first)) return first;
    choose_shares(p, device, first, &least);
    for (int i = of->first; i < of->end; i++) {
        const fa_variant *v = &fa_variants[i];
        if (v == first || v->options != first->options || v->head_dim != first->head_dim ||
            !takes(v, p, device, with) || !has_room(device, v, v->blocks))
            continue;
        choose_shares(p, device, v, &us);
        if (us < least) best = v, least = us;
    }
    return best;
}

static fa_cuda_plan_launch *add_pass(const fa_cuda_planning *x, int first, int dim)
{
    fa_cuda_plan_launch *l =
        fa_cuda_plan_add(find_pass(x->problem, first, dim), FA_BACKWARD_SM80_PASS_THREADS, 0,
                         queue_sm80, x->device, x->plan, x->why, x->size);
    if (l) fa_cuda_set_query_tasks(x->problem, FA_BACKWARD_SM80_TILE, l);
    return l;
}

/* Rounds of blocks, in percent, of the heads that take turns where sums have any order (H200, times the
 * rate with one head, one round and two: head dim 128, n 4k 1.06, 1.06, n 1k 0.99, 1.035; one item, 16
 * heads, n 4k 1.24, 1.23, n 2k 1.38, 1.44; float32, n 4k 1.04, 1.04, n 1k 0.99, 1.035). */
enum { ROUNDS_PERCENT = 200 };

/* Heads whose blocks take turns where sums have one order. */
static int64_t count_heads_together(const fa_cuda_plan_launch *l, const fa_cuda_device *device)
{
    if (l->tasks == 0) return 1;
    const int64_t half = (l->tiles + 1) / 2, at_once = half < 8 ? half : 8;
    const int64_t blocks = (int64_t)device->multiprocessors * fa_variants[l->variant].blocks;
    const int64_t heads = l->tasks / l->tiles, most = blocks / at_once + 1;
    const int64_t groups = (heads + most / 2) / most;
    return groups > 1 ? (heads + groups - 1) / groups : heads;
}

/* The variant of weight_sums that computes weights as a variant of the kernel does, bit by bit. */
static const fa_variant *find_weight_sums(const fa_variant *main)
{
    const fa_variant *v = &fa_variants[FA_FIRST_backward_weight_sums_tf32x3];
    const int options = main->options ? FA_BACKWARD_SM80_ALL : 0;
    while (v->head_dim != main->head_dim || v->options != options) v++;
    return v;
}

/* As many blocks as the device runs at a time share the tasks. */
static fa_cuda_plan_launch *add_weight_sums(const fa_cuda_planning *x, const fa_variant *main)
{
    const fa_variant *v = find_weight_sums(main);
    const int smem = FA_BACKWARD_SM80_WEIGHT_SUMS_SMEM(v->element, v->head_dim, v->keys, v->queries,
                                                       v->group_rows);
    fa_cuda_plan_launch *l = fa_cuda_plan_add(v, FA_BACKWARD_SM80_THREADS(v->warps), smem,
                                              queue_sm80, x->device, x->plan, x->why, x->size);
    if (!l) return NULL;
    const int64_t most = count_running(x->device, v, smem);
    fa_cuda_set_query_tasks(x->problem, FA_BACKWARD_SM80_TILE, l);
    if (l->grid > most) l->grid = (uint32_t)most;
    return l;
}

/* Sums, unless they are in dq; rows; factors and norms; float16 parts and their powers; semaphores if sums have one order, which also
 * makes an item's sums independent of the batch; sums of splits. */
static void plan_workspace(const fa_cuda_planning *x, const fa_cuda_plan_launch *prepare,
                           const fa_cuda_plan_launch *main, int with, int splits, int query_parts)
{
    const fa_problem *p = x->problem;
    const fa_variant *v = &fa_variants[main->variant];
    const size_t tiles = (size_t)prepare->tasks;
    fa_cuda_backward_sm80_launch own;
    own.q_tiles = prepare->tiles;
    own.in_place = (with & IN_PLACE) != 0;
    own.corrected = (with & CORRECTED) != 0;
    own.rows_offset = own.in_place ? 0 : tiles * (size_t)FA_BACKWARD_SM80_SUM_BYTES(v->head_dim);
    own.factors_offset = own.rows_offset + tiles * (size_t)FA_BACKWARD_SM80_ROW_BYTES;
    own.semaphores_offset = own.factors_offset;
    if (own.corrected)
        own.semaphores_offset +=
            tiles * (size_t)(FA_BACKWARD_SM80_FACTOR_BYTES + FA_BACKWARD_SM80_NORM_BYTES);
    own.semaphores_offset = fa_cuda_aligned(own.semaphores_offset); /* for parts */
    own.split = FA_BACKWARD_SM80_HAS_PARTS(v->element);
    own.low_parts = v->element == FA_ELEMENT_TF32X3;
    own.parts_offset = own.powers_offset = own.semaphores_offset;
    if (own.split) {
        own.powers_offset += tiles * 2 * (size_t)FA_BACKWARD_SM80_PART_BYTES(v->head_dim);
        own.semaphores_offset = own.powers_offset + tiles * (size_t)FA_BACKWARD_SM80_POWER_BYTES;
    }
    own.ordered = is_ordered(p);
    own.heads_together =
        own.ordered ? count_heads_together(main, x->device)
                    : fa_cuda_count_heads_in_turn(
                          p, main, count_running(x->device, v, count_smem(v)), ROUNDS_PERCENT);
    x->plan->workspace_bytes = own.semaphores_offset;
    if (own.ordered)
        x->plan->workspace_bytes +=
            tiles * FA_BACKWARD_SM80_SEMAPHORES(v->element, v->head_dim) * sizeof(int32_t);
    own.splits = splits;
    own.query_parts = query_parts;
    own.keys = v->keys;
    own.head_dim = v->head_dim;
    own.key_sums_offset = fa_cuda_aligned(x->plan->workspace_bytes);
    if (splits > 1)
        x->plan->workspace_bytes =
            own.key_sums_offset +
            (size_t)main->tasks * FA_BACKWARD_SM80_KEY_SUMS((size_t)v->keys, (size_t)v->head_dim) *
                sizeof(float);
    for (int i = 0; i < x->plan->count; i++) {
        x->plan->launches[i].backward_sm80 = own;
        x->plan->launches[i].workspace_bytes = x->plan->workspace_bytes;
    }
}

static const char *arithmetic_of(const fa_variant *v)
{
    switch (v->element) {
    case FA_ELEMENT_TF32X3: return "three float16 products for each (mma.sync), float32 sums";
    case FA_ELEMENT_BFLOAT16: return "bfloat16 products (mma.sync), float32 sums";
    default: return "float16 products (mma.sync), float32 sums";
    }
}

/* Who computes dbias. In float32 the kernel of the other gradients, if dS has no factor of 0: it stores dbias or adds to it. */
static fa_cuda_dbias choose_dbias(const fa_problem *p, int with)
{
    const fa_cuda_dbias dbias = fa_cuda_choose_dbias(p);
    const bool usual = p->q.dtype == FA_FLOAT32 && p->dbias.dtype == FA_FLOAT32 &&
                       (!(with & IN_PLACE) || fabsf(p->scale) >= 0x1p-100f);
    return usual ? dbias : FA_CUDA_DBIAS_ALONE;
}

static bool plan_launches(const fa_cuda_planning *x, const rows *of, int with)
{
    const fa_problem *p = x->problem;
    fa_cuda_plan *plan = x->plan;
    const fa_variant *v = find_faster(p, of, with, x->device, find_main(p, of, with, x->device));
    const fa_cuda_dbias dbias = choose_dbias(p, with);
    fa_cuda_plan_launch *const prepare = add_pass(x, of->prepare, v->head_dim);
    if ((with & CORRECTED) && !add_weight_sums(x, v)) return false;
    if (!fa_cuda_add_dbias_clear(x, dbias)) return false;
    fa_cuda_plan_launch *const main =
        fa_cuda_plan_add(v, FA_BACKWARD_SM80_THREADS(v->warps), count_smem(v), queue_sm80,
                         x->device, plan, x->why, x->size);
    fa_cuda_plan_launch *const finish =
        with & IN_PLACE ? NULL : add_pass(x, of->finish, v->head_dim);
    if (!prepare || !main || (!finish && !(with & IN_PLACE))) return false;
    plan->arithmetic = arithmetic_of(v);
    fa_cuda_set_key_tasks(p, v->keys, main);
    main->tile_q = v->queries;
    double us;
    const shares by = choose_shares(p, x->device, v, &us);
    const int splits = by.of_heads * by.query_parts;
    if (splits > 1) fa_cuda_set_tasks(main, main->tiles, main->tasks * splits);
    if (!fa_cuda_add_finish_keys(x, &fa_variants[FA_VARIANT_backward_sm80_finish_keys],
                                 FA_BACKWARD_SM80_PASS_THREADS, queue_sm80, main, splits,
                                 FA_BACKWARD_SM80_KEY_SLICES))
        return false;
    plan_workspace(x, prepare, main, with, splits, by.query_parts);
    if (finish) finish->idle = finish->idle || !p->dq.data;
    return fa_cuda_add_dbias_round(x, dbias, 0) && fa_cuda_add_dbias_dsinks(x, dbias, NULL);
}

/* What none of the variants does, whatever its element type. */
static bool refuse_others(const fa_problem *p, char *why, size_t size)
{
    return fa_cuda_refuse_options(p, why, size) || fa_cuda_refuse_gradients(p, why, size) ||
           fa_cuda_refuse_rows(p, max_rows, why, size) ||
           fa_cuda_refuse_wide_backward(p, why, size);
}

static bool refuse_wide_float32(const fa_problem *p, char *why, size_t size)
{
    const int64_t dim = p->d > p->d_v ? p->d : p->d_v;
    const int widest = fa_variants[FA_LAST_backward_tf32].head_dim;
    if (dim <= widest) return false;
    fa_cuda_say(why, size, "the head dim is %" PRId64 ", above %d", dim, widest);
    return true;
}

static bool plan_sm80(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                      char *why, size_t size)
{
    const fa_cuda_planning x = {p, device, plan, why, size};
    return !fa_cuda_refuse_dtypes(p, true, why, size) && !refuse_others(p, why, size) &&
           plan_launches(&x, &of_16_bits, PLAIN);
}

static bool plan_tf32(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                      char *why, size_t size)
{
    const fa_cuda_planning x = {p, device, plan, why, size};
    return !fa_cuda_refuse_tf32(p, why, size) && !refuse_others(p, why, size) &&
           !refuse_wide_float32(p, why, size) && plan_launches(&x, &of_tf32, PLAIN);
}

const fa_cuda_family fa_cuda_backward_sm80 = {
    .name = "sm80",
    .oldest = 80,
    .newest = FA_CUDA_NEWEST,
    .plan = plan_sm80,
};

static bool plan_float32(const fa_cuda_planning *x, const rows *of, int with)
{
    const fa_problem *p = x->problem;
    if (fa_cuda_refuse_other_than_float32(p, x->why, x->size)) return false;
    if (p->precision == FA_PRECISION_IEEE) {
        fa_cuda_say(x->why, x->size, "options.precision is FA_PRECISION_IEEE");
        return false;
    }
    return !refuse_others(p, x->why, x->size) && !refuse_wide_float32(p, x->why, x->size) &&
           plan_launches(x, of, with);
}

static bool plan_tf32x3(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                        char *why, size_t size)
{
    const fa_cuda_planning x = {p, device, plan, why, size};
    return plan_float32(&x, &of_tf32x3, PLAIN);
}

static bool plan_in_place(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                          char *why, size_t size)
{
    const fa_cuda_planning x = {p, device, plan, why, size};
    return plan_float32(&x, p->precision == FA_PRECISION_TF32 ? &of_tf32 : &of_tf32x3, IN_PLACE);
}

const fa_cuda_family fa_cuda_backward_tf32x3 = {
    .name = "tf32x3",
    .oldest = 80,
    .newest = FA_CUDA_NEWEST,
    .plan = plan_tf32x3,
};

const fa_cuda_family fa_cuda_backward_tf32 = {
    .name = "tf32",
    .oldest = 80,
    .newest = FA_CUDA_NEWEST,
    .replaces = {&fa_cuda_backward_tf32x3, &fa_cuda_backward_tf32x3_corrected},
    .plan = plan_tf32,
};

/* With many key tiles, sums in dq itself cost more than the launch that they save (4 x 96 heads of
 * dim 128 on an H100, tf32: n 512 3.4% faster, n 1k equal, n 4k 1.6% slower). So they do for wide heads, which have small key
 * tiles (H200, n 512: head dim 256 2.0% faster, 384 2.5% slower, 512 2.2% slower). */
static bool has_many_additions(const fa_problem *p)
{
    return p->n_k > 1024 || p->d > 256 || p->d_v > 256;
}

/* In float32 grade, tf32x3_corrected has its sums in dq, too, and is more exact. That needs no
 * words. */
static bool is_slower_in_place(const fa_problem *p, const fa_cuda_device *device, char *why,
                               size_t size)
{
    (void)device, (void)why, (void)size;
    return has_many_additions(p) || p->precision != FA_PRECISION_TF32;
}

/* From Hopper on, which adds four neighbours of a row at once. */
const fa_cuda_family fa_cuda_backward_tf32_in_place = {
    .name = "tf32_in_place",
    .oldest = 90,
    .newest = FA_CUDA_NEWEST,
    .does_few = true,
    .slower = is_slower_in_place,
    .replaces = {&fa_cuda_backward_tf32, &fa_cuda_backward_tf32x3,
                 &fa_cuda_backward_tf32x3_corrected},
    .plan = plan_in_place,
};

static bool plan_corrected(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                           char *why, size_t size)
{
    const fa_cuda_planning x = {p, device, plan, why, size};
    const bool in_place =
        fa_cuda_is_tried(&fa_cuda_backward_tf32_in_place, device) && !has_many_additions(p);
    return plan_float32(&x, &of_tf32x3, CORRECTED | (in_place ? IN_PLACE : 0));
}

const fa_cuda_family fa_cuda_backward_tf32x3_corrected = {
    .name = "tf32x3_corrected",
    .oldest = 80,
    .newest = FA_CUDA_NEWEST,
    .plan = plan_corrected,
};
