/*
 * Single problems for forward kernels that reach float32's errors by products of lower precision:
 * whether they are as exact as float32 arithmetic, also for peaked rows; infinities and NaN.
 */
#ifndef TEST_FLOAT32_ON_CPU_H
#define TEST_FLOAT32_ON_CPU_H

#include <math.h>
#include <string.h>

#include "attention_on_cpu.h"
#include "check.h"
#include "sample.h"

enum { QUERIES = 24, KEYS = 320, MAX_DIM = 512 };

/* Column c (below 64) of the narrow heads, in heads of d columns: one of the first, or of the
 * last. */
static inline int64_t column_of(int64_t d, int64_t c) { return c % 2 ? c : d - 64 + c; }

/* The forward on an H200, which `attend` imitates. */
static void run_float32(random_attend *attend, attention *a, fa_precision precision)
{
    random_call call = forward_call(a);
    call.options.precision = precision;
    check_attends(attend, 1, &call);
}

static double load(const fa_tensor *t, int64_t row, int64_t column)
{
    return ref_load(t, 0, row, 0, column);
}

/* Gives the problem a bias or a mask of the whole shape. aligned: so that neighbours can be loaded
 * together. */
static inline fa_tensor make_score_tensor(attention *a, const char *name, fa_dtype dtype,
                                          bool aligned)
{
    ref_layout layout = REF_LAYOUT_CONTIGUOUS;
    fa_tensor t = {.dtype = dtype, .shape = {1, 1, a->s.n_q, a->s.n_k}};
    layout.aligned_data = aligned;
    ref_buffers_tensor(&a->buffers, name, &t, &layout);
    return t;
}

static inline void make_bias(attention *a, fa_dtype dtype, bool aligned)
{
    a->bias = make_score_tensor(a, "bias", dtype, aligned);
    attention_fill(a, &a->bias, 1);
    a->in.options.bias = &a->bias;
}

/* ALiBi. */
static inline void make_slope(attention *a, float slope)
{
    float *slopes = ref_buffers_new(&a->buffers, "alibi_slopes", sizeof slope, sizeof slope);
    *slopes = slope;
    a->in.options.alibi_slopes = slopes;
}

static inline void make_mask(attention *a, bool aligned)
{
    a->mask = make_score_tensor(a, "mask", FA_BOOL, aligned);
    for (int64_t i = 0; i < a->s.n_q; i++)
        for (int64_t j = 0; j < a->s.n_k; j++) ref_store(&a->mask, 0, 0, i, j, 1);
    a->in.options.mask = &a->mask;
}

/* The logit of query i and key j in float32, from a scaled score. */
static float plain_logit(const attention *a, int64_t i, int64_t j, float x)
{
    const fa_options *o = &a->in.options;
    if (o->softcap > 0) x = o->softcap * tanhf(x / o->softcap);
    if (o->alibi_slopes) x -= o->alibi_slopes[0] * fabsf((float)(i + a->s.n_k - a->s.n_q - j));
    if (o->bias) x += (float)ref_load(o->bias, 0, 0, i, j);
    if (o->mask && ref_load(o->mask, 0, 0, i, j) == 0) x = -INFINITY;
    return x;
}

/* Query i in float32: each sum in one chain of fused multiply-adds, as on FMA units. */
static void attend_plainly(const attention *a, int64_t i, float out[MAX_DIM])
{
    const int64_t d = a->s.d;
    const float log2e = 1.4426950408889634f, scale = (float)(1 / sqrt((double)d)) * log2e;
    const fa_options *o = &a->in.options;
    const bool has_options = o->softcap > 0 || o->alibi_slopes || o->bias || o->mask;
    float scores[KEYS], top = -INFINITY, sum = 0;
    for (int64_t j = 0; j < KEYS; j++) {
        float dot = 0;
        for (int64_t c = 0; c < d; c++)
            dot = fmaf((float)load(&a->in.q, i, c), (float)load(&a->in.k, j, c), dot);
        scores[j] = dot * scale;
        if (has_options)
            scores[j] = plain_logit(a, i, j, dot * (float)(1 / sqrt((double)d))) * log2e;
        top = fmaxf(top, scores[j]);
    }
    for (int64_t c = 0; c < d; c++) out[c] = 0;
    for (int64_t j = 0; j < KEYS; j++) {
        const float weight = exp2f(scores[j] - top);
        sum += weight;
        for (int64_t c = 0; c < d; c++) out[c] = fmaf(weight, (float)load(&a->in.v, j, c), out[c]);
    }
    for (int64_t c = 0; c < d; c++) out[c] /= sum;
}

