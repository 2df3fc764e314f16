/*
 * Norms of rows, which `prepare` stores for weight_sums.cu if an option changes scores: a score is at
 * most the product of the norms of its query and its key. They follow the factors in the workspace,
 * for each tile: the norm of the longest of its queries that have weights, and of the longest of its
 * share of the sequence's keys.
 */
#ifndef FA_KERNELS_BACKWARD_SM80_NORMS_CUH
#define FA_KERNELS_BACKWARD_SM80_NORMS_CUH

#include "backward_sm80/backward_sm80.h"
#include "common/device.cuh"
#include "common/params.h"

/* Both launches have a task for each tile of the workspace. */
FA_DEVICE float2 *find_norms(const fa_attention_params *p, const fa_backward_sm80_params *s,
                             int64_t tile)
{
    return (float2 *)(void *)(s->factors + p->tasks * FA_BACKWARD_SM80_TILE) + tile;
}

/* Options after which a log-sum-exp does not show how large scores are. */
FA_DEVICE bool changes_scores(const fa_attention_params *p)
{
    return p->mask.data || p->bias.data || p->alibi_slopes;
}

FA_DEVICE bool needs_norms_of_rows(const fa_attention_params *p, const fa_backward_sm80_params *s)
{
    return s->factors && changes_scores(p);
}

#endif
