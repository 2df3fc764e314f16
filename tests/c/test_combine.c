/* Forward over any split of the keys, then combine, equals forward over the whole. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"

enum { MAX_PARTS = 6 };

/* Attention of a's queries over keys [from, to) only, with the same diagonal as in the whole. */
static void run_part(attention *a, int64_t from, int64_t to, fa_tensor *out, float *lse,
                     bool with_sinks)
{
    ref_inputs in = a->in;
    fa_tensor bias, mask;
    in.k.data = (float *)in.k.data + from * in.k.stride[1];
    in.v.data = (float *)in.v.data + from * in.v.stride[1];
    in.k.shape[1] = in.v.shape[1] = to - from;
    in.options.flags |= FA_DIAGONAL;
    in.options.diagonal = a->s.n_k - a->s.n_q - from;
    if (!with_sinks) in.options.sinks = NULL;
    if (in.options.bias) {
        bias = *in.options.bias;
        bias.data = (float *)bias.data + from * bias.stride[3];
        bias.shape[3] = to - from;
        in.options.bias = &bias;
    }
    if (in.options.mask) {
        mask = *in.options.mask;
        mask.data = (char *)mask.data + from * mask.stride[3];
        mask.shape[3] = to - from;
        in.options.mask = &mask;
    }
    fa_status status = fa_forward(&in.q, &in.k, &in.v, out, lse, &in.options);
    CHECK(status == FA_OK, "part [%lld, %lld): %s", (long long)from, (long long)to,
          fa_last_error());
}

static void check_split(shape s, int64_t num_parts, option o, bool causal, uint64_t seed)
{
    attention a;
    fa_tensor parts[MAX_PARTS];
    float *lse[MAX_PARTS];
    int64_t cuts[MAX_PARTS + 1] = {0};
    const int64_t count = s.batch * s.n_q * s.heads_q;
    attention_make(&a, seed, s, FA_FLOAT32);
    if (o < NUM_OPTIONS) attention_set(&a, o);
    if (causal) attention_set(&a, OPTION_CAUSAL);
    for (int64_t n = 1; n < num_parts; n++) /* in any order: some parts are empty */
        cuts[n] = ref_random_between(&a.random, cuts[n - 1], n % 3 ? s.n_k : cuts[n - 1]);
    cuts[num_parts] = s.n_k;
    ref_array out, want_lse;
    ref_forward(&a.in, &out, &want_lse);
    for (int64_t n = 0; n < num_parts; n++) {
        parts[n] = a.out;
        parts[n].data = malloc((size_t)(count * s.d_v + 1) * sizeof(float));
        lse[n] = malloc((size_t)(count + 1) * sizeof(float));
        if (!parts[n].data || !lse[n]) abort();
        run_part(&a, cuts[n], cuts[n + 1], &parts[n], lse[n], n == num_parts - 1);
    }
    fa_status status = fa_combine(parts, (const float *const *)lse, num_parts, &a.out, a.lse, NULL);
    CHECK(status == FA_OK, "fa_combine: %s", fa_last_error());
    ref_report report = REF_REPORT_INIT;
    ref_check_tensor(&report, "out", &a.out, &out);
    ref_check_floats(&report, "lse", a.lse, &want_lse);
    ref_buffers_check(&a.buffers, &report);
    CHECK(report.ok, "%lld parts, option %d: %s", (long long)num_parts, (int)o, report.message);
    for (int64_t n = 0; n < num_parts; n++) {
        free(parts[n].data);
        free(lse[n]);
    }
    ref_array_free(&out);
    ref_array_free(&want_lse);
    attention_free(&a);
}

/* Merging no parts, or empty parts, gives an empty result; NaN in an empty part is not read. */
static void check_empty(void)
{
    float values[2][3] = {{NAN, NAN, NAN}, {NAN, NAN, NAN}}, none[1] = {-INFINITY}, out[3], lse;
    fa_tensor parts[2] = {fa_bshd(values[0], FA_FLOAT32, 1, 1, 1, 3),
                          fa_bshd(values[1], FA_FLOAT32, 1, 1, 1, 3)};
    const float *part_lse[2] = {none, none};
    fa_tensor result = fa_bshd(out, FA_FLOAT32, 1, 1, 1, 3);
    for (int64_t count = 0; count <= 2; count++) {
        out[0] = out[1] = out[2] = lse = NAN;
        CHECK(fa_combine(parts, part_lse, count, &result, &lse, NULL) == FA_OK, "%s",
              fa_last_error());
        CHECK(out[0] == 0 && out[1] == 0 && out[2] == 0, "%lld empty parts: out %g",
              (long long)count, (double)out[0]);
        CHECK(lse == -INFINITY, "%lld empty parts: lse %g", (long long)count, (double)lse);
    }
}

