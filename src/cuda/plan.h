/*
 * Which kernel computes a problem on a device, and how it is launched. Pure: numbers in, numbers
 * out, so that plans are tested without a GPU.
 */
#ifndef FA_CUDA_PLAN_H
#define FA_CUDA_PLAN_H

#include <stdbool.h>
#include <stddef.h>

#include "cuda/device.h"
#include "problem.h"

typedef struct fa_cuda_plan {
    const char *image, *entry;
    int64_t tiles; /* of queries: of a batch item, or of all tokens if packed */
    int64_t tasks; /* tiles times heads times batch items; 0: nothing to do   */
    uint32_t grid, threads, smem_bytes;
    size_t workspace_bytes;
    int tile_q, tile_k;
} fa_cuda_plan;

/* False if no kernel can; why then says so in a sentence that names the argument. */
bool fa_cuda_plan_make(const fa_problem *problem, const fa_cuda_device *device, fa_cuda_plan *plan,
                       char *why, size_t size);

/* One line for fa_describe. */
void fa_cuda_plan_describe(const fa_problem *problem, const fa_cuda_device *device,
                           const fa_cuda_plan *plan, char *text, size_t size);

#endif
