#include "cuda/counters.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

#include "cuda/driver.h"

enum { KNOWN_STREAMS = 8 };

typedef struct shared_counter {
    unsigned long long stream;  /* the id of the stream that has it now */
    unsigned long long context; /* the number of the event's context; no event: not set */
    unsigned long long used;    /* the clock when it was taken last; 0: never */
    void *event;                /* after the latest launch */
    int launching;              /* calls between take and release */
    bool lost;                  /* a launch has no event after it, so its end is unknown */
} shared_counter;

static const fa_cuda_counter none = {-1, NULL};

/* Held during calls of the driver about events. */
static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    unsigned long long owners[FA_CUDA_OWN_COUNTERS]; /* the ids of streams that have a number */
    int num_owners;
    unsigned long long clock;
    shared_counter shared[FA_CUDA_SHARED_COUNTERS];
} streams;

/* The driver returns numbers in its own thread, so no function of the driver is called while this is
 * held. */
static pthread_mutex_t captured_lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    int32_t count; /* numbers after those of streams; 0: not known yet */
    int32_t given; /* have been given out for the first time */
    /* Returned ones wait in a ring of `count` entries, the oldest at `first`. */
    int32_t first, num_back;
    int32_t *back; /* NULL: none has been returned yet */
} captured;

/* ---- Streams --------------------------------------------------------------------------------- */

/* A stream that keeps its number, as this thread remembers it. */
typedef struct known_stream {
    unsigned long long id;
    int32_t number;
    bool known;
} known_stream;

__attribute__((noinline)) static known_stream *remembered(unsigned long long id)
{
    static _Thread_local known_stream known[KNOWN_STREAMS];
    return &known[id % KNOWN_STREAMS];
}

/* -1: all numbers that streams keep are taken. */
static int32_t find_own(unsigned long long id)
{
    for (int i = 0; i < streams.num_owners; i++)
        if (streams.owners[i] == id) return i;
    if (streams.num_owners == FA_CUDA_OWN_COUNTERS) return -1;
    streams.owners[streams.num_owners] = id;
    return streams.num_owners++;
}

/* Whether all launches that had this counter are done. */
static bool is_free(const shared_counter *c)
{
    if (c->used == 0) return true;
    return c->launching == 0 && !c->lost && fa_cuda_event_is_done(c->event);
}

/* The stream's, or else the least recently used one that is free. */
static shared_counter *find_shared(unsigned long long context, unsigned long long id)
{
    shared_counter *oldest = NULL;
    for (int i = 0; i < FA_CUDA_SHARED_COUNTERS; i++) {
        shared_counter *c = &streams.shared[i];
        if (c->used > 0 && c->stream == id) return c;
        if (c->event && c->context != context) continue;
        if ((!oldest || c->used < oldest->used) && is_free(c)) oldest = c;
    }
    if (!oldest || (!oldest->event && !fa_cuda_marker_new(&oldest->event))) return NULL;
    oldest->context = context;
    oldest->stream = id;
    return oldest;
}

/* An event is made in the current context and can only be recorded in streams of that context. */
static fa_cuda_counter take_shared(void *stream, unsigned long long id)
{
    unsigned long long context, current;
    if (!fa_cuda_stream_context(stream, &context) || !fa_cuda_context_number(&current, NULL) ||
        context != current)
        return none;
    shared_counter *c = find_shared(context, id);
    if (!c) return none;
    c->used = ++streams.clock;
    c->launching++;
    return (fa_cuda_counter){FA_CUDA_OWN_COUNTERS + (int32_t)(c - streams.shared), c};
}

static fa_cuda_counter take_for_stream(void *stream)
{
    unsigned long long id;
    if (!fa_cuda_stream_id(stream, &id)) return none;
    known_stream *known = remembered(id);
    if (known->known && known->id == id) return (fa_cuda_counter){known->number, NULL};
    pthread_mutex_lock(&streams_lock);
    const int32_t own = find_own(id);
    const fa_cuda_counter counter =
        own < 0 ? take_shared(stream, id) : (fa_cuda_counter){own, NULL};
    pthread_mutex_unlock(&streams_lock);
    if (own >= 0) *known = (known_stream){id, own, true};
    return counter;
}

void fa_cuda_counter_release(fa_cuda_counter counter, void *stream)
{
    shared_counter *c = counter.shared;
    if (!c) return;
    const bool marked = fa_cuda_event_record(c->event, stream, NULL);
    pthread_mutex_lock(&streams_lock);
    c->launching--;
    if (!marked) c->lost = true;
    pthread_mutex_unlock(&streams_lock);
}

/* ---- Captured calls -------------------------------------------------------------------------- */

/* With captured_lock held: a new number, or else the number that was returned first. -1: all are in use. */
static int32_t next_number(void)
{
    if (captured.given < captured.count) return captured.given++;
    if (captured.num_back == 0) return -1;
    const int32_t number = captured.back[captured.first];
    captured.first = (captured.first + 1) % captured.count;
    captured.num_back--;
    return number;
}

/* Called when the graph has been destroyed. The ring has an entry for each number. */
static void return_number(void *number)
{
    const int32_t *back = number;
    pthread_mutex_lock(&captured_lock);
    if (!captured.back) captured.back = calloc((size_t)captured.count, sizeof *captured.back);
    if (captured.back)
        captured.back[(captured.first + captured.num_back++) % captured.count] = *back;
    pthread_mutex_unlock(&captured_lock);
    free(number);
}

static fa_cuda_counter take_for_capture(void *stream, int32_t count)
{
    int32_t *number = malloc(sizeof *number);
    if (!number) return none;
    pthread_mutex_lock(&captured_lock);
    if (captured.count == 0) captured.count = count - FA_CUDA_STREAM_COUNTERS;
    *number = next_number();
    pthread_mutex_unlock(&captured_lock);
    const fa_cuda_counter counter = {FA_CUDA_STREAM_COUNTERS + *number, NULL};
    if (*number < 0) free(number);
    else if (fa_cuda_graph_keep(stream, return_number, number)) return counter;
    return none;
}

fa_cuda_counter fa_cuda_counter_take(void *stream, int32_t count)
{
    bool capturing;
    if (count <= FA_CUDA_STREAM_COUNTERS || !fa_cuda_capture_status(stream, &capturing))
        return none;
    return capturing ? take_for_capture(stream, count) : take_for_stream(stream);
}
