/*
 * Forward on the CPU: FlashAttention-2, algorithm 1 (arXiv:2307.08691, section 3.1).
 *
 * A task is one tile of queries of one head. It loops over tiles of keys. A tile of keys and values is
 * packed once for all queries of the task; values that already have the layout of the products are read
 * in place. Strips of a few queries go through score -> softmax -> value product with their scores in
 * the first-level cache.
 *
 * Tile sizes depend only on the shape of the sequence, not on threads or batch, so the bits of a result
 * do not depend on these either.
 */
#include <stdio.h>

#include "gemm.h"
#include "isa.h"
#include "logits.h"
#include "softmax.h"
#include "work.h"

#define FLOAT_TILES(mr) FA_TILES(float, false, true, mr)
#define FLOAT_NAMES(mr) FA_TILE_NAMES(float, mr)
FA_HEIGHTS(FLOAT_TILES)
#ifdef FA_ISA_AVX512
FA_TILE(float, false, true, 6, 4)
static const fa_tiles float_tiles = {{FA_HEIGHTS(FLOAT_NAMES)}, true, fa_tile_float_6_4};
#else
static const fa_tiles float_tiles = {{FA_HEIGHTS(FLOAT_NAMES)}, true, NULL};
#endif

enum { FA_STRIP = FA_MR }; /* queries */

/* Products of bfloat16: queries of a strip, and what the keys of a product with values are padded to. */
#ifdef FA_ISA_AMX
#include "gemm_amx.h"
enum { FA_BFLOAT_STRIP = FA_AMX_ROWS, FA_BFLOAT_KEYS = 2 * FA_AMX_TILE };
#else
enum { FA_BFLOAT_STRIP = FA_STRIP, FA_BFLOAT_KEYS = 2 };
#endif
_Static_assert((int)FA_BFLOAT_STRIP >= (int)FA_STRIP, "the larger strip");

#if defined(FA_ISA_AVX512_BF16) && !defined(FA_ISA_AMX)
#define BFLOAT_TILES(mr) FA_TILES(bfloat, true, true, mr)
#define BFLOAT_NAMES(mr) FA_TILE_NAMES(bfloat, mr)
FA_HEIGHTS(BFLOAT_TILES)
static const fa_tiles bfloat_tiles = {{FA_HEIGHTS(BFLOAT_NAMES)}, true, NULL};
#endif

/* The shape of the tiles of one problem. */
typedef struct fa_forward_plan {
    bool bfloat;         /* products of bfloat16 pairs instead of floats */
    bool direct;         /* rows of keys are words as the products read them: whole vectors */
    int64_t strip;       /* queries */
    int64_t max_q_rows;  /* of a tile of the longest sequence */
    int64_t depth;       /* words of a query or key row */
    int64_t columns;     /* d_v padded to whole vectors */
    int64_t k_tile;      /* keys, a multiple of FA_NR */
    int64_t pitch_depth; /* words between rows of Q and of staged K */
    int64_t pitch_keys;  /* words between rows of K^T, of S and of its weights */
    int64_t pitch_out;   /* words between rows of V and of O */
    size_t scratch;      /* bytes per thread */
} fa_forward_plan;

/* One thread's scratch. */
typedef struct fa_forward_tiles {
    uint32_t *q;            /* q_tile x depth */
    uint32_t *stage;        /* VL x depth: keys as they come */
    uint32_t *k;            /* depth x k_tile: transposed */
    uint32_t *v;            /* k_tile x columns; bfloat: k_tile/2 x columns, two keys a word */
    float *s;               /* strip x k_tile: scores, then weights */
    uint32_t *weights;      /* bfloat: strip x k_tile/2 */
    float *keep;            /* k_tile: dropout factors */
    float *out;             /* q_tile x columns */
    float *maximum;         /* q_tile */
    float *sum;             /* q_tile */
    const uint32_t *values; /* rows of V as the products read them: v, or the caller's own */
    int64_t pitch_values;   /* words between them */
    bool v_finite;
} fa_forward_tiles;

