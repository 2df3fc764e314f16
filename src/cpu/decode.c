/*
 * Decode on the CPU: few queries against many keys, limited by memory (Flash-Decoding, Dao et al. 2023).
 *
 * The keys of each (sequence, key/value head) are cut into splits of a fixed length. A task loops over
 * one split for all the query rows that share it, and reads keys and values once, in place. The partial
 * results of splits are merged in order. Because splits are fixed, no bit depends on threads or batch.
 */
#include <stdio.h>

#include "isa.h"
#include "logits.h"
#include "softmax.h"
#include "work.h"

enum {
    FA_SPLIT = 2048,              /* keys of a task */
    FA_DECODE_TILE = 32,          /* keys whose scores are held at a time */
    FA_KEYS = 4,                  /* keys taken together */
    FA_TURN = 8,                  /* keys of K, then values of V, in turn */
    FA_ROWS = 4,                  /* query rows taken together */
    FA_WIDE = 8,                  /* vectors of one row taken together */
    FA_AHEAD = 16,                /* keys fetched ahead */
    FA_AHEAD_HEADS = 8,           /* the same, where a task has several heads */
    S_PITCH = FA_DECODE_TILE + VL /* floats between rows of scores; whole vectors may run over */
};

/* Prevents unrolling of a loop over rows: unrolled, loads would be too far apart for the prefetchers. */
#define FA_ROLLED _Pragma("GCC unroll 1")

/* Rows of partial results: unnormalized output, running maximum and sum. */
typedef struct fa_partial {
    float *out;     /* rows x columns */
    float *maximum; /* rows */
    float *sum;     /* rows */
} fa_partial;

/* How rows of keys or values are read. */
typedef enum fa_reading {
    FA_READ_FLOAT,  /* float32: as it is, or what was converted to it in the stage */
    FA_READ_HALF,   /* float16, widened */
    FA_READ_BFLOAT, /* bfloat16, widened: even and odd elements apart, see element_position */
    FA_READ_PAIRS   /* bfloat16 keys for bfloat16 queries: dot products of pairs */
} fa_reading;

/* One of k and v, with how it is read. */
typedef struct fa_source {
    const fa_view *view, *scale; /* scale: without data: 1 */
    int64_t width, padded;       /* padded to pairs of vectors */
    int64_t row, head;           /* bytes of a row, and from one head to the next */
    bool direct;                 /* rows are read where they lie */
    fa_reading reading;
} fa_source;

typedef struct fa_decode_plan {
    fa_source k, v;
    int64_t group;  /* query heads per key/value head */
    int64_t heads;  /* key/value heads per task */
    size_t scratch; /* bytes per thread */
} fa_decode_plan;

/* One thread's scratch. */
typedef struct fa_decode_tiles {
    float *q;      /* rows x depth */
    float *s;      /* rows x FA_DECODE_TILE: the weights of one tile */
    float *next;   /* the same: the scores of the next */
    float *stage;  /* FA_KEYS rows of keys or values that need converting */
    float *keep;   /* FA_DECODE_TILE */
    float *update; /* rows x columns: one tile's contribution */
} fa_decode_tiles;

static fa_decode_tiles carve(const fa_decode_plan *plan, char *scratch, size_t *bytes)
{
    const int64_t rows = FA_DECODE_ROWS, depth = plan->k.padded, columns = plan->v.padded;
    fa_decode_tiles t;
    char *start = scratch;
    t.q = fa_take(&scratch, rows * depth, 4);
    t.s = fa_take(&scratch, rows * S_PITCH, 4);
    t.next = fa_take(&scratch, rows * S_PITCH, 4);
    t.stage = fa_take(&scratch, FA_KEYS * fa_max(depth, columns), 4);
    t.keep = fa_take(&scratch, FA_DECODE_TILE, 4);
    t.update = fa_take(&scratch, fa_max(rows * columns, depth), 4);
    *bytes = (size_t)(scratch - start);
    return t;
}

