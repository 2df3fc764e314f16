/*
 * The gradient of a 16-bit bias that batch items or heads share. Blocks leave their dS in the
 * workspace, in 16 bits as products read it, and shares are added up there, in one order. Float32
 * additions to sums in the L2 cache would be as many bytes as those of dQ, and that cache adds only
 * 12 bytes a cycle for each multiprocessor.
 *
 * A unit consists of blocks of the same keys that share elements of dbias. They are consecutive.
 * The last block that has left its dS adds up the shares of the unit: a thread copies them to the
 * shared memory that the block no longer needs, which holds more of them on their way than
 * registers would. dbias.cu adds up the last units, whose blocks end when most multiprocessors have
 * nothing to do.
 *
 * If heads share elements, a unit has a group of a few heads, whose queries and dQ stay in the L2
 * cache while all of their blocks run. The sums go from the unit of a group to that of the next
 * group, in float32, and the last one stores dbias. The units of a group are those of all key
 * tiles. A unit waits until the unit of the group before has been added up. So does a group that
 * begins new sums, which take the place of the last ones.
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
#include "ptx/registers.cuh"
#include "ptx/semaphore.cuh"
#include "ptx/tma.cuh"

enum {
    ADDERS = CONSUMERS * WARPGROUP,         /* threads that add up a tile */
    ADDER_VECTORS = DS_BYTES / 16 / ADDERS, /* of eight elements, of a thread */
    ADDER_ROWS = ADDERS / 8,                /* whose eight keys each are a vector of all threads */
    SHARES_AT_ONCE = 4,                     /* that dbias.cu loads */
    SUM_PARTS = 2,                          /* of a tile's sums in float32, each like a share */
    PART_VECTORS = ADDER_VECTORS / SUM_PARTS,
    TILE_SUMS = QUERIES * KEYS
};

/* What the blocks of a unit have left. */
typedef struct left_unit {
    const char *ds;          /* the first share of its first tile */
    int64_t step;            /* bytes from a share to the next one */
    int64_t item, head, key; /* the first ones, in dbias */
    int shares;              /* of each element */
    int heads;               /* of dbias */
    int from, to;            /* query tiles that see some of the keys */
    float *sums;             /* of the first tile of these keys, in the order of add_eight */
    bool begins, ends;       /* its group is the first one, the last one */
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
    u.shares = by_heads ? s->left.blocks * w->heads : s->left.blocks;
    u.item = by_items ? 0 : w->sequence.batch;
    u.head = by_heads ? 0 : w->sequence.head;
    u.key = w->keys.first;
    u.heads = by_heads ? 1 : w->heads;
    u.from = w->from;
    u.to = w->to;
    u.sums = s->left_groups.sums + unit % s->left_groups.units * s->q_tiles * TILE_SUMS;
    u.begins = unit / s->left_groups.units % s->left_groups.count == 0;
    u.ends = (unit / s->left_groups.units + 1) % s->left_groups.count == 0;
    return u;
}

FA_DEVICE bool sees_tile(const left_unit *u, int tile) { return tile >= u->from && tile < u->to; }

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

/* A thread's elements of a tile are eight keys of some rows, and of the same rows 64 keys later. */
typedef struct dbias_place {
    char *first;       /* the first key of query thread / 8 */
    int64_t row, head; /* bytes to the next query's, to the next head's */
    int64_t key;       /* elements to the next key */
    int rows, keys;    /* that remain from the first ones on, at most a number that is enough */
    bool aligned;      /* eight keys are 16 aligned bytes */
} dbias_place;

FA_DEVICE dbias_place find_dbias_place(const fa_backward_params *p, const left_unit *u, int thread)
{
    const fa_kernel_view *v = &p->dbias;
    const int row = thread / 8;
    const int64_t key = u->key + (thread % 8 ^ row % 8) * 8;
    dbias_place x;
    x.first = v->data + (u->item * v->stride[0] + u->head * v->stride[1] + row * v->stride[2] +
                         key * v->stride[3]) *
                            2;
    x.row = v->stride[2] * 2;
    x.head = v->stride[1] * 2;
    x.key = v->stride[3];
    x.rows = (int)(p->dbias_shape[2] - row);
    x.keys = (int)fa_min64(p->dbias_shape[3] - key, KEYS);
    x.aligned =
        x.key == 1 && (((uintptr_t)x.first | (uintptr_t)x.row | (uintptr_t)x.head) & 15) == 0;
    return x;
}

