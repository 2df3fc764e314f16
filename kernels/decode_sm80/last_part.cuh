/*
 * Finds the last block of a work tile, which merges its parts.
 */
#ifndef FA_KERNELS_DECODE_SM80_LAST_PART_CUH
#define FA_KERNELS_DECODE_SM80_LAST_PART_CUH

#include "decode_sm80/config.cuh"
#include "decode_sm80/work.cuh"
#include "ptx/semaphore.cuh"

/* There is a set of counters for each launch that may run at the same time. Each counter is 0
 * before and after a launch, because it wraps at the number of parts. */
static __device__ uint32_t part_counters[FA_DECODE_COUNTER_SETS * FA_DECODE_COUNTERS];

/* Counts the block's part, and finds out whether it is the last one of its work tile. If so, everything that the others
 * have stored can be read after the next barrier. A thread of the last warp waits for memory; the others may do something
 * else until that barrier. */
FA_DEVICE void count_part(const fa_decode_params *d, const fa_work *w, int *last)
{
    __syncthreads();
    if (ptx_thread_id() != THREADS - 32) return;
    const int64_t counter = (int64_t)d->counters * FA_DECODE_COUNTERS + w->task - d->whole;
    const uint32_t end = (uint32_t)w->parts - 1;
    *last = ptx_counter_turn(&part_counters[counter], end) == end;
}

FA_DEVICE bool is_last_part(const fa_decode_params *d, const fa_work *w)
{
    __shared__ int last;
    count_part(d, w, &last);
    __syncthreads();
    return last;
}

#endif
