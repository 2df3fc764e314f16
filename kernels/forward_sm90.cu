/*
 * Attention forward on Hopper's tensor cores: float16 and bfloat16, float32 sums.
 *
 * One block a multiprocessor stays and takes piece after piece of the work: QUERIES queries of a head
 * and the tiles of keys that they see. One warp loads: queries, keys and values come by the copy engine
 * (TMA), keys and values into two stages each. The consumers are warpgroups of 64 queries, each of
 * which goes round
 *
 *     ask for S = Q K^T of tile t + 1 and for out += P V of tile t, wait, softmax of tile t + 1,
 *
 * also from the last tile of a piece to the first one of the next. The consumers take turns at asking,
 * so that the tensor cores work for one while another is in its softmax (FlashAttention-3, section
 * 3.1, arXiv:2407.08608).
 *
 * Softmax without maxima: a row's weights are 2^(x - base), where base is the maximum of the first tile
 * that the row sees. Later tiles need no maximum and no rescaling as long as their weights stay below a
 * bound, which their sum tells (all is exact: the final division takes the base out again, and floating
 * point does not care by which power of two everything is larger). Where a sum passes the bound, the
 * warp does the tile again with maxima, as the online softmax does (FlashAttention-2, section 3.1,
 * arXiv:2307.08691).
 *
 * Sums of weights are 88 additions of 316 instructions of a softmax; the tensor cores can do them on the
 * side, as products with a block of ones behind the values (SUMS). They then are sums of rounded weights:
 * right for the division, for out is the sum of the same weights, but not for a log-sum-exp to 1e-3.
 *
 * Compiled with SHAPE (see forward_sm90.h), BFLOAT16 (1 or 0), GENERAL (1: with the options that change
 * scores and weights; 0: masks by position and lengths alone), SUMS (1: as said above), OVERLAP (1: with the
 * consumer of forward_sm90_overlap.cuh; 0, the default: with the one here).
 */
#ifndef OVERLAP
#define OVERLAP 0
#endif

#include "common/hopper.cuh"
#include "forward_sm90.h"

#define HEAD_DIM FA_SM90_DIM(SHAPE)
#define VALUE_DIM FA_SM90_DIM_V(SHAPE)
#define CONSUMERS FA_SM90_CONSUMERS(SHAPE)
#define KEYS FA_SM90_KEYS(SHAPE)

#define FRAGMENT_KEYS KEYS
#include "common/fragment.cuh"

/* Columns of the products with values, and the accumulators of a thread: sums stand behind the outputs,
 * eight columns of the same. */
#if !SUMS
#define PV_COLUMNS VALUE_DIM
#elif FA_SM90_DIM_V(SHAPE) == 64
#define PV_COLUMNS 72
#else
#define PV_COLUMNS 136
#endif
#define OUTPUTS (PV_COLUMNS / 2)

/* A 16-bit bias comes by the copy engine, if it lies so that it can. */
#define BIAS_STAGED (GENERAL && OVERLAP)

/* Results go out by way of shared memory. */
#define STAGED (FA_SM90_STAGING(SHAPE) > 0 && VALUE_DIM % 64 == 0)

enum {
    WARPGROUP = 128,
    WARPS = WARPGROUP / 32,
    THREADS = FA_SM90_THREADS(SHAPE),
    QUERIES = FA_SM90_QUERIES(SHAPE),
    ROWS = 64, /* queries of a consumer */
    STAGES = FA_SM90_STAGES,
    K_BLOCKS = FA_SM90_ROW_BYTES(HEAD_DIM) / 128, /* of 64 columns: the swizzle spans 128 bytes */
    V_BLOCKS = FA_SM90_ROW_BYTES(VALUE_DIM) / 128,
    Q_BLOCK = ROWS * 128, /* bytes of one block of columns of a consumer's queries */
    KV_BLOCK = KEYS * 128,
    Q_BYTES = K_BLOCKS * Q_BLOCK,
    K_BYTES = K_BLOCKS * KV_BLOCK,
    V_BYTES = V_BLOCKS * KV_BLOCK,
    V_STAGE = V_BYTES + SUMS * KV_BLOCK, /* with its block of ones */
    BIAS_BLOCK = ROWS * 128,             /* 64 columns of the bias of a consumer's tile */
    BIAS_BYTES = KEYS / 64 * BIAS_BLOCK,
    GROUP = 8 * 128, /* eight rows: what the swizzle repeats after */
    SLOTS = 4        /* pieces described: see produce */
};

/* Registers of a thread that loads and of one that computes. */
#if CONSUMERS == 3
#define PRODUCER_REGISTERS 32
#define CONSUMER_REGISTERS 160
#else
#define PRODUCER_REGISTERS 40
#define CONSUMER_REGISTERS 232
#endif

/* The bound of a thread's sum of weights in a tile: float16 ends at 2^16. With SUMS weights stay below 2,
 * which one bit of a 16-bit float tells. */
#define SUM_BOUND 32768.0f
#define TWO_BITS 0x40004000u /* of a pair */
#define TWO_BIT 0x40000000u  /* of a float */

/* The largest weight of a row is 2 to this when its base is found. Float16 loses what is small; with SUMS
 * there must be room to grow. */
#if SUMS
#define HEADROOM (BFLOAT16 ? -6.0f : -3.0f)
#else
#define HEADROOM (BFLOAT16 ? 0.0f : 8.0f)
#endif

/* A piece of work as the consumers see it. Its query i may see the keys [lo + i, hi + i), as far as they
 * are in [0, n_k), all counted from start on. */
typedef struct piece {
    fa_tile tile;
    int32_t start, tiles; /* its tiles of keys: so many, from this key on; 0: no piece is left */
    int32_t
        mine[CONSUMERS]; /* how many of them a consumer needs, for it may end early under a causal
                              * mask; 0: its rows see nothing, or are none */
    int32_t lo, hi, n_k;
} piece;

/* What the warps share. */
typedef struct shared_state {
    piece pieces[SLOTS];
    uint64_t q_full[CONSUMERS], q_empty[CONSUMERS];
    uint64_t k_full[STAGES], v_full[STAGES], k_empty[STAGES], v_empty[STAGES];
    uint64_t v_raw; /* for values that are cleaned before consumers may see them */
#if BIAS_STAGED
    uint64_t bias_full[CONSUMERS], bias_empty[CONSUMERS];
#endif
} shared_state;

