/*
 * `flashattn ladder bench`: compares the rungs. All rungs of a length are sampled alternately, so
 * that a card that gets hot or is shared slows down all of them alike.
 */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "output.h"
#include "measure.h"
#include "ladder_ceiling.h"
#include "ladder_bench.h"
#include "ladder_rungs.h"

enum { MAX_REPEAT = 1000, MAX_CALLS = 1000 };

/* A sample has enough calls to take this long: the resolution of events is half a microsecond. */
#define SAMPLE_SECONDS 2e-3

static const char *const HALF_NAMES[] = {"bf16", "f16", NULL};

typedef struct arguments {
    int64_t batch, heads, dim, repeat;
    cli_list seq;
    bool causal;
    int half; /* index into HALF_NAMES */
    double budget;
    const char *json, *sources;
} arguments;

/* ---- results --------------------------------------------------------------------------------- */

typedef enum state { MEASURED, SKIPPED, FAILED } state;

/* A rung at one length. */
typedef struct result {
    const ladder_rung *rung;
    ladder_kernel kernel;
    fa_dtype dtype;
    int64_t n;
    state state;
    char why[LADDER_ERROR];     /* why it was not measured */
    double first;               /* seconds of the call that warms up */
    int calls;                  /* of one sample */
    int rounds, samples;        /* wanted and taken */
    double seconds[MAX_REPEAT]; /* of a call */
    double median;
} result;

static double flops(const arguments *a, int64_t n)
{
    double all = 4.0 * (double)(a->batch * a->heads) * (double)n * (double)n * (double)a->dim;
    return a->causal ? all / 2 : all;
}

static double rate(const arguments *a, const result *r) { return flops(a, r->n) / r->median; }

static bool give_up(result *r, state state, const char *format, ...) CLI_PRINTF(3, 4);
static bool give_up(result *r, state state, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(r->why, sizeof r->why, format, arguments);
    va_end(arguments);
    r->state = state;
    return false;
}

/* ---- device memory --------------------------------------------------------------------------- */

/* q, k, v and out in one type, for one length. */
typedef struct arrays {
    void *data[4];
} arrays;

typedef struct bench {
    const arguments *a;
    fa_cuda_device device;
    rungs_ceiling ceiling;
    arrays floats, halves;
    void *scratch;
    size_t scratch_bytes;
    void *begin, *end; /* events */
} bench;

static fa_dtype half_type(const arguments *a) { return a->half == 0 ? FA_BFLOAT16 : FA_FLOAT16; }

static void free_arrays(arrays *x)
{
    for (int i = 0; i < 4; i++) {
        fa_cuda_free(x->data[i]);
        x->data[i] = NULL;
    }
}

/* Allocated again for each length. The elements between dim and the pitch are random too, and are
 * not read. */
static bool new_arrays(const arguments *a, int64_t n, fa_dtype dtype, arrays *x)
{
    int64_t count = a->batch * a->heads * n * ladder_pitch(dtype, a->dim);
    size_t bytes = (size_t)count * (dtype == FA_FLOAT32 ? 4 : 2);
    fa_cuda_fault fault;
    for (int i = 0; i < 4; i++) {
        if (!fa_cuda_allocate(&x->data[i], bytes, &fault))
            return rungs_say_fault("device memory for the inputs", &fault);
        if (!rungs_fill_normal(x->data[i], dtype, count, (uint32_t)(n * 4 + i))) return false;
    }
    return true;
}

/* For rungs that store the scores: those of all heads, if they fit into half of the free memory. */
static bool new_scratch(bench *b, int64_t n)
{
    fa_cuda_fault fault;
    size_t left, head = (size_t)n * (size_t)n * sizeof(float);
    if (!fa_cuda_memory_left(&left, &fault)) return rungs_say_fault("device memory", &fault);
    size_t heads = (size_t)(b->a->batch * b->a->heads);
    if (heads > left / 2 / head) heads = left / 2 / head;
    b->scratch_bytes = heads * head;
    if (heads == 0) return true; /* the rung's error states the size that it needs */
    return fa_cuda_allocate(&b->scratch, b->scratch_bytes, &fault) ||
           rungs_say_fault("device memory for scores", &fault);
}

static void free_memory(bench *b)
{
    free_arrays(&b->floats);
    free_arrays(&b->halves);
    fa_cuda_free(b->scratch);
    b->scratch = NULL;
}

