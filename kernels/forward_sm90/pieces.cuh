/*
 * A piece of work: queries of a head and the tiles of keys that they see; and who describes it.
 * Pieces are described ahead, by one thread, for the warps that load and the warpgroups that
 * compute. They are dealt out by the blocks' numbers; only short rows
 * have blocks draw from a counter, which launches that may run side by side must not share.
 */
#ifndef FA_KERNELS_FORWARD_SM90_PIECES_CUH
#define FA_KERNELS_FORWARD_SM90_PIECES_CUH

/* Far beyond any key, and small enough to add to. */
enum { FAR = 1 << 30 };

FA_DEVICE int32_t near(int64_t x) { return (int32_t)fa_max64(-FAR, fa_min64(x, FAR)); }

FA_DEVICE int clamp(int x, int most) { return max(0, min(x, most)); }

/* The keys [lo, hi) that query i of a piece may see, from the piece's first tile on. Rows behind
 * the last query see what it sees. */
typedef struct bounds {
    int lo, hi;
} bounds;

FA_DEVICE bounds find_bounds(const piece *w, int i)
{
    const int row = min(i, max(w->queries, 1) - 1);
    const bounds b = {w->lo + row, clamp(w->hi + row, w->n_k)};
    return b;
}

/* Of a piece's tiles, those from the first to the last one that a consumer's queries may see; and which of
 * them need no mask. */
FA_DEVICE void find_tiles(piece *w, int consumer)
{
    const int first = consumer * ROWS, last = first + ROWS - 1;
    const bounds b = {max(find_bounds(w, first).lo, 0), find_bounds(w, last).hi};
    const bool some = first < w->queries && b.lo < b.hi;
    w->mine[consumer] = some ? (b.hi + KEYS - 1) / KEYS : 0;
    const int last_lo = max(find_bounds(w, last).lo, 0);
    w->full_from[consumer] = (last_lo + KEYS - 1) / KEYS;
    w->plain_from[consumer] = last_lo / KEYS + 1;
    w->full_to[consumer] = find_bounds(w, first).hi / KEYS;
}

#if OPTIONS

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
    const int64_t center = t->first + t->diagonal;
    int64_t right = p->causal ? 0 : FAR; /* how far a query sees beyond its own place */
    if (p->window_right >= 0) right = fa_min64(right, p->window_right);
    w->queries = (int32_t)fa_max64(0, fa_min64(t->n_q - t->first, QUERIES));
    w->n_k = (int32_t)t->n_k;
    w->hi = right >= FAR ? FAR : near(center + right + 1);
    w->lo = p->window_left < 0 ? -FAR : near(center - p->window_left);
    const int lo = max(w->lo, 0), hi = find_bounds(w, QUERIES - 1).hi;
    const int start = lo < hi ? lo / FA_SM90_ALIGN * FA_SM90_ALIGN : 0;
    w->start = start;
    w->tiles = w->queries && lo < hi ? (hi - start + KEYS - 1) / KEYS : 1;
    w->n_k -= start;
    if (w->hi < FAR) w->hi = max(w->hi - start, -FAR);
    if (w->lo > -FAR) w->lo = max(w->lo - start, -FAR);
#pragma unroll
    for (int c = 0; c < CONSUMERS; c++) find_tiles(w, c);
}

/* ---- Which pieces are the block's ------------------------------------------------------------ */

#if CLUSTER == 1 /* what is dealt out one by one */

/* Pieces of a causal mask come in pairs of equal length, and blocks take pairs in turn; but then some take
 * one pair more than others. So pieces of the last s->mixed heads are dealt out one by one, the longest
 * first, each to the block that has the fewest tiles to do so far. Each block deals out all of these, while
 * it works at its pairs, and notes its own: a warp's work, whose lanes know some blocks' tiles each. */
typedef struct dealer {
    /* Of blocks lane, lane + 32 ...: tiles << 8 | block; so many more pieces they can note. */
    uint32_t load[FA_SM90_MOST_DEALERS / 32];
    int32_t room[FA_SM90_MOST_DEALERS / 32];
    int center, left; /* query i sees the keys from i + center - left to i + center */
} dealer;

