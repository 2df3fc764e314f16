/*
 * flashattn verify: random problems over the whole option space, each compared with float64.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "cli.h"
#include "device.h"
#include "flashattn.h"
#include "random_problem.h"

enum { NUM_DTYPES = FA_FLOAT8_E4M3 + 1 };

typedef struct arguments {
    int64_t seconds, cases, threads;
    uint64_t seed, single;
    bool cases_given, seed_given, single_given, json;
    int device;
} arguments;

/* What was found for one pass in one dtype. */
typedef struct tally {
    int64_t problems;
    double worst, worst_absolute;
} tally;

typedef struct summary {
    int64_t problems;
    double seconds;
    tally by[RANDOM_NUM_PASSES][NUM_DTYPES];
} summary;

static int parse(int argc, char **argv, arguments *a)
{
    static const char *const devices[] = {"auto", "cpu", "cuda", NULL};
    const cli_option options[] = {
        {.name = "--seconds",
         .kind = CLI_INTEGER,
         .value = &a->seconds,
         .meta = "N",
         .min = 0,
         .max = 1000000,
         .help = "how long to go on; default 10"},
        {.name = "--cases",
         .kind = CLI_INTEGER,
         .value = &a->cases,
         .meta = "N",
         .min = 1,
         .max = INT64_MAX,
         .given = &a->cases_given,
         .help = "this many problems, however long they take"},
        {.name = "--seed",
         .kind = CLI_SEED,
         .value = &a->seed,
         .meta = "N",
         .given = &a->seed_given,
         .help = "which problems to draw; default: from the clock"},
        {.name = "--case",
         .kind = CLI_SEED,
         .value = &a->single,
         .meta = "N",
         .given = &a->single_given,
         .help = "only this problem, as a failure names it"},
        {.name = "--device",
         .kind = CLI_CHOICE,
         .value = &a->device,
         .meta = "NAME",
         .choices = devices,
         .help = "cpu (default) or cuda, where only forward and decode\n"
                 "are there; auto is cpu"},
        {.name = "--threads",
         .kind = CLI_INTEGER,
         .value = &a->threads,
         .meta = "N",
         .min = 1,
         .max = 1024,
         .help = "threads of each call; default: 1 to 3, drawn"},
        {.name = "--json", .kind = CLI_FLAG, .value = &a->json, .help = "one JSON object per line"},
    };
    const cli_command command = {
        .name = "verify",
        .usage = "[--seconds N | --cases N | --case N] [--seed N] [--device NAME] [--threads N] "
                 "[--json]",
        .about =
            "Draws random problems over all passes, types and options and compares the results "
            "with\n"
            "a naive computation in float64. Errors are given in units of what rounding allows:\n"
            "up to 1 is right.",
        .options = options,
        .num_options = CLI_COUNT(options),
        .notes =
            "On cuda every buffer of a problem lies between guard bands, which are checked too.\n"
            "Stops at the first wrong result and prints the command that computes it again.",
    };
    return cli_parse(&command, argc, argv);
}

/* Problem number i of a seed. The generator mixes the bits. */
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

/* A status that says the machine cannot do it is no wrong result. */
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
    printf("%" PRId64 " random problems in %.1f s, all within what rounding allows\n", s->problems,
           s->seconds);
}

static bool goes_on(const arguments *a, const summary *s, double elapsed)
{
    if (a->single_given) return s->problems < 1;
    if (a->cases_given) return s->problems < a->cases;
    return s->problems < 1 || elapsed < (double)a->seconds;
}

static int run_problems(const arguments *a, summary *s)
{
    static random_result result;
    device_arena arena = {NULL, NULL, 0};
    const bool cuda = a->device == FA_DEVICE_CUDA;
    const random_settings settings = {(fa_device)a->device, (int32_t)a->threads,
                                      cuda ? device_attend : NULL, &arena};
    const double start = cli_seconds();
    double shown = start;
    while (goes_on(a, s, cli_seconds() - start)) {
        uint64_t number = a->single_given ? a->single : problem_number(a->seed, s->problems);
        random_problem_run(number, &settings, &result);
        if (!result.report.ok) {
            device_arena_free(&arena);
            return report_failure(a, &result);
        }
        count(s, &result);
        double now = cli_seconds();
        if (now - shown < 0.2) continue;
        shown = now;
        cli_progress("%" PRId64 " problems, %.0f s", s->problems, now - start);
    }
    device_arena_free(&arena);
    cli_progress_clear();
    s->seconds = cli_seconds() - start;
    if (a->single_given && !a->json) printf("%s\n", result.description);
    return CLI_FINE;
}

/* auto is the CPU here: it has all passes. */
static int check_device(arguments *a)
{
    fa_device device = a->device == FA_DEVICE_CUDA ? FA_DEVICE_CUDA : FA_DEVICE_CPU;
    if (!device_choose(&device, FA_PASS_FORWARD)) return CLI_BAD;
    a->device = (int)device;
    return CLI_FINE;
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
    if (!a.seed_given) a.seed = (uint64_t)time(NULL);
    code = run_problems(&a, &s);
    if (code != CLI_FINE) return code;
    if (a.json) print_json(&s);
    else print_table(&s);
    return CLI_FINE;
}
