/*
 * A JOINED variant does in one launch what otherwise takes three. There are three kinds of blocks:
 *
 *     prepares      rows of queries (log-sum-exp and delta), and clears sums of dQ: see prepare.cu
 *     multiplies    KEYS keys: all other files of this folder
 *     finishes      rounds sums of dQ and stores dQ: see finish.cu
 *
 * Blocks that prepare and finish are bound by memory. In separate launches the tensor cores would
 * wait for them. Here they run at the same time as blocks that multiply, and find more of their
 * data in the L2 cache.
 *
 * A unit is a key/value head of a batch item, or a split of it, with its query heads: only blocks
 * of the same unit depend on each other. Groups of units_together units follow each other in steps.
 * Step t has the blocks that prepare group t, those that multiply for group t - 1, and those that
 * finish group t - 2:
 *
 *     P0 | P1 M0 | P2 M1 F0 | P3 M2 F1 | ... | M(last) F(last - 1) | F(last)
 *
 * Within a step the blocks bound by memory are spread evenly among those that multiply: first those
 * that prepare, then those that finish.
 *
 * Each unit has two counters of its progress. A block that multiplies waits until all slices of its
 * unit's rows have been prepared. A block that finishes waits until all store warps of the unit's
 * blocks have added their dQ. Both wait only for blocks of earlier steps, which have lower numbers.
 * Blocks start in the order of their numbers and stay until they are done. So among the unfinished
 * blocks, the one with the lowest number waits for nobody, and there is no deadlock, however many
 * run at once.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_JOINED_CUH
#define FA_KERNELS_BACKWARD_SM90_JOINED_CUH

#include "backward_sm90/config.cuh"

#if JOINED

#include "backward_sm90/prepare_row.cuh"
#include "backward_sm90/work.cuh"
#include "common/divide.h"
#include "common/exchange.cuh"
#include "common/reduce.cuh"
#include "common/rows.cuh"
#include "common/sequence.cuh"
#include "common/x2.cuh"
#include "ptx/grid.cuh"
#include "ptx/semaphore.cuh"
#include "ptx/tma.cuh"

enum {
    SLICE_TILES = FA_BACKWARD_SM90_SLICE_TILES,
    SLICE_ROWS = SLICE_TILES * QUERIES,
    LANES = HEAD_DIM / 8,        /* that share a row */
    LANE_ROWS = THREADS / LANES, /* rows that the block's threads have at a time */
    ROWS_AT_ONCE = (SLICE_ROWS + LANE_ROWS - 1) / LANE_ROWS, /* of a lane: all */
    COLUMN_BLOCKS = COLUMNS / 8,                             /* of sums */
    SUM_BLOCK = QUERIES * 8 / 4,                             /* float4 of a block of columns */
    SUM_GROUPS = THREADS / 128, /* of threads that share such a block */
    QUADS = COLUMN_BLOCKS / 4,  /* of a tile: four blocks of columns */
    QUADS_AT_ONCE = (SLICE_TILES * QUADS + SUM_GROUPS - 1) / SUM_GROUPS /* of a group: all */
};
static_assert(THREADS % LANES == 0 && COLUMN_BLOCKS % 4 == 0 && SUM_BLOCK == 128, "whole shares");

typedef enum block_kind { BLOCK_PREPARES, BLOCK_MULTIPLIES, BLOCK_FINISHES } block_kind;

/* number: of the slice, among those of all query heads; or of the block, among those that
 * multiply. */
typedef struct joined_block {
    block_kind kind;
    int32_t number;
} joined_block;

/* ---- The order ------------------------------------------------------------------------------- */

/* Units of the groups before this one. */
FA_DEVICE int32_t units_before(const fa_backward_sm90_params *s, int32_t group)
{
    return max(0, min(group * s->units_together, s->units));
}

/* Blocks of the steps before this one. */
FA_DEVICE int32_t blocks_before(const fa_backward_sm90_params *s, int32_t step, int32_t tiles)
{
    return (units_before(s, step) + units_before(s, step - 2)) * s->slices +
           units_before(s, step - 1) * tiles;
}

