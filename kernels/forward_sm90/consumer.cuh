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
 * How it gets from one piece to the next depends on the shape: at the end of this file.
 *
 * All four warps of a warpgroup must ask for products, and wait for them, at the same place of the code: what
 * a warp decides for itself, from its own scores, has neither in it.
 */
#ifndef FA_KERNELS_FORWARD_SM90_CONSUMER_CUH
#define FA_KERNELS_FORWARD_SM90_CONSUMER_CUH

/* What a consumer carries along, in registers. */
typedef struct work {
    int consumer; /* which one it is */
    float out[OUTPUTS], s[KEYS / 2];
    uint32_t weights[KEYS / 4];
    row_state rows;
    int quiet;   /* above 0: the warpgroup tracks maxima, for so many tiles without a new one */
    float bound; /* of a thread's sum of weights in a tile: beyond it, bases are renewed */
    bool flat;   /* the warp's rows */
    bool moved;  /* a base of the warpgroup moved in the tile before: see tell_moved */
    place here;
    progress at;
    pending values;
    bool broken; /* rows have to be done once more */
#if HAS_SERIES
    bool series; /* the warp's plain tiles take it in place of tanh */
#endif
#if BIAS_AHEAD
    uint32_t bias[KEYS / 4]; /* of the tile whose scores are made: pairs like weights' */
#endif
    int leader, nothing; /* lane 0 of a warp: 1; 0: see hopper.cuh */
} work;

FA_DEVICE const piece *piece_of(const pipeline *pipe, const work *x)
{
    return slot_of(pipe, x->at.number);
}

FA_DEVICE void start_piece(const pipeline *pipe, work *x)
{
    x->here = find_place(piece_of(pipe, x), x->consumer);
    x->rows.base[0] = x->rows.base[1] = NOTHING_SEEN;
    x->rows.sum[0] = x->rows.sum[1] = 0;
    x->quiet = 0;
}

/* The warps of a warpgroup track maxima together, since their products stand at one place of the code. Which of
 * them moved a base in a tile, they tell each other by the tile's count in shared memory. It is there when all
 * have come to the barrier at which they issue the next products; and it is read before they come to the one
 * after, so two words are enough. */
FA_DEVICE uint32_t *moved_word(const pipeline *pipe, const work *x, tile_count count)
{
    return &pipe->state->moved[x->consumer][count & 1];
}

FA_DEVICE void tell_moved(const pipeline *pipe, const work *x)
{
    if (x->leader) *(volatile uint32_t *)moved_word(pipe, x, x->at.count) = x->at.count;
}

FA_DEVICE bool read_moved(const pipeline *pipe, const work *x)
{
    const tile_count before = x->at.count - 1;
    return kept(*(volatile uint32_t *)moved_word(pipe, x, before)) == before;
}

/* Gives places back: of keys and of values, and of the queries with a piece's last tile. */
FA_DEVICE void release_keys(const pipeline *pipe, const work *x)
{
    barrier_arrive_if(&pipe->state->k_empty[stage_of(x->at.count)], x->leader);
}

FA_DEVICE void release_values(const pipeline *pipe, const work *x, tile_count count, bool any)
{
    barrier_arrive_if(&pipe->state->v_empty[stage_of(count)], x->leader && any);
}

/* Of values that have been added, if there were any. */
FA_DEVICE void release_added(const pipeline *pipe, work *x)
{
    release_values(pipe, x, x->values.count, x->values.any);
    x->values.any = false;
}

FA_DEVICE void release_queries(const pipeline *pipe, const work *x, bool last)
{
    barrier_arrive_if(q_empty(pipe, &x->at, x->consumer), x->leader && last);
}

/* The bias of the tile whose scores are asked for next. It is asked for before them: behind a product that takes
 * its weights from registers a warp gets on only when most of it has run. */
FA_DEVICE void fetch_tile_bias(const pipeline *pipe, work *x)
{
#if BIAS_AHEAD
    if (x->at.mine) take_bias(pipe, &x->at, x->bias, x->consumer);
#else
    (void)pipe, (void)x;
#endif
}

/* Scores become what the softmax takes, by the options; returns which exponents they stand for. again:
 * they were made once more. */
FA_DEVICE units find_exponents(const pipeline *pipe, const fa_attention_params *p, work *x,
                               bool again)
{
    units u = {.scale = x->here.scale};
#if BIAS_AHEAD
    if (!again) {
        add_bias(p, piece_of(pipe, x), x->bias, x->s);
        return u;
    }
#endif
#if OPTIONS
    if (x->here.options & CHANGES_SCORES)
        change_scores(pipe, p, &x->at, &x->here, x->s, &u, again, x->consumer);
#else
    (void)pipe, (void)p, (void)again;
#endif
    return u;
}

