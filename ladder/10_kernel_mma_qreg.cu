/*
 * Rung 10, kernel_mma_qreg: FlashAttention-2's order. Q in registers, and few barriers.
 *
 * What changed since rung 09
 *   - A warp's Q fragments are loaded once and stay in registers (up to d = 128), not read again
 *     for every tile. Q passes through the K tile's buffer; shared memory holds only K and V.
 *   - P never leaves the registers. The accumulator of S and the A fragment of P V differ in where
 *     a lane has its columns: 2t, 2t + 1 in one, t, t + 4 in the other. But the sum over the keys
 *     may be taken in any order: P's columns are used as they lie, and V's rows 2t and 2t + 1 are
 *     loaded where t and t + 4 stood. For these rows the plain swizzle, XOR with row % 8, has no
 *     bank conflicts.
 *   - Without P in shared memory two barriers a tile are enough, where there were three.
 *
 *       accumulator   c0 c1 = keys 2t, 2t + 1 of row g        c2 c3 = the same of row g + 8
 *       A fragment    a0 a2 = k t, t + 4 of row g             a1 a3 = the same of row g + 8
 *       so            a0 = c0, a1 = c2, a2 = c1, a3 = c3;     b0 = V[2t], b1 = V[2t + 1]
 *
 * Why it should help, at d = 128, per warp (16 rows) and tile of 64 keys, 256 mma, in cycles of
 * shared memory at 128 B/cycle:
 *              Q    K    P store and load   V    tiles stored   in all   an mma   bound
 *   rung 09   64  256         32 + 32      256       128          768      3.0     158 TFLOP/s
 *   this       0  256            0         256       128          640      2.5     189 TFLOP/s
 * Registers: 64 of Q, 64 of O, 32 of S, under 255: 8 warps an SM, in two blocks as before.
 * The loads are as in rung 09, 4 bytes at a time: 128 and 128 stores a thread and tile of keys.
 * Predicted: 0.4 of the bound: 75 TFLOP/s at n = 16384.
 * Measured (H200, b4 h96 d128): 52.4 TFLOP/s at n = 16384, 1.13 ms at n = 512.
 */
#include "rung.h"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif

#if HEAD_DIM == 64
enum { KEYS = 64, Q_IN_REGISTERS = 1, BLOCKS_PER_SM = 3 };
#elif HEAD_DIM == 128
enum { KEYS = 64, Q_IN_REGISTERS = 1, BLOCKS_PER_SM = 2 };
#else /* the accumulator fills the registers; Q stays in shared memory */
enum { KEYS = 32, Q_IN_REGISTERS = 0, BLOCKS_PER_SM = 1 };
#endif

enum {
    WARPS = 4,
    THREADS = 32 * WARPS,
    WARP_ROWS = 16,
    ROWS = WARPS * WARP_ROWS,
    D_STEPS = HEAD_DIM / 8,                 /* mma steps along d in Q K^T, and n8 tiles of O */
    KEY_STEPS = KEYS / 8,                   /* n8 tiles of S, and mma steps along the keys in P V */
    Q_STEPS = Q_IN_REGISTERS ? D_STEPS : 1, /* steps whose Q fragments stay */
    BATCH = 16,                             /* loads that a thread has in flight */
    SMEM_BYTES = 4 * HEAD_DIM * (2 * KEYS + (Q_IN_REGISTERS ? 0 : ROWS)),
};
static_assert(KEYS * HEAD_DIM % (BATCH * THREADS) == 0, "tiles are copied in whole batches");
static_assert(!Q_IN_REGISTERS || ROWS <= KEYS, "Q passes through the K tile");
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

typedef struct queries {
    uint32_t at[Q_STEPS][4];
} queries;

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

/* A tile's rows follow each other; within a row the 16-byte chunks are permuted by XOR with the
 * row's last three bits. */
static __device__ inline float *chunk_at(float *tile, int row, int chunk)
{
    return tile + row * HEAD_DIM + 4 * (chunk ^ (row & 7));
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
            chunk_at(tile, row, column / 4)[column % 4] = __uint_as_float(to_tf32(x[i] * scale));
        }
    }
}

