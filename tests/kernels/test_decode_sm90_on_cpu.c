/*
 * decode_sm90, run on the host (cuda_on_cpu.h, hopper_units.h): random problems compared with
 * float64, with keys divided into 1 to 128 parts, merged by the last block or by a second launch,
 * each twice in different orders, with different delays and with equal bits; by blocks with a part
 * each, and by one to seven persistent ones. Packed queries are also a mixed batch, for which the
 * persistent blocks compute the sequences with few queries. Then what a server does
 * (decode_server.h), and values that are not finite and that some rows do not see.
 *
 * Arguments: the first random problem's number, and how many.
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
#include "cuda/plan_decode_sm90.h"
#include "forward_on_cpu.h"
#include "hopper_units.h"

enum { PROBLEMS = 200 };

/* For variants that the first ones do not use. */
static const int64_t rare[] = {230, 241, 247, 310, 313,  395,  398,  406,  409,  427,
                               437, 737, 754, 759, 1533, 1729, 1805, 2743, 3016, 4027};

/* The variants, one FORM(name) each: the build writes them. */
typedef struct parameters {
    fa_decode_params decode;
    fa_decode_sm90_params more;
} parameters;

#define FORM(name)                                                                                 \
    void name(fa_decode_params d, fa_decode_sm90_params s);                                        \
    static void run_##name(const void *p)                                                          \
    {                                                                                              \
        const parameters *both = p;                                                                \
        name(both->decode, both->more);                                                            \
    }
#include "test_decode_sm90_on_cpu_forms.h"
#undef FORM

static void (*const kernels[FA_VARIANTS])(const void *parameters) = {
#define FORM(name) [FA_VARIANT_##name] = run_##name,
#include "test_decode_sm90_on_cpu_forms.h"
};

/* Launches; problems whose keys were divided, or whose work tiles were numbered by sequence; mixed
 * batches. */
static int runs[FA_VARIANTS], cut, some_whole, own_tiles, mixed;

/* Whether all launches that can be have persistent blocks. */
static bool all_persistent;

/* ---- Launches -------------------------------------------------------------------------------- */

/* How a call is run. */
typedef struct machine {
    int64_t number;
    bool otherwise;     /* in other orders, with other delays and another number of stages */
    bool two_launches;  /* parts are merged by a second launch */
    bool persistent;    /* with persistent blocks, if there is such a kernel */
    ref_buffers memory; /* what kernels may access */
} machine;

/* Stages: from those of the planner down to the fewest, as for more blocks on a multiprocessor. */
static void choose_stages(const machine *m, int variant, fa_decode_sm90_params *more, cuda_run *run)
{
    const fa_variant *v = &fa_variants[variant];
    const int32_t a_tile = v->cache ? v->head_dim / 128 : 1, fewest = a_tile == 1 ? 3 : 4;
    const int32_t fewer = ((int32_t)(m->number % 5) + m->otherwise) * a_tile;
    const int32_t stages = more->stages - fewer > fewest ? more->stages - fewer : fewest;
    run->smem_bytes = (unsigned)fa_cuda_decode_sm90_smem(v, stages);
    more->stages = stages;
}

/* Persistent blocks take parts by a counter, or without one by their numbers. There are few sets of
 * counters, so that a launch that does not reset one affects the next problems. */
static int32_t choose_counters(const machine *m, const fa_cuda_plan_launch *l, int step)
{
    if (l->decode.blocks == 0) return (int32_t)(m->number % FA_DECODE_COUNTER_SETS);
    const bool counted = step == FA_DECODE_LAST && (l->decode.parts > 1 || m->number % 4 > 0);
    return counted ? (int32_t)(m->number % 2 * (FA_DECODE_SM90_COUNTER_SETS - 1)) : -1;
}

