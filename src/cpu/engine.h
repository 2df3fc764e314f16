/*
 * The CPU engine's seam: what one instruction set's build of the engine offers, and how to get
 * the one to use. forward.c, backward.c, decode.c are compiled once per instruction set.
 */
#ifndef FA_CPU_ENGINE_H
#define FA_CPU_ENGINE_H

#include "../problem.h"

/* Every function returns FA_OK or FA_ERROR_MEMORY. */
typedef struct fa_cpu_engine {
    const char *name; /* "portable", "avx2", "avx512", "avx512_bf16" */
    int vector_bits;
    fa_status (*forward)(const fa_problem *p);
    fa_status (*backward)(const fa_problem *p);
    fa_status (*decode)(const fa_problem *p);
    fa_status (*weights)(const fa_problem *p);
    fa_status (*combine)(const fa_combine_problem *p);
    /* Says in one line which kernel would run and why. */
    void (*describe)(const fa_problem *p, char *text, size_t size);
    /* exp2(y*c) over a whole array, for the test of its error. */
    void (*exp2_array)(const float *y, float c, float *out, int64_t n);
} fa_cpu_engine;

/* The engine to use, or NULL with a sentence in why (if FA_CPU_ISA asks for what cannot run). */
const fa_cpu_engine *fa_cpu_engine_get(char *why, size_t size);

/* The names of all engines that this build has and this processor runs, space-separated. */
void fa_cpu_engine_names(char *text, size_t size);

/* How many threads a call wants: as many as it asked for; where it left that open (0), OpenMP's choice,
 * but only one where starting more would cost more than so many operations. fa_team_reserve says how
 * many it gets. */
int fa_cpu_threads(int asked, double operations);

#endif
