/* A kernel of backward, weights, combine or FA_CHECK compiled for the host: SOURCE, its ENTRY's name and its
 * constants come from the build. */
#define FA_CUDA_ON_CPU 1
#define backward_delta ENTRY
#define backward_dq_simt ENTRY
#define backward_dkv_simt ENTRY
#define backward_dbias_simt ENTRY
#define backward_dsinks ENTRY
#define weights_simt ENTRY
#define combine ENTRY
#define check_simt ENTRY

#include SOURCE
