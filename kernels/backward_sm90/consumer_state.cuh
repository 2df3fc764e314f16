/*
 * What a consumer keeps, and functions that both of its forms use: consumer.cuh, and parts.cuh for
 * head dims 192 and 128.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_CONSUMER_STATE_CUH
#define FA_KERNELS_BACKWARD_SM90_CONSUMER_STATE_CUH

#include "backward_sm90/config.cuh"
#include "backward_sm90/dropout.cuh"
#include "backward_sm90/keys.cuh"
#include "backward_sm90/multiply.cuh"
#include "backward_sm90/options.cuh"
#include "backward_sm90/pipeline.cuh"
#include "backward_sm90/rounding.cuh"
#include "backward_sm90/rows.cuh"
#include "backward_sm90/store.cuh"
#include "backward_sm90/work.cuh"
#include "common/device.cuh"
#include "common/softmax.cuh"
#include "common/x2.cuh"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/shared.cuh"
#include "ptx/store.cuh"
#include "ptx/thread.cuh"
#include "ptx/tma.cuh"

typedef struct consumer_state {
    float dk[DK_SUMS], dv[DV_SUMS];
#if DQ_PARTS > 1
    float scores[SCORES]; /* also dP, and sums of dQ */
    uint32_t weights[SCORES / 2];
#else
    float scores[SCORES], dp[SCORES];             /* dp: also sums of dQ */
    uint32_t weights[SCORES / 2], ds[SCORES / 2]; /* of the tile whose products come next */
#endif
#if KEYS_IN_REGISTERS
    uint32_t k[HEAD_DIM / 4], v[HEAD_DIM / 4];
#endif
#if DQ_TRANSPOSED
    uint32_t all_keys[KEYS / 4]; /* transposed: for dQ */
#endif
    uint32_t base;   /* descriptor of the block's keys */
    uint32_t ds_row; /* where the lane stores dS */
#if DQ_PARTS > 1 || WHOLE_DQ
    uint32_t dq; /* where the thread stores its part of dQ */
#else
    float4 *dq;                                   /* the same */
#endif
    float scale; /* from scores to exponents of 2; with a softcap, to the argument of tanh */
    int number;  /* of the consumer */
    int leader;  /* whether this lane arrives for its warp */
#if PERSISTENT
    int first; /* count of the work tile's first query tile */
#endif
} consumer_state;

/* How many tiles of the work tile are before this one. */
FA_DEVICE int tile_number(const consumer_state *c, int count)
{
#if PERSISTENT
    return count - c->first;
#else
    (void)c;
    return count;
#endif
}

/* Descriptors of operands. ACROSS: for operands that are read across their rows. */
#define ACROSS(block) ((uint32_t)((block) / UNIT) << 16)

FA_DEVICE uint32_t own_keys(const consumer_state *c)
{
    return c->base + (uint32_t)c->number * (OWN_KEYS * 128 / UNIT);
}

/* The columns of all keys for which the consumer computes dQ. */
FA_DEVICE uint32_t key_columns(const consumer_state *c)
{
    const int column = c->number * (HEAD_DIM == 64 ? DQ_COLUMNS * 2 / UNIT : KEY_BLOCK / UNIT);
    return c->base + ACROSS(KEY_BLOCK) + (uint32_t)column;
}

FA_DEVICE uint32_t ds_tile(const consumer_state *c, int count)
{
    return c->base + (uint32_t)(DS_AT + ds_buffer(count) * DS_BYTES) / UNIT;
}

/* ---- Masks by position ----------------------------------------------------------------------- */

/* Clears the weights of queries that do not see the thread's keys. Element 4j + 2r + i is query
 * 8j + 2 (lane % 4) + i and key r of the thread. */
FA_DEVICE void mask_weights(const block_work *w, float *weights, int consumer, int tile)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32;
    const int first = tile * QUERIES + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int key = consumer * OWN_KEYS + warp * 16 + lane / 4 + 8 * r;
        const int from = w->first_query + key - first;
        const int to = key < w->num_keys ? w->end_query + key - first : -1;
#pragma unroll
        for (int j = 0; j < QUERIES / 8; j++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (8 * j + i < from || 8 * j + i >= to) weights[4 * j + 2 * r + i] = 0;
    }
}

