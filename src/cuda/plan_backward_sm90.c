/* backward_sm90: gradients on Hopper's tensor cores (wgmma, TMA), float16 and bfloat16, in three launches. */
#include "cuda/plan_backward_sm90.h"

#include <inttypes.h>
#include <math.h>

#include "cuda/family.h"
#include "../../kernels/backward_sm90_wide/backward_sm90_wide.h"
#include "cuda/plan_backward.h"

/* The kernel counts rows and keys of a sequence in 32 bits, with room for a tile and a mask's edge. */
static const int64_t max_rows = (1 << 30) - 4096;

/* ---- The launches ---------------------------------------------------------------------------- */

/* dbias, or its sums. */
static fa_view dbias_rows(const fa_problem *p, const fa_cuda_plan_launch *l)
{
    const fa_view sums = fa_cuda_dbias_sums(p, l->dbias_sums_offset);
    return fa_cuda_score_rows(l->dbias == FA_CUDA_DBIAS_SUMMED ? &sums : &p->dbias);
}

static bool has_dbias_map(const fa_cuda_backward_sm90_launch *x)
{
    return x->dbias_mapped != FA_BACKWARD_SM90_DBIAS_BY_STRIDES &&
           x->dbias_mapped != FA_BACKWARD_SM90_DBIAS_LEFT;
}

/* The map of dQ, if blocks store it. */
static bool set_dq_map(const fa_cuda_plan_launch *l, fa_cuda_encoder *encode,
                       fa_backward_sm90_params *params, fa_cuda_fault *fault)
{
    const fa_cuda_backward_sm90_launch *x = &l->backward_sm90;
    return fa_cuda_encode_maps(&x->maps[5], (fa_sm90_map *[]){&params->dq},
                               x->whole_dq && x->maps[5].base, encode, fault);
}

/* The maps of the bias and of dbias, of those that have one. */
static bool set_score_maps(const fa_problem *p, const fa_cuda_plan_launch *l,
                           fa_cuda_encoder *encode, fa_backward_sm90_params *params,
                           fa_cuda_fault *fault)
{
    const fa_view bias = fa_cuda_score_rows(&p->bias), dbias = dbias_rows(p, l);
    const fa_cuda_backward_sm90_launch *x = &l->backward_sm90;
    fa_tensor_map_shape dbias_map = x->maps[5];
    dbias_map.base = dbias.data; /* sums are in the workspace */
    params->bias_mapped = x->bias_mapped;
    params->dbias_mapped = x->dbias_mapped;
    params->bias_step = fa_cuda_map_steps(&bias);
    params->dbias_step = fa_cuda_map_steps(&dbias);
    return fa_cuda_encode_maps(&x->maps[4], (fa_sm90_map *[]){&params->bias}, x->bias_mapped,
                               encode, fault) &&
           fa_cuda_encode_maps(&dbias_map, (fa_sm90_map *[]){&params->dbias}, has_dbias_map(x),
                               encode, fault);
}

/* Bytes of the counters. */
static size_t left_counter_bytes(int64_t units)
{
    return fa_cuda_aligned((size_t)units * 2 * sizeof(int32_t));
}

/* Bytes of sums that units pass on. */
static size_t left_sum_bytes(int64_t groups, int64_t key_tiles, int64_t q_tiles)
{
    const int64_t tile = FA_BACKWARD_SM90_QUERIES * FA_BACKWARD_SM90_KEYS * (int64_t)sizeof(float);
    return groups > 1 ? (size_t)(key_tiles * q_tiles * tile) : 0;
}

static void set_left(const fa_problem *p, const fa_cuda_backward_sm90_launch *x,
                     fa_backward_sm90_params *params)
{
    char *at = (char *)p->workspace + x->left.offset;
    params->left = (fa_backward_sm90_left){.units = x->left.units,
                                           .room = x->left.room,
                                           .blocks = x->left.blocks,
                                           .summed = x->left.summed};
    params->left_groups =
        (fa_backward_sm90_left_groups){.count = x->left.groups, .units = x->left.group_units};
    if (x->left.units == 0) return;
    params->left.counters = (int32_t *)(void *)at;
    at += left_counter_bytes(x->left.units);
    params->left_groups.sums = (float *)(void *)at;
    params->left.ds = at + left_sum_bytes(x->left.groups, x->left.group_units, x->q_tiles);
}

void fa_cuda_backward_sm90_set_divisors(int64_t tiles, int64_t tasks, int64_t group,
                                        int64_t heads_kv, fa_backward_sm90_params *s)
{
    const int64_t items = s->items_together > 1 ? s->items_together : 1;
    s->divisors = fa_cuda_key_divisors(tiles, tasks, group, heads_kv, s->heads_together);
    s->ascending = fa_cuda_turns(s->heads_ascending, s->ascending_together, tiles);
    s->by_items = fa_cuda_reciprocal(items);
    s->item_tasks = tasks / items;
}

bool fa_cuda_backward_sm90_params(const fa_problem *p, const fa_cuda_plan_launch *l,
                                  fa_cuda_encoder *encode, fa_backward_sm90_params *params,
                                  fa_cuda_fault *fault)
{
    const fa_cuda_backward_sm90_launch *x = &l->backward_sm90;
    char *workspace = (char *)p->workspace + l->workspace_offset;
    fa_sm90_map *const maps[] = {&params->q, &params->k, &params->v, &params->dout};
    params->q_step = fa_cuda_map_steps(&p->q);
    params->k_step = fa_cuda_map_steps(&p->k);
    params->v_step = fa_cuda_map_steps(&p->v);
    params->dout_step = fa_cuda_map_steps(&p->dout);
    params->q_tiles = x->q_tiles;
    params->sums = (float *)(void *)workspace;
    params->sums_transposed = x->sums_transposed;
    params->rows = (float *)(void *)(workspace + x->rows_offset);
    params->delta = x->delta_offset ? (float *)(void *)(workspace + x->delta_offset) : NULL;
    params->semaphores = x->ordered || x->first_stored
                             ? (int32_t *)(void *)(workspace + x->semaphores_offset)
                             : NULL;
    params->first_stored = x->first_stored;
    params->first_ahead = x->first_stored && !x->ordered;
    params->next_work =
        x->counter_offset ? (uint32_t *)(void *)(workspace + x->counter_offset) : NULL;
    params->counters = x->units ? (int32_t *)(void *)(workspace + x->counters_offset) : NULL;
    params->units = x->units;
    params->units_together = x->units_together;
    params->unit_heads = x->unit_heads;
    params->slices = x->slices;
    params->head_slices = x->head_slices;
    set_left(p, x, params);
    const bool ahead = x->groups > 0 && p->dq.data;
    params->cleared = ahead ? (int32_t *)(void *)(workspace + x->cleared_offset) : NULL;
    params->groups = x->groups;
    params->groups_ahead = x->groups_ahead;
    params->group_blocks = x->group_blocks;
    params->group_tiles = x->group_tiles;
    params->sum_tiles = x->sum_tiles;
    params->prepared_tiles = x->whole_dq ? 0 : ahead ? x->groups_ahead * x->group_tiles : INT32_MAX;
    params->query_parts = x->query_parts;
    params->prepares = x->prepares;
    params->heads_ascending = x->heads_ascending;
    params->ascending_together = x->ascending_together;
    params->counts_pairs = x->counts_pairs;
    params->tiles_ahead = x->tiles_ahead;
    params->heads_together = x->heads_together;
    params->items_together = (int32_t)x->items_together;
    params->splits = x->splits;
    fa_cuda_backward_sm90_set_divisors(l->tiles, l->tasks, p->heads_q / p->heads_kv, p->heads_kv,
                                       params);
    params->uniform = fa_cuda_uniform_lengths(p);
    params->keys = x->keys;
    params->head_dim = x->head_dim;
    params->value_dim = x->value_dim;
    params->key_sums = x->splits > 1 ? (float *)(void *)(workspace + x->key_sums_offset) : NULL;
    return fa_cuda_encode_maps(x->maps, maps, 4, encode, fault) &&
           set_score_maps(p, l, encode, params, fault) && set_dq_map(l, encode, params, fault);
}

static bool queue_sm90(void *kernel, const fa_cuda_plan *plan, const fa_cuda_plan_launch *l,
                       const fa_cuda_call *call, fa_cuda_fault *fault)
{
    fa_backward_params backward;
    fa_backward_sm90_params params;
    fa_cuda_set_backward_params(call->problem, l, &backward);
    if (!fa_cuda_backward_sm90_params(call->problem, l, fa_cuda_encode_map, &params, fault))
        return false;
    return fa_cuda_queue(kernel, plan, l, call->stream, (void *[]){&backward, &params}, fault);
}

/* ---- What can be done ------------------------------------------------------------------------ */

static bool refuse_head_dims(const fa_problem *p, int64_t widest, char *why, size_t size)
{
    if (p->d <= widest && p->d_v <= widest) return false;
    fa_cuda_say(why, size, "the head dims are %" PRId64 " and %" PRId64, p->d, p->d_v);
    return true;
}

/* ---- The plan -------------------------------------------------------------------------------- */

/* The options that change scores or weights. */
static int find_options(const fa_problem *p)
{
    int options = 0;
    if (p->softcap > 0) options |= FA_SM90_SOFTCAP;
    if (p->alibi_slopes) options |= FA_SM90_ALIBI;
    if (p->mask.data || p->bias.data) options |= FA_SM90_BY_ROWS;
    if (p->dropout_threshold) options |= FA_SM90_DROPOUT;
    return options;
}

/* The widest head dim. */
static int find_columns(const fa_variant *v) { return v->columns ? v->columns : v->head_dim; }

static bool has_room(const fa_variant *v, const fa_problem *p)
{
    if (v->value_dim) return p->d <= v->head_dim && p->d_v <= v->value_dim;
    return p->d <= find_columns(v) && p->d_v <= find_columns(v);
}

/* Whether blocks must take turns, so that sums of dq have one order. With one key tile each of them has one share; but another
 * kernel would give other bits than with more keys. */
static bool is_ordered(const fa_problem *p)
{
    return (p->deterministic && p->rows_k > FA_BACKWARD_SM90_KEYS) || p->batch_invariant;
}

/* The kernels for the widest head dims have their own tiles and threads. */
static bool is_wide(const fa_variant *v) { return v->cluster > 1; }

/* Whether no key is hidden by its position. */
static bool sees_all(const fa_problem *p)
{
    return !p->causal && p->window_left < 0 && p->window_right < 0;
}

/* Whether there is no mask, all sequences have the same lengths, and a key head has one query head. */
static bool is_full(const fa_problem *p)
{
    return sees_all(p) && !fa_cuda_has_own_lengths(p) && p->heads_q == p->heads_kv;
}

/* Whether query heads share keys. */
static bool has_groups(const fa_problem *p) { return p->heads_q != p->heads_kv; }

/* Whether a key is seen by queries of a limited distance. */
static bool has_window(const fa_problem *p) { return p->window_left >= 0; }

static bool is_packed(const fa_problem *p) { return p->cu_seqlens_q && p->cu_seqlens_k; }

/* The most queries of a sequence. */
static int64_t count_sequence_rows(const fa_problem *p)
{
    return p->cu_seqlens_q && p->max_q < p->rows_q ? p->max_q : p->rows_q;
}

/* Whether it takes those for head dim 64. */
static bool is_narrow(const fa_problem *p) { return p->d <= 64 && p->d_v <= 64; }

/* Whether it takes the variants for head dim 128. */
static bool is_above_96(const fa_problem *p) { return p->d > 96 || p->d_v > 96; }

static int64_t count_key_tiles(const fa_problem *p)
{
    return fa_cuda_count_tiles(p->rows_k, FA_BACKWARD_SM90_KEYS);
}

/* Whether blocks take turns where any order would do, in short sequences without a mask. Their first shares of dQ are stored, so nobody
 * clears the sums, and a head has few blocks that wait. There must be enough of them (rate over that of any order, H200: head dim
 * 128, n 200, 256, 384, 512, 640, 1000 1.07, 1.06, 1.05, 1.01, 1.04, 0.97; with two rounds of blocks 0.97 to 0.98. Head dim 64, n
 * 256, 384, 512, 640, 768 1.01, 1.01, 1.04, 1.02, 1.00; with eight rounds 1.00, with four 0.92. 2,048 queries for 512 keys 1.08 and 0.95.
 * Four query heads for a key/value head 0.97 and 0.92). With three or four key tiles in up to four rounds joined launches are faster
 * (see fills_rounds). columns: the widest head dim of the variant. */
