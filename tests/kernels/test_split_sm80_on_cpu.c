/*
 * forward_sm80_split and forward_sm80_merge, run on the host (cuda_on_cpu.h): random problems from the whole option space,
 * compared with float64. The launches are those that the planner makes, but with one to 40 parts, or as many as the planner
 * chooses, and query tiles of any number of heads that a group allows. Problems whose keys are not split are left out.
 *
 * Each call runs twice, with different orders of the threads and numbers of blocks. The bits must be the same.
 *
 * Arguments: the first problem's number, and how many; then all of them run, and the runs of each variant are printed.
 */
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention_on_cpu.h"
#include "caller_memory.h"
#include "check.h"
#include "cuda/family.h"
#include "cuda/plan_split_sm80.h"
#include "forward_on_cpu.h"

#define WILD_QUERIES 140 /* two query tiles */
#include "wild_pages.h"

enum { PROBLEMS = 700, LENGTH_PROBLEMS = 300, PEAKED_PROBLEMS = 52, EACH = 24, EACH_OF_SAMPLE = 4 };

/* Additional options of problems (sample_takes) beside kinds of peaked rows: packed queries over pages; query tiles of
 * several heads, and of eight or more. */
static const uint64_t packed_over_pages_bit = UINT64_C(1) << (RANDOM_NUM_PEAKS + 4),
                      shared_bit = UINT64_C(1) << (RANDOM_NUM_PEAKS + 5),
                      eight_bit = UINT64_C(1) << (RANDOM_NUM_PEAKS + 6);

/* The variants, one FORM(name) each: the build writes them. */
#define FORM(name)                                                                                 \
    void name(fa_sm80_split_params p);                                                             \
    static void run_##name(const void *p) { name(*(const fa_sm80_split_params *)p); }
#include "test_split_sm80_on_cpu_forms.h"
#undef FORM

static void (*const kernels[FA_VARIANTS])(const void *parameters) = {
#define FORM(name) [FA_VARIANT_##name] = run_##name,
#include "test_split_sm80_on_cpu_forms.h"
};

static int runs[FA_VARIANTS], max_runs = INT_MAX;
/* Calls with so many parts; with query tiles of 2^i heads; with causal masks, windows, sinks and lse; and with lengths on
 * the device, of queries and keys that are packed or not. */
static int with_parts[FA_SM80_MOST_PARTS + 1], groups[8], causal, windows, sinks, lse;
static int packed_queries, packed_keys, queries_by_length, keys_by_length, pages, packed_over_pages;

/* How a call is run. */
typedef struct machine {
    int64_t number;
    bool otherwise; /* in another order, with a block for each task */
    ref_buffers memory;
} machine;

/* Launch number i of the plan. */
static void launch(const machine *m, const fa_problem *p, const fa_cuda_plan *plan, int i)
{
    char name[160];
    fa_sm80_split_params params;
    const fa_cuda_plan_launch *l = &plan->launches[i];
    const fa_sm80_split *split = &l->sm80.split;
    memset(&params, POISON, sizeof params);
    fa_cuda_set_split_sm80_params(p, l, &params);
    cuda_run run = {.name = name,
                    .kernel = kernels[l->variant],
                    .memory = &m->memory,
                    .parameters = &params,
                    .grid = l->grid,
                    .threads = l->threads,
                    .smem_bytes = l->smem_bytes};
    if (i == 0 && !m->otherwise && m->number % 3 == 0 && l->grid > 2) run.grid = 2;
    vary_run(&run, m->number, m->otherwise, 2);
    snprintf(name, sizeof name, "number %lld: %s, %d parts, %d heads, %u blocks",
             (long long)m->number, fa_variants[l->variant].name, (int)split->parts,
             1 << split->group_bits, run.grid);
    cuda_run_kernel(&run);
}

/* False if memory outside the workspace was written. */
static bool run_plan(machine *m, fa_problem *p, const fa_cuda_plan *plan)
{
    begin_workspace(&m->memory, p, plan->workspace_bytes);
    for (int i = 0; i < plan->count; i++)
        if (!plan->launches[i].idle) launch(m, p, plan, i);
    return end_workspace(&m->memory, p);
}