/* ---- Weights and dS -------------------------------------------------------------------------- */

#if DQ_PARTS == 1

/* Replaces scores by weights, P = exp(S - lse). */
FA_DEVICE void weigh(float *scores, float scale, const float *lse)
{
#pragma unroll
    for (int e = 0; e < SCORES; e++)
        scores[e] = ptx_ex2(fmaf(scores[e], scale, -lse[e / 4 * 2 + e % 2]));
}

FA_DEVICE void pack_weights(uint32_t *x2, const float *weights)
{
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) x2[i] = fa_pack_x2(weights[2 * i], weights[2 * i + 1]);
}

/* Replaces weights by dS = P (dP - delta), and also packs them. DP_FROM_DELTA: dp is dP - delta.
 * masked: if a weight is 0, its dS is 0 whatever dP is. */
FA_DEVICE void weigh_gradients(float *weights, const float *dp, uint32_t *ds, const float *delta,
                               bool masked)
{
#pragma unroll
    for (int n = 0; n < SCORES / 2; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int e = 2 * n + i;
            const float x =
                weights[e] *
                (DP_FROM_DELTA ? dp[e] * WEIGHT_UNIT : subtract_delta(dp[e], delta[e / 4 * 2 + i]));
            weights[e] = masked && weights[e] == 0.0f ? 0.0f : x;
        }
        ds[n] = fa_pack_x2(weights[2 * n], weights[2 * n + 1]);
    }
}

#endif

/* Stores the consumer's half of a tile of dS, transposed: a row of its keys for each query. The
 * buffer is free, because the consumer has had its turn again since both consumers last read the
 * buffer. */
FA_DEVICE void store_ds(const consumer_state *c, const uint32_t *ds, int count)
{
#pragma unroll
    for (int j = 0; j < QUERIES / 8; j += 2)
        ptx_stmatrix_x4_trans(c->ds_row + (uint32_t)(ds_buffer(count) * DS_BYTES + j * 8 * 128),
                              ds + 2 * j);
}

#if WHOLE_DQ || ROUNDING

/* Where the lane stores its 16 bytes of a matrix of a whole dQ, in TMA's swizzle. Transposed: query
 * lane % 8 + 8 (lane / 16), columns 8 (lane / 8 % 2) of the warp's. Otherwise: query lane % 16 of
 * the warp's, columns 8 (lane / 16). */
FA_DEVICE uint32_t find_dq_row(const pipeline *pipe, int consumer)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32;
    const int row = DQ_TRANSPOSED ? lane % 8 + lane / 16 * 8 : warp * 16 + lane % 16;
    const int chunk = DQ_TRANSPOSED ? warp * 2 + lane / 8 % 2 : lane / 16;
    return ptx_shared_address(pipe->buffers + DQ_AT + consumer * DQ_PART) +
           (uint32_t)(row * 128 + (chunk ^ row % 8) * 16);
}

/* dQ of the previous tile, rounded, for the store warp. row: where the lane stores it in the first
 * buffer; use: the number of this use of the buffers. */
FA_DEVICE void store_rounded_dq(const consumer_state *c, uint32_t row, int use)
{
    const float ln2 = 0.69314718055994530942f, scale = c->scale * ln2;
    const uint32_t to = row + (uint32_t)dq_buffer(use);
#pragma unroll
    for (int j = 0; j < DQ_COLUMNS / 8; j += 2) {
        const float *dq = c->dp + 4 * j;
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = fa_pack_x2(dq[2 * i] * scale, dq[2 * i + 1] * scale);
#if DQ_TRANSPOSED
        ptx_stmatrix_x4_trans(to + (uint32_t)(j * 8 * 128), x);
#else
        ptx_stmatrix_x4(to ^ (uint32_t)(j * 16), x);
#endif
    }
}

#endif

#if WHOLE_DQ

FA_DEVICE void store_dq_columns(const consumer_state *c, int use)
{
    store_rounded_dq(c, c->dq, use);
}

#elif DQ_PARTS == 1

