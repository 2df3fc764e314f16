/* Fibers: each is created once, and kept for later blocks and kernels. */
#undef _FORTIFY_SOURCE
#include "cuda_on_cpu.h"

#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include "buffers.h"

enum {
    MOST_THREADS = 1024,
    WARP = 32,
    MOST_WARPS = MOST_THREADS / WARP,
    NAMED_BARRIERS = 16,
    WINDOW = 1024,     /* the address of shared memory */
    LEAST_STATIC = 16, /* bytes before dynamic memory */
    RANK_BIT = 24,     /* the first bit of a block's number in its cluster, in an address */
    STACK = 128 * 1024,
    GUARD = 4096,
    MOST_SHARED = 32, /* bytes that a lane passes to its warp at a time */
    MOST_COPIES = 512 /* pending ones of a thread */
};

cuda_index cuda_thread, cuda_block, cuda_grid;
float *cuda_shared_memory;

/* The __shared__ variables of each file. A kernel uses those of its own one: the first that it stores to
 * tells which. */
typedef struct variables {
    char *first;
    size_t bytes;
} variables;
enum { MOST_FILES = 512 };
static variables files[MOST_FILES];
static int num_files;
static size_t most_bytes;     /* of a file */
static const variables *ours; /* the running kernel's; NULL: it has not stored to any yet */

CUDA_HAS_VARIABLES(cuda_shared) /* of files without a name of their own */

void cuda_has_variables(char *first, char *end)
{
    if (num_files == MOST_FILES) abort();
    files[num_files++] = (variables){first, (size_t)(end - first)};
    if (most_bytes < (size_t)(end - first)) most_bytes = (size_t)(end - first);
}

static bool is_untouched(const variables *v)
{
    return (unsigned char)v->first[0] == 0xff && memcmp(v->first, v->first + 1, v->bytes - 1) == 0;
}

static const variables *find_variables(void)
{
    for (int i = 0; i < num_files; i++)
        if (!is_untouched(&files[i])) return &files[i];
    return NULL;
}
/* The program and its variables, by the linker. */
extern char __executable_start[], _end[];

typedef enum meeting { NOWHERE, ENDED, BARRIER, VOTE, OF_WARP, NAMED, UNIT, CLUSTER, LATE } meeting;

/* Where a fiber, or the scheduler, continues. */
#if defined(__x86_64__) && defined(__GNUC__)
typedef struct place {
    void *stack; /* what a called function saves: six registers, and the return address */
} place;

/* Saves the state here and continues there, without a system call, which swapcontext makes. */
void cuda_switch(place *here, const place *there);
__asm__(".text\n"
        ".type cuda_switch, @function\n"
        "cuda_switch:\n"
        "    push %rbp\n"
        "    push %rbx\n"
        "    push %r12\n"
        "    push %r13\n"
        "    push %r14\n"
        "    push %r15\n"
        "    mov %rsp, (%rdi)\n"
        "    mov (%rsi), %rsp\n"
        "    pop %r15\n"
        "    pop %r14\n"
        "    pop %r13\n"
        "    pop %r12\n"
        "    pop %rbx\n"
        "    pop %rbp\n"
        "    ret\n"
        ".size cuda_switch, . - cuda_switch\n");

static void make_place(place *p, char *stack, void (*function)(void))
{
    void **top = (void **)(void *)(stack + STACK);
    *--top = NULL; /* the function does not return */
    memcpy(--top, &function, sizeof function);
    for (int i = 0; i < 6; i++) *--top = NULL;
    p->stack = top;
}
#else
typedef ucontext_t place;

static void cuda_switch(place *here, const place *there)
{
    if (swapcontext(here, there) != 0) abort();
}

static void make_place(place *p, char *stack, void (*function)(void))
{
    if (getcontext(p) != 0) abort();
    p->uc_stack.ss_sp = stack;
    p->uc_stack.ss_size = STACK;
    p->uc_link = NULL;
    makecontext(p, function, 0);
}
#endif

typedef struct copy {
    uint32_t to;
    const void *from;
    size_t bytes;
    int group;
} copy;

