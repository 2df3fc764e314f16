/*
 * kernels/ptx/tma.cuh in C, on the units of hopper_units.h.
 */
#ifndef TEST_PTX_ON_CPU_TMA_H
#define TEST_PTX_ON_CPU_TMA_H

#include "hopper_units.h"

FA_DEVICE void ptx_tma_load_3d(void *shared, const void *map, uint64_t *barrier, int x, int y,
                               int z)
{
    const int start[] = {x, y, z};
    hopper_load(shared, map, barrier, 3, start);
}

FA_DEVICE void ptx_tma_load_4d(void *shared, const void *map, uint64_t *barrier, int x, int y,
                               int z, int w)
{
    const int start[] = {x, y, z, w};
    hopper_load(shared, map, barrier, 4, start);
}

FA_DEVICE void ptx_tma_load_5d(void *shared, const void *map, uint64_t *barrier, int x, int y,
                               int z, int w, int v)
{
    const int start[] = {x, y, z, w, v};
    hopper_load(shared, map, barrier, 5, start);
}

FA_DEVICE void ptx_tma_load_4d_once(void *shared, const void *map, uint64_t *barrier, int x, int y,
                                    int z, int w)
{
    ptx_tma_load_4d(shared, map, barrier, x, y, z, w);
}

FA_DEVICE void ptx_tma_load_4d_blocks(void *shared, const void *map, uint64_t *barrier, int x,
                                      int y, int z, int w, int blocks)
{
    const int start[] = {x, y, z, w};
    hopper_load_blocks(shared, map, barrier, 4, start, (unsigned)blocks);
}

FA_DEVICE void ptx_tma_store_4d(const void *map, const void *shared, int x, int y, int z, int w)
{
    const int start[] = {x, y, z, w};
    hopper_store(map, shared, 4, start, false);
}

FA_DEVICE void ptx_tma_add_4d(const void *map, const void *shared, int x, int y, int z, int w)
{
    const int start[] = {x, y, z, w};
    hopper_store(map, shared, 4, start, true);
}

FA_DEVICE void ptx_tma_prefetch(const void *map) { (void)map; }

FA_DEVICE void ptx_tma_prefetch_4d(const void *map, int x, int y, int z, int w)
{
    (void)map, (void)x, (void)y, (void)z, (void)w;
}

FA_DEVICE void ptx_bulk_load(void *shared, const void *global, uint64_t *barrier, int bytes)
{
    hopper_bulk_load(shared, global, barrier, bytes);
}

FA_DEVICE void ptx_bulk_add_f32(float *global, const void *shared, int bytes)
{
    hopper_bulk_add(global, shared, bytes);
}

FA_DEVICE void ptx_bulk_store(void *global, const void *shared, int bytes)
{
    hopper_bulk_store(global, shared, bytes);
}

FA_DEVICE void ptx_bulk_prefetch(const void *global, int bytes) { (void)global, (void)bytes; }

FA_DEVICE void ptx_bulk_commit(void) { hopper_bulk_commit(); }
#define ptx_bulk_wait_read(pending) hopper_bulk_wait(pending, HOPPER_BULK_READ)
#define ptx_bulk_wait(pending) hopper_bulk_wait(pending, HOPPER_BULK_ADDED)

FA_DEVICE void ptx_fence_proxy_async(void) { hopper_proxy_fence(); }
FA_DEVICE void ptx_fence_proxy_async_global(void) { hopper_proxy_fence_global(); }

FA_DEVICE void ptx_copy_to_peer(void *shared, uint64_t *barrier, int peer, int bytes)
{
    hopper_send_bytes(shared, barrier, (unsigned)peer, bytes);
}

FA_DEVICE void ptx_store_to_peer(float *shared, uint64_t *barrier, int peer, float x)
{
    hopper_send_floats(shared, barrier, (unsigned)peer, &x, 1);
}

FA_DEVICE void ptx_store_to_peer_x4(float *shared, uint64_t *barrier, int peer, const float *x)
{
    hopper_send_floats(shared, barrier, (unsigned)peer, x, 4);
}

#endif
