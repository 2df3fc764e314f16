/*
 * fa_append on the CPU, one row of one head at a time. It is limited by memory with every instruction set.
 */
#include <math.h>

#include "../convert.h"
#include "append.h"
#include "dispatch.h"
#include "team.h"

/* A kind of rows: new keys, new values or queries. */
typedef struct fa_kind {
    const fa_view *from, *to, *scale; /* scale without data: 1 */
    const int32_t *cu_seqlens, *seqlens;
    int64_t rows, heads, columns;
    bool rotated, cached;
} fa_kind;

enum { FA_KEYS, FA_VALUES, FA_QUERIES, FA_KINDS };

typedef struct fa_append_job {
    const fa_append_problem *p;
    fa_kind kinds[FA_KINDS];
    int64_t end[FA_KINDS]; /* items up to the end of each kind: a row of one head each */
} fa_append_job;

static float load(const char *data, fa_dtype dtype, int64_t i)
{
    if (dtype == FA_FLOAT32) return ((const float *)(const void *)data)[i];
    const uint16_t half = ((const uint16_t *)(const void *)data)[i];
    return dtype == FA_FLOAT16 ? fa_half_to_float(half) : fa_bfloat_to_float(half);
}

static void store(char *data, fa_dtype dtype, int64_t i, float x)
{
    switch (dtype) {
    case FA_FLOAT32: ((float *)(void *)data)[i] = x; break;
    case FA_FLOAT16: ((uint16_t *)(void *)data)[i] = fa_float_to_half(x); break;
    case FA_BFLOAT16: ((uint16_t *)(void *)data)[i] = fa_float_to_bfloat(x); break;
    case FA_FLOAT8_E4M3: ((uint8_t *)data)[i] = fa_float_to_e4m3(x); break;
    default: ((int8_t *)data)[i] = fa_float_to_int8(x);
    }
}

static void rotate(const fa_append_problem *p, float *row, int64_t position)
{
    const int64_t half = p->rotary_dim / 2;
    const char *cos = fa_view_row(&p->cos, 0, position, 0);
    const char *sin = fa_view_row(&p->sin, 0, position, 0);
    for (int64_t i = 0; i < half; i++) {
        float *x = row + p->rotary_offset + (p->interleaved ? 2 * i : i);
        float *y = x + (p->interleaved ? 1 : half);
        const float c = load(cos, p->cos.dtype, i), s = load(sin, p->sin.dtype, i);
        const float turned = *x * c - *y * s;
        *y = *y * c + *x * s;
        *x = turned;
    }
}

/* The scale with which the row's largest element just fits; NaN if one is not finite. */
static float find_scale(const float *row, int64_t n, fa_dtype dtype)
{
    float largest = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(row[i])) return NAN;
        largest = fmaxf(largest, fabsf(row[i]));
    }
    return largest / (dtype == FA_INT8 ? 127.0f : 448.0f);
}

/* The scale of the cache's row; computed and written if the call asks for it. */
static float row_scale(const fa_append_problem *p, const fa_kind *kind, const float *row,
                       int64_t block, int64_t at, int64_t head)
{
    if (!kind->scale || !kind->scale->data) return 1.0f;
    float *scale = (float *)(void *)fa_view_row(kind->scale, block, at, head);
    if (p->write_scales) *scale = find_scale(row, kind->columns, kind->to->dtype);
    return *scale;
}

static void append_row(const fa_append_problem *p, const fa_kind *kind, int64_t block, int64_t at,
                       int64_t head)
{
    const fa_append_arrays *a = &p->arrays;
    float row[FA_HEAD_DIM_MAX];
    fa_append_row found;
    int64_t to_block = block, to_row = at;
    if (!fa_append_find(a, kind->cu_seqlens, kind->seqlens, block, at, &found)) return;
    if (kind->cached && !fa_append_place(a, &found, &to_block, &to_row)) return;
    const char *from = fa_view_row(kind->from, block, at, head);
    for (int64_t i = 0; i < kind->columns; i++) row[i] = load(from, kind->from->dtype, i);
    if (kind->rotated) {
        const bool first = p->one_position && !kind->cached;
        rotate(p, row, fa_append_position(a, found.sequence, first ? 0 : found.number));
    }
    const float scale = row_scale(p, kind, row, to_block, to_row, head);
    char *to = fa_view_row(kind->to, to_block, to_row, head);
    for (int64_t i = 0; i < kind->columns; i++)
        store(to, kind->to->dtype, i, scale == 0.0f ? 0.0f : row[i] / scale);
}

static void append_item(void *context, int64_t index, int thread)
{
    const fa_append_job *job = context;
    int kind = FA_KEYS;
    (void)thread;
    while (index >= job->end[kind]) kind++;
    const fa_kind *k = &job->kinds[kind];
    const int64_t n = index - (kind > 0 ? job->end[kind - 1] : 0);
    append_row(job->p, k, n / k->heads / k->rows, n / k->heads % k->rows, n % k->heads);
}

void fa_cpu_append(const fa_append_problem *p)
{
    const fa_append_arrays *a = &p->arrays;
    const bool rotated = p->rotary_dim > 0;
    fa_append_job job = {p,
                         {{&p->k_new, &p->k_cache, &p->k_scale, a->cu_seqlens_new, a->seqlens_new,
                           a->rows_new, p->heads_kv, p->d, rotated, true},
                          {&p->v_new, &p->v_cache, &p->v_scale, a->cu_seqlens_new, a->seqlens_new,
                           a->rows_new, p->heads_kv, p->d_v, false, true},
                          {&p->q, &p->q_out, NULL, a->cu_seqlens_q, a->seqlens_q, a->rows_q,
                           p->heads_q, p->d, rotated, false}},
                         {0}};
    const int64_t keys = p->blocks_new * a->rows_new * p->heads_kv;
    job.end[FA_KEYS] = keys;
    job.end[FA_VALUES] = job.end[FA_KEYS] + (p->v_new.data ? keys : 0);
    job.end[FA_QUERIES] =
        job.end[FA_VALUES] + (p->q.data ? p->blocks_q * a->rows_q * p->heads_q : 0);
    const int64_t total = job.end[FA_QUERIES];
    for (int64_t b = 0; a->lengths_after && b < a->batch; b++)
        a->lengths_after[b] = fa_append_length_after(a, b);
    for (int64_t b = 0; a->block_table_after && b < a->batch; b++)
        for (int64_t i = 0; i < a->block_table_stride; i++)
            a->block_table_after[b * a->block_table_stride + i] = fa_append_table_entry(a, b, i);
    for (int64_t b = 0; a->row_table_after && b < a->batch; b++)
        for (int64_t j = 0; j < fa_append_length_after(a, b); j++)
            a->row_table_after[b * fa_append_room(a) + j] = fa_append_key_row(a, b, j);
    for (int64_t b = 0; a->cu_seqlens_after && b <= a->batch; b++)
        a->cu_seqlens_after[b] = fa_append_start_after(a, b);
    if (total == 0) return;
    const int wanted = fa_cpu_threads(p->threads, 8.0 * (double)total * (double)p->d);
    const int threads = fa_team_reserve((int)(wanted < total ? wanted : total));
    fa_team_run(threads, total, fa_team_share(threads, total), append_item, &job);
}
