/*
 * A consumer's softmax of one tile, from scores to packed weights, while its own P V of the previous tile still runs.
 *
 *     masked tiles   a mask, and the max: the first tile that a row sees, and those that it sees in part
 *     plain tiles    no mask; all rows have seen a key before. Most tiles are plain
 *
 * Branches that depend on a warp's own scores must not issue products or wait for them: all four warps of a warpgroup
 * must do this at the same point of the code.
 */
#ifndef FA_KERNELS_FORWARD_SM90_TILE_SOFTMAX_CUH
#define FA_KERNELS_FORWARD_SM90_TILE_SOFTMAX_CUH

#include "forward_sm90/config.cuh"
#include "common/device.cuh"
#include "common/flat_rows.h"
#include "forward_sm90/consumer_state.cuh"
#include "forward_sm90/multiply.cuh"
#include "forward_sm90/options.cuh"
#include "forward_sm90/pipeline.cuh"
#include "forward_sm90/softmax.cuh"
#include "forward_sm90/stage.cuh"
#include "ptx/barrier.cuh"
#include "ptx/order.cuh"

/* ---- Options --------------------------------------------------------------------------------- */

/* Acquires the bias of the tile whose scores are issued next. This is done before they are issued: after issuing a
 * product with weights in registers, a warp continues only when most of the product has run. */
FA_DEVICE void acquire_tile_bias(const pipeline *pipe, consumer_state *c)
{
#if BIAS_AHEAD
    if (c->at.needed) consume_bias(pipe, &c->at, c->bias, c->number);
#else
    (void)pipe, (void)c;
#endif
}

/* Applies the options to the scores; returns the exponents that they mean now. recomputed: the scores were computed for
 * the second time. */
FA_DEVICE exponent_units find_exponents(const pipeline *pipe, const fa_attention_params *p,
                                        consumer_state *c, bool recomputed)
{
    exponent_units u = {.scale = c->limits.scale};
#if BIAS_AHEAD
    if (!recomputed) {
        add_bias(p, this_work_tile(pipe, c), c->bias, c->scores);
        return u;
    }
#endif
#if OPTIONS
    if (c->limits.options & CHANGES_SCORES)
        apply_score_options(pipe, p, &c->at, &c->limits, c->scores, &u, recomputed, c->number);
#else
    (void)pipe, (void)p, (void)recomputed;
#endif
    return u;
}

#if HAS_SERIES

/* The first series in whose range all of the warp's scores are. */
FA_DEVICE int find_series(const softcap *cap, const float *s)
{
    const float top = max_absolute_score(s);
    if (!__any_sync(0xffffffff, !(top <= cap->end))) return SHORT_SERIES;
    return __any_sync(0xffffffff, !(top <= cap->long_end)) ? NO_SERIES : LONG_SERIES;
}

/* The same for a plain tile whose max is not tracked. */
FA_DEVICE int find_plain_series(consumer_state *c)
{
    if (c->series != NO_SERIES) return c->series;
    const int series = find_series(&c->limits.cap, c->scores);
    if (series == NO_SERIES) limit_scores(c->scores, &c->limits.cap);
    return series;
}

/* For a masked tile: scores become exponents. */
FA_DEVICE exponent_units find_masked_exponents(consumer_state *c)
{
    const int series = find_series(&c->limits.cap, c->scores);
    if (series == NO_SERIES) cap_all_scores(c->scores, &c->limits.cap);
    else {
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++)
            c->scores[i] = series_exponent(c->scores[i], &c->limits.cap, series, 0.0f);
    }
    return (exponent_units){.scale = 1.0f};
}

#else

/* The same for a plain tile. */
FA_DEVICE exponent_units find_plain_exponents(const pipeline *pipe, const fa_attention_params *p,
                                              consumer_state *c, bool tracked)
{
    (void)tracked;
    return find_exponents(pipe, p, c, false);
}

#endif

FA_DEVICE void apply_dropout(const pipeline *pipe, const fa_attention_params *p, consumer_state *c)
{
#if OPTIONS
    if (c->limits.options & FA_SM90_DROPOUT)
        drop_weights(p, this_work_tile(pipe, c), c->weights, c->number, c->at.tile);
#else
    (void)pipe, (void)p, (void)c;
#endif
}

/* ---- Bounds of the sums ---------------------------------------------------------------------- */

#if HAS_SERIES

/* Sets the first series that the warp's rows, whose bases are known, may use from now on, and their bounds to `bound` or
 * less. At the upper end some room is left for later tiles. */
