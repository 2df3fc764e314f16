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
#include "ptx/registers.cuh"
#include "ptx/semaphore.cuh"
#include "ptx/tma.cuh"

enum {
    ADDERS = CONSUMERS * WARPGROUP,         /* threads that add up a tile */
    ADDER_VECTORS = DS_BYTES / 16 / ADDERS, /* of eight elements, of a thread */
    ADDER_ROWS = ADDERS / 8,                /* whose eight keys each are a vector of all threads */
    SHARES_AT_ONCE = 4,
    BYTES_AHEAD = 256 << 10 /* that are being prefetched to the L2 cache */
};

/* What the blocks of a unit have left. */
typedef struct left_unit {
    const char *ds;          /* the first share of its first tile */
    int64_t step;            /* bytes from a share to the next one */
    int64_t item, head, key; /* the first ones, in dbias */
    int shares;              /* of each element */
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
    u.shares = by_heads ? s->left.blocks * w->heads : s->left.blocks;
    u.item = by_items ? 0 : w->sequence.batch;
    u.head = by_heads ? 0 : w->sequence.head;
    u.key = w->keys.first;
    u.heads = by_heads ? 1 : w->heads;
    u.from = w->from;
    u.to = w->to;
    return u;
}

/* ---- A tile ---------------------------------------------------------------------------------- */

/* first: sums begin with these elements. */
FA_DEVICE void add_eight(float *sums, uint4 x, bool first)
{
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const float2 y = fa_unpack_x2(words[n], ELEMENT);
        sums[2 * n] = first ? y.x : sums[2 * n] + y.x;
        sums[2 * n + 1] = first ? y.y : sums[2 * n + 1] + y.y;
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

/* Some shares of a tile, which are added together. */
typedef struct left_shares {
    int head, tile;
    int first; /* of SHARES_AT_ONCE, or fewer at the end */
} left_shares;

/* Shares from the first one on. A tile that sees none of the keys has none, and its sums are 0. */
FA_DEVICE int count_shares(const left_unit *u, const left_shares *at)
{
    return at->tile >= u->from && at->tile < u->to ? u->shares - at->first : 0;
}

FA_DEVICE void advance_shares(const fa_backward_sm90_params *s, const left_unit *u, left_shares *at)
{
    const bool last = count_shares(u, at) <= SHARES_AT_ONCE;
    at->first = last ? 0 : at->first + SHARES_AT_ONCE;
    at->tile += last;
    if (at->tile < s->q_tiles) return;
    at->tile = 0;
    at->head++;
}

/* A thread's elements. After the last share, any share is loaded again. */
FA_DEVICE void load_shares(const fa_backward_sm90_params *s, const left_unit *u,
                           const left_shares *at, int thread,
                           uint4 x[SHARES_AT_ONCE][ADDER_VECTORS])
{
    const char *from = u->ds + ((int64_t)at->head * s->q_tiles + at->tile) * DS_BYTES +
                       at->first * u->step + 16 * thread;
    const int last = u->shares - 1 - at->first;
#pragma unroll
    for (int m = 0; m < SHARES_AT_ONCE; m++)
#pragma unroll
        for (int n = 0; n < ADDER_VECTORS; n++)
            x[m][n] = *(const uint4 *)(from + (m < last ? m : last) * u->step + n * (16 * ADDERS));
}

/* Adds a thread's elements of share m to its sums. */
FA_DEVICE void add_share(const uint4 *x, float sums[ADDER_VECTORS][8], bool first)
{
#pragma unroll
    for (int n = 0; n < ADDER_VECTORS; n++) add_eight(sums[n], x[n], first);
}

/* The first of some shares. */
FA_DEVICE void add_first_share(const left_unit *u, const left_shares *at,
                               uint4 x[SHARES_AT_ONCE][ADDER_VECTORS], float sums[ADDER_VECTORS][8])
{
    if (at->first > 0) add_share(x[0], sums, false);
    else add_share(x[0], sums, true);
    if (count_shares(u, at) > 0) return;
#pragma unroll
    for (int n = 0; n < ADDER_VECTORS; n++)
#pragma unroll
        for (int k = 0; k < 8; k++) sums[n][k] = 0; /* nothing has been loaded */
}

/* The others. Sums go to dbias with a tile's last ones. */
FA_DEVICE void add_other_shares(const left_unit *u, const dbias_place *d, const left_shares *at,
                                uint4 x[SHARES_AT_ONCE][ADDER_VECTORS],
                                float sums[ADDER_VECTORS][8])
{
    const int count = count_shares(u, at);
#pragma unroll
    for (int m = 1; m < SHARES_AT_ONCE; m++)
        if (m < count) add_share(x[m], sums, false);
    if (count > SHARES_AT_ONCE) return;
    char *to = d->first + at->head * d->head + at->tile * (QUERIES * d->row);
    const int rows = d->rows - at->tile * QUERIES;
#pragma unroll
    for (int n = 0; n < ADDER_VECTORS; n++) {
        const int row = n * ADDER_ROWS % QUERIES, key = n * ADDER_ROWS / QUERIES * OWN_KEYS;
        if (row < rows) put_eight(d, to + row * d->row + key * d->key * 2, d->keys - key, sums[n]);
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

/* Prefetches the shares of a tile, and goes on to the next tile. */
FA_DEVICE void fetch_tile(const fa_backward_sm90_params *s, const left_unit *u, left_shares *at,
                          int thread)
{
    const bool sees = at->head < u->heads && at->tile >= u->from && at->tile < u->to;
    const char *from = u->ds + ((int64_t)at->head * s->q_tiles + at->tile) * DS_BYTES;
#pragma unroll 1
    for (int i = sees ? thread : u->shares; i < u->shares; i += ADDERS)
        ptx_bulk_prefetch(from + i * u->step, DS_BYTES);
    if (++at->tile < s->q_tiles) return;
    at->tile = 0;
    at->head++;
}

/* Adds up a unit, by ADDERS threads. While they add some shares, they load the next ones: after the
 * first share, because a wait for some loads is a wait for all that have been issued. */
FA_DEVICE void add_unit(const fa_backward_params *p, const fa_backward_sm90_params *s,
                        const left_unit *u, int thread)
{
    const dbias_place place = find_dbias_place(p, u, thread);
    float sums[ADDER_VECTORS][8];
    uint4 x[2][SHARES_AT_ONCE][ADDER_VECTORS];
    left_shares at = {0, 0, 0}, next = {0, 0, 0}, fetched = {0, 0, 0};
#pragma unroll 1
    for (int64_t bytes = 0; bytes < BYTES_AHEAD; bytes += (int64_t)u->shares * DS_BYTES)
        fetch_tile(s, u, &fetched, thread);
    if (count_shares(u, &at) > 0) load_shares(s, u, &at, thread, x[0]);
#pragma unroll 1
    while (at.head < u->heads)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (at.head >= u->heads) break;
            add_first_share(u, &at, x[i], sums);
#pragma unroll
            for (int n = 0; n < ADDER_VECTORS; n++) ptx_register_fence(sums[n], 8);
            advance_shares(s, u, &next);
            if (next.head < u->heads && count_shares(u, &next) > 0)
                load_shares(s, u, &next, thread, x[1 - i]);
            if (next.first == 0) fetch_tile(s, u, &fetched, thread);
            add_other_shares(u, &place, &at, x[i], sums);
            at = next;
        }
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
    add_unit(p, s, &u, thread);
    ptx_named_barrier_sync(NAMED_BARRIER_CONSUMERS, ADDERS);
    if (thread == 0) ptx_counter_add(&s->left.counters[2 * unit + 1]);
}

#endif

#endif
