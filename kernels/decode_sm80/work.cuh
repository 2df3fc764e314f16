/*
 * The work of a block: some queries of a sequence, some query heads that share a key/value head,
 * and a part of the keys that they see. The number of parts that have keys follows from the
 * sequence's own length, which is read here. A block without keys ends at once.
 */
#ifndef FA_KERNELS_DECODE_SM80_WORK_CUH
#define FA_KERNELS_DECODE_SM80_WORK_CUH

#include "common/divide.h"
#include "common/score_options.cuh"
#include "common/sequence.cuh"
#include "decode_sm80/config.cuh"

/* Positions count from the sequence's first key. The struct is in shared memory, because products
 * need the registers. */
typedef struct fa_work {
    fa_tile tile;         /* with the first head */
    int heads, queries;   /* that exist */
    int rows;             /* that are written: also those after the last query, which get zeros */
    int from, to;         /* keys that some row sees */
    int all_from, all_to; /* keys that all rows see */
    int start;            /* the first key of key tile 0 */
    int per_part;         /* key tiles of a part */
    int parts, tiles;     /* of all keys */
    int part;             /* the block's */
    int64_t task;
    const char *k, *v; /* row 0 of the sequence's keys and values, or of page 0 */
#if EIGHT_BITS
    const char *k_scale, *v_scale; /* the scales of these rows; NULL: all keys have the same one */
    /* Factors of scores and of the output, which include such a scale. */
    float scale, value_scale;
#endif
#if SHARES_ROWS
    int first_row; /* the first row that the block merges */
#endif
} fa_work;

/* The first row of a work tile that a block merges. */
#if SHARES_ROWS
#define FIRST_ROW(w) ((w)->first_row)
#else
#define FIRST_ROW(w) 0
#endif

/* Row r is query r / d->heads of the tile and head r % d->heads. */
#ifndef FEW_ROWS
FA_DEVICE int query_of(const fa_decode_params *d, int r) { return r / d->heads; }
FA_DEVICE int head_of(const fa_decode_params *d, int r) { return r % d->heads; }
#else
/* The same by a factor, which is exact for so few rows: each row of a thread would need a division otherwise, and a block that
 * runs its code once waits for its instructions. */
FA_DEVICE int query_of(const fa_decode_params *d, int r)
{
    return r * (int)((4095u + (uint32_t)d->heads) / (uint32_t)d->heads) >> 12;
}
FA_DEVICE int head_of(const fa_decode_params *d, int r) { return r - query_of(d, r) * d->heads; }
#endif

/* A tile of a packed sequence whose batch item is known. Tiles of sequences that another launch
 * computes have no rows. */
FA_DEVICE void locate_few(const fa_decode_params *d, int64_t tile, fa_tile *t)
{
    const fa_attention_params *p = &d->attention;
    fa_locate_sequence_of(p, t->batch, t->head, t->head_kv, t);
    t->first = tile * d->queries;
    if (t->room_q > d->most_queries || t->room_q < p->fewest_queries) t->room_q = t->n_q = 0;
}

/* a / b, where b is a constant of the launch. by: the launch's divisors, or NULL. */
#define DIVIDE(a, b, name) (by ? fa_divide_by(a, by->name) : fa_divide(a, b))

/* The sequence and its lengths; the tile's first query and head. */
FA_DEVICE void locate(const fa_decode_params *d, const fa_decode_divisors *by, int64_t task,
                      fa_work *w)
{
    const fa_attention_params *p = &d->attention;
    fa_tile *t = &w->tile;
    const int64_t outer = DIVIDE(task, p->tiles, tiles), tile = task - outer * p->tiles;
    const int64_t units = by ? by->units_of_batch : p->heads_kv * d->chunks;
    t->batch = DIVIDE(outer, units, units);
    const int64_t unit = outer - t->batch * units;
    t->head_kv = DIVIDE(unit, d->chunks, chunks);
    const int64_t group = by ? by->group : fa_divide(p->heads_q, p->heads_kv);
    const int64_t first = (unit - t->head_kv * d->chunks) * d->heads;
    t->head = t->head_kv * group + first;
    w->heads = (int)fa_min64(d->heads, group - first);
    if (d->most_queries) {
        locate_few(d, tile, t);
    } else {
        if (p->cu_seqlens_q) fa_locate_packed(p, tile, d->queries, t);
        else fa_locate_padded(p, tile, d->queries, t);
        fa_locate_keys(p, t);
    }
    t->diagonal = p->diagonal_given ? p->diagonal : t->n_k - t->n_q;
    w->queries = (int)fa_max64(0, fa_min64(d->queries, t->n_q - t->first));
    w->rows = d->heads * (int)fa_max64(0, fa_min64(d->queries, t->room_q - t->first));
}

