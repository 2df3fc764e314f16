/*
 * fa_append on the CPU.
 */
#ifndef FA_CPU_APPEND_H
#define FA_CPU_APPEND_H

#include "../problem.h"

/* Needs no scratch memory, so it cannot fail. */
void fa_cpu_append(const fa_append_problem *p);

#endif
