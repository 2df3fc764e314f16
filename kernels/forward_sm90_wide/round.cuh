/*
 * Rounds rows to float16 (round.h): what the two launches share. A warp has a row, and a lane four columns at a time.
 */
#ifndef FA_KERNELS_FORWARD_SM90_WIDE_ROUND_CUH
#define FA_KERNELS_FORWARD_SM90_WIDE_ROUND_CUH

#include "common/dialect.h"
#include "common/element.h"
#include "common/params.h"
#include "common/reduce.cuh"
#include "common/rows.cuh"
#include "forward_sm90/forward_sm90.h"
#include "forward_sm90_wide/round.h"
#include "ptx/convert.cuh"
#include "ptx/grid.cuh"

enum {
    THREADS = FA_SM90_ROUND_THREADS,
    BLOCKS = 4, /* of a multiprocessor */
    WARPS = THREADS / 32,
    TILE = FA_SM90_ROUND_ROWS,
    LANE_COLUMNS = 128, /* of a row, of all lanes, four each */
    QUADS = 8           /* that a lane loads before it uses the first, of one row or of several */
};

/* The range for the largest element of each row. Elements from 2^-14 on are rounded to 11 bits; others have errors of 2^-25, at most
 * 2^-15 of their row's largest. A head whose rows differ by more than 2^24 is computed in float32, which takes long. */
#define LARGEST_ROW 0x1p15f
#define SMALLEST_ROW 0x1p-10f

/* The power of two for numbers like those of a standard normal distribution, and for most others. */
#define USUAL_SCALE 0x1p6f

/* A head of queries, keys or values of a batch item. */
typedef struct rounded_head {
    const fa_kernel_view *from;
    int64_t item, head, rows, tiles;
    int columns, pitch;
    uint16_t *to;
    float2 *ranges; /* of its tiles */
    float *unit;
} rounded_head;

FA_DEVICE fa_sm90_rounded_sizes find_sizes(const fa_attention_params *p)
{
    const int64_t q = p->batch * p->heads_q, k = p->batch * p->heads_kv;
    const fa_sm90_rounded_sizes s = {
        {q, k, k}, {p->rows_q, p->max_k, p->max_k}, {p->d, p->d, p->d_v}};
    return s;
}

/* Number n of these heads' units of work, of which each head of queries, keys or values has as many as it has tiles, or
 * `each`, if that is not 0. Sets `part`, the unit's number in the head. */
FA_DEVICE rounded_head find_head(const fa_attention_params *p, const fa_sm90_params *s, int64_t n,
                                 int each, int64_t *part)
{
    const fa_sm90_rounded_sizes sizes = find_sizes(p);
    int which = 0;
    fa_sm90_rounded of = fa_sm90_find_rounded(&sizes, 0);
#pragma unroll
    for (int i = 1; i < 3; i++) {
        const int64_t all = of.heads * (each ? each : of.tiles);
        if (n < all) break;
        n -= all;
        which = i;
        of = fa_sm90_find_rounded(&sizes, i);
    }
    const int64_t parts = each ? each : of.tiles, head = fa_divide(n, parts),
                  heads = which == 0 ? p->heads_q : p->heads_kv;
    char *at = (char *)s->split.out;
    rounded_head x;
    *part = n - head * parts;
    x.from = which == 0 ? &p->q : which == 1 ? &p->k : &p->v;
    x.item = fa_divide(head, heads);
    x.head = head - x.item * heads;
    x.rows = of.rows;
    x.tiles = of.tiles;
    x.columns = of.columns;
    x.pitch = of.pitch;
    x.to = (uint16_t *)(at + of.offset) + head * of.rows * of.pitch;
    x.ranges = (float2 *)at + of.range + head * of.tiles;
    x.unit = (float *)at + of.unit + head;
    return x;
}

/* The largest and the smallest number among the largest elements of rows. Elements that are not finite, and rows of zeros, are
 * ignored. */
typedef struct row_range {
    float largest, smallest;
} row_range;