typedef struct pipeline {
    char *q, *k, *v; /* CONSUMERS tiles of q, STAGES tiles of k and of v */
    char *staging;   /* ROWS rows of 128 bytes for each consumer, if there is room */
#if BIAS_STAGED
    char *bias; /* a tile of it for each consumer */
#endif
    shared_state *state;
} pipeline;

/* Stages are used in turn, through all pieces: the count of tiles so far tells stage and parity. */
#if OVERLAP
typedef uint32_t tile_count;
#else
typedef int tile_count;
#endif
FA_DEVICE int stage_of(tile_count count) { return (int)(count % STAGES); }
FA_DEVICE int parity_of(tile_count count) { return (int)(count / STAGES & 1); }

/* Lets the compiler know that a value is the same in all lanes. */
FA_DEVICE int same_for_warp(int x) { return __shfl_sync(0xffffffff, x, 0); }

/* ---- The warp that loads ----------------------------------------------------------------------- */

/* Far beyond any key, and small enough to add to. */
enum { FAR = 1 << 30 };

FA_DEVICE int32_t near(int64_t x) { return (int32_t)fa_max64(-FAR, fa_min64(x, FAR)); }

/* Of a piece's tiles, those from the first to the last one that a consumer's queries may see. */
FA_DEVICE int32_t count_tiles(const fa_attention_params *p, const piece *w, int consumer)
{
    const fa_tile *t = &w->tile;
    const int64_t first = t->first + consumer * ROWS, last = fa_min64(first + ROWS, t->n_q) - 1;
    if (first > last) return 0;
    const int64_t lo = fa_tile_visible(p, t, first).lo, hi = fa_tile_visible(p, t, last).hi;
    return lo < hi ? (int32_t)((hi - w->start + KEYS - 1) / KEYS) : 0;
}

/* The tiles of keys that a piece's queries may see: at least one, which may be masked as a whole. */
FA_DEVICE void find_keys(const fa_attention_params *p, piece *w)
{
    const fa_tile *t = &w->tile;
    const int64_t last = fa_min64(t->first + QUERIES, t->n_q) - 1, center = t->first + t->diagonal;
    int64_t right = p->causal ? 0 : FAR; /* how far a query sees beyond its own place */
    w->start = 0;
    w->tiles = 1;
    if (t->first <= last) {
        const int64_t lo = fa_tile_visible(p, t, t->first).lo, hi = fa_tile_visible(p, t, last).hi;
        if (lo < hi) {
            w->start = (int32_t)(lo / FA_SM90_ALIGN * FA_SM90_ALIGN);
            w->tiles = (int32_t)((hi - w->start + KEYS - 1) / KEYS);
        }
    }
    if (p->window_right >= 0) right = fa_min64(right, p->window_right);
    w->n_k = (int32_t)(t->n_k - w->start);
    for (int c = 0; c < CONSUMERS; c++) w->mine[c] = count_tiles(p, w, c);
    w->hi = right == FAR ? FAR : near(center + right + 1 - w->start);
    w->lo = p->window_left < 0 ? -FAR : near(center - p->window_left - w->start);
}

/* Piece `half` (0 or 1) of a task: its only one, or, in pairs, first the longer one. */
FA_DEVICE bool find_piece(const fa_attention_params *p, const fa_sm90_params *s, int64_t task,
                          int half, piece *w)
{
    if (s->pairs) {
        const int64_t pairs = (p->tiles + 1) / 2, outer = task / pairs, i = task % pairs;
        if (half == 1 && p->tiles - 1 - i == i) return false;
        task = outer * p->tiles + (half == 0 ? i : p->tiles - 1 - i);
    } else if (half == 1) return false;
    w->tile = fa_find_tile(p, task, QUERIES);
    if (w->tile.first >= w->tile.room_q) return false; /* a place without rows */
    find_keys(p, w);
    return true;
}

/* The block's walk through the pieces. */
typedef struct walk {
    int64_t task;
    int half;
} walk;

FA_DEVICE void find_next(const fa_attention_params *p, const fa_sm90_params *s, walk *at, piece *w)
{
    bool found = false;
    while (!found && at->task < s->tasks) {
        found = find_piece(p, s, at->task, at->half, w);
        at->half ^= 1;
        if (at->half == 0) at->task += gridDim.x;
    }
    if (found) return;
    w->tiles = 0;
    for (int c = 0; c < CONSUMERS; c++) w->mine[c] = 0;
}

FA_DEVICE void load_queries(const pipeline *pipe, const fa_sm90_params *s, const fa_tile *t,
                            int consumer)
{
    uint64_t *barrier = &pipe->state->q_full[consumer];
    const int row = (int)(t->start_q + t->first) + consumer * ROWS;
    barrier_expect(barrier, Q_BYTES);
#pragma unroll
    for (int block = 0; block < K_BLOCKS; block++)
        tma_load_4d(pipe->q + consumer * Q_BYTES + block * Q_BLOCK, &s->q, barrier, 64 * block, row,
                    (int)t->head * s->q_step.head, (int)t->block_q * s->q_step.block);
}

/* A tile of keys or values, from key `key` on: at once, or page by page. */
FA_DEVICE void load_keys(char *shared, const fa_sm90_map *map, const fa_sm90_steps *step,
                         uint64_t *barrier, int blocks, const fa_attention_params *p,
                         const fa_sm90_params *s, const fa_tile *t, int key)
{
    barrier_expect(barrier, blocks * KV_BLOCK);
    for (int at = 0; at < KEYS; at += s->box_rows) {
        int row = (int)t->start_k + key + at, outer = (int)t->block_k;
        if (p->block_table) {
            /* What lies behind the last page is not read; any page will do for it. */
            const int64_t j =
                fa_min64(key + at, fa_max64(t->n_k - 1, 0)) / s->box_rows * s->box_rows;
            const int64_t page = (uint32_t)j / (uint32_t)p->rows_k;
            row = (int)((uint32_t)j % (uint32_t)p->rows_k);
            outer = t->n_k ? p->block_table[t->batch * p->block_table_stride + page] : 0;
        }
        for (int block = 0; block < blocks; block++)
            tma_load_4d(shared + block * KV_BLOCK + at * 128, map, barrier, 64 * block, row,
                        (int)t->head_kv * step->head, outer * step->block);
    }
}

/* Rows of values outside [from, to) that the copy engine has read all the same, though no query of the
 * sequence may see them: they may hold NaN, and 0 * NaN is NaN. The whole warp. */
