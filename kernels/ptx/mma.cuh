/*
 * Products of a warp on tensor cores (PTX ISA: mma.sync), with float32 sums. common/mma.cuh chooses among them.
 *
 * With g = lane / 4 and t = lane % 4, mma.m16n8k16 holds
 *   A (16 x 16)  in a[0..3] two elements each: (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8) and the next column
 *   B (16 x 8)   in b0, b1 two elements each of column g: rows 2t and 2t + 1, 2t + 8 and 2t + 9
 *   C (16 x 8)   in c[0..3] (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
 */
#ifndef FA_KERNELS_PTX_MMA_CUH
#define FA_KERNELS_PTX_MMA_CUH

#include "common/dialect.h"

#ifdef FA_CUDA_ON_CPU
#include "ptx_on_cpu/mma.h"
#else

/* c (16 x 8) += a (16 x 16) b (16 x 8), of float16. */
FA_DEVICE void ptx_mma_m16n8k16_f16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* The same of bfloat16. */
FA_DEVICE void ptx_mma_m16n8k16_bf16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* c (16 x 8) += a (16 x 8) b (8 x 8), of float32 numbers whose last 13 bits are dropped (tf32):
 *   A   in a[0..3] (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)
 *   B   in b0, b1 of column g: rows t, t + 4 */
FA_DEVICE void ptx_mma_m16n8k8_tf32(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Half of the product in float16, which Turing also has: c (16 x 8) += a (16 x 8) b (8 x 8). */
FA_DEVICE void ptx_mma_m16n8k8_f16(float c[4], uint32_t a0, uint32_t a1, uint32_t b)
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(b));
}

#endif

#endif
