/*
 * The launch between prepare and backward_sm80 with three products for each float32 product:
 * computes the factor of each query's weights.
 *
 * Weights are exp(S - lse). The log-sum-exp comes from the forward pass, whose scores have other
 * rounding errors. So if scores are large, all weights of a row have the same relative error, and
 * do not add up to 1. A block adds up the weights of TILE queries, which it computes exactly as
 * backward_sm80 does, to the bit; the factor is 1 over the sum. Rows with small scores do not need
 * it: if a tile has only such rows, its factors are 1.
 *
 * The log-sum-exp may cover more keys than these (context parallelism, the caller's own sinks). So
 * a factor that is further from 1 than rounding errors explain is not used.
 *
 * There are as many blocks as the device runs at a time. A block reads the log-sum-exps of its next
 * 32 tiles at once, with some tiles for each warp, and then computes the tiles that have large
 * scores. Otherwise, if there are no such tiles, a block would mainly wait for memory, once for
 * each tile.
 *
 * Tiles of keys and queries, and the warps that multiply them, may differ from those of
 * backward_sm80, because a score depends only on its own query and key. Two key tiles are in shared
 * memory: one is loaded while the other is multiplied. A thread keeps the sums of its share of the
 * keys in registers until a row has seen all of them.
 */
#define SCORES_ALONE 1

#include "backward_sm80/config.cuh"
#include "backward_sm80/high_low.cuh"
#include "backward_sm80/layout.cuh"
#include "backward_sm80/load.cuh"
#include "backward_sm80/multiply.cuh"
#include "backward_sm80/norms.cuh"
#include "backward_sm80/options.cuh"
#include "backward_sm80/own_parts.cuh"
#include "backward_sm80/slices.cuh"
#include "backward_sm80/sums.cuh"
#include "backward_sm80/tile_part.cuh"
#include "backward_sm80/weights.cuh"
#include "backward_sm80/work.cuh"
#include "common/reduce.cuh"
#include "common/softmax.cuh"

static_assert(THREE_PRODUCTS, "other kernels have no factors");
static_assert(STAGES == 1, "queries are loaded once");
static_assert(CHUNKS == 1, "the sums of all of a warp's queries are in registers");
static_assert(KEYS <= THREADS && QUERIES <= THREADS, "a thread for each key, and for each query");

/* Scores of a row are large if its log-sum-exp, minus the logarithm of the number of keys that it
 * sees, is further from 0 than this. With normal logits that difference is half their variance. In
 * units of log 2. */
#define LARGE_SCORES 3.0f

/* The same if a bound of scores is known: then only a bias can raise a log-sum-exp far. One normal bias and score in a million do
 * so by 3, and a block that corrects one tile alone takes as long as all others. */
#define LARGE_BIASED_SCORES 6.0f

/* Scores of a tile are also large if their bound, the product of the norms of its longest query and of the
 * longest key, is above this. Norms of numbers of a standard normal distribution, and the usual scale,
 * give bounds of 0.75 of it or less. */
FA_DEVICE float find_most_bound(int d) { return 8.0f + 1.3f * sqrtf((float)d); }

/* How far from 1 a sum of weights may be due to rounding errors, relative to the log-sum-exp. */
#define MOST_ROUNDING 0x1p-20f

/* After keys and queries. */
enum {
    OWN_ROWS_AT = Q_AT + Q_BYTES,
    SUMS_AT = OWN_ROWS_AT + ROW_BYTES, /* for each group of warps, sums and rounding errors */
    OWN_POWERS_AT = SUMS_AT + GROUPS * QUERIES * 8,
    OWN_SMEM_BYTES = OWN_POWERS_AT + FA_BACKWARD_SM80_POWERS(ELEMENT, KEYS, QUERIES, 1) + 128
};
static_assert(OWN_SMEM_BYTES ==
                  FA_BACKWARD_SM80_WEIGHT_SUMS_SMEM(ELEMENT, HEAD_DIM, KEYS, QUERIES, GROUP_ROWS),
              "as the planner counts");

/* Tiles that are checked together. Their rows use the memory of keys. */
enum { LOOKS = 32, LOOK_BYTES = TILE * 8 };
static_assert(LOOKS * LOOK_BYTES <= 2 * KEY_BYTES, "there is room for them");
static_assert(TILE == 64, "two rows of a tile for each lane");

