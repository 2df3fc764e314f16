/*
 * The entry points of flashattn.h: each one completes the options, chooses the device, has problem.c
 * check and normalize the arguments, and hands the problem to that device's backend.
 */
#include <stdio.h>
#include <math.h>
#include <string.h>

#include "cpu/engine.h"
#include "error.h"
#include "normalize.h"

/* ---- Version, names and tensors -------------------------------------------------------------- */

#define TEXT_OF(x) #x
#define VERSION_TEXT(major, minor, patch) TEXT_OF(major) "." TEXT_OF(minor) "." TEXT_OF(patch)

int fa_version(void)
{
    return FA_VERSION_MAJOR * 10000 + FA_VERSION_MINOR * 100 + FA_VERSION_PATCH;
}

const char *fa_version_string(void)
{
    return VERSION_TEXT(FA_VERSION_MAJOR, FA_VERSION_MINOR, FA_VERSION_PATCH);
}

size_t fa_dtype_size(fa_dtype dtype)
{
    switch (dtype) {
    case FA_FLOAT32: return 4;
    case FA_FLOAT16:
    case FA_BFLOAT16: return 2;
    case FA_FLOAT8_E4M3:
    case FA_BOOL: return 1;
    }
    return 0;
}

const char *fa_dtype_name(fa_dtype dtype)
{
    switch (dtype) {
    case FA_FLOAT32: return "float32";
    case FA_FLOAT16: return "float16";
    case FA_BFLOAT16: return "bfloat16";
    case FA_FLOAT8_E4M3: return "float8_e4m3";
    case FA_BOOL: return "bool";
    }
    return "unknown dtype";
}

/* A stride that would overflow wraps around; the calls refuse such a shape by its product. */
static int64_t stride_product(int64_t a, int64_t b) { return (int64_t)((uint64_t)a * (uint64_t)b); }

fa_tensor fa_bshd(void *data, fa_dtype dtype, int64_t batch, int64_t sequence, int64_t heads,
                  int64_t dim)
{
    int64_t row = stride_product(heads, dim);
    fa_tensor t = {
        data, dtype, {batch, sequence, heads, dim}, {stride_product(sequence, row), row, dim, 1}};
    return t;
}

fa_tensor fa_bhsd(void *data, fa_dtype dtype, int64_t batch, int64_t sequence, int64_t heads,
                  int64_t dim)
{
    int64_t head = stride_product(sequence, dim);
    fa_tensor t = {
        data, dtype, {batch, sequence, heads, dim}, {stride_product(heads, head), dim, head, 1}};
    return t;
}

/* ---- Structs that carry their size ----------------------------------------------------------- */

/* Where version 0.1's structs end: the end of their last field then. */
#define END_OF(type, field) (offsetof(type, field) + sizeof(((type *)NULL)->field))
#define OPTIONS_SIZE_0_1 END_OF(fa_options, workspace_size)
#define GRADIENTS_SIZE_0_1 END_OF(fa_gradients, dsinks)

/* More than any version of a struct will have: such a size was never set. */
#define SIZE_LIMIT 4096

/* Copies a caller's struct, whose size may be that of another version, into a zeroed one of ours. */
static fa_status copy_sized(const char *name, const void *given, size_t size_0_1, void *ours,
                            size_t our_size)
{
    size_t size;
    memcpy(&size, given, sizeof size);
    /* Structs end on a multiple of their alignment: any other size would cut a pointer in two. */
    FA_REQUIRE(size == 0 || (size >= sizeof size && size <= SIZE_LIMIT && size % sizeof size == 0),
               "%s.size is %zu: expected 0 or sizeof(fa_%s), a multiple of %zu, which is %zu in "
               "version %s",
               name, size, name, sizeof size, our_size, fa_version_string());
    if (size == 0) size = size_0_1;
    const unsigned char *bytes = given;
    for (size_t i = our_size; i < size; i++) {
        if (bytes[i] == 0) continue;
        return fa_fail(FA_ERROR_UNSUPPORTED,
                       "%s.size is %zu and byte %zu is not 0: expected 0 behind the %zu bytes that "
                       "version %s of the library knows",
                       name, size, i, our_size, fa_version_string());
    }
    memcpy(ours, given, size < our_size ? size : our_size);
    return FA_OK;
}

static fa_status complete_options(const fa_options *given, fa_options *ours)
{
    memset(ours, 0, sizeof *ours);
    if (!given) return FA_OK;
    return copy_sized("options", given, OPTIONS_SIZE_0_1, ours, sizeof *ours);
}

