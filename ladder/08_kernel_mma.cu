/*
 * Rung 08, kernel_mma: mma.sync by inline PTX, and scores that stay in registers.
 *
 * What changed since rung 07
 *   - wmma hides which lane holds which element, so its accumulators must go through shared memory
 *     for the softmax. mma.sync.m16n8k8 says it (g = lane / 4, t = lane % 4):
 *
 *         A, 16 x 8    a0 = (g, t)     a1 = (g + 8, t)      a2 = (g, t + 4)   a3 = (g + 8, t + 4)
 *         B, 8 x 8     b0 = (t, g)     b1 = (t + 4, g)
 *         C, 16 x 8    c0 = (g, 2t)    c1 = (g, 2t + 1)     c2 = (g + 8, 2t)  c3 = (g + 8, 2t + 1)
 *
 *     A row of C lies in four neighbouring lanes: two shuffles give its maximum. Maximum,
 *     exponential, sum and the rescaling of O happen in registers, and O never leaves them until
 *     the end.
 *   - A warp owns 16 rows and all keys of the tile. Four warps share the K and V tiles.
 *   - Only P still goes through shared memory, to turn from a C into an A fragment. It is laid
 *     where K lay, hence a barrier more: K must be used up by all warps first.
 *   - Q, K, V and P are rounded to tf32 once, when written to shared memory.
 *
 * Why it should help: S and O are no longer written and read again for every tile.
 * What is left: rows are HEAD_DIM floats long, a multiple of 32 banks, so rows of the same column
 * lie in the same bank. Fragments of Q, K and P are read from 8 rows at once, 8 ways in conflict;
 * those of V from 4 rows. At d = 128, per warp and tile of 64 keys, 256 mma, in cycles of shared
 * memory:
 *     Q        16 steps * 4 loads * 8 ways                   512
 *     K        16 steps * 8 tiles * 2 loads * 8 ways        2048
 *     P        32 stores * 8 ways + 8 steps * 4 loads * 8    512
 *     V        8 steps * 16 tiles * 2 loads * 4 ways        1024
 *     K, V     tiles written, a fourth of 512 stores         128
 *   4224 cycles, 16.5 an mma. Bound 2048 flop / 16.5 cycles * 132 SMs * 1.75 GHz = 29 TFLOP/s, a ninth
 *   of what the tensor cores could do. Shared memory: 96 KB, two blocks an SM.
 * Predicted: 24 TFLOP/s at n = 16384.
 * Measured (H200, b4 h96 d128): 26.1 TFLOP/s at n = 8192, 2.26 ms at n = 512.
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

/* c (16 x 8) += a (16 x 8) b (8 x 8), tf32 */
static __device__ inline void mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
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
        for (int i = 0; i < BATCH; i++)
            tile[start + i * THREADS] = __uint_as_float(to_tf32(x[i] * scale));
    }
}

/* The A fragment of 16 rows and 8 columns of a tile. */
static __device__ inline void load_fragment(uint32_t a[4], const float *tile, int stride, int row,
                                            int column)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; i++)
        a[i] = __float_as_uint(tile[(row + g + i % 2 * 8) * stride + column + t + i / 2 * 4]);
}

/* S = Q K^T: the rows of the K tile are the columns of B. */
static __device__ inline void multiply_keys(scores *s, const float *q_tile, const float *k_tile,
                                            int warp_row)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < KEY_STEPS * 4; i++) s->at[i / 4][i % 4] = 0;
#pragma unroll
    for (int step = 0; step < D_STEPS; step++) {
        uint32_t a[4];
        load_fragment(a, q_tile, HEAD_DIM, warp_row, 8 * step);
#pragma unroll
        for (int j = 0; j < KEY_STEPS; j++) {
            const float *b = k_tile + (8 * j + g) * HEAD_DIM + 8 * step + t;
            mma(s->at[j], a, __float_as_uint(b[0]), __float_as_uint(b[4]));
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

/* Lays P down as rows of KEYS floats. */
static __device__ inline void store_weights(float *p_tile, const scores *s, int warp_row)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < KEY_STEPS; j++)
#pragma unroll
        for (int c = 0; c < 4; c++)
            p_tile[(warp_row + g + c / 2 * 8) * KEYS + 8 * j + 2 * t + c % 2] =
                __uint_as_float(to_tf32(s->at[j][c]));
}

/* O += P V */
static __device__ inline void multiply_values(output *o, const float *p_tile, const float *v_tile,
                                              int warp_row)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++) {
        uint32_t a[4];
        load_fragment(a, p_tile, KEYS, warp_row, 8 * step);
#pragma unroll
        for (int j = 0; j < D_STEPS; j++) {
            const float *b = v_tile + (8 * step + t) * HEAD_DIM + 8 * j + g;
            mma(o->at[j], a, __float_as_uint(b[0]), __float_as_uint(b[4 * HEAD_DIM]));
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
    kernel_mma(const rung_problem p)
{
    extern __shared__ __align__(1024) float smem[];
    float *q_tile = smem, *k_tile = q_tile + ROWS * HEAD_DIM, *v_tile = k_tile + KEYS * HEAD_DIM;
    float *p_tile = k_tile;
    int first_row = blockIdx.x * ROWS, warp_row = threadIdx.x / 32 * WARP_ROWS;
    int64_t head = (int64_t)blockIdx.z * p.n * p.pitch;
    const float *k = (const float *)p.k + head, *v = (const float *)p.v + head;
    int keys = p.causal ? min(first_row + ROWS, p.n) : p.n;
    int all_seen = p.causal ? min(first_row + warp_row + 1, p.n) : p.n;

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
        multiply_keys(&s, q_tile, k_tile, warp_row);
        if (first_key + KEYS > all_seen) mask(&s, first_row + warp_row, first_key, &p);
        softmax(&s, &o);
        __syncthreads(); /* nobody reads K any more; P may be stored over it */
        store_weights(p_tile, &s, warp_row);
        __syncwarp(); /* a warp reads only what its own lanes wrote */
        multiply_values(&o, p_tile, v_tile, warp_row);
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
    .step = {{.kernel = "kernel_mma",
              .threads = THREADS,
              .rows = ROWS,
              .columns = 0,
              .persistent = 0,
              .smem_bytes = SMEM_BYTES}},
};
