/*
 * Attention weights of chosen rows on the plain FMA units, in float32, with every option of the
 * API, for every architecture and head dim.
 *
 * A block computes 64 rows of one batch item and head. It loops over the keys twice: first for each
 * row's max and sum, then for the weights, which need both.
 */
#define CHAIN_STEPS 1
#include "common/pass_tiles.cuh"
#include "common/score_options.cuh"
#include "common/softmax.cuh"
#include "weights_simt/weights_simt.h"

/* Numbers of a tile's rows: their queries, n_q if there is none, and the keys that each of them may
 * see. */
typedef struct fa_chosen {
    int64_t query[OWN], low[OWN], high[OWN];
} fa_chosen;

/* A thread's rows. */
typedef struct fa_state {
    float max[ROWS], sum[ROWS]; /* sum: of the thread's own columns */
    float rest[ROWS];           /* its rounding error */
} fa_state;

FA_DEVICE void choose_rows(const fa_weights_params *p, const fa_tile *t, fa_chosen *chosen)
{
    if (threadIdx.x >= OWN) return;
    const int64_t r = t->first + threadIdx.x;
    int64_t i = t->n_q;
    if (r < p->num_rows) i = p->rows ? p->rows[r] : r;
    if (i < 0 || i > t->n_q) i = t->n_q;
    fa_range visible = {0, 0};
    if (i < t->n_q) visible = fa_tile_visible(&p->a, t, i);
    chosen->query[threadIdx.x] = i;
    chosen->low[threadIdx.x] = visible.lo;
    chosen->high[threadIdx.x] = visible.hi;
}

/* The keys that some of the rows may see. The rows may be in any order. */
FA_DEVICE fa_range find_keys(const fa_chosen *chosen)
{
    fa_range all = {INT64_MAX, 0};
#pragma unroll 1
    for (int r = 0; r < OWN; r++) {
        if (chosen->low[r] >= chosen->high[r]) continue;
        all.lo = fa_min64(all.lo, chosen->low[r]);
        all.hi = fa_max64(all.hi, chosen->high[r]);
    }
    return all;
}

/* ---- Logits ---------------------------------------------------------------------------------- */

/* Stores a tile's logits in shared->weights; -infinity for keys that are not seen. A thread
 * accesses only its own elements. */
FA_DEVICE void make_logits(const fa_attention_params *p, const fa_tile *t, const fa_shared *shared,
                           const fa_chosen *chosen, fa_range keys, int64_t start)
{
    const float scale = fa_effective_scale(p, t);
    float scores[ROWS][COLUMNS];
    __syncthreads();
    if (threadIdx.x == 0) {
        shared->of->own = rows_of(&p->q, p->d, false, 0, 0, t->n_q);
        shared->of->own.index = chosen->query;
        shared->of->other = rows_of(&p->k, p->d, true, start, fa_max64(start, keys.lo),
                                    fa_min64(start + OTHERS, keys.hi));
    }
    __syncthreads();
    (void)make_scores(p, t, shared, shared->of, scores);
    put_scores(shared->weights, scores);
#pragma unroll 1
    for (int n = 0; n < ROWS * COLUMNS; n++) {
        const int r = row_of(n / COLUMNS), c = across() + n % COLUMNS * ACROSS;
        const int64_t i = chosen->query[r], j = start + c;
        float *x = shared->weights + r * PITCH + c;
        const bool visible = j >= chosen->low[r] && j < chosen->high[r];
        *x = visible ? fa_logit(p, t, i, j, scale * *x) : -INFINITY;
    }
}

/* ---- First loop: max and sum ---------------------------------------------------------------- */

FA_DEVICE void clear(fa_state *state)
{
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        state->max[r] = -INFINITY;
        state->sum[r] = state->rest[r] = 0.0f;
    }
}

FA_DEVICE void add_logits(const fa_shared *shared, fa_state *state)
{
    const float *mine = shared->weights + row_of(0) * PITCH + across();
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float top = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) top = fmaxf(top, mine[r * DOWN * PITCH + c * ACROSS]);
        top = fmaxf(state->max[r], row_max(top));
        const float base = fa_softmax_base(top);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            sum += fa_weight(mine[r * DOWN * PITCH + c * ACROSS], base);
        const float rescale = fa_softmax_rescale(state->max[r], base);
        state->sum[r] *= rescale;
        state->rest[r] *= rescale;
        fa_add_exactly(&state->sum[r], &state->rest[r], sum);
        state->max[r] = top;
    }
}

