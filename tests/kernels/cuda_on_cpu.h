/*
 * Our kernels compiled as C for the host: a block's threads are fibers that run one after the
 * other from barrier to barrier. Slow and exact: what a kernel computes, where it reads and
 * writes, and whether a barrier is missing can be tested without a GPU.
 *
 * A kernel must reach each __syncthreads with all of a block's threads, and each exchange within a
 * warp with all of the warp's threads. A program that does not, or in which no thread can continue,
 * ends with a message about where each warp waits.
 *
 * If the compiler supports it, each load and store of a kernel is checked before it happens: an
 * access outside the caller's buffers ends the program, even if the value is not used. On a GPU
 * that is an illegal address only if no other memory happens to be there.
 */
#ifndef TEST_CUDA_ON_CPU_H
#define TEST_CUDA_ON_CPU_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __fmul_rn(a, b) ((a) * (b))
/* Those of a file are contiguous: they are filled with NaN when a block begins, and the blocks of a cluster
 * take turns to have theirs there. */
#ifndef CUDA_VARIABLES
#define CUDA_VARIABLES cuda_shared
#endif
#define CUDA_TEXT(name) CUDA_TEXT_OF(name)
#define CUDA_TEXT_OF(name) #name
#define __shared__ static __attribute__((section(CUDA_TEXT(CUDA_VARIABLES))))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
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
typedef struct float2 {
    _Alignas(8) float x;
    float y;
} float2;
typedef struct uint2 {
    _Alignas(8) uint32_t x;
    uint32_t y;
} uint2;
typedef struct uint4 {
    _Alignas(16) uint32_t x;
    uint32_t y, z, w;
} uint4;

static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }

/* The bits of a number, and back. */
static inline uint32_t __float_as_uint(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
static inline float __uint_as_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static inline int __float_as_int(float x) { return (int)__float_as_uint(x); }
static inline float __int_as_float(int bits) { return __uint_as_float((uint32_t)bits); }

static inline float4 make_float4(float x, float y, float z, float w)
{
    return (float4){x, y, z, w};
}

static inline float2 make_float2(float x, float y) { return (float2){x, y}; }

static inline uint2 make_uint2(uint32_t x, uint32_t y) { return (uint2){x, y}; }

static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return (uint4){x, y, z, w};
}

/* Of the caller's memory, or of a counter. */
void cuda_begin_access(void);

/* All threads of a run are fibers of one thread, so this is atomic. */
static inline uint32_t atomicInc(uint32_t *address, uint32_t most)
{
    cuda_begin_access();
    const uint32_t before = *address;
    *address = before >= most ? 0 : before + 1;
    return before;
}

