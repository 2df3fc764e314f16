#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cuda/family.h"
#include "cuda/passes.h"

/* The narrowest of a family, whose first variant is given, that both head dims fit into. */
static const fa_variant *find_variant(const fa_problem *p, int first)
{
    const int64_t dim = p->d > p->d_v ? p->d : p->d_v;
    const fa_variant *v = &fa_variants[first];
    while (v->head_dim < dim) v++; /* head dims end at 512, the widest variant's */
    return v;
}

static const fa_variant *dq_variant(const fa_problem *p)
{
    return find_variant(p, FA_FIRST_backward_dq_simt);
}

static const fa_variant *dkv_variant(const fa_problem *p)
{
    return find_variant(p, FA_FIRST_backward_dkv_simt);
}

static int64_t tiles_of(int64_t extent, int64_t tile) { return (extent + tile - 1) / tile; }

/* Sets a step's variant, or says why this device has none. */
static bool set_step(fa_cuda_step *step, const fa_variant *v, int threads, int smem_bytes,
                     const fa_cuda_device *device, char *why, size_t size)
{
    fa_cuda_plan plan;
    if (!fa_cuda_plan_variant(v, smem_bytes, device, &plan, why, size)) return false;
    *step = (fa_cuda_step){.variant = plan.variant,
                           .device = plan.device,
                           .threads = (uint32_t)threads,
                           .smem_bytes = plan.smem_bytes};
    return true;
}

static void set_tasks(fa_cuda_step *step, int64_t tiles, int64_t tasks)
{
    step->tiles = tiles;
    step->tasks = tasks;
    step->grid = fa_cuda_grid(tasks);
}

/* Tiles of queries of all heads, see kernels/common/sequence.cuh. */
static void set_query_tasks(fa_cuda_step *step, const fa_problem *p, int tile)
{
    const int64_t tiles =
        p->cu_seqlens_q ? p->rows_q / tile + p->batch + 2 : tiles_of(p->rows_q, tile);
    set_tasks(step, tiles, tiles * p->heads_q * (p->cu_seqlens_q ? 1 : p->batch));
}

/* Tiles of keys of all key/value heads; paged: of the rows of every page. */
static void set_key_tasks(fa_cuda_step *step, const fa_problem *p, int tile)
{
    int64_t tiles = tiles_of(p->rows_k, tile), outer = p->batch;
    if (p->cu_seqlens_k) tiles = p->rows_k / tile + p->batch + 2, outer = 1;
    if (p->block_table) tiles *= p->blocks_k, outer = 1;
    set_tasks(step, tiles, tiles * p->heads_kv * outer);
}

static const fa_variant *const dbias_variant = &fa_variants[FA_VARIANT_backward_dbias_simt];

static void set_bias_tasks(fa_cuda_step *step, const fa_problem *p)
{
    const int64_t *n = p->dbias_shape;
    const int64_t tiles = tiles_of(n[2], dbias_variant->own) * tiles_of(n[3], FA_PASS_OTHERS);
    set_tasks(step, tiles, tiles * n[0] * n[1]);
}

static bool plan_backward(const fa_problem *p, const fa_cuda_device *device, fa_cuda_passes *passes,
                          char *why, size_t size)
{
    const fa_variant *dq = dq_variant(p), *dkv = dkv_variant(p);
    fa_cuda_step *s = passes->steps;
    if (!set_step(&s[FA_STEP_DELTA], &fa_variants[FA_VARIANT_backward_delta], FA_PASS_THREADS, 0,
                  device, why, size) ||
        !set_step(&s[FA_STEP_DQ], dq, FA_PASS_THREADS, FA_PASS_SMEM(dq->own), device, why, size) ||
        !set_step(&s[FA_STEP_DKV], dkv, FA_PASS_THREADS, FA_PASS_SMEM(dkv->own), device, why,
                  size) ||
        !set_step(&s[FA_STEP_DBIAS], dbias_variant, FA_PASS_THREADS,
                  FA_PASS_SMEM(dbias_variant->own), device, why, size) ||
        !set_step(&s[FA_STEP_DSINKS], &fa_variants[FA_VARIANT_backward_dsinks], FA_DSINKS_THREADS,
                  FA_DSINKS_SMEM, device, why, size))
        return false;
    set_query_tasks(&s[FA_STEP_DELTA], p, FA_DELTA_ROWS);
    set_query_tasks(&s[FA_STEP_DQ], p, dq->own);
    set_key_tasks(&s[FA_STEP_DKV], p, dkv->own);
    set_bias_tasks(&s[FA_STEP_DBIAS], p);
    set_tasks(&s[FA_STEP_DSINKS], 1, p->heads_q);
    passes->workspace_bytes = (size_t)(p->blocks_q * p->heads_q * p->rows_q) * sizeof(float);
    return true;
}

