/* The table of variants. */
#include "cuda/variants.h"

#include "../../kernels/backward_sm80/backward_sm80.h"
#include "../../kernels/decode_latent_sm90/decode_latent_sm90.h"
#include "../../kernels/decode_sm80/decode_sm80.h"
#include "../../kernels/decode_sm90/decode_sm90.h"
#include "../../kernels/forward_sm80/forward_sm80.h"
#include "../../kernels/forward_sm90/forward_sm90.h"
#include "../../kernels/combine/combine.h"

const fa_variant fa_variants[FA_VARIANTS] = {
#define VARIANT(name_, ...) {.name = #name_, __VA_ARGS__},
#define FAMILY(pass, name)
#define END(pass, name)
#include "../../kernels/variants.h"
};