static fa_status complete_gradients(const fa_gradients *given, fa_gradients *ours)
{
    memset(ours, 0, sizeof *ours);
    FA_REQUIRE(given, "gradients is NULL: expected a struct with dout and the gradients to write");
    return copy_sized("gradients", given, GRADIENTS_SIZE_0_1, ours, sizeof *ours);
}

/* ---- Devices and their backends -------------------------------------------------------------- */

static const char no_cuda[] = "this build of the library has no CUDA backend";

static fa_status choose_device(fa_device asked, fa_device *chosen)
{
    switch (asked) {
    case FA_DEVICE_AUTO:
    case FA_DEVICE_CPU: *chosen = FA_DEVICE_CPU; return FA_OK;
    case FA_DEVICE_CUDA:
        return fa_fail(FA_ERROR_DEVICE,
                       "options.device is FA_DEVICE_CUDA, but %s: expected "
                       "FA_DEVICE_AUTO or FA_DEVICE_CPU",
                       no_cuda);
    }
    return fa_fail(FA_ERROR_ARGUMENT,
                   "options.device is %d: expected FA_DEVICE_AUTO, FA_DEVICE_CPU or FA_DEVICE_CUDA",
                   (int)asked);
}

static fa_status get_cpu_engine(const fa_cpu_engine **engine)
{
    char why[256] = "";
    *engine = fa_cpu_engine_get(why, sizeof why);
    return *engine ? FA_OK : fa_fail(FA_ERROR_DEVICE, "%s", why);
}

static const char *const pass_names[] = {"forward", "backward", "decode", "weights"};

/* Words an engine's status; the only failure that a checked problem can meet is lack of memory. */
static fa_status engine_status(fa_status status, const char *what)
{
    if (status == FA_OK) return FA_OK;
    return fa_fail(status, "fa_%s could not allocate its scratch memory on the CPU", what);
}

static fa_status run_on_cpu(const fa_problem *p)
{
    const fa_cpu_engine *engine;
    FA_TRY(get_cpu_engine(&engine));
    fa_status status = FA_OK;
    switch (p->pass) {
    case FA_PASS_FORWARD: status = engine->forward(p); break;
    case FA_PASS_BACKWARD: status = engine->backward(p); break;
    case FA_PASS_DECODE: status = engine->decode(p); break;
    case FA_PASS_WEIGHTS: status = engine->weights(p); break;
    }
    return engine_status(status, pass_names[p->pass]);
}

/* ---- The calls ------------------------------------------------------------------------------- */

/* Completes the options, chooses the device, checks and normalizes. The copies live as long as the
 * caller's variables; the problem points into the caller's memory only. */
static fa_status prepare(fa_arguments *a, const fa_options *given, fa_options *options,
                         fa_problem *p)
{
    FA_TRY(complete_options(given, options));
    a->options = options;
    FA_TRY(choose_device(options->device, &a->device));
    return fa_problem_make(a, p);
}

static fa_status call(fa_arguments *a, const fa_options *given)
{
    fa_options options;
    fa_problem p;
    FA_TRY(prepare(a, given, &options, &p));
    return run_on_cpu(&p);
}

fa_status fa_forward(const fa_tensor *q, const fa_tensor *k, const fa_tensor *v,
                     const fa_tensor *out, float *lse, const fa_options *options)
{
    fa_arguments a = {.pass = FA_PASS_FORWARD, .q = q, .k = k, .v = v, .out = out, .lse = lse};
    return call(&a, options);
}

fa_status fa_decode(const fa_tensor *q, const fa_tensor *k, const fa_tensor *v,
                    const fa_tensor *out, float *lse, const fa_options *options)
{
    fa_arguments a = {.pass = FA_PASS_DECODE, .q = q, .k = k, .v = v, .out = out, .lse = lse};
    return call(&a, options);
}

fa_status fa_backward(const fa_tensor *q, const fa_tensor *k, const fa_tensor *v,
                      const fa_tensor *out, const float *lse, const fa_gradients *gradients,
                      const fa_options *options)
{
    fa_gradients complete;
    FA_TRY(complete_gradients(gradients, &complete));
    fa_arguments a = {.pass = FA_PASS_BACKWARD,
                      .q = q,
                      .k = k,
                      .v = v,
                      .out = out,
                      .lse = lse,
                      .gradients = &complete};
    return call(&a, options);
}

