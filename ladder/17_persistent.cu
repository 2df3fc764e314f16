/*
 * Rung 17, persistent: as many blocks as multiprocessors, each taking one work tile after the other.
 *
 * What changed: a block stays, and goes on to the next work tile (128 queries of a head): every 132nd one,
 * or under causal, where work tiles differ in length, the next that nobody has taken, by an atomic counter.
 * The producer loads the next work tile's first tiles while the consumers finish the last one, and each
 * consumer writes its rows while the other computes. Head follows head, so that the blocks share K and
 * V in L2, and under causal the longest work tiles of a head come first. Accumulators are rescaled only
 * when the maximum of some row of the warp has grown, which gets rare as tiles go by.
 *
 * Why it should help: a new block costs a launch, barriers, descriptors and an empty pipeline, some
 * 2 us. A static order under causal was tried and loses a third: blocks drift apart. Taking
 * them by the counter where all are of one length loses 2%.
 *
 * What was learnt: what differs between warps (consumer, work tile) goes through a shuffle from lane 0, so
 * that the compiler knows it to be the same for a warp and keeps addresses and loop counts in uniform registers. Without,
 * each wgmma waited for its descriptor, and this rung lost 5 to 10% to the one before.
 *
 * Predicted (bfloat16, d 128): a work tile takes 240 us at n = 16384, where 2 us are 1%, and 15 us at 1024,
 * where they are 13%; rescaling that is left out is worth 5%.
 * Measured (H200, bf16, d 128, n 16384): 613 TFLOP/s full, 611 causal.
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
    NO_TASK = -1,    /* the end of the work */
    GROUP = 8 * 128, /* eight rows: what the swizzle repeats after */
    SHARED_BYTES = CONSUMERS * Q_BYTES + STAGES * 2 * KV_BYTES + 1024 /* room to align to 1024 */
};

typedef struct softmax_state {
    float maximum[2], sum[2]; /* of this thread's two rows; sum: of this thread's columns only */
} softmax_state;

/* What the producer and the consumers share. */
typedef struct pipeline {
    char *q, *k, *v;            /* CONSUMERS tiles of q, STAGES tiles of k and of v */
    volatile int *task;         /* for each consumer, the task that its q belongs to */
    uint64_t *q_full, *q_empty; /* one for each consumer */
    uint64_t *k_full, *v_full, *k_empty, *v_empty;
} pipeline;

/* A work tile: 128 queries of a head and the tiles of keys that they see. */
typedef struct work {
    int head, row0, tiles;
} work;

/* Work tile number `task`: head after head, so that the blocks share K and V in L2; within a head the
 * longest come first under causal. */
FA_DEVICE work find_work(const rung_problem *p, int task)
{
    const int row_tiles = (p->n + ROWS - 1) / ROWS, tile = task % row_tiles;
    const int row0 = (p->causal ? row_tiles - 1 - tile : tile) * ROWS;
    const int keys = p->causal ? min(p->n, row0 + ROWS) : p->n;
    const work w = {task / row_tiles, row0, (keys + KEYS - 1) / KEYS};
    return w;
}

/* Tasks taken, and blocks that found none left. The last block leaves the counters as it found them, for
 * the next launch; two launches of this rung must not run at the same time. */
static __device__ unsigned tasks_taken, blocks_finished;

/* The next task that nobody has taken, for work tiles that differ in length (a dynamic schedule). */
FA_DEVICE int take_task(int tasks)
{
    const int task = (int)(gridDim.x + atomicAdd(&tasks_taken, 1));
    if (task < tasks) return task;
    if (atomicAdd(&blocks_finished, 1) == gridDim.x - 1) {
        tasks_taken = 0;
        blocks_finished = 0;
    }
    return NO_TASK;
}

/* The block's task after `task`. Work tiles of one length have a static schedule: the blocks stay in step
 * and share what is in L2. */
FA_DEVICE int next_task(const rung_problem *p, int task, int tasks)
{
    if (p->causal) return take_task(tasks);
    return task < tasks - (int)gridDim.x ? task + (int)gridDim.x : NO_TASK;
}

FA_DEVICE int first_task(const rung_problem *p, int tasks)
{
    const int task = (int)blockIdx.x;
    return task < tasks ? task : next_task(p, task, tasks);
}

/* Stages are used in turn, through all work tiles: the count of tiles so far tells stage and parity. */
FA_DEVICE int stage_of(int count) { return count % STAGES; }
FA_DEVICE int parity_of(int count) { return count / STAGES & 1; }

