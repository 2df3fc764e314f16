/*
 * Split keys of the forward pass on Ampere, without a GPU: which problems are split, and the launches.
 */
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "cuda/family.h"
#include "cuda/plan_split_sm80.h"
#include "gpus.h"
#include "split_problem.h"

static const fa_cuda_family *const split_family = &fa_cuda_forward_split_sm80;

static bool plan_on(int device, const fa_cuda_family *family, const fa_problem *p,
                    fa_cuda_plan *plan)
{
    return fa_cuda_plan_make(p, &devices[device], family, plan, NULL, 0);
}

/* Both launches agree with each other and with the workspace. */
static void check_launches(const fa_problem *p, const fa_cuda_plan *plan)
{
    const fa_cuda_plan_launch *l = &plan->launches[0], *merge = l + 1;
    const fa_sm80_split *split = &l->sm80.split;
    const int64_t group = p->heads_q / p->heads_kv, heads = INT64_C(1) << split->group_bits,
                  rows = l->tasks * split->parts * split->queries;
    fa_sm80_split_params params;
    fa_problem called = *p;
    called.workspace = (void *)0x10000;
    fa_cuda_set_split_sm80_params(&called, merge, &params);
    CHECK(plan->count == 2 && group % heads == 0 && l->tile_q == split->queries / heads, "%d heads",
          (int)heads);
    CHECK(split->parts >= 1 && split->parts <= FA_SM80_MOST_PARTS, "%d parts", (int)split->parts);
    CHECK(l->grid == l->tasks * split->parts && merge->grid == l->tasks * split->tile_blocks,
          "%u and %u blocks", l->grid, merge->grid);
    CHECK((int64_t)split->tile_blocks * FA_SM80_MERGE_THREADS * FA_SM90_MERGE_COLUMNS >=
              split->queries * p->d_v,
          "%d blocks merge a tile", (int)split->tile_blocks);
    CHECK((char *)(params.split.sums + rows) == (char *)called.workspace + l->workspace_bytes,
          "%zu bytes", l->workspace_bytes);
    CHECK(params.attention.heads_q * heads == p->heads_q &&
              params.attention.q.stride[2] == heads * p->q.stride[2] &&
              params.split.head_stride == p->q.stride[2],
          "heads");
}

