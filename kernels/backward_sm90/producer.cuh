/*
 * The warps that move data. One loads keys, values, and the tiles of queries and of dout. Two add
 * the consumers' columns of dQ to the sums in global memory, and store dbias. One loads tiles of a
 * bias.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_PRODUCER_CUH
#define FA_KERNELS_BACKWARD_SM90_PRODUCER_CUH

#include "backward_sm90/chain.cuh"
#include "backward_sm90/clear_ahead.cuh"
#include "backward_sm90/config.cuh"
#include "backward_sm90/dbias_sums.cuh"
#include "backward_sm90/keys.cuh"
#include "backward_sm90/pipeline.cuh"
#include "backward_sm90/rounding.cuh"
#include "backward_sm90/work.cuh"
#include "common/x2.cuh"
#include "ptx/barrier.cuh"
#include "ptx/grid.cuh"
#include "ptx/semaphore.cuh"
#include "ptx/tma.cuh"
#if LOADER_SCHEDULES
#include "backward_sm90/schedule.cuh"
#endif

/* The state of a warp that loads. */
#ifndef LOADER
#define LOADER(state) (state)
#endif

/* Where tiles are loaded from: the map; the indices of the head and of the entry of axis 0; the
 * number of blocks of 64 columns, and the first of them. */
typedef struct tile_source {
    const fa_sm90_map *map;
    int head, block, blocks, first;
} tile_source;

FA_DEVICE tile_source source_of(const fa_sm90_map *map, const fa_sm90_steps *step, int head,
                                int block, int blocks)
{
    const tile_source from = {map, head * step->head, block * step->block, blocks, 0};
    return from;
}

/* The rows of a tile that are kept: [from, to). The others are cleared. */
typedef struct kept_rows {
    int from, to;
#if HIDES
    const uint32_t *blind; /* bits of queries that are cleared as well; NULL: the tile has keys */
#endif
} kept_rows;

FA_DEVICE kept_rows keep_rows(int from, int to)
{
    kept_rows kept;
    kept.from = from;
    kept.to = to;
#if HIDES
    kept.blind = 0;
#endif
    return kept;
}

FA_DEVICE bool is_blind(const kept_rows *kept, int row)
{
#if HIDES
    return kept->blind && kept->blind[row / 32] >> row % 32 & 1;
#else
    (void)kept, (void)row;
    return false;
#endif
}

FA_DEVICE bool has_blind(const kept_rows *kept)
{
#if HIDES
    return kept->blind && (kept->blind[0] | kept->blind[1]) != 0;
#else
    (void)kept;
    return false;
#endif
}

/* Each lane clears every 32nd row. */
FA_DEVICE void clear_rows(char *shared, int rows, int blocks, const kept_rows *kept)
{
#pragma unroll 1
    for (int row = threadIdx.x % 32; row < rows; row += 32) {
        if (row >= kept->from && row < kept->to && !is_blind(kept, row)) continue;
#pragma unroll
        for (int block = 0; block < blocks; block++)
#pragma unroll
            for (int i = 0; i < 8; i++)
                *(float4 *)(shared + (block * rows + row) * 128 + 16 * i) = make_float4(0, 0, 0, 0);
    }
    ptx_fence_proxy_async();
    __syncwarp();
}

/* The copies of a tile. Executed by one thread. */
FA_DEVICE void issue_boxes(const tile_source *from, char *shared, int rows, int row, uint64_t *full)
{
#pragma unroll
    for (int block = 0; block < from->blocks; block++)
        ptx_tma_load_4d(shared + block * rows * 128, from->map, full, 64 * (from->first + block),
                        row, from->head, from->block);
}

FA_DEVICE void issue_tile(const tile_source *from, char *shared, int rows, int row, uint64_t *full)
{
    ptx_mbarrier_arrive_expect(full, from->blocks * rows * 128);
    issue_boxes(from, shared, rows, row, full);
}

/* Loads a tile of `rows` rows, starting at row `row`. Before the warp arrives at `full`, it clears
 * rows that are not kept. */
FA_DEVICE void load_tile(const pipeline *pipe, const tile_source *from, char *shared, int rows,
                         int row, uint64_t *full, const kept_rows *kept)
{
    const bool leader = threadIdx.x % 32 == 0;
    const bool clears = kept->from > 0 || kept->to < rows || has_blind(kept);
    uint64_t *barrier = clears ? &LOADER(pipe->state)->cleared : full;
    if (leader) issue_tile(from, shared, rows, row, barrier);
    if (!clears) return;
    ptx_mbarrier_wait(barrier, LOADER(pipe->state)->num_cleared & 1);
    clear_rows(shared, rows, from->blocks, kept);
    if (leader) {
        LOADER(pipe->state)->num_cleared++;
        ptx_mbarrier_arrive(full);
    }
    __syncwarp();
}

/* Whether all rows of a tile are kept. */
FA_DEVICE bool keeps_all(const kept_rows *kept, int rows)
{
    return kept->from <= 0 && kept->to >= rows && !has_blind(kept);
}

/* The same for keys or values. Rows count from key `first` of the work tile. */
FA_DEVICE kept_rows keep_keys(const block_work *w, int first)
{
    return keep_rows(w->clear_before_key - first, w->clear_from_key - first);
}

/* Keys or values whose loads have been issued: clears rows that are not kept. If all rows are kept,
 * consumers wait only for the loads. */
FA_DEVICE void finish_keys(const pipeline *pipe, int at, int blocks, uint64_t *loaded,
                           uint64_t *full)
{
    const block_work *w = work_of(pipe);
    const kept_rows kept = keep_keys(w, FIRST_KEY);
    if (!clears_keys(w)) return;
    ptx_mbarrier_wait(loaded, keys_parity(w));
    clear_rows(pipe->buffers + at, BLOCK_KEYS, blocks, &kept);
    if (threadIdx.x % 32 == 0) ptx_mbarrier_arrive(full);
}

#if HIDES

/* Finds the queries of a tile from which masks or a bias hide all keys: they may hold NaN as
 * well. prepare.cu gives them the log-sum-exp infinity and delta 0. number: of the tile in the
 * workspace. */