fa_status fa_weights(const fa_tensor *q, const fa_tensor *k, const int64_t *rows, int64_t num_rows,
                     const fa_tensor *weights, const fa_options *options)
{
    fa_arguments a = {.pass = FA_PASS_WEIGHTS,
                      .q = q,
                      .k = k,
                      .rows = rows,
                      .num_rows = num_rows,
                      .weights = weights};
    return call(&a, options);
}

fa_status fa_combine(const fa_tensor *parts, const float *const *part_lse, int64_t num_parts,
                     const fa_tensor *out, float *lse, const fa_options *options)
{
    fa_options complete;
    FA_TRY(complete_options(options, &complete));
    fa_combine_arguments a = {.parts = parts,
                              .part_lse = part_lse,
                              .num_parts = num_parts,
                              .out = out,
                              .lse = lse,
                              .options = &complete};
    FA_TRY(choose_device(complete.device, &a.device));
    fa_combine_problem c;
    FA_TRY(fa_combine_problem_make(&a, &c));
    const fa_cpu_engine *engine;
    FA_TRY(get_cpu_engine(&engine));
    return engine_status(engine->combine(&c), "combine");
}

/* ---- Questions ------------------------------------------------------------------------------- */

/* Everything that a call does before it computes. */
static fa_status ask(fa_pass pass, const fa_tensor *q, const fa_tensor *k, const fa_tensor *v,
                     const fa_tensor *out, const fa_options *given, fa_problem *p,
                     const fa_cpu_engine **engine)
{
    FA_REQUIRE(pass >= FA_PASS_FORWARD && pass <= FA_PASS_WEIGHTS,
               "pass is %d: expected FA_PASS_FORWARD, FA_PASS_BACKWARD, FA_PASS_DECODE or "
               "FA_PASS_WEIGHTS",
               (int)pass);
    fa_arguments a = {.pass = pass, .question = true, .q = q, .k = k, .v = v, .out = out};
    fa_options options;
    FA_TRY(prepare(&a, given, &options, p));
    return get_cpu_engine(engine);
}

fa_status fa_supported(fa_pass pass, const fa_tensor *q, const fa_tensor *k, const fa_tensor *v,
                       const fa_tensor *out, const fa_options *options)
{
    fa_problem p;
    const fa_cpu_engine *engine;
    return ask(pass, q, k, v, out, options, &p, &engine);
}

fa_status fa_describe(fa_pass pass, const fa_tensor *q, const fa_tensor *k, const fa_tensor *v,
                      const fa_tensor *out, const fa_options *options, char *text, size_t size)
{
    FA_REQUIRE(text && size > 0, "text is %s and size %zu: expected room for at least one byte",
               text ? "given" : "NULL", size);
    fa_problem p;
    const fa_cpu_engine *engine;
    FA_TRY(ask(pass, q, k, v, out, options, &p, &engine));
    engine->describe(&p, text, size);
    return FA_OK;
}

fa_status fa_workspace_size(fa_pass pass, const fa_tensor *q, const fa_tensor *k,
                            const fa_tensor *v, const fa_tensor *out, const fa_options *options,
                            size_t *bytes)
{
    FA_REQUIRE(bytes, "bytes is NULL: expected where to write the size");
    fa_problem p;
    const fa_cpu_engine *engine;
    FA_TRY(ask(pass, q, k, v, out, options, &p, &engine));
    *bytes = 0; /* the CPU allocates its own scratch */
    return FA_OK;
}

fa_status fa_get_cpu_info(fa_cpu_info *info)
{
    FA_REQUIRE(info, "info is NULL: expected where to write what is known of the CPU");
    const fa_cpu_engine *engine;
    FA_TRY(get_cpu_engine(&engine));
    memset(info, 0, sizeof *info);
    (void)snprintf(info->isa, sizeof info->isa, "%s", engine->name);
    fa_cpu_engine_names(info->isas, sizeof info->isas);
    info->threads = fa_cpu_threads(0, INFINITY);
    info->vector_bits = engine->vector_bits;
    return FA_OK;
}

fa_status fa_get_cuda_info(fa_cuda_info *info)
{
    FA_REQUIRE(info, "info is NULL: expected where to write what is known of CUDA");
    memset(info, 0, sizeof *info);
    (void)snprintf(info->detail, sizeof info->detail, "%s", no_cuda);
    return FA_OK;
}
