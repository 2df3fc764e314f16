#include "hopper_units.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convert.h"
#include "wide_vectors.h"

enum {
    WARP = 32,
    WARPGROUP = 128,
    MAX_GROUPS = 8,
    MAX_THREADS = MAX_GROUPS * WARPGROUP,
    MAX_BARRIERS = 128,
    MAX_LOADS = 4096,        /* pending ones */
    MAX_PRODUCTS = 128,      /* pending ones of a thread */
    MAX_COMMITS = 8,         /* pending groups of them */
    MAX_RESULTS = 6,         /* sets of accumulators to which products write */
    MAX_ADDITIONS = 1 << 16, /* pending ones of a run */
    MAX_COLUMNS = 256,
    MAX_BYTES = (1 << 20) - 1, /* the most that a phase of a barrier can expect */
    SWIZZLE = 128,
    PATTERN = 1024, /* bytes after which the swizzle repeats */
    REGISTERS = 65536
};

int64_t hopper_paths[HOPPER_PATHS];
bool hopper_cuts_off;

static const uint32_t poison = 0x7fc0dead; /* a NaN with unique bits */

typedef struct barrier {
    const uint64_t *word;
    int arrivals, missing; /* of a phase; of this one */
    int bytes;             /* that this phase still expects; from a peer they may come before */
    int from_peer;         /* bytes that it has got from there */
    unsigned phase;
    int waiting;                         /* threads */
    uint32_t waits[MAX_THREADS];         /* of each thread so far */
    uint32_t passed[MAX_THREADS / WARP]; /* of each warp: the most waits that a lane has passed */
} barrier;

/* A pending copy: a box of a tensor, contiguous bytes, or bytes from the block to a peer. */
typedef struct load {
    fa_tensor_map_shape map;
    char *to;
    int64_t start[FA_TENSOR_MAP_AXES];
    barrier *full;
    const char *from; /* of contiguous bytes; otherwise NULL */
    unsigned peer;
    unsigned copier; /* the thread behind whose copies this is an arrival; those up to this group */
    int copies;      /* 0: it is none */
    int bytes;       /* in a row, or to the peer; 0: it is a box */
    bool issued_by_peer;
    bool fenced; /* they are read where copies see the block's shared memory */
    float x[4];  /* else these are sent */
} load;

/* Pending floats that will be added in global memory, or a box that will be stored. */
typedef struct addition {
    uint64_t block;
    unsigned thread;
    uint64_t group; /* of the thread */
    float *to;
    const char *from; /* in shared memory */
    float *values;    /* the floats; freed when they have been added and the source has been read */
    int bytes;
    load *box;        /* NULL: contiguous floats; freed with the values */
    uint32_t address; /* in shared memory, of a box */
    bool stores;      /* does not add */
    bool added, read;
} addition;

/* A thread's groups of additions: how many are committed, have ended, and are waited for, in both
 * ways. */
typedef struct bulk_groups {
    uint64_t committed, ended[2], wanted[2];
    const int32_t *turns[2]; /* semaphores that it has waited for and not added to yet, 2 at most */
    bool unfenced;           /* since its last fence */
    bool waited;             /* for the previous grids */
} bulk_groups;

/* Accumulators to which pending products write. */
typedef struct result {
    float *d; /* NULL: none */
    int count;
    uint64_t last; /* number of the last such product */
    float value[MAX_COLUMNS / 2];
} result;

/* What each thread has of its own in a product. */
typedef struct own_operands {
    float *d;
    const uint32_t *registers;
} own_operands;

typedef struct lane {
    own_operands operands[MAX_PRODUCTS]; /* of product number n at n % MAX_PRODUCTS */
    uint64_t issued, commits;            /* products, groups of them */
    uint64_t end[MAX_COMMITS];           /* group g ends before product end[g % MAX_COMMITS] */
    bool fenced;
    result results[MAX_RESULTS];
} lane;

/* Threads whose products complete together: a warpgroup, or a warp, which has 16 rows. Products are those
 * of the thread that issued the most. */
typedef struct strip {
    hopper_product products[MAX_PRODUCTS]; /* number n is at n % MAX_PRODUCTS */
    uint64_t issued;
    uint64_t done, groups_done; /* products, groups */
    uint64_t wanted;            /* groups that some thread waits for */
} strip;

typedef struct warpgroup {
    lane lanes[WARPGROUP];
    strip strips[WARPGROUP / WARP]; /* only the first one, unless warps multiply separately */
} warpgroup;

/* The units of a block. */
typedef struct block_units {
    uint64_t block; /* counts all blocks: identifies this one's barriers */
    int num_barriers;
    bool barriers_fenced;
    barrier barriers[MAX_BARRIERS];
    int num_loads;
    load loads[MAX_LOADS];
    /* Shared memory as copies and products see it: stores of threads become visible by a fence. */
    char *seen;
    bool proxy_fenced;
    /* For each two bytes there: which thread stored them, and how many fences it had made. 0: none,
     * or a copy. */
    uint32_t *stored;
    size_t bytes; /* for which there is room in both */
    uint32_t fences[MAX_THREADS];
    bulk_groups bulk[MAX_THREADS];
    bool bulk_wanted; /* false: no thread waits for groups that have not ended */
    warpgroup groups[MAX_GROUPS];
    int registers[MAX_THREADS];
    int pause; /* how much longer threads pause; 0: none does */
} block_units;

static struct {
    const cuda_run *run;
    uint64_t blocks; /* so far */
    unsigned ended;  /* of the run */
    block_units of[CUDA_MOST_TOGETHER];
    int num_additions;
    addition additions[MAX_ADDITIONS]; /* of all blocks, in the order in which they were issued */
} units;

static block_units *here(void) { return &units.of[cuda_place]; }

/* ---- Shared memory --------------------------------------------------------------------------- */

/* The part of an address that a matrix descriptor does not contain: the block's number in its
 * cluster. */
static uint32_t block_bits(void) { return cuda_shared_address(cuda_shared_memory) & ~0x3ffffu; }

static uint32_t swizzled(uint32_t address) { return address ^ (address / SWIZZLE % 8 * 16); }

static size_t offset_in_shared(const void *pointer)
{
    return (size_t)((const char *)pointer - (const char *)cuda_shared_memory);
}

/* The storing thread, in bits 16 and above, and the number of its fences so far. */
static uint32_t store_of(unsigned thread)
{
    return (thread + 1) << 16 | (here()->fences[thread] & 0xffff);
}

static void store(const void *to, size_t size)
{
    const size_t first = offset_in_shared(to), last = first + size - 1;
    for (size_t i = first / 2; i <= last / 2; i++) here()->stored[i] = store_of(cuda_thread.x);
}

void hopper_proxy_fence(void)
{
    here()->proxy_fenced = true;
    here()->fences[cuda_thread.x]++;
}

/* Called before copies and products read. */
static void see_fenced(void)
{
    if (here()->proxy_fenced) memcpy(here()->seen, cuda_shared_memory, units.run->smem_bytes);
    here()->proxy_fenced = false;
}

static void die_unfenced(size_t offset, uint32_t stored)
{
    const unsigned thread = (stored >> 16) - 1;
    if (stored == store_of(thread))
        cuda_die("a copy or product reads byte %zu of shared memory, which thread %u stored "
                 "without a fence behind it",
                 offset, thread);
}

