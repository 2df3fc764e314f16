/*
 * GPUs as the planner sees them, for its tests: from T4 to H200.
 */
#ifndef FA_TEST_GPUS_H
#define FA_TEST_GPUS_H

#include "cuda/device.h"

static const fa_cuda_device devices[] = {
    {.major = 7,
     .minor = 5,
     .multiprocessors = 40,
     .smem_per_block = 65536,
     .smem_per_sm = 65536,
     .registers_per_sm = 65536,
     .memory_bytes = 16LL << 30,
     .name = "Tesla T4"},
    {.major = 8,
     .minor = 0,
     .multiprocessors = 108,
     .smem_per_block = 166912,
     .smem_per_sm = 167936,
     .registers_per_sm = 65536,
     .memory_bytes = 80LL << 30,
     .name = "NVIDIA A100-SXM4-80GB"},
    {.major = 8,
     .minor = 9,
     .multiprocessors = 128,
     .smem_per_block = 101376,
     .smem_per_sm = 102400,
     .registers_per_sm = 65536,
     .memory_bytes = 24LL << 30,
     .name = "NVIDIA GeForce RTX 4090"},
    {.major = 9,
     .minor = 0,
     .multiprocessors = 132,
     .smem_per_block = 232448,
     .smem_per_sm = 233472,
     .registers_per_sm = 65536,
     .memory_bytes = 80LL << 30,
     .name = "NVIDIA H100 80GB HBM3"},
    {.major = 9,
     .minor = 0,
     .multiprocessors = 132,
     .smem_per_block = 232448,
     .smem_per_sm = 233472,
     .registers_per_sm = 65536,
     .memory_bytes = 141LL << 30,
     .name = "NVIDIA H200"},
};
/* Their places in the table. */
enum { T4, A100, RTX_4090, H100, H200, DEVICES };

#endif
