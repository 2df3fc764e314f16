/*
 * The compile-time parameters of backward_sm90, from a row of kernels/variants.h, and constants
 * that follow from them:
 *
 *     ELEMENT      FA_ELEMENT_FLOAT16 or FA_ELEMENT_BFLOAT16: of all tensors
 *     HEAD_DIM     64 or 128: the widest head dim of queries, keys and values; 192: of queries and
 *                  keys
 *     VALUE_DIM    the widest head dim of values, if HEAD_DIM is 192: 128
 *     COLUMNS      96: products use 96 of the 128 columns, and the others are 0; 0: all columns
 *     STAGES       buffers of query tiles
 *     ORDERED      1: for sums of dQ in one order; other variants support it too, but slower
 *     PERSISTENT   1: blocks stay on their multiprocessor and take work tile after work tile. With
 *                  ORDERED: if a consumer has several buffers of dQ
 *     JOINED       1: blocks of the same launch replace `prepare` and `finish` (joined.cuh)
 *     DQ_BUFFERS   buffers of dQ of a consumer; 0 or 1: one
 *     DQ_TRANSPOSED 1: consumers compute dQ transposed, with all keys in registers. Each has all
 *                  columns of half of the queries. So it reads half of dS, instead of all of it and
 *                  half of the keys, from shared memory, which is the limit
 *     SINGLE_TILES 1: all keys of a head are one key tile. So the dQ of a tile is whole: it is
 *                  rounded and stored at once, without sums in global memory. PERSISTENT, in any order
 *     CHAINED      1: the blocks of a head are a cluster, one for each key tile. A block adds its share
 *                  of a tile's dQ to what it gets from the block before, and passes the sum on; the
 *                  last one whose keys the tile sees rounds and stores it (chain.cuh)
 *     ROUNDING     1: the block that adds the last share to a query tile's dQ loads the sum of the others,
 *                  rounds the whole and stores it (rounding.cuh). ORDERED. 2: heads that share keys, too,
 *                  take turns at each query tile
 *     STATIC_SMEM  bytes of static shared memory that the planner adds to the dynamic ones; 0: the
 *                  same as for any kernel
 *     OPTIONS      0: only masks by position and lengths; FA_SM90_ALL: each option may be present
 *                  or not; one option, such as FA_SM90_SOFTCAP: it is present, alone. FA_SM90_BY_ROWS
 *                  is a boolean mask, or any bias
 */
#ifndef FA_KERNELS_BACKWARD_SM90_CONFIG_CUH
#define FA_KERNELS_BACKWARD_SM90_CONFIG_CUH

#include "common/device.cuh"
#include "common/element.h"

#ifndef ELEMENT
#error "backward_sm90: ELEMENT is missing"
#endif
#if !defined(HEAD_DIM) || (HEAD_DIM != 64 && HEAD_DIM != 128 && HEAD_DIM != 192)
#error "backward_sm90: HEAD_DIM is none of 64, 128 and 192"
#endif
#if HEAD_DIM == 192 ? !defined(VALUE_DIM) || VALUE_DIM != 128 : defined(VALUE_DIM)
#error "backward_sm90: VALUE_DIM is not 128 beside 192"
#endif
#ifndef STAGES
#error "backward_sm90: STAGES is missing"
#endif
#ifndef OPTIONS
#error "backward_sm90: OPTIONS is missing"
#endif

#ifndef ORDERED
#define ORDERED 0
#endif
#ifndef DQ_BUFFERS
#define DQ_BUFFERS 1
#endif
#ifndef PERSISTENT
#define PERSISTENT 0
#endif
#ifndef JOINED
#define JOINED 0
#endif
#ifndef DQ_TRANSPOSED
#define DQ_TRANSPOSED 0
#endif
#ifndef SINGLE_TILES
#define SINGLE_TILES 0
#endif
#ifndef CHAINED
#define CHAINED 0
#endif
#ifndef ROUNDING
#define ROUNDING 0
#endif
#ifndef STATIC_SMEM
#define STATIC_SMEM 0
#endif
#ifndef COLUMNS
#define COLUMNS HEAD_DIM
#elif COLUMNS != 96 || HEAD_DIM != 128
#error "backward_sm90: COLUMNS is not 96 of 128"
#endif

#include "backward_sm90/backward_sm90.h"

#define HIDES FA_BACKWARD_SM90_HIDES(OPTIONS)

/* Whether a block's first queries and dout may be loaded with its keys. */
#define LOADS_EARLY (CHAINED || (ROUNDING && !PERSISTENT) || OPTIONS == FA_SM90_DROPOUT)

/* Whether a consumer passes its last turn on when its products have been issued, not when they are
 * complete. */
#define ENDS_EARLY                                                                                 \
    (CHAINED || (ROUNDING && !PERSISTENT) || OPTIONS == FA_SM90_DROPOUT ||                         \
     (OPTIONS == FA_SM90_BIAS && HEAD_DIM == 64))

/* Whether a dQ that is whole is rounded and stored at once, without sums in global memory. */
#define WHOLE_DQ (SINGLE_TILES || CHAINED)

