/* backward_simt: every gradient, in float32 on the FMA units of any GPU, in up to five launches. */
#include "cuda/plan_backward.h"
#include "mask.h"

#include <inttypes.h>
#include <string.h>

#include "cuda/family.h"
#include "cuda/parameters.h"

/* ---- The launches ---------------------------------------------------------------------------- */

/* dbias, contiguous, as float32 sums in the workspace. */
fa_view fa_cuda_dbias_sums(const fa_problem *p, size_t offset)
{
    const int64_t *n = p->dbias_shape;
    const int64_t matrix = n[2] * n[3];
    return (fa_view){.data = (char *)p->workspace + offset,
                     .stride = {n[0] > 1 ? n[1] * matrix : 0, n[1] > 1 ? matrix : 0, n[3], 1},
                     .dtype = FA_FLOAT32};
}

static fa_kernel_view view_sums(const fa_problem *p, size_t offset)
{
    const fa_view v = fa_cuda_dbias_sums(p, offset);
    return fa_cuda_view(&v, 0);
}

static void set_dbias(const fa_problem *p, const fa_cuda_plan_launch *l, fa_backward_params *params)
{
    memcpy(params->dbias_shape, p->dbias_shape, sizeof params->dbias_shape);
    params->dbias_by_others = l->dbias != FA_CUDA_DBIAS_ALONE;
    if (l->dbias == FA_CUDA_DBIAS_ADDED) params->dbias_sums = params->dbias;
    if (l->dbias == FA_CUDA_DBIAS_SUMMED) params->dbias_sums = view_sums(p, l->dbias_sums_offset);
}

int fa_cuda_count_splits(const fa_problem *p, int64_t tasks, int64_t room)
{
    const int64_t group = p->heads_kv > 0 ? p->heads_q / p->heads_kv : 1;
    const int64_t rounds = (tasks + room - 1) / room;
    const bool full = tasks * 10 >= rounds * room * 9;
    const int64_t wanted = p->causal ? 6 * room : full ? tasks : 4 * room;
    if (tasks == 0 || p->batch_invariant) return 1;
    int64_t splits = 1;
    for (int64_t i = 2; i <= group / 2 && i <= FA_CUDA_MOST_SPLITS && tasks * splits < wanted; i++)
        if (group % i == 0) splits = i;
    return (int)splits;
}

bool fa_cuda_shrinks(const fa_problem *p) { return p->causal && p->window_left < 0; }

int64_t fa_cuda_count_heads_of_rounds(const fa_cuda_plan_launch *l, int64_t at_once, int percent)
{
    const int64_t heads = l->tasks / l->tiles;
    const int64_t wanted = (percent * at_once / 100 + l->tiles / 2) / l->tiles;
    return wanted < 1 ? 1 : wanted < heads ? wanted : heads;
}

/* The blocks by which the last group falls short of two rounds. */
static int64_t count_missing_blocks(const fa_cuda_plan_launch *l, int64_t at_once, int64_t together)
{
    const int64_t heads = l->tasks / l->tiles, last = heads - (heads - 1) / together * together;
    const int64_t missing = 2 * at_once - last * l->tiles;
    return missing > 0 ? missing : 0;
}

/* `together` heads, or more if the last group then lacks much fewer blocks. */
static int64_t lengthen_last_group(const fa_cuda_plan_launch *l, int64_t at_once, int64_t together)
{
    const int64_t heads = l->tasks / l->tiles, twice = 2 * together < heads ? 2 * together : heads,
                  most = l->tasks <= 4 * at_once ? heads : twice,
                  gain = (8 * l->tasks + 99) / 100; /* at least so many blocks */
    const int64_t missing = count_missing_blocks(l, at_once, together);
    if (l->tiles == 1 || l->tasks > 8 * at_once || missing < gain) return together;
    int64_t best = together, least = missing;
    for (int64_t t = together + 1; t <= most && least > 0; t++) {
        const int64_t now = count_missing_blocks(l, at_once, t);
        if (now < least) best = t, least = now;
    }
    return missing - least < gain ? together : best;
}

int64_t fa_cuda_count_heads_in_turn(const fa_problem *p, const fa_cuda_plan_launch *l,
                                    int64_t at_once, int percent)
{
    if (!fa_cuda_shrinks(p) || l->tasks == 0) return 1;
    return lengthen_last_group(l, at_once, fa_cuda_count_heads_of_rounds(l, at_once, percent));
}

