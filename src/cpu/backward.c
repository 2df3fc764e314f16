/*
 * Backward on the CPU: FlashAttention-2, algorithm 2 (arXiv:2307.08691, section 3.1.2). The weights
 * are recomputed from the log-sum-exp:
 *     P = exp(S - lse),  dV = P^T dO,  dP = dO V^T,  dS = P * (dP - delta),  dQ = dS K,  dK = dS^T Q
 * with delta = rowsum(dO * O) - dlse.
 *
 * A task is one tile of keys of one key/value head. It owns its dK and dV, and loops over the queries of
 * all heads that share it. dQ is summed over tiles in memory that all tasks share: each block of queries
 * gets its contributions in the order of the tiles. A task waits until the previous tile has added its
 * part, so the order of the sum, and therefore every bit, is always the same. Tasks start in order, so
 * a task only waits for tasks that are running.
 */
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>

#include "gemm.h"
#include "isa.h"
#include "logits.h"
#include "work.h"

#define ROW_TILES(mr) FA_TILES(rows, false, true, mr)
#define ROW_NAMES(mr) FA_TILE_NAMES(rows, mr)
FA_HEIGHTS(ROW_TILES)
static const fa_tiles row_tiles = {{FA_HEIGHTS(ROW_NAMES)}, true, NULL};

#define COLUMN_TILES(mr) FA_TILES(columns, false, false, mr)
#define COLUMN_NAMES(mr) FA_TILE_NAMES(columns, mr)
FA_HEIGHTS(COLUMN_TILES)
static const fa_tiles column_tiles = {{FA_HEIGHTS(COLUMN_NAMES)}, false, NULL};

enum {
    FA_Q_BLOCK = 96, /* queries at a time; a multiple of FA_MR, so that blocks do not share rows */
    FA_K_TILE_MAX = 128 /* keys of a task, for small head dims */
};

typedef struct fa_backward_plan {
    int64_t k_tile;
    int64_t pitch_d, pitch_dv; /* floats between rows of width d and d_v */
    int64_t pitch_keys;        /* floats between rows of scores and of the transposed tiles */
    size_t scratch;            /* bytes per thread */
} fa_backward_plan;

/* One thread's scratch. */
typedef struct fa_backward_tiles {
    float *k, *v;        /* k_tile rows */
    float *k_t, *v_t;    /* d and d_v rows of k_tile keys */
    float *dk, *dv;      /* k_tile rows */
    float *q, *dout;     /* FA_Q_BLOCK rows */
    float *s, *dp;       /* FA_Q_BLOCK x k_tile: scores, then weights; dP, then dS */
    float *slope, *keep; /* k_tile: of the softcap; dropout factors */
    bool k_finite, q_finite, dout_finite;
} fa_backward_tiles;

/* What all tasks of a call share. */
typedef struct fa_backward_job {
    const fa_problem *p;
    fa_backward_plan plan;
    fa_tasks tiles;     /* tiles of keys of each sequence */
    fa_tasks blocks;    /* blocks of queries of each sequence */
    float *delta;       /* like lse */
    fa_tasks rows;      /* rows of dq of each sequence and head: its queries, padded */
    float *dq;          /* rows * heads_q rows of pitch_d */
    atomic_llong *turn; /* blocks * heads_q: how many tiles have added to this block */
    fa_tasks keys;      /* paged keys: the keys of each sequence */
    float *paged;       /* keys * heads_kv rows of dK and dV; else NULL */
    char *scratch;
} fa_backward_job;

static fa_backward_tiles carve(const fa_backward_plan *plan, int64_t d, int64_t d_v, char *scratch,
                               size_t *bytes)
{
    fa_backward_tiles t;
    char *start = scratch;
    const int64_t keys = plan->k_tile + FA_MR, queries = FA_Q_BLOCK + FA_MR;
    t.k = fa_take(&scratch, keys * plan->pitch_d, 4);
    t.v = fa_take(&scratch, keys * plan->pitch_dv, 4);
    t.k_t = fa_take(&scratch, fa_round_up(d, VL) * plan->pitch_keys, 4);
    t.v_t = fa_take(&scratch, fa_round_up(d_v, VL) * plan->pitch_keys, 4);
    t.dk = fa_take(&scratch, keys * plan->pitch_d, 4);
    t.dv = fa_take(&scratch, keys * plan->pitch_dv, 4);
    t.q = fa_take(&scratch, queries * plan->pitch_d, 4);
    t.dout = fa_take(&scratch, queries * plan->pitch_dv, 4);
    t.s = fa_take(&scratch, queries * plan->pitch_keys, 4);
    t.dp = fa_take(&scratch, queries * plan->pitch_keys, 4);
    t.slope = fa_take(&scratch, plan->pitch_keys, 4);
    t.keep = fa_take(&scratch, plan->pitch_keys, 4);
    t.k_finite = t.q_finite = t.dout_finite = true;
    *bytes = (size_t)(scratch - start);
    return t;
}

static fa_backward_tiles thread_tiles(const fa_backward_job *job, int thread)
{
    size_t bytes;
    return carve(&job->plan, job->p->d, job->p->d_v,
                 job->scratch + (size_t)thread * job->plan.scratch, &bytes);
}

