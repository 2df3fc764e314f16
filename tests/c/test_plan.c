/*
 * The CUDA planner, without a GPU: plans for descriptions of GPUs from T4 to H200.
 */
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "../../kernels/forward_sm90/split_rounds.h"
#include "cuda/parameters.h"
#include "cuda/family.h"
#include "cuda/plan_decode_latent_sm90.h"
#include "cuda/plan_decode.h"
#include "cuda/plan_decode_sm90.h"
#include "cuda/plan_sm90.h"
#include "flashattn.h"
#include "gpus.h"

static fa_problem make_problem(int64_t batch, int64_t heads, int64_t n, int64_t d, int64_t d_v)
{
    return (fa_problem){.pass = FA_PASS_FORWARD,
                        .device = FA_DEVICE_CUDA,
                        .batch = batch,
                        .heads_q = heads,
                        .heads_kv = heads,
                        .n_q = n,
                        .n_k = n,
                        .rows_q = n,
                        .rows_k = n,
                        .blocks_q = batch,
                        .blocks_k = batch,
                        .d = d,
                        .d_v = d_v,
                        .window_left = -1,
                        .window_right = -1};
}

/* family: NULL for the library's choice. */
static fa_cuda_plan plan_by(const fa_cuda_family *family, const fa_problem *p,
                            const fa_cuda_device *device)
{
    fa_cuda_plan plan;
    char why[320] = "";
    bool fine = fa_cuda_plan_make(p, device, family, &plan, why, sizeof why);
    CHECK(fine, "d %lld, d_v %lld by %s on %s: %s", (long long)p->d, (long long)p->d_v,
          family ? family->name : "any", device->name, why);
    return plan;
}

static fa_cuda_plan plan_of(const fa_problem *p, const fa_cuda_device *device)
{
    return plan_by(NULL, p, device);
}

static const char *name_of(const fa_cuda_plan *plan)
{
    return fa_variants[plan->launches[0].variant].name;
}

/* Whether float32's keys are split, which does not change the variant. */
static bool has_parts(const fa_cuda_plan *plan)
{
    return plan->family == &fa_cuda_forward_split_tf32_sm90 ||
           plan->family == &fa_cuda_forward_split_f16x3_sm90;
}

/* The plan's family, or the same without split keys. */
static const fa_cuda_family *whole_family(const fa_cuda_plan *plan)
{
    return has_parts(plan) ? plan->family->without_workspace : plan->family;
}

/* Properties of every plan. */
static void check_plan(const fa_problem *p, const fa_cuda_device *device)
{
    const fa_cuda_plan plan = plan_of(p, device);
    const int64_t rows = plan.launches[0].tile_q > 0
                             ? (p->rows_q + plan.launches[0].tile_q - 1) / plan.launches[0].tile_q
                             : -1;
    const fa_variant *v = &fa_variants[plan.launches[0].variant];
    CHECK(strncmp(v->name, "forward_", 8) == 0, "%s", v->name);
    CHECK(strncmp(v->kernel, "forward_", 8) == 0, "%s", v->kernel);
    CHECK((int)plan.launches[0].smem_bytes + fa_cuda_static_smem(v) <= device->smem_per_block,
          "%u bytes of shared memory on %s", plan.launches[0].smem_bytes, device->name);
    const uint32_t cluster = plan.launches[0].cluster ? plan.launches[0].cluster : 1;
    CHECK(plan.launches[0].grid <= 2147483647u && plan.launches[0].grid % cluster == 0 &&
              (int64_t)(plan.launches[0].grid / cluster) <=
                  (has_parts(&plan) ? plan.launches[0].sm90.split.first_task[1]
                                    : plan.launches[0].tasks),
          "grid %u", plan.launches[0].grid);
    CHECK((plan.launches[0].grid > 0) == (plan.launches[0].tasks > 0), "grid %u for %lld tasks",
          plan.launches[0].grid, (long long)plan.launches[0].tasks);
    CHECK(plan.launches[0].threads % 32 == 0 && plan.launches[0].threads > 0 &&
              plan.launches[0].threads <= 1024,
          "%u threads", plan.launches[0].threads);
    CHECK(plan.launches[0].tile_k % 32 == 0, "a key tile of %d", plan.launches[0].tile_k);
    CHECK(plan.launches[0].tasks >= rows * p->heads_q * p->blocks_q, "%lld tasks",
          (long long)plan.launches[0].tasks);
    const bool parts = has_parts(&plan);
    CHECK(plan.count == 1 + parts && (plan.workspace_bytes > 0) == parts, "%d launches",
          plan.count);
    CHECK(plan.launches[0].idle == (plan.launches[0].tasks == 0), "idle");
}

static void test_head_dims(void)
{
    for (int64_t d = 1; d <= 512; d++)
        for (int i = 0; i < DEVICES; i++) {
            fa_problem p = make_problem(2, 8, 300, d, 513 - d);
            check_plan(&p, &devices[i]);
            p.d_v = d;
            check_plan(&p, &devices[i]);
        }
}

/* The narrowest kernel that both head dims fit into. */
static void test_images(void)
{
    static const struct {
        int64_t d, d_v;
        int variant;
    } cases[] = {
        {1, 1, FA_VARIANT_forward_simt_d64},      {64, 64, FA_VARIANT_forward_simt_d64},
        {65, 64, FA_VARIANT_forward_simt_d128},   {64, 65, FA_VARIANT_forward_simt_d128},
        {128, 128, FA_VARIANT_forward_simt_d128}, {192, 128, FA_VARIANT_forward_simt_d256},
        {256, 257, FA_VARIANT_forward_simt_d512}, {512, 512, FA_VARIANT_forward_simt_d512},
        {513, 64, FA_VARIANT_forward_simt_d512},  {576, 512, FA_VARIANT_forward_simt_d512}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_problem(1, 1, 1, cases[i].d, cases[i].d_v);
        p.precision = FA_PRECISION_IEEE;
        const fa_cuda_plan plan = plan_of(&p, &devices[H200]);
        CHECK(plan.launches[0].variant == cases[i].variant, "%lld, %lld: %s", (long long)cases[i].d,
              (long long)cases[i].d_v, name_of(&plan));
    }
}

static void test_sizes(void)
{
    static const int64_t sizes[][3] = {/* batch, heads, n */
                                       {1, 1, 1},       {0, 8, 100},           {3, 0, 100},
                                       {3, 8, 0},       {65536, 65536, 1},     {1, 1, 1LL << 40},
                                       {70000, 3, 129}, {1 << 20, 1 << 20, 64}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const fa_problem p = make_problem(sizes[i][0], sizes[i][1], sizes[i][2], 64, 64);
        check_plan(&p, &devices[H200]);
    }
}

/* As many tiles as the sequences can have at most, however the rows are divided. */
static void test_packed(void)
{
    static const int32_t cu[5] = {0};
    fa_problem p = make_problem(4, 2, 1000, 64, 64);
    p.blocks_q = 1;
    p.cu_seqlens_q = cu;
    const fa_cuda_plan plan = plan_of(&p, &devices[H200]);
    CHECK(plan.launches[0].tiles == 1000 / plan.launches[0].tile_q + 4 + 2 &&
              plan.launches[0].tasks == 2 * plan.launches[0].tiles,
          "%lld tiles", (long long)plan.launches[0].tiles);
}

static void test_refusals(void)
{
    fa_cuda_plan plan;
    char why[320] = "";
    fa_problem p = make_problem(1, 1, 1, 64, 64);
    fa_cuda_device old = devices[T4];
    old.minor = 0;
    CHECK(!fa_cuda_plan_make(&p, &old, NULL, &plan, why, sizeof why) &&
              strstr(why, "has architecture 7.0: expected 7.5 or later"),
          "%s", why);
    old = devices[T4];
    old.smem_per_block = 49152;
    CHECK(!fa_cuda_plan_make(&p, &old, NULL, &plan, why, sizeof why) &&
              strstr(why, "has 49152 bytes of shared memory for a block: expected "),
          "%s", why);
}

static void set_dtype(fa_problem *p, fa_dtype dtype)
{
    p->q.dtype = p->k.dtype = p->v.dtype = p->out.dtype = dtype;
}

/* The strides of a packed tensor of (batch, row, head, dim): TMA needs whole 16 bytes. */
static void set_strides(fa_view *v, int64_t rows, int64_t heads, int64_t d)
{
    v->stride[0] = rows * heads * d;
    v->stride[1] = heads * d;
    v->stride[2] = d;
    v->stride[3] = 1;
}

/* A problem that Hopper's kernels take. */
static fa_problem make_mapped(int64_t heads, int64_t n, int64_t d, int64_t d_v)
{
    fa_problem p = make_problem(1, heads, n, d, d_v);
    set_dtype(&p, FA_BFLOAT16);
    p.scale = 0.1f;
    set_strides(&p.q, n, heads, d);
    set_strides(&p.k, n, heads, d);
    set_strides(&p.v, n, heads, d_v);
    return p;
}

/* Tensor cores refuse chunked attention by name; the FMA units support it. */
static void test_chunks(void)
{
    for (int i = 0; i < DEVICES; i++) {
        char why[320] = "";
        fa_cuda_plan plan;
        fa_problem p = make_problem(2, 8, 300, 64, 64);
        set_dtype(&p, FA_FLOAT16);
        p.attention_chunk = 100;
        CHECK(fa_cuda_plan_make(&p, &devices[i], NULL, &plan, why, sizeof why) &&
                  plan.launches[0].variant == FA_VARIANT_forward_simt_d64 &&
                  strstr(plan.passed_over, "options.attention_chunk is 100"),
              "%s: %s", devices[i].name, plan.passed_over);
        const fa_cuda_family *const asked[] = {&fa_cuda_forward_tf32_sm90, &fa_cuda_forward_tf32,
                                               &fa_cuda_forward_tf32x3, &fa_cuda_decode};
        for (int n = 0; n < 4; n++) { /* float32 in tf32, and decode in 16 bits */
            set_dtype(&p, n < 3 ? FA_FLOAT32 : FA_FLOAT16);
            p.precision = n < 2 ? FA_PRECISION_TF32 : FA_PRECISION_FLOAT32;
            p.pass = n < 3 ? FA_PASS_FORWARD : FA_PASS_DECODE;
            const bool fine = fa_cuda_plan_make(&p, &devices[i], asked[n], &plan, why, sizeof why);
            CHECK(!fine || plan.launches[0].variant == FA_VARIANT_forward_simt_d64,
                  "%s: %s takes chunks", devices[i].name, asked[n]->name);
        }
    }
}

/* Keys and values of 8 bits are computed by the FMA units; fa_weights refuses int8 and scales by
 * name. */
static void test_caches(void)
{
    for (int i = 0; i < DEVICES; i++) {
        char why[320] = "";
        fa_cuda_plan plan;
        fa_problem p = make_problem(2, 8, 300, 64, 64);
        set_dtype(&p, FA_FLOAT16);
        p.k.dtype = p.v.dtype = FA_INT8;
        p.k_scale = (fa_view){.data = why, .dtype = FA_FLOAT32};
        CHECK(fa_cuda_plan_make(&p, &devices[i], NULL, &plan, why, sizeof why) &&
                  plan.launches[0].variant == FA_VARIANT_forward_simt_d64 &&
                  strstr(plan.passed_over, "k.dtype is int8"),
              "%s: %s", devices[i].name, plan.passed_over);
        p.pass = FA_PASS_WEIGHTS;
        CHECK(!fa_cuda_plan_make(&p, &devices[i], NULL, &plan, why, sizeof why) &&
                  strstr(why, "k.dtype is int8"),
              "%s: %s", devices[i].name, why);
        CHECK(!fa_cuda_plan_make(&p, &devices[i], NULL, &plan, NULL, 0), "without words");
        p.k.dtype = FA_FLOAT8_E4M3;
        CHECK(!fa_cuda_plan_make(&p, &devices[i], NULL, &plan, why, sizeof why) &&
                  strstr(why, "options.k_scale is set"),
              "%s: %s", devices[i].name, why);
        p.k_scale.data = NULL;
        CHECK(fa_cuda_plan_make(&p, &devices[i], NULL, &plan, why, sizeof why), "%s", why);
    }
}

/* Head dims above 512: forward is computed only by the FMA units. */
static void test_latent(void)
{
    for (int i = 0; i < DEVICES; i++)
        for (int64_t d = 513; d <= 576; d++) {
            fa_problem p = make_problem(2, 16, 3, d, d < 544 ? 1 : 512);
            check_plan(&p, &devices[i]);
            set_dtype(&p, FA_FLOAT16);
            check_plan(&p, &devices[i]);
            const fa_cuda_plan plan = plan_of(&p, &devices[i]);
            CHECK(plan.launches[0].variant == FA_VARIANT_forward_simt_d512, "%s", name_of(&plan));
        }
}

/* 16-bit problems of every head dim on every device: the plan is valid, and uses tensor cores if
 * the device has them for the type, and enough shared memory. */
static void test_tensor_cores(void)
{
    for (int64_t d = 1; d <= 512; d++)
        for (int i = 0; i < DEVICES; i++)
            for (int b = 0; b < 2; b++) {
                const int architecture = 10 * devices[i].major + devices[i].minor;
                fa_problem p = make_problem(2, 8, 300, d, d > 8 ? d - 8 : d);
                set_dtype(&p, b ? FA_BFLOAT16 : FA_FLOAT16);
                check_plan(&p, &devices[i]);
                const bool expected = d <= 256 ? architecture >= 80 || !b : architecture >= 90;
                const fa_cuda_plan plan = plan_of(&p, &devices[i]);
                CHECK((strcmp(plan.family->name, "simt") != 0) == expected, "d %lld on %s: %s",
                      (long long)d, devices[i].name, name_of(&plan));
                const char *passed_over = architecture >= 80 ? "not sm80: " : "not sm75: ";
                CHECK((strstr(plan.passed_over, passed_over) != NULL) == !expected,
                      "d %lld on %s: %s", (long long)d, devices[i].name, plan.passed_over);
            }
}

/* The family that computes float32 of head dim d in a precision, if there is enough shared memory,
 * and its description of its arithmetic. */
static const char *float32_family(const fa_cuda_device *device, fa_precision precision, int64_t d,
                                  const char **arithmetic)
{
    const int architecture = 10 * device->major + device->minor;
    const int needed = d <= 128 ? 90 : d <= 256 ? 160 : 220;        /* KiB, in tf32 */
    const int needed_by_three = d <= 64 ? 39 : d <= 128 ? 71 : 144; /* by three products */
    const bool hopper = architecture == 90 && d % 4 == 0;           /* TMA needs 16 bytes */
    if (precision == FA_PRECISION_FLOAT32 && hopper) {
        *arithmetic = "three float16 products for each (wgmma), float32 sums";
        return "f16x3_sm90";
    }
    if (precision == FA_PRECISION_TF32 && hopper && d > 256) {
        *arithmetic = "float16 products (wgmma), float32 sums";
        return "tf32_sm90";
    }
    if (precision == FA_PRECISION_TF32 && architecture >= 80 &&
        device->smem_per_block >= needed * 1024) {
        *arithmetic = hopper ? "tf32 products (wgmma), float32 sums"
                             : "tf32 products (mma.sync), float32 sums";
        return hopper ? "tf32_sm90" : "tf32";
    }
    if (precision != FA_PRECISION_IEEE && architecture >= 80 && d <= 256 &&
        device->smem_per_block >= needed_by_three * 1024) {
        *arithmetic = "three tf32 products for each (mma.sync), float32 sums";
        return "tf32x3";
    }
    *arithmetic = "float32 sums on FMA units";
    return "simt";
}

