/* GPUs: choosing one, memory, time, and random problems that are moved to a GPU. */
#include "device.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "output.h"

#ifdef FA_HAVE_CUDA
#include "cuda/driver.h"

/* ---- choosing -------------------------------------------------------------------------------- */

static bool fail(const fa_cuda_fault *fault)
{
    cli_error("%s failed: %s (%s)", fault->call, fault->name, fault->text);
    return false;
}

/* Problems that represent all others. Float32 is last, because its error is the one that is
 * printed. */
static const struct {
    fa_dtype dtype;
    int64_t heads_k, dim, dim_v;
} usual_problems[] = {
    {FA_BFLOAT16, 8, 64, 64},
    {FA_FLOAT16, 8, 64, 64},
    {FA_BFLOAT16, 1, 576, 512}, /* latent attention */
    {FA_FLOAT32, 8, 64, 64},
};

/* FA_CUDA_KERNEL may ask for a family that takes only some types or head dims. */
static bool is_usable(fa_pass pass)
{
    enum { COUNT = sizeof usual_problems / sizeof usual_problems[0] };
    for (int i = 0; i < COUNT; i++) {
        const fa_dtype dtype = usual_problems[i].dtype;
        const int64_t heads_k = usual_problems[i].heads_k;
        fa_tensor q = fa_bshd(NULL, dtype, 1, 128, 8, usual_problems[i].dim);
        fa_tensor k = fa_bshd(NULL, dtype, 1, 128, heads_k, usual_problems[i].dim);
        fa_tensor v = k; /* values are the first columns of keys */
        v.shape[3] = usual_problems[i].dim_v;
        fa_tensor out = fa_bshd(NULL, dtype, 1, 128, 8, usual_problems[i].dim_v);
        fa_options o = {.size = sizeof o, .device = FA_DEVICE_CUDA};
        if (fa_supported(pass, &q, &k, &v, &out, &o) == FA_OK) return true;
    }
    return false;
}

/* Makes the first GPU's context current. Without a GPU, the library's error explains that. */
static bool use_first(fa_cuda_fault *fault)
{
    return fa_cuda_device_count() == 0 || fa_cuda_use_device(0, fault);
}

bool device_choose(fa_device *device, fa_pass pass)
{
    fa_cuda_fault fault;
    if (*device == FA_DEVICE_CPU) return true;
    const bool current = use_first(&fault);
    const bool fine = current && is_usable(pass);
    if (*device == FA_DEVICE_AUTO) *device = fine ? FA_DEVICE_CUDA : FA_DEVICE_CPU;
    else if (!current) return fail(&fault);
    else if (!fine) cli_error("--device cuda: %s", fa_last_error());
    return fine || *device == FA_DEVICE_CPU;
}

/* ---- memory and time ------------------------------------------------------------------------- */

void *device_new(size_t bytes)
{
    fa_cuda_fault fault;
    void *memory;
    if (fa_cuda_allocate(&memory, bytes ? bytes : 1, &fault)) return memory;
    size_t left = 0;
    (void)fa_cuda_memory_left(&left, &(fa_cuda_fault){0});
    cli_error("the GPU has no room for another %.3f GiB; %.3f GiB are free (%s: %s)",
              (double)bytes / 0x1p30, (double)left / 0x1p30, fault.call, fault.name);
    return NULL;
}

void device_delete(void *memory)
{
    if (memory) fa_cuda_free(memory);
}

bool device_put(void *to, const void *from, size_t bytes)
{
    fa_cuda_fault fault;
    return bytes == 0 || fa_cuda_copy_in(to, from, bytes, &fault) || fail(&fault);
}

bool device_get(void *to, const void *from, size_t bytes)
{
    fa_cuda_fault fault;
    return bytes == 0 || fa_cuda_copy_out(to, from, bytes, &fault) || fail(&fault);
}

bool device_wait(void)
{
    fa_cuda_fault fault;
    return fa_cuda_synchronize(&fault) || fail(&fault);
}

double device_cache_bytes(void)
{
    fa_cuda_device device;
    return fa_cuda_get_device(0, &device, &(fa_cuda_fault){0}) ? (double)device.l2_bytes : 0;
}