FA_DEVICE void find_blind(const pipeline *pipe, const fa_attention_params *p,
                          const fa_backward_sm90_params *s, int64_t number)
{
    const float *rows = s->rows + number * (2 * QUERIES);
    const int lane = threadIdx.x % 32;
    const bool hides = hides_keys(p);
#pragma unroll
    for (int n = 0; n < QUERIES / 32; n++) {
        const float *row = rows + FA_BACKWARD_SM90_ROW_AT(32 * n + lane);
        const bool none = hides && row[0] == INFINITY && row[QUERIES] == 0.0f;
        const uint32_t blind = __ballot_sync(0xffffffffu, none);
        if (lane == 0) LOADER(pipe->state)->blind[n] = blind;
    }
    __syncwarp();
}

#endif

/* ---- What a block loads ---------------------------------------------------------------------- */

/* Prefetches the maps for the first loads of queries and dout. */
FA_DEVICE void prefetch_maps(const fa_backward_sm90_params *s)
{
    ptx_tma_prefetch(&s->q);
    ptx_tma_prefetch(&s->dout);
}

#if LOADS_EARLY

/* A block loads its first tile together with its keys, if all of the tile's rows are kept. What all
 * blocks share says where it is, if all sequences have the same lengths. */
FA_DEVICE bool loads_early(const fa_backward_sm90_params *s, const block_work *w)
{
    const int first = first_tile(w).tile * QUERIES;
    const kept_rows kept = keep_rows(w->clear_before_query - first, w->clear_from_query - first);
    return is_uniform(s) && keeps_all(&kept, QUERIES);
}

FA_DEVICE void issue_first_queries(const pipeline *pipe, const fa_backward_sm90_params *s,
                                   const block_work *own, bool of_dout)
{
    shared_state *state = pipe->state;
    const fa_tile *t = &own->sequence;
    const int head = (int)t->head, number = (int)t->block_q, row = first_tile(own).tile * QUERIES;
    if ((!PLAIN_HEADS && own->tiles == 0) || !loads_early(s, own)) return;
    if (of_dout) {
        const tile_source dout = source_of(&s->dout, &s->dout_step, head, number, VALUE_BLOCKS);
        issue_tile(&dout, pipe->buffers + DOUT_AT, QUERIES, row, &state->dout_full[0]);
    } else {
        const tile_source q = source_of(&s->q, &s->q_step, head, number, BLOCKS);
        issue_tile(&q, pipe->buffers + Q_AT, QUERIES, row, &state->q_full[0]);
    }
}

#endif

#if PERSISTENT && defined BACKWARD_SM90_WIDE

/* Issue the loads of the block's keys, and of its values. Executed by one thread. */
FA_DEVICE void issue_k(const pipeline *pipe, const fa_backward_sm90_params *s, const block_work *w)
{
    const fa_tile *t = &w->sequence;
    const tile_source k = source_of(&s->k, &s->k_step, (int)t->head_kv, (int)t->block_k, BLOCKS);
    issue_tile(&k, pipe->buffers, BLOCK_KEYS, (int)(t->start_k + w->keys.first) + FIRST_KEY,
               &pipe->state->k_loaded);
}

FA_DEVICE void issue_v(const pipeline *pipe, const fa_backward_sm90_params *s, const block_work *w)
{
    const fa_tile *t = &w->sequence;
    const tile_source v =
        source_of(&s->v, &s->v_step, (int)t->head_kv, (int)t->block_k, VALUE_BLOCKS);
    issue_tile(&v, pipe->buffers + V_AT, BLOCK_KEYS, (int)(t->start_k + w->keys.first) + FIRST_KEY,
               &pipe->state->v_loaded);
}

#else

/* Issues the loads of the block's keys and values. Executed by the thread that has initialized the
 * barriers. */
FA_DEVICE void issue_keys(const pipeline *pipe, const fa_backward_sm90_params *s,
                          const block_work *own)
{
    shared_state *state = pipe->state;
    const fa_tile *t = &own->sequence;
    const int row = (int)(t->start_k + own->keys.first) + FIRST_KEY, head = (int)t->head_kv,
              number = (int)t->block_k;
    const tile_source k = source_of(&s->k, &s->k_step, head, number, BLOCKS),
                      v = source_of(&s->v, &s->v_step, head, number, VALUE_BLOCKS);
#if PERSISTENT
    ptx_mbarrier_wait(&state->v_empty, keys_parity(own) ^ 1);
    issue_tile(&v, pipe->buffers + V_AT, BLOCK_KEYS, row, &state->v_loaded);
    ptx_mbarrier_wait(&state->k_empty, keys_parity(own) ^ 1);
    issue_tile(&k, pipe->buffers, BLOCK_KEYS, row, &state->k_loaded);
#else
    ptx_fence_proxy_async(); /* of the barriers */
    /* Otherwise `prepare` has waited, and keys are no results of it. */
    if (CHAINED && s->prepares) ptx_wait_for_grids();
    issue_tile(&k, pipe->buffers, BLOCK_KEYS, row, &state->k_loaded);
#if LOADS_EARLY && !defined BACKWARD_SM90_WIDE
    issue_first_queries(pipe, s, own, false);
#endif
    issue_tile(&v, pipe->buffers + V_AT, BLOCK_KEYS, row, &state->v_loaded);
#if LOADS_EARLY && !defined BACKWARD_SM90_WIDE
    issue_first_queries(pipe, s, own, true);
#endif
#endif
}

#endif

#if defined BACKWARD_SM90_WIDE && !PERSISTENT

/* Executed by the same thread: the first tile of queries, with its rows, and of dout. prepare has ended. */
FA_DEVICE void load_first_tile(const pipeline *pipe, const fa_attention_params *p,
                               const fa_backward_sm90_params *s, block_work *own)
{
#if LOADS_EARLY
    uint64_t *full = &pipe->state->q_full[0];
    if (!is_uniform(s)) return;
    find_work(p, s, own);
    find_seen_rows(p, s, own);
    if (own->tiles == 0 || !loads_early(s, own)) return;
    ptx_mbarrier_arrive_expect(full, ROW_BYTES);
    ptx_bulk_load(pipe->buffers + ROWS_AT,
                  (const char *)s->rows + (own->number + first_tile(own).tile) * ROW_BYTES, full,
                  ROW_BYTES);
    issue_first_queries(pipe, s, own, false);
    issue_first_queries(pipe, s, own, true);
#else
    (void)pipe, (void)p, (void)s, (void)own;
#endif
}

#endif

#if !PERSISTENT /* a persistent block has a scheduler warp: schedule.cuh */

/* Executed by one thread of each warp of the first warpgroup: initializes the barriers, issues the
 * loads of keys and values as soon as the keys are known, and describes the block's work. Returns
 * whether there are loads. */
