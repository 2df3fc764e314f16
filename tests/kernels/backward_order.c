/* See backward_order.h. The build defines ORDER, the function's name, and the macros of a variant. */
#define FA_CUDA_ON_CPU 1

#include "backward_order.h"

#include "backward_sm90/config.cuh"
#include "backward_sm90/joined.cuh"
#include "backward_sm90/work.cuh"

order_place ORDER(const fa_attention_params *p, const fa_backward_sm90_params *s, int64_t block)
{
    order_place place = {ORDER_MULTIPLIES, block, false};
#if JOINED
    const joined_block found = find_joined_block(p, s, (uint32_t)block);
    place.number = found.number;
    if (found.kind == BLOCK_PREPARES) place.kind = ORDER_PREPARES;
    if (found.kind == BLOCK_FINISHES) place.kind = ORDER_FINISHES;
    if (found.kind != BLOCK_MULTIPLIES) return place;
#endif
#if ORDERED
    place.number = find_ordered_task(p, s, place.number, &place.ascends);
#else
    place.number = find_task(p, s, place.number);
#endif
    return place;
}