static bool uses_bfloat(const fa_problem *p)
{
#ifdef FA_ISA_AVX512_BF16
    return p->q.dtype == FA_BFLOAT16 && p->k.dtype == FA_BFLOAT16 && p->v.dtype == FA_BFLOAT16;
#else
    (void)p;
    return false;
#endif
}

static int64_t strip_rows(const fa_problem *p)
{
    return uses_bfloat(p) ? FA_BFLOAT_STRIP : FA_STRIP;
}

enum {
    FA_MAX_Q_TILE = 264,
    FA_LONG_Q_TILE = 512, /* of FA_MANY_QUERIES or more, beside AMX */
    FA_MANY_QUERIES = 2048,
    FA_WIDE_Q_TILE = 96 /* of large head dims */
};

/* Large enough that packing a tile of keys is cheap compared with the products, and small enough for
 * many threads. With AMX, products are so fast that packing takes a larger share. */
static int64_t max_q_tile(const fa_problem *p, int64_t queries)
{
    if (p->d + p->d_v > 512) return FA_WIDE_Q_TILE;
#ifdef FA_ISA_AMX
    if (uses_bfloat(p) && queries >= FA_MANY_QUERIES) return FA_LONG_Q_TILE;
#endif
    (void)queries;
    return FA_MAX_Q_TILE;
}

/* Whole strips. */
static int64_t q_tile_rows(const fa_problem *p, const fa_sequence *s)
{
    const int64_t strip = strip_rows(p), max_rows = max_q_tile(p, s->n_q) / strip * strip;
    int64_t tiles = (s->n_q + max_rows - 1) / max_rows;
    return tiles > 0 ? fa_round_up((s->n_q + tiles - 1) / tiles, strip) : strip;
}

/* Sequences of few queries belong to decode.c. */
static int64_t q_tile_count(const fa_problem *p, const fa_sequence *s)
{
    if (fa_is_decode(p, s)) return 0;
    int64_t rows = q_tile_rows(p, s);
    return (s->n_q + rows - 1) / rows;
}

static fa_forward_tiles carve(const fa_forward_plan *plan, char *scratch, size_t *bytes)
{
    fa_forward_tiles t = {0};
    char *start = scratch;
    const int64_t q_rows = plan->max_q_rows;
    t.q = fa_take(&scratch, q_rows * plan->pitch_depth, 4);
    t.stage = fa_take(&scratch, VL * plan->pitch_depth, 4);
    t.k = fa_take(&scratch, fa_round_up(plan->depth, VL) * plan->pitch_keys, 4);
    t.v = fa_take(&scratch, plan->k_tile * plan->pitch_out, 4);
    t.s = fa_take(&scratch, plan->strip * plan->pitch_keys, 4);
    t.weights = (uint32_t *)(void *)t.s;
    t.keep = fa_take(&scratch, plan->k_tile, 4);
    t.out = fa_take(&scratch, q_rows * plan->pitch_out, 4);
    t.maximum = fa_take(&scratch, q_rows, 4);
    t.sum = fa_take(&scratch, q_rows, 4);
    t.v_finite = true;
    *bytes = (size_t)(scratch - start);
    return t;
}

static fa_forward_plan make_plan(const fa_problem *p)
{
    fa_forward_plan plan = {.bfloat = uses_bfloat(p)};
    plan.strip = strip_rows(p);
    plan.max_q_rows = fa_round_up(max_q_tile(p, p->n_q), plan.strip);
    plan.direct = plan.bfloat ? p->d % (2 * VL) == 0 && p->k.stride[1] % 2 == 0
                              : p->d % VL == 0 && p->k.dtype == FA_FLOAT32 && !p->k_scale.data;
    plan.depth = plan.bfloat ? (p->d + 1) / 2 : p->d;
    plan.columns = fa_round_up(p->d_v, VL);
    plan.k_tile = p->d + p->d_v <= 256 ? 256 : p->d + p->d_v <= 512 ? 128 : 64;
    plan.pitch_depth = fa_pitch(plan.depth);
    plan.pitch_keys = fa_pitch(plan.k_tile);
    plan.pitch_out = fa_pitch(plan.columns);
    static char nowhere[1];
    carve(&plan, nowhere, &plan.scratch);
    return plan;
}

