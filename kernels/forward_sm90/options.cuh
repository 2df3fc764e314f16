/*
 * Between the two products: masks by position, options that change scores (scale, softcap, ALiBi, bias, masks by
 * rows), dropout. In a thread's scores of a tile, element 4j + 2r + c is row r, column
 * 8j + 2 (lane % 4) + c.
 */
#ifndef FA_KERNELS_FORWARD_SM90_OPTIONS_CUH
#define FA_KERNELS_FORWARD_SM90_OPTIONS_CUH

#include "forward_sm90/config.cuh"
#include "common/at_least_x2.cuh"
#include "common/score_fragments.cuh"
#include "forward_sm90/cursor.cuh"
#include "forward_sm90/pipeline.cuh"
#include "forward_sm90/softmax.cuh"
#include "forward_sm90/warp.cuh"
#include "forward_sm90/work_tile.cuh"
#include "ptx/address.cuh"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/ldmatrix.cuh"

/* Hides the keys that a row must not see. key: the tile's first one. */
FA_DEVICE void mask_scores(float *s, const work_tile *w, int consumer, int key)
{
    const int column = key + (int)threadIdx.x % 4 * 2;
    const bool left = warp_uniform(w->lo > -UNBOUNDED);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const key_range range = find_keys_of_row(w, consumer, row_of(0, r));
        int lo = range.lo - column, hi = range.hi - column;
        /* Hides from the compiler that these do not change: otherwise it would keep columns for comparisons in registers. */
        __asm__ volatile("" : "+r"(lo), "+r"(hi));
        if (left) fa_hide_fragment(s, r, lo, hi);
        else fa_hide_behind(s, r, hi);
    }
}

#if OPTIONS

/* Options that change scores. */
#define CHANGES_SCORES (FA_SM90_ALL & ~FA_SM90_DROPOUT)

FA_DEVICE void scale_scores(float *s, float factor)
{
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) s[i] *= factor;
}

/* ---- Softcap --------------------------------------------------------------------------------- */

/* The largest absolute score of the thread; NaN does not count. */
FA_DEVICE float max_absolute_score(const float *s)
{
    float top[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) top[i % 2] = fmaxf(top[i % 2], fabsf(s[i]));
    return fmaxf(top[0], top[1]);
}

#if HAS_SERIES

/* tanh(x) for twice = 2 log2(e) x, with an error of 3e-7. */
FA_DEVICE float tanh_by_exponential(float twice)
{
    return fmaf(-2.0f, ptx_rcp(ptx_ex2(twice) + 1.0f), 1.0f);
}

/* tanh of all scores, and of two other ones. If no score exceeds 0.75, a polynomial of degree 11 has an error of 2e-7. Otherwise the
 * error is 3e-7 of the softcap, which is at most FA_SM90_LARGEST_SOFTCAP. beyond: some score is known to exceed it, or might. */
FA_DEVICE void cap_scores(float *s, float *two, float inner, bool beyond)
{
    const float twice = inner * (2.0f * FA_LOG2E);
    if (beyond || __any_sync(0xffffffff, !(max_absolute_score(s) * fabsf(inner) <= 0.75f))) {
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) s[i] = tanh_by_exponential(s[i] * twice);
#pragma unroll
        for (int r = 0; r < 2; r++) two[r] = tanh_by_exponential(two[r] * twice);
        return;
    }
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) s[i] = fa_tanh_small(s[i] * inner);
#pragma unroll
    for (int r = 0; r < 2; r++) two[r] = fa_tanh_small(two[r] * inner);
}

#else

/* tanh of all scores. If none exceeds 0.75, a polynomial of degree 11 has an error of 2e-7 and takes half the time of
 * fa_tanh_fast. */
FA_DEVICE void cap_scores(float *s, float inner)
{
    if (__any_sync(0xffffffff, !(max_absolute_score(s) * fabsf(inner) <= 0.75f))) {
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) s[i] = fa_tanh_fast(s[i] * inner);
        return;
    }
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) s[i] = fa_tanh_small(s[i] * inner);
}

#endif

#if HAS_SERIES

/* If scores are small compared with the softcap, tanh is a short series that becomes part of the exponent, because tanh
 * itself takes as long as the exponentials. The coefficients minimize the largest error for |x| up to SERIES_END: with a
 * softcap of 30 the error of a weight is 3.5e-5 (float16) or 5e-4 (bfloat16), less than its rounding. Beyond SERIES_END the
 * error grows. Weights show such scores: a weight larger than that of SERIES_END has a score that is too large, which the
 * bound of the sums detects. Scores below -SERIES_LOW come out too small. Their weights are too small to matter, unless
 * the row's largest score is as low. Between the two, weights are too small, in bfloat16 by up to a fifth, in float16 by a quarter
 * with a softcap of 100: they are far below the row's largest weight (find_least_top).
 *
 * Where a log-sum-exp is stored, from which a backward pass computes weights again, the series has two terms more (EXACT_END).
 *
 * Whether all of the warp's scores are in the range of the series: the test for small softcaps, where weights are not
 * enough to detect this. */
