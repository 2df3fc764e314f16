/*
 * Products of tiles on the FMA units, in float32, for the kernels whose results belong to "own"
 * rows (queries or keys) and that walk over "other" rows: backward and weights.
 *
 * 128 threads. Thread (x, y) of 8 x 16 holds own rows y, y+16, ...; of scores the columns x, x+8,
 * ..., of results the columns 4x .. 4x+3 of each 32. A row belongs to 8 neighbours of one warp.
 * Operands come through shared memory in chunks of 64 columns, whatever the head dim; both are
 * loaded again for each tile, which costs a twentieth of a product. Rows lie 4 words more than a
 * power of two apart: then the 128-bit accesses of a warp meet no bank twice.
 *
 * Who includes this has defined OWN, the number of own rows.
 */
#ifndef FA_KERNEL_SIMT_H
#define FA_KERNEL_SIMT_H

#include "common/score_options.cuh"
#include "common/softmax.cuh"
#include "passes.h"

#ifndef IN_FLIGHT
#define IN_FLIGHT 4 /* loads of a thread */
#endif

enum {
    THREADS = FA_PASS_THREADS,
    ACROSS = 8,
    DOWN = THREADS / ACROSS,
    OTHERS = FA_PASS_OTHERS,
    CHUNK = FA_PASS_CHUNK,
    PITCH = FA_PASS_PITCH,
    ROWS = OWN / DOWN,         /* own rows of a thread */
    COLUMNS = OTHERS / ACROSS, /* scores of a thread's row */
    GROUPS = CHUNK / 32,       /* of 4 result columns of a thread's row */
    BATCH = IN_FLIGHT
};

/* Rows start, start+1, ... of a tensor, of which only [from, to) are read; the others count as
 * zeros. Queries that are not in a row: index says which, and those at `to` or behind are not
 * read. */
typedef struct fa_rows {
    const fa_kernel_view *view;
    int columns;
    bool keys; /* keys or values, else of queries */
    int64_t start, from, to;
    const int64_t *index;
} fa_rows;

/* The two operands of a product of scores. */
typedef struct fa_operands {
    fa_rows own, other;
} fa_operands;

/* Shared memory. Gradients take the place of the own rows once scores are there. */
typedef struct fa_shared {
    float *own;      /* OWN x CHUNK */
    float *other;    /* OTHERS x CHUNK */
    float *weights;  /* OWN x OTHERS */
    float4 *queries; /* of the tile: log-sum-exp, delta, first and last key that it sees + 1 */
    fa_operands *of; /* of dP and of S: registers are for the products */
    int *flags;      /* THREADS */
} fa_shared;

FA_DEVICE fa_shared fa_shared_of(float *memory)
{
    fa_shared s;
    s.own = memory;
    s.other = s.own + OWN * PITCH;
    s.weights = s.other + OTHERS * PITCH;
    s.queries = (float4 *)(void *)(s.weights + OWN * PITCH);
    s.of = (fa_operands *)(void *)(s.queries + OTHERS);
    s.flags = (int *)(void *)((char *)s.of + FA_PASS_OPERANDS);
    return s;
}

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

/* Columns column .. column+CHUNK-1 of so many rows. Returns 0, or NaN if something in them is not
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

/* ---- Products -------------------------------------------------------------------------------- */

/* scores += own other^T over the first so many columns of the chunk. */
FA_DEVICE void add_scores(const fa_shared *shared, int columns, float scores[ROWS][COLUMNS])
{
    const float *own = shared->own + row_of(0) * PITCH;
    const float *other = shared->other + across() * PITCH;
#pragma unroll 2
    for (int at = 0; at < columns; at += 4) {
        float4 a[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) a[r] = *(const float4 *)(own + r * DOWN * PITCH + at);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const float4 b = *(const float4 *)(other + c * ACROSS * PITCH + at);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float sum = fmaf(a[r].x, b.x, scores[r][c]);
                sum = fmaf(a[r].y, b.y, sum);
                sum = fmaf(a[r].z, b.z, sum);
                scores[r][c] = fmaf(a[r].w, b.w, sum);
            }
        }
    }
}

