/*
 * A consumer of values: makes the weights P, and O += P V of half of the values' columns, 256 of
 * them. Both consumers make the same weights, so these need not pass through shared memory.
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

FA_DEVICE void release_pair(const pipeline *pipe, uint32_t count, int leader)
{
    release_stage(pipe, &pipe->state->pair_empty[stage_of(count)], leader);
}

/* Sums of weights: of the thread's two rows and of its own keys. */
typedef struct row_sums {
    float at[2];
} row_sums;

/* Where the thread finds its scores and the numbers of its two rows: addresses in shared memory. */
typedef struct score_place {
    uint32_t own, rows;
    int leader; /* whether the lane arrives for its warp */
} score_place;

FA_DEVICE score_place find_scores(const pipeline *pipe)
{
    score_place at = {ptx_shared_address(pipe->scores + thread_id() % WARPGROUP),
                      ptx_shared_address(&pipe->rows[row_of(0, 0)]), lane_id() == 0};
    /* Kept in registers: to find them again takes longer. */
    __asm__ volatile("" : "+r"(at.own), "+r"(at.rows), "+r"(at.leader));
    return at;
}

/* What makes weights of the scores of the thread's two rows. */
typedef struct weight_bases {
    float unit, base[2];
} weight_bases;

/* Those of the next tile. Makes the sums fit them. */
FA_DEVICE weight_bases change_bases(const score_place *at, float *out, row_sums *sums)
{
    float rescale[2];
    weight_bases bases;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint4 row =
            ptx_ld_shared_v4(at->rows + (uint32_t)(half * 8 * (int)sizeof(score_row)));
        bases.base[half] = fa_bits_float(row.x);
        bases.unit = fa_bits_float(row.y);
        rescale[half] = fa_bits_float(row.z);
    }
    if (!__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) return bases;
#pragma unroll
    for (int half = 0; half < 2; half++) sums->at[half] *= rescale[half];
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) out[i] *= rescale[i / 2 % 2];
    return bases;
}

/* Makes weights of the tile's scores of 16 keys: an A operand of products. */
FA_DEVICE void make_weights(const score_place *at, const weight_bases *bases, int step,
                            row_sums *sums, uint32_t p[4])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint4 s = ptx_ld_shared_v4(at->own + (uint32_t)((2 * step + i) * WARPGROUP * 16));
        const float x0 = ptx_ex2(fmaf(fa_bits_float(s.x), bases->unit, -bases->base[0]));
        const float x1 = ptx_ex2(fmaf(fa_bits_float(s.y), bases->unit, -bases->base[0]));
        const float y0 = ptx_ex2(fmaf(fa_bits_float(s.z), bases->unit, -bases->base[1]));
        const float y1 = ptx_ex2(fmaf(fa_bits_float(s.w), bases->unit, -bases->base[1]));
        sums->at[0] += x0 + x1;
        sums->at[1] += y0 + y1;
        p[2 * i] = fa_pack_x2(x0, x1);
        p[2 * i + 1] = fa_pack_x2(y0, y1);
    }
}

FA_DEVICE void release_scores(const pipeline *pipe, int leader)
{
    __syncwarp(); /* all lanes have read */
    ptx_mbarrier_arrive_if(&pipe->state->scores_empty, leader);
}

