/*
 * The compile-time parameters of backward_sm90_wide, and constants that follow from them. This file
 * replaces backward_sm90/config.cuh, and is included before any part of backward_sm90. A row of
 * kernels/variants.h gives
 *
 *     ELEMENT    FA_ELEMENT_FLOAT16 or FA_ELEMENT_BFLOAT16: of all tensors
 *     HEAD_DIM   192 or 256: the widest head dim of queries and keys
 *     VALUE_DIM  a multiple of 64: the widest of values
 *     Q_STAGES   buffers of query tiles
 *     STAGES     buffers of their dout
 *     CLUSTER    2 blocks, which go through the same query tiles and exchange dS: each computes dQ
 *                of both blocks' keys, in half of the columns
 *     OPTIONS    0: only masks by position and lengths; FA_SM90_DROPOUT: the same with dropout;
 *                FA_SM90_SOFTCAP: with a softcap;
 *                FA_SM90_BIAS: a bias of ELEMENT whose pairs of keys can be loaded at once;
 *                FA_SM90_ALL: each option may be present or not
 *     ORDERED    1: for sums of dQ in one order; other variants support it too, but slower
 *     PERSISTENT 1: clusters stay on their multiprocessors and take work tile after work tile. Then the
 *                next work tile's loads and its first products run beside the last dQ and the stores of
 *                dK and dV. Where sums have one order
 */
#ifndef FA_KERNELS_BACKWARD_SM90_WIDE_CONFIG_CUH
#define FA_KERNELS_BACKWARD_SM90_WIDE_CONFIG_CUH

#ifdef FA_KERNELS_BACKWARD_SM90_CONFIG_CUH
#error "include backward_sm90_wide/config.cuh before the parts of backward_sm90"
#endif
#define FA_KERNELS_BACKWARD_SM90_CONFIG_CUH
#define BACKWARD_SM90_WIDE

#include "common/device.cuh"
#include "common/element.h"

#ifndef ELEMENT
#error "backward_sm90_wide: ELEMENT is missing"
#endif
#if !defined(HEAD_DIM) || (HEAD_DIM != 192 && HEAD_DIM != 256)
#error "backward_sm90_wide: HEAD_DIM is neither 192 nor 256"
#endif
#ifndef VALUE_DIM
#error "backward_sm90_wide: VALUE_DIM is missing"
#endif
#ifndef STAGES
#error "backward_sm90_wide: STAGES is missing"
#endif
#if !defined(CLUSTER) || CLUSTER != 2
#error "backward_sm90_wide: CLUSTER is not 2"
#endif
#ifndef Q_STAGES
#error "backward_sm90_wide: Q_STAGES is missing"
#endif
#ifndef OPTIONS
#error "backward_sm90_wide: OPTIONS is missing"
#endif

#ifndef ORDERED
#define ORDERED 0
#endif
#ifndef PERSISTENT
#define PERSISTENT 0
#endif
#ifndef STATIC_SMEM
#define STATIC_SMEM 0
#endif

#include "backward_sm90_wide/backward_sm90_wide.h"

#define SUM_DIM HEAD_DIM /* of keys */
#define HIDES FA_BACKWARD_SM90_HIDES(OPTIONS)
#define LOADS_EARLY (!HIDES && !PERSISTENT)
#define CLEARS_AHEAD FA_BACKWARD_SM90_CLEARS_AHEAD(ORDERED, OPTIONS, 0)
#define BIAS_TILE 0
#define BIAS_ALONE (OPTIONS == FA_SM90_BIAS)
#define DROPOUT_ALONE (OPTIONS == FA_SM90_DROPOUT)
#define SOFTCAP_ALONE (OPTIONS == FA_SM90_SOFTCAP)

/* Whether what a tile's options need is found while its products run. */
#define OPTIONS_EARLY (BIAS_ALONE || DROPOUT_ALONE)
#define LOADER_SCHEDULES 0

/* Whether a warp of its own takes the turns of dQ if sums have one order (dq.cuh). At head dim 256 it
 * would make sums in any order 2% slower. */
#define TURNS_APART (HEAD_DIM == 192 || ORDERED)

/* Whether the last tile is apart from the loop over tiles, which then issues no product behind it that is
 * not used (H200: head dim 256 full n 4k 1.04, causal 1.00, n 1k 1.005; 192 full n 4k 0.985, causal 1.00, n 1k
 * 1.01). In a persistent block that product would read what the next work tile's loads write. */
