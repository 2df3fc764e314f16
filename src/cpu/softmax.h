/*
 * Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867): a row's running maximum and sum over
 * tiles of scores, and the final division.
 */
#ifndef FA_CPU_SOFTMAX_H
#define FA_CPU_SOFTMAX_H

#include "rows.h"
#include "vmath.h"

/* A vector of weights; at c of x, or where narrow is given as bfloat16 at c of that. */
FA_INLINE void fa_store_weights(float *x, uint16_t *narrow, int64_t c, vf w)
{
    if (narrow) v_store_bfloat(narrow + c, w);
    else v_store(x + c, w);
}

/* Columns [first, last) of a row of scores, whole vectors, of which [from, to) are visible. */
typedef struct fa_span {
    int64_t first, last, from, to;
} fa_span;

/* Numbers [lo, hi) of a vector become -infinity, by one store of a whole vector: after smaller stores,
 * the next vector load would have to wait. */
FA_INLINE void fa_hide(float *x, int64_t lo, int64_t hi)
{
    const vf lane = v_iota(), old = v_load(x);
    const vf hidden = v_select(v_less(lane, v_set1((float)lo)), old, v_set1(-INFINITY));
    v_store(x, v_select(v_less(lane, v_set1((float)hi)), hidden, old));
}

/* The maximum of `old` and the visible scores. The rest of their vectors becomes -infinity. */
FA_INLINE float fa_span_maximum(float *x, fa_span s, float old)
{
    const int64_t start = s.from / VL * VL, end = fa_round_up(s.to, VL);
    if (s.from > start) fa_hide(x + start, 0, s.from - start);
    if (s.to < end) fa_hide(x + end - VL, s.to - (end - VL), VL);
    vf top[4] = {v_set1(old), v_set1(old), v_set1(old), v_set1(old)};
    int64_t c = start;
    for (; c + 4 * VL <= end; c += 4 * VL) {
        FA_UNROLL
        for (int i = 0; i < 4; i++) top[i] = v_max(v_load(x + c + i * VL), top[i]);
    }
    for (; c < end; c += VL) top[0] = v_max(v_load(x + c), top[0]);
    return v_maximum(v_max(v_max(top[0], top[1]), v_max(top[2], top[3])));
}

/* Turns scores, their rest hidden, into weights 2^((score - base) * factor), zeros where nothing is
 * visible. Returns their sum. narrow: NULL, or bfloat16 weights go there; it may begin where x
 * begins. */
FA_INLINE float fa_span_weights(float *x, uint16_t *narrow, fa_span s, vf base, vf factor,
                                vf lowest)
{
    const int64_t start = s.from / VL * VL, end = fa_round_up(s.to, VL);
    vf total = v_zero(), total2 = v_zero();
    for (int64_t c = s.first; c < start; c += VL) fa_store_weights(x, narrow, c, v_zero());
    int64_t c = start;
    for (; c + 2 * VL <= end; c += 2 * VL) {
        vf w = v_exp2_nonpositive(v_sub(v_load(x + c), base), factor, lowest);
        vf w2 = v_exp2_nonpositive(v_sub(v_load(x + c + VL), base), factor, lowest);
        total = v_add(total, w);
        total2 = v_add(total2, w2);
        fa_store_weights(x, narrow, c, w);
        fa_store_weights(x, narrow, c + VL, w2);
    }
    for (; c < end; c += VL) {
        vf w = v_exp2_nonpositive(v_sub(v_load(x + c), base), factor, lowest);
        total = v_add(total, w);
        fa_store_weights(x, narrow, c, w);
    }
    for (c = end; c < s.last; c += VL) fa_store_weights(x, narrow, c, v_zero());
    return v_sum(v_add(total, total2));
}

/* Turns scores x[from, to) into weights exp(score - maximum), zeros elsewhere in [first, last);
 * updates the running maximum and sum and returns what the earlier output must be scaled by. */
static inline float fa_softmax_row(float *x, fa_span s, float scale, float *maximum, float *sum)
{
    const float m = fa_span_maximum(x, s, *maximum);
    const float base = m == -INFINITY ? 0.0f : m; /* nothing seen: weights 0, not NaN */
    const float factor = scale * FA_LOG2E;
    const float total =
        fa_span_weights(x, NULL, s, v_set1(base), v_set1(factor), v_set1(fa_exp2_lowest(factor)));
    const float old = *maximum == -INFINITY ? 0.0f : exp2f((*maximum - base) * factor);
    *maximum = m;
    *sum = *sum * old + total;
    return old;
}

/* Up to VL rows of scores, `pitch` apart. */
typedef struct fa_softmax_rows {
    int count;
    int64_t pitch;
    float *x;         /* scores, then weights */
    uint16_t *narrow; /* NULL, or bfloat16 weights go there, rows 2 * pitch apart; may be x */
    fa_span span[VL];
    float *maximum, *sum; /* running, of each row */
    float *alpha;         /* what each row's earlier output must be scaled by */
} fa_softmax_rows;

/* fa_softmax_row for all rows, one step at a time: a row's reductions over a vector do not delay the
 * next row, and one vector exponential gives every alpha. */
static inline void fa_softmax_block(const fa_softmax_rows *rows, float scale)
{
    float top[VL] = {0}, base[VL], total[VL] = {0};
    for (int r = 0; r < rows->count; r++)
        top[r] = fa_span_maximum(rows->x + r * rows->pitch, rows->span[r], rows->maximum[r]);

    const vf factor = v_set1(scale * FA_LOG2E), lowest = v_set1(fa_exp2_lowest(scale * FA_LOG2E));
    const vf tops = v_load(top), old = v_load_n(rows->maximum, rows->count);
    const vm none = v_equal(tops, v_set1(-INFINITY)); /* nothing seen: weights 0, not NaN */
    const vf bases = v_select(none, v_zero(), tops);
    const vf alpha = v_exp2_nonpositive(v_sub(old, bases), factor, lowest);
    v_store(base, bases);
    v_store_n(rows->maximum, tops, rows->count);
    v_store_n(rows->alpha, alpha, rows->count);

    for (int r = 0; r < rows->count; r++)
        total[r] = fa_span_weights(rows->x + r * rows->pitch,
                                   rows->narrow ? rows->narrow + r * 2 * rows->pitch : NULL,
                                   rows->span[r], v_set1(base[r]), factor, lowest);
    const vf sum = v_fma(v_load_n(rows->sum, rows->count), alpha, v_load(total));
    v_store_n(rows->sum, sum, rows->count);
}

/* At the end of a row: returns the factor of the unnormalized output, 0 for a row that saw no key, and
 * the log-sum-exp. unit turns the running maximum into a logit; sink is -infinity if there is none. */
static inline float fa_softmax_finish(float maximum, float sum, float unit, float sink, float *lse)
{
    float top = maximum == -INFINITY ? -INFINITY : maximum * unit, weight = 1.0f;
    if (sink != -INFINITY) {
        float joint = fmaxf(top, sink);
        weight = expf(top - joint);
        sum = sum * weight + expf(sink - joint);
        top = joint;
    }
    *lse = sum == 0.0f ? -INFINITY : top + logf(sum);
    if (maximum == -INFINITY && !isnan(sum)) return 0.0f;
    return weight / sum;
}

/* Writes factor * row; with a factor of 0 it writes zeros, even if the row holds NaN. */
static inline void fa_write_row(const fa_view *view, char *dst, const float *row, float factor,
                                float descale, int64_t n)
{
    if (factor == 0.0f) fa_zero_row(dst, view->dtype, n);
    else fa_store_row(dst, view->dtype, row, factor * descale, n);
}

#endif
