/*
 * backward_sm90 for head dims from 129 to 256, whose gradients of 128 keys are more than a block's
 * registers.
 *
 * A block owns BLOCK_KEYS keys of one key/value head. The two blocks of a cluster have neighbouring
 * keys. Both go through the query tiles that see some of these keys, of all heads that share them,
 * and exchange dS. So dQ is summed over twice the keys before it is added to global memory, and is
 * added half as often. Each gradient has a warpgroup, and a tile goes from one to the next:
 *
 *     load    keys and queries, values and dout: a warp each, by TMA           load.cuh
 *     dV      S^T, P^T, and adds to dV, in registers; P^T --> shared memory    dv.cuh
 *     dK      dP^T, dS^T, and adds to dK, in registers; dS --> shared memory   dk.cuh
 *     dQ      dQ, which it adds to a float32 sum in global memory              dq.cuh
 *     send    dS, to the other block                                           exchange.cuh
 *     clear   zeros in sums of dQ that later blocks add to: a warp             clear_ahead.cuh of
 *                                                                              backward_sm90
 *
 * A PERSISTENT cluster takes work tile after work tile (schedule.cuh). Each role goes through them by
 * itself, so that it begins with the next one while others end the one before.
 *
 * While one warpgroup computes exponentials, the tensor cores work for the others. The warpgroups
 * synchronize by the barriers of pipeline.cuh. config.cuh lists the compile-time parameters.
 * docs/kernels/backward_sm90.md gives the reasons for this design.
 */
#include "backward_sm90_wide/config.cuh"
#include "backward_sm90_wide/pipeline.cuh"
#include "backward_sm90_wide/dk.cuh"
#include "backward_sm90_wide/dq.cuh"
#include "backward_sm90_wide/dv.cuh"
#include "backward_sm90_wide/exchange.cuh"
#include "backward_sm90_wide/load.cuh"
#include "backward_sm90_wide/schedule.cuh"
#include "backward_sm90/clear_ahead.cuh"
#include "backward_sm90/work.cuh"
#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"

enum { WARPGROUP_LOAD, WARPGROUP_DV, WARPGROUP_DK, WARPGROUP_DQ };

/* The warps of the first warpgroup. */
enum {
    WARP_KEYS_AND_QUERIES,
    WARP_VALUES_AND_DOUT,
    WARP_SEND_DS,
    WARP_TURNS,
    WARP_CLEAR = WARP_TURNS /* sums are cleared, or they have one order */
};

/* A warp of the first warpgroup, at one work tile. */
FA_DEVICE void load_or_send(const pipeline *pipe, const fa_backward_params *p,
                            const fa_backward_sm90_params *s, int warp)
{
    const bool is_first = threadIdx.x % 32 == 0;
#if CLEARS_AHEAD
    if (warp == WARP_CLEAR) clear_ahead(s, (int)blockIdx.x);
#endif
    if (work_of(pipe)->tiles == 0) return;
    if (!PERSISTENT && warp == WARP_KEYS_AND_QUERIES) load_keys_and_queries(pipe, &p->a, s);
    else if (warp == WARP_VALUES_AND_DOUT) load_values_and_dout(pipe, &p->a, s);
    else if (warp == WARP_SEND_DS && is_first) send_ds(pipe);
#if TURNS_APART
    else if (warp == WARP_TURNS && is_first && is_ordered(p, s)) take_turns(pipe, s);
#endif
    (void)is_first;
}

FA_KERNEL __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    backward_sm90_wide(const __grid_constant__ fa_backward_params p,
                       const __grid_constant__ fa_backward_sm90_params s)
{
    FA_DYNAMIC_SHARED(raw);
    __shared__ shared_state shared;
    pipeline pipe = {.buffers = (char *)raw + (-ptx_shared_address(raw) & 1023),
                     .state = (shared_state *)ptx_uniform_pointer(&shared)};
#if PERSISTENT
    if (threadIdx.x == 0) {
        init_barriers(&shared);
        prefetch_maps(&s);
        ptx_fence_proxy_async(); /* of the barriers */
    }
#else
    const bool loads = threadIdx.x < WARPGROUP && threadIdx.x % 32 == 0 &&
                       begin_block(&pipe, &p.a, &s, blockIdx.x / CLUSTER);
#endif
    ptx_cluster_arrive_relaxed();
    __syncthreads();
    const int warp = __shfl_sync(0xffffffff, (int)threadIdx.x / 32, 0), warpgroup = warp / WARPS;
    const bool reaches_peer = warp == WARP_SEND_DS || warpgroup == WARPGROUP_DQ ||
                              (PERSISTENT && warp == WARP_KEYS_AND_QUERIES);
    if (reaches_peer) ptx_cluster_wait(); /* its barriers are initialized as well */
    if (warpgroup == WARPGROUP_LOAD) {
        ptx_decrease_registers(PRODUCER_REGISTERS);
#if PERSISTENT
        if (warp == WARP_KEYS_AND_QUERIES) load_work_tiles(&pipe, &p.a, &s);
        else
#pragma unroll 1
            for (int n = 0; acquire_work_tile(&pipe, n); n++) {
                load_or_send(&pipe, &p, &s, warp);
                __syncwarp();
                release_work_tile(&pipe, n, threadIdx.x % 32 == 0);
            }
#else
        load_or_send(&pipe, &p, &s, warp);
        if (shared.works[0].tiles == 0 && loads) wait_for_keys(&pipe);
#endif
    } else if (warpgroup == WARPGROUP_DV) {
        ptx_increase_registers(DV_REGISTERS);
        compute_dv(&pipe, &p);
    } else if (warpgroup == WARPGROUP_DK) {
        ptx_increase_registers(DK_REGISTERS);
        compute_dk(&pipe, &p);
    } else {
        ptx_decrease_registers(DQ_REGISTERS);
        compute_dq(&pipe, &p, &s);
    }
    if (!reaches_peer) ptx_cluster_wait();
#if PERSISTENT
    /* The last releases of dS, too, come before the peer ends. */
    ptx_cluster_sync();
#else
    /* The block has received all that the peer sends, but the peer may still read what it sends. The
     * barrier makes no stores visible, which would take as long as all stores. */
    ptx_cluster_arrive_relaxed();
    ptx_cluster_wait();
#endif
}
