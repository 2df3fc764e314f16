/*
 * The work of a block: KEYS keys of one key/value head of a sequence, and the tiles of queries that
 * see some of them, for each query head that shares the head. Threads of three warps describe it;
 * all warps read the description.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_WORK_CUH
#define FA_KERNELS_BACKWARD_SM90_WORK_CUH

#include "backward_sm90/config.cuh"
#include "common/key_tiles.cuh"
#include "common/packed.h"

/* Kernels that have no such variants define no such macros. */
#ifndef ORDERED
#define ORDERED 0
#endif
#ifndef PERSISTENT
#define PERSISTENT 0
#endif
#ifndef JOINED
#define JOINED 0
#endif
#ifndef QUERY_PARTS
#define QUERY_PARTS 0
#endif
#ifndef CHAINED
#define CHAINED 0
#endif
#ifndef ROUNDING
#define ROUNDING 0
#endif

/* Whether a variant is for sequences of one length, and no blocks share keys. */
#define PLAIN_HEADS (CHAINED || ROUNDING)

/* Whether the heads that share the keys take turns at each query tile. Others have their own order, or measured slower (wide heads of 256,
 * where no heads share keys, 0.983; 192 1.02 to 1.03). */
#ifdef BACKWARD_SM90_WIDE
#define HEADS_IN_TURN (ORDERED && HEAD_DIM == 192)
#else
#define HEADS_IN_TURN (ROUNDING == 2)
#endif

typedef struct block_work {
    fa_key_tile keys;
    fa_tile sequence; /* with the first query head */
    int32_t heads;    /* query heads that share the keys, and are the block's */
    float *key_sums;  /* sums of dK and dV; NULL: the block stores the gradients */
    int32_t from, to; /* query tiles that see some of the keys; to <= from: none */
    int32_t tiles;    /* of all heads */
#if PERSISTENT
    int32_t first;  /* count of its first tile; work tiles of a block continue the count */
    int32_t work;   /* number of the work tile */
    int32_t loads;  /* loads of keys for the block's previous work tiles */
    int32_t clears; /* those of them that needed cleared rows */
    bool ends;      /* there are no more work tiles */
#endif
#if JOINED
    int32_t unit; /* the unit whose rows it reads and to whose sums it adds (joined.cuh) */
#endif
#if QUERY_PARTS
    int32_t part; /* of the queries */
#endif
#if CHAINED
    int32_t passed; /* tiles that the next block's keys are seen by, too: the first ones */
#endif
#if ROUNDING
    /* The dQ of tiles behind the first `unfinished` ones is whole with the block's share; that of tiles
     * behind the first `alone` ones, too, has other shares. */
    int32_t unfinished, alone;
#endif
    int64_t number;   /* of the sequence's tile 0 and the first head, in the workspace */
    int32_t num_keys; /* keys of the sequence from the block's first one on; at most KEYS */
    /* Key j of the block is seen by the queries [first_query + j, end_query + j). */
    int32_t first_query, end_query;
    int32_t key_tile; /* number of the block's keys in the sequence */
    int32_t edge;     /* see tiles_before */
#if ORDERED
    bool ascends;         /* from the first query tile up, and from later keys to earlier ones */
    int32_t tiles_behind; /* key tiles of the sequence with later keys */
#endif
    int32_t unmasked_from[CONSUMERS],
        unmasked_to[CONSUMERS]; /* tiles whose queries see all of a consumer's keys */
    /* Rows outside these are cleared when they are loaded, because they may hold NaN: keys that
     * some query sees, counted from the block's first key; queries that see some key. */
    int32_t clear_before_key, clear_from_key, clear_before_query, clear_from_query;
} block_work;