/* dQ of the previous tile, for the store warp. use: the number of this use of the buffers. */
FA_DEVICE void store_dq_columns(const consumer_state *c, int use)
{
#pragma unroll
    for (int j = 0; j < DQ_COLUMNS / 8; j++) {
        if (8 * j + DQ_COLUMNS >= COLUMNS && c->number == 1) break;
        c->dq[WARPGROUP * j + dq_buffer(use) / (int)sizeof *c->dq] =
            make_float4(c->dp[4 * j], c->dp[4 * j + 1], c->dp[4 * j + 2], c->dp[4 * j + 3]);
    }
}

#endif

/* Tells the store warp that dQ is in the buffer. use: the number of this use. */
FA_DEVICE void share_dq(const pipeline *pipe, const consumer_state *c, int use)
{
    ptx_mbarrier_arrive(dq_full(pipe->state, c->number, use));
}

#if ROUNDING

/* Adds the sum of the other blocks' shares. All warps have read it before one stores rows in its place. */
FA_DEVICE void add_loaded_dq(consumer_state *c, int use)
{
#pragma unroll
    for (int j = 0; j < DQ_COLUMNS / 8; j++) {
        if (8 * j + DQ_COLUMNS >= COLUMNS && c->number == 1) break;
        const float4 x = c->dq[WARPGROUP * j + dq_buffer(use) / (int)sizeof *c->dq];
        c->dp[4 * j] += x.x;
        c->dp[4 * j + 1] += x.y;
        c->dp[4 * j + 2] += x.z;
        c->dp[4 * j + 3] += x.w;
    }
    ptx_named_barrier_sync(NAMED_BARRIER_CHAIN + c->number, WARPGROUP);
}

#endif

/* Waits for the buffer before its use of this number; where it gets a sum first, for that. */
FA_DEVICE void wait_for_dq_buffer(const pipeline *pipe, const consumer_state *c, int number)
{
#if ROUNDING && !GIVES_ROOM
    const block_work *w = work_of(pipe);
    if (gets_sums(w, number)) {
        ptx_mbarrier_wait(&pipe->state->dq_loaded[c->number], loaded_parity(w, number));
        return;
    }
#endif
    const uint32_t turn = (uint32_t)number / DQ_BUFFERS;
    ptx_mbarrier_wait(dq_empty(pipe->state, c->number, number), (int)(turn & 1) ^ !GIVES_ROOM);
}

#if BIAS_TILE

/* dS of a tile in 32 bits, for the store warp: boxes of 32 keys, swizzled. */
FA_DEVICE void share_float_ds(const pipeline *pipe, const consumer_state *c, int count)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32;
    const uint32_t to = ptx_shared_address(pipe->buffers + DQ_AT + c->number * DQ_PART) +
                        (uint32_t)(warp / 2 * (QUERIES * 128) + lane % 4 * 256 + lane / 4 % 4 * 4);
    wait_for_dq_buffer(pipe, c, 2 * count);
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int chunk = (warp % 2 * 4 + 2 * r + lane / 16) ^ (lane % 4 * 2 + i);
#pragma unroll
            for (int j = 0; j < QUERIES / 8; j++)
                ptx_st_shared_f32(to + (uint32_t)(j * 1024 + i * 128 + chunk * 16),
                                  c->scores[4 * j + 2 * r + i]);
        }
    ptx_fence_proxy_async();
    share_dq(pipe, c, 2 * count);
}

#endif

/* ---- A tile ---------------------------------------------------------------------------------- */

/* Descriptors of the queries and of the dout of a stage. */
FA_DEVICE uint32_t q_tile(const consumer_state *c, int stage)
{
    return c->base + (uint32_t)(Q_AT + stage * Q_BYTES) / UNIT;
}

FA_DEVICE uint32_t dout_tile(const consumer_state *c, int stage)
{
    return c->base + (uint32_t)(DOUT_AT + stage * DOUT_BYTES) / UNIT;
}

#if KEYS_IN_REGISTERS
#define WORDS(c, of) (c)->of
#else
#define WORDS(c, of) NULL
#endif

FA_DEVICE void issue_s(consumer_state *c, int stage)
{
    issue_scores(c->scores, WORDS(c, k), own_keys(c), q_tile(c, stage), SUM_DIM, 0);
}

FA_DEVICE void issue_dp(consumer_state *c, float *dp, int stage)
{
    issue_scores(dp, WORDS(c, v), own_keys(c) + V_AT / UNIT, dout_tile(c, stage), VALUE_DIM,
                 DP_FROM_DELTA);
}

