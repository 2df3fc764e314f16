/*
 * Decode on the CPU: few queries against many keys, bound by memory (Flash-Decoding, Dao et al. 2023).
 *
 * The keys of each (sequence, key/value head) are cut into splits of a fixed length; a task walks over
 * one split for all the query rows that share it, reading keys and values where they lie, once. The
 * splits' partial results are merged in order. Fixed splits: no bit depends on threads or batch.
 */
#include <stdio.h>

#include "isa.h"
#include "logits.h"
#include "softmax.h"
#include "work.h"

enum {
    FA_SPLIT = 1024,     /* keys of a task */
    FA_DECODE_TILE = 32, /* keys whose scores are held at a time: they and their values fit in L1 */
    FA_KEYS = 4,         /* keys and rows of the register tile of scores */
    FA_ROWS = 4,
    FA_WIDE = 4,                  /* vectors of the register tile of values */
    S_PITCH = FA_DECODE_TILE + VL /* floats between rows of scores; whole vectors may run over */
};

/* Rows of partial results: unnormalized output, running maximum and sum. */
typedef struct fa_partial {
    float *out;     /* rows x columns */
    float *maximum; /* rows */
    float *sum;     /* rows */
} fa_partial;

typedef struct fa_decode_plan {
    int64_t depth, columns; /* d and d_v padded to whole vectors */
    int64_t group;
    size_t scratch; /* bytes per thread */
} fa_decode_plan;

/* One thread's scratch. */
typedef struct fa_decode_tiles {
    float *q;      /* FA_DECODE_ROWS + 3 rows x depth */
    float *s;      /* the same rows x FA_DECODE_TILE */
    float *stage;  /* FA_DECODE_TILE x max(depth, columns): rows that need converting */
    float *keep;   /* FA_DECODE_TILE */
    float *update; /* FA_DECODE_ROWS + 3 rows x columns: one tile's contribution */
} fa_decode_tiles;

static fa_decode_tiles carve(const fa_decode_plan *plan, char *scratch, size_t *bytes)
{
    const int64_t rows = FA_DECODE_ROWS + FA_ROWS - 1;
    fa_decode_tiles t;
    char *start = scratch;
    t.q = fa_take(&scratch, rows * plan->depth, 4);
    t.s = fa_take(&scratch, rows * S_PITCH, 4);
    t.stage = fa_take(&scratch, FA_DECODE_TILE * fa_max(plan->depth, plan->columns), 4);
    t.keep = fa_take(&scratch, FA_DECODE_TILE, 4);
    t.update = fa_take(&scratch, rows * plan->columns, 4);
    *bytes = (size_t)(scratch - start);
    return t;
}

static fa_decode_plan make_plan(const fa_problem *p)
{
    fa_decode_plan plan = {fa_round_up(p->d, VL), fa_round_up(p->d_v, VL), p->heads_q / p->heads_kv,
                           0};
    static char nowhere[1];
    carve(&plan, nowhere, &plan.scratch);
    return plan;
}

/* The keys that any of a sequence's queries may see. */
static fa_range all_visible(const fa_problem *p, const fa_sequence *s)
{
    if (s->n_q == 0) return (fa_range){0, 0};
    return (fa_range){fa_visible(p, s, 0).lo, fa_visible(p, s, s->n_q - 1).hi};
}

/* At least one split, even if it is empty, so that every row is written. */
static int64_t split_count(const fa_problem *p, const fa_sequence *s)
{
    if (s->n_q == 0 || !fa_is_decode(p, s)) return 0;
    fa_range keys = all_visible(p, s);
    return fa_max(1, (keys.hi + FA_SPLIT - 1) / FA_SPLIT - keys.lo / FA_SPLIT);
}

FA_INLINE vf load_vector(fa_dtype dtype, const char *row, int64_t c)
{
    if (dtype == FA_FLOAT32) return v_load((const float *)(const void *)row + c);
    if (dtype == FA_BFLOAT16) return v_load_bfloat((const uint16_t *)(const void *)row + c);
    return v_load_half((const uint16_t *)(const void *)row + c);
}

/* Rows that are needed next: while one tile of keys is scored its values are fetched, and while those
 * are added the next keys, so that memory never waits for arithmetic. */
typedef struct fa_ahead {
    const char *row[FA_DECODE_TILE];
    int64_t count, bytes;
} fa_ahead;

