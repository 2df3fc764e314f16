/*
 * forward_sm90 and forward_sm90_wide: Hopper's tensor cores (wgmma) and copy engine (TMA), float16 and
 * bfloat16.
 */
#include "cuda/plan_sm90.h"

#include <inttypes.h>
#include <string.h>

#include "cuda/forward.h"
#include "cuda/family.h"

/* What of a variant differs between forward_sm90 and forward_sm90_wide, whose blocks are in clusters. */
static bool is_wide(const fa_variant *v) { return v->cluster > 1; }

static int count_queries(const fa_variant *v) { return FA_SM90_QUERIES(v->consumers); }

static int count_smem(const fa_variant *v)
{
    if (is_wide(v))
        return FA_SM90_WIDE_SMEM(v->element, v->head_dim, v->consumers, v->keys, v->stages,
                                 v->chunk);
    return FA_SM90_SMEM(v->element, v->head_dim, v->value_dim, v->options, v->consumers, v->keys,
                        v->stages, v->q_stages);
}

/* Rows of keys and of values that are loaded at once. */
static int rows_k(const fa_variant *v) { return v->keys / v->cluster; }
static int rows_v(const fa_variant *v) { return is_wide(v) ? v->v_rows : v->keys; }

/* The kernel counts rows and keys of a sequence in 32 bits, with room for a tile and a mask's edge. */
static const int64_t most_rows = (1 << 30) - 4096;

/* Rows of queries that tiles of so many compute. */
static int64_t padded_rows(const fa_problem *p, const fa_variant *v)
{
    const int queries = count_queries(v);
    return (p->rows_q + queries - 1) / queries * queries;
}

/* Larger tiles of queries keep more warps busy: they may compute some 3% more. Short rows, where what is
 * done once for a tile of queries counts, and more of it is hidden by a causal mask, are better off with
 * smaller ones (measured on an H200). */
static bool wants_fewer_queries(const fa_problem *p, const fa_variant *fewer,
                                const fa_variant *more)
{
    if (p->cu_seqlens_q) return false;
    if (p->rows_q <= (p->causal ? 2048 : 1024)) return true;
    return 32 * padded_rows(p, more) > 33 * padded_rows(p, fewer);
}

/* ---- Maps ------------------------------------------------------------------------------------ */

/* Rows of keys or values that are loaded at once, `most` of them; of pages, what divides these, page and
 * the place of a piece's first key. */
static int32_t find_box(const fa_problem *p, int most)
{
    int32_t box = FA_SM90_ALIGN;
    if (!p->block_table) return most;
    while (p->rows_k % box || most % box) box /= 2;
    return box;
}

/* A stride of 0 cannot be mapped; the axis then has one index. */
static bool is_broadcast(const fa_view *v, int axis) { return v->stride[axis] == 0; }

static fa_sm90_steps find_steps(const fa_view *v)
{
    return (fa_sm90_steps){.head = !is_broadcast(v, 2), .block = !is_broadcast(v, 0)};
}

/* stride: in elements */
static void set_axis(fa_tensor_map_shape *map, int axis, int64_t extent, int64_t stride,
                     int32_t box)
{
    map->extent[axis] = (uint64_t)extent;
    map->stride[axis] = (uint64_t)stride * (uint64_t)FA_ELEMENT_BYTES(map->element);
    map->box[axis] = (uint32_t)box;
}

static void set_map_shape(fa_tensor_map_shape *map, const fa_view *v, int64_t d, int64_t rows,
                          int64_t heads, int64_t blocks, int32_t box_rows)
{
    map->base = v->data;
    map->element = (fa_element)v->dtype;
    map->axes = 4;
    set_axis(map, 0, d, v->stride[3], 128 / FA_ELEMENT_BYTES(map->element)); /* the swizzle's */
    set_axis(map, 1, rows, v->stride[1], box_rows);
    set_axis(map, 2, is_broadcast(v, 2) ? 1 : heads, v->stride[2], 1);
    set_axis(map, 3, is_broadcast(v, 0) ? 1 : blocks, v->stride[0], 1);
}

static void make_map_shapes(const fa_problem *p, const fa_variant *v, fa_tensor_map_shape maps[3])
{
    const int32_t box_v = find_box(p, rows_v(v)), box_k = p->block_table ? box_v : rows_k(v);
    set_map_shape(&maps[0], &p->q, p->d, p->rows_q, p->heads_q, p->blocks_q, 64);
    set_map_shape(&maps[1], &p->k, p->d, p->rows_k, p->heads_kv, p->blocks_k, box_k);
    set_map_shape(&maps[2], &p->v, p->d_v, p->rows_k, p->heads_kv, p->blocks_k, box_v);
}

