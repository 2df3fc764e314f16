/*
 * What the launches of backward tell their kernels. It is made apart from the
 * launches, so that tests need no driver.
 */
#ifndef FA_CUDA_PLAN_BACKWARD_H
#define FA_CUDA_PLAN_BACKWARD_H

#include "../../kernels/backward_simt/backward_simt.h"
#include "cuda/plan.h"

void fa_cuda_set_backward_params(const fa_problem *problem, const fa_cuda_plan_launch *launch,
                                 fa_backward_params *params);

#endif
