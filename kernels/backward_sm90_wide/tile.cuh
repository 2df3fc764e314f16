/*
 * Where a tile's operands are, and which masks it needs.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_WIDE_TILE_CUH
#define FA_KERNELS_BACKWARD_SM90_WIDE_TILE_CUH

#include "backward_sm90_wide/config.cuh"
#include "backward_sm90_wide/multiply.cuh"
#include "backward_sm90_wide/pipeline.cuh"
#include "backward_sm90/rows.cuh"
#include "backward_sm90/store.cuh"
#include "backward_sm90/work.cuh"
#include "ptx/address.cuh"
#include "ptx/registers.cuh"
#include "ptx/thread.cuh"

/* The descriptor of the block's keys, from which the others are computed. */
FA_DEVICE uint32_t first_descriptor(const pipeline *pipe)
{
    return ptx_uniform(ptx_descriptor_low_in_cluster(pipe->buffers, 0));
}

FA_DEVICE uint32_t q_tile(uint32_t base, int stage)
{
    return base + (uint32_t)(Q_AT + stage * Q_BYTES) / UNIT;
}

FA_DEVICE uint32_t dout_tile(uint32_t base, int stage)
{
    return base + (uint32_t)(DOUT_AT + stage * DOUT_BYTES) / UNIT;
}

FA_DEVICE uint32_t ds_tile(uint32_t base, int count)
{
    return base + (uint32_t)(DS_AT + ds_buffer(count) * DS_BYTES) / UNIT;
}

/* The warp's part of a tile that has been read. Rows of a gradient are stored through it. */
FA_DEVICE char *warp_buffer(const pipeline *pipe, int tile_at, int dim)
{
    return pipe->buffers + tile_at + (int)threadIdx.x % WARPGROUP / 32 * (WARP_ROWS * dim * 2);
}

/* The columns of a gradient from `column` on. */
FA_DEVICE fa_kernel_view columns_of(const fa_kernel_view *view, int column)
{
    fa_kernel_view part = *view;
    if (part.data) part.data = (char *)part.data + 2 * column;
    return part;
}

/* Stores gradients of keys that no query sees. */
FA_DEVICE void store_zeros(const fa_key_tile *k, const fa_kernel_view *view, int dim, int columns,
                           int block)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32;
    if (!view->data) return;
#pragma unroll 1
    for (int r = 0; r < WARP_ROWS; r++) {
        const int row = block * BLOCK_KEYS + warp * WARP_ROWS + r;
        if (row >= k->count) return;
        char *to = fa_view_row(view, k->block, k->row + row, k->head_kv);
        for (int column = 2 * lane; column < dim; column += 64)
            fa_scatter_x2(to, column, columns, 0);
    }
}

/* Whether this lane arrives for its warp. */
FA_DEVICE bool is_leader(void) { return ptx_thread_id() % 32 == 0; }

/* What a thread of the dV and dK warpgroups needs in each tile, in registers: its number takes long
 * to read while products read shared memory. */
typedef struct thread_places {
    uint32_t rows; /* row_address of the first stage */
    uint32_t weights;
    int leader; /* is_leader */
} thread_places;

/* Where the thread's weights are: words 4j to 4j + 3 of all threads are contiguous. */
FA_DEVICE uint32_t weight_address(const pipeline *pipe)
{
    return ptx_shared_address(pipe->buffers + P_AT) + (uint32_t)ptx_thread_id() % WARPGROUP * 16;
}

FA_DEVICE thread_places find_places(const pipeline *pipe)
{
    thread_places own;
    own.rows = ptx_keep(row_address(pipe, 0));
    own.weights = ptx_keep(weight_address(pipe));
    own.leader = (int)ptx_keep(is_leader());
    return own;
}

/* The block's tiles of queries, and those whose queries see all of its keys. They are the same for
 * all threads, in uniform registers. end: the count after the last one. */
typedef struct tile_range {
    int tiles, end, from, to, unmasked_from, unmasked_to;
} tile_range;

FA_DEVICE tile_range find_tiles(const block_work *w)
{
    tile_range r;
    r.tiles = (int)ptx_uniform((uint32_t)w->tiles);
    r.end = PERSISTENT ? (int)ptx_uniform((uint32_t)end_count(w)) : r.tiles;
    r.from = (int)ptx_uniform((uint32_t)w->from);
    r.to = (int)ptx_uniform((uint32_t)w->to);
    r.unmasked_from = (int)ptx_uniform((uint32_t)w->unmasked_from[THIS_BLOCK]);
    r.unmasked_to = (int)ptx_uniform((uint32_t)w->unmasked_to[THIS_BLOCK]);
    return r;
}

FA_DEVICE tile_cursor begin(const block_work *w)
{
    tile_cursor at = first_tile(w);
    at.tile = (int)ptx_uniform((uint32_t)at.tile);
#if PERSISTENT
    at.count = (int)ptx_uniform((uint32_t)at.count);
#endif
#if ORDERED
    at.step = (int)ptx_uniform((uint32_t)at.step);
#endif
#if HEADS_IN_TURN
    at.heads = (int)ptx_uniform((uint32_t)at.heads);
#endif
    return at;
}

/* Whether some query of the tile does not see some of the block's keys. */
FA_DEVICE bool is_masked(const tile_range *range, int tile)
{
    const bool masked = tile < range->unmasked_from || tile >= range->unmasked_to;
    return PERSISTENT ? ptx_uniform(masked) != 0 : masked;
}

#endif
