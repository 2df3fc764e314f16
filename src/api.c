/*
 * The entry points of flashattn.h: each one completes the options, chooses the device, has
 * problem.c check and normalize the arguments, and hands the problem to that device's backend.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "cpu/engine.h"
#include "error.h"
#include "normalize.h"
#include "placed.h"

#ifdef FA_HAVE_CUDA
#include "cuda/backend.h"
#include "cuda/checks.h"
#include "cuda/images.h"
#include "cuda/passes.h"
#endif

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

/* Copies a caller's struct, whose size may be that of another version, into one of ours; what the
 * caller's lacks becomes 0. */
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
    const size_t known = size < our_size ? size : our_size;
    memcpy(ours, given, known);
    memset((unsigned char *)ours + known, 0, our_size - known);
    return FA_OK;
}

static fa_status complete_options(const fa_options *given, fa_options *ours)
{
    ours->device = FA_DEVICE_AUTO; /* also where the rest is not read */
    if (given) return copy_sized("options", given, OPTIONS_SIZE_0_1, ours, sizeof *ours);
    memset(ours, 0, sizeof *ours);
    return FA_OK;
}

static fa_status complete_gradients(const fa_gradients *given, fa_gradients *ours)
{
    FA_REQUIRE(given, "gradients is NULL: expected a struct with dout and the gradients to write");
    return copy_sized("gradients", given, GRADIENTS_SIZE_0_1, ours, sizeof *ours);
}

/* ---- CUDA ------------------------------------------------------------------------------------ */

#ifdef FA_HAVE_CUDA

/* The driver's codes that mean more to a caller than a failure. */
enum { FA_CUDA_OUT_OF_MEMORY = 2, FA_CUDA_NO_BINARY_FOR_GPU = 209 };

/* Words what the driver says, "cuLaunchKernelEx failed: CUDA_ERROR_... (text)". */
static fa_status cuda_failed(const fa_cuda_fault *fault, int ordinal)
{
    char where[40] = "";
    if (ordinal >= 0) (void)snprintf(where, sizeof where, " on CUDA device %d", ordinal);
    fa_status status = fault->code == FA_CUDA_OUT_OF_MEMORY ? FA_ERROR_MEMORY : FA_ERROR_DEVICE;
    return fa_fail(status, "%s failed%s: %s (%s)", fault->call, where, fault->name, fault->text);
}

static fa_status open_cuda(void)
{
    fa_cuda_fault fault;
    if (!fa_cuda_open(&fault))
        return fa_fail(FA_ERROR_DEVICE,
                       "options.device is FA_DEVICE_CUDA, but there is no usable CUDA driver: %s: "
                       "%s (%s)",
                       fault.call, fault.name, fault.text);
    if (fa_cuda_device_count() == 0)
        return fa_fail(FA_ERROR_DEVICE,
                       "options.device is FA_DEVICE_CUDA, but the CUDA driver reports no device");
    return FA_OK;
}

/* Device memory can only have been made by the driver; without one the answer is cheap. */
static bool lies_on_cuda(const void *data, fa_allocation *memory)
{
    if (data) memory->ordinal = fa_cuda_allocation_of(data, &memory->first, &memory->bytes);
    return memory->ordinal >= 0;
}

/* Device memory must not reach the CPU's engine. */
static fa_status check_host_pointer(const char *name, const void *pointer)
{
    const int place = fa_cuda_out_of_reach(pointer);
    if (place < 0) return FA_OK;
    return fa_fail(
        FA_ERROR_ARGUMENT,
        "%s at %p lies on CUDA device %d: expected host memory, for the call runs on the "
        "CPU (where q or fa_combine's out lies, or as options.device says)",
        name, pointer, place);
}

/* device: where memory must lie; NULL: the host. */
static fa_status check_pointer(const char *name, const void *pointer, const fa_cuda_device *device)
{
    if (!pointer) return FA_OK;
    if (!device) return check_host_pointer(name, pointer);
    int place = fa_cuda_device_of(pointer);
    if (place == device->ordinal) return FA_OK;
    if (place < 0)
        return fa_fail(FA_ERROR_ARGUMENT,
                       "%s at %p lies in host memory: expected memory of CUDA device %d, on which "
                       "the call runs; copy it there first",
                       name, pointer, (int)device->ordinal);
    return fa_fail(FA_ERROR_ARGUMENT,
                   "%s at %p lies on CUDA device %d: expected device %d, that of the current "
                   "context",
                   name, pointer, place, (int)device->ordinal);
}

