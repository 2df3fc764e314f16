/*
 * The plan of fa_combine, and the parameters of its kernel.
 */
#ifndef FA_CUDA_PLAN_COMBINE_H
#define FA_CUDA_PLAN_COMBINE_H

#include "../../kernels/combine/combine.h"
#include "cuda/plan.h"

/* One launch; workspace keeps sums between its rounds, unless out and lse do or there is one round. False if the device
 * cannot; why then says so in a sentence. */
bool fa_cuda_plan_combine(const fa_combine_problem *problem, const fa_cuda_device *device,
                          fa_cuda_plan *plan, char *why, size_t size);

/* The parameters of one round: it merges as many parts as it can, starting with number `done`. Returns
 * how many parts are done after it. */
int64_t fa_cuda_set_combine_params(const fa_combine_problem *problem,
                                   const fa_cuda_plan_launch *launch, int64_t done,
                                   fa_combine_launch *params);

#endif
