/*
 * The producer: a warp that loads the block's key tiles by TMA, each once, as keys and as values. A
 * block of 64 columns is one box, or several where pages are smaller than a key tile: then as many
 * of the warpgroup's warps have a box each, and with pages of 8 two lanes of each. A lane's copies
 * would follow each other.
 *
 * Boxes are always complete. Rows that nobody sees are read all the same, where there are some, and
 * cleared by the consumer of scores.
 */
#ifndef FA_KERNELS_DECODE_LATENT_SM90_PRODUCER_CUH
#define FA_KERNELS_DECODE_LATENT_SM90_PRODUCER_CUH

#include "decode_latent_sm90/config.cuh"

#include "decode_latent_sm90/pipeline.cuh"
#include "ptx/tma.cuh"

/* The first row of this lane's box in a tile; beyond it: the lane has none. */
FA_DEVICE int first_row_of_box(const fa_decode_latent_sm90_params *s)
{
    return (ptx_thread_id() / 32 + lane_id() * GROUP_WARPS) * s->box_rows;
}

/* Where this lane's box of a tile begins: coordinates of the map. */
typedef struct fa_box {
    int row, outer;
} fa_box;

/* The box whose first row is this key. early: the page table may still be written. Beside it nothing is read, and a wrong
 * entry leads to some other page. */
FA_DEVICE fa_box find_box(const fa_decode_params *d, const fa_decode_latent_sm90_params *s,
                          const fa_work *w, int key, bool early)
{
    const fa_attention_params *p = &d->attention;
    fa_box box = {(int)w->tile.start_k + key, (int)w->tile.block_k * s->k_step.block};
    if (!p->block_table) return box;
    box.row = box.outer = 0;
    if (key >= w->to || key + s->box_rows <= w->from) return box;
    const uint32_t page = (uint32_t)fa_divide_by(key, s->divisors.page_rows);
    const int32_t *entry = &p->block_table[w->tile.batch * p->block_table_stride + page];
    box.row = key - (int)(page * (uint32_t)p->rows_k);
    box.outer = fa_clamp_page(p, early ? ptx_read_latest(entry) : *entry) * s->k_step.block;
    return box;
}

/* Blocks of columns from `block` on, to a stage whose phase this begins. Each warp that loads says
 * what comes by its boxes, and by those of the same warp of the peer. The blocks of a cluster take
 * turns: the block of columns number i is loaded by the one of rank (first + i) % 2, for both. */
FA_DEVICE void load_blocks(const pipeline *pipe, const fa_decode_latent_sm90_params *s,
                           const fa_work *w, const fa_box *box, int block, int blocks, int first,
                           char *to, uint64_t *full)
{
    const int x = BLOCK_COLUMNS * block, z = (int)w->tile.head_kv * s->k_step.head;
    const int at = first_row_of_box(s);
    if (lane_id() == 0)
        ptx_mbarrier_arrive_expect(full, blocks * rows_of_warp(s) * BLOCK_COLUMNS * 2);
    __syncwarp();
    if (at >= KEYS) return;
    if (pipe->cluster == 1) {
        for (int i = 0; i < blocks; i++)
            ptx_tma_load_4d(to + i * BLOCK_BYTES + at * 128, &s->k, full, x + BLOCK_COLUMNS * i,
                            box->row, z, box->outer);
        return;
    }
    const int i = (pipe->rank ^ first) & 1;
    if (i < blocks)
        ptx_tma_load_4d_blocks(to + i * BLOCK_BYTES + at * 128, &s->k, full, x + BLOCK_COLUMNS * i,
                               box->row, z, box->outer, 3);
}

/* Tile n, in the order in which its scores are computed. */
FA_DEVICE void load_tile(const pipeline *pipe, const fa_decode_latent_sm90_params *s,
                         const fa_work *w, const fa_box *box, int n)
{
    shared_state *state = pipe->state;
    __syncwarp(); /* no lane comes to a barrier two phases late */
    ptx_mbarrier_wait(&state->tail_empty[tail_stage(n)], tail_parity(n) ^ 1);
    load_blocks(pipe, s, w, box, V_BLOCKS, 1, n, tail_at(pipe, n),
                &state->tail_full[tail_stage(n)]);
    for (int place = 0; place < V_PAIRS; place++) {
        const uint32_t count = pair_count(n, place);
        __syncwarp();
        if (count == STAGES - QUERY_STAGES) ptx_mbarrier_wait(&state->queries_taken, 0);
        ptx_mbarrier_wait(&state->pair_empty[stage_of(count)], parity_of(count) ^ 1);
        load_blocks(pipe, s, w, box, first_block_of(place), 2, 0, pair_at(pipe, count),
                    &state->pair_full[stage_of(count)]);
    }
}

/* Tiles from the one that is loaded to the one that is asked for. */
enum { TILES_AHEAD = 2 };

/* Asks for a box of each block of columns to be brought to the second-level cache. rank: blocks of a cluster take turns. */
FA_DEVICE void prefetch_box(const fa_decode_latent_sm90_params *s, const fa_work *w, int rank,
                            const fa_box *box)
{
    for (int i = rank; i < K_BLOCKS; i += s->cluster)
        ptx_tma_prefetch_4d(&s->k, BLOCK_COLUMNS * i, box->row,
                            (int)w->tile.head_kv * s->k_step.head, box->outer);
}

/* The first tile, by one thread, while the grid in front ends. What that grid still writes is not lost: loads see it. */
FA_DEVICE void prefetch_first_tile(const fa_decode_params *d, const fa_decode_latent_sm90_params *s,
                                   const fa_work *w, int rank)
{
    if (w->rows == 0 || w->part >= w->parts) return;
    const int first = find_key_tiles(w).first;
#pragma unroll 1
    for (int row = 0; row < KEYS; row += s->box_rows) {
        const fa_box box = find_box(d, s, w, first + row, true);
        prefetch_box(s, w, rank, &box);
    }
}

/* Page numbers are read a tile before they are needed. */
FA_DEVICE void produce(const pipeline *pipe, const fa_decode_params *d,
                       const fa_decode_latent_sm90_params *s)
{
    const fa_work *w = &pipe->state->work;
    const key_tiles tiles = find_key_tiles(w);
    const int first_row = tiles.first + first_row_of_box(s); /* of this lane's boxes */
    fa_box boxes[TILES_AHEAD + 1];                           /* of tiles from n on */
#pragma unroll
    for (int i = 0; i <= TILES_AHEAD; i++)
        boxes[i] = find_box(d, s, w, first_row + i * KEYS, false);
    for (int n = 0; n < tiles.count; n++) {
        const fa_box next = find_box(d, s, w, first_row + (n + TILES_AHEAD + 1) * KEYS, false);
        load_tile(pipe, s, w, &boxes[0], n);
        if (n + TILES_AHEAD < tiles.count && first_row_of_box(s) < KEYS)
            prefetch_box(s, w, pipe->rank, &boxes[TILES_AHEAD]);
#pragma unroll
        for (int i = 0; i < TILES_AHEAD; i++) boxes[i] = boxes[i + 1];
        boxes[TILES_AHEAD] = next;
    }
}

#endif
