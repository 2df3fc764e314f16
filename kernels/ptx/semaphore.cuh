/*
 * Semaphores in global memory: counters by which blocks of a grid take turns. One thread of a block waits, one thread of another
 * adds.
 */
#ifndef FA_KERNELS_PTX_SEMAPHORE_CUH
#define FA_KERNELS_PTX_SEMAPHORE_CUH

#include "common/dialect.h"

#ifdef FA_CUDA_ON_CPU
#include "ptx_on_cpu/semaphore.h"
#else

/* Waits until the count is at least `count`, and returns it. Then everything is visible that was visible to the threads that have
 * added. */
FA_DEVICE int ptx_semaphore_wait(const int32_t *semaphore, int count)
{
    int32_t now;
    asm volatile("{\n"
                 ".reg .pred yes;\n"
                 "again:\n"
                 "ld.acquire.gpu.global.s32 %0, [%1];\n"
                 "setp.ge.s32 yes, %0, %2;\n"
                 "@yes bra finished;\n"
                 "nanosleep.u32 32;\n"
                 "bra again;\n"
                 "finished:\n"
                 "}\n"
                 : "=r"(now)
                 : "l"(__cvta_generic_to_global(semaphore)), "r"(count)
                 : "memory");
    return now;
}

/* Whether the count has been reached. If so, the same is visible as after ptx_semaphore_wait. */
FA_DEVICE bool ptx_semaphore_is_reached(const int32_t *semaphore, int count)
{
    int32_t now;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                 : "=r"(now)
                 : "l"(__cvta_generic_to_global(semaphore))
                 : "memory");
    return now >= count;
}

/* Adds 1. Everything that is visible to this thread becomes visible to threads that wait for the count. */
FA_DEVICE void ptx_semaphore_add(int32_t *semaphore)
{
    asm volatile(
        "red.release.gpu.global.add.s32 [%0], 1;" ::"l"(__cvta_generic_to_global(semaphore))
        : "memory");
}

/* The same for two semaphores, with one fence. */
FA_DEVICE void ptx_semaphores_add(int32_t *one, int32_t *two)
{
    asm volatile("fence.acq_rel.gpu;\n"
                 "red.relaxed.gpu.global.add.s32 [%0], 1;\n"
                 "red.relaxed.gpu.global.add.s32 [%1], 1;" ::"l"(__cvta_generic_to_global(one)),
                 "l"(__cvta_generic_to_global(two))
                 : "memory");
}

/* The same for a counter to which many threads add before others wait for all of them. */
FA_DEVICE void ptx_counter_wait(const int32_t *counter, int count)
{
    ptx_semaphore_wait(counter, count);
}

FA_DEVICE void ptx_counter_add(int32_t *counter) { ptx_semaphore_add(counter); }

/* The same for the progress of one thread, which others follow. Returns how far it is. */
FA_DEVICE int ptx_progress_wait(const int32_t *progress, int count)
{
    return ptx_semaphore_wait(progress, count);
}

/* pending: the thread's last groups of bulk copies that this step does not cover. */
FA_DEVICE void ptx_progress_add(int32_t *progress, int pending)
{
    (void)pending;
    ptx_semaphore_add(progress);
}

/* Adds 1 to a count that becomes 0 again after `last`. Returns the count before; then everything is visible that was visible to the
 * threads that have added. */
FA_DEVICE uint32_t ptx_counter_turn(uint32_t *counter, uint32_t last)
{
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(counter)), "r"(last)
                 : "memory");
    return before;
}

/* The same as ptx_counter_add; returns the count before, and everything is visible that was visible to the threads that have added. */
FA_DEVICE int32_t ptx_counter_take(int32_t *counter)
{
    int32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(counter))
                 : "memory");
    return before;
}

#endif

#endif
