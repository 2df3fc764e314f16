/*
 * The part of config.cuh for keys and values of 8 bits, whose products are those of decode_sm80: a
 * tile has rows of four warps, and each warp multiplies its own.
 */
#ifndef FA_KERNELS_DECODE_SM90_BYTES_CONFIG_CUH
#define FA_KERNELS_DECODE_SM90_BYTES_CONFIG_CUH

#include "decode_sm90/config.cuh"

#if EIGHT_BITS
/* In the parts of decode_sm80 KEYS are those of a warp. */
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

#include "decode_sm80/fragments.cuh"

/*
 * TMA swizzles the vectors of a row by its last three bits, and decode_sm80 by the same bits in
 * another order, so that the loads of keys meet no bank twice. So a warp takes the keys of eight in
 * another order: row r of a product is key turn_of(r) of them, and what has an order of its own,
 * masks and scales, asks key_of.
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
#endif

#endif