/* float32 of every head dim in every precision on every device. */
static void test_float32(void)
{
    static const fa_precision precisions[] = {FA_PRECISION_FLOAT32, FA_PRECISION_TF32,
                                              FA_PRECISION_IEEE};
    for (int64_t d = 1; d <= 512; d++)
        for (int i = 0; i < DEVICES; i++)
            for (int n = 0; n < 3; n++) {
                const char *arithmetic;
                const char *name = float32_family(&devices[i], precisions[n], d, &arithmetic);
                fa_problem p = make_mapped(8, 100, d, d > 8 ? d - 8 : d);
                set_dtype(&p, FA_FLOAT32);
                p.precision = precisions[n];
                check_plan(&p, &devices[i]);
                const fa_cuda_plan plan = plan_of(&p, &devices[i]);
                CHECK(strcmp(whole_family(&plan)->name, name) == 0, "d %lld on %s: %s%s",
                      (long long)d, devices[i].name, name_of(&plan), plan.passed_over);
                CHECK(strcmp(plan.arithmetic, arithmetic) == 0, "d %lld: %s", (long long)d,
                      plan.arithmetic);
                p.softcap = 30; /* an option of the scores */
                const fa_cuda_plan general = plan_of(&p, &devices[i]);
                const bool hopper = strstr(name, "_sm90");
                CHECK(hopper ? whole_family(&general) == whole_family(&plan)
                             : !strstr(general.family->name, "_sm90"),
                      "d %lld: %s", (long long)d, name_of(&general));
            }
    for (int n = 0; n < 3; n++) { /* if it is requested */
        char why[320];
        fa_cuda_plan exact;
        fa_problem p = make_problem(2, 8, 300, 100, 64);
        const fa_cuda_family *family = fa_cuda_find_family("tf32x3");
        p.precision = precisions[n];
        const bool made = fa_cuda_plan_make(&p, &devices[A100], family, &exact, why, sizeof why);
        CHECK(made == (precisions[n] != FA_PRECISION_IEEE), "precision %d", (int)precisions[n]);
        CHECK(!made || exact.launches[0].variant == FA_VARIANT_forward_tf32x3_d128, "%s",
              name_of(&exact));
    }
    fa_problem mixed = make_problem(2, 8, 300, 64, 64);
    mixed.precision = FA_PRECISION_TF32;
    mixed.out.dtype = FA_FLOAT16;
    const fa_cuda_plan plan = plan_of(&mixed, &devices[H200]);
    CHECK(strcmp(plan.family->name, "simt") == 0, "%s", name_of(&plan));
}

/* float32 that TMA cannot load, with options and without. Three products support it, and what they
 * do not support is computed in float32 arithmetic. */
static void test_tf32x3(void)
{
    static const int unlike[] = {A100, H200};
    for (size_t i = 0; i < sizeof unlike / sizeof unlike[0]; i++) {
        fa_problem p = make_mapped(8, 300, 100, 64);
        set_dtype(&p, FA_FLOAT32);
        p.v.stride[1] += 1;
        CHECK(plan_of(&p, &devices[unlike[i]]).launches[0].variant ==
                  FA_VARIANT_forward_tf32x3_d128,
              "%s", devices[unlike[i]].name);
        p.batch_invariant = true;
        p.softcap = 20;
        CHECK(plan_of(&p, &devices[unlike[i]]).launches[0].variant ==
                  FA_VARIANT_forward_tf32x3_d128_general,
              "%s", devices[unlike[i]].name);
        fa_problem other[4] = {p, p, p, p};
        other[0].precision = FA_PRECISION_IEEE;
        other[1].attention_chunk = 100;
        other[2].d = 257;
        other[3].out.dtype = FA_FLOAT16;
        for (int n = 0; n < 4; n++)
            CHECK(strcmp(plan_of(&other[n], &devices[unlike[i]]).family->name, "simt") == 0,
                  "%d on %s", n, devices[unlike[i]].name);
        CHECK(strcmp(plan_of(&p, &devices[T4]).family->name, "simt") == 0, "T4");
    }
}

static void expect_variant(const fa_problem *p, const fa_cuda_device *device, int variant)
{
    const fa_cuda_plan plan = plan_of(p, device);
    CHECK(plan.launches[0].variant == variant, "%s on %s, expected %s", name_of(&plan),
          device->name, fa_variants[variant].name);
}

/* If a problem needs more than masks by position, it uses the general form, and so does a negative
 * scale. */
static void test_forms(void)
{
    static float slopes[1];
    fa_problem p = make_problem(1, 1, 100, 128, 128);
    set_dtype(&p, FA_BFLOAT16);
    const fa_cuda_family *sm80 = fa_cuda_find_family("sm80");
    const fa_cuda_device *a100 = &devices[A100];
    p.scale = 0.1f;
    p.causal = true;
    p.window_left = 5;
    expect_variant(&p, a100, FA_VARIANT_forward_sm80_d128_bf16);
    fa_problem general[6] = {p, p, p, p, p, p};
    general[0].softcap = 3;
    general[1].alibi_slopes = slopes;
    general[2].bias.data = (char *)slopes;
    general[3].mask.data = (char *)slopes;
    general[4].dropout_threshold = 1;
    general[5].scale = -0.1f;
    for (int i = 0; i < 6; i++)
        expect_variant(&general[i], a100, FA_VARIANT_forward_sm80_d128_bf16_general);
    p.d = 192;
    expect_variant(&p, a100, FA_VARIANT_forward_sm80_d192_bf16_small);
    p.d = 200;
    char why[320];
    fa_cuda_plan plan;
    CHECK(fa_cuda_plan_make(&p, &devices[H200], sm80, &plan, why, sizeof why) &&
              plan.launches[0].variant == FA_VARIANT_forward_sm80_d256_bf16,
          "%s", why);
    expect_variant(&p, a100, FA_VARIANT_forward_sm80_d256_bf16);
    expect_variant(&p, &devices[RTX_4090], FA_VARIANT_forward_sm80_d256_bf16_small);
    set_dtype(&p, FA_FLOAT16);
    expect_variant(&p, &devices[T4], FA_VARIANT_forward_sm75_d256_f16);
    CHECK(sm80 && plan_of(&p, a100).family == sm80, "family");
}

static void expect_share(const fa_problem *p, uint32_t grid, int64_t pairs, int64_t paired)
{
    fa_cuda_plan plan;
    char why[320] = "";
    const fa_cuda_family *sm80 = fa_cuda_find_family("sm80");
    CHECK(fa_cuda_plan_make(p, &devices[H200], sm80, &plan, why, sizeof why), "%s", why);
    CHECK(plan.launches[0].grid == grid && plan.launches[0].sm80.causal_pairs == pairs &&
              plan.launches[0].sm80.full_heads == paired,
          "grid %u, %lld pairs, %lld heads: expected %u, %lld, %lld", plan.launches[0].grid,
          (long long)plan.launches[0].sm80.causal_pairs,
          (long long)plan.launches[0].sm80.full_heads, grid, (long long)pairs, (long long)paired);
}

/* If all lengths are known, short tasks are distributed to the blocks that have the least work. */
static void test_shares(void)
{
    static int32_t lengths[16];
    fa_problem p = make_problem(16, 16, 1024, 128, 128);
    set_dtype(&p, FA_BFLOAT16);
    expect_share(&p, 264, 0, 0);
    p.causal = true;
    expect_share(&p, 264, 198 * 4 + 58 / 2 * 9, 198); /* 1053 of 1056 */
    p.heads_q = p.heads_kv = 8;
    expect_share(&p, 264, 128 * 4, 128); /* shorter pairs would need another round */
    p.heads_q = p.heads_kv = 16;
    p.window_left = 100;
    expect_share(&p, 264, 0, 0);
    p.seqlens_k = lengths;
    expect_share(&p, 16 * 16 * 8, 0, 0);
    p = make_problem(1, 16, 16384, 128, 128); /* long tasks */
    set_dtype(&p, FA_BFLOAT16);
    expect_share(&p, 16 * 128, 0, 0);
    p.causal = true;
    expect_share(&p, 12 * 64 + 2 * 129, 12 * 64 + 2 * 129, 12);
    p.d = p.d_v = 256; /* one block per multiprocessor */
    expect_share(&p, 132, 14 * 64 + 129, 14);
    p = make_problem(
        11, 20, 795, 128,
        128); /* pairs would leave most of the last round idle: the longest tasks first */
    set_dtype(&p, FA_BFLOAT16);
    p.causal = true;
    expect_share(&p, 11 * 20 * 7, 0, 11 * 20);
    p = make_problem(61, 40, 312, 96, 96);
    set_dtype(&p, FA_BFLOAT16);
    p.causal = true;
    expect_share(&p, 264, 0, 61 * 40);
    p = make_problem(2, 16, 2048, 128, 128); /* all pairs run at once, but not all tasks */
    set_dtype(&p, FA_BFLOAT16);
    p.causal = true;
    expect_share(&p, 256, 256, 32);
    p = make_problem(3, 16, 1024, 128, 128); /* 384 tasks for 264 blocks */
    set_dtype(&p, FA_BFLOAT16);
    expect_share(&p, 384, 0, 0);
    p = make_problem(1, 16, 1024, 256, 256); /* a task for each block */
    set_dtype(&p, FA_BFLOAT16);
    expect_share(&p, 128, 0, 0);
}

/* Head dims of 257 to 512 on Hopper: two blocks share a work tile, so the number of blocks is
 * even. */
static void test_wide(void)
{
    static const struct {
        int64_t d, d_v;
        int variant;
    } cases[] = {{256, 256, FA_VARIANT_forward_sm90_d256_bf16},
                 {264, 264, FA_VARIANT_forward_sm90_wide_d320_bf16},
                 {320, 64, FA_VARIANT_forward_sm90_wide_d320_bf16},
                 {64, 328, FA_VARIANT_forward_sm90_wide_d384_bf16},
                 {384, 384, FA_VARIANT_forward_sm90_wide_d384_bf16},
                 {392, 320, FA_VARIANT_forward_sm90_wide_d512_bf16},
                 {512, 512, FA_VARIANT_forward_sm90_wide_d512_bf16}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const fa_cuda_device *h200 = &devices[H200];
        const bool wide = cases[i].d > 256 || cases[i].d_v > 256;
        fa_problem p = make_mapped(3, 100, cases[i].d, cases[i].d_v);
        if (wide) check_plan(&p, h200);
        expect_variant(&p, h200, cases[i].variant);
        CHECK(plan_of(&p, h200).launches[0].grid == (wide ? 6u : 3u), "%u blocks",
              plan_of(&p, h200).launches[0].grid);
        p.softcap = 1;
        const fa_cuda_plan general = plan_of(&p, h200);
        CHECK(strcmp(general.family->name, wide ? "sm80" : "sm90") == 0, "%s", name_of(&general));
        p = make_mapped(3, 100000, cases[i].d, cases[i].d_v);
        if (wide) check_plan(&p, h200);
        CHECK(plan_of(&p, h200).launches[0].grid == (uint32_t)h200->multiprocessors, "%u blocks",
              plan_of(&p, h200).launches[0].grid);
    }
}

/* On Hopper there are variants for rows of few keys; head dim 64 also has one for rows of one tile
 * and one for few queries. If only the device knows the lengths, these are not chosen. */
static void test_short_rows(void)
{
    static const int32_t cu[5] = {0};
    static const struct {
        int64_t d, rows_q, n_k;
        bool packed, causal;
        int64_t window; /* to the left; -1: none */
        int variant;
    } cases[] = {{64, 128, 128, false, false, -1, FA_VARIANT_forward_sm90_d64_one_bf16},
                 {64, 5000, 7, false, false, -1, FA_VARIANT_forward_sm90_d64_one_bf16},
                 {64, 128, 129, false, false, -1, FA_VARIANT_forward_sm90_d64_tracked_bf16},
                 {64, 128, 2049, false, false, -1, FA_VARIANT_forward_sm90_d64_two_bf16},
                 {64, 128, 129, false, true, -1, FA_VARIANT_forward_sm90_d64_two_bf16},
                 {64, 128, 128, true, false, -1, FA_VARIANT_forward_sm90_d64_two_bf16},
                 {64, 2048, 2048, false, false, -1, FA_VARIANT_forward_sm90_d64_two_bf16},
                 {64, 4096, 4096, false, false, -1, FA_VARIANT_forward_sm90_d64_two_bf16},
                 {64, 5000, 5000, false, true, 127, FA_VARIANT_forward_sm90_d64_tracked_bf16},
                 {64, 5000, 5000, false, true, 255, FA_VARIANT_forward_sm90_d64_bf16},
                 {64, 5000, 5000, false, false, 100, FA_VARIANT_forward_sm90_d64_two_bf16},
                 {80, 1024, 512, false, false, -1, FA_VARIANT_forward_sm90_d80_bf16},
                 {80, 1024, 513, false, false, -1, FA_VARIANT_forward_sm90_d80_two_bf16},
                 {96, 1024, 512, false, false, -1, FA_VARIANT_forward_sm90_d96_bf16},
                 {96, 941, 941, false, false, -1, FA_VARIANT_forward_sm90_d96_bf16},
                 {96, 941, 941, false, true, -1, FA_VARIANT_forward_sm90_d96_two_bf16},
                 {96, 1024, 513, true, false, -1, FA_VARIANT_forward_sm90_d96_two_bf16},
                 {96, 100, 100, false, true, -1, FA_VARIANT_forward_sm90_d96_two_bf16},
                 {128, 5000, 2048, false, false, -1, FA_VARIANT_forward_sm90_d128_tracked_bf16},
                 {128, 5000, 2049, false, false, -1, FA_VARIANT_forward_sm90_d128_bf16},
                 {128, 5000, 2048, true, false, -1, FA_VARIANT_forward_sm90_d128_bf16},
                 {128, 2048, 2048, false, true, -1, FA_VARIANT_forward_sm90_d128_bf16},
                 {128, 5000, 5000, false, true, 2047, FA_VARIANT_forward_sm90_d128_tracked_bf16},
                 {128, 5000, 5000, false, true, 2048, FA_VARIANT_forward_sm90_d128_bf16},
                 {128, 5000, 5000, false, false, 100, FA_VARIANT_forward_sm90_d128_bf16}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_mapped(3, cases[i].rows_q, cases[i].d, cases[i].d);
        p.n_k = p.rows_k = cases[i].n_k;
        p.causal = cases[i].causal;
        p.window_left = cases[i].window;
        p.window_right = -1;
        p.max_q = cases[i].rows_q;
        if (cases[i].packed) p.cu_seqlens_q = p.cu_seqlens_k = cu;
        const fa_cuda_plan plan = plan_by(&fa_cuda_forward_sm90, &p, &devices[H200]);
        CHECK(plan.launches[0].variant == cases[i].variant, "%s, expected %s", name_of(&plan),
              fa_variants[cases[i].variant].name);
    }
}

/* On Hopper larger tiles of queries are used where they need one round of blocks and smaller ones two. */
static void test_one_round(void)
{
    static const struct {
        int64_t heads;
        bool invariant; /* for any batch */
        int variant;
    } cases[] = {{66, false, FA_VARIANT_forward_sm90_d64_two_bf16},
                 {67, false, FA_VARIANT_forward_sm90_d64_bf16},
                 {132, false, FA_VARIANT_forward_sm90_d64_bf16},
                 {133, false, FA_VARIANT_forward_sm90_d64_two_bf16},
                 {67, true, FA_VARIANT_forward_sm90_d64_two_bf16}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_mapped(cases[i].heads, 192, 64, 64);
        p.causal = true;
        p.batch_invariant = cases[i].invariant;
        expect_variant(&p, &devices[H200], cases[i].variant);
    }
}

