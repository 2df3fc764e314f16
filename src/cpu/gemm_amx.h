/*
 * The products of gemm.h for pairs of bfloat16, by AMX: C = A B on top of alpha * C in blocks of 2 x 2
 * tiles. Each tile of A and of B that is loaded then serves two products, which take twice as long as the
 * loads from the first-level cache.
 *
 * All tiles are whole, so that their shapes need not change: the depth of A and B is padded with zeros
 * to a multiple of FA_AMX_TILE words; A and C have rows to spare up to a multiple of FA_AMX_TILE, and B and C
 * columns.
 */
#ifndef FA_CPU_GEMM_AMX_H
#define FA_CPU_GEMM_AMX_H

#include "gemm.h"
#include "simd_amx.h"

enum { FA_AMX_ROWS = 2 * FA_AMX_TILE }; /* of a block */

/* A tile of C from the product's, which lies in memory. As in gemm.h, what C holds is added at the end. */
FA_INLINE void fa_amx_add(const float *product, float *c, int64_t ldc, const float *alpha)
{
    for (int r = 0; r < FA_AMX_TILE; r++, c += ldc)
        v_store(c, v_fma(v_set1(alpha[r]), v_load(c), v_load(product + r * FA_AMX_TILE)));
}

/* One block. rows and columns, in tiles, are constants where this is inlined. */
FA_INLINE void fa_amx_block(const int rows, const int columns, const fa_gemm *g, const uint32_t *a,
                            const uint32_t *b, float *c, const float *alpha)
{
    const int64_t depth = g->depth, a_row = g->a_row, ldb = g->ldb, ldc = g->ldc;
    const uint32_t *const a2 = a + FA_AMX_TILE * a_row;
    tile_zero(0);
    if (columns > 1) tile_zero(1);
    if (rows > 1) tile_zero(2);
    if (rows > 1 && columns > 1) tile_zero(3);
    for (int64_t k = 0; k < depth; k += FA_AMX_TILE, b += FA_AMX_TILE * ldb) {
        tile_load(4, a + k, a_row);
        tile_load(6, b, ldb);
        tile_dot(0, 4, 6);
        if (columns > 1) {
            tile_load(7, b + FA_AMX_TILE, ldb);
            tile_dot(1, 4, 7);
        }
        if (rows > 1) {
            tile_load(5, a2 + k, a_row);
            tile_dot(2, 5, 6);
            if (columns > 1) tile_dot(3, 5, 7);
        }
    }
    float *const c2 = c + FA_AMX_TILE * ldc;
    if (!alpha) {
        tile_store(0, c, ldc);
        if (columns > 1) tile_store(1, c + FA_AMX_TILE, ldc);
        if (rows > 1) tile_store(2, c2, ldc);
        if (rows > 1 && columns > 1) tile_store(3, c2 + FA_AMX_TILE, ldc);
        return;
    }
    _Alignas(64) float product[4][FA_AMX_TILE * FA_AMX_TILE];
    tile_store(0, product[0], FA_AMX_TILE);
    if (columns > 1) tile_store(1, product[1], FA_AMX_TILE);
    if (rows > 1) tile_store(2, product[2], FA_AMX_TILE);
    if (rows > 1 && columns > 1) tile_store(3, product[3], FA_AMX_TILE);
    fa_amx_add(product[0], c, ldc, alpha);
    if (columns > 1) fa_amx_add(product[1], c + FA_AMX_TILE, ldc, alpha);
    if (rows > 1) fa_amx_add(product[2], c2, ldc, alpha + FA_AMX_TILE);
    if (rows > 1 && columns > 1) fa_amx_add(product[3], c2 + FA_AMX_TILE, ldc, alpha + FA_AMX_TILE);
}

#define FA_AMX_BLOCK(rows, columns)                                                                \
    static void fa_amx_block_##rows##_##columns(const fa_gemm *g, const uint32_t *a,               \
                                                const uint32_t *b, float *c, const float *alpha)   \
    {                                                                                              \
        fa_amx_block(rows, columns, g, a, b, c, alpha);                                            \
    }
FA_AMX_BLOCK(1, 1)
FA_AMX_BLOCK(1, 2)
FA_AMX_BLOCK(2, 1)
FA_AMX_BLOCK(2, 2)

/* Runs all blocks of C. A is read by rows: a_col is 1. The thread's tiles are configured. */
static inline void fa_amx_run(const fa_gemm *g, int64_t rows, int64_t columns)
{
    static fa_tile_function *const block[2][2] = {{fa_amx_block_1_1, fa_amx_block_1_2},
                                                  {fa_amx_block_2_1, fa_amx_block_2_2}};
    for (int64_t r = 0; r < rows; r += FA_AMX_ROWS)
        for (int64_t col = 0; col < columns; col += 2 * FA_AMX_TILE)
            block[rows - r > FA_AMX_TILE][columns - col > FA_AMX_TILE](
                g, g->a + r * g->a_row, g->b + col, g->c + r * g->ldc + col,
                g->alpha ? g->alpha + r : NULL);
}

#endif