static void test_choice(void)
{
    static const struct {
        int device;
        int64_t batch, heads, heads_kv, n_q, n_k, d;
        bool causal;
        int parts,
            shared; /* at least so many parts (0: another family), log2 of the heads of a query tile, at least */
    } cases[] = {{A100, 1, 8, 8, 64, 32768, 128, false, 8, 0},
                 {A100, 1, 32, 4, 15, 16236, 128, false, 16, 2},
                 {A100, 1, 8, 2, 95, 9030, 64, true, 8, 1},
                 {A100, 4, 32, 8, 512, 16384, 128, true, 0, 0},
                 {A100, 32, 32, 8, 512, 16384, 128, true, 0, 0},
                 {A100, 1, 1, 1, 4032, 4032, 64, true, 4, 0},
                 {A100, 1, 2, 2, 3000, 3000, 96, false, 2, 0},
                 {A100, 1, 2, 2, 1728, 1728, 256, false, 2, 0},
                 {A100, 8, 16, 16, 1024, 1024, 128, true, 0, 0},
                 {A100, 1, 1, 1, 100, 100, 128, false, 0, 0},
                 {A100, 1, 12, 2, 50, 8192, 256, false, 8, 1},
                 {RTX_4090, 1, 8, 8, 64, 32768, 128, false, 8, 0},
                 {RTX_4090, 1, 8, 8, 64, 32768, 256, false, 8, 0},
                 {A100, 1, 8, 8, 8, 32768, 128, false, 0,
                  0}, /* few queries: 8 rows of a key head, 20, and too many sequences */
                 {A100, 8, 4, 1, 5, 661, 128, false, 2, 1},
                 {A100, 200, 4, 1, 5, 661, 128, false, 0, 0},
                 {H200, 1, 8, 8, 64, 32768, 128, false, 0, 0},
                 {T4, 1, 8, 8, 64, 32768, 128, false, 0, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_split_problem(cases[i].batch, cases[i].heads, cases[i].heads_kv,
                                          cases[i].n_q, cases[i].n_k, cases[i].d);
        fa_cuda_plan plan;
        p.causal = cases[i].causal;
        CHECK(plan_on(cases[i].device, NULL, &p, &plan), "no plan");
        CHECK((plan.family == split_family) == (cases[i].parts > 0), "case %d: %s", (int)i,
              plan.family->name);
        if (plan.family != split_family) continue;
        const fa_sm80_split *split = &plan.launches[0].sm80.split;
        CHECK(split->parts >= cases[i].parts && split->group_bits >= cases[i].shared,
              "case %d: %d parts, %d bits", (int)i, (int)split->parts, (int)split->group_bits);
        check_launches(&p, &plan);
    }
}

/* fa_decode stays with decode_sm80. */
static void test_decode(void)
{
    fa_cuda_plan plan;
    fa_problem p = make_split_problem(8, 4, 1, 5, 661, 128);
    p.pass = FA_PASS_DECODE;
    char why[320] = "";
    const bool planned = fa_cuda_plan_make(&p, &devices[A100], NULL, &plan, why, sizeof why);
    CHECK(planned && plan.family == &fa_cuda_decode, "%s", planned ? plan.family->name : why);
}

/* Lengths on the device: the numbers of packed query tiles have slots, too. */
static void test_lengths(void)
{
    static const int32_t lengths[8];
    fa_problem p = make_split_problem(3, 8, 2, 200, 30000, 128);
    fa_cuda_plan plan;
    p.seqlens_k = lengths;
    CHECK(plan_on(A100, NULL, &p, &plan) && plan.family == split_family, "padded");
    check_launches(&p, &plan);
    p.cu_seqlens_q = lengths;
    p.blocks_q = 1;
    p.rows_q = 250;
    CHECK(plan_on(A100, split_family, &p, &plan) && plan.family == split_family, "packed");
    check_launches(&p, &plan);
}

static void test_refusals(void)
{
    static const float numbers[] = {1};
    const fa_problem p = make_split_problem(1, 8, 8, 64, 32768, 128);
    fa_problem other[6];
    fa_cuda_plan plan;
    for (int i = 0; i < 6; i++) other[i] = p;
    other[0].batch_invariant = true;
    other[1].softcap = 30;
    other[2].alibi_slopes = numbers;
    other[3].scale = -1;
    other[4].attention_chunk = 100;
    other[5].d = 320;
    for (int i = 0; i < 6; i++) {
        CHECK(plan_on(A100, NULL, &other[i], &plan) && plan.family != split_family, "%d", i);
        CHECK(plan_on(A100, split_family, &other[i], &plan) && plan.family != split_family,
              "%d by name", i);
    }
}

/* By its name the family takes problems that it would not be faster for. A query for the workspace knows no data. */
static void test_by_name(void)
{
    char text[400];
    fa_cuda_plan plan, asked;
    fa_problem p = make_split_problem(16, 16, 16, 1000, 500, 96);
    CHECK(plan_on(A100, NULL, &p, &asked) && asked.family != split_family, "split");
    CHECK(plan_on(H200, fa_cuda_find_family("sm80_split"), &p, &plan) &&
              plan.family == split_family,
          "by name");
    check_launches(&p, &plan);
    fa_cuda_plan_describe(&p, &devices[H200], &plan, text, sizeof text);
    CHECK(strstr(text, "forward_sm80_split_d96_bf16 (query tile 128, key tile 64") &&
              strstr(text, "forward_sm80_merge_bf16 (") && strstr(text, "keys in at most "),
          "%s", text);
    p = make_split_problem(1, 8, 8, 64, 32768, 128);
    CHECK(plan_on(A100, NULL, &p, &asked), "no plan");
    p.q.data = p.k.data = p.v.data = p.out.data = (char *)0x100000;
    CHECK(plan_on(A100, NULL, &p, &plan) && plan.workspace_bytes <= asked.workspace_bytes &&
              plan.workspace_bytes > 0,
          "%zu bytes", plan.workspace_bytes);
}

int main(void)
{
    test_begin();
    test_choice();
    test_decode();
    test_lengths();
    test_refusals();
    test_by_name();
    return test_end();
}
