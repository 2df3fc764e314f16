/*
 * The forward launch: what kernels are told of a problem, and the queuing of a plan.
 */
#ifndef FA_CUDA_FORWARD_H
#define FA_CUDA_FORWARD_H

#include "../../kernels/common/params.h"
#include "cuda/driver.h"
#include "cuda/plan.h"

/* A tensor's view with rows of so many columns; 0 where nobody reads rows. */
fa_kernel_view fa_cuda_view(const fa_view *view, int64_t columns);

/* What the kernel is told: every field is written. tiles, tasks: of the plan or the step. */
void fa_cuda_set_params(const fa_problem *problem, int64_t tiles, int64_t tasks,
                        fa_attention_params *params);
fa_attention_params fa_cuda_attention_params(const fa_problem *problem, const fa_cuda_plan *plan);

/* Queues the plan's kernel on the problem's stream; does nothing where there is nothing to do. */
bool fa_cuda_forward(void *kernel, const fa_problem *problem, const fa_cuda_plan *plan,
                     fa_cuda_fault *fault);

#endif
