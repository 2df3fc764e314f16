/*
 * A work tile: QUERIES queries of one head of one sequence, and the key tiles that they see. A block computes one work
 * tile at a time. The scheduler warp describes it once (describe_work_tile). All other warps read the description, so
 * that they need not repeat this long chain of integer arithmetic.
 */
#ifndef FA_KERNELS_FORWARD_SM90_WORK_TILE_CUH
#define FA_KERNELS_FORWARD_SM90_WORK_TILE_CUH

#include "forward_sm90/config.cuh"
#include "common/score_options.cuh"
#include "common/sequence.cuh"
#include "common/softmax.cuh"

/* Whether there may be options besides a softcap. Work tiles of split keys have no room for what these need. */
#define HAS_OTHER_OPTIONS (OPTIONS && !SPLIT)

/* Query i of the work tile may see the keys [lo + i, hi + i) as far as they are in [0, n_k). Keys are counted
 * from first_key on. */
typedef struct work_tile {
    fa_tile query_tile;
    int32_t first_key, key_tiles; /* 0 key tiles: the end of the block's work */
    /* Key tiles that a consumer needs, from the first one on; under a causal mask it may need fewer than the
     * others. 0: its rows see nothing, or it has no rows. */
    int32_t needed[CONSUMERS];
    int32_t lo, hi, n_k;
    int32_t queries, rows; /* its rows of queries; its rows of the outputs, which are stored */
    char *out; /* the first row of its outputs; of a part: of its sums in the workspace, float32 */
#if SPLIT
    fa_sm90_box box;    /* what a consumer's rows are */
    int32_t last_query; /* of the work tile, or 0 */
    /* Of a part's first row: its base and its sum of weights. NULL: all keys are in one part. */
    fa_sm90_row_sum *sums;
#endif
    /* Of each consumer: key tiles that all its rows see whole; and the first key tile before which all its rows have
     * seen a key. */
    int32_t unmasked_from[CONSUMERS], unmasked_to[CONSUMERS];
    int32_t plain_from[CONSUMERS];
    float scale; /* from what comes to the softmax to exponents of 2 */
#if HAS_OTHER_OPTIONS
    int32_t options; /* which of OPTIONS it has */
#endif
#if OPTIONS
    float inner; /* factor of scores, before their tanh or alone */
#endif
#if HAS_OTHER_OPTIONS
    float unit;  /* a logit of 1, in the units of what comes to the softmax */
    float slope; /* ALiBi's */
#endif
} work_tile;
static_assert(sizeof(work_tile) <= FA_SM90_ENTRY_BYTES, "the planner reserves so many bytes");

enum { UNBOUNDED = FA_SM90_UNBOUNDED };

FA_DEVICE int32_t saturate(int64_t x) { return fa_sm90_saturate(x); }

FA_DEVICE int clamp(int x, int upper) { return max(0, min(x, upper)); }

/*
 * The rows of so many queries, at most those of a work tile; the query and the head of a row, counted from the work tile's first
 * ones; and where a consumer's rows end, behind which there may be some that are left over.
 */
#if SPLIT

FA_DEVICE int queries_of_consumer(const work_tile *w) { return fa_sm90_box_queries(w->box); }

FA_DEVICE int rows_of(const work_tile *w, int queries)
{
    const int most = queries_of_consumer(w);
    int rows = 0;
#pragma unroll
    for (int c = 0; c < CONSUMERS; c++) {
        const int own = queries - c * most;
        if (own > 0) rows = c * ROWS + (own < most ? own * fa_sm90_box_heads(w->box) : ROWS);
    }
    return rows;
}

FA_DEVICE int query_of(const work_tile *w, int row)
{
    return row / ROWS * queries_of_consumer(w) + fa_sm90_query_in_box(w->box, row % ROWS);
}

FA_DEVICE int head_of(const work_tile *w, int row)
{
    const int own = row % ROWS;
    return own - fa_sm90_query_in_box(w->box, own) * fa_sm90_box_heads(w->box);
}

FA_DEVICE int end_of_rows(const work_tile *w, int consumer)
{
    const int most = queries_of_consumer(w) * fa_sm90_box_heads(w->box);
    return min(w->rows, consumer * ROWS + most);
}

#else