FA_DEVICE const char *first_row(const fa_decode_params *d, const fa_kernel_view *v,
                                const fa_tile *t)
{
    const bool paged = d->attention.block_table;
    return fa_view_row(v, paged ? 0 : t->block_k, paged ? 0 : t->start_k, t->head_kv);
}

#if EIGHT_BITS
/* The first scale of a sequence's keys, or of page 0, if scales differ between keys. Otherwise
 * NULL: the scale is multiplied into the factor. */
FA_DEVICE const char *find_scale(const fa_decode_params *d, const fa_kernel_view *scale,
                                 const fa_tile *t, float *factor)
{
    if (!scale->data) return NULL;
    const char *first = first_row(d, scale, t);
    if (scale->stride[1] != 0 || (d->attention.block_table && scale->stride[0] != 0)) return first;
    *factor *= *(const float *)(const void *)first;
    return NULL;
}

FA_DEVICE void find_scales(const fa_decode_params *d, fa_work *w)
{
    w->scale = fa_effective_scale(&d->attention, &w->tile);
    w->value_scale = fa_value_descale(&d->attention, &w->tile);
    w->k_scale = find_scale(d, &d->attention.k_scale, &w->tile, &w->scale);
    w->v_scale = find_scale(d, &d->attention.v_scale, &w->tile, &w->value_scale);
}
#endif

/* The keys that rows see, and their parts. Key tiles begin at multiples of KEYS, so that a page
 * whose size is a multiple of KEYS consists of whole tiles. */
FA_DEVICE fa_work describe_work(const fa_decode_params *d, const fa_decode_divisors *by,
                                int64_t number)
{
    const fa_attention_params *p = &d->attention;
    fa_work w;
    const int64_t cut = p->tasks - d->whole, n = number - d->whole;
    w.part = n < 0 ? 0 : (int)DIVIDE(n, cut, tasks);
    w.task = number - w.part * cut;
    locate(d, by, w.task, &w);
    w.k = first_row(d, &p->k, &w.tile);
    w.v = first_row(d, &p->v, &w.tile);
    w.from = w.to = w.all_from = w.all_to = w.start = 0;
    w.tiles = w.parts = w.per_part = 0;
#if EIGHT_BITS
    w.k_scale = w.v_scale = NULL;
    w.scale = w.value_scale = 1.0f;
#endif
    if (w.queries == 0) return w;
    const fa_range first = fa_tile_visible(p, &w.tile, w.tile.first);
    const fa_range last = fa_tile_visible(p, &w.tile, w.tile.first + w.queries - 1);
    if (last.hi <= first.lo) return w;
    w.from = (int)first.lo;
    w.to = (int)last.hi;
    w.all_from = (int)last.lo;
    w.all_to = (int)first.hi;
    w.start = w.from / ALIGNED_KEYS * ALIGNED_KEYS;
    w.tiles = (w.to - w.start + BLOCK_KEYS - 1) / BLOCK_KEYS;
#if EIGHT_BITS
    find_scales(d, &w);
#endif
    const int all = w.tiles + d->parts - 1;
    w.per_part = max(d->least, by ? (int)fa_divide_by(all, by->parts) : all / d->parts);
    if (w.task < d->whole) w.per_part = w.tiles;
    w.parts = (w.tiles + w.per_part - 1) / w.per_part;
    return w;
}

FA_DEVICE void find_work(const fa_decode_params *d, const fa_decode_divisors *by, fa_work *w)
{
    if (ptx_thread_id() == 0) *w = describe_work(d, by, blockIdx.x);
    __syncthreads();
}

#if !BLOCK_TILES /* a block's key tiles are in key_tiles.cuh */
/* The warp's key tiles in a part: the first key of the first tile, and the number of tiles; the
 * next tile is BLOCK_KEYS keys later. from, to: as in the work tile. */
typedef struct fa_key_tiles {
    int first, count, from, to;
} fa_key_tiles;

FA_DEVICE bool is_seen(const fa_key_tiles *k, int key) { return key >= k->from && key < k->to; }

FA_DEVICE fa_key_tiles find_key_tiles(const fa_work *w)
{
    const int before = w->part * w->per_part, tiles = min(w->per_part, w->tiles - before);
    fa_key_tiles k;
    k.from = w->from;
    k.to = w->to;
    k.first = w->start + before * BLOCK_KEYS + warp_id() * KEYS;
    const int left = w->to - k.first;
    k.count = left > 0 ? min(tiles, (left + BLOCK_KEYS - 1) / BLOCK_KEYS) : 0;
    return k;
}
#endif

#endif
