/*
 * Two warps that load by the copy engine (TMA), one queries and keys, one values: each tile into
 * its next place as soon as all consumers have given that back.
 */
#ifndef FA_KERNELS_FORWARD_SM90_LOADS_CUH
#define FA_KERNELS_FORWARD_SM90_LOADS_CUH

FA_DEVICE void load_queries(const pipeline *pipe, const fa_sm90_params *s, const fa_tile *t,
                            int consumer, int number)
{
    uint64_t *barrier = &pipe->state->q_full[number % Q_PLACES][consumer];
    const int row = (int)(t->start_q + t->first) + consumer * ROWS;
    barrier_expect(barrier, Q_BYTES);
#pragma unroll
    for (int block = 0; block < K_BLOCKS; block++)
        tma_load_4d(q_place(pipe, number, consumer) + block * Q_BLOCK, &s->q, barrier, 64 * block,
                    row, (int)t->head * s->q_step.head, (int)t->block_q * s->q_step.block);
}

/* A tile of keys or values, from key `key` on: at once, or page by page. */
FA_DEVICE void load_keys(char *shared, const fa_sm90_map *map, const fa_sm90_steps *step,
                         uint64_t *barrier, int blocks, const fa_attention_params *p,
                         const fa_sm90_params *s, const fa_tile *t, int key)
{
    barrier_expect(barrier, blocks * KV_BLOCK);
    for (int at = 0; at < KEYS; at += s->box_rows) {
        int row = (int)t->start_k + key + at, outer = (int)t->block_k;
        if (p->block_table) {
            /* What lies behind the last page is not read; any page will do for it. */
            const int64_t j =
                fa_min64(key + at, fa_max64(t->n_k - 1, 0)) / s->box_rows * s->box_rows;
            const int64_t page = (uint32_t)j / (uint32_t)p->rows_k;
            row = (int)((uint32_t)j % (uint32_t)p->rows_k);
            outer = t->n_k ? p->block_table[t->batch * p->block_table_stride + page] : 0;
        }
        for (int block = 0; block < blocks; block++)
            tma_load_4d(shared + block * KV_BLOCK + at * 128, map, barrier, 64 * block, row,
                        (int)t->head_kv * step->head, outer * step->block);
    }
}

/* Clears the rows of values outside [from, to) that the copy engine has read all the same, though
 * no query of the sequence may see them: they may hold NaN, and 0 * NaN is NaN. The whole warp. */
FA_DEVICE void clean_values(char *shared, int64_t from, int64_t to)
{
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int block = 0; block < V_BLOCKS; block++)
#pragma unroll 1
        for (int at = lane * 16; at < KV_BLOCK; at += 32 * 16)
            if (at / 128 < from || at / 128 >= to)
                *(float4 *)(shared + block * KV_BLOCK + at) = make_float4(0, 0, 0, 0);
    async_proxy_fence();
    __syncwarp();
}

/* The keys that some query of the sequence may see. */
FA_DEVICE fa_range seen_keys(const fa_attention_params *p, const fa_tile *t)
{
    fa_range seen = fa_tile_visible(p, t, fa_max64(t->n_q - 1, 0));
    seen.lo = fa_tile_visible(p, t, 0).lo;
    return seen;
}

/* Whether a tile of values holds rows that no query may see; behind the tensor's end are zeros. */
FA_DEVICE bool needs_cleaning(const fa_attention_params *p, const fa_tile *t, const fa_range *seen,
                              int key)
{
    const bool zeros_behind = !p->block_table && t->start_k + seen->hi == p->rows_k;
    return key < seen->lo || (key + KEYS > seen->hi && !zeros_behind);
}

FA_DEVICE void load_values(const pipeline *pipe, const fa_attention_params *p,
                           const fa_sm90_params *s, const fa_tile *t, int key, int stage,
                           int *cleaned)
{
    char *shared = pipe->v + stage * V_BYTES;
    uint64_t *full = &pipe->state->v_full[stage];
    const bool leader = threadIdx.x % 32 == 0;
    const fa_range seen = seen_keys(p, t);
    if (!needs_cleaning(p, t, &seen, key)) {
        if (leader) load_keys(shared, &s->v, &s->v_step, full, V_BLOCKS, p, s, t, key);
        return;
    }
    uint64_t *raw = &pipe->state->v_raw;
    if (leader) load_keys(shared, &s->v, &s->v_step, raw, V_BLOCKS, p, s, t, key);
    barrier_wait(raw, *cleaned & 1);
    *cleaned += 1;
    clean_values(shared, seen.lo - key, seen.hi - key);
    if (leader) barrier_arrive(full);
}

/* Hands a piece over to a consumer, and asks for its queries; the barrier of these tells that both
 * are there. Their place's first use finds it empty, hence the parities that start at 1. */
