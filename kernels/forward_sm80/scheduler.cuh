/*
 * Chooses the block's work tiles, and describes them ahead in a queue.
 *
 * The schedule is static: block b of g takes the tasks b, b + g, b + 2g, ... A task is a work tile,
 * or under a causal mask a causal pair (common/causal_schedule.h). A description takes long chains
 * of arithmetic, so all threads describe several work tiles at once, ahead of their use.
 */
#ifndef FA_KERNELS_FORWARD_SM80_SCHEDULER_CUH
#define FA_KERNELS_FORWARD_SM80_SCHEDULER_CUH

#include "common/causal_schedule.h"
#include "common/sequence.cuh"
#include "forward_sm80/layout.cuh"

#if SPLIT_KEYS
#include "forward_sm80/split.h"
#endif

/* The keys that some rows of a range of rows see, and those that all of them see. */
typedef struct fa_seen {
    int from, to, all_from, all_to;
} fa_seen;

/* The key tiles of a work tile, in shared memory, because products need the registers. Positions
 * count from `start`, the first key of the first tile, a multiple of 32. */
typedef struct fa_key_tiles {
    int64_t start;
    const char *k, *v; /* rows `start` of keys and values, if there are no pages */
    /* tiles: their number. Every row sees all of the tiles [plain_from, plain_to). Tiles below
     * whole_to that are not before block.from can be copied whole. */
    int tiles, plain_from, plain_to, whole_to;
    fa_seen block, group[GROUPS];
    int lo, hi, keys, last;      /* query r <= last sees the keys [lo + r, hi + r) below `keys` */
    uint32_t recompute;          /* 1: the work tile is recomputed (recompute.cuh) */
    int nonfinite_values[WARPS]; /* of the current key tile; a copy for each warp */
#if SPLIT_KEYS
    int group_bits;
    int all_tiles; /* of all parts together */
    int64_t slot;  /* of the part's sums */
#endif
} fa_key_tiles;

/* An entry of the work-tile queue. An entry without queries and rows has nothing to compute. */
typedef struct fa_work_tile {
    fa_tile tile;
    fa_key_tiles keys;
} fa_work_tile;
static_assert(sizeof(fa_work_tile) <= FA_SM80_ENTRY_BYTES, "room for descriptions");

/* The block's current work, in shared memory, because registers are scarce. */
typedef struct fa_block {
    fa_work_tile now;    /* a copy, at a constant address: it is read between products */
    fa_work_tile *queue; /* work tile i of the block is entry i % QUEUE_ENTRIES */
    uint32_t number, count;
    int loading; /* whether the first copies of this work tile have been issued */
} fa_block;

/* Whether its rows see any keys. If so, the first copies of the next work tile are issued before
 * this one ends. */
FA_DEVICE bool has_keys(const fa_work_tile *w)
{
    return w->tile.first < w->tile.n_q && w->keys.tiles > 0;
}

FA_DEVICE const fa_work_tile *next_work_tile(const fa_block *b)
{
    return &b->queue[(b->number + 1) % QUEUE_ENTRIES];
}

/* Whether rows consist of whole, aligned vectors of 16 bytes. */
FA_DEVICE bool is_vectored(const fa_kernel_view *v)
{
    return TF32 ? v->vector != 0 : v->vector == 8;
}

/* The kernel's parameter. p is its first member. */
#if SPLIT_KEYS
FA_DEVICE const fa_sm80_split *own_split(const fa_attention_params *p)
{
    return &((const fa_sm80_split_params *)p)->split;
}
#else
FA_DEVICE const fa_sm80_params *own_params(const fa_attention_params *p)
{
    return (const fa_sm80_params *)p;
}
#endif

/* The query of row r, counted from the work tile's first one, and the number of its queries. */
FA_DEVICE int query_of(const fa_attention_params *p, int r)
{
#if SPLIT_KEYS
    return r >> own_split(p)->group_bits;
#else
    (void)p;
    return r;
#endif
}

/* ---- Descriptions ---------------------------------------------------------------------------- */

FA_DEVICE int clamp_position(int64_t key, int64_t start) { return (int)fa_max64(key - start, 0); }

/* What `count` rows of the work tile from row r on see. Rows after the last query see the same as
 * the last query. */