/* On Hopper at head dim 64 the size of query tiles follows from rounds of blocks, or from the rows behind the last query. */
static void test_query_tiles(void)
{
    static const struct {
        int64_t heads, rows;
        bool causal, invariant;
        bool fewer;
    } cases[] = {{40, 2048, false, false, true},   {40, 2048, false, true, false},
                 {128, 4096, false, false, false}, {72, 2143, false, false, false},
                 {180, 2882, false, false, false}, {64, 6559, false, false, false},
                 {24, 3287, true, false, false},   {128, 4096, true, false, false},
                 {256, 2048, true, false, true},   {64, 2048, true, false, false},
                 {256, 2048, true, true, false},   {66, 2500, true, false, false}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_mapped(cases[i].heads, cases[i].rows, 64, 64);
        p.causal = cases[i].causal;
        p.batch_invariant = cases[i].invariant;
        const fa_cuda_plan plan = plan_by(&fa_cuda_forward_sm90, &p, &devices[H200]);
        const bool fewer = FA_SM90_QUERIES(fa_variants[plan.launches[0].variant].consumers) == 128;
        CHECK(fewer == cases[i].fewer, "case %zu: %s", i, name_of(&plan));
    }

    /* Rows that are whole tiles in any case, and so long that 107 times their pairs are above 2^63. */
    const fa_problem usual = make_mapped(1, 3072, 96, 96),
                     huge = make_mapped(1, (int64_t)3072 * 97000, 96, 96);
    const fa_cuda_plan plan = plan_by(&fa_cuda_forward_sm90, &usual, &devices[H200]),
                       other = plan_by(&fa_cuda_forward_sm90, &huge, &devices[H200]);
    CHECK(plan.launches[0].variant == other.launches[0].variant, "%s, with huge rows %s",
          name_of(&plan), name_of(&other));
}

/* Causal pairs balance the work of blocks, unless a narrow window leaves all query tiles the same work. */
static void test_order_of_windows(void)
{
    static const struct {
        int64_t heads, rows, d, window;
        bool paired;
    } cases[] = {{28, 4096, 128, -1, true},   {28, 4096, 128, 2000, true},
                 {28, 4096, 128, 127, false}, {20, 8449, 64, -1, true},
                 {20, 8449, 64, 4000, true},  {20, 8449, 64, 125, false},
                 {12, 7006, 192, 115, false}, {8, 8192, 320, 127, true}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_mapped(cases[i].heads, cases[i].rows, cases[i].d, cases[i].d);
        p.causal = true;
        p.window_left = cases[i].window;
        const fa_cuda_plan plan = plan_by(&fa_cuda_forward_sm90, &p, &devices[H200]);
        fa_sm90_params params;
        fa_cuda_set_sm90_order(&p, &plan.launches[0], &params);
        CHECK((params.tasks > 0) == cases[i].paired, "case %zu: %d pairs", i, (int)params.tasks);
        CHECK(cases[i].paired || params.alternating_heads == cases[i].heads, "case %zu: %d heads",
              i, (int)params.alternating_heads);
    }
}

/* The shape of tiles does not depend on how many packed sequences there are, if results must not; without the flag the longest
 * one counts. */
static void test_packed_shapes(void)
{
    static const int32_t cu[1];
    static const struct {
        int64_t d, rows, longest;
        bool invariant;
        int variant;
    } cases[] = {{80, 400, 400, true, FA_VARIANT_forward_sm90_d80_bf16},
                 {80, 1600, 400, true, FA_VARIANT_forward_sm90_d80_bf16},
                 {96, 400, 400, true, FA_VARIANT_forward_sm90_d96_bf16},
                 {96, 1600, 400, true, FA_VARIANT_forward_sm90_d96_bf16},
                 {96, 1600, 400, false, FA_VARIANT_forward_sm90_d96_bf16},
                 {96, 1600, 600, false, FA_VARIANT_forward_sm90_d96_two_bf16}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_mapped(8, cases[i].rows, cases[i].d, cases[i].d);
        p.cu_seqlens_q = p.cu_seqlens_k = cu;
        p.max_q = cases[i].longest;
        p.batch_invariant = cases[i].invariant;
        const fa_cuda_plan plan = plan_by(&fa_cuda_forward_sm90, &p, &devices[H200]);
        CHECK(plan.launches[0].variant == cases[i].variant, "case %d: %s", (int)i, name_of(&plan));
    }
}

/* How forward_sm90 shares out work tiles under a causal mask. */
static void test_causal_orders(void)
{
    static const struct {
        int64_t heads, n, d;
        int32_t kind, balanced, alternating;
        int64_t tasks;
    } cases[] = {/* as many work tiles as blocks */
                 {66, 256, 128, FA_SM90_WORK_TILES, 0, 0, 132},
                 /* two rounds of work tiles and a half: none in pairs */
                 {40, 1024, 128, FA_SM90_CAUSAL_PAIRS, 0, 40, 0},
                 /* 7.76 rounds of pairs */
                 {256, 1024, 128, FA_SM90_CAUSAL_PAIRS, 0, 0, 1024},
                 /* 8.64 rounds of pairs, of which 7 are whole: an even number of heads in pairs */
                 {456, 640, 256, FA_SM90_CAUSAL_PAIRS, 0, 88, 920},
                 /* long rows have a balanced schedule */
                 {64, 4096, 128, FA_SM90_CAUSAL_PAIRS, 9, 0, 880},
                 /* dynamic: the last heads come the longest work tile first */
                 {400, 205, 128, FA_SM90_WORK_TILES, 0, 132, 800}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_mapped(cases[i].heads, cases[i].n, cases[i].d, cases[i].d);
        p.causal = true;
        const fa_cuda_plan plan = plan_by(&fa_cuda_forward_sm90, &p, &devices[H200]);
        fa_sm90_params order;
        fa_cuda_set_sm90_order(&p, &plan.launches[0], &order);
        CHECK(order.task_kind == cases[i].kind && order.balanced_heads == cases[i].balanced &&
                  order.alternating_heads == cases[i].alternating && order.tasks == cases[i].tasks,
              "%lld heads of %lld: kind %d, %d balanced, %d alternating, %lld tasks",
              (long long)cases[i].heads, (long long)cases[i].n, (int)order.task_kind,
              (int)order.balanced_heads, (int)order.alternating_heads, (long long)order.tasks);
    }
}

/* On Hopper blocks that stay take the tasks of packed sequences from a counter, under a causal mask the longest of all heads
 * first. With some options a block takes several tasks, which are far apart in their heads; but few tasks have a block each. */
static void test_packed_shares(void)
{
    static const int32_t cu[5] = {0};
    static const struct {
        int64_t heads, rows;
        int share;
    } cases[] = {{2, 1000, 1},   {8, 8192, 1},   {16, 9000, 2},
                 {16, 32768, 3}, {64, 65536, 8}, {1, 150000, 2}};
    const fa_cuda_device *h200 = &devices[H200];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const int share = cases[i].share;
        fa_problem p = make_mapped(cases[i].heads, cases[i].rows, 128, 128);
        p.batch = 4;
        p.blocks_q = 1;
        p.cu_seqlens_q = cu;
        p.causal = true;
        const fa_cuda_plan dynamic = plan_by(&fa_cuda_forward_sm90, &p, h200);
        const fa_cuda_plan_launch *taken = &dynamic.launches[0];
        fa_sm90_params order;
        fa_cuda_set_sm90_order(&p, taken, &order);
        CHECK(taken->sm90.static_grid >= taken->grid &&
                  (int64_t)taken->sm90.static_grid * share >= taken->tasks,
              "%u blocks without a counter", taken->sm90.static_grid);
        CHECK(taken->sm90.dynamic && taken->grid == (taken->tasks < 132 ? taken->tasks : 132),
              "%lld blocks take %lld tasks", (long long)taken->grid, (long long)taken->tasks);
        CHECK(taken->grid == taken->tasks || order.alternating_heads == cases[i].heads,
              "%d heads in alternation", (int)order.alternating_heads);
        p.causal = false;
        p.dropout_threshold = 1;
        check_plan(&p, h200);
        const fa_cuda_plan plan = plan_of(&p, h200);
        const int64_t grid = plan.launches[0].grid;
        CHECK(strcmp(plan.family->name, "sm90") == 0, "%s", name_of(&plan));
        CHECK(grid * share >= plan.launches[0].tasks &&
                  (grid - plan.launches[0].tiles) * share < plan.launches[0].tasks,
              "%lld blocks for %lld tasks", (long long)grid, (long long)plan.launches[0].tasks);
        CHECK(share == 1 ||
                  grid % plan.launches[0].tiles == (plan.launches[0].tiles + share - 1) / share,
              "%lld blocks, heads of %lld", (long long)grid, (long long)plan.launches[0].tiles);
    }
}

/* Padded sequences with lengths of their own have a block for each task, if there are few. */
static void test_few_taken_tasks(void)
{
    static int32_t lengths[1];
    fa_problem p = make_mapped(8, 2048, 128, 128);
    p.seqlens_k = lengths;
    p.causal = true;
    const fa_cuda_plan plan = plan_by(&fa_cuda_forward_sm90, &p, &devices[H200]);
    CHECK(plan.launches[0].sm90.dynamic && plan.launches[0].tasks == 128 &&
              plan.launches[0].grid == 128,
          "%u blocks for %d tasks", plan.launches[0].grid, (int)plan.launches[0].tasks);
}

/* Under FA_BATCH_INVARIANT the batch must not choose the kernel. */
static void test_invariant_sm80(void)
{
    for (int64_t window = -1; window < 40; window += 21) {
        int variant[2];
        for (int many = 0; many < 2; many++) {
            fa_problem p = make_mapped(16, 128, 256, 256);
            p.causal = p.batch_invariant = true;
            p.window_left = window;
            p.batch = p.blocks_q = p.blocks_k = many ? 500 : 1;
            variant[many] = plan_by(&fa_cuda_forward_sm80, &p, &devices[H200]).launches[0].variant;
        }
        CHECK(variant[0] == variant[1], "%s and %s", fa_variants[variant[0]].name,
              fa_variants[variant[1]].name);
    }
}

static void expect_refusal(const fa_problem *p, const fa_cuda_device *device, const char *family,
                           const char *because)
{
    fa_cuda_plan plan;
    char why[320] = "";
    CHECK(!fa_cuda_plan_make(p, device, fa_cuda_find_family(family), &plan, why, sizeof why) &&
              strstr(why, because) && strstr(why, "FA_CUDA_KERNEL asks for ") &&
              strstr(why, family),
          "%s: %s", family, why);
}

/* A problem that forward_tf32_sm90 takes. */
static fa_problem make_tf32(int64_t heads, int64_t n, int64_t d)
{
    fa_problem p = make_mapped(heads, n, d, d);
    set_dtype(&p, FA_FLOAT32);
    p.precision = FA_PRECISION_TF32;
    return p;
}

/* What forward_tf32_sm90 does not support, and its reasons. */
static void test_tf32_sm90_refusals(void)
{
    fa_problem other[3];
    for (int i = 0; i < 3; i++) other[i] = make_tf32(8, 300, 128);
    other[0].k.stride[1] += 1;
    other[1].batch_invariant = true, other[1].k.stride[0] += 2;
    other[2].softcap = 20, other[2].v.stride[1] += 1;
    static const char *const reasons[] = {"k: a stride is not a multiple of 16 bytes",
                                          "k.stride[0] is 307202, not made of whole 16 bytes",
                                          "v: a stride is not a multiple of 16 bytes"};
    for (int i = 0; i < 3; i++) {
        const fa_cuda_plan plan = plan_of(&other[i], &devices[H200]);
        CHECK(strcmp(plan.family->name, "tf32") == 0, "%d: %s", i, name_of(&plan));
        CHECK(strstr(plan.passed_over, reasons[i]), "%d: %s", i, plan.passed_over);
        expect_refusal(&other[i], &devices[H200], "tf32_sm90", reasons[i]);
    }
    fa_problem p = make_tf32(8, 300, 128);
    p.batch_invariant = true;
    p.k.stride[0] += 4; /* 16 bytes */
    expect_variant(&p, &devices[H200], FA_VARIANT_forward_tf32_sm90_d128_two);
    expect_refusal(&p, &devices[A100], "tf32_sm90", "expected 9.0");
}

/* The kernels for float32 have every option, in variants of their own, and every scale. */
static void test_float32_options(fa_precision precision, const char *family, const int *variants,
                                 int count)
{
    static const int64_t dims[] = {36, 128, 132, 196, 260, 388};
    static float slopes[8];
    for (int i = 0; i < count; i++) {
        fa_problem other[8];
        for (int n = 0; n < 8; n++) {
            other[n] = make_tf32(8, 1000, dims[i]);
            other[n].precision = precision;
        }
        other[0].softcap = 20;
        other[1].scale = -0.1f;
        other[2].scale = 0;
        other[3].alibi_slopes = slopes;
        other[4].bias.data = (char *)slopes;
        other[5].bias = other[6].bias = other[5].q;
        other[5].bias.data = other[6].bias.data = (char *)slopes;
        /* TMA could load it, but these kernels do not support it. */
        other[6].bias.dtype = FA_FLOAT16;
        other[6].mask.data = (char *)slopes;
        other[7].dropout_threshold = 1;
        for (int n = 0; n < 8; n++) {
            const fa_cuda_plan plan = plan_of(&other[n], &devices[H200]);
            /* For a bias there may be a variant of its own, before the one for all options. */
            const fa_variant *v = &fa_variants[variants[i]];
            const int expected = variants[i] - (other[n].bias.data && v[-1].for_bias &&
                                                v[-1].head_dim == v->head_dim);
            CHECK(plan.launches[0].variant == expected && !plan.launches[0].sm90.bias_mapped,
                  "%d: %s", n, name_of(&plan));
            other[n].attention_chunk = 100;
            expect_refusal(&other[n], &devices[H200], family, "attention_chunk is 100");
        }
    }
    fa_problem p = make_tf32(8, 1000, 128);
    p.precision = precision;
    p.scale = 1e-9f; /* by itself it is not an option */
    p.lse = slopes;
    CHECK(fa_variants[plan_of(&p, &devices[H200]).launches[0].variant].options == 0, "%s", family);
}

static void test_options_of_float32(void)
{
    static const int three[] = {
        FA_VARIANT_forward_f16x3_sm90_general64,  FA_VARIANT_forward_f16x3_sm90_general128,
        FA_VARIANT_forward_f16x3_sm90_general192, FA_VARIANT_forward_f16x3_sm90_general256,
        FA_VARIANT_forward_f16x3_sm90_general384, FA_VARIANT_forward_f16x3_sm90_general512};
    static const int tf32[] = {
        FA_VARIANT_forward_tf32_sm90_general64,  FA_VARIANT_forward_tf32_sm90_general128,
        FA_VARIANT_forward_tf32_sm90_general192, FA_VARIANT_forward_tf32_sm90_general256,
        FA_VARIANT_forward_tf32_sm90_general384, FA_VARIANT_forward_tf32_sm90_general512};
    test_float32_options(FA_PRECISION_FLOAT32, "f16x3_sm90", three, 6);
    test_float32_options(FA_PRECISION_TF32, "tf32_sm90", tf32, 6);
}

