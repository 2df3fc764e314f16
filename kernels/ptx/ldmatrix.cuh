/*
 * 8 x 8 matrices of 16-bit elements from shared memory to registers (PTX ISA: ldmatrix), four at
 * a time. Lane l gives the address of row l % 8 of matrix l / 8, which is 16 bytes. With g = lane / 4 and
 * t = lane % 4, the lane gets elements 2t and 2t + 1 of row g of each matrix.
 */
#ifndef FA_KERNELS_PTX_LDMATRIX_CUH
#define FA_KERNELS_PTX_LDMATRIX_CUH

#include "common/dialect.h"

#ifdef FA_CUDA_ON_CPU
#include "ptx_on_cpu/ldmatrix.h"
#else

FA_DEVICE void ptx_ldmatrix_x4(uint32_t x[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

/* The same for the transposed matrices: elements 2t and 2t + 1 of column g. */
FA_DEVICE void ptx_ldmatrix_x4_trans(uint32_t x[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

/* Transposes an 8 x 8 matrix: of elements 2t and 2t + 1 of row g the lane gets those of column g. */
FA_DEVICE uint32_t ptx_transpose_matrix(uint32_t x)
{
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

#endif

#endif
