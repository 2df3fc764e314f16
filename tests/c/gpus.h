/*
 * Descriptions of GPUs for the tests of the planner: from T4 to H200.
 */
#ifndef FA_TEST_GPUS_H
#define FA_TEST_GPUS_H

#include "cuda/device.h"

/* mib: of L2 cache; gib: of memory. */
#define GPU(text, higher, lower, sms, block_bytes, sm_bytes, mib, gib)                             \
    {                                                                                              \
        .name = text, .major = higher, .minor = lower, .multiprocessors = sms,                     \
        .smem_per_block = block_bytes, .smem_per_sm = sm_bytes, .registers_per_sm = 65536,         \
        .overlaps = true, .l2_bytes = mib##LL << 20, .memory_bytes = gib##LL << 30                 \
    }

static const fa_cuda_device devices[] = {
    GPU("Tesla T4", 7, 5, 40, 65536, 65536, 4, 16),
    GPU("NVIDIA A100-SXM4-80GB", 8, 0, 108, 166912, 167936, 40, 80),
    GPU("NVIDIA GeForce RTX 4090", 8, 9, 128, 101376, 102400, 72, 24),
    GPU("NVIDIA H100 80GB HBM3", 9, 0, 132, 232448, 233472, 50, 80),
    GPU("NVIDIA H200", 9, 0, 132, 232448, 233472, 60, 141),
};
#undef GPU

/* Their indices in the table. */
enum { T4, A100, RTX_4090, H100, H200, DEVICES };

#endif
