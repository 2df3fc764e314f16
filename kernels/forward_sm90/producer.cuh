/*
 * The producer warps: one loads queries and keys, one loads values, and one loads a bias if TMA can load it. Each
 * fills the next stage as soon as all consumers have released it.
 *
 * Keys and values have separate warps, so that neither waits for a stage of the other: with one warp for both, the
 * kernel lost a fifth of its speed.
 */
#ifndef FA_KERNELS_FORWARD_SM90_PRODUCER_CUH
#define FA_KERNELS_FORWARD_SM90_PRODUCER_CUH

#include "forward_sm90/config.cuh"
#include "common/device.cuh"
#include "forward_sm90/load.cuh"
#include "forward_sm90/load_values.cuh"
#include "forward_sm90/pipeline.cuh"
#include "forward_sm90/scheduler.cuh"
#include "forward_sm90/stage.cuh"
#include "forward_sm90/work_tile.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"

/* Loads the key tile from this key on. count: of tiles so far, through all work tiles. */
FA_DEVICE void load_key_tile(const pipeline *pipe, const fa_attention_params *p,
                             const fa_sm90_params *s, const fa_tile *t, int key, tile_count count)
{
    const int stage = stage_of(count);
    const kv_box box = {key, KEYS, 0, K_BLOCKS};
    const lane_rows own = find_lane_rows(&box, p, s, t);
    __syncwarp(); /* no lane comes to a barrier two phases late */
    ptx_mbarrier_wait(&pipe->state->k_empty[stage], parity_of(count) ^ 1);
    load_box(pipe->k + stage * K_BYTES, &s->k, &s->k_step, &pipe->state->k_full[stage], &box, &own,
             t);
}

/* cleared: see load_values. */
FA_DEVICE void load_value_tile(const pipeline *pipe, const fa_attention_params *p,
                               const fa_sm90_params *s, const fa_tile *t, int key, tile_count count,
                               int *cleared)
{
    const int stage = stage_of(count);
    const kv_box box = {key, KEYS, 0, V_BLOCKS};
    const lane_rows own = find_lane_rows(&box, p, s, t);
    __syncwarp();
    ptx_mbarrier_wait(&pipe->state->v_empty[stage], parity_of(count) ^ 1);
    load_values(pipe, p, s, t, &box, &own, pipe->v + stage * V_BYTES, &pipe->state->v_full[stage],
                cleared);
}

/* With sections: the block's first queries and keys, if they are known before the first work tile has been described. NULL: they
 * are loaded with the work tile. */
FA_DEVICE const fa_tile *acquire_first_keys(const pipeline *pipe, const fa_sm90_params *s, int *key)
{
#if SPLIT
    const first_keys *first = &pipe->state->first;
    if (s->split.sections == 0) return NULL;
    ptx_mbarrier_wait(&pipe->state->first_full, 0);
    *key = first->first_key;
    return first->key_tiles ? &first->query_tile : NULL;
#else
    (void)pipe, (void)s, (void)key;
    return NULL;
#endif
}

/* While the first work tile is being described: the first load would wait for the map. */
FA_DEVICE void prefetch_map(const fa_sm90_map *map)
{
    if (threadIdx.x % 32 == 0) ptx_tma_prefetch(map);
}

/* The first key tile is loaded before the queries, whose stages consumers release later. */
FA_DEVICE void produce_queries_and_keys(const pipeline *pipe, const fa_attention_params *p,
                                        const fa_sm90_params *s)
{
    prefetch_map(&s->k);
    prefetch_map(&s->q);
    int number = 0, key;
    tile_count count = 0;
    const fa_tile *first = acquire_first_keys(pipe, s, &key);
    if (first) {
        load_key_tile(pipe, p, s, first, key, 0);
        for (int c = 0; c < CONSUMERS && threadIdx.x % 32 == 0; c++)
            load_queries(pipe, s, first, c, 0);
    }
    const work_tile *w = acquire_work_tile(pipe, 0);
    while (w->key_tiles) {
        for (int tile = 0; tile < w->key_tiles; tile++, count++) {
            if (first && count == 0) continue;
            load_key_tile(pipe, p, s, &w->query_tile, w->first_key + tile * KEYS, count);
            for (int c = 0; c < CONSUMERS && tile == 0; c++)
                produce_consumer_queries(pipe, s, w, c, number);
        }
        release_work_tile(pipe, number);
        w = acquire_work_tile(pipe, ++number);
    }
    for (int c = 0; c < CONSUMERS; c++) produce_consumer_queries(pipe, s, w, c, number);
}

FA_DEVICE void produce_values(const pipeline *pipe, const fa_attention_params *p,
                              const fa_sm90_params *s)
{
    prefetch_map(&s->v);
    int cleared = 0, number = 0, key;
    tile_count count = 0;
    const fa_tile *first = acquire_first_keys(pipe, s, &key);
    if (first) load_value_tile(pipe, p, s, first, key, 0, &cleared);
    const work_tile *w = acquire_work_tile(pipe, 0);
    while (w->key_tiles) {
        for (int tile = 0; tile < w->key_tiles; tile++, count++)
            if (!first || count > 0)
                load_value_tile(pipe, p, s, &w->query_tile, w->first_key + tile * KEYS, count,
                                &cleared);
        release_work_tile(pipe, number);
        w = acquire_work_tile(pipe, ++number);
    }
}

#if OPTIONS & FA_SM90_BIAS

/* Loads the bias of a key tile, for a consumer that needs the tile. loaded: counts the biases that it has got so far. */
FA_DEVICE void load_bias(const pipeline *pipe, const fa_sm90_params *s, const work_tile *w,
                         int tile, int consumer, int *loaded)
{
    uint64_t *full = &pipe->state->bias_full[consumer];
    const int row = (int)w->query_tile.first + consumer * ROWS, key = w->first_key + tile * KEYS;
    if (tile >= w->needed[consumer]) return;
    ptx_mbarrier_wait(&pipe->state->bias_empty[consumer], (*loaded & 1) ^ 1);
    *loaded += 1;
    if (threadIdx.x % 32 != 0) return;
    ptx_mbarrier_arrive_expect(full, BIAS_BYTES);
#pragma unroll
    for (int block = 0; block < KEYS / 64; block++)
        ptx_tma_load_4d(pipe->bias + consumer * BIAS_BYTES + block * BIAS_BLOCK, &s->bias, full,
                        key + 64 * block, row, (int)w->query_tile.head * s->bias_step.head,
                        (int)w->query_tile.batch * s->bias_step.block);
}

/* A bias comes from global memory, while keys and values come from the cache. So it has its own warp, which does not
 * delay them. */
FA_DEVICE void produce_bias(const pipeline *pipe, const fa_sm90_params *s)
{
    int loaded[CONSUMERS] = {0}, number = 0;
    const work_tile *w = acquire_work_tile(pipe, 0);
    while (w->key_tiles) {
        for (int tile = 0; tile < w->key_tiles; tile++) {
            __syncwarp();
#pragma unroll
            for (int c = 0; c < CONSUMERS; c++) load_bias(pipe, s, w, tile, c, &loaded[c]);
        }
        release_work_tile(pipe, number);
        w = acquire_work_tile(pipe, ++number);
    }
}

#endif

#endif
