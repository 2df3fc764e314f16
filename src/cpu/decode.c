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
    FA_SPLIT = 1024,              /* keys of a task */
    FA_DECODE_TILE = 32,          /* keys whose scores are held at a time */
    FA_KEYS = 4,                  /* keys taken together, of K and of V in turn */
    FA_ROWS = 4,                  /* query rows taken together */
    FA_AHEAD = 16,                /* keys fetched ahead */
    S_PITCH = FA_DECODE_TILE + VL /* floats between rows of scores; whole vectors may run over */
};

/* Rows of partial results: unnormalized output, running maximum and sum. */
typedef struct fa_partial {
    float *out;     /* rows x columns */
    float *maximum; /* rows */
    float *sum;     /* rows */
} fa_partial;

typedef struct fa_decode_plan {
    int64_t depth, columns; /* d and d_v padded to pairs of vectors */
    int64_t group;
    bool pairs;     /* scores by bfloat16 dot products */
    size_t scratch; /* bytes per thread */
} fa_decode_plan;

/* One thread's scratch. Rows have FA_ROWS - 1 to spare, for whole register tiles. */
typedef struct fa_decode_tiles {
    float *q;        /* rows x depth */
    float *s;        /* rows x FA_DECODE_TILE: the weights of one tile */
    float *next;     /* the same: the scores of the next */
    float *stage[2]; /* FA_DECODE_TILE rows of keys and of values that need converting */
    float *keep;     /* FA_DECODE_TILE */
    float *update;   /* rows x columns: one tile's contribution */
} fa_decode_tiles;

static fa_decode_tiles carve(const fa_decode_plan *plan, char *scratch, size_t *bytes)
{
    const int64_t rows = FA_DECODE_ROWS + FA_ROWS - 1;
    fa_decode_tiles t;
    char *start = scratch;
    t.q = fa_take(&scratch, rows * plan->depth, 4);
    t.s = fa_take(&scratch, rows * S_PITCH, 4);
    t.next = fa_take(&scratch, rows * S_PITCH, 4);
    t.stage[0] = fa_take(&scratch, FA_DECODE_TILE * plan->depth, 4);
    t.stage[1] = fa_take(&scratch, FA_DECODE_TILE * plan->columns, 4);
    t.keep = fa_take(&scratch, FA_DECODE_TILE, 4);
    t.update = fa_take(&scratch, fa_max(rows * plan->columns, plan->depth), 4);
    *bytes = (size_t)(scratch - start);
    return t;
}

