/*
 * Asynchronous copies from global to shared memory (PTX ISA: cp.async), from Ampere on.
 */
#ifndef FA_KERNELS_PTX_CP_ASYNC_CUH
#define FA_KERNELS_PTX_CP_ASYNC_CUH

#include "common/dialect.h"

#ifdef FA_CUDA_ON_CPU
#include "ptx_on_cpu/cp_async.h"
#else

/* Issues a copy of 16 bytes. Without `wanted` it writes zeros and reads nothing. */
FA_DEVICE void ptx_cp_async_16(uint32_t to, const void *from, bool wanted)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(wanted ? 16 : 0)
                 : "memory");
}

/* The result of createpolicy.fractional.L2::evict_first.b64 for a fraction of 1. With the instruction, the compiler
 * also makes this constant, but keeps it in registers that it moves before each copy. */
#define PTX_EVICT_FIRST 0x12f0000000000000ull

/* The same for rows that are read completely and once: the second-level cache fetches the surrounding 128 bytes, and
 * evicts them first. */
FA_DEVICE void ptx_cp_async_16_once(uint32_t to, const void *from, bool wanted)
{
    asm volatile(
        "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to),
        "l"(from), "r"(wanted ? 16 : 0), "l"(PTX_EVICT_FIRST)
        : "memory");
}

/* The same of 4 bytes. */
FA_DEVICE void ptx_cp_async_4(uint32_t to, const void *from, bool wanted)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
                 "r"(wanted ? 4 : 0)
                 : "memory");
}

/* Ends a group of this thread's copies, which may be none. */
FA_DEVICE void ptx_cp_async_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* Waits for all groups of this thread except the last `pending` ones, a constant. */
#define ptx_cp_async_wait(pending) asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory")

/* Waits for all copies of this thread. Other threads see them after a barrier. */
FA_DEVICE void ptx_cp_async_wait_all(void) { asm volatile("cp.async.wait_all;" ::: "memory"); }

#endif

#endif
