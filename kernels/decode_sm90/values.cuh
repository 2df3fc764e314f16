/*
 * The consumers' values: O^T += V^T P^T.
 */
#ifndef FA_KERNELS_DECODE_SM90_VALUES_CUH
#define FA_KERNELS_DECODE_SM90_VALUES_CUH

#include "decode_sm90/config.cuh"

#if !EIGHT_BITS
#include "common/x2.cuh"
#include "decode_sm90/pipeline.cuh"
#include "decode_sm90/scores.cuh"

/* The address of 16 bytes of a key's values, in the tile at this place. */
FA_DEVICE uint32_t value_at(const pipeline *pipe, fa_place at, int key, int vector)
{
    const int block = vector / 8;
#pragma unroll
    for (int i = 1; i < TILE_STAGES; i++)
        if (block >= i * STAGE_DIM_BLOCKS) go_on(pipe, &at);
    return ptx_shared_address(stage_at(pipe, &at)) +
           (uint32_t)(block % STAGE_DIM_BLOCKS * DIM_BLOCK_BYTES) + swizzled(key, vector % 8);
}

/* ---- Values that must not be seen ------------------------------------------------------------ */

FA_DEVICE void clear_rows(const pipeline *pipe, fa_place at, int from, int to)
{
#pragma unroll 1
    for (int i = from * (HEAD_DIM / 8) + thread_id(); i < to * (HEAD_DIM / 8);
         i += CONSUMER_THREADS)
        ptx_st_shared_v4(value_at(pipe, at, i / (HEAD_DIM / 8), i % (HEAD_DIM / 8)),
                         make_uint4(0, 0, 0, 0));
}

/* Sets values before the first key that a row of the work tile sees, and after the last one, to 0: a weight
 * of 0 times such a value might be NaN. The next barrier makes this visible. */
FA_DEVICE void clear_unseen(const pipeline *pipe, const fa_work *w, fa_place at, int first)
{
    acquire_tile(pipe, at);
    clear_rows(pipe, at, 0, w->from - first);
    clear_rows(pipe, at, max(0, w->to - first), KEYS);
}

/* Whether a row can have a weight of 0 for a key that another row sees. */
FA_DEVICE bool hides_keys(const fa_work *w, int first)
{
    return max(first, w->from) < w->all_from || min(first + KEYS, w->to) > w->all_to;
}

FA_DEVICE bool has_nonfinite_values(const pipeline *pipe, fa_place at)
{
    uint32_t seen = 0;
    acquire_tile(pipe, at);
#pragma unroll 1
    for (int i = thread_id(); i < KEYS * (HEAD_DIM / 8); i += CONSUMER_THREADS) {
        const uint4 x =
            ptx_ld_shared_v4(value_at(pipe, at, i / (HEAD_DIM / 8), i % (HEAD_DIM / 8)));
        seen |= fa_x2_not_finite(x.x) | fa_x2_not_finite(x.y) | fa_x2_not_finite(x.z) |
                fa_x2_not_finite(x.w);
    }
    return ptx_named_barrier_or(consumers_barrier(), CONSUMER_THREADS, seen != 0);
}

/* The odd or the even half of two neighbours. */
FA_DEVICE float half_of(uint32_t x2, int number)
{
    const float2 both = fa_unpack_x2(x2, ELEMENT);
    return number % 2 ? both.y : both.x;
}

/* O^T += V^T P^T, key by key, in which a weight of 0 excludes its value. This is rarely needed. */
FA_DEVICE void add_values_carefully(const pipeline *pipe, fa_place at, uint32_t buffer, float *out)
{
#pragma unroll 1
    for (int key = 0; key < KEYS; key++) {
        float weight[ROW_GROUPS][2];
#pragma unroll
        for (int i = 0; i < 2 * ROW_GROUPS; i++) {
            const uint32_t row = buffer + (uint32_t)(key / 64 * QUERY_BLOCK_BYTES) +
                                 swizzled(row_of(i / 2, i % 2), key / 8 % 8);
            weight[i / 2][i % 2] =
                half_of(ptx_ld_shared_u32(row + (uint32_t)(key % 8 / 2 * 4)), key);
        }
#pragma unroll
        for (int n = 0; n < 2 * DIM_BLOCKS; n++) {
            const int column = 64 * (n / 2) + first_of_block() + 8 * (n % 2);
            const uint32_t from =
                value_at(pipe, at, key, column / 8) + (uint32_t)(column % 8 / 2 * 4);
            const float value = half_of(ptx_ld_shared_u32(from), column);
#pragma unroll
            for (int i = 0; i < 2 * ROW_GROUPS; i++) {
                float *to = &out[score_at(n / 2, i / 2, n % 2, i % 2)];
                const float x = weight[i / 2][i % 2];
                *to = x == 0.0f ? *to : fmaf(x, value, *to);
            }
        }
    }
}

/* ---- Products -------------------------------------------------------------------------------- */

/* Issues the products of a stage's columns: those of the i-th stage of a tile. */
FA_DEVICE void issue_values(uint32_t values, uint32_t p, int i, float *out)
{
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++)
#pragma unroll
        for (int block = 0; block < STAGE_DIM_BLOCKS; block++) {
            const int v = block * DIM_BLOCK_BYTES + step * 16 * 128;
            const int weight = step / 4 * QUERY_BLOCK_BYTES + step % 4 * 32;
            PTX_WGMMA(vp, GROUP_ROWS)
            (out + (i * STAGE_DIM_BLOCKS + block) * (ROWS / 2),
             ptx_descriptor(values + (uint32_t)(v / 16)),
             ptx_descriptor(p + (uint32_t)(weight / 16)), 1);
        }
    ptx_wgmma_commit();
}

/* O^T += V^T P^T of the tile at this place; the place advances past it. */
FA_DEVICE void add_values(const pipeline *pipe, const char *weights, bool carefully, fa_place *at,
                          float *out)
{
    const fa_place used = *at;
    if (carefully) {
        add_values_carefully(pipe, *at, ptx_shared_address(weights), out);
        __syncwarp(); /* all lanes have read */
#pragma unroll
        for (int i = 0; i < TILE_STAGES; i++) go_on(pipe, at);
    } else {
        const uint32_t p = ptx_uniform(ptx_descriptor_low(weights, 0));
        ptx_register_fence(out, OUTPUTS);
#pragma unroll
        for (int i = 0; i < TILE_STAGES; i++, go_on(pipe, at)) {
            const uint32_t values = descriptor_of(pipe, at);
            acquire(pipe, at);
            ptx_wgmma_fence();
            issue_values(values, p, i, out);
        }
        ptx_wgmma_wait(0);
        ptx_register_fence(out, OUTPUTS);
    }
    release_tile(pipe, used);
}
#endif

#endif
