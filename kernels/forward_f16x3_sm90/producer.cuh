/*
 * The load warp: describes the block's work tiles ahead, and loads queries, keys and values by TMA,
 * in the order in which they are needed.
 */
#ifndef FA_KERNELS_FORWARD_F16X3_SM90_PRODUCER_CUH
#define FA_KERNELS_FORWARD_F16X3_SM90_PRODUCER_CUH

#include "forward_f16x3_sm90/config.cuh"
#include "forward_f16x3_sm90/pipeline.cuh"
#include "common/device.cuh"
#include "forward_sm90/describe.cuh"
#include "forward_sm90/load.cuh"
#include "forward_sm90/scheduler.cuh"
#include "forward_sm90/stage.cuh"
#include "forward_sm90/work_tile.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"

/* The common numbers of all tiles of keys, or of values, of a work tile. They are computed once, so
 * that issuing a tile's loads takes less time than its products. */
typedef struct source {
    const fa_sm90_map *map;
    const fa_sm90_steps *step;
    int start, head, block; /* coordinates of the tensor map */
} source;

FA_DEVICE source find_source(const fa_sm90_map *map, const fa_sm90_steps *step, const fa_tile *t)
{
    const source from = {map, step, (int)t->start_k, (int)t->head_kv * step->head,
                         (int)t->block_k * step->block};
    return from;
}

/* Where the lane's rows of a tile are, if there are pages. key: the tile's first, counted from the
 * sequence's first. */
FA_DEVICE lane_rows find_tile_rows(const fa_attention_params *p, const fa_sm90_params *s,
                                   const fa_tile *t, int key)
{
    const kv_box box = {key, KEYS, 0, CHUNK_BLOCKS};
    const lane_rows none = {0, 0, 0};
    return p->block_table ? find_lane_rows(&box, p, s, t) : none;
}

/* The first column of a tile's chunk. */
FA_DEVICE int first_column(int chunk) { return FIRST_COLUMN + chunk * CHUNK_COLUMNS; }

/* Issues the copies of a tile's chunk. Executed by the whole warp. */
FA_DEVICE void issue_chunk(char *to, const fa_attention_params *p, const source *from,
                           const fa_tile *t, int key, int chunk, const lane_rows *own,
                           uint64_t *loaded)
{
    if (p->block_table) {
        const kv_box box = {key, KEYS, first_column(chunk), CHUNK_BLOCKS};
        load_box(to, from->map, from->step, loaded, &box, own, t);
        return;
    }
    if (threadIdx.x % 32 != 0) return;
    ptx_mbarrier_arrive_expect(loaded, CHUNK);
#pragma unroll
    for (int block = 0; block < CHUNK_BLOCKS; block++)
        ptx_tma_load_4d(to + block * K_BLOCK, from->map, loaded,
                        first_column(chunk) + BLOCK_COLUMNS * block, from->start + key, from->head,
                        from->block);
}

/* Loads a tile, chunk by chunk: each when consumers have released its stage. number: of the first
 * chunk. */
FA_DEVICE void load_tile(const pipeline *pipe, const fa_attention_params *p,
                         const fa_sm90_params *s, const source *from, const fa_tile *t, int key,
                         tile_count number)
{
    const lane_rows own = find_tile_rows(p, s, t, key);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++, number++) {
        const int stage = stage_of(number);
        __syncwarp(); /* no lane comes to a barrier two phases late */
        ptx_mbarrier_wait(&pipe->state->empty[stage], parity_of(number) ^ 1);
        issue_chunk(pipe->tiles + stage * CHUNK, p, from, t, key, chunk, &own,
                    &pipe->state->loaded[stage]);
    }
}

FA_DEVICE void load_all(const pipeline *pipe, const fa_attention_params *p, const fa_sm90_params *s)
{
    schedule_state schedule = {(int)threadIdx.x % 32, 0, true};
    tile_count count = 0;
    for (int number = 0;; number++) {
        /* One work tile ahead, so that the other warps do not wait for a description. */
        while (schedule.more && schedule.number <= number + 1) describe_next(pipe, p, s, &schedule);
        const work_tile *w = acquire_work_tile(pipe, number);
        const int tiles = w->key_tiles;
        if (!tiles) {
            for (int c = 0; c < CONSUMERS; c++) produce_consumer_queries(pipe, s, w, c, number);
            return;
        }
        const fa_tile *t = &w->query_tile;
        const source keys = find_source(&s->k, &s->k_step, t),
                     values = find_source(&s->v, &s->v_step, t);
        const int first = w->first_key;
        for (int tile = 0; tile < tiles; tile++) {
            load_tile(pipe, p, s, &keys, t, first + tile * KEYS, count);
            if (tile == 0)
                for (int c = 0; c < CONSUMERS; c++) produce_consumer_queries(pipe, s, w, c, number);
            load_tile(pipe, p, s, &values, t, first + tile * KEYS, count + CHUNKS);
            count += 2 * CHUNKS;
        }
        release_work_tile(pipe, number);
    }
}

#endif
