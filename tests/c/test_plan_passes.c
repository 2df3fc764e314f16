/*
 * The plans of backward, weights and combine, without a GPU: for GPUs from T4 to H200.
 */
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "cuda/family.h"
#include "../../kernels/forward_sm90/forward_sm90.h"
#include "cuda/plan_backward_sm90.h"
#include "cuda/plan_combine.h"
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

/* With all results requested. */
/* For the FMA units: float32 in IEEE 754's arithmetic. */
static fa_problem make_backward(int64_t batch, int64_t heads, int64_t n, int64_t d)
{
    static float sinks[1];
    fa_problem p = make_problem(FA_PASS_BACKWARD, batch, heads, n, d);
    p.precision = FA_PRECISION_IEEE;
    p.dq = p.dk = p.dv = p.dbias = somewhere;
    p.dbias_shape[0] = p.dbias_shape[1] = p.dbias_shape[2] = p.dbias_shape[3] = 1;
    p.dsinks = sinks;
    return p;
}

/* family: NULL for the library's choice. */
static fa_cuda_plan plan_by(const fa_cuda_family *family, const fa_problem *p,
                            const fa_cuda_device *device)
{
    fa_cuda_plan plan;
    char why[320] = "";
    const bool fine = fa_cuda_plan_make(p, device, family, &plan, why, sizeof why);
    CHECK(fine, "d %lld on %s: %s", (long long)p->d, device->name, why);
    return plan;
}

static fa_cuda_plan plan_of(const fa_problem *p, const fa_cuda_device *device)
{
    return plan_by(NULL, p, device);
}

/* The plan with separate launches before and after the products. */
static fa_cuda_plan plan_apart(const fa_problem *p)
{
    const fa_cuda_plan plan = plan_of(p, &devices[H200]);
    if ((plan.family == &fa_cuda_backward_sm90_chained ||
         plan.family == &fa_cuda_backward_sm90_rounding) &&
        p->d <= 64)
        return plan_by(&fa_cuda_backward_sm90_persistent, p, &devices[H200]);
    return plan.family == &fa_cuda_backward_sm90_joined ||
                   plan.family == &fa_cuda_backward_sm90_chained ||
                   plan.family == &fa_cuda_backward_sm90_rounding
               ? plan_by(&fa_cuda_backward_sm90, p, &devices[H200])
               : plan;
}

/* For blocks that are not persistent. */
static size_t workspace_of(const fa_problem *p)
{
    return plan_by(&fa_cuda_backward_sm90, p, &devices[H200]).workspace_bytes;
}

/* float16 tensors of d 128, which backward_sm90 takes. */
static fa_problem make_half_backward(int64_t batch, int64_t heads, int64_t n)
{
    static _Alignas(16) char aligned[16];
    const fa_view view = {
        .data = aligned, .dtype = FA_FLOAT16, .stride = {n * heads * 128, heads * 128, 128, 1}};
    fa_problem p = make_problem(FA_PASS_BACKWARD, batch, heads, n, 128);
    p.q = p.k = p.v = p.out = p.dout = p.dq = p.dk = p.dv = view;
    return p;
}

/* The launch of a variant of these; NULL: there is none. */
static const fa_cuda_plan_launch *find(const fa_cuda_plan *plan, int first, int end)
{
    for (int i = 0; i < plan->count; i++) {
        const fa_cuda_plan_launch *l = &plan->launches[i];
        if (l->variant >= first && l->variant < end) return l;
    }
    return NULL;
}
#define FIND(plan, name) find(plan, FA_FIRST_##name, FA_END_##name)

static int64_t tasks_of(const fa_cuda_plan_launch *l) { return l ? l->tasks : -1; }

/* Properties of every launch. */
static void check_launch(const fa_cuda_plan *plan, const fa_cuda_plan_launch *l,
                         const fa_cuda_device *device)
{
    const fa_variant *v = &fa_variants[l->variant];
    CHECK(v->element == FA_ELEMENT_TF32 || /* its name is in place of "sm80" */
              v->element == FA_ELEMENT_TF32X3 ||
              strncmp(v->name, v->kernel, strlen(v->kernel)) == 0,
          "%s: %s", v->name, v->kernel);
    CHECK((int)l->smem_bytes + fa_cuda_static_smem(v) <= device->smem_per_block,
          "%s: %u bytes of shared memory on %s", v->name, l->smem_bytes, device->name);
    CHECK(l->grid <= 2147483647u && (int64_t)l->grid <= l->tasks, "%s: grid %u", v->name, l->grid);
    CHECK((l->grid > 0) == (l->tasks > 0), "%s: grid %u for %lld tasks", v->name, l->grid,
          (long long)l->tasks);
    CHECK(l->idle == (l->tasks == 0), "%s is idle %d for %lld tasks", v->name, l->idle,
          (long long)l->tasks);
    CHECK(l->threads % 32 == 0 && l->threads > 0 && l->threads <= 1024, "%u threads", l->threads);
    CHECK(l->workspace_offset + l->workspace_bytes <= plan->workspace_bytes, "%s: workspace",
          v->name);
}

static void check_launches(const fa_cuda_plan *plan, int count, const fa_cuda_device *device)
{
    CHECK(plan->count == count, "%d launches, expected %d", plan->count, count);
    for (int i = 0; i < plan->count; i++) check_launch(plan, &plan->launches[i], device);
}

static void test_head_dims(void)
{
    for (int64_t d = 1; d <= 512; d++)
        for (int i = 0; i < DEVICES; i++) {
            fa_problem p = make_backward(2, 8, 300, d);
            p.d_v = 513 - d;
            const fa_cuda_plan backward = plan_of(&p, &devices[i]);
            check_launches(&backward, 5, &devices[i]);
            CHECK(!FIND(&backward, weights_simt), "weights in backward");
            p.pass = FA_PASS_WEIGHTS;
            p.weights = somewhere;
            const fa_cuda_plan weights = plan_of(&p, &devices[i]);
            check_launches(&weights, 1, &devices[i]);
            CHECK(FIND(&weights, weights_simt) && weights.workspace_bytes == 0, "weights");
        }
}

/* The narrowest kernels that both head dims fit into. */
static void test_variants(void)
{
    static const struct {
        int64_t d, d_v;
        int dq, dkv;
    } cases[] = {{1, 1, FA_VARIANT_backward_dq_simt_d64, FA_VARIANT_backward_dkv_simt_d64},
                 {64, 65, FA_VARIANT_backward_dq_simt_d128, FA_VARIANT_backward_dkv_simt_d128},
                 {192, 128, FA_VARIANT_backward_dq_simt_d256, FA_VARIANT_backward_dkv_simt_d256},
                 {257, 1, FA_VARIANT_backward_dq_simt_d512, FA_VARIANT_backward_dkv_simt_d512}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_backward(1, 1, 1, cases[i].d);
        p.d_v = cases[i].d_v;
        const fa_cuda_plan plan = plan_of(&p, &devices[H200]);
        const fa_cuda_plan_launch *dq = FIND(&plan, backward_dq_simt);
        const fa_cuda_plan_launch *dkv = FIND(&plan, backward_dkv_simt);
        CHECK(dq && dkv && dq->variant == cases[i].dq && dkv->variant == cases[i].dkv, "%lld, %lld",
              (long long)cases[i].d, (long long)cases[i].d_v);
    }
}

/* Tasks cover everything that must be written, whatever the layout of keys; delta needs a float for
 * each row. */
static void test_tasks(void)
{
    static const int32_t table[1] = {0};
    fa_problem p = make_backward(3, 8, 1000, 64);
    p.heads_kv = 2;
    p.dbias_shape[0] = 1, p.dbias_shape[1] = 8, p.dbias_shape[2] = 1000, p.dbias_shape[3] = 1;
    fa_cuda_plan s = plan_of(&p, &devices[H200]);
    CHECK(tasks_of(FIND(&s, backward_dq_simt)) == 3 * 8 * 16 &&
              tasks_of(FIND(&s, backward_dkv_simt)) == 3 * 2 * 16 &&
              tasks_of(FIND(&s, backward_delta_simt)) == 3 * 8 * 32 &&
              tasks_of(FIND(&s, backward_dsinks_simt)) == 8 &&
              tasks_of(FIND(&s, backward_dbias_simt)) == 8 * 16,
          "equal lengths");
    CHECK(s.workspace_bytes == 3 * 8 * 1000 * sizeof(float), "%zu bytes", s.workspace_bytes);
    p.cu_seqlens_q = p.cu_seqlens_k = table;
    p.blocks_q = p.blocks_k = 1;
    s = plan_of(&p, &devices[H200]);
    CHECK(tasks_of(FIND(&s, backward_dq_simt)) == 8 * (15 + 3 + 2) &&
              tasks_of(FIND(&s, backward_dkv_simt)) == 2 * 20,
          "packed");
    CHECK(s.workspace_bytes == 8 * 1000 * sizeof(float), "%zu bytes", s.workspace_bytes);
    p.cu_seqlens_k = NULL;
    p.block_table = table;
    p.rows_k = 100;
    p.blocks_k = 7;
    s = plan_of(&p, &devices[H200]);
    CHECK(tasks_of(FIND(&s, backward_dkv_simt)) == 2 * 7 * 2, "paged: %lld tasks",
          (long long)tasks_of(FIND(&s, backward_dkv_simt)));
}

static void test_sizes(void)
{
    static const int64_t sizes[][3] = {
        /* batch, heads, n */
        {1, 1, 1},         {0, 8, 100},       {3, 0, 100},           {3, 8, 0},
        {65536, 65536, 1}, {1, 1, 1LL << 40}, {1 << 20, 1 << 20, 64}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const fa_problem p = make_backward(sizes[i][0], sizes[i][1], sizes[i][2], 64);
        const fa_cuda_plan s = plan_of(&p, &devices[H200]);
        check_launches(&s, 5, &devices[H200]);
    }
}

/* Which launches of a plan are queued: bit 0 for delta, 1 for dQ, 2 for dK and dV, 3 for the bias,
 * 4 for the sinks. */
static int queued(const fa_cuda_plan *plan)
{
    const fa_cuda_plan_launch *const launches[] = {
        FIND(plan, backward_delta_simt), FIND(plan, backward_dq_simt),
        FIND(plan, backward_dkv_simt), FIND(plan, backward_dbias_simt),
        FIND(plan, backward_dsinks_simt)};
    int bits = 0;
    for (int i = 0; i < 5; i++) bits |= launches[i] && !launches[i]->idle ? 1 << i : 0;
    return bits;
}

/* A problem for tensor cores: 64 columns of float16, contiguous. */
static fa_problem make_half(int64_t batch, int64_t heads, int64_t n, int64_t d)
{
    fa_problem p = make_problem(FA_PASS_BACKWARD, batch, heads, n, d);
    const fa_view view = {
        .data = memory, .dtype = FA_FLOAT16, .stride = {n * heads * d, heads * d, d, 1}};
    p.q = p.k = p.v = p.out = p.dout = p.dq = p.dk = p.dv = view;
    return p;
}

/* family: the one that computes it instead. */
static void check_refused(const fa_problem *p, const fa_cuda_family *family, const char *reason)
{
    char text[640], expected[80];
    const fa_cuda_plan s = plan_of(p, &devices[H200]);
    fa_cuda_plan_describe(p, &devices[H200], &s, text, sizeof text);
    snprintf(expected, sizeof expected, "; not sm90: %s", reason);
    CHECK(s.family == family && strstr(text, expected), "expected \"%s\": %s", expected, text);
}

/* What Hopper's kernels do not support is computed by mma.sync, and what tensor cores do not
 * support by the FMA units. fa_describe gives the reason. */
static void test_refused(void)
{
    static const int32_t table[1] = {0};
    const fa_problem plain = make_half(2, 8, 1000, 64);
    fa_problem p = plain;
    p.block_table = table;
    check_refused(&p, &fa_cuda_backward_simt, "block_table is given");
    p = plain, p.attention_chunk = 64;
    check_refused(&p, &fa_cuda_backward_simt, "options.attention_chunk is 64");
    p = plain, p.d = 257;
    check_refused(&p, &fa_cuda_backward_sm80, "the head dims are 257 and 64");
    p = plain, p.dk.dtype = FA_FLOAT32;
    check_refused(&p, &fa_cuda_backward_simt, "gradients.dk.dtype is float32");
    p = plain, p.dout.stride[1] = 4;
    check_refused(&p, &fa_cuda_backward_sm80, "dout: a stride is not a multiple of 16 bytes");
    fa_cuda_plan s = plan_of(&plain, &devices[A100]);
    CHECK(s.family == &fa_cuda_backward_sm80, "on an A100");
    s = plan_of(&plain, &devices[T4]);
    CHECK(s.family == &fa_cuda_backward_simt && !s.passed_over[0], "on a T4");
}

/* A workspace size is requested before the gradients are known, so it is sufficient for the family
 * that supports any strides of dout, too. */
static void test_room(void)
{
    for (int ordered = 0; ordered < 2; ordered++)
        for (int64_t d = 8; d <= 512; d += 56) {
            fa_problem p = make_half(2, 8, 1000, d);
            p.deterministic = ordered;
            p.dout.data = NULL;
            const size_t room = plan_of(&p, &devices[H200]).workspace_bytes;
            p = make_half(2, 8, 1000, d);
            p.deterministic = ordered;
            const size_t known = plan_of(&p, &devices[H200]).workspace_bytes;
            p.dout.stride[1] = 4;
            const fa_cuda_plan other = plan_of(&p, &devices[H200]);
            CHECK(other.family == &fa_cuda_backward_sm80, "d %lld", (long long)d);
            CHECK(room >= known && room >= other.workspace_bytes, "d %lld: %zu of %zu, %zu bytes",
                  (long long)d, room, known, other.workspace_bytes);
        }
}

/* The variants of backward_sm80 for which GPUs have enough shared memory; without any, the FMA
 * units compute it. */
static void test_sm80(void)
{
    static const struct {
        int gpu;
        int64_t d, d_v;
        bool option;
        int variant; /* of float16 */
    } cases[] = {{A100, 64, 64, false, FA_VARIANT_backward_sm80_d64_f16_small},
                 {A100, 40, 64, true, FA_VARIANT_backward_sm80_d64_f16_small_general},
                 {A100, 96, 65, false, FA_VARIANT_backward_sm80_d96_f16_small},
                 {A100, 128, 1, true, FA_VARIANT_backward_sm80_d128_f16_small_general},
                 {A100, 192, 128, false, FA_VARIANT_backward_sm80_d256_f16_small},
                 {A100, 257, 1, false, FA_VARIANT_backward_sm80_d512_f16_small_general},
                 {RTX_4090, 64, 64, false, FA_VARIANT_backward_sm80_d64_f16},
                 {RTX_4090, 128, 128, false, FA_VARIANT_backward_sm80_d128_f16_small},
                 {RTX_4090, 129, 1, false, FA_VARIANT_backward_sm80_d256_f16_tiny_general},
                 {RTX_4090, 257, 1, false, FA_NO_VARIANT},
                 {H200, 64, 257, false, FA_VARIANT_backward_sm80_d512_f16},
                 {H200, 257, 1, true, FA_VARIANT_backward_sm80_d512_f16_general},
                 {H200, 512, 512, false, FA_VARIANT_backward_sm80_d512_f16},
                 {H200, 257, 1, true, FA_VARIANT_backward_sm80_d512_f16_general}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_half(2, 8, 1000, cases[i].d);
        p.d_v = cases[i].d_v;
        if (cases[i].option) p.softcap = 1;
        const fa_cuda_plan s = plan_of(&p, &devices[cases[i].gpu]);
        const fa_cuda_plan_launch *l = FIND(&s, backward_sm80);
        check_launches(&s, 3, &devices[cases[i].gpu]);
        CHECK(cases[i].variant == FA_NO_VARIANT ? s.family == &fa_cuda_backward_simt && !l
                                                : l && l->variant == cases[i].variant,
              "case %zu: %s%s", i, l ? fa_variants[l->variant].name : "none", s.passed_over);
        if (!l) continue;
        const fa_variant *v = &fa_variants[l->variant];
        CHECK(s.workspace_bytes == 2 * 8 * 1024 * sizeof(float) * (size_t)(v->head_dim + 2),
              "case %zu: %zu bytes", i, s.workspace_bytes);
        CHECK(l->tile_k == v->keys && l->tasks == 2 * 8 * ((1000 + v->keys - 1) / v->keys),
              "case %zu: %lld tasks", i, (long long)l->tasks);
    }
}

