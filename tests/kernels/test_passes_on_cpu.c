/*
 * The CUDA kernels of backward, weights and combine, run on the host (cuda_on_cpu.h) with random
 * problems from the whole option space, compared with float64, with the launches that the planner
 * and the backend make. What backward needs from forward comes from the CPU engine. Each call is
 * made twice, with threads in either order: the bits must be the same.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "caller_memory.h"
#include "check.h"
#include "cuda/plan_backward.h"
#include "cuda/plan_combine.h"
#include "cuda/plan_weights.h"
#include "cuda_on_cpu.h"
#include "gpus.h"
#include "normalize.h"
#include "random_problem.h"
#include "sample.h"
#include "scalar.h"
#include "wild_pages.h"

enum { PROBLEMS = 75 };

#define DECLARE(name, params)                                                                      \
    void name(params p);                                                                           \
    static void run_##name(const void *p) { name(*(const params *)p); }
DECLARE(backward_delta, fa_backward_params)
DECLARE(backward_dq_simt_d64, fa_backward_params)
DECLARE(backward_dq_simt_d128, fa_backward_params)
DECLARE(backward_dq_simt_d256, fa_backward_params)
DECLARE(backward_dq_simt_d512, fa_backward_params)
DECLARE(backward_dkv_simt_d64, fa_backward_params)
DECLARE(backward_dkv_simt_d128, fa_backward_params)
DECLARE(backward_dkv_simt_d256, fa_backward_params)
DECLARE(backward_dkv_simt_d512, fa_backward_params)
DECLARE(backward_dbias_simt, fa_backward_params)
DECLARE(backward_dsinks, fa_backward_params)
DECLARE(weights_simt, fa_weights_params)
DECLARE(combine_many, fa_combine_launch)

typedef struct few_parts {
    fa_combine_head head;
    fa_combine_part parts[FA_COMBINE_FEW];
} few_parts;
DECLARE(combine_few, few_parts)

#define KERNEL(name) [FA_VARIANT_##name] = run_##name
static void (*const kernels[FA_VARIANTS])(const void *parameters) = {
    KERNEL(backward_delta),
    KERNEL(backward_dq_simt_d64),
    KERNEL(backward_dq_simt_d128),
    KERNEL(backward_dq_simt_d256),
    KERNEL(backward_dq_simt_d512),
    KERNEL(backward_dkv_simt_d64),
    KERNEL(backward_dkv_simt_d128),
    KERNEL(backward_dkv_simt_d256),
    KERNEL(backward_dkv_simt_d512),
    KERNEL(backward_dbias_simt),
    KERNEL(backward_dsinks),
    KERNEL(weights_simt),
    KERNEL(combine_few),
    KERNEL(combine_many),
};

static int runs[FA_VARIANTS];

/* Sometimes few blocks, so that each has several tasks; and threads in either order. */
typedef struct machine {
    int64_t number;
    bool backwards;
    ref_buffers memory; /* what kernels may access; without buffers: not known */
} machine;

static void launch(const machine *m, const fa_cuda_plan_launch *l, const void *params)
{
    char name[80];
    snprintf(name, sizeof name, "number %lld: %s", (long long)m->number,
             fa_variants[l->variant].name);
    cuda_run run = {.name = name,
                    .memory = m->memory.count ? &m->memory : NULL,
                    .parameters = params,
                    .grid = m->number % 3 == 0 && l->grid > 2 ? 2 : l->grid,
                    .threads = l->threads,
                    .smem_bytes = l->smem_bytes,
                    .backwards = m->backwards};
    run.kernel = kernels[l->variant];
    if (!run.kernel) abort();
    runs[l->variant]++;
    cuda_run_kernel(&run);
}

/* ---- Backward and weights -------------------------------------------------------------------- */

static void run_launches(const machine *m, const fa_problem *p, const fa_cuda_plan *plan)
{
    for (int i = 0; i < plan->count; i++) {
        const fa_cuda_plan_launch *l = &plan->launches[i];
        fa_backward_params backward;
        fa_weights_params weights;
        if (l->idle) continue;
        if (p->pass == FA_PASS_WEIGHTS) fa_cuda_set_weights_params(p, l, &weights);
        else fa_cuda_set_backward_params(p, l, &backward);
        launch(m, l, p->pass == FA_PASS_WEIGHTS ? (const void *)&weights : &backward);
    }
}

