/*
 * Keys and values in pages of few rows, copied by a warpgroup of its own: each of its threads copies 16 bytes at a time
 * (cp.async). TMA needs pages of at least eight rows, and an instruction for each page and block of columns.
 *
 *     warpgroup 0                  queries by TMA, the scheduler (forward_sm90.cu)
 *     CONSUMERS warpgroups         as with TMA
 *     the last one                 keys and values
 *
 * Eight neighbouring lanes copy a row's block of 64 columns, which the swizzle spans, and so the threads copy COPIED_ROWS
 * rows in a pass: rows of a thread are so far apart that they have the same swizzle. Each thread finds where one row of the tile
 * is, a tile ahead, because reading the block table takes long; the others get that by shuffles.
 *
 * Products read shared memory through another proxy than copies write it, and there must be a fence between the two. In the
 * copying warps it would wait for their next copies, too, and in the consumers delay products (3% and 1% of the time). So a warp
 * that has nothing else to do waits until a stage has been copied, fences, and lets consumers have the stage.
 *
 * Values come one tile behind keys, which is the order in which consumers release them.
 */
#ifndef FA_KERNELS_FORWARD_SM90_COPY_CUH
#define FA_KERNELS_FORWARD_SM90_COPY_CUH

#include "forward_sm90/config.cuh"
#include "common/device.cuh"
#include "common/sequence.cuh"
#include "forward_sm90/load.cuh"
#include "forward_sm90/pipeline.cuh"
#include "forward_sm90/producer.cuh"
#include "forward_sm90/scheduler.cuh"
#include "forward_sm90/stage.cuh"
#include "forward_sm90/warp.cuh"
#include "forward_sm90/work_tile.cuh"
#include "ptx/address.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/thread.cuh"
#include "ptx/tma.cuh"

#if COPIED

enum {
    COPY_BYTES = 16,                      /* of a thread */
    COPY_LANES = 128 / COPY_BYTES,        /* of a row's block of columns */
    COPIED_ROWS = WARPGROUP / COPY_LANES, /* of a pass: a multiple of the swizzle's 8 rows */
    COPY_PASSES = KEYS / COPIED_ROWS,
    PASSES_AHEAD = 4 /* whose addresses are found together */
};
static_assert(KEYS % COPIED_ROWS == 0 && COPY_PASSES <= COPY_LANES && COPIED_ROWS % 8 == 0,
              "each thread finds one row at most");
#define NO_ROW UINT32_MAX /* in place of an offset: zeros are written */

/* A thread's part of the copies. */
typedef struct copier {
    uint32_t k, v; /* addresses in shared memory of its 16 bytes in its first row of stage 0 */
    int column;    /* the first of its columns in a block */
    int row;       /* of the tile, whose place it finds */
} copier;

/* Where rows of a work tile are. */
typedef struct row_source {
    const char *k, *v;    /* the thread's columns of the first row of page 0 */
    const int32_t *table; /* of the sequence */
    int from, to;         /* keys that some query of the sequence may see */
} row_source;

/* Where the thread's row of a key tile is; row -1: it is not copied. */
typedef struct row_place {
    int32_t page, row;
} row_place;

/* Returns x, which the compiler takes for a new pointer. */
FA_DEVICE const char *hold_pointer(const char *x)
{
    __asm__ volatile("" : "+l"(x));
    return x;
}

FA_DEVICE copier begin_copier(const pipeline *pipe)
{
    const int thread = (int)threadIdx.x % WARPGROUP, first = thread / COPY_LANES,
              lane = thread % COPY_LANES;
    const uint32_t at = (uint32_t)(first * 128 + (lane ^ first % 8) * COPY_BYTES);
    const copier c = {ptx_shared_address(pipe->k) + at, ptx_shared_address(pipe->v) + at,
                      lane * COPY_BYTES / 2, first + COPIED_ROWS * lane};
    return c;
}

