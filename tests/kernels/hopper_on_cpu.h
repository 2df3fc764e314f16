/*
 * The instructions of kernels/common/hopper.cuh in C, on the units of hopper_units.h.
 */
#ifndef TEST_HOPPER_ON_CPU_H
#define TEST_HOPPER_ON_CPU_H

#include <float.h>
#include <string.h>

#include "common/rows.cuh"
#include "hopper_units.h"

/* For the statements without instructions that keep the compiler from knowing too much. */
#define asm __asm__

static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }

FA_DEVICE float __int_as_float(int bits) { return fa_bits_float((uint32_t)bits); }
FA_DEVICE float __uint_as_float(uint32_t bits) { return fa_bits_float(bits); }
FA_DEVICE int __float_as_int(float x) { return (int)fa_float_bits(x); }
FA_DEVICE uint32_t __float_as_uint(float x) { return fa_float_bits(x); }

FA_DEVICE uint32_t shared_address(const void *pointer) { return cuda_shared_address(pointer); }

FA_DEVICE void barrier_init(uint64_t *barrier, int arrivals)
{
    hopper_barrier_init(barrier, arrivals);
}
FA_DEVICE void barrier_init_fence(void) { hopper_barrier_fence(); }
FA_DEVICE void barrier_arrive(uint64_t *barrier) { hopper_barrier_arrive(barrier); }
FA_DEVICE void barrier_arrive_if(uint64_t *barrier, int condition)
{
    if (condition) hopper_barrier_arrive(barrier);
}
FA_DEVICE uint32_t barrier_arrive_early(uint64_t *barrier, int condition)
{
    barrier_arrive_if(barrier, condition);
    return 0;
}
FA_DEVICE void barrier_expect(uint64_t *barrier, int bytes)
{
    hopper_barrier_expect(barrier, bytes);
}
FA_DEVICE void barrier_wait(uint64_t *barrier, int parity) { hopper_barrier_wait(barrier, parity); }

FA_DEVICE void cluster_sync(void) { cuda_cluster_barrier(); }
FA_DEVICE void barrier_wait_for_peer(uint64_t *barrier, int parity)
{
    hopper_barrier_wait(barrier, parity);
}
FA_DEVICE void barrier_arrive_at_peer_if(uint64_t *barrier, int peer, int condition)
{
    if (condition) hopper_barrier_arrive_at_peer(barrier, (unsigned)peer);
}
FA_DEVICE void send_float(float *shared, uint64_t *barrier, int peer, float x)
{
    hopper_send_float(shared, barrier, (unsigned)peer, x);
}
FA_DEVICE void send_bytes(void *shared, uint64_t *barrier, int peer, int bytes)
{
    hopper_send_bytes(shared, barrier, (unsigned)peer, bytes);
}

FA_DEVICE void named_barrier_sync(int id, int threads) { cuda_named_barrier(id, threads); }
FA_DEVICE void named_barrier_arrive(int id, int threads) { cuda_named_barrier_arrive(id, threads); }

FA_DEVICE void tma_load(void *shared, const void *map, uint64_t *barrier, int x, int y, int z)
{
    const int place[] = {x, y, z};
    hopper_load(shared, map, barrier, 3, place);
}

FA_DEVICE void tma_load_4d(void *shared, const void *map, uint64_t *barrier, int x, int y, int z,
                           int w)
{
    const int place[] = {x, y, z, w};
    hopper_load(shared, map, barrier, 4, place);
}

FA_DEVICE void async_proxy_fence(void) { hopper_proxy_fence(); }

#define registers_give_back(count) hopper_registers(count, false)
#define registers_take(count) hopper_registers(count, true)

FA_DEVICE void wgmma_fence(void) { hopper_products_fence(); }
FA_DEVICE void wgmma_commit(void) { hopper_products_commit(); }
#define wgmma_wait(pending) hopper_products_wait(pending)

/* Accumulators are memory here, and products are made in functions that the compiler cannot see into. */
#define REGISTER_FENCE(registers, count) (void)(registers)

#define DEFINE_WGMMA_SHARED(kind, over, N)                                                         \
    FA_DEVICE void wgmma_##kind##_##N(float *d, uint64_t a, uint64_t b, int accumulate)            \
    {                                                                                              \
        const hopper_product p = {.columns = N,                                                    \
                                  .bfloat = ELEMENT == FA_ELEMENT_BFLOAT16,                        \
                                  .across = over,                                                  \
                                  .accumulate = accumulate,                                        \
                                  .d = d,                                                          \
                                  .a = a,                                                          \
                                  .b = b};                                                         \
        hopper_multiply(&p);                                                                       \
    }

