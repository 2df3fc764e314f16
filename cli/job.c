/*
 * `flashattn job`: (1) attention of a real model's layer, checked against float64 and against what
 * the model itself computed; (2) a sweep over sequence lengths.
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "cli.h"
#include "device.h"
#include "flashattn.h"
#include "measure.h"
#include "npy.h"
#include "peak.h"
#include "reference.h"
#include "tensors.h"

#define DEFAULT_DIRECTORY "examples/minilm"

typedef struct arguments {
    const char *directory;
    int dtype, device;
    int64_t threads, seconds;
} arguments;

/* ---- 1. the model's layer -------------------------------------------------------------------- */

/* The model computed in float32 too, by other sums: examples/minilm/capture.py has checked it to be
 * within 1e-5 of float64. Twice that leaves as much for us. */
static const double MODEL_TOLERANCE = 2e-5;

enum { LAYER_FILES = 4, LAYER_CALLS = 21 };
static const char *const LAYER_NAMES[LAYER_FILES] = {"q", "k", "v", "out"};

/* q, k, v and the model's own output, as in the files. */
typedef struct layer {
    npy_array arrays[LAYER_FILES];
} layer;

static void free_layer(layer *l)
{
    for (int i = 0; i < LAYER_FILES; i++) free(l->arrays[i].data);
}

static bool same_shape(const npy_array *a, const npy_array *b)
{
    return a->axes == b->axes && memcmp(a->shape, b->shape, sizeof a->shape[0] * 4) == 0;
}

static bool load_layer(layer *l, const char *directory)
{
    char path[4096], error[NPY_ERROR_SIZE];
    for (int i = 0; i < LAYER_FILES; i++) {
        snprintf(path, sizeof path, "%s/%s.npy", directory, LAYER_NAMES[i]);
        if (!npy_read(path, &l->arrays[i], error)) {
            cli_error("%s", error);
            return false;
        }
        if (l->arrays[i].axes != 4 || !same_shape(&l->arrays[i], &l->arrays[0])) {
            cli_error("%s: expected 4 axes and the shape of q.npy", path);
            return false;
        }
    }
    return true;
}

/* A copy, because conversion uses its array up. */
static bool copy_tensor(cli_tensor *t, const npy_array *array, const char *name, fa_dtype dtype)
{
    npy_array copy = *array;
    size_t bytes = (size_t)array->count * npy_type_size(array->type);
    copy.data = malloc(bytes + 1);
    if (!copy.data) {
        cli_error("out of memory for %zu bytes", bytes);
        return false;
    }
    memcpy(copy.data, array->data, bytes);
    bool fine = cli_tensor_take(t, &copy, name, "", CLI_BSHD, dtype);
    free(copy.data);
    return fine;
}

/* The layer in one dtype: tensors[0..2] are q, k, v; [3] is out; [4] the model's out in float32. */
typedef struct layer_run {
    cli_tensor tensors[5];
    fa_options options;
    double seconds;     /* median */
    ref_report report;  /* against float64 */
    double model_error; /* the largest difference from the model's output */
} layer_run;

static bool prepare_layer(layer_run *r, const layer *l, fa_dtype dtype, const arguments *a)
{
    r->options = (fa_options){
        .size = sizeof r->options, .device = (fa_device)a->device, .threads = (int32_t)a->threads};
    r->report = (ref_report)REF_REPORT_INIT;
    for (int i = 0; i < LAYER_FILES; i++)
        if (!copy_tensor(&r->tensors[i], &l->arrays[i], LAYER_NAMES[i], dtype)) return false;
    /* Filled with NaN, so that an element that is not written shows. */
    memset(r->tensors[3].view.data, 0xff, (size_t)l->arrays[3].count * fa_dtype_size(dtype));
    return copy_tensor(&r->tensors[4], &l->arrays[3], "out", FA_FLOAT32);
}

