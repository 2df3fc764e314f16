/*
 * wgmma: asynchronous products of a warpgroup, D (64 x N, float32, in registers) += A (64 x 16) B
 * (16 x N).
 *
 * The including file defines ELEMENT, the type of A and B: FA_ELEMENT_FLOAT16, FA_ELEMENT_BFLOAT16 or
 * FA_ELEMENT_TF32. The last is float32 in memory; the instruction drops its last 13 bits. In tf32 A is
 * 64 x 8 and B 8 x N, and both are read along their rows.
 */
#ifndef FA_KERNELS_PTX_WGMMA_CUH
#define FA_KERNELS_PTX_WGMMA_CUH

#include "common/dialect.h"
#include "common/element.h"
#include "ptx/address.cuh"

#ifndef ELEMENT
#error "ptx/wgmma.cuh: ELEMENT is missing"
#elif ELEMENT != FA_ELEMENT_FLOAT16 && ELEMENT != FA_ELEMENT_BFLOAT16 && ELEMENT != FA_ELEMENT_TF32
#error "ptx/wgmma.cuh: ELEMENT is neither a 16-bit type nor tf32"
#endif

#ifdef FA_CUDA_ON_CPU
#include "ptx_on_cpu/wgmma.h"
#else

/* Orders register accesses before the products that follow. */
FA_DEVICE void ptx_wgmma_fence(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

/* Ends a group of products. */
FA_DEVICE void ptx_wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Waits until at most `pending` groups are still running. A macro, because the number is part of the
 * instruction. */
#define ptx_wgmma_wait(pending)                                                                    \
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory")

/* Prevents the compiler from moving accesses to these floats past this point: it does not know that running
 * products write to them. */
#define ptx_register_fence(registers, count)                                                       \
    do {                                                                                           \
        _Pragma("unroll") for (int fence_i = 0; fence_i < (count);                                 \
                               fence_i++) asm volatile("" : "+f"((registers)[fence_i])::"memory"); \
    } while (0)

/* Tells the compiler that the values of these floats are no longer needed: a product overwrites them. */
#define ptx_register_forget(registers, count)                                                      \
    do {                                                                                           \
        _Pragma("unroll") for (int forget_i = 0; forget_i < (count);                               \
                               forget_i++) asm volatile("" : "=f"((registers)[forget_i]));         \
    } while (0)

#if ELEMENT == FA_ELEMENT_TF32
#define PTX_WGMMA_SHAPE "k8.f32.tf32.tf32"
#elif ELEMENT == FA_ELEMENT_BFLOAT16
#define PTX_WGMMA_SHAPE "k16.f32.bf16.bf16"
#else
#define PTX_WGMMA_SHAPE "k16.f32.f16.f16"
#endif

/* The operands of the instruction behind the factors' signs: whether A and B are read across their
 * rows. tf32 has none. */
#if ELEMENT == FA_ELEMENT_TF32
#define PTX_WGMMA_ACROSS_B(across) ""
#define PTX_WGMMA_ACROSS_AB(across_a, across) ""
#else
#define PTX_WGMMA_ACROSS_B(across) ", " #across
#define PTX_WGMMA_ACROSS_AB(across_a, across) ", " #across_a ", " #across
#endif

/* Placeholders and operands of accumulators, eight at a time; and of four and of eight. */
#define PTX_NAMES_FOUR "%0, %1, %2, %3"
#define PTX_DATA_FOUR(d, i) "+f"(d[(i) + 0]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define PTX_NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PTX_NAMES_1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define PTX_NAMES_2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define PTX_NAMES_3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define PTX_NAMES_4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define PTX_NAMES_5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define PTX_NAMES_6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define PTX_NAMES_7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define PTX_NAMES_8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define PTX_NAMES_9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define PTX_NAMES_10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define PTX_NAMES_11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define PTX_NAMES_12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define PTX_NAMES_13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define PTX_NAMES_14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define PTX_NAMES_15 "%120, %121, %122, %123, %124, %125, %126, %127"

#define PTX_NAMES_EIGHT PTX_NAMES_0
#define PTX_NAMES_16 PTX_NAMES_0 ", " PTX_NAMES_1
#define PTX_NAMES_32 PTX_NAMES_0 ", " PTX_NAMES_1 ", " PTX_NAMES_2 ", " PTX_NAMES_3
#define PTX_NAMES_40 PTX_NAMES_32 ", " PTX_NAMES_4
#define PTX_NAMES_48 PTX_NAMES_40 ", " PTX_NAMES_5
#define PTX_NAMES_56 PTX_NAMES_48 ", " PTX_NAMES_6
#define PTX_NAMES_64 PTX_NAMES_48 ", " PTX_NAMES_6 ", " PTX_NAMES_7
#define PTX_NAMES_72 PTX_NAMES_64 ", " PTX_NAMES_8
#define PTX_NAMES_80 PTX_NAMES_72 ", " PTX_NAMES_9
#define PTX_NAMES_88 PTX_NAMES_80 ", " PTX_NAMES_10
#define PTX_NAMES_96 PTX_NAMES_88 ", " PTX_NAMES_11
#define PTX_NAMES_128                                                                              \
    PTX_NAMES_96 ", " PTX_NAMES_12 ", " PTX_NAMES_13 ", " PTX_NAMES_14 ", " PTX_NAMES_15

#define PTX_DATA_8(d, i)                                                                           \
    "+f"(d[(i) + 0]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), "+f"(d[(i) + 4]),      \
        "+f"(d[(i) + 5]), "+f"(d[(i) + 6]), "+f"(d[(i) + 7])
#define PTX_DATA_EIGHT(d, i) PTX_DATA_8(d, i)
#define PTX_DATA_16(d, i) PTX_DATA_8(d, i), PTX_DATA_8(d, (i) + 8)
#define PTX_DATA_32(d, i)                                                                          \
    PTX_DATA_8(d, i), PTX_DATA_8(d, (i) + 8), PTX_DATA_8(d, (i) + 16), PTX_DATA_8(d, (i) + 24)
#define PTX_DATA_40(d, i) PTX_DATA_32(d, i), PTX_DATA_8(d, (i) + 32)
#define PTX_DATA_48(d, i) PTX_DATA_40(d, i), PTX_DATA_8(d, (i) + 40)
#define PTX_DATA_56(d, i) PTX_DATA_48(d, i), PTX_DATA_8(d, (i) + 48)
#define PTX_DATA_64(d, i) PTX_DATA_32(d, i), PTX_DATA_32(d, (i) + 32)
#define PTX_DATA_72(d, i) PTX_DATA_64(d, i), PTX_DATA_8(d, (i) + 64)
#define PTX_DATA_80(d, i) PTX_DATA_72(d, i), PTX_DATA_8(d, (i) + 72)
#define PTX_DATA_88(d, i) PTX_DATA_80(d, i), PTX_DATA_8(d, (i) + 80)
#define PTX_DATA_96(d, i) PTX_DATA_64(d, i), PTX_DATA_32(d, (i) + 64)
#define PTX_DATA_128(d, i) PTX_DATA_64(d, i), PTX_DATA_64(d, (i) + 64)

/*
 * For N columns (count = N / 2 accumulators a thread):
 *   ptx_wgmma_qk_N         A and B from shared memory, the 16 along the rows of both (Q and K)
 *   ptx_wgmma_registers_qk_N  the same with A from registers
 *   ptx_wgmma_pv_N         A from registers, B from shared memory, the 16 across its rows (P and V)
 *   ptx_wgmma_shared_pv_N  the same with A from shared memory, along its rows
 *   ptx_wgmma_vp_N         A and B from shared memory, the 16 across the rows of A and along those of B (transposed
 *                          V, and P whose rows are columns of the result)
 *   ptx_wgmma_across_N     A and B from shared memory, the 16 across the rows of both (dS, whose columns are rows of the
 *                          result, and Q)
 * accumulate 0: D = A B. The literals n0 ... are the numbers of the operands behind the accumulators.
 */
#if ELEMENT == FA_ELEMENT_TF32
#define PTX_DEFINE_WGMMA(N, count, n0, n1, n2, n3, n4, n5)                                         \
    PTX_DEFINE_WGMMA_SHARED(qk, 0, 0, N, count, n0, n1, n2)                                        \
    PTX_DEFINE_WGMMA_REGISTERS(registers_qk, 0, N, count, n0, n1, n2, n3, n4, n5)
#else
#define PTX_DEFINE_WGMMA(N, count, n0, n1, n2, n3, n4, n5)                                         \
    PTX_DEFINE_WGMMA_SHARED(qk, 0, 0, N, count, n0, n1, n2)                                        \
    PTX_DEFINE_WGMMA_SHARED(shared_pv, 0, 1, N, count, n0, n1, n2)                                 \
    PTX_DEFINE_WGMMA_REGISTERS(registers_qk, 0, N, count, n0, n1, n2, n3, n4, n5)                  \
    PTX_DEFINE_WGMMA_REGISTERS(pv, 1, N, count, n0, n1, n2, n3, n4, n5)
#endif

/* Those with A from registers. across: 1 if the 16 go across the rows of B. */
#define PTX_DEFINE_WGMMA_REGISTERS(kind, across, N, count, n0, n1, n2, n3, n4, n5)                 \
    FA_DEVICE void ptx_wgmma_##kind##_##N(float *d, const uint32_t *a, uint64_t b, int accumulate) \
    {                                                                                              \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #n5 ", 0;\n"                             \
                     "wgmma.mma_async.sync.aligned.m64n" #N PTX_WGMMA_SHAPE " {" PTX_NAMES_##count \
                     "}, {%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4                          \
                     ", p, 1, 1" PTX_WGMMA_ACROSS_B(across) ";\n}\n"                               \
                     : PTX_DATA_##count(d, 0)                                                      \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));       \
    }

/* Those with A from shared memory. across_a, across: 1 if the 16 go across the rows of A, or of B. */
#define PTX_DEFINE_WGMMA_SHARED(kind, across_a, across, N, count, n0, n1, n2)                      \
    FA_DEVICE void ptx_wgmma_##kind##_##N(float *d, uint64_t a, uint64_t b, int accumulate)        \
    {                                                                                              \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #n2 ", 0;\n"                             \
                     "wgmma.mma_async.sync.aligned.m64n" #N PTX_WGMMA_SHAPE " {" PTX_NAMES_##count \
                     "}, %" #n0 ", %" #n1                                                          \
                     ", p, 1, 1" PTX_WGMMA_ACROSS_AB(across_a, across) ";\n}\n"                    \
                     : PTX_DATA_##count(d, 0)                                                      \
                     : "l"(a), "l"(b), "r"(accumulate));                                           \
    }

