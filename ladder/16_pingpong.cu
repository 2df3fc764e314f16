/*
 * Rung 16, pingpong: softmax under products, twice over.
 *
 * What changed, inside a warpgroup: the product for the next tile's scores is issued before the values of this
 * one are added, and both run while the softmax of the next tile waits only for the scores:
 *     issue S = Q K^T of tile t, issue out += P V of tile t-1, wait for S, softmax, wait for out.
 * Between the warpgroups: they alternate in issuing (ping-pong). A warpgroup waits at a named barrier,
 * issues its two products and lets the other one go on. So the other's products follow in the tensor
 * cores while this one's softmax has the schedulers (FlashAttention-3, section 3.1 and 3.2,
 * arXiv:2407.08608).
 *
 * Why it should help: in rung 15 the two warpgroups overlap by chance, and when both are in softmax the
 * tensor cores stand still.
 *
 * What was learnt: the assembler had moved all exponentials behind the wait for P V, so that nothing
 * ran under it (read the SASS: MUFU.EX2 after WARPGROUP.DEPBAR). See `never` below; it gave 3% at
 * d = 128 and 10% at d = 256.
 *
 * Predicted (bfloat16, d 128): for each pair of 64 x 128 tiles the tensor cores have 2048 cycles of
 * work and a scheduler about 2 x 1000: with neither waiting for the other, 75 to 80% of 790 TFLOP/s,
 * 590 to 630.
 * Measured (H200, bf16, d 128, n 16384): 633 TFLOP/s full, 624 causal.
 */
#include "common/x2.cuh"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "rung.h"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif

/* Keys of a tile: the more, the rarer a row's maximum and sum are carried on. Two stages of K and V and
 * the queries must fit into 227 KiB; scores, weights and outputs into the consumers' registers. */
#ifndef KEYS
#if HEAD_DIM == 256
#define KEYS 80
#elif HEAD_DIM == 128
#define KEYS 176
#else
#define KEYS 192
#endif
#endif

enum {
    CONSUMERS = 2, /* warpgroups that compute */
    WARPGROUP = 128,
    THREADS = (1 + CONSUMERS) * WARPGROUP,
    WARPGROUP_ROWS = 64,
    ROWS = CONSUMERS * WARPGROUP_ROWS,
    STAGES = 2,
    BLOCKS = HEAD_DIM / 64,         /* blocks of 64 columns: the swizzle spans 128 bytes */
    Q_BLOCK = WARPGROUP_ROWS * 128, /* bytes of one block of columns of one warpgroup's queries */
    KV_BLOCK = KEYS * 128,
    Q_BYTES = BLOCKS * Q_BLOCK, /* of one warpgroup */
    KV_BYTES = BLOCKS * KV_BLOCK,
    GROUP = 8 * 128, /* eight rows: what the swizzle repeats after */
    SHARED_BYTES = CONSUMERS * Q_BYTES + STAGES * 2 * KV_BYTES + 1024 /* room to align to 1024 */
};

typedef struct softmax_state {
    float maximum[2], sum[2]; /* of this thread's two rows; sum: of this thread's columns only */
} softmax_state;

/* What the producer and the consumers share. */
typedef struct pipeline {
    char *q, *k, *v; /* CONSUMERS tiles of q, STAGES tiles of k and of v */
    uint64_t *q_full, *k_full, *v_full, *k_empty, *v_empty;
} pipeline;

/* The block's work: 128 queries of a head and the tiles of keys that they see. */
typedef struct work {
    int head, row0, tiles;
} work;

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

/* Replaces scores by weights 2^(scale * (s - maximum)), and says by how much what was summed
 * before must be rescaled. A row's columns lie in four neighbouring lanes. */
FA_DEVICE void softmax_tile(float *s, softmax_state *state, float *rescale, float scale)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float maximum = state->maximum[r];
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
            maximum = fmaxf(maximum, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffff, maximum, 1));
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffff, maximum, 2));
        rescale[r] = ptx_ex2((state->maximum[r] - maximum) * scale);
        const float shift = maximum * scale;
        float sum = state->sum[r] * rescale[r];
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
    }
}

