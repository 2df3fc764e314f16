/*
 * Rung 12, kernel_mma_qreg_async: cp.async loads the next tile under the products.
 *
 * What changed since rung 11
 *   - K and V travel by cp.async, from global to shared memory without passing through registers.
 *     The next V tile flies while Q K^T is computed, the next K tile while P V is: one buffer each
 *     is enough.
 *   - A warp owns 32 rows (two m16 tiles) up to d = 128, so a fragment of K or V that was read once
 *     feeds two mma. The accumulators then fill the registers, and at d = 128 Q is back in shared
 *     memory, read once a tile; at d <= 64 it still lies in registers.
 *   - The accumulator is rescaled only when a row's maximum has grown by more than 2^8. A maximum
 *     that is too small by that factor is as good: it cancels in the division at the end, and
 *     nothing overflows.
 *   - Under causal the row tiles with the most keys start first, so that no long block runs alone.
 *
 * cp.async cannot convert, and mma.sync drops the last 13 bits of a float32. Dropping is a rounding
 * towards zero: it doubles the error and biases it. Each fragment of K and V is therefore rounded
 * after its load, by adding half a unit of the last place that is kept: one integer addition, and
 * for 32 rows a warp one an mma. cvt.rna.tf32 does the same in three instructions, of which one
 * looks for NaN; without it a NaN of all ones passes as zero, any other stays NaN. To round the
 * tile in place would take a fourth of the additions, but a third more of shared memory's traffic,
 * which is the scarcer. Q is scaled and rounded once, in place, by the thread that copied it.
 *
 * Why it should help, at d = 128, per warp and tile of 32 keys: 2 * 4 * 16 * 2 = 256 mma.
 *   shared memory   Q, K and V fragments 16 KB each: 48 KB at 128 B/cycle = 384 cycles, 1.5 cycles an mma
 *                   (rung 11: 2 and, with the stores of the tiles, 2.5). Bound 2048 flop / 1.5 cycles
 *                   * 132 SMs * 1.75 GHz = 315 TFLOP/s
 *   tensor cores    about 250 TFLOP/s for tf32 by mma.sync, 1.8 cycles an mma: now they are the bound
 *   exponentials    32 * 32 a warp and tile at 16 a cycle: 64 cycles of 470
 *   registers       128 of O, 32 of S, 8 + 8 of fragments: under 255, so 8 warps an SM in 2 blocks,
 *                   and the softmax of one block hides under the products of the other
 *   L2              32 KB of K and V for 128 rows and 32 keys, 2.1 MFLOP: 2.2 TB/s at 140 TFLOP/s
 * Predicted: 55 % of the tensor cores' rate, as FlashAttention-2 has it: 140 TFLOP/s at n = 16384.
 * Measured (H200, b4 h96 d128): 192 TFLOP/s at n = 16384, 0.32 ms at n = 512.
 */
#include "rung.h"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif

#if HEAD_DIM == 64
enum { WARPS = 4, M_TILES = 2, KEYS = 64, Q_IN_REGISTERS = 1, BLOCKS_PER_SM = 2 };
#elif HEAD_DIM == 128
enum { WARPS = 4, M_TILES = 2, KEYS = 32, Q_IN_REGISTERS = 0, BLOCKS_PER_SM = 2 };
#else /* the accumulator of 16 rows fills the registers */
enum { WARPS = 8, M_TILES = 1, KEYS = 16, Q_IN_REGISTERS = 0, BLOCKS_PER_SM = 1 };
#endif

enum {
    THREADS = 32 * WARPS,
    WARP_ROWS = 16 * M_TILES,
    ROWS = WARPS * WARP_ROWS,
    D_STEPS = HEAD_DIM / 8,                 /* mma steps along d in Q K^T, and n8 tiles of O */
    KEY_STEPS = KEYS / 8,                   /* n8 tiles of S, and mma steps along the keys in P V */
    Q_STEPS = Q_IN_REGISTERS ? D_STEPS : 1, /* steps whose Q fragments stay */
    CHUNKS = HEAD_DIM / 4,                  /* 16-byte chunks of a row */
    ROW_BYTES = 4 * HEAD_DIM,
    ROWS_A_PASS = THREADS / CHUNKS, /* rows that all threads copy at once, a chunk each */
    SMEM_BYTES = (ROWS + 2 * KEYS) * ROW_BYTES,
};
static_assert(THREADS % CHUNKS == 0 && ROWS % ROWS_A_PASS == 0 && KEYS % ROWS_A_PASS == 0,
              "a thread copies the same columns of every row that it copies");