static bool plan_weights(const fa_problem *p, const fa_cuda_device *device, fa_cuda_passes *passes,
                         char *why, size_t size)
{
    fa_cuda_step *s = &passes->steps[FA_STEP_WEIGHTS];
    const fa_variant *v = &fa_variants[FA_VARIANT_weights_simt];
    const int64_t tiles = tiles_of(p->num_weight_rows, v->own);
    if (!set_step(s, v, FA_PASS_THREADS, FA_WEIGHTS_SMEM(v->own), device, why, size)) return false;
    set_tasks(s, tiles, p->n_k > 0 ? tiles * p->heads_q * p->batch : 0);
    return true;
}

bool fa_cuda_has_passes(const fa_problem *p)
{
    return p->pass == FA_PASS_BACKWARD || p->pass == FA_PASS_WEIGHTS;
}

bool fa_cuda_passes_make(const fa_problem *p, const fa_cuda_device *device, fa_cuda_passes *passes,
                         char *why, size_t size)
{
    memset(passes, 0, sizeof *passes);
    for (int i = 0; i < FA_CUDA_STEPS; i++) passes->steps[i].variant = FA_NO_VARIANT;
    return (p->pass == FA_PASS_BACKWARD ? plan_backward : plan_weights)(p, device, passes, why,
                                                                        size);
}

void fa_cuda_passes_describe(const fa_problem *p, const fa_cuda_device *device,
                             const fa_cuda_passes *passes, char *text, size_t size)
{
    const fa_cuda_step *s = passes->steps, *weights = &s[FA_STEP_WEIGHTS];
    if (p->pass == FA_PASS_WEIGHTS)
        snprintf(text, size,
                 "cuda weights %s: float32 sums on FMA units, row tile %d, key tile %d, %" PRIu32
                 " blocks of %" PRIu32 " threads on sm_%d%d",
                 fa_variants[weights->variant].name, fa_variants[weights->variant].own,
                 FA_PASS_OTHERS, weights->grid, weights->threads, (int)device->major,
                 (int)device->minor);
    else
        snprintf(text, size,
                 "cuda backward %s and %s: float32 sums on FMA units, query tiles %d and %d, key "
                 "tiles %d and %d, deterministic, %" PRIu32 " and %" PRIu32 " blocks on sm_%d%d",
                 fa_variants[s[FA_STEP_DQ].variant].name, fa_variants[s[FA_STEP_DKV].variant].name,
                 dq_variant(p)->own, FA_PASS_OTHERS, FA_PASS_OTHERS, dkv_variant(p)->own,
                 s[FA_STEP_DQ].grid, s[FA_STEP_DKV].grid, (int)device->major, (int)device->minor);
}

bool fa_cuda_step_runs(const fa_problem *p, const fa_cuda_passes *passes, int step)
{
    const bool keys = p->dk.data || p->dv.data;
    if (passes->steps[step].tasks == 0) return false;
    switch (step) {
    case FA_STEP_DELTA: return p->dq.data || keys || p->dbias.data || p->dsinks;
    case FA_STEP_DQ: return p->dq.data;
    case FA_STEP_DKV: return keys;
    case FA_STEP_DBIAS: return p->dbias.data;
    case FA_STEP_DSINKS: return p->dsinks;
    default: return p->weights.data;
    }
}

/* Each launch but the first takes what the one before has left as one of its parts: from out and lse,
 * if those keep sums unrounded, else from workspace. */
bool fa_cuda_combine_make(const fa_combine_problem *c, const fa_cuda_device *device,
                          fa_cuda_combining *how, char *why, size_t size)
{
    const bool few = c->num_parts <= FA_COMBINE_FEW;
    const int64_t rows = c->batch * c->heads * c->n_q, tiles = tiles_of(rows, FA_COMBINE_ROWS);
    const fa_variant *v = &fa_variants[few ? FA_VARIANT_combine_few : FA_VARIANT_combine_many];
    how->most = v->max_parts;
    how->workspace_bytes = 0;
    if (c->num_parts > how->most && (c->out.dtype != FA_FLOAT32 || !c->lse))
        how->workspace_bytes = (size_t)rows * (size_t)(c->d_v + 1) * sizeof(float);
    if (!set_step(&how->step, v, FA_PASS_THREADS, 0, device, why, size)) return false;
    set_tasks(&how->step, tiles, tiles);
    return true;
}