FA_DEVICE void clean_values(char *shared, int64_t from, int64_t to)
{
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int block = 0; block < V_BLOCKS; block++)
#pragma unroll 1
        for (int at = lane * 16; at < KV_BLOCK; at += 32 * 16)
            if (at / 128 < from || at / 128 >= to)
                *(float4 *)(shared + block * KV_BLOCK + at) = make_float4(0, 0, 0, 0);
    async_proxy_fence();
    __syncwarp();
}

/* The keys that some query of the sequence may see. */
FA_DEVICE fa_range seen_keys(const fa_attention_params *p, const fa_tile *t)
{
    fa_range seen = fa_tile_visible(p, t, fa_max64(t->n_q - 1, 0));
    seen.lo = fa_tile_visible(p, t, 0).lo;
    return seen;
}

/* Whether a tile of values holds rows that no query may see; behind the tensor's end are zeros. */
FA_DEVICE bool needs_cleaning(const fa_attention_params *p, const fa_tile *t, const fa_range *seen,
                              int key)
{
    const bool zeros_behind = !p->block_table && t->start_k + seen->hi == p->rows_k;
    return key < seen->lo || (key + KEYS > seen->hi && !zeros_behind);
}

FA_DEVICE void load_values(const pipeline *pipe, const fa_attention_params *p,
                           const fa_sm90_params *s, const fa_tile *t, int key, int stage,
                           int *cleaned)
{
    char *shared = pipe->v + stage * V_STAGE;
    uint64_t *full = &pipe->state->v_full[stage];
    const bool leader = threadIdx.x == 0;
    const fa_range seen = seen_keys(p, t);
    if (!needs_cleaning(p, t, &seen, key)) {
        if (leader) load_keys(shared, &s->v, &s->v_step, full, V_BLOCKS, p, s, t, key);
        return;
    }
    uint64_t *raw = &pipe->state->v_raw;
    if (leader) load_keys(shared, &s->v, &s->v_step, raw, V_BLOCKS, p, s, t, key);
    barrier_wait(raw, *cleaned & 1);
    *cleaned += 1;
    clean_values(shared, seen.lo - key, seen.hi - key);
    if (leader) barrier_arrive(full);
}

/* Hands a piece over to a consumer, and asks for its queries. Their place's first use finds it empty,
 * hence the parities that start at 1. */
FA_DEVICE void hand_over(const pipeline *pipe, const fa_sm90_params *s, const piece *w,
                         int consumer, int number)
{
    barrier_wait(&pipe->state->q_empty[consumer], (number & 1) ^ 1);
    if (threadIdx.x != 0) return;
    if (w->tiles) load_queries(pipe, s, &w->tile, consumer);
    else barrier_arrive(&pipe->state->q_full[consumer]);
}

#if BIAS_STAGED

/* The bias of a tile, for a consumer that needs the tile. loaded: how many it was given so far. */
FA_DEVICE void load_bias(const pipeline *pipe, const fa_sm90_params *s, const piece *w, int tile,
                         int consumer, int *loaded)
{
    uint64_t *full = &pipe->state->bias_full[consumer];
    const int row = (int)w->tile.first + consumer * ROWS, key = w->start + tile * KEYS;
    if (!s->bias_mapped || tile >= w->mine[consumer]) return;
    barrier_wait(&pipe->state->bias_empty[consumer], (*loaded & 1) ^ 1);
    *loaded += 1;
    if (threadIdx.x != 0) return;
    barrier_expect(full, BIAS_BYTES);
#pragma unroll
    for (int block = 0; block < KEYS / 64; block++)
        tma_load_4d(pipe->bias + consumer * BIAS_BYTES + block * BIAS_BLOCK, &s->bias, full,
                    key + 64 * block, row, (int)w->tile.head * s->bias_step.head,
                    (int)w->tile.batch * s->bias_step.block);
}

#endif

/* What the loading warp counts, besides tiles. */
typedef struct loads {
    int cleaned; /* tiles of values that were cleaned */
#if BIAS_STAGED
    int biases[CONSUMERS];
#endif
} loads;

FA_DEVICE void load_tile(const pipeline *pipe, const fa_attention_params *p,
                         const fa_sm90_params *s, const piece *w, int number, int tile, int count,
                         loads *so_far)
{
    const int stage = stage_of(count), parity = parity_of(count) ^ 1, key = w->start + tile * KEYS;
    __syncwarp(); /* no lane comes two phases late to a barrier */
    barrier_wait(&pipe->state->k_empty[stage], parity);
    if (threadIdx.x == 0)
        load_keys(pipe->k + stage * K_BYTES, &s->k, &s->k_step, &pipe->state->k_full[stage],
                  K_BLOCKS, p, s, &w->tile, key);
    for (int c = 0; c < CONSUMERS && tile == 0; c++) hand_over(pipe, s, w, c, number);
#if BIAS_STAGED
#pragma unroll
    for (int c = 0; c < CONSUMERS; c++) load_bias(pipe, s, w, tile, c, &so_far->biases[c]);
#endif
    barrier_wait(&pipe->state->v_empty[stage], parity);
    load_values(pipe, p, s, &w->tile, key, stage, &so_far->cleaned);
}

/* Describes piece `number` in its slot, by one thread; the others see it then. */
FA_DEVICE const piece *describe(const pipeline *pipe, const fa_attention_params *p,
                                const fa_sm90_params *s, walk *at, int number)
{
    piece *w = &pipe->state->pieces[number % SLOTS];
    if (threadIdx.x == 0) find_next(p, s, at, w);
    __syncwarp();
    return w;
}

/* The next piece is described early, so that its loads can follow at once. A consumer that has given
 * back the queries of a piece has done with the slot of the piece two before; a piece is described when
 * the one before has been handed over, for which the queries of the one before that were given back. */
FA_DEVICE void produce(const pipeline *pipe, const fa_attention_params *p, const fa_sm90_params *s)
{
    int number = 0, count = 0;
    loads so_far = {0};
    walk at = {blockIdx.x, 0};
    const piece *w = describe(pipe, p, s, &at, 0), *next = w;
    for (; w->tiles; w = next, number++)
        for (int tile = 0; tile < w->tiles; tile++, count++) {
            load_tile(pipe, p, s, w, number, tile, count, &so_far);
            if (tile == 0) next = describe(pipe, p, s, &at, number + 1);
        }
    for (int c = 0; c < CONSUMERS; c++) hand_over(pipe, s, w, c, number);
}

/* ---- A consumer -------------------------------------------------------------------------------- */

/* The consumers' turns at asking for products: barrier 1 + c is consumer c's. */
FA_DEVICE void wait_for_turn(int consumer)
{
#ifndef NO_TURNS
    named_barrier_sync(1 + consumer, 2 * WARPGROUP);
#endif
}

