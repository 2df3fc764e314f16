/*
 * kernels/ptx/wgmma.cuh in C, on the units of hopper_units.h.
 */
#ifndef TEST_PTX_ON_CPU_WGMMA_H
#define TEST_PTX_ON_CPU_WGMMA_H

#include "hopper_units.h"

FA_DEVICE void ptx_wgmma_fence(void) { hopper_products_fence(); }
FA_DEVICE void ptx_wgmma_commit(void) { hopper_products_commit(); }
#define ptx_wgmma_wait(pending) hopper_products_wait(pending)

/* Accumulators are memory here, and products are computed in functions that are opaque to the
 * compiler. */
#define ptx_register_fence(registers, count) (void)(registers)
#define ptx_register_forget(registers, count) (void)(registers)

#define PTX_DEFINE_WGMMA_SHARED(kind, over_a, over, N)                                             \
    FA_DEVICE void ptx_wgmma_##kind##_##N(float *d, uint64_t a, uint64_t b, int accumulate)        \
    {                                                                                              \
        const hopper_product p = {.columns = N,                                                    \
                                  .element = ELEMENT,                                              \
                                  .across_a = over_a,                                              \
                                  .across = over,                                                  \
                                  .accumulate = accumulate,                                        \
                                  .d = d,                                                          \
                                  .a = a,                                                          \
                                  .b = b};                                                         \
        hopper_multiply(&p);                                                                       \
    }

#define PTX_DEFINE_WGMMA_REGISTERS(kind, over, N)                                                  \
    FA_DEVICE void ptx_wgmma_##kind##_##N(float *d, const uint32_t *a, uint64_t b, int accumulate) \
    {                                                                                              \
        const hopper_product p = {.columns = N,                                                    \
                                  .element = ELEMENT,                                              \
                                  .across = over,                                                  \
                                  .accumulate = accumulate,                                        \
                                  .d = d,                                                          \
                                  .registers = a,                                                  \
                                  .b = b};                                                         \
        hopper_multiply(&p);                                                                       \
    }

#define PTX_DEFINE_WGMMA(N)                                                                        \
    PTX_DEFINE_WGMMA_SHARED(qk, false, false, N)                                                   \
    PTX_DEFINE_WGMMA_SHARED(shared_pv, false, true, N)                                             \
    PTX_DEFINE_WGMMA_SHARED(vp, true, false, N)                                                    \
    PTX_DEFINE_WGMMA_SHARED(across, true, true, N)                                                 \
    PTX_DEFINE_WGMMA_REGISTERS(registers_qk, false, N)                                             \
    PTX_DEFINE_WGMMA_REGISTERS(pv, true, N)

/* Every number of columns. */
/* clang-format off */
PTX_DEFINE_WGMMA(8) PTX_DEFINE_WGMMA(16) PTX_DEFINE_WGMMA(24) PTX_DEFINE_WGMMA(32)
PTX_DEFINE_WGMMA(40) PTX_DEFINE_WGMMA(48) PTX_DEFINE_WGMMA(56) PTX_DEFINE_WGMMA(64)
PTX_DEFINE_WGMMA(72) PTX_DEFINE_WGMMA(80) PTX_DEFINE_WGMMA(88) PTX_DEFINE_WGMMA(96)
PTX_DEFINE_WGMMA(104) PTX_DEFINE_WGMMA(112) PTX_DEFINE_WGMMA(120) PTX_DEFINE_WGMMA(128)
PTX_DEFINE_WGMMA(136) PTX_DEFINE_WGMMA(144) PTX_DEFINE_WGMMA(152) PTX_DEFINE_WGMMA(160)
PTX_DEFINE_WGMMA(168) PTX_DEFINE_WGMMA(176) PTX_DEFINE_WGMMA(184) PTX_DEFINE_WGMMA(192)
PTX_DEFINE_WGMMA(200) PTX_DEFINE_WGMMA(208) PTX_DEFINE_WGMMA(216) PTX_DEFINE_WGMMA(224)
PTX_DEFINE_WGMMA(232) PTX_DEFINE_WGMMA(240) PTX_DEFINE_WGMMA(248) PTX_DEFINE_WGMMA(256)
/* clang-format on */

#endif
