/*
 * decode_sm90: few queries over many keys on Hopper, by wgmma and TMA. Work tiles and parts are
 * those of decode_sm80.
 */
#include "cuda/plan_decode_sm90.h"

#include <inttypes.h>

#include "cuda/family.h"
#include "cuda/plan_decode.h"
#include "mask.h"

/* ---- The launch ------------------------------------------------------------------------------ */

/* Rows of a box. With pages, this number divides a key tile and a page. */
static int32_t find_box_rows(const fa_problem *p, const fa_variant *v)
{
    int32_t rows = v->keys;
    if (!p->block_table) return rows;
    while (p->rows_k % rows) rows /= 2;
    return rows;
}

enum { MAPS = 2 }; /* k and v */

static void make_map_shapes(const fa_problem *p, const fa_variant *v,
                            fa_tensor_map_shape maps[MAPS])
{
    const int32_t rows = find_box_rows(p, v);
    fa_cuda_map_view(&maps[0], &p->k, p->d, p->rows_k, p->heads_kv, p->blocks_k, rows);
    fa_cuda_map_view(&maps[1], &p->v, p->d_v, p->rows_k, p->heads_kv, p->blocks_k, rows);
}

/* The keys that all work tiles see, and their parts, as describe_work in kernels/decode_sm80/work.cuh finds them. */
static fa_decode_common find_common(const fa_problem *p, const fa_cuda_plan_launch *l)
{
    const fa_decode_common none = {0};
    const fa_variant *v = &fa_variants[l->variant];
    if (v->cache || v->copied || l->tiles != 1 || fa_cuda_has_own_lengths(p) || p->batch == 0 ||
        p->n_q == 0 || p->blocks_k == 0)
        return none;
    const fa_sequence s = fa_problem_sequence(p, 0);
    const fa_range first = fa_visible(p, &s, 0), last = fa_visible(p, &s, p->n_q - 1);
    if (last.hi <= first.lo) return none;
    fa_decode_common c = {.from = (int32_t)first.lo,
                          .to = (int32_t)last.hi,
                          .all_from = (int32_t)last.lo,
                          .all_to = (int32_t)first.hi};
    c.start = c.from / v->keys * v->keys;
    c.tiles = (int32_t)fa_cuda_count_tiles(c.to - c.start, v->keys);
    c.per_part = (int32_t)fa_cuda_count_tiles(c.tiles, l->decode.parts);
    if (c.per_part < l->decode.least) c.per_part = l->decode.least;
    c.parts = (int32_t)fa_cuda_count_tiles(c.tiles, c.per_part);
    return c;
}

bool fa_cuda_decode_sm90_params(const fa_problem *p, const fa_cuda_plan_launch *l,
                                fa_cuda_encoder *encode, fa_decode_sm90_params *params,
                                fa_cuda_fault *fault)
{
    const fa_variant *v = &fa_variants[l->variant];
    fa_tensor_map_shape maps[MAPS];
    make_map_shapes(p, v, maps);
    params->k_step = fa_cuda_map_steps(&p->k);
    params->v_step = fa_cuda_map_steps(&p->v);
    params->box_rows = (int32_t)maps[0].box[1];
    for (params->box_shift = 0; 1 << params->box_shift < params->box_rows;) params->box_shift++;
    params->stages = l->decode.stages;
    params->divisors = fa_cuda_decode_divisors(p, l);
    params->common = find_common(p, l);
    params->alone = l->decode.alone;
    if (v->copied) return true;
    return fa_cuda_encode_maps(maps, (fa_sm90_map *const[]){&params->k, &params->v}, MAPS, encode,
                               fault);
}

static bool queue_sm90(void *kernel, const fa_cuda_plan *plan, const fa_cuda_plan_launch *l,
                       const fa_cuda_call *call, fa_cuda_fault *fault)
{
    fa_decode_sm90_params more;
    return fa_cuda_decode_sm90_params(call->problem, l, fa_cuda_encode_map, &more, fault) &&
           fa_cuda_queue_decode(kernel, plan, l, call, &more, fault);
}

/* ---- The plan -------------------------------------------------------------------------------- */

/* by_tma: whether there are no kernels that copy rows. */
static bool refuse_pages(const fa_problem *p, bool by_tma, char *why, size_t size)
{
    if (!fa_cuda_has_small_pages(p)) return false;
    if (by_tma) {
        fa_cuda_say(why, size,
                    "k.shape[1] is %" PRId64 ": expected pages of a multiple of 8 rows, 16 or more",
                    p->rows_k);
        return true;
    }
    if (fa_cuda_has_copied_columns(p)) return false;
    fa_cuda_say(why, size,
                "the head dims are %" PRId64 " and %" PRId64 ": with pages of %" PRId64
                " rows, expected multiples of 8",
                p->d, p->d_v, p->rows_k);
    return true;
}

