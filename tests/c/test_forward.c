/* Forward against float64: every option alone, every pair of options, every length near a tile
 * edge. */
#include <stdio.h>

#include "attention.h"

static void check_options(fa_dtype dtype, shape s, option first, option second)
{
    attention a;
    char what[120];
    attention_make(&a, (uint64_t)(first * 100 + second), s, dtype);
    attention_set(&a, first);
    if (second != first) attention_set(&a, second);
    snprintf(what, sizeof what, "%s, %s and %s, n %lldx%lld", fa_dtype_name(dtype),
             option_name(first), option_name(second), (long long)s.n_q, (long long)s.n_k);
    attention_check_forward(&a, what);
    attention_free(&a);
}

static void check_pairs_of_options(void)
{
    static const shape shapes[] = {{2, 4, 2, 37, 70, 24, 24}, {1, 2, 2, 70, 37, 16, 40}};
    for (int n = 0; n < 2; n++)
        for (int t = 0; t < 3; t++)
            for (int first = 0; first < NUM_OPTIONS; first++)
                for (int second = first; second < NUM_OPTIONS; second++)
                    check_options(float_dtypes[t], shapes[n], (option)first, (option)second);
}

static void check_lengths(fa_dtype dtype, int64_t n_q, int64_t n_k, bool causal)
{
    attention a;
    char what[120];
    const shape s = {1, 1, 1, n_q, n_k, 8, 8};
    attention_make(&a, (uint64_t)(n_q * 1000 + n_k), s, dtype);
    if (causal) attention_set(&a, OPTION_CAUSAL);
    snprintf(what, sizeof what, "%s%s n %lldx%lld", fa_dtype_name(dtype), causal ? " causal" : "",
             (long long)n_q, (long long)n_k);
    attention_check_forward(&a, what);
    attention_free(&a);
}

static void check_tile_edges(void)
{
    static const int64_t edges[] = {0,   1,   2,   5,   6,   7,   11,  12,  13,  14,  16,  17,
                                    31,  32,  33,  64,  95,  96,  97,  127, 128, 129, 167, 168,
                                    169, 191, 192, 193, 255, 256, 257, 264, 265, 511, 512, 513};
    const int count = (int)(sizeof edges / sizeof *edges);
    for (int i = 0; i < count; i++)
        for (int j = 0; j < count; j++)
            check_lengths(float_dtypes[(i + j) % 3], edges[i], edges[j], (i * 7 + j) % 2);
    check_lengths(FA_FLOAT32, 1600, 70, true); /* the longest query tile */
    check_lengths(FA_BFLOAT16, 1600, 70, false);
    check_lengths(FA_BFLOAT16, 2047, 70, false); /* the same for AMX */
    check_lengths(FA_BFLOAT16, 2049, 70, true);
}

static void check_mixed_dtypes(void)
{
    for (int n = 0; n < 81; n++) {
        const shape s = {1, 2, 1, 20, 45, 12, 20};
        attention a, b;
        fa_dtype dtypes[4] = {float_dtypes[n % 3], float_dtypes[n / 3 % 3], float_dtypes[n / 9 % 3],
                              float_dtypes[n / 27]};
        char what[120];
        attention_make(&a, (uint64_t)n, s, dtypes[0]);
        attention_make(&b, (uint64_t)n, s, dtypes[1]);
        a.in.k = b.in.k;
        attention c, d;
        attention_make(&c, (uint64_t)n, s, dtypes[2]);
        attention_make(&d, (uint64_t)n, s, dtypes[3]);
        a.in.v = c.in.v;
        a.out = d.out;
        a.in.rounding = ref_rounding_for(&a.in, dtypes[3], true);
        snprintf(what, sizeof what, "q %s, k %s, v %s, out %s", fa_dtype_name(dtypes[0]),
                 fa_dtype_name(dtypes[1]), fa_dtype_name(dtypes[2]), fa_dtype_name(dtypes[3]));
        attention_check_forward(&a, what);
        attention_free(&a);
        attention_free(&b);
        attention_free(&c);
        attention_free(&d);
    }
}

static void check_without_options_and_lse(void)
{
    const shape s = {2, 2, 1, 5, 9, 32, 32};
    attention a;
    attention_make(&a, 1, s, FA_FLOAT32);
    fa_status status = fa_forward(&a.in.q, &a.in.k, &a.in.v, &a.out, NULL, NULL);
    CHECK(status == FA_OK, "options and lse NULL: %s", fa_last_error());
    ref_array out, lse;
    ref_report report = REF_REPORT_INIT;
    ref_forward(&a.in, &out, &lse);
    ref_check_tensor(&report, "out", &a.out, &out);
    CHECK(report.ok, "options and lse NULL: %s", report.message);
    ref_array_free(&out);
    ref_array_free(&lse);
    attention_free(&a);
}

int main(void)
{
    test_begin();
    check_pairs_of_options();
    check_tile_edges();
    check_mixed_dtypes();
    check_without_options_and_lse();
    return test_end();
}