/* The planner ensures that the number of blocks fits in 31 bits. */
FA_DEVICE joined_block find_joined_block(const fa_attention_params *p,
                                         const fa_backward_sm90_params *s, uint32_t block)
{
    const int32_t tiles = (int32_t)p->tiles, number = (int32_t)block;
    /* As if all steps were full: the first two and the last ones are not. */
    int32_t step = number / (s->units_together * (tiles + 2 * s->slices));
#pragma unroll 1
    while (blocks_before(s, step + 1, tiles) <= number) step++;
    const int32_t prepared = units_before(s, step), multiplied = units_before(s, step - 1),
                  finished = units_before(s, step - 2);
    const int32_t prepares = (units_before(s, step + 1) - prepared) * s->slices,
                  others = prepares + (multiplied - finished) * s->slices,
                  all = others + (prepared - multiplied) * tiles;
    const int32_t at = number - (prepared + finished) * s->slices - multiplied * tiles;
    const int64_t shares = (int64_t)at * others;
    const int32_t before = (int32_t)fa_divide(shares, all); /* blocks bound by memory before it */
    joined_block found = {BLOCK_MULTIPLIES, multiplied * tiles + at - before};
    if (shares - (int64_t)before * all + others < all) return found;
    found.kind = before < prepares ? BLOCK_PREPARES : BLOCK_FINISHES;
    found.number = before < prepares ? prepared * s->slices + before
                                     : finished * s->slices + before - prepares;
    return found;
}

/* ---- A slice --------------------------------------------------------------------------------- */

/* Consecutive query tiles of a head. */
typedef struct row_slice {
    fa_tile tile;   /* the first one; without keys */
    int64_t number; /* of it in the workspace */
    int32_t unit;
    int32_t tiles;
} row_slice;

FA_DEVICE row_slice find_slice(const fa_backward_params *p, const fa_backward_sm90_params *s,
                               int32_t number)
{
    row_slice slice;
    const int32_t q_tiles = (int32_t)s->q_tiles, heads = (int32_t)p->a.heads_q;
    const int32_t outer = number / s->head_slices,
                  first = (number - outer * s->head_slices) * SLICE_TILES;
    slice.tile.batch = outer / heads;
    slice.tile.head = outer - (int32_t)slice.tile.batch * heads;
    fa_locate_padded(&p->a, first, QUERIES, &slice.tile);
    slice.number = (int64_t)outer * q_tiles + first;
    slice.unit = outer / s->unit_heads;
    slice.tiles = min(SLICE_TILES, q_tiles - first);
    return slice;
}

/* The sums of a slice's first tile; a thread's first four of them. */
FA_DEVICE float4 *slice_sums(const fa_backward_sm90_params *s, const row_slice *slice)
{
    return (float4 *)(void *)s->sums + slice->number * (SUM_BYTES / 16) + threadIdx.x % SUM_BLOCK;
}

/* ---- Rows, and zeros for sums ---------------------------------------------------------------- */

/* Row `first` of a slice, and the distance in bytes from a row to the next. */
typedef struct row_steps {
    char *first;
    int64_t step;
} row_steps;

FA_DEVICE row_steps find_rows(const fa_kernel_view *view, const row_slice *slice, int first)
{
    const fa_tile *t = &slice->tile;
    const row_steps rows = {fa_view_row(view, t->block_q, t->start_q + t->first + first, t->head),
                            view->stride[1] * 2};
    return rows;
}

/* Rows that are loaded with eight elements at once, by LANES lanes each. from: the lane's first
 * row. */
FA_DEVICE void load_elements(uint4 x[ROWS_AT_ONCE], const row_steps *rows, int from, int end,
                             bool has_columns)
{
    const char *row = rows->first + from * rows->step + 16 * (threadIdx.x % LANES);
#pragma unroll
    for (int n = 0; n < ROWS_AT_ONCE; n++) {
        x[n] = make_uint4(0, 0, 0, 0);
        if (from + n * LANE_ROWS < end && has_columns) x[n] = *(const uint4 *)row;
        row += LANE_ROWS * rows->step;
    }
}

FA_DEVICE void clear_sums(const fa_backward_sm90_params *s, const row_slice *slice)
{
    float4 *sums = slice_sums(s, slice);
#pragma unroll 1
    for (int tile = 0; tile < slice->tiles; tile++, sums += SUM_BYTES / 16)
#pragma unroll
        for (int n = 0; n < COLUMN_BLOCKS; n += SUM_GROUPS)
            if (n + (int)threadIdx.x / SUM_BLOCK < COLUMN_BLOCKS)
                sums[(n + (int)threadIdx.x / SUM_BLOCK) * SUM_BLOCK] = make_float4(0, 0, 0, 0);
}