/* float32 with float32's errors, for heads that a cluster of two blocks shares. */
static void test_f16x3_clusters(void)
{
    static const struct {
        int64_t d, d_v;
        int variant;
    } cases[] = {{256, 256, FA_VARIANT_forward_f16x3_sm90_d256_one},
                 {260, 260, FA_VARIANT_forward_f16x3_sm90_d288},
                 {288, 64, FA_VARIANT_forward_f16x3_sm90_d288},
                 {292, 260, FA_VARIANT_forward_f16x3_sm90_d320},
                 {64, 320, FA_VARIANT_forward_f16x3_sm90_d320},
                 {324, 264, FA_VARIANT_forward_f16x3_sm90_d384},
                 {384, 64, FA_VARIANT_forward_f16x3_sm90_d384},
                 {388, 388, FA_VARIANT_forward_f16x3_sm90_d512},
                 {512, 512, FA_VARIANT_forward_f16x3_sm90_d512}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_mapped(8, 300, cases[i].d, cases[i].d_v);
        set_dtype(&p, FA_FLOAT32);
        const fa_cuda_plan plan = plan_of(&p, &devices[H200]);
        const fa_cuda_plan_launch *l = &plan.launches[0];
        const int64_t all = has_parts(&plan) ? l->sm90.split.first_task[1] : l->tasks,
                      most = devices[H200].multiprocessors / (int64_t)l->cluster;
        const uint32_t tasks = (uint32_t)(all < most ? all : most);
        CHECK(whole_family(&plan) == &fa_cuda_forward_f16x3_sm90 &&
                  l->variant == cases[i].variant && l->grid == l->cluster * tasks &&
                  l->cluster == (i ? 2 : 1),
              "case %zu: %s", i, name_of(&plan));
        p.precision = FA_PRECISION_TF32; /* the same clusters, with high parts alone */
        const fa_cuda_plan one = plan_by(&fa_cuda_forward_tf32_sm90, &p, &devices[H200]);
        CHECK(fa_variants[one.launches[0].variant].head_dim ==
                      fa_variants[cases[i].variant].head_dim &&
                  one.launches[0].cluster == l->cluster,
              "case %zu in tf32: %s", i, name_of(&one));
    }
    fa_problem p = make_mapped(8, 300, 516, 512);
    set_dtype(&p, FA_FLOAT32);
    expect_refusal(&p, &devices[H200], "f16x3_sm90", "the head dims are 516 and 512");
}

/* The family of split keys says why it refuses. */
static void expect_unsplit(const fa_problem *p, const char *reason)
{
    fa_cuda_plan plan;
    char why[320] = "";
    const fa_cuda_family *family = &fa_cuda_forward_split_tf32_sm90;
    fa_cuda_plan_begin(&devices[H200], family, &plan);
    CHECK(!family->plan(p, &devices[H200], &plan, why, sizeof why) && strstr(why, reason), "%s",
          why);
    plan = plan_of(p, &devices[H200]);
    CHECK(!has_parts(&plan), "%s", reason);
}

/* Each part of each query tile is a task, once; whole query tiles come first. */
static void check_parts(const fa_cuda_plan *plan, bool by_tiles)
{
    enum { MOST = 4096 };
    static bool seen[MOST];
    const fa_cuda_plan_launch *l = &plan->launches[0];
    const fa_sm90_split *split = &l->sm90.split;
    const int32_t whole = split->first_task[0], all = split->first_task[1];
    memset(seen, 0, sizeof seen);
    for (int32_t task = 0; task < all; task++) {
        const fa_split_task t = fa_find_split_task(split, task);
        const int64_t part = task < whole ? 0 : t.part, at = t.tile * split->parts + part;
        CHECK((t.slot < 0) == (task < whole) && (t.slot < 0 || t.slot == task - whole), "slot %d",
              (int)t.slot);
        CHECK(t.tile >= 0 && t.tile < l->tasks && part < split->parts && at < MOST && !seen[at],
              "task %d is part %lld of tile %lld", (int)task, (long long)part, (long long)t.tile);
        seen[at] = true;
        if (by_tiles) CHECK(task > 0 || t.tile == 0, "the last tile of the first head comes first");
    }
    CHECK(all == whole + (l->tasks - whole) * split->parts, "%d tasks", (int)all);
    CHECK(fa_count_split_parts(split, 0, 64) == 1 && fa_count_split_parts(split, 65, 64) == 2 &&
              fa_count_split_parts(split, 1 << 20, 64) == split->parts,
          "parts of a query tile");
}

/* Keys of float32 are split where work tiles leave multiprocessors idle. */
static void test_split_float32(void)
{
    static const struct {
        int64_t heads, n, d;
        bool causal;
        int parts, whole; /* parts 0: keys are not split */
    } cases[] = {
        {2, 3610, 192, false, 2, 0}, {32, 768, 256, false, 2, 132},  {4, 1625, 384, true, 3, 0},
        {1, 8000, 64, false, 2, 0},  {20, 1073, 256, false, 5, 132}, {132, 256, 128, false, 0, 0},
        {33, 512, 128, false, 0, 0}, {600, 512, 128, true, 0, 0},    {20, 192, 128, false, 0, 0}};
    for (size_t i = 0; i < 2 * sizeof cases / sizeof cases[0]; i++) {
        const bool tf32 = i % 2;
        fa_problem p = make_tf32(cases[i / 2].heads, cases[i / 2].n, cases[i / 2].d);
        p.causal = cases[i / 2].causal;
        if (!tf32) p.precision = FA_PRECISION_FLOAT32;
        const fa_cuda_plan plan = plan_of(&p, &devices[H200]);
        const fa_sm90_split *split = &plan.launches[0].sm90.split;
        if (plan.family == &fa_cuda_forward_tf32_rounded) continue;
        CHECK(has_parts(&plan) == (cases[i / 2].parts > 0), "case %zu: %d launches", i, plan.count);
        if (!has_parts(&plan)) continue;
        CHECK(split->parts >= 2 && split->parts <= FA_SM90_PARTS, "case %zu: %d parts", i,
              (int)split->parts);
        CHECK(tf32 || (split->parts == cases[i / 2].parts &&
                       split->first_task[0] == cases[i / 2].whole),
              "case %zu: %d parts, %d whole tiles", i, (int)split->parts,
              (int)split->first_task[0]);
        CHECK(plan.workspace_bytes >= (size_t)(split->first_task[1] - split->first_task[0]) * 128 *
                                          (size_t)(p.d_v * 4 + 8),
              "case %zu: %zu bytes", i, plan.workspace_bytes);
        check_parts(&plan, p.causal);
        p.batch_invariant = true;
        CHECK(plan_of(&p, &devices[H200]).count == 1, "case %zu: batch-invariant", i);
    }
    fa_problem p = make_tf32(2, 3000, 128);
    p.window_left = 100;
    expect_unsplit(&p, "there is a window");
    p.window_left = -1;
    static const int32_t lengths[1];
    p.seqlens_k = lengths;
    expect_unsplit(&p, "lengths are on the device");
    p.seqlens_k = NULL;
    p.n_k = p.rows_k = 20;
    expect_unsplit(&p, "queries see one key tile");
}

/* Inputs of FA_PRECISION_TF32 are rounded to float16 first where that saves more than it takes. */
static void test_rounded(void)
{
    static const struct {
        int64_t heads, n, d;
        bool causal;
        int variant; /* FA_NO_VARIANT: another family */
    } cases[] = {{16, 4096, 128, false, FA_VARIANT_forward_tf32_rounded_d128},
                 {8, 2048, 256, true, FA_VARIANT_forward_tf32_rounded_d256},
                 {8, 4096, 160, true, FA_VARIANT_forward_tf32_rounded_d192},
                 {20, 2591, 512, true, FA_VARIANT_forward_tf32_rounded_d512},
                 {64, 512, 264, false, FA_VARIANT_forward_tf32_rounded_d320},
                 {4, 1625, 384, true, FA_VARIANT_forward_tf32_rounded_d384},
                 {96, 256, 128, false, FA_NO_VARIANT},
                 {20, 192, 512, true, FA_NO_VARIANT},
                 {16, 8192, 64, false, FA_NO_VARIANT},
                 {16, 1500, 128, false, FA_NO_VARIANT}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_tf32(cases[i].heads, cases[i].n, cases[i].d);
        p.causal = cases[i].causal;
        const fa_cuda_plan plan = plan_of(&p, &devices[H200]);
        const bool rounded = plan.family == &fa_cuda_forward_tf32_rounded;
        CHECK(rounded == (cases[i].variant >= 0), "case %zu: %s", i, name_of(&plan));
        p.seqlens_k = (const int32_t[]){1};
        CHECK(plan_of(&p, &devices[H200]).family != &fa_cuda_forward_tf32_rounded,
              "case %zu: lengths on the device", i);
        p.seqlens_k = NULL;
        p.precision = FA_PRECISION_FLOAT32;
        CHECK(plan_of(&p, &devices[H200]).family != &fa_cuda_forward_tf32_rounded,
              "case %zu: another precision", i);
        if (!rounded) continue;
        const size_t halves = (size_t)(3 * 2 * p.heads_q * p.rows_q * p.d);
        CHECK(plan.count == 3 && plan.launches[2].variant == cases[i].variant &&
                  plan.workspace_bytes >= halves,
              "case %zu: %d launches, %zu bytes", i, plan.count, plan.workspace_bytes);
    }
    /* A batch does not change the family of an item. */
    for (int64_t n = 100; n < 4000; n += 300) {
        fa_problem one = make_tf32(1, n, 128), many = make_tf32(500, n, 128);
        one.batch_invariant = many.batch_invariant = true;
        CHECK((plan_of(&one, &devices[H200]).family == &fa_cuda_forward_tf32_rounded) ==
                  (plan_of(&many, &devices[H200]).family == &fa_cuda_forward_tf32_rounded),
              "n %lld", (long long)n);
    }
}

/* Few short rows have work tiles of one consumer, if each has a multiprocessor for itself. */
static void test_one_consumer(void)
{
    static const struct {
        int64_t heads, n, d;
        int variant;
    } cases[] = {{40, 192, 128, FA_VARIANT_forward_f16x3_sm90_d128_one},
                 {20, 256, 192, FA_VARIANT_forward_f16x3_sm90_d192_one},
                 {16, 384, 256, FA_VARIANT_forward_f16x3_sm90_d256_one},
                 {45, 192, 128, FA_VARIANT_forward_f16x3_sm90_d128},
                 {2, 700, 128, FA_VARIANT_forward_f16x3_sm90_d128}};
    static const int32_t lengths[1];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_tf32(cases[i].heads, cases[i].n, cases[i].d);
        p.precision = FA_PRECISION_FLOAT32;
        const fa_cuda_plan plan = plan_of(&p, &devices[H200]);
        CHECK(plan.launches[0].variant == cases[i].variant, "case %zu: %s", i, name_of(&plan));
        p.seqlens_k = lengths; /* the longest sequence says nothing about the others */
        CHECK(fa_variants[plan_of(&p, &devices[H200]).launches[0].variant].consumers == 2,
              "case %zu: lengths", i);
        p.seqlens_k = NULL;
        p.causal = p.batch_invariant = true;
        p.window_left = 20; /* the first key of a query tile depends on how many queries it has */
        CHECK(fa_variants[plan_of(&p, &devices[H200]).launches[0].variant].consumers == 2,
              "case %zu: invariant", i);
    }
}

/* For head dims to 128, few queries use two consumers. */
static void test_tf32_sm90_variants(void)
{
    static const int32_t cu[5] = {0};
    static const struct {
        int64_t n, d;
        bool causal, packed;
        int variant;
    } cases[] = {{1024, 64, false, false, FA_VARIANT_forward_tf32_sm90_d64_two},
                 {1152, 64, false, false, FA_VARIANT_forward_tf32_sm90_d64},
                 {1152, 64, true, false, FA_VARIANT_forward_tf32_sm90_d64_two},
                 {2304, 64, true, false, FA_VARIANT_forward_tf32_sm90_d64},
                 {300, 64, false, true, FA_VARIANT_forward_tf32_sm90_d64},
                 {1024, 68, false, false, FA_VARIANT_forward_tf32_sm90_d128_two},
                 {1152, 128, false, false, FA_VARIANT_forward_tf32_sm90_d128},
                 {1280, 128, false, false, FA_VARIANT_forward_tf32_sm90_d128_two},
                 {300, 132, false, false, FA_VARIANT_forward_tf32_sm90_d192},
                 {300, 196, false, false, FA_VARIANT_forward_tf32_sm90_d256},
                 {4096, 256, true, false, FA_VARIANT_forward_tf32_sm90_d256}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_tf32(3, cases[i].n, cases[i].d);
        p.causal = cases[i].causal;
        if (cases[i].packed) p.cu_seqlens_q = p.cu_seqlens_k = cu;
        const fa_cuda_plan plan = plan_by(&fa_cuda_forward_tf32_sm90, &p, &devices[H200]);
        CHECK(plan.launches[0].variant == cases[i].variant, "case %zu: %s", i, name_of(&plan));
    }
}

/* A requested family computes the problem or gives the reason why not; no other replaces it. */
static void test_asked(void)
{
    fa_problem p = make_problem(1, 1, 100, 64, 64);
    fa_cuda_plan plan;
    char why[320] = "";
    CHECK(!fa_cuda_find_family("sm81") && !fa_cuda_find_family(""), "a family that is none");
    expect_refusal(&p, &devices[H200], "sm80", "q.dtype is float32");
    set_dtype(&p, FA_BFLOAT16);
    expect_refusal(&p, &devices[H200], "sm75", "q.dtype is bfloat16");
    expect_refusal(&p, &devices[T4], "sm80", "has architecture 7.5: expected 8.0 or later");
    p.out.dtype = FA_FLOAT32;
    expect_refusal(&p, &devices[H200], "sm80", "out.dtype is float32");
    set_dtype(&p, FA_FLOAT16);
    p.n_k = 1LL << 31;
    expect_refusal(&p, &devices[H200], "sm80", "k.shape[1] is 2147483648");
    p.n_k = 100;
    p.d = 300;
    expect_refusal(&p, &devices[H200], "sm75", "the head dim is 300, above 256");
    p.d = 64;
    for (int i = 0; i < 2; i++) {
        const char *name = i ? "simt" : "sm75";
        const bool fine = fa_cuda_plan_make(&p, &devices[H200], fa_cuda_find_family(name), &plan,
                                            why, sizeof why);
        CHECK(fine && strstr(name_of(&plan), name), "%s: %s", name, why);
    }
}

/* A decode problem of the table in docs/kernels/decode.md. */
static fa_problem make_decode(int64_t batch, int64_t heads_q, int64_t heads_kv, int64_t n_k,
                              int64_t d)
{
    fa_problem p = make_problem(batch, heads_q, 1, d, d);
    set_dtype(&p, FA_BFLOAT16);
    p.pass = FA_PASS_DECODE;
    p.heads_kv = heads_kv;
    p.n_k = p.rows_k = n_k;
    return p;
}

static fa_cuda_plan asked_plan(const fa_problem *p, const fa_cuda_device *device)
{
    return plan_by(&fa_cuda_decode, p, device);
}