static fa_status run_passes(machine *m, fa_problem *p, char *message, size_t size)
{
    fa_cuda_plan plan;
    if (!fa_cuda_plan_make(p, &devices[T4], NULL, &plan, message, size))
        return FA_ERROR_UNSUPPORTED;
    begin_workspace(&m->memory, p, plan.workspace_bytes);
    run_launches(m, p, &plan);
    if (end_workspace(&m->memory, p)) return FA_OK;
    snprintf(message, size, "memory beside the workspace was written");
    return (fa_status)RANDOM_WRONG;
}

static fa_status make_problem(const random_call *call, fa_problem *p)
{
    fa_options options = call->options;
    const bool backward = call->pass == RANDOM_BACKWARD;
    const fa_arguments a = {.pass = backward ? FA_PASS_BACKWARD : FA_PASS_WEIGHTS,
                            .device = FA_DEVICE_CUDA,
                            .q_memory.ordinal = -1,
                            .q = &call->q,
                            .k = &call->k,
                            .v = backward ? &call->v : NULL,
                            .out = backward ? &call->out : NULL,
                            .lse = backward ? call->lse : NULL,
                            .gradients = backward ? &call->gradients : NULL,
                            .rows = call->rows,
                            .num_rows = call->num_rows,
                            .weights = backward ? NULL : &call->weights,
                            .options = &options};
    return fa_problem_make(&a, p);
}

static fa_status attend(machine *m, const random_call *call, char *message, size_t size)
{
    fa_problem p;
    const fa_status status = make_problem(call, &p);
    if (status == FA_OK) return run_passes(m, &p, message, size);
    snprintf(message, size, "%s", fa_last_error());
    return status;
}

/* ---- Combine --------------------------------------------------------------------------------- */

static fa_status merge(machine *m, const random_call *call, char *message, size_t size)
{
    fa_options options = call->options;
    fa_combine_problem c = {.device = FA_DEVICE_CUDA,
                            .parts = call->parts,
                            .part_lse = call->part_lse,
                            .num_parts = call->num_parts,
                            .lse = call->lse};
    const fa_status status = fa_combine_problem_make(&call->out, &options, &c);
    if (status != FA_OK) {
        snprintf(message, size, "%s", fa_last_error());
        return status;
    }
    fa_cuda_plan plan;
    const fa_cuda_plan_launch *l = &plan.launches[0];
    int64_t done = 0;
    if (!fa_cuda_plan_combine(&c, &devices[T4], &plan, message, size)) return FA_ERROR_UNSUPPORTED;
    if (l->idle) return FA_OK;
    if (c.workspace_size < plan.workspace_bytes) {
        snprintf(message, size, "%zu bytes of workspace", plan.workspace_bytes);
        return FA_ERROR_WORKSPACE;
    }
    do {
        static fa_combine_launch params;
        done = fa_cuda_set_combine_params(&c, l, done, &params);
        launch(m, l, &params);
    } while (done < c.num_parts);
    return FA_OK;
}

/* ---- Random problems ------------------------------------------------------------------------- */

static fa_status run_once(machine *m, const random_call *call, char *message, size_t size)
{
    m->memory = *call->buffers;
    return (call->pass == RANDOM_COMBINE ? merge : attend)(m, call, message, size);
}

static fa_status run_twice(machine *m, const random_call *call, char *message, size_t size)
{
    char *before = ref_buffers_copy(call->buffers);
    fa_status status = run_once(m, call, message, size);
    if (status == FA_OK) {
        char *first = ref_buffers_copy(call->buffers);
        ref_buffers_put(call->buffers, before);
        m->backwards = !m->backwards;
        status = run_once(m, call, message, size);
        if (status == FA_OK && !ref_buffers_are(call->buffers, first)) {
            snprintf(message, size, "a second run left other bits");
            status = (fa_status)RANDOM_WRONG;
        }
        free(first);
    }
    free(before);
    return status;
}

static fa_status compute(void *context, const random_call *given, char *message, size_t size)
{
    random_call call = *given;
    if (call.pass != RANDOM_FORWARD) return run_twice(context, &call, message, size);
    call.options.device = FA_DEVICE_CPU;
    const fa_status status = random_call_run(&call);
    if (status != FA_OK) snprintf(message, size, "%s", fa_last_error());
    return status;
}

/* If no kernel supports a problem, that is an error here: attend reports it. */
static bool wants(void *context, const random_call *call)
{
    fa_problem p;
    fa_cuda_plan plan;
    (void)context;
    if (call->pass == RANDOM_COMBINE) return !sample.searching; /* they take little time */
    return make_problem(call, &p) != FA_OK ||
           !fa_cuda_plan_make(&p, &devices[T4], NULL, &plan, NULL, 0) || sample_takes(&p, &plan, 0);
}

