/*
 * Attention forward on tensor cores by mma.sync, from Ampere on: FlashAttention-2, algorithm 1
 * (arXiv:2307.08691, section 3.1), in float16, bfloat16 or tf32 with float32 sums, with every
 * option of the API. Compiled with ARCHITECTURE 75 it runs on Turing, in float16. Compiled with SPLIT_KEYS it is
 * forward_sm80_split, for few work tiles: each has a part of the keys (split.h), and merge.cu merges the parts.
 *
 *   config.cuh      the numbers of the variant          multiply.cuh   S = Q K^T, O += P V
 *   layout.cuh      parts of threads, memory            scores.cuh     masks and options
 *   scheduler.cuh   the block's work tiles              softmax.cuh    weights, running max
 *   load.cuh        copies to shared memory             recompute.cuh  values that are not finite
 *                                                       store.cuh      results
 *
 * All warps have the same role. A block takes one work tile after the other. For each,
 * compute_work_tile loops over the key tiles: load, multiply, softmax, multiply. Then the results
 * are stored. Work tiles are described ahead, so the copies of the next one's queries and first
 * keys are in progress while this one ends.
 *
 * A key tile is plain if every row sees all of it and of the next one, and if it can be copied
 * whole. Most tiles are plain. They have a loop of their own (add_plain_tiles): its body is
 * straight-line code, its addresses stay in registers, and copies are issued between products. A
 * warp skips key tiles of which none of its rows sees a key.
 */
#include "forward_sm80/config.cuh"

#include "common/score_options.cuh"
#include "forward_sm80/layout.cuh"
#include "forward_sm80/load.cuh"
#include "forward_sm80/multiply.cuh"
#include "forward_sm80/recompute.cuh"
#include "forward_sm80/scheduler.cuh"
#include "forward_sm80/scores.cuh"
#include "forward_sm80/softmax.cuh"
#include "forward_sm80/store.cuh"

/* Above 0, so that -infinity stays -infinity. */
#define MIN_SCALE 1.175494351e-38f

/* The exponent of 2 of a score of 1, without options. */
FA_DEVICE float exponent_scale(const fa_attention_params *p)
{
    return fmaxf(p->scale * FA_LOG2E, MIN_SCALE);
}

/* ---- Any key tile: load and multiply --------------------------------------------------------- */

/* The scores of key tile n, with masks and options. Returns whether the warp's rows see some of the
 * tile. */
FA_DEVICE bool multiply_tile(const fa_attention_params *p, const fa_tile *t, const fa_key_tiles *w,
                             const fa_memory *at, int n, fa_queries *q, float logit_scale,
                             fa_scores *s)
{
    const int first = n * KEYS;
    const fa_seen *mine = &w->group[group_id()];
    if (first >= mine->to || first + KEYS <= mine->from) return false;
    find_queries(q, at);
    const uint32_t k = stage(at, at->k, n) + (uint32_t)(own_key() * PITCH) + key_lane(lane_id());
#if THREE_PRODUCTS
    if (w->recompute) make_careful_scores(s, q, k, OPTIONS ? 1.0f : exponent_scale(p));
    else
#endif
        make_scores(s, q, k);
#if OPTIONS
    apply_options(p, t, w, first + own_key(), logit_scale, s);
#else
    (void)p, (void)t, (void)logit_scale;
    if (first < mine->all_from || first + KEYS > mine->all_to)
        hide_by_position(w, first + own_key(), first < mine->all_from, s);
#endif
    return true;
}

/* Waits for key tile n, issues the next copies, and computes the scores. Returns whether the warp's
 * rows see some of the tile. With two stages, tile n + 1 is copied meanwhile to the stage of tile
 * n - 1. With one stage, values n replace values n - 1 when keys n have arrived, and keys n + 1
 * replace keys n when values n have arrived. After the last tile comes the first tile of the next
 * work tile. Tile -1 only issues the block's first copies. */
