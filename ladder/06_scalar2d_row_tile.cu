/*
 * Rung 06, scalar2d_row_tile: a block a row tile, so that the grid fills the card. Back to the
 * scalar units, to see what the shape of the work is worth without tensor cores: compare with rung
 * 02.
 *
 * What changed since 02:
 *   1. A block takes one tile of rows and is done; the grid has a block for every tile of every
 *      head. Before, a block walked through all rows of its head: with fewer heads than SMs most of
 *      the card stood idle, and with 384 on 132 SMs the last ones run on a half empty card.
 *   2. A tile has 64 rows and 64 keys, and a thread makes a patch of 4 x 4 scores, then a patch of
 *      4 rows by d / 16 columns of the output.
 *
 *      16 x 16 threads, each       keys x, x+16, x+32, x+48
 *                      rows 4y..4y+3  [ s s s s ] x 4
 *
 * Why it should help: a patch of 4 x 4 uses each number that it loads four times: 8 loads of 16
 * bytes for 64 multiply-adds, where rung 02 needs 2 for 4. And k and v are read once for 64 rows
 * instead of 16, by blocks of the same head that run at the same time and find them in the L2
 * cache.
 *
 * Slower than rung 05 all the same: its products run on tensor cores, 4 times the rate and more.
 *
 * Predicted: 1.9 ms at batch 4, 96 heads, n = 512, d = 128 on one H200. 25.8 G multiply-adds take
 * the scalar units (132 SMs, 128 a cycle, 1.75 GHz) 0.87 ms. Shared memory takes less for them: 12
 * cycles where the multiplications take 16 (scores), 5 where they take 8 (values). So
 * multiplications bound it; barriers, with two blocks of 8 warps on an SM, and softmax cost about
 * half of the rate.
 * Measured (H200, b4 h96 d128): 32.7 TFLOP/s at n = 8192, 1.74 ms at n = 512.
 */
#include "rung.h"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif

#define LOG2_E 1.4426950408889634f

enum {
    SIDE = 16, /* threads along each side of a tile */
    THREADS = SIDE * SIDE,
    PATCH = 4, /* rows, and keys, that a thread scores */
    TILE = SIDE * PATCH,
    FOURS = HEAD_DIM / 4,
    STRIDE = HEAD_DIM + 4,           /* 16 bytes more: neighbouring rows start in different banks */
    WEIGHTS_STRIDE = TILE + 4,       /* the same for the weights */
    GROUPS = FOURS / SIDE,           /* of 4 columns that a thread makes of its rows */
    BLOCKS = HEAD_DIM > 128 ? 1 : 2, /* on a multiprocessor at a time, as registers are given out */
    SMEM_FLOATS = 2 * TILE * STRIDE + TILE * WEIGHTS_STRIDE,
};

static_assert(SMEM_FLOATS * sizeof(float) <= 163 * 1024, "what an A100's block may have");

/* 64 rows of a matrix into shared memory, zeros for what lies outside of it. */
static __device__ void load_tile(float *tile, const float *matrix, int row0, const rung_problem *p)
{
#pragma unroll 2
    for (int i = threadIdx.x; i < TILE * FOURS; i += THREADS) {
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

/* What a thread keeps of its four rows while the keys pass by: the maximum, the same in all 16
 * threads of a row; the sum over the keys that this thread scored; the values of its columns. */
typedef struct patch_state {
    float max[PATCH], sum[PATCH];
    float4 o[PATCH][GROUPS];
} patch_state;

/* scores[i][j] = q row 4y+i times k row x+16j, for the thread's (y, x). */
static __device__ void score_patch(float scores[PATCH][PATCH], const float *q_tile,
                                   const float *k_tile, int y, int x)
{
#pragma unroll 2
    for (int c = 0; c < HEAD_DIM; c += 4) {
        float4 q[PATCH];
#pragma unroll
        for (int i = 0; i < PATCH; i++)
            q[i] = *(const float4 *)(q_tile + (PATCH * y + i) * STRIDE + c);
#pragma unroll
        for (int j = 0; j < PATCH; j++) {
            const float4 k = *(const float4 *)(k_tile + (x + SIDE * j) * STRIDE + c);
#pragma unroll
            for (int i = 0; i < PATCH; i++)
                scores[i][j] += q[i].x * k.x + q[i].y * k.y + q[i].z * k.z + q[i].w * k.w;
        }
    }
}

/* One row of the patch: scores become weights, and the row's state follows the maximum. */
static __device__ void softmax_row(float scores[PATCH], patch_state *state, int i)
{
    float max = state->max[i];
#pragma unroll
    for (int j = 0; j < PATCH; j++) max = fmaxf(max, scores[j]);
        /* The 16 threads of a row are lanes whose numbers differ in the low four bits. */
#pragma unroll
    for (int other = SIDE / 2; other > 0; other /= 2)
        max = fmaxf(max, __shfl_xor_sync(~0u, max, other));

    const float shrink = exp2f(state->max[i] - max);
    state->max[i] = max;
    state->sum[i] *= shrink;
#pragma unroll
    for (int j = 0; j < PATCH; j++) {
        scores[j] = exp2f(scores[j] - max);
        state->sum[i] += scores[j];
    }
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        state->o[i][g].x *= shrink;
        state->o[i][g].y *= shrink;
        state->o[i][g].z *= shrink;
        state->o[i][g].w *= shrink;
    }
}

static __device__ void add_values(patch_state *state, const float *weights, const float *v_tile,
                                  int y, int x)
{
#pragma unroll 2
    for (int key0 = 0; key0 < TILE; key0 += 4) {
        __align__(16) float w[PATCH][4];
#pragma unroll
        for (int i = 0; i < PATCH; i++)
            *(float4 *)w[i] = *(const float4 *)(weights + (PATCH * y + i) * WEIGHTS_STRIDE + key0);
#pragma unroll
        for (int key = 0; key < 4; key++)
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                const int c = (g * SIDE + x) * 4;
                const float4 v = *(const float4 *)(v_tile + (key0 + key) * STRIDE + c);
#pragma unroll
                for (int i = 0; i < PATCH; i++) {
                    state->o[i][g].x += w[i][key] * v.x;
                    state->o[i][g].y += w[i][key] * v.y;
                    state->o[i][g].z += w[i][key] * v.z;
                    state->o[i][g].w += w[i][key] * v.w;
                }
            }
    }
}

