/*
 * Choices by the bits of a register, and by pairs of unsigned 16-bit numbers (PTX ISA: selp, min). The compiler would make other
 * instructions of a conditional expression: predicated ones, and a load of a constant for each.
 */
#ifndef FA_KERNELS_PTX_SELECT_CUH
#define FA_KERNELS_PTX_SELECT_CUH

#include "common/dialect.h"

#ifdef FA_CUDA_ON_CPU
#include "ptx_on_cpu/select.h"
#else

/* x if one of the bits is set, else y. */
FA_DEVICE float ptx_choose(uint32_t word, uint32_t bits, float x, float y)
{
    float z;
    asm volatile("{\n.reg .pred p;\n.reg .b32 t;\nand.b32 t, %1, %2;\nsetp.ne.u32 p, t, 0;\n"
                 "selp.f32 %0, %3, %4, p;\n}"
                 : "=f"(z)
                 : "r"(word), "r"(bits), "f"(x), "f"(y));
    return z;
}

/* The smaller of each half, as unsigned numbers. From Hopper on. */
FA_DEVICE uint32_t ptx_min_u16x2(uint32_t a, uint32_t b)
{
    uint32_t x2;
    asm("min.u16x2 %0, %1, %2;" : "=r"(x2) : "r"(a), "r"(b));
    return x2;
}

#endif

#endif
