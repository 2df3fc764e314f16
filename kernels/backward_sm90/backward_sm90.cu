/*
 * Backward on Hopper's tensor cores (wgmma) with TMA, for float16 and bfloat16. It computes all
 * gradients in one pass over the tiles (FlashAttention-2, algorithm 2, arXiv:2307.08691). It
 * supports masks by position, lengths, and heads that share keys; the variants with OPTIONS also
 * support all options of the scores (options.cuh).
 *
 * A block owns KEYS keys of one key/value head and goes through the tiles of queries that see some
 * of them, for all query heads that share the keys. So dK and dV stay in registers and are written
 * once. dQ is added to float32 sums in global memory, which another kernel rounds (finish.cu). The
 * warps of a block have roles:
 *
 *     load       keys, values; tiles of queries and of dout, by TMA     producer.cuh
 *     store dQ   a warp for each consumer's columns, by TMA; also dbias producer.cuh
 *     load bias  where TMA can                                          producer.cuh
 *     clear      zeros in sums of dQ that later blocks add to           clear_ahead.cuh
 *     scheduler  of a persistent block: describes its work tiles; of a  schedule.cuh
 *                ROUNDING one the load warp does, and three store dQ
 *     consumers  two warpgroups of 64 keys each                         consumer.cuh, multiply.cuh
 *
 * A JOINED variant has three kinds of blocks; these are the blocks that multiply (joined.cuh).
 *
 * The blocks of a CHAINED variant pass sums of dQ on instead (chain.cuh).
 *
 * The roles synchronize by the barriers of pipeline.cuh. consume_tile in consumer.cuh computes a
 * tile. config.cuh lists the compile-time parameters, and docs/kernels/backward_sm90.md gives the
 * reasons for this design.
 */
#include "backward_sm90/chain.cuh"
#include "backward_sm90/clear_ahead.cuh"
#include "backward_sm90/config.cuh"
#include "backward_sm90/consumer.cuh"
#include "backward_sm90/dbias_sums.cuh"
#include "backward_sm90/joined.cuh"
#include "backward_sm90/pipeline.cuh"
#include "backward_sm90/producer.cuh"
#include "backward_sm90/schedule.cuh"
#include "backward_sm90/work.cuh"
#include "ptx/grid.cuh"
#include "ptx/registers.cuh"

/* The producer warpgroup's warps. */
enum {
    WARP_LOAD,
    WARP_STORE_DQ /* STORE_WARPS warps */,
    WARP_BIAS = WARPS - 1,
    WARP_CLEAR = WARPS - 1,
    WARP_SCHEDULER = WARPS - 1
};

FA_KERNEL __launch_bounds__(THREADS, 1)
    backward_sm90(const __grid_constant__ fa_backward_params p,
                  const __grid_constant__ fa_backward_sm90_params s)
{
    FA_DYNAMIC_SHARED(raw);
    __shared__ shared_state shared;
    const pipeline pipe = {
        .buffers = (char *)raw + (-ptx_shared_address(raw) & 1023),
        .state = (shared_state *)ptx_uniform_pointer(&shared),
#if BIAS_TILE
        .bias_mapped = s.bias_mapped != 0,
        .dbias_mapped = s.dbias_mapped
#endif
    };
#if FA_BACKWARD_SM90_RELIES(HEAD_DIM, OPTIONS, PERSISTENT, CHAINED)
    if (pipe.buffers - (char *)raw > FA_BACKWARD_SM90_PADDING(1)) __trap();
#endif
#if CHAINED
    if (threadIdx.x == 0) begin_chain(&shared, &s);
    ptx_cluster_arrive_relaxed();
#endif
#if PERSISTENT
    if (threadIdx.x == 0) {
        init_barriers(&shared);
        prefetch_maps(&s);
        ptx_fence_proxy_async(); /* of the barriers */
    }
#else
#if JOINED
    const joined_block joined = find_joined_block(&p.a, &s, blockIdx.x);
    if (joined.kind != BLOCK_MULTIPLIES) {
        ptx_wait_for_grids();
        ptx_let_next_grid_start();
        if (joined.kind == BLOCK_PREPARES) prepare_slice(&p, &s, joined.number);
        else finish_slice(&p, &s, joined.number);
        return;
    }
    const int64_t number = joined.number;
#else
    const int64_t number = blockIdx.x;
#endif
    const bool loads =
        threadIdx.x < WARPGROUP && threadIdx.x % 32 == 0 && begin_block(&pipe, &p.a, &s, number);
#if CHAINED
    if (threadIdx.x >= WARPGROUP && s.prepares) prepare_own_rows(&pipe, &p, &s, number);
#endif
#if JOINED
    /* A thread of a consumer waits, because the consumers have nothing to do yet. */
    if (threadIdx.x == WARPGROUP) wait_until_prepared(&p.a, &s, number);
#endif
#endif
    __syncthreads();
#if CHAINED
    join_chain(&s);
#endif
    /* The scheduler warp and the load warp of a persistent block wait later. */
    if (!PERSISTENT ||
        (threadIdx.x / 32 != WARP_LOAD && (LOADER_SCHEDULES || threadIdx.x / 32 != WARP_SCHEDULER)))
        ptx_wait_for_grids();
    ptx_let_next_grid_start();
    if (threadIdx.x < WARPGROUP) {
        const int warp = (int)threadIdx.x / 32;
        ptx_decrease_registers(PRODUCER_REGISTERS);
#if PERSISTENT
        if (warp == WARP_LOAD) produce_work_tiles(&pipe, &p.a, &s);
#if !LOADER_SCHEDULES
        else if (warp == WARP_SCHEDULER) schedule(&pipe, &p.a, &s);
#endif
        else if (threadIdx.x % 32 == 0) store_work_tiles(&pipe, &p, &s, warp - WARP_STORE_DQ);
#else
        if (warp == WARP_LOAD) {
            if (shared.works[0].tiles > 0) produce(&pipe, &p.a, &s, 0, NULL);
            else if (loads) wait_for_keys(&pipe);
#if BIAS_TILE
            if (leaves_ds(&pipe) && threadIdx.x % 32 == 0) load_left(&pipe, &p, &s);
#endif
        } else if (warp - WARP_STORE_DQ < STORE_WARPS && threadIdx.x % 32 == 0) {
#if BIAS_TILE
            if (leaves_ds(&pipe)) wait_for_room(&s);
#endif
            store_dq(&pipe, &p, &s, warp - WARP_STORE_DQ);
#if JOINED
            count_additions(&pipe, &s);
#endif
#if BIAS_TILE
            if (leaves_ds(&pipe)) count_left(&pipe, &s);
#endif
        }
#if CLEARS_AHEAD
        else if (warp == WARP_CLEAR)
            clear_ahead(&s, (int)number);
#endif
#if BIAS_TILE
        else if (warp == WARP_BIAS && threadIdx.x % 32 == 0 && has_bias_map(&pipe))
            produce_bias(&pipe, &s);
#endif
#endif
    } else {
        ptx_increase_registers(CONSUMER_REGISTERS);
        consume(&pipe, &p, __shfl_sync(0xffffffff, (int)threadIdx.x / WARPGROUP - 1, 0));
#if BIAS_TILE
        if (leaves_ds(&pipe)) add_left(&pipe, &p, &s);
#endif
    }
}