FA_DEVICE void pass_turn(int consumer)
{
#ifndef NO_TURNS
    named_barrier_arrive(1 + (consumer + 1) % CONSUMERS, 2 * WARPGROUP);
#endif
}

/* Asks for s = Q K^T, 64 x KEYS. The statement without instructions hides that q is the same for every
 * tile: the compiler would keep one descriptor a step in registers that it does not have. */
FA_DEVICE void multiply_qk(float *s, uint32_t q, uint32_t k)
{
    asm volatile("" : "+r"(q));
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++) {
        const int block = step / 4, byte = step % 4 * 32;
        WGMMA(qk, KEYS)
        (s, matrix_at(q + (block * Q_BLOCK + byte) / 16),
         matrix_at(k + (block * KV_BLOCK + byte) / 16), step > 0);
    }
    wgmma_commit();
}

/* Asks for out = P V, or out += P V. */
FA_DEVICE void multiply_pv(float *out, const uint32_t *p, uint32_t v, int add)
{
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) WGMMA(pv, PV_COLUMNS)
    (out, p + 4 * step, matrix_at(v + step * 16 * 128 / 16), step > 0 || add);
    wgmma_commit();
}

/* Where they lie. */
FA_DEVICE uint32_t q_place(const pipeline *pipe, int consumer)
{
    return matrix_place(pipe->q + consumer * Q_BYTES, 0);
}

FA_DEVICE uint32_t k_place(const pipeline *pipe, tile_count count)
{
    return matrix_place(pipe->k + stage_of(count) * K_BYTES, 0);
}

FA_DEVICE uint32_t v_place(const pipeline *pipe, tile_count count)
{
    return matrix_place(pipe->v + stage_of(count) * V_STAGE, KV_BLOCK);
}

/* A consumer's place in a piece. */
typedef struct place {
    int full_lo, full_hi; /* keys that all its rows may see, from the piece's first tile on */
    float scale;          /* to exponents of 2 */
#if GENERAL && OVERLAP
    float inner; /* what scores are multiplied by, before their tanh or alone */
#endif
} place;

/* Rows r of a thread, of a piece's queries. */
FA_DEVICE int row_of(int consumer, int r)
{
    return consumer * ROWS + (int)threadIdx.x % WARPGROUP / 32 * 16 + (int)threadIdx.x % 32 / 4 +
           8 * r;
}

FA_DEVICE int clamp(int x, int most) { return max(0, min(x, most)); }

/* The keys [lo, hi) that query i of a piece may see, from the piece's first tile on. Rows behind the
 * last query see what it sees. */
typedef struct bounds {
    int lo, hi;
} bounds;

FA_DEVICE bounds find_bounds(const piece *w, int i)
{
    const int last = (int)fa_max64(w->tile.n_q - w->tile.first, 1) - 1;
    const bounds b = {w->lo + min(i, last), clamp(w->hi + min(i, last), w->n_k)};
    return b;
}

FA_DEVICE float same_float(float x) { return __int_as_float(same_for_warp(__float_as_int(x))); }

#if GENERAL && OVERLAP

/* Scores are in units of the scale or the softcap when they come to the softmax, which multiplies by it
 * anyway; but not of one so small that a bias in such units overflows, or below 0, which would turn round
 * what is the largest. */
#define LEAST_SCALE 1e-6f

FA_DEVICE void find_units(const fa_attention_params *p, const fa_tile *t, place *at)
{
    const float scale = fa_effective_scale(p, t);
    const bool capped = p->softcap > 0.0f, small = !(scale >= LEAST_SCALE);
    at->inner = same_float(capped ? scale / p->softcap : small ? scale * FA_LOG2E : 1.0f);
    at->scale = capped ? p->softcap * FA_LOG2E : small ? 1.0f : scale * FA_LOG2E;
}

#else

/* General scores are in exponents of 2 when they come to the softmax. */
FA_DEVICE void find_units(const fa_attention_params *p, const fa_tile *t, place *at)
{
    at->scale = GENERAL ? 1.0f : fa_effective_scale(p, t) * FA_LOG2E;
}

#endif

FA_DEVICE place find_place(const fa_attention_params *p, const piece *w, int consumer)
{
    place at;
    find_units(p, &w->tile, &at);
    at.full_lo = same_for_warp(find_bounds(w, consumer * ROWS + ROWS - 1).lo);
    at.full_hi = same_for_warp(find_bounds(w, consumer * ROWS).hi);
    at.scale = same_float(at.scale);
    return at;
}

/* Hides the keys that a row must not see. key: the tile's first one. Element 4j + 2r + c of an
 * accumulator is row r of the thread, column 8j + 2 (lane % 4) + c. */
FA_DEVICE void mask_scores(float *s, const piece *w, int consumer, int key)
{
    const int column = key + (int)threadIdx.x % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const bounds b = find_bounds(w, row_of(consumer, r));
        int lo = b.lo - column, hi = b.hi - column;
#if OVERLAP
        /* As if they changed: or columns would be kept in registers, to compare with. */
        asm volatile("" : "+r"(lo), "+r"(hi));
#endif
        fa_hide_fragment(s, r, lo, hi);
    }
}

#if GENERAL

/* ---- Options that change scores ---------------------------------------------------------------- */

/* Row r of a thread. column: its first key, counted from the piece's. */
FA_DEVICE fa_fragment_row row_at(const fa_attention_params *p, const piece *w, int consumer, int r,
                                 int column)
{
    const int i = row_of(consumer, r);
    const bounds b = find_bounds(w, i);
    const int64_t query = fa_min64(w->tile.first + i, fa_max64(w->tile.n_q, 1) - 1);
    const fa_fragment_row row = {fa_logit_row_of(p, &w->tile, query), (int64_t)w->start + column,
                                 b.lo - column, b.hi - column};
    return row;
}

#if !OVERLAP

/* Scores become exponents of 2. */
FA_DEVICE void make_logits(const fa_attention_params *p, const piece *w, float *s, int consumer,
                           int key)
{
    fa_scale_fragment(p, fa_effective_scale(p, &w->tile), s);
    if (!fa_changes_rows(p)) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const fa_fragment_row row = row_at(p, w, consumer, r, key + (int)threadIdx.x % 4 * 2);
        fa_change_row(p, s, r, &row);
    }
}

#endif

/* Clears the weights that dropout drops; the others are scaled at the end. A thread's columns of 32
 * take their bits from one block. */
