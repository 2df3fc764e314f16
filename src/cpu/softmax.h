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

/* Turns scores x[from, to) into weights exp(score - maximum), zeros elsewhere in [first, last);
 * updates the running maximum and sum and returns what the earlier output must be scaled by.
 * narrow: NULL, or bfloat16 weights go there; it may begin where x begins. */
static inline float fa_softmax_row(float *x, uint16_t *narrow, int64_t first, int64_t last,
                                   int64_t from, int64_t to, float scale, float *maximum,
                                   float *sum)
{
    const int64_t start = from / VL * VL, end = fa_round_up(to, VL);
    for (int64_t c = first; c < from; c++) x[c] = -INFINITY;
    for (int64_t c = to; c < end; c++) x[c] = -INFINITY;

    vf top = v_set1(*maximum), top2 = top;
    int64_t c = start;
    for (; c + 2 * VL <= end; c += 2 * VL) {
        top = v_max(v_load(x + c), top);
        top2 = v_max(v_load(x + c + VL), top2);
    }
    for (; c < end; c += VL) top = v_max(v_load(x + c), top);
    const float m = v_maximum(v_max(top, top2));
    const float base = m == -INFINITY ? 0.0f : m; /* nothing seen: weights 0, not NaN */

    const float factor = scale * FA_LOG2E;
    const vf vm_ = v_set1(base), vc = v_set1(factor), lowest = v_set1(fa_exp2_lowest(factor));
    vf total = v_zero(), total2 = v_zero();
    for (c = first; c < start; c += VL) fa_store_weights(x, narrow, c, v_zero());
    for (c = start; c + 2 * VL <= end; c += 2 * VL) {
        vf w = v_exp2_nonpositive(v_sub(v_load(x + c), vm_), vc, lowest);
        vf w2 = v_exp2_nonpositive(v_sub(v_load(x + c + VL), vm_), vc, lowest);
        total = v_add(total, w);
        total2 = v_add(total2, w2);
        fa_store_weights(x, narrow, c, w);
        fa_store_weights(x, narrow, c + VL, w2);
    }
    for (; c < end; c += VL) {
        vf w = v_exp2_nonpositive(v_sub(v_load(x + c), vm_), vc, lowest);
        total = v_add(total, w);
        fa_store_weights(x, narrow, c, w);
    }
    for (c = end; c < last; c += VL) fa_store_weights(x, narrow, c, v_zero());

    float old = *maximum == -INFINITY ? 0.0f : exp2f((*maximum - base) * factor);
    *maximum = m;
    *sum = *sum * old + v_sum(v_add(total, total2));
    return old;
}

/* Numbers lo .. hi of a vector become -infinity. */
FA_INLINE void fa_hide(float *x, int64_t lo, int64_t hi)
{
    const vf n = v_iota(), none = v_set1(-INFINITY), old = v_load(x);
    const vf below = v_select(v_less(n, v_set1((float)lo)), old, none);
    v_store(x, v_select(v_less(n, v_set1((float)hi)), below, old));
}

/* The rows of a strip, and where each of them sees keys. */
typedef struct fa_softmax_rows {
    float *x;         /* rows of scores, then weights, `pitch` apart */
    uint16_t *narrow; /* NULL, or rows of bfloat16 weights, 2 * pitch apart */
    int64_t pitch, first, last;
    int64_t *from, *to;
    float *maximum, *sum; /* of each row */
} fa_softmax_rows;

/* fa_softmax_row for up to VL rows, step by step for all of them: a row's sums across a vector then do not
 * hold up the next row. alpha: what each row's earlier output must be scaled by. */
static inline void fa_softmax_strip(const fa_softmax_rows *s, int count, float scale, float *alpha)
{
    const int64_t first = s->first, last = s->last;
    float top_of[VL], base_of[VL], sum_of[VL];
    for (int r = 0; r < VL; r++) top_of[r] = sum_of[r] = 0.0f;
    for (int r = 0; r < count; r++) {
        float *x = s->x + r * s->pitch;
        const int64_t from = s->from[r], to = s->to[r];
        const int64_t start = from / VL * VL, end = fa_round_up(to, VL);
#ifdef FA_SCALAR_EDGES
        for (int64_t c = start; c < from; c++) x[c] = -INFINITY;
        for (int64_t c = to; c < end; c++) x[c] = -INFINITY;
#else
        /* Whole vectors: a load would wait for smaller stores. */
        if (from > start) fa_hide(x + start, 0, from - start);
        if (to < end) fa_hide(x + end - VL, to - end + VL, VL);
#endif
        vf a = v_set1(s->maximum[r]), b = a, d = a, e = a;
        int64_t c = start;
        for (; c + 4 * VL <= end; c += 4 * VL) {
            a = v_max(v_load(x + c), a);
            b = v_max(v_load(x + c + VL), b);
            d = v_max(v_load(x + c + 2 * VL), d);
            e = v_max(v_load(x + c + 3 * VL), e);
        }
        for (; c < end; c += VL) a = v_max(v_load(x + c), a);
        top_of[r] = v_maximum(v_max(v_max(a, b), v_max(d, e)));
    }
    const float factor = scale * FA_LOG2E;
    const vf vc = v_set1(factor), lowest = v_set1(fa_exp2_lowest(factor)), none = v_set1(-INFINITY);
    for (int r = 0; r < count; r += VL) { /* nothing seen: weights 0, not NaN */
        vf top = v_load(top_of + r), base = v_select(v_equal(top, none), v_zero(), top);
        vf old = v_load_n(s->maximum + r, count - r);
        v_store(base_of + r, base);
        v_store_n(alpha + r, v_exp2_nonpositive(v_sub(old, base), vc, lowest), count - r);
        v_store_n(s->maximum + r, top, count - r);
    }
    for (int r = 0; r < count; r++) {
        float *x = s->x + r * s->pitch;
        uint16_t *narrow = s->narrow ? s->narrow + r * 2 * s->pitch : NULL;
        const int64_t start = s->from[r] / VL * VL, end = fa_round_up(s->to[r], VL);
        const vf base = v_set1(base_of[r]);
        vf total = v_zero(), total2 = v_zero();
        for (int64_t c = first; c < start; c += VL) fa_store_weights(x, narrow, c, v_zero());
        int64_t c = start;
        for (; c + 2 * VL <= end; c += 2 * VL) {
            vf w = v_exp2_nonpositive(v_sub(v_load(x + c), base), vc, lowest);
            vf w2 = v_exp2_nonpositive(v_sub(v_load(x + c + VL), base), vc, lowest);
            total = v_add(total, w);
            total2 = v_add(total2, w2);
            fa_store_weights(x, narrow, c, w);
            fa_store_weights(x, narrow, c + VL, w2);
        }
        for (; c < end; c += VL) {
            vf w = v_exp2_nonpositive(v_sub(v_load(x + c), base), vc, lowest);
            total = v_add(total, w);
            fa_store_weights(x, narrow, c, w);
        }
        for (c = end; c < last; c += VL) fa_store_weights(x, narrow, c, v_zero());
        sum_of[r] = v_sum(v_add(total, total2));
    }
    for (int r = 0; r < count; r++) s->sum[r] = s->sum[r] * alpha[r] + sum_of[r];
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

/* Writes factor * row; a factor of 0 writes zeros whatever the row holds. */
static inline void fa_write_row(const fa_view *view, char *dst, const float *row, float factor,
                                float descale, int64_t n)
{
    if (factor == 0.0f) fa_zero_row(dst, view->dtype, n);
    else fa_store_row(dst, view->dtype, row, factor * descale, n);
}

#endif
