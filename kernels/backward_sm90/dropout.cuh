/*
 * Dropout as the only option (DROPOUT_ALONE). Together with other options, options.cuh applies it.
 *
 * A block of random bits covers a query and eight keys: two neighbours in each of four eights of a group of 32. A warp has two of
 * these eights, and a thread one of the two neighbours. So four threads, in two lanes that differ in bit 2 and in two warps, need
 * the same blocks. Each of them computes a quarter, and they exchange the results.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_DROPOUT_CUH
#define FA_KERNELS_BACKWARD_SM90_DROPOUT_CUH

#include "backward_sm90/config.cuh"

#if DROPOUT_ALONE

#include "backward_sm90/options.cuh"
#include "backward_sm90/pipeline.cuh"
#include "backward_sm90/rows.cuh"
#include "backward_sm90/work.cuh"
#include "common/at_least_x2.cuh"
#include "common/score_options.cuh"
#include "common/x2.cuh"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/select.cuh"
#include "ptx/thread.cuh"

/* The sign bits of those halves of x that are at least the threshold's. At most half is dropped: min is the threshold if they
 * are, and then the sum is 2^15; otherwise it is less. */
FA_DEVICE uint32_t find_kept_signs(uint32_t x, uint32_t threshold, bool at_most_half)
{
    if (at_most_half) return ptx_min_u16x2(x, threshold) + (0x80008000u - threshold);
    return fa_at_least_x2(x, threshold);
}

/* What is kept of four queries, 8 apart, and of the eight keys of a block: bit 8k + 2a + r is query 8a behind the first one and the
 * even key of eight 2k + r, and bit 16 + 8k + 2a + r the odd one. */
FA_DEVICE uint32_t find_words_kept(const uint32_t *words, uint32_t threshold, bool at_most_half)
{
    uint32_t kept = 0;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const uint32_t *own = words + n / 2 * 4 + n % 2;
        const uint32_t signs =
            ptx_permute_bytes(find_kept_signs(own[0], threshold, at_most_half),
                              find_kept_signs(own[2], threshold, at_most_half), 0x7351);
        kept = (kept >> 1 & 0x7f7f7f7fu) | (signs & 0x80808080u);
    }
    return kept;
}

/* What a thread keeps of a tile (BIT). All warps of the warpgroup take part. exchanged: the warpgroup's; barriers: the first of two. What
 * it stores is read before another barrier of the warpgroup, which comes before the next call. */
FA_DEVICE uint32_t find_shared_kept(const fa_attention_params *p, uint16_t *exchanged, int barriers,
                                    const block_work *w, const tile_cursor *at, int consumer)
{
    const int thread = ptx_thread_id() % WARPGROUP, lane = thread % 32, upper = thread / 32 % 2;
    const int odd = lane / 4 % 2;
    const int64_t key = w->keys.first + consumer * OWN_KEYS + thread / 32 * 16 + lane / 4;
    const tile_options o = {.head = (int)w->sequence.head + at->head};
    const fa_tile t = sequence_of(w, &o);
    const fa_dropout d = fa_dropout_of(p, &t);
    const uint32_t threshold = p->dropout_threshold * 0x10001u;
    const int query = at->tile * QUERIES + 32 * upper + lane % 4 * 2 + odd;
    uint32_t words[16], kept;
#pragma unroll
    for (int a = 0; a < 4; a++)
        fa_dropout_block(d.seed, d.offset, d.batch_head, query + 8 * a, key >> 5,
                         (int)(key >> 1) & 3, words + 4 * a);
    if (HEAD_DIM < 256 && p->dropout_threshold <= 0x8000u)
        kept = find_words_kept(words, threshold, true);
    else kept = find_words_kept(words, threshold, false);
    /* Of this thread's key, and of both warps' eights: the lower half is of the even lane's queries. */
    const uint32_t theirs = __shfl_xor_sync(0xffffffffu, kept, 4);
    const uint32_t own =
        odd ? (kept & 0xffff0000u) | theirs >> 16 : (kept & 0xffffu) | theirs << 16;
    exchanged[thread] = (uint16_t)ptx_permute_bytes(own, 0, upper ? 0x20 : 0x31);
    ptx_named_barrier_sync(barriers + thread / 64, 64);
    return ptx_permute_bytes(own, exchanged[thread ^ 32], upper ? 0x3514 : 0x5240);
}

/* Packs the weights that are kept. */
FA_DEVICE void pack_kept(uint32_t *x2, const float *weights, uint32_t keeps)
{
#pragma unroll
    for (int n = 0; n < SCORES / 2; n++)
        x2[n] = fa_pack_x2(ptx_choose(keeps, BIT(n / 2, n % 2, 0), weights[2 * n], 0.0f),
                           ptx_choose(keeps, BIT(n / 2, n % 2, 1), weights[2 * n + 1], 0.0f));
}

/* Replaces weights by dS = P (dP' - delta), and also packs them. dP' is dP times the scale if the weight is kept and 0, whatever dP is,
 * if it is not. masked: if a weight is 0, its dS is 0. */
FA_DEVICE void weigh_kept_gradients(float *weights, const float *dp, uint32_t *ds,
                                    const float *delta, float scale, uint32_t keeps, bool masked)
{
#pragma unroll
    for (int n = 0; n < SCORES / 2; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int e = 2 * n + i;
            const float weight = weights[e];
            const float drop = -delta[e / 4 * 2 + i];
            const float x =
                weight * ptx_choose(keeps, BIT(n / 2, n % 2, i), fmaf(dp[e], scale, drop), drop);
            weights[e] = masked && weight == 0.0f ? 0.0f : x;
        }
        ds[n] = fa_pack_x2(weights[2 * n], weights[2 * n + 1]);
    }
}

#endif

#endif
