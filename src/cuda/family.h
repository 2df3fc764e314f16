/*
 * A family of kernels, and what the planners of all families share. A new one is a file
 * plan_<name>.c with a const fa_cuda_family, and an entry in plan.c's table of its pass.
 */
#ifndef FA_CUDA_FAMILY_H
#define FA_CUDA_FAMILY_H

#include "cuda/plan.h"

struct fa_cuda_family {
    const char *name; /* what FA_CUDA_KERNEL and FA_CUDA_BACKWARD_KERNEL call it */

    /* The architectures (80 for 8.0) on which it is tried if the environment names no family. On others,
     * fa_describe does not list it among the families that were not chosen. */
    int oldest, newest;
    int except; /* one in between on which it is not tried either; 0: there is none */

    /* It runs few problems: if the environment names it, it is tried first, and other families run what
     * it refuses. */
    bool does_few;

    /* Whether a later family runs the problem faster. Writes the reason, or nothing if it is obvious. Not called if the
     * environment names this family; NULL: no later family is faster. */
    bool (*slower)(const fa_problem *problem, const fa_cuda_device *device, char *why, size_t size);

    /* The time of the fastest of this family and those after it, by a model; NULL: there is none. The host knows all lengths. */
    double (*seconds)(const fa_problem *problem, const fa_cuda_device *device);

    /* Later families that refuse every gradient that it refuses. If it has planned a problem before the
     * gradients are known, none of these will run the problem. */
    const fa_cuda_family *replaces[3];

    /* The family that runs the problem in its place where that one does not say that it is slower, also if the environment names
     * this one. NULL: none. */
    const fa_cuda_family *split;

    /* The family that runs the problem if the call has too little workspace. If it refuses the problem, its own
     * without_workspace is next. NULL: the call fails. */
    const fa_cuda_family *without_workspace;

    /* Adds launches to an empty plan, and sets arithmetic and workspace_bytes. False if it cannot run the problem; why, if
     * it is not NULL, then names the argument and its value: "q.dtype is float32". */
    bool (*plan)(const fa_problem *problem, const fa_cuda_device *device, fa_cuda_plan *plan,
                 char *why, size_t size);
};

extern const fa_cuda_family fa_cuda_forward_sm90, fa_cuda_forward_split_sm90, fa_cuda_forward_sm80,
    fa_cuda_forward_split_sm80, fa_cuda_forward_sm75, fa_cuda_forward_tf32_sm90,
    fa_cuda_forward_f16x3_sm90, fa_cuda_forward_tf32_rounded, fa_cuda_forward_split_tf32_sm90,
    fa_cuda_forward_split_f16x3_sm90, fa_cuda_forward_tf32, fa_cuda_forward_tf32x3,
    fa_cuda_forward_simt, fa_cuda_forward_mixed, fa_cuda_forward_mixed_beside, fa_cuda_decode,
    fa_cuda_decode_latent_sm90, fa_cuda_decode_sm90, fa_cuda_backward_sm90,
    fa_cuda_backward_sm90_persistent, fa_cuda_backward_sm90_joined, fa_cuda_backward_sm90_single,
    fa_cuda_backward_sm90_chained, fa_cuda_backward_sm90_rounding, fa_cuda_backward_sm80,
    fa_cuda_backward_tf32, fa_cuda_backward_tf32x3, fa_cuda_backward_tf32x3_corrected,
    fa_cuda_backward_tf32_in_place, fa_cuda_backward_simt, fa_cuda_weights_simt;

enum {
    /* The most bytes besides the dynamic ones of a kernel whose variant gives no number of its own (tools/kernel_report.py
     * checks both). */
    FA_CUDA_STATIC_SMEM = 896,
    FA_CUDA_NEWEST = 1 << 20 /* no last architecture */
};

/* The most bytes of shared memory of a block besides the dynamic ones. */
int fa_cuda_static_smem(const fa_variant *variant);