FA_DEVICE row_source find_source(const fa_attention_params *p, const copier *c, const fa_tile *t)
{
    const fa_range seen = find_seen_keys(p, t);
    row_source from;
    from.k = hold_pointer(fa_view_row(&p->k, 0, 0, t->head_kv) + 2 * c->column);
    from.v = hold_pointer(fa_view_row(&p->v, 0, 0, t->head_kv) + 2 * c->column);
    from.table = p->block_table + t->batch * p->block_table_stride;
    from.from = (int)seen.lo;
    from.to = (int)seen.hi;
    return from;
}

/* Starts to read the block table for a tile from key `key` on. */
FA_DEVICE row_place find_place(const fa_attention_params *p, const copier *c,
                               const row_source *from, int key)
{
    row_place place = {0, -1};
    const int own = key + c->row;
    if (c->row >= KEYS || own < from->from || own >= from->to) return place;
    const uint32_t page = (uint32_t)own / (uint32_t)p->rows_k;
    place.row = own - (int)(page * (uint32_t)p->rows_k);
    place.page = from->table[page];
    return place;
}

/* How far behind the first row the row is, in units of 16 bytes: the planner makes sure that this is less than 2^32. */
FA_DEVICE uint32_t find_offset(const fa_attention_params *p, const fa_kernel_view *view,
                               const row_place *place)
{
    if (place->row < 0) return NO_ROW;
    const uint32_t page = (uint32_t)fa_clamp_page(p, place->page);
    return page * (uint32_t)(view->stride[0] / 8) +
           (uint32_t)place->row * (uint32_t)(view->stride[1] / 8);
}

/* Issues the copies of a tile. own: the offset of the row that the thread has found. columns: of a row, behind the thread's first
 * one. whole: no row and no column is left out. */
FA_DEVICE void issue_copies(uint32_t to, const char *from, uint32_t own, int blocks, int columns,
                            bool whole)
{
#pragma unroll
    for (int first = 0; first < COPY_PASSES; first += PASSES_AHEAD) {
        uint32_t offsets[PASSES_AHEAD];
        const char *rows[PASSES_AHEAD];
#pragma unroll
        for (int i = 0; i < PASSES_AHEAD; i++) {
            offsets[i] = ptx_shuffle_within(own, first + i, COPY_LANES);
            rows[i] = hold_pointer(from + (uint64_t)offsets[i] * COPY_BYTES);
        }
#pragma unroll
        for (int i = 0; i < PASSES_AHEAD; i++)
#pragma unroll
            for (int block = 0; block < blocks; block++)
                if (first + i < COPY_PASSES)
                    ptx_cp_async_16(
                        to + (uint32_t)((first + i) * COPIED_ROWS * 128 + block * KV_BLOCK),
                        rows[i] + 128 * block,
                        whole || (offsets[i] != NO_ROW && block * BLOCK_COLUMNS < columns));
    }
}

/* The same; most tiles are whole. */
FA_DEVICE void issue_tile(uint32_t to, const char *from, uint32_t own, int blocks, int columns)
{
    const bool has_none = own == NO_ROW && (int)threadIdx.x % COPY_LANES < COPY_PASSES;
    if (__any_sync(0xffffffff, has_none || columns <= BLOCK_COLUMNS * (blocks - 1)))
        issue_copies(to, from, own, blocks, columns, false);
    else issue_copies(to, from, own, blocks, columns, true);
}

FA_DEVICE void copy_key_tile(const pipeline *pipe, const fa_attention_params *p, const copier *c,
                             const row_source *from, uint32_t offset, tile_count count)
{
    const int stage = stage_of(count);
    __syncwarp();
    ptx_mbarrier_wait(&pipe->state->k_empty[stage], parity_of(count) ^ 1);
    issue_tile(c->k + (uint32_t)stage * K_BYTES, from->k, offset, K_BLOCKS, p->d - c->column);
    ptx_mbarrier_arrive_behind_copies(&pipe->state->k_copied[stage]);
}

