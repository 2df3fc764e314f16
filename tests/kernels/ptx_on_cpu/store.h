/*
 * kernels/ptx/store.cuh in C.
 */
#ifndef TEST_PTX_ON_CPU_STORE_H
#define TEST_PTX_ON_CPU_STORE_H

#include <string.h>

#include "cuda_on_cpu.h"

/* Row l of the four matrices, counted through all of them, is stored at the address that lane l
 * passes. A lane holds the elements 2t and 2t + 1 of row g of each. */
FA_DEVICE void ptx_stmatrix_x4(uint32_t address, const uint32_t r[4])
{
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const char *shown = cuda_show_warp(&address, sizeof address);
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t row;
        memcpy(&row, shown + (8 * i + g) * cuda_shown_pitch(), sizeof row);
        ((uint32_t *)cuda_shared_at(row, 16))[t] = r[i];
    }
}

/* A lane's elements are column g of rows 2t and 2t + 1 of each stored matrix. */
static inline void store_transposed(uint32_t address, const uint32_t *x, uint32_t matrices)
{
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const char *shown = cuda_show_warp(&address, sizeof address);
    for (uint32_t i = 0; i < matrices; i++)
        for (uint32_t n = 0; n < 2; n++) {
            uint32_t row;
            memcpy(&row, shown + (8 * i + 2 * t + n) * cuda_shown_pitch(), sizeof row);
            ((uint16_t *)cuda_shared_at(row, 16))[g] = (uint16_t)(x[i] >> 16 * n);
        }
}

FA_DEVICE void ptx_stmatrix_x4_trans(uint32_t address, const uint32_t x[4])
{
    store_transposed(address, x, 4);
}

FA_DEVICE void ptx_stmatrix_x2_trans(uint32_t address, const uint32_t x[2])
{
    store_transposed(address, x, 2);
}

FA_DEVICE void ptx_add_global_f32x4(float *to, float4 x)
{
    to[0] += x.x, to[1] += x.y, to[2] += x.z, to[3] += x.w;
}

FA_DEVICE void ptx_store_global_16(void *to, uint4 x) { memcpy(to, &x, sizeof x); }
FA_DEVICE void ptx_store_global_8(void *to, uint2 x) { memcpy(to, &x, sizeof x); }

#endif