/* Writes a refusal to why; does nothing if why is NULL. */
__attribute__((format(printf, 3, 4))) void fa_cuda_say(char *why, size_t size, const char *format,
                                                       ...);

/* Whether the family is tried on the device if the environment names no family. */
bool fa_cuda_is_tried(const fa_cuda_family *family, const fa_cuda_device *device);

/* Starts a plan without launches. */
void fa_cuda_plan_begin(const fa_cuda_device *device, const fa_cuda_family *family,
                        fa_cuda_plan *plan);

/* Adds a launch to the plan and returns it, without tasks, tiles and workspace; the union is not initialized. NULL if the
 * variant does not run on the device, or the device has too little shared memory for a block (smem_bytes: the dynamic
 * part). */
fa_cuda_plan_launch *fa_cuda_plan_add(const fa_variant *variant, int threads, int smem_bytes,
                                      fa_cuda_queue_function *queue, const fa_cuda_device *device,
                                      fa_cuda_plan *plan, char *why, size_t size);

/* The narrowest variant of a family, from its first to its last, into which both head dims fit; else the last. For
 * families that differ in nothing else. */
const fa_variant *fa_cuda_narrowest(const fa_problem *problem, int first, int last);

/* Refusals that families of tensor cores share. Types: q, k, v and out must all be float16, or all
 * bfloat16 if the family supports it. Rows: the most rows of a sequence that the kernel can count. */
bool fa_cuda_refuse_dtypes(const fa_problem *problem, bool bfloat, char *why, size_t size);
bool fa_cuda_refuse_rows(const fa_problem *problem, int64_t max, char *why, size_t size);

/* The same for families that multiply in tf32. The second also refuses another precision than
 * tf32. */
bool fa_cuda_refuse_other_than_float32(const fa_problem *problem, char *why, size_t size);
bool fa_cuda_refuse_tf32(const fa_problem *problem, char *why, size_t size);

/* Refuses options that only kernels on FMA units support: attention_chunk. */
bool fa_cuda_refuse_options(const fa_problem *problem, char *why, size_t size);

/* A batch-invariant choice must not depend on the size of the batch. With a single item, the stride of the batch axis is
 * ignored. So TMA must be able to use this stride in any case, for q, k, v, and dout if there is one. */
bool fa_cuda_refuse_block_strides(const fa_problem *problem, char *why, size_t size);

/* Whether an option changes scores or weights: more than a scale and masks by position. */
bool fa_cuda_changes_scores(const fa_problem *problem);

/* Whether sequences have different lengths, which only the device knows. */
bool fa_cuda_has_own_lengths(const fa_problem *problem);

/* The number of tiles for this many rows. */
int64_t fa_cuda_count_tiles(int64_t rows, int64_t tile);

/* So many bytes, rounded up to where an array may begin that is copied by TMA or 16 bytes at a time. */
size_t fa_cuda_aligned(size_t bytes);

/* The number of blocks for this many tasks: one for each. If that is too many for a grid, blocks take several tasks. */
uint32_t fa_cuda_grid(int64_t tasks);

/* Sets tiles and tasks, and a grid of a block for each. Without tasks the launch is idle. */
void fa_cuda_set_tasks(fa_cuda_plan_launch *launch, int64_t tiles, int64_t tasks);

/* The same for tiles of tile_q queries of all heads; sets tile_q (see kernels/common/packed.h). */
void fa_cuda_set_query_tasks(const fa_problem *problem, int tile_q, fa_cuda_plan_launch *launch);

/* The same for tiles of tile_k keys of all key/value heads; paged: of the rows of every page. Sets tile_k. */
void fa_cuda_set_key_tasks(const fa_problem *problem, int tile_k, fa_cuda_plan_launch *launch);

/* Queues a launch once (launch.c). parameters: the address of each of the kernel's parameters. */
bool fa_cuda_queue(void *kernel, const fa_cuda_plan *plan, const fa_cuda_plan_launch *launch,
                   void *stream, void **parameters, fa_cuda_fault *fault);

#endif
