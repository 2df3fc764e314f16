/*
 * The gradient of a bias of 16 bits that batch items or heads share. Blocks leave their dS in the workspace, in 16 bits as products
 * take it, and shares are added up there, in one order. Float additions to sums in the L2 cache would be as many bytes as those of
 * dQ, and that cache adds 12 bytes a cycle for each multiprocessor.
 *
 * A unit is the blocks of the same keys that share elements of dbias. They follow each other. A block that has done its work adds
 * up a slice of the unit that is `distance` units in front of its own, when all blocks of that one have left their dS: so all
 * blocks have about as much to add, and hardly wait. Its load warp brings shares to the buffers that the block needs no longer,
 * and the consumers add them. The last units, which have no unit so far behind them, are added up by dbias.cu.
 *
 * There is room for `room` units, more than the distance. A block waits until the unit in whose place it leaves dS has been
 * added up. All that it waits for is done by blocks of lower numbers, which start first and stay until they are done, and of which
 * the first waits for nobody.
 *
 * A tile of dS has two halves of 64 keys; each a row for each query, in TMA's swizzle. A piece is a quarter of a tile.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_DBIAS_SUMS_CUH
#define FA_KERNELS_BACKWARD_SM90_DBIAS_SUMS_CUH

#include "backward_sm90/config.cuh"

#if BIAS_TILE

#include "backward_sm90/pipeline.cuh"
#include "backward_sm90/work.cuh"
#include "common/divide.h"
#include "common/rows.cuh"
#include "common/x2.cuh"
#include "ptx/barrier.cuh"
#include "ptx/semaphore.cuh"
#include "ptx/tma.cuh"

enum {
    ADDER_VECTORS = DS_BYTES / PIECE_BYTES /* of eight elements, of a thread: pieces of a tile */
};
static_assert(PIECE_BYTES == QUERIES / 2 * 128, "32 queries and 64 keys");

/* The unit of a block that computes. */
FA_DEVICE int32_t unit_of_block(const fa_backward_sm90_params *s)
{
    return (int32_t)fa_divide(blockIdx.x, s->left.blocks);
}

/* Where a unit's block leaves dS of a tile. heads: query heads of a block. */
FA_DEVICE char *find_left_tile(const fa_backward_sm90_params *s, int32_t unit, int64_t block,
                               int heads, int head, int tile)
{
    const int64_t number = (unit % s->left.room * (int64_t)s->left.blocks + block) * heads + head;
    return s->left.ds + (number * s->q_tiles + tile) * DS_BYTES;
}

/* Where this block does, from its first head and tile on. */
FA_DEVICE char *find_left(const fa_backward_sm90_params *s, const block_work *w)
{
    const int32_t unit = unit_of_block(s);
    return find_left_tile(s, unit, blockIdx.x - (int64_t)unit * s->left.blocks, w->heads, 0, 0);
}

FA_DEVICE char *left_tile(const pipeline *pipe, const fa_backward_sm90_params *s, int head,
                          int tile)
{
    return pipe->state->left_at + (head * s->q_tiles + tile) * DS_BYTES;
}

/* w: of one of its blocks. */
FA_DEVICE left_unit find_left_unit(const fa_backward_params *p, const fa_backward_sm90_params *s,
                                   const block_work *w, int32_t unit)
{
    const bool by_items = p->dbias_shape[0] == 1, by_heads = p->dbias_shape[1] == 1;
    const int64_t head_step = s->q_tiles * DS_BYTES;
    left_unit u;
    u.ds = find_left_tile(s, unit, 0, w->heads, 0, 0);
    u.step = by_heads ? head_step : w->heads * head_step;
    u.shares = by_heads ? (int64_t)s->left.blocks * w->heads : s->left.blocks;
    u.item = by_items ? 0 : w->sequence.batch;
    u.head = by_heads ? 0 : w->sequence.head;
    u.key = w->keys.first;
    u.heads = by_heads ? 1 : w->heads;
    u.from = w->from;
    u.to = w->to;
    return u;
}

/* ---- A tile ---------------------------------------------------------------------------------- */

FA_DEVICE void add_eight(float *sums, uint4 x)
{
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const float2 y = fa_unpack_x2(words[n], ELEMENT);
        sums[2 * n] += y.x;
        sums[2 * n + 1] += y.y;
    }
}

