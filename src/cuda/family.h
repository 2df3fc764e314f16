/*
 * A family of kernels, and what the planners of all families share. A new one is a file
 * plan_<name>.c with a const fa_cuda_family, and an entry in plan.c's table of its pass.
 */
#ifndef FA_CUDA_FAMILY_H
#define FA_CUDA_FAMILY_H

#include "cuda/plan.h"

struct fa_cuda_family {
    const char *name; /* what FA_CUDA_KERNEL and FA_CUDA_BACKWARD_KERNEL call it */

    /* The architectures (80 for 8.0) on which it is tried unasked. Elsewhere it does not count as
     * passed over. */
    int oldest, newest;

    /* It does few problems: where the environment names it, it is tried first, and the others do
     * what it refuses. */
    bool does_few;

    /* Whether a family behind it does the problem faster. Says why, or nothing where that is plain. Not asked where the
     * environment names this family; NULL: never. */
    bool (*slower)(const fa_problem *problem, const fa_cuda_device *device, char *why, size_t size);

    /* Families behind it that refuse every gradient that it refuses: none of them will do a problem
     * that it has planned before the gradients are known. */
    const fa_cuda_family *replaces[3];

    /* Adds launches to the plan, which has none, and sets arithmetic and workspace_bytes. False if it cannot do the
     * problem; why, if it is not NULL, then names the argument and its value: "q.dtype is float32". */
    bool (*plan)(const fa_problem *problem, const fa_cuda_device *device, fa_cuda_plan *plan,
                 char *why, size_t size);
};

extern const fa_cuda_family fa_cuda_forward_sm90, fa_cuda_forward_sm80, fa_cuda_forward_sm75,
    fa_cuda_forward_tf32_sm90, fa_cuda_forward_f16x3_sm90, fa_cuda_forward_tf32,
    fa_cuda_forward_tf32x3, fa_cuda_forward_simt, fa_cuda_forward_mixed,
    fa_cuda_forward_mixed_beside, fa_cuda_decode, fa_cuda_decode_latent_sm90, fa_cuda_decode_sm90,
    fa_cuda_backward_sm90, fa_cuda_backward_sm90_persistent, fa_cuda_backward_sm90_joined,
    fa_cuda_backward_sm80, fa_cuda_backward_tf32, fa_cuda_backward_tf32x3,
    fa_cuda_backward_tf32x3_corrected, fa_cuda_backward_tf32_in_place, fa_cuda_backward_simt,
    fa_cuda_weights_simt;

enum {
    /* Bytes beside the dynamic ones: at most, of any kernel here (tools/kernel_report.py checks it). A variant may say less. */
    FA_CUDA_STATIC_SMEM = 896,
    FA_CUDA_NEWEST = 1 << 20 /* no last architecture */
};

/* Bytes of shared memory of a block beside the dynamic ones, at most. */
int fa_cuda_static_smem(const fa_variant *variant);

/* Words a refusal into why; does nothing where why is NULL. */
__attribute__((format(printf, 3, 4))) void fa_cuda_say(char *why, size_t size, const char *format,
                                                       ...);

/* Whether the device is one on which the family is tried unasked. */
bool fa_cuda_is_tried(const fa_cuda_family *family, const fa_cuda_device *device);

/* Begins a plan: without launches. */
void fa_cuda_plan_begin(const fa_cuda_device *device, const fa_cuda_family *family,
                        fa_cuda_plan *plan);

/* Adds a launch to the plan and returns it: without tasks, tiles and workspace, and the union as it is. NULL if the
 * device is none that the variant runs on, or has too little shared memory for a block of it (smem_bytes: the dynamic
 * part). */
fa_cuda_plan_launch *fa_cuda_plan_add(const fa_variant *variant, int threads, int smem_bytes,
                                      fa_cuda_queue_function *queue, const fa_cuda_device *device,
                                      fa_cuda_plan *plan, char *why, size_t size);

/* The narrowest variant of a family, from its first to its last, that both head dims fit into; else the last: for
 * families without any other choice. */
const fa_variant *fa_cuda_narrowest(const fa_problem *problem, int first, int last);

/* Reasons that families of tensor cores share. Types: q, k, v and out must all be float16, or all
 * bfloat16 if the family has it. Rows: the kernel counts no more of them in a sequence. */
bool fa_cuda_refuse_dtypes(const fa_problem *problem, bool bfloat, char *why, size_t size);
bool fa_cuda_refuse_rows(const fa_problem *problem, int64_t max, char *why, size_t size);

/* The same for families that multiply in tf32. The second also refuses another precision than
 * tf32. */
bool fa_cuda_refuse_other_than_float32(const fa_problem *problem, char *why, size_t size);
bool fa_cuda_refuse_tf32(const fa_problem *problem, char *why, size_t size);

/* Options of which only kernels on FMA units know: attention_chunk. */
bool fa_cuda_refuse_options(const fa_problem *problem, char *why, size_t size);

/* A batch-invariant choice must not depend on whether an item comes alone: then the axis of the batch has extent 1, and its
 * stride does not count. So TMA must be able to use it in any case, of q, k, v, and dout if there is one. */
bool fa_cuda_refuse_block_strides(const fa_problem *problem, char *why, size_t size);

/* Whether an option changes scores or weights: more than a scale and masks by position. */
bool fa_cuda_changes_scores(const fa_problem *problem);

/* Whether sequences have lengths of their own, which the device alone knows. */
bool fa_cuda_has_own_lengths(const fa_problem *problem);

/* Tiles of so many rows. */
int64_t fa_cuda_count_tiles(int64_t rows, int64_t tile);

/* Blocks for so many tasks: one each; where a grid has no room for so many, blocks take several. */
uint32_t fa_cuda_grid(int64_t tasks);

/* Sets tiles and tasks, and a grid of a block for each. Without tasks the launch is idle. */
void fa_cuda_set_tasks(fa_cuda_plan_launch *launch, int64_t tiles, int64_t tasks);

/* The same for tiles of so many queries of all heads; sets tile_q (see kernels/common/packed.h). */
void fa_cuda_set_query_tasks(const fa_problem *problem, int tile_q, fa_cuda_plan_launch *launch);

/* The same for tiles of so many keys of all key/value heads; paged: of the rows of every page. Sets tile_k. */
void fa_cuda_set_key_tasks(const fa_problem *problem, int tile_k, fa_cuda_plan_launch *launch);

/* Queues a launch once (launch.c). parameters: the address of each of the kernel's. */
bool fa_cuda_queue(void *kernel, const fa_cuda_plan *plan, const fa_cuda_plan_launch *launch,
                   void *stream, void **parameters, fa_cuda_fault *fault);

#endif
