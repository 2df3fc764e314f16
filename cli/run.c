/* `flashattn run` and `flashattn grad`: attention of .npy files, and its gradients. */
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "args.h"
#include "commands.h"
#include "output.h"
#include "device.h"
#include "flashattn.h"
#include "lengths.h"
#include "npy.h"
#include "tensors.h"

/* ---- arguments ------------------------------------------------------------------------------- */

typedef struct arguments {
    const char *q, *k, *v, *out, *lse, *mask, *bias, *alibi, *sinks;
    const char *dout, *dq, *dk, *dv, *dbias, *dsinks;
    lengths_paths lengths;
    bool causal, diagonal_given, window_given, scale_given, dropout_given, seed_given, dtype_given;
    int64_t diagonal, window[2], attention_chunk, threads;
    double scale, softcap, dropout;
    uint64_t seed;
    int layout, dtype, precision, device;
    bool json;
} arguments;

static bool positive(double x) { return x > 0 && (float)x > 0; }

static bool below_one(double x) { return x >= 0 && x < 1 && (float)x < 1; }

#define FILE_OPTION(text, member, needed, description)                                             \
    {                                                                                              \
        .name = (text), .kind = CLI_TEXT, .value = &(member), .meta = "FILE",                      \
        .required = (needed), .help = (description)                                                \
    }

