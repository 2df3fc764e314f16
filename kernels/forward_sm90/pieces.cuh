/*
 * A piece of work: queries of a head and the tiles of keys that they see; and who describes it.
 * Pieces are described ahead, by one thread, for the warps that load and the warpgroups that
 * compute. They are dealt out by the blocks' numbers: no counter in memory, which launches side by
 * side or a graph's replay would have to share.
 */
#ifndef FA_KERNELS_FORWARD_SM90_PIECES_CUH
#define FA_KERNELS_FORWARD_SM90_PIECES_CUH

/* Far beyond any key, and small enough to add to. */
enum { FAR = 1 << 30 };

FA_DEVICE int32_t near(int64_t x) { return (int32_t)fa_max64(-FAR, fa_min64(x, FAR)); }

/* Of a piece's tiles, those from the first to the last one that a consumer's queries may see. */
FA_DEVICE int32_t count_tiles(const fa_attention_params *p, const piece *w, int consumer)
{
    const fa_tile *t = &w->tile;
    const int64_t first = t->first + consumer * ROWS, last = fa_min64(first + ROWS, t->n_q) - 1;
    if (first > last) return 0;
    const int64_t lo = fa_tile_visible(p, t, first).lo, hi = fa_tile_visible(p, t, last).hi;
    return lo < hi ? (int32_t)((hi - w->start + KEYS - 1) / KEYS) : 0;
}

FA_DEVICE int clamp(int x, int most) { return max(0, min(x, most)); }

/* The keys [lo, hi) that query i of a piece may see, from the piece's first tile on. Rows behind
 * the last query see what it sees. */
typedef struct bounds {
    int lo, hi;
} bounds;

FA_DEVICE bounds find_bounds(const piece *w, int i)
{
    const int last = (int)fa_max64(w->tile.n_q - w->tile.first, 1) - 1;
    const bounds b = {w->lo + min(i, last), clamp(w->hi + min(i, last), w->n_k)};
    return b;
}

#if GENERAL

FA_DEVICE void find_units(const fa_attention_params *p, piece *w)
{
    const float scale = fa_effective_scale(p, &w->tile);
    const bool capped = p->softcap > 0.0f, small = !(scale >= FA_SM90_LEAST_SCALE);
    w->inner = capped ? scale / p->softcap : small ? scale * FA_LOG2E : 1.0f;
    w->scale = capped ? p->softcap * FA_LOG2E : small ? 1.0f : scale * FA_LOG2E;
    w->unit = FA_LOG2E / w->scale;
}