/* ---- The plan -------------------------------------------------------------------------------- */

static bool refuse_sizes(const fa_problem *p, char *why, size_t size)
{
    if (fa_cuda_refuse_rows(p, most_rows, why, size)) return true;
    if (p->block_table && p->rows_k % 8) {
        fa_cuda_say(why, size, "k.shape[1] is %" PRId64 ", no multiple of 8 rows a page",
                    p->rows_k);
        return true;
    }
    return false;
}

/* A batch-invariant choice must not depend on whether an item comes alone: then the axis of the batch has
 * extent 1, and its stride does not count. */
static bool refuse_block_strides(const fa_problem *p, char *why, size_t size)
{
    const struct {
        const char *name;
        const fa_view *view;
        bool batch;
    } tensors[] = {{"q", &p->q, !p->cu_seqlens_q},
                   {"k", &p->k, !p->cu_seqlens_k && !p->block_table},
                   {"v", &p->v, !p->cu_seqlens_k && !p->block_table}};
    for (int i = 0; i < 3; i++) {
        const int64_t stride = tensors[i].view->stride[0];
        if (!p->batch_invariant || !tensors[i].batch || (stride >= 0 && stride % 8 == 0)) continue;
        fa_cuda_say(why, size, "%s.stride[0] is %" PRId64 ", not made of whole 16 bytes",
                    tensors[i].name, stride);
        return true;
    }
    return false;
}

/* The bias as a tensor of (batch, query, head, key). */
static fa_view bias_rows(const fa_problem *p)
{
    const fa_view *v = &p->bias;
    return (fa_view){v->data, v->dtype, {v->stride[0], v->stride[2], v->stride[1], v->stride[3]}};
}

/* Whether the copy engine can load the bias: 16-bit elements, an axis for each query, a sequence in each
 * batch item. Where these have lengths of their own, the bias may end with the longest, and what is behind it
 * must not be read; but how long that is only the device knows. */
static bool maps_bias(const fa_problem *p, fa_tensor_map_shape *map)
{
    const fa_view v = bias_rows(p);
    if (!v.data || (v.dtype != FA_FLOAT16 && v.dtype != FA_BFLOAT16)) return false;
    if (fa_cuda_has_own_lengths(p) || v.stride[3] != 1 || is_broadcast(&v, 1)) return false;
    set_map_shape(map, &v, p->n_k, p->rows_q, p->heads_q, p->batch, 64);
    return fa_tensor_map_fits(map, NULL);
}

/* The options that change scores or weights; the bias's map, if FA_SM90_BIAS is among them. Kernels without
 * any, or with one, take the largest score for the largest logit, which a scale below 0 would turn round;
 * with a bias, one must not overflow in units of the scale. */
static int find_options(const fa_problem *p, fa_tensor_map_shape *bias)
{
    const bool mapped = maps_bias(p, bias);
    int options = 0;
    if (p->softcap > 0) options |= FA_SM90_SOFTCAP;
    if (p->alibi_slopes) options |= FA_SM90_ALIBI;
    if (mapped) options |= FA_SM90_BIAS;
    if (p->mask.data || (p->bias.data && !mapped)) options |= FA_SM90_BY_ROWS;
    if (p->dropout_threshold) options |= FA_SM90_DROPOUT;
    if (!(p->scale > 0) || (options && p->scale < FA_SM90_LEAST_SCALE)) options |= FA_SM90_SCALED;
    return options;
}

/* The next variant of the same element type. */
static const fa_variant *next_variant(const fa_variant *v)
{
    const fa_element element = v->element;
    do v++;
    while (v->element != element);
    return v;
}

static bool takes(const fa_variant *v, const fa_problem *p, int options)
{
    if (v->element != (fa_element)p->q.dtype) return false;
    if (p->d > v->head_dim || p->d_v > v->value_dim * v->cluster) return false;
    if (v->single_tiles && (fa_cuda_has_own_lengths(p) || p->n_k > v->keys)) return false;
    if (v->options != options && !(options && v->options == FA_SM90_ALL)) return false;
    return !v->short_rows || wants_fewer_queries(p, v, next_variant(v));
}

