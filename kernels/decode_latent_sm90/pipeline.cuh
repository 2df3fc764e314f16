/*
 * What the warps of a block share.
 *
 *   barriers              stages                                filled by           released by
 *   pair_full, _empty     STAGES pairs of blocks of columns of  TMA, producer       the consumer of
 *                         keys, which are values, too                               their columns
 *   tail_full, _empty     TAIL_STAGES blocks of columns of      TMA, producer       the consumer of
 *                         keys behind the values                                    scores
 *   weights_full, _empty  WEIGHT_BUFFERS tiles of weights,      the consumer of     all consumers of
 *                         with what the outputs before them     scores              values
 *                         are multiplied by
 *   queries_taken         the last QUERY_STAGES of pairs,       all consumers       the consumer of
 *                         which have queries at first                               scores
 *
 * A full barrier of a stage ends a phase when the bytes that its loading warps have announced have
 * come; the others end it when a lane of each warp has arrived.
 */
#ifndef FA_KERNELS_DECODE_LATENT_SM90_PIPELINE_CUH
#define FA_KERNELS_DECODE_LATENT_SM90_PIPELINE_CUH

#include "decode_latent_sm90/config.cuh"

#include "decode_sm80/key_tiles.cuh"
#include "decode_sm80/work.cuh"

typedef struct shared_state {
    fa_work work;
    uint64_t pair_full[STAGES], pair_empty[STAGES];
    uint64_t tail_full[TAIL_STAGES], tail_empty[TAIL_STAGES];
    uint64_t weights_full[WEIGHT_BUFFERS], weights_empty[WEIGHT_BUFFERS];
    uint64_t queries_taken;
} shared_state;
static_assert(sizeof(shared_state) <= 512, "the planner's bytes beside the dynamic ones");

typedef struct pipeline {
    char *q, *tails, *pairs, *weights;
    float *rescale; /* of ROWS rows for each buffer of weights */
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

FA_DEVICE void init_barriers(shared_state *state, int loading)
{
    for (int i = 0; i < STAGES; i++) {
        ptx_mbarrier_init(&state->pair_full[i], loading);
        ptx_mbarrier_init(&state->pair_empty[i], GROUP_WARPS);
    }
    for (int i = 0; i < TAIL_STAGES; i++) {
        ptx_mbarrier_init(&state->tail_full[i], loading);
        ptx_mbarrier_init(&state->tail_empty[i], GROUP_WARPS);
    }
    for (int i = 0; i < WEIGHT_BUFFERS; i++) {
        ptx_mbarrier_init(&state->weights_full[i], GROUP_WARPS);
        ptx_mbarrier_init(&state->weights_empty[i], VALUE_GROUPS * GROUP_WARPS);
    }
    ptx_mbarrier_init(&state->queries_taken, GROUP_WARPS);
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
FA_DEVICE int weights_buffer(int n) { return n % WEIGHT_BUFFERS; }
FA_DEVICE int weights_parity(int n) { return n / WEIGHT_BUFFERS & 1; }

FA_DEVICE char *tail_at(const pipeline *pipe, int n)
{
    return pipe->tails + tail_stage(n) * BLOCK_BYTES;
}

FA_DEVICE char *weights_at(const pipeline *pipe, int n)
{
    return pipe->weights + weights_buffer(n) * BLOCK_BYTES;
}

/* Where 16 bytes of a row are in a block of 64 columns, with TMA's 128-byte swizzle. */
FA_DEVICE uint32_t swizzled(int row, int vector)
{
    return (uint32_t)(row * 128 + (vector ^ row % 8) * 16);
}

#endif
