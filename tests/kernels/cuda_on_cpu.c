/* Fibers: made by ucontext, switched by setjmp, which needs no system call. */
#undef _FORTIFY_SOURCE
#include "cuda_on_cpu.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

enum {
    MOST_THREADS = 1024,
    WARP = 32,
    MOST_WARPS = MOST_THREADS / WARP,
    STACK = 128 * 1024,
    GUARD = 4096,
    MOST_SHARED = 32, /* bytes that a lane shows to its warp at a time */
    MOST_COPIES = 512 /* of a thread, on their way */
};

cuda_index cuda_thread, cuda_block, cuda_grid;
float *cuda_shared_memory;

typedef enum meeting { ENDED, BARRIER, VOTE, OF_WARP, NAMED } meeting;

typedef struct copy {
    uint32_t to;
    const void *from;
} copy;

typedef struct fiber {
    ucontext_t first;
    jmp_buf resume;
    bool started;
    meeting at;
    int copies;
    copy copy[MOST_COPIES];
} fiber;

static struct {
    const cuda_run *run;
    fiber fibers[MOST_THREADS];
    char *stacks;
    jmp_buf scheduler;
    ucontext_t back;
    unsigned phase, warp_phase[MOST_WARPS];
    struct {
        int number, threads;
    } named[MOST_WARPS]; /* where a warp waits */
    int votes[2];
    _Alignas(16) unsigned char shown[2][MOST_THREADS][MOST_SHARED];
} machine;

static void die(const char *what)
{
    fprintf(stderr, "cuda_on_cpu: block %u, thread %u: %s\n", cuda_block.x, cuda_thread.x, what);
    abort();
}

/* Hands over to the next thread; returns when all that meet here have come. */
static void meet(meeting at)
{
    fiber *f = &machine.fibers[cuda_thread.x];
    f->at = at;
    if (_setjmp(f->resume) == 0) _longjmp(machine.scheduler, 1);
}

void __syncthreads(void) { meet(BARRIER); }

int __syncthreads_or(int predicate)
{
    int *votes = &machine.votes[machine.phase & 1];
    *votes |= predicate != 0;
    meet(VOTE);
    return *votes;
}

void cuda_named_barrier(int number, int threads)
{
    const unsigned warp = cuda_thread.x / WARP;
    machine.named[warp].number = number;
    machine.named[warp].threads = threads;
    meet(NAMED);
}

/* ---- Within a warp --------------------------------------------------------------------------- */

const void *cuda_show_warp(const void *mine, size_t size)
{
    const unsigned warp = cuda_thread.x / WARP;
    unsigned char(*shown)[MOST_SHARED] = machine.shown[machine.warp_phase[warp] & 1];
    if (size > MOST_SHARED) die("too much to show");
    if (size) memcpy(shown[cuda_thread.x], mine, size);
    meet(OF_WARP);
    return shown[warp * WARP];
}

size_t cuda_shown_pitch(void) { return MOST_SHARED; }

static const void *show_all(unsigned mask, const void *mine, size_t size)
{
    if (mask != 0xffffffffu) die("an exchange without all lanes");
    return cuda_show_warp(mine, size);
}

float __shfl_xor_sync(unsigned mask, float value, int lane_mask)
{
    const unsigned lane = (cuda_thread.x % WARP) ^ (unsigned)lane_mask;
    const char *all = show_all(mask, &value, sizeof value);
    return *(const float *)(const void *)(all + lane * MOST_SHARED);
}

int __any_sync(unsigned mask, int predicate)
{
    const char *all = show_all(mask, &predicate, sizeof predicate);
    int any = 0;
    for (int lane = 0; lane < WARP; lane++)
        any |= *(const int *)(const void *)(all + lane * MOST_SHARED);
    return any != 0;
}

void __syncwarp(void) { cuda_show_warp(NULL, 0); }

/* ---- Shared memory by its addresses ---------------------------------------------------------- */

void *cuda_shared_at(uint32_t address, size_t size)
{
    if (address % size != 0) die("a misaligned address in shared memory");
    if (address + size > machine.run->smem_bytes) die("an address behind the shared memory");
    return (char *)cuda_shared_memory + address;
}

/* With `backwards` copies come as late as they may, else at once. */
void cuda_copy_async(uint32_t to, const void *from, bool wanted)
{
    static const char zeros[16];
    fiber *f = &machine.fibers[cuda_thread.x];
    if (f->copies == MOST_COPIES) die("too many copies on their way");
    f->copy[f->copies++] = (copy){to, wanted ? from : zeros};
    if (!machine.run->backwards) cuda_wait_for_copies();
}

