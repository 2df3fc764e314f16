/*
 * The CUDA backend of backend.h. It plans a problem, checks where the arrays lie, and queues the plan's
 * kernels on the caller's stream. It makes error messages of the faults and reasons that the rest of
 * src/cuda reports.
 */
#include "backend.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cuda/checks.h"
#include "cuda/driver.h"
#include "cuda/family.h"
#include "cuda/images.h"
#include "cuda/plan.h"
#include "cuda/plan_append.h"
#include "cuda/plan_combine.h"
#include "error.h"
#include "location.h"
#include "normalize.h"

/* ---- Faults and devices ---------------------------------------------------------------------- */

/* Codes of the driver that have their own status. */
enum { FA_CUDA_OUT_OF_MEMORY = 2, FA_CUDA_NO_BINARY_FOR_GPU = 209 };

/* Sets the error message for a fault: "cuLaunchKernelEx failed: CUDA_ERROR_... (text)". */
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

/* The current context's device. A dry run needs no context: without one it uses device 0. */
static fa_status find_device(bool dry_run, fa_cuda_device *device, bool *current)
{
    fa_cuda_fault fault;
    int ordinal;
    if (!fa_cuda_current_device(&ordinal, &fault)) return cuda_failed(&fault, -1);
    *current = ordinal >= 0;
    if (ordinal < 0 && !dry_run)
        return fa_fail(FA_ERROR_DEVICE,
                       "no CUDA context is current in this thread: expected one, as cudaSetDevice "
                       "or cuCtxSetCurrent makes it");
    if (ordinal < 0) ordinal = 0;
    return fa_cuda_get_device(ordinal, device, &fault) ? FA_OK : cuda_failed(&fault, ordinal);
}
/* The location of arrays of a call on this device. */
static fa_location location_of(const fa_cuda_device *device)
{
    return (fa_location){&fa_cuda_backend, device->ordinal};
}

/* ---- Workspace ------------------------------------------------------------------------------- */

enum { WORKSPACE_ALIGNMENT = 256 };

/* why: the purpose of the bytes; it ends the sentence. */
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
    return fa_check_location("options.workspace", workspace, location_of(device));
}

static fa_status check_problem_workspace(const fa_problem *p, size_t bytes,
                                         const fa_cuda_device *device)
{
    return check_workspace(p->workspace, p->workspace_size, bytes, "as fa_workspace_size says",
                           device);
}
/* ---- Plans and kernels ----------------------------------------------------------------------- */

static fa_status get_allowed_family(fa_pass pass, const fa_cuda_family **asked)
{
    char why[320];
    if (fa_cuda_asked_family(pass, asked, why, sizeof why)) return FA_OK;
    return fa_fail(FA_ERROR_DEVICE, "%s", why);
}