static bool is_short_and_full(const fa_problem *p, const fa_cuda_device *device, int columns)
{
    const int64_t tiles = fa_cuda_count_tiles(p->n_k, FA_BACKWARD_SM90_KEYS),
                  blocks = tiles * p->heads_kv * p->batch;
    if (!is_full(p) || tiles > 5) return false;
    if (columns == 64)
        return tiles > 2 && p->n_q <= p->n_k && blocks >= 11 * device->multiprocessors;
    return columns == 128 && tiles > 1 &&
           blocks >= (tiles == 3 || tiles == 4 ? 4 : 3) * device->multiprocessors;
}

/* Whether wide heads take turns where any order would do. Their first shares of dQ are stored, so nobody clears the sums, and under
 * a causal mask blocks that ascend hardly wait (rate over that of any order, H200: head dim 256, n 512, 1k, 4k, 16k 1.18, 1.13,
 * 1.05, 1.05; 192, n 512, 1k, 2k, 4k 1.06, 1.03, 1.00, 0.97). With few heads most blocks would not ascend (256, n 4k, 8 heads 1.00).
 * Of packed sequences, n_k is the rows of all. */
static bool is_faster_ordered(const fa_problem *p, const fa_cuda_device *device,
                              const fa_variant *v)
{
    const int64_t heads = p->heads_kv * (p->cu_seqlens_k ? 1 : p->batch);
    if (!is_wide(v)) return is_short_and_full(p, device, find_columns(v));
    return fa_cuda_shrinks(p) && heads >= 8 && (find_columns(v) > 192 || p->n_k <= 1024);
}

/* Whether clusters of wide heads that are not persistent are faster, where sums have one order (H200, head dim 192, rate over that of
 * any order, persistent and not: causal n 4k 0.977, 0.954, n 8k 0.950, 0.947, n 16k 0.943 to 0.953, 0.967, n 32k 0.958, 0.988; full n 4k
 * 0.969, 0.966, n 16k 0.930 to 0.953, 0.974). In one round of short rows they have nothing to do ahead (n 512 1.03). */
static bool is_faster_alone(const fa_problem *p, const fa_cuda_device *device)
{
    const int64_t clusters = count_key_tiles(p) * p->heads_kv * p->batch;
    return !p->cu_seqlens_k &&
           (p->rows_k > 12288 || (p->rows_k <= 1024 && clusters <= device->multiprocessors / 2));
}

/* The narrowest of the family's variants for the problem's options: for these alone, or for all that there are. */
static const fa_variant *find_variant(const fa_problem *p, const fa_cuda_device *device,
                                      const fa_cuda_family *family)
{
    const struct {
        const fa_cuda_family *family;
        int first, end;
    } rows[] = {
        {&fa_cuda_backward_sm90, FA_FIRST_backward_sm90, FA_END_backward_sm90},
        {&fa_cuda_backward_sm90_persistent, FA_FIRST_backward_sm90_persistent,
         FA_END_backward_sm90_persistent},
        {&fa_cuda_backward_sm90_joined, FA_FIRST_backward_sm90_joined, FA_END_backward_sm90_joined},
        {&fa_cuda_backward_sm90_single, FA_FIRST_backward_sm90_single, FA_END_backward_sm90_single},
        {&fa_cuda_backward_sm90_chained, FA_FIRST_backward_sm90_chained,
         FA_END_backward_sm90_chained},
        {&fa_cuda_backward_sm90_rounding, FA_FIRST_backward_sm90_rounding,
         FA_END_backward_sm90_rounding}};
    int of = 0;
    while (rows[of].family != family) of++;
    const int options = find_options(p);
    const fa_variant *found = NULL;
    for (int i = rows[of].first; i < rows[of].end; i++) {
        const fa_variant *v = &fa_variants[i];
        if (v->element != (fa_element)p->q.dtype || !has_room(v, p)) continue;
        if (v->options != options && !(options && v->options == FA_SM90_ALL)) continue;
        if (v->ordered && !v->rounding && !is_ordered(p) && !is_faster_ordered(p, device, v))
            continue;
        if (v->rounding == 1 && has_groups(p)) continue;
        if (v->persistent && is_wide(v) && is_faster_alone(p, device)) continue;
        if (!found || find_columns(v) < find_columns(found)) found = v;
    }
    return found;
}

/* That of another pass which goes with it. */
static const fa_variant *find_companion(const fa_variant *of, int first)
{
    const fa_variant *v = &fa_variants[first];
    while (v->head_dim != of->head_dim || v->element != of->element) v++;
    return v;
}

/* The widest head dim of values. */
static int find_value_columns(const fa_variant *v)
{
    return v->value_dim ? v->value_dim : find_columns(v);
}

/* Whether there are sums of dQ in the workspace. */
static bool has_sums(const fa_variant *v) { return !v->single_tiles && !v->chained; }

/* Whether its blocks store dQ. */
static bool stores_dq(const fa_variant *v) { return !has_sums(v) || v->rounding; }

/* Blocks that share a work tile's keys in equal parts. */
static int count_blocks(const fa_variant *v) { return v->cluster > 1 ? v->cluster : 1; }

/* Keys of a block. */
static int find_block_keys(const fa_variant *v)
{
    return is_wide(v) ? FA_BACKWARD_SM90_WIDE_KEYS : FA_BACKWARD_SM90_KEYS;
}

/* Keys of a work tile. */
static int find_keys(const fa_variant *v) { return find_block_keys(v) * count_blocks(v); }

static int find_threads(const fa_variant *v)
{
    return is_wide(v) ? FA_BACKWARD_SM90_WIDE_THREADS : FA_BACKWARD_SM90_THREADS;
}

static int find_smem(const fa_variant *v)
{
    return is_wide(v)
               ? FA_BACKWARD_SM90_WIDE_SMEM(v->element, v->head_dim, v->value_dim, v->q_stages,
                                            v->stages, v->cluster)
               : FA_BACKWARD_SM90_SMEM(
                     v->element, v->head_dim, v->value_dim ? v->value_dim : v->head_dim, v->stages,
                     FA_BACKWARD_SM90_ROW_SLOTS(v->head_dim, v->stages, v->chained), v->options,
                     v->dq_buffers,
                     FA_BACKWARD_SM90_RELIES(v->head_dim, v->options, v->persistent, v->chained));
}

/* Whether there is a tile of a bias in its shared memory. */
static bool has_bias_tile(const fa_variant *v)
{
    return !is_wide(v) && FA_BACKWARD_SM90_BIAS_TILE(v->head_dim, v->stages, v->options);
}

/* How TMA can store dbias, or add to it or to its sums. */
static int map_dbias(const fa_problem *p, fa_cuda_dbias by, fa_tensor_map_shape *map)
{
    const fa_view sums = fa_cuda_dbias_sums(p, 0);
    const fa_view v = fa_cuda_score_rows(by == FA_CUDA_DBIAS_SUMMED ? &sums : &p->dbias);
    const int64_t *n = p->dbias_shape;
    const bool stores = by == FA_CUDA_DBIAS_STORED;
    if (by == FA_CUDA_DBIAS_LEFT) return FA_BACKWARD_SM90_DBIAS_LEFT;
    if (by == FA_CUDA_DBIAS_ALONE || v.stride[3] != 1) return FA_BACKWARD_SM90_DBIAS_BY_STRIDES;
    if (v.dtype != FA_FLOAT32 && v.dtype != p->q.dtype) return FA_BACKWARD_SM90_DBIAS_BY_STRIDES;
    /* TMA stores whole 16 bytes, also behind the end of a row. */
    if (n[3] * FA_ELEMENT_BYTES((fa_element)v.dtype) % 16) return FA_BACKWARD_SM90_DBIAS_BY_STRIDES;
    fa_cuda_map_view(map, &v, n[3], n[2], n[1], n[0], FA_BACKWARD_SM90_QUERIES);
    if (!fa_tensor_map_fits(map, NULL)) return FA_BACKWARD_SM90_DBIAS_BY_STRIDES;
    return !stores                 ? FA_BACKWARD_SM90_DBIAS_ADDED
           : v.dtype == FA_FLOAT32 ? FA_BACKWARD_SM90_DBIAS_STORED_FLOATS
                                   : FA_BACKWARD_SM90_DBIAS_STORED;
}

/* Blocks that load the same elements of a bias, or add to the same ones of dbias, run at the same time: they meet in the L2
 * cache. */
static void plan_shared_bias(const fa_problem *p, fa_cuda_backward_sm90_launch *own)
{
    const bool left = own->left.units > 0; /* then a unit's blocks follow each other */
    const bool by_items =
        left ? p->dbias_shape[0] < p->batch : fa_cuda_is_broadcast(&p->bias, 0) && p->batch > 1;
    const bool by_heads = left ? p->dbias_shape[1] < p->heads_q
                               : fa_cuda_is_broadcast(&p->bias, 1) && p->heads_kv > 1;
    if ((!own->bias_mapped && !own->dbias_mapped) || (own->ordered && !left) || p->cu_seqlens_q)
        return;
    if (left && by_heads) own->heads_together = own->left.blocks;
    else if (by_heads) own->heads_together = p->heads_kv * own->splits * (by_items ? p->batch : 1);
    else if (by_items) own->items_together = p->batch;
}

/* The bias and dbias, where the kernel can use their maps. */
static void map_scores(const fa_problem *p, const fa_variant *v, fa_cuda_dbias dbias,
                       fa_cuda_backward_sm90_launch *own)
{
    const bool has_tile = has_bias_tile(v);
    own->bias_mapped = has_tile && fa_cuda_map_bias(p, &own->maps[4]);
    own->dbias_mapped =
        has_tile ? map_dbias(p, dbias, &own->maps[5]) : FA_BACKWARD_SM90_DBIAS_BY_STRIDES;
}

/* Whether threads of wide heads can load their elements of a bias: two keys at a time. */
static bool has_pairs_of_keys(const fa_problem *p)
{
    const fa_view *bias = &p->bias;
    bool has = bias->stride[3] == 1 && p->n_k % 2 == 0 && (uintptr_t)bias->data % 4 == 0 &&
               !fa_cuda_has_own_lengths(p);
    for (int axis = 0; axis < 3; axis++) has = has && bias->stride[axis] % 2 == 0;
    return has;
}

/* The variant for a bias alone if it has the type of q, TMA loads it, or threads of wide heads, and dbias is stored by TMA or made by
 * another launch. (At head dim 192 threads store it, too.) */
static const fa_variant *find_bias_variant(const fa_problem *p, const fa_variant *by_rows,
                                           fa_cuda_dbias dbias,
                                           const fa_cuda_backward_sm90_launch *own)
{
    const bool wide = is_wide(by_rows);
    const bool stores = dbias == FA_CUDA_DBIAS_ALONE ||
                        own->dbias_mapped != FA_BACKWARD_SM90_DBIAS_BY_STRIDES ||
                        (wide && by_rows->head_dim == 192);
    if (find_options(p) != FA_SM90_BY_ROWS || p->mask.data || p->bias.dtype != p->q.dtype ||
        !(wide ? has_pairs_of_keys(p) : own->bias_mapped) || !stores)
        return by_rows;
    for (int i = FA_FIRST_backward_sm90; i < FA_END_backward_sm90; i++) {
        const fa_variant *v = &fa_variants[i];
        if (v->options == FA_SM90_BIAS && v->head_dim == by_rows->head_dim &&
            v->element == by_rows->element)
            return v;
    }
    return by_rows;
}

/* How many blocks, or clusters of them, the device runs at once. */
static int64_t count_takers(const fa_variant *v, const fa_cuda_device *device)
{
    return (device->multiprocessors + count_blocks(v) - 1) / count_blocks(v);
}

static int64_t clamp(int64_t x, int64_t least, int64_t most)
{
    return x < least ? least : x > most ? most : x;
}

/* Blocks that share the queries of a head, if there are fewer key tiles than multiprocessors. To leave sums of dK and dV and to add
 * them up takes some 8 us, a query tile 1.2 us at head dim 64 and 1.9 at 128 (H200, rate over that of one part: head dim 128, 10
 * query tiles in 3 parts 0.98, 12 in 2 1.08, 18 in 3 1.37 to 1.44, 32 in 2 1.37, 64 in 2 1.48, 128 in 2 1.74; head dims 192 and 128, 32 in
 * 2 1.40; head dim 64, 16 in 2 0.98, 32 in 2 1.27, 64 in 2 1.57). With one key tile there are no sums of dQ, and fewer tiles are enough. */
static int count_query_parts(const fa_problem *p, const fa_variant *v, int64_t tasks,
                             const fa_cuda_device *device)
{
    const int64_t enough = v->single_tiles         ? 6
                           : find_columns(v) == 64 ? 24
                                                   : 12,
                  each = v->single_tiles ? 2 : 4;
    const int64_t rows = p->cu_seqlens_q ? p->max_q : p->rows_q,
                  tiles = fa_cuda_count_tiles(rows, FA_BACKWARD_SM90_QUERIES);
    if (v->options || v->ordered || v->chained || v->joined || is_wide(v) || is_ordered(p) ||
        tasks == 0 || tiles < enough)
        return 1;
    return (int)clamp(device->multiprocessors / tasks, 1, tiles / each);
}

