/*
 * 8 x 8 matrices of 16-bit elements from registers to shared memory, transposed on the way (PTX ISA: stmatrix),
 * four at a time. Lane l gives the address of row l % 8 of matrix l / 8 as it is stored, which is 16 bytes. With
 * g = lane / 4 and t = lane % 4 the lane holds of each matrix the elements 2t and 2t + 1 of column g.
 */
#ifndef FA_KERNELS_PTX_STMATRIX_CUH
#define FA_KERNELS_PTX_STMATRIX_CUH

#include "common/dialect.h"

#ifdef FA_CUDA_ON_CPU
#include "ptx_on_cpu/stmatrix.h"
#else

FA_DEVICE void ptx_stmatrix_x4_trans(uint32_t address, const uint32_t x[4])
{
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
        : "memory");
}

#endif

#endif