static int64_t k_tile_rows(const fa_problem *p)
{
    return p->d + p->d_v <= 384 ? FA_K_TILE_MAX : FA_K_TILE_MAX / 2;
}

static fa_backward_plan make_plan(const fa_problem *p)
{
    fa_backward_plan plan = {k_tile_rows(p), fa_pitch(p->d), fa_pitch(p->d_v), 0, 0};
    plan.pitch_keys = fa_pitch(plan.k_tile);
    static char nowhere[1];
    carve(&plan, p->d, p->d_v, nowhere, &plan.scratch);
    return plan;
}

static int64_t k_tile_count(const fa_problem *p, const fa_sequence *s)
{
    return (s->n_k + k_tile_rows(p) - 1) / k_tile_rows(p);
}

static int64_t key_count(const fa_problem *p, const fa_sequence *s)
{
    (void)p;
    return s->n_k;
}

static int64_t q_block_count(const fa_problem *p, const fa_sequence *s)
{
    (void)p;
    return (s->n_q + FA_Q_BLOCK - 1) / FA_Q_BLOCK;
}

/* Rows that the register tiles write for a sequence's queries. */
static int64_t padded_rows(const fa_problem *p, const fa_sequence *s)
{
    (void)p;
    const int64_t rest = s->n_q % FA_MR;
    int height = 0;
    while (fa_heights[height] < rest) height++;
    return s->n_q - rest + (rest ? fa_heights[height] : 0);
}

/* The sums of dQ for block n of a sequence's and head's queries. */
static float *dq_block(const fa_backward_job *job, int64_t b, int64_t head, int64_t n)
{
    const int64_t rows = job->rows.first[b + 1] - job->rows.first[b];
    return job->dq + (job->rows.first[b] * job->p->heads_q + head * rows + n * FA_Q_BLOCK) *
                         job->plan.pitch_d;
}

/* The keys that queries [i0, i0 + rows) may see. */
static fa_range block_range(const fa_problem *p, const fa_sequence *s, int64_t i0, int64_t rows)
{
    return (fa_range){fa_visible(p, s, i0).lo, fa_visible(p, s, i0 + rows - 1).hi};
}

/* Fills the rows after the first `count` with zeros, up to whole vectors of keys; returns whether the
 * rows are finite. */
static bool zero_tail(float *dst, int64_t pitch, int64_t count)
{
    for (int64_t r = count; r < fa_round_up(count, FA_NR); r++)
        memset(dst + r * pitch, 0, (size_t)pitch * sizeof *dst);
    return fa_all_finite(dst, count * pitch);
}

static bool load_queries(const fa_view *view, const fa_sequence *s, int64_t head, int64_t i0,
                         int64_t count, float *dst, int64_t pitch, int64_t width)
{
    for (int64_t r = 0; r < count; r++)
        fa_load_row(dst + r * pitch, fa_view_row(view, s->block_q, s->start_q + i0 + r, head),
                    view->dtype, width, pitch);
    for (int64_t r = count; r < fa_round_up(count, FA_MR); r++)
        memset(dst + r * pitch, 0, (size_t)pitch * sizeof *dst);
    return fa_all_finite(dst, count * pitch);
}

/* A tile of keys or values: rows as floats, and transposed. */
static bool load_keys(const fa_problem *p, const fa_view *view, const fa_sequence *s, int64_t b,
                      int64_t head, int64_t j0, int64_t count, float *dst, int64_t pitch,
                      int64_t width, float *transposed, int64_t pitch_keys)
{
    for (int64_t j = 0; j < count; j++)
        fa_load_row(dst + j * pitch, fa_key_row(p, view, s, b, j0 + j, head), view->dtype, width,
                    pitch);
    const bool finite = zero_tail(dst, pitch, count);
    fa_transpose((uint32_t *)(void *)transposed, pitch_keys, (const uint32_t *)(const void *)dst,
                 pitch, fa_round_up(count, FA_NR), fa_round_up(width, VL));
    return finite;
}

static void load_key_tile(const fa_problem *p, const fa_backward_plan *plan, fa_backward_tiles *t,
                          const fa_sequence *s, int64_t b, int64_t head_kv, int64_t j0,
                          int64_t count)
{
    t->k_finite = load_keys(p, &p->k, s, b, head_kv, j0, count, t->k, plan->pitch_d, p->d, t->k_t,
                            plan->pitch_keys);
    load_keys(p, &p->v, s, b, head_kv, j0, count, t->v, plan->pitch_dv, p->d_v, t->v_t,
              plan->pitch_keys);
}

static void multiply(const fa_tiles *tiles, bool finite, const fa_gemm *g, int64_t rows,
                     int64_t columns)
{
    if (finite) fa_gemm_run(tiles, g, rows, columns);
    else fa_gemm_skip_zeros(g, false, tiles->by_rows, rows, columns);
}

/* A product by rows of A: C (rows x columns) = A (rows x depth) B (depth x columns). */
static fa_gemm product(int64_t depth, const float *a, int64_t lda, const float *b, int64_t ldb,
                       float *c, int64_t ldc)
{
    return (fa_gemm){depth,
                     (const uint32_t *)(const void *)a,
                     lda,
                     1,
                     (const uint32_t *)(const void *)b,
                     ldb,
                     c,
                     ldc,
                     NULL};
}

