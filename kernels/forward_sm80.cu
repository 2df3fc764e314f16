/*
 * Attention forward on tensor cores by mma.sync, for Ampere and what follows: FlashAttention-2,
 * algorithm 1 (arXiv:2307.08691, section 3.1), in float16 or bfloat16 with float32 sums, with every
 * option of the API. Compiled with ARCHITECTURE 75 it runs on Turing, in float16.
 *
 * A block of WARPS warps computes a tile of queries of one head and walks over the keys in
 * tiles. A warp has 32 rows where their accumulator fits into the registers, up to 128 columns,
 * so that each fragment of K and V which it loads serves two mma: shared memory would be the limit
 * else. For wider heads SPLIT warps share 32 rows: each makes the scores of its share of the tile's
 * keys, they lay their weights down in shared memory, and each makes its share of the output's
 * columns from all keys. (192 columns, and 256 in little shared memory, have 16 rows a warp.)
 *
 * Where nothing but masks by position stands between the products, the softmax has no maxima: a
 * row's weights are 2^(x - base), with base from the first tile that the row sees. As long as
 * the sums of weights stay below a bound, base stays, whatever the maximum does: the final
 * division takes it out again. Maxima would have to be known before the first weight; without
 * them the weights of a few keys are made while the tensor cores multiply those of the keys
 * before with V:
 *
 *       S = Q K^T | weights 0 | O += P V of 0, weights 1 | O += P V of 1, weights 2 | ...
 *
 * What passes the bound gets another base from the maxima of what is left of its tile. Most tiles are
 * whole and seen by all rows: their loop has no branch whose outcome the tile's number could tell, its
 * addresses wait in registers, and copies begin between products.
 *
 * A block may have several tasks, tiles of queries. They are described ahead, several at a time, and the
 * copies of a task's queries and of its first keys are under way while the one before it ends.
 *
 * A warp leaves out tiles of which none of its rows sees a key. Only tiles of which a row sees some
 * keys and not others need masks.
 *
 * Keys and values that no query of the tile may see are not read, zeros take their place. What one
 * row sees and another does not, can be NaN: a weight of 0 makes 0 * NaN of it, and NaN of the
 * result. Nobody looks for such values at first: where a result is not finite and something was
 * hidden, the block does its work once more, and carefully. Then tiles that hide something are
 * searched, and where a value is not finite, the product is made from what is finite, and infinities
 * and NaN are added where the weight is not 0.
 *
 * Compiled with the numbers of a row of kernels/variants.h: ARCHITECTURE, ELEMENT, HEAD_DIM (the larger of d and d_v,
 * rounded up), OPTIONS (0: masks by position and lengths only, a scale that is not negative), WARPS, SPLIT, GROUP_ROWS,
 * KEYS, STAGES, BLOCKS, AHEAD (see forward_sm80.h).
 */
#define FRAGMENT_KEYS OWN_KEYS

#include "common/ampere.cuh"
#include "forward_sm80.h"

enum {
    THREADS = FA_SM80_THREADS(WARPS),
    GROUPS = WARPS / SPLIT, /* of warps that share rows */
    M_TILES = GROUP_ROWS / 16,
    QUERIES = GROUPS * GROUP_ROWS,
    OWN_KEYS = KEYS / SPLIT,    /* whose scores a warp makes  */
    COLUMNS = HEAD_DIM / SPLIT, /* of O that a warp makes  */
    D_STEPS = HEAD_DIM / 16,    /* of mma along d in Q K^T */
    D_TILES = COLUMNS / 8,      /* of 8 columns of O       */
    KEY_STEPS = KEYS / 16,      /* of mma along keys, P V  */
    KEY_TILES = OWN_KEYS / 8,   /* of 8 columns of S       */
    PIECES = HEAD_DIM / 8,      /* of 16 bytes of a row    */
    PITCH = FA_SM80_PITCH(HEAD_DIM, ELEMENT),
    TILE_BYTES = KEYS * PITCH,
    WEIGHTS_PITCH = FA_SM80_WEIGHTS_PITCH(KEYS, ELEMENT)
};
static_assert(SPLIT == 1 || GROUPS <= 15, "named barriers are numbered to 15");
static_assert(WARPS % SPLIT == 0 && OWN_KEYS % 16 == 0 && COLUMNS % 16 == 0, "whole fragments");

#include "common/fragment.cuh"

/* Of how many steps along d the warp's fragments of Q fit into registers. */
#ifndef KEPT_STEPS
#define KEPT_STEPS (OPTIONS ? 0 : HEAD_DIM == 64 ? 4 : HEAD_DIM == 256 ? 3 : 0)
#endif
#define ALL_KEPT (16 * KEPT_STEPS == HEAD_DIM)

#define LOWEST (-3.402823466e38f)
#define SMALLEST 1.175494351e-38f
#define LN2 0.69314718055994530942f

/* Weights are 2^(logit - max). A row's largest one is LARGEST = 2^HEADROOM when its max is found: float16 keeps
 * more of the small weights if the large ones come near its end, 2^16. A power of two needs no rounding, so max
 * follows the largest logit where that counts (see forward_sm90/softmax.cuh), but for RESCALE_ABOVE. */
#if ELEMENT == FA_ELEMENT_BFLOAT16
#define HEADROOM 0.0f
#define LARGEST 1.0f
#else
#define HEADROOM 7.0f
#define LARGEST 128.0f
#endif
#define RESCALE_ABOVE (HEADROOM + 0.5f)

/* Whether weights are made without maxima, and of how many of a warp's keys at once. */
#define MAX_FREE (!OPTIONS && SPLIT <= 2)
#ifndef WEIGHED_KEYS
#define WEIGHED_KEYS (SPLIT > 1 ? OWN_KEYS : HEAD_DIM == 192 ? 16 : 32)
#endif

/* Rows are flat if a thread's weights of a tile add up to this, on average: that is about 0.7 of what standard
 * normal logits give. Flat rows need no maxima in each tile, until the sum of a thread's weights among WEIGHED_KEYS
 * keys of a row is beyond a bound: so many times the average on top of the largest weight, but within
 * SUM_BOUND, for float16 ends at 2^16. */
#define FLAT_SUM (LARGEST * (0.7f + KEYS / 56.0f) / SPLIT)
#define FLAT_GROWTH 6.0f
/* A row that has less than twice its largest weight makes the rows of its warp count as peaked. */
#define PEAKED_SUM (0.5f * LARGEST / SPLIT)
#define SUM_BOUND 32768.0f
static_assert(!MAX_FREE || WEIGHED_KEYS <= 32, "at most 8 weights a thread and row");

/* S, as mma leaves it: of row 16m + g + 8h the keys 8n + 2t and 8n + 2t + 1 in [m][n][2h] and
 * [m][n][2h + 1], g = lane / 4, t = lane % 4. */
typedef struct fa_scores {
    float at[M_TILES][KEY_TILES][4];
} fa_scores;

/* P, rounded: [m][n][h] the pair. Two tiles in a row are an A fragment. Warps that share rows need
 * the weights of all keys: they lay theirs down in shared memory. */
typedef struct fa_weights {
#if SPLIT == 1
    uint32_t at[M_TILES][KEY_TILES][2];
#else
    uint32_t at; /* where this lane's pair [0][0][0] lies */
#endif
} fa_weights;

typedef struct fa_output {
    float at[M_TILES][D_TILES][4];
    float max[M_TILES][2]; /* in powers of two */
    float sum[M_TILES][2]; /* of the thread's own columns */
} fa_output;

/* The warp's fragments of Q: those that are kept, and where in shared memory this lane's rows begin. */
typedef struct fa_queries {
#if KEPT_STEPS > 0
    uint32_t kept[M_TILES][KEPT_STEPS][4];
#endif
    uint32_t at;
} fa_queries;

/* The keys that some of a run of rows see, and those that all of them see. */
typedef struct fa_seen {
    int from, to, all_from, all_to;
} fa_seen;

/* The keys of a tile of queries, described ahead and kept in shared memory: registers are for the
 * products. Positions count from `start`, the first key of the first tile, a multiple of 32. */
typedef struct fa_walk {
    int64_t start;
    const char *k, *v; /* rows `start` of keys and values, unless there are pages */
    /* How many tiles there are; [plain_from, plain_to) every row sees all of; below whole_to, and not in
     * front of block.from, they can be copied row by row without a look at single keys. */
    int tiles, plain_from, plain_to, whole_to;
    fa_seen block, group[GROUPS];
    int lo, hi, keys, last; /* row r <= last sees the keys [lo + r, hi + r) that are below `keys` */
    uint32_t careful; /* 1: the task's second time, values that are not finite are looked for */
    int odd_values[WARPS]; /* whether this tile's values are not all finite; of each warp's own */
} fa_walk;

/* A task. Without queries and rows of its own: there is nothing to do. */
typedef struct fa_task {
    fa_tile tile;
    fa_walk walk;
} fa_task;
static_assert(sizeof(fa_task) <= FA_SM80_TASK_BYTES, "room for descriptions");

/* What a block has to do, in shared memory, for registers are scarce. */
typedef struct fa_block {
    fa_task now;    /* at a constant address: it is looked up between products */
    fa_task *tasks; /* 2 * AHEAD of them: the one of turn i at i % (2 * AHEAD) */
    uint32_t turn, turns;
    int begun; /* whether the first copies of this turn's task are under way already */
} fa_block;

FA_DEVICE int lane_id(void) { return fa_thread_id() % 32; }
FA_DEVICE int group_id(void) { return fa_thread_id() / (32 * SPLIT); }
FA_DEVICE int group_row(void) { return group_id() * GROUP_ROWS; } /* its first */