static fa_decode_plan make_plan(const fa_problem *p)
{
    fa_decode_plan plan = {fa_round_up(p->d, 2 * VL), fa_round_up(p->d_v, 2 * VL),
                           p->heads_q / p->heads_kv, false, 0};
#ifdef FA_ISA_AVX512_BF16
    plan.pairs = p->q.dtype == FA_BFLOAT16 && p->k.dtype == FA_BFLOAT16 && p->d % (2 * VL) == 0;
#endif
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

/* Two vectors of a row. Of bfloat16 they are the even and the odd elements, which cost least to widen:
 * whatever such rows meet is kept in that order (see place). */
FA_INLINE void load_two(const fa_dtype dtype, const char *row, int64_t c, vf x[2])
{
    if (dtype == FA_BFLOAT16) {
        v_load_bfloat_pairs((const uint16_t *)(const void *)row + c, &x[0], &x[1]);
    } else if (dtype == FA_FLOAT32) {
        x[0] = v_load((const float *)(const void *)row + c);
        x[1] = v_load((const float *)(const void *)row + c + VL);
    } else {
        x[0] = v_load_half((const uint16_t *)(const void *)row + c);
        x[1] = v_load_half((const uint16_t *)(const void *)row + c + VL);
    }
}

/* Where element c stands in the order in which rows of this type are read. */
FA_INLINE int64_t place(fa_dtype dtype, int64_t c)
{
    const int64_t in_pair = c % (2 * VL);
    return dtype == FA_BFLOAT16 ? c - in_pair + in_pair % 2 * VL + in_pair / 2 : c;
}

/* Scores of four keys for `rows` queries; dtype and rows are constants where this is inlined. */
FA_INLINE void score_tile(const fa_dtype dtype, const int rows, const char *const key[FA_KEYS],
                          const float *q, int64_t depth, float *s)
{
    vf acc[FA_ROWS][FA_KEYS];
    for (int r = 0; r < rows; r++)
        for (int e = 0; e < FA_KEYS; e++) acc[r][e] = v_zero();
    for (int64_t c = 0; c < depth; c += 2 * VL) {
        vf k[FA_KEYS][2];
        FA_UNROLL
        for (int e = 0; e < FA_KEYS; e++) load_two(dtype, key[e], c, k[e]);
        FA_UNROLL
        for (int r = 0; r < rows; r++) {
            const vf x[2] = {v_load(q + r * depth + c), v_load(q + r * depth + c + VL)};
            FA_UNROLL
            for (int e = 0; e < FA_KEYS; e++)
                acc[r][e] = v_fma(x[1], k[e][1], v_fma(x[0], k[e][0], acc[r][e]));
        }
    }
    for (int r = 0; r < rows; r++) v_sum4(acc[r], s + r * S_PITCH);
}

/* The same for one query, key after key: rows that follow one another are then read in the order of
 * memory, as hardware prefetching likes. (Measured: 15% faster so; scattered rows 20% slower.) */
FA_INLINE void score_one(const fa_dtype dtype, const char *const key[FA_KEYS], const float *q,
                         int64_t depth, float *s)
{
    vf acc[FA_KEYS];
    FA_UNROLL
    for (int e = 0; e < FA_KEYS; e++) {
        vf even = v_zero(), odd = v_zero();
        for (int64_t c = 0; c < depth; c += 2 * VL) {
            vf k[2];
            load_two(dtype, key[e], c, k);
            even = v_fma(v_load(q + c), k[0], even);
            odd = v_fma(v_load(q + c + VL), k[1], odd);
        }
        acc[e] = v_add(even, odd);
    }
    v_sum4(acc, s);
}

#ifdef FA_ISA_AVX512_BF16
/* Scores of bfloat16 queries and keys by dot products of pairs. q: rows of 2*depth elements, of which
 * the first half is used. */
FA_INLINE void score_pairs(const int rows, const char *const key[FA_KEYS], const uint16_t *q,
                           int64_t depth, float *s)
{
    vf acc[FA_ROWS][FA_KEYS];
    for (int r = 0; r < rows; r++)
        for (int e = 0; e < FA_KEYS; e++) acc[r][e] = v_zero();
    FA_UNROLL
    for (int e = 0; e < FA_KEYS; e++) {
        for (int64_t c = 0; c < depth; c += 2 * VL) {
            const __m512bh k = (__m512bh)_mm512_loadu_si512(key[e] + 2 * c);
            FA_UNROLL
            for (int r = 0; r < rows; r++) {
                const __m512bh x = (__m512bh)_mm512_loadu_si512(q + r * 2 * depth + c);
                acc[r][e] = _mm512_dpbf16_ps(acc[r][e], x, k);
            }
        }
    }
    for (int r = 0; r < rows; r++) v_sum4(acc[r], s + r * S_PITCH);
}

static void score_all_pairs(const char *const key[FA_KEYS], const float *q, int64_t depth,
                            int64_t rows, float *s)
{
    for (int64_t r = 0; r < rows; r += FA_ROWS) {
        const uint16_t *x = (const uint16_t *)(const void *)(q + r * depth);
        if (rows - r == 1) score_pairs(1, key, x, depth, s + r * S_PITCH);
        else if (rows - r == 2) score_pairs(2, key, x, depth, s + r * S_PITCH);
        else score_pairs(FA_ROWS, key, x, depth, s + r * S_PITCH);
    }
}
#endif

FA_INLINE void score_rows(const fa_dtype dtype, const char *const key[FA_KEYS], const float *q,
                          int64_t depth, int64_t rows, bool scattered, float *s)
{
    for (int64_t r = 0; r < rows; r += FA_ROWS) {
        const float *x = q + r * depth;
        if (rows - r == 1 && scattered) score_tile(dtype, 1, key, x, depth, s + r * S_PITCH);
        else if (rows - r == 1) score_one(dtype, key, x, depth, s + r * S_PITCH);
        else if (rows - r == 2) score_tile(dtype, 2, key, x, depth, s + r * S_PITCH);
        else score_tile(dtype, FA_ROWS, key, x, depth, s + r * S_PITCH);
    }
}

/* update += weights * values for four values; rows is a constant where this is inlined. */
FA_INLINE void value_tile(const fa_dtype dtype, const int rows, const char *const value[FA_KEYS],
                          const float *s, float *update, int64_t columns)
{
    for (int64_t c = 0; c < columns; c += 2 * VL) {
        vf x[FA_KEYS][2];
        FA_UNROLL
        for (int e = 0; e < FA_KEYS; e++) load_two(dtype, value[e], c, x[e]);
        FA_UNROLL
        for (int r = 0; r < rows; r++) {
            float *u = update + r * columns + c;
            vf sum[2] = {v_load(u), v_load(u + VL)};
            FA_UNROLL
            for (int e = 0; e < FA_KEYS; e++) {
                const vf w = v_set1(s[r * S_PITCH + e]);
                sum[0] = v_fma(w, x[e][0], sum[0]);
                sum[1] = v_fma(w, x[e][1], sum[1]);
            }
            v_store(u, sum[0]);
            v_store(u + VL, sum[1]);
        }
    }
}

FA_INLINE void value_rows(const fa_dtype dtype, const char *const value[FA_KEYS], const float *s,
                          float *update, int64_t rows, int64_t columns)
{
    for (int64_t r = 0; r < rows; r += FA_ROWS) {
        if (rows - r == 1)
            value_tile(dtype, 1, value, s + r * S_PITCH, update + r * columns, columns);
        else value_tile(dtype, FA_ROWS, value, s + r * S_PITCH, update + r * columns, columns);
    }
}

/* A tile of rows of k or v: where they lie, where they are read (there, or converted in the stage). */
typedef struct fa_rows {
    const char *at[FA_DECODE_TILE];
    const char *row[FA_DECODE_TILE];
    int64_t first, count; /* the key of row 0; 0 rows: behind the last tile */
    fa_dtype dtype;       /* of what is read */
} fa_rows;

/* One of k and v, with how it is read. */
typedef struct fa_source {
    const fa_view *view;
    int64_t width, padded;
    bool direct;    /* whole pairs of vectors of a type that loads convert: read in place */
    bool scattered; /* rows do not follow one another in memory */
} fa_source;

static fa_source make_source(const fa_problem *p, const fa_view *view, int64_t width)
{
    return (fa_source){view, width, fa_round_up(width, 2 * VL),
                       width % (2 * VL) == 0 && view->dtype != FA_FLOAT8_E4M3,
                       p->block_table || view->stride[1] != width};
}

static fa_dtype read_dtype(const fa_source *source)
{
    return source->direct ? source->view->dtype : FA_FLOAT32;
}

/* Rows [j0 + skip, j0 + count) of a source; the skipped ones, which nobody sees, are not read. */
static void find_rows(const fa_problem *p, const fa_source *source, const fa_sequence *s, int64_t b,
                      int64_t head, int64_t j0, int64_t skip, int64_t count, fa_rows *rows)
{
    rows->first = j0;
    rows->count = fa_max(count, 0);
    rows->dtype = read_dtype(source);
    for (int64_t j = skip; j < count; j++)
        rows->at[j] = fa_key_row(p, source->view, s, b, j0 + j, head);
    for (int64_t j = 0; j < skip && skip < count; j++) rows->at[j] = rows->at[skip];
}

/* Four rows from j on; behind the last one the last again. */
static void take_rows(const fa_source *source, fa_rows *rows, int64_t j, float *stage,
                      const char *taken[FA_KEYS])
{
    for (int e = 0; e < FA_KEYS; e++) {
        const int64_t n = fa_min(j + e, rows->count - 1);
        rows->row[n] = rows->at[n];
        if (!source->direct) {
            float *dst = stage + n * source->padded;
            fa_load_row(dst, rows->at[n], source->view->dtype, source->width, source->padded);
            rows->row[n] = (const char *)dst;
        }
        taken[e] = rows->row[n];
    }
}

/* Fetches the rows FA_AHEAD keys further on: farther, and rows a power of two apart would push each
 * other out of the cache. */
static void fetch_ahead(const fa_problem *p, const fa_source *source, const fa_sequence *s,
                        int64_t b, int64_t head, int64_t j)
{
    const int64_t bytes = source->width * (int64_t)fa_dtype_size(source->view->dtype);
    for (int64_t n = j + FA_AHEAD; n < fa_min(j + FA_AHEAD + FA_KEYS, s->n_k); n++) {
        const char *row = fa_key_row(p, source->view, s, b, n, head);
        const char *line = row - ((uintptr_t)row & 63);
        for (; line < row + bytes; line += 64) __builtin_prefetch(line, 0, 2);
    }
}

static void score_keys(const fa_decode_plan *plan, fa_decode_tiles *t, fa_dtype dtype,
                       const char *const key[FA_KEYS], int64_t j, int64_t rows, bool scattered)
{
#ifdef FA_ISA_AVX512_BF16
    if (plan->pairs) {
        score_all_pairs(key, t->q, plan->depth, rows, t->next + j);
        return;
    }
#endif
    if (dtype == FA_FLOAT32)
        score_rows(FA_FLOAT32, key, t->q, plan->depth, rows, scattered, t->next + j);
    else if (dtype == FA_BFLOAT16)
        score_rows(FA_BFLOAT16, key, t->q, plan->depth, rows, scattered, t->next + j);
    else score_rows(FA_FLOAT16, key, t->q, plan->depth, rows, scattered, t->next + j);
}

static void add_values(const fa_decode_plan *plan, fa_decode_tiles *t, fa_dtype dtype,
                       const char *const value[FA_KEYS], int64_t j, int64_t rows)
{
    if (dtype == FA_FLOAT32)
        value_rows(FA_FLOAT32, value, t->s + j, t->update, rows, plan->columns);
    else if (dtype == FA_BFLOAT16)
        value_rows(FA_BFLOAT16, value, t->s + j, t->update, rows, plan->columns);
    else value_rows(FA_FLOAT16, value, t->s + j, t->update, rows, plan->columns);
}

/* A weight of 0 must not meet a value of NaN or infinity. */
static void add_values_skip_zeros(const fa_decode_plan *plan, fa_decode_tiles *t, const fa_rows *v,
                                  int64_t rows)
{
    memset(t->update, 0, (size_t)(rows * plan->columns) * sizeof(float));
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t j = 0; j < v->count; j++) {
            const float w = t->s[r * S_PITCH + j];
            for (int64_t c = 0; w != 0.0f && c < plan->columns; c++)
                t->update[r * plan->columns + place(v->dtype, c)] +=
                    w * fa_element(v->row[j], v->dtype, c);
        }
    }
}

