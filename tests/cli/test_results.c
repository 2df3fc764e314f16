/* `flashattn run` and `flashattn grad` against float64, for every option and format. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "convert.h"
#include "harness.h"
#include "reference.h"

enum { B = 2, NQ = 5, NK = 7, HQ = 4, HKV = 2, D = 8, DV = 3 };
enum { Q_COUNT = B * NQ * HQ * D, K_COUNT = B * NK * HKV * D, V_COUNT = B * NK * HKV * DV };
enum { OUT_COUNT = B * NQ * HQ * DV, LSE_COUNT = B * HQ * NQ, BIAS_COUNT = HQ * NQ * NK };

static float q[Q_COUNT], k[K_COUNT], v[V_COUNT], dout[OUT_COUNT], bias[BIAS_COUNT];
static float alibi[B * HQ], sinks[HQ];
static unsigned char mask[B * NQ * NK];

static fa_tensor q_tensor, k_tensor, v_tensor;

static void write_inputs(void)
{
    harness_fill(q, Q_COUNT, 2, 1);
    harness_fill(k, K_COUNT, 2, 2);
    harness_fill(v, V_COUNT, 2, 3);
    harness_fill(dout, OUT_COUNT, 1, 4);
    harness_fill(bias, BIAS_COUNT, 1, 5);
    harness_fill(alibi, B * HQ, 0.5f, 6);
    harness_fill(sinks, HQ, 1, 7);
    for (int i = 0; i < B * NQ * NK; i++) mask[i] = i % 3 != 0;
    harness_write_npy("q.npy", "<f4", "(2, 5, 4, 8)", q, sizeof q);
    harness_write_npy("k.npy", "<f4", "(2, 7, 2, 8)", k, sizeof k);
    harness_write_npy("v.npy", "<f4", "(2, 7, 2, 3)", v, sizeof v);
    harness_write_npy("dout.npy", "<f4", "(2, 5, 4, 3)", dout, sizeof dout);
    harness_write_npy("bias.npy", "<f4", "(4, 5, 7)", bias, sizeof bias);
    harness_write_npy("alibi.npy", "<f4", "(2, 4)", alibi, sizeof alibi);
    harness_write_npy("sinks.npy", "<f4", "(4,)", sinks, sizeof sinks);
    harness_write_npy("mask.npy", "|b1", "(2, 1, 5, 7)", mask, sizeof mask);
    q_tensor = fa_bshd(q, FA_FLOAT32, B, NQ, HQ, D);
    k_tensor = fa_bshd(k, FA_FLOAT32, B, NK, HKV, D);
    v_tensor = fa_bshd(v, FA_FLOAT32, B, NK, HKV, DV);
}

/* The device that the command chooses by itself; determined once. */
static fa_device device;

static void find_device(void)
{
    const outcome *o = EXPECT_FINE("info", "--json");
    const char *cuda = "\"dtype\": \"float32\", \"device\": \"cuda\", \"supported\": true";
    device = strstr(o->out, cuda) ? FA_DEVICE_CUDA : FA_DEVICE_CPU;
}

static ref_inputs inputs(void)
{
    ref_inputs in = {.q = q_tensor, .k = k_tensor, .v = v_tensor};
    in.options.device = device;
    return in;
}

/* Compares o.npy and l.npy, whose shapes are given, with the reference. */
static void check_forward(const char *what, const ref_inputs *given, fa_tensor out,
                          const char *type, const char *out_shape, const char *lse_shape)
{
    ref_inputs in = *given;
    ref_array want, want_lse;
    ref_report report = REF_REPORT_INIT;
    int64_t rows = out.shape[0] * out.shape[1] * out.shape[2];
    in.rounding = ref_rounding_for(&in, out.dtype, true);
    ref_forward(&in, &want, &want_lse);
    out.data = harness_read_npy("o.npy", type, out_shape,
                                (size_t)(rows * out.shape[3]) * fa_dtype_size(out.dtype));
    float *lse = harness_read_npy("l.npy", "<f4", lse_shape, (size_t)rows * sizeof *lse);
    if (out.data && lse) {
        ref_check_tensor(&report, "out", &out, &want);
        ref_check_floats(&report, "lse", lse, &want_lse);
    }
    CHECK(report.ok && out.data && lse, "%s: %s", what, report.message);
    free(out.data);
    free(lse);
    ref_array_free(&want);
    ref_array_free(&want_lse);
    remove("o.npy");
    remove("l.npy");
}

