/*
 * Rung 04, block_wmma: several warps share each tile of keys and values.
 *
 * What changed: a block is four warps over 64 rows, 16 each, still one block a head. They load a
 * tile of keys and values together, once, and every warp multiplies its own rows by it. Inside a
 * warp all is as in rung 03; a warp never needs another's scores, so barriers are only about
 * loading:
 *
 *     wait for all warps | load k, v together | wait | scores, softmax, values, each warp alone
 *
 * Why it should help: k and v are read a quarter as often; four times as many warps hide each
 * other's waits, and a tile's loads are spread over 128 threads, 8 of 16 bytes each, all in flight
 * at once.
 *
 * Predicted: 1.4 ms at batch 4, 96 heads, n = 512, d = 128 on one H200. For 64 rows by 32 keys a
 * block makes 256 wmma, which read 1350 cycles of shared memory (a fragment is 4; q or the weights
 * are shared by 2 or 8 wmma), 700 more for loading and softmax, and waits about 1500 cycles for the
 * tile. Two blocks fit on an SM and one computes while the other waits: about 2500 cycles each. 8 *
 * 16 tiles a head, 384 heads on 132 * 2 slots for blocks are two waves: 0.65 million cycles, 0.4 ms, if
 * nothing else stood in the way. But a wmma waits for its fragments, some 40 cycles, and each
 * multiplication for the one before it; two warps on each quarter of an SM hide half of that at
 * best: a third of the rate. Memory: k and v are read 8 times, 1.6 GB, 0.4 ms.
 * Measured (H200, b4 h96 d128): 20.1 TFLOP/s at n = 8192, 2.79 ms at n = 512.
 */
#include <mma.h>

#include "rung.h"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif

#define LOG2_E 1.4426950408889634f

using namespace nvcuda;

typedef wmma::fragment<wmma::matrix_a, 16, 16, 8, wmma::precision::tf32, wmma::row_major> rows_frag;
typedef wmma::fragment<wmma::matrix_b, 16, 16, 8, wmma::precision::tf32, wmma::col_major> keys_frag;
typedef wmma::fragment<wmma::matrix_b, 16, 16, 8, wmma::precision::tf32, wmma::row_major>
    values_frag;
typedef wmma::fragment<wmma::accumulator, 16, 16, 8, float> sums_frag;

enum {
    PIECE = 16, /* rows and columns of a fragment of sums */
    STEP = 8,   /* how much of the summed axis one wmma takes */
    WARP = 32,
    WARPS = 4,
    THREADS = WARPS * WARP,
    ROWS = WARPS * PIECE,
    KEYS = 32,
    FOURS = HEAD_DIM / 4,
    /* How far loops are unrolled: less where the output alone fills half of the registers. */
    UNROLL = HEAD_DIM > 128 ? 1 : 4,
    UNROLL_LOADS = HEAD_DIM > 128 ? 4 : 8,
    PIECES = HEAD_DIM / PIECE, /* of the output */
    /* Strides that spread what one load of a fragment touches over all 32 banks: 8 rows by 4
     * columns for q and k, 4 rows by 8 columns for v. */
    STRIDE_QK = HEAD_DIM + 4,
    STRIDE_V = HEAD_DIM + 8,
    STRIDE_S = KEYS + 4,
    SMEM_FLOATS = (ROWS + KEYS) * STRIDE_QK + KEYS * STRIDE_V + ROWS * STRIDE_S,
};

/* Rows of a matrix into shared memory, rounded to tf32; zeros for what lies outside of it. */
static __device__ void load_tile(float *tile, int stride, int rows, const float *matrix, int row0,
                                 const rung_problem *p)
{
#pragma unroll(UNROLL_LOADS)
    for (int i = threadIdx.x; i < rows * FOURS; i += THREADS) {
        const int row = row0 + i / FOURS, c = i % FOURS * 4;
        float4 four = make_float4(0, 0, 0, 0);
        if (row < p->n && c < p->d) four = *(const float4 *)(matrix + (int64_t)row * p->pitch + c);
        four.x = wmma::__float_to_tf32(four.x);
        four.y = c + 1 < p->d ? wmma::__float_to_tf32(four.y) : 0;
        four.z = c + 2 < p->d ? wmma::__float_to_tf32(four.z) : 0;
        four.w = c + 3 < p->d ? wmma::__float_to_tf32(four.w) : 0;
        *(float4 *)(tile + i / FOURS * stride + c) = four;
    }
}

