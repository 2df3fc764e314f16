/*
 * Which part of a block's work a thread has, and where data are in shared memory.
 *
 * SPLIT warps share GROUP_ROWS keys. Each computes the scores of its share of a tile's queries, and
 * its share of the columns of dK and dV.
 *
 * Units of 16 bytes of a row are permuted, so that ldmatrix, which reads one unit of eight rows,
 * accesses every bank once. In rows of 128 bytes and multiples of them, unit u of row r is at u ^
 * r % 8; in rows of 64 bytes, at u ^ r / 2 % 4.
 */
#ifndef FA_KERNELS_BACKWARD_SM80_LAYOUT_CUH
#define FA_KERNELS_BACKWARD_SM80_LAYOUT_CUH

#include "backward_sm80/config.cuh"
#include "backward_sm80/sums.cuh"
#include "common/device.cuh"
#include "common/params.h"
#include "ptx/address.cuh"
#include "ptx/barrier.cuh"
#include "ptx/thread.cuh"

/* Where the buffers begin. */
enum {
    K_AT = 0,
    V_AT = K_AT + KEY_BYTES,
    Q_AT = V_AT + KEY_BYTES,
    DOUT_AT = Q_AT + (BESIDE_KEYS ? 0 : Q_BUFFERS * Q_BYTES),
    Q_TO_DOUT = DOUT_AT - Q_AT, /* of the same stage */
    ROWS_AT = DOUT_AT + (BOTH_BESIDE_KEYS ? 0 : Q_BUFFERS * Q_BYTES),
    FACTORS_AT = ROWS_AT + STAGES * ROW_BYTES,
    DS_AT = FACTORS_AT + STAGES * FACTOR_BYTES,
    WEIGHTS_AT = DS_AT + FA_BACKWARD_SM80_ROOM(ELEMENT, DS_BUFFERS) * SCORE_BYTES,
    /* With a warp's own parts, if warps share keys, dS for dK has its own buffer. */
    KEY_DS_AT = WEIGHTS_AT + SCORE_BYTES,
    /* With wide heads, dS for dQ has its own buffer, and parts of scores are stored before there
     * are weights and dS. */
    DQ_DS_AT = WEIGHTS_AT + SCORE_BYTES,
    SLICES_AT = DS_AT,
    POWERS_AT =
        DS_AT + FA_BACKWARD_SM80_SCORES(ELEMENT, KEYS, QUERIES, WARPS, GROUP_ROWS, STAGES, SLICES),
    LARGEST_AT = POWERS_AT + FA_BACKWARD_SM80_POWERS(ELEMENT, KEYS, QUERIES, STAGES),
    OWN_FACTORS_AT = LARGEST_AT + FA_BACKWARD_SM80_LARGEST(KEYS, QUERIES, SLICES)
};
static_assert(OWN_FACTORS_AT +
                      FA_BACKWARD_SM80_OWN_FACTORS(ELEMENT, KEYS, QUERIES, WARPS, GROUP_ROWS,
                                                   STAGES, SLICES) +
                      128 ==
                  SMEM_BYTES,
              "as the planner counts");
static_assert(DS_AT % 128 == 0, "whole groups of banks");
static_assert(!SHARED_SCORES || DQ_DS_AT + SCORE_BYTES <= POWERS_AT,
              "weights and dS fit where parts of scores were");

/* Powers of two of float16 parts (high_low.cuh): the factors that turn parts into numbers again.
 * From POWERS_AT on: those of each key and its value, then those of each query of a stage and its
 * dout. */
enum { KEY_POWERS = 0, QUERY_POWERS = KEYS * 8, QUERY_POWER_BYTES = QUERIES * 8 };

/* Factors of sums of products when they are added to a gradient (own_parts.cuh). From
 * OWN_FACTORS_AT on: of dS for dQ, for each query and group of keys; then of weights, and of dS for
 * dK, for each key and 16 queries. */
enum {
    DS_FACTOR_BYTES = GROUPS * QUERIES * 4,
    DS_FACTORS_AT = OWN_FACTORS_AT,
    WEIGHT_FACTORS_AT = DS_FACTORS_AT + DS_BUFFERS * DS_FACTOR_BYTES
};

/* From LARGEST_AT on: for each key, the largest numbers of its row in each tile of 8 queries, of
 * weights, then of dS; for each query, those of dS in each half of the keys, which one warp has;
 * then the factors of sums of products for rows of dV, dK and dQ. */
enum {
    TILES_ACROSS = QUERIES / 8,
    TILES_DOWN = KEYS / 16,
    KEY_LARGEST = 0,
    QUERY_LARGEST = KEY_LARGEST + 2 * KEYS * TILES_ACROSS * 4,
    DV_FACTORS = QUERY_LARGEST + QUERIES * 8,
    DK_FACTORS = DV_FACTORS + KEYS * 4,
    DQ_FACTORS = DK_FACTORS + KEYS * 4
};

/* A thread's part. Offsets are those that a lane passes to ldmatrix for the first fragment of a
 * tile: of 8 x 8 matrices in the order first down and then across (a), or first across and then
 * down (b). */
typedef struct fa_layout {
    uint32_t memory;           /* the address of shared memory, in whole groups of banks */
    uint32_t a, b;             /* for rows of PITCH bytes */
    uint32_t score_a, score_b; /* for rows of SCORE_PITCH bytes */
    /* For queries: if a warp has 8, of four matrices side by side; otherwise like b. */
    uint32_t q;
    int lane, warp, group, share; /* share: the warp's number in its group */
} fa_layout;

