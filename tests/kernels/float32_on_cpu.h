/*
 * Single problems for forward kernels that have float32's errors by products of lower precision: are
 * they as exact as float32 arithmetic, also for peaked rows; infinities and NaN.
 */
#ifndef TEST_FLOAT32_ON_CPU_H
#define TEST_FLOAT32_ON_CPU_H

#include <math.h>
#include <string.h>

#include "attention.h"
#include "check.h"
#include "random_problem.h"

enum { QUERIES = 24, KEYS = 320, MAX_DIM = 256 };

/* As attention_make, aligned so that every kernel takes it. */
static void make_aligned(attention *a, uint64_t seed, shape s)
{
    ref_layout aligned = REF_LAYOUT_CONTIGUOUS;
    aligned.aligned_data = true;
    attention_make_as(a, seed, s, FA_FLOAT32, &aligned, &aligned, &aligned, &aligned);
}

/* The forward on an H200, which `attend` imitates. */
static void run_float32(random_attend *attend, attention *a, fa_precision precision)
{
    int64_t number = 1;
    char message[320] = "";
    random_call call = {.pass = RANDOM_FORWARD,
                        .buffers = &a->buffers,
                        .q = a->in.q,
                        .k = a->in.k,
                        .v = a->in.v,
                        .out = a->out,
                        .lse = a->lse,
                        .options = a->in.options};
    call.options.device = FA_DEVICE_CUDA;
    call.options.precision = precision;
    const fa_status status = attend(&number, &call, message, sizeof message);
    CHECK(status == FA_OK, "status %d: %s", (int)status, message);
}

static double load(const fa_tensor *t, int64_t row, int64_t column)
{
    return ref_load(t, 0, row, 0, column);
}

/* Query i in float32: each sum in one chain of fused multiply-adds, as a kernel on FMA units does it. */
static void attend_plainly(const attention *a, int64_t i, float out[MAX_DIM])
{
    const int64_t d = a->s.d;
    const float scale = (float)(1 / sqrt((double)d)) * 1.4426950408889634f;
    float scores[KEYS], top = -INFINITY, sum = 0;
    for (int64_t j = 0; j < KEYS; j++) {
        float dot = 0;
        for (int64_t c = 0; c < d; c++)
            dot = fmaf((float)load(&a->in.q, i, c), (float)load(&a->in.k, j, c), dot);
        scores[j] = dot * scale;
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

/* Queries are `factor` times as large as usual; 0: a fifth as large, and a key. */
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

/* Whether the kernel's error is at most so many times that of float32 arithmetic. */
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

/* Three products for each, cut off by the imitated tensor cores: errors like those of float32
 * arithmetic. */
static void test_exactness(random_attend *attend, int d)
{
    static const double factors[] = {1, 4, 16, 64, 0};
    for (size_t n = 0; n < sizeof factors / sizeof *factors; n++) {
        attention a;
        const shape s = {1, 1, 1, QUERIES, KEYS, d, d};
        make_aligned(&a, 7 + n, s);
        peak_queries(&a, factors[n]);
        check_exactness(attend, &a, 1, "queries times", factors[n]);
        attention_free(&a);
    }
}

/* Infinite queries, keys and values, and a NaN of all ones: as on the CPU. */
static void test_infinities(random_attend *attend, fa_precision precision)
{
    attention a;
    const shape s = {1, 1, 1, QUERIES, KEYS, 64, 64};
    make_aligned(&a, 3, s);
    static float want[QUERIES][64];
    ref_store(&a.in.k, 0, 70, 0, 5, INFINITY); /* half of the rows: no weight, the others: NaN */
    ref_store(&a.in.q, 0, 3, 0, 9, -INFINITY);
    ref_store(&a.in.v, 0, 150, 0, 1, INFINITY);
    ref_store(&a.in.v, 0, 151, 0, 2, -INFINITY);
    ref_store(&a.in.v, 0, 152, 0, 3, INFINITY);
    ref_store(&a.in.v, 0, 300, 0, 3, -INFINITY);
    memset((float *)a.in.v.data + 200 * 64 + 4, 0xff, sizeof(float));
    if (!attention_forward(&a, "on the CPU")) return;
    int64_t infinite = 0, finite = 0;
    for (int64_t i = 0; i < QUERIES; i++)
        for (int64_t c = 0; c < 64; c++) want[i][c] = (float)load(&a.out, i, c);
    attention_poison(&a);
    run_float32(attend, &a, precision);
    for (int64_t i = 0; i < QUERIES; i++)
        for (int64_t c = 0; c < 64; c++) {
            const double out = load(&a.out, i, c), w = (double)want[i][c];
            infinite += isinf(w) != 0, finite += isfinite(w) != 0;
            const bool fine = isnan(w) ? isnan(out) : isinf(w) ? out == w : fabs(out - w) < 2e-2;
            CHECK(fine, "precision %d, query %lld, column %lld: %g, expected %g", (int)precision,
                  (long long)i, (long long)c, out, w);
        }
    CHECK(infinite > QUERIES / 2 && finite > 64 * QUERIES / 4, "few infinite, or few finite");
    attention_free(&a);
}

/* A key that is a NaN of all ones: rows that see it are NaN, and no others. */
static void test_nan_key(random_attend *attend, fa_precision precision)
{
    enum { KEY = 12 };
    attention a;
    const shape s = {1, 1, 1, QUERIES, KEYS, 64, 64};
    make_aligned(&a, 5, s);
    a.in.options.flags = FA_CAUSAL | FA_DIAGONAL;
    memset((float *)a.in.k.data + KEY * 64 + 2, 0xff, sizeof(float));
    run_float32(attend, &a, precision);
    for (int64_t i = 0; i < QUERIES; i++)
        CHECK(isnan(load(&a.out, i, 7)) == (i >= KEY), "precision %d, query %lld: %g",
              (int)precision, (long long)i, load(&a.out, i, 7));
    attention_free(&a);
}

/* Logits so huge that they differ from their base, which is rounded, by more than a weight may. */
static void test_huge_logits(random_attend *attend)
{
    static const double factors[] = {1e7, 3e8, 1e10, 1e20};
    for (size_t n = 0; n < sizeof factors / sizeof *factors; n++) {
        attention a;
        const shape s = {1, 1, 1, QUERIES, KEYS, 64, 64};
        make_aligned(&a, 31 + n, s);
        for (int64_t i = 0; i < QUERIES; i += 2) multiply_row(&a.in.q, i, factors[n]);
        check_exactness(attend, &a, 2, "some queries times", factors[n]);
        attention_free(&a);
    }
}

#endif
