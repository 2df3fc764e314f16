#include "cuda/counters.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#include "cuda/driver.h"

enum { KNOWN_STREAMS = 8 };

typedef struct shared_counter {
    unsigned long long stream; /* the id of the stream that has it now */
    unsigned long long used;   /* the pool's clock when it was taken last; 0: never */
    void *event;               /* behind the latest launch */
    int launching;             /* calls between take and release */
    bool lost;                 /* a launch has no event behind it, so nobody knows when it ends */
} shared_counter;

typedef struct pool {
    unsigned long long context; /* its number, which no other context gets */
    struct pool *next;
    unsigned long long owners[FA_CUDA_OWN_COUNTERS]; /* the ids of streams that have a number */
    int num_owners;
    unsigned long long clock;
    shared_counter shared[FA_CUDA_SHARED_COUNTERS];
    /* Numbers of captured calls, behind those of streams: `given` have been given out for the first time.
     * Those that came back wait in a ring, the oldest at `first`. */
    int32_t captures, given, first, num_back;
    int32_t *back; /* of `captures` entries; NULL: not needed yet */
} pool;

static const fa_cuda_counter none = {-1, NULL};

/* Guards the pools but for their captured numbers. Held while the driver is asked about events. */
static pthread_mutex_t pools_lock = PTHREAD_MUTEX_INITIALIZER;
static pool *pools;
static int num_pools;

/* Guards the captured numbers. The driver gives them back in a thread of its own, so no function of the
 * driver is called while it is held. */
static pthread_mutex_t captured_lock = PTHREAD_MUTEX_INITIALIZER;

/* With pools_lock held. NULL: no memory, or too many contexts. */
static pool *find_pool(unsigned long long context, int32_t count)
{
    pool *found = pools;
    while (found && found->context != context) found = found->next;
    if (found || num_pools == FA_CUDA_COUNTED_CONTEXTS) return found;
    found = calloc(1, sizeof *found);
    if (!found) return NULL;
    found->context = context;
    found->captures = count - FA_CUDA_STREAM_COUNTERS;
    found->next = pools;
    pools = found;
    num_pools++;
    return found;
}

/* The pool of the stream's context, with pools_lock held if there is one. */
static pool *lock_pool(void *stream, int32_t count)
{
    unsigned long long context;
    if (count < FA_CUDA_STREAM_COUNTERS || !fa_cuda_stream_context(stream, &context)) return NULL;
    pthread_mutex_lock(&pools_lock);
    pool *found = find_pool(context, count);
    if (!found) pthread_mutex_unlock(&pools_lock);
    return found;
}

/* ---- Streams --------------------------------------------------------------------------------- */

/* A stream that keeps its number, as this thread remembers it. */
typedef struct known_stream {
    unsigned long long id;
    int32_t number;
    bool known;
} known_stream;

__attribute__((noinline)) static known_stream *remembered(unsigned long long id)
{
    static _Thread_local known_stream streams[KNOWN_STREAMS];
    return &streams[id % KNOWN_STREAMS];
}

/* -1: all numbers that streams keep are taken. */
static int32_t find_own(pool *p, unsigned long long id)
{
    for (int i = 0; i < p->num_owners; i++)
        if (p->owners[i] == id) return i;
    if (p->num_owners == FA_CUDA_OWN_COUNTERS) return -1;
    p->owners[p->num_owners] = id;
    return p->num_owners++;
}

/* Whether all launches that had this counter are done. */
static bool is_free(const shared_counter *c)
{
    if (c->used == 0) return true;
    return c->launching == 0 && !c->lost && fa_cuda_event_is_done(c->event);
}

/* The stream's, or else the least recently used one that is free. */
static shared_counter *find_shared(pool *p, unsigned long long id)
{
    shared_counter *oldest = NULL;
    for (int i = 0; i < FA_CUDA_SHARED_COUNTERS; i++) {
        shared_counter *c = &p->shared[i];
        if (c->used > 0 && c->stream == id) return c;
        if ((!oldest || c->used < oldest->used) && is_free(c)) oldest = c;
    }
    if (!oldest || (!oldest->event && !fa_cuda_marker_new(&oldest->event))) return NULL;
    oldest->stream = id;
    return oldest;
}

static fa_cuda_counter take_shared(pool *p, unsigned long long id)
{
    shared_counter *c = find_shared(p, id);
    if (!c) return none;
    c->used = ++p->clock;
    c->launching++;
    return (fa_cuda_counter){FA_CUDA_OWN_COUNTERS + (int32_t)(c - p->shared), c};
}

static fa_cuda_counter take_for_stream(void *stream, int32_t count)
{
    unsigned long long id;
    if (!fa_cuda_stream_id(stream, &id)) return none;
    known_stream *known = remembered(id);
    if (known->known && known->id == id) return (fa_cuda_counter){known->number, NULL};
    pool *p = lock_pool(stream, count);
    if (!p) return none;
    const int32_t own = find_own(p, id);
    const fa_cuda_counter counter = own < 0 ? take_shared(p, id) : (fa_cuda_counter){own, NULL};
    pthread_mutex_unlock(&pools_lock);
    if (own >= 0) *known = (known_stream){id, own, true};
    return counter;
}

void fa_cuda_counter_release(fa_cuda_counter counter, void *stream)
{
    shared_counter *c = counter.shared;
    if (!c) return;
    const bool marked = fa_cuda_event_record(c->event, stream, NULL);
    pthread_mutex_lock(&pools_lock);
    c->launching--;
    if (!marked) c->lost = true;
    pthread_mutex_unlock(&pools_lock);
}

/* ---- Captured calls -------------------------------------------------------------------------- */

typedef struct captured_number {
    pool *owner;
    int32_t number;
} captured_number;

/* With captured_lock held: a new number, or else the one that came back first. -1: all are in use. */
static int32_t next_number(pool *p)
{
    if (p->given < p->captures) return p->given++;
    if (p->num_back == 0) return -1;
    const int32_t number = p->back[p->first];
    p->first = (p->first + 1) % p->captures;
    p->num_back--;
    return number;
}

/* Called when the graph is gone. Numbers are at most as many as the ring has entries. */
static void give_back(void *data)
{
    captured_number *c = data;
    pool *p = c->owner;
    pthread_mutex_lock(&captured_lock);
    if (!p->back) p->back = calloc((size_t)p->captures, sizeof *p->back);
    if (p->back) p->back[(p->first + p->num_back++) % p->captures] = c->number;
    pthread_mutex_unlock(&captured_lock);
    free(c);
}

static fa_cuda_counter take_for_capture(void *stream, int32_t count)
{
    captured_number *c = malloc(sizeof *c);
    pool *p = c ? lock_pool(stream, count) : NULL;
    if (!p) {
        free(c);
        return none;
    }
    pthread_mutex_unlock(&pools_lock);
    pthread_mutex_lock(&captured_lock);
    *c = (captured_number){p, next_number(p)};
    pthread_mutex_unlock(&captured_lock);
    const fa_cuda_counter counter = {FA_CUDA_STREAM_COUNTERS + c->number, NULL};
    if (c->number < 0) free(c);
    else if (fa_cuda_graph_keep(stream, give_back, c)) return counter;
    return none;
}

fa_cuda_counter fa_cuda_counter_take(void *stream, int32_t count)
{
    bool capturing;
    if (!fa_cuda_capture_status(stream, &capturing)) return none;
    return capturing ? take_for_capture(stream, count) : take_for_stream(stream, count);
}
