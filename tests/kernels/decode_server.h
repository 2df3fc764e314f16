/*
 * What a server does, for the tests of decode kernels: pages of any size, captured calls whose
 * lengths change, tables with wrong entries. The including file defines
 *
 *   FAMILY     the family that is tested
 *   machine    how a call is run; with the members number, otherwise, two_launches, memory
 *   launch     runs one launch of a plan
 *   run_plan   runs a plan with a workspace of its own; false if memory outside it was written
 */
#ifndef TEST_DECODE_SERVER_H
#define TEST_DECODE_SERVER_H

#include "sample.h"

enum { BATCH = 4, MOST_QUERIES = 4, MOST_HEADS = 8, PAGE_NUMBERS = 2048 };

/* Whether a problem of this number is run as a mixed batch. */
static inline bool is_mixed(int64_t number, const fa_problem *p)
{
    return p->cu_seqlens_q && number % 2;
}

/* A cache and the call on it. */
typedef struct server {
    int64_t batch, heads_q, heads_kv, n_q, longest, d;
    int64_t page; /* 0: no pages */
    int64_t pages, stride;
    int32_t lengths[BATCH], table[PAGE_NUMBERS];
    uint16_t *q, *k, *v, *out; /* float16 */
    float *lse;
    size_t q_size, kv_size, lse_size; /* elements */
    fa_options options;
    fa_problem problem;
    machine machine;
} server;

/* A cache full of NaN, and queries. Pages of a sequence are neither adjacent nor in order. */
static server *new_server(const server *shape, int64_t number)
{
    server *s = malloc(sizeof *s);
    if (!s) abort();
    *s = *shape;
    ref_random random = {(uint64_t)number};
    s->machine = (machine){.number = number};
    s->stride = s->page ? (s->longest + s->page - 1) / s->page : 0;
    s->pages = s->page ? s->batch * s->stride + 3 : s->batch;
    if (s->batch * s->stride > PAGE_NUMBERS) abort();
    s->q_size = (size_t)(s->batch * s->n_q * s->heads_q * s->d);
    s->kv_size = (size_t)(s->pages * (s->page ? s->page : s->longest) * s->heads_kv * s->d);
    s->lse_size = (size_t)(s->batch * s->n_q * s->heads_q);
    s->q = new_memory(&s->machine.memory, "q", 2 * s->q_size);
    s->k = new_memory(&s->machine.memory, "k", 2 * s->kv_size);
    s->v = new_memory(&s->machine.memory, "v", 2 * s->kv_size);
    s->out = new_memory(&s->machine.memory, "out", 2 * s->q_size);
    s->lse = new_memory(&s->machine.memory, "lse", 4 * s->lse_size);
    add_memory(&s->machine.memory, "lengths", s->lengths, sizeof s->lengths);
    add_memory(&s->machine.memory, "table", s->table, sizeof s->table);
    for (size_t i = 0; i < s->q_size; i++)
        s->q[i] = fa_float_to_half((float)ref_random_normal(&random));
    for (int64_t i = 0; i < s->batch * s->stride; i++)
        s->table[i] = (int32_t)((i * 7 + 2) % (s->batch * s->stride));
    for (int64_t i = 0; s->stride % 7 == 0 && i < s->batch * s->stride; i++)
        s->table[i] = (int32_t)(s->batch * s->stride - i); /* 7 does not reach all */
    return s;
}

static void free_server(server *s)
{
    free(s->q), free(s->k), free(s->v), free(s->out), free(s->lse);
    free(s);
}

/* Row j of sequence b in the cache. */
static size_t row_at(const server *s, int64_t b, int64_t j)
{
    int64_t row = b * s->longest + j;
    if (s->page) row = s->table[b * s->stride + j / s->page] * s->page + j % s->page;
    return (size_t)(row * s->heads_kv * s->d);
}

/* Sets lengths, and keys and values of all rows before them, the same for every kind of cache. Rows
 * after them are NaN, and table entries after them are invalid. */
