/* Padded, packed and paged batches: each sequence as if it were alone; rows without a sequence are
 * 0. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"

enum { BATCH = 5 };

typedef struct lengths {
    int32_t q[BATCH], k[BATCH];
} lengths;

static const lengths cases[] = {
    {{7, 33, 1, 40, 12}, {40, 12, 33, 1, 60}}, /* both ways unequal */
    {{0, 5, 0, 0, 9}, {7, 0, 0, 12, 9}},       /* empty queries, keys, both */
    {{0, 0, 0, 0, 0}, {0, 0, 0, 0, 0}},        {{1, 1, 1, 1, 1}, {1, 1, 1, 1, 1}},
    {{1, 2, 1, 3, 1}, {300, 1, 0, 513, 257}}, /* decode */
    {{192, 0, 13, 0, 65}, {64, 3, 0, 0, 256}},
};
enum { CASES = (int)(sizeof cases / sizeof *cases), ROWS_Q = 200, ROWS_K = 520 };

/* Fills rows that belong to no sequence with NaN. */
static void spoil(const fa_tensor *t, const int32_t *start, const int32_t *length, bool packed)
{
    for (int64_t a = 0; a < t->shape[0]; a++)
        for (int64_t row = 0; row < t->shape[1]; row++) {
            bool used = !packed && row < length[a];
            for (int b = 0; packed && b < BATCH; b++)
                used = used || (row >= start[b] && row < start[b] + length[b]);
            for (int64_t h = 0; h < t->shape[2] && !used; h++)
                for (int64_t c = 0; c < t->shape[3]; c++) ref_store(t, a, row, h, c, (double)NAN);
        }
}

static void spoil_all(attention *a, const int32_t *start_q, const int32_t *start_k,
                      const lengths *l, bool packed)
{
    spoil(&a->in.q, start_q, l->q, packed);
    spoil(&a->dout, start_q, l->q, packed);
    spoil(&a->in.k, start_k, l->k, packed);
    spoil(&a->in.v, start_k, l->k, packed);
}

static void check_both(attention *a, const char *what)
{
    attention_check_backward(a, what);
    attention_poison(a);
    attention_check_decode(a, what);
}

static void check_padded(const lengths *l, fa_dtype dtype, option o)
{
    const shape s = {BATCH, 4, 2, ROWS_Q, ROWS_K, 12, 16};
    attention a;
    attention_make(&a, 1, s, dtype);
    attention_set(&a, o);
    a.in.options.seqlens_q = l->q;
    a.in.options.seqlens_k = l->k;
    spoil_all(&a, NULL, NULL, l, false);
    check_both(&a, "padded");
    attention_free(&a);
}

/* gap: rows between the sequences that seqlens leaves out. */
static void check_packed(const lengths *l, fa_dtype dtype, option o, int32_t first, int32_t gap)
{
    int32_t cu_q[BATCH + 1] = {first}, cu_k[BATCH + 1] = {first};
    for (int b = 0; b < BATCH; b++) {
        cu_q[b + 1] = cu_q[b] + l->q[b] + gap;
        cu_k[b + 1] = cu_k[b] + l->k[b] + gap;
    }
    const shape s = {1, 4, 2, cu_q[BATCH] + 3, cu_k[BATCH] + 3, 12, 16};
    attention a;
    attention_make(&a, 2, s, dtype);
    attention_set(&a, o);
    a.in.options.num_sequences = BATCH;
    a.in.options.cu_seqlens_q = cu_q;
    a.in.options.cu_seqlens_k = cu_k;
    if (gap) a.in.options.seqlens_q = l->q;
    if (gap) a.in.options.seqlens_k = l->k;
    spoil_all(&a, cu_q, cu_k, l, true);
    check_both(&a, "packed");
    attention_free(&a);
}

static void check_paged(const lengths *l, fa_dtype dtype, option o, int64_t page_size)
{
    const int64_t stride = (ROWS_K + page_size - 1) / page_size, pages = BATCH * stride;
    int32_t *table = malloc((size_t)(BATCH * stride) * sizeof *table);
    if (!table) abort();
    for (int64_t n = 0; n < BATCH * stride; n++) {
        bool used = n % stride * page_size < l->k[n / stride];
        /* Entries after `used` are never read. */
        table[n] = used ? (int32_t)(pages - 1 - n) : INT32_MAX;
    }
    shape s = {BATCH, 4, 2, ROWS_Q, page_size, 12, 16};
    attention a, store;
    attention_make(&a, 3, s, dtype);
    s.batch = pages;
    s.n_q = 1;
    attention_make(&store, 4, s, dtype);
    attention_set(&a, o);
    a.in.k = store.in.k;
    a.in.v = store.in.v;
    a.dk = store.dk;
    a.dv = store.dv;
    a.in.options.block_table = table;
    a.in.options.block_table_stride = stride;
    a.in.options.seqlens_q = l->q;
    a.in.options.seqlens_k = l->k;
    for (int64_t n = 0; n < BATCH * stride; n++) {
        int64_t rest = l->k[n / stride] - n % stride * page_size;
        int32_t length = (int32_t)(rest < 0 ? 0 : rest < page_size ? rest : page_size);
        fa_tensor page = a.in.k, value_page = a.in.v;
        page.shape[0] = value_page.shape[0] = 1;
        page.data =
            (char *)page.data + (pages - 1 - n) * page.stride[0] * (int64_t)fa_dtype_size(dtype);
        value_page.data = (char *)value_page.data +
                          (pages - 1 - n) * value_page.stride[0] * (int64_t)fa_dtype_size(dtype);
        spoil(&page, NULL, &length, false);
        spoil(&value_page, NULL, &length, false);
    }
    spoil(&a.in.q, NULL, l->q, false);
    spoil(&a.dout, NULL, l->q, false);
    check_both(&a, "paged");
    attention_free(&a);
    attention_free(&store);
    free(table);
}

int main(void)
{
    static const option options[] = {OPTION_CAUSAL, OPTION_SCALE, OPTION_WINDOW,
                                     OPTION_SINKS,  OPTION_ALIBI, OPTION_DROPOUT};
    test_begin();
    for (int c = 0; c < CASES; c++)
        for (int o = 0; o < 6; o++) {
            fa_dtype dtype = float_dtypes[(c + o) % 3];
            check_padded(&cases[c], dtype, options[o]);
            check_packed(&cases[c], dtype, options[o], 0, 0);
            check_packed(&cases[c], dtype, options[o], 4, 2);
            check_paged(&cases[c], dtype, options[o], 1 + 7 * o);
        }
    return test_end();
}
