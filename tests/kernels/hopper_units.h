/*
 * Hopper's units that work at the same time as a block's threads, for the machine of cuda_on_cpu.h:
 * barriers in shared memory (mbarrier), asynchronous copies (TMA), products of a warpgroup (wgmma).
 * A kernel that breaks their rules ends the program with a message.
 *
 * Copies and products are asynchronous. If a run requests it, they are done as late as possible:
 * when no thread can continue and one waits for them. Until then their destinations contain NaN,
 * and they read their operands only then. Otherwise they are done immediately.
 */
#ifndef TEST_HOPPER_UNITS_H
#define TEST_HOPPER_UNITS_H

#include "cuda/driver.h"
#include "cuda_on_cpu.h"

extern const cuda_units hopper_units;

/* A tensor map for this machine, in place of cuTensorMapEncodeTiled of the driver. */
bool hopper_encode_map(fa_tensor_map *map, const fa_tensor_map_shape *shape, fa_cuda_fault *fault);

void hopper_barrier_init(uint64_t *barrier, int arrivals);
void hopper_barrier_fence(void);
void hopper_barrier_arrive(uint64_t *barrier);
void hopper_barrier_expect(uint64_t *barrier, int bytes);
/* Arrives when the thread's copies of cuda_copy_async have arrived. */
void hopper_barrier_arrive_behind_copies(uint64_t *barrier);
void hopper_barrier_wait(uint64_t *barrier, int parity);
bool hopper_barrier_is_over(uint64_t *barrier, int parity);

/* Copies a box with the 128-byte swizzle. start: coordinates of its first element, innermost axis
 * first. */
void hopper_load(void *shared, const void *map, uint64_t *barrier, int axes, const int *start);
void hopper_load_blocks(void *shared, const void *map, uint64_t *barrier, int axes,
                        const int *start, unsigned blocks);

/* Copies such a box to the tensor, or adds its floats to those of the tensor; elements outside the
 * tensor are not written. It is a bulk copy to global memory, like additions. */
void hopper_store(const void *map, const void *shared, int axes, const int *start, bool adds);

/* Copies and products only see what a thread stored before its own fence; they may not read
 * anything else that was stored. (If the compiler does not instrument a store, as Clang for structs
 * of 16 bytes: before any thread's fence, and otherwise the previous contents.) */
void hopper_proxy_fence(void);

/* Contiguous bytes, copied to shared memory; and floats that are added in global memory. A thread
 * waits for its groups of additions: until they have read their sources, which must not change
 * before, or until the sums have been added. Without the second wait, they are added at the end of
 * the run if it has late copies, in reverse order if it runs backwards. */
typedef enum hopper_bulk_end { HOPPER_BULK_READ, HOPPER_BULK_ADDED } hopper_bulk_end;
void hopper_bulk_load(void *shared, const void *global, uint64_t *barrier, int bytes);
void hopper_bulk_add(float *global, const void *shared, int bytes);
void hopper_bulk_store(void *global, const void *shared, int bytes);
void hopper_bulk_commit(void);
void hopper_bulk_wait(int pending, hopper_bulk_end end);

/* A counter in global memory by which blocks that run side by side take turns. A thread waits for
 * it, makes a fence, adds to global memory, and adds to the semaphore when these additions are
 * complete. */
void hopper_semaphore_wait(const int32_t *semaphore, int count);
bool hopper_semaphore_is_reached(const int32_t *semaphore, int count);
void hopper_semaphore_add(int32_t *semaphore);

/* A counter to which many blocks add; others wait until all of them have. */
void hopper_counter_wait(const int32_t *counter, int count);
int hopper_progress_wait(const int32_t *progress, int count); /* returns how far it is */
/* pending: groups of the thread that need not be complete */
void hopper_counter_add(int32_t *counter, int pending);

/* The thread continues when nothing else of its block can, and other blocks have had time. */
void hopper_pause(void);

/* Each thread of a grid whose launch overlaps the previous one must wait for that one. */
void hopper_wait_for_grids(void);
void hopper_let_next_grid_start(void);
/* Before the thread has waited, often another number. */
int32_t hopper_read_latest(const int32_t *at);
void hopper_proxy_fence_global(void);

/* To the block of that number in the cluster: an arrival at the same barrier; a number, or bytes,
 * to the same address, which count towards the barrier's phase there. */
void hopper_barrier_arrive_at_peer(uint64_t *barrier, unsigned peer);
void hopper_send_floats(float *shared, uint64_t *barrier, unsigned peer, const float *x, int count);
void hopper_send_bytes(void *shared, uint64_t *barrier, unsigned peer, int bytes);

/* D (64 x columns) += A (64 x 16) B (16 x columns); accumulate false: D = A B. In tf32 8 in place
 * of 16, and only along rows. */
typedef struct hopper_product {
    int columns;
    fa_element element; /* of A and B: FLOAT16, BFLOAT16 or TF32 */
    bool accumulate;
    bool across_a, across; /* A, or B, is read across its rows, otherwise along them */
    float *d;
    const uint32_t *registers; /* A; NULL: it is in shared memory */
    uint64_t a, b;
} hopper_product;
void hopper_multiply(const hopper_product *product);
void hopper_products_fence(void);
void hopper_products_commit(void);
void hopper_products_wait(int pending);

/* The paths of a warp's tile through the softmax, and the number of tiles on each. */
typedef enum hopper_path {
    HOPPER_UNTRACKED,      /* without the max */
    HOPPER_TRACKED,        /* with the max */
    HOPPER_TRACKING_ENDED, /* the last one with the max: there had been no new one for a while */
    HOPPER_RENEWED,        /* weights were too large: bases were renewed */
    HOPPER_RECOMPUTED,     /* weights were so large that their scores were recomputed */
    HOPPER_PATHS
} hopper_path;
extern int64_t hopper_paths[HOPPER_PATHS];

/* Whether sums of products are truncated, as by tensor cores, instead of rounded. It takes
 * longer. */
extern bool hopper_cuts_off;

/* setmaxnreg: from now on each thread of the warp has this many registers, fewer or more than
 * before. */
void hopper_registers(int count, bool more);

#endif