static bool new_memory(bench *b, const result *results, int count, int64_t n)
{
    bool floats = false, halves = false, scores = false;
    for (int i = 0; i < count; i++) {
        if (results[i].state != MEASURED) continue;
        if (results[i].dtype == FA_FLOAT32) floats = true;
        else halves = true;
        scores |= results[i].kernel.about.needs_scores != 0;
    }
    return (!floats || new_arrays(b->a, n, FA_FLOAT32, &b->floats)) &&
           (!halves || new_arrays(b->a, n, half_type(b->a), &b->halves)) &&
           (!scores || new_scratch(b, n));
}

/* ---- timing ---------------------------------------------------------------------------------- */

static ladder_problem problem_of(const bench *b, const result *r)
{
    const arrays *x = r->dtype == FA_FLOAT32 ? &b->floats : &b->halves;
    return (ladder_problem){.q = x->data[0],
                            .k = x->data[1],
                            .v = x->data[2],
                            .out = x->data[3],
                            .heads = b->a->batch * b->a->heads,
                            .n = r->n,
                            .d = b->a->dim,
                            .pitch = ladder_pitch(r->dtype, b->a->dim),
                            .scale = (float)(1 / sqrt((double)b->a->dim)),
                            .causal = b->a->causal,
                            .scratch = b->scratch,
                            .scratch_bytes = b->scratch_bytes};
}

/* Seconds of one of `calls` calls. */
static bool time_calls(const bench *b, result *r, int calls, double *seconds)
{
    ladder_problem p = problem_of(b, r);
    char error[LADDER_ERROR];
    fa_cuda_fault fault;
    bool fine = fa_cuda_event_record(b->begin, NULL, &fault);
    for (int i = 0; fine && i < calls; i++)
        if (!ladder_run(&r->kernel, &p, error)) return give_up(r, FAILED, "%s", error);
    fine = fine && fa_cuda_event_record(b->end, NULL, &fault) &&
           fa_cuda_event_seconds(b->begin, b->end, seconds, &fault);
    if (!fine) {
        ladder_fault(error, "while the kernel ran", &fault);
        return give_up(r, FAILED, "%s", error);
    }
    *seconds /= calls;
    return true;
}

/* One call to load the kernel, and one to measure its time. */
static void warm_up(const bench *b, result *r)
{
    double budget = b->a->budget;
    for (int i = 0; i < 2; i++)
        if (!time_calls(b, r, 1, &r->first)) return;
    r->calls =
        r->first * MAX_CALLS < SAMPLE_SECONDS ? MAX_CALLS : (int)ceil(SAMPLE_SECONDS / r->first);
    double sample = r->first * r->calls;
    r->rounds = (int)b->a->repeat;
    if (sample * r->rounds > budget) r->rounds = sample < budget ? (int)(budget / sample) : 1;
}

/* Predicts this length from the previous one: time grows with the square of the length. */
static void predict(const bench *b, const result *before, result *r)
{
    if (!before) return;
    double growth = (double)r->n / (double)before->n;
    double seconds = before->median * growth * growth;
    if (before->state == SKIPPED && growth >= 1)
        give_up(r, SKIPPED, "skipped, as a shorter length was");
    else if (before->state == MEASURED && 2 * seconds > b->a->budget)
        give_up(r, SKIPPED, "two calls would take %.1f s; the budget is %.1f s", 2 * seconds,
                b->a->budget);
}

static void prepare(const bench *b, const ladder_rung *rung, int64_t n, const result *before,
                    result *r)
{
    char error[LADDER_ERROR];
    *r = (result){.rung = rung, .n = n, .calls = 1};
    r->dtype = rung->types == LADDER_HALVES ? half_type(b->a) : FA_FLOAT32;
    if (!rungs_run_here(rung, &b->device))
        give_up(r, SKIPPED, "not for compute capability %d.%d", b->device.major, b->device.minor);
    else if (!ladder_load(rung, r->dtype, b->a->dim, &r->kernel, error))
        give_up(r, FAILED, "%s", error);
    else predict(b, before, r);
}

