/*
 * Tiles of keys, for kernels whose blocks own the gradients of keys: where the tiles are, and which queries see them.
 */
#ifndef FA_KERNELS_COMMON_KEY_TILES_CUH
#define FA_KERNELS_COMMON_KEY_TILES_CUH

#include "common/divide.h"
#include "common/key_work.h"
#include "common/sequence.cuh"

/* The rows of dk and dv that a block owns. */
typedef struct fa_key_tile {
    int64_t batch; /* the sequence; -1: none, only zeros are written; paged: unused */
    int64_t head_kv;
    int64_t first; /* the first key; paged: the first row of the page */
    int64_t block, row,
        count; /* where the first row is, and how many there are, at most a tile's */
} fa_key_tile;

/* The first row of packed sequence s - 1, like fa_packed_start for queries. */
FA_DEVICE int64_t fa_packed_key_start(const fa_attention_params *p, int64_t s)
{
    if (s == 0) return 0;
    if (s > p->batch + 1) return p->rows_k;
    return fa_max64(0, fa_min64(p->cu_seqlens_k[s - 1], p->rows_k));
}

/* Finds packed tile `number`; common/packed.h defines the numbering. */
FA_DEVICE void fa_locate_packed_keys(const fa_attention_params *p, int64_t number, int rows,
                                     fa_key_tile *k)
{
    int64_t low = 0, high = p->batch + 2;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (FA_PACKED_FIRST_TILE(fa_packed_key_start(p, middle), rows, middle) <= number)
            low = middle;
        else high = middle;
    }
    const int64_t start = fa_packed_key_start(p, low),
                  room = fa_max64(0, fa_packed_key_start(p, low + 1) - start);
    k->batch = low > 0 && low <= p->batch ? low - 1 : -1;
    k->block = 0;
    k->first = (number - FA_PACKED_FIRST_TILE(start, rows, low)) * rows;
    k->row = start + k->first;
    k->count = fa_max64(0, fa_min64(rows, room - k->first));
}

FA_DEVICE fa_key_tile fa_find_key_tile(const fa_attention_params *p, int64_t task, int rows)
{
    const int64_t outer = fa_divide(task, p->tiles), number = task - outer * p->tiles;
    fa_key_tile k;
    k.batch = fa_divide(outer, p->heads_kv);
    k.head_kv = outer - k.batch * p->heads_kv;
    if (p->cu_seqlens_k) {
        fa_locate_packed_keys(p, number, rows, &k);
        return k;
    }
    int64_t tile = number;
    k.block = k.batch;
    if (p->block_table) {
        const int64_t tiles = (p->rows_k + rows - 1) / rows;
        k.block = fa_divide(number, tiles);
        tile = number - k.block * tiles;
    }
    k.row = k.first = tile * rows;
    k.count = fa_min64(rows, p->rows_k - k.first);
    return k;
}

/* The keys of a task, and their sequence with the first of the block's query heads, if all sequences have the same
 * lengths. before: query heads of other splits. */
FA_DEVICE void fa_find_uniform_keys(const fa_attention_params *p, const fa_key_divisors *d,
                                    const fa_uniform_lengths *u, int64_t task, int rows,
                                    int64_t before, fa_key_tile *k, fa_tile *t)
{
    const int64_t outer = fa_divide_by(task, d->tiles), batch = fa_divide_by(outer, d->heads_kv);
    k->batch = k->block = batch;
    k->head_kv = outer - batch * p->heads_kv;
    k->first = k->row = (task - outer * p->tiles) * rows;
    k->count = fa_min64(rows, p->rows_k - k->first);
    t->batch = t->block_q = t->block_k = batch;
    t->head_kv = k->head_kv;
    t->head = k->head_kv * d->group + before;
    t->first = t->start_q = t->start_k = 0;
    t->n_q = u->n_q;
    t->room_q = p->rows_q;
    t->n_k = u->n_k;
    t->diagonal = p->diagonal_given ? p->diagonal : u->n_k - u->n_q;
}

/* The first query that sees keys from `first` on, and the end of those that see some key before `end`. */
FA_DEVICE int fa_uniform_first_query(const fa_uniform_lengths *u, int first)
{
    return u->has_first ? max(0, min(first + u->first_query, u->n_q)) : 0;
}