/* Small, because it is checked constantly whether threads can continue. */
typedef struct fiber {
    meeting at;
    unsigned phase;          /* OF_WARP, BARRIER, VOTE, NAMED, CLUSTER, LATE: this phase must end */
    int number;              /* NAMED */
    bool started;            /* on its stack; between two blocks it waits in `enter` */
    int copies, copy_groups; /* pending; committed */
    place resume;
    cuda_wait wait;                    /* UNIT */
    unsigned arrivals[NAMED_BARRIERS]; /* phases of named barriers that it has arrived in */
    unsigned cluster_arrivals; /* the same of the cluster's barrier; whether it must wait there */
    bool waits_for_cluster;
} fiber;

typedef struct named_barrier {
    unsigned phase;
    int arrived, threads;
    int votes[2]; /* of this phase and the one before */
} named_barrier;

typedef struct block {
    unsigned number; /* in the grid */
    fiber fibers[MOST_THREADS];
    copy copies[MOST_THREADS][MOST_COPIES];
    char *stacks; /* of this many threads; they are kept for later kernels */
    unsigned stack_count;
    float *dynamic;  /* shared memory */
    char *variables; /* the declared shared variables, while another block's are in their place */
    unsigned phase, warp_phase[MOST_WARPS];
    named_barrier named[NAMED_BARRIERS];
    int votes[2];
    _Alignas(16) unsigned char shown[2][MOST_THREADS][MOST_SHARED];
} block;

/* The blocks of a cluster run side by side. So may some clusters, or blocks without a cluster. */
static struct {
    const cuda_run *run;
    unsigned together; /* blocks that run side by side now */
    block blocks[CUDA_MOST_TOGETHER];
    place scheduler;
    bool units_run;                             /* instead of a thread */
    unsigned late_phase;                        /* how often slow threads have gone on */
    unsigned cluster_phase[CUDA_MOST_TOGETHER]; /* of each cluster */
} machine;

unsigned cuda_place;

static block *current = &machine.blocks[0];
static block *here(void) { return current; }

/* Memory of the running block: its beginning, and the largest offset of 16 bytes in it. */
typedef struct own_memory {
    uintptr_t first, most;
} own_memory;

static own_memory own_stacks, own_shared;

static own_memory own_memory_at(const void *first, size_t bytes)
{
    return bytes < 16 ? (own_memory){UINTPTR_MAX, 0} : (own_memory){(uintptr_t)first, bytes - 16};
}

/* Whether 16 bytes at this address are inside. If not, fewer bytes at the end may still be. */
static inline bool surely_lies_in(const void *at, own_memory own)
{
    return (uintptr_t)at - own.first <= own.most;
}

unsigned cuda_cluster_size(const cuda_run *run) { return run->cluster ? run->cluster : 1; }

/* The bits that distinguish a block's shared addresses from those of others in its cluster. */
static uint32_t rank_bits(void) { return cuda_place % cuda_cluster_size(machine.run) << RANK_BIT; }

static unsigned cluster_here(void) { return cuda_place / cuda_cluster_size(machine.run); }

unsigned cuda_place_of(unsigned rank)
{
    const unsigned size = cuda_cluster_size(machine.run);
    if (rank >= size) cuda_die("no block %u in the cluster", rank);
    return cuda_place / size * size + rank;
}

static void set_current(unsigned rank)
{
    cuda_place = rank;
    current = &machine.blocks[rank];
    cuda_shared_memory = current->dynamic;
    own_stacks = own_memory_at(current->stacks, (size_t)machine.run->threads * STACK);
    own_shared = own_memory_at(current->dynamic, machine.run->smem_bytes);
}

/* Makes a block of the cluster the running one, with its variables in place. */
void cuda_enter_block(unsigned rank)
{
    if (rank == cuda_place) return;
    if (!ours) ours = find_variables();
    if (ours) {
        memcpy(here()->variables, ours->first, ours->bytes);
        memcpy(ours->first, machine.blocks[rank].variables, ours->bytes);
    }
    set_current(rank);
    cuda_block.x = here()->number;
}

void cuda_die(const char *format, ...)
{
    va_list arguments;
    fprintf(stderr,
            "cuda_on_cpu: %s%sblock %u, thread %u: ", machine.run->name ? machine.run->name : "",
            machine.run->name ? ": " : "", cuda_block.x, cuda_thread.x);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    abort();
}

/* ---- Waiting --------------------------------------------------------------------------------- */

/* The warp that runs, lane after lane, without the slow ones or with them. A lane continues directly with the
 * next one, and the last one, if all are at the same exchange, with the first. */
