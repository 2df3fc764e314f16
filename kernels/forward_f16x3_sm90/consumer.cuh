/*
 * A consumer: a warpgroup with 64 queries of the work tile. For each key tile it
 *
 *     computes S = Q K^T, chain by chain; its softmax, in place; splits the weights; computes P V,
 *     some columns at a time, and adds them to the outputs
 *
 * and waits for each of these. Meanwhile the tensor cores work for the other consumer.
 */
#ifndef FA_KERNELS_FORWARD_F16X3_SM90_CONSUMER_CUH
#define FA_KERNELS_FORWARD_F16X3_SM90_CONSUMER_CUH

#include "forward_f16x3_sm90/config.cuh"
#include "forward_f16x3_sm90/multiply.cuh"
#include "forward_f16x3_sm90/pipeline.cuh"
#include "forward_f16x3_sm90/queries.cuh"
#include "forward_f16x3_sm90/softmax.cuh"
#include "common/device.cuh"
#include "forward_sm90/cursor.cuh"
#include "forward_sm90/float32_options.cuh"
#include "forward_sm90/options.cuh"
#include "forward_sm90/recompute.cuh"
#include "forward_sm90/scheduler.cuh"
#include "forward_sm90/stage.cuh"
#include "forward_tf32_sm90/store.cuh"
#include "ptx/barrier.cuh"

typedef struct consumer_state {
    int number; /* of the consumer */
    int leader; /* 1 in lane 0 of a warp */
    float out[OUTPUTS];
    float unit[2]; /* of scores of the thread's rows, in tiles of unit 1; as exponents of 2 */
#if OPTIONS
    float kept[2]; /* by dropout: the largest weight of each row */
#endif
    row_state rows;
    tile_limits limits;
    cursor at;
} consumer_state;

FA_DEVICE void release_tile(const pipeline *pipe, const consumer_state *c, tile_count number)
{
    ptx_mbarrier_arrive_if(&pipe->state->empty[stage_of(number)], c->leader);
}

FA_DEVICE void release_queries(const pipeline *pipe, const consumer_state *c, bool last)
{
    ptx_mbarrier_arrive_if(q_empty(pipe, &c->at, c->number), c->leader && last);
}

FA_DEVICE void start_work_tile(const pipeline *pipe, consumer_state *c)
{
    c->limits = find_limits(queue_entry(pipe, c->at.number), c->number);
    c->rows.base[0] = c->rows.base[1] = NO_KEY_SEEN;
    c->rows.sum[0] = c->rows.sum[1] = c->rows.rest[0] = c->rows.rest[1] = 0;
#if OPTIONS
    c->kept[0] = c->kept[1] = 0;
#endif
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) c->out[i] = 0;
}

/* S of a tile, whose keys are then released. */
FA_DEVICE void compute_scores(const pipeline *pipe, consumer_state *c, tile_count keys, float *s)
{
    const uint32_t k = tile_descriptor(pipe, keys);
    float more[KEYS / 2];
    ptx_register_fence(s, KEYS / 2);
    ptx_wgmma_fence();
    issue_qk(s, c->at.q, k, 0);
#pragma unroll
    for (int chain = 1; chain < HEAD_DIM / SUM_COLUMNS; chain++) {
        if (chain > 1) ptx_wgmma_fence();
        issue_qk(more, c->at.q, k, chain);
        ptx_wgmma_wait(0);
        ptx_register_fence(s, KEYS / 2);
        ptx_register_fence(more, KEYS / 2);
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) s[i] += more[i];
    }
    if (HEAD_DIM == SUM_COLUMNS) ptx_wgmma_wait(0);
    ptx_register_fence(s, KEYS / 2);
    release_tile(pipe, c, keys);
    release_queries(pipe, c, c->at.tile + 1 == c->at.needed);
}

/* Scores become weights. of_tile: the unit of its keys. */
FA_DEVICE void weigh_tile(const pipeline *pipe, const fa_attention_params *p, consumer_state *c,
                          float *s, float of_tile)
{
    const int tile = c->at.tile;
#if OPTIONS
    const float unit[2] = {c->unit[0] * of_tile, c->unit[1] * of_tile};
    apply_options(p, queue_entry(pipe, c->at.number), s, unit, tile, c->number);
#else
    const float unit[2] = {exponent_unit(c->unit[0], of_tile), exponent_unit(c->unit[1], of_tile)};
    (void)p;
#endif
    float rescale[2];
    if (tile < c->limits.unmasked_from || tile >= c->limits.unmasked_to)
        mask_scores(s, queue_entry(pipe, c->at.number), c->number, tile * KEYS);
#if OPTIONS
    raise_row_bases(s, &c->rows, rescale);
    weigh_rows(s, &c->rows);
    if (p->dropout_threshold) {
        drop_weights_of_rows(p, queue_entry(pipe, c->at.number), s, tile, c->number);
        find_kept(s, rescale, c->kept);
    }
#else
    raise_row_bases(s, unit, &c->rows, rescale);
    weigh_rows(s, unit, &c->rows);
#endif
    if (__any_sync(0xffffffff, rescale[0] != 1.0f || rescale[1] != 1.0f))
        rescale_outputs(c->out, rescale);
}

