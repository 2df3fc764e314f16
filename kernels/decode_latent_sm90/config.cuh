/*
 * What decode_latent_sm90 is compiled with, and what follows from it: who has what, and where it is
 * in shared memory. It replaces config.cuh and fragments.cuh of decode_sm80, and is included before
 * any part of it. decode_latent_sm90.h says what the numbers of a variant are.
 */
#ifndef FA_KERNELS_DECODE_LATENT_SM90_CONFIG_CUH
#define FA_KERNELS_DECODE_LATENT_SM90_CONFIG_CUH

#ifdef FA_KERNELS_DECODE_SM80_CONFIG_CUH
#error "include decode_latent_sm90/config.cuh before the parts of decode_sm80"
#endif
#define FA_KERNELS_DECODE_SM80_CONFIG_CUH
#define FA_KERNELS_DECODE_SM80_FRAGMENTS_CUH

#if !defined(ELEMENT) || !defined(HEAD_DIM) || !defined(VALUE_DIM) || !defined(GROUP_ROWS)
#error                                                                                             \
    "decode_latent_sm90: ELEMENT, HEAD_DIM, VALUE_DIM or GROUP_ROWS is missing: a row of kernels/variants.h defines them"
#endif
#if !defined(KEYS) || !defined(STAGES) || !defined(OWN_BLOCKS) || !defined(OPTIONS)
#error                                                                                             \
    "decode_latent_sm90: KEYS, STAGES, OWN_BLOCKS or OPTIONS is missing: a row of kernels/variants.h defines them"
#endif

#include "ptx/grid.cuh"
/* A block finds its work before the grid in front has ended. */
#define FA_READ_LENGTH(at) ptx_read_latest(at)

#include "common/device.cuh"
#include "decode_latent_sm90/decode_latent_sm90.h"
#include "ptx/address.cuh"
#include "ptx/barrier.cuh"
#include "ptx/thread.cuh"

enum {
    WARPGROUP = 128,
    GROUP_WARPS = WARPGROUP / 32,
    /* Warpgroups: of the scores, of the first and of the second half of the values' columns. */
    CONSUMERS = 3,
    CONSUMER_SCORES = 0,
    CONSUMER_VALUES = 1, /* the first of them */
    VALUE_GROUPS = CONSUMERS - 1,
    ROWS = GROUP_ROWS,
    BLOCK_COLUMNS = 64, /* the swizzle spans 128 bytes */
    BLOCK_BYTES = FA_DECODE_LATENT_SM90_BLOCK,
    K_BLOCKS = HEAD_DIM / BLOCK_COLUMNS,
    V_BLOCKS = VALUE_DIM / BLOCK_COLUMNS,
    V_PAIRS = V_BLOCKS / 2, /* of blocks, which a stage has room for */
    GROUP_PAIRS = V_PAIRS / VALUE_GROUPS,
    GROUP_COLUMNS = VALUE_DIM / VALUE_GROUPS,
    PAIR_BYTES = 2 * BLOCK_BYTES,
    TAIL_STAGES = FA_DECODE_LATENT_SM90_TAILS,
    SCORE_BYTES = FA_DECODE_LATENT_SM90_SCORES,
    Q_BLOCKS = K_BLOCKS - OWN_BLOCKS, /* in shared memory */
    /* Of pairs, where the others are at first, beside the buffer of scores. */
    QUERY_STAGES = (OWN_BLOCKS - SCORE_BYTES / BLOCK_BYTES + 1) / 2,
    OUTPUTS = GROUP_COLUMNS / 2, /* accumulators of a thread that has values */
    WEIGHT_STEPS = 3             /* steps of 16 keys whose weights it holds */
};
static_assert(ROWS == 64 && KEYS == 64, "a product has 64 rows, and a box as many keys");
static_assert(K_BLOCKS * BLOCK_COLUMNS == HEAD_DIM && K_BLOCKS == V_BLOCKS + 1,
              "one block behind the values");
static_assert(GROUP_PAIRS == 2 && GROUP_PAIRS * VALUE_GROUPS * 2 * BLOCK_COLUMNS == VALUE_DIM,
              "two products of 128 columns a warpgroup");
static_assert(SCORE_BYTES == 4 * ROWS * KEYS, "the planner's bytes");
static_assert(STAGES >= 2 * V_PAIRS, "two key tiles: scores are a tile ahead of values");
static_assert(OWN_BLOCKS <= 2 * QUERY_STAGES + SCORE_BYTES / BLOCK_BYTES,
              "room for those at first");
static_assert(OPTIONS == 0, "what the kernel can do");

/* Registers of a thread that loads, of one that has scores, and of one that has values. */
#ifndef SCORES_REGISTERS
#define PRODUCER_REGISTERS 32
#define SCORES_REGISTERS 144
#define VALUES_REGISTERS 168
#endif
static_assert(WARPGROUP *
                      (PRODUCER_REGISTERS + SCORES_REGISTERS + VALUE_GROUPS * VALUES_REGISTERS) <=
                  65536,
              "or the block would wait for more registers than it has, for ever");

/* ---- What the parts of decode_sm80 take ------------------------------------------------------ */

#define LATENT 1
#define BLOCK_TILES 1
#define EIGHT_BITS 0
#define OWN_RESULTS 1 /* results.cuh */
#define SHARES_ROWS 1 /* blocks that merge have some rows of a work tile each */
#define FRAGMENT_KEYS KEYS

enum {
    THREADS = CONSUMERS * WARPGROUP, /* that merge: the consumers */
    WARPS = THREADS / 32,
    BLOCK_KEYS = KEYS,
    ALIGNED_KEYS = KEYS, /* key tiles begin at multiples of it */
    M_TILES = 1,
    KEY_TILES = KEYS / 8,
    D_TILES = BLOCK_COLUMNS / 8, /* of a block of columns (common/nonfinite_values.cuh) */
    ROW_FLOATS = FA_DECODE_ROW(VALUE_DIM)
};
static_assert(4 * ROWS * ROW_FLOATS <= STAGES * PAIR_BYTES, "room for the block's sums");
static_assert(4 * ROWS * FA_DECODE_PARTS <= STAGES * PAIR_BYTES, "room for the parts' factors");
static_assert(4 * ROWS * 2 <= SCORE_BYTES, "room for the rows' factors");

/* Of consumers alone, counted from the first of them. */
FA_DEVICE int thread_id(void) { return ptx_thread_id() - WARPGROUP; }
FA_DEVICE int warp_id(void) { return thread_id() / 32; }
FA_DEVICE int lane_id(void) { return ptx_thread_id() % 32; }

/* Named barriers: of all consumers, and of the threads of one. */
enum { BARRIER_CONSUMERS = 1, BARRIER_OF_CONSUMER };

FA_DEVICE void sync_threads(void) { ptx_named_barrier_sync(BARRIER_CONSUMERS, THREADS); }

/* The thread's row `half` of the work tile: a warp of a warpgroup has 16 rows, and four lanes share
 * a row. */
FA_DEVICE int row_of(int m, int half)
{
    return 16 * (warp_id() % GROUP_WARPS + m) + lane_id() / 4 + 8 * half;
}

/* S as wgmma leaves it: keys 8n + 2t and 8n + 2t + 1 of row_of(0, h) are in [0][n][2h] and
 * [0][n][2h + 1], with t = lane % 4. */
typedef struct fa_scores {
    float at[M_TILES][KEY_TILES][4];
} fa_scores;

#endif