/* Scales of 1, to add to one strip of rows of C. */
static const float ones[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
_Static_assert(sizeof ones / sizeof *ones >= FA_MR, "one for each row of a register tile");
_Static_assert(FA_Q_BLOCK % FA_MR == 0, "register tiles must not run into the next block of dQ");

/* Scores x[from, to) become weights correction * 2^(factor * (x - base)) and dp becomes dS (without the
 * scale); zeros elsewhere in [first, last). slope NULL: no softcap; keep NULL: no dropout. */
static void gradient_row(float *x, float *dp, int64_t first, int64_t last, int64_t from, int64_t to,
                         float base, float factor, float correction, float delta,
                         const float *slope, const float *keep)
{
    const vf vbase = v_set1(base), vc = v_set1(factor), lowest = v_set1(fa_exp2_lowest(factor));
    const vf vcorrection = v_set1(correction);
    const vf vdelta = v_set1(delta), zero = v_zero(), masked = v_set1(-INFINITY);
    const int64_t start = from / VL * VL, end = fa_round_up(to, VL);
    for (int64_t c = start; c < from; c++) x[c] = -INFINITY;
    for (int64_t c = to; c < end; c++) x[c] = -INFINITY;
    for (int64_t c = first; c < start; c += VL) v_store(x + c, zero), v_store(dp + c, zero);
    for (int64_t c = start; c < end; c += VL) {
        const vm hidden = v_equal(v_load(x + c), masked);
        vf w = v_mul(vcorrection, v_exp2(v_sub(v_load(x + c), vbase), vc, lowest));
        w = v_select(hidden, zero, w); /* also where the row's log-sum-exp is NaN */
        vf g = v_load(dp + c);
        if (keep) g = v_mul(g, v_load(keep + c));
        g = v_mul(w, v_sub(g, vdelta));
        if (slope) g = v_mul(g, v_load(slope + c));
        v_store(x + c, keep ? v_mul(w, v_load(keep + c)) : w);
        v_store(dp + c, v_select(hidden, zero, g)); /* and where dP is */
    }
    for (int64_t c = end; c < last; c += VL) v_store(x + c, zero), v_store(dp + c, zero);
}

/* A block of queries against the tile of keys at j0: weights (after dropout) in t->s and dS in t->dp, for
 * columns [0, columns), zeros for hidden keys. softcap: dS is the gradient of the scores, else that of
 * the logits after the softcap. */
static void weigh_block(const fa_backward_job *job, fa_backward_tiles *t, const fa_sequence *s,
                        int64_t b, int64_t head, int64_t i0, int64_t rows, int64_t j0,
                        int64_t columns, bool softcap)
{
    const fa_problem *p = job->p;
    const fa_backward_plan *plan = &job->plan;
    const float scale = p->scale;
    const bool general = fa_is_general(p, scale);
    const float factor = general ? FA_LOG2E : scale * FA_LOG2E;
    for (int64_t r0 = 0; r0 < rows; r0 += FA_MR) {
        const int64_t count = fa_min(FA_MR, rows - r0);
        const fa_range strip = block_range(p, s, i0 + r0, count);
        const int64_t lo = fa_max(strip.lo - j0, 0), hi = fa_min(strip.hi - j0, columns);
        const int64_t first = lo < hi ? lo / FA_NR * FA_NR : 0,
                      last = lo < hi ? fa_round_up(hi, FA_NR) : 0;
        fa_gemm scores =
            product(p->d, t->q + r0 * plan->pitch_d, plan->pitch_d, t->k_t + first,
                    plan->pitch_keys, t->s + r0 * plan->pitch_keys + first, plan->pitch_keys);
        fa_gemm dp =
            product(p->d_v, t->dout + r0 * plan->pitch_dv, plan->pitch_dv, t->v_t + first,
                    plan->pitch_keys, t->dp + r0 * plan->pitch_keys + first, plan->pitch_keys);
        if (last > first) {
            fa_gemm_run(&row_tiles, &scores, count, last - first);
            fa_gemm_run(&row_tiles, &dp, count, last - first);
        }
        for (int64_t r = r0; r < r0 + count; r++) {
            float *x = t->s + r * plan->pitch_keys;
            fa_row row = {b, head, i0 + r, fa_visible(p, s, i0 + r), s};
            const int64_t from = fa_min(fa_max(row.visible.lo - j0, 0), columns);
            const int64_t to = fa_max(fa_min(row.visible.hi - j0, columns), from);
            const int64_t at = fa_lse_offset(p, s, head) + i0 + r;
            const bool capped = softcap && p->softcap > 0;
            if (general && to > from)
                fa_scores_to_logits(p, &row, scale, x + from, j0 + from, to - from,
                                    capped ? t->slope + from : NULL);
            if (p->dropout_threshold)
                fa_dropout_factors(p, &row, t->keep, j0, fa_round_up(columns, VL));
            /* A row that saw no key has weights exp(x - infinity) = 0. Dividing the log-sum-exp by the
             * scale rounds; the correction takes that back. */
            const float lse = p->lse[at] == -INFINITY ? INFINITY : p->lse[at];
            const float base = general ? lse : lse / scale;
            const float correction = general || isinf(lse) ? 1.0f : expf(fmaf(base, scale, -lse));
            gradient_row(x, t->dp + r * plan->pitch_keys, 0, fa_round_up(columns, FA_NR), from, to,
                         base, factor, correction, job->delta[at], capped ? t->slope : NULL,
                         p->dropout_threshold ? t->keep : NULL);
        }
    }
}

/* dV += P^T dO and dK += dS^T Q, for strips of keys; queries that see no key of a strip are skipped. */
static void add_key_gradients(const fa_problem *p, const fa_backward_plan *plan,
                              fa_backward_tiles *t, const fa_sequence *s, int64_t i0, int64_t rows,
                              int64_t j0, int64_t columns)
{
    int64_t begin = 0, end = 0;
    for (int64_t c = 0; c < columns; c += FA_MR) {
        const int64_t count = fa_min(FA_MR, columns - c);
        while (begin < rows && fa_visible(p, s, i0 + begin).hi <= j0 + c) begin++;
        while (end < rows && fa_visible(p, s, i0 + end).lo < j0 + c + count) end++;
        if (end <= begin) continue;
        fa_gemm g = {end - begin,
                     (const uint32_t *)(const void *)(t->s + begin * plan->pitch_keys + c),
                     1,
                     plan->pitch_keys,
                     (const uint32_t *)(const void *)(t->dout + begin * plan->pitch_dv),
                     plan->pitch_dv,
                     t->dv + c * plan->pitch_dv,
                     plan->pitch_dv,
                     ones};
        if (p->dv.data) multiply(&column_tiles, t->dout_finite, &g, count, fa_round_up(p->d_v, VL));
        g.a = (const uint32_t *)(const void *)(t->dp + begin * plan->pitch_keys + c);
        g.b = (const uint32_t *)(const void *)(t->q + begin * plan->pitch_d);
        g.ldb = g.ldc = plan->pitch_d;
        g.c = t->dk + c * plan->pitch_d;
        if (p->dk.data) multiply(&column_tiles, t->q_finite, &g, count, fa_round_up(p->d, VL));
    }
}

/* dQ += dS K, after all earlier tiles have added their parts. */
static void add_query_gradient(const fa_backward_job *job, fa_backward_tiles *t,
                               const fa_sequence *s, atomic_llong *next, float *dq, int64_t i0,
                               int64_t rows, int64_t j0, int64_t columns, int64_t turn)
{
    const fa_problem *p = job->p;
    const fa_backward_plan *plan = &job->plan;
    for (int spins = 0; atomic_load_explicit(next, memory_order_acquire) != turn; spins++)
        if (spins > 1000) sched_yield();
    for (int64_t r0 = 0; r0 < rows; r0 += FA_MR) {
        const int64_t count = fa_min(FA_MR, rows - r0);
        const fa_range strip = block_range(p, s, i0 + r0, count);
        const int64_t lo = fa_max(strip.lo - j0, 0), hi = fa_min(strip.hi - j0, columns);
        if (hi <= lo) continue;
        fa_gemm g = product(hi - lo, t->dp + r0 * plan->pitch_keys + lo, plan->pitch_keys,
                            t->k + lo * plan->pitch_d, plan->pitch_d, dq + r0 * plan->pitch_d,
                            plan->pitch_d);
        g.alpha = ones;
        multiply(&row_tiles, t->k_finite, &g, count, fa_round_up(p->d, VL));
    }
    atomic_store_explicit(next, turn + 1, memory_order_release);
}

/* One head's queries against a tile of keys. */
static void walk_queries(const fa_backward_job *job, fa_backward_tiles *t, const fa_sequence *s,
                         int64_t b, int64_t head, int64_t j0, int64_t count)
{
    const fa_problem *p = job->p;
    const fa_backward_plan *plan = &job->plan;
    const int64_t blocks = job->blocks.first[b + 1] - job->blocks.first[b];
    for (int64_t n = 0; n < blocks; n++) {
        const int64_t i0 = n * FA_Q_BLOCK, rows = fa_min(FA_Q_BLOCK, s->n_q - i0);
        const fa_range seen = block_range(p, s, i0, rows);
        if (seen.hi <= seen.lo || seen.hi <= j0 || seen.lo >= j0 + count) continue;
        t->q_finite = load_queries(&p->q, s, head, i0, rows, t->q, plan->pitch_d, p->d);
        t->dout_finite = load_queries(&p->dout, s, head, i0, rows, t->dout, plan->pitch_dv, p->d_v);
        const int64_t columns = fa_min(count, seen.hi - j0);
        weigh_block(job, t, s, b, head, i0, rows, j0, columns, true);
        add_key_gradients(p, plan, t, s, i0, rows, j0, columns);
        if (p->dq.data)
            add_query_gradient(job, t, s,
                               job->turn + job->blocks.first[b] * p->heads_q + head * blocks + n,
                               dq_block(job, b, head, n), i0, rows, j0, columns,
                               j0 / plan->k_tile - seen.lo / plan->k_tile);
    }
}

/* Where paged gradients of key j are gathered before pages are summed: d floats of dK, d_v of dV. */
static float *paged_row(const fa_backward_job *job, int64_t b, int64_t j, int64_t head_kv)
{
    const fa_problem *p = job->p;
    return job->paged + ((job->keys.first[b] + j) * p->heads_kv + head_kv) * (p->d + p->d_v);
}

static void store_key_gradients(const fa_backward_job *job, const fa_backward_tiles *t,
                                const fa_sequence *s, int64_t b, int64_t head_kv, int64_t j0,
                                int64_t count)
{
    const fa_problem *p = job->p;
    for (int64_t j = 0; j < count; j++) {
        const float *dk = t->dk + j * job->plan.pitch_d, *dv = t->dv + j * job->plan.pitch_dv;
        if (job->paged) {
            float *row = paged_row(job, b, j0 + j, head_kv);
            fa_store_row((char *)row, FA_FLOAT32, dk, p->scale, p->d);
            fa_store_row((char *)(row + p->d), FA_FLOAT32, dv, 1.0f, p->d_v);
            continue;
        }
        if (p->dk.data)
            fa_store_row(fa_key_row(p, &p->dk, s, b, j0 + j, head_kv), p->dk.dtype, dk, p->scale,
                         p->d);
        if (p->dv.data)
            fa_store_row(fa_key_row(p, &p->dv, s, b, j0 + j, head_kv), p->dv.dtype, dv, 1.0f,
                         p->d_v);
    }
}

/* One tile of keys of one key/value head. */
static void backward_task(const fa_backward_job *job, fa_backward_tiles *t, int64_t b, int64_t tile,
                          int64_t head_kv)
{
    const fa_problem *p = job->p;
    const fa_backward_plan *plan = &job->plan;
    const fa_sequence s = fa_problem_sequence(p, b);
    const int64_t j0 = tile * plan->k_tile, count = fa_min(plan->k_tile, s.n_k - j0);
    const int64_t group = p->heads_q / p->heads_kv;
    load_key_tile(p, plan, t, &s, b, head_kv, j0, count);
    memset(t->dk, 0, (size_t)((count + FA_MR) * plan->pitch_d) * sizeof(float));
    memset(t->dv, 0, (size_t)((count + FA_MR) * plan->pitch_dv) * sizeof(float));
    for (int64_t g = 0; g < group; g++) walk_queries(job, t, &s, b, head_kv * group + g, j0, count);
    store_key_gradients(job, t, &s, b, head_kv, j0, count);
}

/* delta_i = dout_i . out_i - dlse_i, for one block of queries of one head. */
static void find_delta(const fa_backward_job *job, int64_t b, int64_t n, int64_t head)
{
    const fa_problem *p = job->p;
    const fa_sequence s = fa_problem_sequence(p, b);
    float dout[FA_VALUE_DIM_MAX + VL], out[FA_VALUE_DIM_MAX + VL];
    const int64_t padded = fa_round_up(p->d_v, VL);
    for (int64_t i = n * FA_Q_BLOCK; i < fa_min((n + 1) * FA_Q_BLOCK, s.n_q); i++) {
        const int64_t at = fa_lse_offset(p, &s, head) + i;
        fa_load_row(dout, fa_view_row(&p->dout, s.block_q, s.start_q + i, head), p->dout.dtype,
                    p->d_v, padded);
        fa_load_row(out, fa_view_row(&p->out, s.block_q, s.start_q + i, head), p->out.dtype, p->d_v,
                    padded);
        vf sum = v_zero();
        for (int64_t c = 0; c < padded; c += VL)
            sum = v_fma(v_load(dout + c), v_load(out + c), sum);
        job->delta[at] = v_sum(sum) - (p->dlse ? p->dlse[at] : 0.0f);
    }
}

static void store_dq(const fa_backward_job *job, int64_t b, int64_t n, int64_t head)
{
    const fa_problem *p = job->p;
    const fa_sequence s = fa_problem_sequence(p, b);
    const float *dq = dq_block(job, b, head, n);
    const int64_t i0 = n * FA_Q_BLOCK;
    for (int64_t r = 0; r < fa_min(FA_Q_BLOCK, s.n_q - i0); r++)
        fa_store_row(fa_view_row(&p->dq, s.block_q, s.start_q + i0 + r, head), p->dq.dtype,
                     dq + r * job->plan.pitch_d, p->scale, p->d);
}

/* The gradient of a sink: its weight exp(sink - lse) takes part in every row's denominator. */
static void find_dsink(const fa_backward_job *job, int64_t head)
{
    const fa_problem *p = job->p;
    double sum = 0;
    for (int64_t b = 0; b < p->batch; b++) {
        const fa_sequence s = fa_problem_sequence(p, b);
        const int64_t at = fa_lse_offset(p, &s, head);
        for (int64_t i = 0; i < s.n_q; i++)
            if (p->lse[at + i] != -INFINITY)
                sum -= (double)expf(p->sinks[head] - p->lse[at + i]) * (double)job->delta[at + i];
    }
    p->dsinks[head] = (float)sum;
}

/* Rows of dq, dk, dv that belong to no sequence. */
static void clear_unused(const fa_problem *p)
{
    fa_unused dq = {&p->dq, p->heads_q, p->d, NULL, 0};
    fa_unused dk = {&p->dk, p->heads_kv, p->d, NULL, 0};
    fa_unused dv = {&p->dv, p->heads_kv, p->d_v, NULL, 0};
    fa_unused_rows(p->cu_seqlens_q, p->seqlens_q, p->batch, p->rows_q, fa_zero_rows, &dq);
    if (p->block_table) return;
    fa_unused_rows(p->cu_seqlens_k, p->seqlens_k, p->batch, p->rows_k, fa_zero_rows, &dk);
    fa_unused_rows(p->cu_seqlens_k, p->seqlens_k, p->batch, p->rows_k, fa_zero_rows, &dv);
}

/* Which (sequence, table entry) uses each page: page n is used by entries first[n] .. first[n+1]-1 of
 * uses, in the order of the sequences. */
typedef struct fa_page_uses {
    int64_t *first; /* (pages + 1) */
    int64_t *uses;  /* b * block_table_stride + entry */
} fa_page_uses;

static int64_t pages_used(const fa_problem *p, int64_t b)
{
    return (p->seqlens_k[b] + p->rows_k - 1) / p->rows_k;
}

/* A counting sort of the table's entries by page. */
static bool find_page_uses(const fa_problem *p, fa_page_uses *u)
{
    const int64_t pages = p->blocks_k;
    int64_t used = 0;
    for (int64_t b = 0; b < p->batch; b++) used += pages_used(p, b);
    u->first = fa_allocate(fa_bytes(pages + 1, sizeof *u->first));
    u->uses = fa_allocate(fa_bytes(used, sizeof *u->uses));
    if (!u->first || !u->uses) return false;
    memset(u->first, 0, (size_t)(pages + 1) * sizeof *u->first);
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t e = 0; e < pages_used(p, b); e++)
            u->first[p->block_table[b * p->block_table_stride + e] + 1]++;
    for (int64_t page = 0; page < pages; page++) u->first[page + 1] += u->first[page];
    /* Filling moves each first to its end, which is the next page's first: shift back afterwards. */
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t e = 0; e < pages_used(p, b); e++) {
            const int64_t entry = b * p->block_table_stride + e;
            u->uses[u->first[p->block_table[entry]]++] = entry;
        }
    for (int64_t page = pages; page > 0; page--) u->first[page] = u->first[page - 1];
    u->first[0] = 0;
    return true;
}