#define FILES "--q", "q.npy", "--k", "k.npy", "--v", "v.npy"
#define OUTPUTS "--out", "o.npy", "--lse", "l.npy"

static void check_usual(const char *what, const ref_inputs *in)
{
    check_forward(what, in, fa_bshd(NULL, FA_FLOAT32, B, NQ, HQ, DV), "<f4", "(2, 5, 4, 3)",
                  "(2, 4, 5)");
}

/* ---- options, one by one --------------------------------------------------------------------- */

static void test_options(void)
{
    ref_inputs in = inputs();
    EXPECT_FINE("run", FILES, OUTPUTS);
    check_usual("no option", &in);

    in.options.flags = FA_CAUSAL;
    EXPECT_FINE("run", FILES, OUTPUTS, "--causal");
    check_usual("--causal", &in);

    in.options.flags = FA_CAUSAL | FA_DIAGONAL;
    in.options.diagonal = -2;
    EXPECT_FINE("run", FILES, OUTPUTS, "--causal", "--diagonal", "-2");
    check_usual("--diagonal", &in);

    in = inputs();
    in.options.flags = FA_WINDOW;
    in.options.window_left = 2;
    in.options.window_right = -1;
    EXPECT_FINE("run", FILES, OUTPUTS, "--window=2,-1");
    check_usual("--window", &in);

    in = inputs();
    in.options.flags = FA_SCALE;
    EXPECT_FINE("run", FILES, OUTPUTS, "--scale", "0");
    check_usual("--scale 0", &in);

    in = inputs();
    in.options.scale = 0.75f;
    in.options.softcap = 1.5f;
    EXPECT_FINE("run", FILES, OUTPUTS, "--scale", "0.75", "--softcap", "1.5");
    check_usual("--softcap", &in);

    in = inputs();
    in.options.alibi_slopes = alibi;
    in.options.alibi_batch_stride = HQ;
    EXPECT_FINE("run", FILES, OUTPUTS, "--alibi", "alibi.npy");
    check_usual("--alibi", &in);

    in = inputs();
    in.options.sinks = sinks;
    EXPECT_FINE("run", FILES, OUTPUTS, "--sinks", "sinks.npy");
    check_usual("--sinks", &in);

    in = inputs();
    in.options.dropout_p = 0.25f;
    in.options.dropout_seed = 0x123456789abcdefu;
    EXPECT_FINE("run", FILES, OUTPUTS, "--dropout", "0.25", "--seed", "0x123456789abcdef");
    check_usual("--dropout", &in);

    in = inputs();
    fa_tensor m = fa_bshd(mask, FA_BOOL, B, 1, NQ, NK),
              b = fa_bshd(bias, FA_FLOAT32, 1, HQ, NQ, NK);
    in.options.mask = &m;
    in.options.bias = &b;
    EXPECT_FINE("run", FILES, OUTPUTS, "--mask", "mask.npy", "--bias", "bias.npy", "--threads", "1",
                "--device", "cpu");
    check_usual("--mask and --bias", &in);
}

