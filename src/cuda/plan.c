#include "cuda/plan.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "cuda/family.h"

/* Fastest first. The last one does every problem. */
static const fa_cuda_family *const families[] = {&fa_cuda_family_sm90, &fa_cuda_family_sm80,
                                                 &fa_cuda_family_sm75, &fa_cuda_family_simt};
enum { FAMILIES = sizeof families / sizeof families[0] };

const fa_cuda_family *fa_cuda_find_family(const char *name)
{
    for (int i = 0; i < FAMILIES; i++)
        if (strcmp(families[i]->name, name) == 0) return families[i];
    return NULL;
}

void fa_cuda_family_names(char *text, size_t size)
{
    size_t used = 0;
    for (int i = 0; i < FAMILIES && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s", i ? " " : "", families[i]->name);
}

/* ---- What the families share ----------------------------------------------------------------- */

void fa_cuda_say(char *why, size_t size, const char *format, ...)
{
    va_list arguments;
    if (!why) return;
    va_start(arguments, format);
    vsnprintf(why, size, format, arguments);
    va_end(arguments);
}

static int architecture_of(const fa_cuda_device *device)
{
    return 10 * device->major + device->minor;
}

static bool refuse_architecture(const fa_variant *v, const fa_cuda_device *device, char *why,
                                size_t size)
{
    const bool hopper_alone = v->architecture == 90;
    const int architecture = architecture_of(device);
    if (architecture == v->architecture || (architecture > v->architecture && !hopper_alone))
        return false;
    fa_cuda_say(why, size, "CUDA device %" PRId32 " (%s) has architecture %d.%d: expected %d.%d%s",
                device->ordinal, device->name, (int)device->major, (int)device->minor,
                v->architecture / 10, v->architecture % 10, hopper_alone ? "" : " or later");
    return true;
}

static bool refuse_smem(const fa_variant *v, int smem_bytes, const fa_cuda_device *device,
                        char *why, size_t size)
{
    const int needed = smem_bytes + FA_CUDA_STATIC_SMEM;
    if (needed <= device->smem_per_block) return false;
    fa_cuda_say(why, size,
                "CUDA device %" PRId32
                " (%s) has %d bytes of shared memory for a block: expected %d for %s",
                device->ordinal, device->name, (int)device->smem_per_block, needed, v->name);
    return true;
}

bool fa_cuda_plan_variant(const fa_variant *v, int smem_bytes, const fa_cuda_device *device,
                          fa_cuda_plan *plan, char *why, size_t size)
{
    if (refuse_architecture(v, device, why, size) || refuse_smem(v, smem_bytes, device, why, size))
        return false;
    plan->device = device->ordinal;
    plan->variant = (int)(v - fa_variants);
    plan->smem_bytes = (uint32_t)smem_bytes;
    return true;
}

bool fa_cuda_refuse_dtypes(const fa_problem *p, bool bfloat, char *why, size_t size)
{
    const struct {
        const char *name;
        fa_dtype dtype;
    } tensors[] = {{"q", p->q.dtype}, {"k", p->k.dtype}, {"v", p->v.dtype}, {"out", p->out.dtype}};
    for (int i = 0; i < 4; i++) {
        const fa_dtype dtype = tensors[i].dtype;
        if (dtype == p->q.dtype && (dtype == FA_FLOAT16 || (dtype == FA_BFLOAT16 && bfloat)))
            continue;
        fa_cuda_say(why, size, "%s.dtype is %s", tensors[i].name, fa_dtype_name(dtype));
        return true;
    }
    return false;
}

bool fa_cuda_refuse_rows(const fa_problem *p, int64_t most, char *why, size_t size)
{
    if (p->rows_q <= most && p->n_k <= most) return false;
    fa_cuda_say(why, size, "%s.shape[1] is %" PRId64, p->rows_q > most ? "q" : "k",
                p->rows_q > most ? p->rows_q : p->n_k);
    return true;
}

bool fa_cuda_changes_scores(const fa_problem *p)
{
    return p->softcap > 0 || p->alibi_slopes || p->bias.data || p->mask.data ||
           p->dropout_threshold;
}

bool fa_cuda_has_own_lengths(const fa_problem *p)
{
    return p->cu_seqlens_q || p->cu_seqlens_k || p->seqlens_q || p->seqlens_k;
}

uint32_t fa_cuda_grid(int64_t tasks)
{
    const int64_t most = 2147483647; /* of a grid's first axis */
    return (uint32_t)(tasks < most ? tasks : most);
}

void fa_cuda_plan_tiles(const fa_problem *p, int tile_q, fa_cuda_plan *plan)
{
    plan->tile_q = tile_q;
    plan->tiles =
        p->cu_seqlens_q ? p->rows_q / tile_q + p->batch + 2 : (p->rows_q + tile_q - 1) / tile_q;
    plan->tasks = plan->tiles * p->heads_q * (p->cu_seqlens_q ? 1 : p->batch);
    plan->grid = fa_cuda_grid(plan->tasks);
}

/* ---- The choice ------------------------------------------------------------------------------ */

static bool plan_asked(const fa_problem *p, const fa_cuda_device *device,
                       const fa_cuda_family *family, fa_cuda_plan *plan, char *why, size_t size)
{
    char reason[224] = "";
    plan->family = family;
    if (family->plan(p, device, plan, why ? reason : NULL, sizeof reason)) return true;
    fa_cuda_say(why, size, "%s (FA_CUDA_KERNEL asks for %s alone)", reason, family->name);
    return false;
}

static bool is_tried(const fa_cuda_family *family, const fa_cuda_device *device)
{
    const int architecture = architecture_of(device);
    return architecture >= family->oldest && architecture <= family->newest;
}

/* The same reason as the family's before is not said twice. */
static void note_passed_over(fa_cuda_plan *plan, const char *family, const char *reason)
{
    const size_t used = strlen(plan->passed_over), length = strlen(reason);
    if (used > length && strcmp(plan->passed_over + used - length, reason) == 0) return;
    snprintf(plan->passed_over + used, sizeof plan->passed_over - used, "; not %s: %s", family,
             reason);
}

bool fa_cuda_plan_make(const fa_problem *p, const fa_cuda_device *device,
                       const fa_cuda_family *asked, fa_cuda_plan *plan, char *why, size_t size)
{
    memset(plan, 0, offsetof(fa_cuda_plan, maps));
    plan->passed_over[0] = 0;
    if (asked) return plan_asked(p, device, asked, plan, why, size);
    for (int i = 0; i < FAMILIES; i++) {
        if (!is_tried(families[i], device)) continue;
        plan->family = families[i];
        if (families[i]->plan(p, device, plan, why, size)) return true;
        if (why) note_passed_over(plan, families[i]->name, why);
    }
    return false;
}

void fa_cuda_plan_describe(const fa_problem *p, const fa_cuda_device *device,
                           const fa_cuda_plan *plan, char *text, size_t size)
{
    const bool decode = p->pass == FA_PASS_DECODE;
    snprintf(text, size,
             "cuda %s %s: %s, query tile %d, key tile %d, %" PRIu32 " blocks of %" PRIu32
             " threads on sm_%d%d%s%s",
             decode ? "decode" : "forward", fa_variants[plan->variant].name, plan->arithmetic,
             plan->tile_q, plan->tile_k, plan->grid, plan->threads, (int)device->major,
             (int)device->minor, decode ? ", the forward kernel: keys are not split yet" : "",
             plan->passed_over);
}