bool device_clock_new(device_clock *clock)
{
    fa_cuda_fault fault;
    return (fa_cuda_event_new(&clock->begin, &fault) && fa_cuda_event_new(&clock->end, &fault)) ||
           fail(&fault);
}

void device_clock_free(device_clock *clock)
{
    if (clock->begin) fa_cuda_event_free(clock->begin);
    if (clock->end) fa_cuda_event_free(clock->end);
}

bool device_clock_begin(device_clock *clock)
{
    fa_cuda_fault fault;
    return fa_cuda_event_record(clock->begin, NULL, &fault) || fail(&fault);
}

bool device_clock_end(device_clock *clock, double *seconds)
{
    fa_cuda_fault fault;
    return (fa_cuda_event_record(clock->end, NULL, &fault) &&
            fa_cuda_event_seconds(clock->begin, clock->end, seconds, &fault)) ||
           fail(&fault);
}

/* ---- copies ---------------------------------------------------------------------------------- */

static void *load_pointer(const void *pointer_at)
{
    void *pointer;
    memcpy(&pointer, pointer_at, sizeof pointer);
    return pointer;
}

static void store_pointer(void *pointer_at, void *pointer)
{
    memcpy(pointer_at, &pointer, sizeof pointer);
}

void device_copies_add(device_copies *copies, void *pointer_at, size_t bytes, bool result)
{
    void *host = load_pointer(pointer_at);
    if (!host || bytes == 0) return;
    if (copies->count == DEVICE_MAX_COPIES) abort();
    copies->list[copies->count++] = (device_copy){pointer_at, host, NULL, bytes, result};
}

void device_copies_add_tensor(device_copies *copies, cli_tensor *t, bool result)
{
    const int64_t *s = t->view.shape;
    const size_t bytes = (size_t)(s[0] * s[1] * s[2] * s[3]) * fa_dtype_size(t->view.dtype);
    device_copies_add(copies, &t->view.data, bytes, result);
}

/* Checks the memory for all copies, so that the error comes before a part of them has been made. */
static bool check_room(const device_copies *copies)
{
    size_t needed = 0, left;
    fa_cuda_fault fault;
    for (int i = 0; i < copies->count; i++) needed += copies->list[i].bytes;
    if (!fa_cuda_memory_left(&left, &fault)) return fail(&fault);
    if (needed <= left) return true;
    cli_error("the problem needs %.3f GiB of the GPU's memory, and %.3f GiB are free",
              (double)needed / 0x1p30, (double)left / 0x1p30);
    return false;
}

bool device_copies_in(device_copies *copies)
{
    if (!check_room(copies)) return false;
    for (int i = 0; i < copies->count; i++) {
        device_copy *c = &copies->list[i];
        c->device = device_new(c->bytes);
        if (!c->device || !device_put(c->device, c->host, c->bytes)) return false;
        store_pointer(c->pointer_at, c->device);
    }
    return true;
}

bool device_copies_out(device_copies *copies)
{
    if (copies->count == 0) return true;
    if (!device_wait()) return false;
    for (int i = 0; i < copies->count; i++) {
        const device_copy *c = &copies->list[i];
        if (c->result && !device_get(c->host, c->device, c->bytes)) return false;
    }
    return true;
}

void device_copies_free(device_copies *copies)
{
    for (int i = 0; i < copies->count; i++) {
        device_copy *c = &copies->list[i];
        if (!c->device) continue;
        store_pointer(c->pointer_at, c->host);
        device_delete(c->device);
    }
    copies->count = 0;
}

/* ---- random problems ------------------------------------------------------------------------- */

enum { ALIGNMENT = 256, GUARD = 256, POISON = 0xff };

/* Chooses the offset of each buffer: they are separate, with the alignment that they have on the
 * host and no more. */
