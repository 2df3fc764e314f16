/*
 * The warps beside the consumers: one takes tasks; one loads keys, values, and the tiles of queries and of dout; two add
 * the consumers' columns of dQ to those in global memory.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_PRODUCER_CUH
#define FA_KERNELS_BACKWARD_SM90_PRODUCER_CUH

#include "backward_sm90/config.cuh"
#include "backward_sm90/pipeline.cuh"
#include "backward_sm90/work.cuh"
#include "ptx/barrier.cuh"
#include "ptx/semaphore.cuh"
#include "ptx/tma.cuh"

/* A tensor that tiles are loaded from: the indices of its head and of its entry of axis 0 in the map. */
typedef struct tile_source {
    const fa_sm90_map *map;
    int head, block;
} tile_source;

FA_DEVICE tile_source source_of(const fa_sm90_map *map, const fa_sm90_steps *step, int head,
                                int block)
{
    const tile_source from = {map, head * step->head, block * step->block};
    return from;
}

/* The rows of a tile that stay: those in [from, to) of it. */
typedef struct kept_rows {
    int from, to;
} kept_rows;

/* A lane clears every 32nd row. */
FA_DEVICE void clear_rows(char *shared, int rows, const kept_rows *kept)
{
#pragma unroll 1
    for (int row = threadIdx.x % 32; row < rows; row += 32) {
        if (row >= kept->from && row < kept->to) continue;
#pragma unroll
        for (int block = 0; block < BLOCKS; block++)
#pragma unroll
            for (int i = 0; i < 8; i++)
                *(float4 *)(shared + (block * rows + row) * 128 + 16 * i) = make_float4(0, 0, 0, 0);
    }
    ptx_fence_proxy_async();
    __syncwarp();
}

/* Loads a tile of `rows` rows from row `row` on and arrives at `full`, before which the warp clears rows that are not
 * to stay. */
FA_DEVICE void load_tile(const pipeline *pipe, const tile_source *from, char *shared, int rows,
                         int row, uint64_t *full, const kept_rows *kept)
{
    const bool leader = threadIdx.x % 32 == 0, clears = kept->from > 0 || kept->to < rows;
    uint64_t *barrier = clears ? &pipe->state->cleared : full;
    if (leader) {
        ptx_mbarrier_arrive_expect(barrier, BLOCKS * rows * 128);
#pragma unroll
        for (int block = 0; block < BLOCKS; block++)
            ptx_tma_load_4d(shared + block * rows * 128, from->map, barrier, 64 * block, row,
                            from->head, from->block);
    }
    if (!clears) return;
    ptx_mbarrier_wait(barrier, pipe->state->num_cleared & 1);
    clear_rows(shared, rows, kept);
    if (leader) {
        pipe->state->num_cleared++;
        ptx_mbarrier_arrive(full);
    }
    __syncwarp();
}

FA_DEVICE void load_keys(const pipeline *pipe, const block_work *w, const fa_sm90_map *map,
                         const fa_sm90_steps *step, int at, uint64_t *full)
{
    const kept_rows kept = {w->clear_before_key, w->clear_from_key};
    const tile_source from = source_of(map, step, (int)w->keys.head_kv, (int)w->sequence.block_k);
    load_tile(pipe, &from, pipe->buffers + at, KEYS, (int)(w->sequence.start_k + w->keys.first),
              full, &kept);
}

/* A tile of queries or of dout. */
FA_DEVICE void load_queries(const pipeline *pipe, const block_work *w, const tile_cursor *at,
                            const fa_sm90_map *map, const fa_sm90_steps *step, char *shared,
                            uint64_t *full)
{
    const int first = at->tile * QUERIES;
    const kept_rows kept = {w->clear_before_query - first, w->clear_from_query - first};
    const tile_source from =
        source_of(map, step, (int)w->sequence.head + at->head, (int)w->sequence.block_q);
    load_tile(pipe, &from, shared, QUERIES, (int)w->sequence.start_q + first, full, &kept);
}

/* The scheduler takes the next task when the loads of the last tile but one begin: in time for its own loads, and late, for
 * blocks should begin tasks in their order. */
FA_DEVICE void want_task(shared_state *state, const block_work *w, const tile_cursor *at)
{
    const int tile = min(w->from + 1, w->to - 1);
    ptx_mbarrier_arrive_if(&state->work_wanted,
                           threadIdx.x % 32 == 0 && at->tile == tile && at->head == w->heads - 1);
}

/* The tiles of a task. The first queries come before the keys, whose buffers are released last. */
FA_DEVICE void produce_task(const pipeline *pipe, const fa_backward_sm90_params *s,
                            const block_work *w, tile_cursor *at)
{
    shared_state *state = pipe->state;
    for (begin_task(at, w); at->head < w->heads; advance(at, w->from, w->to)) {
        const int stage = stage_of(at->count), parity = parity_of(at->count) ^ 1;
        want_task(state, w, at);
        __syncwarp();
        ptx_mbarrier_wait(&state->q_empty[stage], parity);
        load_queries(pipe, w, at, &s->q, &s->q_step, pipe->buffers + Q_AT + stage * Q_BYTES,
                     &state->q_full[stage]);
        if (is_first(at, w)) {
            ptx_mbarrier_wait(&state->kv_empty, (state->num_filled & 1) ^ 1);
            load_keys(pipe, w, &s->k, &s->k_step, 0, &state->k_full);
            load_keys(pipe, w, &s->v, &s->v_step, V_AT, &state->v_full);
        }
        ptx_mbarrier_wait(&state->dout_empty[stage], parity);
        if (threadIdx.x % 32 == 0) {
            const int64_t number = w->number + at->head * s->q_tiles + at->tile;
            ptx_mbarrier_arrive_expect(&state->dout_full[stage], ROW_BYTES);
            ptx_bulk_load(pipe->buffers + ROWS_AT + stage * ROW_BYTES,
                          (const char *)s->rows + number * ROW_BYTES, &state->dout_full[stage],
                          ROW_BYTES);
        }
        load_queries(pipe, w, at, &s->dout, &s->dout_step,
                     pipe->buffers + DOUT_AT + stage * Q_BYTES, &state->dout_full[stage]);
    }
}

