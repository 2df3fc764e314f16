/*
 * Dependencies that change the assembler's order. ptxas places instructions as early as it can, even if that is
 * slow: all multiply-adds before the first exponential, or a wait before work that could be done in the meantime.
 * The functions below add dependencies that it cannot remove, because it does not know that `zero` is 0. They
 * change no value.
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

/* Returns x. Instructions that use the result come after y is known. */
FA_DEVICE float ptx_depend_on(float x, float y, int zero)
{
    return __int_as_float(__float_as_int(x) | (__float_as_int(y) & zero));
}

/* Keeps waits and memory accesses that follow this call after y is known, by a store that is never executed. */
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