FA_DEVICE void choose_series(consumer_state *c, float bound)
{
    const softcap *cap = &c->limits.cap;
    float end = INFINITY; /* of the range */
    c->series = NO_SERIES;
#pragma unroll
    for (int n = LONG_SERIES; n >= SHORT_SERIES; n--) {
        bool fits = true;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float top = c->rows.base[r] + HEADROOM;
            fits = fits && top >= least_top_of_series(cap, n) && top <= 0.85f * top_of_series(cap, n) - 1.0f;
        }
        if (!__any_sync(0xffffffff, !fits)) c->series = n, end = top_of_series(cap, n);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) c->rows.bound[r] = fminf(bound, ptx_ex2(end - c->rows.base[r]));
}

/* Where the max is tracked, it shows whether scores are above a series' range. Bases do not fall. So if scores below a range do not
 * matter with these bases, they will not in later tiles. */
FA_DEVICE void allow_series_below(consumer_state *c)
{
    const softcap *cap = &c->limits.cap;
    const float top = fminf(c->rows.base[0], c->rows.base[1]) + HEADROOM;
    c->series = NO_SERIES;
    c->series_end = -INFINITY;
#pragma unroll
    for (int n = LONG_SERIES; n >= SHORT_SERIES; n--)
        if (!__any_sync(0xffffffff, !(top >= least_top_of_series(cap, n))))
            c->series = n, c->series_end = end_of_series(cap, n);
}

#endif

FA_DEVICE void set_bound(consumer_state *c, float bound)
{
    c->sum_bound = fminf(bound, FA_SUM_BOUND);
#if HAS_SERIES
    choose_series(c, c->sum_bound);
#endif
}

/* Finds whether the warp's rows are flat, from their sums of a tile whose max is known. Under ALiBi the max moves from
 * tile to tile, so rows never count as flat. */
FA_DEVICE void classify_rows(const pipeline *pipe, const fa_attention_params *p, consumer_state *c,
                             const float *sum)
{
    const float average = average_sum(sum);
    c->flat = average >= FA_FLAT_SUM(KEYS) * MAX_WEIGHT && !has_peaked_row(sum) &&
              !FA_HAS_SHORT_ROWS(p, (c->at.key_tiles - 1) * KEYS + 1);
#if OPTIONS
    c->flat = c->flat && !(c->limits.options & FA_SM90_ALIBI);
#endif
    if (!c->flat) announce_new_max(pipe, c);
    set_bound(c, MAX_WEIGHT + FA_FLAT_GROWTH * average);
}

/* The bound of peaked rows that have had no new max for a while, from the average of all tiles so far. */
FA_DEVICE void bound_peaked_rows(const pipeline *pipe, const fa_attention_params *p,
                                 consumer_state *c)
{
    const float share = 1.0f / (float)(c->at.tile + 1);
    if (!c->tracked) COUNT_PATH(HOPPER_TRACKING_ENDED);
    const float average[2] = {c->rows.sum[0] * share, c->rows.sum[1] * share};
    c->flat = false;
    set_bound(c, MAX_WEIGHT + PEAKED_GROWTH * average_sum(average));
}

/* Whether a thread's sum of weights in the tile is beyond its bound. */
FA_DEVICE bool is_beyond_bound(const consumer_state *c, const float *sum)
{
#if HAS_SERIES
    return sum[0] > c->rows.bound[0] || sum[1] > c->rows.bound[1];
#else
    return fmaxf(sum[0], sum[1]) > c->sum_bound;
#endif
}

/* Whether a weight of the warp may come from a score outside the range of the series. A sum beyond its bound alone does
 * not show this: scores that are all equal, as those of rows after the last query, have large sums, too. */
FA_DEVICE bool may_be_beyond_series(const consumer_state *c, const float *sum)
{
#if HAS_SERIES
    const softcap *cap = &c->limits.cap;
    const float end = top_of_series(cap, c->series);
    bool is_beyond = false;
#pragma unroll
    for (int r = 0; r < 2; r++) is_beyond |= !(sum[r] <= ptx_ex2(end - c->rows.base[r]));
    return c->series != NO_SERIES && __any_sync(0xffffffff, is_beyond);
#else
    (void)c, (void)sum;
    return false;
#endif
}

/* ---- Masked tiles ---------------------------------------------------------------------------- */

/* Computes weights with bases that are this tile's max. rescale: the factor for the outputs so far. */
FA_DEVICE void weigh_with_max(float *s, row_state *rows, const exponent_units *u, float *sum,
                              float *rescale)
{
    const float top[2] = {max_of_scores(s, 0), max_of_scores(s, 1)};
    raise_bases(top, rows, rescale, u);
    weigh(s, rows, u, sum);
}

