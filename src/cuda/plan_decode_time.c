/*
 * The time of the blocks of decode_sm90. A block that starts gets a slot of a multiprocessor, which has two. Multiprocessors share
 * the memory equally, and so do the two blocks of one of them. A multiprocessor has a limit of its own: the latency of one
 * block, or what its way to the L2 cache lets through. So the time is bad if some multiprocessors have two blocks at the end and
 * others none. The model follows the blocks from one that ends to the next one that ends. Multiprocessors with the same
 * blocks are counted together; so that takes few steps (five on average, 0.3 us).
 */
#include "cuda/plan_decode_time.h"

#include <math.h>

enum { SLOTS = 2, KINDS = 3, GROUPS = 32 };

/* Blocks in the order in which they start: runs of the same size. */
typedef struct sequence {
    int64_t ends[KINDS]; /* numbers of the blocks behind each run */
    double sizes[KINDS]; /* bytes, and what a block costs besides */
    int kinds;
    double later; /* more bytes of a block that starts behind another one */
    int64_t started;
} sequence;

/* Multiprocessors with the same blocks. */
typedef struct group {
    int64_t count;
    int busy;
    double left[SLOTS]; /* of each busy slot */
} group;

typedef struct state {
    group groups[GROUPS];
    int count;
} state;

/*
 * For an H200. Up to 8 rows: fitted to 261 shapes with one query and 3 to 20 cuts each (head dims 64, 128 and 256, 17 to 528 work
 * tiles, 0.4k to 8k keys), the cuts that it chooses to those that are fastest. 9 to 16 rows: to 22 shapes.
 */
typedef struct pace {
    double tile_us[4];  /* for a block alone, of a key tile of 64, 128, 192 and 256 columns */
    double start_bytes; /* that a block could read while it starts and ends */
    double
        later_bytes; /* additional ones of a block that starts after the previous grid has ended */
    double launch_us;
    double merge_us, turn_us; /* merging; each 16 parts of it; */
    double sums_us;           /* and sums of as many parts as there are slots */
    double both_few,
        both_many; /* bytes a us of a multiprocessor with two blocks, if few of them or most have two */
} pace;
static const pace
    few_rows = {{0.85, 0.734, 1.5, 1.024}, 17.4e3, 31.6e3, 4.1, 0.47, 0.365, 0.065, 66e3, 44.4e3},
    many_rows = {{1.06, 1.0, 2.16, 1.12}, 16e3, 0.0, 3.4, 2.1, 0.59, 0.43, 44e3, 42e3};
enum { FEW_ROWS = 8 };

static const double device_rate = 4.65e6; /* bytes a us */

static const pace *pace_of(const fa_decode_keys *k)
{
    return k->rows > FEW_ROWS ? &many_rows : &few_rows;
}

static int64_t count_all(const sequence *s) { return s->ends[s->kinds - 1]; }

/* The size of a block; 0: there is none. run: at most the number of blocks of this size from this one on. */
static double size_of(const sequence *s, int64_t block, int64_t *run)
{
    for (int i = 0; i < s->kinds; i++) {
        if (block >= s->ends[i]) continue;
        if (*run > s->ends[i] - block) *run = s->ends[i] - block;
        return s->sizes[i];
    }
    return 0.0;
}

static void add_group(state *m, group g)
{
    for (int i = 0; i < m->count; i++) {
        group *other = &m->groups[i];
        if (other->busy != g.busy ||
            fabs(other->left[0] - g.left[0]) + fabs(other->left[1] - g.left[1]) > 1.0)
            continue;
        other->count += g.count;
        return;
    }
    if (m->count < GROUPS) m->groups[m->count++] = g;
    else m->groups[GROUPS - 1].count += g.count;
}

