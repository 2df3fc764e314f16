/*
 * The state that the warps of a block share. It replaces forward_sm90/pipeline.cuh, which explains
 * the barriers.
 *
 *     barriers              stages                     filled by          released by
 *     entry_full, _empty    QUEUE_ENTRIES work tiles   load warp          all warps
 *     q_full, q_empty       1 for each consumer        TMA, load warp     the consumer
 *     loaded                STAGES                     TMA, load warp
 *     again                 1                          TMA, a splitter: a tile that is loaded again
 *     full, empty           STAGES                     the splitters      all consumers
 *     scores_full, _empty   1 for each consumer's warp the peer           the warp, for the peer
 *
 * Tiles of keys and values take the stages in turn: the keys of each tile, then its values. Or
 * chunks of them do, each of some of the block's columns. The last line of the table is for
 * clusters (exchange.cuh).
 */
#ifndef FA_KERNELS_FORWARD_F16X3_SM90_PIPELINE_CUH
#define FA_KERNELS_FORWARD_F16X3_SM90_PIPELINE_CUH

#ifdef FA_KERNELS_FORWARD_SM90_PIPELINE_CUH
#error "include forward_f16x3_sm90/pipeline.cuh before the parts of forward_sm90"
#endif
#define FA_KERNELS_FORWARD_SM90_PIPELINE_CUH

#include "forward_f16x3_sm90/config.cuh"
#include "common/device.cuh"
#include "forward_sm90/stage.cuh"
#include "forward_sm90/work_tile.cuh"
#include "ptx/barrier.cuh"

/* Named barriers. */
enum {
    NAMED_BARRIER_BLOCK,     /* of __syncthreads */
    NAMED_BARRIER_SPLITTERS, /* where they exchange a tile's largest element */
    /* Of consumer 0, and so on: where it waits until it has split its queries. */
    NAMED_BARRIER_QUERIES
};

/* The bits of the largest and of the smallest number among the largest elements of the rows that a
 * splitter has seen. */
typedef struct splitter_range {
    uint32_t largest, smallest;
} splitter_range;

typedef struct shared_state {
    uint64_t entry_full[QUEUE_ENTRIES], entry_empty[QUEUE_ENTRIES];
    uint64_t q_full[Q_STAGES][CONSUMERS], q_empty[Q_STAGES][CONSUMERS];
    uint64_t loaded[STAGES], again, full[STAGES], empty[STAGES];
    float unit[STAGES];                  /* the unit of a tile that has been split */
    splitter_range ranges[2][SPLITTERS]; /* exchanges alternate between the two */
#if CLUSTER > 1
    uint64_t scores_full[CONSUMERS][WARPS], scores_empty[CONSUMERS][WARPS];
#endif
} shared_state;

typedef struct pipeline {
    char *q, *tiles;     /* CONSUMERS tiles of queries, STAGES chunks of keys or values */
    uint32_t descriptor; /* of the first of these, for wgmma */
#if CLUSTER > 1
    float *received; /* CONSUMERS tiles of scores, from the peers */
#endif
    work_tile *queue; /* QUEUE_ENTRIES work tiles, described ahead */
    shared_state *state;
} pipeline;

FA_DEVICE void init_barriers(shared_state *state)
{
    for (int c = 0; c < CONSUMERS; c++) {
        ptx_mbarrier_init(&state->q_full[0][c], 1);
        ptx_mbarrier_init(&state->q_empty[0][c], WARPS);
#if CLUSTER > 1
        for (int warp = 0; warp < WARPS; warp++) {
            ptx_mbarrier_init(&state->scores_full[c][warp], 1);
            ptx_mbarrier_init(&state->scores_empty[c][warp], 1);
        }
#endif
    }
    for (int stage = 0; stage < STAGES; stage++) {
        ptx_mbarrier_init(&state->loaded[stage], 1);
        ptx_mbarrier_init(&state->full[stage], SPLITTERS);
        ptx_mbarrier_init(&state->empty[stage], CONSUMERS * WARPS);
    }
    ptx_mbarrier_init(&state->again, 1);
    for (int entry = 0; entry < QUEUE_ENTRIES; entry++) {
        ptx_mbarrier_init(&state->entry_full[entry], 1);
        ptx_mbarrier_init(&state->entry_empty[entry], CONSUMERS * WARPS + 1 + SPLITTERS);
    }
    ptx_mbarrier_init_fence();
}

#endif
