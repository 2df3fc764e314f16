/*
 * Registers: moving them between warpgroups (setmaxnreg), and keeping values in uniform registers, which all lanes
 * of a warp share.
 */
#ifndef FA_KERNELS_PTX_REGISTERS_CUH
#define FA_KERNELS_PTX_REGISTERS_CUH

#include "common/dialect.h"
#include "ptx/address.cuh"

#ifdef FA_CUDA_ON_CPU
#include "ptx_on_cpu/registers.h"
#else

/* Macros, because the count is part of the instruction. All warps of a warpgroup must execute them. */
#define ptx_decrease_registers(count)                                                              \
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count))
#define ptx_increase_registers(count)                                                              \
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count))

/* Returns x, which must be the same in all lanes, by a reduction (redux): the result stays in a uniform register.
 * Otherwise the compiler would compute x again in each tile. */
FA_DEVICE uint32_t ptx_uniform(uint32_t x) { return __reduce_or_sync(0xffffffff, x); }

/* The same for a pointer to shared memory, which the compiler would otherwise compute again from the block's number
 * in its cluster. */
FA_DEVICE void *ptx_uniform_pointer(void *shared)
{
    return __cvta_shared_to_generic(__reduce_or_sync(0xffffffff, ptx_shared_address(shared)));
}

/* Returns x, which stays in a register. Otherwise the compiler may compute x again wherever it is used, and the number of a
 * thread, for example, takes hundreds of cycles while products read shared memory. */
FA_DEVICE uint32_t ptx_keep(uint32_t x)
{
    asm volatile("" : "+r"(x));
    return x;
}

#endif

#endif