/* The consumer's keys or values, in registers, as operands of products. */
FA_DEVICE void load_words(const pipeline *pipe, const consumer_state *c, int at, uint32_t *words)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32;
    const int row = c->number * OWN_KEYS + warp * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++)
        ptx_ldmatrix_x4(words + 4 * step,
                        ptx_shared_address(pipe->buffers + at) +
                            (uint32_t)(row * 128 + ((2 * step + lane / 16) ^ row % 8) * 16));
}

#if DQ_TRANSPOSED

/* The block's keys, transposed. */
FA_DEVICE void load_all_keys(const pipeline *pipe, uint32_t *words)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32;
    const int row = lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++)
        ptx_ldmatrix_x4_trans(words + 4 * step,
                              ptx_shared_address(pipe->buffers) +
                                  (uint32_t)((16 * step + row) * 128 + (chunk ^ row % 8) * 16));
}

#endif

/* Consumers take turns in issuing products, so that one computes weights while the other
 * multiplies. What a consumer stores before its turn is visible to the other consumer in the next
 * turn. */
FA_DEVICE void wait_until_may_issue(const consumer_state *c)
{
#if DQ_TRANSPOSED
    ptx_named_barrier_sync_of(c->number, NAMED_BARRIER_ISSUE + 1, NAMED_BARRIER_ISSUE,
                              2 * WARPGROUP);
#else /* not faster in other variants */
    ptx_named_barrier_sync(NAMED_BARRIER_ISSUE + c->number, 2 * WARPGROUP);
#endif
}

FA_DEVICE void let_other_issue(const consumer_state *c)
{
#if DQ_TRANSPOSED
    ptx_named_barrier_arrive_of(c->number, NAMED_BARRIER_ISSUE, NAMED_BARRIER_ISSUE + 1,
                                2 * WARPGROUP);
#else
    ptx_named_barrier_arrive(NAMED_BARRIER_ISSUE + 1 - c->number, 2 * WARPGROUP);
#endif
}

/* The log-sum-exp of a tile; with options it is loaded later. */
FA_DEVICE void load_lse(const pipeline *pipe, float *lse, int count)
{
    if (!OPTIONS) load_rows(lse, row_address(pipe, slot_of(count)));
}

/* With two buffers of dS: consumer 1 tells consumer 0 that it has read the next buffer. */
FA_DEVICE void free_ds(const consumer_state *c)
{
    if (c->number == 1) ptx_named_barrier_arrive(NAMED_BARRIER_DS, 2 * WARPGROUP);
}

FA_DEVICE void wait_for_ds(const consumer_state *c)
{
    if (c->number == 0) ptx_named_barrier_sync(NAMED_BARRIER_DS, 2 * WARPGROUP);
}

#if BIAS_TILE

/* Elements of a 16-bit bias, in the layout of weights: word 2j + r. */
FA_DEVICE void load_bias(const pipeline *pipe, const fa_kernel_view *bias, const consumer_state *c,
                         const tile_cursor *at, const tile_options *options, uint32_t *x2)
{
    shared_state *state = pipe->state;
    if (has_bias_map(pipe)) {
        ptx_mbarrier_wait(&state->bias_full[c->number], at->count & 1);
#pragma unroll
        for (int j = 0; j < QUERIES / 8; j += 2)
            ptx_ldmatrix_x4_trans(x2 + 2 * j,
                                  c->ds_row + (uint32_t)(BIAS_AT - DS_AT + j * 8 * 128));
        return;
    }
    if (bias->data && bias->dtype != FA_KERNEL_FLOAT32)
        read_bias_x2(bias, work_of(pipe), options, x2);
}

/* Called after the tile's elements have been used. An arrival does not wait for pending loads to
 * registers: when it came right after the loads, with products in progress, TMA overwrote elements
 * that had not been read. */
FA_DEVICE void release_bias(const pipeline *pipe, const consumer_state *c)
{
    if (!has_bias_map(pipe)) return;
    __syncwarp();
    ptx_mbarrier_arrive_if(&pipe->state->bias_empty[c->number], c->leader);
}

#endif

#if DQ_PARTS == 1

/* Computes weights of a tile whose scores and dP have been issued, in this order. lse: the tile's,
 * without options. */
