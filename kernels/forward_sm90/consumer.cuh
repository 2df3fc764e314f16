/*
 * A consumer: a warpgroup with 64 queries of the work tile. For each key tile t it
 *
 *     issues S = Q K^T of tile t and out += P V of tile t - 1, waits for S, computes its softmax in place, waits for
 *     P V, packs the weights into P
 *
 * (FlashAttention-3, section 3.2, arXiv:2407.08608). The tensor cores are never idle if the time from one issue to the
 * next is shorter than the time of all consumers' products for a tile. So plain tiles have their own loop, which only
 * branches for rare cases.
 *
 * How a consumer gets from one work tile to the next depends on the shape: see the three loops at the end of this file.
 *
 * All four warps of a warpgroup must issue products, and wait for them, at the same point of the code.
 */
#ifndef FA_KERNELS_FORWARD_SM90_CONSUMER_CUH
#define FA_KERNELS_FORWARD_SM90_CONSUMER_CUH

#include "forward_sm90/config.cuh"
#include "common/device.cuh"
#include "forward_sm90/consumer_state.cuh"
#include "forward_sm90/cursor.cuh"
#include "forward_sm90/multiply.cuh"
#include "forward_sm90/pipeline.cuh"
#include "forward_sm90/scheduler.cuh"
#if ROUNDED
#include "forward_sm90/rounded.cuh"
#else
#include "forward_sm90/store.cuh"
#endif
#include "forward_sm90/tile_softmax.cuh"
#include "ptx/order.cuh"

/* ---- The key tiles of a work tile ------------------------------------------------------------ */

/* Issues the scores of a tile and the values of the previous one; returns when the scores are complete. */
FA_DEVICE void issue_and_wait(const pipeline *pipe, consumer_state *c, const pending_values *values)
{
    acquire_tile_bias(pipe, c);
    issue_scores_and_values(pipe, c->out, c->scores, c->weights, &c->at, values, c->number);
    if (ADAPTIVE) {
        /* Ordered before the wait, so that it is known when the scores are there. */
        c->new_max = had_new_max(pipe, c);
        ptx_order_after(c->new_max ? 1.0f : 2.0f, c->zero, pipe->state);
    }
    wait_for_scores(c->scores);
}

/* One masked tile, whose scores are complete. The values of the previous tile are being added. */
FA_DEVICE void do_masked_tile(const pipeline *pipe, const fa_attention_params *p, consumer_state *c)
{
    release_keys(pipe, c);
    release_queries(pipe, c, c->at.tile + 1 == c->at.needed);
    softmax_masked(pipe, p, c);
    apply_dropout(pipe, p, c);
    release_values(pipe, c, c->values.count, c->values.any);
    c->values.any = true;
    c->values.count = c->at.count;
    c->values.accumulate = c->at.tile > 0;
}

/* The main loop: plain tiles from this one on, whose scores are complete. Ends after the last plain tile, or when the
 * warpgroup starts to track the max, or (tracked) stops tracking it. Nothing is issued after the last plain tile. exact: a softcap's
 * series is exact enough for a log-sum-exp. */
FA_DEVICE void do_plain_tiles(const pipeline *pipe, const fa_attention_params *p, consumer_state *c,
                              bool tracked, bool exact)
{
    int last = c->limits.plain_to - 1;
#if HAS_SERIES
    if (tracked) c->series_below = allow_series_below(&c->limits, &c->rows);
#endif
    for (;;) {
        release_keys(pipe, c);
        if (Q_STAGES == 1) /* the next work tile's queries wait for this stage */
            release_queries(pipe, c, c->at.tile + 1 == c->at.needed);
        softmax_plain(pipe, p, c, tracked, exact);
        apply_dropout(pipe, p, c);
        if (c->at.tile >= last) break;
        const pending_values values = {true, c->at.count, 1}; /* constants, so no branches */
        c->at.tile++;
        c->at.count++;
        issue_and_wait(pipe, c, &values);
        if (ADAPTIVE && tracked) {
            c->tracked = c->new_max ? TRACKED_TILES : c->tracked - 1;
            if (!c->tracked) last = 0;
        } else if (ADAPTIVE && c->new_max) last = 0;
    }
    if (Q_STAGES > 1) release_queries(pipe, c, c->at.tile + 1 == c->at.needed);
    if (ADAPTIVE && tracked) bound_peaked_rows(pipe, p, c);
    else if (ADAPTIVE && c->new_max) c->tracked = TRACKED_TILES;
    c->values.any = true;
    c->values.count = c->at.count;
    c->values.accumulate = 1;
}