/* The warp's number in its group: its share of keys and columns. */
FA_DEVICE int share_id(void) { return fa_thread_id() / 32 % SPLIT; }
FA_DEVICE int own_key(void) { return share_id() * OWN_KEYS; } /* its first in a tile */

/* All warps of the group meet. */
FA_DEVICE void meet_group(void)
{
    if (SPLIT > 1) fa_named_barrier(1 + group_id(), 32 * SPLIT);
}

/* The row of the block's tile that element [m][..][2 * half] belongs to. */
FA_DEVICE int row_of(int m, int half) { return group_row() + 16 * m + 8 * half + lane_id() / 4; }

/* Addresses in shared memory. */
typedef struct fa_memory {
    uint32_t q, k, v; /* of keys and values where the task's even tiles lie, */
    uint32_t odd;     /* and from there to its odd ones */
    uint32_t weights; /* QUERIES x KEYS */
    uint32_t numbers; /* GROUPS x SPLIT x GROUP_ROWS */
} fa_memory;

FA_DEVICE uint32_t group_weights(const fa_memory *at)
{
    return at->weights + (uint32_t)(group_row() * WEIGHTS_PITCH);
}

/* Where this lane's row of the group's weights begins, as A fragments are loaded. */
FA_DEVICE uint32_t shown_weights(const fa_memory *at)
{
    return group_weights(at) + (uint32_t)(lane_id() % 16 * WEIGHTS_PITCH + lane_id() / 16 * 16);
}

FA_DEVICE fa_weights place_weights(const fa_memory *at)
{
    fa_weights p = {0};
#if SPLIT > 1
    p.at = group_weights(at) +
           (uint32_t)(lane_id() / 4 * WEIGHTS_PITCH + own_key() * 2 + lane_id() % 4 * 4);
#else
    (void)at;
#endif
    return p;
}

#if OPTIONS
FA_DEVICE uint32_t get_pair(const fa_weights *p, int m, int n, int half)
{
#if SPLIT > 1
    return fa_shared_load(p->at + (uint32_t)((16 * m + 8 * half) * WEIGHTS_PITCH + 16 * n));
#else
    return p->at[m][n][half];
#endif
}
#endif

FA_DEVICE void set_pair(fa_weights *p, int m, int n, int half, uint32_t pair)
{
#if SPLIT > 1
    fa_shared_store(p->at + (uint32_t)((16 * m + 8 * half) * WEIGHTS_PITCH + 16 * n), pair);
#else
    p->at[m][n][half] = pair;
#endif
}

/* ---- Tiles into shared memory ---------------------------------------------------------------- */

/* Threads that copy: the same piece of every row that they copy, so many rows at a time. */
enum {
    FITTING_ROWS = THREADS / PIECES,
    ROWS_A_PASS = FITTING_ROWS >= 32   ? 32
                  : FITTING_ROWS >= 16 ? 16
                  : FITTING_ROWS >= 8  ? 8
                  : FITTING_ROWS >= 4  ? 4
                                       : 2,
    COPIERS = ROWS_A_PASS * PIECES
};
static_assert(KEYS % ROWS_A_PASS == 0 && QUERIES % ROWS_A_PASS == 0, "whole passes");
static_assert(KEYS % 32 == 0, "dropout's blocks cover 32 keys");

FA_DEVICE int copied_piece(void) { return fa_thread_id() % PIECES; }
FA_DEVICE int copied_row(void) { return fa_thread_id() / PIECES; }
FA_DEVICE bool is_copier(void) { return (int)COPIERS == (int)THREADS || fa_thread_id() < COPIERS; }
FA_DEVICE uint32_t copied_place(uint32_t tile)
{
    return tile + (uint32_t)(copied_row() * PITCH + copied_piece() * 16);
}

/* Eight elements one by one, for rows that are not aligned to 16 bytes or end within a piece. */
FA_DEVICE uint4 gather_piece(const char *row, int column, int columns)
{
    uint32_t pair[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint16_t *x = (const uint16_t *)row + column + 2 * i;
        const uint32_t low = column + 2 * i < columns ? x[0] : 0;
        const uint32_t high = column + 2 * i + 1 < columns ? x[1] : 0;
        pair[i] = low | high << 16;
    }
    return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

FA_DEVICE bool is_seen(const fa_walk *w, int j) { return j >= w->block.from && j < w->block.to; }

FA_DEVICE void gather_rows(const fa_attention_params *p, const fa_kernel_view *v, const fa_tile *t,
                           const fa_walk *w, int first, int columns, uint32_t tile)
{
    const int column = 8 * copied_piece();
#pragma unroll 1
    for (int r = copied_row(); r < KEYS; r += ROWS_A_PASS) {
        const int j = first + r;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (is_seen(w, j) && column < columns)
            x = gather_piece(fa_key_row(p, v, t, w->start + j), column, columns);
        fa_shared_store4(tile + (uint32_t)(r * PITCH + column * 2), x);
    }
}

/* j: the position of this thread's first row, which goes to `to`. inside: its piece is one of a row. */
FA_DEVICE void start_paged_rows(const fa_attention_params *p, const fa_kernel_view *v,
                                const fa_tile *t, const fa_walk *w, int j, bool inside, uint32_t to)
{
#pragma unroll 4
    for (int pass = 0; pass < KEYS / ROWS_A_PASS; pass++, j += ROWS_A_PASS) {
        const bool wanted = inside && is_seen(w, j);
        const char *row = v->data;
        if (wanted) row = fa_key_row(p, v, t, w->start + j) + 16 * copied_piece();
        fa_copy_async(to + (uint32_t)(pass * ROWS_A_PASS * PITCH), row, wanted);
    }
}

/* rows: this thread's piece of row 0, and the bytes from one row to the next. */
FA_DEVICE void start_plain_rows(const char *rows, int64_t pitch, const fa_walk *w, int j,
                                bool inside, uint32_t to)
{
    const char *row = rows + pitch * j;
    const int64_t ahead = pitch * ROWS_A_PASS;
#pragma unroll 4
    for (int pass = 0; pass < KEYS / ROWS_A_PASS; pass++, row += ahead, j += ROWS_A_PASS)
        fa_copy_async(to + (uint32_t)(pass * ROWS_A_PASS * PITCH), row, inside && is_seen(w, j));
}

/* Starts the copy of the tile of keys or values whose first is at `first`. Zeros take the place of
 * what no query of the block sees. */
FA_DEVICE void start_rows(const fa_attention_params *p, const fa_kernel_view *v, const char *rows,
                          const fa_tile *t, const fa_walk *w, int first, int columns, uint32_t tile)
{
    if (!is_copier()) return;
    if (v->vector != 8) {
        gather_rows(p, v, t, w, first, columns, tile);
        return;
    }
    const uint32_t to = copied_place(tile);
    const bool inside = 8 * copied_piece() < columns;
    const int j = first + copied_row();
    if (p->block_table) start_paged_rows(p, v, t, w, j, inside, to);
    else start_plain_rows(rows + 16 * copied_piece(), 2 * v->stride[1], w, j, inside, to);
}

/* Queries one by one, of rows that are not aligned. */
FA_DEVICE void gather_queries(const fa_attention_params *p, const fa_tile *t, int64_t count,
                              uint32_t tile)
{
    const int column = 8 * copied_piece();
#pragma unroll 1
    for (int r = copied_row(); r < QUERIES; r += ROWS_A_PASS) {
        uint4 x = make_uint4(0, 0, 0, 0);
        if (r < count && column < p->d)
            x = gather_piece(fa_view_row(&p->q, t->block_q, t->start_q + t->first + r, t->head),
                             column, p->d);
        fa_shared_store4(tile + (uint32_t)(r * PITCH + column * 2), x);
    }
}

FA_DEVICE void start_queries(const fa_attention_params *p, const fa_tile *t, uint32_t tile)
{
    if (!is_copier()) return;
    const int64_t count = t->n_q - t->first;
    if (p->q.vector != 8) {
        gather_queries(p, t, count, tile);
        return;
    }
    const int column = 8 * copied_piece();
    const int64_t first = t->start_q + t->first + copied_row();
    const int64_t ahead = 2 * ROWS_A_PASS * p->q.stride[1];
    const char *row = p->q.data + 2 * (t->block_q * p->q.stride[0] + first * p->q.stride[1] +
                                       t->head * p->q.stride[2] + column);
    const int rows = column < p->d ? (int)fa_min64(count, QUERIES) : 0;
#pragma unroll
    for (int r = 0; r < QUERIES; r += ROWS_A_PASS, row += ahead)
        fa_copy_async(copied_place(tile) + (uint32_t)(r * PITCH), row, copied_row() + r < rows);
}

/* Whether something in the pieces of a tile that this thread copied is not finite. */
FA_DEVICE bool copied_not_finite(uint32_t tile)
{
    uint32_t seen = 0;
    if (!is_copier()) return false;
#pragma unroll 1
    for (int pass = 0; pass < KEYS / ROWS_A_PASS; pass++) {
        const uint4 x =
            fa_shared_load4(copied_place(tile) + (uint32_t)(pass * ROWS_A_PASS * PITCH));
        seen |= fa_pair_not_finite(x.x) | fa_pair_not_finite(x.y) | fa_pair_not_finite(x.z) |
                fa_pair_not_finite(x.w);
    }
    return seen != 0;
}

/* ---- Q K^T ----------------------------------------------------------------------------------- */

FA_DEVICE void clear_scores(fa_scores *s)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) s->at[m][n][e] = 0.0f;
}