FA_DEVICE void make_weights(const pipeline *pipe, const fa_attention_params *p, consumer_state *c,
                            const tile_cursor *at, const float *lse, tile_options *options,
                            bool masked)
{
#if OPTIONS && !DROPOUT_ALONE
    const uint32_t rows = row_address(pipe, slot_of(at->count));
    const block_work *w = work_of(pipe);
#if BIAS_TILE
    /* These loads overlap with the computation of scores. */
    uint32_t bias[SCORES / 2];
    *options = find_tile_options(p, w, at, c->number, true, find_tile_kept(p, w, at, c->number));
    load_bias(pipe, &p->bias, c, at, options, bias);
#if BIAS_ALONE
    const bool shows = shows_all_pairs(pipe->state, options, bias);
#endif
    ptx_wgmma_wait(1);
    ptx_register_fence(c->scores, SCORES);
#if BIAS_ALONE
    weigh_with_bias_alone(p, pipe->state, w, options, shows, bias, c->scores, c->weights, c->scale,
                          rows);
#else
    weigh_with_options(p, pipe->state, w, options, bias, c->scores, c->weights, c->scale, rows,
                       true);
#endif
    release_bias(pipe, c);
#else
    ptx_wgmma_wait(1);
    ptx_register_fence(c->scores, SCORES);
    const uint32_t keeps = find_tile_kept(p, w, at, c->number);
    *options = find_tile_options(p, w, at, c->number, HIDES || masked, keeps);
    weigh_with_options(p, pipe->state, w, options, NULL, c->scores, c->weights, c->scale, rows,
                       HIDES || masked);
#endif
    (void)lse;
#elif DROPOUT_ALONE
    float loaded[QUERIES / 4];
    options->keeps = ptx_keep(find_shared_kept(p, pipe->state->kept[c->number],
                                               NAMED_BARRIER_KEPT + CONSUMERS * c->number,
                                               work_of(pipe), at, c->number));
    ptx_wgmma_wait(1);
    ptx_register_fence(c->scores, SCORES);
    load_rows(loaded, row_address(pipe, slot_of(at->count)));
    weigh(c->scores, c->scale, loaded);
    if (masked) mask_weights(work_of(pipe), c->scores, c->number, at->tile);
    pack_kept(c->weights, c->scores, options->keeps);
    ptx_register_fence(c->scores, SCORES);
    (void)lse;
#else
    (void)p, (void)options;
    ptx_wgmma_wait(1);
    ptx_register_fence(c->scores, SCORES);
    weigh(c->scores, c->scale, lse);
    if (masked) mask_weights(work_of(pipe), c->scores, c->number, at->tile);
    pack_weights(c->weights, c->scores);
    ptx_register_fence(c->scores, SCORES); /* weights are computed before the wait for dP */
#endif
}

/* Computes dS after the weights. */
FA_DEVICE void make_ds(const pipeline *pipe, const fa_backward_params *p, consumer_state *c,
                       const tile_cursor *at, const tile_options *options, bool masked)
{
    float delta[QUERIES / 4];
    const uint32_t rows = row_address(pipe, slot_of(at->count)) + DELTA_AT;
#if OPTIONS
    ptx_wgmma_wait(0);
    ptx_register_fence(c->dp, SCORES);
    if (!DROPOUT_ALONE) drop_gradients(&p->a, options, c->dp);
    load_rows(delta, rows);
#else
    (void)p, (void)options;
    if (!DP_FROM_DELTA) load_rows(delta, rows);
    ptx_wgmma_wait(0);
    ptx_register_fence(c->dp, SCORES);
#endif
#if DROPOUT_ALONE
    weigh_kept_gradients(c->scores, c->dp, c->ds, delta, p->a.dropout_scale * WEIGHT_UNIT,
                         options->keeps, masked);
#else
    if (BIAS_ALONE && !options->hides) weigh_gradients(c->scores, c->dp, c->ds, delta, false);
    else weigh_gradients(c->scores, c->dp, c->ds, delta, masked);
#endif
    if (DQ_FIRST && tile_number(c, at->count) >= DS_BUFFERS) wait_for_ds(c);
    store_ds(c, c->ds, at->count);
#if HIDES
#if BIAS_TILE
    if (shares_dbias(pipe)) share_float_ds(pipe, c, at->count);
    if (BIAS_ALONE || pipe->dbias_mapped) return;
#endif
    if (p->dbias_by_others) put_dbias(p, work_of(pipe), options, c->scores);
#endif
}