#define DEFINE_WGMMA(N)                                                                            \
    DEFINE_WGMMA_SHARED(qk, false, N)                                                              \
    DEFINE_WGMMA_SHARED(shared_pv, true, N)                                                        \
    FA_DEVICE void wgmma_pv_##N(float *d, const uint32_t *a, uint64_t b, int accumulate)           \
    {                                                                                              \
        const hopper_product p = {.columns = N,                                                    \
                                  .bfloat = ELEMENT == FA_ELEMENT_BFLOAT16,                        \
                                  .across = true,                                                  \
                                  .accumulate = accumulate,                                        \
                                  .d = d,                                                          \
                                  .registers = a,                                                  \
                                  .b = b};                                                         \
        hopper_multiply(&p);                                                                       \
    }

/* Every number of columns that there is. */
/* clang-format off */
DEFINE_WGMMA(8) DEFINE_WGMMA(16) DEFINE_WGMMA(24) DEFINE_WGMMA(32)
DEFINE_WGMMA(40) DEFINE_WGMMA(48) DEFINE_WGMMA(56) DEFINE_WGMMA(64)
DEFINE_WGMMA(72) DEFINE_WGMMA(80) DEFINE_WGMMA(88) DEFINE_WGMMA(96)
DEFINE_WGMMA(104) DEFINE_WGMMA(112) DEFINE_WGMMA(120) DEFINE_WGMMA(128)
DEFINE_WGMMA(136) DEFINE_WGMMA(144) DEFINE_WGMMA(152) DEFINE_WGMMA(160)
DEFINE_WGMMA(168) DEFINE_WGMMA(176) DEFINE_WGMMA(184) DEFINE_WGMMA(192)
DEFINE_WGMMA(200) DEFINE_WGMMA(208) DEFINE_WGMMA(216) DEFINE_WGMMA(224)
DEFINE_WGMMA(232) DEFINE_WGMMA(240) DEFINE_WGMMA(248) DEFINE_WGMMA(256)

#define WGMMA_NAME(kind, N) wgmma_##kind##_##N
#define WGMMA(kind, N) WGMMA_NAME(kind, N)

FA_DEVICE uint32_t pack_pair(float low, float high)
{
    return fa_pack(ELEMENT == FA_ELEMENT_BFLOAT16 ? FA_KERNEL_BFLOAT16 : FA_KERNEL_FLOAT16, low, high);
}
/* clang-format on */

FA_DEVICE uint32_t spread_signs(uint32_t x)
{
    return (x & 0x8000 ? 0xffffu : 0) | (x & 0x80000000u ? 0xffff0000u : 0);
}

FA_DEVICE float exp2_fast(float x)
{
    const float y = exp2f(x);
    return y < FLT_MIN ? 0.0f : y;
}

FA_DEVICE float reciprocal_fast(float x)
{
    const float y = 1.0f / x;
    return y < FLT_MIN ? 0.0f : y;
}

FA_DEVICE void store_16_bytes(void *to, uint4 x) { memcpy(to, &x, sizeof x); }
FA_DEVICE void store_8_bytes(void *to, uint2 x) { memcpy(to, &x, sizeof x); }
FA_DEVICE void *kept_place(void *shared) { return shared; }

#define COUNT_PATH(path) (hopper_paths[path] += threadIdx.x % 32 == 0)

/* Against the assembler's order of things: nothing to be done. */
FA_DEVICE int find_nothing(void) { return 0; }
FA_DEVICE float known_after(float x, float y, int nothing)
{
    (void)y;
    if (nothing) cuda_die("a number that is not 0 where nothing was meant");
    return x;
}

FA_DEVICE void hold_until(float y, int nothing, void *shared)
{
    (void)known_after(y, y, nothing);
    (void)shared;
}

/* Row l of the four matrices, one below the other, goes to the address that lane l gives; a lane holds
 * the elements 2t and 2t + 1 of row g of each. */
FA_DEVICE void store_matrix_x4(uint32_t address, const uint32_t r[4])
{
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const char *shown = cuda_show_warp(&address, sizeof address);
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t row;
        memcpy(&row, shown + (8 * i + g) * cuda_shown_pitch(), sizeof row);
        memcpy((char *)cuda_shared_at(row, 16) + 4 * t, &r[i], sizeof r[i]);
    }
}

#endif
