/* fa_weights against float64, and the sum of each row. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "attention.h"

static void check(shape s, option first, option second, fa_dtype dtype, fa_dtype weights_dtype,
                  const int64_t *rows, int64_t num_rows)
{
    attention a;
    ref_array want;
    ref_report report = REF_REPORT_INIT;
    ref_layout contiguous = REF_LAYOUT_CONTIGUOUS;
    fa_tensor weights = {NULL, weights_dtype, {s.batch, s.heads_q, num_rows, s.n_k}, {0}};
    attention_make(&a, (uint64_t)(first * 10 + second), s, dtype);
    attention_set(&a, first);
    if (second != first) attention_set(&a, second);
    ref_buffers_tensor(&a.buffers, "weights", &weights, &contiguous);
    ref_buffers_output(&a.buffers, &weights);
    ref_buffers_freeze(&a.buffers);
    fa_status status = fa_weights(&a.in.q, &a.in.k, rows, num_rows, &weights, &a.in.options);
    CHECK(status == FA_OK, "fa_weights: %s", fa_last_error());
    ref_weights(&a.in, rows, num_rows, s.n_k, &want);
    ref_check_tensor(&report, "weights", &weights, &want);
    ref_buffers_check(&a.buffers, &report);
    CHECK(report.ok, "%s and %s: %s", option_name(first), option_name(second), report.message);
    ref_array_free(&want);
    attention_free(&a);
}

/* Each row that sees a key sums to 1. */
static void check_sums(void)
{
    const shape s = {1, 2, 1, 50, 40, 16, 16};
    attention a;
    static float w[2 * 50 * 40];
    fa_tensor weights = {w, FA_FLOAT32, {1, 2, 50, 40}, {4000, 2000, 40, 1}};
    attention_make(&a, 1, s, FA_FLOAT32);
    attention_set(&a, OPTION_CAUSAL); /* bottom right: the first 10 queries see nothing */
    CHECK(fa_weights(&a.in.q, &a.in.k, NULL, 50, &weights, &a.in.options) == FA_OK, "%s",
          fa_last_error());
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < 50; i++) {
            double sum = 0;
            for (int j = 0; j < 40; j++) sum += (double)w[(h * 50 + i) * 40 + j];
            CHECK(fabs(sum - (i < 10 ? 0 : 1)) < 1e-5, "row %d sums to %.9g", i, sum);
        }
    attention_free(&a);
}

int main(void)
{
    static const int64_t some[] = {0, 36, 7, 7, 35};
    const shape s = {2, 4, 2, 37, 70, 24, 24}, few = {1, 2, 2, 40, 3, 16, 16};
    test_begin();
    for (int first = 0; first < NUM_OPTIONS; first++)
        for (int second = first; second < NUM_OPTIONS; second++) {
            int n = first + second;
            check(s, (option)first, (option)second, float_dtypes[n % 3], float_dtypes[n / 3 % 3],
                  some, 5);
            check(few, (option)first, (option)second, float_dtypes[n % 3], FA_FLOAT32, NULL, 40);
        }
    check(s, OPTION_SCALE, OPTION_SCALE, FA_FLOAT32, FA_FLOAT32, some, 0);
    check_sums();
    return test_end();
}
