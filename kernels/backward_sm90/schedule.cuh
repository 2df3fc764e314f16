/*
 * The scheduler warp of a persistent block. It chooses the block's work tiles and describes them. In a ROUNDING
 * variant the load warp does that between its loads.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_SCHEDULE_CUH
#define FA_KERNELS_BACKWARD_SM90_SCHEDULE_CUH

#include "backward_sm90/clear_ahead.cuh"
#include "backward_sm90/config.cuh"
#include "backward_sm90/pipeline.cuh"
#include "backward_sm90/work.cuh"
#include "ptx/barrier.cuh"
#include "ptx/grid.cuh"

#if PERSISTENT

/* Whether each block has at most one work tile, that of its number. */
FA_DEVICE bool has_one_work_tile(const fa_attention_params *p) { return p->tasks <= gridDim.x; }

/* Whether the block's first work tile is that of its number. */
FA_DEVICE bool begins_with_own(const fa_attention_params *p, const fa_backward_sm90_params *s)
{
    const bool waits = s->cleared || (ORDERED ? s->semaphores != NULL : s->first_ahead);
    return !s->next_work || !waits || has_one_work_tile(p);
}

/* The block's work tile n: the first one by the block's number, the others from a counter, which
 * `prepare` clears. If blocks wait for others, which clear sums, store first shares or add theirs
 * before, all come from the counter: then work tiles with lower numbers belong to blocks that have
 * started. */
FA_DEVICE int64_t take_work_tile(const fa_attention_params *p, const fa_backward_sm90_params *s,
                                 int n)
{
    const bool own = begins_with_own(p, s);
    if (!s->next_work) return blockIdx.x + n * (int64_t)gridDim.x;
    if (n == 0 && own) return blockIdx.x;
    if (has_one_work_tile(p)) return p->tasks;
    return (own ? gridDim.x : 0) + (int64_t)atomicInc(s->next_work, UINT32_MAX);
}

#if LOADER_SCHEDULES

/* Executed by one thread: describes the block's work tile of this number, and counts it. */
FA_DEVICE void schedule_next(const pipeline *pipe, const fa_attention_params *p,
                             const fa_backward_sm90_params *s, int *scheduled)
{
    shared_state *state = pipe->state;
    const int n = *scheduled;
    ptx_mbarrier_wait(&state->work_empty[n % WORKS], work_parity(n) ^ 1);
    if (n > 0 || !begins_with_own(p, s)) ptx_wait_for_grids();
    const block_work *before = n > 0 ? &state->works[(n - 1) % WORKS] : NULL;
    describe(p, s, take_work_tile(p, s, n), before, before ? end_count(before) + 1 : 0,
             &state->works[n % WORKS]);
    ptx_mbarrier_arrive(&state->work_full[n % WORKS]);
    *scheduled = n + 1;
}

/* The same, unless it has been described, or there is no room for it yet. */
FA_DEVICE void schedule_if_free(const pipeline *pipe, const fa_attention_params *p,
                                const fa_backward_sm90_params *s, int *scheduled)
{
    shared_state *state = pipe->state;
    const int n = *scheduled;
    if (work_of(pipe) == &state->works[n % WORKS]) return;
    if (ptx_mbarrier_is_over(&state->work_empty[n % WORKS], work_parity(n) ^ 1))
        schedule_next(pipe, p, s, scheduled);
}

#else

/* Waits until most of the work tile before has been loaded. A block that took its next work tile as
 * soon as there is room for the description would take it from blocks that end sooner: all blocks
 * take their second one when they begin, also those whose first one is the longest (H200, head dim
 * 64, causal, n 8k: 4 heads 214 and 152 us, 10 heads 396 and 379). Where sums have one order, the
 * blocks of later key tiles would also wait for all of the work tile before. */
FA_DEVICE void wait_until_late(const pipeline *pipe, int n)
{
    if (n > 0) ptx_mbarrier_wait(&pipe->state->work_loaded[(n - 1) % WORKS], work_parity(n - 1));
}

/* The scheduler warp. It describes a work tile while the block computes the previous one, and the
 * first one, if that is known, while the grid before this one still runs. */
FA_DEVICE void schedule(const pipeline *pipe, const fa_attention_params *p,
                        const fa_backward_sm90_params *s)
{
    shared_state *state = pipe->state;
    const block_work *before = NULL;
    const bool leads = threadIdx.x % 32 == 0;
    int64_t number = 0;
    for (int n = 0; number < p->tasks; n++) {
        block_work *w = &state->works[n % WORKS];
        ptx_mbarrier_wait(&state->work_empty[n % WORKS], work_parity(n) ^ 1);
        wait_until_late(pipe, n);
        if (n > 0 || s->cleared || !begins_with_own(p, s)) ptx_wait_for_grids();
        if (leads) number = take_work_tile(p, s, n);
        number = __shfl_sync(0xffffffff, (uint32_t)number, 0);
#if CLEARS_AHEAD
        if (number < p->tasks) clear_ahead(s, (int)number);
#endif
        if (leads) {
            /* one stage is for gradients */
            describe(p, s, number, before, before ? end_count(before) + 1 : 0, w);
            ptx_mbarrier_arrive(&state->work_full[n % WORKS]);
        }
        before = w;
    }
}

#endif

#endif

#endif
