/*
 * A call besides those of flashattn.h, for the Python extension. Its arrays know where they lie, so the
 * driver, which takes 50 ns for each pointer, is not asked.
 */
#ifndef FA_API_H
#define FA_API_H

#include "flashattn.h"

/* fa_forward or, by the pass, fa_decode. location: the CUDA device on which the tensors' data, lse and
 * the arrays of the options lie; -1: host memory. Workspace is still checked. */
fa_status fa_forward_located(fa_pass pass, const fa_tensor *q, const fa_tensor *k,
                             const fa_tensor *v, const fa_tensor *out, float *lse,
                             const fa_options *options, int location);

#endif
