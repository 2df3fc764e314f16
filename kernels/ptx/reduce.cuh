/*
 * Additions to global memory that return no result (PTX ISA: red).
 */
#ifndef FA_KERNELS_PTX_REDUCE_CUH
#define FA_KERNELS_PTX_REDUCE_CUH

#include "common/dialect.h"

#ifdef FA_CUDA_ON_CPU
#include "ptx_on_cpu/reduce.h"
#else

FA_DEVICE void ptx_reduce_add(float *to, float x)
{
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)),
                 "f"(x)
                 : "memory");
}

/* Four neighbours, aligned to 16 bytes; from Hopper on. */
FA_DEVICE void ptx_reduce_add_4(float *to, const float x[4])
{
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(
                     __cvta_generic_to_global(to)),
                 "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
}

#endif

#endif