/* What copies and products read, in multiples of 16 bytes. */
static const char *read_seen(size_t offset, size_t size)
{
    static const uint32_t nobody[8];
    for (size_t at = offset; at < offset + size; at += 16) {
        const uint32_t *stored = here()->stored + at / 2;
        if (memcmp(stored, nobody, sizeof nobody) == 0) continue;
        for (int i = 0; i < 8; i++)
            if (stored[i]) die_unfenced(at + 2 * (size_t)i, stored[i]);
    }
    return here()->seen + offset;
}

/* What copies write is visible to copies and products immediately. */
static void write_seen(block_units *u, size_t offset, const void *bytes, size_t size)
{
    memcpy(u->seen + offset, bytes, size);
    memset(u->stored + offset / 2, 0, (size + 1) / 2 * sizeof *u->stored);
}

/* ---- Barriers -------------------------------------------------------------------------------- */

static uint64_t mark_of(int number) { return here()->block << 16 | (uint64_t)number; }

static barrier *find_barrier(const uint64_t *word)
{
    const int number = (int)(*word & 0xffff);
    if (number >= here()->num_barriers || *word != mark_of(number) ||
        here()->barriers[number].word != word)
        cuda_die("a barrier that was not initialized");
    return &here()->barriers[number];
}

static int number_of(const barrier *b)
{
    const int number = (int)(b - here()->barriers);
    return number >= 0 && number < MAX_BARRIERS ? number : -1; /* another block's barrier */
}

void hopper_barrier_init(uint64_t *word, int arrivals)
{
    if ((uintptr_t)word % 8) cuda_die("a misaligned barrier");
    if (arrivals < 1 || arrivals >= 1 << 20) cuda_die("a barrier of %d arrivals", arrivals);
    for (int i = 0; i < here()->num_barriers; i++)
        if (here()->barriers[i].word == word) cuda_die("barrier %d is initialized again", i);
    if (here()->num_barriers == MAX_BARRIERS) cuda_die("too many barriers");
    *word = mark_of(here()->num_barriers);
    here()->barriers[here()->num_barriers++] =
        (barrier){.word = word, .arrivals = arrivals, .missing = arrivals};
    here()->barriers_fenced = false;
}

void hopper_barrier_fence(void) { here()->barriers_fenced = true; }

/* The same barrier of another block. */
static barrier *find_peer_barrier(const uint64_t *word, unsigned peer)
{
    block_units *u = &units.of[cuda_place_of(peer)];
    const int number = number_of(find_barrier(word));
    if (number >= u->num_barriers || u->barriers[number].word != word)
        cuda_die("barrier %d is another one in block %u", number, peer);
    return &u->barriers[number];
}

static void end_phase_if_complete(barrier *b)
{
    if (b->missing || b->bytes) return;
    b->phase++;
    b->missing = b->arrivals;
    b->from_peer = 0;
}

static void arrive(barrier *b)
{
    if (b->missing == 0)
        cuda_die("barrier %d: more than %d arrivals in a phase", number_of(b), b->arrivals);
    b->missing--;
    end_phase_if_complete(b);
}

void hopper_barrier_arrive(uint64_t *word)
{
    arrive(find_barrier(word));
    cuda_be_late();
}

void hopper_barrier_arrive_at_peer(uint64_t *word, unsigned peer)
{
    arrive(find_peer_barrier(word, peer));
    cuda_be_late();
}

void hopper_barrier_expect(uint64_t *word, int bytes)
{
    barrier *b = find_barrier(word);
    if (bytes < 0 || b->bytes + bytes > MAX_BYTES)
        cuda_die("barrier %d cannot expect %d bytes", number_of(b), bytes);
    b->bytes += bytes;
    arrive(b);
}

/* Data from a peer may arrive before they are expected. */
static void receive_from_peer(barrier *b, int bytes)
{
    b->bytes -= bytes;
    b->from_peer += bytes;
    end_phase_if_complete(b);
}

static void receive(barrier *b, int bytes)
{
    if (b->bytes + b->from_peer < bytes)
        cuda_die("barrier %d receives %d bytes and expects %d", number_of(b), bytes, b->bytes);
    b->bytes -= bytes;
    end_phase_if_complete(b);
}

/* What a thread waits for: the end of a phase, identified by its parity. The lanes of a warp leave
 * the loop around try_wait together: when one lane has passed, the others pass, even if two phases
 * have ended since. */
typedef struct parity_wait {
    unsigned parity, warp;
    uint32_t number;
} parity_wait;

static uint64_t pack_wait(parity_wait w)
{
    return w.parity | (uint64_t)w.warp << 1 | (uint64_t)w.number << 32;
}

static parity_wait unpack_wait(uint64_t value)
{
    return (parity_wait){value & 1, (unsigned)(value >> 1 & 0xff), (uint32_t)(value >> 32)};
}

static bool has_passed(const cuda_wait *wait)
{
    const barrier *b = wait->what;
    const parity_wait w = unpack_wait(wait->value);
    return (b->phase & 1) != w.parity || b->passed[w.warp] >= w.number;
}

static void describe_barrier(const cuda_wait *wait, char *text, size_t size)
{
    const barrier *b = wait->what;
    snprintf(
        text, size, "waits at barrier %d for parity %u: phase %u lacks %d of %d arrivals, %d bytes",
        number_of(b), unpack_wait(wait->value).parity, b->phase, b->missing, b->arrivals, b->bytes);
}

void hopper_barrier_wait(uint64_t *word, int parity)
{
    barrier *b = find_barrier(word);
    const unsigned warp = cuda_thread.x / WARP;
    const uint32_t number = ++b->waits[cuda_thread.x];
    const parity_wait w = {(unsigned)parity & 1, warp, number};
    const cuda_wait wait = {has_passed, describe_barrier, b, pack_wait(w)};
    if (parity != 0 && parity != 1) cuda_die("a parity of %d", parity);
    b->waiting++;
    cuda_wait_until(&wait);
    b->waiting--;
    if (b->passed[warp] < number) b->passed[warp] = number;
}

bool hopper_barrier_is_over(uint64_t *word, int parity)
{
    if (parity != 0 && parity != 1) cuda_die("a parity of %d", parity);
    return (int)(find_barrier(word)->phase & 1) != parity;
}

static void check_barriers(void)
{
    for (int i = 0; i < here()->num_barriers; i++) {
        const barrier *b = &here()->barriers[i];
        if (b->missing != b->arrivals || b->bytes)
            cuda_die("the end, and barrier %d lacks %d of %d arrivals, %d bytes", i, b->missing,
                     b->arrivals, b->bytes);
    }
}

/* ---- TMA
 * --------------------------------------------------------------------------------------- */

/* The contents of a map on this machine. */
typedef struct map {
    fa_tensor_map_shape shape;
    uint64_t mark;
} map;
_Static_assert(sizeof(map) <= sizeof(fa_tensor_map), "a shape fits into a map");

static const uint64_t map_mark = 0x6d6170206f662068;

bool hopper_encode_map(fa_tensor_map *to, const fa_tensor_map_shape *shape, fa_cuda_fault *fault)
{
    const char *why;
    if (!fa_tensor_map_fits(shape, &why)) {
        snprintf(fault->text, sizeof fault->text, "%s", why);
        return false;
    }
    const map m = {.shape = *shape, .mark = map_mark};
    memcpy(to, &m, sizeof m);
    return true;
}