/* Tiles of the piece at a place of a head, and two for what is done once. */
FA_DEVICE uint32_t count_cost(const fa_attention_params *p, const dealer *d, int place)
{
    const int first = place * QUERIES + d->center;
    const int hi = min((int)p->most_k, first + QUERIES), lo = max(0, first - d->left);
    return (uint32_t)(max(0, hi - lo) / KEYS + 2);
}

/* Tiles of the pairs of a block. */
FA_DEVICE uint32_t count_pairs(const fa_attention_params *p, const fa_sm90_params *s,
                               const dealer *d, int block)
{
    const int blocks = (int)gridDim.x, tasks = (int)s->tasks, tiles = (int)p->tiles;
    const int pairs = (tiles + 1) / 2, step = blocks % pairs;
    uint32_t cost = 0;
    int i = block % pairs;
    for (int task = block; task < tasks; task += blocks) {
        cost += count_cost(p, d, tiles - 1 - i);
        if (i != tiles - 1 - i) cost += count_cost(p, d, i);
        i += i + step < pairs ? step : step - pairs;
    }
    return cost;
}

FA_DEVICE void begin_dealing(const fa_attention_params *p, const fa_sm90_params *s, dealer *d)
{
    const int blocks = (int)gridDim.x;
    d->center = near(p->diagonal_given ? p->diagonal : p->most_k - p->rows_q);
    d->left = p->window_left < 0 ? FAR : near(p->window_left);
#pragma unroll
    for (int i = 0; i < FA_SM90_MOST_DEALERS / 32; i++) {
        const int block = (int)threadIdx.x % 32 + 32 * i;
        d->room[i] = FA_SM90_MOST_DEALT;
        d->load[i] = ~0u;
        if (block < blocks) d->load[i] = count_pairs(p, s, d, block) << 8 | (uint32_t)block;
    }
}