bool fa_cuda_add_finish_keys(const fa_cuda_planning *x, const fa_variant *v, int threads,
                             fa_cuda_queue_function *queue, const fa_cuda_plan_launch *main,
                             int splits, int slices)
{
    if (splits == 1) return true;
    fa_cuda_plan_launch *l =
        fa_cuda_plan_add(v, threads, 0, queue, x->device, x->plan, x->why, x->size);
    if (!l) return false;
    fa_cuda_set_tasks(l, main->tiles, main->tasks / splits);
    l->grid = fa_cuda_grid(l->tasks * slices);
    l->tile_k = main->tile_k;
    l->idle = l->idle || (!x->problem->dk.data && !x->problem->dv.data);
    return true;
}

void fa_cuda_set_backward_params(const fa_problem *p, const fa_cuda_plan_launch *l,
                                 fa_backward_params *params)
{
    *params =
        (fa_backward_params){.dout = fa_cuda_view(&p->dout, p->d_v),
                             .dq = fa_cuda_view(&p->dq, p->d),
                             .dk = fa_cuda_view(&p->dk, p->d),
                             .dv = fa_cuda_view(&p->dv, p->d_v),
                             .dbias = fa_cuda_view(&p->dbias, 0),
                             .dlse = p->dlse,
                             .delta = (float *)(void *)((char *)p->workspace + l->workspace_offset),
                             .dsinks = p->dsinks,
                             .blocks_q = p->blocks_q,
                             .blocks_k = p->blocks_k};
    fa_cuda_set_params(p, l, &params->a);
    set_dbias(p, l, params);
}

static bool queue_backward(void *kernel, const fa_cuda_plan *plan, const fa_cuda_plan_launch *l,
                           const fa_cuda_call *call, fa_cuda_fault *fault)
{
    fa_backward_params params;
    fa_cuda_set_backward_params(call->problem, l, &params);
    return fa_cuda_queue(kernel, plan, l, call->stream, (void *[]){&params}, fault);
}

/* ---- The plan -------------------------------------------------------------------------------- */

static fa_cuda_plan_launch *add(const fa_cuda_planning *x, const fa_variant *v, int threads,
                                int smem_bytes)
{
    return fa_cuda_plan_add(v, threads, smem_bytes, queue_backward, x->device, x->plan, x->why,
                            x->size);
}

/* Delta, a float for each query and head, is at the workspace's end. */
static size_t delta_bytes(const fa_problem *p)
{
    return (size_t)(p->blocks_q * p->heads_q * p->rows_q) * sizeof(float);
}

static void use_delta(const fa_cuda_planning *x, fa_cuda_plan_launch *l)
{
    l->workspace_bytes = delta_bytes(x->problem);
    l->workspace_offset = x->plan->workspace_bytes - l->workspace_bytes;
}

/* A launch whose results nobody wants is idle. */
static void set_wanted(fa_cuda_plan_launch *l, bool wanted) { l->idle = l->idle || !wanted; }

static bool add_delta(const fa_cuda_planning *x)
{
    const fa_problem *p = x->problem;
    const fa_variant *v = &fa_variants[FA_VARIANT_backward_delta];
    fa_cuda_plan_launch *l = add(x, v, FA_PASS_THREADS, 0);
    if (!l) return false;
    use_delta(x, l);
    fa_cuda_set_query_tasks(p, FA_DELTA_ROWS, l);
    set_wanted(l, p->dq.data || p->dk.data || p->dv.data || p->dbias.data || p->dsinks);
    return true;
}

static bool add_dq(const fa_cuda_planning *x)
{
    const fa_problem *p = x->problem;
    const fa_variant *v = fa_cuda_narrowest(p, FA_FIRST_backward_dq_simt, FA_LAST_backward_dq_simt);
    fa_cuda_plan_launch *l = add(x, v, FA_PASS_THREADS, FA_PASS_SMEM(v->own));
    if (!l) return false;
    use_delta(x, l);
    l->tile_k = FA_PASS_OTHERS;
    fa_cuda_set_query_tasks(p, v->own, l);
    set_wanted(l, p->dq.data);
    return true;
}

static bool add_dkv(const fa_cuda_planning *x)
{
    const fa_problem *p = x->problem;
    const fa_variant *v =
        fa_cuda_narrowest(p, FA_FIRST_backward_dkv_simt, FA_LAST_backward_dkv_simt);
    fa_cuda_plan_launch *l = add(x, v, FA_PASS_THREADS, FA_PASS_SMEM(v->own));
    if (!l) return false;
    use_delta(x, l);
    l->tile_q = FA_PASS_OTHERS;
    fa_cuda_set_key_tasks(p, v->own, l);
    set_wanted(l, p->dk.data || p->dv.data);
    return true;
}

