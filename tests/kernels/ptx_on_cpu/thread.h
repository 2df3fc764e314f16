/*
 * kernels/ptx/thread.cuh in C.
 */
#ifndef TEST_PTX_ON_CPU_THREAD_H
#define TEST_PTX_ON_CPU_THREAD_H

#include "cuda_on_cpu.h"

FA_DEVICE int ptx_thread_id(void) { return (int)threadIdx.x; }

#endif
