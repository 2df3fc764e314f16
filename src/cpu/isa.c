/*
 * The engine of one instruction set, from which dispatch.c chooses, and the choice of its kernels for a
 * problem.
 */
#include <stdio.h>

#include "isa.h"
#include "rows.h"
#include "vmath.h"
#include "work.h"

/* Each of the two kernels computes the sequences for which it is made. */
static fa_status attend(const fa_problem *p)
{
    fa_clear_unused_output(p);
    if (p->heads_q == 0) return FA_OK;
    fa_status status = FA_NAME(decode)(p);
    return status == FA_OK ? FA_NAME(forward)(p) : status;
}

/* The longest sequence that the shapes allow decides what is described. */
static bool by_decode(const fa_problem *p)
{
    const fa_sequence s = {0, 0, p->n_q, 0, 0, p->n_k, 0};
    return p->heads_kv > 0 && fa_is_decode(p, &s);
}

static const char *pass_name(fa_pass pass)
{
    static const char *const names[] = {"forward", "backward", "decode", "weights"};
    return names[pass];
}

static void describe(const fa_problem *p, char *text, size_t size)
{
    char kernel[160] = "one row of weights at a time";
    if (p->pass == FA_PASS_BACKWARD) FA_NAME(describe_backward)(p, kernel, sizeof kernel);
    else if (p->pass != FA_PASS_WEIGHTS && by_decode(p))
        FA_NAME(describe_decode)(p, kernel, sizeof kernel);
    else if (p->pass != FA_PASS_WEIGHTS) FA_NAME(describe_forward)(p, kernel, sizeof kernel);
    snprintf(text, size, "cpu %s %s: %s, %d threads", pass_name(p->pass), FA_NAME(engine).name,
             kernel, fa_problem_threads(p));
}

static void exp2_array(const float *y, float c, float *out, int64_t n)
{
    const vf vc = v_set1(c), lowest = v_set1(fa_exp2_lowest(c));
    for (int64_t i = 0; i < n; i += VL) {
        int count = (int)fa_min(VL, n - i);
        v_store_n(out + i, v_exp2(v_load_n(y + i, count), vc, lowest), count);
    }
}

#define FA_STRING2(x) #x
#define FA_STRING(x) FA_STRING2(x)

const fa_cpu_engine FA_NAME(engine) = {
    .name = FA_STRING(FA_ISA),
    .vector_bits = VL * 32,
    .forward = attend,
    .backward = FA_NAME(backward),
    .decode = attend,
    .weights = FA_NAME(weights),
    .combine = FA_NAME(combine),
    .describe = describe,
    .exp2_array = exp2_array,
};
