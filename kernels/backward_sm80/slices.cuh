/*
 * Scores of wide heads, in float32. Shared memory has room for only a few such wide rows. If each
 * warp had its own scores, it would have at most 8 queries, and would load more than one operand
 * for each product. So warps share the products: a warp has GROUP_ROWS keys, SLICE_QUERIES queries
 * and a slice of the head dim. Half of these warps compute parts of S, the others parts of dP. The
 * parts are stored in shared memory, in the order of the accumulators. Then a warp adds up the
 * parts of 8 queries and of 16 keys, or 32 if the block has 64, and computes weights and dS from
 * them.
 *
 * Slices are equal parts of the columns that exist, in units of 32. Sums are computed in their
 * order. weight_sums.cu computes the same bits.
 */
#ifndef FA_KERNELS_BACKWARD_SM80_SLICES_CUH
#define FA_KERNELS_BACKWARD_SM80_SLICES_CUH

#include "backward_sm80/high_low.cuh"
#include "backward_sm80/layout.cuh"
#include "backward_sm80/multiply.cuh"
#include "backward_sm80/tile_part.cuh"
#include "ptx/shared.cuh"

#if SLICES

/* The columns of a unit, and their bytes. */
enum { SLICE_COLUMNS = 32, SLICE_BYTES = SLICE_COLUMNS * ELEMENT_BYTES };
static_assert(HIGH_LOW && HEAD_DIM % SLICE_COLUMNS == 0, "whole units");

/* The unit of 32 columns with which a slice of this many columns begins. */
FA_DEVICE int find_slice(int slice, int columns)
{
    return (columns + SLICE_COLUMNS - 1) / SLICE_COLUMNS * slice / SLICES;
}

/* The products of some units. rows, columns: where the lane's fragments of keys and of queries
 * begin. */
FA_DEVICE void make_slice(fa_score_sums *s, uint32_t rows, uint32_t columns, int unit, int end)
{
    clear_scores(s);
#pragma unroll 1
    for (; unit < end; unit++)
        add_high_low_scores(s, rows + (uint32_t)unit * SLICE_BYTES,
                            columns + (uint32_t)unit * SLICE_BYTES);
}

#endif

#if SHARED_SCORES

enum {
    SLICE_QUERIES = 8 * N_TILES,
    SLICE_WARPS = 2 * SLICES * (QUERIES / SLICE_QUERIES) * GROUPS,
    SCORE_TILES = TILES_DOWN * TILES_ACROSS, /* of 16 keys and 8 queries */
    SCORE_WARPS = SCORE_TILES / WEIGHT_M_TILES,
    SCORE_TILE_BYTES = 16 * 8 * 4
};
static_assert(STAGES == 1, "all warps meet at barriers");
static_assert(SLICE_WARPS == WARPS, "a slice of S or dP for each warp");
static_assert(SCORE_WARPS <= WARPS, "a warp for each tile, or for each two");

/* Where the lane's part of a slice's tile is. */
FA_DEVICE uint32_t slice_at(uint32_t memory, score_kind kind, int slice, int tile)
{
    return memory + SLICES_AT +
           (uint32_t)((((int)kind * SLICES + slice) * SCORE_TILES + tile) * SCORE_TILE_BYTES +
                      ptx_thread_id() % 32 * 16);
}

/* Computes the warp's slice of S or dP of tile number `count` and stores it for the other warps. d,
 * d_v: the numbers of columns that exist. */
FA_DEVICE void share_slice(uint32_t memory, int count, int d, int d_v)
{
    const fa_layout layout = find_layout(memory), *l = &layout;
    const score_kind kind = l->warp % 2 ? DP : SCORES;
    const int slice = l->warp / 2 % SLICES, rest = l->warp / 2 / SLICES;
    const int block = rest % (QUERIES / SLICE_QUERIES), group = rest / (QUERIES / SLICE_QUERIES);
    const int columns = kind == DP ? d_v : d;
    const uint32_t keys =
        memory + K_AT + (uint32_t)(group * GROUP_ROWS * PITCH) + l->a + (kind == DP ? V_AT : 0);
    const uint32_t queries =
        ((kind == DP ? dout_at(memory, place_of(count)) : q_at(memory, place_of(count))) +
         (uint32_t)(block * SLICE_QUERIES * PITCH) + l->q) ^
        (kind == DP ? dout_half_of(count) : half_of(count));
    fa_score_sums s;
    make_slice(&s, keys, queries, find_slice(slice, columns), find_slice(slice + 1, columns));
#pragma unroll
    for (int i = 0; i < M_TILES * N_TILES; i++) {
        const int m = i / N_TILES, n = i % N_TILES;
        const float *x = s.at[m][n];
        ptx_st_shared_v4(slice_at(memory, kind, slice,
                                  (group * M_TILES + m) * TILES_ACROSS + block * N_TILES + n),
                         make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]),
                                    __float_as_uint(x[2]), __float_as_uint(x[3])));
    }
}

/* Whether the warp has tiles of scores. */
FA_DEVICE bool has_scores(void) { return ptx_thread_id() < 32 * SCORE_WARPS; }

/* Adds up the parts of one of the warp's tiles: its part is `part`. */
FA_DEVICE void add_tile_slices(float sum[4], uint32_t memory, const tile_part *part, int tile,
                               score_kind kind)
{
    const key_powers keys = load_key_powers(part->key_powers);
    const query_powers queries = load_query_powers(part->query_powers);
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++) {
        const uint4 x = ptx_ld_shared_v4(slice_at(memory, kind, slice, tile));
        const float part[4] = {fa_bits_float(x.x), fa_bits_float(x.y), fa_bits_float(x.z),
                               fa_bits_float(x.w)};
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] = slice == 0 ? part[i] : sum[i] + part[i];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum[i] *= kind == DP ? keys.value[i / 2] : keys.key[i / 2];
        sum[i] *= kind == DP ? queries.dout[i % 2] : queries.query[i % 2];
    }
}

/* Adds up the parts of the warp's tiles. */
FA_DEVICE void add_slices(fa_scores *s, uint32_t memory, const tile_part *part, score_kind kind)
{
    const int warp = ptx_thread_id() / 32;
    const int first = warp / TILES_ACROSS * WEIGHT_M_TILES, across = warp % TILES_ACROSS;
#pragma unroll
    for (int m = 0; m < WEIGHT_M_TILES; m++) {
        const tile_part own = find_keys_part(part, m);
        add_tile_slices(s->at[m][0], memory, &own, (first + m) * TILES_ACROSS + across, kind);
    }
}

#endif

#endif