static struct {
    unsigned warp, lanes;
    uint32_t left_out;  /* a bit for each slow lane that does not run */
    unsigned next, met; /* the next lane; lanes that continued, and are at the next exchange */
    bool any;           /* a lane has continued since `next` was 0 */
} turn;

static fiber *next_lane(void);

/* Switches to the next thread; returns when the condition for which this one waits is met. */
static void meet(meeting at, unsigned phase)
{
    fiber *f = &here()->fibers[cuda_thread.x];
    f->at = at;
    f->phase = phase;
    turn.met += at == OF_WARP;
    const fiber *next = next_lane();
    cuda_switch(&f->resume, next ? &next->resume : &machine.scheduler);
}

static unsigned count_warps(void) { return (machine.run->threads + WARP - 1) / WARP; }

static bool is_slow(unsigned thread)
{
    const unsigned warp = cuda_place * count_warps() + thread / WARP;
    return warp == machine.run->slow_warp && machine.run->slow_lanes >> thread % WARP & 1;
}

void cuda_be_late(void)
{
    if (is_slow(cuda_thread.x)) meet(LATE, machine.late_phase);
}

void __syncthreads(void) { meet(BARRIER, here()->phase); }

void __trap(void) { cuda_die("a trap"); }

int __syncthreads_or(int predicate)
{
    int *votes = &here()->votes[here()->phase & 1];
    *votes |= predicate != 0;
    meet(VOTE, here()->phase);
    return *votes;
}

void cuda_cluster_arrive(void)
{
    fiber *f = &here()->fibers[cuda_thread.x];
    const unsigned phase = machine.cluster_phase[cluster_here()];
    if (f->waits_for_cluster) cuda_die("arrives at the cluster's barrier twice");
    f->cluster_arrivals = phase + 1;
    f->waits_for_cluster = true;
    cuda_be_late();
}

void cuda_cluster_wait(void)
{
    fiber *f = &here()->fibers[cuda_thread.x];
    if (!f->waits_for_cluster) cuda_die("waits at the cluster's barrier, and has not arrived");
    f->waits_for_cluster = false;
    if (f->cluster_arrivals == machine.cluster_phase[cluster_here()] + 1)
        meet(CLUSTER, f->cluster_arrivals - 1);
}

void cuda_cluster_barrier(void)
{
    cuda_cluster_arrive();
    cuda_cluster_wait();
}

static void arrive(int number, int threads)
{
    fiber *f = &here()->fibers[cuda_thread.x];
    if (number < 0 || number >= NAMED_BARRIERS) cuda_die("no named barrier %d", number);
    named_barrier *b = &here()->named[number];
    if (threads % WARP || threads <= 0) cuda_die("named barrier %d of %d threads", number, threads);
    if (b->arrived && b->threads != threads)
        cuda_die("named barrier %d of %d threads, and of %d", number, threads, b->threads);
    if (f->arrivals[number] == b->phase + 1)
        cuda_die("arrives at named barrier %d again before it is complete", number);
    f->arrivals[number] = b->phase + 1;
    b->threads = threads;
    if (++b->arrived < threads) return;
    b->arrived = 0;
    b->phase++;
    b->votes[b->phase & 1] = 0;
}

void cuda_named_barrier_arrive(int number, int threads)
{
    arrive(number, threads);
    cuda_be_late();
}

void cuda_named_barrier(int number, int threads)
{
    const unsigned phase = here()->named[number % NAMED_BARRIERS].phase;
    arrive(number, threads);
    here()->fibers[cuda_thread.x].number = number;
    if (here()->named[number].phase == phase) meet(NAMED, phase);
}

int cuda_named_barrier_or(int number, int threads, int predicate)
{
    named_barrier *b = &here()->named[number % NAMED_BARRIERS];
    int *votes = &b->votes[b->phase & 1];
    *votes |= predicate != 0;
    cuda_named_barrier(number, threads);
    return *votes;
}

void cuda_wait_until(const cuda_wait *wait)
{
    here()->fibers[cuda_thread.x].wait = *wait;
    if (!wait->is_over(wait)) meet(UNIT, 0);
}

/* ---- Within a warp --------------------------------------------------------------------------- */

const void *cuda_show_warp(const void *mine, size_t size)
{
    const unsigned warp = cuda_thread.x / WARP;
    unsigned char(*shown)[MOST_SHARED] = here()->shown[here()->warp_phase[warp] & 1];
    if (size > MOST_SHARED) cuda_die("too much to show");
    if (size) memcpy(shown[cuda_thread.x], mine, size);
    meet(OF_WARP, here()->warp_phase[warp]);
    return shown[warp * WARP];
}

