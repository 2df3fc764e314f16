/*
 * The gradients of a block's keys or values, from accumulators to the caller's rows.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_STORE_CUH
#define FA_KERNELS_BACKWARD_SM90_STORE_CUH

#include "backward_sm90/config.cuh"
#include "common/exchange.cuh"
#include "common/key_tiles.cuh"
#include "common/rows.cuh"
#include "common/x2.cuh"

/* Four words of a row, of the blocks of columns 4n to 4n + 3; `row` may be NULL: then lanes only exchange. */
FA_DEVICE void store_words(char *row, uint32_t x[4], int n, int columns, bool whole)
{
    const int t = threadIdx.x % 4;
    if (whole) {
        fa_exchange_words(x, t);
        if (row && 32 * n + 8 * t < columns)
            *(uint4 *)(row + 2 * (32 * n + 8 * t)) = make_uint4(x[0], x[1], x[2], x[3]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (row) fa_scatter_x2(row, 32 * n + 8 * i + 2 * t, columns, x[i]);
}

/* Rows of a consumer, of `dim` sums each: 4j + 2r + i of a thread's sums is column 8j + 2 (lane % 4) + i of its row r. */
FA_DEVICE void store_gradients(const fa_key_tile *k, const fa_kernel_view *view, const float *sums,
                               int dim, int columns, float scale, int consumer)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32;
    const bool whole = view->vector == 8;
    if (!view->data) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = consumer * OWN_KEYS + warp * 16 + lane / 4 + 8 * r;
        char *to = row < k->count ? fa_view_row(view, k->block, k->row + row, k->head_kv) : NULL;
#pragma unroll
        for (int n = 0; n < dim / 32; n++) {
            uint32_t x[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *from = sums + 4 * (4 * n + i) + 2 * r;
                x[i] = fa_pack_x2(from[0] * scale, from[1] * scale);
            }
            store_words(to, x, n, columns, whole);
        }
    }
}

#endif
