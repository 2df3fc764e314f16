/*
 * A warp's part of a tile: of QUERIES queries and the block's keys.
 */
#ifndef FA_KERNELS_BACKWARD_SM80_TILE_PART_CUH
#define FA_KERNELS_BACKWARD_SM80_TILE_PART_CUH

#include "backward_sm80/config.cuh"
#include "backward_sm80/layout.cuh"
#include "backward_sm80/work.cuh"

/* Addresses of a warp's part of a tile in shared memory. keys, queries, own_queries: where the
 * lane's fragments begin; those of values and of dout are V_AT and Q_TO_DOUT bytes later. */
typedef struct tile_part {
    uint32_t keys;          /* the warp's, as rows of scores */
    uint32_t queries;       /* those of a chunk, as columns of scores */
    uint32_t own_queries;   /* the same, as rows of a product */
    uint32_t rows, factors; /* of the lane's first query of the chunk */
    uint32_t key_powers,
        query_powers; /* of float16 parts: of the lane's first key, and of that query */
    uint32_t weight_factors, ds_factors; /* of a warp's own parts: the same */
    /* The thread's first ones: in the sequence; in the block. */
    int query, key;
    int unit;                       /* of the chunk's first query in a row of weights and dS */
    int column_unit;                /* of the warp's first column */
    uint32_t weights_word, ds_word; /* where the lane stores them */
} tile_part;

FA_DEVICE tile_part find_part(uint32_t memory, const tile_cursor *at, int chunk)
{
    const fa_layout layout = find_layout(memory), *l = &layout;
    /* If warps share scores: of the tile for which it computes weights. */
    const int first =
        SHARED_SCORES ? l->warp % (QUERIES / 8) * 8 : l->share * OWN_QUERIES + chunk * CHUNK;
    const int first_key =
        SHARED_SCORES ? l->warp / (QUERIES / 8) * 16 * WEIGHT_M_TILES : l->group * GROUP_ROWS;
    const int own = first + l->lane % 4 * 2;
    const uint32_t q = q_at(memory, place_of(at->count)) + (uint32_t)(first * PITCH);
    const uint32_t half = half_of(at->count);
    const uint32_t word = lane_offset(l->lane / 4, 0, SCORE_PITCH) +
                          (uint32_t)(first_key * SCORE_PITCH + l->lane % 4 * 4);
    tile_part part;
    part.keys = memory + K_AT + (uint32_t)(first_key * PITCH) + l->a;
    part.queries = (q + l->q) ^ half;
    part.own_queries = (q + l->a) ^ half;
    part.rows = rows_at(memory, stage_of(at)) + (uint32_t)own * 8;
    part.factors = factors_at(memory, stage_of(at)) + (uint32_t)own * 4;
    part.key_powers = memory + POWERS_AT + KEY_POWERS + (uint32_t)(first_key + l->lane / 4) * 8;
    part.query_powers = query_powers_at(memory, stage_of(at)) + (uint32_t)own * 8;
    part.weight_factors =
        memory + WEIGHT_FACTORS_AT + (uint32_t)(first / 16 * KEYS + first_key + l->lane / 4) * 8;
    part.ds_factors = ds_factors_at(memory, at->count) + (uint32_t)(l->group * QUERIES + own) * 4;
    part.query = at->tile * QUERIES + own;
    part.key = first_key + l->lane / 4;
    part.unit = HIGH_LOW ? high_unit(first / 8) : first / VECTOR;
    part.column_unit = l->share * (COLUMNS / VECTOR);
    part.weights_word = memory + WEIGHTS_AT + word;
    part.ds_word = (ds_at(memory, at->count) + word) ^ half;
    return part;
}

#if SHARED_SCORES

/* The part of 16 keys of a warp that computes weights. */
FA_DEVICE tile_part find_keys_part(const tile_part *part, int m)
{
    tile_part own = *part;
    own.key += 16 * m;
    own.key_powers += (uint32_t)(16 * m) * 8;
    own.weights_word += (uint32_t)(16 * m * SCORE_PITCH);
    return own;
}

#endif

#endif
