/*
 * kernels/ptx/registers.cuh in C.
 */
#ifndef TEST_PTX_ON_CPU_REGISTERS_H
#define TEST_PTX_ON_CPU_REGISTERS_H

#include "hopper_units.h"

#define ptx_decrease_registers(count) hopper_registers(count, false)
#define ptx_increase_registers(count) hopper_registers(count, true)

FA_DEVICE uint32_t ptx_uniform(uint32_t x) { return __reduce_or_sync(0xffffffff, x); }
FA_DEVICE void *ptx_uniform_pointer(void *shared) { return shared; }
FA_DEVICE uint32_t ptx_keep(uint32_t x) { return x; }

#endif
