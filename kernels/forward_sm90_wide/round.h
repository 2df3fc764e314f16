/*
 * Float32 queries, keys and values as float16 numbers times a unit, a power of two for each head: as exact as tf32 but for
 * elements far below their row's largest (round.cuh), and half as many bytes for products that are twice as fast. Two launches make
 * them in the workspace, and forward_sm90 (to head dim 256) or forward_sm90_wide reads them there.
 * The kernels and the planner share this file. The workspace has, one after the other,
 *
 *     units    of each head of queries, of keys, and of values, of all batch items
 *     ranges   of each tile of rows of these heads: the largest and the smallest of its rows, by their largest elements
 *     rows     of queries, of keys, and of values, in whole vectors of 16 bytes: (item, head, row, column)
 *
 * Its address is in the `split.out` of forward_sm90's parameters: these kernels split no keys.
 */
#ifndef FA_KERNEL_FORWARD_SM90_WIDE_ROUND_H
#define FA_KERNEL_FORWARD_SM90_WIDE_ROUND_H

#include <stdint.h>

#include "../common/divide.h"

enum {
    FA_SM90_ROUND_ROWS = 64, /* of a tile */
    FA_SM90_ROUND_THREADS = 256,
    FA_SM90_RESCALE_BLOCKS = 8, /* of a head, at most */
    FA_SM90_ROUND_ALIGNMENT = 1024
};

/* Of queries, keys and values; heads: of all batch items. */
typedef struct fa_sm90_rounded_sizes {
    int64_t heads[3], rows[3];
    int32_t columns[3];
} fa_sm90_rounded_sizes;

/* Where those of one of the three are. */
typedef struct fa_sm90_rounded {
    int64_t heads, rows, tiles; /* rows and tiles of a head */
    int64_t unit, range;        /* the numbers of head 0's unit and of its first tile's range */
    int64_t offset;             /* of its first row, in bytes */
    int32_t columns, pitch;     /* pitch: elements from row to row */
} fa_sm90_rounded;

FA_SHARED_FUNCTION int64_t fa_sm90_round_up(int64_t bytes)
{
    return (bytes + FA_SM90_ROUND_ALIGNMENT - 1) / FA_SM90_ROUND_ALIGNMENT *
           FA_SM90_ROUND_ALIGNMENT;
}

/* which: 0 queries, 1 keys, 2 values, 3 what is behind them. */
FA_SHARED_FUNCTION fa_sm90_rounded fa_sm90_find_rounded(const fa_sm90_rounded_sizes *s, int which)
{
    fa_sm90_rounded x = {0};
    int64_t units = 0, ranges = 0;
    for (int i = 0; i < 3; i++) {
        units += s->heads[i];
        ranges += s->heads[i] * ((s->rows[i] + FA_SM90_ROUND_ROWS - 1) / FA_SM90_ROUND_ROWS);
    }
    x.offset = fa_sm90_round_up(4 * (units + 1 + 2 * ranges));
    x.range = (units + 1) / 2; /* in pairs of floats */
    for (int i = 0;; i++) {
        if (i < 3) {
            x.heads = s->heads[i];
            x.rows = s->rows[i];
            x.tiles = (x.rows + FA_SM90_ROUND_ROWS - 1) / FA_SM90_ROUND_ROWS;
            x.columns = s->columns[i];
            x.pitch = (x.columns + 7) / 8 * 8;
        }
        if (i == which) return x;
        x.unit += x.heads;
        x.range += x.heads * x.tiles;
        x.offset += fa_sm90_round_up(x.heads * x.rows * x.pitch * 2);
    }
}

#endif
