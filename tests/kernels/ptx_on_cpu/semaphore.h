/*
 * kernels/ptx/semaphore.cuh in C, on the units of hopper_units.h.
 */
#ifndef TEST_PTX_ON_CPU_SEMAPHORE_H
#define TEST_PTX_ON_CPU_SEMAPHORE_H

#include "hopper_units.h"

FA_DEVICE void ptx_semaphore_wait(const int32_t *semaphore, int count)
{
    hopper_semaphore_wait(semaphore, count);
}

FA_DEVICE bool ptx_semaphore_is_reached(const int32_t *semaphore, int count)
{
    return hopper_semaphore_is_reached(semaphore, count);
}

FA_DEVICE void ptx_semaphore_add(int32_t *semaphore) { hopper_semaphore_add(semaphore); }

FA_DEVICE void ptx_semaphores_add(int32_t *one, int32_t *two)
{
    hopper_semaphore_add(one);
    hopper_semaphore_add(two);
}

FA_DEVICE void ptx_counter_wait(const int32_t *counter, int count)
{
    hopper_counter_wait(counter, count);
}

FA_DEVICE void ptx_counter_add(int32_t *counter) { hopper_counter_add(counter, 0); }

FA_DEVICE int ptx_progress_wait(const int32_t *progress, int count)
{
    return hopper_progress_wait(progress, count);
}

FA_DEVICE void ptx_progress_add(int32_t *progress, int pending)
{
    hopper_counter_add(progress, pending);
}

FA_DEVICE uint32_t ptx_counter_turn(uint32_t *counter, uint32_t last)
{
    return atomicInc(counter, last);
}

FA_DEVICE int32_t ptx_counter_take(int32_t *counter)
{
    hopper_counter_add(counter, 0);
    const int32_t before = *counter - 1;
    /* So that other blocks see the count before what the first thread does next. */
    if (before == 0) hopper_pause();
    return before;
}

#endif
