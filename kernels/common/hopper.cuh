/*
 * Hopper's own instructions (PTX ISA, sm_90a), each in one small function: barriers in shared memory
 * (mbarrier), the copy engine (TMA), products of a warpgroup (wgmma), registers moved between
 * warpgroups (setmaxnreg), named barriers.
 *
 * ELEMENT is the type of 16-bit operands: FA_ELEMENT_FLOAT16 or FA_ELEMENT_BFLOAT16.
 */
#ifndef FA_KERNELS_HOPPER_CUH
#define FA_KERNELS_HOPPER_CUH

#include <stdint.h>

#include "common/element.h"

#ifdef FA_CUDA_ON_CPU
#include "hopper_on_cpu.h"
#else

#define FA_DEVICE static __device__ __forceinline__

/* Of a tile, for tests (hopper_units.h). */
#define COUNT_PATH(path) (void)0

FA_DEVICE uint32_t shared_address(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* ---- mbarrier: counts arrivals and bytes; a phase ends when both are complete ------------------ */

FA_DEVICE void barrier_init(uint64_t *barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals));
}

/* Makes initialized barriers visible to the copy engine. */
FA_DEVICE void barrier_init_fence(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

FA_DEVICE void barrier_arrive(uint64_t *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}

/* The same, if condition is not 0: without a branch, which costs some 15 clocks. */
FA_DEVICE void barrier_arrive_if(uint64_t *barrier, int condition)
{
    asm volatile("{\n"
                 ".reg .pred yes;\n"
                 "setp.ne.b32 yes, %1, 0;\n"
                 "@yes mbarrier.arrive.shared::cta.b64 _, [%0];\n"
                 "}\n" ::"r"(shared_address(barrier)),
                 "r"(condition)
                 : "memory");
}

/* The same, for who wants it early: what depends on the result stays behind the arrival, which the assembler
 * would otherwise put off. */
FA_DEVICE uint32_t barrier_arrive_early(uint64_t *barrier, int condition)
{
    uint32_t state;
    asm volatile("{\n"
                 ".reg .pred yes;\n"
                 ".reg .b64 state;\n"
                 "setp.ne.b32 yes, %2, 0;\n"
                 "mov.b64 state, 0;\n"
                 "@yes mbarrier.arrive.shared::cta.b64 state, [%1];\n"
                 "cvt.u32.u64 %0, state;\n"
                 "}\n"
                 : "=r"(state)
                 : "r"(shared_address(barrier)), "r"(condition)
                 : "memory");
    return state;
}

/* Arrives, and says how many bytes this phase will receive. */
FA_DEVICE void barrier_expect(uint64_t *barrier, int bytes)
{
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
        "r"(bytes)
        : "memory");
}

/* order: ".acquire.cluster", where a peer's doings are waited for; or "". */
#define WAIT_FOR_PHASE(order, barrier, parity)                                                     \
    asm volatile("{\n"                                                                             \
                 ".reg .pred done;\n"                                                              \
                 "again:\n"                                                                        \
                 "mbarrier.try_wait.parity" order ".shared::cta.b64 done, [%0], %1;\n"             \
                 "@done bra finished;\n"                                                           \
                 "bra again;\n"                                                                    \
                 "finished:\n"                                                                     \
                 "}\n" ::"r"(shared_address(barrier)),                                             \
                 "r"(parity)                                                                       \
                 : "memory")

/* Waits until the phase of this parity (0 for the first one, then 1, 0, ...) has ended. */
FA_DEVICE void barrier_wait(uint64_t *barrier, int parity) { WAIT_FOR_PHASE("", barrier, parity); }

/* ---- Clusters: blocks that reach into each other's shared memory ------------------------------- */

/* In what follows `shared` and `barrier` are the block's own, and stand for the same place in the block
 * of number `peer` of the cluster. */
FA_DEVICE uint32_t peer_address(const void *shared, int peer)
{
    uint32_t address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(address)
                 : "r"(shared_address(shared)), "r"(peer));
    return address;
}

/* All threads of all blocks of the cluster meet. */
FA_DEVICE void cluster_sync(void)
{
    asm volatile("barrier.cluster.arrive.release;\n"
                 "barrier.cluster.wait.acquire;" ::
                     : "memory");
}

