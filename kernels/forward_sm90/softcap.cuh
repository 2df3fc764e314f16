/*
 * A softcap, where it is the only option: tanh as a part of the exponent. A kernel has three ways:
 *
 *     SHORT_SERIES    three terms, for small scores; not where there is a log-sum-exp
 *     LONG_SERIES     five terms, exact to 3e-6, for scores up to the softcap
 *     NO_SERIES       tanh(x) = 1 - 2 / (e^2x + 1), exact to 3e-7, for all scores
 *
 * The special-function unit takes as long for a result as the other units for eight instructions, and each weight needs
 * one of its results anyway. A series needs no other. Four scores of a row share the reciprocal of their product.
 *
 * The coefficients minimize the largest error in the series' range. Beyond its upper end the error grows. Weights show such scores: a
 * weight larger than that of the end has a score that is too large, which the bound of the sums detects. Scores below
 * -LOW come out too small. Their weights are too small to matter, unless the row's largest score is as low. Between the lower end of
 * the range and -LOW, weights are too small, in bfloat16 by up to a fifth, in float16 by a quarter with a softcap of 100: they are
 * far below the row's largest weight.
 */
#ifndef FA_KERNELS_FORWARD_SM90_SOFTCAP_CUH
#define FA_KERNELS_FORWARD_SM90_SOFTCAP_CUH

#include "forward_sm90/config.cuh"
#include "forward_sm90/warp.cuh"
#include "forward_sm90/work_tile.cuh"
#include "ptx/convert.cuh"
#include "ptx/order.cuh"

#if HAS_SERIES

enum { SHORT_SERIES, LONG_SERIES, NO_SERIES };

/* Of each series, relative to the softcap: its upper end, tanh there, and minus tanh of the lowest scores that do not come out too small.
 * With a softcap of 30 the error of a weight by the short series is 3.5e-5 (float16) or 5e-4 (bfloat16), less than its rounding. */
#if ELEMENT == FA_ELEMENT_FLOAT16
#define SHORT_END 0.4f
#define SHORT_TOP 0.37995f
#define SHORT_FIRST 0.99997873f
#define SHORT_THIRD (-0.33224984f)
#define SHORT_FIFTH 0.11939619f
#else
#define SHORT_END 0.6f
#define SHORT_TOP 0.53705f
#define SHORT_FIRST 0.99979330f
#define SHORT_THIRD (-0.32854850f)
#define SHORT_FIFTH 0.10490422f
#endif
#define SHORT_LOW 0.63515f /* tanh(0.75) */
#define LONG_END 1.0f
#define LONG_TOP 0.76159f
#define LONG_LOW LONG_TOP
#define LONG_FIRST 0.99996847f
#define LONG_THIRD (-0.33265823f)
#define LONG_FIFTH 0.12922067f
#define LONG_SEVENTH (-0.04329986f)
#define LONG_NINTH 0.00836589f

/* Of a work tile, in registers; scores are those of the products. */
typedef struct softcap {
    float scale;        /* the softcap as an exponent of 2 */
    float twice;        /* of a score, the exponent of e^2x */
    float most;         /* the largest score with which the product of four numbers e^2x + 1 is finite; tanh is 1 there */
    float first, third, fifth; /* coefficients of the short series */
    float long_first, long_third, long_fifth, long_seventh, long_ninth;
    float end, long_end; /* the largest score in the range of a series */
    float top, long_top; /* the exponent of this score */
    float least_top, long_least_top; /* the least largest exponent of a row that may have lower scores than those in the range */
} softcap;

/* The least exponent of a row's largest weight with which the row's lowest weights may be lost: all of those below
 * -low together are at most 2^-11 of its sum (2^-20, where there is a log-sum-exp, from which a backward pass computes weights
 * again), and the largest is within the series' range. */
FA_DEVICE float find_least_top(const fa_attention_params *p, const work_tile *w, float low,
                               float top)
{
    const float bits = log2f(fmaxf((float)w->n_k, 1.0f)) + (p->lse ? 20.0f : 11.0f);
    return fmaxf(bits - low * w->scale, -top * w->scale);
}

/* zero: an instruction takes only one uniform register. The assembler must take one coefficient of each series for a number that threads
 * do not share. */