/* Whether rows of a tensor consist of whole, aligned vectors of 16 bytes. */
FA_DEVICE bool has_vectors(const fa_kernel_view *view)
{
    return HIGH_LOW ? view->vector != 0 : view->vector == 8;
}

/* The position of unit u of row r, in its group of eight. */
FA_DEVICE uint32_t permuted(int row, int unit, int pitch)
{
    return (uint32_t)(pitch == 64 ? unit ^ (row / 2 & 3) : unit ^ (row & 7));
}

FA_DEVICE uint32_t lane_offset(int row, int unit, int pitch)
{
    return (uint32_t)(row * pitch) + permuted(row, unit, pitch) * 16;
}

FA_DEVICE uint32_t find_memory(const void *memory)
{
    const uint32_t address = ptx_shared_address(memory);
    return address + (-address & 127u);
}

/* Computed again for each tile, because products need the registers. */
FA_DEVICE fa_layout find_layout(uint32_t memory)
{
    const int thread = ptx_thread_id(), lane = thread % 32;
    const int down = lane % 16, down_unit = lane / 16;
    const int across = lane % 8 + lane / 16 * 8, across_unit = lane / 8 % 2;
    fa_layout l;
    l.memory = memory;
    l.a = lane_offset(down, down_unit, PITCH);
    l.b = lane_offset(across, across_unit, PITCH);
    l.score_a = lane_offset(down, down_unit, SCORE_PITCH);
    l.score_b = lane_offset(across, across_unit, SCORE_PITCH);
    l.q = N_TILES == 1 ? lane_offset(lane % 8, lane / 8, PITCH) : l.b;
    l.lane = lane;
    l.warp = thread / 32;
    l.group = l.warp / SPLIT;
    l.share = l.warp % SPLIT;
    return l;
}

/* The first of the warp's columns of dK and dV. */
FA_DEVICE int own_column(const fa_layout *l)
{
    return (ONE_GRADIENT ? l->share / 2 : l->share) * COLUMNS;
}

/* The address of a fragment whose columns begin at unit `unit`: an even number, or any number if
 * the lane's offset is in unit 0. row: where its rows begin. */
FA_DEVICE uint32_t fragment_at(uint32_t row, int unit)
{
    return (row ^ (uint32_t)((unit & 7) * 16)) + (uint32_t)(unit / 8 * 128);
}

/* In which of two places tile number `count` has its queries and its dout. */
FA_DEVICE int place_of(int count) { return STAGES == 2 || BESIDE_KEYS ? count & 1 : 0; }

FA_DEVICE uint32_t q_at(uint32_t memory, int place)
{
    if (BOTH_BESIDE_KEYS) return memory + (place ? V_AT : K_AT);
    if (BESIDE_KEYS) return memory + (place ? K_AT : Q_AT);
    return memory + Q_AT + (Q_BUFFERS == 2 ? (uint32_t)place * Q_BYTES : 0);
}

FA_DEVICE uint32_t dout_at(uint32_t memory, int place)
{
    if (BOTH_BESIDE_KEYS) return q_at(memory, place) + Q_BYTES;
    if (BESIDE_KEYS) return memory + (place ? V_AT : DOUT_AT);
    return memory + DOUT_AT + (Q_BUFFERS == 2 ? (uint32_t)place * Q_BYTES : 0);
}

/* Which half of the rows there it uses, as an offset in bytes in each group of banks. */
FA_DEVICE uint32_t half_of(int count)
{
    if (BOTH_BESIDE_KEYS) return 64;
    return TAKES_TURNS ? (uint32_t)(count & 1) * 64 : 0;
}

FA_DEVICE uint32_t dout_half_of(int count) { return BESIDE_KEYS ? 64 : half_of(count); }

/* The address of a tile's rows, log-sum-exp and delta of each query: 16 bytes for two queries. */
FA_DEVICE uint32_t rows_at(uint32_t memory, int stage)
{
    return memory + ROWS_AT + (uint32_t)stage * ROW_BYTES;
}

/* The address of their factors, with three products. */
FA_DEVICE uint32_t factors_at(uint32_t memory, int stage)
{
    return memory + FACTORS_AT + (uint32_t)stage * FACTOR_BYTES;
}

FA_DEVICE uint32_t query_powers_at(uint32_t memory, int stage)
{
    return memory + POWERS_AT + QUERY_POWERS + (uint32_t)stage * QUERY_POWER_BYTES;
}

/* Factors of dS of tile number `count`. */
FA_DEVICE uint32_t ds_factors_at(uint32_t memory, int count)
{
    return memory + DS_FACTORS_AT + (DS_BUFFERS == 2 ? (uint32_t)(count & 1) * DS_FACTOR_BYTES : 0);
}

/* The unit of the high parts of 8 columns. */
FA_DEVICE int high_unit(int column_tile) { return column_tile / 4 * 8 + column_tile % 4; }

/* dS of tile number `count`. */
FA_DEVICE uint32_t ds_at(uint32_t memory, int count)
{
    return memory + DS_AT +
           (DS_BUFFERS == 2 && !TAKES_TURNS ? (uint32_t)(count & 1) * SCORE_BYTES : 0);
}

/* A barrier of the warps that share keys. */
FA_DEVICE void sync_group(const fa_layout *l) { ptx_named_barrier_sync(1 + l->group, 32 * SPLIT); }

#endif
