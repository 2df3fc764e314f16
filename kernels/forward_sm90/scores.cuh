/*
 * Between the two products: where a consumer stands in a piece, masks, the options that change
 * scores and weights.
 */
#ifndef FA_KERNELS_FORWARD_SM90_SCORES_CUH
#define FA_KERNELS_FORWARD_SM90_SCORES_CUH

/* A consumer's place in a piece: of its tiles, */
typedef struct place {
    int full_from, full_to; /* those that all its rows may see as a whole; and of these */
    int plain_from;         /* the first one whose rows have all seen something before; */
    int plain_to;           /* up to here, as far as the consumer needs them */
    float scale;            /* to exponents of 2 */
#if HAS_SERIES
    float first, third, fifth; /* of the series: see below */
#endif
#if OPTIONS
    int options; /* few tests in each tile, for a test costs a warp some 15 clocks */
#endif
} place;

FA_DEVICE float same_float(float x) { return __int_as_float(same_for_warp(__float_as_int(x))); }

#if OPTIONS

/* Options that change scores. */
#define CHANGES_SCORES (FA_SM90_ALL & ~FA_SM90_DROPOUT)

/* A kernel with one option alone is launched for nothing else. */
FA_DEVICE int options_of(const piece *w)
{
    return OPTIONS & (OPTIONS - 1) ? same_for_warp(w->options) : OPTIONS;
}

#endif

FA_DEVICE place find_place(const piece *w, int consumer)
{
    place at;
    at.full_from = same_for_warp(w->full_from[consumer]);
    at.full_to = same_for_warp(w->full_to[consumer]);
    at.plain_from = same_for_warp(w->plain_from[consumer]);
    at.plain_to = min(at.full_to, same_for_warp(w->mine[consumer]));
    at.scale = same_float(w->scale);
#if HAS_SERIES
    const float square = w->inner * w->inner, first = w->scale * w->inner;
    at.first = same_float(0.99978f * first);
    at.third = same_float(-0.32629f * square * first);
    at.fifth = same_float(0.097347f * square * square * first);
#endif
#if OPTIONS
    at.options = options_of(w);
    /* A bias makes few weights large: the error of a result would be 9% larger without maxima. */
    if (at.options & FA_SM90_BIAS && !MAXIMA_EVERYWHERE) at.plain_from = FAR;
    if (at.options & FA_SM90_BY_ROWS) at.plain_from = FAR; /* they may hide all of a tile */
#endif
    return at;
}

/* Hides the keys that a row must not see. key: the tile's first one. Element 4j + 2r + c of an
 * accumulator is row r of the thread, column 8j + 2 (lane % 4) + c. */
FA_DEVICE void mask_scores(float *s, const piece *w, int consumer, int key)
{
    const int column = key + (int)threadIdx.x % 4 * 2;
    const bool left = same_for_warp(w->lo > -FAR);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const bounds b = find_bounds(w, row_of(consumer, r));
        int lo = b.lo - column, hi = b.hi - column;
        /* As if they changed: or columns would be kept in registers, to compare with. */
        asm volatile("" : "+r"(lo), "+r"(hi));
        if (left) fa_hide_fragment(s, r, lo, hi);
        else fa_hide_behind(s, r, hi);
    }
}

#if OPTIONS

/* ---- Options --------------------------------------------------------------------------------- */

FA_DEVICE void scale_scores(float *s, float factor)
{
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) s[i] *= factor;
}

/* Not by the special-function unit's tanh, which is right to 11 bits: of a softcap of 30 that is an error of 0.015 in
 * the exponent, 2.6 times what rounding to float16 does to a peaked row. */
FA_DEVICE void cap_scores(float *s, float inner)
{
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) s[i] = fa_tanh_fast(s[i] * inner);
}

#if HAS_SERIES

/* Where scores are small against the softcap, tanh is a short series, which becomes part of the exponent: by
 * the special-function unit it would take as long as the exponentials themselves. It is right to 2^-12 of
 * tanh(x) for |x| up to SERIES_END, and grows on behind it. So weights tell what lies beyond: one that is larger
 * than that of SERIES_END has a score which is too large (the bound of the sums), and those of scores below
 * -SERIES_END, which come out too small, are so small themselves that they do not count, if a row's largest score
 * is not as low. */
#define SERIES_END 0.75f
#define SERIES_TOP 0.63514f /* tanh there */

