/*
 * The exchange between a consumer and its peer, the consumer of the same queries in the other block
 * of the cluster: each sends the other its scores of a tile of keys, which are sums over its own
 * columns. Both add them up. Two numbers have the same sum in either order, so both blocks continue
 * with exactly the same scores, and compute the same bases, weights and sums.
 *
 * A thread sends its scores to the thread with the same number in the peer, which has the scores of
 * the same elements. So the order of scores in shared memory is free: adjacent threads send and
 * read adjacent units of 16 bytes. A warp waits only for the peer's warp. It signals when it has
 * read what it received, so one buffer is enough.
 */
#ifndef FA_KERNELS_FORWARD_F16X3_SM90_EXCHANGE_CUH
#define FA_KERNELS_FORWARD_F16X3_SM90_EXCHANGE_CUH

#include "forward_f16x3_sm90/config.cuh"
#include "forward_f16x3_sm90/pipeline.cuh"
#include "common/device.cuh"
#include "ptx/address.cuh"
#include "ptx/barrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"

#if CLUSTER > 1

/* The first four scores that the thread receives. The next ones follow at a distance of one
 * warpgroup's scores. */
FA_DEVICE float *received_scores(const pipeline *pipe, int consumer)
{
    return pipe->received + consumer * (RECEIVED_BYTES / 4) + threadIdx.x % WARPGROUP * 4;
}

FA_DEVICE int warp_of_consumer(void) { return (int)(threadIdx.x % WARPGROUP / 32); }

/* number: of exchanges before this one, through all work tiles. */
FA_DEVICE void send_scores(const pipeline *pipe, const float *s, uint32_t number, int leader,
                           int consumer)
{
    uint64_t *full = &pipe->state->scores_full[consumer][warp_of_consumer()];
    float *to = received_scores(pipe, consumer);
    ptx_mbarrier_wait_cluster(&pipe->state->scores_empty[consumer][warp_of_consumer()],
                              (int)(number & 1) ^ 1);
    if (leader) ptx_mbarrier_arrive_expect(full, RECEIVED_BYTES / WARPS);
#pragma unroll
    for (int i = 0; i < KEYS / 2; i += 4)
        ptx_store_to_peer_x4(to + i * WARPGROUP, full, PEER_BLOCK, s + i);
}

/* Adds the scores that the peer has sent. */
FA_DEVICE void add_peer_scores(const pipeline *pipe, float *s, uint32_t number, int leader,
                               int consumer)
{
    const uint32_t from = ptx_shared_address(received_scores(pipe, consumer));
    ptx_mbarrier_wait_cluster(&pipe->state->scores_full[consumer][warp_of_consumer()],
                              (int)(number & 1));
#pragma unroll
    for (int i = 0; i < KEYS / 2; i += 4) {
        const uint4 x = ptx_ld_shared_v4(from + i * WARPGROUP * 4);
        s[i] += __uint_as_float(x.x);
        s[i + 1] += __uint_as_float(x.y);
        s[i + 2] += __uint_as_float(x.z);
        s[i + 3] += __uint_as_float(x.w);
    }
    __syncwarp(); /* all lanes have read their scores */
    ptx_mbarrier_arrive_peer_if(&pipe->state->scores_empty[consumer][warp_of_consumer()],
                                PEER_BLOCK, leader);
}

#endif

#endif
