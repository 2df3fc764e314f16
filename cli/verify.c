/*
 * flashattn verify: random problems over the whole option space, each compared with float64, and
 * problems for one class of faults each (verify_classes.c). Several threads can compute problems at
 * the same time.
 */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "args.h"
#include "commands.h"
#include "output.h"
#include "device.h"
#include "flashattn.h"
#include "random_problem.h"
#include "tensors.h"
#include "verify_classes.h"
#include "verify_large.h"

enum { NUM_DTYPES = FA_FLOAT8_E4M3 + 1, MAX_JOBS = 64, USUAL_MAX_JOBS = 32 };

typedef struct arguments {
    int64_t seconds, cases, threads, jobs;
    uint64_t seed, single;
    bool cases_given, seed_given, single_given, class_given, pass_given, dtype_given, json, large,
        tiles;
    int device, class, pass, dtype, precision;
} arguments;

/* The results for one pass in one dtype. */
typedef struct tally {
    int64_t problems;
    double worst, worst_absolute;
} tally;

typedef struct summary {
    int64_t problems;
    double seconds;
    tally by[RANDOM_NUM_PASSES][NUM_DTYPES];
    int64_t class_problems; /* of `problems`: those of classes */
} summary;

static int parse(int argc, char **argv, arguments *a)
{
    static const char *const devices[] = {"auto", "cpu", "cuda", NULL};
    static const char *const passes[] = {"forward", "backward", "decode",
                                         "weights", "combine",  NULL};
    const cli_option options[] = {
        {.name = "--seconds",
         .kind = CLI_INTEGER,
         .value = &a->seconds,
         .meta = "N",
         .min = 0,
         .max = 1000000,
         .help = "time limit; default 10"},
        {.name = "--cases",
         .kind = CLI_INTEGER,
         .value = &a->cases,
         .meta = "N",
         .min = 1,
         .max = INT64_MAX,
         .given = &a->cases_given,
         .help = "number of problems, without a time limit"},
        {.name = "--seed",
         .kind = CLI_SEED,
         .value = &a->seed,
         .meta = "N",
         .given = &a->seed_given,
         .help = "seed of the random problems; default: from the clock"},
        {.name = "--case",
         .kind = CLI_SEED,
         .value = &a->single,
         .meta = "N",
         .given = &a->single_given,
         .help = "run only this problem; a failure prints its number"},
        {.name = "--device",
         .kind = CLI_CHOICE,
         .value = &a->device,
         .meta = "NAME",
         .choices = devices,
         .help = "cpu (default) or cuda; auto is cpu"},
        {.name = "--pass",
         .kind = CLI_CHOICE,
         .value = &a->pass,
         .meta = "NAME",
         .choices = passes,
         .given = &a->pass_given,
         .help = "only forward, backward, decode, weights or combine"},
        {.name = "--dtype",
         .kind = CLI_CHOICE,
         .value = &a->dtype,
         .meta = "NAME",
         .choices = CLI_DTYPE_NAMES,
         .given = &a->dtype_given,
         .help = "only f32, f16 or bf16, for all tensors except 8-bit keys\nand values"},
        {.name = "--precision",
         .kind = CLI_CHOICE,
         .value = &a->precision,
         .meta = "NAME",
         .choices = CLI_PRECISION_NAMES,
         .help = "for float32 inputs: float32 (default), tf32 or ieee"},
        {.name = "--threads",
         .kind = CLI_INTEGER,
         .value = &a->threads,
         .meta = "N",
         .min = 1,
         .max = 1024,
         .help = "threads of each call; default: 1 to 3, random"},
        {.name = "--class",
         .kind = CLI_CHOICE,
         .value = &a->class,
         .meta = "NAME",
         .choices = verify_class_names,
         .given = &a->class_given,
         .help = "problems for one class of bugs instead of random\n"
                 "problems: empty, unused, grid, heads, lengths, paged,\n"
                 "strides, tails, masks, split, invariance, dropout, wide,\n"
                 "chunks, quantized, latent, bias, peaked;\n"
                 "all: all of these, then random problems (default on cuda);\n"
                 "none (default on cpu)"},
        {.name = "--jobs",
         .kind = CLI_INTEGER,
         .value = &a->jobs,
         .meta = "N",
         .min = 1,
         .max = MAX_JOBS,
         .help = "number of problems at the same time, on cuda each with its\n"
                 "own stream; default: on cuda one for each core, on cpu 1"},
        {.name = "--tiles",
         .kind = CLI_FLAG,
         .value = &a->tiles,
         .help = "draw cases for tensor-core kernels: types of\n"
                 "16 bits, their head dims, many tiles (always on cuda)"},
        {.name = "--large",
         .kind = CLI_FLAG,
         .value = &a->large,
         .help = "on cuda: only a few large problems, of more than 2^31\n"
                 "elements or a million keys; needs up to 30 GiB there"},
        {.name = "--json", .kind = CLI_FLAG, .value = &a->json, .help = "one JSON object per line"},
    };
    const cli_command command = {
        .name = "verify",
        .usage =
            "[--seconds N | --cases N | --case N] [--seed N] [--device NAME] [--class NAME] "
            "[--pass NAME] [--dtype NAME] [--precision NAME] [--jobs N] [--threads N] [--tiles] "
            "[--large] [--json]",
        .about =
            "Draws random problems over all passes, types and options and compares the results "
            "with\n"
            "a naive computation in float64. Errors are given relative to the error that rounding\n"
            "allows: a result is right up to 1.",
        .options = options,
        .num_options = CLI_COUNT(options),
        .notes = "On cuda every buffer of a problem is between guard bands, which are checked as "
                 "well, and\n"
                 "a second run must give the same bits (dq: only with FA_DETERMINISTIC).\n"
                 "Stops at the first wrong result and prints a command that repeats it.",
    };
    return cli_parse(&command, argc, argv);
}