/* Log-sum-exps far outside the range of exp. */
static void check_large(void)
{
    float a = 1, b = 3, out, lse, low = 30000, high = 30001;
    fa_tensor parts[2] = {fa_bshd(&a, FA_FLOAT32, 1, 1, 1, 1), fa_bshd(&b, FA_FLOAT32, 1, 1, 1, 1)};
    const float *part_lse[2] = {&low, &high};
    fa_tensor result = fa_bshd(&out, FA_FLOAT32, 1, 1, 1, 1);
    CHECK(fa_combine(parts, part_lse, 2, &result, &lse, NULL) == FA_OK, "%s", fa_last_error());
    double w = 1 / (1 + exp(-1.0));
    CHECK(fabs((double)out - (1 - w + 3 * w)) < 1e-6, "out %g", (double)out);
    CHECK(fabs((double)lse - (30001 + log1p(exp(-1.0)))) < 0.01, "lse %g", (double)lse);
}

/* Log-sum-exps in the order (query, batch, head), and one for all heads: the same bits as
 * contiguous. */
static void check_strides(void)
{
    enum { B = 2, H = 3, N = 4, D = 5, PARTS = 40, COUNT = B * H * N };
    static float values[PARTS][COUNT * D], lse[PARTS][COUNT], other[PARTS][COUNT];
    static float want[COUNT * D], got[COUNT * D], want_lse[COUNT], got_lse[COUNT];
    static int64_t strides[PARTS][3];
    fa_tensor parts[PARTS];
    const float *dense[PARTS], *strided[PARTS];
    ref_random random = {3};
    for (int p = 0; p < PARTS; p++) {
        const bool shared = p % 3 == 0;
        strides[p][0] = shared ? 1 : H, strides[p][1] = shared ? 0 : 1;
        strides[p][2] = shared ? B : H * B;
        for (int i = 0; i < COUNT * D; i++) values[p][i] = (float)ref_random_normal(&random);
        for (int i = 0; i < COUNT; i++) other[p][i] = (float)ref_random_normal(&random);
        for (int i = 0; i < COUNT; i++)
            lse[p][i] = other[p][i / N / H * strides[p][0] + i / N % H * strides[p][1] +
                                 i % N * strides[p][2]];
        parts[p] = fa_bshd(values[p], FA_FLOAT32, B, N, H, D);
        dense[p] = lse[p], strided[p] = other[p];
    }
    const fa_tensor to = fa_bshd(want, FA_FLOAT32, B, N, H, D);
    const fa_tensor to_other = fa_bshd(got, FA_FLOAT32, B, N, H, D);
    fa_options o = FA_OPTIONS_INIT;
    CHECK(fa_combine(parts, dense, PARTS, &to, want_lse, &o) == FA_OK, "%s", fa_last_error());
    o.part_lse_stride = strides[0];
    CHECK(fa_combine(parts, strided, PARTS, &to_other, got_lse, &o) == FA_OK, "%s",
          fa_last_error());
    CHECK(memcmp(want, got, sizeof got) == 0 && memcmp(want_lse, got_lse, sizeof got_lse) == 0,
          "strided log-sum-exps give another result");
}

int main(void)
{
    test_begin();
    check_strides();
    static const shape shapes[] = {{2, 4, 2, 5, 300, 16, 24},
                                   {1, 2, 1, 70, 90, 8, 8},
                                   {1, 1, 1, 20, 9, 64, 33},
                                   {2, 2, 2, 3, 0, 8, 8}};
    for (int n = 0; n < 4; n++)
        for (int64_t parts = 1; parts <= MAX_PARTS; parts++)
            for (int o = 0; o <= NUM_OPTIONS; o++) {
                /* Dropout counts keys from a sequence's start, so a part has other bits. */
                if (o == OPTION_DROPOUT || o == OPTION_DIAGONAL) continue;
                check_split(shapes[n], parts, (option)o, o % 2, (uint64_t)(parts * 100 + o));
            }
    check_empty();
    check_large();
    return test_end();
}