/* Integer masks: any value but 0 is true. */
static void test_integer_masks(void)
{
    int32_t mask4[B * NQ * NK];
    int64_t mask8[B * NQ * NK];
    ref_inputs in = inputs();
    fa_tensor m = fa_bshd(mask, FA_BOOL, B, 1, NQ, NK);
    in.options.mask = &m;
    for (int i = 0; i < B * NQ * NK; i++) {
        mask4[i] = mask[i] ? 256 : 0;
        mask8[i] = mask[i] ? INT64_MIN : 0;
    }
    harness_write_npy("mask4.npy", "<i4", "(2, 1, 5, 7)", mask4, sizeof mask4);
    harness_write_npy("mask8.npy", "<i8", "(2, 1, 5, 7)", mask8, sizeof mask8);
    harness_write_npy("mask1.npy", "|u1", "(2, 1, 5, 7)", mask, sizeof mask);
    static const char *const NAMES[] = {"mask1.npy", "mask4.npy", "mask8.npy"};
    for (int i = 0; i < 3; i++) {
        EXPECT_FINE("run", FILES, OUTPUTS, "--mask", NAMES[i]);
        check_usual(NAMES[i], &in);
    }
}

/* ---- axes, layouts, formats ------------------------------------------------------------------ */

/* One batch item in 3 axes, one head of it in 2. */
static void test_axes(void)
{
    ref_inputs in = inputs();
    harness_write_npy("q3.npy", "<f4", "(5, 4, 8)", q, sizeof q / B);
    harness_write_npy("k3.npy", "<f4", "(7, 2, 8)", k, sizeof k / B);
    harness_write_npy("v3.npy", "<f4", "(7, 2, 3)", v, sizeof v / B);
    in.q.shape[0] = in.k.shape[0] = in.v.shape[0] = 1;
    EXPECT_FINE("run", "--q", "q3.npy", "--k", "k3.npy", "--v", "v3.npy", OUTPUTS);
    check_forward("3 axes", &in, fa_bshd(NULL, FA_FLOAT32, 1, NQ, HQ, DV), "<f4", "(5, 4, 3)",
                  "(4, 5)");

    static const char *const LAYOUTS[] = {"bshd", "bhsd"};
    in.q = fa_bshd(q, FA_FLOAT32, 1, 5, 1, 8);
    in.k = fa_bshd(k, FA_FLOAT32, 1, 7, 1, 8);
    in.v = fa_bshd(v, FA_FLOAT32, 1, 7, 1, 3);
    fa_tensor m = fa_bshd(mask, FA_BOOL, 1, 1, NQ, NK);
    in.options.mask = &m;
    harness_write_npy("q2.npy", "<f4", "(5, 8)", q, sizeof(float) * 5 * 8);
    harness_write_npy("k2.npy", "<f4", "(7, 8)", k, sizeof(float) * 7 * 8);
    harness_write_npy("v2.npy", "<f4", "(7, 3)", v, sizeof(float) * 7 * 3);
    harness_write_npy("m2.npy", "|b1", "(5, 7)", mask, NQ * NK);
    for (int i = 0; i < 2; i++) {
        EXPECT_FINE("run", "--q", "q2.npy", "--k", "k2.npy", "--v", "v2.npy", OUTPUTS, "--mask",
                    "m2.npy", "--layout", LAYOUTS[i]);
        check_forward("2 axes", &in, fa_bshd(NULL, FA_FLOAT32, 1, 5, 1, 3), "<f4", "(5, 3)",
                      "(5,)");
    }
}

/* The same numbers read as (batch, heads, sequence, dim): 5 heads of 4 queries. */
static void test_layout(void)
{
    ref_inputs in = inputs();
    in.q = fa_bhsd(q, FA_FLOAT32, B, 4, 5, D);
    in.k = fa_bhsd(k, FA_FLOAT32, B, 14, 1, D);
    in.v = fa_bhsd(v, FA_FLOAT32, B, 14, 1, DV);
    harness_write_npy("kb.npy", "<f4", "(2, 1, 14, 8)", k, sizeof k);
    harness_write_npy("vb.npy", "<f4", "(2, 1, 14, 3)", v, sizeof v);
    EXPECT_FINE("run", "--q", "q.npy", "--k", "kb.npy", "--v", "vb.npy", OUTPUTS, "--layout",
                "bhsd");
    check_forward("bhsd", &in, fa_bhsd(NULL, FA_FLOAT32, B, 4, 5, DV), "<f4", "(2, 5, 4, 3)",
                  "(2, 5, 4)");
}

