/*
 * kernels/ptx/shared.cuh in C.
 */
#ifndef TEST_PTX_ON_CPU_SHARED_H
#define TEST_PTX_ON_CPU_SHARED_H

#include "cuda_on_cpu.h"

FA_DEVICE uint32_t ptx_ld_shared_u32(uint32_t from) { return *(uint32_t *)cuda_shared_at(from, 4); }
FA_DEVICE float ptx_ld_shared_f32(uint32_t from) { return *(float *)cuda_shared_at(from, 4); }
FA_DEVICE float2 ptx_ld_shared_f32x2(uint32_t from)
{
    return *(const float2 *)cuda_shared_at(from, 8);
}
FA_DEVICE uint4 ptx_ld_shared_v4(uint32_t from) { return *(const uint4 *)cuda_shared_at(from, 16); }
FA_DEVICE void ptx_st_shared_u32(uint32_t to, uint32_t x)
{
    *(uint32_t *)cuda_shared_at(to, 4) = x;
}
FA_DEVICE void ptx_st_shared_f32(uint32_t to, float x) { *(float *)cuda_shared_at(to, 4) = x; }
FA_DEVICE void ptx_st_shared_v4(uint32_t to, uint4 x) { *(uint4 *)cuda_shared_at(to, 16) = x; }

#endif
