/*
 * forward_sm90_split: the forward pass on Hopper with split keys, for problems with too few work tiles for all
 * multiprocessors. Each work tile has a part of the keys, and a second launch merges the parts. A model of the time
 * decides how many key tiles a part has, and whether splitting is faster at all. If lengths are on the device, parts are
 * what sections of the line of all work have (split.h).
 */
#include "cuda/plan_split_sm90.h"

#include <inttypes.h>
#include <math.h>

#include "../../kernels/common/packed.h"
#include "cuda/counters.h"
#include "cuda/family.h"
#include "cuda/parameters.h"
#include "cuda/plan_decode.h"
#include "cuda/plan_sm90.h"

/*
 * The model of the time, for an H200: what a launch takes; what each round of tasks takes, besides its key tiles; and the rate of
 * products, in floating-point operations a second of the device, for head dims to 64, to 128 and wider ones. If the host knows all
 * lengths, fitted to 272 shapes of 2 to 200 queries and 500 to 40,000 keys (16 bits, groups of 1 to 8 heads): four of five times
 * are within 10% of it.
 */
enum { RATES = 3 };
typedef struct pace {
    double launch, round, rates[RATES];
} pace;
typedef struct paces {
    pace plain, parts, whole, sections;
} paces;
static const paces few_queries = {.plain = {2.0e-6, 4.4e-6, {500e12, 830e12, 930e12}},
                                  .parts = {7.0e-6, 0.3e-6, {490e12, 740e12, 860e12}},
                                  .whole = {1.5e-6, 6.0e-6, {500e12, 840e12, 920e12}},
                                  .sections = {11.0e-6, 2.0e-6, {390e12, 600e12, 640e12}}};

/* For more queries, and for few keys: the loads of a task overlap with what is before, and long ones are slowed down by the
 * device's power. */
static const paces many_queries = {.plain = {2.0e-6, 1.5e-6, {550e12, 650e12, 650e12}},
                                   .parts = {4.5e-6, 1.5e-6, {550e12, 650e12, 650e12}},
                                   .whole = {2.0e-6, 1.5e-6, {550e12, 650e12, 650e12}},
                                   .sections = {9.5e-6, 4.5e-6, {500e12, 600e12, 600e12}}};

/* If lengths are on the device: fitted to 326 random batches over pages (H200, 1 to 64 sequences, a third of them decodes beside
 * prompts, head dims 64, 128 and 256) and to 849 of packed prompts (to 120 sequences, head dims 64 to 256). With these numbers the
 * choice between sections, whole query tiles that heads share and forward_sm90 takes 1.013 and 1.005 times as long as the fastest
 * of the three in the geometric mean. */
static const pace lengths_pace = {8e-6, 1.5e-6, {550e12, 650e12, 650e12}};

/* Of a launch whose blocks take whole query tiles from a counter: of forward_sm90, and of forward_sm90_split; and how much of the
 * longest tile is left for some blocks at the end. */
static const double plain_launch = 1e-6, taken_launch = 2e-6, left_at_end = 0.15;

static const double device_multiprocessors = 132; /* with which the device reaches these rates */
static const double memory_rate = 4.3e12;         /* bytes a second, of keys and values, */
static const double sums_rate = 4.5e12;           /* and of sums that are stored and loaded */

/* The model must be so many times as fast with split keys, or with heads that share query tiles: it is not exact. */
static const double least_gain = 1.02, least_gain_for_many = 1.1;

/* The average number of keys of packed queries over a cache, relative to the largest: a guess, because only the device knows. */
static const double average_share = 0.5;

enum {
    NARROW = 64,
    MIDDLE = 128, /* the largest head dims of the first two rates */
    PLAIN =
        80, /* forward_sm90 has a variant for this head dim, forward_sm90_split the next one for 96 */
    MOST_FITTED_QUERIES = 256,
    LEAST_KEYS = 512, /* fewer take hardly longer than a launch */
    LARGEST_QUERY_TILE = 192,
    MOST_ROUNDS = 10, /* with more, the last one can hardly be a tenth of the time */
    SLOTS_OF_SECTION = 2,
    LEAST_SECTION = 4,          /* key tiles */
    NEIGHBOURS_TRIED = 8,       /* lengths of a part near the best one */
    MOST_WORKSPACE = 256 << 20, /* bytes */
    ROW_SUM_BYTES = sizeof(fa_sm90_row_sum)
};

/* ---- What can be split ----------------------------------------------------------------------- */

static int64_t count_heads(const fa_problem *p) { return p->batch * p->heads_q; }

/* Few queries are refused because they may be planned before their data are known: then the workspace would have room
 * for these kernels, which never run them. */
static bool refuse_split(const fa_problem *p, char *why, size_t size)
{
    if (p->max_q <= fa_cuda_most_few(p) || p->n_k < 1 || count_heads(p) < 1 || p->d < 1 ||
        p->d_v < 1) {
        fa_cuda_say(why, size, "q has %" PRId64 " queries a sequence: expected more than %" PRId64,
                    p->max_q, fa_cuda_most_few(p));
        return true;
    }
    const bool others = fa_cuda_sm90_options(p, NULL) & ~FA_SM90_SOFTCAP;
    const char *option =
        p->batch_invariant ? "options.flags has FA_BATCH_INVARIANT"
        : others
            ? "an option besides a softcap changes scores or weights, or the scale is not positive"
            : NULL;
    if (option) fa_cuda_say(why, size, "%s: keys are not split", option);
    return option;
}

/* ---- Parts ----------------------------------------------------------------------------------- */

/* What is split. Query i sees keys before i + reach, if there are so many. */
typedef struct shape {
    const fa_variant *variant;
    int64_t heads, tiles;                  /* groups of heads, if these share query tiles */
    int64_t rows_q, n_k, reach, most_keys; /* of a query tile, counted from its first key */
    int queries, keys;                     /* of a tile */
    int rows, group;                       /* of a query tile; heads that share it */
    const pace *pace;
    double tile_seconds;   /* of a key tile; */
    double memory_seconds; /* of all keys and values, for the whole device */
} shape;

static int64_t clamp(int64_t x, int64_t least, int64_t most)
{
    return x < least ? least : x > most ? most : x;
}

static const fa_variant *find_variant(const fa_problem *p)
{
    const int options = fa_cuda_sm90_options(p, NULL);
    for (int i = FA_FIRST_forward_sm90_split; i < FA_END_forward_sm90_split; i++) {
        const fa_variant *v = &fa_variants[i];
        if (v->element == (fa_element)p->q.dtype && p->d <= v->head_dim && p->d_v <= v->value_dim &&
            v->options == options && fa_cuda_fits_pages(v, p))
            return v;
    }
    return NULL;
}

