/*
 * A consumer: a warpgroup with 64 queries of the work tile. For each key tile t it
 *
 *     issues S = Q K^T of tile t and out += P V of tile t - 1, waits for S, computes its softmax
 *     in place, waits for P V, rounds the weights into P
 *
 * as forward_sm90 does. All key tiles track the max: tf32 products are half as fast as 16-bit ones,
 * and the softmax overlaps with the products of the other consumers.
 */
#ifndef FA_KERNELS_FORWARD_TF32_SM90_CONSUMER_CUH
#define FA_KERNELS_FORWARD_TF32_SM90_CONSUMER_CUH

#include "forward_tf32_sm90/config.cuh"
#include "forward_tf32_sm90/multiply.cuh"
#include "forward_tf32_sm90/pipeline.cuh"
#include "forward_tf32_sm90/store.cuh"
#include "common/device.cuh"
#include "common/mma.cuh"
#include "forward_sm90/cursor.cuh"
#include "forward_sm90/describe.cuh"
#include "forward_sm90/float32_options.cuh"
#include "forward_sm90/options.cuh"
#include "forward_sm90/recompute.cuh"
#include "forward_sm90/scheduler.cuh"
#include "forward_sm90/softmax.cuh"
#include "forward_sm90/stage.cuh"
#include "ptx/barrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"

typedef struct consumer_state {
    int number; /* of the consumer */
    int leader; /* 1 in lane 0 of a warp */
    float out[OUTPUTS], scores[KEYS / 2];
    uint32_t weights[KEYS / 2];
    row_state rows;
    float rescale[2]; /* the factor of the previous tiles' outputs */
#if OPTIONS
    float factor;      /* of scores: score_factor */
    bool recompute;    /* whether rows must be recomputed */
    early_words early; /* of the next key tile */
#endif
    tile_limits limits;
    cursor at;
} consumer_state;

/* ---- Stages that are released ---------------------------------------------------------------- */

FA_DEVICE void release_tile(const pipeline *pipe, const consumer_state *c, tile_count number)
{
    ptx_mbarrier_arrive_if(&pipe->state->empty[stage_of(number)], c->leader);
}

FA_DEVICE void release_queries(const pipeline *pipe, const consumer_state *c, bool last)
{
    ptx_mbarrier_arrive_if(q_empty(pipe, &c->at, c->number), c->leader && last);
}

/* ---- The steps ------------------------------------------------------------------------------- */

FA_DEVICE void start_work_tile(const pipeline *pipe, consumer_state *c)
{
    c->limits = find_limits(queue_entry(pipe, c->at.number), c->number);
    c->rows.base[0] = c->rows.base[1] = NO_KEY_SEEN;
    c->rows.sum[0] = c->rows.sum[1] = 0;
}

#if OPTIONS

/* Replaces scores by weights. */
FA_DEVICE void weigh_tile(const pipeline *pipe, const fa_attention_params *p, consumer_state *c)
{
    const int tile = c->at.tile;
    const float unit[2] = {c->factor, c->factor};
    const work_tile *w = queue_entry(pipe, c->at.number);
    apply_options(p, w, c->scores, unit, &c->early, tile, c->number);
    if (tile + 1 < c->at.needed) load_early(p, w, tile + 1, c->number, &c->early);
    if (tile < c->limits.unmasked_from || tile >= c->limits.unmasked_to)
        mask_scores(c->scores, w, c->number, tile * KEYS);
    raise_row_bases(c->scores, &c->rows, c->rescale);
    weigh_rows(c->scores, &c->rows);
    if (p->dropout_threshold) drop_weights_of_rows(p, w, c->scores, tile, c->number);
}

/* Whether outputs of the warp are not finite: they become NaN if an option hides a key whose value
 * is not finite. */
FA_DEVICE bool has_bad_outputs(const work_tile *w, const consumer_state *c)
{
    float seen[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) seen[i / 2 % 2] += c->out[i] * 0.0f;
    const bool found = (seen[0] != 0.0f && row_of(c->number, 0) < w->queries) ||
                       (seen[1] != 0.0f && row_of(c->number, 1) < w->queries);
    return __any_sync(0xffffffff, found);
}

/* What must be done at the end of a work tile. */
FA_DEVICE void finish_rows(const pipeline *pipe, consumer_state *c)
{
    float sum[2];
    find_sums(&c->rows, sum);
#pragma unroll
    for (int r = 0; r < 2; r++) c->rows.base[r] = find_seen_base(c->rows.base[r], sum[r]);
    c->recompute |= c->at.needed && has_bad_outputs(queue_entry(pipe, c->at.number), c);
}

#else

/* Replaces scores by weights. */
FA_DEVICE void weigh_tile(const pipeline *pipe, const fa_attention_params *p, consumer_state *c)
{
    (void)p;
    const exponent_units u = {c->limits.scale, {0, 0}};
    const int tile = c->at.tile;
    float sum[2];
    if (tile < c->limits.unmasked_from || tile >= c->limits.unmasked_to)
        mask_scores(c->scores, queue_entry(pipe, c->at.number), c->number, tile * KEYS);
    const float top[2] = {max_of_scores(c->scores, 0), max_of_scores(c->scores, 1)};
    raise_bases(top, &c->rows, c->rescale, &u, false);
    weigh(c->scores, &c->rows, &u, sum);
    add_sums(&c->rows, sum);
}

#endif

/* Rounds weights into the A operand. Of 8 keys a thread has the weights of keys 2t and 2t + 1, of
 * row g and then of row g + 8. */
