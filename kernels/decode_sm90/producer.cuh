/*
 * The producer: a warp that loads the block's key tiles by TMA. A block of columns of a tile, 128 bytes
 * wide, is one box, or several boxes if pages are smaller. Each lane has a box of each stage.
 *
 * Boxes are complete: a box with rows that are seen may also contain rows that no query sees. The
 * consumers hide such keys and clear such values.
 */
#ifndef FA_KERNELS_DECODE_SM90_PRODUCER_CUH
#define FA_KERNELS_DECODE_SM90_PRODUCER_CUH

#include "decode_sm90/config.cuh"

#include "decode_sm90/pipeline.cuh"
#include "ptx/tma.cuh"

/* This lane's box of a tile: coordinates of the maps. */
typedef struct fa_box {
    int row, page;
    bool wanted; /* some row of it is seen */
} fa_box;

/* The lane's block of columns in a stage, and its box's first row. A row beyond the tile: it has no box. */
FA_DEVICE int own_block(void) { return lane_id() % STAGE_DIM_BLOCKS; }
FA_DEVICE int own_row(const fa_decode_sm90_params *s)
{
    return lane_id() / STAGE_DIM_BLOCKS * s->box_rows;
}

/* Reads only the page table. The page number is checked when it is needed (page_of). early: the grid in front may still
 * write the table. */
FA_DEVICE fa_box find_box(const fa_decode_params *d, const fa_decode_sm90_params *s,
                          const fa_work *w, int first, bool early)
{
    const fa_attention_params *p = &d->attention;
    const int key = first + own_row(s);
    fa_box box = {(int)w->tile.start_k + key, (int)w->tile.block_k, false};
    box.wanted = own_row(s) < BLOCK_KEYS && key < w->to && key + s->box_rows > w->from;
    if (!p->block_table || !box.wanted) return box;
    const uint32_t page = (uint32_t)fa_divide_by(key, s->divisors.page_rows);
    const int32_t *entry = p->block_table + w->tile.batch * p->block_table_stride + page;
    box.page = early ? ptx_read_latest(entry) : *entry;
    box.row = key - (int)(page * (uint32_t)p->rows_k);
    return box;
}

/* A wrong entry is clamped to a valid page. */
FA_DEVICE int page_of(const fa_decode_params *d, const fa_box *box)
{
    if (!d->attention.block_table) return box->page;
    return fa_clamp_page(&d->attention, box->page);
}

#if EIGHT_BITS
/* Where the scales of the lane's box start: the offset of its first row, in floats. */
FA_DEVICE int64_t find_box_scales(const fa_decode_params *d, const fa_kernel_view *scale,
                                  const fa_box *box, int page, int first)
{
    if (!d->attention.block_table) return (int64_t)first * scale->stride[1];
    return page * scale->stride[0] + box->row * scale->stride[1];
}

/* Copies the scales of a tile of keys or values to its first stage, whose barrier waits for them
 * (load_tile); zeros for keys that no query sees. of: the scale of row 0 of the sequence, or of page 0;
 * NULL: there are none. box, page: of the lane; without pages a tile is one box. */
FA_DEVICE void load_scales(const pipeline *pipe, const fa_decode_params *d,
                           const fa_decode_sm90_params *s, const fa_work *w,
                           const fa_kernel_view *scale, const char *of, int first,
                           const fa_box *box, int page, fa_place at)
{
    const uint32_t to = scales_at(pipe, &at) + (uint32_t)(4 * lane_id());
    const char *const own = of + 4 * find_box_scales(d, scale, box, page, first);
    const int64_t stride = 4 * scale->stride[1];
    if (!of) return;
    __syncwarp(); /* no lane comes to a barrier two phases late */
    ptx_mbarrier_wait(&pipe->state->empty[at.stage], at.parity ^ 1);
#pragma unroll
    for (int i = 0; i < BLOCK_KEYS; i += 32) {
        const int key = i + lane_id();
        const char *const from =
            (const char *)__shfl_sync(0xffffffffu, (uint64_t)own, key >> s->box_shift);
        ptx_cp_async_4(to + (uint32_t)(4 * i), from + stride * (key & (s->box_rows - 1)),
                       first + key >= w->from && first + key < w->to);
    }
}
#endif

