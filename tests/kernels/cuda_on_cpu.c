/* Fibers: made by ucontext, switched by setjmp, which needs no system call. */
#undef _FORTIFY_SOURCE
#include "cuda_on_cpu.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

enum { MOST_THREADS = 1024, STACK = 128 * 1024, GUARD = 4096 };

cuda_index cuda_thread, cuda_block, cuda_grid;
float *cuda_shared_memory;

typedef enum meeting { ENDED, BARRIER, VOTE, SHUFFLE } meeting;

typedef struct fiber {
    ucontext_t first;
    jmp_buf resume;
    bool started;
    meeting at;
} fiber;

static struct {
    const cuda_run *run;
    fiber fibers[MOST_THREADS];
    char *stacks;
    jmp_buf scheduler;
    ucontext_t back;
    unsigned phase;
    int votes[2];
    float values[2][MOST_THREADS];
} machine;

static void die(const char *what)
{
    fprintf(stderr, "cuda_on_cpu: block %u, thread %u: %s\n", cuda_block.x, cuda_thread.x, what);
    abort();
}

/* Hands over to the next thread; returns in the next phase. */
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

float __shfl_xor_sync(unsigned mask, float value, int lane_mask)
{
    float *values = machine.values[machine.phase & 1];
    if (mask != 0xffffffffu) die("a shuffle without all lanes");
    values[cuda_thread.x] = value;
    meet(SHUFFLE);
    return values[cuda_thread.x ^ (unsigned)lane_mask];
}

static void enter(void)
{
    machine.run->kernel(machine.run->parameters);
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

/* From one barrier to the next; false: all threads have ended. */
static bool run_phase(void)
{
    const unsigned threads = machine.run->threads;
    machine.votes[machine.phase & 1] = 0;
    for (unsigned n = 0; n < threads; n++) resume(machine.run->backwards ? threads - 1 - n : n);
    for (unsigned n = 1; n < threads; n++)
        if (machine.fibers[n].at != machine.fibers[0].at) die("threads meet at different barriers");
    machine.phase++;
    return machine.fibers[0].at != ENDED;
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
