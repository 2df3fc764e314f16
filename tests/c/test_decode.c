/* Decode against float64: few queries, many keys, shared heads, every option, pages of every
 * size. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"

static void check(shape s, fa_dtype dtype, option first, option second, uint64_t seed)
{
    attention a;
    char what[160];
    attention_make(&a, seed, s, dtype);
    if (first < NUM_OPTIONS) attention_set(&a, first);
    if (second < NUM_OPTIONS && second != first) attention_set(&a, second);
    snprintf(what, sizeof what, "%s heads %lld/%lld n %lldx%lld d %lld d_v %lld, options %d %d",
             fa_dtype_name(dtype), (long long)s.heads_q, (long long)s.heads_kv, (long long)s.n_q,
             (long long)s.n_k, (long long)s.d, (long long)s.d_v, (int)first, (int)second);
    attention_check_decode(&a, what);
    attention_free(&a);
}

static void check_options(void)
{
    for (int t = 0; t < 3; t++)
        for (int first = 0; first < NUM_OPTIONS; first++)
            for (int second = first; second < NUM_OPTIONS; second++) {
                const shape s = {2, 8, 2, 1 + second % 3, 700, 24, 16};
                check(s, float_dtypes[t], (option)first, (option)second,
                      (uint64_t)(first * 10 + second));
            }
}

static void check_lengths(void)
{
    static const int64_t lengths[] = {0,    1,    2,    15,   16,   17,   127, 128, 129,
                                      255,  256,  257,  511,  512,  513,  767, 768, 1023,
                                      1024, 1025, 2047, 2048, 2049, 4097, 8193};
    for (int n = 0; n < (int)(sizeof lengths / sizeof *lengths); n++)
        for (int64_t n_q = 1; n_q <= 4; n_q++) {
            const shape s = {1, 2, 1, n_q, lengths[n], 16, 16};
            check(s, float_dtypes[n % 3], n % 2 ? OPTION_CAUSAL : NUM_OPTIONS, NUM_OPTIONS,
                  (uint64_t)n);
        }
}

/* Up to 32 rows of queries share a key's head; more are computed by the forward's algorithm. */
static void check_groups(void)
{
    for (int64_t group = 1; group <= 34; group++)
        for (int64_t n_q = 1; n_q <= 3; n_q++) {
            const shape s = {1, 2 * group, 2, n_q, 300, 12, 20};
            check(s, float_dtypes[group % 3], NUM_OPTIONS, NUM_OPTIONS, (uint64_t)group);
        }
}

static void check_dims(void)
{
    for (int64_t d = 1; d <= 512; d += d < 70 ? 1 : 37) {
        const shape s = {1, 4, 2, 1, 90, d, 513 - d}, t = {1, 4, 2, 2, 90, d, d};
        check(s, float_dtypes[d % 3], NUM_OPTIONS, NUM_OPTIONS, (uint64_t)d);
        check(t, float_dtypes[(d + 1) % 3], NUM_OPTIONS, NUM_OPTIONS, (uint64_t)d);
    }
}

/* Latent attention: the values are the first columns of the keys. */
static void check_latent(void)
{
    static const int64_t dims[][2] = {{576, 512}, {576, 1}, {513, 512}, {560, 496}};
    for (int n = 0; n < 4; n++)
        for (int t = 0; t < 3; t++) {
            const shape s = {2, 16, 1, 1 + n % 2 * 3, 150, dims[n][0], dims[n][1]};
            attention a;
            char what[80];
            attention_make(&a, (uint64_t)n, s, float_dtypes[t]);
            a.in.v = a.in.k;
            a.in.v.shape[3] = s.d_v;
            snprintf(what, sizeof what, "latent %s d %lld d_v %lld", fa_dtype_name(float_dtypes[t]),
                     (long long)s.d, (long long)s.d_v);
            attention_check_decode(&a, what);
            attention_check_forward(&a, what);
            attention_free(&a);
        }
}

/* The keys of a contiguous problem, distributed over pages: the results must have the same bits. */
static void check_pages(int64_t page_size, fa_dtype dtype)
{
    const int64_t n_k = 300, batch = 2;
    const shape s = {batch, 4, 2, 1, n_k, 16, 24};
    const int64_t stride = (n_k + page_size - 1) / page_size, pages = batch * stride + 1;
    attention whole, paged;
    attention_make(&whole, 3, s, dtype);
    attention_check_decode(&whole, "one part");
    attention_make(&paged, 3, s, dtype);

    ref_layout contiguous = REF_LAYOUT_CONTIGUOUS;
    fa_tensor k = {NULL, dtype, {pages, page_size, 2, 16}, {0}}, v = k;
    v.shape[3] = 24;
    ref_buffers_tensor(&paged.buffers, "k", &k, &contiguous);
    ref_buffers_tensor(&paged.buffers, "v", &v, &contiguous);
    int32_t *table = calloc((size_t)(batch * stride), sizeof *table), seqlens[2];
    if (!table) abort();
    for (int64_t b = 0; b < batch; b++) {
        seqlens[b] = (int32_t)n_k;
        for (int64_t j = 0; j < n_k; j++) {
            int64_t entry = b * stride + j / page_size, page = pages - 1 - entry;
            table[entry] = (int32_t)page;
            for (int64_t h = 0; h < 2; h++) {
                for (int64_t c = 0; c < 16; c++)
                    ref_store(&k, page, j % page_size, h, c, ref_load(&whole.in.k, b, j, h, c));
                for (int64_t c = 0; c < 24; c++)
                    ref_store(&v, page, j % page_size, h, c, ref_load(&whole.in.v, b, j, h, c));
            }
        }
    }
    paged.in.k = k;
    paged.in.v = v;
    paged.in.options.block_table = table;
    paged.in.options.block_table_stride = stride;
    paged.in.options.seqlens_k = seqlens;
    attention_check_decode(&paged, "paged");
    CHECK(same_bits(&whole.out, &paged.out), "pages of %lld rows change bits",
          (long long)page_size);
    free(table);
    attention_free(&whole);
    attention_free(&paged);
}

int main(void)
{
    test_begin();
    check_options();
    check_lengths();
    check_groups();
    check_dims();
    check_latent();
    for (int64_t page_size = 1; page_size <= 70; page_size += page_size < 20 ? 1 : 16)
        check_pages(page_size, float_dtypes[page_size % 3]);
    return test_end();
}
