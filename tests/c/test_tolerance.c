/*
 * What ref_rounding_for allows: kernels that round as the library's do pass by a margin; slightly
 * larger errors do not. The kernels are simulated here, in float64 except for the rounding itself.
 */
#include <math.h>
#include <stdlib.h>

#include "attention.h"

enum { HEADS = 2, QUERIES = 16, DIM = 64, MAX_KEYS = 1000 };

/* The properties of a simulated kernel. */
typedef struct kernel {
    /* The type of rounded weights; FA_FLOAT32: all operands are rounded to tf32. */
    fa_dtype weights;
    double base;      /* a row's largest weight */
    bool sum_rounded; /* divides by the sum of the rounded weights */
    bool drops_key;   /* loses a key */
    double error;     /* multiplies all errors by this */
} kernel;

/* Rounds to 11 bits as kernels do it in one instruction (fa_near_tf32). */
static double near_tf32(double x)
{
    int exponent;
    const double fraction = frexp(x * (1 + 3 * 0x1p-13), &exponent);
    return ldexp(trunc(ldexp(fraction, 11)), exponent - 11);
}

/* Rounds to 11 bits, ties away from 0, like cvt.rna.tf32. */
static double rounded_to_tf32(double x)
{
    int exponent;
    const double fraction = frexp(x, &exponent);
    return ldexp(round(ldexp(fraction, 11)), exponent - 11);
}

/* Rounded to a 16-bit type like ref_store; FA_FLOAT32: to tf32. */
static double rounded(fa_dtype dtype, double x)
{
    if (dtype == FA_FLOAT32) return rounded_to_tf32(x);
    uint16_t bits = 0;
    const fa_tensor t = fa_bshd(&bits, dtype, 1, 1, 1, 1);
    ref_store(&t, 0, 0, 0, 0, x);
    return ref_load(&t, 0, 0, 0, 0);
}

static double keys[MAX_KEYS][DIM], values[MAX_KEYS][DIM];

/* Operands that a kernel in tf32 rounds; others are multiplied as they are. */
static double operand(const fa_tensor *t, int64_t a, int64_t b, int64_t c, int64_t d)
{
    const double x = ref_load(t, a, b, c, d);
    return t->dtype == FA_FLOAT32 ? near_tf32(x) : x;
}

static void load_head(const attention *a, int64_t h)
{
    const int64_t page = a->in.k.shape[1]; /* all keys, except for share_rows */
    for (int64_t j = 0; j < a->s.n_k; j++)
        for (int64_t c = 0; c < DIM; c++) {
            keys[j][c] = operand(&a->in.k, j / page, j % page, h, c);
            values[j][c] = operand(&a->in.v, j / page, j % page, h, c);
        }
}

/* Pages of keys and values whose rows are all the same memory. */
static void share_rows(attention *a, int64_t pages)
{
    static const int32_t table[] = {0, 1, 2, 3, 4, 5, 6, 7};
    static int32_t length;
    fa_tensor *const tensors[] = {&a->in.k, &a->in.v};
    for (int n = 0; n < 2; n++) {
        fa_tensor *t = tensors[n];
        t->shape[0] = pages;
        t->shape[1] = a->s.n_k / pages;
        t->stride[0] = t->shape[1] * t->stride[1];
        t->stride[1] = 0;
    }
    length = (int32_t)a->s.n_k;
    a->in.options.seqlens_k = &length;
    a->in.options.block_table = table;
    a->in.options.block_table_stride = pages;
}

/* Computes row i of head h, which is loaded, into a->out. exact: by the definition. */
static void simulate_row(attention *a, const kernel *k, const ref_array *exact, int64_t h,
                         int64_t i)
{
    static double x[MAX_KEYS];
    const int64_t n = a->s.n_k, lost = k->drops_key ? n / 2 : -1;
    double out[DIM] = {0}, largest = -INFINITY, sum = 0;
    for (int64_t j = 0; j < n; j++) {
        x[j] = 0;
        for (int64_t c = 0; c < DIM; c++) x[j] += operand(&a->in.q, 0, i, h, c) * keys[j][c];
        x[j] /= sqrt((double)DIM);
        largest = fmax(largest, x[j]);
    }
    for (int64_t j = 0; j < n; j++) {
        const double weight = j == lost ? 0 : k->base * exp(x[j] - largest);
        const double p = rounded(k->weights, weight);
        sum += k->sum_rounded ? p : weight;
        for (int64_t c = 0; c < DIM; c++) out[c] += p * values[j][c];
    }
    for (int64_t c = 0; c < DIM; c++) {
        const double want = exact->value[ref_array_index(exact, 0, i, h, c)];
        ref_store(&a->out, 0, i, h, c, want + k->error * (out[c] / sum - want));
    }
}

/* The report of such a kernel on random inputs, with queries multiplied by peak. pages: whose keys
 * are equal; 0: no keys are. */