/* The options that run and grad share. */
#define SHARED_OPTIONS(a)                                                                          \
    FILE_OPTION("--q", (a)->q, true, "queries"), FILE_OPTION("--k", (a)->k, true, "keys"),         \
        FILE_OPTION("--v", (a)->v, true, "values"),                                                \
        FILE_OPTION("--lse", (a)->lse, false,                                                      \
                    "writes the log-sum-exp of each query's logits,\n"                             \
                    "float32 (batch, heads, queries)"),                                            \
        FILE_OPTION("--mask", (a)->mask, false,                                                    \
                    "bool or integers (batch, head, query, key): nonzero\n"                        \
                    "means that the query may see the key; extents of 1\n"                         \
                    "broadcast"),                                                                  \
        FILE_OPTION("--bias", (a)->bias, false,                                                    \
                    "numbers added to the logits, shaped like a mask"),                            \
        FILE_OPTION("--seqlens-q", (a)->lengths.seqlens_q, false,                                  \
                    "integers (batch): how many queries of each batch item\n"                      \
                    "are used; the rest are padding"),                                             \
        FILE_OPTION("--seqlens-k", (a)->lengths.seqlens_k, false, "the same for keys and values"), \
        FILE_OPTION("--cu-seqlens-q", (a)->lengths.cu_seqlens_q, false,                            \
                    "integers (sequences + 1): the queries are packed,\n"                          \
                    "sequence b in rows cu[b] to cu[b+1] - 1"),                                    \
        FILE_OPTION("--cu-seqlens-k", (a)->lengths.cu_seqlens_k, false,                            \
                    "the same for keys and values"),                                               \
        FILE_OPTION("--block-table", (a)->lengths.block_table, false,                              \
                    "integers (batch, pages of a sequence): keys and values\n"                     \
                    "are pages, (pages, page size, heads, dim), and this\n"                        \
                    "table gives their order; needs --seqlens-k"),                                 \
        {.name = "--causal",                                                                       \
         .kind = CLI_FLAG,                                                                         \
         .value = &(a)->causal,                                                                    \
         .help = "query i sees only keys j <= i + diagonal"},                                      \
        {.name = "--diagonal",                                                                     \
         .kind = CLI_INTEGER,                                                                      \
         .value = &(a)->diagonal,                                                                  \
         .meta = "N",                                                                              \
         .min = INT64_MIN,                                                                         \
         .max = INT64_MAX,                                                                         \
         .given = &(a)->diagonal_given,                                                            \
         .help = "where the diagonal of --causal, --window and --alibi\n"                          \
                 "lies (default: keys - queries, the bottom right)"},                              \
        {.name = "--window",                                                                       \
         .kind = CLI_PAIR,                                                                         \
         .value = (a)->window,                                                                     \
         .meta = "L,R",                                                                            \
         .min = -1,                                                                                \
         .max = INT64_MAX,                                                                         \
         .given = &(a)->window_given,                                                              \
         .help = "query i sees keys i + diagonal - L to\n"                                         \
                 "i + diagonal + R; -1: no limit"},                                                \
        {.name = "--attention-chunk",                                                              \
         .kind = CLI_INTEGER,                                                                      \
         .value = &(a)->attention_chunk,                                                           \
         .meta = "N",                                                                              \
         .min = 1,                                                                                 \
         .max = (int64_t)1 << 60,                                                                  \
         .help = "query i sees only keys in the same chunk of N\n"                                 \
                 "positions as i + diagonal"},                                                     \
        {.name = "--scale",                                                                        \
         .kind = CLI_REAL,                                                                         \
         .value = &(a)->scale,                                                                     \
         .meta = "S",                                                                              \
         .given = &(a)->scale_given,                                                               \
         .expected = "a finite number",                                                            \
         .help = "factor of the logits (default: 1/sqrt(dim))"},                                   \
        {.name = "--softcap",                                                                      \
         .kind = CLI_REAL,                                                                         \
         .value = &(a)->softcap,                                                                   \
         .meta = "C",                                                                              \
         .accept = positive,                                                                       \
         .expected = "a number > 0",                                                               \
         .help = "bounds the logits: C * tanh(logit / C)"},                                        \
        FILE_OPTION("--alibi", (a)->alibi, false, "slopes (heads) or (batch, heads)"),             \
        FILE_OPTION("--sinks", (a)->sinks, false,                                                  \
                    "(heads): a logit without a value for each query head"),                       \
        {.name = "--dropout",                                                                      \
         .kind = CLI_REAL,                                                                         \
         .value = &(a)->dropout,                                                                   \
         .meta = "P",                                                                              \
         .given = &(a)->dropout_given,                                                             \
         .accept = below_one,                                                                      \
         .expected = "a probability, 0 <= P < 1",                                                  \
         .help = "drops weights with probability P"},                                              \
        {.name = "--seed",                                                                         \
         .kind = CLI_SEED,                                                                         \
         .value = &(a)->seed,                                                                      \
         .meta = "N",                                                                              \
         .given = &(a)->seed_given,                                                                \
         .help = "seed of --dropout (default: 0)"},                                                \
        {.name = "--layout",                                                                       \
         .kind = CLI_CHOICE,                                                                       \
         .value = &(a)->layout,                                                                    \
         .meta = "NAME",                                                                           \
         .choices = CLI_LAYOUT_NAMES,                                                              \
         .help = "order of the axes of q, k, v and the results:\n"                                 \
                 "bshd (batch, sequence, heads, dim; default) or bhsd"},                           \
        {.name = "--dtype",                                                                        \
         .kind = CLI_CHOICE,                                                                       \
         .value = &(a)->dtype,                                                                     \
         .meta = "NAME",                                                                           \
         .choices = CLI_DTYPE_NAMES,                                                               \
         .given = &(a)->dtype_given,                                                               \
         .help = "computes in f32, f16 or bf16 (default: that of the\n"                            \
                 "files if all of them hold float16 or all bfloat16,\n"                            \
                 "else f32)"},                                                                     \
        {.name = "--precision",                                                                    \
         .kind = CLI_CHOICE,                                                                       \
         .value = &(a)->precision,                                                                 \
         .meta = "NAME",                                                                           \
         .choices = CLI_PRECISION_NAMES,                                                           \
         .help = "how exactly f32 is multiplied: float32 (default),\n"                             \
                 "tf32 (rounded to 11 bits, on tensor cores), ieee\n"                              \
                 "(float32 arithmetic only)"},                                                     \
        {.name = "--device",                                                                       \
         .kind = CLI_CHOICE,                                                                       \
         .value = &(a)->device,                                                                    \
         .meta = "NAME",                                                                           \
         .choices = CLI_DEVICE_NAMES,                                                              \
         .help = "auto (default: cuda if possible), cpu or cuda"},                                 \
        {.name = "--threads",                                                                      \
         .kind = CLI_INTEGER,                                                                      \
         .value = &(a)->threads,                                                                   \
         .meta = "N",                                                                              \
         .min = 1,                                                                                 \
         .max = INT32_MAX,                                                                         \
         .help = "CPU threads (default: all); does not change results"},                           \
    {                                                                                              \
        .name = "--json", .kind = CLI_FLAG, .value = &(a)->json,                                   \
        .help = "print the report as one JSON object"                                              \
    }

