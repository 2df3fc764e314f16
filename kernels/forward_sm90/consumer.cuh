/*
 * A warpgroup of 64 queries. Its own softmax runs while its product P V of the tile before still does.
 * It goes round
 *
 *     ask for S = Q K^T of tile t and for out += P V of tile t - 1, wait for S, softmax of it in
 *     place, wait for P V, round the weights into P
 *
 * (FlashAttention-3, section 3.2, arXiv:2407.08608, within a warpgroup). What counts is the time from
 * one question to the next: as long as it is shorter than all consumers' products of a tile, tensor
 * cores never stand still. So the way of an ordinary tile has no branch but for what is rare.
 */
#ifndef FA_KERNELS_FORWARD_SM90_CONSUMER_CUH
#define FA_KERNELS_FORWARD_SM90_CONSUMER_CUH

FA_DEVICE void start_piece(const pipeline *pipe, const progress *at, int consumer, place *here,
                           row_state *rows)
{
    *here = find_place(slot_of(pipe, at->number), consumer);
    rows->base[0] = rows->base[1] = NOTHING_SEEN;
    rows->sum[0] = rows->sum[1] = 0;
}

/* Scores become what the softmax takes, by the options; returns which exponents they stand for. again:
 * they were made once more. */
FA_DEVICE units find_exponents(const pipeline *pipe, const fa_attention_params *p, progress *at,
                               const place *here, float *s, bool again, int consumer)
{
    units u = {.scale = here->scale};
#if GENERAL
    if (here->options & CHANGES_SCORES) change_scores(pipe, p, at, here, s, &u, again, consumer);
#endif
    return u;
}

/* ---- Softmax of a tile ----------------------------------------------------------------------- */

/* With maxima: for the first tile that a row sees, and for those that are masked. Waits for the values
 * of the tile before. */
FA_DEVICE void weigh_anew(float *s, float *out, uint32_t *weights, row_state *rows, units *u,
                          bool first)
{
    float sum[2], rescale[2];
#if HAS_SERIES
    end_series(s, u);
#endif
    move_bases(s, rows, rescale, u);
    (void)weigh(s, rows, u, false, sum);
    await_values(out, weights);
    if (!first) rescale_outputs(out, rescale);
    add_sums(rows, sum);
}

/* Weights that are immense, infinite ones among them, do not tell their scores any more: these are made
 * once more, and weighed with maxima. */
FA_DEVICE void weigh_again(const pipeline *pipe, const fa_attention_params *p, progress *at,
                           const place *here, float *s, float *out, uint32_t *weights,
                           row_state *rows, int consumer)
{
    multiply_again(p, slot_of(pipe, at->number), at->tile, s, consumer);
    units u = find_exponents(pipe, p, at, here, s, true, consumer);
    weigh_anew(s, out, weights, rows, &u, false);
}

FA_DEVICE bool weigh_by(float *s, const row_state *rows, const units *u, float *sum)
{
#if HAS_SERIES
    if (u->series) return weigh(s, rows, u, true, sum);
#endif
    return weigh(s, rows, u, false, sum);
}

/* By the bases that there are; but where weights are too large, see softmax.cuh. */
FA_DEVICE void weigh_plainly(const pipeline *pipe, const fa_attention_params *p, progress *at,
                             const place *here, float *s, float *out, uint32_t *weights,
                             row_state *rows, const units *u, int consumer)
{
    float sum[2];
    if (__any_sync(0xffffffff, weigh_by(s, rows, u, sum))) {
        await_values(out, weights);
        const float before[2] = {rows->sum[0], rows->sum[1]};
        add_sums(rows, sum);
        if (!lower_weights(s, out, rows)) {
            rows->sum[0] = before[0], rows->sum[1] = before[1];
            weigh_again(pipe, p, at, here, s, out, weights, rows, consumer);
        }
    } else {
        add_sums(rows, sum);
        await_values(out, weights);
    }
}

/* Whether all rows of the warp see the whole tile, and have seen something before. */
FA_DEVICE bool is_plain(const place *here, int tile)
{
    return tile >= here->plain_from && tile < here->full_to;
}

/* Scores become weights, rounded and paired. */
FA_DEVICE void softmax(const pipeline *pipe, const fa_attention_params *p, progress *at,
                       place *here, float *s, float *out, uint32_t *weights, row_state *rows,
                       int consumer)
{
    units u = find_exponents(pipe, p, at, here, s, false, consumer);
    if (is_plain(here, at->tile))
        weigh_plainly(pipe, p, at, here, s, out, weights, rows, &u, consumer);
    else {
        if (at->tile < here->full_from || at->tile >= here->full_to)
            mask_scores(s, slot_of(pipe, at->number), consumer, at->tile * KEYS);
        weigh_anew(s, out, weights, rows, &u, at->tile == 0);
        if (rows->unseen) here->plain_from = max(here->plain_from, at->tile + 2);
    }
    round_weights(weights, s);
#if GENERAL
    if (here->options & FA_SM90_DROPOUT)
        drop_weights(p, slot_of(pipe, at->number), weights, consumer, at->tile);
#endif
}

/* ---- The walk -------------------------------------------------------------------------------- */

/* A tile whose scores are there; values of the one before are being added. */
FA_DEVICE void do_tile(const pipeline *pipe, const fa_attention_params *p, progress *at,
                       place *here, float *s, float *out, uint32_t *weights, row_state *rows,
                       pending *values, int leader, int consumer)
{
    barrier_arrive_if(&pipe->state->k_empty[stage_of(at->count)], leader);
    barrier_arrive_if(q_empty(pipe, at, consumer), leader && at->tile + 1 == at->mine);
    softmax(pipe, p, at, here, s, out, weights, rows, consumer);
    barrier_arrive_if(&pipe->state->v_empty[stage_of(values->count)], leader && values->any);
    values->any = true;
    values->count = at->count;
    values->add = at->tile > 0;
}

