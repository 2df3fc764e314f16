/*
 * Tiles, loads and products of kernels on the FMA units, in float32. Results belong to "own" rows (queries or
 * keys), and a block loops over tiles of "other" rows.
 *
 * A block has 128 threads. Thread (x, y) of 8 x 16 has own rows y, y+16, ...; columns x, x+8, ... of scores, and
 * columns 4x .. 4x+3 of each 32 columns of results. A row belongs to 8 neighbours of one warp. Operands go through
 * shared memory in chunks of CHUNK columns. Rows are a power of two plus 4 words apart, so that the 128-bit accesses of
 * a warp have no bank conflicts.
 *
 * The including file defines OWN and OTHERS, the rows of a tile, and CHUNK. It defines PART_GROUPS, groups of 4
 * columns of a thread's row, if fewer groups than those of a chunk are multiplied at a time.
 */
#ifndef FA_KERNELS_COMMON_SIMT_CUH
#define FA_KERNELS_COMMON_SIMT_CUH

#include "common/reduce.cuh"
#include "common/sequence.cuh"

#if !defined(OWN) || !defined(OTHERS) || !defined(CHUNK)
#error "common/simt.cuh: OWN, OTHERS or CHUNK is missing"
#endif

#ifndef ROWS
#define ROWS (OWN / DOWN) /* of a thread */
#endif

#ifndef PART_GROUPS
#define PART_GROUPS GROUPS
#endif

enum {
    THREADS = 128,
    ACROSS = 8, /* threads that share a row */
    DOWN = THREADS / ACROSS,
    COLUMNS = OTHERS / ACROSS, /* scores of a thread's row */
    GROUPS = CHUNK / 32,       /* of 4 result columns of a thread's row, in a chunk */
    PITCH = CHUNK + 4,
    WEIGHTS_PITCH = OTHERS + 4,
    BATCH = 4 /* loads that a thread has in flight */
};

/* Rows start, start+1, ... of a tensor. Only [from, to) are read; the others count as zeros. For queries
 * that are not consecutive, index lists them, and those from `to` on are not read. */
typedef struct fa_rows {
    const fa_kernel_view *view;
    int columns;
    bool keys; /* keys or values, else of queries */
    int64_t start, from, to;
    const int64_t *index;
} fa_rows;

/* Shared memory. The last three are those of backward and weights (pass_tiles.cuh). */
typedef struct fa_shared {
    float *own;      /* OWN x CHUNK */
    float *other;    /* OTHERS x CHUNK */
    float *weights;  /* OWN x OTHERS */
    float4 *queries; /* of the tile: log-sum-exp, delta, first and last key that it sees + 1 */
    struct fa_operands *of; /* of dP and of S: products need the registers */
    int *flags;             /* THREADS */
} fa_shared;

FA_DEVICE fa_rows rows_of(const fa_kernel_view *view, int columns, bool keys, int64_t start,
                          int64_t from, int64_t to)
{
    fa_rows rows;
    rows.view = view;
    rows.columns = columns;
    rows.keys = keys;
    rows.start = start;
    rows.from = from;
    rows.to = to;
    rows.index = 0;
    return rows;
}

FA_DEVICE int across(void) { return (int)threadIdx.x % ACROSS; }
FA_DEVICE int row_of(int r) { return (int)threadIdx.x / ACROSS + r * DOWN; }

/* ---- Tiles into shared memory ---------------------------------------------------------------- */

/* The n-th row; NULL: it is not read. */
FA_DEVICE const char *row_address(const fa_attention_params *p, const fa_tile *t,
                                  const fa_rows *rows, int n)
{
    const int64_t i = rows->index ? rows->index[n] : rows->start + n;
    if (i < rows->from || i >= rows->to) return 0;
    if (rows->keys) return fa_key_row(p, rows->view, t, i);
    return fa_view_row(rows->view, t->block_q, t->start_q + i, t->head);
}

/* Columns column .. column+CHUNK-1 of this many rows. Returns 0, or NaN if one of the numbers is not
 * finite. */
FA_DEVICE float load_rows_as(const fa_attention_params *p, const fa_tile *t, const fa_rows *rows,
                             int count, float *to, int kind, int column)
{
    float seen = 0.0f;
#pragma unroll 1
    for (int first = (int)threadIdx.x; first < count * (CHUNK / 4); first += BATCH * THREADS) {
        float4 x[BATCH]; /* all on their way before the first is used */
#pragma unroll
        for (int u = 0; u < BATCH; u++) {
            const int n = (first + u * THREADS) / (CHUNK / 4);
            const char *row = n < count ? row_address(p, t, rows, n) : 0;
            x[u] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (row)
                x[u] = fa_fetch4(row, kind, rows->view->dtype,
                                 column + (first + u * THREADS) % (CHUNK / 4) * 4, rows->columns);
        }
#pragma unroll
        for (int u = 0; u < BATCH; u++) {
            const int n = first + u * THREADS;
            if (n >= count * (CHUNK / 4)) break;
            *(float4 *)(to + n / (CHUNK / 4) * PITCH + n % (CHUNK / 4) * 4) = x[u];
            seen += x[u].x * 0.0f + x[u].y * 0.0f + (x[u].z * 0.0f + x[u].w * 0.0f);
        }
    }
    return seen;
}