/* Whether blocks may share the queries of a head (query_parts). */
#define QUERY_PARTS (!OPTIONS && !ORDERED && !CHAINED && !JOINED)

/* Whether a consumer without keys only helps with dQ (assist in consumer.cuh). */
#define ASSISTS (!OPTIONS && !PERSISTENT && !CHAINED && HEAD_DIM <= 128)

/* Whether there is a tile of a bias in shared memory. */
#define BIAS_TILE FA_BACKWARD_SM90_BIAS_TILE(HEAD_DIM, STAGES, OPTIONS)

/* Whether a bias of ELEMENT is the only option, and TMA loads it and stores dbias. */
#define BIAS_ALONE (OPTIONS == FA_SM90_BIAS)

/* Whether dropout is the only option. What it keeps of a tile is then computed right after a consumer's turn, before it waits for the
 * scores (dropout.cuh). In its turn the other consumer would wait for it as well (H200, n 2k: head dim 64 1.09, 128 0.88 of the rate
 * between scores and weights). */
#define DROPOUT_ALONE (OPTIONS == FA_SM90_DROPOUT)

/* Whether a block stores dK after its last dQ, which is added meanwhile (H200, head dim 128, causal, n 1k
 * 1.01, 28 heads of 384 1.03). With options no register is free for it. */
#define DK_LAST (PERSISTENT || !OPTIONS)

/* Whether consumers hold their keys and values in registers. */
#if DROPOUT_ALONE
#define KEYS_IN_REGISTERS (HEAD_DIM == 64)
#else
#define KEYS_IN_REGISTERS (HEAD_DIM == 64 && !OPTIONS)
#endif

/* Whether a consumer has all keys and values in registers soon after a work tile begins, so that the
 * next ones are loaded from then on. */
#define KEYS_EARLY (PERSISTENT && DQ_TRANSPOSED)

/* The order of the products of a turn. Head dim 128 with three stages: dQ first, so that it is
 * stored while dK and dV are computed. Head dim 192: the same for two thirds of dQ. */
#define DQ_FIRST ((HEAD_DIM == 128 && STAGES > 2) || HEAD_DIM == 192)

/* A consumer computes its columns of dQ in this many parts, one after the other: DQ_COLUMNS, then
 * DQ_REST. With the sums of 192 and 128 columns, registers remain for 64 columns at a time, and
 * none for 16-bit weights in addition to the 32-bit ones. */
#if HEAD_DIM == 192
#define DQ_PARTS 2
#define DQ_REST 32
#else
#define DQ_PARTS 1
#endif

/* Whether the dQ of both consumers is added together, which takes a store warp less time. With one
 * buffer a consumer would wait until the other one has filled its own. */
#define DQ_TOGETHER (ORDERED && DQ_BUFFERS > 1)

/* Whether a store warp says that the buffer of dQ is free, or has the sum of the other shares, before each use of it. It can if each
 * buffer is always served by the same warp. Otherwise a sum has a barrier of its own. */
#define GIVES_ROOM (ROUNDING && DQ_BUFFERS > 1)

/* Whether the load warp of a persistent block describes its work tiles, so that three warps store dQ. With one order of sums a store
 * warp has a turn of 4,000 to 5,000 cycles for a tile, and consumers need 1,900 (head dim 64): two warps are too few. The
 * description of work tiles with lengths of their own would spill the registers of the loop that loads. */
#define LOADER_SCHEDULES (PERSISTENT && ROUNDING)

/* Whether the log-sum-exp and delta are loaded with the queries instead of with dout: they are if
 * weights are computed before dout is needed. */
#define ROWS_WITH_Q (DQ_PARTS > 1)

/* Whether a consumer waits for dQ's buffer within its turn, after it has issued its products. If
 * sums have one order, the buffer is released late. */
#define DQ_WAITS_IN_TURN (ORDERED && DQ_FIRST)

/* Whether a consumer tests its three barriers before a turn with one branch. */
#define TESTS_TOGETHER                                                                             \
    (DQ_TRANSPOSED || (DQ_FIRST && DQ_PARTS == 1 && !ORDERED &&                                    \
                       (!OPTIONS || OPTIONS == FA_SM90_ALIBI || OPTIONS == FA_SM90_DROPOUT)))

/* Whether sums of dP begin with -delta, so that nothing needs to be loaded after the product. Dropout
 * scales dP first. */
#define DP_FROM_DELTA (DQ_FIRST && !OPTIONS)

#ifndef VALUE_DIM
#define VALUE_DIM COLUMNS
#endif
#define SUM_DIM COLUMNS /* of keys */

/* Macros, because they are parts of instructions' names: queries of a tile; columns of dQ that a
 * consumer computes. */
#define QUERIES 64
#if HEAD_DIM == 64
#define DQ_COLUMNS 32
#else
#define DQ_COLUMNS 64
#endif

#define FIRST_KEY 0 /* the keys of a work tile belong to one block */

