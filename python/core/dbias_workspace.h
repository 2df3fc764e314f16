/*
 * The workspace for computing dbias on tensor cores in a backward call (flashattn.h,
 * fa_workspace_size).
 */
#ifndef FLASHATTN_PYTHON_DBIAS_WORKSPACE_H
#define FLASHATTN_PYTHON_DBIAS_WORKSPACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "flashattn.h"

/* The additional bytes, beyond those of fa_workspace_size; 0: none. q and dbias have axes (batch,
 * sequence, head, dim) and (batch, head, query, key). */
static inline size_t dbias_workspace(const fa_tensor *q, const fa_tensor *dbias,
                                     const fa_options *options)
{
    const int64_t *n = dbias->shape;
    const bool own = n[0] == q->shape[0] && n[1] == q->shape[2];
    if (!dbias->data || dbias->dtype == FA_FLOAT32 || own || n[2] == 1 || n[3] == 1 ||
        options->softcap > 0 || options->flags & FA_BATCH_INVARIANT)
        return 0;
    /* In one order only what backward_sm90 can leave is summed (plan_left in plan_backward_sm90.c). */
    if (options->flags & FA_DETERMINISTIC &&
        (dbias->dtype != q->dtype || q->shape[3] > 128 || options->cu_seqlens_q ||
         options->cu_seqlens_k || options->seqlens_q || options->seqlens_k))
        return 0;
    return (size_t)(n[0] * n[1] * n[2] * n[3]) * sizeof(float) + 256;
}

#endif