size_t cuda_shown_pitch(void) { return MOST_SHARED; }

unsigned cuda_warp_phase(void) { return here()->warp_phase[cuda_thread.x / WARP]; }

static const void *show_all(unsigned mask, const void *mine, size_t size)
{
    if (mask != 0xffffffffu) cuda_die("an exchange without all lanes");
    return cuda_show_warp(mine, size);
}

uint32_t cuda_shuffle(unsigned mask, uint32_t value, unsigned lane)
{
    const char *all = show_all(mask, &value, sizeof value);
    return *(const uint32_t *)(const void *)(all + lane % WARP * MOST_SHARED);
}

int cuda_shuffle_int(unsigned mask, int value, unsigned lane)
{
    return (int)cuda_shuffle(mask, (uint32_t)value, lane);
}

uint64_t cuda_shuffle_wide(unsigned mask, uint64_t value, unsigned lane)
{
    const char *all = show_all(mask, &value, sizeof value);
    return *(const uint64_t *)(const void *)(all + lane % WARP * MOST_SHARED);
}

float cuda_shuffle_float(unsigned mask, float value, unsigned lane)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits = cuda_shuffle(mask, bits, lane);
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* What a lane has passed. */
static uint32_t of_lane(const char *all, int lane)
{
    return *(const uint32_t *)(const void *)(all + lane * MOST_SHARED);
}

uint32_t __ballot_sync(unsigned mask, int predicate)
{
    const char *all = show_all(mask, &predicate, sizeof predicate);
    uint32_t bits = 0;
    for (int lane = 0; lane < WARP; lane++)
        if (of_lane(all, lane)) bits |= 1u << lane;
    return bits;
}

int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }

uint32_t __reduce_min_sync(unsigned mask, uint32_t value)
{
    const char *all = show_all(mask, &value, sizeof value);
    uint32_t least = value;
    for (int lane = 0; lane < WARP; lane++)
        if (of_lane(all, lane) < least) least = of_lane(all, lane);
    return least;
}

uint32_t __reduce_max_sync(unsigned mask, uint32_t value)
{
    return ~__reduce_min_sync(mask, ~value);
}

uint32_t __reduce_add_sync(unsigned mask, uint32_t value)
{
    const char *all = show_all(mask, &value, sizeof value);
    uint32_t sum = 0;
    for (int lane = 0; lane < WARP; lane++) sum += of_lane(all, lane);
    return sum;
}

uint32_t __reduce_or_sync(unsigned mask, uint32_t value)
{
    const char *all = show_all(mask, &value, sizeof value);
    uint32_t bits = 0;
    for (int lane = 0; lane < WARP; lane++) bits |= of_lane(all, lane);
    return bits;
}

void __syncwarp(void) { cuda_show_warp(NULL, 0); }

/* ---- Shared memory by its addresses ---------------------------------------------------------- */

void *cuda_at_peer(const void *pointer, unsigned rank)
{
    (void)cuda_shared_address(pointer); /* it is in there */
    return (char *)machine.blocks[cuda_place_of(rank)].dynamic +
           ((const char *)pointer - (const char *)cuda_shared_memory);
}

/* The address of dynamic shared memory. */
static uint32_t first_address(void)
{
    const unsigned bytes = machine.run->static_bytes;
    return WINDOW + (bytes > 0 ? bytes : LEAST_STATIC);
}

uint32_t cuda_shared_address(const void *pointer)
{
    const ptrdiff_t at = (const char *)pointer - (const char *)cuda_shared_memory;
    if (at < 0 || at > (ptrdiff_t)machine.run->smem_bytes)
        cuda_die("a pointer that leads out of the dynamic shared memory");
    return ((uint32_t)at + first_address()) | rank_bits();
}

void *cuda_shared_at(uint32_t address, size_t size)
{
    if (address % size != 0) cuda_die("a misaligned address in shared memory");
    if (address >> RANK_BIT != rank_bits() >> RANK_BIT) cuda_die("another block's address");
    address &= (1u << RANK_BIT) - 1;
    if (address < first_address() || address - first_address() + size > machine.run->smem_bytes)
        cuda_die("an address outside the shared memory");
    return (char *)cuda_shared_memory + (address - first_address());
}

