/*
 * The best rates of the device, and random inputs.
 */
#ifndef FA_CLI_LADDER_CEILING_H
#define FA_CLI_LADDER_CEILING_H

#include <stdbool.h>
#include <stdint.h>

#include "ladder.h"

/* The best rates of the device; 0: it has no such instruction. */
typedef struct rungs_ceiling {
    double copy;     /* bytes per second, read and written */
    double ffma;     /* operations per second; a multiply-add counts as 2 */
    double mma_tf32; /* mma.sync */
    double mma_bf16;
    double wgmma_bf16; /* Hopper */
} rungs_ceiling;

bool rungs_measure_ceiling(const fa_cuda_device *device, rungs_ceiling *ceiling);

/* The same without copy, which takes 2 GiB of the device's memory. */
bool rungs_measure_rates(const fa_cuda_device *device, rungs_ceiling *ceiling);

/* The rate that a rung of these types is compared with. */
double rungs_ceiling_of(const rungs_ceiling *ceiling, ladder_types types);

/* Fills device memory with standard normal numbers; count is a multiple of 4. */
bool rungs_fill_normal(void *data, fa_dtype dtype, int64_t count, uint32_t seed);

#endif
