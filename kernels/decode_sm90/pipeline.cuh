/*
 * The state that the warps of a block share: a ring of stages, in which tiles of keys and of values
 * alternate.
 *
 *     K 0   V 0   K 1   V 1   K 2 ...        (head dim 256: two stages each)
 *
 * The producer fills a stage by TMA or by copies; a phase of its full barrier ends when the bytes have arrived.
 * The consumers release it by its empty barrier, with one lane of each warp.
 */
#ifndef FA_KERNELS_DECODE_SM90_PIPELINE_CUH
#define FA_KERNELS_DECODE_SM90_PIPELINE_CUH

#include "decode_sm90/config.cuh"

#include "decode_sm80/key_tiles.cuh"
#include "decode_sm80/merge.cuh"
#include "decode_sm80/work.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

#if PERSISTENT
/* The state of a group. The producer describes the next part while the consumers still work on the previous one. */
enum { WORKS = 2 };
typedef struct shared_state {
    fa_work work[WORKS];
    fa_result results[ROWS];
    uint64_t full[MOST_STAGES], empty[MOST_STAGES], work_full[WORKS], work_empty[WORKS];
} shared_state;
static_assert(sizeof(shared_state) <= FA_DECODE_SM90_STATE, "the planner's bytes");
#else
typedef struct shared_state {
    fa_work work;
    uint64_t full[MOST_STAGES], empty[MOST_STAGES];
#if !EIGHT_BITS
    fa_result results[ROWS];
#endif
} shared_state;
static_assert(sizeof(shared_state) <= STATIC_SMEM, "the planner's bytes beside the dynamic ones");
#endif

typedef struct pipeline {
#if EIGHT_BITS
    char *q, *stages;
#else
    char *q, *weights, *stages;
    float *exchange;
#endif
    shared_state *state;
    int count; /* stages */
} pipeline;

/* A place in the ring. */
typedef struct fa_place {
    int stage, parity;
} fa_place;

FA_DEVICE void go_on(const pipeline *pipe, fa_place *at)
{
    const bool wraps = ++at->stage == pipe->count;
    if (wraps) at->stage = 0, at->parity ^= 1;
}

FA_DEVICE char *stage_at(const pipeline *pipe, const fa_place *at)
{
    return pipe->stages + at->stage * STAGE_BYTES;
}

#if EIGHT_BITS
/* The scales of the stage's keys, which lie after the stages. */
FA_DEVICE uint32_t scales_at(const pipeline *pipe, const fa_place *at)
{
    return ptx_shared_address(pipe->stages) +
           (uint32_t)(pipe->count * STAGE_BYTES + at->stage * SCALE_BYTES);
}
#else
/* The lower half of the stage's descriptor, in a uniform register, where products need it. */
FA_DEVICE uint32_t descriptor_of(const pipeline *pipe, const fa_place *at)
{
    return ptx_uniform(ptx_descriptor_low(stage_at(pipe, at), 0));
}
#endif

/* Arrivals that fill a stage, in addition to its bytes: also one of each thread that copies. */
enum { FILLERS = COPIED ? THREADS - CONSUMER_THREADS : EIGHT_BITS ? 1 + 32 : 1 };

FA_DEVICE void init_barriers(shared_state *state, int stages)
{
    for (int i = 0; i < stages; i++) {
        ptx_mbarrier_init(&state->full[i], FILLERS);
        ptx_mbarrier_init(&state->empty[i], CONSUMER_WARPS);
    }
#if PERSISTENT
    for (int i = 0; i < WORKS; i++) {
        ptx_mbarrier_init(&state->work_full[i], 1);
        ptx_mbarrier_init(&state->work_empty[i], 1);
    }
#endif
    ptx_mbarrier_init_fence();
}

FA_DEVICE void acquire(const pipeline *pipe, const fa_place *at)
{
    ptx_mbarrier_wait(&pipe->state->full[at->stage], at->parity);
    if (COPIED) ptx_fence_proxy_async(); /* products read what threads have copied */
}

/* All stages of the tile at this place. */
FA_DEVICE void acquire_tile(const pipeline *pipe, fa_place at)
{
#pragma unroll
    for (int i = 0; i < TILE_STAGES; i++, go_on(pipe, &at)) acquire(pipe, &at);
}

FA_DEVICE void release(const pipeline *pipe, const fa_place *at)
{
    ptx_mbarrier_arrive_if(&pipe->state->empty[at->stage], lane_id() == 0);
}

FA_DEVICE void release_tile(const pipeline *pipe, fa_place at)
{
#pragma unroll
    for (int i = 0; i < TILE_STAGES; i++, go_on(pipe, &at)) release(pipe, &at);
}

#endif
