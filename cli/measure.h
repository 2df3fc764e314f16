/*
 * Shared by bench and job: a problem with new random inputs, its counts, and timing.
 */
#ifndef FA_CLI_MEASURE_H
#define FA_CLI_MEASURE_H

#include <stdbool.h>
#include <stdint.h>

#include "flashattn.h"
#include "tensors.h"

/* One case to measure. */
typedef struct measure_case {
    fa_pass pass; /* FORWARD, BACKWARD or DECODE */
    int64_t batch, heads, heads_kv, n_q, n_k, d, d_v;
    fa_dtype dtype;
    cli_layout layout;
    bool causal, deterministic;
    int64_t window_left, window_right; /* -1: no limit */
    fa_device device;
    fa_precision precision;
    int32_t threads; /* 0: the library's choice */
    int repeat;
} measure_case;

enum { MEASURE_MAX_REPEAT = 10000 };

typedef struct measure_times {
    double median, min, max; /* seconds */
} measure_times;

/* The median, minimum and maximum of count > 0 samples, which get sorted. */
measure_times measure_summary(double *samples, int count);

/* The number of pairs of a query and a key that it sees, in one head of one batch item. */
double measure_visible_pairs(const measure_case *c);

/* Floating-point operations: forward and decode 2 * batch * heads * pairs * (d + d_v), backward 2.5
 * times that. Only visible pairs count, so causal with n_q = n_k counts (n + 1) / 2n, half. */
double measure_flops(const measure_case *c);

/* The size in bytes of all keys and values, which decode must read. */
double measure_kv_bytes(const measure_case *c);

/* Fills with new standard normal numbers: the same seed gives the same numbers. */
void measure_fill_normal(void *data, fa_dtype dtype, int64_t count, uint64_t seed);

/* Runs the case: warm-up, then c->repeat timed calls. Between calls, decode moves to another copy
 * of the keys and values, so that none is still in a cache. kernel gets the line of fa_describe.
 * False after a message on stderr. */
bool measure_run(const measure_case *c, measure_times *times, char *kernel, size_t kernel_size);

/* The number of bytes to access so that no cache still holds the first ones. */
double measure_beyond_caches(void);

#endif
