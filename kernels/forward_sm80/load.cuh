/*
 * Copies of queries, keys and values to shared memory. Turing has no asynchronous copies, so they
 * are ordinary loads and stores there.
 *
 * Keys and values that no query of the work tile sees are not read: zeros are stored instead. With
 * two stages, a key tile and its values are copied while the previous tile is used. With one stage,
 * values are copied while their keys are used, and the next keys while values are used.
 */
#ifndef FA_KERNELS_FORWARD_SM80_LOAD_CUH
#define FA_KERNELS_FORWARD_SM80_LOAD_CUH

#include "common/flat_rows.h"
#include "common/mma.cuh"
#include "common/rows.cuh"
#include "common/sequence.cuh"
#include "common/x2.cuh"
#include "forward_sm80/layout.cuh"
#include "forward_sm80/scheduler.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"

/* Threads that copy: each has the same 16 bytes ("vector") of every row that it copies. */
enum {
    MAX_ROWS_A_PASS = THREADS / ROW_VECTORS,
    ROWS_A_PASS = MAX_ROWS_A_PASS >= 32   ? 32
                  : MAX_ROWS_A_PASS >= 16 ? 16
                  : MAX_ROWS_A_PASS >= 8  ? 8
                  : MAX_ROWS_A_PASS >= 4  ? 4
                  : MAX_ROWS_A_PASS >= 2  ? 2
                                          : 1,
    COPIERS = ROWS_A_PASS * ROW_VECTORS
};
static_assert(KEYS % ROWS_A_PASS == 0 && QUERIES % ROWS_A_PASS == 0, "whole passes");

FA_DEVICE int copied_vector(void) { return ptx_thread_id() % ROW_VECTORS; }
FA_DEVICE int copied_row(void) { return ptx_thread_id() / ROW_VECTORS; }
FA_DEVICE bool is_copier(void) { return (int)COPIERS == (int)THREADS || ptx_thread_id() < COPIERS; }
FA_DEVICE uint32_t copied_address(uint32_t tile)
{
    return tile + (uint32_t)(copied_row() * PITCH + copied_vector() * 16);
}

/* Issues a copy of 16 bytes. Without `wanted` it writes zeros and reads nothing. */
FA_DEVICE void copy_async(uint32_t to, const void *from, bool wanted)
{
#if ARCHITECTURE >= 80
    ptx_cp_async_16(to, from, wanted);
#else
    ptx_st_shared_v4(to, wanted ? *(const uint4 *)from : make_uint4(0, 0, 0, 0));
#endif
}

FA_DEVICE void wait_for_copies(void)
{
#if ARCHITECTURE >= 80
    ptx_cp_async_wait_all();
#endif
}

/* Loads the elements of a vector one by one, for rows that are not aligned to 16 bytes or that end
 * within a vector. */
FA_DEVICE uint4 gather_vector(const char *row, int column, int columns)
{
#if TF32
    const uint32_t *x = (const uint32_t *)row + column;
    uint32_t found[4];
#pragma unroll
    for (int i = 0; i < 4; i++) found[i] = column + i < columns ? x[i] : 0;
    return make_uint4(found[0], found[1], found[2], found[3]);
#else
    return fa_gather_vector(row, column, columns);
#endif
}

/* ---- Queries --------------------------------------------------------------------------------- */

#if SPLIT_KEYS

/* Rows of the queries of several heads. */
FA_DEVICE void issue_queries(const fa_attention_params *p, const fa_tile *t, uint32_t tile)
{
    if (!is_copier()) return;
    const fa_sm80_split *s = own_split(p);
    const int column = VECTOR * copied_vector(), heads = 1 << s->group_bits;
    const char *all = fa_view_row(&p->q, t->block_q, t->start_q + t->first, t->head);
    const int rows =
        column < p->d ? (int)fa_min64((t->n_q - t->first) << s->group_bits, QUERIES) : 0;
#pragma unroll 4
    for (int i = copied_row(); i < QUERIES; i += ROWS_A_PASS) {
        const int64_t query = query_of(p, i), head = i & (heads - 1);
        const char *row = all + ELEMENT_BYTES * (query * p->q.stride[1] + head * s->head_stride);
        const uint32_t to = tile + (uint32_t)(i * PITCH + column * ELEMENT_BYTES);
        if (is_vectored(&p->q)) copy_async(to, row + ELEMENT_BYTES * column, i < rows);
        else
            ptx_st_shared_v4(to,
                             i < rows ? gather_vector(row, column, p->d) : make_uint4(0, 0, 0, 0));
    }
}

