/*
 * kernels/ptx/ldmatrix.cuh in C, on the units of ampere_units.h.
 */
#ifndef TEST_PTX_ON_CPU_LDMATRIX_H
#define TEST_PTX_ON_CPU_LDMATRIX_H

#include "ampere_units.h"

FA_DEVICE void ptx_ldmatrix_x4(uint32_t x[4], uint32_t address)
{
    ampere_ldmatrix(x, address, false);
}

FA_DEVICE void ptx_ldmatrix_x4_trans(uint32_t x[4], uint32_t address)
{
    ampere_ldmatrix(x, address, true);
}

FA_DEVICE uint32_t ptx_transpose_matrix(uint32_t x)
{
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t low = __shfl_sync(0xffffffff, x, 8 * t + g / 2),
                   high = __shfl_sync(0xffffffff, x, 8 * t + 4 + g / 2);
    return (low >> g % 2 * 16 & 0xffff) | high >> g % 2 * 16 << 16;
}

#endif
