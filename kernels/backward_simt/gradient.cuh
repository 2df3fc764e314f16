/*
 * Computes the weights P and dS = P * (dP - delta) from the scores S and dP = dO V^T: the middle of
 * FlashAttention-2's algorithm 2 (arXiv:2307.08691, section 3.1.2). P = exp(S - lse) is recomputed.
 *
 * The including file defines OWN, and QUERIES_OWN: 1 if own rows are queries and the others keys, 0
 * if it is the other way round.
 */
#ifndef FA_KERNELS_BACKWARD_SIMT_GRADIENT_CUH
#define FA_KERNELS_BACKWARD_SIMT_GRADIENT_CUH

#include "backward_simt/backward_simt.h"
#include "common/pass_tiles.cuh"
#include "common/score_options.cuh"
#include "common/softmax.cuh"

/* ---- The tile's queries ---------------------------------------------------------------------- */

/* Numbers of query i: log-sum-exp, delta, and the keys that it sees of [key, key + keys). A row
 * from which a mask or a bias hides all keys sees none, whatever it holds. */
FA_DEVICE float4 know_query(const fa_backward_params *p, const fa_tile *t, int64_t i, int64_t key,
                            int keys)
{
    if (i >= t->n_q) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const fa_range visible = fa_tile_visible(&p->a, t, i);
    const int64_t at = fa_row_index(&p->a, t, i);
    const float lse = p->a.lse[at];
    if (lse == -INFINITY) return make_float4(INFINITY, 0.0f, 0.0f, 0.0f);
    return make_float4(lse, p->delta[at], (float)fa_min64(fa_max64(visible.lo - key, 0), keys),
                       (float)fa_min64(fa_max64(visible.hi - key, 0), keys));
}

FA_DEVICE void know_queries(const fa_backward_params *p, const fa_tile *t, const fa_shared *shared,
                            int64_t query, int64_t key)
{
    const int n = (int)threadIdx.x, queries = QUERIES_OWN ? OWN : OTHERS;
    if (n < queries)
        shared->queries[n] = know_query(p, t, query + n, key, QUERIES_OWN ? OTHERS : OWN);
}

/* ---- The tile's operands --------------------------------------------------------------------- */

/* Queries [first, to) with keys [from, until) of those at key; for make_gradients. */
FA_DEVICE void set_operands(const fa_backward_params *p, const fa_shared *shared, int64_t first,
                            int64_t to, int64_t key, int64_t from, int64_t until)
{
    const fa_attention_params *a = &p->a;
    __syncthreads(); /* the previous tile's operands are no longer used */
    if (threadIdx.x == 0) {
        const fa_rows dout = rows_of(&p->dout, a->d_v, false, first, first, to);
        const fa_rows q = rows_of(&a->q, a->d, false, first, first, to);
        const fa_rows v = rows_of(&a->v, a->d_v, true, key, from, until);
        const fa_rows k = rows_of(&a->k, a->d, true, key, from, until);
        shared->of[0].own = QUERIES_OWN ? dout : v;
        shared->of[0].other = QUERIES_OWN ? v : dout;
        shared->of[1].own = QUERIES_OWN ? q : k;
        shared->of[1].other = QUERIES_OWN ? k : q;
    }
    __syncthreads();
}

/* ---- Weights and gradients ------------------------------------------------------------------- */

/* The weight of a logit; 0 if it is masked, whatever the row's log-sum-exp is. */
FA_DEVICE float weigh(float logit, float lse)
{
    return logit == -INFINITY ? 0.0f : fa_weight(logit, lse);
}

/* If a weight is 0, its dS is 0 whatever dP is. */
FA_DEVICE float gradient_of(float weight, float dp, float delta)
{
    return weight == 0.0f ? 0.0f : weight * (dp - delta);
}

/* For a scale and masks by position only. */
FA_DEVICE void make_plain_gradients(const fa_attention_params *p, const fa_shared *shared,
                                    float scores[ROWS][COLUMNS])
{
    const int mine = row_of(0) * PITCH + across();
    const float scale = p->scale;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const int column = across() + c * ACROSS, at = mine + r * DOWN * PITCH + c * ACROSS;
            const float4 query = shared->queries[QUERIES_OWN ? row_of(r) : column];
            const float key = (float)(QUERIES_OWN ? column : row_of(r));
            const bool visible = key >= query.z && key < query.w;
            const float w = visible ? fa_weight(scale * scores[r][c], query.x) : 0.0f;
            shared->own[at] = gradient_of(w, shared->weights[at], query.y);
            if (!QUERIES_OWN) shared->weights[at] = w;
        }
    }
}