static size_t place_buffers(const ref_buffers *buffers, size_t offset[REF_MAX_BUFFERS])
{
    size_t end = 0;
    for (int i = 0; i < buffers->count; i++) {
        const ref_buffer *b = &buffers->list[i];
        offset[i] = (end + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + (uintptr_t)b->base % ALIGNMENT;
        end = offset[i] + b->reserved;
    }
    return end;
}

static void free_memory(device_arena *arena)
{
    free(arena->host);
    free(arena->first);
    device_delete(arena->device);
    arena->host = arena->first = arena->device = NULL;
    arena->bytes = 0;
}

static bool reserve(device_arena *arena, size_t bytes)
{
    if (bytes <= arena->bytes) return true;
    free_memory(arena);
    arena->bytes = 2 * bytes > (size_t)1 << 26 ? 2 * bytes : (size_t)1 << 26;
    arena->host = malloc(arena->bytes);
    arena->first = malloc(arena->bytes);
    arena->device = device_new(arena->bytes);
    if (!arena->host || !arena->first) cli_error("out of memory for %zu bytes", arena->bytes);
    return arena->host && arena->first && arena->device;
}

bool device_arena_new(device_arena *arena, int worker)
{
    fa_cuda_fault fault;
    *arena = (device_arena){0};
    return (fa_cuda_use_device(worker % fa_cuda_device_count(), &fault) &&
            fa_cuda_stream_new(&arena->stream, &fault)) ||
           fail(&fault);
}

void device_arena_free(device_arena *arena)
{
    free_memory(arena);
    fa_cuda_stream_free(arena->stream);
    arena->stream = NULL;
}

/* One problem in the arena: its buffers, then a workspace between guard bands. */
typedef struct moved {
    const device_arena *arena;
    const ref_buffers *buffers;
    size_t offset[REF_MAX_BUFFERS], workspace, workspace_bytes, end;
} moved;

/* Replaces a host pointer by the device's. */
static void translate(const moved *m, void *pointer_at)
{
    const char *host = load_pointer(pointer_at);
    for (int i = 0; host && i < m->buffers->count; i++) {
        const ref_buffer *b = &m->buffers->list[i];
        if (host < b->base || host > b->base + b->reserved) continue;
        store_pointer(pointer_at, m->arena->device + m->offset[i] + (host - b->base));
        return;
    }
}

static void translate_options(const moved *m, fa_options *o)
{
    void *pointers[] = {&o->alibi_slopes, &o->sinks,     &o->dropout_state, &o->cu_seqlens_q,
                        &o->cu_seqlens_k, &o->seqlens_q, &o->seqlens_k,     &o->block_table,
                        &o->q_descale,    &o->k_descale, &o->v_descale};
    for (int i = 0; i < CLI_COUNT(pointers); i++) translate(m, pointers[i]);
}

static bool move_in(const moved *m)
{
    fa_cuda_fault fault;
    const device_arena *a = m->arena;
    memset(a->host + m->workspace - GUARD, POISON, m->workspace_bytes + 2 * GUARD);
    for (int i = 0; i < m->buffers->count; i++) {
        const ref_buffer *b = &m->buffers->list[i];
        memcpy(a->host + m->offset[i], b->base, b->reserved);
    }
    return fa_cuda_queue_copy_in(a->device, a->host, m->end, a->stream, &fault) || fail(&fault);
}

static bool move_out(const moved *m)
{
    fa_cuda_fault fault;
    const device_arena *a = m->arena;
    return (fa_cuda_queue_copy_out(a->host, a->device, m->end, a->stream, &fault) &&
            fa_cuda_stream_wait(a->stream, &fault)) ||
           fail(&fault);
}

static void hand_back(const moved *m)
{
    for (int i = 0; i < m->buffers->count; i++) {
        const ref_buffer *b = &m->buffers->list[i];
        memcpy(b->base, m->arena->host + m->offset[i], b->reserved);
    }
}

static bool is_poison(const char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)p[i] != POISON) return false;
    return true;
}

/* Whether a second run must leave the same bits in a buffer: the sums of dq may have any order. */
static bool is_repeatable(const random_call *call, const ref_buffer *b)
{
    const bool ordered = call->pass != RANDOM_BACKWARD || call->options.flags & FA_DETERMINISTIC;
    return ordered || (strcmp(b->name, "dq") != 0 && strcmp(b->name, "dbias") != 0);
}

/* False if the results of two runs are wrong, or differ although they must not; message explains
 * why. */