FA_DEVICE int queries_of_consumer(const work_tile *w) { return (void)w, ROWS; }
FA_DEVICE int rows_of(const work_tile *w, int queries)
{
    return (void)w, max(0, min(queries, QUERIES));
}
FA_DEVICE int query_of(const work_tile *w, int row) { return (void)w, row; }
FA_DEVICE int head_of(const work_tile *w, int row) { return (void)w, (void)row, 0; }
FA_DEVICE int end_of_rows(const work_tile *w, int consumer) { return (void)consumer, w->rows; }

#endif

/* The keys [lo, hi) that a query may see, counted from the work tile's first key. */
typedef struct key_range {
    int lo, hi;
} key_range;

/* The keys of a query of the work tile. */
FA_DEVICE key_range find_keys_of_query(const work_tile *w, int query)
{
    const key_range range = {w->lo + query, clamp(w->hi + query, w->n_k)};
    return range;
}

FA_DEVICE int last_query_of(const work_tile *w)
{
#if SPLIT
    return w->last_query;
#else
    return max(w->queries, 1) - 1;
#endif
}

/* The keys of row i. Rows after the last query see the same keys as the last query. */
FA_DEVICE key_range find_key_range(const work_tile *w, int i)
{
    return find_keys_of_query(w, min(query_of(w, i), last_query_of(w)));
}

/* The same for row `own` of a consumer. */
FA_DEVICE key_range find_keys_of_row(const work_tile *w, int consumer, int own)
{
#if SPLIT
    const int query = consumer * queries_of_consumer(w) + fa_sm90_query_in_box(w->box, own);
    return find_keys_of_query(w, min(query, w->last_query));
#else
    return find_key_range(w, consumer * ROWS + own);
#endif
}

/* The keys of a consumer's first query, and of its last one. */
FA_DEVICE key_range find_first_keys(const work_tile *w, int consumer)
{
#if SPLIT
    return find_keys_of_query(w, min(consumer * queries_of_consumer(w), w->last_query));
#else
    return find_key_range(w, consumer * ROWS);
#endif
}

FA_DEVICE key_range find_last_keys(const work_tile *w, int consumer)
{
#if SPLIT
    return find_keys_of_query(w, min((consumer + 1) * queries_of_consumer(w) - 1, w->last_query));
#else
    return find_key_range(w, consumer * ROWS + ROWS - 1);
#endif
}

/* The key tiles that a consumer needs, and which of them need no mask. */
FA_DEVICE void find_consumer_tiles(work_tile *w, int consumer)
{
    const key_range range = {max(find_first_keys(w, consumer).lo, 0),
                             find_last_keys(w, consumer).hi};
    const bool some = consumer * ROWS < w->queries && range.lo < range.hi;
    w->needed[consumer] = some ? (range.hi + KEYS - 1) / KEYS : 0;
    const int last_lo = max(find_last_keys(w, consumer).lo, 0);
    w->unmasked_from[consumer] = (last_lo + KEYS - 1) / KEYS;
    w->plain_from[consumer] = last_lo / KEYS + 1;
    w->unmasked_to[consumer] = find_first_keys(w, consumer).hi / KEYS;
}

/* Leaves of a work tile the key tiles from `first` to `end`, as far as there are so many. In forward_sm90 a part without
 * keys, which superfluous tasks have, keeps one key tile, because each work tile has one; nobody needs it. Elsewhere there
 * are no such parts, and no windows. */
FA_DEVICE void take_part(int first, int end, work_tile *w)
{
    const int tiles = min(w->key_tiles, end) - first;
#if SPLIT
    const int skipped = min(first, w->key_tiles) * KEYS;
    w->key_tiles = max(tiles, 1);
    w->n_k = tiles > 0 ? min(w->n_k - skipped, tiles * KEYS) : 0;
#else
    const int skipped = first * KEYS;
    w->key_tiles = tiles;
    w->n_k = min(w->n_k - skipped, tiles * KEYS);
#endif
    w->first_key += skipped;
    if (w->hi < UNBOUNDED) w->hi = max(w->hi - skipped, -UNBOUNDED);
#if SPLIT
    if (w->lo > -UNBOUNDED) w->lo = max(w->lo - skipped, -UNBOUNDED);
#endif
}

/* A query tile, as by fa_find_tile, if all sequences have the same lengths: without divisions and in 32 bits, because a
 * block's first load waits for it. heads: of a batch item, or groups of `group` heads that share query tiles, which have
 * so many queries. */
