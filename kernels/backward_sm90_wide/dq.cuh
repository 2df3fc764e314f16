/*
 * The warpgroup that computes the block's share of dQ and adds it to the sums in global memory, from its registers.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_WIDE_DQ_CUH
#define FA_KERNELS_BACKWARD_SM90_WIDE_DQ_CUH

#include "backward_sm90_wide/config.cuh"
#include "backward_sm90_wide/multiply.cuh"
#include "backward_sm90_wide/pipeline.cuh"
#include "backward_sm90_wide/tile.cuh"
#include "backward_sm90/keys.cuh"
#include "common/device.cuh"
#include "ptx/barrier.cuh"
#include "ptx/semaphore.cuh"
#include "ptx/store.cuh"

/* Adds DQ_COLUMNS columns. to: the thread's first word of them. */
FA_DEVICE void add_columns(float *to, const float *dq)
{
#pragma unroll
    for (int j = 0; j < DQ_COLUMNS / 8; j++)
        ptx_add_global_f32x4(to + 4 * WARPGROUP * j,
                             make_float4(dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]));
}

FA_DEVICE void issue_columns(float *dq, uint32_t ds, uint32_t keys, int block)
{
    ptx_register_fence(dq, DQ_SUMS);
    ptx_wgmma_fence();
    issue_dq(dq, ds, keys + (uint32_t)(block * KEY_BLOCK / UNIT));
}

/* A tile's dQ. Where there are registers, the next columns are computed while some are added. */
FA_DEVICE void add_dq(const pipeline *pipe, uint32_t base, int count, float *to)
{
    shared_state *state = pipe->state;
    const uint32_t ds = ds_tile(base, count), keys = base + ACROSS(KEY_BLOCK);
    float dq[DQ_SETS][DQ_SUMS];
    if (DQ_SETS > 1) issue_columns(dq[0], ds, keys, 0);
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
        const int issued = block + DQ_SETS - 1;
        float *now = dq[block % DQ_SETS];
        if (issued < BLOCKS) issue_columns(dq[issued % DQ_SETS], ds, keys, issued);
        if (issued < BLOCKS && DQ_SETS > 1) ptx_wgmma_wait(1);
        else ptx_wgmma_wait(0);
        ptx_register_fence(now, DQ_SUMS);
        if (block + 1 == BLOCKS)
            ptx_mbarrier_arrive_if(&state->ds_empty[ds_buffer(count)], is_leader());
        if (to) add_columns(to + block * (WARPGROUP * DQ_SUMS), now);
    }
}

/* Where sums have one order, a key tile is added when all before it have been. It waits only for blocks of lower numbers, which
 * start no later and do not wait for it. A thread waits and adds to the semaphore for all: the barriers pass on what it has seen
 * and what the others have done. */
FA_DEVICE void compute_dq(const pipeline *pipe, const fa_backward_params *p,
                          const fa_backward_sm90_params *s)
{
    shared_state *state = pipe->state;
    const block_work *w = &state->work;
    const int thread = threadIdx.x % WARPGROUP;
    const bool ordered = s->semaphores && p->dq.data;
    const uint32_t base = ptx_uniform(ptx_descriptor_low(pipe->buffers, 0));
    if (w->tiles == 0) return;
    wait_for_k(pipe, &p->a);
    for (tile_cursor at = first_tile(w); at.count < w->tiles; advance(&at, w->from, w->to)) {
        const int64_t number = w->number + at.head * s->q_tiles + at.tile;
        float *to = p->dq.data ? s->sums + number * (SUM_BYTES / 4) + 4 * thread : 0;
        int32_t *semaphore = s->semaphores + number * FA_BACKWARD_SM90_SEMAPHORES;
        if (ordered && thread == 0) ptx_semaphore_wait(semaphore, tiles_before(w, at.tile));
        ptx_mbarrier_wait(&state->ds_full[ds_buffer(at.count)], ds_parity(at.count));
        if (ordered) ptx_named_barrier_sync(NAMED_BARRIER_DQ, WARPGROUP);
        add_dq(pipe, base, at.count, to);
        if (ordered) {
            ptx_named_barrier_sync(NAMED_BARRIER_DQ, WARPGROUP);
            if (thread == 0) ptx_semaphore_add(semaphore);
        }
    }
}

#endif
