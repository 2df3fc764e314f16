/*
 * The consumers, with 64 keys each. For every tile of queries a consumer recomputes the scores,
 * computes weights and dS from them, and adds to dK and dV, which stay in its registers. The dQ of
 * a tile is issued with the next tile's products: the other consumer's half of dS is available by
 * then, and nobody has waited for it.
 *
 * A warp that issues a product waits until the tensor cores have room for it. So a consumer issues
 * all products of a tile, and the next tile's scores and dP, in its turn, and none while it
 * computes weights.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_CONSUMER_CUH
#define FA_KERNELS_BACKWARD_SM90_CONSUMER_CUH

#include "backward_sm90/chain.cuh"
#include "backward_sm90/config.cuh"
#include "backward_sm90/consumer_state.cuh"
#include "backward_sm90/keys.cuh"
#include "backward_sm90/multiply.cuh"
#include "backward_sm90/options.cuh"
#include "backward_sm90/parts.cuh"
#include "backward_sm90/pipeline.cuh"
#include "backward_sm90/rows.cuh"
#include "backward_sm90/store.cuh"
#include "backward_sm90/work.cuh"
#include "common/device.cuh"
#include "common/softmax.cuh"
#include "common/x2.cuh"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/shared.cuh"
#include "ptx/store.cuh"
#include "ptx/thread.cuh"
#include "ptx/tma.cuh"

#if DQ_PARTS == 1

/* Whether dQ is whole with the block's share of this use. */
FA_DEVICE bool is_whole(const pipeline *pipe, int use)
{
#if GIVES_ROOM
    return is_last_share(work_of(pipe), use);
#else
    (void)pipe, (void)use;
    return false;
#endif
}

/* dQ of the previous tile, for the store warp or the next block. use: the number of this use of the
 * buffers; whole: see above, of a variant with several buffers. */
FA_DEVICE void put_dq_columns(const pipeline *pipe, consumer_state *c, int use, bool whole)
{
    (void)whole;
#if CHAINED
    pass_dq(pipe, c, use);
#elif ROUNDING
    const block_work *w = work_of(pipe);
    if (!(GIVES_ROOM ? whole : is_last_share(w, use))) {
        store_dq_columns(c, use);
        return;
    }
    if (gets_sums(w, use)) add_loaded_dq(c, use);
    store_rounded_dq(c, find_dq_row(pipe, c->number), use);
#else
    (void)pipe;
    store_dq_columns(c, use);
#endif
}

/* The consumer's turn: the gradients of the tile before `at`, then the scores and dP of tile `at`.
 * dP comes last because it uses the registers of dQ. whole: of dQ of the tile before that. */
FA_DEVICE void multiply_tile(const pipeline *pipe, consumer_state *c, const tile_cursor *at,
                             float *lse, bool whole)
{
    const int count = at->count - 1, next = stage_of(at->count);
    issue_gradients(c, count);
#if DQ_FIRST
    ptx_wgmma_wait(2);
    ptx_register_fence(c->dp, DQ_SUMS);
    if (tile_number(c, count) > 0) free_ds(c);
    if (DQ_WAITS_IN_TURN) wait_for_dq_buffer(pipe, c, count);
    put_dq_columns(pipe, c, count, whole);
    prepare_dp(pipe, c, at->count);
    ptx_wgmma_wait(1);
    release_q(pipe, c, count);
    ptx_register_forget(c->scores, SCORES);
    ptx_wgmma_fence();
    issue_s(c, next);
    ptx_fence_proxy_async(); /* of dS and dQ, while dV and S are computed */
    share_dq(pipe, c, count);
    load_lse(pipe, lse, at->count);
    ptx_wgmma_wait(1);
    release_dout(pipe, c, count);
    ptx_register_fence(c->dp, SCORES);
    ptx_wgmma_fence();
    issue_dp(c, c->dp, next);
    let_other_issue(c);
#else
    ptx_wgmma_wait(1);
    release_q(pipe, c, count);
    release_dout(pipe, c, count);
    if (STAGES == 2) ptx_mbarrier_wait(&pipe->state->q_full[next], parity_of(at->count));
    ptx_register_forget(c->scores, SCORES);
    ptx_wgmma_fence();
    issue_s(c, next);
    ptx_wgmma_wait(1);
    ptx_register_fence(c->dp, DQ_SUMS);
    if (shares_dbias(pipe)) wait_for_dq_buffer(pipe, c, 2 * count + 1);
    put_dq_columns(pipe, c, count, whole);
    if (STAGES == 2) ptx_mbarrier_wait(&pipe->state->dout_full[next], parity_of(at->count));
    ptx_register_forget(c->dp, SCORES);
    ptx_wgmma_fence();
    issue_dp(c, c->dp, next);
    ptx_fence_proxy_async(); /* of dS and dQ */
    let_other_issue(c);
    share_dq(pipe, c, count);
    load_lse(pipe, lse, at->count);
#endif
}

