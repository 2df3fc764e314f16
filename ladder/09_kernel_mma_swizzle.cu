/*
 * Rung 09, kernel_mma_swizzle: swizzled shared memory, no bank conflicts.
 *
 * What changed since rung 08
 *   - The 16-byte chunks of a row are permuted by XOR with f(row): chunk c of a row lies at position
 *     c ^ f(row), with f = 0 2 4 6 1 3 5 7 for rows 0 to 7, and again from row 8 on. Nothing grows,
 *     and no bank is hit twice:
 *         8 rows, same chunk          (Q, K, P fragments)  8 different positions, for f is a
 *                                     permutation
 *         4 rows, 2 chunks c, c + 1   (V fragments, c even; storing P)  f is even for rows 0 to 3
 *                                     and odd for rows 4 to 7: XOR by 0 2 4 6 moves pairs to
 *                                     different pairs, XOR with 1 only swaps within a pair
 *         one row, all chunks         (storing tiles)  a permutation of the row
 *
 *         row 0   0 1 2 3 4 5 6 7        row 4   1 0 3 2 5 4 7 6     positions of chunks 0 to 7,
 *         row 1   2 3 0 1 6 7 4 5        row 5   3 2 1 0 7 6 5 4     a digit stands for 4 banks
 *         row 2   4 5 6 7 0 1 2 3        row 6   5 4 7 6 1 0 3 2
 *         row 3   6 7 4 5 2 3 0 1        row 7   7 6 5 4 3 2 1 0
 *
 *   - ldmatrix reads Q, K and P. It is made for matrices of 8 x 8 16-bit elements, which are also
 *     8 x 4 32-bit ones, and it deals them out just as tf32 fragments want them: four registers an
 *     instruction. V's fragments run along the columns of its tile: 4 bytes at a time.
 *
 * Why it should help, at d = 128, per warp and tile of 64 keys, 256 mma, in cycles of shared
 * memory:
 *              Q     K     P store and load   V     tiles stored   in all   an mma   bound
 *   rung 08   512  2048         512          1024       128         4224     16.5     29 TFLOP/s
 *   this       64   256       32 + 32         256       128          768      3.0    158 TFLOP/s
 * Now the waits between the barriers show: global loads and products never overlap within a block,
 * and each of the three barriers a tile waits for the slowest warp.
 * Predicted: 0.4 of the bound: 60 TFLOP/s at n = 16384.
 * Measured (H200, b4 h96 d128): 48.4 TFLOP/s at n = 16384, 1.28 ms at n = 512.
 */
#include "rung.h"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif

#if HEAD_DIM == 64
enum { KEYS = 64, BLOCKS_PER_SM = 4 };
#elif HEAD_DIM == 128
enum { KEYS = 64, BLOCKS_PER_SM = 2 };
#else /* tiles are large, and the accumulator takes half of the registers */
enum { KEYS = 32, BLOCKS_PER_SM = 1 };
#endif

enum {
    WARPS = 4,
    THREADS = 32 * WARPS,
    WARP_ROWS = 16,
    ROWS = WARPS * WARP_ROWS,
    D_STEPS = HEAD_DIM / 8, /* mma steps along d in Q K^T, and n8 tiles of O */
    KEY_STEPS = KEYS / 8,   /* n8 tiles of S, and mma steps along the keys in P V */
    BATCH = 16,             /* loads that a thread has in flight */
    SMEM_BYTES = 4 * HEAD_DIM * (ROWS + 2 * KEYS),
};
static_assert(KEYS * HEAD_DIM % (BATCH * THREADS) == 0, "tiles are copied in whole batches");
static_assert(ROWS <= HEAD_DIM, "P lies where K lay");
static_assert(SMEM_BYTES <= 163 * 1024, "Ampere's shared memory");

#define LOG2_E 1.4426950408889634f
#define LOWEST (-3.402823466e38f)

/* S and O as mma.sync leaves them. With g = lane / 4 and t = lane % 4, a lane holds of each 16 x 8
 * tile elements (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1). */
typedef struct scores {
    float at[KEY_STEPS][4];
} scores;

typedef struct output {
    float at[D_STEPS][4];
    float max[2], sum[2]; /* of rows g and g + 8; the sum is this lane's share */
} output;

