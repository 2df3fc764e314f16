/* `flashattn bench`: measures the rate of one pass. */
#include <inttypes.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "output.h"
#include "device.h"
#include "flashattn.h"
#include "measure.h"
#include "peak.h"
#include "tensors.h"

static const char *const PASS_NAMES[] = {"forward", "backward", "decode", NULL};

enum { WIDTH = 1024, DECODE_HEADS = 32 };

typedef struct arguments {
    int pass, dtype, precision, layout, device;
    int64_t batch, heads, heads_kv, seq_k, dim, dim_v, window[2], threads, repeat;
    cli_list seq;
    bool causal, deterministic, json;
} arguments;

/* Sets the arguments that were not given; seq_k stays 0 if it equals each entry of seq. */
static void set_defaults(arguments *a)
{
    bool decode = a->pass == FA_PASS_DECODE;
    if (!a->dim) a->dim = decode ? 128 : 64;
    if (!a->dim_v) a->dim_v = a->dim;
    if (!a->heads) a->heads = decode ? DECODE_HEADS : a->dim < WIDTH ? WIDTH / a->dim : 1;
    if (!a->heads_kv) a->heads_kv = a->heads;
    if (a->seq.count > 0) return;
    if (decode && a->seq_k) a->seq = (cli_list){1, {1}};
    else if (decode) a->seq = (cli_list){1, {8192}};
    else a->seq = (cli_list){3, {512, 1024, 4096}};
}

/* decode without --seq-k: there is one new query, and --seq lists the numbers of keys. */
static measure_case make_case(const arguments *a, int64_t seq)
{
    bool one_query = a->pass == FA_PASS_DECODE && a->seq_k == 0;
    return (measure_case){.pass = (fa_pass)a->pass,
                          .batch = a->batch,
                          .heads = a->heads,
                          .heads_kv = a->heads_kv,
                          .n_q = one_query ? 1 : seq,
                          .n_k = a->seq_k ? a->seq_k : seq,
                          .d = a->dim,
                          .d_v = a->dim_v,
                          .dtype = (fa_dtype)a->dtype,
                          .layout = (cli_layout)a->layout,
                          .causal = a->causal,
                          .deterministic = a->deterministic,
                          .window_left = a->window[0],
                          .window_right = a->window[1],
                          .device = (fa_device)a->device,
                          .precision = (fa_precision)a->precision,
                          .threads = (int32_t)a->threads,
                          .repeat = (int)a->repeat};
}

/* ---- results --------------------------------------------------------------------------------- */

typedef struct result {
    measure_times times;
    double flops, bytes; /* per second, at the median time */
    /* The rate that the share refers to: bytes per second for decode, otherwise operations. */
    double peak;
    char kernel[256];
} result;

static bool measure_one(const measure_case *c, const peak_rates *peak, result *r)
{
    cli_progress("%s: %" PRId64 " queries, %" PRId64 " keys", PASS_NAMES[c->pass], c->n_q, c->n_k);
    if (!measure_run(c, &r->times, r->kernel, sizeof r->kernel)) return false;
    bool dot = c->dtype == FA_BFLOAT16 && peak->dot_bfloat16 > 0;
    r->flops = measure_flops(c) / r->times.median;
    r->bytes = measure_kv_bytes(c) / r->times.median;
    r->peak = c->pass == FA_PASS_DECODE ? peak->read : dot ? peak->dot_bfloat16 : peak->fma_float32;
    cli_progress_clear();
    return true;
}

/* NaN, which is null in JSON, if the peak could not be measured. */
static double share_of_peak(const measure_case *c, const result *r)
{
    double rate = c->pass == FA_PASS_DECODE ? r->bytes : r->flops;
    return r->peak > 0 ? rate / r->peak : (double)NAN;
}

static void print_json(const measure_case *c, const result *r)
{
    cli_json j = {stdout, false};
    cli_json_open(&j, NULL, '{');
    cli_json_text(&j, "pass", PASS_NAMES[c->pass]);
    cli_json_integer(&j, "batch", c->batch);
    cli_json_integer(&j, "heads", c->heads);
    cli_json_integer(&j, "heads_kv", c->heads_kv);
    cli_json_integer(&j, "seq", c->n_q);
    cli_json_integer(&j, "seq_k", c->n_k);
    cli_json_integer(&j, "dim", c->d);
    cli_json_integer(&j, "dim_v", c->d_v);
    cli_json_text(&j, "dtype", CLI_DTYPE_NAMES[c->dtype]);
    cli_json_text(&j, "precision", CLI_PRECISION_NAMES[c->precision]);
    cli_json_text(&j, "layout", CLI_LAYOUT_NAMES[c->layout]);
    cli_json_bool(&j, "causal", c->causal);
    cli_json_bool(&j, "deterministic", c->deterministic);
    cli_json_integer(&j, "window_left", c->window_left);
    cli_json_integer(&j, "window_right", c->window_right);
    cli_json_text(&j, "device", CLI_DEVICE_NAMES[c->device]);
    cli_json_integer(&j, "threads", c->threads);
    cli_json_integer(&j, "repeat", c->repeat);
    cli_json_real(&j, "median_ms", 1e3 * r->times.median);
    cli_json_real(&j, "min_ms", 1e3 * r->times.min);
    cli_json_real(&j, "max_ms", 1e3 * r->times.max);
    cli_json_real(&j, "tflops", 1e-12 * r->flops);
    cli_json_real(&j, "gflops", 1e-9 * r->flops);
    if (c->pass == FA_PASS_DECODE) cli_json_real(&j, "gbps", 1e-9 * r->bytes);
    cli_json_real(&j, c->pass == FA_PASS_DECODE ? "peak_gbps" : "peak_gflops",
                  r->peak > 0 ? 1e-9 * r->peak : (double)NAN);
    cli_json_real(&j, "share_of_peak", share_of_peak(c, r));
    cli_json_text(&j, "kernel", r->kernel);
    cli_json_text(&j, "version", fa_version_string());
    cli_json_close(&j, '}');
    cli_json_end_line(&j);
}

