/*
 * Stores the gradients of a block's keys or values: from accumulators to the caller's rows, or to
 * those of its split.
 */
#ifndef FA_KERNELS_BACKWARD_SM80_STORE_CUH
#define FA_KERNELS_BACKWARD_SM80_STORE_CUH

#include "backward_sm80/multiply.cuh"
#include "common/exchange.cuh"
#include "common/key_tiles.cuh"
#include "common/rows.cuh"
#include "common/x2.cuh"

/* Rows of the block's keys, of one gradient. */
typedef struct gradient_rows {
    char *first;  /* NULL: the gradient is not wanted */
    int64_t step; /* bytes from a row to the next */
    int count, columns;
    bool whole;  /* rows consist of aligned vectors */
    bool floats; /* they are sums in float32, whatever the type of the gradient */
} gradient_rows;

/* key_sums: of the block's split; NULL: there is one split. */
FA_DEVICE gradient_rows find_gradient_rows(const fa_key_tile *k, const fa_kernel_view *view,
                                           float *key_sums, int columns)
{
    gradient_rows rows;
    rows.count = (int)k->count;
    rows.columns = columns;
    rows.floats = key_sums != NULL;
    rows.whole = rows.floats || has_vectors(view);
    rows.step = rows.floats ? HEAD_DIM * 4 : view->stride[1] * ELEMENT_BYTES;
    rows.first =
        rows.floats ? (char *)(void *)key_sums : fa_view_row(view, k->block, k->row, k->head_kv);
    if (!view->data) rows.first = NULL;
    return rows;
}

#if HIGH_LOW

FA_DEVICE void store_gradient(const gradient_rows *rows, const fa_gradient *g, const fa_layout *l,
                              float scale)
{
    const int lane = threadIdx.x % 32;
    if (!rows->first) return;
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) {
        const int row = l->group * GROUP_ROWS + lane / 4 + 8 * i;
        if (row >= rows->count) continue;
        char *to = rows->first + row * rows->step;
#pragma unroll
        for (int n = 0; n < D_TILES / 2; n++) { /* four adjacent columns */
            const int tile = n / 2 * 4, e = i % 2 * 2 + n % 2;
            const float(*x)[4] = g->at[i / 2] + tile;
            fa_store4_float32(
                to, rows->whole, own_column(l) + 8 * tile + 4 * gradient_unit(lane % 4, n % 2),
                rows->columns,
                make_float4(x[0][e] * scale, x[1][e] * scale, x[2][e] * scale, x[3][e] * scale));
        }
    }
}

#else

/* Stores four words of a row, of the blocks of columns 8n to 8n + 31. `row` may be NULL: then lanes
 * only exchange words. */
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

/* Stores the last two words of a row, if no four are left. */
FA_DEVICE void store_two_words(char *row, const uint32_t x[2], int column, int columns)
{
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (row) fa_scatter_x2(row, column + 8 * i + 2 * (int)(threadIdx.x % 4), columns, x[i]);
}

FA_DEVICE void store_floats(const gradient_rows *rows, const fa_gradient *g, const fa_layout *l,
                            float scale)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) {
        const int row = l->group * GROUP_ROWS + lane / 4 + 8 * i;
        if (row >= rows->count) continue;
        char *to = rows->first + row * rows->step + 4 * (own_column(l) + lane % 4 * 2);
#pragma unroll
        for (int n = 0; n < D_TILES; n++) {
            const float *from = g->at[i / 2][n] + i % 2 * 2;
            *(float2 *)(void *)(to + 32 * n) = make_float2(from[0] * scale, from[1] * scale);
        }
    }
}

FA_DEVICE void store_gradient(const gradient_rows *rows, const fa_gradient *g, const fa_layout *l,
                              float scale)
{
    const int lane = threadIdx.x % 32;
    if (!rows->first) return;
    if (rows->floats) {
        store_floats(rows, g, l, scale);
        return;
    }
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) {
        const int row = l->group * GROUP_ROWS + lane / 4 + 8 * i;
        char *to = row < rows->count ? rows->first + row * rows->step : NULL;
#pragma unroll
        for (int n = 0; n < D_TILES; n += 4) {
            const int column = own_column(l) + 8 * n;
            uint32_t x[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float *from = g->at[i / 2][n + j < D_TILES ? n + j : n] + i % 2 * 2;
                x[j] = fa_pack_x2(from[0] * scale, from[1] * scale);
            }
            if (n + 4 <= D_TILES) store_words(to, x, column, rows->columns, rows->whole);
            else store_two_words(to, x, column, rows->columns);
        }
    }
}

#endif

#endif