/* Replaces sums by factors of the weights; 0 for rows that see nothing, and so have no weights. */
FA_DEVICE void finish(const fa_attention_params *p, const fa_tile *t, fa_state *state)
{
    const float sink = p->sinks ? p->sinks[t->head] : -INFINITY;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float lse;
        state->sum[r] =
            fa_softmax_finish(state->max[r], row_sum(state->sum[r] + state->rest[r]), sink, &lse);
    }
}

/* ---- Second loop: weights -------------------------------------------------------------------- */

/* Replaces logits by weights; 0 if nothing is seen, whatever the row holds. */
FA_DEVICE void make_weights(const fa_shared *shared, const fa_state *state)
{
    float *mine = shared->weights + row_of(0) * PITCH + across();
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float base = fa_softmax_base(state->max[r]), factor = state->sum[r];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            float *x = mine + r * DOWN * PITCH + c * ACROSS;
            *x = factor == 0.0f || *x == -INFINITY ? 0.0f : factor * fa_weight(*x, base);
        }
    }
}

FA_DEVICE void clear_weights(const fa_shared *shared)
{
    float *mine = shared->weights + row_of(0) * PITCH + across();
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) mine[r * DOWN * PITCH + c * ACROSS] = 0.0f;
}

/* Stores columns from `start` on of the tile's rows, whole lines at a time. */
FA_DEVICE void store(const fa_weights_params *p, const fa_tile *t, const fa_shared *shared,
                     int64_t start)
{
    const int columns = (int)fa_min64(OTHERS, p->keys - start);
    __syncthreads();
#pragma unroll 1
    for (int n = (int)threadIdx.x; n < OWN * OTHERS / 4; n += THREADS) {
        const int r = n / (OTHERS / 4), c = n % (OTHERS / 4) * 4;
        if (t->first + r >= p->num_rows) break;
        char *row = fa_view_row(&p->weights, t->batch, t->head, t->first + r);
        fa_store4(row + start * fa_element_size(p->weights.dtype), &p->weights, c, columns,
                  *(const float4 *)(shared->weights + r * PITCH + c));
    }
    __syncthreads();
}

/* ---- A tile ---------------------------------------------------------------------------------- */

FA_DEVICE void run_tile(const fa_weights_params *p, const fa_tile *t, const fa_shared *shared,
                        const fa_chosen *chosen)
{
    const fa_range keys = find_keys(chosen);
    const int64_t first = keys.lo < keys.hi ? keys.lo / OTHERS * OTHERS : INT64_MAX;
    fa_state state;
    clear(&state);
#pragma unroll 1
    for (int64_t start = first; start < keys.hi; start += OTHERS) {
        make_logits(&p->a, t, shared, chosen, keys, start);
        add_logits(shared, &state);
    }
    finish(&p->a, t, &state);
#pragma unroll 1
    for (int64_t start = 0; start < p->keys; start += OTHERS) {
        if (start >= first && start < keys.hi) {
            make_logits(&p->a, t, shared, chosen, keys, start);
            make_weights(shared, &state);
        } else {
            clear_weights(shared);
        }
        store(p, t, shared, start);
    }
}

FA_DEVICE void find_rows(const fa_weights_params *p, int64_t task, fa_tile *t)
{
    const int64_t outer = task / p->a.tiles;
    fa_locate_sequence(&p->a, outer / p->a.heads_q, outer % p->a.heads_q, t);
    t->first = task % p->a.tiles * OWN; /* among the chosen rows, which are not queries */
}

FA_KERNEL __launch_bounds__(THREADS, 4) weights_simt(const __grid_constant__ fa_weights_params p)
{
    FA_DYNAMIC_SHARED(memory);
    __shared__ fa_tile tile;
    const fa_shared shared = fa_shared_of(memory);
    fa_chosen *chosen = (fa_chosen *)(void *)(memory + FA_PASS_SMEM(OWN) / 4);
#pragma unroll 1
    for (int64_t task = blockIdx.x; task < p.a.tasks; task += gridDim.x) {
        if (threadIdx.x == 0) find_rows(&p, task, &tile);
        __syncthreads();
        choose_rows(&p, &tile, chosen);
        __syncthreads();
        run_tile(&p, &tile, &shared, chosen);
        __syncthreads();
    }
}