#define NOTES                                                                                      \
    "Files are .npy with 2 to 4 axes, float32, float16, bfloat16 (as ml_dtypes writes it) or\n"    \
    "float64, of any byte order, C or Fortran order. 4 axes are (batch, sequence, heads, dim),\n"  \
    "or (batch, heads, sequence, dim) with --layout bhsd; 3 axes lack the batch, 2 axes\n"         \
    "(sequence, dim) the heads too. Results have the axes and the layout of q. A mask or bias "    \
    "of\n"                                                                                         \
    "3 axes lacks the batch, one of 2 axes (query, key) the heads too. One input may be \"-\",\n"  \
    "standard input, and one result, standard output; there is no report then.\n\n"                \
    "Inputs are rounded once to --dtype. Results are written as float16 for f16, and as float32\n" \
    "for f32 and for bf16, for which .npy has no type of its own. Log-sum-exps and the\n"          \
    "gradients of bias and sinks are always float32. Rows of no sequence are 0, their\n"           \
    "log-sum-exps -infinity. Files are written whole or not at all."

static bool is_stream(const char *path) { return path && strcmp(path, "-") == 0; }

/* At most one of count options may be "-". */
static bool check_streams(const char *const *options, const char *const *paths, int count,
                          const char *stream)
{
    int first = -1;
    for (int i = 0; i < count; i++) {
        if (!is_stream(paths[i])) continue;
        if (first >= 0) {
            cli_error("%s and %s are both \"-\"; expected %s for one of them", options[first],
                      options[i], stream);
            return false;
        }
        first = i;
    }
    return true;
}

/* A report on standard output would mix with the file, and a terminal is no place for a file. */
static bool check_output_stream(const arguments *a, const char *const *options,
                                const char *const *paths, int count)
{
    if (!check_streams(options, paths, count, "standard output")) return false;
    for (int i = 0; i < count; i++) {
        if (!is_stream(paths[i])) continue;
        if (!a->json && !isatty(STDOUT_FILENO)) return true;
        cli_error("%s is \"-\", standard output, %s", options[i],
                  a->json ? "and so is --json; expected one of them"
                          : "which is a terminal; expected a file or a pipe");
        return false;
    }
    return true;
}

static const char *const OUTPUTS[] = {"--out", "--lse",   "--dq",    "--dk",
                                      "--dv",  "--dbias", "--dsinks"};

static void output_paths(const arguments *a, const char *paths[CLI_COUNT(OUTPUTS)])
{
    const char *const all[] = {a->out, a->lse, a->dq, a->dk, a->dv, a->dbias, a->dsinks};
    memcpy(paths, all, sizeof all);
}

static bool check_all_streams(const arguments *a)
{
    static const char *const inputs[] = {
        "--q",          "--k",     "--v",         "--dout",      "--mask",         "--bias",
        "--alibi",      "--sinks", "--seqlens-q", "--seqlens-k", "--cu-seqlens-q", "--cu-seqlens-k",
        "--block-table"};
    const lengths_paths *l = &a->lengths;
    const char *const paths[] = {
        a->q,          a->k,     a->v,         a->dout,      a->mask,         a->bias,
        a->alibi,      a->sinks, l->seqlens_q, l->seqlens_k, l->cu_seqlens_q, l->cu_seqlens_k,
        l->block_table};
    const char *results[CLI_COUNT(OUTPUTS)];
    output_paths(a, results);
    return check_streams(inputs, paths, CLI_COUNT(inputs), "standard input") &&
           check_output_stream(a, OUTPUTS, results, CLI_COUNT(OUTPUTS));
}

/* Whether a result goes to standard output, instead of the report. */
static bool writes_to_stdout(const arguments *a)
{
    const char *paths[CLI_COUNT(OUTPUTS)];
    output_paths(a, paths);
    for (int i = 0; i < CLI_COUNT(OUTPUTS); i++)
        if (is_stream(paths[i])) return true;
    return false;
}