FA_DEVICE bool begin_block(const pipeline *pipe, const fa_attention_params *p,
                           const fa_backward_sm90_params *s, int64_t block)
{
    const int warp = (int)threadIdx.x / 32;
    block_work own, *w = &pipe->state->works[0];
    if (warp == 0 && !CHAINED) init_barriers(pipe->state);
    if (warp == 3) prefetch_maps(s);
    const bool any = find_keys(p, s, block, &own);
#if LOADS_EARLY && !defined BACKWARD_SM90_WIDE
    if (warp == 0 && any && is_uniform(s)) {
        find_queries(p, s, &own);
        find_seen_rows(p, s, &own);
    }
#endif
    if (warp == 0 && any) issue_keys(pipe, s, &own);
#ifdef BACKWARD_SM90_WIDE
    if (LOADS_EARLY && warp == 0 && any) load_first_tile(pipe, p, s, &own);
#endif
    if (warp == 1 && any) describe_work(p, s, &own, w);
    if (warp == 1 && !any) describe_nothing(&own, w);
    if (warp == 2 && any) describe_rows(p, s, &own, w);
    if (warp == 3 && any) describe_masks(p, s, &own, w);
    return any;
}

/* A block without work does not end before nothing more is written to its shared memory. */
FA_DEVICE void wait_for_keys(const pipeline *pipe)
{
    ptx_mbarrier_wait(&pipe->state->k_loaded, 0);
    ptx_mbarrier_wait(&pipe->state->v_loaded, 0);
}

#endif

FA_DEVICE void finish_k(const pipeline *pipe, const fa_attention_params *p)
{
    shared_state *state = pipe->state;
    if (hides_keys(p)) return; /* consumers look at them (begin_keys) */
    finish_keys(pipe, 0, BLOCKS, &state->k_loaded, &state->k_full);
}

FA_DEVICE void finish_v(const pipeline *pipe)
{
    shared_state *state = pipe->state;
    finish_keys(pipe, V_AT, VALUE_BLOCKS, &state->v_loaded, &state->v_full);
}

/* The number of a tile of the block in the workspace. */
FA_DEVICE int64_t number_of(const fa_backward_sm90_params *s, const block_work *w,
                            const tile_cursor *at)
{
    return w->number + at->head * s->q_tiles + at->tile;
}

/* The semaphore of the sums of a consumer's columns of dQ of tile `number` in the workspace. */
FA_DEVICE int32_t *semaphore_at(const fa_backward_sm90_params *s, int64_t number, int consumer)
{
    return s->semaphores + number * CONSUMERS + consumer;
}

/* The rows of a tile of queries, and of its dout, that are kept. */
FA_DEVICE kept_rows keep_queries(const pipeline *pipe, const fa_attention_params *p,
                                 const fa_backward_sm90_params *s, const tile_cursor *at)
{
    const block_work *w = work_of(pipe);
    const int first = at->tile * QUERIES;
    kept_rows kept = keep_rows(w->clear_before_query - first, w->clear_from_query - first);
    (void)p, (void)s;
#if HIDES
    kept.blind = LOADER(pipe->state)->blind;
    find_blind(pipe, p, s, number_of(s, w, at));
#endif
    __syncwarp();
    return kept;
}

#if JOINED

/* Executed by one thread: counts that its additions to the sums are complete. */
FA_DEVICE void count_additions(const pipeline *pipe, const fa_backward_sm90_params *s)
{
    ptx_bulk_wait(0);
    ptx_fence_proxy_async_global();
    ptx_counter_add(&s->counters[2 * work_of(pipe)->unit + 1]);
}

#endif

/* The log-sum-exp and delta of a tile's queries. */
FA_DEVICE void load_row_numbers(const pipeline *pipe, const fa_backward_sm90_params *s,
                                const tile_cursor *at, int slot, uint64_t *full)
{
#if CHAINED
    if (s->prepares && at->count == ROW_SLOTS) wait_for_rows();
#endif
    if (threadIdx.x % 32 != 0) return;
#if CHAINED
    if (s->prepares && at->count < ROW_SLOTS) { /* others send them */
        ptx_mbarrier_arrive(full);
        return;
    }
#endif
    /* A copy reads what other blocks have stored (wait_until_prepared in joined.cuh). */
    if (JOINED && at->count == 0) ptx_fence_proxy_async_global();
    ptx_mbarrier_arrive_expect(full, ROW_BYTES);
    ptx_bulk_load(pipe->buffers + ROWS_AT + slot * ROW_BYTES,
                  (const char *)s->rows + number_of(s, work_of(pipe), at) * ROW_BYTES, full,
                  ROW_BYTES);
}

/* backward_sm90_wide has two load warps, and its dQ does not go through shared memory. */
#ifndef BACKWARD_SM90_WIDE

FA_DEVICE void load_q(const pipeline *pipe, const fa_backward_sm90_params *s, const tile_cursor *at,
                      const kept_rows *kept)
{
    shared_state *state = pipe->state;
    const fa_tile *t = &work_of(pipe)->sequence;
    const int stage = stage_of(at->count), head = (int)t->head + at->head;
    const tile_source q = source_of(&s->q, &s->q_step, head, (int)t->block_q, BLOCKS);
    ptx_mbarrier_wait(&state->q_empty[stage], parity_of(at->count) ^ 1);
    if (ROWS_WITH_Q) load_row_numbers(pipe, s, at, slot_of(at->count), &state->q_full[stage]);
#if LOADS_EARLY
    if (at->count == 0 && loads_early(s, work_of(pipe))) return;
#endif
    load_tile(pipe, &q, pipe->buffers + Q_AT + stage * Q_BYTES, QUERIES,
              (int)t->start_q + at->tile * QUERIES, &state->q_full[stage], kept);
}

FA_DEVICE void load_dout(const pipeline *pipe, const fa_backward_sm90_params *s,
                         const tile_cursor *at, const kept_rows *kept)
{
    shared_state *state = pipe->state;
    const fa_tile *t = &work_of(pipe)->sequence;
    const int stage = stage_of(at->count), head = (int)t->head + at->head;
    const tile_source dout =
        source_of(&s->dout, &s->dout_step, head, (int)t->block_q, VALUE_BLOCKS);
    ptx_mbarrier_wait(&state->dout_empty[stage], parity_of(at->count) ^ 1);
    if (!ROWS_WITH_Q) load_row_numbers(pipe, s, at, slot_of(at->count), &state->dout_full[stage]);
#if LOADS_EARLY
    if (at->count > 0 || !loads_early(s, work_of(pipe)))
#endif
        load_tile(pipe, &dout, pipe->buffers + DOUT_AT + stage * DOUT_BYTES, QUERIES,
                  (int)t->start_q + at->tile * QUERIES, &state->dout_full[stage], kept);
}

