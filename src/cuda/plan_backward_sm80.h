/*
 * What the launches of backward_sm80 tell their kernels besides fa_backward_params. It is made apart from the launch, so
 * that tests need no driver.
 */
#ifndef FA_CUDA_PLAN_BACKWARD_SM80_H
#define FA_CUDA_PLAN_BACKWARD_SM80_H

#include "../../kernels/backward_sm80/backward_sm80.h"
#include "cuda/plan.h"

void fa_cuda_backward_sm80_params(const fa_problem *problem, const fa_cuda_plan_launch *launch,
                                  fa_backward_sm80_params *params);

#endif
