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

/* A key tile that is being loaded. */
typedef struct tile_to_load {
    const work_tile *w;
    int tile;
    tile_count count; /* of tiles so far, through all work tiles */
} tile_to_load;

FA_DEVICE void load_key_tile(const pipeline *pipe, const fa_attention_params *p,
                             const fa_sm90_params *s, const tile_to_load *at)
{
    const work_tile *w = at->w;
    const int stage = stage_of(at->count);
    const kv_box box = {w->first_key + at->tile * KEYS, KEYS, 0, K_BLOCKS};
    const lane_rows own = find_lane_rows(&box, p, s, &w->query_tile);
    __syncwarp(); /* no lane comes to a barrier two phases late */
    ptx_mbarrier_wait(&pipe->state->k_empty[stage], parity_of(at->count) ^ 1);
    load_box(pipe->k + stage * K_BYTES, &s->k, &s->k_step, &pipe->state->k_full[stage], &box, &own,
             &w->query_tile);
}

/* cleared: see load_values. */
FA_DEVICE void load_value_tile(const pipeline *pipe, const fa_attention_params *p,
                               const fa_sm90_params *s, const tile_to_load *at, int *cleared)
{
    const int stage = stage_of(at->count);
    const kv_box box = {at->w->first_key + at->tile * KEYS, KEYS, 0, V_BLOCKS};
    const lane_rows own = find_lane_rows(&box, p, s, &at->w->query_tile);
    __syncwarp();
    ptx_mbarrier_wait(&pipe->state->v_empty[stage], parity_of(at->count) ^ 1);
    load_values(pipe, p, s, &at->w->query_tile, &box, &own, pipe->v + stage * V_BYTES,
                &pipe->state->v_full[stage], cleared);
}

/* The first work tile. With sections, its first keys and its queries are known before all of its description. */
FA_DEVICE const work_tile *acquire_first_keys(const pipeline *pipe, const fa_sm90_params *s)
{
#if SPLIT
    if (s->split.sections) {
        ptx_mbarrier_wait(&pipe->state->first_full, 0);
        if (pipe->state->first.key_tiles) return &pipe->state->first;
    }
#else
    (void)s;
#endif
    return acquire_work_tile(pipe, 0);
}

/* Behind a key tile: that was all that is known of the first work tile before its description. */
FA_DEVICE void acquire_description(const pipeline *pipe, tile_to_load *at)
{
    if (SPLIT && at->count == 0) at->w = acquire_work_tile(pipe, 0);
}

#if TAKES_LATE
/* Tells the scheduler, once for each work tile, that its last key tiles come next. */
FA_DEVICE void announce_last_keys(const pipeline *pipe, const tile_to_load *at, int number,
                                  bool leader)
{
    if (at->tile != max(at->w->key_tiles - LAST_KEY_TILES, 0)) return;
    ptx_mbarrier_arrive_if(&pipe->state->nearly_loaded[number % WORK_TILES_AHEAD], leader);
}
#endif

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
    tile_to_load at = {acquire_first_keys(pipe, s), 0, 0};
    int number = 0;
    while (at.w->key_tiles) {
        for (at.tile = 0; at.tile < at.w->key_tiles; at.tile++, at.count++) {
            load_key_tile(pipe, p, s, &at);
            for (int c = 0; c < CONSUMERS && at.tile == 0; c++)
                produce_consumer_queries(pipe, s, at.w, c, number);
            acquire_description(pipe, &at);
#if TAKES_LATE
            announce_last_keys(pipe, &at, number, threadIdx.x % 32 == 0);
#endif
        }
        release_work_tile(pipe, number);
        at.w = acquire_work_tile(pipe, ++number);
    }
    for (int c = 0; c < CONSUMERS; c++) produce_consumer_queries(pipe, s, at.w, c, number);
}

FA_DEVICE void produce_values(const pipeline *pipe, const fa_attention_params *p,
                              const fa_sm90_params *s)
{
    prefetch_map(&s->v);
    int cleared = 0, number = 0;
    tile_to_load at = {acquire_first_keys(pipe, s), 0, 0};
    while (at.w->key_tiles) {
        for (at.tile = 0; at.tile < at.w->key_tiles; at.tile++, at.count++) {
            load_value_tile(pipe, p, s, &at, &cleared);
            acquire_description(pipe, &at);
        }
        release_work_tile(pipe, number);
        at.w = acquire_work_tile(pipe, ++number);
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
