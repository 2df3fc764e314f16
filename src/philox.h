/*
 * Dropout bits: Philox-4x32-7 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as
 * 1, 2, 3", SC 2011). It is counter-based, so the bits of any element can be computed independently.
 * flashattn.h defines the layout of counters. With this layout a thread that holds a tensor-core
 * accumulator (pairs of columns 8 apart) uses all 128 bits of a block.
 */
#ifndef FA_PHILOX_H
#define FA_PHILOX_H

#include <stdbool.h>
#include <stdint.h>

/* Kernels define this themselves before they include this header. */
#ifndef FA_SHARED_FUNCTION
#define FA_SHARED_FUNCTION static inline
#endif

/* The 64 bits of a product. */
#ifndef FA_WIDE_PRODUCT
#define FA_WIDE_PRODUCT(a, b) ((uint64_t)(a) * (b))
#endif

enum { FA_PHILOX_ROUNDS = 7 };

FA_SHARED_FUNCTION void fa_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < FA_PHILOX_ROUNDS; round++) {
        uint64_t a = FA_WIDE_PRODUCT(c0, 0xD2511F53u);
        uint64_t b = FA_WIDE_PRODUCT(c2, 0xCD9E8D57u);
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

/* The 8 x 16 bits that cover columns 32*g + 2*c + {0,1} + 8*{0,1,2,3} of row i. */
FA_SHARED_FUNCTION void fa_dropout_block(uint64_t seed, uint64_t offset, int64_t batch_head,
                                         int64_t i, int64_t g, int c, uint32_t out[4])
{
    const uint32_t counter[4] = {(uint32_t)(4 * g + c), (uint32_t)i,
                                 (uint32_t)batch_head + (uint32_t)(offset >> 32), (uint32_t)offset};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    fa_philox(counter, key, out);
}

/* The 16 bits of one element. */
FA_SHARED_FUNCTION uint32_t fa_dropout_bits(uint64_t seed, uint64_t offset, int64_t batch_head,
                                            int64_t i, int64_t j)
{
    uint32_t block[4];
    fa_dropout_block(seed, offset, batch_head, i, j >> 5, (int)((j >> 1) & 3), block);
    uint32_t word = block[(j >> 3) & 3];
    return (j & 1) ? word >> 16 : word & 0xffffu;
}

#endif