/* Options that would be ignored without others are refused. */
static bool check_arguments(const arguments *a)
{
    const char *option = NULL, *needed = NULL;
    if (a->seed_given && !a->dropout_given) option = "--seed", needed = "--dropout";
    if (a->dbias && !a->bias) option = "--dbias", needed = "--bias";
    if (a->dsinks && !a->sinks) option = "--dsinks", needed = "--sinks";
    if (option) cli_error("%s is given without %s; expected both", option, needed);
    return !option && check_all_streams(a);
}

/* ---- the problem ----------------------------------------------------------------------------- */

typedef struct problem {
    cli_tensor q, k, v, out, bias, mask, dout, dq, dk, dv, dbias;
    float *lse, *alibi, *sinks, *dsinks;
    lengths lengths;
    fa_device device; /* the chosen device */
    device_copies copies;
    void *workspace; /* on the GPU */
    fa_options options;
} problem;

static void free_problem(problem *p)
{
    device_copies_free(&p->copies);
    device_delete(p->workspace);
    cli_tensor *tensors[] = {&p->q,    &p->k,  &p->v,  &p->out, &p->bias, &p->mask,
                             &p->dout, &p->dq, &p->dk, &p->dv,  &p->dbias};
    for (int i = 0; i < CLI_COUNT(tensors); i++) cli_tensor_free(tensors[i]);
    free(p->lse);
    free(p->alibi);
    free(p->sinks);
    free(p->dsinks);
    lengths_free(&p->lengths);
}

static fa_dtype choose_dtype(const arguments *a, const npy_array *arrays, int count)
{
    if (a->dtype_given) return (fa_dtype)a->dtype;
    for (int i = 1; i < count; i++)
        if (arrays[i].type != arrays[0].type) return FA_FLOAT32;
    return cli_dtype_of(arrays[0].type);
}

/* The input with which the i-th of q, k, v and dout must agree in the number of axes. Packed or
 * paged keys, and packed queries, may have a batch axis although the others have none. */
static int like_which(const arguments *a, int i)
{
    const lengths_paths *l = &a->lengths;
    const bool apart = l->cu_seqlens_q || l->cu_seqlens_k || l->block_table;
    return apart && (i == 1 || i == 2) ? 1 : 0;
}

/* q, k, v and dout. */
static bool load_main(const arguments *a, problem *p)
{
    const char *options[] = {"--q", "--k", "--v", "--dout"};
    const char *paths[] = {a->q, a->k, a->v, a->dout};
    cli_tensor *tensors[] = {&p->q, &p->k, &p->v, &p->dout};
    npy_array arrays[4] = {{0}};
    int count = a->dout ? 4 : 3;
    bool fine = true;
    for (int i = 0; i < count && fine; i++) {
        fine = cli_read_array(options[i], paths[i], &arrays[i]);
        const int other = like_which(a, i);
        if (fine && arrays[i].axes != arrays[other].axes) {
            cli_error("%s %s has %d axes, %s %s has %d; expected the same number", options[i],
                      paths[i], arrays[i].axes, options[other], paths[other], arrays[other].axes);
            fine = false;
        }
    }
    fa_dtype dtype = fine ? choose_dtype(a, arrays, count) : FA_FLOAT32;
    for (int i = 0; i < count && fine; i++)
        fine = cli_tensor_take(tensors[i], &arrays[i], options[i], paths[i], (cli_layout)a->layout,
                               dtype);
    for (int i = 0; i < count; i++) free(arrays[i].data);
    return fine;
}

static bool load_scores(const char *option, const char *path, bool mask, cli_tensor *t)
{
    npy_array array;
    if (!path) return true;
    if (!cli_read_array(option, path, &array)) return false;
    bool fine = cli_tensor_take_scores(t, &array, option, path, mask);
    free(array.data);
    return fine;
}

static bool load_alibi(const arguments *a, problem *p)
{
    npy_array array;
    int64_t batch = p->lengths.batch, heads = p->q.view.shape[2];
    if (!a->alibi) return true;
    if (!cli_read_array("--alibi", a->alibi, &array)) return false;
    bool per_batch = array.axes == 2 && array.shape[0] == batch;
    bool fine = array.axes == 1 || per_batch;
    if (!fine)
        cli_error("--alibi %s has %d axes and %" PRId64 " elements; expected (heads) or (batch, "
                  "heads), (%" PRId64 ", %" PRId64 ")",
                  a->alibi, array.axes, array.count, batch, heads);
    if (fine) p->alibi = cli_floats_take(&array, "--alibi", a->alibi, heads);
    free(array.data);
    p->options.alibi_slopes = p->alibi;
    p->options.alibi_batch_stride = per_batch ? heads : 0;
    return p->alibi != NULL;
}

