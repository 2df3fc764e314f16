/*
 * The warps that load, for one work tile: one loads keys, queries and their rows, the other values and dout. Stages of
 * queries are released later than stages of dout. With separate warps, dout does not wait for
 * queries.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_WIDE_LOAD_CUH
#define FA_KERNELS_BACKWARD_SM90_WIDE_LOAD_CUH

#include "backward_sm90_wide/config.cuh"
#include "backward_sm90_wide/pipeline.cuh"
#include "backward_sm90/producer.cuh"
#include "backward_sm90/work.cuh"
#include "ptx/registers.cuh"

/* Loads a tile of queries or dout of which all rows are kept, when its stage is empty. Where the tile is
 * has been found before the wait, in uniform registers: dV and dP wait for the only stage of dout. */
FA_DEVICE void load_kept_tile(const tile_source *from, char *shared, int row, uint64_t *full,
                              uint64_t *empty, int parity)
{
    const int y = (int)ptx_uniform((uint32_t)row), z = (int)ptx_uniform((uint32_t)from->head),
              w = (int)ptx_uniform((uint32_t)from->block);
    const bool leader = ptx_keep(threadIdx.x % 32) == 0;
    ptx_mbarrier_wait(empty, parity);
    if (leader) {
        ptx_mbarrier_arrive_expect(full, from->blocks * Q_BLOCK);
#pragma unroll
        for (int block = 0; block < from->blocks; block++)
            ptx_tma_load_4d(shared + block * Q_BLOCK, from->map, full, 64 * block, y, z, w);
    }
    __syncwarp();
}

FA_DEVICE void load_queries(const pipeline *pipe, const fa_backward_sm90_params *s,
                            const tile_cursor *at, const kept_rows *kept)
{
    shared_state *state = pipe->state;
    const fa_tile *t = &work_of(pipe)->sequence;
    const int stage = q_stage(at->count), head = (int)t->head + at->head;
    const tile_source q = source_of(&s->q, &s->q_step, head, (int)t->block_q, BLOCKS);
#if LOADS_EARLY
    if (at->count == 0 && loads_early(s, &state->works[0])) return;
#endif
    ptx_mbarrier_wait(&state->q_empty[stage], q_parity(at->count) ^ 1);
    load_row_numbers(pipe, s, at, stage, &state->q_full[stage]);
    load_tile(pipe, &q, pipe->buffers + Q_AT + stage * Q_BYTES, QUERIES,
              (int)t->start_q + at->tile * QUERIES, &state->q_full[stage], kept);
}

FA_DEVICE void load_dout(const pipeline *pipe, const fa_backward_sm90_params *s,
                         const tile_cursor *at, const kept_rows *kept)
{
    shared_state *state = pipe->state;
    const fa_tile *t = &work_of(pipe)->sequence;
    const int stage = dout_stage(at->count), head = (int)t->head + at->head;
    const tile_source dout =
        source_of(&s->dout, &s->dout_step, head, (int)t->block_q, VALUE_BLOCKS);
#if LOADS_EARLY
    if (at->count == 0 && loads_early(s, &state->works[0])) return;
#endif
    uint64_t *full = &state->dout_full[stage], *empty = &state->dout_empty[stage];
    char *to = pipe->buffers + DOUT_AT + stage * DOUT_BYTES;
    const int row = (int)t->start_q + at->tile * QUERIES, parity = dout_parity(at->count) ^ 1;
    if (!HIDES && keeps_all(kept, QUERIES)) {
        load_kept_tile(&dout, to, row, full, empty, parity);
        return;
    }
    ptx_mbarrier_wait(empty, parity);
    load_tile(pipe, &dout, to, QUERIES, row, full, kept);
}

/* Loads the columns of the peer's keys in which the block computes dQ. */
FA_DEVICE void load_peer_keys(const pipeline *pipe, const fa_backward_sm90_params *s)
{
    shared_state *state = pipe->state;
    const block_work *w = work_of(pipe);
    const fa_tile *t = &w->sequence;
    const int row = (int)(t->start_k + w->keys.first) + PEER_BLOCK * BLOCK_KEYS;
    tile_source from = source_of(&s->k, &s->k_step, (int)t->head_kv, (int)t->block_k, PEER_BLOCKS);
    from.first = PEER_FIRST;
    if (threadIdx.x % 32 == 0)
        issue_tile(&from, pipe->buffers + PEER_K_AT, BLOCK_KEYS, row, &state->peer_k_loaded);
}

/* Clears rows of the peer's keys that are not kept, before finish_k arrives for all keys. */
FA_DEVICE void finish_peer_keys(const pipeline *pipe, const fa_attention_params *p)
{
    const block_work *w = work_of(pipe);
    char *keys = pipe->buffers + PEER_K_AT;
    if (hides_keys(p) || !clears_keys(w)) return; /* the dQ warpgroup clears them */
    ptx_mbarrier_wait(&pipe->state->peer_k_loaded, keys_parity(w));
    const kept_rows kept = keep_keys(w, PEER_BLOCK * BLOCK_KEYS);
    clear_rows(keys, BLOCK_KEYS, PEER_BLOCKS, &kept);
}

FA_DEVICE void load_keys_and_queries(const pipeline *pipe, const fa_attention_params *p,
                                     const fa_backward_sm90_params *s)
{
    const block_work *w = work_of(pipe);
    const int first = first_count(w), end = end_count(w);
    for (tile_cursor at = first_tile(w); at.count < end; advance(&at, w->from, w->to)) {
        const kept_rows kept = keep_queries(pipe, p, s, &at);
        load_queries(pipe, s, &at, &kept);
        if (at.count > first) continue;
#if PERSISTENT
        /* A stage of queries is free before the keys are, which dQ reads last. */
        if (threadIdx.x % 32 == 0) {
            ptx_mbarrier_wait(&pipe->state->k_empty, keys_parity(w) ^ 1);
            issue_k(pipe, s, w);
        }
        /* No lane tests a barrier of keys before the previous keys have been loaded. */
        __syncwarp();
#endif
        load_peer_keys(pipe, s);
        finish_peer_keys(pipe, p);
        finish_k(pipe, p);
    }
}

FA_DEVICE void load_values_and_dout(const pipeline *pipe, const fa_attention_params *p,
                                    const fa_backward_sm90_params *s)
{
    const block_work *w = work_of(pipe);
    const int first = first_count(w), end = end_count(w);
    for (tile_cursor at = first_tile(w); at.count < end; advance(&at, w->from, w->to)) {
        const kept_rows kept = keep_queries(pipe, p, s, &at);
#if PERSISTENT
        /* The dK warpgroup has released the only stage of dout, so it has read the values as well. */
        if (at.count == first) {
            ptx_mbarrier_wait(&pipe->state->dout_empty[0], dout_parity(first) ^ 1);
            if (threadIdx.x % 32 == 0) issue_v(pipe, s, w);
            __syncwarp();
        }
#endif
        load_dout(pipe, s, &at, &kept);
        if (at.count == first) finish_v(pipe);
    }
}

#endif
