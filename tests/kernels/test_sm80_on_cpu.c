/*
 * The forward on tensor cores by mma.sync, run on the host (cuda_on_cpu.h) with random problems
 * from the whole option space, compared with float64, with the launch that the planner and the
 * backend make: for an H200, for a card with little shared memory, for a T4. Problems that the
 * planner gives to another family are left out.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "cuda/family.h"
#include "cuda/plan_sm80.h"
#include "float32_on_cpu.h"
#include "forward_on_cpu.h"
#include "wild_pages.h"

enum { PROBLEMS = 150, FLOAT32_PROBLEMS = 16 };

/* Rows that few keys dominate, without wide heads, which take long here. */
static const int64_t peaked[] = {0, 1, 8, 15, 29};

/* For variants that the first ones do not use. */
static const int64_t rare[] = {664, 629, 2118, 177, 456, 1141, 309, 12716, 22161};

/* The variants, one FORM(name) each: the build writes them. */
#define FORM(name)                                                                                 \
    void name(fa_sm80_params p);                                                                   \
    static void run_##name(const void *p) { name(*(const fa_sm80_params *)p); }
#include "test_sm80_on_cpu_forms.h"
#undef FORM

static void (*const kernels[FA_VARIANTS])(const void *parameters) = {
#define FORM(name) [FA_VARIANT_##name] = run_##name,
#include "test_sm80_on_cpu_forms.h"
};

static int runs[FA_VARIANTS];

static bool launch(const random_call *call, const fa_problem *p, const fa_cuda_plan *plan,
                   int64_t number)
{
    const int variant = plan->launches[0].variant;
    fa_sm80_params params;
    fa_cuda_set_sm80_params(p, &plan->launches[0], &params);
    cuda_run run = make_run(call, &params, plan, number);
    run.kernel = kernels[variant];
    if (!run.kernel) return false;
    runs[variant]++;
    cuda_run_kernel(&run);
    return true;
}

/* FA_ERROR_UNSUPPORTED: the planner gives the problem to another family. */
static fa_status plan_call(int64_t number, const random_call *call, fa_problem *p,
                           fa_cuda_plan *plan, char *message, size_t size)
{
    const bool float32 =
        call->q.dtype == FA_FLOAT32; /* or mixed, for which there is no kernel here */
    const fa_cuda_family *family =
        fa_cuda_find_family(!float32 ? number % 4 == 3 ? "sm75" : "sm80"
                            : call->options.precision == FA_PRECISION_TF32 ? "tf32"
                                                                           : "tf32x3");
    const fa_status status = make_forward(call, p, message, size);
    if (status != FA_OK) return status;
    fa_cuda_device device = devices[float32           ? (number % 4 == 2 ? RTX_4090 : H200)
                                    : number % 4 == 3 ? T4
                                    : number % 4 == 2 ? RTX_4090
                                    : number % 8 == 5 ? A100
                                                      : H200];
    if (number % 5 < 2) device.multiprocessors = 1; /* then its blocks have several tasks each */
    /* Not by fa_cuda_plan_make: problems with few work tiles would be sm80_split's. */
    fa_cuda_plan_begin(&device, family, plan);
    return family->plan(p, &device, plan, message, size) ? FA_OK : FA_ERROR_UNSUPPORTED;
}

static bool wants(void *context, const random_call *call)
{
    char message[320];
    fa_problem p;
    fa_cuda_plan plan;
    const fa_status status =
        plan_call(*(const int64_t *)context, call, &p, &plan, message, sizeof message);
    if (status != FA_OK) return status != FA_ERROR_UNSUPPORTED; /* attend gives the reason */
    return sample_takes(&p, &plan, other_options);
}

static fa_status attend(void *context, const random_call *call, char *message, size_t size)
{
    const int64_t number = *(const int64_t *)context;
    fa_problem p;
    fa_cuda_plan plan;
    const fa_status status = plan_call(number, call, &p, &plan, message, size);
    if (status != FA_OK) return status;
    if (plan.launches[0].tasks && !launch(call, &p, &plan, number)) {
        snprintf(message, size, "no kernel %s", fa_variants[plan.launches[0].variant].name);
        return FA_ERROR_DEVICE;
    }
    return FA_OK;
}