FA_DEVICE void drop_weights(const fa_attention_params *p, const piece *w, uint32_t *weights,
                            int consumer, int key)
{
    const fa_dropout d = fa_dropout_of(p, &w->tile);
#pragma unroll 1
    for (int r = 0; r < 2; r++) {
        const int64_t i = w->tile.first + row_of(consumer, r);
#pragma unroll
        for (int g = 0; g < KEYS / 32; g++) {
            uint32_t block[4];
            fa_dropout_block(d.seed, d.offset, d.batch_head, i, (w->start + key) / 32 + g,
                             (int)threadIdx.x % 4, block);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t keep = (block[j] & 0xffffu) >= p->dropout_threshold ? 0xffffu : 0;
                if (block[j] >> 16 >= p->dropout_threshold) keep |= 0xffff0000u;
                uint32_t *even = weights + 2 * (4 * g + j), *odd = even + 1;
                if (r == 0) *even &= keep;
                else *odd &= keep;
            }
        }
    }
}

#endif

/* ---- Softmax ----------------------------------------------------------------------------------- */

/* The base of a row that has seen nothing: no score lies below it, and -infinity still gives 0. */
#define NOTHING_SEEN (-3.402823466e38f)

/* What a row carries from tile to tile. Its weights are 2^(x - base), x = scale * score. */
typedef struct row_state {
    float base[2], sum[2]; /* sum: of the thread's columns only */
    bool unseen;           /* some row of the warp has seen nothing */

} row_state;

#if !OVERLAP

/* Weights of scores, rounded and paired: exactly an A operand of wgmma; and their sums. Pair i is columns
 * 8 (i / 2) + {0, 1} of row i % 2. Returns whether some weight of the warp is, or may be, too large. */
#if SUMS

FA_DEVICE bool weigh(uint32_t *weights, const float *s, const float *base, float scale, float *sum)
{
    uint32_t seen = 0;
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) {
        const float a = exp2_fast(fmaf(s[2 * i], scale, -base[i % 2]));
        const float b = exp2_fast(fmaf(s[2 * i + 1], scale, -base[i % 2]));
        weights[i] = pack_pair(a, b);
        if (i % 2) seen |= weights[i - 1] | weights[i];
    }
    sum[0] = sum[1] = 0; /* out has them */
    return __any_sync(0xffffffff, (seen & TWO_BITS) != 0);
}

#else

FA_DEVICE bool weigh(uint32_t *weights, const float *s, const float *base, float scale, float *sum)
{
    float part[2][2] = {{0, 0}, {0, 0}};
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) {
        const float a = exp2_fast(fmaf(s[2 * i], scale, -base[i % 2]));
        const float b = exp2_fast(fmaf(s[2 * i + 1], scale, -base[i % 2]));
        part[i % 2][i / 2 % 2] += a + b;
        weights[i] = pack_pair(a, b);
    }
    sum[0] = part[0][0] + part[0][1];
    sum[1] = part[1][0] + part[1][1];
    return __any_sync(0xffffffff, !(sum[0] <= SUM_BOUND && sum[1] <= SUM_BOUND));
}

#endif

#endif

/* Over the four lanes that share a row. */
FA_DEVICE float quad_maximum(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

/* Of scale * s - shift; each thread has its shift. */
FA_DEVICE float row_maximum(const float *s, int r, float scale, float shift)
{
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
        for (int c = 0; c < 2; c++) top[c] = fmaxf(top[c], s[4 * j + 2 * r + c] * scale);
    return quad_maximum(fmaxf(top[0], top[1]) - shift);
}

/* A thread's score s of row r stands for the exponent scale * s - shift[r] of 2. */
typedef struct units {
    float scale, shift[2];
} units;

/* Bases that fit this tile's scores, and by what earlier outputs are to be multiplied. A row without scores
 * keeps NOTHING_SEEN, below which is no score but -infinity. */
FA_DEVICE void move_bases(const float *s, row_state *rows, float *rescale, const units *u)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float top = row_maximum(s, r, u->scale, u->shift[r]);
        const float base = fmaxf(rows->base[r], top - HEADROOM);
        rescale[r] = exp2_fast(rows->base[r] - base);
        rows->base[r] = base;
        rows->sum[r] *= rescale[r];
    }
    rows->unseen =
        __any_sync(0xffffffff, rows->base[0] == NOTHING_SEEN || rows->base[1] == NOTHING_SEEN);
}

FA_DEVICE void rescale_outputs(float *out, const float *rescale)
{
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) out[i] *= rescale[i / 2 % 2];
}

#if !OVERLAP

/* Scores of a tile become weights: by the bases that there are, or, for the first keys that a row sees
 * and where weights grow too large, by new ones. */
FA_DEVICE void softmax(uint32_t *weights, const float *s, row_state *rows, float *out, float scale)
{
    float sum[2];
    if (rows->unseen || weigh(weights, s, rows->base, scale, sum)) {
        const units u = {scale, {0, 0}};
        float rescale[2];
        move_bases(s, rows, rescale, &u);
        rescale_outputs(out, rescale);
        (void)weigh(weights, s, rows->base, scale, sum);
    }
    rows->sum[0] += sum[0];
    rows->sum[1] += sum[1];
}

#endif

/* ---- Results ----------------------------------------------------------------------------------- */

/* Rows of a warp in its staging area: 16 of 128 bytes, whose pieces of 16 bytes lie elsewhere in each
 * row, so that neither columns nor rows meet one bank twice. */
FA_DEVICE char *staged(char *staging, int row, int piece_of_16)
{
    return staging + row * 128 + (piece_of_16 ^ row % 8) * 16;
}

/* 64 columns of the warp's 16 rows, as they lie in registers, to shared memory. */
FA_DEVICE void stage_columns(char *staging, const float *out, const float *factor)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *x = out + 4 * (j + i / 2) + 2 * (i % 2);
            r[i] = pack_pair(x[0] * factor[i % 2], x[1] * factor[i % 2]);
        }
        store_matrix_x4(shared_address(staged(staging, lane % 16, j + lane / 16)), r);
    }
}

/* From there to the caller's rows: each lane 16 bytes, eight lanes a row. first_row: the warp's. */
FA_DEVICE void write_staged(const fa_attention_params *p, const fa_tile *t, char *staging,
                            int64_t first_row, int column)
{
    const int lane = threadIdx.x % 32;
    column += lane % 8 * 8;
#pragma unroll
    for (int part = 0; part < 4; part++) {
        const int row = part * 4 + lane / 8;
        const int64_t i = first_row + row;
        const uint4 x = *(const uint4 *)staged(staging, row, lane % 8);
        if (i < t->room_q && column < p->d_v)
            *(uint4 *)(fa_view_row(&p->out, t->block_q, t->start_q + i, t->head) + 2 * column) = x;
    }
}