/* Elements of a row of dbias, of which so many are left from the first one on. */
FA_DEVICE void put_eight(const fa_kernel_view *dbias, int64_t index, int64_t left, const float *x)
{
    uint16_t *to = (uint16_t *)(void *)dbias->data + index;
    if (left >= 8 && dbias->stride[3] == 1 && ((uintptr_t)to & 15) == 0) {
        *(uint4 *)(void *)to = make_uint4(fa_pack_x2(x[0], x[1]), fa_pack_x2(x[2], x[3]),
                                          fa_pack_x2(x[4], x[5]), fa_pack_x2(x[6], x[7]));
        return;
    }
#pragma unroll
    for (int n = 0; n < 8; n++)
        if (n < left) fa_store_element((char *)to, ELEMENT, n * dbias->stride[3], x[n]);
}

/* Of an adder's first vector of a tile: the query, the key, and the index in dbias. */
typedef struct left_vector {
    int64_t query, key, index;
} left_vector;

FA_DEVICE left_vector find_vector(const fa_backward_params *p, const left_unit *u, int head,
                                  int tile, int thread)
{
    const int row = thread / 8;
    left_vector v;
    v.query = tile * QUERIES + row;
    v.key = u->key + (thread % 8 ^ row % 8) * 8;
    v.index = u->item * p->dbias.stride[0] + (u->head + head) * p->dbias.stride[1] +
              v.query * p->dbias.stride[2] + v.key * p->dbias.stride[3];
    return v;
}

/* The adder's vector of piece `number` of the tile. */
FA_DEVICE void put_vector(const fa_backward_params *p, const left_vector *first, int number,
                          const float *sums)
{
    const int64_t queries = number % 2 * (QUERIES / 2), keys = number / 2 * OWN_KEYS;
    if (first->query + queries >= p->dbias_shape[2]) return;
    put_eight(&p->dbias, first->index + queries * p->dbias.stride[2] + keys * p->dbias.stride[3],
              p->dbias_shape[3] - first->key - keys, sums);
}

/* Adds `count` shares, a number that the compiler knows: all loads are issued before the first is used. */
FA_DEVICE void add_shares(float sums[ADDER_VECTORS][8], const char *from, int64_t step, int count)
{
    uint4 x[SHARES_AT_ONCE][ADDER_VECTORS];
#pragma unroll
    for (int m = 0; m < count; m++)
#pragma unroll
        for (int n = 0; n < ADDER_VECTORS; n++)
            x[m][n] = *(const uint4 *)(from + m * step + n * (16 * ADDERS));
#pragma unroll
    for (int m = 0; m < count; m++)
#pragma unroll
        for (int n = 0; n < ADDER_VECTORS; n++) add_eight(sums[n], x[m][n]);
}

/* Adds up the shares of a tile, by ADDERS threads. */
FA_DEVICE void add_left_tile(const fa_backward_params *p, const fa_backward_sm90_params *s,
                             const left_unit *u, int head, int tile, int thread)
{
    const char *from = u->ds + ((int64_t)head * s->q_tiles + tile) * DS_BYTES + 16 * thread;
    int64_t left = tile >= u->from && tile < u->to ? u->shares : 0;
    float sums[ADDER_VECTORS][8];
#pragma unroll
    for (int n = 0; n < ADDER_VECTORS; n++)
#pragma unroll
        for (int k = 0; k < 8; k++) sums[n][k] = 0;
#pragma unroll 1
    for (; left >= SHARES_AT_ONCE; left -= SHARES_AT_ONCE, from += SHARES_AT_ONCE * u->step)
        add_shares(sums, from, u->step, SHARES_AT_ONCE);
#pragma unroll 1
    for (; left > 0; left--, from += u->step) add_shares(sums, from, u->step, 1);
    const left_vector first = find_vector(p, u, head, tile, thread);
#pragma unroll
    for (int n = 0; n < ADDER_VECTORS; n++) put_vector(p, &first, n, sums[n]);
}

/* ---- A block that computes: what it leaves --------------------------------------------------- */