/* Queries are `factor` times as large as usual; 0: a fifth of a query as usual plus a key. */
static void peak_queries(attention *a, double factor)
{
    for (int64_t i = 0; i < QUERIES; i++)
        for (int64_t c = 0; c < a->s.d; c++) {
            const double q = load(&a->in.q, i, c), key = load(&a->in.k, 13 * i, c);
            ref_store(&a->in.q, 0, i, 0, c, factor > 0 ? factor * q : 0.2 * q + key);
        }
}

static void multiply_row(const fa_tensor *t, int64_t row, double factor)
{
    for (int64_t c = 0; c < t->shape[3]; c++) ref_store(t, 0, row, 0, c, factor * load(t, row, c));
}

/* Whether the kernel's error is at most this many times that of float32 arithmetic. */
static void check_exactness(random_attend *attend, attention *a, double times, const char *what,
                            double factor)
{
    ref_array want, lse;
    const int64_t d = a->s.d;
    double error = 0, plain_error = 0;
    run_float32(attend, a, FA_PRECISION_FLOAT32);
    ref_forward(&a->in, &want, &lse);
    for (int64_t i = 0; i < QUERIES; i++) {
        float plain[MAX_DIM];
        attend_plainly(a, i, plain);
        for (int64_t c = 0; c < d; c++) {
            const double exact = want.value[ref_array_index(&want, 0, i, 0, c)];
            error += pow(load(&a->out, i, c) - exact, 2);
            plain_error += pow((double)plain[c] - exact, 2);
        }
    }
    CHECK(error <= times * times * plain_error, "d %lld, %s %g: %g times the error of float32",
          (long long)d, what, factor, sqrt(error / plain_error));
    ref_array_free(&want);
    ref_array_free(&lse);
}

/* Sets of problems, of which the sample has some (sample_has): one for each width of heads, from
 * these numbers on. */
enum { EXACT_SETS = 0, OPTION_SETS = 8, HIDDEN_SETS = 16, SCALE_SET = 24 };

static inline int width_of(int64_t d) { return d <= 64 ? 0 : d <= 128 ? 1 : d <= 256 ? 2 : 4; }

/* Three products for each, truncated by the imitated tensor cores: errors like those of float32
 * arithmetic. */
static void test_exactness(random_attend *attend, int d)
{
    static const double factors[] = {1, 4, 16, 64, 0};
    const size_t step = d > 256 ? 2 : 1; /* wide heads take long: fewer of them */
    for (size_t n = 0; n < sizeof factors / sizeof *factors; n += step) {
        if (d > 64 && !sample_has((int64_t)(n / step), EXACT_SETS + width_of(d))) continue;
        attention a;
        const shape s = {1, 1, 1, QUERIES, KEYS, d, d};
        make_aligned(&a, 7 + n, s, FA_FLOAT32);
        peak_queries(&a, factors[n]);
        check_exactness(attend, &a, 1, "queries times", factors[n]);
        attention_free(&a);
    }
}

/* One key has the weight 1, and the others but one are together 1.2e-5. What a thread adds in a
 * tile is less than half a unit in the last place of 1, so plain addition loses it. late: a key
 * near the end has the weight 4, so that the row's base changes there. option: uses the kernel that
 * has options, with one that changes nothing. */
