/*
 * The warpgroup that computes scores, weights and dV. It passes each tile's weights to the dK
 * warpgroup, in float32.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_WIDE_DV_CUH
#define FA_KERNELS_BACKWARD_SM90_WIDE_DV_CUH

#include "backward_sm90_wide/config.cuh"
#include "backward_sm90_wide/multiply.cuh"
#include "backward_sm90_wide/pipeline.cuh"
#include "backward_sm90_wide/tile.cuh"
#include "backward_sm90/dropout.cuh"
#include "backward_sm90/keys.cuh"
#include "backward_sm90/options.cuh"
#include "backward_sm90/rows.cuh"
#include "backward_sm90/store.cuh"
#include "common/device.cuh"
#include "common/softmax.cuh"
#include "common/x2.cuh"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/shared.cuh"

typedef struct dv_state {
    float dv[DV_SUMS], scores[SCORES]; /* first scores, then weights: with options, those for dS */
    uint32_t weights[SCORES / 2];      /* those for dV */
    uint32_t base;                     /* descriptor of the block's keys */
    pinned_rows keys;
    thread_places own;
    float scale; /* from scores to exponents of 2; with a softcap, to the argument of tanh */
#if OPTIONS
    tile_options options; /* of the tile whose scores are computed */
#endif
#if BIAS_ALONE
    uint32_t bias[SCORES / 2]; /* of this tile */
    bool shows;                /* shows_all_pairs */
#endif
} dv_state;

/* Clears the weights of queries that do not see the thread's keys. Element 4j + 2r + i is query
 * 8j + 2 (lane % 4) + i and key r of the thread. */
FA_DEVICE void mask_weights(const block_work *w, float *weights, int tile)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32;
    const int first = tile * QUERIES + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int key = FIRST_KEY + warp * 16 + lane / 4 + 8 * r;
        const int from = w->first_query + key - first;
        const int to = key < w->num_keys ? w->end_query + key - first : -1;
#pragma unroll
        for (int j = 0; j < QUERIES / 8; j++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (8 * j + i < from || 8 * j + i >= to) weights[4 * j + 2 * r + i] = 0;
    }
}

#if BIAS_ALONE

/* Issues the loads of a tile's bias: of each matrix of 8 queries and 8 keys a lane has a query and two keys, which are one word.
 * The number of keys is even (find_wide_bias_variant). */
FA_DEVICE void load_bias(const fa_kernel_view *bias, const block_work *w, const tile_options *o,
                         uint32_t *x2)
{
    const int lane = threadIdx.x % 32, query = o->query - lane % 4 * 2 + lane / 4,
              key = o->key - lane / 4 + lane % 4 * 2;
    const int queries = (int)w->sequence.n_q - query, keys = w->num_keys - key;
    const int64_t step = 8 * bias->stride[2];
    const fa_tile t = sequence_of(w, o);
    const uint16_t *from = (const uint16_t *)(const void *)bias->data +
                           fa_score_index(bias, &t, query, w->keys.first + key);
#pragma unroll
    for (int j = 0; j < QUERIES / 8; j++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            uint32_t x = 0;
            if (8 * j < queries && 8 * r < keys)
                x = *(const uint32_t *)(const void *)(from + 8 * r);
            x2[2 * j + r] = x;
        }
        from += step;
        __asm__ volatile("" : "+l"(from)); /* keeps the compiler from holding an address for each */
    }
}

/* Gives each lane the elements of its scores. */
FA_DEVICE void transpose_bias(const pipeline *pipe, dv_state *c)
{
#pragma unroll
    for (int n = 0; n < SCORES / 2; n++) c->bias[n] = ptx_transpose_matrix(c->bias[n]);
    c->shows = shows_all_pairs(pipe->state, &c->options, c->bias);
}

#endif

#if DROPOUT_ALONE

/* Packs the weights of a tile for dV, without those that are dropped. These get a negative sign (mark_dropped). */
FA_DEVICE void drop_weights(dv_state *c)
{
    const uint32_t drops = ~c->options.keeps;
#pragma unroll
    for (int n = 0; n < SCORES / 2; n++) {
        float *x = c->scores + 2 * n;
        const uint32_t signs = drops << (15 - n); /* of the two: bits 15 and 31 */
        c->weights[n] = fa_pack_x2(x[0], x[1]) & ~ptx_spread_signs(signs);
        x[0] = fa_bits_float(__float_as_uint(x[0]) | (signs << 16 & 0x80000000u));
        x[1] = fa_bits_float(__float_as_uint(x[1]) | (signs & 0x80000000u));
    }
}

