/*
 * Copies keys and values of 8 bits to shared memory: the pipeline of load.cuh, with the same names.
 * The number of its instructions matters as much as that of the products. So a tile that is seen
 * whole has its own code, where a copy takes one more instruction, or two if there are pages:
 *
 *   without pages  each lane advances along its column by a multiple of the stride
 *   with pages     each lane knows the place of one key's row, in units of 16 bytes from the first
 *                  page, and passes it to the other lanes
 *
 * Other tiles, rows that are not aligned, and strides beyond 32 bits are copied in a loop.
 */
#ifndef FA_KERNELS_DECODE_SM80_BYTES_LOAD_CUH
#define FA_KERNELS_DECODE_SM80_BYTES_LOAD_CUH

#include "decode_sm80/config.cuh"

#if EIGHT_BITS
#include "decode_sm80/copied_tile.cuh"
#include "decode_sm80/work.cuh"
#include "ptx/convert.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"
#include "ptx/thread.cuh"

/* There are as many lanes as a tile has keys, so there are as many passes as a row has vectors. */
static_assert(KEYS == 32 && (int)PASSES == (int)ROW_VECTORS, "a lane for each key");

/* The key of a tile whose place this lane knows. Lanes `pass` of every ROW_VECTORS lanes know the
 * keys of pass `pass`. */
FA_DEVICE int known_key(void) { return copied_vector() * ROWS_A_PASS + copied_row(); }

/* Gets what is known about the row that this lane copies in a pass. */
FA_DEVICE uint32_t ask(uint32_t known, int pass)
{
    return ptx_shuffle_within(known, pass, ROW_VECTORS);
}

/* Tiles of a warp, by their numbers. */
typedef struct fa_span {
    int first;
    uint32_t count;
} fa_span;

FA_DEVICE bool is_within(fa_span span, int n) { return (uint32_t)(n - span.first) < span.count; }

/* The tiles that have no key outside [from, to). */
FA_DEVICE fa_span find_span(const fa_key_tiles *tiles, int from, int to)
{
    const int before = max(from - tiles->first, 0), inside = to - KEYS - tiles->first;
    const int first = (before + BLOCK_KEYS - 1) / BLOCK_KEYS;
    const int end = inside < 0 ? 0 : min(inside / BLOCK_KEYS + 1, tiles->count);
    return (fa_span){first, (uint32_t)max(end - first, 0)};
}

/* A page and a row there. */
typedef struct fa_place {
    int page, row;
} fa_place;

/* Whether a block has registers for the position of a lane's vector in a tile. */
#define KEEPS_PLACES (HEAD_DIM == 128 && M_TILES == 1)

/* Where the next tile comes from. */
typedef struct fa_places {
    fa_span quick;        /* tiles that are seen whole, of aligned rows, with offsets of 32 bits */
    const char *k, *v;    /* this lane's vector: in the tile's first row; in pages, of page 0 */
    uint32_t ahead;       /* keys from there to the next tile; 0 in pages */
    uint32_t to;          /* the position of this lane's first vector in a tile */
    bool has_k, has_v;    /* this lane's vector is one of a row's */
    const int32_t *table; /* of the sequence's pages; NULL: no pages. Of pages alone: */
    fa_place now, next; /* this lane's key in this tile and in the next one, which is read ahead */
    /* In the following tile: its page's number in the table, its row in the page. */
    int number, row;
    int numbers, rows; /* from there to the next tile */
} fa_places;

/* Whether all offsets, in units of this many elements, fit into 32 bits. */
FA_DEVICE bool fits(const fa_decode_params *d, const fa_work *w, const fa_kernel_view *v, int unit)
{
    const bool paged = d->attention.block_table;
    const int64_t end = paged
                            ? d->attention.pages * v->stride[0] + d->attention.rows_k * v->stride[1]
                            : w->to * v->stride[1];
    return v->stride[0] >= 0 && v->stride[1] >= 0 && v->stride[1] <= INT32_MAX &&
           end / unit <= UINT32_MAX;
}

/* Whether some row sees a key. The bounds are read again each time, because registers are
 * scarce. */
FA_DEVICE bool some_see(const fa_work *w, int key) { return key >= w->from && key < w->to; }

/* Makes the places of the next tile current, and reads those of tile n. */
FA_DEVICE void find_places(const fa_decode_params *d, const fa_work *w, const fa_key_tiles *tiles,
                           int n, fa_places *p)
{
    if (!p->table) return;
    p->now = p->next;
    p->next = (fa_place){0, p->row};
    if (some_see(w, tiles->first + n * BLOCK_KEYS + known_key()))
        p->next.page = fa_clamp_page(&d->attention, p->table[p->number]);
    p->number += p->numbers;
    p->row += p->rows;
    if (p->row >= (int)d->attention.rows_k) {
        p->row -= (int)d->attention.rows_k;
        p->number++;
    }
}

