/*
 * Two warps that load by the copy engine (TMA): one the chunks of keys and values, in the order in which
 * consumers need them, one the queries.
 */
#ifndef FA_KERNELS_FORWARD_SM90_WIDE_LOADS_CUH
#define FA_KERNELS_FORWARD_SM90_WIDE_LOADS_CUH

/* Where a chunk goes. count: of chunks so far, through all pieces. */
FA_DEVICE char *ring_place(const pipeline *pipe, tile_count count)
{
    return pipe->ring + stage_of(count) * CHUNK;
}

/* What is the same for all chunks of a piece, found once: asking for a chunk is to take less time than
 * its products. */
typedef struct source {
    const piece *w;
    int start_k, head_k, head_v, block_k, block_v; /* as the copy engine counts */
    int kept_from, kept_to; /* values of other keys are cleared: see needs_cleaning */
} source;

FA_DEVICE source find_source(const fa_attention_params *p, const fa_sm90_params *s, const piece *w)
{
    const fa_tile *t = &w->tile;
    const fa_range seen = seen_keys(p, t);
    const part behind = {near(seen.hi), V_ROWS, 0, 0};
    const source from = {.w = w,
                         .start_k = (int)t->start_k,
                         .head_k = (int)t->head_kv * s->k_step.head,
                         .head_v = (int)t->head_kv * s->v_step.head,
                         .block_k = (int)t->block_k * s->k_step.block,
                         .block_v = (int)t->block_k * s->v_step.block,
                         .kept_from = near(seen.lo),
                         .kept_to = needs_cleaning(p, t, &seen, &behind) ? near(seen.hi) : FAR};
    return from;
}

/* Until consumers have given the next place back. */
FA_DEVICE void wait_for_place(const pipeline *pipe, tile_count count)
{
    __syncwarp(); /* no lane comes two phases late to a barrier */
    ptx_mbarrier_wait(&pipe->state->empty[stage_of(count)], parity_of(count) ^ 1);
}

/* The block's half of a tile's keys, by blocks of columns. */
FA_DEVICE void load_tile_keys(const pipeline *pipe, const fa_attention_params *p,
                              const fa_sm90_params *s, const source *from, int tile,
                              tile_count *count)
{
    const int key = from->w->start + tile * KEYS + this_block() * FRAGMENT_KEYS;
#pragma unroll
    for (int first = 0; first < K_BLOCKS; first += K_CHUNK_BLOCKS, ++*count) {
        const part chunk = {key, FRAGMENT_KEYS, 64 * first, min(K_CHUNK_BLOCKS, K_BLOCKS - first)};
        uint64_t *full = &pipe->state->full[stage_of(*count)];
        char *to = ring_place(pipe, *count);
        wait_for_place(pipe, *count);
        if (threadIdx.x != 0) continue;
        if (p->block_table) {
            load_part(to, &s->k, &s->k_step, full, &chunk, p, s, &from->w->tile);
            continue;
        }
        ptx_mbarrier_arrive_expect(full, chunk.blocks * K_BLOCK);
#pragma unroll
        for (int block = 0; block < chunk.blocks; block++)
            ptx_tma_load_4d(to + block * K_BLOCK, &s->k, full, chunk.column + 64 * block,
                            from->start_k + key, from->head_k, from->block_k);
    }
}

/* The block's columns of a tile's values, by rows. */
FA_DEVICE void load_tile_values(const pipeline *pipe, const fa_attention_params *p,
                                const fa_sm90_params *s, const source *from, int tile,
                                tile_count *count, int *cleaned)
{
#pragma unroll
    for (int row = 0; row < KEYS; row += V_ROWS, ++*count) {
        const part chunk = {from->w->start + tile * KEYS + row, V_ROWS, FIRST_COLUMN, V_BLOCKS};
        uint64_t *full = &pipe->state->full[stage_of(*count)];
        char *to = ring_place(pipe, *count);
        wait_for_place(pipe, *count);
        if (chunk.key < from->kept_from || chunk.key + V_ROWS > from->kept_to) {
            load_values(pipe, p, s, &from->w->tile, &chunk, to, full, cleaned);
            continue;
        }
        if (threadIdx.x != 0) continue;
        if (p->block_table) {
            load_part(to, &s->v, &s->v_step, full, &chunk, p, s, &from->w->tile);
            continue;
        }
        ptx_mbarrier_arrive_expect(full, V_BLOCKS * V_BLOCK);
#pragma unroll
        for (int block = 0; block < V_BLOCKS; block++)
            ptx_tma_load_4d(to + block * V_BLOCK, &s->v, full, chunk.column + 64 * block,
                            from->start_k + chunk.key, from->head_v, from->block_v);
    }
}

/* The keys of each tile come before the values of the one before. */
FA_DEVICE void produce_chunks(const pipeline *pipe, const fa_attention_params *p,
                              const fa_sm90_params *s)
{
    tile_count count = 0;
    int cleaned = 0;
    for (int number = 0;; number++) {
        const piece *w = read_piece(pipe, number);
        const int tiles = w->tiles;
        if (!tiles) break;
        const source from = find_source(p, s, w);
        load_tile_keys(pipe, p, s, &from, 0, &count);
        for (int tile = 0; tile < tiles; tile++) {
            if (tile + 1 < tiles) load_tile_keys(pipe, p, s, &from, tile + 1, &count);
            load_tile_values(pipe, p, s, &from, tile, &count, &cleaned);
        }
        release_piece(pipe, number);
    }
}

FA_DEVICE void produce_queries(const pipeline *pipe, const fa_sm90_params *s)
{
    const piece *w;
    for (int number = 0;; number++) {
        w = read_piece(pipe, number);
        for (int c = 0; c < CONSUMERS; c++) hand_over(pipe, s, w, c, number);
        if (!w->tiles) break; /* the last one is nobody's to describe anew */
        release_piece(pipe, number);
    }
}

#endif
