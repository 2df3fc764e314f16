/*
 * Backward on tensor cores by mma.sync, from Ampere on, for float16, bfloat16, and float32 in
 * float16 parts. It computes all gradients in one pass over the tiles (FlashAttention-2, algorithm
 * 2, arXiv:2307.08691). It supports masks by position, lengths, and heads that share keys; the
 * variants with OPTIONS also support all options of the scores.
 *
 *   config.cuh    the numbers of the variant          multiply.cuh   the five products
 *   layout.cuh    parts of threads, shared memory     slices.cuh     shared scores, of wide heads
 *   work.cuh      the block's keys and tiles          weights.cuh    weights, dS, masks by position
 *   load.cuh      copies to shared memory             options.cuh    the options of the scores
 *   tile_part.cuh a warp's part of a tile             sums.cuh       the sums of dQ
 *   high_low.cuh  float16 parts of float32           store.cuh      dK and dV
 *   split.cuh     numbers are split into parts       own_parts.cuh  products of parts, to 256
 *
 * All warps have the same role. A block owns KEYS keys of one key/value head and goes through the
 * tiles of queries that see some of them, for all query heads that share the keys. So dK and dV
 * stay in registers and are written once. If blocks share keys, each takes some of the heads, and
 * finish_keys.cu adds up their sums. dQ is added to float32 sums in global memory, which another
 * kernel rounds (finish.cu); in float32 the sums may be the caller's dq itself.
 * docs/kernels/backward_sm80.md gives the reasons for this design.
 *
 * A tile has one barrier of the block. After it, the copies of this tile have arrived, and all
 * warps have stored dS of the previous tile. So the previous tile's dQ is computed now: by half of
 * the warps before this tile's scores, and by the others after them. Thus one half computes weights
 * while the other multiplies. In float32, a tile of a variant with one stage has two barriers:
 * between them this tile's copies are in progress, and dQ of the previous tile is computed.
 *
 * If warps share the products of scores (float32, head dims above 256), a tile has four barriers.
 * After the first one, copies have arrived; after the second, parts of scores have been stored;
 * after the third, these have been read, and the largest numbers of rows are known; after the
 * fourth, weights and dS have been stored. Then a warp computes its columns of all three gradients,
 * and copies these columns of the next tile when it no longer needs them. If operands are float16
 * parts, queries and dout come from the workspace. With 64 keys (ONE_GRADIENT) a warp has 32 of them
 * and half of the columns of either dK or dV, and a part of dQ.
 */
#include "backward_sm80/config.cuh"
#include "backward_sm80/high_low.cuh"
#include "backward_sm80/layout.cuh"
#include "backward_sm80/load.cuh"
#include "backward_sm80/multiply.cuh"
#include "backward_sm80/options.cuh"
#include "backward_sm80/own_parts.cuh"
#include "backward_sm80/slices.cuh"
#include "backward_sm80/store.cuh"
#include "backward_sm80/sums.cuh"
#include "backward_sm80/tile_part.cuh"
#include "backward_sm80/weights.cuh"
#include "backward_sm80/work.cuh"
#include "ptx/semaphore.cuh"

/* The state of a thread. */
typedef struct thread_state {
#if ONE_GRADIENT
    fa_gradient own; /* dV if it is of an odd share, otherwise dK */
#else
    fa_gradient dk, dv;
#endif
#if SHARED_SCORES
    fa_operands operands[WEIGHT_M_TILES]; /* of the tile, until all largest numbers are known */
#endif
    uint32_t memory; /* the address of shared memory */
    float scale;     /* from scores to exponents of 2; with a softcap, to the argument of tanh */
} thread_state;

/* ---- A tile ---------------------------------------------------------------------------------- */

FA_DEVICE void add_values(thread_state *x, const tile_part *part, const fa_weights *weights)
{
#if SHARED_SCORES
    (void)x, (void)part, (void)weights; /* add_keys stores both */
#elif OWN_PARTS
    row_parts parts;
    make_row_parts(&parts, weights, part, true);
    if (ALL_SHARED) share_row_parts(&parts, part, part->weights_word, part->weight_factors);
    else add_row_parts(&x->dv, &parts, part->own_queries + Q_TO_DOUT);
#else
    if (SPLIT > 1) share_weights(weights, part->weights_word, part->unit);
    add_own_gradient(&x->dv, weights, part->own_queries + Q_TO_DOUT, part->column_unit);
#endif
}