static bool load_sinks(const arguments *a, problem *p)
{
    npy_array array;
    if (!a->sinks) return true;
    if (!cli_read_array("--sinks", a->sinks, &array)) return false;
    bool fine = array.axes == 1;
    if (!fine) cli_error("--sinks %s has %d axes; expected 1: (heads)", a->sinks, array.axes);
    if (fine) p->sinks = cli_floats_take(&array, "--sinks", a->sinks, p->q.view.shape[2]);
    free(array.data);
    p->options.sinks = p->sinks;
    return p->sinks != NULL;
}

static void set_options(const arguments *a, problem *p)
{
    fa_options *o = &p->options;
    o->flags = (a->causal ? FA_CAUSAL : 0u) | (a->diagonal_given ? FA_DIAGONAL : 0u) |
               (a->window_given ? FA_WINDOW : 0u) | (a->scale_given ? FA_SCALE : 0u);
    o->device = p->device;
    o->scale = (float)a->scale;
    o->softcap = (float)a->softcap;
    o->diagonal = a->diagonal;
    o->window_left = a->window_given ? a->window[0] : 0;
    o->window_right = a->window_given ? a->window[1] : 0;
    o->attention_chunk = a->attention_chunk;
    o->bias = a->bias ? &p->bias.view : NULL;
    o->mask = a->mask ? &p->mask.view : NULL;
    o->dropout_p = (float)a->dropout;
    o->dropout_seed = a->seed;
    o->threads = (int32_t)a->threads;
    o->precision = (fa_precision)a->precision;
}

static bool load_problem(const arguments *a, problem *p)
{
    p->options.size = sizeof p->options;
    if (!load_main(a, p) ||
        !lengths_load(&p->lengths, &a->lengths, &p->q.view, &p->k.view, &p->options) ||
        !load_scores("--bias", a->bias, false, &p->bias) ||
        !load_scores("--mask", a->mask, true, &p->mask) || !load_alibi(a, p) || !load_sinks(a, p))
        return false;
    set_options(a, p);
    return true;
}

/* A tensor like model, but with a different dim. */
static bool new_like(cli_tensor *t, const cli_tensor *model, int64_t dim)
{
    const int64_t *s = model->view.shape;
    return cli_tensor_new(t, model->axes, model->layout, model->view.dtype, s[0], s[1], s[2], dim);
}

static float *new_floats(int64_t count)
{
    float *data = malloc(count ? (size_t)count * sizeof *data : 1);
    if (!data) cli_error("out of memory for %" PRId64 " floats", count);
    return data;
}

static bool new_results(problem *p)
{
    const int64_t *s = p->q.view.shape;
    p->lse = new_floats(s[0] * s[1] * s[2]);
    return p->lse && new_like(&p->out, &p->q, p->v.view.shape[3]);
}

static bool library_fine(fa_status status)
{
    if (status != FA_OK) cli_error("%s (%s)", fa_last_error(), fa_status_name(status));
    return status == FA_OK;
}

/* Checks before pointers are used, so that an unsupported call is refused with a reason. */
static bool check_supported(const problem *p, fa_pass pass)
{
    return library_fine(
        fa_supported(pass, &p->q.view, &p->k.view, &p->v.view, &p->out.view, &p->options));
}

/* ---- on the GPU ------------------------------------------------------------------------------ */

static size_t float_bytes(int64_t count) { return (size_t)count * sizeof(float); }

/* Moves everything that the forward pass reads and writes to the GPU, if it computes there. */
static bool move_to_device(problem *p)
{
    cli_tensor *inputs[] = {&p->q, &p->k, &p->v, &p->bias, &p->mask};
    const int64_t *s = p->q.view.shape;
    if (p->device != FA_DEVICE_CUDA) return true;
    cli_progress("copying to the GPU");
    for (int i = 0; i < CLI_COUNT(inputs); i++)
        device_copies_add_tensor(&p->copies, inputs[i], false);
    device_copies_add_tensor(&p->copies, &p->out, true);
    device_copies_add(&p->copies, &p->lse, float_bytes(s[0] * s[1] * s[2]), true);
    device_copies_add(&p->copies, &p->options.sinks, float_bytes(s[2]), false);
    const int64_t slopes = p->options.alibi_batch_stride ? p->lengths.batch * s[2] : s[2];
    device_copies_add(&p->copies, &p->options.alibi_slopes, float_bytes(slopes), false);
    lengths_add_copies(&p->lengths, &p->copies, &p->options);
    return device_copies_in(&p->copies);
}

