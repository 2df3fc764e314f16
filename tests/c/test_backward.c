/* Backward against float64 by formula, and the formula against central differences of the
 * forward. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "attention.h"

static void check_options(fa_dtype dtype, shape s, option first, option second)
{
    attention a;
    char what[120];
    attention_make(&a, (uint64_t)(first * 100 + second), s, dtype);
    attention_set(&a, first);
    if (second != first) attention_set(&a, second);
    float dlse[1024];
    for (int n = 0; n < 1024; n++) dlse[n] = (float)ref_random_normal(&a.random);
    if ((first + second) % 2 == 0) a.dlse = dlse;
    snprintf(what, sizeof what, "%s, %s and %s, n %lldx%lld", fa_dtype_name(dtype),
             option_name(first), option_name(second), (long long)s.n_q, (long long)s.n_k);
    attention_check_backward(&a, what);
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

static void check_tile_edges(void)
{
    static const int64_t edges[] = {0,  1,  2,  11, 12,  13,  15,  16,  17,  31,  32,  33,  63,
                                    64, 65, 96, 97, 127, 128, 129, 191, 192, 193, 255, 256, 257};
    const int count = (int)(sizeof edges / sizeof *edges);
    for (int i = 0; i < count; i++)
        for (int j = 0; j < count; j++) {
            attention a;
            char what[120];
            const shape s = {1, 1, 1, edges[i], edges[j], 8, 8};
            attention_make(&a, (uint64_t)(i * 100 + j), s, float_dtypes[(i + j) % 3]);
            if ((i * 7 + j) % 2) attention_set(&a, OPTION_CAUSAL);
            snprintf(what, sizeof what, "n %lldx%lld", (long long)s.n_q, (long long)s.n_k);
            attention_check_backward(&a, what);
            attention_free(&a);
        }
}

/* ---- The reference's gradients against differences ------------------------------------------- */

/* The scalar whose gradients backward computes: sum dout*out + sum dlse*lse. */
static double loss(const attention *a)
{
    ref_array out, lse;
    double sum = 0;
    ref_forward(&a->in, &out, &lse);
    int64_t n = 0;
    for (int64_t b = 0; b < a->s.batch; b++)
        for (int64_t i = 0; i < a->s.n_q; i++)
            for (int64_t h = 0; h < a->s.heads_q; h++)
                for (int64_t c = 0; c < a->s.d_v; c++)
                    sum += out.value[n++] * ref_load(&a->dout, b, i, h, c);
    for (n = 0; n < a->s.batch * a->s.heads_q * a->s.n_q; n++)
        if (isfinite(lse.value[n])) sum += lse.value[n] * (double)a->dlse[n];
    ref_array_free(&out);
    ref_array_free(&lse);
    return sum;
}

/* The error of a central difference is step^2/6 times the third derivative. The steps are powers of
 * two and inputs have few bits, so that x + step is exact. */
static const double step = 0x1p-12;

static double derivative(const attention *a, float *x)
{
    float before = *x;
    *x = before + (float)step;
    double above = loss(a);
    *x = before - (float)step;
    double below = loss(a);
    *x = before;
    return (above - below) / (2 * step);
}

static void check_derivative(const attention *a, float *x, double expected, const char *what,
                             int64_t n)
{
    double found = derivative(a, x);
    CHECK(fabs(found - expected) <= 1e-5 * (1 + fabs(expected)),
          "%s[%lld]: formula %.9g, differences %.9g", what, (long long)n, expected, found);
}

static void check_tensor_derivatives(const attention *a, const fa_tensor *t,
                                     const ref_array *gradient, const char *what)
{
    int64_t count = t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3];
    for (int64_t n = 0; n < count; n += 3)
        check_derivative(a, (float *)t->data + n, gradient->value[n], what, n);
}

/* Rounds a contiguous tensor to multiples of 2^-8. */
static void coarsen(float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) x[i] = (float)(nearbyint((double)x[i] * 256) / 256);
}