FA_DEVICE bool load_and_multiply(const fa_attention_params *p, fa_block *b, const fa_memory *at,
                                 int n, fa_path *path, fa_queries *q, bool searched,
                                 float logit_scale, fa_scores *s)
{
    const fa_next_tile c = find_next_tile(b, at, n);
    fa_key_tiles *w = &b->now.keys;
    bool here = false;
    const bool with_keys = FIRST_TOGETHER && !b->loading;
#if TF32 && !THREE_PRODUCTS
    if (n == 0) {
        wait_for_copies(); /* this thread's own copies */
        round_queries(at);
    }
#endif
    if (n >= 0) sync_block(w, at, n, STAGES == 2 && searched);
    if (n == 0) load_query_fragments(q, at);
    if (STAGES == 2) {
        find_rows(p, &c, path);
        issue_keys(p, c.work, &c.at, c.n, path);
        issue_values(p, c.work, &c.at, c.n, path);
    } else if (with_keys ? n != 0 : n >= 0)
        issue_values(p, &b->now, at, FIRST_TOGETHER && n < 0 ? 0 : n, path);
    if (n >= 0) here = multiply_tile(p, &b->now.tile, w, at, n, q, logit_scale, s);
    if (STAGES == 1) {
        if (n >= 0) sync_block(w, at, n, searched);
        if (n >= 0 || !with_keys) find_rows(p, &c, path);
        issue_keys(p, c.work, &c.at, c.n, path);
    } else if (c.n == 0) __syncthreads(); /* all warps have finished with the queries */
    return here;
}

/* ---- A tracked key tile: softmax and multiply ------------------------------------------------ */

FA_DEVICE void add_tracked_values(const fa_memory *at, const fa_weights *p, uint32_t tile,
                                  bool nonfinite, fa_output *o)
{
    const uint32_t rows = weight_rows(at);
    if (nonfinite || PLAIN_LOOP) add_nonfinite_values(o, p, rows, value_fragments(tile));
    else add_values(o, p, rows, value_fragments(tile));
}

/* The online softmax of a key tile, and O += P V. nonfinite: not all values are finite. */
FA_DEVICE void add_tracked_tile(const fa_attention_params *p, const fa_tile *t,
                                const fa_key_tiles *w, const fa_memory *at, int n, bool nonfinite,
                                const fa_scores *s, float scale, fa_output *o)
{
    fa_weights weights = find_weights(at);
    update_max(at, o, s, scale);
    make_weights(&weights, s, o, scale);
#if OPTIONS
    if (p->dropout_threshold) drop_weights(p, t, w->start + n * KEYS + own_key(), &weights);
#else
    (void)p, (void)t, (void)w;
#endif
    sync_group();
    add_tracked_values(at, &weights, stage(at, at->v, n), nonfinite, o);
}

#if PLAIN_LOOP

/* ---- Plain key tiles ------------------------------------------------------------------------- */

/* Computes the scores. Copies are issued after the first products: of this tile's values, or with
 * two stages of the next tile. */
FA_DEVICE void multiply_and_issue(const fa_attention_params *p, const fa_memory *at, int n,
                                  fa_path *path, const fa_queries *q, fa_scores *s)
{
    const uint32_t k = stage(at, path->k, n);
    clear_scores(s);
    add_scores(s, q, k, 0, FIRST_STEPS);
    if (STAGES == 2) issue_next(p, at, n, path);
    else issue_whole_values(p, path, path->copy);
    add_scores(s, q, k, FIRST_STEPS, D_STEPS);
}

/* The softmax and O += P V. With one stage, it issues the copies of the next keys. */
FA_DEVICE int weigh_and_issue(const fa_attention_params *p, const fa_memory *at, int n,
                              fa_path *path, float scale, const fa_scores *s, fa_output *o)
{
    const uint32_t v = stage(at, path->v, n);
    if (is_tracked(path)) update_max(at, o, s, scale);
#if SPLIT == 1
    fa_weights weights;
    float sum[M_TILES][2] = {{0.0f}};
    weigh_first_chunk(&weights, s, o, scale, sum);
    if (STAGES == 1) issue_next(p, at, n, path);
    return multiply_chunks(o, &weights, s, scale, v, sum, path->bound, is_tracked(path));
#else
    if (STAGES == 1) issue_next(p, at, n, path);
    return weigh_tile(o, s, scale, at, v, path->bound, is_tracked(path));
#endif
}

