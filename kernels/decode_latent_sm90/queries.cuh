/*
 * The queries of the work tile: some blocks of columns in registers of the consumer of scores, the
 * others in shared memory.
 */
#ifndef FA_KERNELS_DECODE_LATENT_SM90_QUERIES_CUH
#define FA_KERNELS_DECODE_LATENT_SM90_QUERIES_CUH

#include "decode_latent_sm90/config.cuh"

#include "decode_latent_sm90/pipeline.cuh"
#include "decode_sm80/queries.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"

/* A operands of the first blocks of columns. */
typedef struct own_queries {
    uint32_t at[OWN_BLOCKS * 4][4];
} own_queries;

/* Where a block of columns is when all consumers have fetched it: those of registers take the last
 * pairs' stages and the buffer of scores until they are in registers. */
FA_DEVICE char *query_block_at(const pipeline *pipe, int block)
{
    if (block >= OWN_BLOCKS) return pipe->q + (block - OWN_BLOCKS) * BLOCK_BYTES;
    if (block >= 2 * QUERY_STAGES)
        return (char *)(void *)pipe->scores + (block - 2 * QUERY_STAGES) * BLOCK_BYTES;
    return pipe->pairs + (STAGES - QUERY_STAGES) * PAIR_BYTES + block * BLOCK_BYTES;
}

FA_DEVICE void put_query(const pipeline *pipe, int r, int vector, uint4 x)
{
    ptx_st_shared_v4(ptx_shared_address(query_block_at(pipe, vector / 8)) + swizzled(r, vector % 8),
                     x);
}

/* Whole rows a warp. All loads of a thread are on their way at the same time: the block waits for
 * them. */
FA_DEVICE void fetch_queries(const pipeline *pipe, const fa_decode_params *d, const fa_work *w)
{
    enum { WARP_ROWS = (ROWS + WARPS - 1) / WARPS, VECTORS = K_BLOCKS * 8, LOADS = VECTORS / 32 };
    uint4 x[WARP_ROWS][LOADS + 1];
#pragma unroll
    for (int i = 0; i < WARP_ROWS; i++) {
        const int r = i * WARPS + warp_id();
        const char *row = r < ROWS ? find_query(d, w, r) : NULL;
#pragma unroll
        for (int j = 0; j <= LOADS; j++) {
            const int column = 8 * (32 * j + lane_id());
            x[i][j] = make_uint4(0, 0, 0, 0);
            if (row && column < d->attention.d) x[i][j] = *(const uint4 *)(row + 2 * column);
        }
    }
#pragma unroll
    for (int i = 0; i < WARP_ROWS; i++)
#pragma unroll
        for (int j = 0; j <= LOADS; j++) {
            const int r = i * WARPS + warp_id(), vector = 32 * j + lane_id();
            if (r < ROWS && vector < VECTORS) put_query(pipe, r, vector, x[i][j]);
        }
}

/* The same of rows that are not made of whole vectors. */
FA_DEVICE void gather_queries(const pipeline *pipe, const fa_decode_params *d, const fa_work *w)
{
#pragma unroll 1
    for (int i = thread_id(); i < ROWS * K_BLOCKS * 8; i += THREADS) {
        const int r = i / (K_BLOCKS * 8), vector = i % (K_BLOCKS * 8);
        put_query(pipe, r, vector, fetch_eight(d, w, r, 8 * vector));
    }
}

/* By all consumers: queries to shared memory. */
FA_DEVICE void share_queries(const pipeline *pipe, const fa_decode_params *d, const fa_work *w)
{
    if (d->attention.q.vector == 8) fetch_queries(pipe, d, w);
    else gather_queries(pipe, d, w);
    ptx_fence_proxy_async();
    __syncwarp();
    ptx_mbarrier_arrive_if(&pipe->state->queries_read, lane_id() == 0);
    sync_threads();
}

/* By the consumer of scores, after share_queries(): its own ones to registers. It releases the
 * stages when the first products have read these registers. */
FA_DEVICE void take_own_queries(const pipeline *pipe, own_queries *q)
{
    const int row = warp_id() % GROUP_WARPS * 16 + lane_id() % 16;
#pragma unroll
    for (int i = 0; i < OWN_BLOCKS * 4; i++)
        ptx_ldmatrix_x4(q->at[i], ptx_shared_address(query_block_at(pipe, i / 4)) +
                                      swizzled(row, i % 4 * 2 + lane_id() / 16));
    /* The buffer of scores is free. */
    ptx_named_barrier_sync(BARRIER_OF_CONSUMER + CONSUMER_SCORES, WARPGROUP);
}

#endif
