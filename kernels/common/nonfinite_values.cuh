/*
 * O += P V of one warp if some values are infinite or NaN and hidden from some rows: a weight of 0 must exclude them,
 * although 0 * NaN is NaN. The products use finite values only. Then infinities and NaN are added where the weight is not
 * 0.
 *
 * The including file defines ELEMENT (common/element.h), M_TILES and D_TILES, the 16-row and 8-column tiles of the
 * warp's part of the output. v: the address of this lane's fragments of 16 keys' values (ptx/ldmatrix.cuh).
 */
#ifndef FA_KERNELS_COMMON_NONFINITE_VALUES_CUH
#define FA_KERNELS_COMMON_NONFINITE_VALUES_CUH

#include "common/device.cuh"
#include "common/mma.cuh"
#include "common/x2.cuh"
#include "ptx/ldmatrix.cuh"

/* The address of the fragments `block` times 16 columns after those of v. A kernel with swizzled tiles has its own version. */
#ifndef FA_VALUE_BLOCK
#define FA_VALUE_BLOCK(v, block) ((v) + (uint32_t)((block)*32))
#endif

/* A number 1 in each half that is not finite, except the infinity of sign `without`; 0 in the others. */
FA_DEVICE uint32_t fa_mark_x2(uint32_t x2, uint32_t without)
{
    const uint32_t other = x2 ^ (FA_X2_EXPONENTS | without);
    return FA_X2_ONES & fa_x2_spread(fa_x2_not_finite(x2)) &
           fa_x2_spread(fa_x2_not_zero(other) | (other & 0x80008000u));
}

/* A number 1 in each half that is not 0. */
FA_DEVICE uint32_t fa_mark_weights(uint32_t x2)
{
    return FA_X2_ONES & fa_x2_spread(fa_x2_not_zero(x2));
}

/* O += P V of 16 keys and of finite values. */
FA_DEVICE void fa_add_finite_values(float o[M_TILES][D_TILES][4], uint32_t a[M_TILES][4],
                                    uint32_t v)
{
#pragma unroll
    for (int block = 0; block < D_TILES / 2; block++) {
        uint32_t b[4];
        ptx_ldmatrix_x4_trans(b, FA_VALUE_BLOCK(v, block));
#pragma unroll
        for (int i = 0; i < 4; i++) b[i] &= ~fa_x2_spread(fa_x2_not_finite(b[i]));
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            fa_mma(o[m][2 * block], a[m], b[0], b[1]);
            fa_mma(o[m][2 * block + 1], a[m], b[2], b[3]);
        }
    }
}

/* Adds infinity, or minus infinity, to elements for which one of these keys' values is that or NaN and has a
 * weight other than 0. marks: fa_mark_weights of the weights. */
FA_DEVICE void fa_add_infinities(float o[M_TILES][D_TILES][4], uint32_t marks[M_TILES][4],
                                 uint32_t v, bool negative)
{
    const uint32_t without = negative ? 0 : 0x80008000u;
    const float infinity = negative ? -INFINITY : INFINITY;
#pragma unroll
    for (int block = 0; block < D_TILES / 2; block++) {
        uint32_t b[4];
        ptx_ldmatrix_x4_trans(b, FA_VALUE_BLOCK(v, block));
#pragma unroll
        for (int i = 0; i < 4; i++) b[i] = fa_mark_x2(b[i], without);
#pragma unroll
        for (int i = 0; i < M_TILES * 2; i++) {
            float count[4] = {0.0f};
            fa_mma(count, marks[i / 2], b[i % 2 * 2], b[i % 2 * 2 + 1]);
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (count[e] > 0.0f) o[i / 2][2 * block + i % 2][e] += infinity;
        }
    }
}

/* O += P V of 16 keys: of the finite values, then infinities of both signs, whose sum is NaN. Changes a, the
 * fragments of the weights. */
FA_DEVICE void fa_add_values_carefully(float o[M_TILES][D_TILES][4], uint32_t a[M_TILES][4],
                                       uint32_t v)
{
    fa_add_finite_values(o, a, v);
#pragma unroll
    for (int i = 0; i < M_TILES * 4; i++) a[i / 4][i % 4] = fa_mark_weights(a[i / 4][i % 4]);
#pragma unroll 1
    for (int negative = 0; negative < 2; negative++) fa_add_infinities(o, a, v, negative);
}

#endif