static int box_bytes(const fa_tensor_map_shape *m)
{
    int bytes = FA_ELEMENT_BYTES(m->element);
    for (int i = 0; i < m->axes; i++) bytes *= (int)m->box[i];
    return bytes;
}

/* The address of row `row` of a box; NULL: outside the tensor. Rows count through all axes but
 * one. */
static const char *find_row(const load *l, int row)
{
    const char *from = l->map.base;
    for (int i = 1; i < l->map.axes; i++) {
        const int64_t at = l->start[i] + row % (int)l->map.box[i];
        row /= (int)l->map.box[i];
        if (at < 0 || at >= (int64_t)l->map.extent[i]) return NULL;
        from += l->map.extent[i] > 1 ? (uint64_t)at * l->map.stride[i] : 0;
    }
    return from;
}

/* TMA rounds to tf32, to the nearest, ties to even (observed on an H200). */
static void round_to_tf32(char bytes[SWIZZLE])
{
    for (int i = 0; i < SWIZZLE; i += 4) {
        uint32_t x;
        memcpy(&x, bytes + i, sizeof x);
        if ((x & 0x7f800000u) != 0x7f800000u) x = (x + 0xfffu + (x >> 13 & 1)) & ~0x1fffu;
        memcpy(bytes + i, &x, sizeof x);
    }
}

/* One row of 128 bytes; zeros where it is outside. */
static void read_row(const load *l, int row, char bytes[SWIZZLE])
{
    const char *from = find_row(l, row);
    const int64_t size = FA_ELEMENT_BYTES(l->map.element), width = SWIZZLE / size;
    const int64_t extent = (int64_t)l->map.extent[0], first = l->start[0];
    const int64_t begin = first < 0 ? -first : 0;
    const int64_t end = extent - first < width ? extent - first : width;
    memset(bytes, 0, SWIZZLE);
    if (!from || begin >= end) return;
    cuda_check_access(from + size * (first + begin), (size_t)(size * (end - begin)));
    memcpy(bytes + size * begin, from + size * (first + begin), (size_t)(size * (end - begin)));
    if (l->map.element == FA_ELEMENT_TF32) round_to_tf32(bytes);
}

static void write_row(char *to, const char bytes[SWIZZLE])
{
    const uint32_t address = cuda_shared_address(to);
    for (uint32_t i = 0; i < SWIZZLE; i += 16) {
        char *chunk = cuda_shared_at(swizzled(address + i), 16);
        memcpy(chunk, bytes + i, 16);
        write_seen(here(), offset_in_shared(chunk), bytes + i, 16);
    }
}

static void finish_box(const load *l)
{
    char bytes[SWIZZLE];
    for (int row = 0; row < box_bytes(&l->map) / SWIZZLE; row++) {
        read_row(l, row, bytes);
        write_row(l->to + row * SWIZZLE, bytes);
    }
    if (l->issued_by_peer) receive_from_peer(l->full, box_bytes(&l->map));
    else receive(l->full, box_bytes(&l->map));
}

/* Data that are sent to a peer: its copies and products see them immediately. */
static void write_at_peer(const load *l, const void *bytes, int size)
{
    char *to = cuda_at_peer(l->to, l->peer);
    memcpy(to, bytes, (size_t)size);
    write_seen(&units.of[cuda_place_of(l->peer)], offset_in_shared(l->to), bytes, (size_t)size);
}

static void finish_sending(const load *l)
{
    if (l->fenced) write_at_peer(l, read_seen(offset_in_shared(l->to), (size_t)l->bytes), l->bytes);
    else write_at_peer(l, l->x, l->bytes);
    receive_from_peer(l->full, l->bytes);
}

static void spoil_peer(const load *l)
{
    for (int i = 0; i < l->bytes; i += (int)sizeof poison)
        write_at_peer(&(load){.to = l->to + i, .peer = l->peer}, &poison, sizeof poison);
}

static void keep(const load *l)
{
    if (here()->num_loads == MAX_LOADS) cuda_die("too many copies on their way");
    here()->loads[here()->num_loads++] = *l;
}

static void finish_arrival(const load *l)
{
    cuda_finish_copies(l->copier, l->copies);
    arrive(l->full);
}

void hopper_barrier_arrive_behind_copies(uint64_t *word)
{
    cuda_commit_copies();
    const load l = {
        .full = find_barrier(word), .copier = cuda_thread.x, .copies = cuda_committed_copies()};
    if (units.run->late_copies) keep(&l);
    else finish_arrival(&l);
}

static void send(const load *l)
{
    if (!units.run->late_copies) {
        finish_sending(l);
        return;
    }
    spoil_peer(l);
    keep(l);
}

void hopper_send_floats(float *shared, uint64_t *word, unsigned peer, const float *x, int count)
{
    const size_t size = (size_t)count * sizeof *x;
    load l = {.to = (char *)shared,
              .full = find_peer_barrier(word, peer),
              .peer = peer,
              .bytes = (int)size};
    (void)cuda_shared_at(cuda_shared_address(shared), size);
    memcpy(l.x, x, size);
    send(&l);
}

void hopper_send_bytes(void *shared, uint64_t *word, unsigned peer, int bytes)
{
    if (cuda_shared_address(shared) % 16 || bytes % 16 || bytes <= 0)
        cuda_die("a copy to a peer of other than whole 16 bytes");
    (void)cuda_shared_at(cuda_shared_address(shared) + (uint32_t)bytes - 16, 16);
    see_fenced();
    send(&(load){.to = shared,
                 .full = find_peer_barrier(word, peer),
                 .peer = peer,
                 .bytes = bytes,
                 .fenced = true});
}

static void spoil_box(const load *l)
{
    char bytes[SWIZZLE];
    memset(bytes, 0xff, sizeof bytes);
    for (int row = 0; row < box_bytes(&l->map) / SWIZZLE; row++)
        write_row(l->to + row * SWIZZLE, bytes);
}

static load describe_box(void *shared, const void *opaque, int axes, const int *start)
{
    map m;
    load l = {.to = shared};
    memcpy(&m, opaque, sizeof m);
    if (m.mark != map_mark || (uintptr_t)opaque % 64) cuda_die("no tensor map, or misaligned");
    if (m.shape.axes != axes) cuda_die("a map of %d axes, not %d", m.shape.axes, axes);
    if (m.shape.box[0] * (uint32_t)FA_ELEMENT_BYTES(m.shape.element) != SWIZZLE)
        cuda_die("a box of other rows than 128 bytes");
    if (cuda_shared_address(shared) % SWIZZLE) cuda_die("a misaligned box in shared memory");
    l.map = m.shape;
    for (int i = 0; i < axes; i++) l.start[i] = start[i];
    return l;
}

static void load_box(void *shared, const void *opaque, uint64_t *word, int axes, const int *start,
                     bool issued_by_peer)
{
    load l = describe_box(shared, opaque, axes, start);
    l.issued_by_peer = issued_by_peer;
    l.full = find_barrier(word);
    if (!here()->barriers_fenced) cuda_die("barriers that TMA may not see yet");
    if (!units.run->late_copies) {
        finish_box(&l);
        return;
    }
    spoil_box(&l);
    keep(&l);
}

