/*
 * Stores: fragments to shared memory (stmatrix), whole groups of elements to global memory.
 */
#ifndef FA_KERNELS_PTX_STORE_CUH
#define FA_KERNELS_PTX_STORE_CUH

#include "common/dialect.h"

#ifdef FA_CUDA_ON_CPU
#include "ptx_on_cpu/store.h"
#else

/* Stores four 8 x 8 matrices of 16-bit elements from registers, in the layout of wgmma's results. Lane l passes the
 * address of row l % 8 of matrix l / 8, 16 bytes. */
FA_DEVICE void ptx_stmatrix_x4(uint32_t address, const uint32_t r[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

/* The same of the transposed matrices: lane l passes the address of column l % 8 of matrix l / 8. */
FA_DEVICE void ptx_stmatrix_x4_trans(uint32_t address, const uint32_t x[4])
{
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
        : "memory");
}

/* The same of two matrices, for which lanes 0 to 15 pass addresses. */
FA_DEVICE void ptx_stmatrix_x2_trans(uint32_t address, const uint32_t x[2])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address),
                 "r"(x[0]), "r"(x[1])
                 : "memory");
}

/* Adds four floats to those in global memory, each atomically. From Hopper on. */
FA_DEVICE void ptx_add_global_f32x4(float *to, float4 x)
{
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(
                     __cvta_generic_to_global(to)),
                 "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
}

/* A store to global memory, if the compiler does not know that the pointer leads there. */
FA_DEVICE void ptx_store_global_16(void *to, uint4 x)
{
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
                 "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

FA_DEVICE void ptx_store_global_8(void *to, uint2 x)
{
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(x.x),
                 "r"(x.y)
                 : "memory");
}

#endif

#endif