enum {
    WARPGROUP = 128,
    WARPS = WARPGROUP / 32,
    CONSUMERS = 2,
    WORKS = PERSISTENT ? 2 : 1, /* work tiles that are described at a time */
    STORE_WARPS =
        ORDERED && (!PERSISTENT || LOADER_SCHEDULES) && DQ_PARTS == 1 ? 3 : 2, /* that store dQ */
    /* Of a consumer: of each buffer, and of each part for each store warp that serves the same
     * consumer. */
    DQ_TURNS = ORDERED ? DQ_PARTS * STORE_WARPS : 0,
    DQ_BARRIERS = DQ_TURNS > DQ_BUFFERS ? DQ_TURNS : DQ_BUFFERS,
    THREADS = FA_BACKWARD_SM90_THREADS,
    KEYS = FA_BACKWARD_SM90_KEYS,
    BLOCK_KEYS = KEYS,
    OWN_KEYS = KEYS / CONSUMERS,
    BLOCKS = HEAD_DIM / 64, /* of 64 columns: the swizzle spans 128 bytes */
    VALUE_BLOCKS = (VALUE_DIM + 63) / 64,
    Q_BLOCK = QUERIES * 128,
    KEY_BLOCK = KEYS * 128,
    Q_BYTES = BLOCKS * Q_BLOCK,
    DOUT_BYTES = VALUE_BLOCKS * Q_BLOCK,
    KEY_BYTES = BLOCKS * KEY_BLOCK,
    VALUE_BYTES = VALUE_BLOCKS * KEY_BLOCK,
    ROW_BYTES = FA_BACKWARD_SM90_ROW_BYTES,
    ROW_SLOTS = FA_BACKWARD_SM90_ROW_SLOTS(HEAD_DIM, STAGES, CHAINED),
    DS_BUFFERS = FA_BACKWARD_SM90_DS_BUFFERS(HEAD_DIM, STAGES),
    DS_BYTES = QUERIES * KEYS * 2,
    BIAS_BYTES = BIAS_TILE * DS_BYTES,
    SUM_BYTES = FA_BACKWARD_SM90_SUM_BYTES(HEAD_DIM),
    DQ_PART = FA_BACKWARD_SM90_DQ_BYTES(HEAD_DIM, BIAS_TILE) / CONSUMERS,
    SCORES = QUERIES / 2, /* of a thread */
    DK_SUMS = SUM_DIM / 2,
    DV_SUMS = VALUE_DIM / 2,
    DQ_SUMS = DQ_COLUMNS / 2,
    WHOLE_DQ_ROWS = DQ_TRANSPOSED ? QUERIES / CONSUMERS : QUERIES /* a consumer's, of 64 columns */
};
#define CLEARS_AHEAD (!WHOLE_DQ && FA_BACKWARD_SM90_CLEARS_AHEAD(ORDERED, OPTIONS, JOINED))

static_assert(!PERSISTENT || ((!ORDERED || DQ_TOGETHER) && !OPTIONS && STAGES > 2),
              "what its warps do");
static_assert(!ORDERED || !OPTIONS, "what its store warps take");
static_assert(!JOINED || (!ORDERED && !OPTIONS && !PERSISTENT), "what its blocks do");
static_assert(DQ_PARTS == 1 || (!OPTIONS && !PERSISTENT && !JOINED && STAGES == 2),
              "what has been written for it");
static_assert(!WHOLE_DQ || (!ORDERED && COLUMNS == HEAD_DIM && (HEAD_DIM == 128 || DQ_TRANSPOSED)),
              "what has been written for it");
static_assert(!SINGLE_TILES || PERSISTENT, "what has been written for it");
static_assert(!CHAINED || (!PERSISTENT && !JOINED && !OPTIONS), "what has been written for it");
static_assert(!ROUNDING || (ORDERED && (GIVES_ROOM ? DQ_BUFFERS == STORE_WARPS && DQ_TRANSPOSED
                                                   : DQ_BUFFERS == 1 && !PERSISTENT)),
              "what has been written for it");
static_assert(!DQ_TRANSPOSED || (KEYS_IN_REGISTERS && STAGES > 2 && !JOINED),
              "what has been written for it");
static_assert(!KEYS_EARLY || WORKS == 2,
              "a buffer of dS is used again behind a work tile without queries");
static_assert(CONSUMERS == FA_BACKWARD_SM90_SEMAPHORES, "one for each consumer's columns");
static_assert(QUERIES == FA_BACKWARD_SM90_QUERIES && HEAD_DIM == 64 * BLOCKS,
              "as the planner counts");

/* 168 for each of three warpgroups, at most. With a bias alone 232 are enough for consumers, and a
 * store warp has too much to keep for 24. So it is for a load warp that also describes work tiles. */
#if ((HEAD_DIM == 64 || BIAS_ALONE) && !DQ_TRANSPOSED) || LOADER_SCHEDULES
#define PRODUCER_REGISTERS 40
#define CONSUMER_REGISTERS 232
#else
#define PRODUCER_REGISTERS 24
#define CONSUMER_REGISTERS 240
#endif

#endif
