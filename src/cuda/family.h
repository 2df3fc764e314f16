/*
 * A family of kernels, and what the planners of all families share. A new one is a file
 * plan_<name>.c with a const fa_cuda_family, and a line in plan.c's list.
 */
#ifndef FA_CUDA_FAMILY_H
#define FA_CUDA_FAMILY_H

#include "cuda/driver.h"
#include "cuda/plan.h"

struct fa_cuda_family {
    const char *name; /* what FA_CUDA_KERNEL calls it */

    /* The architectures (80 for 8.0) on which it is tried unasked. Elsewhere it does not count as
     * passed over. */
    int oldest, newest;

    /* Fills in all of the plan but family and passed_over. False if it cannot do the problem; why,
     * if it is not NULL, then names the argument and its value: "q.dtype is float32". */
    bool (*plan)(const fa_problem *problem, const fa_cuda_device *device, fa_cuda_plan *plan,
                 char *why, size_t size);

    /* Queues the plan's kernel, which has something to do, on the problem's stream. */
    bool (*launch)(void *kernel, const fa_problem *problem, const fa_cuda_plan *plan,
                   fa_cuda_fault *fault);
};

extern const fa_cuda_family fa_cuda_family_sm90, fa_cuda_family_sm80, fa_cuda_family_sm75,
    fa_cuda_family_simt;

enum {
    /* Bytes beside the dynamic ones: at most, of any kernel here (tools/kernel_report.py checks it). */
    FA_CUDA_STATIC_SMEM = 896,
    FA_CUDA_NEWEST = 1 << 20 /* no last architecture */
};

/* Words a refusal into why; does nothing where why is NULL. */
__attribute__((format(printf, 3, 4))) void fa_cuda_say(char *why, size_t size, const char *format,
                                                       ...);

/* All families, space-separated. */
void fa_cuda_family_names(char *text, size_t size);

/* Sets the variant. False if the device is none that it runs on, or has too little shared memory for a block of it
 * (smem_bytes: the dynamic part). */
bool fa_cuda_plan_variant(const fa_variant *variant, int smem_bytes, const fa_cuda_device *device,
                          fa_cuda_plan *plan, char *why, size_t size);

/* Reasons that families of tensor cores share. Types: q, k, v and out must all be float16, or all
 * bfloat16 if the family has it. Rows: the kernel counts no more of them in a sequence. */
bool fa_cuda_refuse_dtypes(const fa_problem *problem, bool bfloat, char *why, size_t size);
bool fa_cuda_refuse_rows(const fa_problem *problem, int64_t most, char *why, size_t size);

/* Whether an option changes scores or weights: more than a scale and masks by position. */
bool fa_cuda_changes_scores(const fa_problem *problem);

/* Whether sequences have lengths of their own, which the device alone knows. */
bool fa_cuda_has_own_lengths(const fa_problem *problem);

/* Blocks for so many tasks: one each; more than a grid holds are taken in turn. */
uint32_t fa_cuda_grid(int64_t tasks);

/* Sets the tiles of so many queries (see kernels/common/sequence.cuh), the tasks, and a grid of a
 * block each. */
void fa_cuda_plan_tiles(const fa_problem *problem, int tile_q, fa_cuda_plan *plan);

/* Queues the plan's blocks (forward.c). parameters: the address of each of the kernel's. */
bool fa_cuda_queue(void *kernel, const fa_problem *problem, const fa_cuda_plan *plan,
                   void **parameters, fa_cuda_fault *fault);

/* The launch of a kernel that takes one fa_attention_params. */
bool fa_cuda_launch_plain(void *kernel, const fa_problem *problem, const fa_cuda_plan *plan,
                          fa_cuda_fault *fault);

#endif
