/*
 * Page numbers that no page has, for the tests of kernels on the host. Sequence 1 of three has some. A kernel
 * may read any page of the cache in their place, or zeros, and no other memory; the other sequences'
 * results do not change. Kernels for more queries define WILD_QUERIES.
 */
#ifndef TEST_WILD_PAGES_H
#define TEST_WILD_PAGES_H

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "buffers.h"
#include "check.h"
#include "random_problem.h"
#include "scalar.h"

#ifndef WILD_QUERIES
#define WILD_QUERIES 20
#endif

enum {
    WILD_BATCH = 3,
    WILD_HEADS = 2,
    WILD_DIM = 64,
    WILD_PAGE = 16,
    WILD_ENTRIES = 5, /* of a sequence; its keys end in the last one */
    WILD_KEYS = 70,
    WILD_PAGES = WILD_BATCH * WILD_ENTRIES + 2
};

/* The call's memory, and where its arrays are there. */
typedef struct wild_call {
    ref_buffers buffers;
    random_call call;
    int32_t *table;
    ref_random random;
} wild_call;

static inline fa_tensor wild_tensor(wild_call *w, const char *name, fa_dtype dtype, int64_t blocks,
                                    int64_t rows, int64_t heads, int64_t columns)
{
    ref_layout layout = REF_LAYOUT_CONTIGUOUS;
    fa_tensor t = {.dtype = dtype, .shape = {blocks, rows, heads, columns}};
    layout.aligned_data = true;
    ref_buffers_tensor(&w->buffers, name, &t, &layout);
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t i = 0; i < rows; i++)
            for (int64_t h = 0; h < heads; h++)
                for (int64_t c = 0; c < columns; c++)
                    ref_store(&t, b, i, h, c, ref_random_normal(&w->random));
    return t;
}

static inline fa_tensor wild_queries(wild_call *w, const char *name, fa_dtype dtype)
{
    return wild_tensor(w, name, dtype, WILD_BATCH, WILD_QUERIES, WILD_HEADS, WILD_DIM);
}

/* A call with a right table. */
static inline void wild_make(wild_call *w, fa_dtype dtype)
{
    *w = (wild_call){.random = {5}};
    w->call = (random_call){.pass = RANDOM_FORWARD, .buffers = &w->buffers};
    random_call *c = &w->call;
    c->q = wild_queries(w, "q", dtype);
    c->k = wild_tensor(w, "k", dtype, WILD_PAGES, WILD_PAGE, 1, WILD_DIM);
    c->v = wild_tensor(w, "v", dtype, WILD_PAGES, WILD_PAGE, 1, WILD_DIM);
    c->out = wild_queries(w, "out", dtype);
    const size_t rows = WILD_BATCH * WILD_HEADS * WILD_QUERIES;
    const size_t entries = WILD_BATCH * WILD_ENTRIES;
    c->lse = ref_buffers_new(&w->buffers, "lse", rows * sizeof(float), sizeof(float));
    for (size_t i = 0; i < rows; i++) c->lse[i] = 4; /* for a backward */
    int32_t *lengths =
        ref_buffers_new(&w->buffers, "lengths", WILD_BATCH * sizeof *lengths, sizeof *lengths);
    w->table = ref_buffers_new(&w->buffers, "table", entries * sizeof *lengths, sizeof *lengths);
    for (int b = 0; b < WILD_BATCH; b++) lengths[b] = WILD_KEYS;
    for (int i = 0; i < (int)entries; i++) w->table[i] = (7 * i + 2) % (int)entries;
    c->options = (fa_options)FA_OPTIONS_INIT;
    c->options.device = FA_DEVICE_CUDA;
    c->options.flags = FA_CAUSAL;
    c->options.seqlens_k = lengths;
    c->options.block_table = w->table;
    c->options.block_table_stride = WILD_ENTRIES;
}

static inline void wild_put(wild_call *w, const int32_t entries[WILD_ENTRIES])
{
    for (int i = 0; i < WILD_ENTRIES; i++) w->table[WILD_ENTRIES + i] = entries[i];
}

/* Whether the results of sequence b, each of so many bytes, have the same bits. */
static inline bool wild_is_same(const void *x, const void *y, size_t bytes, int b)
{
    const size_t at = (size_t)b * bytes;
    return memcmp((const char *)x + at, (const char *)y + at, bytes) == 0;
}

/* clamps: a wrong number stands for the nearest page. */
static inline void test_wild_pages(random_attend *attend, void *context, fa_dtype dtype,
                                   bool clamps)
{
    static const int32_t wild[][WILD_ENTRIES] = {
        {-1, INT32_MAX, 3, WILD_PAGES, INT32_MIN},
        {INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN},
        {1 << 30, -(1 << 30), 1 << 24, 12345678, INT32_MAX}};
    for (size_t n = 0; n < sizeof wild / sizeof *wild; n++) {
        int32_t nearest[WILD_ENTRIES];
        for (int i = 0; i < WILD_ENTRIES; i++)
            nearest[i] = wild[n][i] < 0             ? 0
                         : wild[n][i] >= WILD_PAGES ? WILD_PAGES - 1
                                                    : wild[n][i];
        wild_call right, wrong;
        wild_make(&right, dtype);
        wild_make(&wrong, dtype);
        wild_put(&right, nearest);
        wild_put(&wrong, wild[n]);
        wild_call *both[] = {&right, &wrong};
        for (int i = 0; i < 2; i++) {
            char message[320] = "";
            const fa_status status = attend(context, &both[i]->call, message, sizeof message);
            CHECK(status == FA_OK, "%s, %s pages: status %d: %s", fa_dtype_name(dtype),
                  i ? "wild" : "right", (int)status, message);
        }
        const size_t out = WILD_QUERIES * WILD_HEADS * WILD_DIM * fa_dtype_size(dtype);
        const size_t lse = WILD_QUERIES * WILD_HEADS * sizeof(float);
        for (int b = 0; b < WILD_BATCH; b++)
            if (b != 1 || clamps)
                CHECK(wild_is_same(right.call.out.data, wrong.call.out.data, out, b) &&
                          wild_is_same(right.call.lse, wrong.call.lse, lse, b),
                      "%s, table %d: sequence %d differs", fa_dtype_name(dtype), (int)n, b);
        ref_buffers_free(&right.buffers);
        ref_buffers_free(&wrong.buffers);
    }
}

#endif