/* Larger than all positions, and small enough that sums do not overflow. */
static const int64_t unbounded = INT64_C(1) << 40;

/* The time of a key tile relative to that of two consumers, if only one has rows. */
static double share_of_one_consumer(const fa_variant *v)
{
    return v->head_dim <= MIDDLE ? 0.75 : 0.95;
}

/* The time of a key tile of forward_sm90 at head dims 65 to 96 relative to what the rate of 128 tells: the softmax takes as long as there
 * (H200, us, whole query tiles that heads share and forward_sm90: 55 queries, 1,252 keys, 64 sequences, 24 heads of 8, 80 columns, 117, 152; 112,
 * 1,805, 64, 32 of 4, 281, 328; in 68 random shapes the choice takes 1.012 times as long as the fastest form; 1.016 without it). */
static const double slowness_of_96 = 1.15;

static double find_tile_seconds(const fa_variant *v, const pace *pace, bool one_consumer)
{
    const int rate = v->head_dim <= NARROW ? 0 : v->head_dim <= MIDDLE ? 1 : 2;
    const double products =
        2.0 * FA_SM90_QUERIES(v->consumers) * v->keys * (v->head_dim + v->value_dim);
    double seconds = products / (pace->rates[rate] / device_multiprocessors);
    if (pace == &few_queries.plain && rate == 1 && v->head_dim < MIDDLE) seconds *= slowness_of_96;
    return one_consumer ? seconds * share_of_one_consumer(v) : seconds;
}

static const paces *paces_of(const fa_problem *p)
{
    return p->max_q <= MOST_FITTED_QUERIES && p->n_k >= LEAST_KEYS ? &few_queries : &many_queries;
}

static shape find_shape(const fa_problem *p, const fa_variant *v, const pace *pace)
{
    shape s = {.variant = v,
               .heads = count_heads(p),
               .rows_q = p->rows_q,
               .n_k = p->n_k,
               .reach = unbounded,
               .most_keys = p->n_k,
               .queries = FA_SM90_QUERIES(v->consumers),
               .rows = FA_SM90_QUERIES(v->consumers),
               .keys = v->keys,
               .group = 1,
               .pace = pace,
               .tile_seconds = find_tile_seconds(v, pace, p->max_q <= FA_SM90_BOX_ROWS)};
    const int64_t diagonal =
        clamp(p->diagonal_given ? p->diagonal : p->n_k - p->rows_q, -unbounded, unbounded);
    int64_t right = p->causal ? 0 : unbounded;
    if (p->window_right >= 0 && p->window_right < right) right = p->window_right;
    s.tiles = fa_cuda_count_tiles(p->rows_q, s.queries);
    if (right < unbounded) s.reach = diagonal + right + 1;
    if (right < unbounded && p->window_left >= 0 && p->window_left < p->n_k) {
        const int64_t span = p->window_left + right + s.queries + FA_SM90_KEY_ALIGNMENT;
        if (span < s.most_keys) s.most_keys = span;
    }
    s.memory_seconds = 2.0 * (double)(p->batch * p->heads_kv * s.most_keys) *
                       (double)(p->d + p->d_v) / memory_rate;
    return s;
}

/* The most key tiles that a query tile can see: it may be fewer with a window, but not more. */
static int64_t count_key_tiles(const shape *s, int64_t tile)
{
    const int64_t end = (tile + 1) * s->queries, last = (end < s->rows_q ? end : s->rows_q) - 1;
    const int64_t keys = clamp(last + s->reach, 0, s->most_keys);
    return keys < 1 ? 1 : fa_divide(keys + s->keys - 1, s->keys);
}

/* The first query tile that sees keys from this one on, or the number of query tiles. */
static int64_t first_tile_beyond(const shape *s, int64_t key)
{
    const int64_t row = key - s->reach + 1; /* the first such query */
    if (key >= s->n_k || row >= s->rows_q) return s->tiles;
    return row <= 0 ? 0 : fa_divide(row, s->queries);
}

static int64_t count_parts(const shape *s, int64_t part_tiles)
{
    return fa_divide(count_key_tiles(s, s->tiles - 1) + part_tiles - 1, part_tiles);
}

/* The number of tasks of all parts together. */
static int64_t count_tasks(const shape *s, int64_t part_tiles)
{
    const int64_t parts = count_parts(s, part_tiles);
    int64_t tiles = s->tiles;
    for (int64_t part = 1; part < parts; part++)
        tiles += s->tiles - first_tile_beyond(s, part * part_tiles * s->keys);
    return tiles * s->heads;
}

static double count_bytes(const shape *s, int64_t tasks)
{
    return (double)tasks * s->rows *
           (s->variant->value_dim * (double)sizeof(float) + ROW_SUM_BYTES);
}

static fa_sm90_split cut_keys(const shape *s, int64_t part_tiles)
{
    fa_sm90_split split = {.part_tiles = (int32_t)part_tiles,
                           .parts = (int32_t)count_parts(s, part_tiles),
                           .heads = (int32_t)s->heads,
                           .tiles = (int32_t)s->tiles,
                           .queries = s->rows,
                           .value_dim = s->variant->value_dim,
                           .group = fa_sm90_group_of(1, s->variant->consumers)};
    for (int32_t part = 0; part < split.parts; part++) {
        const int64_t first = part == 0 ? 0 : first_tile_beyond(s, part * part_tiles * s->keys);
        split.first_tile[part] = (int32_t)first;
        split.first_task[part + 1] =
            split.first_task[part] + (int32_t)((s->tiles - first) * s->heads);
    }
    return split;
}

/* ---- The model of the time ------------------------------------------------------------------- */

/* Of a round, in which the longest task has so many key tiles. */
static double round_seconds(const shape *s, int64_t tiles)
{
    return (double)tiles * s->tile_seconds + s->pace->round;
}

/* All of it: launches, and rounds, or the memory if that takes longer. */
static double all_seconds(const shape *s, double rounds)
{
    return s->pace->launch + fmax(rounds, s->pace->round + s->memory_seconds);
}

/* Of the sums that are stored and loaded. */
static double merging_seconds(const shape *s, int64_t tasks)
{
    return 2 * count_bytes(s, tasks) / sums_rate;
}

/* The key tiles of a task of this part. */
static int64_t task_tiles(const shape *s, const fa_sm90_split *split, int32_t part, int64_t task)
{
    const int64_t tile = s->tiles - 1 - fa_divide(task - split->first_task[part], s->heads);
    return clamp(count_key_tiles(s, tile) - (int64_t)part * split->part_tiles, 1,
                 split->part_tiles);
}

