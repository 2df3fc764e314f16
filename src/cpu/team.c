/*
 * Teams of workers, see team.h.
 *
 * A worker watches a word, the team's order. The word holds a number that grows with every run, and the
 * number of workers that take part in the run. A worker spins for a while, because the next run often
 * follows at once, and then sleeps. A worker that finds an order wakes its two children in a tree, so
 * that waking many workers takes few steps. Nothing here fails: if workers cannot be started, fewer
 * threads do the work.
 */
#include "team.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

#ifdef _OPENMP
#include <omp.h>
#endif

enum {
    LINE = 64,                 /* bytes of a cache line */
    SPIN_NANOSECONDS = 100000, /* then a waiting thread sleeps */
    SPINS_PER_LOOK = 64,       /* at the clock */
    STACK_BYTES = 1 << 20,
    MAX_PLACE_PROCESSORS = 1024
};

#define QUIT 0xffffu /* as the number of workers that take part */

typedef struct team team;

typedef struct worker {
    team *mine;
    int index;               /* of the team's workers; it is thread index + 1 of a run */
    unsigned long long seen; /* the order at its start */
    int place;               /* of OpenMP's places; -1: where its creator may run */
    atomic_bool asleep;
    pthread_cond_t wake;
    pthread_t thread;
} worker;

struct team {
    _Alignas(LINE) atomic_ullong order; /* runs << 16 | workers that take part, or QUIT */
    _Alignas(LINE) atomic_int running;  /* of those, how many have not finished */
    atomic_bool caller_asleep;
    _Alignas(LINE) atomic_llong next; /* the first index that is not taken */
    /* Written between runs. */
    _Alignas(LINE) int64_t total;
    int64_t chunk;
    fa_team_function *f;
    void *context;
    bool spins;
    /* The caller's own. */
    unsigned forks; /* when it was made */
    int workers;
    int processors; /* that its owner may run on */
    /* Of those who sleep. */
    pthread_mutex_t lock;
    pthread_cond_t done;
    worker *worker[FA_TEAM_MAX - 1];
};

/* ---- Waiting --------------------------------------------------------------------------------- */

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory"); /* yield, by name, does nothing on most processors */
#endif
}

static int64_t nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Spins until the order is another one; false: it has taken too long. */
static bool spin_for_order(team *t, unsigned long long seen)
{
    const int64_t start = nanoseconds();
    do {
        for (int i = 0; i < SPINS_PER_LOOK; i++) {
            if (atomic_load(&t->order) != seen) return true;
            relax();
        }
    } while (nanoseconds() - start < SPIN_NANOSECONDS);
    return false;
}

/* A thread that goes to sleep first marks itself as sleeping, then looks for an order once more. A
 * thread that gives or passes on an order does so first, then looks for sleeping threads. So at least
 * one of them sees the other. */
static unsigned long long wait_for_order(worker *w, unsigned long long seen, bool spins)
{
    team *t = w->mine;
    if (!spins || !spin_for_order(t, seen)) {
        pthread_mutex_lock(&t->lock);
        atomic_store(&w->asleep, true);
        while (atomic_load(&t->order) == seen) pthread_cond_wait(&w->wake, &t->lock);
        atomic_store(&w->asleep, false);
        pthread_mutex_unlock(&t->lock);
    }
    return atomic_load(&t->order);
}

static void wake_worker(team *t, int index, int active)
{
    if (index >= active) return;
    worker *w = t->worker[index];
    if (!atomic_load(&w->asleep)) return;
    pthread_mutex_lock(&t->lock);
    pthread_cond_signal(&w->wake);
    pthread_mutex_unlock(&t->lock);
}

static void wait_for_workers(team *t)
{
    const int64_t start = nanoseconds();
    do {
        for (int i = 0; t->spins && i < SPINS_PER_LOOK; i++) {
            if (atomic_load(&t->running) == 0) return;
            relax();
        }
    } while (t->spins && nanoseconds() - start < SPIN_NANOSECONDS);
    pthread_mutex_lock(&t->lock);
    atomic_store(&t->caller_asleep, true);
    while (atomic_load(&t->running) != 0) pthread_cond_wait(&t->done, &t->lock);
    atomic_store(&t->caller_asleep, false);
    pthread_mutex_unlock(&t->lock);
}

