/*
 * The last launch of backward_sm80: multiplies the sums of dQ by the scale and stores them in the
 * caller's rows. Bound by memory.
 */
#include "backward_sm80/backward_sm80.h"
#include "backward_sm80/sums.cuh"
#include "common/exchange.cuh"
#include "common/rows.cuh"
#include "common/sequence.cuh"
#include "common/x2.cuh"

enum {
    TILE = FA_BACKWARD_SM80_TILE,
    THREADS = FA_BACKWARD_SM80_PASS_THREADS,
    /* Units that a warp does at a time: 16 queries and 32 columns. */
    UNITS = TILE / 16 * HEAD_DIM / 32,
    PASSES = (UNITS + THREADS / 32 - 1) / (THREADS / 32)
};

#if FA_ELEMENT_BYTES(ELEMENT) == 4

/* The thread's two vectors of 32 columns of row i. */
FA_DEVICE void store_row(const fa_backward_params *p, const fa_tile *t, int64_t i, const float x[8],
                         int column)
{
    if (i >= t->room_q) return;
    char *row = fa_view_row(&p->dq, t->block_q, t->start_q + i, t->head);
#pragma unroll
    for (int n = 0; n < 8; n += 4)
        fa_store4_float32(row, p->dq.vector != 0,
                          column + 4 * gradient_unit((int)threadIdx.x % 4, n / 4), p->a.d,
                          make_float4(x[n], x[n + 1], x[n + 2], x[n + 3]));
}

/* Rows after the last query get zeros, whatever keys they were multiplied with. */
FA_DEVICE void store_unit(const fa_backward_params *p, const fa_tile *t, const float4 x[4],
                          int block, int column)
{
    const float scale = p->a.scale;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int64_t i = t->first + 16 * block + threadIdx.x % 32 / 4 + 8 * r;
        float row[8];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            row[n] = i < t->n_q ? (r ? x[n].z : x[n].x) * scale : 0.0f;
            row[4 + n] = i < t->n_q ? (r ? x[n].w : x[n].y) * scale : 0.0f;
        }
        store_row(p, t, i, row, column);
    }
}

#else

/* Four words of row i of a thread, of four blocks of columns from `column` on. */
FA_DEVICE void store_words(const fa_backward_params *p, const fa_tile *t, int64_t i, uint32_t x[4],
                           int column)
{
    const int lane = threadIdx.x % 4;
    const bool exists = i < t->room_q;
    char *row = exists ? fa_view_row(&p->dq, t->block_q, t->start_q + i, t->head) : NULL;
    if (p->dq.vector == 8) {
        fa_exchange_words(x, lane);
        if (exists && column + 8 * lane < p->a.d)
            *(uint4 *)(void *)(row + 2 * (column + 8 * lane)) = make_uint4(x[0], x[1], x[2], x[3]);
        return;
    }
#pragma unroll
    for (int n = 0; n < 4; n++)
        if (exists) fa_scatter_x2(row, column + 8 * n + 2 * lane, p->a.d, x[n]);
}

/* Rows after the last query get zeros, whatever keys they were multiplied with. */
FA_DEVICE void store_unit(const fa_backward_params *p, const fa_tile *t, const float4 x[4],
                          int block, int column)
{
    const float scale = p->a.scale;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int64_t i = t->first + 16 * block + threadIdx.x % 32 / 4 + 8 * r;
        uint32_t words[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float low = r ? x[n].z : x[n].x, high = r ? x[n].w : x[n].y;
            words[n] = i < t->n_q ? fa_pack_x2(low * scale, high * scale) : 0;
        }
        store_words(p, t, i, words, column);
    }
}

#endif

FA_KERNEL __launch_bounds__(THREADS, 1)
    backward_sm80_finish(const __grid_constant__ fa_backward_params p,
                         const __grid_constant__ fa_backward_sm80_params s)
{
    __shared__ fa_tile tile;
    const int64_t number = find_own_tile(&s, blockIdx.x);
    float *sums = s.sums + number * (FA_BACKWARD_SM80_SUM_BYTES(HEAD_DIM) / 4);
    const int warp = (int)threadIdx.x / 32;
    /* In float32 `prepare` and the kernel leave out columns that do not exist. */
    const int units = FA_ELEMENT_BYTES(ELEMENT) == 4 ? TILE / 16 * (((int)p.a.d + 31) / 32) : UNITS;
    float4 x[PASSES][4];
    if (threadIdx.x == 0) tile = fa_find_tile(&p.a, blockIdx.x, TILE);
#pragma unroll
    for (int i = 0; i < PASSES * 4; i++) {
        const int unit = warp + i / 4 * (THREADS / 32);
        if (unit < units)
            x[i / 4][i % 4] = load_sums(fragment_sums(sums, unit % 4, unit / 4 * 4 + i % 4));
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        const int unit = warp + i * (THREADS / 32);
        if (unit < units) store_unit(&p, &tile, x[i], unit % 4, unit / 4 * 32);
    }
}