/* Rounds are as long as the longest of their tasks, which is the first one, or the first one of a part. */
static double seconds_of_rounds(const shape *s, const fa_sm90_split *split, int64_t blocks)
{
    const int64_t tasks = split->first_task[split->parts];
    int32_t part = 0;
    double seconds = 0;
    for (int64_t from = 0; from < tasks; from += blocks) {
        int64_t longest = 1;
        while (split->first_task[part + 1] <= from) part++;
        for (int32_t n = part; n < split->parts && split->first_task[n] < from + blocks; n++) {
            const int64_t first = split->first_task[n],
                          tiles = task_tiles(s, split, n, from > first ? from : first);
            if (tiles > longest) longest = tiles;
            if (longest == split->part_tiles) break;
        }
        seconds += round_seconds(s, longest);
    }
    return seconds;
}

/* The same if all query tiles see so many key tiles: whole parts come first, then shorter ones. */
static double seconds_of_equal_rounds(const shape *s, int64_t key_tiles, int64_t part_tiles,
                                      int64_t blocks)
{
    const int64_t parts = fa_divide(key_tiles + part_tiles - 1, part_tiles),
                  work_tiles = s->tiles * s->heads;
    const int64_t rounds = fa_divide(work_tiles * parts + blocks - 1, blocks);
    const int64_t whole =
        fa_divide(work_tiles * fa_divide(key_tiles, part_tiles) + blocks - 1, blocks);
    const int64_t rest = key_tiles - (parts - 1) * part_tiles;
    return (double)whole * round_seconds(s, part_tiles) +
           (double)(rounds - whole) * round_seconds(s, rest);
}

static double split_seconds(const shape *s, int64_t part_tiles, int64_t tasks, int64_t blocks)
{
    const int64_t most = count_key_tiles(s, s->tiles - 1), least = count_key_tiles(s, 0);
    const double merging = merging_seconds(s, tasks);
    if (most == least)
        return merging + all_seconds(s, seconds_of_equal_rounds(s, most, part_tiles, blocks));
    const fa_sm90_split split = cut_keys(s, part_tiles);
    return merging + all_seconds(s, seconds_of_rounds(s, &split, blocks));
}

/* The key tiles of a query tile on average. */
static double average_tiles(const shape *s)
{
    enum { SAMPLES = 16 }; /* query tiles */
    int64_t sum = 0;
    for (int64_t i = 0; i < SAMPLES; i++)
        sum += count_key_tiles(s, fa_divide((2 * i + 1) * s->tiles, 2 * SAMPLES));
    return (double)sum / SAMPLES;
}

/* What splitting cannot beat: all multiprocessors are busy until the end, with one task each. */
static double ideal_seconds(const shape *s, int64_t blocks)
{
    const int64_t work_tiles = s->tiles * s->heads;
    const double each = average_tiles(s) * (double)work_tiles / (double)blocks;
    return merging_seconds(s, work_tiles) + all_seconds(s, each * s->tile_seconds + s->pace->round);
}

/* For a block of forward_sm90 whose tasks alternate (balance.cuh). */
static double alternating_seconds(const shape *s, int64_t block, int64_t blocks)
{
    const int64_t work_tiles = s->tiles * s->heads;
    double seconds = 0;
    for (int64_t i = 0; i * blocks < work_tiles; i++) {
        const int64_t n = i * blocks + (i % 2 == 0 ? blocks - 1 - block : block);
        if (n < work_tiles)
            seconds += round_seconds(s, count_key_tiles(s, s->tiles - 1 - fa_divide(n, s->heads)));
    }
    return seconds;
}

/* For forward_sm90, by the order of its tasks. */
static double seconds_of_plain_rounds(const fa_problem *p, const shape *of,
                                      const fa_cuda_plan_launch *l)
{
    const shape s = *of;
    const int64_t blocks = l->grid;
    const double longest = round_seconds(&s, count_key_tiles(&s, s.tiles - 1));
    const double pair = longest + round_seconds(&s, count_key_tiles(&s, 0));
    fa_sm90_params order;
    fa_cuda_set_sm90_order(p, l, &order);
    if (order.task_kind == FA_SM90_WORK_TILES)
        return (double)fa_cuda_count_tiles(l->tasks, blocks) * longest;
    if (order.alternating_heads == s.heads)
        return fmax(alternating_seconds(&s, 0, blocks),
                    alternating_seconds(&s, blocks - 1, blocks));
    if (order.balanced_heads + order.alternating_heads > 0)
        return (double)l->tasks / (double)blocks * pair / 2;
    return (double)fa_cuda_count_tiles(order.tasks, blocks) * pair;
}

static double plain_seconds(const fa_problem *p, const fa_cuda_plan_launch *l)
{
    const shape s = find_shape(p, &fa_variants[l->variant], &paces_of(p)->plain);
    return all_seconds(&s, seconds_of_plain_rounds(p, &s, l));
}

/* A length of parts in key tiles, or a number of parts, and the time with it. 0: none fits into the workspace. */
typedef struct choice {
    int64_t number;
    double seconds;
} choice;

static void try_length(const shape *s, int64_t blocks, int64_t tiles, choice *best)
{
    const int64_t tasks = count_tasks(s, tiles);
    if (count_bytes(s, tasks) > MOST_WORKSPACE) return;
    const double seconds = split_seconds(s, tiles, tasks, blocks);
    if (seconds < best->seconds) *best = (choice){tiles, seconds};
}

/* Tries equal parts, and if query tiles see different numbers of keys, lengths near that of the best ones. */
static choice choose_length(const shape *s, const fa_cuda_device *device)
{
    const int64_t blocks = device->multiprocessors, most = count_key_tiles(s, s->tiles - 1);
    choice best = {0, INFINITY};
    for (int64_t parts = 2; parts <= FA_SM90_PARTS && parts <= most; parts++)
        try_length(s, blocks, fa_cuda_count_tiles(most, parts), &best);
    if (best.number == 0 || most == count_key_tiles(s, 0)) return best;
    const int64_t parts = count_parts(s, best.number),
                  least = fa_cuda_count_tiles(most, FA_SM90_PARTS);
    const int64_t shorter = fa_cuda_count_tiles(most, parts + 1),
                  longer = fa_cuda_count_tiles(most, parts - 1);
    const int64_t step = 1 + (longer - shorter) / NEIGHBOURS_TRIED;
    for (int64_t n = shorter < least ? least : shorter; n < longer; n += step)
        try_length(s, blocks, n, &best);
    return best;
}

/* ---- Sections -------------------------------------------------------------------------------- */