void cuda_wait_for_copies(void)
{
    fiber *f = &machine.fibers[cuda_thread.x];
    for (int i = 0; i < f->copies; i++)
        memcpy(cuda_shared_at(f->copy[i].to, 16), f->copy[i].from, 16);
    f->copies = 0;
}

/* ---- The machine ----------------------------------------------------------------------------- */

static void enter(void)
{
    machine.run->kernel(machine.run->parameters);
    if (machine.fibers[cuda_thread.x].copies) die("the end, and copies still on their way");
    machine.fibers[cuda_thread.x].at = ENDED;
    _longjmp(machine.scheduler, 1);
}

static void resume(unsigned thread)
{
    fiber *f = &machine.fibers[thread];
    cuda_thread.x = thread;
    if (_setjmp(machine.scheduler) != 0) return;
    if (f->started) _longjmp(f->resume, 1);
    f->started = true;
    setcontext(&f->first);
}

/* A warp's threads until they wait for others of the block, or have ended. */
static void run_warp(unsigned warp)
{
    const unsigned first = warp * WARP, left = machine.run->threads - first;
    const unsigned lanes = left < WARP ? left : WARP;
    do {
        for (unsigned n = 0; n < lanes; n++)
            resume(first + (machine.run->backwards ? lanes - 1 - n : n));
        for (unsigned n = 1; n < lanes; n++)
            if (machine.fibers[first + n].at != machine.fibers[first].at)
                die("threads of a warp meet at different places");
        machine.warp_phase[warp]++;
    } while (machine.fibers[first].at == OF_WARP);
}

static meeting warp_at(unsigned warp) { return machine.fibers[warp * WARP].at; }

/* Whether all that a warp at a named barrier waits for are there. */
static bool is_complete(unsigned warp, unsigned warps)
{
    int there = 0;
    for (unsigned n = 0; n < warps; n++)
        if (warp_at(n) == NAMED && machine.named[n].number == machine.named[warp].number)
            there += WARP;
    return there == machine.named[warp].threads;
}

/* From one barrier to the next; false: all threads have ended. */
static bool run_phase(void)
{
    const unsigned warps = (machine.run->threads + WARP - 1) / WARP;
    bool ready[MOST_WARPS], any = true;
    machine.votes[machine.phase & 1] = 0;
    for (unsigned n = 0; n < warps; n++) ready[n] = true;
    while (any) {
        any = false;
        for (unsigned i = 0; i < warps; i++) {
            const unsigned n = machine.run->backwards ? warps - 1 - i : i;
            if (ready[n]) run_warp(n);
        }
        for (unsigned n = 0; n < warps; n++) {
            ready[n] = warp_at(n) == NAMED && is_complete(n, warps);
            any = any || ready[n];
        }
    }
    for (unsigned n = 1; n < warps; n++)
        if (warp_at(n) != warp_at(0)) die("warps meet at different barriers");
    if (warp_at(0) == NAMED) die("a named barrier at which too few meet");
    machine.phase++;
    return warp_at(0) != ENDED;
}

static void start_block(unsigned block)
{
    const unsigned bytes = machine.run->smem_bytes;
    cuda_block.x = block;
    memset(cuda_shared_memory, 0xff, bytes);
    memset((char *)cuda_shared_memory + bytes, 0x5a, GUARD);
    for (unsigned n = 0; n < machine.run->threads; n++) {
        fiber *f = &machine.fibers[n];
        f->started = false;
        f->copies = 0;
        if (getcontext(&f->first) != 0) abort();
        f->first.uc_stack.ss_sp = machine.stacks + (size_t)n * STACK;
        f->first.uc_stack.ss_size = STACK;
        f->first.uc_link = &machine.back;
        makecontext(&f->first, enter, 0);
    }
}

static void check_guard(void)
{
    const unsigned char *guard = (unsigned char *)cuda_shared_memory + machine.run->smem_bytes;
    for (int i = 0; i < GUARD; i++)
        if (guard[i] != 0x5a) die("a write behind the dynamic shared memory");
}

void cuda_run_kernel(const cuda_run *run)
{
    machine.run = run;
    cuda_grid.x = run->grid;
    machine.stacks = malloc((size_t)run->threads * STACK);
    cuda_shared_memory = aligned_alloc(128, ((size_t)run->smem_bytes + GUARD + 127) / 128 * 128);
    if (!machine.stacks || !cuda_shared_memory || run->threads > MOST_THREADS) abort();
    for (unsigned block = 0; block < run->grid; block++) {
        start_block(block);
        while (run_phase()) continue;
        check_guard();
    }
    free(machine.stacks);
    free(cuda_shared_memory);
}