#if HIDES

/* Loads the block's first queries and their dout, and finds out meanwhile which of them see no key: the block has nothing else to do
 * until they are there. */
FA_DEVICE void load_while_looking(const pipeline *pipe, const fa_attention_params *p,
                                  const fa_backward_sm90_params *s, const tile_cursor *at)
{
    shared_state *state = pipe->state;
    const fa_tile *t = &work_of(pipe)->sequence;
    const int head = (int)t->head + at->head, row = (int)t->start_q + at->tile * QUERIES;
    const tile_source q = source_of(&s->q, &s->q_step, head, (int)t->block_q, BLOCKS),
                      dout =
                          source_of(&s->dout, &s->dout_step, head, (int)t->block_q, VALUE_BLOCKS);
    const bool leader = threadIdx.x % 32 == 0;
    if (leader) {
        ptx_mbarrier_arrive_expect(&state->cleared, Q_BYTES + DOUT_BYTES);
        issue_boxes(&q, pipe->buffers + Q_AT, QUERIES, row, &state->cleared);
        issue_boxes(&dout, pipe->buffers + DOUT_AT, QUERIES, row, &state->cleared);
    }
    load_row_numbers(pipe, s, at, slot_of(0), &state->dout_full[0]);
    const kept_rows kept = keep_queries(pipe, p, s, at);
    ptx_mbarrier_wait(&state->cleared, 0);
    if (!keeps_all(&kept, QUERIES)) {
        clear_rows(pipe->buffers + Q_AT, QUERIES, BLOCKS, &kept);
        clear_rows(pipe->buffers + DOUT_AT, QUERIES, VALUE_BLOCKS, &kept);
    }
    if (leader) {
        state->num_cleared = 1;
        ptx_mbarrier_arrive(&state->q_full[0]);
        ptx_mbarrier_arrive(&state->dout_full[0]);
    }
    __syncwarp();
}

#endif

/* Called when most of the block's work tile `number` has been loaded: the block may take the next one. scheduled: work tiles
 * that the load warp has described, where it does so. */
FA_DEVICE void say_loaded(const pipeline *pipe, const fa_attention_params *p,
                          const fa_backward_sm90_params *s, int number, int *scheduled)
{
    (void)p, (void)s, (void)scheduled;
#if LOADER_SCHEDULES
    (void)number;
    if (threadIdx.x % 32 == 0) schedule_if_free(pipe, p, s, scheduled);
    __syncwarp();
#elif PERSISTENT
    ptx_mbarrier_arrive_if(&pipe->state->work_loaded[number % WORKS], threadIdx.x % 32 == 0);
#else
    (void)pipe, (void)number;
#endif
}

/* The load warp, for the block's work tile `number`. In a persistent block it also loads keys and
 * values, after the first tile, because the stages of that tile are free sooner; those of the first
 * work tile have been issued before. */
FA_DEVICE void produce(const pipeline *pipe, const fa_attention_params *p,
                       const fa_backward_sm90_params *s, int number, int *scheduled)
{
    const block_work *w = work_of(pipe);
    const int end = end_count(w), late = max(first_count(w), end - s->tiles_ahead);
    if (w->tiles == 0) say_loaded(pipe, p, s, number, scheduled);
    for (tile_cursor at = first_tile(w); at.count < end; advance(&at, w->from, w->to)) {
#if HIDES
        if (at.count == 0) {
            load_while_looking(pipe, p, s, &at);
            finish_k(pipe, p);
            finish_v(pipe);
            continue;
        }
#endif
        const kept_rows kept = keep_queries(pipe, p, s, &at);
        load_q(pipe, s, &at, &kept);
        load_dout(pipe, s, &at, &kept);
        if (LOADER_SCHEDULES ? at.count >= late : at.count == late)
            say_loaded(pipe, p, s, number, scheduled);
        if (at.count > first_count(w)) continue;
#if PERSISTENT
        if (number > 0 && threadIdx.x % 32 == 0) issue_keys(pipe, s, w);
        /* No lane tests a barrier of keys before the previous keys have been loaded. */
        __syncwarp();
#endif
        finish_k(pipe, p);
        finish_v(pipe);
    }
}

#if PERSISTENT

/* Passes a stage to the consumers, who store gradients through it. */
FA_DEVICE void leave_room(const pipeline *pipe, int count)
{
    shared_state *state = pipe->state;
    const int stage = stage_of(count), parity = parity_of(count) ^ 1;
    ptx_mbarrier_wait(&state->q_empty[stage], parity);
    ptx_mbarrier_wait(&state->dout_empty[stage], parity);
    if (threadIdx.x % 32 != 0) return;
    ptx_mbarrier_arrive(&state->q_full[stage]);
    ptx_mbarrier_arrive(&state->dout_full[stage]);
    ptx_mbarrier_arrive(&state->dout_full[stage]); /* one for the rows, one for dout */
}

FA_DEVICE void produce_work_tiles(const pipeline *block, const fa_attention_params *p,
                                  const fa_backward_sm90_params *s)
{
    pipeline own = *block;
    int scheduled = 0;
#if LOADER_SCHEDULES
    if (threadIdx.x % 32 == 0) schedule_next(block, p, s, &scheduled);
    __syncwarp();
#endif
    const bool any = acquire_work_tile(&own, 0);
    /* The first keys are no results of the grid before this one. */
    if (any && own.work->tiles > 0 && threadIdx.x % 32 == 0) issue_keys(&own, s, own.work);
    __syncwarp();
    ptx_wait_for_grids();
#pragma unroll 1
    for (int n = 0; acquire_work_tile(&own, n); n++) {
        produce(&own, p, s, n, &scheduled);
        leave_room(&own, end_count(own.work));
        __syncwarp();
        release_work_tile(&own, n, threadIdx.x % 32 == 0);
#if LOADER_SCHEDULES
        if (threadIdx.x % 32 == 0 && scheduled == n + 1) schedule_next(block, p, s, &scheduled);
        __syncwarp();
#endif
    }
}

#endif

#if BIAS_TILE

/* A consumer's box of a bias, or of dbias, of a tile. */
typedef struct score_box {
    int key, query, head, batch;
} score_box;