/* The barriers. A thread of its own does it: loads of keys wait for the others. */
FA_DEVICE void init_left_barriers(shared_state *state)
{
    ptx_mbarrier_init(&state->left, CONSUMERS * WARPS + STORE_WARPS);
    for (int stage = 0; stage < SHARE_STAGES; stage++) {
        ptx_mbarrier_init(&state->shares_full[stage], 1);
        ptx_mbarrier_init(&state->shares_empty[stage], CONSUMERS * WARPS);
    }
    ptx_mbarrier_init_fence();
    ptx_fence_proxy_async();
}

/* A store warp, one lane, before it leaves anything. A block that has nothing to leave waits as well: when a unit has been added
 * up, so have all units before it in the same place, and the next one there waits for no other. */
FA_DEVICE void wait_for_room(const fa_backward_sm90_params *s)
{
    const int32_t before = unit_of_block(s) - s->left.room;
    if (before < 0) return;
    ptx_counter_wait(&s->left.counters[2 * before + 1], s->left.blocks);
    ptx_fence_proxy_async_global();
}

/* The same when all that it has left has been read from the buffers. */
FA_DEVICE void count_left(const pipeline *pipe, const fa_backward_sm90_params *s)
{
    ptx_mbarrier_arrive(&pipe->state->left);
    ptx_bulk_wait(0);
    ptx_fence_proxy_async_global();
    ptx_counter_add(&s->left.counters[2 * unit_of_block(s)]);
}

/* ---- What it adds up ------------------------------------------------------------------------- */

/* Pieces of a unit's tiles. Those of tiles that some query sees have numbers from 0 on, and so have the others, which nobody has
 * left: they are zeros. Of both a block has a part of its own. */
typedef struct left_slice {
    int seen, seen_end, unseen, unseen_end;
} left_slice;

typedef struct left_piece {
    int head, tile, number;
} left_piece;

/* The unit of which a block adds up a slice; below 0: there is none. */
FA_DEVICE int32_t unit_to_add(const fa_backward_sm90_params *s)
{
    const int32_t distance = s->left.units - s->left.summed;
    return unit_of_block(s) - distance;
}

FA_DEVICE left_slice find_slice(const fa_backward_sm90_params *s, const left_unit *u)
{
    const int64_t blocks = s->left.blocks, block = blockIdx.x - (int64_t)unit_of_block(s) * blocks;
    const int64_t all = u->heads * s->q_tiles * ADDER_VECTORS;
    const int64_t seen = (int64_t)u->heads * max(0, u->to - u->from) * ADDER_VECTORS;
    const left_slice slice = {(int)fa_divide(seen * block, blocks),
                              (int)fa_divide(seen * (block + 1), blocks),
                              (int)fa_divide((all - seen) * block, blocks),
                              (int)fa_divide((all - seen) * (block + 1), blocks)};
    return slice;
}

FA_DEVICE left_piece find_piece(const fa_backward_sm90_params *s, const left_unit *u, bool seen,
                                int number)
{
    const int width = max(0, u->to - u->from), tiles = seen ? width : (int)s->q_tiles - width;
    const int tile = number / ADDER_VECTORS, head = tile / tiles;
    const int rest = tile - head * tiles;
    const left_piece piece = {head,
                              seen             ? u->from + rest
                              : rest < u->from ? rest
                                               : rest + width,
                              number % ADDER_VECTORS};
    return piece;
}

/* One thread, long before the slice is added up: finds the keys and the query tiles of its unit. */
FA_DEVICE void describe_slice(const pipeline *pipe, const fa_backward_params *p,
                              const fa_backward_sm90_params *s)
{
    const int32_t unit = unit_to_add(s);
    block_work first;
    if (unit < 0) return;
    if (find_keys(&p->a, s, (int64_t)unit * s->left.blocks, &first)) find_queries(&p->a, &first);
    pipe->state->added = find_left_unit(p, s, &first, unit);
}

/* The load warp, one lane, when it has nothing else to load. All shares are there when the store warps of all blocks have counted
 * theirs. The buffers are the block's own once more when its consumers and store warps have arrived. */