/* Completes the copies of the groups before this one. */
void cuda_finish_copies(unsigned thread, int group)
{
    fiber *f = &here()->fibers[thread];
    copy *list = here()->copies[thread];
    int left = 0;
    for (int i = 0; i < f->copies; i++) {
        const copy *c = &list[i];
        if (c->group < group) memcpy(cuda_shared_at(c->to, c->bytes), c->from, c->bytes);
        else list[left++] = *c;
    }
    f->copies = left;
}

static void finish_copies(int group) { cuda_finish_copies(cuda_thread.x, group); }

/* With `backwards`, copies arrive as late as they may, otherwise immediately. */
void cuda_copy_async(uint32_t to, const void *from, size_t bytes, bool wanted)
{
    static const char zeros[16];
    fiber *f = &here()->fibers[cuda_thread.x];
    if (f->copies == MOST_COPIES) cuda_die("too many copies on their way");
    if (to % bytes || (wanted && (uintptr_t)from % bytes))
        cuda_die("a copy of %zu bytes from %p to %x is not aligned", bytes, from, to);
    if (wanted) cuda_check_access(from, bytes);
    here()->copies[cuda_thread.x][f->copies++] =
        (copy){to, wanted ? from : zeros, bytes, f->copy_groups};
    if (!machine.run->backwards) finish_copies(f->copy_groups + 1);
}

void cuda_commit_copies(void) { here()->fibers[cuda_thread.x].copy_groups++; }

int cuda_committed_copies(void) { return here()->fibers[cuda_thread.x].copy_groups; }

void cuda_wait_for_groups(int pending)
{
    finish_copies(here()->fibers[cuda_thread.x].copy_groups - pending);
}

void cuda_wait_for_copies(void) { finish_copies(INT_MAX); }

/* ---- Global memory --------------------------------------------------------------------------- */

static bool lies_in(const void *at, size_t size, const void *first, size_t bytes)
{
    const uintptr_t distance = (uintptr_t)at - (uintptr_t)first;
    return distance <= bytes && size <= bytes - distance;
}

/* Shared memory, the kernel's local variables, and what lanes pass to each other. */
static bool is_own(const void *at, size_t size)
{
    return lies_in(at, size, cuda_shared_memory, machine.run->smem_bytes) ||
           lies_in(at, size, here()->stacks, (size_t)machine.run->threads * STACK) ||
           lies_in(at, size, __executable_start, (size_t)(_end - __executable_start));
}

static size_t distance_to(const ref_buffer *b, const char *at)
{
    return at < b->data ? (size_t)(b->data - at) : (size_t)(at - b->data);
}

static _Noreturn void die_outside(const ref_buffers *memory, const char *at, size_t size)
{
    const ref_buffer *near = &memory->list[0];
    for (int i = 1; i < memory->count; i++)
        if (distance_to(&memory->list[i], at) < distance_to(near, at)) near = &memory->list[i];
    cuda_die("an access to %zu bytes outside all buffers, at byte %td of %s, which has %zu", size,
             at - near->data, near->name, near->bytes);
}

void cuda_begin_access(void)
{
    const cuda_units *units = machine.run->units;
    if (units && units->access && !machine.units_run) units->access();
}

void cuda_check_access(const void *at, size_t size)
{
    static int last; /* where the previous access was */
    const ref_buffers *memory = machine.run->memory;
    if (!memory || is_own(at, size)) return;
    cuda_begin_access();
    for (int i = 0; i < memory->count; i++) {
        const ref_buffer *b = &memory->list[(last + i) % memory->count];
        if (!lies_in(at, size, b->data, b->bytes)) continue;
        last = (last + i) % memory->count;
        return;
    }
    die_outside(memory, at, size);
}

static void check_store(const void *to, size_t size)
{
    const cuda_units *units = machine.run->units;
    if (units && units->store && lies_in(to, size, cuda_shared_memory, machine.run->smem_bytes))
        units->store(to, size);
    else cuda_check_access(to, size);
}

/* The functions that the compiler calls before each access of a kernel: -fsanitize=kernel-address,
 * without its shadow memory. Most accesses are to the block's own memory. */
void __asan_loadN_noabort(const void *at, size_t size);
void __asan_storeN_noabort(const void *at, size_t size);
void __asan_handle_no_return(void);