static void finish(team *t)
{
    if (atomic_fetch_sub(&t->running, 1) != 1 || !atomic_load(&t->caller_asleep)) return;
    pthread_mutex_lock(&t->lock);
    pthread_cond_signal(&t->done);
    pthread_mutex_unlock(&t->lock);
}

/* ---- Working --------------------------------------------------------------------------------- */

static void take_chunks(team *t, int thread)
{
    for (;;) {
        const int64_t first = atomic_fetch_add(&t->next, t->chunk);
        if (first >= t->total) return;
        const int64_t end = t->total - first > t->chunk ? first + t->chunk : t->total;
        for (int64_t index = first; index < end; index++) t->f(t->context, index, thread);
    }
}

/* Binds threads to the places to which OpenMP would bind them; otherwise they would inherit the place of
 * their creator. */
static void go_to_place(int place)
{
#if defined(_OPENMP) && _OPENMP >= 201511 && defined(__linux__)
    int processors[MAX_PLACE_PROCESSORS];
    const int count = place < 0 ? 0 : omp_get_place_num_procs(place);
    if (count < 1 || count > MAX_PLACE_PROCESSORS) return;
    omp_get_place_proc_ids(place, processors);
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int i = 0; i < count; i++)
        if (processors[i] >= 0 && processors[i] < CPU_SETSIZE) CPU_SET((size_t)processors[i], &set);
    (void)sched_setaffinity(0, sizeof set, &set); /* of this thread */
#else
    (void)place;
#endif
}

static int choose_place(int index)
{
#if defined(_OPENMP) && _OPENMP >= 201511 && defined(__linux__)
    const omp_proc_bind_t bind = omp_get_proc_bind();
    const int places = omp_get_num_places(), mine = omp_get_place_num();
    if (bind == omp_proc_bind_false || places < 1) return -1;
    int step = 0; /* master: all stay with the caller */
    if (bind == omp_proc_bind_true || bind == omp_proc_bind_close) step = 1;
    if (bind == omp_proc_bind_spread) step = places / omp_get_max_threads();
    if (bind == omp_proc_bind_spread && step < 1) step = 1;
    return (int)(((mine < 0 ? 0 : mine) + (int64_t)step * (index + 1)) % places);
#else
    (void)index;
    return -1;
#endif
}

static void *work(void *argument)
{
    worker *w = argument;
    team *t = w->mine;
    unsigned long long seen = w->seen;
    bool spins = false;
    go_to_place(w->place);
    for (;;) {
        seen = wait_for_order(w, seen, spins);
        const int active = (int)(seen & QUIT);
        if (active == (int)QUIT) return NULL;
        if (w->index >= active) {
            spins = false; /* fewer are wanted now */
            continue;
        }
        wake_worker(t, 2 * w->index + 1, active);
        wake_worker(t, 2 * w->index + 2, active);
        spins = t->spins;
        take_chunks(t, w->index + 1);
        finish(t);
    }
}

/* ---- Teams ----------------------------------------------------------------------------------- */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t key;
static bool has_key;
static atomic_uint forks;
static bool passive; /* waiting threads sleep at once */

/* In the child of a fork only the forking thread continues, and its workers no longer exist. */
static void count_fork(void) { atomic_fetch_add(&forks, 1); }

static void free_team(team *t)
{
    for (int i = 0; i < t->workers; i++) free(t->worker[i]);
    free(t);
}

/* Called when the thread that owns the team ends. */
static void end_team(void *pointer)
{
    team *t = pointer;
    if (t->forks == atomic_load(&forks)) {
        pthread_mutex_lock(&t->lock);
        atomic_store(&t->order, atomic_load(&t->order) | QUIT);
        for (int i = 0; i < t->workers; i++) pthread_cond_signal(&t->worker[i]->wake);
        pthread_mutex_unlock(&t->lock);
        for (int i = 0; i < t->workers; i++) {
            pthread_join(t->worker[i]->thread, NULL);
            pthread_cond_destroy(&t->worker[i]->wake);
        }
        pthread_cond_destroy(&t->done);
        pthread_mutex_destroy(&t->lock);
    }
    free_team(t);
}

