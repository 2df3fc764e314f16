/*
 * Rung 00, reference: unfused attention, the way the definition reads.
 *
 * Three kernels run one after the other: scores = scale * Q K^T, softmax of every row, values = P
 * V. The two products are ordinary tiled matrix products in float32: a block of 256 threads makes a
 * tile of 64 x 64 results, 4 x 4 of them a thread, from slices in shared memory that all threads
 * share.
 *
 * What is wrong with it: the scores, n * n floats a head, go to memory and come back twice. Memory
 * grows with n^2 (at n = 16384 one head takes 1 GiB), and so does the traffic.
 *
 * Predicted: 2.4 ms at batch 4, 96 heads, n = 512, d = 128 on one H200. 4 * 384 * 512^2 * 128 =
 * 51.5 GFLOP at half of the 60 TFLOP/s of the scalar units: 1.7 ms; and 4 passes (write, read,
 * write, read) over 403 MB of scores at 4.2 TB/s: 0.4 ms, mostly not hidden by the products.
 * Measured (H200, b4 h96 d128): 23.4 TFLOP/s at n = 8192, 2.16 ms at n = 512.
 */
#include "rung.h"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif

#define LOG2_E 1.4426950408889634f

enum {
    THREADS = 256,
    TILE = 64,             /* rows and columns of results a block makes at a time */
    PATCH = 4,             /* rows and columns of them a thread makes */
    ACROSS = TILE / PATCH, /* threads along each side of a tile */
    DEPTH = 16,            /* how much of the summed axis lies in shared memory at a time */
    STRIDE = TILE + 4,     /* of a slice's rows; the 4 spreads them over the banks */
    SOFTMAX_ROWS = 8,      /* a warp each */
};

static_assert(ACROSS * ACROSS == THREADS, "one thread a patch");
static_assert(TILE * DEPTH == 4 * THREADS, "a slice is four floats a thread");
static_assert(SOFTMAX_ROWS * 32 == THREADS, "a warp a row");
static_assert(HEAD_DIM % TILE == 0, "the values come in whole tiles of columns");

/* Slices of both factors, the summed axis first: a thread reads 4 neighbours of either at once. */
typedef struct slices {
    float left[DEPTH][STRIDE], right[DEPTH][STRIDE];
} slices;

/* Four floats of a row of d elements from column c on; zeros outside of the matrix. */
static __device__ float4 load_four(const float *matrix, int pitch, int row, int rows, int c, int d)
{
    if (row >= rows || c >= d) return make_float4(0, 0, 0, 0);
    float4 four = *(const float4 *)(matrix + (int64_t)row * pitch + c);
    if (c + 1 >= d) four.y = 0;
    if (c + 2 >= d) four.z = 0;
    if (c + 3 >= d) four.w = 0;
    return four;
}

static __device__ void store_turned(float slice[DEPTH][STRIDE], int column, int depth, float4 four)
{
    slice[depth][column] = four.x;
    slice[depth + 1][column] = four.y;
    slice[depth + 2][column] = four.z;
    slice[depth + 3][column] = four.w;
}

/* sums += left^T right over one slice, for the thread's patch. */
static __device__ void multiply(float sums[PATCH][PATCH], const slices *s)
{
    const int row = threadIdx.x / ACROSS * PATCH, column = threadIdx.x % ACROSS * PATCH;
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
        const float4 l = *(const float4 *)&s->left[k][row];
        const float4 r = *(const float4 *)&s->right[k][column];
        const float left[PATCH] = {l.x, l.y, l.z, l.w}, right[PATCH] = {r.x, r.y, r.z, r.w};
#pragma unroll
        for (int i = 0; i < PATCH; i++)
#pragma unroll
            for (int j = 0; j < PATCH; j++) sums[i][j] += left[i] * right[j];
    }
}