/* What all threads know: a tile of queries; a part of it, QUERIES queries; the key tiles that these
 * see. */
typedef struct tile_work {
    fa_tile queries;
    int64_t number;   /* of the workspace's tile */
    int32_t first;    /* query of the part */
    int32_t from, to; /* key tile; to <= from: none */
    /* In the sequence: key j is seen by the queries [first_query + j, end_query + j); rows outside
     * the other ranges are not read. Saturated, with room to add the number of a key. */
    int32_t first_query, end_query;
    int32_t seen_key_from, seen_key_to, seen_query_from, seen_query_to;
    block_work keys[2]; /* the description of a key tile and of the next one */
} tile_work;

/* A sum of weights, and its rounding error. If one key has nearly all the weight, the others add
 * less than the rounding of 1 keeps. */
typedef struct exact_sum {
    float sum, rest;
} exact_sum;

/* The lane's queries 8n + 2t + i. */
typedef struct row_sums {
    exact_sum at[N_TILES][2];
} row_sums;

/* ---- Which tiles have large scores ----------------------------------------------------------- */

/* If an option hides keys or changes scores, the log-sum-exp does not show how large scores are, and it may be small because
 * few keys are left. But then the bound of scores is known. Only a log-sum-exp that is large or below all scores shows a
 * large bias of the keys that have weights. */
FA_DEVICE bool has_large_scores(const fa_attention_params *p, const fa_tile *t, int64_t i,
                                float lse)
{
    if (i >= t->n_q || !(lse < INFINITY)) return false;
    const fa_range sees = fa_tile_visible(p, t, i);
    const float above = lse - log2f((float)(sees.hi - sees.lo));
    if (!OPTIONS || !changes_scores(p)) return fabsf(above) > LARGE_SCORES;
    const float least = -FA_LOG2E * find_most_bound((int)p->d);
    return above > LARGE_BIASED_SCORES || (lse < least && lse > -INFINITY);
}

/* Whether scores of a tile may be large, whatever the log-sum-exps are. number: of the tile in the workspace. All lanes of a
 * warp ask for the same tile. */
FA_DEVICE bool has_large_bound(const fa_attention_params *p, const fa_backward_sm80_params *s,
                               const fa_tile *t, int64_t number)
{
    if (!OPTIONS || !changes_scores(p)) return false;
    const float2 *norms = find_norms(p, s, number);
    const int tile = (int)(t->first / TILE), tiles = (int)((t->n_q + TILE - 1) / TILE);
    float key = 0.0f;
    for (int i = ptx_thread_id() % 32; i < tiles; i += 32) key = fmaxf(key, norms[i - tile].y);
    return !(norms->x * fa_warp_max(key) * fabsf(p->scale) <= find_most_bound((int)p->d));
}

/* The block's task of a round. Every second round is reversed: under a causal mask tasks become
 * shorter along a head, so blocks that had long tasks then have short ones. */
FA_DEVICE int64_t find_round_task(int64_t round)
{
    const int64_t blocks = gridDim.x, block = blockIdx.x;
    return round * blocks + (round % 2 ? blocks - 1 - block : block);
}

/* Copies the rows of the warp's tiles to shared memory; two rows of each go to the lane's own
 * place. All copies are issued before the first is waited for. */
FA_DEVICE void issue_looks(const fa_attention_params *p, const fa_backward_sm80_params *s,
                           uint32_t to, int64_t round)
{
    const float2 *rows = (const float2 *)(const void *)s->rows + 2 * (ptx_thread_id() % 32);
#pragma unroll 1
    for (int i = ptx_thread_id() / 32; i < LOOKS; i += WARPS) {
        const int64_t task = find_round_task(round + i);
        if (task < p->tasks)
            ptx_cp_async_16(to + LOOK_BYTES * (uint32_t)i, rows + find_own_tile(s, task) * TILE,
                            true);
    }
}