static __device__ inline float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* To the nearest tf32. */
static __device__ inline uint32_t to_tf32(float x)
{
    uint32_t y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

static __device__ inline uint32_t shared_address(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* Four matrices of 8 rows by 16 bytes; lane l passes the address of row l % 8 of matrix l / 8 and
 * gets of each matrix the 4 bytes in row l / 4, column l % 4: its element of a tf32 fragment. */
static __device__ inline void load_matrices(uint32_t x[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address));
}

/* c (16 x 8) += a (16 x 8) b (8 x 8), tf32 */
static __device__ inline void mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Where chunk number `chunk` of a row lies in a tile with rows of `stride` floats. */
static __device__ inline float *chunk_at(float *tile, int stride, int row, int chunk)
{
    int f = row % 4 * 2 + row / 4 % 2;
    return tile + row * stride + 4 * (chunk ^ f);
}

/* A chunk's address, moved on by 2 * step chunks. The swizzle stays inside groups of 8 chunks, and
 * these are aligned to their 128 bytes, so the XOR can be done on the address. */
static __device__ inline uint32_t advance(uint32_t address, int step)
{
    return (address ^ (32 * (step % 4))) + 128 * (step / 4);
}

/* Copies `rows` rows of one head into a tile, scaled and rounded; rows from n on and columns from d
 * on become 0, whatever lies there. Loads are started in batches: one wait pays for all of one. */
static __device__ inline void load_tile(float *tile, int rows, const float *head, int first_row,
                                        float scale, const rung_problem *p)
{
    for (int start = threadIdx.x; start < rows * HEAD_DIM; start += BATCH * THREADS) {
        float x[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            int row = (start + i * THREADS) / HEAD_DIM, column = (start + i * THREADS) % HEAD_DIM;
            int inside = first_row + row < p->n && column < p->d;
            x[i] = inside ? head[(int64_t)(first_row + row) * p->pitch + column] : 0;
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            int row = (start + i * THREADS) / HEAD_DIM, column = (start + i * THREADS) % HEAD_DIM;
            chunk_at(tile, HEAD_DIM, row, column / 4)[column % 4] =
                __uint_as_float(to_tf32(x[i] * scale));
        }
    }
}

/* S = Q K^T. One ldmatrix gives the A fragment, or the B fragments of 16 keys and 8 columns. */
static __device__ inline void multiply_keys(scores *s, uint32_t q_address, uint32_t k_address)
{
#pragma unroll
    for (int i = 0; i < KEY_STEPS * 4; i++) s->at[i / 4][i % 4] = 0;
#pragma unroll
    for (int step = 0; step < D_STEPS; step++) {
        uint32_t a[4];
        load_matrices(a, advance(q_address, step));
#pragma unroll
        for (int pair = 0; pair < KEY_STEPS / 2; pair++) {
            uint32_t b[4];
            load_matrices(b, advance(k_address, step) + pair * 16 * HEAD_DIM * 4);
            mma(s->at[2 * pair], a, b[0], b[1]);
            mma(s->at[2 * pair + 1], a, b[2], b[3]);
        }
    }
}

/* Scores of keys that a row does not see. */
static __device__ inline void mask(scores *s, int first_row, int first_key, const rung_problem *p)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int c = 0; c < 4; c++) {
        int row = first_row + g + 8 * (c / 2);
        int seen = p->causal ? min(row + 1, p->n) : p->n;
#pragma unroll
        for (int j = 0; j < KEY_STEPS; j++)
            if (first_key + 8 * j + 2 * t + c % 2 >= seen) s->at[j][c] = -INFINITY;
    }
}

/* The largest of this tile's scores in row g (half 0) or g + 8, the same in all four lanes of the
 * row. */
static __device__ inline float row_max(const scores *s, int half)
{
    float top = s->at[0][2 * half];
#pragma unroll
    for (int j = 0; j < KEY_STEPS; j++)
        top = fmaxf(top, fmaxf(s->at[j][2 * half], s->at[j][2 * half + 1]));
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
    return fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
}

/* S becomes P = exp2(S - max); what was summed before is rescaled to the new maximum. */
static __device__ inline void softmax(scores *s, output *o)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float top = fmaxf(o->max[half], row_max(s, half));
        float factor = exp2_fast(o->max[half] - top);
        o->max[half] = top;
        o->sum[half] *= factor;
#pragma unroll
        for (int j = 0; j < D_STEPS * 2; j++) o->at[j / 2][2 * half + j % 2] *= factor;
#pragma unroll
        for (int j = 0; j < KEY_STEPS * 2; j++) {
            float x = exp2_fast(s->at[j / 2][2 * half + j % 2] - top);
            o->sum[half] += x;
            s->at[j / 2][2 * half + j % 2] = x;
        }
    }
}

/* Lays P down as rows of KEYS floats, two neighbours at a time. */
static __device__ inline void store_weights(float *p_tile, const scores *s, int warp_row)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < KEY_STEPS * 2; i++) {
        int j = i / 2, half = i % 2, row = warp_row + g + 8 * half;
        const float *c = s->at[j] + 2 * half;
        float2 x = make_float2(__uint_as_float(to_tf32(c[0])), __uint_as_float(to_tf32(c[1])));
        *(float2 *)(chunk_at(p_tile, KEYS, row, 2 * j + t / 2) + t % 2 * 2) = x;
    }
}

