/* A variant of kernels/variants.h compiled for the host: SOURCE, the definitions of its row, and its name in place of its
 * kernel's come from the build. */
#define FA_CUDA_ON_CPU 1

#include SOURCE
