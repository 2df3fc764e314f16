/*
 * A consumer's tile at head dims 192 and 128, where the sums of 64 keys are 160 registers. Of the
 * 240 registers, products can use 216. So there is room for one tile of scores besides the sums,
 * which S, dP and dQ use in turn:
 *
 *     --- its turn
 *     dQ   = dS K             of the tile before, 64 of the consumer's 96 columns
 *     dV  += P^T dO           P from registers
 *     dK  += dS^T Q           dS from shared memory, where it is for dQ
 *     dQ   --> shared memory  while dV and dK are computed
 *     dQ                      the other 32 columns, where P has been
 *     S^T  = K Q^T            of the next tile
 *     --- the other's turn
 *     dQ   --> shared memory  while S is computed
 *     P^T  = 2^(S^T - lse)    to other registers
 *     dP^T = V dO^T           among the other consumer's products
 *     dS^T = P^T (dP^T - delta)
 *     dS   --> shared memory
 *
 * A buffer of dQ is used twice a tile: uses 2n and 2n + 1.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_PARTS_CUH
#define FA_KERNELS_BACKWARD_SM90_PARTS_CUH

#include "backward_sm90/config.cuh"
#include "backward_sm90/consumer_state.cuh"
#include "backward_sm90/keys.cuh"
#include "backward_sm90/multiply.cuh"
#include "backward_sm90/pipeline.cuh"
#include "backward_sm90/rows.cuh"

#if DQ_PARTS > 1

enum { REST_SUMS = DQ_REST / 2 };

/* The DQ_REST columns of all keys. The columns of both consumers share the last block of 64. */
FA_DEVICE uint32_t rest_columns(const consumer_state *c)
{
    return c->base + ACROSS(KEY_BLOCK) +
           (uint32_t)((CONSUMERS * KEY_BLOCK + c->number * (DQ_REST * 2)) / UNIT);
}

/* The descriptor of dS of the tile before tile `count`. With the first tile the dQ of it is not
 * used. */
FA_DEVICE uint32_t ds_before(const consumer_state *c, int count)
{
    return ds_tile(c, count > 0 ? count - 1 : DS_BUFFERS - 1);
}

/* Stores a part of dQ that has been computed, for the store warp. */
FA_DEVICE void share_part(const pipeline *pipe, const consumer_state *c, const float *dq,
                          int columns, int use)
{
#pragma unroll
    for (int j = 0; j < columns / 8; j++)
        ptx_st_shared_v4(c->dq + (uint32_t)(16 * WARPGROUP * j),
                         make_uint4(__float_as_uint(dq[4 * j]), __float_as_uint(dq[4 * j + 1]),
                                    __float_as_uint(dq[4 * j + 2]),
                                    __float_as_uint(dq[4 * j + 3])));
    ptx_fence_proxy_async();
    share_dq(pipe, c, use);
}

/* The products of tile `count`, whose weights and dS are available. Afterwards dQ's second part has
 * been issued, and its first part has been shared. */
FA_DEVICE void issue_products(const pipeline *pipe, consumer_state *c, float *rest, int count)
{
    const int stage = stage_of(count);
    ptx_register_fence(c->dv, DV_SUMS);
    ptx_register_fence(c->dk, DK_SUMS);
    ptx_register_forget(c->scores, DQ_SUMS);
    ptx_wgmma_fence();
    issue_dq(c->scores, ds_before(c, count), key_columns(c));
    issue_dv(c->dv, c->weights, dout_tile(c, stage) + ACROSS(Q_BLOCK));
    issue_shared_dk(c->dk, ds_tile(c, count) + (uint32_t)(c->number * (Q_BLOCK / UNIT)),
                    q_tile(c, stage) + ACROSS(Q_BLOCK));
    ptx_wgmma_wait(2);
    ptx_register_fence(c->scores, DQ_SUMS);
    if (DQ_WAITS_IN_TURN) wait_for_dq_buffer(pipe, c, DQ_PARTS * count);
    share_part(pipe, c, c->scores, DQ_COLUMNS, DQ_PARTS * count);
    ptx_wgmma_wait(1);
    release_dout(pipe, c, count);
    ptx_register_forget(rest, REST_SUMS);
    ptx_wgmma_fence();
    issue_dq_rest(rest, ds_before(c, count), rest_columns(c));
}

