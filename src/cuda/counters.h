/*
 * Counters of the dynamic schedule.
 *
 * Blocks of a kernel with a dynamic schedule take tasks from a counter in device memory. Such a kernel has an array
 * of counters. A launch finds its counter at 0 and leaves it at 0. So launches that follow each other may
 * share one, but launches that may run at the same time must not. This module hands out the counters' numbers.
 *
 * Numbers are the process's, for contexts may share device memory (green contexts do):
 * - The first FA_CUDA_OWN_COUNTERS streams get a number each, and keep it. A stream's launches follow each other.
 *   A stream is known by its id, which no later stream gets, so a stream with a reused handle is another stream.
 * - Later streams share FA_CUDA_SHARED_COUNTERS numbers. Each launch is followed by an event, and a number
 *   goes to another stream of the same context only when that event has come: of those, the least recently used one.
 * - Each captured call gets a number of its own. A user object of the graph returns it when the graph and all that
 *   was made from it are gone. Two executable graphs made from one graph have the same number; they must not run at
 *   the same time in any case, as they write the same results. While a stream is being captured the driver is asked
 *   for its graph alone: other questions about it may end the capture.
 *
 * Where no number is free a launch goes without one and has a static schedule. What this takes is bounded: some 5 KB, 64
 * events, and 4 bytes for each number of a captured call, once one has been returned.
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

/* The counter for one launch on the stream; count: how many the kernel has. Kernels whose launches are captured name the
 * same count, of which the first one decides; one with fewer counters than that looks at the number it gets. */
fa_cuda_counter fa_cuda_counter_take(void *stream, int32_t count);

/* To be called when the launch has been queued, or has failed. */
void fa_cuda_counter_release(fa_cuda_counter counter, void *stream);

#endif