static shape share_tiles(shape s, int group)
{
    const fa_sm90_group g = fa_sm90_group_of(group, s.variant->consumers);
    s.group = group;
    s.heads /= group;
    s.queries = g.tile_queries;
    s.tiles = fa_cuda_count_tiles(s.rows_q, s.queries);
    s.tile_seconds = find_tile_seconds(s.variant, s.pace, s.rows_q <= fa_sm90_box_queries(g.box));
    return s;
}

/* Whether packed queries and keys seem to be those of the same rows. */
static bool is_without_cache(const fa_problem *p)
{
    return p->cu_seqlens_q && p->cu_seqlens_k && p->rows_q == p->rows_k;
}

/* The longest sequence, as far as the host knows. Of other packed keys it knows only the sum. Short ones would gain less. */
static shape find_longest_alone(const fa_problem *p, const fa_variant *v, const pace *pace)
{
    fa_problem longest = *p;
    longest.rows_q = p->max_q;
    if (is_without_cache(p)) longest.n_k = p->max_q;
    else if (p->cu_seqlens_k) longest.n_k = fa_cuda_count_tiles(p->rows_k, p->batch);
    return find_shape(&longest, v, pace);
}

/* Work tiles that may have rows. Tiles of packed queries have more numbers. */
static int64_t count_work_tiles(const fa_problem *p, const shape *s)
{
    const int64_t each = fa_cuda_count_tiles(p->max_q, s->queries);
    if (!p->cu_seqlens_q) return each * s->heads;
    const int64_t packed = p->rows_q / s->queries + p->batch;
    return p->heads_q / s->group * (each <= packed / p->batch ? each * p->batch : packed);
}

/* The same, with query heads of a group that share query tiles: as many as leave the fewest work tiles, of equal ones the most.
 * Each head's rows are at the same distance from the one before it. */
static shape share_most_tiles(const fa_problem *p, const shape *alone)
{
    const int64_t group = fa_divide(p->heads_q, p->heads_kv);
    shape best = *alone;
    if (group > 1 && fa_cuda_is_broadcast(&p->q, 2)) return best;
    for (int heads = 2; heads <= group && heads <= FA_SM90_BOX_ROWS; heads++) {
        if (group % heads) continue;
        const shape s = share_tiles(*alone, heads);
        if (count_work_tiles(p, &s) <= count_work_tiles(p, &best)) best = s;
    }
    return best;
}

static const pace *find_sections_pace(const fa_problem *p)
{
    return fa_cuda_has_own_lengths(p) ? &lengths_pace : &paces_of(p)->sections;
}

/* The same where that leaves clearly fewer work tiles. Full tiles of several heads are 2 to 4% slower than those of one (H200, 16
 * heads of 4, chunks of 2,048, 512 and 256 at 8k, 4k and 2k: 227 us, 232). */
static shape find_longest(const fa_problem *p, const fa_variant *v)
{
    const shape alone = find_longest_alone(p, v, find_sections_pace(p)),
                shared = share_most_tiles(p, &alone);
    return 10 * count_work_tiles(p, &shared) <= 8 * count_work_tiles(p, &alone) ? shared : alone;
}

/* Whole query tiles that heads share, without lengths on the device. */
static shape find_whole_tiles(const fa_problem *p, const fa_variant *v)
{
    const shape alone = fa_cuda_has_own_lengths(p) ? find_longest_alone(p, v, find_sections_pace(p))
                                                   : find_shape(p, v, &paces_of(p)->whole);
    return share_most_tiles(p, &alone);
}

/* What the multiprocessors have to do. */
typedef struct work {
    int64_t tiles;           /* work tiles */
    double longest, average; /* their key tiles */
} work;

static work find_work(const fa_problem *p, const shape *s)
{
    double share = p->cu_seqlens_q && p->batch > 1 ? average_share : 1;
    /* By the average row's sequence, which is longer than the average one. */
    if (is_without_cache(p) && p->batch > 0)
        share = sqrt((double)p->rows_q / (double)p->batch / (double)p->max_q);
    return (work){count_work_tiles(p, s), (double)count_key_tiles(s, s->tiles - 1),
                  share * average_tiles(s)};
}

/* Without split keys: blocks take whole query tiles as they need them. Those of a single sequence are nearly equally long. */
static double taken_seconds(const fa_problem *p, const shape *s, const work *w, double launch,
                            int64_t blocks)
{
    const double longest = w->longest * s->tile_seconds,
                 each = w->average * s->tile_seconds + lengths_pace.round;
    const double spread = (double)w->tiles / (double)blocks * each + left_at_end * longest,
                 rounds = (double)fa_cuda_count_tiles(w->tiles, blocks) * each;
    return launch + fmax(longest, p->batch > 1 ? spread : fmin(spread, rounds));
}

static double count_section_bytes(const shape *s, int64_t sections)
{
    return count_bytes(s, SLOTS_OF_SECTION * sections) +
           (double)sections * (double)sizeof(fa_sm90_cut);
}

/* The time of a key tile, relative to that without split keys, if lengths are on the device: blocks read the keys of a head at
 * different times, and the L2 cache limits them. */
static const double slowness_of_sections = 1.1;

/* Sections, without lengths on the device: as many as leave each query tile the same number of whole ones, if that leaves few blocks
 * without any. Then no section has the ends of two tiles, and blocks that read the same keys do so at the same time. More parts of a
 * tile than MOST_PARTS take longer to merge. (H200, us, 132 sections and so many: 4 heads of 4 query tiles each, 27,865 keys, 128
 * sections, 68.0, 53.6; 20 tiles of 3,367 keys of 256 columns, 120, 39.0, 35.6; 10 of 38,347, 130, 56.2, 48.6; 60 of 6,975, 120, 62.6,
 * 55.2; 32 of 12,556, 128, 54.0, 50.2; 2 of 36,064, 88, 29.7, 27.8; but 48 of 6,032 keys, 96, 64.9, 73.6.) */
static int64_t count_sections(const fa_problem *p, const shape *s, int64_t blocks)
{
    enum { LEAST_PERCENT = 85, MOST_PARTS = 44 };
    const int64_t tiles = s->tiles * s->heads;
    if (fa_cuda_has_own_lengths(p) || p->cu_seqlens_q || tiles < 2 || tiles > blocks) return blocks;
    const int64_t each = fa_divide(blocks, tiles);
    if (each > MOST_PARTS) return MOST_PARTS * tiles;
    return 100 * each * tiles >= LEAST_PERCENT * blocks ? each * tiles : blocks;
}

