/*
 * Attention forward on Hopper's tensor cores for head dims of 257 to 512: float16 and bfloat16,
 * float32 sums, only masks by position and lengths.
 *
 * For these head dims the outputs of 64 queries do not fit into a warpgroup's registers. So the two
 * blocks of a cluster share each work tile of 128 queries, and each computes half of the columns of
 * the outputs. Each computes the scores of half of a tile's keys. They send each other the max of
 * each row (exchange.cuh), so that both use the same base, and the weights, through shared memory.
 * So a block loads half of the keys and half of the values' columns of each tile, and nothing is
 * computed twice.
 *
 * The kernel is persistent, with the warp roles, scheduler and softmax of forward_sm90. Keys and
 * values are loaded in chunks through one circular pipeline of STAGES stages (producer.cuh),
 * because two whole tiles would not fit in addition to the queries.
 *
 *     producer   warp 0 loads keys and values, warp 1 queries, by TMA   producer.cuh
 *     scheduler  warp 2 describes the block's work tiles ahead          forward_sm90/scheduler.cuh
 *     consumers  two warpgroups of 64 queries each                      consumer.cuh
 *
 * config.cuh lists the compile-time parameters.
 */
#include "forward_sm90_wide/config.cuh"
#include "forward_sm90_wide/consumer.cuh"
#include "forward_sm90_wide/pipeline.cuh"
#include "forward_sm90_wide/producer.cuh"
#include "forward_sm90/scheduler.cuh"
#include "forward_sm90/warp.cuh"
#include "ptx/address.cuh"
#include "ptx/barrier.cuh"
#include "ptx/grid.cuh"
#include "ptx/registers.cuh"

/* The producer warpgroup's warps. */
enum { WARP_KEYS_AND_VALUES, WARP_QUERIES, WARP_SCHEDULER };

FA_KERNEL __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    forward_sm90_wide(const __grid_constant__ fa_attention_params p,
                      const __grid_constant__ fa_sm90_params s)
{
    FA_DYNAMIC_SHARED(raw);
    __shared__ shared_state state;
    char *q = (char *)raw + (-ptx_shared_address(raw) & 1023), *chunks = q + CONSUMERS * Q_BYTES;
    char *weights = chunks + STAGES * CHUNK;
    const pipeline pipe = {.q = q,
                           .chunks = chunks,
                           .weights = weights,
                           .received = (received_rows *)(weights + CONSUMERS * P_BYTES),
                           .queue = state.queue,
                           .state = &state};
    if (threadIdx.x == 0) init_barriers(&state);
    ptx_cluster_sync(); /* the peer's barriers are initialized as well */
#if ROUNDED
    ptx_wait_for_grids();
#endif
    if (threadIdx.x < WARPGROUP) {
        ptx_decrease_registers(PRODUCER_REGISTERS);
        if (threadIdx.x < 32 * (WARP_KEYS_AND_VALUES + 1)) produce_keys_and_values(&pipe, &p, &s);
        else if (threadIdx.x < 32 * (WARP_QUERIES + 1)) produce_queries(&pipe, &s);
        else if (threadIdx.x < 32 * (WARP_SCHEDULER + 1)) schedule(&pipe, &p, &s);
    } else {
        ptx_increase_registers(CONSUMER_REGISTERS);
        consume(&pipe, &p, &s, warp_uniform(threadIdx.x / WARPGROUP - 1));
    }
    ptx_cluster_sync(); /* the peer may still send something here */
}
