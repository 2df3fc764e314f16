/*
 * A schedule by shares: as many blocks as the device has room for, each with an equal share of all key tiles, across work
 * tiles and sequences. Lengths are known here alone.
 *
 *   slots    | work tile 0           | 1        | 2    | 3                           |
 *   blocks     0         | 1         | 2         | 3         | 4         | 5
 *
 * The work tiles of a sequence follow each other, and sequences do. A work tile has FA_DECODE_WORK_TILE_COST slots, and one
 * for each of its key tiles. Share b is slots [b * size, (b + 1) * size). Where a share ends in a work tile, that is cut
 * into parts, unless the place is within FA_DECODE_LEAST_TILES of its first or last key tile: then it goes to one of the two
 * shares whole. All of this follows from lengths and the grid, so each block finds the same parts, and a result is
 * the same in every run.
 *
 * Key/value heads are neighbours in memory. So d->abreast blocks that follow each other have the same share, each of
 * another head: they read the same rows at about the same time.
 *
 * Each thread counts the slots of some neighbouring sequences, and a scan over the block finds the sequence that a share
 * begins in.
 */
#ifndef FA_KERNELS_DECODE_SM80_SHARE_CUH
#define FA_KERNELS_DECODE_SM80_SHARE_CUH

#include "decode_sm80/config.cuh"
#include "decode_sm80/work.cuh"

#if HAS_SHARES
/* A block's share, in shared memory. */
typedef struct fa_share {
    int number, size;              /* the block's; slots of each */
    int next, end;                 /* the block's slots that are left */
    int item, item_from, item_end; /* the sequence that `next` is in, and its slots */
    int tiles, tile_slots; /* of its queries: tiles, and the slots of each with some heads */
    int warps[WARPS];      /* slots that each warp has counted */
} fa_share;

/* Packed: the rows in front of the first sequence and behind the last one count as two more, of which only zeros are
 * written (common/packed.h). In a mixed batch they are the other launch's. */
FA_DEVICE int items_around(const fa_decode_params *d)
{
    return d->attention.cu_seqlens_q && !d->most_queries ? 1 : 0;
}

FA_DEVICE void locate_item(const fa_decode_params *d, int item, fa_tile *t)
{
    const fa_attention_params *p = &d->attention;
    const int64_t b = item - items_around(d);
    if (b < 0 || b >= p->batch) {
        t->batch = t->block_q = t->block_k = t->start_k = t->n_q = t->n_k = 0;
        t->start_q = fa_packed_start(p, item);
        t->room_q = fa_max64(0, fa_packed_start(p, item + 1) - t->start_q);
    } else {
        fa_locate_sequence_of(p, b, 0, 0, t);
        if (d->most_queries && t->room_q > d->most_queries) t->room_q = t->n_q = 0;
        if (t->room_q < p->fewest_queries) t->room_q = t->n_q = 0;
    }
    if (p->block_table && d->pages == 0) t->n_k = 0;
    t->diagonal = p->diagonal_given ? p->diagonal : t->n_k - t->n_q;
}

/* Tiles of the item's queries, and slots of each with the query heads of a unit: as many as if it had all queries. */
FA_DEVICE int count_tile_slots(const fa_decode_params *d, int item, int *tiles)
{
    const fa_attention_params *p = &d->attention;
    fa_tile t;
    locate_item(d, item, &t);
    *tiles = (int)fa_divide(t.room_q + d->queries - 1, d->queries);
    if (t.n_q == 0) return FA_DECODE_WORK_TILE_COST;
    const fa_range first = fa_tile_visible(p, &t, 0), last = fa_tile_visible(p, &t, t.n_q - 1);
    if (last.hi <= first.lo) return FA_DECODE_WORK_TILE_COST;
    return FA_DECODE_WORK_TILE_COST + count_tiles((int)first.lo, (int)last.hi);
}

/* Work tiles of the same queries that a block has, one after the other. */
FA_DEVICE int count_units(const fa_decode_params *d)
{
    return (int)d->attention.heads_kv * d->chunks / d->abreast;
}

/* The sum of x over this lane and those in front of it. */
FA_DEVICE int sum_in_front(int x)
{
#pragma unroll
    for (int n = 1; n < 32; n *= 2) {
        const int other = __shfl_sync(0xffffffffu, x, max(lane_id() - n, 0));
        if (lane_id() >= n) x += other;
    }
    return x;
}

