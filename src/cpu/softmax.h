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
