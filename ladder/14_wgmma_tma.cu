/*
 * Rung 14, wgmma_tma: Hopper's tensor cores and TMA.
 *
 * What changed: a warpgroup (4 warps) multiplies 64 rows at once by wgmma, which reads its operands
 * from shared memory by itself, and runs beside the warps until they wait for the result. One thread
 * tells TMA (TMA) which box of a tensor to fetch; it computes the addresses, swizzles, fills
 * with zeros what lies outside, and counts the bytes on a barrier.
 *
 * Why it should help: mma.sync reaches about 60% of Hopper's tensor cores, and its operands go through
 * registers. wgmma of 64 x 128 x 16 takes 64 cycles and reads 4 KiB of B (and 2 KiB of Q) meanwhile:
 * 64 to 96 bytes of the 128 that shared memory gives a cycle.
 *
 * How: one block is one warpgroup with 64 queries. K and V have one buffer each: K of the next tile
 * loads under softmax and P V, V under the next Q K^T and softmax. Within a block products and softmax
 * alternate; two blocks on each multiprocessor fill each other's gaps.
 *
 * Predicted (bfloat16, d 128): a tile of 64 x 128 takes 1024 cycles of products and, in each of the
 * four schedulers, 512 of exponentials and about 500 of other instructions. Two blocks in perfect
 * alternation would be near the peak; they meet by chance, so 60% of 790: 450 to 500 TFLOP/s.
 * Measured (H200, bf16, d 128, n 16384): 521 TFLOP/s full, 510 causal.
 */
#include "common/x2.cuh"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "rung.h"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif

/* Keys of a tile, so that two blocks fit into 227 KiB of shared memory. */
#ifndef KEYS
#if HEAD_DIM == 256
#define KEYS 64
#else
#define KEYS 128
#endif
#endif

enum {
    ROWS = 64,
    THREADS = 128,
    BLOCKS = HEAD_DIM / 64, /* blocks of 64 columns: the swizzle spans 128 bytes */
    Q_BLOCK = ROWS * 128,   /* bytes of one block of columns */
    KV_BLOCK = KEYS * 128,
    Q_BYTES = BLOCKS * Q_BLOCK,
    KV_BYTES = BLOCKS * KV_BLOCK,
    GROUP = 8 * 128,                             /* eight rows: what the swizzle repeats after */
    SHARED_BYTES = Q_BYTES + 2 * KV_BYTES + 1024 /* room to align to 1024 */
};

enum { Q_FULL, K_FULL, V_FULL, BARRIERS };

typedef struct softmax_state {
    float maximum[2], sum[2]; /* of this thread's two rows; sum: of this thread's columns only */
} softmax_state;

/* One thread issues the loads of a whole tile: `rows` rows from row0 of a head. */
FA_DEVICE void load_tile(char *shared, const rung_map *map, uint64_t *barrier, int block_bytes,
                         int row0, int head)
{
    ptx_mbarrier_arrive_expect(barrier, BLOCKS * block_bytes);
#pragma unroll
    for (int block = 0; block < BLOCKS; block++)
        ptx_tma_load_3d(shared + block * block_bytes, map, barrier, 64 * block, row0, head);
}

/* s = Q K^T, 64 x KEYS. */
FA_DEVICE void multiply_qk(float *s, const char *q, const char *k)
{
    ptx_wgmma_fence();
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++) {
        const int block = step / 4, byte = step % 4 * 32;
        PTX_WGMMA(qk, KEYS)
        (s, ptx_matrix_descriptor(q + block * Q_BLOCK + byte, GROUP, 0),
         ptx_matrix_descriptor(k + block * KV_BLOCK + byte, GROUP, 0), step > 0);
    }
    ptx_wgmma_commit();
    ptx_register_fence(s, KEYS / 2);
}

/* out += P V. */
FA_DEVICE void multiply_pv(float *out, const uint32_t *p, const char *v)
{
    ptx_register_fence(out, HEAD_DIM / 2);
    ptx_wgmma_fence();
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) PTX_WGMMA(pv, HEAD_DIM)
    (out, p + 4 * step, ptx_matrix_descriptor(v + step * 16 * 128, GROUP, KV_BLOCK), 1);
    ptx_wgmma_commit();
    ptx_register_fence(out, HEAD_DIM / 2);
}

/* Keys that a row must not see: behind the last one, or, under causal, behind the row itself. Element
 * 4j + 2r + c of an accumulator is row 8r of the thread, column 8j + c. */
FA_DEVICE void mask_tile(float *s, int row, int key, const rung_problem *p)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int last = p->causal ? min(row + 8 * r, p->n - 1) : p->n - 1;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                if (key + 8 * j + c > last) s[4 * j + 2 * r + c] = -INFINITY;
    }
}

/* Replaces scores by weights 2^(scale * (s - maximum)), rescaling what was summed before. A row's
 * columns lie in four neighbouring lanes. */