/* What the sums of dP of a tile begin with. */
FA_DEVICE void prepare_dp(const pipeline *pipe, consumer_state *c, int count)
{
    if (DP_FROM_DELTA) begin_dp(c->dp, row_address(pipe, slot_of(count)));
    else ptx_register_forget(c->dp, SCORES);
}

#if KEYS_EARLY

/* Passes the buffers of keys and values to the load warp. The operands of products that are complete
 * have been read. An arrival does not wait for pending loads of the others, so it depends on each
 * of them: d_v is not negative, which the compiler does not know. */
FA_DEVICE void release_keys(const pipeline *pipe, const fa_attention_params *p,
                            const consumer_state *c)
{
    uint32_t loaded = 0;
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) loaded |= c->all_keys[4 * step];
    const int leader = p->d_v < 0 ? (int)loaded : c->leader;
    ptx_mbarrier_arrive_if(&pipe->state->v_empty, leader);
    ptx_mbarrier_arrive_if(&pipe->state->k_empty, leader);
}

/* Consumer 1 gives consumer 0 its first turn of the work tile. Consumer 0 has had its last turn of
 * the previous work tile when it begins this one: two arrivals at a barrier must not meet. */
FA_DEVICE void give_first_turn(const consumer_state *c)
{
    if (c->number == 0) {
        ptx_named_barrier_arrive(NAMED_BARRIER_BEGIN, 2 * WARPGROUP);
        return;
    }
    ptx_named_barrier_sync(NAMED_BARRIER_BEGIN, 2 * WARPGROUP);
    let_other_issue(c);
}

#endif

/* The first tile. */
FA_DEVICE void begin_tiles(const pipeline *pipe, const fa_backward_params *p, consumer_state *c,
                           const tile_cursor *at)
{
    shared_state *state = pipe->state;
    const int stage = stage_of(at->count), parity = parity_of(at->count);
    tile_options options;
    float lse[QUERIES / 4];
    if (!PERSISTENT && c->number == 1) let_other_issue(c); /* consumer 0 may begin */
    begin_keys(pipe, &p->a);
    /* Not earlier: these keys are loaded after consumer 0's last turn of the previous work tile. */
    if (PERSISTENT && !KEYS_EARLY && c->number == 1) let_other_issue(c);
#if KEYS_IN_REGISTERS
    load_words(pipe, c, 0, c->k);
#endif
    ptx_mbarrier_wait(&state->q_full[stage], parity);
    ptx_register_forget(c->scores, SCORES);
    ptx_wgmma_fence();
    issue_s(c, stage);
#if DQ_TRANSPOSED
    load_all_keys(pipe, c->all_keys);
#endif
    wait_for_v(pipe);
#if KEYS_IN_REGISTERS
    load_words(pipe, c, V_AT, c->v);
#endif
    ptx_mbarrier_wait(&state->dout_full[stage], parity);
#if CHAINED
    ptx_mbarrier_wait(&state->rows_full, 0);
#endif
    prepare_dp(pipe, c, at->count);
    ptx_register_fence(c->dp, SCORES);
    ptx_wgmma_fence();
    issue_dp(c, c->dp, stage);
#if KEYS_EARLY
    give_first_turn(c);
#endif
    load_lse(pipe, lse, at->count);
    if (!OPTIONS && sees_all(work_of(pipe), c->number, at->tile)) {
        make_weights(pipe, &p->a, c, at, lse, &options, false);
        make_ds(pipe, p, c, at, &options, false);
    } else {
        make_weights(pipe, &p->a, c, at, lse, &options, true);
        make_ds(pipe, p, c, at, &options, true);
    }
#if KEYS_EARLY
    release_keys(pipe, &p->a, c);
#endif
}

/* Issues dQ of a tile. ds: the descriptor of its dS. */
FA_DEVICE void issue_tile_dq(consumer_state *c, uint32_t ds)
{
#if DQ_TRANSPOSED
    const uint32_t queries = (uint32_t)c->number * (QUERIES / CONSUMERS * 128 / UNIT);
    issue_transposed_dq(c->dp, c->all_keys, ds + queries);
#else
    issue_dq(c->dp, ds, key_columns(c));
#endif
}

