/*
 * A consumer: a warpgroup with 64 queries of the work tile and half of the work on them. Its peer
 * in the other block has the other half. For each key tile t it
 *
 *     issues S = Q K^T of tile t + 1, rescales the outputs, exchanges the weights of tile t,
 *     issues out += P V of tile t, computes and sends the max of S, computes weights
 *
 * Each step runs while products that were issued earlier still run, so the data that the peers
 * exchange have the time of a whole product to arrive. A chunk is released when the products of the
 * next chunk have been issued and its own have ended.
 */
#ifndef FA_KERNELS_FORWARD_SM90_WIDE_CONSUMER_CUH
#define FA_KERNELS_FORWARD_SM90_WIDE_CONSUMER_CUH

#include "forward_sm90_wide/config.cuh"
#include "forward_sm90_wide/exchange.cuh"
#include "forward_sm90_wide/multiply.cuh"
#include "forward_sm90_wide/pipeline.cuh"
#include "common/device.cuh"
#include "forward_sm90/cursor.cuh"
#include "forward_sm90/options.cuh"
#include "forward_sm90/scheduler.cuh"
#include "forward_sm90/softmax.cuh"
#include "forward_sm90/stage.cuh"
#include "ptx/barrier.cuh"
#include "ptx/wgmma.cuh"
#if ROUNDED
#include "forward_sm90/recompute.cuh"
#include "forward_sm90/rounded.cuh"
#else
#include "forward_sm90/store.cuh"
#endif

/* The max may exceed a row's base by this many powers of two before outputs are rescaled. A largest
 * weight that is not a power of two is rounded, which matters in peaked rows. */
#define SLACK 0.5f

/* The state that a consumer keeps from tile to tile. */
typedef struct softmax_state {
    row_state rows;
    float top[2];     /* the max over the block's keys of the next tile */
    float rescale[2]; /* the factor of the outputs of the tiles before it */
    uint32_t number;  /* of the next tile whose weights are exchanged, through all work tiles */
#if ROUNDED
    float value_unit;
#endif
} softmax_state;

/* ---- Softmax --------------------------------------------------------------------------------- */

/* Finds the rows' max over the block's keys, and sends it to the peer. */
FA_DEVICE void find_max(const pipeline *pipe, const cursor *at, const tile_limits *limits, int tile,
                        float *s, softmax_state *state, int leader, int consumer)
{
    if (tile < limits->unmasked_from || tile >= limits->unmasked_to)
        mask_scores(s, queue_entry(pipe, at->number), consumer,
                    tile * KEYS + THIS_BLOCK * FRAGMENT_KEYS);
#pragma unroll
    for (int r = 0; r < 2; r++)
        state->top[r] = fa_max_over_lanes(max_of_scores(s, r) * limits->scale, 4);
    send_rows(pipe->received->max[consumer], &pipe->state->max_full[consumer], state->top, leader);
}

/* Raises the bases to the tile's max over the keys of both blocks, which get the same result. A row
 * that has seen no key keeps NO_KEY_SEEN. */
FA_DEVICE void raise_common_bases(const pipeline *pipe, softmax_state *state, int consumer)
{
    float of_peer[2];
    receive_rows(pipe->received->max[consumer], &pipe->state->max_full[consumer],
                 (int)(state->number & 1), of_peer);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float before = state->rows.base[r];
        const float wanted = fmaxf(state->top[r], of_peer[r]) - HEADROOM;
        const float base = wanted > before + SLACK ? wanted : before;
        state->rescale[r] = ptx_ex2(before - base);
        state->rows.base[r] = base;
        state->rows.sum[r] *= state->rescale[r];
    }
}

/* Replaces scores by packed weights. */
FA_DEVICE void weigh_tile(const pipeline *pipe, const tile_limits *limits, float *s,
                          uint32_t *weights, softmax_state *state, int consumer)
{
    const exponent_units u = {limits->scale, {0, 0}};
    float sum[2];
    raise_common_bases(pipe, state, consumer);
    weigh(s, &state->rows, &u, sum);
    add_sums(&state->rows, sum);
    pack_weights(weights, s, 0, WEIGHTS_X2);
}

