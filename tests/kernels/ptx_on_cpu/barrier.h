/*
 * kernels/ptx/barrier.cuh in C: mbarriers are those of hopper_units.h, the others those of cuda_on_cpu.h.
 */
#ifndef TEST_PTX_ON_CPU_BARRIER_H
#define TEST_PTX_ON_CPU_BARRIER_H

#include "hopper_units.h"

FA_DEVICE void ptx_mbarrier_init(uint64_t *barrier, int arrivals)
{
    hopper_barrier_init(barrier, arrivals);
}
FA_DEVICE void ptx_mbarrier_init_fence(void) { hopper_barrier_fence(); }
FA_DEVICE void ptx_mbarrier_arrive(uint64_t *barrier) { hopper_barrier_arrive(barrier); }
FA_DEVICE void ptx_mbarrier_arrive_if(uint64_t *barrier, int condition)
{
    if (condition) hopper_barrier_arrive(barrier);
}
FA_DEVICE uint32_t ptx_mbarrier_arrive_token_if(uint64_t *barrier, int condition)
{
    ptx_mbarrier_arrive_if(barrier, condition);
    return 0;
}
FA_DEVICE void ptx_mbarrier_arrive_expect(uint64_t *barrier, int bytes)
{
    hopper_barrier_expect(barrier, bytes);
}
FA_DEVICE void ptx_mbarrier_arrive_behind_copies(uint64_t *barrier)
{
    hopper_barrier_arrive_behind_copies(barrier);
}
FA_DEVICE void ptx_mbarrier_wait(uint64_t *barrier, int parity)
{
    hopper_barrier_wait(barrier, parity);
}
FA_DEVICE void ptx_mbarrier_wait_cluster(uint64_t *barrier, int parity)
{
    hopper_barrier_wait(barrier, parity);
}
FA_DEVICE bool ptx_mbarrier_is_over(uint64_t *barrier, int parity)
{
    return hopper_barrier_is_over(barrier, parity);
}
FA_DEVICE void ptx_mbarrier_arrive_peer_if(uint64_t *barrier, int peer, int condition)
{
    if (condition) hopper_barrier_arrive_at_peer(barrier, (unsigned)peer);
}

FA_DEVICE void ptx_named_barrier_sync(int id, int threads) { cuda_named_barrier(id, threads); }
FA_DEVICE void ptx_named_barrier_arrive(int id, int threads)
{
    cuda_named_barrier_arrive(id, threads);
}
#define ptx_named_barrier_sync_of(condition, one, other, threads)                                  \
    ptx_named_barrier_sync((condition) ? (one) : (other), threads)
#define ptx_named_barrier_arrive_of(condition, one, other, threads)                                \
    ptx_named_barrier_arrive((condition) ? (one) : (other), threads)
FA_DEVICE int ptx_named_barrier_or(int id, int threads, int predicate)
{
    return cuda_named_barrier_or(id, threads, predicate);
}

FA_DEVICE void ptx_cluster_arrive(void) { cuda_cluster_arrive(); }
FA_DEVICE void ptx_cluster_arrive_relaxed(void) { cuda_cluster_arrive(); }
FA_DEVICE void ptx_cluster_wait(void) { cuda_cluster_wait(); }
FA_DEVICE void ptx_cluster_sync(void) { cuda_cluster_barrier(); }

#endif
