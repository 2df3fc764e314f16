/*
 * The best rates of this machine's CPU or GPU, measured. Benchmarks are compared with them.
 */
#ifndef FA_CLI_PEAK_H
#define FA_CLI_PEAK_H

#include <stdbool.h>

#include "flashattn.h"

typedef struct peak_rates {
    double fma_float32;  /* operations per second, a fused multiply-add counting as 2 */
    double dot_bfloat16; /* the same for bfloat16 dot products; 0: no such instruction */
    double read; /* bytes per second read from memory, far beyond the caches; 0: not measured */
    const char *fma_isa; /* the instruction set of the first: "avx512", "avx2" or "portable" */
} peak_rates;

/* Measures with this many threads (>= 1); takes some 0.1 s, or about 1 s if bandwidth is set. A
 * rate that could not be measured, because memory was short, is 0. */
peak_rates peak_measure(int threads, bool bandwidth);

/* The best rate of one kind of product: operations per second, and the name of the instructions
 * that reach it. */
typedef struct peak_rate {
    double rate; /* 0: not known */
    const char *by;
} peak_rate;

typedef struct peak_table {
    peak_rate float32, float16, bfloat16;
} peak_table;

/* Measures the rates of the CPU (with this many threads; 0: the library's number) or of GPU 0. A
 * GPU older than Ampere has rates of 0. False after a message on stderr. */
bool peak_measure_device(fa_device device, int threads, peak_table *table);

/* The rate with which a kernel for inputs of this dtype is compared. */
peak_rate peak_for(const peak_table *table, fa_dtype dtype);

#endif
