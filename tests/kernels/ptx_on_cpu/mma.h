/*
 * kernels/ptx/mma.cuh in C.
 */
#ifndef TEST_PTX_ON_CPU_MMA_H
#define TEST_PTX_ON_CPU_MMA_H

#include <string.h>

#include "../../../src/convert.h" /* not the header beside this one */
#include "cuda_on_cpu.h"

FA_DEVICE float ampere_half(uint32_t x2, int half, bool bfloat16)
{
    const uint16_t bits = (uint16_t)(half ? x2 >> 16 : x2 & 0xffffu);
    return bfloat16 ? fa_bfloat_to_float(bits) : fa_half_to_float(bits);
}

typedef struct ampere_operands {
    uint32_t a[4], b[2];
} ampere_operands;

/* The operands of the four lanes that hold row or column n. */
FA_DEVICE void ampere_see_operands(ampere_operands x[4], const char *shown, int n)
{
    for (int i = 0; i < 4; i++)
        memcpy(&x[i], shown + (size_t)(4 * n + i) * cuda_shown_pitch(), sizeof x[i]);
}

FA_DEVICE void ampere_mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1, bool bfloat16)
{
    const ampere_operands mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    const char *shown = cuda_show_warp(&mine, sizeof mine);
    ampere_operands x[4], y[2][4];
    ampere_see_operands(x, shown, g);
    ampere_see_operands(y[0], shown, 2 * t);
    ampere_see_operands(y[1], shown, 2 * t + 1);
    for (int e = 0; e < 4; e++)
        for (int k = 0; k < 16; k++) {
            const int other = k % 8 / 2, upper = k / 8;
            c[e] += ampere_half(x[other].a[e / 2 + 2 * upper], k % 2, bfloat16) *
                    ampere_half(y[e % 2][other].b[upper], k % 2, bfloat16);
        }
}

FA_DEVICE void ptx_mma_m16n8k16_f16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    ampere_mma(c, a, b0, b1, false);
}

FA_DEVICE void ptx_mma_m16n8k16_bf16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    ampere_mma(c, a, b0, b1, true);
}

#endif