/* The warp that loads. */
FA_DEVICE void produce(const pipeline *pipe, const fa_backward_sm90_params *s)
{
    shared_state *state = pipe->state;
    tile_cursor at = {0, 0, 0};
    for (;;) {
        const int number = state->num_tasks;
        const block_work *w = acquire_work(pipe, number);
        if (!w->heads) return;
        if (w->tiles > 0) produce_task(pipe, s, w, &at);
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            state->num_tasks++;
            if (w->tiles > 0) state->num_filled++;
            else ptx_mbarrier_arrive(&state->work_wanted);
            release_work(pipe, number, true);
        }
        __syncwarp();
    }
}

/* The scheduler warp, one lane of it: loads descriptions of tasks. The block's first one is that of its number, the others
 * come from a counter, as tasks may be of any length. Where sums have one order, a task waits for those before it; then a task
 * must not belong to a block that may not have started, and the first one comes from the counter, too. */
FA_DEVICE void schedule(const pipeline *pipe, const fa_backward_sm90_params *s)
{
    shared_state *state = pipe->state;
    const int64_t given = s->semaphores ? 0 : gridDim.x; /* tasks that are not the counter's */
    int64_t task = s->semaphores ? atomicInc(s->next_task, UINT32_MAX) : blockIdx.x;
    for (int number = 0;; number++) {
        const int entry = number & 1;
        ptx_mbarrier_wait(&state->work_empty[entry], (number >> 1 & 1) ^ 1);
        if (task >= s->key_tasks) {
            work_entry(pipe, number)->heads = 0;
            ptx_mbarrier_arrive(&state->work_full[entry]);
            return;
        }
        ptx_mbarrier_arrive_expect(&state->work_full[entry], FA_BACKWARD_SM90_WORK_BYTES);
        ptx_bulk_load(work_entry(pipe, number),
                      (const char *)s->work + task * FA_BACKWARD_SM90_WORK_BYTES,
                      &state->work_full[entry], FA_BACKWARD_SM90_WORK_BYTES);
        ptx_mbarrier_wait(&state->work_wanted, number & 1);
        task = given + atomicInc(s->next_task, UINT32_MAX);
    }
}

/* The dQ of a task's tiles. The consumer stores a tile's dQ one tile later; what comes first is none. stores: of the
 * consumer so far.
 *
 * Where sums have one order, a key tile is added when all before it have been. Their tasks have lower numbers: blocks took them
 * earlier, work on theirs in ascending order, and so never wait for each other in a circle. An addition is complete, and visible
 * to this thread, after ptx_bulk_wait; the semaphore makes it visible to the thread that comes next, and the fence to its
 * copies. */
FA_DEVICE void store_task(const pipeline *pipe, const fa_backward_params *p,
                          const fa_backward_sm90_params *s, const block_work *w, int consumer,
                          int *stores)
{
    shared_state *state = pipe->state;
    const char *from = pipe->buffers + DQ_AT + consumer * (SUM_BYTES / CONSUMERS);
    const bool ordered = s->semaphores && p->dq.data;
    tile_cursor at = {0, 0, 0};
    ptx_mbarrier_wait(&state->dq_full[consumer], *stores & 1);
    ptx_mbarrier_arrive(&state->dq_empty[consumer]);
    *stores += 1;
    for (begin_task(&at, w); at.count < w->tiles; advance(&at, w->from, w->to)) {
        const int64_t number = w->number + at.head * s->q_tiles + at.tile;
        int32_t *semaphore = s->semaphores + number * CONSUMERS + consumer;
        if (ordered) {
            ptx_semaphore_wait(semaphore, tiles_before(w, at.tile));
            ptx_fence_proxy_async_global();
        }
        ptx_mbarrier_wait(&state->dq_full[consumer], *stores & 1);
        if (p->dq.data)
            ptx_bulk_add_f32(s->sums + number * (SUM_BYTES / 4) +
                                 consumer * (SUM_BYTES / 4 / CONSUMERS),
                             from, SUM_BYTES / CONSUMERS);
        ptx_bulk_commit();
        ptx_bulk_wait_read(0);
        ptx_mbarrier_arrive(&state->dq_empty[consumer]);
        if (ordered) {
            ptx_bulk_wait(0);
            ptx_semaphore_add(semaphore);
        }
        *stores += 1;
    }
}

/* A consumer's store warp, one lane of it. */
FA_DEVICE void store_dq(const pipeline *pipe, const fa_backward_params *p,
                        const fa_backward_sm90_params *s, int consumer)
{
    int stores = 0;
    for (int number = 0;; number++) {
        const block_work *w = acquire_work(pipe, number);
        if (!w->heads) break;
        if (w->tiles > 0) store_task(pipe, p, s, w, consumer, &stores);
        release_work(pipe, number, true);
    }
    ptx_bulk_wait(0); /* the block's shared memory must stay until all has been read */
}

#endif
