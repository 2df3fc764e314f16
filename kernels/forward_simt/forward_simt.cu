/*
 * Attention forward on the plain FMA units, in float32: FlashAttention-2, algorithm 1
 * (arXiv:2307.08691, section 3.1), with every option of the API, for every architecture. It takes
 * the calls that faster kernels do not support.
 *
 * A block of 128 threads computes a work tile. It loops over key tiles, converts them to float32 in
 * shared memory, and uses one buffer for keys and then values. Head dims above CHUNK are processed
 * in chunks, so that shared memory fits in 64 KiB for every head dim. common/simt.cuh explains
 * which elements a thread has. Weights never leave the warp that computes them.
 *
 * Compile-time parameters: HEAD_DIM, the larger of d and d_v, rounded up; KEYS, CHUNK and ROWS
 * (kernels/variants.h).
 */
#include "forward_simt/config.cuh"

#include "common/score_options.cuh"
#include "common/simt.cuh"
#include "common/simt_scores.cuh"
#include "common/softmax.cuh"

/* The keys of a tile that some queries see: [from, to) of [start, start + KEYS). */
typedef struct fa_key_range {
    int64_t start, from, to;
} fa_key_range;

/* A thread's part of the work tile. */
typedef struct fa_state {
    float max[ROWS], sum[ROWS]; /* sum: of the thread's own columns */
    float rest[ROWS];           /* its rounding error */
    float out[ROWS][CHUNKS * GROUPS][4];
} fa_state;

/* ---- Tiles into shared memory ---------------------------------------------------------------- */

FA_DEVICE void load_queries_as(const fa_attention_params *p, const fa_tile *t, float *to, int kind,
                               int column)
{
#pragma unroll 4
    for (int n = (int)threadIdx.x; n < QUERIES * CHUNK / 4; n += THREADS) {
        const int r = n / (CHUNK / 4), c = n % (CHUNK / 4) * 4;
        const int64_t i = t->first + r;
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i < t->n_q)
            x = fa_fetch4(fa_view_row(&p->q, t->block_q, t->start_q + i, t->head), kind, p->q.dtype,
                          column + c, p->d);
        *(float4 *)(to + r * PITCH + c) = x;
    }
}

FA_DEVICE void load_queries(const fa_attention_params *p, const fa_tile *t, float *to, int column)
{
    switch (fa_fetch_kind(&p->q)) {
    case FA_FETCH_FLOAT32: load_queries_as(p, t, to, FA_FETCH_FLOAT32, column); break;
    case FA_FETCH_FLOAT16: load_queries_as(p, t, to, FA_FETCH_FLOAT16, column); break;
    case FA_FETCH_BFLOAT16: load_queries_as(p, t, to, FA_FETCH_BFLOAT16, column); break;
    default: load_queries_as(p, t, to, FA_FETCH_ANY, column);
    }
}

FA_DEVICE float4 scale_by(float4 x, float scale)
{
    return make_float4(x.x * scale, x.y * scale, x.z * scale, x.w * scale);
}

/* Columns column .. column + CHUNK - 1 of a tile of keys or values; zeros for keys that no query
 * sees. Returns 0, or NaN if something in it is not finite. It needs no checks as in load_rows
 * (common/simt.cuh), because tiles are whole. */
FA_DEVICE float load_keys_as(const fa_attention_params *p, const fa_kernel_view *v,
                             const fa_kernel_view *scale, const fa_tile *t,
                             const fa_key_range *keys, float *to, int kind, int column, int columns)
{
    float seen = 0.0f;
#pragma unroll 1
    for (int first = (int)threadIdx.x; first < KEYS * CHUNK / 4; first += BATCH * THREADS) {
        float4 x[BATCH]; /* all loads are issued before the first is used */
#pragma unroll
        for (int u = 0; u < BATCH; u++) {
            const int n = first + u * THREADS;
            const int64_t j = keys->start + n / (CHUNK / 4);
            x[u] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (j >= keys->from && j < keys->to)
                x[u] = fa_fetch4(fa_key_row(p, v, t, j), kind, v->dtype,
                                 column + n % (CHUNK / 4) * 4, columns);
            if (kind == FA_FETCH_ANY && scale->data && j >= keys->from && j < keys->to)
                x[u] = scale_by(x[u], *(const float *)(const void *)fa_key_row(p, scale, t, j));
        }
#pragma unroll
        for (int u = 0; u < BATCH; u++) {
            const int n = first + u * THREADS;
            *(float4 *)(to + n / (CHUNK / 4) * PITCH + n % (CHUNK / 4) * 4) = x[u];
            seen += x[u].x * 0.0f + x[u].y * 0.0f + (x[u].z * 0.0f + x[u].w * 0.0f);
        }
    }
    return seen;
}