/* The workspace of a pass or, if requested for a second one, of both. */
static bool new_workspace(problem *p, fa_pass pass)
{
    size_t bytes = 0;
    if (p->device != FA_DEVICE_CUDA) return true;
    if (!library_fine(fa_workspace_size(pass, &p->q.view, &p->k.view, &p->v.view, &p->out.view,
                                        &p->options, &bytes)))
        return false;
    if (bytes <= p->options.workspace_size) return true;
    device_delete(p->workspace);
    p->workspace = p->options.workspace = device_new(bytes);
    p->options.workspace_size = bytes;
    return p->workspace != NULL;
}

static bool move_from_device(problem *p)
{
    bool fine = p->device != FA_DEVICE_CUDA || device_copies_out(&p->copies);
    device_copies_free(&p->copies);
    return fine;
}

/* ---- results --------------------------------------------------------------------------------- */

enum { MAX_RESULTS = 8 };

typedef struct results {
    int count;
    const char *options[MAX_RESULTS]; /* "--out" */
    npy_output files[MAX_RESULTS];    /* their data belong to the results */
    double seconds;
    char kernel[256];
} results;

static void free_results(results *r)
{
    for (int i = 0; i < r->count; i++) free(r->files[i].array.data);
}

static npy_array *add_result(results *r, const char *option, const char *path)
{
    r->options[r->count] = option;
    r->files[r->count].path = path;
    return &r->files[r->count++].array;
}

static bool add_tensor(results *r, const char *option, const char *path, cli_tensor *t)
{
    return !path || cli_tensor_to_array(t, add_result(r, option, path));
}

/* The last axes of a float32 shape. The results take over the data. */
static void add_floats(results *r, const char *option, const char *path, float **data, int axes,
                       const int64_t *shape)
{
    if (!path) return;
    npy_array *array = add_result(r, option, path);
    array->type = NPY_FLOAT32;
    array->axes = axes;
    array->count = 1;
    for (int i = 0; i < axes; i++) array->count *= array->shape[i] = shape[i];
    array->data = *data;
    *data = NULL;
}

/* (batch, heads, queries), without the leading axes that q does not have. */
static void add_lse(results *r, const char *path, problem *p)
{
    const int64_t *s = p->q.view.shape, shape[3] = {s[0], s[2], s[1]};
    int missing = 4 - p->q.axes;
    add_floats(r, "--lse", path, &p->lse, 3 - missing, shape + missing);
}

static bool write_results(const results *r)
{
    char error[NPY_ERROR_SIZE];
    cli_progress("writing");
    bool fine = npy_write(r->files, r->count, error);
    if (fine) cli_progress_clear();
    else cli_error("%s", error);
    return fine;
}

static void report_json(const results *r, const char *command, const char *dtype)
{
    cli_json json = {stdout, false};
    cli_json_open(&json, NULL, '{');
    cli_json_text(&json, "command", command);
    cli_json_text(&json, "dtype", dtype);
    cli_json_real(&json, "ms", 1e3 * r->seconds);
    cli_json_text(&json, "kernel", r->kernel);
    cli_json_text(&json, "version", fa_version_string());
    cli_json_open(&json, "results", '[');
    for (int i = 0; i < r->count; i++) {
        const npy_array *array = &r->files[i].array;
        cli_json_open(&json, NULL, '{');
        cli_json_text(&json, "name", r->options[i] + 2);
        cli_json_text(&json, "file", r->files[i].path);
        cli_json_text(&json, "type", npy_type_name(array->type));
        cli_json_open(&json, "shape", '[');
        for (int d = 0; d < array->axes; d++) cli_json_integer(&json, NULL, array->shape[d]);
        cli_json_close(&json, ']');
        cli_json_close(&json, '}');
    }
    cli_json_close(&json, ']');
    cli_json_close(&json, '}');
    cli_json_end_line(&json);
}

