/*
 * The instructions of kernels/ptx/ that Turing, Ampere and Hopper have, in C, on the machine of cuda_on_cpu.h: thread,
 * shared, named_barrier, cp_async, ldmatrix, mma and convert. What a lane gets and gives is as the PTX manual
 * draws it.
 */
#ifndef TEST_AMPERE_ON_CPU_H
#define TEST_AMPERE_ON_CPU_H

#include <float.h>
#include <string.h>

#include "common/dialect.h"
#include "convert.h"

FA_DEVICE int ptx_thread_id(void) { return (int)threadIdx.x; }

FA_DEVICE uint32_t ptx_shared_address(const void *pointer) { return cuda_shared_address(pointer); }

FA_DEVICE uint32_t ptx_ld_shared_u32(uint32_t from) { return *(uint32_t *)cuda_shared_at(from, 4); }
FA_DEVICE float ptx_ld_shared_f32(uint32_t from) { return *(float *)cuda_shared_at(from, 4); }
FA_DEVICE uint4 ptx_ld_shared_v4(uint32_t from) { return *(const uint4 *)cuda_shared_at(from, 16); }
FA_DEVICE void ptx_st_shared_u32(uint32_t to, uint32_t x)
{
    *(uint32_t *)cuda_shared_at(to, 4) = x;
}
FA_DEVICE void ptx_st_shared_f32(uint32_t to, float x) { *(float *)cuda_shared_at(to, 4) = x; }
FA_DEVICE void ptx_st_shared_v4(uint32_t to, uint4 x) { *(uint4 *)cuda_shared_at(to, 16) = x; }

FA_DEVICE void ptx_named_barrier_sync(int id, int threads) { cuda_named_barrier(id, threads); }
FA_DEVICE void ptx_named_barrier_arrive(int id, int threads)
{
    cuda_named_barrier_arrive(id, threads);
}
FA_DEVICE int ptx_named_barrier_or(int id, int threads, int predicate)
{
    return cuda_named_barrier_or(id, threads, predicate);
}

FA_DEVICE void ptx_cp_async_16(uint32_t to, const void *from, bool wanted)
{
    cuda_copy_async(to, from, wanted);
}
FA_DEVICE void ptx_cp_async_wait_all(void) { cuda_wait_for_copies(); }

/* Element (row, column) of 8 x 8 matrix number `matrix`, whose rows the lanes name. */
FA_DEVICE uint16_t ampere_matrix_element(const char *shown, int matrix, int row, int column)
{
    uint32_t address;
    memcpy(&address, shown + (size_t)(8 * matrix + row) * cuda_shown_pitch(), sizeof address);
    return ((const uint16_t *)cuda_shared_at(address, 16))[column];
}

FA_DEVICE void ampere_ldmatrix(uint32_t x[4], uint32_t address, bool transposed)
{
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    const char *shown = cuda_show_warp(&address, sizeof address);
    for (int i = 0; i < 4; i++) {
        uint32_t half[2];
        for (int c = 0; c < 2; c++)
            half[c] = transposed ? ampere_matrix_element(shown, i, 2 * t + c, g)
                                 : ampere_matrix_element(shown, i, g, 2 * t + c);
        x[i] = half[0] | half[1] << 16;
    }
}

FA_DEVICE void ptx_ldmatrix_x4(uint32_t x[4], uint32_t address)
{
    ampere_ldmatrix(x, address, false);
}

FA_DEVICE void ptx_ldmatrix_x4_trans(uint32_t x[4], uint32_t address)
{
    ampere_ldmatrix(x, address, true);
}

/* Row l of the four matrices, one below the other, goes to the address that lane l gives. */
FA_DEVICE void ptx_stmatrix_x4(uint32_t address, const uint32_t x[4])
{
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const char *shown = cuda_show_warp(&address, sizeof address);
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t row;
        memcpy(&row, shown + (8 * i + g) * cuda_shown_pitch(), sizeof row);
        memcpy((char *)cuda_shared_at(row, 16) + 4 * t, &x[i], sizeof x[i]);
    }
}

FA_DEVICE float ampere_half(uint32_t x2, int half, bool bfloat16)
{
    const uint16_t bits = (uint16_t)(half ? x2 >> 16 : x2 & 0xffffu);
    return bfloat16 ? fa_bfloat_to_float(bits) : fa_half_to_float(bits);
}

typedef struct ampere_operands {
    uint32_t a[4], b[2];
} ampere_operands;

/* The operands of the four lanes that hold row or column n. */
FA_DEVICE void ampere_see_operands(ampere_operands x[4], const char *shown, int n)
{
    for (int i = 0; i < 4; i++)
        memcpy(&x[i], shown + (size_t)(4 * n + i) * cuda_shown_pitch(), sizeof x[i]);
}

FA_DEVICE void ampere_mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1, bool bfloat16)
{
    const ampere_operands mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    const char *shown = cuda_show_warp(&mine, sizeof mine);
    ampere_operands x[4], y[2][4];
    ampere_see_operands(x, shown, g);
    ampere_see_operands(y[0], shown, 2 * t);
    ampere_see_operands(y[1], shown, 2 * t + 1);
    for (int e = 0; e < 4; e++)
        for (int k = 0; k < 16; k++) {
            const int other = k % 8 / 2, upper = k / 8;
            c[e] += ampere_half(x[other].a[e / 2 + 2 * upper], k % 2, bfloat16) *
                    ampere_half(y[e % 2][other].b[upper], k % 2, bfloat16);
        }
}

FA_DEVICE void ptx_mma_m16n8k16_f16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    ampere_mma(c, a, b0, b1, false);
}

FA_DEVICE void ptx_mma_m16n8k16_bf16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    ampere_mma(c, a, b0, b1, true);
}

FA_DEVICE uint32_t ptx_pack_f16x2(float low, float high)
{
    return fa_float_to_half(low) | (uint32_t)fa_float_to_half(high) << 16;
}

FA_DEVICE uint32_t ptx_pack_bf16x2(float low, float high)
{
    return fa_float_to_bfloat(low) | (uint32_t)fa_float_to_bfloat(high) << 16;
}

FA_DEVICE float ptx_half_to_float(uint16_t h) { return fa_half_to_float(h); }

FA_DEVICE uint32_t ptx_spread_signs(uint32_t x) { return (x >> 15 & 0x00010001u) * 0xffffu; }

/* Results that are subnormal become 0. */
FA_DEVICE float ampere_flushed(float x) { return fabsf(x) < FLT_MIN ? 0.0f : x; }
FA_DEVICE float ptx_ex2(float x) { return ampere_flushed(exp2f(x)); }
FA_DEVICE float ptx_rcp(float x) { return ampere_flushed(1.0f / x); }
FA_DEVICE uint64_t ptx_mul_wide(uint32_t a, uint32_t b) { return (uint64_t)a * b; }

#endif