FA_DEVICE score_box find_box(const block_work *w, const fa_sm90_steps *step, const tile_cursor *at,
                             int consumer)
{
    const score_box box = {(int)w->keys.first + consumer * OWN_KEYS, at->tile * QUERIES,
                           ((int)w->sequence.head + at->head) * step->head,
                           (int)w->sequence.batch * step->block};
    return box;
}

/* The warp that loads the bias. Executed by one lane of it. */
FA_DEVICE void produce_bias(const pipeline *pipe, const fa_backward_sm90_params *s)
{
    shared_state *state = pipe->state;
    const block_work *w = work_of(pipe);
    for (tile_cursor at = first_tile(w); at.count < w->tiles; advance(&at, w->from, w->to))
#pragma unroll 1
        for (int c = 0; c < CONSUMERS; c++) {
            const score_box box = find_box(w, &s->bias_step, &at, c);
            ptx_mbarrier_wait(&state->bias_empty[c], (at.count & 1) ^ 1);
            ptx_mbarrier_arrive_expect(&state->bias_full[c], BIAS_BYTES / CONSUMERS);
            ptx_tma_load_4d(pipe->buffers + BIAS_AT + c * Q_BLOCK, &s->bias, &state->bias_full[c],
                            box.key, box.query, box.head, box.batch);
        }
}

#endif

/* Copies a consumer's half of a tile of dS, in 16 bits as products read it, to its elements of
 * dbias, as far as these exist. Or leaves it for the sums of its unit. */
FA_DEVICE void store_dbias(const pipeline *pipe, const fa_backward_sm90_params *s,
                           const tile_cursor *at, int consumer)
{
#if BIAS_TILE
    const block_work *w = work_of(pipe);
    const char *ds = pipe->buffers + DS_AT + ds_buffer(at->count) * DS_BYTES + consumer * Q_BLOCK;
    if (at->count >= w->tiles) return;
    if (leaves_ds(pipe)) {
        ptx_bulk_store(left_tile(s, w, at->head, at->tile) + consumer * Q_BLOCK, ds, Q_BLOCK);
        return;
    }
    if (pipe->dbias_mapped != FA_BACKWARD_SM90_DBIAS_STORED) return;
    const score_box box = find_box(w, &s->dbias_step, at, consumer);
    ptx_tma_store_4d(&s->dbias, ds, box.key, box.query, box.head, box.batch);
#else
    (void)pipe, (void)s, (void)at, (void)consumer;
#endif
}

#if BIAS_TILE

/* The same for dS in 32 bits, from the buffer of dQ. */
FA_DEVICE void put_float_dbias(const pipeline *pipe, const fa_backward_sm90_params *s,
                               const tile_cursor *at, int consumer)
{
    const score_box box = find_box(work_of(pipe), &s->dbias_step, at, consumer);
    const char *from = pipe->buffers + DQ_AT + consumer * DQ_PART;
#pragma unroll 1
    for (int n = 0; n < OWN_KEYS / 32; n++, from += QUERIES * 128)
        if (pipe->dbias_mapped == FA_BACKWARD_SM90_DBIAS_ADDED)
            ptx_tma_add_4d(&s->dbias, from, box.key + 32 * n, box.query, box.head, box.batch);
        else ptx_tma_store_4d(&s->dbias, from, box.key + 32 * n, box.query, box.head, box.batch);
}

#endif

/* Two functions of a consumer's columns of dQ: the sums of tile `number` in the workspace, and the
 * consumer's buffer. */
FA_DEVICE float *sums_at(const fa_backward_sm90_params *s, int64_t number, int consumer)
{
    return s->sums + number * (SUM_BYTES / 4) + consumer * (SUM_BYTES / 4 / CONSUMERS);
}

FA_DEVICE const char *dq_at(const pipeline *pipe, int consumer, int use)
{
    return pipe->buffers + DQ_AT + consumer * DQ_PART + dq_buffer(use);
}

#if DQ_PARTS > 1

/* The same for a part of these columns. */
FA_DEVICE float *part_at(const fa_backward_sm90_params *s, int64_t number, int consumer, int part)
{
    const int column =
        part == 0 ? consumer * DQ_COLUMNS : CONSUMERS * DQ_COLUMNS + consumer * DQ_REST;
    return s->sums + number * (SUM_BYTES / 4) + column * QUERIES;
}

#endif

/* Adds a buffer of dQ to sums; a first share is stored. */
FA_DEVICE void put_sums(float *sums, const char *dq, int bytes, bool first)
{
    if (first) ptx_bulk_store(sums, dq, bytes);
    else ptx_bulk_add_f32(sums, dq, bytes);
}

/* Groups of copies of a tile. */
#define TILE_COPIES (DQ_PARTS + BIAS_TILE)

/* If a head's first block stores its shares of dQ and the others add theirs in any order: how many
 * shares of the first block this block knows of; or that it is the first block, or need not know. A
 * work tile that no query sees has no shares, and may not even have a number. */
enum { STORES_FIRST = -1, NEED_NOT_KNOW = UNBOUNDED };

/* How many shares the first block has stored. It counts a share when it has stored the next one,
 * because more than a tile's time may pass until a share is complete. */
FA_DEVICE int32_t *progress_at(const pipeline *pipe, const fa_backward_sm90_params *s, int consumer)
{
    const block_work *w = work_of(pipe);
    return semaphore_at(s, w->number + w->to - 1, consumer);
}

FA_DEVICE int begin_first_shares(const pipeline *pipe, const fa_backward_params *p,
                                 const fa_backward_sm90_params *s)
{
    if (!s->first_ahead || !p->dq.data || work_of(pipe)->tiles == 0) return NEED_NOT_KNOW;
    return work_of(pipe)->key_tile == 0 ? STORES_FIRST : 0;
}

/* Counts the last share of a first block. */
FA_DEVICE void end_first_shares(const pipeline *pipe, const fa_backward_sm90_params *s,
                                int consumer, int known)
{
    if (known != STORES_FIRST) return;
    ptx_bulk_wait(0);
    ptx_progress_add(progress_at(pipe, s, consumer), 0);
}

/* Waits for a tile's dQ, adds it to the sums and releases the buffer. The parts of dQ use the
 * buffer one after the other. first: it is a first share, which is stored. */