#if ELEMENT != FA_ELEMENT_TF32
PTX_DEFINE_WGMMA_SHARED(qk, 0, 0, 8, FOUR, 4, 5, 6)
PTX_DEFINE_WGMMA_SHARED(vp, 1, 0, 8, FOUR, 4, 5, 6)
PTX_DEFINE_WGMMA_SHARED(qk, 0, 0, 16, EIGHT, 8, 9, 10)
PTX_DEFINE_WGMMA_SHARED(vp, 1, 0, 16, EIGHT, 8, 9, 10)
PTX_DEFINE_WGMMA_SHARED(vp, 1, 0, 32, 16, 16, 17, 18)
PTX_DEFINE_WGMMA_SHARED(across, 1, 1, 192, 96, 96, 97, 98)
#endif
PTX_DEFINE_WGMMA(32, 16, 16, 17, 18, 19, 20, 21)
PTX_DEFINE_WGMMA(64, 32, 32, 33, 34, 35, 36, 37)
PTX_DEFINE_WGMMA(80, 40, 40, 41, 42, 43, 44, 45)
PTX_DEFINE_WGMMA(96, 48, 48, 49, 50, 51, 52, 53)
PTX_DEFINE_WGMMA(112, 56, 56, 57, 58, 59, 60, 61)
PTX_DEFINE_WGMMA(128, 64, 64, 65, 66, 67, 68, 69)
PTX_DEFINE_WGMMA(144, 72, 72, 73, 74, 75, 76, 77)
PTX_DEFINE_WGMMA(160, 80, 80, 81, 82, 83, 84, 85)
PTX_DEFINE_WGMMA(176, 88, 88, 89, 90, 91, 92, 93)
PTX_DEFINE_WGMMA(192, 96, 96, 97, 98, 99, 100, 101)
PTX_DEFINE_WGMMA(256, 128, 128, 129, 130, 131, 132, 133)

