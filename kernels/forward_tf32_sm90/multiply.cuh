/*
 * The products that a consumer issues: S = Q K^T, and out += P V of the previous tile.
 *
 * In tf32, wgmma reads both operands along their rows, so V is transposed. P comes from registers:
 * of 8 keys a thread has the weights 2t and 2t + 1 of a row, but the A operand needs t and t + 4.
 * So the products' keys 0 to 3 are keys 0, 2, 4, 6 of the tile, and 4 to 7 are its keys 1, 3, 5, 7.
 * The transposers write V in this order.
 */
#ifndef FA_KERNELS_FORWARD_TF32_SM90_MULTIPLY_CUH
#define FA_KERNELS_FORWARD_TF32_SM90_MULTIPLY_CUH

#include "forward_tf32_sm90/config.cuh"
#include "forward_tf32_sm90/pipeline.cuh"
#include "common/device.cuh"
#include "forward_sm90/stage.cuh"
#include "ptx/barrier.cuh"
#include "ptx/wgmma.cuh"

FA_DEVICE uint32_t tile_descriptor(const pipeline *pipe, tile_count number)
{
    return pipe->descriptor + stage_of(number) * (TILE_BYTES / 16);
}

/* Waits until a tile of keys or values has arrived. */
FA_DEVICE void acquire_tile(const pipeline *pipe, tile_count number)
{
    ptx_mbarrier_wait(&pipe->state->full[stage_of(number)], parity_of(number));
}

/* Issues s = Q K^T, 64 x KEYS. The empty asm statement hides from the compiler that q is the same
 * for every tile: otherwise it would keep a descriptor for each step in registers. */
FA_DEVICE void issue_qk(float *s, uint32_t q, uint32_t k)
{
    __asm__ volatile("" : "+r"(q));
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 8; step++) {
        const int block = step / 4, byte = step % 4 * 32;
        PTX_WGMMA(qk, KEYS)
        (s, ptx_descriptor(q + (block * Q_BLOCK + byte) / 16),
         ptx_descriptor(k + (block * K_BLOCK + byte) / 16), step > 0);
    }
    ptx_wgmma_commit();
}

/* Issues out += P V, or out = P V if accumulate is 0. */
FA_DEVICE void issue_pv(float *out, const uint32_t *p, uint32_t v, int accumulate)
{
#pragma unroll
    for (int step = 0; step < KEYS / 8; step++) {
        const int block = step / 4, byte = step % 4 * 32;
        PTX_WGMMA(registers_qk, VALUE_DIM)
        (out, p + 4 * step, ptx_descriptor(v + (block * V_BLOCK + byte) / 16),
         step > 0 || accumulate);
    }
    ptx_wgmma_commit();
}

/* Like ptx_register_fence, for the weights, which the product with values has been reading. */
FA_DEVICE void fence_weights(uint32_t *weights)
{
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) __asm__ volatile("" : "+r"(weights[i])::"memory");
}

#endif