FA_DEVICE void add_tile_dq(const pipeline *pipe, const fa_backward_params *p,
                           const fa_backward_sm90_params *s, int consumer, int64_t number,
                           const tile_cursor *next, int use, bool first)
{
    shared_state *state = pipe->state;
#if DQ_PARTS > 1
    (void)next;
#pragma unroll 1
    for (int part = 0; part < DQ_PARTS; part++) {
        const int own = DQ_PARTS * use + part, columns = part == 0 ? DQ_COLUMNS : DQ_REST;
        ptx_mbarrier_wait(dq_full(state, consumer, own), dq_full_parity(own));
        if (p->dq.data)
            put_sums(part_at(s, number, consumer, part), dq_at(pipe, consumer, own),
                     columns * (QUERIES * 4), first);
        ptx_bulk_commit();
        ptx_bulk_wait_read(0);
        ptx_mbarrier_arrive(dq_empty(state, consumer, own));
    }
#else
    const int own_columns = consumer == 0 ? DQ_COLUMNS : COLUMNS - DQ_COLUMNS;
    ptx_mbarrier_wait(dq_full(state, consumer, use), dq_full_parity(use));
    if (p->dq.data)
        put_sums(sums_at(s, number, consumer), dq_at(pipe, consumer, use),
                 SUM_BYTES / HEAD_DIM * own_columns, first);
    ptx_bulk_commit();
    store_dbias(pipe, s, next, consumer);
    if (BIAS_TILE) ptx_bulk_commit();
    ptx_bulk_wait_read(BIAS_TILE);
    ptx_mbarrier_arrive(dq_empty(state, consumer, use));
#endif
}

/* Executed by one lane of a store warp: adds a tile's dQ, which the consumer stores one tile
 * later, to the sums. use: the number of the use of the consumer's buffer; use 0 holds no dQ.
 *
 * If sums have one order, a key tile is added when all key tiles before it have been added. In any
 * order, if the first key tile stores its share, the others are added after it. The
 * warp waits only for blocks of lower numbers, which start no later and do not wait for this
 * block. After ptx_bulk_wait an addition is complete and visible to this thread. The semaphore
 * makes it visible to the thread of the next block, and the fence to that thread's copies.
 *
 * Together with a tile's dQ the consumer shares dS of the next tile; with use 0, dS of the first
 * tile. There are three buffers of dS. The consumer stores to the same one again only after the
 * buffer of dQ has been released once more. By then all stores of dS but the last have been
 * read. */
FA_DEVICE void store_tile_dq(const pipeline *pipe, const fa_backward_params *p,
                             const fa_backward_sm90_params *s, int consumer, const tile_cursor *at,
                             const tile_cursor *next, int use, int *known)
{
    const block_work *w = work_of(pipe);
    const bool ordered = s->semaphores && !s->first_ahead && p->dq.data;
    const int64_t number = number_of(s, w, at);
    int32_t *semaphore = semaphore_at(s, number, consumer);
    const int share = at->count - first_count(w);
    if (ordered) {
        ptx_semaphore_wait(semaphore, tiles_before(w, at->tile));
        ptx_fence_proxy_async_global();
    }
    const bool stores = *known == STORES_FIRST;
    if (!stores && *known <= share) {
        *known = ptx_progress_wait(progress_at(pipe, s, consumer), share + 1);
        ptx_fence_proxy_async_global();
    }
    add_tile_dq(pipe, p, s, consumer, number, next, use, stores);
    if (ordered) {
        ptx_bulk_wait(0);
        ptx_semaphore_add(semaphore);
    }
    if (stores && share > 0) {
        ptx_bulk_wait(TILE_COPIES);
        ptx_progress_add(progress_at(pipe, s, consumer), TILE_COPIES);
    }
}

/* Use 0 of the consumer's buffer, which holds no dQ. */
FA_DEVICE void skip_dq(const pipeline *pipe, const fa_backward_sm90_params *s, int consumer,
                       const tile_cursor *next)
{
    shared_state *state = pipe->state;
    const int use = first_count(work_of(pipe));
    ptx_mbarrier_wait(dq_full(state, consumer, use), dq_full_parity(use));
    store_dbias(pipe, s, next, consumer);
    if (BIAS_TILE) ptx_bulk_commit();
    ptx_mbarrier_arrive(dq_empty(state, consumer, use));
#if DQ_PARTS > 1
    ptx_mbarrier_wait(dq_full(state, consumer, use + 1), dq_full_parity(use + 1));
    ptx_mbarrier_arrive(dq_empty(state, consumer, use + 1));
#endif
}

#if BIAS_TILE

/* A consumer's store warp if dS in 32 bits and dQ alternate: dS of a tile, then dQ of the previous
 * tile. */
FA_DEVICE void store_dq_and_dbias(const pipeline *pipe, const fa_backward_params *p,
                                  const fa_backward_sm90_params *s, int consumer)
{
    shared_state *state = pipe->state;
    const block_work *w = work_of(pipe);
    tile_cursor at = first_tile(w), before = at;
    int known = begin_first_shares(pipe, p, s);
    while (at.count < w->tiles) {
        ptx_mbarrier_wait(dq_full(state, consumer, 0), 0);
        put_float_dbias(pipe, s, &at, consumer);
        ptx_bulk_commit();
        ptx_bulk_wait_read(0);
        ptx_mbarrier_arrive(dq_empty(state, consumer, 0));
        if (at.count > 0) store_tile_dq(pipe, p, s, consumer, &before, &at, 1, &known);
        else {
            ptx_mbarrier_wait(dq_full(state, consumer, 1), 1);
            ptx_mbarrier_arrive(dq_empty(state, consumer, 1));
        }
        before = at;
        advance(&at, w->from, w->to);
    }
    store_tile_dq(pipe, p, s, consumer, &before, &at, 0, &known);
    end_first_shares(pipe, s, consumer, known);
    ptx_bulk_wait_read(0);
}

#endif

#if ORDERED

/* The turn of a tile: its number in the workspace, and how many key tiles come before the block's. */
typedef struct dq_turn {
    int before;
    int64_t number;
} dq_turn;

/* That of use `use` of the consumers' buffers. */
FA_DEVICE dq_turn find_turn(const fa_backward_sm90_params *s, const block_work *w, tile_cursor *at,
                            int use)
{
    while (at->count < use - 1) advance(at, w->from, w->to);
    const dq_turn turn = {tiles_before(w, at->tile), number_of(s, w, at)};
    return turn;
}

