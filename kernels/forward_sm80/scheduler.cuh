/*
 * Which work tiles are a block's, and the queue that describes them ahead.
 *
 * The schedule is static: block b of g takes the tasks b, b + g, b + 2g, ... A task is a work tile, or under a causal mask
 * a causal pair (common/causal_schedule.h). The arithmetic of a description is long, so all threads describe several
 * work tiles at once, ahead of their use.
 */
#ifndef FA_KERNELS_FORWARD_SM80_SCHEDULER_CUH
#define FA_KERNELS_FORWARD_SM80_SCHEDULER_CUH

#include "common/causal_schedule.h"
#include "common/sequence.cuh"
#include "forward_sm80/layout.cuh"

/* The keys that some of a run of rows see, and those that all of them see. */
typedef struct fa_seen {
    int from, to, all_from, all_to;
} fa_seen;

/* The keys of a tile of queries, described ahead and kept in shared memory: registers are for the
 * products. Positions count from `start`, the first key of the first tile, a multiple of 32. */
typedef struct fa_key_tiles {
    int64_t start;
    const char *k, *v; /* rows `start` of keys and values, unless there are pages */
    /* How many tiles there are; [plain_from, plain_to) every row sees all of; below whole_to, and not in
     * front of block.from, they can be copied row by row without a look at single keys. */
    int tiles, plain_from, plain_to, whole_to;
    fa_seen block, group[GROUPS];
    int lo, hi, keys, last; /* row r <= last sees the keys [lo + r, hi + r) that are below `keys` */
    uint32_t recompute; /* 1: the task's second time, values that are not finite are looked for */
    int nonfinite_values
        [WARPS]; /* whether this tile's values are not all finite; of each warp's own */
} fa_key_tiles;

/* A task. Without queries and rows of its own: there is nothing to do. */
typedef struct fa_work_tile {
    fa_tile tile;
    fa_key_tiles keys;
} fa_work_tile;
static_assert(sizeof(fa_work_tile) <= FA_SM80_TASK_BYTES, "room for descriptions");

/* What a block has to do, in shared memory, for registers are scarce. */
typedef struct fa_block {
    fa_work_tile now;    /* at a constant address: it is looked up between products */
    fa_work_tile *queue; /* QUEUE_ENTRIES of them: the one of turn i at i % (QUEUE_ENTRIES) */
    uint32_t number, count;
    int loading; /* whether the first copies of this turn's task are under way already */
} fa_block;

/* Whether there are keys to be seen; then copies for the task after it are under way at its end. */
FA_DEVICE bool has_keys(const fa_work_tile *task)
{
    return task->tile.first < task->tile.n_q && task->keys.tiles > 0;
}

FA_DEVICE const fa_work_tile *next_work_tile(const fa_block *b)
{
    return &b->queue[(b->number + 1) % (QUEUE_ENTRIES)];
}

/* ---- Descriptions ---------------------------------------------------------------------------- */

FA_DEVICE int clamp_position(int64_t key, int64_t start) { return (int)fa_max64(key - start, 0); }

/* What `count` rows of the tile from number r on see; rows behind the last query count as it. */
FA_DEVICE fa_seen find_seen(const fa_attention_params *p, const fa_tile *t, int64_t start, int r,
                            int count)
{
    fa_seen s;
    const int64_t end = t->n_q - 1, i = t->first + r;
    const fa_range first = fa_tile_visible(p, t, fa_min64(i, end));
    const fa_range last = fa_tile_visible(p, t, fa_min64(i + count - 1, end));
    s.from = clamp_position(first.lo, start);
    s.to = clamp_position(last.hi, start);
    s.all_from = clamp_position(last.lo, start);
    s.all_to = clamp_position(first.hi, start);
    return s;
}

/* What single rows see, and where keys and values lie. Far away is a tile beyond what a sequence has. */
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

/* What a group sees, or for part GROUPS the block. */
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
    const bool rows = !p->block_table && p->k.vector == 8 && p->v.vector == 8;
    w->block = seen;
    w->tiles = seen.to > seen.from ? (seen.to + KEYS - 1) / KEYS : 0;
    w->plain_from = (seen.all_from + KEYS - 1) / KEYS;
    w->plain_to = rows ? seen.all_to / KEYS : 0;
    w->whole_to = rows ? seen.to / KEYS : 0;
}

