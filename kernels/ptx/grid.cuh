/*
 * Launches that overlap: a grid may start while the one in front of it on the stream still runs (programmatic dependent launch).
 */
#ifndef FA_KERNELS_PTX_GRID_CUH
#define FA_KERNELS_PTX_GRID_CUH

#include "common/dialect.h"

#ifdef FA_CUDA_ON_CPU
#include "ptx_on_cpu/grid.h"
#else

/* Waits until the grids in front have ended, and sees what they have written. Without an overlapping launch it does nothing. */
FA_DEVICE void ptx_wait_for_grids(void) { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/* The next grid, if its launch overlaps, may start when all blocks of this one have called this or have ended. */
FA_DEVICE void ptx_let_next_grid_start(void)
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

#endif

#endif