static void report_text(const results *r)
{
    for (int i = 0; i < r->count; i++) {
        const npy_array *array = &r->files[i].array;
        printf("%-7s %s  %s (", r->options[i] + 2, r->files[i].path, npy_type_name(array->type));
        for (int d = 0; d < array->axes; d++) printf("%s%" PRId64, d ? ", " : "", array->shape[d]);
        puts(array->axes == 1 ? ",)" : ")");
    }
    printf("time    %.3f ms\nkernel  %s\n", 1e3 * r->seconds, r->kernel);
}

static void describe(results *r, fa_pass pass, const problem *p)
{
    if (fa_describe(pass, &p->q.view, &p->k.view, &p->v.view, &p->out.view, &p->options, r->kernel,
                    sizeof r->kernel) != FA_OK)
        r->kernel[0] = '\0';
}

static int finish(results *r, bool fine, const arguments *a, const char *command, fa_dtype dtype)
{
    fine = fine && write_results(r);
    if (fine && a->json) report_json(r, command, CLI_DTYPE_NAMES[dtype]);
    else if (fine && !writes_to_stdout(a)) report_text(r);
    free_results(r);
    cli_progress_clear();
    return fine ? CLI_FINE : CLI_BAD;
}

/* ---- run ------------------------------------------------------------------------------------- */

static bool forward(problem *p)
{
    cli_progress("computing");
    return library_fine(
               fa_forward(&p->q.view, &p->k.view, &p->v.view, &p->out.view, p->lse, &p->options)) &&
           (p->device != FA_DEVICE_CUDA || device_wait());
}

static bool run(const arguments *a, problem *p, results *r)
{
    if (!load_problem(a, p) || !new_results(p) || !check_supported(p, FA_PASS_FORWARD))
        return false;
    describe(r, FA_PASS_FORWARD, p);
    if (!new_workspace(p, FA_PASS_FORWARD) || !move_to_device(p)) return false;
    double begin = cli_seconds();
    if (!forward(p)) return false;
    r->seconds = cli_seconds() - begin;
    if (!move_from_device(p)) return false;
    add_lse(r, a->lse, p);
    return add_tensor(r, "--out", a->out, &p->out);
}

int cmd_run(int argc, char **argv)
{
    arguments a = {0};
    const cli_option options[] = {
        SHARED_OPTIONS(&a),
        FILE_OPTION("--out", a.out, true, "writes the result, shaped like q with the dim of v"),
    };
    const cli_command command = {
        .name = "run",
        .usage = "--q FILE --k FILE --v FILE --out FILE [OPTIONS]",
        .about = "Computes out = softmax(scale * Q K^T + ...) V of .npy files.",
        .options = options,
        .num_options = CLI_COUNT(options),
        .notes = NOTES,
    };
    int code = cli_parse(&command, argc, argv);
    if (code != CLI_CONTINUE) return code;
    if (!check_arguments(&a)) return CLI_BAD;
    problem p = {.device = (fa_device)a.device};
    results r = {0};
    bool fine = device_choose(&p.device, FA_PASS_FORWARD) && run(&a, &p, &r);
    code = finish(&r, fine, &a, "run", p.q.view.dtype);
    free_problem(&p);
    return code;
}

/* ---- grad ------------------------------------------------------------------------------------ */

static bool new_gradients(const arguments *a, problem *p)
{
    if (a->dq && !new_like(&p->dq, &p->q, p->q.view.shape[3])) return false;
    if (a->dk && !new_like(&p->dk, &p->k, p->k.view.shape[3])) return false;
    if (a->dv && !new_like(&p->dv, &p->v, p->v.view.shape[3])) return false;
    const int64_t *s = p->bias.view.shape;
    if (a->dbias &&
        !cli_tensor_new(&p->dbias, p->bias.axes, CLI_SCORES, FA_FLOAT32, s[0], s[1], s[2], s[3]))
        return false;
    if (a->dsinks) p->dsinks = new_floats(p->q.view.shape[2]);
    return !a->dsinks || p->dsinks;
}