#else

/* Copies queries whose rows are not aligned. */
FA_DEVICE void gather_queries(const fa_attention_params *p, const fa_tile *t, int64_t count,
                              uint32_t tile)
{
    const int column = VECTOR * copied_vector();
#pragma unroll 1
    for (int r = copied_row(); r < QUERIES; r += ROWS_A_PASS) {
        uint4 x = make_uint4(0, 0, 0, 0);
        if (r < count && column < p->d)
            x = gather_vector(fa_view_row(&p->q, t->block_q, t->start_q + t->first + r, t->head),
                              column, p->d);
        ptx_st_shared_v4(tile + (uint32_t)(r * PITCH + column * ELEMENT_BYTES), x);
    }
}

FA_DEVICE void issue_queries(const fa_attention_params *p, const fa_tile *t, uint32_t tile)
{
    if (!is_copier()) return;
    const int64_t count = t->n_q - t->first;
    if (!is_vectored(&p->q)) {
        gather_queries(p, t, count, tile);
        return;
    }
    const int column = VECTOR * copied_vector();
    const int64_t first = t->start_q + t->first + copied_row();
    const int64_t ahead = ELEMENT_BYTES * ROWS_A_PASS * p->q.stride[1];
    const char *row =
        p->q.data + ELEMENT_BYTES * (t->block_q * p->q.stride[0] + first * p->q.stride[1] +
                                     t->head * p->q.stride[2] + column);
    const int rows = column < p->d ? (int)fa_min64(count, QUERIES) : 0;
#pragma unroll
    for (int r = 0; r < QUERIES; r += ROWS_A_PASS, row += ahead)
        copy_async(copied_address(tile) + (uint32_t)(r * PITCH), row, copied_row() + r < rows);
}

#endif

/* ---- Key tiles with keys that are not seen, or with rows that are not plain
 * ------------------- */

FA_DEVICE bool is_seen(const fa_key_tiles *w, int j)
{
    return j >= w->block.from && j < w->block.to;
}

FA_DEVICE void gather_rows(const fa_attention_params *p, const fa_kernel_view *v, const fa_tile *t,
                           const fa_key_tiles *w, int first, int columns, uint32_t tile)
{
    const int column = VECTOR * copied_vector();
#pragma unroll 1
    for (int r = copied_row(); r < KEYS; r += ROWS_A_PASS) {
        const int j = first + r;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (is_seen(w, j) && column < columns)
            x = gather_vector(fa_key_row(p, v, t, w->start + j), column, columns);
        ptx_st_shared_v4(tile + (uint32_t)(r * PITCH + column * ELEMENT_BYTES), x);
    }
}

/* Copies rows of pages. j: the position of this thread's first row, which is copied to `to`.
 * inside: its vector is part of a row. */
FA_DEVICE void issue_paged_rows(const fa_attention_params *p, const fa_kernel_view *v,
                                const fa_tile *t, const fa_key_tiles *w, int j, bool inside,
                                uint32_t to)
{
#pragma unroll 4
    for (int pass = 0; pass < KEYS / ROWS_A_PASS; pass++, j += ROWS_A_PASS) {
        const bool wanted = inside && is_seen(w, j);
        const char *row = v->data;
        if (wanted) row = fa_key_row(p, v, t, w->start + j) + 16 * copied_vector();
        copy_async(to + (uint32_t)(pass * ROWS_A_PASS * PITCH), row, wanted);
    }
}

/* rows: this thread's vector of row 0; pitch: bytes from one row to the next. */
FA_DEVICE void issue_plain_rows(const char *rows, int64_t pitch, const fa_key_tiles *w, int j,
                                bool inside, uint32_t to)
{
    const char *row = rows + pitch * j;
    const int64_t ahead = pitch * ROWS_A_PASS;
#pragma unroll 4
    for (int pass = 0; pass < KEYS / ROWS_A_PASS; pass++, row += ahead, j += ROWS_A_PASS)
        copy_async(to + (uint32_t)(pass * ROWS_A_PASS * PITCH), row, inside && is_seen(w, j));
}

/* Issues the copy of the keys or values from position `first` on. Keys that no query of the work
 * tile sees are set to zero. */
