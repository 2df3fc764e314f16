/*
 * Which part of a work tile a thread has, and where data are in shared memory.
 *
 * Up to 128 columns, a warp has 32 rows of the work tile. For wider heads a group of SPLIT warps
 * shares rows: each computes the scores of its share of a key tile's keys, and its share of the
 * output's columns.
 */
#ifndef FA_KERNELS_FORWARD_SM80_LAYOUT_CUH
#define FA_KERNELS_FORWARD_SM80_LAYOUT_CUH

#include "forward_sm80/config.cuh"
#include "common/device.cuh"
#include "ptx/address.cuh"
#include "ptx/barrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/thread.cuh"

FA_DEVICE int lane_id(void) { return ptx_thread_id() % 32; }
FA_DEVICE int group_id(void) { return ptx_thread_id() / (32 * SPLIT); }
FA_DEVICE int group_row(void) { return group_id() * GROUP_ROWS; } /* its first row */

/* The warp's number in its group: its share of keys and columns. */
FA_DEVICE int share_id(void) { return ptx_thread_id() / 32 % SPLIT; }
FA_DEVICE int own_key(void) { return share_id() * OWN_KEYS; } /* its first key in a tile */

/* A barrier of the group's warps. */
FA_DEVICE void sync_group(void)
{
    if (SPLIT > 1) ptx_named_barrier_sync(1 + group_id(), 32 * SPLIT);
}

/* The row of the work tile of element [m][..][2 * half]. */
FA_DEVICE int row_of(int m, int half) { return group_row() + 16 * m + 8 * half + lane_id() / 4; }

/* ---- Registers ------------------------------------------------------------------------------- */

/* S as mma returns it: with g = lane / 4 and t = lane % 4, keys 8n + 2t and 8n + 2t + 1 of row
 * 16m + g + 8h are in [m][n][2h] and [m][n][2h + 1]. */
typedef struct fa_scores {
    float at[M_TILES][KEY_TILES][4];
} fa_scores;

/* P rounded to 16 bits: [m][n][h] is an x2. Two neighbours along n are an A fragment. Warps that
 * share rows need the weights of all keys, so they store theirs in shared memory.
 *
 * In tf32, [m][n] is an A fragment: a thread needs columns t and t + 4 of a row, but has the scores
 * of keys 2t and 2t + 1 of 8. So these keys count as columns t and t + 4, and the rows of V are
 * loaded in the same order: no weight moves to another thread. */
typedef struct fa_weights {
#if SPLIT == 1
    uint32_t at[M_TILES][KEY_TILES][TF32 ? 4 : 2];
#else
    uint32_t at; /* the address of this lane's first weights [0][0][0] */
#endif
} fa_weights;

/* O: columns 8n + 2t and 8n + 2t + 1 in [m][n]. In tf32, column 32b + 8t + 4c + i is in
 * [m][4b + i][2h + c]: a thread has 8 adjacent columns of 32. */
typedef struct fa_output {
    float at[M_TILES][D_TILES][4];
    float max[M_TILES][2]; /* in powers of two */
    float sum[M_TILES][2]; /* of the thread's own columns */
} fa_output;

/* ---- Shared memory --------------------------------------------------------------------------- */

/* Addresses in shared memory. */
typedef struct fa_memory {
    uint32_t q, k, v; /* of keys and values: the stage of the work tile's even key tiles, */
    uint32_t to_odd;  /* and from there to the stage of its odd ones */
    uint32_t weights; /* QUERIES x KEYS */
    uint32_t numbers; /* GROUPS x SPLIT x GROUP_ROWS */
} fa_memory;

FA_DEVICE fa_memory find_memory(const void *memory)
{
    fa_memory at;
    at.q = fa_opaque(ptx_shared_address(memory));
    at.k = at.q + QUERIES * PITCH;
    at.v = at.k + STAGES * TILE_BYTES;
    at.to_odd = TILE_BYTES;
    at.weights = at.v + STAGES * TILE_BYTES;
    at.numbers = at.weights + QUERIES * WEIGHTS_PITCH;
    return at;
}

/* The stage of key tile n. first: that of tile 0. */
FA_DEVICE uint32_t stage(const fa_memory *at, uint32_t first, int n)
{
    return STAGES == 1 ? first : first + (n & 1) * at->to_odd;
}

/* The memory of the next work tile, after a work tile of this many key tiles: its first one uses
 * the free stage. */
FA_DEVICE fa_memory next_memory(const fa_memory *at, int tiles)
{
    fa_memory next = *at;
    if (STAGES == 1 || tiles % 2 == 0) return next;
    next.k += at->to_odd;
    next.v += at->to_odd;
    next.to_odd = 0 - at->to_odd;
    return next;
}