/* Element i of a C-ordered array of this shape in Fortran order. */
static int64_t fortran_index(int64_t i, const int64_t shape[4])
{
    int64_t index[4];
    for (int a = 3; a >= 0; a--) {
        index[a] = i % shape[a];
        i /= shape[a];
    }
    return index[0] + shape[0] * (index[1] + shape[1] * (index[2] + shape[2] * index[3]));
}

/* Version 2 and 3, float64, big endian, Fortran order, spaces and double quotes: same numbers. */
static void test_formats(void)
{
    const int64_t shape[4] = {B, NQ, HQ, D};
    unsigned char wide[8 * Q_COUNT];
    ref_inputs in = inputs();
    for (int i = 0; i < Q_COUNT; i++) {
        double x = (double)q[i];
        uint64_t bits;
        memcpy(&bits, &x, 8);
        int64_t at = 8 * fortran_index(i, shape);
        for (int byte = 0; byte < 8; byte++)
            wide[at + byte] = (unsigned char)(bits >> (56 - 8 * byte));
    }
    harness_write_npy_parts("qf.npy", 3,
                            "{\"shape\" : (2,5,4,8,) ,\n\t\"fortran_order\":True,'descr':'>f8'}",
                            wide, sizeof wide);
    harness_write_npy_parts("k2v.npy", 2,
                            "{'descr': '=f4', 'fortran_order': False, 'shape': (2, 7, 2, 8)}\n", k,
                            sizeof k);
    EXPECT_FINE("run", "--q", "qf.npy", "--k", "k2v.npy", "--v", "v.npy", OUTPUTS);
    check_usual("big endian, Fortran order", &in);
}

/* ---- dtypes ---------------------------------------------------------------------------------- */

static uint16_t q16[Q_COUNT], k16[K_COUNT], v16[V_COUNT];

static ref_inputs narrow_inputs(fa_dtype dtype)
{
    ref_inputs in = inputs();
    bool half = dtype == FA_FLOAT16;
    for (int i = 0; i < Q_COUNT; i++)
        q16[i] = half ? fa_float_to_half(q[i]) : fa_float_to_bfloat(q[i]);
    for (int i = 0; i < K_COUNT; i++)
        k16[i] = half ? fa_float_to_half(k[i]) : fa_float_to_bfloat(k[i]);
    for (int i = 0; i < V_COUNT; i++)
        v16[i] = half ? fa_float_to_half(v[i]) : fa_float_to_bfloat(v[i]);
    in.q.data = q16, in.k.data = k16, in.v.data = v16;
    in.q.dtype = in.k.dtype = in.v.dtype = dtype;
    return in;
}

static void test_float16(void)
{
    ref_inputs in = narrow_inputs(FA_FLOAT16);
    fa_tensor out = fa_bshd(NULL, FA_FLOAT16, B, NQ, HQ, DV);
    harness_write_npy("qh.npy", "<f2", "(2, 5, 4, 8)", q16, sizeof q16);
    harness_write_npy("kh.npy", "<f2", "(2, 7, 2, 8)", k16, sizeof k16);
    harness_write_npy("vh.npy", "<f2", "(2, 7, 2, 3)", v16, sizeof v16);
    EXPECT_FINE("run", "--q", "qh.npy", "--k", "kh.npy", "--v", "vh.npy", OUTPUTS);
    check_forward("float16 files", &in, out, "<f2", "(2, 5, 4, 3)", "(2, 4, 5)");
    EXPECT_FINE("run", FILES, OUTPUTS, "--dtype", "f16");
    check_forward("--dtype f16", &in, out, "<f2", "(2, 5, 4, 3)", "(2, 4, 5)");

    /* One float32 file among them: everything is computed in float32. */
    ref_inputs mixed = inputs();
    mixed.q = in.q;
    EXPECT_FINE("run", "--q", "qh.npy", "--k", "k.npy", "--v", "v.npy", OUTPUTS);
    check_usual("mixed", &mixed);
}