FA_DEVICE void rescale_rows(float *out, const float *rescale)
{
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) out[i] *= rescale[i / 2 % 2];
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

/* The producer: one thread. A stage's first use finds it empty, hence the parity that starts at 1. */
FA_DEVICE void produce(const pipeline *pipe, const rung_maps *maps, const work *w)
{
    for (int c = 0; c < CONSUMERS; c++)
        load_tile(pipe->q + c * Q_BYTES, &maps->q, pipe->q_full, Q_BLOCK,
                  w->row0 + c * WARPGROUP_ROWS, w->head);
    for (int tile = 0; tile < w->tiles; tile++) {
        const int stage = tile % STAGES, parity = tile / STAGES & 1;
        ptx_mbarrier_wait(&pipe->k_empty[stage], parity ^ 1);
        load_tile(pipe->k + stage * KV_BYTES, &maps->k, &pipe->k_full[stage], KV_BLOCK, tile * KEYS,
                  w->head);
        ptx_mbarrier_wait(&pipe->v_empty[stage], parity ^ 1);
        load_tile(pipe->v + stage * KV_BYTES, &maps->v, &pipe->v_full[stage], KV_BLOCK, tile * KEYS,
                  w->head);
    }
}

/* One arrival for each warp. */
FA_DEVICE void release(uint64_t *barrier)
{
    if (threadIdx.x % 32 == 0) ptx_mbarrier_arrive(barrier);
}

/* 0, but the compiler cannot know that. The assembler likes to move exponentials behind the wait for the
 * products beside which they should run. A wait in front of that one, for the V that the next tile needs,
 * depends on their sums, so the exponentials stay in front of both. */
FA_DEVICE int never(const softmax_state *state) { return state->sum[0] < 0 || state->sum[1] < 0; }

/* The consumers alternate in issuing products (ping-pong). Consumer c waits at named barrier 1 + c. */
FA_DEVICE void ping_pong_wait(int consumer)
{
    ptx_named_barrier_sync(1 + consumer, CONSUMERS * WARPGROUP);
}

FA_DEVICE void ping_pong_pass(int consumer)
{
    ptx_named_barrier_arrive(1 + (consumer ^ 1), CONSUMERS * WARPGROUP);
}

/* One consumer warpgroup, and the rows and columns of this thread's registers. */
typedef struct consumer_rows {
    const char *q;
    int consumer, row0, row, column;
    float scale;
} consumer_rows;

FA_DEVICE consumer_rows find_rows(const pipeline *pipe, const rung_problem *p, const work *w,
                                  int consumer)
{
    const int row0 = w->row0 + consumer * WARPGROUP_ROWS, lane = threadIdx.x % 32;
    const consumer_rows rows = {
        pipe->q + consumer * Q_BYTES,
        consumer,
        row0,
        row0 + (int)threadIdx.x % WARPGROUP / 32 * 16 + lane / 4,
        lane % 4 * 2,
        p->scale * 1.4426950408889634f, /* exponentials to base 2 */
    };
    return rows;
}

/* From the scores of a tile to its weights. */
FA_DEVICE void weigh_tile(float *s, softmax_state *state, float *rescale, const rung_problem *p,
                          const consumer_rows *rows, int tile)
{
    const int key0 = tile * KEYS;
    if (key0 + KEYS > p->n || (p->causal && key0 + KEYS > rows->row0))
        mask_tile(s, rows->row, key0 + rows->column, p);
    softmax_tile(s, state, rescale, rows->scale);
}