FA_DEVICE void copy_value_tile(const pipeline *pipe, const fa_attention_params *p, const copier *c,
                               const row_source *from, uint32_t offset, tile_count count)
{
    const int stage = stage_of(count);
    __syncwarp();
    ptx_mbarrier_wait(&pipe->state->v_empty[stage], parity_of(count) ^ 1);
    issue_tile(c->v + (uint32_t)stage * V_BYTES, from->v, offset, V_BLOCKS, p->d_v - c->column);
    ptx_mbarrier_arrive_behind_copies(&pipe->state->v_copied[stage]);
}

/* All keys and values of the block's work tiles: the last warpgroup. */
FA_DEVICE void copy_keys_and_values(const pipeline *pipe, const fa_attention_params *p,
                                    const fa_sm90_params *s)
{
    copier c = begin_copier(pipe);
    tile_to_load at = {acquire_first_keys(pipe, s), 0, 0};
    for (int number = 0; at.w->key_tiles;) {
        const row_source from = find_source(p, &c, &at.w->query_tile);
        const int first_key = at.w->first_key, tiles = at.w->key_tiles;
        row_place next = find_place(p, &c, &from, first_key);
        uint32_t values = NO_ROW; /* of the tile before */
        for (at.tile = 0; at.tile < tiles; at.tile++, at.count++) {
            const uint32_t keys = find_offset(p, &p->k, &next), own = find_offset(p, &p->v, &next);
            if (at.tile + 1 < tiles)
                next = find_place(p, &c, &from, first_key + (at.tile + 1) * KEYS);
            copy_key_tile(pipe, p, &c, &from, keys, at.count);
            if (at.tile > 0) copy_value_tile(pipe, p, &c, &from, values, at.count - 1);
            values = own;
            acquire_description(pipe, &at);
#if TAKES_LATE
            announce_last_keys(pipe, &at, number, threadIdx.x % WARPGROUP == 0);
#endif
        }
        copy_value_tile(pipe, p, &c, &from, values, at.count - 1);
        release_work_tile(pipe, number);
        at.w = acquire_work_tile(pipe, ++number);
    }
    ptx_cp_async_wait_all();
}

/* Lets consumers have what has been copied. */
FA_DEVICE void publish_stage(uint64_t *copied, uint64_t *full, int parity)
{
    __syncwarp();
    ptx_mbarrier_wait(copied, parity);
    ptx_fence_proxy_async();
    ptx_mbarrier_arrive_if(full, threadIdx.x % 32 == 0);
}

FA_DEVICE void publish_keys(const pipeline *pipe, tile_count count)
{
    const int stage = stage_of(count);
    publish_stage(&pipe->state->k_copied[stage], &pipe->state->k_full[stage], parity_of(count));
}

FA_DEVICE void publish_values(const pipeline *pipe, tile_count count)
{
    const int stage = stage_of(count);
    publish_stage(&pipe->state->v_copied[stage], &pipe->state->v_full[stage], parity_of(count));
}

/* All stages, in the order in which they are copied: a warp of the first warpgroup. */
FA_DEVICE void publish_copies(const pipeline *pipe, const fa_sm90_params *s)
{
    tile_to_load at = {acquire_first_keys(pipe, s), 0, 0};
    for (int number = 0; at.w->key_tiles;) {
        const int tiles = at.w->key_tiles;
        for (at.tile = 0; at.tile < tiles; at.tile++, at.count++) {
            publish_keys(pipe, at.count);
            if (at.tile > 0) publish_values(pipe, at.count - 1);
            acquire_description(pipe, &at);
        }
        publish_values(pipe, at.count - 1);
        release_work_tile(pipe, number);
        at.w = acquire_work_tile(pipe, ++number);
    }
}

/* The queries alone: a warp of the first warpgroup. */
FA_DEVICE void produce_queries(const pipeline *pipe, const fa_sm90_params *s)
{
    prefetch_map(&s->q);
    for (int number = 0;; number++) {
        const work_tile *w = acquire_work_tile(pipe, number);
        const bool more = w->key_tiles > 0;
        for (int c = 0; c < CONSUMERS; c++) produce_consumer_queries(pipe, s, w, c, number);
        if (!more) break;
        release_work_tile(pipe, number);
    }
}

#endif

#endif
