/*
 * Attention of 3 queries over 3 keys, causal, against an installed flashattn.
 *
 *     cc attention.c $(pkg-config --cflags --libs flashattn) -o attention
 *
 * Prints
 *     query 0: 1.000 2.000
 *     query 1: 2.000 3.000
 *     query 2: 3.000 4.000
 * because all queries are 0, so that each one averages the values that it sees.
 */
#include <flashattn.h>
#include <stdio.h>

enum { BATCH = 1, N = 3, HEADS = 1, DIM = 2 };

int main(void)
{
    float queries[N * DIM] = {0};
    float keys[N * DIM] = {1, 0, 0, 1, 1, 1};
    float values[N * DIM] = {1, 2, 3, 4, 5, 6};
    float result[N * DIM];

    fa_tensor q = fa_bshd(queries, FA_FLOAT32, BATCH, N, HEADS, DIM);
    fa_tensor k = fa_bshd(keys, FA_FLOAT32, BATCH, N, HEADS, DIM);
    fa_tensor v = fa_bshd(values, FA_FLOAT32, BATCH, N, HEADS, DIM);
    fa_tensor out = fa_bshd(result, FA_FLOAT32, BATCH, N, HEADS, DIM);
    fa_options options = FA_OPTIONS_INIT;
    options.flags = FA_CAUSAL;

    if (fa_forward(&q, &k, &v, &out, NULL, &options) != FA_OK) {
        fprintf(stderr, "attention: %s\n", fa_last_error());
        return 1;
    }
    for (int i = 0; i < N; i++)
        printf("query %d: %.3f %.3f\n", i, (double)result[i * DIM], (double)result[i * DIM + 1]);
    return 0;
}