/* barrier_wait, for what a peer has written or read. */
FA_DEVICE void barrier_wait_for_peer(uint64_t *barrier, int parity)
{
    WAIT_FOR_PHASE(".acquire.cluster", barrier, parity);
}

/* Tells a peer that what was read here by wgmma_wait's end may be written again. It orders no other
 * accesses: a release to the cluster would wait for those to global memory as well. */
FA_DEVICE void barrier_arrive_at_peer_if(uint64_t *barrier, int peer, int condition)
{
    asm volatile("{\n"
                 ".reg .pred yes;\n"
                 "setp.ne.b32 yes, %1, 0;\n"
                 "@yes mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];\n"
                 "}\n" ::"r"(peer_address(barrier, peer)),
                 "r"(condition)
                 : "memory");
}

/* Stores a number at the peer, whose barrier counts its 4 bytes. */
FA_DEVICE void send_float(float *shared, uint64_t *barrier, int peer, float x)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
                     peer_address(shared, peer)),
                 "f"(x), "r"(peer_address(barrier, peer))
                 : "memory");
}

/* Copies bytes to the peer, by the copy engine. The peer's barrier counts them. */
FA_DEVICE void send_bytes(void *shared, uint64_t *barrier, int peer, int bytes)
{
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(peer_address(shared, peer)),
                 "r"(shared_address(shared)), "r"(bytes), "r"(peer_address(barrier, peer))
                 : "memory");
}

/* ---- Named barriers: `threads` threads meet; some only arrive, others wait --------------------- */

FA_DEVICE void named_barrier_sync(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

FA_DEVICE void named_barrier_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* ---- The copy engine --------------------------------------------------------------------------- */

/* Loads the box of a three-dimensional tensor map that starts at (x, y, z), x innermost. The bytes
 * count towards the barrier's phase. */
FA_DEVICE void tma_load(void *shared, const void *map, uint64_t *barrier, int x, int y, int z)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(shared)),
                 "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

/* The same of a map with four axes. */
FA_DEVICE void tma_load_4d(void *shared, const void *map, uint64_t *barrier, int x, int y, int z,
                           int w)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(shared)),
                 "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