/* The time of a block's query tile, and of a block besides them; of leaving sums of dK and dV and adding them up, besides their bytes. us,
 * and bytes a us. */
typedef struct split_pace {
    double tile, block, adding, rate;
} split_pace;

static split_pace find_split_pace(const fa_variant *v)
{
    if (is_wide(v)) return (split_pace){6.0, 6.0, 2.0, 6.0e6};
    if (find_columns(v) == 64) return (split_pace){1.0, 1.0, 2.0, 3.0e6};
    return (split_pace){1.8, 4.0, 4.0, 6.0e6};
}

/* The time if the query heads of a group are split among so many blocks. The first key tile under a causal mask sees all queries,
 * and blocks with many come first. If the numbers of heads differ, blocks with fewer fill gaps. */
static double splits_us(const fa_problem *p, const fa_variant *v, int64_t tasks, int64_t splits,
                        const fa_cuda_device *device)
{
    const split_pace pace = find_split_pace(v);
    const int64_t parts = count_query_parts(p, v, tasks * splits, device),
                  takers = count_takers(v, device), blocks = tasks * splits * parts;
    const int64_t group = p->heads_q / p->heads_kv, of_block = fa_cuda_count_tiles(group, splits);
    const bool even = group % splits == 0;
    const double all = (double)fa_cuda_count_tiles(p->rows_q, FA_BACKWARD_SM90_QUERIES);
    double most = all, average = p->causal ? (all + 2.0) / 2.0 : all;
    if (has_window(p)) {
        const double seen =
            ((double)p->window_left + find_keys(v)) / FA_BACKWARD_SM90_QUERIES + 1.0;
        most = fmin(most, seen), average = fmin(average, seen);
    }
    const double each = pace.tile / (double)parts,
                 longest = most * each * (double)of_block + pace.block,
                 usual = average * each * (double)group / (double)splits + pace.block;
    double us = longest * (double)fa_cuda_count_tiles(blocks, takers);
    if (p->causal && blocks > takers)
        us = fmax(longest, usual * ((double)blocks / (double)takers + 0.3));
    else if (!even && blocks > takers)
        us = fmin(us, usual * (double)blocks / (double)takers + 0.7 * longest);
    if (splits * parts == 1) return us;
    const double bytes =
        (double)blocks * find_keys(v) * (find_columns(v) + find_value_columns(v)) * sizeof(float);
    return us + pace.adding + 2.0 * bytes / pace.rate;
}

/* Whether splits of a group may have different numbers of query heads. */
static bool can_be_uneven(const fa_variant *v) { return !v->joined; }

/* Whether query heads share keys in groups that have no divisor to their half, so that fa_cuda_count_splits never splits them. */
static bool is_undivided(const fa_problem *p)
{
    const int64_t group = p->heads_kv > 0 ? p->heads_q / p->heads_kv : 1;
    for (int64_t i = 2; i <= group / 2 && i <= FA_CUDA_MOST_SPLITS; i++)
        if (group % i == 0) return false;
    return group > 1;
}

/* Whether there are few blocks of undivided groups. Where sums have one order, the model decides then. In more rounds whole groups, which
 * round dQ, are as fast or faster (H200, 28/4 and 24/8 heads of 128, causal, rate over that of splits: 1.9 rounds 1.03 to 1.2, 3.9 0.98
 * and 1.27). */
static bool has_few_undivided(const fa_problem *p, int64_t tasks, int64_t takers)
{
    return is_undivided(p) && 10 * tasks < 19 * takers && !p->bias.data &&
           !fa_cuda_has_own_lengths(p) && !p->batch_invariant;
}

/* Whether each query head of a group has its own blocks where sums have one order: in long causal rows at head dims of 65 to
 * 128. Such blocks ascend and hardly wait, and sums of dK and dV cost little beside them. Also without a mask, in few rounds
 * of whole groups and in long rows: the more heads there are, the fewer blocks of a head begin one after the other (rate over
 * that of any order, before and with it: head dim 64, 16/2, n 8k 0.82, 0.90; 12/4, n 6,729 0.93, 1.12; 128, 16/2, n 4,665 0.95,
 * 1.10; 96, 20/5, n 6,000 0.93, 0.94; 1.94 rounds, 128, 16/4, n 8,067 0.93, 0.91; 3.9 rounds, 64, 2 x 4k, 32/8 0.95, 0.92; long
 * rows, 3.5 to 7.5 rounds, 128, 24/8, n 15,781 0.975, 1.015; 64, 20/4, n 14,701 0.92, 0.97). Causal (H200, head dim 128, rate
 * over that of any order, whole groups that round dQ, and this): 28/4 heads, n 4k 0.97, 0.93, n 8k 0.90, 0.97, n 16k 0.88, 0.98;
 * 64/8, n 8k 0.88, 0.957; 24/3, 3 x 6,376 0.93, 1.01; 8/1, 2 x 11,986 0.73, 0.95; 32/8, n 8k 0.963, 0.948, n 16k 0.95, 0.964, n
 * 32k 0.955, 0.984; 16/4, n 16k 0.92, 0.964; 16/2, 2 x 16k 0.87, 0.967; 24/8, n 12,000 0.94, 0.90. Head dim 96, 32/8, n 16k
 * 0.974, 0.940, 28/4, n 16k 0.954, 0.917, 40/5 of 72, n 6,567 0.93, 0.943; 64, 32/8, n 16k 0.945, 0.928. */
static bool splits_whole_groups(const fa_problem *p, int64_t tasks, int64_t takers)
{
    enum {
        most_group = 16
    }; /* larger ones were not timed without a mask, and their sums are large */
    const double most_bytes = 2e9, /* of the sums: a training step has to have room for them */
        bytes = 2.0 * (double)(p->batch * p->heads_q) * (double)p->rows_k * 128 * sizeof(float);
    const int64_t group = p->heads_kv > 0 ? p->heads_q / p->heads_kv : 1,
                  tiles = count_key_tiles(p);
    if (!is_ordered(p) || bytes > most_bytes || p->d > 128 || p->d_v > 128 || p->batch_invariant ||
        find_options(p) || fa_cuda_has_own_lengths(p))
        return false;
    if (sees_all(p))
        return group > 1 && group <= most_group && tiles > 32 &&
               (10 * tasks < 19 * takers || tiles >= 96);
    if (!fa_cuda_shrinks(p) || is_narrow(p) || has_few_undivided(p, tasks, takers)) return false;
    if (!is_above_96(p)) return group >= 7 && tiles >= 40 && tiles < 96;
    return group >= 4 && tiles >= (group >= 7 ? 40 : 96);
}

/* Whether the model chooses splits where sums have one order: for wide heads, for few blocks of undivided groups, and without a mask
 * (28/4 heads of 96, n 2,520, 3.03 rounds of whole groups: 0.84 of any order, now 0.95; 32/4 of 64, 2 x 8,791, 4.2 rounds 0.84). */
static bool has_modelled_order(const fa_problem *p, const fa_variant *v, int64_t tasks,
                               int64_t takers)
{
    return is_wide(v) || has_few_undivided(p, tasks, takers) || sees_all(p);
}

/* Whether blocks of packed sequences are so short that query heads share keys, although that leaves few rounds of blocks (H200,
 * sums in one order; rate relative to splitting each group in two: 190 sequences of 200 rows, 4/1 heads of 96 1.31, 167 of 340
 * 1.20; 50 of 550, 8/2 of 128 1.10; 79 of 330, 4/1 of 64 1.11, 44 of 390, 8/2 1.11; but 52 of up to 3,936, 4/1 0.88, 58 of up to
 * 2,198, 8/1 0.89. In any order nearly the same). */
static bool has_short_blocks(const fa_problem *p, const fa_variant *v, int64_t tasks,
                             int64_t takers)
{
    const int64_t tiles = fa_cuda_count_tiles(count_sequence_rows(p), FA_BACKWARD_SM90_QUERIES);
    return is_packed(p) && !is_wide(v) && fa_cuda_shrinks(p) &&
           tiles * p->heads_q <= 128 * p->heads_kv && 10 * tasks >= 19 * takers;
}

/* Blocks among which the query heads of a group are split. With 90 shapes of 20 to 670 key tiles and groups of 2 to 8 heads (H200),
 * the choice takes 1.005 times as long as the best in the geometric mean; by the number of key tiles alone, at most half of a
 * group's heads, 1.09 and up to 2.2. With a bias, if lengths are on the device, and in some problems with one order of sums, that
 * number decides. us: the time by the model, if it decides. */
static int count_splits(const fa_problem *p, const fa_variant *v, int64_t tasks,
                        const fa_cuda_device *device, double *us)
{
    const int64_t group = p->heads_kv > 0 ? p->heads_q / p->heads_kv : 1,
                  takers = count_takers(v, device);
    /* More blocks would take twice the workspace of others; wide heads with more than usual must gain by it. */
    const int64_t usual = 4 * takers, most = is_wide(v) ? 12 * takers : usual;
    const double least_gain = 0.97;
    if (v->rounding) return 1; /* has_last_shares */
    if (!is_wide(v) && splits_whole_groups(p, tasks, takers)) return (int)group;
    if (!p->batch_invariant && !p->bias.data && has_short_blocks(p, v, tasks, takers)) return 1;
    /* With a bias there may be a dbias, of which fa_workspace_size does not know. */
    if (tasks == 0 || p->batch_invariant || p->bias.data || fa_cuda_has_own_lengths(p) ||
        (is_ordered(p) && !has_modelled_order(p, v, tasks, takers)))
        return fa_cuda_count_splits(p, tasks, takers);
    int64_t best = 1;
    double least = splits_us(p, v, tasks, 1, device);
    for (int64_t splits = 2; splits <= group && splits <= FA_CUDA_MOST_SPLITS; splits++) {
        const bool above_half = 2 * splits > group + 1;
        if ((group % splits && !can_be_uneven(v)) || (above_half && tasks * splits > most))
            continue;
        const double time = splits_us(p, v, tasks, splits, device);
        if (time < (above_half && tasks * splits > usual ? least_gain : 1.0) * least)
            best = splits, least = time;
    }
    if (us) *us = least;
    return (int)best;
}

/* Blocks that leave their dS, in units of `blocks`, if the memory of sums in float32 has room for enough of them. A block waits
 * until the unit in whose place it leaves dS has been added up. One block does that, and takes longer the more blocks the unit has. So
 * there is room for the blocks that run at once, and for an eighth of them more for each block of a unit; where heads are in groups,
 * for half as many. (H100, head dim 128, n 4k: room for 7.8 times the blocks that run at once and units of 4, 4.27 ms, with sums
 * 5.21; for 1.9 times and units of 16, 5.96 and 4.22.) With FA_DETERMINISTIC, in one group, a quarter of the blocks that run at once
 * is enough: sums of floats have no order, and the kernel that computes dbias alone takes ten times as long (H200, the same
 * problems: 50 ms, 3.8 and 5.1). */
static bool plan_units(const fa_problem *p, const fa_variant *v, int64_t at_once, int64_t tiles,
                       int64_t blocks, int64_t groups, fa_cuda_backward_sm90_launch *own)
{
    const int64_t q_tiles = fa_cuda_count_tiles(p->rows_q, FA_BACKWARD_SM90_QUERIES);
    const int64_t tasks = tiles * p->heads_kv * p->batch,
                  splits = fa_cuda_count_splits(p, tasks, at_once),
                  heads = p->heads_q / (p->heads_kv * splits), units = tasks * splits / blocks;
    const int64_t bytes = blocks * heads * q_tiles * FA_BACKWARD_SM90_QUERIES *
                          FA_BACKWARD_SM90_KEYS * FA_ELEMENT_BYTES(v->element);
    const int64_t memory = (int64_t)fa_cuda_dbias_sum_bytes(p) -
                           (int64_t)left_counter_bytes(units) -
                           (int64_t)left_sum_bytes(groups, tiles, q_tiles);
    const int64_t fit = memory > 0 ? memory / bytes : 0,
                  wanted = groups > 1         ? at_once * (16 + blocks) / 16
                           : p->deterministic ? at_once / 4
                                              : at_once * (8 + blocks) / 8;
    int64_t last = (at_once + blocks - 1) / blocks;
    if (units > INT32_MAX / 2 || fit < 2 || fit * blocks < wanted) return false;
    if (groups > 1 && last > tiles) last = tiles; /* those that end sums */
    own->left.units = (int32_t)units;
    own->left.blocks = (int32_t)blocks;
    own->left.room = (int32_t)(fit < units ? fit : units);
    own->left.summed = (int32_t)(last < own->left.room ? units - last : units - own->left.room);
    own->left.groups = (int32_t)groups;
    own->left.group_units = (int32_t)tiles;
    return true;
}

