/* What the command prints: JSON, tables, progress only on a terminal, and full disks. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"

static void write_inputs(void)
{
    float data[12];
    harness_fill(data, 12, 1, 1);
    harness_write_npy("a.npy", "<f4", "(1, 3, 2, 2)", data, sizeof data);
}

#define INPUTS "run", "--q", "a.npy", "--k", "a.npy", "--v", "a.npy"

static int count_lines(const char *text)
{
    int lines = 0;
    for (; *text; text++) lines += *text == '\n';
    return lines;
}

static void check_json(const outcome *o, int lines, const char *const *keys, size_t count)
{
    CHECK(harness_is_json_lines(o->out), "no JSON: %s", o->out);
    CHECK(count_lines(o->out) == lines, "expected %d lines: %s", lines, o->out);
    for (size_t i = 0; i < count; i++) {
        char quoted[64];
        snprintf(quoted, sizeof quoted, "\"%s\": ", keys[i]);
        CHECK(strstr(o->out, quoted) != NULL, "%s is missing: %s", quoted, o->out);
    }
}
#define CHECK_JSON(outcome, lines, ...)                                                            \
    check_json(outcome, lines, (const char *const[]){__VA_ARGS__},                                 \
               sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *))

/* A file name that needs escapes: a quote, a backslash, a tab, UTF-8, and a byte that is not
 * UTF-8. */
static void test_run_json(void)
{
    const outcome *o = EXPECT_FINE(INPUTS, "--out", "o\"\\\t\xc3\xa9\xff.npy", "--json");
    CHECK_JSON(o, 1, "command", "dtype", "ms", "kernel", "version", "results", "shape");
    CHECK(strstr(o->out, "o\\\"\\\\\\u0009\xc3\xa9\\ufffd.npy") != NULL, "escapes: %s", o->out);
    o = EXPECT_FINE(INPUTS, "--out", "o.npy");
    CHECK(strstr(o->out, "o.npy  float32 (1, 3, 2, 2)") != NULL, "report: %s", o->out);
    CHECK(strstr(o->out, "kernel  cpu ") != NULL, "report: %s", o->out);
}

#define SMALL "--repeat", "2", "--dim", "16", "--heads", "2", "--threads", "1"

static double number_behind(const char *text, const char *key)
{
    const char *at = strstr(text, key);
    return at ? atof(at + strlen(key)) : -1;
}

static void test_bench(void)
{
    const outcome *o =
        EXPECT_FINE("bench", SMALL, "--seq", "8,16", "--json", "--causal", "--window", "3,-1",
                    "--dtype", "bf16", "--layout", "bhsd", "--dim-v", "8");
    CHECK_JSON(o, 2, "pass", "batch", "heads", "heads_kv", "seq", "seq_k", "dim", "dim_v", "dtype",
               "precision", "layout", "causal", "deterministic", "window_left", "window_right",
               "device", "threads", "repeat", "median_ms", "min_ms", "max_ms", "tflops", "gflops",
               "share_of_peak", "kernel", "version");
    /* Causal, 16 x 16: 136 pairs of 2 heads, 2 * (16 + 16) operations each. */
    o = EXPECT_FINE("bench", SMALL, "--seq", "16", "--causal", "--json");
    double flops =
        number_behind(o->out, "\"gflops\": ") * number_behind(o->out, "\"median_ms\": ") * 1e6;
    CHECK(flops > 17407 && flops < 17409, "%g operations, expected 17408", flops);
    double low = number_behind(o->out, "\"min_ms\": "),
           high = number_behind(o->out, "\"max_ms\": ");
    double median = number_behind(o->out, "\"median_ms\": ");
    CHECK(low > 0 && low <= median && median <= high, "%g <= %g <= %g", low, median, high);
    o = EXPECT_FINE("bench", SMALL, "--seq", "16", "--pass", "backward", "--json");
    flops = number_behind(o->out, "\"gflops\": ") * number_behind(o->out, "\"median_ms\": ") * 1e6;
    CHECK(flops > 81919 && flops < 81921, "%g operations, expected 81920", flops);
    o = EXPECT_FINE("bench", SMALL, "--seq", "8", "--seq-k", "16");
    CHECK(strstr(o->out, "       8       16 ") != NULL, "table: %s", o->out);
}

/* Bytes of keys and values: 2 heads * 4096 * (16 + 16) * 4. */
static void test_bench_decode(void)
{
    const outcome *o = EXPECT_FINE("bench", SMALL, "--seq", "4096", "--pass", "decode", "--json");
    CHECK_JSON(o, 1, "gbps", "peak_gbps", "share_of_peak");
    double bytes =
        number_behind(o->out, "\"gbps\": ") * number_behind(o->out, "\"median_ms\": ") * 1e6;
    CHECK(bytes > 1048575 && bytes < 1048577, "%g bytes, expected 1048576", bytes);
    CHECK(strstr(o->out, "\"seq\": 1, \"seq_k\": 4096,") != NULL, "sizes: %s", o->out);
}

