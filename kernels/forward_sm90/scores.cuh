/*
 * Between the two products: where a consumer stands in a piece, masks, the options that change
 * scores and weights.
 */
#ifndef FA_KERNELS_FORWARD_SM90_SCORES_CUH
#define FA_KERNELS_FORWARD_SM90_SCORES_CUH

/* A consumer's place in a piece. */
typedef struct place {
    int full_from, full_to; /* tiles that all its rows may see as a whole */
    int plain_from;         /* the first of them whose rows have all seen something before */
    float scale;            /* to exponents of 2 */
#if GENERAL
    float inner; /* what scores are multiplied by, before their tanh or alone */
    float slope; /* ALiBi's */
    int center;  /* where the piece's first query stands among its keys */
#endif
} place;

FA_DEVICE float same_float(float x) { return __int_as_float(same_for_warp(__float_as_int(x))); }

#if GENERAL

/* Scores are in units of the scale or the softcap when they come to the softmax, which multiplies
 * by it anyway; but not of one so small that a bias in such units overflows, or below 0, which
 * would turn round what is the largest. */
#define LEAST_SCALE 1e-6f

FA_DEVICE void find_units(const fa_attention_params *p, const piece *w, place *at)
{
    const float scale = w->scale;
    const bool capped = p->softcap > 0.0f, small = !(scale >= LEAST_SCALE);
    at->inner = same_float(capped ? scale / p->softcap : small ? scale * FA_LOG2E : 1.0f);
    at->scale = capped ? p->softcap * FA_LOG2E : small ? 1.0f : scale * FA_LOG2E;
}

/* ALiBi's slope, read once for a piece. */
FA_DEVICE void find_slope(const fa_attention_params *p, const piece *w, place *at)
{
    const fa_tile *t = &w->tile;
    at->slope = 0.0f;
    at->center = (int)near(t->first + t->diagonal - w->start);
    if (p->alibi_slopes)
        at->slope = same_float(p->alibi_slopes[t->batch * p->alibi_batch_stride + t->head]);
}

/* Whether ALiBi lets weights grow so much from tile to tile that bases had better be found anew in
 * each. */
FA_DEVICE bool is_steep(const place *here)
{
    return fabsf(here->slope) * (KEYS * FA_LOG2E) > 16.0f;
}

#else

/* Scores are as the products left them when they come to the softmax, which multiplies by the
 * scale. */
FA_DEVICE void find_units(const fa_attention_params *p, const piece *w, place *at)
{
    (void)p;
    at->scale = w->scale * FA_LOG2E;
}

#endif

FA_DEVICE place find_place(const fa_attention_params *p, const piece *w, int consumer)
{
    place at;
    find_units(p, w, &at);
    at.full_from = same_for_warp(w->full_from[consumer]);
    at.plain_from = max(at.full_from, 1);
    at.full_to = same_for_warp(w->full_to[consumer]);
    at.scale = same_float(at.scale);
#if GENERAL
    find_slope(p, w, &at);
    if (is_steep(&at)) at.plain_from = FAR;
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

#if GENERAL

/* ---- Options --------------------------------------------------------------------------------- */

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

/* tanh by the special-function unit is right to 11 bits: enough for weights of 16 bits, not for a
 * log-sum-exp. */
FA_DEVICE void cap_scores(const fa_attention_params *p, float *s, float inner)
{
    if (p->lse) {
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) s[i] = fa_tanh_fast(s[i] * inner);
        return;
    }
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) s[i] = tanh_approximate(s[i] * inner);
}

/* Subtracts slope times the distance from query to key. Left of the diagonal, where all of the
 * warp's rows mostly are, that is linear in the key: one multiply-add a score, and what depends on
 * the row alone becomes a shift of its base. */
FA_DEVICE void subtract_alibi(float *s, int r, float slope, int distance, float unit, units *u)
{
    slope *= unit;
    if (__any_sync(0xffffffff, distance < KEYS)) {
        fa_add_alibi(s, r, slope, (float)distance);
        return;
    }
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
        for (int c = 0; c < 2; c++)
            s[4 * j + 2 * r + c] = fmaf(slope, (float)(8 * j + c), s[4 * j + 2 * r + c]);
    u->shift[r] = slope * (float)distance * u->scale;
}

