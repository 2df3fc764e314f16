/* forward_sm90 in one of its compiled forms, for the host: ENTRY and the rest come from the build. */
#define FA_CUDA_ON_CPU 1
#define forward_sm90 ENTRY

#include "../../kernels/forward_sm90.cu"
