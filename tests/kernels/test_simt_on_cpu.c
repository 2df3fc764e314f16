/*
 * The general CUDA forward, run on the host (cuda_on_cpu.h), over random problems from the whole
 * option space against float64, with the launch that the planner and the backend make.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "forward_on_cpu.h"

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

static void launch(const random_call *call, const fa_problem *p, const fa_cuda_plan *plan,
                   int64_t number)
{
    const fa_attention_params params = fa_cuda_attention_params(p, plan);
    cuda_run run = make_run(call, &params, plan, number);
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++)
        if (strcmp(kernels[i].image, plan->image) == 0) run.kernel = kernels[i].run;
    if (!run.kernel) abort();
    cuda_run_kernel(&run);
}

static fa_status attend(void *context, const random_call *call, char *message, size_t size)
{
    fa_problem p;
    fa_cuda_plan plan;
    const fa_status status = make_forward(call, &p, message, size);
    if (status != FA_OK) return status;
    const fa_cuda_family *simt = fa_cuda_find_family("simt");
    if (!fa_cuda_plan_make(&p, &devices[T4], simt, &plan, message, size))
        return FA_ERROR_UNSUPPORTED;
    launch(call, &p, &plan, *(const int64_t *)context);
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
