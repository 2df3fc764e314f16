/*
 * The parameters of decode_sm80, and functions that its planner shares with those of decode_sm90 and
 * decode_latent_sm90.
 */
#ifndef FA_CUDA_PLAN_DECODE_H
#define FA_CUDA_PLAN_DECODE_H

#include "../../kernels/decode_sm80/decode_sm80.h"
#include "cuda/plan.h"

#define FA_DECODE_ARITHMETIC_8BIT                                                                  \
    "8-bit keys and values as float16, float16 products (mma.sync), float32 sums"

/* The family's plan. most_rows: the largest number of queries of a sequence times query heads of a
 * group, if there are several queries. */
bool fa_cuda_plan_decode(const fa_problem *problem, const fa_cuda_device *device, int64_t most_rows,
                         fa_cuda_plan *plan, char *why, size_t size);

/* Whether another family is faster, for decode_sm80 and decode_sm90. */
bool fa_cuda_is_decode_sm90_slower(const fa_problem *problem, const fa_cuda_device *device,
                                   char *why, size_t size);
bool fa_cuda_is_decode_slower(const fa_problem *problem, const fa_cuda_device *device, char *why,
                              size_t size);

/* Whether there is one key/value head whose values are the first columns of the keys, in whole
 * vectors: then they are read once. */
bool fa_cuda_is_latent(const fa_problem *problem);

/* The number of rows that decode_sm90 takes; most_rows as above. */
int64_t fa_cuda_most_decode_sm90_rows(const fa_problem *problem, const fa_cuda_device *device);

/* Queries of a sequence times query heads of a group; for packed sequences the average. */
int64_t fa_cuda_count_decode_rows(const fa_problem *problem);

/* Whether keys have 8 bits. */
bool fa_cuda_has_8bit_cache(const fa_problem *problem);

/* Whether keys are in pages that are too small for TMA, whose boxes have 8 rows or more; and whether the copies that decode_sm90
 * has instead can take rows: they are whole vectors. */
bool fa_cuda_has_small_pages(const fa_problem *problem);
bool fa_cuda_has_copied_columns(const fa_problem *problem);

/* Whether decode_sm90 copies keys and values row by row, because pages are too small for TMA or because that is faster. */
bool fa_cuda_copies_keys(const fa_problem *problem);

/* Bytes of dynamic shared memory of a variant of decode_sm90 with this many stages. */
int fa_cuda_decode_sm90_smem(const fa_variant *variant, int stages);

/* The variant of decode_sm90 for a problem that fa_cuda_refuse_decode() does not refuse. */
const fa_variant *fa_cuda_find_decode_sm90(const fa_problem *problem);

/* Whether none of these families can run the problem; most_rows as above. */
bool fa_cuda_refuse_decode(const fa_problem *problem, int64_t most_rows, char *why, size_t size);

/* The number of packed queries of a sequence for which the work tiles of a mixed batch have room. */
int64_t fa_cuda_most_few(const fa_problem *problem);

/* Adds the launch for the sequences of a mixed batch that have at most this many queries: of this variant,
 * with this many persistent blocks (0: a block for each part), or of decode_sm80. */
bool fa_cuda_add_few_by(const fa_problem *problem, const fa_variant *variant, int threads,
                        int32_t blocks, fa_cuda_queue_function *queue, const fa_cuda_device *device,
                        fa_cuda_plan *plan, char *why, size_t size);
bool fa_cuda_add_few(const fa_problem *problem, const fa_cuda_device *device, fa_cuda_plan *plan,
                     char *why, size_t size);

/* Adds the launch of a variant to the plan: work tiles, and keys cut into parts. */
bool fa_cuda_add_decode(const fa_problem *problem, const fa_variant *variant, int threads,
                        fa_cuda_queue_function *queue, const fa_cuda_device *device,
                        fa_cuda_plan *plan, char *why, size_t size);

/* Leaves the first work tiles whole, and cuts the keys of the others into at most this many parts, of at least this many
 * keys. Sets the grid and the workspace. */
void fa_cuda_cut_decode(fa_cuda_plan_launch *launch, int64_t whole, int64_t parts, int64_t least);

/* Queues the launch, or two. more: the kernel's second parameter, or NULL. */
bool fa_cuda_queue_decode(void *kernel, const fa_cuda_plan *plan, const fa_cuda_plan_launch *launch,
                          const fa_cuda_call *call, void *more, fa_cuda_fault *fault);

/* Reciprocals for a launch of a kernel that finds its work by them. */
fa_decode_divisors fa_cuda_decode_divisors(const fa_problem *problem,
                                           const fa_cuda_plan_launch *launch);

/* The launch with FA_DECODE_MERGE. */
fa_cuda_plan_launch fa_cuda_decode_merge_launch(const fa_cuda_plan_launch *launch);

/* Every field is written. step: FA_DECODE_...; counters: the set's number, for FA_DECODE_LAST. */
void fa_cuda_set_decode_params(const fa_problem *problem, const fa_cuda_plan_launch *launch,
                               int step, int32_t counters, fa_decode_params *params);

#endif
