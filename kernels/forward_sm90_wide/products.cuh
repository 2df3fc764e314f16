/*
 * What a consumer asks the tensor cores for, chunk by chunk: S = Q K^T of the block's keys, out += P V of
 * its columns.
 */
#ifndef FA_KERNELS_FORWARD_SM90_WIDE_PRODUCTS_CUH
#define FA_KERNELS_FORWARD_SM90_WIDE_PRODUCTS_CUH

FA_DEVICE void wait_for_chunk(const pipeline *pipe, tile_count count)
{
    ptx_mbarrier_wait(&pipe->state->full[stage_of(count)], parity_of(count));
}

FA_DEVICE void release_chunk(const pipeline *pipe, tile_count count, int leader)
{
    ptx_mbarrier_arrive_if(&pipe->state->empty[stage_of(count)], leader);
}

/* Asks for chunk `chunk` of s = Q K^T, 64 x FRAGMENT_KEYS. */
FA_DEVICE void multiply_keys(const pipeline *pipe, float *s, int chunk, tile_count count,
                             int consumer)
{
    const uint32_t k = ptx_descriptor_low_in_cluster(ring_place(pipe, count), 0);
    uint32_t q = ptx_descriptor_low_in_cluster(pipe->q + consumer * Q_BYTES, 0);
    __asm__ volatile("" : "+r"(q)); /* or each step's place would be kept in a register */
    wait_for_chunk(pipe, count);
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

/* Asks for chunk `chunk` of out = P V, or out += P V. */
FA_DEVICE void multiply_values(const pipeline *pipe, float *out, int chunk, tile_count count,
                               int add, int consumer)
{
    const uint32_t v = ptx_descriptor_low_in_cluster(ring_place(pipe, count), V_BLOCK);
    uint32_t p = ptx_descriptor_low_in_cluster(weights_of(pipe, consumer), 0);
    __asm__ volatile("" : "+r"(p));
    wait_for_chunk(pipe, count);
    ptx_wgmma_fence();
#pragma unroll
    for (int step = 0; step < V_ROWS / 16; step++) {
        const int key = chunk * V_ROWS + 16 * step;
        PTX_WGMMA(shared_pv, VALUE_DIM)
        (out, ptx_descriptor(p + (key / 64 * Q_BLOCK + key % 64 * 2) / 16),
         ptx_descriptor(v + step * 16 * 128 / 16), key > 0 || add);
    }
    ptx_wgmma_commit();
}

#endif
