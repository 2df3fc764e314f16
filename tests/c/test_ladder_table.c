/*
 * The ladder's host side without a GPU: its table, the names of images, and launch plans and their
 * refusals.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "ladder.h"

static const fa_cuda_device h200 = {
    .major = 9, .multiprocessors = 132, .smem_per_block = 232448, .name = "NVIDIA H200"};

static void check_table(void)
{
    CHECK(ladder_num_rungs() == 18, "%d rungs", ladder_num_rungs());
    for (int i = 0; i < ladder_num_rungs(); i++) {
        const ladder_rung *r = ladder_rung_at(i);
        CHECK(r->number == i, "rung %d has number %d", i, r->number);
        CHECK(ladder_find_rung(r->name) == r, "%s is not found", r->name);
        CHECK(r->architecture == 80 || r->architecture == 90, "%s: architecture", r->name);
        CHECK(r->largest_d == 64 || r->largest_d == 128 || r->largest_d == 256, "%s: d", r->name);
        CHECK(strlen(r->name) < 32 && strlen(r->idea) > 0, "%s: texts", r->name);
        bool halves = r->types == LADDER_HALVES;
        CHECK(ladder_takes(r, FA_FLOAT32) == !halves && ladder_takes(r, FA_BFLOAT16) == halves &&
                  ladder_takes(r, FA_FLOAT16) == halves,
              "%s: types", r->name);
    }
    CHECK(!ladder_find_rung("kernel_mm") && !ladder_find_rung(""), "a rung that is not there");
}

static void check_name(const char *rung, fa_dtype dtype, int64_t d, const char *expected)
{
    char name[LADDER_NAME];
    ladder_image_name(ladder_find_rung(rung), dtype, d, name);
    CHECK(strcmp(name, expected) == 0, "%s; expected %s", name, expected);
}

static void check_names(void)
{
    check_name("reference", FA_FLOAT32, 1, "reference_d64");
    check_name("reference", FA_FLOAT32, 64, "reference_d64");
    check_name("reference", FA_FLOAT32, 65, "reference_d128");
    check_name("reference", FA_FLOAT32, 129, "reference_d256");
    check_name("kernel_mma_qreg_f32x4load", FA_FLOAT32, 256, "kernel_mma_qreg_f32x4load_d256");
    check_name("pingpong", FA_BFLOAT16, 128, "pingpong_d128_bf16");
    check_name("pingpong", FA_FLOAT16, 33, "pingpong_d64_f16");
    CHECK(ladder_pitch(FA_FLOAT32, 1) == 4 && ladder_pitch(FA_FLOAT32, 4) == 4 &&
              ladder_pitch(FA_FLOAT32, 69) == 72 && ladder_pitch(FA_BFLOAT16, 69) == 72 &&
              ladder_pitch(FA_FLOAT16, 73) == 80,
          "pitch");
}

/* ---- plans ----------------------------------------------------------------------------------- */

static ladder_kernel kernel_of(const char *rung, fa_dtype dtype, int head_dim, rung_step step)
{
    ladder_kernel k = {.rung = ladder_find_rung(rung), .dtype = dtype, .head_dim = head_dim};
    k.about.steps = 1;
    k.about.step[0] = step;
    return k;
}

/* Addresses that are never read. */
static ladder_problem problem_of(int64_t heads, int64_t n, int64_t d, int64_t pitch)
{
    static _Alignas(256) char memory[1024];
    return (ladder_problem){.q = memory,
                            .k = memory + 256,
                            .v = memory + 512,
                            .out = memory + 768,
                            .heads = heads,
                            .n = n,
                            .d = d,
                            .pitch = pitch};
}

static void check_grids(void)
{
    char error[LADDER_ERROR] = "";
    ladder_plan plan;
    ladder_kernel k =
        kernel_of("kernel_mma", FA_FLOAT32, 64, (rung_step){.rows = 64, .threads = 128});
    ladder_problem p = problem_of(10, 129, 50, 52);
    CHECK(ladder_make_plan(&k, &p, &h200, &plan, error), "%s", error);
    CHECK(plan.heads == 10 && plan.grid_x[0] == 3 && plan.grid_y[0] == 1, "row tiles");
    p.n = 128;
    CHECK(ladder_make_plan(&k, &p, &h200, &plan, error) && plan.grid_x[0] == 2, "exactly 2 tiles");
    p.n = INT32_MAX;
    CHECK(ladder_make_plan(&k, &p, &h200, &plan, error) && plan.grid_x[0] == 33554432, "longest");
    p = problem_of(200000, 1, 50, 52);
    CHECK(ladder_make_plan(&k, &p, &h200, &plan, error) && plan.heads == 65535, "many heads");
    k.about.step[0].persistent = 2;
    CHECK(ladder_make_plan(&k, &p, &h200, &plan, error) && plan.heads == 200000 &&
              plan.grid_x[0] == 264 && plan.grid_y[0] == 1,
          "persistent");
    k.about.step[0] = (rung_step){.threads = 32};
    CHECK(ladder_make_plan(&k, &p, &h200, &plan, error) && plan.grid_x[0] == 1, "a block a head");
}