static void test_info(void)
{
    CHECK_JSON(EXPECT_FINE("info", "--json"), 1, "version", "cpu", "isas", "threads", "cuda",
               "supported", "why_not");
    const outcome *o = EXPECT_FINE("info");
    static const char *const WORDS[] = {"cpu",    "gpu",     "threads", "forward", "backward",
                                        "decode", "weights", "float32", "bfloat16"};
    for (size_t i = 0; i < sizeof WORDS / sizeof WORDS[0]; i++)
        CHECK(strstr(o->out, WORDS[i]) != NULL, "%s is missing: %s", WORDS[i], o->out);
    setenv("FA_CPU_ISA", "nonsense", 1);
    o = EXPECT_FINE("info", "--json");
    CHECK(harness_is_json_lines(o->out) && strstr(o->out, "nonsense"), "FA_CPU_ISA: %s", o->out);
    EXPECT_ERROR("nonsense", "bench", SMALL, "--seq", "8");
    EXPECT_ERROR("nonsense", INPUTS, "--out", "o.npy");
    unsetenv("FA_CPU_ISA");
}

static void test_unknown_variables(void)
{
    setenv("FA_CUDA_FORWARD_KERNEL", "sm90", 1);
    const outcome *o = RUN("--version");
    CHECK(o->code == 0 && strstr(o->err, "FA_CUDA_FORWARD_KERNEL is not read; expected FA_CPU_ISA"),
          "code %d, \"%s\"", o->code, o->err);
    unsetenv("FA_CUDA_FORWARD_KERNEL");
    EXPECT_FINE("--version");
}

/* For each dtype a rate, its share of a peak, and the kernel. */
static void check_headlines(const char *text)
{
    static const char *const NAMES[] = {"\n   float32  ", "\n   bfloat16 "};
    for (int i = 0; i < 2; i++) {
        const char *line = strstr(text, NAMES[i]);
        double rate = 0, share = 0, peak = 0;
        char unit[16] = "", kernel[16] = "";
        CHECK(line != NULL, "job: %s is missing: %s", NAMES[i], text);
        if (!line || !strstr(text, "the peak of the dtype")) continue; /* a GPU before Ampere */
        const int found = sscanf(line + strlen(NAMES[i]),
                                 "%lf %15[TG]FLOP/s, %lf%% of the peak: %lf by %*[^\n] %15s", &rate,
                                 unit, &share, &peak, kernel);
        CHECK(found == 5 && rate > 0 && share >= 0 && peak > 0, "job: %d: %s", found, line);
        CHECK(fabs(1e2 * rate / peak - share) <= 0.06 + 6 * share / rate, "job: %s", line);
        CHECK(strcmp(kernel, "cpu") == 0 || strcmp(kernel, "cuda") == 0, "job: \"%s\"", kernel);
    }
}

/* The example's layer, then the same with one wrong number in the model's output. */
static void test_job(void)
{
    const char *example = getenv("FA_EXAMPLE_DIRECTORY");
    static const char *const NAMES[] = {"q.npy", "k.npy", "v.npy", "out.npy"};
    const outcome *o = EXPECT_FINE("job", example ? example : "", "--seconds", "1");
    CHECK(strstr(o->out, "right") && !strstr(o->out, "WRONG"), "job: %s", o->out);
    CHECK(strstr(o->out, "256 float32  |") && strstr(o->out, "   bfloat16 |"), "job: %s", o->out);
    check_headlines(o->out);
    for (int i = 0; i < 4; i++) {
        char path[4096];
        size_t size;
        snprintf(path, sizeof path, "%s/%s", example ? example : "", NAMES[i]);
        char *bytes = harness_read_file(path, &size);
        CHECK(bytes != NULL, "%s is missing", path);
        if (!bytes) return;
        if (i == 3) bytes[size - 1] ^= 1; /* multiplies or divides the last element by 4 */
        harness_write_file(NAMES[i], bytes, size);
        free(bytes);
    }
    o = RUN("job", ".", "--seconds", "1");
    CHECK(o->code == 1 && strstr(o->out, "WRONG"), "a wrong output passed: %d %s", o->code, o->out);
    EXPECT_ERROR("none/q.npy: cannot be opened", "job", "none");
    remove("v.npy");
    EXPECT_ERROR("./v.npy: cannot be opened", "job", ".");
}

/* Progress is only shown on a terminal, and is cleared at the end. */
static void test_progress(void)
{
    const char *const arguments[] = {INPUTS, "--out", "o.npy", NULL};
    const outcome *o = harness_run_on_terminal(arguments);
    size_t length = strlen(o->err);
    CHECK(o->code == 0, "exit code %d", o->code);
    CHECK(strstr(o->err, "computing") != NULL, "no progress on a terminal: %s", o->err);
    CHECK(length >= 4 && strcmp(o->err + length - 4, "\r\033[K") == 0, "progress stays: %s",
          o->err);
    EXPECT_FINE(INPUTS, "--out", "o.npy");
}

/* A report that could not be written is an error. */
static void test_full_disk(void)
{
    const char *const arguments[] = {"info", NULL};
    const outcome *o = harness_run_to_full_disk(arguments);
    CHECK(o->code == 2, "exit code %d", o->code);
    CHECK(strstr(o->err, "standard output could not be written") != NULL, "message: %s", o->err);
}

int main(int argc, char **argv)
{
    harness_begin(argc, argv);
    write_inputs();
    test_run_json();
    test_bench();
    test_bench_decode();
    test_info();
    test_unknown_variables();
    test_job();
    test_progress();
    test_full_disk();
    return harness_end();
}