/* The decode kernels compute few queries; other families compute what they do not support. */
static void test_decode_refusals(void)
{
    static float slopes[8];
    fa_problem p = make_decode(1, 32, 8, 8192, 128);
    fa_cuda_plan plan;
    CHECK(fa_cuda_find_family("decode") == &fa_cuda_decode, "no family decode");
    CHECK(plan_of(&p, &devices[H200]).family == &fa_cuda_decode, "on an H200");
    CHECK(plan_of(&p, &devices[A100]).family == &fa_cuda_decode, "on an A100");
    CHECK(plan_of(&p, &devices[T4]).family != &fa_cuda_decode, "on a T4");
    expect_refusal(&p, &devices[T4], "decode", "has architecture 7.5: expected 8.0 or later");
    fa_problem other[9] = {p, p, p, p, p, p, p, p, p};
    other[0].dropout_threshold = 1;
    other[1].d = 257;
    set_dtype(&other[2], FA_FLOAT32);
    other[3].n_q = other[3].rows_q = 33;
    other[4].pass = FA_PASS_FORWARD, other[4].n_q = other[4].rows_q = 17;
    other[5].d = 192, other[5].alibi_slopes = slopes;
    other[6].d_v = 130, other[6].bias.data = (char *)slopes;
    other[7].d_v = 130, other[7].mask.data = (char *)slopes;
    other[8].n_k = 1LL << 31;
    static const char *const reasons[] = {
        "options.dropout_p is set",
        "the head dim is 257, above 256",
        "q.dtype is float32",
        "q has 33 queries a sequence and 4 heads for each of k: expected at most 128 in all",
        "q has 17 queries a sequence and 4 heads for each of k: expected at most 32 in all",
        "the head dim is 192 with options.alibi_slopes, above 128",
        "the head dim is 130 with options.bias, above 128",
        "the head dim is 130 with options.mask, above 128",
        "k.shape[1] is 2147483648"};
    for (int i = 0; i < 9; i++) {
        char text[300];
        snprintf(text, sizeof text, "; not decode%s: %s", i >= 5 && i <= 7 ? "" : "_sm90",
                 reasons[i]);
        plan = plan_of(&other[i], &devices[H200]);
        CHECK(plan.family != &fa_cuda_decode && plan.family != &fa_cuda_decode_sm90, "%d: decode",
              i);
        if (i == 4) CHECK(!strstr(plan.passed_over, "decode"), "words: %s", plan.passed_over);
        else CHECK(strstr(plan.passed_over, text), "%d: %s", i, plan.passed_over);
        expect_refusal(&other[i], &devices[H200], "decode", reasons[i]);
    }
    other[4].n_q = other[4].rows_q = 8;
    CHECK(plan_of(&other[4], &devices[H200]).family == &fa_cuda_decode, "8 queries of 4 heads");
}

/* Keys and values of 8 bits, both of one type, with 16-bit queries. */
static void test_decode_bytes(void)
{
    static const struct {
        fa_dtype q, cache;
        int64_t heads_q, d;
        int variant;
    } cases[] = {
        {FA_BFLOAT16, FA_FLOAT8_E4M3, 32, 128, FA_VARIANT_decode_sm80_d128_e4m3},
        {FA_FLOAT16, FA_FLOAT8_E4M3, 32, 40, FA_VARIANT_decode_sm80_d64_e4m3},
        {FA_FLOAT16, FA_FLOAT8_E4M3, 136, 128, FA_VARIANT_decode_sm80_d128_e4m3_rows32},
        {FA_BFLOAT16, FA_INT8, 32, 128, FA_VARIANT_decode_sm80_d128_int8},
        {FA_FLOAT16, FA_INT8, 32, 64, FA_VARIANT_decode_sm80_d64_int8},
        {FA_BFLOAT16, FA_INT8, 136, 128, FA_VARIANT_decode_sm80_d128_int8_rows32},
        {FA_BFLOAT16, FA_INT8, 32, 129, FA_VARIANT_decode_sm80_d256_int8},
        {FA_FLOAT16, FA_FLOAT8_E4M3, 32, 256, FA_VARIANT_decode_sm80_d256_e4m3},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_decode(16, cases[i].heads_q, 8, 8192, cases[i].d);
        p.q.dtype = p.out.dtype = cases[i].q;
        p.k.dtype = p.v.dtype = cases[i].cache;
        const fa_cuda_plan hopper = plan_of(&p, &devices[H200]),
                           ampere = plan_of(&p, &devices[A100]);
        CHECK(hopper.launches[0].variant == cases[i].variant, "case %d: %s", (int)i,
              name_of(&hopper));
        CHECK(ampere.launches[0].variant == cases[i].variant, "case %d: %s", (int)i,
              name_of(&ampere));
        p.v.dtype = cases[i].cache == FA_INT8 ? FA_FLOAT8_E4M3 : FA_INT8;
        expect_refusal(&p, &devices[H200], "decode",
                       cases[i].cache == FA_INT8 ? "v.dtype is float8_e4m3" : "v.dtype is int8");
        p.v.dtype = cases[i].cache;
        p.q.dtype = FA_FLOAT32;
        expect_refusal(&p, &devices[H200], "decode", "q.dtype is float32");
    }
}

/* Values that are the first columns of keys, and those that are not. */
static void test_decode_latent(void)
{
    static char memory[16];
    fa_problem p = make_decode(32, 16, 1, 8192, 576);
    p.d_v = 512;
    p.k.data = p.v.data = memory;
    p.k.stride[1] = p.v.stride[1] = 576;
    p.k.stride[0] = p.v.stride[0] = 8192 * 576;
    p.k.stride[2] = p.v.stride[2] = 576;
    p.k.stride[3] = p.v.stride[3] = 1;
    if ((uintptr_t)memory % 16 != 0) p.k.data = p.v.data = memory + 16 - (uintptr_t)memory % 16;
    fa_cuda_plan plan = plan_by(&fa_cuda_decode, &p, &devices[H200]);
    const fa_cuda_plan_launch *l = &plan.launches[0];
    CHECK(l->variant == FA_VARIANT_decode_sm80_latent_bf16 && l->decode.parts == 4, "%s, %d parts",
          name_of(&plan), (int)l->decode.parts);
    CHECK(l->workspace_bytes == (size_t)32 * 4 * 16 * (512 + 4) * 4, "%zu bytes",
          l->workspace_bytes);
    CHECK(plan_of(&p, &devices[A100]).family != &fa_cuda_decode, "on an A100");
    p.v.stride[2] = 512; /* of the only head */
    plan = plan_by(&fa_cuda_decode, &p, &devices[H200]);
    CHECK(plan.launches[0].variant == FA_VARIANT_decode_sm80_latent_bf16, "%s", name_of(&plan));
    p.d = p.d_v = 512; /* keys are their own values */
    plan = plan_by(&fa_cuda_decode, &p, &devices[H200]);
    CHECK(plan.launches[0].variant == FA_VARIANT_decode_sm80_latent_bf16, "%s", name_of(&plan));
    p.d = 576;
    set_dtype(&p, FA_FLOAT16);
    plan = plan_by(&fa_cuda_decode, &p, &devices[H200]);
    CHECK(plan.launches[0].variant == FA_VARIANT_decode_sm80_latent_f16, "%s", name_of(&plan));
    p.block_table = (const int32_t *)(const void *)memory;
    p.rows_k = 12; /* TMA needs pages of a multiple of 8 rows */
    expect_variant(&p, &devices[H200], FA_VARIANT_decode_sm80_latent_f16);
    p.block_table = NULL, p.rows_k = p.n_k;
    fa_problem other[9] = {p, p, p, p, p, p, p, p, p};
    other[0].v.stride[1] = 512;
    other[1].v.data += 16;
    other[2].d_v = 513;
    other[3].d = 577;
    other[4].mask.data = memory;
    other[5].k.dtype = other[5].v.dtype = FA_FLOAT8_E4M3;
    other[6].dropout_threshold = 1;
    other[7].heads_kv = 2;
    other[8].k.stride[1] = other[8].v.stride[1] = 578; /* rows are not aligned */
    static const char *const reasons[] = {
        "the head dim is 576, above 256, and v is not the first columns of k",
        "the head dim is 576, above 256, and v is not the first columns of k",
        "the head dim is 576, above 256;",
        "the head dim is 577, above 256;",
        "the head dim is 576, above 256;",
        "the head dim is 576, above 256;",
        "options.dropout_p is set",
        "the head dim is 576, above 256, and v is not the first columns of k",
        "the head dim is 576, above 256;"};
    for (int i = 0; i < 9; i++) {
        plan = plan_of(&other[i], &devices[H200]);
        CHECK(plan.family != &fa_cuda_decode && strstr(plan.passed_over, reasons[i]), "case %d: %s",
              i, plan.passed_over);
    }
}

/* On Hopper both launches of a mixed batch run at the same time where decode_sm90 has much to read, otherwise there is one launch.
 * On other devices, one follows the other. */
static void test_mixed_beside(const fa_problem *p)
{
    static float slopes[32];
    const fa_cuda_family *beside = &fa_cuda_forward_mixed_beside;
    fa_problem other = *p;
    fa_cuda_plan plan = plan_of(p, &devices[H200]);
    const fa_cuda_plan_launch *few = &plan.launches[0], *many = &plan.launches[1];
    CHECK(plan.family == beside && plan.count == 2, "%s", plan.family->name);
    CHECK(few->variant == FA_VARIANT_decode_sm90_d128_persistent_bf16 &&
              few->decode.most_queries == 8 && few->decode.queries == 2 && few->tiles == 4 &&
              few->tasks == 64 * 8 * 4 && few->decode.parts == 3,
          "%d queries in tiles of %d, %d tasks, %d parts", (int)few->decode.most_queries,
          (int)few->decode.queries, (int)few->tasks, (int)few->decode.parts);
    CHECK(few->grid == 66 && few->threads == 480 && few->overlaps && few->fewest_queries == 0,
          "%u blocks of %u threads", few->grid, few->threads);
    CHECK(few->smem_bytes == FA_DECODE_SM90_SMEM_PERSISTENT(128, 8, 64, 4, 3), "%u bytes",
          few->smem_bytes);
    CHECK(2 * few->smem_bytes > (uint32_t)devices[H200].smem_per_sm, "two on a multiprocessor");
    CHECK(many->variant == FA_VARIANT_forward_sm90_d128_beside_bf16 && many->overlaps &&
              many->fewest_queries == 9,
          "%s", fa_variants[many->variant].name);
    const fa_cuda_plan apart = plan_by(&fa_cuda_forward_mixed, p, &devices[H200]);
    CHECK(many->grid == apart.launches[1].grid && many->tasks == apart.launches[1].tasks &&
              apart.launches[1].overlaps,
          "%u blocks, %u where they follow each other", many->grid, apart.launches[1].grid);
    CHECK(few->workspace_bytes == (size_t)(few->tasks * 3 * 8 * 132) * 4 &&
              plan.workspace_bytes >= few->workspace_bytes,
          "%zu bytes", few->workspace_bytes);
    other.batch = 129; /* more work tiles than can be counted */
    plan = plan_by(beside, &other, &devices[H200]);
    CHECK(plan.family == beside && few->decode.parts == 1 && few->workspace_bytes == 0, "%d parts",
          (int)few->decode.parts);
    other = *p;
    other.batch = 2, other.n_q = other.rows_q = 1 + 2048;
    plan = plan_by(beside, &other, &devices[H200]);
    CHECK(few->decode.parts == 32 && few->grid == 66, "%d parts of at least 256 keys",
          (int)few->decode.parts);
    /* Few pairs of a sequence and a key head for decode_sm90; prompts that are nearly as long as the longest one. */
    other = *p;
    other.batch = 61;
    CHECK(plan_of(&other, &devices[H200]).family == &fa_cuda_forward_split_sm90,
          "few pairs of a sequence and a key head");
    other.batch = 64, other.n_q = other.rows_q = 64 * 257;
    CHECK(plan_of(&other, &devices[H200]).family == &fa_cuda_forward_split_sm90, "long prompts");
    /* Problems that it refuses. */
    fa_cuda_device old = devices[H200];
    old.overlaps = false;
    CHECK(plan_by(beside, p, &old).family == &fa_cuda_forward_split_sm90, "an old driver");
    CHECK(plan_by(beside, p, &devices[A100]).family == &fa_cuda_forward_mixed, "an A100");
    fa_problem refused[6] = {*p, *p, *p, *p, *p, *p};
    refused[0].d = refused[0].d_v = 64;
    refused[1].heads_kv = 2; /* 16 rows */
    refused[2].alibi_slopes = slopes;
    refused[3].batch_invariant = true;
    refused[4].max_q = 8;
    refused[5].rows_k = 8, set_strides(&refused[5].k, 8, 8, 128), refused[5].v = refused[5].k;
    for (int i = 0; i < 6; i++)
        CHECK(plan_by(beside, &refused[i], &devices[H200]).family != beside, "case %d", i);
}

/* Packed queries over a cache: two launches if there may be sequences with few queries and others
 * with many. */
static void test_mixed(void)
{
    static int32_t starts[65], table[65];
    fa_problem p = make_decode(64, 32, 8, 8192, 128);
    p.pass = FA_PASS_FORWARD;
    p.cu_seqlens_q = starts;
    p.seqlens_k = p.block_table = table;
    p.block_table_stride = 128;
    p.blocks_q = 1;
    p.rows_k = 64, p.blocks_k = 8192;
    set_strides(&p.k, 64, 8, 128);
    p.v = p.k;
    p.n_q = p.rows_q = 60 + 4 * 2048;
    p.max_q = 2048;
    set_strides(&p.q, p.rows_q, 32, 128);
    p.out = p.q;
    p.scale = 0.1f;
    const fa_cuda_plan plan = plan_by(&fa_cuda_forward_mixed, &p, &devices[H200]);
    const fa_cuda_plan_launch *few = &plan.launches[0], *many = &plan.launches[1];
    CHECK(plan.family == &fa_cuda_forward_mixed && plan.count == 2, "%s", plan.family->name);
    CHECK(few->variant == FA_VARIANT_decode_sm80_d128_bf16 && few->decode.most_queries == 8 &&
              few->decode.queries == 4 && few->tiles == 2 && few->tasks == 64 * 8 * 2,
          "%d queries in tiles of %d, %d tasks", (int)few->decode.most_queries,
          (int)few->decode.queries, (int)few->tasks);
    CHECK(few->fewest_queries == 0 && many->fewest_queries == 9 &&
              many->variant == FA_VARIANT_forward_sm90_d128_bf16,
          "%s", fa_variants[many->variant].name);
    CHECK(plan.workspace_bytes == few->workspace_bytes, "%zu bytes", plan.workspace_bytes);
    CHECK(plan_of(&p, &devices[A100]).launches[1].variant == FA_VARIANT_forward_sm80_d128_bf16,
          "on an A100");
    fa_problem uniform[6] = {p, p, p, p, p, p};
    uniform[0].max_q = 8;
    uniform[1].cu_seqlens_q = NULL;
    uniform[2].cu_seqlens_k = starts, uniform[2].block_table = NULL;
    uniform[3].batch_invariant = true;
    uniform[4].rows_q = uniform[4].n_q = 64 * 2048 - 2039; /* none has 8 */
    uniform[5].dropout_threshold = 1;
    for (int i = 0; i < 6; i++) {
        const fa_cuda_plan other = plan_of(&uniform[i], &devices[H200]);
        CHECK(other.family != &fa_cuda_forward_mixed && other.count == 1, "case %d", i);
    }
    uniform[4].rows_q--;
    uniform[4].n_q--;
    CHECK(plan_by(&fa_cuda_forward_mixed, &uniform[4], &devices[H200]).family ==
              &fa_cuda_forward_mixed,
          "one may have 8");
    test_mixed_beside(&p);
    expect_refusal(&uniform[1], &devices[H200], "mixed", "sequences are not packed queries");
    expect_refusal(&uniform[5], &devices[H200], "mixed", "options.dropout_p is set");
}

