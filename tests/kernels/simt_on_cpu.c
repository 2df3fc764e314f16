/* forward_simt for one head dim, compiled for the host: HEAD_DIM and ENTRY come from the build. */
#define FA_CUDA_ON_CPU 1
#define forward_simt ENTRY

#include "../../kernels/forward_simt.cu"