/* How much faster the keys of a query tile are read and multiplied then, if it has no more than MOST_EVEN_PARTS: more of them take
 * long to merge (2 query tiles of 19,013 keys in 44 sections each 22.4 us, in plain parts 19.3). */
static const double gain_of_whole_sections = 0.88;
enum { MOST_EVEN_PARTS = 16 };
static const double seconds_of_part = 5e-8;

/* All blocks have the same work. Merging loads half of the slots: a query tile in two parts has a slot of two sections. */
static double sections_seconds(const fa_problem *p, const shape *s, const work *w, int64_t blocks)
{
    const int64_t sections = count_sections(p, s, blocks);
    const bool even = !fa_cuda_has_own_lengths(p) && !p->cu_seqlens_q && s->tiles * s->heads > 1 &&
                      sections % (s->tiles * s->heads) == 0 &&
                      sections / (s->tiles * s->heads) <= MOST_EVEN_PARTS;
    const double tiles = (double)w->tiles / (double)sections,
                 merging = merging_seconds(s, sections);
    const double each = w->average * s->tile_seconds * (even ? gain_of_whole_sections : 1.0);
    if (fa_cuda_has_own_lengths(p))
        return s->pace->launch + tiles * (slowness_of_sections * each + s->pace->round) + merging;
    const double parts = (double)sections / (double)(s->tiles * s->heads);
    return all_seconds(s, tiles * (each + s->pace->round)) + merging +
           (parts > MOST_EVEN_PARTS ? parts * seconds_of_part : 0.0);
}

/* What a query tile costs its section besides its keys. With many tiles in each, the same as in the model of the time; with few,
 * little of it overlaps, and a section of several short tiles ended last (H200, pages, us, with 1.5 us for each and 3.5: 51 queries
 * at 8k and two prompts of 59 and 28, 40 heads of 8, 49.5, 36.7; 17 decodes and prompts of 942, 300 and 120, 3 of 1, 26.9, 20.5; 5
 * decodes at 9k and a prompt of 260, 24 of 8, 73.9, 64.2; eight others 1.00 to 1.22, one 0.98; but six prompts of up to 2,595, 32
 * of 8, some 15 tiles in a section, 237, 259). */
static const double seconds_of_few = 3.5e-6;

static double find_seconds_of_tile(const fa_problem *p, const shape *s, int64_t sections)
{
    enum { FEW_TILES = 4 };
    return count_work_tiles(p, s) <= FEW_TILES * sections ? seconds_of_few : lengths_pace.round;
}

/* The same in keys. */
static int32_t find_tile_cost(const shape *s, double seconds)
{
    return (int32_t)(seconds / find_tile_seconds(s->variant, &lengths_pace, false) * s->keys);
}

/* How long the line can be: packed queries have rows of no sequence before and behind all others. */
static bool is_line_too_long(const fa_problem *p, const shape *s)
{
    const int64_t keys = (p->cu_seqlens_k ? p->rows_k : p->n_k) + find_tile_cost(s, seconds_of_few);
    const double tiles = (double)p->rows_q / s->queries + 1;
    const double all = p->cu_seqlens_q ? tiles + (double)p->batch + 2 : tiles * (double)p->batch;
    return all * (double)p->heads_q / s->group * (double)keys >= FA_SM90_LINE;
}

/* How many heads' lines are cut alike: as many as leave hardly a block without a section. */
static int64_t count_in_step(int64_t heads, int64_t blocks)
{
    for (int64_t n = heads < blocks ? heads : blocks; n > 1; n--)
        if (heads % n == 0 && 100 * (blocks / n * n) >= 96 * blocks) return n;
    return 1;
}

/* Sections of a line. */
static int64_t count_slices(int64_t sections, int64_t in_step)
{
    return sections < in_step ? 1 : fa_divide(sections, in_step);
}

/* sections: at most. */
static fa_sm90_split cut_line(const fa_problem *p, const shape *s, int64_t sections)
{
    const int64_t heads = p->heads_q / s->group, in_step = count_in_step(heads, sections);
    const double seconds = find_seconds_of_tile(p, s, sections);
    return (fa_sm90_split){.parts = FA_SM90_SECTION_PARTS,
                           .queries = s->rows,
                           .value_dim = s->variant->value_dim,
                           .group = fa_sm90_group_of(s->group, s->variant->consumers),
                           .in_step = (int32_t)in_step,
                           .line_heads = (int32_t)(heads / in_step),
                           .slices = (int32_t)(sections / in_step),
                           .sections = (int32_t)(sections / in_step * in_step),
                           .by_step = fa_reciprocal_of(in_step),
                           .by_slices = fa_reciprocal_of(count_slices(sections, in_step)),
                           .tile_cost = find_tile_cost(s, seconds),
                           .least = LEAST_SECTION};
}

/* ---- Whole query tiles ----------------------------------------------------------------------- */

/* If each block takes equally many tasks in turn, whatever their keys. */
static double average_seconds(const shape *s, int64_t blocks)
{
    const double each = average_tiles(s) * s->tile_seconds + s->pace->round;
    return all_seconds(s, (double)fa_cuda_count_tiles(s->tiles * s->heads, blocks) * each);
}

/* Bytes of keys and values a second of a block, if most pairs of multiprocessors have one and some have two (H200, us, whole query
 * tiles and sections: 80 of them with 17,857 keys of 256 columns 404, 351; 72 with 16,402 of 128 165, 157). */
static const double rate_of_block = 50e9;

/* The key tiles that all query tiles of a head see through a window, on average of some. */
static double count_seen_tiles(const fa_problem *p, const shape *s)
{
    enum { SAMPLES = 64 };
    const fa_sm90_reach reach =
        fa_sm90_find_reach(p->causal, p->window_left, p->window_right,
                           p->diagonal_given ? p->diagonal : p->n_k - p->rows_q);
    const int64_t samples = s->tiles < SAMPLES ? s->tiles : SAMPLES;
    int64_t sum = 0;
    for (int64_t i = 0; i < samples; i++) {
        const int64_t first = fa_divide(i * s->tiles, samples) * s->queries;
        const int64_t lo = clamp(first + reach.lo, 0, p->n_k) / FA_SM90_KEY_ALIGNMENT *
                           FA_SM90_KEY_ALIGNMENT,
                      hi = clamp(first + s->queries - 1 + reach.hi, lo + 1, p->n_k);
        sum += fa_cuda_count_tiles(hi - lo, s->keys);
    }
    return (double)sum / (double)samples * (double)s->tiles;
}

/* Whether the window hides at least half of the keys. */
static bool hides_half(const fa_problem *p)
{
    return p->window_left >= 0 && p->window_left <= p->n_k / 2;
}

