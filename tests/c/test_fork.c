/* Children of fork, where only the forking thread exists: their calls work, with threads. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "attention.h"

enum { THREADS = 4, SECONDS = 60 /* after which a child counts as hanging */ };

static const shape size = {2, 4, 2, 40, 140, 8, 8};
static attention expected, actual; /* expected: made before any fork */

static bool matches(void)
{
    attention_poison(&actual);
    return attention_forward(&actual, "fork") && attention_backward(&actual, "fork") &&
           same_bits(&expected.out, &actual.out) && same_bits(&expected.dq, &actual.dq) &&
           same_bits(&expected.dk, &actual.dk) && same_bits(&expected.dv, &actual.dv);
}

/* The number of threads of this process; -1: the system does not tell it. */
static int count_threads(void)
{
    char line[128];
    int threads = -1;
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status)) (void)sscanf(line, "Threads: %d", &threads);
    if (status) fclose(status);
    return threads;
}

enum { FINE, WRONG, FEW_THREADS };

static int call_in_child(int32_t threads)
{
    actual.in.options.threads = threads;
    if (!matches()) return WRONG;
    const int running = count_threads();
    return threads > 1 && running >= 0 && running < threads ? FEW_THREADS : FINE;
}

/* generations: for children of children. */
static int child(int32_t threads, int generations)
{
    alarm(SECONDS);
    const int result = call_in_child(threads);
    if (result != FINE || generations == 0) return result;
    const pid_t pid = fork();
    if (pid == 0) _exit(child(threads, generations - 1));
    int status = -1;
    return pid > 0 && waitpid(pid, &status, 0) == pid && status == 0 ? FINE : WRONG;
}

/* The result of a child, or -1. */
static int fork_and_call(int32_t threads, int generations)
{
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0) _exit(child(threads, generations));
    int status = -1;
    return pid > 0 && waitpid(pid, &status, 0) == pid ? status : -1;
}

static void check_child(const char *what, int32_t threads, int generations)
{
    const int status = fork_and_call(threads, generations);
    CHECK(status != -1 && WIFEXITED(status) && WEXITSTATUS(status) == FINE,
          "%s, %d threads: the child %s", what, (int)threads,
          status != -1 && WIFSIGNALED(status)
              ? (WTERMSIG(status) == SIGALRM ? "hangs" : "was ended by a signal")
          : status != -1 && WEXITSTATUS(status) == FEW_THREADS ? "started no threads"
                                                               : "got another result");
}

static void *fork_elsewhere(void *argument)
{
    (void)argument;
    check_child("fork from a thread that has not called", THREADS, 0);
    actual.in.options.threads = THREADS;
    CHECK(matches(), "a second thread's call differs");
    check_child("fork from a thread that has called", THREADS, 0);
    return NULL;
}

static void check_other_thread(void)
{
    pthread_t thread;
    const int failed = pthread_create(&thread, NULL, fork_elsewhere, NULL);
    if (!failed) pthread_join(thread, NULL);
    CHECK(!failed, "pthread_create failed");
}

/* The address sanitizer's malloc does not release its locks in a child, as that of the C library does: if another thread holds
 * one at the fork, the child waits for it forever (seen in one of some 80 runs, by gcc 12's). */
#ifdef __has_feature
#define HAS_ADDRESS_SANITIZER __has_feature(address_sanitizer)
#elif defined(__SANITIZE_ADDRESS__)
#define HAS_ADDRESS_SANITIZER 1
#else
#define HAS_ADDRESS_SANITIZER 0
#endif

static atomic_bool stop, started;

static void *keep_calling(void *argument)
{
    attention *a = argument;
    a->in.options.threads = 2;
    while (!atomic_load(&stop)) {
        (void)fa_forward(&a->in.q, &a->in.k, &a->in.v, &a->out, a->lse, &a->in.options);
        atomic_store(&started, true);
    }
    return NULL;
}

static void check_during_call(void)
{
    pthread_t thread;
    attention busy;
    attention_make(&busy, 2, size, FA_FLOAT32);
    CHECK(pthread_create(&thread, NULL, keep_calling, &busy) == 0, "pthread_create failed");
    while (!atomic_load(&started)) usleep(100);
    for (int n = 0; n < 10; n++) check_child("fork while another thread calls", 2, 0);
    atomic_store(&stop, true);
    pthread_join(thread, NULL);
    attention_free(&busy);
}

/* A program with its own OpenMP threads; threads 0: the library asks OpenMP in the child. */
static void check_openmp_caller(void)
{
    int sum = 0;
#pragma omp parallel for num_threads(THREADS) reduction(+ : sum)
    for (int n = 0; n < 1000; n++) sum += n;
    CHECK(sum == 499500, "OpenMP's sum is %d", sum);
    check_child("fork by a program with OpenMP threads", THREADS, 0);
    check_child("fork by a program with OpenMP threads", 0, 0);
    int status = 0;
#pragma omp parallel num_threads(2)
    {
#pragma omp single
        status = fork_and_call(THREADS, 0);
    }
    CHECK(status == 0, "fork inside an OpenMP region: status %d", status);
}

int main(void)
{
    test_begin();
    attention_make(&expected, 1, size, FA_FLOAT32);
    attention_make(&actual, 1, size, FA_FLOAT32);
    expected.in.options.threads = 1;
    CHECK(attention_forward(&expected, "one") && attention_backward(&expected, "one"), "no result");
    check_child("fork before a call with threads", THREADS, 1);
    actual.in.options.threads = THREADS;
    CHECK(matches(), "%d threads differ from one", (int)THREADS);
    for (int32_t threads = 1; threads <= THREADS; threads++) check_child("fork", threads, 2);
    check_other_thread();
    if (!HAS_ADDRESS_SANITIZER) check_during_call();
    check_openmp_caller();
    CHECK(matches(), "the parent's call after its children differs");
    attention_free(&actual);
    attention_free(&expected);
    return test_end();
}