static_assert(SMEM_BYTES <= 163 * 1024, "Ampere's shared memory");

#define LOG2_E 1.4426950408889634f
#define LOWEST (-3.402823466e38f)
#define RESCALE_ABOVE 8.0f /* in powers of two */

/* S and O as mma.sync leaves them. With g = lane / 4 and t = lane % 4, a lane holds of each 16 x 8
 * tile elements (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1). */
typedef struct scores {
    float at[M_TILES][KEY_STEPS][4];
} scores;

typedef struct output {
    float at[M_TILES][D_STEPS][4];
    float max[M_TILES][2], sum[M_TILES][2]; /* of rows g and g + 8; the sum is this lane's share */
} output;

typedef struct queries {
    uint32_t at[Q_STEPS][M_TILES][4];
} queries;

static __device__ inline float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* To the nearest tf32, once mma.sync has dropped the last 13 bits. */
static __device__ inline uint32_t to_tf32(uint32_t bits) { return bits + 0x1000; }

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
 * row's last three bits, so that a chunk of 8 neighbouring rows lies in 8 different groups of banks. */
static __device__ inline float *chunk_at(float *tile, int row, int chunk)
{
    return tile + row * HEAD_DIM + 4 * (chunk ^ (row & 7));
}

/* Starts the copy of `rows` rows of one head into a tile. Rows from n on and columns from d on
 * become 0. */
static __device__ inline void load_tile(float *tile, int rows, const float *head, int first_row,
                                        const rung_problem *p)
{
    int chunk = threadIdx.x % CHUNKS;
    int columns = min(max(p->d - 4 * chunk, 0), 4);
    int row = threadIdx.x / CHUNKS;
    const float *from = head + (int64_t)(first_row + row) * p->pitch + 4 * chunk;
#pragma unroll
    for (int pass = 0; pass < rows / ROWS_A_PASS; pass++) {
        int inside = first_row + row < p->n;
        copy_async(shared_address(chunk_at(tile, row, chunk)), from, inside ? 4 * columns : 0);
        row += ROWS_A_PASS;
        from += (int64_t)ROWS_A_PASS * p->pitch;
    }
}

static __device__ inline float scaled_tf32(float x, float scale)
{
    return __uint_as_float(to_tf32(__float_as_uint(x * scale)));
}

/* Scales and rounds the chunks of Q that this thread itself has copied: no barrier needed before.
 * The scale of exp2 goes in as well, so that scores are exponents of two. */
static __device__ inline void scale_queries(float *tile, float scale)
{
    int chunk = threadIdx.x % CHUNKS;
    for (int row = threadIdx.x / CHUNKS; row < ROWS; row += ROWS_A_PASS) {
        float4 *x = (float4 *)chunk_at(tile, row, chunk);
        float4 y = *x;
        y.x = scaled_tf32(y.x, scale);
        y.y = scaled_tf32(y.y, scale);
        y.z = scaled_tf32(y.z, scale);
        y.w = scaled_tf32(y.w, scale);
        *x = y;
    }
}

/* A chunk's address, moved on by 2 * step chunks. The swizzle stays inside groups of 8 chunks, and
 * these are aligned to their 128 bytes, so the XOR can be done on the address. */
static __device__ inline uint32_t advance(uint32_t address, int step)
{
    return (address ^ (32 * (step % 4))) + 128 * (step / 4);
}

/* The A fragments of this warp's rows and 8 columns of Q. */
static __device__ inline void load_queries(uint32_t a[M_TILES][4], uint32_t address, int step)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
        load_matrices(a[m], advance(address, step) + m * 16 * ROW_BYTES);
}

