/*
 * The forward on tensor cores by mma.sync, run on the host (cuda_on_cpu.h), over random problems from
 * the whole option space against float64, with the launch that the planner and the backend make: for
 * an H200, for a card with little shared memory, for a T4. Problems that the planner gives to another
 * family are left out.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "cuda/family.h"
#include "cuda/plan_sm80.h"
#include "forward_on_cpu.h"

enum { PROBLEMS = 150 };

/* Rows that few keys dominate, without what takes long here: wide heads. */
static const int64_t peaked[] = {0, 1, 8, 15, 29};

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

static fa_status attend(void *context, const random_call *call, char *message, size_t size)
{
    const int64_t number = *(const int64_t *)context;
    const fa_cuda_family *family = fa_cuda_find_family(number % 4 == 3 ? "sm75" : "sm80");
    fa_problem p;
    fa_cuda_plan plan;
    const fa_status status = make_forward(call, &p, message, size);
    if (status != FA_OK) return status;
    fa_cuda_device device = devices[number % 4 == 3 ? T4 : number % 4 == 2 ? RTX_4090 : H200];
    if (number % 5 < 2) device.multiprocessors = 1; /* then its blocks have several tasks each */
    if (!fa_cuda_plan_make(&p, &device, family, &plan, message, size)) return FA_ERROR_UNSUPPORTED;
    if (plan.launches[0].tasks && !launch(call, &p, &plan, number)) {
        snprintf(message, size, "no kernel %s", fa_variants[plan.launches[0].variant].name);
        return FA_ERROR_DEVICE;
    }
    return FA_OK;
}

int main(int argc, char **argv)
{
    int64_t number = argc > 1 ? atoll(argv[1]) : 0;
    const int64_t end = number + (argc > 2 ? atoll(argv[2]) : PROBLEMS);
    random_settings settings = {.device = FA_DEVICE_CUDA, .attend = attend, .context = &number};
    test_begin();
    const int done = run_forward_problems(&settings, &number, end);
    for (size_t i = 0; i < sizeof peaked / sizeof peaked[0] && argc == 1; i++) {
        number = peaked[i];
        run_peaked_problems(&settings, &number, peaked[i] + 1);
    }
    CHECK(done > 0, "no problem was for these kernels");
    if (argc > 2)
        for (int i = 0; i < FA_VARIANTS; i++)
            if (kernels[i]) printf("%5d %s\n", runs[i], fa_variants[i].name);
    return test_end();
}