/* The same for a plain tile. tracked: with maxima. */
FA_DEVICE units find_plain_exponents(const pipeline *pipe, const fa_attention_params *p, work *x,
                                     bool tracked)
{
    (void)tracked;
#if HAS_SERIES
    const units tanh = {.scale = x->here.scale, .third = 0, .fifth = 0};
    const units series = {.scale = x->here.first, .third = x->here.third, .fifth = x->here.fifth};
    const float inner = piece_of(pipe, x)->inner;
    if ((x->series && !tracked) || are_in_series(p, x->s, inner)) return series;
    cap_scores(x->s, inner);
    return tanh;
#else
    return find_exponents(pipe, p, x, false);
#endif
}

/* Asks for scores of a tile and for values of the one before; returns when the scores are there. */
FA_DEVICE void ask_and_wait(const pipeline *pipe, work *x, const pending *values)
{
    fetch_tile_bias(pipe, x);
    ask(pipe, x->out, x->s, x->weights, &x->at, values, x->consumer);
    if (ADAPTS) {
        /* Held, so that it is known before the scores are. */
        x->moved = read_moved(pipe, x);
        hold_until(x->moved ? 1.0f : 2.0f, x->nothing, pipe->state);
    }
    await_first_scores(x->s);
}

/* ---- Softmax of a tile ----------------------------------------------------------------------- */

/* Weights by bases that fit this tile's scores. rescale: what all before are to be multiplied by. */
FA_DEVICE void weigh_with_maxima(float *s, row_state *rows, const units *u, float *sum,
                                 float *rescale)
{
    move_bases(s, rows, rescale, u);
    weigh(s, rows, u, sum);
}

/* The bound of a thread's sum of weights in a tile. */
FA_DEVICE void set_bound(const pipeline *pipe, const fa_attention_params *p, work *x, float bound)
{
    x->bound = fminf(bound, SUM_BOUND);
#if HAS_SERIES
    x->series = allow_series(p, piece_of(pipe, x), &x->rows, x->bound);
#else
    (void)pipe, (void)p;
#endif
}

/* Whether the warp's rows are flat, from their sums of a tile whose maxima are known. Under ALiBi maxima move
 * on from tile to tile. */
FA_DEVICE void judge_rows(const pipeline *pipe, const fa_attention_params *p, work *x,
                          const float *sum)
{
    const float average = average_sum(sum);
    x->flat = average >= FLAT_SUM * LARGEST && !has_peaked_row(sum);
#if OPTIONS
    x->flat = x->flat && !(x->here.options & FA_SM90_ALIBI);
#endif
    if (!x->flat) tell_moved(pipe, x);
    set_bound(pipe, p, x, LARGEST + FLAT_GROWTH * average);
}

/* The bound of rows that have had no new maximum for a while, from the average of all tiles so far. */
FA_DEVICE void bound_quiet_rows(const pipeline *pipe, const fa_attention_params *p, work *x)
{
    const float share = 1.0f / (float)(x->at.tile + 1);
    if (!x->quiet) COUNT_PATH(HOPPER_QUIET);
    const float average[2] = {x->rows.sum[0] * share, x->rows.sum[1] * share};
    x->flat = false;
    set_bound(pipe, p, x, LARGEST + PEAKED_GROWTH * average_sum(average));
}

/* Moves the bases to the maxima of a plain tile. Returns whether some row's has moved: then outputs are to be
 * multiplied. */
FA_DEVICE bool track_maxima(const pipeline *pipe, work *x, const units *u, float *rescale)
{
    move_bases(x->s, &x->rows, rescale, u);
    const bool moved = __any_sync(0xffffffff, rescale[0] != 1.0f || rescale[1] != 1.0f);
    if (ADAPTS && moved) tell_moved(pipe, x);
    return moved;
}

/* With maxima, and a mask: for the first tile that a row sees, and for those that it sees in part. */
FA_DEVICE void weigh_carefully(const pipeline *pipe, const fa_attention_params *p, work *x)
{
    units u = find_exponents(pipe, p, x, false);
    float sum[2], rescale[2];
    const int tile = x->at.tile;
    if (tile < x->here.full_from || tile >= x->here.full_to)
        mask_scores(x->s, piece_of(pipe, x), x->consumer, tile * KEYS);
    weigh_with_maxima(x->s, &x->rows, &u, sum, rescale);
    if (ADAPTS && tile + 1 >= x->here.plain_from && tile + 1 < x->here.plain_to)
        judge_rows(pipe, p, x, sum);
    await_values(x->out, x->weights);
    if (tile > 0) rescale_outputs(x->out, rescale);
    add_sums(&x->rows, sum);
    round_pairs(x->weights, x->s, 0, PAIRS);
}