FA_DEVICE void put_eight(const dbias_place *d, char *to, int keys, const float *x)
{
    if (keys >= 8 && d->aligned) {
        *(uint4 *)(void *)to = make_uint4(fa_pack_x2(x[0], x[1]), fa_pack_x2(x[2], x[3]),
                                          fa_pack_x2(x[4], x[5]), fa_pack_x2(x[6], x[7]));
        return;
    }
#pragma unroll
    for (int n = 0; n < 8; n++)
        if (n < keys) fa_store_element(to, ELEMENT, n * d->key, x[n]);
}

/* Stores a thread's elements of a tile in dbias. */
FA_DEVICE void put_tile(const dbias_place *d, int head, int tile, float sums[ADDER_VECTORS][8])
{
    char *to = d->first + head * d->head + tile * (QUERIES * d->row);
    const int rows = d->rows - tile * QUERIES;
#pragma unroll
    for (int n = 0; n < ADDER_VECTORS; n++) {
        const int row = n * ADDER_ROWS % QUERIES, key = n * ADDER_ROWS / QUERIES * OWN_KEYS;
        if (row < rows) put_eight(d, to + row * d->row + key * d->key * 2, d->keys - key, sums[n]);
    }
}

/* The thread's first four sums of a part of a tile; the others are at a distance of all threads. */
FA_DEVICE float4 *sums_of_part(float *part, int thread) { return (float4 *)(void *)part + thread; }

FA_DEVICE void take_sums(float *part, int thread, float sums[PART_VECTORS][8])
{
    const float4 *from = sums_of_part(part, thread);
#pragma unroll
    for (int n = 0; n < 2 * PART_VECTORS; n++) {
        const float4 x = from[n * ADDERS];
        float *to = sums[n / 2] + n % 2 * 4;
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }
}

FA_DEVICE void leave_part(float *part, int thread, float sums[PART_VECTORS][8])
{
    float4 *to = sums_of_part(part, thread);
#pragma unroll
    for (int n = 0; n < 2 * PART_VECTORS; n++) {
        const float *x = sums[n / 2] + n % 2 * 4;
        to[n * ADDERS] = make_float4(x[0], x[1], x[2], x[3]);
    }
}

/* ---- The last units -------------------------------------------------------------------------- */