FA_DEVICE float load_keys(const fa_attention_params *p, const fa_kernel_view *v,
                          const fa_kernel_view *scale, const fa_tile *t, const fa_key_range *keys,
                          float *to, int column, int columns)
{
    switch (fa_fetch_kind(v)) {
    case FA_FETCH_FLOAT32:
        return load_keys_as(p, v, scale, t, keys, to, FA_FETCH_FLOAT32, column, columns);
    case FA_FETCH_FLOAT16:
        return load_keys_as(p, v, scale, t, keys, to, FA_FETCH_FLOAT16, column, columns);
    case FA_FETCH_BFLOAT16:
        return load_keys_as(p, v, scale, t, keys, to, FA_FETCH_BFLOAT16, column, columns);
    default: return load_keys_as(p, v, scale, t, keys, to, FA_FETCH_ANY, column, columns);
    }
}

/* ---- Which keys are seen --------------------------------------------------------------------- */

/* What is computed once for a tile. It is in shared memory, because products need the registers. */
typedef struct fa_seen {
    fa_range first, last; /* of the tile's first and last query */
    int64_t chunk;        /* the first position of the attention chunk of the first query */
} fa_seen;

/* The keys that query i of the tile sees by position. */
FA_DEVICE fa_range find_visible(const fa_attention_params *p, const fa_tile *t, int64_t chunk,
                                int64_t i)
{
    const fa_range r = fa_tile_unchunked(p, t, i);
    if (!p->attention_chunk) return r;
    const int64_t center = i + t->diagonal;
#pragma unroll 1
    while (chunk + p->attention_chunk <= center) chunk += p->attention_chunk;
    return fa_visible_in_chunk(r, p->attention_chunk, center, chunk);
}

FA_DEVICE fa_seen find_seen(const fa_attention_params *p, const fa_tile *t)
{
    const int64_t center = t->first + t->diagonal;
    fa_seen s;
    s.chunk = 0;
    if (p->attention_chunk && center > 0)
        s.chunk = fa_divide(center, p->attention_chunk) * p->attention_chunk;
    s.first = find_visible(p, t, s.chunk, t->first);
    s.last = find_visible(p, t, s.chunk, fa_min64(t->first + QUERIES, t->n_q) - 1);
    return s;
}

/* ---- Softmax --------------------------------------------------------------------------------- */

/* Replaces scores by logits, with any options. They are in shared memory, so that the loop need not
 * be unrolled. A thread accesses only its own elements. */
FA_DEVICE void make_general_logits(const fa_attention_params *p, const fa_tile *t,
                                   const fa_shared *shared, const fa_seen *seen, int64_t start,
                                   float scale, float scores[ROWS][COLUMNS])
{
    float *mine = shared->weights + row_of(0) * WEIGHTS_PITCH + across();
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            mine[r * DOWN * WEIGHTS_PITCH + c * ACROSS] = scale * scores[r][c];
#pragma unroll 1
    for (int r = 0; r < ROWS; r++) {
        const int64_t i = fa_min64(t->first + row_of(r), t->n_q - 1);
        const fa_range visible = find_visible(p, t, seen->chunk, i);
#pragma unroll 1
        for (int c = 0; c < COLUMNS; c++) {
            float *x = mine + r * DOWN * WEIGHTS_PITCH + c * ACROSS;
            const int64_t j = start + across() + c * ACROSS;
            *x = j >= visible.lo && j < visible.hi ? fa_logit(p, t, i, j, *x) : -INFINITY;
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            scores[r][c] = mine[r * DOWN * WEIGHTS_PITCH + c * ACROSS];
}

/* Replaces scores by logits, for a scale, causal masks and windows only. full: every row sees the
 * whole tile. */
FA_DEVICE void make_plain_logits(const fa_attention_params *p, const fa_tile *t, int64_t start,
                                 bool full, float scale, float scores[ROWS][COLUMNS])
{
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        fa_range visible = {0, KEYS}; /* from start on */
        if (!full) {
            visible = fa_tile_unchunked(p, t, fa_min64(t->first + row_of(r), t->n_q - 1));
            visible.lo = fa_min64(fa_max64(visible.lo - start, 0), KEYS);
            visible.hi = fa_min64(fa_max64(visible.hi - start, 0), KEYS);
        }
        const int lo = (int)visible.lo, hi = (int)visible.hi;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const int j = across() + c * ACROSS;
            scores[r][c] = full || (j >= lo && j < hi) ? scale * scores[r][c] : -INFINITY;
        }
    }
}