static void launch(const machine *m, const fa_problem *p, const fa_cuda_plan_launch *l, int step)
{
    char name[200];
    parameters both;
    fa_cuda_fault fault;
    const fa_cuda_plan_launch now = step == FA_DECODE_MERGE ? fa_cuda_decode_merge_launch(l) : *l;
    fa_cuda_set_decode_params(p, l, step, choose_counters(m, l, step), &both.decode);
    CHECK(fa_cuda_decode_sm90_params(p, l, hopper_encode_map, &both.more, &fault), "no map");
    cuda_run run = {.name = name,
                    .kernel = kernels[l->variant],
                    .memory = &m->memory,
                    .parameters = &both,
                    .units = &hopper_units,
                    .overlaps = l->overlaps,
                    .grid = now.grid,
                    .threads = l->threads,
                    .smem_bytes = now.smem_bytes};
    if (l->decode.blocks > 0) run.together = 1 + (unsigned)(m->number / 3 % 3);
    run.warps_multiply = m->otherwise;
    vary_run(&run, m->number, m->otherwise, run.threads / 32 - 1); /* the producer */
    choose_stages(m, l->variant, &both.more, &run);
    snprintf(name, sizeof name,
             "number %lld: %s, %d parts, %u blocks, %d stages, step %d, %s, %s copies, %s "
             "products, lanes %x of warp %u slow",
             (long long)m->number, fa_variants[l->variant].name, (int)l->decode.parts, run.grid,
             (int)both.more.stages, step, run.backwards ? "backwards" : "forwards",
             run.late_copies ? "late" : "early", run.late_products ? "late" : "early",
             run.slow_lanes, run.slow_warp);
    runs[l->variant]++;
    cuda_run_kernel(&run);
}

/* The same launch with persistent blocks: results have the same bits. Those blocks compute the
 * tiles of a sequence together, so packed sequences are only supported in a mixed batch. They leave no work tiles whole,
 * and other parts have other bits. */
static void make_persistent(int64_t number, const fa_problem *p, fa_cuda_plan_launch *l)
{
    const int other = l->variant == FA_VARIANT_decode_sm90_d128_f16
                          ? FA_VARIANT_decode_sm90_d128_persistent_f16
                      : l->variant == FA_VARIANT_decode_sm90_d128_bf16
                          ? FA_VARIANT_decode_sm90_d128_persistent_bf16
                          : FA_NO_VARIANT;
    if (other < 0 || p->cu_seqlens_q || l->decode.whole > 0) return;
    const fa_variant *v = &fa_variants[other];
    l->variant = other;
    l->threads = FA_DECODE_SM90_PERSISTENT_THREADS((uint32_t)v->groups);
    l->smem_bytes = (uint32_t)fa_cuda_decode_sm90_smem(v, v->stages);
    l->decode.stages = v->stages;
    l->decode.blocks = (int32_t)(1 + number % 7);
    fa_cuda_cut_decode(l, 0, l->decode.parts, (int64_t)l->decode.least * v->keys);
}

/* False if memory outside the workspace was written. */
static bool run_plan(machine *m, fa_problem *p, const fa_cuda_plan_launch *planned)
{
    fa_cuda_plan_launch now = *planned;
    const fa_cuda_plan_launch *l = &now;
    if (m->persistent || all_persistent) make_persistent(m->number, p, &now);
    begin_workspace(&m->memory, p, l->workspace_bytes);
    if ((m->two_launches || l->decode.merges_apart) && l->decode.parts > 1) {
        launch(m, p, l, FA_DECODE_STORE);
        launch(m, p, l, FA_DECODE_MERGE);
    } else launch(m, p, l, FA_DECODE_LAST);
    return end_workspace(&m->memory, p);
}

#define FAMILY fa_cuda_decode_sm90
#include "decode_bytes.h"
#include "decode_server.h"

/* ---- Random problems ------------------------------------------------------------------------- */

/* The minimum is one key tile in a part. In a third of the problems some work tiles stay whole, but
 * not if a sequence's bits must not depend on the others. */
