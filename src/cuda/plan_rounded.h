/*
 * Float32 inputs that are rounded to float16 in the workspace (kernels/forward_sm90_wide/round.h): parameters, which tests need
 * without a driver.
 */
#ifndef FA_CUDA_PLAN_ROUNDED_H
#define FA_CUDA_PLAN_ROUNDED_H

#include "../../kernels/forward_sm90/forward_sm90.h"
#include "cuda/plan.h"
#include "cuda/view_map.h"

/* The second parameter of each of the launches. False if a map cannot be made. */
bool fa_cuda_rounded_params(const fa_problem *problem, const fa_cuda_plan_launch *launch,
                            fa_cuda_encoder *encode, fa_sm90_params *params, fa_cuda_fault *fault);

#endif
