/*
 * The entry points of flashattn.h. Each one completes the options and chooses the backend. normalize.c
 * checks the arguments and makes a problem of them, which the backend runs.
 */
#include "api.h"

#include <stdio.h>
#include <string.h>

#include "arguments.h"
#include "backend.h"
#include "error.h"
#include "location.h"
#include "normalize.h"

/* ---- Version --------------------------------------------------------------------------------- */

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

/* ---- Structs that carry their size ----------------------------------------------------------- */

/* The sizes of version 0.1's structs: the end of their last field at that time. */
#define END_OF(type, field) (offsetof(type, field) + sizeof(((type *)NULL)->field))
#define OPTIONS_SIZE_0_1 END_OF(fa_options, workspace_size)
#define GRADIENTS_SIZE_0_1 END_OF(fa_gradients, dsinks)
#define APPEND_OPTIONS_SIZE_0_1 END_OF(fa_append_options, stream)

/* Larger than any version of a struct will be: such a size is uninitialized memory. */
#define SIZE_LIMIT 4096

/* Copies a caller's struct, whose size may be that of another version, into ours. Fields that the
 * caller's struct lacks become 0. */
static fa_status copy_sized(const char *name, const char *type, const void *given, size_t size_0_1,
                            void *ours, size_t our_size)
{
    size_t size;
    memcpy(&size, given, sizeof size);
    /* Structs end on a multiple of their alignment: any other size would cut a pointer in two. */
    FA_REQUIRE(size == 0 || (size >= sizeof size && size <= SIZE_LIMIT && size % sizeof size == 0),
               "%s.size is %zu: expected 0 or sizeof(%s), a multiple of %zu, which is %zu in "
               "version %s",
               name, size, type, sizeof size, our_size, fa_version_string());
    if (size == 0) size = size_0_1;
    const unsigned char *bytes = given;
    for (size_t i = our_size; i < size; i++) {
        if (bytes[i] == 0) continue;
        return fa_fail(FA_ERROR_UNSUPPORTED,
                       "%s.size is %zu and byte %zu is not 0: expected 0 behind the %zu bytes that "
                       "version %s of the library knows",
                       name, size, i, our_size, fa_version_string());
    }
    const size_t known = size < our_size ? size : our_size;
    memcpy(ours, given, known);
    memset((unsigned char *)ours + known, 0, our_size - known);
    return FA_OK;
}

static fa_status complete_options(const fa_options *given, fa_options *ours)
{
    ours->device = FA_DEVICE_AUTO; /* also where the rest is not read */
    if (given)
        return copy_sized("options", "fa_options", given, OPTIONS_SIZE_0_1, ours, sizeof *ours);
    memset(ours, 0, sizeof *ours);
    return FA_OK;
}

static fa_status complete_gradients(const fa_gradients *given, fa_gradients *ours)
{
    FA_REQUIRE(given, "gradients is NULL: expected a struct with dout and the gradients to write");
    return copy_sized("gradients", "fa_gradients", given, GRADIENTS_SIZE_0_1, ours, sizeof *ours);
}

/* ---- Backends -------------------------------------------------------------------------------- */

static const fa_backend *const backends[] = {
    [FA_DEVICE_CPU] = &fa_cpu_backend, [FA_DEVICE_CUDA] = &fa_cuda_backend};

/* first: the tensor whose memory determines the device for FA_DEVICE_AUTO; may be NULL. memory: the
 * allocation that holds its data, if it is known. */
static fa_status choose_device(fa_device asked, const fa_tensor *first, fa_device *chosen,
                               fa_allocation *memory)
{
    *memory = (fa_allocation){.ordinal = FA_HOST_MEMORY};
    switch (asked) {
    case FA_DEVICE_AUTO:
        if (first && first->data)
            memory->ordinal =
                fa_cuda_backend.find_memory(first->data, &memory->first, &memory->bytes);
        *chosen = memory->ordinal == FA_HOST_MEMORY ? FA_DEVICE_CPU : FA_DEVICE_CUDA;
        return FA_OK;
    case FA_DEVICE_CPU:
    case FA_DEVICE_CUDA: *chosen = asked; return backends[asked]->open();
    }
    return fa_fail(FA_ERROR_ARGUMENT,
                   "options.device is %d: expected FA_DEVICE_AUTO, FA_DEVICE_CPU or FA_DEVICE_CUDA",
                   (int)asked);
}

/* Where the arrays of a call on the CPU must lie. */
static const fa_location host = {&fa_cuda_backend, FA_HOST_MEMORY};

/* ---- The calls ------------------------------------------------------------------------------- */

/* Completes the options, chooses the device, checks and normalizes. The copies are the caller's
 * variables; the problem points only into the caller's memory. */
static fa_status prepare(fa_arguments *a, const fa_options *given, fa_options *options,
                         fa_problem *p)
{
    FA_TRY(complete_options(given, options));
    a->options = options;
    FA_TRY(choose_device(options->device, a->q, &a->device, &a->q_memory));
    if (a->device == FA_DEVICE_CPU && !a->dry_run && host.backend->in_use())
        FA_TRY(fa_check_locations(a, host));
    return fa_problem_make(a, p);
}