/* Rows are read in place if they are whole pairs of vectors of a type that loads can convert. */
static fa_source make_source(const fa_view *view, const fa_view *scale, int64_t width)
{
    const int64_t size = (int64_t)fa_dtype_size(view->dtype);
    fa_source source = {view,         scale,
                        width,        fa_round_up(width, 2 * VL),
                        width * size, view->stride[2] * size,
                        false,        FA_READ_FLOAT};
    source.direct = width == source.padded && size > 1;
    if (source.direct && view->dtype == FA_FLOAT16) source.reading = FA_READ_HALF;
    if (source.direct && view->dtype == FA_BFLOAT16) source.reading = FA_READ_BFLOAT;
    return source;
}

static fa_decode_plan make_plan(const fa_problem *p)
{
    fa_decode_plan plan = {make_source(&p->k, &p->k_scale, p->d),
                           make_source(&p->v, &p->v_scale, p->d_v), p->heads_q / p->heads_kv, 1, 0};
#ifdef FA_ISA_AVX512_BF16
    if (p->q.dtype == FA_BFLOAT16 && plan.k.reading == FA_READ_BFLOAT)
        plan.k.reading = FA_READ_PAIRS;
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

/* Two vectors of a row. */
FA_INLINE void load_two(const fa_reading reading, const char *row, int64_t c, vf x[2])
{
    if (reading == FA_READ_BFLOAT) {
        v_load_bfloat_pairs((const uint16_t *)(const void *)row + c, &x[0], &x[1]);
    } else if (reading == FA_READ_HALF) {
        x[0] = v_load_half((const uint16_t *)(const void *)row + c);
        x[1] = v_load_half((const uint16_t *)(const void *)row + c + VL);
    } else {
        x[0] = v_load((const float *)(const void *)row + c);
        x[1] = v_load((const float *)(const void *)row + c + VL);
    }
}

/* The position of element c in the order in which rows are read. Even and odd elements of bfloat16
 * are separated, as that is the cheapest way to widen them; everything they are combined with has
 * the same order. */
FA_INLINE int64_t element_position(fa_reading reading, int64_t c)
{
    const int64_t in_pair = c % (2 * VL);
    return reading == FA_READ_BFLOAT ? c - in_pair + in_pair % 2 * VL + in_pair / 2 : c;
}

/* sum + the products of elements c .. c + 2*VL of a query and a key. */
FA_INLINE vf multiply_two(const fa_reading reading, const float *q, const char *key, int64_t c,
                          vf sum)
{
#ifdef FA_ISA_AVX512_BF16
    if (reading == FA_READ_PAIRS) {
        const __m512i x = _mm512_loadu_si512((const uint16_t *)(const void *)q + c);
        const __m512i k = _mm512_loadu_si512((const uint16_t *)(const void *)key + c);
        return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)k);
    }
#endif
    vf k[2];
    load_two(reading, key, c, k);
    return v_fma(v_load(q + c + VL), k[1], v_fma(v_load(q + c), k[0], sum));
}

/* Scores of four keys for `rows` queries; reading and rows are constants where this is inlined. */
FA_INLINE void score_tile(const fa_reading reading, const int rows, const char *const key[FA_KEYS],
                          const float *q, int64_t depth, float *s)
{
    vf acc[FA_ROWS][FA_KEYS];
    for (int r = 0; r < rows; r++)
        for (int e = 0; e < FA_KEYS; e++) acc[r][e] = v_zero();
    for (int64_t c = 0; c < depth; c += 2 * VL) {
        FA_UNROLL
        for (int e = 0; e < FA_KEYS; e++) {
            FA_UNROLL
            for (int r = 0; r < rows; r++)
                acc[r][e] = multiply_two(reading, q + r * depth, key[e], c, acc[r][e]);
        }
    }
    for (int r = 0; r < rows; r++) v_sum4(acc[r], s + r * S_PITCH);
}

/* The same for one query, key after key: few instructions, in the order of memory, so that the
 * processor runs far ahead and its prefetchers see plain streams. */
