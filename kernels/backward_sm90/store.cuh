/*
 * Stores the gradients of a block's keys or values: from accumulators to the caller's rows.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_STORE_CUH
#define FA_KERNELS_BACKWARD_SM90_STORE_CUH

#include "backward_sm90/config.cuh"
#include "common/exchange.cuh"
#include "common/key_tiles.cuh"
#include "common/rows.cuh"
#include "common/x2.cuh"
#include "ptx/address.cuh"
#include "ptx/convert.cuh"
#include "ptx/store.cuh"

enum { WARP_ROWS = 16 };

/* A warp's buffer has blocks of 16 rows of 128 bytes. Chunks of 16 bytes are swizzled within their
 * row, so that neither a row nor a column accesses a bank twice. */
FA_DEVICE char *buffer_chunk(char *buffer, int row, int chunk)
{
    return buffer + row * 128 + (chunk ^ row % 8) * 16;
}

/* Columns 8n to 8n + 15 of the warp's rows. sums: element 4j + 2r + i of a thread is column 8j + 2
 * (lane % 4) + i of its row r. */
FA_DEVICE void pack_gradients(uint32_t x[4], const float *sums, int n, float scale)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float *from = sums + 4 * (n + i / 2) + 2 * (i % 2);
        x[i] = fa_pack_x2(from[0] * scale, from[1] * scale);
    }
}

/* The rows go through shared memory, so that eight lanes store 128 contiguous bytes of a row. row:
 * the first of the warp's rows; count: the number of them. */
FA_DEVICE void store_whole_rows(char *buffer, const fa_key_tile *k, const fa_kernel_view *view,
                                const float *sums, int row, int dim, int columns, float scale)
{
    const int lane = threadIdx.x % 32;
    __syncwarp(); /* what was in the buffer has been read */
#pragma unroll
    for (int n = 0; n < dim / 8; n += 2) {
        uint32_t x[4];
        pack_gradients(x, sums, n, scale);
        ptx_stmatrix_x4(ptx_shared_address(buffer_chunk(buffer + n / 8 * WARP_ROWS * 128, lane % 16,
                                                        n % 8 + lane / 16)),
                        x);
    }
    __syncwarp();
    char *to = fa_view_row(view, k->block, k->row + row + lane / 8, k->head_kv) + lane % 8 * 16;
    const int64_t step = 4 * view->stride[1] * 2;
    const int rows = (int)k->count - row - lane / 8; /* from the lane's first one on */
    uint4 x[HEAD_DIM / 64][4];
#pragma unroll
    for (int n = 0; n < (dim + 63) / 64; n++)
#pragma unroll
        for (int part = 0; part < 4; part++)
            x[n][part] = *(const uint4 *)buffer_chunk(buffer + n * WARP_ROWS * 128,
                                                      4 * part + lane / 8, lane % 8);
#pragma unroll
    for (int part = 0; part < 4; part++) {
#pragma unroll
        for (int n = 0; n < (dim + 63) / 64; n++)
            if (4 * part < rows && 64 * n + lane % 8 * 8 < columns)
                ptx_store_global_16(to + 128 * n, x[n][part]);
        to += step;
    }
}

/* The same for a block that has some of the query heads: sums are stored in the order of the
 * accumulators. */
FA_DEVICE void leave_sums(float *to, const float *sums, int dim, int consumer)
{
    float4 *own = (float4 *)(void *)(to + consumer * OWN_KEYS * dim) + threadIdx.x % WARPGROUP;
#pragma unroll
    for (int j = 0; j < dim / 8; j++)
        own[WARPGROUP * j] =
            make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]);
}

/* Rows of a consumer. buffer: the warp's, for 16 rows of dim elements. */
FA_DEVICE void store_gradients(const fa_key_tile *k, const fa_kernel_view *view, char *buffer,
                               const float *sums, int dim, int columns, float scale, int consumer)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32;
    const int row = consumer * OWN_KEYS + warp * WARP_ROWS;
    if (!view->data || row >= k->count) return;
    if (view->vector == 8) {
        store_whole_rows(buffer, k, view, sums, row, dim, columns, scale);
        return;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int own = row + lane / 4 + 8 * r;
        if (own >= k->count) continue;
        char *to = fa_view_row(view, k->block, k->row + own, k->head_kv);
#pragma unroll
        for (int n = 0; n < dim / 8; n++)
            fa_scatter_x2(to, 8 * n + 2 * (lane % 4), columns,
                          fa_pack_x2(sums[4 * n + 2 * r] * scale, sums[4 * n + 2 * r + 1] * scale));
    }
}

#endif