FA_DEVICE uint32_t lesser(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* Deals one piece out; returns to which block. */
FA_DEVICE uint32_t deal(dealer *d, uint32_t cost)
{
    uint32_t least = ~0u;
#pragma unroll
    for (int i = 0; i < FA_SM90_MOST_DEALERS / 32; i++) least = lesser(least, d->load[i]);
    least = __reduce_min_sync(0xffffffff, least);
#pragma unroll
    for (int i = 0; i < FA_SM90_MOST_DEALERS / 32; i++)
        if (d->load[i] == least) d->load[i] = --d->room[i] > 0 ? least + (cost << 8) : ~0u;
    return least & 255;
}

/* One warp, at the beginning. */
FA_DEVICE void deal_out(const pipeline *pipe, const fa_attention_params *p, const fa_sm90_params *s)
{
    const uint32_t mine = (uint32_t)same_for_warp((int)blockIdx.x);
    const bool leader = threadIdx.x % 32 == 0;
    const int tiles = (int)p->tiles, first = (int)(p->tasks - s->mixed * p->tiles);
    dealer d;
    int count = 0;
    begin_dealing(p, s, &d);
    for (int place = tiles - 1; place >= 0; place--) {
        const uint32_t cost = count_cost(p, &d, place);
        for (int head = 0; head < s->mixed; head++) {
            if (deal(&d, cost) != mine) continue;
            if (leader) pipe->state->dealt[count] = first + head * tiles + tiles - 1 - place;
            count++;
        }
    }
    if (leader) {
        pipe->state->dealt_count = count;
        barrier_arrive(&pipe->state->dealt_full);
    }
}

/* Where no heads have pairs, which happens with few pieces: the longest first, dealt out to and fro. */
FA_DEVICE int64_t find_mixed(const fa_attention_params *p, const fa_sm90_params *s, int64_t i)
{
    const int64_t blocks = gridDim.x, block = blockIdx.x, heads = s->mixed;
    const int64_t number = i * blocks + (i % 2 == 0 ? block : blocks - 1 - block);
    const int64_t place = fa_divide(number, heads);
    return place < p->tiles ? (number - place * heads) * p->tiles + place : NO_TASK;
}

/* The block's i-th task, behind its pairs. */
FA_DEVICE int64_t find_dealt(const pipeline *pipe, const fa_attention_params *p,
                             const fa_sm90_params *s, int64_t i)
{
    const int64_t blocks = gridDim.x, block = blockIdx.x;
    if (s->mixed == 0) return NO_TASK;
    if (s->tasks == 0) return find_mixed(p, s, i);
    barrier_wait(&pipe->state->dealt_full, 0);
    const int64_t dealt = i - 2 * fa_divide(s->tasks - block + blocks - 1, blocks);
    return dealt < pipe->state->dealt_count ? pipe->state->dealt[dealt] : NO_TASK;
}

#endif

/* The block's i-th task, a piece of a head as fa_find_tile counts them. NO_PIECE: there is none in this
 * place, but there may be others; NO_TASK: nor are there others. */
FA_DEVICE int64_t find_task(const pipeline *pipe, const fa_attention_params *p,
                            const fa_sm90_params *s, int64_t i)
{
    const int64_t blocks = gridDim.x / CLUSTER, block = blockIdx.x / CLUSTER,
                  pairs = (p->tiles + 1) / 2;
    if (s->order != FA_SM90_PAIRS) {
        const int64_t task = block + i * blocks;
        return task < s->tasks ? task : NO_TASK;
    }
    const int64_t pair = block + i / 2 * blocks;
    if (pair < s->tasks) {
        const int64_t head = fa_divide(pair, pairs), half = pair - head * pairs;
        const int64_t other = p->tiles - 1 - half;
        if (i % 2 == 1 && other == half) return NO_PIECE;
        return head * p->tiles + (i % 2 == 0 ? half : other); /* first the longer one */
    }
#if CLUSTER == 1
    return find_dealt(pipe, p, s, i);
#else
    return NO_TASK; /* the planner has nothing dealt out one by one to clusters */
#endif
}

/* False: the place has no rows. */
FA_DEVICE bool find_piece(const fa_attention_params *p, const fa_sm90_params *s, int64_t task,
                          piece *w)
{
    if (task < 0) return false;
    const fa_tile *t = &w->tile;
    w->tile = fa_find_tile(p, task, QUERIES);
    if (t->first >= t->room_q) return false;
    w->room = (int32_t)fa_min64(t->room_q - t->first, QUERIES);
    w->out = fa_view_row(&p->out, t->block_q, t->start_q + t->first, t->head);
    find_keys(p, w);
    find_options(p, s, w);
    return true;
}

/* ---- Slots ----------------------------------------------------------------------------------- */

/* Used in turn, by the piece's number. */
FA_DEVICE uint32_t slot_number(int number) { return (uint32_t)number % SLOTS; }
FA_DEVICE int slot_parity(int number) { return (int)((uint32_t)number / SLOTS & 1); }

FA_DEVICE piece *slot_of(const pipeline *pipe, int number)
{
    return &pipe->pieces[slot_number(number)];
}

/* Waits for slots of so many pieces from number on: the whole warp. */
FA_DEVICE void await_slots(const pipeline *pipe, int number, int count)
{
    for (int i = number; i < number + count; i++)
        barrier_wait(&pipe->state->piece_empty[slot_number(i)], slot_parity(i) ^ 1);
}

FA_DEVICE void hand_out(const pipeline *pipe, int number, const piece *w)
{
    *slot_of(pipe, number) = *w;
    barrier_arrive(&pipe->state->piece_full[slot_number(number)]);
}

/* The last piece has no tiles. The whole warp. */
FA_DEVICE void hand_out_end(const pipeline *pipe, int number)
{
    piece w;
    w.tiles = 0;
    for (int c = 0; c < CONSUMERS; c++) w.mine[c] = 0;
    await_slots(pipe, number, 1);
    if (threadIdx.x % 32 == 0) hand_out(pipe, number, &w);
}

/* Describes pieces ahead, half of the slots at a time, a lane each: one warp, for this is a long chain of
 * arithmetic, which nobody is to wait for. */
FA_DEVICE void describe_assigned(const pipeline *pipe, const fa_attention_params *p,
                                 const fa_sm90_params *s)
{
    const int lane = (int)threadIdx.x % 32;
    piece w;
    int number = 0;
    bool more = true;
    for (int64_t i = lane; more; i += SLOTS / 2) {
        const int64_t task = lane < SLOTS / 2 ? find_task(pipe, p, s, i) : NO_PIECE;
        const bool found = find_piece(p, s, task, &w);
        const uint32_t all = __ballot_sync(0xffffffff, found);
        more = !__any_sync(0xffffffff, task == NO_TASK);
        await_slots(pipe, number, __popc(all));
        if (found) hand_out(pipe, number + __popc(all & ((1u << lane) - 1)), &w);
        number += __popc(all);
    }
    hand_out_end(pipe, number);
}

#if DRAWS

/* Where memory bounds the rate, multiprocessors get unequal shares of it, and with equal shares of the work some
 * end a third later than others. So blocks draw pieces, one by one and not far ahead, behind the first, which
 * goes by the block's number. A counter is 0 before a launch and after it: each block that has a piece draws
 * once in vain, which makes as many draws as there are pieces. */
static __device__ uint32_t counters[FA_SM90_COUNTERS];

FA_DEVICE int64_t draw_task(const fa_sm90_params *s)
{
    uint32_t drawn = 0;
    if (threadIdx.x % 32 == 0) drawn = atomicInc(&counters[s->counter], (uint32_t)s->tasks - 1);
    return (int64_t)gridDim.x + same_for_warp((int)drawn);
}

/* So many pieces are drawn before the first of them has ended. */
enum { DRAWN = SINGLE_TILES ? 5 : 3 };

FA_DEVICE void describe_drawn(const pipeline *pipe, const fa_attention_params *p,
                              const fa_sm90_params *s)
{
    piece w;
    int number = 0;
    for (int64_t task = blockIdx.x; task < s->tasks; task = draw_task(s)) {
        if (!find_piece(p, s, task, &w)) continue;
        await_slots(pipe, number, 1);
        if (threadIdx.x % 32 == 0) hand_out(pipe, number, &w);
        number++;
        if (number < DRAWN) continue;
        const int before = number - DRAWN;
        barrier_wait(&pipe->state->piece_empty[slot_number(before)], slot_parity(before));
    }
    hand_out_end(pipe, number);
}

#endif

FA_DEVICE void describe(const pipeline *pipe, const fa_attention_params *p, const fa_sm90_params *s)
{
#if DRAWS
    if (s->counter >= 0) {
        describe_drawn(pipe, p, s);
        return;
    }
#endif
    describe_assigned(pipe, p, s);
}

/* The description of a piece, when it is there. */
FA_DEVICE const piece *read_piece(const pipeline *pipe, int number)
{
    __syncwarp();
    barrier_wait(&pipe->state->piece_full[slot_number(number)], slot_parity(number));
    return slot_of(pipe, number);
}

/* One arrival of a warp. */
FA_DEVICE void release_piece(const pipeline *pipe, int number)
{
    __syncwarp();
    barrier_arrive_if(&pipe->state->piece_empty[slot_number(number)], threadIdx.x % 32 == 0);
}

/* ---- A consumer's way through them ----------------------------------------------------------- */

typedef struct progress {
    int number;       /* of the piece */
    int tile, tiles;  /* the tile of it, how many it has; 0: there is no such piece */
    int mine;         /* how many of them this consumer needs */
    uint32_t q;       /* its queries, as wgmma finds them */
    tile_count count; /* tiles so far, through all pieces */
#if OPTIONS & FA_SM90_BIAS
    int biases; /* tiles of the bias so far */
#endif
} progress;

/* To the next piece, waiting for it. */
FA_DEVICE void next_piece(const pipeline *pipe, int consumer, progress *at)
{
    at->number++;
    barrier_wait(&pipe->state->q_full[q_stage(at->number)][consumer], q_parity(at->number));
    const piece *w = slot_of(pipe, at->number);
    at->tiles = same_for_warp(w->tiles);
    at->mine = same_for_warp(w->mine[consumer]);
    at->tile = 0;
    at->q = matrix_place(q_place(pipe, at->number, consumer), 0);
}

/* The barrier of its queries' place. */
FA_DEVICE uint64_t *q_empty(const pipeline *pipe, const progress *at, int consumer)
{
    return &pipe->state->q_empty[q_stage(at->number)][consumer];
}

#endif