/* The descriptor of dS of the tile before tile `count`. With the first tile the dQ of it is not
 * used: of keys, where the other consumer may have stored dS since its last fence. */
FA_DEVICE uint32_t ds_before(const consumer_state *c, int count)
{
    if (DQ_FIRST) return tile_number(c, count) > 0 ? ds_tile(c, count - 1) : c->base;
    return ds_tile(c, count > 0 ? count - 1 : DS_BUFFERS - 1);
}

/* Issues the products of tile `count`, whose weights and dS are available. dQ is that of the
 * previous tile, because the other consumer has stored its half of dS in its last turn. */
FA_DEVICE void issue_gradients(consumer_state *c, int count)
{
    const int stage = stage_of(count);
    ptx_register_fence(c->dv, DV_SUMS);
    ptx_register_fence(c->dk, DK_SUMS);
    ptx_register_forget(c->dp, DQ_SUMS);
    ptx_wgmma_fence();
    if (DQ_FIRST) issue_tile_dq(c, ds_before(c, count));
    if (DQ_FIRST) issue_dk(c->dk, c->ds, q_tile(c, stage) + ACROSS(Q_BLOCK));
    issue_dv(c->dv, c->weights, dout_tile(c, stage) + ACROSS(Q_BLOCK));
    if (!DQ_FIRST) issue_dk(c->dk, c->ds, q_tile(c, stage) + ACROSS(Q_BLOCK));
    if (!DQ_FIRST) issue_tile_dq(c, ds_before(c, count));
}

#endif

/* Whether this lane arrives for its warp. */
FA_DEVICE int is_leader(const consumer_state *c) { return c->leader; }

/* Called when dK is complete: releases the queries that it has read. The second function does the
 * same for dV. */
FA_DEVICE void release_q(const pipeline *pipe, consumer_state *c, int count)
{
    ptx_register_fence(c->dk, DK_SUMS);
#if DQ_PARTS == 1
    keep_operands(c->ds);
#endif
    ptx_mbarrier_arrive_if(&pipe->state->q_empty[stage_of(count)], is_leader(c));
}

FA_DEVICE void release_dout(const pipeline *pipe, consumer_state *c, int count)
{
    ptx_register_fence(c->dv, DV_SUMS);
    keep_operands(c->weights);
    ptx_mbarrier_arrive_if(&pipe->state->dout_empty[stage_of(count)], is_leader(c));
}

/* Stores gradients of keys and values through the stage after the last tile's. Both consumers have
 * read that stage. */
FA_DEVICE void store_sums(const pipeline *pipe, const fa_backward_params *p,
                          const consumer_state *c, int end, bool of_keys, bool of_values)
{
    const block_work *w = work_of(pipe);
    const int warp = threadIdx.x % WARPGROUP / 32;
#if DQ_PARTS > 1
    /* A stage of dout is too small for both consumers. So consumer 1, whose last turn came after
     * consumer 0's, uses the stage of the last tile's queries. */
    char *buffer = pipe->buffers + Q_AT + stage_of(end - c->number) * Q_BYTES +
                   warp * (WARP_ROWS * HEAD_DIM * 2);
#else
    char *buffer = pipe->buffers + (c->number == 0 ? Q_AT : DOUT_AT) + stage_of(end) * Q_BYTES +
                   warp * (WARP_ROWS * HEAD_DIM * 2);
#endif
    if (!CHAINED && w->key_sums) {
        if (of_keys) leave_sums(w->key_sums, c->dk, SUM_DIM, c->number);
        if (of_values) leave_sums(w->key_sums + KEYS * SUM_DIM, c->dv, VALUE_DIM, c->number);
        return;
    }
    if (of_keys)
        store_gradients(&w->keys, &p->dk, buffer, c->dk, SUM_DIM, p->a.d, p->a.scale, c->number);
    if (of_values)
        store_gradients(&w->keys, &p->dv, buffer, c->dv, VALUE_DIM, p->a.d_v, value_scale(&p->a),
                        c->number);
}

#endif
