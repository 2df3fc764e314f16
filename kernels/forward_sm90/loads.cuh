/*
 * Two warps that load by the copy engine (TMA), one queries and keys, one values: each tile into
 * its next place as soon as all consumers have given that back.
 */
#ifndef FA_KERNELS_FORWARD_SM90_LOADS_CUH
#define FA_KERNELS_FORWARD_SM90_LOADS_CUH

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
    const part from = {w->start + at->tile * KEYS, KEYS, 0, K_BLOCKS};
    if (threadIdx.x == 0)
        load_part(pipe->k + stage * K_BYTES, &s->k, &s->k_step, &pipe->state->k_full[stage], &from,
                  p, s, &w->tile);
}

/* cleaned: see load_values. */
FA_DEVICE void load_tile_values(const pipeline *pipe, const fa_attention_params *p,
                                const fa_sm90_params *s, const tile_at *at, int *cleaned)
{
    const int stage = stage_of(at->count);
    __syncwarp();
    barrier_wait(&pipe->state->v_empty[stage], parity_of(at->count) ^ 1);
    const part from = {at->w->start + at->tile * KEYS, KEYS, 0, V_BLOCKS};
    load_values(pipe, p, s, &at->w->tile, &from, pipe->v + stage * V_BYTES,
                &pipe->state->v_full[stage], cleaned);
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
    int cleaned = 0, number = 0;
    tile_at at = {read_piece(pipe, 0), 0, 0};
    while (at.w->tiles) {
        for (at.tile = 0; at.tile < at.w->tiles; at.tile++, at.count++)
            load_tile_values(pipe, p, s, &at, &cleaned);
        release_piece(pipe, number);
        at.w = read_piece(pipe, ++number);
    }
}

#if OPTIONS & FA_SM90_BIAS

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
