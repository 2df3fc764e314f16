/*
 * The schedule of work tiles under a causal mask. Shared by the kernels and the planner.
 *
 * Work tile n of a head, counted from 1 on, has n units of work. A causal pair is a long and a short work tile of one
 * head, which one block computes one after the other, the long one first. Work tiles n and tiles + 1 - n make pairs
 * of tiles + 1 units; with an odd number of work tiles the middle one has no partner.
 *
 * Blocks take pairs in rounds. In the last round some blocks have no pair. So the heads of that round (those from
 * `full_heads` on, of all batch items) may have more and shorter pairs instead: n and tiles - n, each a unit shorter.
 * Then work tile `tiles` has no partner. If the number of work tiles is even, the middle work tiles of two heads are a
 * pair.
 */
#ifndef FA_KERNELS_COMMON_CAUSAL_SCHEDULE_H
#define FA_KERNELS_COMMON_CAUSAL_SCHEDULE_H

#include <stdbool.h>
#include <stdint.h>

#include "divide.h"

typedef struct fa_causal_pair {
    int64_t head;
    int first, second; /* numbers of work tiles; 0: there is none */
} fa_causal_pair;

/* Pairs of one head. */
FA_SHARED_FUNCTION int64_t fa_causal_pairs(int64_t tiles) { return (tiles + 1) / 2; }

/* Pairs of all heads. */
FA_SHARED_FUNCTION int64_t fa_causal_pairs_of_heads(int64_t tiles, int64_t heads,
                                                    int64_t full_heads)
{
    const int64_t own = fa_causal_pairs(tiles), rest = heads - full_heads;
    return full_heads * own + rest / 2 * (tiles + 1) + rest % 2 * (own + (tiles % 2 == 0));
}

/* The number of heads that have full pairs, for this many blocks: shorter pairs in the last round must not need
 * another round. */
FA_SHARED_FUNCTION int64_t fa_causal_full_heads(int64_t tiles, int64_t heads, int64_t blocks)
{
    const int64_t own = fa_causal_pairs(tiles), rounds = heads * own / blocks;
    const int64_t full_heads = rounds * blocks / own;
    const int64_t pairs = fa_causal_pairs_of_heads(tiles, heads, full_heads);
    return pairs > (rounds + 1) * blocks ? heads : full_heads;
}

/* Shorter pairs, for two heads at a time. If the number of work tiles is even, the middle ones of both heads are a
 * pair; `second` is true for the second of the heads. */
FA_SHARED_FUNCTION fa_causal_pair fa_causal_short_pair(int64_t pair, int tiles, bool second)
{
    const int own = (tiles + 1) / 2, middles = tiles % 2 == 0;
    const int64_t two = fa_divide(pair, tiles + 1);
    const int i = (int)(pair - two * (tiles + 1)), k = i < own ? i : i - own - middles;
    fa_causal_pair found = {2 * two + (i >= own), tiles - k, k};
    if (middles && i == own) found.head = 2 * two + second, found.first = found.second = own;
    return found;
}

/* Pair number `pair` of all heads. full_heads is a parameter of the kernel, loaded where it is needed. */
FA_SHARED_FUNCTION fa_causal_pair fa_find_causal_pair(int64_t pair, int tiles,
                                                      const int64_t *full_heads, bool second)
{
    const int own = (tiles + 1) / 2;
    const int64_t rest = pair - *full_heads * own, head = fa_divide(pair, own);
    if (rest >= 0) {
        fa_causal_pair found = fa_causal_short_pair(rest, tiles, second);
        found.head += *full_heads;
        return found;
    }
    const int k = (int)(pair - head * own);
    const fa_causal_pair found = {head, tiles - k, 2 * k + 1 == tiles ? 0 : k + 1};
    return found;
}

#endif