static void choose_parts(int64_t number, const fa_problem *p, fa_cuda_plan_launch *l)
{
    static const int64_t parts[] = {1, 2, 3, 128, 5, 0, 17};
    const int64_t count = parts[number % 7],
                  few = number % 3 == 1 && !p->batch_invariant ? number / 3 % 6 : 0;
    const int64_t whole = few < l->tasks ? few : l->tasks - 1;
    if (count > 0) fa_cuda_cut_decode(l, l->tasks > 0 ? whole : 0, count, 1);
    if (l->tasks > FA_DECODE_COUNTERS && number % 2 == 0) fa_cuda_cut_decode(l, 0, 1, 1);
}

/* The launch for the sequences with few queries; false if there is none. */
static bool plan_few(const machine *m, const fa_problem *p, fa_cuda_plan *plan)
{
    char why[320] = "";
    fa_cuda_plan_begin(&devices[H200], &fa_cuda_forward_mixed_beside, plan);
    return fa_cuda_add_few_sm90(p, (int32_t)(1 + m->number % 7), &devices[H200], plan, why,
                                sizeof why);
}

/* A mixed batch: persistent blocks for the sequences with few queries, and others for the rest.
 * False if memory outside the workspace was written. */
static bool run_mixed(machine *m, fa_problem *p, const fa_cuda_plan_launch *l)
{
    fa_cuda_plan plan;
    if (!plan_few(m, p, &plan)) return run_plan(m, p, l);
    fa_cuda_plan_launch few = plan.launches[0], many = *l;
    few.decode.most_queries = (int32_t)(1 + m->number % 3);
    many.fewest_queries = few.decode.most_queries + 1;
    fa_cuda_cut_decode(&few, 0, few.tasks > FA_DECODE_SM90_COUNTERS ? 1 : l->decode.parts, 1);
    mixed++;
    const bool right = few.idle || run_plan(m, p, &few);
    return run_plan(m, p, &many) && right; /* both run in any case */
}

/* In half of the problems with packed queries the longest sequence is known, because work tiles are
 * numbered by sequence then. */
static void tell_longest(int64_t number, fa_problem *p)
{
    if (!p->cu_seqlens_q || number / 2 % 2 == 0) return;
    p->max_q = 1;
    for (int64_t b = 0; b < p->batch; b++) {
        const int64_t rows =
            p->seqlens_q ? p->seqlens_q[b] : p->cu_seqlens_q[b + 1] - p->cu_seqlens_q[b];
        if (rows > p->max_q) p->max_q = rows;
    }
}

static bool wants(void *context, const random_call *call)
{
    const machine m = {.number = *(const int64_t *)context};
    char message[320];
    fa_problem p;
    fa_cuda_plan plan;
    /* attend gives the reason. */
    if (make_forward(call, &p, message, sizeof message) != FA_OK) return true;
    tell_longest(m.number, &p);
    const uint64_t mixed_batch = is_mixed(m.number, &p) && plan_few(&m, &p, &plan);
    if (!fa_cuda_plan_make(&p, &devices[H200], &fa_cuda_decode_sm90, &plan, NULL, 0)) return false;
    const uint64_t by_sequence =
        plan.launches[0].decode.most_queries == FA_DECODE_ALL_QUERIES ? 2 : 0;
    return sample_takes(&p, &plan, mixed_batch | by_sequence);
}