FA_DEVICE void softmax_tile(float *s, float *out, softmax_state *state, float scale)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float maximum = state->maximum[r];
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
            maximum = fmaxf(maximum, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffff, maximum, 1));
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffff, maximum, 2));
        const float rescale = ptx_ex2((state->maximum[r] - maximum) * scale);
        const float shift = maximum * scale;
        float sum = state->sum[r] * rescale;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const int i = 4 * j + 2 * r + c;
                s[i] = ptx_ex2(s[i] * scale - shift);
                sum += s[i];
            }
        state->maximum[r] = maximum;
        state->sum[r] = sum;
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 8; j++)
#pragma unroll
            for (int c = 0; c < 2; c++) out[4 * j + 2 * r + c] *= rescale;
    }
}

/* Accumulators of 16 columns, rounded and paired, are exactly an A operand of wgmma. */
FA_DEVICE void pack_weights(uint32_t *p, const float *s)
{
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) p[i] = fa_pack_x2(s[2 * i], s[2 * i + 1]);
}

/* Divides by the sums and writes two rows; pairs of columns may reach into the padding of a row. */
FA_DEVICE void store_rows(const float *out, const softmax_state *state, int head, int row,
                          int column, const rung_problem *p)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = state->sum[r];
        sum += __shfl_xor_sync(0xffffffff, sum, 1);
        sum += __shfl_xor_sync(0xffffffff, sum, 2);
        const float inverse = 1 / sum;
        const int i = row + 8 * r;
        if (i >= p->n) continue;
        uint16_t *to = (uint16_t *)p->out + ((size_t)head * p->n + i) * p->pitch;
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 8; j++) {
            const int c = column + 8 * j;
            if (c < p->d)
                *(uint32_t *)(to + c) =
                    fa_pack_x2(out[4 * j + 2 * r] * inverse, out[4 * j + 2 * r + 1] * inverse);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    wgmma_tma(const rung_problem p, const __grid_constant__ rung_maps maps)
{
    extern __shared__ char raw[];
    __shared__ uint64_t barrier[BARRIERS];
    char *q = raw + (-ptx_shared_address(raw) & 1023), *k = q + Q_BYTES, *v = k + KV_BYTES;
    const int head = blockIdx.z;
    /* Under causal the longest row tiles start first, so that short ones fill the end. */
    const int row0 = (p.causal ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * ROWS;
    const int keys = p.causal ? min(p.n, row0 + ROWS) : p.n;
    const int tiles = (keys + KEYS - 1) / KEYS;
    const int lane = threadIdx.x % 32, row = row0 + threadIdx.x / 32 * 16 + lane / 4;
    const int column = lane % 4 * 2;
    const float scale = p.scale * 1.4426950408889634f; /* exponentials to base 2 */

    if (threadIdx.x == 0) {
        for (int i = 0; i < BARRIERS; i++) ptx_mbarrier_init(&barrier[i], 1);
        ptx_mbarrier_init_fence();
        load_tile(q, &maps.q, &barrier[Q_FULL], Q_BLOCK, row0, head);
        load_tile(k, &maps.k, &barrier[K_FULL], KV_BLOCK, 0, head);
        load_tile(v, &maps.v, &barrier[V_FULL], KV_BLOCK, 0, head);
    }
    __syncthreads();

    float out[HEAD_DIM / 2], s[KEYS / 2];
    uint32_t weights[KEYS / 4];
    softmax_state state = {{-INFINITY, -INFINITY}, {0, 0}};
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) out[i] = 0;
    ptx_mbarrier_wait(&barrier[Q_FULL], 0);

    for (int tile = 0; tile < tiles; tile++) {
        const int parity = tile & 1, key0 = tile * KEYS;
        ptx_mbarrier_wait(&barrier[K_FULL], parity);
        multiply_qk(s, q, k);
        ptx_wgmma_wait(0);
        ptx_register_fence(s, KEYS / 2);
        __syncthreads(); /* every warp is done with K: its buffer may be filled again */
        if (threadIdx.x == 0 && tile + 1 < tiles)
            load_tile(k, &maps.k, &barrier[K_FULL], KV_BLOCK, key0 + KEYS, head);

        if (key0 + KEYS > p.n || (p.causal && key0 + KEYS > row0))
            mask_tile(s, row, key0 + column, &p);
        softmax_tile(s, out, &state, scale);
        pack_weights(weights, s);

        ptx_mbarrier_wait(&barrier[V_FULL], parity);
        multiply_pv(out, weights, v);
        ptx_wgmma_wait(0);
        ptx_register_fence(out, HEAD_DIM / 2);
        __syncthreads();
        if (threadIdx.x == 0 && tile + 1 < tiles)
            load_tile(v, &maps.v, &barrier[V_FULL], KV_BLOCK, key0 + KEYS, head);
    }
    store_rows(out, &state, head, row, column, &p);
}

extern "C" __device__ rung_about rung = {
    .needs_scores = 0,
    .map_rows_q = ROWS,
    .map_rows_kv = KEYS,
    .map_rows_out = 0,
    .steps = 1,
    .step = {{.kernel = "wgmma_tma", .threads = THREADS, .rows = ROWS, .smem_bytes = SHARED_BYTES}},
};