static void make_key(void)
{
    const char *policy = getenv("OMP_WAIT_POLICY");
    passive = policy && strcasecmp(policy, "passive") == 0;
    has_key =
        pthread_atfork(NULL, NULL, count_fork) == 0 && pthread_key_create(&key, end_team) == 0;
}

static int count_processors(void)
{
#ifdef _OPENMP
    return omp_get_num_procs();
#else
    return (int)sysconf(_SC_NPROCESSORS_ONLN);
#endif
}

static team *make_team(void)
{
    team *t = aligned_alloc(LINE, (sizeof *t + LINE - 1) / LINE * LINE);
    if (!t) return NULL;
    atomic_init(&t->order, 0);
    atomic_init(&t->running, 0);
    atomic_init(&t->caller_asleep, false);
    atomic_init(&t->next, 0);
    t->forks = atomic_load(&forks);
    t->workers = 0;
    t->processors = count_processors();
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->done, NULL);
    if (pthread_setspecific(key, t) == 0) return t;
    free(t);
    return NULL;
}

/* The calling thread's team; NULL: there is none. */
static team *find_team(bool make)
{
    pthread_once(&once, make_key);
    if (!has_key) return NULL;
    team *t = pthread_getspecific(key);
    if (t && t->forks != atomic_load(&forks)) {
        free_team(t);
        pthread_setspecific(key, NULL);
        t = NULL;
    }
    return t || !make ? t : make_team();
}

static bool start(worker *w)
{
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) != 0) return false;
    (void)pthread_attr_setstacksize(&attributes, STACK_BYTES);
    int failed = pthread_create(&w->thread, &attributes, work, w);
    pthread_attr_destroy(&attributes);
    /* Thread-local data of libraries may need a larger stack. */
    if (failed == EINVAL) failed = pthread_create(&w->thread, NULL, work, w);
    return failed == 0;
}

static bool add_worker(team *t)
{
    worker *w = aligned_alloc(LINE, (sizeof *w + LINE - 1) / LINE * LINE);
    if (!w) return false;
    w->mine = t;
    w->index = t->workers;
    w->seen = atomic_load(&t->order);
    w->place = choose_place(w->index);
    atomic_init(&w->asleep, false);
    pthread_cond_init(&w->wake, NULL);
    t->worker[w->index] = w; /* before it could be looked for */
    if (start(w)) {
        t->workers++;
        return true;
    }
    pthread_cond_destroy(&w->wake);
    free(w);
    return false;
}

int fa_team_reserve(int wanted)
{
    if (wanted <= 1) return 1;
    if (wanted > FA_TEAM_MAX) wanted = FA_TEAM_MAX;
    team *t = find_team(true);
    if (!t) return 1;
    while (t->workers < wanted - 1 && add_worker(t)) continue;
    return t->workers < wanted - 1 ? t->workers + 1 : wanted;
}

void fa_team_run(int threads, int64_t total, int64_t chunk, fa_team_function *f, void *context)
{
    const int64_t chunks = total > 0 ? 1 + (total - 1) / chunk : 0;
    if (threads > chunks) threads = (int)chunks;
    team *t = threads > 1 ? find_team(false) : NULL;
    if (t && threads > t->workers + 1) threads = t->workers + 1;
    if (!t || threads <= 1) { /* starting others would take longer than a little work */
        for (int64_t index = 0; index < total; index++) f(context, index, 0);
        return;
    }
    t->total = total;
    t->chunk = chunk;
    t->f = f;
    t->context = context;
    t->spins = !passive && threads <= t->processors;
    atomic_store(&t->next, 0);
    atomic_store(&t->running, threads - 1);
    const unsigned long long runs = (atomic_load(&t->order) >> 16) + 1;
    atomic_store(&t->order, runs << 16 | (unsigned)(threads - 1));
    wake_worker(t, 0, threads - 1);
    take_chunks(t, 0);
    wait_for_workers(t);
}
