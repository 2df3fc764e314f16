#include "cuda/plan.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/family.h"

/* The families of each pass, fastest first. simt, the last one, does every problem. */
enum { MAX_FAMILIES = 18 };
#define FORWARD                                                                                    \
    {                                                                                              \
        &fa_cuda_forward_mixed_beside, &fa_cuda_forward_mixed, &fa_cuda_decode_latent_sm90,        \
            &fa_cuda_decode_sm90, &fa_cuda_decode, &fa_cuda_forward_split_sm90,                    \
            &fa_cuda_forward_sm90, &fa_cuda_forward_split_sm80, &fa_cuda_forward_sm80,             \
            &fa_cuda_forward_sm75, &fa_cuda_forward_tf32_rounded,                                  \
            &fa_cuda_forward_split_tf32_sm90, &fa_cuda_forward_tf32_sm90,                          \
            &fa_cuda_forward_split_f16x3_sm90, &fa_cuda_forward_f16x3_sm90, &fa_cuda_forward_tf32, \
            &fa_cuda_forward_tf32x3, &fa_cuda_forward_simt                                         \
    }
static const fa_cuda_family *const families[][MAX_FAMILIES] = {
    [FA_PASS_FORWARD] = FORWARD,
    [FA_PASS_DECODE] = FORWARD,
    [FA_PASS_BACKWARD] = {&fa_cuda_backward_sm90_single, &fa_cuda_backward_sm90_chained,
                          &fa_cuda_backward_sm90_rounding, &fa_cuda_backward_sm90_joined,
                          &fa_cuda_backward_sm90_persistent, &fa_cuda_backward_sm90,
                          &fa_cuda_backward_sm80, &fa_cuda_backward_tf32_in_place,
                          &fa_cuda_backward_tf32, &fa_cuda_backward_tf32x3_corrected,
                          &fa_cuda_backward_tf32x3, &fa_cuda_backward_simt},
    [FA_PASS_WEIGHTS] = {&fa_cuda_weights_simt},
};

static const fa_cuda_family *find_family(fa_pass pass, const char *name)
{
    const fa_cuda_family *const *of = families[pass];
    for (int i = 0; i < MAX_FAMILIES && of[i]; i++)
        if (strcmp(of[i]->name, name) == 0) return of[i];
    return NULL;
}

const fa_cuda_family *fa_cuda_find_family(const char *name)
{
    return find_family(FA_PASS_FORWARD, name);
}

