/*
 * The state that the warps of a block share. It replaces forward_sm90/pipeline.cuh, which explains
 * the barriers.
 *
 *     barriers              stages                    filled by            released by
 *     entry_full, _empty    QUEUE_ENTRIES work tiles  scheduler warp       producers, consumers
 *     q_full, q_empty       1 for each consumer       TMA, query warp      the consumer
 *     full, empty           STAGES chunks             TMA, key/value warp  all consumers
 *     weights_full, _empty  1 for each consumer       consumer and peer    both of them
 *     max_full, sums_full   1 for each consumer       the peer             (see exchange.cuh)
 */
#ifndef FA_KERNELS_FORWARD_SM90_WIDE_PIPELINE_CUH
#define FA_KERNELS_FORWARD_SM90_WIDE_PIPELINE_CUH

#ifdef FA_KERNELS_FORWARD_SM90_PIPELINE_CUH
#error "include forward_sm90_wide/pipeline.cuh before the parts of forward_sm90"
#endif
#define FA_KERNELS_FORWARD_SM90_PIPELINE_CUH

#include "forward_sm90_wide/config.cuh"
#include "common/device.cuh"
#include "forward_sm90/work_tile.cuh"
#include "ptx/barrier.cuh"

typedef struct shared_state {
    work_tile queue[QUEUE_ENTRIES];
    uint64_t entry_full[QUEUE_ENTRIES], entry_empty[QUEUE_ENTRIES];
    uint64_t q_full[Q_STAGES][CONSUMERS], q_empty[Q_STAGES][CONSUMERS];
    uint64_t full[STAGES], empty[STAGES];
    uint64_t v_loaded; /* values that the producer clears in part before it fills the stage */
    uint64_t max_full[CONSUMERS], sums_full[CONSUMERS];
    uint64_t weights_full[CONSUMERS], weights_empty[CONSUMERS];
} shared_state;

/* Numbers of rows, from the peer. */
typedef struct received_rows {
    float max[CONSUMERS][ROWS], sums[CONSUMERS][ROWS];
} received_rows;
static_assert(sizeof(received_rows) == FA_SM90_WIDE_EXCHANGE(CONSUMERS),
              "the planner reserves so many bytes");

typedef struct pipeline {
    char *q, *chunks, *weights; /* CONSUMERS tiles of q and of weights, STAGES chunks */
    received_rows *received;
    work_tile *queue; /* QUEUE_ENTRIES work tiles, described ahead */
    shared_state *state;
} pipeline;

FA_DEVICE void init_barriers(shared_state *state)
{
    for (int c = 0; c < CONSUMERS; c++) {
        ptx_mbarrier_init(&state->q_full[0][c], 1);
        ptx_mbarrier_init(&state->q_empty[0][c], WARPS);
        ptx_mbarrier_init(&state->max_full[c], WARPS);
        ptx_mbarrier_init(&state->sums_full[c], WARPS);
        ptx_mbarrier_init(&state->weights_full[c], WARPS);
        ptx_mbarrier_init(&state->weights_empty[c], CLUSTER * WARPS);
    }
    for (int stage = 0; stage < STAGES; stage++) {
        ptx_mbarrier_init(&state->full[stage], 1);
        ptx_mbarrier_init(&state->empty[stage], CONSUMERS * WARPS);
    }
    ptx_mbarrier_init(&state->v_loaded, 1);
    for (int entry = 0; entry < QUEUE_ENTRIES; entry++) {
        ptx_mbarrier_init(&state->entry_full[entry], 1);
        ptx_mbarrier_init(&state->entry_empty[entry], CONSUMERS * WARPS + 2);
    }
    ptx_mbarrier_init_fence();
}

#endif