FA_DEVICE void add_keys(thread_state *x, const tile_part *part, const fa_weights *weights,
                        const fa_weights *ds)
{
#if SHARED_SCORES
#pragma unroll
    for (int m = 0; m < WEIGHT_M_TILES; m++) {
        const tile_part own = find_keys_part(part, m);
        x->operands[m] = make_operands(&own, weights->at[m][0], ds->at[m][0]);
    }
    store_largest(x->memory + LARGEST_AT, part, x->operands);
#elif OWN_PARTS
    row_parts parts;
    (void)weights;
    make_row_parts(&parts, ds, part, false);
    share_ds(ds, part);
    if (ALL_SHARED)
        share_row_parts(&parts, part, part->weights_word + KEY_DS_AT - WEIGHTS_AT,
                        part->weight_factors + 4);
    else add_row_parts(&x->dk, &parts, part->own_queries);
#else
    (void)weights;
    share_weights(ds, part->ds_word, part->unit);
    add_own_gradient(&x->dk, ds, part->own_queries, part->column_unit);
#endif
}

/* The scores from which the warp computes weights, or their dP. */
FA_DEVICE void find_scores(fa_scores *s, uint32_t memory, const tile_part *part, score_kind kind)
{
#if SHARED_SCORES
    add_slices(s, memory, part, kind);
#else
    (void)memory;
    make_scores(s, part->keys + (kind == DP ? V_AT : 0),
                part->queries + (kind == DP ? Q_TO_DOUT : 0));
#if OWN_PARTS
    scale_scores(s, part, kind);
#endif
#endif
}

#if OPTIONS

/* dP is computed after the options, which take many registers, have been applied. */
FA_DEVICE void consume_chunk(const fa_backward_params *backward, const fa_backward_sm80_params *all,
                             const block_work *w, thread_state *x, const tile_cursor *at, int chunk)
{
    const fa_attention_params *p = &backward->a;
    tile_part part = find_part(x->memory, at, chunk);
    fa_scores s, dp;
    fa_weights weights, ds;
    tile_bias bias;
    tile_options o = find_tile_options(p, w, at->head, part.query, part.key);
    load_bias(&bias, p, w, &o); /* arrives while scores are computed */
    find_scores(&s, x->memory, &part, SCORES);
    apply_loaded_mask(p, &bias, &o);
    if (has_dropout(p)) o.keeps = find_kept(p, w, &o);
    weigh_with_options(p, w, &o, &bias, &s, &weights, x->scale, part.rows, part.factors);
    part = find_part(x->memory, at, chunk); /* computed again, to save registers */
    add_values(x, &part, &weights);
    find_scores(&dp, x->memory, &part, DP);
    drop_gradients(p, &o, &dp);
    make_ds(&s, &dp, part.rows, ds_unit(all), true);
#if HIGH_LOW
    if (backward->dbias_by_others)
        put_dbias(backward, w, &o, &dp, is_in_place(all) ? 1.0f / p->scale : 1.0f);
#endif
    pack(&ds, &dp);
    add_keys(x, &part, &weights, &ds);
}

#else

FA_DEVICE void consume_chunk(const fa_backward_params *backward, const fa_backward_sm80_params *all,
                             const block_work *w, thread_state *x, const tile_cursor *at, int chunk)
{
    (void)backward;
    tile_part part = find_part(x->memory, at, chunk);
    const int first_key = part.key / GROUP_ROWS * GROUP_ROWS;
    bool masked = !HIGH_LOW && is_masked(w, first_key, at->tile);
    fa_scores s, dp;
    fa_weights weights, ds;
    find_scores(&s, x->memory, &part, SCORES);
    if (!LATE_DP) find_scores(&dp, x->memory, &part, DP);
    /* Products leave no register for it. */
    if (HIGH_LOW) masked = is_masked(w, first_key, at->tile);
    weigh(&s, x->scale, part.rows);
#if THREE_PRODUCTS
    correct_weights(&s, part.factors);
#endif
    if (masked) mask_weights(w, &s, part.query, part.key);
    if (LATE_DP) {
        pack(&weights, &s);
        add_values(x, &part, &weights);
        part = find_part(x->memory, at, chunk); /* computed again, to save registers */
        find_scores(&dp, x->memory, &part, DP);
    }
    /* `true` is correct for all tiles; there is no register to distinguish them. */
    make_ds(&s, &dp, part.rows, ds_unit(all), LATE_DP || masked);
    if (!LATE_DP) pack(&weights, &s);
    pack(&ds, &dp);
    if (!LATE_DP) add_values(x, &part, &weights);
    add_keys(x, &part, &weights, &ds);
}