/* Problem number i of a seed. The random generator mixes the bits. */
static uint64_t problem_number(uint64_t seed, int64_t i) { return seed * 1000003u + (uint64_t)i; }

static void count(summary *s, const random_result *r)
{
    tally *t = &s->by[r->pass][r->dtype];
    s->problems++;
    t->problems++;
    if (!(r->report.worst <= t->worst)) t->worst = r->report.worst;
    if (!(r->report.worst_absolute <= t->worst_absolute))
        t->worst_absolute = r->report.worst_absolute;
}

static void print_json_failure(const random_result *r)
{
    cli_json json = {stdout, false};
    cli_json_open(&json, NULL, '{');
    cli_json_bool(&json, "ok", false);
    cli_json_text(&json, "problem", r->description);
    cli_json_text(&json, "wrong", r->report.message);
    cli_json_text(&json, "reproduce", r->reproduce);
    cli_json_close(&json, '}');
    cli_json_end_line(&json);
}

/* If the status says that the machine cannot compute it, that is not a wrong result. */
static int report_failure(const arguments *a, const random_result *r)
{
    bool cannot = r->status == FA_ERROR_DEVICE || r->status == FA_ERROR_UNSUPPORTED ||
                  r->status == FA_ERROR_MEMORY;
    if (cannot) {
        cli_error("%s\n  problem: %s\n  again:   %s", r->report.message, r->description,
                  r->reproduce);
        return CLI_BAD;
    }
    if (a->json) print_json_failure(r);
    cli_error("wrong result: %s\n  problem: %s\n  again:   %s", r->report.message, r->description,
              r->reproduce);
    return CLI_WRONG;
}

static void print_json(const summary *s)
{
    for (int pass = 0; pass < RANDOM_NUM_PASSES; pass++)
        for (int dtype = 0; dtype < NUM_DTYPES; dtype++) {
            const tally *t = &s->by[pass][dtype];
            if (t->problems == 0) continue;
            cli_json json = {stdout, false};
            cli_json_open(&json, NULL, '{');
            cli_json_bool(&json, "ok", true);
            cli_json_text(&json, "pass", random_pass_name((random_pass)pass));
            cli_json_text(&json, "dtype", fa_dtype_name((fa_dtype)dtype));
            cli_json_integer(&json, "problems", t->problems);
            cli_json_real(&json, "worst_of_allowed", t->worst);
            cli_json_real(&json, "worst_absolute", t->worst_absolute);
            cli_json_close(&json, '}');
            cli_json_end_line(&json);
        }
}

static void print_table(const summary *s)
{
    printf("%-10s %-14s %9s  %16s  %14s\n", "pass", "dtype", "problems", "error / allowed",
           "largest error");
    for (int pass = 0; pass < RANDOM_NUM_PASSES; pass++)
        for (int dtype = 0; dtype < NUM_DTYPES; dtype++) {
            const tally *t = &s->by[pass][dtype];
            if (t->problems == 0) continue;
            printf("%-10s %-14s %9" PRId64 "  %16.3f  %14.2e\n",
                   random_pass_name((random_pass)pass), fa_dtype_name((fa_dtype)dtype), t->problems,
                   t->worst, t->worst_absolute);
        }
    if (s->class_problems > 0) printf("%" PRId64 " problems of classes and ", s->class_problems);
    printf("%" PRId64 " random problems in %.1f s, all within what rounding allows\n",
           s->problems - s->class_problems, s->seconds);
}

