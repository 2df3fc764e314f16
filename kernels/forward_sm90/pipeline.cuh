/*
 * The state that the warps of a block share: the stages in dynamic shared memory, and the barriers by which stages
 * are acquired and released.
 *
 * Each kind of stage has two mbarriers. A phase of the full barrier ends when the data have arrived: the producer
 * arrives, and TMA's bytes count. A phase of the empty barrier ends when the consumers have released the stage: one
 * lane of each of their warps arrives.
 *
 *     barriers              stages                          filled by                 released by
 *     entry_full, _empty    QUEUE_ENTRIES work tiles        scheduler warp            producers, all consumers
 *     first_full            the first keys, with sections   scheduler warp            (used once)
 *     q_full, q_empty       Q_STAGES for each consumer      TMA, query and key warp   the consumer
 *     k_full, k_empty       STAGES                          TMA, query and key warp   all consumers
 *     v_full, v_empty       STAGES                          TMA, value warp           all consumers
 *     bias_full, _empty     1 for each consumer             TMA, bias warp            the consumer
 *
 * With COPIED the last warpgroup's copies arrive at k_copied and v_copied; from there a warp lets consumers have the stages
 * (copy.cuh).
 */
#ifndef FA_KERNELS_FORWARD_SM90_PIPELINE_CUH
#define FA_KERNELS_FORWARD_SM90_PIPELINE_CUH

#include "forward_sm90/config.cuh"
#include "common/device.cuh"
#include "forward_sm90/work_tile.cuh"
#include "ptx/barrier.cuh"

/* Named barriers. */
enum {
    NAMED_BARRIER_BLOCK, /* of __syncthreads */
    NAMED_BARRIER_ISSUE, /* of consumer 0, and so on: where it waits until it may issue products (multiply.cuh) */
};

typedef struct shared_state {
    uint64_t entry_full[QUEUE_ENTRIES], entry_empty[QUEUE_ENTRIES];
    uint64_t q_full[Q_STAGES][CONSUMERS], q_empty[Q_STAGES][CONSUMERS];
    uint64_t k_full[STAGES], v_full[STAGES], k_empty[STAGES], v_empty[STAGES];
#if COPIED
    uint64_t k_copied[STAGES], v_copied[STAGES];
#endif
    uint64_t v_loaded; /* values that the value warp clears in part before it fills the stage */
    /* The block's tasks of the balanced schedule, and how many (balance.cuh). */
    int32_t balanced[FA_SM90_MAX_BALANCED_TASKS], balanced_count;
    uint64_t balanced_full;
    uint32_t new_max[CONSUMERS][2]; /* counts of tiles that had a new max: consumer.cuh */
#if SPLIT
    work_tile first; /* with sections: which queries and keys the first work tile has */
    uint64_t first_full;
#endif
#if OPTIONS & FA_SM90_BIAS
    uint64_t bias_full[CONSUMERS], bias_empty[CONSUMERS];
#endif
} shared_state;

typedef struct pipeline {
    char *q, *k, *v; /* Q_STAGES times CONSUMERS tiles of q, STAGES tiles of k and of v */
    uint32_t k_descriptor, v_descriptor; /* of the first ones, for wgmma */
    char *out_buffer;                    /* OUT_BUFFER bytes */
#if OPTIONS & FA_SM90_BIAS
    char *bias; /* a tile of it for each consumer */
#endif
    work_tile *queue; /* QUEUE_ENTRIES work tiles, described ahead */
#if ROUNDED
    const fa_attention_params *p;
    const fa_sm90_params *s;
#endif
    shared_state *state;
} pipeline;

/* queue_readers: warps that read the queue, besides the consumers'. */
FA_DEVICE void init_barriers(shared_state *state, int queue_readers)
{
    for (int i = 0; i < Q_STAGES * CONSUMERS; i++) {
        ptx_mbarrier_init(&state->q_full[0][i], 1);
        ptx_mbarrier_init(&state->q_empty[0][i], WARPS);
    }
    for (int i = 0; i < CONSUMERS * 2; i++) state->new_max[0][i] = UINT32_MAX / 2;
    for (int stage = 0; stage < STAGES; stage++) {
        ptx_mbarrier_init(&state->k_full[stage], 1);
        ptx_mbarrier_init(&state->v_full[stage], 1);
        ptx_mbarrier_init(&state->k_empty[stage], CONSUMERS * WARPS);
        ptx_mbarrier_init(&state->v_empty[stage], CONSUMERS * WARPS);
#if COPIED
        ptx_mbarrier_init(&state->k_copied[stage], WARPGROUP);
        ptx_mbarrier_init(&state->v_copied[stage], WARPGROUP);
#endif
    }
    ptx_mbarrier_init(&state->v_loaded, 1);
    ptx_mbarrier_init(&state->balanced_full, 1);
#if SPLIT
    ptx_mbarrier_init(&state->first_full, 1);
#endif
    for (int entry = 0; entry < QUEUE_ENTRIES; entry++) {
        ptx_mbarrier_init(&state->entry_full[entry], 1);
        ptx_mbarrier_init(&state->entry_empty[entry], CONSUMERS * WARPS + queue_readers);
    }
#if OPTIONS & FA_SM90_BIAS
    for (int c = 0; c < CONSUMERS; c++) {
        ptx_mbarrier_init(&state->bias_full[c], 1);
        ptx_mbarrier_init(&state->bias_empty[c], WARPS);
    }
#endif
    ptx_mbarrier_init_fence();
}

#endif