static bool compare_runs(const moved *m, const random_call *call, char *message, size_t size)
{
    const char *workspace = m->arena->host + m->workspace;
    message[0] = 0;
    for (int i = 0; i < m->buffers->count && !message[0]; i++) {
        const ref_buffer *b = &m->buffers->list[i];
        const char *x = m->arena->first + m->offset[i], *y = m->arena->host + m->offset[i];
        size_t at = 0;
        if (!is_repeatable(call, b) || memcmp(x, y, b->reserved) == 0) continue;
        while (x[at] == y[at]) at++;
        snprintf(message, size, "a second run left other bits in %s, from byte %zd on", b->name,
                 (ssize_t)(at - (size_t)(b->data - b->base)));
    }
    if (!is_poison(workspace - GUARD, GUARD))
        snprintf(message, size, "memory before the workspace was written");
    if (!is_poison(workspace + m->workspace_bytes, GUARD))
        snprintf(message, size, "memory after the workspace was written");
    return !message[0];
}

/* Replaces a tensor that options point to by a copy whose data are on the device. */
static void translate_tensor(const moved *m, const fa_tensor **given, fa_tensor *copy)
{
    if (!*given) return;
    *copy = **given;
    translate(m, &copy->data);
    *given = copy;
}

static void translate_gradients(const moved *m, fa_gradients *g)
{
    void *pointers[] = {&g->dout.data, &g->dlse,       &g->dq.data, &g->dk.data,
                        &g->dv.data,   &g->dbias.data, &g->dsinks};
    for (int i = 0; i < CLI_COUNT(pointers); i++) translate(m, pointers[i]);
}

enum { MAX_PARTS = 16 };

/* The arrays of a call of fa_combine. */
typedef struct moved_parts {
    fa_tensor tensors[MAX_PARTS];
    const float *lse[MAX_PARTS];
} moved_parts;

static void translate_parts(const moved *m, random_call *c, moved_parts *parts)
{
    if (c->num_parts > MAX_PARTS) abort();
    for (int64_t i = 0; i < c->num_parts; i++) {
        parts->tensors[i] = c->parts[i];
        parts->lse[i] = c->part_lse[i];
        translate(m, &parts->tensors[i].data);
        translate(m, &parts->lse[i]);
    }
    c->parts = parts->tensors;
    c->part_lse = parts->lse;
}

static fa_status call_library(const moved *m, const random_call *given)
{
    moved_parts parts;
    random_call c = *given;
    fa_tensor bias, mask, k_scale, v_scale;
    c.options.stream = m->arena->stream;
    c.options.workspace = m->workspace_bytes ? m->arena->device + m->workspace : NULL;
    c.options.workspace_size = m->workspace_bytes;
    void *pointers[] = {&c.q.data, &c.k.data, &c.v.data,      &c.out.data,
                        &c.lse,    &c.rows,   &c.weights.data};
    for (int i = 0; i < CLI_COUNT(pointers); i++) translate(m, pointers[i]);
    translate_options(m, &c.options);
    translate_gradients(m, &c.gradients);
    translate_parts(m, &c, &parts);
    translate_tensor(m, &c.options.bias, &bias);
    translate_tensor(m, &c.options.mask, &mask);
    translate_tensor(m, &c.options.k_scale, &k_scale);
    translate_tensor(m, &c.options.v_scale, &v_scale);
    return random_call_run(&c);
}

/* Additional workspace for the sums of a dbias (flashattn.h). Every second problem has none. */
static size_t dbias_workspace(const random_call *call)
{
    const fa_tensor *dbias = &call->gradients.dbias;
    const int64_t *n = dbias->shape;
    if (call->pass != RANDOM_BACKWARD || !dbias->data || n[2] % 2) return 0;
    return (size_t)(n[0] * n[1] * n[2] * n[3]) * sizeof(float) + 256;
}