FA_DEVICE void store_staged(const fa_attention_params *p, const fa_tile *t, char *staging,
                            const float *out, const float *factor, int64_t first_row)
{
#pragma unroll
    for (int column = 0; column < VALUE_DIM; column += 64) {
        __syncwarp(); /* what was there has been read */
        stage_columns(staging, out + column / 2, factor);
        __syncwarp();
        write_staged(p, t, staging, first_row, column);
    }
}

/* Two neighbouring lanes hold columns 4q, 4q+1 and 4q+2, 4q+3 of two blocks of eight columns. They
 * exchange so that each has four neighbours of one block: 8 bytes. */
FA_DEVICE uint2 gather_four(uint32_t first, uint32_t second)
{
    const bool odd = threadIdx.x & 1;
    const uint32_t got = __shfl_xor_sync(0xffffffff, odd ? first : second, 1);
    return odd ? make_uint2(got, second) : make_uint2(first, got);
}

/* Writes what is in the row of columns column .. column+3: 16-bit elements, one by one. */
FA_DEVICE void store_each(uint16_t *row, int column, int columns, uint2 four)
{
    if (column < columns) row[column] = (uint16_t)four.x;
    if (column + 1 < columns) row[column + 1] = (uint16_t)(four.x >> 16);
    if (column + 2 < columns) row[column + 2] = (uint16_t)four.y;
    if (column + 3 < columns) row[column + 3] = (uint16_t)(four.y >> 16);
}

/* The thread's part of one row, times a factor. */
FA_DEVICE void store_row(const fa_attention_params *p, const float *out, int r, float factor,
                         bool mine, char *row)
{
    const int first = (int)threadIdx.x % 2 * 8 + (int)threadIdx.x % 4 / 2 * 4;
    uint2 fours[VALUE_DIM / 16];
#pragma unroll
    for (int j = 0; j < VALUE_DIM / 16; j++) {
        const float *x = out + 8 * j + 2 * r;
        fours[j] = gather_four(pack_pair(x[0] * factor, x[1] * factor),
                               pack_pair(x[4] * factor, x[5] * factor));
    }
    if (!mine) return;
    if (p->out.vector) {
#pragma unroll
        for (int j = 0; j < VALUE_DIM / 16; j++)
            if (16 * j + first < p->d_v) *(uint2 *)(row + 2 * (16 * j + first)) = fours[j];
        return;
    }
#pragma unroll
    for (int j = 0; j < VALUE_DIM / 16; j++)
        store_each((uint16_t *)row, 16 * j + first, p->d_v, fours[j]);
}

FA_DEVICE void store_rows(const fa_attention_params *p, const fa_tile *t, const float *out,
                          const float *factor, int consumer)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int64_t i = t->first + row_of(consumer, r);
        store_row(p, out, r, factor[r], i < t->room_q,
                  fa_view_row(&p->out, t->block_q, t->start_q + i, t->head));
    }
}

/* Rows of zeros, whatever out holds. */
FA_DEVICE void clear_row(float *out, int r)
{
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 8; i++) out[4 * i + 2 * r] = out[4 * i + 2 * r + 1] = 0;
}

#if GENERAL

/* ---- Values that a boolean mask or a bias of -infinity hides ----------------------------------- */

/* They may hold NaN or infinities, which a weight of 0 does not keep out of a product: then results are
 * not finite. Rows that are not are done once more, key by key, without the keys of weight 0; but only
 * when the block has done all of its work, for loops over keys beside those over tiles make the compiler
 * take the whole for divergent, at half the speed. */

FA_DEVICE bool is_finite_for_warp(const float *out)
{
    float seen = 0;
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 2; i++) seen += out[i] * 0.0f;
    return !__any_sync(0xffffffff, seen != 0.0f);
}

#endif

/* The sum of a row's weights. */
FA_DEVICE float find_sum(const row_state *rows, const float *out, int r)
{
#if SUMS
    return rows->base[r] == NOTHING_SEEN ? 0.0f : out[VALUE_DIM / 2 + 2 * r];
#else
    const float pair = rows->sum[r] + __shfl_xor_sync(0xffffffff, rows->sum[r], 1);
    return pair + __shfl_xor_sync(0xffffffff, pair, 2);
#endif
}

/* Divides by the sums and writes out and lse; zeros and -infinity in rows that are no query's. Returns
 * whether rows of the warp have to be done once more. */
FA_DEVICE bool finish(const fa_attention_params *p, const fa_tile *t, char *staging,
                      const row_state *rows, float *out, int consumer)
{
    const float ln2 = 0.69314718055994530942f;
    const float sink = p->sinks ? p->sinks[t->head] : -INFINITY;
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int64_t i = t->first + row_of(consumer, r);
        float lse;
        const float sum = find_sum(rows, out, r);
        const float top = rows->base[r] == NOTHING_SEEN ? -INFINITY : rows->base[r] * ln2;
        factor[r] = fa_softmax_finish(top, sum, sink, &lse);
        if (i >= t->n_q) lse = -INFINITY, factor[r] = 0.0f;
        if (GENERAL && p->dropout_threshold) factor[r] *= p->dropout_scale;
        if (factor[r] == 0.0f) clear_row(out, r);
        if (i < t->room_q && p->lse && threadIdx.x % 4 == 0)
            p->lse[(t->block_q * p->heads_q + t->head) * p->rows_q + t->start_q + i] = lse;
    }
    const int warp_row = consumer * ROWS + (int)threadIdx.x % WARPGROUP / 32 * 16;
#if GENERAL
    const bool broken = (p->bias.data || p->mask.data) && !is_finite_for_warp(out);
#else
    const bool broken = false;
#endif
    if (STAGED && p->out.vector == 8)
        store_staged(p, t, staging + warp_row * 128, out, factor, t->first + warp_row);
    else store_rows(p, t, out, factor, consumer);
    return broken;
}

#if GENERAL

/* ---- Rows once more ---------------------------------------------------------------------------- */

