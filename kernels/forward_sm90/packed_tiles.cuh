/*
 * Packed queries: which work tiles there are. common/packed.h numbers query tiles without adding up lengths, so many
 * numbers stand for nothing. Here a warp adds up the lengths and counts work tiles without gaps: sequences in the outer
 * loop, then heads, then query tiles. So blocks that work side by side read the same keys. Of a head's query tiles
 * the last comes first: under a causal mask it is the longest.
 *
 * Sequences are numbered as in common/sequence.cuh: 0 and batch + 1 are the rows of no sequence.
 */
#ifndef FA_KERNELS_FORWARD_SM90_PACKED_TILES_CUH
#define FA_KERNELS_FORWARD_SM90_PACKED_TILES_CUH

#include "forward_sm90/config.cuh"
#include "common/device.cuh"
#include "common/sequence.cuh"

/* Each lane has as many sequences, those of lane 0 first. */
typedef struct packed_tiles {
    int32_t each;         /* sequences of a lane */
    int32_t first, count; /* query tiles of the lanes before, and of this one */
    int32_t total;
} packed_tiles;

FA_DEVICE int32_t count_sequences(const fa_attention_params *p) { return (int32_t)p->batch + 2; }

FA_DEVICE int32_t count_query_tiles(const fa_attention_params *p, int32_t s)
{
    const int64_t rows = fa_packed_start(p, s + 1) - fa_packed_start(p, s);
    if (rows <= 0 || (s > 0 && s <= p->batch && rows < p->fewest_queries)) return 0;
    return ((int32_t)rows + QUERIES - 1) / QUERIES;
}

/* The sum of x in the lanes up to this one. */
FA_DEVICE int32_t add_up_lanes(int32_t x)
{
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int32_t other = __shfl_sync(0xffffffff, x, max(lane - distance, 0));
        if (lane >= distance) x += other;
    }
    return x;
}

FA_DEVICE packed_tiles find_packed_tiles(const fa_attention_params *p)
{
    packed_tiles t;
    const int32_t sequences = count_sequences(p);
    t.each = (sequences + 31) / 32;
    const int32_t begin = (int32_t)threadIdx.x % 32 * t.each;
    const int32_t end = min(begin + t.each, sequences);
    t.count = 0;
    for (int32_t s = begin; s < end; s++) t.count += count_query_tiles(p, s);
    const int32_t sum = add_up_lanes(t.count);
    t.first = sum - t.count;
    t.total = __shfl_sync(0xffffffff, sum, 31);
    return t;
}

/* Finds a work tile by its number, for the whole warp. Returns false if there is none. */
FA_DEVICE bool find_packed_tile(const fa_attention_params *p, const packed_tiles *t, int64_t number,
                                fa_tile *found)
{
    const int lane = (int)threadIdx.x % 32;
    const int64_t heads = p->heads_q, tile = fa_divide(number, heads);
    const int owner = __popc(__ballot_sync(0xffffffff, t->first + t->count <= tile));
    if (owner == 32) return false;
    int32_t before = __shfl_sync(0xffffffff, t->first, owner);
    const int32_t begin = owner * t->each, end = min(begin + t->each, count_sequences(p));
    for (int32_t s = begin; s < end; s += 32) {
        const int32_t count = s + lane < end ? count_query_tiles(p, s + lane) : 0;
        const int32_t sum = before + add_up_lanes(count);
        const int own = __popc(__ballot_sync(0xffffffff, sum <= tile));
        before = __shfl_sync(0xffffffff, sum, min(own, 31));
        if (own == 32) continue;
        const int32_t tiles = __shfl_sync(0xffffffff, count, own);
        const int64_t rest = number - (before - tiles) * heads, head = fa_divide(rest, tiles);
        if (rest < 0) return false; /* lengths whose sum overflows */
        *found = fa_find_packed_tile(p, head, s + own, tiles - 1 - (rest - head * tiles), QUERIES);
        return true;
    }
    return false;
}

#endif
