/*
 * The consumer of scores: S = Q K^T, logits, weights by a running max. For each key tile n it
 *
 *     issues S of tile n, announces weights n - 1, weighs, stores weights n
 *
 * It announces weights to the consumers of values when the products of S have nearly ended. So
 * scores come first, and the values' products take the tensor cores while this warpgroup weighs.
 * Where memory is the limit and the keys of tile n are not there yet, it announces them at once.
 */
#ifndef FA_KERNELS_DECODE_LATENT_SM90_SCORES_CUH
#define FA_KERNELS_DECODE_LATENT_SM90_SCORES_CUH

#include "decode_latent_sm90/config.cuh"

#include "common/reduce.cuh"
#include "common/x2.cuh"
#include "decode_latent_sm90/pipeline.cuh"
#include "decode_latent_sm90/queries.cuh"
#include "decode_sm80/logits.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "ptx/store.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

/* ---- Products -------------------------------------------------------------------------------- */

/* Issues the products of a block of columns of the keys. */
FA_DEVICE void issue_block(const pipeline *pipe, const own_queries *q, int block, const char *keys,
                           int accumulate, float *s)
{
    const uint32_t k = ptx_descriptor_low(keys, 0);
    uint32_t shared = ptx_descriptor_low(pipe->q, 0);
    __asm__ volatile("" : "+r"(shared)); /* or each step's descriptor would be kept in a register */
#pragma unroll
    for (int step = 0; step < 4; step++) {
        const uint64_t b = ptx_descriptor(k + (uint32_t)(step * 32 / 16));
        if (block < OWN_BLOCKS)
            PTX_WGMMA(registers_qk, KEYS)(s, q->at[block * 4 + step], b, accumulate || step > 0);
        else PTX_WGMMA(qk, KEYS)
        (s,
         ptx_descriptor(shared + (uint32_t)(((block - OWN_BLOCKS) * BLOCK_BYTES + step * 32) / 16)),
         b, accumulate || step > 0);
    }
}

FA_DEVICE void wait_for_pair(const pipeline *pipe, int n, int place)
{
    const uint32_t count = pair_count(n, place);
    ptx_mbarrier_wait(&pipe->state->pair_full[stage_of(count)], parity_of(count));
}

/* Issues S of tile n, in V_PAIRS groups: the first one has the columns behind the values, too. A
 * pair is waited for before the products of the last one are issued, so that they hide the wait. */
FA_DEVICE void issue_scores(const pipeline *pipe, const own_queries *q, int n, float *s)
{
    ptx_register_fence(s, KEYS / 2);
    ptx_mbarrier_wait(&pipe->state->tail_full[tail_stage(n)], tail_parity(n));
    wait_for_pair(pipe, n, 0);
    ptx_wgmma_fence();
    issue_block(pipe, q, V_BLOCKS, tail_at(pipe, n), 0, s);
#pragma unroll
    for (int place = 0; place < V_PAIRS; place++) {
        const char *keys = pair_at(pipe, pair_count(n, place));
        if (place < V_PAIRS - 1) wait_for_pair(pipe, n, place + 1);
        ptx_wgmma_fence();
        issue_block(pipe, q, first_block_of(place), keys, 1, s);
        issue_block(pipe, q, first_block_of(place) + 1, keys + BLOCK_BYTES, 1, s);
        ptx_wgmma_commit();
    }
}

/* ---- Rows that nobody sees ------------------------------------------------------------------- */

FA_DEVICE void clear_rows(char *block, int from, int to)
{
    for (int i = from * 8 + thread_id(); i < to * 8; i += WARPGROUP)
        ptx_st_shared_v4(ptx_shared_address(block) + (uint32_t)(i * 16), make_uint4(0, 0, 0, 0));
}

/* Rows of the tile in front of the first key that some row of the work tile sees, and behind the
 * last one, become 0: a weight of 0 times what is there might be NaN. first: the tile's first
 * key. */
FA_DEVICE void clear_unseen(const pipeline *pipe, const fa_work *w, int n, int first)
{
    const int from = w->from - first, to = w->to - first;
    ptx_mbarrier_wait(&pipe->state->tail_full[tail_stage(n)], tail_parity(n));
    for (int place = 0; place < V_PAIRS; place++) wait_for_pair(pipe, n, place);
    for (int block = 0; block < K_BLOCKS; block++) {
        char *at = block < V_BLOCKS
                       ? pair_at(pipe, pair_count(n, block / 2)) + block % 2 * BLOCK_BYTES
                       : tail_at(pipe, n);
        clear_rows(at, 0, from);
        clear_rows(at, to, KEYS);
    }
    ptx_fence_proxy_async();
    ptx_named_barrier_sync(BARRIER_OF_CONSUMER + CONSUMER_SCORES, WARPGROUP);
}

/* ---- Weights --------------------------------------------------------------------------------- */

/* Instead of RESCALE_ABOVE: a base stays until logits are so far beyond it, for the outputs of 256
 * columns are many to multiply. The weights fit into the element type. */
#define RAISE_ABOVE (ELEMENT == FA_ELEMENT_BFLOAT16 ? 16.0f : 15.0f)

/* Of the thread's two rows. */
typedef struct row_sums {
    float base[2]; /* of the weights, in powers of two */
    float sum[2];  /* of the thread's own columns */
} row_sums;

/* New bases for rows whose logits are too far beyond the old ones. rescale: what the outputs so far
 * are to be multiplied by. Most tiles raise none, which a vote finds out faster than four lanes
 * their largest logit. */