FA_DEVICE void get_query_part(uint32_t a[M_TILES][4], const fa_queries *q, int step)
{
#if KEPT_STEPS > 0
    if (step < KEPT_STEPS) {
#pragma unroll
        for (int i = 0; i < M_TILES * 4; i++) a[i / 4][i % 4] = q->kept[i / 4][step][i % 4];
        return;
    }
#endif
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
        fa_load_matrices(a[m], q->at + (uint32_t)(m * 16 * PITCH + step * 32));
}

/* Keys 16 * pair .. 16 * pair + 15 and columns 16 * step .. 16 * step + 15, as number step * KEY_PAIRS + pair. */
enum { KEY_PAIRS = OWN_KEYS / 16 };

FA_DEVICE void load_keys(uint32_t b[4], uint32_t k, int i)
{
    fa_load_matrices(b, k + (uint32_t)(i % KEY_PAIRS * 16 * PITCH + i / KEY_PAIRS * 32));
}

/* Steps from .. to - 1 along d. Fragments are loaded while the products of those before run. */
FA_DEVICE void add_scores(fa_scores *s, const fa_queries *q, uint32_t k, int from, int to)
{
    uint32_t a[2][M_TILES][4], b[2][4];
    get_query_part(a[from % 2], q, from);
    load_keys(b[0], k, from * KEY_PAIRS);
#pragma unroll
    for (int i = 0; i < (to - from) * KEY_PAIRS; i++) {
        const int step = from + i / KEY_PAIRS, pair = i % KEY_PAIRS;
        const uint32_t *now = b[i % 2];
        if (i + 1 < (to - from) * KEY_PAIRS) load_keys(b[(i + 1) % 2], k, from * KEY_PAIRS + i + 1);
        if (pair == KEY_PAIRS - 1 && step + 1 < to) get_query_part(a[(step + 1) % 2], q, step + 1);
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            fa_mma(s->at[m][2 * pair], a[step % 2][m], now[0], now[1]);
            fa_mma(s->at[m][2 * pair + 1], a[step % 2][m], now[2], now[3]);
        }
    }
}

FA_DEVICE void make_scores(fa_scores *s, const fa_queries *q, uint32_t k)
{
    clear_scores(s);
    add_scores(s, q, k, 0, D_STEPS);
}

/* ---- Logits ---------------------------------------------------------------------------------- */

/* What row r of the block's tile sees, counted from `first` on. Rows behind the last query count as
 * it. */
FA_DEVICE void visible_part(const fa_walk *w, int r, int first, int *lo, int *hi)
{
    const int row = r < w->last ? r : w->last, end = w->hi + row;
    *lo = w->lo + row - first;
    *hi = (end < w->keys ? end : w->keys) - first;
}

#if !OPTIONS
/* left: whether some rows do not see the first of the keys. */
FA_DEVICE void mask_scores(const fa_walk *w, int first, bool left, fa_scores *s)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int lo, hi;
            const int column = 2 * (lane_id() % 4);
            visible_part(w, row_of(m, half), first + column, &lo, &hi);
            if (left) fa_hide_fragment(s->at[m][0], half, lo, hi);
            else fa_hide_behind(s->at[m][0], half, hi);
        }
}
#else
/* Scores become exponents of 2. */
FA_DEVICE void make_general_logits(const fa_attention_params *p, const fa_tile *t, const fa_walk *w,
                                   int first, float scale, fa_scores *s)
{
    const int column = 2 * (lane_id() % 4);
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        fa_scale_fragment(p, scale, s->at[m][0]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int lo, hi;
            const int r = row_of(m, half);
            visible_part(w, r, first + column, &lo, &hi);
            if (fa_changes_rows(p)) {
                const int64_t i = fa_min64(t->first + r, t->n_q - 1);
                const fa_fragment_row row = {fa_logit_row_of(p, t, i), w->start + first + column,
                                             lo, hi};
                fa_change_row(p, s->at[m][0], half, &row);
            }
            fa_hide_fragment(s->at[m][0], half, lo, hi);
        }
    }
}

/* Whether weights can be 0 where a row sees the key by its position. */
FA_DEVICE bool hides_keys(const fa_attention_params *p)
{
    return p->bias.data || p->mask.data || p->dropout_threshold;
}

/* Drops weights of 32 keys, or of as many as the warp has, of one row: a thread's columns 2t, 2t + 1,
 * 2t + 8, ... take their bits from one Philox block. key: where the weights begin among them. */
FA_DEVICE void drop_row(const fa_attention_params *p, const uint32_t block[4], int key, int m,
                        int half, int first, fa_weights *weights)
{
    enum { COUNT = KEY_TILES < 4 ? KEY_TILES : 4 };
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        const uint32_t bits = COUNT == 4 || key == 0 ? block[n] : block[n + 4 - COUNT];
        const uint32_t low = (bits & 0xffffu) >= p->dropout_threshold;
        const uint32_t high = (bits >> 16) >= p->dropout_threshold;
        const uint32_t kept = low * 0xffffu | high * 0xffff0000u;
        set_pair(weights, m, first + n, half, get_pair(weights, m, first + n, half) & kept);
    }
}

/* start: the key of the warp's first weights. */
FA_DEVICE void drop_weights(const fa_attention_params *p, const fa_tile *t, int64_t start,
                            fa_weights *weights)
{
    const fa_dropout d = fa_dropout_of(p, t);
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int n = 0; n < KEY_TILES; n += 4) {
                uint32_t block[4];
                fa_dropout_block(d.seed, d.offset, d.batch_head, t->first + row_of(m, half),
                                 start / 32 + n / 4, lane_id() % 4, block);
                drop_row(p, block, (int)(start & 31), m, half, n, weights);
            }
}
#endif

/* ---- Softmax --------------------------------------------------------------------------------- */

/* The largest of this tile's scores in row g (half 0) or g + 8, the same in all four lanes. */
FA_DEVICE float row_maximum(const fa_scores *s, int m, int half)
{
    float top = s->at[m][0][2 * half];
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++)
        top = fmaxf(top, fmaxf(s->at[m][n][2 * half], s->at[m][n][2 * half + 1]));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    return fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
}

/* Makes `top` the maximum of the rows where it has grown too far, and rescales what was summed. */
FA_DEVICE void raise_maximum(fa_output *o, float top[M_TILES][2])
{
    int summed = 0;
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float old = o->max[m][half];
            const float now = top[m][half] > old + RESCALE_ABOVE ? top[m][half] - HEADROOM : old;
            const float factor = fa_exp2_fast(old - now);
            summed |= old != LOWEST;
            o->max[m][half] = now;
            o->sum[m][half] *= factor;
            top[m][half] = factor;
        }
    if (!__any_sync(0xffffffffu, summed)) return; /* there is nothing to rescale */
#pragma unroll
    for (int i = 0; i < M_TILES * D_TILES * 4; i++)
        o->at[i / 4 / D_TILES][i / 4 % D_TILES][i % 4] *= top[i / 4 / D_TILES][i % 4 / 2];
}

/* A number for each row, which the warps of the group tell each other. Who calls has all four lanes
 * of a row hold the same. */
FA_DEVICE void tell_group(const fa_memory *at, float x[M_TILES][2])
{
    const uint32_t to = at->numbers + (uint32_t)(fa_thread_id() / 32 * GROUP_ROWS * 4);
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++)
        if (lane_id() % 4 == 0)
            fa_shared_store_float(to + (uint32_t)(4 * (8 * i + lane_id() / 4)), x[i / 2][i % 2]);
    meet_group();
}

/* What the warp number `share` has told of row 8 * i + g. */
FA_DEVICE float ask_group(const fa_memory *at, int share, int i)
{
    const int row = (group_id() * SPLIT + share) * GROUP_ROWS + 8 * i + lane_id() / 4;
    return fa_shared_load_float(at->numbers + (uint32_t)(4 * row));
}

FA_DEVICE void follow_maximum(const fa_memory *at, fa_output *o, const fa_scores *s, float scale)
{
    float top[M_TILES][2];
    int grown = 0;
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) top[m][half] = row_maximum(s, m, half) * scale;
    if (SPLIT > 1) {
        tell_group(at, top);
#pragma unroll
        for (int i = 0; i < M_TILES * 2; i++)
#pragma unroll
            for (int share = 0; share < SPLIT; share++)
                top[i / 2][i % 2] = fmaxf(top[i / 2][i % 2], ask_group(at, share, i));
    }
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++)
        grown |= top[i / 2][i % 2] > o->max[i / 2][i % 2] + RESCALE_ABOVE;
    if (__any_sync(0xffffffffu, grown)) raise_maximum(o, top);
}

/* Two weights of the thread. */
FA_DEVICE void make_weight_pair(fa_weights *p, const fa_scores *s, const fa_output *o, float scale,
                                int m, int n, int half, float sum[M_TILES][2])
{
    const float *x = s->at[m][n] + 2 * half;
    const float even = fa_exp2_fast(fmaf(x[0], scale, -o->max[m][half]));
    const float odd = fa_exp2_fast(fmaf(x[1], scale, -o->max[m][half]));
    sum[m][half] += even + odd;
    set_pair(p, m, n, half, fa_pack_pair(even, odd));
}

FA_DEVICE void make_weights(fa_weights *p, const fa_scores *s, fa_output *o, float scale)
{
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
        for (int i = 0; i < M_TILES * 2; i++)
            make_weight_pair(p, s, o, scale, i / 2, n, i % 2, o->sum);
}

