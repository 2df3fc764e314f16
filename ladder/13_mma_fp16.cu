/*
 * Rung 13, mma_fp16: 16-bit operands. This is FlashAttention-2 as it runs on Ampere.
 *
 * What changed since rung 12
 *   - Q, K, V and out are bfloat16 or float16, as ELEMENT says. Sums, maxima and the scores before
 *     their rounding stay float32.
 *   - mma.m16n8k16 multiplies twice as much as m16n8k8 in the same time, with fragments of the same
 *     size: half the bytes for a product, in shared memory as in L2.
 *   - ldmatrix loads every fragment, with .trans those of V; nothing is rounded on the way. The
 *     accumulators of S lie already as the A fragment wants them, so P is only packed in pairs.
 *   - A tile has 64 keys in the space where 32 were.
 *   - Q cannot carry the scale any more without another rounding: it moves into the exponent's fma.
 *     For a negative scale the signs of Q are flipped, so that the largest score is the largest
 *     weight.
 *   - The output goes through shared memory to be stored in chunks of 16 bytes.
 *
 * Why it should help, at d = 128, per warp (32 rows) and tile of 64 keys: 2 * 8 * 8 * 2 = 256 mma.
 *   shared memory   Q 8 KB, K and V 16 KB each: 40 KB at 128 B/cycle = 320 cycles, 1.25 cycles an mma.
 *                   Bound 4096 flop / 1.25 cycles * 132 SMs * 1.75 GHz = 757 TFLOP/s
 *   tensor cores    about 620 TFLOP/s by mma.sync (the rest of the card's rate is wgmma's), 1.5 cycles
 *   exponentials    32 * 64 a warp and tile at 16 a cycle: 128 cycles beside 390 of products; with 8
 *                   warps an SM, in two blocks, they hide only in part
 *   registers       128 of O, 64 of S (32 once packed), 8 + 4 of fragments: under 255
 *   L2              32 KB of K and V for 128 rows and 64 keys, 4.2 MFLOP: 2.7 TB/s at 350 TFLOP/s
 * Predicted: 55 % of the tensor cores' rate: 340 TFLOP/s at d = 128, n = 16384.
 * Measured (H200, bf16, d 128, n 16384): 334 TFLOP/s full, 305 causal.
 */
#include "common/element.h"
#include "rung.h"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef ELEMENT
#define ELEMENT FA_ELEMENT_BFLOAT16
#endif

#if HEAD_DIM <= 128
enum { WARPS = 4, M_TILES = 2, KEYS = 64, BLOCKS_PER_SM = 2 };
#else /* the accumulator of 16 rows fills the registers */
enum { WARPS = 8, M_TILES = 1, KEYS = 32, BLOCKS_PER_SM = 1 };
#endif

enum {
    THREADS = 32 * WARPS,
    WARP_ROWS = 16 * M_TILES,
    ROWS = WARPS * WARP_ROWS,
    D_STEPS = HEAD_DIM / 16, /* mma steps along d in Q K^T */
    D_TILES = HEAD_DIM / 8,  /* n8 tiles of O */
    KEY_STEPS = KEYS / 16,   /* mma steps along the keys in P V */
    KEY_TILES = KEYS / 8,    /* n8 tiles of S */
    CHUNKS = HEAD_DIM / 8,   /* 16-byte chunks of a row */
    ROW_BYTES = 2 * HEAD_DIM,
    ROWS_A_PASS = THREADS / CHUNKS, /* rows that all threads copy at once, a chunk each */
    SMEM_BYTES = (ROWS + 2 * KEYS) * ROW_BYTES,
};
static_assert(THREADS % CHUNKS == 0 && ROWS % ROWS_A_PASS == 0 && KEYS % ROWS_A_PASS == 0,
              "a thread copies the same columns of every row that it copies");
static_assert(SMEM_BYTES <= 163 * 1024, "Ampere's shared memory");

#define LOG2_E 1.4426950408889634f
#define LOWEST (-3.402823466e38f)
#define SMALLEST 1.175494351e-38f
#define RESCALE_ABOVE 8.0f /* in powers of two; a weight of 2^8 is well inside float16 */

/* S, P and O as mma.sync leaves them. With g = lane / 4 and t = lane % 4, a lane holds of each
 * 16 x 8 tile elements (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1). */