FA_DEVICE void begin_pages(const fa_decode_params *d, const fa_work *w, const fa_key_tiles *tiles,
                           fa_places *p)
{
    const fa_attention_params *a = &d->attention;
    p->table = NULL;
    p->now = p->next = (fa_place){0, 0};
    p->number = p->row = p->numbers = p->rows = 0;
    if (!a->block_table) return;
    const uint32_t size = (uint32_t)a->rows_k, key = (uint32_t)(tiles->first + known_key());
    p->table = a->block_table + w->tile.batch * a->block_table_stride;
    p->number = (int)(key / size);
    p->row = (int)(key % size);
    p->numbers = (int)(BLOCK_KEYS / size);
    p->rows = (int)(BLOCK_KEYS % size);
    find_places(d, w, tiles, 0, p);
    find_places(d, w, tiles, 1, p);
}

FA_DEVICE void begin_places(const fa_decode_params *d, const fa_work *w, const fa_key_tiles *tiles,
                            fa_places *p)
{
    const fa_attention_params *a = &d->attention;
    const int column = VECTOR * copied_vector();
    const int64_t row = a->block_table ? 0 : tiles->first + copied_row();
    begin_pages(d, w, tiles, p);
    p->quick = find_span(tiles, tiles->from, tiles->to);
    if (a->k.vector != VECTOR || a->v.vector != VECTOR || !fits(d, w, &a->k, 16) ||
        !fits(d, w, &a->v, 16) || (w->k_scale && !fits(d, w, &a->k_scale, 1)) ||
        (w->v_scale && !fits(d, w, &a->v_scale, 1)))
        p->quick.count = 0;
    p->k = w->k + row * a->k.stride[1] + column;
    p->v = w->v + row * a->v.stride[1] + column;
    p->ahead = a->block_table ? 0 : BLOCK_KEYS;
    p->to = vector_at(copied_row(), copied_vector());
    p->has_k = column < a->d;
    p->has_v = column < a->d_v;
}

/* ---- Rows ------------------------------------------------------------------------------------ */

/* Where this lane's vector of a pass is in a tile. The bits of a pass and of its first row do not
 * overlap, so their swizzles combine. */
FA_DEVICE uint32_t at_pass(uint32_t tile, uint32_t to, int pass)
{
    return tile + (to ^ (uint32_t)(turn_of(pass * ROWS_A_PASS) * 16)) +
           (uint32_t)(pass * ROWS_A_PASS * PITCH);
}

/* A vector of a row that is not aligned to 16 bytes or that ends within the vector. */
FA_DEVICE uint4 gather_vector(const fa_kernel_view *v, const char *row, int column, int columns)
{
    uint32_t x[4] = {0, 0, 0, 0};
    if (v->vector == 8) {
        const uint2 low = *(const uint2 *)(row + column);
        uint2 high = make_uint2(0, 0);
        if (column + 8 < columns) high = *(const uint2 *)(row + column + 8);
        return make_uint4(low.x, low.y, high.x, high.y);
    }
#pragma unroll
    for (int i = 0; i < 16; i++)
        if (column + i < columns)
            x[i / 4] |= (uint32_t)((const uint8_t *)row)[column + i] << i % 4 * 8;
    return make_uint4(x[0], x[1], x[2], x[3]);
}

/* Copies any tile. first: row 0 of the sequence, or of page 0. */
FA_DEVICE void issue_any_rows(const fa_work *w, const fa_key_tiles *tiles, const fa_kernel_view *v,
                              const char *first, const fa_places *p, int n, int columns,
                              uint32_t tile)
{
    const int column = VECTOR * copied_vector(), key = tiles->first + n * BLOCK_KEYS;
#pragma unroll 1
    for (int pass = 0; pass < PASSES; pass++) {
        const int r = pass * ROWS_A_PASS + copied_row();
        const int64_t page = p->table ? (int)ask((uint32_t)p->now.page, pass) : 0;
        const int64_t row = p->table ? (int)ask((uint32_t)p->now.row, pass) : key + r;
        const char *from = first + page * v->stride[0] + row * v->stride[1];
        const bool wanted = column < columns && some_see(w, key + r);
        const uint32_t to = tile + vector_at(r, copied_vector());
        uint4 x = make_uint4(0, 0, 0, 0);
        if (v->vector == VECTOR) {
            ptx_cp_async_16_once(to, from + column, wanted);
            continue;
        }
        if (wanted) x = gather_vector(v, from, column, columns);
        ptx_st_shared_v4(to, x);
    }
}

