/*
 * The general CUDA forward, run on the host (cuda_on_cpu.h) with random problems from the whole
 * option space, compared with float64, with the launch that the planner and the backend make.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "forward_on_cpu.h"
#include "wild_pages.h"

/* One problem in CLASS_EVERY is from each class that "anything" does not include. */
enum { PROBLEMS = 200, CLASS_EVERY = 10 };

/* The variants, one FORM(name) each: the build writes them. */
#define FORM(name)                                                                                 \
    void name(fa_attention_params p);                                                              \
    static void run_##name(const void *p) { name(*(const fa_attention_params *)p); }
#include "test_simt_on_cpu_forms.h"
#undef FORM

static void (*const kernels[FA_VARIANTS])(const void *parameters) = {
#define FORM(name) [FA_VARIANT_##name] = run_##name,
#include "test_simt_on_cpu_forms.h"
};

static int runs[FA_VARIANTS];

static void launch(const random_call *call, const fa_problem *p, const fa_cuda_plan *plan,
                   int64_t number)
{
    fa_attention_params params;
    fa_cuda_set_params(p, &plan->launches[0], &params);
    cuda_run run = make_run(call, &params, plan, number);
    run.kernel = kernels[plan->launches[0].variant];
    if (!run.kernel) abort();
    runs[plan->launches[0].variant]++;
    cuda_run_kernel(&run);
}

static fa_status plan_call(const random_call *call, fa_problem *p, fa_cuda_plan *plan,
                           char *message, size_t size)
{
    const fa_status status = make_forward(call, p, message, size);
    if (status != FA_OK) return status;
    const fa_cuda_family *simt = fa_cuda_find_family("simt");
    return fa_cuda_plan_make(p, &devices[T4], simt, plan, message, size) ? FA_OK
                                                                         : FA_ERROR_UNSUPPORTED;
}

/* If the kernel does not support a problem, that is an error here: attend reports it. */
static bool wants(void *context, const random_call *call)
{
    char message[320];
    fa_problem p;
    fa_cuda_plan plan;
    (void)context;
    return plan_call(call, &p, &plan, message, sizeof message) != FA_OK ||
           sample_takes(&p, &plan, other_options);
}

static fa_status attend(void *context, const random_call *call, char *message, size_t size)
{
    fa_problem p;
    fa_cuda_plan plan;
    const fa_status status = plan_call(call, &p, &plan, message, size);
    if (status != FA_OK) return status;
    launch(call, &p, &plan, *(const int64_t *)context);
    return FA_OK;
}

static void run_problems(int64_t number, int64_t end)
{
    static random_result result;
    random_settings settings = {.device = FA_DEVICE_CUDA,
                                .small = true,
                                .attend = attend,
                                .wants = wants,
                                .context = &number};
    for (; number < end; number++) {
        settings.focus = number % CLASS_EVERY == 0   ? RANDOM_LATENT
                         : number % CLASS_EVERY == 5 ? RANDOM_CHUNKS
                         : number % CLASS_EVERY == 7 ? RANDOM_QUANTIZED
                                                     : RANDOM_ANYTHING;
        random_problem_run((uint64_t)number, &settings, &result);
        if (result.status == FA_ERROR_UNSUPPORTED && !sample.whole) continue;
        CHECK(result.report.ok, "number %lld: %s\n  %s", (long long)number, result.report.message,
              result.description);
    }
}

int main(int argc, char **argv)
{
    const int64_t number = argc > 1 ? atoll(argv[1]) : 0;
    const int64_t end = number + (argc > 2 ? atoll(argv[2]) : PROBLEMS);
    test_begin();
    if (sample_begin(argc > 1)) run_problems(number, end);
    sample_found();
    run_problems(number, end);
    test_wild_pages(attend, &(int64_t){1}, FA_FLOAT32, true);
    test_wild_pages(attend, &(int64_t){0}, FA_BFLOAT16, true);
    if (argc == 1) sample_end(kernels, runs);
    return test_end();
}
