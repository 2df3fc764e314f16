/*
 * `flashattn job`: (1) attention of a real model's layer, compared with float64 and with the
 * model's own result; (2) a sweep over sequence lengths, in float32 and bfloat16 side by side.
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "args.h"
#include "commands.h"
#include "output.h"
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
    bool dtype_given;
    int64_t threads, seconds;
} arguments;

/* ---- 1. the model's layer -------------------------------------------------------------------- */

/* The model also computed in float32, in another order: examples/minilm/capture.py has checked that
 * it is within 1e-5 of float64. This library may be off by as much again. */
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

/* A copy, because the conversion consumes its array. */
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
    /* Filled with NaN, so that an element that is not written is detected. */
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

/* On the GPU if the layer runs there. The arrays are copied there and back. */
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

/* Rounded inputs change the result, so only float32 is compared with the model's output. */
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

enum { SHORTEST = 256, MAX_POINTS = 7, MAX_SERIES = 2, HEADS = 16, BAR = 50 };

typedef struct point {
    double rate[2], milliseconds; /* operations per second, full and causal; time of full */
} point;

/* The points of one dtype. */
typedef struct series {
    fa_dtype dtype;
    peak_rate peak;
    char kernel[256]; /* of the longest sequences */
    point points[MAX_POINTS];
} series;

typedef struct sweeping {
    const arguments *a;
    int count; /* of series */
    series list[MAX_SERIES];
} sweeping;

/* A GPU needs larger problems to be busy than a CPU can compute in the time. */
static bool on_cuda(const arguments *a) { return a->device == FA_DEVICE_CUDA; }

static int64_t sweep_dim(const arguments *a) { return on_cuda(a) ? 128 : 64; }

static int64_t longest(const arguments *a) { return on_cuda(a) ? 16384 : 8192; }

/* Rates are printed in these units. */
static double unit(const arguments *a) { return on_cuda(a) ? 1e12 : 1e9; }

static const char *unit_name(const arguments *a) { return on_cuda(a) ? "TFLOP/s" : "GFLOP/s"; }

static measure_case sweep_case(const arguments *a, fa_dtype dtype, int64_t n, bool causal)
{
    return (measure_case){.pass = FA_PASS_FORWARD,
                          .batch = 1,
                          .heads = HEADS,
                          .heads_kv = HEADS,
                          .n_q = n,
                          .n_k = n,
                          .d = sweep_dim(a),
                          .d_v = sweep_dim(a),
                          .dtype = dtype,
                          .layout = CLI_BSHD,
                          .causal = causal,
                          .window_left = -1,
                          .window_right = -1,
                          .device = (fa_device)a->device,
                          .threads = (int32_t)a->threads,
                          .repeat = n <= 1024 ? 7 : 3};
}

static bool measure_point(const arguments *a, series *s, int64_t n, point *p)
{
    for (int causal = 0; causal < 2; causal++) {
        measure_case c = sweep_case(a, s->dtype, n, causal);
        measure_times times;
        cli_progress("%s, n = %" PRId64 ", %s", fa_dtype_name(s->dtype), n,
                     causal ? "causal" : "full");
        if (!measure_run(&c, &times, s->kernel, sizeof s->kernel)) return false;
        if (!causal) p->milliseconds = 1e3 * times.median;
        p->rate[causal] = measure_flops(&c) / times.median;
    }
    cli_progress_clear();
    return true;
}

/* The dtypes to measure, and the rates to compare them with. */
static bool start_sweep(sweeping *w)
{
    const arguments *a = w->a;
    peak_table peaks;
    w->count = a->dtype_given ? 1 : 2;
    w->list[0].dtype = a->dtype_given ? (fa_dtype)a->dtype : FA_FLOAT32;
    w->list[1].dtype = FA_BFLOAT16;
    cli_progress("measuring what the machine can do");
    bool fine = peak_measure_device((fa_device)a->device, (int)a->threads, &peaks);
    cli_progress_clear();
    for (int i = 0; i < w->count; i++) w->list[i].peak = peak_for(&peaks, w->list[i].dtype);
    return fine;
}

static void print_heading(const sweeping *w)
{
    const arguments *a = w->a;
    printf("\n2. Forward pass over sequence lengths: batch 1, %d heads of dim %d, %s\n\n  %6s",
           (int)HEADS, (int)sweep_dim(a), unit_name(a), "");
    for (int i = 0; i < w->count; i++) printf("  %-43s", fa_dtype_name(w->list[i].dtype));
    printf("\n  %6s", "n");
    for (int i = 0; i < w->count; i++)
        printf("  %9s %9s %6s %9s %6s", "full ms", unit_name(a), "peak", "causal", "peak");
    putchar('\n');
}