static void list_families(fa_pass pass, char *text, size_t size)
{
    const fa_cuda_family *const *of = families[pass];
    size_t used = 0;
    for (int i = 0; i < MAX_FAMILIES && of[i] && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s", i ? " " : "", of[i]->name);
}

/* ---- The family that the environment wants --------------------------------------------------- */

/* The variables; decode has forward's. */
static const char *const variables[] = {[FA_PASS_FORWARD] = "FA_CUDA_KERNEL",
                                        [FA_PASS_DECODE] = "FA_CUDA_KERNEL",
                                        [FA_PASS_BACKWARD] = "FA_CUDA_BACKWARD_KERNEL",
                                        [FA_PASS_WEIGHTS] = NULL};
enum { PASSES = sizeof variables / sizeof variables[0] };

static struct {
    pthread_once_t once;
    char names[PASSES][48]; /* "": none in particular */
} asked_for = {.once = PTHREAD_ONCE_INIT};

static void read_environment(void)
{
    for (int pass = 0; pass < PASSES; pass++) {
        const char *name = variables[pass] ? getenv(variables[pass]) : NULL;
        if (name) snprintf(asked_for.names[pass], sizeof asked_for.names[pass], "%s", name);
    }
}

bool fa_cuda_asked_family(fa_pass pass, const fa_cuda_family **asked, char *why, size_t size)
{
    pthread_once(&asked_for.once, read_environment);
    const char *name = asked_for.names[pass];
    *asked = NULL;
    if (!name[0]) return true;
    *asked = find_family(pass, name);
    if (*asked) return true;
    char names[192];
    list_families(pass, names, sizeof names);
    snprintf(why, size, "%s is \"%s\"; expected one of the families of kernels: %s",
             variables[pass], name, names);
    return false;
}

/* ---- The choice ------------------------------------------------------------------------------ */

static bool is_slower(const fa_cuda_family *family, const fa_problem *p,
                      const fa_cuda_device *device, char *why, size_t size)
{
    if (why && size) why[0] = 0;
    return family->slower && family->slower(p, device, why, size);
}

static bool plan_asked(const fa_problem *p, const fa_cuda_device *device,
                       const fa_cuda_family *asked, fa_cuda_plan *plan, char *why, size_t size)
{
    char reason[224] = "";
    const fa_cuda_family *split = asked->split;
    if (split && !is_slower(split, p, device, NULL, 0)) {
        fa_cuda_plan_begin(device, split, plan);
        if (split->plan(p, device, plan, NULL, 0)) return true;
    }
    fa_cuda_plan_begin(device, asked, plan);
    if (asked->plan(p, device, plan, why ? reason : NULL, sizeof reason)) return true;
    fa_cuda_say(why, size, "%s (%s asks for %s alone)", reason, variables[p->pass], asked->name);
    return false;
}

/* A reason that equals that of the previous family is not repeated. */
static void note_passed_over(fa_cuda_plan *plan, const char *family, const char *reason)
{
    const size_t used = strlen(plan->passed_over), length = strlen(reason);
    if (used > length && strcmp(plan->passed_over + used - length, reason) == 0) return;
    snprintf(plan->passed_over + used, sizeof plan->passed_over - used, "; not %s: %s", family,
             reason);
}

/* Whether some data pointers are missing, as in a query for the workspace. */
static bool lacks_data(const fa_problem *p)
{
    if (p->pass == FA_PASS_WEIGHTS || p->batch == 0) return false;
    return p->lacks_data || (p->pass == FA_PASS_BACKWARD && !p->dout.data);
}

static void make_room_for_plan(const fa_cuda_plan *other, fa_cuda_plan *plan)
{
    if (other->workspace_bytes > plan->workspace_bytes)
        plan->workspace_bytes = other->workspace_bytes;
}

static void make_room_for(const fa_problem *p, const fa_cuda_device *device,
                          const fa_cuda_family *family, fa_cuda_plan *plan)
{
    fa_cuda_plan other;
    if (!fa_cuda_is_tried(family, device)) return;
    fa_cuda_plan_begin(device, family, &other);
    if (family->plan(p, device, &other, NULL, 0)) make_room_for_plan(&other, plan);
}

/* A family may refuse properties that such a problem does not show yet: other strides of gradients, or data that is not
 * aligned. Then a later family takes the problem, so the workspace has room for each of them. */
static void make_room(const fa_problem *p, const fa_cuda_device *device, int first,
                      fa_cuda_plan *plan)
{
    const fa_cuda_family *const *replaced = plan->family->replaces;
    for (int i = first; i < MAX_FAMILIES && families[p->pass][i]; i++) {
        const fa_cuda_family *family = families[p->pass][i];
        if (family != replaced[0] && family != replaced[1] && family != replaced[2])
            make_room_for(p, device, family, plan);
    }
}

/* Refuses what forward_simt supports and the kernel of fa_weights does not. */
static bool refuse_quantized(const fa_problem *p, char *why, size_t size)
{
    if (p->pass != FA_PASS_WEIGHTS || (p->k.dtype != FA_INT8 && !p->k_scale.data)) return false;
    if (p->k.dtype == FA_INT8)
        fa_cuda_say(why, size,
                    "k.dtype is int8: CUDA's fa_weights has no kernel for it; the CPU has");
    else
        fa_cuda_say(
            why, size,
            "options.k_scale is set: CUDA's fa_weights has no kernel for it; float8_e4m3 can "
            "have options.k_descale");
    return true;
}

/* behind: the number of the first family that takes the problem if this family refuses its gradients. */
static bool try_family(const fa_problem *p, const fa_cuda_device *device,
                       const fa_cuda_family *family, int behind, fa_cuda_plan *plan, char *why,
                       size_t size)
{
    fa_cuda_plan_begin(device, family, plan);
    if (family->plan(p, device, plan, why, size)) {
        if (lacks_data(p)) make_room(p, device, behind, plan);
        return true;
    }
    if (why && why[0]) note_passed_over(plan, family->name, why);
    return false;
}

static bool plan_first(const fa_problem *p, const fa_cuda_device *device,
                       const fa_cuda_family *asked, fa_cuda_plan *plan, char *why, size_t size)
{
    plan->passed_over[0] = 0;
    if (refuse_quantized(p, why, size)) return false;
    if (asked && !asked->does_few) return plan_asked(p, device, asked, plan, why, size);
    if (asked && try_family(p, device, asked, 0, plan, why, size)) return true;
    for (int i = 0; i < MAX_FAMILIES && families[p->pass][i]; i++) {
        const fa_cuda_family *family = families[p->pass][i];
        if (!fa_cuda_is_tried(family, device)) continue;
        char *const words = family->does_few ? NULL : why; /* that it does not needs none */
        if (is_slower(family, p, device, words, size)) {
            if (words && words[0]) note_passed_over(plan, family->name, words);
            continue;
        }
        if (try_family(p, device, family, i + 1, plan, words, size)) return true;
    }
    return false;
}

/* Families give way to others that may refuse data that is not aligned, so then not only later families take the problem.
 * The workspace has room for what is chosen if queries, keys and values, or all of them are not aligned. */
static void make_room_for_unaligned(const fa_problem *p, const fa_cuda_device *device,
                                    const fa_cuda_family *asked, fa_cuda_plan *plan)
{
    static _Alignas(16) char memory[16]; /* not read */
    for (int unaligned = 1; unaligned <= 3; unaligned++) {
        fa_problem call = *p;
        fa_cuda_plan other;
        call.q.data = memory + (unaligned & 1 ? 8 : 0);
        call.k.data = call.v.data = memory + (unaligned & 2 ? 8 : 0);
        call.out.data = memory;
        call.lacks_data = false;
        if (plan_first(&call, device, asked, &other, NULL, 0)) make_room_for_plan(&other, plan);
    }
}

bool fa_cuda_plan_make(const fa_problem *p, const fa_cuda_device *device,
                       const fa_cuda_family *asked, fa_cuda_plan *plan, char *why, size_t size)
{
    if (!plan_first(p, device, asked, plan, why, size)) return false;
    if (p->pass != FA_PASS_BACKWARD && lacks_data(p))
        make_room_for_unaligned(p, device, asked, plan);
    return true;
}

/* ---- In words -------------------------------------------------------------------------------- */

typedef struct text {
    char *at;
    size_t left;
} text;

__attribute__((format(printf, 2, 3))) static void append(text *t, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    const int length = vsnprintf(t->at, t->left, format, arguments);
    va_end(arguments);
    const size_t used = (size_t)length < t->left ? (size_t)length : t->left - 1;
    t->at += used;
    t->left -= used;
}

static void append_launch(text *t, const fa_problem *p, const fa_cuda_plan_launch *l)
{
    const char *rows = p->pass == FA_PASS_WEIGHTS ? "row" : "query";
    if (l->tile_q) append(t, "%s tile %d, ", rows, l->tile_q);
    if (l->tile_k) append(t, "key tile %d, ", l->tile_k);
    append(t, "%" PRIu32 " blocks of %" PRIu32 " threads", l->grid, l->threads);
}

static void append_parts(text *t, int parts)
{
    append(t, ", keys in at most %d part%s", parts, parts == 1 ? "" : "s");
}

/* One launch: "NAME: arithmetic, tiles, blocks"; several: "NAME (tiles, blocks), ...: arithmetic". */
void fa_cuda_plan_describe(const fa_problem *p, const fa_cuda_device *device,
                           const fa_cuda_plan *plan, char *to, size_t size)
{
    static const char *const passes[] = {[FA_PASS_FORWARD] = "forward",
                                         [FA_PASS_DECODE] = "decode",
                                         [FA_PASS_BACKWARD] = "backward",
                                         [FA_PASS_WEIGHTS] = "weights"};
    text t = {to, size};
    append(&t, "cuda %s ", passes[p->pass]);
    for (int i = 0; i < plan->count; i++) {
        append(&t, "%s%s", i ? ", " : "", fa_variants[plan->launches[i].variant].name);
        if (plan->count == 1) break;
        append(&t, " (");
        append_launch(&t, p, &plan->launches[i]);
        append(&t, ")");
    }
    append(&t, ": %s", plan->arithmetic);
    if (plan->count == 1) {
        append(&t, ", ");
        append_launch(&t, p, &plan->launches[0]);
    }
    append(&t, " on sm_%d%d", (int)device->major, (int)device->minor);
    if (plan->family == &fa_cuda_decode || plan->family == &fa_cuda_decode_latent_sm90 ||
        plan->family == &fa_cuda_decode_sm90 || plan->family == &fa_cuda_forward_mixed ||
        plan->family == &fa_cuda_forward_mixed_beside)
        append_parts(&t, plan->launches[0].decode.parts);
    else if (plan->family == &fa_cuda_forward_split_tf32_sm90 ||
             plan->family == &fa_cuda_forward_split_f16x3_sm90)
        append_parts(&t, plan->launches[0].sm90.split.parts);
    else if (plan->family == &fa_cuda_forward_split_sm90)
        append_parts(&t, plan->count > 1 ? plan->launches[0].sm90.split.parts : 1);
    else if (plan->family == &fa_cuda_forward_split_sm80)
        append_parts(&t, plan->launches[0].sm80.split.parts);
    else if (p->pass == FA_PASS_DECODE) append(&t, ", the forward kernel: keys are not split");
    append(&t, "%s", plan->passed_over);
}
