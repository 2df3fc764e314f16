/*
 * The compile-time parameters of forward_f16x3_sm90, and sizes that follow from them. This file
 * replaces forward_sm90/config.cuh and forward_tf32_sm90/config.cuh, and is included before any
 * part of these. A row of kernels/variants.h gives
 *
 *     ELEMENT    FA_ELEMENT_FLOAT16X3: float32 in memory, products of float16 parts;
 *                FA_ELEMENT_TF32: products of high parts alone, which have as many bits as tf32
 *     HEAD_DIM   the widest head dim of queries, keys and values
 *     VALUE_DIM  columns of these that a block has: HEAD_DIM / CLUSTER, a multiple of 64; in a
 *                cluster 32 or 16 more
 *     OPTIONS    FA_SM90_FLOAT32_ALL: the options that change scores or weights, each may be
 *                present or not; 0: only masks by position and lengths
 *     CLUSTER    1, or 2 blocks, which share a work tile and have half of the columns each
 *     CONSUMERS  2, or 1 for few short rows: warpgroups that compute, 64 queries each
 *     KEYS       of a key tile, a multiple of 16; with options of 32, which a block of dropout bits
 *                covers
 *     STAGES     for a tile of keys or values, or for a chunk
 *     Q_STAGES   1
 *     FOR_BIAS   1: for problems with a bias; it may be missing
 *     CHUNK      bytes of a chunk, which is some blocks of 64 of the block's columns of a tile;
 *                without it, a chunk is a tile
 */
#ifndef FA_KERNELS_FORWARD_F16X3_SM90_CONFIG_CUH
#define FA_KERNELS_FORWARD_F16X3_SM90_CONFIG_CUH

#if defined(FA_KERNELS_FORWARD_SM90_CONFIG_CUH) || defined(FA_KERNELS_FORWARD_TF32_SM90_CONFIG_CUH)
#error "include forward_f16x3_sm90/config.cuh before the parts of other kernels"
#endif
#define FA_KERNELS_FORWARD_SM90_CONFIG_CUH
#define FA_KERNELS_FORWARD_TF32_SM90_CONFIG_CUH

#ifndef ELEMENT
#error "forward_f16x3_sm90: ELEMENT is missing"
#endif
#ifndef HEAD_DIM
#error "forward_f16x3_sm90: HEAD_DIM is missing"
#endif
#ifndef VALUE_DIM
#error "forward_f16x3_sm90: VALUE_DIM is missing"
#endif
#ifndef OPTIONS
#error "forward_f16x3_sm90: OPTIONS is missing"
#endif
#ifndef CLUSTER
#error "forward_f16x3_sm90: CLUSTER is missing"
#endif
#ifndef CONSUMERS
#error "forward_f16x3_sm90: CONSUMERS is missing"
#endif
#ifndef KEYS
#error "forward_f16x3_sm90: KEYS is missing"
#endif
#ifndef STAGES
#error "forward_f16x3_sm90: STAGES is missing"
#endif
#ifndef Q_STAGES
#error "forward_f16x3_sm90: Q_STAGES is missing"
#endif

#include "common/dialect.h"
#include "common/element.h"
#include "forward_f16x3_sm90/forward_f16x3_sm90.h"

static_assert((ELEMENT == FA_ELEMENT_FLOAT16X3 || ELEMENT == FA_ELEMENT_TF32) && Q_STAGES == 1 &&
                  (CONSUMERS == 1 || CONSUMERS == 2),
              "what the kernel can do");
static_assert(CLUSTER == 1 || CLUSTER == 2, "a block has one peer");
static_assert(OPTIONS == 0 || OPTIONS == FA_SM90_FLOAT32_ALL, "all of them, or none");
static_assert(VALUE_DIM % 16 == 0 && KEYS % (OPTIONS ? 32 : 16) == 0, "tiles are whole blocks");
static_assert(HEAD_DIM == CLUSTER * VALUE_DIM, "keys and values share stages");

/* From here on: the type of the parts, the operands of products. */
#if ELEMENT == FA_ELEMENT_TF32
#define HIGH_ALONE 1
#else
#define HIGH_ALONE 0
#endif
#undef ELEMENT
#define ELEMENT FA_ELEMENT_FLOAT16

/* The first of the block's columns: of queries and keys, of values and outputs. In a cluster, also
 * the other block. */
#if CLUSTER > 1
#define THIS_BLOCK ((int)(blockIdx.x % CLUSTER))
#define PEER_BLOCK (THIS_BLOCK ^ 1)
#define FIRST_COLUMN (THIS_BLOCK * VALUE_DIM)
#define FIRST_QUERY_COLUMN FIRST_COLUMN
#else
#define FIRST_COLUMN 0
#endif

#define FRAGMENT_KEYS KEYS /* keys of a tile for which a block computes scores */

