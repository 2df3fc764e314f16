/*
 * The products that a consumer issues, chunk by chunk: S = Q K^T for the block's keys, out += P V
 * for its columns.
 */
#ifndef FA_KERNELS_FORWARD_SM90_WIDE_MULTIPLY_CUH
#define FA_KERNELS_FORWARD_SM90_WIDE_MULTIPLY_CUH

#include "forward_sm90_wide/config.cuh"
#include "forward_sm90_wide/exchange.cuh"
#include "forward_sm90_wide/pipeline.cuh"
#include "forward_sm90_wide/producer.cuh"
#include "common/device.cuh"
#include "forward_sm90/stage.cuh"
#include "ptx/barrier.cuh"
#include "ptx/wgmma.cuh"

FA_DEVICE void acquire_chunk(const pipeline *pipe, tile_count count)
{
    ptx_mbarrier_wait(&pipe->state->full[stage_of(count)], parity_of(count));
}

FA_DEVICE void release_chunk(const pipeline *pipe, tile_count count, int leader)
{
    ptx_mbarrier_arrive_if(&pipe->state->empty[stage_of(count)], leader);
}

/* Issues chunk `chunk` of s = Q K^T, 64 x FRAGMENT_KEYS. */
FA_DEVICE void issue_qk(const pipeline *pipe, float *s, int chunk, tile_count count, int consumer)
{
    const uint32_t k = ptx_descriptor_low_in_cluster(chunk_buffer(pipe, count), 0);
    uint32_t q = ptx_descriptor_low_in_cluster(pipe->q + consumer * Q_BYTES, 0);
    /* Otherwise each step's descriptor would be kept in a register. */
    __asm__ volatile("" : "+r"(q));
    acquire_chunk(pipe, count);
    ptx_wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4 * K_CHUNK_BLOCKS; step++) {
        const int column = chunk * K_CHUNK_BLOCKS + step / 4, byte = step % 4 * 32;
        if (column >= K_BLOCKS) break;
        PTX_WGMMA(qk, FRAGMENT_KEYS)
        (s, ptx_descriptor(q + (column * Q_BLOCK + byte) / 16),
         ptx_descriptor(k + (step / 4 * K_BLOCK + byte) / 16), chunk > 0 || step > 0);
    }
    ptx_wgmma_commit();
}

/* Issues chunk `chunk` of out += P V; the first one of out = P V if accumulate is 0. */
FA_DEVICE void issue_pv(const pipeline *pipe, float *out, int chunk, tile_count count,
                        int accumulate, int consumer)
{
    const uint32_t v = ptx_descriptor_low_in_cluster(chunk_buffer(pipe, count), V_BLOCK);
    uint32_t p = ptx_descriptor_low_in_cluster(weights_buffer(pipe, consumer), 0);
    __asm__ volatile("" : "+r"(p));
    acquire_chunk(pipe, count);
    ptx_wgmma_fence();
#pragma unroll
    for (int step = 0; step < V_ROWS / 16; step++) {
        const int key = chunk * V_ROWS + 16 * step;
        PTX_WGMMA(shared_pv, VALUE_DIM)
        (out, ptx_descriptor(p + (key / 64 * Q_BLOCK + key % 64 * 2) / 16),
         ptx_descriptor(v + step * 16 * 128 / 16), key > 0 || accumulate);
    }
    ptx_wgmma_commit();
}

#endif