void __asan_loadN_noabort(const void *at, size_t size) { cuda_check_access(at, size); }
void __asan_storeN_noabort(const void *at, size_t size) { check_store(at, size); }
void __asan_handle_no_return(void) {}

#define ACCESSES_OF(size)                                                                          \
    void __asan_load##size##_noabort(const void *at);                                              \
    void __asan_store##size##_noabort(const void *at);                                             \
    void __asan_load##size##_noabort(const void *at)                                               \
    {                                                                                              \
        if (!surely_lies_in(at, own_stacks) && !surely_lies_in(at, own_shared))                    \
            cuda_check_access(at, size);                                                           \
    }                                                                                              \
    void __asan_store##size##_noabort(const void *at)                                              \
    {                                                                                              \
        if (!surely_lies_in(at, own_stacks)) check_store(at, size);                                \
    }
ACCESSES_OF(1)
ACCESSES_OF(2)
ACCESSES_OF(4)
ACCESSES_OF(8)
ACCESSES_OF(16)

/* ---- The machine ----------------------------------------------------------------------------- */

/* A thread, of one block after the other. */
static void enter(void)
{
    for (;;) {
        machine.run->kernel(machine.run->parameters);
        if (here()->fibers[cuda_thread.x].copies)
            cuda_die("the end, and copies still on their way");
        meet(ENDED, 0);
    }
}

static bool can_go_on(unsigned thread)
{
    const fiber *f = &here()->fibers[thread];
    switch (f->at) {
    case NOWHERE: return true;
    case ENDED: return false;
    case OF_WARP: return f->phase != here()->warp_phase[thread / WARP];
    case NAMED: return f->phase != here()->named[f->number].phase;
    case UNIT: return f->wait.is_over(&f->wait);
    case CLUSTER: return f->phase != machine.cluster_phase[cluster_here()];
    case LATE: return f->phase != machine.late_phase;
    default: return f->phase != here()->phase;
    }
}

/* Whether all these threads wait at the same kind of place. */
static bool all_at(unsigned first, unsigned threads, meeting at)
{
    for (unsigned n = 0; n < threads; n++)
        if (here()->fibers[first + n].at != at) return false;
    return true;
}

/* Lanes may wait for other units one by one, and be slow; otherwise a warp runs together. */
static void check_lanes(unsigned first, unsigned lanes)
{
    bool same = true;
    for (unsigned n = 0; n < lanes; n++) {
        const meeting at = here()->fibers[first + n].at;
        if (at == UNIT || at == LATE || can_go_on(first + n)) return;
        same = same && at == here()->fibers[first].at;
    }
    if (!same) cuda_die("threads of a warp meet at different places");
}

/* Whether all lanes are at the same exchange. */
static bool has_met(unsigned first, unsigned lanes)
{
    bool met = all_at(first, lanes, OF_WARP);
    for (unsigned n = 0; n < lanes; n++) met = met && !can_go_on(first + n);
    return met;
}

/* Makes the next lane that can continue the running thread. NULL: there is none. */
static fiber *next_lane(void)
{
    const unsigned first = turn.warp * WARP;
    for (;;) {
        while (turn.next < turn.lanes) {
            const unsigned n = turn.next++;
            const unsigned lane = machine.run->backwards ? turn.lanes - 1 - n : n;
            if (turn.left_out >> lane & 1 || !can_go_on(first + lane)) continue;
            fiber *f = &here()->fibers[first + lane];
            cuda_thread.x = first + lane;
            turn.any = true;
            if (!f->started)
                make_place(&f->resume, here()->stacks + (size_t)(first + lane) * STACK, enter);
            f->started = true;
            return f;
        }
        if (turn.met < turn.lanes) return NULL;
        here()->warp_phase[turn.warp]++;
        turn.next = turn.met = 0;
    }
}

/* Runs a warp's threads, without the slow ones or with them, until none can continue. False: none
 * could. */
static bool run_warp(unsigned warp, bool slow_too)
{
    const unsigned first = warp * WARP, left = machine.run->threads - first;
    const bool is_slow_warp = cuda_place * count_warps() + warp == machine.run->slow_warp;
    turn.warp = warp;
    turn.lanes = left < WARP ? left : WARP;
    turn.left_out = is_slow_warp && !slow_too ? machine.run->slow_lanes : 0;
    bool any = false;
    do {
        turn.next = turn.met = 0;
        turn.any = false;
        const fiber *next = next_lane();
        if (next) cuda_switch(&machine.scheduler, &next->resume);
        any = any || turn.any;
        if (!turn.any && has_met(first, turn.lanes)) {
            here()->warp_phase[warp]++;
            turn.any = true;
        }
    } while (turn.any);
    if (any) check_lanes(first, turn.lanes);
    return any;
}

