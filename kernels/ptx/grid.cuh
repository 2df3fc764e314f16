/*
 * Launches that overlap (programmatic dependent launch): a grid may start while the previous grid on
 * the stream still runs.
 */
#ifndef FA_KERNELS_PTX_GRID_CUH
#define FA_KERNELS_PTX_GRID_CUH

#include "common/dialect.h"

#ifdef FA_CUDA_ON_CPU
#include "ptx_on_cpu/grid.h"
#else

/* Waits until the previous grids have ended and their writes are visible. Does nothing if the launch
 * does not overlap. */
FA_DEVICE void ptx_wait_for_grids(void) { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/* If the next grid's launch overlaps, it may start once all blocks of this grid have called this or
 * have ended. */
FA_DEVICE void ptx_let_next_grid_start(void)
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/* Before the wait, what the previous grid writes may be read in these two ways only, or prefetched by TMA, because the
 * first-level cache keeps nothing of it. A read that follows the wait gets the new value. */
FA_DEVICE int32_t ptx_read_latest(const int32_t *at)
{
    int32_t x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];"
                 : "=r"(x)
                 : "l"(__cvta_generic_to_global(at))
                 : "memory");
    return x;
}

/* Prefetches the line of an address into the second-level cache. */
FA_DEVICE void ptx_prefetch(const void *at)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(at)) : "memory");
}

#endif

#endif
