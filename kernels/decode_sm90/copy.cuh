/*
 * The producer where keys and values are in pages too small for TMA: four warps copy rows by cp.async, 16 bytes at a
 * time. A warp copies a quarter of the rows of each tile. Its lanes hold their places: the page numbers are read two
 * tiles before they are needed.
 *
 * Rows that no row of the work tile sees, and columns after the last, become zeros.
 */
#ifndef FA_KERNELS_DECODE_SM90_COPY_CUH
#define FA_KERNELS_DECODE_SM90_COPY_CUH

#include "decode_sm90/config.cuh"

#if COPIED
#include "decode_sm90/pipeline.cuh"
#include "decode_sm90/values.cuh"
#include "ptx/cp_async.cuh"

enum {
    COPY_WARPS = (THREADS - CONSUMER_THREADS) / 32,
    WARP_ROWS = KEYS / COPY_WARPS,      /* of a tile */
    ROW_VECTORS = 8 * STAGE_DIM_BLOCKS, /* of a stage: 16 bytes each */
    ROWS_AT_ONCE = 32 / ROW_VECTORS,    /* that the lanes of a warp copy */
    COPIES = WARP_ROWS / ROWS_AT_ONCE   /* of a thread, to a stage */
};
static_assert(WARP_ROWS <= 32, "a lane for each row");
static_assert(32 % ROW_VECTORS == 0 && WARP_ROWS % ROWS_AT_ONCE == 0, "whole rows");

/* The lane's row of the warp's rows of a tile. */
typedef struct fa_row_place {
    int row, page;
    bool wanted; /* some row of the work tile sees it */
} fa_row_place;

FA_DEVICE int first_copied_row(void) { return (warp_id() - CONSUMER_WARPS) * WARP_ROWS; }

/* Reads only the page table. The page number is checked when it is needed. */
FA_DEVICE fa_row_place find_row_place(const fa_decode_params *d, const fa_decode_sm90_params *s,
                                      const fa_work *w, int first)
{
    const fa_attention_params *p = &d->attention;
    const int key = first + first_copied_row() + lane_id();
    fa_row_place at = {key, 0, lane_id() < WARP_ROWS && key >= w->from && key < w->to};
    if (!p->block_table || !at.wanted) return at;
    const int number = (int)fa_divide_by(key, s->divisors.page_rows);
    at.page = p->block_table[w->tile.batch * p->block_table_stride + number];
    at.row = key - number * (int)p->rows_k;
    return at;
}

/* The address of the lane's row. of: row 0 of the sequence, or of page 0. */
FA_DEVICE uint64_t address_of(const fa_decode_params *d, const fa_kernel_view *v, const char *of,
                              const fa_row_place *at)
{
    if (!at->wanted) return 0;
    const int page = d->attention.block_table ? fa_clamp_page(&d->attention, at->page) : 0;
    return (uint64_t)(of + 2 * (page * v->stride[0] + at->row * v->stride[1]));
}

/* Copies the warp's rows of a tile of keys, or of values. address: of the lane's row; 0: zeros. */
FA_DEVICE void copy_tile(const pipeline *pipe, uint64_t address, int columns, fa_place *at)
{
    const int vector = lane_id() % ROW_VECTORS, own = lane_id() / ROW_VECTORS;
#pragma unroll
    for (int i = 0; i < TILE_STAGES; i++, go_on(pipe, at)) {
        const int column = 8 * (i * ROW_VECTORS + vector);
        const uint32_t stage =
            ptx_shared_address(stage_at(pipe, at)) + (uint32_t)(vector / 8 * DIM_BLOCK_BYTES);
        ptx_mbarrier_wait(&pipe->state->empty[at->stage], at->parity ^ 1);
#pragma unroll
        for (int n = 0; n < COPIES; n++) {
            const int row = n * ROWS_AT_ONCE + own;
            const uint64_t from = __shfl_sync(0xffffffffu, address, row);
            ptx_cp_async_16_once(stage + swizzled(first_copied_row() + row, vector % 8),
                                 (const char *)from + 2 * column, from && column < columns);
        }
        ptx_mbarrier_arrive_behind_copies(&pipe->state->full[at->stage]);
    }
}

/* Nothing is prefetched: the first copies are issued a little later. */
FA_DEVICE void prefetch_first_tile(const fa_decode_params *d, const fa_decode_sm90_params *s,
                                   const fa_work *w)
{
    (void)d, (void)s, (void)w;
}

/* at: advances past the part's tiles. */
FA_DEVICE void produce(const pipeline *pipe, const fa_decode_params *d,
                       const fa_decode_sm90_params *s, const fa_work *w, fa_place *at)
{
    const fa_attention_params *p = &d->attention;
    const key_tiles tiles = find_key_tiles(w);
    fa_row_place now = find_row_place(d, s, w, tiles.first);
    fa_row_place next = find_row_place(d, s, w, tiles.first + BLOCK_KEYS);
#pragma unroll 1
    for (int n = 0; n < tiles.count; n++) {
        const fa_row_place after = find_row_place(d, s, w, tiles.first + (n + 2) * BLOCK_KEYS);
        copy_tile(pipe, address_of(d, &p->k, w->k, &now), p->d, at);
        copy_tile(pipe, address_of(d, &p->v, w->v, &now), p->d_v, at);
        now = next;
        next = after;
    }
}
#endif

#endif