static bool run_warps(bool slow_too)
{
    const unsigned warps = count_warps();
    bool any = false;
    for (unsigned i = 0; i < warps; i++)
        any = run_warp(machine.run->backwards ? warps - 1 - i : i, slow_too) || any;
    return any;
}

/* When no thread can continue: whether all are at the block's barrier, and so can continue now. */
static bool end_phase(void)
{
    const unsigned threads = machine.run->threads;
    if (!all_at(0, threads, BARRIER) && !all_at(0, threads, VOTE)) return false;
    here()->phase++;
    here()->votes[here()->phase & 1] = 0;
    return true;
}

static bool units_go_on(void)
{
    machine.units_run = true;
    const bool went_on = machine.run->units && machine.run->units->go_on();
    machine.units_run = false;
    return went_on;
}

static bool run_fast(void) { return run_warps(false); }

static bool run_all(void)
{
    machine.late_phase++;
    return run_warps(true);
}

static bool is_slow_block(unsigned place) { return machine.run->first_block_slow && place == 0; }

/* Each block of the cluster in turn; whether one could. */
static bool for_blocks(bool (*go_on)(void))
{
    const unsigned blocks = machine.together;
    bool any = false;
    for (unsigned i = 0; i < blocks; i++) {
        const unsigned place = machine.run->backwards ? blocks - 1 - i : i;
        if (is_slow_block(place)) continue;
        cuda_enter_block(place);
        any = go_on() || any;
    }
    return any;
}

/* Whether a thread of the block has neither arrived nor ended. there: counts those that have
 * arrived and not ended. */
static bool is_missing_at_cluster(unsigned *there)
{
    const unsigned arrived = machine.cluster_phase[cluster_here()] + 1;
    bool missing = false;
    for (unsigned n = 0; n < machine.run->threads; n++) {
        const fiber *f = &here()->fibers[n];
        if (f->at == ENDED) continue;
        missing = missing || f->cluster_arrivals != arrived;
        *there += f->cluster_arrivals == arrived;
    }
    return missing;
}

/* Whether all threads of a cluster that have not ended have arrived at its barrier; then they
 * continue. first: the cluster's first block. */
static bool end_phase_of_cluster(unsigned first)
{
    unsigned there = 0;
    for (unsigned rank = 0; rank < cuda_cluster_size(machine.run); rank++) {
        cuda_enter_block(first + rank);
        if (is_missing_at_cluster(&there)) return false;
    }
    if (there) machine.cluster_phase[cluster_here()]++;
    return there;
}

static bool end_cluster_phase(void)
{
    bool any = false;
    for (unsigned n = 0; n < machine.together; n += cuda_cluster_size(machine.run))
        any = end_phase_of_cluster(n) || any;
    return any;
}

static void describe(unsigned thread, char *text, size_t size)
{
    const fiber *f = &here()->fibers[thread];
    const named_barrier *b = &here()->named[f->number];
    switch (f->at) {
    case ENDED: snprintf(text, size, "has ended"); return;
    case OF_WARP: snprintf(text, size, "waits for its warp"); return;
    case UNIT: f->wait.describe(&f->wait, text, size); return;
    case CLUSTER: snprintf(text, size, "waits at the cluster's barrier"); return;
    case LATE: snprintf(text, size, "is late"); return;
    case NAMED:
        snprintf(text, size, "waits at named barrier %d (%d of %d threads are there)", f->number,
                 b->arrived, b->threads);
        return;
    default: snprintf(text, size, "waits at the block's barrier"); return;
    }
}

static void die_waiting(void)
{
    for (unsigned rank = 0; rank < machine.together; rank++) {
        cuda_enter_block(rank);
        for (unsigned thread = 0; thread < machine.run->threads; thread += WARP) {
            char text[160];
            describe(thread, text, sizeof text);
            fprintf(stderr, "block %u, warp %u %s\n", here()->number, thread / WARP, text);
        }
    }
    cuda_die("no thread can go on");
}