static bool time_calls(layer_run *r)
{
    double samples[LAYER_CALLS];
    const bool cuda = r->options.device == FA_DEVICE_CUDA;
    for (int i = 0; i < LAYER_CALLS; i++) {
        double begin = cli_seconds();
        fa_status status = fa_forward(&r->tensors[0].view, &r->tensors[1].view, &r->tensors[2].view,
                                      &r->tensors[3].view, NULL, &r->options);
        if (status == FA_OK && cuda && !device_wait()) return false;
        samples[i] = cli_seconds() - begin;
        if (status == FA_OK) continue;
        cli_error("%s (%s)", fa_last_error(), fa_status_name(status));
        return false;
    }
    r->seconds = measure_summary(samples, LAYER_CALLS).median;
    return true;
}

/* On the GPU, if that is where it runs: there and back. */
static bool time_layer(layer_run *r)
{
    if (r->options.device != FA_DEVICE_CUDA) return time_calls(r);
    device_copies copies = {.count = 0};
    for (int i = 0; i < LAYER_FILES; i++)
        device_copies_add_tensor(&copies, &r->tensors[i], i == LAYER_FILES - 1);
    bool fine = device_copies_in(&copies) && time_calls(r) && device_copies_out(&copies);
    device_copies_free(&copies);
    return fine;
}

static void check_with_float64(layer_run *r)
{
    fa_dtype dtype = r->tensors[0].view.dtype;
    ref_inputs in = {.q = r->tensors[0].view,
                     .k = r->tensors[1].view,
                     .v = r->tensors[2].view,
                     .options = r->options};
    in.rounding = ref_rounding_for(&in, dtype, false);
    ref_array out, lse;
    ref_forward(&in, &out, &lse);
    ref_check_tensor(&r->report, "out", &r->tensors[3].view, &out);
    ref_array_free(&out);
    ref_array_free(&lse);
}

/* The largest difference; NaN stays NaN. */
static void compare_with_model(layer_run *r, int64_t count)
{
    npy_array ours;
    r->model_error = NAN;
    if (!cli_tensor_to_array(&r->tensors[3], &ours)) return;
    cli_tensor wide;
    if (copy_tensor(&wide, &ours, "out", FA_FLOAT32)) {
        const float *x = wide.view.data, *y = r->tensors[4].view.data;
        r->model_error = 0;
        for (int64_t i = 0; i < count; i++) {
            double error = fabs((double)x[i] - (double)y[i]);
            if (!(error <= r->model_error)) r->model_error = error;
        }
        cli_tensor_free(&wide);
    }
    free(ours.data);
}

/* Rounded inputs move the result, so only float32 can be held to the model's output. */
static bool report_layer(const layer_run *r, fa_dtype dtype)
{
    bool model_fine = dtype != FA_FLOAT32 || r->model_error <= MODEL_TOLERANCE;
    bool fine = r->report.ok && model_fine;
    printf("  %-9s %9.3f ms   float64: %.1e (%2.0f%% of what rounding allows)   model: %.1e   %s\n",
           fa_dtype_name(dtype), 1e3 * r->seconds, r->report.worst_absolute, 1e2 * r->report.worst,
           r->model_error, fine ? "right" : "WRONG");
    if (!r->report.ok) printf("    %s\n", r->report.message);
    if (!model_fine) printf("    expected at most %.1e off the model's output\n", MODEL_TOLERANCE);
    return fine;
}

static int run_layer(const layer *l, fa_dtype dtype, const arguments *a)
{
    layer_run r = {0};
    int code = CLI_BAD;
    cli_progress("attention of the model's layer in %s", fa_dtype_name(dtype));
    if (prepare_layer(&r, l, dtype, a) && time_layer(&r)) {
        check_with_float64(&r);
        compare_with_model(&r, l->arrays[3].count);
        cli_progress_clear();
        code = report_layer(&r, dtype) ? CLI_FINE : CLI_WRONG;
    }
    for (int i = 0; i < CLI_COUNT(r.tensors); i++) cli_tensor_free(&r.tensors[i]);
    return code;
}

