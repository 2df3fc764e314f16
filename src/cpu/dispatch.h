/*
 * Which engine runs, and on how many threads.
 */
#ifndef FA_CPU_DISPATCH_H
#define FA_CPU_DISPATCH_H

#include <stddef.h>

#include "engine.h"

/* The engine to use, or NULL with a sentence in why (if FA_CPU_ISA names an engine that cannot run). */
const fa_cpu_engine *fa_cpu_engine_get(char *why, size_t size);

/* The names of all engines that this build has and this processor runs, space-separated. */
void fa_cpu_engine_names(char *text, size_t size);

/* How many threads a call wants: `asked`; if that is 0, OpenMP's choice, or one if the call has too few
 * operations to start more. fa_team_reserve tells how many it gets. */
int fa_cpu_threads(int asked, double operations);

#endif
