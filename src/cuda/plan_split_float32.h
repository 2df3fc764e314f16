/*
 * Split keys of float32's forward kernels on Hopper: parameters, which tests need without a driver.
 */
#ifndef FA_CUDA_PLAN_SPLIT_FLOAT32_H
#define FA_CUDA_PLAN_SPLIT_FLOAT32_H

#include "../../kernels/forward_sm90/forward_sm90.h"
#include "cuda/plan.h"
#include "cuda/view_map.h"

/* The second parameter of the first launch. False if a map cannot be made. */
bool fa_cuda_split_float32_params(const fa_problem *problem, const fa_cuda_plan_launch *launch,
                                  fa_cuda_encoder *encode, fa_sm90_params *params,
                                  fa_cuda_fault *fault);

/* What the second launch reads of its second parameter. */
void fa_cuda_merge_float32_params(const fa_problem *problem, const fa_cuda_plan_launch *launch,
                                  fa_sm90_params *params);

fa_sm90_split fa_cuda_split_float32_of(const fa_problem *problem,
                                       const fa_cuda_plan_launch *launch);

/* Cuts the keys of all query tiles but the first `whole` ones of a plan of these families into parts of so many key tiles, at most
 * FA_SM90_PARTS parts. */
void fa_cuda_cut_split_float32(const fa_problem *problem, const fa_cuda_device *device,
                               int64_t whole, int64_t part_tiles, fa_cuda_plan *plan);

#endif
