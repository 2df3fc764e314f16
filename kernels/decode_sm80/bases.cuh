/*
 * Bases of weights. Shared with decode_latent_sm90 and decode_sm90.
 */
#ifndef FA_KERNELS_DECODE_SM80_BASES_CUH
#define FA_KERNELS_DECODE_SM80_BASES_CUH

#include "decode_sm80/config.cuh"

/* The base of a row that has seen no key. With -infinity its weights would be NaN; 2^(-infinity -
 * NOTHING_SEEN) is 0. */
#define NOTHING_SEEN (-3.402823466e38f)

#define LN2 0.69314718055994530942f /* a base times it is a natural exponent */

/* As in forward_sm80: when a base is found, the largest weight is 2^HEADROOM, because float16 then
 * keeps more of the small weights. A base stays until logits exceed it by RESCALE_ABOVE. */
#define HEADROOM (ELEMENT == FA_ELEMENT_BFLOAT16 ? 0.0f : 7.0f)
#define RESCALE_ABOVE (HEADROOM + 0.5f)

#endif
