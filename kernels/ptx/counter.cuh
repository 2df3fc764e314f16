/*
 * Counters in global memory, by which blocks find out which of them is the last one.
 */
#ifndef FA_KERNELS_PTX_COUNTER_CUH
#define FA_KERNELS_PTX_COUNTER_CUH

#include "common/dialect.h"

#ifdef FA_CUDA_ON_CPU
#include "ptx_on_cpu/counter.h"
#else

/* Returns the count, and adds 1 to it, or makes it 0 where it is `most`. What is visible to this thread before is visible
 * after it to those that count later. */
FA_DEVICE uint32_t ptx_counter_next(uint32_t *counter, uint32_t most)
{
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(counter)), "r"(most)
                 : "memory");
    return before;
}

#endif

#endif