/* A row of q or k as words: floats, times the scale, or raw bfloat16 padded to an even count. */
static void load_words(const fa_forward_plan *plan, uint32_t *dst, const char *src, fa_dtype dtype,
                       int64_t d, float scale)
{
    const int64_t padded = fa_round_up(plan->depth, VL);
    if (!plan->bfloat) {
        fa_load_scaled_row((float *)(void *)dst, src, dtype, d, padded, scale);
        return;
    }
    dst[plan->depth - 1] = 0;
    memcpy(dst, src, (size_t)d * 2);
    memset(dst + plan->depth, 0, (size_t)(padded - plan->depth) * 4);
}

static void load_queries(const fa_problem *p, const fa_forward_plan *plan, fa_forward_tiles *t,
                         const fa_sequence *s, int64_t head, int64_t i0, int64_t rows)
{
    for (int64_t r = 0; r < rows; r++)
        load_words(plan, t->q + r * plan->pitch_depth,
                   fa_view_row(&p->q, s->block_q, s->start_q + i0 + r, head), p->q.dtype, p->d,
                   1.0f);
    for (int64_t r = rows; r < fa_round_up(rows, plan->strip); r++)
        memset(t->q + r * plan->pitch_depth, 0, (size_t)plan->pitch_depth * 4);
    for (int64_t r = 0; r < rows; r++) {
        t->maximum[r] = -INFINITY;
        t->sum[r] = 0;
    }
    memset(t->out, 0, (size_t)(fa_round_up(rows, plan->strip) * plan->pitch_out) * 4);
}

/* Keys j .. j + VL, zeros for those outside of `keys`, as rows of words *pitch apart: where they lie or
 * in the stage. */
static const uint32_t *key_rows(const fa_problem *p, const fa_forward_plan *plan,
                                const fa_forward_tiles *t, const fa_sequence *s, int64_t b,
                                int64_t head, int64_t j, fa_range keys, int64_t *pitch)
{
    const bool one_page = !p->block_table || j / p->rows_k == (j + VL - 1) / p->rows_k;
    if (plan->direct && one_page && j >= keys.lo && j + VL <= keys.hi) {
        *pitch = p->k.stride[1] / (plan->bfloat ? 2 : 1);
        return (const uint32_t *)(const void *)fa_key_row(p, &p->k, s, b, j, head);
    }
    for (int64_t e = 0; e < VL; e++) {
        uint32_t *row = t->stage + e * plan->pitch_depth;
        if (j + e >= keys.lo && j + e < keys.hi)
            load_words(plan, row, fa_key_row(p, &p->k, s, b, j + e, head), p->k.dtype, p->d,
                       fa_key_scale(p, &p->k_scale, s, b, j + e, head));
        else memset(row, 0, (size_t)plan->pitch_depth * 4);
    }
    *pitch = plan->pitch_depth;
    return t->stage;
}

/* Packs `keys` of the tile at j0 into the transposed tile, zeros around them up to whole strips of
 * FA_NR. */
static void load_keys(const fa_problem *p, const fa_forward_plan *plan, fa_forward_tiles *t,
                      const fa_sequence *s, int64_t b, int64_t head, int64_t j0, fa_range keys)
{
    const int64_t first = (keys.lo - j0) / FA_NR * FA_NR;
    const int64_t last = fa_round_up(keys.hi - j0, FA_NR);
    for (int64_t c = first; c < last; c += VL) {
        int64_t pitch;
        const uint32_t *rows = key_rows(p, plan, t, s, b, head, j0 + c, keys, &pitch);
        fa_transpose(t->k + c, plan->pitch_keys, rows, pitch, VL, fa_round_up(plan->depth, VL));
    }
}

