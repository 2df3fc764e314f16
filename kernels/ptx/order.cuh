/*
 * Dependencies against the assembler's order. ptxas places instructions as early as it can, also where that
 * is bad: all multiply-adds before the first exponential, a wait before work that could be done meanwhile.
 * The functions below add dependencies that it cannot see through, because `zero` is a 0 that it does not
 * know. They change no value.
 */
#ifndef FA_KERNELS_PTX_ORDER_CUH
#define FA_KERNELS_PTX_ORDER_CUH

#include "common/dialect.h"
#include "ptx/address.cuh"

#ifdef FA_CUDA_ON_CPU
#include "ptx_on_cpu/order.h"
#else

/* The y of a thread in a block that has one row, in a uniform register. */
FA_DEVICE int ptx_opaque_zero(void) { return (int)__reduce_or_sync(0xffffffff, threadIdx.y); }

/* x. What uses the result comes after y is known. */
FA_DEVICE float ptx_depend_on(float x, float y, int zero)
{
    return __int_as_float(__float_as_int(x) | (__float_as_int(y) & zero));
}

/* What waits, or accesses memory, after this call comes after y is known: a store that is never executed. */
FA_DEVICE void ptx_order_after(float y, int zero, void *shared)
{
    asm volatile("{\n"
                 ".reg .pred yes;\n"
                 "setp.ne.b32 yes, %1, 0;\n"
                 "@yes st.shared.b32 [%0], %1;\n"
                 "}\n" ::"r"(ptx_shared_address(shared)),
                 "r"(__float_as_int(y) & zero)
                 : "memory");
}

#endif

#endif