/* Loads a tile of keys, or of values. */
FA_DEVICE void load_tile(const pipeline *pipe, const fa_decode_sm90_params *s,
                         const fa_sm90_map *map, const fa_sm90_steps *step, int head,
                         const fa_box *box, int page, fa_place *at)
{
    const int boxes = __popc(__ballot_sync(0xffffffffu, box->wanted));
    const int offset = own_block() * DIM_BLOCK_BYTES + own_row(s) * 128;
#pragma unroll
    for (int i = 0; i < TILE_STAGES; i++, go_on(pipe, at)) {
        uint64_t *full = &pipe->state->full[at->stage];
        const int column = DIM_BLOCK_COLUMNS * (i * STAGE_DIM_BLOCKS + own_block());
        char *to = stage_at(pipe, at) + offset;
        __syncwarp(); /* no lane comes to a barrier two phases late */
        ptx_mbarrier_wait(&pipe->state->empty[at->stage], at->parity ^ 1);
        if (lane_id() == 0) ptx_mbarrier_arrive_expect(full, boxes * s->box_rows * 128);
        if (EIGHT_BITS) ptx_mbarrier_arrive_behind_copies(full);
        __syncwarp();
        if (!box->wanted) continue;
#if READ_ONCE
        ptx_tma_load_4d_once(to, map, full, column, box->row, head, page * step->block);
#else
        ptx_tma_load_4d(to, map, full, column, box->row, head, page * step->block);
#endif
    }
}

/* Prefetches a box of a tile of keys, or of values, into the second-level cache. */
FA_DEVICE void prefetch_box(const fa_sm90_map *map, const fa_sm90_steps *step, int head,
                            const fa_box *box, int page)
{
#pragma unroll
    for (int i = 0; i < TILE_STAGES; i++)
        ptx_tma_prefetch_4d(map, DIM_BLOCK_COLUMNS * (i * STAGE_DIM_BLOCKS + own_block()), box->row,
                            head * step->head, page * step->block);
}

/* Prefetches the first key tile of the part while the grid in front ends. What that grid still writes is not lost: loads
 * see it. More tiles would take memory from that grid. */
FA_DEVICE void prefetch_first_tile(const fa_decode_params *d, const fa_decode_sm90_params *s,
                                   const fa_work *w)
{
    if (w->part >= w->parts) return;
    const fa_box box = find_box(d, s, w, find_key_tiles(w).first, true);
    if (!box.wanted) return;
    const int page = page_of(d, &box), head = (int)w->tile.head_kv;
    prefetch_box(&s->k, &s->k_step, head, &box, page);
    prefetch_box(&s->v, &s->v_step, head, &box, page);
}

/* Page numbers are read two tiles before they are needed. at: advances past the part's tiles. */
FA_DEVICE void produce(const pipeline *pipe, const fa_decode_params *d,
                       const fa_decode_sm90_params *s, const fa_work *w, fa_place *at)
{
    const key_tiles tiles = find_key_tiles(w);
    const int head = (int)w->tile.head_kv;
    fa_box box = find_box(d, s, w, tiles.first, false);
    fa_box next = find_box(d, s, w, tiles.first + BLOCK_KEYS, false);
#pragma unroll 1
    for (int n = 0; n < tiles.count; n++) {
        const fa_box after = find_box(d, s, w, tiles.first + (n + 2) * BLOCK_KEYS, false);
        const int page = page_of(d, &box);
#if EIGHT_BITS
        const int first = tiles.first + n * BLOCK_KEYS;
        load_scales(pipe, d, s, w, &d->attention.k_scale, w->k_scale, first, &box, page, *at);
#endif
        load_tile(pipe, s, &s->k, &s->k_step, head * s->k_step.head, &box, page, at);
#if EIGHT_BITS
        load_scales(pipe, d, s, w, &d->attention.v_scale, w->v_scale, first, &box, page, *at);
#endif
        load_tile(pipe, s, &s->v, &s->v_step, head * s->v_step.head, &box, page, at);
        box = next;
        next = after;
    }
}

#endif