static bool add_dbias(const fa_cuda_planning *x)
{
    const int64_t *n = x->problem->dbias_shape;
    const fa_variant *v = &fa_variants[FA_VARIANT_backward_dbias_simt];
    fa_cuda_plan_launch *l = add(x, v, FA_PASS_THREADS, FA_PASS_SMEM(v->own));
    if (!l) return false;
    use_delta(x, l);
    l->tile_q = v->own;
    l->tile_k = FA_PASS_OTHERS;
    const int64_t tiles =
        fa_cuda_count_tiles(n[2], l->tile_q) * fa_cuda_count_tiles(n[3], l->tile_k);
    fa_cuda_set_tasks(l, tiles, tiles * n[0] * n[1]);
    return true;
}

static bool add_dsinks(const fa_cuda_planning *x)
{
    const fa_variant *v = &fa_variants[FA_VARIANT_backward_dsinks];
    fa_cuda_plan_launch *l = add(x, v, FA_DSINKS_THREADS, FA_DSINKS_SMEM);
    if (!l) return false;
    use_delta(x, l);
    fa_cuda_set_tasks(l, 1, x->problem->heads_q);
    return true;
}

bool fa_cuda_refuse_gradients(const fa_problem *p, char *why, size_t size)
{
    const struct {
        const char *name;
        const fa_view *view;
    } tensors[] = {{"dout", &p->dout},
                   {"gradients.dq", &p->dq},
                   {"gradients.dk", &p->dk},
                   {"gradients.dv", &p->dv}};
    for (int i = 0; i < 4; i++) {
        const fa_view *v = tensors[i].view;
        if (!v->data || v->dtype == p->q.dtype) continue;
        fa_cuda_say(why, size, "%s.dtype is %s", tensors[i].name, fa_dtype_name(v->dtype));
        return true;
    }
    if (!p->block_table) return false;
    fa_cuda_say(why, size, "block_table is given");
    return true;
}

bool fa_cuda_refuse_wide_backward(const fa_problem *p, char *why, size_t size)
{
    const int widest = fa_variants[FA_LAST_backward_dq_simt].head_dim;
    if (p->d <= widest) return false;
    fa_cuda_say(why, size, "q.shape[3] is %" PRId64 ": backward on CUDA has head dims to %d", p->d,
                widest);
    return true;
}

static bool plan_backward(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                          char *why, size_t size)
{
    const fa_cuda_planning x = {p, device, plan, why, size};
    if (fa_cuda_refuse_wide_backward(p, why, size)) return false;
    plan->arithmetic = "float32 sums on FMA units, deterministic";
    plan->workspace_bytes = delta_bytes(p);
    return add_delta(&x) && add_dq(&x) && add_dkv(&x) && (!p->dbias.data || add_dbias(&x)) &&
           (!p->dsinks || add_dsinks(&x));
}

/* ---- dbias by the kernel of the other gradients ------------------------------------------------ */

static bool is_16_bit(const fa_view *v) { return v->dtype != FA_FLOAT32; }

size_t fa_cuda_dbias_sum_bytes(const fa_problem *p)
{
    const int64_t *n = p->dbias_shape;
    return (size_t)(n[0] * n[1] * n[2] * n[3]) * sizeof(float);
}

/* ---- How blocks find their work -------------------------------------------------------------- */

fa_reciprocal fa_cuda_reciprocal(int64_t x) { return fa_reciprocal_of(x < 1 ? 1 : x); }

fa_turns fa_cuda_turns(int64_t heads, int64_t together, int64_t tiles)
{
    const int64_t group = together < 1 ? 1 : together < heads ? together : heads;
    const int64_t last = group > 0 ? heads % group : 0;
    return (fa_turns){.blocks = fa_cuda_reciprocal(group * tiles),
                      .heads = fa_cuda_reciprocal(group),
                      .rest = fa_cuda_reciprocal(last > 0 ? last : group)};
}

fa_key_divisors fa_cuda_key_divisors(int64_t tiles, int64_t tasks, int64_t group, int64_t heads_kv,
                                     int64_t together)
{
    const int64_t heads = tiles > 0 ? tasks / tiles : 0;
    return (fa_key_divisors){.heads = (int32_t)heads,
                             .group = (int32_t)group,
                             .tiles = fa_cuda_reciprocal(tiles),
                             .heads_kv = fa_cuda_reciprocal(heads_kv),
                             .together = fa_cuda_turns(heads, together, tiles)};
}

static bool is_small(int64_t x) { return x < 1 << 28 && x > -(1 << 28); }

static int32_t clamp_query(int64_t query, int64_t n_q)
{
    return (int32_t)(query < 0 ? 0 : query > n_q ? n_q : query);
}

