/* Every head dim, and every residue of the tiles of queries and keys. */
#include <stdio.h>

#include "attention.h"

static void check(shape s, fa_dtype dtype, bool causal)
{
    attention a;
    char what[120];
    attention_make(&a, (uint64_t)(s.n_q * 7 + s.n_k * 3 + s.d), s, dtype);
    if (causal) attention_set(&a, OPTION_CAUSAL);
    snprintf(what, sizeof what, "%s n %lldx%lld d %lld d_v %lld%s", fa_dtype_name(dtype),
             (long long)s.n_q, (long long)s.n_k, (long long)s.d, (long long)s.d_v,
             causal ? " causal" : "");
    attention_check_backward(&a, what);
    attention_free(&a);
}

int main(void)
{
    static const int64_t wide[] = {513, 543, 544, 560, 575, 576};
    static const int64_t large[] = {159, 160, 161, 191, 192, 193, 255, 256,
                                    257, 320, 383, 384, 385, 448, 511, 512};
    const int count = (int)(sizeof large / sizeof *large);
    test_begin();
    for (int64_t d = 1; d <= 140; d++)
        for (int t = 0; t < 3; t++) {
            const shape same = {1, 1, 1, 19, 37, d, d}, other = {1, 2, 1, 19, 21, d, 141 - d};
            check(same, float_dtypes[t], d % 2);
            check(other, float_dtypes[t], false);
        }
    for (int n = 0; n < count; n++)
        for (int t = 0; t < 3; t++) {
            const shape same = {1, 1, 1, 14, 35, large[n], large[n]};
            const shape other = {1, 1, 1, 14, 35, large[n], large[count - 1 - n]};
            check(same, float_dtypes[t], true);
            check(other, float_dtypes[t], false);
        }
    for (int n = 0; n < (int)(sizeof wide / sizeof *wide); n++)
        for (int t = 0; t < 3; t++) {
            const shape s = {1, 2, 1, 14, 35, wide[n], n % 2 ? 512 : 1 + wide[n] % 64};
            check(s, float_dtypes[t], n % 2);
        }
    for (int64_t n_q = 1; n_q <= 34; n_q++)
        for (int64_t n_k = 1; n_k <= 66; n_k++) {
            const shape s = {1, 1, 1, n_q, n_k, 5, 6};
            check(s, float_dtypes[(n_q + n_k) % 3], n_k % 2);
        }
    for (int64_t n = 1; n <= 300; n += 1) {
        const shape s = {1, 1, 1, n, 301 - n, 4, 4};
        check(s, float_dtypes[n % 3], n % 2);
    }
    return test_end();
}