static ref_report check_pages(const kernel *k, fa_dtype dtype, int64_t n, double peak,
                              bool sum_rounded, int64_t pages)
{
    attention a;
    const shape s = {1, HEADS, HEADS, QUERIES, n, DIM, DIM};
    ref_report report = REF_REPORT_INIT;
    ref_array out, lse;
    attention_make(&a, (uint64_t)n, s, dtype);
    attention_fill(&a, &a.in.q, peak);
    a.in.options.device = FA_DEVICE_CUDA;
    if (dtype == FA_FLOAT32) a.in.options.precision = FA_PRECISION_TF32;
    if (pages > 0) share_rows(&a, pages);
    a.in.rounding = ref_rounding_for(&a.in, dtype, true);
    a.in.rounding.sum_rounded = sum_rounded;
    ref_forward(&a.in, &out, &lse);
    for (int64_t h = 0; h < HEADS; h++) {
        load_head(&a, h);
        for (int64_t i = 0; i < QUERIES; i++) simulate_row(&a, k, &out, h, i);
    }
    ref_check_tensor(&report, "out", &a.out, &out);
    ref_array_free(&out);
    ref_array_free(&lse);
    attention_free(&a);
    return report;
}

static ref_report check(const kernel *k, fa_dtype dtype, int64_t n, double peak, bool sum_rounded)
{
    return check_pages(k, dtype, n, peak, sum_rounded, 0);
}

static const int64_t lengths[] = {1, 2, 7, 64, 200, MAX_KEYS};
static const double peaks[] = {1, 16};
enum {
    LENGTHS = (int)(sizeof lengths / sizeof *lengths),
    PEAKS = (int)(sizeof peaks / sizeof *peaks)
};

/* Weights rounded at the row's maximum or at another base, divided by either sum. */
static void check_roundings(fa_dtype dtype)
{
    const double bases[] = {1, 1.37};
    for (int n = 0; n < LENGTHS; n++)
        for (int b = 0; b < 2; b++)
            for (int p = 0; p < PEAKS; p++)
                for (int sum = 0; sum < 2; sum++) {
                    const kernel k = {dtype, bases[b], sum, false, 1};
                    const ref_report r = check(&k, dtype, lengths[n], peaks[p], sum);
                    CHECK(r.ok, "%s, %lld keys, base %g, queries times %g, sum of %s weights: %s",
                          fa_dtype_name(dtype), (long long)lengths[n], bases[b], peaks[p],
                          sum ? "rounded" : "exact", r.message);
                }
}

/* Such errors several times: the largest of a few thousand is then above what is allowed. In tf32,
 * scores, weights and values are rounded, and the allowances for each are added up. */
enum { TIMES = 6, TIMES_TF32 = 16 };

static void check_larger_errors(fa_dtype dtype)
{
    const int times = dtype == FA_FLOAT32 ? TIMES_TF32 : TIMES;
    for (int n = 2; n < LENGTHS; n++)
        for (int sum = 0; sum < 2; sum++) {
            const kernel k = {dtype, 1.37, sum, false, times};
            const ref_report r = check(&k, dtype, lengths[n], 1, sum);
            CHECK(!r.ok, "%s, %lld keys, sum of %s weights: %d times the errors pass (%.0f%%)",
                  fa_dtype_name(dtype), (long long)lengths[n], sum ? "rounded" : "exact", times,
                  1e2 * r.worst);
        }
}

/* Keys that are the same memory are rounded the same way: their errors add up, and exactly that is
 * allowed. */
static void check_equal_keys(fa_dtype dtype)
{
    enum { KEYS = 240 };
    const int times = dtype == FA_FLOAT32 ? TIMES_TF32 : TIMES;
    for (int64_t pages = 2; pages <= 8; pages += 3)
        for (int sum = 0; sum < 2; sum++) {
            const kernel k = {dtype, 1.37, sum, false, 1},
                         larger = {dtype, 1.37, sum, false, times};
            const ref_report r = check_pages(&k, dtype, KEYS, 1, sum, pages);
            const ref_report bad = check_pages(&larger, dtype, KEYS, 1, sum, pages);
            CHECK(r.ok, "%s, %lld pages of equal keys, sum of %s weights: %s", fa_dtype_name(dtype),
                  (long long)pages, sum ? "rounded" : "exact", r.message);
            CHECK(!bad.ok, "%s, %lld pages of equal keys: %d times the errors pass (%.0f%%)",
                  fa_dtype_name(dtype), (long long)pages, times, 1e2 * bad.worst);
        }
}

static void check_lost_key(fa_dtype dtype)
{
    for (int n = 1; n < LENGTHS; n++) {
        const kernel k = {dtype, 1, false, true, 1};
        const ref_report r = check(&k, dtype, lengths[n], 1, false);
        CHECK(!r.ok, "%s, %lld keys: one may be lost (%.0f%% of what is allowed)",
              fa_dtype_name(dtype), (long long)lengths[n], 1e2 * r.worst);
    }
}

/* A row that one key dominates. Divided by the exact sum, a weight between two numbers keeps its
 * rounding error; divided by the sum of the rounded weights it has none, and none is allowed. */
