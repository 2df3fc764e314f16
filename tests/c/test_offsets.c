/*
 * More than 2^31 elements: every axis of every tensor gets, one at a time, a stride so large that
 * its last element is beyond element 2^32. The memory is reserved, not used: only touched pages
 * exist.
 */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "attention.h"

static const size_t reserved = (size_t)20 << 30; /* bytes */
static const shape usual = {2, 4, 2, 6, 9, 8, 8};

/* A contiguous tensor like t at base, except that the given axis is stretched. */
static fa_tensor stretch(const fa_tensor *t, char *base, int axis, bool copy)
{
    fa_tensor far = *t;
    far.data = base;
    far.stride[3] = 1;
    for (int n = 2; n >= 0; n--) far.stride[n] = far.stride[n + 1] * t->shape[n + 1];
    far.stride[axis] = ((int64_t)1 << 32) / (t->shape[axis] - 1) + 64;
    for (int64_t i = 0; copy && i < t->shape[0]; i++)
        for (int64_t j = 0; j < t->shape[1]; j++)
            for (int64_t k = 0; k < t->shape[2]; k++)
                for (int64_t l = 0; l < t->shape[3]; l++)
                    ref_store(&far, i, j, k, l, ref_load(t, i, j, k, l));
    return far;
}

static void check(int tensor, int axis, int64_t n_q)
{
    static const char *const names[] = {"q",  "k",  "v",    "out",  "dout", "dq",
                                        "dk", "dv", "bias", "mask", "dbias"};
    attention a;
    char what[60];
    shape s = usual;
    s.n_q = n_q;
    attention_make(&a, (uint64_t)tensor, s, FA_FLOAT32);
    attention_set(&a, OPTION_BIAS);
    attention_set(&a, OPTION_MASK);
    fa_tensor *t[] = {&a.in.q, &a.in.k, &a.in.v, &a.out,  &a.dout, &a.dq,
                      &a.dk,   &a.dv,   &a.bias, &a.mask, &a.dbias};
    void *base = mmap(NULL, reserved, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(base != MAP_FAILED, "cannot reserve %zu bytes of address space", reserved);
    if (base == MAP_FAILED) return;
    *t[tensor] = stretch(t[tensor], base, axis, tensor != 3 && tensor < 5);
    if (tensor == 8 || tensor == 9) attention_fill(&a, t[tensor], 1);
    snprintf(what, sizeof what, "%s, axis %d stretched, %lld queries", names[tensor], axis,
             (long long)n_q);
    attention_check_backward(&a, what);
    if (tensor < 5 || tensor == 8 || tensor == 9) {
        attention_poison(&a);
        attention_check_decode(&a, what);
    }
    attention_free(&a);
    munmap(base, reserved);
}

/* A mask of 50,000 x 50,000 elements, true only at its last element. */
static void check_large_mask(void)
{
    const int64_t n = 50000;
    static float q[50000], out[50000], lse[50000];
    uint8_t *bytes = mmap(NULL, (size_t)(n * n), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(bytes != MAP_FAILED, "cannot reserve %lld bytes of address space", (long long)(n * n));
    if (bytes == MAP_FAILED) return;
    for (int64_t i = 0; i < n; i++) q[i] = 1;
    bytes[n * n - 1] = 1;
    fa_tensor x = fa_bshd(q, FA_FLOAT32, 1, n, 1, 1), result = fa_bshd(out, FA_FLOAT32, 1, n, 1, 1);
    fa_tensor mask = {bytes, FA_BOOL, {1, 1, n, n}, {n * n, n * n, n, 1}};
    fa_options o;
    memset(&o, 0, sizeof o);
    o.size = sizeof o;
    o.flags = FA_WINDOW; /* one key each */
    o.mask = &mask;
    CHECK(fa_forward(&x, &x, &x, &result, lse, &o) == FA_OK, "%s", fa_last_error());
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; i++) wrong += out[i] != (i == n - 1 ? 1 : 0);
    CHECK(wrong == 0, "%lld rows of a large mask are wrong", (long long)wrong);
    munmap(bytes, (size_t)(n * n));
}

int main(void)
{
    test_begin();
    for (int tensor = 0; tensor < 11; tensor++)
        for (int axis = 0; axis < (tensor < 8 ? 3 : 4); axis++)
            for (int64_t n_q = 2; n_q <= 40; n_q += 38) check(tensor, axis, n_q);
    check_large_mask();
    return test_end();
}
