/*
 * Our kernels compiled as C for the host: a block's threads are fibers that run one after the
 * other from barrier to barrier. Slow and exact: what a kernel computes, where it reads and
 * writes, and whether a barrier is missing can be tested without a GPU.
 *
 * A kernel must reach each barrier with all of a block's threads, and each exchange within a warp with
 * all of the warp's; a program that does not ends with a message.
 */
#ifndef TEST_CUDA_ON_CPU_H
#define TEST_CUDA_ON_CPU_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
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
typedef struct uint4 {
    _Alignas(16) uint32_t x;
    uint32_t y, z, w;
} uint4;

static inline float4 make_float4(float x, float y, float z, float w)
{
    return (float4){x, y, z, w};
}

static inline uint2 make_uint2(uint32_t x, uint32_t y) { return (uint2){x, y}; }

static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return (uint4){x, y, z, w};
}

/* Dynamic shared memory: its first bytes as a launch asked for, NaN when a block begins. */
extern float *cuda_shared_memory;
#define FA_DYNAMIC_SHARED(name) float *name = cuda_shared_memory

void __syncthreads(void);
int __syncthreads_or(int predicate);

float __shfl_xor_sync(unsigned mask, float value, int lane_mask);
int __any_sync(unsigned mask, int predicate);
void __syncwarp(void);

/* So many threads, whole warps, meet at the barrier of that number. */
void cuda_named_barrier(int number, int threads);

/* Shows so many bytes to the warp; returns what its lanes show, one each cuda_shown_pitch() bytes,
 * until the next exchange but one. */
const void *cuda_show_warp(const void *mine, size_t size);
size_t cuda_shown_pitch(void);

/* Dynamic shared memory by its addresses, which count from its first byte. Ends the program where
 * `size` bytes there are not aligned or lie outside. */
void *cuda_shared_at(uint32_t address, size_t size);

/* Copies of 16 bytes, or of zeros where not wanted, that are there after the wait. */
void cuda_copy_async(uint32_t to, const void *from, bool wanted);
void cuda_wait_for_copies(void);

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
