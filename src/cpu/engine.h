/*
 * The functions of an engine for one instruction set: forward.c, backward.c and so on are compiled once
 * for each instruction set.
 */
#ifndef FA_CPU_ENGINE_H
#define FA_CPU_ENGINE_H

#include "../problem.h"

/* Every function returns FA_OK or FA_ERROR_MEMORY. */
typedef struct fa_cpu_engine {
    const char *name; /* "portable", "avx2", "avx512", "avx512_bf16", "amx" */
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

#endif
