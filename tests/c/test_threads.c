/* The same bits whatever the number of threads and whoever calls: OpenMP regions, concurrent
 * threads. */
#include <pthread.h>
#include <string.h>

#include "attention.h"

static const shape shapes[] = {
    {2, 4, 2, 300, 290, 24, 24}, {3, 8, 2, 2, 1500, 32, 32}, {1, 1, 1, 130, 70, 8, 8}};
enum { SHAPES = 3, CALLERS = 4 };

/* A sanitizer sees in one run what a wrong order might do in another. */
#ifdef FA_SANITIZED
enum { REPEATS = 1 };
#else
enum { REPEATS = 3 };
#endif

static void make(attention *a, int n, fa_dtype dtype)
{
    attention_make(a, (uint64_t)n, shapes[n], dtype);
    attention_set(a, OPTION_CAUSAL);
    attention_set(a, OPTION_BIAS);
    attention_set(a, OPTION_SINKS);
    attention_set(a, OPTION_DROPOUT);
}

static bool run(attention *a, int32_t threads)
{
    a->in.options.threads = threads;
    attention_poison(a);
    return attention_forward(a, "threads") && attention_backward(a, "threads");
}

static bool same_results(const attention *a, const attention *b)
{
    size_t lse_bytes = (size_t)(a->s.batch * a->s.heads_q * a->s.n_q) * sizeof(float);
    return same_bits(&a->out, &b->out) && same_bits(&a->dq, &b->dq) && same_bits(&a->dk, &b->dk) &&
           same_bits(&a->dv, &b->dv) && same_bits(&a->dbias, &b->dbias) &&
           memcmp(a->lse, b->lse, lse_bytes) == 0 &&
           memcmp(a->dsinks, b->dsinks, (size_t)a->s.heads_q * sizeof(float)) == 0;
}

static void check_counts(int n, fa_dtype dtype)
{
    attention one, many;
    make(&one, n, dtype);
    make(&many, n, dtype);
    run(&one, 1);
    for (int32_t threads = 1; threads <= 7; threads++)
        for (int repeat = 0; repeat < REPEATS; repeat++) {
            run(&many, threads);
            CHECK(same_results(&one, &many), "shape %d: %d threads, run %d differ from 1 thread", n,
                  (int)threads, repeat);
        }
    run(&many, 0);
    CHECK(same_results(&one, &many), "shape %d: the default number of threads differs", n);
    attention_free(&one);
    attention_free(&many);
}

static void check_nested(int n)
{
    attention one, many[CALLERS];
    make(&one, n, FA_FLOAT32);
    run(&one, 1);
    for (int c = 0; c < CALLERS; c++) make(&many[c], n, FA_FLOAT32);
    bool same[CALLERS];
#pragma omp parallel for num_threads(CALLERS)
    for (int c = 0; c < CALLERS; c++) {
        many[c].in.options.threads = 2;
        attention *a = &many[c];
        fa_status status =
            fa_forward(&a->in.q, &a->in.k, &a->in.v, &a->out, a->lse, &a->in.options);
        same[c] = status == FA_OK && same_bits(&one.out, &a->out);
    }
    for (int c = 0; c < CALLERS; c++) {
        CHECK(same[c], "shape %d: caller %d inside an OpenMP region differs", n, c);
        attention_free(&many[c]);
    }
    attention_free(&one);
}

typedef struct caller {
    attention a;
    fa_status status;
    char error[200];
    int bad_argument; /* each caller makes an error of its own */
} caller;

static void *call(void *argument)
{
    caller *c = argument;
    attention *a = &c->a;
    for (int repeat = 0; repeat < 5; repeat++) {
        a->in.options.threads = c->bad_argument;
        (void)fa_forward(&a->in.q, &a->in.k, &a->in.v, &a->out, a->lse, &a->in.options);
        strncpy(c->error, fa_last_error(), sizeof c->error - 1);
        a->in.options.threads = 2;
        c->status = fa_forward(&a->in.q, &a->in.k, &a->in.v, &a->out, a->lse, &a->in.options);
    }
    return NULL;
}

static void check_concurrent(int n)
{
    static caller callers[CALLERS];
    pthread_t threads[CALLERS];
    attention one;
    make(&one, n, FA_BFLOAT16);
    run(&one, 1);
    for (int c = 0; c < CALLERS; c++) {
        make(&callers[c].a, n, FA_BFLOAT16);
        callers[c].bad_argument = -10 - c;
        CHECK(pthread_create(&threads[c], NULL, call, &callers[c]) == 0, "pthread_create failed");
    }
    for (int c = 0; c < CALLERS; c++) {
        char own[16] = "-10";
        own[2] = (char)('0' + c);
        pthread_join(threads[c], NULL);
        CHECK(callers[c].status == FA_OK && same_bits(&one.out, &callers[c].a.out),
              "shape %d: concurrent caller %d differs", n, c);
        CHECK(strstr(callers[c].error, own), "caller %d got another's error: %s", c,
              callers[c].error);
        attention_free(&callers[c].a);
    }
    attention_free(&one);
}

int main(void)
{
    test_begin();
    for (int n = 0; n < SHAPES; n++) {
        for (int t = 0; t < 3; t++) check_counts(n, float_dtypes[t]);
        check_nested(n);
        check_concurrent(n);
    }
    return test_end();
}
