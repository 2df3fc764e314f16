/*
 * The launch before a JOINED variant: it clears the variant's counters.
 */
#include "backward_sm90/backward_sm90.h"
#include "ptx/grid.cuh"

FA_KERNEL __launch_bounds__(FA_BACKWARD_SM90_PASS_THREADS)
    backward_sm90_clear(const __grid_constant__ fa_backward_params p,
                        const __grid_constant__ fa_backward_sm90_params s)
{
    const int32_t i = (int32_t)(blockIdx.x * FA_BACKWARD_SM90_PASS_THREADS + threadIdx.x);
    (void)p;
    ptx_let_next_grid_start();
    if (i < 2 * s.units) s.counters[i] = 0;
}
