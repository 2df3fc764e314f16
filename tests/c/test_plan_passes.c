/*
 * The plans of backward, weights and combine, without a GPU: for GPUs from T4 to H200.
 */
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "cuda/family.h"
#include "cuda/passes.h"
#include "flashattn.h"
#include "gpus.h"

static char memory[16];
static const fa_view somewhere = {.data = memory, .stride = {1, 1, 1, 1}};

static fa_problem make_problem(fa_pass pass, int64_t batch, int64_t heads, int64_t n, int64_t d)
{
    return (fa_problem){.pass = pass,
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
                        .d_v = d,
                        .num_weight_rows = n,
                        .window_left = -1,
                        .window_right = -1};
}

static fa_cuda_passes plan_of(const fa_problem *p, const fa_cuda_device *device)
{
    fa_cuda_passes passes;
    char why[320] = "";
    const bool fine = fa_cuda_passes_make(p, device, &passes, why, sizeof why);
    CHECK(fine, "d %lld on %s: %s", (long long)p->d, device->name, why);
    return passes;
}

/* What holds of every step. */
static void check_step(const fa_cuda_step *s, const fa_cuda_device *device)
{
    const fa_variant *v = &fa_variants[s->variant];
    CHECK(strncmp(v->name, v->kernel, strlen(v->kernel)) == 0, "%s: %s", v->name, v->kernel);
    CHECK((int)s->smem_bytes + FA_CUDA_STATIC_SMEM <= device->smem_per_block,
          "%s: %u bytes of shared memory on %s", v->name, s->smem_bytes, device->name);
    CHECK(s->grid <= 2147483647u && (int64_t)s->grid <= s->tasks, "%s: grid %u", v->name, s->grid);
    CHECK((s->grid > 0) == (s->tasks > 0), "%s: grid %u for %lld tasks", v->name, s->grid,
          (long long)s->tasks);
    CHECK(s->threads % 32 == 0 && s->threads > 0 && s->threads <= 1024, "%u threads", s->threads);
}

static void test_head_dims(void)
{
    for (int64_t d = 1; d <= 512; d++)
        for (int i = 0; i < DEVICES; i++) {
            fa_problem p = make_problem(FA_PASS_BACKWARD, 2, 8, 300, d);
            p.d_v = 513 - d;
            const fa_cuda_passes backward = plan_of(&p, &devices[i]);
            for (int step = FA_STEP_DELTA; step <= FA_STEP_DSINKS; step++)
                check_step(&backward.steps[step], &devices[i]);
            CHECK(backward.steps[FA_STEP_WEIGHTS].variant == FA_NO_VARIANT, "weights in backward");
            p.pass = FA_PASS_WEIGHTS;
            const fa_cuda_passes weights = plan_of(&p, &devices[i]);
            check_step(&weights.steps[FA_STEP_WEIGHTS], &devices[i]);
            CHECK(weights.steps[FA_STEP_DQ].variant == FA_NO_VARIANT &&
                      weights.workspace_bytes == 0,
                  "weights");
        }
}

/* The narrowest kernels that both head dims fit into. */
static void test_images(void)
{
    static const struct {
        int64_t d, d_v;
        int dq, dkv;
    } cases[] = {{1, 1, FA_VARIANT_backward_dq_simt_d64, FA_VARIANT_backward_dkv_simt_d64},
                 {64, 65, FA_VARIANT_backward_dq_simt_d128, FA_VARIANT_backward_dkv_simt_d128},
                 {192, 128, FA_VARIANT_backward_dq_simt_d256, FA_VARIANT_backward_dkv_simt_d256},
                 {257, 1, FA_VARIANT_backward_dq_simt_d512, FA_VARIANT_backward_dkv_simt_d512}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_problem(FA_PASS_BACKWARD, 1, 1, 1, cases[i].d);
        p.d_v = cases[i].d_v;
        const fa_cuda_passes passes = plan_of(&p, &devices[H200]);
        CHECK(passes.steps[FA_STEP_DQ].variant == cases[i].dq &&
                  passes.steps[FA_STEP_DKV].variant == cases[i].dkv,
              "%s and %s", fa_variants[passes.steps[FA_STEP_DQ].variant].name,
              fa_variants[passes.steps[FA_STEP_DKV].variant].name);
    }
}