static const fa_variant *find_variant(const fa_problem *p, int options)
{
    const fa_variant *const end = &fa_variants[FA_END_forward_sm90];
    for (const fa_variant *v = &fa_variants[FA_FIRST_forward_sm90]; v < end; v++)
        if (takes(v, p, options)) return v;
    return NULL;
}

static bool refuse_maps(const fa_tensor_map_shape maps[3], char *why, size_t size)
{
    static const char *const names[] = {"q", "k", "v"};
    for (int i = 0; i < 3; i++) {
        const char *reason;
        if (fa_tensor_map_fits(&maps[i], &reason)) continue;
        fa_cuda_say(why, size, "%s: %s", names[i], reason);
        return true;
    }
    return false;
}

static int64_t count_heads(const fa_problem *p) { return p->batch * p->heads_q; }

/* Pairs of a head's pieces. */
static int64_t count_pairs(const fa_cuda_plan *plan) { return (plan->tiles + 1) / 2; }

static bool may_pair(const fa_problem *p) { return p->causal && !p->cu_seqlens_q; }

/* Where lengths are known to the device alone, blocks take few tasks each, and the hardware deals them out. But
 * only behind another task does a block get its first keys in time: so it takes several, as long as enough
 * blocks are left to deal out. They lie evenly in a head's tasks, so that they are hardly of one sequence. On
 * an H200, packed sequences: +4 to +20%, short ones up to twice as fast. */
static int64_t count_shares(int64_t takers, const fa_cuda_plan *plan)
{
    int64_t each = plan->tasks / (8 * takers);
    if (each == 0) return plan->tasks;
    if (each < 2) each = 2;
    if (each > 8) each = 8;
    const int64_t blocks = (plan->tasks + each - 1) / each, apart = (plan->tiles + each - 1) / each;
    return blocks + (apart - blocks % plan->tiles + plan->tiles) % plan->tiles;
}

/* Blocks stay and take piece after piece. */
static uint32_t count_blocks(const fa_problem *p, const fa_cuda_device *device,
                             const fa_cuda_plan *plan)
{
    int64_t clusters = ((int64_t)device->multiprocessors + plan->cluster - 1) / plan->cluster;
    if (fa_cuda_has_own_lengths(p))
        clusters = may_pair(p) ? count_heads(p) * count_pairs(plan) : count_shares(clusters, plan);
    if (clusters > plan->tasks) clusters = plan->tasks;
    const int64_t most = fa_cuda_grid(INT64_MAX) / plan->cluster;
    return (uint32_t)(clusters < most ? clusters : most) * plan->cluster;
}

/* Of heads in pairs, whether the last ones' pieces are dealt out one by one, so that blocks end together.
 * These heads are read at the same time, by which wide ones lose more than they gain, unless rows are long
 * (on an H200, two pieces a block: head dim 64 +4%, 128 and 256 +2% from 4096 queries on and -1% at 2048). */
static bool wants_dealing(const fa_problem *p, const fa_cuda_plan *plan)
{
    const int64_t many = 32;
    if (fa_cuda_has_own_lengths(p)) return false;
    if (plan->bias_mapped) return false; /* the warp that deals loads the bias there */
    if (plan->cluster > 1 || plan->grid > FA_SM90_MOST_DEALERS) return false;
    return plan->tasks <= INT32_MAX && (p->d <= 64 || plan->tiles >= many);
}

/* So many heads: two pieces for each block. While they are dealt out there must be a pair to do for each
 * block; where there are too few, all heads' pieces are dealt out, in a way that takes no time. */
static int64_t count_mixed(const fa_problem *p, const fa_cuda_plan *plan)
{
    const int64_t heads = count_heads(p), blocks = plan->grid;
    if (!wants_dealing(p, plan)) return 0;
    const int64_t mixed = (2 * blocks + plan->tiles - 1) / plan->tiles;
    if ((heads - mixed) * count_pairs(plan) < blocks) return heads;
    return mixed * plan->tiles <= FA_SM90_MOST_DEALT / 2 * blocks ? mixed : 0;
}

/* Whether blocks draw their pieces: where rows are so short that memory bounds the rate, which it gives to
 * multiprocessors in unequal shares (on an H200, 8192 rows of 128 at head dim 128: the first block with its
 * equal share of the work ended after 196 us, the last after 290). */