static void check_scratch(void)
{
    char error[LADDER_ERROR] = "";
    ladder_plan plan;
    static float scratch[1];
    ladder_kernel k = kernel_of("reference", FA_FLOAT32, 64,
                                (rung_step){.rows = 16, .columns = 16, .threads = 256});
    ladder_problem p = problem_of(10, 100, 50, 52);
    k.about.needs_scores = 1;
    CHECK(!ladder_make_plan(&k, &p, &h200, &plan, error) && strstr(error, "scratch has 0 bytes"),
          "no scratch: %s", error);
    p.scratch = scratch;
    p.scratch_bytes = 39999;
    CHECK(!ladder_make_plan(&k, &p, &h200, &plan, error) && strstr(error, "needs 40000"),
          "a byte short: %s", error);
    p.scratch_bytes = 40000;
    CHECK(ladder_make_plan(&k, &p, &h200, &plan, error) && plan.heads == 1, "one head: %s", error);
    CHECK(plan.grid_x[0] == 7 && plan.grid_y[0] == 7, "grid");
    p.scratch_bytes = 159999;
    CHECK(ladder_make_plan(&k, &p, &h200, &plan, error) && plan.heads == 3, "three heads");
    p.scratch_bytes = (size_t)1 << 40;
    CHECK(ladder_make_plan(&k, &p, &h200, &plan, error) && plan.heads == 10, "all heads");
    p.n = 16 * 65536;
    p.scratch_bytes = (size_t)1 << 50;
    CHECK(!ladder_make_plan(&k, &p, &h200, &plan, error) && strstr(error, "at most 1048560"),
          "a grid that is too high: %s", error);
}

static void check_refused(const ladder_problem *p, int32_t smem, const char *words)
{
    char error[LADDER_ERROR] = "";
    ladder_plan plan;
    ladder_kernel k = kernel_of("mma_fp16", FA_FLOAT16, 128,
                                (rung_step){.rows = 64, .threads = 128, .smem_bytes = smem});
    CHECK(!ladder_make_plan(&k, p, &h200, &plan, error), "not refused: %s", words);
    CHECK(strstr(error, words), "\"%s\"; expected words: \"%s\"", error, words);
}

static void check_refusals(void)
{
    ladder_problem p = problem_of(0, 10, 100, 104);
    check_refused(&p, 0, "heads is 0");
    p = problem_of(1, 0, 100, 104);
    check_refused(&p, 0, "n is 0");
    p = problem_of(1, (int64_t)INT32_MAX + 1, 100, 104);
    check_refused(&p, 0, "n is 2147483648");
    p = problem_of(1, 10, 129, 136);
    check_refused(&p, 0, "d is 129");
    p = problem_of(1, 10, 100, 96);
    check_refused(&p, 0, "pitch is 96");
    p = problem_of(1, 10, 100, 108);
    check_refused(&p, 0, "pitch is 108");
    p = problem_of(1, 10, 100, 104);
    p.k = (const char *)p.k + 16;
    check_refused(&p, 0, "aligned to 256");
    p = problem_of(1, 10, 100, 104);
    check_refused(&p, 232449,
                  "needs 232449 bytes of shared memory a block, and NVIDIA H200 has 232448");
}

/* Loading reports errors before it needs a device. */
static void check_loading(void)
{
    ladder_kernel k;
    char error[LADDER_ERROR] = "";
    CHECK(!ladder_load(ladder_find_rung("pingpong"), FA_FLOAT32, 64, &k, error) &&
              strstr(error, "bf16 and f16 only"),
          "type: %s", error);
    CHECK(!ladder_load(ladder_find_rung("reference"), FA_FLOAT16, 64, &k, error) &&
              strstr(error, "f32 only"),
          "type: %s", error);
    CHECK(!ladder_load(ladder_find_rung("pingpong"), FA_FLOAT16, 257, &k, error) &&
              strstr(error, "d is 257; rung pingpong takes 1 to 256"),
          "d: %s", error);
    CHECK(!ladder_load(ladder_find_rung("pingpong"), FA_FLOAT16, 0, &k, error) &&
              strstr(error, "d is 0"),
          "d: %s", error);
}

int main(void)
{
    check_table();
    check_names();
    check_grids();
    check_scratch();
    check_refusals();
    check_loading();
    return test_end();
}
