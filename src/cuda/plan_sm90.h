/*
 * The parameter of forward_sm90 and forward_sm90_wide in addition to fa_attention_params. It is made separately from the
 * launch, so that tests need no driver.
 */
#ifndef FA_CUDA_PLAN_SM90_H
#define FA_CUDA_PLAN_SM90_H

#include "../../kernels/forward_sm90_wide/forward_sm90_wide.h"
#include "cuda/plan.h"
#include "cuda/view_map.h"

/* The kernel's second parameter, for a launch of this family. False if a map cannot be made. */
bool fa_cuda_sm90_params(const fa_problem *problem, const fa_cuda_plan_launch *launch,
                         fa_cuda_encoder *encode, fa_sm90_params *params, fa_cuda_fault *fault);

/* Sets the kind and number of its tasks, the heads with a balanced schedule, and no counter. */
void fa_cuda_set_sm90_order(const fa_problem *problem, const fa_cuda_plan_launch *launch,
                            fa_sm90_params *params);

/* The options FA_SM90_SOFTCAP ... that change scores or weights. bias: for its map, if FA_SM90_BIAS is among them; NULL: it is
 * read by its strides. */
int fa_cuda_sm90_options(const fa_problem *problem, fa_tensor_map_shape *bias);

/* Adds a launch of the first of these variants of forward_sm90 that takes the problem. */
bool fa_cuda_add_sm90(const fa_problem *problem, int first, int end, bool overlaps,
                      const fa_cuda_device *device, fa_cuda_plan *plan, char *why, size_t size);

/* The same of forward_sm90_wide for float32 inputs, with those rounded to float16 as queries, keys and values. */
bool fa_cuda_add_rounded(const fa_problem *halves, const fa_cuda_device *device, fa_cuda_plan *plan,
                         char *why, size_t size);

enum { FA_SM90_LEAST_PAGE = 8 }; /* rows: TMA loads pages of multiples of it */

/* Whether the variant takes pages of so many rows, or keys that are not in pages. */
bool fa_cuda_fits_pages(const fa_variant *variant, const fa_problem *problem);

/* Adds a launch that runs at the same time as the previous one. The previous launch lets it start when all
 * earlier work has ended. */
bool fa_cuda_add_beside(const fa_problem *problem, const fa_cuda_device *device, fa_cuda_plan *plan,
                        char *why, size_t size);

/* The variants of forward_tf32_sm90 and of forward_f16x3_sm90 that take the problem; NULL: none. */
const fa_variant *fa_cuda_find_tf32_sm90(const fa_problem *problem, const fa_cuda_device *device);
const fa_variant *fa_cuda_find_f16x3_sm90(const fa_problem *problem, const fa_cuda_device *device);

#endif