/* A problem of float32 tensors. */
static fa_problem make_float32(int64_t d, int64_t d_v, fa_precision precision)
{
    fa_problem p = make_half(2, 8, 1000, d);
    fa_view *const views[] = {&p.q, &p.k, &p.v, &p.out, &p.dout, &p.dq, &p.dk, &p.dv};
    for (int n = 0; n < 8; n++) views[n]->dtype = FA_FLOAT32;
    p.d_v = d_v;
    p.precision = precision;
    return p;
}

/* Blocks of 64 keys compute a pair in less time, but there must be enough of them. */
static void test_blocks_of_wide_heads(void)
{
    static const struct {
        int64_t items, heads, n, n_k;
        bool causal, invariant;
        int variant;
    } cases[] = {{32, 4, 512, 512, false, false, FA_VARIANT_backward_tf32_d320},
                 {32, 4, 512, 512, true, false, FA_VARIANT_backward_tf32_d320},
                 {1, 4, 2048, 2048, false, false, FA_VARIANT_backward_tf32_d320},
                 {1, 4, 2048, 2048, true, false, FA_VARIANT_backward_tf32_d384},
                 {1, 2, 512, 512, false, false, FA_VARIANT_backward_tf32_d384},
                 {1, 2, 512, 512, false, true, FA_VARIANT_backward_tf32_d320},
                 {256, 8, 300, 32, false, false, FA_VARIANT_backward_tf32_d384},
                 {256, 8, 300, 32, false, true, FA_VARIANT_backward_tf32_d384}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_float32(320, 320, FA_PRECISION_TF32);
        p.batch = cases[i].items;
        p.heads_q = p.heads_kv = cases[i].heads;
        p.n_q = p.rows_q = p.max_q = cases[i].n;
        p.n_k = p.rows_k = cases[i].n_k;
        p.causal = cases[i].causal;
        p.batch_invariant = cases[i].invariant;
        const fa_cuda_plan plan = plan_of(&p, &devices[H200]);
        CHECK(plan.count >= 2 && plan.launches[1].variant == cases[i].variant, "case %zu: %s", i,
              plan.count >= 2 ? fa_variants[plan.launches[1].variant].name : "none");
    }
}

