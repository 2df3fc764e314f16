/*
 * Copies to shared memory. Each warp has its own pipeline: it issues the copies of its key tiles,
 * waits for them and multiplies, without a barrier of the block. Keys and values are separate
 * groups of copies. The stage of either is filled again as soon as it is no longer used.
 *
 *      K 0  V 0  K 1  V 1 | S 0  K 2 | O 0  V 2 | S 1  K 3 | O 1  V 3 | ...
 *
 * Rows that no row of the work tile sees are not read: zeros are stored instead.
 */
#ifndef FA_KERNELS_DECODE_SM80_LOAD_CUH
#define FA_KERNELS_DECODE_SM80_LOAD_CUH

#include "decode_sm80/config.cuh"

#if !LATENT && !EIGHT_BITS /* 8-bit caches: bytes_load.cuh */
#include "common/rows.cuh"
#include "common/x2.cuh"
#include "decode_sm80/copied_tile.cuh"
#include "decode_sm80/queries.cuh"
#include "decode_sm80/work.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"

/* ---- Queries --------------------------------------------------------------------------------- */

/* All threads load the rows of the work tile; zeros for rows without a query. */
FA_DEVICE void load_queries(const fa_decode_params *d, const fa_work *w, uint32_t tile)
{
#pragma unroll 1
    for (int i = ptx_thread_id(); i < ROWS * QUERY_VECTORS; i += THREADS) {
        const int r = i / QUERY_VECTORS, column = i % QUERY_VECTORS * 8;
        ptx_st_shared_v4(tile + (uint32_t)(r * PITCH + column * 2), fetch_eight(d, w, r, column));
    }
}

/* ---- Keys and values ------------------------------------------------------------------------- */

/* The place of key `first + lane % KEYS`: its page and its row there; without pages, page 0. */
typedef struct fa_place {
    int page, row;
} fa_place;

FA_DEVICE fa_place find_place(const fa_decode_params *d, const fa_work *w,
                              const fa_key_tiles *tiles, int first)
{
    const fa_attention_params *p = &d->attention;
    fa_place at = {0, first + lane_id() % KEYS};
    if (!p->block_table || !is_seen(tiles, at.row)) return at;
    const uint32_t key = (uint32_t)at.row, size = (uint32_t)p->rows_k, number = key / size;
    at.page = fa_clamp_page(p, p->block_table[w->tile.batch * p->block_table_stride + number]);
    at.row = (int)(key - number * size);
    return at;
}

/* Row r of a tile, if there are pages. The warp's lanes hold the places. */
FA_DEVICE const char *find_row(const fa_kernel_view *v, const char *first, fa_place at, int r)
{
    const int page = __shfl_sync(0xffffffffu, at.page, r);
    const int row = __shfl_sync(0xffffffffu, at.row, r);
    return first + 2 * (page * v->stride[0] + row * v->stride[1]);
}

/* Copies rows that are not aligned. key: the tile's first one, as below. */
FA_DEVICE void gather_rows(const fa_key_tiles *tiles, const fa_kernel_view *v, const char *first,
                           fa_place at, int key, int columns, uint32_t to)
{
    const int column = VECTOR * copied_vector();
#pragma unroll 1
    for (int r = copied_row(); r < KEYS; r += ROWS_A_PASS, to += ROWS_A_PASS * PITCH) {
        const char *row = find_row(v, first, at, r);
        uint4 x = make_uint4(0, 0, 0, 0);
        if (column < columns && is_seen(tiles, key + r)) x = fa_gather_vector(row, column, columns);
        ptx_st_shared_v4(to, x);
    }
}

/* Issues the copies of a tile of keys or values. If rows are not aligned, copies them immediately.
 * first: row 0 of the sequence, or of page 0. */
FA_DEVICE void issue_rows(const fa_decode_params *d, const fa_key_tiles *tiles,
                          const fa_kernel_view *v, const char *first, fa_place at, int key,
                          int columns, uint32_t tile)
{
    const int column = VECTOR * copied_vector();
    const uint32_t to = tile + (uint32_t)(copied_row() * PITCH + copied_vector() * 16);
    if (v->vector != VECTOR) {
        gather_rows(tiles, v, first, at, key, columns, to);
        return;
    }
    const int from = column < columns ? tiles->from - key : KEYS, end = tiles->to - key;
    if (d->attention.block_table) {
#pragma unroll 4
        for (int pass = 0; pass < PASSES; pass++) {
            const int r = pass * ROWS_A_PASS + copied_row();
            ptx_cp_async_16_once(to + (uint32_t)(pass * ROWS_A_PASS * PITCH),
                                 find_row(v, first, at, r) + 2 * column, r >= from && r < end);
        }
        return;
    }
    const char *row = first + 2 * ((key + copied_row()) * v->stride[1] + column);
    const int64_t ahead = 2 * ROWS_A_PASS * v->stride[1];
#pragma unroll 4
    for (int pass = 0; pass < PASSES; pass++, row += ahead) {
        const int r = pass * ROWS_A_PASS + copied_row();
        ptx_cp_async_16_once(to + (uint32_t)(pass * ROWS_A_PASS * PITCH), row,
                             r >= from && r < end);
    }
}

/* ---- The pipeline of a warp ------------------------------------------------------------------ */

/* The places of the tile that is issued now, and of the next one: page numbers are read one tile
 * ahead. */
typedef struct fa_places {
    fa_place now, next;
} fa_places;

FA_DEVICE void issue_keys(const fa_decode_params *d, const fa_work *w, const fa_key_tiles *tiles,
                          const fa_memory *at, int n, const fa_places *places)
{
    if (n < tiles->count)
        issue_rows(d, tiles, &d->attention.k, w->k, places->now, tiles->first + n * BLOCK_KEYS,
                   d->attention.d, at->k + (uint32_t)(n % STAGES * TILE_BYTES));
    ptx_cp_async_commit();
}

/* Also advances to the places of tile n + 1. */
FA_DEVICE void issue_values(const fa_decode_params *d, const fa_work *w, const fa_key_tiles *tiles,
                            const fa_memory *at, int n, fa_places *places)
{
    if (n < tiles->count)
        issue_rows(d, tiles, &d->attention.v, w->v, places->now, tiles->first + n * BLOCK_KEYS,
                   d->attention.d_v, at->v + (uint32_t)(n % STAGES * TILE_BYTES));
    ptx_cp_async_commit();
    places->now = places->next;
    places->next = find_place(d, w, tiles, tiles->first + (n + 2) * BLOCK_KEYS);
}

/* The first STAGES tiles. */
FA_DEVICE void begin_pipeline(const fa_decode_params *d, const fa_work *w,
                              const fa_key_tiles *tiles, const fa_memory *at, fa_places *places)
{
    places->now = find_place(d, w, tiles, tiles->first);
    places->next = find_place(d, w, tiles, tiles->first + BLOCK_KEYS);
#pragma unroll
    for (int n = 0; n < STAGES; n++) {
        issue_keys(d, w, tiles, at, n, places);
        issue_values(d, w, tiles, at, n, places);
    }
}
#endif

#endif
