/* A batch item's bits do not depend on the other items of the batch, nor on how the batch is
 * stored. */
#include <math.h>
#include <string.h>

#include "attention.h"

enum { BATCH = 4 };

/* Item b of a tensor as a batch of one. */
static fa_tensor item_of(const fa_tensor *t, int64_t b)
{
    fa_tensor item = *t;
    item.data = (char *)t->data + b * t->stride[0] * (int64_t)fa_dtype_size(t->dtype);
    item.shape[0] = 1;
    return item;
}

/* Runs item b alone and compares it with the batch. */
static void check_item(attention *batch, int64_t b, bool backward)
{
    attention alone;
    shape s = batch->s;
    s.batch = 1;
    attention_make(&alone, 1, s, batch->in.q.dtype);
    alone.in.q = item_of(&batch->in.q, b);
    alone.in.k = item_of(&batch->in.k, b);
    alone.in.v = item_of(&batch->in.v, b);
    alone.dout = item_of(&batch->dout, b);
    alone.in.options = batch->in.options;
    const bool done =
        attention_forward(&alone, "alone") && (!backward || attention_backward(&alone, "alone"));
    const fa_tensor out = item_of(&batch->out, b), dq = item_of(&batch->dq, b);
    const fa_tensor dk = item_of(&batch->dk, b), dv = item_of(&batch->dv, b);
    int64_t count = s.heads_q * s.n_q;
    if (!done) return;
    CHECK(same_bits(&alone.out, &out), "item %lld: out differs", (long long)b);
    CHECK(memcmp(alone.lse, batch->lse + b * count, (size_t)count * sizeof(float)) == 0,
          "item %lld: lse differs", (long long)b);
    if (!backward) {
        attention_free(&alone);
        return;
    }
    CHECK(same_bits(&alone.dq, &dq), "item %lld: dq differs", (long long)b);
    CHECK(same_bits(&alone.dk, &dk), "item %lld: dk differs", (long long)b);
    CHECK(same_bits(&alone.dv, &dv), "item %lld: dv differs", (long long)b);
    attention_free(&alone);
}

static void check_batch(shape s, fa_dtype dtype, bool causal)
{
    attention a;
    attention_make(&a, 9, s, dtype);
    a.in.options.flags = FA_BATCH_INVARIANT | (causal ? FA_CAUSAL : 0u);
    if (attention_forward(&a, "batch") && attention_backward(&a, "batch"))
        for (int64_t b = 0; b < s.batch; b++) check_item(&a, b, true);
    attention_free(&a);
}

/* The items of a padded batch, packed. */
static void check_packed(fa_dtype dtype, bool decode)
{
    const int32_t length[BATCH] = {decode ? 1 : 90, decode ? 2 : 13, 1, decode ? 3 : 70};
    int32_t cu_q[BATCH + 1] = {0}, cu_k[BATCH + 1] = {0}, length_k[BATCH];
    for (int b = 0; b < BATCH; b++) {
        length_k[b] = decode ? 400 * b + 31 : length[b] + 5;
        cu_q[b + 1] = cu_q[b] + length[b];
        cu_k[b + 1] = cu_k[b] + length_k[b];
    }
    const shape padded = {BATCH, 4, 2, 90, 1300, 16, 24},
                packed = {1, 4, 2, cu_q[BATCH], cu_k[BATCH], 16, 24};
    attention a, p;
    attention_make(&a, 10, padded, dtype);
    attention_make(&p, 11, packed, dtype);
    for (int b = 0; b < BATCH; b++)
        for (int64_t j = 0; j < length_k[b]; j++) {
            int64_t i = j < length[b] ? j : 0;
            for (int64_t c = 0; c < 24; c++)
                for (int64_t h = 0; h < 4; h++) {
                    if (c < 16)
                        ref_store(&a.in.q, b, i, h, c, ref_load(&p.in.q, 0, cu_q[b] + i, h, c));
                    if (h < 2 && c < 16)
                        ref_store(&a.in.k, b, j, h, c, ref_load(&p.in.k, 0, cu_k[b] + j, h, c));
                    if (h < 2)
                        ref_store(&a.in.v, b, j, h, c, ref_load(&p.in.v, 0, cu_k[b] + j, h, c));
                }
        }
    a.in.options.seqlens_q = length;
    a.in.options.seqlens_k = length_k;
    p.in.options.num_sequences = BATCH;
    p.in.options.cu_seqlens_q = cu_q;
    p.in.options.cu_seqlens_k = cu_k;
    if (attention_forward(&a, "padded") && attention_forward(&p, "packed"))
        for (int b = 0; b < BATCH; b++)
            for (int64_t i = 0; i < length[b]; i++) {
                fa_tensor x = item_of(&a.out, b), y = p.out;
                int64_t size = (int64_t)fa_dtype_size(dtype);
                x.data = (char *)x.data + i * x.stride[1] * size;
                y.data = (char *)y.data + (cu_q[b] + i) * y.stride[1] * size;
                x.shape[1] = y.shape[1] = 1;
                CHECK(same_bits(&x, &y), "sequence %d query %lld: packed and padded differ", b,
                      (long long)i);
            }
    attention_free(&a);
    attention_free(&p);
}

/* Decode computes adjacent heads together, as many as leave enough tasks for the batch. A value
 * that is not finite and is hidden from one head must not change how the others are summed. */
static void check_hidden_value(fa_dtype dtype)
{
    enum { HEADS = 3, KEYS = 12, HIDDEN = 4, COLUMNS = 64 };
    static uint8_t seen[HEADS][KEYS];
    memset(seen, 1, sizeof seen);
    seen[1][HIDDEN] = 0;
    const fa_tensor mask = {seen, FA_BOOL, {1, HEADS, 1, KEYS}, {0, KEYS, 0, 1}};
    const shape s = {BATCH, HEADS, HEADS, 1, KEYS, 32, COLUMNS};
    attention a;
    attention_make(&a, 12, s, dtype);
    for (int64_t b = 0; b < BATCH; b++)
        for (int64_t c = 0; c < COLUMNS; c++) ref_store(&a.in.v, b, HIDDEN, 1, c, NAN);
    a.in.options.mask = &mask;
    a.in.options.flags = FA_BATCH_INVARIANT;
    a.in.options.threads = 1;
    if (attention_forward(&a, "batch"))
        for (int64_t b = 0; b < BATCH; b++) check_item(&a, b, false);
    attention_free(&a);
}

int main(void)
{
    static const shape shapes[] = {{BATCH, 4, 2, 100, 130, 24, 24},
                                   {BATCH, 8, 2, 1, 1100, 32, 32},
                                   {BATCH, 2, 2, 300, 40, 8, 16}};
    test_begin();
    for (int n = 0; n < 3; n++)
        for (int t = 0; t < 3; t++)
            for (int causal = 0; causal < 2; causal++)
                check_batch(shapes[n], float_dtypes[t], causal);
    for (int t = 0; t < 3; t++)
        for (int decode = 0; decode < 2; decode++) check_packed(float_dtypes[t], decode);
    for (int t = 0; t < 3; t++) check_hidden_value(float_dtypes[t]);
    return test_end();
}