/* ---- Products of a tile ---------------------------------------------------------------------- */

/* Waits until the products of the last chunk but one that was issued have ended, and releases this
 * chunk. */
FA_DEVICE void release_chunk_before(const pipeline *pipe, const cursor *at, int leader)
{
    ptx_wgmma_wait(1);
    release_chunk(pipe, at->count - 2, leader);
}

/* Scores of a work tile's first key tile. */
FA_DEVICE void find_first_scores(const pipeline *pipe, cursor *at, float *s, int leader,
                                 int consumer)
{
    ptx_register_fence(s, FRAGMENT_KEYS / 2);
#pragma unroll
    for (int chunk = 0; chunk < K_CHUNKS; chunk++) {
        issue_qk(pipe, s, chunk, at->count++, consumer);
        if (chunk) release_chunk_before(pipe, at, leader);
    }
    ptx_wgmma_wait(0);
    ptx_register_fence(s, FRAGMENT_KEYS / 2);
    release_chunk(pipe, at->count - 1, leader);
    ptx_mbarrier_arrive_if(q_empty(pipe, at, consumer), leader && at->key_tiles == 1);
}

/* Before the values of a tile are issued: exchanges its weights, and rescales the outputs to its
 * bases. */
FA_DEVICE void begin_values(const pipeline *pipe, float *out, const uint32_t *weights,
                            softmax_state *state, int leader, int consumer)
{
    share_weights(pipe, weights, state->number++, leader, consumer);
    if (__any_sync(0xffffffff, state->rescale[0] != 1.0f || state->rescale[1] != 1.0f))
        rescale_outputs(out, state->rescale);
}

/* Waits until all products that were issued have ended. */
FA_DEVICE void end_values(const pipeline *pipe, const cursor *at, float *out, int leader,
                          int consumer)
{
    ptx_wgmma_wait(0);
    ptx_register_fence(out, OUTPUTS);
    release_chunk(pipe, at->count - 1, leader);
    release_weights(pipe, leader, consumer);
}

FA_DEVICE void acquire_weights(const pipeline *pipe, const softmax_state *state, int consumer)
{
    ptx_mbarrier_wait_cluster(&pipe->state->weights_full[consumer], (int)(state->number & 1) ^ 1);
}

/* The main loop's body: values of a tile; scores, max and weights of the next one. */
FA_DEVICE void do_tile(const pipeline *pipe, cursor *at, const tile_limits *limits, float *s,
                       float *out, uint32_t *weights, softmax_state *state, int leader,
                       int consumer)
{
    ptx_register_fence(s, FRAGMENT_KEYS / 2);
    issue_qk(pipe, s, 0, at->count++, consumer);
    begin_values(pipe, out, weights, state, leader, consumer);
#pragma unroll
    for (int chunk = 1; chunk < K_CHUNKS; chunk++) {
        issue_qk(pipe, s, chunk, at->count++, consumer);
        release_chunk_before(pipe, at, leader);
    }
    acquire_weights(pipe, state, consumer);
    ptx_register_fence(out, OUTPUTS);
#pragma unroll
    for (int chunk = 0; chunk < V_CHUNKS; chunk++) {
        issue_pv(pipe, out, chunk, at->count++, at->tile > 0, consumer);
        release_chunk_before(pipe, at, leader);
        if (chunk > 0) continue;
        ptx_register_fence(s, FRAGMENT_KEYS / 2);
        ptx_mbarrier_arrive_if(q_empty(pipe, at, consumer),
                               leader && at->tile + 2 == at->key_tiles);
        find_max(pipe, at, limits, at->tile + 1, s, state, leader, consumer);
    }
    weigh_tile(pipe, limits, s, weights, state, consumer);
    end_values(pipe, at, out, leader, consumer);
}

