/*
 * Which kernel computes a problem on a device, and how it is launched. Pure: numbers in, numbers
 * out, so that plans are tested without a GPU.
 *
 * Kernels come in families, src/cuda/plan_<family>.c, which are tried from the fastest on.
 */
#ifndef FA_CUDA_PLAN_H
#define FA_CUDA_PLAN_H

#include <stdbool.h>
#include <stddef.h>

#include "cuda/device.h"
#include "cuda/variants.h"
#include "problem.h"

typedef struct fa_cuda_family fa_cuda_family; /* cuda/family.h */

typedef struct fa_cuda_plan {
    const fa_cuda_family *family;
    int variant;                 /* its id */
    const char *arithmetic;      /* for fa_describe: "float32 sums on FMA units" */
    int64_t tiles;               /* of queries: of a batch item, or of all tokens if packed */
    int64_t tasks;               /* tiles times heads times batch items; 0: nothing to do   */
    int64_t pairs, paired_heads; /* as in fa_attention_params */
    int device;                  /* the ordinal */
    uint32_t grid, threads, smem_bytes;
    uint32_t cluster; /* blocks that share a piece of work, as the kernel says itself; 0: 1 */
    size_t workspace_bytes;
    int tile_q, tile_k;
    fa_tensor_map_shape maps[4]; /* of q, k, v and bias; set by families that use the copy engine */
    bool bias_mapped;            /* the last one is set: the copy engine loads the bias */
    bool drawn;                  /* blocks draw their pieces from a counter, if there is one */
    char passed_over[240]; /* "; not sm80: q.dtype is float32"; "": the fastest of this device */
} fa_cuda_plan;

/* The family that FA_CUDA_KERNEL asks for, which is read once; NULL: none in particular. False if
 * there is none of that name; why then says so in a sentence. */
bool fa_cuda_asked_family(const fa_cuda_family **asked, char *why, size_t size);

/* The family of that name, "sm90", "sm80", "sm75" or "simt"; NULL: there is none. */
const fa_cuda_family *fa_cuda_find_family(const char *name);

/* asked: the only family that may do it; NULL: the fastest that can. False if no kernel can; why
 * then says so in a sentence that names the argument. With why NULL no refusal is worded, which
 * costs more than the plan: passed_over stays empty. */
bool fa_cuda_plan_make(const fa_problem *problem, const fa_cuda_device *device,
                       const fa_cuda_family *asked, fa_cuda_plan *plan, char *why, size_t size);

/* One line for fa_describe. */
void fa_cuda_plan_describe(const fa_problem *problem, const fa_cuda_device *device,
                           const fa_cuda_plan *plan, char *text, size_t size);

#endif