/* The exponent of 2 of one key's weight; every lane gets it. */
FA_DEVICE float score_again(const fa_attention_params *p, const fa_tile *t, const fa_logit_row *row,
                            const char *q, int64_t j)
{
    const char *k = fa_key_row(p, &p->k, t, j);
    float sum = 0;
    for (int c = threadIdx.x % 32; c < p->d; c += 32)
        sum = fmaf(fa_element(q, p->q.dtype, c), fa_element(k, p->k.dtype, c), sum);
    for (int other = 16; other; other /= 2) sum += __shfl_xor_sync(0xffffffff, sum, other);
    const float distance = (float)(row->center - j);
    return fa_row_logit(p, row, j, distance, sum * fa_effective_scale(p, t)) * FA_LOG2E;
}

FA_DEVICE bool is_dropped(const fa_attention_params *p, const fa_dropout *d, int64_t i, int64_t j)
{
    if (!p->dropout_threshold) return false;
    return fa_dropout_bits(d->seed, d->offset, d->batch_head, i, j) < p->dropout_threshold;
}

/* out += weight * value, of the lane's columns: so many in steps of 32. */
FA_DEVICE void add_value(const fa_attention_params *p, float *out, float weight, const char *v)
{
#pragma unroll
    for (int n = 0; n < VALUE_DIM / 32; n++) {
        const int c = 32 * n + (int)threadIdx.x % 32;
        if (c < p->d_v) out[n] = fmaf(weight, fa_element(v, p->v.dtype, c), out[n]);
    }
}

FA_DEVICE void redo_row(const fa_attention_params *p, const fa_tile *t, int64_t i, char *to)
{
    const fa_dropout d = fa_dropout_of(p, t);
    const fa_range visible = fa_tile_visible(p, t, i);
    const fa_logit_row row = fa_logit_row_of(p, t, i);
    const char *q = fa_view_row(&p->q, t->block_q, t->start_q + i, t->head);
    float out[VALUE_DIM / 32] = {0}, top = -INFINITY, sum = 0, lse;
    for (int64_t j = visible.lo; j < visible.hi; j++)
        top = fmaxf(top, score_again(p, t, &row, q, j));
    for (int64_t j = visible.lo; j < visible.hi; j++) {
        const float weight = exp2_fast(score_again(p, t, &row, q, j) - fa_softmax_base(top));
        sum += weight;
        if (weight != 0.0f && !is_dropped(p, &d, i, j))
            add_value(p, out, weight, fa_key_row(p, &p->v, t, j));
    }
    float factor = fa_softmax_finish(top == -INFINITY ? top : top / FA_LOG2E, sum,
                                     p->sinks ? p->sinks[t->head] : -INFINITY, &lse);
    if (p->dropout_threshold) factor *= p->dropout_scale;
#pragma unroll
    for (int n = 0; n < VALUE_DIM / 32; n++) {
        const int c = 32 * n + (int)threadIdx.x % 32;
        const float x = factor == 0.0f ? 0.0f : out[n] * factor;
        if (c < p->d_v) fa_store_element(to, p->out.dtype, c, x);
    }
}

FA_DEVICE bool is_finite_row(const fa_attention_params *p, const char *row)
{
    float seen = 0;
    for (int c = threadIdx.x % 32; c < p->d_v; c += 32)
        seen += fa_element(row, p->out.dtype, c) * 0.0f;
    return !__any_sync(0xffffffff, seen != 0.0f);
}

/* The warp's rows of all of the block's pieces. */
FA_DEVICE void redo_rows(const fa_attention_params *p, const fa_sm90_params *s, int consumer)
{
    walk at = {blockIdx.x, 0};
    piece w;
    __syncwarp(); /* other lanes' results can be read */
    for (find_next(p, s, &at, &w); w.tiles; find_next(p, s, &at, &w)) {
        const fa_tile *t = &w.tile;
        const int64_t first = t->first + consumer * ROWS + (int)threadIdx.x % WARPGROUP / 32 * 16;
        for (int64_t i = first; i < fa_min64(first + 16, t->n_q); i++) {
            char *row = fa_view_row(&p->out, t->block_q, t->start_q + i, t->head);
            if (!is_finite_row(p, row)) redo_row(p, t, i, row);
        }
    }
}

#endif

/* ---- The consumer's walk ----------------------------------------------------------------------- */

typedef struct progress {
    int number;       /* of the piece */
    int tile, tiles;  /* the tile of it, how many it has; 0: there is no such piece */
    int mine;         /* how many of them this consumer needs */
    tile_count count; /* tiles so far, through all pieces */
#if BIAS_STAGED
    int biases; /* tiles of the bias so far */
#endif
} progress;

FA_DEVICE const piece *find_slot(const pipeline *pipe, int number)
{
    return &pipe->state->pieces[number % SLOTS];
}

/* To the next piece, waiting for it. */
FA_DEVICE void next_piece(const pipeline *pipe, int consumer, progress *at)
{
    at->number++;
    barrier_wait(&pipe->state->q_full[consumer], at->number & 1);
    const piece *w = find_slot(pipe, at->number);
    at->tiles = same_for_warp(w->tiles);
    at->mine = same_for_warp(w->mine[consumer]);
    at->tile = 0;
}

/* To the next tile. */
FA_DEVICE void next_tile(const pipeline *pipe, int consumer, progress *at)
{
    at->count++;
    if (++at->tile == at->tiles) next_piece(pipe, consumer, at);
}

FA_DEVICE bool is_needed(const progress *at) { return at->tile < at->mine; }

FA_DEVICE void wait_for_keys(const pipeline *pipe, const progress *at)
{
    if (at->tiles) barrier_wait(&pipe->state->k_full[stage_of(at->count)], parity_of(at->count));
}

/* One arrival for each warp. */
FA_DEVICE void release(uint64_t *barrier)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

FA_DEVICE void start_piece(const pipeline *pipe, const fa_attention_params *p, const progress *at,
                           int consumer, place *here, row_state *rows)
{
    *here = find_place(p, find_slot(pipe, at->number), consumer);
    rows->base[0] = rows->base[1] = NOTHING_SEEN;
    rows->sum[0] = rows->sum[1] = 0;
    rows->unseen = true;
}

#if OVERLAP

#include "forward_sm90_overlap.cuh"

#else

/* The scores of this tile are complete: its keys, and after the last tile its queries, have been read. */
FA_DEVICE void release_keys(const pipeline *pipe, const progress *at, int consumer)
{
    if (!at->tiles) return;
    release(&pipe->state->k_empty[stage_of(at->count)]);
    if (at->tile + 1 == at->tiles) release(&pipe->state->q_empty[consumer]);
}