/* Puts the columns of a partial result back into their order. */
static void order_columns(const fa_decode_plan *plan, const fa_decode_tiles *t, fa_dtype v_dtype,
                          int64_t rows, fa_partial *partial)
{
    for (int64_t r = 0; v_dtype == FA_BFLOAT16 && r < rows; r++) {
        float *out = partial->out + r * plan->columns;
        memcpy(t->update, out, (size_t)plan->columns * sizeof *out);
        for (int64_t c = 0; c < plan->columns; c++) out[c] = t->update[place(v_dtype, c)];
    }
}

/* out = alpha * out + update. */
static void apply_update(const fa_decode_plan *plan, const fa_decode_tiles *t, const float *alpha,
                         int64_t rows, fa_partial *partial)
{
    for (int64_t r = 0; r < rows; r++) {
        const vf a = v_set1(alpha[r]);
        float *out = partial->out + r * plan->columns;
        const float *update = t->update + r * plan->columns;
        for (int64_t c = 0; c < plan->columns; c += VL)
            v_store(out + c, v_fma(a, v_load(out + c), v_load(update + c)));
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

/* Loads the queries, in the order in which the keys are read, and empties the partial result. */
static void start_task(const fa_problem *p, const fa_decode_plan *plan, fa_decode_tiles *t,
                       const fa_sequence *s, int64_t head0, int64_t rows, fa_dtype k_dtype,
                       fa_partial *partial)
{
    for (int64_t r = 0; r < rows; r++) {
        const char *q = fa_view_row(&p->q, s->block_q, s->start_q + r % s->n_q, head0 + r / s->n_q);
        float *row = t->q + r * plan->depth;
        if (plan->pairs) {
            memcpy(row, q, (size_t)p->d * 2);
        } else {
            fa_load_row(t->update, q, p->q.dtype, p->d, plan->depth);
            for (int64_t c = 0; c < plan->depth; c++) row[place(k_dtype, c)] = t->update[c];
        }
        partial->maximum[r] = -INFINITY;
        partial->sum[r] = 0;
    }
    memset(partial->out, 0, (size_t)(rows * plan->columns) * sizeof(float));
    for (int64_t r = rows; r < rows + FA_ROWS - 1; r++) {
        memset(t->q + r * plan->depth, 0, (size_t)plan->depth * sizeof(float));
        memset(t->s + r * S_PITCH, 0, S_PITCH * sizeof(float));
        memset(t->next + r * S_PITCH, 0, S_PITCH * sizeof(float));
    }
}

/* One split of the keys for all rows of a (sequence, key/value head). The scores of a tile are computed
 * while the values of the tile before are added, four keys and four values in turn: two streams that
 * both run without a pause. */
static void decode_task(const fa_problem *p, const fa_decode_plan *plan, fa_decode_tiles *t,
                        int64_t b, const fa_sequence *s, int64_t head_kv, fa_range keys,
                        fa_partial *partial)
{
    const int64_t rows = plan->group * s->n_q, head0 = head_kv * plan->group;
    const float scale = fa_effective_scale(p, b, head_kv);
    const fa_source k_source = make_source(p, &p->k, p->d),
                    v_source = make_source(p, &p->v, p->d_v);
    const int64_t start = keys.lo / FA_DECODE_TILE * FA_DECODE_TILE, skip = keys.lo - start;
    fa_rows k, v = {.count = 0};
    start_task(p, plan, t, s, head0, rows, read_dtype(&k_source), partial);
    if (keys.hi <= keys.lo) return;
    for (int64_t j0 = start; j0 < keys.hi + FA_DECODE_TILE; j0 += FA_DECODE_TILE) {
        const char *taken[FA_KEYS];
        float alpha[FA_DECODE_ROWS];
        find_rows(p, &k_source, s, b, head_kv, j0, j0 == start ? skip : 0,
                  fa_min(FA_DECODE_TILE, keys.hi - j0), &k);
        if (v.count > 0) {
            softmax_tile(p, t, s, b, head0, rows, v.first, v.count, scale, partial, alpha);
            memset(t->update, 0, (size_t)((rows + FA_ROWS - 1) * plan->columns) * sizeof(float));
        }
        for (int64_t j = 0; j < fa_max(k.count, v.count); j += FA_KEYS) {
            if (j < k.count) {
                take_rows(&k_source, &k, j, t->stage[0], taken);
                fetch_ahead(p, &k_source, s, b, head_kv, k.first + j);
                score_keys(plan, t, k.dtype, taken, j, rows, k_source.scattered);
            }
            if (j < v.count) {
                take_rows(&v_source, &v, j, t->stage[1], taken);
                fetch_ahead(p, &v_source, s, b, head_kv, v.first + j);
                add_values(plan, t, v.dtype, taken, j, rows);
            }
        }
        if (v.count > 0) {
            if (!fa_all_finite(t->update, rows * plan->columns))
                add_values_skip_zeros(plan, t, &v, rows);
            apply_update(plan, t, alpha, rows, partial);
        }
        float *scores = t->next;
        t->next = t->s;
        t->s = scores;
        find_rows(p, &v_source, s, b, head_kv, j0, j0 == start ? skip : 0, k.count, &v);
    }
    order_columns(plan, t, read_dtype(&v_source), rows, partial);
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
    const fa_decode_plan plan = make_plan(p);
    snprintf(text, size, "%s, splits of %d keys, %d rows share each key",
             plan.pairs ? "bfloat16 scores, float32 values" : "float32 products", FA_SPLIT,
             (int)(p->n_q * plan.group));
}