/* The first blocks: one on each multiprocessor, then a second one on each. */
static void start_first(state *m, sequence *s, int64_t multiprocessors)
{
    m->count = 0;
    for (int64_t at = 0, run; at < multiprocessors; at += run) {
        group g = {.busy = 0};
        run = multiprocessors - at;
        for (int slot = 0; slot < SLOTS; slot++) {
            g.left[slot] = size_of(s, slot * multiprocessors + at, &run);
            g.busy += g.left[slot] > 0.0;
        }
        g.count = run;
        add_group(m, g);
    }
    const int64_t all = count_all(s);
    s->started = all < SLOTS * multiprocessors ? all : SLOTS * multiprocessors;
}

/* Gives a slot of the group's multiprocessors to the blocks that start: each to the same share of them. */
static void share_slot(state *m, group g, const double *shares, const sequence *s)
{
    double sum = 0.0;
    int64_t given = 0;
    for (int i = 0; i < s->kinds; i++) {
        sum += shares[i];
        const int64_t count = (int64_t)((double)g.count * sum + 0.5) - given;
        if (count <= 0) continue;
        group next = g;
        next.count = count;
        next.left[next.busy++] = s->sizes[i] + s->later;
        given += count;
        add_group(m, next);
    }
    g.count -= given;
    if (g.count > 0) add_group(m, g);
}

/* Copies the groups that there are. */
static void copy_state(const state *from, state *to)
{
    to->count = from->count;
    for (int i = 0; i < from->count; i++) to->groups[i] = from->groups[i];
}

/* Later blocks take slots as these become free, in no order. Of equal blocks that end, many leave both slots of a multiprocessor at the same
 * time, and so the last blocks are not spread evenly. */
static void start_more(state *m, sequence *s)
{
    double shares[KINDS] = {0.0};
    int64_t room = 0, taken = 0;
    for (int i = 0; i < m->count; i++) room += m->groups[i].count * (SLOTS - m->groups[i].busy);
    for (int i = 0; i < s->kinds && taken < room; i++) {
        int64_t count = s->ends[i] - (s->started + taken);
        if (count <= 0) continue;
        if (count > room - taken) count = room - taken;
        shares[i] = (double)count / (double)room;
        taken += count;
    }
    s->started += taken;
    for (int busy = 0; busy < SLOTS && taken > 0;
         busy++) { /* of two free slots first one, then the other */
        state before;
        copy_state(m, &before);
        m->count = 0;
        for (int i = 0; i < before.count; i++) {
            const group *g = &before.groups[i];
            if (g->busy > busy) add_group(m, *g);
            else share_slot(m, *g, shares, s);
        }
    }
}

/* Bytes a us of a multiprocessor with one block, and with two. False: all have ended. */
static bool find_rates(const state *m, const pace *pace, double alone, int64_t multiprocessors,
                       double rates[SLOTS])
{
    double counts[SLOTS] = {0.0};
    for (int i = 0; i < m->count; i++)
        if (m->groups[i].busy > 0) counts[m->groups[i].busy - 1] += (double)m->groups[i].count;
    if (counts[0] + counts[1] < 0.5) return false;
    const double both =
        2.0 * counts[1] > (double)multiprocessors ? pace->both_many : pace->both_few;
    const double rate = device_rate * (double)multiprocessors / 132.0,
                 share = rate / (counts[0] + counts[1]);
    rates[0] = fmin(share, alone);
    rates[1] = fmin(share, both);
    /* What some cannot use is left for the others. */
    if (share > alone && counts[1] > 0.0)
        rates[1] = fmin(both, (rate - counts[0] * rates[0]) / counts[1]);
    else if (share > both && counts[0] > 0.0)
        rates[0] = fmin(alone, (rate - counts[1] * rates[1]) / counts[0]);
    return true;
}

/* Goes on until a block ends. */
static double end_next(state *m, const double rates[SLOTS])
{
    state before;
    copy_state(m, &before);
    double us = INFINITY;
    for (int i = 0; i < before.count; i++) {
        const group *g = &before.groups[i];
        for (int slot = 0; slot < g->busy; slot++)
            us = fmin(us, g->left[slot] / (rates[g->busy - 1] / g->busy));
    }
    m->count = 0;
    for (int i = 0; i < before.count; i++) {
        group g = {.count = before.groups[i].count};
        for (int slot = 0; slot < before.groups[i].busy; slot++) {
            const int busy = before.groups[i].busy;
            const double left = before.groups[i].left[slot] - us * rates[busy - 1] / busy;
            if (left > 1.0) g.left[g.busy++] = left;
        }
        add_group(m, g);
    }
    return us;
}

