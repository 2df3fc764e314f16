/*
 * Every allocation of every call fails once: the call returns FA_ERROR_MEMORY and frees everything,
 * and the next call works. The linker redirects malloc, calloc, realloc, aligned_alloc and free to
 * this file (--wrap).
 */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "attention.h"

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *p, size_t size);
void *__real_aligned_alloc(size_t alignment, size_t size);
void __real_free(void *p);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *p, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);
void __wrap_free(void *p);

static bool counting;           /* between the start and the end of a call of the library */
static long allocations, alive; /* of this call */
static long failing;            /* which allocation fails; -1: none */

static bool fails(void) { return counting && allocations++ == failing; }

static void *count(void *p)
{
    if (counting && p) alive++;
    return p;
}

void *__wrap_malloc(size_t size) { return fails() ? NULL : count(__real_malloc(size)); }

void *__wrap_calloc(size_t n, size_t size)
{
    return fails() ? NULL : count(__real_calloc(n, size));
}

void *__wrap_realloc(void *p, size_t size)
{
    if (fails()) return NULL;
    return p ? __real_realloc(p, size) : count(__real_realloc(p, size));
}

void *__wrap_aligned_alloc(size_t alignment, size_t size)
{
    return fails() ? NULL : count(__real_aligned_alloc(alignment, size));
}

void __wrap_free(void *p)
{
    if (counting && p) alive--;
    __real_free(p);
}

typedef struct call {
    const char *name;
    fa_status (*run)(attention *a);
    shape s;
} call;

static fa_status run_forward(attention *a)
{
    return fa_forward(&a->in.q, &a->in.k, &a->in.v, &a->out, a->lse, &a->in.options);
}

static fa_status run_decode(attention *a)
{
    return fa_decode(&a->in.q, &a->in.k, &a->in.v, &a->out, a->lse, &a->in.options);
}

static fa_status run_backward(attention *a)
{
    fa_gradients g;
    memset(&g, 0, sizeof g);
    g.size = sizeof g;
    g.dout = a->dout;
    g.dq = a->dq;
    g.dk = a->dk;
    g.dv = a->dv;
    g.dbias = a->dbias;
    g.dsinks = a->dsinks;
    return fa_backward(&a->in.q, &a->in.k, &a->in.v, &a->out, a->lse, &g, &a->in.options);
}

static fa_status run_weights(attention *a)
{
    static float weights[2 * 4 * 40 * 50];
    fa_tensor w = {
        weights, FA_FLOAT32, {a->s.batch, a->s.heads_q, a->s.n_q, a->s.n_k}, {0, 0, 0, 1}};
    for (int axis = 2; axis >= 0; axis--) w.stride[axis] = w.stride[axis + 1] * w.shape[axis + 1];
    return fa_weights(&a->in.q, &a->in.k, NULL, a->s.n_q, &w, &a->in.options);
}

static fa_status run_combine(attention *a)
{
    const float *lse[2] = {a->lse, a->lse};
    fa_tensor parts[2] = {a->dout, a->dout};
    fa_options o;
    memset(&o, 0, sizeof o);
    o.size = sizeof o;
    o.threads = a->in.options.threads;
    return fa_combine(parts, lse, 2, &a->out, NULL, &o);
}

/* Runs the call with allocation n failing. Returns false if there was no n-th allocation. */
static bool check(const call *c, attention *a, long n)
{
    failing = n;
    allocations = alive = 0;
    counting = true;
    fa_status status = c->run(a);
    counting = false;
    bool injected = allocations > n;
    CHECK(status == (injected ? FA_ERROR_MEMORY : FA_OK), "%s, allocation %ld fails: %s", c->name,
          n, fa_status_name(status));
    CHECK(alive == 0, "%s, allocation %ld fails: %ld blocks are not freed", c->name, n, alive);
    CHECK(!injected || strlen(fa_last_error()) > 0, "%s: no message", c->name);
    return injected;
}

static void check_all(const call *c, fa_dtype dtype)
{
    attention a;
    attention_make(&a, 2, c->s, dtype);
    attention_set(&a, OPTION_BIAS);
    attention_set(&a, OPTION_SINKS);
    attention_set(&a, OPTION_CAUSAL);
    attention_check_backward(&a, "before");
    long n = 0;
    while (n < 1000 && check(c, &a, n)) n++;
    CHECK(n < 1000, "%s: too many allocations", c->name);
    printf("%s, %s: %ld allocations\n", c->name, fa_dtype_name(dtype), n);
    attention_poison(&a);
    attention_check_backward(&a, "after");
    attention_free(&a);
}

int main(void)
{
    static const call calls[] = {
        {"fa_forward", run_forward, {2, 4, 2, 40, 50, 16, 16}},
        {"fa_forward of few queries", run_forward, {2, 4, 2, 1, 600, 16, 16}},
        {"fa_decode", run_decode, {2, 4, 2, 2, 600, 16, 16}},
        {"fa_backward", run_backward, {2, 4, 2, 40, 50, 16, 16}},
        {"fa_weights", run_weights, {2, 4, 2, 40, 50, 16, 16}},
        {"fa_combine", run_combine, {2, 4, 2, 40, 50, 16, 16}},
    };
    test_begin();
    for (int n = 0; n < 6; n++)
        for (int t = 0; t < 3; t++) check_all(&calls[n], float_dtypes[t]);
    return test_end();
}