#if HAS_SERIES

/* Whether a masked tile hides keys from the warp's rows. */
FA_DEVICE bool hides_keys(const consumer_state *c)
{
    return c->at.tile < c->limits.unmasked_from || c->at.tile >= c->limits.unmasked_to;
}

/* Whether row r of the thread sees keys of the tile. */
FA_DEVICE bool sees_tile(const pipeline *pipe, const consumer_state *c, int r)
{
    const int first = c->at.tile * KEYS;
    const key_range range = find_keys_of_row(this_work_tile(pipe, c), c->number, row_of(0, r));
    return range.lo < min(range.hi, first + KEYS) && range.hi > first;
}

/* Computes weights by a series, if the tile's maxima show that it may be used: all scores are below its upper end, and each row
 * that sees a key has a weight beside which those of its lowest scores do not matter. */
FA_DEVICE bool weigh_masked_by_series(const pipeline *pipe, consumer_state *c, int series,
                                      const float *top, float *sum, float *rescale)
{
    const softcap *cap = &c->limits.cap;
    const float exponents[2] = {series_exponent(top[0], cap, series, 0.0f),
                                series_exponent(top[1], cap, series, 0.0f)};
    row_state raised = c->rows;
    raise_bases_to(exponents, &raised, rescale);
    bool fits = fmaxf(top[0], top[1]) <= end_of_series(cap, series);
#pragma unroll
    for (int r = 0; r < 2; r++)
        fits = fits && (raised.base[r] + HEADROOM >= least_top_of_series(cap, series) ||
                        (raised.base[r] == NO_KEY_SEEN && !sees_tile(pipe, c, r)));
    if (__any_sync(0xffffffff, !fits)) return false;
    c->rows = raised;
    partial_sums sums = {{{0, 0}, {0, 0}}};
    weigh_capped_range(c->scores, &c->rows, cap, series, 0, WEIGHTS_X2, &sums);
    add_partial_sums(&sums, sum);
    return true;
}

/* Whether a series may be tried: in rows of usual logits it fits. (Of a score of -infinity it would be NaN with a
 * coefficient of 0.) */
FA_DEVICE bool may_use_series(const softcap *cap, int series)
{
    const float usual_top = 6.0f, least_coefficient = 1e-30f;
    const float last = series == SHORT_SERIES ? cap->fifth : cap->long_ninth;
    return least_top_of_series(cap, series) < usual_top && last > least_coefficient;
}

/* Weights of a masked tile, and bases that are its max. */
FA_DEVICE void weigh_masked(const pipeline *pipe, consumer_state *c, float *sum, float *rescale)
{
    const softcap *cap = &c->limits.cap;
    const bool hides = hides_keys(c);
    /* Above head dim 192 this is slower (H200, us, with and without it: six packed sequences of 80 to 6,000 rows 884, 805; 8,192
     * rows, window 4,096, 720, 700). */
    if (HEAD_DIM <= 192 && may_use_series(cap, LONG_SERIES)) {
        if (hides) mask_scores(c->scores, this_work_tile(pipe, c), c->number, c->at.tile * KEYS);
        const float top[2] = {max_of_scores(c->scores, 0), max_of_scores(c->scores, 1)};
        if (may_use_series(cap, SHORT_SERIES) &&
            weigh_masked_by_series(pipe, c, SHORT_SERIES, top, sum, rescale))
            return;
        if (weigh_masked_by_series(pipe, c, LONG_SERIES, top, sum, rescale)) return;
    }
    const exponent_units u = find_masked_exponents(c);
    if (hides) mask_scores(c->scores, this_work_tile(pipe, c), c->number, c->at.tile * KEYS);
    weigh_with_max(c->scores, &c->rows, &u, sum, rescale);
}

#endif

FA_DEVICE void softmax_masked(const pipeline *pipe, const fa_attention_params *p, consumer_state *c)
{
#if HAS_SERIES
    float sum[2], rescale[2];
    const int tile = c->at.tile;
    weigh_masked(pipe, c, sum, rescale);
#else
    exponent_units u = find_exponents(pipe, p, c, false);
    float sum[2], rescale[2];
    const int tile = c->at.tile;
    if (tile < c->limits.unmasked_from || tile >= c->limits.unmasked_to)
        mask_scores(c->scores, this_work_tile(pipe, c), c->number, tile * KEYS);
    weigh_with_max(c->scores, &c->rows, &u, sum, rescale);
#endif
    if (ADAPTIVE && tile + 1 >= c->limits.plain_from && tile + 1 < c->limits.plain_to)
        classify_rows(pipe, p, c, sum);
    wait_for_outputs(c->out, c->weights);
    if (tile > 0) rescale_outputs(c->out, rescale);
    add_sums(&c->rows, sum);
    pack_weights(c->weights, c->scores, 0, WEIGHTS_X2);
}

