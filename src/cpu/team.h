/*
 * The library's own threads. Each thread that calls the library has a team of workers, which starts when
 * it is first needed and lives as long as the calling thread, as in OpenMP runtimes. OpenMP's threads are
 * not used: libgomp ends the process if a thread cannot be created, and hangs in the child of a fork,
 * where its threads no longer exist. OpenMP still determines how many threads there should be.
 */
#ifndef FA_CPU_TEAM_H
#define FA_CPU_TEAM_H

#include <stdint.h>

enum { FA_TEAM_MAX = 1024 }; /* threads of a team */

/* How many threads a call can have: `wanted`, or fewer if that many cannot be started. At least 1. */
int fa_team_reserve(int wanted);

/* Work on item number index; thread, in [0, threads), is different for calls that run at the same time. */
typedef void fa_team_function(void *context, int64_t index, int thread);

/* Calls f for every index in [0, total) and returns when all calls have returned. Indices are handed out
 * in order, `chunk` at a time, so items with smaller indices have been started before. f must not depend
 * on the number of threads: if threads cannot be started, fewer threads call it. */
void fa_team_run(int threads, int64_t total, int64_t chunk, fa_team_function *f, void *context);

/* The chunk with which each of the threads gets one run of neighbouring indices. */
static inline int64_t fa_team_share(int threads, int64_t total)
{
    return total > threads ? (total + threads - 1) / threads : 1;
}

#endif