/* Tasks cover what there is to write, whatever the layout of keys; delta needs a float a row. */
static void test_tasks(void)
{
    static const int32_t table[1] = {0};
    fa_problem p = make_problem(FA_PASS_BACKWARD, 3, 8, 1000, 64);
    p.heads_kv = 2;
    p.dbias_shape[0] = 1, p.dbias_shape[1] = 8, p.dbias_shape[2] = 1000, p.dbias_shape[3] = 1;
    fa_cuda_passes s = plan_of(&p, &devices[H200]);
    CHECK(s.steps[FA_STEP_DQ].tasks == 3 * 8 * 16 && s.steps[FA_STEP_DKV].tasks == 3 * 2 * 16 &&
              s.steps[FA_STEP_DELTA].tasks == 3 * 8 * 32 && s.steps[FA_STEP_DSINKS].tasks == 8 &&
              s.steps[FA_STEP_DBIAS].tasks == 8 * 16,
          "equal lengths");
    CHECK(s.workspace_bytes == 3 * 8 * 1000 * sizeof(float), "%zu bytes", s.workspace_bytes);
    p.cu_seqlens_q = p.cu_seqlens_k = table;
    p.blocks_q = p.blocks_k = 1;
    s = plan_of(&p, &devices[H200]);
    CHECK(s.steps[FA_STEP_DQ].tasks == 8 * (15 + 3 + 2) && s.steps[FA_STEP_DKV].tasks == 2 * 20,
          "packed");
    CHECK(s.workspace_bytes == 8 * 1000 * sizeof(float), "%zu bytes", s.workspace_bytes);
    p.cu_seqlens_k = NULL;
    p.block_table = table;
    p.rows_k = 100;
    p.blocks_k = 7;
    s = plan_of(&p, &devices[H200]);
    CHECK(s.steps[FA_STEP_DKV].tasks == 2 * 7 * 2, "paged: %lld tasks",
          (long long)s.steps[FA_STEP_DKV].tasks);
}

static void test_sizes(void)
{
    static const int64_t sizes[][3] = {
        /* batch, heads, n */
        {1, 1, 1},         {0, 8, 100},       {3, 0, 100},           {3, 8, 0},
        {65536, 65536, 1}, {1, 1, 1LL << 40}, {1 << 20, 1 << 20, 64}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const fa_problem p =
            make_problem(FA_PASS_BACKWARD, sizes[i][0], sizes[i][1], sizes[i][2], 64);
        const fa_cuda_passes s = plan_of(&p, &devices[H200]);
        for (int step = FA_STEP_DELTA; step <= FA_STEP_DSINKS; step++)
            check_step(&s.steps[step], &devices[H200]);
    }
}

/* Only what has somewhere to go is computed, and delta only if something needs it. */
static void test_steps(void)
{
    static float sinks[1];
    fa_problem p = make_problem(FA_PASS_BACKWARD, 1, 1, 64, 64);
    p.dbias_shape[0] = p.dbias_shape[1] = p.dbias_shape[2] = p.dbias_shape[3] = 1;
    const fa_cuda_passes s = plan_of(&p, &devices[H200]);
    for (int step = 0; step < FA_CUDA_STEPS; step++)
        CHECK(!fa_cuda_step_runs(&p, &s, step), "step %d runs for nothing", step);
    p.dv = somewhere;
    for (int step = 0; step < FA_CUDA_STEPS; step++)
        CHECK(fa_cuda_step_runs(&p, &s, step) == (step == FA_STEP_DELTA || step == FA_STEP_DKV),
              "step %d for dv alone", step);
    p.dv.data = NULL;
    p.dsinks = sinks;
    for (int step = 0; step < FA_CUDA_STEPS; step++)
        CHECK(fa_cuda_step_runs(&p, &s, step) == (step == FA_STEP_DELTA || step == FA_STEP_DSINKS),
              "step %d for dsinks alone", step);
}