/* The variants for float32. */
static void test_float32_variants(void)
{
    static const fa_cuda_family *const tf32 = &fa_cuda_backward_tf32,
                                       *const tf32x3 = &fa_cuda_backward_tf32x3_corrected;
    const struct {
        const fa_cuda_family *family;
        int gpu;
        int64_t d, d_v;
        bool option;
        int variant;
        const char *why; /* why it is not */
    } cases[] = {
        {tf32, H200, 64, 8, false, FA_VARIANT_backward_tf32_d64, ""},
        {tf32, H200, 40, 64, true, FA_VARIANT_backward_tf32_d64_general, ""},
        {tf32, H200, 65, 1, false, FA_VARIANT_backward_tf32_d128, ""},
        {tf32, H200, 128, 128, true, FA_VARIANT_backward_tf32_d128_general, ""},
        {tf32, H200, 129, 1, false, FA_VARIANT_backward_tf32_d256, ""},
        {tf32, H200, 64, 256, true, FA_VARIANT_backward_tf32_d256_general, ""},
        {tf32, H200, 64, 257, false, FA_VARIANT_backward_tf32_d320, ""},
        {tf32, H200, 320, 64, true, FA_VARIANT_backward_tf32_d384_general, ""},
        {tf32, H200, 64, 321, false, FA_VARIANT_backward_tf32_d384, ""},
        {tf32, H200, 384, 384, true, FA_VARIANT_backward_tf32_d384_general, ""},
        {tf32, H200, 385, 1, false, FA_VARIANT_backward_tf32_d512, ""},
        {tf32, H200, 512, 512, true, FA_VARIANT_backward_tf32_d512_general, ""},
        {tf32, A100, 257, 257, false, FA_NO_VARIANT,
         "166912 bytes of shared memory for a block: expected 201600 for backward_tf32_d320"},
        {tf32, A100, 512, 512, true, FA_NO_VARIANT, "for backward_tf32_d512_general"},
        {tf32, A100, 64, 64, false, FA_VARIANT_backward_tf32_d64_small, ""},
        {tf32, A100, 64, 64, true, FA_VARIANT_backward_tf32_d64_small_general, ""},
        {tf32, A100, 128, 128, false, FA_VARIANT_backward_tf32_d128_small, ""},
        {tf32, A100, 96, 128, true, FA_VARIANT_backward_tf32_d128_small_general, ""},
        {tf32, A100, 256, 256, false, FA_VARIANT_backward_tf32_d256_small_general, ""},
        {tf32, RTX_4090, 64, 64, false, FA_VARIANT_backward_tf32_d64_small, ""},
        {tf32, RTX_4090, 128, 128, false, FA_VARIANT_backward_tf32_d128_tiny_general, ""},
        {tf32, RTX_4090, 129, 1, false, FA_NO_VARIANT, "bytes of shared memory for a block"},
        {tf32, T4, 64, 64, false, FA_NO_VARIANT, ""},
        {tf32x3, H200, 64, 64, false, FA_VARIANT_backward_tf32x3_d64, ""},
        {tf32x3, H200, 64, 64, true, FA_VARIANT_backward_tf32x3_d64_general, ""},
        {tf32x3, H200, 128, 128, false, FA_VARIANT_backward_tf32x3_d128, ""},
        {tf32x3, H200, 96, 65, true, FA_VARIANT_backward_tf32x3_d128_general, ""},
        {tf32x3, A100, 96, 65, true, FA_VARIANT_backward_tf32x3_d128_small_general, ""},
        {tf32x3, A100, 128, 128, false, FA_VARIANT_backward_tf32x3_d128_small_general, ""},
        {tf32x3, H200, 256, 129, false, FA_VARIANT_backward_tf32x3_d256, ""},
        {tf32x3, H200, 256, 129, true, FA_VARIANT_backward_tf32x3_d256_general, ""},
        {tf32x3, A100, 256, 256, false, FA_VARIANT_backward_tf32x3_d256_small_general, ""},
        {tf32x3, H200, 257, 64, false, FA_VARIANT_backward_tf32x3_d384, ""},
        {tf32x3, H200, 64, 384, true, FA_VARIANT_backward_tf32x3_d384_general, ""},
        {tf32x3, H200, 512, 64, false, FA_VARIANT_backward_tf32x3_d512, ""},
        {tf32x3, H200, 385, 385, true, FA_VARIANT_backward_tf32x3_d512_general, ""},
        {tf32x3, A100, 264, 264, false, FA_NO_VARIANT, "for backward_tf32x3_weight_sums_d384"},
        {tf32x3, T4, 64, 64, false, FA_NO_VARIANT, ""},
        {tf32x3, RTX_4090, 64, 64, false, FA_VARIANT_backward_tf32x3_d64, ""},
        {tf32x3, RTX_4090, 65, 64, false, FA_NO_VARIANT, "bytes of shared memory for a block"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p =
            make_float32(cases[i].d, cases[i].d_v,
                         cases[i].family == tf32 ? FA_PRECISION_TF32 : FA_PRECISION_FLOAT32);
        if (cases[i].option) p.softcap = 1;
        p.n_q = p.rows_q = p.n_k = p.rows_k = 2000; /* for shorter sequences, sums are in dq */
        const fa_cuda_plan s = plan_of(&p, &devices[cases[i].gpu]);
        const bool refused = cases[i].variant == FA_NO_VARIANT;
        const int main = s.family == &fa_cuda_backward_tf32x3_corrected ? 2 : 1;
        check_launches(&s, 2 + main, &devices[cases[i].gpu]);
        CHECK(s.family == (refused ? &fa_cuda_backward_simt : cases[i].family) &&
                  (refused || s.launches[main].variant == cases[i].variant) &&
                  strstr(s.passed_over, cases[i].why),
              "case %zu: %s%s", i, fa_variants[s.launches[main].variant].name, s.passed_over);
        if (refused) continue;
        p.deterministic = true; /* a semaphore for each warp of each part of a tile */
        const size_t semaphores = cases[i].d > 256 || cases[i].d_v > 256 ? 32 : 16;
        CHECK(plan_of(&p, &devices[cases[i].gpu]).workspace_bytes ==
                  s.workspace_bytes + (size_t)s.launches[0].tasks * semaphores * sizeof(int32_t),
              "case %zu: semaphores", i);
    }
}

/* Whether only this family takes the problem; otherwise, reason: why not. */
static bool takes(const fa_cuda_family *family, const fa_problem *p, const char *reason)
{
    fa_cuda_plan plan;
    char why[320] = "";
    if (fa_cuda_plan_make(p, &devices[H200], family, &plan, why, sizeof why))
        return plan.family == family;
    CHECK(strstr(why, reason), "expected \"%s\": %s", reason, why);
    return false;
}

/* Wide heads support options that may hide keys, as others do. */
static void test_wide_hidden_keys(void)
{
    const fa_cuda_family *const families[] = {&fa_cuda_backward_tf32, &fa_cuda_backward_tf32x3,
                                              &fa_cuda_backward_tf32x3_corrected,
                                              &fa_cuda_backward_tf32_in_place};
    for (size_t i = 0; i < sizeof families / sizeof families[0]; i++)
        for (int64_t d = 256; d <= 320; d += 64) {
            fa_problem p = make_float32(d, 64, i == 0 ? FA_PRECISION_TF32 : FA_PRECISION_FLOAT32);
            CHECK(takes(families[i], &p, "nothing"), "%s, head dim %d", families[i]->name, (int)d);
            p.window_left = 100;
            CHECK(takes(families[i], &p, "nothing"), "%s, window, head dim %d", families[i]->name,
                  (int)d);
            p.window_left = -1;
            p.diagonal_given = true;
            CHECK(takes(families[i], &p, "nothing"), "%s, diagonal, head dim %d", families[i]->name,
                  (int)d);
            p.diagonal_given = false;
            p.mask.data = memory;
            CHECK(takes(families[i], &p, "nothing"), "%s, mask, head dim %d", families[i]->name,
                  (int)d);
            p.bias = p.mask;
            CHECK(takes(families[i], &p, "nothing"), "%s, bias, head dim %d", families[i]->name,
                  (int)d);
        }
}

/* The precision chooses among the families for float32. What tensor cores refuse is computed by the
 * FMA units. A workspace size that is requested before the gradients are known is sufficient for
 * both. */
static void test_float32_families(void)
{
    const fa_cuda_family *const tf32 = &fa_cuda_backward_tf32,
                                *const tf32x3 = &fa_cuda_backward_tf32x3,
                                *const simt = &fa_cuda_backward_simt;
    /* sums, log-sum-exp and delta; queries and dout, their powers of two */
    const size_t factors = 2 * 8 * 1024 * sizeof(float), all = factors * (64 + 2 + 2 * 64 + 2);
    fa_problem p = make_float32(64, 64, FA_PRECISION_TF32);
    p.n_k = p.rows_k = 2000; /* with fewer keys sums are in dq */
    fa_cuda_plan s = plan_of(&p, &devices[H200]);
    CHECK(s.family == tf32 && s.workspace_bytes == all &&
              strcmp(s.arithmetic, "float16 products (mma.sync), float32 sums") == 0,
          "%s, %zu bytes", s.arithmetic, s.workspace_bytes);
    CHECK(takes(tf32, &p, "") && takes(tf32x3, &p, "") && takes(simt, &p, ""), "asked in tf32");
    p.dout.data = NULL;
    CHECK(plan_of(&p, &devices[H200]).workspace_bytes == all, "tf32, before gradients are known");
    fa_problem wide = make_float32(257, 64, FA_PRECISION_TF32);
    wide.n_k = wide.rows_k = 2000;
    s = plan_of(&wide, &devices[H200]);
    CHECK(s.workspace_bytes == factors * (3 * 320 + 4) &&
              strcmp(s.arithmetic, "float16 products (mma.sync), float32 sums") == 0,
          "wide: %s, %zu bytes", s.arithmetic, s.workspace_bytes);
    p.dout = somewhere;
    p.precision = FA_PRECISION_FLOAT32;
    s = plan_of(&p, &devices[A100]);
    CHECK(s.family == &fa_cuda_backward_tf32x3_corrected &&
              strcmp(s.arithmetic, "three float16 products for each (mma.sync), float32 sums") ==
                  0 &&
              strstr(s.passed_over, "; not tf32: options.precision is not FA_PRECISION_TF32"),
          "%s%s", s.arithmetic, s.passed_over);
    CHECK(!takes(tf32, &p, "options.precision is not FA_PRECISION_TF32") && takes(tf32x3, &p, "") &&
              takes(simt, &p, ""),
          "asked in float32");
    p.dout.data = NULL;
    CHECK(plan_of(&p, &devices[H200]).workspace_bytes == all + factors + factors / 32,
          "before gradients are known");
    p = make_float32(64, 64, FA_PRECISION_IEEE);
    s = plan_of(&p, &devices[H200]);
    CHECK(s.family == simt &&
              strstr(s.passed_over, "; not tf32x3_corrected: options.precision is FA_PRECISION_"
                                    "IEEE"),
          "%s", s.passed_over);
    CHECK(!takes(tf32x3, &p, "options.precision is FA_PRECISION_IEEE"), "asked in IEEE's");
    p = make_float32(64, 64, FA_PRECISION_TF32), p.dout.dtype = FA_FLOAT16;
    s = plan_of(&p, &devices[H200]);
    CHECK(s.family == simt && strstr(s.passed_over, "; not tf32: dout.dtype is float16"), "%s",
          s.passed_over);
    p = make_half(2, 8, 1000, 64);
    CHECK(!takes(tf32, &p, "q.dtype is float16"), "16 bits");
}

/* One launch more than tf32x3: it has the options of the kernel after it, as many blocks as the
 * device runs at a time, and a factor for each query. */
static void test_corrected(void)
{
    const fa_cuda_family *const corrected = &fa_cuda_backward_tf32x3_corrected;
    const struct {
        int gpu;
        int64_t d;
        bool softcap;
        int weight_sums, main, blocks; /* of a multiprocessor, of weight_sums */
    } cases[] = {{H200, 64, false, FA_VARIANT_backward_tf32x3_weight_sums_d64,
                  FA_VARIANT_backward_tf32x3_d64, 3},
                 {RTX_4090, 64, true, FA_VARIANT_backward_tf32x3_weight_sums_d64_general,
                  FA_VARIANT_backward_tf32x3_d64_general, 1},
                 {H200, 128, false, FA_VARIANT_backward_tf32x3_weight_sums_d128,
                  FA_VARIANT_backward_tf32x3_d128, 2},
                 {A100, 65, true, FA_VARIANT_backward_tf32x3_weight_sums_d128_general,
                  FA_VARIANT_backward_tf32x3_d128_small_general, 1},
                 {H200, 256, false, FA_VARIANT_backward_tf32x3_weight_sums_d256,
                  FA_VARIANT_backward_tf32x3_d256, 1},
                 {H200, 129, true, FA_VARIANT_backward_tf32x3_weight_sums_d256_general,
                  FA_VARIANT_backward_tf32x3_d256_general, 1},
                 {A100, 256, false, FA_VARIANT_backward_tf32x3_weight_sums_d256_general,
                  FA_VARIANT_backward_tf32x3_d256_small_general, 1},
                 {H200, 257, false, FA_VARIANT_backward_tf32x3_weight_sums_d384,
                  FA_VARIANT_backward_tf32x3_d384, 1},
                 {H200, 384, true, FA_VARIANT_backward_tf32x3_weight_sums_d384_general,
                  FA_VARIANT_backward_tf32x3_d384_general, 1},
                 {H200, 385, false, FA_VARIANT_backward_tf32x3_weight_sums_d512,
                  FA_VARIANT_backward_tf32x3_d512, 1},
                 {H200, 512, true, FA_VARIANT_backward_tf32x3_weight_sums_d512_general,
                  FA_VARIANT_backward_tf32x3_d512_general, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_float32(cases[i].d, cases[i].d, FA_PRECISION_FLOAT32);
        p.softcap = cases[i].softcap ? 20 : 0;
        const fa_cuda_device *const device = &devices[cases[i].gpu];
        CHECK(plan_of(&p, device).family == corrected, "case %zu, unasked", i);
        p.n_k = p.rows_k =
            i % 2 ? 2000 : 1000; /* with few keys sums are in dq, from Hopper on, to head dim 256 */
        const bool in_place = p.n_k == 1000 && cases[i].d <= 256 && cases[i].gpu == H200;
        const fa_cuda_plan s = plan_by(corrected, &p, device),
                           plain = plan_by(in_place ? &fa_cuda_backward_tf32_in_place
                                                    : &fa_cuda_backward_tf32x3,
                                           &p, device);
        const uint32_t most = (uint32_t)(device->multiprocessors * cases[i].blocks),
                       tasks = s.launches[0].grid;
        CHECK(s.count == plain.count + 1 && s.launches[1].variant == cases[i].weight_sums &&
                  s.launches[2].variant == cases[i].main &&
                  s.launches[1].grid == (tasks < most ? tasks : most) &&
                  s.launches[1].tasks == s.launches[0].tasks && !s.launches[1].idle &&
                  s.launches[2].backward_sm80.in_place == in_place,
              "case %zu: %d launches", i, s.count);
        CHECK(s.workspace_bytes ==
                  plain.workspace_bytes + (size_t)s.launches[0].tasks * (64 * 4 + 8),
              "case %zu: %zu bytes", i, s.workspace_bytes);
    }
    /* With any number of tiles, what is copied 16 bytes at a time is aligned. */
    for (int64_t tiles = 1; tiles <= 5; tiles++) {
        fa_problem p = make_float32(64, 64, FA_PRECISION_FLOAT32);
        p.batch = p.blocks_q = p.blocks_k = p.heads_q = p.heads_kv = 1;
        p.n_q = p.rows_q = p.max_q = 64 * tiles;
        const fa_cuda_plan s = plan_by(corrected, &p, &devices[H200]);
        const fa_cuda_backward_sm80_launch *l = &s.launches[0].backward_sm80;
        CHECK(s.launches[0].tasks == tiles && l->parts_offset % 16 == 0 &&
                  l->powers_offset % 16 == 0 && l->semaphores_offset % 16 == 0 &&
                  l->key_sums_offset % 16 == 0,
              "%d tiles: parts at %zu", (int)tiles, l->parts_offset);
    }
}

/* Small key tiles for sequences of which they compute fewer pairs. */
static void test_short_float32(void)
{
    const struct {
        int gpu;
        int64_t d, n_q, n_k, window_left;
        bool causal, packed;
        int variant;
    } cases[] = {{H200, 64, 64, 64, -1, false, false, FA_VARIANT_backward_tf32_d64_short},
                 {H200, 64, 128, 128, -1, false, false, FA_VARIANT_backward_tf32_d64},
                 {H200, 64, 300, 300, -1, false, false, FA_VARIANT_backward_tf32_d64_short},
                 {H200, 64, 600, 600, -1, false, false, FA_VARIANT_backward_tf32_d64},
                 {H200, 64, 128, 128, -1, true, false, FA_VARIANT_backward_tf32_d64_short},
                 {H200, 40, 512, 512, -1, true, false, FA_VARIANT_backward_tf32_d64_short},
                 {H200, 64, 1000, 1000, -1, true, false, FA_VARIANT_backward_tf32_d64},
                 {H200, 64, 1, 512, -1, true, false, FA_VARIANT_backward_tf32_d64},
                 {H200, 64, 512, 512, 64, true, false, FA_VARIANT_backward_tf32_d64},
                 {H200, 64, 512, 512, -1, true, true, FA_VARIANT_backward_tf32_d64},
                 {H200, 128, 300, 300, -1, false, false, FA_VARIANT_backward_tf32_d128_short},
                 {H200, 128, 600, 600, -1, false, false, FA_VARIANT_backward_tf32_d128},
                 {A100, 64, 300, 300, -1, false, false, FA_VARIANT_backward_tf32_d64_small},
                 {A100, 128, 300, 300, -1, false, false, FA_VARIANT_backward_tf32_d128_small}};
    static const int32_t starts[3];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_float32(cases[i].d, cases[i].d, FA_PRECISION_TF32);
        p.n_q = p.rows_q = cases[i].n_q;
        p.n_k = p.rows_k = cases[i].n_k;
        p.causal = cases[i].causal;
        p.window_left = cases[i].window_left;
        if (cases[i].packed) p.cu_seqlens_q = p.cu_seqlens_k = starts;
        const fa_cuda_plan s = plan_of(&p, &devices[cases[i].gpu]);
        CHECK(s.count > 1 && s.launches[1].variant == cases[i].variant, "case %zu: %s", i,
              fa_variants[s.launches[1].variant].name);
    }
}

/* Sums of dQ in dq: two launches, and no sums in the workspace, also before the gradients are
 * known. Only for short sequences in tf32, unless the environment requests it. */
static void test_in_place(void)
{
    const fa_cuda_family *const in_place = &fa_cuda_backward_tf32_in_place;
    const size_t delta = 2 * 8 * 1000 * sizeof(float);
    for (int exact = 0; exact < 2; exact++) {
        /* log-sum-exp and delta; queries and dout, their powers of two */
        const size_t rows = 2 * 8 * 1024 * sizeof(float) * (2 + 2 * 128 + 2);
        const int variant = exact ? FA_VARIANT_backward_tf32x3_d128 : FA_VARIANT_backward_tf32_d128;
        fa_problem p = make_float32(128, 128, exact ? FA_PRECISION_FLOAT32 : FA_PRECISION_TF32);
        CHECK((plan_of(&p, &devices[H200]).family == in_place) == !exact, "unasked");
        p.n_k = p.rows_k = 1025;
        CHECK(plan_of(&p, &devices[H200]).family != in_place, "unasked, long");
        p.n_k = p.rows_k = 1000;
        fa_cuda_plan s = plan_by(in_place, &p, &devices[H200]);
        CHECK(s.family == in_place && s.count == 2 && !s.launches[0].idle && !s.launches[1].idle &&
                  s.launches[0].variant == FA_VARIANT_backward_tf32_prepare_d128 &&
                  s.launches[1].variant == variant && s.launches[1].backward_sm80.in_place &&
                  s.launches[1].backward_sm80.rows_offset == 0 && s.workspace_bytes == rows,
              "%d launches, %zu bytes", s.count, s.workspace_bytes);
        p.dq.data = NULL;
        s = plan_by(in_place, &p, &devices[H200]);
        CHECK(s.count == 2 && !s.launches[0].idle && !s.launches[1].idle, "without dq");
        p.dq = somewhere, p.deterministic = true;
        s = plan_by(in_place, &p, &devices[H200]);
        CHECK(s.workspace_bytes == rows + 2 * 8 * 16 * 16 * sizeof(int32_t), "%zu bytes",
              s.workspace_bytes);
        /* simt, which computes what this family refuses, needs delta. */
        p.deterministic = false, p.dout.data = NULL;
        s = plan_by(in_place, &p, &devices[H200]);
        CHECK(s.workspace_bytes == (rows > delta ? rows : delta), "%zu bytes before",
              s.workspace_bytes);
        p.dout = somewhere, p.dout.dtype = FA_FLOAT16;
        CHECK(plan_by(in_place, &p, &devices[H200]).family == &fa_cuda_backward_simt, "dout");
    }
    const fa_problem half = make_half(3, 8, 1000, 128),
                     ieee = make_float32(128, 128, FA_PRECISION_IEEE);
    CHECK(plan_by(in_place, &half, &devices[H200]).family == &fa_cuda_backward_sm90_joined,
          "16 bits");
    CHECK(plan_by(in_place, &ieee, &devices[H200]).family == &fa_cuda_backward_simt, "IEEE");
}

/* The gradients of a bias and of sinks have launches afterwards, as in backward_sm90; one order of
 * the sums has semaphores. */
static void test_sm80_launches(void)
{
    static const float sinks[8] = {0};
    const size_t delta = 2 * 8 * 1000 * sizeof(float);
    fa_problem p = make_half(2, 8, 1000, 128);
    const size_t bytes = plan_of(&p, &devices[A100]).workspace_bytes;
    p.sinks = sinks;
    fa_cuda_plan s = plan_of(&p, &devices[A100]);
    CHECK(s.count == 3 && s.workspace_bytes == bytes + delta, "room for delta");
    p.dsinks = (float *)(void *)memory;
    s = plan_of(&p, &devices[A100]);
    CHECK(s.count == 5 && queued(&s) == 17 && s.workspace_bytes == bytes + delta, "launches %x",
          queued(&s));
    p.sinks = NULL, p.dsinks = NULL;
    p.deterministic = true;
    s = plan_of(&p, &devices[A100]);
    const fa_cuda_plan_launch *l = FIND(&s, backward_sm80);
    CHECK(s.workspace_bytes == bytes + 2 * 8 * 16 * 16 * sizeof(int32_t), "%zu bytes",
          s.workspace_bytes - bytes);
    CHECK(l && l->backward_sm80.ordered && l->backward_sm80.semaphores_offset == bytes &&
              l->backward_sm80.heads_together == 16,
          "one order");
    p.deterministic = false;
    p.dq.data = NULL;
    s = plan_of(&p, &devices[A100]);
    CHECK(s.count == 3 && s.launches[2].idle && !s.launches[1].idle, "without dq");
}

/* Options have their own variant, and the gradients of sinks launches afterwards. The workspace
 * that these need is included before they are requested. */
static void test_sm90(void)
{
    static const float slopes[8] = {0};
    const size_t delta = 2 * 8 * 1000 * sizeof(float);
    const fa_problem plain = make_half(2, 8, 1000, 64);
    fa_problem problems[5] = {plain, plain, plain, plain, plain};
    static const int variants[5] = {
        FA_VARIANT_backward_sm90_d64_softcap_f16, FA_VARIANT_backward_sm90_d64_alibi_f16,
        FA_VARIANT_backward_sm90_d64_by_rows_f16, FA_VARIANT_backward_sm90_d64_by_rows_f16,
        FA_VARIANT_backward_sm90_d64_dropout_f16};
    fa_cuda_plan s = plan_by(&fa_cuda_backward_sm90, &plain, &devices[H200]);
    const fa_cuda_plan_launch *l = FIND(&s, backward_sm90);
    const size_t bytes = s.workspace_bytes;
    CHECK(s.count == 3 && l && l->variant == FA_VARIANT_backward_sm90_d64_f16, "no options");
    problems[0].softcap = 1;
    problems[1].alibi_slopes = slopes;
    problems[2].bias = somewhere;
    problems[3].mask = somewhere;
    problems[4].dropout_threshold = 1;
    for (int i = 0; i < 5; i++) {
        s = plan_of(&problems[i], &devices[H200]);
        l = FIND(&s, backward_sm90);
        CHECK(s.count == 3 && l && l->variant == variants[i], "option %d: variant %d", i,
              l ? l->variant : -1);
        CHECK(s.workspace_bytes == bytes + (i == 2 ? delta : 0), "option %d: %zu bytes", i,
              s.workspace_bytes);
    }
    fa_problem p = problems[2];
    p.sinks = slopes;
    p.dsinks = (float *)(void *)memory;
    s = plan_of(&p, &devices[H200]);
    CHECK(s.count == 4 && FIND(&s, backward_dsinks_simt) && s.workspace_bytes == bytes + delta,
          "dsinks: %d launches, %zu bytes", s.count, s.workspace_bytes);
    CHECK(s.launches[0].backward_sm90.delta_offset == s.launches[3].workspace_offset,
          "delta is left elsewhere");
    for (int i = 3; i < s.count; i++)
        CHECK(s.launches[i].workspace_offset + s.launches[i].workspace_bytes == s.workspace_bytes &&
                  s.launches[i].workspace_bytes == delta,
              "delta of launch %d", i);
}

/* The launches of dbias, by letter: cleared before, rounded afterwards, separate. */
static const char *dbias_launches(const fa_problem *p)
{
    static char text[8];
    const fa_cuda_plan s = plan_of(p, &devices[H200]);
    (void)snprintf(text, sizeof text, "%s%s%s",
                   s.launches[0].variant == FA_VARIANT_backward_dbias_clear ? "c" : "",
                   FIND(&s, backward_dbias_round_simt) ? "r" : "",
                   FIND(&s, backward_dbias_simt) ? "a" : "");
    return text;
}

/* fa_workspace_size does not know whether there will be a dbias: as much is enough with it, among however many blocks the heads
 * of a group are split. */
static void test_workspace_with_dbias(void)
{
    static const struct {
        int64_t batch, heads_q, heads_kv, n, d;
        bool causal;
    } cases[] = {{1, 32, 1, 4096, 96, false}, {4, 32, 4, 2048, 96, true},
                 {1, 24, 8, 1385, 128, true}, {39, 8, 2, 456, 128, false},
                 {1, 5, 1, 3109, 80, true},   {2, 16, 4, 2000, 64, true}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_half_backward(cases[i].batch, cases[i].heads_q, cases[i].n);
        p.heads_kv = cases[i].heads_kv;
        p.d = p.d_v = cases[i].d;
        p.causal = cases[i].causal;
        p.bias = somewhere;
        const size_t asked = plan_of(&p, &devices[H200]).workspace_bytes,
                     of_sm90 = plan_by(&fa_cuda_backward_sm90, &p, &devices[H200]).workspace_bytes;
        p.dbias = somewhere;
        p.dbias_shape[0] = p.batch, p.dbias_shape[1] = p.heads_q;
        p.dbias_shape[2] = p.dbias_shape[3] = cases[i].n;
        const size_t needed = plan_of(&p, &devices[H200]).workspace_bytes;
        CHECK(needed <= asked, "case %zu: %zu bytes, %zu without dbias", i, needed, asked);
        CHECK(plan_by(&fa_cuda_backward_sm90, &p, &devices[H200]).workspace_bytes <= of_sm90,
              "case %zu: sm90 alone", i);
    }
}

/* The kernel of the other gradients computes dbias if it can. The workspace for that is included
 * before it is requested. */
static void test_dbias(void)
{
    enum { N = 1000 };
    fa_problem p = make_half(2, 8, N, 64);
    p.causal = true;
    const size_t bytes = workspace_of(&p), delta = 2 * 8 * N * sizeof(float);
    p.causal = false;
    const size_t sums = (size_t)8 * N * N * sizeof(float);
    p.bias = p.dbias = somewhere;
    p.dbias_shape[0] = 2, p.dbias_shape[1] = 8, p.dbias_shape[2] = p.dbias_shape[3] = N;
    CHECK(strcmp(dbias_launches(&p), "") == 0, "stored: %s", dbias_launches(&p));
    p.causal = true;
    CHECK(strcmp(dbias_launches(&p), "c") == 0, "stored, causal: %s", dbias_launches(&p));
    p.deterministic = true;
    CHECK(strcmp(dbias_launches(&p), "c") == 0, "stored, one order: %s", dbias_launches(&p));
    p.deterministic = false;
    p.dbias_shape[0] = 1;
    CHECK(strcmp(dbias_launches(&p), "c") == 0, "added: %s", dbias_launches(&p));
    p.dbias.dtype = FA_FLOAT16;
    CHECK(strcmp(dbias_launches(&p), "a") == 0 && workspace_of(&p) == bytes + delta, "no room: %s",
          dbias_launches(&p));
    p.workspace_size = bytes + delta + sums - 1;
    CHECK(strcmp(dbias_launches(&p), "a") == 0, "not enough room: %s", dbias_launches(&p));
    p.workspace_size += 256;
    CHECK(strcmp(dbias_launches(&p), "cr") == 0 && workspace_of(&p) <= p.workspace_size &&
              workspace_of(&p) >= bytes + delta + sums,
          "summed: %s, %zu bytes", dbias_launches(&p), workspace_of(&p));
    p.deterministic = true;
    p.workspace_size += 4096; /* for semaphores */
    CHECK(strcmp(dbias_launches(&p), "") == 0 && workspace_of(&p) <= p.workspace_size,
          "one order: %s", dbias_launches(&p));
    p.batch_invariant = true;
    CHECK(strcmp(dbias_launches(&p), "a") == 0, "one order for each item: %s", dbias_launches(&p));
    p.batch_invariant = false;
    p.workspace_size = bytes + sums / 2;
    CHECK(strcmp(dbias_launches(&p), "a") == 0, "one order without room: %s", dbias_launches(&p));
    p.deterministic = false;
    p.workspace_size = 2 * (bytes + sums);
    p.softcap = 1;
    CHECK(strcmp(dbias_launches(&p), "a") == 0, "softcap: %s", dbias_launches(&p));
    p.softcap = 0;
    p.dbias_shape[3] = 1;
    CHECK(strcmp(dbias_launches(&p), "a") == 0, "over keys: %s", dbias_launches(&p));
}

/* The same in float32, into a dbias of float32, unless sums of dQ have a factor of 0. */
static void test_dbias_of_float32(void)
{
    enum { N = 1000 };
    fa_problem p = make_float32(64, 64, FA_PRECISION_FLOAT32);
    p.n_q = p.rows_q = p.max_q = p.n_k = p.rows_k = N;
    p.scale = 1;
    p.bias = p.dbias = somewhere;
    p.dbias_shape[0] = p.batch, p.dbias_shape[1] = p.heads_q;
    p.dbias_shape[2] = p.dbias_shape[3] = N;
    for (int tf32 = 0; tf32 < 2; tf32++) {
        fa_problem x = p;
        if (tf32) x.precision = FA_PRECISION_TF32;
        CHECK(strcmp(dbias_launches(&x), "") == 0, "stored: %s", dbias_launches(&x));
        x.dbias_shape[0] = 1;
        const fa_cuda_plan s = plan_of(&x, &devices[H200]);
        /* After prepare and, in float32 grade, the sums of weights. */
        CHECK(s.launches[2 - tf32].variant == FA_VARIANT_backward_dbias_clear &&
                  !FIND(&s, backward_dbias_simt),
              "added: %d launches", s.count);
        x.scale = 0;
        CHECK(strcmp(dbias_launches(&x), "a") == 0, "a scale of 0: %s", dbias_launches(&x));
        x.scale = 1;
        x.deterministic = true;
        CHECK(strcmp(dbias_launches(&x), "a") == 0, "one order: %s", dbias_launches(&x));
        x.deterministic = false;
        x.dbias.dtype = FA_BFLOAT16;
        CHECK(strcmp(dbias_launches(&x), "a") == 0, "16 bits: %s", dbias_launches(&x));
    }
}

/* The variant that computes gradients with a bias of all rows and keys. */
static int bias_variant(const fa_problem *p)
{
    const fa_cuda_plan s = plan_of(p, &devices[H200]);
    const fa_cuda_plan_launch *l = FIND(&s, backward_sm90);
    return l ? l->variant : -1;
}

static fa_cuda_backward_sm90_launch plan_shared_dbias(const fa_problem *p)
{
    static const fa_cuda_backward_sm90_launch none;
    const fa_cuda_plan s = plan_of(p, &devices[H200]);
    const fa_cuda_plan_launch *l = FIND(&s, backward_sm90);
    return l ? l->backward_sm90 : none;
}

/* dbias that heads share. In any order it is added to in float32, unless there is much room. In one order heads are in
 * groups, if these are not much less than a round. */
static void test_dbias_of_heads(void)
{
    enum { N = 4096, BATCH = 4, HEADS = 16 };
    fa_problem p = make_half(BATCH, HEADS, N, 128);
    p.bias = p.dbias =
        (fa_view){.data = memory, .dtype = FA_FLOAT16, .stride = {(int64_t)N * N, 0, N, 1}};
    p.dbias_shape[0] = BATCH, p.dbias_shape[1] = 1, p.dbias_shape[2] = p.dbias_shape[3] = N;
    p.workspace_size = SIZE_MAX;
    CHECK(plan_shared_dbias(&p).left.units == 0 && strcmp(dbias_launches(&p), "cr") == 0,
          "float32 sums: %s", dbias_launches(&p));
    p.deterministic = true;
    const fa_cuda_backward_sm90_launch own = plan_shared_dbias(&p);
    CHECK(own.left.blocks == 4 && own.left.groups == HEADS / 4 && own.left.group_units == N / 128 &&
              own.left.units - own.left.summed <= own.left.group_units && own.heads_together == 4,
          "units of %d blocks, %d groups of %d, the last ones from %d of %d on", own.left.blocks,
          own.left.groups, own.left.group_units, own.left.summed, own.left.units);
    p.n_q = p.n_k = p.rows_q = p.rows_k = N / 2;
    p.dbias_shape[2] = p.dbias_shape[3] = N / 2;
    CHECK(plan_shared_dbias(&p).left.groups == 1 && plan_shared_dbias(&p).left.blocks == HEADS,
          "groups of half a round");
    p = make_half(4 * BATCH, HEADS, N, 128);
    p.bias = p.dbias =
        (fa_view){.data = memory, .dtype = FA_FLOAT16, .stride = {(int64_t)N * N, 0, N, 1}};
    p.dbias_shape[0] = 4 * BATCH, p.dbias_shape[1] = 1;
    p.dbias_shape[2] = p.dbias_shape[3] = N;
    p.workspace_size = SIZE_MAX;
    CHECK(plan_shared_dbias(&p).left.groups == HEADS / 4, "much room, in any order");
}

/* A bias alone has its own variant if TMA loads it and stores dbias. */
static void test_bias_alone(void)
{
    enum { N = 1024 };
    for (int dim = 64; dim <= 128; dim += 64) {
        const int alone = dim == 64 ? FA_VARIANT_backward_sm90_d64_bias_f16
                                    : FA_VARIANT_backward_sm90_d128_bias_f16,
                  by_rows = dim == 64 ? FA_VARIANT_backward_sm90_d64_by_rows_f16
                                      : FA_VARIANT_backward_sm90_d128_by_rows_f16;
        const fa_view bias = {
            .data = memory, .dtype = FA_FLOAT16, .stride = {8 * N * N, N * N, N, 1}};
        const fa_problem plain = make_half(2, 8, N, dim);
        fa_problem p = plain;
        p.bias = bias;
        CHECK(bias_variant(&p) == alone, "without dbias: variant %d", bias_variant(&p));
        p.causal = true;
        CHECK(bias_variant(&p) == alone, "causal: variant %d", bias_variant(&p));
        p.causal = false;
        p.dbias = bias;
        p.dbias_shape[0] = 2, p.dbias_shape[1] = 8, p.dbias_shape[2] = p.dbias_shape[3] = N;
        CHECK(bias_variant(&p) == alone, "with dbias: variant %d", bias_variant(&p));
        p.dbias.dtype = FA_FLOAT32;
        CHECK(bias_variant(&p) == alone, "in 32 bits: variant %d", bias_variant(&p));
        p.dbias.stride[3] = 2;
        CHECK(bias_variant(&p) == by_rows, "dbias by strides: variant %d", bias_variant(&p));
        p = plain;
        p.bias = bias;
        p.bias.dtype = FA_BFLOAT16;
        CHECK(bias_variant(&p) == by_rows, "another type: variant %d", bias_variant(&p));
        p.bias = bias;
        p.mask = somewhere;
        CHECK(bias_variant(&p) == by_rows, "with a mask: variant %d", bias_variant(&p));
        p.mask.data = NULL;
        p.bias.stride[2] = N + 1;
        CHECK(bias_variant(&p) == by_rows, "rows that TMA cannot load: variant %d",
              bias_variant(&p));
        p.bias = bias;
        p.softcap = 1;
        CHECK(fa_variants[bias_variant(&p)].options == FA_SM90_ALL, "with a softcap: variant %d",
              bias_variant(&p));
    }
}

/* So it has at wide head dims if threads can load two keys at once; 256 has no registers for dbias. Dropout alone has one, too. */
static void test_options_of_wide_heads(void)
{
    enum { N = 1024 };
    static const struct {
        int dim, bias, dropout, softcap, general;
    } cases[] = {{192, FA_VARIANT_backward_sm90_wide_d192_bias_f16,
                  FA_VARIANT_backward_sm90_wide_d192_dropout_f16,
                  FA_VARIANT_backward_sm90_wide_d192_softcap_f16,
                  FA_VARIANT_backward_sm90_wide_general192_f16},
                 {256, FA_VARIANT_backward_sm90_wide_d256_bias_f16,
                  FA_VARIANT_backward_sm90_wide_d256_dropout_f16,
                  FA_VARIANT_backward_sm90_wide_d256_softcap_f16,
                  FA_VARIANT_backward_sm90_wide_general256_f16}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const int dim = cases[i].dim;
        const fa_view bias = {
            .data = memory, .dtype = FA_FLOAT16, .stride = {8 * N * N, N * N, N, 1}};
        const fa_problem plain = make_half(2, 8, N, dim);
        fa_problem p = plain;
        p.softcap = 30.0f;
        CHECK(bias_variant(&p) == cases[i].softcap, "d %d, softcap: variant %d", dim,
              bias_variant(&p));
        p.softcap = 0.0f;
        p.dropout_threshold = 1;
        CHECK(bias_variant(&p) == cases[i].dropout, "d %d, dropout: variant %d", dim,
              bias_variant(&p));
        p.bias = bias;
        CHECK(bias_variant(&p) == cases[i].general, "d %d, both: variant %d", dim,
              bias_variant(&p));
        p.dropout_threshold = 0;
        CHECK(bias_variant(&p) == cases[i].bias, "d %d: variant %d", dim, bias_variant(&p));
        p.bias.stride[2] = 0;
        CHECK(bias_variant(&p) == cases[i].bias, "d %d, for keys: variant %d", dim,
              bias_variant(&p));
        p.bias.stride[2] = N + 1;
        CHECK(bias_variant(&p) == cases[i].general, "d %d, odd rows: variant %d", dim,
              bias_variant(&p));
        p.bias = bias;
        p.n_k = p.rows_k = N - 1;
        CHECK(bias_variant(&p) == cases[i].general, "d %d, odd keys: variant %d", dim,
              bias_variant(&p));
        p.n_k = p.rows_k = N;
        p.bias.dtype = FA_BFLOAT16;
        CHECK(bias_variant(&p) == cases[i].general, "d %d, another type: variant %d", dim,
              bias_variant(&p));
        p.bias = p.dbias = bias;
        p.dbias_shape[0] = 2, p.dbias_shape[1] = 8, p.dbias_shape[2] = p.dbias_shape[3] = N;
        CHECK(bias_variant(&p) == (dim == 192 ? cases[i].bias : cases[i].general),
              "d %d, with dbias: variant %d", dim, bias_variant(&p));
    }
}

/* In short sequences without a mask, and with enough blocks, one order of sums is the default. */
static void test_short_and_full(void)
{
    static const struct {
        int64_t batch, heads, n;
        int dim;
        bool ordered, causal;
    } rows[] = {
        {32, 32, 512, 64, true, false},   {2, 32, 512, 64, false, false},
        {32, 32, 256, 64, true, false},   {32, 32, 1024, 64, true, false},
        {32, 32, 512, 64, true, true},    {32, 16, 512, 128, true, false},
        {64, 16, 300, 128, true, false},  {4, 16, 512, 128, false, false},
        {3, 16, 1000, 128, false, false}, {128, 16, 128, 128, false, false},
        {32, 16, 512, 96, true, false},   {4, 16, 4096, 128, false, true},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        fa_problem p = make_half(rows[i].batch, rows[i].heads, rows[i].n, rows[i].dim);
        p.causal = rows[i].causal;
        const fa_cuda_plan s = plan_of(&p, &devices[H200]);
        bool ordered = false;
        for (int n = 0; n < s.count; n++) ordered |= fa_variants[s.launches[n].variant].ordered;
        CHECK(ordered == rows[i].ordered, "row %d: %s", (int)i,
              ordered ? "one order" : "any order");
    }
}

/* Splits of a group of seven query heads differ: in one order, too, and where one launch could not have them. Blocks that round dQ, which
 * have whole groups, would be few. */
static void test_uneven_splits(void)
{
    static const struct {
        int64_t batch, heads_q, heads_kv, n;
        int64_t window;
        bool causal, ordered;
        int splits;
    } cases[] = {{1, 28, 4, 4096, -1, true, false, 4},  {1, 28, 4, 4096, -1, true, true, 4},
                 {2, 7, 1, 11563, -1, false, false, 4}, {1, 28, 4, 764, 231, true, false, 4},
                 {1, 28, 4, 8192, -1, true, true, 7},   {1, 28, 4, 16384, -1, true, true, 7},
                 {1, 28, 4, 4992, -1, true, true, 4},   {4, 28, 4, 2048, -1, true, false, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_half_backward(cases[i].batch, cases[i].heads_q, cases[i].n);
        p.heads_kv = cases[i].heads_kv;
        p.causal = cases[i].causal;
        p.window_left = cases[i].window;
        p.deterministic = cases[i].ordered;
        const fa_cuda_plan plan = plan_of(&p, &devices[H200]);
        const fa_cuda_plan_launch *l = FIND(&plan, backward_sm90);
        const int splits = l ? l->backward_sm90.splits : 1;
        CHECK(splits == cases[i].splits && (!l || l->backward_sm90.even_splits == (splits == 7)),
              "case %zu: %d splits", i, splits);
    }
}

/* In one order each query head of a group has its own blocks in few rounds of long rows without a mask. */
static void test_full_groups(void)
{
    static const struct {
        int64_t heads_q, heads_kv, n, d;
        bool ordered, shares;
    } cases[] = {{16, 2, 4665, 128, true, false},  {16, 2, 8192, 64, true, false},
                 {12, 4, 6729, 64, true, false},   {12, 4, 6729, 64, false, true},
                 {24, 8, 15781, 128, true, false}, {16, 4, 8320, 128, true, true}, /* 1.97 rounds */
                 {32, 8, 4352, 128, true, true}};                                  /* 2.1 rounds */
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_half_backward(1, cases[i].heads_q, cases[i].n);
        p.heads_kv = cases[i].heads_kv;
        p.d = p.d_v = cases[i].d;
        p.deterministic = cases[i].ordered;
        const fa_cuda_plan plan = plan_of(&p, &devices[H200]);
        const int64_t group = p.heads_q / p.heads_kv;
        const int splits = plan.launches[1].backward_sm90.splits;
        CHECK((splits < group) == cases[i].shares, "case %zu: %d splits", i, splits);
    }
}

/* Blocks share key tiles if there are too few for the device. At head dim 128 a multiprocessor has
 * one block of backward_sm80, too. */
static void test_splits(void)
{
    static const struct {
        int64_t batch, heads_q, heads_kv, n;
        bool causal, invariant;
        int splits;                              /* by query heads */
        int splits_sm80, query_parts, keys_sm80; /* in backward_sm80 also by queries; of a tile */
    } cases[] = {
        {4, 32, 1, 4096, true, false, 8, 8, 1, 128},  {4, 32, 1, 4096, false, false, 1, 1, 1, 128},
        {4, 32, 8, 4096, true, false, 1, 1, 1, 128},  {4, 32, 32, 512, true, false, 1, 1, 1, 64},
        {1, 32, 1, 4096, false, false, 1, 1, 4, 128}, {1, 32, 1, 4096, true, true, 1, 1, 1, 128},
        {1, 12, 2, 512, true, false, 6, 3, 8, 64},    {1, 2, 1, 512, true, false, 2, 2, 8, 64},
        {1, 1, 1, 1500, false, false, 1, 1, 10, 64},  {1, 1, 1, 255, true, false, 1, 1, 3, 64},
        {1, 1, 1, 1500, false, true, 1, 1, 1, 128},   {1, 24, 8, 1385, true, false, 3, 3, 1, 128},
        {3, 5, 1, 3109, true, false, 5, 5, 1, 128},   {39, 8, 2, 456, false, false, 1, 2, 1, 128},
        {76, 16, 16, 192, false, false, 1, 1, 1, 64}, {1, 7, 1, 3915, true, false, 7, 7, 1, 128},
        {1, 28, 4, 4096, true, false, 4, 7, 1, 128}};
    const size_t count = sizeof cases / sizeof cases[0];
    for (size_t i = 0; i < 2 * count; i++) {
        const bool sm80 = i >= count;
        const size_t c = i % count;
        fa_problem p = make_half_backward(cases[c].batch, cases[c].heads_q, cases[c].n);
        p.heads_kv = cases[c].heads_kv;
        p.causal = cases[c].causal;
        p.batch_invariant = cases[c].invariant;
        if (sm80) p.max_q = p.n_q;
        fa_cuda_plan plan =
            sm80 ? plan_by(&fa_cuda_backward_sm80, &p, &devices[H200]) : plan_apart(&p);
        const fa_cuda_plan_launch *l =
            sm80 ? FIND(&plan, backward_sm80) : FIND(&plan, backward_sm90);
        const fa_cuda_plan_launch *keys =
            sm80 ? FIND(&plan, backward_finish_keys_sm80) : FIND(&plan, backward_finish_keys_sm90);
        const int splits = !l     ? 0
                           : sm80 ? l->backward_sm80.splits
                                  : l->backward_sm90.splits,
                  parts = !l     ? 1
                          : sm80 ? cases[c].query_parts
                                 : l->backward_sm90.query_parts,
                  expected = (sm80 ? cases[c].splits_sm80 : cases[c].splits) * parts;
        const int64_t each = sm80 ? cases[c].keys_sm80 : 128,
                      tasks = p.batch * p.heads_kv * ((p.n_k + each - 1) / each);
        CHECK(splits == expected && tasks_of(l) == splits * tasks, "case %zu: %d splits", i,
              splits);
        CHECK(!sm80 || !l || l->backward_sm80.query_parts == cases[c].query_parts,
              "case %zu: parts of queries", i);
        CHECK(splits > 1 ? tasks_of(keys) == tasks : !keys, "case %zu: finish_keys", i);
        if (!keys) continue;
        const size_t offset =
            sm80 ? keys->backward_sm80.key_sums_offset : keys->backward_sm90.key_sums_offset;
        CHECK(offset + (size_t)(tasks_of(l) * each * 256 * 4) <= plan.workspace_bytes,
              "case %zu: room", i);
        p.dk.data = p.dv.data = NULL;
        plan = sm80 ? plan_by(&fa_cuda_backward_sm80, &p, &devices[H200]) : plan_apart(&p);
        keys =
            sm80 ? FIND(&plan, backward_finish_keys_sm80) : FIND(&plan, backward_finish_keys_sm90);
        CHECK(keys && keys->idle, "case %zu: keys for nobody", i);
    }
}

/* Only requested results are computed, and delta only if something needs it. */
static void test_wanted(void)
{
    static float sinks[1];
    fa_problem p = make_problem(FA_PASS_BACKWARD, 1, 1, 64, 64);
    p.precision = FA_PRECISION_IEEE;
    p.dbias_shape[0] = p.dbias_shape[1] = p.dbias_shape[2] = p.dbias_shape[3] = 1;
    fa_cuda_plan s = plan_apart(&p);
    CHECK(queued(&s) == 0, "launches %x for nothing", queued(&s));
    p.dq = somewhere;
    s = plan_apart(&p);
    CHECK(queued(&s) == 3, "launches %x for dq alone", queued(&s));
    p.dq.data = NULL;
    p.dv = somewhere;
    s = plan_apart(&p);
    CHECK(queued(&s) == 5, "launches %x for dv alone", queued(&s));
    p.dv.data = NULL;
    p.dbias = somewhere;
    s = plan_apart(&p);
    CHECK(queued(&s) == 9, "launches %x for dbias alone", queued(&s));
    p.dbias.data = NULL;
    p.dsinks = sinks;
    s = plan_apart(&p);
    CHECK(queued(&s) == 17, "launches %x for dsinks alone", queued(&s));
    p = make_backward(1, 1, 64, 64);
    s = plan_apart(&p);
    CHECK(queued(&s) == 31, "launches %x for everything", queued(&s));
    for (int i = 1; i < s.count; i++)
        CHECK(s.launches[i - 1].variant < s.launches[i].variant, "the order of launches");
    p = make_problem(FA_PASS_WEIGHTS, 1, 1, 64, 64);
    s = plan_apart(&p);
    CHECK(s.launches[0].idle, "weights for nothing");
}

static fa_cuda_plan plan_of_combine(const fa_combine_problem *c)
{
    fa_cuda_plan plan;
    char why[320] = "";
    CHECK(fa_cuda_plan_combine(c, &devices[0], &plan, why, sizeof why), "%s", why);
    CHECK(plan.count == 1, "%d launches", plan.count);
    check_launch(&plan, &plan.launches[0], &devices[0]);
    return plan;
}

static void test_combine(void)
{
    static float lse[4];
    fa_combine_problem c = {
        .batch = 2, .heads = 3, .n_q = 5, .d_v = 64, .num_parts = FA_COMBINE_FEW};
    fa_cuda_plan plan = plan_of_combine(&c);
    CHECK(plan.launches[0].variant == FA_VARIANT_combine_few && plan.launches[0].tasks == 8 &&
              plan.workspace_bytes == 0,
          "%lld tasks", (long long)plan.launches[0].tasks);
    c.num_parts = FA_COMBINE_MANY;
    plan = plan_of_combine(&c);
    CHECK(plan.launches[0].variant == FA_VARIANT_combine_many && plan.workspace_bytes == 0, "%s",
          fa_variants[plan.launches[0].variant].name);
    c.num_parts = FA_COMBINE_MANY + 1;
    plan = plan_of_combine(&c);
    CHECK(plan.launches[0].variant == FA_VARIANT_combine_many &&
              plan.workspace_bytes == 30 * 65 * sizeof(float),
          "without lse: %zu bytes of workspace", plan.workspace_bytes);
    c.lse = lse;
    plan = plan_of_combine(&c);
    CHECK(plan.workspace_bytes == 0, "%zu bytes of workspace", plan.workspace_bytes);
    c.out.dtype = FA_BFLOAT16;
    plan = plan_of_combine(&c);
    CHECK(plan.workspace_bytes == 30 * 65 * sizeof(float), "rounded sums: %zu bytes of workspace",
          plan.workspace_bytes);
    CHECK(fa_variants[FA_VARIANT_combine_few].max_parts == FA_COMBINE_FEW &&
              fa_variants[FA_VARIANT_combine_many].max_parts == FA_COMBINE_MANY,
          "parts of a launch");
}

static void test_refusals(void)
{
    fa_cuda_plan plan;
    char why[320] = "";
    fa_problem p = make_backward(1, 1, 1, 64);
    fa_cuda_device old = devices[0];
    old.minor = 0;
    CHECK(!fa_cuda_plan_make(&p, &old, NULL, &plan, why, sizeof why) &&
              strstr(why, "has architecture 7.0: expected 7.5 or later"),
          "%s", why);
    old = devices[0];
    old.smem_per_block = 49152;
    CHECK(!fa_cuda_plan_make(&p, &old, NULL, &plan, why, sizeof why) &&
              strstr(why, "has 49152 bytes of shared memory for a block: expected "),
          "%s", why);
    for (int i = 0; i < DEVICES; i++) {
        p = make_half(1, 2, 10, 576);
        p.d_v = 512;
        CHECK(!fa_cuda_plan_make(&p, &devices[i], NULL, &plan, why, sizeof why) &&
                  strstr(why, "q.shape[3] is 576: backward on CUDA has head dims to 512"),
              "%s", why);
        p.pass = FA_PASS_WEIGHTS;
        p.weights = p.q;
        CHECK(fa_cuda_plan_make(&p, &devices[i], NULL, &plan, why, sizeof why), "%s", why);
    }
}

/* Five launches fit into the text of fa_describe. */
static void test_text(void)
{
    char text[512];
    fa_problem p = make_problem(FA_PASS_BACKWARD, 2, 4, 100, 128);
    p.precision = FA_PRECISION_IEEE;
    fa_cuda_plan s = plan_apart(&p);
    fa_cuda_plan_describe(&p, &devices[H200], &s, text, sizeof text);
    CHECK(strcmp(text, "cuda backward backward_delta (query tile 32, 32 blocks of 128 threads), "
                       "backward_dq_simt_d128 (query tile 64, key tile 64, 16 blocks of 128 "
                       "threads), backward_dkv_simt_d128 (query tile 64, key tile 64, 16 blocks of "
                       "128 threads): float32 sums on FMA units, deterministic on sm_90; not "
                       "sm90: q.dtype is float32; not tf32: options.precision is not "
                       "FA_PRECISION_TF32; not tf32x3_corrected: options.precision is "
                       "FA_PRECISION_IEEE") == 0,
          "%s", text);
    p = make_backward(2, 4, 1 << 28, 512);
    s = plan_apart(&p);
    fa_cuda_plan_describe(&p, &devices[H200], &s, text, sizeof text);
    CHECK(strstr(text, "backward_dsinks (4 blocks of 512 threads): ") && strstr(text, "on sm_90"),
          "%s", text);
    fa_cuda_plan_describe(&p, &devices[H200], &s, text, 40);
    CHECK(strcmp(text, "cuda backward backward_delta (query til") == 0, "%s", text);
    p = make_problem(FA_PASS_WEIGHTS, 2, 4, 100, 128);
    s = plan_apart(&p);
    fa_cuda_plan_describe(&p, &devices[H200], &s, text, sizeof text);
    CHECK(strcmp(text,
                 "cuda weights weights_simt: float32 sums on FMA units, row tile 64, key tile "
                 "64, 16 blocks of 128 threads on sm_90") == 0,
          "%s", text);
}

static const fa_cuda_backward_sm90_launch *find_sm90(const fa_cuda_plan *plan)
{
    static const fa_cuda_backward_sm90_launch none;
    const fa_cuda_plan_launch *l = FIND(plan, backward_sm90);
    CHECK(l, "%s", plan->passed_over);
    return l ? &l->backward_sm90 : &none;
}

/* The narrowest variant that has room for both head dims. */
static void test_wide(void)
{
    static const struct {
        int64_t d, d_v;
        int plain, general, prepare;
    } cases[] = {
        {65, 1, FA_VARIANT_backward_sm90_d96_f16, FA_VARIANT_backward_sm90_general128_f16,
         FA_VARIANT_backward_sm90_prepare_d128_f16},
        {64, 96, FA_VARIANT_backward_sm90_d96_f16, FA_VARIANT_backward_sm90_general128_f16,
         FA_VARIANT_backward_sm90_prepare_d128_f16},
        {8, 97, FA_VARIANT_backward_sm90_d128_f16, FA_VARIANT_backward_sm90_general128_f16,
         FA_VARIANT_backward_sm90_prepare_d128_f16},
        {128, 128, FA_VARIANT_backward_sm90_d128_f16, FA_VARIANT_backward_sm90_general128_f16,
         FA_VARIANT_backward_sm90_prepare_d128_f16},
        {129, 8, FA_VARIANT_backward_sm90_d192_128_f16,
         FA_VARIANT_backward_sm90_wide_general192_f16, FA_VARIANT_backward_sm90_prepare_d192_f16},
        {192, 128, FA_VARIANT_backward_sm90_d192_128_f16,
         FA_VARIANT_backward_sm90_wide_general192_f16, FA_VARIANT_backward_sm90_prepare_d192_f16},
        {64, 129, FA_VARIANT_backward_sm90_wide_d192_f16,
         FA_VARIANT_backward_sm90_wide_general192_f16, FA_VARIANT_backward_sm90_prepare_d192_f16},
        {192, 192, FA_VARIANT_backward_sm90_wide_d192_f16,
         FA_VARIANT_backward_sm90_wide_general192_f16, FA_VARIANT_backward_sm90_prepare_d192_f16},
        {193, 1, FA_VARIANT_backward_sm90_wide_d256_f16,
         FA_VARIANT_backward_sm90_wide_general256_f16, FA_VARIANT_backward_sm90_prepare_d256_f16},
        {64, 256, FA_VARIANT_backward_sm90_wide_d256_f16,
         FA_VARIANT_backward_sm90_wide_general256_f16, FA_VARIANT_backward_sm90_prepare_d256_f16}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_half_backward(2, 8, 1000);
        p.d = cases[i].d;
        p.d_v = cases[i].d_v;
        fa_cuda_plan plan = plan_apart(&p);
        const fa_variant *v = &fa_variants[cases[i].plain];
        const int cluster = v->cluster ? 2 : 1;
        const int box = v->cluster ? 64 : 128, keys = box * cluster, tiles = 1024 / keys;
        const fa_cuda_plan_launch *l = FIND(&plan, backward_sm90);
        CHECK(l && l->variant == cases[i].plain && l->threads == (v->cluster ? 512 : 384) &&
                  l->tile_k == keys && l->tasks == 2 * 8 * tiles,
              "case %zu", i);
        CHECK(l && l->cluster == (uint32_t)cluster && l->grid == l->tasks * cluster,
              "case %zu: blocks", i);
        CHECK(l && l->smem_bytes < (uint32_t)devices[H200].smem_per_block,
              "case %zu: shared memory", i);
        CHECK(l && l->backward_sm90.maps[1].box[1] == (uint32_t)box, "case %zu: keys of a box", i);
        CHECK(plan.launches[0].variant == cases[i].prepare &&
                  plan.workspace_bytes == (size_t)(2 * 8 * 1024 * (v->head_dim + 2)) * 4,
              "case %zu: prepare, %zu bytes", i, plan.workspace_bytes);
        p.softcap = 1;
        p.dropout_threshold = 1;
        plan = plan_apart(&p);
        l = FIND(&plan, backward_sm90);
        CHECK(l && l->variant == cases[i].general, "case %zu with two options", i);
    }
}

/* All launches overlap the previous one, except the kernel for wide head dims. */
static void test_overlaps(void)
{
    fa_problem p = make_half_backward(2, 8, 1000);
    for (int64_t d = 64; d <= 256; d += 64) {
        p.d = p.d_v = d;
        const fa_cuda_plan plan = plan_apart(&p);
        CHECK(plan.count == 3, "d %lld: %d launches", (long long)d, plan.count);
        CHECK(plan.launches[0].overlaps && plan.launches[1].overlaps == (d <= 128) &&
                  plan.launches[2].overlaps,
              "d %lld", (long long)d);
    }
    p.d = p.d_v = 64;
    fa_problem lengths = p;
    static int32_t own[2];
    lengths.seqlens_k = own;
    const fa_cuda_plan later = plan_apart(&lengths);
    CHECK(!later.launches[0].overlaps && later.launches[1].overlaps,
          "main reads lengths while the launch that writes them may run");
    const fa_cuda_plan plan = plan_of(&p, &devices[A100]);
    for (int i = 0; i < plan.count; i++)
        CHECK(!plan.launches[i].overlaps, "launch %d overlaps on an A100", i);
}

/* Blocks clear sums of dQ for groups of heads a round of blocks ahead; prepare, those of the first
 * groups. */
static void test_clear_ahead(void)
{
    static const struct {
        int64_t batch, heads_q, heads_kv, n;
        bool causal, ordered;
        int groups, ahead, blocks, tiles;
    } cases[] = {{4, 16, 16, 4096, true, false, 8, 1, 256, 512},
                 {8, 16, 16, 2048, true, false, 16, 2, 128, 256},
                 {1, 16, 16, 16384, true, false, 8, 1, 256, 512},
                 {4, 16, 16, 4096, false, false, 64, 7, 32, 64},
                 {16, 16, 16, 1024, true, false, 0, 0, 0, 0}, /* short heads */
                 {4, 32, 8, 4096, false, false, 0, 0, 0, 0},  /* too much for the L2 cache */
                 {1, 4, 4, 4096, true, false, 0, 0, 0, 0},    /* one group */
                 {4, 16, 16, 4096, true, true, 0, 0, 0, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_half_backward(cases[i].batch, cases[i].heads_q, cases[i].n);
        p.heads_kv = cases[i].heads_kv;
        p.causal = cases[i].causal;
        p.deterministic = cases[i].ordered;
        const fa_cuda_plan plan = plan_by(&fa_cuda_backward_sm90, &p, &devices[H200]);
        const fa_cuda_backward_sm90_launch *x = find_sm90(&plan);
        CHECK(x->groups == cases[i].groups && x->groups_ahead == cases[i].ahead &&
                  x->group_blocks == cases[i].blocks && x->group_tiles == cases[i].tiles,
              "case %zu: %d groups of %d blocks and %d tiles, %d ahead", i, x->groups,
              x->group_blocks, x->group_tiles, x->groups_ahead);
        CHECK(x->groups == 0 ||
                  x->cleared_offset + (size_t)x->groups * sizeof(int32_t) <= plan.workspace_bytes,
              "case %zu: room", i);
        CHECK(x->sum_tiles == cases[i].batch * cases[i].heads_q * cases[i].n / 64, "case %zu", i);
    }

    /* A group's sums are no range of tiles if only queries or only keys are packed. */
    static const int32_t starts[] = {0, 4096, 8192, 12288, 16384};
    for (int packed = 0; packed < 4; packed++) {
        fa_problem p = make_half_backward(4, 16, 4096);
        p.causal = true;
        if (packed & 1) p.cu_seqlens_q = starts, p.rows_q = 16384, p.blocks_q = 1;
        if (packed & 2) p.cu_seqlens_k = starts, p.rows_k = 16384, p.blocks_k = 1;
        const fa_cuda_plan plan = plan_by(&fa_cuda_backward_sm90, &p, &devices[H200]);
        CHECK((find_sm90(&plan)->groups > 0) == (packed == 0 || packed == 3), "packed: %d", packed);
    }
}

/* In short sequences a head's first block stores its shares of dq and runs ahead of the others. */
static void test_first_ahead(void)
{
    static const struct {
        int64_t heads_q, heads_kv, n, d, window;
        bool causal, ahead;
        int64_t together;
    } cases[] = {{16, 16, 1024, 128, -1, true, true, 8},   {16, 16, 512, 128, -1, true, true, 8},
                 {16, 16, 128, 128, -1, true, true, 33},   {16, 16, 2048, 128, -1, true, false, 8},
                 {16, 16, 1024, 64, -1, true, false, 17},  {16, 16, 512, 64, -1, true, true, 64},
                 {16, 16, 1024, 128, -1, false, false, 1}, {16, 4, 1024, 128, -1, true, false, 64},
                 {16, 16, 1024, 128, 100, true, false, 1}, {16, 16, 1024, 256, -1, true, true, 18}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_half_backward(16, cases[i].heads_q, cases[i].n);
        p.heads_kv = cases[i].heads_kv;
        p.d = p.d_v = cases[i].d;
        p.causal = cases[i].causal;
        p.window_left = cases[i].window;
        const bool persistent = cases[i].d == 64;
        const fa_cuda_plan plan =
            plan_by(persistent ? &fa_cuda_backward_sm90_persistent : &fa_cuda_backward_sm90, &p,
                    &devices[H200]);
        const fa_cuda_backward_sm90_launch *x =
            persistent ? &FIND(&plan, backward_sm90_persistent)->backward_sm90 : find_sm90(&plan);
        CHECK(x->first_stored == cases[i].ahead && x->heads_together == cases[i].together &&
                  (!x->first_stored || x->groups == 0),
              "case %zu: %d, %lld heads take turns", i, x->first_stored,
              (long long)x->heads_together);
    }
}

/* One order of the sums of dq, if FA_DETERMINISTIC or FA_BATCH_INVARIANT requests it: semaphores,
 * and blocks of several heads that take turns. */
static void test_order(void)
{
    fa_problem p = make_half_backward(4, 16, 4096);
    const size_t any_order = workspace_of(&p);
    fa_cuda_plan plan = plan_apart(&p);
    CHECK(!find_sm90(&plan)->ordered && find_sm90(&plan)->heads_together == 1, "any order");
    p.deterministic = true;
    const size_t groups = 4 * 16 * sizeof(int32_t); /* counters of groups that are cleared ahead */
    CHECK(workspace_of(&p) + groups == any_order + 4 * 16 * (4096 / 64) * 2 * sizeof(int32_t),
          "%zu bytes", workspace_of(&p) - any_order);
    plan = plan_apart(&p);
    CHECK(find_sm90(&plan)->ordered && find_sm90(&plan)->semaphores_offset + groups == any_order,
          "semaphores at %zu", find_sm90(&plan)->semaphores_offset);

    static const struct {
        int64_t batch, heads, n, together;
    } cases[] = {{4, 16, 4096, 16}, {16, 16, 1024, 32},  {1, 16, 16384, 4}, {1, 1, 4096, 1},
                 {1, 5, 192, 5},    {1, 1000, 192, 125}, {3, 7, 2048, 21}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        p = make_half_backward(cases[i].batch, cases[i].heads, cases[i].n);
        p.deterministic = true;
        plan = plan_apart(&p);
        CHECK(find_sm90(&plan)->heads_together == cases[i].together, "case %zu: %lld heads", i,
              (long long)find_sm90(&plan)->heads_together);
    }

    /* Under a causal mask the blocks of all heads but the last ones ascend; if sums must not depend
     * on the batch, those of all heads. */
    static const struct {
        int64_t batch, heads, n, d, window;
        bool invariant;
        int64_t ascending, together, ascending_together;
    } causal[] = {
        {4, 16, 4096, 128, -1, false, 54, 10, 4}, {16, 16, 1024, 64, -1, false, 222, 34, 33},
        {1, 16, 16384, 128, -1, false, 14, 2, 3}, {1, 2, 16384, 128, -1, false, 0, 2, 3},
        {1, 1, 4096, 128, -1, true, 1, 0, 4},     {4, 16, 4096, 128, -1, true, 64, 0, 4},
        {1, 3, 128, 64, -1, true, 3, 0, 3},       {1, 3, 128, 128, -1, true, 3, 0, 4},
        {1, 4, 65536, 128, -1, false, 2, 2, 1},   {4, 16, 4096, 128, 100, false, 0, 32, 4},
        {4, 16, 4096, 192, -1, false, 56, 8, 4},  {64, 16, 256, 64, -1, false, 892, 132, 132},
        {2, 10, 8192, 192, -1, false, 16, 4, 4},  {1, 10, 16384, 192, -1, false, 8, 2, 2},
        {8, 10, 2048, 192, -1, false, 70, 10, 1}, {1, 10, 32768, 192, -1, false, 8, 2, 1},
        {1, 16, 2048, 128, -1, false, 7, 9, 4},   {1, 16, 4096, 128, -1, false, 8, 8, 4}};
    for (size_t i = 0; i < sizeof causal / sizeof causal[0]; i++) {
        p = make_half_backward(causal[i].batch, causal[i].heads, causal[i].n);
        p.d = p.d_v = causal[i].d;
        p.causal = true;
        p.window_left = causal[i].window;
        p.deterministic = !causal[i].invariant;
        p.batch_invariant = causal[i].invariant;
        plan = plan_apart(&p);
        const fa_cuda_plan_launch *persistent = FIND(&plan, backward_sm90_persistent);
        const fa_cuda_backward_sm90_launch *l =
            persistent ? &persistent->backward_sm90 : find_sm90(&plan);
        CHECK(l->heads_ascending == causal[i].ascending && l->heads_together == causal[i].together,
              "case %zu: %lld heads ascend, %lld take turns", i, (long long)l->heads_ascending,
              (long long)l->heads_together);
        CHECK(l->ascending_together == causal[i].ascending_together, "case %zu: %lld heads", i,
              (long long)l->ascending_together);
        CHECK(l->first_stored, "case %zu", i);
    }

    static const struct {
        int64_t n, window;
        bool causal, pairs;
        int ahead;
    } turns[] = {{4096, -1, false, true, 8},
                 {2700, -1, false, false, 8},
                 {4096, -1, true, false, 4},
                 {8192, -1, true, true, 4},
                 {8192, 100, true, false, 8}};
    for (size_t i = 0; i < sizeof turns / sizeof turns[0]; i++) {
        p = make_half_backward(1, 32, turns[i].n);
        p.d = p.d_v = 64;
        p.causal = turns[i].causal;
        p.window_left = turns[i].window;
        p.deterministic = true;
        plan = plan_apart(&p);
        const fa_cuda_backward_sm90_launch *l =
            &FIND(&plan, backward_sm90_persistent)->backward_sm90;
        CHECK(l->counts_pairs == turns[i].pairs && l->tiles_ahead == turns[i].ahead,
              "case %zu: pairs %d, %d tiles", i, l->counts_pairs, (int)l->tiles_ahead);
    }

    /* Each query head of a long group has its own blocks, unless sums of dk and dv would take more than 2 GB. */
    for (int64_t batch = 1; batch <= 6; batch++) {
        p = make_half_backward(batch, 64, 8192);
        p.heads_kv = 8;
        p.causal = p.deterministic = true;
        const size_t own = workspace_of(&p);
        plan = plan_apart(&p);
        CHECK(find_sm90(&plan)->splits == (batch <= 3 ? 8 : 1), "batch %lld: %d splits",
              (long long)batch, find_sm90(&plan)->splits);
        p.deterministic = false;
        CHECK(own < workspace_of(&p) + (size_t)2100000000, "batch %lld: %zu bytes",
              (long long)batch, own);
    }

    /* One key tile needs no order, except that a batch item's bits are those of one kernel. */
    p = make_half_backward(1, 32, 128);
    p.deterministic = true;
    plan = plan_by(&fa_cuda_backward_sm90_persistent, &p, &devices[H200]);
    CHECK(!FIND(&plan, backward_sm90_persistent)->backward_sm90.ordered, "one key tile");
    p.batch_invariant = true;
    plan = plan_apart(&p);
    CHECK(find_sm90(&plan)->ordered, "one key tile, batch-invariant");

    p = make_half_backward(2, 8, 2048);
    p.d = p.d_v = 128;
    p.causal = true;
    plan = plan_apart(&p);
    CHECK(find_sm90(&plan)->heads_together == 16 && !find_sm90(&plan)->first_stored,
          "%lld heads in turn in any order", (long long)find_sm90(&plan)->heads_together);

    /* Wide heads have one order by default where that is faster, and an item's does not depend on the batch. */
    static const struct {
        int64_t heads, n, d, d_v, window;
        bool causal, ordered;
    } wide[] = {{8, 4096, 256, 256, -1, true, true},   {7, 4096, 256, 256, -1, true, false},
                {8, 4096, 256, 256, 100, true, false}, {8, 4096, 256, 256, -1, false, false},
                {10, 1024, 192, 192, -1, true, true},  {10, 1025, 192, 192, -1, true, false},
                {10, 1024, 192, 128, -1, true, false}};
    for (size_t i = 0; i < sizeof wide / sizeof wide[0]; i++) {
        fa_problem q = make_half_backward(1, wide[i].heads, wide[i].n);
        q.d = wide[i].d;
        q.d_v = wide[i].d_v;
        q.causal = wide[i].causal;
        q.window_left = wide[i].window;
        plan = plan_apart(&q);
        CHECK(find_sm90(&plan)->ordered == wide[i].ordered, "case %zu", i);
        q.batch_invariant = true;
        plan = plan_apart(&q);
        const fa_cuda_backward_sm90_launch *l = find_sm90(&plan);
        CHECK(fa_variants[FIND(&plan, backward_sm90)->variant].ordered && l->splits == 1 &&
                  l->heads_ascending == (q.causal && q.window_left < 0 ? wide[i].heads : 0),
              "case %zu: %lld heads ascend", i, (long long)l->heads_ascending);
    }

    /* In any order, groups of heads whose last one is not too short, if there are few blocks. */
    static const struct {
        int64_t heads, n, d, together;
    } few[] = {{8, 4096, 128, 8},  {10, 4096, 128, 10}, {16, 4096, 128, 8}, {20, 4096, 128, 10},
               {64, 4096, 128, 8}, {32, 1024, 128, 32}, {10, 2048, 192, 10}};
    for (size_t i = 0; i < sizeof few / sizeof few[0]; i++) {
        fa_problem q = make_half_backward(1, few[i].heads, few[i].n);
        q.d = q.d_v = few[i].d;
        q.causal = true;
        plan = plan_apart(&q);
        CHECK(find_sm90(&plan)->heads_together == few[i].together, "case %zu: %lld heads", i,
              (long long)find_sm90(&plan)->heads_together);
    }
    p.causal = false;
    plan = plan_apart(&p);
    const int any = FIND(&plan, backward_sm90)->variant;
    p.deterministic = true;
    plan = plan_apart(&p);
    const int one = FIND(&plan, backward_sm90)->variant;
    CHECK(!fa_variants[any].ordered && fa_variants[one].ordered && fa_variants[one].head_dim == 128,
          "%s, and in one order %s", fa_variants[any].name, fa_variants[one].name);
    p.d = p.d_v = 96;
    plan = plan_apart(&p);
    const fa_variant *narrow = &fa_variants[FIND(&plan, backward_sm90)->variant];
    CHECK(narrow->ordered && narrow->columns == 96, "%s", narrow->name);

    p = make_half_backward(4, 16, 4096);
    p.batch_invariant = true;
    plan = plan_apart(&p);
    CHECK(find_sm90(&plan)->ordered, "a batch item's sums depend on the batch");
    p.blocks_q = p.batch = 1; /* a batch of one, for which TMA ignores this stride */
    p.dout.stride[0] += 4;
    plan = plan_apart(&p);
    CHECK(plan.family != &fa_cuda_backward_sm90 && strstr(plan.passed_over, "dout.stride[0] is "),
          "%s", plan.passed_over);
}

/* One order of the sums of dq where sequences are packed: what counts is the longest one. */
static void test_packed_order(void)
{
    static const int32_t starts[1]; /* not read */
    static const struct {
        int64_t d, max_q;
        bool causal;
        int64_t ascending, together; /* heads: that ascend; of them, or of all, that take turns */
    } cases[] = {{96, 1600, true, 16, 4},  {96, 800, true, 16, 8},   {64, 800, true, 16, 16},
                 {64, 4000, true, 16, 8},  {128, 8000, true, 16, 2}, {128, 30000, true, 14, 2},
                 {96, 1600, false, 0, 16}, {64, 1600, false, 0, 16}, {128, 24000, false, 0, 4}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_half_backward(40, 16, 32000);
        p.d = p.d_v = cases[i].d;
        p.blocks_q = p.blocks_k = 1;
        p.cu_seqlens_q = p.cu_seqlens_k = starts;
        p.max_q = cases[i].max_q;
        p.causal = cases[i].causal;
        p.deterministic = true;
        const fa_cuda_plan plan = plan_of(&p, &devices[H200]);
        const fa_cuda_plan_launch *main = &plan.launches[1];
        const fa_cuda_backward_sm90_launch *l = &main->backward_sm90;
        CHECK(fa_variants[main->variant].ordered && l->heads_ascending == cases[i].ascending,
              "case %zu: %lld heads ascend", i, (long long)l->heads_ascending);
        const int64_t together = p.causal ? l->ascending_together : l->heads_together;
        CHECK(together == cases[i].together, "case %zu: %lld heads together", i,
              (long long)together);
    }
}

/* Packed sequences in one order: whether two tiles of dq are counted together, and among how many blocks a group's heads are split. */
static void test_packed_blocks(void)
{
    static const int32_t starts[1]; /* not read */
    static const struct {
        int64_t d, heads, heads_kv, sequences, rows, max_q;
        bool pairs;
        int64_t splits;
    } cases[] = {{64, 2, 2, 72, 90062, 4998, false, 1},   {64, 64, 16, 5, 9068, 2401, true, 1},
                 {64, 4, 4, 109, 135696, 5848, false, 1}, {64, 8, 1, 58, 54347, 6640, true, 2},
                 {64, 32, 4, 25, 22936, 2413, true, 1},   {64, 8, 4, 32, 27173, 2044, false, 1},
                 {64, 8, 8, 70, 41845, 1367, false, 1},   {64, 4, 1, 79, 26344, 617, false, 1},
                 {64, 4, 1, 52, 60816, 3936, false, 2},   {96, 4, 1, 190, 38796, 518, false, 1},
                 {96, 8, 1, 54, 23197, 1512, false, 4},   {128, 8, 2, 50, 27591, 1525, false, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_half_backward(cases[i].sequences, cases[i].heads, cases[i].rows);
        p.heads_kv = cases[i].heads_kv;
        p.d = p.d_v = cases[i].d;
        p.blocks_q = p.blocks_k = 1;
        p.cu_seqlens_q = p.cu_seqlens_k = starts;
        p.max_q = cases[i].max_q;
        p.causal = p.deterministic = true;
        const fa_cuda_plan plan = plan_of(&p, &devices[H200]);
        const fa_cuda_backward_sm90_launch *l = &plan.launches[1].backward_sm90;
        CHECK(l->counts_pairs == cases[i].pairs && l->splits == cases[i].splits,
              "case %zu: pairs %d, %d splits", i, l->counts_pairs, (int)l->splits);
    }
}

/* Persistent blocks run if head dims are at most 64 or if they are requested, one for each
 * multiprocessor, with a counter that prepare clears. */
static void test_persistent(void)
{
    const fa_cuda_device *device = &devices[H200];
    const fa_cuda_family *family = &fa_cuda_backward_sm90_persistent;
    fa_cuda_plan plan;
    char why[320] = "";
    fa_problem p = make_half_backward(2, 16, 1000);
    const size_t plain = workspace_of(&p), groups = 2 * 16 * sizeof(int32_t);
    CHECK(fa_cuda_plan_make(&p, device, family, &plan, why, sizeof why), "%s", why);
    const fa_cuda_plan_launch *l = FIND(&plan, backward_sm90_persistent);
    CHECK(l && l->grid == (uint32_t)device->multiprocessors && l->tasks == 2 * 16 * 8, "%u blocks",
          l ? l->grid : 0);
    CHECK(l && l->backward_sm90.counter_offset % 16 == 0 &&
              l->backward_sm90.counter_offset + groups >= plain - 16 &&
              l->backward_sm90.counter_offset + 4 <= plan.workspace_bytes,
          "a counter at %zu of %zu bytes", l ? l->backward_sm90.counter_offset : 0,
          plan.workspace_bytes);
    CHECK(l && (int)l->smem_bytes + fa_cuda_static_smem(&fa_variants[l->variant]) <=
                   device->smem_per_block,
          "%d bytes of shared memory", l ? (int)l->smem_bytes : 0);

    CHECK(plan_of(&p, device).family == &fa_cuda_backward_sm90, "head dim 128, two full rounds");
    p = make_half_backward(20, 16, 1664);
    CHECK(plan_of(&p, device).family == family, "head dim 128, many rounds");
    p.deterministic = true;
    CHECK(plan_of(&p, device).family == &fa_cuda_backward_sm90, "many rounds, one order");
    p = make_half_backward(4, 16, 1664);
    CHECK(plan_of(&p, device).family == &fa_cuda_backward_sm90_joined, "head dim 128, unasked");
    p = make_half_backward(1, 16, 1664);
    p.causal = true;
    CHECK(plan_of(&p, device).family == &fa_cuda_backward_sm90, "head dim 128, causal");
    p = make_half_backward(2, 16, 1000);
    p.d = p.d_v = 64;
    CHECK(plan_of(&p, device).family == family, "head dim 64");
    p.deterministic = true, p.heads_kv = 4; /* blocks share keys */
    plan = plan_of(&p, device);
    l = FIND(&plan, backward_sm90_persistent);
    CHECK(plan.family == family && l && fa_variants[l->variant].ordered, "head dim 64, one order");
    p = make_half_backward(1, 2, 256); /* fewer work tiles than multiprocessors */
    CHECK(fa_cuda_plan_make(&p, device, family, &plan, why, sizeof why), "%s", why);
    l = FIND(&plan, backward_sm90_persistent);
    CHECK(l && l->grid == 4, "%u blocks", l ? l->grid : 0);

    p.batch = 0; /* prepare does not run, so nobody clears a counter */
    CHECK(fa_cuda_plan_make(&p, device, family, &plan, why, sizeof why), "%s", why);
    l = FIND(&plan, backward_sm90_persistent);
    CHECK(l && l->backward_sm90.counter_offset == 0, "a counter");

    const struct {
        bool invariant;
        double softcap;
        int64_t d;
        const char *why;
    } refused[] = {{true, 0, 128, "one order"}, {false, 30, 128, "option"}, {false, 0, 192, "192"}};
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        p = make_half_backward(1, 2, 1100);
        p.batch_invariant = refused[i].invariant;
        p.softcap = (float)refused[i].softcap;
        p.d = p.d_v = refused[i].d;
        CHECK(fa_cuda_plan_make(&p, device, family, &plan, why, sizeof why) &&
                  plan.family == &fa_cuda_backward_sm90 && strstr(plan.passed_over, refused[i].why),
              "case %zu: %s", i, plan.passed_over);
    }
}

/* Heads of one key tile: two launches, without sums of dQ; and a third where blocks share queries. */
static void test_single(void)
{
    const fa_cuda_device *device = &devices[H200];
    const fa_cuda_family *family = &fa_cuda_backward_sm90_single;
    fa_problem p = make_half_backward(40, 16, 128);
    fa_cuda_plan plan = plan_of(&p, device);
    CHECK(plan.family == family && plan.count == 2 && plan.launches[1].backward_sm90.whole_dq &&
              plan.launches[1].backward_sm90.rows_offset == 0,
          "%d launches", plan.count);
    p.causal = p.deterministic = true;
    CHECK(plan_of(&p, device).family == family, "one share of dQ has one order");
    p.batch_invariant = true;
    CHECK(plan_of(&p, device).family != family, "the same bits as with more keys");
    p.causal = p.deterministic = p.batch_invariant = false;
    p.n_k = p.rows_k = 129;
    CHECK(plan_of(&p, device).family != family, "two key tiles");
    p.n_k = p.rows_k = 60, p.causal = true; /* the first 68 queries see nothing */
    CHECK(plan_of(&p, device).family != family, "query tiles that see no key");
    p.causal = false, p.softcap = 30;
    CHECK(plan_of(&p, device).family != family, "an option");
    p.softcap = 0, p.d = 100;
    CHECK(plan_of(&p, device).family != family, "TMA would store behind a row of dq");
    p.d = 128;
    CHECK(plan_of(&p, device).family == family, "60 keys");
    p.dq = somewhere, p.dq.stride[0] += 4;
    CHECK(plan_of(&p, device).family != family, "TMA cannot store dq");
    p = make_half_backward(2, 16, 4096);
    p.n_k = p.rows_k = 77;
    plan = plan_of(&p, device);
    CHECK(plan.family == family && plan.count == 3 &&
              plan.launches[1].backward_sm90.query_parts == 4 &&
              plan.launches[1].tasks == 2 * 16 * 4,
          "%d parts", plan.launches[1].backward_sm90.query_parts);
}

/* Which launches take head dim 128 without a mask, by the rounds of blocks. */
static void test_full_rows(void)
{
    static const struct {
        int64_t batch, heads, n;
        const fa_cuda_family *family;
    } cases[] = {{5, 16, 282, &fa_cuda_backward_sm90_joined},
                 {8, 16, 282, &fa_cuda_backward_sm90_rounding},
                 {48, 16, 448, &fa_cuda_backward_sm90_rounding},
                 {3, 16, 1024, &fa_cuda_backward_sm90},
                 {16, 16, 1024, &fa_cuda_backward_sm90_rounding},
                 {7, 16, 1098, &fa_cuda_backward_sm90_joined},
                 {8, 16, 1098, &fa_cuda_backward_sm90_rounding},
                 {8, 16, 1664, &fa_cuda_backward_sm90},
                 {11, 16, 1664, &fa_cuda_backward_sm90_persistent},
                 {8, 16, 2048, &fa_cuda_backward_sm90},
                 {4, 16, 4096, &fa_cuda_backward_sm90_joined}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_half_backward(cases[i].batch, cases[i].heads, cases[i].n);
        const fa_cuda_plan plan = plan_of(&p, &devices[H200]);
        CHECK(plan.family == cases[i].family, "case %zu: %s", i, plan.family->name);
    }
}

/* The number of splits of a plan of backward_sm80, and what its workspace holds. */
static int count_sm80_splits(const fa_problem *p, const fa_cuda_device *device, size_t *bytes)
{
    const fa_cuda_plan plan = plan_by(&fa_cuda_backward_sm80, p, device);
    const fa_cuda_plan_launch *l = FIND(&plan, backward_sm80);
    *bytes = plan.workspace_bytes;
    return l ? l->backward_sm80.splits : 0;
}

/* Where the time of backward_sm80's blocks decides among how many a group's heads are split: neither gradients that are missing nor a
 * dbias matter, because fa_workspace_size does not know of them. One order of sums and lengths that only the device knows have a
 * rule of their own. Of packed sequences the longest counts, if it is known. */
static void test_sm80_shares(void)
{
    static const int32_t starts[5];
    size_t bytes, more = 0;
    fa_problem p = make_half_backward(1, 24, 1385);
    p.heads_kv = 8;
    p.causal = true;
    p.max_q = p.n_q;
    int splits = count_sm80_splits(&p, &devices[H200], &bytes);
    CHECK(splits == 3, "%d splits", splits);
    splits = count_sm80_splits(&p, &devices[A100], &bytes);
    CHECK(splits == 3, "A100: %d splits", splits);
    fa_problem other = p;
    other.bias = other.q;
    splits = count_sm80_splits(&other, &devices[H200], &bytes);
    other.dbias = other.q;
    other.dbias_shape[0] = 1, other.dbias_shape[1] = 24;
    other.dbias_shape[2] = other.dbias_shape[3] = 1385;
    const int with_dbias = count_sm80_splits(&other, &devices[H200], &more);
    CHECK(with_dbias == splits && more == bytes, "with a dbias %zu bytes, without %zu", more,
          bytes);
    other = p;
    count_sm80_splits(&other, &devices[H200], &bytes);
    other.dq.data = other.dk.data = other.dv.data = other.dout.data = NULL;
    const int without = count_sm80_splits(&other, &devices[H200], &more);
    CHECK(without == 3 && more == bytes, "without gradients %zu bytes, with %zu", more, bytes);
    other = make_half_backward(24, 4, 346); /* tiles of 64 keys, also with options */
    other.causal = true;
    other.max_q = other.n_q;
    for (int i = 0; i < 2; i++) {
        const fa_cuda_plan plan = plan_by(&fa_cuda_backward_sm80, &other, &devices[H200]);
        const fa_cuda_plan_launch *l = FIND(&plan, backward_sm80);
        CHECK(l && l->variant == (i ? FA_VARIANT_backward_sm80_d128_f16_small_general
                                    : FA_VARIANT_backward_sm80_d128_f16_small),
              "%s", l ? fa_variants[l->variant].name : "none");
        other.softcap = 30;
    }
    other = p, other.deterministic = true;
    CHECK(count_sm80_splits(&other, &devices[H200], &bytes) == 1, "in one order");
    other = p, other.batch_invariant = true;
    CHECK(count_sm80_splits(&other, &devices[H200], &bytes) == 1, "in any batch");
    other = p, other.seqlens_k = starts;
    CHECK(count_sm80_splits(&other, &devices[H200], &bytes) == 1, "lengths on the device");
    other = make_half_backward(4, 2, 8000);
    other.heads_kv = 1;
    other.causal = true;
    other.cu_seqlens_q = other.cu_seqlens_k = starts;
    other.max_q = 5000;
    CHECK(count_sm80_splits(&other, &devices[H200], &bytes) == 2, "packed");
    other.max_q = other.rows_q;
    CHECK(count_sm80_splits(&other, &devices[H200], &bytes) == 1, "packed, of any length");
}

/* Few key tiles of many query tiles: blocks share the queries, and one more launch adds up gradients of keys. */
static void test_query_parts(void)
{
    static const struct {
        int64_t batch, heads, n, d, d_v;
        bool causal, deterministic;
        int parts;
    } cases[] = {{4, 1, 1098, 128, 128, true, false, 3}, {4, 1, 1098, 128, 128, false, false, 3},
                 {4, 1, 1098, 128, 128, true, true, 1},  {4, 2, 640, 128, 128, false, false, 1},
                 {2, 4, 768, 128, 128, true, false, 2},  {2, 12, 768, 128, 128, true, false, 1},
                 {1, 4, 2048, 192, 128, true, false, 2}, {1, 1, 8192, 128, 128, true, false, 2},
                 {1, 2, 4096, 64, 64, true, false, 2},   {2, 4, 1024, 64, 64, true, false, 1},
                 {1, 1, 768, 128, 128, true, false, 3}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_half_backward(cases[i].batch, cases[i].heads, cases[i].n);
        p.d = cases[i].d, p.d_v = cases[i].d_v;
        p.causal = cases[i].causal;
        p.deterministic = cases[i].deterministic;
        fa_cuda_plan plan = plan_of(&p, &devices[H200]);
        const fa_cuda_plan_launch *main = &plan.launches[1],
                                  *keys = FIND(&plan, backward_finish_keys_sm90);
        const int parts = main->backward_sm90.query_parts;
        CHECK(parts == cases[i].parts && main->backward_sm90.splits == parts, "case %zu: %d parts",
              i, parts);
        CHECK(main->tasks == parts * p.batch * p.heads_kv * ((p.n_k + 127) / 128),
              "case %zu: %d tasks", i, (int)main->tasks);
        CHECK((keys != NULL) == (parts > 1), "case %zu: finish_keys", i);
        if (!keys) continue;
        CHECK(keys->grid == (uint32_t)(tasks_of(keys) * (p.d + p.d_v) / 32) && keys->overlaps &&
                  tasks_of(keys) * parts == main->tasks,
              "case %zu: %u blocks", i, keys->grid);
        CHECK(!fa_cuda_backward_sm90_clear_ahead(&plan, 1), "case %zu: zeros ahead", i);
    }
}

/* Heads of a few key tiles: one launch, whose blocks are clusters, if all of them run at once; with two key tiles another one in
 * front of it if not. */
static void test_chained(void)
{
    static const struct {
        int64_t batch, heads, n_q, n_k, d;
        bool causal, chained, prepares;
        int cluster;
    } cases[] = {{11, 2, 227, 227, 64, true, true, true, 2},
                 {12, 2, 211, 211, 128, false, true, true, 2},
                 {14, 2, 384, 384, 128, true, true, true, 3},
                 {41, 24, 216, 216, 128, false, true, false, 2},
                 {1, 28, 512, 512, 64, false, true, true, 4},
                 {1, 29, 512, 512, 64, false, false, false, 0},
                 {1, 14, 1024, 1024, 64, true, true, true, 8},
                 {1, 15, 1024, 1024, 64, true, false, false, 0},
                 {1, 2, 1025, 1025, 64, true, false, false, 0},
                 {1, 2, 640, 640, 64, false, false, false, 0},
                 {1, 2, 640, 640, 128, true, true, true, 5},
                 {1, 2, 768, 768, 128, true, false, false, 0},
                 {1, 2, 512, 512, 128, false, false, false, 0},
                 {40, 16, 384, 384, 128, true, false, false, 0},
                 {7, 16, 384, 384, 128, true, false, false, 0},
                 {40, 16, 384, 384, 96, true, false, false, 0},
                 {40, 16, 359, 359, 128, false, false, false, 0},
                 {8, 16, 359, 359, 128, false, false, false, 0},
                 {40, 16, 305, 305, 128, false, false, false, 0},
                 {40, 16, 448, 448, 128, true, false, false, 0},
                 {11, 2, 512, 256, 64, false, true, true, 2},
                 {11, 2, 513, 256, 64, false, false, false, 0},
                 {11, 2, 200, 256, 64, true, true, true, 2},
                 {11, 2, 321, 256, 64, true, false, false, 0}};
    const fa_cuda_device *device = &devices[H200];
    const fa_cuda_family *family = &fa_cuda_backward_sm90_chained;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_half_backward(cases[i].batch, cases[i].heads, cases[i].n_q);
        p.n_k = p.rows_k = cases[i].n_k;
        p.d = p.d_v = cases[i].d;
        p.causal = cases[i].causal;
        const fa_cuda_plan plan = plan_of(&p, device);
        const fa_cuda_plan_launch *prepare = &plan.launches[0], *l = &plan.launches[1];
        CHECK((plan.family == family) == cases[i].chained, "case %zu: %s", i, plan.passed_over);
        if (!cases[i].chained || plan.family != family) continue;
        CHECK(plan.count == 2 && prepare->idle == cases[i].prepares &&
                  l->backward_sm90.prepares == cases[i].prepares && l->overlaps &&
                  l->backward_sm90.whole_dq && l->backward_sm90.rows_offset == 0,
              "case %zu: %d launches", i, plan.count);
        CHECK(l->cluster == (uint32_t)cases[i].cluster && l->tiles == cases[i].cluster &&
                  l->grid == l->tasks && l->backward_sm90.heads_together == 1,
              "case %zu: clusters of %u", i, l->cluster);
        CHECK((int)l->smem_bytes + fa_cuda_static_smem(&fa_variants[l->variant]) <=
                  device->smem_per_block,
              "case %zu: shared memory", i);
    }
    fa_problem p = make_half_backward(11, 2, 227);
    p.heads_kv = 1;
    CHECK(plan_of(&p, device).family != family, "heads that share keys");
    p.heads_kv = 2, p.window_left = 100;
    CHECK(plan_of(&p, device).family != family, "a window");
    p.window_left = -1, p.deterministic = true;
    CHECK(plan_of(&p, device).family == family, "sums have one order");
    p.batch_invariant = true;
    CHECK(plan_of(&p, device).family != family, "other bits than with more heads");
    p.deterministic = p.batch_invariant = false, p.d = 100;
    CHECK(plan_of(&p, device).family != family, "TMA would store behind a row of dq");
    p.d = 128, p.alibi_slopes = (const float *)somewhere.data;
    CHECK(plan_of(&p, device).family != family, "an option");
}

/* Blocks that round dQ: two launches, with sums in the workspace. */
static void test_rounding(void)
{
    static const struct {
        int64_t batch, heads, n_q, n_k;
        bool causal, deterministic, rounds;
    } cases[] = {
        {41, 24, 216, 216, true, false, true},     {41, 24, 216, 216, false, false, false},
        {26, 16, 282, 282, false, false, true},    {9, 2, 305, 305, false, false, false},
        {64, 16, 305, 305, false, false, true},    {10, 1, 359, 359, true, false, false},
        {20, 8, 448, 448, true, false, true},      {19, 12, 512, 512, true, false, true},
        {5, 4, 640, 640, true, false, false},      {17, 2, 832, 832, true, false, true},
        {1, 12, 1536, 1536, true, false, false},   {4, 16, 3584, 3584, true, false, true},
        {4, 16, 4096, 4096, true, false, false},   {16, 16, 1024, 1024, false, false, true},
        {16, 16, 2048, 2048, false, false, false}, {30, 4, 512, 768, false, false, true},
        {30, 4, 256, 1024, true, false, false},    {30, 4, 2048, 512, false, false, true},
        {15, 4, 300, 300, false, true, true},      {4, 16, 4096, 4096, false, true, false},
        {1, 16, 768, 768, true, true, true},       {5, 64, 1291, 1291, false, true, true}};
    const fa_cuda_device *device = &devices[H200];
    const fa_cuda_family *family = &fa_cuda_backward_sm90_rounding;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_half_backward(cases[i].batch, cases[i].heads, cases[i].n_q);
        p.n_k = p.rows_k = cases[i].n_k;
        p.causal = cases[i].causal;
        p.deterministic = cases[i].deterministic;
        const fa_cuda_plan plan = plan_of(&p, device);
        CHECK((plan.family == family) == cases[i].rounds, "case %zu: %s", i, plan.family->name);
        if (!cases[i].rounds || plan.family != family) continue;
        const fa_cuda_plan_launch *l = &plan.launches[1];
        const size_t sums = (size_t)tasks_of(&plan.launches[0]) * FA_BACKWARD_SM90_SUM_BYTES(128);
        CHECK(plan.count == 2 && l->overlaps && l->backward_sm90.whole_dq &&
                  l->backward_sm90.ordered && l->backward_sm90.first_stored &&
                  l->backward_sm90.rows_offset == sums,
              "case %zu: %d launches", i, plan.count);
        CHECK((int)l->smem_bytes + fa_cuda_static_smem(&fa_variants[l->variant]) <=
                  device->smem_per_block,
              "case %zu: shared memory", i);
    }
    fa_problem p = make_half_backward(20, 8, 448);
    p.heads_kv = 2;
    CHECK(plan_of(&p, device).family != family, "blocks share keys");
    p.heads_kv = 8, p.d = p.d_v = 96, p.causal = true;
    const fa_cuda_plan narrow = plan_of(&p, device);
    CHECK(narrow.family == family && fa_variants[narrow.launches[1].variant].columns == 96,
          "96 columns");
    p.d = p.d_v = 104;
    CHECK(plan_of(&p, device).family == family, "104 columns");
    p.dq = somewhere, p.dq.stride[0] += 4;
    CHECK(plan_of(&p, device).family != family, "TMA cannot store dq");
    p.dq = somewhere, p.batch_invariant = true;
    CHECK(plan_of(&p, device).family != family, "other bits than with more heads");
    p.batch_invariant = false, p.softcap = 30;
    CHECK(plan_of(&p, device).family != family, "an option");
}

