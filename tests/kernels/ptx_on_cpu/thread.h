/*
 * kernels/ptx/thread.cuh in C.
 */
#ifndef TEST_PTX_ON_CPU_THREAD_H
#define TEST_PTX_ON_CPU_THREAD_H

#include "cuda_on_cpu.h"

FA_DEVICE int ptx_thread_id(void) { return (int)threadIdx.x; }

FA_DEVICE uint32_t ptx_shuffle_within(uint32_t x, int lane, int width)
{
    return __shfl_sync(0xffffffffu, x, (int)threadIdx.x % 32 / width * width + lane);
}

#endif