FA_DEVICE void find_options(const fa_attention_params *p, const fa_sm90_params *s, piece *w)
{
    const fa_tile *t = &w->tile;
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

/* Scores are as the products left them when they come to the softmax, which multiplies by the
 * scale. */
FA_DEVICE void find_options(const fa_attention_params *p, const fa_sm90_params *s, piece *w)
{
    (void)s;
    w->scale = fa_effective_scale(p, &w->tile) * FA_LOG2E;
}

#endif

/* The tiles of keys that a piece's queries may see: at least one, which may be masked as a whole;
 * and for each consumer which of them it needs, and which it need not mask. */
FA_DEVICE void find_keys(const fa_attention_params *p, piece *w)
{
    const fa_tile *t = &w->tile;
    const int64_t last = fa_min64(t->first + QUERIES, t->n_q) - 1, center = t->first + t->diagonal;
    int64_t right = p->causal ? 0 : FAR; /* how far a query sees beyond its own place */
    w->start = 0;
    w->tiles = 1;
    if (t->first <= last) {
        const int64_t lo = fa_tile_visible(p, t, t->first).lo, hi = fa_tile_visible(p, t, last).hi;
        if (lo < hi) {
            w->start = (int32_t)(lo / FA_SM90_ALIGN * FA_SM90_ALIGN);
            w->tiles = (int32_t)((hi - w->start + KEYS - 1) / KEYS);
        }
    }
    if (p->window_right >= 0) right = fa_min64(right, p->window_right);
    w->n_k = (int32_t)(t->n_k - w->start);
    for (int c = 0; c < CONSUMERS; c++) w->mine[c] = count_tiles(p, w, c);
    w->hi = right == FAR ? FAR : near(center + right + 1 - w->start);
    w->lo = p->window_left < 0 ? -FAR : near(center - p->window_left - w->start);
    for (int c = 0; c < CONSUMERS; c++) {
        w->full_from[c] = (max(find_bounds(w, c * ROWS + ROWS - 1).lo, 0) + KEYS - 1) / KEYS;
        w->full_to[c] = find_bounds(w, c * ROWS).hi / KEYS;
    }
}

/* The block's walk through the pieces. */
typedef struct walk {
    int64_t task;
    int half; /* 0, 1, 0 ...: of the task, or the direction in which pieces are dealt out */
} walk;

/* A head's piece as fa_find_tile counts them; -1: the task has no such half. */
FA_DEVICE int64_t find_task(const fa_attention_params *p, const fa_sm90_params *s, const walk *at)
{
    const int64_t pairs = (p->tiles + 1) / 2;
    if (s->order == FA_SM90_LONGEST_FIRST) {
        const int64_t heads = s->tasks / p->tiles;
        return at->task % heads * p->tiles + at->task / heads;
    }
    if (s->order != FA_SM90_PAIRS) return at->task;
    const int64_t outer = at->task / pairs, i = at->task % pairs, last = p->tiles - 1 - i;
    if (at->half == 1 && last == i) return -1;
    return outer * p->tiles + (at->half == 0 ? i : last); /* first the longer one */
}

FA_DEVICE void step(const fa_sm90_params *s, walk *at)
{
    const int64_t blocks = gridDim.x, block = blockIdx.x;
    if (s->order == FA_SM90_LONGEST_FIRST)
        at->task += 2 * (at->half == 0 ? blocks - 1 - block : block) + 1;
    else if (s->order != FA_SM90_PAIRS || at->half == 1) at->task += blocks;
    at->half ^= 1;
}

/* False: the place has no rows. */
FA_DEVICE bool find_piece(const fa_attention_params *p, const fa_sm90_params *s, const walk *at,
                          piece *w)
{
    const int64_t task = find_task(p, s, at);
    if (task < 0) return false;
    w->tile = fa_find_tile(p, task, QUERIES);
    if (w->tile.first >= w->tile.room_q) return false;
    find_keys(p, w);
    find_options(p, s, w);
    return true;
}

FA_DEVICE void find_next(const fa_attention_params *p, const fa_sm90_params *s, walk *at, piece *w)
{
    bool found = false;
    while (!found && at->task < s->tasks) {
        found = find_piece(p, s, at, w);
        step(s, at);
    }
    if (found) return;
    w->tiles = 0;
    for (int c = 0; c < CONSUMERS; c++) w->mine[c] = 0;
}

/* ---- Slots ----------------------------------------------------------------------------------- */

FA_DEVICE piece *slot_of(const pipeline *pipe, int number)
{
    return &pipe->state->pieces[number % SLOTS];
}

FA_DEVICE int slot_parity(int number) { return number / SLOTS & 1; }

/* Describes piece after piece, as far ahead as there are slots. One thread, of a warp of its own:
 * this is a long chain of 64-bit arithmetic, which nobody is to wait for. The last piece has no
 * tiles. */
FA_DEVICE void describe(const pipeline *pipe, const fa_attention_params *p, const fa_sm90_params *s)
{
    walk where = {blockIdx.x, 0};
    const piece *w;
    int number = 0;
    do {
        barrier_wait(&pipe->state->piece_empty[number % SLOTS], slot_parity(number) ^ 1);
        find_next(p, s, &where, slot_of(pipe, number));
        w = slot_of(pipe, number);
        barrier_arrive(&pipe->state->piece_full[number % SLOTS]);
        number++;
    } while (w->tiles);
}

/* The description of a piece, when it is there. */
FA_DEVICE const piece *read_piece(const pipeline *pipe, int number)
{
    __syncwarp();
    barrier_wait(&pipe->state->piece_full[number % SLOTS], slot_parity(number));
    return slot_of(pipe, number);
}

/* One arrival of a warp. */
FA_DEVICE void release_piece(const pipeline *pipe, int number)
{
    __syncwarp();
    barrier_arrive_if(&pipe->state->piece_empty[number % SLOTS], threadIdx.x % 32 == 0);
}

/* ---- A consumer's way through them ----------------------------------------------------------- */

typedef struct progress {
    int number;       /* of the piece */
    int tile, tiles;  /* the tile of it, how many it has; 0: there is no such piece */
    int mine;         /* how many of them this consumer needs */
    tile_count count; /* tiles so far, through all pieces */
#if GENERAL & FA_SM90_BIAS
    int biases; /* tiles of the bias so far */
#endif
} progress;

/* To the next piece, waiting for it. */
FA_DEVICE void next_piece(const pipeline *pipe, int consumer, progress *at)
{
    at->number++;
    barrier_wait(&pipe->state->q_full[consumer], at->number & 1);
    const piece *w = slot_of(pipe, at->number);
    at->tiles = same_for_warp(w->tiles);
    at->mine = same_for_warp(w->mine[consumer]);
    at->tile = 0;
}

#endif