/* Through a narrow window a tile of few queries of several heads sees fewer keys. The time of whole query tiles that heads share,
 * relative to those of one head (H200, ratios of key tiles, and of times: head dim 64, 0.51 0.70, 0.75 0.92; 192, 0.73 0.88, 0.82
 * 0.92, 0.92 1.00; 256, 0.57 0.72, 0.74 0.90, 0.82 0.92; 128, 0.97 1.02 to 1.06). A wider window leaves causal tiles unequal, which only
 * forward_sm90 balances. */
static double share_of_window(const fa_problem *p, const shape *shared, const shape *alone)
{
    const double least = 0.86, fixed = 0.2;
    if (!hides_half(p) || (!p->causal && p->window_right < 0)) return 1;
    const double ratio = count_seen_tiles(p, shared) * (double)shared->heads /
                         (count_seen_tiles(p, alone) * (double)alone->heads);
    return ratio > least ? 1 : fixed + (1 - fixed) * ratio;
}

/* The time with whole query tiles that heads share: with many short sequences, whose last tiles would be mostly empty, or a window. */
static double whole_seconds(const fa_problem *p, const fa_variant *v, int64_t blocks)
{
    if (fa_cuda_has_own_lengths(p)) return INFINITY;
    shape s = find_whole_tiles(p, v);
    const shape alone = find_shape(p, v, &paces_of(p)->plain);
    if (s.group == 1 || s.tiles > INT32_MAX / s.heads) return INFINITY;
    const double share = share_of_window(p, &s, &alone);
    if (share < 1) return share * average_seconds(&alone, blocks);
    if (10 * s.tiles * s.heads > 9 * alone.tiles * alone.heads) return INFINITY;
    if (2 * s.tiles * s.heads > blocks)
        s.tile_seconds =
            fmax(s.tile_seconds, 2.0 * (double)(v->keys * (p->d + p->d_v)) / rate_of_block);
    return average_seconds(&s, blocks);
}

/* ---- The choice ------------------------------------------------------------------------------ */

static bool has_mask(const fa_problem *p)
{
    return p->causal || p->window_left >= 0 || p->window_right >= 0;
}

/* The time with sections, if no lengths are on the device. Where heads do not share query tiles, parts are mostly better under a mask and with
 * many queries, but there are at most FA_SM90_PARTS of a tile. */
static double shared_seconds(const fa_problem *p, const fa_variant *v, int64_t blocks)
{
    const shape s = find_longest(p, v);
    if (p->n_k < LEAST_KEYS || is_line_too_long(p, &s)) return INFINITY;
    if (s.group == 1 && (has_mask(p) || paces_of(p) != &few_queries)) return INFINITY;
    const work w = find_work(p, &s);
    return sections_seconds(p, &s, &w, blocks);
}

/* The fastest form, and its time. No lengths are on the device. */
static double find_fastest_form(const fa_problem *p, const fa_variant *v,
                                const fa_cuda_device *device, fa_cuda_split_form *form)
{
    const shape s = find_shape(p, v, &paces_of(p)->parts);
    const int64_t blocks = device->multiprocessors;
    const double shared = shared_seconds(p, v, blocks), whole = whole_seconds(p, v, blocks);
    const double parts = choose_length(&s, device).seconds;
    *form = whole < parts && whole <= shared ? FA_CUDA_WHOLE_TILES
            : shared < parts                 ? FA_CUDA_SECTIONS
                                             : FA_CUDA_PARTS;
    return fmin(parts, fmin(shared, whole));
}

/* The same if lengths are on the device: sections, or whole query tiles. */
static double find_fastest_of_lengths(const fa_problem *p, const fa_variant *v, int64_t blocks,
                                      fa_cuda_split_form *form)
{
    const shape cut = find_longest(p, v), shared = find_whole_tiles(p, v);
    const work all = find_work(p, &cut), whole_work = find_work(p, &shared);
    const double sections = sections_seconds(p, &cut, &all, blocks),
                 whole = taken_seconds(p, &shared, &whole_work, taken_launch, blocks);
    *form = whole < sections ? FA_CUDA_WHOLE_TILES : FA_CUDA_SECTIONS;
    return fmin(sections, whole);
}

/* Whole query tiles are all that is left where keys have no parts, and TMA cannot load the pages. */
static fa_cuda_split_form choose_form(const fa_problem *p, const fa_variant *v,
                                      const fa_cuda_device *device)
{
    fa_cuda_split_form form;
    if (fa_cuda_has_own_lengths(p))
        (void)find_fastest_of_lengths(p, v, device->multiprocessors, &form);
    else if (find_fastest_form(p, v, device, &form) == INFINITY && v->copied)
        form = FA_CUDA_WHOLE_TILES;
    return form;
}

/* The time of a key tile that forward_sm90 loads by TMA, relative to one that is copied (H200, prompts behind a cache: head dim 128,
 * pages of 16 1.2, of 32 1.04; 256, 16 and 32 1.2, 64 1.15). At head dim 64 it is 1.08, but short prompts are faster by TMA (4 of 2,048, pages of
 * 16, 190 us and 199). */
static double find_slowness_of_pages(const fa_problem *p, const fa_variant *v)
{
    const int64_t few_rows = 16;
    if (!v->copied || v->head_dim <= NARROW) return 1;
    return v->head_dim <= MIDDLE && p->rows_k > few_rows ? 1.04 : 1.15;
}

/* Whether one of the forms is faster than forward_sm90, if lengths are on the device. Without a causal mask the model has not been
 * compared with times. */
static bool is_faster_with_lengths(const fa_problem *p, const fa_variant *v, int64_t blocks)
{
    fa_cuda_split_form form;
    shape alone = find_longest_alone(p, v, find_sections_pace(p));
    if (p->d > NARROW && p->d <= PLAIN && p->d_v <= PLAIN)
        alone.tile_seconds *= (double)PLAIN / v->head_dim;
    alone.tile_seconds *= find_slowness_of_pages(p, v);
    const work each = find_work(p, &alone);
    return taken_seconds(p, &alone, &each, plain_launch, blocks) >
           (p->causal ? least_gain : least_gain_for_many) *
               find_fastest_of_lengths(p, v, blocks, &form);
}

/* ---- The launches ---------------------------------------------------------------------------- */

static int64_t count_slots(const fa_sm90_split *split)
{
    return split->sections ? SLOTS_OF_SECTION * split->sections : split->first_task[split->parts];
}

