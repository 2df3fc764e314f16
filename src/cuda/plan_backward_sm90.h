/*
 * What the launches of backward_sm90 tell their kernels besides fa_backward_params. It is made apart from the launch, so
 * that tests need no driver.
 */
#ifndef FA_CUDA_PLAN_BACKWARD_SM90_H
#define FA_CUDA_PLAN_BACKWARD_SM90_H

#include "../../kernels/backward_sm90/backward_sm90.h"
#include "cuda/plan.h"
#include "cuda/view_map.h"

/* Sets the divisors of `tasks` blocks, `tiles` of each head, after the numbers of heads that take turns. group: query heads that
 * share keys. */
void fa_cuda_backward_sm90_set_divisors(int64_t tiles, int64_t tasks, int64_t group,
                                        int64_t heads_kv, fa_backward_sm90_params *s);

/* False if a map cannot be made. */
bool fa_cuda_backward_sm90_params(const fa_problem *problem, const fa_cuda_plan_launch *launch,
                                  fa_cuda_encoder *encode, fa_backward_sm90_params *params,
                                  fa_cuda_fault *fault);

/* Has blocks of a plan clear the sums of dQ for blocks that come so many groups of heads later (clear_ahead.cuh). The planner does so
 * where that is faster, tests do everywhere. False: the kernel can't, there are too few groups,
 * or only queries or only keys are packed. */
bool fa_cuda_backward_sm90_clear_ahead(fa_cuda_plan *plan, int64_t ahead);

#endif
