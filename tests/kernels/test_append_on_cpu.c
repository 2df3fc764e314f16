/*
 * The kernel of fa_append, run on the host (cuda_on_cpu.h): random calls against their definition, and wild lengths,
 * indices and pages, which must lead nowhere outside of the cache.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "append_case.h"
#include "check.h"
#include "cuda/plan_append.h"
#include "cuda_on_cpu.h"
#include "gpus.h"
#include "normalize.h"

enum { CASES = 400, WILD = 400 };

void append_simt(fa_append_params p);
static void run_append(const void *p) { append_simt(*(const fa_append_params *)p); }

static fa_status run(append_case *c, uint64_t number)
{
    fa_append_problem p;
    fa_cuda_plan plan;
    fa_append_params params;
    char why[320] = "";
    const fa_append_call call = {FA_DEVICE_CUDA,         &c->k_new,
                                 append_case_v_new(c),   &c->k_cache,
                                 append_case_v_cache(c), &c->o};
    const fa_status status = fa_append_problem_make(&call, &p);
    if (status != FA_OK) return status;
    CHECK(fa_cuda_plan_append(&p, &devices[T4], &plan, why, sizeof why), "%s", why);
    const fa_cuda_plan_launch *l = &plan.launches[0];
    if (l->idle) return FA_OK;
    fa_cuda_set_append_params(&p, l, &params);
    char name[40];
    snprintf(name, sizeof name, "case %d", (int)number);
    const cuda_run launch = {.name = name,
                             .kernel = run_append,
                             .parameters = &params,
                             .grid = number % 3 == 0 && l->grid > 2 ? 2 : l->grid,
                             .threads = l->threads,
                             .smem_bytes = l->smem_bytes,
                             .backwards = number % 2,
                             .memory = &c->buffers};
    cuda_run_kernel(&launch);
    return FA_OK;
}

int main(void)
{
    test_begin();
    for (uint64_t n = 0; n < CASES + WILD; n++) {
        append_case c;
        ref_report report = REF_REPORT_INIT;
        append_case_make(&c, n % CASES);
        if (n >= CASES) append_case_spoil(&c);
        CHECK(run(&c, n) == FA_OK, "case %d: %s (%s)", (int)n, fa_last_error(), c.text);
        if (n < CASES) append_case_check(&c, &report);
        else append_case_check_inside(&c, &report);
        CHECK(report.ok, "case %d: %s (%s)", (int)n, report.message, c.text);
        append_case_free(&c);
    }
    return test_end();
}