/* The bias of the tile as the copy engine has laid it down: 64 rows, swizzled. */
FA_DEVICE void add_staged_bias(const char *bias, float *s, float unit, int dtype)
{
    const int group = (int)threadIdx.x % 32 / 4;
    const int first = (int)threadIdx.x % WARPGROUP / 32 * 16 + group;
    bias += first * 128 + (int)threadIdx.x % 4 * 4;
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int at = j / 8 * BIAS_BLOCK + r * 8 * 128 + (j % 8 ^ group) * 16;
            const float2 b = fa_float_pair(*(const uint32_t *)(bias + at), dtype);
            float *x = s + 4 * j + 2 * r;
            x[0] = fmaf(b.x, unit, x[0]);
            x[1] = fmaf(b.y, unit, x[1]);
        }
}

FA_DEVICE void take_staged_bias(const pipeline *pipe, const fa_attention_params *p,
                                const progress *at, float *s, float unit, int consumer)
{
    const char *bias = pipe->bias + consumer * BIAS_BYTES;
    barrier_wait(&pipe->state->bias_full[consumer], at->biases & 1);
    if (p->bias.dtype == FA_KERNEL_BFLOAT16) add_staged_bias(bias, s, unit, FA_KERNEL_BFLOAT16);
    else add_staged_bias(bias, s, unit, FA_KERNEL_FLOAT16);
}

/* Rows of the options that are read by rows. */
FA_DEVICE void change_rows(const pipeline *pipe, const fa_attention_params *p, const progress *at,
                           float *s, float unit, bool read_bias, int consumer, int column)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const fa_fragment_row row = row_at(p, slot_of(pipe, at->number), consumer, r, column);
        if (read_bias) fa_add_bias(&p->bias, s, r, &row, unit);
        if (p->mask.data) fa_apply_mask(&p->mask, s, r, &row);
    }
}

/* Scores become what the softmax takes, in its units. */
FA_DEVICE void change_scores(const pipeline *pipe, const fa_attention_params *p,
                             const fa_sm90_params *sm90, const progress *at, const place *here,
                             float *s, units *u, int consumer)
{
    const float unit = FA_LOG2E / here->scale;
    const bool staged = sm90->bias_mapped, read = p->bias.data && !staged;
    const int column = at->tile * KEYS + (int)threadIdx.x % 4 * 2;
    if (p->softcap > 0.0f) cap_scores(p, s, here->inner);
    else if (here->inner != 1.0f) {
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) s[i] *= here->inner;
    }
    if (here->slope != 0.0f)
#pragma unroll
        for (int r = 0; r < 2; r++)
            subtract_alibi(s, r, here->slope, here->center + row_of(consumer, r) - column, unit, u);
    if (staged) take_staged_bias(pipe, p, at, s, unit, consumer);
    if (p->mask.data || read) change_rows(pipe, p, at, s, unit, read, consumer, column);
}

/* ---- Dropout --------------------------------------------------------------------------------- */

/* Clears the weights that dropout drops; the others are scaled at the end. A thread's columns of 32
 * take their bits from one block. */
FA_DEVICE void drop_weights(const fa_attention_params *p, const piece *w, uint32_t *weights,
                            int consumer, int key)
{
    const fa_dropout d = fa_dropout_of(p, &w->tile);
#pragma unroll 1
    for (int r = 0; r < 2; r++) {
        const int64_t i = w->tile.first + row_of(consumer, r);
#pragma unroll
        for (int g = 0; g < KEYS / 32; g++) {
            uint32_t block[4];
            fa_dropout_block(d.seed, d.offset, d.batch_head, i, (w->start + key) / 32 + g,
                             (int)threadIdx.x % 4, block);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t keep = (block[j] & 0xffffu) >= p->dropout_threshold ? 0xffffu : 0;
                if (block[j] >> 16 >= p->dropout_threshold) keep |= 0xffff0000u;
                uint32_t *even = weights + 2 * (4 * g + j), *odd = even + 1;
                if (r == 0) *even &= keep;
                else *odd &= keep;
            }
        }
    }
}

#endif

#endif
