/*
 * kernels/ptx/address.cuh in C.
 */
#ifndef TEST_PTX_ON_CPU_ADDRESS_H
#define TEST_PTX_ON_CPU_ADDRESS_H

#include "cuda_on_cpu.h"

FA_DEVICE uint32_t ptx_shared_address(const void *pointer) { return cuda_shared_address(pointer); }

#endif
