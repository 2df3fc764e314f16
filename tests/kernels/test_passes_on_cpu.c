/*
 * The CUDA kernels of backward, weights and combine, run on the host (cuda_on_cpu.h) over random
 * problems from the whole option space against float64, with the launches that the planner and the
 * backend make. What backward needs of forward comes from the CPU engine. Each call is made twice,
 * threads in either order: the bits must be the same.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "cuda/passes.h"
#include "cuda_on_cpu.h"
#include "gpus.h"
#include "normalize.h"
#include "outputs.h"
#include "random_problem.h"

enum { PROBLEMS = 60 };

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

#define KERNEL(name)                                                                               \
    {                                                                                              \
#name, run_##name                                                                          \
    }
static const struct {
    const char *image;
    void (*run)(const void *parameters);
} kernels[] = {KERNEL(backward_delta),
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
               KERNEL(combine_many)};

/* Sometimes so few blocks that each has several tasks, and threads in either order. */
typedef struct machine {
    int64_t number;
    bool backwards;
    ref_buffers memory; /* what kernels may touch; without buffers: not known */
} machine;

static void launch(const machine *m, const fa_cuda_step *step, const void *params)
{
    char name[80];
    snprintf(name, sizeof name, "number %lld: %s", (long long)m->number, step->image);
    cuda_run run = {.name = name,
                    .memory = m->memory.count ? &m->memory : NULL,
                    .parameters = params,
                    .grid = m->number % 3 == 0 && step->grid > 2 ? 2 : step->grid,
                    .threads = step->threads,
                    .smem_bytes = step->smem_bytes,
                    .backwards = m->backwards};
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++)
        if (strcmp(kernels[i].image, step->image) == 0) run.kernel = kernels[i].run;
    if (!run.kernel) abort();
    cuda_run_kernel(&run);
}

/* ---- Backward and weights -------------------------------------------------------------------- */

enum { GUARD = 256, POISON = 0xff };

static bool is_poison(const char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)p[i] != POISON) return false;
    return true;
}

static void run_steps(const machine *m, const fa_problem *p, const fa_cuda_passes *passes)
{
    for (int i = 0; i < FA_CUDA_STEPS; i++) {
        if (!fa_cuda_step_runs(p, passes, i)) continue;
        const fa_backward_params backward = fa_cuda_backward_params(p, &passes->steps[i]);
        const fa_weights_params weights = fa_cuda_weights_params(p, &passes->steps[i]);
        const bool is_weights = i == FA_STEP_WEIGHTS;
        launch(m, &passes->steps[i], is_weights ? (const void *)&weights : &backward);
    }
}

/* The workspace lies between guard bands and is full of NaN. */
static fa_status run_passes(machine *m, fa_problem *p, char *message, size_t size)
{
    fa_cuda_passes passes;
    if (!fa_cuda_passes_make(p, &devices[T4], &passes, message, size)) return FA_ERROR_UNSUPPORTED;
    char *memory = malloc(passes.workspace_bytes + 2 * GUARD);
    if (!memory) abort();
    memset(memory, POISON, passes.workspace_bytes + 2 * GUARD);
    p->workspace = memory + GUARD;
    p->workspace_size = passes.workspace_bytes;
    m->memory.list[m->memory.count++] =
        (ref_buffer){.name = "workspace", .data = p->workspace, .bytes = passes.workspace_bytes};
    run_steps(m, p, &passes);
    m->memory.count--;
    const bool clean =
        is_poison(memory, GUARD) && is_poison(memory + GUARD + passes.workspace_bytes, GUARD);
    free(memory);
    if (!clean) snprintf(message, size, "memory beside the workspace was written");
    return clean ? FA_OK : (fa_status)RANDOM_WRONG;
}

static fa_status attend(machine *m, const random_call *call, char *message, size_t size)
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
    fa_problem p;
    const fa_status status = fa_problem_make(&a, &p);
    if (status == FA_OK) return run_passes(m, &p, message, size);
    snprintf(message, size, "%s", fa_last_error());
    return status;
}

/* ---- Combine --------------------------------------------------------------------------------- */