/* ---- Problems at the same time --------------------------------------------------------------- */

/* Problems of one kind, which all workers share. */
typedef struct work {
    const arguments *a;
    const verify_class *class; /* NULL: any problems */
    summary *s;
    pthread_mutex_t lock; /* of everything below, and of the summary */
    int64_t started, done;
    double start, shown;
    bool stopped, failed;
    int64_t failed_index; /* of the first failed problem that is known so far */
    random_result result; /* that problem's, or that of the only problem */
} work;

typedef struct worker {
    work *shared;
    device_arena *arena;
    random_result result;
} worker;

static bool goes_on(const work *w)
{
    const arguments *a = w->a;
    if (w->stopped) return false;
    if (a->single_given) return w->started < 1;
    if (w->class && a->class == VERIFY_ALL) return w->started < w->class->problems;
    if (a->cases_given) return w->started < a->cases;
    if (w->class) return w->started < w->class->problems;
    return w->started < 1 || cli_seconds() - w->start < (double)a->seconds;
}

static bool take(work *w, int64_t *index)
{
    pthread_mutex_lock(&w->lock);
    const bool more = goes_on(w);
    if (more) *index = w->started++;
    pthread_mutex_unlock(&w->lock);
    return more;
}

static void show_progress(work *w)
{
    const double now = cli_seconds();
    if (now - w->shown < 0.2) return;
    w->shown = now;
    cli_progress("%s%s%" PRId64 " problems, %.0f s", w->class ? w->class->name : "",
                 w->class ? ": " : "", w->done, now - w->start);
}

static void hand_in(work *w, int64_t index, const random_result *result)
{
    pthread_mutex_lock(&w->lock);
    if (result->report.ok) {
        w->done++;
        count(w->s, result);
        show_progress(w);
        if (w->a->single_given) w->result = *result;
    } else if (!w->failed || index < w->failed_index) {
        w->stopped = w->failed = true;
        w->failed_index = index;
        w->result = *result;
    }
    pthread_mutex_unlock(&w->lock);
}

static uint64_t number_of(const work *w, int64_t index)
{
    if (w->a->single_given) return w->a->single;
    return w->class && w->class->in_order ? (uint64_t)index : problem_number(w->a->seed, index);
}

static void run_worker(worker *mine)
{
    work *w = mine->shared;
    const random_settings settings = {
        .device = (fa_device)w->a->device,
        .threads = (int32_t)w->a->threads,
        .tiles = w->a->device == FA_DEVICE_CUDA || w->a->tiles,
        .focus = w->class ? w->class->focus : RANDOM_ANYTHING,
        .focus_name = w->class ? w->class->name : NULL,
        .one_pass = w->a->pass_given,
        .pass = (random_pass)w->a->pass,
        .one_dtype = w->a->dtype_given,
        .dtype = (fa_dtype)w->a->dtype,
        .precision = (fa_precision)w->a->precision,
        .all_passes = true,
        .attend = w->a->device == FA_DEVICE_CUDA ? device_attend : NULL,
        .context = mine->arena,
    };
    int64_t index;
    while (take(w, &index)) {
        random_problem_run(number_of(w, index), &settings, &mine->result);
        hand_in(w, index, &mine->result);
    }
}

static void stop(work *w)
{
    pthread_mutex_lock(&w->lock);
    w->stopped = true;
    pthread_mutex_unlock(&w->lock);
}

typedef struct hired {
    work *shared;
    int index;
    bool fine;
} hired;

static void *work_here(void *argument)
{
    hired *h = argument;
    device_arena arena = {0};
    worker *mine = malloc(sizeof *mine);
    const bool cuda = h->shared->a->device == FA_DEVICE_CUDA;
    h->fine = mine && (!cuda || device_arena_new(&arena, h->index));
    if (h->fine) {
        *mine = (worker){.shared = h->shared, .arena = &arena};
        run_worker(mine);
    } else {
        stop(h->shared);
    }
    device_arena_free(&arena);
    free(mine);
    return NULL;
}