/* ---- More parts than one launch takes, log-sum-exps with strides ----------------------------- */

enum { MANY = 2 * FA_COMBINE_MANY + 100, BATCH = 2, ROWS = 3, HEADS = 2, COLUMNS = 5 };
enum { COUNT = BATCH * ROWS * HEADS, VALUES = COUNT * COLUMNS, SPACED = 3 * COUNT };

static float values[MANY][VALUES], dense_lse[MANY][COUNT], spaced_lse[MANY][SPACED];
static int64_t strides[MANY][3];
static float workspace[COUNT * (COLUMNS + 1)];

/* The same numbers contiguous, and in another order with gaps of NaN. */
static void make_parts(fa_tensor *parts)
{
    ref_random random = {7};
    for (int n = 0; n < MANY; n++) {
        for (int i = 0; i < VALUES; i++) values[n][i] = (float)ref_random_normal(&random);
        for (int i = 0; i < SPACED; i++) spaced_lse[n][i] = NAN;
        strides[n][0] = 3, strides[n][1] = 3 * BATCH * ROWS, strides[n][2] = 3 * BATCH;
        for (int b = 0; b < BATCH; b++)
            for (int h = 0; h < HEADS; h++)
                for (int i = 0; i < ROWS; i++) {
                    const float lse = (float)ref_random_normal(&random);
                    dense_lse[n][(b * HEADS + h) * ROWS + i] = lse;
                    spaced_lse[n][b * strides[n][0] + h * strides[n][1] + i * strides[n][2]] = lse;
                }
        parts[n] = fa_bshd(values[n], FA_FLOAT32, BATCH, ROWS, HEADS, COLUMNS);
    }
}

/* Against the definition, in float64. */
static void check_merged(int64_t count, const fa_tensor *out, const float *lse, double tolerance,
                         const char *what)
{
    for (int r = 0; r < COUNT; r++) {
        const int b = r / (HEADS * ROWS), h = r / ROWS % HEADS, i = r % ROWS;
        double sum = 0, want[COLUMNS] = {0};
        for (int64_t n = 0; n < count; n++) {
            const double weight = exp((double)dense_lse[n][r]);
            sum += weight;
            for (int c = 0; c < COLUMNS; c++)
                want[c] += weight * (double)values[n][((b * ROWS + i) * HEADS + h) * COLUMNS + c];
        }
        for (int c = 0; c < COLUMNS; c++)
            CHECK(fabs(ref_load(out, b, i, h, c) - want[c] / sum) <= tolerance,
                  "%s, %lld parts: %g, not %g", what, (long long)count, ref_load(out, b, i, h, c),
                  want[c] / sum);
        CHECK(!lse || fabs((double)lse[r] - log(sum)) <= 1e-5, "%s, %lld parts: lse %g, not %g",
              what, (long long)count, lse ? (double)lse[r] : 0, log(sum));
    }
}

static void check_parts_once(const fa_tensor *parts, int64_t count, bool spaced, fa_dtype dtype,
                             bool wants_lse)
{
    static float data[VALUES], lse[COUNT];
    static const float *part_lse[MANY];
    const fa_tensor out = fa_bshd(data, dtype, BATCH, ROWS, HEADS, COLUMNS);
    const double tolerance = dtype == FA_FLOAT32 ? 1e-5 : 8e-3;
    const char *what = spaced ? "spaced" : "contiguous";
    char why[320] = "";
    machine m = {.number = count};
    for (int64_t n = 0; n < count; n++) part_lse[n] = spaced ? spaced_lse[n] : dense_lse[n];
    random_call call = {.pass = RANDOM_COMBINE,
                        .out = out,
                        .lse = wants_lse ? lse : NULL,
                        .parts = parts,
                        .part_lse = part_lse,
                        .num_parts = count};
    call.options.size = sizeof call.options;
    if (spaced) call.options.part_lse_stride = strides[0];
    memset(data, 0xff, sizeof data);
    const bool needs = count > FA_COMBINE_MANY && !(dtype == FA_FLOAT32 && wants_lse);
    CHECK(merge(&m, &call, why, sizeof why) == (needs ? FA_ERROR_WORKSPACE : FA_OK), "%s", why);
    if (needs) {
        memset(workspace, 0xff, sizeof workspace);
        call.options.workspace = workspace;
        call.options.workspace_size = sizeof workspace;
        CHECK(merge(&m, &call, why, sizeof why) == FA_OK, "%s", why);
    }
    check_merged(count, &out, call.lse, tolerance, what);
    memset(data, 0xff, sizeof data);
    CHECK(fa_combine(parts, part_lse, count, &out, call.lse, &call.options) == FA_OK, "%s",
          fa_last_error());
    check_merged(count, &out, call.lse, tolerance, what);
}

