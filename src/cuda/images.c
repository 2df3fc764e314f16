/* The tables of embedded kernels. */
#include "cuda/images.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static fa_cuda_image *search(fa_cuda_image *table, const char *name)
{
    for (; table->name; table++)
        if (strcmp(table->name, name) == 0) return table;
    return NULL;
}

/* The library's images that were found lately, by the address of the name: plans ask with the same
 * few constants again and again. What a place holds is a guess, which the name itself confirms. */
enum { PLACES = 64 };
static _Atomic(fa_cuda_image *) found[PLACES];

fa_cuda_image *fa_cuda_find_image(fa_cuda_image *table, const char *name)
{
    if (table != fa_cuda_images) return search(table, name);
    _Atomic(fa_cuda_image *) *place = &found[(uintptr_t)name / 8 % PLACES];
    fa_cuda_image *image = atomic_load_explicit(place, memory_order_relaxed);
    if (image && strcmp(image->name, name) == 0) return image;
    image = search(table, name);
    if (image) atomic_store_explicit(place, image, memory_order_relaxed);
    return image;
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
