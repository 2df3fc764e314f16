#include "cuda/checks.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/family.h"

enum {
    WAITING = 64,   /* of calls that wait for their report and then release the slot */
    CAPTURED = 192, /* of captured calls, which keep their slot */
    REPORTS = WAITING + CAPTURED,
    CONTEXTS = 64
};

/* A report in a line of its own. */
typedef union slot {
    fa_check_report report;
    char line[64];
} slot;

struct fa_cuda_checks {
    unsigned long long context; /* its number, which no other context gets */
    slot *slots;                /* pinned: the driver frees them with the context */
    bool busy[WAITING];
    int captured; /* how many have been given */
};

/* Guards all of the tables. No thread waits for a device while it holds this. */
static pthread_mutex_t tables = PTHREAD_MUTEX_INITIALIZER;
static fa_cuda_checks contexts[CONTEXTS];
static int count;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool wanted;

static void read_environment(void)
{
    const char *check = getenv("FA_CHECK");
    wanted = check && *check && strcmp(check, "0") != 0;
}

bool fa_cuda_checks_wanted(void)
{
    pthread_once(&once, read_environment);
    return wanted;
}

/* With `tables` held. */
static fa_cuda_checks *add_context(unsigned long long context, fa_cuda_fault *fault)
{
    fa_cuda_checks *c = &contexts[count < CONTEXTS ? count : CONTEXTS - 1];
    void *slots = NULL;
    if (!fa_cuda_allocate_pinned(&slots, REPORTS * sizeof(slot), fault)) return NULL;
    memset(slots, 0, REPORTS * sizeof(slot));
    *c = (fa_cuda_checks){.context = context, .slots = slots};
    if (count < CONTEXTS) count++;
    return c;
}

fa_cuda_checks *fa_cuda_checks_here(fa_cuda_fault *fault)
{
    unsigned long long context;
    fa_cuda_checks *found = NULL;
    if (!fa_cuda_context_number(&context, fault)) return NULL;
    pthread_mutex_lock(&tables);
    for (int i = 0; i < count && !found; i++)
        if (contexts[i].context == context) found = &contexts[i];
    if (!found) found = add_context(context, fault);
    pthread_mutex_unlock(&tables);
    return found;
}

/* The device writes kind last, and the host reads it first. */
static int32_t read_kind(slot *s)
{
    return atomic_load_explicit((_Atomic(int32_t) *)(void *)&s->report.kind, memory_order_acquire);
}

static bool take_report(slot *s, fa_check_report *found)
{
    if (read_kind(s) == FA_CHECK_FINE) return false;
    *found = s->report;
    memset(&s->report, 0, sizeof s->report);
    return true;
}

bool fa_cuda_checks_take(fa_cuda_checks *c, fa_check_report *found)
{
    bool taken = false;
    pthread_mutex_lock(&tables);
    for (int i = 0; i < c->captured && !taken; i++)
        taken = take_report(&c->slots[WAITING + i], found);
    pthread_mutex_unlock(&tables);
    return taken;
}

/* Takes a slot for a call that waits; -1: none is free. */
static int try_slot(fa_cuda_checks *c)
{
    int slot = -1;
    pthread_mutex_lock(&tables);
    for (int i = 0; i < WAITING && slot < 0; i++)
        if (!c->busy[i]) slot = i;
    if (slot >= 0) c->busy[slot] = true;
    pthread_mutex_unlock(&tables);
    return slot;
}

static void give_back(fa_cuda_checks *c, int slot)
{
    pthread_mutex_lock(&tables);
    c->busy[slot] = false;
    pthread_mutex_unlock(&tables);
}

/* The slot of a captured call. When all are in use, further calls share the last one, where a later
 * report may replace an earlier one. */
static slot *captured_slot(fa_cuda_checks *c)
{
    pthread_mutex_lock(&tables);
    if (c->captured < CAPTURED) c->captured++;
    slot *s = &c->slots[WAITING + c->captured - 1];
    pthread_mutex_unlock(&tables);
    return s;
}

bool fa_cuda_check_params(const fa_problem *p, const fa_options *o, fa_check_params *params)
{
    /* Of fa_weights, n_k is the width of its result. */
    const int64_t room_k = p->block_table ? p->block_table_stride * p->rows_k : p->rows_k;
    *params =
        (fa_check_params){.side = {{p->cu_seqlens_q, p->seqlens_q, o->max_seqlen_q, p->rows_q},
                                   {p->cu_seqlens_k, p->seqlens_k, o->max_seqlen_k, room_k}},
                          .batch = p->batch,
                          .block_table = p->block_table,
                          .block_table_stride = p->block_table_stride,
                          .page_rows = p->rows_k,
                          .pages = p->blocks_k,
                          .rows = p->weight_rows,
                          .num_rows = p->num_weight_rows,
                          .n_q = p->n_q};
    const fa_check_side *s = params->side;
    return s[0].cu_seqlens || s[0].seqlens || s[1].cu_seqlens || s[1].seqlens || params->rows;
}

static bool queue_check(void *kernel, const fa_cuda_plan *plan, const fa_cuda_plan_launch *l,
                        const fa_cuda_call *call, fa_cuda_fault *fault)
{
    fa_check_params params = *call->check;
    return fa_cuda_queue(kernel, plan, l, call->stream, (void *[]){&params}, fault);
}

bool fa_cuda_plan_check(const fa_cuda_device *device, fa_cuda_plan *plan, char *why, size_t size)
{
    plan->passed_over[0] = 0;
    fa_cuda_plan_begin(device, NULL, plan);
    fa_cuda_plan_launch *l = fa_cuda_plan_add(&fa_variants[FA_VARIANT_check_simt], FA_CHECK_THREADS,
                                              FA_CHECK_SMEM, queue_check, device, plan, why, size);
    if (!l) return false;
    fa_cuda_set_tasks(l, 1, 1);
    return true;
}

static bool queue(const fa_cuda_plan *plan, void *const kernels[FA_CUDA_LAUNCHES],
                  fa_check_params params, slot *to, void *stream, fa_cuda_fault *fault)
{
    const fa_cuda_call call = {.check = &params, .stream = stream};
    params.report = &to->report;
    return fa_cuda_plan_queue(plan, kernels, &call, fault);
}

bool fa_cuda_check(fa_cuda_checks *c, const fa_cuda_plan *plan,
                   void *const kernels[FA_CUDA_LAUNCHES], const fa_check_params *params,
                   void *stream, fa_check_report *found, fa_cuda_fault *fault)
{
    bool capturing = true; /* also where the driver does not tell */
    memset(found, 0, sizeof *found);
    if (!fa_cuda_capture_status(stream, &capturing) || capturing)
        return queue(plan, kernels, *params, captured_slot(c), stream, fault);
    int slot = try_slot(c);
    for (; slot < 0; slot = try_slot(c)) sched_yield();
    const bool fine = queue(plan, kernels, *params, &c->slots[slot], stream, fault) &&
                      fa_cuda_stream_wait(stream, fault);
    if (fine) take_report(&c->slots[slot], found);
    give_back(c, slot);
    return fine;
}
