/*
 * Where a block waits for its keys and values: right after their loads, or until rows have been
 * cleared as well.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_KEYS_CUH
#define FA_KERNELS_BACKWARD_SM90_KEYS_CUH

#include "backward_sm90/config.cuh"
#include "backward_sm90/pipeline.cuh"
#include "backward_sm90/work.cuh"
#include "ptx/barrier.cuh"

/* Whether a mask or a bias may hide keys. If so, keys are searched for numbers that are not
 * finite. */
FA_DEVICE bool hides_keys(const fa_attention_params *p)
{
    return HIDES && (p->mask.data || p->bias.data);
}

FA_DEVICE void wait_for_k(const pipeline *pipe, const fa_attention_params *p)
{
    shared_state *state = pipe->state;
    const block_work *w = work_of(pipe);
    const bool changes = hides_keys(p) || clears_keys(w);
    ptx_mbarrier_wait(changes ? &state->k_full : &state->k_loaded,
                      changes ? cleared_parity(w) : keys_parity(w));
}

FA_DEVICE void wait_for_v(const pipeline *pipe)
{
    shared_state *state = pipe->state;
    const block_work *w = work_of(pipe);
    const bool changes = clears_keys(w);
    ptx_mbarrier_wait(changes ? &state->v_full : &state->v_loaded,
                      changes ? cleared_parity(w) : keys_parity(w));
}

#endif
