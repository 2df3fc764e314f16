/*
 * The special register of the thread's number in its block.
 */
#ifndef FA_KERNELS_PTX_THREAD_CUH
#define FA_KERNELS_PTX_THREAD_CUH

#include "common/dialect.h"

#ifdef FA_CUDA_ON_CPU
#include "ptx_on_cpu/thread.h"
#else

/* Read anew at each call. The compiler would keep what it computes from threadIdx.x in registers that
 * products need. */
FA_DEVICE int ptx_thread_id(void)
{
    int id;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(id));
    __builtin_assume(id >= 0); /* divisions by powers of two become shifts */
    return id;
}

#endif

#endif