/* The parts of so many key tiles, or the key tiles of so many parts. */
static int64_t divide_tiles(const fa_decode_keys *k, int64_t by)
{
    return (k->tiles + by - 1) / by;
}

static void add_run(sequence *s, int64_t blocks, double tiles, const fa_decode_keys *k)
{
    const int64_t before = s->kinds > 0 ? count_all(s) : 0;
    if (blocks <= 0) return;
    s->ends[s->kinds] = before + blocks;
    s->sizes[s->kinds++] = tiles * k->tile_bytes + pace_of(k)->start_bytes;
}

/* The most blocks of a pair of multiprocessors, of whole work tiles in a round that is more than half full. */
static double count_of_pair(const fa_decode_keys *k)
{
    return 2 * (k->tasks - k->multiprocessors) <= k->multiprocessors ? 3.0 : 4.0;
}

/*
 * Whether whole work tiles leave multiprocessors with one block beside others with two. If the next grid's blocks took the free places
 * while they run, it would have two blocks on fewer multiprocessors, and a pair of neighbours gets at most 76 to 86 GB/s. So the next
 * grid starts behind it (H200, 52 shapes: 133 to 164 blocks 0.80 of the time, to 197 0.87, to 230 0.95, to 263 0.97; with 264 and more,
 * or 132 and fewer, and where parts are merged, the next grid should start early: 1.02 to 1.1).
 */
static bool is_uneven_round(const fa_decode_keys *k, int64_t parts)
{
    const double least_bytes = 160e3; /* with fewer, the next grid's late start costs more */
    return k->rows <= FEW_ROWS && k->head_dim != 192 && parts == 1 &&
           k->tasks > k->multiprocessors && k->tasks < SLOTS * (int64_t)k->multiprocessors &&
           (double)k->tiles * k->tile_bytes > (count_of_pair(k) - 2.0) * least_bytes;
}

/* Its time, by the pairs that have most blocks or by the device; within 3% of those 52 on average. */
static double time_uneven_round(const fa_decode_keys *k)
{
    const double start_us = 5.5, pair_rate = 86e3, rate = 4.3e6 * k->multiprocessors / 132.0;
    const double bytes = (double)k->tiles * k->tile_bytes;
    return start_us + fmax(count_of_pair(k) * bytes / pair_rate, (double)k->tasks * bytes / rate);
}

void fa_cuda_time_cut(const fa_decode_keys *k, fa_decode_cut *cut)
{
    const int64_t parts = divide_tiles(k, cut->length), others = k->tasks - cut->whole;
    const pace *pace = pace_of(k);
    const double alone = k->tile_bytes / pace->tile_us[(k->head_dim - 1) / 64];
    sequence s = {.kinds = 0, .later = pace->later_bytes};
    state m;
    double rates[SLOTS];
    cut->alone = is_uneven_round(k, parts);
    if (cut->alone) {
        cut->us = time_uneven_round(k);
        return;
    }
    add_run(&s, cut->whole, (double)k->tiles, k);
    add_run(&s, others * (parts - 1), (double)cut->length, k);
    add_run(&s, others, (double)(k->tiles - (parts - 1) * cut->length), k);
    cut->us = pace->launch_us;
    start_first(&m, &s, k->multiprocessors);
    while (find_rates(&m, pace, alone, k->multiprocessors, rates)) {
        cut->us += end_next(&m, rates);
        if (s.started < count_all(&s)) start_more(&m, &s);
    }
    if (parts == 1) return;
    const int64_t turns = (parts + 15) / 16; /* a turn of the merge has 16 parts */
    cut->us += pace->merge_us + pace->turn_us * (double)turns;
    cut->us += pace->sums_us * (double)(others * parts) / (double)(SLOTS * k->multiprocessors);
}

