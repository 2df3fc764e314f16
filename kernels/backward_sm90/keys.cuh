/*
 * Where a block waits for its keys and values: right after their loads, or until rows have been
 * cleared as well.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_KEYS_CUH
#define FA_KERNELS_BACKWARD_SM90_KEYS_CUH

#include "backward_sm90/config.cuh"
#include "backward_sm90/pipeline.cuh"
#include "backward_sm90/work.cuh"
#include "common/x2.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"

/* Whether a mask or a bias may hide keys. If so, keys are searched for numbers that are not
 * finite. */
FA_DEVICE bool hides_keys(const fa_attention_params *p)
{
    return HIDES && (p->mask.data || p->bias.data);
}

#if HIDES

/* A warp looks at 16 rows of keys that have been loaded, from row `row` of the buffer on, two lanes at a row. Those that are not finite
 * are cleared, as are those that no query sees, and marked in `bad`, bits of the 16 (NULL: nowhere). first: the buffer's first key,
 * counted from the work tile's. Consumers do this while they have nothing else to do: a single warp took 2,400 cycles for 128 keys of
 * 64 columns, and more for wide ones. */
FA_DEVICE void check_keys(char *keys, int blocks, const block_work *w, int first, int row,
                          uint16_t *bad)
{
    const int lane = threadIdx.x % 32, own = row + lane / 2, key = first + own;
    const bool stays = key >= w->clear_before_key && key < w->clear_from_key;
    uint32_t seen = 0, rows = 0;
#pragma unroll
    for (int n = 0; n < 4 * blocks; n++) { /* the quarters of a warp read different banks */
        const uint4 x =
            *(const uint4 *)(keys + n / 4 * KEY_BLOCK + own * 128 + (2 * n + lane) % 8 * 16);
        seen |= fa_x2_not_finite(x.x) | fa_x2_not_finite(x.y) | fa_x2_not_finite(x.z) |
                fa_x2_not_finite(x.w);
    }
    const uint32_t parts = __ballot_sync(0xffffffffu, stays && seen);
    if (parts || __any_sync(0xffffffffu, !stays)) {
#pragma unroll 1
        for (int n = 0; n < 16; n++) rows |= (uint32_t)((parts >> 2 * n & 3) != 0) << n;
        if (!stays || rows >> lane / 2 & 1)
#pragma unroll 1
            for (int n = 0; n < 4 * blocks; n++)
                *(float4 *)(keys + n / 4 * KEY_BLOCK + own * 128 + (2 * n + lane) % 8 * 16) =
                    make_float4(0, 0, 0, 0);
        ptx_fence_proxy_async();
    }
    if (bad && lane == 0) *bad = (uint16_t)rows;
}

#endif

FA_DEVICE void wait_for_k(const pipeline *pipe, const fa_attention_params *p)
{
    shared_state *state = pipe->state;
    const block_work *w = work_of(pipe);
    const bool changes = hides_keys(p) || clears_keys(w);
    ptx_mbarrier_wait(changes ? &state->k_full : &state->k_loaded,
                      changes ? cleared_parity(w) : keys_parity(w));
}

/* The same for those that check the block's keys: the consumers, of wide heads the dV warpgroup, after which the dQ warpgroup may
 * multiply. */
FA_DEVICE void begin_keys(const pipeline *pipe, const fa_attention_params *p)
{
#if HIDES
    shared_state *state = pipe->state;
    if (hides_keys(p)) {
        ptx_mbarrier_wait(&state->k_loaded, 0);
#ifdef BACKWARD_SM90_WIDE
        const int row = (int)threadIdx.x % WARPGROUP / 32 * 16;
#else
        const int row = ((int)threadIdx.x - WARPGROUP) / 32 * 16;
#endif
        check_keys(pipe->buffers, BLOCKS, work_of(pipe), FIRST_KEY, row,
                   &state->bad_keys[(FIRST_KEY + row) / 16]);
#ifdef BACKWARD_SM90_WIDE
        ptx_named_barrier_sync(NAMED_BARRIER_DV, WARPGROUP);
        if (threadIdx.x % WARPGROUP == 0) ptx_mbarrier_arrive(&state->k_full);
#else
        ptx_named_barrier_sync(NAMED_BARRIER_CONSUMERS, CONSUMERS * WARPGROUP);
#endif
        return;
    }
#endif
    wait_for_k(pipe, p);
}

FA_DEVICE void wait_for_v(const pipeline *pipe)
{
    shared_state *state = pipe->state;
    const block_work *w = work_of(pipe);
    const bool changes = clears_keys(w);
    ptx_mbarrier_wait(changes ? &state->v_full : &state->v_loaded,
                      changes ? cleared_parity(w) : keys_parity(w));
}

#endif