/* A page's gradient is the sum over all sequences that use it, in their order; zeros without any. */
static void sum_page_row(const fa_backward_job *job, const fa_page_uses *u, int64_t page, int64_t t,
                         int64_t head_kv)
{
    const fa_problem *p = job->p;
    const int64_t width = p->d + p->d_v;
    float row[FA_HEAD_DIM_MAX + FA_VALUE_DIM_MAX] = {0};
    for (int64_t n = u->first[page]; n < u->first[page + 1]; n++) {
        const int64_t b = u->uses[n] / p->block_table_stride;
        const int64_t j = u->uses[n] % p->block_table_stride * p->rows_k + t;
        if (j >= p->seqlens_k[b]) continue;
        const float *part = paged_row(job, b, j, head_kv);
        for (int64_t c = 0; c < width; c++) row[c] += part[c];
    }
    if (p->dk.data)
        fa_store_row(fa_view_row(&p->dk, page, t, head_kv), p->dk.dtype, row, 1.0f, p->d);
    if (p->dv.data)
        fa_store_row(fa_view_row(&p->dv, page, t, head_kv), p->dv.dtype, row + p->d, 1.0f, p->d_v);
}

typedef struct fa_page_job {
    const fa_backward_job *job;
    const fa_page_uses *uses;
} fa_page_job;