/* scores = own other^T. The last chunk of the other rows stays in shared memory; returns whether
 * something in it is not finite. */
FA_DEVICE bool make_scores(const fa_attention_params *p, const fa_tile *t, const fa_shared *shared,
                           const fa_operands *of, float scores[ROWS][COLUMNS])
{
    bool bad = false;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) scores[r][c] = 0.0f;
#pragma unroll 1
    for (int column = 0; column < of->own.columns; column += CHUNK) {
        const int left = of->own.columns - column;
        float seen = 0.0f;
        __syncthreads(); /* what lies there has been used */
#pragma unroll 1
        for (int side = 0; side < 2; side++)
            seen = load_rows(p, t, side ? &of->other : &of->own, side ? OTHERS : OWN,
                             side ? shared->other : shared->own, column);
        bad = __syncthreads_or(seen != 0.0f) != 0;
        add_scores(shared, left < CHUNK ? left : CHUNK, scores);
    }
    return bad;
}

/* A thread's scores into OWN x OTHERS floats. */
FA_DEVICE void put_scores(float *to, float scores[ROWS][COLUMNS])
{
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            to[row_of(r) * PITCH + across() + c * ACROSS] = scores[r][c];
}

/* result += weights other over the first `count` other rows: the columns of one chunk. */
FA_DEVICE void add_rows(const float *weights, const float *other, int count,
                        float result[ROWS][GROUPS][4])
{
    const float *from = other + across() * 4;
    weights += row_of(0) * PITCH;
#pragma unroll 1
    for (int j = 0; j < count; j += 4) {
        float4 w[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) w[r] = *(const float4 *)(weights + r * DOWN * PITCH + j);
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
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

/* The same for rows that hold infinities or NaN, which a weight of 0 must not meet. */
FA_DEVICE void add_rows_skip_zeros(const float *weights, const float *other, int count,
                                   float result[ROWS][GROUPS][4])
{
    const float *from = other + across() * 4;
#pragma unroll 1
    for (int j = 0; j < count; j++) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float w = weights[row_of(r) * PITCH + j];
            if (w == 0.0f) continue;
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                const float4 x = *(const float4 *)(from + j * PITCH + g * 32);
                result[r][g][0] = fmaf(w, x.x, result[r][g][0]);
                result[r][g][1] = fmaf(w, x.y, result[r][g][1]);
                result[r][g][2] = fmaf(w, x.z, result[r][g][2]);
                result[r][g][3] = fmaf(w, x.w, result[r][g][3]);
            }
        }
    }
}

/* ---- Sums over the threads that share a row -------------------------------------------------- */

FA_DEVICE float row_maximum(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 4));
}

FA_DEVICE float row_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    x += __shfl_xor_sync(0xffffffffu, x, 2);
    return x + __shfl_xor_sync(0xffffffffu, x, 4);
}

/* ---- Sequences ------------------------------------------------------------------------------- */

/* Sequence b and a query head: where its queries and keys lie. No tile of it yet. */
FA_DEVICE void fa_place_sequence(const fa_attention_params *p, int64_t b, int64_t head, fa_tile *t)
{
    t->batch = b;
    t->head = head;
    t->head_kv = head / (p->heads_q / p->heads_kv);
    if (p->cu_seqlens_q) {
        t->block_q = 0;
        t->start_q = fa_packed_start(p, b + 1);
        t->first = 0;
        t->room_q = t->n_q = fa_max64(0, fa_packed_start(p, b + 2) - t->start_q);
        if (p->seqlens_q) t->n_q = fa_max64(0, fa_min64(p->seqlens_q[b], t->room_q));
    } else {
        fa_place_padded(p, 0, 1, t);
    }
    fa_place_keys(p, t);
    t->diagonal = p->diagonal_given ? p->diagonal : t->n_k - t->n_q;
}

#endif
