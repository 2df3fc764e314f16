/*
 * Counters of the dynamic schedule.
 *
 * Blocks of a kernel with a dynamic schedule take tasks from a counter in device memory. Such a kernel has an array
 * of counters. A launch finds its counter at 0 and leaves it at 0, and uses it only when the launches in front on its
 * stream have ended. So consecutive launches may share a counter, but launches on different streams must not. This module hands out the numbers of counters.
 *
 * Numbers belong to the process, because contexts may share device memory (green contexts do):
 * - Each of the first FA_CUDA_OWN_COUNTERS streams gets a number and keeps it. A
 *   stream is identified by its id, which no later stream gets, so a reused handle counts as another stream.
 * - Later streams share FA_CUDA_SHARED_COUNTERS numbers. Each launch is followed by an event. A number goes to another
 *   stream of the same context only after that event; the least recently used number goes first.
 * - Each captured call gets its own number. A user object of the graph returns the number when the graph and all that
 *   was made from it have been destroyed. Two executable graphs of one graph have the same number, but they must not run
 *   at the same time anyway, because they write the same results. While a stream is being captured, the driver is only
 *   asked for its graph: other queries may end the capture.
 *
 * If no number is free, a launch gets none and has a static schedule. The memory for this is bounded: some 5 KB, 64
 * events, and, once a captured call has returned its number, 4 bytes for each number of captured calls.
 */
#ifndef FA_CUDA_COUNTERS_H
#define FA_CUDA_COUNTERS_H

#include <stdint.h>

enum {
    FA_CUDA_OWN_COUNTERS = 192,
    FA_CUDA_SHARED_COUNTERS = 64,
    FA_CUDA_STREAM_COUNTERS = FA_CUDA_OWN_COUNTERS + FA_CUDA_SHARED_COUNTERS
};

typedef struct fa_cuda_counter {
    int32_t number; /* below 0: none */
    void *shared;   /* of this module */
} fa_cuda_counter;

/* Takes the counter for one launch on the stream. count: how many counters the kernel has. The first captured call
 * determines the count for captured calls; a kernel with fewer counters must check the number that it gets. */
fa_cuda_counter fa_cuda_counter_take(void *stream, int32_t count);

/* Must be called when the launch has been queued, or has failed. */
void fa_cuda_counter_release(fa_cuda_counter counter, void *stream);

#endif
