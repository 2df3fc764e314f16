/*
 * The warpgroup that computes the block's share of dQ and adds it from registers to the sums in
 * global memory.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_WIDE_DQ_CUH
#define FA_KERNELS_BACKWARD_SM90_WIDE_DQ_CUH

#include "backward_sm90_wide/config.cuh"
#include "backward_sm90_wide/exchange.cuh"
#include "backward_sm90_wide/multiply.cuh"
#include "backward_sm90_wide/pipeline.cuh"
#include "backward_sm90_wide/tile.cuh"
#include "backward_sm90/clear_ahead.cuh"
#include "backward_sm90/keys.cuh"
#include "backward_sm90/producer.cuh"
#include "common/device.cuh"
#include "ptx/barrier.cuh"
#include "ptx/semaphore.cuh"
#include "ptx/store.cuh"

/* Adds `columns` columns, or stores them if they are the first share. to: the thread's first word of
 * them. */
FA_DEVICE void put_columns(float *to, const float *dq, int columns, bool is_first)
{
#pragma unroll
    for (int j = 0; j < columns / 8; j++) {
        const float4 x = make_float4(dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
        if (is_first) *(float4 *)(void *)(to + 4 * WARPGROUP * j) = x;
        else ptx_add_global_f32x4(to + 4 * WARPGROUP * j, x);
    }
}

/* Descriptors of a tile's operands: dS and the keys, of the block itself and of the peer. */
typedef struct dq_operands {
    uint32_t ds, keys, peer_ds, peer_keys;
} dq_operands;

FA_DEVICE dq_operands find_operands(uint32_t base, int count)
{
    const uint32_t ds = ds_tile(base, count), keys = base + ACROSS(KEY_BLOCK);
    dq_operands o;
    o.ds = ds + (uint32_t)(THIS_BLOCK * Q_BLOCK / UNIT);
    o.keys = keys;
    o.peer_ds = ds + (uint32_t)(PEER_BLOCK * Q_BLOCK / UNIT);
    o.peer_keys = keys + (uint32_t)((PEER_K_AT - PEER_FIRST * KEY_BLOCK) / UNIT);
    return o;
}

/* Whether the thread releases a tile's buffer of dS, and the keys. */
typedef struct dq_releases {
    int ds, keys;
} dq_releases;

/* No product reads them any more. */
FA_DEVICE void release_operands(const pipeline *pipe, int count, dq_releases releases)
{
    release_ds(pipe, count, releases.ds);
#if PERSISTENT
    ptx_mbarrier_arrive_if(&pipe->state->k_empty, releases.keys);
#endif
}

/* Whether a tile's turn is waited for when its products have been computed and the operands released, so that the other warpgroups go on
 * meanwhile (H200, one order, head dim 192: causal n 512 1.02, n 4k 1.02, n 16k 1.03, n 32k 1.055, full n 4k 1.04; 256: n 1k 0.984, n 4k
 * 0.99). */
#define TURN_LATE (ORDERED && HEAD_DIM == 192)

/* Waits for the tile's turn, if sums have one order. */
FA_DEVICE void wait_for_turn(const pipeline *pipe, int count, bool ordered)
{
#if TURNS_APART
    if (ordered) ptx_mbarrier_wait(&pipe->state->turn_full, count & 1);
#else
    (void)pipe, (void)count, (void)ordered;
#endif
}

#if HEAD_DIM == 192

/* Adds a tile's dQ to the sums, or stores it: of both blocks' keys, in this block's columns. Of 192
 * columns, block 0 has the first 96 and block 1 the others, so each has 32 of the middle 64. The
 * products with the block's own keys do not wait for the peer. */
FA_DEVICE void add_dq(const pipeline *pipe, uint32_t base, int count, float *to, bool is_first,
                      dq_releases releases, bool ordered)
{
    const int first = THIS_BLOCK * 2, middle = 1, rest = THIS_BLOCK * DQ_REST;
    const dq_operands o = find_operands(base, count);
    const uint32_t to_first = (uint32_t)(first * KEY_BLOCK / UNIT),
                   to_rest = (uint32_t)((middle * KEY_BLOCK + rest * 2) / UNIT);
    float dq[DQ_SUMS], dq_rest[REST_SUMS];
    ptx_register_fence(dq, DQ_SUMS);
    ptx_register_fence(dq_rest, REST_SUMS);
    ptx_wgmma_fence();
    issue_dq(dq, o.ds, o.keys + to_first, 0);
    issue_dq_rest(dq_rest, o.ds, o.keys + to_rest, 0);
    wait_for_peer_ds(pipe, count);
    ptx_wgmma_fence();
    issue_dq(dq, o.peer_ds, o.peer_keys + to_first, 1);
    issue_dq_rest(dq_rest, o.peer_ds, o.peer_keys + to_rest, 1);
    ptx_wgmma_wait(0);
    ptx_register_fence(dq, DQ_SUMS);
    ptx_register_fence(dq_rest, REST_SUMS);
    release_operands(pipe, count, releases);
    if (TURN_LATE) wait_for_turn(pipe, count, ordered);
    if (!to) return;
    put_columns(to + first * (WARPGROUP * DQ_SUMS), dq, DQ_COLUMNS, is_first);
    put_columns(to + middle * (WARPGROUP * DQ_SUMS) + THIS_BLOCK * (WARPGROUP * REST_SUMS), dq_rest,
                DQ_REST, is_first);
}

#else

/* The same for 256 columns; block 0 has the first 128. There are registers for 64 at a time. */
FA_DEVICE void add_dq(const pipeline *pipe, uint32_t base, int count, float *to, bool is_first,
                      dq_releases releases, bool ordered)
{
    enum { OWN_BLOCKS = BLOCKS / CLUSTER };
    const dq_operands o = find_operands(base, count);
    float dq[DQ_SUMS];
#pragma unroll
    for (int i = 0; i < OWN_BLOCKS; i++) {
        const int block = THIS_BLOCK * OWN_BLOCKS + i;
        const uint32_t columns = (uint32_t)(block * KEY_BLOCK / UNIT);
        ptx_register_fence(dq, DQ_SUMS);
        ptx_wgmma_fence();
        issue_dq(dq, o.ds, o.keys + columns, 0);
        if (i == 0) wait_for_peer_ds(pipe, count);
        ptx_wgmma_fence();
        issue_dq(dq, o.peer_ds, o.peer_keys + columns, 1);
        ptx_wgmma_wait(0);
        ptx_register_fence(dq, DQ_SUMS);
        if (i + 1 == OWN_BLOCKS) release_operands(pipe, count, releases);
        if (to) put_columns(to + block * (WARPGROUP * DQ_SUMS), dq, DQ_COLUMNS, is_first);
    }
}

#endif

/* Whether sums have one order. Then a key tile is added when all key tiles before it have been added.
 * It waits only for blocks of lower numbers, which start no later and do not wait for it. One thread
 * waits and adds to the semaphore for all. The barriers order the other threads' additions after
 * its wait and before its own addition to the semaphore. */
FA_DEVICE bool is_ordered(const fa_backward_params *p, const fa_backward_sm90_params *s)
{
    return s->semaphores && p->dq.data;
}

#if TURNS_APART

/* The thread that waits and adds to the semaphore: not one of the dQ warpgroup, which would lose
 * more than a tile's time, until it has read the semaphore and until its additions are visible to
 * other blocks. It looks whether the next turn has come while the warpgroup multiplies. */
FA_DEVICE void take_turns(const pipeline *pipe, const fa_backward_sm90_params *s)
{
    shared_state *state = pipe->state;
    const block_work *w = work_of(pipe);
    tile_cursor next = first_tile(w);
    const int end = end_count(w);
    bool has_come = false;
    while (next.count < end) {
        const tile_cursor at = next;
        int32_t *semaphore = semaphore_at(s, number_of(s, w, &at), THIS_BLOCK);
        if (!has_come) {
            ptx_semaphore_wait(semaphore, tiles_before(w, at.tile));
            ptx_mbarrier_arrive(&state->turn_full);
        }
        advance(&next, w->from, w->to);
        has_come = next.count < end &&
                   ptx_semaphore_is_reached(semaphore_at(s, number_of(s, w, &next), THIS_BLOCK),
                                            tiles_before(w, next.tile));
        ptx_mbarrier_wait(&state->turn_empty, at.count & 1);
        if (has_come) ptx_mbarrier_arrive(&state->turn_full);
        ptx_semaphore_add(semaphore);
    }
}

#endif

/* Adds dQ of a work tile that has tiles. */
FA_DEVICE void add_work_tile(const pipeline *pipe, const fa_backward_params *p,
                             const fa_backward_sm90_params *s, uint32_t base)
{
    shared_state *state = pipe->state;
    const block_work *w = work_of(pipe);
    const int thread = threadIdx.x % WARPGROUP, end = end_count(w);
    const bool ordered = is_ordered(p, s);
    wait_for_k(pipe, &p->a);
    ptx_mbarrier_wait(&state->peer_k_loaded, keys_parity(w));
#if HIDES
    if (hides_keys(&p->a)) {
        check_keys(pipe->buffers + PEER_K_AT, PEER_BLOCKS, w, PEER_BLOCK * BLOCK_KEYS,
                   thread / 32 * 16, NULL);
        ptx_named_barrier_sync(NAMED_BARRIER_DQ, WARPGROUP);
    }
#endif
#if CLEARS_AHEAD
    if (s->cleared) {
        if (thread == 0) wait_until_cleared(s, (int)blockIdx.x);
        ptx_named_barrier_sync(NAMED_BARRIER_DQ, WARPGROUP);
    }
#endif
    for (tile_cursor at = first_tile(w); at.count < end; advance(&at, w->from, w->to)) {
        const int64_t number = number_of(s, w, &at);
        float *to = p->dq.data ? s->sums + number * (SUM_BYTES / 4) + 4 * thread : 0;
        const bool is_first = ORDERED && tiles_before(w, at.tile) == 0;
        dq_releases releases;
        releases.ds = is_leader() && (PERSISTENT || at.count + DS_BUFFERS < end);
        releases.keys = is_leader() && at.count + 1 == end;
#if TURNS_APART
        ptx_mbarrier_wait(&state->ds_full[ds_buffer(at.count)], ds_parity(at.count));
        if (!TURN_LATE) wait_for_turn(pipe, at.count, ordered);
        add_dq(pipe, base, at.count, to, is_first, releases, ordered);
        if (ordered) ptx_mbarrier_arrive(&state->turn_empty);
#else
        int32_t *semaphore = semaphore_at(s, number, THIS_BLOCK);
        if (ordered && thread == 0) ptx_semaphore_wait(semaphore, tiles_before(w, at.tile));
        ptx_mbarrier_wait(&state->ds_full[ds_buffer(at.count)], ds_parity(at.count));
        if (ordered) ptx_named_barrier_sync(NAMED_BARRIER_DQ, WARPGROUP);
        add_dq(pipe, base, at.count, to, is_first, releases, false);
        if (ordered) {
            ptx_named_barrier_sync(NAMED_BARRIER_DQ, WARPGROUP);
            if (thread == 0) ptx_semaphore_add(semaphore);
        }
#endif
    }
}

FA_DEVICE void compute_dq(const pipeline *pipe, const fa_backward_params *p,
                          const fa_backward_sm90_params *s)
{
    const uint32_t base = first_descriptor(pipe);
    pipeline own = *pipe;
#pragma unroll 1
    for (int n = 0; acquire_work_tile(&own, n); n++) {
        if (work_of(&own)->tiles > 0) add_work_tile(&own, p, s, base);
        release_work_tile(&own, n, is_leader());
    }
}

#endif
