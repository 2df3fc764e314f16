/*
 * Shared memory by the addresses of ptx/address.cuh (PTX ISA: ld.shared, st.shared).
 */
#ifndef FA_KERNELS_PTX_SHARED_CUH
#define FA_KERNELS_PTX_SHARED_CUH

#include "common/dialect.h"

#ifdef FA_CUDA_ON_CPU
#include "ptx_on_cpu/shared.h"
#else

FA_DEVICE uint32_t ptx_ld_shared_u32(uint32_t from)
{
    uint32_t x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
}

FA_DEVICE float ptx_ld_shared_f32(uint32_t from)
{
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
    return x;
}

/* 16 bytes. */
FA_DEVICE uint4 ptx_ld_shared_v4(uint32_t from)
{
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(from)
                 : "memory");
    return x;
}

/* Two neighbours. */
FA_DEVICE float2 ptx_ld_shared_f32x2(uint32_t from)
{
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
    return x;
}

FA_DEVICE void ptx_st_shared_u32(uint32_t to, uint32_t x)
{
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

FA_DEVICE void ptx_st_shared_f32(uint32_t to, float x)
{
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}

FA_DEVICE void ptx_st_shared_v4(uint32_t to, uint4 x)
{
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w)
                 : "memory");
}

#endif

#endif
