/*
 * kernels/ptx/grid.cuh in C. Grids run one after another here; a thread that does not wait is
 * detected when its block ends.
 */
#ifndef TEST_PTX_ON_CPU_GRID_H
#define TEST_PTX_ON_CPU_GRID_H

#include "hopper_units.h"

FA_DEVICE void ptx_wait_for_grids(void) { hopper_wait_for_grids(); }
FA_DEVICE void ptx_let_next_grid_start(void) { hopper_let_next_grid_start(); }
FA_DEVICE int32_t ptx_read_latest(const int32_t *at) { return hopper_read_latest(at); }
FA_DEVICE void ptx_prefetch(const void *at) { (void)at; }

#endif
