/* From a plan to the driver. */
#include "cuda/family.h"

bool fa_cuda_queue(void *kernel, const fa_cuda_plan *plan, const fa_cuda_plan_launch *l,
                   void *stream, void **parameters, fa_cuda_fault *fault)
{
    const fa_cuda_launch launch = {.device = plan->device,
                                   .grid = {l->grid, 1, 1},
                                   .threads = l->threads,
                                   .cluster = l->cluster,
                                   .overlaps = l->overlaps,
                                   .smem_bytes = l->smem_bytes,
                                   .stream = stream};
    return fa_cuda_launch_kernel(kernel, &launch, parameters, fault);
}

bool fa_cuda_plan_queue(const fa_cuda_plan *plan, void *const kernels[FA_CUDA_LAUNCHES],
                        const fa_cuda_call *call, fa_cuda_fault *fault)
{
    for (int i = 0; i < plan->count; i++) {
        const fa_cuda_plan_launch *l = &plan->launches[i];
        if (!l->idle && !l->queue(kernels[i], plan, l, call, fault)) return false;
    }
    return true;
}
