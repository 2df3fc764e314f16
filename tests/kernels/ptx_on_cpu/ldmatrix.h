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

#endif
