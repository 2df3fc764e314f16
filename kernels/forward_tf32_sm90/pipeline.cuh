/*
 * The state that the warps of a block share. It replaces forward_sm90/pipeline.cuh, which explains
 * the barriers.
 *
 *     barriers              stages                     filled by          released by
 *     entry_full, _empty    QUEUE_ENTRIES work tiles   load warp          all warps
 *     q_full, q_empty       1 for each consumer        TMA, load warp     the consumer
 *     full, empty           STAGES                     TMA, transposers   all consumers
 *     loaded                as many tiles of values    TMA, load warp
 *
 * Tiles of keys and values take the stages in turn, in the order in which consumers need them: the
 * keys of each tile come before the values of the previous tile. The full barrier of keys completes
 * when they have been loaded, that of values when the transposers have finished. The transposers
 * wait only for tiles of values, which have their own barriers in turn, whatever their stages are.
 * A warp that did not wait for each phase of a barrier could mistake an earlier phase for the one
 * that it needs.
 */
#ifndef FA_KERNELS_FORWARD_TF32_SM90_PIPELINE_CUH
#define FA_KERNELS_FORWARD_TF32_SM90_PIPELINE_CUH

#ifdef FA_KERNELS_FORWARD_SM90_PIPELINE_CUH
#error "include forward_tf32_sm90/pipeline.cuh before the parts of forward_sm90"
#endif
#define FA_KERNELS_FORWARD_SM90_PIPELINE_CUH

#include "forward_tf32_sm90/config.cuh"
#include "common/device.cuh"
#include "forward_sm90/work_tile.cuh"
#include "ptx/barrier.cuh"

typedef struct shared_state {
    uint64_t entry_full[QUEUE_ENTRIES], entry_empty[QUEUE_ENTRIES];
    uint64_t q_full[Q_STAGES][CONSUMERS], q_empty[Q_STAGES][CONSUMERS];
    uint64_t loaded[STAGES], full[STAGES], empty[STAGES];
} shared_state;

typedef struct pipeline {
    char *q, *tiles;     /* CONSUMERS tiles of queries, STAGES tiles of keys or values */
    uint32_t descriptor; /* of the first of these, for wgmma */
    work_tile *queue;    /* QUEUE_ENTRIES work tiles, described ahead */
    shared_state *state;
} pipeline;

/* Tiles of keys and of values are numbered through all work tiles. These are the numbers of key
 * tile `tile` of a work tile. first: the number of the work tile's first keys; tiles: how many key
 * tiles it has. */
FA_DEVICE uint32_t number_of_keys(uint32_t first, int tile)
{
    return first + (uint32_t)max(2 * tile - 1, 0);
}

FA_DEVICE uint32_t number_of_values(uint32_t first, int tile, int tiles)
{
    return first + (uint32_t)min(2 * tile + 2, 2 * tiles - 1);
}

FA_DEVICE void init_barriers(shared_state *state)
{
    for (int c = 0; c < CONSUMERS; c++) {
        ptx_mbarrier_init(&state->q_full[0][c], 1);
        ptx_mbarrier_init(&state->q_empty[0][c], WARPS);
    }
    for (int stage = 0; stage < STAGES; stage++) {
        ptx_mbarrier_init(&state->loaded[stage], 1);
        ptx_mbarrier_init(&state->full[stage], TRANSPOSERS);
        ptx_mbarrier_init(&state->empty[stage], CONSUMERS * WARPS);
    }
    for (int entry = 0; entry < QUEUE_ENTRIES; entry++) {
        ptx_mbarrier_init(&state->entry_full[entry], 1);
        ptx_mbarrier_init(&state->entry_empty[entry], CONSUMERS * WARPS + 1 + TRANSPOSERS);
    }
    ptx_mbarrier_init_fence();
}

#endif