/* Two rows of bfloat16 (either may be NULL: zeros) as one row of pairs. Says whether all are finite. */
static bool interleave(uint32_t *dst, const char *low, const char *high, int64_t n, int64_t padded)
{
    const uint16_t *a = (const uint16_t *)(const void *)low;
    const uint16_t *b = (const uint16_t *)(const void *)high;
    uint32_t bad = 0;
    int64_t done = 0;
#ifdef FA_ISA_AVX512_BF16
    if (a && b) bad = v_pair_bfloats(dst, a, b, n, &done);
#endif
    for (int64_t i = done; a && b && i < n; i++) {
        uint32_t word = (uint32_t)a[i] | (uint32_t)b[i] << 16;
        bad |= (uint32_t)((word & 0x7f80u) == 0x7f80u) |
               (uint32_t)((word & 0x7f800000u) == 0x7f800000u);
        dst[i] = word;
    }
    for (int64_t i = 0; !(a && b) && i < n; i++) {
        uint32_t word = a ? a[i] : b ? (uint32_t)b[i] << 16 : 0;
        bad |= (uint32_t)((word & 0x7f80u) == 0x7f80u) |
               (uint32_t)((word & 0x7f800000u) == 0x7f800000u);
        dst[i] = word;
    }
    for (int64_t i = n; i < padded; i++) dst[i] = 0;
    return !bad;
}

/* Whether rows of V are words as the products with floats read them: whole vectors. */
static bool values_are_vectors(const fa_problem *p, const fa_forward_plan *plan)
{
    return !plan->bfloat && p->v.dtype == FA_FLOAT32 && p->d_v % VL == 0 && !p->v_scale.data;
}

/* Rows of V from keys.lo on if the products can read them in place, else NULL. Rows that are far apart
 * are packed: in place they would cost address translations and share cache sets. */
static const float *values_in_place(const fa_problem *p, const fa_forward_plan *plan,
                                    const fa_sequence *s, int64_t b, int64_t head, fa_range keys)
{
    const int64_t pitch = p->v.stride[1];
    if (!values_are_vectors(p, plan) || p->block_table) return NULL;
    if (pitch % VL != 0 || pitch < p->d_v || pitch > 2 * p->d_v) return NULL;
    const char *row = fa_key_row(p, &p->v, s, b, keys.lo, head);
    return (uintptr_t)row % sizeof(vf) == 0 ? (const float *)(const void *)row : NULL;
}

/* Copies rows first .. last of the tile, zeros for keys outside of `keys`. Says whether all numbers are
 * finite. */
static bool copy_values(const fa_problem *p, const fa_forward_plan *plan, fa_forward_tiles *t,
                        const fa_sequence *s, int64_t b, int64_t head, int64_t j0, int64_t first,
                        int64_t last, fa_range keys)
{
    vf seen[2] = {v_zero(), v_zero()};
    for (int64_t c = first; c < last; c++) {
        float *dst = (float *)(void *)(t->v + c * plan->pitch_out);
        if (j0 + c < keys.lo || j0 + c >= keys.hi) {
            memset(dst, 0, (size_t)p->d_v * 4);
            continue;
        }
        const char *row = fa_key_row(p, &p->v, s, b, j0 + c, head);
        fa_copy_seen(dst, (const float *)(const void *)row, p->d_v, seen);
    }
    return v_sum(v_add(seen[0], seen[1])) == 0.0f;
}

/* The same for any dtype: as floats or as pairs of bfloat16. */
static bool convert_values(const fa_problem *p, const fa_forward_plan *plan, fa_forward_tiles *t,
                           const fa_sequence *s, int64_t b, int64_t head, int64_t j0, int64_t first,
                           int64_t last, fa_range keys)
{
    bool finite = true;
    for (int64_t c = first; c < last; c += plan->bfloat ? 2 : 1) {
        const char *row[2] = {NULL, NULL};
        for (int e = 0; e < 2; e++)
            if (j0 + c + e >= keys.lo && j0 + c + e < keys.hi)
                row[e] = fa_key_row(p, &p->v, s, b, j0 + c + e, head);
        if (plan->bfloat) {
            finite &=
                interleave(t->v + c / 2 * plan->pitch_out, row[0], row[1], p->d_v, plan->columns);
            continue;
        }
        float *dst = (float *)(void *)(t->v + c * plan->pitch_out);
        if (row[0])
            fa_load_scaled_row(dst, row[0], p->v.dtype, p->d_v, plan->columns,
                               fa_key_scale(p, &p->v_scale, s, b, j0 + c, head));
        else memset(dst, 0, (size_t)plan->columns * 4);
        finite &= fa_all_finite(dst, plan->columns);
    }
    return finite;
}