/* Scores of a tile alone: of the first one, and after tiles that the consumer does not need. */
FA_DEVICE void multiply_keys(float *s, uint32_t q, uint32_t k, int consumer)
{
    wgmma_fence();
    multiply_qk(s, q, k);
    pass_turn(consumer);
    wgmma_wait(0);
    REGISTER_FENCE(s, KEYS / 2);
}

/* Values of the tile before, scores of this one; scores that nobody needs come out all the same.
 * add: 0 for a piece's first tile of values. */
FA_DEVICE void multiply_both(float *out, float *s, uint32_t *weights, uint32_t q, uint32_t k,
                             uint32_t v, int add, int consumer)
{
    REGISTER_FENCE(out, OUTPUTS);
    REGISTER_FENCE(s, KEYS / 2);
    wgmma_fence();
    multiply_qk(s, q, k);
    multiply_pv(out, weights, v, add);
    pass_turn(consumer);
    wgmma_wait(0);
    REGISTER_FENCE(out, OUTPUTS);
    REGISTER_FENCE(s, KEYS / 2);
}

/* Values of the tile before, if they are needed, and scores of this one. */
FA_DEVICE void multiply(const pipeline *pipe, float *out, float *s, uint32_t *weights,
                        const progress *at, bool needed, int add, int consumer)
{
    const int before = at->count - 1, stage = stage_of(before);
    const uint32_t q = q_place(pipe, consumer), k = k_place(pipe, at->count);
    barrier_wait(&pipe->state->v_full[stage], parity_of(before));
    wait_for_keys(pipe, at);
    wait_for_turn(consumer);
    if (needed) multiply_both(out, s, weights, q, k, v_place(pipe, before), add, consumer);
    else if (is_needed(at)) multiply_keys(s, q, k, consumer);
    else pass_turn(consumer);
    release(&pipe->state->v_empty[stage]);
    release_keys(pipe, at, consumer);
}

/* All pieces, tile after tile. The scores of a tile, perhaps of the next piece, are asked for together
 * with the values of the one before. Returns whether rows have to be done once more. */
FA_DEVICE bool consume(const pipeline *pipe, const fa_attention_params *p, int consumer)
{
    bool broken = false;
    float out[OUTPUTS], s[KEYS / 2];
    uint32_t weights[KEYS / 4];
    row_state rows;
    place here;
    progress at = {-1, 0, 0, 0, 0};
    if (consumer == CONSUMERS - 1) pass_turn(consumer); /* consumer 0 begins */
    next_piece(pipe, consumer, &at);
    start_piece(pipe, p, &at, consumer, &here, &rows);
    wait_for_keys(pipe, &at);
    wait_for_turn(consumer);
    multiply_keys(s, q_place(pipe, consumer), k_place(pipe, 0), consumer);
    release_keys(pipe, &at, consumer);
    while (at.tiles) {
        const bool needed = is_needed(&at);
        const int tile = at.tile, key = tile * KEYS;
        if (needed) {
            const piece *w = find_slot(pipe, at.number);
#if GENERAL
            make_logits(p, w, s, consumer, key);
#endif
            if (key < here.full_lo || key + KEYS > here.full_hi) mask_scores(s, w, consumer, key);
            softmax(weights, s, &rows, out, here.scale);
#if GENERAL
            if (p->dropout_threshold) drop_weights(p, w, weights, consumer, key);
#endif
        }
        next_tile(pipe, consumer, &at);
        multiply(pipe, out, s, weights, &at, needed, tile > 0, consumer);
        if (at.tile == 0) {
            broken |= finish(p, &find_slot(pipe, at.number - 1)->tile, pipe->staging, &rows, out,
                             consumer);
            start_piece(pipe, p, &at, consumer, &here, &rows);
        }
    }
    if (consumer == 0) wait_for_turn(consumer); /* takes the turn that is left */
    return broken;
}

#endif

/* ---- The block --------------------------------------------------------------------------------- */

FA_DEVICE void init_barriers(shared_state *state)
{
    for (int c = 0; c < CONSUMERS; c++) {
        barrier_init(&state->q_full[c], 1);
        barrier_init(&state->q_empty[c], WARPS);
    }
    for (int stage = 0; stage < STAGES; stage++) {
        barrier_init(&state->k_full[stage], 1);
        barrier_init(&state->v_full[stage], 1);
        barrier_init(&state->k_empty[stage], CONSUMERS * WARPS);
        barrier_init(&state->v_empty[stage], CONSUMERS * WARPS);
    }
    barrier_init(&state->v_raw, 1);
#if BIAS_STAGED
    for (int c = 0; c < CONSUMERS; c++) {
        barrier_init(&state->bias_full[c], 1);
        barrier_init(&state->bias_empty[c], WARPS);
    }
#endif
    barrier_init_fence();
}

/* The blocks of ones behind the values. */
FA_DEVICE void write_ones(char *v)
{
    const uint32_t ones = BFLOAT16 ? 0x3f803f80u : 0x3c003c00u;
    for (int stage = 0; stage < STAGES; stage++)
        for (int at = threadIdx.x * 4; at < KV_BLOCK; at += THREADS * 4)
            *(uint32_t *)(v + stage * V_STAGE + V_BYTES + at) = ones;
    async_proxy_fence();
}

FA_KERNEL __launch_bounds__(THREADS, 1) forward_sm90(const __grid_constant__ fa_attention_params p,
                                                     const __grid_constant__ fa_sm90_params s)
{
    FA_DYNAMIC_SHARED(raw);
    __shared__ shared_state state;
    char *q = (char *)raw + (-shared_address(raw) & 1023), *k = q + CONSUMERS * Q_BYTES;
    char *v = k + STAGES * K_BYTES;
    const pipeline pipe = {
        .q = q,
        .k = k,
        .v = v,
        .staging = v + STAGES * V_STAGE,
#if BIAS_STAGED
        .bias = v + STAGES * V_STAGE + FA_SM90_STAGING(SHAPE),
#endif
        .state = &state
    };
    if (SUMS) write_ones(v);
    if (threadIdx.x == 0) init_barriers(&state);
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        registers_give_back(PRODUCER_REGISTERS);
        if (threadIdx.x < 32) produce(&pipe, &p, &s);
    } else {
        registers_take(CONSUMER_REGISTERS);
        const int consumer = same_for_warp(threadIdx.x / WARPGROUP - 1);
#if OVERLAP
        const bool broken = consume(&pipe, &p, &s, consumer);
#else
        const bool broken = consume(&pipe, &p, consumer);
#endif
#if GENERAL
        if (broken) redo_rows(&p, &s, consumer);
#else
        (void)broken;
#endif
    }
}