/* Chooses the place of a workspace of the size that the call needs. */
static fa_status place_workspace(const random_call *call, moved *m)
{
    static const fa_pass passes[] = {FA_PASS_FORWARD, FA_PASS_BACKWARD, FA_PASS_DECODE,
                                     FA_PASS_WEIGHTS};
    const bool weights = call->pass == RANDOM_WEIGHTS;
    m->workspace = (m->end + GUARD + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    m->workspace_bytes = 0;
    const fa_status status =
        call->pass == RANDOM_COMBINE
            ? FA_OK
            : fa_workspace_size(passes[call->pass], &call->q, &call->k, weights ? NULL : &call->v,
                                weights ? NULL : &call->out, &call->options, &m->workspace_bytes);
    m->workspace_bytes += dbias_workspace(call);
    m->end = m->workspace + m->workspace_bytes + GUARD;
    return status;
}

/* Makes both runs; the arena then holds the results of each. */
static fa_status run_twice(const moved *m, const random_call *call, char *message, size_t size)
{
    for (int run = 0; run < 2; run++) {
        if (run) memcpy(m->arena->first, m->arena->host, m->end);
        if (!move_in(m)) return FA_ERROR_DEVICE;
        const fa_status status = call_library(m, call);
        if (status != FA_OK) {
            snprintf(message, size, "%s", fa_last_error());
            return status;
        }
        if (!move_out(m)) return FA_ERROR_DEVICE;
    }
    return FA_OK;
}

fa_status device_attend(void *context, const random_call *call, char *message, size_t size)
{
    device_arena *arena = context;
    moved m = {.arena = arena, .buffers = call->buffers};
    m.end = place_buffers(m.buffers, m.offset);
    fa_status status = place_workspace(call, &m);
    if (status != FA_OK) {
        snprintf(message, size, "fa_workspace_size: %s", fa_last_error());
        return status;
    }
    snprintf(message, size, "the GPU failed");
    if (!reserve(arena, m.end)) return FA_ERROR_MEMORY;
    status = run_twice(&m, call, message, size);
    if (status != FA_OK) return status;
    hand_back(&m);
    return compare_runs(&m, call, message, size) ? FA_OK : (fa_status)RANDOM_WRONG;
}

#else

/* Without CUDA, nothing after device_choose is ever called. */
bool device_choose(fa_device *device, fa_pass pass)
{
    (void)pass;
    if (*device == FA_DEVICE_AUTO) *device = FA_DEVICE_CPU;
    if (*device == FA_DEVICE_CPU) return true;
    fa_cuda_info info;
    (void)fa_get_cuda_info(&info);
    cli_error("--device cuda: %s; expected a library with CUDA kernels and a GPU, or --device cpu",
              info.detail);
    return false;
}

void device_copies_add(device_copies *copies, void *pointer_at, size_t bytes, bool result)
{
    (void)copies, (void)pointer_at, (void)bytes, (void)result;
}

void device_copies_add_tensor(device_copies *copies, cli_tensor *t, bool result)
{
    (void)copies, (void)t, (void)result;
}

bool device_copies_in(device_copies *copies) { return copies == NULL; }
bool device_copies_out(device_copies *copies) { return copies == NULL; }
void device_copies_free(device_copies *copies) { copies->count = 0; }

void *device_new(size_t bytes)
{
    (void)bytes;
    return NULL;
}

void device_delete(void *memory) { (void)memory; }

bool device_put(void *to, const void *from, size_t bytes)
{
    (void)to, (void)from, (void)bytes;
    return false;
}

bool device_get(void *to, const void *from, size_t bytes)
{
    (void)to, (void)from, (void)bytes;
    return false;
}

bool device_wait(void) { return false; }
double device_cache_bytes(void) { return 0; }

bool device_clock_new(device_clock *clock) { return clock == NULL; }
void device_clock_free(device_clock *clock) { (void)clock; }
bool device_clock_begin(device_clock *clock) { return clock == NULL; }

bool device_clock_end(device_clock *clock, double *seconds)
{
    (void)seconds;
    return clock == NULL;
}

fa_status device_attend(void *context, const random_call *call, char *message, size_t size)
{
    (void)context, (void)call, (void)message, (void)size;
    return FA_ERROR_DEVICE;
}

bool device_arena_new(device_arena *arena, int worker)
{
    *arena = (device_arena){0};
    return worker < 0;
}

void device_arena_free(device_arena *arena) { arena->bytes = 0; }

#endif