/* S = Q K^T. One ldmatrix gives the B fragments of 16 keys and 8 columns. */
static __device__ inline void multiply_keys(scores *s, const queries *q, uint32_t q_address,
                                            uint32_t k_address)
{
#pragma unroll
    for (int i = 0; i < KEY_STEPS * 4; i++) s->at[i / 4][i % 4] = 0;
#pragma unroll
    for (int step = 0; step < D_STEPS; step++) {
        uint32_t fresh[4];
        if (!Q_IN_REGISTERS) load_matrices(fresh, advance(q_address, step));
        const uint32_t *a = Q_IN_REGISTERS ? q->at[step % Q_STEPS] : fresh;
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

/* P as an A fragment, straight from the accumulators. Its columns t and t + 4 are fed with keys 2t
 * and 2t + 1, which is what a lane holds; V's rows are taken in the same order, and the sum over
 * the keys does not care. */
static __device__ inline void to_fragment(uint32_t a[4], const float c[4])
{
    a[0] = to_tf32(c[0]);
    a[1] = to_tf32(c[2]);
    a[2] = to_tf32(c[1]);
    a[3] = to_tf32(c[3]);
}

/* O += P V. A lane's elements of V: rows 2t and 2t + 1, column g of each n8 tile. */
static __device__ inline void multiply_values(output *o, const scores *s, float *v_tile)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++) {
        uint32_t a[4];
        to_fragment(a, s->at[step]);
#pragma unroll
        for (int j = 0; j < D_STEPS; j++) {
            int row = 8 * step + 2 * t, chunk = 2 * j + g / 4;
            float b0 = chunk_at(v_tile, row, chunk)[g % 4],
                  b1 = chunk_at(v_tile, row + 1, chunk)[g % 4];
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
    kernel_mma_qreg(const rung_problem p)
{
    extern __shared__ __align__(1024) float smem[];
    float *k_tile = smem, *v_tile = k_tile + KEYS * HEAD_DIM;
    float *q_tile = Q_IN_REGISTERS ? k_tile : v_tile + KEYS * HEAD_DIM;
    int lane = threadIdx.x % 32;
    int first_row = blockIdx.x * ROWS, warp_row = threadIdx.x / 32 * WARP_ROWS;
    int64_t head = (int64_t)blockIdx.z * p.n * p.pitch;
    const float *k = (const float *)p.k + head, *v = (const float *)p.v + head;
    int keys = p.causal ? min(first_row + ROWS, p.n) : p.n;
    int all_seen = p.causal ? min(first_row + warp_row + 1, p.n) : p.n;

    uint32_t q_address = shared_address(chunk_at(q_tile, warp_row + lane % 16, lane / 16));
    uint32_t k_address = shared_address(chunk_at(k_tile, lane % 8 + lane / 16 * 8, lane / 8 % 2));

    load_tile(q_tile, ROWS, (const float *)p.q + head, first_row, p.scale * LOG2_E, &p);
    __syncthreads();
    queries q;
    if (Q_IN_REGISTERS) {
#pragma unroll
        for (int step = 0; step < Q_STEPS; step++)
            load_matrices(q.at[step], advance(q_address, step));
        __syncthreads(); /* all have their Q; the K tile may be stored over it */
    }

    output o;
#pragma unroll
    for (int i = 0; i < D_STEPS * 4; i++) o.at[i / 4][i % 4] = 0;
    o.max[0] = o.max[1] = LOWEST; /* not -inf: exp2(-inf - LOWEST) is 0 and not NaN */
    o.sum[0] = o.sum[1] = 0;

    for (int first_key = 0; first_key < keys; first_key += KEYS) {
        scores s;
        load_tile(k_tile, KEYS, k, first_key, 1, &p);
        load_tile(v_tile, KEYS, v, first_key, 1, &p);
        __syncthreads(); /* both tiles are complete */
        multiply_keys(&s, &q, q_address, k_address);
        if (first_key + KEYS > all_seen) mask(&s, first_row + warp_row, first_key, &p);
        softmax(&s, &o);
        multiply_values(&o, &s, v_tile);
        __syncthreads(); /* nobody reads these tiles any more */
    }
    store_output(&o, (float *)p.out + head, first_row + warp_row, &p);
}

extern "C" __device__ rung_about rung = {
    .needs_scores = 0,
    .map_rows_q = 0,
    .map_rows_kv = 0,
    .map_rows_out = 0,
    .steps = 1,
    .step = {{.kernel = "kernel_mma_qreg",
              .threads = THREADS,
              .rows = ROWS,
              .columns = 0,
              .persistent = 0,
              .smem_bytes = SMEM_BYTES}},
};