static void take_samples(const bench *b, result *results, int count)
{
    for (int round = 0; round < b->a->repeat; round++)
        for (int i = 0; i < count; i++) {
            result *r = &results[i];
            if (r->state != MEASURED || r->samples >= r->rounds) continue;
            if (time_calls(b, r, r->calls, &r->seconds[r->samples])) r->samples++;
        }
}

static void summarize(result *r)
{
    static double sorted[MAX_REPEAT];
    if (r->state != MEASURED) return;
    memcpy(sorted, r->seconds, sizeof sorted);
    r->median = measure_summary(sorted, r->samples).median;
}

/* All rungs at one length; before: the results of the previous length, or NULL. */
static bool measure_length(bench *b, const rungs_chosen *chosen, int64_t n, const result *before,
                           result *results)
{
    for (int i = 0; i < chosen->count; i++)
        prepare(b, chosen->rungs[i], n, before ? &before[i] : NULL, &results[i]);
    bool fine = new_memory(b, results, chosen->count, n);
    for (int i = 0; fine && i < chosen->count; i++) {
        cli_progress("n %" PRId64 ": %s", n, chosen->rungs[i]->name);
        if (results[i].state == MEASURED) warm_up(b, &results[i]);
    }
    cli_progress("n %" PRId64, n);
    if (fine) take_samples(b, results, chosen->count);
    cli_progress_clear();
    free_memory(b);
    for (int i = 0; fine && i < chosen->count; i++) summarize(&results[i]);
    return fine;
}

/* ---- the table ------------------------------------------------------------------------------- */

static void print_heading(const bench *b)
{
    const arguments *a = b->a;
    const rungs_ceiling *c = &b->ceiling;
    printf("%s, CUDA driver %d.%d; batch %" PRId64 ", heads %" PRId64 ", dim %" PRId64
           "%s, %" PRId64 " samples\n",
           b->device.name, fa_cuda_driver_version() / 1000, fa_cuda_driver_version() % 1000 / 10,
           a->batch, a->heads, a->dim, a->causal ? ", causal" : "", a->repeat);
    printf("ceiling: copy %.0f GB/s; TFLOP/s: FFMA %.1f, mma tf32 %.1f, mma bf16 %.1f, wgmma bf16 "
           "%.1f\n\n",
           1e-9 * c->copy, 1e-12 * c->ffma, 1e-12 * c->mma_tf32, 1e-12 * c->mma_bf16,
           1e-12 * c->wgmma_bf16);
    printf("%-30s %-5s %7s %12s %9s %8s\n", "rung", "type", "n", "median ms", "TFLOP/s", "ceiling");
}

static const char *type_name(const result *r)
{
    if (r->dtype != FA_FLOAT32) return r->dtype == FA_BFLOAT16 ? "bf16" : "f16";
    return r->rung->types == LADDER_TF32 ? "tf32" : "f32";
}

static double share(const bench *b, const result *r)
{
    return rate(b->a, r) / rungs_ceiling_of(&b->ceiling, r->rung->types);
}

