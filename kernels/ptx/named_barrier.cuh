/*
 * Named barriers of a block (PTX ISA: bar), numbered 1 to 15. `threads` threads, whole warps, take part.
 */
#ifndef FA_KERNELS_PTX_NAMED_BARRIER_CUH
#define FA_KERNELS_PTX_NAMED_BARRIER_CUH

#include "common/dialect.h"

#ifdef FA_CUDA_ON_CPU
#include "ampere_on_cpu.h"
#else

/* Arrives and waits. */
FA_DEVICE void ptx_named_barrier_sync(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Arrives and does not wait. */
FA_DEVICE void ptx_named_barrier_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Arrives and waits; returns whether the predicate holds in any of the threads. */
FA_DEVICE int ptx_named_barrier_or(int id, int threads, int predicate)
{
    int any;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.s32 p, %3, 0;\nbar.red.or.pred q, %1, %2, p;\n"
                 "selp.s32 %0, 1, 0, q;\n}"
                 : "=r"(any)
                 : "r"(id), "r"(threads), "r"(predicate)
                 : "memory");
    return any;
}

#endif

#endif