/* What two lanes know of their row: lane 2r and lane 2r+1 share row r, a half of the keys each. */
typedef struct row_state {
    float max, sum; /* sum: of this lane's keys only */
} row_state;

/* A fragment whose every element is its row's factor, by way of a tile that is free just now. */
static __device__ void spread_factor(sums_frag *spread, float *tile, float factor)
{
    const int row = threadIdx.x % WARP / 2, half = threadIdx.x % 2;
    float4 *to = (float4 *)(tile + row * STRIDE_S + half * (PIECE / 2));
    __syncwarp();
    to[0] = to[1] = make_float4(factor, factor, factor, factor);
    __syncwarp();
    wmma::load_matrix_sync(*spread, tile, STRIDE_S, wmma::mem_row_major);
    __syncwarp();
}

static __device__ void multiply_rows(sums_frag o[PIECES], const sums_frag *factors)
{
#pragma unroll
    for (int j = 0; j < PIECES; j++)
#pragma unroll
        for (int e = 0; e < factors->num_elements; e++) o[j].x[e] *= factors->x[e];
}

/* scores = q k^T, one warp's rows by one tile of keys. */
static __device__ void make_scores(float *scores, const float *q_tile, const float *k_tile)
{
    sums_frag s[KEYS / PIECE];
#pragma unroll
    for (int j = 0; j < KEYS / PIECE; j++) wmma::fill_fragment(s[j], 0);
#pragma unroll(UNROLL)
    for (int c = 0; c < HEAD_DIM; c += STEP) {
        rows_frag q;
        wmma::load_matrix_sync(q, q_tile + c, STRIDE_QK);
#pragma unroll
        for (int j = 0; j < KEYS / PIECE; j++) {
            keys_frag k;
            wmma::load_matrix_sync(k, k_tile + j * PIECE * STRIDE_QK + c, STRIDE_QK);
            wmma::mma_sync(s[j], q, k, s[j]);
        }
    }
#pragma unroll
    for (int j = 0; j < KEYS / PIECE; j++)
        wmma::store_matrix_sync(scores + j * PIECE, s[j], STRIDE_S, wmma::mem_row_major);
    __syncwarp();
}

/* Scores become weights in place; the row's state and its part of the output follow the maximum.
 * visible: how many keys of this tile the lane's row sees, from the first on. */
static __device__ void softmax(float *scores, row_state *row, sums_frag o[PIECES], int visible,
                               float scale)
{
    enum { MINE = KEYS / 2 };
    const int first = threadIdx.x % 2 * MINE;
    float *mine = scores + threadIdx.x % WARP / 2 * STRIDE_S + first;

    __align__(16) float weight[MINE];
    float max = row->max;
#pragma unroll
    for (int i = 0; i < MINE; i += 4) *(float4 *)(weight + i) = *(const float4 *)(mine + i);
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        weight[i] = first + i < visible ? weight[i] * (scale * LOG2_E) : -INFINITY;
        max = fmaxf(max, weight[i]);
    }
    max = fmaxf(max, __shfl_xor_sync(~0u, max, 1));
    /* The first tile holds key 0, which every row sees: max is finite from then on. */
    const float shrink = exp2f(row->max - max);
    row->max = max;
    row->sum *= shrink;
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        weight[i] = wmma::__float_to_tf32(exp2f(weight[i] - max));
        row->sum += weight[i];
    }

    sums_frag factors;
    spread_factor(&factors, scores, shrink); /* the scores are in registers */
    multiply_rows(o, &factors);
