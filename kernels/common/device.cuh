/*
 * The dialect of our kernels: CUDA C that is also C. With FA_CUDA_ON_CPU the same source compiles
 * as C for the host (tests/kernels).
 */
#ifndef FA_KERNEL_DEVICE_H
#define FA_KERNEL_DEVICE_H

#ifdef FA_CUDA_ON_CPU
#include "cuda_on_cpu.h"
#endif

#include <math.h>
#include <stdint.h>

#ifdef __cplusplus
#define FA_KERNEL extern "C" __global__ void
#else
#define FA_KERNEL __global__ void
#endif

#ifndef FA_DYNAMIC_SHARED
#define FA_DYNAMIC_SHARED(name) extern __shared__ __align__(16) float name[]
#endif

#define FA_DEVICE static __device__ __forceinline__

/* What the headers of src/ that host and device share are compiled as. */
#define FA_DEVICE_CODE 1
#define FA_SHARED_FUNCTION static __host__ __device__ __forceinline__

#ifndef FA_CUDA_ON_CPU
/* One instruction: the compiler makes two of a 64-bit product by a constant. */
FA_DEVICE uint64_t fa_wide_product(uint32_t a, uint32_t b)
{
    uint64_t product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
}
#define FA_WIDE_PRODUCT(a, b) fa_wide_product(a, b)
#endif

#include "convert.h"
#include "mask.h"
#include "philox.h"

/* fa_half_to_float in one instruction. */
FA_DEVICE float fa_widened_half(uint16_t h)
{
#ifdef FA_CUDA_ON_CPU
    return fa_half_to_float(h);
#else
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
#endif
}

FA_DEVICE int64_t fa_min64(int64_t a, int64_t b) { return a < b ? a : b; }
FA_DEVICE int64_t fa_max64(int64_t a, int64_t b) { return a > b ? a : b; }

#endif