static void check_formula(option o)
{
    const shape s = {1, 2, 1, 4, 5, 3, 4};
    attention a;
    ref_gradients g;
    float dlse[8], bias[40];
    attention_make(&a, (uint64_t)o, s, FA_FLOAT32);
    attention_set(&a, o);
    for (int n = 0; n < 8; n++) dlse[n] = (float)ref_random_normal(&a.random);
    for (int n = 0; n < 40; n++) bias[n] = (float)ref_random_normal(&a.random);
    a.dlse = dlse;
    fa_tensor view = {bias, FA_FLOAT32, {1, 2, 4, 5}, {40, 20, 5, 1}};
    if (o == OPTION_BIAS) a.in.options.bias = &view;
    coarsen(a.in.q.data, 24);
    coarsen(a.in.k.data, 15);
    coarsen(a.in.v.data, 20);
    coarsen(bias, 40);

    float sinks[2] = {0.5f, -0.25f};
    if (o == OPTION_SINKS) a.in.options.sinks = sinks;
    ref_backward(&a.in, &a.dout, a.dlse, view.shape, &g);
    char what[60];
    snprintf(what, sizeof what, "%s dq", option_name(o));
    check_tensor_derivatives(&a, &a.in.q, &g.dq, what);
    snprintf(what, sizeof what, "%s dk", option_name(o));
    check_tensor_derivatives(&a, &a.in.k, &g.dk, what);
    snprintf(what, sizeof what, "%s dv", option_name(o));
    check_tensor_derivatives(&a, &a.in.v, &g.dv, what);
    if (o == OPTION_BIAS) check_tensor_derivatives(&a, &view, &g.dbias, "dbias");
    for (int h = 0; o == OPTION_SINKS && h < 2; h++)
        check_derivative(&a, &sinks[h], g.dsinks.value[h], "dsinks", h);
    ref_gradients_free(&g);
    attention_free(&a);
}

/* ---- Which gradients are requested ----------------------------------------------------------- */

/* Gradients that are not requested do not change the others. */
static void check_subsets(void)
{
    const shape s = {2, 4, 2, 40, 50, 16, 16};
    attention whole;
    attention_make(&whole, 5, s, FA_FLOAT32);
    attention_check_backward(&whole, "all gradients");
    for (int wanted = 0; wanted < 8; wanted++) {
        attention a;
        attention_make(&a, 5, s, FA_FLOAT32);
        const fa_tensor dq = a.dq, dk = a.dk, dv = a.dv;
        if (!(wanted & 1)) a.dq.data = NULL;
        if (!(wanted & 2)) a.dk.data = NULL;
        if (!(wanted & 4)) a.dv.data = NULL;
        if (attention_forward(&a, "subset") && attention_backward(&a, "subset")) {
            CHECK(!(wanted & 1) || same_bits(&dq, &whole.dq), "dq differs, wanted %d", wanted);
            CHECK(!(wanted & 2) || same_bits(&dk, &whole.dk), "dk differs, wanted %d", wanted);
            CHECK(!(wanted & 4) || same_bits(&dv, &whole.dv), "dv differs, wanted %d", wanted);
        }
        attention_free(&a);
    }
    attention_free(&whole);
}

/* dbias summed over every combination of axes, for a bias that broadcasts along other axes or not
 * at all. */
static void check_bias_axes(void)
{
    const shape s = {2, 4, 2, 21, 35, 16, 16};
    for (int axes = 0; axes < 16; axes++) {
        attention a;
        char what[60];
        attention_make(&a, (uint64_t)axes, s, float_dtypes[axes % 3]);
        attention_set(&a, OPTION_BIAS);
        if (axes % 2) attention_set(&a, OPTION_CAUSAL);
        for (int axis = 0; axis < 4; axis++)
            if (axes >> axis & 1) a.dbias.shape[axis] = 1;
        snprintf(what, sizeof what, "dbias summed over axes %x", (unsigned)axes);
        attention_check_backward(&a, what);
        attention_free(&a);
    }
}

int main(void)
{
    test_begin();
    for (int o = 0; o < NUM_OPTIONS; o++) check_formula((option)o);
    check_pairs_of_options();
    check_tile_edges();
    check_subsets();
    check_bias_axes();
    return test_end();
}
