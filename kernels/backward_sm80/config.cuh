/*
 * The numbers of a variant (kernels/variants.h), which backward_sm80.h explains, and constants that
 * follow from them.
 */
#ifndef FA_KERNELS_BACKWARD_SM80_CONFIG_CUH
#define FA_KERNELS_BACKWARD_SM80_CONFIG_CUH

#include "backward_sm80/backward_sm80.h"
#include "common/dialect.h"
#include "common/element.h"

#if !defined(ELEMENT) || !defined(HEAD_DIM) || !defined(OPTIONS) || !defined(KEYS) ||              \
    !defined(QUERIES)
#error                                                                                             \
    "backward_sm80: ELEMENT, HEAD_DIM, OPTIONS, KEYS or QUERIES is missing: a row of kernels/variants.h defines them"
#endif
#if !defined(WARPS) || !defined(GROUP_ROWS) || !defined(STAGES) || !defined(BLOCKS)
#error                                                                                             \
    "backward_sm80: WARPS, GROUP_ROWS, STAGES or BLOCKS is missing: a row of kernels/variants.h defines them"
#endif
#if ELEMENT != FA_ELEMENT_FLOAT16 && ELEMENT != FA_ELEMENT_BFLOAT16 &&                             \
    ELEMENT != FA_ELEMENT_TF32 && ELEMENT != FA_ELEMENT_TF32X3
#error                                                                                             \
    "backward_sm80: ELEMENT must be FA_ELEMENT_FLOAT16, FA_ELEMENT_BFLOAT16, FA_ELEMENT_TF32 or FA_ELEMENT_TF32X3"
#endif

/* Operands are float32 in memory. They are multiplied as float16 parts times powers of two: high
 * parts, and for three products also low parts (high_low.cuh). */
#define HIGH_LOW FA_BACKWARD_SM80_HAS_PARTS(ELEMENT)

/* Nothing is rounded: each operand is the sum of two float16 numbers, and a product is computed by
 * three products of these. One product has only the high numbers, which are as exact as tf32. */
#define THREE_PRODUCTS (ELEMENT == FA_ELEMENT_TF32X3)

/* weight_sums.cu, which computes scores but no gradients, defines it as 1. */
#ifndef SCORES_ALONE
#define SCORES_ALONE 0
#endif

/* Of the options of scores, there is a float32 bias and no other. */
#define BIAS_ALONE (OPTIONS == FA_BACKWARD_SM80_BIAS)

/* Only the variants of wide heads have slices. */
#ifndef SLICES
#define SLICES 0
#endif

/* A warp computes whole scores of its own from such operands (own_parts.cuh). */
#define OWN_PARTS FA_BACKWARD_SM80_HAS_OWN_PARTS(ELEMENT, SLICES)

/* One product has no low parts, so half of each row would be unused. So rows of queries and dout
 * have room for two tiles, which take turns: the next one is copied while this one is multiplied.
 * The same holds for rows of dS if a warp has its own scores. */
#define TAKES_TURNS FA_BACKWARD_SM80_TAKES_TURNS(ELEMENT)

/* Warps share the products of scores (slices.cuh). */
#define SHARED_SCORES (SLICES > 0 && !SCORES_ALONE)

/* Tiles of queries take turns between their own rows and the unused halves of keys and values, or
 * between those of keys and those of values. */
#define BESIDE_KEYS (FA_BACKWARD_SM80_BESIDE_KEYS(ELEMENT, SLICES) && !SCORES_ALONE)
#define BOTH_BESIDE_KEYS                                                                           \
    (FA_BACKWARD_SM80_BOTH_BESIDE_KEYS(ELEMENT, KEYS, QUERIES, SLICES) && !SCORES_ALONE)

/* A warp has half of the columns of either dK or dV, of its group's keys. With 64 keys and eight
 * warps, columns of both would not be whole units of 32. */
#define ONE_GRADIENT BOTH_BESIDE_KEYS

/* A thread copies the same unit of several rows of parts (issue_parts). */
#define ROWS_OF_PARTS (OWN_PARTS || BESIDE_KEYS)

