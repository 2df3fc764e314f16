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

/* The exponents that scores mean by the series, and those of scores that have become tanh. */
FA_DEVICE exponent_units series_units(const tile_limits *l)
{
    return (exponent_units){.scale = l->first,
                            .third = l->third,
                            .fifth = l->fifth,
                            .seventh = l->seventh,
                            .ninth = l->ninth};
}

FA_DEVICE exponent_units tanh_units(const tile_limits *l)
{
    return (exponent_units){.scale = l->scale}; /* other terms are 0 */
}

/* Whether a masked tile may try the series: in rows of usual logits it fits. (Of a score of -infinity it would be NaN with a
 * coefficient of 0.) */
FA_DEVICE bool may_use_series(const tile_limits *l, bool exact)
{
    const float usual_top = 6.0f, least_coefficient = 1e-30f;
    const float last = exact ? l->ninth : l->fifth;
    return l->end > 0.0f && l->least_top < usual_top && last > least_coefficient;
}

/* The series if all of the warp's scores are in its range; otherwise they become tanh. */
FA_DEVICE exponent_units choose_exponents(const pipeline *pipe, consumer_state *c)
{
    const float inner = this_work_tile(pipe, c)->inner;
    float none[2] = {0, 0};
    if (are_in_series(&c->limits, c->scores)) return series_units(&c->limits);
    cap_scores(c->scores, none, inner, false);
    return tanh_units(&c->limits);
}

/* For a masked tile. Where scores are in the range of the series, they become exponents. */
FA_DEVICE exponent_units find_masked_exponents(const pipeline *pipe, const fa_attention_params *p,
                                               consumer_state *c)
{
    const float inner = this_work_tile(pipe, c)->inner;
    const exponent_units one = {.scale = 1.0f}, series = series_units(&c->limits);
    if (are_in_series(&c->limits, c->scores)) {
        if (is_exact(p)) apply_series(c->scores, &series, true);
        else apply_series(c->scores, &series, false);
        return one;
    }
    float none[2] = {0, 0};
    cap_scores(c->scores, none, inner, false);
    return tanh_units(&c->limits);
}

#endif

/* The same for a plain tile. */
FA_DEVICE exponent_units find_plain_exponents(const pipeline *pipe, const fa_attention_params *p,
                                              consumer_state *c)
{
#if HAS_SERIES
    return c->series ? series_units(&c->limits) : choose_exponents(pipe, c);
#else
    return find_exponents(pipe, p, c, false);
#endif
}

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

FA_DEVICE void set_bound(const pipeline *pipe, const fa_attention_params *p, consumer_state *c,
                         float bound)
{
    c->sum_bound = fminf(bound, FA_SUM_BOUND);
#if HAS_SERIES
    c->series = allow_series(&c->limits, &c->rows, c->sum_bound);
#endif
    (void)pipe, (void)p;
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
    set_bound(pipe, p, c, MAX_WEIGHT + FA_FLAT_GROWTH * average);
}

