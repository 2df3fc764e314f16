/*
 * The kernels on FMA units, run on the host (cuda_on_cpu.h): the rounding errors of their sums,
 * compared with float32 attention that computes each sum in one chain of fused multiply-adds. Their
 * sums have two levels, so results and gradients are more exact. Gradients use what the forward
 * kernel wrote: its scores have the same errors.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "caller_memory.h"
#include "check.h"
#include "cuda/parameters.h"
#include "cuda/plan_backward.h"
#include "cuda_on_cpu.h"
#include "gpus.h"
#include "normalize.h"
#include "sample.h"

enum { MOST_KEYS = 4096, MOST_DIM = 512 };

#define DECLARE(name, params)                                                                      \
    void name(params p);                                                                           \
    static void run_##name(const void *p) { name(*(const params *)p); }
DECLARE(forward_simt_d64, fa_attention_params)
DECLARE(forward_simt_d256, fa_attention_params)
DECLARE(forward_simt_d512, fa_attention_params)
DECLARE(backward_delta, fa_backward_params)
DECLARE(backward_dq_simt_d64, fa_backward_params)
DECLARE(backward_dq_simt_d256, fa_backward_params)
DECLARE(backward_dq_simt_d512, fa_backward_params)
DECLARE(backward_dkv_simt_d64, fa_backward_params)
DECLARE(backward_dkv_simt_d256, fa_backward_params)
DECLARE(backward_dkv_simt_d512, fa_backward_params)

#define KERNEL(name) [FA_VARIANT_##name] = run_##name
static void (*const kernels[FA_VARIANTS])(const void *parameters) = {
    KERNEL(forward_simt_d64),      KERNEL(forward_simt_d256),     KERNEL(forward_simt_d512),
    KERNEL(backward_delta),        KERNEL(backward_dq_simt_d64),  KERNEL(backward_dq_simt_d256),
    KERNEL(backward_dq_simt_d512), KERNEL(backward_dkv_simt_d64), KERNEL(backward_dkv_simt_d256),
    KERNEL(backward_dkv_simt_d512)};

/* ---- The kernels ----------------------------------------------------------------------------- */

static int runs[FA_VARIANTS];

static void launch(const fa_cuda_plan_launch *l, const void *params, const ref_buffers *memory)
{
    cuda_run run = {.name = fa_variants[l->variant].name,
                    .kernel = kernels[l->variant],
                    .parameters = params,
                    .grid = l->grid,
                    .threads = l->threads,
                    .smem_bytes = l->smem_bytes,
                    .memory = memory};
    if (!run.kernel) abort();
    runs[l->variant]++;
    cuda_run_kernel(&run);
}

static void run_pass(const attention *a, bool backward)
{
    const fa_gradients gradients = {.dout = a->dout, .dq = a->dq, .dk = a->dk, .dv = a->dv};
    fa_options options = a->in.options;
    const fa_arguments arguments = {.pass = backward ? FA_PASS_BACKWARD : FA_PASS_FORWARD,
                                    .device = FA_DEVICE_CUDA,
                                    .q_memory.ordinal = -1,
                                    .q = &a->in.q,
                                    .k = &a->in.k,
                                    .v = &a->in.v,
                                    .out = &a->out,
                                    .lse = a->lse,
                                    .gradients = backward ? &gradients : NULL,
                                    .options = &options};
    char why[320] = "";
    ref_buffers memory = a->buffers;
    fa_problem p;
    fa_cuda_plan plan;
    CHECK(fa_problem_make(&arguments, &p) == FA_OK, "%s", fa_last_error());
    const bool planned = fa_cuda_plan_make(&p, &devices[T4], NULL, &plan, why, sizeof why);
    CHECK(planned, "%s", why);
    if (!planned) return;
    if (backward) begin_workspace(&memory, &p, plan.workspace_bytes);
    for (int n = 0; n < plan.count; n++) {
        const fa_cuda_plan_launch *l = &plan.launches[n];
        fa_attention_params forward;
        fa_backward_params back;
        if (l->idle) continue;
        if (backward) fa_cuda_set_backward_params(&p, l, &back);
        else fa_cuda_set_params(&p, l, &forward);
        launch(l, backward ? (const void *)&back : &forward, &memory);
    }
    if (backward) CHECK(end_workspace(&memory, &p), "memory beside the workspace was written");
}