/* As fa_first_query and fa_tile_visible find it for each sequence. */
fa_uniform_lengths fa_cuda_uniform_lengths(const fa_problem *p)
{
    const int64_t left = p->window_left, right = p->causal ? 0 : p->window_right,
                  diagonal = p->diagonal_given ? p->diagonal : p->n_k - p->n_q;
    if (fa_cuda_has_own_lengths(p) || p->block_table || p->attention_chunk || p->n_q != p->rows_q ||
        p->n_q == 0 || p->n_k == 0 || !is_small(p->n_q) || !is_small(p->rows_k) ||
        !is_small(left) || !is_small(right) || !is_small(diagonal))
        return (fa_uniform_lengths){.applies = 0};
    const fa_range first = fa_visible_keys(p->causal, left, p->window_right, p->n_k, diagonal),
                   last = fa_visible_keys(p->causal, left, p->window_right, p->n_k,
                                          diagonal + p->n_q - 1);
    return (fa_uniform_lengths){
        .applies = 1,
        .n_q = (int32_t)p->n_q,
        .n_k = (int32_t)p->n_k,
        .has_first = right >= 0,
        .has_end = left >= 0,
        .first_query = (int32_t)(-diagonal - right),
        .end_query = (int32_t)(-diagonal + left + 1),
        .keys_from = (int32_t)first.lo,
        .keys_to = (int32_t)last.hi,
        .queries_from = right < 0 ? 0 : clamp_query(-diagonal - right, p->n_q),
        .queries_to = left < 0 ? (int32_t)p->n_q : clamp_query(p->n_k - diagonal + left, p->n_q)};
}

/* ---- The gradient of a bias ------------------------------------------------------------------ */

/* Weights that a softcap's slope has been multiplied into make no dbias. Sums over queries or over keys, which many threads
 * would add to at once, and those that need one order, have their own kernel; backward_sm90 may have another
 * way for the latter. */
fa_cuda_dbias fa_cuda_choose_dbias(const fa_problem *p)
{
    const int64_t *n = p->dbias_shape;
    if (!p->dbias.data || p->softcap > 0 || n[2] == 1 || n[3] == 1) return FA_CUDA_DBIAS_ALONE;
    if (n[0] == p->batch && n[1] == p->heads_q) return FA_CUDA_DBIAS_STORED;
    if (p->deterministic || p->batch_invariant) return FA_CUDA_DBIAS_ALONE;
    return is_16_bit(&p->dbias) ? FA_CUDA_DBIAS_SUMMED : FA_CUDA_DBIAS_ADDED;
}

static bool add_dbias_rows(const fa_cuda_planning *x, int variant)
{
    const int64_t *n = x->problem->dbias_shape;
    fa_cuda_plan_launch *l = add(x, &fa_variants[variant], FA_PASS_THREADS, 0);
    if (!l) return false;
    fa_cuda_set_tasks(l, 1, fa_cuda_count_tiles(n[0] * n[1] * n[2], FA_DBIAS_ROWS));
    return true;
}

/* Where each query sees each key, and nobody adds, all of dbias is stored. */
bool fa_cuda_add_dbias_clear(const fa_cuda_planning *x, fa_cuda_dbias dbias)
{
    const fa_problem *p = x->problem;
    const bool all_seen =
        !p->causal && p->window_left < 0 && p->window_right < 0 && !fa_cuda_has_own_lengths(p);
    if (dbias == FA_CUDA_DBIAS_ALONE || dbias == FA_CUDA_DBIAS_LEFT) return true;
    if (dbias == FA_CUDA_DBIAS_STORED && all_seen) return true;
    return add_dbias_rows(x, FA_VARIANT_backward_dbias_clear);
}

bool fa_cuda_add_dbias_round(const fa_cuda_planning *x, fa_cuda_dbias dbias, size_t sums_offset)
{
    if (dbias == FA_CUDA_DBIAS_SUMMED && !add_dbias_rows(x, FA_VARIANT_backward_dbias_round))
        return false;
    for (int i = 0; i < x->plan->count; i++) {
        x->plan->launches[i].dbias = dbias;
        x->plan->launches[i].dbias_sums_offset = sums_offset;
    }
    return true;
}

bool fa_cuda_add_dbias_dsinks(const fa_cuda_planning *x, fa_cuda_dbias by_others,
                              size_t *delta_offset)
{
    const fa_problem *p = x->problem;
    const bool dbias = p->dbias.data && by_others == FA_CUDA_DBIAS_ALONE, dsinks = p->dsinks;
    const size_t offset = x->plan->workspace_bytes;
    if (delta_offset) *delta_offset = dbias || dsinks ? offset : 0;
    if (!p->bias.data && !p->sinks) return true;
    x->plan->workspace_bytes = offset + delta_bytes(p);
    if (!dbias && !dsinks) return true;
    return (delta_offset || add_delta(x)) && (!dbias || add_dbias(x)) && (!dsinks || add_dsinks(x));
}

const fa_cuda_family fa_cuda_backward_simt = {
    .name = "simt",
    .oldest = 0,
    .newest = FA_CUDA_NEWEST,
    .plan = plan_backward,
};
