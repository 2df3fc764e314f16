/* n = 131,072: scratch memory does not grow with n. A narrow window keeps it fast; some rows are
 * checked. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "check.h"
#include "flashattn.h"
#include "random.h"

enum { N = 131072, D = 64, WINDOW = 20 };

/* The memory that a call may add to the peak, in KiB; sanitizers keep freed memory for a while. */
#ifdef FA_SANITIZED
static const long allowed = 512 * 1024;
#else
static const long allowed = 64 * 1024;
#endif

static long peak_kib(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
}

/* Random, or (NULL) poisoned: not zeroed, because a compiler may turn that into a calloc that
 * touches no page, and the pages would then be attributed to the call. */
static float *make(int64_t n, ref_random *random)
{
    float *x = malloc((size_t)n * sizeof *x);
    if (!x) abort();
    for (int64_t i = 0; i < n; i++) x[i] = random ? (float)ref_random_normal(random) : NAN;
    return x;
}

/* One row in double. */
static void check_row(const float *q, const float *k, const float *v, const float *out, int64_t i,
                      int64_t from, int64_t to)
{
    double expected[D] = {0}, sum = 0;
    for (int64_t j = from; j < to; j++) {
        double x = 0;
        for (int c = 0; c < D; c++) x += (double)q[i * D + c] * (double)k[j * D + c];
        double weight = exp(x / 8);
        sum += weight;
        for (int c = 0; c < D; c++) expected[c] += weight * (double)v[j * D + c];
    }
    for (int c = 0; c < D; c++)
        CHECK(fabs((double)out[i * D + c] - expected[c] / sum) <= 1e-4,
              "out[%lld][%d] = %g, expected %g", (long long)i, c, (double)out[i * D + c],
              expected[c] / sum);
}

static void check_pass(fa_status status, const char *what, long before)
{
    CHECK(status == FA_OK, "%s: %s", what, status == FA_OK ? "" : fa_last_error());
    long grown = peak_kib() - before;
    CHECK(grown <= allowed, "%s: the peak grew by %ld KiB, allowed are %ld", what, grown, allowed);
    printf("%s: %ld KiB beyond inputs and outputs\n", what, grown);
}

int main(void)
{
    ref_random random = {1};
    test_begin();
    float *q = make(N * D, &random), *k = make(N * D, &random), *v = make(N * D, &random);
    float *out = make(N * D, NULL), *lse = make(N, NULL), *dq = make(N * D, NULL);
    fa_tensor tq = fa_bshd(q, FA_FLOAT32, 1, N, 1, D), tk = fa_bshd(k, FA_FLOAT32, 1, N, 1, D);
    fa_tensor tv = fa_bshd(v, FA_FLOAT32, 1, N, 1, D), to = fa_bshd(out, FA_FLOAT32, 1, N, 1, D);
    fa_options o;
    memset(&o, 0, sizeof o);
    o.size = sizeof o;
    o.flags = FA_CAUSAL | FA_WINDOW;
    o.window_left = WINDOW;
    o.threads = 2;
    long before = peak_kib();
    check_pass(fa_forward(&tq, &tk, &tv, &to, lse, &o), "forward, 131072 queries", before);
    for (int64_t i = 0; i < N; i += 9973)
        check_row(q, k, v, out, i, i > WINDOW ? i - WINDOW : 0, i + 1);

    fa_gradients g;
    memset(&g, 0, sizeof g);
    g.size = sizeof g;
    g.dout = tv;
    g.dq = fa_bshd(dq, FA_FLOAT32, 1, N, 1, D);
    before = peak_kib();
    check_pass(fa_backward(&tq, &tk, &tv, &to, lse, &g, &o), "backward, 131072 queries", before);

    fa_tensor few = fa_bshd(q, FA_FLOAT32, 1, 40, 1, D),
              few_out = fa_bshd(out, FA_FLOAT32, 1, 40, 1, D);
    o.flags = 0;
    o.window_left = 0;
    before = peak_kib();
    check_pass(fa_forward(&few, &tk, &tv, &few_out, lse, &o), "forward, 40 queries, all keys",
               before);
    check_row(q, k, v, out, 39, 0, N);
    few.shape[1] = few_out.shape[1] = 1;
    before = peak_kib();
    check_pass(fa_decode(&few, &tk, &tv, &few_out, lse, &o), "decode, 131072 keys", before);
    check_row(q, k, v, out, 0, 0, N);
    float *all[] = {q, k, v, out, lse, dq};
    for (int n = 0; n < 6; n++) free(all[n]);
    return test_end();
}
