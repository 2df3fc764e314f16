/* Which sequence and which queries a block works on, and where they are in memory. Lengths are read here, on the
 * device, and clamped to the tensors. common/packed.h defines the numbering of tiles of packed queries. */
#ifndef FA_KERNELS_COMMON_SEQUENCE_CUH
#define FA_KERNELS_COMMON_SEQUENCE_CUH

#include "common/divide.h"
#include "common/packed.h"
#include "common/rows.cuh"

/* How the lengths of keys are read. Kernels that do so before the grid in front has ended define it as ptx_read_latest. */
#ifndef FA_READ_LENGTH
#define FA_READ_LENGTH(at) (*(at))
#endif

typedef struct fa_tile {
    int64_t batch, head, head_kv;
    int64_t first;            /* the tile's first query                                   */
    int64_t block_q, start_q; /* where query 0 of the sequence is */
    int64_t n_q;              /* queries of the sequence                                  */
    int64_t room_q;           /* rows that are its own: those from n_q on get zeros       */
    int64_t block_k, start_k, n_k;
    int64_t diagonal;
} fa_tile;

/* Where the number of query i of the sequence is in lse, dlse and delta. */
FA_DEVICE int64_t fa_row_index(const fa_attention_params *p, const fa_tile *t, int64_t i)
{
    return (t->block_q * p->heads_q + t->head) * p->rows_q + t->start_q + i;
}

/* The first row of packed sequence s - 1; s = 0 and s = batch + 1 are the rows of no sequence. */
FA_DEVICE int64_t fa_packed_start(const fa_attention_params *p, int64_t s)
{
    if (s == 0) return 0;
    if (s > p->batch + 1) return p->rows_q;
    return fa_max64(0, fa_min64(p->cu_seqlens_q[s - 1], p->rows_q));
}

/* The last sequence whose first tile is not after this one. */
FA_DEVICE int64_t fa_find_packed(const fa_attention_params *p, int64_t tile, int rows)
{
    int64_t low = 0, high = p->batch + 2;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (FA_PACKED_FIRST_TILE(fa_packed_start(p, middle), rows, middle) <= tile) low = middle;
        else high = middle;
    }
    return low;
}

FA_DEVICE void fa_locate_packed(const fa_attention_params *p, int64_t tile, int rows, fa_tile *t)
{
    int64_t s = fa_find_packed(p, tile, rows);
    t->block_q = 0;
    t->start_q = fa_packed_start(p, s);
    t->room_q = fa_max64(0, fa_packed_start(p, s + 1) - t->start_q);
    t->first = (tile - FA_PACKED_FIRST_TILE(t->start_q, rows, s)) * rows;
    bool sequence = s > 0 && s <= p->batch;
    if (sequence && t->room_q < p->fewest_queries) t->room_q = 0;
    t->batch = sequence ? s - 1 : 0;
    t->n_q = sequence ? t->room_q : 0;
    if (sequence && p->seqlens_q) t->n_q = fa_max64(0, fa_min64(p->seqlens_q[t->batch], t->room_q));
}

FA_DEVICE void fa_locate_padded(const fa_attention_params *p, int64_t tile, int rows, fa_tile *t)
{
    t->block_q = t->batch;
    t->start_q = 0;
    t->room_q = t->n_q = p->rows_q;
    t->first = tile * rows;
    if (p->seqlens_q) t->n_q = fa_max64(0, fa_min64(p->seqlens_q[t->batch], p->rows_q));
}

/* Whether any lengths are in memory. */
FA_DEVICE bool fa_reads_lengths(const fa_attention_params *p)
{
    return p->cu_seqlens_q || p->cu_seqlens_k || p->seqlens_q || p->seqlens_k;
}

FA_DEVICE void fa_locate_keys(const fa_attention_params *p, fa_tile *t)
{
    t->block_k = t->batch;
    t->start_k = 0;
    t->n_k = p->max_k;
    if (t->n_q == 0) {
        t->n_k = 0;
        return;
    }
    if (p->cu_seqlens_k) {
        int64_t start = p->cu_seqlens_k[t->batch], end = p->cu_seqlens_k[t->batch + 1];
        t->block_k = 0;
        t->start_k = fa_max64(0, start);
        t->n_k = fa_max64(0, fa_min64(end, p->rows_k) - t->start_k);
    }
    if (p->seqlens_k)
        t->n_k = fa_max64(0, fa_min64(FA_READ_LENGTH(p->seqlens_k + t->batch), t->n_k));
}

/* Finds the batch item and head of a task, and returns the tile's number among their tiles. A head's last tile comes
 * first, because it is the longest under a causal mask. */
