/*
 * decode_latent_sm90: latent attention with many query heads on Hopper. Work tiles and parts are
 * those of decode_sm80.
 */
#include "cuda/plan_decode_latent_sm90.h"

#include <inttypes.h>

#include "cuda/counters.h"
#include "cuda/family.h"
#include "cuda/plan_decode.h"

/* ---- The launches ---------------------------------------------------------------------------- */

/* Rows of a box. With pages, this number divides a key tile and a page. */
static int32_t find_box_rows(const fa_problem *p, const fa_variant *v)
{
    int32_t rows = v->keys;
    if (!p->block_table) return rows;
    while (p->rows_k % rows) rows /= 2;
    return rows;
}

static void make_map_shape(const fa_problem *p, const fa_variant *v, fa_tensor_map_shape *map)
{
    fa_cuda_map_view(map, &p->k, p->d, p->rows_k, p->heads_kv, p->blocks_k, find_box_rows(p, v));
}

bool fa_cuda_map_latent_queries(const fa_problem *p, const fa_cuda_plan_launch *l,
                                fa_tensor_map_shape *map)
{
    const fa_view rows =
        fa_cuda_score_rows(&p->q); /* heads in place of rows, and the other way round */
    if (l->decode.queries > 1 && fa_cuda_is_broadcast(&rows, 2)) return false;
    fa_cuda_map_view(map, &rows, p->d, p->heads_q, p->rows_q, p->blocks_q, l->decode.heads);
    map->box[2] = (uint32_t)l->decode.queries;
    return fa_tensor_map_fits(map, NULL);
}

bool fa_cuda_decode_latent_sm90_params(const fa_problem *p, const fa_cuda_plan_launch *l,
                                       int32_t merged_rows, fa_cuda_encoder *encode,
                                       fa_decode_latent_sm90_params *params, fa_cuda_fault *fault)
{
    fa_tensor_map_shape maps[2];
    const fa_view rows = fa_cuda_score_rows(&p->q);
    make_map_shape(p, &fa_variants[l->variant], &maps[0]);
    params->q_step = fa_cuda_map_steps(&rows);
    params->k_step = fa_cuda_map_steps(&p->k);
    params->maps_queries = fa_cuda_map_latent_queries(p, l, &maps[1]);
    params->box_rows = (int32_t)maps[0].box[1];
    params->merged_rows = merged_rows;
    params->cluster = (int32_t)l->cluster;
    params->divisors = fa_cuda_decode_divisors(p, l);
    return fa_cuda_encode_maps(maps, (fa_sm90_map *const[]){&params->k, &params->q},
                               1 + params->maps_queries, encode, fault);
}

int32_t fa_cuda_merged_rows(const fa_cuda_plan_launch *l, uint32_t *grid)
{
    const int64_t rows = fa_variants[l->variant].group_rows;
    int64_t shares = l->decode.parts < rows ? l->decode.parts : rows;
    const int64_t merged = fa_cuda_count_tiles(rows, shares);
    shares = fa_cuda_count_tiles(rows, merged);
    *grid = fa_cuda_grid(l->tasks * shares);
    return (int32_t)merged;
}

bool fa_cuda_latent_merges(const fa_cuda_plan_launch *l, const fa_decode_params *params)
{
    enum { MERGED_ROWS = 64 }; /* of all parts: with 128, a second launch is 5 us faster */
    const int32_t parts = l->decode.parts, rows = params->heads * params->queries;
    if (parts == 1 || l->tasks > FA_DECODE_LATENT_SM90_COUNTERS) return false;
    if (rows < fa_variants[l->variant].group_rows) return parts * rows <= MERGED_ROWS;
    return parts == 2 && params->attention.out.vector == 8;
}

/* A second launch merges parts, unless the last block of each work tile does: then a counter tells a
 * block whether it is that. */
