/*
 * The launch between prepare and backward_sm80 where three products make one: of each query the factor of its weights.
 *
 * Weights are exp(S - lse). The log-sum-exp is of the forward pass, whose scores have other rounding
 * errors: so where scores are large, all weights of a row are off by a common factor, and do not add
 * up to 1. A block adds up the weights of TILE queries, which it computes as backward_sm80 does, bit
 * by bit; the factor is 1 over the sum. Rows whose scores are small do without: where a tile has no
 * others, its block ends at once.
 *
 * The log-sum-exp may be of more keys than these (context parallelism, sinks that are the caller's).
 * So a factor that is further from 1 than rounding errors explain is not used.
 *
 * Keys of two tiles are in shared memory, where backward_sm80 has keys and values: one is loaded
 * while the other is multiplied.
 */
#include "backward_sm80/config.cuh"
#include "backward_sm80/layout.cuh"
#include "backward_sm80/load.cuh"
#include "backward_sm80/multiply.cuh"
#include "backward_sm80/options.cuh"
#include "backward_sm80/sums.cuh"
#include "backward_sm80/tile_part.cuh"
#include "backward_sm80/weights.cuh"
#include "backward_sm80/work.cuh"

static_assert(THREE_PRODUCTS, "other kernels have no factors");

/* Scores of a row are large if its log-sum-exp, less the logarithm of how many keys it sees, is
 * further from 0 than this. With normal logits that difference is half their variance. In units of
 * log 2. */
#define LARGE_SCORES 3.0f

/* How far from 1 a sum of weights may be by rounding errors: a share of the log-sum-exp. */
#define MOST_ROUNDING 0x1p-20f

/* Sums of weights of each group of warps, where backward_sm80 has dS; behind them what rounding has
 * taken from each. Where one key has nearly all the weight, other tiles add less than rounding 1
 * keeps. */
enum { GROUPS = KEYS / GROUP_ROWS, SUMS = GROUPS * QUERIES, SUMS_AT = DS_AT, RESTS = 4 * SUMS };
static_assert(2 * 4 * SUMS <= SCORE_BYTES, "sums are where dS is");

/* What all threads know: QUERIES queries of a head, and the key tiles that they see. */
typedef struct part_work {
    fa_tile queries;
    int64_t number;     /* of the workspace's tile */
    int32_t first;      /* query */
    int32_t from, to;   /* key tile; to <= from: none */
    block_work keys[2]; /* a key tile and the next one */
} part_work;

FA_DEVICE uint32_t keys_offset(int key_tile) { return key_tile & 1 ? V_AT - K_AT : 0; }

/* Where an option hides keys or moves their scores, the log-sum-exp does not tell. */
FA_DEVICE bool has_large_scores(const fa_attention_params *p, const fa_tile *t, int64_t i,
                                float lse)
{
    if (i >= t->n_q || !(lse < INFINITY)) return false;
    if (OPTIONS && (p->mask.data || p->bias.data || p->alibi_slopes)) return true;
    const fa_range sees = fa_tile_visible(p, t, i);
    return fabsf(lse - log2f((float)(sees.hi - sees.lo))) > LARGE_SCORES;
}

/* The part's queries, and the key tiles that they see. */
FA_DEVICE void describe_part(const fa_attention_params *p, part_work *w, int part)
{
    const fa_tile *t = &w->queries;
    const int64_t first = t->first + part * QUERIES, end = fa_min64(first + QUERIES, t->n_q);
    w->first = (int32_t)first;
    w->from = w->to = 0;
    if (first >= end) return;
    w->from = (int32_t)(fa_tile_visible(p, t, first).lo / KEYS);
    w->to = (int32_t)((fa_tile_visible(p, t, end - 1).hi + KEYS - 1) / KEYS);
}

FA_DEVICE void describe_keys(const fa_attention_params *p, part_work *w, int key_tile)
{
    block_work *k = &w->keys[key_tile & 1];
    k->sequence = w->queries;
    k->keys.batch = w->queries.batch;
    k->keys.head_kv = w->queries.head_kv;
    k->keys.first = (int64_t)key_tile * KEYS;
    k->heads = 1;
    k->from = k->to = k->tiles = k->num_keys = 0;
#if OPTIONS
    for (int i = 0; i < KEYS; i++) k->bad_keys[i] = 0;
#endif
    find_queries(p, k);
}

