/*
 * 8 x 8 matrices of 16-bit elements from registers to shared memory, transposed (PTX ISA: stmatrix), four at a time. A
 * lane holds of each matrix what ptx/ldmatrix.cuh says; lane l gives the address of row l % 8 of the transposed
 * matrix l / 8, which is 16 bytes.
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
