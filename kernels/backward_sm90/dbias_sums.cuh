/*
 * The gradient of a 16-bit bias that batch items or heads share. Blocks leave their dS in the
 * workspace, in 16 bits as products read it, and shares are added up there, in one order. Float32
 * additions to sums in the L2 cache would be as many bytes as those of dQ, and that cache adds only
 * 12 bytes a cycle for each multiprocessor.
 *
 * A unit consists of the blocks of the same keys that share elements of dbias. They are
 * consecutive. The last block that has left its dS adds up the shares of the unit. dbias.cu does
 * that for the last units, whose blocks end when most multiprocessors have nothing to do.
 *
 * There is room for `room` units. Before a block leaves dS, it waits until the unit that had its
 * place has been added up, by blocks of lower numbers. Those start first and stay until they are
 * done, and the first of them waits for nobody.
 *
 * A tile of dS has two halves of 64 keys. In each half, every query has a row, in TMA's swizzle.
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
    ADDERS = CONSUMERS * WARPGROUP,         /* threads that add up a tile */
    ADDER_VECTORS = DS_BYTES / 16 / ADDERS, /* of eight elements, of a thread */
    SHARES_AT_ONCE = 4,
    TILES_AHEAD = 2 /* that are being prefetched to the L2 cache */
};

/* What the blocks of a unit have left. */
typedef struct left_unit {
    const char *ds;          /* the first share of its first tile */
    int64_t step, shares;    /* bytes from a share to the next one; shares of each element */
    int64_t item, head, key; /* the first ones, in dbias */
    int heads;               /* of dbias */
    int from, to;            /* query tiles that see some of the keys */
} left_unit;

/* The unit of a block that computes. */
FA_DEVICE int32_t unit_of_block(const fa_backward_sm90_params *s)
{
    return (int32_t)fa_divide(blockIdx.x, s->left.blocks);
}

/* Where a block of a unit leaves dS of a tile. heads: query heads of a block. */
FA_DEVICE char *find_left_tile(const fa_backward_sm90_params *s, int32_t unit, int64_t block,
                               int heads, int head, int tile)
{
    const int64_t number = (unit % s->left.room * (int64_t)s->left.blocks + block) * heads + head;
    return s->left.ds + (number * s->q_tiles + tile) * DS_BYTES;
}

FA_DEVICE char *left_tile(const fa_backward_sm90_params *s, const block_work *w, int head, int tile)
{
    const int32_t unit = unit_of_block(s);
    return find_left_tile(s, unit, blockIdx.x - (int64_t)unit * s->left.blocks, w->heads, head,
                          tile);
}

/* w: the work of one of the unit's blocks. */
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

/* Elements of a row of dbias. `left` elements remain from the first one on. */
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

/* Adds `count` shares. The compiler knows count, so that all loads are issued before the first is
 * used. */
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
#pragma unroll
    for (int n = 0; n < ADDER_VECTORS; n++) {
        const int vector = n * ADDERS + thread, row = vector / 8 % QUERIES;
        const int64_t query = tile * QUERIES + row;
        const int64_t key = u->key + vector / (8 * QUERIES) * OWN_KEYS + (vector % 8 ^ row % 8) * 8;
        if (query >= p->dbias_shape[2]) continue;
        put_eight(&p->dbias,
                  u->item * p->dbias.stride[0] + (u->head + head) * p->dbias.stride[1] +
                      query * p->dbias.stride[2] + key * p->dbias.stride[3],
                  p->dbias_shape[3] - key, sums[n]);
    }
}

/* ---- A block that computes dS ---------------------------------------------------------------- */

/* Executed by one lane of a store warp before it leaves anything. A block that has nothing to leave
 * waits as well: when a unit has been added up, then all units before it in the same place have
 * been too, and the next unit in that place waits for no other. */
FA_DEVICE void wait_for_room(const fa_backward_sm90_params *s)
{
    const int32_t before = unit_of_block(s) - s->left.room;
    if (before < 0) return;
    ptx_counter_wait(&s->left.counters[2 * before + 1], 1);
    ptx_fence_proxy_async_global();
}

/* Executed by the same lane after it has left everything: tells the consumers whether they must add
 * up the unit. */
FA_DEVICE void count_left(const pipeline *pipe, const fa_backward_sm90_params *s)
{
    const int32_t unit = unit_of_block(s);
    ptx_bulk_wait(0);
    ptx_fence_proxy_async_global();
    const int32_t before = ptx_counter_take(&s->left.counters[2 * unit]);
    if (before + 1 == STORE_WARPS * s->left.blocks) pipe->state->adds_left = true;
    ptx_mbarrier_arrive(&pipe->state->left);
}

/* Prefetches one of the unit's tiles. */
FA_DEVICE void fetch_left_tile(const fa_backward_sm90_params *s, const left_unit *u, int number,
                               int thread)
{
    const int head = (int)fa_divide(number, s->q_tiles), tile = number - head * (int)s->q_tiles;
    if (head >= u->heads || tile < u->from || tile >= u->to) return;
#pragma unroll 1
    for (int64_t i = thread; i < u->shares; i += ADDERS)
        ptx_bulk_prefetch(u->ds + i * u->step + (int64_t)number * DS_BYTES, DS_BYTES);
}

/* Executed by the consumers when they have nothing else to do. */
FA_DEVICE void add_left(const pipeline *pipe, const fa_backward_params *p,
                        const fa_backward_sm90_params *s)
{
    const int32_t unit = unit_of_block(s);
    const int thread = (int)threadIdx.x - WARPGROUP;
    if (unit >= s->left.summed) return;
    ptx_mbarrier_wait(&pipe->state->left, 0);
    if (!pipe->state->adds_left) return;
    const left_unit u = find_left_unit(p, s, work_of(pipe), unit);
    const int tiles = u.heads * (int)s->q_tiles;
#pragma unroll 1
    for (int number = 0; number < TILES_AHEAD; number++) fetch_left_tile(s, &u, number, thread);
#pragma unroll 1
    for (int number = 0; number < tiles; number++) {
        const int head = (int)fa_divide(number, s->q_tiles);
        fetch_left_tile(s, &u, number + TILES_AHEAD, thread);
        add_left_tile(p, s, &u, head, number - head * (int)s->q_tiles, thread);
    }
    ptx_named_barrier_sync(NAMED_BARRIER_CONSUMERS, ADDERS);
    if (thread == 0) ptx_counter_add(&s->left.counters[2 * unit + 1]);
}

#endif

#endif
