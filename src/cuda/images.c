/* The embedded kernels. */
#include "cuda/images.h"

#include <stdio.h>

fa_cuda_image *fa_cuda_image_of(int variant)
{
    return fa_cuda_images[variant].data ? &fa_cuda_images[variant] : NULL;
}

void fa_cuda_explain_missing_image(const char *name, char *text, size_t size)
{
    if (!fa_cuda_architectures[0])
        snprintf(text, size, "this build has no CUDA kernels (make CUDA=all compiles them)");
    else
        snprintf(text, size,
                 "this build has no kernel %s: its kernels are for the architectures %s (make "
                 "CUDA=all compiles all)",
                 name, fa_cuda_architectures);
}