FA_DEVICE float load_rows(const fa_attention_params *p, const fa_tile *t, const fa_rows *rows,
                          int count, float *to, int column)
{
    switch (fa_fetch_kind(rows->view)) {
    case FA_FETCH_FLOAT32: return load_rows_as(p, t, rows, count, to, FA_FETCH_FLOAT32, column);
    case FA_FETCH_FLOAT16: return load_rows_as(p, t, rows, count, to, FA_FETCH_FLOAT16, column);
    case FA_FETCH_BFLOAT16: return load_rows_as(p, t, rows, count, to, FA_FETCH_BFLOAT16, column);
    default: return load_rows_as(p, t, rows, count, to, FA_FETCH_ANY, column);
    }
}

/* ---- Over the threads that share a row ------------------------------------------------------- */

FA_DEVICE float row_max(float x) { return fa_max_over_lanes(x, ACROSS); }
FA_DEVICE float row_sum(float x) { return fa_sum_over_lanes(x, ACROSS); }

/* ---- Products -------------------------------------------------------------------------------- */

/* A thread's scores into OWN x OTHERS floats. */
FA_DEVICE void put_scores(float *to, float scores[ROWS][COLUMNS])
{
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            to[row_of(r) * WEIGHTS_PITCH + across() + c * ACROSS] = scores[r][c];
}

/* result += weights other over the first `count` other rows: PART_GROUPS of a thread's columns. */
FA_DEVICE void add_rows(const float *weights, const float *other, int count,
                        float result[ROWS][PART_GROUPS][4])
{
    const float *from = other + across() * 4;
    weights += row_of(0) * WEIGHTS_PITCH;
#pragma unroll 1
    for (int j = 0; j < count; j += 4) {
        float4 w[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            w[r] = *(const float4 *)(weights + r * DOWN * WEIGHTS_PITCH + j);
#pragma unroll
        for (int g = 0; g < PART_GROUPS; g++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float4 x = *(const float4 *)(from + (j + e) * PITCH + g * 32);
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const float f = e == 0 ? w[r].x : e == 1 ? w[r].y : e == 2 ? w[r].z : w[r].w;
                    result[r][g][0] = fmaf(f, x.x, result[r][g][0]);
                    result[r][g][1] = fmaf(f, x.y, result[r][g][1]);
                    result[r][g][2] = fmaf(f, x.z, result[r][g][2]);
                    result[r][g][3] = fmaf(f, x.w, result[r][g][3]);
                }
            }
        }
    }
}

/* The same for rows with infinities or NaN, which must not be multiplied by a weight of 0. */
FA_DEVICE void add_rows_skip_zeros(const float *weights, const float *other, int count,
                                   float result[ROWS][PART_GROUPS][4])
{
    const float *from = other + across() * 4;
#pragma unroll 1
    for (int j = 0; j < count; j++) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float w = weights[row_of(r) * WEIGHTS_PITCH + j];
            if (w == 0.0f) continue;
#pragma unroll
            for (int g = 0; g < PART_GROUPS; g++) {
                const float4 x = *(const float4 *)(from + j * PITCH + g * 32);
                result[r][g][0] = fmaf(w, x.x, result[r][g][0]);
                result[r][g][1] = fmaf(w, x.y, result[r][g][1]);
                result[r][g][2] = fmaf(w, x.z, result[r][g][2]);
                result[r][g][3] = fmaf(w, x.w, result[r][g][3]);
            }
        }
    }
}

/* result = weights other: the part of one tile in the results. The caller sums these parts, so that a chain of sums is
 * only as long as a tile. bad: the other rows are not all finite. */
FA_DEVICE void sum_rows(const float *weights, const float *other, int count, bool bad,
                        float result[ROWS][PART_GROUPS][4])
{
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int g = 0; g < PART_GROUPS; g++)
#pragma unroll
            for (int e = 0; e < 4; e++) result[r][g][e] = 0.0f;
    if (bad) add_rows_skip_zeros(weights, other, count, result);
    else add_rows(weights, other, count, result);
}

#endif
