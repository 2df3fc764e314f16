/*
 * Rung 01, flash_naive: the idea of FlashAttention, and nothing else.
 *
 * What changed: one kernel instead of three, and no n * n array. Keys and values come in tiles of
 * 16 through shared memory; a row keeps three things while the tiles pass by: the largest score so
 * far, m, the sum of weights relative to it, l, and the weighted sum of values, o. When a tile
 * raises the maximum from m to m', what was summed before is made smaller by exp(m - m'):
 *
 *     l = l * exp(m - m') + sum of exp(s - m')
 *     o = o * exp(m - m') + sum of exp(s - m') * v              at the end: out = o / l
 *
 * (The online softmax; FlashAttention is https://arxiv.org/abs/2205.14135.) The layout is the first
 * that comes to mind: one block a head, one thread a row, each thread walks along rows by itself.
 *
 * Why it should help: memory no longer grows with n^2. Not speed, yet: it is several times slower
 * than the reference, whose two products share what they load among 4 x 4 results a thread. Here
 * the 32 lanes of a warp read 32 different rows of q, each element from another line of the cache;
 * each multiplication needs its own load from shared memory; 32 of 128 threads load a tile while
 * the rest wait.
 *
 * Predicted: 12 ms at batch 4, 96 heads, n = 512, d = 128 on one H200. A warp's tile takes, for
 * each of the 128 columns, 32 cycles of the cache for q, 16 loads of k, 16 of v and 2 for o: 66 *
 * 128 = 8.4 thousand cycles of the SM's one path to shared memory and L1. 384 heads of 16 * 32 such
 * tiles on 132 SMs: 12.6 million cycles, 7.2 ms at 1.75 GHz. 384 blocks, two on an SM at a time,
 * make two waves, the second not full; and 8 warps don't hide every wait.
 * Measured (H200, b4 h96 d128): 3.26 TFLOP/s at n = 4096, 16.2 ms at n = 512.
 */
#include "rung.h"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif

#define LOG2_E 1.4426950408889634f

enum {
    ROWS = 128, /* a thread each */
    KEYS = 16,
    SMEM_FLOATS = ROWS * HEAD_DIM + 2 * KEYS * HEAD_DIM,
};

static_assert(2 * KEYS <= ROWS, "a thread loads one row of k or of v");

/* Row `from` of a matrix into row `to` of a tile, zeros where the matrix has ended: a weight of 0
 * times what happens to lie in shared memory could be NaN. */
static __device__ void load_row(float *to, const float *matrix, int from, const rung_problem *p)
{
    for (int c = 0; c < p->d; c++) to[c] = from < p->n ? matrix[(int64_t)from * p->pitch + c] : 0;
}

/* One thread's row: max and sum are m and l above; o lies in shared memory, column c at
 * o[c * ROWS], so that the threads of a warp meet different banks. */
typedef struct row_state {
    float max, sum, *o;
} row_state;

static __device__ void visit_tile(row_state *row, const float *query, const float *k_tile,
                                  const float *v_tile, int visible, const rung_problem *p)
{
    float weight[KEYS] = {};
    for (int c = 0; c < p->d; c++) {
        const float q = query[c];
#pragma unroll
        for (int key = 0; key < KEYS; key++) weight[key] += q * k_tile[key * HEAD_DIM + c];
    }

    float max = row->max;
#pragma unroll
    for (int key = 0; key < KEYS; key++) {
        weight[key] = key < visible ? weight[key] * (p->scale * LOG2_E) : -INFINITY;
        max = fmaxf(max, weight[key]);
    }
    /* The first tile holds key 0, which every row sees: max is finite from then on. */
    const float shrink = exp2f(row->max - max);
    row->max = max;
    row->sum *= shrink;
#pragma unroll
    for (int key = 0; key < KEYS; key++) {
        weight[key] = exp2f(weight[key] - max);
        row->sum += weight[key];
    }

    for (int c = 0; c < p->d; c++) {
        float o = row->o[c * ROWS] * shrink;
#pragma unroll
        for (int key = 0; key < KEYS; key++) o += weight[key] * v_tile[key * HEAD_DIM + c];
        row->o[c * ROWS] = o;
    }
}

extern "C" __global__ void __launch_bounds__(ROWS)
    flash_naive(const __grid_constant__ rung_problem p)
{
    extern __shared__ __align__(16) float smem[];
    float *k_tile = smem, *v_tile = k_tile + KEYS * HEAD_DIM;
    float *o = v_tile + KEYS * HEAD_DIM + threadIdx.x;

    const int64_t head = (int64_t)blockIdx.z * p.n * p.pitch;
    const float *q = (const float *)p.q + head;
    const float *k = (const float *)p.k + head, *v = (const float *)p.v + head;
    float *out = (float *)p.out + head;
    const int thread = threadIdx.x;

    for (int row0 = 0; row0 < p.n; row0 += ROWS) {
        const int row = row0 + thread;
        const int visible = p.causal ? min(p.n, row + 1) : p.n;
        /* Threads beyond the last row come along, on the last row, since barriers need them all. */
        const float *query = q + (int64_t)min(row, p.n - 1) * p.pitch;
        row_state state = {-INFINITY, 0, o};
        for (int c = 0; c < p.d; c++) o[c * ROWS] = 0;

        const int keys = p.causal ? min(p.n, row0 + ROWS) : p.n;
        for (int key0 = 0; key0 < keys; key0 += KEYS) {
            __syncthreads(); /* nobody reads the tile before this one any more */
            if (thread < KEYS) load_row(k_tile + thread * HEAD_DIM, k, key0 + thread, &p);
            else if (thread < 2 * KEYS)
                load_row(v_tile + (thread - KEYS) * HEAD_DIM, v, key0 + thread - KEYS, &p);
            __syncthreads();
            visit_tile(&state, query, k_tile, v_tile, visible - key0, &p);
        }
        if (row < p.n)
            for (int c = 0; c < p.d; c++) out[(int64_t)row * p.pitch + c] = o[c * ROWS] / state.sum;
    }
}

extern "C" __device__ rung_about rung = {
    .steps = 1,
    .step = {{.kernel = "flash_naive",
              .threads = ROWS,
              .smem_bytes = SMEM_FLOATS * (int)sizeof(float)}},
};