/* ---- P V ------------------------------------------------------------------------------------- */

/* The A fragments of 16 keys. shown: where this lane's row of the group's weights begins. */
FA_DEVICE void get_weights(uint32_t a[M_TILES][4], const fa_weights *p, uint32_t shown, int step)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#if SPLIT > 1
        fa_load_matrices(a[m], shown + (uint32_t)(m * 16 * WEIGHTS_PITCH + 32 * step));
    (void)p;
#else
#pragma unroll
        for (int i = 0; i < 4; i++) a[m][i] = p->at[m][2 * step + i / 2][i % 2];
    (void)shown;
#endif
}

/* The products of 16 keys and of columns 16 * pair .. 16 * pair + 15. One transposed ldmatrix
 * gives the B fragments of both. */
FA_DEVICE void add_values_part(fa_output *o, uint32_t a[M_TILES][4], uint32_t v, int step, int pair)
{
    uint32_t b[4];
    fa_load_matrices_transposed(b, v + (uint32_t)(step * 16 * PITCH + pair * 32));
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        fa_mma(o->at[m][2 * pair], a[m], b[0], b[1]);
        fa_mma(o->at[m][2 * pair + 1], a[m], b[2], b[3]);
    }
}

FA_DEVICE void add_values(fa_output *o, const fa_weights *p, uint32_t shown, uint32_t v)
{
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++) {
        uint32_t a[M_TILES][4];
        get_weights(a, p, shown, step);
#pragma unroll
        for (int pair = 0; pair < D_TILES / 2; pair++) add_values_part(o, a, v, step, pair);
    }
}

#if MAX_FREE
/* The average of a thread's sums of the rows' weights so far, and the smallest one of a quarter of a row. */
FA_DEVICE float average_sum(const fa_output *o, float *least)
{
    float sum = 0.0f;
    *least = INFINITY;
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) {
        float row = o->sum[i / 2][i % 2];
        row += __shfl_xor_sync(0xffffffffu, row, 1);
        row += __shfl_xor_sync(0xffffffffu, row, 2);
        *least = fminf(*least, 0.25f * row);
        sum += 0.25f * row;
    }
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        *least = fminf(*least, __shfl_xor_sync(0xffffffffu, *least, lanes));
    }
    return sum / (8 * M_TILES * 2);
}

/* Keys are weighed CHUNKS times in a tile. A chunk has UNITS pairs of weights; while it is made,
 * the mma of the chunk before go on, PARTS times one ldmatrix and what multiplies with it. */
enum {
    CHUNKS = OWN_KEYS / WEIGHED_KEYS,
    CHUNK_STEPS = WEIGHED_KEYS / 16,
    PARTS = CHUNK_STEPS * D_TILES / 2,
    UNITS = M_TILES * WEIGHED_KEYS / 8 * 2,
    UNITS_A_PART = (UNITS + PARTS - 1) / PARTS
};

#if SPLIT == 1

FA_DEVICE void weigh_unit(fa_weights *p, const fa_scores *s, const fa_output *o, float scale,
                          int chunk, int unit, float sum[M_TILES][2])
{
    const int n = chunk * (WEIGHED_KEYS / 8) + unit / (2 * M_TILES);
    make_weight_pair(p, s, o, scale, unit / 2 % M_TILES, n, unit % 2, sum);
}

/* O += P V of one chunk, in between the weights of the next. */
FA_DEVICE void add_values_and_weigh(fa_output *o, fa_weights *p, const fa_scores *s, float scale,
                                    uint32_t v, int chunk, float sum[M_TILES][2])
{
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const int step = chunk * CHUNK_STEPS + part / (D_TILES / 2);
        uint32_t a[M_TILES][4];
        get_weights(a, p, 0, step);
        add_values_part(o, a, v, step, part % (D_TILES / 2));
        if (chunk + 1 == CHUNKS) continue;
#pragma unroll
        for (int i = 0; i < UNITS_A_PART; i++)
            if (part * UNITS_A_PART + i < UNITS)
                weigh_unit(p, s, o, scale, chunk + 1, part * UNITS_A_PART + i, sum);
    }
}

/* Whether all rows' sums of a chunk are in bounds, and no NaN; if so, or if they are sure to be as good as
 * can be, they are counted. */
FA_DEVICE bool take_sums(fa_output *o, float sum[M_TILES][2], float bound, bool sure)
{
    int large = 0;
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) large |= !(sum[i / 2][i % 2] <= bound);
    if (__any_sync(0xffffffffu, large && !sure)) return false;
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) {
        o->sum[i / 2][i % 2] += sum[i / 2][i % 2];
        sum[i / 2][i % 2] = 0.0f;
    }
    return true;
}

/* The softmax of a tile and O += P V; before, the first chunk has been weighed. Returns how many
 * chunks are done: not all if the weights of the one after are too large for its rows' bases. */
FA_DEVICE int multiply_chunks(fa_output *o, fa_weights *p, const fa_scores *s, float scale,
                              uint32_t v, float sum[M_TILES][2], float bound, bool sure)
{
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        if (!take_sums(o, sum, bound, sure)) return chunk;
        add_values_and_weigh(o, p, s, scale, v, chunk, sum);
    }
    return CHUNKS;
}

FA_DEVICE void weigh_first_chunk(fa_weights *p, const fa_scores *s, const fa_output *o, float scale,
                                 float sum[M_TILES][2])
{
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++) weigh_unit(p, s, o, scale, 0, unit, sum);
}

/* The softmax of a tile and O += P V without maxima. Returns how many chunks are done: none if a row has
 * no base yet, for its weights are infinite then. */
FA_DEVICE int weigh_tile(fa_output *o, const fa_scores *s, float scale, const fa_memory *at,
                         uint32_t v, float bound, bool sure)
{
    fa_weights weights;
    float sum[M_TILES][2] = {{0.0f}};
    (void)at;
    weigh_first_chunk(&weights, s, o, scale, sum);
    return multiply_chunks(o, &weights, s, scale, v, sum, bound, sure);
}
#else
/* The same for warps that share rows: they lay down all weights before the first product, and where one
 * has a weight too large, none goes on. */
FA_DEVICE int weigh_tile(fa_output *o, const fa_scores *s, float scale, const fa_memory *at,
                         uint32_t v, float bound, bool sure)
{
    fa_weights weights = place_weights(at);
    float sum[M_TILES][2] = {{0.0f}};
    int large = 0;
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
        for (int i = 0; i < M_TILES * 2; i++)
            make_weight_pair(&weights, s, o, scale, i / 2, n, i % 2, sum);
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) large |= !(sum[i / 2][i % 2] <= bound);
    if (fa_named_barrier_or(1 + group_id(), 32 * SPLIT, large && !sure)) return 0;
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) o->sum[i / 2][i % 2] += sum[i / 2][i % 2];
    add_values(o, &weights, shown_weights(at), v);
    return CHUNKS;
}
#endif

/* Takes the keys of the chunks that are done out of the scores. */
FA_DEVICE void hide_chunks(fa_scores *s, int done)
{
#pragma unroll
    for (int i = 0; i < M_TILES * KEY_TILES * 4; i++)
        if (i / 4 % KEY_TILES / (WEIGHED_KEYS / 8) < done)
            s->at[i / 4 / KEY_TILES][i / 4 % KEY_TILES][i % 4] = -INFINITY;
}
#endif

/* Ones where a half is not finite, but for the infinity of sign `without`; else zeros. */
FA_DEVICE uint32_t mark_pair(uint32_t b, uint32_t without)
{
    const uint32_t other = b ^ (FA_PAIR_EXPONENTS | without);
    return FA_PAIR_ONES & fa_pair_spread(fa_pair_not_finite(b)) &
           fa_pair_spread(fa_pair_not_zero(other) | (other & 0x80008000u));
}

/* Ones where a weight is not 0. */
FA_DEVICE uint32_t mark_weights(uint32_t pair)
{
    return FA_PAIR_ONES & fa_pair_spread(fa_pair_not_zero(pair));
}

/* O += P V of 16 keys and of what is finite. v: where this lane's fragments of these keys begin. */
FA_DEVICE void add_finite_values(fa_output *o, uint32_t a[M_TILES][4], uint32_t v)
{
#pragma unroll
    for (int pair = 0; pair < D_TILES / 2; pair++) {
        uint32_t b[4];
        fa_load_matrices_transposed(b, v + (uint32_t)(pair * 32));
#pragma unroll
        for (int i = 0; i < 4; i++) b[i] &= ~fa_pair_spread(fa_pair_not_finite(b[i]));
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            fa_mma(o->at[m][2 * pair], a[m], b[0], b[1]);
            fa_mma(o->at[m][2 * pair + 1], a[m], b[2], b[3]);
        }
    }
}

/* Adds infinity, or minus infinity, where one of these keys' values is that or NaN and has a
 * weight that is not 0. marks: ones in place of such weights. */
FA_DEVICE void add_infinities(fa_output *o, uint32_t marks[M_TILES][4], uint32_t v, bool negative)
{
    const uint32_t without = negative ? 0 : 0x80008000u;
    const float infinity = negative ? -INFINITY : INFINITY;
#pragma unroll
    for (int pair = 0; pair < D_TILES / 2; pair++) {
        uint32_t b[4];
        fa_load_matrices_transposed(b, v + (uint32_t)(pair * 32));
#pragma unroll
        for (int i = 0; i < 4; i++) b[i] = mark_pair(b[i], without);
#pragma unroll
        for (int i = 0; i < M_TILES * 2; i++) {
            float count[4] = {0.0f};
            fa_mma(count, marks[i / 2], b[i % 2 * 2], b[i % 2 * 2 + 1]);
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (count[e] > 0.0f) o->at[i / 2][2 * pair + i % 2][e] += infinity;
        }
    }
}

