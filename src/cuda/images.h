/*
 * The compiled kernels that a build embeds: tables of images (cmake/Cuda.cmake makes them).
 */
#ifndef FA_CUDA_IMAGES_H
#define FA_CUDA_IMAGES_H

#include <stddef.h>

#include "cuda/driver.h"

/* The library's images; an entry without a name ends the table. */
extern fa_cuda_image fa_cuda_images[];

/* What they and the ladder's are compiled for, "80 90a and PTX"; "": nothing, the tables are empty. */
extern const char fa_cuda_architectures[];

/* The image of that name in a table; NULL: this build has none. */
fa_cuda_image *fa_cuda_find_image(fa_cuda_image *table, const char *name);

/* Why a table lacks an image, and which option of the build brings it: no sentence, but the rest of
 * one. "this build has no CUDA kernels (make CUDA=all compiles them)" */
void fa_cuda_explain_missing_image(const char *name, char *text, size_t size);

/* ---- For the generated tables ---------------------------------------------------------------- */

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

#define FA_CUDA_IMAGE_ROW(name, symbol)                                                            \
    {                                                                                              \
        name, symbol, symbol##_end, NULL                                                           \
    }

#endif