/* S = Q K^T. One ldmatrix gives the B fragments of 16 keys and 8 columns. */
static __device__ inline void multiply_keys(scores *s, const queries *q, uint32_t q_address,
                                            uint32_t k_address)
{
#pragma unroll
    for (int i = 0; i < M_TILES * KEY_STEPS * 4; i++)
        s->at[i / 4 / KEY_STEPS][i / 4 % KEY_STEPS][i % 4] = 0;
#pragma unroll
    for (int step = 0; step < D_STEPS; step++) {
        uint32_t fresh[M_TILES][4];
        if (!Q_IN_REGISTERS) load_queries(fresh, q_address, step);
        const uint32_t(*a)[4] = Q_IN_REGISTERS ? q->at[step % Q_STEPS] : fresh;
#pragma unroll
        for (int pair = 0; pair < KEY_STEPS / 2; pair++) {
            uint32_t b[4];
            load_matrices(b, advance(k_address, step) + pair * 16 * ROW_BYTES);
#pragma unroll
            for (int i = 0; i < 4; i++) b[i] = to_tf32(b[i]);
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
            for (int j = 0; j < KEY_STEPS; j++)
                if (first_key + 8 * j + 2 * t + c % 2 >= seen) s->at[m][j][c] = -INFINITY;
        }
}

/* The largest of this tile's scores in row g (half 0) or g + 8, the same in all four lanes of the
 * row. */
static __device__ inline float row_max(const scores *s, int m, int half)
{
    float top = s->at[m][0][2 * half];
#pragma unroll
    for (int j = 0; j < KEY_STEPS; j++)
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
            for (int j = 0; j < D_STEPS; j++) {
                o->at[m][j][2 * half] *= factor;
                o->at[m][j][2 * half + 1] *= factor;
            }
        }
}

/* S becomes P = exp2(S - max); the sums grow by it. */
static __device__ inline void softmax(scores *s, output *o)
{
    float top[M_TILES][2];
    int grown = 0;
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; i++) {
        top[i / 2][i % 2] = row_max(s, i / 2, i % 2);
        grown |= top[i / 2][i % 2] > o->max[i / 2][i % 2] + RESCALE_ABOVE;
    }
    if (__any_sync(0xffffffff, grown)) raise_maximum(o, top);
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int j = 0; j < KEY_STEPS; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                float x = exp2_fast(s->at[m][j][c] - o->max[m][c / 2]);
                o->sum[m][c / 2] += x;
                s->at[m][j][c] = x;
            }
}

/* O += P V. Columns t and t + 4 of the A fragment are fed with keys 2t and 2t + 1, which is how the
 * accumulators hold them; V's rows are taken in the same order. Of V a lane reads 4 columns at
 * once, 4g to 4g + 3 of 32: they are column g of four n8 tiles, whose columns are spread in this
 * way. */
static __device__ inline void multiply_values(output *o, const scores *s, const float *v_even,
                                              const float *v_odd)
{
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++) {
        uint32_t a[M_TILES][4];
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) /* c0, c2, c1, c3 */
                a[m][i] = to_tf32(__float_as_uint(s->at[m][step][i % 2 * 2 + i / 2]));
#pragma unroll
        for (int block = 0; block < HEAD_DIM / 32; block++) {
            int at = step * 8 * HEAD_DIM + block * 32;
            uint4 b0 = *(const uint4 *)(v_even + at), b1 = *(const uint4 *)(v_odd + at);
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                mma(o->at[m][4 * block], a[m], to_tf32(b0.x), to_tf32(b1.x));
                mma(o->at[m][4 * block + 1], a[m], to_tf32(b0.y), to_tf32(b1.y));
                mma(o->at[m][4 * block + 2], a[m], to_tf32(b0.z), to_tf32(b1.z));
                mma(o->at[m][4 * block + 3], a[m], to_tf32(b0.w), to_tf32(b1.w));
            }
        }
    }
}