FA_DEVICE void issue_key_tile(const fa_attention_params *p, uint32_t memory, const part_work *w,
                              int key_tile)
{
    const block_work *k = &w->keys[key_tile & 1];
    const fa_tile *t = &k->sequence;
    const row_source from = source_of(&p->k, t->block_k, t->start_k + k->keys.first, t->head_kv,
                                      p->d, k->seen_key_from, k->seen_key_to);
    issue_rows(&from, KEYS, memory + K_AT + keys_offset(key_tile));
}

FA_DEVICE void issue_queries(const fa_attention_params *p, const fa_backward_sm80_params *s,
                             uint32_t memory, const part_work *w, int part)
{
    const block_work *k = &w->keys[w->from & 1];
    const fa_tile *t = &w->queries;
    const int thread = ptx_thread_id();
    const float2 *rows = (const float2 *)(const void *)s->rows + w->number * TILE + part * QUERIES;
    const row_source from = source_of(&p->q, t->block_q, t->start_q + w->first, t->head, p->d,
                                      k->seen_query_from - w->first, k->seen_query_to - w->first);
    issue_rows(&from, QUERIES, q_at(memory, 0));
    if (thread < QUERIES / 2)
        ptx_cp_async_16(rows_at(memory, 0) + (uint32_t)thread * 16, rows + 2 * thread, true);
}

/* Scores of a chunk become weights, as in backward_sm80. */
FA_DEVICE void make_weights(const fa_attention_params *p, const block_work *k,
                            const tile_part *part, int tile, float scale, fa_scores *s)
{
#if OPTIONS
    const tile_options o = find_tile_options(p, k, 0, part->query, part->key);
#pragma unroll
    for (int i = 0; i < M_TILES * N_TILES / GROUP; i++) {
        const int m = i / (N_TILES / GROUP), n = i % (N_TILES / GROUP) * GROUP;
        const score_group g = {&s->at[m][n], m, n};
        float slopes[GROUP][4];
        make_logits(p, k, &o, &g, slopes, scale);
#pragma unroll
        for (int e = 0; e < 4 * GROUP; e++) {
            const query_pair pair = load_pair(part->rows, n + e / 4);
            const uint32_t bit = BIT(n + e / 4, m, e / 2 % 2, e % 2);
            g.s[e / 4][e % 4] =
                weigh_score(g.s[e / 4][e % 4], (o.sees & bit) != 0, pair.lse[e % 2]);
        }
    }
    (void)tile;
#else
    (void)p;
    weigh(s, scale, part->rows);
    if (is_masked(k, part->key / GROUP_ROWS * GROUP_ROWS, tile))
        mask_weights(k, s, part->query, part->key);
#endif
}

/* The rest: of x and of the sum so far, what is not in the new sum (Knuth, The Art of Computer
 * Programming, volume 2, section 4.2.2). */
FA_DEVICE void add_sum(uint32_t at, float x)
{
    const float old = ptx_ld_shared_f32(at), sum = old + x, added = sum - old;
    const float rest = (old - (sum - added)) + (x - added);
    ptx_st_shared_f32(at, sum);
    ptx_st_shared_f32(at + RESTS, ptx_ld_shared_f32(at + RESTS) + rest);
}

/* Adds the weights of a chunk to the sums of the warp's group. to: the lane's first query. */
FA_DEVICE void add_weights(const fa_scores *weights, uint32_t to)
{
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = 0.0f;
#pragma unroll
            for (int mr = 0; mr < 2 * M_TILES; mr++) sum += weights->at[mr / 2][n][mr % 2 * 2 + i];
#pragma unroll
            for (int other = 4; other < 32; other *= 2)
                sum += __shfl_xor_sync(0xffffffffu, sum, other);
            if (ptx_thread_id() % 32 < 4) add_sum(to + 32 * (uint32_t)n + 4 * (uint32_t)i, sum);
        }
}

FA_DEVICE void sum_key_tile(const fa_attention_params *p, const part_work *w, uint32_t memory,
                            int key_tile, float scale)
{
    const block_work *k = &w->keys[key_tile & 1];
    const tile_cursor at = {0, 0, w->first / QUERIES};
    const fa_layout layout = find_layout(memory), *l = &layout;
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        const tile_part part = find_part(memory, &at, chunk);
        const int own = part.query - w->first;
        fa_scores s;
        make_scores(&s, part.keys + keys_offset(key_tile), part.queries);
        make_weights(p, k, &part, at.tile, scale, &s);
        add_weights(&s, memory + SUMS_AT + 4 * (uint32_t)(l->group * QUERIES + own));
    }
}

