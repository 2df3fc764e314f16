/*
 * Sharing work between threads: tiles of sequences of different lengths as one list of tasks, scratch
 * memory for all threads at once, and rows that belong to no sequence.
 */
#ifndef FA_CPU_WORK_H
#define FA_CPU_WORK_H

#include <stdlib.h>

#include "../problem.h"
#include "dispatch.h"
#include "rows.h"
#include "team.h"

/* Bytes rounded up to whole cache lines. */
static inline size_t fa_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* More than there can be, with room for rounding up and adding. */
enum { FA_TOO_MANY_BITS = 61 };

/* a * b of counts that are not negative; at most 2^61, which no allocation gives. */
static inline int64_t fa_times(int64_t a, int64_t b)
{
    const int64_t limit = (int64_t)1 << FA_TOO_MANY_BITS;
    int64_t product;
    return __builtin_mul_overflow(a, b, &product) || product > limit ? limit : product;
}

/* Bytes for count items, likewise. */
static inline size_t fa_bytes(int64_t count, size_t size)
{
    return (size_t)fa_times(count, (int64_t)size);
}

static inline void *fa_allocate(size_t bytes)
{
    return aligned_alloc(64, fa_lines(bytes ? bytes : 1));
}

/* Takes count items of size bytes from a block of scratch and moves on. */
static inline void *fa_take(char **scratch, int64_t count, size_t size)
{
    void *taken = *scratch;
    *scratch += fa_lines((size_t)count * size);
    return taken;
}

/* Sequences with few query rows per key/value head are decoded: all their rows share one loop over the
 * keys. With more rows, tiles are faster. */
enum { FA_DECODE_ROWS = 32 };

static inline bool fa_is_decode(const fa_problem *p, const fa_sequence *s)
{
    return s->n_q * (p->heads_q / p->heads_kv) <= FA_DECODE_ROWS;
}

/* Threads for a pass over all scores of a problem: an upper bound of the operations is enough. */
static inline int fa_problem_threads(const fa_problem *p)
{
    const double scores = (double)p->batch * (double)p->heads_q * (double)p->n_q * (double)p->n_k;
    return fa_cpu_threads(p->threads, 2 * scores * (double)(p->d + p->d_v));
}

/* Tasks (sequence, tile): sequence b owns tasks first[b] .. first[b + 1] - 1. */
typedef struct fa_tasks {
    int64_t *first; /* (batch + 1), owned */
    int64_t batch;
} fa_tasks;

typedef int64_t fa_tile_count(const fa_problem *p, const fa_sequence *s);

static inline bool fa_tasks_make(fa_tasks *t, const fa_problem *p, fa_tile_count *count)
{
    t->batch = p->batch;
    t->first = malloc(fa_bytes(p->batch + 1, sizeof(int64_t)));
    if (!t->first) return false;
    t->first[0] = 0;
    for (int64_t b = 0; b < p->batch; b++) {
        fa_sequence s = fa_problem_sequence(p, b);
        t->first[b + 1] = t->first[b] + count(p, &s);
    }
    return true;
}

static inline int64_t fa_tasks_total(const fa_tasks *t) { return t->first[t->batch]; }

/* The sequence that owns a task: the last b with first[b] <= task. */
static inline int64_t fa_tasks_sequence(const fa_tasks *t, int64_t task)
{
    int64_t low = 0, high = t->batch;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (t->first[middle] <= task) low = middle;
        else high = middle;
    }
    return low;
}

/* Calls f(context, block, from, to) for every range of rows that belongs to no sequence. */
typedef void fa_rows_function(void *context, int64_t block, int64_t from, int64_t to);

static inline void fa_unused_rows(const int32_t *cu_seqlens, const int32_t *seqlens, int64_t batch,
                                  int64_t rows, fa_rows_function *f, void *context)
{
    if (!cu_seqlens) {
        for (int64_t b = 0; seqlens && b < batch; b++) f(context, b, seqlens[b], rows);
        return;
    }
    int64_t used = 0;
    for (int64_t b = 0; b < batch; b++) {
        f(context, 0, used, cu_seqlens[b]);
        used = seqlens ? cu_seqlens[b] + (int64_t)seqlens[b] : cu_seqlens[b + 1];
    }
    f(context, 0, used, rows);
}

/* A view and its heads and columns, for zeroing unused rows; lse (or NULL) gets -infinity. */
typedef struct fa_unused {
    const fa_view *view;
    int64_t heads, columns;
    float *lse;
    int64_t rows;
} fa_unused;

static inline void fa_zero_rows(void *context, int64_t block, int64_t from, int64_t to)
{
    const fa_unused *u = context;
    for (int64_t h = 0; h < u->heads; h++) {
        for (int64_t i = from; i < to; i++) {
            if (u->view->data)
                fa_zero_row(fa_view_row(u->view, block, i, h), u->view->dtype, u->columns);
            if (u->lse) u->lse[(block * u->heads + h) * u->rows + i] = -INFINITY;
        }
    }
}

/* Sets rows of out and lse that belong to no sequence to the values that flashattn.h defines. */
static inline void fa_clear_unused_output(const fa_problem *p)
{
    fa_unused u = {&p->out, p->heads_q, p->d_v, p->lse, p->rows_q};
    fa_unused_rows(p->cu_seqlens_q, p->seqlens_q, p->batch, p->rows_q, fa_zero_rows, &u);
}

#endif