static fa_status merge(machine *m, const random_call *call, char *message, size_t size)
{
    fa_options options = call->options;
    const fa_combine_arguments a = {.device = FA_DEVICE_CUDA,
                                    .parts = call->parts,
                                    .part_lse = call->part_lse,
                                    .num_parts = call->num_parts,
                                    .out = &call->out,
                                    .lse = call->lse,
                                    .options = &options};
    fa_combine_problem c;
    const fa_status status = fa_combine_problem_make(&a, &c);
    if (status != FA_OK) {
        snprintf(message, size, "%s", fa_last_error());
        return status;
    }
    const fa_cuda_parts parts = {.batch = c.batch,
                                 .heads = c.heads,
                                 .n_q = c.n_q,
                                 .d_v = c.d_v,
                                 .num_parts = c.num_parts,
                                 .parts = c.parts,
                                 .part_lse = c.part_lse,
                                 .out = c.out,
                                 .lse = c.lse};
    fa_cuda_step step;
    int64_t most, done = 0;
    if (!fa_cuda_combine_make(&parts, &devices[T4], &step, &most, message, size))
        return FA_ERROR_UNSUPPORTED;
    if (step.tasks == 0) return FA_OK;
    do {
        static fa_combine_launch params;
        done = fa_cuda_combine_params(&parts, &step, most, done, &params);
        launch(m, &step, &params);
    } while (done < parts.num_parts);
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
    size_t bytes;
    char *before = copy_outputs(call->buffers, &bytes);
    fa_status status = run_once(m, call, message, size);
    if (status == FA_OK) {
        char *first = copy_outputs(call->buffers, &bytes);
        put_outputs(call->buffers, before);
        m->backwards = !m->backwards;
        status = run_once(m, call, message, size);
        char *second = copy_outputs(call->buffers, &bytes);
        if (status == FA_OK && memcmp(first, second, bytes) != 0) {
            snprintf(message, size, "a second run left other bits");
            status = (fa_status)RANDOM_WRONG;
        }
        free(first);
        free(second);
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

/* ---- More parts than one launch takes -------------------------------------------------------- */

enum { MANY = 2 * FA_COMBINE_MANY + 100, ROWS = 3, COLUMNS = 5 };

static void check_many_parts(void)
{
    static float values[MANY][ROWS * COLUMNS], lse[MANY][ROWS], out[ROWS * COLUMNS], out_lse[ROWS];
    static float want[ROWS * COLUMNS], want_lse[ROWS];
    static fa_tensor parts[MANY];
    static const float *part_lse[MANY];
    ref_random random = {7};
    for (int n = 0; n < MANY; n++) {
        for (int i = 0; i < ROWS * COLUMNS; i++) values[n][i] = (float)ref_random_normal(&random);
        for (int i = 0; i < ROWS; i++) lse[n][i] = (float)ref_random_normal(&random);
        parts[n] = fa_bshd(values[n], FA_FLOAT32, 1, ROWS, 1, COLUMNS);
        part_lse[n] = lse[n];
    }
    const fa_tensor to = fa_bshd(out, FA_FLOAT32, 1, ROWS, 1, COLUMNS);
    const fa_tensor right = fa_bshd(want, FA_FLOAT32, 1, ROWS, 1, COLUMNS);
    random_call call = {
        .pass = RANDOM_COMBINE, .out = to, .lse = out_lse, .parts = parts, .part_lse = part_lse};
    static const int64_t counts[] = {FA_COMBINE_FEW, FA_COMBINE_FEW + 1, FA_COMBINE_MANY,
                                     FA_COMBINE_MANY + 1, MANY};
    for (size_t n = 0; n < sizeof counts / sizeof counts[0]; n++) {
        machine m = {.number = (int64_t)n};
        char why[320] = "";
        call.num_parts = counts[n];
        CHECK(merge(&m, &call, why, sizeof why) == FA_OK, "%s", why);
        CHECK(fa_combine(parts, part_lse, counts[n], &right, want_lse, NULL) == FA_OK, "%s",
              fa_last_error());
        for (int i = 0; i < ROWS * COLUMNS; i++)
            CHECK(fabsf(out[i] - want[i]) <= 1e-5f, "%lld parts: %g, not %g", (long long)counts[n],
                  (double)out[i], (double)want[i]);
        for (int i = 0; i < ROWS; i++)
            CHECK(fabsf(out_lse[i] - want_lse[i]) <= 1e-5f, "%lld parts: lse %g, not %g",
                  (long long)counts[n], (double)out_lse[i], (double)want_lse[i]);
    }
    char why[320] = "";
    machine m = {0};
    call.lse = NULL;
    CHECK(merge(&m, &call, why, sizeof why) == FA_ERROR_UNSUPPORTED && strstr(why, "num_parts is"),
          "%s", why);
}

int main(int argc, char **argv)
{
    static const random_pass passes[] = {RANDOM_BACKWARD, RANDOM_BACKWARD, RANDOM_BACKWARD,
                                         RANDOM_BACKWARD, RANDOM_WEIGHTS,  RANDOM_COMBINE};
    static random_result result;
    int64_t number = argc > 1 ? atoll(argv[1]) : 0;
    const int64_t end = number + (argc > 2 ? atoll(argv[2]) : PROBLEMS);
    test_begin();
    check_many_parts();
    for (; number < end; number++) {
        machine m = {.number = number, .backwards = number % 2};
        const random_settings settings = {.device = FA_DEVICE_CUDA,
                                          .one_pass = true,
                                          .pass = passes[number % 6],
                                          .all_passes = true,
                                          .attend = compute,
                                          .context = &m};
        random_problem_run((uint64_t)number, &settings, &result);
        CHECK(result.report.ok, "number %lld: %s\n  %s", (long long)number, result.report.message,
              result.description);
    }
    return test_end();
}