static __device__ void store_patch(float *out, patch_state *state, int row0, int x,
                                   const rung_problem *p)
{
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        float sum = state->sum[i];
#pragma unroll
        for (int other = SIDE / 2; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
        if (row0 + i >= p->n) continue; /* the same for all 16 threads; the shuffle is above */
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const int c = (g * SIDE + x) * 4;
            const float4 o = state->o[i][g];
            if (c < p->d) /* a row has room for whole fours */
                *(float4 *)(out + (int64_t)(row0 + i) * p->pitch + c) =
                    make_float4(o.x / sum, o.y / sum, o.z / sum, o.w / sum);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    scalar2d_row_tile(const __grid_constant__ rung_problem p)
{
    extern __shared__ __align__(16) float smem[];
    float *q_tile = smem, *kv_tile = q_tile + TILE * STRIDE, *weights = kv_tile + TILE * STRIDE;

    const int64_t head = (int64_t)blockIdx.z * p.n * p.pitch;
    const float *k = (const float *)p.k + head, *v = (const float *)p.v + head;
    const int y = threadIdx.x / SIDE, x = threadIdx.x % SIDE;
    const int row0 = blockIdx.x * TILE, row = row0 + PATCH * y;
    const int keys = p.causal ? min(p.n, row0 + TILE) : p.n;

    patch_state state = {};
    for (int i = 0; i < PATCH; i++) state.max[i] = -INFINITY;
    load_tile(q_tile, (const float *)p.q + head, row0, &p);

    for (int key0 = 0; key0 < keys; key0 += TILE) {
        load_tile(kv_tile, k, key0, &p);
        __syncthreads();
        float scores[PATCH][PATCH] = {};
        score_patch(scores, q_tile, kv_tile, y, x);
        __syncthreads(); /* all are done with k: v is stored over it */
        load_tile(kv_tile, v, key0, &p);

#pragma unroll
        for (int i = 0; i < PATCH; i++) {
            const int visible = p.causal ? min(p.n, row + i + 1) : p.n;
#pragma unroll
            for (int j = 0; j < PATCH; j++) {
                const int seen = key0 + x + SIDE * j < visible;
                scores[i][j] = seen ? scores[i][j] * (p.scale * LOG2_E) : -INFINITY;
            }
            softmax_row(scores[i], &state, i);
#pragma unroll
            for (int j = 0; j < PATCH; j++)
                weights[(PATCH * y + i) * WEIGHTS_STRIDE + x + SIDE * j] = scores[i][j];
        }
        __syncthreads();
        add_values(&state, weights, kv_tile, y, x);
        __syncthreads(); /* all are done with v */
    }
    store_patch((float *)p.out + head, &state, row, x, &p);
}

extern "C" __device__ rung_about rung = {
    .steps = 1,
    .step = {{.kernel = "scalar2d_row_tile",
              .threads = THREADS,
              .rows = TILE,
              .smem_bytes = SMEM_FLOATS * (int)sizeof(float)}},
};
