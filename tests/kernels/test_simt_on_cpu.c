/*
 * The general CUDA forward, run on the host (cuda_on_cpu.h), over random problems from the whole
 * option space against float64, with the launch that the planner and the backend make.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "cuda/backend.h"
#include "cuda_on_cpu.h"
#include "normalize.h"
#include "random_problem.h"

enum { PROBLEMS = 150 };

#define DECLARE(dim)                                                                               \
    void forward_simt_d##dim(fa_attention_params p);                                               \
    static void run_##dim(const void *p) { forward_simt_d##dim(*(const fa_attention_params *)p); }
DECLARE(64)
DECLARE(128)
DECLARE(256)
DECLARE(512)

static const struct {
    const char *image;
    void (*run)(const void *parameters);
} kernels[] = {{"forward_simt_d64", run_64},
               {"forward_simt_d128", run_128},
               {"forward_simt_d256", run_256},
               {"forward_simt_d512", run_512}};

static const fa_cuda_device t4 = {.major = 7,
                                  .minor = 5,
                                  .multiprocessors = 40,
                                  .smem_per_block = 65536,
                                  .smem_per_sm = 65536,
                                  .registers_per_sm = 65536,
                                  .name = "Tesla T4"};

/* Sometimes so few blocks that each has several tiles, and threads in either order. */
static void launch(const fa_problem *p, const fa_cuda_plan *plan, int64_t number)
{
    const fa_attention_params params = fa_cuda_attention_params(p, plan);
    cuda_run run = {.parameters = &params,
                    .grid = number % 3 == 0 && plan->grid > 2 ? 2 : plan->grid,
                    .threads = plan->threads,
                    .smem_bytes = plan->smem_bytes,
                    .backwards = number % 2};
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++)
        if (strcmp(kernels[i].image, plan->image) == 0) run.kernel = kernels[i].run;
    if (!run.kernel) abort();
    cuda_run_kernel(&run);
}

static fa_status attend(void *context, const random_call *call, char *message, size_t size)
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
    fa_problem p;
    fa_cuda_plan plan;
    fa_status status = fa_problem_make(&a, &p);
    if (status != FA_OK) {
        snprintf(message, size, "%s", fa_last_error());
        return status;
    }
    const fa_cuda_family *simt = fa_cuda_find_family("simt");
    if (!fa_cuda_plan_make(&p, &t4, simt, &plan, message, size)) return FA_ERROR_UNSUPPORTED;
    launch(&p, &plan, *(const int64_t *)context);
    return FA_OK;
}

int main(int argc, char **argv)
{
    static random_result result;
    int64_t number = argc > 1 ? atoll(argv[1]) : 0;
    const int64_t end = number + (argc > 2 ? atoll(argv[2]) : PROBLEMS);
    const random_settings settings = {
        .device = FA_DEVICE_CUDA, .attend = attend, .context = &number};
    test_begin();
    for (; number < end; number++) {
        random_problem_run((uint64_t)number, &settings, &result);
        CHECK(result.report.ok, "number %lld: %s\n  %s", (long long)number, result.report.message,
              result.description);
    }
    return test_end();
}
