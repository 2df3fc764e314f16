/*
 * Hopper's units that work beside a block's threads, for the machine of cuda_on_cpu.h: barriers in shared
 * memory (mbarrier), asynchronous copies (TMA), products of a warpgroup (wgmma). A kernel that breaks their rules
 * ends the program with a message.
 *
 * Copies and products are asynchronous. If a run says so, they are done as late as possible: when no thread can go on
 * and one waits for them. Until then there is NaN where they will write, and they read their operands only then.
 * Otherwise they are done at once.
 */
#ifndef TEST_HOPPER_UNITS_H
#define TEST_HOPPER_UNITS_H

#include "cuda/driver.h"
#include "cuda_on_cpu.h"

extern const cuda_units hopper_units;

/* A tensor map for this machine: what cuTensorMapEncodeTiled is to the driver. */
bool hopper_encode_map(fa_tensor_map *map, const fa_tensor_map_shape *shape, fa_cuda_fault *fault);

void hopper_barrier_init(uint64_t *barrier, int arrivals);
void hopper_barrier_fence(void);
void hopper_barrier_arrive(uint64_t *barrier);
void hopper_barrier_expect(uint64_t *barrier, int bytes);
/* When the thread's copies of cuda_copy_async have come. */
void hopper_barrier_arrive_behind_copies(uint64_t *barrier);
void hopper_barrier_wait(uint64_t *barrier, int parity);
bool hopper_barrier_is_over(uint64_t *barrier, int parity);

/* Copies a box with the 128-byte swizzle. start: coordinates of its first element, innermost axis first. */
void hopper_load(void *shared, const void *map, uint64_t *barrier, int axes, const int *start);
void hopper_load_blocks(void *shared, const void *map, uint64_t *barrier, int axes,
                        const int *start, unsigned blocks);

/* Copies such a box to the tensor, or adds its floats to those that are there: what lies outside is not written. A bulk copy
 * to global memory, as additions are. */
void hopper_store(const void *map, const void *shared, int axes, const int *start, bool adds);

/* Copies and products see what a thread stored only behind its own fence; they may not read anything else that was
 * stored. (Where the compiler shows no store, as Clang of structs of 16 bytes: behind any thread's fence, and else what was
 * there before.) */
void hopper_proxy_fence(void);

/* Bytes in a row: to shared memory; and floats that are added to global memory. A thread waits for its groups of
 * additions: until they have read their sources, which nobody may change before, or until the sums are there. Without
 * the second wait they come at the end of the run, if it is one of late copies, and backwards if it is one of those. */
typedef enum hopper_bulk_end { HOPPER_BULK_READ, HOPPER_BULK_ADDED } hopper_bulk_end;
void hopper_bulk_load(void *shared, const void *global, uint64_t *barrier, int bytes);
void hopper_bulk_add(float *global, const void *shared, int bytes);
void hopper_bulk_store(void *global, const void *shared, int bytes);
void hopper_bulk_commit(void);
void hopper_bulk_wait(int pending, hopper_bulk_end end);

/* A counter in global memory, by which blocks that run side by side take turns. A thread waits for
 * it, fences, adds to global memory, and adds to the semaphore when these additions are complete. */
void hopper_semaphore_wait(const int32_t *semaphore, int count);
bool hopper_semaphore_is_reached(const int32_t *semaphore, int count);
void hopper_semaphore_add(int32_t *semaphore);

/* One that many blocks add to, and others wait for until all have. */
void hopper_counter_wait(const int32_t *counter, int count);
void hopper_counter_add(int32_t *counter);

/* Each thread of a grid whose launch overlaps the one in front must wait for that one. */
void hopper_wait_for_grids(void);
void hopper_proxy_fence_global(void);

/* To the block of that number in the cluster: an arrival at the same barrier; a number, or bytes, to the same
 * address, which count towards the barrier's phase there. */
void hopper_barrier_arrive_at_peer(uint64_t *barrier, unsigned peer);
void hopper_send_floats(float *shared, uint64_t *barrier, unsigned peer, const float *x, int count);
void hopper_send_bytes(void *shared, uint64_t *barrier, unsigned peer, int bytes);

/* D (64 x columns) += A (64 x 16) B (16 x columns); accumulate false: D = A B. In tf32 8 instead of
 * 16, and only along rows. */
typedef struct hopper_product {
    int columns;
    fa_element element; /* of A and B: FLOAT16, BFLOAT16 or TF32 */
    bool accumulate;
    bool across_a, across; /* A, or B, is read across its rows, else along them */
    float *d;
    const uint32_t *registers; /* A; NULL: it is in shared memory */
    uint64_t a, b;
} hopper_product;
void hopper_multiply(const hopper_product *product);
void hopper_products_fence(void);
void hopper_products_commit(void);
void hopper_products_wait(int pending);

/* Ways that a warp's tile can go through the softmax, and how many went each. */
typedef enum hopper_path {
    HOPPER_UNTRACKED,      /* without the max */
    HOPPER_TRACKED,        /* with the max */
    HOPPER_TRACKING_ENDED, /* the last one with the max: there was no new one for a while */
    HOPPER_RENEWED,        /* weights were too large: bases were renewed */
    HOPPER_RECOMPUTED,     /* so large that their scores were computed again */
    HOPPER_PATHS
} hopper_path;
extern int64_t hopper_paths[HOPPER_PATHS];

/* Whether sums of products are cut off, as tensor cores do, instead of rounded. It takes longer. */
extern bool hopper_cuts_off;

/* setmaxnreg: from now on the warp has so many registers a thread, fewer or more than before. */
void hopper_registers(int count, bool more);

#endif
