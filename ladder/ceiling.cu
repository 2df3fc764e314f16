/*
 * The probe: what the card can do at best, on random data, for the figures to be compared with; and
 * the random data itself. Compiled with HOPPER=0 for every architecture, and with HOPPER=1 for what
 * only Hopper has.
 *
 * A rate kernel does `rounds` rounds of independent products on operands that it makes from random
 * numbers once, and nothing else. ladder_bench.c knows how many operations a round is.
 */
#if HOPPER
#define ELEMENT FA_ELEMENT_BFLOAT16
#include "ptx/wgmma.cuh"
#endif
#include <stdint.h>

#ifndef FA_DEVICE
#define FA_DEVICE static __device__ __forceinline__
#endif

enum { THREADS = 256 };

/* ---- random numbers -------------------------------------------------------------------------- */

typedef struct normal_four {
    float x[4];
} normal_four;

/* Philox 4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011), then Box and Muller. */
FA_DEVICE normal_four random_normals(uint64_t index, uint32_t seed)
{
    uint32_t c0 = (uint32_t)index, c1 = (uint32_t)(index >> 32), c2 = 0, c3 = 0;
    uint32_t k0 = seed, k1 = 0x5eed;
    for (int round = 0; round < 10; round++) {
        uint32_t high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        uint32_t high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0;
        c2 = high0 ^ c3 ^ k1;
        c1 = low1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    const uint32_t bits[4] = {c0, c1, c2, c3};
    normal_four normal;
    for (int i = 0; i < 4; i += 2) {
        float u = ((float)(bits[i] >> 8) + 1.0f) * 0x1p-24f; /* in (0, 1] */
        float radius = sqrtf(-2.0f * logf(u)), sine, cosine;
        sincospif((float)bits[i + 1] * 0x1p-31f, &sine, &cosine);
        normal.x[i] = radius * cosine;
        normal.x[i + 1] = radius * sine;
    }
    return normal;
}

/* Two bfloat16 in one word; low lies at the lower address. */
FA_DEVICE uint32_t bfloat_pair(float low, float high)
{
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

#if !HOPPER

/* ---- inputs ---------------------------------------------------------------------------------- */

enum { KIND_FLOAT32, KIND_BFLOAT16, KIND_FLOAT16 };

FA_DEVICE uint32_t half_pair(float low, float high)
{
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/* Fills 4 * fours elements of a kind with standard normal numbers. */
extern "C" __global__ void fill_normal(void *out, uint64_t fours, uint32_t seed, int kind)
{
    uint64_t stride = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < fours; i += stride) {
        normal_four n = random_normals(i, seed);
        if (kind == KIND_FLOAT32) ((float4 *)out)[i] = make_float4(n.x[0], n.x[1], n.x[2], n.x[3]);
        else if (kind == KIND_BFLOAT16)
            ((uint2 *)out)[i] =
                make_uint2(bfloat_pair(n.x[0], n.x[1]), bfloat_pair(n.x[2], n.x[3]));
        else ((uint2 *)out)[i] = make_uint2(half_pair(n.x[0], n.x[1]), half_pair(n.x[2], n.x[3]));
    }
}

/* ---- bandwidth ------------------------------------------------------------------------------- */

extern "C" __global__ void copy(float4 *out, const float4 *in, uint64_t count)
{
    uint64_t stride = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride)
        out[i] = in[i];
}

/* ---- rates ----------------------------------------------------------------------------------- */

/* An index that differs from thread to thread and from draw to draw. */
FA_DEVICE uint64_t draw_index(int draw)
{
    return ((uint64_t)blockIdx.x * THREADS + threadIdx.x) * 64 + draw;
}

/* A use of the results that the compiler cannot drop; never true. */
FA_DEVICE void keep(float *out, float sum)
{
    if (sum == 1.2345e30f) *out = sum;
}

enum { CHAINS = 16 };

/* A round: CHAINS fused multiply-adds a thread. */
extern "C" __global__ void __launch_bounds__(THREADS) rate_ffma(float *out, int rounds)
{
    float sum[CHAINS];
    for (int i = 0; i < CHAINS; i += 4) {
        normal_four n = random_normals(draw_index(i), 1);
        for (int j = 0; j < 4; j++) sum[i + j] = n.x[j];
    }
    /* |a| < 1, so that nothing grows without bound. */
    float a = 0.999f + 1e-6f * threadIdx.x, b = sum[3];
    for (int round = 0; round < rounds; round++) {
#pragma unroll
        for (int i = 0; i < CHAINS; i++)
            asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(sum[i]) : "f"(a), "f"(b));
    }
    float total = 0;
    for (int i = 0; i < CHAINS; i++) total += sum[i];
    keep(out, total);
}

