/*
 * The numbers of a variant (kernels/variants.h), which decode_sm80.h explains, and constants that
 * follow from them: parts of threads, and places in shared memory.
 */
#ifndef FA_KERNELS_DECODE_SM80_CONFIG_CUH
#define FA_KERNELS_DECODE_SM80_CONFIG_CUH

#include "common/dialect.h"
#include "common/element.h"
#include "decode_sm80/decode_sm80.h"

#if !defined(ELEMENT) || !defined(HEAD_DIM) || !defined(GROUP_ROWS) || !defined(WARPS)
#error                                                                                             \
    "decode_sm80: ELEMENT, HEAD_DIM, GROUP_ROWS or WARPS is missing: a row of kernels/variants.h defines them"
#endif
#if !defined(KEYS) || !defined(STAGES) || !defined(BLOCKS) || !defined(OPTIONS)
#error                                                                                             \
    "decode_sm80: KEYS, STAGES, BLOCKS or OPTIONS is missing: a row of kernels/variants.h defines them"
#endif
#ifdef CACHE
#define EIGHT_BITS 1
#if ELEMENT != FA_ELEMENT_FLOAT16 || (CACHE != FA_ELEMENT_FLOAT8_E4M3 && CACHE != FA_ELEMENT_INT8)
#error                                                                                             \
    "decode_sm80: CACHE must be FA_ELEMENT_FLOAT8_E4M3 or FA_ELEMENT_INT8, with ELEMENT FA_ELEMENT_FLOAT16"
#endif
#else
#define EIGHT_BITS 0
#define CACHE ELEMENT
#endif
#ifdef VALUE_DIM
#define LATENT 1
#else
#define LATENT 0
#define VALUE_DIM HEAD_DIM
#endif
#if ELEMENT != FA_ELEMENT_FLOAT16 && ELEMENT != FA_ELEMENT_BFLOAT16
#error "decode_sm80: ELEMENT must be FA_ELEMENT_FLOAT16 or FA_ELEMENT_BFLOAT16"
#endif

enum {
    THREADS = FA_DECODE_THREADS(WARPS),
    ROWS = GROUP_ROWS,
    M_TILES = ROWS / 16,
    D_STEPS = HEAD_DIM / 16, /* of mma along the head dim in Q K^T */
    KEY_STEPS = KEYS / 16,   /* of mma along the keys in P V */
#if LATENT             /* warps share key tiles: each computes some keys' scores and some columns */
    BLOCK_KEYS = KEYS, /* of a key tile of the block */
    D_TILES = VALUE_DIM / WARPS / 8, /* of 8 columns of the output, of a warp */
    KEY_TILES = KEYS / WARPS / 8,    /* of 8 columns of the scores, of a warp */
#else
    BLOCK_KEYS = WARPS * KEYS,
    D_TILES = HEAD_DIM / 8,
    KEY_TILES = KEYS / 8,
#endif
#if EIGHT_BITS
    CACHE_BYTES = 1, /* of an element of keys and values */
    PITCH = HEAD_DIM,
    TILE_BYTES = FA_DECODE_TILE_8BIT(HEAD_DIM, KEYS),
    QUERY_BYTES = FA_DECODE_QUERIES_8BIT(HEAD_DIM, ROWS),
#else
    CACHE_BYTES = 2,
    PITCH = FA_DECODE_PITCH(HEAD_DIM, ELEMENT),
    TILE_BYTES = KEYS * PITCH,
    QUERY_BYTES = LATENT ? FA_DECODE_EXCHANGE(ROWS, KEYS, WARPS) : ROWS * PITCH,
#endif
#if LATENT
    STAGE_BYTES = STAGES * TILE_BYTES, /* of the block */
#else
    WARP_BYTES = 2 * STAGES * TILE_BYTES, /* a warp's stages: of keys, then of values */
    STAGE_BYTES = WARPS * WARP_BYTES,
#endif
    ALIGNED_KEYS = KEYS,     /* key tiles begin at multiples of it */
    QUERY_THREADS = THREADS, /* that load queries of 8-bit caches */
    COLUMNS_BYTES = 128,     /* from 128 bytes of a row of these to the next */
    ROW_FLOATS = FA_DECODE_ROW(VALUE_DIM),
    VECTOR = 16 / CACHE_BYTES,       /* elements of keys and values in 16 bytes */
    ROW_VECTORS = HEAD_DIM / VECTOR, /* of 16 bytes in a row of keys or values */
    QUERY_VECTORS = HEAD_DIM / 8     /* in a row of queries */
};
static_assert(ROWS % 16 == 0 && KEYS % 16 == 0 && HEAD_DIM % 16 == 0, "whole fragments");
#if LATENT
static_assert(GROUP_ROWS == 16 && KEYS == 8 * WARPS, "a warp has one tile of scores");
static_assert(HEAD_DIM % 64 == 0 && VALUE_DIM % (16 * WARPS) == 0, "whole fragments");
static_assert(4 * ROWS * ROW_FLOATS <= STAGE_BYTES, "room for the block's sums");
#else
static_assert(32 % ROW_VECTORS == 0, "whole rows a pass");
static_assert(4 * ROWS * ROW_FLOATS <= WARP_BYTES, "room for a warp's sums");
#endif
static_assert(4 * ROWS * FA_DECODE_PARTS <= STAGE_BYTES, "room for the parts' factors");
static_assert(4 * ROWS * (WARPS + 2) <= QUERY_BYTES, "room for the warps' factors and the rows'");