/* One row of a page, of all heads. */
static void sum_page_rows(void *context, int64_t row, int thread)
{
    const fa_page_job *pages = context;
    const fa_problem *p = pages->job->p;
    (void)thread;
    for (int64_t h = 0; h < p->heads_kv; h++)
        sum_page_row(pages->job, pages->uses, row / p->rows_k, row % p->rows_k, h);
}

static fa_status sum_pages(const fa_backward_job *job, int threads)
{
    const fa_problem *p = job->p;
    fa_page_uses u;
    fa_status status = FA_ERROR_MEMORY;
    if (find_page_uses(p, &u)) {
        status = FA_OK;
        const int64_t rows = p->blocks_k * p->rows_k;
        fa_page_job pages = {job, &u};
        fa_team_run(threads, rows, fa_team_share(threads, rows), sum_page_rows, &pages);
    }
    free(u.uses);
    free(u.first);
    return status;
}

/* --- The gradient of the bias: dS of the logits, summed over the axes that broadcast. It has a
 * pass of its own. Each task owns a part of the result: a tile of keys, or all keys where that axis
 * broadcasts. --- */

typedef struct fa_bias_job {
    const fa_backward_job *job;
    float *sum; /* dbias_shape, contiguous */
    int64_t tiles;
} fa_bias_job;

