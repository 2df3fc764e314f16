/*
 * The consumers' scores: S^T = K Q^T, logits, and weights by a running max.
 */
#ifndef FA_KERNELS_DECODE_SM90_SCORES_CUH
#define FA_KERNELS_DECODE_SM90_SCORES_CUH

#include "decode_sm90/config.cuh"

#if !EIGHT_BITS
#include "common/score_options.cuh"
#include "common/softmax.cuh"
#include "common/x2.cuh"
#include "decode_sm80/bases.cuh"
#include "decode_sm80/queries.cuh"
#include "decode_sm90/pipeline.cuh"
#include "ptx/shared.cuh"
#include "ptx/store.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

/* ---- Queries --------------------------------------------------------------------------------- */

enum {
    QUERY_VECTORS = HEAD_DIM / 8,
    OWN_QUERY_VECTORS = (ROWS * QUERY_VECTORS + CONSUMER_THREADS - 1) / CONSUMER_THREADS
};

/* Prefetches the rows of the work tile into the second-level cache, with a thread for each 128 bytes. */
FA_DEVICE void prefetch_queries(const fa_decode_params *d, const fa_work *w)
{
    static_assert(ROWS * DIM_BLOCKS <= CONSUMER_THREADS, "a thread for each 128 bytes");
    const int r = thread_id() / DIM_BLOCKS, column = thread_id() % DIM_BLOCKS * 64;
    if (r >= ROWS || column >= d->attention.d) return;
    const char *row = find_query(d, w, r);
    if (row) ptx_prefetch(row + 2 * column);
}

/* A thread requests all its vectors at once, so that it waits for memory only once. */
FA_DEVICE void load_queries(const pipeline *pipe, const fa_decode_params *d, const fa_work *w)
{
    const uint32_t q = ptx_shared_address(pipe->q);
    uint4 x[OWN_QUERY_VECTORS];
    if (d->attention.q.vector == 8) {
#pragma unroll
        for (int n = 0; n < OWN_QUERY_VECTORS; n++) {
            const int i = thread_id() + n * CONSUMER_THREADS, column = i % QUERY_VECTORS * 8;
            const char *row = find_query(d, w, i / QUERY_VECTORS);
            x[n] = make_uint4(0, 0, 0, 0);
            if (row && column < d->attention.d) x[n] = *(const uint4 *)(row + 2 * column);
        }
    } else {
#pragma unroll
        for (int n = 0; n < OWN_QUERY_VECTORS; n++) {
            const int i = thread_id() + n * CONSUMER_THREADS;
            x[n] = fetch_eight(d, w, i / QUERY_VECTORS, i % QUERY_VECTORS * 8);
        }
    }
#pragma unroll
    for (int n = 0; n < OWN_QUERY_VECTORS; n++) {
        const int i = thread_id() + n * CONSUMER_THREADS, vector = i % QUERY_VECTORS;
        if (i < ROWS * QUERY_VECTORS)
            ptx_st_shared_v4(q + (uint32_t)(vector / 8 * QUERY_BLOCK_BYTES) +
                                 swizzled(i / QUERY_VECTORS, vector % 8),
                             x[n]);
    }
    ptx_fence_proxy_async();
    sync_consumers();
}

/* ---- Products -------------------------------------------------------------------------------- */

/* Issues the products of a stage's columns: those of the i-th stage of a tile. */
FA_DEVICE void issue_scores(const pipeline *pipe, uint32_t keys, int i, float *s)
{
    const uint32_t queries = ptx_descriptor_low(pipe->q, 0);
#pragma unroll
    for (int block = 0; block < STAGE_DIM_BLOCKS; block++)
#pragma unroll
        for (int step = 0; step < 4; step++)
#pragma unroll
            for (int m = 0; m < KEY_BLOCKS; m++) {
                const int column = i * STAGE_DIM_BLOCKS + block;
                const int k = block * DIM_BLOCK_BYTES + m * 64 * 128 + step * 32;
                const int q = column * QUERY_BLOCK_BYTES + step * 32;
                PTX_WGMMA(qk, GROUP_ROWS)
                (s + m * (ROWS / 2), ptx_descriptor(keys + (uint32_t)(k / 16)),
                 ptx_descriptor(queries + (uint32_t)(q / 16)), column + step > 0);
            }
    ptx_wgmma_commit();
}