/* Makes the values of `keys` of the tile at j0 ready for the products. */
static void load_values(const fa_problem *p, const fa_forward_plan *plan, fa_forward_tiles *t,
                        const fa_sequence *s, int64_t b, int64_t head, int64_t j0, fa_range keys)
{
    const int64_t first = (keys.lo - j0) / FA_NR * FA_NR;
    const int64_t last = fa_round_up(keys.hi - j0, plan->bfloat ? FA_BFLOAT_KEYS : 1);
    /* The products also read rows before keys.lo. They must be zeros, which only a packed tile has. */
    const float *rows = j0 + first == keys.lo ? values_in_place(p, plan, s, b, head, keys) : NULL;
    if (!rows) {
        t->values = t->v;
        t->pitch_values = plan->pitch_out;
        t->v_finite = values_are_vectors(p, plan)
                          ? copy_values(p, plan, t, s, b, head, j0, first, last, keys)
                          : convert_values(p, plan, t, s, b, head, j0, first, last, keys);
        return;
    }
    t->pitch_values = p->v.stride[1];
    t->values = (const uint32_t *)(const void *)(rows - first * t->pitch_values);
    t->v_finite = true;
    for (int64_t c = 0; c < last - first; c++)
        t->v_finite &= fa_all_finite(rows + c * t->pitch_values, plan->columns);
}

/* Multiplies a row of weights by its dropout factors. */
static void drop_weights(const fa_problem *p, fa_forward_tiles *t, const fa_row *row, float *x,
                         uint16_t *narrow, int64_t j0, int64_t first, int64_t last)
{
    const int64_t begin = first / 32 * 32; /* random bits come for 32 keys at a time */
    fa_dropout_factors(p, row, t->keep, j0 + begin, last - begin);
    for (int64_t c = first; c < last; c++) x[c] *= t->keep[c - begin];
    for (int64_t c = first; narrow && c < last; c += VL) v_store_bfloat(narrow + c, v_load(x + c));
}

/* A strip of scores becomes a strip of weights, VL rows at a time. */
static void softmax_strip(const fa_problem *p, const fa_forward_plan *plan, fa_forward_tiles *t,
                          const fa_sequence *s, fa_row row, int64_t count, int64_t r0, int64_t j0,
                          int64_t first, int64_t last, float scale, float *alpha)
{
    const bool general = fa_is_general(p, scale), dropout = p->dropout_threshold != 0;
    const int64_t query0 = row.query;
    for (int64_t g = 0; g < count; g += VL) {
        fa_softmax_rows rows = {.count = (int)fa_min(VL, count - g),
                                .pitch = plan->pitch_keys,
                                .x = t->s + g * plan->pitch_keys,
                                .maximum = t->maximum + r0 + g,
                                .sum = t->sum + r0 + g,
                                .alpha = alpha + g};
        uint16_t *narrow = plan->bfloat ? (uint16_t *)(t->weights + g * plan->pitch_keys) : NULL;
        if (!dropout) rows.narrow = narrow;
        for (int r = 0; r < rows.count; r++) {
            row.query = query0 + g + r;
            row.visible = fa_visible(p, s, row.query);
            const int64_t from = fa_min(fa_max(row.visible.lo - j0, first), last);
            const int64_t to = fa_max(fa_min(row.visible.hi - j0, last), from);
            rows.span[r] = (fa_span){first, last, from, to};
            if (general && to > from)
                fa_scores_to_logits(p, &row, scale, rows.x + r * rows.pitch + from, j0 + from,
                                    to - from, NULL);
        }
        fa_softmax_block(&rows, general ? 1.0f : scale);
        for (int r = 0; dropout && r < rows.count; r++) {
            row.query = query0 + g + r;
            drop_weights(p, t, &row, rows.x + r * rows.pitch,
                         narrow ? narrow + r * 2 * rows.pitch : NULL, j0, first, last);
        }
    }
    for (int64_t r = count; r < plan->strip; r++) alpha[r] = 1.0f;
}

