/*
 * decode_sm80, run on the host (cuda_on_cpu.h): random problems from the whole option space
 * compared with float64, with keys divided into 1 to 128 parts, merged by the last block or by a
 * second launch, each twice in different orders and with equal bits. Then what a server does: pages
 * of any size, captured calls whose lengths change, tables with wrong entries.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "caller_memory.h"
#include "check.h"
#include "convert.h"
#include "cuda/family.h"
#include "cuda/plan_decode.h"
#include "forward_on_cpu.h"

enum { PROBLEMS = 110 };

/* The variants, one FORM(name) each: the build writes them. */
#define FORM(name)                                                                                 \
    void name(fa_decode_params p);                                                                 \
    static void run_##name(const void *p) { name(*(const fa_decode_params *)p); }
#include "test_decode_on_cpu_forms.h"
#undef FORM

static void (*const kernels[FA_VARIANTS])(const void *parameters) = {
#define FORM(name) [FA_VARIANT_##name] = run_##name,
#include "test_decode_on_cpu_forms.h"
};

static int runs[FA_VARIANTS], cut; /* launches; problems whose keys were divided, */
static int mixed;                  /* and of mixed batches */

/* How a call is run. */
typedef struct machine {
    int64_t number;
    bool otherwise;     /* in other orders */
    bool two_launches;  /* parts are merged by a second launch */
    ref_buffers memory; /* what kernels may access */
} machine;

/* ---- Launches -------------------------------------------------------------------------------- */

static void launch(const machine *m, const fa_problem *p, const fa_cuda_plan_launch *l, int step)
{
    char name[120];
    fa_decode_params params;
    fa_cuda_set_decode_params(p, l, step, (int32_t)(m->number % FA_DECODE_COUNTER_SETS), &params);
    cuda_run run = {.name = name,
                    .kernel = kernels[l->variant],
                    .memory = &m->memory,
                    .parameters = &params,
                    .grid = step == FA_DECODE_MERGE ? (unsigned)l->tasks : l->grid,
                    .threads = l->threads,
                    .smem_bytes = l->smem_bytes,
                    .backwards = (m->number / 2 % 2 == 1) != m->otherwise,
                    .last_block_first = m->otherwise};
    if (m->otherwise) {
        run.together = 1 + (unsigned)m->number % 3;
        run.slow_warp = (unsigned)m->number % (l->threads / 32);
        run.slow_lanes = ~0u;
    }
    snprintf(name, sizeof name, "number %lld: %s, %d parts, step %d", (long long)m->number,
             fa_variants[l->variant].name, (int)l->decode.parts, step);
    runs[l->variant]++;
    cuda_run_kernel(&run);
}

/* False if memory outside the workspace was written. */
static bool run_plan(machine *m, fa_problem *p, const fa_cuda_plan_launch *l)
{
    begin_workspace(&m->memory, p, l->workspace_bytes);
    if (m->two_launches && l->decode.parts > 1) {
        launch(m, p, l, FA_DECODE_STORE);
        launch(m, p, l, FA_DECODE_MERGE);
    } else launch(m, p, l, FA_DECODE_LAST);
    return end_workspace(&m->memory, p);
}

enum { MOST_SEQUENCES = 64 };

/* An element of the result of each packed sequence, or NULL: of those with at most `most` queries,
 * or of the others. The elements have 16 bits. */
static void find_elements(const fa_problem *p, int64_t most, bool few, uint16_t *at[MOST_SEQUENCES])
{
    if (p->batch > MOST_SEQUENCES) abort();
    for (int64_t b = 0; b < p->batch; b++) {
        const int64_t start = p->cu_seqlens_q[b], queries = p->cu_seqlens_q[b + 1] - start;
        const bool chosen = queries > 0 && (queries <= most) == few;
        at[b] = chosen ? (uint16_t *)(void *)p->out.data + start * p->out.stride[1] : NULL;
    }
}

/* Runs the launch for sequences with few queries, or for the others. False if it wrote to rows of
 * the other kind. */