/* O += P V where values are not finite: sums of what is finite; then infinities of both signs,
 * which make NaN where they meet. The weights wait in memory, for the rare use of this path must
 * not take registers from the others. */
FA_DEVICE void add_values_carefully(fa_output *o, const fa_weights *p, uint32_t shown, uint32_t v)
{
    uint32_t waiting[KEY_STEPS][M_TILES][4];
#pragma unroll
    for (int step = 0; step < KEY_STEPS && SPLIT == 1; step++)
        get_weights(waiting[step], p, shown, step);
#pragma unroll 1
    for (int step = 0; step < KEY_STEPS; step++) {
        const uint32_t values = v + (uint32_t)(step * 16 * PITCH);
        uint32_t a[M_TILES][4];
        if (SPLIT > 1) get_weights(a, p, shown + (uint32_t)(32 * step), 0);
#pragma unroll
        for (int i = 0; i < M_TILES * 4 && SPLIT == 1; i++)
            a[i / 4][i % 4] = waiting[step][i / 4][i % 4];
        add_finite_values(o, a, values);
#pragma unroll
        for (int i = 0; i < M_TILES * 4; i++) a[i / 4][i % 4] = mark_weights(a[i / 4][i % 4]);
#pragma unroll 1
        for (int negative = 0; negative < 2; negative++) add_infinities(o, a, values, negative);
    }
}

/* ---- A tile of queries ----------------------------------------------------------------------- */

FA_DEVICE int clamp_position(int64_t key, int64_t start) { return (int)fa_max64(key - start, 0); }

/* What `count` rows of the tile from number r on see; rows behind the last query count as it. */
FA_DEVICE fa_seen find_seen(const fa_attention_params *p, const fa_tile *t, int64_t start, int r,
                            int count)
{
    fa_seen s;
    const int64_t end = t->n_q - 1, i = t->first + r;
    const fa_range first = fa_tile_visible(p, t, fa_min64(i, end));
    const fa_range last = fa_tile_visible(p, t, fa_min64(i + count - 1, end));
    s.from = clamp_position(first.lo, start);
    s.to = clamp_position(last.hi, start);
    s.all_from = clamp_position(last.lo, start);
    s.all_to = clamp_position(first.hi, start);
    return s;
}

/* What single rows see, and where keys and values lie. Far away is a tile beyond what a sequence has. */
FA_DEVICE void plan_rows(const fa_attention_params *p, const fa_tile *t, int64_t start, fa_walk *w)
{
    enum { TILE = 4096, FAR = 0x7fffffff - TILE };
    const int64_t center = t->first + t->diagonal - start;
    int64_t right = p->causal ? 0 : p->window_right;
    if (p->window_right >= 0) right = fa_min64(right, p->window_right);
    w->start = start;
    w->lo =
        p->window_left < 0 ? -TILE : (int)fa_max64(fa_min64(center - p->window_left, FAR), -TILE);
    w->hi = right < 0 ? FAR : (int)fa_max64(fa_min64(center + right + 1, FAR), -TILE);
    w->keys = (int)(t->n_k - start);
    w->last = (int)fa_min64(t->n_q - 1 - t->first, TILE);
    w->k = w->v = NULL;
    if (p->block_table) return;
    w->k = fa_view_row(&p->k, t->block_k, t->start_k + start, t->head_kv);
    w->v = fa_view_row(&p->v, t->block_k, t->start_k + start, t->head_kv);
}

/* What a group sees, or for part GROUPS the block. */
FA_DEVICE void plan_tiles(const fa_attention_params *p, const fa_tile *t, int64_t start, int part,
                          fa_walk *w)
{
    const bool group = part < GROUPS;
    const fa_seen seen =
        find_seen(p, t, start, group ? part * GROUP_ROWS : 0, group ? GROUP_ROWS : QUERIES);
    if (group) {
        w->group[part] = seen;
        return;
    }
    const bool rows = !p->block_table && p->k.vector == 8 && p->v.vector == 8;
    w->block = seen;
    w->tiles = seen.to > seen.from ? (seen.to + KEYS - 1) / KEYS : 0;
    w->plain_from = (seen.all_from + KEYS - 1) / KEYS;
    w->plain_to = rows ? seen.all_to / KEYS : 0;
    w->whole_to = rows ? seen.to / KEYS : 0;
}

/* Where the keys and values of tile number n lie; first: those of tile 0. */
FA_DEVICE uint32_t stage(const fa_memory *at, uint32_t first, int n)
{
    return STAGES == 1 ? first : first + (n & 1) * at->odd;
}

/* The memory of the task after one of so many tiles: its first goes to where there is room. */
FA_DEVICE fa_memory next_memory(const fa_memory *at, int tiles)
{
    fa_memory next = *at;
    if (STAGES == 1 || tiles % 2 == 0) return next;
    next.k += at->odd;
    next.v += at->odd;
    next.odd = 0 - at->odd;
    return next;
}

/* The row and piece that this lane names when the fragments of a tile's first 16 rows and columns are
 * loaded: by 8 x 8 matrices, A and the transposed V first down and then across, K the other way. */
FA_DEVICE uint32_t value_lane(int lane) { return (uint32_t)(lane % 16 * PITCH + lane / 16 * 16); }