#endif

#if !SHARED_SCORES

/* Adds the products of the other queries, whose weights and dS other warps have stored. */
FA_DEVICE void add_others(thread_state *x, const tile_cursor *at)
{
    const fa_layout layout = find_layout(x->memory), *l = &layout;
    const uint32_t own = (uint32_t)(l->group * GROUP_ROWS * SCORE_PITCH) + l->score_a;
    const uint32_t q = (q_at(x->memory, place_of(at->count)) + l->a) ^ half_of(at->count);
    sync_group(l);
#if OWN_PARTS
    const uint32_t factors =
        x->memory + WEIGHT_FACTORS_AT + (uint32_t)(l->group * GROUP_ROWS + l->lane / 4) * 8;
    const uint32_t rows = q + (uint32_t)(l->share * COLUMNS * ELEMENT_BYTES);
    add_shared_rows(&x->dv, x->memory + WEIGHTS_AT + own, factors, rows + Q_TO_DOUT);
    add_shared_rows(&x->dk, x->memory + KEY_DS_AT + own, factors + 4, rows);
#else
    const int unit = l->share * (COLUMNS / VECTOR);
    add_other_gradient(&x->dv, x->memory + WEIGHTS_AT + own, q + Q_TO_DOUT, unit, l->share);
    add_other_gradient(&x->dk, ds_at(x->memory, at->count) + own, q, unit, l->share);
#endif
}

FA_DEVICE void consume_tile(const fa_backward_params *p, const fa_backward_sm80_params *s,
                            const block_work *w, thread_state *x, const tile_cursor *at)
{
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++) consume_chunk(p, s, w, x, at, chunk);
    if (SPLIT > 1) add_others(x, at);
}

#endif

/* ---- dQ -------------------------------------------------------------------------------------- */

#if HIGH_LOW && !ONE_GRADIENT

/* Adds a warp's part to the caller's rows. block: of 16 queries; column: of 8 columns; whole: rows
 * consist of aligned vectors. */
FA_DEVICE void add_to_rows(const fa_backward_params *p, const block_work *w, const tile_cursor *at,
                           const fa_dq *dq, int block, int column, bool whole)
{
    const int lane = ptx_thread_id() % 32, first = at->tile * QUERIES + 16 * block + lane / 4;
    /* Rows of the sequence from the lane's first row on. */
    const int rows = (int)w->sequence.n_q - first;
    float *row = w->dq + first * p->dq.stride[1] + at->head * p->dq.stride[2];
#pragma unroll
    for (int i = 0; i < DQ_M_TILES * 2; i++) {
        if (8 * i >= rows) return;
#pragma unroll
        for (int n = 0; n < DQ_N_TILES / 2; n++) { /* four adjacent columns */
            const int tile = n / 2 * 4, e = i % 2 * 2 + n % 2;
            const float(*from)[4] = dq->at[i / 2] + tile;
            const float x[4] = {from[0][e], from[1][e], from[2][e], from[3][e]};
            add_to_row(row + 8 * i * p->dq.stride[1], whole,
                       8 * (column + tile) + 4 * gradient_unit(lane % 4, n % 2), p->a.d, x);
        }
    }
}

#endif

/* Adds it to a tile of the sums in the workspace. tiles: the warp's tiles of columns that exist. */
FA_DEVICE void add_to_tile(float *tile, const fa_dq *dq, int block, int column, int tiles)
{
#pragma unroll
    for (int n = 0; n < DQ_N_TILES; n++)
#pragma unroll
        for (int m = 0; m < DQ_M_TILES; m++)
            if (n < tiles) add_to_sums(fragment_sums(tile, block + m, column + n), dq->at[m][n]);
}

/* Computes dQ of a tile whose dS is complete. If sums have one order, a warp adds its part after
 * the same warp of all blocks with earlier key tiles. It waits only for blocks of lower numbers,
 * which start no later and do not wait for it. */
