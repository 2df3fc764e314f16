/*
 * What planners and tests share about forward_sm80. The parameters are made separately from the launch, so that tests need
 * no driver.
 */
#ifndef FA_CUDA_PLAN_SM80_H
#define FA_CUDA_PLAN_SM80_H

#include "../../kernels/forward_sm80/forward_sm80.h"
#include "cuda/plan.h"

void fa_cuda_set_sm80_params(const fa_problem *problem, const fa_cuda_plan_launch *launch,
                             fa_sm80_params *params);

/* Of a variant: rows of a query tile; bytes of dynamic shared memory; blocks that fit on a multiprocessor; for fa_describe. */
int fa_cuda_sm80_queries(const fa_variant *variant);
int fa_cuda_sm80_smem(const fa_variant *variant);
int fa_cuda_sm80_room(const fa_cuda_device *device, const fa_variant *variant);
const char *fa_cuda_sm80_arithmetic(const fa_variant *variant);

/* The variant that forward_sm80 takes for a problem of a 16-bit type. NULL: it has none. */
const fa_variant *fa_cuda_sm80_variant(const fa_problem *problem, const fa_cuda_device *device);

/* Refuses wider heads than these, and more rows than the kernel can count. */
bool fa_cuda_sm80_refuse_sizes(const fa_problem *problem, int widest, char *why, size_t size);

/* Whether a score needs more than a scale and masks by position. The plain kernels assume that the largest score gives the
 * largest logit, which is wrong for a negative scale. */
bool fa_cuda_sm80_is_general(const fa_problem *problem);

#endif
