/*
 * Barriers: mbarriers in shared memory, named barriers, the barrier of a cluster (PTX ISA, "Parallel
 * Synchronization and Communication Instructions").
 *
 * An mbarrier counts arrivals and bytes. Its phase ends when both are complete, and the next one begins.
 * Phases have parities: 0 for the first one, then 1, 0, ...
 */
#ifndef FA_KERNELS_PTX_BARRIER_CUH
#define FA_KERNELS_PTX_BARRIER_CUH

#include "common/dialect.h"
#include "ptx/address.cuh"

#ifdef FA_CUDA_ON_CPU
#include "ptx_on_cpu/barrier.h"
#else

/* ---- mbarrier -------------------------------------------------------------------------------- */

FA_DEVICE void ptx_mbarrier_init(uint64_t *barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(ptx_shared_address(barrier)),
                 "r"(arrivals));
}

/* Makes initialized barriers visible to TMA and to the blocks of the cluster. */
FA_DEVICE void ptx_mbarrier_init_fence(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

FA_DEVICE void ptx_mbarrier_arrive(uint64_t *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(ptx_shared_address(barrier))
                 : "memory");
}

/* The same if condition is not 0. The instruction is predicated, because a branch would cost about 15 cycles. */
FA_DEVICE void ptx_mbarrier_arrive_if(uint64_t *barrier, int condition)
{
    asm volatile("{\n"
                 ".reg .pred yes;\n"
                 "setp.ne.b32 yes, %1, 0;\n"
                 "@yes mbarrier.arrive.shared::cta.b64 _, [%0];\n"
                 "}\n" ::"r"(ptx_shared_address(barrier)),
                 "r"(condition)
                 : "memory");
}

/* The same. The assembler keeps instructions that depend on the returned number after the arrival; it may delay an
 * arrival without a result. */
FA_DEVICE uint32_t ptx_mbarrier_arrive_token_if(uint64_t *barrier, int condition)
{
    uint32_t token;
    asm volatile("{\n"
                 ".reg .pred yes;\n"
                 ".reg .b64 state;\n"
                 "setp.ne.b32 yes, %2, 0;\n"
                 "mov.b64 state, 0;\n"
                 "@yes mbarrier.arrive.shared::cta.b64 state, [%1];\n"
                 "cvt.u32.u64 %0, state;\n"
                 "}\n"
                 : "=r"(token)
                 : "r"(ptx_shared_address(barrier)), "r"(condition)
                 : "memory");
    return token;
}

/* Arrives, and adds to the bytes that the phase waits for. */
FA_DEVICE void ptx_mbarrier_arrive_expect(uint64_t *barrier, int bytes)
{
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(ptx_shared_address(barrier)),
        "r"(bytes)
        : "memory");
}

/* Arrives when all copies (cp_async.cuh) that this thread has issued so far are complete. It counts as one
 * of the arrivals with which the barrier was initialized. */
FA_DEVICE void ptx_mbarrier_arrive_behind_copies(uint64_t *barrier)
{
    asm volatile(
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(ptx_shared_address(barrier))
        : "memory");
}

/* order: "" or ".acquire.cluster". */
#define PTX_MBARRIER_WAIT(order, barrier, parity)                                                  \
    asm volatile("{\n"                                                                             \
                 ".reg .pred done;\n"                                                              \
                 "again:\n"                                                                        \
                 "mbarrier.try_wait.parity" order ".shared::cta.b64 done, [%0], %1;\n"             \
                 "@done bra finished;\n"                                                           \
                 "bra again;\n"                                                                    \
                 "finished:\n"                                                                     \
                 "}\n" ::"r"(ptx_shared_address(barrier)),                                         \
                 "r"(parity)                                                                       \
                 : "memory")

/* Waits until the phase of this parity has ended. */
FA_DEVICE void ptx_mbarrier_wait(uint64_t *barrier, int parity)
{
    PTX_MBARRIER_WAIT("", barrier, parity);
}