FA_DEVICE bool are_in_series(const tile_limits *l, const float *s)
{
    return !__any_sync(0xffffffff, max_absolute_score(s) > l->end);
}

/* Whether the warp's rows have such weights that those of scores below the range do not matter (find_least_top). While the max is
 * tracked, bases do not fall, so this will hold for later tiles. */
FA_DEVICE bool allow_series_below(const tile_limits *l, const row_state *rows)
{
    const float base = fminf(rows->base[0], rows->base[1]);
    return l->end > 0.0f && !__any_sync(0xffffffff, !(base + HEADROOM >= l->least_top));
}

/* Scores become exponents of 2. */
FA_DEVICE void apply_series(float *s, const exponent_units *u, bool exact)
{
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) s[i] = series_exponent(s[i], u, exact, 0.0f);
}

/* Whether the warp's rows, whose bases are known, may use the series from now on; sets their bounds to `bound` or
 * less. At the lower end, weights may be lost if all of them together are at most 2^-11 of the sum. At the upper end
 * some room is left for later tiles. */
FA_DEVICE bool allow_series(const tile_limits *l, row_state *rows, float bound)
{
    const float end = l->top, least = l->least_top;
    bool fits = l->end > 0.0f;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float top = rows->base[r] + HEADROOM;
        fits = fits && top >= least && top <= 0.85f * end - 1.0f;
    }
    fits = !__any_sync(0xffffffff, !fits);
#pragma unroll
    for (int r = 0; r < 2; r++)
        rows->bound[r] = fits ? fminf(bound, ptx_ex2(end - rows->base[r])) : bound;
    return fits;
}

#endif

/* ---- ALiBi ----------------------------------------------------------------------------------- */

#if HAS_OTHER_OPTIONS

/* Subtracts slope times the distance from query to key. Left of the diagonal this is linear in the key: one
 * multiply-add for each score. The part that depends only on the row becomes a shift of its base. */
FA_DEVICE void subtract_alibi(float *s, const work_tile *w, int tile, exponent_units *u,
                              int consumer)
{
    const float slope = w->slope * w->unit;
    const int center = (int)saturate(w->query_tile.first + w->query_tile.diagonal - w->first_key);
    const int column = tile * KEYS + (int)threadIdx.x % 4 * 2;
    const bool left = warp_uniform((tile + 1) * KEYS <= center + consumer * ROWS);
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

#endif

/* ---- Bias ------------------------------------------------------------------------------------ */

#if OPTIONS & FA_SM90_BIAS

/* A tile's bias from shared memory, where TMA has put it: 64 rows, swizzled. */
FA_DEVICE void load_bias_x2(const char *bias, uint32_t *x2)
{
    const int lane = (int)threadIdx.x % 32, chunk = lane / 16 ^ lane % 8;
    const int row = (int)threadIdx.x % WARPGROUP / 32 * 16 + lane % 16;
    const uint32_t from = ptx_shared_address(bias) + row * 128;
#pragma unroll
    for (int j = 0; j < KEYS / 8; j += 2)
        ptx_ldmatrix_x4(x2 + 2 * j, from + j / 8 * BIAS_BLOCK + (chunk * 16 ^ j % 8 * 16));
}

/* Returns true. Instructions that depend on the result wait until ldmatrix has written x2. An arrival at a barrier would not wait,
 * and TMA could overwrite data that has not been read. Each ldmatrix writes four words, of which one is checked. */
FA_DEVICE bool is_bias_loaded(const uint32_t *x2)
{
    uint32_t words = 0;
#pragma unroll
    for (int i = 0; i < KEYS / 4; i += 4) words |= x2[i];
    return __shfl_sync(0xffffffff, words, (int)threadIdx.x % 32) == words;
}

/* Acquires a tile's bias, loads it, and releases its buffer at once, because loading the next one takes long. */
FA_DEVICE void consume_bias(const pipeline *pipe, cursor *at, uint32_t *x2, int consumer)
{
    ptx_mbarrier_wait(&pipe->state->bias_full[consumer], at->biases & 1);
    load_bias_x2(pipe->bias + consumer * BIAS_BYTES, x2);
    const bool loaded = is_bias_loaded(x2);
    ptx_mbarrier_arrive_if(&pipe->state->bias_empty[consumer], loaded && threadIdx.x % 32 == 0);
    at->biases++;
}

/* Adds it to scores. unit: a logit of 1, in their units. */
FA_DEVICE void add_x2(const uint32_t *x2, float *s, float unit, int dtype)
{
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) {
        const float2 b = fa_unpack_x2(x2[i], dtype);
        s[2 * i] = fa_bias_score(s[2 * i], b.x, unit);
        s[2 * i + 1] = fa_bias_score(s[2 * i + 1], b.y, unit);
    }
}

