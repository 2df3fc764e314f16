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
#include "forward_f16x3_sm90/exchange.cuh"
#include "forward_f16x3_sm90/multiply.cuh"
#include "forward_f16x3_sm90/pipeline.cuh"
#include "forward_f16x3_sm90/queries.cuh"
#include "forward_f16x3_sm90/softmax.cuh"
#include "common/device.cuh"
#include "forward_sm90/cursor.cuh"
#include "forward_sm90/describe.cuh"
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
    /* Units of scores of the thread's rows, in tiles of unit 1: as exponents of 2. In chunks, as
     * scores: `factor` turns them into exponents. */
    float unit[2];
#if UNITS_LEAVE
    float factor;
#endif
#if CLUSTER > 1
    uint32_t exchanges; /* exchanges so far */
#endif
#if OPTIONS
    float kept[2]; /* with dropout: the largest kept weight of each row */
#endif
    row_state rows;
    tile_limits limits;
    cursor at;
} consumer_state;

FA_DEVICE void release_chunk(const pipeline *pipe, const consumer_state *c, tile_count number)
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

/* Adds the scores of a chain. In chunks, those of the first one still have its units. */
FA_DEVICE void add_chain(float *s, const float *more, const consumer_state *c, float of_chunk,
                         int chunk)
{
    if (!UNITS_LEAVE || chunk == 0) {
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) s[i] += more[i];
        return;
    }
    const float unit[2] = {score_unit(c->unit[0], of_chunk), score_unit(c->unit[1], of_chunk)};
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) s[i] = fmaf(more[i], unit[i / 2 % 2], s[i]);
}

/* Multiplies the scores of the first chunk by its unit and by those of their rows. All units are
 * powers of two. */
FA_DEVICE void leave_units(float *s, const consumer_state *c, float of_chunk)
{
    const float unit[2] = {score_unit(c->unit[0], of_chunk), score_unit(c->unit[1], of_chunk)};
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) s[i] *= unit[i / 2 % 2];
}

/* S of the block's columns of a tile, whose keys are then released. keys: the number of the first
 * chunk. Returns the unit of the scores, without the unit of the row. In chunks that is 1:
 * scores are multiplied by their units, which differ between chunks. */
FA_DEVICE float compute_scores(const pipeline *pipe, consumer_state *c, tile_count keys, float *s)
{
    float more[KEYS / 2], unit = 1;
    ptx_register_fence(s, KEYS / 2);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        const int columns = chunk + 1 < CHUNKS ? CHUNK_COLUMNS : LAST_COLUMNS,
                  chains = (columns + SUM_COLUMNS - 1) / SUM_COLUMNS;
        const uint32_t k = chunk_descriptor(pipe, keys + chunk),
                       q = c->at.q + chunk * (CHUNK_BLOCKS * Q_BLOCK / 16);
        acquire_chunk(pipe, keys + chunk);
        unit = pipe->state->unit[stage_of(keys + chunk)];
#pragma unroll
        for (int chain = 0; chain < chains; chain++) {
            const bool first = chunk == 0 && chain == 0;
            if (first || chunk > 0 || chain > 1) ptx_wgmma_fence();
            issue_qk(first ? s : more, q, k, chain, columns);
            if (first && chains > 1) continue;
            ptx_wgmma_wait(0);
            ptx_register_fence(s, KEYS / 2);
            if (first) continue;
            ptx_register_fence(more, KEYS / 2);
            add_chain(s, more, c, unit, chunk);
        }
        ptx_register_fence(s, KEYS / 2);
        release_chunk(pipe, c, keys + chunk);
        if (UNITS_LEAVE && chunk == 0) leave_units(s, c, unit);
    }
    release_queries(pipe, c, c->at.tile + 1 == c->at.needed);
    return UNITS_LEAVE ? 1 : unit;
}

/* What a tile's scores need besides products. */
typedef struct tile_extra {
#if OPTIONS && LOADS_EARLY
    early_words early;
#else
    char nothing;
#endif
} tile_extra;