#endif

#if OPTIONS

/* Finds what the options of the tile need whose scores are computed next. */
FA_DEVICE void find_options(const pipeline *pipe, const fa_attention_params *p, dv_state *c,
                            const tile_cursor *at)
{
    const block_work *w = work_of(pipe);
#if DROPOUT_ALONE
    ptx_named_barrier_sync(NAMED_BARRIER_KEPT + ptx_thread_id() % WARPGROUP / 64, 64);
    c->options.keeps =
        ptx_keep(find_shared_kept(p, pipe->state->kept, NAMED_BARRIER_KEPT, w, at, THIS_BLOCK));
#else
    c->options =
        find_tile_options(p, w, at, THIS_BLOCK, true, find_tile_kept(p, w, at, THIS_BLOCK));
#endif
#if BIAS_ALONE
    load_bias(&p->bias, w, &c->options, c->bias);
#endif
}

/* Marks dropped weights. Weights are not negative, so a negative sign marks a dropped one. */
FA_DEVICE void mark_dropped(const fa_attention_params *p, const tile_options *o, float *weights)
{
    uint32_t keeps = o->keeps;
    if (!p->dropout_threshold) return;
    /* Keeps the compiler from holding the result of each bit in a register. */
    __asm__ volatile("" : "+r"(keeps));
#pragma unroll
    for (int e = 0; e < SCORES; e++)
        if (!(keeps & BIT(e / 4, e / 2 % 2, e % 2))) weights[e] = -weights[e];
}

#endif

#if SOFTCAP_ALONE

/* Replaces scores of a tile by weights times the softcap's slope, for dS, and packs weights, for dV. masked: some pairs may be hidden. */
FA_DEVICE void weigh_with_softcap(const fa_attention_params *p, dv_state *c, const block_work *w,
                                  uint32_t rows, int tile, bool masked)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32;
    const int key = FIRST_KEY + warp * 16 + lane / 4, query = tile * QUERIES + lane % 4 * 2;
    const float cap = p->softcap * FA_LOG2E;
    float row[4];
    cap_tile(c->scores, c->scale);
#pragma unroll
    for (int n = 0; n < SCORES / 2; n++) {
        const int j = n / 2, own = key + n % 2 * 8;
        float kept[2];
        if (n % 4 == 0) load_four_rows(row, rows + 64 * (uint32_t)(n / 4));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float *x = c->scores + 2 * n + i;
            const float y = *x;
            const int from = w->first_query + own - query,
                      to = own < w->num_keys ? w->end_query + own - query : -1;
            kept[i] = ptx_ex2(fmaf(cap, y, -row[j % 2 * 2 + i]));
            if (masked && (8 * j + i < from || 8 * j + i >= to)) kept[i] = 0.0f;
            /* The slope of a hidden score may be NaN. */
            *x = masked && kept[i] == 0.0f ? 0.0f : kept[i] * fmaf(-y, y, 1.0f);
        }
        c->weights[n] = fa_pack_x2(kept[0], kept[1]);
    }
}

#endif

/* Replaces scores of a tile, which are complete, by weights, P = exp(S - lse). */
FA_DEVICE void weigh(const pipeline *pipe, const fa_attention_params *p, dv_state *c,
                     const tile_cursor *at, const tile_range *range)
{
    shared_state *state = pipe->state;
    const uint32_t rows = c->own.rows + (uint32_t)(q_stage(at->count) * ROW_BYTES);
#if BIAS_ALONE
    (void)range;
    weigh_with_bias_alone(p, state, work_of(pipe), &c->options, c->shows, c->bias, c->scores,
                          c->weights, c->scale, rows);
#elif SOFTCAP_ALONE
    if (is_masked(range, at->tile)) weigh_with_softcap(p, c, work_of(pipe), rows, at->tile, true);
    else weigh_with_softcap(p, c, work_of(pipe), rows, at->tile, false);
#elif OPTIONS && !DROPOUT_ALONE
    (void)range;
    find_options(pipe, p, c, at);
    weigh_with_options(p, state, work_of(pipe), &c->options, NULL, c->scores, c->weights, c->scale,
                       rows, true);
    mark_dropped(p, &c->options, c->scores);
#else
    (void)p;
#pragma unroll
    for (int n = 0; n < QUERIES / 16; n++) {
        float lse[4];
        load_four_rows(lse, rows + 64 * (uint32_t)n);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            float *x = c->scores + 8 * n + e;
            *x = ptx_ex2(fmaf(*x, c->scale, -lse[e / 4 * 2 + e % 2]));
        }
    }
    if (is_masked(range, at->tile)) mask_weights(work_of(pipe), c->scores, at->tile);