/* The most blocks of a unit, of so many that share elements, which leave at most four shares together, and are a group of whole
 * heads. */
static int64_t count_group_blocks(int64_t sharing, int64_t heads)
{
    int64_t blocks = 1;
    for (int64_t n = 2; n * heads <= 4; n++)
        if (sharing % n == 0) blocks = n;
    return blocks;
}

/* If dbias is to be summed and has the type of q, and all sequences are equally long. If heads share it they are in groups, unless
 * there is no room for the sums that groups pass on, or groups that run at once would wait for each other (H200, head dim 128: n 4k,
 * 4 items in one order 5.14 ms, in groups 3.98; 16 items in any order 15.8 and 15.1). Where not all heads would fit, float32
 * additions are faster (n 4k 3.65, in groups 3.74 ms; causal 2.09, 2.22; n 1k 1.10, 1.80, with groups of a quarter of a round). */
static bool plan_left(const fa_problem *p, const fa_variant *v, const fa_cuda_device *device,
                      fa_cuda_backward_sm90_launch *own)
{
    const bool by_items = p->dbias_shape[0] < p->batch, by_heads = p->dbias_shape[1] < p->heads_q;
    const int64_t tiles = fa_cuda_count_tiles(p->rows_k, find_keys(v)),
                  at_once = count_takers(v, device), tasks = tiles * p->heads_kv * p->batch;
    if (!has_bias_tile(v) || p->dbias.dtype != p->q.dtype || fa_cuda_has_own_lengths(p) ||
        tasks == 0 || p->rows_q == 0)
        return false;
    const int64_t splits = fa_cuda_count_splits(p, tasks, at_once),
                  sharing = (by_heads ? p->heads_kv * splits : 1) * (by_items ? p->batch : 1),
                  blocks = count_group_blocks(sharing, p->heads_q / (p->heads_kv * splits));
    const bool fits = plan_units(p, v, at_once, tiles, sharing, 1, own),
               in_groups = by_heads && blocks < sharing && tiles * blocks * 4 >= at_once * 3;
    if (in_groups && (fits || p->deterministic) &&
        plan_units(p, v, at_once, tiles, blocks, sharing / blocks, own))
        return true;
    return fits;
}

/* The launch that adds up what the last units have left. */
static bool add_left_sums(const fa_cuda_planning *x, const fa_variant *v,
                          const fa_cuda_plan_launch *main, const fa_cuda_backward_sm90_launch *own)
{
    const fa_problem *p = x->problem;
    const fa_variant *sums = &fa_variants[FA_FIRST_backward_dbias_sm90];
    if (own->left.units == 0) return true;
    while (sums->element != v->element) sums++;
    fa_cuda_plan_launch *l = fa_cuda_plan_add(sums, FA_BACKWARD_SM90_PASS_THREADS, 0, queue_sm90,
                                              x->device, x->plan, x->why, x->size);
    if (!l) return false;
    const int64_t heads = p->dbias_shape[1] == 1 ? 1 : p->heads_q / (p->heads_kv * own->splits);
    fa_cuda_set_tasks(l, main->tiles, main->tasks);
    l->tile_q = FA_BACKWARD_SM90_QUERIES;
    l->tile_k = own->keys;
    l->grid = fa_cuda_grid((own->left.units - own->left.summed) * own->q_tiles * heads);
    return true;
}

static void map_tensors(const fa_problem *p, int keys, fa_tensor_map_shape maps[4])
{
    const int queries = FA_BACKWARD_SM90_QUERIES;
    fa_cuda_map_view(&maps[0], &p->q, p->d, p->rows_q, p->heads_q, p->blocks_q, queries);
    fa_cuda_map_view(&maps[1], &p->k, p->d, p->rows_k, p->heads_kv, p->blocks_k, keys);
    fa_cuda_map_view(&maps[2], &p->v, p->d_v, p->rows_k, p->heads_kv, p->blocks_k, keys);
    fa_cuda_map_view(&maps[3], &p->dout, p->d_v, p->rows_q, p->heads_q, p->blocks_q, queries);
}

/* The most key tiles of a sequence. Of packed ones the queries say it, which have as many rows or nearly so. */
static int64_t count_sequence_tiles(const fa_problem *p, const fa_cuda_plan_launch *l)
{
    const int64_t tiles = fa_cuda_count_tiles(count_sequence_rows(p), FA_BACKWARD_SM90_KEYS);
    return is_packed(p) && tiles < l->tiles ? clamp(tiles, 1, l->tiles) : l->tiles;
}

/* Queries of a head that see a key of some four key tiles, which blocks go through at the same time, where there is a window. */
static int64_t count_rows_together(const fa_problem *p)
{
    const int64_t right = p->causal || p->window_right < 0 ? 0 : p->window_right, most = p->rows_q;
    const int64_t rows = 4 * FA_BACKWARD_SM90_KEYS;
    if (!has_window(p) || p->window_left >= most || right >= most) return most;
    return p->window_left + right + rows < most ? p->window_left + right + rows : most;
}

/* Whether blocks of a window take turns by what is in use at the same time. Query heads that share keys and come one after the other
 * use more, and wide heads are faster as without a window. */
static bool turns_in_window(const fa_problem *p, const fa_variant *v)
{
    return has_window(p) && v->ordered && !v->value_dim && (v->rounding || !has_groups(p));
}

/* Whether its blocks go through a query tile of all heads that share keys, then the next one (HEADS_IN_TURN). */
static bool takes_heads_in_turn(const fa_variant *v)
{
    return v->rounding == 2 || (v->ordered && is_wide(v) && v->head_dim == 192);
}

/* Heads whose queries, dout and sums of dq fit into so much of the L2 cache. */
static int64_t count_heads_in(const fa_problem *p, const fa_variant *v, int64_t l2_bytes)
{
    /* H200, head dim 128, full, n 512, 32 query heads of 8 key heads: 4, 16, 25 and 67 of these 1.05, 1.08, 1.10, 0.95. */
    const int64_t heads =
        v->rounding == 2 && !v->persistent && !p->causal ? p->heads_q / p->heads_kv : 1;
    const int64_t all = is_wide(v) ? p->rows_q : count_sequence_rows(p);
    const int64_t rows = turns_in_window(p, v) ? count_rows_together(p) : all,
                  bytes = heads * rows * (2 * p->d + 2 * p->d_v + 4 * (int64_t)v->head_dim);
    return bytes > 0 ? l2_bytes / bytes : INT64_MAX;
}

/* Whether heads that share keys take turns under a causal mask. Then the blocks of more heads wait less, and that is worth more than what
 * stays in the L2 cache (H200, 32 query heads of 8 key heads, rate over that of any order: head dim 128, n 8k, 8 heads and 16 0.94, 0.955, n
 * 16k, 3 and 8 0.93, 0.953, n 32k 0.931, 0.939; head dim 64, n 16k, 3 and 8 0.95, 0.97, n 32k 0.970, 0.981). */
static bool takes_causal_groups(const fa_problem *p, const fa_variant *v)
{
    return v->rounding == 2 && has_groups(p) && p->causal && !has_window(p);
}

/* Whether head dim 64 without a mask has at most eight rounds of blocks. Those of a head begin one step of a store warp after the other, and
 * that counts here (H200, n 2,406, 48 heads, 6.9 rounds, 16 and 24 heads in turn 0.972, 0.989; n 2,048, 128 heads, 15.5 rounds 1.00, 0.98). */
static bool has_few_narrow_rounds(const fa_problem *p, const fa_cuda_plan_launch *l,
                                  const fa_cuda_device *device)
{
    const fa_variant *v = &fa_variants[l->variant];
    return is_full(p) && v->persistent && !is_wide(v) && l->tasks <= 8 * device->multiprocessors;
}

/* Heads whose blocks take turns where sums have one order. The more there are, the fewer blocks of a head run at once, and wait
 * for each other when they begin; eight of them, or half of the key tiles of a short sequence, still share what they load. What
 * the heads' blocks go through stays in half of the L2 cache. Blocks of head dim 128 wait so often that all of it is better (rate
 * over that of sums in any order: a window of 1,024 keys 0.89 and 0.97; n 16k without a mask, one head, 0.94, four, 0.97; head dim
 * 64 there with three heads 1.00, with seven 0.94). In a window of w keys the blocks of a head hardly wait, and with more heads wait less:
 * four of a head at once (head dim 64, w 1,024, n 4k: 8, 16, 32, 64 heads 0.90, 0.95, 0.965, 0.91; w 512, n 2k 0.92, 0.95, 0.98, 0.97; where
 * the last share rounds 0.89, 0.93, 1.015, 1.02), as far as these fit into two fifths of the L2 cache (w 2,048, n 16k, 12, 16 and 32 heads
 * 0.966, 0.962, 0.945). */
static int64_t count_heads_together(const fa_problem *p, const fa_cuda_plan_launch *l,
                                    const fa_cuda_device *device)
{
    const fa_variant *v = &fa_variants[l->variant];
    if (l->tasks == 0) return 1;
    const int64_t tiles = is_wide(v) ? l->tiles : count_sequence_tiles(p, l);
    const int64_t half = (tiles + 1) / 2,
                  some = turns_in_window(p, v) || has_few_narrow_rounds(p, l, device) ? 4 : 8,
                  at_once = half < some ? half : some;
    const int64_t heads = l->tasks / l->tiles, wanted = count_takers(v, device) / at_once + 1;
    const bool takes_all = v->ordered && !v->persistent && !is_wide(v);
    const bool narrow_window = v->persistent && turns_in_window(p, v);
    const int64_t room = takes_all       ? device->l2_bytes
                         : narrow_window ? device->l2_bytes / 5 * 2
                                         : device->l2_bytes / 2;
    const int64_t most =
        takes_causal_groups(p, v) ? wanted : clamp(count_heads_in(p, v, room), 3, wanted);
    const int64_t groups = (heads + most / 2) / most;
    return groups > 1 ? (heads + groups - 1) / groups : heads;
}

/* Heads that make so many blocks, or clusters, as percent of those that run at once. */
static int64_t count_heads_of_rounds(const fa_cuda_plan_launch *l, const fa_cuda_device *device,
                                     int percent)
{
    const int64_t at_once = count_takers(&fa_variants[l->variant], device);
    return fa_cuda_count_heads_of_rounds(l, at_once, percent);
}

/* Heads whose blocks take turns where sums have any order. Under a causal mask these are as many as
 * make one round of blocks, or two where a head has many. Then short blocks come last, so that all
 * multiprocessors end at the same time, and what the blocks load stays in the L2 cache (head dim 128
 * on an H100, n 512, 1k, 2k, 4k: one round 183, 302, 441, 505 TFLOP/s, two 166, 293, 430, 503). If
 * first blocks run ahead, two groups run at the same time, and fewer heads are better. Where there are
 * few blocks, the last group counts most. */
static int64_t count_heads_in_turn(const fa_problem *p, const fa_cuda_plan_launch *l,
                                   const fa_cuda_device *device, bool first_ahead)
{
    const int ahead = fa_variants[l->variant].persistent ? 100 : l->tiles <= 4 ? 25 : 50;
    const int percent = first_ahead ? ahead : l->tiles <= 16 ? 100 : 200;
    return fa_cuda_count_heads_in_turn(p, l, count_takers(&fa_variants[l->variant], device),
                                       percent);
}

/* Wide heads. At head dim 192 two where clusters are not persistent (n 16k: with one and two heads 0.955, 0.967, three 0.92), and four
 * where they are and a head has many key tiles (with one and four: n 4k 0.977, 0.987 to 0.999, n 8k 0.955, 0.976), if these fit into most
 * of the L2 cache (n 16k, four: 0.845). */
static int64_t find_wide_together(const fa_variant *v, int64_t tiles)
{
    if (find_columns(v) != 192) return 1;
    return !v->persistent ? 2 : tiles > 16 ? 4 : 1;
}

/* Heads whose blocks ascend and take turns, so that a block starts later than the one whose additions it follows. For persistent
 * blocks and short sequences they make two rounds of blocks, so that nobody waits (head dim 64, rate over that of sums in any
 * order: n 256 with 4 heads 0.91, with 128 0.97; n 512 with 4 0.96, with 64 0.985; n 4k with 1 head 0.95, with 4 0.97; n 16k with
 * 1, 4 and 8 heads 0.97, 0.99, 0.92, where 8 do not fit into the L2 cache. Head dim 128, n 512: with 4 0.98, with 66 0.94). At head
 * dim 256 it is one head (causal n 4k, 1, 2, 4, 8 heads 1.048, 1.041, 1.033, 0.945). Persistent blocks have two rounds in longer
 * sequences, too (with 4 heads, one round, two: n 1k 0.948, 0.979, 1.022, where the last share rounds 1.020, 1.057, 1.076; n 2k 0.939,
 * 0.954, 0.969, and 1.026, 1.031, 1.044; n 4k 4 and 8 heads 0.922, 0.936, and 0.974, 0.979), unless heads share keys (four query heads
 * for a key head, n 4k, 4, 8 and 16 heads 0.904, 0.861, 0.728). */