/* Finds the warp's tiles with large scores. The others get factors of 1. from: the lane's place. */
FA_DEVICE uint32_t look_at_rows(const fa_attention_params *p, const fa_backward_sm80_params *s,
                                uint32_t from, int64_t round)
{
    const int row = 2 * (ptx_thread_id() % 32);
    uint32_t large = 0;
#pragma unroll 1
    for (int i = ptx_thread_id() / 32; i < LOOKS; i += WARPS) {
        const int64_t task = find_round_task(round + i);
        if (task >= p->tasks) continue;
        const fa_tile t = fa_find_tile(p, task, TILE);
        const uint4 two = ptx_ld_shared_v4(from + LOOK_BYTES * (uint32_t)i);
        const int64_t number = find_own_tile(s, task);
        const bool own = has_large_scores(p, &t, t.first + row, fa_bits_float(two.x)) ||
                         has_large_scores(p, &t, t.first + row + 1, fa_bits_float(two.z));
        if (__any_sync(0xffffffffu, own) || (t.first < t.n_q && has_large_bound(p, s, &t, number)))
            large |= 1u << i;
        else *(float2 *)(void *)(s->factors + number * TILE + row) = make_float2(1.0f, 1.0f);
    }
    return large;
}

/* Finds the tasks of LOOKS rounds that have large scores, a bit for each. */
FA_DEVICE uint32_t find_large_tasks(const fa_attention_params *p, const fa_backward_sm80_params *s,
                                    uint32_t memory, int64_t round, uint32_t *shared)
{
    const int thread = ptx_thread_id();
    const uint32_t own = memory + (uint32_t)(thread % 32) * 16;
    __syncthreads(); /* all threads have finished the previous rounds */
    issue_looks(p, s, own, round);
    ptx_cp_async_wait_all();
    uint32_t large = look_at_rows(p, s, own, round);
    if (thread % 32 == 0) shared[thread / 32] = large;
    __syncthreads();
    large = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) large |= shared[i];
    return large;
}

/* ---- A tile of queries ----------------------------------------------------------------------- */

/* The part's queries, and the key tiles that they see. */
FA_DEVICE void describe_part(const fa_attention_params *p, tile_work *w, int part)
{
    const fa_tile *t = &w->queries;
    const int64_t first = t->first + part * QUERIES, end = fa_min64(first + QUERIES, t->n_q);
    w->first = (int32_t)first;
    w->from = w->to = 0;
    if (first >= end) return;
    w->from = (int32_t)(fa_tile_visible(p, t, first).lo / KEYS);
    w->to = (int32_t)((fa_tile_visible(p, t, end - 1).hi + KEYS - 1) / KEYS);
}

/* Describes key tile 0. Later tiles differ by their first key (move_keys). */
FA_DEVICE void describe_keys(const fa_attention_params *p, const fa_backward_sm80_params *s,
                             tile_work *w)
{
    block_work *k = &w->keys[0];
    k->sequence = w->keys[1].sequence = w->queries;
    k->keys.first = 0;
    k->heads = 1;
    find_queries(p, &s->uniform, k);
    w->first_query = k->first_query, w->end_query = k->end_query;
    w->seen_key_from = k->seen_key_from, w->seen_key_to = k->seen_key_to;
    w->seen_query_from = k->seen_query_from, w->seen_query_to = k->seen_query_to;
}

FA_DEVICE void describe_tile(const fa_attention_params *p, const fa_backward_sm80_params *s,
                             tile_work *w, int64_t task, int part)
{
    w->queries = fa_find_tile(p, task, TILE);
    w->number = find_own_tile(s, task);
    describe_part(p, w, part);
    if (w->from < w->to) describe_keys(p, s, w);
}

/* Changes a description that is no longer used to that of another key tile. */
FA_DEVICE void move_keys(tile_work *w, int key_tile)
{
    block_work *k = &w->keys[key_tile & 1];
    const int first = key_tile * KEYS;
    if (threadIdx.x == 0) {
        k->keys.first = first;
        k->num_keys = min((int)w->queries.n_k - first, KEYS);
        k->first_query = w->first_query + first;
        k->end_query = w->end_query + first;
    }
#if OPTIONS
    if (threadIdx.x < KEYS) k->bad_keys[threadIdx.x] = 0;
#endif
}

FA_DEVICE uint32_t keys_offset(int key_tile) { return key_tile & 1 ? V_AT - K_AT : 0; }

FA_DEVICE void issue_key_tile(const fa_attention_params *p, uint32_t memory, const tile_work *w,
                              int key_tile)
{
    const fa_tile *t = &w->queries;
    const int first = key_tile * KEYS;
    const row_source from = source_of(&p->k, t->block_k, t->start_k + first, t->head_kv, p->d,
                                      w->seen_key_from - first, w->seen_key_to - first);
    issue_rows(&from, KEYS, memory + K_AT + keys_offset(key_tile));
}