FA_INLINE void score_one(const fa_reading reading, const char *const key[FA_KEYS], const float *q,
                         int64_t depth, float *s)
{
    vf acc[FA_KEYS];
    FA_ROLLED
    for (int e = 0; e < FA_KEYS; e++) {
        int64_t c = 0;
        acc[e] = v_zero();
        for (; c + FA_WIDE * VL <= depth; c += FA_WIDE * VL) {
            FA_UNROLL
            for (int i = 0; i < FA_WIDE; i += 2)
                acc[e] = multiply_two(reading, q, key[e], c + i * VL, acc[e]);
        }
        for (; c < depth; c += 2 * VL) acc[e] = multiply_two(reading, q, key[e], c, acc[e]);
    }
    v_sum4(acc, s);
}

FA_INLINE void score_rows(const fa_reading reading, const char *const key[FA_KEYS], const float *q,
                          int64_t depth, int64_t rows, float *s)
{
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4)
        score_tile(reading, 4, key, q + r * depth, depth, s + r * S_PITCH);
    if (r + 2 <= rows) {
        score_tile(reading, 2, key, q + r * depth, depth, s + r * S_PITCH);
        r += 2;
    }
    if (r < rows) score_one(reading, key, q + r * depth, depth, s + r * S_PITCH);
}

