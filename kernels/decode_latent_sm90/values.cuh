/*
 * A consumer of values: O += P V of half of the values' columns, 256 of them.
 */
#ifndef FA_KERNELS_DECODE_LATENT_SM90_VALUES_CUH
#define FA_KERNELS_DECODE_LATENT_SM90_VALUES_CUH

#include "decode_latent_sm90/config.cuh"

/* A block of columns is swizzled, and the fragments' address has the row's turn in the bits of the
 * vector. */
#define FA_VALUE_BLOCK(v, block) ((v) ^ (uint32_t)((block)*32))

#include "common/nonfinite_values.cuh"
#include "common/x2.cuh"
#include "decode_latent_sm90/pipeline.cuh"
#include "decode_latent_sm90/queries.cuh"
#include "decode_sm80/logits.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"

/* The pair of blocks `i` of those that this half of the columns has of tile n. */
FA_DEVICE uint32_t own_pair(int n, int i, int half)
{
    return pair_count(n, i * VALUE_GROUPS + half);
}

/* Makes the outputs fit the bases of tile n. */
FA_DEVICE void rescale_outputs(const pipeline *pipe, int n, float *out)
{
    const float *factors = pipe->rescale + weights_buffer(n) * ROWS;
    const float rescale[2] = {factors[row_of(0, 0)], factors[row_of(0, 1)]};
    if (!__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) out[i] *= rescale[i / 2 % 2];
}

/* Issues the products of a pair of blocks: 128 columns. */
FA_DEVICE void issue_values(const pipeline *pipe, int n, uint32_t count, float *out)
{
    const uint32_t v = ptx_descriptor_low(pair_at(pipe, count), BLOCK_BYTES);
    const uint32_t p = ptx_descriptor_low(weights_at(pipe, n), 0);
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) PTX_WGMMA(shared_pv, 128)
    (out, ptx_descriptor(p + (uint32_t)(step * 32 / 16)),
     ptx_descriptor(v + (uint32_t)(step * 16 * 128 / 16)), 1);
    ptx_wgmma_commit();
}

/* ---- Values that are not finite -------------------------------------------------------------- */

/* Whether some value of the warpgroup's columns of tile n is not finite. */
FA_DEVICE bool has_nonfinite_values(const pipeline *pipe, int n, int half)
{
    uint32_t seen = 0;
#pragma unroll 1
    for (int i = 0; i < GROUP_PAIRS * (PAIR_BYTES / 16 / WARPGROUP); i++) {
        const uint32_t pair = ptx_shared_address(pair_at(pipe, own_pair(n, i % GROUP_PAIRS, half)));
        const uint4 x = ptx_ld_shared_v4(
            pair + (uint32_t)((i / GROUP_PAIRS * WARPGROUP + thread_id() % WARPGROUP) * 16));
        seen |= fa_x2_not_finite(x.x) | fa_x2_not_finite(x.y) | fa_x2_not_finite(x.z) |
                fa_x2_not_finite(x.w);
    }
    return ptx_named_barrier_or(BARRIER_OF_CONSUMER + 1 + half, WARPGROUP, seen != 0);
}

/* Accumulators of a block of columns. */
FA_DEVICE float (*block_of(float *out, int block))[D_TILES][4]
{
    return (float(*)[D_TILES][4])(void *)(out + 4 * D_TILES * block);
}

/* Where this lane's fragments of 16 keys' values are, of a block of columns. */
FA_DEVICE uint32_t fragments_at(const pipeline *pipe, int n, int half, int block, int step)
{
    const uint32_t count = own_pair((int)fa_opaque((uint32_t)n), block / 2, half);
    return ptx_shared_address(pair_at(pipe, count)) + (uint32_t)(block % 2 * BLOCK_BYTES) +
           swizzled(16 * step + lane_id() % 16, lane_id() / 16);
}

/* O += P V of tile n, in which a weight of 0 leaves its value out: as fa_add_values_carefully, for
 * all blocks at once. */
FA_DEVICE void add_tile_carefully(const pipeline *pipe, int n, int half, float *out)
{
#pragma unroll 1
    for (int step = 0; step < KEYS / 16; step++) {
        const int row = warp_id() % GROUP_WARPS * 16 + lane_id() % 16;
        uint32_t a[M_TILES][4];
        ptx_ldmatrix_x4(a[0], ptx_shared_address(weights_at(pipe, n)) +
                                  swizzled(row, 2 * step + lane_id() / 16));
#pragma unroll
        for (int block = 0; block < 2 * GROUP_PAIRS; block++)
            fa_add_finite_values(block_of(out, block), a, fragments_at(pipe, n, half, block, step));
#pragma unroll
        for (int i = 0; i < 4; i++) a[0][i] = fa_mark_weights(a[0][i]);
#pragma unroll 1
        for (int negative = 0; negative < 2; negative++)
#pragma unroll
            for (int block = 0; block < 2 * GROUP_PAIRS; block++)
                fa_add_infinities(block_of(out, block), a, fragments_at(pipe, n, half, block, step),
                                  negative);
    }
}

/* ---- The loop -------------------------------------------------------------------------------- */

FA_DEVICE void release_pair(const pipeline *pipe, uint32_t count)
{
    ptx_mbarrier_arrive_if(&pipe->state->pair_empty[stage_of(count)], lane_id() == 0);
}

/* O += P V of tile n; releases its stages. */
FA_DEVICE void add_tile(const pipeline *pipe, int n, int half, bool carefully, float *out)
{
    if (carefully) {
        add_tile_carefully(pipe, n, half, out);
        __syncwarp(); /* all lanes have read */
        release_pair(pipe, own_pair(n, 0, half));
        release_pair(pipe, own_pair(n, 1, half));
        return;
    }
    ptx_register_fence(out, OUTPUTS);
    ptx_wgmma_fence();
    issue_values(pipe, n, own_pair(n, 0, half), out);
    issue_values(pipe, n, own_pair(n, 1, half), out + OUTPUTS / 2);
    ptx_wgmma_wait(1);
    release_pair(pipe, own_pair(n, 0, half));
    ptx_wgmma_wait(0);
    ptx_register_fence(out, OUTPUTS);
    release_pair(pipe, own_pair(n, 1, half));
}

/* The weights come when the tile's keys are there, so the waits for these as values only order what
 * TMA has written. */
FA_DEVICE void acquire_tile(const pipeline *pipe, int n, int half)
{
    shared_state *state = pipe->state;
    __syncwarp(); /* no lane comes to a barrier two phases late */
    ptx_mbarrier_wait(&state->weights_full[weights_buffer(n)], weights_parity(n));
    for (int i = 0; i < GROUP_PAIRS; i++) {
        const uint32_t count = own_pair(n, i, half);
        ptx_mbarrier_wait(&state->pair_full[stage_of(count)], parity_of(count));
    }
}

FA_DEVICE void consume_values(const pipeline *pipe, const fa_decode_params *d, int half, float *out)
{
    const fa_work *w = &pipe->state->work;
    const int count = (int)ptx_uniform((uint32_t)find_key_tiles(w).count);
    share_queries(pipe, d, w);
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) out[i] = 0.0f;
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        const int n = (int)ptx_uniform((uint32_t)i);
        acquire_tile(pipe, n, half);
        rescale_outputs(pipe, n, out);
        const bool careful = hides_keys(d, w, find_key_tiles(w).first + n * KEYS) &&
                             has_nonfinite_values(pipe, n, half);
        add_tile(pipe, n, half, careful, out);
        ptx_mbarrier_arrive_if(&pipe->state->weights_empty[weights_buffer(n)], lane_id() == 0);
    }
}

#endif