fa_sm90_split fa_cuda_split_of(const fa_problem *p, const fa_cuda_plan_launch *l)
{
    fa_sm90_split split = l->sm90.split;
    const int64_t rows = count_slots(&split) * split.queries;
    split.out = (float *)(void *)((char *)p->workspace + l->workspace_offset);
    split.sums = (fa_sm90_row_sum *)(void *)(split.out + rows * split.value_dim);
    split.cuts = (fa_sm90_cut *)(void *)(split.sums + rows);
    return split;
}

bool fa_cuda_split_sm90_params(const fa_problem *p, const fa_cuda_plan_launch *l,
                               fa_cuda_encoder *encode, fa_sm90_params *params,
                               fa_cuda_fault *fault)
{
    if (!fa_cuda_sm90_params(p, l, encode, params, fault)) return false;
    params->split = fa_cuda_split_of(p, l);
    params->task_kind = FA_SM90_WORK_TILES;
    if (params->split.sections) /* lengths shift it where no diagonal is given */
        params->reach = fa_sm90_find_reach(p->causal, p->window_left, p->window_right,
                                           p->diagonal_given ? p->diagonal : 0);
    params->tasks = params->split.sections     ? params->split.sections
                    : params->split.parts == 0 ? l->tasks
                                               : params->split.first_task[params->split.parts];
    if (params->split.parts == 0) { /* query tiles are numbered by groups of heads */
        const int64_t groups = p->heads_q / params->split.group.heads;
        params->by_heads = fa_reciprocal_of(groups);
        params->alternating_heads = (int32_t)groups;
    }
    params->balanced_heads = 0;
    return true;
}

static bool queue_split(void *kernel, const fa_cuda_plan *plan, const fa_cuda_plan_launch *l,
                        const fa_cuda_call *call, fa_cuda_fault *fault)
{
    fa_attention_params attention;
    fa_sm90_params params;
    fa_cuda_set_params(call->problem, l, &attention);
    if (!fa_cuda_split_sm90_params(call->problem, l, fa_cuda_encode_map, &params, fault))
        return false;
    void *parameters[] = {&attention, &params};
    if (!l->sm90.dynamic) return fa_cuda_queue(kernel, plan, l, call->stream, parameters, fault);
    /* Without a counter, tasks are those of a block's number. */
    const fa_cuda_counter counter = fa_cuda_counter_take(call->stream, FA_SM90_COUNTERS);
    params.counter = counter.number;
    const bool fine = fa_cuda_queue(kernel, plan, l, call->stream, parameters, fault);
    fa_cuda_counter_release(counter, call->stream);
    return fine;
}

static bool queue_merge(void *kernel, const fa_cuda_plan *plan, const fa_cuda_plan_launch *l,
                        const fa_cuda_call *call, fa_cuda_fault *fault)
{
    fa_attention_params attention;
    fa_sm90_params params; /* the kernel reads nothing but the parts */
    params.split = fa_cuda_split_of(call->problem, l);
    fa_cuda_set_params(call->problem, l, &attention);
    return fa_cuda_queue(kernel, plan, l, call->stream, (void *[]){&attention, &params}, fault);
}

/* ---- The plan -------------------------------------------------------------------------------- */

static void set_split(fa_sm90_split split, int64_t tasks, int64_t most_blocks, double bytes,
                      fa_cuda_plan *plan)
{
    fa_cuda_plan_launch *l = &plan->launches[0], *merge = &plan->launches[1];
    l->sm90.split = merge->sm90.split = split;
    l->grid = (uint32_t)(tasks < most_blocks ? tasks : most_blocks);
    plan->workspace_bytes = l->workspace_bytes = merge->workspace_bytes = (size_t)bytes;
}

void fa_cuda_cut_split_sm90(const fa_problem *p, const fa_cuda_device *device, int64_t part_tiles,
                            fa_cuda_plan *plan)
{
    const shape s = find_shape(p, &fa_variants[plan->launches[0].variant], &paces_of(p)->parts);
    const fa_sm90_split split = cut_keys(&s, part_tiles);
    const int32_t tasks = split.first_task[split.parts];
    set_split(split, tasks, device->multiprocessors, count_bytes(&s, tasks), plan);
}

void fa_cuda_section_split_sm90(const fa_problem *p, const fa_cuda_device *device, int64_t sections,
                                fa_cuda_plan *plan)
{
    fa_cuda_plan_launch *l = &plan->launches[0], *merge = l + 1;
    const shape s = find_longest(p, &fa_variants[l->variant]);
    fa_cuda_map_groups(&l->sm90.maps[0], &p->q, p->d, p->rows_q, p->heads_q, p->blocks_q, s.group,
                       FA_SM90_BOX_ROWS);
    const fa_sm90_split split = cut_line(p, &s, sections);
    merge->grid = fa_cuda_grid((int64_t)split.sections * FA_SM90_MERGE_SHARES);
    set_split(split, split.sections, device->multiprocessors,
              count_section_bytes(&s, split.sections), plan);
}

static void set_whole_tiles(const fa_problem *p, const fa_cuda_device *device,
                            fa_cuda_plan_launch *l)
{
    const fa_variant *v = &fa_variants[l->variant];
    const shape s = find_whole_tiles(p, v);
    const int64_t tiles = p->cu_seqlens_q ? FA_PACKED_TILES(p->rows_q, s.queries, p->batch)
                                          : fa_cuda_count_tiles(p->rows_q, s.queries);
    const int64_t groups = p->heads_q / s.group * (p->cu_seqlens_q ? 1 : p->batch),
                  tasks = tiles * groups;
    fa_cuda_map_groups(&l->sm90.maps[0], &p->q, p->d, p->rows_q, p->heads_q, p->blocks_q, s.group,
                       FA_SM90_BOX_ROWS);
    fa_cuda_set_tasks(l, tiles, tasks);
    l->queue = queue_split;
    l->sm90.dynamic = fa_cuda_has_own_lengths(p);
    l->sm90.split = (fa_sm90_split){.parts = 0,
                                    .queries = s.rows,
                                    .value_dim = v->value_dim,
                                    .group = fa_sm90_group_of(s.group, v->consumers)};
    l->grid = (uint32_t)(tasks < device->multiprocessors ? tasks : device->multiprocessors);
}

/* The blocks of the second launch, if lengths are not on the device. */
static int64_t count_merge_blocks(const fa_problem *p)
{
    const int64_t threads =
        count_heads(p) * p->rows_q * fa_cuda_count_tiles(p->d_v, FA_SM90_MERGE_COLUMNS);
    return fa_cuda_count_tiles(threads, FA_SM90_MERGE_THREADS);
}

