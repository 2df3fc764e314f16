/*
 * What a block works on: KEYS keys of one key/value head of a sequence, and the tiles of queries that see some of them,
 * of each query head that shares the head. One thread describes it; all warps read the description.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_WORK_CUH
#define FA_KERNELS_BACKWARD_SM90_WORK_CUH

#include "backward_sm90/config.cuh"
#include "common/key_tiles.cuh"
#include "common/packed.h"

typedef struct block_work {
    fa_key_tile keys;
    fa_tile sequence; /* with the first query head */
    int32_t heads;    /* query heads that share the keys */
    int32_t from, to; /* query tiles that see some of the keys; to <= from: none */
    int32_t tiles;    /* of all heads */
    int64_t number;   /* of the sequence's tile 0 with the first head, in the workspace */
    int32_t num_keys; /* of the sequence, from the block's first one on; at most KEYS */
    /* Key j of the block is seen by the queries [first_query + j, end_query + j). */
    int32_t first_query, end_query;
    int32_t unmasked_from[CONSUMERS],
        unmasked_to[CONSUMERS]; /* tiles whose queries see all of a consumer's keys */
    /* Rows outside are cleared when they are loaded, for they may hold NaN: keys that some query sees, counted from the
     * block's first; queries that see some key. */
    int32_t clear_before_key, clear_from_key, clear_before_query, clear_from_query;
} block_work;

/* Beyond every query, and small enough that it can be added to without overflow. */
enum { UNBOUNDED = 1 << 30 };

FA_DEVICE int32_t saturate(int64_t x)
{
    return (int32_t)fa_max64(-UNBOUNDED, fa_min64(x, UNBOUNDED));
}

FA_DEVICE int divide_up(int x) { return (x + QUERIES - 1) >> 6; }

/* Which tiles need no mask for a consumer. */
FA_DEVICE void find_unmasked_tiles(block_work *w, int consumer)
{
    const int first = consumer * OWN_KEYS, last = first + OWN_KEYS - 1;
    const bool whole = last < w->num_keys;
    w->unmasked_from[consumer] = divide_up(w->first_query + last);
    w->unmasked_to[consumer] = whole ? (w->end_query + first) >> 6 : -UNBOUNDED;
}

FA_DEVICE void find_seen_rows(const fa_attention_params *p, block_work *w)
{
    const fa_tile *t = &w->sequence;
    const int64_t first = w->keys.first, last_query = fa_max64(t->n_q - 1, 0);
    const int64_t keys_from = fa_tile_visible(p, t, 0).lo,
                  keys_to = fa_tile_visible(p, t, last_query).hi;
    const int64_t from = fa_first_query(p, t, 0, true), to = fa_first_query(p, t, t->n_k, false);
    /* Behind the tensor's end TMA writes zeros itself. */
    const bool zeros_behind_keys = t->start_k + keys_to == p->rows_k;
    const bool zeros_behind_queries = t->start_q + to == p->rows_q;
    w->clear_before_key = saturate(keys_from - first);
    w->clear_from_key = zeros_behind_keys ? UNBOUNDED : saturate(keys_to - first);
    w->clear_before_query = saturate(from);
    w->clear_from_query = zeros_behind_queries ? UNBOUNDED : saturate(to);
}

FA_DEVICE void find_queries(const fa_attention_params *p, block_work *w)
{
    const fa_tile *t = &w->sequence;
    const int64_t first = w->keys.first, end = fa_min64(first + KEYS, t->n_k);
    const int64_t center = first - t->diagonal;
    int64_t right =
        p->causal ? 0 : -1; /* keys that a query sees beyond its own position; -1: all */
    if (p->window_right >= 0)
        right = right < 0 ? p->window_right : fa_min64(right, p->window_right);
    if (first >= end) return;
    w->num_keys = (int32_t)(end - first);
    w->from = (int32_t)fa_first_query(p, t, first, true) / QUERIES;
    w->to = divide_up((int32_t)fa_first_query(p, t, end, false));
    w->tiles = w->to > w->from ? (w->to - w->from) * w->heads : 0;
    w->first_query = right < 0 ? -UNBOUNDED : saturate(center - right);
    w->end_query = p->window_left < 0 ? UNBOUNDED : saturate(center + p->window_left + 1);
#pragma unroll
    for (int c = 0; c < CONSUMERS; c++) find_unmasked_tiles(w, c);
    find_seen_rows(p, w);
}

/* The number of tile 0 of a sequence and head in the workspace. */
FA_DEVICE int64_t find_tile_number(const fa_attention_params *p, const fa_tile *t, int64_t q_tiles)
{
    if (p->cu_seqlens_q)
        return t->head * q_tiles + FA_PACKED_FIRST_TILE(t->start_q, QUERIES, t->batch + 1);
    return (t->batch * p->heads_q + t->head) * q_tiles;
}

FA_DEVICE void describe_work(const fa_attention_params *p, int64_t q_tiles, int64_t task,
                             block_work *w)
{
    w->keys = fa_find_key_tile(p, task, KEYS);
    w->heads = (int32_t)fa_divide(p->heads_q, p->heads_kv);
    w->from = w->to = w->tiles = w->num_keys = 0;
    if (w->keys.batch < 0 || w->keys.count <= 0) return;
    fa_locate_sequence(p, w->keys.batch, w->keys.head_kv * w->heads, &w->sequence);
    w->number = find_tile_number(p, &w->sequence, q_tiles);
    find_queries(p, w);
}

/* A place among the block's tiles: tile `tile` of head `head`, counted from the first one. */
typedef struct tile_cursor {
    int count, head, tile;
} tile_cursor;

FA_DEVICE tile_cursor first_tile(const block_work *w)
{
    const tile_cursor at = {0, 0, w->from};
    return at;
}

FA_DEVICE void advance(tile_cursor *at, int from, int to)
{
    at->count++;
    at->tile++;
    if (at->tile < to) return;
    at->tile = from;
    at->head++;
}

#endif
