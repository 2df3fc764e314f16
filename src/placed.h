/*
 * For the Python extension, whose arrays say themselves where they lie: the driver, which takes 50 ns
 * for each pointer, is not asked.
 */
#ifndef FA_PLACED_H
#define FA_PLACED_H

#include "flashattn.h"

/* fa_forward or, by the pass, fa_decode. place: the CUDA device on which the tensors' data, lse and
 * the arrays of the options lie; -1: in host memory. Workspace is still checked. */
fa_status fa_forward_placed(fa_pass pass, const fa_tensor *q, const fa_tensor *k,
                            const fa_tensor *v, const fa_tensor *out, float *lse,
                            const fa_options *options, int place);

#endif
