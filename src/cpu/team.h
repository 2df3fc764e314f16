/*
 * Threads of our own. Each thread that calls the library has a team of workers, which lives as long as
 * it does and which is started when it is first needed, as OpenMP runtimes do it. Those could not be used
 * for the work itself: libgomp ends the process when a thread cannot be created, and hangs in the child
 * of a fork, where its threads are gone. OpenMP still says how many threads there should be.
 */
#ifndef FA_CPU_TEAM_H
#define FA_CPU_TEAM_H

#include <stdint.h>

enum { FA_TEAM_MAX = 1024 }; /* threads of a team */

/* How many threads a call can have: `wanted`, or fewer if that many cannot be started. At least 1. */
int fa_team_reserve(int wanted);

/* Work on item number index; thread, in [0, threads), tells those that run at the same time apart. */
typedef void fa_team_function(void *context, int64_t index, int thread);

/* Calls f for every index in [0, total) and returns when all calls have. Indices are handed out in
 * order, `chunk` at a time, so items with smaller indices have been started. f must not depend on
 * the number of threads: where threads are gone, or cannot be started, fewer call it. */
void fa_team_run(int threads, int64_t total, int64_t chunk, fa_team_function *f, void *context);

/* The chunk with which each of the threads gets one run of neighbouring indices. */
static inline int64_t fa_team_share(int threads, int64_t total)
{
    return total > threads ? (total + threads - 1) / threads : 1;
}

#endif