/* Where a row's factor of earlier outputs is kept during the products, which need the registers:
 * after its weights. */
FA_DEVICE float *rescale_of(const fa_shared *shared, int r)
{
    return shared->weights + row_of(r) * WEIGHTS_PITCH + KEYS;
}

/* Computes weights from logits and stores them in shared memory. Updates the max and the sum. */
FA_DEVICE void make_weights(const fa_shared *shared, float logits[ROWS][COLUMNS], fa_state *state)
{
    float *mine = shared->weights + row_of(0) * WEIGHTS_PITCH + across();
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float top = logits[r][0];
#pragma unroll
        for (int c = 1; c < COLUMNS; c++) top = fmaxf(top, logits[r][c]);
        top = fmaxf(state->max[r], row_max(top));
        const float base = fa_softmax_base(top);
        const float rescale = fa_softmax_rescale(state->max[r], base);
        float sum = 0.0f;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const float w = fa_weight(logits[r][c], base);
            mine[r * DOWN * WEIGHTS_PITCH + c * ACROSS] = w;
            sum += w;
        }
        state->max[r] = top;
        state->sum[r] *= rescale;
        state->rest[r] *= rescale;
        fa_add_exactly(&state->sum[r], &state->rest[r], sum);
        if (across() == 0) *rescale_of(shared, r) = rescale;
    }
}

/* A thread's columns x, x+8, x+16, x+24 of 32 take their bits from one Philox block. */
FA_DEVICE void drop_weights(const fa_attention_params *p, const fa_tile *t, const fa_shared *shared,
                            int64_t start)
{
    const fa_dropout d = fa_dropout_of(p, t);
    float *mine = shared->weights + row_of(0) * WEIGHTS_PITCH + across();
#pragma unroll 1
    for (int r = 0; r < ROWS; r++)
#pragma unroll 1
        for (int g = 0; g < KEYS / 32; g++) {
            float *w = mine + r * DOWN * WEIGHTS_PITCH + g * 32;
            uint32_t block[4];
            fa_dropout_block(d.seed, d.offset, d.batch_head, t->first + row_of(r), start / 32 + g,
                             across() / 2, block);
#pragma unroll
            for (int c = 0; c < 4; c++)
                w[c * ACROSS] *=
                    fa_dropout_factor(p, across() % 2 ? block[c] >> 16 : block[c] & 0xffffu);
        }
}

/* ---- A tile ---------------------------------------------------------------------------------- */

FA_DEVICE void make_scores(const fa_attention_params *p, const fa_tile *t, const fa_shared *shared,
                           const fa_key_range *keys, float scores[ROWS][COLUMNS])
{
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) scores[r][c] = 0.0f;
#pragma unroll 1
    for (int column = 0; column < p->d; column += CHUNK) {
        const int columns = p->d - column < CHUNK ? p->d - column : CHUNK;
        __syncthreads(); /* the buffers are no longer used */
        if (CHUNKS > 1) load_queries(p, t, shared->own, column);
        (void)load_keys(p, &p->k, &p->k_scale, t, keys, shared->other, column, p->d);
        __syncthreads();
        add_scores(shared, columns, scores);
    }
}

/* Adds the tile's part of the outputs, which begins at `group` of 4 columns. */
FA_DEVICE void add_outputs(const fa_shared *shared, fa_state *state, int group,
                           float part[ROWS][PART_GROUPS][4])
{
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float rescale = *rescale_of(shared, r);
#pragma unroll
        for (int g = 0; g < PART_GROUPS; g++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                state->out[r][group + g][e] =
                    fmaf(state->out[r][group + g][e], rescale, part[r][g][e]);
    }
}

/* The weights are in shared memory. */
FA_DEVICE void use_values(const fa_attention_params *p, const fa_tile *t, const fa_shared *shared,
                          const fa_key_range *keys, fa_state *state)
{
    const int count = (int)(keys->to - keys->start);
#pragma unroll 1 /* the code of the loads exists only once */
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        if (chunk * CHUNK >= p->d_v) break;
        __syncthreads();
        float bad = load_keys(p, &p->v, &p->v_scale, t, keys, shared->other, chunk * CHUNK, p->d_v);
        const bool nonfinite = __syncthreads_or(bad != 0.0f);
#pragma unroll
        for (int g = 0; g < GROUPS; g += PART_GROUPS) {
            float part[ROWS][PART_GROUPS][4];
            sum_rows(shared->weights, shared->other + g * 32, count, nonfinite, part);
#pragma unroll
            for (int n = 0; n < CHUNKS; n++) { /* registers cannot be indexed */
                if (n == chunk) add_outputs(shared, state, n * GROUPS + g, part);
            }
        }
    }
}