#define LAST_APART (PERSISTENT || (HEAD_DIM == 256 && OPTIONS != FA_SM90_ALL))

/* Whether descriptors of keys, and of values and the only stage of dout, stay in uniform registers
 * (multiply.cuh). There is room for those of 192 columns. */
#define PINS (!HIDES && HEAD_DIM == 192 && VALUE_DIM == HEAD_DIM && STAGES == 1)

/* The block's number in its cluster, and the other block. */
#define THIS_BLOCK ((int)(blockIdx.x % CLUSTER))
#define PEER_BLOCK (THIS_BLOCK ^ 1)

/* The first block of 64 columns of the peer's keys that this block loads. */
#define PEER_FIRST (THIS_BLOCK * (BLOCKS - PEER_BLOCKS))

/* The block's first key, counted from the cluster's first. */
#define FIRST_KEY (THIS_BLOCK * BLOCK_KEYS)

/* Macros, because they are parts of instructions' names: queries of a tile; columns of dQ that are
 * computed at once; at head dim 192, the columns that each block of a cluster has in addition to
 * these. */
#define QUERIES 64
#define DQ_COLUMNS 64
#define DQ_REST 32

enum {
    WARPGROUP = 128,
    WARPS = WARPGROUP / 32,
    THREADS = FA_BACKWARD_SM90_WIDE_THREADS,
    BLOCK_KEYS = FA_BACKWARD_SM90_WIDE_KEYS,
    KEYS = CLUSTER * BLOCK_KEYS, /* of a cluster, whose blocks share a work tile */
    LOAD_WARPS = 2,
    WORKS = PERSISTENT ? 2 : 1, /* work tiles that are described at a time */
    CONSUMERS = CLUSTER, /* that share the keys: all warpgroups of a block work on the same ones */
    OWN_KEYS = BLOCK_KEYS,
    PEER_BLOCKS = FA_BACKWARD_SM90_WIDE_PEER_BLOCKS,
    BLOCKS = HEAD_DIM / 64, /* of 64 columns: the swizzle spans 128 bytes */
    VALUE_BLOCKS = VALUE_DIM / 64,
    Q_BLOCK = QUERIES * 128,
    KEY_BLOCK = BLOCK_KEYS * 128,
    Q_BYTES = BLOCKS * Q_BLOCK,
    DOUT_BYTES = VALUE_BLOCKS * Q_BLOCK,
    ROW_BYTES = FA_BACKWARD_SM90_ROW_BYTES,
    WEIGHT_BYTES = FA_BACKWARD_SM90_WIDE_WEIGHT_BYTES,
    DS_BUFFERS = FA_BACKWARD_SM90_WIDE_DS_BUFFERS,
    DS_BYTES = QUERIES * KEYS * 2, /* a block of columns from each block of the cluster */
    SUM_BYTES = FA_BACKWARD_SM90_SUM_BYTES(HEAD_DIM),
    SCORES = QUERIES / 2, /* of a thread */
    DK_SUMS = HEAD_DIM / 2,
    DV_SUMS = VALUE_DIM / 2,
    DQ_SUMS = DQ_COLUMNS / 2,
    REST_SUMS = DQ_REST / 2
};
static_assert(Q_STAGES > 1 && DOUT_BYTES <= Q_BYTES,
              "the gradient of values is stored through a stage that nobody reads");
static_assert(!ORDERED || !OPTIONS, "what has been measured");
static_assert(!PERSISTENT || (ORDERED && STAGES == 1),
              "nobody clears sums; values are free when the last stage of dout is (load.cuh)");
static_assert(QUERIES == FA_BACKWARD_SM90_QUERIES && DK_SUMS == 32 * BLOCKS,
              "as the planner counts");

/* Registers of a thread of each warpgroup: together 4 * 128, with which the block starts. */
#define PRODUCER_REGISTERS (HEAD_DIM == 256 ? 24 : 40) /* 192: a load warp describes work tiles */
#if HEAD_DIM == 256
#define DQ_REGISTERS 64
#define DK_REGISTERS (HIDES ? 208 : 216)
#define DV_REGISTERS (HIDES ? 216 : 208)
#else
#define DQ_REGISTERS 80
#define DK_REGISTERS 192
#define DV_REGISTERS 200
#endif
static_assert(PRODUCER_REGISTERS + DV_REGISTERS + DK_REGISTERS + DQ_REGISTERS <= 512,
              "all there are");

#endif