/* The first tile of a work tile in which this consumer has nothing to do. Its scores were issued nevertheless. */
FA_DEVICE void skip_first_tile(const pipeline *pipe, consumer_state *c)
{
    const tile_count count = c->at.count;
    wait_for_outputs(c->out, c->weights);
    release_pending_values(pipe, c);
    release_keys(pipe, c);
    release_queries(pipe, c, true);
    acquire_values(pipe, count);
    release_values(pipe, c, count, true);
}

/* The base with which a row begins. All scores of rows that are left over are 0. With this base their weights add up to as much
 * as a flat row's; weights of MAX_WEIGHT would look like a score that has grown, in each work tile. */
FA_DEVICE float find_first_base(const work_tile *w, int own)
{
#if SPLIT
    const float of_flat_rows = 3.0f - HEADROOM;
    if (own >= queries_of_consumer(w) * fa_sm90_box_heads(w->box)) return of_flat_rows;
#else
    (void)w, (void)own;
#endif
    return NO_KEY_SEEN;
}

FA_DEVICE void start_work_tile(const pipeline *pipe, const fa_attention_params *p,
                               consumer_state *c)
{
    (void)p;
    const work_tile *w = this_work_tile(pipe, c);
    c->limits = find_limits(w, c->number);
#if ROUNDED
    c->value_unit = apply_units(pipe->p, pipe->s, w, &c->limits);
#endif
#if HAS_SERIES
    find_series(p, w, &c->limits);
    /* An instruction takes only one uniform register: the assembler must take this number for one that threads do not share. */
    c->limits.third = ptx_depend_on(c->limits.third, __int_as_float((int)threadIdx.x), c->zero);
#if HAS_EXACT_SERIES
    c->limits.seventh = ptx_depend_on(c->limits.seventh, __int_as_float((int)threadIdx.x), c->zero);
#endif
#endif
#pragma unroll
    for (int r = 0; r < 2; r++) c->rows.base[r] = find_first_base(w, row_of(0, r));
    c->rows.sum[0] = c->rows.sum[1] = 0;
    c->tracked = 0;
}

/* The key tiles that this consumer needs. The scores of the first one are complete. */
FA_DEVICE void do_key_tiles(const pipeline *pipe, const fa_attention_params *p, consumer_state *c)
{
    start_work_tile(pipe, p, c);
    if (!c->at.needed) skip_first_tile(pipe, c);
    for (c->at.tile = 0; c->at.tile < c->at.needed;) {
        if (c->at.tile >= c->limits.plain_from && c->at.tile < c->limits.plain_to) {
            if (ADAPTIVE && c->new_max) c->tracked = TRACKED_TILES;
            /* Each series has loops of its own: a branch in a tile costs 5% or more. */
            const bool exact = HAS_EXACT_SERIES && p->lse, tracked = TRACKED || c->tracked;
            if (exact && tracked) do_plain_tiles(pipe, p, c, true, true);
            else if (exact) do_plain_tiles(pipe, p, c, false, true);
            else if (tracked) do_plain_tiles(pipe, p, c, true, false);
            else do_plain_tiles(pipe, p, c, false, false);
        } else do_masked_tile(pipe, p, c);
        if (++c->at.tile >= c->at.needed) break;
        c->at.count++;
        issue_and_wait(pipe, c, &c->values);
    }
}

/* The key tiles after those, which only other consumers need. The values of this consumer's last tile stay in their
 * stage in the meantime: there is at most one such tile, unless the consumer needs no tile at all. */
FA_DEVICE void skip_other_tiles(const pipeline *pipe, consumer_state *c)
{
    static_assert(ROWS * (CONSUMERS - 1) <= KEYS * (STAGES - 1),
                  "or the producer would wait for the stage of the pending values");
    for (int tile = max(c->at.needed, 1); tile < c->at.key_tiles; tile++) {
        const tile_count count = ++c->at.count;
        acquire_keys(pipe, count);
        pingpong_wait(c->number);
        pingpong_next(c->number);
        release_keys(pipe, c);
        acquire_values(pipe, count);
        release_values(pipe, c, count, true);
    }
    c->at.count++;
}