/* The first tile of a piece in which this consumer has nothing to do; scores of it were asked for all
 * the same. */
FA_DEVICE void pass_tile(const pipeline *pipe, const progress *at, float *out, uint32_t *weights,
                         pending *values, int leader, int consumer)
{
    await_values(out, weights);
    barrier_arrive_if(&pipe->state->v_empty[stage_of(values->count)], leader && values->any);
    values->any = false;
    barrier_arrive_if(&pipe->state->k_empty[stage_of(at->count)], leader);
    barrier_arrive_if(q_empty(pipe, at, consumer), leader);
    barrier_wait(&pipe->state->v_full[stage_of(at->count)], parity_of(at->count));
    barrier_arrive_if(&pipe->state->v_empty[stage_of(at->count)], leader);
}

/* The tiles of a piece behind those that this consumer needs: others do. Values of its last one wait
 * meanwhile in their place, for there is one such tile at most (or it needs none). */
FA_DEVICE void skip_tiles(const pipeline *pipe, progress *at, int leader, int consumer)
{
    static_assert(ROWS * (CONSUMERS - 1) <= KEYS * (STAGES - 1), "values must not be waited for");
    while (++at->tile < at->tiles) {
        const tile_count count = ++at->count;
        barrier_wait(&pipe->state->k_full[stage_of(count)], parity_of(count));
        wait_for_turn(consumer);
        pass_turn(consumer);
        barrier_arrive_if(&pipe->state->k_empty[stage_of(count)], leader);
        barrier_wait(&pipe->state->v_full[stage_of(count)], parity_of(count));
        barrier_arrive_if(&pipe->state->v_empty[stage_of(count)], leader);
    }
}

/* The piece before, whose outputs are complete, but not yet written. */
typedef struct unfinished {
    bool any, broken; /* broken: of all so far, rows have to be done once more */
    int number;
    row_state rows;
} unfinished;

FA_DEVICE void finish_piece(const pipeline *pipe, const fa_attention_params *p, unfinished *before,
                            float *out, int consumer)
{
    before->broken |=
        finish(p, slot_of(pipe, before->number), pipe->staging, &before->rows, out, consumer);
    release_piece(pipe, before->number);
    before->any = false;
}

/* The second tile of a piece. Between asking for its scores and for the values of the first, which take
 * the place of the outputs of the piece before, these are written: that takes no time of the tensor
 * cores. */
FA_DEVICE void ask_second(const pipeline *pipe, const fa_attention_params *p, float *out, float *s,
                          const uint32_t *weights, const progress *at, unfinished *before,
                          int consumer)
{
    const tile_count count = at->count;
    barrier_wait(&pipe->state->k_full[stage_of(count)], parity_of(count));
    wait_for_turn(consumer);
    REGISTER_FENCE(s, KEYS / 2);
    wgmma_fence();
    multiply_qk(s, at->q, k_place(pipe, count));
    pass_turn(consumer);
    if (before->any) finish_piece(pipe, p, before, out, consumer);
    barrier_wait(&pipe->state->v_full[stage_of(count - 1)], parity_of(count - 1));
    REGISTER_FENCE(out, OUTPUTS);
    wgmma_fence();
    multiply_pv(out, weights, v_place(pipe, count - 1), 0);
    wgmma_wait(1);
    REGISTER_FENCE(s, KEYS / 2);
}

/* All pieces. The scores of a piece's first tile are asked for together with the values of the last of
 * the piece before. Where there are none, because there is no such piece or nothing to do in it, values
 * are asked for all the same, whatever they are: nobody reads the outputs, and the compiler has to see
 * products running on each way to a tile. Returns whether rows have to be done once more. */
FA_DEVICE bool consume(const pipeline *pipe, const fa_attention_params *p, int consumer)
{
    float out[OUTPUTS], s[KEYS / 2];
    uint32_t weights[KEYS / 4];
    row_state rows;
    place here;
    progress at = {.number = -1};
    pending values = {false, 0, 0};
    unfinished before = {.number = -1};
    int leader = threadIdx.x % 32 == 0;
    bool done = false;
    asm volatile("" : "+r"(leader));
    if (consumer == CONSUMERS - 1) pass_turn(consumer); /* consumer 0 begins */
    for (;;) {
        if (!done) next_piece(pipe, consumer, &at);
        if (before.any) finish_piece(pipe, p, &before, out, consumer);
        if (done) break;
        before.any = at.number > 0;
        before.number = at.number - 1;
        before.rows = rows;
        done = !at.tiles;
        if (done) {
            ask_values(pipe, out, weights, &values, consumer);
            barrier_arrive_if(&pipe->state->v_empty[stage_of(values.count)], leader && values.any);
            continue;
        }
        ask(pipe, out, s, weights, &at, &values, consumer);
        start_piece(pipe, &at, consumer, &here, &rows);
        if (!at.mine) pass_tile(pipe, &at, out, weights, &values, leader, consumer);
        for (at.tile = 0; at.tile < at.mine;) {
            do_tile(pipe, p, &at, &here, s, out, weights, &rows, &values, leader, consumer);
            if (++at.tile >= at.mine) break;
            at.count++;
            if (at.tile == 1) ask_second(pipe, p, out, s, weights, &at, &before, consumer);
            else ask(pipe, out, s, weights, &at, &values, consumer);
        }
        at.tile = max(at.mine, 1) - 1;
        skip_tiles(pipe, &at, leader, consumer);
        at.count++;
    }
    if (consumer == 0) wait_for_turn(consumer); /* takes the turn that is left */
    return before.broken;
}

#endif