FA_DEVICE fa_seen find_seen(const fa_attention_params *p, const fa_tile *t, int64_t start, int r,
                            int count)
{
    fa_seen s;
    const int64_t end = t->n_q - 1, i = t->first + query_of(p, r);
    const fa_range first = fa_tile_visible(p, t, fa_min64(i, end));
#if SPLIT_KEYS
    const int64_t j = t->first + query_of(p, r + count - 1);
    const fa_range last = fa_tile_visible(p, t, fa_min64(j, end));
#else
    const fa_range last = fa_tile_visible(p, t, fa_min64(i + count - 1, end));
#endif
    s.from = clamp_position(first.lo, start);
    s.to = clamp_position(last.hi, start);
    s.all_from = clamp_position(last.lo, start);
    s.all_to = clamp_position(first.hi, start);
    return s;
}

/* What single rows see, and where keys and values are. */
FA_DEVICE void plan_rows(const fa_attention_params *p, const fa_tile *t, int64_t start,
                         fa_key_tiles *w)
{
    enum { TILE = 4096, FAR = 0x7fffffff - TILE };
    const int64_t center = t->first + t->diagonal - start;
    int64_t right = p->causal ? 0 : p->window_right;
    if (p->window_right >= 0) right = fa_min64(right, p->window_right);
    w->start = start;
    w->lo =
        p->window_left < 0 ? -TILE : (int)fa_max64(fa_min64(center - p->window_left, FAR), -TILE);
    w->hi = right < 0 ? FAR : (int)fa_max64(fa_min64(center + right + 1, FAR), -TILE);
    w->keys = (int)(t->n_k - start);
    w->last = (int)fa_min64(t->n_q - 1 - t->first, TILE);
    w->k = w->v = NULL;
    if (p->block_table) return;
    w->k = fa_view_row(&p->k, t->block_k, t->start_k + start, t->head_kv);
    w->v = fa_view_row(&p->v, t->block_k, t->start_k + start, t->head_kv);
}

/* What a group of warps sees, or for part GROUPS the block. */
FA_DEVICE void plan_tiles(const fa_attention_params *p, const fa_tile *t, int64_t start, int part,
                          fa_key_tiles *w)
{
    const bool group = part < GROUPS;
    const fa_seen seen =
        find_seen(p, t, start, group ? part * GROUP_ROWS : 0, group ? GROUP_ROWS : QUERIES);
    if (group) {
        w->group[part] = seen;
        return;
    }
    const bool rows = !p->block_table && is_vectored(&p->k) && is_vectored(&p->v);
    w->block = seen;
    w->tiles = seen.to > seen.from ? (seen.to + KEYS - 1) / KEYS : 0;
    w->plain_from = (seen.all_from + KEYS - 1) / KEYS;
    w->plain_to = rows ? seen.all_to / KEYS : 0;
    w->whole_to = rows ? seen.to / KEYS : 0;
}

/* ---- The block's work tiles ------------------------------------------------------------------ */

#if SPLIT_KEYS

/* Task `number` of the block. -1: there is none. */
FA_DEVICE int64_t find_work_tile(const fa_attention_params *p, int64_t number)
{
    const int64_t task = blockIdx.x + number * gridDim.x;
    return task < p->tasks * own_split(p)->parts ? task : -1;
}

FA_DEVICE uint32_t count_work_tiles(const fa_attention_params *p)
{
    const int64_t tasks = p->tasks * own_split(p)->parts;
    return (uint32_t)fa_divide(tasks - blockIdx.x + gridDim.x - 1, gridDim.x);
}

/* Leaves only the keys of the task's part. start: a multiple of 32, at or before the first key; the result is that of the
 * part. A part of no key tiles ends where it begins. */
FA_DEVICE int64_t take_part(const fa_attention_params *p, int64_t task, int64_t start, fa_tile *t,
                            int *all_tiles)
{
    const int64_t parts = own_split(p)->parts, part = task - fa_divide(task, parts) * parts;
    const int64_t last = fa_min64(t->first + query_of(p, QUERIES - 1), t->n_q - 1);
    const int64_t keys = fa_max64(fa_tile_visible(p, t, last).hi - start, 0);
    const int64_t tiles = (keys + KEYS - 1) / KEYS;
    *all_tiles = (int)tiles;
    t->n_k = fa_min64(t->n_k, start + fa_divide(tiles * (part + 1), parts) * KEYS);
    return start + fa_divide(tiles * part, parts) * KEYS;
}

FA_DEVICE fa_tile find_tile(const fa_attention_params *p, int64_t task)
{
    return fa_find_tile(p, fa_divide(task, own_split(p)->parts), query_of(p, QUERIES));
}