/* The same where query heads share keys, and in windows. */
static void test_rounding_of_groups(void)
{
    static const struct {
        int64_t batch, heads, heads_kv, n, d, window;
        bool causal, deterministic, rounds;
    } cases[] = {{32, 32, 8, 512, 128, -1, true, false, true},
                 {32, 32, 8, 512, 64, -1, true, false, true},
                 {16, 32, 8, 2048, 128, -1, true, false, false},
                 {16, 32, 8, 2048, 64, -1, true, false, true},
                 {16, 32, 8, 2048, 128, -1, true, true, true},
                 {1, 32, 8, 16384, 64, -1, true, true, true},
                 {16, 32, 8, 1024, 128, -1, false, false, false},
                 {16, 32, 8, 1024, 128, -1, false, true, true},
                 {40, 12, 4, 256, 128, -1, false, false, true},
                 {16, 32, 8, 2048, 128, -1, false, true, false},
                 {16, 32, 8, 1024, 64, -1, false, false, false},
                 {16, 32, 8, 1024, 64, -1, false, true, true},
                 {1, 32, 8, 2048, 128, -1, true, true, false}, /* blocks share keys */
                 {1, 32, 8, 4096, 128, -1, true, true, true},
                 {1, 32, 8, 4096, 128, -1, true, false, false},
                 {1, 64, 8, 8192, 64, -1, true, true, true},
                 {4, 16, 16, 4096, 128, 1023, true, false, true},
                 {1, 16, 16, 16384, 128, 4095, true, true, false},
                 {4, 32, 32, 4096, 64, 1023, true, false, false},
                 {4, 32, 32, 4096, 64, 1023, true, true, true},
                 {16, 32, 8, 1024, 128, 255, true, false, true},
                 {4, 32, 8, 4096, 128, 1023, true, true, false},
                 {4, 32, 8, 4096, 64, 1023, true, true, true},
                 {1, 2, 2, 1024, 64, 255, true, false, true}};
    const fa_cuda_device *device = &devices[H200];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_half_backward(cases[i].batch, cases[i].heads, cases[i].n);
        p.heads_kv = cases[i].heads_kv;
        p.d = p.d_v = cases[i].d;
        p.window_left = cases[i].window;
        p.causal = cases[i].causal;
        p.deterministic = cases[i].deterministic;
        const fa_cuda_plan plan = plan_of(&p, device);
        const bool rounds = plan.family == &fa_cuda_backward_sm90_rounding;
        CHECK(rounds == cases[i].rounds, "case %zu: %s", i, plan.family->name);
        if (!rounds) continue;
        const bool shares = p.heads_kv < p.heads_q;
        CHECK(fa_variants[plan.launches[1].variant].rounding == 2 || !shares, "case %zu", i);
        CHECK(plan.launches[1].backward_sm90.heads_ascending == 0 || !shares, "case %zu", i);
    }
    /* Heads in turn: under a causal mask many where heads share keys, in a window as many as have room. */
    static const struct {
        int64_t batch, heads, heads_kv, n, d, window, together;
    } turns[] = {{2, 32, 8, 8192, 128, -1, 16},    {1, 32, 8, 16384, 96, -1, 8},
                 {1, 32, 8, 16384, 64, -1, 8},     {4, 32, 8, 4096, 64, -1, 16},
                 {1, 32, 32, 16384, 64, 2047, 16}, {1, 32, 32, 16384, 64, 1023, 32}};
    for (size_t i = 0; i < sizeof turns / sizeof turns[0]; i++) {
        fa_problem p = make_half_backward(turns[i].batch, turns[i].heads, turns[i].n);
        p.heads_kv = turns[i].heads_kv;
        p.d = p.d_v = turns[i].d;
        p.window_left = turns[i].window;
        p.causal = p.deterministic = true;
        const fa_cuda_plan plan = plan_of(&p, device);
        CHECK(plan.family == &fa_cuda_backward_sm90_rounding &&
                  plan.launches[1].backward_sm90.heads_together == turns[i].together,
              "case %zu: %s, %lld heads in turn", i, plan.family->name,
              (long long)plan.launches[1].backward_sm90.heads_together);
    }
    /* Clusters of wide heads that are not persistent. */
    for (int i = 0; i < 3; i++) {
        fa_problem p = make_half_backward(i < 2 ? 4 : 1, 10, i == 0 ? 16384 : i == 1 ? 4096 : 512);
        p.d = p.d_v = 192;
        p.causal = p.deterministic = true;
        const fa_cuda_plan plan = plan_of(&p, device);
        CHECK(fa_variants[plan.launches[1].variant].persistent == (i == 1), "wide case %d", i);
    }
}

