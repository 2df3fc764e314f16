/*
 * The gradients of a block's keys or values, from accumulators to the caller's rows.
 */
#ifndef FA_KERNELS_BACKWARD_SM80_STORE_CUH
#define FA_KERNELS_BACKWARD_SM80_STORE_CUH

#include "backward_sm80/multiply.cuh"
#include "common/exchange.cuh"
#include "common/key_tiles.cuh"
#include "common/rows.cuh"
#include "common/x2.cuh"

#if HIGH_LOW

FA_DEVICE void store_gradient(const fa_key_tile *k, const fa_kernel_view *view,
                              const fa_gradient *g, const fa_layout *l, int columns, float scale)
{
    const int lane = threadIdx.x % 32;
    if (!view->data) return;
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) {
        const int row = l->group * GROUP_ROWS + lane / 4 + 8 * i;
        if (row >= k->count) continue;
        char *to = fa_view_row(view, k->block, k->row + row, k->head_kv);
#pragma unroll
        for (int n = 0; n < D_TILES / 2; n++) { /* four neighbours */
            const int tile = n / 2 * 4, e = i % 2 * 2 + n % 2;
            const float(*x)[4] = g->at[i / 2] + tile;
            fa_store4_float32(
                to, has_vectors(view),
                l->share * COLUMNS + 8 * tile + 4 * gradient_unit(lane % 4, n % 2), columns,
                make_float4(x[0][e] * scale, x[1][e] * scale, x[2][e] * scale, x[3][e] * scale));
        }
    }
}

#else

/* Four words of a row, of the blocks of columns 8n to 8n + 31; `row` may be NULL: then lanes only exchange. */
FA_DEVICE void store_words(char *row, uint32_t x[4], int column, int columns, bool whole)
{
    const int t = threadIdx.x % 4;
    if (whole) {
        fa_exchange_words(x, t);
        if (row && column + 8 * t < columns)
            *(uint4 *)(void *)(row + 2 * (column + 8 * t)) = make_uint4(x[0], x[1], x[2], x[3]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (row) fa_scatter_x2(row, column + 8 * i + 2 * t, columns, x[i]);
}

/* Two words of a row where no four are left. */
FA_DEVICE void store_two_words(char *row, const uint32_t x[2], int column, int columns)
{
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (row) fa_scatter_x2(row, column + 8 * i + 2 * (int)(threadIdx.x % 4), columns, x[i]);
}

FA_DEVICE void store_gradient(const fa_key_tile *k, const fa_kernel_view *view,
                              const fa_gradient *g, const fa_layout *l, int columns, float scale)
{
    const int lane = threadIdx.x % 32;
    const bool whole = has_vectors(view);
    if (!view->data) return;
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) {
        const int row = l->group * GROUP_ROWS + lane / 4 + 8 * i;
        char *to = row < k->count ? fa_view_row(view, k->block, k->row + row, k->head_kv) : NULL;
#pragma unroll
        for (int n = 0; n < D_TILES; n += 4) {
            const int column = l->share * COLUMNS + 8 * n;
            uint32_t x[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float *from = g->at[i / 2][n + j < D_TILES ? n + j : n] + i % 2 * 2;
                x[j] = fa_pack_x2(from[0] * scale, from[1] * scale);
            }
            if (n + 4 <= D_TILES) store_words(to, x, column, columns, whole);
            else store_two_words(to, x, column, columns);
        }
    }
}

#endif

#endif
