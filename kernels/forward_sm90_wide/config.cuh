/*
 * The compile-time parameters of forward_sm90_wide, and sizes that follow from them. This file
 * replaces forward_sm90/config.cuh, and is included before any part of forward_sm90. A row of
 * kernels/variants.h gives
 *
 *     ELEMENT    FA_ELEMENT_FLOAT16 or FA_ELEMENT_BFLOAT16: of queries, keys, values and outputs
 *     ROUNDED    1: queries, keys and values are the caller's float32 numbers, rounded to float16 (round.h); outputs
 *                are float32
 *     HEAD_DIM   the widest head dim of queries, keys and values, a multiple of 64
 *     VALUE_DIM  columns of the outputs that a block computes: HEAD_DIM / CLUSTER
 *     OPTIONS    0: only masks by position and lengths
 *     CLUSTER    2 blocks, which share a work tile
 *     CONSUMERS  warpgroups that compute, 64 queries each
 *     KEYS       of a key tile; each block computes the scores of half of them
 *     STAGES     for a chunk of keys or values
 *     Q_STAGES   1
 *     CHUNK      bytes of a chunk
 *     V_ROWS     rows of a chunk of values
 */
#ifndef FA_KERNELS_FORWARD_SM90_WIDE_CONFIG_CUH
#define FA_KERNELS_FORWARD_SM90_WIDE_CONFIG_CUH

#ifdef FA_KERNELS_FORWARD_SM90_CONFIG_CUH
#error "include forward_sm90_wide/config.cuh before the parts of forward_sm90"
#endif
#define FA_KERNELS_FORWARD_SM90_CONFIG_CUH

#ifndef ELEMENT
#error "forward_sm90_wide: ELEMENT is missing"
#endif
#ifndef HEAD_DIM
#error "forward_sm90_wide: HEAD_DIM is missing"
#endif
#ifndef VALUE_DIM
#error "forward_sm90_wide: VALUE_DIM is missing"
#endif
#ifndef OPTIONS
#error "forward_sm90_wide: OPTIONS is missing"
#endif
#ifndef CLUSTER
#error "forward_sm90_wide: CLUSTER is missing"
#endif
#ifndef CONSUMERS
#error "forward_sm90_wide: CONSUMERS is missing"
#endif
#ifndef KEYS
#error "forward_sm90_wide: KEYS is missing"
#endif
#ifndef STAGES
#error "forward_sm90_wide: STAGES is missing"
#endif
#ifndef Q_STAGES
#error "forward_sm90_wide: Q_STAGES is missing"
#endif
#ifndef CHUNK
#error "forward_sm90_wide: CHUNK is missing"
#endif
#ifndef V_ROWS
#error "forward_sm90_wide: V_ROWS is missing"
#endif

#ifndef ROUNDED
#define ROUNDED 0
#endif

#include "common/dialect.h"
#include "common/element.h"
#include "forward_sm90_wide/forward_sm90_wide.h"

static_assert(OPTIONS == 0 && Q_STAGES == 1, "what the kernel can do");
static_assert(CLUSTER * VALUE_DIM == HEAD_DIM, "each block has its part of the columns");

/* Keys of a tile for which a block computes scores: half of them. */
#define FRAGMENT_KEYS 64
static_assert(CLUSTER * FRAGMENT_KEYS == KEYS, "each block has its part of the keys");

/* The block's number in its cluster, and the other block. */
#define THIS_BLOCK ((int)(blockIdx.x % CLUSTER))
#define PEER_BLOCK (THIS_BLOCK ^ 1)

#define FIRST_COLUMN (THIS_BLOCK * VALUE_DIM) /* of the outputs that the block computes */

/* Macros that parts of forward_sm90 need (forward_sm90/config.cuh). */
#define HIDES_VALUES 0
#define NATURAL_BASES 0
#define HAS_FAST_SINKS (!ROUNDED)
#define EXACT_SUMS 0
#define TRACKED 1
#define HAS_SERIES 0
#define BESIDE 0
#define SPLIT 0
#define DYNAMIC 0
#define BALANCED 0
#define ALTERNATES 0
#define DESCRIBES_FIRST 0
#define SINGLE_TILES 0
#define STORES_THROUGH_BUFFER 0
#define RECOMPUTES_LSE 1

/* Registers of a thread for accumulators of the outputs. */
#define OUTPUTS (VALUE_DIM / 2)

enum {
    WARPGROUP = 128,
    WARPS = WARPGROUP / 32,
    THREADS = FA_SM90_THREADS(CONSUMERS),
    QUERIES = FA_SM90_QUERIES(CONSUMERS),
    ROWS = 64,          /* queries of a consumer */
    BLOCK_COLUMNS = 64, /* the swizzle spans 128 bytes */
    K_BLOCKS = HEAD_DIM / BLOCK_COLUMNS,
    V_BLOCKS = FA_SM90_ROW_BYTES(VALUE_DIM, ELEMENT) / 128,
    Q_BLOCK = ROWS * 128, /* bytes of one block of columns of a consumer's queries or weights */
    K_BLOCK = FRAGMENT_KEYS * 128,
    Q_BYTES = K_BLOCKS * Q_BLOCK,
    P_BYTES = CLUSTER * Q_BLOCK, /* weights of a consumer: a block of columns from each block */
    K_CHUNK_BLOCKS = CHUNK / K_BLOCK,
    K_CHUNKS = (K_BLOCKS + K_CHUNK_BLOCKS - 1) / K_CHUNK_BLOCKS,
    V_CHUNKS = KEYS / V_ROWS,
    V_BLOCK = V_ROWS * 128,
    QUEUE_ENTRIES = 2, /* there is no memory for more, so one work tile is described at a time */
    TASK_NONE = -1,
    TASK_END = -2
};
static_assert(CHUNK % K_BLOCK == 0 && V_CHUNKS * V_ROWS == KEYS && V_BLOCKS * V_BLOCK <= CHUNK &&
                  V_BLOCK % 1024 == 0,
              "chunks are whole boxes, and fit");

/* Registers of a thread that loads, and of a thread that computes. */
#define PRODUCER_REGISTERS 72
#define CONSUMER_REGISTERS 216
static_assert(WARPGROUP * (PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) <=
                  65536 / THREADS / 8 * 8 * THREADS,
              "or the block would wait for more registers than it has, for ever");

#endif