/* Latent attention on Hopper. */
static void test_decode_latent_sm90(void)
{
    static char memory[64];
    static const struct {
        int64_t batch, heads, n_q, keys;
        int32_t tasks, parts, merged_rows;
        uint32_t merging, cluster;
    } cases[] = {{128, 128, 1, 4096, 256, 1, 64, 256, 2}, {128, 128, 2, 4096, 512, 1, 64, 512, 2},
                 {32, 128, 1, 4096, 64, 2, 32, 128, 2},   {1, 128, 1, 8192, 2, 64, 1, 128, 1},
                 {128, 64, 1, 4096, 128, 1, 64, 128, 1},  {1, 16, 1, 100, 1, 1, 64, 1, 1}};
    const fa_cuda_family *family = fa_cuda_find_family("latent_sm90");
    fa_problem p = make_decode(1, 128, 1, 8192, 576);
    p.d_v = 512;
    p.k.data = p.v.data = memory + (48 - (uintptr_t)memory % 32) % 32; /* 16 bytes, not 32 */
    CHECK(family == &fa_cuda_decode_latent_sm90, "no family latent_sm90");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char why[320] = "";
        fa_cuda_plan plan;
        p.batch = p.blocks_q = p.blocks_k = cases[i].batch;
        p.heads_q = cases[i].heads;
        p.n_q = p.rows_q = cases[i].n_q;
        p.n_k = p.rows_k = cases[i].keys;
        set_strides(&p.k, p.n_k, 1, 576);
        p.v = p.k;
        CHECK(fa_cuda_plan_make(&p, &devices[H200], family, &plan, why, sizeof why), "%s", why);
        const fa_cuda_plan_launch *l = &plan.launches[0];
        uint32_t merging = 0;
        const int32_t merged_rows = fa_cuda_merged_rows(l, &merging);
        CHECK(l->variant == FA_VARIANT_decode_latent_sm90_bf16 && l->threads == 512 &&
                  l->smem_bytes == 231424 && l->cluster == cases[i].cluster && l->overlaps,
              "%s", name_of(&plan));
        CHECK(l->tasks == cases[i].tasks && l->decode.parts == cases[i].parts &&
                  l->grid == (uint32_t)(cases[i].tasks * cases[i].parts),
              "case %d: %d work tiles, %d parts", (int)i, (int)l->tasks, (int)l->decode.parts);
        CHECK(merged_rows == cases[i].merged_rows && merging == cases[i].merging,
              "case %d: %d rows, %d blocks", (int)i, (int)merged_rows, (int)merging);
        const bool few = cases[i].heads * cases[i].n_q <= 16; /* decode_sm80 is faster */
        CHECK((plan_of(&p, &devices[H200]).family == family) != few, "case %d unasked", (int)i);
    }
    expect_refusal(&p, &devices[A100], "latent_sm90", "has architecture 8.0: expected 9.0");
    fa_problem other[7] = {p, p, p, p, p, p, p};
    other[0].v.data += 16;
    other[1].mask.data = memory;
    other[2].dropout_threshold = 1;
    other[3].block_table = (const int32_t *)(const void *)memory, other[3].rows_k = 12;
    other[4].k.stride[1] = other[4].v.stride[1] = 0;
    set_dtype(&other[5], FA_FLOAT32);
    other[6].attention_chunk = 64;
    static const char *const reasons[] = {"v is not the first columns of k",
                                          "options.mask is set",
                                          "options.dropout_p is set",
                                          "k.shape[1] is 12, not a multiple of 8 (rows of a page)",
                                          "k: ",
                                          "q.dtype is float32",
                                          "options.attention_chunk is 64"};
    for (int i = 0; i < 7; i++)
        expect_refusal(&other[i], &devices[H200], "latent_sm90", reasons[i]);
}

/* A dry run may have no data. Its result must be sufficient for the call, whose data may be aligned
 * or not. */
static void test_workspace_without_data(void)
{
    static char memory[64];
    char *aligned = memory + (64 - (uintptr_t)memory % 64) % 64;
    fa_problem p = make_decode(32, 128, 1, 4096, 576);
    p.d_v = 512;
    set_strides(&p.k, p.n_k, 1, 576);
    p.v = p.k;
    const fa_cuda_plan dry = plan_of(&p, &devices[H200]);
    p.q.data = aligned;
    p.k.data = p.v.data = aligned;
    const fa_cuda_plan by_tma = plan_of(&p, &devices[H200]);
    p.k.data = p.v.data = aligned + 2;
    const fa_cuda_plan other = plan_of(&p, &devices[H200]);
    CHECK(by_tma.family == &fa_cuda_decode_latent_sm90 && other.family != by_tma.family &&
              dry.family == by_tma.family,
          "%s%s, %s, %s%s", dry.family->name, dry.passed_over, by_tma.family->name,
          other.family->name, other.passed_over);
    CHECK(by_tma.workspace_bytes > 0, "the case shows nothing");
    CHECK(dry.workspace_bytes >= other.workspace_bytes &&
              dry.workspace_bytes >= by_tma.workspace_bytes,
          "%zu bytes without data, %zu and %zu with it", dry.workspace_bytes,
          by_tma.workspace_bytes, other.workspace_bytes);
}

/* Division by a product and a shift. */
static void test_reciprocals(void)
{
    static const int64_t divisors[] = {1,
                                       2,
                                       3,
                                       5,
                                       7,
                                       8,
                                       12,
                                       100,
                                       128,
                                       641,
                                       65535,
                                       65536,
                                       65537,
                                       1000003,
                                       (1 << 30) - 1,
                                       1 << 30,
                                       (1 << 30) + 1,
                                       INT32_MAX};
    for (size_t i = 0; i < sizeof divisors / sizeof divisors[0]; i++) {
        const int64_t b = divisors[i];
        const fa_reciprocal r = fa_reciprocal_of(b);
        for (int64_t n = 0; n < 3000; n++) {
            const int64_t multiple = n < 2000 ? n * b : INT32_MAX - n % 1000;
            for (int64_t a = multiple - 1; a <= multiple + 1; a++)
                if (a >= 0 && a <= INT32_MAX)
                    CHECK(fa_divide_by(a, r) == a / b, "%d / %d", (int)a, (int)b);
        }
    }
}

/* The stages of a launch of decode_sm90, as passed to its kernel. */
static bool encode_nothing(fa_tensor_map *map, const fa_tensor_map_shape *shape,
                           fa_cuda_fault *fault)
{
    (void)shape, (void)fault;
    *map = (fa_tensor_map){{0}};
    return true;
}

static fa_decode_sm90_params params_of(const fa_problem *p, const fa_cuda_plan_launch *l)
{
    fa_decode_sm90_params params;
    fa_cuda_fault fault;
    CHECK(fa_cuda_decode_sm90_params(p, l, encode_nothing, &params, &fault), "no maps");
    return params;
}

/* A decode call, and the expected properties of its launch. */
typedef struct decode_case {
    int64_t batch, heads, heads_kv, n_q, keys, dim;
    int variant;
    int32_t tasks, parts, stages;
} decode_case;

/* Like make_decode, with keys and values that are aligned and contiguous. cache: their type. */
static fa_problem make_cached(int64_t batch, int64_t heads, int64_t heads_kv, int64_t keys,
                              int64_t dim, fa_dtype cache)
{
    static char memory[64];
    fa_problem p = make_decode(batch, heads, heads_kv, keys, dim);
    p.k.data = memory + (16 - (uintptr_t)memory % 16) % 16;
    p.k.dtype = cache;
    set_strides(&p.k, p.n_k, p.heads_kv, p.d);
    p.v = p.k;
    return p;
}

static fa_problem problem_of(const decode_case *x, fa_dtype cache)
{
    fa_problem p = make_cached(x->batch, x->heads, x->heads_kv, x->keys, x->dim, cache);
    p.n_q = p.rows_q = x->n_q;
    return p;
}

/* box_rows: keys of a box of TMA. */
static void check_decode_sm90(const fa_problem *p, const decode_case *x, int box_rows, int number)
{
    char why[320] = "";
    fa_cuda_plan plan;
    CHECK(fa_cuda_plan_make(p, &devices[H200], &fa_cuda_decode_sm90, &plan, why, sizeof why), "%s",
          why);
    const fa_cuda_plan_launch *l = &plan.launches[0];
    const fa_decode_sm90_params params = params_of(p, l);
    CHECK(l->variant == x->variant && l->threads == FA_DECODE_SM90_THREADS(0), "case %d: %s",
          number, name_of(&plan));
    CHECK(l->tasks == x->tasks && l->decode.parts == x->parts && l->decode.whole == 0,
          "case %d: %d work tiles, %d parts", number, (int)l->tasks, (int)l->decode.parts);
    CHECK(params.stages == x->stages && params.box_rows == box_rows,
          "case %d: %d stages, boxes of %d rows", number, (int)params.stages, (int)params.box_rows);
    CHECK(plan_of(p, &devices[H200]).family == &fa_cuda_decode_sm90, "case %d unasked", number);
}

/* Whole rounds of work tiles stay whole if the last round is to be cut. The second launch has no more blocks for them. */
static void test_decode_sm90_whole(void)
{
    static const struct {
        int64_t batch, heads, heads_kv, keys, dim, tasks, whole, parts, merge_blocks;
    } cases[] = {{36, 32, 8, 3000, 128, 288, 264, 8, 288},
                 {40, 32, 8, 4096, 128, 320, 132, 2, 320},
                 {25, 64, 8, 13625, 64, 200, 0, 2, 200},
                 {52, 40, 8, 585, 128, 416, 0, 1, 416},
                 {79, 56, 8, 5059, 128, 632, 528, 3, 528 + 104 * 2},
                 {75, 32, 8, 1500, 256, 600, 528, 4, 528 + 72 * 2},
                 {55, 64, 8, 1083, 128, 440, 0, 1, 440 * 2},
                 {100, 32, 8, 3000, 128, 800, 0, 1, 800}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_cached(cases[i].batch, cases[i].heads, cases[i].heads_kv, cases[i].keys,
                                   cases[i].dim, FA_BFLOAT16);
        p.pass = FA_PASS_FORWARD;
        p.n_q = p.rows_q = 1;
        const fa_cuda_plan plan = plan_by(&fa_cuda_decode_sm90, &p, &devices[H200]);
        const fa_cuda_plan_launch *l = &plan.launches[0];
        const int64_t cut = cases[i].tasks - cases[i].whole,
                      rows = cases[i].heads / cases[i].heads_kv;
        CHECK(l->tasks == cases[i].tasks && l->decode.whole == cases[i].whole &&
                  l->decode.parts == cases[i].parts,
              "case %d: %d of %d work tiles whole, %d parts", (int)i, (int)l->decode.whole,
              (int)l->tasks, (int)l->decode.parts);
        CHECK(l->grid == cases[i].whole + cut * cases[i].parts, "case %d: %u blocks", (int)i,
              l->grid);
        CHECK(fa_cuda_decode_merge_launch(l).grid == cases[i].merge_blocks,
              "case %d: %u blocks merge", (int)i, fa_cuda_decode_merge_launch(l).grid);
        CHECK(plan.workspace_bytes ==
                  (cases[i].parts > 1
                       ? (size_t)(cut * cases[i].parts * rows * (cases[i].dim + 4)) * 4
                       : 0),
              "case %d: %zu bytes of workspace", (int)i, plan.workspace_bytes);
        const int64_t tiles = (cases[i].keys + l->tile_k - 1) / l->tile_k;
        CHECK(cases[i].parts == 1 || l->decode.least * (cases[i].parts - 1) < tiles,
              "case %d: parts of %d of %d key tiles", (int)i, (int)l->decode.least, (int)tiles);
        p.batch_invariant = true;
        CHECK(plan_by(&fa_cuda_decode_sm90, &p, &devices[H200]).launches[0].decode.whole == 0,
              "case %d: batch-invariant", (int)i);
    }
}

/* Whole work tiles that are one uneven round of blocks have the device alone. And what all work tiles have in common, if the host
 * knows all lengths. */
static void test_decode_sm90_common(void)
{
    static char memory[64];
    static const struct {
        int64_t batch, heads, heads_kv, keys, dim;
        bool alone;
    } cases[] = {{28, 8, 8, 2221, 64, true},    {28, 48, 8, 2221, 64, true},
                 {28, 96, 8, 2221, 64, false},  {16, 32, 8, 8192, 128, false},
                 {33, 32, 8, 2000, 128, false}, {25, 64, 8, 13625, 64, false}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_cached(cases[i].batch, cases[i].heads, cases[i].heads_kv, cases[i].keys,
                                   cases[i].dim, FA_BFLOAT16);
        fa_cuda_plan plan = plan_by(&fa_cuda_decode_sm90, &p, &devices[H200]);
        fa_decode_sm90_params params = params_of(&p, &plan.launches[0]);
        const int32_t tile = plan.launches[0].tile_k;
        CHECK(params.alone == cases[i].alone, "case %d: alone %d, %d parts", (int)i, params.alone,
              (int)plan.launches[0].decode.parts);
        const fa_decode_common all = params.common;
        CHECK(
            all.from == 0 && all.to == cases[i].keys && all.all_from == 0 &&
                all.all_to == cases[i].keys && all.start == 0 &&
                all.tiles == (cases[i].keys + tile - 1) / tile &&
                (all.parts - 1) * all.per_part < all.tiles && all.parts * all.per_part >= all.tiles,
            "case %d: %d parts of %d of %d key tiles", (int)i, all.parts, all.per_part, all.tiles);
        p.causal = true, p.window_left = 299;
        plan = plan_by(&fa_cuda_decode_sm90, &p, &devices[H200]);
        params = params_of(&p, &plan.launches[0]);
        CHECK(params.common.from == cases[i].keys - 300 && params.common.start % tile == 0 &&
                  params.common.start <= params.common.from &&
                  params.common.start + tile > params.common.from,
              "case %d: keys %d to %d", (int)i, params.common.from, params.common.to);
        p.seqlens_k = (const int32_t *)(const void *)memory;
        plan = plan_by(&fa_cuda_decode_sm90, &p, &devices[H200]);
        params = params_of(&p, &plan.launches[0]);
        CHECK(params.common.tiles == 0, "case %d: lengths of their own", (int)i);
    }
}

/* Parts of decode_sm90 are merged by a second launch if that takes more than one turn of a block's threads, and all blocks run
 * at once. Its blocks share the rows of a work tile. */
