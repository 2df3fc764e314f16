/*
 * What a launch of forward_sm90 or forward_sm90_wide tells the kernel besides fa_attention_params. It is made apart from
 * the launch, so that tests need no driver.
 */
#ifndef FA_CUDA_PLAN_SM90_H
#define FA_CUDA_PLAN_SM90_H

#include "../../kernels/forward_sm90_wide/forward_sm90_wide.h"
#include "cuda/plan.h"
#include "cuda/view_map.h"

/* The kernel's second parameter, for a launch of this family. False if a map cannot be made. */
bool fa_cuda_sm90_params(const fa_problem *problem, const fa_cuda_plan_launch *launch,
                         fa_cuda_encoder *encode, fa_sm90_params *params, fa_cuda_fault *fault);

/* Adds a launch that runs beside the one in front of it. That one lets it start when all that is in
 * front of both has ended. */
bool fa_cuda_add_beside(const fa_problem *problem, const fa_cuda_device *device, fa_cuda_plan *plan,
                        char *why, size_t size);

#endif
