/*
 * Which engine runs, and on how many threads.
 */
#ifndef FA_CPU_DISPATCH_H
#define FA_CPU_DISPATCH_H

#include <stddef.h>

#include "engine.h"

/* The engine to use, or NULL with a sentence in why (if FA_CPU_ISA asks for what cannot run). */
const fa_cpu_engine *fa_cpu_engine_get(char *why, size_t size);

/* The names of all engines that this build has and this processor runs, space-separated. */
void fa_cpu_engine_names(char *text, size_t size);

/* How many threads a call wants: as many as it asked for; where it left that open (0), OpenMP's choice,
 * but only one where starting more would cost more than so many operations. fa_team_reserve says how
 * many it gets. */
int fa_cpu_threads(int asked, double operations);

#endif