/* A consumer warpgroup: 64 queries. */
FA_DEVICE void consume(const pipeline *pipe, const rung_problem *p, const work *w, int consumer)
{
    const consumer_rows rows = find_rows(pipe, p, w, consumer);
    float out[HEAD_DIM / 2], s[KEYS / 2], rescale[2];
    uint32_t weights[KEYS / 4];
    softmax_state state = {{-INFINITY, -INFINITY}, {0, 0}};
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) out[i] = 0;
    if (consumer == 1) ping_pong_pass(consumer); /* consumer 0 begins */

    ptx_mbarrier_wait(pipe->q_full, 0);
    ptx_mbarrier_wait(&pipe->k_full[0], 0);
    multiply_qk(s, rows.q, pipe->k);
    ptx_wgmma_wait(0);
    ptx_register_fence(s, KEYS / 2);
    release(&pipe->k_empty[0]);
    weigh_tile(s, &state, rescale, p, &rows, 0);
    pack_weights(weights, s);
    ptx_mbarrier_wait(&pipe->v_full[0], 0);

    for (int tile = 1; tile < w->tiles; tile++) {
        const int k_stage = tile % STAGES, v_stage = (tile - 1) % STAGES;
        ptx_mbarrier_wait(&pipe->k_full[k_stage], tile / STAGES & 1);
        ping_pong_wait(consumer);
        multiply_qk(s, rows.q, pipe->k + k_stage * KV_BYTES);
        multiply_pv(out, weights, pipe->v + v_stage * KV_BYTES);
        ping_pong_pass(consumer);
        ptx_wgmma_wait(1);
        ptx_register_fence(s, KEYS / 2);
        release(&pipe->k_empty[k_stage]);
        weigh_tile(s, &state, rescale, p, &rows, tile);
        ptx_mbarrier_wait(&pipe->v_full[k_stage], (tile / STAGES & 1) ^ never(&state));
        ptx_wgmma_wait(0);
        ptx_register_fence(out, HEAD_DIM / 2);
        release(&pipe->v_empty[v_stage]);
        rescale_rows(out, rescale);
        pack_weights(weights, s);
    }
    const int last = w->tiles - 1;
    multiply_pv(out, weights, pipe->v + last % STAGES * KV_BYTES);
    ptx_wgmma_wait(0);
    ptx_register_fence(out, HEAD_DIM / 2);
    store_rows(out, &state, w->head, rows.row, rows.column, p);
    if (consumer == 0)
        ping_pong_wait(consumer); /* takes the last arrival, which nobody else waits for */
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    pingpong(const rung_problem p, const __grid_constant__ rung_maps maps)
{
    extern __shared__ char raw[];
    __shared__ uint64_t q_full, k_full[STAGES], v_full[STAGES], k_empty[STAGES], v_empty[STAGES];
    char *q = raw + (-ptx_shared_address(raw) & 1023), *k = q + CONSUMERS * Q_BYTES;
    const pipeline pipe = {q, k, k + STAGES * KV_BYTES, &q_full, k_full, v_full, k_empty, v_empty};
    /* Under causal the longest row tiles start first, so that short ones fill the end. */
    const int row0 = (p.causal ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * ROWS;
    const int keys = p.causal ? min(p.n, row0 + ROWS) : p.n;
    const work w = {(int)blockIdx.z, row0, (keys + KEYS - 1) / KEYS};

    if (threadIdx.x == 0) {
        ptx_mbarrier_init(&q_full, CONSUMERS);
        for (int stage = 0; stage < STAGES; stage++) {
            ptx_mbarrier_init(&k_full[stage], 1);
            ptx_mbarrier_init(&v_full[stage], 1);
            ptx_mbarrier_init(&k_empty[stage], CONSUMERS * WARPGROUP / 32);
            ptx_mbarrier_init(&v_empty[stage], CONSUMERS * WARPGROUP / 32);
        }
        ptx_mbarrier_init_fence();
    }
    __syncthreads();

    if (threadIdx.x < WARPGROUP) {
        ptx_decrease_registers(24);
        if (threadIdx.x == 0) produce(&pipe, &maps, &w);
    } else {
        ptx_increase_registers(240);
        consume(&pipe, &p, &w, threadIdx.x / WARPGROUP - 1);
    }
}

extern "C" __device__ rung_about rung = {
    .needs_scores = 0,
    .map_rows_q = WARPGROUP_ROWS,
    .map_rows_kv = KEYS,
    .map_rows_out = 0,
    .steps = 1,
    .step = {{.kernel = "pingpong", .threads = THREADS, .rows = ROWS, .smem_bytes = SHARED_BYTES}},
};
