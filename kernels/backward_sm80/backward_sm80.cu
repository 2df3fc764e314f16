/*
 * Backward on tensor cores by mma.sync, from Ampere on, float16 and bfloat16: all gradients in one pass over the tiles
 * (FlashAttention-2, algorithm 2, arXiv:2307.08691), with masks by position, lengths, and shared heads; the variants with
 * OPTIONS also with all options of the scores.
 *
 *   config.cuh    the numbers of the variant          multiply.cuh   the five products
 *   layout.cuh    who has what, shared memory         weights.cuh    weights, dS, masks by position
 *   work.cuh      the block's keys and tiles          options.cuh    the options of the scores
 *   load.cuh      copies to shared memory             sums.cuh       the sums of dQ
 *                                                     store.cuh      dK and dV
 *
 * All warps have the same role. A block owns KEYS keys of one key/value head and goes through the tiles of queries that see
 * some of them, of all heads that share the keys: so dK and dV are sums in registers, written once. dQ is added to a float sum in
 * global memory, which another kernel rounds (finish.cu). docs/kernels/backward_sm80.md says why it is made so.
 *
 * A tile has one barrier of the block. Behind it the copies of this tile are there, and what all warps have stored of the tile
 * before: its dS, so that its dQ is computed now, by half of the warps before this tile's scores and by the others behind
 * them: so one half makes weights while the other multiplies.
 */
#include "backward_sm80/config.cuh"
#include "backward_sm80/layout.cuh"
#include "backward_sm80/load.cuh"
#include "backward_sm80/multiply.cuh"
#include "backward_sm80/options.cuh"
#include "backward_sm80/store.cuh"
#include "backward_sm80/sums.cuh"
#include "backward_sm80/weights.cuh"
#include "backward_sm80/work.cuh"
#include "ptx/semaphore.cuh"

/* What a thread computes. */
typedef struct thread_state {
    fa_layout layout;
    fa_gradient dk, dv;
    float scale; /* from scores to exponents of 2; with a softcap to what tanh takes */
    /* Tiles whose queries see all of the warp's keys: they need no mask. */
    int unmasked_from, unmasked_to;
} thread_state;

/* ---- Weights --------------------------------------------------------------------------------- */

FA_DEVICE void find_unmasked_tiles(const block_work *w, thread_state *x)
{
    const int first = x->layout.group * GROUP_ROWS, last = first + GROUP_ROWS - 1;
    const int from = w->first_query + last, to = w->end_query + first;
    x->unmasked_from = from <= 0 ? 0 : (from + QUERIES - 1) / QUERIES;
    x->unmasked_to = last < w->num_keys && to > 0 ? to / QUERIES : 0;
}

/* Scores and dP of the warp's keys and of a chunk of its queries become weights and dS. */
FA_DEVICE void weigh_chunk(const fa_attention_params *p, const block_work *w, const thread_state *x,
                           const tile_cursor *at, int chunk, fa_scores *s, fa_scores *dp,
                           fa_weights *weights, fa_weights *ds)
{
    const fa_layout *l = &x->layout;
    const int lane = threadIdx.x % 32, stage = STAGES == 2 ? at->count & 1 : 0;
    const int first = l->share * OWN_QUERIES + chunk * CHUNK + lane % 4 * 2;
    const int query = at->tile * QUERIES + first, key = l->group * GROUP_ROWS + lane / 4;
    const uint32_t rows = rows_at(l, stage) + (uint32_t)first * 8;
#if OPTIONS
    const tile_options o = find_tile_options(p, w, at->head, query, key);
    const bool masked = true;
    weigh_with_options(p, w, &o, s, weights, x->scale, rows);
    drop_gradients(p, &o, dp);
#else
    const bool masked = at->tile < x->unmasked_from || at->tile >= x->unmasked_to;
    (void)p;
    weigh(s, x->scale, rows);
    if (masked) mask_weights(w, s, query, key);
    pack(weights, s);
#endif
    make_ds(s, dp, rows, masked);
    pack(ds, dp);
}

/* ---- dQ -------------------------------------------------------------------------------------- */

/* The dQ of a tile whose dS is complete. Where sums have one order, a warp adds its part behind the same warp of all blocks of key
 * tiles in front. It waits only for blocks of lower numbers, which start no later and do not wait for it. */
FA_DEVICE void add_dq(const fa_backward_params *p, const fa_backward_sm80_params *s,
                      const block_work *w, const fa_layout *l, const tile_cursor *at)
{
    const int block = l->warp % DQ_ROW_WARPS * DQ_M_TILES;
    const int column = l->warp / DQ_ROW_WARPS * DQ_N_TILES;
    const int64_t number = tile_number(w, s, at);
    const int part = at->tile % PARTS;
    int32_t *semaphore =
        s->semaphores + number * FA_BACKWARD_SM80_SEMAPHORES + part * WARPS + l->warp;
    float *tile = s->sums + number * (FA_BACKWARD_SM80_SUM_BYTES(HEAD_DIM) / 4);
    fa_dq dq;
    if (!p->dq.data) return;
    make_dq(&dq, ds_at(l, at->count) + l->score_b, l->memory + K_AT + l->a, block, column);
    if (s->semaphores) {
        if (threadIdx.x % 32 == 0) ptx_semaphore_wait(semaphore, tiles_before(w, at->tile));
        __syncwarp();
    }
#pragma unroll
    for (int n = 0; n < DQ_N_TILES; n++)
#pragma unroll
        for (int m = 0; m < DQ_M_TILES; m++)
            add_to_sums(fragment_sums(tile, part * (QUERIES / 16) + block + m, column + n),
                        dq.at[m][n]);
    if (s->semaphores) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx_semaphore_add(semaphore);
    }
}