/* Whether tile `count` and a buffer for dQ are ready. One branch for three barriers takes less time
 * than a wait for each of them. */
FA_DEVICE bool is_ready(const pipeline *pipe, const consumer_state *c, int count)
{
    shared_state *state = pipe->state;
    const int stage = stage_of(count), parity = parity_of(count), use = count - 1;
    const uint32_t turn = (uint32_t)use / DQ_BUFFERS;
    return (int)ptx_mbarrier_is_over(&state->q_full[stage], parity) &
           (int)ptx_mbarrier_is_over(&state->dout_full[stage], parity) &
           (int)ptx_mbarrier_is_over(dq_empty(state, c->number, use),
                                     (int)(turn & 1) ^ !GIVES_ROOM);
}

/* Multiplies the tile before `at`, and computes weights and dS of tile `at`. All products are
 * issued together: the tensor cores work for one consumer while the other one computes weights and
 * issues nothing. Loads are waited for before the consumer's turn. The exception is two stages,
 * where the next tile may not have arrived by then. */
FA_DEVICE void consume_tile(const pipeline *pipe, const fa_backward_params *p, consumer_state *c,
                            const tile_cursor *at, bool masked)
{
    shared_state *state = pipe->state;
    const int next = stage_of(at->count), parity = parity_of(at->count);
    tile_options options;
    float lse[QUERIES / 4];
    if (!TESTS_TOGETHER || !is_ready(pipe, c, at->count)) {
        if (!shares_dbias(pipe) && !DQ_WAITS_IN_TURN) wait_for_dq_buffer(pipe, c, at->count - 1);
        if (STAGES > 2) ptx_mbarrier_wait(&state->q_full[next], parity);
        if (STAGES > 2) ptx_mbarrier_wait(&state->dout_full[next], parity);
    }
    const bool whole = is_whole(pipe, at->count - 1);
    wait_until_may_issue(c);
    multiply_tile(pipe, c, at, lse, whole);
    make_weights(pipe, &p->a, c, at, lse, &options, masked);
    make_ds(pipe, p, c, at, &options, masked);
}

#endif

#if PERSISTENT

/* Acquires the stage after the last tile's, through which the consumers store gradients. */
FA_DEVICE void acquire_room(const pipeline *pipe, int end)
{
    ptx_mbarrier_wait(&pipe->state->q_full[stage_of(end)], parity_of(end));
    ptx_mbarrier_wait(&pipe->state->dout_full[stage_of(end)], parity_of(end));
}

FA_DEVICE void release_room(const pipeline *pipe, const consumer_state *c, int end)
{
    ptx_fence_proxy_async(); /* TMA writes to this stage next */
    __syncwarp();
    ptx_mbarrier_arrive_if(&pipe->state->q_empty[stage_of(end)], c->leader);
    ptx_mbarrier_arrive_if(&pipe->state->dout_empty[stage_of(end)], c->leader);
}

#endif

#if ENDS_EARLY

/* The products of the last tile. The turn is passed on when they have been issued, so that a short
 * block ends sooner. dQ of the tile before goes to the next block first, and the last dQ is computed
 * while dV is stored. Consumer 0 computes it when consumer 1 has issued its products, as that has
 * stored its dS before. */
FA_DEVICE void finish_tiles(const pipeline *pipe, const fa_backward_params *p, consumer_state *c,
                            int end)
{
    const int last = end - 1;
    wait_for_dq_buffer(pipe, c, shares_dbias(pipe) ? 2 * end - 1 : last);
    ptx_fence_proxy_async(); /* of dS */
    wait_until_may_issue(c);
    issue_gradients(c, last);
    let_other_issue(c);
#if DQ_FIRST
    ptx_wgmma_wait(2);
#else
    ptx_wgmma_wait(0);
#endif
    ptx_register_fence(c->dp, DQ_SUMS);
    put_dq_columns(pipe, c, last, is_whole(pipe, last));
    ptx_fence_proxy_async();
    share_dq(pipe, c, last);
    if (c->number == 0) wait_until_may_issue(c);
    ptx_register_forget(c->dp, DQ_SUMS);
    ptx_wgmma_fence();
    issue_tile_dq(c, ds_tile(c, last));
    ptx_wgmma_wait(1);
    release_q(pipe, c, last);
    release_dout(pipe, c, last);
    store_sums(pipe, p, c, end, false, true);
    wait_for_dq_buffer(pipe, c, shares_dbias(pipe) ? 2 * end : end);
    ptx_wgmma_wait(0);
    ptx_register_fence(c->dp, DQ_SUMS);
    put_dq_columns(pipe, c, end, is_whole(pipe, end));
    ptx_fence_proxy_async();
    share_dq(pipe, c, end);
    store_sums(pipe, p, c, end, true, false);
}