/* Stores the second part of dQ, which has been computed. */
FA_DEVICE void share_rest(const pipeline *pipe, const consumer_state *c, float *rest, int count)
{
    wait_for_dq_buffer(pipe, c, DQ_PARTS * count + 1);
    share_part(pipe, c, rest, DQ_REST, DQ_PARTS * count + 1);
}

/* Reads a number of the block's work again at each call, because no register is free to hold it. */
FA_DEVICE int read_number(const int32_t *number) { return *(const volatile int32_t *)number; }

/* Exponents of the weights, in registers of their own. */
FA_DEVICE void find_exponents(float *x, const float *scores, float scale, uint32_t rows)
{
#pragma unroll
    for (int n = 0; n < QUERIES / 16; n++) {
        float lse[4];
        load_four_rows(lse, rows + 64 * (uint32_t)n);
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[8 * n + i] = fmaf(scores[8 * n + i], scale, -lse[i / 4 * 2 + i % 2]);
    }
}

/* Computes operands from weights and from dP - delta. masked: if a weight is 0, its dS is 0
 * whatever dP is. */
FA_DEVICE void weigh_gradients(consumer_state *c, const float *weights, uint32_t *ds, bool masked)
{
#pragma unroll
    for (int word = 0; word < SCORES / 2; word++) {
        const float *x = weights + 2 * word, *dp = c->scores + 2 * word;
        float y[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            y[i] = x[i] * (dp[i] * WEIGHT_UNIT);
            if (masked && x[i] == 0.0f) y[i] = 0.0f;
        }
        c->weights[word] = fa_pack_x2(x[0], x[1]);
        ds[word] = fa_pack_x2(y[0], y[1]);
    }
}

/* Computes weights and dS of tile `at`, whose scores are available. */
FA_DEVICE void make_weights(const pipeline *pipe, const fa_attention_params *p, consumer_state *c,
                            const tile_cursor *at, bool masked)
{
    const int stage = stage_of(at->count);
    const uint32_t rows = row_address(pipe, stage);
    float weights[SCORES];
    uint32_t ds[SCORES / 2];
    find_exponents(weights, c->scores, c->scale, rows);
    ptx_register_fence(weights, SCORES);
    ptx_mbarrier_wait(&pipe->state->dout_full[stage], parity_of(at->count));
    begin_dp(c->scores, rows);
    ptx_register_fence(c->scores, SCORES);
    ptx_wgmma_fence();
    issue_dp(c, c->scores, stage);
    /* Always true. If the assembler could see that, it would move this after the wait. */
    if (p->d_v > 0) {
#pragma unroll
        for (int e = 0; e < SCORES; e++) weights[e] = ptx_ex2(weights[e]);
        if (masked) mask_weights(work_of(pipe), weights, c->number, at->tile);
    }
    ptx_register_fence(weights, SCORES);
    ptx_wgmma_wait(0);
    ptx_register_fence(c->scores, SCORES);
    weigh_gradients(c, weights, ds, masked);
    if (at->count >= DS_BUFFERS) wait_for_ds(c);
    store_ds(c, ds, at->count);
    ptx_fence_proxy_async();
}