static int run_model(const arguments *a)
{
    static const fa_dtype DTYPES[] = {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16};
    layer l = {0};
    int code = load_layer(&l, a->directory) ? CLI_FINE : CLI_BAD;
    if (code == CLI_FINE) {
        const int64_t *s = l.arrays[0].shape;
        printf("1. Attention of a real model's layer: %s\n"
               "   batch %" PRId64 ", %" PRId64 " tokens, %" PRId64 " heads of dim %" PRId64
               "; worst errors against float64 and the model's own output\n\n",
               a->directory, s[0], s[1], s[2], s[3]);
        for (int i = 0; i < CLI_COUNT(DTYPES) && code != CLI_BAD; i++) {
            int one = run_layer(&l, DTYPES[i], a);
            if (one != CLI_FINE) code = one;
        }
    }
    free_layer(&l);
    return code;
}

/* ---- 2. the sweep ---------------------------------------------------------------------------- */

enum { SHORTEST = 256, LONGEST = 8192, MAX_POINTS = 6, HEADS = 16, DIM = 64, BAR = 50 };

typedef struct point {
    int64_t n;
    double rate[2], milliseconds[2]; /* full, causal; operations per second */
} point;

static measure_case sweep_case(const arguments *a, int64_t n, bool causal)
{
    return (measure_case){.pass = FA_PASS_FORWARD,
                          .batch = 1,
                          .heads = HEADS,
                          .heads_kv = HEADS,
                          .n_q = n,
                          .n_k = n,
                          .d = DIM,
                          .d_v = DIM,
                          .dtype = (fa_dtype)a->dtype,
                          .layout = CLI_BSHD,
                          .causal = causal,
                          .window_left = -1,
                          .window_right = -1,
                          .device = (fa_device)a->device,
                          .threads = (int32_t)a->threads,
                          .repeat = n <= 1024 ? 7 : 3};
}

static bool measure_point(const arguments *a, point *p, char *kernel, size_t size)
{
    for (int causal = 0; causal < 2; causal++) {
        measure_case c = sweep_case(a, p->n, causal);
        measure_times times;
        cli_progress("n = %" PRId64 ", %s", p->n, causal ? "causal" : "full");
        if (!measure_run(&c, &times, kernel, size)) return false;
        p->milliseconds[causal] = 1e3 * times.median;
        p->rate[causal] = measure_flops(&c) / times.median;
    }
    cli_progress_clear();
    return true;
}

static void print_bar(const char *name, char mark, double rate, double peak)
{
    int length = peak > 0 ? (int)(BAR * fmin(rate / peak, 1) + 0.5) : 0;
    printf(" %-6s |", name);
    for (int i = 0; i < BAR; i++) putchar(i < length ? mark : ' ');
    printf("| %.1f\n", 1e-9 * rate);
}

static void print_chart(const point *points, int count, double peak)
{
    double best = 0;
    for (int i = 0; i < 2 * count; i++) best = fmax(best, points[i / 2].rate[i % 2]);
    printf("\n   GFLOP/s against n; a full bar is %s, %.1f GFLOP/s\n\n",
           peak > 0 ? "the CPU's peak" : "the best here", 1e-9 * (peak > 0 ? peak : best));
    if (!(peak > 0)) peak = best;
    for (int i = 0; i < count; i++) {
        printf("  %6" PRId64, points[i].n);
        print_bar("full", '#', points[i].rate[0], peak);
        printf("        ");
        print_bar("causal", '=', points[i].rate[1], peak);
    }
}

static void print_point(const point *p, double peak)
{
    printf("  %6" PRId64, p->n);
    for (int i = 0; i < 2; i++) {
        char share[16] = "-";
        if (peak > 0) snprintf(share, sizeof share, "%.1f%%", 1e2 * p->rate[i] / peak);
        printf("  %11.3f %9.1f %7s", p->milliseconds[i], 1e-9 * p->rate[i], share);
    }
    putchar('\n');
    fflush(stdout);
}

/* The rate to compare with, on the CPU: of bfloat16 dot products for bf16 where there are any. 0:
 * there is none. */