#endif

/* PTX_WGMMA(qk, N) is ptx_wgmma_qk_64 and so on, also where N is a macro. */
#define PTX_WGMMA_NAME(kind, N) ptx_wgmma_##kind##_##N
#define PTX_WGMMA(kind, N) PTX_WGMMA_NAME(kind, N)

/* ---- Matrix descriptors ---------------------------------------------------------------------- */

/*
 * Where an operand is in shared memory, for rows of 128 bytes in TMA's 128-byte swizzle: 8 rows make a
 * group of 1024 bytes (so the operand must start at a multiple of 1024). group: bytes from one group to the
 * next along the rows; block: bytes from one block of 64 columns to the next, which only an operand read
 * across its rows (B = V) needs.
 */
FA_DEVICE uint64_t ptx_matrix_descriptor(const void *shared, int group, int block)
{
    const uint64_t swizzle_128 = 1;
    return (uint64_t)((ptx_shared_address(shared) & 0x3ffff) >> 4) | (uint64_t)(block >> 4) << 16 |
           (uint64_t)(group >> 4) << 32 | swizzle_128 << 62;
}

/* The same in two steps, for groups of 1024 bytes: the lower half, which depends on the address and to which
 * bytes / 16 may be added, and the whole descriptor. Each of several consecutive products then costs one
 * addition instead of a chain of additions. */
FA_DEVICE uint32_t ptx_descriptor_low(const void *shared, int block)
{
    return ptx_shared_address(shared) >> 4 | (uint32_t)(block >> 4) << 16;
}

/* The same in a cluster, where the upper bits of an address are the block's number. */
FA_DEVICE uint32_t ptx_descriptor_low_in_cluster(const void *shared, int block)
{
    return (ptx_shared_address(shared) & 0x3ffff) >> 4 | (uint32_t)(block >> 4) << 16;
}

FA_DEVICE uint64_t ptx_descriptor(uint32_t low)
{
    return (uint64_t)(1u << 30 | 1024 >> 4) << 32 | low;
}

#endif