static void fill(server *s, const int32_t *lengths, bool wild)
{
    const size_t count = (size_t)(s->heads_kv * s->d);
    memset(s->k, POISON, 2 * s->kv_size);
    memset(s->v, POISON, 2 * s->kv_size);
    for (int64_t b = 0; b < s->batch; b++) {
        s->lengths[b] = lengths[b];
        for (int64_t j = 0; j < lengths[b]; j++) {
            ref_random random = {(uint64_t)(b * 1000003 + j)};
            const size_t at = row_at(s, b, j);
            for (size_t i = 0; i < count; i++) {
                s->k[at + i] = fa_float_to_half((float)ref_random_normal(&random));
                s->v[at + i] = fa_float_to_half((float)ref_random_normal(&random));
            }
        }
        for (int64_t i = 0; wild && i < s->stride; i++)
            if (i * s->page >= lengths[b]) s->table[b * s->stride + i] = i % 2 ? INT32_MAX : -7;
    }
}

/* The problem and its launch, with keys divided into this many parts. */
static fa_cuda_plan_launch make_launch(server *s, int64_t parts)
{
    char why[320] = "";
    fa_cuda_plan plan = {0};
    const fa_tensor q = fa_bshd(s->q, FA_FLOAT16, s->batch, s->n_q, s->heads_q, s->d);
    const fa_tensor out = fa_bshd(s->out, FA_FLOAT16, s->batch, s->n_q, s->heads_q, s->d);
    const int64_t rows = s->page ? s->page : s->longest;
    const fa_tensor k = fa_bshd(s->k, FA_FLOAT16, s->pages, rows, s->heads_kv, s->d);
    const fa_tensor v = fa_bshd(s->v, FA_FLOAT16, s->pages, rows, s->heads_kv, s->d);
    s->options = (fa_options)FA_OPTIONS_INIT;
    s->options.flags = FA_CAUSAL;
    s->options.seqlens_k = s->lengths;
    s->options.block_table = s->page ? s->table : NULL;
    s->options.block_table_stride = s->stride;
    const fa_arguments a = {.pass = FA_PASS_DECODE,
                            .device = FA_DEVICE_CUDA,
                            .q = &q,
                            .k = &k,
                            .v = &v,
                            .out = &out,
                            .lse = s->lse,
                            .options = &s->options};
    CHECK(fa_problem_make(&a, &s->problem) == FA_OK, "%s", fa_last_error());
    CHECK(fa_cuda_plan_make(&s->problem, &devices[H200], &FAMILY, &plan, why, sizeof why) &&
              plan.family == &FAMILY,
          "%s", why);
    fa_cuda_cut_decode(&plan.launches[0], 0, parts, 1);
    return plan.launches[0];
}

static void run_server(server *s, int64_t parts)
{
    const fa_cuda_plan_launch l = make_launch(s, parts);
    memset(s->out, POISON, 2 * s->q_size);
    memset(s->lse, POISON, 4 * s->lse_size);
    CHECK(run_plan(&s->machine, &s->problem, &l), "memory beside the workspace was written");
}

static bool is_same(const server *a, const server *b)
{
    return memcmp(a->out, b->out, 2 * a->q_size) == 0 &&
           memcmp(a->lse, b->lse, 4 * a->lse_size) == 0;
}

/* The largest differences of results. Infinities must be equal. */
static double difference(const server *a, const server *b)
{
    double worst = 0;
    for (size_t i = 0; i < a->q_size; i++) {
        const double x = fabs(fa_half_to_float(a->out[i]) - fa_half_to_float(b->out[i]));
        if (!(x <= worst)) worst = isnan(x) ? INFINITY : x;
    }
    for (size_t i = 0; i < a->lse_size; i++) {
        const double x = a->lse[i] == b->lse[i] ? 0 : fabs(a->lse[i] - b->lse[i]);
        if (!(x <= worst)) worst = isnan(x) ? INFINITY : x;
    }
    return worst;
}

static const server shapes[] = {
    {.batch = BATCH, .heads_q = 8, .heads_kv = 2, .n_q = 1, .longest = 700, .d = 64},
    {.batch = BATCH, .heads_q = 4, .heads_kv = 4, .n_q = 3, .longest = 401, .d = 128},
    {.batch = BATCH, .heads_q = 8, .heads_kv = 1, .n_q = 4, .longest = 300, .d = 128},
    {.batch = BATCH, .heads_q = 4, .heads_kv = 2, .n_q = 1, .longest = 257, .d = 256},
    {.batch = BATCH, .heads_q = 2, .heads_kv = 1, .n_q = 2, .longest = 300, .d = 80},
};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