static void test_decode_sm90_merge(void)
{
    static const struct {
        int64_t batch, heads, heads_kv, n_q, keys, dim;
        bool apart;
        int64_t tasks, parts, merge_blocks; /* for a work tile */
    } cases[] = {
        {1, 32, 8, 1, 8192, 128, false, 8, 16, 1},   {1, 64, 8, 1, 8192, 128, true, 8, 16, 2},
        {1, 32, 8, 8, 8192, 128, true, 8, 32, 7},    {64, 32, 8, 8, 8192, 128, false, 512, 1, 7},
        {4, 32, 8, 8, 8192, 128, true, 32, 8, 7},    {16, 16, 2, 1, 16384, 256, true, 32, 4, 4},
        {4, 16, 4, 5, 730, 256, true, 16, 8, 8},     {2, 16, 4, 14, 6946, 128, true, 16, 16, 7},
        {4, 32, 8, 8, 256, 128, false, 32, 1, 7},    {4, 32, 8, 8, 64, 128, false, 32, 1, 7},
        {19, 32, 8, 1, 8192, 128, false, 152, 2, 1}, {37, 32, 8, 1, 8192, 128, false, 296, 8, 1},
        {40, 16, 2, 1, 8000, 256, false, 80, 1, 4},  {16, 32, 8, 1, 8192, 128, false, 128, 1, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_cached(cases[i].batch, cases[i].heads, cases[i].heads_kv, cases[i].keys,
                                   cases[i].dim, FA_BFLOAT16);
        p.pass = FA_PASS_FORWARD;
        p.n_q = p.rows_q = cases[i].n_q;
        const fa_cuda_plan plan = plan_of(&p, &devices[H200]);
        const fa_cuda_plan_launch *l = &plan.launches[0];
        CHECK(plan.family == &fa_cuda_decode_sm90 && plan.count == 1, "case %d: %s", (int)i,
              name_of(&plan));
        CHECK(l->tasks == cases[i].tasks && l->decode.parts == cases[i].parts,
              "case %d: %d work tiles, %d parts", (int)i, (int)l->tasks, (int)l->decode.parts);
        CHECK(l->decode.merges_apart == cases[i].apart, "case %d: merges", (int)i);
        CHECK(fa_cuda_decode_merge_launch(l).grid == cases[i].tasks * cases[i].merge_blocks,
              "case %d: %u blocks merge", (int)i, fa_cuda_decode_merge_launch(l).grid);
        p.batch_invariant = true; /* then the family must not depend on the batch */
        const bool few = cases[i].heads / cases[i].heads_kv * cases[i].n_q <= 32;
        CHECK((plan_of(&p, &devices[H200]).family == &fa_cuda_decode_sm90) == few,
              "case %d: batch-invariant", (int)i);
    }
}

/* Few queries over many keys on Hopper, by TMA. */
static void test_decode_sm90(void)
{
    static char memory[64];
    static const decode_case cases[] = {
        {1, 32, 8, 1, 8192, 128, FA_VARIANT_decode_sm90_d128_bf16, 8, 16, 12},
        {1, 32, 8, 1, 131072, 128, FA_VARIANT_decode_sm90_d128_bf16, 8, 16, 4},
        {16, 32, 8, 1, 8192, 128, FA_VARIANT_decode_sm90_d128_bf16, 128, 1, 4},
        {64, 32, 8, 1, 8192, 128, FA_VARIANT_decode_sm90_d128_bf16, 512, 1, 4},
        {64, 32, 8, 1, 1000, 128, FA_VARIANT_decode_sm90_d128_bf16, 512, 1, 4},
        {16, 16, 2, 1, 16384, 256, FA_VARIANT_decode_sm90_d256_bf16, 32, 4, 12},
        {16, 32, 8, 1, 16384, 64, FA_VARIANT_decode_sm90_d64_bf16, 128, 1, 4},
        {64, 32, 8, 8, 4096, 128, FA_VARIANT_decode_sm90_d128_bf16_rows32, 512, 1, 4},
        {2, 16, 1, 1, 300, 80, FA_VARIANT_decode_sm90_d128_bf16_rows16, 2, 5, 12},
        {64, 16, 2, 2, 4096, 64, FA_VARIANT_decode_sm90_d64_bf16_rows16, 128, 2, 4},
        {64, 17, 1, 1, 4096, 256, FA_VARIANT_decode_sm90_d256_bf16_rows32, 64, 2, 12},
        {32, 16, 4, 3, 4096, 256, FA_VARIANT_decode_sm90_d256_bf16_rows16, 128, 1, 12},
        {28, 16, 4, 3, 4096, 256, FA_VARIANT_decode_sm90_d256_bf16_rows16, 112, 1, 6},
        {64, 8, 4, 1, 4096, 192, FA_VARIANT_decode_sm90_d192_bf16, 256, 1, 6},
        {64, 16, 4, 4, 4096, 160, FA_VARIANT_decode_sm90_d192_bf16_rows16, 256, 1, 6},
        {64, 16, 4, 8, 4096, 192, FA_VARIANT_decode_sm90_d192_bf16_rows32, 256, 1, 5},
        {2, 8, 1, 1, 300, 192, FA_VARIANT_decode_sm90_d256_bf16, 2, 5, 12},
        {1, 8, 8, 1, 1005, 64, FA_VARIANT_decode_sm90_d64_bf16, 8, 8, 12},
        {1, 8, 8, 1, 1300, 64, FA_VARIANT_decode_sm90_d64_bf16, 8, 11, 12},
        {1, 1, 1, 1, 6924, 64, FA_VARIANT_decode_sm90_d64_bf16, 1, 28, 12},
        {1, 1, 1, 1, 10000, 64, FA_VARIANT_decode_sm90_d64_bf16, 1, 40, 12},
        {1, 16, 2, 1, 4096, 256, FA_VARIANT_decode_sm90_d256_bf16, 2, 16, 12},
        {1, 32, 8, 1, 907, 128, FA_VARIANT_decode_sm90_d128_bf16, 8, 15, 12},
        {1, 8, 8, 1, 63, 64, FA_VARIANT_decode_sm90_d64_bf16, 8, 1, 12},
    };
    const fa_cuda_family *family = fa_cuda_find_family("decode_sm90");
    fa_problem p = make_decode(1, 32, 8, 8192, 128);
    CHECK(family == &fa_cuda_decode_sm90, "no family decode_sm90");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        p = problem_of(&cases[i], FA_BFLOAT16);
        check_decode_sm90(&p, &cases[i], fa_variants[cases[i].variant].keys, (int)i);
    }
    for (int64_t batch = 1; batch <= 16; batch *= 16) { /* lengths on the device */
        char why[320] = "";
        fa_cuda_plan plan;
        fa_problem own = make_cached(batch, 32, 8, 8192, 128, FA_BFLOAT16);
        own.seqlens_k = (const int32_t *)(const void *)memory;
        CHECK(fa_cuda_plan_make(&own, &devices[H200], family, &plan, why, sizeof why), "%s", why);
        const fa_cuda_plan_launch *l = &plan.launches[0];
        CHECK(l->decode.parts == (batch == 1 ? 16 : 3) &&
                  l->decode.least == (batch == 1 ? 1 : 43) &&
                  params_of(&own, l).stages == (batch == 1 ? 12 : 4),
              "batch %d: %d parts of %d key tiles at least", (int)batch, (int)l->decode.parts,
              (int)l->decode.least);
        if (batch == 1) continue;
        own.causal =
            true; /* a window leaves all sequences equally many keys, or half of the longest one's do not count */
        for (int64_t window = 512; window <= 4096; window *= 2) {
            own.window_left = window - 1;
            CHECK(fa_cuda_plan_make(&own, &devices[H200], family, &plan, why, sizeof why), "%s",
                  why);
            CHECK(l->decode.parts == 1, "window %d: %d parts", (int)window, (int)l->decode.parts);
        }
        own.window_left = 5000;
        CHECK(fa_cuda_plan_make(&own, &devices[H200], family, &plan, why, sizeof why) &&
                  l->decode.parts == 3,
              "a wide window: %d parts", (int)l->decode.parts);
    }
    p = make_cached(4, 32, 8, 8192, 128, FA_BFLOAT16);
    expect_refusal(&p, &devices[A100], "decode_sm90", "has architecture 8.0: expected 9.0");
    fa_problem other[10] = {p, p, p, p, p, p, p, p, p, p};
    other[0].v.data += 2;
    other[1].mask.data = memory;
    other[2].dropout_threshold = 1;
    other[3].block_table = (const int32_t *)(const void *)memory, other[3].rows_k = 12,
    other[3].d = 100;
    other[4].block_table = (const int32_t *)(const void *)memory, other[4].rows_k = 2,
    other[4].k.stride[1] += 4;
    set_dtype(&other[5], FA_FLOAT32);
    other[6].attention_chunk = 64;
    other[7].v.dtype = FA_FLOAT8_E4M3;
    other[8].n_q = other[8].rows_q = 33;
    other[9].d = 264;
    static const char *const reasons[] = {
        "v: its address is not a multiple of 16 bytes",
        "options.mask is set",
        "options.dropout_p is set",
        "the head dims are 100 and 128: with pages of 12 rows, expected multiples of 8",
        "k: a stride is not a multiple of 16 bytes",
        "q.dtype is float32",
        "options.attention_chunk is 64",
        "v.dtype is float8_e4m3",
        "q has 33 queries a sequence and 4 heads",
        "the head dim is 264, above 256"};
    for (int i = 0; i < 10; i++)
        expect_refusal(&other[i], &devices[H200], "decode_sm90", reasons[i]);
    static const struct {
        int64_t page;
        int32_t box_rows;
    } pages[] = {{16, 16},  {24, 8}, {32, 32}, {48, 16}, {64, 64},
                 {256, 64}, {1, 0},  {8, 0},   {20, 0}}; /* 0: copied */
    for (size_t i = 0; i < sizeof pages / sizeof pages[0]; i++) {
        fa_cuda_plan plan;
        char why[320] = "";
        fa_problem paged = p;
        paged.block_table = (const int32_t *)(const void *)memory;
        paged.rows_k = pages[i].page;
        paged.blocks_k = 1024;
        paged.n_q = paged.rows_q = 3; /* 12 rows */
        CHECK(fa_cuda_plan_make(&paged, &devices[H200], family, &plan, why, sizeof why), "%s", why);
        const fa_cuda_plan_launch *l = &plan.launches[0];
        const bool copied = pages[i].box_rows == 0;
        CHECK(fa_variants[l->variant].copied == copied &&
                  l->threads == FA_DECODE_SM90_THREADS(copied),
              "pages of %d: %s", (int)pages[i].page, name_of(&plan));
        CHECK(copied || params_of(&paged, l).box_rows == pages[i].box_rows, "pages of %d",
              (int)pages[i].page);
    }
    static const struct {
        int64_t batch, page, dim;
        bool copied;
    } few_rows[] = {{64, 16, 128, true},  {64, 24, 64, true}, {64, 32, 64, false},
                    {64, 64, 128, false}, {2, 64, 128, true}, {64, 16, 192, false},
                    {3, 256, 128, false}, {64, 1, 256, true}};
    for (size_t i = 0; i < sizeof few_rows / sizeof few_rows[0]; i++) {
        fa_problem paged =
            make_cached(few_rows[i].batch, 32, 8, 8192, few_rows[i].dim, FA_BFLOAT16);
        paged.block_table = (const int32_t *)(const void *)memory;
        paged.rows_k = few_rows[i].page, paged.blocks_k = 8192;
        const fa_cuda_plan plan = plan_by(family, &paged, &devices[H200]);
        CHECK(fa_variants[plan.launches[0].variant].copied == few_rows[i].copied, "case %d: %s",
              (int)i, name_of(&plan));
    }
}

