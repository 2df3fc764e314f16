/*
 * The parameter of decode_sm90 in addition to that of decode_sm80. It is made separately from the launch,
 * so that tests need no driver.
 */
#ifndef FA_CUDA_PLAN_DECODE_SM90_H
#define FA_CUDA_PLAN_DECODE_SM90_H

#include "../../kernels/decode_sm90/decode_sm90.h"
#include "cuda/plan.h"
#include "cuda/view_map.h"

/* The kernel's second parameter. False if a map cannot be made. */
bool fa_cuda_decode_sm90_params(const fa_problem *problem, const fa_cuda_plan_launch *launch,
                                fa_cuda_encoder *encode, fa_decode_sm90_params *params,
                                fa_cuda_fault *fault);

/* Adds the launch for the sequences of a mixed batch that have few queries, with this many persistent
 * blocks. The next launch may start once these blocks have started. fa_cuda_refuse_decode() must not
 * refuse the problem. */
bool fa_cuda_add_few_sm90(const fa_problem *problem, int32_t blocks, const fa_cuda_device *device,
                          fa_cuda_plan *plan, char *why, size_t size);

#endif