static int64_t count_ascending_together(const fa_problem *p, const fa_cuda_plan_launch *l,
                                        const fa_cuda_device *device)
{
    const fa_variant *v = &fa_variants[l->variant];
    if (l->tasks == 0) return 1;
    if (is_packed(p) && !is_wide(v)) {
        const int64_t takers = count_takers(v, device), tiles = count_sequence_tiles(p, l);
        const int64_t heads = l->tasks / l->tiles,
                      wanted = v->persistent ? clamp(2 * takers / tiles, 8, 32)
                                             : clamp(takers / 2 / tiles, 2, 8),
                      groups = fa_cuda_count_tiles(heads, wanted);
        return fa_cuda_count_tiles(heads, groups); /* a last group of one head is slow */
    }
    const int64_t busy = v->persistent ? count_heads_of_rounds(l, device, 200) : 0;
    const bool longer = busy > 4 && p->heads_q == p->heads_kv;
    const int64_t most = is_wide(v) ? find_wide_together(v, l->tiles)
                         : v->persistent && (l->tiles <= 4 || longer) ? busy
                                                                      : 4;
    const int64_t room = is_wide(v) ? device->l2_bytes / 5 * 4 : device->l2_bytes;
    return clamp(count_heads_in(p, v, room), 1, most);
}

/* Heads whose blocks ascend, where sums have one order (tiles_before in kernels/backward_sm90/work.cuh). Only under a causal
 * mask without a window, where later keys are seen by later queries, and by fewer. A block that ascends hardly waits for its
 * turn, but a head's longest blocks come last. So the blocks of the last heads take turns instead: one round of blocks, or up
 * to two if these heads fit into three quarters of the L2 cache and are at most half of all (H200, rate over that of any order
 * with one round and with two: n 4k, head dim 128 0.976, 0.990, 64 0.935, 0.941, 192 0.978, 0.993; n 16k, head dim 128 0.98,
 * 0.94; n 2k, 16 heads, 0.94, 0.76). Where an item's sums must not depend on the batch, all heads ascend, also with one key
 * tile: in a batch with longer items they would. */
static int64_t count_heads_ascending(const fa_problem *p, const fa_cuda_plan_launch *l,
                                     const fa_cuda_device *device)
{
    if (!fa_cuda_shrinks(p) || l->tiles < (p->batch_invariant ? 1 : 2)) return 0;
    const int64_t heads = l->tasks / l->tiles;
    const fa_variant *v = &fa_variants[l->variant];
    if (has_groups(p) && takes_heads_in_turn(v)) return 0; /* hardly any block waits */
    /* Packed: a head's long blocks do not come last (rate over that of any order, before and now: 450 sequences of some 343
     * rows, 4/2 heads of 96, 0.88 and 1.01; 40 of 800, 16/4, 0.84 and 1.046; 6 of 5,000, 8 heads of 128, 0.94 and 0.99). */
    if (is_packed(p) && !is_wide(v) && l->tasks >= 2 * count_takers(v, device) &&
        2 * l->tiles >= 3 * count_sequence_tiles(p, l))
        return heads;
    const int64_t busy = (count_takers(v, device) + l->tiles - 1) / l->tiles;
    const int64_t least = busy < 2 ? 2 : busy, fit = count_heads_in(p, v, device->l2_bytes / 4 * 3);
    const int64_t left =
        p->batch_invariant ? 0 : clamp(heads / 2, least, clamp(fit, least, 2 * busy));
    if (heads <= left) return 0;
    /* Whole groups of wide heads, if there is room for those that are over. A group of one head does not come behind others
     * (head dim 96, n 16k, 16 heads, three left and four together 0.94 of any order, four left 1.00). */
    const int64_t over = (heads - left) % count_ascending_together(p, l, device);
    const bool ragged = is_wide(v) ? v->persistent : !v->persistent && over == 1;
    const bool adds = ragged && !p->batch_invariant && heads - left > over &&
                      left + over <= count_heads_in(p, v, device->l2_bytes);
    return heads - left - (adds ? over : 0);
}

/* Where sums have any order: whether a head's first block, whose keys all query tiles see, stores its
 * shares, and the others follow it. Then nobody clears the sums, and fewer shares are added. The blocks
 * must have one query head, for others would get ahead of the first one. In long sequences the others
 * wait for it too often (causal, 16,384 tokens on an H200, ms before and after: head dim 128, n 256
 * 0.370 and 0.330, 512 0.399 and 0.375, 1k 0.510 and 0.483, 2k 0.735 and 0.758; head dim 64, persistent
 * blocks, n 256 0.402 and 0.368, 512 0.435 and 0.429, 1k 0.561 and 0.564). If all blocks run at once, zeros
 * take less time than the wait (n 227, 22 heads of 64, us: 15.8 and 14.6). */
static bool runs_first_ahead(const fa_problem *p, const fa_cuda_plan_launch *main,
                             const fa_cuda_device *device, const fa_cuda_backward_sm90_launch *own)
{
    const fa_variant *v = &fa_variants[main->variant];
    return fa_cuda_shrinks(p) && !is_wide(v) && !v->joined && !stores_dq(v) &&
           p->heads_q == p->heads_kv * own->splits && main->tiles <= (v->persistent ? 4 : 8) &&
           main->tasks > device->multiprocessors;
}

/* Whether two tiles of dQ are counted together. In long rows that is faster, in shorter ones blocks wait longer for each other
 * (head dim 64, rate over that of sums in any order, without and with: n 4k full 0.96, 0.98, n 3,200 0.943, 0.992, n 2,700
 * 0.945, 0.976; causal n 2k 0.97, 0.90, n 16k 0.96, 1.00; a window of 1,024 keys 0.92, 0.84). Of packed sequences, the blocks of
 * few heads follow each other closely (causal, without and with: 72 of 1,250 rows, 2 heads 1.006, 0.896; 434 of 760, 2 heads
 * 0.944, 0.870; 109 of 1,240, 4 heads 0.934, 0.907; 32 of 850, 8/4 1.013, 0.992; 5 of 1,800, 64/16 0.930, 0.962; 25 of 920, 32/4
 * 0.927, 0.966; 16 of 640, 16/4 0.969, 0.993; 58 of 940, 8/1 0.853, 0.902). */
static bool counts_pairs(const fa_problem *p)
{
    const int64_t tiles = fa_cuda_count_tiles(count_sequence_rows(p), FA_BACKWARD_SM90_QUERIES);
    if (has_window(p)) return false;
    if (is_packed(p))
        return p->rows_q >= 600 * p->batch && p->rows_q * p->heads_q >= 7000 * p->batch;
    return tiles >= (fa_cuda_shrinks(p) ? 128 : 44);
}

/* The order also makes an item's sums independent of the batch. tiles_ahead: for 8 query tiles' time a persistent block describes
 * its next work tile and loads for it. Where blocks ascend, those behind a work tile wait for it from when it has been taken
 * (head dim 64, rate over that of any order with 4 and 8 tiles: causal n 1k 1.01, 0.45; full n 2k 0.97, 1.01). */
static void plan_order(const fa_problem *p, const fa_cuda_plan_launch *prepare,
                       const fa_cuda_plan_launch *main, const fa_cuda_device *device,
                       fa_cuda_plan *plan, fa_cuda_backward_sm90_launch *own)
{
    const fa_variant *v = &fa_variants[main->variant];
    own->ordered = !v->chained && (is_ordered(p) || v->ordered); /* a chain has one by itself */
    own->heads_in_order = !p->cu_seqlens_q == !p->cu_seqlens_k;
    own->first_stored =
        own->ordered ? v->ordered : own->left.groups == 1 && runs_first_ahead(p, main, device, own);
    own->heads_ascending = v->ordered ? count_heads_ascending(p, main, device) : 0;
    own->ascending_together = count_ascending_together(p, main, device);
    own->counts_pairs = own->ordered && counts_pairs(p);
    own->tiles_ahead = own->heads_ascending > 0 ? 4 : 8;
    own->items_together = 1;
    own->semaphores_offset = plan->workspace_bytes;
    own->heads_together = own->ordered ? count_heads_together(p, main, device)
                                       : count_heads_in_turn(p, main, device, own->first_stored);
    if (v->chained) own->heads_together = 1; /* the blocks of a head are a cluster */
    if (own->heads_ascending > 0)
        own->heads_together = main->tasks / main->tiles - own->heads_ascending; /* the others */
    if (own->ordered || own->first_stored)
        plan->workspace_bytes +=
            (size_t)prepare->tasks * FA_BACKWARD_SM90_SEMAPHORES * sizeof(int32_t);
}

/* The counter by which blocks take work tiles, which prepare clears. */
static void plan_counter(const fa_variant *v, const fa_cuda_plan_launch *prepare,
                         fa_cuda_plan *plan, fa_cuda_backward_sm90_launch *own)
{
    own->counter_offset = 0;
    if (!v->persistent || prepare->idle) return;
    own->counter_offset = (plan->workspace_bytes + 15) / 16 * 16;
    plan->workspace_bytes = own->counter_offset + 16;
}

/* Groups of heads where launches are joined. Under a causal mask they are also those whose blocks take turns (n 512: 50 percent 195
 * TFLOP/s, 100: 180; n 1k: 75 percent 314, 100: 297; n 2k: 100 percent 442, 200: 425). Without a mask larger groups are hardly better,
 * except for 1,024 to 2,048 keys in long batches (H200, 800 percent: n 512 0.996 times the rate of 400, 1k 1.012, 2k 1.007, 4k 0.996; n 1k with 8
 * items 0.984). */
static void plan_groups_joined(const fa_problem *p, const fa_cuda_plan_launch *l,
                               const fa_cuda_device *device, fa_cuda_backward_sm90_launch *own)
{
    const bool shrinks = fa_cuda_shrinks(p);
    const bool large = l->tiles >= 8 && l->tiles <= 16 && l->tasks > 12 * device->multiprocessors;
    const int whole = large ? 800 : 400, part = l->tiles <= 4 ? 50 : l->tiles <= 8 ? 75 : 100;
    const int percent = shrinks ? part : whole;
    const int64_t together = count_heads_of_rounds(l, device, percent);
    own->units_together = (int32_t)together;
    own->heads_together = shrinks ? together : 1;
}

/* Where launches are joined: blocks of all three kinds, and the counters by which they wait for each
 * other, which a launch in front clears. */
static bool plan_joined(const fa_problem *p, const fa_variant *v, const fa_cuda_device *device,
                        fa_cuda_plan_launch *clear, fa_cuda_plan_launch *main, fa_cuda_plan *plan,
                        fa_cuda_backward_sm90_launch *own, char *why, size_t size)
{
    own->units = own->units_together = own->unit_heads = own->slices = own->head_slices = 0;
    own->counters_offset = 0;
    if (!v->joined) return true;
    if (clear->tasks == 0 || main->tasks == 0) {
        fa_cuda_say(why, size, "there are no queries, or no keys");
        return false;
    }
    const int64_t units = main->tasks / main->tiles,
                  heads = p->heads_q / (p->heads_kv * own->splits),
                  head_slices = fa_cuda_count_tiles(own->q_tiles, FA_BACKWARD_SM90_SLICE_TILES),
                  blocks = main->tasks + 2 * units * heads * head_slices;
    if (blocks > INT32_MAX / 2) { /* the kernel counts beyond the last block */
        fa_cuda_say(why, size, "there are %" PRId64 " blocks", blocks);
        return false;
    }
    own->units = (int32_t)units;
    plan_groups_joined(p, main, device, own);
    own->unit_heads = (int32_t)heads;
    own->head_slices = (int32_t)head_slices;
    own->slices = (int32_t)(heads * head_slices);
    own->counters_offset = (plan->workspace_bytes + 15) / 16 * 16;
    plan->workspace_bytes = own->counters_offset + (size_t)units * 2 * sizeof(int32_t);
    clear->grid = fa_cuda_grid(fa_cuda_count_tiles(2 * units, FA_BACKWARD_SM90_PASS_THREADS));
    main->grid = (uint32_t)blocks;
    return true;
}

/* The blocks of a head are a cluster. If all of them run at once, they also do what `prepare` does, unless a later launch needs
 * delta. */
