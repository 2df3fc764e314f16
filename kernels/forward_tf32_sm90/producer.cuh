/*
 * The load warp: describes the block's work tiles ahead, and loads queries, keys and values by TMA,
 * in the order in which they are needed.
 */
#ifndef FA_KERNELS_FORWARD_TF32_SM90_PRODUCER_CUH
#define FA_KERNELS_FORWARD_TF32_SM90_PRODUCER_CUH

#include "forward_tf32_sm90/config.cuh"
#include "forward_tf32_sm90/pipeline.cuh"
#include "common/device.cuh"
#include "forward_sm90/describe.cuh"
#include "forward_sm90/load.cuh"
#include "forward_sm90/scheduler.cuh"
#include "forward_sm90/stage.cuh"
#include "forward_sm90/work_tile.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"

/* The common numbers of all tiles of a work tile. They are computed once, so that issuing a tile's
 * loads takes less time than its products. */
typedef struct source {
    const fa_tile *tile;
    int start_k, head_k, head_v, block_k, block_v; /* coordinates of the tensor maps */
} source;

FA_DEVICE source find_source(const fa_sm90_params *s, const work_tile *w)
{
    const fa_tile *t = &w->query_tile;
    const source from = {.tile = t,
                         .start_k = (int)t->start_k,
                         .head_k = (int)t->head_kv * s->k_step.head,
                         .head_v = (int)t->head_kv * s->v_step.head,
                         .block_k = (int)t->block_k * s->k_step.block,
                         .block_v = (int)t->block_k * s->v_step.block};
    return from;
}

/* Waits until consumers have released the stage of tile `number`; returns its address. */
FA_DEVICE char *acquire_stage(const pipeline *pipe, tile_count number)
{
    const int stage = stage_of(number);
    __syncwarp(); /* no lane comes to a barrier two phases late */
    ptx_mbarrier_wait(&pipe->state->empty[stage], parity_of(number) ^ 1);
    return pipe->tiles + stage * TILE_BYTES;
}

/* Arrives at the barrier `full` of a tile of keys in place of the transposers, because keys only
 * wait for their loads: at that of a tile of values, each transposer arrives. */
FA_DEVICE void stand_for_transposers(uint64_t *full)
{
#pragma unroll
    for (int i = 1; i < TRANSPOSERS; i++) ptx_mbarrier_arrive_if(full, threadIdx.x % 32 == 0);
}

/* key: the tile's first key, counted from the sequence's first key. */
FA_DEVICE void load_key_tile(const pipeline *pipe, const fa_attention_params *p,
                             const fa_sm90_params *s, const source *from, int key,
                             tile_count number)
{
    const kv_box box = {key, KEYS, 0, K_BLOCKS};
    lane_rows own = {0, 0, 0};
    if (p->block_table) own = find_lane_rows(&box, p, s, from->tile);
    char *to = acquire_stage(pipe, number);
    uint64_t *full = &pipe->state->full[stage_of(number)];
    stand_for_transposers(full);
    if (p->block_table) {
        load_box(to, &s->k, &s->k_step, full, &box, &own, from->tile);
        return;
    }
    if (threadIdx.x % 32 != 0) return;
    ptx_mbarrier_arrive_expect(full, TILE_BYTES);
#pragma unroll
    for (int block = 0; block < K_BLOCKS; block++)
        ptx_tma_load_4d(to + block * K_BLOCK, &s->k, full, BLOCK_COLUMNS * block,
                        from->start_k + key, from->head_k, from->block_k);
}

/* Values are loaded in boxes of 32 keys (config.cuh). values: the number of tiles of values before
 * this one. */
FA_DEVICE void load_value_tile(const pipeline *pipe, const fa_attention_params *p,
                               const fa_sm90_params *s, const source *from, int key,
                               tile_count number, tile_count values)
{
    const kv_box all = {key, KEYS, 0, V_BLOCKS}, box = {key, 32, 0, V_BLOCKS};
    lane_rows own = {0, 0, 0};
    if (p->block_table) own = find_lane_rows(&all, p, s, from->tile);
    char *to = acquire_stage(pipe, number);
    uint64_t *loaded = &pipe->state->loaded[stage_of(values)];
    if (threadIdx.x % 32 == 0) ptx_mbarrier_arrive_expect(loaded, TILE_BYTES);
    if (p->block_table) {
        __syncwarp();
        if (own.at >= KEYS) return;
        to += own.at / 32 * V_BLOCK;
        own.at %= 32;
        issue_box(to, &s->v, &s->v_step, loaded, &box, &own, from->tile);
        return;
    }
    if (threadIdx.x % 32 != 0) return;
#pragma unroll 1
    for (int i = 0; i < KEYS; i += 32, to += V_BLOCK) {
#pragma unroll
        for (int block = 0; block < V_BLOCKS; block++)
            ptx_tma_load_4d(to + block * BOX_BYTES, &s->v, loaded, BLOCK_COLUMNS * block,
                            from->start_k + key + i, from->head_v, from->block_v);
    }
}

FA_DEVICE void load_all(const pipeline *pipe, const fa_attention_params *p, const fa_sm90_params *s)
{
    schedule_state schedule = {(int)threadIdx.x % 32, 0, true};
    tile_count count = 0, values = 0;
    for (int number = 0;; number++) {
        /* One work tile ahead, so that the other warps do not wait for a description. */
        while (schedule.more && schedule.number <= number + 1) describe_next(pipe, p, s, &schedule);
        const work_tile *w = acquire_work_tile(pipe, number);
        const int tiles = w->key_tiles;
        if (!tiles) {
            for (int c = 0; c < CONSUMERS; c++) produce_consumer_queries(pipe, s, w, c, number);
            return;
        }
        const source from = find_source(s, w);
        const int first = w->first_key;
        load_key_tile(pipe, p, s, &from, first, count++);
        for (int c = 0; c < CONSUMERS; c++) produce_consumer_queries(pipe, s, w, c, number);
        for (int tile = 0; tile < tiles; tile++) {
            if (tile + 1 < tiles)
                load_key_tile(pipe, p, s, &from, first + (tile + 1) * KEYS, count++);
            load_value_tile(pipe, p, s, &from, first + tile * KEYS, count++, values++);
        }
        release_work_tile(pipe, number);
    }
}

#endif
