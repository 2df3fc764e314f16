/*
 * Tensor maps, by which TMA copies boxes of a tensor. Plain numbers: needs no driver.
 */
#ifndef FA_CUDA_TENSOR_MAP_H
#define FA_CUDA_TENSOR_MAP_H

#include <stdbool.h>
#include <stdint.h>

#include "../../kernels/common/element.h"

/* A tensor map of TMA (CUtensorMap): 128 opaque bytes that a kernel takes as a
 * __grid_constant__ parameter. */
typedef struct fa_tensor_map {
    _Alignas(64) uint64_t opaque[16];
} fa_tensor_map;

enum { FA_TENSOR_MAP_AXES = 5 };

/*
 * A tensor for TMA, innermost axis first. A box is stored in shared memory with the 128-byte
 * swizzle; what lies outside the extents reads as zero and is not written. The
 * second-level cache fetches lines of 128 bytes.
 *
 * What can be mapped (the driver's documentation, and the instructions' 32-bit coordinates):
 *   axes        1 to 5
 *   base        a multiple of 16 bytes
 *   extent[i]   1 to 2^31 (the format takes 2^32, but no coordinate reaches there)
 *   stride[i]   bytes, i > 0: a multiple of 16, from 16 to 2^40 - 16. Any order and any overlap is
 *               allowed: the stride of axis 2 may be smaller than that of axis 1. The stride of an
 *               axis of extent 1 is ignored. Strides are unsigned, so they cannot be negative. The
 *               documentation neither allows nor forbids 0; fa_tensor_map_fits refuses it. For a
 *               broadcast axis the caller gives extent 1 and always uses index 0.
 *   box[i]      1 to 256; box[0] elements are a multiple of 16 bytes, at most 128 because of the swizzle
 * A box may be longer than its extent, and start before index 0.
 */
typedef struct fa_tensor_map_shape {
    void *base;
    fa_element element;
    int axes;
    uint64_t extent[FA_TENSOR_MAP_AXES];
    uint64_t stride
        [FA_TENSOR_MAP_AXES]; /* stride[i]: bytes from one index of axis i to the next, i > 0 */
    uint32_t box[FA_TENSOR_MAP_AXES];
} fa_tensor_map_shape;

/* Whether a tensor can be mapped; if not, why (unless it is NULL) is the reason, for a sentence that
 * starts with the tensor's name: "its address is not a multiple of 16 bytes". Pure: needs no driver. */
bool fa_tensor_map_fits(const fa_tensor_map_shape *shape, const char **why);

#endif
