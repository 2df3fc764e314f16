/*
 * The producer warps: one loads the chunks of keys and values, in the order in which consumers need
 * them, and one loads the queries.
 */
#ifndef FA_KERNELS_FORWARD_SM90_WIDE_PRODUCER_CUH
#define FA_KERNELS_FORWARD_SM90_WIDE_PRODUCER_CUH

#include "forward_sm90_wide/config.cuh"
#include "forward_sm90_wide/pipeline.cuh"
#include "common/device.cuh"
#include "forward_sm90/load.cuh"
#include "forward_sm90/load_values.cuh"
#include "forward_sm90/scheduler.cuh"
#include "forward_sm90/stage.cuh"
#include "forward_sm90/work_tile.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"

/* count: of chunks so far, through all work tiles. */
FA_DEVICE char *chunk_buffer(const pipeline *pipe, tile_count count)
{
    return pipe->chunks + stage_of(count) * CHUNK;
}

/* The common numbers of all chunks of a work tile. They are computed once, because issuing a chunk
 * must take less time than its products. */
typedef struct source {
    const work_tile *w;
    int start_k, head_k, head_v, block_k, block_v; /* coordinates of the tensor maps */
    int seen_from, seen_to; /* values of keys outside may have to be cleared: has_values_to_clear */
} source;

FA_DEVICE source find_source(const fa_attention_params *p, const fa_sm90_params *s,
                             const work_tile *w)
{
    const fa_tile *t = &w->query_tile;
    const fa_range seen = find_seen_keys(p, t);
    const kv_box behind = {saturate(seen.hi), V_ROWS, 0, 0};
    const source from = {.w = w,
                         .start_k = (int)t->start_k,
                         .head_k = (int)t->head_kv * s->k_step.head,
                         .head_v = (int)t->head_kv * s->v_step.head,
                         .block_k = (int)t->block_k * s->k_step.block,
                         .block_v = (int)t->block_k * s->v_step.block,
                         .seen_from = saturate(seen.lo),
                         .seen_to = has_values_to_clear(p, t, &seen, &behind) ? saturate(seen.hi)
                                                                              : UNBOUNDED};
    return from;
}

/* Waits until consumers have released the stage of a chunk. */
FA_DEVICE void wait_for_empty_stage(const pipeline *pipe, tile_count count)
{
    __syncwarp(); /* no lane comes to a barrier two phases late */
    ptx_mbarrier_wait(&pipe->state->empty[stage_of(count)], parity_of(count) ^ 1);
}

/* Loads the block's half of a tile's keys. A chunk is one or more blocks of columns. */
FA_DEVICE void load_key_tile(const pipeline *pipe, const fa_attention_params *p,
                             const fa_sm90_params *s, const source *from, int tile,
                             tile_count *count)
{
    const int key = from->w->first_key + tile * KEYS + THIS_BLOCK * FRAGMENT_KEYS;
    const kv_box rows = {key, FRAGMENT_KEYS, 0, 0};
    lane_rows own = {0, 0, 0};
    if (p->block_table) own = find_lane_rows(&rows, p, s, &from->w->query_tile);
#pragma unroll
    for (int first = 0; first < K_BLOCKS; first += K_CHUNK_BLOCKS, ++*count) {
        const kv_box chunk = {key, FRAGMENT_KEYS, 64 * first,
                              min(K_CHUNK_BLOCKS, K_BLOCKS - first)};
        uint64_t *full = &pipe->state->full[stage_of(*count)];
        char *to = chunk_buffer(pipe, *count);
        wait_for_empty_stage(pipe, *count);
        if (p->block_table) {
            load_box(to, &s->k, &s->k_step, full, &chunk, &own, &from->w->query_tile);
            continue;
        }
        if (threadIdx.x != 0) continue;
        ptx_mbarrier_arrive_expect(full, chunk.blocks * K_BLOCK);
#pragma unroll
        for (int block = 0; block < chunk.blocks; block++)
            ptx_tma_load_4d(to + block * K_BLOCK, &s->k, full, chunk.column + 64 * block,
                            from->start_k + key, from->head_k, from->block_k);
    }
}

/* Loads the block's columns of a tile's values. A chunk is V_ROWS rows. */
FA_DEVICE void load_value_tile(const pipeline *pipe, const fa_attention_params *p,
                               const fa_sm90_params *s, const source *from, int tile,
                               tile_count *count, int *cleared)
{
#pragma unroll
    for (int row = 0; row < KEYS; row += V_ROWS, ++*count) {
        const kv_box chunk = {from->w->first_key + tile * KEYS + row, V_ROWS, FIRST_COLUMN,
                              V_BLOCKS};
        uint64_t *full = &pipe->state->full[stage_of(*count)];
        char *to = chunk_buffer(pipe, *count);
        const bool clears = chunk.key < from->seen_from || chunk.key + V_ROWS > from->seen_to;
        lane_rows own = {0, 0, 0};
        if (clears || p->block_table) own = find_lane_rows(&chunk, p, s, &from->w->query_tile);
        wait_for_empty_stage(pipe, *count);
        if (clears) {
            load_values(pipe, p, s, &from->w->query_tile, &chunk, &own, to, full, cleared);
            continue;
        }
        if (p->block_table) {
            load_box(to, &s->v, &s->v_step, full, &chunk, &own, &from->w->query_tile);
            continue;
        }
        if (threadIdx.x != 0) continue;
        ptx_mbarrier_arrive_expect(full, V_BLOCKS * V_BLOCK);
#pragma unroll
        for (int block = 0; block < V_BLOCKS; block++)
            ptx_tma_load_4d(to + block * V_BLOCK, &s->v, full, chunk.column + 64 * block,
                            from->start_k + chunk.key, from->head_v, from->block_v);
    }
}

/* The keys of each tile come before the values of the previous tile. */
FA_DEVICE void produce_keys_and_values(const pipeline *pipe, const fa_attention_params *p,
                                       const fa_sm90_params *s)
{
    tile_count count = 0;
    int cleared = 0;
    for (int number = 0;; number++) {
        const work_tile *w = acquire_work_tile(pipe, number);
        const int tiles = w->key_tiles;
        if (!tiles) break;
        const source from = find_source(p, s, w);
        load_key_tile(pipe, p, s, &from, 0, &count);
        for (int tile = 0; tile < tiles; tile++) {
            if (tile + 1 < tiles) load_key_tile(pipe, p, s, &from, tile + 1, &count);
            load_value_tile(pipe, p, s, &from, tile, &count, &cleared);
        }
        release_work_tile(pipe, number);
    }
}

FA_DEVICE void produce_queries(const pipeline *pipe, const fa_sm90_params *s)
{
    const work_tile *w;
    for (int number = 0;; number++) {
        w = acquire_work_tile(pipe, number);
        for (int c = 0; c < CONSUMERS; c++) produce_consumer_queries(pipe, s, w, c, number);
        if (!w->key_tiles) break; /* the scheduler does not use this entry again */
        release_work_tile(pipe, number);
    }
}

#endif