static bool run_kind(machine *m, fa_problem *p, const fa_cuda_plan_launch *l, int64_t most,
                     bool few)
{
    enum { MARK = 0x5a5a };
    uint16_t *at[MOST_SEQUENCES], before[MOST_SEQUENCES];
    find_elements(p, most, !few, at);
    for (int64_t b = 0; b < p->batch; b++)
        if (at[b]) before[b] = *at[b], *at[b] = MARK;
    bool clean = run_plan(m, p, l);
    for (int64_t b = 0; b < p->batch; b++) {
        if (!at[b]) continue;
        clean &= *at[b] == MARK;
        *at[b] = before[b];
    }
    return clean;
}

/* A mixed batch in two launches: sequences with few queries, and the others. */
static bool run_mixed(machine *m, fa_problem *p, const fa_cuda_plan_launch *l)
{
    char why[320] = "";
    fa_cuda_plan plan;
    fa_cuda_plan_begin(&devices[H200], &fa_cuda_decode, &plan);
    CHECK(fa_cuda_add_few(p, &devices[H200], &plan, why, sizeof why), "%s", why);
    fa_cuda_plan_launch few = plan.launches[0], many = *l;
    few.decode.most_queries = (int32_t)(1 + m->number % 3);
    many.fewest_queries = few.decode.most_queries + 1;
    fa_cuda_cut_decode(&few, 0, l->decode.parts, 1);
    mixed++;
    const bool two_launches = m->two_launches;
    m->two_launches |= few.tasks > FA_DECODE_COUNTERS;
    const bool clean = run_kind(m, p, &few, few.decode.most_queries, true);
    m->two_launches = two_launches;
    return run_kind(m, p, &many, few.decode.most_queries, false) && clean;
}

#define FAMILY fa_cuda_decode
#include "decode_bytes.h"
#include "decode_server.h"

/* ---- Random problems ------------------------------------------------------------------------- */

/* The minimum is one key tile of a block in a part. */
static void choose_parts(int64_t number, fa_cuda_plan_launch *l)
{
    static const int64_t parts[] = {1, 2, 3, 128, 5, 0, 17};
    const int64_t count = parts[number % 7];
    if (count > 0) fa_cuda_cut_decode(l, 0, count, 1);
    if (l->tasks > FA_DECODE_COUNTERS && number % 2 == 0) fa_cuda_cut_decode(l, 0, 1, 1);
}

static fa_status plan_call(const random_call *call, fa_problem *p, fa_cuda_plan *plan,
                           char *message, size_t size)
{
    const fa_status status = make_forward(call, p, message, size);
    if (status != FA_OK) return status;
    fa_cuda_plan_begin(&devices[H200], &fa_cuda_decode, plan);
    return fa_cuda_plan_decode(p, &devices[H200], INT64_MAX, plan, message, size)
               ? FA_OK
               : FA_ERROR_UNSUPPORTED;
}

static bool wants(void *context, const random_call *call)
{
    const machine m = {.number = *(const int64_t *)context};
    char message[320];
    fa_problem p;
    fa_cuda_plan plan;
    const fa_status status = plan_call(call, &p, &plan, message, sizeof message);
    if (status != FA_OK) return status != FA_ERROR_UNSUPPORTED; /* attend gives the reason */
    return sample_takes(&p, &plan, other_options | (uint64_t)is_mixed(m.number, &p) << 20);
}