#else

/* Work tile `number` of the block, in the numbering of fa_find_tile, from a head's last tile on.
 * -1: there is none. */
FA_DEVICE int64_t find_work_tile(const fa_attention_params *p, int64_t number)
{
    const fa_sm80_params *s = own_params(p);
    const int64_t task = blockIdx.x + (s->causal_pairs ? number / 2 : number) * gridDim.x;
    if (task >= (s->causal_pairs ? s->causal_pairs : p->tasks)) return -1;
    if (s->causal_pairs == 0 && s->full_heads == 0) return task;
    if (s->causal_pairs == 0) { /* the longest work tiles of all heads first */
        const int64_t rank = fa_divide(task, s->full_heads);
        return (task - rank * s->full_heads) * p->tiles + rank;
    }
    const fa_causal_pair pair =
        fa_find_causal_pair(task, (int)p->tiles, &s->full_heads, number % 2);
    const int tile = number % 2 ? pair.second : pair.first;
    if (tile == 0 || pair.head >= p->batch * p->heads_q) return -1;
    return pair.head * p->tiles + p->tiles - tile;
}

FA_DEVICE uint32_t count_work_tiles(const fa_attention_params *p)
{
    const fa_sm80_params *s = own_params(p);
    const int64_t tasks = s->causal_pairs ? s->causal_pairs : p->tasks;
    const int64_t mine = fa_divide(tasks - blockIdx.x + gridDim.x - 1, gridDim.x);
    return (uint32_t)(s->causal_pairs ? 2 * mine : mine);
}

FA_DEVICE fa_tile find_tile(const fa_attention_params *p, int64_t task)
{
    return fa_find_tile(p, task, QUERIES);
}

#endif

/* Describes a part of a work tile: what a group sees, what the block computes, or where rows
 * are. */
FA_DEVICE void describe_part(const fa_attention_params *p, int64_t number, int part,
                             fa_work_tile *to)
{
    const int64_t tile = find_work_tile(p, number);
    fa_tile t = {0};
    if (tile >= 0) t = find_tile(p, tile);
    if (part == GROUPS) {
        to->tile = t;
        to->keys.tiles = to->keys.whole_to = 0;
        to->keys.recompute = 0;
    }
    if (t.first >= t.n_q) return;
    int64_t start = fa_tile_visible(p, &t, t.first).lo / 32 * 32;
#if SPLIT_KEYS
    int all_tiles;
    start = take_part(p, tile, start, &t, &all_tiles);
    if (part == GROUPS) {
        to->keys.group_bits = own_split(p)->group_bits;
        to->keys.all_tiles = all_tiles;
        to->keys.slot = tile;
    }
#endif
    if (part <= GROUPS) plan_tiles(p, &t, start, part, &to->keys);
    else plan_rows(p, &t, start, &to->keys);
}

/* Describes `count` work tiles from `number` on, in parallel: a thread for each part. */
FA_DEVICE void describe_work_tiles(const fa_attention_params *p, int64_t number, int count,
                                   fa_work_tile *queue)
{
    enum { PARTS = GROUPS + 2 };
    static_assert(QUEUE_ENTRIES * PARTS <= THREADS, "a thread for each part");
    const int i = ptx_thread_id() / PARTS;
    if (i >= count) return;
    describe_part(p, number + i, ptx_thread_id() % PARTS, &queue[(number + i) % QUEUE_ENTRIES]);
}

/* Each thread copies a word, because all warps wait for the copy. */
FA_DEVICE void copy_work_tile(const fa_work_tile *from, fa_work_tile *to)
{
    static_assert(sizeof(fa_work_tile) % 4 == 0 && sizeof(fa_work_tile) / 4 <= THREADS,
                  "a word a thread");
    const int i = ptx_thread_id();
    if (i < (int)sizeof(fa_work_tile) / 4) ((uint32_t *)to)[i] = ((const uint32_t *)from)[i];
}

/* Describes the first entries of the queue. */
FA_DEVICE void begin_block(const fa_attention_params *p, fa_block *b, fa_work_tile *queue)
{
    if (ptx_thread_id() == 0) {
        b->queue = queue;
        b->number = 0;
        b->count = count_work_tiles(p);
        b->loading = 0;
    }
    describe_work_tiles(p, 0, QUEUE_ENTRIES, queue);
    __syncthreads();
    copy_work_tile(&queue[0], &b->now);
    __syncthreads();
}

#endif