/* Tells the machine before the program begins where a file's shared variables are, if it has any. */
void cuda_has_variables(char *first, char *end);
#define CUDA_HAS_VARIABLES(name) CUDA_HAS_VARIABLES_OF(name)
#define CUDA_HAS_VARIABLES_OF(name)                                                                \
    extern char __start_##name[] __attribute__((weak));                                            \
    extern char __stop_##name[] __attribute__((weak));                                             \
    __attribute__((constructor)) static void tell_variables_of_##name(void)                        \
    {                                                                                              \
        if (__start_##name) cuda_has_variables(__start_##name, __stop_##name);                     \
    }

/* Dynamic shared memory of the requested size, NaN when a block begins. */
extern float *cuda_shared_memory;
#define FA_DYNAMIC_SHARED(name) float *name = cuda_shared_memory

void __syncthreads(void);
void __trap(void);
int __syncthreads_or(int predicate);

int __any_sync(unsigned mask, int predicate);
uint32_t __ballot_sync(unsigned mask, int predicate);
uint32_t __reduce_min_sync(unsigned mask, uint32_t value);
uint32_t __reduce_max_sync(unsigned mask, uint32_t value);
uint32_t __reduce_add_sync(unsigned mask, uint32_t value);
uint32_t __reduce_or_sync(unsigned mask, uint32_t value);
static inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
void __syncwarp(void);
static inline void __threadfence(void) {}
static inline void __threadfence_system(void) {}

/* 32 bits of any type, from one lane, or from the one whose number differs in lane_mask. */
#define __shfl_sync(mask, value, lane) CUDA_SHUFFLE(value)(mask, value, (unsigned)(lane))
#define __shfl_xor_sync(mask, value, lane_mask)                                                    \
    CUDA_SHUFFLE(value)(mask, value, threadIdx.x % 32 ^ (unsigned)(lane_mask))
#define CUDA_SHUFFLE(value)                                                                        \
    _Generic((value), float                                                                        \
             : cuda_shuffle_float, int                                                             \
             : cuda_shuffle_int, uint32_t                                                          \
             : cuda_shuffle, uint64_t                                                              \
             : cuda_shuffle_wide)
uint32_t cuda_shuffle(unsigned mask, uint32_t value, unsigned lane);
int cuda_shuffle_int(unsigned mask, int value, unsigned lane);
uint64_t cuda_shuffle_wide(unsigned mask, uint64_t value, unsigned lane);
float cuda_shuffle_float(unsigned mask, float value, unsigned lane);

/* This many threads, whole warps, synchronize at the barrier of that number; some may only
 * arrive. */
void cuda_named_barrier(int number, int threads);
void cuda_named_barrier_arrive(int number, int threads);
int cuda_named_barrier_or(int number, int threads, int predicate);

/* All threads of the cluster that have not ended synchronize. */
void cuda_cluster_barrier(void);
/* Its two halves. A thread need not wait. */
void cuda_cluster_arrive(void);
void cuda_cluster_wait(void);

/* Passes this many bytes to the warp; returns what its lanes pass, one each cuda_shown_pitch()
 * bytes, valid until the exchange after the next. */
const void *cuda_show_warp(const void *mine, size_t size);
size_t cuda_shown_pitch(void);

/* How many exchanges the warp has made. */
unsigned cuda_warp_phase(void);

/* Dynamic shared memory by its addresses. It begins at an odd multiple of 16, because a kernel may
 * not assume more. Ends the program if a pointer is outside, or if `size` bytes are not aligned or
 * not completely inside. */
uint32_t cuda_shared_address(const void *pointer);
void *cuda_shared_at(uint32_t address, size_t size);

/* The same address in another block of the cluster. */
void *cuda_at_peer(const void *pointer, unsigned rank);

/* Copies of 16 or 4 bytes, or of zeros if not wanted. They have arrived after the wait for all of
 * the thread's copies, or for all groups except the last `pending` ones. */
void cuda_copy_async(uint32_t to, const void *from, size_t bytes, bool wanted);
void cuda_commit_copies(void);
void cuda_wait_for_groups(int pending);
void cuda_wait_for_copies(void);

/* The same for another unit: how many groups the thread has committed, and the completion of this
 * many groups of a thread. */
int cuda_committed_copies(void);
void cuda_finish_copies(unsigned thread, int groups);

/* Ends the program if these bytes are neither the kernel's own nor in one of the run's buffers. */
void cuda_check_access(const void *at, size_t size);

/* Ends the program: block, thread and a message. */
_Noreturn void cuda_die(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* What a thread waits for, as another unit of the multiprocessor sees it. */
typedef struct cuda_wait {
    bool (*is_over)(const struct cuda_wait *wait);
    void (*describe)(const struct cuda_wait *wait, char *text, size_t size);
    void *what;
    uint64_t value;
} cuda_wait;
void cuda_wait_until(const cuda_wait *wait);

/* A slow thread stops here until no other thread can go on: what follows an arrival at a barrier may
 * come much later than the arrival. */
void cuda_be_late(void);

typedef struct cuda_run cuda_run;

/* Blocks that run side by side, most of them in one cluster: the number of blocks in a cluster, the
 * running one, and another one. */
enum { CUDA_MOST_CLUSTER = 4, CUDA_MOST_TOGETHER = 8 };
/* The place of the running block among them; those of a cluster are consecutive. */
extern unsigned cuda_place;
unsigned cuda_cluster_size(const cuda_run *run);
unsigned cuda_place_of(unsigned rank); /* in the cluster of the running block */
void cuda_enter_block(unsigned rank);

/* Units that work at the same time as the threads. Each function is called for each block in turn,
 * which is then the running one. */
typedef struct cuda_units {
    void (*start)(const cuda_run *run); /* a block begins */
    /* Called if no thread can continue: completes one operation; false: there is none. */
    bool (*go_on)(void);
    void (*end)(void); /* all threads have ended */
    /* A thread is about to store this many bytes of dynamic shared memory. Not called if the
     * compiler does not support checks of each access. */
    void (*store)(const void *to, size_t size);
    /* A thread is about to use the caller's memory, or a counter. May be NULL. */
    void (*access)(void);
} cuda_units;

/* Runs a kernel, clusters of blocks one after the other, or this many blocks side by side. With
 * `backwards` the threads run in the reverse order, so that a kernel without a necessary barrier
 * fails in one of the two orders. Slow threads continue only when no other thread and no unit can.
 * Ends the program if a write is outside the dynamic shared memory. */
struct cuda_run {
    const char *name; /* for messages; NULL: none */
    void (*kernel)(const void *parameters);
    const void *parameters;
    unsigned grid, threads;
    unsigned cluster;  /* blocks of a cluster; 0: 1 */
    unsigned together; /* clusters, or blocks without clusters, that run side by side; 0: 1 */
    unsigned smem_bytes;
    unsigned static_bytes; /* of static shared memory, before dynamic memory; 0: few */
    bool backwards;
    bool overlaps;         /* the previous launch: each thread must wait for it */
    bool begins_early;     /* threads may use the caller's memory before they wait */
    bool lets_late;        /* the next launch may start only when threads have waited */
    bool beside;           /* the same, except that only its last block must wait */
    bool last_block_first; /* clusters run from the last one to the first */
    /* Of those side by side: it continues only when no other can. */
    bool first_block_slow;
    unsigned slow_warp; /* counted through the blocks of a cluster */
    /* Of this warp, a bit for each: they continue only when no other thread can, and stop behind an
     * arrival at a named barrier, or at an mbarrier without bytes to expect. */
    uint32_t slow_lanes;
    const cuda_units *units;          /* NULL: none */
    const struct ref_buffers *memory; /* the caller's; NULL: not known, so nothing is checked */
    /* Of Hopper's units: as late as they may be, or immediately. */
    bool late_copies, late_products;
    bool warps_multiply; /* a warp's 16 rows of a product do not wait for the other warps */
};
void cuda_run_kernel(const cuda_run *run);

#endif