/* Macros that parts of forward_sm90 need (forward_sm90/config.cuh). */
#define HIDES_VALUES (OPTIONS & FA_SM90_BY_ROWS)
#define TRACKED 1
#define HAS_SERIES 0
#define BESIDE 0
#define SPLIT 0
#define DYNAMIC 0
#define BALANCED 0
#define ALTERNATES 1
#define DESCRIBES_FIRST 0
#define SINGLE_TILES 0
#define RECOMPUTES_LSE 1
#define DESCRIBE_WHOLE describe_whole /* keys may be split: forward_sm90/describe.cuh */
#define HAS_FAST_SINKS 0
#define EXACT_SUMS 1
#define NATURAL_BASES (OPTIONS != 0) /* forward_sm90/float32_options.cuh */

/* A row's largest weight is 2 to this power, so that few weights are too small for float16. */
#define HEADROOM 15.0f

/* Whether a tile's bias is loaded before its scores are computed: in the variants for problems with one.
 * The registers for that cost other problems some 5%, and wide heads have none. */
#ifdef FOR_BIAS
#define LOADS_EARLY FOR_BIAS
#else
#define LOADS_EARLY 0
#endif
#define HAS_BIAS 1 /* there may be one */
#define MASKS_EARLY 0

/* Registers of a thread for accumulators of the outputs. */
#define OUTPUTS (VALUE_DIM / 2)

/* Tensor cores truncate sums. So sums are short: over this many columns in S = Q K^T, over the keys
 * of a tile in P V. Ordinary additions add them up. Wide heads have more sums to add up, so theirs
 * are shorter. Rounding to high parts alone costs more bits than that. */
#if HIGH_ALONE
#define SUM_COLUMNS 128
#elif VALUE_DIM <= 128
#define SUM_COLUMNS 64
#else
#define SUM_COLUMNS 32
#endif

/* Columns of P V that are computed at a time. */
#define PV_COLUMNS 64
#define HALF_PV_COLUMNS 32

/* Whether scores are multiplied by their units before the softmax: the columns of a tile have several. */
#ifdef CHUNK
#define UNITS_LEAVE 1
#else
#define UNITS_LEAVE 0
#define CHUNK (4 * KEYS * FA_F16X3_SM90_ROOM(VALUE_DIM))
#endif

enum {
    WARPGROUP = 128,
    WARPS = WARPGROUP / 32,
    PRODUCERS = FA_F16X3_SM90_PRODUCERS, /* warpgroups */
    THREADS = FA_F16X3_SM90_THREADS(CONSUMERS),
    QUERIES = FA_SM90_QUERIES(CONSUMERS),
    ROWS = 64, /* queries of a consumer */
    /* A row of shared memory has 128 bytes, the span of the swizzle: 32 floats, or 64 halves. */
    BLOCK_COLUMNS = 32,
    K_BLOCKS = FA_F16X3_SM90_ROOM(VALUE_DIM) / BLOCK_COLUMNS,
    Q_BLOCK = ROWS * 128, /* bytes of one block of columns of a consumer's queries */
    K_BLOCK = KEYS * 128, /* the same of keys or values */
    /* Two blocks of floats become a block of their high parts and one of their low parts. */
    PAIRS = K_BLOCKS / 2,
    Q_BYTES = K_BLOCKS * Q_BLOCK,
    /* A stage holds a chunk of a tile of keys or values: */
    CHUNK_BLOCKS = CHUNK / K_BLOCK,
    CHUNK_PAIRS = CHUNK_BLOCKS / 2,
    CHUNK_COLUMNS = CHUNK_BLOCKS * BLOCK_COLUMNS,
    CHUNKS = K_BLOCKS / CHUNK_BLOCKS, /* of a tile */
    /* Columns of the last chunk that are multiplied: others are the peer's. */
    LAST_COLUMNS = VALUE_DIM - (CHUNKS - 1) * CHUNK_COLUMNS,
    RECEIVED_BYTES = ROWS * KEYS * 4, /* scores of a consumer's peer */
    QUEUE_ENTRIES = FA_F16X3_SM90_QUEUE_ENTRIES,
    SPLITTERS = PRODUCERS * WARPS - 1, /* warps */
    TASK_NONE = -1,
    TASK_END = -2
};

static_assert(CHUNKS * CHUNK_PAIRS * 2 == K_BLOCKS && CHUNK == CHUNK_PAIRS * 2 * K_BLOCK,
              "chunks are whole pairs of blocks");
static_assert(LAST_COLUMNS % 64 == 0 || (CLUSTER > 1 && LAST_COLUMNS <= SUM_COLUMNS),
              "a part of a chunk is a chain, whose other columns are the peer's");

/* Registers of a thread that loads, and of a thread that computes. */
#if VALUE_DIM <= 128
#define PRODUCER_REGISTERS 56
#define CONSUMER_REGISTERS 200
#else
#define PRODUCER_REGISTERS 48
#define CONSUMER_REGISTERS 208
#endif
static_assert(WARPGROUP * (PRODUCERS * PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) <=
                  65536 / THREADS / 8 * 8 * THREADS,
              "or the block would wait for more registers than it has, for ever");

#endif
