/*
 * A warpgroup of 64 queries. Its own softmax runs while its product P V of the tile before still does. It
 * goes round
 *
 *     ask for S = Q K^T of tile t and for out += P V of tile t - 1, wait for S, softmax of it in place,
 *     wait for P V, round the weights into P
 *
 * (FlashAttention-3, section 3.2, arXiv:2407.08608, within a warpgroup). What counts is the time from one
 * question to the next: as long as it is shorter than the products of the other warpgroups, tensor cores
 * never stand still. So the way of an ordinary tile has no branch but for what is rare.
 */
#ifndef FA_KERNELS_FORWARD_SM90_CONSUMER_CUH
#define FA_KERNELS_FORWARD_SM90_CONSUMER_CUH

FA_DEVICE void start_piece(const pipeline *pipe, const fa_attention_params *p, const progress *at,
                           int consumer, place *here, row_state *rows)
{
    *here = find_place(p, find_slot(pipe, at->number), consumer);
    rows->base[0] = rows->base[1] = NOTHING_SEEN;
    rows->sum[0] = rows->sum[1] = 0;
    rows->unseen = true;
}

/* Scores as the softmax takes them; where they are in other units, of which exponents. */
FA_DEVICE units find_exponents(const pipeline *pipe, const fa_attention_params *p,
                               const fa_sm90_params *sm90, const progress *at, const place *here,
                               float *s, int consumer)
{
    units u = {here->scale, {0, 0}};
#if GENERAL
    change_scores(pipe, p, sm90, at, here, s, &u, consumer);
#endif
    return u;
}

/* ---- Softmax of a tile --------------------------------------------------------------------------- */

/* With maxima: for the first tile that a row sees, and for those that are masked. Waits for the values of
 * the tile before. */
FA_DEVICE void weigh_anew(float *s, float *out, uint32_t *weights, row_state *rows, const units *u,
                          bool first)
{
    float sum[2], rescale[2];
    move_bases(s, rows, rescale, u);
    (void)weigh(s, rows, u, sum);
    if (!first) {
        await_values(out, weights);
        rescale_outputs(out, rescale);
    }
    add_sums(rows, sum);
}

/* Weights that became infinite by their bases: from the scores on. */
FA_DEVICE void weigh_again(const pipeline *pipe, const fa_attention_params *p,
                           const fa_sm90_params *sm90, const progress *at, const place *here,
                           float *s, float *out, uint32_t *weights, row_state *rows, int consumer)
{
    multiply_again(p, find_slot(pipe, at->number), at->tile, s, consumer);
    const units u = find_exponents(pipe, p, sm90, at, here, s, consumer);
    weigh_anew(s, out, weights, rows, &u, false);
}