FA_DEVICE row_range join_ranges(row_range a, row_range b)
{
    const row_range both = {fmaxf(a.largest, b.largest), fminf(a.smallest, b.smallest)};
    return both;
}

FA_DEVICE bool fits(row_range range, float scale)
{
    const float most = 0x1.ffcp127f; /* rounded to 11 bits, a larger number is infinite */
    return range.largest * scale <= LARGEST_ROW && range.smallest * scale >= SMALLEST_ROW &&
           range.largest <= most;
}

/* The range of all of the block's threads. */
FA_DEVICE row_range find_range_of_block(row_range *of_warp, row_range own)
{
    const int warp = (int)threadIdx.x / 32;
    row_range all = {0.0f, INFINITY};
    own.largest = fa_warp_max(own.largest);
    own.smallest = -fa_warp_max(-own.smallest);
    if (threadIdx.x % 32 == 0) of_warp[warp] = own;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; i++) all = join_ranges(all, of_warp[i]);
    return all;
}

/* The lane's columns of a row, of which it has `quads` times four; zeros behind the last. */
FA_DEVICE void load_row(const rounded_head *x, int64_t row, int quads, float4 *at)
{
    const char *from = fa_view_row(x->from, x->item, row, x->head);
    const int kind = x->from->vector ? FA_FETCH_FLOAT32 : FA_FETCH_ANY;
#pragma unroll
    for (int n = 0; n < quads; n++)
        at[n] =
            fa_fetch4(from, kind, FA_KERNEL_FLOAT32, 4 * ((int)threadIdx.x % 32) + LANE_COLUMNS * n,
                      row < x->rows ? x->columns : 0);
}

FA_DEVICE float larger(float largest, float x)
{
    return fabsf(x) < INFINITY ? fmaxf(largest, fabsf(x)) : largest;
}

/* Stores the row's numbers times the scale. Returns its largest element. */
FA_DEVICE float store_row(const rounded_head *x, int64_t row, int quads, const float4 *at,
                          float scale)
{
    float largest = 0;
#pragma unroll
    for (int n = 0; n < quads; n++) {
        const int c = 4 * ((int)threadIdx.x % 32) + LANE_COLUMNS * n;
        largest = larger(larger(larger(larger(largest, at[n].x), at[n].y), at[n].z), at[n].w);
        if (row >= x->rows || c >= x->pitch) continue;
        *(uint2 *)(x->to + row * x->pitch + c) =
            make_uint2(ptx_pack_f16x2(at[n].x * scale, at[n].y * scale),
                       ptx_pack_f16x2(at[n].z * scale, at[n].w * scale));
    }
    return fa_warp_max(largest);
}

/* Rounds a tile's rows, times the scale. Returns the range of the warp's rows. */
FA_DEVICE row_range round_rows(const rounded_head *x, int64_t tile, int quads, float scale)
{
    const int64_t first = tile * TILE + (int)threadIdx.x / 32;
    row_range range = {0.0f, INFINITY};
#pragma unroll 1
    for (int i = 0; i < TILE; i += QUADS / quads * WARPS) {
        float4 at[QUADS];
#pragma unroll
        for (int n = 0; n < QUADS / quads; n++)
            load_row(x, first + i + n * WARPS, quads, at + n * quads);
#pragma unroll
        for (int n = 0; n < QUADS / quads; n++) {
            const float largest = store_row(x, first + i + n * WARPS, quads, at + n * quads, scale);
            const row_range row = {largest, largest > 0.0f ? largest : INFINITY};
            range = join_ranges(range, row);
        }
    }
    return range;
}

FA_DEVICE row_range round_tile(const rounded_head *x, int64_t tile, float scale)
{
    if (x->columns <= LANE_COLUMNS) return round_rows(x, tile, 1, scale);
    if (x->columns <= 2 * LANE_COLUMNS) return round_rows(x, tile, 2, scale);
    return round_rows(x, tile, 4, scale);
}

#endif