/* float32 inputs: any problems, a few with wide heads, rows that few keys dominate. */
static void test_float32(random_settings settings, fa_precision precision, int64_t first,
                         int64_t count)
{
    static random_result result;
    int64_t number = first;
    settings.context = &number;
    settings.one_dtype = settings.tiles = settings.few_queries = settings.small = true;
    settings.dtype = FA_FLOAT32;
    settings.precision = precision;
    const int done = run_forward_problems(&settings, &number, first + count);
    CHECK(done > 0 || sample.searching, "no float32 problem of precision %d was for these kernels",
          (int)precision);
    settings.focus = RANDOM_WIDE;
    for (number = first; number < first + (count + 39) / 40; number++) {
        random_problem_run((uint64_t)number, &settings, &result);
        CHECK(result.report.ok || result.status == FA_ERROR_UNSUPPORTED,
              "wide number %lld: %s\n  %s", (long long)number, result.report.message,
              result.description);
    }
    number = first;
    run_peaked_problems(&settings, &number, first + count / 10);
}

/* ---- Single problems
 * --------------------------------------------------------------------------- */

static void test_single_problems(void)
{
    for (int d = 64; d <= 256; d *= 2) test_exactness(attend, d);
    test_huge_logits(attend, 64);
    test_infinities(attend, FA_PRECISION_TF32, 64);
    test_infinities(attend, FA_PRECISION_FLOAT32, 64);
    test_nan_key(attend, FA_PRECISION_TF32, 64);
    test_nan_key(attend, FA_PRECISION_FLOAT32, 64);
    const fa_dtype dtypes[] = {FA_FLOAT16, FA_BFLOAT16, FA_FLOAT32};
    for (int n = 0; n < 3; n++) test_wild_pages(attend, &(int64_t){n % 2}, dtypes[n], true);
    test_wild_pages(attend, &(int64_t){3}, FA_FLOAT16, true); /* sm75 */
}

/* Problems of 16-bit types from a number on, with the known ones after the first ones. Returns the
 * number of problems for these kernels. */
static int run_problems(random_settings *settings, int64_t *number, int64_t end, bool known_too)
{
    const int done = run_forward_problems(settings, number, end);
    for (size_t i = 0; i < sizeof rare / sizeof rare[0] && known_too; i++) {
        *number = rare[i];
        run_forward_problems(settings, number, rare[i] + 1);
    }
    for (size_t i = 0; i < sizeof peaked / sizeof peaked[0] && known_too; i++) {
        *number = peaked[i];
        run_peaked_problems(settings, number, peaked[i] + 1);
    }
    return done;
}

/* [FIRST [COUNT]]: random problems, with a COUNT only those; or "single": only the problems made by
 * hand. */
int main(int argc, char **argv)
{
    test_begin();
    if (argc == 2 && strcmp(argv[1], "single") == 0) {
        test_single_problems();
        return test_end();
    }
    const int64_t begin = argc > 1 ? atoll(argv[1]) : 0;
    const int64_t end = begin + (argc > 2 ? atoll(argv[2]) : PROBLEMS);
    const int64_t first =
        argc > 1 ? begin : 1; /* number 0 of float32 takes as long as all others */
    const int64_t count = argc > 2 ? atoll(argv[2]) : FLOAT32_PROBLEMS;
    int64_t number;
    const random_settings settings = {
        .device = FA_DEVICE_CUDA, .attend = attend, .wants = wants, .context = &number};
    int done = 0;
    for (bool again = sample_begin(argc > 1);; again = false) {
        random_settings any = settings;
        number = begin;
        done = run_problems(&any, &number, end, argc == 1);
        test_float32(settings, FA_PRECISION_TF32, first, count);
        test_float32(settings, FA_PRECISION_FLOAT32, first, count);
        if (!again) break;
        sample_found();
    }
    CHECK(done > 0, "no problem was for these kernels");
    if (argc > 2) {
        for (int i = 0; i < FA_VARIANTS; i++)
            if (kernels[i]) printf("%5d %s\n", runs[i], fa_variants[i].name);
        return test_end();
    }
    test_single_problems();
    if (argc == 1) sample_end(kernels, runs);
    return test_end();
}