/* Adds up a tile of a unit, from global memory, and stores it in dbias. */
FA_DEVICE void add_tile(const fa_backward_sm90_params *s, const left_unit *u,
                        const dbias_place *place, int head, int tile, int thread)
{
    const char *from = u->ds + (head * s->q_tiles + tile) * DS_BYTES + 16 * thread;
    const int shares = sees_tile(u, tile) ? u->shares : 0;
    float sums[ADDER_VECTORS][8] = {{0}};
    if (shares > 0 && !u->begins)
#pragma unroll
        for (int part = 0; part < SUM_PARTS; part++)
            take_sums(u->sums + (int64_t)tile * TILE_SUMS + part * (TILE_SUMS / SUM_PARTS), thread,
                      sums + part * PART_VECTORS);
#pragma unroll 1
    for (int first = 0; first < shares; first += SHARES_AT_ONCE) {
        uint4 x[SHARES_AT_ONCE][ADDER_VECTORS];
#pragma unroll
        for (int m = 0; m < SHARES_AT_ONCE; m++) /* after the last share, that one again */
#pragma unroll
            for (int n = 0; n < ADDER_VECTORS; n++)
                x[m][n] = *(const uint4 *)(from + min(first + m, shares - 1) * u->step +
                                           n * (16 * ADDERS));
#pragma unroll
        for (int m = 0; m < SHARES_AT_ONCE; m++)
#pragma unroll
            for (int n = 0; n < ADDER_VECTORS && first + m < shares; n++)
                add_eight(sums[n], x[m][n]);
    }
    put_tile(place, head, tile, sums);
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

/* Executed by the same lane after it has left everything: tells the others whether they must add up
 * the unit. */
FA_DEVICE void count_left(const pipeline *pipe, const fa_backward_sm90_params *s)
{
    const int32_t unit = unit_of_block(s);
    ptx_bulk_wait(0);
    ptx_fence_proxy_async_global();
    const int32_t before = ptx_counter_take(&s->left.counters[2 * unit]);
    if (before + 1 == STORE_WARPS * s->left.blocks) pipe->state->adds_left = true;
    ptx_mbarrier_arrive(&pipe->state->left);
}

/* Whether the block adds up its unit, when all of the block's shared memory is free. */
FA_DEVICE bool wait_for_left(const pipeline *pipe)
{
    ptx_mbarrier_wait(&pipe->state->left, 0);
    return pipe->state->adds_left;
}

FA_DEVICE void load_share(const pipeline *pipe, int number, const void *from)
{
    shared_state *state = pipe->state;
    const int slot = share_slot(number);
    ptx_mbarrier_wait(&state->share_empty[slot], share_parity(number) ^ 1);
    ptx_mbarrier_arrive_expect(&state->share_full[slot], DS_BYTES);
    ptx_bulk_load(pipe->buffers + slot * DS_BYTES, from, &state->share_full[slot], DS_BYTES);
}

/* Executed by one lane of the load warp at the end: loads what add_unit adds, in the same order. */
FA_DEVICE void load_left(const pipeline *pipe, const fa_backward_params *p,
                         const fa_backward_sm90_params *s)
{
    const int32_t unit = unit_of_block(s), before = unit - s->left_groups.units;
    if (unit >= s->left.summed || !wait_for_left(pipe)) return;
    const left_unit u = find_left_unit(p, s, work_of(pipe), unit);
    if (s->left_groups.count > 1 && before >= 0)
        ptx_counter_wait(&s->left.counters[2 * before + 1], 1);
    ptx_fence_proxy_async_global();
    int number = 0;
#pragma unroll 1
    for (int head = 0; head < u.heads; head++)
#pragma unroll 1
        for (int tile = u.from; tile < u.to; tile++) {
            const float *sums = u.sums + (int64_t)tile * TILE_SUMS;
            const char *ds = u.ds + (head * s->q_tiles + tile) * DS_BYTES;
            for (int part = 0; part < SUM_PARTS && !u.begins; part++)
                load_share(pipe, number++, sums + part * (TILE_SUMS / SUM_PARTS));
#pragma unroll 1
            for (int m = 0; m < u.shares; m++) load_share(pipe, number++, ds + m * u.step);
        }
}

/* Waits for what load_share loads, and returns where it is. */
FA_DEVICE char *acquire_share(const pipeline *pipe, int number)
{
    const int slot = share_slot(number);
    ptx_mbarrier_wait(&pipe->state->share_full[slot], share_parity(number));
    return pipe->buffers + slot * DS_BYTES;
}

FA_DEVICE void release_share(const pipeline *pipe, int number, int leader)
{
    __syncwarp(); /* all lanes have read it */
    ptx_mbarrier_arrive_if(&pipe->state->share_empty[share_slot(number)], leader);
}

/* Adds up a unit, by ADDERS threads. */
FA_DEVICE void add_unit(const pipeline *pipe, const fa_backward_params *p,
                        const fa_backward_sm90_params *s, const left_unit *u, int thread)
{
    const dbias_place place = find_dbias_place(p, u, thread);
    const int leader = thread % 32 == 0;
    int number = 0;
#pragma unroll 1
    for (int head = 0; head < u->heads; head++)
#pragma unroll 1
        for (int tile = 0; tile < s->q_tiles; tile++) {
            const bool sees = sees_tile(u, tile);
            float *const parts = u->sums + (int64_t)tile * TILE_SUMS;
            float sums[ADDER_VECTORS][8] = {{0}};
            if (sees && !u->begins)
#pragma unroll
                for (int part = 0; part < SUM_PARTS; part++, number++) {
                    take_sums((float *)(void *)acquire_share(pipe, number), thread,
                              sums + part * PART_VECTORS);
                    release_share(pipe, number, leader);
                }
#pragma unroll 1
            for (int m = 0; m < (sees ? u->shares : 0); m++, number++) {
                const char *from = acquire_share(pipe, number) + 16 * thread;
#pragma unroll
                for (int n = 0; n < ADDER_VECTORS; n++)
                    add_eight(sums[n], *(const uint4 *)(from + n * (16 * ADDERS)));
                release_share(pipe, number, leader);
            }
            if (u->ends) put_tile(&place, head, tile, sums);
            else if (sees)
#pragma unroll
                for (int part = 0; part < SUM_PARTS; part++)
                    leave_part(parts + part * (TILE_SUMS / SUM_PARTS), thread,
                               sums + part * PART_VECTORS);
        }
}

/* Executed by the consumers when they have nothing else to do. */
FA_DEVICE void add_left(const pipeline *pipe, const fa_backward_params *p,
                        const fa_backward_sm90_params *s)
{
    const int32_t unit = unit_of_block(s);
    const int thread = (int)threadIdx.x - WARPGROUP;
    ptx_fence_proxy_async(); /* gradients went through shared memory that is loaded into now */
    __syncwarp();
    ptx_mbarrier_arrive_if(&pipe->state->left, thread % 32 == 0);
    if (unit >= s->left.summed || !wait_for_left(pipe)) return;
    const left_unit u = find_left_unit(p, s, work_of(pipe), unit);
    add_unit(pipe, p, s, &u, thread);
    ptx_named_barrier_sync(NAMED_BARRIER_CONSUMERS, ADDERS);
    if (thread == 0) ptx_counter_add(&s->left.counters[2 * unit + 1]);
}

#endif

#endif
