/*
 * mma.sync and ldmatrix, for the machine of cuda_on_cpu.h: all lanes of a warp together. They are
 * separate from the kernels, so that they are compiled without checks of each access.
 */
#ifndef TEST_AMPERE_UNITS_H
#define TEST_AMPERE_UNITS_H

#include <stdbool.h>
#include <stdint.h>

/* c (16 x 8) += a (16 x 16) b (16 x 8); fragments as in kernels/ptx/mma.cuh. */
void ampere_mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1, bool bfloat16);

/* The same in tf32, a (16 x 8) b (8 x 8): operands lose their last 13 bits. The sum is truncated to
 * float32, not rounded, which is the worst known behaviour of tensor cores. */
void ampere_mma_tf32(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1);

/* Four 8 x 8 matrices, as in kernels/ptx/ldmatrix.cuh. */
void ampere_ldmatrix(uint32_t x[4], uint32_t address, bool transposed);

#endif
