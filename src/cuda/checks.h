/*
 * FA_CHECK=1: before the call's own kernels, a kernel checks the call's lengths, block table and rows, and
 * reports to pinned host memory of the context. Outside of a capture the call waits for the report. A
 * captured call must not wait, so a later call reads what a launch of the graph has reported.
 */
#ifndef FA_CUDA_CHECKS_H
#define FA_CUDA_CHECKS_H

#include "../../kernels/check/check.h"
#include "cuda/driver.h"
#include "cuda/plan.h"
#include "problem.h"

/* The reports of one context. */
typedef struct fa_cuda_checks fa_cuda_checks;

/* Whether the environment asks for checks; read once. */
bool fa_cuda_checks_wanted(void);

/* The reports of the current context, made at the first call. NULL: a fault. */
fa_cuda_checks *fa_cuda_checks_here(fa_cuda_fault *fault);

/* Takes one report of a replayed graph; false: there is none. */
bool fa_cuda_checks_take(fa_cuda_checks *checks, fa_check_report *found);

/* The kernel's parameters except for the report's address. False: there is nothing to check. */
bool fa_cuda_check_params(const fa_problem *problem, const fa_options *options,
                          fa_check_params *params);

/* The plan of a check: one launch. False if the device cannot; why then says so in a sentence. */
bool fa_cuda_plan_check(const fa_cuda_device *device, fa_cuda_plan *plan, char *why, size_t size);

/* Queues that plan. found: what is wrong; FA_CHECK_FINE also if a later call will report it. */
bool fa_cuda_check(fa_cuda_checks *checks, const fa_cuda_plan *plan,
                   void *const kernels[FA_CUDA_LAUNCHES], const fa_check_params *params,
                   void *stream, fa_check_report *found, fa_cuda_fault *fault);

#endif
