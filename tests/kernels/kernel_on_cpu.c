/* A variant of kernels/variants.h compiled for the host. The build defines SOURCE, the macros of
 * the variant's row, the variant's name in place of the kernel's, and a name for its shared variables. */
#define FA_CUDA_ON_CPU 1
#define LONG_WORK_TILE 1 /* forward_sm90: random problems have few keys */

#include SOURCE

CUDA_HAS_VARIABLES(CUDA_VARIABLES)
