/*
 * The parameter of forward_sm80_split and forward_sm80_merge. It is made separately from the launches, so that tests need no
 * driver.
 */
#ifndef FA_CUDA_PLAN_SPLIT_SM80_H
#define FA_CUDA_PLAN_SPLIT_SM80_H

#include "../../kernels/forward_sm80/split.h"
#include "cuda/plan.h"

/* Of both launches. */
void fa_cuda_set_split_sm80_params(const fa_problem *problem, const fa_cuda_plan_launch *launch,
                                   fa_sm80_split_params *params);

/* Cuts the keys of a plan of this family into so many parts, at most FA_SM80_MOST_PARTS; 2^group_bits heads share query tiles,
 * which divides the query heads of a key head. */
void fa_cuda_cut_split_sm80(const fa_problem *problem, int parts, int group_bits,
                            fa_cuda_plan *plan);

#endif