/* Bytes of the columns of dQ of `consumers` consumers, from the first of them on. The last one may have fewer than its buffer has. */
FA_DEVICE int dq_bytes(int first, int consumers)
{
    const int end = first + consumers == CONSUMERS ? COLUMNS : (first + consumers) * DQ_COLUMNS;
    return SUM_BYTES / HEAD_DIM * (end - first * DQ_COLUMNS);
}

/* Waits for dQ of `consumers` consumers, from the first of them on. Adds it to the sums, or stores
 * it if it is the first share, so that the sums need not be cleared. */
FA_DEVICE void put_dq(const pipeline *pipe, const fa_backward_sm90_params *s, const dq_turn *turn,
                      int first, int consumers, int use, bool stores)
{
#pragma unroll
    for (int c = first; c < first + consumers; c++)
        ptx_mbarrier_wait(dq_full(pipe->state, c, use), dq_full_parity(use));
    if (!stores) return;
    put_sums(sums_at(s, turn->number, first), dq_at(pipe, first, use), dq_bytes(first, consumers),
             turn->before == 0);
    ptx_bulk_commit();
}

#if GIVES_ROOM

/* Says that the buffers of a use are free, unless they get sums first. */
FA_DEVICE void give_room(const pipeline *pipe, int use)
{
    const block_work *w = work_of(pipe);
    if (use > end_count(w) || gets_sums(w, use)) return;
#pragma unroll
    for (int c = 0; c < CONSUMERS; c++) ptx_mbarrier_arrive(dq_empty(pipe->state, c, use));
}

#endif

/* Releases the same buffers. */
FA_DEVICE void release_dq(const pipeline *pipe, int first, int consumers, int use, bool stores)
{
    if (stores) ptx_bulk_wait_read(0);
#if GIVES_ROOM
    (void)first, (void)consumers;
    give_room(pipe, use + STORE_WARPS);
#else
#pragma unroll
    for (int c = first; c < first + consumers; c++)
        ptx_mbarrier_arrive(dq_empty(pipe->state, c, use));
#endif
}

#if ROUNDING

#if GIVES_ROOM

/* Loads the sums of the other shares into the consumers' buffers, which are free. */
FA_DEVICE void load_sums(const pipeline *pipe, const fa_backward_sm90_params *s,
                         const dq_turn *turn, int use, bool stores)
{
    if (stores) {
        ptx_counter_wait(semaphore_at(s, turn->number, 0), turn->before);
        ptx_fence_proxy_async_global();
    }
#pragma unroll
    for (int c = 0; c < CONSUMERS; c++) {
        uint64_t *room = dq_empty(pipe->state, c, use);
        ptx_mbarrier_arrive_expect(room, stores ? DQ_PART : 0);
        if (stores)
            ptx_bulk_load(pipe->buffers + DQ_AT + c * DQ_PART + dq_buffer(use),
                          sums_at(s, turn->number, c), room, DQ_PART);
    }
}

#else

/* Loads the sums of the other shares into the consumers' buffers, which the use before has left. The
 * warp has served a use before that one, so it waits for none of these barriers a phase too early. */
FA_DEVICE void load_sums(const pipeline *pipe, const fa_backward_sm90_params *s,
                         const dq_turn *turn, int use, bool stores)
{
    shared_state *state = pipe->state;
    if (stores) {
        ptx_counter_wait(semaphore_at(s, turn->number, 0), turn->before);
        ptx_fence_proxy_async_global();
    }
#pragma unroll 1
    for (int c = 0; c < CONSUMERS; c++) {
        uint64_t *loaded = &state->dq_loaded[c];
        ptx_mbarrier_wait(dq_full(state, c, use - 1), dq_full_parity(use - 1));
        ptx_mbarrier_wait(dq_empty(state, c, use), (use & 1) ^ 1);
        const int bytes = COLUMNS == HEAD_DIM ? DQ_PART : dq_bytes(c, 1);
        ptx_mbarrier_arrive_expect(loaded, stores ? bytes : 0);
        if (stores)
            ptx_bulk_load(pipe->buffers + DQ_AT + c * DQ_PART, sums_at(s, turn->number, c), loaded,
                          bytes);
    }
}

#endif

/* Stores rows of dQ that are whole. */
FA_DEVICE void store_last_share(const pipeline *pipe, const fa_backward_sm90_params *s,
                                const tile_cursor *at, const dq_turn *turn, int use, bool stores)
{
    const block_work *w = work_of(pipe);
    if (gets_sums(w, use)) load_sums(pipe, s, turn, use, stores);
#pragma unroll 1
    for (int c = 0; c < CONSUMERS; c++) {
        ptx_mbarrier_wait(dq_full(pipe->state, c, use), dq_full_parity(use));
        if (stores) {
            ptx_tma_store_4d(&s->dq, dq_at(pipe, c, use), DQ_TRANSPOSED ? 0 : c * DQ_COLUMNS,
                             at->tile * QUERIES + (DQ_TRANSPOSED ? c * WHOLE_DQ_ROWS : 0),
                             (int)w->sequence.head + at->head, (int)w->sequence.block_q);
            ptx_bulk_commit();
        }
        if (!GIVES_ROOM) release_dq(pipe, c, 1, use, stores);
    }
    if (GIVES_ROOM) release_dq(pipe, 0, CONSUMERS, use, stores);
}

#endif

/* Does what both of these do, where dQ comes in parts. */
FA_DEVICE void put_parts(const pipeline *pipe, const fa_backward_params *p,
                         const fa_backward_sm90_params *s, const dq_turn *turn, int use)
{
#pragma unroll 1
    for (int c = 0; c < CONSUMERS; c++)
        if (use > first_count(work_of(pipe)))
            add_tile_dq(pipe, p, s, c, turn->number, NULL, use, turn->before == 0);
        else skip_dq(pipe, s, c, NULL);
}

/* Whether a store warp counts two tiles at a time. */
FA_DEVICE bool counts_pairs(const fa_backward_sm90_params *s)
{
    return DQ_TOGETHER && !GIVES_ROOM && s->counts_pairs;
}

/* The first use, from `first` on, that a store warp serves. */
FA_DEVICE int find_first_use(const fa_backward_sm90_params *s, int first, int warp)
{
    const int bits = counts_pairs(s), turn = first >> bits;
    const uint32_t later = (uint32_t)(warp + STORE_WARPS) - (uint32_t)turn % STORE_WARPS;
    return max(first, (turn + (int)(later % STORE_WARPS)) << bits);
}