static void plan_chain(const fa_problem *p, const fa_variant *v, const fa_cuda_device *device,
                       fa_cuda_plan_launch *prepare, fa_cuda_plan_launch *main,
                       fa_cuda_backward_sm90_launch *own)
{
    own->prepares = v->chained && main->tasks <= device->multiprocessors && !p->dsinks;
    if (v->chained) main->cluster = (uint32_t)main->tiles;
    prepare->idle = prepare->idle || own->prepares;
}

/* Sums of splits are behind the workspace so far. */
static void plan_splits(const fa_problem *p, const fa_variant *v, const fa_cuda_device *device,
                        fa_cuda_plan_launch *main, fa_cuda_plan *plan,
                        fa_cuda_backward_sm90_launch *own)
{
    const int64_t tasks = main->tasks;
    own->splits = count_splits(p, v, tasks, device, NULL);
    own->even_splits = own->splits == 1 || p->heads_q / p->heads_kv % own->splits == 0;
    own->query_parts = count_query_parts(p, v, tasks * own->splits, device);
    own->splits *= own->query_parts;
    own->keys = find_keys(v);
    own->head_dim = find_columns(v);
    own->value_dim = find_value_columns(v);
    own->key_sums_offset = fa_cuda_aligned(plan->workspace_bytes);
    if (own->splits == 1) return;
    fa_cuda_set_tasks(main, main->tiles, tasks * own->splits);
    plan->workspace_bytes =
        own->key_sums_offset +
        (size_t)main->tasks *
            (size_t)FA_BACKWARD_SM90_KEY_SUMS(own->keys, own->head_dim, own->value_dim) *
            sizeof(float);
}

/* The launch that adds them up. */
static bool add_finish_keys(const fa_cuda_planning *x, const fa_variant *v,
                            const fa_cuda_plan_launch *main, int splits)
{
    const fa_variant *finish = &fa_variants[FA_FIRST_backward_finish_keys_sm90];
    while (finish->element != v->element) finish++;
    if (!fa_cuda_add_finish_keys(
            x, finish, FA_BACKWARD_SM90_PASS_THREADS, queue_sm90, main, splits,
            FA_BACKWARD_SM90_KEY_SLICES(find_columns(v), find_value_columns(v))))
        return false;
    if (splits > 1) x->plan->launches[x->plan->count - 1].overlaps = true;
    return true;
}

/* The map of dQ where blocks store it. Gradients may be missing: a workspace is asked for before they are known. */
static bool plan_whole_dq(const fa_problem *p, const fa_variant *v,
                          fa_cuda_backward_sm90_launch *own, char *why, size_t size)
{
    static const char *const names[] = {"gradients.dq"};
    const int rows = v->dq_transposed ? FA_BACKWARD_SM90_QUERIES / 2 : FA_BACKWARD_SM90_QUERIES;
    own->whole_dq = stores_dq(v);
    if (!own->whole_dq) return true;
    fa_cuda_map_view(&own->maps[5], &p->dq, p->d, p->rows_q, p->heads_q, p->blocks_q, rows);
    return !p->dq.data || fa_cuda_maps_fit(&own->maps[5], names, 1, why, size);
}

static bool make_launches(const fa_problem *p, const fa_cuda_device *device, fa_cuda_dbias dbias,
                          fa_cuda_plan *plan, char *why, size_t size)
{
    static const char *const names[] = {"q", "k", "v", "dout"};
    const fa_cuda_planning x = {p, device, plan, why, size};
    fa_cuda_backward_sm90_launch own;
    if (fa_cuda_refuse_dtypes(p, true, why, size) || fa_cuda_refuse_options(p, why, size) ||
        fa_cuda_refuse_gradients(p, why, size) || refuse_head_dims(p, 256, why, size) ||
        fa_cuda_refuse_rows(p, max_rows, why, size) || fa_cuda_refuse_block_strides(p, why, size))
        return false;
    const fa_variant *v = find_variant(p, device, plan->family);
    map_tensors(p, find_block_keys(v), own.maps);
    own.left.units = own.left.room = own.left.blocks = own.left.summed = own.left.group_units = 0;
    own.left.groups = 1;
    if (dbias == FA_CUDA_DBIAS_SUMMED && plan_left(p, v, device, &own)) dbias = FA_CUDA_DBIAS_LEFT;
    else if (dbias == FA_CUDA_DBIAS_LEFT && !plan_left(p, v, device, &own))
        dbias = FA_CUDA_DBIAS_ALONE;
    map_scores(p, v, dbias, &own);
    v = find_bias_variant(p, v, dbias, &own);
    /* A workspace is asked for before the gradients are known. */
    if (!fa_cuda_maps_fit(own.maps, names, p->dout.data ? 4 : 3, why, size)) return false;
    if (!plan_whole_dq(p, v, &own, why, size)) return false;

    const int threads = FA_BACKWARD_SM90_PASS_THREADS;
    if (!fa_cuda_add_dbias_clear(&x, dbias)) return false;
    fa_cuda_plan_launch *const prepare =
        fa_cuda_plan_add(v->joined ? &fa_variants[FA_VARIANT_backward_sm90_clear]
                                   : find_companion(v, FA_FIRST_backward_prepare_sm90),
                         threads, 0, queue_sm90, device, plan, why, size);
    fa_cuda_plan_launch *const main =
        fa_cuda_plan_add(v, find_threads(v), find_smem(v), queue_sm90, device, plan, why, size);
    if (!prepare || !main) return false;
    if (!v->joined && !stores_dq(v)) {
        fa_cuda_plan_launch *const finish =
            fa_cuda_plan_add(find_companion(v, FA_FIRST_backward_finish_sm90), threads, 0,
                             queue_sm90, device, plan, why, size);
        if (!finish) return false;
        fa_cuda_set_query_tasks(p, FA_BACKWARD_SM90_QUERIES, finish);
        finish->idle = finish->idle || !p->dq.data;
        finish->overlaps = true;
    }
    plan->arithmetic = v->element == FA_ELEMENT_BFLOAT16 ? "bfloat16 products (wgmma), float32 sums"
                                                         : "float16 products (wgmma), float32 sums";
    fa_cuda_set_query_tasks(p, FA_BACKWARD_SM90_QUERIES, prepare);
    fa_cuda_set_key_tasks(p, find_keys(v), main);
    main->tile_q = FA_BACKWARD_SM90_QUERIES;
    own.q_tiles = prepare->tiles;
    own.sums_transposed = v->dq_transposed;
    own.delta_offset = 0;
    own.rows_offset =
        has_sums(v) ? (size_t)prepare->tasks * (size_t)FA_BACKWARD_SM90_SUM_BYTES(v->head_dim) : 0;
    plan->workspace_bytes =
        own.rows_offset + (size_t)prepare->tasks * (size_t)FA_BACKWARD_SM90_ROW_BYTES;
    plan_splits(p, v, device, main, plan, &own);
    if (main->tasks > INT32_MAX / 2) { /* reciprocals are for 31 bits */
        fa_cuda_say(why, size, "there are %" PRId64 " blocks", main->tasks);
        return false;
    }
    plan_order(p, prepare, main, device, plan, &own);
    plan_counter(v, prepare, plan, &own);
    own.groups = own.groups_ahead = own.group_blocks = own.group_tiles = 0;
    own.sum_tiles = (int32_t)(prepare->tasks < INT32_MAX ? prepare->tasks : INT32_MAX);
    own.cleared_offset = 0;
    main->cluster = (uint32_t)count_blocks(v);
    const int64_t at_once = count_takers(v, device);
    const int64_t takers = v->persistent && main->tasks > at_once ? at_once : main->tasks;
    main->grid = fa_cuda_grid(takers * count_blocks(v));
    plan_chain(p, v, device, prepare, main, &own);
    if (!plan_joined(p, v, device, prepare, main, plan, &own, why, size)) return false;
    plan_shared_bias(p, &own);
    if (!add_finish_keys(&x, v, main, own.splits)) return false;
    if (!add_left_sums(&x, v, main, &own)) return false;
    const size_t sums_offset = fa_cuda_aligned(plan->workspace_bytes);
    own.left.offset = sums_offset;
    if (dbias == FA_CUDA_DBIAS_SUMMED || dbias == FA_CUDA_DBIAS_LEFT)
        plan->workspace_bytes = sums_offset + fa_cuda_dbias_sum_bytes(p);
    for (int i = 0; i < plan->count; i++) {
        plan->launches[i].backward_sm90 = own;
        plan->launches[i].workspace_bytes = plan->workspace_bytes;
    }
    /* Main reads keys, by TMA, before it waits. So it may start early only behind prepare, whose blocks wait before
     * they let it start. It also reads lengths, through the first-level cache, which may have older copies if
     * prepare overlaps the launch that wrote them. */
    prepare->overlaps = !v->joined && !fa_cuda_has_own_lengths(p);
    main->overlaps = !is_wide(v) && (!prepare->idle || own.prepares);
    if (!fa_cuda_add_dbias_round(&x, dbias, sums_offset)) return false;
    if (v->joined) return fa_cuda_add_dbias_dsinks(&x, dbias, NULL);
    size_t *const delta_offset = &prepare->backward_sm90.delta_offset;
    if (!fa_cuda_add_dbias_dsinks(&x, dbias, delta_offset)) return false;
    prepare->workspace_bytes = plan->workspace_bytes;
    return true;
}

/* ---- Sums that blocks clear for later ones --------------------------------------------------- */

static fa_cuda_plan_launch *find_launch(fa_cuda_plan *plan, int first, int end)
{
    for (int i = 0; i < plan->count; i++)
        if (plan->launches[i].variant >= first && plan->launches[i].variant < end)
            return &plan->launches[i];
    return NULL;
}

/* The launch that multiplies, of a kernel that can. If only queries or only keys are packed, tasks count
 * through heads in another order than tiles of sums. */
static fa_cuda_plan_launch *find_clearing_launch(fa_cuda_plan *plan)
{
    fa_cuda_plan_launch *main = find_launch(plan, FA_FIRST_backward_sm90, FA_END_backward_sm90);
    if (!main)
        main =
            find_launch(plan, FA_FIRST_backward_sm90_persistent, FA_END_backward_sm90_persistent);
    if (!main || main->tasks == 0 || main->backward_sm90.ordered ||
        main->backward_sm90.first_stored || !main->backward_sm90.heads_in_order ||
        main->backward_sm90.query_parts > 1 || !main->backward_sm90.even_splits)
        return NULL;
    const fa_variant *v = &fa_variants[main->variant];
    return FA_BACKWARD_SM90_CLEARS_AHEAD(v->ordered, v->options, v->joined) ? main : NULL;
}

bool fa_cuda_backward_sm90_clear_ahead(fa_cuda_plan *plan, int64_t ahead)
{
    fa_cuda_plan_launch *const main = find_clearing_launch(plan),
                               *const prepare = find_launch(plan, FA_FIRST_backward_prepare_sm90,
                                                            FA_END_backward_prepare_sm90);
    const int64_t most = INT32_MAX / 2;
    if (!main || !prepare || prepare->idle || prepare->tasks > most || main->tasks > most / 2)
        return false;
    const int64_t heads = main->tasks / main->tiles, together = main->backward_sm90.heads_together;
    const int64_t groups = (heads + together - 1) / together,
                  blocks = count_blocks(&fa_variants[main->variant]); /* of a work tile */
    if (groups <= ahead) return false;
    const size_t offset = (plan->workspace_bytes + 15) / 16 * 16;
    plan->workspace_bytes = offset + (size_t)groups * sizeof(int32_t);
    for (int i = 0; i < 2; i++) {
        fa_cuda_backward_sm90_launch *own = i ? &main->backward_sm90 : &prepare->backward_sm90;
        own->cleared_offset = offset;
        own->groups = (int32_t)groups;
        own->groups_ahead = (int32_t)ahead;
        own->group_blocks = (int32_t)(together * main->tiles * blocks);
        own->group_tiles = (int32_t)(prepare->tasks / heads * together);
    }
    return true;
}

/* Does so a round of blocks and a half ahead, for those that come last in a group clear when the next group begins. What is clear
 * stays in half of the L2 cache, or it is not worth it. Neither is it where sequences are short: additions are the limit
 * then, and zeros take their part of the L2 cache's rate (H100, n 512 and 1k: -5 to +1%; n 2k to 32k: 0 to +3%). */