/* Memory of a tensor without elements is never touched, wherever it lies. */
static fa_status check_place(const char *name, const fa_tensor *t, const fa_cuda_device *device)
{
    if (!t || !t->shape[0] || !t->shape[1] || !t->shape[2] || !t->shape[3]) return FA_OK;
    return check_pointer(name, t->data, device);
}

static fa_status check_option_places(const fa_options *o, const fa_cuda_device *device)
{
    static const struct {
        const char *name;
        size_t field;
    } arrays[] = {
#define ARRAY(field) {"options." #field, offsetof(fa_options, field)}
        ARRAY(alibi_slopes), ARRAY(sinks),     ARRAY(dropout_state), ARRAY(cu_seqlens_q),
        ARRAY(cu_seqlens_k), ARRAY(seqlens_q), ARRAY(seqlens_k),     ARRAY(block_table),
        ARRAY(q_descale),    ARRAY(k_descale), ARRAY(v_descale),
#undef ARRAY
    };
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) {
        const void *pointer;
        memcpy(&pointer, (const char *)o + arrays[i].field, sizeof pointer);
        if (pointer) FA_TRY(check_pointer(arrays[i].name, pointer, device));
    }
    FA_TRY(check_place("options.bias", o->bias, device));
    return check_place("options.mask", o->mask, device);
}

static fa_status check_gradient_places(const fa_gradients *g, const fa_cuda_device *device)
{
    if (!g) return FA_OK;
    FA_TRY(check_place("gradients.dout.data", &g->dout, device));
    FA_TRY(check_place("gradients.dq.data", &g->dq, device));
    FA_TRY(check_place("gradients.dk.data", &g->dk, device));
    FA_TRY(check_place("gradients.dv.data", &g->dv, device));
    FA_TRY(check_place("gradients.dbias.data", &g->dbias, device));
    FA_TRY(check_pointer("gradients.dlse", g->dlse, device));
    return check_pointer("gradients.dsinks", g->dsinks, device);
}

/* What begins in the same allocation as q, which was asked about in this call, needs no question of its own:
 * the driver takes 60 ns for one. */
static fa_status check_beside_q(const fa_arguments *a, const char *name, const fa_tensor *t,
                                const fa_cuda_device *device)
{
    const fa_allocation *m = &a->q_memory;
    const bool known = t && device && m->ordinal == device->ordinal;
    if (known && (t == a->q || (uintptr_t)t->data - m->first < m->bytes)) return FA_OK;
    return check_place(name, t, device);
}

static fa_status check_places(const fa_arguments *a, const fa_cuda_device *device)
{
    if (a->placed && a->place == (device ? device->ordinal : -1)) return FA_OK;
    FA_TRY(check_beside_q(a, "q.data", a->q, device));
    FA_TRY(check_beside_q(a, "k.data", a->k, device));
    FA_TRY(check_beside_q(a, "v.data", a->v, device));
    FA_TRY(check_beside_q(a, "out.data", a->out, device));
    FA_TRY(check_place("weights.data", a->weights, device));
    FA_TRY(check_pointer("rows", a->rows, device));
    FA_TRY(check_gradient_places(a->gradients, device));
    const bool rows = a->q && a->q->shape[0] && a->q->shape[1] && a->q->shape[2];
    if (rows) FA_TRY(check_pointer("lse", a->lse, device));
    return check_option_places(a->options, device);
}

static fa_status check_host_places(const fa_arguments *a)
{
    return fa_cuda_is_loaded() ? check_places(a, NULL) : FA_OK;
}

static fa_status check_part_as(const char *name, const char *lse_name,
                               const fa_combine_arguments *a, int64_t i,
                               const fa_cuda_device *device)
{
    FA_TRY(check_place(name, &a->parts[i], device));
    return check_pointer(lse_name, a->part_lse[i], device);
}

/* The names are only put together for a part that is wrong. */
static fa_status check_part_place(const fa_combine_arguments *a, int64_t i,
                                  const fa_cuda_device *device)
{
    char name[48], lse_name[48];
    if (check_part_as("parts", "part_lse", a, i, device) == FA_OK) return FA_OK;
    (void)snprintf(name, sizeof name, "parts[%" PRId64 "].data", i);
    (void)snprintf(lse_name, sizeof lse_name, "part_lse[%" PRId64 "]", i);
    return check_part_as(name, lse_name, a, i, device);
}

