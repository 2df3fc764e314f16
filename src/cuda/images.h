/*
 * The compiled kernels that a build embeds: arrays of images (cmake/Cuda.cmake makes them).
 */
#ifndef FA_CUDA_IMAGES_H
#define FA_CUDA_IMAGES_H

#include <stddef.h>

#include "cuda/driver.h"
#include "cuda/variants.h"

/* The images of the library's variants, by id. An image that this build has not compiled has no data. */
extern fa_cuda_image fa_cuda_images[FA_VARIANTS];

/* The architectures of these images and those of the ladder, "80 90a and PTX"; "": there are no images. */
extern const char fa_cuda_architectures[];

/* The image of a variant; NULL: this build has none. */
fa_cuda_image *fa_cuda_image_of(int variant);

/* Why there is no image of that name, and which option of the build adds it. It is the rest of a sentence: "this build
 * has no CUDA kernels (make CUDA=all compiles them)" */
void fa_cuda_explain_missing_image(const char *name, char *text, size_t size);

/* ---- For the generated arrays ---------------------------------------------------------------- */

/* A file's bytes between the labels `symbol` and `symbol`_end. */
#define FA_CUDA_EMBED(symbol, path)                                                                \
    __asm__(".pushsection .rodata\n"                                                               \
            ".balign 64\n"                                                                         \
            ".hidden " #symbol "\n"                                                                \
            ".hidden " #symbol "_end\n"                                                            \
            ".globl " #symbol "\n"                                                                 \
            ".globl " #symbol "_end\n" #symbol ":\n"                                               \
            ".incbin \"" path "\"\n" #symbol "_end:\n"                                             \
            ".popsection\n");                                                                      \
    extern const unsigned char symbol[], symbol##_end[];

#define FA_CUDA_IMAGE(name, symbol)                                                                \
    {                                                                                              \
        name, symbol, symbol##_end, NULL                                                           \
    }
#define FA_CUDA_NO_IMAGE                                                                           \
    {                                                                                              \
        NULL, NULL, NULL, NULL                                                                     \
    }

#endif