/* Adds the values of a work tile's last key tile, if there are any. */
FA_DEVICE void add_last_values(const pipeline *pipe, consumer_state *c)
{
    issue_values(pipe, c->out, c->weights, &c->values, c->number);
    release_pending_values(pipe, c);
}

/* Stores work tile `number`, whose outputs are complete. */
FA_DEVICE void store_work_tile(const pipeline *pipe, const fa_attention_params *p,
                               consumer_state *c, int number, const row_state *rows)
{
#if ROUNDED
    c->recompute |=
        store_rounded(p, queue_entry(pipe, number), rows, c->value_unit, c->out, c->number);
#else
    c->recompute |=
        store_outputs(p, queue_entry(pipe, number), pipe->out_buffer, rows, c->out, c->number);
#endif
    release_work_tile(pipe, number);
}

/* ---- The work tiles -------------------------------------------------------------------------- */

/* One work tile after another. This is the only way with one stage of queries, because the next queries come late. */
FA_DEVICE void consume_in_sequence(const pipeline *pipe, const fa_attention_params *p,
                                   consumer_state *c)
{
    for (next_work_tile(pipe, c->number, &c->at); c->at.key_tiles;
         next_work_tile(pipe, c->number, &c->at)) {
        acquire_tile_bias(pipe, c);
        issue_scores(pipe, c->scores, &c->at, c->number);
        wait_for_last_scores(c->scores);
        do_key_tiles(pipe, p, c);
        add_last_values(pipe, c);
        store_work_tile(pipe, p, c, c->at.number, &c->rows);
        skip_other_tiles(pipe, c);
    }
}

/* Outputs are stored while the scores of the next work tile's first key tile are computed. */
FA_DEVICE void consume_overlapped(const pipeline *pipe, const fa_attention_params *p,
                                  consumer_state *c)
{
    for (next_work_tile(pipe, c->number, &c->at); c->at.key_tiles;
         next_work_tile(pipe, c->number, &c->at)) {
        issue_values_and_scores(pipe, c->out, c->scores, c->weights, &c->at, &c->values, c->number);
        release_pending_values(pipe, c);
        if (c->at.number > 0) store_work_tile(pipe, p, c, c->at.number - 1, &c->rows);
        wait_for_last_scores(c->scores);
        do_key_tiles(pipe, p, c);
        skip_other_tiles(pipe, c);
    }
    add_last_values(pipe, c);
    if (c->at.number > 0) store_work_tile(pipe, p, c, c->at.number - 1, &c->rows);
}

/* Work tiles of one key tile. The values of each are added during the softmax of the next one, and its outputs are
 * stored before the softmax of the one after that. If no values are pending, because there is no such work tile or it
 * has nothing to do, their product is issued nevertheless and its result is ignored: the compiler must see running
 * products on every path to a tile. */
FA_DEVICE void consume_single_tiles(const pipeline *pipe, const fa_attention_params *p,
                                    consumer_state *c)
{
    row_state before = c->rows;
    for (;;) {
        next_work_tile(pipe, c->number, &c->at);
        if (c->at.number > 1) store_work_tile(pipe, p, c, c->at.number - 2, &before);
        before = c->rows;
        if (!c->at.key_tiles) break;
        issue_and_wait(pipe, c, &c->values);
        do_key_tiles(pipe, p, c);
        skip_other_tiles(pipe, c);
    }
    add_last_values(pipe, c);
    if (c->at.number > 0) store_work_tile(pipe, p, c, c->at.number - 1, &before);
}

/* All work tiles of the block. Returns whether rows must be recomputed. */
FA_DEVICE bool consume(const pipeline *pipe, const fa_attention_params *p, int consumer)
{
    consumer_state c;
    c.number = consumer;
    c.recompute = c.values.any = false;
    c.values.accumulate = c.values.count = c.at.count = 0;
    c.at.number = -1;
#if OPTIONS & FA_SM90_BIAS
    c.at.biases = 0;
#endif
    c.zero = ptx_opaque_zero();
    c.leader = threadIdx.x % 32 == 0;
    __asm__ volatile("" : "+r"(c.leader));
    if (consumer == CONSUMERS - 1) pingpong_next(consumer); /* consumer 0 begins */
    if (SINGLE_TILES) consume_single_tiles(pipe, p, &c);
    else if (OVERLAPPED) consume_overlapped(pipe, p, &c);
    else consume_in_sequence(pipe, p, &c);
    if (consumer == 0) pingpong_wait(consumer); /* for the arrival that is left over */
    return c.recompute;
}

#endif