/* The scores of the tile at this place; the place advances past it. */
FA_DEVICE void make_scores(const pipeline *pipe, fa_place *at, float *s)
{
    const fa_place used = *at;
    ptx_register_fence(s, SCORES);
#pragma unroll
    for (int i = 0; i < TILE_STAGES; i++, go_on(pipe, at)) {
        const uint32_t keys = descriptor_of(pipe, at);
        acquire(pipe, at);
        ptx_wgmma_fence();
        issue_scores(pipe, keys, i, s);
    }
    ptx_wgmma_wait(0);
    ptx_register_fence(s, SCORES);
    release_tile(pipe, used);
}

/* ---- Logits ---------------------------------------------------------------------------------- */

/* Softcap and the scale: scores become exponents of 2. */
FA_DEVICE void scale_scores(const fa_attention_params *p, float *s)
{
    if (p->softcap > 0.0f) {
        const float inner = p->scale / p->softcap, cap = p->softcap * FA_LOG2E;
#pragma unroll
        for (int i = 0; i < SCORES; i++) s[i] = fa_softcap_score_fast(s[i] * inner, cap);
        return;
    }
#pragma unroll
    for (int i = 0; i < SCORES; i++) s[i] *= p->scale * FA_LOG2E;
}

/* Score (j, e) of a thread, of the keys m and h. */
FA_DEVICE int score_at(int m, int j, int h, int e) { return m * (ROWS / 2) + 4 * j + 2 * h + e; }

/* The keys [lo, hi) that the work tile's first query may see by its position, counted from `key` on; query i sees those i behind
 * them. In 32 bits, and once for all rows: a block hides few tiles, and waits for the instructions. */
FA_DEVICE fa_sm90_reach find_reach(const fa_attention_params *p, const fa_work *w, int key)
{
    const int64_t center = w->tile.first + w->tile.diagonal - key, far = INT64_C(1) << 40;
    const int64_t right = p->causal ? 0 : p->window_right;
    fa_sm90_reach reach = {-FA_SM90_UNBOUNDED, FA_SM90_UNBOUNDED};
    if (p->window_left >= 0) reach.lo = fa_sm90_saturate(center - fa_min64(p->window_left, far));
    if (right >= 0) reach.hi = fa_sm90_saturate(center + fa_min64(right, far) + 1);
    return reach;
}

/* Hides what a row does not see by position. first: the tile's first key. */
FA_DEVICE void hide_keys(const fa_decode_params *d, const fa_work *w, int first, float *s)
{
    const int key = first + first_of_block(), end = (int)w->tile.n_k - key;
    const fa_sm90_reach reach = find_reach(&d->attention, w, key);
#pragma unroll
    for (int j = 0; j < ROW_GROUPS; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int query = min(query_of(d, row_of(j, e)), w->queries - 1);
            const int lo = reach.lo + query, hi = min(reach.hi + query, end);
#pragma unroll
            for (int i = 0; i < 2 * KEY_BLOCKS; i++) {
                const int at = 64 * (i / 2) + 8 * (i % 2);
                if (at < lo || at >= hi) s[score_at(i / 2, j, i % 2, e)] = -INFINITY;
            }
        }
}

/* ---- Weights --------------------------------------------------------------------------------- */

/* Of the thread's rows. */
typedef struct row_sums {
    float base[ROW_GROUPS][2]; /* of the weights, in powers of two */
    float sum[ROW_GROUPS][2];  /* of the thread's own keys */
} row_sums;

/* The largest logit of a row that this thread has. */
FA_DEVICE float find_top(const float *s, int j, int e)
{
    float x = s[score_at(0, j, 0, e)];
#pragma unroll
    for (int i = 1; i < 2 * KEY_BLOCKS; i++) x = fmaxf(x, s[score_at(i / 2, j, i % 2, e)]);
    return x;
}

/* Whether some row of the thread is beyond its base. */
FA_DEVICE bool is_beyond(const float *s, const row_sums *rows)
{
    bool beyond = false;
#pragma unroll
    for (int i = 0; i < 2 * ROW_GROUPS; i++)
        beyond |= find_top(s, i / 2, i % 2) > rows->base[i / 2][i % 2] + RESCALE_ABOVE;
    return beyond;
}

/* New bases for rows whose logits exceed the old bases by too much, the same in all warps. Sums so far are
 * rescaled. The warps' largest logits go through shared memory. */