FA_DEVICE fa_tile find_tile_of_number(const fa_attention_params *p, const fa_sm90_params *s,
                                      int64_t number, uint32_t heads, uint32_t group,
                                      uint32_t queries)
{
    fa_tile t;
    const uint32_t tiles = (uint32_t)p->tiles;
    const uint32_t outer = (uint32_t)fa_divide_by(number, s->by_tiles);
    const uint32_t batch = (uint32_t)fa_divide_by(outer, s->by_heads),
                   head = (outer - batch * heads) * group;
    t.batch = t.block_q = t.block_k = batch;
    t.head = head;
    t.head_kv = fa_divide_by(head, s->by_group);
    t.first = (tiles - 1 - ((uint32_t)number - outer * tiles)) * queries;
    t.start_q = t.start_k = 0;
    t.n_q = t.room_q = p->rows_q;
    t.n_k = p->max_k;
    t.diagonal = p->diagonal_given ? p->diagonal : t.n_k - t.n_q;
    return t;
}

FA_DEVICE fa_tile find_query_tile(const fa_attention_params *p, const fa_sm90_params *s,
                                  int64_t number)
{
    if (!s->uniform) return fa_find_tile(p, number, QUERIES);
    return find_tile_of_number(p, s, number, (uint32_t)p->heads_q, 1, QUERIES);
}

FA_DEVICE fa_sm90_reach find_reach(const fa_attention_params *p, const fa_sm90_params *s,
                                   const fa_tile *t)
{
    if (s->uniform) return s->reach;
    return fa_sm90_find_reach(p->causal, p->window_left, p->window_right, t->diagonal);
}

/* The key tiles that the queries may see: at least one, which may be completely masked. */
FA_DEVICE void find_key_tiles(fa_sm90_reach reach, work_tile *w)
{
    const fa_tile *t = &w->query_tile;
    const int first = (int)t->first;
    w->queries = rows_of(w, (int)t->n_q - first);
#if SPLIT
    w->last_query = max(0, min((int)t->n_q - first, CONSUMERS * queries_of_consumer(w)) - 1);
#endif
    w->n_k = (int32_t)t->n_k;
    w->hi = reach.hi >= UNBOUNDED ? UNBOUNDED : min(reach.hi + first, UNBOUNDED);
    w->lo = reach.lo <= -UNBOUNDED ? -UNBOUNDED : min(reach.lo + first, UNBOUNDED);
    const int lo = max(w->lo, 0), hi = find_keys_of_query(w, min(QUERIES - 1, last_query_of(w))).hi;
    const int first_key = lo < hi ? lo / FA_SM90_KEY_ALIGNMENT * FA_SM90_KEY_ALIGNMENT : 0;
    w->first_key = first_key;
    w->key_tiles = w->queries && lo < hi ? (hi - first_key + KEYS - 1) / KEYS : 1;
    w->n_k -= first_key;
    if (w->hi < UNBOUNDED) w->hi = max(w->hi - first_key, -UNBOUNDED);
    if (w->lo > -UNBOUNDED) w->lo = max(w->lo - first_key, -UNBOUNDED);
}

FA_DEVICE void find_tiles_of_consumers(work_tile *w)
{
#pragma unroll
    for (int c = 0; c < CONSUMERS; c++) find_consumer_tiles(w, c);
}

#if OPTIONS

/* The softmax gets scores in units of the scale or the softcap, because it multiplies by one number anyway. Scores are
 * multiplied by a scale below FA_SM90_MIN_SCALE before: a bias in such units could overflow, and with a negative scale
 * the largest score would be the smallest logit. */
FA_DEVICE void find_units(const fa_attention_params *p, work_tile *w)
{
    const float scale = fa_effective_scale(p, &w->query_tile);
    const bool capped = p->softcap > 0.0f, small = !(scale >= FA_SM90_MIN_SCALE);
    w->inner = capped ? scale / p->softcap : small ? scale * FA_LOG2E : 1.0f;
    w->scale = capped ? p->softcap * FA_LOG2E : small ? 1.0f : scale * FA_LOG2E;
#if HAS_OTHER_OPTIONS
    w->unit = FA_LOG2E / w->scale;
#endif
}

#if HAS_OTHER_OPTIONS