/* o.npy holds float32, each a bfloat16. */
static void check_bfloat16(const char *what, const ref_inputs *given)
{
    ref_inputs in = *given;
    uint32_t *bits = harness_read_npy("o.npy", "<f4", "(2, 5, 4, 3)", sizeof(float) * OUT_COUNT);
    uint16_t narrow[OUT_COUNT];
    ref_array want, want_lse;
    ref_report report = REF_REPORT_INIT;
    in.rounding = ref_rounding_for(&in, FA_BFLOAT16, true);
    ref_forward(&in, &want, &want_lse);
    for (int i = 0; bits && i < OUT_COUNT; i++) {
        if (bits[i] & 0xffffu) ref_fail(&report, "element %d is no bfloat16", i);
        narrow[i] = (uint16_t)(bits[i] >> 16);
    }
    fa_tensor out = fa_bshd(narrow, FA_BFLOAT16, B, NQ, HQ, DV);
    if (bits) ref_check_tensor(&report, "out", &out, &want);
    CHECK(bits && report.ok, "%s: %s", what, report.message);
    free(bits);
    ref_array_free(&want);
    ref_array_free(&want_lse);
    remove("o.npy");
}

/* Files of ml_dtypes' bfloat16: as numpy.save writes it ('<V2'), as it writes it again after
 * reading that ('|V2'), in the other byte order, and under other names. */
static void test_bfloat16(void)
{
    static const char *const types[] = {"<V2", "|V2", "=V2", "bfloat16", ">V2"};
    ref_inputs in = narrow_inputs(FA_BFLOAT16);
    EXPECT_FINE("run", FILES, OUTPUTS, "--dtype", "bf16");
    check_bfloat16("--dtype bf16", &in);
    harness_write_npy("kb.npy", "<V2", "(2, 7, 2, 8)", k16, sizeof k16);
    harness_write_npy("vb.npy", "<V2", "(2, 7, 2, 3)", v16, sizeof v16);
    for (int t = 0; t < 5; t++) {
        uint16_t bytes[Q_COUNT];
        memcpy(bytes, q16, sizeof bytes);
        for (int i = 0; t == 4 && i < Q_COUNT; i++)
            bytes[i] = (uint16_t)(q16[i] << 8 | q16[i] >> 8);
        harness_write_npy("qb.npy", types[t], "(2, 5, 4, 8)", bytes, sizeof bytes);
        EXPECT_FINE("run", "--q", "qb.npy", "--k", "kb.npy", "--v", "vb.npy", OUTPUTS);
        check_bfloat16(types[t], &in);
    }
    /* With a file of another type, everything is in float32; a bias in bfloat16 stays in
     * bfloat16. */
    ref_inputs mixed = inputs();
    uint16_t bias16[BIAS_COUNT];
    for (int i = 0; i < BIAS_COUNT; i++) bias16[i] = fa_float_to_bfloat(bias[i]);
    fa_tensor b = fa_bshd(bias16, FA_BFLOAT16, 1, HQ, NQ, NK);
    harness_write_npy("qb.npy", "<V2", "(2, 5, 4, 8)", q16, sizeof q16);
    harness_write_npy("biasb.npy", "<V2", "(4, 5, 7)", bias16, sizeof bias16);
    mixed.q = in.q;
    mixed.options.bias = &b;
    EXPECT_FINE("run", "--q", "qb.npy", "--k", "k.npy", "--v", "v.npy", OUTPUTS, "--bias",
                "biasb.npy");
    check_usual("bfloat16 and float32", &mixed);
}