/* Issues the products of 16 keys and a pair of blocks: 128 columns. */
FA_DEVICE void issue_values(const pipeline *pipe, uint32_t count, int step, const uint32_t p[4],
                            float *out)
{
    const uint32_t v =
        pair_descriptor(pipe, count) + ((uint32_t)(BLOCK_BYTES / DESCRIPTOR_UNIT) << 16);
    PTX_WGMMA(pv, 128)
    (out, p, ptx_descriptor(v + (uint32_t)(step * 16 * 128 / DESCRIPTOR_UNIT)), 1);
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
FA_DEVICE void add_tile_carefully(const pipeline *pipe, int n, int half, const score_place *at,
                                  const weight_bases *bases, row_sums *sums, float *out)
{
#pragma unroll 1
    for (int step = 0; step < KEYS / 16; step++) {
        uint32_t a[M_TILES][4];
        make_weights(at, bases, step, sums, a[0]);
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
    release_scores(pipe, at->leader);
    if (pipe->cluster > 1) __threadfence(); /* of what lanes have read, to the peer */
    __syncwarp();
    release_pair(pipe, own_pair(n, 0, half), at->leader);
    release_pair(pipe, own_pair(n, 1, half), at->leader);
}

/* ---- The loop -------------------------------------------------------------------------------- */

/* O += P V of tile n; releases its scores and its stages. There are registers for weights of
 * WEIGHT_STEPS times 16 keys: the others are made while products run. */
FA_DEVICE void multiply_tile(const pipeline *pipe, int n, int half, const score_place *at,
                             const weight_bases *bases, row_sums *sums, float *out)
{
    uint32_t p[WEIGHT_STEPS][4], made = 0;
    const uint32_t zero = fa_opaque(0);
#pragma unroll
    for (int step = 0; step < WEIGHT_STEPS; step++) {
        make_weights(at, bases, step, sums, p[step]);
#pragma unroll
        for (int i = 0; i < 4; i++) made |= p[step][i];
    }
    /* Part of the wait, or the assembler would make the weights after it. */
    ptx_mbarrier_wait(&pipe->state->values_turn, (n & 1) | (int)(made & zero));
    ptx_register_fence(out, OUTPUTS);
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) {
        if (step >= WEIGHT_STEPS) {
            ptx_wgmma_wait(WEIGHT_STEPS - 1); /* the products of these registers have ended */
            make_weights(at, bases, step, sums, p[step % WEIGHT_STEPS]);
        }
        ptx_wgmma_fence();
        issue_values(pipe, own_pair(n, 0, half), step, p[step % WEIGHT_STEPS], out);
        if (step == KEYS / 16 - 1) ptx_wgmma_commit();
        issue_values(pipe, own_pair(n, 1, half), step, p[step % WEIGHT_STEPS], out + OUTPUTS / 2);
        ptx_wgmma_commit();
    }
    release_scores(pipe, at->leader);
    ptx_wgmma_wait(1);
    release_pair(pipe, own_pair(n, 0, half), at->leader);
    ptx_wgmma_wait(0);
    ptx_register_fence(out, OUTPUTS);
    release_pair(pipe, own_pair(n, 1, half), at->leader);
}

/* Waits for the scores. They come when the tile's keys are there, so the waits for these as values
 * only order what TMA has written. */
FA_DEVICE void acquire_tile(const pipeline *pipe, int n, int half)
{
    shared_state *state = pipe->state;
    __syncwarp(); /* no lane comes to a barrier two phases late */
    ptx_mbarrier_wait(&state->scores_full, n & 1);
    for (int i = 0; i < GROUP_PAIRS; i++) {
        const uint32_t count = own_pair(n, i, half);
        ptx_mbarrier_wait(&state->pair_full[stage_of(count)], parity_of(count));
    }
}

FA_DEVICE void consume_values(const pipeline *pipe, const fa_decode_params *d, int half, float *out,
                              row_sums *sums)
{
    const fa_work *w = &pipe->state->work;
    const key_tiles tiles = find_uniform_key_tiles(w);
    const int from = (int)ptx_uniform((uint32_t)w->from), to = (int)ptx_uniform((uint32_t)w->to);
    const int all_from = (int)ptx_uniform((uint32_t)w->all_from);
    const int all_to = (int)ptx_uniform((uint32_t)w->all_to);
    const score_place at = find_scores(pipe);
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) out[i] = 0.0f;
#pragma unroll 1
    for (int i = 0; i < tiles.count; i++) {
        const int n = (int)ptx_uniform((uint32_t)i), first = tiles.first + n * KEYS;
        const bool hides = max(first, from) < all_from || min(first + KEYS, to) > all_to;
        acquire_tile(pipe, n, half);
        const weight_bases bases = change_bases(&at, out, sums);
        if (__builtin_expect(hides, 0) && has_nonfinite_values(pipe, n, half))
            add_tile_carefully(pipe, n, half, &at, &bases, sums, out);
        else multiply_tile(pipe, n, half, &at, &bases, sums, out);
    }
}

#endif
