/*
 * Attention forward on Hopper's tensor cores for float32. Operands are rounded to tf32; sums are
 * float32.
 *
 * The kernel is persistent, with the scheduler and softmax of forward_sm90. In tf32, wgmma ignores
 * the last 13 bits of a float32 number, and reads both operands along their rows. So TMA rounds
 * what it loads, by the type of the tensor maps. Between the loads and the products three warps,
 * the transposers, transpose the values in place.
 *
 *   load warp     warp 0: describes work tiles, loads by TMA  producer.cuh
 *   transposers   warps 1 to 3                                transpose.cuh
 *   consumers     warpgroups of 64 queries each               consumer.cuh, multiply.cuh, store.cuh
 *
 * config.cuh lists the compile-time parameters.
 */
#include "forward_tf32_sm90/config.cuh"
#include "forward_tf32_sm90/pipeline.cuh"
#include "forward_tf32_sm90/consumer.cuh"
#include "forward_tf32_sm90/producer.cuh"
#include "forward_tf32_sm90/transpose.cuh"
#include "forward_sm90/scheduler.cuh"
#include "forward_sm90/warp.cuh"
#include "ptx/address.cuh"
#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/wgmma.cuh"

/* The producer warpgroup's warps. */
enum { WARP_LOAD, WARP_TRANSPOSE };
static_assert(WARP_TRANSPOSE + TRANSPOSERS == WARPS, "they are of one warpgroup");

FA_KERNEL __launch_bounds__(THREADS, 1)
    forward_tf32_sm90(const __grid_constant__ fa_attention_params p,
                      const __grid_constant__ fa_sm90_params s)
{
    FA_DYNAMIC_SHARED(raw);
    __shared__ shared_state shared;
    shared_state *state = (shared_state *)ptx_uniform_pointer(&shared);
    char *q = (char *)raw + (-ptx_shared_address(raw) & 1023);
    char *tiles = q + CONSUMERS * Q_BYTES;
    const pipeline pipe = {.q = q,
                           .tiles = tiles,
                           .descriptor = ptx_uniform(ptx_descriptor_low(tiles, 0)),
                           .queue = (work_tile *)ptx_uniform_pointer(tiles + STAGES * TILE_BYTES),
                           .state = state};
    if (threadIdx.x == 0) init_barriers(state);
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        ptx_decrease_registers(PRODUCER_REGISTERS);
        const int warp = warp_uniform(threadIdx.x / 32);
        if (warp == WARP_LOAD) load_all(&pipe, &p, &s);
        else transpose_all(&pipe, &p, warp - WARP_TRANSPOSE);
    } else {
        ptx_increase_registers(CONSUMER_REGISTERS);
        consume(&pipe, &p, &s, warp_uniform(threadIdx.x / WARPGROUP - 1));
    }
}