FA_DEVICE int64_t fa_locate_task(const fa_attention_params *p, int64_t task, fa_tile *t)
{
    if (p->tasks >> 31 || p->heads_q >> 16) {
        const int64_t outer = fa_divide(task, p->tiles);
        t->batch = fa_divide(outer, p->heads_q);
        t->head = outer - t->batch * p->heads_q;
        t->head_kv = fa_divide(t->head, fa_divide(p->heads_q, p->heads_kv));
        return p->tiles - 1 - (task - outer * p->tiles);
    }
    /* In 32 bits and without branches, because the block waits for the result. */
    const uint32_t tiles = (uint32_t)p->tiles, heads = (uint32_t)p->heads_q;
    const uint32_t outer = (uint32_t)task / tiles, batch = outer / heads;
    const uint32_t head = outer - batch * heads;
    t->batch = batch;
    t->head = head;
    t->head_kv = p->heads_kv == p->heads_q ? head : head * (uint32_t)p->heads_kv / heads;
    return tiles - 1 - ((uint32_t)task - outer * tiles);
}

/* Task number `task`, for tiles of this many rows. */
FA_DEVICE fa_tile fa_find_tile(const fa_attention_params *p, int64_t task, int rows)
{
    fa_tile t;
    const int64_t tile = fa_locate_task(p, task, &t);
    if (p->cu_seqlens_q) fa_locate_packed(p, tile, rows, &t);
    else fa_locate_padded(p, tile, rows, &t);
    fa_locate_keys(p, &t);
    t.diagonal = p->diagonal_given ? p->diagonal : t.n_k - t.n_q;
    return t;
}

/* Where the queries and keys of sequence b, a query head and its key/value head are. Does not set the tile's first query. */
FA_DEVICE void fa_locate_sequence_of(const fa_attention_params *p, int64_t b, int64_t head,
                                     int64_t head_kv, fa_tile *t)
{
    t->batch = b;
    t->head = head;
    t->head_kv = head_kv;
    if (p->cu_seqlens_q) {
        t->block_q = 0;
        t->start_q = fa_packed_start(p, b + 1);
        t->first = 0;
        t->room_q = t->n_q = fa_max64(0, fa_packed_start(p, b + 2) - t->start_q);
        if (p->seqlens_q) t->n_q = fa_max64(0, fa_min64(p->seqlens_q[b], t->room_q));
    } else {
        fa_locate_padded(p, 0, 1, t);
    }
    fa_locate_keys(p, t);
    t->diagonal = p->diagonal_given ? p->diagonal : t->n_k - t->n_q;
}

FA_DEVICE void fa_locate_sequence(const fa_attention_params *p, int64_t b, int64_t head, fa_tile *t)
{
    fa_locate_sequence_of(p, b, head, fa_divide(head, fa_divide(p->heads_q, p->heads_kv)), t);
}

/* Kernels that support chunked attention define this; the planners of other kernels refuse it. */
#ifndef HAS_ATTENTION_CHUNKS
#define HAS_ATTENTION_CHUNKS 0
#endif

/* By causal masks and windows only. */
FA_DEVICE fa_range fa_tile_unchunked(const fa_attention_params *p, const fa_tile *t, int64_t i)
{
    return fa_visible_keys(p->causal, p->window_left, p->window_right, t->n_k, i + t->diagonal);
}

FA_DEVICE fa_range fa_tile_visible(const fa_attention_params *p, const fa_tile *t, int64_t i)
{
    const fa_range r = fa_tile_unchunked(p, t, i);
#if HAS_ATTENTION_CHUNKS
    if (p->attention_chunk) {
        const int64_t chunk = p->attention_chunk, center = i + t->diagonal;
        const int64_t start = center < 0 ? 0 : fa_divide(center, chunk) * chunk;
        return fa_visible_in_chunk(r, chunk, center, start);
    }
#endif
    return r;
}

/* A number of the block table, clamped to the pages of the cache: a wrong one leads to some other page.
 * Not called if the cache has no pages. */
FA_DEVICE int32_t fa_clamp_page(const fa_attention_params *p, int32_t page)
{
    /* Of several ways to write this, nvcc 13.0 spills least with this one. */
    return page < p->pages ? max(0, page) : (int32_t)p->pages - 1;
}

/* Row j of a sequence's keys or values: through the page table if there is one. */
FA_DEVICE const char *fa_key_row(const fa_attention_params *p, const fa_kernel_view *v,
                                 const fa_tile *t, int64_t j)
{
    if (!p->block_table) return fa_view_row(v, t->block_k, t->start_k + j, t->head_kv);
    const int64_t page = fa_divide(j, p->rows_k), row = j - page * p->rows_k;
    const int32_t entry = p->block_table[t->batch * p->block_table_stride + page];
    return fa_view_row(v, fa_clamp_page(p, entry), row, t->head_kv);
}

#endif