static void try_cut(const fa_decode_keys *k, int64_t whole, int64_t length, fa_decode_cut *best)
{
    const double whole_takes = 1.025; /* whole ones end less evenly than the model says */
    const double gains = 0.998; /* of nearly equal cuts the first one, which has fewest parts */
    fa_decode_cut cut = {whole, length < 1 ? 1 : length, 0.0, false};
    fa_cuda_time_cut(k, &cut);
    if (whole > 0) cut.us *= whole_takes;
    if (cut.us < gains * best->us) *best = cut;
}

/* Parts that fill one or some blocks of each multiprocessor, and parts of which the last one is shorter: its blocks start last and are
 * where others have ended. If there is more than a round of work tiles, also a whole part of the first ones. */
static fa_decode_cut find_cut(const fa_decode_keys *k, int64_t most, bool takes_whole)
{
    static const int rounds[] = {1, 2, 4, 6};
    static const double lasts[] = {0.1, 0.25, 0.5};
    enum {
        MOST_ROUNDS = 16,
        WHOLE_TRIED = 2,
        MOST_PARTS_OF_OTHERS = 4,
        MOST_FILLING = 8,
        LAST_TRIED = 3
    };
    const int64_t m = k->multiprocessors;
    fa_decode_cut best = {0, k->tiles, INFINITY, false};
    if (k->tasks > MOST_ROUNDS * m || most <= 1) return best;
    int64_t before = 0;
    for (int i = 0; i < (int)(sizeof rounds / sizeof rounds[0]); i++) {
        int64_t parts = rounds[i] * m / k->tasks;
        if (parts > most) parts = most;
        if (parts < 1) parts = 1;
        if (parts == before) continue;
        before = parts;
        try_cut(k, 0, divide_tiles(k, parts), &best);
        for (int n = 0; n < LAST_TRIED && parts < most; n++)
            try_cut(k, 0, (int64_t)ceil((double)k->tiles / ((double)parts + lasts[n])), &best);
    }
    if (!takes_whole || k->tasks <= SLOTS * m) return best;
    int64_t whole = (k->tasks - 1) / m * m;
    for (int i = 0; i < WHOLE_TRIED && whole > 0; i++, whole -= m) {
        const int64_t filling = SLOTS * m / (k->tasks - whole),
                      filled = filling < MOST_FILLING ? filling : MOST_FILLING;
        for (int64_t parts = 2; parts <= MOST_PARTS_OF_OTHERS && parts <= most; parts++)
            try_cut(k, whole, divide_tiles(k, parts), &best);
        if (filled > MOST_PARTS_OF_OTHERS && filled <= most)
            try_cut(k, whole, divide_tiles(k, filled), &best);
    }
    return best;
}

/* Cuts that this thread has found before: a model has many layers of the same shape, and the number of key tiles seldom grows. */
typedef struct known_cut {
    fa_decode_keys keys;
    int64_t most;
    bool takes_whole;
    fa_decode_cut cut;
} known_cut;
enum { KNOWN_CUTS = 8 };

static bool is_known(const known_cut *c, const fa_decode_keys *k, int64_t most, bool takes_whole)
{
    return c->keys.tasks == k->tasks && c->keys.tiles == k->tiles &&
           !(c->keys.tile_bytes < k->tile_bytes || c->keys.tile_bytes > k->tile_bytes) &&
           c->keys.rows == k->rows && c->keys.head_dim == k->head_dim &&
           c->keys.multiprocessors == k->multiprocessors && c->most == most &&
           c->takes_whole == takes_whole;
}

fa_decode_cut fa_cuda_find_decode_cut(const fa_decode_keys *k, int64_t most, bool takes_whole)
{
    static _Thread_local known_cut known[KNOWN_CUTS];
    static _Thread_local unsigned next;
    for (int i = 0; i < KNOWN_CUTS; i++)
        if (is_known(&known[i], k, most, takes_whole)) return known[i].cut;
    const known_cut found = {*k, most, takes_whole, find_cut(k, most, takes_whole)};
    known[next++ % KNOWN_CUTS] = found;
    return found.cut;
}