static void test_combine(void)
{
    static float lse[4];
    fa_cuda_combining how;
    char why[320] = "";
    fa_combine_problem c = {
        .batch = 2, .heads = 3, .n_q = 5, .d_v = 64, .num_parts = FA_COMBINE_FEW};
    CHECK(fa_cuda_combine_make(&c, &devices[0], &how, why, sizeof why), "%s", why);
    CHECK(how.most == FA_COMBINE_FEW && how.step.variant == FA_VARIANT_combine_few &&
              how.step.tasks == 8 && how.workspace_bytes == 0,
          "%s: %lld tasks", fa_variants[how.step.variant].name, (long long)how.step.tasks);
    c.num_parts = FA_COMBINE_MANY;
    CHECK(fa_cuda_combine_make(&c, &devices[0], &how, why, sizeof why), "%s", why);
    CHECK(how.most == FA_COMBINE_MANY && how.step.variant == FA_VARIANT_combine_many &&
              how.workspace_bytes == 0,
          "%s", fa_variants[how.step.variant].name);
    c.num_parts = FA_COMBINE_MANY + 1;
    CHECK(fa_cuda_combine_make(&c, &devices[0], &how, why, sizeof why), "%s", why);
    CHECK(how.workspace_bytes == 30 * 65 * sizeof(float), "without lse: %zu bytes of workspace",
          how.workspace_bytes);
    c.lse = lse;
    CHECK(fa_cuda_combine_make(&c, &devices[0], &how, why, sizeof why), "%s", why);
    CHECK(how.workspace_bytes == 0, "%zu bytes of workspace", how.workspace_bytes);
    c.out.dtype = FA_BFLOAT16;
    CHECK(fa_cuda_combine_make(&c, &devices[0], &how, why, sizeof why), "%s", why);
    CHECK(how.workspace_bytes == 30 * 65 * sizeof(float), "rounded sums: %zu bytes of workspace",
          how.workspace_bytes);
}

static void test_refusals(void)
{
    fa_cuda_passes passes;
    char why[320] = "";
    const fa_problem p = make_problem(FA_PASS_BACKWARD, 1, 1, 1, 64);
    fa_cuda_device old = devices[0];
    old.minor = 0;
    CHECK(!fa_cuda_passes_make(&p, &old, &passes, why, sizeof why) &&
              strstr(why, "has architecture 7.0: expected 7.5 or later"),
          "%s", why);
    old = devices[0];
    old.smem_per_block = 49152;
    CHECK(!fa_cuda_passes_make(&p, &old, &passes, why, sizeof why) &&
              strstr(why, "has 49152 bytes of shared memory for a block: expected "),
          "%s", why);
}

static void test_text(void)
{
    char text[256];
    fa_problem p = make_problem(FA_PASS_BACKWARD, 2, 4, 100, 128);
    fa_cuda_passes s = plan_of(&p, &devices[H200]);
    fa_cuda_passes_describe(&p, &devices[H200], &s, text, sizeof text);
    CHECK(strcmp(text, "cuda backward backward_dq_simt_d128 and backward_dkv_simt_d128: float32 "
                       "sums on FMA units, query tiles 64 and 64, key tiles 64 and 64, "
                       "deterministic, 16 and 16 blocks on sm_90") == 0,
          "%s", text);
    p.pass = FA_PASS_WEIGHTS;
    s = plan_of(&p, &devices[H200]);
    fa_cuda_passes_describe(&p, &devices[H200], &s, text, sizeof text);
    CHECK(strcmp(text,
                 "cuda weights weights_simt: float32 sums on FMA units, row tile 64, key tile "
                 "64, 16 blocks of 128 threads on sm_90") == 0,
          "%s", text);
}

int main(void)
{
    test_head_dims();
    test_images();
    test_tasks();
    test_sizes();
    test_steps();
    test_combine();
    test_refusals();
    test_text();
    return test_end();
}
