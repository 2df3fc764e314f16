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

#endif

#endif
