/*
 * Stores rounded sums of a tile of 64 rows: from the order of the accumulators to rows of the
 * caller.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_WHOLE_ROWS_CUH
#define FA_KERNELS_BACKWARD_SM90_WHOLE_ROWS_CUH

#include "common/exchange.cuh"
#include "common/rows.cuh"
#include "common/x2.cuh"

/* A thread's words of a row, from four blocks of eight columns; `block` is the first of them. row
 * NULL: the row does not exist. All lanes of a warp call it. */
FA_DEVICE void store_words(const fa_kernel_view *view, char *row, int columns, uint32_t x[4],
                           int block)
{
    const int lane = threadIdx.x % 4;
    if (view->vector == 8) {
        fa_exchange_words(x, lane);
        if (row && 8 * (block + lane) < columns)
            *(uint4 *)(row + 16 * (block + lane)) = make_uint4(x[0], x[1], x[2], x[3]);
        return;
    }
#pragma unroll
    for (int n = 0; n < 4; n++)
        if (row) fa_scatter_x2(row, 8 * (block + n) + 2 * lane, columns, x[n]);
}

#endif