/* The keys are the same with pages of any size, so results have the same bits. */
static void test_pages(const int64_t sizes[9])
{
    for (int i = 0; i < SHAPES; i++) {
        const int32_t longest = (int32_t)shapes[i].longest;
        const int32_t lengths[BATCH] = {longest, 0, 1, longest / 2 + 3};
        server *plain = new_server(&shapes[i], 100 + i);
        fill(plain, lengths, false);
        run_server(plain, 3);
        for (int n = i % 2; n < 9; n += 2) {
            if (!sample_has(n / 2, i)) continue;
            server paged_shape = shapes[i];
            paged_shape.page = sizes[n];
            if (BATCH * ((longest + sizes[n] - 1) / sizes[n]) > PAGE_NUMBERS) continue;
            server *paged = new_server(&paged_shape, 100 + i);
            fill(paged, lengths, true);
            run_server(paged, 3);
            CHECK(is_same(plain, paged), "shape %d, pages of %d: differs by %g", i, (int)sizes[n],
                  difference(plain, paged));
            free_server(paged);
        }
        free_server(plain);
    }
}

/* One launch, as in a graph, repeated with other lengths: counters are clean each time, and the old
 * contents of the workspace have no effect. */
static void test_replay(void)
{
    static const int lengths[][BATCH] = {{100, 100, 100, 100}, {0, 0, 0, 0},  {100, 0, 50, 1},
                                         {3, 99, 0, 64},       {1, 1, 1, 40}, {100, 100, 100, 100}};
    for (int i = 0; i < SHAPES; i++) {
        server shape = shapes[i];
        shape.page = i % 2 ? 5 : 16;
        server *graph = new_server(&shape, 200 + i), *fresh = new_server(&shape, 200 + i);
        fresh->machine.number += 1000;
        const fa_cuda_plan_launch l = make_launch(graph, 5);
        char *workspace = new_memory(&graph->machine.memory, "workspace", l.workspace_bytes);
        graph->problem.workspace = workspace;
        for (int n = 0; n < 6; n++) {
            int32_t now[BATCH];
            for (int b = 0; b < BATCH; b++) now[b] = (int32_t)(lengths[n][b] * shape.longest / 100);
            fill(graph, now, false);
            fill(fresh, now, false);
            memset(graph->out, POISON, 2 * graph->q_size);
            memset(graph->lse, POISON, 4 * graph->lse_size);
            graph->machine.otherwise = n % 2;
            launch(&graph->machine, &graph->problem, &l, FA_DECODE_LAST);
            fresh->machine.two_launches = n % 2;
            run_server(fresh, 5);
            CHECK(is_same(graph, fresh), "shape %d, replay %d: differs by %g", i, n,
                  difference(graph, fresh));
        }
        free(workspace);
        free_server(graph);
        free_server(fresh);
    }
}

/* The result is the same for any number of parts, except for rounding: a last bit of float16. */
static void test_parts(void)
{
    static const int64_t parts[] = {2, 3, 4, 7, 16, 33, 64, 100, 127, 128};
    const server shape = {
        .batch = 2, .heads_q = 4, .heads_kv = 1, .n_q = 2, .longest = 8200, .d = 128};
    const int32_t lengths[BATCH] = {8200, 1234};
    server *whole = new_server(&shape, 300), *cut_up = new_server(&shape, 300);
    fill(whole, lengths, false);
    fill(cut_up, lengths, false);
    run_server(whole, 1);
    for (int i = 0; i < 10; i++) {
        cut_up->machine.two_launches = i % 2;
        run_server(cut_up, parts[i]);
        CHECK(difference(whole, cut_up) < 2e-4, "%d parts: differs by %g", (int)parts[i],
              difference(whole, cut_up));
    }
    free_server(whole);
    free_server(cut_up);
}

/* A table with invalid entries must not cause accesses outside the cache. */
static void test_wild_tables(void)
{
    for (int64_t page = 16; page > 0; page -= 11) {
        server shape = shapes[0];
        shape.page = page;
        const int32_t lengths[BATCH] = {700, 650, 16, 1};
        server *s = new_server(&shape, 400);
        fill(s, lengths, false);
        for (int64_t i = 0; i < s->batch * s->stride; i += 2)
            s->table[i] = i % 4 ? INT32_MIN : (int32_t)s->pages;
        run_server(s, 4);
        free_server(s);
    }
}

#endif
