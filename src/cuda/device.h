/*
 * The properties of a CUDA device that planners and the kernels' host code use: plain numbers, so that
 * plans can be made and tested without a device.
 */
#ifndef FA_CUDA_DEVICE_H
#define FA_CUDA_DEVICE_H

#include <stdbool.h>
#include <stdint.h>

typedef struct fa_cuda_device {
    int32_t ordinal;
    int32_t major, minor; /* compute capability */
    int32_t multiprocessors;
    int32_t smem_per_block; /* bytes of shared memory that a block can opt in to */
    int32_t smem_per_sm;    /* bytes of a multiprocessor */
    int32_t registers_per_sm;
    bool overlaps; /* a launch may start while the one in front runs */
    int64_t l2_bytes;
    int64_t memory_bytes;
    char name[128];
} fa_cuda_device;

/* 90 for 9.0. */
static inline int fa_cuda_architecture(const fa_cuda_device *device)
{
    return 10 * device->major + device->minor;
}

#endif
