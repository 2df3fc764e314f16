/*
 * The warps that load: one keys and queries, one values and dout. Stages of queries are released later than those of dout,
 * which then need not wait for them.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_WIDE_LOAD_CUH
#define FA_KERNELS_BACKWARD_SM90_WIDE_LOAD_CUH

#include "backward_sm90_wide/config.cuh"
#include "backward_sm90_wide/pipeline.cuh"
#include "backward_sm90/producer.cuh"
#include "backward_sm90/work.cuh"

FA_DEVICE void load_keys_and_queries(const pipeline *pipe, const fa_attention_params *p,
                                     const fa_backward_sm90_params *s)
{
    const block_work *w = &pipe->state->work;
    for (tile_cursor at = first_tile(w); at.count < w->tiles; advance(&at, w->from, w->to)) {
        const kept_rows kept = keep_queries(pipe, p, s, &at);
        load_q(pipe, s, &at, &kept);
        if (at.count == 0) finish_k(pipe, p);
    }
}

FA_DEVICE void load_values_and_dout(const pipeline *pipe, const fa_attention_params *p,
                                    const fa_backward_sm90_params *s)
{
    const block_work *w = &pipe->state->work;
    for (tile_cursor at = first_tile(w); at.count < w->tiles; advance(&at, w->from, w->to)) {
        const kept_rows kept = keep_queries(pipe, p, s, &at);
        load_dout(pipe, s, &at, &kept);
        if (at.count == 0) finish_v(pipe);
    }
}

#endif
