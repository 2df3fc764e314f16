/*
 * Work that a block finds before the grid in front has ended. Kernels that include this define FA_READ_LENGTH as
 * ptx_read_latest.
 */
#ifndef FA_KERNELS_DECODE_SM80_EARLY_WORK_CUH
#define FA_KERNELS_DECODE_SM80_EARLY_WORK_CUH

#include "decode_sm80/work.cuh"

/* Whether the block finds its work before the grid in front has ended. That grid may write lengths of keys, which are read
 * again, but no other lengths. */
FA_DEVICE bool finds_work_early(const fa_attention_params *p)
{
    return !p->cu_seqlens_q && !p->cu_seqlens_k && !p->seqlens_q;
}

/* Whether the sequence has another number of keys than when its work was found. */
FA_DEVICE bool has_other_keys(const fa_attention_params *p, const fa_work *w)
{
    if (!p->seqlens_k) return false;
    const int64_t keys = FA_READ_LENGTH(p->seqlens_k + w->tile.batch);
    return fa_max64(0, fa_min64(keys, p->max_k)) != w->tile.n_k;
}

#endif