/* One thread issues the loads of a whole tile: `rows` rows from row0 of a head. */
FA_DEVICE void load_tile(char *shared, const rung_map *map, uint64_t *barrier, int block_bytes,
                         int row0, int head)
{
    ptx_mbarrier_arrive_expect(barrier, BLOCKS * block_bytes);
#pragma unroll
    for (int block = 0; block < BLOCKS; block++)
        ptx_tma_load_3d(shared + block * block_bytes, map, barrier, 64 * block, row0, head);
}

/* s = Q K^T, 64 x KEYS. The statement without instructions hides that q is the same for every tile:
 * the compiler would keep one descriptor a step in registers that it does not have. */
FA_DEVICE void multiply_qk(float *s, const char *q, const char *k)
{
    uint64_t a = ptx_matrix_descriptor(q, GROUP, 0);
    asm volatile("" : "+l"(a));
    ptx_wgmma_fence();
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++) {
        const int block = step / 4, byte = step % 4 * 32;
        PTX_WGMMA(qk, KEYS)
        (s, a + (block * Q_BLOCK + byte) / 16,
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

/* Nothing to do unless a maximum of the warp's rows has grown. */
FA_DEVICE void rescale_rows(float *out, const float *rescale)
{
    if (__all_sync(0xffffffff, rescale[0] == 1 && rescale[1] == 1)) return;
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

/* Tells a consumer its next task, and issues the load of the queries; NO_TASK ends the work. */
FA_DEVICE void hand_over(const pipeline *pipe, const rung_maps *maps, int consumer, int task,
                         const work *w, int parity)
{
    ptx_mbarrier_wait(&pipe->q_empty[consumer], parity);
    pipe->task[consumer] = task;
    if (task == NO_TASK) ptx_mbarrier_arrive(&pipe->q_full[consumer]);
    else
        load_tile(pipe->q + consumer * Q_BYTES, &maps->q, &pipe->q_full[consumer], Q_BLOCK,
                  w->row0 + consumer * WARPGROUP_ROWS, w->head);
}

/* The producer: one thread. A stage is empty when it is first used, so the parity starts at 1. */
FA_DEVICE void produce(const pipeline *pipe, const rung_maps *maps, const rung_problem *p)
{
    const int all = (p->n + ROWS - 1) / ROWS * p->heads;
    int count = 0, q_parity = 1;
    int task = first_task(p, all);
    for (; task != NO_TASK; task = next_task(p, task, all), q_parity ^= 1) {
        const work w = find_work(p, task);
        for (int tile = 0; tile < w.tiles; tile++, count++) {
            const int stage = stage_of(count), parity = parity_of(count) ^ 1;
            ptx_mbarrier_wait(&pipe->k_empty[stage], parity);
            load_tile(pipe->k + stage * KV_BYTES, &maps->k, &pipe->k_full[stage], KV_BLOCK,
                      tile * KEYS, w.head);
            for (int c = 0; c < CONSUMERS && tile == 0; c++)
                hand_over(pipe, maps, c, task, &w, q_parity);
            ptx_mbarrier_wait(&pipe->v_empty[stage], parity);
            load_tile(pipe->v + stage * KV_BYTES, &maps->v, &pipe->v_full[stage], KV_BLOCK,
                      tile * KEYS, w.head);
        }
    }
    for (int c = 0; c < CONSUMERS; c++) hand_over(pipe, maps, c, NO_TASK, NULL, q_parity);
}

/* Lets the compiler know that a value is the same in all lanes. */
FA_DEVICE int warp_uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }

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

/* A consumer warpgroup: 64 queries of each work tile. count: tiles of the work tiles before. */
FA_DEVICE void attend(const pipeline *pipe, const rung_problem *p, const work *w, int consumer,
                      int count)
{
    const consumer_rows rows = find_rows(pipe, p, w, consumer);
    float out[HEAD_DIM / 2], s[KEYS / 2], rescale[2];
    uint32_t weights[KEYS / 4];
    softmax_state state = {{-INFINITY, -INFINITY}, {0, 0}};
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) out[i] = 0;

    ptx_mbarrier_wait(&pipe->k_full[stage_of(count)], parity_of(count));
    multiply_qk(s, rows.q, pipe->k + stage_of(count) * KV_BYTES);
    ptx_wgmma_wait(0);
    ptx_register_fence(s, KEYS / 2);
    release(&pipe->k_empty[stage_of(count)]);
    weigh_tile(s, &state, rescale, p, &rows, 0);
    pack_weights(weights, s);
    ptx_mbarrier_wait(&pipe->v_full[stage_of(count)], parity_of(count));

    for (int tile = 1; tile < w->tiles; tile++) {
        const int k_stage = stage_of(count + tile), v_stage = stage_of(count + tile - 1);
        ptx_mbarrier_wait(&pipe->k_full[k_stage], parity_of(count + tile));
        ping_pong_wait(consumer);
        multiply_qk(s, rows.q, pipe->k + k_stage * KV_BYTES);
        multiply_pv(out, weights, pipe->v + v_stage * KV_BYTES);
        ping_pong_pass(consumer);
        ptx_wgmma_wait(1);
        ptx_register_fence(s, KEYS / 2);
        release(&pipe->k_empty[k_stage]);
        weigh_tile(s, &state, rescale, p, &rows, tile);
        ptx_mbarrier_wait(&pipe->v_full[k_stage], (parity_of(count + tile)) ^ never(&state));
        ptx_wgmma_wait(0);
        ptx_register_fence(out, HEAD_DIM / 2);
        release(&pipe->v_empty[v_stage]);
        rescale_rows(out, rescale);
        pack_weights(weights, s);
    }
    release(&pipe->q_empty[consumer]);
    const int last = count + w->tiles - 1;
    multiply_pv(out, weights, pipe->v + stage_of(last) * KV_BYTES);
    ptx_wgmma_wait(0);
    ptx_register_fence(out, HEAD_DIM / 2);
    release(&pipe->v_empty[stage_of(last)]);
    store_rows(out, &state, w->head, rows.row, rows.column, p);
}

/* Read by the lane alone that will release the queries. */
FA_DEVICE int received_task(const pipeline *pipe, int consumer)
{
    return warp_uniform(threadIdx.x % 32 == 0 ? pipe->task[consumer] : NO_TASK);
}

FA_DEVICE void consume(const pipeline *pipe, const rung_problem *p, int consumer)
{
    int count = 0;
    if (consumer == 1) ping_pong_pass(consumer); /* consumer 0 begins */
    for (int parity = 0;; parity ^= 1) {
        ptx_mbarrier_wait(&pipe->q_full[consumer], parity);
        const int task = received_task(pipe, consumer);
        if (task == NO_TASK) break;
        const work w = find_work(p, task);
        attend(pipe, p, &w, consumer, count);
        count += w.tiles;
    }
    if (consumer == 0) ping_pong_wait(consumer); /* takes the last arrival */
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    persistent(const rung_problem p, const __grid_constant__ rung_maps maps)
{
    extern __shared__ char raw[];
    __shared__ uint64_t q_full[CONSUMERS], q_empty[CONSUMERS];
    __shared__ int task[CONSUMERS];
    __shared__ uint64_t k_full[STAGES], v_full[STAGES], k_empty[STAGES], v_empty[STAGES];
    char *q = raw + (-ptx_shared_address(raw) & 1023), *k = q + CONSUMERS * Q_BYTES;
    const pipeline pipe = {
        q, k, k + STAGES * KV_BYTES, task, q_full, q_empty, k_full, v_full, k_empty, v_empty};
    const int warps = WARPGROUP / 32;

    if (threadIdx.x == 0) {
        for (int c = 0; c < CONSUMERS; c++) {
            ptx_mbarrier_init(&q_full[c], 1);
            ptx_mbarrier_init(&q_empty[c], warps);
        }
        for (int stage = 0; stage < STAGES; stage++) {
            ptx_mbarrier_init(&k_full[stage], 1);
            ptx_mbarrier_init(&v_full[stage], 1);
            ptx_mbarrier_init(&k_empty[stage], CONSUMERS * warps);
            ptx_mbarrier_init(&v_empty[stage], CONSUMERS * warps);
        }
        ptx_mbarrier_init_fence();
    }
    __syncthreads();

    if (threadIdx.x < WARPGROUP) {
        ptx_decrease_registers(40);
        if (threadIdx.x == 0) produce(&pipe, &maps, &p);
    } else {
        ptx_increase_registers(232);
        consume(&pipe, &p, warp_uniform(threadIdx.x / WARPGROUP - 1));
    }
}

extern "C" __device__ rung_about rung = {
    .needs_scores = 0,
    .map_rows_q = WARPGROUP_ROWS,
    .map_rows_kv = KEYS,
    .map_rows_out = 0,
    .steps = 1,
    .step =
        {{.kernel = "persistent", .threads = THREADS, .persistent = 1, .smem_bytes = SHARED_BYTES}},
};