/* Adds key tile n, which is plain. Returns how many of its chunks have been added. */
FA_DEVICE int add_plain_tile(const fa_attention_params *p, const fa_key_tiles *w,
                             const fa_memory *at, int n, fa_path *path, fa_queries *q, float scale,
                             fa_scores *s, fa_output *o)
{
    wait_for_copies();
    __syncthreads();
    q->at = path->q;
    multiply_and_issue(p, at, n, path, q, s);
    if (STAGES == 1) {
        wait_for_copies();
        __syncthreads();
        /* Adds 0, so that exponentials begin after the barrier. */
        scale += fa_bits_float(w->recompute);
    }
    return weigh_and_issue(p, at, n, path, scale, s, o);
}

/* Adds key tiles from *n on, up to the last plain one, or up to one that needs new bases, which
 * add_untracked_tile completes. *n becomes the last of them; returns how many of its chunks have
 * been added. */
FA_DEVICE int add_plain_tiles(const fa_attention_params *p, const fa_key_tiles *w,
                              const fa_memory *at, int *n, fa_path *path, fa_queries *q,
                              float scale, fa_scores *s, fa_output *o)
{
    const int to = w->plain_to - 1;
    int done;
#pragma unroll 1
    do done = add_plain_tile(p, w, at, *n, path, q, scale, s, o);
    while (done == CHUNKS && ++*n < to);
    if (done == CHUNKS) --*n;
    return done;
}

/* ---- Other key tiles of plain rows: softmax and multiply ------------------------------------- */

/* The softmax of a key tile and O += P V, without the chunks that have been added already. tracked:
 * the rows get new bases first; otherwise only if a weight turns out to be too large. */
FA_DEVICE void add_untracked_tile(fa_output *o, fa_scores *s, float scale, const fa_memory *at,
                                  uint32_t v, int done, float bound, bool tracked)
{
#pragma unroll 1
    for (;;) {
        if (tracked) {
            if (done > 0) hide_chunks(s, done);
            update_max(at, o, s, scale);
        }
        done = weigh_tile(o, s, scale, at, v, bound, tracked);
        if (tracked || done == CHUNKS) return;
        tracked = true;
    }
}

#endif

/* ---- A work tile ----------------------------------------------------------------------------- */

/* Load, multiply, softmax, multiply, for all key tiles of the work tile, by these functions:
 *
 *   plain tiles    add_plain_tiles, many at a time; if a tile needs new bases, add_untracked_tile
 *                  completes it
 *   other tiles    load_and_multiply, then add_untracked_tile; with options, or for values that are
 *                  not finite, add_tracked_tile
 */
FA_DEVICE void compute_work_tile(const fa_attention_params *p, fa_block *b, const fa_memory *at,
                                 fa_output *o)
{
    const fa_tile *t = &b->now.tile;
    fa_key_tiles *w = &b->now.keys;
#if OPTIONS
    const float logit_scale = fa_effective_scale(p, t), scale = 1.0f;
    const bool hides = hides_keys(p);
#else
    /* Careful scores have been multiplied by the scale already. */
    const float scale = THREE_PRODUCTS && w->recompute ? 1.0f : exponent_scale(p);
    const float logit_scale = 1.0f;
    const bool hides = false;
#endif
    fa_queries q;
    if (!b->loading) issue_queries(p, t, at->q);
    fa_path path = find_path(p, w, at, FIRST_TOGETHER ? b->loading : 1, STAGES - 1);
    if (PLAIN_LOOP) hold_path(&path);
    const int tiles = w->tiles;
#if SPLIT_KEYS
    const int row_tiles = w->all_tiles;
#else
    const int row_tiles = tiles;
#endif
    (void)row_tiles;
#if PLAIN_LOOP
    /* The first tile is not treated as plain, because it finds the bases. */
    const int plain_from = w->plain_from > 0 ? w->plain_from : 1;
    const int plain_to = THREE_PRODUCTS && w->recompute ? 0 : w->plain_to - 1;
#endif
#pragma unroll 1
    for (int n = b->loading ? 0 : -1; n < tiles; n++) {
        fa_scores s;
        bool nonfinite = false; /* whether some values of the tile are not finite */
#if PLAIN_LOOP
        int done = 0; /* chunks of the tile that have been added */
        bool tracked = n == 0 || is_tracked(&path);
        if (UNTRACKED && n == plain_from)
            judge_rows(o, n, FA_HAS_SHORT_ROWS(p, (row_tiles - 1) * KEYS + 1), &path);
        if (n >= plain_from && n < plain_to) {
            done = add_plain_tiles(p, w, at, &n, &path, &q, scale, &s, o);
            if (done == CHUNKS) continue;
            tracked = true;
        } else
#endif
        {
            const int first = n * KEYS;
            const bool searched = w->recompute && n >= 0 &&
                                  (THREE_PRODUCTS || hides || first < w->block.all_from ||
                                   first + KEYS > w->block.all_to);
            if (!load_and_multiply(p, b, at, n, &path, &q, searched, logit_scale, &s)) continue;
            nonfinite = searched && nonfinite_values(w);
        }
#if PLAIN_LOOP
        if (!nonfinite) {
            add_untracked_tile(o, &s, scale, at, value_fragments(stage(at, at->v, n)), done,
                               path.bound, tracked);
            continue;
        }
#endif
        add_tracked_tile(p, t, w, at, n, nonfinite, &s, scale, o);
    }
    /* Not earlier: copies of the next work tile's first keys are pending, and the wait covers
     * both. */
    if (has_keys(next_work_tile(b))) issue_queries(p, &next_work_tile(b)->tile, at->q);
}