/* Outputs += P V, whose tile is then released. */
FA_DEVICE void add_values(const pipeline *pipe, consumer_state *c, tile_count values,
                          uint32_t *high, uint32_t *low)
{
    const uint32_t v = tile_descriptor(pipe, values);
    const float unit = pipe->state->unit[stage_of(values)] * (1.0f / (1 << (int)HEADROOM));
    float part[PV_COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < VALUE_DIM / PV_COLUMNS; i++) {
        ptx_register_fence(part, PV_COLUMNS / 2);
        ptx_wgmma_fence();
        issue_pv(part, high, low, v, i * (PV_COLUMNS / 64));
        ptx_wgmma_wait(0);
        ptx_register_fence(part, PV_COLUMNS / 2);
        fence_weights(high);
        fence_weights(low);
#pragma unroll
        for (int j = 0; j < PV_COLUMNS / 2; j++)
            c->out[i * (PV_COLUMNS / 2) + j] =
                fmaf(part[j], unit, c->out[i * (PV_COLUMNS / 2) + j]);
    }
    release_tile(pipe, c, values);
}

FA_DEVICE void do_tile(const pipeline *pipe, const fa_attention_params *p, consumer_state *c)
{
    const tile_count keys = c->at.count + 2 * (uint32_t)c->at.tile, values = keys + 1;
    uint32_t high[KEYS / 4], low[KEYS / 4];
    float s[KEYS / 2];
    acquire_tile(pipe, keys);
    const float unit = pipe->state->unit[stage_of(keys)];
    compute_scores(pipe, c, keys, s);
    weigh_tile(pipe, p, c, s, unit);
    split_weights(s, high, low);
    acquire_tile(pipe, values);
    add_values(pipe, c, values, high, low);
}

/* Key tiles that only other consumers need, and the end of the work tile. */
FA_DEVICE void skip_other_tiles(const pipeline *pipe, consumer_state *c)
{
    const tile_count first = c->at.count;
    c->at.count += 2 * (uint32_t)c->at.key_tiles;
    for (tile_count i = first + 2 * (uint32_t)c->at.needed; i != c->at.count; i++) {
        acquire_tile(pipe, i);
        release_tile(pipe, c, i);
    }
}

/* Outputs have weights of 1 at most: sums and bases follow. With options, bases are without it. */
FA_DEVICE void remove_headroom(row_state *rows)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        rows->sum[r] = (rows->sum[r] + rows->rest[r]) * (1.0f / (1 << (int)HEADROOM));
        if (!OPTIONS && rows->base[r] != NO_KEY_SEEN) rows->base[r] += HEADROOM;
    }
}

/* Whether rows of the warp's queries are to be computed again: outputs are not finite, or the
 * largest weight, which should be 1, is less or infinite. Then its logit is so huge that the base,
 * rounded, differs from it by more than 1. Or dropout keeps too little. The sum becomes NaN, and
 * the results with it. */
FA_DEVICE bool finds_bad_rows(const work_tile *w, consumer_state *c)
{
    row_state *rows = &c->rows;
    float seen[2] = {0, 0}, sum[2];
    bool found = false;
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) seen[i / 2 % 2] += c->out[i] * 0.0f;
    find_sums(rows, sum);
#pragma unroll
    for (int r = 0; r < 2; r++) {
#if OPTIONS
        rows->base[r] = find_seen_base(rows->base[r], sum[r]);
#endif
        bool wrong = rows->base[r] != NO_KEY_SEEN && !(sum[r] >= 0.5f && sum[r] < INFINITY);
#if OPTIONS
        wrong |= keeps_too_little(c->kept[r]);
#endif
        if (wrong) rows->sum[r] = NAN;
        found |= (wrong || seen[r] != 0.0f) && row_of(c->number, r) < w->queries;
    }
    return __any_sync(0xffffffff, found);
}

FA_DEVICE void consume(const pipeline *pipe, const fa_attention_params *p, const fa_sm90_params *s,
                       int consumer)
{
    consumer_state c;
    bool recompute = false;
    c.number = consumer;
    c.at.number = -1;
    c.at.count = 0;
    c.leader = threadIdx.x % 32 == 0;
    __asm__ volatile("" : "+r"(c.leader));
    for (next_work_tile(pipe, consumer, &c.at); c.at.key_tiles;
         next_work_tile(pipe, consumer, &c.at)) {
        start_work_tile(pipe, &c);
        if (c.at.needed) {
            split_queries(pipe, consumer, c.unit);
            const float factor = score_factor(p, queue_entry(pipe, c.at.number), &c.limits);
            c.unit[0] *= factor;
            c.unit[1] *= factor;
            for (; c.at.tile < c.at.needed; c.at.tile++) do_tile(pipe, p, &c);
        } else release_queries(pipe, &c, true);
        const work_tile *w = queue_entry(pipe, c.at.number);
        remove_headroom(&c.rows);
        recompute |= finds_bad_rows(w, &c);
        store_outputs(p, w, &c.rows, c.out, consumer);
        skip_other_tiles(pipe, &c);
        release_work_tile(pipe, c.at.number);
    }
    if (recompute) recompute_rows(pipe, p, s, consumer);
}

#endif
