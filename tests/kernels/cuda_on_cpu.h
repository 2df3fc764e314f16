/*
 * Our kernels compiled as C for the host: a block's threads are fibers that run one after the
 * other from barrier to barrier. Slow and exact: what a kernel computes, where it reads and
 * writes, and whether a barrier is missing can be tested without a GPU.
 *
 * Barriers and shuffles count for the whole block, so a kernel must reach each of them with all of
 * its threads; a program that does not ends with a message.
 */
#ifndef TEST_CUDA_ON_CPU_H
#define TEST_CUDA_ON_CPU_H

#include <stdbool.h>
#include <stdint.h>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__

typedef struct cuda_index {
    unsigned x;
} cuda_index;
extern cuda_index cuda_thread, cuda_block, cuda_grid;
#define threadIdx cuda_thread
#define blockIdx cuda_block
#define gridDim cuda_grid

typedef struct float4 {
    _Alignas(16) float x;
    float y, z, w;
} float4;
typedef struct uint2 {
    _Alignas(8) uint32_t x;
    uint32_t y;
} uint2;

static inline float4 make_float4(float x, float y, float z, float w)
{
    return (float4){x, y, z, w};
}

static inline uint2 make_uint2(uint32_t x, uint32_t y) { return (uint2){x, y}; }

/* Dynamic shared memory: its first bytes as a launch asked for, NaN when a block begins. */
extern float *cuda_shared_memory;
#define FA_DYNAMIC_SHARED(name) float *name = cuda_shared_memory

void __syncthreads(void);
int __syncthreads_or(int predicate);
float __shfl_xor_sync(unsigned mask, float value, int lane_mask);

/* Runs a kernel, blocks one after the other. With `backwards` the threads take turns in the
 * other order, so that a kernel that lacks a barrier goes wrong one way or the other. Ends the
 * program where a write leaves the dynamic shared memory. */
typedef struct cuda_run {
    void (*kernel)(const void *parameters);
    const void *parameters;
    unsigned grid, threads;
    unsigned smem_bytes;
    bool backwards;
} cuda_run;
void cuda_run_kernel(const cuda_run *run);

#endif
