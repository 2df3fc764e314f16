/*
 * Rung 07, wmma_row_block: rung 05's tensor cores in rung 06's grid.
 *
 * What changed since 05: a block takes 64 rows of one head and is done. The loop over the rows of a
 * head has become blockIdx.x; the rest is the same to the letter.
 *
 *     05: grid (1, 1, heads)                  07: grid (n / 64, 1, heads)
 *         block: rows 0-63, then 64-127, ...      block x: rows 64x to 64x+63
 *
 * Why it should help: one long sequence with few heads fills the card too. With 384 heads there are
 * 3072 short blocks for 132 * 2 slots for blocks instead of 384 long ones: the last wave is short. And the
 * blocks of one head run side by side, so that a tile of k or v which one of them fetched from
 * memory is found in the L2 cache by the others; one block a head comes back to it when 384 other
 * heads have been there.
 *
 * Predicted: 0.9 ms at batch 4, 96 heads, n = 512, d = 128 on one H200, 57 TFLOP/s: rung 05's time
 * less the quarter lost in its second wave. Memory traffic falls from 1.8 to 0.4 GB, 0.1 ms, and no
 * longer counts. What is left is shared memory: a fragment of k or v serves only 16 rows, 5.3 loads
 * and more for each wmma, 0.3 ms if nothing waited; that wmma takes pointers of any kind, so that
 * each of these loads computes a 64-bit address of its own; and the detour of the scores. Rung 08
 * does without wmma.
 * Measured (H200, b4 h96 d128): 46.3 TFLOP/s at n = 16384, 1.28 ms at n = 512.
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
    KEYS = HEAD_DIM > 128 ? 16 : 32, /* two tiles of each kind must fit */
    STAGES = 2,
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
    BLOCKS = HEAD_DIM > 128 ? 1 : 2, /* on a multiprocessor at a time, as registers are given out */
    STAGE_FLOATS = KEYS * (STRIDE_QK + STRIDE_V), /* a tile of k, then one of v */
    SMEM_FLOATS = ROWS * (STRIDE_QK + STRIDE_S) + STAGES * STAGE_FLOATS,
};

static_assert(SMEM_FLOATS * sizeof(float) <= 163 * 1024, "what an A100's block may have");
static_assert(KEYS * FOURS % THREADS == 0, "every thread copies equally many chunks");

/* The block's rows of q into shared memory, rounded to tf32; zeros for what lies outside of q. */
static __device__ void load_q(float *tile, const float *q, int row0, const rung_problem *p)
{
#pragma unroll(UNROLL_LOADS)
    for (int i = threadIdx.x; i < ROWS * FOURS; i += THREADS) {
        const int row = row0 + i / FOURS, c = i % FOURS * 4;
        float4 four = make_float4(0, 0, 0, 0);
        if (row < p->n && c < p->d) four = *(const float4 *)(q + (int64_t)row * p->pitch + c);
        four.x = wmma::__float_to_tf32(four.x);
        four.y = c + 1 < p->d ? wmma::__float_to_tf32(four.y) : 0;
        four.z = c + 2 < p->d ? wmma::__float_to_tf32(four.z) : 0;
        four.w = c + 3 < p->d ? wmma::__float_to_tf32(four.w) : 0;
        *(float4 *)(tile + i / FOURS * STRIDE_QK + c) = four;
    }
}

/* 16 bytes from global to shared memory without waiting; of them only `valid` are read, the rest
 * becomes zeros. */
static __device__ void copy_async(float *to, const float *from, int valid)
{
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
                 "r"(valid)
                 : "memory");
}