/* Adds one block's dS to its part of the sum. */
static void add_bias_block(const fa_bias_job *bias, const fa_backward_tiles *t, int64_t b,
                           int64_t head, int64_t i0, int64_t rows, int64_t j0, int64_t columns)
{
    const fa_problem *p = bias->job->p;
    const int64_t *shape = p->dbias_shape;
    const int64_t bb = shape[0] == 1 ? 0 : b, hh = shape[1] == 1 ? 0 : head;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t ii = shape[2] == 1 ? 0 : i0 + r;
        float *sum = bias->sum + ((bb * shape[1] + hh) * shape[2] + ii) * shape[3];
        const float *ds = t->dp + r * bias->job->plan.pitch_keys;
        for (int64_t c = 0; c < columns; c++) sum[shape[3] == 1 ? 0 : j0 + c] += ds[c];
    }
}

static void bias_tile(const fa_bias_job *bias, fa_backward_tiles *t, int64_t b, int64_t head,
                      int64_t tile)
{
    const fa_backward_job *job = bias->job;
    const fa_problem *p = job->p;
    const fa_sequence s = fa_problem_sequence(p, b);
    const int64_t j0 = tile * job->plan.k_tile, count = fa_min(job->plan.k_tile, s.n_k - j0);
    if (count <= 0) return;
    load_key_tile(p, &job->plan, t, &s, b, head / (p->heads_q / p->heads_kv), j0, count);
    for (int64_t i0 = 0; i0 < s.n_q; i0 += FA_Q_BLOCK) {
        const int64_t rows = fa_min(FA_Q_BLOCK, s.n_q - i0);
        const fa_range seen = block_range(p, &s, i0, rows);
        if (seen.hi <= seen.lo || seen.hi <= j0 || seen.lo >= j0 + count) continue;
        load_queries(&p->q, &s, head, i0, rows, t->q, job->plan.pitch_d, p->d);
        load_queries(&p->dout, &s, head, i0, rows, t->dout, job->plan.pitch_dv, p->d_v);
        const int64_t columns = fa_min(count, seen.hi - j0);
        weigh_block(job, t, &s, b, head, i0, rows, j0, columns, false);
        add_bias_block(bias, t, b, head, i0, rows, j0, columns);
    }
}