FA_DEVICE void find_options(const fa_attention_params *p, const fa_sm90_params *s, work_tile *w)
{
    const fa_tile *t = &w->query_tile;
    find_units(p, w);
    w->slope = 0;
    if (p->alibi_slopes) w->slope = p->alibi_slopes[t->batch * p->alibi_batch_stride + t->head];
    w->options = p->softcap > 0.0f ? FA_SM90_SOFTCAP : w->inner != 1.0f ? FA_SM90_SCALED : 0;
    if (w->slope != 0.0f) w->options |= FA_SM90_ALIBI;
    if (s->bias_mapped) w->options |= FA_SM90_BIAS;
    if (p->mask.data || (p->bias.data && !s->bias_mapped)) w->options |= FA_SM90_BY_ROWS;
    if (p->dropout_threshold) w->options |= FA_SM90_DROPOUT;
}

#else

FA_DEVICE void find_options(const fa_attention_params *p, const fa_sm90_params *s, work_tile *w)
{
    (void)s;
    find_units(p, w);
}

#endif

#else

/* The softmax gets the scores of the products unchanged. */
FA_DEVICE void find_options(const fa_attention_params *p, const fa_sm90_params *s, work_tile *w)
{
    (void)s;
    w->scale = fa_effective_scale(p, &w->query_tile) * FA_LOG2E;
}

#endif

#if SPLIT

/* A query tile that heads share, with all keys. All sequences have the same lengths; by_heads divides by the groups of heads. */
FA_DEVICE bool describe_whole_tile(const fa_attention_params *p, const fa_sm90_params *s,
                                   int64_t task, work_tile *w)
{
    const fa_tile *t = &w->query_tile;
    const fa_sm90_group *group = &s->split.group;
    const uint32_t heads = (uint32_t)fa_divide_by(p->heads_q, group->by_heads);
    w->query_tile = find_tile_of_number(p, s, task, heads, (uint32_t)group->heads,
                                        (uint32_t)group->tile_queries);
    w->box = group->box;
    w->rows = rows_of(w, (int)(t->room_q - t->first));
    w->out = fa_view_row(&p->out, t->block_q, t->first, t->head);
    w->sums = NULL;
    find_key_tiles(s->reach, w);
    find_tiles_of_consumers(w);
    find_options(p, s, w);
    return true;
}

/* Task number `task`: a query tile and a part of its keys, or all of them. Returns false if there are no rows, or no such
 * task. */
FA_DEVICE bool describe_work_tile(const fa_attention_params *p, const fa_sm90_params *s,
                                  int64_t task, work_tile *w)
{
    if (task < 0) return false;
    if (s->split.parts == 0) return describe_whole_tile(p, s, task, w);
    const fa_tile *t = &w->query_tile;
    const fa_sm90_part part = fa_sm90_find_part(&s->split, (int32_t)task);
    const int64_t row = task * QUERIES;
    w->query_tile = find_query_tile(p, s, part.head * p->tiles + p->tiles - 1 - part.tile);
    w->box = s->split.group.box;
    if (t->first >= t->room_q) return false;
    w->rows = (int32_t)fa_min64(t->room_q - t->first, QUERIES);
    w->out = (char *)(s->split.out + row * VALUE_DIM);
    w->sums = s->split.sums + row;
    find_key_tiles(find_reach(p, s, t), w);
    take_part(part.number * s->split.part_tiles, (part.number + 1) * s->split.part_tiles, w);
    find_tiles_of_consumers(w);
    find_options(p, s, w);
    return true;
}

#else

/* Describes the work tile of a task. A task is the number of a query tile, as in fa_find_tile. Returns false if there
 * are no rows, or no such task. */
FA_DEVICE bool describe_work_tile(const fa_attention_params *p, const fa_sm90_params *s,
                                  int64_t task, work_tile *w)
{
    if (task < 0) return false;
    const fa_tile *t = &w->query_tile;
    w->query_tile = find_query_tile(p, s, task);
    if (t->first >= t->room_q) return false;
    w->rows = (int32_t)fa_min64(t->room_q - t->first, QUERIES);
    w->out = fa_view_row(&p->out, t->block_q, t->start_q + t->first, t->head);
    find_key_tiles(find_reach(p, s, t), w);
    find_tiles_of_consumers(w);
    find_options(p, s, w);
    return true;
}

#endif

#endif