/* Computes and stores a work tile. Returns whether this thread found that the work tile must be
 * recomputed. */
FA_DEVICE bool run_work_tile(const fa_attention_params *p, fa_block *b, const fa_memory *at)
{
    fa_work_tile *now = &b->now;
    fa_output o;
    bool suspect = false;
    if (now->tile.first >= (SPLIT_KEYS ? now->tile.n_q : now->tile.room_q)) return false;
    clear_output(&o);
    if (has_keys(now)) {
        compute_work_tile(p, b, at, &o);
        suspect = !now->keys.recompute && is_suspect(p, &now->keys, &o);
    }
    sum_rows(at, &o);
    if (THREE_PRODUCTS && has_keys(now) && !now->keys.recompute) suspect |= has_lost_bases(&o);
    write_output(p, now, &o);
    return suspect;
}

/* Advances to the next work tile, or repeats this one if any thread requests it. */
FA_DEVICE void end_work_tile(const fa_attention_params *p, fa_block *b, bool recompute)
{
    const uint32_t next = b->number + 1;
    const bool keys = has_keys(&b->now);
    fa_work_tile *queue = b->queue;
    if (__syncthreads_or(recompute)) {
        wait_for_copies(); /* of the next work tile: its stages are needed again */
        if (ptx_thread_id() == 0) b->loading = 0, b->now.keys.recompute = 1;
    } else {
        if (ptx_thread_id() == 0) b->loading = keys, b->number = next;
        copy_work_tile(&queue[next % QUEUE_ENTRIES], &b->now);
        if (next % AHEAD == 0 &&
            next + AHEAD <= b->count) /* also an entry after the last work tile, which is empty */
            describe_work_tiles(p, next + AHEAD, AHEAD, queue);
    }
    __syncthreads();
}

#if SPLIT_KEYS
FA_KERNEL __launch_bounds__(THREADS, BLOCKS)
    forward_sm80_split(const __grid_constant__ fa_sm80_split_params s)
#else
FA_KERNEL __launch_bounds__(THREADS, BLOCKS) forward_sm80(const __grid_constant__ fa_sm80_params s)
#endif
{
    FA_DYNAMIC_SHARED(memory);
    __shared__ fa_block block;
    const fa_attention_params *p = &s.attention;
    fa_memory at = find_memory(memory);
    begin_block(p, &block, (fa_work_tile *)((char *)memory + SMEM_BYTES) - QUEUE_ENTRIES);
#pragma unroll 1
    while (block.number < block.count) {
        const bool recompute = run_work_tile(p, &block, &at);
        at = next_memory(&at, block.now.keys.tiles);
        end_work_tile(p, &block, recompute);
    }
}
