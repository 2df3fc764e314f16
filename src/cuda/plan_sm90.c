/*
 * forward_sm90: Hopper's tensor cores (wgmma) and copy engine (TMA), float16 and bfloat16.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "../../kernels/forward_sm90.h"
#include "cuda/backend.h"
#include "cuda/family.h"

typedef struct shape {
    const char *image[2]; /* [bfloat16] */
    int dim, dim_v, queries, keys, threads, smem_bytes;
    bool general, sums;
    /* Without a causal mask and with so many keys, at least; 0: for all problems. */
    int64_t least_k;
} shape;

#define SIZES(name) SIZES_AS(name, 0)
#define SUMS(name) SIZES_AS(name, 1), .sums = true
#define SIZES_AS(name, sums_too)                                                                   \
    .image = {"forward_sm90_" #name "_f16", "forward_sm90_" #name "_bf16"},                        \
    .dim = FA_SM90_DIM(name), .dim_v = FA_SM90_DIM_V(name), .queries = FA_SM90_QUERIES(name),      \
    .keys = FA_SM90_KEYS(name), .threads = FA_SM90_THREADS(name),                                  \
    .smem_bytes = FA_SM90_SMEM(name, sums_too)

/* The first that fits is taken. Short rows waste less in smaller tiles. */
static const shape shapes[] = {
    {SUMS(d64_sums)},
    {SIZES(d64)},
    {SIZES(d80)},
    {SIZES(d96)},
    {SUMS(d128_sums)},
    {SIZES(d128), .least_k = 8192},
    {SIZES(d128_short)},
    {SIZES(d192_128)},
    {SIZES(d192)},
    {SIZES(d256)},
    {SIZES(general64), .general = true},
    {SIZES(general128), .general = true},
    {SIZES(general256), .general = true},
};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

/* The kernel counts rows and keys of a sequence in 32 bits, with room for a tile and a mask's edge. */
static const int64_t most_rows = (1 << 30) - 4096;

/* Whether scores or weights need more than a scale and masks by position. The plain kernel takes the
 * largest score for the largest logit, which a scale below 0 would turn round. */
static bool is_general(const fa_problem *p) { return fa_cuda_changes_scores(p) || !(p->scale > 0); }

/* The keys of a packed batch are more than those of its sequences. */
static bool has_long_rows(const fa_problem *p, int64_t least_k)
{
    return !p->causal && p->n_k >= least_k && !p->cu_seqlens_k;
}

static bool takes(const shape *s, const fa_problem *p)
{
    if (p->d > s->dim || p->d_v > s->dim_v || s->general != is_general(p)) return false;
    if (s->sums && p->lse) return false; /* their sums are not exact enough */
    return !s->least_k || has_long_rows(p, s->least_k);
}

static const shape *find_shape(const fa_problem *p)
{
    for (int i = 0; i < SHAPES; i++)
        if (takes(&shapes[i], p)) return &shapes[i];
    return NULL;
}

/* ---- Maps ------------------------------------------------------------------------------------ */

/* Rows of keys or values that are loaded at once: a tile; of pages, what divides tile, page and the
 * place of a piece's first key. */
static int32_t find_box(const fa_problem *p, int keys)
{
    int32_t box = FA_SM90_ALIGN;
    if (!p->block_table) return keys;
    while (p->rows_k % box || keys % box) box /= 2;
    return box;
}

/* A stride of 0 cannot be mapped; the axis then has one index. */
static bool is_broadcast(const fa_view *v, int axis) { return v->stride[axis] == 0; }

static fa_sm90_steps find_steps(const fa_view *v)
{
    return (fa_sm90_steps){.head = !is_broadcast(v, 2), .block = !is_broadcast(v, 0)};
}

static fa_tensor_map_shape map_shape(const fa_view *v, int64_t d, int64_t rows, int64_t heads,
                                     int64_t blocks, int32_t box_rows)
{
    const int64_t extent[] = {d, rows, is_broadcast(v, 2) ? 1 : heads,
                              is_broadcast(v, 0) ? 1 : blocks};
    const int axis[] = {3, 1, 2, 0};
    fa_tensor_map_shape m = {.base = v->data, .bfloat = v->dtype == FA_BFLOAT16, .axes = 4};
    for (int i = 0; i < 4; i++) {
        m.extent[i] = (uint64_t)extent[i];
        m.stride[i] = (uint64_t)(v->stride[axis[i]] * 2);
        m.box[i] = 1;
    }
    m.box[0] = 64;
    m.box[1] = (uint32_t)box_rows;
    return m;
}

static void make_map_shapes(const fa_problem *p, int keys, fa_tensor_map_shape maps[3])
{
    const int32_t box = find_box(p, keys);
    maps[0] = map_shape(&p->q, p->d, p->rows_q, p->heads_q, p->blocks_q, 64);
    maps[1] = map_shape(&p->k, p->d, p->rows_k, p->heads_kv, p->blocks_k, box);
    maps[2] = map_shape(&p->v, p->d_v, p->rows_k, p->heads_kv, p->blocks_k, box);
}

/* ---- The plan -------------------------------------------------------------------------------- */

static bool refuse_sizes(const fa_problem *p, char *why, size_t size)
{
    if (fa_cuda_refuse_rows(p, most_rows, why, size)) return true;
    if (p->block_table && p->rows_k % 8) {
        snprintf(why, size, "k.shape[1] is %" PRId64 ", no multiple of 8 rows a page", p->rows_k);
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
        snprintf(why, size, "%s.stride[0] is %" PRId64 ", not made of whole 16 bytes",
                 tensors[i].name, stride);
        return true;
    }
    return false;
}

static bool refuse_maps(const fa_problem *p, int keys, char *why, size_t size)
{
    static const char *const names[] = {"q", "k", "v"};
    fa_tensor_map_shape maps[3];
    make_map_shapes(p, keys, maps);
    for (int i = 0; i < 3; i++) {
        const char *reason;
        if (fa_tensor_map_fits(&maps[i], &reason)) continue;
        snprintf(why, size, "%s: %s", names[i], reason);
        return true;
    }
    return false;
}

/* Under a causal mask a head's pieces are done in pairs of the same length; where lengths are known to
 * the device alone, blocks are as many as pieces, so that the hardware deals them out. */
static bool has_pairs(const fa_problem *p) { return p->causal && !p->cu_seqlens_q; }

static bool has_own_lengths(const fa_problem *p)
{
    return p->cu_seqlens_q || p->cu_seqlens_k || p->seqlens_q || p->seqlens_k;
}

static int64_t count_tasks(const fa_problem *p, const fa_cuda_plan *plan)
{
    if (!has_pairs(p) || plan->tiles == 0) return plan->tasks;
    return plan->tasks / plan->tiles * ((plan->tiles + 1) / 2);
}

static bool plan_sm90(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                      char *why, size_t size)
{
    if (fa_cuda_refuse_dtypes(p, true, why, size) || refuse_sizes(p, why, size)) return false;
    const shape *s = find_shape(p);
    if (!s) {
        snprintf(why, size, "the head dims are %" PRId64 " and %" PRId64, p->d, p->d_v);
        return false;
    }
    if (refuse_block_strides(p, why, size) || refuse_maps(p, s->keys, why, size)) return false;
    const bool bfloat = p->q.dtype == FA_BFLOAT16;
    if (!fa_cuda_plan_image(s->image[bfloat], s->smem_bytes, device, plan, why, size)) return false;
    plan->arithmetic = bfloat ? "bfloat16 products (wgmma), float32 sums"
                              : "float16 products (wgmma), float32 sums";
    plan->tile_k = s->keys;
    plan->threads = (uint32_t)s->threads;
    fa_cuda_plan_tiles(p, s->queries, plan);
    const int64_t tasks = count_tasks(p, plan);
    if (tasks < plan->grid) plan->grid = (uint32_t)tasks;
    if (!has_own_lengths(p) && plan->grid > (uint32_t)device->multiprocessors)
        plan->grid = (uint32_t)device->multiprocessors;
    return true;
}

static bool encode_maps(const fa_problem *p, int keys, fa_sm90_params *params, fa_cuda_fault *fault)
{
    fa_sm90_map *const to[] = {&params->q, &params->k, &params->v};
    fa_tensor_map_shape maps[3];
    make_map_shapes(p, keys, maps);
    for (int i = 0; i < 3; i++) {
        fa_tensor_map map;
        if (!fa_cuda_encode_map(&map, &maps[i], fault)) return false;
        memcpy(to[i], &map, sizeof map);
    }
    return true;
}

static bool launch_sm90(void *kernel, const fa_problem *p, const fa_cuda_plan *plan,
                        fa_cuda_fault *fault)
{
    fa_attention_params attention = fa_cuda_attention_params(p, plan);
    fa_sm90_params params = {.q_step = find_steps(&p->q),
                             .k_step = find_steps(&p->k),
                             .v_step = find_steps(&p->v),
                             .box_rows = find_box(p, plan->tile_k),
                             .pairs = has_pairs(p),
                             .tasks = count_tasks(p, plan)};
    if (!encode_maps(p, plan->tile_k, &params, fault)) return false;
    void *parameters[] = {&attention, &params};
    const fa_cuda_launch launch = {.grid = {plan->grid, 1, 1},
                                   .threads = plan->threads,
                                   .smem_bytes = plan->smem_bytes,
                                   .stream = p->stream};
    return fa_cuda_launch_kernel(kernel, &launch, parameters, fault);
}

const fa_cuda_family fa_cuda_family_sm90 = {
    .name = "sm90",
    .oldest = 90,
    .newest = 90,
    .plan = plan_sm90,
    .launch = launch_sm90,
};