/* Whether weights are too large because a series was used where it is none. */
FA_DEVICE bool is_beyond_series(const work *x)
{
#if HAS_SERIES
    return x->series;
#else
    (void)x;
    return false;
#endif
}

/* Whether a thread's sum of weights in the tile is beyond its bound. */
FA_DEVICE bool is_too_large(const work *x, const float *sum)
{
#if HAS_SERIES
    return sum[0] > x->rows.bound[0] || sum[1] > x->rows.bound[1];
#else
    return fmaxf(sum[0], sum[1]) > x->bound;
#endif
}

/* Weights of the tile are too large by the bases that there are: these are renewed. Immense weights, infinite
 * ones among them, do not tell their scores any more: these are made once more, and weighed with maxima. */
FA_DEVICE void weigh_again(const pipeline *pipe, const fa_attention_params *p, work *x,
                           const float *sum)
{
    const row_state before = x->rows;
    COUNT_PATH(HOPPER_RENEWED);
    add_sums(&x->rows, sum);
    if (is_beyond_series(x) || !renew_bases(x->s, x->out, &x->rows)) {
        float anew[2], rescale[2];
        COUNT_PATH(HOPPER_AGAIN);
        multiply_again(p, piece_of(pipe, x), x->at.tile, x->s, x->consumer);
        const units u = find_exponents(pipe, p, x, true);
        x->rows.sum[0] = before.sum[0], x->rows.sum[1] = before.sum[1];
        weigh_with_maxima(x->s, &x->rows, &u, anew, rescale);
        rescale_outputs(x->out, rescale);
        add_sums(&x->rows, anew);
    }
    round_pairs(x->weights, x->s, 0, PAIRS);
    const float growth = fmaxf(x->rows.base[0] - before.base[0], x->rows.base[1] - before.base[1]);
    if (!__any_sync(0xffffffff, growth > 0.0f)) set_bound(pipe, p, x, 2.0f * x->bound);
    else {
        if (!x->flat || __any_sync(0xffffffff, growth > FLAT_LIMIT)) tell_moved(pipe, x);
        set_bound(pipe, p, x, x->bound);
    }
}

/* Pairs of scores that are weighed together; and of a tile's, so many at least are weighed while values are
 * still being added: what was fastest on an H200. */
#define GROUP (HAS_SERIES ? 8 : 4)
#define EARLY_PAIRS (PAIRS * (CONSUMERS == 3 ? 3 : 6) / 8)

/* By the bases that there are. The special-function unit, which the consumers share, is to be at work from
 * the first moment: so a group's exponents are found only while the one before the last becomes weights.
 * Values of the tile before are waited for when EARLY_PAIRS of weights are there, and their place is given
 * back at once; the other weights are rounded in the time that exponentials leave. tracked: with maxima. */
FA_DEVICE void weigh_plainly(const pipeline *pipe, const fa_attention_params *p, work *x,
                             bool tracked)
{
    const units u = find_plain_exponents(pipe, p, x, tracked);
    partial_sums sums = {{{0, 0}, {0, 0}}};
    float sum[2], rescale[2];
    const bool moved = tracked && track_maxima(pipe, x, &u, rescale);
    row_state paced = x->rows;
    COUNT_PATH(tracked ? HOPPER_TRACKED : HOPPER_UNTRACKED);
#pragma unroll
    for (int i = 0; i < PAIRS; i += GROUP) {
        const int to = i + GROUP < PAIRS ? i + GROUP : PAIRS;
        const partial_sums before = sums;
#if HAS_SERIES
        weigh_pairs_by_series(x->s, &paced, &u, i, to, &sums);
#else
        weigh_pairs(x->s, &paced, &u, i, to, &sums);
#endif
        if (i > 0 && to < PAIRS) {
            paced.base[0] = known_after(paced.base[0], before.of[0][1], x->nothing);
            paced.base[1] = known_after(paced.base[1], before.of[1][1], x->nothing);
        }
        if (i < EARLY_PAIRS && to >= EARLY_PAIRS) {
            /* Of two sums: behind one alone the assembler waits too early, behind four too late. */
            const int two = __float_as_int(sums.of[1][1]) | __float_as_int(sums.of[0][0]);
            hold_until(__int_as_float(two), x->nothing, pipe->state);
            await_values(x->out, x->weights);
            const uint32_t arrived =
                barrier_arrive_early(&pipe->state->v_empty[stage_of(x->at.count - 1)], x->leader);
            paced.base[0] = known_after(paced.base[0], __int_as_float((int)arrived), x->nothing);
            if (moved) rescale_outputs(x->out, rescale);
            round_pairs(x->weights, x->s, 0, to);
        } else if (i >= EARLY_PAIRS) round_pairs(x->weights, x->s, i, to);
    }
    add_up(&sums, sum);
    if (!tracked && __any_sync(0xffffffff, is_too_large(x, sum))) weigh_again(pipe, p, x, sum);
    else add_sums(&x->rows, sum);
}