FA_DEVICE uint32_t key_lane(int lane)
{
    return (uint32_t)((lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16);
}

/* Where this lane's fragments of values begin. */
FA_DEVICE uint32_t own_values(uint32_t tile)
{
    return tile + (uint32_t)(share_id() * COLUMNS * 2) + value_lane(lane_id());
}

/* Under a causal mask tile number n of a head, counted from 1 on, is n tiles of work. Of most heads n and
 * tiles + 1 - n are a pair; of the last ones n and tiles - n, if that lets the last round end earlier. */
typedef struct fa_turn {
    int64_t head;
    int first, second; /* the numbers of a pair's tiles; 0: there is none */
} fa_turn;

/* Pairs as long as a head has tiles: of an even number the middle ones of two heads are a pair, between theirs. */
FA_DEVICE fa_turn find_shorter(int64_t pair, int tiles, bool second)
{
    const int own = (tiles + 1) / 2, middles = tiles % 2 == 0;
    const int64_t two = fa_divide(pair, tiles + 1);
    const int i = (int)(pair - two * (tiles + 1)), k = i < own ? i : i - own - middles;
    fa_turn turn = {2 * two + (i >= own), tiles - k, k};
    if (middles && i == own) turn.head = 2 * two + second, turn.first = turn.second = own;
    return turn;
}

FA_DEVICE fa_turn find_pair(const fa_attention_params *p, int64_t pair, bool second)
{
    const int tiles = (int)p->tiles, own = (tiles + 1) / 2;
    const int64_t rest = pair - p->paired_heads * own, head = fa_divide(pair, own);
    if (rest >= 0) {
        fa_turn turn = find_shorter(rest, tiles, second);
        turn.head += p->paired_heads;
        return turn;
    }
    const int k = (int)(pair - head * own);
    const fa_turn turn = {head, tiles - k, 2 * k + 1 == tiles ? 0 : k + 1};
    return turn;
}

/* The task of the block's turn, as fa_find_tile counts: from the last tile on; -1: there is none. */
FA_DEVICE int64_t find_task(const fa_attention_params *p, int64_t number)
{
    const int64_t unit = blockIdx.x + (p->pairs ? number / 2 : number) * gridDim.x;
    if (unit >= (p->pairs ? p->pairs : p->tasks)) return -1;
    if (p->pairs == 0) return unit;
    const fa_turn turn = find_pair(p, unit, number % 2);
    const int tile = number % 2 ? turn.second : turn.first;
    if (tile == 0 || turn.head >= p->batch * p->heads_q) return -1;
    return turn.head * p->tiles + p->tiles - tile;
}

FA_DEVICE uint32_t count_turns(const fa_attention_params *p)
{
    const int64_t units = p->pairs ? p->pairs : p->tasks;
    const int64_t mine = fa_divide(units - blockIdx.x + gridDim.x - 1, gridDim.x);
    return (uint32_t)(p->pairs ? 2 * mine : mine);
}

/* Part of a task's description: what a group sees, what the block does, or where rows lie. */
FA_DEVICE void describe_part(const fa_attention_params *p, int64_t turn, int part, fa_task *to)
{
    const int64_t task = find_task(p, turn);
    fa_tile t = {0};
    if (task >= 0) t = fa_find_tile(p, task, QUERIES);
    if (part == GROUPS) {
        to->tile = t;
        to->walk.tiles = to->walk.whole_to = 0;
        to->walk.careful = 0;
    }
    if (t.first >= t.n_q) return;
    const int64_t start = fa_tile_visible(p, &t, t.first).lo / 32 * 32;
    if (part <= GROUPS) plan_tiles(p, &t, start, part, &to->walk);
    else plan_rows(p, &t, start, &to->walk);
}

/* Describes the tasks of `count` turns, side by side: their arithmetic is long, and the block waits for it. */
FA_DEVICE void describe_tasks(const fa_attention_params *p, int64_t turn, int count, fa_task *tasks)
{
    enum { PARTS = GROUPS + 2 };
    static_assert(2 * AHEAD * PARTS <= THREADS, "a thread for each part");
    const int i = fa_thread_id() / PARTS;
    if (i >= count) return;
    describe_part(p, turn + i, fa_thread_id() % PARTS, &tasks[(turn + i) % (2 * AHEAD)]);
}

FA_DEVICE void find_queries(fa_queries *q, const fa_memory *at)
{
    q->at = at->q + (uint32_t)(group_row() * PITCH) + value_lane(lane_id());
}

FA_DEVICE void keep_queries(fa_queries *q, const fa_memory *at)
{
#if KEPT_STEPS > 0
    find_queries(q, at);
#pragma unroll
    for (int i = 0; i < M_TILES * KEPT_STEPS; i++) {
        const int m = i / KEPT_STEPS, step = i % KEPT_STEPS;
        fa_load_matrices(q->kept[m][step], q->at + (uint32_t)(m * 16 * PITCH + step * 32));
    }
#else
    (void)q, (void)at;
#endif
}

/* What a thread keeps at hand, so that tiles need no look-up (without options: they need the registers). */
typedef struct fa_path {
    uint32_t q, k, v;          /* where this lane's fragments begin */
    uint32_t copy;             /* where this thread's pieces of keys go */
    bool k_inside, v_inside;   /* whether those pieces are of the rows */
    const char *k_row, *v_row; /* the piece of the first row of the tile to be copied next */
    float bound;               /* of a thread's sum of weights among WEIGHED_KEYS keys of a row */
    bool peaked;               /* the warp's rows have maxima in each tile */
} fa_path;

/* keys, values: the tiles that are to be copied next. */
FA_DEVICE fa_path find_path(const fa_attention_params *p, const fa_walk *w, const fa_memory *at,
                            int keys, int values)
{
    const int row = copied_row(), column = 8 * copied_piece(), lane = lane_id();
    fa_path path;
    path.q = at->q + (uint32_t)(group_row() * PITCH) + value_lane(lane);
    path.k = at->k + (uint32_t)(own_key() * PITCH) + key_lane(lane);
    path.v = own_values(at->v);
    path.copy = copied_place(at->k);
    path.k_inside = is_copier() && column < p->d;
    path.v_inside = is_copier() && column < p->d_v;
    path.k_row = w->k + 2 * (p->k.stride[1] * (row + keys * KEYS) + column);
    path.v_row = w->v + 2 * (p->v.stride[1] * (row + values * KEYS) + column);
    path.bound = SUM_BOUND;
    path.peaked = true;
    return path;
}

FA_DEVICE void keep_path(fa_path *path)
{
    path->q = fa_keep(path->q);
    path->k = fa_keep(path->k);
    path->v = fa_keep(path->v);
    path->copy = fa_keep(path->copy);
}

/* Starts the copy of a whole tile; returns where the next begins. */
FA_DEVICE const char *start_whole(const char *row, int64_t pitch, bool inside, uint32_t to)
{
    const int64_t ahead = pitch * ROWS_A_PASS;
    if (!is_copier()) return row;
#pragma unroll
    for (int pass = 0; pass < KEYS / ROWS_A_PASS; pass++, row += ahead)
        fa_copy_async(to + (uint32_t)(pass * ROWS_A_PASS * PITCH), row, inside);
    return row;
}

FA_DEVICE void start_whole_keys(const fa_attention_params *p, fa_path *path, uint32_t to)
{
    path->k_row = start_whole(path->k_row, 2 * p->k.stride[1], path->k_inside, to);
}

FA_DEVICE void start_whole_values(const fa_attention_params *p, fa_path *path, uint32_t to)
{
    path->v_row =
        start_whole(path->v_row, 2 * p->v.stride[1], path->v_inside, to + STAGES * TILE_BYTES);
}

/* block.from is below 32, so that tile 0 alone can be in front of it. */
FA_DEVICE bool is_whole(const fa_walk *w, int n)
{
    return n < w->whole_to && (n > 0 || w->block.from == 0);
}

/* Starts the copy of keys n, as of tiles one after the other. */
FA_DEVICE void start_keys(const fa_attention_params *p, const fa_task *task, const fa_memory *at,
                          int n, fa_path *path)
{
    const fa_walk *w = &task->walk;
#if OPTIONS
    fa_path found = find_path(p, w, at, n, n); /* options need the registers */
    path = &found;
#endif
    if (is_whole(w, n)) start_whole_keys(p, path, stage(at, path->copy, n));
    else if (n < w->tiles) {
        start_rows(p, &p->k, w->k, &task->tile, w, n * KEYS, p->d, stage(at, at->k, n));
        path->k_row += 2 * p->k.stride[1] * KEYS;
    }
}

FA_DEVICE void start_values(const fa_attention_params *p, const fa_task *task, const fa_memory *at,
                            int n, fa_path *path)
{
    const fa_walk *w = &task->walk;
#if OPTIONS
    fa_path found = find_path(p, w, at, n, n);
    path = &found;
#endif
    if (is_whole(w, n)) start_whole_values(p, path, stage(at, path->copy, n));
    else if (n < w->tiles) {
        start_rows(p, &p->v, w->v, &task->tile, w, n * KEYS, p->d_v, stage(at, at->v, n));
        path->v_row += 2 * p->v.stride[1] * KEYS;
    }
}

/* Waits for this thread's copies, and for the other threads to come here, too. Whether values n
 * are all finite is looked up where `searched`. */
FA_DEVICE void meet_block(fa_walk *w, const fa_memory *at, int n, bool searched)
{
    fa_wait_for_copies();
    if (searched) {
        const int found = __syncthreads_or(copied_not_finite(stage(at, at->v, n)));
        if (lane_id() == 0) w->odd_values[fa_thread_id() / 32] = found;
    } else __syncthreads();
}

FA_DEVICE bool odd_values(const fa_walk *w)
{
    __syncwarp();
    return w->odd_values[fa_thread_id() / 32];
}

FA_DEVICE void use_values(const fa_memory *at, const fa_weights *p, uint32_t tile, bool odd,
                          fa_output *o)
{
    const uint32_t shown = shown_weights(at);
    if (odd || MAX_FREE) add_values_carefully(o, p, shown, own_values(tile));
    else add_values(o, p, shown, own_values(tile));
}

/* The online softmax of a tile, and O += P V. odd: not all values are finite. */
FA_DEVICE void follow_tile(const fa_attention_params *p, const fa_tile *t, const fa_walk *w,
                           const fa_memory *at, int n, bool odd, const fa_scores *s, float scale,
                           fa_output *o)
{
    fa_weights weights = place_weights(at);
    follow_maximum(at, o, s, scale);
    make_weights(&weights, s, o, scale);
#if OPTIONS
    if (p->dropout_threshold) drop_weights(p, t, w->start + n * KEYS + own_key(), &weights);
#else
    (void)p, (void)t, (void)w;
#endif
    meet_group();
    use_values(at, &weights, stage(at, at->v, n), odd, o);
}

/* The scores of tile n, of whose keys some rows may not see some. Returns whether the warp's rows see some
 * of it. */
FA_DEVICE bool score_tile(const fa_attention_params *p, const fa_tile *t, const fa_walk *w,
                          const fa_memory *at, int n, fa_queries *q, float logit_scale,
                          fa_scores *s)
{
    const int first = n * KEYS;
    const fa_seen *mine = &w->group[group_id()];
    if (first >= mine->to || first + KEYS <= mine->from) return false;
    find_queries(q, at);
    make_scores(s, q, stage(at, at->k, n) + (uint32_t)(own_key() * PITCH) + key_lane(lane_id()));
#if OPTIONS
    make_general_logits(p, t, w, first + own_key(), logit_scale, s);
#else
    (void)p, (void)t, (void)logit_scale;
    if (first < mine->all_from || first + KEYS > mine->all_to)
        mask_scores(w, first + own_key(), first < mine->all_from, s);
#endif
    return true;
}

/* A tile that is copied next: of the same task, or the first of the next one. */
typedef struct fa_coming {
    const fa_task *task;
    fa_memory at;
    int n;
} fa_coming;

/* Whether there are keys to be seen; then copies for the task after it are under way at its end. */
FA_DEVICE bool has_keys(const fa_task *task)
{
    return task->tile.first < task->tile.n_q && task->walk.tiles > 0;
}

FA_DEVICE const fa_task *next_task(const fa_block *b)
{
    return &b->tasks[(b->turn + 1) % (2 * AHEAD)];
}

FA_DEVICE fa_coming find_coming(const fa_block *b, const fa_memory *at, int n)
{
    const bool last = n + 1 == b->now.walk.tiles;
    const fa_coming c = {last ? next_task(b) : &b->now, last ? next_memory(at, n + 1) : *at,
                         last ? 0 : n + 1};
    return c;
}

/* Where the rows of a task's first tile lie, and where they go, is new. */
FA_DEVICE void find_rows(const fa_attention_params *p, const fa_coming *c, fa_path *path)
{
    if (c->n > 0) return;
    const fa_path first = find_path(p, &c->task->walk, &c->at, 0, 0);
    if (STAGES == 2) path->copy = first.copy;
    path->k_row = first.k_row;
    path->v_row = first.v_row;
}

/* Tile n from its copies to its scores; returns whether the warp's rows see some of it. With two stages the
 * tile after it is on its way to where the one before was while tile n is used; with one stage values n
 * replace those before once keys n are there, and the next keys replace keys n once values n are there.
 * Behind the last tile comes the next task's first. Tile -1 stands for what is done before the block's first. */
FA_DEVICE bool bring_tile(const fa_attention_params *p, fa_block *b, const fa_memory *at, int n,
                          fa_path *path, fa_queries *q, bool searched, float logit_scale,
                          fa_scores *s)
{
    const fa_coming c = find_coming(b, at, n);
    fa_walk *w = &b->now.walk;
    bool here = false;
    if (n >= 0) meet_block(w, at, n, STAGES == 2 && searched);
    if (n == 0) keep_queries(q, at);
    if (STAGES == 2) {
        find_rows(p, &c, path);
        start_keys(p, c.task, &c.at, c.n, path);
        start_values(p, c.task, &c.at, c.n, path);
    } else if (n >= 0) start_values(p, &b->now, at, n, path);
    if (n >= 0) here = score_tile(p, &b->now.tile, w, at, n, q, logit_scale, s);
    if (STAGES == 1) {
        if (n >= 0) meet_block(w, at, n, searched);
        find_rows(p, &c, path);
        start_keys(p, c.task, &c.at, c.n, path);
    } else if (c.n == 0) __syncthreads(); /* all are done with the queries */
    return here;
}

#if MAX_FREE
/* Copies of tile n + 1 begin, of keys and, with two stages, of values. */
FA_DEVICE void start_next(const fa_attention_params *p, const fa_memory *at, int n, fa_path *path)
{
    const uint32_t to = stage(at, path->copy, n + 1);
    start_whole_keys(p, path, to);
    if (STAGES == 2) start_whole_values(p, path, to);
}

/* The scores. Once the first of their products are under way, copies begin: of this tile's values, or with
 * two stages of the next tile. */
FA_DEVICE void make_scores_and_copy(const fa_attention_params *p, const fa_memory *at, int n,
                                    fa_path *path, const fa_queries *q, fa_scores *s)
{
    const uint32_t k = stage(at, path->k, n);
    clear_scores(s);
    add_scores(s, q, k, 0, 1);
    if (STAGES == 2) start_next(p, at, n, path);
    else start_whole_values(p, path, path->copy);
    add_scores(s, q, k, 1, D_STEPS);
}

/* Whether the warp's rows are peaked, from the tiles so far, whose maxima are known; warps that share rows
 * agree. */
FA_DEVICE void judge_rows(const fa_output *o, int tiles, fa_path *path)
{
    float least;
    const float average = average_sum(o, &least) / (float)tiles;
    path->peaked = !(average >= FLAT_SUM && least >= PEAKED_SUM * (float)tiles);
    if (SPLIT > 1) path->peaked = fa_named_barrier_or(1 + group_id(), 32 * SPLIT, path->peaked);
    path->bound = fminf(LARGEST + FLAT_GROWTH * average * WEIGHED_KEYS / OWN_KEYS, SUM_BOUND);
}

/* The softmax and O += P V; with one stage the next keys' copies begin. */
FA_DEVICE int weigh_and_copy(const fa_attention_params *p, const fa_memory *at, int n,
                             fa_path *path, float scale, const fa_scores *s, fa_output *o)
{
    const uint32_t v = stage(at, path->v, n);
    if (path->peaked) follow_maximum(at, o, s, scale);
#if SPLIT == 1
    fa_weights weights;
    float sum[M_TILES][2] = {{0.0f}};
    weigh_first_chunk(&weights, s, o, scale, sum);
    if (STAGES == 1) start_next(p, at, n, path);
    return multiply_chunks(o, &weights, s, scale, v, sum, path->bound, path->peaked);
#else
    if (STAGES == 1) start_next(p, at, n, path);
    return weigh_tile(o, s, scale, at, v, path->bound, path->peaked);
#endif
}

/* Tile n, which all rows of the block see all of, as the next one. Returns how many chunks are done. */
FA_DEVICE int walk_tile(const fa_attention_params *p, const fa_walk *w, const fa_memory *at, int n,
                        fa_path *path, fa_queries *q, float scale, fa_scores *s, fa_output *o)
{
    fa_wait_for_copies();
    __syncthreads();
    q->at = path->q;
    make_scores_and_copy(p, at, n, path, q, s);
    if (STAGES == 1) {
        fa_wait_for_copies();
        __syncthreads();
        scale += fa_bits_float(w->careful); /* nothing: but exponentials begin behind the barrier */
    }
    return weigh_and_copy(p, at, n, path, scale, s, o);
}

/* Tiles from *n on to the last that all rows see all of, and of the next one too, or to one that is left to
 * finish_tile. *n is the last of them; returns how many of its chunks are done. */
FA_DEVICE int walk_tiles(const fa_attention_params *p, const fa_walk *w, const fa_memory *at,
                         int *n, fa_path *path, fa_queries *q, float scale, fa_scores *s,
                         fa_output *o)
{
    const int to = w->plain_to - 1;
    int done;
#pragma unroll 1
    do done = walk_tile(p, w, at, *n, path, q, scale, s, o);
    while (done == CHUNKS && ++*n < to);
    if (done == CHUNKS) --*n;
    return done;
}

/* The softmax of a tile and O += P V, but for the keys of the chunks that are done; sure: some row is known to
 * need another base. */
FA_DEVICE void finish_tile(fa_output *o, fa_scores *s, float scale, const fa_memory *at, uint32_t v,
                           int done, float bound, bool sure)
{
#pragma unroll 1
    for (;;) {
        if (sure) {
            if (done > 0) hide_chunks(s, done);
            follow_maximum(at, o, s, scale);
        }
        done = weigh_tile(o, s, scale, at, v, bound, sure);
        if (sure || done == CHUNKS) return;
        sure = true;
    }
}
#endif

FA_DEVICE void attend(const fa_attention_params *p, fa_block *b, const fa_memory *at, fa_output *o)
{
    const fa_tile *t = &b->now.tile;
    fa_walk *w = &b->now.walk;
#if OPTIONS
    const float logit_scale = fa_effective_scale(p, t), scale = 1.0f;
    const bool hides = hides_keys(p);
#else
    /* Above 0, so that -infinity stays -infinity. */
    const float scale = fmaxf(p->scale * FA_LOG2E, SMALLEST), logit_scale = 1.0f;
    const bool hides = false;
#endif
    fa_queries q;
    if (!b->begun) start_queries(p, t, at->q);
    fa_path path = find_path(p, w, at, 1, STAGES - 1);
    if (MAX_FREE) keep_path(&path);
    const int tiles = w->tiles;
#if MAX_FREE
    /* Not the first tile, which finds the bases. */
    const int plain_from = w->plain_from > 0 ? w->plain_from : 1, plain_to = w->plain_to - 1;
#endif
#pragma unroll 1
    for (int n = b->begun ? 0 : -1; n < tiles; n++) {
        fa_scores s;
        bool odd = false;
#if MAX_FREE
        int done = 0;
        bool sure = n == 0 || path.peaked;
        if (n == plain_from) judge_rows(o, n, &path);
        if (n >= plain_from && n < plain_to) {
            done = walk_tiles(p, w, at, &n, &path, &q, scale, &s, o);
            if (done == CHUNKS) continue;
            sure = true;
        } else
#endif
        {
            const int first = n * KEYS;
            const bool searched =
                w->careful && n >= 0 &&
                (hides || first < w->block.all_from || first + KEYS > w->block.all_to);
            if (!bring_tile(p, b, at, n, &path, &q, searched, logit_scale, &s)) continue;
            odd = searched && odd_values(w);
        }
#if MAX_FREE
        if (!odd) {
            finish_tile(o, &s, scale, at, own_values(stage(at, at->v, n)), done, path.bound, sure);
            continue;
        }
#endif
        follow_tile(p, t, w, at, n, odd, &s, scale, o);
    }
    /* Not before: the copies of the first keys are still on their way. */
    if (has_keys(next_task(b))) start_queries(p, &next_task(b)->tile, at->q);
}

/* ---- The end --------------------------------------------------------------------------------- */

FA_DEVICE void clear_output(fa_output *o)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            o->max[m][half] = LOWEST; /* not -infinity: 2^(-infinity - LOWEST) is 0 and not NaN */
            o->sum[m][half] = 0.0f;
        }