/* One element, with any options. *weight: the weight after dropout, which multiplies dO. */
FA_DEVICE float general_gradient(const fa_attention_params *p, const fa_tile *t, float4 query,
                                 int64_t i, int64_t j, float score, float dp, bool behind_softcap,
                                 fa_dropout_cache *cache, float *weight)
{
    const float x = p->scale * score;
    float w = weigh(fa_logit(p, t, i, j, x), query.x);
    const float keep = p->dropout_threshold ? fa_dropout_factor_of(p, cache, i, j) : 1.0f;
    const float slope = behind_softcap ? 1.0f : fa_logit_slope(p, x);
    *weight = w * keep;
    w = gradient_of(w, dp * keep, query.y);
    return w == 0.0f ? 0.0f : w * slope;
}

/* For all options, in a loop that is not unrolled. */
FA_DEVICE void make_general_gradients(const fa_attention_params *p, const fa_tile *t,
                                      const fa_shared *shared, bool behind_softcap,
                                      float scores[ROWS][COLUMNS])
{
    const int64_t own = shared->of[1].own.start, other = shared->of[1].other.start;
    const int mine = row_of(0) * PITCH + across();
    fa_dropout_cache cache = fa_dropout_cache_of(p, t);
    put_scores(shared->own, scores);
#pragma unroll 1
    for (int n = 0; n < ROWS * COLUMNS; n++) { /* keys are the inner loop */
        const int r = QUERIES_OWN ? n / COLUMNS : n % ROWS;
        const int c = QUERIES_OWN ? n % COLUMNS : n / ROWS;
        const int column = across() + c * ACROSS, at = mine + r * DOWN * PITCH + c * ACROSS;
        const float4 query = shared->queries[QUERIES_OWN ? row_of(r) : column];
        const int key = QUERIES_OWN ? column : row_of(r);
        const int64_t i = QUERIES_OWN ? own + row_of(r) : other + column;
        float weight = 0.0f, gradient = 0.0f;
        if ((float)key >= query.z && (float)key < query.w)
            gradient =
                general_gradient(p, t, query, i, (QUERIES_OWN ? other : own) + key, shared->own[at],
                                 shared->weights[at], behind_softcap, &cache, &weight);
        shared->weights[at] = weight;
        shared->own[at] = gradient;
    }
}

/* Stores the tile's weights (after dropout) in shared->weights if own rows are keys, and dS in
 * shared->own. The last chunk of keys or queries of the other rows stays in shared memory; returns
 * whether something in it is not finite. behind_softcap: dS is the gradient of the logits after the
 * softcap, which bias and masks change; otherwise that of the scores before it.
 *
 * dP is kept in shared->weights, where a thread accesses only its own elements. */
FA_DEVICE bool make_gradients(const fa_backward_params *p, const fa_tile *t,
                              const fa_shared *shared, bool behind_softcap)
{
    const fa_attention_params *a = &p->a;
    const int64_t own = shared->of[1].own.start, other = shared->of[1].other.start;
    float scores[ROWS][COLUMNS];
    bool bad = false;
    know_queries(p, t, shared, QUERIES_OWN ? own : other, QUERIES_OWN ? other : own);
#pragma unroll 1
    for (int n = 0; n < 2; n++) { /* not unrolled: half as much code */
        bad = make_scores(a, t, shared, &shared->of[n], scores);
        if (n == 0) put_scores(shared->weights, scores);
    }
    __syncthreads(); /* own rows are no longer used */
    if (fa_has_score_options(a) || a->dropout_threshold)
        make_general_gradients(a, t, shared, behind_softcap, scores);
    else make_plain_gradients(a, shared, scores);
    __syncthreads();
    return bad;
}

/* Adds a tile's part of a gradient to a chunk of it. */
FA_DEVICE void add_part(float part[ROWS][GROUPS][4], float sums[ROWS][GROUPS][4])
{
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[r][g][e] += part[r][g][e];
}

#endif