FA_DEVICE void drop(const pipeline *pipe, const fa_attention_params *p, work *x)
{
#if OPTIONS
    if (x->here.options & FA_SM90_DROPOUT)
        drop_weights(p, piece_of(pipe, x), x->weights, x->consumer, x->at.tile);
#else
    (void)pipe, (void)p, (void)x;
#endif
}

/* ---- The tiles of a piece -------------------------------------------------------------------- */

/* A tile whose scores are there; values of the one before are being added. */
FA_DEVICE void do_tile(const pipeline *pipe, const fa_attention_params *p, work *x)
{
    release_keys(pipe, x);
    release_queries(pipe, x, x->at.tile + 1 == x->at.mine);
    weigh_carefully(pipe, p, x);
    drop(pipe, p, x);
    release_values(pipe, x, x->values.count, x->values.any);
    x->values.any = true;
    x->values.count = x->at.count;
    x->values.add = x->at.tile > 0;
}

/* Tiles that need no mask, from this one on: the way that is to be short. Until the last one of them, or until
 * the warpgroup begins to track maxima, or (tracked) ends it. Behind the last one nothing has been issued yet. */
FA_DEVICE void do_plain_tiles(const pipeline *pipe, const fa_attention_params *p, work *x,
                              bool tracked)
{
    int last = x->here.plain_to - 1;
    for (;;) {
        release_keys(pipe, x);
        if (Q_STAGES == 1) /* the next piece's queries wait for it */
            release_queries(pipe, x, x->at.tile + 1 == x->at.mine);
        weigh_plainly(pipe, p, x, tracked);
        drop(pipe, p, x);
        if (x->at.tile >= last) break;
        const pending known = {true, x->at.count, 1}; /* this tile: constants, no branches */
        x->at.tile++;
        x->at.count++;
        ask_and_wait(pipe, x, &known);
        if (ADAPTS && tracked) {
            x->quiet = x->moved ? QUIET_TILES : x->quiet - 1;
            if (!x->quiet) last = 0;
        } else if (ADAPTS && x->moved) last = 0;
    }
    if (Q_STAGES > 1) release_queries(pipe, x, x->at.tile + 1 == x->at.mine);
    if (ADAPTS && tracked) bound_quiet_rows(pipe, p, x);
    else if (ADAPTS && x->moved) x->quiet = QUIET_TILES;
    x->values.any = true;
    x->values.count = x->at.count;
    x->values.add = 1;
}

/* The first tile of a piece in which this consumer has nothing to do; scores of it were asked for all
 * the same. */
FA_DEVICE void pass_tile(const pipeline *pipe, work *x)
{
    const tile_count count = x->at.count;
    await_values(x->out, x->weights);
    release_added(pipe, x);
    release_keys(pipe, x);
    release_queries(pipe, x, true);
    wait_for_values(pipe, count);
    release_values(pipe, x, count, true);
}

/* The tiles of a piece, whose scores of the first one have been made. */
FA_DEVICE void do_tiles(const pipeline *pipe, const fa_attention_params *p, work *x)
{
    start_piece(pipe, x);
    if (!x->at.mine) pass_tile(pipe, x);
    for (x->at.tile = 0; x->at.tile < x->at.mine;) {
        if (x->at.tile >= x->here.plain_from && x->at.tile < x->here.plain_to) {
            if (ADAPTS && x->moved) x->quiet = QUIET_TILES;
            if (MAXIMA_EVERYWHERE || x->quiet) do_plain_tiles(pipe, p, x, true);
            else do_plain_tiles(pipe, p, x, false);
        } else do_tile(pipe, p, x);
        if (++x->at.tile >= x->at.mine) break;
        x->at.count++;
        ask_and_wait(pipe, x, &x->values);
    }
}

/* The tiles of a piece behind those that this consumer needs: others do. Values of its last one may wait
 * meanwhile in their place, for there is one such tile at most (or it needs none). */