/* Values of a work tile's last key tile. */
FA_DEVICE void do_last_tile(const pipeline *pipe, cursor *at, float *out, const uint32_t *weights,
                            softmax_state *state, int leader, int consumer)
{
    begin_values(pipe, out, weights, state, leader, consumer);
    acquire_weights(pipe, state, consumer);
    ptx_register_fence(out, OUTPUTS);
#pragma unroll
    for (int chunk = 0; chunk < V_CHUNKS; chunk++) {
        issue_pv(pipe, out, chunk, at->count++, at->tile > 0, consumer);
        if (chunk) release_chunk_before(pipe, at, leader);
    }
    end_values(pipe, at, out, leader, consumer);
}

/* ---- The work tiles -------------------------------------------------------------------------- */

FA_DEVICE void start_work_tile(const pipeline *pipe, const cursor *at, int consumer,
                               tile_limits *limits, softmax_state *state)
{
    *limits = find_limits(queue_entry(pipe, at->number), consumer);
    state->rows.base[0] = state->rows.base[1] = NO_KEY_SEEN;
    state->rows.sum[0] = state->rows.sum[1] = 0;
}

/* Computes the sums of rows over the block's keys, after all tiles, and sends them to the peer. */
FA_DEVICE void send_sums(const pipeline *pipe, softmax_state *state, int leader, int consumer)
{
    float sum[2];
    find_sums(&state->rows, sum);
    state->rows.sum[0] = sum[0], state->rows.sum[1] = sum[1];
    send_rows(pipe->received->sums[consumer], &pipe->state->sums_full[consumer], sum, leader);
}

/* Adds the peer's sums. One of the four lanes of a row gets the whole sum. */
FA_DEVICE void add_peer_sums(const pipeline *pipe, int number, row_state *rows, int consumer)
{
    float of_peer[2];
    receive_rows(pipe->received->sums[consumer], &pipe->state->sums_full[consumer], number & 1,
                 of_peer);
#pragma unroll
    for (int r = 0; r < 2; r++) rows->sum[r] = threadIdx.x % 4 == 0 ? rows->sum[r] + of_peer[r] : 0;
}

FA_DEVICE void consume(const pipeline *pipe, const fa_attention_params *p, const fa_sm90_params *s,
                       int consumer)
{
    float out[OUTPUTS], scores[FRAGMENT_KEYS / 2];
    uint32_t weights[FRAGMENT_KEYS / 4];
    softmax_state state = {.number = 0};
    tile_limits limits;
    cursor at = {.number = -1};
#if ROUNDED
    bool recompute = false;
#endif
    int leader = threadIdx.x % 32 == 0;
    __asm__ volatile("" : "+r"(leader));
    for (next_work_tile(pipe, consumer, &at); at.key_tiles; next_work_tile(pipe, consumer, &at)) {
        start_work_tile(pipe, &at, consumer, &limits, &state);
#if ROUNDED
        state.value_unit = apply_units(p, s, queue_entry(pipe, at.number), &limits);
#endif
        find_first_scores(pipe, &at, scores, leader, consumer);
        find_max(pipe, &at, &limits, 0, scores, &state, leader, consumer);
        weigh_tile(pipe, &limits, scores, weights, &state, consumer);
        for (; at.tile + 1 < at.key_tiles; at.tile++)
            do_tile(pipe, &at, &limits, scores, out, weights, &state, leader, consumer);
        send_sums(pipe, &state, leader, consumer);
        do_last_tile(pipe, &at, out, weights, &state, leader, consumer);
        add_peer_sums(pipe, at.number, &state.rows, consumer);
#if ROUNDED
        recompute |= store_rounded(p, queue_entry(pipe, at.number), &state.rows, state.value_unit,
                                   out, consumer);
#else
        (void)store_outputs(p, queue_entry(pipe, at.number), NULL, &state.rows, out, consumer);
#endif
        release_work_tile(pipe, at.number);
    }
#if ROUNDED
    if (recompute) recompute_rows(pipe, p, s, consumer);
#else
    (void)s;
#endif
}

#endif