/* Where log-sum-exps and deltas of the part's queries are. */
FA_DEVICE const float2 *find_rows(const fa_backward_sm80_params *s, const tile_work *w, int part)
{
    return (const float2 *)(const void *)s->rows + w->number * TILE + part * QUERIES;
}

FA_DEVICE void issue_queries(const fa_attention_params *p, const fa_backward_sm80_params *s,
                             uint32_t memory, const tile_work *w, int part)
{
    const fa_tile *t = &w->queries;
    const int thread = ptx_thread_id();
    row_source from = source_of(&p->q, t->block_q, t->start_q + w->first, t->head, p->d,
                                w->seen_query_from - w->first, w->seen_query_to - w->first);
    take_parts(&from,
               s->parts + w->number * 2 * FA_BACKWARD_SM80_PART_BYTES(HEAD_DIM) + part * Q_BYTES);
    issue_rows(&from, QUERIES, q_at(memory, 0));
    issue_powers(memory + OWN_POWERS_AT + QUERY_POWERS,
                 s->powers + w->number * TILE + part * QUERIES);
    if (thread < QUERIES / 2)
        ptx_cp_async_16(memory + OWN_ROWS_AT + (uint32_t)thread * 16,
                        find_rows(s, w, part) + 2 * thread, true);
}

/* ---- Weights and their sums ------------------------------------------------------------------ */

/* Sums in the order of backward_sm80. part: addresses of powers; columns: the number that
 * exists. */
FA_DEVICE void find_scores(fa_scores *s, const tile_part *part, uint32_t keys, uint32_t queries,
                           int columns)
{
#if SLICES
    clear_scores(s);
#pragma unroll 1
    for (int slice = 0; slice < SLICES; slice++) {
        fa_scores part;
        make_slice(&part, keys, queries, find_slice(slice, columns),
                   find_slice(slice + 1, columns));
#pragma unroll
        for (int i = 0; i < M_TILES * N_TILES * 4; i++)
            s->at[i / 4 / N_TILES][i / 4 % N_TILES][i % 4] +=
                part.at[i / 4 / N_TILES][i / 4 % N_TILES][i % 4];
    }
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
        const query_powers query = load_query_powers(part->query_powers + 64 * (uint32_t)n);
#pragma unroll
        for (int i = 0; i < M_TILES * 4; i++) {
            const key_powers key = load_key_powers(part->key_powers + 128 * (uint32_t)(i / 4));
            s->at[i / 4][n][i % 4] *= key.key[i / 2 % 2];
            s->at[i / 4][n][i % 4] *= query.query[i % 2];
        }
    }
#else
    (void)columns;
    make_scores(s, keys, queries);
    scale_scores(s, part, SCORES);
#endif
}

/* What a thread reads of a key tile from global memory: before the tile is split, which takes place meanwhile. */
typedef struct read_ahead {
#if OPTIONS
    tile_options options;
    tile_bias bias;
#else
    char nothing;
#endif
} read_ahead;

/* The warp's part of a key tile. */
FA_DEVICE tile_part find_own_part(const tile_work *w, uint32_t memory)
{
    const tile_cursor at = {0, 0, w->first / QUERIES};
    tile_part part = find_part(memory, &at, 0);
    part.rows = memory + OWN_ROWS_AT + 8 * (uint32_t)(part.query - w->first);
    part.key_powers = memory + OWN_POWERS_AT + KEY_POWERS + 8 * (uint32_t)part.key;
    part.query_powers =
        memory + OWN_POWERS_AT + QUERY_POWERS + 8 * (uint32_t)(part.query - w->first);
    return part;
}

FA_DEVICE void read_options(const fa_attention_params *p, const tile_work *w, uint32_t memory,
                            int key_tile, read_ahead *ahead)
{
#if OPTIONS
    const block_work *k = &w->keys[key_tile & 1];
    const tile_part part = find_own_part(w, memory);
    tile_options *o = &ahead->options;
    o->keeps = ~0u;
    o->query = part.query, o->key = part.key;
    o->head = (int)k->sequence.head;
    o->sees = find_seen(k, o->query, o->key);
    if (p->mask.data && p->bias.data) o->sees = read_mask(&p->mask, k, o);
    load_bias(&ahead->bias, p, k, o);
#else
    (void)p, (void)w, (void)memory, (void)key_tile, (void)ahead;
#endif
}