/* A tile of 32 x 64 a warp: two A of 16 rows, eight B of 8 columns. */
enum { TILES_A = 2, TILES_B = 8 };

FA_DEVICE void mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

FA_DEVICE void mma_tf32(float d[4], const uint32_t a[4], const uint32_t b[2])
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* A normal number in tf32's 19 bits. */
FA_DEVICE uint32_t tf32_bits(float x)
{
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return bits;
}

/* A round: TILES_A * TILES_B products of 16 x 8 x K a warp. */
#define DEFINE_MMA_RATE(name, product, word)                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) name(float *out, int rounds)             \
    {                                                                                              \
        float sum[TILES_A][TILES_B][4] = {{{0}}};                                                  \
        uint32_t a[TILES_A][4], b[TILES_B][2];                                                     \
        _Pragma("unroll") for (int i = 0; i < TILES_A; i++)                                        \
        {                                                                                          \
            normal_four n = random_normals(draw_index(i), 2),                                      \
                        m = random_normals(draw_index(i), 3);                                      \
            _Pragma("unroll") for (int j = 0; j < 4; j++) a[i][j] = word(n.x[j], m.x[j]);          \
        }                                                                                          \
        _Pragma("unroll") for (int i = 0; i < TILES_B; i++)                                        \
        {                                                                                          \
            normal_four n = random_normals(draw_index(i), 4);                                      \
            _Pragma("unroll") for (int j = 0; j < 2; j++) b[i][j] = word(n.x[j], n.x[j + 2]);      \
        }                                                                                          \
        for (int round = 0; round < rounds; round++) {                                             \
            _Pragma("unroll") for (int i = 0; i < TILES_A; i++)                                    \
                _Pragma("unroll") for (int j = 0; j < TILES_B; j++)                                \
                    product(sum[i][j], a[i], b[j]);                                                \
        }                                                                                          \
        float total = 0;                                                                           \
        _Pragma("unroll") for (int i = 0; i < TILES_A * TILES_B * 4; i++) total +=                 \
            sum[i / (4 * TILES_B)][i / 4 % TILES_B][i % 4];                                        \
        keep(out, total);                                                                          \
    }

#define BFLOAT_WORD(x, y) bfloat_pair(x, y)
#define TF32_WORD(x, y) tf32_bits(x)
DEFINE_MMA_RATE(rate_mma_bf16, mma_bf16, BFLOAT_WORD)
DEFINE_MMA_RATE(rate_mma_tf32, mma_tf32, TF32_WORD)

#else /* HOPPER */

/* Two warpgroups with 64 rows each share 256 columns of B; 64 deep: one width of the swizzle. */
enum {
    ROWS = 64,
    COLUMNS = 256,
    DEPTH = 64,
    A_BYTES = ROWS * DEPTH * 2,
    B_BYTES = COLUMNS * DEPTH * 2,
    SWIZZLE_GROUP = 8 * 128,
    STEP = 16 * 2 >> 4 /* 16 columns further on, as a descriptor counts */
};

/* A round: four products of 64 x 256 x 16 a warpgroup. Dynamic shared memory: 2 * A_BYTES + B_BYTES and
 * 1024 to align; what lies where does not matter, for it is all random. */
extern "C" __global__ void __launch_bounds__(THREADS, 1) rate_wgmma_bf16(float *out, int rounds)
{
    extern __shared__ char dynamic[];
    char *shared = dynamic + (1024 - ptx_shared_address(dynamic) % 1024) % 1024;
    for (int i = threadIdx.x; i < (2 * A_BYTES + B_BYTES) / 8; i += THREADS) {
        normal_four n = random_normals((uint64_t)blockIdx.x * 65536 + i, 5);
        ((uint2 *)shared)[i] = make_uint2(bfloat_pair(n.x[0], n.x[1]), bfloat_pair(n.x[2], n.x[3]));
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    uint64_t a = ptx_matrix_descriptor(shared + threadIdx.x / 128 * A_BYTES, SWIZZLE_GROUP, 0);
    uint64_t b = ptx_matrix_descriptor(shared + 2 * A_BYTES, SWIZZLE_GROUP, 0);
    float sum[COLUMNS / 2];
    for (int i = 0; i < COLUMNS / 2; i++) sum[i] = 0;
    ptx_register_fence(sum, COLUMNS / 2);
    for (int round = 0; round < rounds; round++) {
        ptx_wgmma_fence();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++) ptx_wgmma_qk_256(sum, a + k * STEP, b + k * STEP, 1);
        ptx_wgmma_commit();
        ptx_wgmma_wait(1);
    }
    ptx_wgmma_wait(0);
    ptx_register_fence(sum, COLUMNS / 2);
    float total = 0;
    for (int i = 0; i < COLUMNS / 2; i++) total += sum[i];
    if (total == 1.2345e30f) *out = total;
}

#endif