#pragma unroll
        for (int n = 0; n < D_TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) o->at[m][n][e] = 0.0f;
    }
}

/* Makes o->sum those of whole rows. */
FA_DEVICE void sum_rows(const fa_memory *at, fa_output *o)
{
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) {
        float *sum = &o->sum[i / 2][i % 2];
        *sum += __shfl_xor_sync(0xffffffffu, *sum, 1);
        *sum += __shfl_xor_sync(0xffffffffu, *sum, 2);
    }
    if (SPLIT == 1) return;
    tell_group(at, o->sum);
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) {
        o->sum[i / 2][i % 2] = 0.0f;
#pragma unroll
        for (int share = 0; share < SPLIT; share++) o->sum[i / 2][i % 2] += ask_group(at, share, i);
    }
}

/* What row 8 * i + g of the warp's is multiplied by at last; writes its log-sum-exp. */
FA_DEVICE float finish_row(const fa_attention_params *p, const fa_tile *t, float max, float sum,
                           int i)
{
    const int64_t row = t->first + group_row() + 8 * i + lane_id() / 4;
    const float sink = p->sinks ? p->sinks[t->head] : -INFINITY;
    float lse, factor = fa_softmax_finish(max == LOWEST ? -INFINITY : max * LN2, sum, sink, &lse);
    if (row >= t->n_q) lse = -INFINITY, factor = 0.0f;
    if (row < t->room_q && p->lse && lane_id() % 4 == i && share_id() == 0)
        p->lse[(t->block_q * p->heads_q + t->head) * p->rows_q + t->start_q + row] = lse;
#if OPTIONS
    if (p->dropout_threshold) factor *= p->dropout_scale;
#endif
    return factor;
}