FA_DEVICE void raise_bases(const pipeline *pipe, const float *s, row_sums *rows, float *out)
{
#pragma unroll
    for (int i = 0; i < 2 * ROW_GROUPS; i++) {
        float top = find_top(s, i / 2, i % 2);
#pragma unroll
        for (int other = 4; other < 32; other *= 2)
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, other));
        if (lane_id() < 4) pipe->exchange[warp_id() * ROWS + row_of(i / 2, i % 2)] = top;
    }
    sync_consumers();
#pragma unroll
    for (int i = 0; i < 2 * ROW_GROUPS; i++) {
        float *base = &rows->base[i / 2][i % 2], top = -INFINITY;
        const float before = *base;
#pragma unroll
        for (int warp = 0; warp < CONSUMER_WARPS; warp++)
            top = fmaxf(top, pipe->exchange[warp * ROWS + row_of(i / 2, i % 2)]);
        if (top > before + RESCALE_ABOVE) *base = top - HEADROOM;
        const float factor = ptx_ex2(before - *base);
        rows->sum[i / 2][i % 2] *= factor;
#pragma unroll
        for (int n = 0; n < 2 * DIM_BLOCKS; n++)
            out[score_at(n / 2, i / 2, n % 2, i % 2)] *= factor;
    }
}

/* Logits become weights, in a buffer in shared memory: rows of 64 keys. sums: of the thread's weights. */
FA_DEVICE void weigh(const float *s, const row_sums *rows, uint32_t buffer,
                     float sums[ROW_GROUPS][2])
{
    uint32_t weights[KEY_BLOCKS * ROW_GROUPS][2]; /* of eight keys each, 8 x 8 matrices */
#pragma unroll
    for (int i = 0; i < 2 * ROW_GROUPS; i++) sums[i / 2][i % 2] = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * KEY_BLOCKS * ROW_GROUPS; i++) {
        const int m = i / 2 / ROW_GROUPS, j = i / 2 % ROW_GROUPS, h = i % 2;
        const float first = ptx_ex2(s[score_at(m, j, h, 0)] - rows->base[j][0]);
        const float second = ptx_ex2(s[score_at(m, j, h, 1)] - rows->base[j][1]);
        sums[j][0] += first;
        sums[j][1] += second;
        weights[i / 2][h] = fa_pack_x2(first, second);
    }
    const int vector = 2 * warp_id() + lane_id() / 8 % 2;
#if GROUP_ROWS * KEYS == 8 * 64
    ptx_stmatrix_x2_trans(buffer + swizzled(lane_id() % 8, vector), weights[0]);
#else
#pragma unroll
    for (int i = 0; i < KEY_BLOCKS * ROW_GROUPS; i += 2) {
        const int block = i + lane_id() / 16, m = block / ROW_GROUPS, j = block % ROW_GROUPS;
        ptx_stmatrix_x4_trans(buffer + (uint32_t)(m * QUERY_BLOCK_BYTES) +
                                  swizzled(8 * j + lane_id() % 8, vector),
                              weights[i]);
    }
#endif
    ptx_fence_proxy_async();
}

/* Writes the weights of a tile to a buffer. Usually no row exceeds its base. So the weights are computed
 * before the consumers compare their rows, which they do at a barrier that is needed anyway. With many rows, bases are raised
 * before that in the part's first tile, which has none, and the code is a loop: a block waits for the instructions that it runs
 * for the first time (the first weights of 32 rows took 7,000 to 10,000 cycles, 1,500 where another block had loaded the code). */
FA_DEVICE void make_weights(const pipeline *pipe, const float *s, uint32_t buffer, row_sums *rows,
                            float *out, bool first)
{
    float sums[ROW_GROUPS][2];
    if (ROWS > 8) {
        bool raises = first;
#pragma unroll 1
        do {
            if (raises) raise_bases(pipe, s, rows, out);
            weigh(s, rows, buffer, sums);
            raises =
                ptx_named_barrier_or(consumers_barrier(), CONSUMER_THREADS, is_beyond(s, rows));
        } while (raises);
    } else {
        weigh(s, rows, buffer, sums);
        if (ptx_named_barrier_or(consumers_barrier(), CONSUMER_THREADS, is_beyond(s, rows))) {
            raise_bases(pipe, s, rows, out);
            weigh(s, rows, buffer, sums);
            sync_consumers();
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * ROW_GROUPS; i++) rows->sum[i / 2][i % 2] += sums[i / 2][i % 2];
}
#endif

#endif
