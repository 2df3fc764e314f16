/*
 * What forward_sm90_wide is compiled with, and the sizes that follow from it. It takes the place of
 * forward_sm90/config.cuh, and is included before any part of forward_sm90.
 *
 * SHAPE, BFLOAT16.
 */
#ifndef FA_KERNELS_FORWARD_SM90_WIDE_CONFIG_CUH
#define FA_KERNELS_FORWARD_SM90_WIDE_CONFIG_CUH

#ifdef FA_KERNELS_FORWARD_SM90_CONFIG_CUH
#error "include forward_sm90_wide/config.cuh before the parts of forward_sm90"
#endif
#define FA_KERNELS_FORWARD_SM90_CONFIG_CUH

#define GENERAL 0 /* of what is shared with forward_sm90: without options that change scores */

#include "forward_sm90_wide.h"

#define HEAD_DIM FA_SM90_WIDE_DIM(SHAPE)
#define CONSUMERS FA_SM90_WIDE_CONSUMERS
#define KEYS FA_SM90_WIDE_KEYS
#define CLUSTER FA_SM90_WIDE_CLUSTER

/* Columns of the outputs that a block computes: half of them. */
#define VALUE_DIM_d320 160
#define VALUE_DIM_d384 192
#define VALUE_DIM_d512 256
#define VALUE_DIM_OF(shape) VALUE_DIM_##shape
#define VALUE_DIM_AS(shape) VALUE_DIM_OF(shape)
#define VALUE_DIM VALUE_DIM_AS(SHAPE)
static_assert(CLUSTER * VALUE_DIM == HEAD_DIM, "each block has its part of the columns");

/* Keys of a tile whose scores a block computes: half of them. */
#define FRAGMENT_KEYS 64
static_assert(CLUSTER * FRAGMENT_KEYS == KEYS, "each block has its part of the keys");

/* The block's number in its cluster, and the other block. */
#define THIS_BLOCK ((int)(blockIdx.x % CLUSTER))
#define PEER_BLOCK (THIS_BLOCK ^ 1)

#define FIRST_COLUMN (THIS_BLOCK * VALUE_DIM) /* of the outputs that the block computes */

/* Of forward_sm90's choices (forward_sm90/config.cuh): */
#define HIDES_VALUES 0
#define ALWAYS_TRACKED 1
#define HAS_SERIES 0
#define DYNAMIC 0
#define SINGLE_KEY_TILE 0
#define STORES_THROUGH_BUFFER 0

/* Accumulators of the outputs in a thread. */
#define OUTPUTS (VALUE_DIM / 2)

enum {
    WARPGROUP = 128,
    WARPS = WARPGROUP / 32,
    THREADS = FA_SM90_WIDE_THREADS,
    QUERIES = FA_SM90_WIDE_QUERIES,
    ROWS = 64, /* queries of a consumer */
    STAGES = FA_SM90_WIDE_STAGES(SHAPE),
    K_BLOCKS = HEAD_DIM / 64, /* of 64 columns: the swizzle spans 128 bytes */
    V_BLOCKS = FA_SM90_WIDE_V_BYTES(SHAPE) / 128,
    Q_BLOCK = ROWS * 128, /* bytes of one block of columns of a consumer's queries or weights */
    K_BLOCK = FRAGMENT_KEYS * 128,
    Q_BYTES = K_BLOCKS * Q_BLOCK,
    P_BYTES = CLUSTER * Q_BLOCK, /* weights of a consumer: a block of columns from each block */
    CHUNK = FA_SM90_WIDE_CHUNK(SHAPE),
    K_CHUNK_BLOCKS = CHUNK / K_BLOCK,
    K_CHUNKS = (K_BLOCKS + K_CHUNK_BLOCKS - 1) / K_CHUNK_BLOCKS,
    V_ROWS = FA_SM90_WIDE_V_ROWS(SHAPE), /* of a chunk */
    V_CHUNKS = KEYS / V_ROWS,
    V_BLOCK = V_ROWS * 128,
    Q_STAGES = 1,
    QUEUE_ENTRIES = 2, /* there is no room for more, so one work tile is described at a time */
    TASK_NONE = -1,
    TASK_END = -2
};
static_assert(CHUNK % K_BLOCK == 0 && V_CHUNKS * V_ROWS == KEYS && V_BLOCKS * V_BLOCK <= CHUNK &&
                  V_BLOCK % 1024 == 0,
              "chunks are whole boxes, and fit");

/* Registers of a thread that loads, and of one that computes. */
#define PRODUCER_REGISTERS 72
#define CONSUMER_REGISTERS 216
static_assert(WARPGROUP * (PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) <=
                  65536 / THREADS / 8 * 8 * THREADS,
              "or the block would wait for more registers than it has, for ever");

#endif