/* float64 is rounded to 16 bits once: 1 + 2^-11 + 2^-40 is above the middle of two float16 and
 * rounds up, but would be on the middle if it were rounded to float32 first. With one key, out is
 * v. */
static void test_rounding_once(void)
{
    const double value[1] = {1.0 + 0x1p-11 + 0x1p-40};
    const float zero[1] = {0};
    harness_write_npy("z.npy", "<f4", "(1, 1)", zero, sizeof zero);
    harness_write_npy("once.npy", "<f8", "(1, 1)", value, sizeof value);
    EXPECT_FINE("run", "--q", "z.npy", "--k", "z.npy", "--v", "once.npy", "--out", "o.npy",
                "--dtype", "f16");
    uint16_t *out = harness_read_npy("o.npy", "<f2", "(1, 1)", 2);
    CHECK(out && out[0] == 0x3c01, "1 + 2^-11 + 2^-40 became %04x", out ? out[0] : 0u);
    free(out);
}

/* ---- lengths and pages ----------------------------------------------------------------------- */

static void test_padded(void)
{
    const int32_t queries[B] = {3, 5}, keys[B] = {7, 0};
    const int64_t wide[B] = {7, 0};
    ref_inputs in = inputs();
    in.options.seqlens_q = queries;
    in.options.seqlens_k = keys;
    in.options.flags = FA_CAUSAL;
    harness_write_npy("nq.npy", "<i4", "(2,)", queries, sizeof queries);
    harness_write_npy("nk.npy", "<i8", "(2,)", wide, sizeof wide);
    EXPECT_FINE("run", FILES, OUTPUTS, "--causal", "--seqlens-q", "nq.npy", "--seqlens-k",
                "nk.npy");
    check_usual("--seqlens", &in);
}

/* Three sequences in the rows of one batch item: files of 3 axes. */
static void test_packed(void)
{
    const int32_t cu_q[4] = {0, 4, 4, 10}, cu_k[4] = {1, 6, 8, 14}, used[3] = {5, 2, 3};
    float slopes[3 * HQ];
    harness_fill(slopes, 3 * HQ, 0.5f, 8);
    harness_write_npy("qp.npy", "<f4", "(10, 4, 8)", q, sizeof q);
    harness_write_npy("kp.npy", "<f4", "(14, 2, 8)", k, sizeof k);
    harness_write_npy("vp.npy", "<f4", "(14, 2, 3)", v, sizeof v);
    harness_write_npy("cq.npy", "<i4", "(4,)", cu_q, sizeof cu_q);
    harness_write_npy("ck.npy", "<i4", "(4,)", cu_k, sizeof cu_k);
    harness_write_npy("uk.npy", "<i4", "(3,)", used, sizeof used);
    harness_write_npy("slopes.npy", "<f4", "(3, 4)", slopes, sizeof slopes);
    ref_inputs in = inputs();
    in.q = fa_bshd(q, FA_FLOAT32, 1, B * NQ, HQ, D);
    in.k = fa_bshd(k, FA_FLOAT32, 1, B * NK, HKV, D);
    in.v = fa_bshd(v, FA_FLOAT32, 1, B * NK, HKV, DV);
    in.options.num_sequences = 3;
    in.options.cu_seqlens_q = cu_q;
    in.options.cu_seqlens_k = cu_k;
    in.options.seqlens_k = used;
    in.options.alibi_slopes = slopes;
    in.options.alibi_batch_stride = HQ;
    EXPECT_FINE("run", "--q", "qp.npy", "--k", "kp.npy", "--v", "vp.npy", OUTPUTS, "--cu-seqlens-q",
                "cq.npy", "--cu-seqlens-k", "ck.npy", "--seqlens-k", "uk.npy", "--alibi",
                "slopes.npy");
    check_forward("--cu-seqlens", &in, fa_bshd(NULL, FA_FLOAT32, 1, B * NQ, HQ, DV), "<f4",
                  "(10, 4, 3)", "(4, 10)");
}

