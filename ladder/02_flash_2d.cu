/*
 * Rung 02, flash_2d: a two-dimensional block and coalesced loads.
 *
 * What changed: the block is 16 x 16 threads over a tile of 16 rows by 16 keys. Thread (y, x) makes
 * one score, that of row y and key x, and afterwards every 16th group of 4 columns of row y of the
 * output. All 256 threads load a tile, neighbours taking neighbouring 16 bytes; q is loaded once.
 *
 *             keys x = 0 ... 15                columns  0-3  4-7 ... 60-63, 64-67 ...
 *     row y  [ one score a thread ]  softmax  row y    [x=0  x=1 ...  x=15,   x=0 ... ]
 *
 * Why it should help: a warp's load takes 4 or more whole lines of memory instead of parts of 32;
 * q is read from shared memory at its full rate; loads of 16 bytes bring 4 numbers each. The 16
 * scores of a row sit in 16 neighbouring lanes of one warp: they find their maximum by shuffles,
 * without a barrier.
 *
 * Predicted: 4.5 ms at batch 4, 96 heads, n = 512, d = 128 on one H200. 25.8 G multiply-adds are
 * 6.1 million warp-wide ones on each of 132 SMs, half of them for scores. Four of these need 1 + 2
 * cycles of shared memory (q is the same for half a warp, k is not), eight for the values 1 + 4:
 * 2.3 + 1.9 = 4.2 million cycles, 2.4 ms, while the multiplications alone would take 0.9. Each
 * head's k and v are read 32 times, 6.4 GB of traffic, 1.5 ms; three barriered blocks an SM overlap
 * part of that.
 * Measured (H200, b4 h96 d128): 10.1 TFLOP/s at n = 8192, 5.38 ms at n = 512.
 */
#include "rung.h"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif

#define LOG2_E 1.4426950408889634f

enum {
    SIDE = 16, /* rows, keys and threads along each side of a tile */
    THREADS = SIDE * SIDE,
    FOURS = HEAD_DIM / 4,
    STRIDE = HEAD_DIM + 4, /* 16 bytes more: neighbouring rows start in different banks */
    GROUPS = FOURS / SIDE, /* of 4 columns that a thread makes of its row */
    SMEM_FLOATS = 3 * SIDE * STRIDE,
};

/* 16 rows of a matrix into shared memory, zeros for what lies outside of it. */
static __device__ void load_tile(float *tile, const float *matrix, int row0, const rung_problem *p)
{
#pragma unroll
    for (int i = threadIdx.x; i < SIDE * FOURS; i += THREADS) {
        const int row = row0 + i / FOURS, c = i % FOURS * 4;
        float4 four = make_float4(0, 0, 0, 0);
        if (row < p->n && c < p->d) {
            four = *(const float4 *)(matrix + (int64_t)row * p->pitch + c);
            if (c + 1 >= p->d) four.y = 0;
            if (c + 2 >= p->d) four.z = 0;
            if (c + 3 >= p->d) four.w = 0;
        }
        *(float4 *)(tile + i / FOURS * STRIDE + c) = four;
    }
}

static __device__ float dot_rows(const float *a, const float *b)
{
    float sum = 0;
#pragma unroll 4
    for (int c = 0; c < HEAD_DIM; c += 4) {
        const float4 x = *(const float4 *)(a + c), y = *(const float4 *)(b + c);
        sum += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
    }
    return sum;
}

/* Over the 16 threads of a row: lanes whose numbers differ in the low four bits. */
static __device__ float row_max(float x)
{
    for (int other = SIDE / 2; other > 0; other /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, other));
    return x;
}

static __device__ float row_sum(float x)
{
    for (int other = SIDE / 2; other > 0; other /= 2) x += __shfl_xor_sync(~0u, x, other);
    return x;
}

/* The online softmax of rung 01. max is the row's, the same in its 16 threads; sum is only of the
 * keys that this thread scored; o holds the thread's columns. */
typedef struct row_state {
    float max, sum;
    float4 o[GROUPS];
} row_state;

static __device__ void shrink_values(row_state *row, float by)
{
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        row->o[g].x *= by;
        row->o[g].y *= by;
        row->o[g].z *= by;
        row->o[g].w *= by;
    }
}

static __device__ void add_values(row_state *row, float weight, const float *v_tile, int x)
{
#pragma unroll 4
    for (int key = 0; key < SIDE; key++) {
        const float w = __shfl_sync(~0u, weight, key, SIDE); /* from the thread that scored it */
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const float4 v = *(const float4 *)(v_tile + key * STRIDE + (g * SIDE + x) * 4);
            row->o[g].x += w * v.x;
            row->o[g].y += w * v.y;
            row->o[g].z += w * v.z;
            row->o[g].w += w * v.w;
        }
    }
}

static __device__ void store_row(float *to, row_state *row, int x, int d)
{
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const int c = (g * SIDE + x) * 4;
        if (c < d) *(float4 *)(to + c) = row->o[g]; /* a row has room for whole fours */
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    flash_2d(const __grid_constant__ rung_problem p)
{
    extern __shared__ __align__(16) float smem[];
    float *q_tile = smem, *k_tile = q_tile + SIDE * STRIDE, *v_tile = k_tile + SIDE * STRIDE;

    const int64_t head = (int64_t)blockIdx.z * p.n * p.pitch;
    const float *q = (const float *)p.q + head;
    const float *k = (const float *)p.k + head, *v = (const float *)p.v + head;
    const int y = threadIdx.x / SIDE, x = threadIdx.x % SIDE;

    for (int row0 = 0; row0 < p.n; row0 += SIDE) {
        const int row = row0 + y;
        const int visible = p.causal ? min(p.n, row + 1) : p.n;
        row_state state = {-INFINITY, 0};
        __syncthreads(); /* the rows before are done with their q */
        load_tile(q_tile, q, row0, &p);

        const int keys = p.causal ? min(p.n, row0 + SIDE) : p.n;
        for (int key0 = 0; key0 < keys; key0 += SIDE) {
            __syncthreads(); /* nobody reads the tile before this one any more */
            load_tile(k_tile, k, key0, &p);
            load_tile(v_tile, v, key0, &p);
            __syncthreads();

            float score = dot_rows(q_tile + y * STRIDE, k_tile + x * STRIDE);
            score = key0 + x < visible ? score * (p.scale * LOG2_E) : -INFINITY;
            const float max = fmaxf(state.max, row_max(score));
            const float shrink = exp2f(state.max - max), weight = exp2f(score - max);
            state.max = max;
            state.sum = state.sum * shrink + weight;
            shrink_values(&state, shrink);
            add_values(&state, weight, v_tile, x);
        }
        shrink_values(&state, 1 / row_sum(state.sum));
        if (row < p.n) store_row((float *)p.out + head + (int64_t)row * p.pitch, &state, x, p.d);
    }
}

extern "C" __device__ rung_about rung = {
    .steps = 1,
    .step = {{.kernel = "flash_2d",
              .threads = THREADS,
              .smem_bytes = SMEM_FLOATS * (int)sizeof(float)}},
};
