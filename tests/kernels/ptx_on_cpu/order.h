/*
 * kernels/ptx/order.cuh in C: there is no order of instructions to change.
 */
#ifndef TEST_PTX_ON_CPU_ORDER_H
#define TEST_PTX_ON_CPU_ORDER_H

#include "cuda_on_cpu.h"

FA_DEVICE int ptx_opaque_zero(void) { return 0; }

FA_DEVICE float ptx_depend_on(float x, float y, int zero)
{
    (void)y;
    if (zero) cuda_die("a number that is not 0 is passed as the opaque zero");
    return x;
}

FA_DEVICE void ptx_order_after(float y, int zero, void *shared)
{
    (void)ptx_depend_on(y, y, zero);
    (void)shared;
}

#endif
