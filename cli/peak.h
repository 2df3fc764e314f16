/*
 * What this machine's CPU can do at best, measured: the bars that benchmarks are compared with.
 */
#ifndef FA_CLI_PEAK_H
#define FA_CLI_PEAK_H

#include <stdbool.h>

typedef struct peak_rates {
    double fma_float32;  /* operations per second, a fused multiply-add counting as 2             */
    double dot_bfloat16; /* the same for bfloat16 dot products; 0: no such instruction            */
    double read; /* bytes per second read from memory, far beyond the caches; 0: not asked */
    const char *fma_isa; /* the instruction set of the first: "avx512", "avx2" or "portable"      */
} peak_rates;

/* Measures with this many threads (>= 1); takes some 0.1 s, and about 1 s with bandwidth set. A
 * rate that could not be measured for want of memory is 0. */
peak_rates peak_measure(int threads, bool bandwidth);

#endif