/* All keys that the work tile's queries see: load, multiply, softmax, load, multiply. */
FA_DEVICE void attend(const fa_attention_params *p, const fa_tile *t, const fa_shared *shared,
                      const fa_seen *seen, fa_state *state)
{
    const float scale = fa_effective_scale(p, t);
    if (seen->first.lo >= seen->last.hi) return;
    /* With one chunk, the queries stay in shared memory for all key tiles. */
    if (CHUNKS == 1) load_queries(p, t, shared->own, 0);
#pragma unroll 1
    for (int64_t start = seen->first.lo / KEYS * KEYS; start < seen->last.hi; start += KEYS) {
        fa_key_range keys;
        keys.start = start;
        keys.from = fa_max64(start, seen->first.lo);
        keys.to = fa_min64(start + KEYS, seen->last.hi);
        float scores[ROWS][COLUMNS];
        make_scores(p, t, shared, &keys, scores);
        const bool full = start >= seen->last.lo && start + KEYS <= seen->first.hi;
        if (fa_has_score_options(p) || p->attention_chunk)
            make_general_logits(p, t, shared, seen, start, scale, scores);
        else make_plain_logits(p, t, start, full, scale, scores);
        make_weights(shared, scores, state);
        if (p->dropout_threshold) drop_weights(p, t, shared, start);
        use_values(p, t, shared, &keys, state);
    }
}

/* Stores the thread's columns of one row, times a factor; zeros if the factor is 0, whatever the
 * columns hold. */
FA_DEVICE void store_row(const fa_attention_params *p, const fa_tile *t, int64_t i, float factor,
                         float out[CHUNKS * GROUPS][4])
{
    char *row = fa_view_row(&p->out, t->block_q, t->start_q + i, t->head);
#pragma unroll
    for (int g = 0; g < CHUNKS * GROUPS; g++) {
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (factor != 0.0f)
            x = make_float4(factor * out[g][0], factor * out[g][1], factor * out[g][2],
                            factor * out[g][3]);
        fa_store4(row, &p->out, g * 32 + across() * 4, p->d_v, x);
    }
}

/* Divides by the sums and stores out and lse; zeros and -infinity in rows without a query. */
FA_DEVICE void finish(const fa_attention_params *p, const fa_tile *t, fa_state *state)
{
    const float descale = fa_value_descale(p, t);
    const float sink = p->sinks ? p->sinks[t->head] : -INFINITY;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int64_t i = t->first + row_of(r);
        const float sum = row_sum(state->sum[r] + state->rest[r]);
        float lse, factor = fa_softmax_finish(state->max[r], sum, sink, &lse);
        if (i >= t->n_q) lse = -INFINITY, factor = 0.0f;
        if (i >= t->room_q) continue;
        store_row(p, t, i, factor == 0.0f ? 0.0f : factor * descale, state->out[r]);
        if (p->lse && across() == 0)
            p->lse[(t->block_q * p->heads_q + t->head) * p->rows_q + t->start_q + i] = lse;
    }
}

FA_DEVICE void clear(fa_state *state)
{
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        state->max[r] = -INFINITY;
        state->sum[r] = state->rest[r] = 0.0f;
#pragma unroll
        for (int g = 0; g < CHUNKS * GROUPS; g++)
#pragma unroll
            for (int e = 0; e < 4; e++) state->out[r][g][e] = 0.0f;
    }
}

FA_DEVICE void run_tile(const fa_attention_params *p, const fa_tile *t, const fa_shared *shared,
                        const fa_seen *seen)
{
    fa_state state;
    if (t->first >= t->room_q) return;
    clear(&state);
    if (t->first < t->n_q) attend(p, t, shared, seen, &state);
    finish(p, t, &state);
}

FA_KERNEL __launch_bounds__(THREADS, BLOCKS)
    forward_simt(const __grid_constant__ fa_attention_params p)
{
    FA_DYNAMIC_SHARED(memory);
    __shared__ fa_tile tile; /* because products need the registers */
    __shared__ fa_seen seen;
    fa_shared shared;
    shared.own = memory;
    shared.other = shared.own + QUERIES * PITCH;
    shared.weights = shared.other + KEYS * PITCH;
#pragma unroll 1
    for (int64_t task = blockIdx.x; task < p.tasks; task += gridDim.x) {
        if (threadIdx.x == 0) {
            tile = fa_find_tile(&p, task, QUERIES);
            seen = find_seen(&p, &tile);
        }
        __syncthreads();
        run_tile(&p, &tile, &shared, &seen);
        __syncthreads();
    }
}