/* By the bases that there are. */
FA_DEVICE void weigh_plainly(const pipeline *pipe, const fa_attention_params *p,
                             const fa_sm90_params *sm90, const progress *at, const place *here,
                             float *s, float *out, uint32_t *weights, row_state *rows,
                             const units *u, int consumer)
{
    float sum[2];
    if (__any_sync(0xffffffff, weigh(s, rows, u, sum))) {
        await_values(out, weights);
        const float before[2] = {rows->sum[0], rows->sum[1]};
        add_sums(rows, sum);
        if (!lower_weights(s, out, rows)) {
            rows->sum[0] = before[0], rows->sum[1] = before[1];
            weigh_again(pipe, p, sm90, at, here, s, out, weights, rows, consumer);
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
FA_DEVICE void softmax(const pipeline *pipe, const fa_attention_params *p,
                       const fa_sm90_params *sm90, const progress *at, place *here, float *s,
                       float *out, uint32_t *weights, row_state *rows, bool first, int consumer)
{
    const units u = find_exponents(pipe, p, sm90, at, here, s, consumer);
    if (!first && is_plain(here, at->tile))
        weigh_plainly(pipe, p, sm90, at, here, s, out, weights, rows, &u, consumer);
    else {
        if (at->tile < here->full_from || at->tile >= here->full_to)
            mask_scores(s, find_slot(pipe, at->number), consumer, at->tile * KEYS);
        weigh_anew(s, out, weights, rows, &u, first);
        if (rows->unseen) here->plain_from = at->tile + 2;
    }
    round_weights(weights, s);
#if GENERAL
    if (p->dropout_threshold)
        drop_weights(p, find_slot(pipe, at->number), weights, consumer, at->tile * KEYS);
#endif
}

/* ---- The walk ------------------------------------------------------------------------------------ */

#if GENERAL
FA_DEVICE void release_bias(const pipeline *pipe, const fa_sm90_params *sm90, progress *at,
                            int consumer, int leader)
{
    if (!sm90->bias_mapped) return;
    barrier_arrive_if(&pipe->state->bias_empty[consumer], leader);
    at->biases++;
}
#endif

/* The scores of the first tile are there. */
FA_DEVICE void begin_piece(const pipeline *pipe, const fa_attention_params *p,
                           const fa_sm90_params *sm90, progress *at, place *here, float *s,
                           float *out, uint32_t *weights, row_state *rows, int leader, int consumer)
{
    start_piece(pipe, p, at, consumer, here, rows);
    barrier_arrive_if(&pipe->state->k_empty[stage_of(at->count)], leader);
    if (at->mine) {
        barrier_arrive_if(&pipe->state->q_empty[consumer], leader && at->mine == 1);
        softmax(pipe, p, sm90, at, here, s, out, weights, rows, true, consumer);
#if GENERAL
        release_bias(pipe, sm90, at, consumer, leader);
#endif
        return;
    }
    barrier_arrive_if(&pipe->state->q_empty[consumer], leader);
    barrier_wait(&pipe->state->v_full[stage_of(at->count)], parity_of(at->count));
    barrier_arrive_if(&pipe->state->v_empty[stage_of(at->count)], leader);
}

/* A tile behind the first. */
FA_DEVICE void do_tile(const pipeline *pipe, const fa_attention_params *p,
                       const fa_sm90_params *sm90, progress *at, place *here, float *s, float *out,
                       uint32_t *weights, row_state *rows, int leader, int consumer)
{
    const tile_count count = at->count;
    ask(pipe, out, s, weights, count, at->tile > 1, consumer);
    barrier_arrive_if(&pipe->state->k_empty[stage_of(count)], leader);
    barrier_arrive_if(&pipe->state->q_empty[consumer], leader && at->tile + 1 == at->mine);
    softmax(pipe, p, sm90, at, here, s, out, weights, rows, false, consumer);
    barrier_arrive_if(&pipe->state->v_empty[stage_of(count - 1)], leader);
#if GENERAL
    release_bias(pipe, sm90, at, consumer, leader);
#endif
}

/* A tile behind the last one that this consumer needs: others do. */
FA_DEVICE void skip_tile(const pipeline *pipe, tile_count count, int leader)
{
    barrier_arrive_if(&pipe->state->k_empty[stage_of(count)], leader);
    barrier_wait(&pipe->state->v_full[stage_of(count)], parity_of(count));
    barrier_arrive_if(&pipe->state->v_empty[stage_of(count)], leader);
}

/* The tiles of a piece that this consumer does not need; but the values of its last one, if it has any, are
 * to be added first. */
FA_DEVICE void skip_tiles(const pipeline *pipe, progress *at, float *out, uint32_t *weights,
                          bool pending, int leader, int consumer)
{
    const tile_count last = at->count;
    while (++at->tile < at->tiles) {
        at->count++;
        barrier_wait(&pipe->state->k_full[stage_of(at->count)], parity_of(at->count));
        if (pending) {
            ask_values(pipe, out, weights, last, at->mine > 1, consumer);
            barrier_arrive_if(&pipe->state->v_empty[stage_of(last)], leader);
            pending = false;
        } else skip_turn(consumer);
        skip_tile(pipe, at->count, leader);
    }
}

/* All pieces. The scores of a piece's first tile are asked for together with the values of the last of the
 * piece before. Returns whether rows have to be done once more. */
FA_DEVICE bool consume(const pipeline *pipe, const fa_attention_params *p,
                       const fa_sm90_params *sm90, int consumer)
{
    bool broken = false;
    float out[OUTPUTS], s[KEYS / 2];
    uint32_t weights[KEYS / 4];
    row_state rows;
    place here;
    progress at = {.number = -1};
    int leader = threadIdx.x % 32 == 0, mine = 0;
    bool pending = false; /* values of the last tile are still to be added */
    asm volatile("" : "+r"(leader));
    if (consumer == CONSUMERS - 1) pass_turn(consumer); /* consumer 0 begins */
    for (;;) {
        next_piece(pipe, consumer, &at);
        if (at.tiles && pending) {
            ask(pipe, out, s, weights, at.count, mine > 1, consumer);
            await_values(out, weights);
        } else if (at.tiles) ask_scores(pipe, s, at.count, consumer);
        else if (pending) ask_values(pipe, out, weights, at.count - 1, mine > 1, consumer);
        else skip_turn(consumer);
        barrier_arrive_if(&pipe->state->v_empty[stage_of(at.count - 1)], leader && pending);
        if (at.number) {
            broken |= finish(p, &find_slot(pipe, at.number - 1)->tile, pipe->staging, &rows, out,
                             consumer);
            release_piece(pipe, at.number - 1);
        }
        if (!at.tiles) break;
        mine = at.mine;
        begin_piece(pipe, p, sm90, &at, &here, s, out, weights, &rows, leader, consumer);
        while (at.tile + 1 < at.mine) {
            at.tile++;
            at.count++;
            do_tile(pipe, p, sm90, &at, &here, s, out, weights, &rows, leader, consumer);
        }
        pending = mine > 0 && mine == at.tiles;
        if (!pending) skip_tiles(pipe, &at, out, weights, mine > 0, leader, consumer);
        at.count++;
    }
    if (consumer == 0) wait_for_turn(consumer); /* takes the turn that is left */
    return broken;
}

#endif