typedef struct scores {
    float at[M_TILES][KEY_TILES][4];
} scores;

typedef struct weights { /* pairs (g, 2t ...) and (g + 8, 2t ...): two tiles make an A fragment */
    uint32_t at[M_TILES][KEY_TILES][2];
} weights;

typedef struct output {
    float at[M_TILES][D_TILES][4];
    float max[M_TILES][2], sum[M_TILES][2]; /* of rows g and g + 8; the sum is this lane's share */
} output;

static __device__ inline float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Rounds two floats to 16 bits; the first comes to lie in the lower half. */
static __device__ inline uint32_t pack(float low, float high)
{
    uint32_t pair;
#if ELEMENT == FA_ELEMENT_BFLOAT16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}

static __device__ inline uint32_t shared_address(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* Starts a copy of 16 bytes, of which only the first `bytes` are read; the others become 0. */
static __device__ inline void copy_async(uint32_t to, const void *from, int bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

/* Waits for the copies that this thread started. Other threads see them after a barrier. */
static __device__ inline void wait_for_copies(void)
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* Four 8 x 8 matrices; lane l passes the address of row l % 8 of matrix l / 8 and gets of each
 * matrix the elements 2t and 2t + 1 of row g. */
static __device__ inline void load_matrices(uint32_t x[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address));
}

/* The same of the transposed matrices: elements 2t and 2t + 1 of column g. */
static __device__ inline void load_matrices_transposed(uint32_t x[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address));
}

#if ELEMENT == FA_ELEMENT_BFLOAT16
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif

/* c (16 x 8) += a (16 x 16) b (16 x 8) */
static __device__ inline void mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm volatile(MMA "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* A tile's rows follow each other; within a row the 16-byte chunks are permuted by XOR with the
 * row's last three bits, so that a chunk of 8 neighbouring rows lies in 8 different groups of banks. */
static __device__ inline uint16_t *chunk_at(uint16_t *tile, int row, int chunk)
{
    return tile + row * HEAD_DIM + 8 * (chunk ^ (row & 7));
}

/* Starts the copy of `rows` rows of one head into a tile. Rows from n on and columns from d on
 * become 0. */
static __device__ inline void load_tile(uint16_t *tile, int rows, const uint16_t *head,
                                        int first_row, const rung_problem *p)
{
    int chunk = threadIdx.x % CHUNKS;
    int columns = min(max(p->d - 8 * chunk, 0), 8);
    int row = threadIdx.x / CHUNKS;
    const uint16_t *from = head + (int64_t)(first_row + row) * p->pitch + 8 * chunk;
#pragma unroll
    for (int pass = 0; pass < rows / ROWS_A_PASS; pass++) {
        int inside = first_row + row < p->n;
        copy_async(shared_address(chunk_at(tile, row, chunk)), from, inside ? 2 * columns : 0);
        row += ROWS_A_PASS;
        from += (int64_t)ROWS_A_PASS * p->pitch;
    }
}

/* Flips the signs in the chunks of Q that this thread itself has copied, so without a barrier. */
static __device__ inline void negate_queries(uint16_t *tile)
{
    int chunk = threadIdx.x % CHUNKS;
    for (int row = threadIdx.x / CHUNKS; row < ROWS; row += ROWS_A_PASS) {
        uint4 *x = (uint4 *)chunk_at(tile, row, chunk);
        uint4 y = *x;
        *x = make_uint4(y.x ^ 0x80008000, y.y ^ 0x80008000, y.z ^ 0x80008000, y.w ^ 0x80008000);
    }
}

/* A chunk's address, moved on by 2 * step chunks. The swizzle stays inside groups of 8 chunks, and
 * these are aligned to their 128 bytes, so the XOR can be done on the address. */
static __device__ inline uint32_t advance(uint32_t address, int step)
{
    return (address ^ (32 * (step % 4))) + 128 * (step / 4);
}

/* S = Q K^T. One ldmatrix gives the A fragment of 16 rows, or the B fragments of 16 keys. */
static __device__ inline void multiply_keys(scores *s, uint32_t q_address, uint32_t k_address)
{
#pragma unroll
    for (int i = 0; i < M_TILES * KEY_TILES * 4; i++)
        s->at[i / 4 / KEY_TILES][i / 4 % KEY_TILES][i % 4] = 0;
#pragma unroll
    for (int step = 0; step < D_STEPS; step++) {
        uint32_t a[M_TILES][4];
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
            load_matrices(a[m], advance(q_address, step) + m * 16 * ROW_BYTES);
#pragma unroll
        for (int pair = 0; pair < KEY_TILES / 2; pair++) {
            uint32_t b[4];
            load_matrices(b, advance(k_address, step) + pair * 16 * ROW_BYTES);
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                mma(s->at[m][2 * pair], a[m], b[0], b[1]);
                mma(s->at[m][2 * pair + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/* Scores of keys that a row does not see. */
static __device__ inline void mask(scores *s, int first_row, int first_key, const rung_problem *p)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            int row = first_row + 16 * m + g + 8 * (c / 2);
            int seen = p->causal ? min(row + 1, p->n) : p->n;
#pragma unroll
            for (int j = 0; j < KEY_TILES; j++)
                if (first_key + 8 * j + 2 * t + c % 2 >= seen) s->at[m][j][c] = -INFINITY;
        }
}

/* The largest of this tile's scores in row g (half 0) or g + 8, the same in all four lanes of the
 * row. */
static __device__ inline float row_max(const scores *s, int m, int half)
{
    float top = s->at[m][0][2 * half];
#pragma unroll
    for (int j = 0; j < KEY_TILES; j++)
        top = fmaxf(top, fmaxf(s->at[m][j][2 * half], s->at[m][j][2 * half + 1]));
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
    return fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
}

/* Makes `top` the maximum of the rows where it has grown too far, and rescales what was summed. */
static __device__ inline void raise_maximum(output *o, const float top[M_TILES][2])
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float old = o->max[m][half];
            float now = top[m][half] > old + RESCALE_ABOVE ? top[m][half] : old;
            float factor = exp2_fast(old - now);
            o->max[m][half] = now;
            o->sum[m][half] *= factor;
#pragma unroll
            for (int j = 0; j < D_TILES; j++) {
                o->at[m][j][2 * half] *= factor;
                o->at[m][j][2 * half + 1] *= factor;
            }
        }
}

/* P = exp2(scale * S - max); the sums grow by it. */
static __device__ inline void softmax(weights *p, const scores *s, output *o, float scale)
{
    float top[M_TILES][2];
    int grown = 0;
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; i++) {
        top[i / 2][i % 2] = row_max(s, i / 2, i % 2) * scale;
        grown |= top[i / 2][i % 2] > o->max[i / 2][i % 2] + RESCALE_ABOVE;
    }
    if (__any_sync(0xffffffff, grown)) raise_maximum(o, top);
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int j = 0; j < KEY_TILES; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float *x = s->at[m][j] + 2 * half;
                float even = exp2_fast(fmaf(x[0], scale, -o->max[m][half]));
                float odd = exp2_fast(fmaf(x[1], scale, -o->max[m][half]));
                o->sum[m][half] += even + odd;
                p->at[m][j][half] = pack(even, odd);
            }
}

/* O += P V. One transposed ldmatrix gives the B fragments of 16 keys and 16 columns. */
static __device__ inline void multiply_values(output *o, const weights *p, uint32_t v_address)
{
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++)
#pragma unroll
        for (int pair = 0; pair < D_TILES / 2; pair++) {
            uint32_t b[4];
            load_matrices_transposed(b, advance(v_address, pair) + step * 16 * ROW_BYTES);
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                const uint32_t *a =
                    p->at[m][2 * step]; /* two tiles of P in a row: four registers */
                mma(o->at[m][2 * pair], a, b[0], b[1]);
                mma(o->at[m][2 * pair + 1], a, b[2], b[3]);
            }
        }
}