/* False: the family does not take the problem. */
static bool plan_call(int64_t number, const fa_problem *p, fa_cuda_plan *plan, char *why,
                      size_t size)
{
    const fa_cuda_family *family = &fa_cuda_forward_split_sm80;
    fa_cuda_plan_begin(&devices[A100], family, plan);
    if (!family->plan(p, &devices[A100], plan, why, size)) return false;
    const int64_t group = p->heads_q / p->heads_kv;
    int bits = number % 2 ? 3 : (int)(number / 2 % 4);
    while (group % (1 << bits) != 0) bits--;
    static const int parts[] = {0, 1, 2, 3, 4, 6, 20, 40}; /* 0: as chosen */
    const int chosen = parts[number % 8];
    if (chosen > 0) fa_cuda_cut_split_sm80(p, chosen, bits, plan);
    return true;
}

static bool wants(void *context, const random_call *call)
{
    const int64_t number = *(const int64_t *)context;
    char message[320];
    fa_problem p;
    fa_cuda_plan plan;
    /* attend gives the reason. */
    if (make_forward(call, &p, message, sizeof message) != FA_OK) return true;
    if (!plan_call(number, &p, &plan, NULL, 0) || runs[plan.launches[0].variant] >= max_runs)
        return false;
    return sample_takes(&p, &plan,
                        other_options |
                            (p.cu_seqlens_q && p.block_table ? packed_over_pages_bit : 0) |
                            (plan.launches[0].sm80.split.group_bits ? shared_bit : 0) |
                            (plan.launches[0].sm80.split.group_bits > 2 ? eight_bit : 0));
}

static void count(const fa_problem *p, const fa_cuda_plan *plan)
{
    for (int i = 0; i < plan->count; i++) runs[plan->launches[i].variant]++;
    with_parts[plan->launches[0].sm80.split.parts]++;
    groups[plan->launches[0].sm80.split.group_bits]++;
    causal += p->causal;
    windows += p->window_left >= 0;
    sinks += p->sinks != NULL;
    lse += p->lse != NULL;
    packed_queries += p->cu_seqlens_q != NULL;
    packed_keys += p->cu_seqlens_k != NULL;
    queries_by_length += p->seqlens_q != NULL;
    keys_by_length += p->seqlens_k != NULL;
    pages += p->block_table != NULL;
    packed_over_pages += p->block_table && p->cu_seqlens_q;
}

static fa_status attend(void *context, const random_call *call, char *message, size_t size)
{
    fa_problem p;
    fa_cuda_plan plan;
    machine m = {.number = *(const int64_t *)context, .memory = *call->buffers};
    const fa_status status = make_forward(call, &p, message, size);
    if (status != FA_OK) return status;
    if (!plan_call(m.number, &p, &plan, message, size)) return FA_ERROR_UNSUPPORTED;
    count(&p, &plan);
    char *const before = ref_buffers_copy(call->buffers);
    bool clean = run_plan(&m, &p, &plan);
    char *const first = ref_buffers_copy(call->buffers);
    ref_buffers_put(call->buffers, before);
    m.otherwise = true;
    clean &= run_plan(&m, &p, &plan);
    const bool same = ref_buffers_are(call->buffers, first);
    free(before), free(first);
    return random_status_of_runs(clean, same, message, size);
}

/* A NaN in one of a head's keys: the rows that see it are NaN, in whatever part they see it, and no others. */
static void test_nan(int64_t seen_from)
{
    attention a;
    ref_array want, lse_of;
    const shape s = {1, 2, 2, 140, 540, 64, 64};
    make_aligned(&a, 5, s, FA_BFLOAT16);
    a.in.options.flags = FA_CAUSAL;
    ref_forward(&a.in, &want, &lse_of);
    ref_store(&a.in.k, 0, seen_from + s.n_k - s.n_q, 0, 7, NAN);
    const random_call call = forward_call(&a);
    check_attends(attend, 5, &call);
    for (int64_t h = 0; h < 2; h++)
        for (int64_t i = 0; i < s.n_q; i++) {
            const bool is_nan = h == 0 && i >= seen_from;
            const float own = a.lse[h * s.n_q + i];
            const double x = ref_load(&a.out, 0, i, h, 0),
                         y = want.value[ref_array_index(&want, 0, i, h, 0)];
            CHECK(is_nan ? isnan(own) && isnan(x)
                         : fabs(own - lse_of.value[h * s.n_q + i]) < 1e-3 && fabs(x - y) < 0.02,
                  "head %lld, query %lld: lse %g, %g, expected %g", (long long)h, (long long)i, own,
                  x, y);
        }
    ref_array_free(&want);
    ref_array_free(&lse_of);
    attention_free(&a);
}