static bool wants_drawing(const fa_problem *p, const fa_cuda_plan *plan, int options)
{
    const int64_t short_row = 256;
    if (options || plan->cluster > 1 || fa_cuda_has_own_lengths(p)) return false;
    if (may_pair(p) && plan->tiles > 1) return false;
    return p->n_k <= short_row && plan->tasks >= 4 * (int64_t)plan->grid && plan->tasks < INT32_MAX;
}

static bool plan_sm90(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                      char *why, size_t size)
{
    const int options = find_options(p, &plan->maps[3]);
    if (fa_cuda_refuse_dtypes(p, true, why, size) || refuse_sizes(p, why, size)) return false;
    const fa_variant *v = find_variant(p, options);
    if (!v) {
        fa_cuda_say(why, size, "the head dims are %" PRId64 " and %" PRId64, p->d, p->d_v);
        return false;
    }
    make_map_shapes(p, v, plan->maps);
    if (refuse_block_strides(p, why, size) || refuse_maps(plan->maps, why, size)) return false;
    if (!fa_cuda_plan_variant(v, count_smem(v), device, plan, why, size)) return false;
    plan->arithmetic = v->element == FA_ELEMENT_BFLOAT16 ? "bfloat16 products (wgmma), float32 sums"
                                                         : "float16 products (wgmma), float32 sums";
    plan->tile_k = v->keys;
    plan->bias_mapped = options & FA_SM90_BIAS;
    plan->threads = (uint32_t)FA_SM90_THREADS(v->consumers);
    fa_cuda_plan_tiles(p, count_queries(v), plan);
    plan->cluster = (uint32_t)v->cluster;
    plan->grid = count_blocks(p, device, plan);
    plan->drawn = wants_drawing(p, plan, options);
    return true;
}

static bool encode_maps(const fa_cuda_plan *plan, fa_cuda_encoder *encode, fa_sm90_params *params,
                        fa_cuda_fault *fault)
{
    fa_sm90_map *const to[] = {&params->q, &params->k, &params->v, &params->bias};
    for (int i = 0; i < (plan->bias_mapped ? 4 : 3); i++) {
        fa_tensor_map map;
        if (!encode(&map, &plan->maps[i], fault)) return false;
        memcpy(to[i], &map, sizeof map);
    }
    return true;
}

/* How blocks go through pieces, and what a task is then. */
static void set_order(const fa_problem *p, const fa_cuda_plan *plan, fa_sm90_params *params)
{
    const int64_t takers = plan->grid / plan->cluster; /* blocks, or clusters of them */
    params->order = FA_SM90_IN_ORDER;
    params->tasks = plan->tasks;
    params->mixed = 0;
    params->counter = -1; /* the launch may give it one */
    if (!may_pair(p) || plan->tiles == 1 || takers >= plan->tasks) return;
    params->order = FA_SM90_PAIRS;
    params->mixed = (int32_t)count_mixed(p, plan);
    params->tasks = (count_heads(p) - params->mixed) * count_pairs(plan);
}

bool fa_cuda_sm90_params(const fa_problem *p, const fa_cuda_plan *plan, fa_cuda_encoder *encode,
                         fa_sm90_params *params, fa_cuda_fault *fault)
{
    const fa_view bias = bias_rows(p);
    params->q_step = find_steps(&p->q);
    params->k_step = find_steps(&p->k);
    params->v_step = find_steps(&p->v);
    params->box_rows = (int32_t)plan->maps[2].box[1];
    set_order(p, plan, params);
    params->bias_step = find_steps(&bias);
    params->bias_mapped = plan->bias_mapped;
    return encode_maps(plan, encode, params, fault);
}

static bool launch_sm90(void *kernel, const fa_problem *p, const fa_cuda_plan *plan,
                        fa_cuda_fault *fault)
{
    fa_attention_params attention;
    fa_sm90_params params;
    fa_cuda_set_params(p, plan->tiles, plan->tasks, &attention);
    if (!fa_cuda_sm90_params(p, plan, fa_cuda_encode_map, &params, fault)) return false;
    if (plan->drawn) params.counter = fa_cuda_counter_of(p->stream, FA_SM90_COUNTERS);
    void *parameters[] = {&attention, &params};
    return fa_cuda_queue(kernel, p, plan, parameters, fault);
}

const fa_cuda_family fa_cuda_family_sm90 = {
    .name = "sm90",
    .oldest = 90,
    .newest = 90,
    .plan = plan_sm90,
    .launch = launch_sm90,
};
