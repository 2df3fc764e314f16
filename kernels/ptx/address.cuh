/*
 * Addresses in shared memory, as instructions take them: 32 bits.
 */
#ifndef FA_KERNELS_PTX_ADDRESS_CUH
#define FA_KERNELS_PTX_ADDRESS_CUH

#include "common/dialect.h"

#ifdef FA_CUDA_ON_CPU
#include "ptx_on_cpu/address.h"
#else

FA_DEVICE uint32_t ptx_shared_address(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* The address of the same variable in block `peer` of the cluster. */
FA_DEVICE uint32_t ptx_peer_address(const void *shared, int peer)
{
    uint32_t address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(address)
                 : "r"(ptx_shared_address(shared)), "r"(peer));
    return address;
}

#endif

#endif
