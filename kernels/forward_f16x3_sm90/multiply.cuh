/*
 * The products that a consumer issues: S = Q K^T and P V, each as three products of float16 parts:
 * high high + high low + low high. The omitted product is at most 2^-22 of the whole, and 2^-24 on
 * average. With high parts alone there is one product.
 *
 * Tensor cores truncate sums instead of rounding them, so that errors add up and do not cancel. So
 * the large products are summed in short chains, and ordinary additions add these up (Ootomo and
 * Yokota 2022, arXiv:2203.03341, had the idea for whole matrices). The products with low parts are
 * so small that the way to sum them does not matter: they come first.
 */
#ifndef FA_KERNELS_FORWARD_F16X3_SM90_MULTIPLY_CUH
#define FA_KERNELS_FORWARD_F16X3_SM90_MULTIPLY_CUH

#include "forward_f16x3_sm90/config.cuh"
#include "forward_f16x3_sm90/pipeline.cuh"
#include "common/device.cuh"
#include "forward_sm90/stage.cuh"
#include "ptx/barrier.cuh"
#include "ptx/wgmma.cuh"

/* The descriptor of a chunk: of the high parts of its first 64 columns. */
FA_DEVICE uint32_t chunk_descriptor(const pipeline *pipe, tile_count number)
{
    return pipe->descriptor + stage_of(number) * (CHUNK / 16);
}

/* Waits until a chunk of keys or values has arrived. */
FA_DEVICE void acquire_chunk(const pipeline *pipe, tile_count number)
{
    ptx_mbarrier_wait(&pipe->state->full[stage_of(number)], parity_of(number));
}

/* s = A B^T for 16 columns, or s += A B^T. low_q, low_k: whether the operands are low parts. */
FA_DEVICE void issue_qk_step(float *s, uint32_t q, bool low_q, uint32_t k, bool low_k, int step,
                             int accumulate)
{
    const int pair = step / 4, byte = step % 4 * 32;
    PTX_WGMMA(qk, KEYS)
    (s, ptx_descriptor(q + ((2 * pair + low_q) * Q_BLOCK + byte) / 16),
     ptx_descriptor(k + ((2 * pair + low_k) * K_BLOCK + byte) / 16), accumulate);
}

/* Issues a chain of S = Q K^T, 64 x KEYS: the products of high parts of SUM_COLUMNS columns of a
 * chunk. The first chain has all products with low parts, of `columns` columns. The empty asm statement hides from the
 * compiler that q is the same for every tile: otherwise it would keep a descriptor for each step in
 * registers. */
FA_DEVICE void issue_qk(float *s, uint32_t q, uint32_t k, int chain, int columns)
{
    enum { STEPS_OF_CHAIN = SUM_COLUMNS / 16 };
    __asm__ volatile("" : "+r"(q));
    if (chain == 0 && !HIGH_ALONE) {
#pragma unroll
        for (int step = 0; step < columns / 16; step++) {
            issue_qk_step(s, q, true, k, false, step, step > 0);
            issue_qk_step(s, q, false, k, true, step, 1);
        }
    }
#pragma unroll
    for (int i = 0; i < STEPS_OF_CHAIN && chain * STEPS_OF_CHAIN + i < columns / 16; i++)
        issue_qk_step(s, q, false, k, false, chain * STEPS_OF_CHAIN + i,
                      (chain == 0 && !HIGH_ALONE) || i > 0);
    ptx_wgmma_commit();
}

/* part = P V for 16 keys and PV_COLUMNS columns, or the first half of them; or part += P V. */
FA_DEVICE void issue_pv_step(float *part, const uint32_t *weights, uint32_t v, int accumulate,
                             bool half)
{
    if (half) PTX_WGMMA(pv, HALF_PV_COLUMNS)(part, weights, ptx_descriptor(v), accumulate);
    else PTX_WGMMA(pv, PV_COLUMNS)(part, weights, ptx_descriptor(v), accumulate);
}

/* Issues part = P V for these columns. */
FA_DEVICE void issue_pv(float *part, const uint32_t *high, const uint32_t *low, uint32_t v,
                        int columns, bool half)
{
    v += columns * (2 * (K_BLOCK / 16)) + (2 * K_BLOCK / 16 << 16);
#pragma unroll
    for (int step = 0; step < KEYS / 16 && !HIGH_ALONE; step++) {
        issue_pv_step(part, low + 4 * step, v + step * 128, step > 0, half);
        issue_pv_step(part, high + 4 * step, v + step * 128 + K_BLOCK / 16, 1, half);
    }
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++)
        issue_pv_step(part, high + 4 * step, v + step * 128, !HIGH_ALONE || step > 0, half);
    ptx_wgmma_commit();
}

/* Like ptx_register_fence, for the weights, which the product with values has been reading. */
FA_DEVICE void fence_weights(uint32_t *weights)
{
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) __asm__ volatile("" : "+r"(weights[i])::"memory");
}

#endif