static void check_many_parts(void)
{
    static fa_tensor parts[MANY];
    static const int64_t counts[] = {
        1, FA_COMBINE_FEW, FA_COMBINE_FEW + 1, FA_COMBINE_MANY, FA_COMBINE_MANY + 1, MANY};
    make_parts(parts);
    for (size_t n = 0; n < sizeof counts / sizeof counts[0]; n++)
        for (int how = 0; how < 8; how++)
            check_parts_once(parts, counts[n], how & 1, how & 2 ? FA_BFLOAT16 : FA_FLOAT32,
                             how & 4);
}

static void run_problems(int64_t number, int64_t end)
{
    static const random_pass passes[] = {RANDOM_BACKWARD, RANDOM_BACKWARD, RANDOM_BACKWARD,
                                         RANDOM_BACKWARD, RANDOM_WEIGHTS,  RANDOM_COMBINE};
    static random_result result;
    for (; number < end; number++) {
        machine m = {.number = number, .backwards = number % 2};
        const bool chunks = number % 5 == 4 && passes[number % 6] != RANDOM_COMBINE;
        const random_settings settings = {.device = FA_DEVICE_CUDA,
                                          .focus = chunks ? RANDOM_CHUNKS : RANDOM_ANYTHING,
                                          .one_pass = true,
                                          .pass = passes[number % 6],
                                          .all_passes = true,
                                          .small = true,
                                          .backward_alone = true,
                                          .attend = compute,
                                          .wants = wants,
                                          .context = &m};
        random_problem_run((uint64_t)number, &settings, &result);
        if (result.status == FA_ERROR_UNSUPPORTED && !sample.whole) continue;
        CHECK(result.report.ok, "number %lld: %s\n  %s", (long long)number, result.report.message,
              result.description);
    }
}

/* The gradient of the queries, or the weights, of a call like those in wild_pages.h. */
static fa_tensor compute_wild(wild_call *w, random_pass pass, const int32_t *entries)
{
    char message[320] = "";
    machine m = {.number = 1};
    random_call *c = &w->call;
    wild_make(w, FA_FLOAT32);
    wild_put(w, entries);
    c->pass = pass;
    c->num_rows = WILD_QUERIES;
    c->weights = wild_tensor(w, "weights", FA_FLOAT32, WILD_BATCH, WILD_HEADS, WILD_QUERIES,
                             WILD_ENTRIES * WILD_PAGE);
    c->gradients = (fa_gradients)FA_GRADIENTS_INIT;
    c->gradients.dout = wild_queries(w, "dout", FA_FLOAT32);
    c->gradients.dq = wild_queries(w, "dq", FA_FLOAT32);
    const fa_status status = run_once(&m, c, message, sizeof message);
    CHECK(status == FA_OK, "%s: %s", random_pass_name(pass), message);
    return pass == RANDOM_WEIGHTS ? c->weights : c->gradients.dq;
}

static void test_wild_tables(random_pass pass)
{
    const int32_t wild[WILD_ENTRIES] = {INT32_MIN, -1, 3, WILD_PAGES, INT32_MAX},
                  nearest[WILD_ENTRIES] = {0, 0, 3, WILD_PAGES - 1, WILD_PAGES - 1};
    wild_call right, wrong;
    const fa_tensor x = compute_wild(&right, pass, nearest), y = compute_wild(&wrong, pass, wild);
    CHECK(same_bits(&x, &y), "%s: another result with wild pages", random_pass_name(pass));
    ref_buffers_free(&right.buffers);
    ref_buffers_free(&wrong.buffers);
}

int main(int argc, char **argv)
{
    const int64_t number = argc > 1 ? atoll(argv[1]) : 0;
    const int64_t end = number + (argc > 2 ? atoll(argv[2]) : PROBLEMS);
    test_begin();
    check_many_parts();
    if (sample_begin(argc > 1)) run_problems(number, end);
    sample_found();
    run_problems(number, end);
    test_wild_tables(RANDOM_BACKWARD);
    test_wild_tables(RANDOM_WEIGHTS);
    if (argc == 1) sample_end(kernels, runs);
    return test_end();
}
