/*
 * TMA: asynchronous copies of boxes of a tensor into shared memory, and copies between the blocks of a
 * cluster. One thread issues a copy; the bytes that arrive count towards a barrier's phase.
 */
#ifndef FA_KERNELS_PTX_TMA_CUH
#define FA_KERNELS_PTX_TMA_CUH

#include "common/dialect.h"
#include "ptx/address.cuh"
#include "ptx/cp_async.cuh"

#ifdef FA_CUDA_ON_CPU
#include "ptx_on_cpu/tma.h"
#else

/* Prefetches a tensor map, for which its first load would otherwise wait. */
FA_DEVICE void ptx_tma_prefetch(const void *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* Loads the box of a tensor map with three axes that starts at (x, y, z), x innermost. */
FA_DEVICE void ptx_tma_load_3d(void *shared, const void *map, uint64_t *barrier, int x, int y,
                               int z)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(ptx_shared_address(shared)),
                 "l"(map), "r"(ptx_shared_address(barrier)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

/* The same with four axes. */
FA_DEVICE void ptx_tma_load_4d(void *shared, const void *map, uint64_t *barrier, int x, int y,
                               int z, int w)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(ptx_shared_address(shared)),
                 "l"(map), "r"(ptx_shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

/* The same with five axes. */
FA_DEVICE void ptx_tma_load_5d(void *shared, const void *map, uint64_t *barrier, int x, int y,
                               int z, int w, int v)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(ptx_shared_address(shared)),
                 "l"(map), "r"(ptx_shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
                 : "memory");
}

/* The same with four axes into each block of the cluster whose bit is set in `blocks`, at the same address. The
 * bytes count towards each block's own barrier. */
FA_DEVICE void ptx_tma_load_4d_blocks(void *shared, const void *map, uint64_t *barrier, int x,
                                      int y, int z, int w, int blocks)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(
                     ptx_shared_address(shared)),
                 "l"(map), "r"(ptx_shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w),
                 "h"((uint16_t)blocks)
                 : "memory");
}

/* The same for a box that is read once: the second-level cache evicts it first. */
FA_DEVICE void ptx_tma_load_4d_once(void *shared, const void *map, uint64_t *barrier, int x, int y,
                                    int z, int w)
{
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(ptx_shared_address(shared)),
        "l"(map), "r"(ptx_shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w),
        "l"(PTX_EVICT_FIRST)
        : "memory");
}

/* Prefetches the box that starts at (x, y, z, w) into the second-level cache. */
FA_DEVICE void ptx_tma_prefetch_4d(const void *map, int x, int y, int z, int w)
{
    asm volatile(
        "cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map),
        "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

/* Stores the part of the box at (x, y, z, w) that lies in the tensor. Waits are the same as for
 * copies to global memory. */
FA_DEVICE void ptx_tma_store_4d(const void *map, const void *shared, int x, int y, int z, int w)
{
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
                 "[%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(ptx_shared_address(shared)), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

/* The same, but adds floats to those in the tensor. */
FA_DEVICE void ptx_tma_add_4d(const void *map, const void *shared, int x, int y, int z, int w)
{
    asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group "
                 "[%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(ptx_shared_address(shared)), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

/* Copies bytes, a multiple of 16, from global memory. */
FA_DEVICE void ptx_bulk_load(void *shared, const void *global, uint64_t *barrier, int bytes)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(ptx_shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(ptx_shared_address(barrier))
                 : "memory");
}

/* Adds floats, a multiple of 16 bytes, to those in global memory. */
FA_DEVICE void ptx_bulk_add_f32(float *global, const void *shared, int bytes)
{
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
        "r"(ptx_shared_address(shared)), "r"(bytes)
        : "memory");
}

/* Copies bytes, a multiple of 16, to global memory. */
FA_DEVICE void ptx_bulk_store(void *global, const void *shared, int bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
                 "r"(ptx_shared_address(shared)), "r"(bytes)
                 : "memory");
}

/* Prefetches bytes, a multiple of 16, into the second-level cache. */
FA_DEVICE void ptx_bulk_prefetch(const void *global, int bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

/* Ends a group of this thread's copies to global memory. */
FA_DEVICE void ptx_bulk_commit(void) { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/* Wait until at most `pending` groups have not been read from shared memory, or are not complete.
 * Macros, because the number is part of the instruction. */
#define ptx_bulk_wait_read(pending)                                                                \
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory")
#define ptx_bulk_wait(pending)                                                                     \
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory")

/* Makes this thread's stores to shared memory visible to the TMA copies and wgmma products that
 * follow. */
FA_DEVICE void ptx_fence_proxy_async(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Makes everything that this thread sees in global memory visible to the TMA copies that follow. */
FA_DEVICE void ptx_fence_proxy_async_global(void)
{
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

/* ---- To another block of the cluster: from `shared` or a register to the same address there --- */

/* Copies bytes, a multiple of 16. They count towards the peer's barrier. */
FA_DEVICE void ptx_copy_to_peer(void *shared, uint64_t *barrier, int peer, int bytes)
{
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(ptx_peer_address(shared, peer)),
                 "r"(ptx_shared_address(shared)), "r"(bytes), "r"(ptx_peer_address(barrier, peer))
                 : "memory");
}

/* Stores four numbers, whose 16 bytes count towards the peer's barrier (st.async, no TMA). */
FA_DEVICE void ptx_store_to_peer_x4(float *shared, uint64_t *barrier, int peer, const float *x)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                 "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(ptx_peer_address(shared, peer)),
                 "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(ptx_peer_address(barrier, peer))
                 : "memory");
}

/* The same of one number, 4 bytes. */
FA_DEVICE void ptx_store_to_peer(float *shared, uint64_t *barrier, int peer, float x)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
                     ptx_peer_address(shared, peer)),
                 "f"(x), "r"(ptx_peer_address(barrier, peer))
                 : "memory");
}

#endif

#endif
