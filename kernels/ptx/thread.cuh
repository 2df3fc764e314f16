/*
 * The special register of the thread's number in its block, and shuffles among some lanes (PTX ISA: shfl.idx).
 */
#ifndef FA_KERNELS_PTX_THREAD_CUH
#define FA_KERNELS_PTX_THREAD_CUH

#include "common/dialect.h"

#ifdef FA_CUDA_ON_CPU
#include "ptx_on_cpu/thread.h"
#else

/* Reads the register at each call. Otherwise the compiler would keep values computed from threadIdx.x in registers
 * that products need. */
FA_DEVICE int ptx_thread_id(void)
{
    int id;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(id));
    __builtin_assume(id >= 0); /* divisions by powers of two become shifts */
    return id;
}

/* Each `width` lanes, a power of two, get x of their lane number `lane`. */
FA_DEVICE uint32_t ptx_shuffle_within(uint32_t x, int lane, int width)
{
    return __shfl_sync(0xffffffffu, x, lane, width);
}

#endif

#endif