FA_DEVICE void add_bias(const fa_attention_params *p, const work_tile *w, const uint32_t *x2,
                        float *s)
{
    if (p->bias.dtype == FA_KERNEL_BFLOAT16) add_x2(x2, s, w->unit, FA_KERNEL_BFLOAT16);
    else add_x2(x2, s, w->unit, FA_KERNEL_FLOAT16);
}

#endif

#if HIDES_VALUES

/* Row r of the thread. column: its first key, counted from the work tile's. */
FA_DEVICE fa_fragment_row find_fragment_row(const fa_attention_params *p, const work_tile *w,
                                            int consumer, int r, int column)
{
    const fa_tile *t = &w->query_tile;
    const int i = row_of(consumer, r);
    const key_range range = find_key_range(w, i);
    const int64_t query = fa_min64(t->first + i, fa_max64(t->n_q, 1) - 1);
    const fa_fragment_row row = {fa_logit_row_of(p, t, query), (int64_t)w->first_key + column,
                                 range.lo - column, range.hi - column};
    return row;
}

/* A boolean mask, and a bias that TMA cannot load. Both are read row by row. */
FA_DEVICE void apply_options_by_rows(const fa_attention_params *p, const work_tile *w, float *s,
                                     bool read_bias, int consumer, int column)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const fa_fragment_row row = find_fragment_row(p, w, consumer, r, column);
        if (read_bias) fa_add_bias(&p->bias, s, r, &row, w->unit);
        if (p->mask.data) fa_apply_mask(&p->mask, s, r, &row);
    }
}

/* recomputed: the scores are computed for the second time, so the bias that TMA loaded may have been overwritten. */
FA_DEVICE void apply_bias_and_mask(const pipeline *pipe, const fa_attention_params *p, cursor *at,
                                   const tile_limits *limits, float *s, bool recomputed,
                                   int consumer)
{
    const work_tile *w = queue_entry(pipe, at->number);
    const int column = at->tile * KEYS + (int)threadIdx.x % 4 * 2;
    bool read_bias = p->bias.data;
#if OPTIONS & FA_SM90_BIAS
    if (limits->options & FA_SM90_BIAS && !recomputed) {
        uint32_t x2[KEYS / 4];
        consume_bias(pipe, at, x2, consumer);
        add_bias(p, w, x2, s);
        read_bias = false;
    }
#endif
    if (limits->options & FA_SM90_BY_ROWS || read_bias)
        apply_options_by_rows(p, w, s, read_bias, consumer, column);
}

#endif

/* Converts scores to the units of the softmax. */
FA_DEVICE void apply_score_options(const pipeline *pipe, const fa_attention_params *p, cursor *at,
                                   const tile_limits *limits, float *s, exponent_units *u,
                                   bool recomputed, int consumer)
{
    const work_tile *w = queue_entry(pipe, at->number);
    (void)p, (void)recomputed;
#if HAS_SERIES
    float none[2] = {0, 0};
    cap_scores(s, none, w->inner, false);
#else
    if (limits->options & FA_SM90_SOFTCAP) cap_scores(s, w->inner);
    else if (limits->options & FA_SM90_SCALED) scale_scores(s, w->inner);
#endif
#if HAS_OTHER_OPTIONS
    if (limits->options & FA_SM90_ALIBI) subtract_alibi(s, w, at->tile, u, consumer);
#else
    (void)u, (void)consumer;
#endif
#if HIDES_VALUES
    if (limits->options & (FA_SM90_BIAS | FA_SM90_BY_ROWS))
        apply_bias_and_mask(pipe, p, at, limits, s, recomputed, consumer);
#endif
}

/* ---- Dropout --------------------------------------------------------------------------------- */

/* A mask of the halves of x that are not smaller, unsigned, than those of threshold: fa_dropout_mask_x2 in fewer
 * instructions. */
FA_DEVICE uint32_t mask_at_least_x2(uint32_t x, uint32_t threshold)
{
    return ptx_spread_signs(fa_at_least_x2(x, threshold));
}

/* Clears the weights that dropout drops; the others are scaled with the outputs. 32 columns of a row use bits from
 * four blocks, one for each of the row's lanes. */
FA_DEVICE void drop_weights(const fa_attention_params *p, const work_tile *w, uint32_t *weights,
                            int consumer, int tile)
{
    const fa_dropout d = fa_dropout_of(p, &w->query_tile);
    const uint32_t threshold = p->dropout_threshold | p->dropout_threshold << 16;
    const int64_t first = w->query_tile.first + row_of(consumer, 0);
    const int group = (w->first_key + tile * KEYS) / 32;
#pragma unroll
    for (int g = 0; g < KEYS / 32; g++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            uint32_t block[4];
            fa_dropout_block(d.seed, d.offset, d.batch_head, first + 8 * r, group + g,
                             (int)threadIdx.x % 4, block);
#pragma unroll
            for (int j = 0; j < 4; j++)
                weights[2 * (4 * g + j) + r] &= mask_at_least_x2(block[j], threshold);
        }
}

#endif

#endif