/* Divides by the sums and stores. Thanks to V's spread columns a lane holds 8 neighbouring ones. */
static __device__ inline void store_output(output *o, float *head, int first_row,
                                           const rung_problem *p)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; i++) {
        int m = i / 2, half = i % 2;
        int row = first_row + 16 * m + 8 * half + g;
        float sum = o->sum[m][half];
        sum += __shfl_xor_sync(0xffffffff, sum, 1);
        sum += __shfl_xor_sync(0xffffffff, sum, 2);
        float inverse = 1 / sum;
        float *to = head + (int64_t)row * p->pitch;
#pragma unroll
        for (int part = 0; part < HEAD_DIM / 16; part++) {
            float(*x)[4] = o->at[m] + part / 2 * 4;
            int c = 2 * half + part % 2, column = 32 * (part / 2) + 8 * t + 4 * (part % 2);
            float4 y = make_float4(x[0][c] * inverse, x[1][c] * inverse, x[2][c] * inverse,
                                   x[3][c] * inverse);
            if (row < p->n && column < p->d) *(float4 *)(to + column) = y;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    kernel_mma_qreg_async(const rung_problem p)
{
    extern __shared__ __align__(1024) float smem[];
    float *q_tile = smem, *k_tile = q_tile + ROWS * HEAD_DIM, *v_tile = k_tile + KEYS * HEAD_DIM;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int row_tile = p.causal ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    int first_row = row_tile * ROWS, warp_row = threadIdx.x / 32 * WARP_ROWS;
    int64_t head = (int64_t)blockIdx.z * p.n * p.pitch;
    const float *k = (const float *)p.k + head, *v = (const float *)p.v + head;
    int keys = p.causal ? min(first_row + ROWS, p.n) : p.n;

    uint32_t q_address = shared_address(chunk_at(q_tile, warp_row + lane % 16, lane / 16));
    uint32_t k_address = shared_address(chunk_at(k_tile, lane % 8 + lane / 16 * 8, lane / 8 % 2));
    const float *v_even = chunk_at(v_tile, 2 * t, g), *v_odd = chunk_at(v_tile, 2 * t + 1, g);

    load_tile(q_tile, ROWS, (const float *)p.q + head, first_row, &p);
    load_tile(k_tile, KEYS, k, 0, &p);
    wait_for_copies();
    scale_queries(q_tile, p.scale * LOG2_E);
    queries q;
    if (Q_IN_REGISTERS) {
        __syncthreads();
#pragma unroll
        for (int step = 0; step < Q_STEPS; step++) load_queries(q.at[step], q_address, step);
    }

    output o;
#pragma unroll
    for (int i = 0; i < M_TILES * D_STEPS * 4; i++)
        o.at[i / 4 / D_STEPS][i / 4 % D_STEPS][i % 4] = 0;
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; i++) {
        o.max[i / 2][i % 2] = LOWEST; /* not -inf: exp2(-inf - LOWEST) is 0 and not NaN */
        o.sum[i / 2][i % 2] = 0;
    }

    for (int first_key = 0; first_key < keys; first_key += KEYS) {
        scores s;
        wait_for_copies();
        __syncthreads(); /* K has landed for all; nobody reads the last V tile any more */
        load_tile(v_tile, KEYS, v, first_key, &p);
        multiply_keys(&s, &q, q_address, k_address);
        int all_seen = p.causal ? min(first_row + warp_row + 1, p.n) : p.n;
        if (first_key + KEYS > all_seen) mask(&s, first_row + warp_row, first_key, &p);
        softmax(&s, &o);
        wait_for_copies();
        __syncthreads(); /* V has landed for all; nobody reads this K tile any more */
        if (first_key + KEYS < keys) load_tile(k_tile, KEYS, k, first_key + KEYS, &p);
        multiply_values(&o, &s, v_even, v_odd);
    }
    store_output(&o, (float *)p.out + head, first_row + warp_row, &p);
}

extern "C" __device__ rung_about rung = {
    .needs_scores = 0,
    .map_rows_q = 0,
    .map_rows_kv = 0,
    .map_rows_out = 0,
    .steps = 1,
    .step = {{.kernel = "kernel_mma_qreg_async",
              .threads = THREADS,
              .rows = ROWS,
              .columns = 0,
              .persistent = 0,
              .smem_bytes = SMEM_BYTES}},
};
