/*
 * The macros with which decode_sm90 is compiled, and what follows from them: the data of each thread, and
 * the layout of shared memory. This file replaces decode_sm80/config.cuh, and must be included before any
 * part of decode_sm80. decode_sm90.h explains the numbers of a variant.
 */
#ifndef FA_KERNELS_DECODE_SM90_CONFIG_CUH
#define FA_KERNELS_DECODE_SM90_CONFIG_CUH

#ifdef FA_KERNELS_DECODE_SM80_CONFIG_CUH
#error "include decode_sm90/config.cuh before the parts of decode_sm80"
#endif
#define FA_KERNELS_DECODE_SM80_CONFIG_CUH

#if !defined(ELEMENT) || !defined(HEAD_DIM) || !defined(GROUP_ROWS) || !defined(KEYS) ||           \
    !defined(BLOCKS)
#error                                                                                             \
    "decode_sm90: ELEMENT, HEAD_DIM, GROUP_ROWS, KEYS or BLOCKS is missing: a row of kernels/variants.h defines them"
#endif

#include "common/device.cuh"
#include "common/element.h"
#include "decode_sm90/decode_sm90.h"
#include "ptx/address.cuh"
#include "ptx/barrier.cuh"
#include "ptx/grid.cuh"
#include "ptx/thread.cuh"

/* Groups of warps of a persistent block, each of which works on one part at a time. 0: a block has one
 * part and ends. */
#ifndef GROUPS
#define GROUPS 0
#endif
#define PERSISTENT (GROUPS > 0)

/* Whether keys and values are copied by cp.async instead of TMA. */
#ifndef COPIED
#define COPIED 0
#endif

#ifdef CACHE
#define EIGHT_BITS 1
#if ELEMENT != FA_ELEMENT_FLOAT16 || (CACHE != FA_ELEMENT_FLOAT8_E4M3 && CACHE != FA_ELEMENT_INT8)
#error                                                                                             \
    "decode_sm90: CACHE must be FA_ELEMENT_FLOAT8_E4M3 or FA_ELEMENT_INT8, with ELEMENT FA_ELEMENT_FLOAT16"
#endif
#else
#define EIGHT_BITS 0
#define CACHE ELEMENT
#endif

#define FA_READ_LENGTH(at) ptx_read_latest(at)

/* Whether the second-level cache evicts keys and values first. */
#ifndef READ_ONCE
#define READ_ONCE 1
#endif

enum {
    CONSUMER_THREADS = 128,
    THREADS = PERSISTENT ? CONSUMER_THREADS : FA_DECODE_SM90_THREADS(COPIED), /* that merge */
    WARPS = THREADS / 32,
    CONSUMER_WARPS = CONSUMER_THREADS / 32, /* the producer's warps are behind them */
    ROWS = GROUP_ROWS,
    BLOCK_KEYS = KEYS,
    ALIGNED_KEYS = KEYS,                   /* key tiles begin at multiples of it */
    CACHE_BYTES = EIGHT_BITS ? 1 : 2,      /* of an element of keys and values */
    DIM_BLOCK_COLUMNS = 128 / CACHE_BYTES, /* that the swizzle spans */
    DIM_BLOCKS = HEAD_DIM / DIM_BLOCK_COLUMNS,
    /* A tile of keys or values occupies TILE_STAGES stages. Each has STAGE_DIM_BLOCKS blocks of columns
     * of all its rows. */
    STAGE_BYTES = FA_DECODE_SM90_STAGE,
    DIM_BLOCK_BYTES = KEYS * 128,
    STAGE_DIM_BLOCKS = STAGE_BYTES / DIM_BLOCK_BYTES,
    TILE_STAGES = DIM_BLOCKS / STAGE_DIM_BLOCKS,
    MOST_STAGES = FA_DECODE_SM90_STAGES / (PERSISTENT ? GROUPS : 1)
};
static_assert(HEAD_DIM % DIM_BLOCK_COLUMNS == 0, "whole blocks of columns");
static_assert(TILE_STAGES * STAGE_DIM_BLOCKS == DIM_BLOCKS, "whole stages");

/* ---- What the parts of decode_sm80 take ------------------------------------------------------ */

#define BLOCK_TILES 1        /* key tiles are the block's */
#define LATENT (!EIGHT_BITS) /* and so are sums; of 8 bits each warp has its own */
#define SHARES_ROWS 0
#define VALUE_DIM HEAD_DIM
#define FEW_ROWS 1 /* at most 32: query_of in decode_sm80/work.cuh */
static_assert(GROUP_ROWS <= 32, "factors are exact for so few rows");

enum { ROW_FLOATS = FA_DECODE_ROW(VALUE_DIM) };

#if PERSISTENT
/* Warps of consumers come first, because a warpgroup is four neighbouring warps; then a producer for each group. */
FA_DEVICE bool is_producer(void) { return ptx_thread_id() >= GROUPS * CONSUMER_THREADS; }
FA_DEVICE int group_id(void)
{
    const int number = ptx_thread_id() - GROUPS * CONSUMER_THREADS;
    return number < 0 ? ptx_thread_id() / CONSUMER_THREADS : number / 32;
}

/* Of a consumer: in its group. */
FA_DEVICE int thread_id(void) { return ptx_thread_id() % CONSUMER_THREADS; }
FA_DEVICE int consumers_barrier(void) { return 1 + ptx_thread_id() / CONSUMER_THREADS; }
#else
FA_DEVICE int thread_id(void) { return ptx_thread_id(); }
FA_DEVICE int consumers_barrier(void) { return 1; }
#endif
FA_DEVICE int lane_id(void) { return ptx_thread_id() % 32; }
FA_DEVICE int warp_id(void) { return thread_id() / 32; }
FA_DEVICE void sync_consumers(void)
{
    ptx_named_barrier_sync(consumers_barrier(), CONSUMER_THREADS);
}