#if DROPOUT_ALONE
    drop_weights(c);
#endif
#endif
    __syncwarp(); /* all lanes have read the log-sum-exp */
    ptx_mbarrier_arrive_if(&state->q_empty[q_stage(at->count)], c->own.leader);
}

/* Whether the buffer of weights and the tile's dout are ready. One branch for two barriers takes
 * less time than a wait for each of them. */
FA_DEVICE bool is_ready(shared_state *state, int count)
{
    return (int)ptx_mbarrier_is_over(&state->p_empty, (count & 1) ^ 1) &
           (int)ptx_mbarrier_is_over(&state->dout_full[dout_stage(count)], dout_parity(count));
}

/* Stores weights for the dK warpgroup, whose threads have the same elements. */
FA_DEVICE void share_weights(const pipeline *pipe, const dv_state *c)
{
    shared_state *state = pipe->state;
    const uint32_t to = c->own.weights;
#pragma unroll
    for (int j = 0; j < QUERIES / 8; j++) {
        const float *x = c->scores + 4 * j;
        ptx_st_shared_v4(to + (uint32_t)(16 * WARPGROUP * j),
                         make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]),
                                    __float_as_uint(x[2]), __float_as_uint(x[3])));
    }
    ptx_mbarrier_arrive(&state->p_full);
}

FA_DEVICE void pack_weights(dv_state *c)
{
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++)
        c->weights[i] = fa_pack_x2(c->scores[2 * i], c->scores[2 * i + 1]);
}

FA_DEVICE void issue_tile_scores(dv_state *c, int stage)
{
    if (PINS) issue_pinned_scores(c->scores, &c->keys, NULL, q_tile(c->base, stage));
    else issue_scores(c->scores, c->base, q_tile(c->base, stage), HEAD_DIM);
}

/* Adds a tile whose weights have been computed, and computes the weights of the next one. The
 * tile's dout is released before the wait for the next tile's scores, because with few stages loads
 * tend to come late. After the last tile, if it is not apart, these scores are a product that is not
 * used. more: there is a next tile. */
FA_DEVICE void add_dv(const pipeline *pipe, const fa_attention_params *p, dv_state *c,
                      tile_cursor *at, const tile_range *range, bool more)
{
    shared_state *state = pipe->state;
    const int count = at->count, stage = dout_stage(count);
    const int next = more ? count + 1 : count; /* the tile that is waited for */
    const bool ready = is_ready(state, count);

    if (!OPTIONS) pack_weights(c);
    if (!ready) ptx_mbarrier_wait(&state->p_empty, (count & 1) ^ 1);
    share_weights(pipe, c);
    advance(at, range->from, range->to);
    if (!ready) ptx_mbarrier_wait(&state->dout_full[stage], dout_parity(count));
    ptx_register_fence(c->dv, DV_SUMS);
    ptx_wgmma_fence();
    issue_gradient(c->dv, c->weights, dout_tile(c->base, stage) + ACROSS(Q_BLOCK), VALUE_DIM);
    if (more || !LAST_APART) {
        ptx_mbarrier_wait(&state->q_full[q_stage(next)], q_parity(next));
        ptx_register_fence(c->scores, SCORES);
        ptx_wgmma_fence();
        issue_tile_scores(c, q_stage(count + 1));
#if OPTIONS_EARLY
        if (more) find_options(pipe, p, c, at);
#endif
        ptx_wgmma_wait(1);
    } else ptx_wgmma_wait(0);
    ptx_register_fence(c->dv, DV_SUMS);
    keep_operands(c->weights);
    ptx_mbarrier_arrive_if(&state->dout_empty[stage], c->own.leader);
    if (LAST_APART && !more) return;
#if BIAS_ALONE
    if (more) transpose_bias(pipe, c);
#endif
    ptx_wgmma_wait(0);
    ptx_register_fence(c->scores, SCORES);
    if (more) weigh(pipe, p, c, at, range);
}

