/*
 * A rung's parameters, and its description of itself. Read by the rungs (CUDA C) and by
 * ladder.c, which runs them.
 *
 * Every rung computes, for each of `heads` heads (batch times heads),
 *     out = softmax(scale * Q K^T) V,        causal: query i sees only keys j <= i,
 * with Q, K, V and out stored as (heads, n, pitch): a row holds d elements, and the next row starts
 * `pitch` elements further on. ladder.c aligns the arrays to 256 bytes and makes pitch a multiple of
 * 16 bytes, so that rows can be read 16 bytes at a time; what lies between d and pitch is NaN,
 * must not reach a result, and need not be preserved in out.
 */
#ifndef FA_LADDER_RUNG_H
#define FA_LADDER_RUNG_H

#include <stdint.h>

typedef struct rung_problem {
    const void *q, *k, *v;
    void *out;
    float *scratch; /* heads * n * n floats for rungs that ask for them, else NULL */
    int32_t heads, n, d, pitch;
    float scale;
    int32_t causal; /* 0 or 1 */
} rung_problem;

/* Tensor maps (TMA) over q, k, v and out, for the rungs that use them: axes
 * (d, n, heads), boxes of 64 elements (128 bytes, swizzled) by the rows that the rung names. Out of
 * bounds reads as zero and is not written. A rung that takes them has a second parameter
 *     const __grid_constant__ rung_maps maps                                                        */
typedef struct rung_map {
#ifdef __cplusplus
    alignas(64)
#else
    _Alignas(64)
#endif
        uint64_t opaque[16];
} rung_map;

typedef struct rung_maps {
    rung_map q, k, v, out;
} rung_maps;

/* One kernel of a rung and how it is launched. The grid is
 *     x = ceil(n / rows), y = ceil(n / columns), z = heads     (0: 1 block along that axis)
 * or, if persistent > 0, that many blocks for each multiprocessor along x. */
typedef struct rung_step {
    char kernel[32];
    int32_t threads;
    int32_t rows, columns;
    int32_t persistent;
    int32_t smem_bytes; /* dynamic shared memory */
} rung_step;

enum { RUNG_STEPS = 3 };

/* A rung's file ends with
 *     extern "C" __device__ rung_about rung = { ... };
 * which ladder.c reads from the compiled image: the launch is written down once, beside the kernel. */
typedef struct rung_about {
    int32_t needs_scores;                          /* 1: the scratch array of n * n floats a head */
    int32_t map_rows_q, map_rows_kv, map_rows_out; /* rows of the maps' boxes; 0: no maps */
    int32_t steps;
    rung_step step[RUNG_STEPS]; /* run one after the other */
} rung_about;

#endif