/* For arguments that fa_combine_problem_make has found right. device as in check_pointer. */
static fa_status check_combine_places(const fa_combine_arguments *a, const fa_cuda_device *device)
{
    const int64_t *shape = a->out->shape;
    FA_TRY(check_place("out.data", a->out, device));
    if (!shape[0] || !shape[1] || !shape[2]) return FA_OK;
    FA_TRY(check_pointer("lse", a->lse, device));
    for (int64_t i = 0; i < a->num_parts; i++) FA_TRY(check_part_place(a, i, device));
    return FA_OK;
}

static fa_status check_host_combine_places(const fa_combine_arguments *a)
{
    return fa_cuda_is_loaded() ? check_combine_places(a, NULL) : FA_OK;
}

/* Arrays that the host reads wherever the call runs. */
static fa_status check_host_array(const char *name, const void *array)
{
    const int place = array && fa_cuda_is_loaded() ? fa_cuda_out_of_reach(array) : -1;
    if (place < 0) return FA_OK;
    return fa_fail(FA_ERROR_ARGUMENT,
                   "%s at %p lies on CUDA device %d: expected an array in host memory, whose "
                   "entries lead to the data",
                   name, array, place);
}

#else

static const char no_cuda[] = "this build of the library has no CUDA backend";

static fa_status open_cuda(void)
{
    return fa_fail(FA_ERROR_DEVICE,
                   "options.device is FA_DEVICE_CUDA, but %s: expected "
                   "FA_DEVICE_AUTO or FA_DEVICE_CPU",
                   no_cuda);
}

static bool lies_on_cuda(const void *data, fa_allocation *memory)
{
    (void)data, (void)memory;
    return false;
}

static fa_status check_host_places(const fa_arguments *a)
{
    (void)a;
    return FA_OK;
}

static fa_status check_host_combine_places(const fa_combine_arguments *a)
{
    (void)a;
    return FA_OK;
}

static fa_status check_host_array(const char *name, const void *array)
{
    (void)name, (void)array;
    return FA_OK;
}

#endif

/* ---- Devices and their backends -------------------------------------------------------------- */

/* first: the tensor whose place decides for FA_DEVICE_AUTO; may be NULL. memory: of which its data was found to
 * be a part. */