FA_DEVICE void load_slice(const pipeline *pipe, const fa_backward_sm90_params *s)
{
    shared_state *state = pipe->state;
    const int32_t unit = unit_to_add(s);
    if (unit < 0) return;
    ptx_counter_wait(&s->left.counters[2 * unit], STORE_WARPS * s->left.blocks);
    ptx_fence_proxy_async_global();
    ptx_mbarrier_wait(&state->left, 0);
    const left_unit *u = &state->added;
    const left_slice slice = find_slice(s, u);
    int count = 0;
#pragma unroll 1
    for (int i = slice.seen; i < slice.seen_end; i++) {
        const left_piece piece = find_piece(s, u, true, i);
        const char *from =
            u->ds + (piece.head * s->q_tiles + piece.tile) * DS_BYTES + piece.number * PIECE_BYTES;
#pragma unroll 1
        for (int left = (int)u->shares; left > 0; left -= SHARES_AT_ONCE, count++) {
            const int shares = min(left, SHARES_AT_ONCE), stage = count % SHARE_STAGES;
            char *to = pipe->buffers + stage * (SHARES_AT_ONCE * PIECE_BYTES);
            uint64_t *full = &state->shares_full[stage];
            ptx_mbarrier_wait(&state->shares_empty[stage], (count / SHARE_STAGES & 1) ^ 1);
            ptx_mbarrier_arrive_expect(full, shares * PIECE_BYTES);
#pragma unroll 1
            for (int n = 0; n < shares; n++, from += u->step, to += PIECE_BYTES)
                ptx_bulk_load(to, from, full, PIECE_BYTES);
        }
    }
}

/* Adds the shares of a stage, a number that the compiler knows. */
FA_DEVICE void add_stage(float sums[8], const char *from, int shares)
{
    uint4 x[SHARES_AT_ONCE];
#pragma unroll
    for (int n = 0; n < shares; n++) x[n] = *(const uint4 *)(from + n * PIECE_BYTES);
#pragma unroll
    for (int n = 0; n < shares; n++) add_eight(sums, x[n]);
}

/* The consumers, when they have nothing else to do. The shares have been read from the workspace when they are in shared memory,
 * which each thread waits for. */
FA_DEVICE void add_slice(const pipeline *pipe, const fa_backward_params *p,
                         const fa_backward_sm90_params *s)
{
    shared_state *state = pipe->state;
    const int thread = (int)threadIdx.x - WARPGROUP;
    const bool leader = thread % 32 == 0;
    const int32_t unit = unit_to_add(s);
    ptx_fence_proxy_async(); /* buffers were used by ordinary loads and stores */
    __syncwarp();
    ptx_mbarrier_arrive_if(&state->left, leader);
    if (unit < 0) return;
    ptx_mbarrier_wait(&state->left, 0); /* before the unit's description is read */
    const left_unit *u = &state->added;
    const left_slice slice = find_slice(s, u);
    const int seen = slice.seen_end - slice.seen, all = seen + slice.unseen_end - slice.unseen;
    left_vector first = {0, 0, 0};
    int count = 0;
#pragma unroll 1
    for (int i = 0; i < all; i++) {
        float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll 1
        for (int left = i < seen ? (int)u->shares : 0; left > 0; left -= SHARES_AT_ONCE, count++) {
            const int stage = count % SHARE_STAGES;
            const char *from = pipe->buffers + stage * (SHARES_AT_ONCE * PIECE_BYTES) + 16 * thread;
            ptx_mbarrier_wait(&state->shares_full[stage], count / SHARE_STAGES & 1);
            if (left >= SHARES_AT_ONCE) add_stage(sums, from, SHARES_AT_ONCE);
            else
#pragma unroll 1
                for (int n = 0; n < left; n++) add_stage(sums, from + n * PIECE_BYTES, 1);
            __syncwarp();
            ptx_mbarrier_arrive_if(&state->shares_empty[stage], leader);
        }
        const int number = i < seen ? slice.seen + i : slice.unseen + i - seen;
        if (i == 0 || i == seen || number % ADDER_VECTORS == 0) {
            const left_piece piece = find_piece(s, u, i < seen, number);
            first = find_vector(p, u, piece.head, piece.tile, thread);
        }
        put_vector(p, &first, number % ADDER_VECTORS, sums);
    }
    if (thread == 0) ptx_counter_add(&s->left.counters[2 * unit + 1]);
}

#endif

#endif