void hopper_let_next_grid_start(void)
{
    if (units.run->overlaps && units.run->lets_late && !here()->bulk[cuda_thread.x].waited)
        cuda_die("thread %u lets the next grid start before the grids in front have ended",
                 cuda_thread.x);
}

static void check_waited(void)
{
    if (units.run->overlaps && !units.run->begins_early && !here()->bulk[cuda_thread.x].waited)
        cuda_die("thread %u uses the caller's memory before the grids in front have ended",
                 cuda_thread.x);
}

void hopper_load(void *shared, const void *opaque, uint64_t *word, int axes, const int *start)
{
    check_waited();
    load_box(shared, opaque, word, axes, start, false);
}

void hopper_load_blocks(void *shared, const void *opaque, uint64_t *word, int axes,
                        const int *start, unsigned blocks)
{
    const unsigned count = cuda_cluster_size(units.run), place = cuda_place;
    void *to[CUDA_MOST_CLUSTER];
    check_waited();
    if (blocks == 0 || blocks >> count)
        cuda_die("a load into blocks %x of a cluster of %u", blocks, count);
    for (unsigned rank = 0; rank < count; rank++) to[rank] = cuda_at_peer(shared, rank);
    for (unsigned rank = 0; rank < count; rank++) {
        if (!(blocks >> rank & 1)) continue;
        cuda_enter_block(cuda_place_of(rank));
        load_box(to[rank], opaque, word, axes, start, cuda_place != place);
    }
    cuda_enter_block(place);
}

/* ---- Bulk copies ----------------------------------------------------------------------------- */

static void check_bulk(const void *shared, const void *global, int bytes)
{
    if (bytes <= 0 || bytes % 16) cuda_die("a bulk copy of %d bytes", bytes);
    if (cuda_shared_address(shared) % 16) cuda_die("a bulk copy misaligned in shared memory");
    if ((uintptr_t)global % 16) cuda_die("a bulk copy misaligned in global memory");
    (void)cuda_shared_at(cuda_shared_address(shared) + (uint32_t)bytes - 16, 16);
    cuda_check_access(global, (size_t)bytes);
}

static void finish_row(const load *l)
{
    memcpy(l->to, l->from, (size_t)l->bytes);
    write_seen(here(), offset_in_shared(l->to), l->from, (size_t)l->bytes);
    receive(l->full, l->bytes);
}

void hopper_bulk_load(void *shared, const void *global, uint64_t *word, int bytes)
{
    const load l = {.to = shared, .full = find_barrier(word), .from = global, .bytes = bytes};
    check_bulk(shared, global, bytes);
    if (!here()->barriers_fenced) cuda_die("barriers that TMA may not see yet");
    if (!units.run->late_copies) {
        finish_row(&l);
        return;
    }
    memset(shared, 0xff, (size_t)bytes);
    write_seen(here(), offset_in_shared(shared), shared, (size_t)bytes);
    keep(&l);
}

/* Additions in global memory flush subnormal numbers to 0. */
static float flushed(float x) { return fabsf(x) < FLT_MIN ? copysignf(0, x) : x; }

static void add_floats(float *to, const float *x, int count)
{
    for (int i = 0; i < count; i++) to[i] = flushed(flushed(to[i]) + flushed(x[i]));
}

/* Stores the part of a row of a box that is inside the tensor, and what follows in the last 16 bytes: a
 * row's end may lie between them. */
static void store_row(const addition *a, int row)
{
    _Alignas(16) char bytes[SWIZZLE];
    const load *l = a->box;
    const int64_t size = FA_ELEMENT_BYTES(l->map.element), width = SWIZZLE / size;
    char *to = (char *)(uintptr_t)find_row(l, row);
    const int64_t extent = (int64_t)l->map.extent[0], first = l->start[0];
    const int64_t begin = first < 0 ? -first : 0;
    const int64_t vector = 16 / size, inside = (extent - first + vector - 1) / vector * vector;
    const int64_t end = inside < width ? inside : width;
    if (!to || begin >= end) return;
    for (uint32_t i = 0; i < SWIZZLE; i += 16)
        memcpy(bytes + i,
               (const char *)a->values +
                   (swizzled(a->address + (uint32_t)row * SWIZZLE + i) - a->address),
               16);
    cuda_check_access(to + size * (first + begin), (size_t)(size * (end - begin)));
    if (a->stores)
        memcpy(to + size * (first + begin), bytes + size * begin, (size_t)(size * (end - begin)));
    else
        add_floats((float *)(void *)to + first + begin, (const float *)(void *)bytes + begin,
                   (int)(end - begin));
}

static void add(addition *a)
{
    for (int row = 0; a->box && row < a->bytes / SWIZZLE; row++) store_row(a, row);
    if (!a->box && a->stores) memcpy(a->to, a->values, (size_t)a->bytes);
    if (!a->box && !a->stores) add_floats(a->to, a->values, a->bytes / (int)sizeof(float));
    a->added = true;
}

/* The source may change from now on, and must not have changed before. */
static void end_reading(addition *a)
{
    if (memcmp(a->from, a->values, (size_t)a->bytes) != 0)
        cuda_die("the source of a bulk addition by thread %u has changed before it was waited for",
                 a->thread);
    a->read = true;
}

static void drop_ended_additions(void)
{
    int left = 0;
    for (int i = 0; i < units.num_additions; i++) {
        const addition *a = &units.additions[i];
        if (a->read && a->added) free(a->values), free(a->box);
        else if (left++ < i) units.additions[left - 1] = *a;
    }
    units.num_additions = left;
}

/* to: NULL for a box. */
static void issue_addition(float *to, const load *box, bool stores, const void *shared, int bytes)
{
    see_fenced();
    const char *from = read_seen(offset_in_shared(shared), (size_t)bytes);
    if (memcmp(from, shared, (size_t)bytes) != 0)
        cuda_die("a bulk addition of what was stored without a fence behind it");
    if (units.num_additions == MAX_ADDITIONS) cuda_die("too many additions on their way");
    addition *a = &units.additions[units.num_additions++];
    *a = (addition){.block = here()->block,
                    .thread = cuda_thread.x,
                    .group = here()->bulk[cuda_thread.x].committed,
                    .to = to,
                    .from = shared,
                    .values = malloc((size_t)bytes),
                    .bytes = bytes,
                    .address = cuda_shared_address(shared),
                    .stores = stores,
                    .box = box ? malloc(sizeof *box) : NULL};
    if (!a->values || (box && !a->box)) abort();
    memcpy(a->values, from, (size_t)bytes);
    if (box) *a->box = *box;
    if (!units.run->late_copies) add(a);
}

static void write_in_bulk(void *global, bool stores, const void *shared, int bytes)
{
    const bulk_groups *g = &here()->bulk[cuda_thread.x];
    check_bulk(shared, global, bytes);
    if (g->unfenced) cuda_die("a bulk addition behind a semaphore without a fence");
    if (units.run->overlaps && !g->waited)
        cuda_die("a bulk addition before the grids in front have ended");
    issue_addition(global, NULL, stores, shared, bytes);
}

void hopper_bulk_add(float *global, const void *shared, int bytes)
{
    write_in_bulk(global, false, shared, bytes);
}

void hopper_bulk_store(void *global, const void *shared, int bytes)
{
    write_in_bulk(global, true, shared, bytes);
}

