/*
 * The macros with which forward_sm90 is compiled, and the sizes that follow from them. A row of kernels/variants.h
 * gives
 *
 *     ELEMENT       FA_ELEMENT_FLOAT16 or FA_ELEMENT_BFLOAT16: of queries, keys, values and outputs
 *     HEAD_DIM      the widest head dim of queries and keys, a multiple of 16
 *     VALUE_DIM     the widest head dim of values, a multiple of 16
 *     OPTIONS       bits FA_SM90_SOFTCAP ... of the options that change scores or weights. All bits: each option may
 *                   be used or not; one bit: only this option is used; 0: only masks by position and lengths
 *     CLUSTER       1 (forward_sm90_wide has its own config.cuh)
 *     CONSUMERS     warpgroups that compute, 64 queries each
 *     KEYS          of a key tile, a multiple of 16
 *     STAGES        of keys, and of values
 *     Q_STAGES      of queries
 *     SINGLE_TILES  1: only for rows whose keys are one tile
 *     BESIDE        1: the launch runs at the same time as the previous one; may be left out
 *     OVERLAPPED    1: a work tile starts before the previous one ends; may be left out
 *     SPLIT         1: a work tile has a part of the keys that its queries see, and leaves sums in the workspace, which
 *                   merge.cu merges; may be left out
 *     COPIED        1: keys and values are copied by a warpgroup of its own, from pages of any size (copy.cuh); may be
 *                   left out
 */
#ifndef FA_KERNELS_FORWARD_SM90_CONFIG_CUH
#define FA_KERNELS_FORWARD_SM90_CONFIG_CUH

#ifndef ELEMENT
#error "forward_sm90: ELEMENT is missing"
#endif
#ifndef HEAD_DIM
#error "forward_sm90: HEAD_DIM is missing"
#endif
#ifndef VALUE_DIM
#error "forward_sm90: VALUE_DIM is missing"
#endif
#ifndef OPTIONS
#error "forward_sm90: OPTIONS is missing"
#endif
#ifndef CLUSTER
#error "forward_sm90: CLUSTER is missing"
#endif
#ifndef CONSUMERS
#error "forward_sm90: CONSUMERS is missing"
#endif
#ifndef KEYS
#error "forward_sm90: KEYS is missing"
#endif
#ifndef STAGES
#error "forward_sm90: STAGES is missing"
#endif
#ifndef Q_STAGES
#error "forward_sm90: Q_STAGES is missing"
#endif
#ifndef SINGLE_TILES
#error "forward_sm90: SINGLE_TILES is missing"
#endif

#ifndef TRACKED
#error "forward_sm90: TRACKED is missing"
#endif

#ifndef ROUNDED
#define ROUNDED 0
#endif

#include "common/dialect.h"
#include "common/element.h"
#include "forward_sm90/forward_sm90.h"

static_assert(CLUSTER == 1, "forward_sm90_wide is the kernel for clusters");

#define FIRST_COLUMN 0     /* of the outputs that a block computes */
#define FRAGMENT_KEYS KEYS /* of a tile, whose scores a block computes */
#define OUT_BUFFER FA_SM90_OUT_BUFFER(HEAD_DIM, CONSUMERS)

#ifndef BESIDE
#define BESIDE 0
#endif

#ifndef COPIED
#define COPIED 0
#endif
#if COPIED
#define WARPGROUPS_BESIDES_PRODUCER (CONSUMERS + 1)
#else
#define WARPGROUPS_BESIDES_PRODUCER CONSUMERS
#endif

#ifndef SPLIT
#define SPLIT 0
#endif
#if SPLIT /* heads that share query tiles have different slopes and biases, and merge.cu knows no dropout */
static_assert((OPTIONS & ~FA_SM90_SOFTCAP) == 0, "other options depend on a row's head");
#endif

/* Whether an option may hide values that products nevertheless read. */
#define HIDES_VALUES (OPTIONS & (FA_SM90_BIAS | FA_SM90_BY_ROWS))

/* Whether the log-sum-exp of recomputed rows may be wrong. */
#define RECOMPUTES_LSE ROUNDED

/* Whether sinks need no log-sum-exp. Float32 results take the log-sum-exp, which is more exact. */
#define HAS_FAST_SINKS (!ROUNDED)

/* Whether a row's sum of weights has a second number with its rounding errors. */
#define EXACT_SUMS 0

/* Whether the bases of rows are logits instead of exponents of 2. */
#define NATURAL_BASES 0

/* Whether the bias of a tile is loaded before its scores are issued. */
#define BIAS_AHEAD (OPTIONS == FA_SM90_BIAS)

/* Whether warpgroups choose between plain tiles that are tracked and plain tiles that are not (softmax.cuh). */
#define ADAPTIVE (!TRACKED && !SINGLE_TILES)

/* Whether a series may replace a softcap's tanh (options.cuh). */
#define HAS_SERIES (OPTIONS == FA_SM90_SOFTCAP)

