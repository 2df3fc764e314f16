/*
 * The instructions of kernels/common/ampere.cuh in C, on the machine of cuda_on_cpu.h. What a lane
 * gets and gives is as the PTX manual draws it.
 */
#ifndef TEST_AMPERE_ON_CPU_H
#define TEST_AMPERE_ON_CPU_H

#include <string.h>

FA_DEVICE int fa_thread_id(void) { return (int)threadIdx.x; }

FA_DEVICE uint32_t fa_shared_address(const void *pointer) { return cuda_shared_address(pointer); }

FA_DEVICE void fa_shared_store4(uint32_t to, uint4 x) { *(uint4 *)cuda_shared_at(to, 16) = x; }
FA_DEVICE uint4 fa_shared_load4(uint32_t from) { return *(const uint4 *)cuda_shared_at(from, 16); }
FA_DEVICE void fa_shared_store(uint32_t to, uint32_t x) { *(uint32_t *)cuda_shared_at(to, 4) = x; }

FA_DEVICE uint32_t fa_shared_load(uint32_t from) { return *(uint32_t *)cuda_shared_at(from, 4); }
FA_DEVICE float fa_shared_load_float(uint32_t from) { return *(float *)cuda_shared_at(from, 4); }
FA_DEVICE void fa_shared_store_float(uint32_t to, float x) { *(float *)cuda_shared_at(to, 4) = x; }
FA_DEVICE void fa_named_barrier(int number, int threads) { cuda_named_barrier(number, threads); }
FA_DEVICE int fa_named_barrier_or(int number, int threads, int predicate)
{
    return cuda_named_barrier_or(number, threads, predicate);
}

#if ARCHITECTURE >= 80
FA_DEVICE void fa_copy_async(uint32_t to, const void *from, bool wanted)
{
    cuda_copy_async(to, from, wanted);
}
FA_DEVICE void fa_wait_for_copies(void) { cuda_wait_for_copies(); }
#else
FA_DEVICE void fa_copy_async(uint32_t to, const void *from, bool wanted)
{
    fa_shared_store4(to, wanted ? *(const uint4 *)from : make_uint4(0, 0, 0, 0));
}
FA_DEVICE void fa_wait_for_copies(void) {}
#endif

/* Element (row, column) of 8 x 8 matrix number `matrix`, whose rows the lanes name. */
FA_DEVICE uint16_t fa_matrix_element(const char *shown, int matrix, int row, int column)
{
    uint32_t address;
    memcpy(&address, shown + (size_t)(8 * matrix + row) * cuda_shown_pitch(), sizeof address);
    return ((const uint16_t *)cuda_shared_at(address, 16))[column];
}

FA_DEVICE void fa_load_matrices_as(uint32_t x[4], uint32_t address, bool transposed)
{
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    const char *shown = cuda_show_warp(&address, sizeof address);
    for (int i = 0; i < 4; i++) {
        uint32_t pair[2];
        for (int c = 0; c < 2; c++)
            pair[c] = transposed ? fa_matrix_element(shown, i, 2 * t + c, g)
                                 : fa_matrix_element(shown, i, g, 2 * t + c);
        x[i] = pair[0] | pair[1] << 16;
    }
}

FA_DEVICE void fa_load_matrices(uint32_t x[4], uint32_t address)
{
    fa_load_matrices_as(x, address, false);
}

FA_DEVICE void fa_load_matrices_transposed(uint32_t x[4], uint32_t address)
{
    fa_load_matrices_as(x, address, true);
}

FA_DEVICE float fa_half_of_pair(uint32_t pair, int half)
{
    const uint16_t bits = (uint16_t)(half ? pair >> 16 : pair & 0xffffu);
#if ELEMENT == FA_ELEMENT_BFLOAT16
    return fa_bfloat_to_float(bits);
#else
    return fa_half_to_float(bits);
#endif
}

typedef struct fa_mma_operands {
    uint32_t a[4], b[2];
} fa_mma_operands;

/* The operands of the four lanes that hold row or column n. */
FA_DEVICE void fa_see_operands(fa_mma_operands x[4], const char *shown, int n)
{
    for (int i = 0; i < 4; i++)
        memcpy(&x[i], shown + (size_t)(4 * n + i) * cuda_shown_pitch(), sizeof x[i]);
}

FA_DEVICE void fa_mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    const fa_mma_operands mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    const char *shown = cuda_show_warp(&mine, sizeof mine);
    fa_mma_operands x[4], y[2][4];
    fa_see_operands(x, shown, g);
    fa_see_operands(y[0], shown, 2 * t);
    fa_see_operands(y[1], shown, 2 * t + 1);
    for (int e = 0; e < 4; e++)
        for (int k = 0; k < 16; k++) {
            const int other = k % 8 / 2, upper = k / 8;
            c[e] += fa_half_of_pair(x[other].a[e / 2 + 2 * upper], k % 2) *
                    fa_half_of_pair(y[e % 2][other].b[upper], k % 2);
        }
}

FA_DEVICE uint32_t fa_pack_pair(float low, float high)
{
    return fa_pack(ELEMENT == FA_ELEMENT_BFLOAT16 ? FA_KERNEL_BFLOAT16 : FA_KERNEL_FLOAT16, low,
                   high);
}

FA_DEVICE float fa_exp2_fast(float x) { return exp2f(x); }

#endif