/* Finds slot s->next among the items [item, end), the first of which begins at `from`. */
FA_DEVICE void find_item(const fa_decode_params *d, fa_share *s, int next, int item, int end,
                         int from)
{
#pragma unroll 1
    for (; item < end; item++) {
        int tiles;
        const int tile_slots = count_tile_slots(d, item, &tiles);
        const int slots = tile_slots * tiles * count_units(d);
        if (next < from + slots) {
            s->item = item;
            s->item_from = from;
            s->item_end = from + slots;
            s->tiles = tiles;
            s->tile_slots = tile_slots;
            return;
        }
        from += slots;
    }
}

/* All threads: find the item of the next slot. begin: the block's first one, which follows from the sum of all. */
FA_DEVICE void scan_items(const fa_decode_params *d, fa_share *s, bool begin)
{
    const int items = (int)d->attention.batch + 2 * items_around(d);
    const int each = (items + THREADS - 1) / THREADS;
    const int first = min(items, ptx_thread_id() * each), end = min(items, first + each);
    int own = 0, all = 0;
#pragma unroll 1
    for (int i = first; i < end; i++) {
        int tiles;
        const int slots = count_tile_slots(d, i, &tiles);
        own += slots * tiles * count_units(d);
    }
    const int sum = sum_in_front(own);
    int from = sum - own;
    if (lane_id() == 31) s->warps[warp_id()] = sum;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
        if (i < warp_id()) from += s->warps[i];
        all += s->warps[i];
    }
    int next = begin ? 0 : s->next;
    if (begin) {
        const int shares = d->shares / d->abreast, number = (int)blockIdx.x / d->abreast;
        const int size = max(d->least, (all + shares - 1) / shares);
        next = min(all, number * size);
        if (ptx_thread_id() == 0) {
            s->number = number;
            s->size = size;
            s->next = next;
            s->end = min(all, next + size);
        }
    }
    if (next >= from && next < from + own) find_item(d, s, next, first, end, from);
    __syncthreads();
}

/* The block's part of a work tile whose first slot is `from`. There may be none: then it has no rows. */
FA_DEVICE void choose_part(const fa_decode_params *d, const fa_share *s, int from, fa_work *w)
{
    const int keys = from + FA_DECODE_WORK_TILE_COST;
    const int head = min(FA_DECODE_WORK_TILE_COST + FA_DECODE_LEAST_TILES, s->tile_slots);
    /* The shares that begin within the work tile's keys; the one in front of them has part 0. */
    const int first = (from + head + s->size - 1) / s->size;
    const int last = max(0, keys + w->tiles - FA_DECODE_LEAST_TILES) / s->size;
    const int parts = max(1, last - first + 2);
    w->part = s->number - (first - 1);
    w->task = (int)blockIdx.x - w->part * d->abreast;
    if (w->part < 0 || w->part >= parts) w->rows = 0;
    if (w->tiles == 0) return;
    w->parts = parts;
    w->before = w->part == 0 ? 0 : s->number * s->size - keys;
    w->count = (w->part == parts - 1 ? w->tiles : (s->number + 1) * s->size - keys) - w->before;
}

/* The work tile that the next slot is in. */
FA_DEVICE void describe_next(const fa_decode_params *d, fa_share *s, fa_work *w)
{
    const int number = (s->next - s->item_from) / s->tile_slots, unit = number / s->tiles;
    const int from = s->item_from + number * s->tile_slots;
    locate_item(d, s->item, &w->tile);
    locate_heads(d, unit * d->abreast + (int)blockIdx.x % d->abreast, w);
    w->tile.first = (int64_t)(number - unit * s->tiles) * d->queries;
    count_rows(d, w);
    describe_keys(d, w);
    choose_part(d, s, from, w);
    s->next = from + s->tile_slots;
}

/* Goes on to the next work tile of the block's share. False: there is none. */
FA_DEVICE bool find_next(const fa_decode_params *d, fa_share *s, fa_work *w)
{
    const int next = s->next, end = s->end, item_end = s->item_end;
    __syncthreads(); /* all have read this, and are done with the work tile before */
    if (next >= end) return false;
    if (next >= item_end) scan_items(d, s, false);
    if (ptx_thread_id() == 0) describe_next(d, s, w);
    __syncthreads();
    return true;
}
#endif

#endif