static fa_status attend(void *context, const random_call *call, char *message, size_t size)
{
    fa_problem p;
    fa_cuda_plan plan;
    machine m = {.number = *(const int64_t *)context, .memory = *call->buffers};
    const fa_status status = make_forward(call, &p, message, size);
    if (status != FA_OK) return status;
    tell_longest(m.number, &p);
    if (!fa_cuda_plan_make(&p, &devices[H200], &fa_cuda_decode_sm90, &plan, message, size))
        return FA_ERROR_UNSUPPORTED;
    fa_cuda_plan_launch *l = &plan.launches[0];
    if (l->idle) return FA_OK;
    choose_parts(m.number, &p, l);
    m.two_launches = m.number % 3 == 0 || l->tasks > FA_DECODE_COUNTERS;
    cut += l->decode.parts > 1;
    some_whole += l->decode.parts > 1 && l->decode.whole > 0;
    own_tiles += l->decode.most_queries == FA_DECODE_ALL_QUERIES;
    m.persistent = m.number / 4 % 2;
    char *const before = ref_buffers_copy(call->buffers);
    bool clean = is_mixed(m.number, &p) ? run_mixed(&m, &p, l) : run_plan(&m, &p, l);
    char *const first = ref_buffers_copy(call->buffers);
    ref_buffers_put(call->buffers, before);
    m.otherwise = true;
    m.two_launches = !m.two_launches || l->tasks > FA_DECODE_COUNTERS;
    m.persistent = m.number / 8 % 2;
    clean &= is_mixed(m.number, &p) ? run_mixed(&m, &p, l) : run_plan(&m, &p, l);
    const bool same = ref_buffers_are(call->buffers, first);
    free(before), free(first);
    return random_status_of_runs(clean, same, message, size);
}

