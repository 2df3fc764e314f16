/*
 * kernels/ptx/ldmatrix.cuh in C.
 */
#ifndef TEST_PTX_ON_CPU_LDMATRIX_H
#define TEST_PTX_ON_CPU_LDMATRIX_H

#include <string.h>

#include "cuda_on_cpu.h"

/* Element (row, column) of 8 x 8 matrix number `matrix`, whose rows the lanes name. */
FA_DEVICE uint16_t ampere_matrix_element(const char *shown, int matrix, int row, int column)
{
    uint32_t address;
    memcpy(&address, shown + (size_t)(8 * matrix + row) * cuda_shown_pitch(), sizeof address);
    return ((const uint16_t *)cuda_shared_at(address, 16))[column];
}

FA_DEVICE void ampere_ldmatrix(uint32_t x[4], uint32_t address, bool transposed)
{
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    const char *shown = cuda_show_warp(&address, sizeof address);
    for (int i = 0; i < 4; i++) {
        uint32_t half[2];
        for (int c = 0; c < 2; c++)
            half[c] = transposed ? ampere_matrix_element(shown, i, 2 * t + c, g)
                                 : ampere_matrix_element(shown, i, g, 2 * t + c);
        x[i] = half[0] | half[1] << 16;
    }
}

FA_DEVICE void ptx_ldmatrix_x4(uint32_t x[4], uint32_t address)
{
    ampere_ldmatrix(x, address, false);
}

FA_DEVICE void ptx_ldmatrix_x4_trans(uint32_t x[4], uint32_t address)
{
    ampere_ldmatrix(x, address, true);
}

#endif