/* The factors of a thread's rows: each of the four lanes that have them in common finishes one. */
FA_DEVICE void finish_rows(const fa_attention_params *p, const fa_tile *t, const fa_output *o,
                           float factor[M_TILES][2])
{
    const int own = lane_id() % (2 * M_TILES);
    float max = o->max[0][0], sum = o->sum[0][0];
#pragma unroll
    for (int i = 1; i < 2 * M_TILES; i++) {
        max = own == i ? o->max[i / 2][i % 2] : max;
        sum = own == i ? o->sum[i / 2][i % 2] : sum;
    }
    const float mine = finish_row(p, t, max, sum, own);
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; i++)
        factor[i / 2][i % 2] = __shfl_sync(0xffffffffu, mine, lane_id() / 4 * 4 + i);
}

/* Four lanes change words: lane t gets all lanes' words t. */
FA_DEVICE void change_words(uint32_t x[4])
{
    const int t = lane_id() % 4;
#pragma unroll
    for (int i = 0; i < 4; i++) { /* first with the neighbour, then with the one after it */
        const int bit = i < 2 ? 1 : 2, low = i == 0 ? 0 : i == 1 ? 2 : i - 2;
        const bool upper = (t & bit) != 0;
        const uint32_t mine = upper ? x[low] : x[low + bit];
        const uint32_t other = __shfl_xor_sync(0xffffffffu, mine, bit);
        if (upper) x[low] = other;
        else x[low + bit] = other;
    }
}

/* Elements of a row that ends before column `columns`, one by one. */
FA_DEVICE void scatter_pair(char *row, int column, int columns, uint32_t pair)
{
    if (column < columns) ((uint16_t *)row)[column] = (uint16_t)pair;
    if (column + 1 < columns) ((uint16_t *)row)[column + 1] = (uint16_t)(pair >> 16);
}

/* Four pairs of a thread's part of a row, from column 32 * n of the warp's on. */
FA_DEVICE void get_pairs(const fa_output *o, int m, int half, int n, float factor, uint32_t x[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float *from = o->at[m][4 * n + i] + 2 * half;
        x[i] = fa_pack_pair(from[0] * factor, from[1] * factor);
    }
}

/* Sixteen bytes at a time. */
FA_DEVICE void write_pieces(const fa_attention_params *p, const fa_output *o,
                            float factors[M_TILES][2], char *rows, int count)
{
    const int column = share_id() * COLUMNS + lane_id() % 4 * 8;
    char *row = rows + 2 * (row_of(0, 0) * p->out.stride[1] + column);
    const int64_t ahead = 16 * p->out.stride[1];
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++, row += ahead) {
        const int columns = row_of(i / 2, i % 2) < count ? p->d_v : 0;
#pragma unroll
        for (int n = 0; n < D_TILES / 4; n++) {
            uint32_t x[4];
            get_pairs(o, i / 2, i % 2, n, factors[i / 2][i % 2], x);
            change_words(x);
            if (column + 32 * n < columns)
                *(uint4 *)(row + 64 * n) = make_uint4(x[0], x[1], x[2], x[3]);
        }
    }
}

/* One by one, and zeros for a factor of 0, whatever the row holds. The pairs wait in memory, for this must not
 * become much code. */
FA_DEVICE void write_elements(const fa_attention_params *p, const fa_output *o,
                              float factors[M_TILES][2], char *rows, int count)
{
    const int first = share_id() * COLUMNS + lane_id() % 4 * 2;
    uint32_t waiting[M_TILES * 2 * D_TILES];
#pragma unroll
    for (int i = 0; i < M_TILES * 2 * D_TILES / 4; i++) {
        const int row = i / (D_TILES / 4);
        const float factor = factors[row / 2][row % 2];
        get_pairs(o, row / 2, row % 2, i % (D_TILES / 4), factor, waiting + 4 * i);
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (factor == 0.0f) waiting[4 * i + k] = 0;
    }
#pragma unroll 1
    for (int i = 0; i < M_TILES * 2 * D_TILES; i++) {
        const int row = i / D_TILES, r = row_of(row / 2, row % 2);
        if (r >= count) return;
        scatter_pair(rows + 2 * r * p->out.stride[1], first + i % D_TILES * 8, p->d_v, waiting[i]);
    }
}

FA_DEVICE void write_output(const fa_attention_params *p, const fa_tile *t, const fa_output *o)
{
    char *rows = fa_view_row(&p->out, t->block_q, t->start_q + t->first, t->head);
    const int count = (int)fa_min64(t->room_q - t->first, QUERIES);
    float factors[M_TILES][2];
    int zeros = 0;
    finish_rows(p, t, o, factors);
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) zeros |= factors[i / 2][i % 2] == 0.0f;
    if (p->out.vector == 8 && !__any_sync(0xffffffffu, zeros))
        write_pieces(p, o, factors, rows, count);
    else write_elements(p, o, factors, rows, count);
}

/* Whether a value that is not finite may have reached one of the thread's rows that must not see it: times its
 * weight of 0 it made a NaN. Rare, so nobody looks for such values before. */
FA_DEVICE bool is_suspect(const fa_attention_params *p, const fa_walk *w, const fa_output *o)
{
    float zero[4] = {0.0f};
#if OPTIONS
    const bool hides = hides_keys(p);
#else
    const bool hides = false;
    (void)p;
#endif
    if (!hides && w->block.all_from <= w->block.from && w->block.all_to >= w->block.to)
        return false;
#pragma unroll
    for (int i = 0; i < M_TILES * D_TILES * 4; i++)
        zero[i % 4] = fmaf(o->at[i / 4 / D_TILES][i / 4 % D_TILES][i % 4], 0.0f, zero[i % 4]);
    return zero[0] + zero[1] + zero[2] + zero[3] != 0.0f;
}

/* Returns whether this thread saw that the task must be done once more. */
FA_DEVICE bool run_task(const fa_attention_params *p, fa_block *b, const fa_memory *at)
{
    fa_task *now = &b->now;
    fa_output o;
    bool suspect = false;
    if (now->tile.first >= now->tile.room_q) return false;
    clear_output(&o);
    if (has_keys(now)) {
        attend(p, b, at, &o);
        suspect = !now->walk.careful && is_suspect(p, &now->walk, &o);
    }
    sum_rows(at, &o);
    write_output(p, &now->tile, &o);
    return suspect;
}

/* By words, for all warps wait. */
FA_DEVICE void copy_task(const fa_task *from, fa_task *to)
{
    static_assert(sizeof(fa_task) % 4 == 0 && sizeof(fa_task) / 4 <= THREADS, "a word a thread");
    const int i = fa_thread_id();
    if (i < (int)sizeof(fa_task) / 4) ((uint32_t *)to)[i] = ((const uint32_t *)from)[i];
}

FA_DEVICE fa_memory find_memory(const void *memory)
{
    fa_memory at;
    at.q = fa_keep(fa_shared_address(memory));
    at.k = at.q + QUERIES * PITCH;
    at.v = at.k + STAGES * TILE_BYTES;
    at.odd = TILE_BYTES;
    at.weights = at.v + STAGES * TILE_BYTES;
    at.numbers = at.weights + QUERIES * WEIGHTS_PITCH;
    return at;
}

/* The block's turns and its first tasks. */
FA_DEVICE void begin_block(const fa_attention_params *p, fa_block *b, fa_task *tasks)
{
    if (fa_thread_id() == 0) {
        b->tasks = tasks;
        b->turn = 0;
        b->turns = count_turns(p);
        b->begun = 0;
    }
    describe_tasks(p, 0, 2 * AHEAD, tasks);
    __syncthreads();
    copy_task(&tasks[0], &b->now);
    __syncthreads();
}

/* Goes on to the next task, or does this one again if any thread asks for it. */
FA_DEVICE void end_turn(const fa_attention_params *p, fa_block *b, bool again)
{
    const uint32_t turn = b->turn + 1;
    const bool keys = has_keys(&b->now);
    fa_task *tasks = b->tasks;
    if (__syncthreads_or(again)) {
        fa_wait_for_copies(); /* of the next task, whose places are needed once more */
        if (fa_thread_id() == 0) b->begun = 0, b->now.walk.careful = 1;
    } else {
        if (fa_thread_id() == 0) b->begun = keys, b->turn = turn;
        copy_task(&tasks[turn % (2 * AHEAD)], &b->now);
        if (turn % AHEAD == 0 &&
            turn + AHEAD <= b->turns) /* also that there is none after the last */
            describe_tasks(p, turn + AHEAD, AHEAD, tasks);
    }
    __syncthreads();
}

FA_KERNEL __launch_bounds__(THREADS, BLOCKS)
    forward_sm80(const __grid_constant__ fa_attention_params p)
{
    FA_DYNAMIC_SHARED(memory);
    __shared__ fa_block block;
    fa_memory at = find_memory(memory);
    begin_block(&p, &block,
                (fa_task *)((char *)memory + FA_SM80_SMEM(ELEMENT, HEAD_DIM, WARPS, SPLIT,
                                                          GROUP_ROWS, KEYS, STAGES, AHEAD)) -
                    2 * AHEAD);
#pragma unroll 1
    while (block.turn < block.turns) {
        const bool again = run_task(&p, &block, &at);
        at = next_memory(&at, block.now.walk.tiles);
        end_turn(&p, &block, again);
    }
}