static void clear_ahead_where_faster(const fa_cuda_device *device, fa_cuda_plan *plan)
{
    const fa_cuda_plan_launch *main = find_clearing_launch(plan);
    if (!main || main->tiles * main->tile_k < 2048) return;
    const fa_variant *v = &fa_variants[main->variant];
    const fa_cuda_backward_sm90_launch *own = &main->backward_sm90;
    const int64_t heads = main->tasks / main->tiles,
                  group_blocks = own->heads_together * main->tiles,
                  blocks = count_takers(v, device) * 3 / 2,
                  ahead = (blocks + group_blocks - 1) / group_blocks;
    const int64_t tiles = ahead * own->heads_together * own->sum_tiles / heads;
    if (tiles <= device->l2_bytes / 2 / FA_BACKWARD_SM90_SUM_BYTES(v->head_dim))
        fa_cuda_backward_sm90_clear_ahead(plan, ahead);
}

/* Sums of what blocks have left have one order. An item's must not depend on how many items there are. */
static bool can_leave_in_order(const fa_problem *p)
{
    const int64_t *n = p->dbias_shape;
    return p->deterministic && !p->batch_invariant && p->dbias.data && p->softcap == 0 &&
           n[2] > 1 && n[3] > 1 && (n[0] < p->batch || n[1] < p->heads_q);
}

/* Sums of dbias are made where the workspace has room for them: fa_workspace_size, which does not know dbias, does not count them. */
static bool plan_backward(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                          char *why, size_t size)
{
    const fa_cuda_dbias dbias =
        can_leave_in_order(p) ? FA_CUDA_DBIAS_LEFT : fa_cuda_choose_dbias(p);
    const bool needs_room = dbias == FA_CUDA_DBIAS_SUMMED || dbias == FA_CUDA_DBIAS_LEFT;
    if (!make_launches(p, device, dbias, plan, why, size)) return false;
    clear_ahead_where_faster(device, plan); /* not where there is a bias */
    if (!needs_room || plan->workspace_bytes <= p->workspace_size) return true;
    fa_cuda_plan_begin(device, plan->family, plan);
    return make_launches(p, device, FA_CUDA_DBIAS_ALONE, plan, why, size);
}

const fa_cuda_family fa_cuda_backward_sm90 = {
    .name = "sm90",
    .oldest = 90,
    .newest = 90,
    .plan = plan_backward,
};

/* Families of plain problems. */
static bool refuse_order(const fa_problem *p, char *why, size_t size)
{
    if (!is_ordered(p)) return false;
    fa_cuda_say(why, size, "options.flags ask for sums in one order");
    return true;
}

static bool refuse_score_options(const fa_problem *p, char *why, size_t size)
{
    if (!find_options(p)) return false;
    fa_cuda_say(why, size, "an option changes scores or weights");
    return true;
}

/* Without options that change scores, to head dims of 128. */
static bool plan_plain(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                       char *why, size_t size)
{
    return !refuse_score_options(p, why, size) && !refuse_head_dims(p, 128, why, size) &&
           plan_backward(p, device, plan, why, size);
}

static bool plan_persistent(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                            char *why, size_t size)
{
    const bool has_order = is_narrow(p);
    return (has_order || !refuse_order(p, why, size)) && plan_plain(p, device, plan, why, size);
}

/* Whether blocks can store whole dQ: each query tile has queries that see some keys, and TMA, which stores whole 16 bytes, stores
 * nothing behind the end of a row. */
static bool can_store_dq(const fa_problem *p, const fa_uniform_lengths *u)
{
    const int64_t queries = FA_BACKWARD_SM90_QUERIES;
    return u->applies && p->d % 8 == 0 && u->queries_from < queries &&
           fa_cuda_count_tiles(u->queries_to, queries) == fa_cuda_count_tiles(p->rows_q, queries);
}

/* Whether all keys of a head are one key tile. */
static bool is_single(const fa_problem *p)
{
    const fa_uniform_lengths u = fa_cuda_uniform_lengths(p);
    return can_store_dq(p, &u) && p->rows_k <= FA_BACKWARD_SM90_KEYS;
}

/* Writes no reason. */
static bool is_not_single(const fa_problem *p, const fa_cuda_device *device, char *why, size_t size)
{
    (void)device, (void)why, (void)size;
    return !is_single(p);
}

static bool plan_single(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                        char *why, size_t size)
{
    if (!is_single(p)) {
        fa_cuda_say(
            why, size,
            "heads have more than %d keys, or lengths of their own, or queries see no key, or "
            "the head dim is not a multiple of 8",
            FA_BACKWARD_SM90_KEYS);
        return false;
    }
    return !refuse_order(p, why, size) && plan_plain(p, device, plan, why, size);
}

const fa_cuda_family fa_cuda_backward_sm90_single = {
    .name = "sm90_single",
    .oldest = 90,
    .newest = 90,
    .does_few = true,
    .slower = is_not_single,
    .plan = plan_single,
};

/* Whether blocks can store dQ of heads of several key tiles, the last of which is seen. */
static bool can_store_of_several(const fa_problem *p, const fa_uniform_lengths *u)
{
    return can_store_dq(p, u) && u->n_k == p->rows_k && u->keys_to == p->rows_k &&
           count_key_tiles(p) > 1;
}

/* Whether each key tile's query tiles are the last ones of those of the one before, which all see the first one. */
static bool has_nested_tiles(const fa_problem *p)
{
    const fa_uniform_lengths u = fa_cuda_uniform_lengths(p);
    return can_store_of_several(p, &u) && !has_groups(p) && !has_window(p) &&
           (p->causal || p->window_right < 0);
}

/* Whether blocks need not share keys, because there are enough of them. Where sums must have one order, two rounds are enough
 * under a causal mask, for blocks that share keys take one head after the other (H200, rate over that of any order, blocks that
 * share keys, and rounding: head dim 128, 1.9 rounds 0.945, 0.941 and 0.968, 0.972, 2.9 0.957, 1.04, 3.9 0.78 to 0.91, 0.875 to
 * 0.96; 64, 1.9 rounds 0.90 to 0.93, 0.95 to 0.97, 2.9 0.90, 1.03, 3.9 0.86 to 0.91, 0.96 to 0.97). To eight key tiles rounding
 * is faster than any order (four query heads for a key head, 2.4 to 4.8 rounds 1.13 to 1.44). */
static bool has_enough_blocks(const fa_problem *p, const fa_cuda_device *device)
{
    const int64_t tasks = count_key_tiles(p) * p->heads_kv * p->batch;
    if (is_ordered(p) && has_few_undivided(p, tasks, device->multiprocessors)) return false;
    if (splits_whole_groups(p, tasks, device->multiprocessors)) return false;
    if (fa_cuda_count_splits(p, tasks, device->multiprocessors) == 1) return true;
    return (is_ordered(p) || count_key_tiles(p) <= 8) && p->causal &&
           (!has_window(p) || (is_ordered(p) && !is_narrow(p) && !is_above_96(p))) &&
           10 * tasks >= 19 * device->multiprocessors;
}

/* Whether it is known which block has the last share of a query tile's dQ: each head has several key tiles, and all keys are seen.
 * Heads may share keys, but not in parts. */
static bool has_last_shares(const fa_problem *p, const fa_cuda_device *device)
{
    const fa_uniform_lengths u = fa_cuda_uniform_lengths(p);
    return can_store_of_several(p, &u) && u.keys_from == 0 && has_enough_blocks(p, device);
}

/* Whether a head's key tiles can be the blocks of a cluster. */
static bool is_chain(const fa_problem *p)
{
    return has_nested_tiles(p) && count_key_tiles(p) <= FA_BACKWARD_SM90_CHAIN;
}

static bool refuse_invariance(const fa_problem *p, char *why, size_t size)
{
    if (!p->batch_invariant) return false;
    fa_cuda_say(why, size, "options.flags ask for the same bits in any batch");
    return true;
}

/* Chains that run at once. A cluster stays within a group of 16 to 18 multiprocessors, and not all groups are whole (H200: 38 of
 * three blocks ran at once, 30 of four, 22 of five, 14 of six and of eight; 40, 31, 18 of six and 16 of seven did not). */
static int64_t count_chains_at_once(const fa_cuda_device *device, int64_t tiles)
{
    return device->multiprocessors / 18 * (16 / tiles);
}

/* Rate over that of the other families (H200): two key tiles, from one round of blocks to 15, 1.05 to 1.5 (but see
 * is_slow_rounding). More in one round: causal, head dim 64, 5, 6 and 8 key tiles 1.23, 1.16, 1.07, 128, 3, 4, 5 and 7 1.09 to
 * 1.2, 1.06 to 1.2, 1.13, 0.94; full, head dim 64, 3 and 4 1.28, 1.16, 128, 3, 5 and 8 1.07 to 1.2, 0.93, 0.77. In more rounds
 * 4 0.93 to 0.98. A tile takes longer here, so with many query tiles nothing is won. Writes no reason. */
static bool is_slow_chain(const fa_problem *p, const fa_cuda_device *device, char *why, size_t size)
{
    (void)why, (void)size;
    const bool narrow = is_narrow(p);
    const int64_t tiles = fa_cuda_count_tiles(p->rows_k, FA_BACKWARD_SM90_KEYS),
                  blocks = tiles * p->heads_kv * p->batch,
                  most = p->causal ? (narrow ? 8 : 5) : (narrow ? 4 : 3);
    const bool square = p->causal && p->rows_q < p->rows_k + FA_BACKWARD_SM90_QUERIES;
    if (!is_chain(p) || tiles > most || (!square && p->rows_q > 512)) return true;
    if (tiles > 2) return p->heads_kv * p->batch > count_chains_at_once(device, tiles);
    if (narrow) return 3 * p->rows_q >= 2 * p->rows_k && blocks >= 5 * device->multiprocessors;
    return p->causal && is_above_96(p) && blocks > device->multiprocessors;
}

static bool plan_chained(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                         char *why, size_t size)
{
    if (!is_chain(p)) {
        fa_cuda_say(
            why, size,
            "heads share keys, or have one key tile or more than %d, or lengths of their own, or a "
            "window, or queries see no key, or the head dim is not a multiple of 8",
            FA_BACKWARD_SM90_CHAIN);
        return false;
    }
    return !refuse_invariance(p, why, size) && plan_plain(p, device, plan, why, size);
}

const fa_cuda_family fa_cuda_backward_sm90_chained = {
    .name = "sm90_chained",
    .oldest = 90,
    .newest = 90,
    .does_few = true,
    .slower = is_slow_chain,
    .plan = plan_chained,
};

/* is_slow_rounding to head dim 64. Rate over that of the other families (H200, by rounds of blocks): causal, 2 key tiles, 3
 * rounds 0.89, 6 1.02 to 1.06, 16 and more 1.12 to 1.16; 3 and 4, 1.2 to 30 rounds 1.09 to 1.27; 5 to 8, 1.2 rounds 0.83 to
 * 0.98, 1.8 to 31 1.04 to 1.18; 12, 1.2 rounds 0.86, 1.8 to 16 1.01 to 1.07; 16, 1.8 rounds 0.96, 3 to 16 1.00 to 1.05; 24 and
 * 32 0.84 to 1.04. Full, 2 key tiles, 3 rounds 0.91, 6 to 32 1.02 to 1.16; 3, 1.8 rounds 0.98 to 1.00, 3 to 32 1.01 to 1.07; 4,
 * 3 rounds 0.98, 6 to 32 1.01 to 1.05; 5, 6 rounds 0.98, 16 and 32 1.05; 8, 3 to 32 rounds 1.00 to 1.02; 16 0.87 to 0.99. Where
 * sums must have one order, others are slower (with one key/value head for each query head 1.00 to 1.3), but for two key tiles,
 * which are a chain, and long rows (full n 4k 0.98, causal n 16k 1.00; full, rate over that of any order, others and this: n
 * 2,406 0.925, 0.972, n 2,700 0.945, 0.985, n 3,200 0.992, 0.971, with 3.9 rounds n 4k 0.91, 0.936). */
static bool is_slow_narrow_rounding(const fa_problem *p, int64_t tiles, int64_t percent)
{
    if (is_ordered(p))
        return tiles > (p->causal ? 64 : percent < 500 ? 32 : 24) || (tiles == 2 && percent < 500);
    if (p->causal)
        return tiles > 16 || percent < (tiles == 2    ? 500
                                        : tiles <= 4  ? 100
                                        : tiles <= 12 ? 150
                                                      : 300);
    return tiles > 8 || percent < (tiles == 2 ? 500 : tiles == 3 ? 250 : tiles == 4 ? 500 : 1000);
}

/* is_slow_rounding with a window. In brackets: others in one order. Rate over that of any order (H200, by the key tiles that a
 * query sees): head dim 64, 2 1.15, 3 1.05 (half a round of blocks 1.15 to 1.37), 5 1.01 to 1.13, 9 0.97 to 1.04 (0.93 to
 * 0.95), 33 0.94 (0.87), 65 0.915 (0.857), with four query heads for a key head 0.995 (0.78), 129 0.877 (0.82), 0.975 (0.82);
 * 128, 2 1.29, 3 1.13 (half a round 1.32), 5 1.07 to 1.14, 9 1.01 to 1.06 (half a round 0.92), 17 0.96 (0.94), 33 0.97 (0.98).
 * Four query heads for a key head: head dim 96, 5 0.97 (0.89), 64, 3 1.15, 9 1.03, 128, 3 1.14, 9 0.84; seven: 64, 5 0.92
 * (0.97). */