/* Problems [*number, end) with lengths on the device and pages. Returns the number of problems for this family. */
static int run_length_problems(random_settings settings, int64_t *number, int64_t end)
{
    static random_result result;
    int done = 0;
    for (; *number < end; ++*number) {
        settings.focus = *number % 2 ? RANDOM_PAGED : RANDOM_LENGTHS;
        random_problem_run((uint64_t)*number, &settings, &result);
        if (result.status == FA_ERROR_UNSUPPORTED) continue;
        done++;
        CHECK(result.report.ok, "lengths, number %lld: %s\n  %s", (long long)*number,
              result.report.message, result.description);
    }
    return done;
}

static int run_problems(random_settings settings, int64_t *number, int64_t begin, int64_t wanted)
{
    const bool listed = wanted == 0;
    *number = begin;
    if (listed) max_runs = sample.whole ? EACH : EACH_OF_SAMPLE;
    int done = run_forward_problems(&settings, number, begin + (listed ? PROBLEMS : wanted));
    *number = begin;
    if (listed) max_runs *= 2;
    done += run_length_problems(settings, number, begin + (listed ? LENGTH_PROBLEMS : wanted));
    max_runs = INT_MAX;
    *number = begin;
    return done +
           run_peaked_problems(&settings, number, begin + (listed ? PEAKED_PROBLEMS : wanted));
}

int main(int argc, char **argv)
{
    const int64_t begin = argc > 1 ? atoll(argv[1]) : 0, wanted = argc > 2 ? atoll(argv[2]) : 0;
    int64_t number = begin;
    const random_settings settings = {.device = FA_DEVICE_CUDA,
                                      .tiles = true,
                                      .one_pass = true,
                                      .plain_scores = true,
                                      .attend = attend,
                                      .wants = wants,
                                      .context = &number};
    test_begin();
    if (sample_begin(argc > 1)) run_problems(settings, &number, begin, wanted);
    sample_found();
    const int done = run_problems(settings, &number, begin, wanted);
    static const int64_t seen_from[] = {-400, -1, 0, 77, 128, 139};
    for (size_t i = 0; i < sizeof seen_from / sizeof seen_from[0]; i++) test_nan(seen_from[i]);
    for (int64_t i = 0; i < 4; i++) /* as many parts as the planner chooses, 2, 4 and 20 */
        test_wild_pages(attend, &(int64_t){10 * i}, i % 2 ? FA_FLOAT16 : FA_BFLOAT16, false);
    if (argc == 1) sample_end(kernels, runs);
    int more_parts = 0;
    for (int i = 2; i <= FA_SM80_MOST_PARTS; i++) more_parts += with_parts[i];
    CHECK(argc > 1 || (causal && windows && sinks && lse && with_parts[1] && more_parts),
          "%d causal, %d windows, %d sinks, %d lse, %d of one part, %d of more", causal, windows,
          sinks, lse, with_parts[1], more_parts);
    CHECK(
        argc > 1 || (packed_queries && packed_keys && queries_by_length && keys_by_length &&
                     pages && packed_over_pages),
        "%d packed queries, %d packed keys, %d and %d by length, %d pages, %d with packed queries",
        packed_queries, packed_keys, queries_by_length, keys_by_length, pages, packed_over_pages);
    CHECK(argc > 1 || (groups[0] && groups[1] && groups[2] && groups[3]),
          "query tiles of 1, 2, 4 and 8 heads: %d, %d, %d and %d", groups[0], groups[1], groups[2],
          groups[3]);
    if (argc > 2) {
        printf("%5d problems: %d causal, %d windows, %d sinks, %d lse\n", done, causal, windows,
               sinks, lse);
        printf("%5d packed queries, %d packed keys, %d and %d by length, %d pages, %d with packed "
               "queries\n",
               packed_queries, packed_keys, queries_by_length, keys_by_length, pages,
               packed_over_pages);
        for (int i = 0; i < 8; i++)
            if (groups[i]) printf("%5d with query tiles of %d heads\n", groups[i], 1 << i);
        for (int i = 1; i <= FA_SM80_MOST_PARTS; i++)
            if (with_parts[i]) printf("%5d with %d parts\n", with_parts[i], i);
        for (int i = 0; i < FA_VARIANTS; i++)
            if (kernels[i]) printf("%5d %s\n", runs[i], fa_variants[i].name);
    }
    return test_end();
}