/* update += weights * values for four values; reading and rows are constants where this is inlined. */
FA_INLINE void value_tile(const fa_reading reading, const int rows,
                          const char *const value[FA_KEYS], const float *s, float *update,
                          int64_t columns)
{
    for (int64_t c = 0; c < columns; c += 2 * VL) {
        vf x[FA_KEYS][2];
        FA_UNROLL
        for (int e = 0; e < FA_KEYS; e++) load_two(reading, value[e], c, x[e]);
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

/* Columns c .. c + n*VL of the same for one row, value after value. */
FA_INLINE void value_columns(const fa_reading reading, const int n,
                             const char *const value[FA_KEYS], const float *s, float *update,
                             int64_t c)
{
    vf sum[FA_WIDE];
    FA_UNROLL
    for (int i = 0; i < n; i++) sum[i] = v_load(update + c + i * VL);
    FA_ROLLED
    for (int e = 0; e < FA_KEYS; e++) {
        const vf w = v_set1(s[e]);
        FA_UNROLL
        for (int i = 0; i < n; i += 2) {
            vf x[2];
            load_two(reading, value[e], c + i * VL, x);
            sum[i] = v_fma(w, x[0], sum[i]);
            sum[i + 1] = v_fma(w, x[1], sum[i + 1]);
        }
    }
    FA_UNROLL
    for (int i = 0; i < n; i++) v_store(update + c + i * VL, sum[i]);
}

FA_INLINE void value_one(const fa_reading reading, const char *const value[FA_KEYS], const float *s,
                         float *update, int64_t columns)
{
    int64_t c = 0;
    for (; c + FA_WIDE * VL <= columns; c += FA_WIDE * VL)
        value_columns(reading, FA_WIDE, value, s, update, c);
    for (; c < columns; c += 2 * VL) value_columns(reading, 2, value, s, update, c);
}

FA_INLINE void value_rows(const fa_reading reading, const char *const value[FA_KEYS],
                          const float *s, float *update, int64_t rows, int64_t columns)
{
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4)
        value_tile(reading, 4, value, s + r * S_PITCH, update + r * columns, columns);
    if (r + 2 <= rows) {
        value_tile(reading, 2, value, s + r * S_PITCH, update + r * columns, columns);
        r += 2;
    }
    if (r < rows) value_one(reading, value, s + r * S_PITCH, update + r * columns, columns);
}

/* Where the rows of a tile of k or v lie for a task's first head, and those to fetch meanwhile. */
typedef struct fa_rows {
    const char *at[FA_DECODE_TILE + FA_AHEAD + FA_KEYS];
    const char *scale[FA_DECODE_TILE + FA_KEYS]; /* if there are any */
} fa_rows;

/* The rows from key j0 on. Rows outside of `keys` are seen by no query and are not read: the
 * nearest row inside is used instead. */
static void find_rows(const fa_problem *p, const fa_source *source, const fa_sequence *s, int64_t b,
                      int64_t head, fa_range keys, int64_t j0, fa_rows *rows)
{
    const int64_t end = (int64_t)(sizeof rows->at / sizeof rows->at[0]);
    const char *first = fa_key_row(p, source->view, s, b, keys.lo, head);
    const int64_t step = source->view->stride[1] * (int64_t)fa_dtype_size(source->view->dtype);
    for (int64_t n = 0; n < end; n++) {
        const int64_t j = fa_max(keys.lo, fa_min(j0 + n, keys.hi - 1));
        rows->at[n] = p->block_table ? fa_key_row(p, source->view, s, b, j, head)
                                     : first + (j - keys.lo) * step;
    }
    const int64_t scales = source->scale->data ? FA_DECODE_TILE + FA_KEYS : 0;
    for (int64_t n = 0; n < scales; n++) {
        const int64_t j = fa_max(keys.lo, fa_min(j0 + n, keys.hi - 1));
        rows->scale[n] = fa_key_row(p, source->scale, s, b, j, head);
    }
}

/* The scale of row i for the task's n-th head. */
static float row_scale(const fa_source *source, const fa_rows *rows, int64_t i, int64_t n)
{
    if (!source->scale->data) return 1.0f;
    return ((const float *)(const void *)rows->scale[i])[n * source->scale->stride[2]];
}

/* The four rows from number i on, of the task's n-th head. */
static void take_rows(const fa_source *source, const fa_rows *rows, int64_t i, int64_t n,
                      float *stage, const char *taken[FA_KEYS])
{
    for (int e = 0; e < FA_KEYS; e++) {
        taken[e] = rows->at[i + e] + n * source->head;
        if (source->direct) continue;
        float *row = stage + e * source->padded;
        fa_load_scaled_row(row, taken[e], source->view->dtype, source->width, source->padded,
                           row_scale(source, rows, i + e, n));
        taken[e] = (const char *)row;
    }
}

/* Prefetches the rows FA_AHEAD keys further on. If it were more, rows a power of two apart would
 * evict each other from the cache. */
static void fetch_ahead(const fa_decode_plan *plan, const fa_source *source, const char *const *at,
                        int64_t n)
{
    const int64_t ahead = plan->heads > 1 ? FA_AHEAD_HEADS : FA_AHEAD;
    for (int e = 0; e < FA_KEYS; e++) {
        const char *row = at[ahead + e] + n * source->head;
        const char *line = row - ((uintptr_t)row & 63);
        for (; line < row + source->row; line += 64) __builtin_prefetch(line, 0, 2);
    }
}

/* Scores of four keys of the task's n-th head. */
static void score_keys(const fa_decode_plan *plan, const fa_decode_tiles *t, const fa_rows *k,
                       int64_t i, int64_t n, int64_t rows, float *s)
{
    const int64_t depth = plan->k.padded;
    const float *q = t->q + n * rows * depth;
    const char *key[FA_KEYS];
    fetch_ahead(plan, &plan->k, k->at + i, n);
    take_rows(&plan->k, k, i, n, t->stage, key);
    s += n * rows * S_PITCH;
    switch (plan->k.reading) {
    case FA_READ_FLOAT: score_rows(FA_READ_FLOAT, key, q, depth, rows, s); break;
    case FA_READ_HALF: score_rows(FA_READ_HALF, key, q, depth, rows, s); break;
    case FA_READ_BFLOAT: score_rows(FA_READ_BFLOAT, key, q, depth, rows, s); break;
    case FA_READ_PAIRS: score_rows(FA_READ_PAIRS, key, q, depth, rows, s); break;
    }
}

/* Adds four weighted values of the task's n-th head. */
static void add_values(const fa_decode_plan *plan, const fa_decode_tiles *t, const fa_rows *v,
                       int64_t i, int64_t n, int64_t rows, const float *s)
{
    const int64_t columns = plan->v.padded;
    float *update = t->update + n * rows * columns;
    const char *value[FA_KEYS];
    fetch_ahead(plan, &plan->v, v->at + i, n);
    take_rows(&plan->v, v, i, n, t->stage, value);
    s += n * rows * S_PITCH;
    if (plan->v.reading == FA_READ_FLOAT)
        value_rows(FA_READ_FLOAT, value, s, update, rows, columns);
    else if (plan->v.reading == FA_READ_HALF)
        value_rows(FA_READ_HALF, value, s, update, rows, columns);
    else value_rows(FA_READ_BFLOAT, value, s, update, rows, columns);
}

/* A weight of 0 must not meet a value of NaN or infinity. The `share` rows of the task's head number n. */
static void add_values_skip_zeros(const fa_decode_plan *plan, const fa_decode_tiles *t,
                                  const fa_rows *v, int64_t count, int64_t n, int64_t share)
{
    const fa_source *source = &plan->v;
    for (int64_t r = n * share; r < (n + 1) * share; r++) {
        float *update = t->update + r * source->padded;
        memset(update, 0, (size_t)source->padded * sizeof *update);
        for (int64_t j = 0; j < count; j++) {
            const float w = t->s[r * S_PITCH + j];
            const char *value = v->at[j] + n * source->head;
            const float scale = row_scale(source, v, j, n);
            for (int64_t c = 0; w != 0.0f && c < source->width; c++)
                update[element_position(source->reading, c)] +=
                    w * (scale * fa_element(value, source->view->dtype, c));
        }
    }
}

/* Head by head: the bits of a head must not depend on the other heads of its task. */
static void mend_update(const fa_decode_plan *plan, const fa_decode_tiles *t, const fa_rows *v,
                        int64_t count, int64_t heads, int64_t share)
{
    const int64_t numbers = share * plan->v.padded;
    for (int64_t n = 0; n < heads; n++)
        if (!fa_all_finite(t->update + n * numbers, numbers))
            add_values_skip_zeros(plan, t, v, count, n, share);
}

/* Restores the order of a partial result's columns. */
static void order_columns(const fa_decode_plan *plan, const fa_decode_tiles *t, int64_t rows,
                          const fa_partial *partial)
{
    const int64_t columns = plan->v.padded;
    for (int64_t r = 0; plan->v.reading == FA_READ_BFLOAT && r < rows; r++) {
        float *out = partial->out + r * columns;
        memcpy(t->update, out, (size_t)columns * sizeof *out);
        for (int64_t c = 0; c < columns; c++)
            out[c] = t->update[element_position(FA_READ_BFLOAT, c)];
    }
}

/* out = alpha * out + update. */
static void apply_update(const fa_decode_plan *plan, const fa_decode_tiles *t, const float *alpha,
                         int64_t rows, const fa_partial *partial)
{
    const int64_t columns = plan->v.padded;
    for (int64_t r = 0; r < rows; r++) {
        const vf a = v_set1(alpha[r]);
        float *out = partial->out + r * columns;
        const float *update = t->update + r * columns;
        for (int64_t c = 0; c < columns; c += VL)
            v_store(out + c, v_fma(a, v_load(out + c), v_load(update + c)));
    }
}

/* Softmax of all rows over a tile of keys [j0, j0 + count). */
static void softmax_tile(const fa_problem *p, const fa_decode_plan *plan, const fa_decode_tiles *t,
                         const fa_sequence *s, int64_t b, int64_t head0, int64_t rows, int64_t j0,
                         int64_t count, const fa_partial *partial, float *alpha)
{
    const int64_t last = fa_round_up(count, VL);
    for (int64_t r = 0; r < rows; r++) {
        float *x = t->s + r * S_PITCH;
        fa_row row = {b, head0 + r / s->n_q, r % s->n_q, {0, 0}, s};
        const float scale = fa_effective_scale(p, b, row.head / plan->group);
        const bool general = fa_is_general(p, scale);
        row.visible = fa_visible(p, s, row.query);
        const int64_t from = fa_min(fa_max(row.visible.lo - j0, 0), count);
        const int64_t to = fa_max(fa_min(row.visible.hi - j0, count), from);
        if (general && to > from)
            fa_scores_to_logits(p, &row, scale, x + from, j0 + from, to - from, NULL);
        alpha[r] = fa_softmax_row(x, (fa_span){0, last, from, to}, general ? 1.0f : scale,
                                  partial->maximum + r, partial->sum + r);
        if (!p->dropout_threshold) continue;
        fa_dropout_factors(p, &row, t->keep, j0, count);
        for (int64_t c = 0; c < count; c++) x[c] *= t->keep[c];
    }
}

/* Loads the queries, in the order in which the keys are read, and empties the partial result. */
static void start_task(const fa_problem *p, const fa_decode_plan *plan, const fa_decode_tiles *t,
                       const fa_sequence *s, int64_t head0, int64_t rows, const fa_partial *partial)
{
    const int64_t depth = plan->k.padded;
    for (int64_t r = 0; r < rows; r++) {
        const char *q = fa_view_row(&p->q, s->block_q, s->start_q + r % s->n_q, head0 + r / s->n_q);
        float *row = t->q + r * depth;
        if (plan->k.reading == FA_READ_PAIRS) {
            memcpy(row, q, (size_t)p->d * 2);
        } else {
            fa_load_row(t->update, q, p->q.dtype, p->d, depth);
            for (int64_t c = 0; c < depth; c++)
                row[element_position(plan->k.reading, c)] = t->update[c];
        }
        partial->maximum[r] = -INFINITY;
        partial->sum[r] = 0;
    }
    memset(partial->out, 0, (size_t)(rows * plan->v.padded) * sizeof(float));
}

/* Scores of keys [j, j + FA_TURN) of a tile of `count`, head after head, as heads lie in memory. */
static void score_turn(const fa_decode_plan *plan, const fa_decode_tiles *t, const fa_rows *k,
                       int64_t j, int64_t count, int64_t heads, int64_t share)
{
    for (int64_t i = j; i < fa_min(j + FA_TURN, count); i += FA_KEYS)
        for (int64_t n = 0; n < heads; n++) score_keys(plan, t, k, i, n, share, t->next + i);
}

/* Adds the values [j, j + FA_TURN) of a tile in the same order. */
static void value_turn(const fa_decode_plan *plan, const fa_decode_tiles *t, const fa_rows *v,
                       int64_t j, int64_t count, int64_t heads, int64_t share)
{
    for (int64_t i = j; i < fa_min(j + FA_TURN, count); i += FA_KEYS)
        for (int64_t n = 0; n < heads; n++) add_values(plan, t, v, i, n, share, t->s + i);
}

/* One split of the keys for all rows of some heads of a sequence. The scores of a tile are computed
 * while the values of the previous tile are added: FA_TURN keys, then FA_TURN values, and so on, so
 * that both streams of memory never pause. The softmax comes after the first FA_TURN keys, so it does
 * not wait for the scores just computed, and loads continue in the meantime. */
static void decode_task(const fa_problem *p, const fa_decode_plan *plan, fa_decode_tiles *t,
                        int64_t b, const fa_sequence *s, fa_range heads, fa_range keys,
                        const fa_partial *partial)
{
    const int64_t share = plan->group * s->n_q, n_heads = heads.hi - heads.lo;
    const int64_t rows = n_heads * share, head0 = heads.lo * plan->group;
    int64_t k_count, v_count = 0; /* keys of this tile, and of the one before */
    start_task(p, plan, t, s, head0, rows, partial);
    if (keys.hi <= keys.lo) return;
    for (int64_t j0 = keys.lo / FA_DECODE_TILE * FA_DECODE_TILE; j0 < keys.hi || v_count > 0;
         j0 += FA_DECODE_TILE, v_count = k_count) {
        const int64_t v0 = j0 - FA_DECODE_TILE;
        float alpha[FA_DECODE_ROWS];
        fa_rows k, v;
        k_count = fa_max(0, fa_min(FA_DECODE_TILE, keys.hi - j0));
        find_rows(p, &plan->k, s, b, heads.lo, keys, j0, &k);
        find_rows(p, &plan->v, s, b, heads.lo, keys, v0, &v);
        score_turn(plan, t, &k, 0, k_count, n_heads, share);
        if (v_count > 0) {
            softmax_tile(p, plan, t, s, b, head0, rows, v0, v_count, partial, alpha);
            memset(t->update, 0, (size_t)(rows * plan->v.padded) * sizeof(float));
        }
        value_turn(plan, t, &v, 0, v_count, n_heads, share);
        for (int64_t j = FA_TURN; j < FA_DECODE_TILE; j += FA_TURN) {
            score_turn(plan, t, &k, j, k_count, n_heads, share);
            value_turn(plan, t, &v, j, v_count, n_heads, share);
        }
        if (v_count > 0) {
            mend_update(plan, t, &v, v_count, n_heads, share);
            apply_update(plan, t, alpha, rows, partial);
        }
        float *scores = t->next;
        t->next = t->s;
        t->s = scores;
    }
    order_columns(plan, t, rows, partial);
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
    memset(out, 0, (size_t)plan->v.padded * sizeof *out);
    for (int64_t n = 0; n < splits; n++) {
        const float top = part->maximum[n * rows], part_sum = part->sum[n * rows];
        if (top == -INFINITY && part_sum == 0.0f) continue;
        const float weight = expf((top - maximum) * unit);
        sum += part_sum * weight;
        for (int64_t c = 0; c < plan->v.padded; c++)
            out[c] += weight * part->out[n * rows * plan->v.padded + c];
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

/* The data that both phases share. The partial rows of (sequence, split, head) are in this order. */
typedef struct fa_decode_job {
    const fa_problem *p;
    fa_decode_plan plan;
    fa_tasks splits, partials;
    fa_partial partial;
    char *scratch;
} fa_decode_job;

/* The partial rows of a split of a sequence from a key/value head on. */
static fa_partial split_rows(const fa_decode_job *job, const fa_sequence *s, int64_t b,
                             int64_t split, int64_t head_kv)
{
    const int64_t rows = s->n_q * job->plan.group, heads = job->p->heads_kv;
    return partial_row(&job->partial,
                       job->partials.first[b] * heads + (split * heads + head_kv) * rows,
                       job->plan.v.padded);
}

/* Tasks per split. */
static int64_t head_tasks(const fa_decode_job *job)
{
    return (job->p->heads_kv + job->plan.heads - 1) / job->plan.heads;
}

static void run_split(void *context, int64_t index, int thread)
{
    const fa_decode_job *job = context;
    const fa_problem *p = job->p;
    size_t bytes;
    fa_decode_tiles t =
        carve(&job->plan, job->scratch + (size_t)thread * job->plan.scratch, &bytes);
    const int64_t split = index / head_tasks(job), head = index % head_tasks(job) * job->plan.heads;
    const int64_t b = fa_tasks_sequence(&job->splits, split);
    const int64_t n = split - job->splits.first[b];
    const fa_sequence s = fa_problem_sequence(p, b);
    const fa_range all = all_visible(p, &s);
    const int64_t start = (all.lo / FA_SPLIT + n) * FA_SPLIT;
    const fa_range keys = {fa_max(all.lo, start), fa_min(all.hi, start + FA_SPLIT)};
    const fa_range heads = {head, fa_min(head + job->plan.heads, p->heads_kv)};
    const fa_partial partial = split_rows(job, &s, b, n, head);
    decode_task(p, &job->plan, &t, b, &s, heads, keys, &partial);
}

/* One of batch * heads_kv. */
static void merge_pair(void *context, int64_t pair, int thread)
{
    const fa_decode_job *job = context;
    const fa_problem *p = job->p;
    const int64_t b = pair / p->heads_kv, head_kv = pair % p->heads_kv;
    float *out = (float *)(void *)(job->scratch + (size_t)thread * job->plan.scratch);
    const fa_sequence s = fa_problem_sequence(p, b);
    const int64_t splits = job->splits.first[b + 1] - job->splits.first[b];
    const int64_t rows = s.n_q * job->plan.group;
    const fa_partial first = split_rows(job, &s, b, 0, head_kv);
    for (int64_t r = 0; splits > 0 && r < rows; r++) {
        const fa_partial part = partial_row(&first, r, job->plan.v.padded);
        merge_row(p, &job->plan, &s, b, head_kv * job->plan.group + r / s.n_q, r % s.n_q, &part,
                  splits, rows * p->heads_kv, out);
    }
}

static void run(fa_decode_job *job, int threads)
{
    const int64_t tasks = fa_tasks_total(&job->splits) * head_tasks(job);
    const int64_t pairs = job->p->batch * job->p->heads_kv;
    fa_team_run(threads, tasks, 1, run_split, job);
    fa_team_run(threads, pairs, fa_team_share(threads, pairs), merge_pair, job);
}

/* Whether heads lie side by side, and rows of one head do not. */
static bool interleaved(const fa_problem *p, const fa_source *source)
{
    const int64_t *stride = source->view->stride;
    return stride[2] == source->width && (p->block_table || stride[1] != source->width);
}

/* The largest number of query rows that share a key/value head in a sequence that is decoded. */
static int64_t max_rows_per_head(const fa_decode_job *job)
{
    int64_t max = 1;
    for (int64_t b = 0; b < job->p->batch; b++) {
        const fa_sequence s = fa_problem_sequence(job->p, b);
        if (fa_is_decode(job->p, &s)) max = fa_max(max, s.n_q * job->plan.group);
    }
    return max;
}

/* Heads that are neighbours in memory go into one task, which then reads in the order of memory. There
 * must still be enough tasks for all threads. No bit of a result depends on this. */
static void choose_heads(fa_decode_job *job, int threads)
{
    if (!interleaved(job->p, &job->plan.k) || !interleaved(job->p, &job->plan.v)) return;
    job->plan.heads = fa_min(job->p->heads_kv, FA_DECODE_ROWS / max_rows_per_head(job));
    while (job->plan.heads > 1 &&
           fa_tasks_total(&job->splits) * head_tasks(job) < (int64_t)2 * threads)
        job->plan.heads /= 2;
}

fa_status FA_NAME(decode)(const fa_problem *p)
{
    fa_decode_job job = {p, make_plan(p), {0}, {0}, {0}, NULL};
    fa_status status = FA_ERROR_MEMORY;
    if (fa_tasks_make(&job.splits, p, split_count) &&
        fa_tasks_make(&job.partials, p, partial_count)) {
        status = FA_OK;
        const int64_t rows = fa_tasks_total(&job.partials) * p->heads_kv;
        if (rows > 0) {
            const size_t scalars = fa_lines(fa_bytes(rows, sizeof(float)));
            const int wanted = fa_problem_threads(p);
            choose_heads(&job, wanted);
            const int64_t tasks = fa_tasks_total(&job.splits) * head_tasks(&job);
            const int threads = fa_team_reserve((int)fa_min(wanted, tasks));
            const size_t tiles = fa_lines((size_t)threads * job.plan.scratch);
            const size_t values = fa_bytes(fa_times(rows, job.plan.v.padded), sizeof(float));
            job.scratch = fa_allocate(tiles + 2 * scalars + values);
            if (job.scratch) {
                char *results = job.scratch + tiles;
                job.partial.maximum = (float *)(void *)results;
                job.partial.sum = (float *)(void *)(results + scalars);
                job.partial.out = (float *)(void *)(results + 2 * scalars);
                run(&job, threads);
            } else {
                status = FA_ERROR_MEMORY;
            }
        }
    }
    free(job.scratch);
    free(job.partials.first);
    free(job.splits.first);
    return status;
}

void FA_NAME(describe_decode)(const fa_problem *p, char *text, size_t size)
{
    const fa_decode_plan plan = make_plan(p);
    snprintf(text, size, "%s, splits of %d keys, %d rows share each key",
             plan.k.reading == FA_READ_PAIRS ? "bfloat16 scores, float32 values"
                                             : "float32 products",
             FA_SPLIT, (int)(p->n_q * plan.group));
}
