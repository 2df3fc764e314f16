/*
 * kernels/ptx/mma.cuh in C, on the units of ampere_units.h.
 */
#ifndef TEST_PTX_ON_CPU_MMA_H
#define TEST_PTX_ON_CPU_MMA_H

#include "ampere_units.h"

FA_DEVICE void ptx_mma_m16n8k16_f16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    ampere_mma(c, a, b0, b1, false);
}

FA_DEVICE void ptx_mma_m16n8k16_bf16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    ampere_mma(c, a, b0, b1, true);
}

FA_DEVICE void ptx_mma_m16n8k8_tf32(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    ampere_mma_tf32(c, a, b0, b1);
}

#endif
