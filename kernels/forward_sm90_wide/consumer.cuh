/*
 * A warpgroup of 64 queries, and its peer in the other block. For each tile t of a piece it
 *
 *     asks for S = Q K^T of tile t + 1, rescales the outputs, sends weights of tile t, asks for
 *     out += P V of tile t, finds and sends the maxima of S, weighs
 *
 * each while products that were asked for before still run: what the peers send each other has a whole
 * product's time for its way. Chunks are released one behind the other, when the next one's products have
 * been asked for and its own are done.
 */
#ifndef FA_KERNELS_FORWARD_SM90_WIDE_CONSUMER_CUH
#define FA_KERNELS_FORWARD_SM90_WIDE_CONSUMER_CUH

/* By how many powers of two maxima may grow beyond a row's base before outputs are rescaled. A largest weight that
 * is no power of two is rounded, which counts in rows that few keys dominate. */
#define SLACK 0.5f

/* What a consumer carries from tile to tile. */
typedef struct softmax_state {
    row_state rows;
    float top[2];     /* of the block's keys, of the next tile to be weighed */
    float rescale[2]; /* what outputs of the tiles before it are to be multiplied by */
    uint32_t number;  /* of the next tile whose weights are sent, through all pieces */
} softmax_state;

/* The maxima of the rows' scores of the block's keys; tells them the peer. */
FA_DEVICE void find_maxima(const pipeline *pipe, const progress *at, const place *here, int tile,
                           float *s, softmax_state *state, int leader, int consumer)
{
    if (tile < here->full_from || tile >= here->full_to)
        mask_scores(s, slot_of(pipe, at->number), consumer,
                    tile * KEYS + this_block() * FRAGMENT_KEYS);
#pragma unroll
    for (int r = 0; r < 2; r++) state->top[r] = row_maximum(s, r, here->scale, 0.0f);
    send_rows(pipe->from_peer->maxima[consumer], &pipe->state->maxima_full[consumer], state->top,
              leader);
}

/* Bases that fit the tile's scores, of both blocks; both come to the same. A row without scores keeps
 * NOTHING_SEEN. */
FA_DEVICE void move_common_bases(const pipeline *pipe, softmax_state *state, int consumer)
{
    float theirs[2];
    receive_rows(pipe->from_peer->maxima[consumer], &pipe->state->maxima_full[consumer],
                 (int)(state->number & 1), theirs);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float before = state->rows.base[r];
        const float wanted = fmaxf(state->top[r], theirs[r]) - HEADROOM;
        const float base = wanted > before + SLACK ? wanted : before;
        state->rescale[r] = exp2_fast(before - base);
        state->rows.base[r] = base;
        state->rows.sum[r] *= state->rescale[r];
    }
}

/* Scores become weights, rounded and paired. */
FA_DEVICE void weigh_tile(const pipeline *pipe, const place *here, float *s, uint32_t *weights,
                          softmax_state *state, int consumer)
{
    const units u = {here->scale, {0, 0}};
    float sum[2];
    move_common_bases(pipe, state, consumer);
    weigh(s, &state->rows, &u, sum);
    add_sums(&state->rows, sum);
    round_pairs(weights, s, 0, PAIRS);
}

/* ---- Products of a tile ------------------------------------------------------------------------ */

/* The products of the chunk before the last one that was asked for are done. */
FA_DEVICE void release_before(const pipeline *pipe, const progress *at, int leader)
{
    ptx_wgmma_wait(1);
    release_chunk(pipe, at->count - 2, leader);
}

/* Scores of a piece's first tile. */
FA_DEVICE void find_first_scores(const pipeline *pipe, progress *at, float *s, int leader,
                                 int consumer)
{
    ptx_register_fence(s, FRAGMENT_KEYS / 2);
#pragma unroll
    for (int chunk = 0; chunk < K_CHUNKS; chunk++) {
        multiply_keys(pipe, s, chunk, at->count++, consumer);
        if (chunk) release_before(pipe, at, leader);
    }
    ptx_wgmma_wait(0);
    ptx_register_fence(s, FRAGMENT_KEYS / 2);
    release_chunk(pipe, at->count - 1, leader);
    ptx_mbarrier_arrive_if(q_empty(pipe, at, consumer), leader && at->tiles == 1);
}

/* Before values of a tile are asked for: its weights are sent, and the outputs made to fit its bases. */
FA_DEVICE void begin_values(const pipeline *pipe, float *out, const uint32_t *weights,
                            softmax_state *state, int leader, int consumer)
{
    share_weights(pipe, weights, state->number++, leader, consumer);
    if (__any_sync(0xffffffff, state->rescale[0] != 1.0f || state->rescale[1] != 1.0f))
        rescale_outputs(out, state->rescale);
}

/* Until all products that were asked for are done. */
FA_DEVICE void end_values(const pipeline *pipe, const progress *at, float *out, int leader,
                          int consumer)
{
    ptx_wgmma_wait(0);
    ptx_register_fence(out, OUTPUTS);
    release_chunk(pipe, at->count - 1, leader);
    release_weights(pipe, leader, consumer);
}

