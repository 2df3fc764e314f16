/*
 * The products that a consumer issues: S = Q K^T, and out += P V of the previous tile. They run asynchronously, in
 * the order in which they were issued. Scores come first, so that the softmax can start while P V still runs.
 *
 * Ping-pong: consumers take turns in issuing their products, by named barriers, so that the tensor cores work for
 * one consumer while another computes its softmax (FlashAttention-3, section 3.1, arXiv:2407.08608).
 */
#ifndef FA_KERNELS_FORWARD_SM90_MULTIPLY_CUH
#define FA_KERNELS_FORWARD_SM90_MULTIPLY_CUH

#include "forward_sm90/config.cuh"
#include "common/device.cuh"
#include "forward_sm90/cursor.cuh"
#include "forward_sm90/pipeline.cuh"
#include "forward_sm90/stage.cuh"
#include "ptx/barrier.cuh"
#include "ptx/wgmma.cuh"

/* Waits until this consumer may issue. */
FA_DEVICE void pingpong_wait(int consumer)
{
    ptx_named_barrier_sync(NAMED_BARRIER_ISSUE + consumer, 2 * WARPGROUP);
}

/* Lets the next consumer issue. */
FA_DEVICE void pingpong_next(int consumer)
{
    ptx_named_barrier_arrive(NAMED_BARRIER_ISSUE + (consumer + 1) % CONSUMERS, 2 * WARPGROUP);
}

FA_DEVICE uint32_t k_descriptor(const pipeline *pipe, tile_count count)
{
    return pipe->k_descriptor + stage_of(count) * (K_BYTES / 16);
}

FA_DEVICE uint32_t v_descriptor(const pipeline *pipe, tile_count count)
{
    return pipe->v_descriptor + stage_of(count) * (V_BYTES / 16);
}

/* Waits until the keys, or values, of a tile have been loaded. */
FA_DEVICE void acquire_keys(const pipeline *pipe, tile_count count)
{
    ptx_mbarrier_wait(&pipe->state->k_full[stage_of(count)], parity_of(count));
}

FA_DEVICE void acquire_values(const pipeline *pipe, tile_count count)
{
    ptx_mbarrier_wait(&pipe->state->v_full[stage_of(count)], parity_of(count));
}

/* ---- One product ----------------------------------------------------------------------------- */

/* Issues s = Q K^T, 64 x KEYS. The empty asm statement hides that q is the same for every tile: otherwise the
 * compiler would keep a descriptor for each step in registers, and there are none left. */
FA_DEVICE void issue_qk(float *s, uint32_t q, uint32_t k)
{
    __asm__ volatile("" : "+r"(q));
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++) {
        const int block = step / 4, byte = step % 4 * 32;
        PTX_WGMMA(qk, KEYS)
        (s, ptx_descriptor(q + (block * Q_BLOCK + byte) / 16),
         ptx_descriptor(k + (block * KV_BLOCK + byte) / 16), step > 0);
    }
    ptx_wgmma_commit();
}

#define PV_COLUMNS 128 /* of a product, where one cannot have all */

/* Issues out += P V, or out = P V if accumulate is 0. */
FA_DEVICE void issue_pv(float *out, const uint32_t *p, uint32_t v, int accumulate)
{
#if COPIED && VALUE_DIM == 2 * PV_COLUMNS
    /* One product would need more registers than a thread of four warpgroups has at first, and ptxas refuses it. */
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++)
#pragma unroll
        for (int half = 0; half < 2; half++) PTX_WGMMA(pv, PV_COLUMNS)
    (out + half * PV_COLUMNS / 2, p + 4 * step,
     ptx_descriptor(v + (step * 16 * 128 + half * V_BYTES / 2) / 16), step > 0 || accumulate);
#else
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) PTX_WGMMA(pv, VALUE_DIM)
    (out, p + 4 * step, ptx_descriptor(v + step * 16 * 128 / 16), step > 0 || accumulate);
