/*
 * The order in which blocks take work tiles in the dynamic schedule if lengths are on the device. Tasks are numbered without
 * gaps: 32 sequences after the other, from the last ones to the first; of these 32 those with the most keys come first. In a
 * sequence, one set of heads comes after the other (s->alternating_heads); in a set, query tiles from the last, which sees most keys
 * under a causal mask, to the first, and the heads of the set follow each other. So long work tiles are taken first and blocks
 * end together.
 *
 * The scheduler warp counts the query tiles of 32 sequences together. Its tasks ascend, so it goes through all sequences once,
 * and sequences without work tiles cost nothing: there may be hundreds beside a few long ones. All that it computes is
 * warp-uniform, unless it says something else.
 */
#ifndef FA_KERNELS_FORWARD_SM90_TAKEN_ORDER_CUH
#define FA_KERNELS_FORWARD_SM90_TAKEN_ORDER_CUH

#include "forward_sm90/config.cuh"
#include "common/device.cuh"
#include "forward_sm90/lengths.cuh"
#include "forward_sm90/work_tile.cuh"

typedef struct taken_order {
    int sequences; /* lane 0 has the last one of these, lane 1 the one in front of it ... */
    int before;    /* query tiles of the sequences behind them, which are taken before */
    int begin;     /* query tiles of those 32 that are taken before those of a lane's sequence; */
    int end;       /* and together with its own */
} taken_order;

FA_DEVICE void load_taken_lanes(const fa_attention_params *p, const fa_sm90_params *s,
                                taken_order *order)
{
    sequence_lengths of;
    const int lane = (int)threadIdx.x % 32, sequence = order->sequences - 1 - lane;
    find_rows_and_keys(p, max(sequence, 0), &of);
    const int tiles = sequence < 0 ? 0 : count_query_tiles(s, of.room_q);
    order->begin = 0;
    for (int other = 0; other < min(order->sequences, 32); other++) {
        const int keys = __shfl_sync(0xffffffff, of.n_k, other),
                  more = __shfl_sync(0xffffffff, tiles, other);
        if (keys > of.n_k || (keys == of.n_k && other < lane))
            order->begin = add_lengths(order->begin, more);
    }
    order->end = add_lengths(order->begin, tiles);
}

/* Query tiles of the lanes' sequences. */
FA_DEVICE int count_taken_lanes(const taken_order *order)
{
    return (int)__reduce_max_sync(0xffffffff, (uint32_t)order->end);
}

/* Heads whose query tiles differ. */
FA_DEVICE int count_tile_heads(const fa_attention_params *p, const fa_sm90_params *s)
{
#if SPLIT
    return (int)fa_divide_by(p->heads_q, s->split.group.by_heads);
#else
    return (void)s, (int)p->heads_q;
#endif
}

/* Returns the number of tasks: none, if there are more than there can be, because lengths are wrong. */
FA_DEVICE int64_t begin_taken_order(const fa_attention_params *p, const fa_sm90_params *s,
                                    taken_order *order)
{
    int tiles = 0;
    order->sequences = count_sequences(p);
    order->before = 0;
    load_taken_lanes(p, s, order);
    const int nearest = count_taken_lanes(order);
#pragma unroll 4
    for (int i = (int)threadIdx.x % 32; i < order->sequences - 32; i += 32) {
        sequence_lengths of;
        find_rows_and_keys(p, i, &of);
        tiles = add_lengths(tiles, count_query_tiles(s, of.room_q));
    }
    if (order->sequences > 32) tiles = __shfl_sync(0xffffffff, add_lanes_in_front(tiles), 31);
    const int64_t tasks = (int64_t)add_lengths(tiles, nearest) * count_tile_heads(p, s);
    return tasks <= s->tasks ? tasks : 0;
}

/* Task n, at least as large as the one before. False: there is no such task, because lengths are wrong. */
FA_DEVICE bool find_taken_tile(const fa_attention_params *p, const fa_sm90_params *s,
                               taken_order *order, int n, fa_tile *t)
{
    sequence_lengths of;
    const int heads = count_tile_heads(p, s), number = (int)fa_divide_by(n, s->by_heads);
    for (;;) {
        const int all = add_lengths(order->before, count_taken_lanes(order));
        if (number < all) break;
        order->before = all;
        order->sequences -= 32;
        if (order->sequences <= 0) return false;
        load_taken_lanes(p, s, order);
    }
    const int x = number - order->before,
              lane = __popc(__ballot_sync(0xffffffff, order->begin <= x && x < order->end) - 1);
    find_rows_and_keys(p, order->sequences - 1 - lane, &of);
    const int tiles = count_query_tiles(s, of.room_q),
              begin = order->before + __shfl_sync(0xffffffff, order->begin, lane);
    int set = 0, rest = n - begin * heads;
    if (s->alternating_heads < heads) {
        set = (int)((uint32_t)rest / (uint32_t)(tiles * s->alternating_heads));
        rest -= set * tiles * s->alternating_heads;
    }
    const int tile = (int)((uint32_t)rest / (uint32_t)s->alternating_heads);
    *t = make_tile(p, s, &of, set * s->alternating_heads + rest - tile * s->alternating_heads,
                   tiles - 1 - tile);
    return tile >= 0 && tile < tiles;
}

/* Describes task n. */
FA_DEVICE bool describe_taken_tile(const fa_attention_params *p, const fa_sm90_params *s,
                                   taken_order *order, int n, work_tile *w)
{
    const fa_tile *t = &w->query_tile;
    if (!find_taken_tile(p, s, order, n, &w->query_tile)) return false;
#if SPLIT
    w->box = s->split.group.box;
    w->sums = NULL;
#endif
    w->rows = rows_of(w, (int)(t->room_q - t->first));
    w->out = fa_view_row(&p->out, t->block_q, t->start_q + t->first, t->head);
    find_key_tiles(find_reach(p, s, t), w);
    find_tiles_of_consumers(w);
    find_options(p, s, w);
    return true;
}

#endif