/* ---- The same in one chain for each sum ------------------------------------------------------ */

typedef struct plain {
    float *out, *dq, *dk, *dv; /* rows of MOST_DIM */
} plain;

static float *at(float *rows, int64_t row) { return rows + row * MOST_DIM; }

static float load(const fa_tensor *t, int64_t row, int64_t column)
{
    return (float)ref_load(t, 0, row, 0, column);
}

static float product(const fa_tensor *x, int64_t i, const fa_tensor *y, int64_t j)
{
    const float *a = (const float *)x->data + i * x->shape[3];
    const float *b = (const float *)y->data + j * y->shape[3];
    float sum = 0;
    for (int64_t c = 0; c < x->shape[3]; c++) sum = fmaf(a[c], b[c], sum);
    return sum;
}

static void add_row(float *sums, float weight, const fa_tensor *rows, int64_t row)
{
    const float *x = (const float *)rows->data + row * rows->shape[3];
    for (int64_t c = 0; c < rows->shape[3]; c++) sums[c] = fmaf(weight, x[c], sums[c]);
}

/* Query i, and its contribution to the gradients. */
static void attend_plainly(const attention *a, int64_t i, bool backward, plain *result)
{
    static float logits[MOST_KEYS];
    const float scale = (float)(1 / sqrt((double)a->s.d));
    float top = -INFINITY, sum = 0, delta = 0, *out = at(result->out, i);
    for (int64_t j = 0; j < a->s.n_k; j++) {
        logits[j] = scale * product(&a->in.q, i, &a->in.k, j);
        top = fmaxf(top, logits[j]);
    }
    for (int64_t j = 0; j < a->s.n_k; j++) {
        const float weight = expf(logits[j] - top);
        sum += weight;
        add_row(out, weight, &a->in.v, j);
    }
    for (int64_t c = 0; c < a->s.d; c++) out[c] /= sum;
    if (!backward) return;
    for (int64_t c = 0; c < a->s.d; c++) delta = fmaf(load(&a->dout, i, c), out[c], delta);
    const float lse = top + logf(sum);
    for (int64_t j = 0; j < a->s.n_k; j++) {
        const float weight = expf(logits[j] - lse);
        const float gradient = scale * weight * (product(&a->dout, i, &a->in.v, j) - delta);
        add_row(at(result->dq, i), gradient, &a->in.k, j);
        add_row(at(result->dk, j), gradient, &a->in.q, i);
        add_row(at(result->dv, j), weight, &a->dout, i);
    }
}

/* ---- Errors ---------------------------------------------------------------------------------- */

/* Relative to the error of the plain result. */
typedef struct bounds {
    double out, dq, dkv; /* only out: the others are 0 */
} bounds;

/* The error of what the kernel wrote is less than this many times that of the plain result. */
static void check_rows(const fa_tensor *t, float *rows, const ref_array *want, double times,
                       const char *name, const char *what)
{
    double error = 0, plain_error = 0;
    for (int64_t i = 0; i < t->shape[1]; i++)
        for (int64_t c = 0; c < t->shape[3]; c++) {
            const double exact = want->value[ref_array_index(want, 0, i, 0, c)];
            error += pow(ref_load(t, 0, i, 0, c) - exact, 2);
            plain_error += pow((double)at(rows, i)[c] - exact, 2);
        }
    CHECK(error <= times * times * plain_error,
          "%s: error of %s %g times that of one chain, not %g", what, name,
          sqrt(error / plain_error), times);
}

static plain make_plain(void)
{
    const size_t floats = (size_t)MOST_KEYS * MOST_DIM;
    plain p = {calloc(floats, sizeof(float)), calloc(floats, sizeof(float)),
               calloc(floats, sizeof(float)), calloc(floats, sizeof(float))};
    if (!p.out || !p.dq || !p.dk || !p.dv) abort();
    return p;
}

