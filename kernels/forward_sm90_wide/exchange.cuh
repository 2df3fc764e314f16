/*
 * The exchange between a consumer and its peer, the consumer of the same queries in the other block
 * of the cluster: the max and the sum of rows, and weights. Data are sent to the same address in
 * the peer's shared memory. The peer's barrier counts their bytes, and the peer's own warps set the
 * number of bytes that they expect.
 */
#ifndef FA_KERNELS_FORWARD_SM90_WIDE_EXCHANGE_CUH
#define FA_KERNELS_FORWARD_SM90_WIDE_EXCHANGE_CUH

#include "forward_sm90_wide/config.cuh"
#include "forward_sm90_wide/pipeline.cuh"
#include "common/device.cuh"
#include "forward_sm90/warp.cuh"
#include "ptx/address.cuh"
#include "ptx/barrier.cuh"
#include "ptx/store.cuh"
#include "ptx/tma.cuh"

/* A number for each of the thread's two rows. The four lanes that share a row have the same
 * number. */
FA_DEVICE void send_rows(float *rows, uint64_t *full, const float x[2], int leader)
{
    const int row = row_of(0, 0), peer = PEER_BLOCK;
    __syncwarp(); /* no lane still waits for the previous phase */
    if (leader) ptx_mbarrier_arrive_expect(full, 16 * (int)sizeof *rows);
    if (threadIdx.x % 4 != 0) return;
    ptx_store_to_peer(rows + row, full, peer, x[0]);
    ptx_store_to_peer(rows + row + 8, full, peer, x[1]);
}

FA_DEVICE void receive_rows(const float *rows, uint64_t *full, int parity, float x[2])
{
    ptx_mbarrier_wait_cluster(full, parity);
    x[0] = rows[row_of(0, 0)];
    x[1] = rows[row_of(0, 1)];
}

/* ---- Weights --------------------------------------------------------------------------------- */

/* The weights of a consumer: 64 columns from each block of the cluster. */
FA_DEVICE char *weights_buffer(const pipeline *pipe, int consumer)
{
    return pipe->weights + consumer * P_BYTES;
}

/* A unit of 16 bytes of a row of 128, where the swizzle puts it. */
FA_DEVICE char *weights_chunk(char *rows, int row, int chunk)
{
    return rows + row * 128 + (chunk ^ row % 8) * 16;
}

/* The warp's 16 rows of 64 columns, in the layout that wgmma reads. */
FA_DEVICE void store_weights(char *to, const uint32_t *weights)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < FRAGMENT_KEYS / 8; j += 2)
        ptx_stmatrix_x4(ptx_shared_address(weights_chunk(to, lane % 16, j + lane / 16)),
                        weights + 2 * j);
}

/* Stores the weights of the block's keys in both blocks. number: of tiles so far, through all work
 * tiles. */
FA_DEVICE void share_weights(const pipeline *pipe, const uint32_t *weights, uint32_t number,
                             int leader, int consumer)
{
    const int bytes = 16 * 128; /* of one warp */
    uint64_t *full = &pipe->state->weights_full[consumer];
    char *to = weights_buffer(pipe, consumer) + THIS_BLOCK * Q_BLOCK +
               (int)threadIdx.x % WARPGROUP / 32 * bytes;
    ptx_mbarrier_wait_cluster(&pipe->state->weights_empty[consumer], (int)(number & 1) ^ 1);
    store_weights(to, weights);
    ptx_fence_proxy_async();
    __syncwarp();
    if (!leader) return;
    ptx_mbarrier_arrive_expect(full, bytes);
    ptx_copy_to_peer(to, full, PEER_BLOCK, bytes);
}

/* Tells both blocks that this one no longer needs the weights. */
FA_DEVICE void release_weights(const pipeline *pipe, int leader, int consumer)
{
    uint64_t *empty = &pipe->state->weights_empty[consumer];
    ptx_mbarrier_arrive_if(empty, leader);
    ptx_mbarrier_arrive_peer_if(empty, PEER_BLOCK, leader);
}

#endif