static inline void test_small_weights(random_attend *attend, bool late, bool option)
{
    enum { MANY = 4096, DIM = 64 };
    const double logit = log(0.4 * 0x1p-23 / 16);
    attention a;
    const shape s = {1, 1, 1, QUERIES, MANY, DIM, DIM};
    make_aligned(&a, 83, s, FA_FLOAT32);
    if (option) make_slope(&a, 0);
    const float other = late ? (float)(log(4) / sqrt(DIM)) : (float)(logit / sqrt(DIM));
    for (int64_t c = 0; c < DIM; c++) {
        for (int64_t i = 0; i < QUERIES; i++) ref_store(&a.in.q, 0, i, 0, c, 1);
        for (int64_t j = 0; j < MANY; j++)
            ref_store(&a.in.k, 0, j, 0, c,
                      j == 0           ? 0
                      : j == MANY - 40 ? (double)other
                                       : logit / sqrt(DIM));
    }
    run_float32(attend, &a, FA_PRECISION_FLOAT32);
    const double want = log1p((MANY - 2) * exp(logit) + exp((double)other * sqrt(DIM)));
    for (int64_t i = 0; i < QUERIES; i++)
        CHECK(fabs((double)a.lse[i] - want) < 3e-7,
              "late %d, option %d, query %lld: log-sum-exp %g, expected %g", late, option,
              (long long)i, (double)a.lse[i], want);
    attention_free(&a);
}

/* Exactness with an option: a softcap that is much larger than scores, or not; ALiBi; a bias; a
 * mask. */
static inline void test_exact_options(random_attend *attend, int d)
{
    static const double factors[] = {1, 16};
    static const float softcaps[] = {2, 15, 50};
    const int step = d > 256 ? 5 : 1; /* wide heads take long: fewer of them */
    for (int n = 0; n < 14; n += step) {
        if (d > 64 && !sample_has(n / step, OPTION_SETS + width_of(d))) continue;
        attention a;
        const shape s = {1, 1, 1, QUERIES, KEYS, d, d};
        make_aligned(&a, 57 + (uint64_t)n, s, FA_FLOAT32);
        peak_queries(&a, factors[n % 2]);
        if (n < 6) a.in.options.softcap = softcaps[n / 2];
        else if (n < 8) {
            make_slope(&a, 0.25f);
        } else if (n < 10) make_bias(&a, FA_FLOAT32, true);
        else if (n < 12) make_bias(&a, float_dtypes[n - 9], true);
        else {
            make_mask(&a, true);
            for (int64_t i = 0; i < QUERIES * KEYS;
                 i += 1 + (int64_t)(ref_random_bits(&a.random) % 4))
                ref_store(&a.mask, 0, 0, i / KEYS, i % KEYS, 0);
        }
        check_exactness(attend, &a, 1.25, "option number", n);
        attention_free(&a);
    }
}

/* Whether two results are the same within rounding, or the same infinities or NaN. */
static inline bool is_like(double out, double want, double rounding)
{
    return isnan(want)   ? isnan(out)
           : isinf(want) ? out == want
                         : fabs(out - want) < rounding * fmax(1, fabs(want));
}

/* Compares the kernel with the CPU. Returns the number of rows with a NaN. */
static inline int64_t compare_with_cpu(random_attend *attend, attention *a, fa_precision precision,
                                       const char *what)
{
    static double want[QUERIES][MAX_DIM], lse[QUERIES];
    const int64_t d = a->s.d;
    int64_t rows = 0;
    if (!attention_forward(a, "on the CPU")) return 0;
    for (int64_t i = 0; i < QUERIES; i++) {
        bool has_nan = false;
        for (int64_t c = 0; c < d; c++) want[i][c] = load(&a->out, i, c);
        for (int64_t c = 0; c < d; c++) has_nan |= isnan(want[i][c]);
        lse[i] = (double)a->lse[i];
        rows += has_nan;
    }
    attention_poison(a);
    run_float32(attend, a, precision);
    const double rounding = precision == FA_PRECISION_TF32 ? 2e-2 : 1e-5;
    for (int64_t i = 0; i < QUERIES; i++) {
        for (int64_t c = 0; c < d; c++)
            CHECK(is_like(load(&a->out, i, c), want[i][c], rounding),
                  "%s, query %lld, column %lld: %g, expected %g", what, (long long)i, (long long)c,
                  load(&a->out, i, c), want[i][c]);
        CHECK(is_like((double)a->lse[i], lse[i], rounding),
              "%s, query %lld: log-sum-exp %g, expected %g", what, (long long)i, (double)a->lse[i],
              lse[i]);
    }
    return rows;
}