/* The same to head dim 64: persistent blocks. */
static void test_narrow_rounding(void)
{
    static const struct {
        int64_t batch, heads, n, d;
        bool causal, deterministic, rounds;
        int64_t together; /* heads that ascend together */
    } cases[] = {
        {64, 32, 256, 64, true, false, true, 132}, {1, 320, 256, 64, true, false, false, 0},
        {1, 340, 256, 64, true, true, true, 132},  {1, 53, 320, 64, true, false, true, 53},
        {20, 32, 768, 64, true, false, true, 44},  {1, 20, 1024, 64, true, false, false, 0},
        {1, 20, 1024, 64, true, true, true, 20},   {16, 32, 1024, 48, true, false, true, 33},
        {1, 15, 2048, 64, true, false, false, 0},  {8, 32, 2048, 64, true, false, true, 17},
        {4, 32, 4096, 64, true, false, false, 0},  {4, 32, 4096, 64, true, true, true, 8},
        {1, 32, 16384, 64, true, true, false, 0},  {64, 32, 256, 64, false, false, true, 0},
        {1, 79, 300, 64, false, false, false, 0},  {32, 32, 512, 64, false, false, true, 0},
        {16, 32, 1024, 64, false, false, true, 0}, {8, 32, 2048, 64, false, false, false, 0},
        {8, 32, 2048, 64, false, true, true, 0}};
    const fa_cuda_device *device = &devices[H200];
    const fa_cuda_family *family = &fa_cuda_backward_sm90_rounding;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_half_backward(cases[i].batch, cases[i].heads, cases[i].n);
        p.d = p.d_v = cases[i].d;
        p.causal = cases[i].causal;
        p.deterministic = cases[i].deterministic;
        const fa_cuda_plan plan = plan_of(&p, device);
        CHECK((plan.family == family) == cases[i].rounds, "case %zu: %s", i, plan.family->name);
        if (!cases[i].rounds || plan.family != family) continue;
        const fa_cuda_plan_launch *l = &plan.launches[1];
        CHECK(plan.count == 2 && l->backward_sm90.whole_dq && l->backward_sm90.ordered &&
                  l->backward_sm90.counter_offset > 0 &&
                  l->grid == (uint32_t)device->multiprocessors,
              "case %zu: %d launches", i, plan.count);
        CHECK(!p.causal || l->backward_sm90.ascending_together == cases[i].together,
              "case %zu: %lld heads together", i, (long long)l->backward_sm90.ascending_together);
        CHECK((int)l->smem_bytes + fa_cuda_static_smem(&fa_variants[l->variant]) <=
                  device->smem_per_block,
              "case %zu: shared memory", i);
    }
}