/* alone: a single class; RANDOM_ANYTHING: all. Returns the number of problems for this family. */
static int run_random_problems(int64_t first, int64_t end, random_focus alone)
{
    static random_result result;
    static const random_focus focuses[] = {RANDOM_SPLIT,   RANDOM_UNUSED,     RANDOM_LENGTHS,
                                           RANDOM_MASKS,   RANDOM_ANYTHING,   RANDOM_SPLIT,
                                           RANDOM_STRIDES, RANDOM_EMPTY,      RANDOM_TAILS,
                                           RANDOM_SPLIT,   RANDOM_INVARIANCE, RANDOM_PEAKED};
    int done = 0;
    int64_t number = first;
    random_settings settings = {.device = FA_DEVICE_CUDA,
                                .attend = attend,
                                .wants = wants,
                                .context = &number,
                                .few_queries = true,
                                .plain_scores = true,
                                .one_dtype = alone != RANDOM_QUANTIZED};
    for (; number < end; number++) {
        settings.focus = focuses[number % (int64_t)(sizeof focuses / sizeof focuses[0])];
        if (alone != RANDOM_ANYTHING) settings.focus = alone;
        settings.tiles = settings.focus != RANDOM_TAILS && number % 4;
        settings.dtype = number / 2 % 2 ? FA_FLOAT16 : FA_BFLOAT16;
        settings.one_pass = number % 5 > 0;
        settings.pass = RANDOM_DECODE;
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

/* ---- Values that are not finite
 * --------------------------------------------------------------- */

/* Query i of a sequence and a head in double. */
static void expect(const server *s, int64_t b, int64_t i, int64_t h, double *out)
{
    const uint16_t *q = s->q + ((b * s->n_q + i) * s->heads_q + h) * s->d;
    const int64_t keys = s->lengths[b] - (s->n_q - 1 - i), g = h / (s->heads_q / s->heads_kv);
    double sum = 0;
    for (int64_t c = 0; c < s->d; c++) out[c] = 0;
    for (int64_t j = 0; j < keys; j++) {
        const uint16_t *k = s->k + row_at(s, b, j) + (size_t)(g * s->d);
        const uint16_t *v = s->v + row_at(s, b, j) + (size_t)(g * s->d);
        double x = 0;
        for (int64_t c = 0; c < s->d; c++) x += fa_half_to_float(q[c]) * fa_half_to_float(k[c]);
        x = exp(x / sqrt((double)s->d));
        sum += x;
        for (int64_t c = 0; c < s->d; c++) out[c] += x * fa_half_to_float(v[c]);
    }
    for (int64_t c = 0; c < s->d; c++) out[c] /= sum;
}

/* A key that the first queries of a sequence do not see has NaN or an infinity among its values: it
 * has no effect on them, and makes the results of queries that see it NaN or infinite. */
static void test_nonfinite_values(void)
{
    static const uint16_t bad[BATCH] = {0x7e00, 0x7c00, 0xfc00, 0x7e01};
    static const int unseen[BATCH] = {2, 1, 2, 1}; /* of three queries */
    const int32_t lengths[BATCH] = {256, 131, 65, 401};
    for (int shape = 1; shape < 3; shape++) {
        server *s = new_server(&shapes[shape], 500 + shape);
        double want[256];
        const int32_t ends[BATCH] = {lengths[0], lengths[1], lengths[2],
                                     (int32_t)(shape == 1 ? 401 : 300)};
        fill(s, ends, false);
        for (int b = 0; b < BATCH; b++) {
            const int64_t key = ends[b] - s->n_q + unseen[b];
            s->v[row_at(s, b, key) + (size_t)(17 * b)] = bad[b];
        }
        run_server(s, 2);
        for (int64_t row = 0; row < (int64_t)s->lse_size; row++) {
            const int64_t h = row % s->heads_q, i = row / s->heads_q % s->n_q;
            const int64_t b = row / s->heads_q / s->n_q;
            const uint16_t *out = s->out + row * s->d;
            int wrong = 0;
            expect(s, b, i, h, want);
            for (int64_t c = 0; c < s->d; c++) {
                const double x = fa_half_to_float(out[c]);
                if (isfinite(want[c]))
                    wrong += !(fabs(x - want[c]) <= 0x1p-9 * (fabs(want[c]) + 1));
                else wrong += isnan(want[c]) ? !isnan(x) : x != want[c];
            }
            CHECK(wrong == 0, "shape %d, sequence %d, query %d, head %d: %d columns are wrong",
                  shape, (int)b, (int)i, (int)h, wrong);
        }
        free_server(s);
    }
}

static int done, quantized; /* problems for this family */

static void run_all_random_problems(int64_t number, int64_t end, bool rare_too)
{
    done = run_random_problems(number, end, RANDOM_ANYTHING);
    quantized = run_random_problems(number, end, RANDOM_QUANTIZED);
    for (size_t i = 0; rare_too && i < sizeof rare / sizeof rare[0]; i++)
        run_random_problems(rare[i], rare[i] + 1, RANDOM_ANYTHING);
}

int main(int argc, char **argv)
{
    const int64_t number = argc > 1 ? atoll(argv[1]) : 0;
    const int64_t end = number + (argc > 2 ? atoll(argv[2]) : PROBLEMS);
    test_begin();
    if (sample_begin(argc > 1)) run_all_random_problems(number, end, true);
    sample_found();
    run_all_random_problems(number, end, argc == 1);
    if (argc == 1) {
        test_pages((const int64_t[]){24, 16, 3, 1, 48, 7, 12, 128, 1000});
        test_replay();
        test_parts();
        test_wild_tables();
        test_nonfinite_values();
        test_scales();
        all_persistent = true;
        test_pages((const int64_t[]){24, 16, 40, 32, 48, 64, 128, 256, 1000});
        test_wild_tables();
        test_nonfinite_values();
        sample_end(kernels, runs);
    }
    CHECK(done > 0 && quantized > 0 && (cut > 0 || argc > 1), "no problem was for this kernel");
    CHECK(mixed > 0 || argc > 1, "no problem was a mixed batch");
    CHECK(some_whole > 0 || argc > 1, "in no problem some work tiles stayed whole beside others");
    CHECK(own_tiles > 0 || argc > 1, "no work tiles were numbered by sequence");
    if (argc > 2) {
        printf("%d and %d problems, keys of %d cut, in %d some whole, %d by sequence, %d mixed\n",
               done, quantized, cut, some_whole, own_tiles, mixed);
        for (int i = 0; i < FA_VARIANTS; i++)
            if (kernels[i]) printf("%5d %s\n", runs[i], fa_variants[i].name);
    }
    return test_end();
}