/* O += P V. A lane's elements of V: rows t and t + 4, column g of each n8 tile. */
static __device__ inline void multiply_values(output *o, uint32_t p_address, float *v_tile)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++) {
        uint32_t a[4];
        load_matrices(a, advance(p_address, step));
#pragma unroll
        for (int j = 0; j < D_STEPS; j++) {
            int row = 8 * step + t, chunk = 2 * j + g / 4;
            float b0 = chunk_at(v_tile, HEAD_DIM, row, chunk)[g % 4];
            float b1 = chunk_at(v_tile, HEAD_DIM, row + 4, chunk)[g % 4];
            mma(o->at[j], a, __float_as_uint(b0), __float_as_uint(b1));
        }
    }
}

/* Divides by the sums and stores. */
static __device__ inline void store_output(const output *o, float *head, int first_row,
                                           const rung_problem *p)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = first_row + 8 * half + g;
        float sum = o->sum[half];
        sum += __shfl_xor_sync(0xffffffff, sum, 1);
        sum += __shfl_xor_sync(0xffffffff, sum, 2);
        float inverse = 1 / sum;
        float *to = head + (int64_t)row * p->pitch;
#pragma unroll
        for (int j = 0; j < D_STEPS * 2; j++) {
            int column = 8 * (j / 2) + 2 * t + j % 2;
            if (row < p->n && column < p->d) to[column] = o->at[j / 2][2 * half + j % 2] * inverse;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    kernel_mma_swizzle(const rung_problem p)
{
    extern __shared__ __align__(1024) float smem[];
    float *q_tile = smem, *k_tile = q_tile + ROWS * HEAD_DIM, *v_tile = k_tile + KEYS * HEAD_DIM;
    float *p_tile = k_tile;
    int lane = threadIdx.x % 32;
    int first_row = blockIdx.x * ROWS, warp_row = threadIdx.x / 32 * WARP_ROWS;
    int64_t head = (int64_t)blockIdx.z * p.n * p.pitch;
    const float *k = (const float *)p.k + head, *v = (const float *)p.v + head;
    int keys = p.causal ? min(first_row + ROWS, p.n) : p.n;
    int all_seen = p.causal ? min(first_row + warp_row + 1, p.n) : p.n;

    int a_row = warp_row + lane % 16, a_chunk = lane / 16;
    uint32_t q_address = shared_address(chunk_at(q_tile, HEAD_DIM, a_row, a_chunk));
    uint32_t p_address = shared_address(chunk_at(p_tile, KEYS, a_row, a_chunk));
    uint32_t k_address =
        shared_address(chunk_at(k_tile, HEAD_DIM, lane % 8 + lane / 16 * 8, lane / 8 % 2));

    /* With the scale of exp2 in Q, scores are exponents of two. */
    load_tile(q_tile, ROWS, (const float *)p.q + head, first_row, p.scale * LOG2_E, &p);

    output o;
#pragma unroll
    for (int i = 0; i < D_STEPS * 4; i++) o.at[i / 4][i % 4] = 0;
    o.max[0] = o.max[1] = LOWEST; /* not -inf: exp2(-inf - LOWEST) is 0 and not NaN */
    o.sum[0] = o.sum[1] = 0;

    for (int first_key = 0; first_key < keys; first_key += KEYS) {
        scores s;
        load_tile(k_tile, KEYS, k, first_key, 1, &p);
        load_tile(v_tile, KEYS, v, first_key, 1, &p);
        __syncthreads(); /* the tiles are complete */
        multiply_keys(&s, q_address, k_address);
        if (first_key + KEYS > all_seen) mask(&s, first_row + warp_row, first_key, &p);
        softmax(&s, &o);
        __syncthreads(); /* nobody reads K any more; P may be stored over it */
        store_weights(p_tile, &s, warp_row);
        __syncwarp(); /* a warp reads only what its own lanes wrote */
        multiply_values(&o, p_address, v_tile);
        __syncthreads(); /* nobody reads P and V any more */
    }
    store_output(&o, (float *)p.out + head, first_row + warp_row, &p);
}

extern "C" __device__ rung_about rung = {
    .needs_scores = 0,
    .map_rows_q = 0,
    .map_rows_kv = 0,
    .map_rows_out = 0,
    .steps = 1,
    .step = {{.kernel = "kernel_mma_swizzle",
              .threads = THREADS,
              .rows = ROWS,
              .columns = 0,
              .persistent = 0,
              .smem_bytes = SMEM_BYTES}},
};
