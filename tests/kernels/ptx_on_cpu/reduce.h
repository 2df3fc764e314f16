/*
 * kernels/ptx/reduce.cuh in C.
 */
#ifndef TEST_PTX_ON_CPU_REDUCE_H
#define TEST_PTX_ON_CPU_REDUCE_H

#include "cuda_on_cpu.h"

FA_DEVICE void ptx_reduce_add(float *to, float x) { *to += x; }

FA_DEVICE void ptx_reduce_add_4(float *to, const float x[4])
{
    if ((uintptr_t)to % 16 != 0) cuda_die("a misaligned address of four sums");
    for (int i = 0; i < 4; i++) ptx_reduce_add(to + i, x[i]);
}

#endif
