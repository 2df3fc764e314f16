/*
 * Parts of tensors to shared memory, by the copy engine (TMA): queries of a piece, rows of keys and of
 * values.
 */
#ifndef FA_KERNELS_FORWARD_SM90_BOXES_CUH
#define FA_KERNELS_FORWARD_SM90_BOXES_CUH

FA_DEVICE void load_queries(const pipeline *pipe, const fa_sm90_params *s, const fa_tile *t,
                            int consumer, int number)
{
    uint64_t *barrier = &pipe->state->q_full[q_stage(number)][consumer];
    const int row = (int)(t->start_q + t->first) + consumer * ROWS;
    ptx_mbarrier_arrive_expect(barrier, Q_BYTES);
#pragma unroll
    for (int block = 0; block < K_BLOCKS; block++)
        ptx_tma_load_4d(q_place(pipe, number, consumer) + block * Q_BLOCK, &s->q, barrier,
                        64 * block, row, (int)t->head * s->q_step.head,
                        (int)t->block_q * s->q_step.block);
}

/* Hands a piece over to a consumer, and asks for its queries; the barrier of these tells that both
 * are there. Their place's first use finds it empty, hence the parities that start at 1. */
FA_DEVICE void hand_over(const pipeline *pipe, const fa_sm90_params *s, const piece *w,
                         int consumer, int number)
{
    ptx_mbarrier_wait(&pipe->state->q_empty[q_stage(number)][consumer], q_parity(number) ^ 1);
    if (threadIdx.x % 32 != 0) return;
    if (w->tiles) load_queries(pipe, s, &w->tile, consumer, number);
    else ptx_mbarrier_arrive(&pipe->state->q_full[q_stage(number)][consumer]);
}

/* So many keys or values from key `key` on, of so many blocks of 64 columns from `column` on. */
typedef struct part {
    int key, rows, column, blocks;
} part;

/* At once, or page by page. */
FA_DEVICE void load_part(char *shared, const fa_sm90_map *map, const fa_sm90_steps *step,
                         uint64_t *barrier, const part *from, const fa_attention_params *p,
                         const fa_sm90_params *s, const fa_tile *t)
{
    ptx_mbarrier_arrive_expect(barrier, from->blocks * from->rows * 128);
    for (int at = 0; at < from->rows; at += s->box_rows) {
        int row = (int)t->start_k + from->key + at, outer = (int)t->block_k;
        if (p->block_table) {
            /* What lies behind the last page is not read; any page will do for it. */
            const int64_t j =
                fa_min64(from->key + at, fa_max64(t->n_k - 1, 0)) / s->box_rows * s->box_rows;
            const int64_t page = (uint32_t)j / (uint32_t)p->rows_k;
            row = (int)((uint32_t)j % (uint32_t)p->rows_k);
            outer = t->n_k ? p->block_table[t->batch * p->block_table_stride + page] : 0;
        }
        for (int block = 0; block < from->blocks; block++)
            ptx_tma_load_4d(shared + (block * from->rows + at) * 128, map, barrier,
                            from->column + 64 * block, row, (int)t->head_kv * step->head,
                            outer * step->block);
    }
}

/* Clears the rows of values outside [from, to) that the copy engine has read all the same, though
 * no query of the sequence may see them: they may hold NaN, and 0 * NaN is NaN. The whole warp. */
FA_DEVICE void clean_values(char *shared, int rows, int64_t from, int64_t to)
{
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int block = 0; block < V_BLOCKS; block++)
#pragma unroll 1
        for (int at = lane * 16; at < rows * 128; at += 32 * 16)
            if (at / 128 < from || at / 128 >= to)
                *(float4 *)(shared + block * rows * 128 + at) = make_float4(0, 0, 0, 0);
    ptx_fence_proxy_async();
    __syncwarp();
}

/* The keys that some query of the sequence may see. */
FA_DEVICE fa_range seen_keys(const fa_attention_params *p, const fa_tile *t)
{
    fa_range seen = fa_tile_visible(p, t, fa_max64(t->n_q - 1, 0));
    seen.lo = fa_tile_visible(p, t, 0).lo;
    return seen;
}

/* Whether these rows of values hold some that no query may see; behind the tensor's end are zeros. */
FA_DEVICE bool needs_cleaning(const fa_attention_params *p, const fa_tile *t, const fa_range *seen,
                              const part *from)
{
    const bool zeros_behind = !p->block_table && t->start_k + seen->hi == p->rows_k;
    return from->key < seen->lo || (from->key + from->rows > seen->hi && !zeros_behind);
}

/* Values, of which `full` tells that they are there. cleaned: how often they were cleaned so far. */
FA_DEVICE void load_values(const pipeline *pipe, const fa_attention_params *p,
                           const fa_sm90_params *s, const fa_tile *t, const part *from,
                           char *shared, uint64_t *full, int *cleaned)
{
    const bool leader = threadIdx.x % 32 == 0;
    const fa_range seen = seen_keys(p, t);
    if (!needs_cleaning(p, t, &seen, from)) {
        if (leader) load_part(shared, &s->v, &s->v_step, full, from, p, s, t);
        return;
    }
    uint64_t *raw = &pipe->state->v_raw;
    if (leader) load_part(shared, &s->v, &s->v_step, raw, from, p, s, t);
    ptx_mbarrier_wait(raw, *cleaned & 1);
    *cleaned += 1;
    clean_values(shared, from->rows, seen.lo - from->key, seen.hi - from->key);
    if (leader) ptx_mbarrier_arrive(full);
}

#endif