void hopper_store(const void *opaque, const void *shared, int axes, const int *start, bool adds)
{
    const load box = describe_box((void *)(uintptr_t)shared, opaque, axes, start);
    if (adds && box.map.element != FA_ELEMENT_FLOAT32)
        cuda_die("a box of other than floats is added");
    issue_addition(NULL, &box, !adds, shared, box_bytes(&box.map));
}

void hopper_bulk_commit(void) { here()->bulk[cuda_thread.x].committed++; }

/* Ends the groups of a thread before this one. */
static void end_groups(unsigned thread, uint64_t group, hopper_bulk_end end)
{
    for (int n = 0; n < units.num_additions; n++) {
        const int i = units.run->backwards ? units.num_additions - 1 - n : n;
        addition *a = &units.additions[i];
        if (a->block != here()->block || a->thread != thread || a->group >= group) continue;
        if (!a->read) end_reading(a);
        if (end == HOPPER_BULK_ADDED && !a->added) add(a);
    }
    drop_ended_additions();
    here()->bulk[thread].ended[end] = group;
}

static bool have_ended(const cuda_wait *wait)
{
    const uint64_t *ended = wait->what;
    return *ended >= wait->value;
}

static void describe_groups(const cuda_wait *wait, char *text, size_t size)
{
    snprintf(text, size, "waits for group %llu of bulk additions", (unsigned long long)wait->value);
}

void hopper_bulk_wait(int pending, hopper_bulk_end end)
{
    bulk_groups *g = &here()->bulk[cuda_thread.x];
    const uint64_t left = (uint64_t)pending;
    const uint64_t wanted = g->committed > left ? g->committed - left : 0;
    const cuda_wait wait = {have_ended, describe_groups, &g->ended[end], wanted};
    g->wanted[end] = wanted;
    here()->bulk_wanted = here()->bulk_wanted || g->ended[end] < wanted;
    if (!units.run->late_copies && g->ended[end] < wanted) end_groups(cuda_thread.x, wanted, end);
    cuda_wait_until(&wait);
}

static bool end_some_groups(void)
{
    if (!here()->bulk_wanted) return false;
    for (unsigned thread = 0; thread < units.run->threads; thread++)
        for (int end = HOPPER_BULK_READ; end <= HOPPER_BULK_ADDED; end++) {
            const bulk_groups *g = &here()->bulk[thread];
            if (g->wanted[end] <= g->ended[end]) continue;
            end_groups(thread, g->wanted[end], (hopper_bulk_end)end);
            return true;
        }
    here()->bulk_wanted = false;
    return false;
}

/* Called when a block ends. Sums that no thread has waited for may be added later. */
static void check_additions(void)
{
    for (int i = 0; i < units.num_additions; i++)
        if (units.additions[i].block == here()->block && !units.additions[i].read)
            cuda_die("the end, and a bulk addition by thread %u may still read its source",
                     units.additions[i].thread);
}

static void finish_additions(void)
{
    for (int n = 0; n < units.num_additions; n++)
        add(&units.additions[units.run->backwards ? units.num_additions - 1 - n : n]);
    drop_ended_additions();
    units.ended = 0;
}

/* ---- Semaphores ------------------------------------------------------------------------------ */

static bool is_reached(const cuda_wait *wait)
{
    const int32_t *semaphore = wait->what;
    return (uint64_t)*semaphore >= wait->value;
}

static void describe_semaphore(const cuda_wait *wait, char *text, size_t size)
{
    const int32_t *semaphore = wait->what;
    snprintf(text, size, "waits for a semaphore of %llu, which is %d",
             (unsigned long long)wait->value, (int)*semaphore);
}

static int32_t *check_semaphore(const int32_t *semaphore)
{
    cuda_check_access(semaphore, sizeof *semaphore);
    if (*semaphore < 0) cuda_die("a semaphore that was not cleared: %d", (int)*semaphore);
    return (int32_t *)(uintptr_t)semaphore;
}

static void take_turn(const int32_t *semaphore, int count)
{
    bulk_groups *g = &here()->bulk[cuda_thread.x];
    if (*semaphore != count)
        cuda_die("a wait for a semaphore of %d, which is %d already", count, (int)*semaphore);
    if (g->turns[1]) cuda_die("a wait for a third semaphore");
    g->turns[g->turns[0] != NULL] = semaphore;
    g->unfenced = true;
}

bool hopper_semaphore_is_reached(const int32_t *semaphore, int count)
{
    if (*check_semaphore(semaphore) < count) return false;
    take_turn(semaphore, count);
    return true;
}

void hopper_semaphore_wait(const int32_t *semaphore, int count)
{
    const cuda_wait wait = {is_reached, describe_semaphore, check_semaphore(semaphore),
                            (uint64_t)count};
    if (count < 0) cuda_die("a wait for a semaphore of %d", count);
    cuda_wait_until(&wait);
    take_turn(semaphore, count);
}

void hopper_semaphore_add(int32_t *semaphore)
{
    bulk_groups *g = &here()->bulk[cuda_thread.x];
    if (g->turns[0] != semaphore) cuda_die("a semaphore is added to that was not waited for");
    g->turns[0] = g->turns[1];
    g->turns[1] = NULL;
    if (g->ended[HOPPER_BULK_ADDED] < g->committed)
        cuda_die("a semaphore is added to before bulk additions are complete");
    *check_semaphore(semaphore) += 1;
}

static void wait_for_counter(const int32_t *counter, int count)
{
    const cuda_wait wait = {is_reached, describe_semaphore, check_semaphore(counter),
                            (uint64_t)count};
    if (count < 0) cuda_die("a wait for a counter of %d", count);
    if (units.run->overlaps && !here()->bulk[cuda_thread.x].waited)
        cuda_die("a wait for a counter before the grids in front have ended");
    cuda_wait_until(&wait);
    here()->bulk[cuda_thread.x].unfenced = true;
}

void hopper_counter_wait(const int32_t *counter, int count)
{
    wait_for_counter(counter, count);
    if (*counter > count) cuda_die("a counter of %d is %d", count, (int)*counter);
}

int hopper_progress_wait(const int32_t *progress, int count)
{
    wait_for_counter(progress, count);
    return *progress;
}

void hopper_counter_add(int32_t *counter, int pending)
{
    const bulk_groups *g = &here()->bulk[cuda_thread.x];
    if (units.run->overlaps && !g->waited)
        cuda_die("a counter is added to before the grids in front have ended");
    if (g->ended[HOPPER_BULK_ADDED] + (uint64_t)pending < g->committed)
        cuda_die("a counter is added to before bulk additions are complete");
    *check_semaphore(counter) += 1;
}

void hopper_proxy_fence_global(void) { here()->bulk[cuda_thread.x].unfenced = false; }

void hopper_wait_for_grids(void) { here()->bulk[cuda_thread.x].waited = true; }

int32_t hopper_read_latest(const int32_t *at)
{
    static uint32_t count;
    if (units.run->begins_early || here()->bulk[cuda_thread.x].waited) return *at;
    switch (count++ % 7) {
    case 0: return 0;
    case 1: return -5;
    case 2: return *at + 1;
    case 3: return *at - 1;
    case 4: return INT32_MAX;
    case 5: return *at / 2;
    default: return *at;
    }
}