/* ---- The block's work tiles ------------------------------------------------------------------ */

/* The kernel's parameter, of which p is the first member. */
FA_DEVICE const fa_sm80_params *own_params(const fa_attention_params *p)
{
    return (const fa_sm80_params *)p;
}

/* The task of the block's turn, as fa_find_tile counts: from the last tile on; -1: there is none. */
FA_DEVICE int64_t find_task(const fa_attention_params *p, int64_t number)
{
    const fa_sm80_params *s = own_params(p);
    const int64_t unit = blockIdx.x + (s->causal_pairs ? number / 2 : number) * gridDim.x;
    if (unit >= (s->causal_pairs ? s->causal_pairs : p->tasks)) return -1;
    if (s->causal_pairs == 0) return unit;
    const fa_causal_pair pair =
        fa_find_causal_pair(unit, (int)p->tiles, &s->full_heads, number % 2);
    const int tile = number % 2 ? pair.second : pair.first;
    if (tile == 0 || pair.head >= p->batch * p->heads_q) return -1;
    return pair.head * p->tiles + p->tiles - tile;
}

FA_DEVICE uint32_t count_work_tiles(const fa_attention_params *p)
{
    const fa_sm80_params *s = own_params(p);
    const int64_t units = s->causal_pairs ? s->causal_pairs : p->tasks;
    const int64_t mine = fa_divide(units - blockIdx.x + gridDim.x - 1, gridDim.x);
    return (uint32_t)(s->causal_pairs ? 2 * mine : mine);
}

/* Part of a task's description: what a group sees, what the block does, or where rows lie. */
FA_DEVICE void describe_part(const fa_attention_params *p, int64_t turn, int part, fa_work_tile *to)
{
    const int64_t task = find_task(p, turn);
    fa_tile t = {0};
    if (task >= 0) t = fa_find_tile(p, task, QUERIES);
    if (part == GROUPS) {
        to->tile = t;
        to->keys.tiles = to->keys.whole_to = 0;
        to->keys.recompute = 0;
    }
    if (t.first >= t.n_q) return;
    const int64_t start = fa_tile_visible(p, &t, t.first).lo / 32 * 32;
    if (part <= GROUPS) plan_tiles(p, &t, start, part, &to->keys);
    else plan_rows(p, &t, start, &to->keys);
}

/* Describes the tasks of `count` turns, side by side: their arithmetic is long, and the block waits for it. */
FA_DEVICE void describe_work_tiles(const fa_attention_params *p, int64_t turn, int count,
                                   fa_work_tile *tasks)
{
    enum { PARTS = GROUPS + 2 };
    static_assert(QUEUE_ENTRIES * PARTS <= THREADS, "a thread for each part");
    const int i = ptx_thread_id() / PARTS;
    if (i >= count) return;
    describe_part(p, turn + i, ptx_thread_id() % PARTS, &tasks[(turn + i) % (QUEUE_ENTRIES)]);
}

/* By words, for all warps wait. */
FA_DEVICE void copy_work_tile(const fa_work_tile *from, fa_work_tile *to)
{
    static_assert(sizeof(fa_work_tile) % 4 == 0 && sizeof(fa_work_tile) / 4 <= THREADS,
                  "a word a thread");
    const int i = ptx_thread_id();
    if (i < (int)sizeof(fa_work_tile) / 4) ((uint32_t *)to)[i] = ((const uint32_t *)from)[i];
}

/* The block's turns and its first tasks. */
FA_DEVICE void begin_block(const fa_attention_params *p, fa_block *b, fa_work_tile *tasks)
{
    if (ptx_thread_id() == 0) {
        b->queue = tasks;
        b->number = 0;
        b->count = count_work_tiles(p);
        b->loading = 0;
    }
    describe_work_tiles(p, 0, QUEUE_ENTRIES, tasks);
    __syncthreads();
    copy_work_tile(&tasks[0], &b->now);
    __syncthreads();
}

#endif