#pragma unroll
    for (int i = 0; i < MINE; i += 4) *(float4 *)(mine + i) = *(const float4 *)(weight + i);
    __syncwarp();
}

static __device__ void add_values(sums_frag o[PIECES], const float *weights, const float *v_tile)
{
#pragma unroll(UNROLL)
    for (int key = 0; key < KEYS; key += STEP) {
        rows_frag w;
        wmma::load_matrix_sync(w, weights + key, STRIDE_S);
#pragma unroll
        for (int j = 0; j < PIECES; j++) {
            values_frag v;
            wmma::load_matrix_sync(v, v_tile + key * STRIDE_V + j * PIECE, STRIDE_V);
            wmma::mma_sync(o[j], w, v, o[j]);
        }
    }
}

/* out = o / sum, by way of the tile: only a store knows where a fragment's elements belong. */
static __device__ void store_output(float *out, sums_frag o[PIECES], const row_state *row,
                                    float *tile, int row0, const rung_problem *p)
{
    const float sum = row->sum + __shfl_xor_sync(~0u, row->sum, 1);
    sums_frag factors;
    spread_factor(&factors, tile, 1 / sum);
    multiply_rows(o, &factors);

    const int r = threadIdx.x % WARP / 2, half = threadIdx.x % 2 * (PIECE / 2);
#pragma unroll
    for (int j = 0; j < PIECES; j++) {
        wmma::store_matrix_sync(tile, o[j], STRIDE_S, wmma::mem_row_major);
        __syncwarp();
        for (int i = half; i < half + PIECE / 2; i += 4) {
            const int c = j * PIECE + i;
            if (row0 + r < p->n && c < p->d) /* a row has room for whole fours */
                *(float4 *)(out + (int64_t)(row0 + r) * p->pitch + c) =
                    *(const float4 *)(tile + r * STRIDE_S + i);
        }
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    block_wmma(const __grid_constant__ rung_problem p)
{
    extern __shared__ __align__(128) float smem[];
    float *q_tile = smem, *k_tile = q_tile + ROWS * STRIDE_QK;
    float *v_tile = k_tile + KEYS * STRIDE_QK;
    const int warp_row = threadIdx.x / WARP * PIECE; /* of the tile: the warp's first */
    float *warp_q = q_tile + warp_row * STRIDE_QK;
    float *scores = v_tile + KEYS * STRIDE_V + warp_row * STRIDE_S;

    const int64_t head = (int64_t)blockIdx.z * p.n * p.pitch;
    const float *q = (const float *)p.q + head;
    const float *k = (const float *)p.k + head, *v = (const float *)p.v + head;

    for (int row0 = 0; row0 < p.n; row0 += ROWS) {
        const int row = row0 + warp_row + threadIdx.x % WARP / 2;
        const int visible = p.causal ? min(p.n, row + 1) : p.n;
        row_state state = {-INFINITY, 0};
        sums_frag o[PIECES];
#pragma unroll
        for (int j = 0; j < PIECES; j++) wmma::fill_fragment(o[j], 0);
        __syncthreads(); /* the rows before are done with their q */
        load_tile(q_tile, STRIDE_QK, ROWS, q, row0, &p);

        const int keys = p.causal ? min(p.n, row0 + ROWS) : p.n;
        for (int key0 = 0; key0 < keys; key0 += KEYS) {
            __syncthreads(); /* no warp reads the tile before this one any more */
            load_tile(k_tile, STRIDE_QK, KEYS, k, key0, &p);
            load_tile(v_tile, STRIDE_V, KEYS, v, key0, &p);
            __syncthreads();
            make_scores(scores, warp_q, k_tile);
            softmax(scores, &state, o, visible - key0, p.scale);
            add_values(o, scores, v_tile);
        }
        store_output((float *)p.out + head, o, &state, scores, row0 + warp_row, &p);
    }
}

extern "C" __device__ rung_about rung = {
    .steps = 1,
    .step = {{.kernel = "block_wmma",
              .threads = THREADS,
              .smem_bytes = SMEM_FLOATS * (int)sizeof(float)}},
};
