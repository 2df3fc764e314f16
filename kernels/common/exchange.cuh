/*
 * Moves fragments of tensor cores to rows in memory. A row consists of blocks of 8 columns. Lane t of four has columns
 * 2t and 2t + 1 of each block, as one word of two 16-bit numbers ("x2").
 */
#ifndef FA_KERNELS_COMMON_EXCHANGE_CUH
#define FA_KERNELS_COMMON_EXCHANGE_CUH

#include "common/device.cuh"

/* Four lanes exchange words: lane t gets all lanes' words t. */
FA_DEVICE void fa_exchange_words(uint32_t x[4], int t)
{
#pragma unroll
    for (int i = 0; i < 4; i++) { /* first with the neighbour, then with the one after it */
        const int bit = i < 2 ? 1 : 2, low = i == 0 ? 0 : i == 1 ? 2 : i - 2;
        const bool upper = (t & bit) != 0;
        const uint32_t mine = upper ? x[low] : x[low + bit];
        const uint32_t other = __shfl_xor_sync(0xffffffffu, mine, bit);
        if (upper) x[low] = other;
        else x[low + bit] = other;
    }
}

/* Stores a row that ends at column `columns`, element by element. */
FA_DEVICE void fa_scatter_x2(char *row, int column, int columns, uint32_t x2)
{
    if (column < columns) ((uint16_t *)row)[column] = (uint16_t)x2;
    if (column + 1 < columns) ((uint16_t *)row)[column + 1] = (uint16_t)(x2 >> 16);
}

#endif