static fa_status attend(void *context, const random_call *call, char *message, size_t size)
{
    fa_problem p;
    fa_cuda_plan plan;
    machine m = {.number = *(const int64_t *)context, .memory = *call->buffers};
    const fa_status status = plan_call(call, &p, &plan, message, size);
    if (status != FA_OK) return status;
    fa_cuda_plan_launch *l = &plan.launches[0];
    choose_parts(m.number, l);
    if (l->idle) return FA_OK;
    m.two_launches = m.number % 3 == 0 || l->tasks > FA_DECODE_COUNTERS;
    cut += l->decode.parts > 1;
    char *const before = ref_buffers_copy(call->buffers);
    bool clean = is_mixed(m.number, &p) ? run_mixed(&m, &p, l) : run_plan(&m, &p, l);
    char *const first = ref_buffers_copy(call->buffers);
    ref_buffers_put(call->buffers, before);
    m.otherwise = true;
    m.two_launches = !m.two_launches || l->tasks > FA_DECODE_COUNTERS;
    clean &= is_mixed(m.number, &p) ? run_mixed(&m, &p, l) : run_plan(&m, &p, l);
    const bool same = ref_buffers_are(call->buffers, first);
    free(before), free(first);
    if (clean && same) return FA_OK;
    snprintf(message, size, "%s",
             clean ? "a second run left other bits"
                   : "memory that is not the launch's was written");
    return (fa_status)RANDOM_WRONG;
}

/* alone: a single class; RANDOM_ANYTHING: all classes without kernels of their own. */
static int run_random_problems(int64_t first, int64_t end, random_focus alone)
{
    static random_result result;
    static const random_focus focuses[] = {RANDOM_SPLIT,   RANDOM_UNUSED,     RANDOM_LENGTHS,
                                           RANDOM_MASKS,   RANDOM_ANYTHING,   RANDOM_SPLIT,
                                           RANDOM_STRIDES, RANDOM_EMPTY,      RANDOM_TAILS,
                                           RANDOM_SPLIT,   RANDOM_INVARIANCE, RANDOM_PEAKED};
    int done = 0;
    int64_t number = first;
    random_settings settings = {
        .device = FA_DEVICE_CUDA, .attend = attend, .wants = wants, .context = &number};
    if (first == 0 && alone == RANDOM_ANYTHING) run_known_problems(&settings, &number);
    for (; number < end; number++) {
        settings.focus = focuses[number % (int64_t)(sizeof focuses / sizeof focuses[0])];
        if (alone != RANDOM_ANYTHING) settings.focus = alone;
        settings.few_queries = true;
        settings.tiles = settings.focus != RANDOM_TAILS && number % 2;
        /* The number determines the head dim of RANDOM_TAILS: all widths, not only the first
         * ones. */
        const int64_t problem = settings.focus == RANDOM_TAILS ? number * 37 % 256 : number;
        random_problem_run((uint64_t)problem, &settings, &result);
        if (result.status == FA_ERROR_UNSUPPORTED) continue;
        done++;
        CHECK(result.report.ok, "number %lld: %s\n  %s", (long long)number, result.report.message,
              result.description);
    }
    return done;
}

static int done, quantized, latent; /* problems that were for these kernels */

static void run_all_random_problems(int64_t number, int64_t end)
{
    done = run_random_problems(number, end, RANDOM_ANYTHING);
    quantized = run_random_problems(number, end, RANDOM_QUANTIZED);
    latent = run_random_problems(number, number + (end - number) / 3, RANDOM_LATENT);
}

int main(int argc, char **argv)
{
    const int64_t number = argc > 1 ? atoll(argv[1]) : 0;
    const int64_t end = number + (argc > 2 ? atoll(argv[2]) : PROBLEMS);
    test_begin();
    if (sample_begin(argc > 1)) run_all_random_problems(number, end);
    sample_found();
    run_all_random_problems(number, end);
    if (argc == 1) {
        test_pages((const int64_t[]){1, 3, 16, 32, 48, 64, 128, 256, 1000});
        test_replay();
        test_parts();
        test_wild_tables();
        test_scales();
        sample_end(kernels, runs);
    }
    CHECK(done > 0 && quantized > 0 && latent > 0, "no problem was for these kernels");
    CHECK(mixed > 0 || argc > 1, "no problem was a mixed batch");
    if (argc > 2) {
        printf("%d, %d and %d problems, keys of %d cut, %d mixed\n", done, quantized, latent, cut,
               mixed);
        for (int i = 0; i < FA_VARIANTS; i++)
            if (kernels[i]) printf("%5d %s\n", runs[i], fa_variants[i].name);
    }
    return test_end();
}