static bool slow_block_goes_on(void)
{
    if (!machine.run->first_block_slow) return false;
    cuda_enter_block(0);
    return run_fast() || units_go_on() || run_all() || end_phase();
}

static void run_cluster(void)
{
    while (for_blocks(run_fast) || for_blocks(units_go_on) || for_blocks(run_all) ||
           for_blocks(end_phase) || end_cluster_phase() || slow_block_goes_on())
        continue;
}

static void check_guard(void)
{
    const unsigned char *guard = (unsigned char *)cuda_shared_memory + machine.run->smem_bytes;
    for (int i = 0; i < GUARD; i++)
        if (guard[i] != 0x5a) cuda_die("a write behind the dynamic shared memory");
}

/* When none of a run's blocks has begun, all are as the last run left them. */
static void clear_variables(void)
{
    if (ours) memset(ours->first, 0xff, ours->bytes);
    else
        for (int i = 0; i < num_files; i++) memset(files[i].first, 0xff, files[i].bytes);
}

static void check_variables(void)
{
    for (int i = 0; ours && i < num_files; i++)
        if (&files[i] != ours && !is_untouched(&files[i]))
            cuda_die("a kernel uses the shared variables of two files");
}

static void end_block(void)
{
    if (!all_at(0, machine.run->threads, ENDED)) die_waiting();
    for (int number = 0; number < NAMED_BARRIERS; number++)
        if (here()->named[number].arrived)
            cuda_die("the end, and %d of %d threads have arrived at named barrier %d",
                     here()->named[number].arrived, here()->named[number].threads, number);
    if (machine.run->units) machine.run->units->end();
    check_guard();
    check_variables();
}

static void start_fiber(unsigned thread)
{
    fiber *f = &here()->fibers[thread];
    f->at = NOWHERE;
    f->copies = f->copy_groups = 0;
    memset(f->arrivals, 0, sizeof f->arrivals);
    f->cluster_arrivals = 0;
    f->waits_for_cluster = false;
}

static void start_block(unsigned number)
{
    const unsigned bytes = machine.run->smem_bytes;
    here()->number = cuda_block.x = number;
    memset(cuda_shared_memory, 0xff, bytes);
    memset((char *)cuda_shared_memory + bytes, 0x5a, GUARD);
    clear_variables();
    memset(here()->variables, 0xff, most_bytes);
    memset(here()->named, 0, sizeof here()->named);
    for (unsigned n = 0; n < machine.run->threads; n++) start_fiber(n);
    if (machine.run->units) machine.run->units->start(machine.run);
}

static void allocate(block *b, const cuda_run *run)
{
    if (run->threads > b->stack_count) {
        free(b->stacks);
        b->stacks = malloc((size_t)run->threads * STACK);
        b->stack_count = run->threads;
        for (unsigned n = 0; n < MOST_THREADS; n++) b->fibers[n].started = false;
    }
    b->dynamic = aligned_alloc(128, ((size_t)run->smem_bytes + GUARD + 127) / 128 * 128);
    b->variables = malloc(most_bytes + 1);
    if (!b->stacks || !b->dynamic || !b->variables) abort();
}

static void release(block *b)
{
    free(b->dynamic);
    free(b->variables);
}

void cuda_run_kernel(const cuda_run *run)
{
    const unsigned cluster = cuda_cluster_size(run);
    const unsigned most = (run->together ? run->together : 1) * cluster;
    machine.run = run;
    cuda_grid.x = run->grid;
    if (run->threads > MOST_THREADS || cluster > CUDA_MOST_CLUSTER || run->grid % cluster ||
        most > CUDA_MOST_TOGETHER)
        abort();
    for (unsigned rank = 0; rank < most; rank++) allocate(&machine.blocks[rank], run);
    ours = NULL;
    set_current(0);
    for (unsigned n = 0; n < run->grid; n += machine.together) {
        machine.together = most < run->grid - n ? most : run->grid - n;
        const unsigned first = run->last_block_first ? run->grid - machine.together - n : n;
        for (unsigned rank = 0; rank < machine.together; rank++) {
            cuda_enter_block(rank);
            start_block(first + rank);
        }
        run_cluster();
        for (unsigned rank = 0; rank < machine.together; rank++) {
            cuda_enter_block(rank);
            end_block();
        }
    }
    for (unsigned rank = 0; rank < most; rank++) release(&machine.blocks[rank]);
}