/* The bound of peaked rows that have had no new max for a while, from the average of all tiles so far. */
FA_DEVICE void bound_peaked_rows(const pipeline *pipe, const fa_attention_params *p,
                                 consumer_state *c)
{
    const float share = 1.0f / (float)(c->at.tile + 1);
    if (!c->tracked) COUNT_PATH(HOPPER_TRACKING_ENDED);
    const float average[2] = {c->rows.sum[0] * share, c->rows.sum[1] * share};
    c->flat = false;
    set_bound(pipe, p, c, MAX_WEIGHT + PEAKED_GROWTH * average_sum(average));
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
    const float end = c->limits.top;
    bool is_beyond = false;
#pragma unroll
    for (int r = 0; r < 2; r++) is_beyond |= !(sum[r] <= ptx_ex2(end - c->rows.base[r]));
    return c->series && __any_sync(0xffffffff, is_beyond);
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
    raise_bases(top, rows, rescale, u, false);
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

/* Computes weights by the series, if the tile's maxima show that it may be used: all scores are below its upper end, and each row
 * that sees a key has a weight beside which those of its lowest scores do not matter. Otherwise the scores are only masked. */
FA_DEVICE bool weigh_masked_by_series(const pipeline *pipe, const fa_attention_params *p,
                                      consumer_state *c, float *sum, float *rescale)
{
    /* Above head dim 192 this is slower (H200, us, with and without it: six packed sequences of 80 to 6,000 rows 884, 805; 8,192
     * rows, window 4,096, 720, 700). */
    const bool exact = is_exact(p);
    if (HEAD_DIM > 192 || !may_use_series(&c->limits, exact)) return false;
    const exponent_units u = series_units(&c->limits);
    const bool hides = hides_keys(c);
    if (hides) mask_scores(c->scores, this_work_tile(pipe, c), c->number, c->at.tile * KEYS);
    const float top[2] = {max_of_scores(c->scores, 0), max_of_scores(c->scores, 1)};
    row_state raised = c->rows;
    raise_bases(top, &raised, rescale, &u, exact);
    bool fits = fmaxf(top[0], top[1]) <= c->limits.end;
#pragma unroll
    for (int r = 0; r < 2; r++)
        fits = fits && (raised.base[r] + HEADROOM >= c->limits.least_top ||
                        (raised.base[r] == NO_KEY_SEEN && !sees_tile(pipe, c, r)));
    if (__any_sync(0xffffffff, !fits)) return false;
    c->rows = raised;
    partial_sums sums = {{{0, 0}, {0, 0}}};
    if (exact) weigh_range_by_series(c->scores, &c->rows, &u, true, 0, WEIGHTS_X2, &sums);
    else weigh_range_by_series(c->scores, &c->rows, &u, false, 0, WEIGHTS_X2, &sums);
    add_partial_sums(&sums, sum);
    return true;
}

/* Weights of a masked tile, and bases that are its max. */
FA_DEVICE void weigh_masked(const pipeline *pipe, const fa_attention_params *p, consumer_state *c,
                            float *sum, float *rescale)
{
    if (weigh_masked_by_series(pipe, p, c, sum, rescale)) return;
    const exponent_units u = find_masked_exponents(pipe, p, c);
    if (hides_keys(c))
        mask_scores(c->scores, this_work_tile(pipe, c), c->number, c->at.tile * KEYS);
    weigh_with_max(c->scores, &c->rows, &u, sum, rescale);
}

#endif

FA_DEVICE void softmax_masked(const pipeline *pipe, const fa_attention_params *p, consumer_state *c)
{
#if HAS_SERIES
    float sum[2], rescale[2];
    const int tile = c->at.tile;
    weigh_masked(pipe, p, c, sum, rescale);
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

/* Raises the bases to the max of a plain tile, and finds the exponents that its scores mean: the max shows whether they are in
 * the range of the series. Returns whether a base has changed: then outputs must be rescaled. */
FA_DEVICE bool track_max(const pipeline *pipe, consumer_state *c, bool exact, exponent_units *u,
                         float *rescale)
{
    float top[2] = {max_of_bits(c->scores, 0), max_of_bits(c->scores, 1)};
    const bool negative = is_negative(top[0]) || is_negative(top[1]);
    const bool above = !(fmaxf(top[0], top[1]) <= c->limits.end);
    *u = series_units(&c->limits);
    if (__any_sync(0xffffffff, negative || above || !c->series_below)) {
        const float inner = this_work_tile(pipe, c)->inner;
        const bool beyond = __any_sync(0xffffffff, above);
        if (__any_sync(0xffffffff, negative))
            top[0] = max_of_scores(c->scores, 0), top[1] = max_of_scores(c->scores, 1);
        if (beyond || !(c->series_below || are_in_series(&c->limits, c->scores))) {
            cap_scores(c->scores, top, inner, beyond);
            *u = tanh_units(&c->limits);
        }
    }
    raise_bases(top, &c->rows, rescale, u, exact);
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
    raise_bases(top, &c->rows, rescale, u, false);
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
    if (may_be_beyond_series(c, sum) || !renew_bases(c->scores, c->out, &c->rows)) {
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
    if (!__any_sync(0xffffffff, growth > 0.0f)) set_bound(pipe, p, c, 2.0f * c->sum_bound);
    else {
        if (!c->flat || __any_sync(0xffffffff, growth > MAX_FLAT_GROWTH)) announce_new_max(pipe, c);
        set_bound(pipe, p, c, c->sum_bound);
    }
}

/* Weights are computed in groups of this size, and at least EARLY of a tile's weights while values are still being
 * added. These numbers were the fastest on an H200; both are in units of two scores. */
#define GROUP (HAS_SERIES ? 8 : 4)
#define EARLY (WEIGHTS_X2 * (CONSUMERS == 3 ? 3 : 6) / 8)

/* The special-function unit, which consumers share, should be busy from the start. So a group's exponents are computed
 * while the group two before it becomes weights. After EARLY weights the warp waits for the product with the values of
 * the previous tile, and releases their stage at once. The other weights are packed in issue slots that exponentials
 * leave free. tracked: with the max. */
FA_DEVICE void softmax_plain(const pipeline *pipe, const fa_attention_params *p, consumer_state *c,
                             bool tracked, bool exact)
{
    (void)exact;
#if HAS_SERIES
    exponent_units u;
    float sum[2], rescale[2];
    const bool rescaled = tracked && track_max(pipe, c, exact, &u, rescale);
    if (!tracked) u = find_plain_exponents(pipe, p, c);
    partial_sums sums = {{{0, 0}, {0, 0}}};
#else
    const exponent_units u = find_plain_exponents(pipe, p, c);
    partial_sums sums = {{{0, 0}, {0, 0}}};
    float sum[2], rescale[2];
    const bool rescaled = tracked && track_max(pipe, c, &u, rescale);
#endif
    row_state paced = c->rows;
    COUNT_PATH(tracked ? HOPPER_TRACKED : HOPPER_UNTRACKED);
#pragma unroll
    for (int i = 0; i < WEIGHTS_X2; i += GROUP) {
        const int to = i + GROUP < WEIGHTS_X2 ? i + GROUP : WEIGHTS_X2;
        const partial_sums before = sums;
#if HAS_SERIES
        weigh_range_by_series(c->scores, &paced, &u, exact, i, to, &sums);
#else
        weigh_range(c->scores, &paced, &u, i, to, &sums);
#endif
        if (i > 0 && to < WEIGHTS_X2) {
            paced.base[0] = ptx_depend_on(paced.base[0], before.of[0][1], c->zero);
            paced.base[1] = ptx_depend_on(paced.base[1], before.of[1][1], c->zero);
        }
        if (i < EARLY && to >= EARLY) {
            /* After two of the sums: after only one the assembler waits too early, after all four too late. */
            const int two = __float_as_int(sums.of[1][1]) | __float_as_int(sums.of[0][0]);
            ptx_order_after(__int_as_float(two), c->zero, pipe->state);
            wait_for_outputs(c->out, c->weights);
            const uint32_t token = ptx_mbarrier_arrive_token_if(
                &pipe->state->v_empty[stage_of(c->at.count - 1)], c->leader);
            paced.base[0] = ptx_depend_on(paced.base[0], __int_as_float((int)token), c->zero);
            if (rescaled) rescale_outputs(c->out, rescale);
            pack_weights(c->weights, c->scores, 0, to);
        } else if (i >= EARLY) pack_weights(c->weights, c->scores, i, to);
    }
    add_partial_sums(&sums, sum);
    if (!tracked && __any_sync(0xffffffff, is_beyond_bound(c, sum))) renew(pipe, p, c, sum);
    else add_sums(&c->rows, sum);
}

#endif