/* Replaces scores by weights, as in backward_sm80. */
FA_DEVICE void make_weights(const fa_attention_params *p, const block_work *k,
                            const tile_part *part, const read_ahead *ahead, int tile, float scale,
                            fa_scores *s)
{
#if OPTIONS
    tile_options seen = ahead->options;
    const tile_options *o = &seen;
    apply_loaded_mask(p, &ahead->bias, &seen);
#pragma unroll
    for (int i = 0; i < M_TILES * N_TILES / GROUP; i++) {
        const int m = i / (N_TILES / GROUP), n = i % (N_TILES / GROUP) * GROUP;
        const score_group g = {&s->at[m][n], m, n};
        float slopes[GROUP][4];
        make_logits(p, k, o, &ahead->bias, &g, slopes, scale);
#pragma unroll
        for (int e = 0; e < 4 * GROUP; e++) {
            const query_pair pair = load_pair(part->rows, n + e / 4);
            const uint32_t bit = BIT(n + e / 4, m, e / 2 % 2, e % 2);
            g.s[e / 4][e % 4] =
                weigh_score(g.s[e / 4][e % 4], (o->sees & bit) != 0, pair.lse[e % 2]);
        }
    }
    (void)tile;
#else
    (void)p, (void)ahead;
    weigh(s, scale, part->rows);
    if (is_masked(k, part->key / GROUP_ROWS * GROUP_ROWS, tile))
        mask_weights(k, s, part->query, part->key);
#endif
}

FA_DEVICE void clear_row_sums(row_sums *sums)
{
#pragma unroll
    for (int i = 0; i < 2 * N_TILES; i++)
        sums->at[i / 2][i % 2].sum = sums->at[i / 2][i % 2].rest = 0.0f;
}

/* Adds the lane's weights of a key tile. */
FA_DEVICE void add_weights(row_sums *sums, const fa_scores *weights)
{
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = 0.0f;
#pragma unroll
            for (int mr = 0; mr < 2 * M_TILES; mr++) sum += weights->at[mr / 2][n][mr % 2 * 2 + i];
            fa_add_exactly(&sums->at[n][i].sum, &sums->at[n][i].rest, sum);
        }
}

FA_DEVICE void sum_key_tile(const fa_attention_params *p, const tile_work *w, uint32_t memory,
                            int key_tile, const read_ahead *ahead, float scale, row_sums *sums)
{
    const tile_part part = find_own_part(w, memory);
    fa_scores s;
    find_scores(&s, &part, part.keys + keys_offset(key_tile), part.queries, p->d);
    make_weights(p, &w->keys[key_tile & 1], &part, ahead, w->first / QUERIES, scale, &s);
    add_weights(sums, &s);
}

/* Adds up the sums of lanes that have other keys of the same queries, and stores the sums of the
 * warp's group. */
FA_DEVICE void store_row_sums(row_sums *sums, uint32_t memory)
{
    const fa_layout layout = find_layout(memory), *l = &layout;
    const int first = l->group * QUERIES + l->share * OWN_QUERIES + l->lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            exact_sum *x = &sums->at[n][i];
#pragma unroll
            for (int other = 4; other < 32; other *= 2) {
                const float sum = __shfl_xor_sync(0xffffffffu, x->sum, other);
                const float rest = __shfl_xor_sync(0xffffffffu, x->rest, other);
                fa_add_exactly(&x->sum, &x->rest, sum);
                x->rest += rest;
            }
            const uint32_t to = memory + SUMS_AT + 8 * (uint32_t)(first + 8 * n + i);
            if (l->lane >= 4) continue;
            ptx_st_shared_f32(to, x->sum);
            ptx_st_shared_f32(to + 4, x->rest);
        }
}

/* ---- Factors --------------------------------------------------------------------------------- */

/* lse: in units of log 2. */
FA_DEVICE float find_factor(float sum, float lse)
{
    const float most = fminf(fmaxf(fabsf(lse), 1.0f) * MOST_ROUNDING, 0x1p-6f);
    return fabsf(sum - 1.0f) <= most ? 1.0f / sum : 1.0f;
}