static bool refuse_cache(const fa_problem *p, char *why, size_t size)
{
    const int64_t dim = p->d > p->d_v ? p->d : p->d_v;
    const char *option = p->bias.data      ? "options.bias"
                         : p->mask.data    ? "options.mask"
                         : p->alibi_slopes ? "options.alibi_slopes"
                                           : NULL;
    if (!fa_cuda_has_8bit_cache(p) && fa_cuda_refuse_dtypes(p, true, why, size)) return true;
    if (option) {
        fa_cuda_say(why, size, "%s is set", option);
        return true;
    }
    if (dim > 256) {
        fa_cuda_say(why, size, "the head dim is %" PRId64 ", above 256", dim);
        return true;
    }
    return false;
}

/* The largest number of rows with 8-bit caches, for head dims to 128 and for larger ones. With more rows,
 * a thread's sums do not fit into its registers. */
enum { MOST_ROWS_8BIT = 16, MOST_ROWS_8BIT_WIDE = 8 };

static bool refuse_rows(const fa_problem *p, char *why, size_t size)
{
    const bool wide = p->d > 128 || p->d_v > 128;
    const int64_t rows = fa_cuda_count_decode_rows(p);
    const int most = wide ? MOST_ROWS_8BIT_WIDE : MOST_ROWS_8BIT;
    if (!fa_cuda_has_8bit_cache(p) || rows <= most) return false;
    fa_cuda_say(why, size,
                "%" PRId64 " query heads and queries share keys of %s: expected at most %d%s", rows,
                fa_dtype_name(p->k.dtype), most, wide ? " with a head dim above 128" : "");
    return true;
}

/* Whether TMA can load keys and values. */
static bool has_maps(const fa_problem *p, const fa_variant *v, char *why, size_t size)
{
    static const char *const names[] = {"k", "v"};
    fa_tensor_map_shape maps[MAPS];
    make_map_shapes(p, v, maps);
    return fa_cuda_maps_fit(maps, names, MAPS, why, size);
}

static const char *arithmetic_of(const fa_variant *v)
{
    if (v->cache) return FA_DECODE_ARITHMETIC_8BIT;
    return v->element == FA_ELEMENT_BFLOAT16 ? "bfloat16 products (wgmma), float32 sums"
                                             : "float16 products (wgmma), float32 sums";
}

static bool plan_sm90(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                      char *why, size_t size)
{
    if (refuse_cache(p, why, size) || refuse_pages(p, fa_cuda_has_8bit_cache(p), why, size) ||
        fa_cuda_refuse_decode(p, fa_cuda_most_decode_sm90_rows(p, device), why, size) ||
        refuse_rows(p, why, size) || fa_cuda_refuse_block_strides(p, why, size))
        return false;
    const fa_variant *v = fa_cuda_find_decode_sm90(p);
    if (!has_maps(p, v, why, size)) return false;
    plan->arithmetic = arithmetic_of(v);
    if (!fa_cuda_add_decode(p, v, FA_DECODE_SM90_THREADS(v->copied), queue_sm90, device, plan, why,
                            size))
        return false;
    plan->launches[plan->count - 1].overlaps = true;
    return true;
}

/* ---- The few queries of a mixed batch -------------------------------------------------------- */

static const fa_variant *find_persistent(const fa_problem *p, char *why, size_t size)
{
    const int64_t dim = p->d > p->d_v ? p->d : p->d_v, group = p->heads_q / p->heads_kv;
    for (int i = FA_FIRST_decode_sm90_persistent; i < FA_END_decode_sm90_persistent; i++) {
        const fa_variant *v = &fa_variants[i];
        if (v->element == (fa_element)p->q.dtype && dim <= v->head_dim && group <= v->group_rows)
            return v;
    }
    fa_cuda_say(why, size,
                "the head dim is %" PRId64 ", and %" PRId64 " query heads share keys: no kernel of "
                "persistent blocks is compiled for that",
                dim, group);
    return NULL;
}

bool fa_cuda_add_few_sm90(const fa_problem *p, int32_t blocks, const fa_cuda_device *device,
                          fa_cuda_plan *plan, char *why, size_t size)
{
    if (fa_cuda_refuse_dtypes(p, true, why, size) || refuse_cache(p, why, size) ||
        refuse_pages(p, true, why, size) || fa_cuda_refuse_block_strides(p, why, size))
        return false;
    const fa_variant *v = find_persistent(p, why, size);
    if (!v || !has_maps(p, v, why, size)) return false;
    plan->arithmetic = arithmetic_of(v);
    if (!fa_cuda_add_few_by(p, v, FA_DECODE_SM90_PERSISTENT_THREADS(v->groups), blocks, queue_sm90,
                            device, plan, why, size))
        return false;
    plan->launches[plan->count - 1].overlaps = true;
    return true;
}

const fa_cuda_family fa_cuda_decode_sm90 = {
    .name = "decode_sm90",
    .oldest = 90,
    .newest = 90,
    .slower = fa_cuda_is_decode_sm90_slower,
    .without_workspace = &fa_cuda_forward_sm90,
    .plan = plan_sm90,
};