FA_DEVICE void issue_rows(const fa_attention_params *p, const fa_kernel_view *v, const char *rows,
                          const fa_tile *t, const fa_key_tiles *w, int first, int columns,
                          uint32_t tile)
{
    if (!is_copier()) return;
    if (!is_vectored(v)) {
        gather_rows(p, v, t, w, first, columns, tile);
        return;
    }
    const uint32_t to = copied_address(tile);
    const bool inside = VECTOR * copied_vector() < columns;
    const int j = first + copied_row();
    if (p->block_table) issue_paged_rows(p, v, t, w, j, inside, to);
    else
        issue_plain_rows(rows + 16 * copied_vector(), ELEMENT_BYTES * v->stride[1], w, j, inside,
                         to);
}

/* ---- Key tiles that are copied whole --------------------------------------------------------- */

/* Addresses and other numbers that a thread keeps in registers from tile to tile. Kernels with
 * options have no registers for them and compute them again. */
typedef struct fa_path {
    uint32_t q, k, v;          /* addresses of this lane's first fragments */
    uint32_t copy;             /* the address to which this thread's vectors of keys are copied */
    bool k_inside, v_inside;   /* whether those vectors are part of the rows */
    const char *k_row, *v_row; /* the vector of the first row of the tile that is copied next */
    float bound;               /* the bound of a thread's sum of weights in a chunk of a row */
    bool peaked;               /* the warp's rows are peaked, so they are tracked */
} fa_path;

/* keys, values: the tiles that are copied next. */
FA_DEVICE fa_path find_path(const fa_attention_params *p, const fa_key_tiles *w,
                            const fa_memory *at, int keys, int values)
{
    const int row = copied_row(), column = VECTOR * copied_vector(), lane = lane_id();
    fa_path path;
    path.q = at->q + (uint32_t)(group_row() * PITCH) + value_lane(lane);
    path.k = at->k + (uint32_t)(own_key() * PITCH) + key_lane(lane);
    path.v = value_fragments(at->v);
    path.copy = copied_address(at->k);
    path.k_inside = is_copier() && column < p->d;
    path.v_inside = is_copier() && column < p->d_v;
    path.k_row = w->k + ELEMENT_BYTES * (p->k.stride[1] * (row + keys * KEYS) + column);
    path.v_row = w->v + ELEMENT_BYTES * (p->v.stride[1] * (row + values * KEYS) + column);
    path.bound = FA_SUM_BOUND;
    path.peaked = true;
    return path;
}

/* In tf32 all key tiles are tracked. */
FA_DEVICE bool is_tracked(const fa_path *path) { return !UNTRACKED || path->peaked; }

FA_DEVICE void hold_path(fa_path *path)
{
    path->q = fa_opaque(path->q);
    path->k = fa_opaque(path->k);
    path->v = fa_opaque(path->v);
    path->copy = fa_opaque(path->copy);
}

/* Issues the copy of a whole tile; returns where the next one begins. */
FA_DEVICE const char *issue_whole(const char *row, int64_t pitch, bool inside, uint32_t to)
{
    const int64_t ahead = pitch * ROWS_A_PASS;
    if (!is_copier()) return row;
#pragma unroll
    for (int pass = 0; pass < KEYS / ROWS_A_PASS; pass++, row += ahead)
        copy_async(to + (uint32_t)(pass * ROWS_A_PASS * PITCH), row, inside);
    return row;
}

FA_DEVICE void issue_whole_keys(const fa_attention_params *p, fa_path *path, uint32_t to)
{
    path->k_row = issue_whole(path->k_row, ELEMENT_BYTES * p->k.stride[1], path->k_inside, to);
}

FA_DEVICE void issue_whole_values(const fa_attention_params *p, fa_path *path, uint32_t to)
{
    path->v_row = issue_whole(path->v_row, ELEMENT_BYTES * p->v.stride[1], path->v_inside,
                              to + STAGES * TILE_BYTES);
}

#if PLAIN_LOOP
/* Issues the copies of tile n + 1: of keys and, with two stages, of values. */
FA_DEVICE void issue_next(const fa_attention_params *p, const fa_memory *at, int n, fa_path *path)
{
    const uint32_t to = stage(at, path->copy, n + 1);
    issue_whole_keys(p, path, to);
    if (STAGES == 2) issue_whole_values(p, path, to);
}
#endif

/* ---- Any key tile ---------------------------------------------------------------------------- */

/* Whether tile n is copied whole. block.from is below 32, so only tile 0 can have keys before
 * it. */
FA_DEVICE bool is_whole(const fa_key_tiles *w, int n)
{
    return n < w->whole_to && (n > 0 || w->block.from == 0);
}