/* What backward reads and writes in addition. */
static bool move_gradients_to_device(problem *p)
{
    cli_tensor *outputs[] = {&p->dq, &p->dk, &p->dv, &p->dbias};
    if (p->device != FA_DEVICE_CUDA) return true;
    device_copies_add_tensor(&p->copies, &p->dout, false);
    for (int i = 0; i < CLI_COUNT(outputs); i++)
        if (outputs[i]->view.data) device_copies_add_tensor(&p->copies, outputs[i], true);
    device_copies_add(&p->copies, &p->dsinks, float_bytes(p->q.view.shape[2]), true);
    return new_workspace(p, FA_PASS_BACKWARD);
}

static bool backward(problem *p)
{
    fa_gradients g = {.size = sizeof g,
                      .dout = p->dout.view,
                      .dq = p->dq.view,
                      .dk = p->dk.view,
                      .dv = p->dv.view,
                      .dbias = p->dbias.view,
                      .dsinks = p->dsinks};
    return library_fine(fa_backward(&p->q.view, &p->k.view, &p->v.view, &p->out.view, p->lse, &g,
                                    &p->options)) &&
           (p->device != FA_DEVICE_CUDA || device_wait());
}

static bool grad(const arguments *a, problem *p, results *r)
{
    if (!load_problem(a, p) || !new_results(p) || !new_gradients(a, p) ||
        !check_supported(p, FA_PASS_FORWARD) || !check_supported(p, FA_PASS_BACKWARD))
        return false;
    describe(r, FA_PASS_BACKWARD, p);
    if (!move_gradients_to_device(p) || !new_workspace(p, FA_PASS_FORWARD) || !move_to_device(p))
        return false;
    double begin = cli_seconds();
    if (!forward(p) || !backward(p)) return false;
    r->seconds = cli_seconds() - begin;
    if (!move_from_device(p)) return false;
    add_lse(r, a->lse, p);
    add_floats(r, "--dsinks", a->dsinks, &p->dsinks, 1, &p->q.view.shape[2]);
    return add_tensor(r, "--out", a->out, &p->out) && add_tensor(r, "--dq", a->dq, &p->dq) &&
           add_tensor(r, "--dk", a->dk, &p->dk) && add_tensor(r, "--dv", a->dv, &p->dv) &&
           add_tensor(r, "--dbias", a->dbias, &p->dbias);
}

int cmd_grad(int argc, char **argv)
{
    arguments a = {0};
    const cli_option options[] = {
        SHARED_OPTIONS(&a),
        FILE_OPTION("--dout", a.dout, true, "the gradient of the result, in its shape"),
        FILE_OPTION("--dq", a.dq, false, "writes the gradient of q"),
        FILE_OPTION("--dk", a.dk, false, "writes the gradient of k"),
        FILE_OPTION("--dv", a.dv, false, "writes the gradient of v"),
        FILE_OPTION("--dbias", a.dbias, false,
                    "writes the gradient of the bias, summed over the axes\n"
                    "along which it broadcasts"),
        FILE_OPTION("--dsinks", a.dsinks, false, "writes the gradient of the sinks"),
        FILE_OPTION("--out", a.out, false, "also writes the result of the forward pass"),
    };
    const cli_command command = {
        .name = "grad",
        .usage = "--q FILE --k FILE --v FILE --dout FILE --dq FILE --dk FILE --dv FILE [OPTIONS]",
        .about =
            "Computes the gradients of sum(dout * out), out = softmax(scale * Q K^T + ...) V.\n"
            "The forward pass is computed first. At least one gradient must be asked for.",
        .options = options,
        .num_options = CLI_COUNT(options),
        .notes = NOTES,
    };
    int code = cli_parse(&command, argc, argv);
    if (code != CLI_CONTINUE) return code;
    if (!check_arguments(&a)) return CLI_BAD;
    if (!a.dq && !a.dk && !a.dv && !a.dbias && !a.dsinks) {
        cli_error(
            "no gradient is asked for; expected at least one of --dq, --dk, --dv, --dbias and "
            "--dsinks");
        return CLI_BAD;
    }
    problem p = {.device = (fa_device)a.device};
    results r = {0};
    bool fine = device_choose(&p.device, FA_PASS_BACKWARD) && grad(&a, &p, &r);
    code = finish(&r, fine, &a, "grad", p.q.view.dtype);
    free_problem(&p);
    return code;
}