/* Orders this thread's stores to shared memory before what the copy engine and wgmma read there. */
FA_DEVICE void async_proxy_fence(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- Registers --------------------------------------------------------------------------------- */

#define registers_give_back(count) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count))
#define registers_take(count) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count))

/* ---- wgmma: D (64 x N, float32, registers) += A (64 x 16) B (16 x N) --------------------------- */

/* Orders register accesses before the products that follow. */
FA_DEVICE void wgmma_fence(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FA_DEVICE void wgmma_commit(void) { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/* Waits until at most `pending` committed groups are still running. */
#define wgmma_wait(pending)                                                                        \
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory")

/* Keeps the compiler from moving register accesses across the place where it stands: it does not know
 * that products still write to these. */
#define REGISTER_FENCE(registers, count)                                                           \
    do {                                                                                           \
        _Pragma("unroll") for (int fence_i = 0; fence_i < (count);                                 \
                               fence_i++) asm volatile("" : "+f"((registers)[fence_i])::"memory"); \
    } while (0)

#if ELEMENT == FA_ELEMENT_BFLOAT16
#define WGMMA_TYPES "f32.bf16.bf16"
#else
#define WGMMA_TYPES "f32.f16.f16"
#endif

/* Names and operands of accumulators, eight at a time. */
#define NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define NAMES_9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define NAMES_11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define NAMES_13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES_14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define NAMES_15 "%120, %121, %122, %123, %124, %125, %126, %127"

#define NAMES_32 NAMES_0 ", " NAMES_1 ", " NAMES_2 ", " NAMES_3
#define NAMES_40 NAMES_32 ", " NAMES_4
#define NAMES_48 NAMES_40 ", " NAMES_5
#define NAMES_56 NAMES_48 ", " NAMES_6
#define NAMES_64 NAMES_48 ", " NAMES_6 ", " NAMES_7
#define NAMES_72 NAMES_64 ", " NAMES_8
#define NAMES_80 NAMES_72 ", " NAMES_9
#define NAMES_88 NAMES_80 ", " NAMES_10
#define NAMES_96 NAMES_88 ", " NAMES_11
#define NAMES_128 NAMES_96 ", " NAMES_12 ", " NAMES_13 ", " NAMES_14 ", " NAMES_15

#define DATA_8(d, i)                                                                               \
    "+f"(d[(i) + 0]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), "+f"(d[(i) + 4]),      \
        "+f"(d[(i) + 5]), "+f"(d[(i) + 6]), "+f"(d[(i) + 7])
#define DATA_32(d, i) DATA_8(d, i), DATA_8(d, (i) + 8), DATA_8(d, (i) + 16), DATA_8(d, (i) + 24)
#define DATA_40(d, i) DATA_32(d, i), DATA_8(d, (i) + 32)
#define DATA_48(d, i) DATA_40(d, i), DATA_8(d, (i) + 40)
#define DATA_56(d, i) DATA_48(d, i), DATA_8(d, (i) + 48)
#define DATA_64(d, i) DATA_32(d, i), DATA_32(d, (i) + 32)
#define DATA_72(d, i) DATA_64(d, i), DATA_8(d, (i) + 64)
#define DATA_80(d, i) DATA_72(d, i), DATA_8(d, (i) + 72)
#define DATA_88(d, i) DATA_80(d, i), DATA_8(d, (i) + 80)
#define DATA_96(d, i) DATA_64(d, i), DATA_32(d, (i) + 64)
#define DATA_128(d, i) DATA_64(d, i), DATA_64(d, (i) + 64)

/*
 * For N columns (count = N / 2 accumulators a thread):
 *   wgmma_qk_N: A and B from shared memory, both with the 16 along their rows (Q and K);
 *   wgmma_pv_N: A from registers, B from shared memory across its rows (P and V);
 *   wgmma_shared_pv_N: the same with A from shared memory, along its rows.
 * accumulate 0: D = A B. The literals are the numbers of the operands behind the accumulators.
 */
#define DEFINE_WGMMA(N, count, n0, n1, n2, n3, n4, n5)                                             \
    DEFINE_WGMMA_SHARED(qk, 0, N, count, n0, n1, n2)                                               \
    DEFINE_WGMMA_SHARED(shared_pv, 1, N, count, n0, n1, n2)                                        \
    FA_DEVICE void wgmma_pv_##N(float *d, const uint32_t *a, uint64_t b, int accumulate)           \
    {                                                                                              \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #n5 ", 0;\n"                             \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16." WGMMA_TYPES " {" NAMES_##count  \
                     "}, {%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", p, 1, 1, 1;\n}\n"     \
                     : DATA_##count(d, 0)                                                          \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));       \
    }

/* Those with A from shared memory. across: 1 if the 16 go across the rows of B. */
#define DEFINE_WGMMA_SHARED(kind, across, N, count, n0, n1, n2)                                    \
    FA_DEVICE void wgmma_##kind##_##N(float *d, uint64_t a, uint64_t b, int accumulate)            \
    {                                                                                              \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #n2 ", 0;\n"                             \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16." WGMMA_TYPES " {" NAMES_##count  \
                     "}, %" #n0 ", %" #n1 ", p, 1, 1, 0, " #across ";\n}\n"                        \
                     : DATA_##count(d, 0)                                                          \
                     : "l"(a), "l"(b), "r"(accumulate));                                           \
    }

DEFINE_WGMMA(64, 32, 32, 33, 34, 35, 36, 37)
DEFINE_WGMMA(80, 40, 40, 41, 42, 43, 44, 45)
DEFINE_WGMMA(96, 48, 48, 49, 50, 51, 52, 53)
DEFINE_WGMMA(112, 56, 56, 57, 58, 59, 60, 61)
DEFINE_WGMMA(128, 64, 64, 65, 66, 67, 68, 69)
DEFINE_WGMMA(144, 72, 72, 73, 74, 75, 76, 77)
DEFINE_WGMMA(160, 80, 80, 81, 82, 83, 84, 85)
DEFINE_WGMMA(176, 88, 88, 89, 90, 91, 92, 93)
DEFINE_WGMMA(192, 96, 96, 97, 98, 99, 100, 101)
DEFINE_WGMMA(256, 128, 128, 129, 130, 131, 132, 133)

/* wgmma_qk(N) is wgmma_qk_64 and so on, also where N is a macro. */
#define WGMMA_NAME(kind, N) wgmma_##kind##_##N
#define WGMMA(kind, N) WGMMA_NAME(kind, N)

/* ---- The assembler's order of things ----------------------------------------------------------- */

/* It has instructions as early as it can, also where that is bad: all that an exponential needs before the
 * first of them, a wait before the work that could be done meanwhile. `nothing` is 0, which it does not
 * know: then what is below holds it up. */

/* The y of a thread of a block that has none; and no register for each lane. */
FA_DEVICE int find_nothing(void) { return (int)__reduce_or_sync(0xffffffff, threadIdx.y); }

/* x, which it takes for known only when y is. */
FA_DEVICE float known_after(float x, float y, int nothing)
{
    return __int_as_float(__float_as_int(x) | (__float_as_int(y) & nothing));
}

/* What waits or writes to memory behind this stays behind y. A store that is never made. */
FA_DEVICE void hold_until(float y, int nothing, void *shared)
{
    asm volatile("{\n"
                 ".reg .pred yes;\n"
                 "setp.ne.b32 yes, %1, 0;\n"
                 "@yes st.shared.b32 [%0], %1;\n"
                 "}\n" ::"r"(shared_address(shared)),
                 "r"(__float_as_int(y) & nothing)
                 : "memory");
}

/* ---- 16-bit pairs, exponentials ---------------------------------------------------------------- */

/* Two floats rounded to 16 bits; low lies at the lower address. */
FA_DEVICE uint32_t pack_pair(float low, float high)
{
    uint32_t pair;
#if ELEMENT == FA_ELEMENT_BFLOAT16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}

/* The sign of each half of x in all of its bits. */
FA_DEVICE uint32_t spread_signs(uint32_t x)
{
    uint32_t mask;
    asm("prmt.b32 %0, %1, %1, 0xbb99;" : "=r"(mask) : "r"(x));
    return mask;
}

/* 2^x by the special-function unit; 2^-infinity is 0. */
FA_DEVICE float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* 1 / x by the special-function unit, to 1 ulp; 0 for what is above 2^126. */
FA_DEVICE float reciprocal_fast(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Stores four 8 x 8 matrices of 16-bit elements, which lie in registers as wgmma leaves them; each lane
 * gives the address of one row of 16 bytes. */
FA_DEVICE void store_matrix_x4(uint32_t address, const uint32_t r[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

/* To global memory, which the compiler does not know the address to lead to. */
FA_DEVICE void store_16_bytes(void *to, uint4 x)
{
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
                 "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

FA_DEVICE void store_8_bytes(void *to, uint2 x)
{
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(x.x),
                 "r"(x.y)
                 : "memory");
}

/* The same place in shared memory, whose address the compiler would find anew wherever it is needed, by way
 * of the block's number in its cluster. */
FA_DEVICE void *kept_place(void *shared)
{
    return __cvta_shared_to_generic(__reduce_or_sync(0xffffffff, shared_address(shared)));
}

#endif /* FA_CUDA_ON_CPU */

/* ---- Operands of wgmma in shared memory -------------------------------------------------------- */

/*
 * Where a matrix lies in shared memory, for 128-byte rows in the copy engine's 128-byte swizzle: 8 rows
 * make a group of 1024 bytes (so the matrix must start on a multiple of 1024). group: bytes from one
 * group to the next along the rows; block: bytes from one block of 64 columns to the next, which only
 * an operand read across its rows (B = V) needs.
 */
FA_DEVICE uint64_t matrix_descriptor(const void *shared, int group, int block)
{
    const uint64_t swizzle_128 = 1;
    return (uint64_t)((shared_address(shared) & 0x3ffff) >> 4) | (uint64_t)(block >> 4) << 16 |
           (uint64_t)(group >> 4) << 32 | swizzle_128 << 62;
}

/* The same in two steps, for groups of 1024 bytes: the half that depends on the place, to which bytes / 16
 * may be added, and the whole. Products that follow each other then cost one addition, where the
 * scheduler would have a chain of them stand between two. */
FA_DEVICE uint32_t matrix_place(const void *shared, int block)
{
    return shared_address(shared) >> 4 | (uint32_t)(block >> 4) << 16;
}

/* The same in a cluster: there the upper bits of an address are the block's number. */
FA_DEVICE uint32_t matrix_place_in_cluster(const void *shared, int block)
{
    return (shared_address(shared) & 0x3ffff) >> 4 | (uint32_t)(block >> 4) << 16;
}

FA_DEVICE uint64_t matrix_at(uint32_t place)
{
    return (uint64_t)(1u << 30 | 1024 >> 4) << 32 | place;
}

#endif
