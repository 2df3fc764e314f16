/*
 * The instructions that tensor cores are used with from Turing and Ampere on (PTX ISA: ldmatrix,
 * mma.sync, cp.async), each in one small function. ELEMENT is the type of
 * the operands, ARCHITECTURE the oldest one that the kernel runs on (75: without cp.async and bfloat16).
 *
 * With g = lane / 4 and t = lane % 4, mma.m16n8k16 holds
 *   A (16 x 16)  in a[0..3] the pairs (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8)
 *   B (16 x 8)   in b0, b1 the pairs down column g from rows 2t and 2t + 8 on
 *   C (16 x 8)   in c[0..3] (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
 */
#ifndef FA_KERNEL_AMPERE_H
#define FA_KERNEL_AMPERE_H

#include "common/element.h"
#include "common/rows.cuh"

#ifdef FA_CUDA_ON_CPU
#include "ampere_on_cpu.h"
#else

/* The thread's number in its block, read anew each time: what is computed from it would otherwise be kept in
 * registers that the products need. */
FA_DEVICE int fa_thread_id(void)
{
    int id;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(id));
    __builtin_assume(id >= 0); /* divisions by powers of two become shifts */
    return id;
}

FA_DEVICE uint32_t fa_shared_address(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* So many threads of the block meet, whole warps, at the barrier of that number (1 to 15). */
FA_DEVICE void fa_named_barrier(int number, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

/* The same; returns whether the predicate holds for any of them. */
FA_DEVICE int fa_named_barrier_or(int number, int threads, int predicate)
{
    int any;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.s32 p, %3, 0;\nbar.red.or.pred q, %1, %2, p;\n"
                 "selp.s32 %0, 1, 0, q;\n}"
                 : "=r"(any)
                 : "r"(number), "r"(threads), "r"(predicate)
                 : "memory");
    return any;
}

/* ---- Copies to shared memory ----------------------------------------------------------------- */

FA_DEVICE void fa_shared_store4(uint32_t to, uint4 x)
{
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w)
                 : "memory");
}

FA_DEVICE uint4 fa_shared_load4(uint32_t from)
{
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(from)
                 : "memory");
    return x;
}

FA_DEVICE uint32_t fa_shared_load(uint32_t from)
{
    uint32_t x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
}

FA_DEVICE float fa_shared_load_float(uint32_t from)
{
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
    return x;
}

FA_DEVICE void fa_shared_store_float(uint32_t to, float x)
{
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}

FA_DEVICE void fa_shared_store(uint32_t to, uint32_t x)
{
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

/* Starts a copy of 16 bytes, or of zeros where it is not wanted: then nothing is read. */
FA_DEVICE void fa_copy_async(uint32_t to, const void *from, bool wanted)
{
#if ARCHITECTURE >= 80
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(wanted ? 16 : 0)
                 : "memory");
#else
    fa_shared_store4(to, wanted ? *(const uint4 *)from : make_uint4(0, 0, 0, 0));
#endif
}

/* Waits for the copies that this thread started. Other threads see them after a barrier. */
FA_DEVICE void fa_wait_for_copies(void)
{
#if ARCHITECTURE >= 80
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

/* ---- Fragments ------------------------------------------------------------------------------- */

/* Four 8 x 8 matrices; lane l passes the address of row l % 8 of matrix l / 8 and gets of each matrix
 * the elements 2t and 2t + 1 of row g. */
FA_DEVICE void fa_load_matrices(uint32_t x[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

/* The same of the transposed matrices: elements 2t and 2t + 1 of column g. */
FA_DEVICE void fa_load_matrices_transposed(uint32_t x[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

/* ---- Products -------------------------------------------------------------------------------- */

#if ARCHITECTURE >= 80
#if ELEMENT == FA_ELEMENT_BFLOAT16
#define FA_MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
#define FA_MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif

/* c (16 x 8) += a (16 x 16) b (16 x 8) */
FA_DEVICE void fa_mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm volatile(FA_MMA "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#else
FA_DEVICE void fa_mma_k8(float c[4], uint32_t a0, uint32_t a1, uint32_t b)
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(b));
}

/* Turing multiplies half as much at a time; the fragments are halves of those above. */
FA_DEVICE void fa_mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    fa_mma_k8(c, a[0], a[1], b0);
    fa_mma_k8(c, a[2], a[3], b1);
}
#endif

/* ---- 16-bit pairs, exponentials -------------------------------------------------------------- */

/* Two floats rounded to 16 bits; low comes to lie in the lower half. */
FA_DEVICE uint32_t fa_pack_pair(float low, float high)
{
    uint32_t pair;
#if ELEMENT == FA_ELEMENT_BFLOAT16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#elif ARCHITECTURE >= 80
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("{\n.reg .b16 l, h;\ncvt.rn.f16.f32 l, %1;\ncvt.rn.f16.f32 h, %2;\nmov.b32 %0, {l, h};\n}"
        : "=r"(pair)
        : "f"(low), "f"(high));
#endif
    return pair;
}

/* 2^x by the special-function unit; 2^-infinity is 0. */
FA_DEVICE float fa_exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif /* FA_CUDA_ON_CPU */

/* Has the compiler keep x, where it would rather compute it anew each time. */
FA_DEVICE uint32_t fa_keep(uint32_t x)
{
    __asm__ volatile("" : "+r"(x));
    return x;
}

/* ---- Pairs that are not finite --------------------------------------------------------------- */

#if ELEMENT == FA_ELEMENT_BFLOAT16
#define FA_PAIR_EXPONENTS 0x7f807f80u
#define FA_PAIR_CARRY 0x00800080u
#define FA_PAIR_ONES 0x3f803f80u
#else
#define FA_PAIR_EXPONENTS 0x7c007c00u
#define FA_PAIR_CARRY 0x04000400u
#define FA_PAIR_ONES 0x3c003c00u
#endif

/* The top bit of each half that is infinite or NaN: one more in the exponent carries into it. */
FA_DEVICE uint32_t fa_pair_not_finite(uint32_t pair)
{
    return ((pair & FA_PAIR_EXPONENTS) + FA_PAIR_CARRY) & 0x80008000u;
}

/* All bits of the halves whose top bit is set. */
FA_DEVICE uint32_t fa_pair_spread(uint32_t top_bits) { return (top_bits >> 15) * 0xffffu; }

/* The top bit of each half that is not 0, whatever its sign. */
FA_DEVICE uint32_t fa_pair_not_zero(uint32_t pair)
{
    return ((pair & 0x7fff7fffu) + 0x7fff7fffu) & 0x80008000u;
}

#endif