/* Keys that are not finite, or whose values are not: hidden by a mask from most rows and by a bias
 * of -infinity from others. Some rows see no key. */
static inline void test_hidden_keys(random_attend *attend, fa_precision precision, int64_t d)
{
    const int step = d > 256 ? 5 : 1; /* wide heads take long: fewer of them */
    const int set = HIDDEN_SETS + width_of(d) + (precision == FA_PRECISION_TF32);
    for (int n = 0; n < 8; n += step) {
        if (!sample_has(n / step, set)) continue;
        attention a;
        const shape s = {1, 1, 1, QUERIES, KEYS, d, d};
        const bool masked = n < 2;
        make_aligned(&a, 61, s, FA_FLOAT32);
        if (masked) make_mask(&a, n % 2);
        else make_bias(&a, float_dtypes[n / 2 - 1], n % 2);
        const fa_tensor *hides = masked ? &a.mask : &a.bias;
        const double hidden = masked ? 0 : -INFINITY;
        for (int64_t i = 0; i < QUERIES; i++)
            for (int64_t j = 0; j < KEYS; j++)
                if (i % 8 == 5 || (j >= 64 && j < 128 && i % 3 == 1) || (j % 70 == 7 && i % 6))
                    ref_store(hides, 0, 0, i, j, hidden);
        ref_store(&a.in.v, 0, 7, 0, column_of(d, 5), NAN);
        ref_store(&a.in.v, 0, 77, 0, column_of(d, 6), INFINITY);
        ref_store(&a.in.v, 0, 77, 0, column_of(d, 8),
                  1e30); /* the tile's other rows have no bits left */
        if (masked) ref_store(&a.in.k, 0, 147, 0, column_of(d, 4), NAN);
        const int64_t rows = compare_with_cpu(attend, &a, precision,
                                              masked ? "keys behind a mask" : "keys behind a bias");
        CHECK(rows == QUERIES / 6, "%lld rows see NaN", (long long)rows);
        attention_free(&a);
    }
}

/* A bias that is so large that logits lose all their bits, in some rows for each key. */
static inline void test_large_bias(random_attend *attend, fa_precision precision, int64_t d)
{
    static const double large[] = {-3.4028234663852886e38, -1e30, 1e6, -1e5};
    attention a;
    const shape s = {1, 1, 1, QUERIES, KEYS, d, d};
    make_aligned(&a, 67, s, FA_FLOAT32);
    make_bias(&a, FA_FLOAT32, true);
    for (int64_t i = 0; i < QUERIES; i++)
        for (int64_t j = 0; j < KEYS; j++)
            if (i % 3 || j > 200)
                ref_store(&a.bias, 0, 0, i, j, i % 3 == 1 && j < 100 ? -1e9 : large[i % 4]);
    CHECK(compare_with_cpu(attend, &a, precision, "a large bias") == 0, "NaN");
    attention_free(&a);
}

/* A softcap, a bias and a mask, with unusual scales. */
static inline void test_scales(random_attend *attend, int64_t d)
{
    static const float scales[] = {0, -0.3f, 1e-20f, 1e-38f, -1e-7f, 300};
    for (size_t n = 0; n < 2 * sizeof scales / sizeof *scales; n++) {
        if (!sample_has((int64_t)n / 2, SCALE_SET)) continue;
        attention a;
        const shape s = {1, 1, 1, QUERIES, KEYS, d, d};
        make_aligned(&a, 71, s, FA_FLOAT32);
        a.in.options.flags = FA_SCALE;
        a.in.options.scale = scales[n / 2];
        if (n % 2) a.in.options.softcap = 3;
        make_bias(&a, FA_FLOAT32, n % 3);
        CHECK(compare_with_cpu(attend, &a, FA_PRECISION_FLOAT32, "scales") == 0, "NaN");
        attention_free(&a);
    }
}

