/*
 * Shared by the tests of forward kernels on the host: makes a problem and a launch from a random
 * call.
 */
#ifndef FA_TEST_FORWARD_ON_CPU_H
#define FA_TEST_FORWARD_ON_CPU_H

#include <stdio.h>

#include "check.h"
#include "cuda/parameters.h"
#include "cuda_on_cpu.h"
#include "gpus.h"
#include "normalize.h"
#include "random_problem.h"
#include "sample.h"

/* An additional option of problems (sample_takes): the kind of peaked rows. What immense scores
 * cause depends on the variant, so there are four kinds of those. */
static uint64_t other_options;

static fa_status make_forward(const random_call *call, fa_problem *p, char *message, size_t size)
{
    fa_options options = call->options;
    const fa_arguments a = {.pass = call->decode ? FA_PASS_DECODE : FA_PASS_FORWARD,
                            .device = FA_DEVICE_CUDA,
                            .q = &call->q,
                            .k = &call->k,
                            .v = &call->v,
                            .out = &call->out,
                            .lse = call->lse,
                            .options = &options};
    const fa_status status = fa_problem_make(&a, p);
    if (status != FA_OK) snprintf(message, size, "%s", fa_last_error());
    return status;
}

/* All orders and delays, others if `otherwise` is set. slow_warp: the one that is often slow then. */
static inline void vary_run(cuda_run *run, int64_t number, bool otherwise, unsigned slow_warp)
{
    const uint64_t bits = (uint64_t)(number + 1) * 0x9E3779B97F4A7C15u;
    const unsigned delays = (unsigned)(bits >> 61), varied = otherwise ? ~delays : delays;
    const uint32_t lanes[] = {~0u, 1, ~1u, (uint32_t)(bits >> 24)};
    run->backwards = varied & 1;
    run->late_copies = varied & 2;
    run->late_products = varied & 4;
    run->last_block_first = otherwise;
    if (!otherwise) return;
    run->slow_warp = bits >> 59 & 3 ? (unsigned)(bits >> 50) % (run->threads / 32) : slow_warp;
    run->slow_lanes = lanes[bits >> 40 & 3];
}

/* Sometimes few blocks, so that each has several tiles; and threads in either order. */
static inline cuda_run make_run(const random_call *call, const void *params,
                                const fa_cuda_plan *plan, int64_t number)
{
    static char name[80];
    snprintf(name, sizeof name, "number %lld: %s", (long long)number,
             fa_variants[plan->launches[0].variant].name);
    return (cuda_run){
        .name = name,
        .memory = call->buffers,
        .parameters = params,
        .grid = number % 3 == 0 && plan->launches[0].grid > 2 ? 2 : plan->launches[0].grid,
        .threads = plan->launches[0].threads,
        .smem_bytes = plan->launches[0].smem_bytes,
        .backwards = number % 2};
}

/* Problems of the class of unused memory for which kernels once read before the beginning of a mask
 * or a bias: a causal mask leaves rows that see no key in addition to rows that see some.
 * settings->context is number. */
static inline void run_known_problems(const random_settings *settings, int64_t *number)
{
    static random_result result;
    static const int64_t known[] = {560, 781, 1500, 1873, 2079, 2513, 2550};
    const int64_t first = *number;
    random_settings unused = *settings;
    unused.focus = RANDOM_UNUSED;
    unused.tiles = unused.one_pass = true;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        *number = known[i];
        random_problem_run((uint64_t)known[i], &unused, &result);
        CHECK(result.report.ok || result.status == FA_ERROR_UNSUPPORTED,
              "known number %lld: %s\n  %s", (long long)known[i], result.report.message,
              result.description);
    }
    *number = first;
}

/* Problems [*number, end), each with the next focus, and then the known ones; settings->context is
 * number. Returns the number of problems that the planner did not give to another family. */
static inline int run_forward_problems(random_settings *settings, int64_t *number, int64_t end)
{
    static random_result result;
    static const random_focus focuses[] = {
        RANDOM_ANYTHING, RANDOM_UNUSED,  RANDOM_ANYTHING, RANDOM_MASKS,   RANDOM_ANYTHING,
        RANDOM_LENGTHS,  RANDOM_STRIDES, RANDOM_EMPTY,    RANDOM_DROPOUT, RANDOM_TAILS};
    int done = 0;
    if (*number == 0) run_known_problems(settings, number);
    for (; *number < end; ++*number) {
        settings->focus = focuses[*number % (int64_t)(sizeof focuses / sizeof focuses[0])];
        /* The number determines the head dim of RANDOM_TAILS: all widths, not only the first
         * ones. */
        const int64_t drawn = settings->focus == RANDOM_TAILS ? *number * 37 % 256 : *number;
        random_problem_run((uint64_t)drawn, settings, &result);
        if (result.status == FA_ERROR_UNSUPPORTED) continue;
        done++;
        CHECK(result.report.ok, "number %lld: %s\n  %s", (long long)*number, result.report.message,
              result.description);
    }
    return done;
}

/* Rows that few keys dominate, numbers [*number, end): results are as exact as those of the best
 * kernels. Returns the number of problems that the planner did not give to another family. */
static inline int run_peaked_problems(const random_settings *settings, int64_t *number, int64_t end)
{
    static random_result result;
    random_settings peaked = *settings;
    int done = 0;
    peaked.focus = RANDOM_PEAKED;
    peaked.tiles = peaked.few_queries = true;
    for (; *number < end; ++*number) {
        const int peak = (int)(*number % RANDOM_NUM_PEAKS);
        const int again = (int)(*number / RANDOM_NUM_PEAKS % 4);
        other_options = 1u << (peak == PEAK_IMMENSE ? RANDOM_NUM_PEAKS + again : peak);
        random_problem_run((uint64_t)*number, &peaked, &result);
        if (result.status == FA_ERROR_UNSUPPORTED) continue;
        done++;
        CHECK(result.report.ok, "peaked number %lld: %s\n  %s", (long long)*number,
              result.report.message, result.description);
    }
    other_options = 0;
    return done;
}

#endif
