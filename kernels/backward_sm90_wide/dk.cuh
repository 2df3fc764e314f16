/*
 * The warpgroup that computes dP, dS and dK. It reads weights from the dV warpgroup, and stores dS
 * for the dQ warpgroup.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_WIDE_DK_CUH
#define FA_KERNELS_BACKWARD_SM90_WIDE_DK_CUH

#include "backward_sm90_wide/config.cuh"
#include "backward_sm90_wide/multiply.cuh"
#include "backward_sm90_wide/pipeline.cuh"
#include "backward_sm90_wide/tile.cuh"
#include "backward_sm90/keys.cuh"
#include "backward_sm90/options.cuh"
#include "backward_sm90/rows.cuh"
#include "backward_sm90/store.cuh"
#include "common/device.cuh"
#include "common/x2.cuh"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/shared.cuh"
#include "ptx/store.cuh"
#include "ptx/thread.cuh"
#include "ptx/tma.cuh"

typedef struct dk_state {
    float dk[DK_SUMS], ds[SCORES]; /* first dP, then dS */
    uint32_t base;                 /* descriptor of the block's keys */
    pinned_rows values, dout;
    uint32_t ds_row; /* find_ds_row of the first buffer */
    thread_places own;
} dk_state;

/* Applies dropout to dP. weight: negative if it is dropped (mark_dropped). */
FA_DEVICE float drop_gradient(const fa_attention_params *p, float weight, float dp)
{
    if (!(OPTIONS & FA_SM90_DROPOUT) || (!DROPOUT_ALONE && !p->dropout_threshold)) return dp;
    return __float_as_int(weight) < 0 ? 0.0f : dp * p->dropout_scale;
}

/* dS = P (dP - delta). masked: if a weight is 0, its dS is 0 whatever dP is. */
FA_DEVICE void multiply_weights(const fa_attention_params *p, float *ds, uint32_t weights,
                                uint32_t rows, bool masked)
{
    float delta[4];
#pragma unroll
    for (int j = 0; j < QUERIES / 8; j++) {
        const uint4 bits = ptx_ld_shared_v4(weights + (uint32_t)(16 * WARPGROUP * j));
        const float weight[4] = {fa_bits_float(bits.x), fa_bits_float(bits.y),
                                 fa_bits_float(bits.z), fa_bits_float(bits.w)};
        if (j % 2 == 0) load_four_rows(delta, rows + DELTA_AT + 32 * (uint32_t)j);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float *x = ds + 4 * j + e;
            const float dp = drop_gradient(p, weight[e], *x);
            *x = (OPTIONS & FA_SM90_DROPOUT ? fabsf(weight[e]) : weight[e]) *
                 subtract_delta(dp, delta[j % 2 * 2 + e % 2]);
            if (masked && weight[e] == 0.0f) *x = 0.0f;
        }
    }
}

/* Computes dS of a tile from dP, which is complete. The dV warpgroup has waited for the tile's
 * queries and rows before it shared the weights. */
FA_DEVICE void make_ds(const pipeline *pipe, const fa_attention_params *p, dk_state *c,
                       const tile_cursor *at, const tile_range *range)
{
    shared_state *state = pipe->state;
    const int count = at->count;
    const uint32_t rows = c->own.rows + (uint32_t)(q_stage(count) * ROW_BYTES);
    ptx_mbarrier_wait(&state->p_full, count & 1);
    if ((OPTIONS && !DROPOUT_ALONE && !SOFTCAP_ALONE) || is_masked(range, at->tile))
        multiply_weights(p, c->ds, c->own.weights, rows, true);
    else multiply_weights(p, c->ds, c->own.weights, rows, false);
    ptx_mbarrier_arrive(&state->p_empty);
}

/* Where the lane stores its 16 bytes of a matrix of dS: query lane % 8 + 8 (lane / 16), keys 8
 * (lane / 8 % 2) of the warp's, in TMA's swizzle. */
FA_DEVICE uint32_t find_ds_row(const pipeline *pipe)
{
    const int thread = ptx_thread_id() % WARPGROUP, lane = thread % 32, warp = thread / 32;
    return ptx_shared_address(pipe->buffers + DS_AT + THIS_BLOCK * Q_BLOCK) +
           (uint32_t)((lane % 8 + lane / 16 * 8) * 128 +
                      ((warp * 2 + lane / 8 % 2) ^ lane % 8) * 16);
}

/* Stores a tile of dS, transposed: a row for each query. The peer's dQ needs it as well
 * (send_ds). */
FA_DEVICE void share_ds(const pipeline *pipe, const dk_state *c, const uint32_t *ds, int count)
{
    shared_state *state = pipe->state;
    const uint32_t row = c->ds_row + (uint32_t)(ds_buffer(count) * DS_BYTES);
    ptx_mbarrier_wait(&state->ds_empty[ds_buffer(count)], ds_parity(count) ^ 1);
#pragma unroll
    for (int j = 0; j < QUERIES / 8; j += 2)
        ptx_stmatrix_x4_trans(row + (uint32_t)(j * 8 * 128), ds + 2 * j);
    ptx_fence_proxy_async();
    ptx_mbarrier_arrive(&state->ds_full[ds_buffer(count)]);
}

FA_DEVICE void issue_dp(dk_state *c, int stage)
{
    if (PINS) issue_pinned_scores(c->ds, &c->values, &c->dout, 0);
    else issue_scores(c->ds, c->base + V_AT / UNIT, dout_tile(c->base, stage), VALUE_DIM);
}

