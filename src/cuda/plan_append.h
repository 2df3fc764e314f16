/*
 * The plan of fa_append, and the parameters of its kernel.
 */
#ifndef FA_CUDA_PLAN_APPEND_H
#define FA_CUDA_PLAN_APPEND_H

#include "../../kernels/append/append.h"
#include "cuda/plan.h"

/* One launch. False if the device cannot; why then says so in a sentence. */
bool fa_cuda_plan_append(const fa_append_problem *problem, const fa_cuda_device *device,
                         fa_cuda_plan *plan, char *why, size_t size);

void fa_cuda_set_append_params(const fa_append_problem *problem, const fa_cuda_plan_launch *launch,
                               fa_append_params *params);

#endif