static bool add_merge(const fa_problem *p, bool sections, const fa_cuda_device *device,
                      fa_cuda_plan *plan, char *why, size_t size)
{
    static const int variants[][2] = {
        {FA_VARIANT_forward_sm90_merge_f16, FA_VARIANT_forward_sm90_merge_lengths_f16},
        {FA_VARIANT_forward_sm90_merge_bf16, FA_VARIANT_forward_sm90_merge_lengths_bf16}};
    const int variant = variants[p->q.dtype != FA_FLOAT16][sections];
    fa_cuda_plan_launch *l = fa_cuda_plan_add(&fa_variants[variant], FA_SM90_MERGE_THREADS, 0,
                                              queue_merge, device, plan, why, size);
    if (!l) return false;
    l->grid = fa_cuda_grid(count_merge_blocks(p));
    l->overlaps = true;
    l->idle = false;
    return true;
}

static bool refuse_line(const fa_problem *p, const fa_variant *v, char *why, size_t size)
{
    const shape s = find_longest(p, v);
    if (!is_line_too_long(p, &s)) return false;
    fa_cuda_say(why, size, "sequences have too many queries and keys for split keys");
    return true;
}

/* The length of a part. 0: there is none. */
static int64_t choose_part(const fa_problem *p, const fa_variant *v, const fa_cuda_device *device,
                           char *why, size_t size)
{
    const shape s = find_shape(p, v, &paces_of(p)->parts);
    const int64_t chosen = choose_length(&s, device).number;
    if (chosen == 0)
        fa_cuda_say(why, size, "queries see one key tile, or sums of parts need more than %d MiB",
                    (int)(MOST_WORKSPACE >> 20));
    return chosen;
}

static bool add_launch(const fa_problem *p, bool overlaps, const fa_cuda_device *device,
                       fa_cuda_plan *plan, char *why, size_t size)
{
    if (refuse_split(p, why, size) ||
        !fa_cuda_add_sm90(p, FA_FIRST_forward_sm90_split, FA_END_forward_sm90_split, overlaps,
                          device, plan, why, size))
        return false;
    plan->launches[0].queue = queue_split;
    plan->launches[0].overlaps = true;
    plan->launches[0].sm90.dynamic = false;
    return true;
}

bool fa_cuda_plan_split_form(const fa_problem *p, fa_cuda_split_form form,
                             const fa_cuda_device *device, fa_cuda_plan *plan, char *why,
                             size_t size)
{
    const bool sections = form == FA_CUDA_SECTIONS, whole = form == FA_CUDA_WHOLE_TILES;
    if (!add_launch(p, whole, device, plan, why, size)) return false;
    if (whole) {
        set_whole_tiles(p, device, &plan->launches[0]);
        if (plan->launches[0].tasks < FA_SM90_LINE) return true;
        fa_cuda_say(why, size, "there are %" PRId64 " work tiles", plan->launches[0].tasks);
        return false;
    }
    const fa_variant *v = &fa_variants[plan->launches[0].variant];
    if (sections && refuse_line(p, v, why, size)) return false;
    const int64_t chosen = sections ? 0 : choose_part(p, v, device, why, size);
    if ((!sections && chosen == 0) || !add_merge(p, sections, device, plan, why, size))
        return false;
    if (sections) {
        const shape s = find_longest(p, v);
        fa_cuda_section_split_sm90(p, device, count_sections(p, &s, device->multiprocessors), plan);
    } else fa_cuda_cut_split_sm90(p, device, chosen, plan);
    return true;
}

static bool plan_split(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                       char *why, size_t size)
{
    const fa_variant *v = find_variant(p);
    const fa_cuda_split_form form =
        v && !refuse_split(p, NULL, 0) ? choose_form(p, v, device) : FA_CUDA_PARTS;
    return fa_cuda_plan_split_form(p, form, device, plan, why, size);
}

static double find_seconds(const fa_problem *p, const fa_cuda_device *device)
{
    fa_cuda_plan plain;
    fa_cuda_split_form form;
    const fa_variant *v = find_variant(p);
    fa_cuda_plan_begin(device, &fa_cuda_forward_sm90, &plain);
    double best = INFINITY;
    if (fa_cuda_forward_sm90.plan(p, device, &plain, NULL, 0))
        best = plain_seconds(p, &plain.launches[0]);
    if (!v || refuse_split(p, NULL, 0)) return best;
    return fmin(best, find_fastest_form(p, v, device, &form));
}

/* Whether forward_sm90 is faster. Most problems have so many work tiles that the model is not needed. */
static bool is_split_slower(const fa_problem *p, const fa_cuda_device *device, char *why,
                            size_t size)
{
    fa_cuda_plan plain;
    (void)why, (void)size;
    const int64_t blocks = device->multiprocessors;
    const paces *paces = paces_of(p);
    const double gain = paces == &few_queries ? least_gain : least_gain_for_many;
    const fa_variant *v = find_variant(p);
    if (!v || refuse_split(p, NULL, 0)) return true;
    if (v->copied && p->rows_k % FA_SM90_LEAST_PAGE) return false;
    if (fa_cuda_has_own_lengths(p)) return !is_faster_with_lengths(p, v, blocks);
    const double shared = shared_seconds(p, v, blocks), whole = whole_seconds(p, v, blocks);
    const bool few =
        p->n_k >= LEAST_KEYS && count_heads(p) < MOST_ROUNDS * blocks &&
        count_heads(p) * fa_cuda_count_tiles(p->rows_q, LARGEST_QUERY_TILE) < MOST_ROUNDS * blocks;
    if (shared == INFINITY && whole == INFINITY && !few) return true;
    fa_cuda_plan_begin(device, &fa_cuda_forward_sm90, &plain);
    if (!fa_cuda_forward_sm90.plan(p, device, &plain, NULL, 0)) return true;
    const shape s = find_shape(p, v, &paces->parts),
                alone = find_shape(p, &fa_variants[plain.launches[0].variant], &paces->plain);
    const double others = plain_seconds(p, &plain.launches[0]);
    const double average = average_seconds(&alone, blocks);
    /* Pairs make tasks under a causal mask equal, which a window does not need. */
    const double one_head = hides_half(p) ? average : fmin(others, average);
    if (others > gain * shared || one_head > gain * whole) return false;
    return !few || others <= gain * ideal_seconds(&s, blocks) ||
           others <= gain * choose_length(&s, device).seconds;
}

const fa_cuda_family fa_cuda_forward_split_sm90 = {
    .name = "sm90_split",
    .oldest = 90,
    .newest = 90,
    .does_few = true,
    .slower = is_split_slower,
    .seconds = find_seconds,
    .without_workspace = &fa_cuda_forward_sm90,
    .plan = plan_split,
};
