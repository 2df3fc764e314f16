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

/* Where a block of columns is at first: those of registers take the last pairs' stages and the buffer of scores until they
 * are in registers. */
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

/* By the thread that has described the work: a box of each block of columns, before any keys are loaded. Rows after the
 * last query of a sequence may be those of another one, and take part in nothing. */
FA_DEVICE void load_queries(const pipeline *pipe, const fa_decode_params *d,
                            const fa_decode_latent_sm90_params *s)
{
    const fa_tile *t = &pipe->state->work.tile;
    uint64_t *full = &pipe->state->queries_full;
    const int row = (int)(t->start_q + t->first) * s->q_step.head;
    ptx_mbarrier_arrive_expect(full, K_BLOCKS * d->heads * d->queries * 2 * BLOCK_COLUMNS);
#pragma unroll 1
    for (int block = 0; block < K_BLOCKS; block++)
        ptx_tma_load_4d(query_block_at(pipe, block), &s->q, full, BLOCK_COLUMNS * block,
                        (int)t->head, row, (int)t->block_q * s->q_step.block);
}

/* Without a map of q. */
FA_DEVICE void gather_queries(const pipeline *pipe, const fa_decode_params *d, const fa_work *w,
                              int rows)
{
#pragma unroll 1
    for (int i = thread_id(); i < rows * K_BLOCKS * 8; i += WARPGROUP) {
        const int r = i / (K_BLOCKS * 8), vector = i % (K_BLOCKS * 8);
        put_query(pipe, r, vector, fetch_eight(d, w, r, 8 * vector));
    }
}

FA_DEVICE void clear_rows_from(const pipeline *pipe, int row)
{
#pragma unroll 1
    for (int i = row * K_BLOCKS * 8 + thread_id(); i < ROWS * K_BLOCKS * 8; i += WARPGROUP)
        put_query(pipe, i / (K_BLOCKS * 8), i % (K_BLOCKS * 8), make_uint4(0, 0, 0, 0));
}

/* By the consumer of scores: queries are in shared memory, and zeros in rows that the work tile does not have. */
FA_DEVICE void complete_queries(const pipeline *pipe, const fa_decode_params *d)
{
    const int rows = d->heads * d->queries;
    if (!pipe->maps_queries) gather_queries(pipe, d, &pipe->state->work, rows);
    clear_rows_from(pipe, rows);
    if (pipe->maps_queries) ptx_mbarrier_wait(&pipe->state->queries_full, 0);
    ptx_fence_proxy_async();
    ptx_named_barrier_sync(BARRIER_OF_CONSUMER + CONSUMER_SCORES, WARPGROUP);
}

/* By the consumer of scores, after complete_queries(): its own ones to registers. It releases the
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