static void free_plain(plain *p)
{
    free(p->out);
    free(p->dq);
    free(p->dk);
    free(p->dv);
}

static void check_gradients(const attention *a, plain *p, bounds most, const char *what)
{
    ref_gradients want;
    ref_backward(&a->in, &a->dout, NULL, NULL, &want);
    run_pass(a, true);
    check_rows(&a->dq, p->dq, &want.dq, most.dq, "dq", what);
    check_rows(&a->dk, p->dk, &want.dk, most.dkv, "dk", what);
    check_rows(&a->dv, p->dv, &want.dv, most.dkv, "dv", what);
    ref_gradients_free(&want);
}

/* Queries are `factor` times as large as usual. */
static void check_problem(shape s, double factor, bounds most)
{
    attention a;
    ref_array want, lse;
    char what[100];
    snprintf(what, sizeof what, "d %d, %d queries times %g, %d keys", (int)s.d, (int)s.n_q, factor,
             (int)s.n_k);
    attention_make(&a, 19, s, FA_FLOAT32);
    for (int64_t i = 0; i < s.n_q; i++)
        for (int64_t c = 0; c < s.d; c++)
            ref_store(&a.in.q, 0, i, 0, c, factor * ref_load(&a.in.q, 0, i, 0, c));
    plain p = make_plain();
    for (int64_t i = 0; i < s.n_q; i++) attend_plainly(&a, i, most.dq > 0, &p);
    ref_forward(&a.in, &want, &lse);
    run_pass(&a, false);
    check_rows(&a.out, p.out, &want, most.out, "out", what);
    if (most.dq > 0) check_gradients(&a, &p, most, what);
    ref_array_free(&want);
    ref_array_free(&lse);
    free_plain(&p);
    attention_free(&a);
}

/* One key has the weight 1, and the others together 1.2e-5. What a thread adds in a tile is less
 * than half a unit in the last place of 1, so plain addition loses it. */
static void check_small_weights(int d)
{
    const shape s = {1, 1, 1, 8, MOST_KEYS, d, d};
    const double logit = log(0.4 * 0x1p-23 / 16);
    attention a;
    attention_make(&a, 23, s, FA_FLOAT32);
    for (int64_t c = 0; c < d; c++) {
        for (int64_t i = 0; i < s.n_q; i++) ref_store(&a.in.q, 0, i, 0, c, 1);
        for (int64_t j = 0; j < s.n_k; j++) ref_store(&a.in.k, 0, j, 0, c, j ? logit / sqrt(d) : 0);
    }
    run_pass(&a, false);
    const double want = log1p((double)(s.n_k - 1) * exp(logit));
    for (int64_t i = 0; i < s.n_q; i++)
        CHECK(fabs((double)a.lse[i] - want) < 3e-7, "d %d: log-sum-exp %g, expected %g", d,
              (double)a.lse[i], want);
    attention_free(&a);
}

int main(void)
{
    static const int dims[] = {256, 320, 512};
    static const double factors[] = {1, 4, 16};
    const int count = sizeof factors / sizeof *factors;
    test_begin();
    (void)sample_begin(false);
    check_small_weights(64);
    check_small_weights(512);
    /* Sums only over keys and over queries: a head dim is one chain. */
    check_problem((shape){1, 1, 1, 32, 2048, 64, 64}, 1, (bounds){0.5, 0.65, 0.7});
    check_problem((shape){1, 1, 1, 1024, 32, 64, 64}, 1, (bounds){1.2, 1.2, 0.6});
    for (size_t n = 0; n < sizeof dims / sizeof *dims; n++) {
        const int d = dims[n];
        check_problem((shape){1, 1, 1, 32, 1024, d, d}, 1, (bounds){0.4, 0, 0});
        for (int f = 0; f < count; f++)
            if (sample_has((int64_t)n * count + f, 0))
                check_problem((shape){1, 1, 1, 96, 128, d, d}, factors[f],
                              (bounds){0.55, 0.7, 0.7});
    }
    sample_end(kernels, runs);
    return test_end();
}
