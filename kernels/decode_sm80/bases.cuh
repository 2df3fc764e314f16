/*
 * Bases of weights. Shared with decode_latent_sm90 and decode_sm90.
 */
#ifndef FA_KERNELS_DECODE_SM80_BASES_CUH
#define FA_KERNELS_DECODE_SM80_BASES_CUH

#include "decode_sm80/config.cuh"

/* The base of a row that has seen no key. With -infinity its weights would be NaN; 2^(-infinity -
 * NOTHING_SEEN) is 0. */
#define NOTHING_SEEN (-3.402823466e38f)

/* As in forward_sm80: the largest weight is 2^HEADROOM when a base is found, for float16 keeps more
 * of the small weights then. A base stays until logits are RESCALE_ABOVE beyond it. */
#define HEADROOM (ELEMENT == FA_ELEMENT_BFLOAT16 ? 0.0f : 7.0f)
#define RESCALE_ABOVE (HEADROOM + 0.5f)

#endif
