/*
 * The order of prepare and finish: of one query tile all heads, then the next tile. So blocks that run at the same time share pages
 * of DRAM where the heads of a row lie side by side. The last batch items come first: what the next launch begins with is in the
 * L2 cache then.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_PASS_ORDER_CUH
#define FA_KERNELS_BACKWARD_SM90_PASS_ORDER_CUH

#include "backward_sm90/backward_sm90.h"
#include "common/divide.h"
#include "common/sequence.cuh"

/* A block's task, as fa_find_tile counts: through the query tiles of a head, from the last one down, then those of the next
 * head. number: of its tile in the workspace. */
FA_DEVICE int64_t find_pass_task(const fa_attention_params *p, const fa_backward_sm90_params *s,
                                 int64_t block, int64_t *number)
{
    const int64_t n = p->tasks - 1 - block, heads = p->heads_q, q_tiles = s->q_tiles;
    const int64_t item = fa_divide(n, heads * q_tiles), rest = n - item * heads * q_tiles;
    const int64_t tile = fa_divide(rest, heads), head = item * heads + rest - tile * heads;
    *number = head * q_tiles + q_tiles - 1 - tile;
    return head * q_tiles + tile;
}

#endif