/* The use that the same store warp serves after `use`. */
FA_DEVICE int find_next_use(const fa_backward_sm90_params *s, int use)
{
    if (!counts_pairs(s)) return use + STORE_WARPS;
    return use % 2 == 0 ? use + 1 : use + 2 * STORE_WARPS - 1;
}

/* A store warp of an ORDERED variant. The warps take the tiles in turn, because a turn takes longer
 * than a tile: the additions must be complete before the semaphore is added to, and a fence comes
 * in between. In long sequences two tiles share this. While an addition is in progress, the warp
 * checks whether its next turn has come. */
FA_DEVICE void store_in_turn(const pipeline *pipe, const fa_backward_params *p,
                             const fa_backward_sm90_params *s, int warp)
{
    const block_work *w = work_of(pipe);
    const int first = first_count(w), end = end_count(w) + 1;
    const bool pairs = counts_pairs(s);
    tile_cursor at = first_tile(w);
    int32_t *uncounted = NULL; /* the semaphore of a tile that is counted with the next one */
    bool has_come = false;
#if GIVES_ROOM
    give_room(pipe, find_first_use(s, first, warp));
#endif
    for (int use = find_first_use(s, first, warp); use < end; use = find_next_use(s, use)) {
        const dq_turn turn = find_turn(s, w, &at, use);
        const bool stores = use > first && p->dq.data;
        int32_t *semaphore = semaphore_at(s, turn.number, 0);
#if ROUNDING
        if (is_last_share(w, use)) {
            store_last_share(pipe, s, &at, &turn, use, stores);
            continue;
        }
#endif
        if (stores) {
            if (!has_come) ptx_semaphore_wait(semaphore, turn.before);
            ptx_fence_proxy_async_global();
        }
        if (DQ_PARTS > 1) put_parts(pipe, p, s, &turn, use);
        else if (DQ_TOGETHER) put_dq(pipe, s, &turn, 0, CONSUMERS, use, stores);
        else {
            put_dq(pipe, s, &turn, 0, 1, use, stores);
            release_dq(pipe, 0, 1, use, stores);
            put_dq(pipe, s, &turn, 1, 1, use, stores);
            release_dq(pipe, 1, 1, use, stores);
        }
        has_come = false;
#if ROUNDING
        const bool looks = !is_last_share(w, use + STORE_WARPS);
#else
        const bool looks = !pairs;
#endif
        if (stores && looks && use + STORE_WARPS < end) {
            const dq_turn next = find_turn(s, w, &at, use + STORE_WARPS);
            has_come = ptx_semaphore_is_reached(semaphore_at(s, next.number, 0), next.before);
        }
        if (DQ_TOGETHER) release_dq(pipe, 0, CONSUMERS, use, stores);
        if (!stores) continue;
        if (pairs && use % 2 == 0 && use + 1 < end) {
            uncounted = semaphore;
            continue;
        }
        ptx_bulk_wait(0);
        if (uncounted) ptx_semaphores_add(uncounted, semaphore);
        else ptx_semaphore_add(semaphore);
        uncounted = NULL;
    }
}

#endif

#if CLEARS_AHEAD

FA_DEVICE int number_of_work(const pipeline *pipe)
{
#if PERSISTENT
    return work_of(pipe)->work;
#else
    (void)pipe;
    return (int)blockIdx.x;
#endif
}

#endif

#if WHOLE_DQ

/* A store warp where dQ is whole: stores a tile's dQ, which the consumer shares one tile later. In a
 * chain it stores what is not passed on, and tells the block before that there is room again. */
FA_DEVICE void store_whole_dq(const pipeline *pipe, const fa_backward_params *p,
                              const fa_backward_sm90_params *s, int consumer)
{
    shared_state *state = pipe->state;
    const block_work *w = work_of(pipe);
    tile_cursor next = first_tile(w);
    skip_dq(pipe, s, consumer, &next);
    while (next.count < end_count(w)) {
        const tile_cursor at = next;
        const int row = at.tile * QUERIES, head = (int)w->sequence.head + at.head;
        advance(&next, w->from, w->to);
        const int use = next.count;
        ptx_mbarrier_wait(dq_full(state, consumer, use), dq_full_parity(use));
        if (p->dq.data && !is_passed(w, use))
            ptx_tma_store_4d(&s->dq, dq_at(pipe, consumer, use),
                             DQ_TRANSPOSED ? 0 : consumer * DQ_COLUMNS,
                             DQ_TRANSPOSED ? row + consumer * WHOLE_DQ_ROWS : row, head,
                             (int)w->sequence.block_q);
        ptx_bulk_commit();
        ptx_bulk_wait_read(0);
        ptx_mbarrier_arrive(dq_empty(state, consumer, use));
#if CHAINED
        give_room(state, w, consumer, use);
#endif
    }
}

#endif

/* Store warp number `warp` of STORE_WARPS. */
FA_DEVICE void store_dq(const pipeline *pipe, const fa_backward_params *p,
                        const fa_backward_sm90_params *s, int warp)
{
    const block_work *w = work_of(pipe);
    if (!PERSISTENT && w->tiles == 0) return;
    if (JOINED) ptx_fence_proxy_async_global(); /* of sums that others cleared */
#if BIAS_TILE
    if (shares_dbias(pipe)) {
        store_dq_and_dbias(pipe, p, s, warp);
        return;
    }
#endif
#if ORDERED
    store_in_turn(pipe, p, s, warp);
#elif WHOLE_DQ
    store_whole_dq(pipe, p, s, warp);
#else
    tile_cursor next = first_tile(w);
    int known = begin_first_shares(pipe, p, s);
    skip_dq(pipe, s, warp, &next);
#if CLEARS_AHEAD
    wait_until_cleared(s, number_of_work(pipe));
#endif
    while (next.count < end_count(w)) {
        const tile_cursor at = next;
        advance(&next, w->from, w->to);
        store_tile_dq(pipe, p, s, warp, &at, &next, next.count, &known);
    }
    end_first_shares(pipe, s, warp, known);
#endif
    /* The block's shared memory must stay until everything has been read. */
    ptx_bulk_wait_read(0);
}

#if PERSISTENT

FA_DEVICE void store_work_tiles(const pipeline *block, const fa_backward_params *p,
                                const fa_backward_sm90_params *s, int warp)
{
    pipeline own = *block;
#pragma unroll 1
    for (int n = 0; acquire_work_tile(&own, n); n++) {
        store_dq(&own, p, s, warp);
        release_work_tile(&own, n, true);
    }
}

#endif

#endif

#endif
