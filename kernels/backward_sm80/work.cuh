/*
 * The work of a block: KEYS keys of one key/value head of a sequence, and the tiles of queries that
 * see some of them, for each query head that shares the head. One thread describes it; all threads
 * read the description.
 */
#ifndef FA_KERNELS_BACKWARD_SM80_WORK_CUH
#define FA_KERNELS_BACKWARD_SM80_WORK_CUH

#include "backward_sm80/config.cuh"
#include "common/key_tiles.cuh"
#include "common/packed.h"

typedef struct block_work {
    fa_key_tile keys;
    fa_tile sequence; /* with the first query head */
    int64_t number;   /* the workspace's tile of the sequence's first query and first head */
    int32_t heads;    /* query heads that share the keys, in the block's split */
    int32_t from, to; /* query tiles that see some of the keys; to <= from: none */
    int32_t tiles;    /* of all heads */
    int32_t num_keys; /* keys of the sequence from the block's first one on; at most KEYS */
    /* Key j of the block is seen by the queries [first_query + j, end_query + j). */
    int32_t first_query, end_query;
    int32_t key_tile; /* number of the block's keys in the sequence */
    int32_t edge;     /* see tiles_before */
    /* Rows outside these are not read, because they may hold NaN: keys that some query sees,
     * counted from the block's first key; queries that see some key. */
    int32_t seen_key_from, seen_key_to, seen_query_from, seen_query_to;
    float *key_sums; /* where the block stores dK and dV; NULL: in the caller's rows */
#if HIGH_LOW
    float *dq; /* the sequence's first row in the caller's dq, for the first head */
#endif
#if OPTIONS
    uint8_t bad_keys[KEYS]; /* 1: the key is not finite */
#endif
} block_work;

FA_DEVICE void find_seen_rows(const fa_attention_params *p, const fa_uniform_lengths *u,
                              block_work *w)
{
    const fa_tile *t = &w->sequence;
    if (u->applies) {
        w->seen_key_from = u->keys_from - (int)w->keys.first;
        w->seen_key_to = u->keys_to - (int)w->keys.first;
        w->seen_query_from = u->queries_from;
        w->seen_query_to = u->queries_to;
        return;
    }
    const int64_t first = w->keys.first, last_query = fa_max64(t->n_q - 1, 0);
    w->seen_key_from = saturate(fa_tile_visible(p, t, 0).lo - first);
    w->seen_key_to = saturate(fa_tile_visible(p, t, last_query).hi - first);
    w->seen_query_from = saturate(fa_first_query(p, t, 0, true));
    w->seen_query_to = saturate(fa_first_query(p, t, t->n_k, false));
}

FA_DEVICE void find_queries(const fa_attention_params *p, const fa_uniform_lengths *u,
                            block_work *w)
{
    const fa_tile *t = &w->sequence;
    const int64_t first = w->keys.first, end = fa_min64(first + KEYS, t->n_k);
    if (first >= end) return;
    w->num_keys = (int32_t)(end - first);
    w->key_tile = (int32_t)first / KEYS;
    if (u->applies) {
        w->from = fa_uniform_first_query(u, (int)first) / QUERIES;
        w->to = (fa_uniform_end_query(u, (int)end) + QUERIES - 1) / QUERIES;
        w->first_query = u->has_first ? (int)first + u->first_query : -UNBOUNDED;
        w->end_query = u->has_end ? (int)first + u->end_query : UNBOUNDED;
        w->edge = u->has_end ? max(0, w->end_query + KEYS - 2) : INT32_MAX;
    } else {
        const int64_t center = first - t->diagonal, right = fa_keys_ahead(p);
        const int64_t last_query = p->window_left < 0 ? INT64_MAX : fa_add(center, p->window_left);
        w->from = (int32_t)fa_first_query(p, t, first, true) / QUERIES;
        w->to = ((int32_t)fa_first_query(p, t, end, false) + QUERIES - 1) / QUERIES;
        w->first_query = right < 0 ? -UNBOUNDED : saturate(fa_subtract(center, right));
        w->end_query = saturate(fa_add(last_query, 1));
        w->edge = (int32_t)fa_max64(0, fa_min64(last_query, INT32_MAX - (KEYS - 1)) + KEYS - 1);
    }
    w->tiles = w->to > w->from ? (w->to - w->from) * w->heads : 0;
    find_seen_rows(p, u, w);
}

/* The number of the first tile of a sequence and head in the workspace. */
FA_DEVICE int64_t find_tile_number(const fa_attention_params *p, const fa_tile *t, int64_t q_tiles)
{
    if (p->cu_seqlens_q)
        return t->head * q_tiles + FA_PACKED_FIRST_TILE(t->start_q, TILE, t->batch + 1);
    return (t->batch * p->heads_q + t->head) * q_tiles;
}