/* Closes a group of copies: those that this thread started since the group before. */
static __device__ void copy_group(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* Waits until only the latest group of this thread is still under way. */
static __device__ void wait_for_all_but_one(void)
{
    asm volatile("cp.async.wait_group 1;" ::: "memory");
}

/* Starts copying a tile of keys or values; zeros for what lies outside of the matrix. */
static __device__ void start_tile(float *tile, int stride, const float *matrix, int row0,
                                  const rung_problem *p)
{
#pragma unroll
    for (int i = threadIdx.x; i < KEYS * FOURS; i += THREADS) {
        const int row = row0 + i / FOURS, c = i % FOURS * 4;
        const int inside = row < p->n && c < p->d;
        const float *from = inside ? matrix + (int64_t)row * p->pitch + c : matrix;
        copy_async(tile + i / FOURS * stride + c, from, inside ? min(16, (p->d - c) * 4) : 0);
    }
}

/* Rounds to tf32 exactly the chunks that this thread copied. */
static __device__ void round_tile(float *tile, int stride)
{
#pragma unroll
    for (int i = threadIdx.x; i < KEYS * FOURS; i += THREADS) {
        float4 *four = (float4 *)(tile + i / FOURS * stride + i % FOURS * 4);
        const float4 x = *four;
        *four = make_float4(wmma::__float_to_tf32(x.x), wmma::__float_to_tf32(x.y),
                            wmma::__float_to_tf32(x.z), wmma::__float_to_tf32(x.w));
    }
}

static __device__ void start_stage(float *stage, const float *k, const float *v, int key0,
                                   const rung_problem *p)
{
    start_tile(stage, STRIDE_QK, k, key0, p);
    start_tile(stage + KEYS * STRIDE_QK, STRIDE_V, v, key0, p);
}

static __device__ void round_stage(float *stage)
{
    round_tile(stage, STRIDE_QK);
    round_tile(stage + KEYS * STRIDE_QK, STRIDE_V);
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

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    wmma_row_block(const __grid_constant__ rung_problem p)
{
    extern __shared__ __align__(128) float smem[];
    float *stages = smem, *q_tile = stages + STAGES * STAGE_FLOATS;
    const int warp_row = threadIdx.x / WARP * PIECE; /* of the tile: the warp's first */
    float *warp_q = q_tile + warp_row * STRIDE_QK;
    float *scores = q_tile + ROWS * STRIDE_QK + warp_row * STRIDE_S;

    const int64_t head = (int64_t)blockIdx.z * p.n * p.pitch;
    const float *k = (const float *)p.k + head, *v = (const float *)p.v + head;

    const int row0 = blockIdx.x * ROWS, row = row0 + warp_row + threadIdx.x % WARP / 2;
    const int visible = p.causal ? min(p.n, row + 1) : p.n;
    const int keys = p.causal ? min(p.n, row0 + ROWS) : p.n;
    row_state state = {-INFINITY, 0};
    sums_frag o[PIECES];
#pragma unroll
    for (int j = 0; j < PIECES; j++) wmma::fill_fragment(o[j], 0);

    start_stage(stages, k, v, 0, &p);
    copy_group();
    load_q(q_tile, (const float *)p.q + head, row0, &p);

    for (int key0 = 0, tile = 0; key0 < keys; key0 += KEYS, tile++) {
        float *stage = stages + tile % STAGES * STAGE_FLOATS;
        float *next = stages + (tile + 1) % STAGES * STAGE_FLOATS;
        if (key0 + KEYS < keys) start_stage(next, k, v, key0 + KEYS, &p);
        copy_group(); /* an empty group at the end keeps the count the same */
        wait_for_all_but_one();
        round_stage(stage);
        __syncthreads(); /* everybody's chunks are there and rounded */
        make_scores(scores, warp_q, stage);
        softmax(scores, &state, o, visible - key0, p.scale);
        add_values(o, scores, stage + KEYS * STRIDE_QK);
        __syncthreads(); /* all are done with this stage: the tile after next may come */
    }
    store_output((float *)p.out + head, o, &state, scores, row0 + warp_row, &p);
}

extern "C" __device__ rung_about rung = {
    .steps = 1,
    .step = {{.kernel = "wmma_row_block",
              .threads = THREADS,
              .rows = ROWS,
              .smem_bytes = SMEM_FLOATS * (int)sizeof(float)}},
};