/* Stores dbias of a tile whose dS has been computed. */
FA_DEVICE void put_tile_dbias(const pipeline *pipe, const fa_backward_params *p, const dk_state *c,
                              const tile_cursor *at)
{
#if HIDES && !(BIAS_ALONE && HEAD_DIM == 256)
    const block_work *w = work_of(pipe);
    if (!p->dbias_by_others) return;
    const tile_options options = find_tile_place(w, at, THIS_BLOCK);
    put_dbias(p, w, &options, c->ds);
#else
    (void)pipe, (void)p, (void)c, (void)at;
#endif
}

/* Adds a tile whose dS has been computed, and computes dS of the next one. As in add_dv, its
 * queries are released early, and after the last tile, if it is not apart, there is one more product,
 * which is not used. */
FA_DEVICE void add_dk(const pipeline *pipe, const fa_backward_params *p, dk_state *c,
                      tile_cursor *at, const tile_range *range, bool more)
{
    shared_state *state = pipe->state;
    const int count = at->count, stage = q_stage(count);
    const int ready = more ? count + 1 : count; /* the tile that is waited for */
    uint32_t ds[SCORES / 2];
    uint32_t stored[SCORES / 2]; /* what a product reads is not read beside it */

#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) {
        ds[i] = fa_pack_x2(c->ds[2 * i], c->ds[2 * i + 1]);
        stored[i] = ptx_keep(ds[i]);
    }
    put_tile_dbias(pipe, p, c, at);
    advance(at, range->from, range->to);
    ptx_register_fence(c->dk, DK_SUMS);
    ptx_wgmma_fence();
    issue_gradient(c->dk, ds, q_tile(c->base, stage) + ACROSS(Q_BLOCK), HEAD_DIM);
    share_ds(pipe, c, stored, count); /* while the product runs */
    if (more || !LAST_APART) {
        ptx_mbarrier_wait(&state->dout_full[dout_stage(ready)], dout_parity(ready));
        ptx_register_fence(c->ds, SCORES);
        ptx_wgmma_fence();
        issue_dp(c, dout_stage(count + 1));
        ptx_wgmma_wait(1);
    } else ptx_wgmma_wait(0);
    ptx_register_fence(c->dk, DK_SUMS);
    keep_operands(ds);
    /* In a persistent block dK is stored through the last tile's stage before it is released. */
    if (!PERSISTENT || more) ptx_mbarrier_arrive_if(&state->q_empty[stage], c->own.leader);
    if (LAST_APART && !more) return;
    ptx_wgmma_wait(0);
    ptx_register_fence(c->ds, SCORES);
    ptx_mbarrier_arrive_if(&state->dout_empty[dout_stage(ready)], c->own.leader && more);
    if (more) make_ds(pipe, &p->a, c, at, range);
}

/* Stores dK, of which all tiles have been added, through the last tile's stage of queries. The dV
 * warpgroup has read that stage: its weights have arrived. */
FA_DEVICE void put_dk(const pipeline *pipe, const fa_backward_params *p, const dk_state *c,
                      const tile_range *range)
{
    const block_work *w = work_of(pipe);
    const int last = range->tiles > 0 ? q_stage(range->end - 1) : 0;
#if PERSISTENT
    if (range->tiles == 0 && !w->key_sums) { /* no stage is this warpgroup's */
        store_zeros(&w->keys, &p->dk, HEAD_DIM, p->a.d, THIS_BLOCK);
        return;
    }
    /* The other warps' products have read the stage as well. */
    ptx_named_barrier_sync(NAMED_BARRIER_DK, WARPGROUP);
#endif
    if (w->key_sums) leave_sums(w->key_sums, c->dk, HEAD_DIM, THIS_BLOCK);
    else
        store_gradients(&w->keys, &p->dk, warp_buffer(pipe, Q_AT + last * Q_BYTES, HEAD_DIM), c->dk,
                        HEAD_DIM, p->a.d, p->a.scale, THIS_BLOCK);
#if PERSISTENT
    if (range->tiles == 0) return;
    ptx_fence_proxy_async(); /* TMA writes to the stage after these stores */
    __syncwarp();
    ptx_mbarrier_arrive_if(&pipe->state->q_empty[last], c->own.leader);
#endif
}

FA_DEVICE void compute_dk(const pipeline *pipe, const fa_backward_params *p)
{
    shared_state *state = pipe->state;
    pipeline own = *pipe;
    dk_state c;
    c.ds_row = ptx_keep(find_ds_row(pipe));
    c.own = find_places(pipe);
#pragma unroll 1
    for (int n = 0; acquire_work_tile(&own, n); n++) {
        const block_work *w = work_of(&own);
        if (PERSISTENT) ptx_wgmma_fence(); /* lanes meet */
        const tile_range range = find_tiles(w);
        c.base = first_descriptor(&own);
        if (PINS) {
            c.values = pin_rows(c.base + V_AT / UNIT);
            c.dout = pin_rows(dout_tile(c.base, 0));
        }
#pragma unroll
        for (int i = 0; i < DK_SUMS; i++) c.dk[i] = 0;
        if (range.tiles > 0) {
            tile_cursor at = begin(w);
            const int stage = dout_stage(at.count);
            wait_for_v(&own);
            ptx_mbarrier_wait(&state->dout_full[stage], dout_parity(at.count));
            ptx_wgmma_fence();
            issue_dp(&c, stage);
            ptx_wgmma_wait(0);
            ptx_register_fence(c.ds, SCORES);
            ptx_mbarrier_arrive_if(&state->dout_empty[stage], c.own.leader);
            make_ds(&own, &p->a, &c, &at, &range);
            while (at.count + LAST_APART < range.end)
                add_dk(&own, p, &c, &at, &range, LAST_APART || at.count + 1 < range.end);
            if (LAST_APART) add_dk(&own, p, &c, &at, &range, false);
        }
        put_dk(&own, p, &c, &range);
        release_work_tile(&own, n, c.own.leader);
    }
}

#endif