static bool is_slow_window_rounding(const fa_problem *p, int64_t percent)
{
    const int64_t keys = FA_BACKWARD_SM90_KEYS, seen = count_rows_together(p) / keys - 2;
    const bool narrow = is_narrow(p), ordered = is_ordered(p);
    const bool few =
        (narrow || (!is_above_96(p) && seen <= 5)) && ordered && p->heads_q <= 4 * p->heads_kv;
    if (has_groups(p) && !ordered && percent < 200) return true; /* blocks that share keys */
    if (has_groups(p) && seen > 4 && !few) return true;
    if (ordered) return !narrow && seen > 20;
    return seen > (narrow || percent < 100 ? 6 : 10);
}

/* is_slow_rounding where query heads share keys (in brackets: others in one order; H200, four query heads for a key head, rate
 * over that of any order, by key tiles): causal, head dim 64, 2 1.5, 4 1.2, 8 1.1, 16 1.04 (with three query heads 0.98), 32
 * 0.99 (0.89), 128 0.95 (0.70); 128, 2 1.7, 4 1.3, 8 1.12, 12 1.07, 16 1.0, 32 0.96 to 0.99 (0.83), 64 0.94 (0.84), 128 0.92
 * (0.77). Full, head dim 64, 2 1.13 to 1.19, 3 1.13, 4 1.06, 6 1.04 (0.955), 8 0.97 to 0.99 (0.90), 32 0.95 (0.955); 128, 2
 * 1.17 to 1.24, 3 1.15 to 1.2, 4 1.10, 6 1.07, 8 1.00 to 1.02 (1.02), 32 0.90 to 0.93 (0.98). With two rounds of blocks:
 * causal, 8, 64 1.01, 128 0.985. With seven query heads, 128, causal, 1.9 rounds: 16 1.19, 32 1.00. */
static bool is_slow_group_rounding(const fa_problem *p, int64_t tiles, int64_t percent)
{
    const bool narrow = is_narrow(p), many = p->heads_q >= 4 * p->heads_kv;
    if (is_ordered(p)) return !p->causal && tiles > (narrow ? 16 : 8);
    if (p->causal && !narrow && tiles == 16 && percent >= 190 && p->heads_q >= 5 * p->heads_kv &&
        is_undivided(p))
        return false;
    return percent < 200 || tiles > (!p->causal ? (narrow ? 4 : 6) : narrow && many ? 16 : 12);
}

/* Whether a launch that rounds dQ would cost less than blocks that wait for each other's shares. Rate over that of the other families
 * (H200, head dim 128, by rounds of blocks): causal, 2 key tiles, 1.1 to 12 rounds 1.04 to 1.18; 3 and 4, 1 to 36 rounds 1.12 to 1.36; 5
 * to 8, 1.1 rounds 0.95 to 1.05, 1.6 to 36 1.10 to 1.33; 10 to 16, 1.1 to 1.5 rounds 0.95 to 1.04, 2.4 to 16 1.04 to 1.20; 18 to 28, 2.2
 * rounds 1.01, 3.3 to 17 1.00 to 1.10; 32, 5 and 16 rounds 0.98 to 1.00. Full, 2 key tiles 0.92 to 0.99; 3, 1.6 rounds 1.00, 2.1 to 36
 * 1.05 to 1.14; 4, 1.8 to 2.8 rounds 0.97 to 1.04, 4 to 36 1.04 to 1.11; 5 and 6, 1.7 rounds 0.96, 2.4 to 36 1.03 to 1.08; 7 and 8, 2.4
 * rounds 0.985, 4 to 18 1.02 to 1.09; 9 to 12, 4 rounds 0.96 to 0.98, 9 to 15 1.00 to 1.03; 16, 9 rounds 0.98. Half as many queries as keys
 * or fewer 0.84 to 0.89. Where sums must have one order, others wait as well: to 8 key tiles 0.99 to 1.30, causal to 28 1.00 to 1.13, full,
 * 16 and 32 key tiles 0.98, 0.97. Writes no reason. */
static bool is_slow_rounding(const fa_problem *p, const fa_cuda_device *device, char *why,
                             size_t size)
{
    (void)why, (void)size;
    const int64_t tiles = count_key_tiles(p),
                  percent = 100 * tiles * p->heads_kv * p->batch / device->multiprocessors;
    const bool narrow = is_narrow(p);
    if (!has_last_shares(p, device) || 3 * p->rows_q < 2 * p->rows_k) return true;
    if (has_window(p)) return is_slow_window_rounding(p, percent);
    if (!p->causal && p->window_right >= 0) return true;
    if (has_groups(p)) return is_slow_group_rounding(p, tiles, percent);
    if (narrow) return is_slow_narrow_rounding(p, tiles, percent);
    if (is_ordered(p) && tiles <= (p->causal ? 28 : 8)) return false;
    if (p->causal)
        return tiles > 28 || percent < (tiles <= 4    ? 0
                                        : tiles <= 8  ? 150
                                        : tiles <= 16 ? 220
                                                      : 300);
    return tiles == 2 || tiles > 12 ||
           percent < (tiles == 3   ? 200
                      : tiles == 4 ? 300
                      : tiles <= 6 ? 230
                      : tiles <= 8 ? 350
                                   : 800);
}

static bool plan_rounding(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                          char *why, size_t size)
{
    if (!has_last_shares(p, device)) {
        fa_cuda_say(
            why, size,
            "heads have one key tile, or lengths of their own, or blocks share their keys, "
            "or queries or keys are hidden from all, or the head dim is not a multiple of 8");
        return false;
    }
    return !refuse_invariance(p, why, size) && plan_plain(p, device, plan, why, size);
}

const fa_cuda_family fa_cuda_backward_sm90_rounding = {
    .name = "sm90_rounding",
    .oldest = 90,
    .newest = 90,
    .does_few = true,
    .slower = is_slow_rounding,
    .plan = plan_rounding,
};

/* Whether each head has one key tile, and few query tiles. */
static bool is_short(const fa_problem *p)
{
    return p->rows_q <= FA_BACKWARD_SM90_KEYS && p->rows_k <= FA_BACKWARD_SM90_KEYS;
}

/* Whether there is no mask, head dim 128, and least_tiles to 16 key tiles in more than so many rounds of blocks. */
static bool has_many_rounds(const fa_problem *p, const fa_cuda_device *device, int least_tiles,
                            int rounds)
{
    const int64_t tiles = count_key_tiles(p), blocks = tiles * p->heads_kv * p->batch;
    return is_full(p) && is_above_96(p) && p->n_q == p->n_k && tiles >= least_tiles &&
           tiles <= 16 && blocks > rounds * device->multiprocessors;
}

/* Of head dims above 64 blocks that are not persistent are as fast, or faster (head dim 128 on an H200, n 4k causal: 523
 * TFLOP/s, persistent 498; head dim 64: 461, persistent 475). But a short block waits for its loads most of the time, and a
 * persistent one loads ahead (head dim 128, n 128 causal: 0.308 ms, persistent 0.293; full, joined launches: 0.384 and 0.353).
 * Neither does it wait where there are 16 rounds of blocks and more, without a mask (n 512, 640, 768 and 1k with 768 heads
 * 1.07, 1.04, 1.06, 1.04, n 896, 1k, 1.1k, 1.3k and 2k with 320 1.06, 1.03, 1.02, 1.04, 1.04; in fewer rounds 0.95 to 1.02).
 * Writes no reason. */
static bool is_above_64(const fa_problem *p, const fa_cuda_device *device, char *why, size_t size)
{
    (void)why, (void)size;
    return (p->d > 64 || p->d_v > 64) && !is_short(p) && !has_many_rounds(p, device, 4, 16);
}

const fa_cuda_family fa_cuda_backward_sm90_persistent = {
    .name = "sm90_persistent",
    .oldest = 90,
    .newest = 90,
    .does_few = true,
    .slower = is_above_64,
    .plan = plan_persistent,
};

/* Blocks count through the tiles of a head as if all heads had equally many. */
static bool refuse_packed(const fa_problem *p, char *why, size_t size)
{
    if (!p->cu_seqlens_q && !p->cu_seqlens_k) return false;
    fa_cuda_say(why, size, "%s is given", p->cu_seqlens_q ? "cu_seqlens_q" : "cu_seqlens_k");
    return true;
}

/* Whether the key tiles are one round of blocks at most, or up to eight rounds that are nearly full (rate of three launches over
 * that of one, H200, head dim 128: n 512, 17 heads 1.17, n 1k, 8 heads 1.14, n 4k, 4 heads 1.03; n 1k, 50 and 80 heads, 3.03 and
 * 4.85 rounds, 0.94 and 1.08; n 4k, 13, 20 and 33 heads, 3.15, 4.85 and 8 rounds, 0.99, 1.04, 1.05; n 8k, 2.9 rounds, 0.96). But not
 * from two rounds on with up to four key tiles (n 282, 384 and 448 with 128 heads, three or four rounds, 0.97, 0.97, 0.91). Measured where
 * no heads share keys; with groups, blocks are counted by fa_cuda_count_splits, whatever the launches will have. */
static bool fills_rounds(const fa_problem *p, const fa_cuda_device *device)
{
    const int64_t room = device->multiprocessors,
                  tiles = fa_cuda_count_tiles(p->rows_k, FA_BACKWARD_SM90_KEYS),
                  heads = p->heads_kv * p->batch;
    const int64_t tasks = tiles * heads * fa_cuda_count_splits(p, tiles * heads, room);
    const int64_t rounds = (tasks + room - 1) / room;
    if (tasks <= room) return true;
    if (is_full(p) && is_above_96(p) && tiles <= 4 && rounds >= 3) return false;
    return rounds <= 8 && tiles <= 32 && tasks * 100 >= rounds * room * 96;
}

/* Whether a group's heads are split better if splits may differ, which one launch does not support. */
static bool splits_better_apart(const fa_problem *p, const fa_cuda_device *device)
{
    const fa_variant *one = find_variant(p, device, &fa_cuda_backward_sm90_joined),
                     *three = find_variant(p, device, &fa_cuda_backward_sm90);
    const int64_t tasks = count_key_tiles(p) * p->heads_kv * p->batch;
    double joined_us = 0.0, apart_us = 0.0;
    if (!has_groups(p) || !one || !three || is_wide(three)) return false;
    (void)count_splits(p, one, tasks, device, &joined_us);
    (void)count_splits(p, three, tasks, device, &apart_us);
    return apart_us < 0.95 * joined_us;
}

/* One launch is faster without a mask above head dim 64, unless one order of sums is faster still (16,384 tokens on an H100,
 * head dim 128, one launch and three: n 1k 478 and 457 TFLOP/s, n 4k 613 and 605, n 16k 649 and 646; head dim 64, n 1k: 388 and
 * 417). Under a causal mask it was faster on one GPU (n 4k 531 and 505), and on others up to 9% slower. Windows are not
 * measured. Short sequences have persistent blocks. With 9 to 16 key tiles in more than eight rounds three launches are faster
 * (head dim 128, H200, n 1.1k with 128 and 320 heads 1.03, 1.01, n 1.3k 1.01, 1.02, n 1.7k with 192 1.02). Writes no reason. */
static bool is_faster_apart(const fa_problem *p, const fa_cuda_device *device, char *why,
                            size_t size)
{
    if (splits_better_apart(p, device)) return true;
    (void)why, (void)size;
    const bool in_order = is_above_96(p) && is_short_and_full(p, device, 128);
    const bool many = has_many_rounds(p, device, 4, 16) || has_many_rounds(p, device, 9, 8);
    return is_narrow(p) || p->causal || p->window_left >= 0 || p->window_right >= 0 ||
           is_short(p) || in_order || many || fills_rounds(p, device);
}

static bool plan_joined_launches(const fa_problem *p, const fa_cuda_device *device,
                                 fa_cuda_plan *plan, char *why, size_t size)
{
    return !refuse_order(p, why, size) && !refuse_score_options(p, why, size) &&
           !refuse_head_dims(p, 128, why, size) && !refuse_packed(p, why, size) &&
           plan_backward(p, device, plan, why, size);
}

const fa_cuda_family fa_cuda_backward_sm90_joined = {
    .name = "sm90_joined",
    .oldest = 90,
    .newest = 90,
    .does_few = true,
    .slower = is_faster_apart,
    .plan = plan_joined_launches,
};