enum {
    ELEMENT_BYTES = FA_ELEMENT_BYTES(ELEMENT),
    VECTOR = 16 / ELEMENT_BYTES,     /* elements of a 16-byte unit */
    STEP = 16,                       /* elements of an mma step */
    COLUMN_TILES = HIGH_LOW ? 4 : 2, /* tiles of 8 columns whose rows are loaded at once */
    THREADS = FA_BACKWARD_SM80_THREADS(WARPS),
    TILE = FA_BACKWARD_SM80_TILE,
    PARTS = TILE / QUERIES, /* tiles of queries in a tile of the workspace */
    SPLIT = FA_BACKWARD_SM80_SPLIT(KEYS, WARPS, GROUP_ROWS),
    M_TILES = GROUP_ROWS / 16,
    GROUPS = KEYS / GROUP_ROWS,
    /* The queries of a tile for which a warp computes scores, or its slice of them: half of the
     * tile if there are warps enough. */
    OWN_QUERIES = !SHARED_SCORES                 ? QUERIES / SPLIT
                  : 4 * SLICES * GROUPS <= WARPS ? QUERIES / 2
                                                 : QUERIES,
    /* Columns of dK and dV that a warp computes, or of one of them. */
    COLUMNS = ONE_GRADIENT ? HEAD_DIM / (SPLIT / 2) : HEAD_DIM / SPLIT,
    /* Queries whose scores are in registers at the same time. Options need registers, too. */
    MOST_QUERIES =
        OPTIONS && !BIAS_ALONE && HEAD_DIM != 96 && !SCORES_ALONE && !SHARED_SCORES ? 16 : 32,
    CHUNK = OWN_QUERIES < MOST_QUERIES ? OWN_QUERIES : MOST_QUERIES,
    CHUNKS = OWN_QUERIES / CHUNK,
    N_TILES = CHUNK / 8, /* of 8 queries of the scores */
    /* Tiles of the scores from which it computes weights. */
    WEIGHT_M_TILES = SHARED_SCORES ? GROUPS : M_TILES,
    WEIGHT_N_TILES = SHARED_SCORES ? 1 : N_TILES,
    D_STEPS = HEAD_DIM / STEP,       /* mma steps along the head dim */
    D_TILES = COLUMNS / 8,           /* tiles of 8 columns of dK and dV */
    ROW_VECTORS = HEAD_DIM / VECTOR, /* of 16 bytes */
    PITCH = FA_BACKWARD_SM80_PITCH(ELEMENT, HEAD_DIM),
    /* Weights and dS are transposed: a row for each key. */
    SCORE_PITCH = FA_BACKWARD_SM80_SCORE_PITCH(ELEMENT, QUERIES),
    DS_BUFFERS = FA_BACKWARD_SM80_DS_BUFFERS(ELEMENT, STAGES),
    TWO_HALVES =
        HIGH_LOW ? WARPS > 4 : SPLIT > 1, /* of the warps: one half computes dQ later (is_early) */
    Q_BUFFERS = FA_BACKWARD_SM80_ROOM(ELEMENT, STAGES), /* of queries and of dout */
    KEY_BYTES = KEYS * PITCH,
    Q_BYTES = QUERIES * PITCH,
    ROW_BYTES = QUERIES * 8,
    FACTOR_BYTES = FA_BACKWARD_SM80_FACTORS(ELEMENT, QUERIES),
    SCORE_BYTES = KEYS * SCORE_PITCH,
    SEMAPHORES = FA_BACKWARD_SM80_SEMAPHORES(ELEMENT, HEAD_DIM), /* of a tile of the workspace */
    SMEM_BYTES =
        FA_BACKWARD_SM80_SMEM(ELEMENT, HEAD_DIM, KEYS, QUERIES, WARPS, GROUP_ROWS, STAGES, SLICES)
};
static_assert(!BESIDE_KEYS || QUERIES <= KEYS, "a tile of queries has room beside keys");
static_assert(SCORE_PITCH == 64 || SCORE_PITCH % 128 == 0, "the swizzle of weights and dS");
static_assert(GROUP_ROWS % 16 == 0 && KEYS % GROUP_ROWS == 0 && KEYS % 32 == 0, "whole groups");
static_assert(WARPS % (KEYS / GROUP_ROWS) == 0 && WARPS * PARTS <= SEMAPHORES,
              "whole groups of warps, each with its semaphore");
static_assert(OWN_QUERIES % 8 == 0 && OWN_QUERIES % CHUNK == 0 && COLUMNS % (8 * COLUMN_TILES) == 0,
              "whole fragments");
static_assert(SPLIT == 1 || KEYS / GROUP_ROWS <= 15, "named barriers are numbered to 15");
static_assert(!ONE_GRADIENT || SPLIT == 4, "four warps share keys: dK and dV, half of the columns");

enum {
    /* All weights and dS come from shared memory, including those of a warp's own queries. */
    ALL_SHARED = HIGH_LOW && SPLIT != 1,
    /* dP is computed after the products of dV, because parts of weights need its registers. */
    LATE_DP = HIGH_LOW && !ALL_SHARED
};
static_assert(!OWN_PARTS || SCORES_ALONE || CHUNK % 16 == 0, "whole steps of a warp's own queries");
static_assert(!OWN_PARTS || SCORES_ALONE || SPLIT == 1 || OWN_QUERIES == 16,
              "where rows are shared, 16 queries have a factor");

/* A tile's dQ: each warp has some rows and columns of it. With 32 rows, each fragment of keys that
 * is loaded is used for two products. */
enum {
    DQ_ROWS = QUERIES >= 32 && HEAD_DIM * QUERIES / 32 % (8 * COLUMN_TILES * WARPS) == 0 ? 32 : 16,
    DQ_M_TILES = DQ_ROWS / 16,
    DQ_ROW_WARPS = QUERIES / DQ_ROWS,
    DQ_COLUMNS = HEAD_DIM * DQ_ROW_WARPS / WARPS,
    DQ_N_TILES = DQ_COLUMNS / 8
};
static_assert(WARPS % DQ_ROW_WARPS == 0 && DQ_COLUMNS % (ONE_GRADIENT ? 16 : 8 * COLUMN_TILES) == 0,
              "whole fragments of dQ");

/* The factor by which a weight becomes its true value. */
#define WEIGHT_UNIT (1.0f / (float)(1 << FA_BACKWARD_SM80_WEIGHT_BITS(ELEMENT)))

#endif