/* The first tile. */
FA_DEVICE void begin_tiles(const pipeline *pipe, const fa_backward_params *p, consumer_state *c,
                           const tile_cursor *at)
{
    shared_state *state = pipe->state;
    if (c->number == 1) let_other_issue(c); /* consumer 0 may begin */
    wait_for_k(pipe, &p->a);
    ptx_mbarrier_wait(&state->q_full[0], 0);
    ptx_register_forget(c->scores, SCORES);
    ptx_wgmma_fence();
    issue_s(c, 0);
    wait_for_v(pipe);
    ptx_wgmma_wait(0);
    ptx_register_fence(c->scores, SCORES);
    make_weights(pipe, &p->a, c, at, true);
}

/* Multiplies the tile before `at`, and computes weights and dS of tile `at`. */
FA_DEVICE void consume_tile(const pipeline *pipe, const fa_backward_params *p, consumer_state *c,
                            const tile_cursor *at, bool masked)
{
    shared_state *state = pipe->state;
    const int count = at->count - 1, next = stage_of(at->count), parity = parity_of(at->count);
    float rest[REST_SUMS];
    if (!DQ_WAITS_IN_TURN) wait_for_dq_buffer(pipe, c, DQ_PARTS * count);
    wait_until_may_issue(c);
    issue_products(pipe, c, rest, count);
    ptx_mbarrier_wait(&state->q_full[next], parity);
    ptx_register_forget(c->scores, SCORES);
    ptx_wgmma_fence();
    issue_s(c, next);
    ptx_wgmma_wait(2);
    release_q(pipe, c, count);
    ptx_wgmma_wait(1);
    ptx_register_fence(rest, REST_SUMS);
    let_other_issue(c); /* it may overwrite a buffer of dS that has been read here */
    if (count > 0) free_ds(c);
    share_rest(pipe, c, rest, count);
    ptx_wgmma_wait(0);
    ptx_register_fence(c->scores, SCORES);
    make_weights(pipe, &p->a, c, at, masked);
}

/* All tiles but the first one, which is `at`. */
FA_DEVICE void consume_tiles(const pipeline *pipe, const fa_backward_params *p, consumer_state *c,
                             tile_cursor *at)
{
    const block_work *w = work_of(pipe);
#pragma unroll 1
    for (;;) {
        advance(at, read_number(&w->from), read_number(&w->to));
        if (at->count >= read_number(&w->tiles)) break;
        if (at->tile >= read_number(&w->unmasked_from[c->number]) &&
            at->tile < read_number(&w->unmasked_to[c->number]))
            consume_tile(pipe, p, c, at, false);
        else consume_tile(pipe, p, c, at, true);
    }
}

/* The products of the last tile. Its dQ needs another turn, because consumer 1 stores its dS after
 * consumer 0. The sums are stored meanwhile. */
FA_DEVICE void finish_tiles(const pipeline *pipe, const fa_backward_params *p, consumer_state *c,
                            int end)
{
    const int last = end - 1;
    float rest[REST_SUMS];
    if (!DQ_WAITS_IN_TURN) wait_for_dq_buffer(pipe, c, DQ_PARTS * last);
    wait_until_may_issue(c);
    issue_products(pipe, c, rest, last);
    ptx_wgmma_wait(0);
    release_q(pipe, c, last);
    ptx_register_fence(rest, REST_SUMS);
    let_other_issue(c);
    share_rest(pipe, c, rest, last);
    store_sums(pipe, p, c, end, true, true);
    if (c->number == 0) wait_until_may_issue(c);
    ptx_register_forget(c->scores, DQ_SUMS);
    ptx_register_forget(rest, REST_SUMS);
    ptx_wgmma_fence();
    issue_dq(c->scores, ds_tile(c, last), key_columns(c));
    issue_dq_rest(rest, ds_tile(c, last), rest_columns(c));
    wait_for_dq_buffer(pipe, c, DQ_PARTS * end);
    ptx_wgmma_wait(0);
    ptx_register_fence(c->scores, DQ_SUMS);
    ptx_register_fence(rest, REST_SUMS);
    share_part(pipe, c, c->scores, DQ_COLUMNS, DQ_PARTS * end);
    share_rest(pipe, c, rest, end);
}

#endif

#endif