/* lse: in units of log 2. */
FA_DEVICE float find_factor(float sum, float lse)
{
    const float most = fminf(fmaxf(fabsf(lse), 1.0f) * MOST_ROUNDING, 0x1p-6f);
    return fabsf(sum - 1.0f) <= most ? 1.0f / sum : 1.0f;
}

FA_DEVICE void store_factors(const fa_attention_params *p, const fa_backward_sm80_params *s,
                             const part_work *w, uint32_t memory, int part)
{
    const float2 *rows = (const float2 *)(const void *)s->rows + w->number * TILE + part * QUERIES;
    float *factors = s->factors + w->number * TILE + part * QUERIES;
    for (int row = ptx_thread_id(); row < QUERIES; row += THREADS) {
        const float lse = rows[row].x;
        float sum = p->sinks ? ptx_ex2(fmaf(p->sinks[w->queries.head], FA_LOG2E, -lse)) : 0.0f;
        float rest = 0.0f;
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            const uint32_t at = memory + SUMS_AT + 4 * (uint32_t)(group * QUERIES + row);
            sum += ptx_ld_shared_f32(at);
            rest += ptx_ld_shared_f32(at + RESTS);
        }
        sum += rest;
        factors[row] = find_factor(sum, lse);
    }
}

FA_DEVICE void correct_part(const fa_attention_params *p, const fa_backward_sm80_params *s,
                            part_work *w, uint32_t memory, int part, float scale)
{
    __syncthreads(); /* all are done with the part before */
    for (int i = ptx_thread_id(); i < 2 * SUMS; i += THREADS)
        ptx_st_shared_f32(memory + SUMS_AT + 4 * (uint32_t)i, 0.0f);
    if (threadIdx.x == 0) {
        describe_part(p, w, part);
        if (w->from < w->to) describe_keys(p, w, w->from);
    }
    __syncthreads();
    if (w->from < w->to) {
        issue_queries(p, s, memory, w, part);
        issue_key_tile(p, memory, w, w->from);
    }
#pragma unroll 1
    for (int tile = w->from; tile < w->to; tile++) {
        ptx_cp_async_wait_all();
        __syncthreads(); /* this tile's copies are there, and all are done with the tile before */
        if (tile + 1 < w->to) {
            if (threadIdx.x == 0) describe_keys(p, w, tile + 1);
            __syncthreads();
            issue_key_tile(p, memory, w, tile + 1);
        }
#if OPTIONS
        if (p->mask.data || p->bias.data) {
            clear_bad_keys(memory + keys_offset(tile), &w->keys[tile & 1]);
            __syncthreads();
        }
#endif
        sum_key_tile(p, w, memory, tile, scale);
    }
    __syncthreads();
    store_factors(p, s, w, memory, part);
}

FA_KERNEL __launch_bounds__(THREADS, BLOCKS)
    backward_sm80_weight_sums(const __grid_constant__ fa_backward_params p,
                              const __grid_constant__ fa_backward_sm80_params s)
{
    FA_DYNAMIC_SHARED(raw);
    __shared__ part_work work;
    const uint32_t memory = fa_opaque(find_memory(raw));
    if (threadIdx.x == 0) {
        work.queries = fa_find_tile(&p.a, blockIdx.x, TILE);
        work.number = find_own_tile(&s, blockIdx.x);
    }
    __syncthreads();
    const int64_t first = work.number * TILE;
    const float2 *rows = (const float2 *)(const void *)s.rows + first;
    bool large = false;
    for (int row = (int)threadIdx.x; row < TILE; row += THREADS)
        large =
            large || has_large_scores(&p.a, &work.queries, work.queries.first + row, rows[row].x);
    if (!__syncthreads_or(large)) {
        for (int row = (int)threadIdx.x; row < TILE; row += THREADS) s.factors[first + row] = 1.0f;
        return;
    }
#pragma unroll 1
    for (int part = 0; part < PARTS; part++)
        correct_part(&p.a, &s, &work, memory, part, inner_scale(&p.a));
}