/* ---- Plain tiles ----------------------------------------------------------------------------- */

#if HAS_SERIES

/* Raises the bases to the max of a plain tile, and finds the series that fits its scores. Returns whether a base has changed: then
 * outputs must be rescaled. */
FA_DEVICE bool track_max(const pipeline *pipe, consumer_state *c, int *series, float *rescale)
{
    const softcap *cap = &c->limits.cap;
    float top[2] = {max_of_bits(c->scores, 0), max_of_bits(c->scores, 1)};
    const bool negative = is_negative(top[0]) || is_negative(top[1]);
    *series = c->series;
    if (__any_sync(0xffffffff, negative || !(fmaxf(top[0], top[1]) <= c->series_end))) {
        if (__any_sync(0xffffffff, negative))
            top[0] = max_of_scores(c->scores, 0), top[1] = max_of_scores(c->scores, 1);
        const float largest = fmaxf(top[0], top[1]);
        if (c->series == NO_SERIES) *series = find_series(cap, c->scores);
        else if (__any_sync(0xffffffff, !(largest <= cap->long_end))) *series = NO_SERIES;
        else if (__any_sync(0xffffffff, !(largest <= c->series_end))) *series = LONG_SERIES;
        if (*series == NO_SERIES && __any_sync(0xffffffff, !(largest <= cap->most))) {
            limit_scores(c->scores, cap);
            for (int r = 0; r < 2; r++) top[r] = top[r] > cap->most ? cap->most : top[r];
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
        top[r] = *series == NO_SERIES ? tanh_exponent(top[r], cap, 0.0f)
                                      : series_exponent(top[r], cap, *series, 0.0f);
    raise_bases_to(top, &c->rows, rescale);
    const bool changed = __any_sync(0xffffffff, rescale[0] != 1.0f || rescale[1] != 1.0f);
    if (ADAPTIVE && changed) announce_new_max(pipe, c);
    return changed;
}

#else

/* Raises the bases to the max of a plain tile. Returns whether one has changed: then outputs must be rescaled. */
FA_DEVICE bool track_max(const pipeline *pipe, consumer_state *c, const exponent_units *u,
                         float *rescale)
{
    float top[2] = {max_of_bits(c->scores, 0), max_of_bits(c->scores, 1)};
    if (__any_sync(0xffffffff, is_negative(top[0]) || is_negative(top[1])))
        top[0] = max_of_scores(c->scores, 0), top[1] = max_of_scores(c->scores, 1);
    raise_bases(top, &c->rows, rescale, u);
    const bool changed = __any_sync(0xffffffff, rescale[0] != 1.0f || rescale[1] != 1.0f);
    if (ADAPTIVE && changed) announce_new_max(pipe, c);
    return changed;
}

#endif

/* Renews the bases, because the weights of the tile are too large for them. Immense weights, which include infinite
 * ones, no longer determine their scores. Then the scores are recomputed, and weights computed with their max. */
FA_DEVICE void renew(const pipeline *pipe, const fa_attention_params *p, consumer_state *c,
                     const float *sum)
{
    const row_state before = c->rows;
    COUNT_PATH(HOPPER_RENEWED);
    add_sums(&c->rows, sum);
    if (may_be_beyond_series(c, sum) ||
        !renew_bases(c->scores, c->out, &c->rows)) {
        float new_sum[2], rescale[2];
        COUNT_PATH(HOPPER_RECOMPUTED);
        recompute_scores(p, this_work_tile(pipe, c), c->at.tile, c->scores, c->number);
        const exponent_units u = find_exponents(pipe, p, c, true);
        c->rows.sum[0] = before.sum[0], c->rows.sum[1] = before.sum[1];
        weigh_with_max(c->scores, &c->rows, &u, new_sum, rescale);
        rescale_outputs(c->out, rescale);
        add_sums(&c->rows, new_sum);
    }
    pack_weights(c->weights, c->scores, 0, WEIGHTS_X2);
    const float growth = fmaxf(c->rows.base[0] - before.base[0], c->rows.base[1] - before.base[1]);
    if (!__any_sync(0xffffffff, growth > 0.0f)) set_bound(c, 2.0f * c->sum_bound);
    else {
        if (!c->flat || __any_sync(0xffffffff, growth > MAX_FLAT_GROWTH)) announce_new_max(pipe, c);
        set_bound(c, c->sum_bound);
    }
}

/* Weights are computed in groups of this size, and at least EARLY of a tile's weights while values are still being
 * added. These numbers were the fastest on an H200; both are in units of two scores. */
#define GROUP (HAS_SERIES ? 8 : 4)
#define EARLY (WEIGHTS_X2 * (CONSUMERS == 3 ? 3 : 6) / 8)

/* So many weights are computed before the wait: whole groups. */
#define BEFORE_WAIT MIN_OF(WEIGHTS_X2, (EARLY + GROUP - 1) / GROUP * GROUP)
#define MIN_OF(a, b) ((a) < (b) ? (a) : (b))

/* Groups of weights, from one pair of scores to another. series: where there is a softcap. */
FA_DEVICE void weigh_groups(consumer_state *c, row_state *paced, const exponent_units *u,
                            int series, int from, int to, partial_sums *sums)
{
#pragma unroll
    for (int i = from; i < to; i += GROUP) {
        const int end = MIN_OF(i + GROUP, to);
        const partial_sums before = *sums;
#if HAS_SERIES
        (void)u;
        weigh_capped_range(c->scores, paced, &c->limits.cap, series, i, end, sums);
#else
        (void)series;
        weigh_range(c->scores, paced, u, i, end, sums);
#endif
        if (i > 0 && end < WEIGHTS_X2) {
            paced->base[0] = ptx_depend_on(paced->base[0], before.of[0][1], c->zero);
            paced->base[1] = ptx_depend_on(paced->base[1], before.of[1][1], c->zero);
        }
        if (i >= BEFORE_WAIT) pack_weights(c->weights, c->scores, i, end);
    }
}

/* The same for each series, with code of its own. */
FA_DEVICE void weigh_some(consumer_state *c, row_state *paced, const exponent_units *u, int series,
                          int from, int to, partial_sums *sums)
{
#if HAS_SERIES
    if (series == SHORT_SERIES) weigh_groups(c, paced, u, SHORT_SERIES, from, to, sums);
    else if (series == LONG_SERIES) weigh_groups(c, paced, u, LONG_SERIES, from, to, sums);
    else weigh_groups(c, paced, u, NO_SERIES, from, to, sums);
#else
    weigh_groups(c, paced, u, series, from, to, sums);
#endif
}

/* The special-function unit, which consumers share, should be busy from the start. So a group's exponents are computed
 * while the group two before it becomes weights. After EARLY weights the warp waits for the product with the values of
 * the previous tile, and releases their stage at once. The other weights are packed in issue slots that exponentials
 * leave free. tracked: with the max. */
FA_DEVICE void softmax_plain(const pipeline *pipe, const fa_attention_params *p, consumer_state *c,
                             bool tracked)
{
    float sum[2], rescale[2];
    partial_sums sums = {{{0, 0}, {0, 0}}};
#if HAS_SERIES
    const exponent_units u = {.scale = 1.0f};
    int series;
    const bool rescaled = tracked && track_max(pipe, c, &series, rescale);
    if (!tracked) series = find_plain_series(c);
#else
    const int series = 0;
    const exponent_units u = find_plain_exponents(pipe, p, c, tracked);
    const bool rescaled = tracked && track_max(pipe, c, &u, rescale);
#endif
    row_state paced = c->rows;
    COUNT_PATH(tracked ? HOPPER_TRACKED : HOPPER_UNTRACKED);
    weigh_some(c, &paced, &u, series, 0, BEFORE_WAIT, &sums);
    /* After two of the sums: after only one the assembler waits too early, after all four too late. */
    const int two = __float_as_int(sums.of[1][1]) | __float_as_int(sums.of[0][0]);
    ptx_order_after(__int_as_float(two), c->zero, pipe->state);
    wait_for_outputs(c->out, c->weights);
    const uint32_t token = ptx_mbarrier_arrive_token_if(
        &pipe->state->v_empty[stage_of(c->at.count - 1)], c->leader);
    paced.base[0] = ptx_depend_on(paced.base[0], __int_as_float((int)token), c->zero);
    if (rescaled) rescale_outputs(c->out, rescale);
    pack_weights(c->weights, c->scores, 0, BEFORE_WAIT);
    weigh_some(c, &paced, &u, series, BEFORE_WAIT, WEIGHTS_X2, &sums);
    add_partial_sums(&sums, sum);
    if (!tracked && __any_sync(0xffffffff, is_beyond_bound(c, sum))) renew(pipe, p, c, sum);
    else add_sums(&c->rows, sum);
}

#endif