/* Joined launches: one, after a launch that clears two counters for each unit. */
static void test_joined(void)
{
    static const struct {
        int64_t batch, heads_q, heads_kv, n, d;
        bool causal;
        int variant, units, together, heads, parts, tiles;
    } cases[] = {
        {16, 16, 16, 1024, 128, true, FA_VARIANT_backward_sm90_d128_joined_f16, 256, 12, 1, 4, 8},
        {2, 17, 17, 1000, 96, false, FA_VARIANT_backward_sm90_d96_joined_f16, 34, 34, 1, 4, 8},
        {16, 16, 16, 1024, 128, false, FA_VARIANT_backward_sm90_d128_joined_f16, 256, 132, 1, 4, 8},
        {4, 16, 16, 4096, 128, false, FA_VARIANT_backward_sm90_d128_joined_f16, 64, 17, 1, 16, 32},
        {4, 32, 8, 4096, 128, true, FA_VARIANT_backward_sm90_d128_joined_f16, 32, 4, 4, 64, 32},
        {1, 8, 1, 2048, 80, true, FA_VARIANT_backward_sm90_d96_joined_f16, 8, 8, 1, 8, 16},
        {1, 1, 1, 65536, 128, false, FA_VARIANT_backward_sm90_d128_joined_f16, 1, 1, 1, 256, 512}};
    const fa_cuda_device *device = &devices[H200];
    const fa_cuda_family *family = &fa_cuda_backward_sm90_joined;
    fa_cuda_plan plan;
    char why[320] = "";
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_half_backward(cases[i].batch, cases[i].heads_q, cases[i].n);
        p.heads_kv = cases[i].heads_kv;
        p.d = p.d_v = cases[i].d;
        p.causal = cases[i].causal;
        CHECK(fa_cuda_plan_make(&p, device, &fa_cuda_backward_sm90, &plan, why, sizeof why), "%s",
              why);
        const size_t plain = plan.workspace_bytes;
        const int launches = plan.count;
        CHECK(fa_cuda_plan_make(&p, device, family, &plan, why, sizeof why), "case %zu: %s", i,
              why);
        const fa_cuda_plan_launch *clear = &plan.launches[0], *l = &plan.launches[1];
        const fa_cuda_backward_sm90_launch *own = &l->backward_sm90;
        const int64_t units = cases[i].units, parts = cases[i].parts;
        CHECK(plan.family == family && plan.count == launches - 1 && l->variant == cases[i].variant,
              "case %zu: %d launches, %s", i, plan.count, plan.passed_over);
        CHECK(clear->variant == FA_VARIANT_backward_sm90_clear && !clear->overlaps && l->overlaps &&
                  (int64_t)clear->grid * (int64_t)clear->threads >= 2 * units,
              "case %zu: %u blocks clear", i, clear->grid);
        CHECK(own->units == units && own->units_together == cases[i].together &&
                  own->unit_heads == cases[i].heads && own->slices == parts &&
                  own->head_slices * own->unit_heads == parts && l->tiles == cases[i].tiles,
              "case %zu: %d units, %d together, of %d heads, %d parts, %lld tiles", i, own->units,
              own->units_together, own->unit_heads, own->slices, (long long)l->tiles);
        /* Under a causal mask blocks take turns in the same groups. */
        CHECK(own->heads_together == (cases[i].causal ? cases[i].together : 1),
              "case %zu: %lld heads in turn", i, (long long)own->heads_together);
        CHECK(l->tasks == units * cases[i].tiles &&
                  (int64_t)l->grid == l->tasks + 2 * units * parts,
              "case %zu: %u blocks", i, l->grid);
        CHECK(own->counters_offset % 16 == 0 &&
                  own->counters_offset + (size_t)units * 8 == plan.workspace_bytes &&
                  plan.workspace_bytes <= plain + (size_t)units * 8 + 15,
              "case %zu: counters at %zu of %zu bytes, %zu without", i, own->counters_offset,
              plan.workspace_bytes, plain);
        if (plan_of(&p, device).family == &fa_cuda_backward_sm90_rounding) continue;
        const bool default_one = cases[i].d > 64 && !cases[i].causal;
        CHECK((plan_of(&p, device).family == family) == default_one, "case %zu, unasked", i);
        CHECK(default_one || plan_of(&p, device).workspace_bytes <= plain + 16,
              "case %zu: an unasked workspace", i);
    }

    const int32_t starts[] = {0, 256};
    for (int i = 0; i < 6; i++) {
        static const char *const reasons[] = {"one order",    "option",     "192",
                                              "cu_seqlens_q", "no queries", "blocks"};
        fa_problem p = make_half_backward(1, 2, i == 5 ? 1 << 29 : 256);
        if (i == 0) p.deterministic = true;
        if (i == 1) p.softcap = 30;
        if (i == 2) p.d = p.d_v = 192;
        if (i == 3) p.cu_seqlens_q = p.cu_seqlens_k = starts;
        if (i == 4) p.batch = 0;
        if (i == 5) p.batch = p.blocks_q = p.blocks_k = 128;
        CHECK(fa_cuda_plan_make(&p, device, family, &plan, why, sizeof why) &&
                  plan.family != family && strstr(plan.passed_over, reasons[i]),
              "case %d: %s", i, plan.passed_over);
    }
}

int main(void)
{
    test_persistent();
    test_single();
    test_full_rows();
    test_query_parts();
    test_chained();
    test_rounding();
    test_rounding_of_groups();
    test_narrow_rounding();
    test_joined();
    test_head_dims();
    test_variants();
    test_tasks();
    test_sizes();
    test_refused();
    test_room();
    test_sm80();
    test_float32_variants();
    test_blocks_of_wide_heads();
    test_short_float32();
    test_corrected();
    test_in_place();
    test_wide_hidden_keys();
    test_float32_families();
    test_sm80_launches();
    test_sm90();
    test_dbias();
    test_dbias_of_float32();
    test_workspace_with_dbias();
    test_dbias_of_heads();
    test_bias_alone();
    test_options_of_wide_heads();
    test_short_and_full();
    test_clear_ahead();
    test_first_ahead();
    test_splits();
    test_uneven_splits();
    test_full_groups();
    test_sm80_shares();
    test_wanted();
    test_combine();
    test_wide();
    test_order();
    test_packed_order();
    test_packed_blocks();
    test_overlaps();
    test_refusals();
    test_text();
    return test_end();
}