/* A lane's numbers of its rows. none: the value for rows that do not exist. */
FA_DEVICE void load_numbers(float x[ROWS_AT_ONCE], const float *numbers, int from, int end,
                            float none)
{
    const bool leads = threadIdx.x % LANES == 0;
#pragma unroll
    for (int n = 0; n < ROWS_AT_ONCE; n++) {
        const int row = from + n * LANE_ROWS;
        x[n] = none;
        if (leads && row < end) x[n] = numbers[row];
    }
}

/* Rows of the slice. rows: the numbers of its first tile. */
FA_DEVICE float *rows_of(float *rows, int row) { return rows + (row & ~(QUERIES - 1)); }

/* All loads are issued before the first is used, and zeros are stored meanwhile. So a block runs
 * for little longer than the latency of memory. */
FA_DEVICE void prepare_vectors(const fa_backward_params *p, const fa_backward_sm90_params *s,
                               const row_slice *slice, float *rows)
{
    const row_steps dout = find_rows(&p->dout, slice, 0), out = find_rows(&p->a.out, slice, 0);
    const int64_t left = slice->tile.n_q - slice->tile.first, at = lse_index(p, &slice->tile, 0);
    const int from = (int)threadIdx.x / LANES;
    const int end = (int)fa_min64(left, slice->tiles * QUERIES);
    const bool has_columns = 8 * (int)(threadIdx.x % LANES) < p->a.d_v;
    uint4 x[ROWS_AT_ONCE], y[ROWS_AT_ONCE];
    float lse[ROWS_AT_ONCE], dlse[ROWS_AT_ONCE];
    load_elements(x, &dout, from, end, has_columns);
    load_elements(y, &out, from, end, has_columns);
    load_numbers(lse, p->a.lse + at, from, end, -INFINITY);
    load_numbers(dlse, p->dlse + at, from, p->dlse ? end : 0, 0.0f);
    if (p->dq.data) clear_sums(s, slice);
#pragma unroll
    for (int n = 0; n < ROWS_AT_ONCE; n++) {
        const int row = from + n * LANE_ROWS;
        const uint32_t a[4] = {x[n].x, x[n].y, x[n].z, x[n].w},
                       b[4] = {y[n].x, y[n].y, y[n].z, y[n].w};
        const float product = multiply_row(a, b, LANES);
        if (threadIdx.x % LANES == 0 && row < slice->tiles * QUERIES)
            put_numbers(rows_of(rows, row) + FA_BACKWARD_SM90_ROW_AT(row), lse[n],
                        lse[n] != -INFINITY ? product - dlse[n] : 0.0f);
    }
}

/* All other rows: a warp for each. */
FA_DEVICE void prepare_any_rows(const fa_backward_params *p, const row_slice *slice, float *rows)
{
    const int64_t left = slice->tile.n_q - slice->tile.first;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int row = (int)threadIdx.x / 32; row < slice->tiles * QUERIES; row += THREADS / 32) {
        const uint16_t *x = (const uint16_t *)(void *)find_rows(&p->dout, slice, row).first,
                       *y = (const uint16_t *)(void *)find_rows(&p->a.out, slice, row).first;
        float product = 0.0f;
#pragma unroll 1
        for (int c = lane; c < p->a.d_v && row < left; c += 32)
            product = fmaf(fa_unpack_x2(x[c], ELEMENT).x, fa_unpack_x2(y[c], ELEMENT).x, product);
        product = fa_warp_sum(product);
        if (lane == 0)
            prepare_row(p, &slice->tile, row, load_row_lse(p, &slice->tile, row), product,
                        rows_of(rows, row));
    }
}

/* Copies of other blocks read what is stored here, and add to it. So each thread needs a fence. */
FA_DEVICE void prepare_slice(const fa_backward_params *p, const fa_backward_sm90_params *s,
                             int32_t number)
{
    const row_slice slice = find_slice(p, s, number);
    float *rows = s->rows + slice.number * (2 * QUERIES);
    if (p->dout.vector == 8 && p->a.out.vector == 8) prepare_vectors(p, s, &slice, rows);
    else {
        if (p->dq.data) clear_sums(s, &slice);
        prepare_any_rows(p, &slice, rows);
    }
    ptx_fence_proxy_async_global();
    __syncthreads();
    if (threadIdx.x == 0) ptx_counter_add(&s->counters[2 * slice.unit]);
}

/* Executed by one thread of a block that multiplies: waits until the rows of its unit have been
 * prepared and its sums cleared. The next barrier tells the other threads; those that issue copies
 * have a fence of their own. */