FA_DEVICE void wait_for_weights(const pipeline *pipe, const softmax_state *state, int consumer)
{
    ptx_mbarrier_wait_cluster(&pipe->state->weights_full[consumer], (int)(state->number & 1) ^ 1);
}

/* Values of a tile; scores, maxima and weights of the next one. */
FA_DEVICE void do_tile(const pipeline *pipe, progress *at, const place *here, float *s, float *out,
                       uint32_t *weights, softmax_state *state, int leader, int consumer)
{
    ptx_register_fence(s, FRAGMENT_KEYS / 2);
    multiply_keys(pipe, s, 0, at->count++, consumer);
    begin_values(pipe, out, weights, state, leader, consumer);
#pragma unroll
    for (int chunk = 1; chunk < K_CHUNKS; chunk++) {
        multiply_keys(pipe, s, chunk, at->count++, consumer);
        release_before(pipe, at, leader);
    }
    wait_for_weights(pipe, state, consumer);
    ptx_register_fence(out, OUTPUTS);
#pragma unroll
    for (int chunk = 0; chunk < V_CHUNKS; chunk++) {
        multiply_values(pipe, out, chunk, at->count++, at->tile > 0, consumer);
        release_before(pipe, at, leader);
        if (chunk > 0) continue;
        ptx_register_fence(s, FRAGMENT_KEYS / 2);
        ptx_mbarrier_arrive_if(q_empty(pipe, at, consumer), leader && at->tile + 2 == at->tiles);
        find_maxima(pipe, at, here, at->tile + 1, s, state, leader, consumer);
    }
    weigh_tile(pipe, here, s, weights, state, consumer);
    end_values(pipe, at, out, leader, consumer);
}

/* Values of a piece's last tile. */
FA_DEVICE void do_last_tile(const pipeline *pipe, progress *at, float *out, const uint32_t *weights,
                            softmax_state *state, int leader, int consumer)
{
    begin_values(pipe, out, weights, state, leader, consumer);
    wait_for_weights(pipe, state, consumer);
    ptx_register_fence(out, OUTPUTS);
#pragma unroll
    for (int chunk = 0; chunk < V_CHUNKS; chunk++) {
        multiply_values(pipe, out, chunk, at->count++, at->tile > 0, consumer);
        if (chunk) release_before(pipe, at, leader);
    }
    end_values(pipe, at, out, leader, consumer);
}

/* ---- The walk ---------------------------------------------------------------------------------- */

FA_DEVICE void start_piece(const pipeline *pipe, const progress *at, int consumer, place *here,
                           softmax_state *state)
{
    *here = find_place(slot_of(pipe, at->number), consumer);
    state->rows.base[0] = state->rows.base[1] = NOTHING_SEEN;
    state->rows.sum[0] = state->rows.sum[1] = 0;
}

/* The sums of rows over the block's keys, when all are weighed; tells them the peer. */
FA_DEVICE void send_sums(const pipeline *pipe, softmax_state *state, int leader, int consumer)
{
    float sum[2];
    find_sums(&state->rows, sum);
    state->rows.sum[0] = sum[0], state->rows.sum[1] = sum[1];
    send_rows(pipe->from_peer->sums[consumer], &pipe->state->sums_full[consumer], sum, leader);
}

/* With the peer's; one of the four lanes of a row has the whole sum. */
FA_DEVICE void add_peer_sums(const pipeline *pipe, int number, row_state *rows, int consumer)
{
    float theirs[2];
    receive_rows(pipe->from_peer->sums[consumer], &pipe->state->sums_full[consumer], number & 1,
                 theirs);
#pragma unroll
    for (int r = 0; r < 2; r++) rows->sum[r] = threadIdx.x % 4 == 0 ? rows->sum[r] + theirs[r] : 0;
}

FA_DEVICE void consume(const pipeline *pipe, const fa_attention_params *p, int consumer)
{
    float out[OUTPUTS], s[FRAGMENT_KEYS / 2];
    uint32_t weights[FRAGMENT_KEYS / 4];
    softmax_state state = {.number = 0};
    place here;
    progress at = {.number = -1};
    int leader = threadIdx.x % 32 == 0;
    __asm__ volatile("" : "+r"(leader));
    for (next_piece(pipe, consumer, &at); at.tiles; next_piece(pipe, consumer, &at)) {
        start_piece(pipe, &at, consumer, &here, &state);
        find_first_scores(pipe, &at, s, leader, consumer);
        find_maxima(pipe, &at, &here, 0, s, &state, leader, consumer);
        weigh_tile(pipe, &here, s, weights, &state, consumer);
        for (; at.tile + 1 < at.tiles; at.tile++)
            do_tile(pipe, &at, &here, s, out, weights, &state, leader, consumer);
        send_sums(pipe, &state, leader, consumer);
        do_last_tile(pipe, &at, out, weights, &state, leader, consumer);
        add_peer_sums(pipe, at.number, &state.rows, consumer);
        (void)finish(p, slot_of(pipe, at.number), NULL, &state.rows, out, consumer);
        release_piece(pipe, at.number);
    }
}

#endif