/* False if a worker could not start; an error message has been printed. */
static bool run_side_by_side(work *w)
{
    pthread_t threads[MAX_JOBS];
    hired crew[MAX_JOBS];
    const int jobs = w->a->single_given ? 1 : (int)w->a->jobs;
    int running = 0;
    bool fine = true;
    for (; running < jobs; running++) {
        crew[running] = (hired){w, running, true};
        if (pthread_create(&threads[running], NULL, work_here, &crew[running]) != 0) break;
    }
    if (running == 0) cli_error("no thread could be started");
    for (int i = 0; i < running; i++) {
        (void)pthread_join(threads[i], NULL);
        fine = fine && crew[i].fine;
    }
    return fine && running > 0;
}

static void report_class(const arguments *a, const verify_class *class, int64_t problems,
                         double seconds)
{
    if (!a->json) {
        printf("%-10s %6" PRId64 " problems in %6.1f s   %s\n", class->name, problems, seconds,
               class->about);
        return;
    }
    cli_json json = {stdout, false};
    cli_json_open(&json, NULL, '{');
    cli_json_bool(&json, "ok", true);
    cli_json_text(&json, "class", class->name);
    cli_json_integer(&json, "problems", problems);
    cli_json_real(&json, "seconds", seconds);
    cli_json_close(&json, '}');
    cli_json_end_line(&json);
}

static int run_problems(const arguments *a, const verify_class *class, summary *s)
{
    static work w; /* static, because a failure is large */
    w = (work){.a = a, .class = class, .s = s, .start = cli_seconds()};
    w.shown = w.start;
    pthread_mutex_init(&w.lock, NULL);
    const bool fine = run_side_by_side(&w);
    pthread_mutex_destroy(&w.lock);
    cli_progress_clear();
    const double seconds = cli_seconds() - w.start;
    s->seconds += seconds;
    if (class) s->class_problems += w.done;
    if (w.failed) return report_failure(a, &w.result);
    if (!fine) return CLI_BAD;
    if (a->single_given && !a->json) printf("%s\n", w.result.description);
    else if (class) report_class(a, class, w.done, seconds);
    fflush(stdout);
    return CLI_FINE;
}

static int run_all(const arguments *a, summary *s)
{
    const verify_class *chosen =
        a->class >= VERIFY_FIRST_CLASS ? &verify_classes[a->class - VERIFY_FIRST_CLASS] : NULL;
    if (chosen || a->class == VERIFY_NONE || a->single_given) return run_problems(a, chosen, s);
    for (int i = 0; i < verify_num_classes; i++) {
        const int code = run_problems(a, &verify_classes[i], s);
        if (code != CLI_FINE) return code;
    }
    return run_problems(a, NULL, s);
}

/* Defaults that depend on the device and on other arguments. */
static void choose_defaults(arguments *a)
{
    const bool cuda = a->device == FA_DEVICE_CUDA;
    const long cores = cuda ? sysconf(_SC_NPROCESSORS_ONLN) : 1;
    const long usual = cores < USUAL_MAX_JOBS ? cores : USUAL_MAX_JOBS;
    if (!a->class_given) a->class = cuda && !a->single_given ? VERIFY_ALL : VERIFY_NONE;
    if (!a->jobs) a->jobs = usual < 1 ? 1 : usual;
    if (!a->seed_given) a->seed = (uint64_t)time(NULL);
}

/* auto means the CPU here, because it supports all passes. */
static int check_device(arguments *a)
{
    fa_device device = a->device == FA_DEVICE_CUDA ? FA_DEVICE_CUDA : FA_DEVICE_CPU;
    if (!device_choose(&device, FA_PASS_FORWARD)) return CLI_BAD;
    a->device = (int)device;
    return CLI_FINE;
}

static int check_large(const arguments *a)
{
#ifdef FA_HAVE_CUDA
    if (a->device == FA_DEVICE_CUDA) return verify_large(a->json);
#else
    (void)a;
#endif
    cli_error("--large needs --device cuda");
    return CLI_BAD;
}

int cmd_verify(int argc, char **argv)
{
    arguments a = {.seconds = 10};
    summary s = {0};
    cli_set_command("verify");
    int code = parse(argc, argv, &a);
    if (code != CLI_CONTINUE) return code;
    code = check_device(&a);
    if (code != CLI_FINE) return code;
    choose_defaults(&a);
    if (a.large) return check_large(&a);
    code = run_all(&a, &s);
    if (code != CLI_FINE) return code;
    if (a.json) print_json(&s);
    else print_table(&s);
    return CLI_FINE;
}
