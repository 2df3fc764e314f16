/*
 * The parameters of forward_sm90_split and forward_sm90_merge. They are made separately from the launches, so that tests
 * need no driver.
 */
#ifndef FA_CUDA_PLAN_SPLIT_SM90_H
#define FA_CUDA_PLAN_SPLIT_SM90_H

#include "../../kernels/forward_sm90/forward_sm90.h"
#include "cuda/plan.h"
#include "cuda/view_map.h"

/* What tasks are: parts of query tiles; sections of the line of all work, in which lengths may be on the device and heads may share
 * query tiles; or whole query tiles that heads share, in one launch; if lengths are on the device, blocks take these from a counter. */
typedef enum fa_cuda_split_form {
    FA_CUDA_PARTS,
    FA_CUDA_SECTIONS,
    FA_CUDA_WHOLE_TILES
} fa_cuda_split_form;

/* Plans the launches in one of these forms. Lengths on the device need sections or whole query tiles. */
bool fa_cuda_plan_split_form(const fa_problem *problem, fa_cuda_split_form form,
                             const fa_cuda_device *device, fa_cuda_plan *plan, char *why,
                             size_t size);

/* The second parameter of the first launch. False if a map cannot be made. */
bool fa_cuda_split_sm90_params(const fa_problem *problem, const fa_cuda_plan_launch *launch,
                               fa_cuda_encoder *encode, fa_sm90_params *params,
                               fa_cuda_fault *fault);

/* What the second launch reads of its second parameter. */
fa_sm90_split fa_cuda_split_of(const fa_problem *problem, const fa_cuda_plan_launch *launch);

/* Cuts the keys of a plan of this family into parts of so many key tiles, at most FA_SM90_PARTS parts. Lengths are not on
 * the device. */
void fa_cuda_cut_split_sm90(const fa_problem *problem, const fa_cuda_device *device,
                            int64_t part_tiles, fa_cuda_plan *plan);

/* If lengths are on the device, or heads share query tiles: cuts the line of all work into so many sections. */
void fa_cuda_section_split_sm90(const fa_problem *problem, const fa_cuda_device *device,
                                int64_t sections, fa_cuda_plan *plan);

#endif