/* The offset that this lane passes to ldmatrix for the fragments of a tile's first 16 rows and
 * columns. For A and the transposed V, the order of the 8 x 8 matrices is first down and then
 * across; for K it is the other way round. */
FA_DEVICE uint32_t value_lane(int lane) { return (uint32_t)(lane % 16 * PITCH + lane / 16 * 16); }

FA_DEVICE uint32_t key_lane(int lane)
{
    return (uint32_t)((lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16);
}

/* The address that this lane passes for its first fragment of values. In tf32 no instruction
 * transposes, so a lane loads four columns of keys 2t and 2t + 1 by itself. The units of 16 bytes
 * differ by an even number for t and by one for g, so that the 8 lanes that are served at the same
 * time access different banks. */
FA_DEVICE uint32_t value_fragments(uint32_t tile)
{
#if TF32
    const int lane = lane_id();
    return tile + (uint32_t)(share_id() * COLUMNS * 4 + lane % 4 * 2 * PITCH + lane / 4 * 16);
#else
    return tile + (uint32_t)(share_id() * COLUMNS * 2) + value_lane(lane_id());
#endif
}

/* ---- Exchange between the warps of a group --------------------------------------------------- */

FA_DEVICE uint32_t group_weights(const fa_memory *at)
{
    return at->weights + (uint32_t)(group_row() * WEIGHTS_PITCH);
}

/* The address that this lane passes for the first A fragment of the group's weights. */
FA_DEVICE uint32_t weight_rows(const fa_memory *at)
{
    return group_weights(at) + (uint32_t)(lane_id() % 16 * WEIGHTS_PITCH + lane_id() / 16 * 16);
}

FA_DEVICE fa_weights find_weights(const fa_memory *at)
{
    fa_weights p = {0};
#if SPLIT > 1
    p.at = group_weights(at) + (uint32_t)(lane_id() / 4 * WEIGHTS_PITCH +
                                          own_key() * ELEMENT_BYTES + lane_id() % 4 * 4);
#else
    (void)at;
#endif
    return p;
}

#if TF32

FA_DEVICE uint32_t is_not_finite(uint32_t x) { return (x & 0x7f800000u) == 0x7f800000u; }

/* The weights of keys 8n + 2t (c 0) and 8n + 2t + 1. */
FA_DEVICE uint32_t get_weight(const fa_weights *p, int m, int n, int half, int c)
{
#if SPLIT > 1
    return ptx_ld_shared_u32(p->at +
                             (uint32_t)((16 * m + 8 * half) * WEIGHTS_PITCH + 32 * n + 16 * c));
#else
    return p->at[m][n][2 * c + half];
#endif
}

FA_DEVICE void set_weight(fa_weights *p, int m, int n, int half, int c, uint32_t x)
{
#if SPLIT > 1
    ptx_st_shared_u32(p->at + (uint32_t)((16 * m + 8 * half) * WEIGHTS_PITCH + 32 * n + 16 * c), x);
#else
    p->at[m][n][2 * c + half] = x;
#endif
}

#else

#if OPTIONS
FA_DEVICE uint32_t get_x2(const fa_weights *p, int m, int n, int half)
{
#if SPLIT > 1
    return ptx_ld_shared_u32(p->at + (uint32_t)((16 * m + 8 * half) * WEIGHTS_PITCH + 16 * n));
#else
    return p->at[m][n][half];
#endif
}
#endif

FA_DEVICE void set_x2(fa_weights *p, int m, int n, int half, uint32_t x2)
{
#if SPLIT > 1
    ptx_st_shared_u32(p->at + (uint32_t)((16 * m + 8 * half) * WEIGHTS_PITCH + 16 * n), x2);
#else
    p->at[m][n][half] = x2;
#endif
}

#endif

/* Stores a number for each row, for the other warps of the group. All four lanes of a row have the
 * same number. */
FA_DEVICE void share_with_group(const fa_memory *at, float x[M_TILES][2])
{
    const uint32_t to = at->numbers + (uint32_t)(ptx_thread_id() / 32 * GROUP_ROWS * 4);
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++)
        if (lane_id() % 4 == 0)
            ptx_st_shared_f32(to + (uint32_t)(4 * (8 * i + lane_id() / 4)), x[i / 2][i % 2]);
    sync_group();
}

/* The number of row 8 * i + g that warp `share` of the group has stored. */
FA_DEVICE float read_from_group(const fa_memory *at, int share, int i)
{
    const int row = (group_id() * SPLIT + share) * GROUP_ROWS + 8 * i + lane_id() / 4;
    return ptx_ld_shared_f32(at->numbers + (uint32_t)(4 * row));
}

#endif
