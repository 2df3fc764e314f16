/*
 * A model of the time that blocks of decode_sm90 take, two on a multiprocessor: how to cut the keys of work tiles.
 */
#ifndef FA_CUDA_PLAN_DECODE_TIME_H
#define FA_CUDA_PLAN_DECODE_TIME_H

#include <stdbool.h>
#include <stdint.h>

/* What is cut. */
typedef struct fa_decode_keys {
    int64_t tasks, tiles; /* work tiles; key tiles of each */
    double tile_bytes;    /* keys and values of a key tile */
    int rows, head_dim;   /* of the variant */
    int multiprocessors;
} fa_decode_keys;

/* A way to cut them: the first work tiles stay whole, and the others have parts of so many key tiles, the last one with what is
 * left. The blocks of the last parts come last. */
typedef struct fa_decode_cut {
    int64_t whole, length;
    double us;
    bool alone; /* the next grid should not start before its blocks end */
} fa_decode_cut;

/* Sets the cut's time, and whether it is alone. At most some thousand blocks. */
void fa_cuda_time_cut(const fa_decode_keys *keys, fa_decode_cut *cut);

/* The fastest cut that was tried. most: parts of a work tile; takes_whole: the first work tiles can stay whole. */
fa_decode_cut fa_cuda_find_decode_cut(const fa_decode_keys *keys, int64_t most, bool takes_whole);

#endif
