/*
 * Attention forward on Hopper's tensor cores for float32, with float32's errors: each operand is
 * the sum of two float16 numbers, and a product is three products of these.
 *
 * The kernel is persistent, with the scheduler of forward_sm90 and the roles of forward_tf32_sm90.
 * TMA loads float32 tiles. Between the loads and the products some warps, the splitters, split keys
 * and values in shared memory, in place; consumers split their queries and weights.
 *
 * The blocks of a cluster of two share the work on wide heads: each has half of the columns of
 * queries, keys and values. They send each other their scores, which are sums over columns, and
 * each computes the outputs of its own columns of values. So only the softmax is computed twice.
 *
 *   load warp     warp 0: describes work tiles, loads by TMA  producer.cuh
 *   splitters     warps 1 to 7                                split.cuh, parts.cuh
 *   consumers     two warpgroups of 64 queries                consumer.cuh, queries.cuh,
 *                                                             multiply.cuh, softmax.cuh,
 *                                                             exchange.cuh
 *
 * config.cuh lists the compile-time parameters.
 */
#include "forward_f16x3_sm90/config.cuh"
#include "forward_f16x3_sm90/pipeline.cuh"
#include "forward_f16x3_sm90/consumer.cuh"
#include "forward_f16x3_sm90/producer.cuh"
#include "forward_f16x3_sm90/split.cuh"
#include "forward_sm90/scheduler.cuh"
#include "forward_sm90/warp.cuh"
#include "ptx/address.cuh"
#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/wgmma.cuh"

/* The producers' warps. */
enum { WARP_LOAD, WARP_SPLIT };
static_assert(WARP_SPLIT + SPLITTERS == PRODUCERS * WARPS, "they are whole warpgroups");

#if CLUSTER > 1
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMS
#endif

FA_KERNEL CLUSTER_DIMS __launch_bounds__(THREADS, 1)
    forward_f16x3_sm90(const __grid_constant__ fa_attention_params p,
                       const __grid_constant__ fa_sm90_params s)
{
    FA_DYNAMIC_SHARED(raw);
    __shared__ shared_state shared;
    shared_state *state = (shared_state *)ptx_uniform_pointer(&shared);
    char *q = (char *)raw + (-ptx_shared_address(raw) & 1023);
    char *tiles = q + CONSUMERS * Q_BYTES;
#if CLUSTER > 1
    char *received = tiles + STAGES * CHUNK;
    const pipeline pipe = {
        .q = q,
        .tiles = tiles,
        .descriptor = ptx_uniform(ptx_descriptor_low_in_cluster(tiles, 0)),
        .received = (float *)ptx_uniform_pointer(received),
        .queue = (work_tile *)ptx_uniform_pointer(received + CONSUMERS * RECEIVED_BYTES),
        .state = state};
    if (threadIdx.x == 0) init_barriers(state);
    ptx_cluster_sync(); /* the peer's barriers are initialized as well */
#else
    const pipeline pipe = {.q = q,
                           .tiles = tiles,
                           .descriptor = ptx_uniform(ptx_descriptor_low(tiles, 0)),
                           .queue = (work_tile *)ptx_uniform_pointer(tiles + STAGES * CHUNK),
                           .state = state};
    if (threadIdx.x == 0) init_barriers(state);
    __syncthreads();
#endif
    if (threadIdx.x < PRODUCERS * WARPGROUP) {
        ptx_decrease_registers(PRODUCER_REGISTERS);
        const int warp = warp_uniform(threadIdx.x / 32);
        if (warp == WARP_LOAD) load_all(&pipe, &p, &s);
        else split_all(&pipe, &p, &s, warp - WARP_SPLIT);
    } else {
        ptx_increase_registers(CONSUMER_REGISTERS);
        consume(&pipe, &p, &s, warp_uniform(threadIdx.x / WARPGROUP - PRODUCERS));
    }
#if CLUSTER > 1
    ptx_cluster_sync(); /* the peer may still send something here */
#endif
}