static void print_rate(const series *s, double rate, double unit)
{
    char share[16] = "-";
    if (s->peak.rate > 0) snprintf(share, sizeof share, "%.1f%%", 1e2 * rate / s->peak.rate);
    printf(" %9.1f %6s", rate / unit, share);
}

static void print_row(const sweeping *w, int64_t n, int at)
{
    printf("  %6" PRId64, n);
    for (int i = 0; i < w->count; i++) {
        const point *p = &w->list[i].points[at];
        printf("  %9.3f", p->milliseconds);
        for (int causal = 0; causal < 2; causal++)
            print_rate(&w->list[i], p->rate[causal], unit(w->a));
    }
    putchar('\n');
    fflush(stdout);
}

static double best_of(const series *s, int count)
{
    double best = 0;
    for (int i = 0; i < count; i++) best = fmax(best, s->points[i].rate[0]);
    return best;
}

/* A full bar is each dtype's own peak, or if that is not known, the best rate of all. */
static void print_chart(const sweeping *w, int count)
{
    double best = 0;
    for (int i = 0; i < w->count; i++) best = fmax(best, best_of(&w->list[i], count));
    printf("\n   full attention against n; a full bar is %s\n\n",
           w->list[0].peak.rate > 0 ? "the peak of the dtype" : "the best here");
    for (int at = 0; at < count; at++)
        for (int i = 0; i < w->count; i++) {
            const series *s = &w->list[i];
            const double rate = s->points[at].rate[0];
            const double bar = s->peak.rate > 0 ? s->peak.rate : best;
            const int length = bar > 0 ? (int)(BAR * fmin(rate / bar, 1) + 0.5) : 0;
            if (i == 0) printf("  %6d", (int)SHORTEST << at);
            else printf("  %6s", "");
            printf(" %-8s |", fa_dtype_name(s->dtype));
            for (int c = 0; c < BAR; c++) putchar(c < length ? "#="[i] : ' ');
            printf("| %.1f\n", rate / unit(w->a));
        }
}

/* The summary: each dtype's best rate, the rate that it is compared with, and the kernel. */
static void print_best(const sweeping *w, int count)
{
    for (int i = 0; i < w->count; i++) {
        const series *s = &w->list[i];
        const double best = best_of(s, count);
        printf("\n   %-8s %.1f %s", fa_dtype_name(s->dtype), best / unit(w->a), unit_name(w->a));
        if (s->peak.rate > 0)
            printf(", %.1f%% of the peak: %.1f by %s, measured", 1e2 * best / s->peak.rate,
                   s->peak.rate / unit(w->a), s->peak.by);
        printf("\n            %s\n", s->kernel);
    }
}

/* Doubles n while the next point, which takes some four times as long as the last one, fits into
 * the given time. */
static int sweep(const arguments *a)
{
    sweeping w = {.a = a};
    if (!start_sweep(&w)) return CLI_BAD;
    double begin = cli_seconds(), last = 0;
    int count = 0;
    print_heading(&w);
    for (int64_t n = SHORTEST; n <= longest(a); n *= 2, count++) {
        double now = cli_seconds();
        if (count > 0 && now - begin + 4 * last > (double)a->seconds) {
            printf("  stopped before n = %" PRId64 ": it would not fit %" PRId64 " s\n", n,
                   a->seconds);
            break;
        }
        for (int i = 0; i < w.count; i++)
            if (!measure_point(a, &w.list[i], n, &w.list[i].points[count])) return CLI_BAD;
        print_row(&w, n, count);
        last = cli_seconds() - now;
    }
    print_chart(&w, count);
    print_best(&w, count);
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
         .help = "time limit of the sweep (default: 25)"},
        {.name = "--dtype",
         .kind = CLI_CHOICE,
         .value = &a.dtype,
         .meta = "NAME",
         .choices = CLI_DTYPE_NAMES,
         .given = &a.dtype_given,
         .help = "type of the sweep: f32, f16 or bf16 (default: f32 and bf16\nside by side)"},
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
        .about =
            "1. Computes attention of a real model's layer from DIR/q.npy, k.npy and v.npy\n"
            "   (default: " DEFAULT_DIRECTORY ") and checks it against float64, and against\n"
            "   DIR/out.npy, the model's own output.\n"
            "2. Measures the forward pass for sequence lengths from 256 on, in float32 and\n"
            "   bfloat16, and the peak of the machine: on a CPU fused multiply-adds in float32 or\n"
            "   dot products in bfloat16, on a GPU multiply-adds in float32 or the tensor cores'\n"
            "   products in bfloat16.",
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