/* The 14 rows of keys as 7 pages of 2; also packed queries of 3 axes. */
static void test_paged(void)
{
    const int32_t cu_q[4] = {0, 4, 4, 10}, keys[3] = {5, 0, 4};
    /* Entries after the lengths are not read. */
    const int32_t table[3 * 3] = {6, 2, 0, -1, -1, -1, 4, 5, 99};
    harness_write_npy("k7.npy", "<f4", "(7, 2, 2, 8)", k, sizeof k);
    harness_write_npy("v7.npy", "<f4", "(7, 2, 2, 3)", v, sizeof v);
    harness_write_npy("n7.npy", "<i4", "(3,)", keys, sizeof keys);
    harness_write_npy("t7.npy", "<i4", "(3, 3)", table, sizeof table);
    ref_inputs in = inputs();
    in.q = fa_bshd(q, FA_FLOAT32, 1, B * NQ, HQ, D);
    in.k = fa_bshd(k, FA_FLOAT32, 7, 2, HKV, D);
    in.v = fa_bshd(v, FA_FLOAT32, 7, 2, HKV, DV);
    in.options.flags = FA_CAUSAL;
    in.options.num_sequences = 3;
    in.options.cu_seqlens_q = cu_q;
    in.options.seqlens_k = keys;
    in.options.block_table = table;
    in.options.block_table_stride = 3;
    EXPECT_FINE("run", "--q", "qp.npy", "--k", "k7.npy", "--v", "v7.npy", OUTPUTS, "--causal",
                "--cu-seqlens-q", "cq.npy", "--seqlens-k", "n7.npy", "--block-table", "t7.npy");
    check_forward("--block-table", &in, fa_bshd(NULL, FA_FLOAT32, 1, B * NQ, HQ, DV), "<f4",
                  "(10, 4, 3)", "(4, 10)");
}

/* ---- gradients ------------------------------------------------------------------------------- */

static void check_gradient(const char *path, const char *shape, fa_tensor got,
                           const ref_array *want)
{
    ref_report report = REF_REPORT_INIT;
    size_t count = (size_t)(got.shape[0] * got.shape[1] * got.shape[2] * got.shape[3]);
    got.data = harness_read_npy(path, "<f4", shape, count * sizeof(float));
    if (got.data) ref_check_tensor(&report, path, &got, want);
    CHECK(got.data && report.ok, "%s: %s", path, report.message);
    free(got.data);
}

static void test_grad(void)
{
    ref_inputs in = inputs();
    fa_tensor b = fa_bshd(bias, FA_FLOAT32, 1, HQ, NQ, NK),
              d = fa_bshd(dout, FA_FLOAT32, B, NQ, HQ, DV);
    const int64_t bias_shape[4] = {1, HQ, NQ, NK};
    ref_gradients want;
    in.options.flags = FA_CAUSAL;
    in.options.softcap = 3;
    in.options.bias = &b;
    in.options.sinks = sinks;
    in.rounding = ref_rounding_for(&in, FA_FLOAT32, true);
    ref_backward(&in, &d, NULL, bias_shape, &want);
    EXPECT_FINE("grad", FILES, OUTPUTS, "--dout", "dout.npy", "--causal", "--softcap", "3",
                "--bias", "bias.npy", "--sinks", "sinks.npy", "--dq", "dq.npy", "--dk", "dk.npy",
                "--dv", "dv.npy", "--dbias", "db.npy", "--dsinks", "ds.npy");
    check_gradient("dq.npy", "(2, 5, 4, 8)", q_tensor, &want.dq);
    check_gradient("dk.npy", "(2, 7, 2, 8)", k_tensor, &want.dk);
    check_gradient("dv.npy", "(2, 7, 2, 3)", v_tensor, &want.dv);
    check_gradient("db.npy", "(4, 5, 7)", b, &want.dbias);
    check_gradient("ds.npy", "(4,)", fa_bshd(NULL, FA_FLOAT32, 1, 1, 1, HQ), &want.dsinks);
    check_usual("forward of grad", &in);
    ref_gradients_free(&want);
    remove("dq.npy");
    EXPECT_FINE("grad", FILES, "--dout", "dout.npy", "--dk", "dk.npy");
    CHECK(!harness_read_file("dq.npy", &(size_t){0}), "dq.npy was written unasked");
}