static fa_status choose_device(fa_device asked, const fa_tensor *first, fa_device *chosen,
                               fa_allocation *memory)
{
    *memory = (fa_allocation){.ordinal = -1};
    switch (asked) {
    case FA_DEVICE_AUTO:
        *chosen = first && lies_on_cuda(first->data, memory) ? FA_DEVICE_CUDA : FA_DEVICE_CPU;
        return FA_OK;
    case FA_DEVICE_CPU: *chosen = FA_DEVICE_CPU; return FA_OK;
    case FA_DEVICE_CUDA: *chosen = FA_DEVICE_CUDA; return open_cuda();
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

/* ---- Running on CUDA ------------------------------------------------------------------------- */

#ifdef FA_HAVE_CUDA

/* The current context's device; a question may do without a context and asks about device 0. */
static fa_status find_device(bool question, fa_cuda_device *device, bool *current)
{
    fa_cuda_fault fault;
    int ordinal;
    if (!fa_cuda_current_device(&ordinal, &fault)) return cuda_failed(&fault, -1);
    *current = ordinal >= 0;
    if (ordinal < 0 && !question)
        return fa_fail(FA_ERROR_DEVICE,
                       "no CUDA context is current in this thread: expected one, as cudaSetDevice "
                       "or cuCtxSetCurrent makes it");
    if (ordinal < 0) ordinal = 0;
    return fa_cuda_get_device(ordinal, device, &fault) ? FA_OK : cuda_failed(&fault, ordinal);
}

enum { WORKSPACE_ALIGNMENT = 256 };

/* why: for whom so many bytes are. */
static fa_status check_workspace(const void *workspace, size_t size, size_t bytes, const char *why,
                                 const fa_cuda_device *device)
{
    if (bytes == 0) return FA_OK;
    if (size < bytes)
        return fa_fail(FA_ERROR_WORKSPACE,
                       "options.workspace_size is %zu: expected at least %zu bytes, %s", size,
                       bytes, why);
    FA_REQUIRE((uintptr_t)workspace % WORKSPACE_ALIGNMENT == 0,
               "options.workspace is %p: expected an address aligned to %d bytes", workspace,
               WORKSPACE_ALIGNMENT);
    return check_pointer("options.workspace", workspace, device);
}

static fa_status check_problem_workspace(const fa_problem *p, size_t bytes,
                                         const fa_cuda_device *device)
{
    return check_workspace(p->workspace, p->workspace_size, bytes, "as fa_workspace_size says",
                           device);
}

static fa_status find_asked_family(const fa_cuda_family **asked)
{
    char why[320];
    if (fa_cuda_asked_family(asked, why, sizeof why)) return FA_OK;
    return fa_fail(FA_ERROR_DEVICE, "%s", why);
}

/* in_words: the plan is to be described, with the kernels that it passes over. */
static fa_status plan_cuda(const fa_problem *p, const fa_cuda_device *device, bool in_words,
                           fa_cuda_plan *plan)
{
    char why[320];
    const fa_cuda_family *asked;
    FA_TRY(find_asked_family(&asked));
    if (!in_words && fa_cuda_plan_make(p, device, asked, plan, NULL, 0)) return FA_OK;
    if (fa_cuda_plan_make(p, device, asked, plan, why, sizeof why)) return FA_OK;
    return fa_fail(FA_ERROR_UNSUPPORTED, "%s", why);
}

static fa_status find_image(int variant, fa_cuda_image **image)
{
    char why[320];
    *image = fa_cuda_image_of(variant);
    if (*image) return FA_OK;
    fa_cuda_explain_missing_image(fa_variants[variant].name, why, sizeof why);
    return fa_fail(FA_ERROR_UNSUPPORTED, "options.device is FA_DEVICE_CUDA, but %s", why);
}

static fa_status find_kernel(int variant, const fa_cuda_device *device, void **kernel)
{
    const char *entry = fa_variants[variant].kernel;
    fa_cuda_image *image = NULL;
    fa_cuda_fault fault;
    FA_TRY(find_image(variant, &image));
    if (fa_cuda_find_kernel(image, entry, kernel, &fault)) return FA_OK;
    if (fault.code != FA_CUDA_NO_BINARY_FOR_GPU) return cuda_failed(&fault, device->ordinal);
    return fa_fail(FA_ERROR_UNSUPPORTED,
                   "CUDA device %d (%s) has architecture %d.%d, and this build's kernels are for "
                   "%s: make CUDA=all compiles them for all",
                   (int)device->ordinal, device->name, (int)device->major, (int)device->minor,
                   fa_cuda_architectures);
}

static fa_status word_check(const fa_check_report *found, bool earlier,
                            const fa_cuda_device *device)
{
    char where[120];
    (void)snprintf(
        where, sizeof where, "FA_CHECK found it on CUDA device %d%s", (int)device->ordinal,
        earlier ? " in an earlier call, which a graph replayed; this call did nothing" : "");
    return fa_problem_report(found, where);
}

/* FA_CHECK: what graphs have reported, then this call's own arrays. p NULL: it has none. */
static fa_status check_on_device(const fa_arguments *a, const fa_problem *p,
                                 const fa_cuda_device *device)
{
    fa_cuda_fault fault = {0};
    fa_check_report found;
    fa_check_params params;
    void *kernel = NULL;
    if (!fa_cuda_checks_wanted()) return FA_OK;
    fa_cuda_checks *checks = fa_cuda_checks_here(&fault);
    if (!checks) return cuda_failed(&fault, device->ordinal);
    if (fa_cuda_checks_take(checks, &found)) return word_check(&found, true, device);
    if (!p || !fa_cuda_check_params(p, a->options, &params)) return FA_OK;
    FA_TRY(find_kernel(FA_VARIANT_check_simt, device, &kernel));
    if (!fa_cuda_check(checks, kernel, device->ordinal, &params, p->stream, &found, &fault))
        return cuda_failed(&fault, device->ordinal);
    return found.kind == FA_CHECK_FINE ? FA_OK : word_check(&found, false, device);
}

static fa_status plan_passes(const fa_problem *p, const fa_cuda_device *device,
                             fa_cuda_passes *passes)
{
    char why[320];
    if (fa_cuda_passes_make(p, device, passes, why, sizeof why)) return FA_OK;
    return fa_fail(FA_ERROR_UNSUPPORTED, "%s", why);
}

/* All kernels are found before the first is queued. */
static fa_status run_passes_on_cuda(const fa_arguments *a, const fa_problem *p,
                                    const fa_cuda_device *device)
{
    fa_cuda_passes passes;
    fa_cuda_fault fault = {0};
    void *kernels[FA_CUDA_STEPS] = {NULL};
    FA_TRY(plan_passes(p, device, &passes));
    FA_TRY(check_places(a, device));
    FA_TRY(check_problem_workspace(p, passes.workspace_bytes, device));
    FA_TRY(check_on_device(a, p, device));
    for (int i = 0; i < FA_CUDA_STEPS; i++)
        if (fa_cuda_step_runs(p, &passes, i))
            FA_TRY(find_kernel(passes.steps[i].variant, device, &kernels[i]));
    return fa_cuda_run_passes(kernels, p, &passes, &fault) ? FA_OK
                                                           : cuda_failed(&fault, device->ordinal);
}

static fa_status run_on_cuda(const fa_arguments *a, const fa_problem *p)
{
    fa_cuda_device device = {0};
    fa_cuda_plan plan;
    fa_cuda_fault fault;
    void *kernel = NULL;
    bool current = false;
    FA_TRY(find_device(false, &device, &current));
    if (fa_cuda_has_passes(p)) return run_passes_on_cuda(a, p, &device);
    FA_TRY(plan_cuda(p, &device, false, &plan));
    FA_TRY(check_places(a, &device));
    FA_TRY(check_problem_workspace(p, plan.workspace_bytes, &device));
    FA_TRY(check_on_device(a, p, &device));
    if (plan.tasks == 0) return FA_OK;
    FA_TRY(find_kernel(plan.variant, &device, &kernel));
    return fa_cuda_forward(kernel, p, &plan, &fault) ? FA_OK : cuda_failed(&fault, device.ordinal);
}

/* Whether a kernel is there. Without a context it cannot be looked for, only its image. */
static fa_status ask_kernel(int variant, const fa_cuda_device *device, bool current)
{
    fa_cuda_image *image = NULL;
    void *kernel = NULL;
    return current ? find_kernel(variant, device, &kernel) : find_image(variant, &image);
}

/* All that a call does before it looks at data. */
static fa_status ask_cuda(const fa_problem *p, const fa_cuda_device *device, bool current,
                          bool in_words, fa_cuda_plan *plan)
{
    FA_TRY(plan_cuda(p, device, in_words, plan));
    return ask_kernel(plan->variant, device, current);
}

static fa_status ask_passes(const fa_problem *p, const fa_cuda_device *device, bool current,
                            fa_cuda_passes *passes)
{
    FA_TRY(plan_passes(p, device, passes));
    for (int i = 0; i < FA_CUDA_STEPS; i++)
        if (passes->steps[i].variant != FA_NO_VARIANT)
            FA_TRY(ask_kernel(passes->steps[i].variant, device, current));
    return FA_OK;
}

static fa_status combine_on_cuda(const fa_combine_arguments *a, const fa_combine_problem *c)
{
    fa_cuda_device device = {0};
    fa_cuda_combining how;
    fa_cuda_fault fault = {0};
    void *kernel = NULL;
    bool current = false;
    char why[320];
    const fa_cuda_parts parts = {.batch = c->batch,
                                 .heads = c->heads,
                                 .n_q = c->n_q,
                                 .d_v = c->d_v,
                                 .num_parts = c->num_parts,
                                 .parts = c->parts,
                                 .part_lse = c->part_lse,
                                 .part_lse_stride = c->part_lse_stride,
                                 .out = c->out,
                                 .lse = c->lse,
                                 .workspace = c->workspace,
                                 .stream = a->options->stream};
    FA_TRY(find_device(false, &device, &current));
    FA_TRY(check_combine_places(a, &device));
    FA_TRY(check_on_device(NULL, NULL, &device));
    if (!fa_cuda_combine_make(&parts, &device, &how, why, sizeof why))
        return fa_fail(FA_ERROR_UNSUPPORTED, "%s", why);
    if (how.step.tasks == 0) return FA_OK;
    (void)snprintf(why, sizeof why,
                   "as num_parts is %" PRId64
                   " and out not float32, or lse NULL, so that sums must "
                   "be kept between launches of %" PRId64 " parts",
                   c->num_parts, how.most);
    FA_TRY(check_workspace(c->workspace, c->workspace_size, how.workspace_bytes, why, &device));
    FA_TRY(find_kernel(how.step.variant, &device, &kernel));
    return fa_cuda_combine(kernel, &parts, &how, &fault) ? FA_OK
                                                         : cuda_failed(&fault, device.ordinal);
}

#else

/* choose_device never chooses CUDA here. */
static fa_status run_on_cuda(const fa_arguments *a, const fa_problem *p)
{
    (void)a, (void)p;
    return open_cuda();
}

static fa_status combine_on_cuda(const fa_combine_arguments *a, const fa_combine_problem *c)
{
    (void)a, (void)c;
    return open_cuda();
}

#endif

/* ---- The calls ------------------------------------------------------------------------------- */

/* Completes the options, chooses the device, checks and normalizes. The copies live as long as the
 * caller's variables; the problem points into the caller's memory only. */
static fa_status prepare(fa_arguments *a, const fa_options *given, fa_options *options,
                         fa_problem *p)
{
    FA_TRY(complete_options(given, options));
    a->options = options;
    FA_TRY(choose_device(options->device, a->q, &a->device, &a->q_memory));
    if (a->device == FA_DEVICE_CPU && !a->question) FA_TRY(check_host_places(a));
    return fa_problem_make(a, p);
}

static fa_status call(fa_arguments *a, const fa_options *given)
{
    fa_options options;
    fa_problem p;
    FA_TRY(prepare(a, given, &options, &p));
    return a->device == FA_DEVICE_CUDA ? run_on_cuda(a, &p) : run_on_cpu(&p);
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

fa_status fa_forward_placed(fa_pass pass, const fa_tensor *q, const fa_tensor *k,
                            const fa_tensor *v, const fa_tensor *out, float *lse,
                            const fa_options *options, int place)
{
    fa_arguments a = {.pass = pass,
                      .placed = true,
                      .place = place,
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
    fa_allocation memory;
    FA_TRY(choose_device(complete.device, out, &a.device, &memory));
    FA_TRY(check_host_array("parts", parts));
    FA_TRY(check_host_array("part_lse", part_lse));
    FA_TRY(check_host_array("options.part_lse_stride", complete.part_lse_stride));
    fa_combine_problem c;
    FA_TRY(fa_combine_problem_make(&a, &c));
    if (a.device == FA_DEVICE_CUDA) return combine_on_cuda(&a, &c);
    FA_TRY(check_host_combine_places(&a));
    const fa_cpu_engine *engine;
    FA_TRY(get_cpu_engine(&engine));
    return engine_status(engine->combine(&c), "combine");
}

/* ---- Questions ------------------------------------------------------------------------------- */

/* What the questions are about. */
typedef struct answer {
    bool wants_text;
    char text[512]; /* which kernel would run, if it is wanted */
    size_t workspace_bytes;
} answer;

static fa_status answer_cpu(const fa_problem *p, answer *result)
{
    const fa_cpu_engine *engine;
    FA_TRY(get_cpu_engine(&engine));
    if (result->wants_text) engine->describe(p, result->text, sizeof result->text);
    result->workspace_bytes = 0; /* the CPU allocates its own scratch */
    return FA_OK;
}

#ifdef FA_HAVE_CUDA
static fa_status answer_cuda(const fa_problem *p, answer *result)
{
    fa_cuda_device device = {0};
    fa_cuda_plan plan = {0};
    fa_cuda_passes passes;
    bool current = false;
    FA_TRY(find_device(true, &device, &current));
    if (fa_cuda_has_passes(p)) {
        FA_TRY(ask_passes(p, &device, current, &passes));
        if (result->wants_text)
            fa_cuda_passes_describe(p, &device, &passes, result->text, sizeof result->text);
        result->workspace_bytes = passes.workspace_bytes;
        return FA_OK;
    }
    FA_TRY(ask_cuda(p, &device, current, result->wants_text, &plan));
    if (result->wants_text)
        fa_cuda_plan_describe(p, &device, &plan, result->text, sizeof result->text);
    result->workspace_bytes = plan.workspace_bytes;
    return FA_OK;
}
#else
static fa_status answer_cuda(const fa_problem *p, answer *result)
{
    (void)p, (void)result;
    return open_cuda();
}
#endif

/* Everything that a call does before it computes. */
static fa_status ask(fa_pass pass, const fa_tensor *q, const fa_tensor *k, const fa_tensor *v,
                     const fa_tensor *out, const fa_options *given, answer *result)
{
    FA_REQUIRE(pass >= FA_PASS_FORWARD && pass <= FA_PASS_WEIGHTS,
               "pass is %d: expected FA_PASS_FORWARD, FA_PASS_BACKWARD, FA_PASS_DECODE or "
               "FA_PASS_WEIGHTS",
               (int)pass);
    fa_arguments a = {.pass = pass, .question = true, .q = q, .k = k, .v = v, .out = out};
    fa_options options;
    fa_problem p;
    FA_TRY(prepare(&a, given, &options, &p));
    return a.device == FA_DEVICE_CUDA ? answer_cuda(&p, result) : answer_cpu(&p, result);
}

fa_status fa_supported(fa_pass pass, const fa_tensor *q, const fa_tensor *k, const fa_tensor *v,
                       const fa_tensor *out, const fa_options *options)
{
    answer result = {.wants_text = false};
    return ask(pass, q, k, v, out, options, &result);
}

fa_status fa_describe(fa_pass pass, const fa_tensor *q, const fa_tensor *k, const fa_tensor *v,
                      const fa_tensor *out, const fa_options *options, char *text, size_t size)
{
    FA_REQUIRE(text && size > 0, "text is %s and size %zu: expected room for at least one byte",
               text ? "given" : "NULL", size);
    answer result = {.wants_text = true};
    FA_TRY(ask(pass, q, k, v, out, options, &result));
    (void)snprintf(text, size, "%s", result.text);
    return FA_OK;
}

fa_status fa_workspace_size(fa_pass pass, const fa_tensor *q, const fa_tensor *k,
                            const fa_tensor *v, const fa_tensor *out, const fa_options *options,
                            size_t *bytes)
{
    FA_REQUIRE(bytes, "bytes is NULL: expected where to write the size");
    answer result = {.wants_text = false};
    FA_TRY(ask(pass, q, k, v, out, options, &result));
    *bytes = result.workspace_bytes;
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

#ifdef FA_HAVE_CUDA

/* "NVIDIA H200 (9.0), 139 GiB, 132 SMs; kernels for 80 90a and PTX" */
static void describe_cuda(char *text, size_t size)
{
    fa_cuda_device device = {0};
    fa_cuda_fault fault;
    const char *kernels = fa_cuda_architectures[0] ? fa_cuda_architectures : "none";
    if (!fa_cuda_get_device(0, &device, &fault)) {
        (void)snprintf(text, size, "%s failed: %.60s (%.80s)", fault.call, fault.name, fault.text);
        return;
    }
    (void)snprintf(text, size, "%.80s (%d.%d), %.0f GiB, %d SMs; compiled kernels: %.60s",
                   device.name, (int)device.major, (int)device.minor,
                   (double)device.memory_bytes / 0x1p30, (int)device.multiprocessors, kernels);
}

static void find_cuda(fa_cuda_info *info)
{
    fa_cuda_fault fault;
    const bool open = fa_cuda_open(&fault);
    info->driver_version = fa_cuda_driver_version();
    if (!open) {
        (void)snprintf(info->detail, sizeof info->detail,
                       "no usable CUDA driver: %s: %.60s (%.80s)", fault.call, fault.name,
                       fault.text);
        return;
    }
    info->device_count = fa_cuda_device_count();
    if (info->device_count > 0) describe_cuda(info->detail, sizeof info->detail);
    else (void)snprintf(info->detail, sizeof info->detail, "the CUDA driver reports no device");
}

#else

static void find_cuda(fa_cuda_info *info)
{
    (void)snprintf(info->detail, sizeof info->detail, "%s", no_cuda);
}

#endif

fa_status fa_get_cuda_info(fa_cuda_info *info)
{
    FA_REQUIRE(info, "info is NULL: expected where to write what is known of CUDA");
    memset(info, 0, sizeof *info);
    find_cuda(info);
    return FA_OK;
}