FA_DEVICE void hand_over(const pipeline *pipe, const fa_sm90_params *s, const piece *w,
                         int consumer, int number)
{
    barrier_wait(&pipe->state->q_empty[number % Q_PLACES][consumer], q_parity(number) ^ 1);
    if (threadIdx.x != 0) return;
    if (w->tiles) load_queries(pipe, s, &w->tile, consumer, number);
    else barrier_arrive(&pipe->state->q_full[number % Q_PLACES][consumer]);
}

/* What a warp that loads counts, besides tiles. */
typedef struct loads {
    int cleaned; /* tiles of values that were cleaned */
} loads;

/* Where a tile of a piece goes. */
typedef struct tile_at {
    const piece *w;
    int tile;
    tile_count count; /* of tiles so far, through all pieces */
} tile_at;

FA_DEVICE void load_tile_keys(const pipeline *pipe, const fa_attention_params *p,
                              const fa_sm90_params *s, const tile_at *at)
{
    const piece *w = at->w;
    const int stage = stage_of(at->count);
    __syncwarp(); /* no lane comes two phases late to a barrier */
    barrier_wait(&pipe->state->k_empty[stage], parity_of(at->count) ^ 1);
    if (threadIdx.x == 0)
        load_keys(pipe->k + stage * K_BYTES, &s->k, &s->k_step, &pipe->state->k_full[stage],
                  K_BLOCKS, p, s, &w->tile, w->start + at->tile * KEYS);
}

FA_DEVICE void load_tile_values(const pipeline *pipe, const fa_attention_params *p,
                                const fa_sm90_params *s, const tile_at *at, loads *so_far)
{
    const int stage = stage_of(at->count);
    __syncwarp();
    barrier_wait(&pipe->state->v_empty[stage], parity_of(at->count) ^ 1);
    load_values(pipe, p, s, &at->w->tile, at->w->start + at->tile * KEYS, stage, &so_far->cleaned);
}

/* Queries and keys. A piece's first keys are asked for before its queries, whose places the
 * consumers give back later than those of keys. */
FA_DEVICE void produce_keys(const pipeline *pipe, const fa_attention_params *p,
                            const fa_sm90_params *s)
{
    tile_at at = {read_piece(pipe, 0), 0, 0};
    int number = 0;
    while (at.w->tiles) {
        for (at.tile = 0; at.tile < at.w->tiles; at.tile++, at.count++) {
            load_tile_keys(pipe, p, s, &at);
            for (int c = 0; c < CONSUMERS && at.tile == 0; c++) hand_over(pipe, s, at.w, c, number);
        }
        release_piece(pipe, number);
        at.w = read_piece(pipe, ++number);
    }
    for (int c = 0; c < CONSUMERS; c++) hand_over(pipe, s, at.w, c, number);
}

/* Values, by a warp of their own: each waits for its own places, so that neither is late for the
 * other's sake (that alone is worth a fifth of the speed). */
FA_DEVICE void produce_values(const pipeline *pipe, const fa_attention_params *p,
                              const fa_sm90_params *s)
{
    loads so_far = {0};
    tile_at at = {read_piece(pipe, 0), 0, 0};
    int number = 0;
    while (at.w->tiles) {
        for (at.tile = 0; at.tile < at.w->tiles; at.tile++, at.count++)
            load_tile_values(pipe, p, s, &at, &so_far);
        release_piece(pipe, number);
        at.w = read_piece(pipe, ++number);
    }
}

#if GENERAL & FA_SM90_BIAS

/* The bias of a tile, for a consumer that needs the tile. loaded: how many it was given so far. */
FA_DEVICE void load_bias(const pipeline *pipe, const fa_sm90_params *s, const piece *w, int tile,
                         int consumer, int *loaded)
{
    uint64_t *full = &pipe->state->bias_full[consumer];
    const int row = (int)w->tile.first + consumer * ROWS, key = w->start + tile * KEYS;
    if (tile >= w->mine[consumer]) return;
    barrier_wait(&pipe->state->bias_empty[consumer], (*loaded & 1) ^ 1);
    *loaded += 1;
    if (threadIdx.x % 32 != 0) return;
    barrier_expect(full, BIAS_BYTES);
#pragma unroll
    for (int block = 0; block < KEYS / 64; block++)
        tma_load_4d(pipe->bias + consumer * BIAS_BYTES + block * BIAS_BLOCK, &s->bias, full,
                    key + 64 * block, row, (int)w->tile.head * s->bias_step.head,
                    (int)w->tile.batch * s->bias_step.block);
}

/* A bias that the copy engine can load, by a warp of its own: it comes from further away than keys and
 * values, which nothing is to hold up. */
FA_DEVICE void produce_biases(const pipeline *pipe, const fa_sm90_params *s)
{
    int loaded[CONSUMERS] = {0}, number = 0;
    const piece *w = read_piece(pipe, 0);
    while (w->tiles) {
        for (int tile = 0; tile < w->tiles; tile++) {
            __syncwarp();
#pragma unroll
            for (int c = 0; c < CONSUMERS; c++) load_bias(pipe, s, w, tile, c, &loaded[c]);
        }
        release_piece(pipe, number);
        w = read_piece(pipe, ++number);
    }
}

#endif

#endif
