/*
 * What this machine's CPU or GPU can do at best, measured: the bars that benchmarks are compared with.
 */
#ifndef FA_CLI_PEAK_H
#define FA_CLI_PEAK_H

#include <stdbool.h>

#include "flashattn.h"

typedef struct peak_rates {
    double fma_float32;  /* operations per second, a fused multiply-add counting as 2             */
    double dot_bfloat16; /* the same for bfloat16 dot products; 0: no such instruction            */
    double read; /* bytes per second read from memory, far beyond the caches; 0: not asked */
    const char *fma_isa; /* the instruction set of the first: "avx512", "avx2" or "portable"      */
} peak_rates;

/* Measures with this many threads (>= 1); takes some 0.1 s, and about 1 s with bandwidth set. A
 * rate that could not be measured for want of memory is 0. */
peak_rates peak_measure(int threads, bool bandwidth);

/* The best rate of one kind of product: operations per second, and the instructions that reach it, in words. */
typedef struct peak_rate {
    double rate; /* 0: not known */
    const char *by;
} peak_rate;

typedef struct peak_table {
    peak_rate float32, float16, bfloat16;
} peak_table;

/* Measures what the CPU (with this many threads; 0: the library's number) or GPU 0 can do. A GPU older than
 * Ampere has rates of 0. False after a message on stderr. */
bool peak_measure_device(fa_device device, int threads, peak_table *table);

/* What a kernel whose inputs have this dtype is compared with. */
peak_rate peak_for(const peak_table *table, fa_dtype dtype);

#endif