FA_DEVICE void add_dq(const fa_backward_params *p, const fa_backward_sm80_params *s,
                      const block_work *w, uint32_t memory, const tile_cursor *at)
{
    const fa_layout l = find_layout(memory);
    const int block = l.warp % DQ_ROW_WARPS * DQ_M_TILES;
    const int column = l.warp / DQ_ROW_WARPS * DQ_N_TILES;
    fa_dq dq;
    if (!p->dq.data || (SHARED_SCORES && 8 * column >= p->a.d)) return;
#if OWN_PARTS
    make_own_dq(&dq, (ds_at(memory, at->count) + l.score_b) ^ half_of(at->count),
                memory + K_AT + l.a + (uint32_t)(8 * column * ELEMENT_BYTES),
                ds_factors_at(memory, at->count) + (uint32_t)(16 * block + l.lane / 4) * 4, block);
#elif HIGH_LOW
    make_high_low_dq(&dq, memory + DQ_DS_AT + l.score_b, memory + K_AT + l.a, column,
                     memory + LARGEST_AT + DQ_FACTORS + (uint32_t)(16 * block + l.lane / 4) * 4,
                     block);
#else
    make_dq(&dq, ds_at(memory, at->count) + l.score_b, memory + K_AT + l.a, block, column);
#endif
    const int part = at->tile % PARTS;
    const int64_t number = tile_number(w, s, at);
    float *tile = s->sums + number * (FA_BACKWARD_SM80_SUM_BYTES(HEAD_DIM) / 4);
    int32_t *semaphore = s->semaphores + number * SEMAPHORES + part * WARPS + l.warp;
    if (s->semaphores) {
        if (l.lane == 0) ptx_semaphore_wait(semaphore, tiles_before(w, at->tile));
        __syncwarp();
    }
#if HIGH_LOW && !ONE_GRADIENT
    if (is_in_place(s) && SUMS_TOGETHER && has_vectors(&p->dq))
        add_to_rows(p, w, at, &dq, block, column, true);
    else if (is_in_place(s)) add_to_rows(p, w, at, &dq, block, column, false);
    else
#endif
        add_to_tile(tile, &dq, part * (QUERIES / 16) + block, column,
                    ONE_GRADIENT ? (p->a.d + 31) / 32 * 4 - column : DQ_N_TILES);
    if (s->semaphores) {
        __syncwarp();
        if (l.lane == 0) ptx_semaphore_add(semaphore);
    }
}

#if SHARED_SCORES

/* Copies the part of the next tile whose buffers are free: its rows, which only weights need, or
 * the warp's own columns. */
FA_DEVICE void issue_next(const fa_backward_params *p, const fa_backward_sm80_params *s,
                          const block_work *w, uint32_t memory, const tile_cursor *at, int what)
{
    tile_cursor next = *at;
    if (at->count + 1 >= w->tiles) return;
    advance(&next, w);
    issue_tile(p, s, memory, w, &next, what);
}

#if BESIDE_KEYS && !BOTH_BESIDE_KEYS

/* Threads that copy the next tile: those of the warps that have no scores, which would wait for the others' weights;
 * without such warps all. */
enum {
    NO_SCORES = THREADS - 32 * SCORE_WARPS,
    NEXT_THREADS = NO_SCORES > 0 ? NO_SCORES : THREADS,
    NEXT_TOGETHER = NEXT_THREADS / PART_VECTORS
};
static_assert(NEXT_TOGETHER == 2 || NEXT_TOGETHER == 4, "rows that are copied at once");

/* Copies queries or dout of the next tile, whose places are free from the start of a tile on. */
FA_DEVICE void copy_next(const fa_backward_params *p, const fa_backward_sm80_params *s,
                         const block_work *w, uint32_t memory, const tile_cursor *at, int what)
{
    const int thread = ptx_thread_id() - (THREADS - NEXT_THREADS);
    tile_cursor next = *at;
    if (at->count + 1 >= w->tiles || thread >= NEXT_TOGETHER * PART_VECTORS) return;
    advance(&next, w);
    issue_tile_parts(p, s, memory, w, &next, what, thread, NEXT_TOGETHER);
}

#endif

/* Multiplies all warps' weights and dS by dout, queries and keys. Columns that do not exist are
 * skipped. */
