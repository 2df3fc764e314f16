/*
 * Persistent blocks: each takes one part after the other. The producer describes a part and loads
 * its keys while the consumers are still at the part before; stages, their barriers' phases and the
 * descriptions are used in a circle all the while.
 *
 * So a few blocks, one a multiprocessor, read as much as memory gives, and leave the other
 * multiprocessors to the launch behind.
 */
#ifndef FA_KERNELS_DECODE_SM90_PERSISTENT_CUH
#define FA_KERNELS_DECODE_SM90_PERSISTENT_CUH

#include "decode_sm90/config.cuh"

#if PERSISTENT

#include "decode_sm80/work.cuh"
#include "decode_sm90/attend.cuh"
#include "decode_sm90/merge_parts.cuh"
#include "decode_sm90/pipeline.cuh"
#include "decode_sm90/producer.cuh"

/* ---- Which parts are the block's ------------------------------------------------------------- */

/* Lengths differ, so blocks take numbers from a counter. It is 0 before a launch and after it:
 * atomicInc wraps at the number of numbers, and each block, whose first one is its own, takes one
 * too many. */
static __device__ uint32_t taken_parts[FA_DECODE_COUNTER_SETS];

/* The number behind this one, or the first one (before: -1). Without a counter the schedule is
 * static. count: numbers that there are, at least as many as blocks. */
FA_DEVICE int64_t next_number(const fa_decode_params *d, int64_t before, int64_t count)
{
    if (before < 0) return blockIdx.x;
    if (d->counters < 0 || d->step != FA_DECODE_LAST) return before + gridDim.x;
    return (int64_t)gridDim.x + atomicInc(&taken_parts[d->counters], (uint32_t)count - 1);
}

/* Whether there is something to do: a launch that merges has a number for each work tile. */
FA_DEVICE bool has_work(const fa_decode_params *d, const fa_work *w)
{
    if (w->rows == 0) return false;
    return d->step == FA_DECODE_MERGE ? w->parts > 1 : w->part < max(w->parts, 1);
}

/* Describes the block's next part. No rows: there is none. One thread. */
FA_DEVICE void describe_next(const fa_decode_params *d, const fa_decode_sm90_params *s,
                             int64_t *number, fa_work *w)
{
    const int64_t count = d->attention.tasks * (d->step == FA_DECODE_MERGE ? 1 : d->parts);
    for (;;) {
        *number = next_number(d, *number, count);
        if (*number >= count) break;
        *w = describe_work(d, &s->divisors, *number);
        if (has_work(d, w)) return;
    }
    w->rows = 0;
}

/* ---- Descriptions ---------------------------------------------------------------------------- */

FA_DEVICE int slot_of(uint32_t n) { return (int)(n % WORKS); }
FA_DEVICE int parity_of(uint32_t n) { return (int)(n / WORKS & 1); }

/* ---- Roles ----------------------------------------------------------------------------------- */

/* The producer's warp. */
FA_DEVICE void produce_parts(const pipeline *pipe, const fa_decode_params *d,
                             const fa_decode_sm90_params *s)
{
    fa_place at = {0, 0};
    int64_t number = -1;
#pragma unroll 1
    for (uint32_t n = 0;; n++) {
        fa_work *w = &pipe->state->work[slot_of(n)];
        ptx_mbarrier_wait(&pipe->state->work_empty[slot_of(n)], parity_of(n) ^ 1);
        __syncwarp();
        if (lane_id() == 0) {
            describe_next(d, s, &number, w);
            ptx_mbarrier_arrive(&pipe->state->work_full[slot_of(n)]);
        }
        __syncwarp();
        if (w->rows == 0) return;
        if (d->step != FA_DECODE_MERGE && w->parts > 0) produce(pipe, d, s, w, &at);
    }
}

/* The consumers. Sums have memory of their own, as the stages have the next part's keys; what
 * merging puts where queries were has been read when all have met at the end. */
FA_DEVICE void consume_parts(const pipeline *pipe, const fa_decode_params *d, float *sums)
{
    fa_place at = {0, 0};
#pragma unroll 1
    for (uint32_t n = 0;; n++) {
        const fa_work *w = &pipe->state->work[slot_of(n)];
        bool merges = d->step == FA_DECODE_MERGE;
        ptx_mbarrier_wait(&pipe->state->work_full[slot_of(n)], parity_of(n));
        if (w->rows == 0) return;
        if (!merges) {
            if (w->parts > 0) attend(pipe, d, w, &at, sums);
            sync_consumers();
            merges = finish_part(pipe, d, w, sums);
        }
        if (merges) merge_parts(d, w);
        sync_consumers();
        ptx_mbarrier_arrive_if(&pipe->state->work_empty[slot_of(n)], thread_id() == 0);
    }
}

FA_DEVICE void run_block(const pipeline *pipe, const fa_decode_params *d,
                         const fa_decode_sm90_params *s)
{
    float *const sums = pipe->exchange + FA_DECODE_SM90_EXCHANGE(ROWS) / 4;
    __syncthreads(); /* the barriers are initialized */
    if (warp_id() == CONSUMER_WARPS) produce_parts(pipe, d, s);
    else consume_parts(pipe, d, sums);
}
#endif

#endif