/* The largest score of the thread, without its sign; NaN counts for nothing. */
FA_DEVICE float largest_score(const float *s)
{
    float top[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) top[i % 2] = fmaxf(top[i % 2], fabsf(s[i]));
    return fmaxf(top[0], top[1]);
}

/* Whether all of the warp's scores are: for a small softcap, of which weights do not tell enough. */
FA_DEVICE bool are_in_series(const fa_attention_params *p, const float *s, float inner)
{
    return !p->lse && !__any_sync(0xffffffff, largest_score(s) * fabsf(inner) > SERIES_END);
}

/* Whether the warp's rows, whose bases have been found, may have the series from now on; and their bounds,
 * which are bound at most. All keys' weights may be lost at the lower end, if they are 2^-11 of the sum. At
 * the upper end there is some room for what comes. */
FA_DEVICE bool allow_series(const fa_attention_params *p, const piece *w, row_state *rows,
                            float bound)
{
    const float end = SERIES_TOP * w->scale, bits = log2f(fmaxf((float)w->n_k, 1.0f));
    bool fits = !p->lse && w->inner > 0.0f;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float top = rows->base[r] + HEADROOM;
        fits = fits && top >= bits + 11.0f - end && top <= 0.85f * end - 1.0f;
    }
    fits = !__any_sync(0xffffffff, !fits);
#pragma unroll
    for (int r = 0; r < 2; r++)
        rows->bound[r] = fits ? fminf(bound, exp2_fast(end - rows->base[r])) : bound;
    return fits;
}

#endif

/* Subtracts slope times the distance from query to key. Left of the diagonal that is linear in the
 * key: one multiply-add a score, and what depends on the row alone becomes a shift of its base. */
FA_DEVICE void subtract_alibi(float *s, const piece *w, int tile, units *u, int consumer)
{
    const float slope = w->slope * w->unit;
    const int center = (int)near(w->tile.first + w->tile.diagonal - w->start);
    const int column = tile * KEYS + (int)threadIdx.x % 4 * 2;
    const bool left = same_for_warp((tile + 1) * KEYS <= center + consumer * ROWS);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float distance = (float)(center + row_of(consumer, r) - column);
        if (!left) fa_add_alibi(s, r, slope, distance);
        else u->shift[r] = slope * distance * u->scale;
    }
    if (!left) return;
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) s[i] = fmaf(slope, (float)(i / 4 * 8 + i % 2), s[i]);
}

#if OPTIONS & FA_SM90_BIAS

/* The bias of the tile as the copy engine has laid it down: 64 rows, swizzled. */
FA_DEVICE void fetch_bias(const char *bias, uint32_t *pairs)
{
    const int lane = (int)threadIdx.x % 32, piece_of_16 = lane / 16 ^ lane % 8;
    const int row = (int)threadIdx.x % WARPGROUP / 32 * 16 + lane % 16;
    const uint32_t from = shared_address(bias) + row * 128;
#pragma unroll
    for (int j = 0; j < KEYS / 8; j += 2)
        fa_load_matrices(pairs + 2 * j,
                         from + j / 8 * BIAS_BLOCK + (piece_of_16 * 16 ^ j % 8 * 16));
}

/* A tile's bias, as soon as it is there. Its place is given back at once: the next one's way from memory is
 * long. */
FA_DEVICE void take_bias(const pipeline *pipe, progress *at, uint32_t *pairs, int consumer)
{
    barrier_wait(&pipe->state->bias_full[consumer], at->biases & 1);
    fetch_bias(pipe->bias + consumer * BIAS_BYTES, pairs);
    __syncwarp();
    barrier_arrive_if(&pipe->state->bias_empty[consumer], threadIdx.x % 32 == 0);
    at->biases++;
}

/* Adds it to scores; unit: what a logit of 1 is in their units. */
FA_DEVICE void add_pairs(const uint32_t *pairs, float *s, float unit, int dtype)
{
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) {
        const float2 b = fa_float_pair(pairs[i], dtype);
        s[2 * i] = fmaf(b.x, unit, s[2 * i]);
        s[2 * i + 1] = fmaf(b.y, unit, s[2 * i + 1]);
    }
}

