/*
 * Sequences whose lengths are on the device, in 32 bits, because a block's first load waits for them; and the query tile of
 * such a sequence.
 */
#ifndef FA_KERNELS_FORWARD_SM90_LENGTHS_CUH
#define FA_KERNELS_FORWARD_SM90_LENGTHS_CUH

#include "forward_sm90/config.cuh"
#include "common/device.cuh"
#include "common/sequence.cuh"
#include "forward_sm90/work_tile.cuh"
#include "ptx/grid.cuh"

/* What all work tiles of a sequence have in common: its rows and keys, as in fa_tile. */
typedef struct sequence_lengths {
    int batch, start_q, room_q, n_q, start_k, n_k;
} sequence_lengths;

/* Sequences: packed ones as in fa_packed_start, because rows of no sequence get zeros. */
FA_DEVICE int count_sequences(const fa_attention_params *p)
{
    return (int)p->batch + (p->cu_seqlens_q ? 2 : 0);
}

/* What memory says about a sequence. All of it is loaded before any of it is used, because a load takes long. */
typedef struct loaded_lengths {
    int before, behind, n_q; /* where the sequence's queries begin and end; how many there are */
    int first_k, end_k, n_k; /* the same of keys */
} loaded_lengths;

/* is_one: whether the number is that of a sequence, and not of the rows before or behind all of them. */
FA_DEVICE loaded_lengths load_lengths(const fa_attention_params *p, int sequence, bool is_one,
                                      int batch)
{
    loaded_lengths x = {0, INT32_MAX, INT32_MAX, 0, INT32_MAX, INT32_MAX};
    if (p->cu_seqlens_q && sequence > 0) x.before = p->cu_seqlens_q[sequence - 1];
    if (p->cu_seqlens_q && sequence <= (int)p->batch) x.behind = p->cu_seqlens_q[sequence];
    if (p->seqlens_q && is_one) x.n_q = p->seqlens_q[batch];
    if (p->cu_seqlens_k) x.first_k = p->cu_seqlens_k[batch], x.end_k = p->cu_seqlens_k[batch + 1];
    if (p->seqlens_k) x.n_k = p->seqlens_k[batch];
    return x;
}

/* The lengths of the first thousand sequences, while the grid in front ends: a lane has 32 of them, some 128 bytes. */
FA_DEVICE void prefetch_lengths(const fa_attention_params *p)
{
    const int sequence = min((int)threadIdx.x % 32 * 32, (int)p->batch - 1);
    if (p->cu_seqlens_q) ptx_prefetch(p->cu_seqlens_q + sequence + 1);
    if (p->seqlens_q) ptx_prefetch(p->seqlens_q + sequence);
    if (p->cu_seqlens_k) ptx_prefetch(p->cu_seqlens_k + sequence + 1);
    if (p->seqlens_k) ptx_prefetch(p->seqlens_k + sequence);
}

/* As fa_locate_packed, fa_locate_padded and fa_locate_keys do. */
FA_DEVICE void find_rows_and_keys(const fa_attention_params *p, int sequence, sequence_lengths *of)
{
    const int rows = (int)p->rows_q;
    const bool packed = p->cu_seqlens_q,
               is_one = !packed || (sequence > 0 && sequence <= (int)p->batch);
    of->batch = !packed ? sequence : is_one ? sequence - 1 : 0;
    const loaded_lengths x = load_lengths(p, sequence, is_one, of->batch);
    of->start_q = packed ? clamp(x.before, rows) : 0;
    of->room_q = max(0, clamp(x.behind, rows) - of->start_q);
    if (packed && is_one && of->room_q < p->fewest_queries) of->room_q = 0;
    of->n_q = is_one ? clamp(x.n_q, of->room_q) : 0;
    of->start_k = max(0, x.first_k);
    of->n_k = (int)p->max_k;
    if (p->cu_seqlens_k) of->n_k = max(0, clamp(x.end_k, (int)p->rows_k) - of->start_k);
    of->n_k = clamp(x.n_k, of->n_k);
    if (of->n_q == 0) of->n_k = of->start_k = 0;
}

/* Query tiles of so many rows, and queries of a query tile; query heads that share one. */
#if SPLIT
FA_DEVICE int count_query_tiles(const fa_sm90_params *s, int rows)
{
    return (int)fa_divide_by(rows + s->split.group.tile_queries - 1,
                             s->split.group.by_tile_queries);
}
FA_DEVICE int queries_of_tile(const fa_sm90_params *s) { return s->split.group.tile_queries; }
FA_DEVICE int heads_of_tile(const fa_sm90_params *s) { return s->split.group.heads; }
#else
FA_DEVICE int count_query_tiles(const fa_sm90_params *s, int rows)
{
    return (void)s, (rows + QUERIES - 1) / QUERIES;
}
FA_DEVICE int queries_of_tile(const fa_sm90_params *s) { return (void)s, QUERIES; }
FA_DEVICE int heads_of_tile(const fa_sm90_params *s) { return (void)s, 1; }
#endif

/* A query tile of the sequence. head: of those whose query tiles differ. */
FA_DEVICE fa_tile make_tile(const fa_attention_params *p, const fa_sm90_params *s,
                            const sequence_lengths *of, int head, int tile)
{
    fa_tile t;
    t.batch = of->batch;
    t.head = head * heads_of_tile(s);
    t.head_kv = fa_divide_by((uint32_t)t.head, s->by_group);
    t.first = tile * queries_of_tile(s);
    t.block_q = p->cu_seqlens_q ? 0 : of->batch;
    t.start_q = of->start_q;
    t.n_q = of->n_q;
    t.room_q = of->room_q;
    t.block_k = p->cu_seqlens_k ? 0 : of->batch;
    t.start_k = of->start_k;
    t.n_k = of->n_k;
    t.diagonal = p->diagonal_given ? p->diagonal : of->n_k - of->n_q;
    return t;
}

/* Two lengths together; FA_SM90_LINE if that is too long, which it only is if lengths are wrong. */
FA_DEVICE int add_lengths(int x, int y)
{
    return (int)min((uint32_t)x + (uint32_t)y, (uint32_t)FA_SM90_LINE);
}

/* A lane's number and those of all lanes in front of it, together. */
FA_DEVICE int add_lanes_in_front(int x)
{
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const int before = __shfl_sync(0xffffffff, x, (lane - apart) & 31);
        if (lane >= apart) x = add_lengths(x, before);
    }
    return x;
}

#endif