static void bias_task(void *context, int64_t task, int thread)
{
    const fa_bias_job *bias = context;
    fa_backward_tiles t = thread_tiles(bias->job, thread);
    const fa_problem *p = bias->job->p;
    const int64_t *shape = p->dbias_shape;
    const int64_t tiles = shape[3] == 1 ? 1 : bias->tiles;
    const int64_t bb = task / tiles / shape[1], hh = task / tiles % shape[1];
    const int64_t b0 = shape[0] == 1 ? 0 : bb, b1 = shape[0] == 1 ? p->batch : bb + 1;
    const int64_t h0 = shape[1] == 1 ? 0 : hh, h1 = shape[1] == 1 ? p->heads_q : hh + 1;
    const int64_t t0 = shape[3] == 1 ? 0 : task % tiles, t1 = shape[3] == 1 ? bias->tiles : t0 + 1;
    for (int64_t tile = t0; tile < t1; tile++)
        for (int64_t b = b0; b < b1; b++)
            for (int64_t h = h0; h < h1; h++) bias_tile(bias, &t, b, h, tile);
}

static void store_bias(const fa_problem *p, const float *sum)
{
    const int64_t *n = p->dbias_shape;
    for (int64_t row = 0; row < n[0] * n[1] * n[2]; row++) {
        char *dst =
            fa_score_address(&p->dbias, row / n[2] / n[1], row / n[2] % n[1], row % n[2], 0);
        for (int64_t j = 0; j < n[3]; j++)
            fa_store_element(dst, p->dbias.dtype, j * p->dbias.stride[3], sum[row * n[3] + j]);
    }
}

/* Tiles of the longest sequence. With paged keys n_k is no length: it only says how far apart the
 * table's rows are. */
static int64_t max_tiles(const fa_backward_job *job)
{
    int64_t max = 0;
    for (int64_t b = 0; b < job->p->batch; b++)
        max = fa_max(max, job->tiles.first[b + 1] - job->tiles.first[b]);
    return max;
}

static fa_status find_dbias(const fa_backward_job *job, int threads)
{
    const fa_problem *p = job->p;
    const int64_t *n = p->dbias_shape;
    fa_bias_job bias = {job, NULL, max_tiles(job)};
    const size_t bytes = fa_bytes(n[0] * n[1] * n[2] * n[3], sizeof(float));
    bias.sum = fa_allocate(bytes);
    if (!bias.sum) return FA_ERROR_MEMORY;
    memset(bias.sum, 0, bytes);
    const int64_t tasks = bytes ? n[0] * n[1] * (n[3] == 1 ? 1 : bias.tiles) : 0;
    fa_team_run(threads, tasks, 1, bias_task, &bias);
    store_bias(p, bias.sum);
    free(bias.sum);
    return FA_OK;
}

/* --- The whole --- */