FA_DEVICE void skip_tiles(const pipeline *pipe, work *x)
{
    static_assert(ROWS * (CONSUMERS - 1) <= KEYS * (STAGES - 1), "values must not be waited for");
    for (int tile = max(x->at.mine, 1); tile < x->at.tiles; tile++) {
        const tile_count count = ++x->at.count;
        wait_for_keys(pipe, count);
        wait_for_turn(x->consumer);
        pass_turn(x->consumer);
        release_keys(pipe, x);
        wait_for_values(pipe, count);
        release_values(pipe, x, count, true);
    }
    x->at.count++;
}

/* ---- From piece to piece --------------------------------------------------------------------- */

/* Values of a piece's last tile, which wait to be added: it may be that there are none. */
FA_DEVICE void add_last(const pipeline *pipe, work *x)
{
    ask_values(pipe, x->out, x->weights, &x->values, x->consumer);
    release_added(pipe, x);
}

/* A piece whose outputs are complete. */
FA_DEVICE void finish_piece(const pipeline *pipe, const fa_attention_params *p, work *x, int number,
                            const row_state *rows)
{
    x->broken |= finish(p, slot_of(pipe, number), pipe->staging, rows, x->out, x->consumer);
    release_piece(pipe, number);
}

/* A piece comes to its end before the next one begins. That is all where queries have one place, for the next
 * ones come late then; and d 128 is best done so, too. */
FA_DEVICE void do_pieces(const pipeline *pipe, const fa_attention_params *p, work *x)
{
    for (next_piece(pipe, x->consumer, &x->at); x->at.tiles;
         next_piece(pipe, x->consumer, &x->at)) {
        fetch_tile_bias(pipe, x);
        ask_scores(pipe, x->s, &x->at, x->consumer);
        await_scores(x->s);
        do_tiles(pipe, p, x);
        add_last(pipe, x);
        finish_piece(pipe, p, x, x->at.number, &x->rows);
        skip_tiles(pipe, x);
    }
}

/* Results are written while the scores of the next piece's first tile are made. */
FA_DEVICE void do_pieces_overlapped(const pipeline *pipe, const fa_attention_params *p, work *x)
{
    for (next_piece(pipe, x->consumer, &x->at); x->at.tiles;
         next_piece(pipe, x->consumer, &x->at)) {
        ask_values_first(pipe, x->out, x->s, x->weights, &x->at, &x->values, x->consumer);
        release_added(pipe, x);
        if (x->at.number > 0) finish_piece(pipe, p, x, x->at.number - 1, &x->rows);
        await_scores(x->s);
        do_tiles(pipe, p, x);
        skip_tiles(pipe, x);
    }
    add_last(pipe, x);
    if (x->at.number > 0) finish_piece(pipe, p, x, x->at.number - 1, &x->rows);
}

/* Pieces of one tile. Values of each are added while the next one's softmax runs, so that results are written
 * before the softmax of the one after. Where no values wait, because there is no such piece or nothing to do
 * in it, they are asked for all the same, whatever they are: nobody reads the outputs, and the compiler has to
 * see products running on each way to a tile. */
FA_DEVICE void do_single_tiles(const pipeline *pipe, const fa_attention_params *p, work *x)
{
    row_state before = x->rows;
    for (;;) {
        next_piece(pipe, x->consumer, &x->at);
        if (x->at.number > 1) finish_piece(pipe, p, x, x->at.number - 2, &before);
        before = x->rows;
        if (!x->at.tiles) break;
        ask_and_wait(pipe, x, &x->values);
        do_tiles(pipe, p, x);
        skip_tiles(pipe, x);
    }
    add_last(pipe, x);
    if (x->at.number > 0) finish_piece(pipe, p, x, x->at.number - 1, &before);
}

/* All pieces. Returns whether rows have to be done once more. */
FA_DEVICE bool consume(const pipeline *pipe, const fa_attention_params *p, int consumer)
{
    work x;
    x.consumer = consumer;
    x.broken = x.values.any = false;
    x.values.add = x.values.count = x.at.count = 0;
    x.at.number = -1;
#if OPTIONS & FA_SM90_BIAS
    x.at.biases = 0;
#endif
    x.nothing = find_nothing();
    x.leader = threadIdx.x % 32 == 0;
    asm volatile("" : "+r"(x.leader));
    if (consumer == CONSUMERS - 1) pass_turn(consumer); /* consumer 0 begins */
    if (SINGLE_TILES) do_single_tiles(pipe, p, &x);
    else if (OVERLAPS) do_pieces_overlapped(pipe, p, &x);
    else do_pieces(pipe, p, &x);
    if (consumer == 0) wait_for_turn(consumer); /* takes the turn that is left */
    return x.broken;
}

#endif