/* The sum of a row's weights. */
FA_DEVICE float find_sum(const fa_attention_params *p, const tile_work *w, uint32_t memory, int row,
                         float lse)
{
    exact_sum x = {0.0f, 0.0f};
    if (p->sinks) x.sum = ptx_ex2(fmaf(p->sinks[w->queries.head], FA_LOG2E, -lse));
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        const float2 y =
            ptx_ld_shared_f32x2(memory + SUMS_AT + 8 * (uint32_t)(group * QUERIES + row));
        fa_add_exactly(&x.sum, &x.rest, y.x);
        x.rest += y.y;
    }
    return x.sum + x.rest;
}

FA_DEVICE void store_factors(const fa_attention_params *p, const fa_backward_sm80_params *s,
                             const tile_work *w, uint32_t memory, int part)
{
    const int row = ptx_thread_id();
    if (row >= QUERIES) return;
    const float lse = find_rows(s, w, part)[row].x;
    s->factors[w->number * TILE + part * QUERIES + row] =
        find_factor(find_sum(p, w, memory, row, lse), lse);
}

/* ---- A block --------------------------------------------------------------------------------- */

/* Splits keys whose copies have arrived. All threads synchronize twice. */
FA_DEVICE void split_key_tile(const fa_attention_params *p, uint32_t memory, int key_tile)
{
    const uint32_t inverses = memory + OWN_POWERS_AT + KEY_POWERS;
    const uint32_t at = memory + K_AT + keys_offset(key_tile);
    find_row_powers(inverses, at, KEYS);
    __syncthreads();
    split_rows(inverses, at, KEYS, p->d);
    __syncthreads();
}

/* All threads have synchronized since the last use of keys[0]. */
FA_DEVICE void sum_part(const fa_attention_params *p, const fa_backward_sm80_params *s,
                        tile_work *w, uint32_t memory, int part, float scale)
{
    row_sums sums;
    clear_row_sums(&sums);
    if (w->from < w->to) {
        issue_queries(p, s, memory, w, part);
        issue_key_tile(p, memory, w, w->from);
        move_keys(w, w->from);
    }
#pragma unroll 1
    for (int tile = w->from; tile < w->to; tile++) {
        ptx_cp_async_wait_all();
        __syncthreads(); /* this tile's copies have arrived, and the previous tile is finished */
        if (tile + 1 < w->to) {
            issue_key_tile(p, memory, w, tile + 1);
            move_keys(w, tile + 1);
        }
        read_ahead ahead;
        read_options(p, w, memory, tile, &ahead);
#if OPTIONS
        if (p->mask.data || p->bias.data) {
            clear_bad_keys(memory + keys_offset(tile), &w->keys[tile & 1]);
            __syncthreads();
        }
#endif
        split_key_tile(p, memory, tile);
        sum_key_tile(p, w, memory, tile, &ahead, scale, &sums);
    }
    store_row_sums(&sums, memory);
}

FA_DEVICE void correct_tile(const fa_attention_params *p, const fa_backward_sm80_params *s,
                            tile_work *w, uint32_t memory, int64_t task)
{
#pragma unroll 1
    for (int part = 0; part < PARTS; part++) {
        __syncthreads(); /* all threads have finished the previous part */
        if (threadIdx.x == 0) describe_tile(p, s, w, task, part);
        __syncthreads();
        sum_part(p, s, w, memory, part, inner_scale(p));
        __syncthreads();
        store_factors(p, s, w, memory, part);
    }
}

FA_KERNEL __launch_bounds__(THREADS, BLOCKS)
    backward_sm80_weight_sums(const __grid_constant__ fa_backward_params p,
                              const __grid_constant__ fa_backward_sm80_params s)
{
    FA_DYNAMIC_SHARED(raw);
    __shared__ tile_work work;
    __shared__ uint32_t large_tasks[WARPS];
    const uint32_t memory = fa_opaque(find_memory(raw));
#pragma unroll 1
    for (int64_t round = 0; round * gridDim.x < p.a.tasks; round += LOOKS) {
        uint32_t large = find_large_tasks(&p.a, &s, memory, round, large_tasks);
#pragma unroll 1
        for (int i = 0; large; i++, large >>= 1)
            if (large & 1) correct_tile(&p.a, &s, &work, memory, find_round_task(round + i));
    }
}
