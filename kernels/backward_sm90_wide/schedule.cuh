/*
 * The work tiles of a persistent cluster. The warp that loads queries takes the next one when it has
 * issued the loads of the one before, and describes it; then the tiles of two or three stages and the
 * last dQ are still to come. Both blocks of a cluster share a work tile, so block 0 takes it and sends
 * its number to block 1.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_WIDE_SCHEDULE_CUH
#define FA_KERNELS_BACKWARD_SM90_WIDE_SCHEDULE_CUH

#include "backward_sm90_wide/config.cuh"
#include "backward_sm90_wide/load.cuh"
#include "backward_sm90_wide/pipeline.cuh"
#include "backward_sm90/work.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"

#if PERSISTENT

/* A cluster's number, and the number of clusters. */
FA_DEVICE int64_t this_cluster(void) { return blockIdx.x / CLUSTER; }
FA_DEVICE int64_t count_clusters(void) { return gridDim.x / CLUSTER; }

/* Whether each cluster has at most one work tile, that of its number. */
FA_DEVICE bool has_one_work_tile(const fa_attention_params *p)
{
    return p->tasks <= count_clusters();
}

/* The cluster's work tile n, from a counter which `prepare` clears. Clusters wait for others, which add to the
 * sums before: with the counter, work tiles with lower numbers belong to clusters that have started. */
FA_DEVICE int64_t take_work_tile(const fa_attention_params *p, const fa_backward_sm90_params *s,
                                 int n)
{
    if (has_one_work_tile(p)) return n == 0 ? this_cluster() : p->tasks;
    if (!s->next_work) return this_cluster() + n * count_clusters(); /* there are no queries */
    return (int64_t)atomicInc(s->next_work, UINT32_MAX);
}

/* The same for both blocks. Executed by one thread of each. The number is sent as the bits of a float. */
FA_DEVICE int64_t share_work_tile(const pipeline *pipe, const fa_attention_params *p,
                                  const fa_backward_sm90_params *s, int n)
{
    shared_state *state = pipe->state;
    uint64_t *full = &state->number_full[n % WORKS], *empty = &state->number_empty[n % WORKS];
    float *at = (float *)(void *)(pipe->buffers + NUMBERS_AT + n % WORKS * 4);
    if (THIS_BLOCK == 0) {
        const int64_t number = fa_min64(take_work_tile(p, s, n), p->tasks);
        ptx_mbarrier_wait(empty, work_parity(n) ^ 1);
        ptx_store_to_peer(at, full, PEER_BLOCK, __int_as_float((int)number));
        return number;
    }
    ptx_mbarrier_arrive_expect(full, (int)sizeof *at);
    ptx_mbarrier_wait(full, work_parity(n));
    const int number = __float_as_int(*(volatile float *)at);
    ptx_mbarrier_arrive_peer_if(empty, PEER_BLOCK, 1);
    return number;
}

/* The warp that loads keys and queries, and describes the work tiles. */
FA_DEVICE void load_work_tiles(const pipeline *block, const fa_attention_params *p,
                               const fa_backward_sm90_params *s)
{
    shared_state *state = block->state;
    pipeline own = *block;
    const block_work *before = NULL;
#pragma unroll 1
    for (int n = 0;; n++) {
        block_work *w = &state->works[n % WORKS];
        ptx_mbarrier_wait(&state->work_empty[n % WORKS], work_parity(n) ^ 1);
        if (threadIdx.x % 32 == 0) {
            describe(p, s, share_work_tile(block, p, s, n), before, before ? end_count(before) : 0,
                     w);
            ptx_mbarrier_arrive(&state->work_full[n % WORKS]);
        }
        __syncwarp();
        if (w->ends) return;
        own.work = before = w;
        load_keys_and_queries(&own, p, s);
        __syncwarp();
    }
}

#endif

#endif