static void print_row(const bench *b, const result *r)
{
    printf("%02d  %-26s %-5s %7" PRId64 " ", r->rung->number, r->rung->name, type_name(r), r->n);
    if (r->state == MEASURED)
        printf("%12.4f %9.2f %7.1f%%\n", 1e3 * r->median, 1e-12 * rate(b->a, r), 1e2 * share(b, r));
    else printf("%s: %s\n", r->state == SKIPPED ? "skipped" : "FAILED", r->why);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static void write_ceiling(cli_json *j, const rungs_ceiling *c)
{
    cli_json_open(j, "ceiling", '{');
    cli_json_real(j, "copy_gbps", 1e-9 * c->copy);
    cli_json_real(j, "ffma_tflops", 1e-12 * c->ffma);
    cli_json_real(j, "mma_tf32_tflops", 1e-12 * c->mma_tf32);
    cli_json_real(j, "mma_bf16_tflops", 1e-12 * c->mma_bf16);
    cli_json_real(j, "wgmma_bf16_tflops", 1e-12 * c->wgmma_bf16);
    cli_json_close(j, '}');
}

static void write_head(cli_json *j, const bench *b)
{
    char capability[16];
    const arguments *a = b->a;
    snprintf(capability, sizeof capability, "%d.%d", b->device.major, b->device.minor);
    cli_json_text(j, "device", b->device.name);
    cli_json_text(j, "compute_capability", capability);
    cli_json_integer(j, "multiprocessors", b->device.multiprocessors);
    cli_json_integer(j, "memory_bytes", b->device.memory_bytes);
    cli_json_integer(j, "driver", fa_cuda_driver_version());
    cli_json_text(j, "version", fa_version_string());
    cli_json_text(j, "kernel_sources", a->sources);
    cli_json_integer(j, "batch", a->batch);
    cli_json_integer(j, "heads", a->heads);
    cli_json_integer(j, "dim", a->dim);
    cli_json_bool(j, "causal", a->causal);
    cli_json_integer(j, "repeat", a->repeat);
    cli_json_real(j, "budget_seconds", a->budget);
    write_ceiling(j, &b->ceiling);
}

static void write_kernels(cli_json *j, const ladder_kernel *k)
{
    cli_json_open(j, "kernels", '[');
    for (int i = 0; i < k->about.steps; i++) {
        const rung_step *s = &k->about.step[i];
        fa_cuda_kernel_facts facts = {0};
        fa_cuda_fault fault;
        if (!fa_cuda_kernel_facts_of(k->steps[i], 0, &facts, &fault)) continue;
        cli_json_open(j, NULL, '{');
        cli_json_text(j, "kernel", s->kernel);
        cli_json_integer(j, "threads", s->threads);
        cli_json_integer(j, "registers", facts.registers);
        cli_json_integer(j, "local_bytes", facts.local_bytes);
        cli_json_integer(j, "static_smem_bytes", facts.static_smem_bytes);
        cli_json_integer(j, "dynamic_smem_bytes", s->smem_bytes);
        cli_json_close(j, '}');
    }
    cli_json_close(j, ']');
}

static void write_measured(cli_json *j, const bench *b, const result *r)
{
    cli_json_real(j, "median_ms", 1e3 * r->median);
    cli_json_real(j, "tflops", 1e-12 * rate(b->a, r));
    cli_json_real(j, "share_of_ceiling", share(b, r));
    cli_json_integer(j, "calls_per_sample", r->calls);
    cli_json_open(j, "samples_ms", '[');
    for (int i = 0; i < r->samples; i++) cli_json_real(j, NULL, 1e3 * r->seconds[i]);
    cli_json_close(j, ']');
    write_kernels(j, &r->kernel);
}

static void write_result(cli_json *j, const bench *b, const result *r)
{
    static const char *const STATES[] = {"measured", "skipped", "failed"};
    cli_json_open(j, NULL, '{');
    cli_json_integer(j, "number", r->rung->number);
    cli_json_text(j, "rung", r->rung->name);
    cli_json_text(j, "type", type_name(r));
    cli_json_integer(j, "seq", r->n);
    cli_json_text(j, "state", STATES[r->state]);
    if (r->state == MEASURED) write_measured(j, b, r);
    else cli_json_text(j, "why", r->why);
    cli_json_close(j, '}');
}

static bool write_json(const bench *b, const result *results, int count)
{
    FILE *file = fopen(b->a->json, "w");
    if (file) {
        cli_json j = {file, false};
        cli_json_open(&j, NULL, '{');
        write_head(&j, b);
        cli_json_open(&j, "results", '[');
        for (int i = 0; i < count; i++) write_result(&j, b, &results[i]);
        cli_json_close(&j, ']');
        cli_json_close(&j, '}');
        cli_json_end_line(&j);
    }
    bool written = file && !ferror(file);
    if (file && fclose(file) != 0) written = false;
    if (!written) cli_error("%s could not be written: %s", b->a->json, strerror(errno));
    return written;
}

/* ---- the command ----------------------------------------------------------------------------- */

static int run_bench(bench *b, const rungs_chosen *chosen, result *results)
{
    const arguments *a = b->a;
    int failed = 0;
    print_heading(b);
    for (int i = 0; i < a->seq.count; i++) {
        result *now = results + (ptrdiff_t)i * chosen->count;
        const result *before = i > 0 ? now - chosen->count : NULL;
        if (!measure_length(b, chosen, a->seq.items[i], before, now)) return CLI_BAD;
        for (int j = 0; j < chosen->count; j++) {
            print_row(b, &now[j]);
            failed += now[j].state == FAILED;
        }
        fflush(stdout);
    }
    if (a->json && !write_json(b, results, a->seq.count * chosen->count)) return CLI_BAD;
    return failed ? CLI_WRONG : CLI_FINE;
}

static int start(const arguments *a, const rungs_chosen *chosen)
{
    bench b = {.a = a};
    fa_cuda_fault fault;
    if (!rungs_open_device(&b.device) || !rungs_measure_ceiling(&b.device, &b.ceiling))
        return CLI_BAD;
    if (!fa_cuda_event_new(&b.begin, &fault) || !fa_cuda_event_new(&b.end, &fault)) {
        rungs_say_fault("events", &fault);
        return CLI_BAD;
    }
    result *results = calloc((size_t)a->seq.count * (size_t)chosen->count, sizeof *results);
    if (!results) cli_error("out of memory");
    int code = results ? run_bench(&b, chosen, results) : CLI_BAD;
    free(results);
    fa_cuda_event_free(b.begin);
    fa_cuda_event_free(b.end);
    return code;
}

#define ABOUT                                                                                      \
    "Times the rungs (default: all) on fresh random inputs (standard normal, made on the "         \
    "device)\n"                                                                                    \
    "after a warm-up, all rungs in turn, and compares them with the device's highest rates,\n"     \
    "measured in the same run."

#define NOTES                                                                                      \
    "Operations: 4 * batch * heads * n * n * dim, half of that with --causal. The ceiling of a\n"  \
    "rung is the rate of FFMA (f32), of mma.sync in tf32 (tf32), or of the tensor cores in bf16\n" \
    "(bf16, f16). A sample is the mean of as many calls as take 2 ms."

static bool is_positive(double x) { return x > 0; }

#define SIZE(text, member, high, description)                                                      \
    {                                                                                              \
        .name = (text), .kind = CLI_INTEGER, .value = &(member), .meta = "N", .min = 1,            \
        .max = (high), .help = (description)                                                       \
    }

int rungs_bench(int argc, char **argv)
{
    arguments a = {.batch = 4,
                   .heads = 96,
                   .dim = 128,
                   .repeat = 10,
                   .seq = {6, {512, 1024, 2048, 4096, 8192, 16384}},
                   .budget = 10};
    const cli_option options[] = {
        SIZE("--batch", a.batch, 65536, "default: 4"),
        SIZE("--heads", a.heads, 65536, "default: 96"),
        SIZE("--dim", a.dim, 256, "head dim (default: 128)"),
        {.name = "--seq",
         .kind = CLI_LIST,
         .value = &a.seq,
         .meta = "N,...",
         .min = 1,
         .max = 1 << 24,
         .help = "lengths, ascending (default: 512 to 16384)"},
        {.name = "--causal",
         .kind = CLI_FLAG,
         .value = &a.causal,
         .help = "a query sees no keys after its own position"},
        {.name = "--dtype",
         .kind = CLI_CHOICE,
         .value = &a.half,
         .meta = "NAME",
         .choices = HALF_NAMES,
         .help = "type of the 16-bit rungs: bf16 (default) or f16"},
        SIZE("--repeat", a.repeat, MAX_REPEAT, "samples (default: 10)"),
        {.name = "--budget",
         .kind = CLI_REAL,
         .value = &a.budget,
         .meta = "SECONDS",
         .accept = is_positive,
         .expected = "a number above 0",
         .help = "time limit for a rung at a length (default: 10): beyond\n"
                 "it, fewer samples or none are taken"},
        {.name = "--json",
         .kind = CLI_TEXT,
         .value = &a.json,
         .meta = "FILE",
         .help = "write all samples, and the kernels' registers and shared\nmemory, to a file"},
        {.name = "--sources",
         .kind = CLI_TEXT,
         .value = &a.sources,
         .meta = "HASH",
         .help = "hash of the kernels' sources, for the file"},
    };
    const cli_command command = {.name = "ladder bench",
                                 .usage = "[NAME...] [OPTIONS]",
                                 .about = ABOUT,
                                 .options = options,
                                 .num_options = CLI_COUNT(options),
                                 .notes = NOTES};
    rungs_chosen chosen;
    if (!rungs_choose(&argc, argv, &chosen)) return CLI_BAD;
    int code = cli_parse(&command, argc, argv);
    if (code != CLI_CONTINUE) return code;
    return start(&a, &chosen);
}