static void run_tiles(const fa_forward_plan *plan, const fa_gemm *g, int64_t rows, int64_t columns)
{
#if defined(FA_ISA_AMX)
    if (plan->bfloat) {
        fa_amx_run(g, rows, columns);
        return;
    }
#elif defined(FA_ISA_AVX512_BF16)
    if (plan->bfloat) {
        fa_gemm_run(&bfloat_tiles, g, rows, columns);
        return;
    }
#endif
    (void)plan;
    fa_gemm_run(&float_tiles, g, rows, columns);
}

/* One strip of queries against the tile of keys at j0. */
static void strip(const fa_problem *p, const fa_forward_plan *plan, fa_forward_tiles *t,
                  const fa_sequence *s, fa_row row, int64_t count, int64_t r0, int64_t j0,
                  float scale)
{
    const int64_t lo = fa_visible(p, s, row.query).lo;
    const int64_t hi = fa_visible(p, s, row.query + count - 1).hi;
    const int64_t first = fa_max(lo - j0, 0) / FA_NR * FA_NR;
    const int64_t end = fa_min(hi - j0, plan->k_tile);
    const int64_t last = fa_round_up(end, plan->bfloat ? FA_NR : VL);
    if (end <= fa_max(lo - j0, 0)) return;

    fa_gemm scores = {plan->depth,
                      t->q + r0 * plan->pitch_depth,
                      plan->pitch_depth,
                      1,
                      t->k + first,
                      plan->pitch_keys,
                      t->s + first,
                      plan->pitch_keys,
                      NULL};
    run_tiles(plan, &scores, count, last - first);

    float alpha[FA_BFLOAT_STRIP];
    softmax_strip(p, plan, t, s, row, count, r0, j0, first, last, scale, alpha);

    const int64_t step = plan->bfloat ? 2 : 1; /* keys in a word */
    const uint32_t *weights = plan->bfloat ? t->weights : (const uint32_t *)(const void *)t->s;
    fa_gemm values = {(end - first + step - 1) / step,
                      weights + first / step,
                      plan->pitch_keys,
                      1,
                      t->values + first / step * t->pitch_values,
                      t->pitch_values,
                      t->out + r0 * plan->pitch_out,
                      plan->pitch_out,
                      alpha};
    if (t->v_finite) run_tiles(plan, &values, count, plan->columns);
    else fa_gemm_skip_zeros(&values, plan->bfloat, true, count, plan->columns);
}

/* Divides by the sum and writes out and lse. */
static void finish(const fa_problem *p, const fa_forward_plan *plan, const fa_forward_tiles *t,
                   const fa_sequence *s, int64_t b, int64_t head, int64_t i0, int64_t rows,
                   float scale)
{
    const float unit = fa_is_general(p, scale) ? 1.0f : scale; /* of the running maximum */
    const float descale = fa_value_descale(p, b, head / (p->heads_q / p->heads_kv));
    for (int64_t r = 0; r < rows; r++) {
        char *out = fa_view_row(&p->out, s->block_q, s->start_q + i0 + r, head);
        float lse, factor = fa_softmax_finish(t->maximum[r], t->sum[r], unit,
                                              p->sinks ? p->sinks[head] : -INFINITY, &lse);
        fa_write_row(&p->out, out, t->out + r * plan->pitch_out, factor, descale, p->d_v);
        if (p->lse) p->lse[fa_lse_offset(p, s, head) + i0 + r] = lse;
    }
}