/* For packed queries and paged keys. */
static void test_grad_of_pages(void)
{
    const int32_t cu_q[4] = {0, 4, 4, 10}, keys[3] = {5, 0, 4};
    const int32_t table[3 * 3] = {6, 2, 0, 0, 0, 0, 4, 2, 0}; /* two sequences share page 2 */
    harness_write_npy("dp.npy", "<f4", "(10, 4, 3)", dout, sizeof dout);
    harness_write_npy("t7.npy", "<i4", "(3, 3)", table, sizeof table);
    ref_inputs in = inputs();
    ref_gradients want;
    in.q = fa_bshd(q, FA_FLOAT32, 1, B * NQ, HQ, D);
    in.k = fa_bshd(k, FA_FLOAT32, 7, 2, HKV, D);
    in.v = fa_bshd(v, FA_FLOAT32, 7, 2, HKV, DV);
    in.options.num_sequences = 3;
    in.options.cu_seqlens_q = cu_q;
    in.options.seqlens_k = keys;
    in.options.block_table = table;
    in.options.block_table_stride = 3;
    in.rounding = ref_rounding_for(&in, FA_FLOAT32, true);
    fa_tensor d = fa_bshd(dout, FA_FLOAT32, 1, B * NQ, HQ, DV);
    ref_backward(&in, &d, NULL, NULL, &want);
    EXPECT_FINE("grad", "--q", "qp.npy", "--k", "k7.npy", "--v", "v7.npy", "--dout", "dp.npy",
                "--cu-seqlens-q", "cq.npy", "--seqlens-k", "n7.npy", "--block-table", "t7.npy",
                "--dq", "dq.npy", "--dk", "dk.npy", "--dv", "dv.npy");
    check_gradient("dq.npy", "(10, 4, 8)", in.q, &want.dq);
    check_gradient("dk.npy", "(7, 2, 2, 8)", in.k, &want.dk);
    check_gradient("dv.npy", "(7, 2, 2, 3)", in.v, &want.dv);
    ref_gradients_free(&want);
}

/* No queries: files without elements are read and written. No keys: zeros and -inf. */
static void test_empty(void)
{
    harness_write_npy("q0.npy", "<f4", "(2, 0, 4, 8)", NULL, 0);
    harness_write_npy("k0.npy", "<f4", "(2, 0, 2, 8)", NULL, 0);
    harness_write_npy("v0.npy", "<f4", "(2, 0, 2, 3)", NULL, 0);
    EXPECT_FINE("run", "--q", "q0.npy", "--k", "k.npy", "--v", "v.npy", OUTPUTS);
    free(harness_read_npy("o.npy", "<f4", "(2, 0, 4, 3)", 0));
    free(harness_read_npy("l.npy", "<f4", "(2, 4, 0)", 0));
    ref_inputs in = inputs();
    in.k.shape[1] = in.v.shape[1] = 0;
    EXPECT_FINE("run", "--q", "q.npy", "--k", "k0.npy", "--v", "v0.npy", OUTPUTS);
    check_usual("no keys", &in);
}

int main(int argc, char **argv)
{
    harness_begin(argc, argv);
    write_inputs();
    find_device();
    test_options();
    test_integer_masks();
    test_axes();
    test_layout();
    test_formats();
    test_float16();
    test_bfloat16();
    test_rounding_once();
    test_padded();
    test_packed();
    test_paged();
    test_grad();
    test_grad_of_pages();
    test_empty();
    return harness_end();
}