FA_DEVICE void add_gradients(const fa_backward_params *p, const fa_backward_sm80_params *s,
                             const block_work *w, thread_state *x, const tile_cursor *at)
{
    const fa_layout layout = find_layout(x->memory), *l = &layout;
    const int column = own_column(l);
    const uint32_t own = l->a + (uint32_t)column * ELEMENT_BYTES;
    const uint32_t q = (q_at(x->memory, place_of(at->count)) + own) ^ half_of(at->count);
    const uint32_t dout = (dout_at(x->memory, place_of(at->count)) + own) ^ dout_half_of(at->count);
    const uint32_t rows = l->score_a + (uint32_t)(l->group * GROUP_ROWS * SCORE_PITCH);
    const uint32_t factors =
        x->memory + LARGEST_AT + (uint32_t)(l->group * GROUP_ROWS + l->lane / 4) * 4;
#if ONE_GRADIENT
    issue_next(p, s, w, x->memory, at, ALL_OF_TILE);
    const bool of_values = l->share % 2 != 0;
    const int columns = (of_values ? p->a.d_v : p->a.d) - column;
    if (columns > 0)
        add_high_low_gradient(&x->own, x->memory + (of_values ? WEIGHTS_AT : DS_AT) + rows,
                              of_values ? dout : q, factors + (of_values ? DV_FACTORS : DK_FACTORS),
                              columns);
    __syncwarp();
#else
    issue_next(p, s, w, x->memory, at, THE_ROWS);
#if BESIDE_KEYS
    if (NO_SCORES == 0) copy_next(p, s, w, x->memory, at, THE_DOUT);
#endif
    if (column < p->a.d_v)
        add_high_low_gradient(&x->dv, x->memory + WEIGHTS_AT + rows, dout, factors + DV_FACTORS,
                              COLUMNS);
    __syncwarp();
#if BESIDE_KEYS
    if (NO_SCORES == 0) copy_next(p, s, w, x->memory, at, THE_QUERIES);
#else
    issue_next(p, s, w, x->memory, at, THE_DOUT | OWN_COLUMNS);
#endif
    if (column < p->a.d)
        add_high_low_gradient(&x->dk, x->memory + DS_AT + rows, q, factors + DK_FACTORS, COLUMNS);
    __syncwarp();
    if (!BESIDE_KEYS) issue_next(p, s, w, x->memory, at, THE_QUERIES | OWN_COLUMNS);
#endif
    add_dq(p, s, w, x->memory, at);
}

FA_DEVICE void consume_tile(const fa_backward_params *p, const fa_backward_sm80_params *s,
                            const block_work *w, thread_state *x, const tile_cursor *at)
{
    share_slice(x->memory, at->count, p->a.d, p->a.d_v);
    __syncthreads();
#if BESIDE_KEYS && !BOTH_BESIDE_KEYS
    if (!has_scores()) copy_next(p, s, w, x->memory, at, THE_QUERIES | THE_DOUT);
#endif
    if (has_scores()) consume_chunk(p, s, w, x, at, 0);
    __syncthreads();
    if (has_scores()) {
        const tile_part part = find_part(x->memory, at, 0);
        share_operands(x->memory, &part, x->operands);
    }
    __syncthreads();
    add_gradients(p, s, w, x, at);
}

#endif

/* ---- A block --------------------------------------------------------------------------------- */

/* Waits until this tile's copies have arrived and all warps have finished the previous tile. */
FA_DEVICE void begin_tile(const fa_backward_params *p, const fa_backward_sm80_params *s,
                          uint32_t memory, const block_work *w, const tile_cursor *at)
{
    if (STAGES == 1 && !SHARED_SCORES && at->count > 0) {
        __syncthreads();
        issue_tile(p, s, memory, w, at, ALL_OF_TILE);
        if (DS_BUFFERS == 1) {
            const tile_cursor last = before(at, w);
            add_dq(p, s, w, memory, &last);
        }
    }
    ptx_cp_async_wait_all();
    __syncthreads();
    if (STAGES == 2 && at->count + 1 < w->tiles) {
        tile_cursor next = *at;
        advance(&next, w);
        issue_tile(p, s, memory, w, &next, ALL_OF_TILE);
    }
}

/* Whether the warp computes dQ of the previous tile before this tile's scores. */
FA_DEVICE bool is_early(void) { return TWO_HALVES && ptx_thread_id() < THREADS / 2; }