/* Attention of one tile of queries of one head. */
static void forward_task(const fa_problem *p, const fa_forward_plan *plan, fa_forward_tiles *t,
                         int64_t b, const fa_sequence *s, int64_t head, int64_t i0, int64_t rows)
{
    const int64_t head_kv = head / (p->heads_q / p->heads_kv);
    const float scale = fa_effective_scale(p, b, head_kv);
    fa_range all = {fa_visible(p, s, i0).lo, fa_visible(p, s, i0 + rows - 1).hi};
    if (all.lo >= all.hi) all.hi = 0; /* no query sees a key: no tile */
    load_queries(p, plan, t, s, head, i0, rows);
    for (int64_t j0 = all.lo / plan->k_tile * plan->k_tile; j0 < all.hi; j0 += plan->k_tile) {
        const fa_range keys = {fa_max(all.lo, j0), fa_min(all.hi, j0 + plan->k_tile)};
        load_keys(p, plan, t, s, b, head_kv, j0, keys);
        load_values(p, plan, t, s, b, head_kv, j0, keys);
        for (int64_t r0 = 0; r0 < rows; r0 += plan->strip) {
            const fa_row row = {b, head, i0 + r0, {0, 0}, s};
            strip(p, plan, t, s, row, fa_min(plan->strip, rows - r0), r0, j0, scale);
        }
    }
    finish(p, plan, t, s, b, head, i0, rows, scale);
}

/* What all tiles of a call share. */
typedef struct fa_forward_job {
    const fa_problem *p;
    fa_forward_plan plan;
    fa_tasks tasks;
    char *scratch;
} fa_forward_job;

/* The thread has AMX tiles only while it runs a task, because it may be the caller's own thread. */
static void begin_products(const fa_forward_plan *plan)
{
#ifdef FA_ISA_AMX
    if (plan->bfloat) tile_configure();
#endif
    (void)plan;
}

static void end_products(const fa_forward_plan *plan)
{
#ifdef FA_ISA_AMX
    if (plan->bfloat) tile_release();
#endif
    (void)plan;
}

/* One tile of queries of one head, of all sequences'. */
static void forward_tile(void *context, int64_t index, int thread)
{
    const fa_forward_job *job = context;
    const fa_problem *p = job->p;
    size_t bytes;
    fa_forward_tiles t =
        carve(&job->plan, job->scratch + (size_t)thread * job->plan.scratch, &bytes);
    const int64_t task = index / p->heads_q, head = index % p->heads_q;
    const int64_t b = fa_tasks_sequence(&job->tasks, task);
    const fa_sequence s = fa_problem_sequence(p, b);
    /* Last tile first: under a causal mask it is the longest. */
    const int64_t rows = q_tile_rows(p, &s), i0 = (job->tasks.first[b + 1] - 1 - task) * rows;
    begin_products(&job->plan);
    forward_task(p, &job->plan, &t, b, &s, head, i0, fa_min(rows, s.n_q - i0));
    end_products(&job->plan);
}

fa_status FA_NAME(forward)(const fa_problem *p)
{
    fa_forward_job job = {p, make_plan(p), {0}, NULL};
    if (!fa_tasks_make(&job.tasks, p, q_tile_count)) return FA_ERROR_MEMORY;
    const int64_t total = fa_tasks_total(&job.tasks) * p->heads_q;
    if (total == 0) {
        free(job.tasks.first);
        return FA_OK;
    }
    const int threads = fa_team_reserve((int)fa_min(fa_problem_threads(p), total));
    job.scratch = fa_allocate((size_t)threads * job.plan.scratch);
    if (job.scratch) fa_team_run(threads, total, 1, forward_tile, &job);
    free(job.tasks.first);
    if (!job.scratch) return FA_ERROR_MEMORY;
    free(job.scratch);
    return FA_OK;
}

void FA_NAME(describe_forward)(const fa_problem *p, char *text, size_t size)
{
    const fa_forward_plan plan = make_plan(p);
    const fa_sequence s = {0, 0, p->n_q, 0, 0, p->n_k, 0};
    snprintf(text, size, "%s products, query tile %d, key tile %d",
             plan.bfloat ? "bfloat16" : "float32", (int)q_tile_rows(p, &s), (int)plan.k_tile);
}