FA_INLINE void fetch_row(const fa_ahead *ahead, int64_t j)
{
    if (!ahead || j >= ahead->count) return;
    const char *row = ahead->row[j];
    for (int64_t at = 0; at < ahead->bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
    __builtin_prefetch(row + ahead->bytes - 1, 0, 2); /* rows need not start with a cache line */
}

/* Scores of four keys for `rows` queries; dtype and rows are constants where this is inlined. */
FA_INLINE void score_tile(const fa_dtype dtype, const int rows, const char *const key[FA_KEYS],
                          const float *q, int64_t depth, float *s)
{
    vf acc[FA_ROWS][FA_KEYS];
    for (int r = 0; r < rows; r++)
        for (int e = 0; e < FA_KEYS; e++) acc[r][e] = v_zero();
    for (int64_t c = 0; c < depth; c += VL) {
        vf k[FA_KEYS];
        FA_UNROLL
        for (int e = 0; e < FA_KEYS; e++) k[e] = load_vector(dtype, key[e], c);
        FA_UNROLL
        for (int r = 0; r < rows; r++) {
            const vf x = v_load(q + r * depth + c);
            FA_UNROLL
            for (int e = 0; e < FA_KEYS; e++) acc[r][e] = v_fma(x, k[e], acc[r][e]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int e = 0; e < FA_KEYS; e++) s[r * S_PITCH + e] = v_sum(acc[r][e]);
}

FA_INLINE void score_rows(const fa_dtype dtype, const char *const key[FA_KEYS], const float *q,
                          int64_t depth, int64_t rows, float *s)
{
    for (int64_t r = 0; r < rows; r += FA_ROWS) {
        if (rows - r == 1) score_tile(dtype, 1, key, q + r * depth, depth, s + r * S_PITCH);
        else if (rows - r == 2) score_tile(dtype, 2, key, q + r * depth, depth, s + r * S_PITCH);
        else score_tile(dtype, FA_ROWS, key, q + r * depth, depth, s + r * S_PITCH);
    }
}

/* Values of one strip of columns: update = weights * values, wide vectors by rows. */
FA_INLINE void value_tile(const fa_dtype dtype, const int rows, const int wide,
                          const char *const *value, int64_t keys, int64_t column, const float *s,
                          float *update, int64_t columns, const fa_ahead *ahead)
{
    vf acc[FA_ROWS][8];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < wide; v++) acc[r][v] = v_zero();
    for (int64_t j = 0; j < keys; j++) {
        vf x[8];
        fetch_row(ahead, j);
        FA_UNROLL
        for (int v = 0; v < wide; v++) x[v] = load_vector(dtype, value[j], column + v * VL);
        FA_UNROLL
        for (int r = 0; r < rows; r++) {
            const vf w = v_set1(s[r * S_PITCH + j]);
            FA_UNROLL
            for (int v = 0; v < wide; v++) acc[r][v] = v_fma(w, x[v], acc[r][v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < wide; v++) v_store(update + r * columns + column + v * VL, acc[r][v]);
}

FA_INLINE void value_rows(const fa_dtype dtype, const char *const *value, int64_t keys,
                          const float *s, float *update, int64_t rows, int64_t columns,
                          const fa_ahead *ahead)
{
    for (int64_t r = 0; r < rows; r += FA_ROWS) {
        const float *w = s + r * S_PITCH;
        float *u = update + r * columns;
        const bool one = rows - r == 1;
        for (int64_t c = 0; c < columns;) {
            const int64_t vectors = (columns - c) / VL;
            const fa_ahead *next = r == 0 && c == 0 ? ahead : NULL;
            if (one && vectors >= 8)
                value_tile(dtype, 1, 8, value, keys, c, w, u, columns, next), c += 8 * VL;
            else if (one && vectors >= 4)
                value_tile(dtype, 1, 4, value, keys, c, w, u, columns, next), c += 4 * VL;
            else if (one) value_tile(dtype, 1, 1, value, keys, c, w, u, columns, next), c += VL;
            else if (vectors >= FA_WIDE)
                value_tile(dtype, FA_ROWS, FA_WIDE, value, keys, c, w, u, columns, next),
                    c += FA_WIDE * VL;
            else value_tile(dtype, FA_ROWS, 1, value, keys, c, w, u, columns, next), c += VL;
        }
    }
}

/* Whether rows can be read where they lie: whole vectors of a type that loads convert. */
static bool in_place(fa_dtype dtype, int64_t n) { return n % VL == 0 && dtype != FA_FLOAT8_E4M3; }

/* The addresses of rows [j0 + skip, j0 + count) of k or v. */
static void find_rows(const fa_problem *p, const fa_view *view, int64_t width, const fa_sequence *s,
                      int64_t b, int64_t head, int64_t j0, int64_t skip, int64_t count,
                      fa_ahead *found)
{
    for (int64_t j = skip; j < count; j++) found->row[j] = fa_key_row(p, view, s, b, j0 + j, head);
    for (int64_t j = 0; j < skip && skip < count; j++) found->row[j] = found->row[skip];
    found->count = count;
    found->bytes = width * (int64_t)fa_dtype_size(view->dtype);
}

/* The rows as the products read them: where they lie, or converted into stage. Returns their type. */
static fa_dtype stage_rows(const fa_view *view, int64_t width, const fa_ahead *found, float *stage,
                           const char **row)
{
    const bool direct = in_place(view->dtype, width);
    const int64_t padded = fa_round_up(width, VL);
    for (int64_t j = 0; j < found->count; j++) {
        row[j] = found->row[j];
        if (direct) continue;
        fa_load_row(stage + j * padded, found->row[j], view->dtype, width, padded);
        row[j] = (const char *)(stage + j * padded);
    }
    return direct ? view->dtype : FA_FLOAT32;
}

/* s[r][j] = q_r . k_j for a tile of keys. */
static void score_keys(const fa_decode_plan *plan, fa_decode_tiles *t, fa_dtype dtype,
                       const char *const *row, int64_t count, int64_t rows, const fa_ahead *ahead)
{
    for (int64_t j = 0; j < count; j += FA_KEYS) {
        const char *key[FA_KEYS];
        for (int e = 0; e < FA_KEYS; e++) {
            key[e] = row[fa_min(j + e, count - 1)];
            fetch_row(ahead, j + e);
        }
        if (dtype == FA_FLOAT32) score_rows(FA_FLOAT32, key, t->q, plan->depth, rows, t->s + j);
        else if (dtype == FA_BFLOAT16)
            score_rows(FA_BFLOAT16, key, t->q, plan->depth, rows, t->s + j);
        else score_rows(FA_FLOAT16, key, t->q, plan->depth, rows, t->s + j);
    }
}

/* A weight of 0 must not meet a value of NaN or infinity. */
static void value_skip_zeros(fa_dtype dtype, const char *const *value, int64_t keys, const float *s,
                             float *update, int64_t rows, int64_t columns)
{
    for (int64_t r = 0; r < rows; r++) {
        memset(update + r * columns, 0, (size_t)columns * sizeof *update);
        for (int64_t j = 0; j < keys; j++) {
            const float w = s[r * S_PITCH + j];
            for (int64_t c = 0; w != 0.0f && c < columns; c++)
                update[r * columns + c] += w * fa_element(value[j], dtype, c);
        }
    }
}

static void add_values(const fa_decode_plan *plan, fa_decode_tiles *t, fa_dtype dtype,
                       const char *const *row, int64_t count, int64_t rows, const fa_ahead *ahead,
                       const float *alpha, fa_partial *partial)
{
    if (dtype == FA_FLOAT32)
        value_rows(FA_FLOAT32, row, count, t->s, t->update, rows, plan->columns, ahead);
    else if (dtype == FA_BFLOAT16)
        value_rows(FA_BFLOAT16, row, count, t->s, t->update, rows, plan->columns, ahead);
    else value_rows(FA_FLOAT16, row, count, t->s, t->update, rows, plan->columns, ahead);
    if (!fa_all_finite(t->update, rows * plan->columns))
        value_skip_zeros(dtype, row, count, t->s, t->update, rows, plan->columns);
    for (int64_t r = 0; r < rows; r++) {
        const vf a = v_set1(alpha[r]);
        float *out = partial->out + r * plan->columns;
        for (int64_t c = 0; c < plan->columns; c += VL)
            v_store(out + c, v_fma(a, v_load(out + c), v_load(t->update + r * plan->columns + c)));
    }
}

/* Softmax of all rows over a tile of keys [j0, j0 + count). */
static void softmax_tile(const fa_problem *p, fa_decode_tiles *t, const fa_sequence *s, int64_t b,
                         int64_t head0, int64_t rows, int64_t j0, int64_t count, float scale,
                         fa_partial *partial, float *alpha)
{
    const bool general = fa_is_general(p, scale);
    const int64_t last = fa_round_up(count, VL);
    for (int64_t r = 0; r < rows; r++) {
        float *x = t->s + r * S_PITCH;
        fa_row row = {b, head0 + r / s->n_q, r % s->n_q, {0, 0}, s};
        row.visible = fa_visible(p, s, row.query);
        const int64_t from = fa_min(fa_max(row.visible.lo - j0, 0), count);
        const int64_t to = fa_max(fa_min(row.visible.hi - j0, count), from);
        if (general && to > from)
            fa_scores_to_logits(p, &row, scale, x + from, j0 + from, to - from, NULL);
        alpha[r] = fa_softmax_row(x, 0, last, from, to, general ? 1.0f : scale,
                                  partial->maximum + r, partial->sum + r);
        if (!p->dropout_threshold) continue;
        fa_dropout_factors(p, &row, t->keep, j0, count);
        for (int64_t c = 0; c < count; c++) x[c] *= t->keep[c];
    }
}

/* One split of the keys for all rows of a (sequence, key/value head). */
static void decode_task(const fa_problem *p, const fa_decode_plan *plan, fa_decode_tiles *t,
                        int64_t b, const fa_sequence *s, int64_t head_kv, fa_range keys,
                        fa_partial *partial)
{
    const int64_t rows = plan->group * s->n_q, head0 = head_kv * plan->group;
    const float scale = fa_effective_scale(p, b, head_kv);
    for (int64_t r = 0; r < rows; r++) {
        fa_load_row(t->q + r * plan->depth,
                    fa_view_row(&p->q, s->block_q, s->start_q + r % s->n_q, head0 + r / s->n_q),
                    p->q.dtype, p->d, plan->depth);
        partial->maximum[r] = -INFINITY;
        partial->sum[r] = 0;
    }
    memset(partial->out, 0, (size_t)(rows * plan->columns) * sizeof(float));
    for (int64_t r = rows; r < rows + FA_ROWS - 1; r++) {
        memset(t->q + r * plan->depth, 0, (size_t)plan->depth * sizeof(float));
        memset(t->s + r * S_PITCH, 0, S_PITCH * sizeof(float));
    }
    if (keys.hi <= keys.lo) return;
    int64_t j0 = keys.lo / FA_DECODE_TILE * FA_DECODE_TILE;
    int64_t skip = keys.lo - j0; /* keys of the first tile that nobody sees are not read */
    fa_ahead k, v;
    find_rows(p, &p->k, p->d, s, b, head_kv, j0, skip, fa_min(FA_DECODE_TILE, keys.hi - j0), &k);
    for (; j0 < keys.hi; j0 += FA_DECODE_TILE, skip = 0) {
        const char *row[FA_DECODE_TILE];
        float alpha[FA_DECODE_ROWS];
        const int64_t count = k.count, next = j0 + FA_DECODE_TILE;
        find_rows(p, &p->v, p->d_v, s, b, head_kv, j0, skip, count, &v);
        fa_dtype dtype = stage_rows(&p->k, p->d, &k, t->stage, row);
        score_keys(plan, t, dtype, row, count, rows, &v);
        softmax_tile(p, t, s, b, head0, rows, j0, count, scale, partial, alpha);
        find_rows(p, &p->k, p->d, s, b, head_kv, next, 0, fa_min(FA_DECODE_TILE, keys.hi - next),
                  &k);
        dtype = stage_rows(&p->v, p->d_v, &v, t->stage, row);
        add_values(plan, t, dtype, row, count, rows, &k, alpha, partial);
    }
}

static fa_partial partial_row(const fa_partial *p, int64_t row, int64_t columns)
{
    return (fa_partial){p->out + row * columns, p->maximum + row, p->sum + row};
}

/* Merges a row's splits in order and writes out and lse; its parts lie `rows` rows apart. */
static void merge_row(const fa_problem *p, const fa_decode_plan *plan, const fa_sequence *s,
                      int64_t b, int64_t head, int64_t query, const fa_partial *part,
                      int64_t splits, int64_t rows, float *out)
{
    const int64_t head_kv = head / plan->group;
    const float scale = fa_effective_scale(p, b, head_kv);
    const float unit = fa_is_general(p, scale) ? 1.0f : scale;
    float maximum = -INFINITY, sum = 0;
    for (int64_t n = 0; n < splits; n++) maximum = fmaxf(maximum, part->maximum[n * rows]);
    memset(out, 0, (size_t)plan->columns * sizeof *out);
    for (int64_t n = 0; n < splits; n++) {
        const float top = part->maximum[n * rows], part_sum = part->sum[n * rows];
        if (top == -INFINITY && part_sum == 0.0f) continue;
        const float weight = expf((top - maximum) * unit);
        sum += part_sum * weight;
        for (int64_t c = 0; c < plan->columns; c++)
            out[c] += weight * part->out[n * rows * plan->columns + c];
    }
    float lse,
        factor = fa_softmax_finish(maximum, sum, unit, p->sinks ? p->sinks[head] : -INFINITY, &lse);
    fa_write_row(&p->out, fa_view_row(&p->out, s->block_q, s->start_q + query, head), out, factor,
                 fa_value_descale(p, b, head_kv), p->d_v);
    if (p->lse) p->lse[fa_lse_offset(p, s, head) + query] = lse;
}

/* Rows of partial results per key/value head. */
static int64_t partial_count(const fa_problem *p, const fa_sequence *s)
{
    return split_count(p, s) * s->n_q * (p->heads_q / p->heads_kv);
}

/* All that the two phases share. The partial rows of (sequence, head, split) follow one another in that
 * order. */
typedef struct fa_decode_job {
    const fa_problem *p;
    fa_decode_plan plan;
    fa_tasks splits, partials;
    fa_partial partial;
    char *scratch;
} fa_decode_job;

static void run_split(const fa_decode_job *job, int64_t index)
{
    const fa_problem *p = job->p;
    size_t bytes;
    fa_decode_tiles t =
        carve(&job->plan, job->scratch + (size_t)fa_thread_index() * job->plan.scratch, &bytes);
    const int64_t task = index / p->heads_kv, head_kv = index % p->heads_kv;
    const int64_t b = fa_tasks_sequence(&job->splits, task);
    const int64_t n = task - job->splits.first[b],
                  splits = job->splits.first[b + 1] - job->splits.first[b];
    const fa_sequence s = fa_problem_sequence(p, b);
    const fa_range all = all_visible(p, &s);
    const int64_t start = (all.lo / FA_SPLIT + n) * FA_SPLIT;
    const fa_range keys = {fa_max(all.lo, start), fa_min(all.hi, start + FA_SPLIT)};
    const int64_t rows = s.n_q * job->plan.group;
    fa_partial partial = partial_row(
        &job->partial, job->partials.first[b] * p->heads_kv + (head_kv * splits + n) * rows,
        job->plan.columns);
    decode_task(p, &job->plan, &t, b, &s, head_kv, keys, &partial);
}

static void merge_sequence(const fa_decode_job *job, int64_t b, int64_t head_kv, float *out)
{
    const fa_problem *p = job->p;
    const fa_sequence s = fa_problem_sequence(p, b);
    const int64_t splits = job->splits.first[b + 1] - job->splits.first[b];
    const int64_t rows = s.n_q * job->plan.group;
    for (int64_t r = 0; splits > 0 && r < rows; r++) {
        fa_partial part = partial_row(
            &job->partial, job->partials.first[b] * p->heads_kv + head_kv * splits * rows + r,
            job->plan.columns);
        merge_row(p, &job->plan, &s, b, head_kv * job->plan.group + r / s.n_q, r % s.n_q, &part,
                  splits, rows, out);
    }
}

static void run(const fa_decode_job *job, int threads)
{
    const fa_problem *p = job->p;
    const int64_t tasks = fa_tasks_total(&job->splits) * p->heads_kv;
    const int64_t pairs = p->batch * p->heads_kv;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t index = 0; index < tasks; index++) run_split(job, index);
#pragma omp for schedule(static)
        for (int64_t pair = 0; pair < pairs; pair++)
            merge_sequence(
                job, pair / p->heads_kv, pair % p->heads_kv,
                (float *)(void *)(job->scratch + (size_t)fa_thread_index() * job->plan.scratch));
    }
}

fa_status FA_NAME(decode)(const fa_problem *p)
{
    fa_decode_job job = {p, make_plan(p), {0}, {0}, {0}, NULL};
    const int threads = fa_problem_threads(p);
    fa_status status = FA_ERROR_MEMORY;
    char *results = NULL;
    if (fa_tasks_make(&job.splits, p, split_count) &&
        fa_tasks_make(&job.partials, p, partial_count)) {
        status = FA_OK;
        const int64_t rows = fa_tasks_total(&job.partials) * p->heads_kv;
        if (rows > 0) {
            const size_t scalars = fa_lines((size_t)rows * sizeof(float));
            job.scratch = fa_allocate((size_t)threads * job.plan.scratch);
            results = fa_allocate((size_t)(rows * job.plan.columns) * sizeof(float) + 2 * scalars);
            if (job.scratch && results) {
                job.partial.maximum = (float *)(void *)results;
                job.partial.sum = (float *)(void *)(results + scalars);
                job.partial.out = (float *)(void *)(results + 2 * scalars);
                run(&job, threads);
            } else {
                status = FA_ERROR_MEMORY;
            }
        }
    }
    free(results);
    free(job.scratch);
    free(job.partials.first);
    free(job.splits.first);
    return status;
}

void FA_NAME(describe_decode)(const fa_problem *p, char *text, size_t size)
{
    snprintf(text, size, "float32 products, splits of %d keys, %d rows share each key", FA_SPLIT,
             (int)(p->n_q * (p->heads_q / p->heads_kv)));
}