/* A tile of keys of one head. It may wait for tiles before it; they have been started (team.h). */
static void run_task(void *context, int64_t index, int thread)
{
    const fa_backward_job *job = context;
    const fa_problem *p = job->p;
    fa_backward_tiles t = thread_tiles(job, thread);
    const int64_t task = index / p->heads_kv, b = fa_tasks_sequence(&job->tiles, task);
    backward_task(job, &t, b, task - job->tiles.first[b], index % p->heads_kv);
}

/* The block of queries and head that index counts to. */
typedef void fa_block_function(const fa_backward_job *job, int64_t b, int64_t n, int64_t head);

typedef struct fa_block_job {
    const fa_backward_job *job;
    fa_block_function *f;
} fa_block_job;

static void run_block(void *context, int64_t index, int thread)
{
    const fa_block_job *blocks = context;
    const fa_backward_job *job = blocks->job;
    const int64_t heads = job->p->heads_q, task = index / heads;
    const int64_t b = fa_tasks_sequence(&job->blocks, task);
    (void)thread;
    blocks->f(job, b, task - job->blocks.first[b], index % heads);
}

static void each_block(const fa_backward_job *job, fa_block_function *f, int threads)
{
    const int64_t total = fa_tasks_total(&job->blocks) * job->p->heads_q;
    fa_block_job blocks = {job, f};
    fa_team_run(threads, total, fa_team_share(threads, total), run_block, &blocks);
}

static fa_status run(fa_backward_job *job, int threads)
{
    const fa_problem *p = job->p;
    fa_status status = FA_OK;
    clear_unused(p);
    each_block(job, find_delta, threads);
    if (p->dq.data || p->dk.data || p->dv.data)
        fa_team_run(threads, fa_tasks_total(&job->tiles) * p->heads_kv, 1, run_task, job);
    if (p->dq.data) each_block(job, store_dq, threads);
    if (job->paged) status = sum_pages(job, threads);
    for (int64_t h = 0; p->dsinks && h < p->heads_q; h++) find_dsink(job, h);
    if (status == FA_OK && p->dbias.data) status = find_dbias(job, threads);
    return status;
}

/* The largest number of items in any part of the work. */
static int64_t max_items(const fa_backward_job *job)
{
    const fa_problem *p = job->p;
    const int64_t blocks = fa_tasks_total(&job->blocks) * p->heads_q;
    const int64_t tiles = fa_tasks_total(&job->tiles) * p->heads_q;
    const int64_t rows = p->block_table ? p->blocks_k * p->rows_k : 0;
    return fa_max(fa_max(blocks, tiles), rows);
}

/* Allocates everything that a call needs, and reserves its threads. Failed allocations stay NULL. */
static bool allocate(fa_backward_job *job, int *threads)
{
    const fa_problem *p = job->p;
    if (!fa_tasks_make(&job->tiles, p, k_tile_count) ||
        !fa_tasks_make(&job->blocks, p, q_block_count) ||
        !fa_tasks_make(&job->rows, p, padded_rows))
        return false;
    *threads = fa_team_reserve((int)fa_min(fa_problem_threads(p), max_items(job)));
    const int64_t blocks = fa_tasks_total(&job->blocks) * p->heads_q;
    const int64_t dq_rows = p->dq.data ? fa_times(fa_tasks_total(&job->rows), p->heads_q) : 0;
    const size_t dq_bytes = fa_bytes(fa_times(dq_rows, job->plan.pitch_d), sizeof(float));
    job->scratch = fa_allocate((size_t)*threads * job->plan.scratch);
    job->delta = fa_allocate(fa_bytes(p->blocks_q * p->heads_q * p->rows_q, sizeof(float)));
    job->dq = fa_allocate(dq_bytes);
    job->turn = fa_allocate(fa_bytes(blocks, sizeof *job->turn));
    const bool paged = p->block_table && (p->dk.data || p->dv.data);
    if (paged) {
        if (!fa_tasks_make(&job->keys, p, key_count)) return false;
        const int64_t rows = fa_times(fa_tasks_total(&job->keys), p->heads_kv);
        job->paged = fa_allocate(fa_bytes(fa_times(rows, p->d + p->d_v), sizeof(float)));
    }
    if (!job->scratch || !job->delta || !job->dq || !job->turn || (paged && !job->paged))
        return false;
    memset(job->dq, 0, dq_bytes);
    for (int64_t n = 0; n < blocks; n++) atomic_init(&job->turn[n], 0);
    return true;
}

fa_status FA_NAME(backward)(const fa_problem *p)
{
    fa_backward_job job = {.p = p, .plan = make_plan(p)};
    int threads = 1;
    const fa_status status = allocate(&job, &threads) ? run(&job, threads) : FA_ERROR_MEMORY;
    free(job.paged);
    free(job.turn);
    free(job.dq);
    free(job.delta);
    free(job.scratch);
    free(job.keys.first);
    free(job.rows.first);
    free(job.blocks.first);
    free(job.tiles.first);
    return status;
}

void FA_NAME(describe_backward)(const fa_problem *p, char *text, size_t size)
{
    const fa_backward_plan plan = make_plan(p);
    snprintf(text, size, "float32 products, query tile %d, key tile %d, deterministic", FA_Q_BLOCK,
             (int)plan.k_tile);
}
