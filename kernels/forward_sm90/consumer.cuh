/*
 * A warpgroup of 64 queries. Its own softmax runs while its product P V of the tile before still does.
 * It goes round
 *
 *     ask for S = Q K^T of tile t and for out += P V of tile t - 1, wait for S, softmax of it in
 *     place, wait for P V, round the weights into P
 *
 * (FlashAttention-3, section 3.2, arXiv:2407.08608, within a warpgroup). What counts is the time from
 * one question to the next: as long as it is shorter than all consumers' products of a tile, tensor
 * cores never stand still. So ordinary tiles have a loop of their own, with no branch but for what is rare.
 *
 * All four warps of a warpgroup must ask for products, and wait for them, at the same place of the code: what
 * a warp decides for itself, from its own scores, has neither in it.
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

/* Weights by bases that fit this tile's scores. rescale: what all before are to be multiplied by. */
FA_DEVICE void weigh_with_maxima(float *s, row_state *rows, units *u, float *sum, float *rescale)
{
#if HAS_SERIES
    end_series(s, u);
#endif
    move_bases(s, rows, rescale, u);
    weigh(s, rows, u, sum);
}

/* With maxima, and a mask: for the first tile that a row sees, and for those that it sees in part. */
FA_DEVICE void weigh_carefully(const pipeline *pipe, const fa_attention_params *p, progress *at,
                               const place *here, float *s, float *out, uint32_t *weights,
                               row_state *rows, int consumer)
{
    units u = find_exponents(pipe, p, at, here, s, false, consumer);
    float sum[2], rescale[2];
    if (at->tile < here->full_from || at->tile >= here->full_to)
        mask_scores(s, slot_of(pipe, at->number), consumer, at->tile * KEYS);
    weigh_with_maxima(s, rows, &u, sum, rescale);
    await_values(out, weights);
    if (at->tile > 0) rescale_outputs(out, rescale);
    add_sums(rows, sum);
    round_pairs(weights, s, 0, PAIRS);
}

/* Weights of the tile are too large by the bases that there are: see softmax.cuh. Where they are immense,
 * infinite ones among them, they do not tell their scores any more: these are made once more, and weighed
 * with maxima. */
FA_DEVICE void weigh_again(const pipeline *pipe, const fa_attention_params *p, progress *at,
                           const place *here, float *s, float *out, uint32_t *weights,
                           row_state *rows, const float *sum, int consumer)
{
    const float before[2] = {rows->sum[0], rows->sum[1]};
    add_sums(rows, sum);
    if (!lower_weights(s, out, rows)) {
        float anew[2], rescale[2];
        multiply_again(p, slot_of(pipe, at->number), at->tile, s, consumer);
        units u = find_exponents(pipe, p, at, here, s, true, consumer);
        rows->sum[0] = before[0], rows->sum[1] = before[1];
        weigh_with_maxima(s, rows, &u, anew, rescale);
        rescale_outputs(out, rescale);
        add_sums(rows, anew);
    }
    round_pairs(weights, s, 0, PAIRS);
}

/* Pairs of scores that are weighed together; and of a tile's, so many at least are weighed while values are
 * still being added: what was fastest on an H200. */
#define GROUP (HAS_SERIES ? PAIRS : 4)
#define EARLY_PAIRS (PAIRS * (CONSUMERS == 3 ? 3 : 6) / 8)

FA_DEVICE void weigh_group(float *s, const row_state *rows, const units *u, int from, int to,
                           partial_sums *sums)
{
#if HAS_SERIES
    if (u->series) {
        weigh_pairs(s, rows, u, true, from, to, sums);
        return;
    }
#endif
    weigh_pairs(s, rows, u, false, from, to, sums);
}

/* By the bases that there are. The special-function unit, which the consumers share, is to be at work from
 * the first moment: so a group's exponents are found only while the one before the last becomes weights.
 * Values of the tile before are waited for when EARLY_PAIRS of weights are there, and their place is given
 * back at once; the other weights are rounded in the time that exponentials leave. */
