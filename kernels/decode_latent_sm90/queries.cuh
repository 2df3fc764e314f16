/*
 * The queries of the work tile: some blocks of columns in registers of the consumer of scores, the
 * others in shared memory.
 */
#ifndef FA_KERNELS_DECODE_LATENT_SM90_QUERIES_CUH
#define FA_KERNELS_DECODE_LATENT_SM90_QUERIES_CUH

#include "decode_latent_sm90/config.cuh"

#include "decode_latent_sm90/pipeline.cuh"
#include "decode_sm80/queries.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"

/* A operands of the first blocks of columns. */
typedef struct own_queries {
    uint32_t at[OWN_BLOCKS * 4][4];
} own_queries;

FA_DEVICE void find_own_queries(const fa_decode_params *d, const fa_work *w, own_queries *q)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const char *row = find_query(d, w, row_of(0, half));
#pragma unroll
        for (int i = 0; i < OWN_BLOCKS * 8; i++)
            q->at[i / 2][i % 2 * 2 + half] =
                fetch_two(&d->attention, row, i * 8 + lane_id() % 4 * 2);
    }
}

/* The other blocks, to shared memory, by all consumers. */
FA_DEVICE void share_queries(const pipeline *pipe, const fa_decode_params *d, const fa_work *w)
{
    const uint32_t to = ptx_shared_address(pipe->q);
#pragma unroll 4
    for (int i = thread_id(); i < ROWS * Q_BLOCKS * 8; i += THREADS) {
        const int r = i / (Q_BLOCKS * 8), vector = i % (Q_BLOCKS * 8);
        const uint4 x = fetch_eight(d, w, r, OWN_BLOCKS * BLOCK_COLUMNS + 8 * vector);
        ptx_st_shared_v4(to + (uint32_t)(vector / 8 * BLOCK_BYTES) + swizzled(r, vector % 8), x);
    }
    ptx_fence_proxy_async();
    sync_threads();
}

#endif
