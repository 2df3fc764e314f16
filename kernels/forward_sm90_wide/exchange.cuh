/*
 * What a consumer and the one of the same queries in the other block of the cluster, its peer, tell each
 * other: maxima and sums of rows, and weights. What is sent goes to the same place of the peer's shared
 * memory, whose barrier counts its bytes; the peer's own warps say how many they expect.
 */
#ifndef FA_KERNELS_FORWARD_SM90_WIDE_EXCHANGE_CUH
#define FA_KERNELS_FORWARD_SM90_WIDE_EXCHANGE_CUH

/* A number for each of the thread's two rows; the four lanes that share a row have the same. */
FA_DEVICE void send_rows(float *rows, uint64_t *full, const float x[2], int leader)
{
    const int row = row_of(0, 0), peer = peer_block();
    __syncwarp(); /* no lane still waits for the phase before */
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

/* ---- Weights ----------------------------------------------------------------------------------- */

/* Where those of a consumer lie: for each block of the cluster, 64 columns. */
FA_DEVICE char *weights_of(const pipeline *pipe, int consumer)
{
    return pipe->weights + consumer * P_BYTES;
}

/* The warp's 16 rows of 64 columns, as wgmma reads them. */
FA_DEVICE void store_weights(char *to, const uint32_t *weights)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < FRAGMENT_KEYS / 8; j += 2)
        ptx_stmatrix_x4(ptx_shared_address(staged(to, lane % 16, j + lane / 16)), weights + 2 * j);
}

/* Weights of the block's keys into both blocks. number: of tiles so far, through all pieces. */
FA_DEVICE void share_weights(const pipeline *pipe, const uint32_t *weights, uint32_t number,
                             int leader, int consumer)
{
    const int bytes = 16 * 128; /* of a warp */
    uint64_t *full = &pipe->state->weights_full[consumer];
    char *to = weights_of(pipe, consumer) + this_block() * Q_BLOCK +
               (int)threadIdx.x % WARPGROUP / 32 * bytes;
    ptx_mbarrier_wait_cluster(&pipe->state->weights_empty[consumer], (int)(number & 1) ^ 1);
    store_weights(to, weights);
    ptx_fence_proxy_async();
    __syncwarp();
    if (!leader) return;
    ptx_mbarrier_arrive_expect(full, bytes);
    ptx_copy_to_peer(to, full, peer_block(), bytes);
}

/* The weights that are there are not needed any more: both blocks are told. */
FA_DEVICE void release_weights(const pipeline *pipe, int leader, int consumer)
{
    uint64_t *empty = &pipe->state->weights_empty[consumer];
    ptx_mbarrier_arrive_if(empty, leader);
    ptx_mbarrier_arrive_peer_if(empty, peer_block(), leader);
}

#endif