/* Copies a tile that is seen whole. vector: this lane's, as in fa_places. */
FA_DEVICE void issue_whole_rows(const fa_kernel_view *v, const char *vector, const fa_places *p,
                                bool has, uint32_t tile)
{
    const uint32_t to = KEEPS_PLACES ? p->to : vector_at(copied_row(), copied_vector());
    if (p->table) {
        const uint32_t known = (uint32_t)p->now.page * (uint32_t)(v->stride[0] / 16) +
                               (uint32_t)p->now.row * (uint32_t)(v->stride[1] / 16);
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++)
            ptx_cp_async_16_once(at_pass(tile, to, pass),
                                 vector + ptx_mul_wide(ask(known, pass), 16), has);
        return;
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++)
        ptx_cp_async_16_once(
            at_pass(tile, to, pass),
            vector + ptx_mul_wide((uint32_t)v->stride[1], (uint32_t)(pass * ROWS_A_PASS)), has);
}

/* ---- Scales ---------------------------------------------------------------------------------- */

/* Issues the copies of the scales of a tile's keys or values, to the memory after their elements;
 * zeros for keys that are not seen. first: the scale of row 0 of the sequence, or of page 0; quick:
 * whether the tile is seen whole, as in fa_places. */
FA_DEVICE void issue_scales(const fa_work *w, const fa_key_tiles *tiles,
                            const fa_kernel_view *scale, const char *first, const fa_places *p,
                            int n, bool quick, uint32_t tile)
{
    const int key = tiles->first + n * BLOCK_KEYS + known_key(), row = p->table ? p->now.row : key;
    const char *from;
    if (quick)
        from = first + ptx_mul_wide((uint32_t)p->now.page * (uint32_t)scale->stride[0] +
                                        (uint32_t)row * (uint32_t)scale->stride[1],
                                    4);
    else from = first + 4 * (p->now.page * scale->stride[0] + row * scale->stride[1]);
    ptx_cp_async_4(tile + (uint32_t)(KEYS * PITCH + 4 * known_key()), from,
                   quick || some_see(w, key));
}

/* ---- The pipeline of a warp ------------------------------------------------------------------ */

/* Copies tile n, if it exists, to `tile`. */
FA_DEVICE void issue_keys(const fa_decode_params *d, const fa_work *w, const fa_key_tiles *tiles,
                          int n, bool scaled, uint32_t tile, fa_places *p)
{
    const fa_attention_params *a = &d->attention;
    if (is_within(p->quick, n)) {
        issue_whole_rows(&a->k, p->k, p, p->has_k, tile);
        if (scaled) issue_scales(w, tiles, &a->k_scale, w->k_scale, p, n, true, tile);
    } else if (n < tiles->count) {
        issue_any_rows(w, tiles, &a->k, w->k, p, n, a->d, tile);
        if (scaled) issue_scales(w, tiles, &a->k_scale, w->k_scale, p, n, false, tile);
    }
    p->k += ptx_mul_wide((uint32_t)a->k.stride[1], p->ahead);
    ptx_cp_async_commit();
}

/* Also advances to the places of tile n + 1. */
FA_DEVICE void issue_values(const fa_decode_params *d, const fa_work *w, const fa_key_tiles *tiles,
                            int n, bool scaled, uint32_t tile, fa_places *p)
{
    const fa_attention_params *a = &d->attention;
    if (is_within(p->quick, n)) {
        issue_whole_rows(&a->v, p->v, p, p->has_v, tile);
        if (scaled) issue_scales(w, tiles, &a->v_scale, w->v_scale, p, n, true, tile);
    } else if (n < tiles->count) {
        issue_any_rows(w, tiles, &a->v, w->v, p, n, a->d_v, tile);
        if (scaled) issue_scales(w, tiles, &a->v_scale, w->v_scale, p, n, false, tile);
    }
    p->v += ptx_mul_wide((uint32_t)a->v.stride[1], p->ahead);
    ptx_cp_async_commit();
    find_places(d, w, tiles, n + 2, p);
}

/* The first STAGES tiles. */
FA_DEVICE void begin_pipeline(const fa_decode_params *d, const fa_work *w,
                              const fa_key_tiles *tiles, const fa_memory *at, fa_places *p)
{
    begin_places(d, w, tiles, p);
#pragma unroll 1
    for (int n = 0; n < STAGES; n++) {
        issue_keys(d, w, tiles, n, w->k_scale, at->k + (uint32_t)(n * TILE_BYTES), p);
        issue_values(d, w, tiles, n, w->v_scale, at->v + (uint32_t)(n * TILE_BYTES), p);
    }
}
#endif

#endif