/* Replaces scores by weights. of_tile: the unit of its keys. */
FA_DEVICE void weigh_tile(const pipeline *pipe, const fa_attention_params *p, consumer_state *c,
                          const tile_extra *extra, float *s, float of_tile)
{
    const int tile = c->at.tile;
#if UNITS_LEAVE
    const float of_row[2] = {c->factor, c->factor};
#else
    const float *of_row = c->unit;
#endif
#if OPTIONS
    const float unit[2] = {of_row[0] * of_tile, of_row[1] * of_tile};
#if LOADS_EARLY
    apply_options(p, queue_entry(pipe, c->at.number), s, unit, &extra->early, tile, c->number);
#else
    (void)extra;
    apply_options(p, queue_entry(pipe, c->at.number), s, unit, tile, c->number);
#endif
#else
    const float unit[2] = {score_unit(of_row[0], of_tile), score_unit(of_row[1], of_tile)};
    (void)p, (void)extra;
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

/* out += P V for PV_COLUMNS columns of a chunk from column `columns` on, or for half of them, of
 * which `kept` are the block's. */
FA_DEVICE void add_columns(float *out, uint32_t *high, uint32_t *low, uint32_t v, float unit,
                           int columns, int kept)
{
    const bool half = kept <= PV_COLUMNS / 2;
    const int count = half ? PV_COLUMNS / 4 : PV_COLUMNS / 2;
    float part[PV_COLUMNS / 2];
    ptx_register_fence(part, count);
    ptx_wgmma_fence();
    issue_pv(part, high, low, v, columns, half);
    ptx_wgmma_wait(0);
    ptx_register_fence(part, count);
    fence_weights(high);
    fence_weights(low);
#pragma unroll
    for (int i = 0; i < count && i < kept / 2; i++) out[i] = fmaf(part[i], unit, out[i]);
}

/* out += P V for a chunk's columns. Then the chunk is released. */
FA_DEVICE void add_values(const pipeline *pipe, const consumer_state *c, float *out,
                          tile_count values, int columns, uint32_t *high, uint32_t *low)
{
    const uint32_t v = chunk_descriptor(pipe, values);
    const float unit = pipe->state->unit[stage_of(values)] * (1.0f / (1 << (int)HEADROOM));
#pragma unroll
    for (int i = 0; i < (columns + PV_COLUMNS - 1) / PV_COLUMNS; i++)
        add_columns(out + i * (PV_COLUMNS / 2), high, low, v, unit, i * (PV_COLUMNS / 64),
                    columns - i * PV_COLUMNS);
    release_chunk(pipe, c, values);
}

FA_DEVICE void do_tile(const pipeline *pipe, const fa_attention_params *p, consumer_state *c)
{
    const tile_count keys = c->at.count + 2 * CHUNKS * (uint32_t)c->at.tile, values = keys + CHUNKS;
    uint32_t high[KEYS / 4], low[KEYS / 4];
    float s[KEYS / 2];
    tile_extra extra;
#if OPTIONS && LOADS_EARLY
    load_early(p, queue_entry(pipe, c->at.number), c->at.tile, c->number, &extra.early);
#endif
    const float unit = compute_scores(pipe, c, keys, s);
#if CLUSTER > 1
    send_scores(pipe, s, c->exchanges, c->leader, c->number);
    add_peer_scores(pipe, s, c->exchanges++, c->leader, c->number);
#endif
    weigh_tile(pipe, p, c, &extra, s, unit);
    split_weights(s, high, low);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        acquire_chunk(pipe, values + chunk);
        add_values(pipe, c, c->out + chunk * (CHUNK_COLUMNS / 2), values + chunk,
                   chunk + 1 < CHUNKS ? CHUNK_COLUMNS : LAST_COLUMNS, high, low);
    }
}

/* Key tiles that only other consumers need, and the end of the work tile. */
FA_DEVICE void skip_other_tiles(const pipeline *pipe, consumer_state *c)
{
    const tile_count first = c->at.count;
    c->at.count += 2 * CHUNKS * (uint32_t)c->at.key_tiles;
    for (tile_count i = first + 2 * CHUNKS * (uint32_t)c->at.needed; i != c->at.count; i++) {
        acquire_chunk(pipe, i);
        release_chunk(pipe, c, i);
    }
}

/* Outputs have weights of at most 1, so sums and bases are changed to match. With options, bases
 * have no headroom. */
FA_DEVICE void remove_headroom(row_state *rows)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        rows->sum[r] = (rows->sum[r] + rows->rest[r]) * (1.0f / (1 << (int)HEADROOM));
        if (!OPTIONS && rows->base[r] != NO_KEY_SEEN) rows->base[r] += HEADROOM;
    }
}

/* Whether rows of the warp's queries must be recomputed: outputs are not finite; or the largest
 * weight, which should be 1, is less or infinite, because its logit is so large that the rounded
 * base differs from it by more than 1; or dropout keeps too little. If so, the sum becomes NaN, and
 * so do the results. */
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
#if CLUSTER > 1
    c.exchanges = 0;
#endif
    c.leader = threadIdx.x % 32 == 0;
    __asm__ volatile("" : "+r"(c.leader));
    for (next_work_tile(pipe, consumer, &c.at); c.at.key_tiles;
         next_work_tile(pipe, consumer, &c.at)) {
        start_work_tile(pipe, &c);
        if (c.at.needed) {
            split_queries(pipe, consumer, c.unit);
            const float factor = score_factor(p, queue_entry(pipe, c.at.number), &c.limits);
#if UNITS_LEAVE
            c.factor = factor;
#else
            c.unit[0] *= factor;
            c.unit[1] *= factor;
#endif
            for (; c.at.tile < c.at.needed; c.at.tile++) do_tile(pipe, p, &c);
        } else release_queries(pipe, &c, true);
        const work_tile *w = queue_entry(pipe, c.at.number);
        remove_headroom(&c.rows);
        recompute |= finds_bad_rows(w, &c);
        store_outputs(p, s, w, &c.rows, c.out, consumer);
        skip_other_tiles(pipe, &c);
        release_work_tile(pipe, c.at.number);
    }
    if (recompute) recompute_rows(pipe, p, s, consumer);
}

#endif