FA_DEVICE void weigh_plainly(const pipeline *pipe, const fa_attention_params *p, progress *at,
                             const place *here, float *s, float *out, uint32_t *weights,
                             row_state *rows, int leader, int nothing, int consumer)
{
    const units u = find_exponents(pipe, p, at, here, s, false, consumer);
    partial_sums sums = {{{0, 0}, {0, 0}}};
    row_state paced = *rows;
    float sum[2];
#pragma unroll
    for (int i = 0; i < PAIRS; i += GROUP) {
        const int to = i + GROUP < PAIRS ? i + GROUP : PAIRS;
        const partial_sums before = sums;
        weigh_group(s, &paced, &u, i, to, &sums);
        if (i > 0 && to < PAIRS) {
            paced.base[0] = known_after(paced.base[0], before.of[0][1], nothing);
            paced.base[1] = known_after(paced.base[1], before.of[1][1], nothing);
        }
        if (i < EARLY_PAIRS && to >= EARLY_PAIRS) {
            hold_until(sums.of[1][1], nothing, pipe->state);
            await_values(out, weights);
            barrier_arrive_if(&pipe->state->v_empty[stage_of(at->count - 1)], leader);
            round_pairs(weights, s, 0, to);
        } else if (i >= EARLY_PAIRS) round_pairs(weights, s, i, to);
    }
    add_up(&sums, sum);
    if (is_too_large(sum)) weigh_again(pipe, p, at, here, s, out, weights, rows, sum, consumer);
    else add_sums(rows, sum);
}

FA_DEVICE void drop(const pipeline *pipe, const fa_attention_params *p, const progress *at,
                    const place *here, uint32_t *weights, int consumer)
{
#if GENERAL
    if (here->options & FA_SM90_DROPOUT)
        drop_weights(p, slot_of(pipe, at->number), weights, consumer, at->tile);
#else
    (void)pipe, (void)p, (void)at, (void)here, (void)weights, (void)consumer;
#endif
}

/* ---- The walk -------------------------------------------------------------------------------- */

/* A tile whose scores are there; values of the one before are being added. */
FA_DEVICE void do_tile(const pipeline *pipe, const fa_attention_params *p, progress *at,
                       const place *here, float *s, float *out, uint32_t *weights, row_state *rows,
                       pending *values, int leader, int consumer)
{
    barrier_arrive_if(&pipe->state->k_empty[stage_of(at->count)], leader);
    barrier_arrive_if(q_empty(pipe, at, consumer), leader && at->tile + 1 == at->mine);
    weigh_carefully(pipe, p, at, here, s, out, weights, rows, consumer);
    drop(pipe, p, at, here, weights, consumer);
    barrier_arrive_if(&pipe->state->v_empty[stage_of(values->count)], leader && values->any);
    values->any = true;
    values->count = at->count;
    values->add = at->tile > 0;
}

/* Tiles that need no mask, from this one on: the way that is to be short. Behind the last one nothing has
 * been asked for yet. */
FA_DEVICE void do_plain_tiles(const pipeline *pipe, const fa_attention_params *p, progress *at,
                              const place *here, float *s, float *out, uint32_t *weights,
                              row_state *rows, pending *values, int leader, int nothing,
                              int consumer)
{
    const int last = here->plain_to - 1;
    for (;;) {
        barrier_arrive_if(&pipe->state->k_empty[stage_of(at->count)], leader);
        if (Q_PLACES == 1) /* the next piece's queries wait for it */
            barrier_arrive_if(q_empty(pipe, at, consumer), leader && at->tile + 1 == at->mine);
        weigh_plainly(pipe, p, at, here, s, out, weights, rows, leader, nothing, consumer);
        drop(pipe, p, at, here, weights, consumer);
        if (at->tile >= last) break;
        const pending known = {true, at->count, 1}; /* this tile: constants, no branches */
        at->tile++;
        at->count++;
        ask(pipe, out, s, weights, at, &known, consumer);
    }
    if (Q_PLACES > 1)
        barrier_arrive_if(q_empty(pipe, at, consumer), leader && at->tile + 1 == at->mine);
    values->any = true;
    values->count = at->count;
    values->add = 1;
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
    const int nothing = find_nothing();
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
            if (at.tile >= here.plain_from && at.tile < here.plain_to)
                do_plain_tiles(pipe, p, &at, &here, s, out, weights, &rows, &values, leader,
                               nothing, consumer);
            else do_tile(pipe, p, &at, &here, s, out, weights, &rows, &values, leader, consumer);
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