/* Called when a block ends: each thread must have waited, so that the grid does not end before the
 * previous ones. In a grid that runs at the same time as the previous one, some thread of the last
 * block must have waited, and none of the others. */
static void check_waits(void)
{
    bool any = false;
    for (unsigned i = 0; i < units.run->threads; i++) {
        any |= here()->bulk[i].waited;
        if (units.run->overlaps && !here()->bulk[i].waited)
            cuda_die("the end, and thread %u has not waited for the grids in front", i);
    }
    if (units.run->beside && any != (cuda_block.x == units.run->grid - 1))
        cuda_die("block %u %s for the grid beside it", cuda_block.x,
                 any ? "waits" : "does not wait");
}

/* ---- The next copy --------------------------------------------------------------------------- */

/* The newest copy that is waited for. */
static bool finish_some_load(void)
{
    int n = here()->num_loads - 1;
    while (n >= 0 && !here()->loads[n].full->waiting) n--;
    if (n < 0) return false;
    const load l = here()->loads[n];
    here()->num_loads--;
    memmove(&here()->loads[n], &here()->loads[n + 1], (size_t)(here()->num_loads - n) * sizeof l);
    if (l.copies) finish_arrival(&l);
    else if (l.from) finish_row(&l);
    else if (l.bytes) finish_sending(&l);
    else finish_box(&l);
    return true;
}

/* ---- Products -------------------------------------------------------------------------------- */

/* Threads of a strip, and the first one of strip i of a warpgroup. */
static int strip_threads(void) { return units.run->warps_multiply ? WARP : WARPGROUP; }
static int strips(void) { return WARPGROUP / strip_threads(); }
static int first_of(int i) { return i * strip_threads(); }

/* Whole ones. */
static int warpgroups(void) { return (int)units.run->threads / WARPGROUP; }

static int this_strip(void) { return (int)(cuda_thread.x % WARPGROUP) / strip_threads(); }

static lane *this_lane(void)
{
    return &here()->groups[cuda_thread.x / WARPGROUP].lanes[cuda_thread.x % WARPGROUP];
}

void hopper_products_fence(void) { this_lane()->fenced = true; }

static result *find_result(lane *l, const float *d)
{
    for (int i = 0; i < MAX_RESULTS; i++)
        if (l->results[i].d == d) return &l->results[i];
    return NULL;
}

/* The accumulators belong to the products from the first one until the last one has completed. */
static void hold_accumulators(lane *l, const hopper_product *p)
{
    result *r = find_result(l, p->d);
    if (!r) {
        r = find_result(l, NULL);
        if (!r) cuda_die("too many sets of accumulators");
        r->d = p->d;
        r->count = p->columns / 2;
        for (int i = 0; i < r->count; i++) {
            r->value[i] = p->d[i];
            memcpy(&p->d[i], &poison, sizeof poison);
        }
    }
    if (r->count != p->columns / 2) cuda_die("products of two sizes with the same accumulators");
    r->last = l->issued;
}

static void release_accumulators(result *r)
{
    for (int i = 0; i < r->count; i++) {
        if (memcmp(&r->d[i], &poison, sizeof poison) != 0)
            cuda_die("an accumulator was written to before the products' end");
        r->d[i] = r->value[i];
    }
    r->d = NULL;
}

/* All threads of a warpgroup must issue the same. */
static bool are_the_same(const hopper_product *p, const hopper_product *first)
{
    return p->columns == first->columns && p->element == first->element &&
           p->accumulate == first->accumulate && !p->registers == !first->registers &&
           p->across_a == first->across_a && p->across == first->across && p->a == first->a &&
           p->b == first->b;
}

void hopper_multiply(const hopper_product *p)
{
    lane *l = this_lane();
    strip *of = &here()->groups[cuda_thread.x / WARPGROUP].strips[this_strip()];
    const uint64_t at = l->issued % MAX_PRODUCTS;
    if (cuda_thread.x >= units.run->threads / WARPGROUP * WARPGROUP)
        cuda_die("products of a thread that is in no whole warpgroup");
    if (!l->fenced) cuda_die("products without a fence since the last wait");
    if (l->issued - of->done == MAX_PRODUCTS) cuda_die("too many products on their way");
    hold_accumulators(l, p);
    if (l->issued == of->issued) {
        of->products[at] = *p;
        of->issued++;
    } else if (!are_the_same(p, &of->products[at]))
        cuda_die("the threads of a warpgroup issue different products");
    l->operands[at] = (own_operands){p->d, p->registers};
    l->issued++;
}

/* Columns of A and rows of B: 32 bytes. */
static int depth_of(fa_element element) { return element == FA_ELEMENT_TF32 ? 8 : 16; }

