/*
 * The parameters of forward_sm80. They are made separately from the launch, so that tests need no
 * driver.
 */
#ifndef FA_CUDA_PLAN_SM80_H
#define FA_CUDA_PLAN_SM80_H

#include "../../kernels/forward_sm80/forward_sm80.h"
#include "cuda/plan.h"

void fa_cuda_set_sm80_params(const fa_problem *problem, const fa_cuda_plan_launch *launch,
                             fa_sm80_params *params);

#endif
