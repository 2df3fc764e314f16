/* Infinities, NaN and huge numbers: no overflow in the softmax, and NaN stays in its own row. */
#include <math.h>
#include <stdio.h>

#include "attention.h"

static const shape usual = {1, 2, 1, 40, 300, 16, 16};

static bool row_is_nan(const fa_tensor *t, int64_t i, int64_t h)
{
    for (int64_t c = 0; c < t->shape[3]; c++)
        if (!isnan(ref_load(t, 0, i, h, c))) return false;
    return true;
}

static void set_row(const fa_tensor *t, int64_t i, int64_t h, double x)
{
    for (int64_t c = 0; c < t->shape[3]; c++) ref_store(t, 0, i, h, c, x);
}

/* NaN in one query: its own row becomes NaN, and in backward all the keys that it sees. */
static void check_query(fa_dtype dtype, double bad, bool decode)
{
    shape s = usual;
    if (decode) s.n_q = 3;
    attention a, clean;
    attention_make(&a, 1, s, dtype);
    attention_make(&clean, 1, s, dtype);
    attention_set(&a, OPTION_CAUSAL);
    attention_set(&clean, OPTION_CAUSAL);
    ref_store(&a.in.q, 0, 1, 1, 3, bad);
    if (!attention_forward(&a, "NaN query") || !attention_forward(&clean, "clean")) return;
    for (int64_t i = 0; i < s.n_q; i++)
        for (int64_t h = 0; h < 2; h++) {
            bool own = i == 1 && h == 1;
            double difference =
                fabs(ref_load(&a.out, 0, i, h, 0) - ref_load(&clean.out, 0, i, h, 0));
            CHECK(own ? row_is_nan(&a.out, i, h) : difference <= 0.02,
                  "%s query 1 is %g: query %lld head %lld "
                  "is off by %g",
                  fa_dtype_name(dtype), bad, (long long)i, (long long)h, difference);
        }
    if (isnan(bad)) attention_check_backward(&a, "NaN in a query");
    attention_free(&a);
    attention_free(&clean);
}

/* NaN in one key or value: only the rows that see it become NaN. */
static void check_key(fa_dtype dtype, bool value, double bad, int64_t n_q)
{
    shape s = usual;
    s.n_q = n_q;
    attention a;
    char what[80];
    const int64_t bad_key = s.n_k - n_q / 2; /* seen by the last half of the queries */
    attention_make(&a, 2, s, dtype);
    attention_set(&a, OPTION_CAUSAL);
    set_row(value ? &a.in.v : &a.in.k, bad_key, 0, bad);
    snprintf(what, sizeof what, "%s %s is %g, %lld queries", fa_dtype_name(dtype),
             value ? "value" : "key", bad, (long long)n_q);
    if (!attention_forward(&a, what)) return;
    for (int64_t i = 0; i < n_q; i++)
        for (int64_t h = 0; h < 2; h++) {
            double out = ref_load(&a.out, 0, i, h, 0);
            bool sees = bad_key <= i + s.n_k - n_q;
            CHECK(sees == !isfinite(out), "%s: out of query %lld is %g", what, (long long)i, out);
        }
    if (isnan(bad)) attention_check_backward(&a, what);
    attention_free(&a);
}

/* One masked key full of NaN: no query sees it, so nothing may change. */
static void check_hidden_key(fa_dtype dtype)
{
    attention a;
    uint8_t mask[300];
    for (int j = 0; j < 300; j++) mask[j] = j % 7 != 3;
    fa_tensor view = {mask, FA_BOOL, {1, 1, 1, 300}, {0, 0, 0, 1}};
    attention_make(&a, 3, usual, dtype);
    a.in.options.mask = &view;
    for (int64_t j = 3; j < 300; j += 7) {
        set_row(&a.in.k, j, 0, j % 2 ? (double)NAN : (double)INFINITY);
        set_row(&a.in.v, j, 0, j % 2 ? (double)INFINITY : (double)NAN);
    }
    attention_check_backward(&a, "masked keys are NaN");
    attention_free(&a);
}

/* Logits of +-10^4 and more: exp of them overflows, the softmax does not. */
static void check_huge(fa_dtype dtype, double amplitude, double softcap)
{
    attention a;
    char what[80];
    attention_make(&a, 4, usual, dtype);
    attention_fill(&a, &a.in.q, amplitude);
    attention_fill(&a, &a.in.k, amplitude);
    a.in.options.softcap = (float)softcap;
    snprintf(what, sizeof what, "%s amplitude %g softcap %g", fa_dtype_name(dtype), amplitude,
             softcap);
    attention_check_backward(&a, what);
    for (int64_t i = 0; i < usual.n_q; i++)
        CHECK(isfinite(ref_load(&a.out, 0, i, 0, 0)), "%s: query %lld is not finite", what,
              (long long)i);
    attention_free(&a);
}

/* -infinity in the bias hides; +infinity and NaN only affect their own row. */
static void check_bias(fa_dtype dtype, double bad)
{
    attention a;
    attention_make(&a, 5, usual, dtype);
    fa_tensor view = {NULL, FA_FLOAT32, {1, 1, usual.n_q, usual.n_k}, {0}};
    const ref_layout contiguous = REF_LAYOUT_CONTIGUOUS;
    ref_buffers_tensor(&a.buffers, "bias", &view, &contiguous);
    attention_fill(&a, &view, 1);
    for (int64_t j = 0; j < usual.n_k; j++)
        ref_store(&view, 0, 0, 2, j, -INFINITY); /* sees nothing */
    for (int64_t j = 0; j < usual.n_k; j += 2) ref_store(&view, 0, 0, 3, j, -INFINITY);
    if (bad > 0 || isnan(bad)) ref_store(&view, 0, 0, 5, 250, bad);
    a.in.options.bias = &view;
    if (bad < 0) attention_check_backward(&a, "-infinity in the bias");
    if (!attention_forward(&a, "bias")) return;
    for (int64_t i = 0; i < usual.n_q; i++) {
        bool spoilt = i == 5 && !(bad < 0);
        double out = ref_load(&a.out, 0, i, 0, 0);
        CHECK(spoilt ? isnan(out) : isfinite(out), "bias %g: out of query %lld is %g", bad,
              (long long)i, out);
    }
    attention_free(&a);
}

int main(void)
{
    test_begin();
    for (int n = 0; n < 3; n++) {
        fa_dtype dtype = float_dtypes[n];
        for (int decode = 0; decode < 2; decode++) {
            check_query(dtype, NAN, decode);
            check_query(dtype, INFINITY, decode);
        }
        for (int value = 0; value < 2; value++)
            for (int64_t n_q = 2; n_q <= 40; n_q += 38) {
                check_key(dtype, value, NAN, n_q);
                if (value) check_key(dtype, value, INFINITY, n_q);
            }
        check_hidden_key(dtype);
        check_huge(dtype, 60, 0);
        check_huge(dtype, 200, 0);
        check_huge(dtype, 200, 30);
        check_bias(dtype, -1);
        check_bias(dtype, INFINITY);
        check_bias(dtype, NAN);
    }
    return test_end();
}
