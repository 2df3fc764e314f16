/* A variant of kernels/variants.h compiled for the host. The build defines SOURCE, the macros of
 * the variant's row, and the variant's name in place of the kernel's. */
#define FA_CUDA_ON_CPU 1

#include SOURCE