/* A float32 number as a product reads it: the last 13 bits are ignored. */
static float cut_to_tf32(uint32_t bits)
{
    float x;
    bits &= ~0x1fffu;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* All float16 numbers, from the first block on. */
static float halves[1 << 16];

static void fill_halves(void)
{
    if (halves[0x3c00] != 0.0f) return;
    for (int i = 0; i < 1 << 16; i++) halves[i] = fa_half_to_float((uint16_t)i);
}

/* The contiguous elements in 16 bytes. */
static void decode(uint32_t address, fa_element element, float *x)
{
    uint16_t bits[8];
    uint32_t words[4];
    const void *at = cuda_shared_at(swizzled(address) | block_bits(), 16);
    const void *seen = read_seen(offset_in_shared(at), sizeof bits);
    if (element == FA_ELEMENT_TF32) {
        memcpy(words, seen, sizeof words);
        for (int i = 0; i < 4; i++) x[i] = cut_to_tf32(words[i]);
        return;
    }
    memcpy(bits, seen, sizeof bits);
    for (int i = 0; i < 8; i++)
        x[i] = element == FA_ELEMENT_BFLOAT16 ? fa_bfloat_to_float(bits[i]) : halves[bits[i]];
}

/* The contents of a matrix descriptor. */
typedef struct matrix {
    uint32_t start, block, group; /* bytes */
} matrix;

static matrix read_descriptor(uint64_t d)
{
    const matrix m = {(uint32_t)(d & 0x3fff) * 16, (uint32_t)(d >> 16 & 0x3fff) * 16,
                      (uint32_t)(d >> 32 & 0x3fff) * 16};
    if (d >> 62 != 1) cuda_die("a matrix that is not in the 128-byte swizzle");
    if (d & 0x3fffc000c000c000) cuda_die("a matrix descriptor with stray bits");
    if (m.start / SWIZZLE % 8) cuda_die("a matrix that does not start at a pattern of the swizzle");
    if (m.group % PATTERN) cuda_die("groups of rows that are no whole patterns of the swizzle");
    return m;
}

/* Reads 16 columns (tf32: 8) of this many rows to x. */
static void read_along_rows(uint64_t descriptor, fa_element element, int rows, float *x)
{
    const matrix m = read_descriptor(descriptor);
    const int depth = depth_of(element);
    if (m.start % 32) cuda_die("a matrix whose columns leave a row's 128 bytes");
    for (int r = 0; r < rows; r++) {
        const uint32_t row = m.start + (uint32_t)(r / 8) * m.group + (uint32_t)(r % 8) * SWIZZLE;
        decode(row, element, x + depth * r);
        decode(row + 16, element, x + depth * r + depth / 2);
    }
}

/* 16 rows of this many columns, in blocks of 64 or from inside the only block; x is 16 x
 * columns. */
static void read_across_rows(uint64_t descriptor, fa_element element, int columns, float *x)
{
    const matrix m = read_descriptor(descriptor);
    if (element == FA_ELEMENT_TF32) cuda_die("a matrix in tf32 that is read across its rows");
    if (m.start % SWIZZLE && (int)(m.start % SWIZZLE) + 2 * columns > SWIZZLE)
        cuda_die("a matrix that starts within a row's 128 bytes and leaves them");
    if (columns > 64 && m.block % PATTERN) cuda_die("blocks of columns that are misaligned");
    for (int r = 0; r < 16; r++)
        for (int c = 0; c < columns; c += 8) {
            const uint32_t row =
                m.start + (uint32_t)(r / 8) * m.group + (uint32_t)(r % 8) * SWIZZLE;
            decode(row + (uint32_t)(c / 64) * m.block + (uint32_t)(c % 64) * 2, element,
                   x + r * columns + c);
        }
}

static void transpose(const float *x, int rows, int depth, float *y)
{
    for (int c = 0; c < depth; c++)
        for (int r = 0; r < rows; r++) y[c * rows + r] = x[depth * r + c];
}

static float half_of(uint32_t x2, int upper, fa_element element)
{
    const uint16_t bits = (uint16_t)(upper ? x2 >> 16 : x2);
    return element == FA_ELEMENT_BFLOAT16 ? fa_bfloat_to_float(bits) : halves[bits];
}

/* In tf32: register i is column t of row g, 4 columns later in registers 2 and 3, and row g + 8 in
 * odd registers. */
static void read_tf32_registers(const warpgroup *w, int i_strip, uint64_t number, float *x)
{
    for (int thread = first_of(i_strip); thread < first_of(i_strip + 1); thread++) {
        const uint32_t *registers = w->lanes[thread].operands[number % MAX_PRODUCTS].registers;
        for (int i = 0; i < 4; i++) {
            const int row = thread / WARP * 16 + thread % WARP / 4 + 8 * (i % 2);
            x[8 * row + thread % 4 + 4 * (i / 2)] = cut_to_tf32(registers[i]);
        }
    }
}

/* A from registers: register i of a lane is columns 2t, 2t + 1 of row g, 8 columns later in
 * registers 2 and 3, and row g + 8 in odd registers. */
static void read_registers(const warpgroup *w, int i_strip, uint64_t number, float *x)
{
    const fa_element element = w->strips[i_strip].products[number % MAX_PRODUCTS].element;
    for (int thread = first_of(i_strip); thread < first_of(i_strip + 1); thread++) {
        const uint32_t *registers = w->lanes[thread].operands[number % MAX_PRODUCTS].registers;
        for (int i = 0; i < 8; i++) {
            const int row = thread / WARP * 16 + thread % WARP / 4 + 8 * (i / 2 % 2);
            const int column = thread % 4 * 2 + i % 2 + 8 * (i / 4);
            x[16 * row + column] = half_of(registers[i / 2], i % 2, element);
        }
    }
}

/* Accumulator i of a thread. */
static int index_in_result(int thread, int i, int columns)
{
    const int row = thread / WARP * 16 + thread % WARP / 4 + 8 * (i / 2 % 2);
    return row * columns + i / 4 * 8 + thread % 4 * 2 + i % 2;
}

typedef enum direction { FROM_LANES, TO_LANES } direction;

static void move_results(warpgroup *w, int i_strip, uint64_t number, float *sum, direction way)
{
    for (int thread = first_of(i_strip); thread < first_of(i_strip + 1); thread++) {
        lane *l = &w->lanes[thread];
        result *r = find_result(l, l->operands[number % MAX_PRODUCTS].d);
        for (int i = 0; i < r->count; i++) {
            float *at = &sum[index_in_result(thread, i, 2 * r->count)];
            if (way == FROM_LANES) *at = r->value[i];
            else r->value[i] = *at;
        }
        if (way == TO_LANES && r->last == number) release_accumulators(r);
    }
}

/* sum (64 x columns) += a (64 x depth) b (depth x columns), for this many rows */
WITH_WIDE_VECTORS
static void add_products(float *restrict sum, const float *restrict a, const float *restrict b,
                         int rows, int columns, int depth)
{
    for (int row = 0; row < rows; row++)
        for (int k = 0; k < depth; k += 4) {
            const float *x = a + depth * row + k, *y = b + k * columns;
            const float x0 = x[0], x1 = x[1], x2 = x[2], x3 = x[3];
            float *to = sum + row * columns;
            for (int c = 0; c < columns; c++)
                to[c] += (x0 * y[c] + x1 * y[columns + c]) +
                         (x2 * y[2 * columns + c] + x3 * y[3 * columns + c]);
        }
}

/* Rounded towards 0. */
static float cut_off(double x)
{
    const float near = (float)x;
    return fabs((double)near) > fabs(x) ? nextafterf(near, 0.0f) : near;
}

/* The same with an exact sum, which is then truncated. */
static void add_and_cut_off(float *restrict sum, const float *restrict a, const float *restrict b,
                            int rows, int columns, int depth)
{
    for (int row = 0; row < rows; row++)
        for (int c = 0; c < columns; c++) {
            double x = (double)sum[row * columns + c];
            for (int k = 0; k < depth; k++)
                x += (double)a[depth * row + k] * (double)b[k * columns + c];
            sum[row * columns + c] = cut_off(x);
        }
}

static void multiply(const warpgroup *w, int i_strip, uint64_t number, float *sum)
{
    static float a[64 * 16], b[16 * MAX_COLUMNS], rows[16 * MAX_COLUMNS];
    const hopper_product *p = &w->strips[i_strip].products[number % MAX_PRODUCTS];
    const int rows_each = 64 / strips(), first_row = i_strip * rows_each;
    see_fenced();
    if (!p->accumulate) memset(sum, 0, sizeof *sum * 64 * (size_t)p->columns);
    const int depth = depth_of(p->element);
    if (p->registers && p->element == FA_ELEMENT_TF32) read_tf32_registers(w, i_strip, number, a);
    else if (p->registers) read_registers(w, i_strip, number, a);
    else if (p->across_a) {
        read_across_rows(p->a, p->element, 64, rows);
        transpose(rows, depth, 64, a);
    } else read_along_rows(p->a, p->element, 64, a);
    if (p->across) read_across_rows(p->b, p->element, p->columns, b);
    else {
        read_along_rows(p->b, p->element, p->columns, rows);
        transpose(rows, p->columns, depth, b);
    }
    (hopper_cuts_off ? add_and_cut_off : add_products)(
        sum + first_row * p->columns, a + first_row * depth, b, rows_each, p->columns, depth);
}

static uint64_t end_of_group(const lane *l, uint64_t group) { return l->end[group % MAX_COMMITS]; }

static bool is_committed(const warpgroup *w, int i_strip)
{
    const uint64_t group = w->strips[i_strip].groups_done;
    const int from = first_of(i_strip), to = first_of(i_strip + 1);
    for (int thread = from; thread < to; thread++)
        if (w->lanes[thread].commits <= group) return false;
    for (int thread = from + 1; thread < to; thread++)
        if (end_of_group(&w->lanes[thread], group) != end_of_group(&w->lanes[from], group))
            cuda_die("the threads of a warpgroup commit different products");
    return true;
}

/* The next group of products. */
static void finish_group(warpgroup *w, int i_strip)
{
    static float sum[64 * MAX_COLUMNS];
    strip *of = &w->strips[i_strip];
    const lane *first = &w->lanes[first_of(i_strip)];
    const uint64_t end = end_of_group(first, of->groups_done);
    const float *d = NULL;
    for (; of->done < end; of->done++) {
        if (first->operands[of->done % MAX_PRODUCTS].d != d)
            move_results(w, i_strip, of->done, sum, FROM_LANES);
        d = first->operands[of->done % MAX_PRODUCTS].d;
        multiply(w, i_strip, of->done, sum);
        if (of->done + 1 < end && first->operands[(of->done + 1) % MAX_PRODUCTS].d == d) continue;
        move_results(w, i_strip, of->done, sum, TO_LANES);
    }
    of->groups_done++;
}

void hopper_products_commit(void)
{
    warpgroup *w = &here()->groups[cuda_thread.x / WARPGROUP];
    lane *l = this_lane();
    if (l->commits - w->strips[this_strip()].groups_done == MAX_COMMITS)
        cuda_die("too many groups of products");
    l->end[l->commits++ % MAX_COMMITS] = l->issued;
    if (!units.run->late_products && is_committed(w, this_strip())) finish_group(w, this_strip());
}

static bool are_done(const cuda_wait *wait)
{
    const strip *of = wait->what;
    return of->groups_done >= wait->value;
}

static void describe_products(const cuda_wait *wait, char *text, size_t size)
{
    const strip *of = wait->what;
    snprintf(text, size, "waits for group %llu of products, %llu are done",
             (unsigned long long)wait->value, (unsigned long long)of->groups_done);
}

void hopper_products_wait(int pending)
{
    warpgroup *w = &here()->groups[cuda_thread.x / WARPGROUP];
    lane *l = this_lane();
    strip *of = &w->strips[this_strip()];
    l->fenced = false;
    const uint64_t wanted = l->commits > (uint64_t)pending ? l->commits - (uint64_t)pending : 0;
    const cuda_wait wait = {are_done, describe_products, of, wanted};
    if (of->wanted < wanted) of->wanted = wanted;
    cuda_wait_until(&wait);
}

/* Only products that a whole warpgroup has issued and that are waited for. */
static bool finish_some_products(void)
{
    for (int n = 0; n < warpgroups() * strips(); n++) {
        warpgroup *w = &here()->groups[n / strips()];
        const int i = n % strips();
        if (w->strips[i].wanted <= w->strips[i].groups_done || !is_committed(w, i)) continue;
        finish_group(w, i);
        return true;
    }
    return false;
}

static void check_products(void)
{
    for (int i = 0; i < warpgroups(); i++)
        for (int thread = 0; thread < WARPGROUP; thread++)
            if (here()->groups[i].lanes[thread].issued !=
                here()->groups[i].strips[thread / strip_threads()].done)
                cuda_die("the end, and warpgroup %d has products on their way", i);
}

/* ---- Registers ------------------------------------------------------------------------------- */

/* The registers of a thread when a block starts. The block never gets more. */
static int at_start(void)
{
    const int registers = (int)(REGISTERS / units.run->threads) / 8 * 8;
    return registers < 248 ? registers : 248;
}

void hopper_registers(int count, bool more)
{
    int *mine = &here()->registers[cuda_thread.x];
    if (count % 8 || count < 24 || count > 256) cuda_die("%d registers a thread", count);
    if (more ? count < *mine : count > *mine)
        cuda_die("%d registers are %s than %d", count, more ? "fewer" : "more", *mine);
    *mine = count;
}

static void check_registers(void)
{
    int sum = 0;
    for (unsigned thread = 0; thread < units.run->threads; thread++) {
        sum += here()->registers[thread];
        if (here()->registers[thread] != here()->registers[thread / WARPGROUP * WARPGROUP])
            cuda_die("the warps of a warpgroup have different numbers of registers");
    }
    if (sum > at_start() * (int)units.run->threads)
        cuda_die("the block has %d registers, more than it started with", sum);
}

/* ---- The units ------------------------------------------------------------------------------- */

/* It is kept from block to block. */
static void get_shared_memory(block_units *u, size_t bytes)
{
    const size_t stored = (bytes / 2 + 8) * sizeof *u->stored;
    if (!u->stored || u->bytes < bytes) {
        free(u->seen);
        free(u->stored);
        u->seen = malloc(bytes + 1);
        u->stored = malloc(stored);
        if (!u->seen || !u->stored) abort();
        u->bytes = bytes;
    }
    memset(u->seen, 0xff, bytes);
    memset(u->stored, 0, stored);
}

static void start_warpgroup(warpgroup *w)
{
    for (int i = 0; i < WARPGROUP / WARP; i++) {
        strip *of = &w->strips[i];
        of->issued = of->done = of->groups_done = of->wanted = 0;
    }
    for (int n = 0; n < WARPGROUP; n++) {
        lane *l = &w->lanes[n];
        l->issued = l->commits = 0;
        l->fenced = false;
        for (int r = 0; r < MAX_RESULTS; r++) l->results[r].d = NULL;
    }
}

static void start(const cuda_run *run)
{
    /* Warps after the last whole warpgroup can load, but issue no products. */
    if (run->threads % WARP || run->threads < WARPGROUP || run->threads > MAX_THREADS)
        cuda_die("%u threads are no warps, with a warpgroup among them", run->threads);
    units.run = run;
    here()->block = ++units.blocks;
    here()->num_barriers = here()->num_loads = 0;
    here()->barriers_fenced = here()->proxy_fenced = false;
    here()->bulk_wanted = false;
    fill_halves();
    get_shared_memory(here(), run->smem_bytes);
    memset(here()->fences, 0, sizeof here()->fences);
    memset(here()->bulk, 0, sizeof here()->bulk);
    for (unsigned n = 0; n < run->threads; n++) here()->registers[n] = at_start();
    for (int i = 0; i < warpgroups(); i++) start_warpgroup(&here()->groups[i]);
}

static bool is_pause_over(const cuda_wait *wait)
{
    (void)wait;
    return here()->pause == 0;
}

static void describe_pause(const cuda_wait *wait, char *text, size_t size)
{
    (void)wait;
    snprintf(text, size, "pauses (%d)", here()->pause);
}

void hopper_pause(void)
{
    enum { LONG = 500 }; /* operations of other blocks: more than a tile takes */
    const cuda_wait wait = {is_pause_over, describe_pause, NULL, 0};
    here()->pause = LONG;
    cuda_wait_until(&wait);
}

static bool shorten_pause(void)
{
    if (here()->pause == 0) return false;
    here()->pause--;
    return true;
}

static bool go_on(void)
{
    return finish_some_products() || finish_some_load() || end_some_groups() || shorten_pause();
}

static void end(void)
{
    check_waits();
    if (here()->num_loads) cuda_die("the end, and copies still on their way");
    check_barriers();
    check_products();
    check_registers();
    check_additions();
    if (++units.ended == units.run->grid) finish_additions();
}

const cuda_units hopper_units = {start, go_on, end, store, check_waited};
