/*
 * The parameter of decode_latent_sm90 in addition to that of decode_sm80. It is made separately from the
 * launch, so that tests need no driver.
 */
#ifndef FA_CUDA_PLAN_DECODE_LATENT_SM90_H
#define FA_CUDA_PLAN_DECODE_LATENT_SM90_H

#include "../../kernels/decode_latent_sm90/decode_latent_sm90.h"
#include "cuda/plan.h"
#include "cuda/view_map.h"

/* The kernel's second parameter. merged_rows: the rows of a block that merges. False if a map cannot be
 * made. */
bool fa_cuda_decode_latent_sm90_params(const fa_problem *problem, const fa_cuda_plan_launch *launch,
                                       int32_t merged_rows, fa_cuda_encoder *encode,
                                       fa_decode_latent_sm90_params *params, fa_cuda_fault *fault);

/* The map of queries: a box has the rows of a work tile, heads next to each other, then queries. False: there is none, and
 * the kernel gathers queries. */
bool fa_cuda_map_latent_queries(const fa_problem *problem, const fa_cuda_plan_launch *launch,
                                fa_tensor_map_shape *map);

/* Rows of a block that merges, so that a launch of `grid` blocks keeps as many multiprocessors busy
 * as the first one. */
int32_t fa_cuda_merged_rows(const fa_cuda_plan_launch *launch, uint32_t *grid);

/* Whether the last block of each work tile may merge its parts: there are few rows to merge, and enough counters.
 * Full work tiles are merged in registers, so their results must be stored in vectors. */
bool fa_cuda_latent_merges(const fa_cuda_plan_launch *launch, const fa_decode_params *params);

#endif