/* Stores dV, of which all tiles have been added. The dK warpgroup has read the last weights. */
FA_DEVICE void put_dv(const pipeline *pipe, const fa_backward_params *p, const dv_state *c,
                      const tile_range *range)
{
    const block_work *w = work_of(pipe);
    if (w->key_sums) {
        leave_sums(w->key_sums + KEYS * HEAD_DIM, c->dv, VALUE_DIM, THIS_BLOCK);
        return;
    }
#if PERSISTENT
    /* Through the buffer of weights, which is half as large: stages may have the next work tile's queries. */
    enum { COLUMNS = WEIGHT_BYTES / BLOCK_KEYS / 2 };
    (void)range;
    const fa_kernel_view rest = columns_of(&p->dv, COLUMNS);
    char *buffer = warp_buffer(pipe, P_AT, COLUMNS);
    store_gradients(&w->keys, &p->dv, buffer, c->dv, COLUMNS, p->a.d_v, value_scale(&p->a),
                    THIS_BLOCK);
    store_gradients(&w->keys, &rest, buffer, c->dv + COLUMNS / 2, VALUE_DIM - COLUMNS,
                    p->a.d_v - COLUMNS, value_scale(&p->a), THIS_BLOCK);
    /* A warp that is ahead stores weights of the next work tile there. */
    ptx_named_barrier_sync(NAMED_BARRIER_DV, WARPGROUP);
#else
    /* Through a stage of queries other than the last tile's: the dK warpgroup has read that stage when it
     * has the last weights. The stage of the last dout is still being read, by the product that is not
     * used. */
    const int last = range->tiles > 0 ? range->tiles - 1 : 0;
    store_gradients(&w->keys, &p->dv,
                    warp_buffer(pipe, Q_AT + q_stage(last + 1) * Q_BYTES, VALUE_DIM), c->dv,
                    VALUE_DIM, p->a.d_v, value_scale(&p->a), THIS_BLOCK);
#endif
}

FA_DEVICE void compute_dv(const pipeline *pipe, const fa_backward_params *p)
{
    shared_state *state = pipe->state;
    pipeline own = *pipe;
    dv_state c;
    c.own = find_places(pipe);
    c.scale = inner_scale(&p->a);
#pragma unroll 1
    for (int n = 0; acquire_work_tile(&own, n); n++) {
        const block_work *w = work_of(&own);
        if (PERSISTENT) ptx_wgmma_fence(); /* lanes meet */
        const tile_range range = find_tiles(w);
        c.base = first_descriptor(&own);
        if (PINS) c.keys = pin_rows(c.base);
#pragma unroll
        for (int i = 0; i < DV_SUMS; i++) c.dv[i] = 0;
        if (range.tiles > 0) {
            tile_cursor at = begin(w);
            begin_keys(&own, &p->a);
            ptx_mbarrier_wait(&state->q_full[q_stage(at.count)], q_parity(at.count));
            ptx_wgmma_fence();
            issue_tile_scores(&c, q_stage(at.count));
#if OPTIONS_EARLY
            find_options(&own, &p->a, &c, &at);
#endif
#if BIAS_ALONE
            transpose_bias(&own, &c);
#endif
            ptx_wgmma_wait(0);
            ptx_register_fence(c.scores, SCORES);
            weigh(&own, &p->a, &c, &at, &range);
            while (at.count + LAST_APART < range.end)
                add_dv(&own, &p->a, &c, &at, &range, LAST_APART || at.count + 1 < range.end);
            if (LAST_APART) add_dv(&own, &p->a, &c, &at, &range, false);
            ptx_mbarrier_wait(&state->p_empty, (range.end - 1) & 1);
        }
        put_dv(&own, p, &c, &range);
        release_work_tile(&own, n, c.own.leader);
    }
}

#endif