FA_DEVICE softcap find_softcap(const fa_attention_params *p, const work_tile *w, int zero)
{
    const float most_inner = 1e4f; /* the eighth power of a larger one may overflow */
    const float y = w->inner * w->inner, first = w->scale * w->inner;
    const float own = __int_as_float((int)threadIdx.x);
    const bool any = w->inner < most_inner, lse = p->lse;
    softcap c;
    c.scale = warp_uniform_float(w->scale);
    c.twice = warp_uniform_float(w->inner * (2.0f * FA_LOG2E));
    c.most = warp_uniform_float(31.0f / c.twice);
    c.first = warp_uniform_float(SHORT_FIRST * first);
    c.third = ptx_depend_on(warp_uniform_float(SHORT_THIRD * y * first), own, zero);
    c.fifth = warp_uniform_float(SHORT_FIFTH * y * y * first);
    c.long_first = warp_uniform_float(LONG_FIRST * first);
    c.long_third = warp_uniform_float(LONG_THIRD * y * first);
    c.long_fifth = warp_uniform_float(LONG_FIFTH * y * y * first);
    c.long_seventh = ptx_depend_on(warp_uniform_float(LONG_SEVENTH * y * y * y * first), own, zero);
    c.long_ninth = warp_uniform_float(LONG_NINTH * (y * y) * (y * y) * first);
    c.end = warp_uniform_float(any && !lse ? SHORT_END / w->inner : -1.0f);
    c.long_end = warp_uniform_float(any ? LONG_END / w->inner : -1.0f);
    c.top = warp_uniform_float(SHORT_TOP * w->scale);
    c.long_top = warp_uniform_float(LONG_TOP * w->scale);
    const float never = INFINITY;
    c.least_top =
        warp_uniform_float(any && !lse ? find_least_top(p, w, SHORT_LOW, SHORT_TOP) : never);
    c.long_least_top = warp_uniform_float(any ? find_least_top(p, w, LONG_LOW, LONG_TOP) : never);
    return c;
}

FA_DEVICE float end_of_series(const softcap *c, int series)
{
    return series == SHORT_SERIES ? c->end : c->long_end;
}

FA_DEVICE float top_of_series(const softcap *c, int series)
{
    return series == SHORT_SERIES ? c->top : c->long_top;
}

FA_DEVICE float least_top_of_series(const softcap *c, int series)
{
    return series == SHORT_SERIES ? c->least_top : c->long_least_top;
}

/* The exponent of a score relative to a base, by a series: it grows with the score. */
FA_DEVICE float series_exponent(float s, const softcap *c, int series, float base)
{
    const float y = s * s;
    if (series == SHORT_SERIES)
        return fmaf(s, fmaf(fmaf(c->fifth, y, c->third), y, c->first), -base);
    const float high = fmaf(fmaf(c->long_ninth, y, c->long_seventh), y, c->long_fifth);
    return fmaf(s, fmaf(fmaf(high, y, c->long_third), y, c->long_first), -base);
}

/* The same without one. */
FA_DEVICE float tanh_exponent(float s, const softcap *c, float base)
{
    return fmaf(-2.0f * c->scale, ptx_rcp(ptx_ex2(s * c->twice) + 1.0f), c->scale - base);
}

/* Replaces two scores each of two rows' fragments, s[0], s[1], s[4], s[5], by this: none is above `most`. */
FA_DEVICE void cap_four(float *s, const softcap *c, float base)
{
    float a[4];
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = ptx_ex2(s[i / 2 * 4 + i % 2] * c->twice) + 1.0f;
    const float low = a[0] * a[1], high = a[2] * a[3], top = c->scale - base;
    const float share = ptx_rcp(low * high) * (-2.0f * c->scale);
    const float of_low = share * high, of_high = share * low;
    s[0] = fmaf(of_low, a[1], top);
    s[1] = fmaf(of_low, a[0], top);
    s[4] = fmaf(of_high, a[3], top);
    s[5] = fmaf(of_high, a[2], top);
}

/* Scores above `most` become `most`; NaN stays. */
FA_DEVICE void limit_scores(float *s, const softcap *c)
{
#pragma unroll
    for (int i = 0; i < FRAGMENT_KEYS / 2; i++) s[i] = s[i] > c->most ? c->most : s[i];
}

/* Replaces all scores by their exponents. */
FA_DEVICE void cap_all_scores(float *s, const softcap *c)
{
    limit_scores(s, c);
#pragma unroll
    for (int i = 0; i < FRAGMENT_KEYS / 16; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) cap_four(s + 8 * i + 2 * r, c, 0.0f);
}

#endif

#endif