static void print_machine(const measure_case *c, const peak_rates *peak)
{
    fa_cuda_info info;
    if (c->device == FA_DEVICE_CUDA) {
        (void)fa_get_cuda_info(&info);
        printf("machine: %s", info.detail);
        return;
    }
    printf("machine: float32 FMA %.1f GFLOP/s (%s)", 1e-9 * peak->fma_float32, peak->fma_isa);
    if (peak->dot_bfloat16 > 0) printf(", bfloat16 dot %.1f GFLOP/s", 1e-9 * peak->dot_bfloat16);
    if (peak->read > 0) printf(", reading %.1f GB/s", 1e-9 * peak->read);
}

/* What is the same on all lines is printed above the table. */
static void print_heading(const measure_case *c, const peak_rates *peak)
{
    printf("%s, batch %" PRId64 ", heads %" PRId64 "/%" PRId64 ", dim %" PRId64 "/%" PRId64
           ", %s, %s%s, %" PRId32 " threads, %d calls, flashattn %s\n",
           PASS_NAMES[c->pass], c->batch, c->heads, c->heads_kv, c->d, c->d_v,
           CLI_DTYPE_NAMES[c->dtype], CLI_LAYOUT_NAMES[c->layout], c->causal ? ", causal" : "",
           c->threads, c->repeat, fa_version_string());
    if (c->window_left >= 0 || c->window_right >= 0)
        printf("window %" PRId64 ", %" PRId64 "\n", c->window_left, c->window_right);
    print_machine(c, peak);
    printf("\n\n%8s %8s %11s %11s %11s %9s %6s  kernel\n", "queries", "keys", "median ms", "min ms",
           "max ms", c->pass == FA_PASS_DECODE ? "GB/s" : "GFLOP/s", "peak");
}

static void print_row(const measure_case *c, const result *r)
{
    double rate = 1e-9 * (c->pass == FA_PASS_DECODE ? r->bytes : r->flops);
    char share[16] = "-"; /* the peak could not be measured */
    if (r->peak > 0) snprintf(share, sizeof share, "%.1f%%", 1e2 * share_of_peak(c, r));
    printf("%8" PRId64 " %8" PRId64 " %11.4f %11.4f %11.4f %9.2f %6s  %s\n", c->n_q, c->n_k,
           1e3 * r->times.median, 1e3 * r->times.min, 1e3 * r->times.max, rate, share, r->kernel);
    fflush(stdout);
}

static bool bench(const arguments *a)
{
    peak_rates peak = {0};
    if (a->device == FA_DEVICE_CPU) {
        cli_progress("measuring what the machine can do");
        peak = peak_measure((int)a->threads, a->pass == FA_PASS_DECODE);
        cli_progress_clear();
    }
    for (int i = 0; i < a->seq.count; i++) {
        measure_case c = make_case(a, a->seq.items[i]);
        result r;
        if (!measure_one(&c, &peak, &r)) return false;
        if (a->json) {
            print_json(&c, &r);
            continue;
        }
        if (i == 0) print_heading(&c, &peak);
        print_row(&c, &r);
    }
    return true;
}

/* ---- the command ----------------------------------------------------------------------------- */

#define ABOUT                                                                                      \
    "Measures one pass on fresh random inputs (standard normal) after a warm-up, and compares\n"   \
    "it with the peak of this machine's CPU, measured in the same run. On a GPU the time is\n"     \
    "measured by the GPU's clock; no peak is measured there."

#define NOTES                                                                                      \
    "Operations: forward and decode count 2 * batch * heads * pairs * (dim + dim-v), that is\n"    \
    "4 * batch * heads * queries * keys * dim without masks; backward counts 2.5 times that.\n"    \
    "Only pairs of a query and a key that it sees count: causal with as many keys as queries\n"    \
    "counts half. decode counts the bytes of all keys and values (GB/s); each call reads other\n"  \
    "ones than the previous call, from buffers that are larger than the caches.\n\n"               \
    "The peak is the rate of fused multiply-adds in float32 (bf16: of bfloat16 dot products,\n"    \
    "if the CPU has them), for decode the rate of reading memory, measured with the same\n"        \
    "number of threads.\n\n"                                                                       \
    "With --json, one object per line: the case (seq: queries, seq_k: keys), median_ms, min_ms,\n" \
    "max_ms, tflops, gflops, gbps (decode), peak_gflops or peak_gbps, share_of_peak, kernel and\n" \
    "version."

