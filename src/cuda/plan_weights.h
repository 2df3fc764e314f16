/*
 * The parameters of the kernel of fa_weights. They are made separately from the launch, so that tests
 * need no driver.
 */
#ifndef FA_CUDA_PLAN_WEIGHTS_H
#define FA_CUDA_PLAN_WEIGHTS_H

#include "../../kernels/weights_simt/weights_simt.h"
#include "cuda/plan.h"

void fa_cuda_set_weights_params(const fa_problem *problem, const fa_cuda_plan_launch *launch,
                                fa_weights_params *params);

#endif