/* The same if another block of the cluster arrives or sends the bytes. */
FA_DEVICE void ptx_mbarrier_wait_cluster(uint64_t *barrier, int parity)
{
    PTX_MBARRIER_WAIT(".acquire.cluster", barrier, parity);
}

/* Whether the phase of this parity has ended. If so, the thread sees what was written before the arrivals, as
 * behind a wait; all lanes get the same answer. */
FA_DEVICE bool ptx_mbarrier_is_over(uint64_t *barrier, int parity)
{
    int over;
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                 "selp.s32 %0, 1, 0, done;\n"
                 "}\n"
                 : "=r"(over)
                 : "r"(ptx_shared_address(barrier)), "r"(parity)
                 : "memory");
    return over;
}

/* Arrives at the same barrier of block `peer` of the cluster, if condition is not 0. It tells the peer that
 * shared memory is no longer read, by products, loads or copies that the thread knows to be complete. It orders no
 * other accesses: a release to the cluster would also wait for stores to global memory. */
FA_DEVICE void ptx_mbarrier_arrive_peer_if(uint64_t *barrier, int peer, int condition)
{
    asm volatile("{\n"
                 ".reg .pred yes;\n"
                 "setp.ne.b32 yes, %1, 0;\n"
                 "@yes mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];\n"
                 "}\n" ::"r"(ptx_peer_address(barrier, peer)),
                 "r"(condition)
                 : "memory");
}

/* ---- Named barriers -------------------------------------------------------------------------- */

/* Waits until `threads` threads of the block, in whole warps, have arrived at barrier `id` (1 to 15). */
FA_DEVICE void ptx_named_barrier_sync(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Arrives as one of them, without waiting. */
FA_DEVICE void ptx_named_barrier_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* The same for barrier `one` if the condition is not 0, and for barrier `other` otherwise; a warp's lanes agree.
 * Macros, because the numbers are parts of the instructions. A number in a register has to be moved there first,
 * and the move may wait until the register is free. */
#define PTX_NAMED_BARRIER_OF(operation, condition, one, other, threads)                            \
    asm volatile("{\n"                                                                             \
                 ".reg .pred which;\n"                                                             \
                 "setp.ne.s32 which, %0, 0;\n"                                                     \
                 "@which " operation " %1, %3;\n"                                                  \
                 "@!which " operation " %2, %3;\n"                                                 \
                 "}\n" ::"r"(condition),                                                           \
                 "n"((int)(one)), "n"((int)(other)), "n"((int)(threads))                           \
                 : "memory")
#define ptx_named_barrier_sync_of(condition, one, other, threads)                                  \
    PTX_NAMED_BARRIER_OF("bar.sync", condition, one, other, threads)
#define ptx_named_barrier_arrive_of(condition, one, other, threads)                                \
    PTX_NAMED_BARRIER_OF("bar.arrive", condition, one, other, threads)

/* Waits, and returns whether the predicate holds for any of the threads. */
FA_DEVICE int ptx_named_barrier_or(int id, int threads, int predicate)
{
    int any;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.s32 p, %3, 0;\nbar.red.or.pred q, %1, %2, p;\n"
                 "selp.s32 %0, 1, 0, q;\n}"
                 : "=r"(any)
                 : "r"(id), "r"(threads), "r"(predicate)
                 : "memory");
    return any;
}

/* ---- Clusters -------------------------------------------------------------------------------- */

/* Arrives at the cluster's barrier, where threads wait for all threads of all its blocks. */
FA_DEVICE void ptx_cluster_arrive(void)
{
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

/* The same, but only barriers that the thread has initialized, and fenced, are visible behind the wait. */
FA_DEVICE void ptx_cluster_arrive_relaxed(void)
{
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

/* A whole warp arrives, and waits, once for each phase. */
FA_DEVICE void ptx_cluster_wait(void)
{
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

/* Arrives at the cluster's barrier, and waits for it. */
FA_DEVICE void ptx_cluster_sync(void)
{
    asm volatile("barrier.cluster.arrive.release;\n"
                 "barrier.cluster.wait.acquire;" ::
                     : "memory");
}

#endif

#endif