/* Infinite queries, keys and values, and a NaN of all ones: as on the CPU. */
static void test_infinities(random_attend *attend, fa_precision precision, int64_t d)
{
    attention a;
    const shape s = {1, 1, 1, QUERIES, KEYS, d, d};
    make_aligned(&a, 3, s, FA_FLOAT32);
    static float want[QUERIES][MAX_DIM];
    ref_store(&a.in.k, 0, 70, 0, column_of(d, 5),
              INFINITY); /* half of the rows: no weight, the others: NaN */
    ref_store(&a.in.q, 0, 3, 0, column_of(d, 8), -INFINITY);
    ref_store(&a.in.v, 0, 150, 0, column_of(d, 1), INFINITY);
    ref_store(&a.in.v, 0, 151, 0, column_of(d, 2), -INFINITY);
    ref_store(&a.in.v, 0, 152, 0, column_of(d, 3), INFINITY);
    ref_store(&a.in.v, 0, 300, 0, column_of(d, 3), -INFINITY);
    memset((float *)a.in.v.data + 200 * d + column_of(d, 4), 0xff, sizeof(float));
    if (!attention_forward(&a, "on the CPU")) return;
    int64_t infinite = 0, finite = 0;
    for (int64_t i = 0; i < QUERIES; i++)
        for (int64_t c = 0; c < d; c++) want[i][c] = (float)load(&a.out, i, c);
    attention_poison(&a);
    run_float32(attend, &a, precision);
    for (int64_t i = 0; i < QUERIES; i++)
        for (int64_t c = 0; c < d; c++) {
            const double out = load(&a.out, i, c), w = (double)want[i][c];
            infinite += isinf(w) != 0, finite += isfinite(w) != 0;
            const bool fine = isnan(w) ? isnan(out) : isinf(w) ? out == w : fabs(out - w) < 2e-2;
            CHECK(fine, "precision %d, query %lld, column %lld: %g, expected %g", (int)precision,
                  (long long)i, (long long)c, out, w);
        }
    CHECK(infinite > QUERIES / 2 && finite > d * QUERIES / 4, "few infinite, or few finite");
    attention_free(&a);
}

/* A key that is a NaN of all ones: rows that see it are NaN, and no others. */
static void test_nan_key(random_attend *attend, fa_precision precision, int64_t d)
{
    enum { KEY = 12 };
    attention a;
    const shape s = {1, 1, 1, QUERIES, KEYS, d, d};
    make_aligned(&a, 5, s, FA_FLOAT32);
    a.in.options.flags = FA_CAUSAL | FA_DIAGONAL;
    memset((float *)a.in.k.data + KEY * d + column_of(d, 2), 0xff, sizeof(float));
    run_float32(attend, &a, precision);
    for (int64_t i = 0; i < QUERIES; i++)
        CHECK(isnan(load(&a.out, i, 7)) == (i >= KEY), "precision %d, query %lld: %g",
              (int)precision, (long long)i, load(&a.out, i, 7));
    attention_free(&a);
}

/* Logits so large that their rounded base differs from them by more than a weight may. */
static void test_huge_logits(random_attend *attend, int64_t d)
{
    static const double factors[] = {1e7, 3e8, 1e10, 1e20};
    for (size_t n = 0; n < sizeof factors / sizeof *factors; n++) {
        attention a;
        const shape s = {1, 1, 1, QUERIES, KEYS, d, d};
        make_aligned(&a, 31 + n, s, FA_FLOAT32);
        for (int64_t i = 0; i < QUERIES; i += 2) multiply_row(&a.in.q, i, factors[n]);
        check_exactness(attend, &a, 2, "some queries times", factors[n]);
        attention_free(&a);
    }
}

#endif