/* scores[i][j] = scale * sum over c of q[i][c] * k[j][c], one tile a block. */
extern "C" __global__ void __launch_bounds__(THREADS)
    reference_scores(const __grid_constant__ rung_problem p)
{
    __shared__ __align__(16) slices s;
    const int row0 = blockIdx.x * TILE, key0 = blockIdx.y * TILE;
    if (p.causal && key0 > row0) return; /* tiles are square: all of it lies above the diagonal */
    const int64_t head = blockIdx.z;
    const float *q = (const float *)p.q + head * p.n * p.pitch;
    const float *k = (const float *)p.k + head * p.n * p.pitch;
    float *scores = p.scratch + head * p.n * p.n;

    float sums[PATCH][PATCH] = {};
    const int at = threadIdx.x / (DEPTH / 4), depth = threadIdx.x % (DEPTH / 4) * 4;
    for (int c = 0; c < p.d; c += DEPTH) {
        store_turned(s.left, at, depth, load_four(q, p.pitch, row0 + at, p.n, c + depth, p.d));
        store_turned(s.right, at, depth, load_four(k, p.pitch, key0 + at, p.n, c + depth, p.d));
        __syncthreads();
        multiply(sums, &s);
        __syncthreads();
    }
    for (int i = 0; i < PATCH; i++)
        for (int j = 0; j < PATCH; j++) {
            const int row = row0 + threadIdx.x / ACROSS * PATCH + i;
            const int key = key0 + threadIdx.x % ACROSS * PATCH + j;
            if (row < p.n && key < p.n) scores[(int64_t)row * p.n + key] = sums[i][j] * p.scale;
        }
}

/* Each row of scores becomes weights that sum to 1; keys that the row must not see get 0. */
extern "C" __global__ void __launch_bounds__(THREADS)
    reference_softmax(const __grid_constant__ rung_problem p)
{
    const int row = blockIdx.x * SOFTMAX_ROWS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= p.n) return;
    float *scores = p.scratch + ((int64_t)blockIdx.z * p.n + row) * p.n;
    const int visible = p.causal ? row + 1 : p.n;

    /* Each lane keeps the maximum of its keys and their sum relative to it, in one pass. */
    float max = -INFINITY, sum = 0;
    for (int key = lane; key < visible; key += 32) {
        const float score = scores[key] * LOG2_E, old = max;
        max = fmaxf(max, score);
        sum = sum * exp2f(old - max) + exp2f(score - max);
    }
    float row_max = max;
    for (int other = 16; other > 0; other /= 2)
        row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, other));
    sum *= exp2f(max - row_max);
    for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);

    for (int key = lane; key < p.n; key += 32)
        scores[key] = key < visible ? exp2f(scores[key] * LOG2_E - row_max) / sum : 0;
}

/* One tile of columns of the output: a row of weights, then a column of v. */
static __device__ void make_values(const rung_problem *p, slices *s, int row0, int column0)
{
    const int64_t head = blockIdx.z;
    const float *weights = p->scratch + head * p->n * p->n;
    const float *v = (const float *)p->v + head * p->n * p->pitch;
    float *out = (float *)p->out + head * p->n * p->pitch;
    const int keys = p->causal ? min(p->n, row0 + TILE) : p->n;

    float sums[PATCH][PATCH] = {};
    const int high = threadIdx.x / 16, low = threadIdx.x % 16;
    for (int key0 = 0; key0 < keys; key0 += DEPTH) {
        /* Rows of weights start at any multiple of 4 bytes: single floats, 16 keys side by side. */
        for (int i = high; i < TILE; i += THREADS / DEPTH) {
            const int row = row0 + i, key = key0 + low;
            const int inside = row < p->n && key < keys;
            s->left[low][i] = inside ? weights[(int64_t)row * p->n + key] : 0;
        }
        const int c = low * 4;
        *(float4 *)&s->right[high][c] =
            load_four(v, p->pitch, key0 + high, keys, column0 + c, p->d);
        __syncthreads();
        multiply(sums, s);
        __syncthreads();
    }
    for (int i = 0; i < PATCH; i++)
        for (int j = 0; j < PATCH; j++) {
            const int row = row0 + threadIdx.x / ACROSS * PATCH + i;
            const int c = column0 + threadIdx.x % ACROSS * PATCH + j;
            if (row < p->n && c < p->d) out[(int64_t)row * p->pitch + c] = sums[i][j];
        }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    reference_values(const __grid_constant__ rung_problem p)
{
    __shared__ __align__(16) slices s;
    for (int column0 = 0; column0 < p.d; column0 += TILE)
        make_values(&p, &s, blockIdx.x * TILE, column0);
}

extern "C" __device__ rung_about rung = {
    .needs_scores = 1,
    .steps = 3,
    .step = {{.kernel = "reference_scores", .threads = THREADS, .rows = TILE, .columns = TILE},
             {.kernel = "reference_softmax", .threads = THREADS, .rows = SOFTMAX_ROWS},
             {.kernel = "reference_values", .threads = THREADS, .rows = TILE}},
};
