/*
 * Threads that cannot be created: fewer threads do the work, with the same bits, or the call
 * returns FA_ERROR_MEMORY. Nothing is printed and the process does not end. The linker redirects
 * pthread_create to this file (--wrap).
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "attention.h"

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*f)(void *),
                          void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*f)(void *),
                          void *argument);

static int allowed = -1; /* threads that may still be created; -1: any number */
static int created;

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*f)(void *),
                          void *argument)
{
    if (allowed == 0) return EAGAIN;
    if (allowed > 0) allowed--;
    created++;
    return __real_pthread_create(thread, attributes, f, argument);
}

static const shape size = {2, 4, 2, 40, 140, 8, 8};
static attention expected;

static void check_results(attention *a, const char *what)
{
    attention_poison(a);
    CHECK(attention_forward(a, what) && attention_backward(a, what), "%s fails", what);
    CHECK(same_bits(&expected.out, &a->out) && same_bits(&expected.dq, &a->dq) &&
              same_bits(&expected.dk, &a->dk) && same_bits(&expected.dv, &a->dv),
          "%s: other bits than one thread's", what);
}

/* A thread of the caller's own starts without workers. */
static void *call_with_few(void *argument)
{
    attention a;
    char what[64];
    const int few = *(int *)argument;
    attention_make(&a, 1, size, FA_FLOAT32);
    a.in.options.threads = 6;
    allowed = few;
    created = 0;
    snprintf(what, sizeof what, "%d of 5 workers can be started", few);
    check_results(&a, what);
    CHECK(created == few, "%s: %d were", what, created);
    allowed = -1;
    check_results(&a, "all can be started again");
    CHECK(created == 5, "5 workers were to be started, %d were", created);
    attention_free(&a);
    return NULL;
}

/* Many threads, with address space for only a few. */
static void check_little_memory(void)
{
#ifndef FA_SANITIZED
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0) {
        attention a;
        attention_make(&a, 1, (shape){2, 8, 2, 1500, 290, 24, 24}, FA_FLOAT32);
        FILE *file = fopen("/proc/self/statm", "r");
        unsigned long pages = 0;
        const int read = file ? fscanf(file, "%lu", &pages) : 0;
        if (file) fclose(file);
        if (read != 1) _exit(0); /* the system does not tell how much is used now */
        const rlim_t bytes = (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE) + (24u << 20);
        const struct rlimit limit = {bytes, bytes};
        if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(3);
        int fine = 0;
        for (int32_t threads = 1000; threads >= 1; threads /= 2) {
            a.in.options.threads = threads;
            const fa_status status =
                fa_forward(&a.in.q, &a.in.k, &a.in.v, &a.out, a.lse, &a.in.options);
            if (status != FA_OK && status != FA_ERROR_MEMORY) _exit(4);
            fine += status == FA_OK;
        }
        _exit(fine > 0 ? 0 : 5);
    }
    int status = -1;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0,
          "1000 threads in little memory: the child's status is 0x%x", (unsigned)status);
#endif
}

int main(void)
{
    test_begin();
    attention_make(&expected, 1, size, FA_FLOAT32);
    expected.in.options.threads = 1;
    CHECK(attention_forward(&expected, "one") && attention_backward(&expected, "one"), "no result");
    for (int few = 0; few <= 5; few++) {
        pthread_t thread;
        const int failed = __real_pthread_create(&thread, NULL, call_with_few, &few);
        if (!failed) pthread_join(thread, NULL);
        CHECK(!failed, "no thread");
    }
    check_little_memory();
    attention_free(&expected);
    return test_end();
}
