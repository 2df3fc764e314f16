/*
 * What forward_sm90 is compiled with, and the sizes that follow from it.
 *
 * SHAPE, BFLOAT16, GENERAL.
 */
#ifndef FA_KERNELS_FORWARD_SM90_CONFIG_CUH
#define FA_KERNELS_FORWARD_SM90_CONFIG_CUH

#include "forward_sm90.h"

#define HEAD_DIM FA_SM90_DIM(SHAPE)
#define VALUE_DIM FA_SM90_DIM_V(SHAPE)
#define CONSUMERS FA_SM90_CONSUMERS(SHAPE)
#define KEYS FA_SM90_KEYS(SHAPE)
#define SINGLE_KEY_TILE FA_SM90_SINGLE_TILES(SHAPE)
#define OUT_BUFFER FA_SM90_STAGING(SHAPE)

#define CLUSTER 1          /* blocks that share a work tile */
#define FIRST_COLUMN 0     /* of the outputs that a block computes */
#define FRAGMENT_KEYS KEYS /* of a tile, whose scores a block computes */

/* Whether an option may hide values that products read all the same. */
#define HIDES_VALUES (GENERAL & (FA_SM90_BIAS | FA_SM90_BY_ROWS))

/* Whether the bias of a tile is loaded before its scores are issued; then plain tiles always track the max. */
#define BIAS_AHEAD (GENERAL == FA_SM90_BIAS)
#define ALWAYS_TRACKED BIAS_AHEAD

/* Whether warpgroups choose between plain tiles that are tracked and plain tiles that are not (softmax.cuh). */
#define ADAPTIVE (!ALWAYS_TRACKED && !SINGLE_KEY_TILE)

/* Whether a series may take the place of a softcap's tanh (options.cuh). */
#define HAS_SERIES (GENERAL == FA_SM90_SOFTCAP)

/* Whether the kernel has the dynamic schedule. It must know the block's tasks to recompute rows; and head dim 64 with
 * three consumers, which is for long rows, has no register to spare. */
#define DYNAMIC (!HIDES_VALUES && !(CONSUMERS == 3 && HEAD_DIM <= 64))

/* Accumulators of the outputs in a thread. */
#define OUTPUTS (VALUE_DIM / 2)

#define STORES_THROUGH_BUFFER (OUT_BUFFER > 0 && VALUE_DIM % 64 == 0)

enum {
    WARPGROUP = 128,
    WARPS = WARPGROUP / 32,
    THREADS = FA_SM90_THREADS(SHAPE),
    QUERIES = FA_SM90_QUERIES(SHAPE),
    ROWS = 64, /* queries of a consumer */
    STAGES = FA_SM90_STAGES(SHAPE),
    K_BLOCKS = FA_SM90_ROW_BYTES(HEAD_DIM) / 128, /* of 64 columns: the swizzle spans 128 bytes */
    V_BLOCKS = FA_SM90_ROW_BYTES(VALUE_DIM) / 128,
    Q_BLOCK = ROWS * 128, /* bytes of one block of columns of a consumer's queries */
    KV_BLOCK = KEYS * 128,
    Q_BYTES = K_BLOCKS * Q_BLOCK,
    K_BYTES = K_BLOCKS * KV_BLOCK,
    V_BYTES = V_BLOCKS * KV_BLOCK,
    BIAS_BLOCK = ROWS * 128, /* 64 columns of the bias of a consumer's tile */
    BIAS_BYTES = KEYS / 64 * BIAS_BLOCK,
    Q_STAGES = GENERAL & FA_SM90_BIAS ? 1 : FA_SM90_Q_PLACES(SHAPE),
    QUEUE_ENTRIES = FA_SM90_SLOTS(SHAPE),
    TASK_NONE = -1,
    TASK_END = -2
};

/* Registers of a thread that loads, and of one that computes. */
#if CONSUMERS == 3
#define PRODUCER_REGISTERS 32
#define CONSUMER_REGISTERS 160
#else
#define PRODUCER_REGISTERS 40
#define CONSUMER_REGISTERS 232
#endif

/* Whether a work tile begins before the one before it ends: consumer.cuh. */
#define OVERLAPPED (HEAD_DIM <= 64 && Q_STAGES > 1)

/* Counts how often a warp's tiles go each way through the softmax: for tests, which define it. */
#ifndef COUNT_PATH
#define COUNT_PATH(path) (void)0
#endif

#endif