static void check_dominated_rows(fa_dtype dtype)
{
    const kernel k = {dtype, 1 + 0.49 * ref_epsilon(dtype), false, false, 1};
    const ref_report exact = check(&k, dtype, 64, 16, false);
    const ref_report strict = check(&k, dtype, 64, 16, true);
    CHECK(exact.ok, "%s: %s", fa_dtype_name(dtype), exact.message);
    CHECK(!strict.ok, "%s: the rounding of the largest weight passes (%.0f%%)",
          fa_dtype_name(dtype), 1e2 * strict.worst);
}

/* A gradient of keys or values to which `used` of n equal queries contribute: a float32 sum, one
 * after the other. */
static void sum_equal_queries(const fa_tensor *t, const ref_array *exact, int n, int used)
{
    for (int64_t j = 0; j < t->shape[1]; j++)
        for (int64_t c = 0; c < t->shape[3]; c++) {
            const double whole = exact->value[ref_array_index(exact, 0, j, 0, c)];
            const float term = (float)(whole / n);
            float sum = 0;
            for (int i = 0; i < used; i++) sum += term;
            ref_store(t, 0, j, 0, c, (double)sum);
        }
}

/* Equal terms of sums are rounded the same way: their errors add up. A lost query changes the sum
 * more than that. */
static void check_equal_queries(void)
{
    enum { N = 4000 };
    attention a;
    ref_gradients g;
    attention_make(&a, 1, (shape){1, 1, 1, N, 8, DIM, DIM}, FA_FLOAT32);
    a.in.q.stride[1] = a.dout.stride[1] = 0;
    ref_backward(&a.in, &a.dout, NULL, NULL, &g);
    for (int lost = 0; lost < 2; lost++) {
        ref_report dk = REF_REPORT_INIT, dv = REF_REPORT_INIT;
        sum_equal_queries(&a.dk, &g.dk, N, N - lost);
        sum_equal_queries(&a.dv, &g.dv, N, N - lost);
        ref_check_tensor(&dk, "dk", &a.dk, &g.dk);
        ref_check_tensor(&dv, "dv", &a.dv, &g.dv);
        CHECK(dk.ok == !lost, "equal queries, %d lost: %.0f%% %s", lost, 1e2 * dk.worst,
              dk.message);
        CHECK(dv.ok == !lost, "equal queries, %d lost: %.0f%% %s", lost, 1e2 * dv.worst,
              dv.message);
    }
    ref_gradients_free(&g);
    attention_free(&a);
}

/* The CPU in float16, and every device in float32, keep weights in float32: the errors of tensor
 * cores are not accepted. */
static void check_devices(void)
{
    ref_inputs in = {.q.dtype = FA_FLOAT16, .k.dtype = FA_FLOAT16, .v.dtype = FA_FLOAT16};
    CHECK(ref_rounding_for(&in, FA_FLOAT16, true).weight == 0, "float16 on the CPU");
    in.options.device = FA_DEVICE_CUDA;
    CHECK(ref_rounding_for(&in, FA_FLOAT16, true).weight == 0x1p-11, "float16 on tensor cores");
    in.k.dtype = in.q.dtype = in.v.dtype = FA_BFLOAT16;
    CHECK(ref_rounding_for(&in, FA_FLOAT16, true).weight == 0x1p-8, "bfloat16 on tensor cores");
    in.v.dtype = FA_FLOAT32;
    in.options.precision = FA_PRECISION_TF32;
    CHECK(ref_rounding_for(&in, FA_FLOAT16, true).operand == 0, "float32 values alone");
    in.q.dtype = in.k.dtype = FA_FLOAT32;
    CHECK(ref_rounding_for(&in, FA_FLOAT32, true).operand == 0x1.4p-11, "tf32 on tensor cores");
    in.options.device = FA_DEVICE_CPU;
    CHECK(ref_rounding_for(&in, FA_FLOAT32, true).operand == 0, "tf32 on the CPU");
    in.options.device = FA_DEVICE_CUDA;
    in.options.precision = FA_PRECISION_IEEE;
    CHECK(ref_rounding_for(&in, FA_FLOAT32, true).operand == 0, "float32 arithmetic");
    CHECK(ref_rounding_for(&in, FA_FLOAT16, true).weight == 0, "float32 values");
}

int main(void)
{
    const fa_dtype dtypes[] = {FA_FLOAT16, FA_BFLOAT16};
    for (int n = 0; n < 2; n++) {
        check_roundings(dtypes[n]);
        check_larger_errors(dtypes[n]);
        check_equal_keys(dtypes[n]);
        check_lost_key(dtypes[n]);
        check_dominated_rows(dtypes[n]);
    }
    check_roundings(FA_FLOAT32);
    check_larger_errors(FA_FLOAT32);
    check_equal_keys(FA_FLOAT32);
    check_lost_key(FA_FLOAT32);
    check_equal_queries();
    check_devices();
    return test_end();
}
