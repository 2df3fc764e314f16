/*
 * The compile-time parameters of forward_tf32_sm90, and sizes that follow from them. This file
 * replaces forward_sm90/config.cuh, and is included before any part of forward_sm90. A row of
 * kernels/variants.h gives
 *
 *     ELEMENT    FA_ELEMENT_TF32: float32 in memory, rounded to tf32 for products
 *     HEAD_DIM   the widest head dim of queries and keys, a multiple of 32
 *     VALUE_DIM  that of values: the same
 *     OPTIONS    FA_SM90_FLOAT32_ALL: the options that change scores or weights, each may be
 *                present or not; 0: only masks by position and lengths
 *     CLUSTER    1
 *     CONSUMERS  warpgroups that compute, 64 queries each
 *     KEYS       of a key tile, a multiple of 32
 *     STAGES     for a tile of keys or values
 *     Q_STAGES   1
 */
#ifndef FA_KERNELS_FORWARD_TF32_SM90_CONFIG_CUH
#define FA_KERNELS_FORWARD_TF32_SM90_CONFIG_CUH

#ifdef FA_KERNELS_FORWARD_SM90_CONFIG_CUH
#error "include forward_tf32_sm90/config.cuh before the parts of forward_sm90"
#endif
#define FA_KERNELS_FORWARD_SM90_CONFIG_CUH

#ifndef ELEMENT
#error "forward_tf32_sm90: ELEMENT is missing"
#endif
#ifndef HEAD_DIM
#error "forward_tf32_sm90: HEAD_DIM is missing"
#endif
#ifndef VALUE_DIM
#error "forward_tf32_sm90: VALUE_DIM is missing"
#endif
#ifndef OPTIONS
#error "forward_tf32_sm90: OPTIONS is missing"
#endif
#ifndef CLUSTER
#error "forward_tf32_sm90: CLUSTER is missing"
#endif
#ifndef CONSUMERS
#error "forward_tf32_sm90: CONSUMERS is missing"
#endif
#ifndef KEYS
#error "forward_tf32_sm90: KEYS is missing"
#endif
#ifndef STAGES
#error "forward_tf32_sm90: STAGES is missing"
#endif
#ifndef Q_STAGES
#error "forward_tf32_sm90: Q_STAGES is missing"
#endif

#include "common/dialect.h"
#include "common/element.h"
#include "forward_tf32_sm90/forward_tf32_sm90.h"

static_assert(ELEMENT == FA_ELEMENT_TF32 && CLUSTER == 1 && Q_STAGES == 1,
              "what the kernel can do");
static_assert(OPTIONS == 0 || OPTIONS == FA_SM90_FLOAT32_ALL, "all of them, or none");
static_assert(HEAD_DIM % 32 == 0 && KEYS % 32 == 0, "tiles are whole boxes");
static_assert(HEAD_DIM == VALUE_DIM, "keys and values share stages");

#define FIRST_COLUMN 0     /* of the outputs that a block computes */
#define FRAGMENT_KEYS KEYS /* keys of a tile for which a block computes scores */

/* Macros that parts of forward_sm90 need (forward_sm90/config.cuh). */
#define HIDES_VALUES (OPTIONS & FA_SM90_BY_ROWS)
#define NATURAL_BASES (OPTIONS != 0) /* forward_sm90/float32_options.cuh */
#define RECOMPUTES_LSE 0
#define DESCRIBE_WHOLE describe_whole /* keys may be split: forward_sm90/describe.cuh */
#define HAS_FAST_SINKS 0
#define EXACT_SUMS 0
#define TRACKED 1
#define HAS_SERIES 0
#define BESIDE 0
#define SPLIT 0
#define DYNAMIC 0
#define BALANCED 0
#define ALTERNATES 1
#define DESCRIBES_FIRST 0
#define SINGLE_TILES 0

/* Whether there may be a bias. A tile's bias or mask is loaded a tile ahead, and larger tiles leave no
 * registers for that of a bias: problems with one have another variant. */
#define HAS_BIAS (KEYS <= 64)
#define LOADS_EARLY 1
#define MASKS_EARLY (HEAD_DIM <= 64)

/* Registers of a thread for accumulators of the outputs. */
#define OUTPUTS (VALUE_DIM / 2)

enum {
    WARPGROUP = 128,
    WARPS = WARPGROUP / 32,
    THREADS = FA_SM90_THREADS(CONSUMERS),
    QUERIES = FA_SM90_QUERIES(CONSUMERS),
    ROWS = 64, /* queries of a consumer */
    /* A row of shared memory has 128 bytes, the span of the swizzle: 32 floats. */
    BLOCK_COLUMNS = 32,
    K_BLOCKS = HEAD_DIM / BLOCK_COLUMNS,
    V_BLOCKS = VALUE_DIM / BLOCK_COLUMNS,
    Q_BLOCK = ROWS * 128, /* bytes of one block of columns of a consumer's queries */
    K_BLOCK = KEYS * 128,
    /* Values are in boxes of 32 keys by 32 columns, ordered first by keys, then by columns. A
     * transposed box has 32 rows, of one column and 32 keys each, so that the boxes of the same
     * keys are an operand of VALUE_DIM rows. */
    BOX_BYTES = 32 * 128,
    V_BLOCK = V_BLOCKS * BOX_BYTES, /* bytes of 32 keys' values */
    Q_BYTES = K_BLOCKS * Q_BLOCK,
    TILE_BYTES = KEYS * HEAD_DIM * 4, /* of keys or values */
    QUEUE_ENTRIES = FA_TF32_SM90_QUEUE_ENTRIES,
    TRANSPOSERS = 3, /* warps */
    TASK_NONE = -1,
    TASK_END = -2
};

/* Registers of a thread that loads, and of a thread that computes. */
#if CONSUMERS == 3
#define PRODUCER_REGISTERS 32
#define CONSUMER_REGISTERS 160
#else
#define PRODUCER_REGISTERS 56
#define CONSUMER_REGISTERS 224
#endif
static_assert(WARPGROUP * (PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) <=
                  65536 / THREADS / 8 * 8 * THREADS,
              "or the block would wait for more registers than it has, for ever");

#endif