#define SIZE_OPTION(text, member, low, high, description)                                          \
    {                                                                                              \
        .name = (text), .kind = CLI_INTEGER, .value = &(member), .meta = "N", .min = (low),        \
        .max = (high), .help = (description)                                                       \
    }

#define NAME_OPTION(text, member, names, description)                                              \
    {                                                                                              \
        .name = (text), .kind = CLI_CHOICE, .value = &(member), .meta = "NAME",                    \
        .choices = (names), .help = (description)                                                  \
    }

/* The library's own default, so that the report states a number. */
static bool set_threads(arguments *a)
{
    fa_cpu_info info;
    if (a->threads > 0) return true;
    if (fa_get_cpu_info(&info) != FA_OK) {
        cli_error("%s", fa_last_error());
        return false;
    }
    a->threads = info.threads;
    return true;
}

int cmd_bench(int argc, char **argv)
{
    arguments a = {.batch = 1, .layout = CLI_BHSD, .window = {-1, -1}, .repeat = 10};
    enum { MAX_SIZE = 1 << 30 };
    const cli_option options[] = {
        NAME_OPTION("--pass", a.pass, PASS_NAMES, "forward (default), backward or decode"),
        SIZE_OPTION("--batch", a.batch, 1, MAX_SIZE, "default: 1"),
        SIZE_OPTION("--heads", a.heads, 1, MAX_SIZE,
                    "query heads (default: 1024 / dim; decode: 32)"),
        SIZE_OPTION("--heads-kv", a.heads_kv, 1, MAX_SIZE,
                    "key and value heads (default: --heads)"),
        {.name = "--seq",
         .kind = CLI_LIST,
         .value = &a.seq,
         .meta = "N,...",
         .min = 1,
         .max = MAX_SIZE,
         .help = "numbers of queries, a case for each (default:\n"
                 "512,1024,4096). decode without --seq-k: numbers of\n"
                 "keys for one query (default: 8192)"},
        SIZE_OPTION("--seq-k", a.seq_k, 1, MAX_SIZE,
                    "number of keys (default: as many as queries)"),
        SIZE_OPTION("--dim", a.dim, 1, 576, "of q and k (default: 64; decode: 128)"),
        SIZE_OPTION("--dim-v", a.dim_v, 1, 512, "of v and the result (default: --dim)"),
        NAME_OPTION("--dtype", a.dtype, CLI_DTYPE_NAMES, "f32 (default), f16 or bf16"),
        NAME_OPTION("--precision", a.precision, CLI_PRECISION_NAMES,
                    "how exactly f32 is multiplied: float32 (default),\n"
                    "tf32 (rounded to 11 bits, on tensor cores), ieee\n"
                    "(float32 arithmetic only)"),
        {.name = "--causal",
         .kind = CLI_FLAG,
         .value = &a.causal,
         .help = "a query sees no keys after its own position"},
        {.name = "--window",
         .kind = CLI_PAIR,
         .value = a.window,
         .meta = "L,R",
         .min = -1,
         .max = INT64_MAX,
         .help = "a query sees L keys before and R keys after its own\nposition; -1: no limit"},
        {.name = "--deterministic",
         .kind = CLI_FLAG,
         .value = &a.deterministic,
         .help = "the same bits in every run (only matters for backward\non a GPU)"},
        NAME_OPTION("--layout", a.layout, CLI_LAYOUT_NAMES,
                    "bhsd (default, the order of PyTorch) or bshd"),
        {.name = "--threads",
         .kind = CLI_INTEGER,
         .value = &a.threads,
         .meta = "N",
         .min = 1,
         .max = 4096,
         .help = "CPU threads (default: all)"},
        NAME_OPTION("--device", a.device, CLI_DEVICE_NAMES, "auto (default), cpu or cuda"),
        SIZE_OPTION("--repeat", a.repeat, 1, MEASURE_MAX_REPEAT, "timed calls (default: 10)"),
        {.name = "--json", .kind = CLI_FLAG, .value = &a.json, .help = "one JSON object per line"},
    };
    const cli_command command = {
        .name = "bench",
        .usage = "[OPTIONS]",
        .about = ABOUT,
        .options = options,
        .num_options = CLI_COUNT(options),
        .notes = NOTES,
    };
    int code = cli_parse(&command, argc, argv);
    if (code != CLI_CONTINUE) return code;
    set_defaults(&a);
    fa_device device = (fa_device)a.device;
    if (!device_choose(&device, (fa_pass)a.pass)) return CLI_BAD;
    a.device = (int)device;
    return set_threads(&a) && bench(&a) ? CLI_FINE : CLI_BAD;
}