FA_DEVICE void raise_bases(const fa_scores *s, row_sums *rows, float rescale[2])
{
    float top[2];
    bool beyond = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        top[half] = s->at[0][0][2 * half];
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++)
            top[half] = fmaxf(top[half], fmaxf(s->at[0][n][2 * half], s->at[0][n][2 * half + 1]));
        beyond |= top[half] > rows->base[half] + RAISE_ABOVE;
        rescale[half] = 1.0f;
    }
    if (!__any_sync(0xffffffffu, beyond)) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float before = rows->base[half], highest = fa_max_over_lanes(top[half], 4);
        const float base = highest > before + RAISE_ABOVE ? highest - HEADROOM : before;
        rescale[half] = ptx_ex2(before - base);
        rows->base[half] = base;
        rows->sum[half] *= rescale[half];
    }
}

/* Logits become weights, packed as wgmma leaves results. */
FA_DEVICE void weigh(const fa_scores *s, row_sums *rows, uint32_t weights[KEY_TILES][2])
{
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float first = ptx_ex2(s->at[0][n][2 * half] - rows->base[half]);
            const float second = ptx_ex2(s->at[0][n][2 * half + 1] - rows->base[half]);
            rows->sum[half] += first + second;
            weights[n][half] = fa_pack_x2(first, second);
        }
}

/* To the buffer of tile n, when the consumers of values have used what was there. */
FA_DEVICE void store_weights(const pipeline *pipe, int n, uint32_t weights[KEY_TILES][2],
                             const float rescale[2])
{
    const uint32_t to = ptx_shared_address(weights_at(pipe, n));
    const int row = warp_id() * 16 + lane_id() % 16;
    float *factors = pipe->rescale + weights_buffer(n) * ROWS;
    __syncwarp(); /* no lane comes to a barrier two phases late */
    ptx_mbarrier_wait(&pipe->state->weights_empty[weights_buffer(n)], weights_parity(n) ^ 1);
#pragma unroll
    for (int i = 0; i < KEY_TILES; i += 2)
        ptx_stmatrix_x4(to + swizzled(row, i + lane_id() / 16), weights[i]);
    if (lane_id() % 4 == 0) {
        factors[row_of(0, 0)] = rescale[0];
        factors[row_of(0, 1)] = rescale[1];
    }
    ptx_fence_proxy_async();
    __syncwarp();
}

/* Whether the first keys of tile n have come. Lanes may have different answers. */
FA_DEVICE bool is_there(const pipeline *pipe, int n)
{
    const uint32_t count = pair_count(n, 0);
    return ptx_mbarrier_is_over(&pipe->state->pair_full[stage_of(count)], parity_of(count));
}

FA_DEVICE void announce_weights(const pipeline *pipe, int n, int leader)
{
    ptx_mbarrier_arrive_if(&pipe->state->weights_full[weights_buffer(n)], leader);
}

/* What make_logits() does to most tiles. */
FA_DEVICE void scale_scores(float *s, float unit)
{
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) s[i] *= unit;
}

/* ---- The loop -------------------------------------------------------------------------------- */

/* Groups of the products of S, of V_PAIRS, that still run when the weights of the tile before are
 * announced: about as long as it takes until the products of the values begin. */
#define GROUPS_RUNNING 1

FA_DEVICE void consume_scores(const pipeline *pipe, const fa_decode_params *d, row_sums *rows)
{
    const fa_work *w = &pipe->state->work;
    const key_tiles tiles = find_uniform_key_tiles(w);
    const int from = (int)ptx_uniform((uint32_t)w->from), to = (int)ptx_uniform((uint32_t)w->to);
    const int all_from = (int)ptx_uniform((uint32_t)w->all_from);
    const int all_to = (int)ptx_uniform((uint32_t)w->all_to);
    const bool softcap = d->attention.softcap > 0.0f;
    const float unit = d->attention.scale * FA_LOG2E;
    own_queries q;
    fa_scores s;
    float *const scores = s.at[0][0];
    int leader = lane_id() == 0;
    __asm__ volatile("" : "+r"(leader));
    share_queries(pipe, d, w);
    take_own_queries(pipe, &q);
#pragma unroll 1
    for (int n = 0; n < tiles.count; n++) {
        const int first = tiles.first + n * KEYS;
        uint32_t weights[KEY_TILES][2];
        float rescale[2];
        if (__builtin_expect(first < from || first + KEYS > to, 0)) clear_unseen(pipe, w, n, first);
        const int last = max(n - 1, 0), early = leader && n > 0 && !is_there(pipe, n);
        announce_weights(pipe, last, early);
        issue_scores(pipe, &q, n, scores);
        ptx_wgmma_wait(GROUPS_RUNNING);
        announce_weights(pipe, last, leader && n > 0 && !early);
        ptx_wgmma_wait(0);
        ptx_register_fence(scores, KEYS / 2);
        ptx_mbarrier_arrive_if(&pipe->state->tail_empty[tail_stage(n)], leader);
        if (__builtin_expect(first < all_from || first + KEYS > all_to || softcap, 0))
            make_logits(d, w, first, &s);
        else scale_scores(scores, unit);
        raise_bases(&s, rows, rescale);
        weigh(&s, rows, weights);
        store_weights(pipe, n, weights, rescale);
    }
    announce_weights(pipe, tiles.count - 1, leader);
}

#endif