FA_DEVICE void round_weights(consumer_state *c)
{
#pragma unroll
    for (int i = 0; i < KEYS / 2; i += 4) {
        c->weights[i] = fa_near_tf32(__float_as_uint(c->scores[i]));
        c->weights[i + 1] = fa_near_tf32(__float_as_uint(c->scores[i + 2]));
        c->weights[i + 2] = fa_near_tf32(__float_as_uint(c->scores[i + 1]));
        c->weights[i + 3] = fa_near_tf32(__float_as_uint(c->scores[i + 3]));
    }
}

/* The scores of a work tile's first key tile. */
FA_DEVICE void do_first_tile(const pipeline *pipe, const fa_attention_params *p, consumer_state *c)
{
    const tile_count keys = c->at.count;
    acquire_tile(pipe, keys);
    ptx_register_fence(c->scores, KEYS / 2);
    ptx_wgmma_fence();
    issue_qk(c->scores, c->at.q, tile_descriptor(pipe, keys));
    ptx_wgmma_wait(0);
    ptx_register_fence(c->scores, KEYS / 2);
    release_tile(pipe, c, keys);
    release_queries(pipe, c, c->at.needed == 1);
    weigh_tile(pipe, p, c);
    round_weights(c);
}

/* The scores of a key tile, and the values of the previous one. */
FA_DEVICE void do_tile(const pipeline *pipe, const fa_attention_params *p, consumer_state *c)
{
    const tile_count keys = number_of_keys(c->at.count, c->at.tile), values = keys + 1;
    acquire_tile(pipe, keys);
    ptx_register_fence(c->out, OUTPUTS);
    ptx_register_fence(c->scores, KEYS / 2);
    ptx_wgmma_fence();
    issue_qk(c->scores, c->at.q, tile_descriptor(pipe, keys));
    acquire_tile(pipe, values);
    ptx_wgmma_fence();
    issue_pv(c->out, c->weights, tile_descriptor(pipe, values), c->at.tile > 1);
    ptx_wgmma_wait(1);
    ptx_register_fence(c->scores, KEYS / 2);
    release_tile(pipe, c, keys);
    release_queries(pipe, c, c->at.tile + 1 == c->at.needed);
    weigh_tile(pipe, p, c);
    ptx_wgmma_wait(0);
    ptx_register_fence(c->out, OUTPUTS);
    fence_weights(c->weights);
    release_tile(pipe, c, values);
    if (__any_sync(0xffffffff, c->rescale[0] != 1.0f || c->rescale[1] != 1.0f))
        rescale_outputs(c->out, c->rescale);
    round_weights(c);
}

/* The values of the last key tile that the consumer needs. */
FA_DEVICE void add_last_values(const pipeline *pipe, consumer_state *c)
{
    const tile_count values = number_of_values(c->at.count, c->at.needed - 1, c->at.key_tiles);
    acquire_tile(pipe, values);
    ptx_register_fence(c->out, OUTPUTS);
    ptx_wgmma_fence();
    issue_pv(c->out, c->weights, tile_descriptor(pipe, values), c->at.needed > 1);
    ptx_wgmma_wait(0);
    ptx_register_fence(c->out, OUTPUTS);
    fence_weights(c->weights);
    release_tile(pipe, c, values);
}

FA_DEVICE void skip_tile(const pipeline *pipe, consumer_state *c, tile_count number)
{
    acquire_tile(pipe, number);
    release_tile(pipe, c, number);
}

/* Key tiles that only other consumers need, and the end of the work tile. */
FA_DEVICE void skip_other_tiles(const pipeline *pipe, consumer_state *c)
{
    for (int tile = c->at.needed; tile < c->at.key_tiles; tile++) {
        if (tile != c->at.needed || tile == 0)
            skip_tile(pipe, c, number_of_keys(c->at.count, tile));
        skip_tile(pipe, c, number_of_values(c->at.count, tile, c->at.key_tiles));
    }
    c->at.count += 2 * (uint32_t)c->at.key_tiles;
}

/* ---- The work tiles -------------------------------------------------------------------------- */

FA_DEVICE void do_key_tiles(const pipeline *pipe, const fa_attention_params *p, consumer_state *c)
{
    do_first_tile(pipe, p, c);
    for (c->at.tile = 1; c->at.tile < c->at.needed; c->at.tile++) do_tile(pipe, p, c);
    /* The values of its last tile come after the keys of a tile that it does not need. */
    if (c->at.needed < c->at.key_tiles)
        skip_tile(pipe, c, number_of_keys(c->at.count, c->at.needed));
    add_last_values(pipe, c);
}

FA_DEVICE void consume(const pipeline *pipe, const fa_attention_params *p, const fa_sm90_params *s,
                       int consumer)
{
    consumer_state c;
    c.number = consumer;
    c.at.number = -1;
    c.at.count = 0;
#if OPTIONS
    c.recompute = false;
#endif
    c.leader = threadIdx.x % 32 == 0;
    __asm__ volatile("" : "+r"(c.leader));
    for (next_work_tile(pipe, consumer, &c.at); c.at.key_tiles;
         next_work_tile(pipe, consumer, &c.at)) {
        start_work_tile(pipe, &c);
#if OPTIONS
        c.factor = score_factor(p, queue_entry(pipe, c.at.number), &c.limits);
        if (c.at.needed) load_early(p, queue_entry(pipe, c.at.number), 0, consumer, &c.early);
#endif
        if (c.at.needed) do_key_tiles(pipe, p, &c);
        else release_queries(pipe, &c, true);
#if OPTIONS
        finish_rows(pipe, &c);
#endif
        store_outputs(p, s, queue_entry(pipe, c.at.number), &c.rows, c.out, consumer);
        skip_other_tiles(pipe, &c);
        release_work_tile(pipe, c.at.number);
    }
#if OPTIONS
    if (c.recompute) recompute_rows(pipe, p, s, consumer);
#endif
}

#endif
