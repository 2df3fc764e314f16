/*
 * The CUDA planner, without a GPU: plans for descriptions of GPUs from T4 to H200.
 */
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "cuda/plan.h"
#include "flashattn.h"

static const fa_cuda_device devices[] = {
    {.major = 7,
     .minor = 5,
     .multiprocessors = 40,
     .smem_per_block = 65536,
     .smem_per_sm = 65536,
     .registers_per_sm = 65536,
     .memory_bytes = 16LL << 30,
     .name = "Tesla T4"},
    {.major = 8,
     .minor = 0,
     .multiprocessors = 108,
     .smem_per_block = 166912,
     .smem_per_sm = 167936,
     .registers_per_sm = 65536,
     .memory_bytes = 80LL << 30,
     .name = "NVIDIA A100-SXM4-80GB"},
    {.major = 8,
     .minor = 9,
     .multiprocessors = 128,
     .smem_per_block = 101376,
     .smem_per_sm = 102400,
     .registers_per_sm = 65536,
     .memory_bytes = 24LL << 30,
     .name = "NVIDIA GeForce RTX 4090"},
    {.major = 9,
     .minor = 0,
     .multiprocessors = 132,
     .smem_per_block = 232448,
     .smem_per_sm = 233472,
     .registers_per_sm = 65536,
     .memory_bytes = 80LL << 30,
     .name = "NVIDIA H100 80GB HBM3"},
    {.major = 9,
     .minor = 0,
     .multiprocessors = 132,
     .smem_per_block = 232448,
     .smem_per_sm = 233472,
     .registers_per_sm = 65536,
     .memory_bytes = 141LL << 30,
     .name = "NVIDIA H200"},
};
enum { DEVICES = sizeof devices / sizeof devices[0], H200 = DEVICES - 1 };

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

static fa_cuda_plan plan_of(const fa_problem *p, const fa_cuda_device *device)
{
    fa_cuda_plan plan;
    char why[320] = "";
    bool fine = fa_cuda_plan_make(p, device, &plan, why, sizeof why);
    CHECK(fine, "d %lld, d_v %lld on %s: %s", (long long)p->d, (long long)p->d_v, device->name,
          why);
    return plan;
}

/* What holds of every plan. */
static void check_plan(const fa_problem *p, const fa_cuda_device *device)
{
    const fa_cuda_plan plan = plan_of(p, device);
    const int64_t rows = plan.tile_q > 0 ? (p->rows_q + plan.tile_q - 1) / plan.tile_q : -1;
    CHECK(plan.image && strcmp(plan.entry, "forward_simt") == 0, "image and entry");
    CHECK((int)plan.smem_bytes + 256 <= device->smem_per_block, "%u bytes of shared memory on %s",
          plan.smem_bytes, device->name);
    CHECK(plan.grid <= 2147483647u && (int64_t)plan.grid <= plan.tasks, "grid %u", plan.grid);
    CHECK((plan.grid > 0) == (plan.tasks > 0), "grid %u for %lld tasks", plan.grid,
          (long long)plan.tasks);
    CHECK(plan.threads % 32 == 0 && plan.threads > 0 && plan.threads <= 1024, "%u threads",
          plan.threads);
    CHECK(plan.tile_k % 32 == 0, "a key tile of %d", plan.tile_k);
    CHECK(plan.tasks >= rows * p->heads_q * p->blocks_q, "%lld tasks", (long long)plan.tasks);
    CHECK(plan.workspace_bytes == 0, "workspace");
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
        const char *image;
    } cases[] = {{1, 1, "forward_simt_d64"},      {64, 64, "forward_simt_d64"},
                 {65, 64, "forward_simt_d128"},   {64, 65, "forward_simt_d128"},
                 {128, 128, "forward_simt_d128"}, {192, 128, "forward_simt_d256"},
                 {256, 257, "forward_simt_d512"}, {512, 512, "forward_simt_d512"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const fa_problem p = make_problem(1, 1, 1, cases[i].d, cases[i].d_v);
        const fa_cuda_plan plan = plan_of(&p, &devices[H200]);
        CHECK(strcmp(plan.image, cases[i].image) == 0, "%lld, %lld: %s", (long long)cases[i].d,
              (long long)cases[i].d_v, plan.image);
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

/* Enough places for the tiles of any sequences that the rows may be cut into. */
static void test_packed(void)
{
    static const int32_t cu[5] = {0};
    fa_problem p = make_problem(4, 2, 1000, 64, 64);
    p.blocks_q = 1;
    p.cu_seqlens_q = cu;
    const fa_cuda_plan plan = plan_of(&p, &devices[H200]);
    CHECK(plan.tiles == 1000 / plan.tile_q + 4 + 2 && plan.tasks == 2 * plan.tiles, "%lld tiles",
          (long long)plan.tiles);
}

static void test_refusals(void)
{
    fa_cuda_plan plan;
    char why[320] = "";
    fa_problem p = make_problem(1, 1, 1, 64, 64);
    p.pass = FA_PASS_BACKWARD;
    CHECK(!fa_cuda_plan_make(&p, &devices[H200], &plan, why, sizeof why) &&
              strstr(why, "fa_backward is not there yet on CUDA; it works on the CPU"),
          "%s", why);
    p.pass = FA_PASS_WEIGHTS;
    CHECK(!fa_cuda_plan_make(&p, &devices[H200], &plan, why, sizeof why) &&
              strstr(why, "fa_weights is not there yet on CUDA"),
          "%s", why);
    p.pass = FA_PASS_FORWARD;
    fa_cuda_device old = devices[0];
    old.minor = 0;
    CHECK(!fa_cuda_plan_make(&p, &old, &plan, why, sizeof why) &&
              strstr(why, "has architecture 7.0: expected 7.5 or later"),
          "%s", why);
    old = devices[0];
    old.smem_per_block = 49152;
    CHECK(!fa_cuda_plan_make(&p, &old, &plan, why, sizeof why) &&
              strstr(why, "has 49152 bytes of shared memory for a block: expected "),
          "%s", why);
}

static void test_text(void)
{
    char text[256];
    fa_problem p = make_problem(2, 4, 100, 64, 64);
    fa_cuda_plan plan = plan_of(&p, &devices[H200]);
    fa_cuda_plan_describe(&p, &devices[H200], &plan, text, sizeof text);
    CHECK(strcmp(text, "cuda forward forward_simt_d64: float32 sums on FMA units, query tile 64, "
                       "key tile 64, 16 blocks of 128 threads on sm_90") == 0,
          "%s", text);
    p.pass = FA_PASS_DECODE;
    plan = plan_of(&p, &devices[H200]);
    fa_cuda_plan_describe(&p, &devices[H200], &plan, text, sizeof text);
    CHECK(strstr(text, "cuda decode ") && strstr(text, "keys are not split yet"), "%s", text);
}

int main(void)
{
    test_head_dims();
    test_images();
    test_sizes();
    test_packed();
    test_refusals();
    test_text();
    return test_end();
}
