/*
 * The consumer of scores: S = Q K^T, masks, and the bases of weights, by a running max. Threads of
 * the consumers of values make weights of the scores: each needs those that the same thread of this
 * warpgroup holds.
 *
 * Scores have priority on the tensor cores. The consumers of values make the weights of tile n while
 * the products of S of tile n + 1 run, and issue their own products when these have nearly ended. If
 * the keys of tile n + 1 have not come yet, they need not wait.
 */
#ifndef FA_KERNELS_DECODE_LATENT_SM90_SCORES_CUH
#define FA_KERNELS_DECODE_LATENT_SM90_SCORES_CUH

#include "decode_latent_sm90/config.cuh"

#include "common/reduce.cuh"
#include "decode_latent_sm90/pipeline.cuh"
#include "decode_latent_sm90/queries.cuh"
#include "decode_sm80/logits.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

/* ---- Products -------------------------------------------------------------------------------- */

/* Issues the products of a block of columns of the keys. */
FA_DEVICE void issue_block(const pipeline *pipe, const own_queries *q, int block, uint32_t k,
                           int accumulate, float *s)
{
    uint32_t shared = pipe->descriptor;
    __asm__ volatile("" : "+r"(shared)); /* or each step's descriptor would be kept in a register */
#pragma unroll
    for (int step = 0; step < 4; step++) {
        const uint64_t b = ptx_descriptor(k + (uint32_t)(step * 32 / DESCRIPTOR_UNIT));
        if (block < OWN_BLOCKS)
            PTX_WGMMA(registers_qk, KEYS)(s, q->at[block * 4 + step], b, accumulate || step > 0);
        else PTX_WGMMA(qk, KEYS)
        (s,
         ptx_descriptor(shared + (uint32_t)(((block - OWN_BLOCKS) * BLOCK_BYTES + step * 32) /
                                            DESCRIPTOR_UNIT)),
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
    issue_block(pipe, q, V_BLOCKS, tail_descriptor(pipe, n), 0, s);
#pragma unroll
    for (int place = 0; place < V_PAIRS; place++) {
        const uint32_t keys = pair_descriptor(pipe, pair_count(n, place));
        if (place < V_PAIRS - 1) wait_for_pair(pipe, n, place + 1);
        ptx_wgmma_fence();
        issue_block(pipe, q, first_block_of(place), keys, 1, s);
        issue_block(pipe, q, first_block_of(place) + 1, keys + BLOCK_BYTES / DESCRIPTOR_UNIT, 1, s);
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

/* ---- What makes weights of scores ------------------------------------------------------------ */

/* Instead of RESCALE_ABOVE: a base stays until logits are so far beyond it, for the outputs of 256
 * columns are many to multiply. The weights fit into the element type. */
#define RAISE_ABOVE (ELEMENT == FA_ELEMENT_BFLOAT16 ? 16.0f : 15.0f)

/* New bases, in powers of two, for the thread's two rows if their logits, scores times unit, are
 * too far beyond the old ones. rescale: what the outputs so far are to be multiplied by. Most tiles
 * raise none, which a vote finds out faster than four lanes their largest logit. */
FA_DEVICE void raise_bases(const fa_scores *s, float unit, float base[2], float rescale[2])
{
    float top[2];
    bool beyond = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        top[half] = s->at[0][0][2 * half];
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++)
            top[half] = fmaxf(top[half], fmaxf(s->at[0][n][2 * half], s->at[0][n][2 * half + 1]));
        top[half] *= unit;
        beyond |= top[half] > base[half] + RAISE_ABOVE;
        rescale[half] = 1.0f;
    }
    if (!__any_sync(0xffffffffu, beyond)) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float before = base[half], highest = fa_max_over_lanes(top[half], 4);
        base[half] = highest > before + RAISE_ABOVE ? highest - HEADROOM : before;
        rescale[half] = ptx_ex2(before - base[half]);
    }
}

/* Gives the tile's scores to the consumers of values, when these have taken those of the tile
 * before. */
FA_DEVICE void share_scores(const pipeline *pipe, int n, const fa_scores *s, float unit,
                            const float base[2], const float rescale[2], int leader)
{
    float4 *own = pipe->scores + thread_id() % WARPGROUP;
    __syncwarp(); /* no lane comes to a barrier two phases late */
    ptx_mbarrier_wait(&pipe->state->scores_empty, (n & 1) ^ 1);
#pragma unroll
    for (int i = 0; i < KEY_TILES; i++)
        own[i * WARPGROUP] =
            make_float4(s->at[0][i][0], s->at[0][i][1], s->at[0][i][2], s->at[0][i][3]);
    if (lane_id() % 4 == 0)
#pragma unroll
        for (int half = 0; half < 2; half++)
            *(float4 *)(void *)&pipe->rows[row_of(0, half)] =
                make_float4(base[half], unit, rescale[half], 0.0f);
    __syncwarp();
    ptx_mbarrier_arrive_if(&pipe->state->scores_full, leader);
}

/* ---- The loop -------------------------------------------------------------------------------- */

/* Groups of the products of S, of V_PAIRS, that still run when it is the values' turn: about as
 * long as it takes until their products begin. */
#define GROUPS_RUNNING 1

/* Whether the first keys of tile n have come. Lanes may have different answers. */
FA_DEVICE bool is_there(const pipeline *pipe, int n)
{
    const uint32_t count = pair_count(n, 0);
    return ptx_mbarrier_is_over(&pipe->state->pair_full[stage_of(count)], parity_of(count));
}

FA_DEVICE void let_values_issue(const pipeline *pipe, int leader)
{
    ptx_mbarrier_arrive_if(&pipe->state->values_turn, leader);
}

/* Whether scores become weights by a factor alone, in a tile that all rows see. */
FA_DEVICE bool is_plain(const fa_decode_params *d, float unit)
{
    return d->attention.softcap == 0.0f && unit > 0.0f && unit < INFINITY;
}

FA_DEVICE void consume_scores(const pipeline *pipe, const fa_decode_params *d)
{
    const fa_work *w = &pipe->state->work;
    const key_tiles tiles = find_uniform_key_tiles(w);
    const int from = (int)ptx_uniform((uint32_t)w->from), to = (int)ptx_uniform((uint32_t)w->to);
    const int all_from = (int)ptx_uniform((uint32_t)w->all_from);
    const int all_to = (int)ptx_uniform((uint32_t)w->all_to);
    const float scale = d->attention.scale * FA_LOG2E;
    const bool plain = is_plain(d, scale);
    own_queries q;
    fa_scores s;
    float base[2] = {NOTHING_SEEN, NOTHING_SEEN};
    float *const scores = s.at[0][0];
    int leader = lane_id() == 0;
    __asm__ volatile("" : "+r"(leader));
    complete_queries(pipe, d);
    take_own_queries(pipe, &q);
#pragma unroll 1
    for (int n = 0; n < tiles.count; n++) {
        const int first = tiles.first + n * KEYS;
        float rescale[2], unit = scale;
        if (__builtin_expect(first < from || first + KEYS > to, 0)) clear_unseen(pipe, w, n, first);
        const int early = leader && n > 0 && !is_there(pipe, n);
        let_values_issue(pipe, early);
        issue_scores(pipe, &q, n, scores);
        ptx_wgmma_wait(GROUPS_RUNNING);
        let_values_issue(pipe, leader && n > 0 && !early);
        ptx_wgmma_wait(0);
        ptx_register_fence(scores, KEYS / 2);
        release_stage(pipe, &pipe->state->tail_empty[tail_stage(n)], leader);
        if (n == 0) release_stage(pipe, &pipe->state->queries_taken, leader);
        if (__builtin_expect(first < all_from || first + KEYS > all_to || !plain, 0)) {
            make_logits(d, w, first, &s);
            unit = 1.0f;
        }
        raise_bases(&s, unit, base, rescale);
        share_scores(pipe, n, &s, unit, base, rescale, leader);
    }
    let_values_issue(pipe, leader);
}

#endif