FA_DEVICE int fa_uniform_end_query(const fa_uniform_lengths *u, int end)
{
    return u->has_end ? max(0, min(end + u->end_query - 1, u->n_q)) : u->n_q;
}

/* The tile of a head that has number `rest` in a group of `heads` heads: `together`, or those of the last group. */
FA_DEVICE int64_t fa_find_turn(const fa_turns *turns, int64_t rest, int64_t heads, int64_t together)
{
    return fa_divide_by(rest, heads == together ? turns->heads : turns->rest);
}

/* If several consecutive blocks have the same keys: the task of the first of them, and the number of the block's split. */
FA_DEVICE int64_t fa_find_split(const fa_attention_params *p, int64_t task, int splits, int *split)
{
    *split = 0;
    if (splits == 1) return task;
    const int64_t outer = fa_divide(task, p->tiles), head = fa_divide(outer, splits);
    *split = (int)(outer - head * splits);
    return task - (outer - head) * p->tiles;
}

/* The first query in [0, n_q] that sees a key from j on (sees), or that sees no key before j; 0 <= j <= n_k. From one
 * query to the next, neither end of the range of keys decreases. */
FA_DEVICE int64_t fa_search_query(const fa_attention_params *p, const fa_tile *t, int64_t j,
                                  bool sees)
{
    int64_t low = 0, high = t->n_q;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        const fa_range visible = fa_tile_visible(p, t, middle);
        if (sees ? visible.hi > j : visible.lo >= j) high = middle;
        else low = middle + 1;
    }
    return low;
}

/* How many keys a query sees beyond its own position; -1: no limit. */
FA_DEVICE int64_t fa_keys_ahead(const fa_attention_params *p)
{
    return p->causal ? 0 : p->window_right;
}

FA_DEVICE bool fa_is_moderate(int64_t x) { return x < (int64_t)1 << 60 && x > -((int64_t)1 << 60); }

/* The same without a search, unless numbers are so large that sums of them may overflow. */
FA_DEVICE int64_t fa_first_query(const fa_attention_params *p, const fa_tile *t, int64_t j,
                                 bool sees)
{
    const int64_t right = fa_keys_ahead(p);
#if HAS_ATTENTION_CHUNKS
    if (p->attention_chunk) return fa_search_query(p, t, j, sees);
#endif
    if (sees ? j >= t->n_k : j > 0 && p->window_left < 0) return t->n_q;
    if (sees ? right < 0 : j == 0) return 0;
    if (!fa_is_moderate(t->diagonal) || !fa_is_moderate(right) || !fa_is_moderate(p->window_left))
        return fa_search_query(p, t, j, sees);
    const int64_t first = j - t->diagonal + (sees ? -right : p->window_left);
    return fa_max64(0, fa_min64(first, t->n_q));
}

/* Larger than every query, and small enough that additions to it do not overflow. */
enum { UNBOUNDED = 1 << 30 };

FA_DEVICE int32_t saturate(int64_t x)
{
    return (int32_t)fa_max64(-UNBOUNDED, fa_min64(x, UNBOUNDED));
}

/* a + b and a - b, saturated; b is at least 0. A window may be as large as int64_t allows. */
FA_DEVICE int64_t fa_add(int64_t a, int64_t b) { return a > INT64_MAX - b ? INT64_MAX : a + b; }
FA_DEVICE int64_t fa_subtract(int64_t a, int64_t b)
{
    return a < INT64_MIN + b ? INT64_MIN : a - b;
}

/* The task of a block, if blocks take the first tiles of `together` heads, then their second tiles, and so on. */
FA_DEVICE int64_t fa_find_task_in_turn(const fa_attention_params *p, const fa_key_divisors *d,
                                       int64_t together, int64_t block)
{
    if (together <= 1) return block;
    const int64_t first = fa_divide_by(block, d->together.blocks) * together;
    const int64_t heads = fa_min64(together, d->heads - first);
    const int64_t rest = block - first * p->tiles,
                  tile = fa_find_turn(&d->together, rest, heads, together);
    return (first + rest - tile * heads) * p->tiles + tile;
}

#endif
