/*
 * What a consumer asks the tensor cores for: S = Q K^T, out += P V, alone or both; and the turns at
 * it. Scores come first: they are there, and the softmax can begin, while P V still runs.
 */
#ifndef FA_KERNELS_FORWARD_SM90_PRODUCTS_CUH
#define FA_KERNELS_FORWARD_SM90_PRODUCTS_CUH

/* The consumers' turns at asking for products: barrier 1 + c is consumer c's. */
FA_DEVICE void wait_for_turn(int consumer) { ptx_named_barrier_sync(1 + consumer, 2 * WARPGROUP); }

FA_DEVICE void pass_turn(int consumer)
{
    ptx_named_barrier_arrive(1 + (consumer + 1) % CONSUMERS, 2 * WARPGROUP);
}

/* Asks for s = Q K^T, 64 x KEYS. The statement without instructions hides that q is the same for
 * every tile: the compiler would keep one descriptor a step in registers that it does not have. */
FA_DEVICE void multiply_qk(float *s, uint32_t q, uint32_t k)
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

/* Asks for out = P V, or out += P V. */
FA_DEVICE void multiply_pv(float *out, const uint32_t *p, uint32_t v, int add)
{
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) PTX_WGMMA(pv, VALUE_DIM)
    (out, p + 4 * step, ptx_descriptor(v + step * 16 * 128 / 16), step > 0 || add);
    ptx_wgmma_commit();
}

/* Where they lie. */
FA_DEVICE uint32_t k_place(const pipeline *pipe, tile_count count)
{
    return pipe->k_matrix + stage_of(count) * (K_BYTES / 16);
}

FA_DEVICE uint32_t v_place(const pipeline *pipe, tile_count count)
{
    return pipe->v_matrix + stage_of(count) * (V_BYTES / 16);
}

/* Values that are being added, or still to be: of the tile before. */
typedef struct pending {
    bool any;
    tile_count count;
    int add; /* 0: they are a piece's first */
} pending;

/* Until the tile's keys, or values, are there. */
FA_DEVICE void wait_for_keys(const pipeline *pipe, tile_count count)
{
    ptx_mbarrier_wait(&pipe->state->k_full[stage_of(count)], parity_of(count));
}

FA_DEVICE void wait_for_values(const pipeline *pipe, tile_count count)
{
    ptx_mbarrier_wait(&pipe->state->v_full[stage_of(count)], parity_of(count));
}

/* ptx_register_fence for weights: until here the product with values read them. */
FA_DEVICE void keep_weights(uint32_t *weights)
{
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) __asm__ volatile("" : "+r"(weights[i])::"memory");
}

/* Asks for scores of a tile, and for values of the one before, which may run on when the scores are there. */
FA_DEVICE void ask(const pipeline *pipe, float *out, float *s, const uint32_t *weights,
                   const progress *at, const pending *values, int consumer)
{
    wait_for_keys(pipe, at->count);
    wait_for_turn(consumer);
    ptx_register_fence(out, OUTPUTS);
    ptx_register_fence(s, KEYS / 2);
    ptx_wgmma_fence();
    multiply_qk(s, at->q, k_place(pipe, at->count));
    if (values->any) wait_for_values(pipe, values->count);
    ptx_wgmma_fence();
    multiply_pv(out, weights, v_place(pipe, values->count), values->add);
    pass_turn(consumer);
}

FA_DEVICE void await_first_scores(float *s)
{
    ptx_wgmma_wait(1);
    ptx_register_fence(s, KEYS / 2);
}

FA_DEVICE void await_scores(float *s)
{
    ptx_wgmma_wait(0);
    ptx_register_fence(s, KEYS / 2);
}

/* Scores alone. */
FA_DEVICE void ask_scores(const pipeline *pipe, float *s, const progress *at, int consumer)
{
    wait_for_keys(pipe, at->count);
    wait_for_turn(consumer);
    ptx_register_fence(s, KEYS / 2);
    ptx_wgmma_fence();
    multiply_qk(s, at->q, k_place(pipe, at->count));
    pass_turn(consumer);
}

/* Asks for the last values of a piece, and for the first scores of the next; returns when the values have
 * been added. */
FA_DEVICE void ask_values_first(const pipeline *pipe, float *out, float *s, uint32_t *weights,
                                const progress *at, const pending *values, int consumer)
{
    wait_for_keys(pipe, at->count);
    if (values->any) wait_for_values(pipe, values->count);
    wait_for_turn(consumer);
    ptx_register_fence(out, OUTPUTS);
    ptx_register_fence(s, KEYS / 2);
    ptx_wgmma_fence();
    multiply_pv(out, weights, v_place(pipe, values->count), values->add);
    multiply_qk(s, at->q, k_place(pipe, at->count));
    pass_turn(consumer);
    ptx_wgmma_wait(1);
    ptx_register_fence(out, OUTPUTS);
    keep_weights(weights);
}

/* The product with values has ended: until here it read the weights. */
FA_DEVICE void await_values(float *out, uint32_t *weights)
{
    ptx_wgmma_wait(0);
    ptx_register_fence(out, OUTPUTS);
    keep_weights(weights);
}

/* Values alone, behind the last piece. */
FA_DEVICE void ask_values(const pipeline *pipe, float *out, uint32_t *weights,
                          const pending *values, int consumer)
{
    if (values->any) wait_for_values(pipe, values->count);
    wait_for_turn(consumer);
    ptx_register_fence(out, OUTPUTS);
    ptx_wgmma_fence();
    multiply_pv(out, weights, v_place(pipe, values->count), values->add);
    pass_turn(consumer);
    await_values(out, weights);
}

#endif
