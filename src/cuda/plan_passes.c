#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cuda/family.h"
#include "cuda/passes.h"

/* The images of backward's two kernels that know the head dim, narrowest first. */
#define SHAPE(dim)                                                                                 \
    {                                                                                              \
        dim, "backward_dq_simt_d" #dim, FA_DQ_OWN(dim), "backward_dkv_simt_d" #dim,                \
            FA_DKV_OWN(dim)                                                                        \
    }
static const struct shape {
    int dim;
    const char *dq;
    int queries;
    const char *dkv;
    int keys;
} shapes[] = {SHAPE(64), SHAPE(128), SHAPE(256), SHAPE(512)};

static const struct shape *find_shape(const fa_problem *p)
{
    const int64_t dim = p->d > p->d_v ? p->d : p->d_v;
    size_t i = 0;
    while (shapes[i].dim < dim) i++; /* head dims end at 512 */
    return &shapes[i];
}

static int64_t tiles_of(int64_t extent, int64_t tile) { return (extent + tile - 1) / tile; }

/* Names a step's kernel, or says why this device has none. */
static bool set_step(fa_cuda_step *step, const char *image, int threads, int smem_bytes,
                     const fa_cuda_device *device, char *why, size_t size)
{
    fa_cuda_plan plan;
    if (!fa_cuda_plan_image(image, smem_bytes, device, &plan, why, size)) return false;
    *step = (fa_cuda_step){.image = plan.image,
                           .entry = plan.entry,
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

static void set_bias_tasks(fa_cuda_step *step, const fa_problem *p)
{
    const int64_t *n = p->dbias_shape;
    const int64_t tiles = tiles_of(n[2], FA_PASS_OWN) * tiles_of(n[3], FA_PASS_OTHERS);
    set_tasks(step, tiles, tiles * n[0] * n[1]);
}

static bool plan_backward(const fa_problem *p, const fa_cuda_device *device, fa_cuda_passes *passes,
                          char *why, size_t size)
{
    const struct shape *shape = find_shape(p);
    fa_cuda_step *s = passes->steps;
    if (!set_step(&s[FA_STEP_DELTA], "backward_delta", FA_PASS_THREADS, 0, device, why, size) ||
        !set_step(&s[FA_STEP_DQ], shape->dq, FA_PASS_THREADS, FA_PASS_SMEM(shape->queries), device,
                  why, size) ||
        !set_step(&s[FA_STEP_DKV], shape->dkv, FA_PASS_THREADS, FA_PASS_SMEM(shape->keys), device,
                  why, size) ||
        !set_step(&s[FA_STEP_DBIAS], "backward_dbias_simt", FA_PASS_THREADS,
                  FA_PASS_SMEM(FA_PASS_OWN), device, why, size) ||
        !set_step(&s[FA_STEP_DSINKS], "backward_dsinks", FA_DSINKS_THREADS, FA_DSINKS_SMEM, device,
                  why, size))
        return false;
    set_query_tasks(&s[FA_STEP_DELTA], p, FA_DELTA_ROWS);
    set_query_tasks(&s[FA_STEP_DQ], p, shape->queries);
    set_key_tasks(&s[FA_STEP_DKV], p, shape->keys);
    set_bias_tasks(&s[FA_STEP_DBIAS], p);
    set_tasks(&s[FA_STEP_DSINKS], 1, p->heads_q);
    passes->workspace_bytes = (size_t)(p->blocks_q * p->heads_q * p->rows_q) * sizeof(float);
    return true;
}

static bool plan_weights(const fa_problem *p, const fa_cuda_device *device, fa_cuda_passes *passes,
                         char *why, size_t size)
{
    fa_cuda_step *s = &passes->steps[FA_STEP_WEIGHTS];
    const int64_t tiles = tiles_of(p->num_weight_rows, FA_PASS_OWN);
    if (!set_step(s, "weights_simt", FA_PASS_THREADS, FA_WEIGHTS_SMEM, device, why, size))
        return false;
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
    return (p->pass == FA_PASS_BACKWARD ? plan_backward : plan_weights)(p, device, passes, why,
                                                                        size);
}

void fa_cuda_passes_describe(const fa_problem *p, const fa_cuda_device *device,
                             const fa_cuda_passes *passes, char *text, size_t size)
{
    const fa_cuda_step *s = passes->steps;
    if (p->pass == FA_PASS_WEIGHTS)
        snprintf(text, size,
                 "cuda weights %s: float32 sums on FMA units, row tile %d, key tile %d, %" PRIu32
                 " blocks of %" PRIu32 " threads on sm_%d%d",
                 s[FA_STEP_WEIGHTS].image, FA_PASS_OWN, FA_PASS_OTHERS, s[FA_STEP_WEIGHTS].grid,
                 s[FA_STEP_WEIGHTS].threads, (int)device->major, (int)device->minor);
    else
        snprintf(text, size,
                 "cuda backward %s and %s: float32 sums on FMA units, query tiles %d and %d, key "
                 "tiles %d and %d, deterministic, %" PRIu32 " and %" PRIu32 " blocks on sm_%d%d",
                 s[FA_STEP_DQ].image, s[FA_STEP_DKV].image, find_shape(p)->queries, FA_PASS_OTHERS,
                 FA_PASS_OTHERS, find_shape(p)->keys, s[FA_STEP_DQ].grid, s[FA_STEP_DKV].grid,
                 (int)device->major, (int)device->minor);
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
    how->most = few ? FA_COMBINE_FEW : FA_COMBINE_MANY;
    how->workspace_bytes = 0;
    if (c->num_parts > how->most && (c->out.dtype != FA_FLOAT32 || !c->lse))
        how->workspace_bytes = (size_t)rows * (size_t)(c->d_v + 1) * sizeof(float);
    if (!set_step(&how->step, few ? "combine_few" : "combine_many", FA_PASS_THREADS, 0, device, why,
                  size))
        return false;
    set_tasks(&how->step, tiles, tiles);
    return true;
}