static fa_status call(fa_arguments *a, const fa_options *given)
{
    fa_options options;
    fa_problem p;
    FA_TRY(prepare(a, given, &options, &p));
    return backends[a->device]->run(a, &p);
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

fa_status fa_forward_located(fa_pass pass, const fa_tensor *q, const fa_tensor *k,
                             const fa_tensor *v, const fa_tensor *out, float *lse,
                             const fa_options *options, int location)
{
    fa_arguments a = {.pass = pass,
                      .located = true,
                      .location = location,
                      .q = q,
                      .k = k,
                      .v = v,
                      .out = out,
                      .lse = lse};
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

/* Arrays of fa_combine that the host reads, on every device. */
static fa_status check_host_arrays(const fa_combine_problem *c, const fa_options *options)
{
    const fa_backend *cuda = &fa_cuda_backend;
    if (!cuda->in_use()) return FA_OK;
    FA_TRY(fa_check_host_array("parts", c->parts, cuda));
    FA_TRY(fa_check_host_array("part_lse", c->part_lse, cuda));
    return fa_check_host_array("options.part_lse_stride", options->part_lse_stride, cuda);
}

fa_status fa_combine(const fa_tensor *parts, const float *const *part_lse, int64_t num_parts,
                     const fa_tensor *out, float *lse, const fa_options *options)
{
    fa_options complete;
    fa_allocation memory;
    fa_combine_problem c = {
        .parts = parts, .part_lse = part_lse, .num_parts = num_parts, .lse = lse};
    FA_TRY(complete_options(options, &complete));
    FA_TRY(choose_device(complete.device, out, &c.device, &memory));
    FA_TRY(check_host_arrays(&c, &complete));
    FA_TRY(fa_combine_problem_make(out, &complete, &c));
    if (c.device == FA_DEVICE_CPU && host.backend->in_use())
        FA_TRY(fa_check_combine_locations(&c, host));
    return backends[c.device]->combine(&c);
}

static fa_status complete_append_options(const fa_append_options *given, fa_append_options *ours)
{
    ours->device = FA_DEVICE_AUTO;
    if (given)
        return copy_sized("options", "fa_append_options", given, APPEND_OPTIONS_SIZE_0_1, ours,
                          sizeof *ours);
    memset(ours, 0, sizeof *ours);
    return FA_OK;
}

fa_status fa_append(const fa_tensor *k_new, const fa_tensor *v_new, const fa_tensor *k_cache,
                    const fa_tensor *v_cache, const fa_append_options *options)
{
    fa_append_options complete;
    fa_append_problem p;
    fa_allocation memory;
    fa_append_call c = {.k_new = k_new,
                        .v_new = v_new,
                        .k_cache = k_cache,
                        .v_cache = v_cache,
                        .options = &complete};
    FA_TRY(complete_append_options(options, &complete));
    FA_TRY(choose_device(complete.device, k_cache, &c.device, &memory));
    if (c.device == FA_DEVICE_CPU && host.backend->in_use())
        FA_TRY(fa_check_append_locations(&c, host));
    FA_TRY(fa_append_problem_make(&c, &p));
    return backends[c.device]->append(&c, &p);
}

/* ---- Dry runs -------------------------------------------------------------------------------- */

/* Everything that a call does before the computation. */
static fa_status dry_run(fa_pass pass, const fa_tensor *q, const fa_tensor *k, const fa_tensor *v,
                         const fa_tensor *out, const fa_options *given, fa_answer *answer)
{
    FA_REQUIRE(pass >= FA_PASS_FORWARD && pass <= FA_PASS_WEIGHTS,
               "pass is %d: expected FA_PASS_FORWARD, FA_PASS_BACKWARD, FA_PASS_DECODE or "
               "FA_PASS_WEIGHTS",
               (int)pass);
    fa_arguments a = {.pass = pass, .dry_run = true, .q = q, .k = k, .v = v, .out = out};
    fa_options options;
    fa_problem p;
    FA_TRY(prepare(&a, given, &options, &p));
    return backends[a.device]->dry_run(&p, answer);
}

fa_status fa_supported(fa_pass pass, const fa_tensor *q, const fa_tensor *k, const fa_tensor *v,
                       const fa_tensor *out, const fa_options *options)
{
    fa_answer answer = {.wants_text = false};
    return dry_run(pass, q, k, v, out, options, &answer);
}

fa_status fa_describe(fa_pass pass, const fa_tensor *q, const fa_tensor *k, const fa_tensor *v,
                      const fa_tensor *out, const fa_options *options, char *text, size_t size)
{
    FA_REQUIRE(text && size > 0, "text is %s and size %zu: expected room for at least one byte",
               text ? "given" : "NULL", size);
    fa_answer answer = {.wants_text = true};
    FA_TRY(dry_run(pass, q, k, v, out, options, &answer));
    (void)snprintf(text, size, "%s", answer.text);
    return FA_OK;
}

fa_status fa_workspace_size(fa_pass pass, const fa_tensor *q, const fa_tensor *k,
                            const fa_tensor *v, const fa_tensor *out, const fa_options *options,
                            size_t *bytes)
{
    FA_REQUIRE(bytes, "bytes is NULL: expected where to write the size");
    fa_answer answer = {.wants_text = false};
    FA_TRY(dry_run(pass, q, k, v, out, options, &answer));
    *bytes = answer.workspace_bytes;
    return FA_OK;
}

/* ---- Info ------------------------------------------------------------------------------------ */

fa_status fa_get_cpu_info(fa_cpu_info *info)
{
    FA_REQUIRE(info, "info is NULL: expected where to write what is known of the CPU");
    memset(info, 0, sizeof *info);
    return fa_cpu_backend.get_info(info);
}

fa_status fa_get_cuda_info(fa_cuda_info *info)
{
    FA_REQUIRE(info, "info is NULL: expected where to write what is known of CUDA");
    memset(info, 0, sizeof *info);
    return fa_cuda_backend.get_info(info);
}