/* Synchronizes all threads that merge. In a persistent block the producer is already at the next part. */
FA_DEVICE void sync_threads(void)
{
    if (PERSISTENT) sync_consumers();
    else __syncthreads();
}

#if EIGHT_BITS

/* ---- Who has what, of 8 bits: products are those of decode_sm80 ----------------------------- */

/* In the code of decode_sm80, KEYS is the number of keys of a warp. */
#undef KEYS
#define KEYS 32
#define FRAGMENT_KEYS KEYS
static_assert((int)BLOCK_KEYS == CONSUMER_WARPS * KEYS && STAGE_DIM_BLOCKS == 1, "a row a lane");

enum {
    M_TILES = 1,
    HALVES = ROWS / 8, /* of its 16 rows, that are computed */
    KEY_TILES = KEYS / 8,
    KEY_STEPS = KEYS / 16,
    D_STEPS = HEAD_DIM / 16,
    D_TILES = HEAD_DIM / 8,
    QUERY_VECTORS = HEAD_DIM / 8,
    QUERY_THREADS = CONSUMER_THREADS,
    COLUMNS_BYTES = STAGE_BYTES, /* from 128 bytes of a row to the next: a tile's stages are
                                  * neighbours */
    PITCH = 128,
    WARP_TILE = KEYS * PITCH, /* a warp's rows of a stage */
    QUERY_BYTES = FA_DECODE_QUERIES_8BIT(HEAD_DIM, 16 * M_TILES),
    SCALE_BYTES = FA_DECODE_SM90_SCALES, /* of a stage */
    SUMS = CONSUMER_WARPS                /* that a block leaves, over different keys */
};
static_assert(ROWS == 8 || ROWS == 16, "halves of a fragment");
static_assert((int)SCALE_BYTES == 4 * BLOCK_KEYS, "a scale for each key");
static_assert(4 * SUMS * ROWS * ROW_FLOATS <= STAGES * STAGE_BYTES, "room for the warps' sums");
static_assert(4 * ROWS * (SUMS + 2) <= QUERY_BYTES, "room for the warps' factors and the rows'");

/*
 * TMA swizzles the vectors of a row by the last three bits of its number. decode_sm80 uses the same bits
 * in another order, so that loads of keys have no bank conflicts. So a warp takes each eight keys in
 * another order: row r of a product is key turn_of(r) of the eight. Masks and scales find the key of an
 * element by key_of.
 */
FA_DEVICE int turn_of(int row) { return row % 2 * 4 + row / 2 % 4; }

/* Where a vector of row r of the products is in a warp's tile. */
FA_DEVICE uint32_t vector_at(int row, int vector)
{
    const int turn = turn_of(row);
    return (uint32_t)((row / 8 * 8 + turn) * PITCH + (vector ^ turn) * 16);
}

/* Of 8 keys of S, the one that a lane has in its element e, 0 or 1: turn_of(2t + e). */
FA_DEVICE int key_of(int e) { return lane_id() % 4 + 4 * e; }

#else

/* ---- Who has what, of 16 bits ---------------------------------------------------------------- */

/* Instead of decode_sm80/fragments.cuh. */
#define FA_KERNELS_DECODE_SM80_FRAGMENTS_CUH

enum {
    ROW_GROUPS = ROWS / 8,  /* columns of a product: eight rows each */
    KEY_BLOCKS = KEYS / 64, /* a product has 64 rows: keys, or a block of the values' columns */
    KEY_STEPS = KEYS / 16,
    SCORES = KEY_BLOCKS * ROWS / 2, /* of a thread */
    OUTPUTS = DIM_BLOCKS * ROWS / 2,
    SUMS = 1,                       /* that a block leaves, over different keys */
    QUERY_BLOCK_BYTES = ROWS * 128, /* 64 columns of all rows: of queries, or of weights */
    QUERY_BYTES = DIM_BLOCKS * QUERY_BLOCK_BYTES,
    WEIGHT_BYTES = KEY_BLOCKS * QUERY_BLOCK_BYTES, /* of a buffer */
    WEIGHT_BUFFERS = 2
};
static_assert(ROWS == 8 || ROWS == 16 || ROWS == 32,
              "columns of the products that ptx/wgmma.cuh has");
static_assert(KEYS % 64 == 0, "whole products");
static_assert(4 * ROWS * ROW_FLOATS <= 3 * STAGE_BYTES, "room for the block's sums");
static_assert(4 * ROWS * 3 <= QUERY_BYTES, "room for the rows' factors");

/*
 * Products are transposed: S^T = K Q^T and O^T = V^T P^T. With g = lane / 4 and t = lane % 4, a thread of
 * warp w has the rows 8j + 2t + e (e 0 or 1) of the work tile. In S^T it has these rows for the keys
 * 64m + 16w + g + 8h, in [m][4j + 2h + e]; in O^T for the columns with the same numbers.
 */
FA_DEVICE int row_of(int j, int e) { return 8 * j + lane_id() % 4 * 2 + e; }
FA_DEVICE int first_of_block(void) { return 16 * warp_id() + lane_id() / 4; }

/* The place of 16 bytes of a row in a block of 64 columns, with TMA's 128-byte swizzle. */
FA_DEVICE uint32_t swizzled(int row, int vector)
{
    return (uint32_t)(row * 128 + (vector ^ row % 8) * 16);
}
#endif

#endif
