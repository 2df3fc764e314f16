/*
 * The load warp: brings queries, keys and values to shared memory by TMA, in the order in which they are needed.
 */
#ifndef FA_KERNELS_FORWARD_TF32_SM90_PRODUCER_CUH
#define FA_KERNELS_FORWARD_TF32_SM90_PRODUCER_CUH

#include "forward_tf32_sm90/config.cuh"
#include "forward_tf32_sm90/pipeline.cuh"
#include "common/device.cuh"
#include "forward_sm90/load.cuh"
#include "forward_sm90/scheduler.cuh"
#include "forward_sm90/stage.cuh"
#include "forward_sm90/work_tile.cuh"
#include "ptx/barrier.cuh"

/* key: the tile's first, counted from the sequence's first. count: of tiles so far, through all work tiles. */
FA_DEVICE void load_key_tile(const pipeline *pipe, const fa_attention_params *p,
                             const fa_sm90_params *s, const fa_tile *t, int key, tile_count count)
{
    const int stage = stage_of(count);
    const kv_box box = {key, KEYS, 0, K_BLOCKS};
    __syncwarp(); /* no lane comes to a barrier two phases late */
    ptx_mbarrier_wait(&pipe->state->k_empty[stage], parity_of(count) ^ 1);
    if (threadIdx.x % 32 == 0)
        load_box(pipe->k + stage * K_BYTES, &s->k, &s->k_step, &pipe->state->k_loaded[stage], &box,
                 p, s, t);
}

/* Values come in pieces of 32 keys (config.cuh). */
FA_DEVICE void load_value_tile(const pipeline *pipe, const fa_attention_params *p,
                               const fa_sm90_params *s, const fa_tile *t, int key, tile_count count)
{
    const int stage = stage_of(count);
    __syncwarp();
    ptx_mbarrier_wait(&pipe->state->v_empty[stage], parity_of(count) ^ 1);
    if (threadIdx.x % 32 != 0) return;
    for (int i = 0; i < KEYS / 32; i++) {
        const kv_box box = {key + 32 * i, 32, 0, V_BLOCKS};
        load_box(pipe->v + stage * V_BYTES + i * V_BLOCK, &s->v, &s->v_step,
                 &pipe->state->v_loaded[stage], &box, p, s, t);
    }
}

/* The keys of each tile come before the values of the one before, as consumers need them. */
FA_DEVICE void load_all(const pipeline *pipe, const fa_attention_params *p, const fa_sm90_params *s)
{
    tile_count count = 0;
    int number = 0;
    const work_tile *w = acquire_work_tile(pipe, 0);
    for (int tiles; (tiles = w->key_tiles); w = acquire_work_tile(pipe, ++number)) {
        const fa_tile *t = &w->query_tile;
        const int first = w->first_key;
        load_key_tile(pipe, p, s, t, first, count);
        for (int c = 0; c < CONSUMERS; c++) produce_consumer_queries(pipe, s, w, c, number);
        for (int tile = 0; tile < tiles; tile++, count++) {
            if (tile + 1 < tiles)
                load_key_tile(pipe, p, s, t, first + (tile + 1) * KEYS, count + 1);
            load_value_tile(pipe, p, s, t, first + tile * KEYS, count);
        }
        release_work_tile(pipe, number);
    }
    for (int c = 0; c < CONSUMERS; c++) produce_consumer_queries(pipe, s, w, c, number);
}

#endif