#elif DQ_PARTS == 1

/* The products of the last tile. Its dQ needs another turn, because consumer 1 stores its dS after
 * consumer 0. dV is stored meanwhile, and dK while the last dQ is added and, in a persistent block,
 * the next keys are loaded (DK_LAST). */
FA_DEVICE void finish_tiles(const pipeline *pipe, const fa_backward_params *p, consumer_state *c,
                            int end)
{
    const int last = end - 1;
    wait_for_dq_buffer(pipe, c, shares_dbias(pipe) ? 2 * end - 1 : last);
    /* Of dS: consumer 1 computes the last dQ without another turn, in which its warps would meet. */
    ptx_fence_proxy_async();
    wait_until_may_issue(c);
    issue_gradients(c, last);
    ptx_wgmma_wait(0);
    release_q(pipe, c, last);
    release_dout(pipe, c, last);
#if PERSISTENT && !KEYS_EARLY
    ptx_mbarrier_arrive_if(&pipe->state->v_empty, c->leader);
#endif
    ptx_register_fence(c->dp, DQ_SUMS);
    put_dq_columns(pipe, c, last, is_whole(pipe, last));
    ptx_fence_proxy_async();
    let_other_issue(c);
    share_dq(pipe, c, last);
#if PERSISTENT
    acquire_room(pipe, end);
#endif
    store_sums(pipe, p, c, end, !DK_LAST, true);
    if (c->number == 0) wait_until_may_issue(c);
    ptx_register_forget(c->dp, DQ_SUMS);
    ptx_wgmma_fence();
    issue_tile_dq(c, ds_tile(c, last));
    wait_for_dq_buffer(pipe, c, shares_dbias(pipe) ? 2 * end : end);
    ptx_wgmma_wait(0);
    ptx_register_fence(c->dp, DQ_SUMS);
#if PERSISTENT && !KEYS_EARLY
    ptx_mbarrier_arrive_if(&pipe->state->k_empty, c->leader);
#endif
    put_dq_columns(pipe, c, end, is_whole(pipe, end));
    ptx_fence_proxy_async();
    share_dq(pipe, c, end);
#if DK_LAST
    store_sums(pipe, p, c, end, true, false);
#endif
#if PERSISTENT
    release_room(pipe, c, end);
#endif
}

#endif

#if ASSISTS

/* Consumer 1 if none of the block's keys are its own: it computes its columns of dQ, from the other
 * one's half of dS, and nothing else. Its own half is zeros. A head's last block then takes two thirds
 * of the time. */
FA_DEVICE void assist(const pipeline *pipe, const fa_backward_params *p, consumer_state *c,
                      int tiles)
{
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) c->ds[i] = 0;
#pragma unroll
    for (int n = 0; n < DS_BUFFERS; n++) store_ds(c, c->ds, n);
    ptx_fence_proxy_async();
    let_other_issue(c); /* consumer 0 may begin */
    wait_for_k(pipe, &p->a);
#if DQ_TRANSPOSED
    load_all_keys(pipe, c->all_keys);
#endif
#pragma unroll 1
    for (int count = 0; count <= tiles; count++) {
        const bool has_turn = count < tiles; /* the last dQ is computed without one */
        if (has_turn) wait_until_may_issue(c);
        ptx_register_forget(c->dp, DQ_SUMS);
        ptx_wgmma_fence();
        issue_tile_dq(c, ds_before(c, count));
        /* With three buffers of dS only turns say that one has been read. */
        if (DQ_FIRST && has_turn) let_other_issue(c);
        ptx_wgmma_wait(0);
        ptx_register_fence(c->dp, DQ_SUMS);
        if (!DQ_FIRST && has_turn) let_other_issue(c);
        if (DQ_FIRST && count > 0 && count < tiles - 1) free_ds(c);
        if (has_turn) {
            ptx_mbarrier_arrive_if(&pipe->state->q_empty[stage_of(count)], c->leader);
            ptx_mbarrier_arrive_if(&pipe->state->dout_empty[stage_of(count)], c->leader);
        }
        wait_for_dq_buffer(pipe, c, count);
        put_dq_columns(pipe, c, count, is_whole(pipe, count));
        ptx_fence_proxy_async();
        share_dq(pipe, c, count);
    }
    store_sums(pipe, p, c, tiles, true, true); /* zeros, if the block leaves its sums */
}

#endif