/* Fragments of Q, 16 x 16 elements each, stay in registers if there are at most eight. */
#define QUERIES_IN_REGISTERS (GROUP_ROWS * HEAD_DIM <= 8 * 256)

/* For score_fragments.cuh. */
#define FRAGMENT_KEYS (8 * KEY_TILES)

#include "common/device.cuh"
#include "ptx/address.cuh"
#include "ptx/thread.cuh"

/* Whether all warps of a block share its key tiles; otherwise each warp has its own. */
#define BLOCK_TILES LATENT

FA_DEVICE int lane_id(void) { return ptx_thread_id() % 32; }
FA_DEVICE int warp_id(void) { return ptx_thread_id() / 32; }

/* The threads that merge: all threads of a block, which has all rows of a work tile. */
#define SHARES_ROWS 0
FA_DEVICE int thread_id(void) { return ptx_thread_id(); }
FA_DEVICE void sync_threads(void) { __syncthreads(); }

/* The key, of 8 keys of S, in a lane's element e, 0 or 1. */
FA_DEVICE int key_of(int e) { return lane_id() % 4 * 2 + e; }

/* The swizzle of a row of 8-bit elements: the number of a vector is changed by an exclusive or with
 * this. In adjacent rows a vector is in different halves of 128 bytes (for the loads of keys); in
 * eight rows all its positions differ (for ldmatrix). */
FA_DEVICE int turn_of(int row) { return HEAD_DIM == 64 ? row / 2 % 4 : row % 2 * 4 + row / 2 % 4; }

/* The position of a vector of a row in a tile of keys or values. Rows of 16-bit elements have no
 * swizzle, but end with 16 unused bytes. */
FA_DEVICE uint32_t vector_at(int row, int vector)
{
    return (uint32_t)(row * PITCH + (EIGHT_BITS ? vector ^ turn_of(row) : vector) * 16);
}

/* The offset that this lane passes to ldmatrix for the fragments of a tile's first 16 rows and
 * columns. For A and the transposed V, the order of the 8 x 8 matrices is first down and then
 * across; for K it is the other way round. */
FA_DEVICE uint32_t value_lane(void)
{
    return (uint32_t)(lane_id() % 16 * PITCH + lane_id() / 16 * 16);
}

FA_DEVICE uint32_t key_lane(void)
{
    return (uint32_t)((lane_id() % 8 + lane_id() / 16 * 8) * PITCH + lane_id() / 8 % 2 * 16);
}

/* Addresses in shared memory: of the block's queries and of the warp's stages. With latent
 * attention: of the warps' exchange area, and of the block's stages. */
typedef struct fa_memory {
    uint32_t q, k, v;
} fa_memory;

FA_DEVICE fa_memory find_memory(const void *memory)
{
    fa_memory at;
    at.q = ptx_shared_address(memory);
#if LATENT
    at.k = at.v = at.q + (uint32_t)QUERY_BYTES;
#else
    at.k = at.q + (uint32_t)(QUERY_BYTES + warp_id() * WARP_BYTES);
    at.v = at.k + STAGES * TILE_BYTES;
#endif
    return at;
}

#endif