#endif
    ptx_wgmma_commit();
}

/* The values of the previous tile, whose product with its weights will be issued or is running. */
typedef struct pending_values {
    bool
        any; /* false: there are none. Their product is issued all the same, and nobody reads its result */
    tile_count count;
    int accumulate; /* 0: they are a work tile's first */
} pending_values;

/* ptx_register_fence for weights, which the product with values has been reading. */
FA_DEVICE void fence_weights(uint32_t *weights)
{
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) __asm__ volatile("" : "+r"(weights[i])::"memory");
}

/* ---- Issue and wait -------------------------------------------------------------------------- */

/* Issues the scores of a tile, then the values of the previous one. */
FA_DEVICE void issue_scores_and_values(const pipeline *pipe, float *out, float *s,
                                       const uint32_t *weights, const cursor *at,
                                       const pending_values *values, int consumer)
{
    acquire_keys(pipe, at->count);
    pingpong_wait(consumer);
    ptx_register_fence(out, OUTPUTS);
    ptx_register_fence(s, KEYS / 2);
    ptx_wgmma_fence();
    issue_qk(s, at->q, k_descriptor(pipe, at->count));
    if (values->any) acquire_values(pipe, values->count);
    ptx_wgmma_fence();
    issue_pv(out, weights, v_descriptor(pipe, values->count), values->accumulate);
    pingpong_next(consumer);
}

/* Issues only the scores of a tile. */
FA_DEVICE void issue_scores(const pipeline *pipe, float *s, const cursor *at, int consumer)
{
    acquire_keys(pipe, at->count);
    pingpong_wait(consumer);
    ptx_register_fence(s, KEYS / 2);
    ptx_wgmma_fence();
    issue_qk(s, at->q, k_descriptor(pipe, at->count));
    pingpong_next(consumer);
}

/* Waits for the scores; the product with values, which was issued after them, may still run. */
FA_DEVICE void wait_for_scores(float *s)
{
    ptx_wgmma_wait(1);
    ptx_register_fence(s, KEYS / 2);
}

/* Waits for scores that were issued last. */
FA_DEVICE void wait_for_last_scores(float *s)
{
    ptx_wgmma_wait(0);
    ptx_register_fence(s, KEYS / 2);
}

/* Waits for the product with values. */
FA_DEVICE void wait_for_outputs(float *out, uint32_t *weights)
{
    ptx_wgmma_wait(0);
    ptx_register_fence(out, OUTPUTS);
    fence_weights(weights);
}

/* Issues a work tile's last values, then the first scores of the next work tile. Returns when the values have
 * been added. */
FA_DEVICE void issue_values_and_scores(const pipeline *pipe, float *out, float *s,
                                       uint32_t *weights, const cursor *at,
                                       const pending_values *values, int consumer)
{
    acquire_keys(pipe, at->count);
    if (values->any) acquire_values(pipe, values->count);
    pingpong_wait(consumer);
    ptx_register_fence(out, OUTPUTS);
    ptx_register_fence(s, KEYS / 2);
    ptx_wgmma_fence();
    issue_pv(out, weights, v_descriptor(pipe, values->count), values->accumulate);
    issue_qk(s, at->q, k_descriptor(pipe, at->count));
    pingpong_next(consumer);
    ptx_wgmma_wait(1);
    ptx_register_fence(out, OUTPUTS);
    fence_weights(weights);
}

/* Issues only a work tile's last values, and waits for the outputs. */
FA_DEVICE void issue_values(const pipeline *pipe, float *out, uint32_t *weights,
                            const pending_values *values, int consumer)
{
    if (values->any) acquire_values(pipe, values->count);
    pingpong_wait(consumer);
    ptx_register_fence(out, OUTPUTS);
    ptx_wgmma_fence();
    issue_pv(out, weights, v_descriptor(pipe, values->count), values->accumulate);
    pingpong_next(consumer);
    wait_for_outputs(out, weights);
}

#endif
