/* Which tensors TMA can map. This is pure, so that planners can use it on any machine. */
#include "cuda/tensor_map.h"

#include <stddef.h>

enum {
    ALIGNMENT = 16, /* bytes, of addresses and strides */
    SWIZZLE = 128,  /* bytes of a row in shared memory */
    MAX_BOX = 256
};

#define MAX_EXTENT                                                                                 \
    ((uint64_t)1 << 31) /* coordinates are 32 bits with a sign; the format takes 2^32 */
#define MAX_STRIDE ((uint64_t)1 << 40) /* one less is the last that fits */

/* The stride of an axis with one index is never used. */
static const char *find_stride_fault(uint64_t stride)
{
    if (stride == 0) return "an axis is broadcast (its stride is 0)";
    if (stride >> 63) return "an axis has a negative stride";
    if (stride >= MAX_STRIDE) return "a stride is 2^40 bytes or more";
    if (stride % ALIGNMENT) return "a stride is not a multiple of 16 bytes";
    return NULL;
}

static const char *find_box_fault(const fa_tensor_map_shape *shape)
{
    for (int i = 0; i < shape->axes; i++)
        if (shape->box[i] < 1 || shape->box[i] > MAX_BOX) return "a box has no 1 to 256 indices";
    const uint32_t row = shape->box[0] * (uint32_t)FA_ELEMENT_BYTES(shape->element);
    if (row % ALIGNMENT || row > SWIZZLE) return "a box's rows are not 16, 32, ... or 128 bytes";
    return NULL;
}

static const char *find_fault(const fa_tensor_map_shape *shape)
{
    if (shape->axes < 1 || shape->axes > FA_TENSOR_MAP_AXES) return "it has no 1 to 5 axes";
    if ((uintptr_t)shape->base % ALIGNMENT) return "its address is not a multiple of 16 bytes";
    for (int i = 0; i < shape->axes; i++) {
        if (shape->extent[i] == 0) return "an extent is 0";
        if (shape->extent[i] > MAX_EXTENT) return "an extent is above 2^31";
        const char *fault =
            i > 0 && shape->extent[i] > 1 ? find_stride_fault(shape->stride[i]) : NULL;
        if (fault) return fault;
    }
    return find_box_fault(shape);
}

bool fa_tensor_map_fits(const fa_tensor_map_shape *shape, const char **why)
{
    const char *fault = find_fault(shape);
    if (why) *why = fault;
    return !fault;
}