FA_DEVICE void wait_until_prepared(const fa_attention_params *p, const fa_backward_sm90_params *s,
                                   int64_t number)
{
    const int32_t unit = (int32_t)fa_divide_by(find_task(p, s, number), s->divisors.tiles);
    ptx_wait_for_grids();
    ptx_counter_wait(&s->counters[2 * unit], s->slices);
    ptx_fence_proxy_async_global();
}

/* ---- Sums become dQ -------------------------------------------------------------------------- */

/* A thread's sums of four blocks of columns of a tile. quad: of the slice. */
FA_DEVICE void load_quad(float4 x[4], const float4 *sums, int quad)
{
    sums += quad / QUADS * (SUM_BYTES / 16) + quad % QUADS * (4 * SUM_BLOCK);
#pragma unroll
    for (int n = 0; n < 4; n++) x[n] = sums[n * SUM_BLOCK];
}

/* The thread's first row of a quad, counted from the slice's first row. Its second row comes 8 rows
 * later. */
FA_DEVICE int quad_row(int quad)
{
    const int thread = threadIdx.x % SUM_BLOCK;
    return quad / QUADS * QUERIES + thread / 32 * 16 + thread % 32 / 4;
}

/* The words of row `row` of the slice, the first or second of these two rows. Rows after the last
 * query get zeros, whatever keys they were multiplied with. */
FA_DEVICE void round_quad(uint32_t words[4], const float4 x[4], int r, float scale, bool is_query)
{
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const float low = r ? x[n].z : x[n].x, high = r ? x[n].w : x[n].y;
        words[n] = is_query ? fa_pack_x2(low * scale, high * scale) : 0;
    }
}

/* Rows that are stored with eight elements at once. All loads are issued before the first is
 * used. */
FA_DEVICE void finish_vectors(const fa_backward_params *p, const row_slice *slice,
                              const float4 *sums)
{
    const row_steps dq = find_rows(&p->dq, slice, 0);
    const int64_t left = slice->tile.n_q - slice->tile.first,
                  room = slice->tile.room_q - slice->tile.first;
    const int lane = threadIdx.x % 4, quads = slice->tiles * QUADS;
    const int from = (int)threadIdx.x / SUM_BLOCK;
    float4 x[QUADS_AT_ONCE][4];
#pragma unroll
    for (int n = 0; n < QUADS_AT_ONCE; n++)
        if (from + n * SUM_GROUPS < quads) load_quad(x[n], sums, from + n * SUM_GROUPS);
#pragma unroll
    for (int n = 0; n < QUADS_AT_ONCE; n++) {
        const int quad = from + n * SUM_GROUPS;
        if (quad >= quads) break;
        const int block = quad % QUADS * 4 + lane;
        char *to = dq.first + quad_row(quad) * dq.step + 16 * block;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = quad_row(quad) + 8 * r;
            uint32_t words[4];
            round_quad(words, x[n], r, p->a.scale, row < left);
            fa_exchange_words(words, lane);
            if (row < room && 8 * block < p->a.d)
                *(uint4 *)(to + 8 * r * dq.step) =
                    make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

/* All other rows. */
FA_DEVICE void finish_any_rows(const fa_backward_params *p, const row_slice *slice,
                               const float4 *sums)
{
    const int64_t left = slice->tile.n_q - slice->tile.first,
                  room = slice->tile.room_q - slice->tile.first;
#pragma unroll 1
    for (int quad = (int)threadIdx.x / SUM_BLOCK; quad < slice->tiles * QUADS; quad += SUM_GROUPS) {
        float4 x[4];
        load_quad(x, sums, quad);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = quad_row(quad) + 8 * r;
            char *to = find_rows(&p->dq, slice, row).first;
            uint32_t words[4];
            round_quad(words, x, r, p->a.scale, row < left);
#pragma unroll
            for (int n = 0; n < 4; n++)
                if (row < room)
                    fa_scatter_x2(to, 8 * (quad % QUADS * 4 + n) + 2 * (threadIdx.x % 4), p->a.d,
                                  words[n]);
        }
    }
}

FA_DEVICE void finish_slice(const fa_backward_params *p, const fa_backward_sm90_params *s,
                            int32_t number)
{
    const row_slice slice = find_slice(p, s, number);
    const float4 *sums = slice_sums(s, &slice);
    if (!p->dq.data) return;
    if (threadIdx.x == 0)
        ptx_counter_wait(&s->counters[2 * slice.unit + 1], STORE_WARPS * (int)p->a.tiles);
    __syncthreads();
    if (p->dq.vector == 8) finish_vectors(p, &slice, sums);
    else finish_any_rows(p, &slice, sums);
}

#endif

#endif
