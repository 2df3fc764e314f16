/*
 * The dialect of the kernels: CUDA C that is also C. With FA_CUDA_ON_CPU the same source compiles as C for the
 * host (tests/kernels).
 */
#ifndef FA_KERNELS_COMMON_DIALECT_H
#define FA_KERNELS_COMMON_DIALECT_H

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

/* The qualifiers of functions in the headers of src/ that host and device share. */
#define FA_DEVICE_CODE 1
#define FA_SHARED_FUNCTION static __host__ __device__ __forceinline__

#endif