/* The same for 8-bit caches. */
static void test_decode_sm90_bytes(void)
{
    static char memory[64];
    static const struct {
        fa_dtype cache;
        decode_case x;
    } cases[] = {
        {FA_FLOAT8_E4M3, {1, 32, 8, 1, 8192, 128, FA_VARIANT_decode_sm90_d128_e4m3, 8, 16, 12}},
        {FA_FLOAT8_E4M3, {16, 32, 8, 1, 8192, 128, FA_VARIANT_decode_sm90_d128_e4m3, 128, 2, 6}},
        {FA_FLOAT8_E4M3, {64, 32, 8, 1, 8192, 128, FA_VARIANT_decode_sm90_d128_e4m3, 512, 1, 6}},
        {FA_INT8, {64, 32, 8, 4, 8192, 128, FA_VARIANT_decode_sm90_d128_int8_rows16, 512, 1, 6}},
        {FA_INT8, {16, 16, 2, 1, 16384, 256, FA_VARIANT_decode_sm90_d256_int8, 32, 8, 6}},
        {FA_INT8, {16, 32, 8, 1, 16384, 64, FA_VARIANT_decode_sm90_d128_int8, 128, 2, 6}},
        {FA_FLOAT8_E4M3, {2, 16, 2, 1, 300, 192, FA_VARIANT_decode_sm90_d256_e4m3, 4, 1, 12}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const fa_problem p = problem_of(&cases[i].x, cases[i].cache);
        check_decode_sm90(&p, &cases[i].x, 128, (int)i);
    }
    fa_problem p = make_cached(4, 32, 8, 8192, 128, FA_INT8);
    fa_problem other[5] = {p, p, p, p, p};
    other[0].v.dtype = FA_FLOAT8_E4M3;
    other[1].n_q = other[1].rows_q = 5;
    other[2].n_q = other[2].rows_q = 3, other[2].d = 192;
    other[3].k.stride[1] += 8;
    other[4].alibi_slopes = (const float *)(const void *)memory;
    static const char *const reasons[] = {
        "v.dtype is float8_e4m3",
        "20 query heads and queries share keys of int8: expected at most 16",
        ("12 query heads and queries share keys of int8: expected at most 8 with a head dim above "
         "128"),
        "k: a stride is not a multiple of 16 bytes", "options.alibi_slopes is set"};
    for (int i = 0; i < 5; i++)
        expect_refusal(&other[i], &devices[H200], "decode_sm90", reasons[i]);
    p.block_table = (const int32_t *)(const void *)memory;
    p.rows_k = 12, p.blocks_k = 1024;
    expect_refusal(&p, &devices[H200], "decode_sm90",
                   "k.shape[1] is 12: expected pages of a multiple of 8 rows, 16 or more");
    p.rows_k = 48;
    fa_cuda_plan plan;
    CHECK(fa_cuda_plan_make(&p, &devices[H200], &fa_cuda_decode_sm90, &plan, NULL, 0) &&
              params_of(&p, &plan.launches[0]).box_rows == 16,
          "pages of 48");
}

/* If heads do not share keys, there are enough of them, and keys are few, then Hopper's forward
 * kernel is faster. But the choice must not depend on the batch if results must not, and the
 * environment's choice takes precedence. */
static void test_decode_is_slower(void)
{
    fa_problem p = make_decode(16, 32, 32, 2048, 128), longer = make_decode(16, 32, 32, 8192, 128);
    p.scale = longer.scale = 0.1f;
    set_strides(&p.q, 1, 32, 128);
    set_strides(&p.k, 2048, 32, 128);
    set_strides(&p.v, 2048, 32, 128);
    set_strides(&longer.q, 1, 32, 128);
    set_strides(&longer.k, 8192, 32, 128);
    longer.v = longer.k;
    const fa_cuda_plan plan = plan_of(&p, &devices[H200]);
    CHECK(plan_of(&longer, &devices[H200]).family == &fa_cuda_decode_sm90, "many keys");
    CHECK(
        plan.family == &fa_cuda_forward_sm90 && plan.workspace_bytes == 0 &&
            strstr(plan.passed_over, "; not decode_sm90: 16 sequences with 32 heads of k and of q"),
        "%s%s", name_of(&plan), plan.passed_over);
    CHECK(asked_plan(&p, &devices[H200]).family == &fa_cuda_decode, "not where it is asked for");
    CHECK(plan_of(&p, &devices[A100]).family == &fa_cuda_decode, "on an A100");
    static const int32_t table[16];
    static float slopes[32];
    fa_problem other[6] = {p, p, p, p, p, p};
    other[0].batch = other[0].blocks_q = other[0].blocks_k = 12;
    other[1].heads_kv = 16;
    other[2].batch_invariant = true;
    other[3].block_table = table, other[3].block_table_stride = 1, other[3].rows_k = 8192;
    other[4].alibi_slopes = slopes;
    other[5].k.stride[1] = 0; /* the forward kernel refuses it */
    for (int i = 0; i < 6; i++)
        CHECK(plan_of(&other[i], &devices[H200]).family ==
                  (i < 4 ? &fa_cuda_decode_sm90 : &fa_cuda_decode),
              "case %d", i);
}

/* Packed queries of decode_sm90: work tiles are numbered by sequence if the longest one is known
 * and that needs no more numbers than all rows would. */
static void test_own_tiles(void)
{
    static int32_t starts[65], table[64];
    fa_problem p = make_decode(64, 32, 8, 8192, 128);
    p.pass = FA_PASS_FORWARD;
    p.cu_seqlens_q = starts, p.seqlens_k = p.block_table = table;
    p.block_table_stride = 128;
    p.blocks_q = 1;
    p.rows_k = 64, p.blocks_k = 8192;
    set_strides(&p.k, 64, 8, 128);
    p.v = p.k;
    p.n_q = p.rows_q = 512, p.max_q = 8;
    set_strides(&p.q, p.rows_q, 32, 128);
    p.out = p.q;
    p.scale = 0.1f;
    const struct {
        int64_t max_q, tiles, tasks;
    } cases[] = {{8, 1, 64 * 8}, {9, 2, 2 * 64 * 8}, {17, 130, 130 * 8}, {512, 130, 130 * 8}};
    for (int i = 0; i < 4; i++) {
        p.max_q = cases[i].max_q;
        const fa_cuda_plan plan = plan_by(&fa_cuda_decode_sm90, &p, &devices[H200]);
        const fa_cuda_plan_launch *l = &plan.launches[0];
        CHECK(plan.family == &fa_cuda_decode_sm90 && l->tiles == cases[i].tiles &&
                  l->tasks == cases[i].tasks &&
                  l->decode.most_queries == (cases[i].tiles < 130 ? FA_DECODE_ALL_QUERIES : 0),
              "case %d: %d tiles, %d tasks", i, (int)l->tiles, (int)l->tasks);
    }
    p.max_q = 8;
    p.seqlens_q = table; /* the longest of these: there may be more rows, which must be cleared */
    const fa_cuda_plan plan = plan_by(&fa_cuda_decode_sm90, &p, &devices[H200]);
    CHECK(plan.launches[0].tiles == 130 && plan.launches[0].decode.most_queries == 0,
          "%d tiles with lengths of their own", (int)plan.launches[0].tiles);
    /* Work tiles of 16 rows, unless the longest sequence would have more of these. */
    p.seqlens_q = NULL;
    p.n_q = p.rows_q = 256;
    for (int64_t longest = 4; longest <= 5; longest++) {
        p.max_q = longest;
        const fa_cuda_plan few = plan_by(&fa_cuda_decode_sm90, &p, &devices[H200]);
        CHECK(few.launches[0].variant == (longest == 4 ? FA_VARIANT_decode_sm90_d128_bf16_rows16
                                                       : FA_VARIANT_decode_sm90_d128_bf16_rows32),
              "%d queries at most: %s", (int)longest, name_of(&few));
    }
}

/* Parts and work tiles of the table in docs/kernels/decode.md, on an H200. */
static void test_decode_parts(void)
{
    static const struct {
        int64_t batch, heads_q, heads_kv, n_k, d;
        int variant, tasks, parts, blocks;
    } cases[] = {{1, 32, 8, 8192, 128, FA_VARIANT_decode_sm80_d128_bf16, 8, 32, 3},
                 {1, 32, 8, 131072, 128, FA_VARIANT_decode_sm80_d128_bf16, 8, 49, 3},
                 {16, 32, 8, 8192, 128, FA_VARIANT_decode_sm80_d128_bf16, 128, 3, 3},
                 {64, 32, 8, 8192, 128, FA_VARIANT_decode_sm80_d128_bf16, 512, 1, 2},
                 {16, 32, 32, 8192, 128, FA_VARIANT_decode_sm80_d128_bf16, 512, 1, 2},
                 {128, 64, 8, 2048, 128, FA_VARIANT_decode_sm80_d128_bf16, 1024, 1, 2},
                 {16, 16, 2, 16384, 256, FA_VARIANT_decode_sm80_d256_bf16, 32, 12, 3},
                 {16, 32, 8, 16384, 64, FA_VARIANT_decode_sm80_d64_bf16, 128, 3, 3},
                 {2, 32, 8, 8192, 128, FA_VARIANT_decode_sm80_d128_bf16, 16, 24, 3},
                 {4096, 32, 8, 8192, 128, FA_VARIANT_decode_sm80_d128_bf16, 32768, 1, 3},
                 {1, 32, 8, 100, 128, FA_VARIANT_decode_sm80_d128_bf16, 8, 1, 2},
                 {1, 128, 1, 4096, 128, FA_VARIANT_decode_sm80_d128_bf16_rows32, 4, 16, 2}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const fa_problem p = make_decode(cases[i].batch, cases[i].heads_q, cases[i].heads_kv,
                                         cases[i].n_k, cases[i].d);
        const fa_cuda_plan plan = asked_plan(&p, &devices[H200]);
        const fa_cuda_plan_launch *l = &plan.launches[0];
        const fa_variant *v = &fa_variants[l->variant];
        CHECK(l->variant == cases[i].variant && l->tasks == cases[i].tasks &&
                  l->decode.parts == cases[i].parts,
              "case %d: %s, %lld work tiles, %d parts", (int)i, name_of(&plan), (long long)l->tasks,
              (int)l->decode.parts);
        const int fitting = devices[H200].smem_per_sm / (int)(l->smem_bytes + 1024 + 256);
        CHECK(fitting == cases[i].blocks && (int)l->smem_bytes <= devices[H200].smem_per_block,
              "case %d: %u bytes of shared memory, %d blocks", (int)i, l->smem_bytes, fitting);
        const int64_t rows = l->decode.heads * l->decode.queries;
        CHECK(rows <= v->group_rows && l->decode.heads * l->decode.chunks >= p.heads_q / p.heads_kv,
              "case %d: %d heads of %d tiles, %d queries", (int)i, (int)l->decode.heads,
              (int)l->decode.chunks, (int)l->decode.queries);
        CHECK(l->grid == l->tasks * l->decode.parts, "case %d: %u blocks", (int)i, l->grid);
        CHECK(plan.workspace_bytes ==
                  (l->decode.parts == 1
                       ? 0
                       : (size_t)(l->tasks * l->decode.parts * rows * (v->head_dim + 4)) * 4),
              "case %d: %zu bytes of workspace", (int)i, plan.workspace_bytes);
    }
}

/* Pages need many bytes in flight: as many blocks as fit, always. */
static void test_decode_pages(void)
{
    static const int32_t table[64];
    fa_problem p = make_decode(64, 32, 8, 8192, 128);
    p.block_table = table, p.block_table_stride = 512, p.rows_k = 16, p.blocks_k = 32768;
    const fa_cuda_plan plan = asked_plan(&p, &devices[H200]);
    const fa_cuda_plan_launch *l = &plan.launches[0];
    CHECK(l->decode.parts == 3 &&
              3 * (l->smem_bytes + 1024 + 256) <= (unsigned)devices[H200].smem_per_sm,
          "%d parts, %u bytes of shared memory", (int)l->decode.parts, l->smem_bytes);
}

/* Many sequences are divided nevertheless if one may be long. */
static void test_own_lengths(void)
{
    static const int32_t lengths[4096] = {0};
    fa_problem p = make_decode(4096, 32, 8, 131072, 128);
    CHECK(asked_plan(&p, &devices[H200]).launches[0].decode.parts == 1, "lengths are known");
    p.seqlens_k = lengths;
    CHECK(asked_plan(&p, &devices[H200]).launches[0].decode.parts == 16, "lengths are not");
    p = make_decode(64, 32, 8, 8192, 128);
    const fa_cuda_plan known = asked_plan(&p, &devices[H200]);
    p.seqlens_k = lengths;
    const fa_cuda_plan unknown = asked_plan(&p, &devices[H200]);
    CHECK(unknown.launches[0].decode.parts == known.launches[0].decode.parts &&
              unknown.launches[0].smem_bytes == known.launches[0].smem_bytes,
          "8,192 keys are cut in another way where there may be fewer");
}

/* With FA_BATCH_INVARIANT a sequence is divided in the same places whatever the batch size is. */
static void test_invariant_parts(void)
{
    for (int64_t n_k = 1; n_k <= 1 << 20; n_k = n_k * 3 + 1) {
        fa_problem p = make_decode(1, 32, 8, n_k, 128);
        p.batch_invariant = true;
        const fa_cuda_plan one = asked_plan(&p, &devices[H200]);
        p.batch = p.blocks_q = p.blocks_k = 100;
        const fa_cuda_plan many = asked_plan(&p, &devices[A100]);
        CHECK(one.launches[0].decode.parts == many.launches[0].decode.parts &&
                  one.launches[0].decode.least == many.launches[0].decode.least,
              "%d parts of %lld keys, and %d", (int)one.launches[0].decode.parts, (long long)n_k,
              (int)many.launches[0].decode.parts);
    }
    static const int32_t cu[101] = {0};
    fa_problem p = make_decode(1, 32, 8, 1000, 128);
    p.batch_invariant = true;
    p.cu_seqlens_q = p.cu_seqlens_k = cu;
    p.rows_q = p.n_q = 500; /* of one sequence, or of 100 */
    const fa_cuda_plan one = asked_plan(&p, &devices[H200]);
    p.batch = 100;
    const fa_cuda_plan many = asked_plan(&p, &devices[H200]);
    CHECK(one.family == &fa_cuda_decode && many.family == &fa_cuda_decode &&
              one.launches[0].variant == many.launches[0].variant &&
              one.launches[0].decode.queries == many.launches[0].decode.queries,
          "packed: %s, and %s", name_of(&one), name_of(&many));
    p.pass = FA_PASS_FORWARD;
    CHECK(plan_of(&p, &devices[H200]).family != &fa_cuda_decode, "packed forward");
}

/* The plan is the same if no text is requested. */
static void test_without_words(void)
{
    const int64_t dims[] = {64, 128, 200, 512};
    for (int i = 0; i < DEVICES; i++)
        for (int j = 0; j < 4 * 3; j++) {
            fa_cuda_device device = devices[i];
            device.ordinal = i;
            fa_problem p = make_problem(2, 8, 300, dims[j / 3], dims[j / 3]);
            set_dtype(&p, j % 3 == 2 ? FA_FLOAT32 : j % 3 == 1 ? FA_BFLOAT16 : FA_FLOAT16);
            const fa_cuda_plan worded = plan_of(&p, &device);
            fa_cuda_plan plan;
            memset(&plan, 0x5a, sizeof plan);
            CHECK(fa_cuda_plan_make(&p, &device, NULL, &plan, NULL, 0), "no plan without words");
            CHECK(plan.family == worded.family &&
                      plan.launches[0].variant == worded.launches[0].variant &&
                      plan.launches[0].grid == worded.launches[0].grid &&
                      plan.launches[0].tasks == worded.launches[0].tasks &&
                      plan.launches[0].smem_bytes == worded.launches[0].smem_bytes &&
                      plan.launches[0].threads == worded.launches[0].threads,
                  "%s without words, %s with them", name_of(&plan), name_of(&worded));
            CHECK(plan.passed_over[0] == 0, "words: %s", plan.passed_over);
            CHECK(plan.device == i, "device %d of %d", plan.device, i);
        }
    fa_problem p = make_problem(1, 1, 1, 64, 64);
    fa_cuda_plan plan;
    CHECK(!fa_cuda_plan_make(&p, &devices[H200], fa_cuda_find_family("sm80"), &plan, NULL, 0),
          "float32 on tensor cores");
}

/* A field that is not written would have the value that an earlier call left on the stack. */
static void test_params_are_written(void)
{
    fa_problem p = make_problem(2, 4, 100, 64, 64);
    const fa_cuda_plan plan = plan_of(&p, &devices[A100]);
    fa_attention_params params[2];
    for (int i = 0; i < 2; i++) {
        memset(&params[i], i ? 0x5a : 0, sizeof params[i]);
        fa_cuda_set_params(&p, &plan.launches[0], &params[i]);
    }
    CHECK(memcmp(&params[0], &params[1], sizeof params[0]) == 0, "a field is not written");
}

static void test_text(void)
{
    char text[320];
    fa_problem p = make_problem(2, 4, 100, 64, 64);
    fa_cuda_plan plan = plan_of(&p, &devices[A100]);
    fa_cuda_plan_describe(&p, &devices[A100], &plan, text, sizeof text);
    CHECK(strcmp(text,
                 "cuda forward forward_tf32x3_d64: three tf32 products for each (mma.sync), "
                 "float32 sums, query tile 64, key tile 32, 16 blocks of 128 threads on sm_80; "
                 "not sm80: q.dtype is float32; "
                 "not tf32: options.precision is not FA_PRECISION_TF32") == 0,
          "%s", text);
    p.pass = FA_PASS_DECODE; /* in float32 */
    plan = plan_of(&p, &devices[A100]);
    fa_cuda_plan_describe(&p, &devices[A100], &plan, text, sizeof text);
    CHECK(strstr(text, "cuda decode ") && strstr(text, "keys are not split"), "%s", text);
    p = make_decode(1, 32, 8, 8192, 128);
    plan = plan_of(&p, &devices[H200]);
    fa_cuda_plan_describe(&p, &devices[H200], &plan, text, sizeof text);
    CHECK(strcmp(text,
                 "cuda decode decode_sm80_d128_bf16: bfloat16 products (mma.sync), float32 sums, "
                 "query tile 1, key tile 64, 256 blocks of 128 threads on sm_90, keys in at "
                 "most 32 parts; not decode_sm90: k: an axis is broadcast (its stride is 0)") == 0,
          "%s", text);
}

int main(void)
{
    test_head_dims();
    test_images();
    test_sizes();
    test_packed();
    test_short_rows();
    test_one_round();
    test_query_tiles();
    test_order_of_windows();
    test_packed_shapes();
    test_causal_orders();
    test_packed_shares();
    test_few_taken_tasks();
    test_invariant_sm80();
    test_refusals();
    test_latent();
    test_chunks();
    test_caches();
    test_tensor_cores();
    test_float32();
    test_forms();
    test_shares();
    test_wide();
    test_asked();
    test_decode_refusals();
    test_tf32_sm90_refusals();
    test_tf32_sm90_variants();
    test_options_of_float32();
    test_split_float32();
    test_rounded();
    test_one_consumer();
    test_f16x3_clusters();
    test_decode_bytes();
    test_decode_latent();
    test_tf32x3();
    test_mixed();
    test_decode_latent_sm90();
    test_workspace_without_data();
    test_reciprocals();
    test_decode_sm90_whole();
    test_decode_sm90_common();
    test_decode_sm90_merge();
    test_decode_sm90();
    test_decode_sm90_bytes();
    test_decode_is_slower();
    test_own_tiles();
    test_decode_parts();
    test_decode_pages();
    test_own_lengths();
    test_invariant_parts();
    test_without_words();
    test_params_are_written();
    test_text();
    return test_end();
}