FA_DEVICE void add_bias(const fa_attention_params *p, const piece *w, const uint32_t *pairs,
                        float *s)
{
    if (p->bias.dtype == FA_KERNEL_BFLOAT16) add_pairs(pairs, s, w->unit, FA_KERNEL_BFLOAT16);
    else add_pairs(pairs, s, w->unit, FA_KERNEL_FLOAT16);
}

#endif

#if HIDES_VALUES

/* Row r of a thread. column: its first key, counted from the piece's. */
FA_DEVICE fa_fragment_row row_at(const fa_attention_params *p, const piece *w, int consumer, int r,
                                 int column)
{
    const int i = row_of(consumer, r);
    const bounds b = find_bounds(w, i);
    const int64_t query = fa_min64(w->tile.first + i, fa_max64(w->tile.n_q, 1) - 1);
    const fa_fragment_row row = {fa_logit_row_of(p, &w->tile, query), (int64_t)w->start + column,
                                 b.lo - column, b.hi - column};
    return row;
}

/* Rows of the options that are read by rows. */
FA_DEVICE void change_rows(const fa_attention_params *p, const piece *w, float *s, bool read_bias,
                           int consumer, int column)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const fa_fragment_row row = row_at(p, w, consumer, r, column);
        if (read_bias) fa_add_bias(&p->bias, s, r, &row, w->unit);
        if (p->mask.data) fa_apply_mask(&p->mask, s, r, &row);
    }
}

/* again: the bias that the copy engine had loaded is gone. */
FA_DEVICE void add_biases(const pipeline *pipe, const fa_attention_params *p, progress *at,
                          const place *here, float *s, bool again, int consumer)
{
    const piece *w = slot_of(pipe, at->number);
    const int column = at->tile * KEYS + (int)threadIdx.x % 4 * 2;
    bool read_bias = p->bias.data;
#if OPTIONS & FA_SM90_BIAS
    if (here->options & FA_SM90_BIAS && !again) {
        uint32_t pairs[KEYS / 4];
        take_bias(pipe, at, pairs, consumer);
        add_bias(p, w, pairs, s);
        read_bias = false;
    }
#endif
    if (here->options & FA_SM90_BY_ROWS || read_bias)
        change_rows(p, w, s, read_bias, consumer, column);
}

#endif

/* Scores become what the softmax takes, in its units. */
FA_DEVICE void change_scores(const pipeline *pipe, const fa_attention_params *p, progress *at,
                             const place *here, float *s, units *u, bool again, int consumer)
{
    const piece *w = slot_of(pipe, at->number);
    (void)again;
    if (here->options & FA_SM90_SOFTCAP) cap_scores(s, w->inner);
    else if (here->options & FA_SM90_SCALED) scale_scores(s, w->inner);
    if (here->options & FA_SM90_ALIBI) subtract_alibi(s, w, at->tile, u, consumer);
#if HIDES_VALUES
    if (here->options & (FA_SM90_BIAS | FA_SM90_BY_ROWS))
        add_biases(pipe, p, at, here, s, again, consumer);
#endif
}

/* ---- Dropout --------------------------------------------------------------------------------- */

/* A mask of the halves of x that are not smaller than those of least, unsigned: the lower 15 bits of
 * each are compared by a subtraction that ends at their sign, which then takes part. */
FA_DEVICE uint32_t halves_at_least(uint32_t x, uint32_t least)
{
    const uint32_t sign = 0x80008000u, rest = (x | sign) - (least & ~sign);
    return spread_signs((x & rest) | (~least & (x | rest)));
}

/* Clears the weights that dropout drops; the others are scaled at the end. A thread's columns of 32
 * take their bits from one block. */
FA_DEVICE void drop_weights(const fa_attention_params *p, const piece *w, uint32_t *weights,
                            int consumer, int tile)
{
    const fa_dropout d = fa_dropout_of(p, &w->tile);
    const uint32_t least = p->dropout_threshold | p->dropout_threshold << 16;
    const int64_t first = w->tile.first + row_of(consumer, 0);
    const int group = (w->start + tile * KEYS) / 32;
#pragma unroll
    for (int g = 0; g < KEYS / 32; g++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            uint32_t block[4];
            fa_dropout_block(d.seed, d.offset, d.batch_head, first + 8 * r, group + g,
                             (int)threadIdx.x % 4, block);
#pragma unroll
            for (int j = 0; j < 4; j++)
                weights[2 * (4 * g + j) + r] &= halves_at_least(block[j], least);
        }
}

#endif

#endif
