/*
 * A call for the Python extension, in addition to those of flashattn.h. The extension knows where its
 * arrays lie, so the call does not ask the driver, which takes 50 ns for each pointer.
 */
#ifndef FA_API_H
#define FA_API_H

#include "flashattn.h"

/* fa_forward or fa_decode, depending on the pass. location: the CUDA device on which the tensors' data,
 * lse and the arrays of the options lie; -1: host memory. The workspace is still checked. */
fa_status fa_forward_located(fa_pass pass, const fa_tensor *q, const fa_tensor *k,
                             const fa_tensor *v, const fa_tensor *out, float *lse,
                             const fa_options *options, int location);

#endif
