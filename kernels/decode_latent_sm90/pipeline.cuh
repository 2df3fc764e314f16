/*
 * What the warps of a block share.
 *
 *   barriers              stages                                filled by           released by
 *   pair_full, _empty     STAGES pairs of blocks of columns of  TMA, producer       the consumer of
 *                         keys, which are values, too                               their columns
 *   tail_full, _empty     TAIL_STAGES blocks of columns of      TMA, producer       the consumer of
 *                         keys behind the values                                    scores
 *   scores_full, _empty   the scores of a key tile, and what    the consumer of     all consumers
 *                         makes weights of them                 scores              of values
 *   values_turn           no buffer: the consumers of values may issue their products of a tile
 *   queries_full          the queries                           TMA, thread 0           nobody
 *   queries_taken         the last QUERY_STAGES of pairs,       like the queries        the consumer of
 *                         which have queries at first                                   scores
 *
 * A full barrier of a stage ends a phase when the bytes that its loading warps have announced have
 * come; the others end it when a lane of each warp has arrived.
 *
 * The two blocks of a cluster have the same key tiles. Each loads one block of columns of a pair,
 * into both blocks' shared memory. So a stage is released to both, and its empty barrier counts the
 * consumers of both.
 */
#ifndef FA_KERNELS_DECODE_LATENT_SM90_PIPELINE_CUH
#define FA_KERNELS_DECODE_LATENT_SM90_PIPELINE_CUH

#include "decode_latent_sm90/config.cuh"

#include "decode_sm80/key_tiles.cuh"
#include "decode_sm80/work.cuh"

/* Where buffers begin, in bytes after the queries. */
enum {
    TAILS_AT = Q_BLOCKS * BLOCK_BYTES,
    PAIRS_AT = TAILS_AT + TAIL_STAGES * BLOCK_BYTES,
    SCORES_AT = PAIRS_AT + STAGES * PAIR_BYTES,
    ROWS_AT = SCORES_AT + SCORE_BYTES,
    DESCRIPTOR_UNIT = 16 /* bytes of a unit of a descriptor's address */
};

typedef struct shared_state {
    fa_work work;
    uint64_t pair_full[STAGES], pair_empty[STAGES];
    uint64_t tail_full[TAIL_STAGES], tail_empty[TAIL_STAGES];
    uint64_t scores_full, scores_empty, values_turn;
    uint64_t queries_full, queries_taken;
} shared_state;
static_assert(sizeof(shared_state) <= 512, "the planner's bytes beside the dynamic ones");

/* What makes weights of a row's scores: weight = 2^(score * unit - base). */
typedef struct score_row {
    float base, unit;
    float rescale; /* what the sums of the tiles before are multiplied by */
    float unused;
} score_row;
static_assert(ROWS * sizeof(score_row) == FA_DECODE_LATENT_SM90_ROWS, "the planner's bytes");

typedef struct pipeline {
    char *q, *tails, *pairs;
    float4 *scores; /* of a warpgroup's threads; every WARPGROUP-th is a thread's own */
    score_row *rows;
    uint32_t descriptor; /* of q, which the others follow */
    int cluster, rank;   /* blocks of the cluster; the number of this one */
    bool maps_queries;   /* TMA loads the queries */
    shared_state *state;
} pipeline;

/* Rows of a key tile that a warp of the producer loads; so many of its warps do. */
FA_DEVICE int rows_of_warp(const fa_decode_latent_sm90_params *s)
{
    return max(s->box_rows, KEYS / GROUP_WARPS);
}

FA_DEVICE int loading_warps(const fa_decode_latent_sm90_params *s)
{
    return KEYS / rows_of_warp(s);
}

FA_DEVICE void init_barriers(shared_state *state, int loading, int cluster)
{
    for (int i = 0; i < STAGES; i++) {
        ptx_mbarrier_init(&state->pair_full[i], loading);
        ptx_mbarrier_init(&state->pair_empty[i], cluster * GROUP_WARPS);
    }
    for (int i = 0; i < TAIL_STAGES; i++) {
        ptx_mbarrier_init(&state->tail_full[i], loading);
        ptx_mbarrier_init(&state->tail_empty[i], cluster * GROUP_WARPS);
    }
    ptx_mbarrier_init(&state->scores_full, GROUP_WARPS);
    ptx_mbarrier_init(&state->values_turn, GROUP_WARPS);
    ptx_mbarrier_init(&state->scores_empty, VALUE_GROUPS * GROUP_WARPS);
    ptx_mbarrier_init(&state->queries_full, 1);
    ptx_mbarrier_init(&state->queries_taken, cluster * GROUP_WARPS);
    ptx_mbarrier_init_fence();
}

/* ---- Counts and stages ----------------------------------------------------------------------- */

/* Pair `place` of tile n among all pairs. Pairs come in the order in which their stages are
 * released: the first ones of both halves of the values' columns, then the second ones. */
FA_DEVICE uint32_t pair_count(int n, int place) { return (uint32_t)(n * V_PAIRS + place); }

FA_DEVICE int first_block_of(int place)
{
    return place % VALUE_GROUPS * (V_BLOCKS / VALUE_GROUPS) + place / VALUE_GROUPS * 2;
}

FA_DEVICE int stage_of(uint32_t count) { return (int)(count % STAGES); }
FA_DEVICE int parity_of(uint32_t count) { return (int)(count / STAGES & 1); }

FA_DEVICE char *pair_at(const pipeline *pipe, uint32_t count)
{
    return pipe->pairs + stage_of(count) * PAIR_BYTES;
}

FA_DEVICE int tail_stage(int n) { return n % TAIL_STAGES; }
FA_DEVICE int tail_parity(int n) { return n / TAIL_STAGES & 1; }

FA_DEVICE char *tail_at(const pipeline *pipe, int n)
{
    return pipe->tails + tail_stage(n) * BLOCK_BYTES;
}

/* The same as operands of products. */
FA_DEVICE uint32_t pair_descriptor(const pipeline *pipe, uint32_t count)
{
    return pipe->descriptor +
           (uint32_t)((PAIRS_AT + stage_of(count) * PAIR_BYTES) / DESCRIPTOR_UNIT);
}

FA_DEVICE uint32_t tail_descriptor(const pipeline *pipe, int n)
{
    return pipe->descriptor +
           (uint32_t)((TAILS_AT + tail_stage(n) * BLOCK_BYTES) / DESCRIPTOR_UNIT);
}

/* Releases a stage that products have read, to all blocks that load into it. leader: whether the
 * lane arrives. */
FA_DEVICE void release_stage(const pipeline *pipe, uint64_t *empty, int leader)
{
    ptx_mbarrier_arrive_if(empty, leader);
    if (pipe->cluster > 1) ptx_mbarrier_arrive_peer_if(empty, pipe->rank ^ 1, leader);
}

/* Where 16 bytes of a row are in a block of 64 columns, with TMA's 128-byte swizzle. */
FA_DEVICE uint32_t swizzled(int row, int vector)
{
    return (uint32_t)(row * 128 + (vector ^ row % 8) * 16);
}

#endif