#if ONE_GRADIENT

/* Copies and splits keys, then values. The first tile of queries lies beside keys, so its copies
 * begin when these have been split. */
FA_DEVICE void begin_block(const fa_backward_params *p, const fa_backward_sm80_params *s,
                           uint32_t memory, block_work *w)
{
    static_assert(!OPTIONS && !THREE_PRODUCTS, "no keys to clear, no factors");
    const tile_cursor at = first_tile(w);
    issue_keys(&p->a, memory, w);
    ptx_cp_async_commit();
    ptx_cp_async_wait(1);
    __syncthreads();
    split_key_rows(memory, K_AT, p->a.d);
    __syncthreads();
    issue_tile(p, s, memory, w, &at, ALL_OF_TILE);
    ptx_cp_async_commit();
    ptx_cp_async_wait(1);
    __syncthreads();
    split_key_rows(memory, V_AT, p->a.d_v);
}

#else

/* Issues the first copies. */
FA_DEVICE void begin_block(const fa_backward_params *p, const fa_backward_sm80_params *s,
                           uint32_t memory, block_work *w)
{
    const tile_cursor at = first_tile(w);
    issue_keys(&p->a, memory, w);
    issue_tile(p, s, memory, w, &at, ALL_OF_TILE);
#if THREE_PRODUCTS
    if (!s->factors) fill_factors(memory);
#endif
#if OPTIONS
    if (p->a.mask.data || p->a.bias.data) {
        ptx_cp_async_wait_all();
        __syncthreads();
        clear_bad_keys(memory, w);
    }
#endif
#if HIGH_LOW
    ptx_cp_async_wait_all();
    __syncthreads();
    split_keys(&p->a, memory);
#endif
}

#endif

FA_DEVICE void consume_tiles(const fa_backward_params *p, const fa_backward_sm80_params *s,
                             const block_work *w, thread_state *x)
{
    tile_cursor at = first_tile(w), last;
    while (at.count < w->tiles) {
        begin_tile(p, s, x->memory, w, &at);
        if (DS_BUFFERS == 2 && at.count > 0 && is_early()) {
            last = before(&at, w);
            add_dq(p, s, w, x->memory, &last);
        }
        consume_tile(p, s, w, x, &at);
        if (DS_BUFFERS == 2 && at.count > 0 && !is_early()) {
            last = before(&at, w);
            add_dq(p, s, w, x->memory, &last);
        }
        advance(&at, w);
    }
    if (SHARED_SCORES) return;
    __syncthreads();
    last = before(&at, w);
    add_dq(p, s, w, x->memory, &last);
}

FA_KERNEL __launch_bounds__(THREADS, BLOCKS)
    backward_sm80(const __grid_constant__ fa_backward_params p,
                  const __grid_constant__ fa_backward_sm80_params s)
{
    FA_DYNAMIC_SHARED(memory);
    __shared__ block_work work;
    thread_state x;
    x.memory = fa_opaque(find_memory(memory));
    if (threadIdx.x == 0) describe_work(&p, &s, blockIdx.x, &work);
    __syncthreads();
    x.scale = inner_scale(&p.a);
    if (work.tiles > 0) begin_block(&p, &s, x.memory, &work);
#if ONE_GRADIENT
    clear_gradient(&x.own);
#else
    clear_gradient(&x.dk);
    clear_gradient(&x.dv);
#endif
    if (work.tiles > 0) consume_tiles(&p, &s, &work, &x);
    const fa_layout layout = find_layout(x.memory);
    float *sums = work.key_sums;
    const gradient_rows dk = find_gradient_rows(&work.keys, &p.dk, sums, p.a.d);
#if ONE_GRADIENT
    if (layout.share % 2 == 0) store_gradient(&dk, &x.own, &layout, dk_scale(&p.a, &s));
#else
    store_gradient(&dk, &x.dk, &layout, dk_scale(&p.a, &s));
#endif
    if (sums) sums += KEYS * HEAD_DIM;
    const gradient_rows dv = find_gradient_rows(&work.keys, &p.dv, sums, p.a.d_v);
#if ONE_GRADIENT
    if (layout.share % 2 != 0) store_gradient(&dv, &x.own, &layout, value_scale(&p.a));
#else
    store_gradient(&dv, &x.dv, &layout, value_scale(&p.a));
#endif
}