/* No query sees the keys, so their gradients are zeros. */
FA_DEVICE void finish_nothing(const pipeline *pipe, const fa_backward_params *p,
                              const consumer_state *c, int first)
{
#if PERSISTENT
    wait_for_dq_buffer(pipe, c, first);
    share_dq(pipe, c, first);
    acquire_room(pipe, first);
#endif
    store_sums(pipe, p, c, first, true, true);
#if PERSISTENT
    release_room(pipe, c, first);
#endif
}

/* Where the lane stores its 16 bytes of a matrix of dS: query lane % 8 + 8 (lane / 16), keys 8
 * (lane / 8 % 2) of the warp's keys, in TMA's swizzle. */
FA_DEVICE uint32_t find_ds_row(const pipeline *pipe, int consumer)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32;
    return ptx_shared_address(pipe->buffers + DS_AT) +
           (uint32_t)(consumer * Q_BLOCK + (lane % 8 + lane / 16 * 8) * 128 +
                      ((warp * 2 + lane / 8 % 2) ^ lane % 8) * 16);
}

/* A work tile of `tiles` query tiles. from, to: those of each head. */
FA_DEVICE void consume_work_tile(const pipeline *pipe, const block_work *w,
                                 const fa_backward_params *p, consumer_state *c, int consumer,
                                 int tiles, int from, int to)
{
    const int end = first_count(w) + tiles;
#if PERSISTENT
    c->first = w->first;
#endif
#pragma unroll
    for (int i = 0; i < DK_SUMS; i++) c->dk[i] = 0;
#pragma unroll
    for (int i = 0; i < DV_SUMS; i++) c->dv[i] = 0;
#if ASSISTS
    if (tiles > 2 && consumer == 1 && w->num_keys <= OWN_KEYS) {
        assist(pipe, p, c, tiles);
        return;
    }
#endif
    if (tiles > 0) {
        tile_cursor at = first_tile(w);
        begin_tiles(pipe, p, c, &at);
#if DQ_PARTS > 1
        (void)consumer, (void)from, (void)to;
        consume_tiles(pipe, p, c, &at);
#elif HIDES
        for (advance(&at, from, to); at.count < end; advance(&at, from, to))
            consume_tile(pipe, p, c, &at, true);
#else
        const int unmasked_from = w->unmasked_from[consumer],
                  unmasked_to = w->unmasked_to[consumer];
        advance(&at, from, to);
        while (at.count < end) {
            while (at.count < end && at.tile >= unmasked_from && at.tile < unmasked_to) {
                consume_tile(pipe, p, c, &at, false);
                advance(&at, from, to);
            }
            while (at.count < end && (at.tile < unmasked_from || at.tile >= unmasked_to)) {
                consume_tile(pipe, p, c, &at, true);
                advance(&at, from, to);
            }
        }
#endif
        finish_tiles(pipe, p, c, end);
    } else {
        finish_nothing(pipe, p, c, first_count(w));
    }
}

FA_DEVICE void consume(const pipeline *block, const fa_backward_params *p, int consumer)
{
    /* A copy: the compiler then generates the machine code that was measured. */
    pipeline own = *block;
#if !PERSISTENT
    const block_work *w = work_of(block);
    const int tiles = w->tiles, from = w->from, to = w->to;
#endif
    consumer_state c;
#if CHAINED
    c.base = ptx_uniform(ptx_descriptor_low_in_cluster(own.buffers, 0));
#else
    c.base = ptx_uniform(ptx_descriptor_low(own.buffers, 0));
#endif
    c.ds_row = find_ds_row(&own, consumer);
    /* In other variants no register is free for it. */
    if (!OPTIONS && DQ_PARTS == 1) c.ds_row = ptx_keep(c.ds_row);
#if DQ_PARTS > 1
    c.dq =
        ptx_shared_address(own.buffers + DQ_AT + consumer * DQ_PART) + threadIdx.x % WARPGROUP * 16;
#elif WHOLE_DQ
    c.dq = find_dq_row(&own, consumer);
#else
    c.dq = (float4 *)(own.buffers + DQ_AT + consumer * DQ_PART) + threadIdx.x % WARPGROUP;
#endif
    c.scale = inner_scale(&p->a);
    /* In a uniform register if registers are scarce. */
    c.number = DQ_PARTS > 1 ? (int)ptx_uniform((uint32_t)consumer) : consumer;
    c.leader = threadIdx.x % 32 == 0;
#if CHAINED
    for (int use = 1; use <= DQ_BUFFERS; use++) expect_dq(&own, &c, use);
#endif
#if PERSISTENT
#pragma unroll 1
    for (int n = 0; acquire_work_tile(&own, n); n++) {
        const block_work *w = own.work;
        consume_work_tile(&own, w, p, &c, consumer, w->tiles, w->from, w->to);
        __syncwarp();
        release_work_tile(&own, n, c.leader);
    }
#else
    consume_work_tile(&own, w, p, &c, consumer, tiles, from, to);
#endif
}

#endif
