/*
 * What the two blocks of a cluster exchange. Each copies a tile's dS of its own keys to the same
 * place in the peer's shared memory. Each also tells the peer that it has read a buffer of dS,
 * because both blocks write to it.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_WIDE_EXCHANGE_CUH
#define FA_KERNELS_BACKWARD_SM90_WIDE_EXCHANGE_CUH

#include "backward_sm90_wide/config.cuh"
#include "backward_sm90_wide/pipeline.cuh"
#include "common/device.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"

/* Executed by one thread: sends what the dK warpgroup has stored. That warpgroup has waited until
 * the buffer was free in both blocks. */
FA_DEVICE void send_ds(const pipeline *pipe)
{
    shared_state *state = pipe->state;
    const int end = end_count(work_of(pipe));
    for (int count = first_count(work_of(pipe)); count < end; count++) {
        const int buffer = ds_buffer(count);
        uint64_t *received = &state->ds_received[buffer];
        ptx_mbarrier_wait(&state->ds_full[buffer], ds_parity(count));
        ptx_mbarrier_arrive_expect(received, Q_BLOCK);
        ptx_copy_to_peer(pipe->buffers + DS_AT + buffer * DS_BYTES + THIS_BLOCK * Q_BLOCK, received,
                         PEER_BLOCK, Q_BLOCK);
    }
}

/* Like a copy from global memory, the peer's copy counts its bytes at this block's barrier, so the
 * wait needs no acquire of the cluster, which would invalidate the L1 cache. */
FA_DEVICE void wait_for_peer_ds(const pipeline *pipe, int count)
{
    ptx_mbarrier_wait(&pipe->state->ds_received[ds_buffer(count)], ds_parity(count));
}

/* Releases a buffer of dS, which no product reads any more, in both blocks. Not where nobody fills it
 * again: the peer might have ended. (A persistent block ends after the cluster's barrier.) */
FA_DEVICE void release_ds(const pipeline *pipe, int count, int leader)
{
    uint64_t *empty = &pipe->state->ds_empty[ds_buffer(count)];
    ptx_mbarrier_arrive_if(empty, leader);
    ptx_mbarrier_arrive_peer_if(empty, PEER_BLOCK, leader);
}

#endif