static bool queue_latent(void *kernel, const fa_cuda_plan *plan, const fa_cuda_plan_launch *l,
                         const fa_cuda_call *call, fa_cuda_fault *fault)
{
    fa_decode_params params;
    fa_decode_latent_sm90_params more;
    fa_cuda_plan_launch merging = *l;
    const int32_t merged_rows = fa_cuda_merged_rows(l, &merging.grid);
    fa_cuda_counter counters = {-1, NULL};
    void *parameters[] = {&params, &more};
    fa_cuda_set_decode_params(call->problem, l, FA_DECODE_STORE, 0, &params);
    if (!fa_cuda_decode_latent_sm90_params(call->problem, l, merged_rows, fa_cuda_encode_map, &more,
                                           fault))
        return false;
    if (fa_cuda_latent_merges(l, &params))
        counters = fa_cuda_counter_take(call->stream, FA_SM90_COUNTERS);
    if (counters.number >= 0 && counters.number < FA_DECODE_COUNTER_SETS) {
        params.step = FA_DECODE_LAST;
        params.counters = counters.number;
    }
    const bool fine = fa_cuda_queue(kernel, plan, l, call->stream, parameters, fault);
    fa_cuda_counter_release(counters, call->stream);
    if (!fine || l->decode.parts == 1 || params.step == FA_DECODE_LAST) return fine;
    params.step = FA_DECODE_MERGE;
    more.cluster = 1;
    merging.cluster = 1;
    return fa_cuda_queue(kernel, plan, &merging, call->stream, parameters, fault);
}

/* ---- The plan -------------------------------------------------------------------------------- */

static bool refuse_keys(const fa_problem *p, char *why, size_t size)
{
    if (fa_cuda_refuse_dtypes(p, true, why, size)) return true;
    const char *option = p->bias.data      ? "options.bias"
                         : p->mask.data    ? "options.mask"
                         : p->alibi_slopes ? "options.alibi_slopes"
                                           : NULL;
    if (option) {
        fa_cuda_say(why, size, "%s is set", option);
        return true;
    }
    if (!fa_cuda_is_latent(p)) {
        fa_cuda_say(why, size,
                    "v is not the first columns of k, at most 512 of 257 to 576 in 16 bits");
        return true;
    }
    if (p->block_table && p->rows_k % 8) {
        fa_cuda_say(why, size, "k.shape[1] is %" PRId64 ", not a multiple of 8 (rows of a page)",
                    p->rows_k);
        return true;
    }
    return false;
}

static const fa_variant *find_variant(const fa_problem *p)
{
    const fa_variant *v = &fa_variants[FA_FIRST_decode_latent_sm90];
    while (v->element != (fa_element)p->q.dtype) v++;
    return v;
}

/* Whether two blocks form a cluster and load key tiles for each other: neighbouring chunks of
 * heads, with so many keys that it outweighs the clusters' beginning and end (1.5 us of 29 with 128
 * keys a part). */
static bool may_share_loads(const fa_problem *p, const fa_cuda_plan_launch *l)
{
    enum { KEYS = 1024 };
    return l->decode.chunks % 2 == 0 && p->n_k >= KEYS * l->decode.parts;
}

static bool plan_latent(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                        char *why, size_t size)
{
    static const char *const names[] = {"k"};
    fa_tensor_map_shape map;
    if (refuse_keys(p, why, size) || fa_cuda_refuse_decode(p, INT64_MAX, why, size) ||
        fa_cuda_refuse_block_strides(p, why, size))
        return false;
    const fa_variant *v = find_variant(p);
    make_map_shape(p, v, &map);
    if (!fa_cuda_maps_fit(&map, names, 1, why, size)) return false;
    plan->arithmetic = v->element == FA_ELEMENT_BFLOAT16 ? "bfloat16 products (wgmma), float32 sums"
                                                         : "float16 products (wgmma), float32 sums";
    if (!fa_cuda_add_decode(p, v, FA_DECODE_LATENT_SM90_THREADS, queue_latent, device, plan, why,
                            size))
        return false;
    fa_cuda_plan_launch *l = &plan->launches[plan->count - 1];
    if (may_share_loads(p, l)) l->cluster = 2;
    l->overlaps = true;
    return true;
}

/* Other attention, and at most 16 rows a sequence without pages: decode_sm80 has them in one work
 * tile and reads 3,968 GB/s (128 sequences of 8k on an H200; here 3,595 in pages). That needs no
 * words. */
static bool is_slower(const fa_problem *p, const fa_cuda_device *device, char *why, size_t size)
{
    enum { ROWS = 16 };
    (void)device, (void)why, (void)size;
    if (!fa_cuda_is_latent(p)) return true;
    return !p->block_table && !p->cu_seqlens_q && p->n_q <= ROWS && p->heads_q * p->n_q <= ROWS;
}

const fa_cuda_family fa_cuda_decode_latent_sm90 = {
    .name = "latent_sm90",
    .oldest = 90,
    .newest = 90,
    .slower = is_slower,
    .plan = plan_latent,
};