static double sweep_peak(const arguments *a)
{
    fa_cpu_info info = {0};
    int threads = (int)a->threads;
    if (a->device == FA_DEVICE_CUDA) return 0;
    if (threads == 0 && fa_get_cpu_info(&info) == FA_OK) threads = info.threads;
    cli_progress("measuring what the machine can do");
    peak_rates peak = peak_measure(threads > 0 ? threads : 1, false);
    cli_progress_clear();
    bool dot = a->dtype == FA_BFLOAT16 && peak.dot_bfloat16 > 0;
    return dot ? peak.dot_bfloat16 : peak.fma_float32;
}

/* Doubles n while the next point, some four times the last one's time, fits the time given. */
static int sweep(const arguments *a)
{
    point points[MAX_POINTS];
    char kernel[256];
    double peak = sweep_peak(a), begin = cli_seconds(), last = 0;
    int count = 0;
    printf("\n2. Forward pass over sequence lengths: batch 1, %d heads of dim %d, %s\n\n"
           "  %6s  %11s %9s %7s  %11s %9s %7s\n",
           (int)HEADS, (int)DIM, fa_dtype_name((fa_dtype)a->dtype), "n", "full ms", "GFLOP/s",
           "peak", "causal ms", "GFLOP/s", "peak");
    for (int64_t n = SHORTEST; n <= LONGEST; n *= 2) {
        double now = cli_seconds();
        if (count > 0 && now - begin + 4 * last > (double)a->seconds) {
            printf("  stopped before n = %" PRId64 ": it would not fit %" PRId64 " s\n", n,
                   a->seconds);
            break;
        }
        points[count].n = n;
        if (!measure_point(a, &points[count], kernel, sizeof kernel)) return CLI_BAD;
        print_point(&points[count++], peak);
        last = cli_seconds() - now;
    }
    print_chart(points, count, peak);
    printf("\n   kernel: %s\n", kernel);
    return CLI_FINE;
}

/* ---- the command ----------------------------------------------------------------------------- */

int cmd_job(int argc, char **argv)
{
    arguments a = {.directory = DEFAULT_DIRECTORY, .seconds = 25};
    const cli_option options[] = {
        {.name = "--seconds",
         .kind = CLI_INTEGER,
         .value = &a.seconds,
         .meta = "N",
         .min = 1,
         .max = 86400,
         .help = "time for the sweep, which stops in time (default: 25)"},
        {.name = "--dtype",
         .kind = CLI_CHOICE,
         .value = &a.dtype,
         .meta = "NAME",
         .choices = CLI_DTYPE_NAMES,
         .help = "of the sweep: f32 (default), f16 or bf16"},
        {.name = "--device",
         .kind = CLI_CHOICE,
         .value = &a.device,
         .meta = "NAME",
         .choices = CLI_DEVICE_NAMES,
         .help = "auto (default), cpu or cuda"},
        {.name = "--threads",
         .kind = CLI_INTEGER,
         .value = &a.threads,
         .meta = "N",
         .min = 1,
         .max = 4096,
         .help = "CPU threads (default: all)"},
    };
    const cli_command command = {
        .name = "job",
        .usage = "[DIR] [OPTIONS]",
        .about = "1. Computes attention of a real model's layer from DIR/q.npy, k.npy and v.npy\n"
                 "   (default: " DEFAULT_DIRECTORY ") and checks it against float64, and against\n"
                 "   DIR/out.npy, what the model itself computed.\n"
                 "2. Measures the forward pass for sequence lengths 256 to 8192.",
        .options = options,
        .num_options = CLI_COUNT(options),
        .operand = &a.directory,
        .operand_name = "DIR",
    };
    int code = cli_parse(&command, argc, argv);
    if (code != CLI_CONTINUE) return code;
    fa_device device = (fa_device)a.device;
    if (!device_choose(&device, FA_PASS_FORWARD)) return CLI_BAD;
    a.device = (int)device;
    int model = run_model(&a);
    if (model == CLI_BAD) return CLI_BAD;
    int swept = sweep(&a);
    return swept == CLI_FINE ? model : swept;
}
