/*
 * kernels/ptx/counter.cuh in C.
 */
#ifndef TEST_PTX_ON_CPU_COUNTER_H
#define TEST_PTX_ON_CPU_COUNTER_H

#include "cuda_on_cpu.h"

FA_DEVICE uint32_t ptx_counter_next(uint32_t *counter, uint32_t most)
{
    return atomicInc(counter, most);
}

#endif