/* Issues the copy of keys n. Tiles come one after the other. */
FA_DEVICE void issue_keys(const fa_attention_params *p, const fa_work_tile *work,
                          const fa_memory *at, int n, fa_path *path)
{
    const fa_key_tiles *w = &work->keys;
#if OPTIONS
    fa_path found = find_path(p, w, at, n, n); /* the registers are needed for options */
    path = &found;
#endif
    if (is_whole(w, n)) issue_whole_keys(p, path, stage(at, path->copy, n));
    else if (n < w->tiles) {
        issue_rows(p, &p->k, w->k, &work->tile, w, n * KEYS, p->d, stage(at, at->k, n));
        path->k_row += ELEMENT_BYTES * p->k.stride[1] * KEYS;
    }
}

FA_DEVICE void issue_values(const fa_attention_params *p, const fa_work_tile *work,
                            const fa_memory *at, int n, fa_path *path)
{
    const fa_key_tiles *w = &work->keys;
#if OPTIONS
    fa_path found = find_path(p, w, at, n, n);
    path = &found;
#endif
    if (is_whole(w, n)) issue_whole_values(p, path, stage(at, path->copy, n));
    else if (n < w->tiles) {
        issue_rows(p, &p->v, w->v, &work->tile, w, n * KEYS, p->d_v, stage(at, at->v, n));
        path->v_row += ELEMENT_BYTES * p->v.stride[1] * KEYS;
    }
}

/* The key tile that is copied next: of the same work tile, or the first tile of the next one. */
typedef struct fa_next_tile {
    const fa_work_tile *work;
    fa_memory at;
    int n;
} fa_next_tile;

FA_DEVICE fa_next_tile find_next_tile(const fa_block *b, const fa_memory *at, int n)
{
    const bool last = n + 1 == b->now.keys.tiles;
    const fa_next_tile c = {last ? next_work_tile(b) : &b->now, last ? next_memory(at, n + 1) : *at,
                            last ? 0 : n + 1};
    return c;
}

/* For the first key tile of a work tile: the addresses of its rows, and where they are copied
 * to. */
FA_DEVICE void find_rows(const fa_attention_params *p, const fa_next_tile *c, fa_path *path)
{
    if (c->n > 0) return;
    const fa_path first = find_path(p, &c->work->keys, &c->at, 0, 0);
    if (STAGES == 2) path->copy = first.copy;
    path->k_row = first.k_row;
    path->v_row = first.v_row;
}

/* ---- The end of copies ----------------------------------------------------------------------- */

#if TF32

/* Rounds the queries that this thread has copied, once for all key tiles. */
FA_DEVICE void round_queries(const fa_memory *at)
{
    if (!is_copier()) return;
#pragma unroll 4
    for (int r = 0; r < QUERIES; r += ROWS_A_PASS) {
        const uint32_t to = copied_address(at->q) + (uint32_t)(r * PITCH);
        const uint4 x = ptx_ld_shared_v4(to);
        ptx_st_shared_v4(
            to, make_uint4(fa_to_tf32(x.x), fa_to_tf32(x.y), fa_to_tf32(x.z), fa_to_tf32(x.w)));
    }
}

#else

/* Not 0 if one of the two numbers is not finite. */
FA_DEVICE uint32_t is_not_finite(uint32_t x2) { return fa_x2_not_finite(x2); }

#endif

/* Whether some element that this thread copied to a tile is not finite. */
FA_DEVICE bool copied_not_finite(uint32_t tile)
{
    uint32_t seen = 0;
    if (!is_copier()) return false;
#pragma unroll 1
    for (int pass = 0; pass < KEYS / ROWS_A_PASS; pass++) {
        const uint4 x =
            ptx_ld_shared_v4(copied_address(tile) + (uint32_t)(pass * ROWS_A_PASS * PITCH));
        seen |= is_not_finite(x.x) | is_not_finite(x.y) | is_not_finite(x.z) | is_not_finite(x.w);
    }
    return seen != 0;
}

/* Waits for all threads' copies. searched: finds out whether all values of tile n are finite. */
FA_DEVICE void sync_block(fa_key_tiles *w, const fa_memory *at, int n, bool searched)
{
    wait_for_copies();
    if (searched) {
        const int found = __syncthreads_or(copied_not_finite(stage(at, at->v, n)));
        if (lane_id() == 0) w->nonfinite_values[ptx_thread_id() / 32] = found;
    } else __syncthreads();
}

FA_DEVICE bool nonfinite_values(const fa_key_tiles *w)
{
    __syncwarp();
    return w->nonfinite_values[ptx_thread_id() / 32];
}

#endif
