/*
 * What a consumer keeps in registers, the stages that it releases, and what its four warps tell each other.
 */
#ifndef FA_KERNELS_FORWARD_SM90_CONSUMER_STATE_CUH
#define FA_KERNELS_FORWARD_SM90_CONSUMER_STATE_CUH

#include "forward_sm90/config.cuh"
#include "common/device.cuh"
#include "forward_sm90/cursor.cuh"
#include "forward_sm90/multiply.cuh"
#include "forward_sm90/pipeline.cuh"
#include "forward_sm90/softmax.cuh"
#include "forward_sm90/stage.cuh"
#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"

typedef struct consumer_state {
    int number; /* of the consumer */
    float out[OUTPUTS], scores[KEYS / 2];
    uint32_t weights[KEYS / 4];
    row_state rows;
    int tracked; /* above 0: the warpgroup tracks the max, for so many tiles without a new one */
    float sum_bound; /* of a thread's sum of weights in a tile: beyond it, bases are renewed */
    bool flat;       /* the warp's rows */
    bool new_max; /* in the tile before, a row of the warpgroup had a new max: announce_new_max */
    tile_limits limits;
    cursor at;
    pending_values values;
    bool recompute; /* rows are to be recomputed */
#if ROUNDED
    float value_unit; /* of the work tile's values */
#endif
#if HAS_SERIES
    bool series;       /* in the warp's plain tiles, a series replaces tanh */
    bool series_below; /* while the max is tracked: scores below its range do not matter */
#endif
#if BIAS_AHEAD
    uint32_t
        bias[KEYS / 4]; /* of the tile whose scores are being computed: laid out as the weights */
#endif
    int leader, zero; /* 1 in lane 0 of a warp; 0: ptx/order.cuh */
} consumer_state;

FA_DEVICE const work_tile *this_work_tile(const pipeline *pipe, const consumer_state *c)
{
    return queue_entry(pipe, c->at.number);
}

/* ---- Stages that are released ---------------------------------------------------------------- */

FA_DEVICE void release_keys(const pipeline *pipe, const consumer_state *c)
{
    ptx_mbarrier_arrive_if(&pipe->state->k_empty[stage_of(c->at.count)], c->leader);
}

FA_DEVICE void release_values(const pipeline *pipe, const consumer_state *c, tile_count count,
                              bool any)
{
    ptx_mbarrier_arrive_if(&pipe->state->v_empty[stage_of(count)], c->leader && any);
}

/* Releases the values that were pending and have been added, if there were any. */
FA_DEVICE void release_pending_values(const pipeline *pipe, consumer_state *c)
{
    release_values(pipe, c, c->values.count, c->values.any);
    c->values.any = false;
}

/* Releases the queries, if this is the last tile that needs them. */
FA_DEVICE void release_queries(const pipeline *pipe, const consumer_state *c, bool last)
{
    ptx_mbarrier_arrive_if(q_empty(pipe, &c->at, c->number), c->leader && last);
}

/* ---- A new max, among the warps of a warpgroup ----------------------------------------------- */

/* The warps of a warpgroup track the max together, because their products are at the same point of the code. A warp
 * that has a new max in a tile writes the tile's count to shared memory. All warps can read it after the barrier at
 * which they issue the next products, and they read it before the barrier after that. So two words are enough. */
FA_DEVICE uint32_t *new_max_word(const pipeline *pipe, const consumer_state *c, tile_count count)
{
    return &pipe->state->new_max[c->number][count & 1];
}

FA_DEVICE void announce_new_max(const pipeline *pipe, const consumer_state *c)
{
    if (c->leader) *(volatile uint32_t *)new_max_word(pipe, c, c->at.count) = c->at.count;
}

/* Whether a warp of the warpgroup announced a new max in the previous tile. */
FA_DEVICE bool had_new_max(const pipeline *pipe, const consumer_state *c)
{
    const tile_count before = c->at.count - 1;
    return ptx_uniform(*(volatile uint32_t *)new_max_word(pipe, c, before)) == before;
}

#endif