/* The series' range, tanh at its end, and the coefficients that minimize the largest error in it. */
#if ELEMENT == FA_ELEMENT_FLOAT16
#define SERIES_END 0.4f
#define SERIES_TOP 0.37995f
#define SERIES_FIRST 0.99997873f
#define SERIES_THIRD (-0.33224984f)
#define SERIES_FIFTH 0.11939619f
#else
#define SERIES_END 0.6f
#define SERIES_TOP 0.53705f
#define SERIES_FIRST 0.99979330f
#define SERIES_THIRD (-0.32854850f)
#define SERIES_FIFTH 0.10490422f
#endif
#define SERIES_LOW 0.63515f /* tanh(0.75) */

/* Whether there is a series for calls that ask for the log-sum-exp. Above head dim 192 its loops make those without it 3 to 5% slower. */
#define HAS_EXACT_SERIES (HAS_SERIES && HEAD_DIM <= 192)

/* The range and coefficients of this series. Its error is 2.8e-6. */
#define EXACT_END 1.0f
#define EXACT_TOP 0.76159f
#define EXACT_FIRST 0.99996847f
#define EXACT_THIRD (-0.33265823f)
#define EXACT_FIFTH 0.12922067f
#define EXACT_SEVENTH (-0.04329986f)
#define EXACT_NINTH 0.00836589f
#define EXACT_LOW EXACT_TOP

/* Whether the kernel has the dynamic schedule. Recomputing rows needs to know the block's tasks, so such kernels do not
 * have it. */
#if ROUNDED
#define DYNAMIC 0
#else
#define DYNAMIC (!HIDES_VALUES && FA_SM90_HAS_DYNAMIC(CONSUMERS, HEAD_DIM))
#endif

/* Whether a block takes a task behind a long work tile late (scheduler.cuh). */
#define TAKES_LATE (DYNAMIC && !SINGLE_TILES)

/* Key tiles of a long one. Tests have shorter ones. */
#ifndef LONG_WORK_TILE
#define LONG_WORK_TILE 4
#endif

/* Whether the last heads may have a balanced schedule. */
#define BALANCED (!SPLIT)
#define ALTERNATES 0 /* without a balanced schedule */

/* Whether the scheduler describes work tiles before the block's barriers have been initialized. A launch beside another
 * one reads lengths, for which it waits (forget_older_copies). */
#define DESCRIBES_FIRST (!BESIDE)

/* Accumulators of the outputs in a thread. */
#define OUTPUTS (VALUE_DIM / 2)

#if ROUNDED
#define STORES_THROUGH_BUFFER 0
#else
#define STORES_THROUGH_BUFFER (OUT_BUFFER > 0 && VALUE_DIM % 64 == 0)
#endif

enum {
    WARPGROUP = 128,
    WARPS = WARPGROUP / 32,
    THREADS = FA_SM90_THREADS(WARPGROUPS_BESIDES_PRODUCER),
    QUERIES = FA_SM90_QUERIES(CONSUMERS),
    ROWS = 64,          /* queries of a consumer */
    BLOCK_COLUMNS = 64, /* the swizzle spans 128 bytes */
    K_BLOCKS = FA_SM90_ROW_BYTES(HEAD_DIM, ELEMENT) / 128,
    V_BLOCKS = FA_SM90_ROW_BYTES(VALUE_DIM, ELEMENT) / 128,
    Q_BLOCK = ROWS * 128, /* bytes of one block of columns of a consumer's queries */
    KV_BLOCK = KEYS * 128,
    Q_BYTES = K_BLOCKS * Q_BLOCK,
    K_BYTES = K_BLOCKS * KV_BLOCK,
    V_BYTES = V_BLOCKS * KV_BLOCK,
    BIAS_BLOCK = ROWS * 128, /* 64 columns of the bias of a consumer's tile */
    BIAS_BYTES = KEYS / 64 * BIAS_BLOCK,
    QUEUE_ENTRIES = FA_SM90_QUEUE_ENTRIES(HEAD_DIM, VALUE_DIM),
    WORK_TILES_AHEAD = 4, /* the most that are described and have not ended */
    LAST_KEY_TILES = 2,   /* of a long work tile: while they are loaded, the next task is taken */
    TASK_NONE = -1,       /* instead of a task: scheduler.cuh */
    TASK_END = -2
};

/* Registers of a thread that loads, and of one that computes. */
#if COPIED && HEAD_DIM > 128
#define PRODUCER_REGISTERS 32
#define CONSUMER_REGISTERS 224
#elif COPIED
#define PRODUCER_REGISTERS 40
#define CONSUMER_REGISTERS 216
#elif CONSUMERS == 3
#define PRODUCER_REGISTERS 32
#define CONSUMER_REGISTERS 160
#else
#define PRODUCER_REGISTERS 40
#define CONSUMER_REGISTERS 232
#endif

/* Whether a work tile starts before the previous one ends: consumer.cuh. With options it was measured for head dim 64 only; split
 * keys have variants of both kinds at head dim 128. */
#ifndef OVERLAPPED
#define OVERLAPPED (Q_STAGES > 1 && (HEAD_DIM <= 64 || (OPTIONS == 0 && !SPLIT)))
#endif

/* Counts how often a warp's tiles take each path through the softmax: for tests, which define it. */
#ifndef COUNT_PATH
#define COUNT_PATH(path) (void)0
#endif

#endif