/* in_words: the plan will be described, with the families that were not chosen. */
static fa_status make_plan(const fa_problem *p, const fa_cuda_device *device, bool in_words,
                           fa_cuda_plan *plan)
{
    char why[320];
    const fa_cuda_family *asked = NULL;
    FA_TRY(get_allowed_family(p->pass, &asked));
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

/* All kernels are loaded before the first is queued. */
static fa_status find_kernels(const fa_cuda_plan *plan, const fa_cuda_device *device,
                              void *kernels[FA_CUDA_LAUNCHES])
{
    for (int i = 0; i < plan->count; i++)
        if (!plan->launches[i].idle)
            FA_TRY(find_kernel(plan->launches[i].variant, device, &kernels[i]));
    return FA_OK;
}

/* ---- FA_CHECK -------------------------------------------------------------------------------- */

static fa_status word_check(const fa_check_report *found, bool earlier,
                            const fa_cuda_device *device)
{
    char where[120];
    (void)snprintf(
        where, sizeof where, "FA_CHECK found it on CUDA device %d%s", (int)device->ordinal,
        earlier ? " in an earlier call, which a graph replayed; this call did nothing" : "");
    return fa_problem_report(found, where);
}

/* FA_CHECK: first the reports of graphs, then this call's own arrays. p NULL: it has none. */
static fa_status check_on_device(const fa_arguments *a, const fa_problem *p,
                                 const fa_cuda_device *device)
{
    fa_cuda_fault fault = {0};
    fa_check_report found;
    fa_check_params params;
    fa_cuda_plan plan;
    void *kernels[FA_CUDA_LAUNCHES];
    char why[320];
    if (!fa_cuda_checks_wanted()) return FA_OK;
    fa_cuda_checks *checks = fa_cuda_checks_here(&fault);
    if (!checks) return cuda_failed(&fault, device->ordinal);
    if (fa_cuda_checks_take(checks, &found)) return word_check(&found, true, device);
    if (!p || !fa_cuda_check_params(p, a->options, &params)) return FA_OK;
    if (!fa_cuda_plan_check(device, &plan, why, sizeof why))
        return fa_fail(FA_ERROR_UNSUPPORTED, "%s", why);
    FA_TRY(find_kernels(&plan, device, kernels));
    if (!fa_cuda_check(checks, &plan, kernels, &params, p->stream, &found, &fault))
        return cuda_failed(&fault, device->ordinal);
    return found.kind == FA_CHECK_FINE ? FA_OK : word_check(&found, false, device);
}
/* ---- Running --------------------------------------------------------------------------------- */

static fa_status queue_plan(const fa_cuda_plan *plan, const fa_cuda_call *call,
                            const fa_cuda_device *device)
{
    fa_cuda_fault fault = {0};
    void *kernels[FA_CUDA_LAUNCHES];
    FA_TRY(find_kernels(plan, device, kernels));
    return fa_cuda_plan_queue(plan, kernels, call, &fault) ? FA_OK
                                                           : cuda_failed(&fault, device->ordinal);
}

/* If there is too little workspace for a plan that can do without, replaces it by one that needs none. */
static void use_less_workspace(const fa_problem *p, const fa_cuda_device *device,
                               fa_cuda_plan *plan)
{
    const fa_cuda_family *other = plan->family ? plan->family->without_workspace : NULL;
    /* fa_decode needs the workspace of its own kernels. */
    const bool needed = p->pass == FA_PASS_DECODE && plan->family == &fa_cuda_decode_sm90;
    if (needed || p->full_workspace || p->workspace_size >= plan->workspace_bytes) return;
    for (; other; other = other->without_workspace) {
        fa_cuda_plan found;
        fa_cuda_plan_begin(device, other, &found);
        if (!other->plan(p, device, &found, NULL, 0)) continue;
        *plan = found;
        return;
    }
}

static fa_status run(const fa_arguments *a, const fa_problem *p)
{
    fa_cuda_device device = {0};
    fa_cuda_plan plan;
    bool current = false;
    FA_TRY(find_device(false, &device, &current));
    FA_TRY(make_plan(p, &device, false, &plan));
    use_less_workspace(p, &device, &plan);
    FA_TRY(fa_check_locations(a, location_of(&device)));
    FA_TRY(check_problem_workspace(p, plan.workspace_bytes, &device));
    FA_TRY(check_on_device(a, p, &device));
    return queue_plan(&plan, &(fa_cuda_call){.problem = p, .stream = p->stream}, &device);
}

static fa_status combine(const fa_combine_problem *c)
{
    fa_cuda_device device = {0};
    fa_cuda_plan plan;
    bool current = false;
    char why[320];
    FA_TRY(find_device(false, &device, &current));
    FA_TRY(fa_check_combine_locations(c, location_of(&device)));
    FA_TRY(check_on_device(NULL, NULL, &device));
    if (!fa_cuda_plan_combine(c, &device, &plan, why, sizeof why))
        return fa_fail(FA_ERROR_UNSUPPORTED, "%s", why);
    if (plan.launches[0].idle) return FA_OK;
    (void)snprintf(why, sizeof why,
                   "as num_parts is %" PRId64
                   " and out not float32, or lse NULL, so that sums must "
                   "be kept between launches of %d parts",
                   c->num_parts, fa_variants[plan.launches[0].variant].max_parts);
    FA_TRY(check_workspace(c->workspace, c->workspace_size, plan.workspace_bytes, why, &device));
    return queue_plan(&plan, &(fa_cuda_call){.combine = c, .stream = c->stream}, &device);
}

static fa_status append(const fa_append_call *c, const fa_append_problem *p)
{
    fa_cuda_device device = {0};
    fa_cuda_plan plan;
    bool current = false;
    char why[320];
    FA_TRY(find_device(false, &device, &current));
    FA_TRY(fa_check_append_locations(c, location_of(&device)));
    FA_TRY(check_on_device(NULL, NULL, &device));
    if (!fa_cuda_plan_append(p, &device, &plan, why, sizeof why))
        return fa_fail(FA_ERROR_UNSUPPORTED, "%s", why);
    return queue_plan(&plan, &(fa_cuda_call){.append = p, .stream = p->stream}, &device);
}

/* ---- Dry runs -------------------------------------------------------------------------------- */

/* Whether the kernel exists. Without a context only its image can be checked. */
static fa_status check_kernel(int variant, const fa_cuda_device *device, bool current)
{
    fa_cuda_image *image = NULL;
    void *kernel = NULL;
    return current ? find_kernel(variant, device, &kernel) : find_image(variant, &image);
}

static fa_status dry_run(const fa_problem *p, fa_answer *answer)
{
    fa_cuda_device device = {0};
    fa_cuda_plan plan;
    bool current = false;
    FA_TRY(find_device(true, &device, &current));
    FA_TRY(make_plan(p, &device, answer->wants_text, &plan));
    for (int i = 0; i < plan.count; i++)
        FA_TRY(check_kernel(plan.launches[i].variant, &device, current));
    if (answer->wants_text)
        fa_cuda_plan_describe(p, &device, &plan, answer->text, sizeof answer->text);
    answer->workspace_bytes = plan.workspace_bytes;
    return FA_OK;
}

/* ---- Info ------------------------------------------------------------------------------------ */

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

static fa_status get_info(void *filled)
{
    fa_cuda_info *info = filled;
    fa_cuda_fault fault;
    const bool open = fa_cuda_open(&fault);
    info->driver_version = fa_cuda_driver_version();
    if (!open) {
        (void)snprintf(info->detail, sizeof info->detail,
                       "no usable CUDA driver: %s: %.60s (%.80s)", fault.call, fault.name,
                       fault.text);
        return FA_OK;
    }
    info->device_count = fa_cuda_device_count();
    if (info->device_count > 0) describe_cuda(info->detail, sizeof info->detail);
    else (void)snprintf(info->detail, sizeof info->detail, "the CUDA driver reports no device");
    return FA_OK;
}

const fa_backend fa_cuda_backend = {.open = open_cuda,
                                    .in_use = fa_cuda_is_loaded,
                                    .find_memory = fa_cuda_allocation_of,
                                    .device_of = fa_cuda_device_of,
                                    .out_of_reach = fa_cuda_out_of_reach,
                                    .run = run,
                                    .combine = combine,
                                    .append = append,
                                    .dry_run = dry_run,
                                    .get_info = get_info};