/* ---- A tile ---------------------------------------------------------------------------------- */

FA_DEVICE void consume_tile(const fa_backward_params *p, const block_work *w, thread_state *x,
                            const tile_cursor *at)
{
    const fa_layout *l = &x->layout;
    const int lane = threadIdx.x % 32, stage = STAGES == 2 ? at->count & 1 : 0;
    const uint32_t own_keys = l->memory + (uint32_t)(l->group * GROUP_ROWS * PITCH) + l->a;
    const uint32_t own_scores = (uint32_t)(l->group * GROUP_ROWS * SCORE_PITCH);
    const uint32_t word = lane_offset(lane / 4, 0, SCORE_PITCH) + (uint32_t)(lane % 4 * 4);
    const uint32_t ds = ds_at(l, at->count) + own_scores;
    const uint32_t weights = l->memory + WEIGHTS_AT + own_scores;
    const uint32_t q = q_at(l, stage), dout = dout_at(l, stage);
    const int column_unit = l->share * D_TILES;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        const int query = l->share * OWN_QUERIES + chunk * CHUNK;
        const uint32_t queries = (uint32_t)(query * PITCH);
        fa_scores s, dp;
        fa_weights own_weights, own_ds;
        make_scores(&s, own_keys + K_AT, q + queries + l->q);
        make_scores(&dp, own_keys + V_AT, dout + queries + l->q);
        weigh_chunk(&p->a, w, x, at, chunk, &s, &dp, &own_weights, &own_ds);
        if (SPLIT > 1) share_weights(&own_weights, weights + word, query / 8);
        share_weights(&own_ds, ds + word, query / 8);
        add_own_gradient(&x->dv, &own_weights, dout + queries + l->a, column_unit);
        add_own_gradient(&x->dk, &own_ds, q + queries + l->a, column_unit);
    }
    if (SPLIT > 1) {
        sync_group(l);
        add_other_gradient(&x->dv, weights + l->score_a, dout + l->a, column_unit, l->share);
        add_other_gradient(&x->dk, ds + l->score_a, q + l->a, column_unit, l->share);
    }
}

/* Waits until this tile's copies are there and all warps are done with the tile before. */
FA_DEVICE void begin_tile(const fa_backward_params *p, const fa_backward_sm80_params *s,
                          const fa_layout *l, const block_work *w, const tile_cursor *at)
{
    if (STAGES == 1 && at->count > 0) {
        __syncthreads();
        issue_tile(p, s, l, w, at);
    }
    ptx_cp_async_wait_all();
    __syncthreads();
    if (STAGES == 2 && at->count + 1 < w->tiles) {
        tile_cursor next = *at;
        advance(&next, w);
        issue_tile(p, s, l, w, &next);
    }
}

FA_DEVICE void consume_tiles(const fa_backward_params *p, const fa_backward_sm80_params *s,
                             block_work *w, thread_state *x)
{
    const fa_layout *l = &x->layout;
    const bool early = SPLIT > 1 && l->warp < WARPS / 2;
    const int tiles = w->tiles;
    tile_cursor at = first_tile(w), before = at;
    issue_keys(&p->a, l, w);
    issue_tile(p, s, l, w, &at);
#if OPTIONS
    if (p->a.mask.data || p->a.bias.data) {
        ptx_cp_async_wait_all();
        __syncthreads();
        clear_bad_keys(l, w);
    }
#endif
    while (at.count < tiles) {
        begin_tile(p, s, l, w, &at);
        if (early && at.count > 0) add_dq(p, s, w, l, &before);
        consume_tile(p, w, x, &at);
        if (!early && at.count > 0) add_dq(p, s, w, l, &before);
        before = at;
        advance(&at, w);
    }
    __syncthreads();
    add_dq(p, s, w, l, &before);
}

FA_KERNEL __launch_bounds__(THREADS, BLOCKS)
    backward_sm80(const __grid_constant__ fa_backward_params p,
                  const __grid_constant__ fa_backward_sm80_params s)
{
    FA_DYNAMIC_SHARED(memory);
    __shared__ block_work work;
    thread_state x;
    x.layout = find_layout(memory);
    if (threadIdx.x == 0) describe_work(&p.a, &s, blockIdx.x, &work);
    __syncthreads();
    x.scale = inner_scale(&p.a);
    find_unmasked_tiles(&work, &x);
    clear_gradient(&x.dk);
    clear_gradient(&x.dv);
    if (work.tiles > 0) consume_tiles(&p, &s, &work, &x);
    store_gradient(&work.keys, &p.dk, &x.dk, &x.layout, p.a.d, p.a.scale);
    store_gradient(&work.keys, &p.dv, &x.dv, &x.layout, p.a.d_v, value_scale(&p.a));
}