/* Whether all sequences have the same lengths. */
FA_DEVICE bool is_uniform(const fa_backward_sm90_params *s)
{
    return PLAIN_HEADS || s->uniform.applies;
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

/* Whether all queries of the tile see all of the consumer's keys. */
FA_DEVICE bool sees_all(const block_work *w, int consumer, int tile)
{
    return tile >= w->unmasked_from[consumer] && tile < w->unmasked_to[consumer];
}

FA_DEVICE void find_seen_rows(const fa_attention_params *p, const fa_backward_sm90_params *s,
                              block_work *w)
{
    const fa_uniform_lengths *u = &s->uniform;
    const fa_tile *t = &w->sequence;
    if (is_uniform(s)) {
        const int key = (int)w->keys.first;
        w->clear_before_key = u->keys_from - key;
        w->clear_from_key = u->keys_to == p->rows_k ? UNBOUNDED : u->keys_to - key;
        w->clear_before_query = u->queries_from;
        w->clear_from_query = u->queries_to == p->rows_q ? UNBOUNDED : u->queries_to;
        return;
    }
    const int64_t first = w->keys.first, last_query = fa_max64(t->n_q - 1, 0);
    const int64_t keys_from = fa_tile_visible(p, t, 0).lo,
                  keys_to = fa_tile_visible(p, t, last_query).hi;
    const int64_t from = fa_first_query(p, t, 0, true), to = fa_first_query(p, t, t->n_k, false);
    /* TMA itself writes zeros for rows after the end of the tensor. */
    const bool zeros_behind_keys = t->start_k + keys_to == p->rows_k;
    const bool zeros_behind_queries = t->start_q + to == p->rows_q;
    w->clear_before_key = saturate(keys_from - first);
    w->clear_from_key = zeros_behind_keys ? UNBOUNDED : saturate(keys_to - first);
    w->clear_before_query = saturate(from);
    w->clear_from_query = zeros_behind_queries ? UNBOUNDED : saturate(to);
}

#if PLAIN_HEADS

/* How many of the block's query tiles see the next block's keys, too. end: of the block's keys. */
FA_DEVICE int count_passed(const fa_uniform_lengths *u, const block_work *w, int64_t end)
{
    return end < w->sequence.n_k ? w->to - fa_uniform_first_query(u, (int)end) / QUERIES : 0;
}

#endif

#if ROUNDING

/* Which tiles have other blocks' shares as well, before the block's and behind them. Both bounds of the query tiles that see a
 * block go up from block to block. So those that the next block does not share are the lowest ones, and those that the block before
 * does not share are the highest. The heads that share the keys take turns at each tile. end: of the block's keys. */
FA_DEVICE void find_shares(const fa_uniform_lengths *u, block_work *w, int64_t end)
{
    const int first = (int)w->keys.first, tiles = max(0, w->to - w->from),
              passed = max(0, count_passed(u, w, end)),
              before = first > 0 ? divide_up(fa_uniform_end_query(u, first)) : 0;
    const int unfinished = !w->ascends ? passed : first > 0 ? tiles : 0;
    const int alone =
        w->ascends ? (first > 0 ? 0 : tiles - passed) : min(tiles, max(0, w->to - before));
    w->unfinished = unfinished * w->heads;
    w->alone = alone * w->heads;
}

#endif

/* The tiles of queries that exist and see some of the keys. */
FA_DEVICE void find_queries(const fa_attention_params *p, const fa_backward_sm90_params *s,
                            block_work *w)
{
    const fa_uniform_lengths *u = &s->uniform;
    const fa_tile *t = &w->sequence;
    const int64_t first = w->keys.first, end = fa_min64(first + KEYS, t->n_k);
    if (first >= end) return;
    if (is_uniform(s)) {
        w->from = fa_uniform_first_query(u, (int)first) / QUERIES;
        w->to = divide_up(fa_uniform_end_query(u, (int)end));
        w->tiles = w->to > w->from ? (w->to - w->from) * w->heads : 0;
#if CHAINED
        w->passed = count_passed(u, w, end);
#elif ROUNDING
        find_shares(u, w, end);
#endif
        return;
    }
    w->from = (int32_t)fa_first_query(p, t, first, true) / QUERIES;
    w->to = divide_up((int32_t)fa_first_query(p, t, end, false));
    w->tiles = w->to > w->from ? (w->to - w->from) * w->heads : 0;
}

/* Which of these queries see which keys. */
FA_DEVICE void find_masks(const fa_attention_params *p, const fa_backward_sm90_params *s,
                          block_work *w)
{
    const fa_tile *t = &w->sequence;
    const int64_t first = w->keys.first, end = fa_min64(first + KEYS, t->n_k);
    if (first >= end) return;
    w->num_keys = (int32_t)(end - first);
    w->key_tile = (int32_t)first / KEYS;
#if ORDERED
    w->tiles_behind = ((int32_t)t->n_k + KEYS - 1) / KEYS - 1 - w->key_tile;
#endif
    const fa_uniform_lengths *u = &s->uniform;
    if (is_uniform(s)) {
        w->first_query = u->has_first ? (int)first + u->first_query : -UNBOUNDED;
        w->end_query = u->has_end ? (int)first + u->end_query : UNBOUNDED;
        w->edge = u->has_end ? max(0, w->end_query + KEYS - 2) : INT32_MAX;
    } else {
        const int64_t center = first - t->diagonal, right = fa_keys_ahead(p);
        const int64_t last_query = p->window_left < 0 ? INT64_MAX : fa_add(center, p->window_left);
        w->first_query = right < 0 ? -UNBOUNDED : saturate(fa_subtract(center, right));
        w->end_query = saturate(fa_add(last_query, 1));
        w->edge = (int32_t)fa_max64(0, fa_min64(last_query, INT32_MAX - (KEYS - 1)) + KEYS - 1);
    }
#pragma unroll
    for (int c = 0; c < CONSUMERS; c++) find_unmasked_tiles(w, c);
}

/* The number of tile 0 of a sequence and head in the workspace. */
FA_DEVICE int64_t find_tile_number(const fa_attention_params *p, const fa_tile *t, int64_t q_tiles)
{
    if (!PLAIN_HEADS && p->cu_seqlens_q)
        return t->head * q_tiles + FA_PACKED_FIRST_TILE(t->start_q, QUERIES, t->batch + 1);
    return (t->batch * p->heads_q + t->head) * q_tiles;
}

#if !ORDERED

/* A block's task if a head's first block runs ahead of its other ones, so that these need not wait.
 * The first blocks of a group of `together` heads come in front of the other blocks of the group
 * before; otherwise the order is that of find_task. */
FA_DEVICE int64_t find_task_ahead(const fa_attention_params *p, const fa_backward_sm90_params *s,
                                  int64_t block)
{
    const fa_turns *turns = &s->divisors.together;
    const int64_t together = s->heads_together, heads = s->divisors.heads;
    const int64_t before = fa_min64(together, heads); /* the first blocks of the first group */
    if (block < before) return block * p->tiles;
    int64_t rest = block - before, first = fa_divide_by(rest, turns->blocks) * together;
    /* The quotient assumes full groups. If the last group has fewer heads, fewer first blocks come in
     * front of the group before it, and the last group begins earlier. So this counts from the group
     * before it, and the condition below finds the last one. */
    if (first > 0 && first + together >= heads) first -= together;
    rest -= first * p->tiles;
    int64_t own = fa_min64(together, heads - first),
            next = fa_max64(0, fa_min64(together, heads - first - together));
    if (rest >= next + own * (p->tiles - 1)) { /* the last group */
        rest -= next + own * (p->tiles - 1);
        first += together;
        own = next;
        next = 0;
    }
    if (rest < next) return (first + together + rest) * p->tiles;
    rest -= next;
    const int64_t tile = fa_find_turn(turns, rest, own, together);
    return (first + rest - tile * own) * p->tiles + tile + 1;
}

#endif

/* A block's task. Tasks count through the tiles of a head, then through those of the next head.
 * Blocks count through the first tiles of `together` heads, then their second tiles, so that
 * neighbouring blocks do not wait for each other's sums. In both orders a tile comes after all
 * earlier tiles of its head. */
FA_DEVICE int64_t find_task(const fa_attention_params *p, const fa_backward_sm90_params *s,
                            int64_t block)
{
    if (BIAS_TILE && s->items_together > 1) { /* those that share a bias */
        const int64_t own = fa_divide_by(block, s->by_items);
        return own + (block - own * s->items_together) * s->item_tasks;
    }
#if !ORDERED
    if (s->first_ahead) return find_task_ahead(p, s, block);
#endif
    return fa_find_task_in_turn(p, &s->divisors, s->heads_together, block);
}

#if ORDERED

/* The same if the blocks of the first heads ascend: `ascending_together` heads take turns, and a
 * head's blocks take its key tiles from the last to the first. Then the blocks of the other heads
 * take turns. */
FA_DEVICE int64_t find_ordered_task(const fa_attention_params *p, const fa_backward_sm90_params *s,
                                    int64_t block, bool *ascends)
{
    const int64_t first = s->heads_ascending * p->tiles, rest = block - first;
    *ascends = rest < 0;
    if (first == 0) return find_task(p, s, block);
    if (rest < 0) {
        const fa_turns *turns = &s->ascending;
        const int64_t together = s->ascending_together,
                      head = fa_divide_by(block, turns->blocks) * together;
        const int64_t heads = fa_min64(together, s->heads_ascending - head),
                      own = block - head * p->tiles,
                      tile = fa_find_turn(turns, own, heads, together);
        return (head + own - tile * heads + 1) * p->tiles - 1 - tile;
    }
    const int64_t tile = fa_divide_by(rest, s->divisors.together.heads);
    return first + (rest - tile * s->heads_together) * p->tiles + tile;
}

#endif

/* The keys and the sequence; false if no query can see a key. */
FA_DEVICE bool find_keys(const fa_attention_params *p, const fa_backward_sm90_params *s,
                         int64_t block, block_work *w)
{
    int split;
#if ORDERED
    const int64_t own = find_ordered_task(p, s, block, &w->ascends);
#else
    const int64_t own = find_task(p, s, block);
#endif
    const int64_t task = fa_find_split(p, own, PLAIN_HEADS ? 1 : s->splits, &split);
    const int32_t group = s->divisors.group;
#if QUERY_PARTS
    const bool whole = s->query_parts == 1;
    const int splits = whole ? s->splits : s->splits / s->query_parts;
    const int of_heads = whole ? split : split / s->query_parts;
    w->part = split - of_heads * s->query_parts;
#else
    const int splits = PLAIN_HEADS ? 1 : s->splits, of_heads = split;
#endif
    /* Splits of a group have the same number of query heads, or the first ones have one more. */
    const int each = splits == 1 ? group : group / splits, more = group - each * splits;
    const int before = of_heads * each + min(of_heads, more);
    w->heads = each + (of_heads < more);
#if JOINED
    w->unit = (int32_t)fa_divide_by(own, s->divisors.tiles);
#endif
    w->key_sums = NULL;
    if (!PLAIN_HEADS && s->key_sums)
        w->key_sums = s->key_sums + (split * fa_divide(p->tasks, s->splits) + task) *
                                        FA_BACKWARD_SM90_KEY_SUMS(KEYS, SUM_DIM, VALUE_DIM);
    w->from = w->to = w->tiles = 0;
    if (is_uniform(s)) {
        fa_find_uniform_keys(p, &s->divisors, &s->uniform, task, KEYS, before, &w->keys,
                             &w->sequence);
        return w->keys.count > 0;
    }
    w->keys = fa_find_key_tile(p, task, KEYS);
    if (w->keys.batch < 0 || w->keys.count <= 0) return false;
    fa_locate_sequence_of(p, w->keys.batch, w->keys.head_kv * group + before, w->keys.head_kv,
                          &w->sequence);
    return true;
}

#if QUERY_PARTS

/* Restricts the block to its part of the query tiles. */
FA_DEVICE void take_part(const fa_backward_sm90_params *s, block_work *w)
{
    const int from = w->from, tiles = max(0, w->to - from), parts = s->query_parts;
    if (parts == 1) return;
    w->from = from + tiles * w->part / parts;
    w->to = from + tiles * (w->part + 1) / parts;
    w->tiles = (w->to - w->from) * w->heads;
}

#endif

/* The number of the sequence's tile 0, and the query tiles. */
FA_DEVICE void find_work(const fa_attention_params *p, const fa_backward_sm90_params *s,
                         block_work *w)
{
    w->number = find_tile_number(p, &w->sequence, s->q_tiles);
    find_queries(p, s, w);
#if QUERY_PARTS
    take_part(s, w);
#endif
}

/* Functions that describe parts of the work. A thread executes each, all at the same time, because
 * the block waits for the description. own: with the keys, which each thread finds by itself. All
 * threads use the same instructions for that: it costs less than waiting for one thread, and
 * separate instructions would have to be fetched. */

FA_DEVICE void describe_work(const fa_attention_params *p, const fa_backward_sm90_params *s,
                             block_work *own, block_work *w)
{
    find_work(p, s, own);
    w->keys = own->keys;
    w->sequence = own->sequence;
    w->heads = own->heads;
    w->key_sums = own->key_sums;
    w->number = own->number;
    w->from = own->from;
    w->to = own->to;
    w->tiles = own->tiles;
#if CHAINED
    w->passed = own->passed;
#elif ROUNDING
    w->unfinished = own->unfinished;
    w->alone = own->alone;
#endif
#if ORDERED
    w->ascends = own->ascends;
#endif
#if JOINED
    w->unit = own->unit;
#endif
}

/* Describes a block whose keys no query sees: its gradients are zeros. */
FA_DEVICE void describe_nothing(const block_work *own, block_work *w)
{
    w->keys = own->keys;
    w->heads = own->heads;
    w->key_sums = own->key_sums;
    w->from = w->to = w->tiles = 0;
#if JOINED
    w->unit = own->unit;
#endif
}

FA_DEVICE void describe_masks(const fa_attention_params *p, const fa_backward_sm90_params *s,
                              block_work *own, block_work *w)
{
    own->num_keys = own->first_query = own->end_query = own->key_tile = own->edge = 0;
#if ORDERED
    own->tiles_behind = 0;
#endif
#pragma unroll
    for (int c = 0; c < CONSUMERS; c++) own->unmasked_from[c] = own->unmasked_to[c] = 0;
    find_masks(p, s, own);
    w->num_keys = own->num_keys;
    w->first_query = own->first_query;
    w->end_query = own->end_query;
    w->key_tile = own->key_tile;
    w->edge = own->edge;
#if ORDERED
    w->tiles_behind = own->tiles_behind;
#endif
#pragma unroll
    for (int c = 0; c < CONSUMERS; c++) {
        w->unmasked_from[c] = own->unmasked_from[c];
        w->unmasked_to[c] = own->unmasked_to[c];
    }
}

FA_DEVICE void describe_rows(const fa_attention_params *p, const fa_backward_sm90_params *s,
                             block_work *own, block_work *w)
{
    find_seen_rows(p, s, own);
    w->clear_before_key = own->clear_before_key;
    w->clear_from_key = own->clear_from_key;
    w->clear_before_query = own->clear_before_query;
    w->clear_from_query = own->clear_from_query;
}

/* Whether some of the rows of keys and values that are loaded must be cleared. */
FA_DEVICE bool clears_keys(const block_work *w)
{
    return w->clear_before_key > 0 || w->clear_from_key < KEYS;
}

/* How many key tiles come before the block's at a query tile that the block touches.
 *
 * In ascending order of keys: the first key tile that touches the query tile has the first key that
 * its first query sees. For blocks that ascend, in descending order of keys: the first key tile has
 * the last key that the query tile's last query sees. A query tile that is not full is touched by
 * all key tiles (find_queries). */
FA_DEVICE int tiles_before(const block_work *w, int tile)
{
#if ORDERED
    const int last = tile * QUERIES + QUERIES - 1;
    if (w->ascends && last >= w->sequence.n_q) return w->tiles_behind;
    if (w->ascends) return min(w->tiles_behind, (last - w->first_query) / KEYS);
#endif
    return min(w->key_tile, (w->edge - tile * QUERIES) / KEYS);
}

/* A place among the block's query tiles: tile `tile` of head `head`, counted from the block's first
 * head.
 *
 * A block starts with a head's last query tile. Under a causal mask all key tiles touch that one,
 * so if sums have one order, blocks follow each other a step apart. A block that ascends starts
 * with the first query tile that it touches. Under a causal mask the block before it had that tile
 * two steps earlier.
 *
 * The tiles of a head come before those of the next one, or HEADS_IN_TURN: a tile of each head, then the next tile. Where blocks start with
 * the last tile, under a causal mask, one with few tiles of each head waits for less then: with head after head it would wait at its second
 * head for blocks that have more of the first one (H200, one order, causal n 4k, four query heads for a key head, head dim 64: 0.89 of
 * the rate of any order, in turn 0.99). But more queries are in use at the same time. */
typedef struct tile_cursor {
    int count, head, tile;
#if ORDERED
    int step;
#endif
#if HEADS_IN_TURN
    int heads;
#endif
} tile_cursor;

/* The count of a work tile's first tile, and the count after its last tile. */
FA_DEVICE int first_count(const block_work *w)
{
#if PERSISTENT
    return w->first;
#else
    (void)w;
    return 0;
#endif
}

FA_DEVICE int end_count(const block_work *w) { return first_count(w) + w->tiles; }

/* The parities of the barriers of its keys, and of the barriers for keys with cleared rows. */
FA_DEVICE int keys_parity(const block_work *w)
{
#if PERSISTENT
    return w->loads & 1;
#else
    (void)w;
    return 0;
#endif
}

FA_DEVICE int cleared_parity(const block_work *w)
{
#if PERSISTENT
    return w->clears & 1;
#else
    (void)w;
    return 0;
#endif
}

#if ORDERED

FA_DEVICE tile_cursor first_tile(const block_work *w)
{
    tile_cursor at;
    at.count = first_count(w);
    at.head = 0;
    at.tile = w->ascends ? w->from : w->to - 1;
    at.step = w->ascends ? 1 : -1;
#if HEADS_IN_TURN
    at.heads = w->heads;
#endif
    return at;
}

FA_DEVICE void advance(tile_cursor *at, int from, int to)
{
    at->count++;
#if HEADS_IN_TURN
    (void)from, (void)to;
    if (++at->head < at->heads) return;
    at->head = 0;
    at->tile += at->step;
#elif ROUNDING
    (void)from, (void)to;
    at->tile += at->step; /* there is one head: groups have HEADS_IN_TURN */
#else
    at->tile += at->step;
    if (at->tile >= from && at->tile < to) return;
    at->tile = at->step > 0 ? from : to - 1;
    at->head++;
#endif
}

#else

FA_DEVICE tile_cursor first_tile(const block_work *w)
{
    const tile_cursor at = {first_count(w), 0, w->to - 1};
    return at;
}

FA_DEVICE void advance(tile_cursor *at, int from, int to)
{
    at->count++;
    at->tile--;
    if (at->tile >= from) return;
    at->tile = to - 1;
    at->head++;
}

#endif

#if PERSISTENT

/* Describes the work tile of this number. before: the block's previous work tile; NULL: there is none.
 * first: the count of its first tile. */
FA_DEVICE void describe(const fa_attention_params *p, const fa_backward_sm90_params *s,
                        int64_t number, const block_work *before, int first, block_work *w)
{
    const bool counts = before && before->tiles > 0;
    w->ends = number >= p->tasks;
    w->work = (int32_t)number;
    w->first = first;
    w->loads = before ? before->loads + counts : 0;
    w->clears = before ? before->clears + (counts && clears_keys(before)) : 0;
    if (w->ends) return;
    if (!find_keys(p, s, number, w)) return;
    find_work(p, s, w);
    find_seen_rows(p, s, w);
    find_masks(p, s, w);
}

#endif

#endif
