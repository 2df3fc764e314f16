/*
 * The parameters of kernels for a problem that all families share.
 */
#ifndef FA_CUDA_PARAMETERS_H
#define FA_CUDA_PARAMETERS_H

#include "../../kernels/common/params.h"
#include "cuda/plan.h"

/* A tensor's view with rows of this many columns; 0 if rows are not read. */
fa_kernel_view fa_cuda_view(const fa_view *view, int64_t columns);

/* Whether its rows are made of groups of 8 elements that the device can move at once. Without data: if
 * that will be aligned. */
bool fa_cuda_moves_eight(const fa_view *view, int64_t columns);

/* Every field is written. tiles, tasks: of the launch. */
void fa_cuda_set_params(const fa_problem *problem, const fa_cuda_plan_launch *launch,
                        fa_attention_params *params);

#endif