/* A block's task. Tasks count through the tiles of a head, then through those of the next head.
 * Blocks count through the first tiles of `together` heads, then their second tiles. So neighbouring
 * blocks do not wait for each other's sums, and under a causal mask long blocks come first. In both
 * orders a tile comes after all earlier tiles of its head. */
FA_DEVICE int64_t find_task(const fa_attention_params *p, const fa_backward_sm80_params *s,
                            int64_t block)
{
    return fa_find_task_in_turn(p, &s->divisors, s->heads_together, block);
}

/* Restricts the block to its part of the query tiles. A tile is in the same part for all keys: so if sums have one order, a
 * block still waits only for blocks of lower numbers. */
FA_DEVICE void take_part(block_work *w, int part, int parts)
{
    const int all = ((int)w->sequence.n_q + QUERIES - 1) / QUERIES;
    w->from = max(w->from, all * part / parts);
    w->to = min(w->to, all * (part + 1) / parts);
    w->tiles = w->to > w->from ? (w->to - w->from) * w->heads : 0;
}

FA_DEVICE void describe_work(const fa_backward_params *all, const fa_backward_sm80_params *s,
                             int64_t block, block_work *w)
{
    const fa_attention_params *p = &all->a;
    int split, part = 0, of_heads;
    const int64_t task = fa_find_split(p, find_task(p, s, block), s->splits, &split);
    const int32_t group = s->divisors.group;
    of_heads = split;
    w->heads = group;
    if (s->splits > 1) {
        of_heads = split / s->query_parts;
        part = split - of_heads * s->query_parts;
        w->heads = group / (s->splits / s->query_parts);
    }
    w->key_sums = NULL;
    if (s->key_sums)
        w->key_sums = s->key_sums + (split * fa_divide(p->tasks, s->splits) + task) *
                                        FA_BACKWARD_SM80_KEY_SUMS(KEYS, HEAD_DIM);
    w->from = w->to = w->tiles = w->num_keys = 0;
#if OPTIONS
    for (int i = 0; i < KEYS; i++) w->bad_keys[i] = 0;
#endif
    if (s->uniform.applies) {
        fa_find_uniform_keys(p, &s->divisors, &s->uniform, task, KEYS, of_heads * w->heads,
                             &w->keys, &w->sequence);
    } else {
        w->keys = fa_find_key_tile(p, task, KEYS);
        if (w->keys.batch < 0) return;
        fa_locate_sequence(p, w->keys.batch, w->keys.head_kv * group + of_heads * w->heads,
                           &w->sequence);
    }
    if (w->keys.count <= 0) return;
    w->number = find_tile_number(p, &w->sequence, s->q_tiles);
#if HIGH_LOW
    const fa_tile *t = &w->sequence;
    w->dq = (float *)(void *)fa_view_row(&all->dq, t->block_q, t->start_q, t->head);
#endif
    find_queries(p, &s->uniform, w);
    if (s->query_parts > 1) take_part(w, part, s->query_parts);
}

/* How many earlier key tiles of the head touch a query tile that the block touches. The first of
 * them has the first key that the query tile's first query sees. */
FA_DEVICE int tiles_before(const block_work *w, int tile)
{
    return min(w->key_tile, (w->edge - tile * QUERIES) / KEYS);
}

/* A place among the block's query tiles: tile `tile` of head `head`, counted from the block's first
 * head. A head's last query tile comes first. Under a causal mask all key tiles touch it, so if
 * sums have one order, blocks follow each other a step apart. */
typedef struct tile_cursor {
    int count, head, tile;
} tile_cursor;

FA_DEVICE tile_cursor first_tile(const block_work *w)
{
    const tile_cursor at = {0, 0, w->to - 1};
    return at;
}

FA_DEVICE void advance(tile_cursor *at, const block_work *w)
{
    at->count++;
    at->tile--;
    if (at->tile >= w->from) return;
    at->tile = w->to - 1;
    at->head++;
}

/* The previous tile; `at` is not the first one. */
FA_DEVICE tile_cursor before(const tile_cursor *at, const block_work *w)
{
    tile_cursor b = {at->count - 1, at->head, at->tile + 1};
    if (b.tile < w->to) return b;
    b.tile = w->from;
    b.head--;
    return b;
}

/* The stage of the tile's queries. */
FA_DEVICE int stage_of(const tile_cursor *at) { return STAGES == 2 ? at->count & 1 : 0; }

/* The tile of the workspace that contains this tile of queries, which is one of its PARTS parts. */
FA_DEVICE int64_t tile_number(const block_work *w, const fa_backward_sm80_params *s,
                              const tile_cursor *at)
{
    return w->number + at->head * s->q_tiles + at->tile / PARTS;
}

#endif
