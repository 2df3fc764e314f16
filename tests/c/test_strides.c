/* Layouts: every order of the axes, gaps, negative and 0 strides, every misalignment, packed
 * qkv. */
#include <stdio.h>
#include <string.h>

#include "attention.h"

static const shape usual = {2, 4, 2, 21, 45, 20, 24};

static void check_layouts(const ref_layout *q, const ref_layout *k, const ref_layout *v,
                          const ref_layout *out, int n, const char *what)
{
    attention a;
    attention_make_as(&a, (uint64_t)n, usual, float_dtypes[n % 3], q, k, v, out);
    if (n % 2) attention_set(&a, OPTION_BIAS);
    if (n % 5 == 0) attention_set(&a, OPTION_MASK);
    attention_check_backward(&a, what);
    attention_poison(&a);
    a.in.q.shape[1] = a.out.shape[1] = 2;
    a.in.options.mask = a.in.options.bias = NULL;
    attention_check_decode(&a, what);
    attention_free(&a);
}

static void check_random_layouts(void)
{
    for (int n = 0; n < 60; n++) {
        char what[40];
        ref_random random = {(uint64_t)n};
        ref_layout l[4];
        for (int t = 0; t < 4; t++) l[t] = ref_layout_random(&random, true, false);
        snprintf(what, sizeof what, "random layout %d", n);
        check_layouts(&l[0], &l[1], &l[2], &l[3], n, what);
    }
}

static void check_misalignment(void)
{
    for (int n = 0; n < 33; n++) {
        char what[40];
        ref_layout l = REF_LAYOUT_CONTIGUOUS, m = l;
        l.misalignment = n;
        m.misalignment = 33 - n;
        snprintf(what, sizeof what, "%d elements off", n);
        check_layouts(&l, &m, &m, &l, n, what);
    }
}

/* q, k and v side by side in each row, as one matrix product returns them; outputs likewise. */
static void check_packed_qkv(fa_dtype dtype)
{
    const int64_t batch = 2, n = 50, heads = 3, d = 20, row = 3 * heads * d;
    const shape s = {batch, heads, heads, n, n, d, d};
    attention a;
    attention_make(&a, 11, s, dtype);
    fa_tensor qkv = {NULL, dtype, {batch, n, 3 * heads, d}, {0}}, gradients = qkv;
    const ref_layout contiguous = REF_LAYOUT_CONTIGUOUS;
    ref_buffers_tensor(&a.buffers, "qkv", &qkv, &contiguous);
    ref_buffers_tensor(&a.buffers, "dqkv", &gradients, &contiguous);
    ref_buffers_output(&a.buffers, &gradients);
    attention_fill(&a, &qkv, 1);
    fa_tensor *parts[] = {&a.in.q, &a.in.k, &a.in.v}, *d_parts[] = {&a.dq, &a.dk, &a.dv};
    for (int p = 0; p < 3; p++) {
        const fa_tensor slice = {NULL, dtype, {batch, n, heads, d}, {n * row, row, d, 1}};
        int64_t offset = p * heads * d * (int64_t)fa_dtype_size(dtype);
        *parts[p] = *d_parts[p] = slice;
        parts[p]->data = (char *)qkv.data + offset;
        d_parts[p]->data = (char *)gradients.data + offset;
    }
    attention_check_backward(&a, "packed qkv");
    attention_free(&a);
}

/* One key for all, one head for all, one batch item for all. */
static void check_broadcast(void)
{
    for (int axis = 0; axis < 3; axis++)
        for (int n = 0; n < 3; n++) {
            attention a;
            attention_make(&a, 3, usual, float_dtypes[n]);
            a.in.q.stride[axis] = 0;
            a.in.k.stride[axis] = 0;
            a.in.v.stride[2 - axis] = 0;
            a.dout.stride[axis] = 0;
            attention_check_backward(&a, "stride 0");
            attention_free(&a);
        }
}

/* An axis with one index may have any stride, because it is never used. The sanitizers detect its
 * use. */
static void check_one_index(void)
{
    static const shape s = {1, 1, 1, 1, 1, 16, 16};
    static const int64_t strides[] = {INT64_MIN, INT64_MAX, INT64_MIN / 2 - 1, 0};
    for (int n = 0; n < 4; n++) {
        attention a;
        attention_make(&a, (uint64_t)n, s, float_dtypes[n % 3]);
        for (int axis = 0; axis < 3; axis++) {
            a.in.q.stride[axis] = a.in.k.stride[axis] = a.in.v.stride[axis] = strides[n];
            a.out.stride[axis] = strides[n];
        }
        attention_check_backward(&a, "one index");
        attention_poison(&a);
        attention_check_decode(&a, "one index");
        attention_free(&a);
    }
}

int main(void)
{
    test_begin();
    check_one_index();
    check_random_layouts();
    check_misalignment();
    for (int n = 0; n < 3; n++) check_packed_qkv(float_dtypes[n]);
    check_broadcast();
    return test_end();
}
