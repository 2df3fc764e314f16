/*
 * The consumers' loop over the block's key tiles, and its results in shared memory.
 */
#ifndef FA_KERNELS_DECODE_SM90_ATTEND_CUH
#define FA_KERNELS_DECODE_SM90_ATTEND_CUH

#include "decode_sm90/config.cuh"

#if !EIGHT_BITS
#include "decode_sm90/pipeline.cuh"
#include "decode_sm90/scores.cuh"
#include "decode_sm90/values.cuh"
#include "ptx/registers.cuh"

/* Writes the final numbers of rows to the exchange area: each warp's sums, and the bases. All products
 * have ended. */
FA_DEVICE void share_row_ends(const pipeline *pipe, row_sums *rows)
{
    sync_consumers(); /* all have read the largest logits */
#pragma unroll
    for (int i = 0; i < 2 * ROW_GROUPS; i++) {
        const int r = row_of(i / 2, i % 2);
        float sum = rows->sum[i / 2][i % 2];
#pragma unroll
        for (int other = 4; other < 32; other *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
        if (lane_id() >= 4) continue;
        pipe->exchange[warp_id() * ROWS + r] = sum;
        if (warp_id() == 0) pipe->exchange[CONSUMER_WARPS * ROWS + r] = rows->base[i / 2][i % 2];
    }
}

/* Writes the block's sums to shared memory, in the form that merge() takes. */
FA_DEVICE void share_sums(const pipeline *pipe, row_sums *rows, const float *out, float *sums)
{
    share_row_ends(pipe, rows);
#pragma unroll
    for (int n = 0; n < 2 * DIM_BLOCKS; n++)
#pragma unroll
        for (int i = 0; i < 2 * ROW_GROUPS; i++)
            sums[row_of(i / 2, i % 2) * ROW_FLOATS + 64 * (n / 2) + first_of_block() +
                 8 * (n % 2)] = out[score_at(n / 2, i / 2, n % 2, i % 2)];
    sync_consumers();
    const int r = thread_id();
    if (r >= ROWS) return;
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < CONSUMER_WARPS; warp++) sum += pipe->exchange[warp * ROWS + r];
    *(float2 *)(sums + r * ROW_FLOATS + VALUE_DIM) =
        make_float2(pipe->exchange[CONSUMER_WARPS * ROWS + r], sum);
}

/* at: advances past the part's tiles. */
FA_DEVICE void attend(const pipeline *pipe, const fa_decode_params *d, const fa_work *w,
                      fa_place *at, float *sums)
{
    const key_tiles tiles = find_uniform_key_tiles(w);
    const int from = (int)ptx_uniform((uint32_t)w->from), to = (int)ptx_uniform((uint32_t)w->to);
    const int all_from = (int)ptx_uniform((uint32_t)w->all_from);
    const int all_to = (int)ptx_uniform((uint32_t)w->all_to);
    row_sums rows;
    float out[OUTPUTS];
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) out[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * ROW_GROUPS; i++) {
        rows.base[i / 2][i % 2] = NOTHING_SEEN;
        rows.sum[i / 2][i % 2] = 0.0f;
    }
    load_queries(pipe, d, w);
#pragma unroll 1
    for (int n = 0; n < tiles.count; n++) {
        const int first = tiles.first + n * KEYS;
        char *weights = pipe->weights + n % WEIGHT_BUFFERS * WEIGHT_BYTES;
        float s[SCORES];
        make_scores(pipe, at, s);
        scale_scores(&d->attention, s);
        const bool masked = first < all_from || first + KEYS > all_to;
        if (masked) hide_keys(d, w, first, s);
        if (!COPIED && (first < from || first + KEYS > to)) clear_unseen(pipe, w, *at, first);
        make_weights(pipe, s, ptx_shared_address(weights), &rows, out, n == 0);
        const bool careful = masked && hides_keys(w, first) && has_nonfinite_values(pipe, *at);
        add_values(pipe, weights, careful, at, out);
    }
    share_sums(pipe, &rows, out, sums);
}
#endif

#endif