/* Divides by the sums and lays this warp's rows down in its own part of the Q tile, which no other
 * warp reads or writes. */
static __device__ inline void stage_output(uint16_t *tile, const output *o)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; i++) {
        int m = i / 2, half = i % 2;
        float sum = o->sum[m][half];
        sum += __shfl_xor_sync(0xffffffff, sum, 1);
        sum += __shfl_xor_sync(0xffffffff, sum, 2);
        float inverse = 1 / sum;
#pragma unroll
        for (int j = 0; j < D_TILES; j++) {
            const float *x = o->at[m][j] + 2 * half;
            uint32_t *to = (uint32_t *)chunk_at(tile, 16 * m + 8 * half + g, j) + t;
            *to = pack(x[0] * inverse, x[1] * inverse);
        }
    }
}

static __device__ inline void store_output(uint16_t *head, uint16_t *tile, int first_row,
                                           const rung_problem *p)
{
    for (int i = threadIdx.x % 32; i < WARP_ROWS * CHUNKS; i += 32) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        uint16_t *to = head + (int64_t)(first_row + row) * p->pitch + 8 * chunk;
        if (first_row + row < p->n && 8 * chunk < p->d)
            *(uint4 *)to = *(const uint4 *)chunk_at(tile, row, chunk);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) mma_fp16(const rung_problem p)
{
    extern __shared__ __align__(1024) uint16_t smem[];
    uint16_t *q_tile = smem, *k_tile = q_tile + ROWS * HEAD_DIM, *v_tile = k_tile + KEYS * HEAD_DIM;
    int lane = threadIdx.x % 32;
    int row_tile = p.causal ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    int first_row = row_tile * ROWS, warp_row = threadIdx.x / 32 * WARP_ROWS;
    int64_t head = (int64_t)blockIdx.z * p.n * p.pitch;
    const uint16_t *k = (const uint16_t *)p.k + head, *v = (const uint16_t *)p.v + head;
    int keys = p.causal ? min(first_row + ROWS, p.n) : p.n;
    float scale = fmaxf(fabsf(p.scale) * LOG2_E, SMALLEST); /* > 0, so that -inf stays -inf */

    uint32_t q_address = shared_address(chunk_at(q_tile, warp_row + lane % 16, lane / 16));
    uint32_t k_address = shared_address(chunk_at(k_tile, lane % 8 + lane / 16 * 8, lane / 8 % 2));
    uint32_t v_address = shared_address(chunk_at(v_tile, lane % 16, lane / 16));

    load_tile(q_tile, ROWS, (const uint16_t *)p.q + head, first_row, &p);
    load_tile(k_tile, KEYS, k, 0, &p);
    if (p.scale < 0) {
        wait_for_copies();
        negate_queries(q_tile);
    }

    output o;
#pragma unroll
    for (int i = 0; i < M_TILES * D_TILES * 4; i++)
        o.at[i / 4 / D_TILES][i / 4 % D_TILES][i % 4] = 0;
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; i++) {
        o.max[i / 2][i % 2] = LOWEST; /* not -inf: exp2(-inf - LOWEST) is 0 and not NaN */
        o.sum[i / 2][i % 2] = 0;
    }

    for (int first_key = 0; first_key < keys; first_key += KEYS) {
        scores s;
        weights w;
        wait_for_copies();
        __syncthreads(); /* K has landed for all; nobody reads the last V tile any more */
        load_tile(v_tile, KEYS, v, first_key, &p);
        multiply_keys(&s, q_address, k_address);
        int all_seen = p.causal ? min(first_row + warp_row + 1, p.n) : p.n;
        if (first_key + KEYS > all_seen) mask(&s, first_row + warp_row, first_key, &p);
        softmax(&w, &s, &o, scale);
        wait_for_copies();
        __syncthreads(); /* V has landed for all; nobody reads this K tile any more */
        if (first_key + KEYS < keys) load_tile(k_tile, KEYS, k, first_key + KEYS, &p);
        multiply_values(&o, &w, v_address);
    }
    stage_output(q_tile + warp_row * HEAD_DIM, &o);
    __syncwarp();
    store_output((uint16_t *)p.out + head, q_tile + warp_row * HEAD_DIM, first_row + warp_row, &p);
}

extern "C" __device__ rung_about rung = {
    .needs_scores = 0,
    .map_rows_q = 0,
    .map_rows_kv = 0,
    .map_rows_out = 0,
    .steps = 1,
    .step = {{.kernel = "mma_fp16",
              .threads = THREADS,
              .rows = ROWS,
              .columns = 0,
              .persistent = 0,
              .smem_bytes = SMEM_BYTES}},
};
