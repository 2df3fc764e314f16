/*
 * decode_sm80: few queries over many keys. A work tile is the query heads of a group, or some of them,
 * for a few queries of a sequence. Its keys are cut into parts, so that there are blocks for all
 * multiprocessors.
 */
#include "cuda/plan_decode.h"

#include <inttypes.h>
#include <math.h>

#include "../../kernels/common/packed.h"
#include "../../kernels/decode_latent_sm90/decode_latent_sm90.h"
#include "../../kernels/decode_sm90/decode_sm90.h"
#include "cuda/counters.h"
#include "cuda/family.h"
#include "cuda/parameters.h"
#include "cuda/plan_decode_time.h"

/* Positions and rows, plus a tile, are counted in 32 bits. */
static const int64_t max_rows = INT32_MAX - 4096;

/* The smallest number of keys of a part; and the same for decode_latent_sm90, whose blocks merge in
 * parallel. */
enum { LEAST_KEYS = 256, LEAST_KEYS_LATENT = 128 };

/* The cost of a round of blocks besides reading keys and values: descriptions, the first copies, results
 * written and read (8 us, measured on an H200). It is given in bytes of keys and values that a
 * multiprocessor reads in this time. */
enum { ROUND_BYTES = 256 << 10 };

/* The smallest share of the device, in percent, that blocks keep busy: the blocks of the only round, if
 * there are few; and the blocks after whole rounds, which run on the multiprocessors that happen to end
 * first (measured). */
enum { FEW_BLOCKS = 40, BLOCKS_LEFT_OVER = 70 };

/* For few work tiles of decode_sm90 whose lengths are unknown: the smallest number of blocks on a multiprocessor for which cuts are
 * tried. A single block could have all keys of the longest sequence. */
enum { FEWEST_BLOCKS = 2 };

/* Parts of a group of a persistent block, if there are enough keys, so that groups end together. */
enum { PARTS_OF_GROUP = 6 };

/* How many numbers of rounds beyond the smallest are tried. */
enum { ROUNDS_TRIED = 4 };

/* If results must not depend on the batch, parts have this many keys in all sequences that are at most
 * FA_DECODE_PARTS times as long. */
enum { INVARIANT_KEYS = 512 };

/* The largest number of keys of a part if lengths are unknown, so that a single long sequence is not left
 * to few blocks. */
enum { MOST_KEYS = 8192 };

/* The largest number of queries of a sequence times query heads of a group. With more, several work
 * tiles would read the same keys, and products would take longer than reading: forward kernels are
 * better there. */
enum { MOST_FORWARD_ROWS = 32, MOST_DECODE_ROWS = 128, MOST_LATENT_ROWS = 512 };

/* With FORWARD_ROUNDS heads of all sequences for each multiprocessor, keys need no splitting. With
 * LONG_BYTES of keys and values of a head, decode_sm90 reads them as fast as forward_sm90: the start and
 * end of a block cost as much as 256 KiB. */
enum { FORWARD_ROUNDS = 3, LONG_BYTES = 2 << 20 };

/* Whether the kernel takes keys and values of 8 bits. */
static bool is_8bit(const fa_variant *v) { return v->cache != 0; }

/* Whether the kernel takes values that are the first columns of the keys. */
static bool is_latent_kernel(const fa_variant *v) { return v->value_dim != 0; }

/* Whether it is one of decode_latent_sm90. */
static bool is_latent_sm90(const fa_variant *v) { return v->own_blocks != 0; }

/* Whether its blocks stay and take part after part. */
static bool is_persistent(const fa_variant *v) { return v->groups != 0; }

/* Whether it is one of decode_sm90. */
static bool is_sm90(const fa_variant *v)
{
    return is_persistent(v) ||
           (v >= &fa_variants[FA_FIRST_decode_sm90] && v < &fa_variants[FA_END_decode_sm90]);
}

int fa_cuda_decode_sm90_smem(const fa_variant *v, int stages)
{
    if (is_persistent(v))
        return FA_DECODE_SM90_SMEM_PERSISTENT(v->head_dim, v->group_rows, v->keys, stages,
                                              v->groups);
    return is_8bit(v) ? FA_DECODE_SM90_SMEM_8BIT(v->head_dim, stages)
                      : FA_DECODE_SM90_SMEM(v->head_dim, v->group_rows, v->keys, stages);
}

static int count_smem(const fa_variant *v)
{
    if (is_sm90(v)) return fa_cuda_decode_sm90_smem(v, v->stages);
    if (is_latent_sm90(v)) return FA_DECODE_LATENT_SM90_SMEM(v->head_dim, v->own_blocks, v->stages);
    if (is_latent_kernel(v))
        return FA_DECODE_SMEM_LATENT(v->element, v->head_dim, v->group_rows, v->warps, v->keys,
                                     v->stages);
    if (is_8bit(v))
        return FA_DECODE_SMEM_8BIT(v->head_dim, v->group_rows, v->warps, v->keys, v->stages);
    return FA_DECODE_SMEM(v->element, v->head_dim, v->group_rows, v->warps, v->keys, v->stages);
}

static int64_t block_keys(const fa_variant *v)
{
    return is_latent_kernel(v) || is_sm90(v) ? v->keys : (int64_t)v->warps * v->keys;
}

/* Floats of a row's sums in the workspace. */
static size_t row_floats(const fa_variant *v)
{
    return FA_DECODE_ROW((size_t)(is_latent_kernel(v) ? v->value_dim : v->head_dim));
}

/* Queries of a sequence; for packed sequences the average, rounded up, which is not used if results
 * must not depend on the batch. */
static int64_t count_queries(const fa_problem *p)
{
    if (!p->cu_seqlens_q) return p->n_q;
    if (p->batch_invariant) return 1;
    return p->batch > 0 ? fa_cuda_count_tiles(p->rows_q, p->batch) : 0;
}

static int64_t group_size(const fa_problem *p)
{
    return p->heads_kv > 0 && p->heads_q > 0 ? p->heads_q / p->heads_kv : 1;
}

int64_t fa_cuda_most_few(const fa_problem *p)
{
    const int64_t group = group_size(p);
    return group < MOST_FORWARD_ROWS ? MOST_FORWARD_ROWS / group : 1;
}

/* ---- Refusals -------------------------------------------------------------------------------- */

static bool refuse_queries(const fa_problem *p, int64_t most, char *why, size_t size)
{
    const int64_t queries = count_queries(p), group = group_size(p);
    if (p->pass == FA_PASS_FORWARD && p->cu_seqlens_q && p->batch_invariant) {
        fa_cuda_say(why, size, "options.cu_seqlens_q is set, and FA_BATCH_INVARIANT");
        return true;
    }
    if (queries <= 1 || queries <= most / group) return false;
    fa_cuda_say(why, size,
                "q has %" PRId64 " queries a sequence and %" PRId64
                " heads for each of k: expected at most %" PRId64 " in all",
                queries, group, most);
    return true;
}

static bool has_8_bits(const fa_view *v)
{
    return v->dtype == FA_FLOAT8_E4M3 || v->dtype == FA_INT8;
}

bool fa_cuda_has_8bit_cache(const fa_problem *p) { return has_8_bits(&p->k); }

/* Keys and values are both of the queries' type, or both of the same type of 8 bits. */
static bool refuse_dtypes(const fa_problem *p, char *why, size_t size)
{
    fa_problem other;
    if (!has_8_bits(&p->k)) return fa_cuda_refuse_dtypes(p, true, why, size);
    other = *p;
    other.k.dtype = other.v.dtype = p->q.dtype;
    if (fa_cuda_refuse_dtypes(&other, true, why, size)) return true;
    if (p->v.dtype == p->k.dtype) return false;
    fa_cuda_say(why, size, "v.dtype is %s", fa_dtype_name(p->v.dtype));
    return true;
}

static bool has_row_options(const fa_problem *p)
{
    return p->alibi_slopes || p->bias.data || p->mask.data;
}

/* Head dims of the kernels with separate rows of values, and of the others. */
enum { WIDEST = 256, LATENT_KEYS = 576, LATENT_VALUES = 512 };

/* Whether the latent kernels support the problem: 16 bits, whole vectors, no options by rows. */
static bool fits_latent(const fa_problem *p)
{
    return p->d > WIDEST && p->d <= LATENT_KEYS && p->d_v <= LATENT_VALUES && p->d_v <= p->d &&
           !has_8_bits(&p->k) && p->k.dtype == p->v.dtype && fa_cuda_moves_eight(&p->k, p->d) &&
           !has_row_options(p);
}

/* Whether values are the first columns of the keys in memory. The stride of an axis with one index does
 * not matter. Without data the strides decide: rows of values must be as far apart as the wider rows of
 * keys. */
static bool shares_columns(const fa_problem *p)
{
    const int64_t extents[] = {p->blocks_k, p->rows_k, p->heads_kv};
    for (int axis = 0; axis < 3; axis++)
        if (extents[axis] > 1 && p->k.stride[axis] != p->v.stride[axis]) return false;
    return p->k.data == p->v.data && (p->k.data || p->d_v < p->d);
}

bool fa_cuda_is_latent(const fa_problem *p) { return fits_latent(p) && shares_columns(p); }

static bool refuse_options(const fa_problem *p, char *why, size_t size)
{
    const int64_t dim = p->d > p->d_v ? p->d : p->d_v;
    if (p->dropout_threshold) {
        fa_cuda_say(why, size, "options.dropout_p is set");
        return true;
    }
    if (fa_cuda_is_latent(p)) return false;
    if (dim > WIDEST || (dim > 128 && has_row_options(p))) {
        const char *option = dim > WIDEST   ? ""
                             : p->bias.data ? " with options.bias"
                             : p->mask.data ? " with options.mask"
                                            : " with options.alibi_slopes";
        fa_cuda_say(why, size, "the head dim is %" PRId64 "%s, above %d%s", dim, option,
                    dim > WIDEST ? WIDEST : 128,
                    fits_latent(p) ? ", and v is not the first columns of k" : "");
        return true;
    }
    return false;
}

/* ---- Work tiles and parts -------------------------------------------------------------------- */

/* A tile has all heads of a group if there is room, and as many queries as fit then. */
static void set_rows(const fa_problem *p, const fa_variant *v, fa_cuda_plan_launch *l)
{
    const int64_t group = group_size(p), rows = v->group_rows;
    l->decode.heads = (int32_t)(group < rows ? group : rows);
    l->decode.queries = (int32_t)(rows / l->decode.heads);
    if (!p->cu_seqlens_q && p->n_q > 0 && l->decode.queries > p->n_q)
        l->decode.queries = (int32_t)p->n_q;
    l->decode.chunks = (int32_t)fa_cuda_count_tiles(group, l->decode.heads);
    l->decode.most_queries = 0;
    l->decode.blocks = 0;
    l->decode.merges_apart = false;
}

/*
 * Work tiles of a packed sequence, for decode_sm90: as many as its queries may need. 0: tiles are
 * numbered over all rows. Numbering by sequence has three advantages. A block finds its sequence by a
 * division, not by a search with dependent reads. There are no unused numbers, whose blocks have nothing
 * to do. The heads of a sequence, whose keys are neighbours in memory, are read at the same time, as
 * with padded queries.
 */
static int64_t count_own_tiles(const fa_problem *p, const fa_variant *v,
                               const fa_cuda_plan_launch *l)
{
    const int64_t all = FA_PACKED_TILES(p->rows_q, l->decode.queries, p->batch);
    const int64_t each = fa_cuda_count_tiles(p->max_q, l->decode.queries);
    if (!is_sm90(v) || !p->cu_seqlens_q || p->batch == 0 || p->rows_q == 0) return 0;
    if (p->seqlens_q)
        return 0; /* max_seqlen_q bounds these: a sequence may have more rows, to be zeroed */
    return each <= all / p->batch ? each : 0;
}

/* Sets tasks: the work tiles. */
static void set_tasks(const fa_problem *p, const fa_variant *v, fa_cuda_plan_launch *l)
{
    const int64_t own = count_own_tiles(p, v, l);
    fa_cuda_set_query_tasks(p, l->decode.queries, l);
    if (own > 0) l->decode.most_queries = FA_DECODE_ALL_QUERIES, l->tiles = own;
    const bool shared = p->cu_seqlens_q && own == 0;
    const int64_t units = p->heads_kv * l->decode.chunks * (shared ? 1 : p->batch);
    fa_cuda_set_tasks(l, l->tiles, l->tiles * units);
}

/* The largest number of keys that a work tile sees. */
static int64_t count_keys(const fa_problem *p, const fa_cuda_plan_launch *l)
{
    const int64_t right = p->causal ? 0 : p->window_right;
    if (p->window_left < 0 || right < 0) return p->n_k;
    if (p->window_left >= p->n_k || right >= p->n_k) return p->n_k;
    const int64_t span = p->window_left + right + l->decode.queries;
    return span < p->n_k ? span : p->n_k;
}

/* most: that the keys suffice for. */
static int64_t clamp_parts(int64_t parts, int64_t most)
{
    if (parts > most) parts = most;
    if (parts > FA_DECODE_PARTS) parts = FA_DECODE_PARTS;
    return parts < 1 ? 1 : parts;
}

/* The time of this many blocks, in units of the time of one block while the device is full. room: the
 * number of blocks that fit on the device. */
static double count_slots(int64_t blocks, int64_t room)
{
    const int64_t left = blocks % room, whole = blocks - left;
    const double least = (double)room * (whole ? BLOCKS_LEFT_OVER : FEW_BLOCKS) / 100;
    if (left == 0) return (double)whole;
    return (double)whole + ((double)left > least ? (double)left : least);
}

/* How keys are cut, and how many blocks a multiprocessor should have at a time. */
typedef struct cut {
    int64_t parts;
    int blocks;
    double cost;
    int64_t whole;  /* the first work tiles, which are not cut */
    int64_t length; /* the least key tiles of a part; 0: as least_of_parts() says */
    bool timed;     /* with two blocks on each multiprocessor, even if there are not so many */
    bool alone;     /* the next grid does not start before its blocks end */
} cut;

/* What is cut. */
typedef struct keys_to_cut {
    int64_t tasks;                 /* work tiles that count */
    int64_t keys, most, fewest;    /* keys of a task; parts, at most and at least */
    int64_t key_bytes, part_bytes; /* of a key and its value; of a part's sums, if they count */
    int multiprocessors;
    int64_t merge_turns; /* of a block of decode_sm90 */
    bool grows;    /* a block has as much more on its way as there are fewer of a multiprocessor */
    bool in_order; /* all numbers of work tiles have keys: the first ones can stay whole */
} keys_to_cut;

/* The time for a number of parts with a number of blocks on each multiprocessor. */
static double cost_of(const keys_to_cut *k, int64_t parts, int blocks)
{
    const int64_t needed = fa_cuda_count_tiles(k->tasks * parts, k->multiprocessors);
    const int64_t each = k->grows && needed < blocks ? needed : blocks;
    const double bytes =
        (double)k->keys / (double)parts * (double)k->key_bytes + (double)ROUND_BYTES / (double)each;
    const double sums = parts > 1 ? (double)(k->tasks * parts * k->part_bytes) : 0;
    return count_slots(k->tasks * parts, k->multiprocessors * each) * bytes + sums;
}

/* Among the numbers of parts whose blocks just fill whole rounds, finds the one that takes the least
 * time, if that is less than the best time so far. */
static void try_cuts(const keys_to_cut *k, int blocks, cut *best)
{
    const int64_t room = (int64_t)k->multiprocessors * blocks;
    const int64_t first = fa_cuda_count_tiles(k->tasks, room);
    for (int64_t rounds = first; rounds < first + ROUNDS_TRIED; rounds++) {
        const int64_t fitting = clamp_parts(rounds * room / k->tasks, k->most);
        const int64_t parts = fitting > k->fewest ? fitting : k->fewest;
        const double cost = cost_of(k, parts, blocks);
        if (cost < best->cost) *best = (cut){.parts = parts, .blocks = blocks, .cost = cost};
    }
}

/* Bytes of shared memory of a block besides its dynamic ones, including the driver's. */
static int other_smem(const fa_variant *v) { return fa_cuda_static_smem(v) + 1024; }

/* The number of blocks that fit on a multiprocessor. */
static int count_fitting(const fa_cuda_device *device, const fa_variant *v)
{
    const int fitting = device->smem_per_sm / (count_smem(v) + other_smem(v));
    if ((is_8bit(v) || v->copied) && fitting > v->blocks)
        return v->blocks; /* the registers' limit */
    return fitting < 1 ? 1 : fitting;
}

/* The number of stages of decode_sm90 that fit with this many blocks on a multiprocessor. */
static int count_stages(const fa_cuda_device *device, const fa_variant *v, int blocks)
{
    const int share = device->smem_per_sm / blocks - 1024;
    const int room = share < device->smem_per_block ? share : device->smem_per_block;
    const int others = fa_cuda_decode_sm90_smem(v, 0) + fa_cuda_static_smem(v);
    const int stages = (room - others) / FA_DECODE_SM90_STAGE_ROOM(v->cache);
    const int most = stages < FA_DECODE_SM90_STAGES ? stages : FA_DECODE_SM90_STAGES;
    const int a_tile = is_8bit(v) ? v->head_dim / 128 : 1; /* neighbours in the ring */
    return most - most % a_tile;
}

/* The dynamic shared memory with which exactly this many blocks fit on a multiprocessor. */
static uint32_t smem_for(const fa_cuda_device *device, const fa_variant *v, int blocks)
{
    if (is_persistent(v)) return (uint32_t)count_smem(v);
    if (is_sm90(v)) return (uint32_t)fa_cuda_decode_sm90_smem(v, count_stages(device, v, blocks));
    if (blocks == count_fitting(device, v)) return (uint32_t)count_smem(v);
    return (uint32_t)(device->smem_per_sm / (blocks + 1) + 1024 - other_smem(v));
}

/* The number of stages to use. Two blocks with many key tiles use fewer stages than fit: with more than
 * 128 KiB in flight to each multiprocessor memory is slower (H100, 64 sequences of 8k keys: 3,104 GB/s
 * with 4 stages a block, 3,063 with 6; measured only at head dim 128). A short block requests all its
 * tiles at once. */
static int choose_stages(const fa_cuda_device *device, const fa_variant *v, int blocks,
                         int64_t keys)
{
    enum { STEADY_STAGES = 4, MANY_TILES = 16, MOST_STEADY_ROWS = 16 };
    if (is_persistent(v)) return v->stages;
    const int stages = count_stages(device, v, blocks);
    const bool steady = v->head_dim <= 128 && !is_8bit(v) && blocks == 2 &&
                        (v->group_rows <= MOST_STEADY_ROWS ||
                         (v->head_dim == 128 && keys >= (int64_t)MANY_TILES * v->keys));
    return steady && stages > STEADY_STAGES ? STEADY_STAGES : stages;
}

static int64_t at_least_one(int64_t x) { return x < 1 ? 1 : x; }

/* The smallest number of keys of a part. */
static int64_t least_keys(const fa_problem *p, const fa_variant *v)
{
    if (p->batch_invariant) return INVARIANT_KEYS;
    return is_latent_sm90(v) ? LEAST_KEYS_LATENT : LEAST_KEYS;
}

/* So many parts are merged at once (SOURCES in kernels/decode_sm90/merge_parts.cuh), four columns a thread. Meanwhile, in
 * some 0.3 us, the device could read MERGE_BYTES. */
enum { FEW_PARTS = 16, MERGE_BYTES = 1300 << 10 };

/* For decode_sm90: so many blocks, each alone on its multiprocessor, read at the full rate of memory: a pair of neighbouring
 * multiprocessors gets at most 76 GB/s (4 sequences of 26,664 keys, 2 heads of 128: 104 blocks 34.2 us, 128 30.6). */
enum { FULL_RATE_BLOCKS = 122, FULL_RATE_BLOCKS_WIDE = 60, WIDE = 256 };

/* Whether few parts may have as little as a key tile: those of decode_sm90 in 16 bits, if there are few blocks. */
static bool has_short_parts(const fa_problem *p, const fa_variant *v, int64_t tasks,
                            const fa_cuda_device *device)
{
    return !p->batch_invariant && is_sm90(v) && !is_latent_sm90(v) && !is_8bit(v) &&
           !is_persistent(v) && tasks <= 2 * device->multiprocessors;
}

/* The most parts that some keys suffice for. Each part adds to the work of merging, but a key tile takes its block a
 * microsecond. So few parts may have a key tile each (H200, us: 512 keys, 8 key/value heads of 128 columns with 2, 4 and 8 parts 7.8, 6.4,
 * 6.0; 907 keys, 8 of 128 with 3, 5 and 8 parts 9.3, 8.1, 7.1; 6,924 keys, one of 64 with 19, 28 and 55 parts 8.7, 8.0, 9.2;
 * 4,096 keys, 2 of 256 with 16 and 32 parts 16.8, 18.0). */
static int64_t most_parts(const fa_problem *p, const fa_variant *v, int64_t keys, int64_t tasks,
                          const fa_cuda_device *device)
{
    if (!has_short_parts(p, v, tasks, device)) return keys / least_keys(p, v);
    const int64_t tiles = fa_cuda_count_tiles(keys, block_keys(v)),
                  many = fa_cuda_count_tiles(keys, LEAST_KEYS);
    const int64_t few = tiles < FEW_PARTS ? tiles : FEW_PARTS;
    return many > few ? many : few;
}

/* The fewest keys of a part for the device, which knows lengths that the host does not. */
static int64_t least_of_parts(const fa_problem *p, const fa_variant *v, int64_t tasks,
                              int64_t parts, const fa_cuda_device *device)
{
    const bool shorter = has_short_parts(p, v, tasks, device) && parts <= FEW_PARTS;
    return shorter ? block_keys(v) : least_keys(p, v);
}

/* Cuts for persistent blocks. The last group of a work tile merges its parts, because a second launch
 * would wait for all of them. If there are more work tiles than counters, each has one part. */
static cut find_persistent_cut(const fa_problem *p, const fa_cuda_plan_launch *l, int64_t tasks)
{
    const int64_t keys = count_keys(p, l), groups = fa_variants[l->variant].groups;
    const int64_t wanted =
        fa_cuda_count_tiles(PARTS_OF_GROUP * groups * l->decode.blocks, at_least_one(tasks));
    const int64_t fewest = fa_cuda_count_tiles(keys, MOST_KEYS);
    if (l->tasks > FA_DECODE_SM90_COUNTERS) return (cut){.parts = 1, .blocks = 1};
    return (cut){.parts = clamp_parts(wanted > fewest ? wanted : fewest, keys / LEAST_KEYS),
                 .blocks = 1};
}

/* Whether the launch that only merges needs no shared memory, and may have several blocks for a work tile. */
static bool merges_in_turns(const fa_variant *v) { return is_sm90(v) && !is_persistent(v); }

/* How often a block of decode_sm90 needs all its threads to merge a work tile: a thread merges four columns of a row. */
static int64_t count_merge_turns(const fa_cuda_plan_launch *l)
{
    const int64_t rows = (int64_t)l->decode.heads * l->decode.queries;
    const fa_variant *v = &fa_variants[l->variant];
    return fa_cuda_count_tiles(rows * v->head_dim / 4, FA_DECODE_SM90_THREADS(v->copied));
}

/* Whether a second launch merges the parts of decode_sm90, with as many blocks for a work tile as a single one has turns. That
 * is faster if there is more than one turn (H200, us, merged by the last block and apart: 8k keys, 8 key/value heads of 128 columns
 * with 4, 8 and 32 rows 12.8 and 12.8, 14.6 and 12.9, 26.0 and 19.4; 16k keys, 2 heads of 256, 32 rows 46.0 and 20.5). */
static bool merges_apart(const fa_variant *v, const fa_cuda_plan_launch *l, int64_t parts)
{
    return merges_in_turns(v) && parts > 1 && count_merge_turns(l) > 1;
}

/* Up to so many work tiles of decode_sm90 have their keys cut for one round of blocks. */
enum { MOST_FEW_TASKS = 16 };

/* Blocks on a multiprocessor otherwise, and with many rows. */
enum { BLOCKS_TOGETHER = 2 };

static bool has_many_rows(const fa_variant *v) { return v->group_rows > 8; }

/* ns of a key tile, for a block of decode_sm90 that has two neighbouring multiprocessors for itself (H200), beside few
 * others. */
static double tile_ns_alone(const fa_variant *v)
{
    const bool many_rows = has_many_rows(v);
    const double of_int8 = 1.5; /* by instructions, not measured */
    if (is_8bit(v)) {
        const double ns = v->head_dim > 128 ? 1330.0 : many_rows ? 1000.0 : 880.0;
        return v->cache == FA_ELEMENT_INT8 ? of_int8 * ns : ns;
    }
    if (v->head_dim <= 64) return many_rows ? 1130.0 : 700.0;
    if (v->head_dim <= 128) return many_rows ? 910.0 : 610.0;
    return many_rows ? 1120.0 : 870.0;
}

/* Bytes of an H200's memory in a ns, for the whole device and for each pair of multiprocessors: they share a way to the L2 cache. */
static const double device_rate = 4700.0, pair_rate = 76.0;

/*
 * The time of some parts of many work tiles by decode_sm90, in ns, with two blocks on a multiprocessor. Full rounds of blocks read
 * at the rate of memory. In the only round, blocks are spread over pairs of multiprocessors, then over multiprocessors, and a pair
 * with more blocks than the others determines the time. In a last round, the fewer blocks are left, the faster each of them is. With 21 numbers
 * of work tiles (20 to 520), six kernels and three numbers of keys on an H200, the parts that this chooses take 1.016 times as long as the
 * best of up to 15 others in the geometric mean (8 bits: 1.027); the rule before it 1.106 (1.062), and up to 1.65.
 */
static double rounds_ns(const keys_to_cut *k, const fa_variant *v, int64_t parts)
{
    enum {
        ROUND_NS = 2000,
        ROUND_NS_MANY_ROWS = 5000,
        LAUNCH_NS = 2000,
        LAST_BLOCK_NS = 800,
        TURN_NS = 500,
        SUMS_NS = 1000
    };
    const double loaded = 0.2;   /* more time for a tile, where each multiprocessor has a block, */
    const double together = 0.3; /* and where each has two, if memory is not the limit */
    const int64_t multiprocessors = k->multiprocessors, room = BLOCKS_TOGETHER * multiprocessors;
    const int64_t blocks = k->tasks * parts, full = blocks / room, left = blocks % room;
    const int64_t tiles = fa_cuda_count_tiles(fa_cuda_count_tiles(k->keys, v->keys), parts);
    const double bytes = (double)k->key_bytes * v->keys, alone = tile_ns_alone(v);
    const double of_full = fmax((double)room * bytes / device_rate, alone * (1.0 + together));
    const bool many_rows = has_many_rows(v);
    const double share = (double)left / (double)room;
    double of_left = 0.0;
    if (left > 0 && full > 0) {
        of_left = alone + (of_full - alone) * share;
    } else if (left > 0) {
        const int of_pair = 2 * left <= multiprocessors ? 1 : left <= multiprocessors ? 2 : 4;
        const double of_one = alone * (1.0 + loaded * fmin(1.0, 2.0 * share));
        of_left = fmax(fmax(of_one, of_full * share), of_pair * bytes / pair_rate);
    }
    double ns = (double)tiles * ((double)full * of_full + of_left);
    ns += (double)((full + (left > 0)) * (many_rows ? ROUND_NS_MANY_ROWS : ROUND_NS));
    if (parts == 1) return ns;
    ns += (double)(k->merge_turns > 1 ? LAUNCH_NS : LAST_BLOCK_NS);
    ns += (double)(TURN_NS * fa_cuda_count_tiles(parts, FEW_PARTS));
    if (many_rows) ns += (double)(SUMS_NS * blocks) / (double)room;
    return ns;
}

/* Leaves whole rounds of work tiles whole and cuts only those of the last round, so that they fill it, if they are 0.05 to 0.45
 * of one: with more it is full enough, and merging costs more than it gains (H200, 16 bits, eight rows, us, all work tiles alike and
 * the last ones in parts: 40 sequences of 4,096 keys, 8 heads of 128, 163, 154; 36 of 3,000 116, 108; 70 of 900, 4 heads, 46.6, 40.0;
 * 75 of 1,500, 8 heads of 256, 231, 216; 77 of 23k, 8 heads of 64, 855, 813; 55 of 1,083, two thirds of a round, 67.9, 68.7;
 * 100 of 3,000, 0.03 of a round, 277, 284). */
static void try_whole_rounds(const keys_to_cut *k, const fa_variant *v, cut *best)
{
    enum { MOST_WHOLE_ROUNDS = 3, MOST_LAST_PARTS = 8 };
    const int64_t room = (int64_t)BLOCKS_TOGETHER * k->multiprocessors, rounds = k->tasks / room,
                  left = k->tasks % room,
                  most = k->most < MOST_LAST_PARTS ? k->most : MOST_LAST_PARTS;
    if (is_8bit(v) || has_many_rows(v) || rounds < 1 || rounds > MOST_WHOLE_ROUNDS) return;
    if (20 * left < room || 100 * left > 45 * room) return;
    const int64_t filling = (21 * room + 10 * left) / (20 * left),
                  parts = clamp_parts(filling, most);
    if (parts > 1) best->parts = parts, best->whole = rounds * room;
}

/* Cuts for many work tiles of decode_sm90: parts whose blocks just fill a block for each pair of multiprocessors, for each of them,
 * or some rounds with two. fewest: blocks for each two multiprocessors that are tried. */
static cut find_cut_of_rounds(const keys_to_cut *k, const fa_variant *v, int fewest)
{
    static const int wanted[] = {0, 1, 2, 4, 8, 12, 16, 20, 24};
    cut best = {.parts = 1, .blocks = BLOCKS_TOGETHER, .cost = INFINITY};
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        if (wanted[i] < fewest) continue;
        const int64_t fitting = clamp_parts(wanted[i] * k->multiprocessors / 2 / k->tasks, k->most);
        const int64_t parts = fitting > k->fewest ? fitting : k->fewest;
        const double ns = rounds_ns(k, v, parts);
        if (ns < best.cost) best = (cut){.parts = parts, .blocks = BLOCKS_TOGETHER, .cost = ns};
    }
    if (k->in_order && k->fewest == 1) try_whole_rounds(k, v, &best);
    return best;
}

/* Cuts for one round of blocks with many rows, two on a multiprocessor: a block alone takes longer for a key tile than memory
 * does. False if there are too few keys (H200, us, 128 and 256 blocks: 4 sequences of 8k keys, 8 key/value heads of 128 columns with
 * 32 rows each 44.1 and 39.0; of 16k keys, 64 columns, 16 rows 44.8 and 37.7; 2 of 4k keys, 4 heads of 256 columns, 32 rows 19.2 and 18.6). */
static bool find_cut_of_many_rows(const keys_to_cut *k, const fa_variant *v, cut *found)
{
    enum { LEAST_ROWS = 32, LEAST_TILES = 2 };
    const int64_t parts = clamp_parts(BLOCKS_TOGETHER * k->multiprocessors / k->tasks, k->most);
    if (v->group_rows < LEAST_ROWS || k->keys < LEAST_TILES * parts * v->keys) return false;
    *found = (cut){.parts = parts, .blocks = BLOCKS_TOGETHER};
    return true;
}

/* Cuts for one round: the time is that of a block or of the device, whichever reads longer, and that of the blocks that merge.
 * With few rows, two rounds, or two blocks on a multiprocessor, were never faster (H200, 19 shapes with up to 128 parts; us: 8
 * query heads and 2 key/value heads of 256 columns, 18k keys in 16, 32, 66 and 71 parts 22.7, 17.8, 19.2, 24.4; 8 and one of
 * 128, 32k keys in 32, 64 and 128 parts 18.7, 15.9, 18.9). Above FEW_PARTS, multiples of it are merged fastest. Of equal ones,
 * most parts are best. */
static cut find_cut_of_one_round(const keys_to_cut *k, const fa_variant *v)
{
    enum { FEW_BLOCKS_OF_ROUND = 80 };
    const double short_part = 300e3; /* bytes */
    const int64_t most = clamp_parts(k->multiprocessors / k->tasks, k->most);
    const int64_t alone = v->head_dim >= WIDE ? FULL_RATE_BLOCKS_WIDE : FULL_RATE_BLOCKS;
    cut best = {.parts = 1, .blocks = 1, .cost = INFINITY};
    if (find_cut_of_many_rows(k, v, &best)) return best;
    for (int64_t parts = k->fewest < most ? k->fewest : most; parts <= most; parts++) {
        if (parts > FEW_PARTS && parts % FEW_PARTS != 0 && parts < most) continue;
        const int64_t blocks = k->tasks * parts < alone ? alone : k->tasks * parts;
        const int64_t merges = parts > 1 ? fa_cuda_count_tiles(parts, FEW_PARTS) : 0;
        const double bytes = (double)k->keys / (double)parts * (double)k->key_bytes;
        const double cost = (double)blocks * bytes + (double)(merges * MERGE_BYTES);
        if (cost <= best.cost) best = (cut){.parts = parts, .blocks = 1, .cost = cost};
    }
    /* With room for two, a block has fewer stages (H200, 100 shapes, the same cuts: 81 to 132 blocks 0.88 to 0.99 of the time, most
     * with many tiles; fewer blocks the same). A short part is nearly all in flight at once, if all stages are there (one sequence
     * of 8k, 32/8 heads of 128: 12 stages 12.4 to 13.0 us, four 13.5). */
    const double bytes = (double)k->keys / (double)best.parts * (double)k->key_bytes;
    if (!has_many_rows(v) && !is_8bit(v) && !v->copied && bytes > short_part &&
        k->tasks * best.parts > FEW_BLOCKS_OF_ROUND)
        best.blocks = BLOCKS_TOGETHER, best.timed = true;
    return best;
}

/* Rows of the work tiles whose cuts have been timed, and rounds of them. */
enum { MOST_TIMED_ROWS = 16, MOST_TIMED_ROUNDS = 2 };

/* So many blocks for each two multiprocessors: sequences are likely to have different lengths. */
enum { LENGTHS_DIFFER = 4 };

/* The fewest blocks for each two multiprocessors that are tried if lengths are unknown: a single block could have all keys of the
 * longest sequence. But sequences are likely to have equally many keys in reach if a window hides at least half of the longest
 * one's. (H200, pages of 16, us, in two parts, not cut: 16 sequences of 8 queries, window 1,024, 16 heads of 8, 256 columns, 57,
 * 45; without a window, 1,024 keys, 16 of 4, 32 of 8, 128 columns, 31, 26; but 500 to 2,000 keys 40, 43, and 1,000 to 8,000 of one
 * query each 79, 114.) */
static int find_fewest_blocks(const fa_problem *p, int64_t keys)
{
    if (p->batch <= 1 || !fa_cuda_has_own_lengths(p)) return 0;
    return 2 * keys <= p->n_k ? 2 : LENGTHS_DIFFER;
}

/* Whether the cut is that of the model in plan_decode_time.c. */
static bool has_timed_cut(const fa_variant *v)
{
    return is_sm90(v) && !is_persistent(v) && !is_8bit(v) && v->group_rows <= MOST_TIMED_ROWS;
}

/* Whether nearly every multiprocessor has one block with wide heads: then each should be alone. Of the next grid some multiprocessors
 * would get two, because its blocks start early (H200, us, head dim 256, 128 blocks, alone and with room for two: 64 work tiles of 95 key tiles
 * 94, 103, of 178 170, 178; but 96 of 9 20.4, 18.1, 112 of 48 91, 82; head dim 128, 128 of 128 123, 122). */
static bool has_nearly_one_each(const keys_to_cut *k, const fa_variant *v, int64_t parts)
{
    const int64_t blocks = k->tasks * parts, m = k->multiprocessors;
    return v->head_dim >= WIDE && blocks <= m && 10 * blocks >= 9 * m;
}

/* Cuts by the model of the time, where all work tiles have equally many keys. */
static cut find_timed_cut(const keys_to_cut *k, const fa_variant *v)
{
    const fa_decode_keys keys = {.tasks = k->tasks,
                                 .tiles = at_least_one(fa_cuda_count_tiles(k->keys, v->keys)),
                                 .tile_bytes = (double)(k->key_bytes * v->keys),
                                 .rows = v->group_rows,
                                 .head_dim = v->head_dim,
                                 .multiprocessors = k->multiprocessors};
    const int64_t most = clamp_parts(k->most, INT64_MAX);
    fa_decode_cut best = fa_cuda_find_decode_cut(&keys, most, k->in_order && k->fewest == 1);
    int64_t parts = fa_cuda_count_tiles(keys.tiles, best.length);
    if (parts < k->fewest) parts = k->fewest, best.length = fa_cuda_count_tiles(keys.tiles, parts);
    return (cut){.parts = parts,
                 .blocks = BLOCKS_TOGETHER,
                 .cost = best.us,
                 .whole = best.whole,
                 .length = parts > 1 ? best.length : 0,
                 .timed = !has_nearly_one_each(k, v, parts),
                 .alone = best.alone && parts == 1};
}

/* The same where only the device knows the lengths, for so many keys that it matters: parts as long as fill 0.72 of a round of blocks, if
 * sequences have half of the longest one's keys on average. They have this length in shorter sequences, too: then all blocks take
 * equally long, and none waits for another one's end. But few work tiles have parts of at most MOST_TILES key tiles, because no
 * sequence may be nearly as long as what was promised. (H200, pages, us: the parts before, which are shorter in shorter sequences, these
 * with one key tile at least, with half of the length, with all of it: 60 work tiles of up to 97 key tiles, 16 rows, 49.0, 41.9, 43.9, 36.1;
 * 64 of 43, 27.8, 25.9, 22.5, 21.6; 264 of 102, 124, 113, 108, 104; 192 of 31, 34.0, 34.7, 33.3, 29.0; 12 of 302, 25.9, 27.2, 25.9, 22.2;
 * but 27 of 14, 11.2, 13.0; 72 of 5 10.9, 11.5. Blocks that count the key tiles of all sequences, and have parts by these, find their
 * work 2 us later, and the launch that merges as well: 23.5, 37.7, 102, 33.2, 25.3.) */
static bool find_cut_of_lengths(const keys_to_cut *k, const fa_variant *v, cut *found)
{
    enum { LEAST_BYTES = 75 << 20, ROUND_PERCENT = 288, MOST_TILES = 16, MANY_TASKS = 120 };
    const int64_t tiles = at_least_one(fa_cuda_count_tiles(k->keys, v->keys));
    if ((double)(k->tasks * k->keys) * (double)k->key_bytes < LEAST_BYTES) return false;
    int64_t length = k->tasks * tiles / (ROUND_PERCENT * k->multiprocessors / 100) + 1;
    int64_t parts = fa_cuda_count_tiles(tiles, length);
    if (parts > FEW_PARTS) parts = (parts + FEW_PARTS / 2) / FEW_PARTS * FEW_PARTS;
    parts = clamp_parts(parts, k->most);
    if (parts < k->fewest) parts = k->fewest;
    length = fa_cuda_count_tiles(tiles, parts);
    if (k->tasks < MANY_TASKS && length > MOST_TILES) length = MOST_TILES;
    *found = (cut){
        .parts = parts, .blocks = BLOCKS_TOGETHER, .length = parts > 1 ? length : 0, .timed = true};
    return true;
}

/* tasks: work tiles that count. If keys are not in pages, two blocks on a multiprocessor have enough bytes in flight; if three
 * would fit, fewer and larger blocks may fit better into rounds. */
static cut find_cut(const fa_problem *p, const fa_cuda_device *device, const fa_variant *v,
                    const fa_cuda_plan_launch *l, int64_t tasks)
{
    if (is_persistent(v)) return find_persistent_cut(p, l, tasks);
    const int fitting = count_fitting(device, v);
    const int64_t size = is_8bit(v) ? 1 : 2;
    const size_t rows = (size_t)l->decode.heads * (size_t)l->decode.queries;
    keys_to_cut k = {.tasks = tasks,
                     .keys = count_keys(p, l),
                     .most = most_parts(p, v, count_keys(p, l), tasks, device),
                     .fewest = 1,
                     .key_bytes = size * (p->d + (is_latent_kernel(v) ? 0 : p->d_v)),
                     .multiprocessors = device->multiprocessors,
                     .merge_turns = is_sm90(v) ? count_merge_turns(l) : 1,
                     .grows = is_sm90(v),
                     .in_order = tasks == l->tasks && (!p->cu_seqlens_q || l->decode.most_queries)};
    cut best = {.parts = 1, .blocks = fitting, .cost = INFINITY};
    if (p->batch_invariant)
        best.parts = clamp_parts(fa_cuda_count_tiles(p->n_k, INVARIANT_KEYS), INT64_MAX);
    if (p->batch_invariant || tasks == 0) return best;
    if (fa_cuda_has_own_lengths(p))
        k.fewest = clamp_parts(fa_cuda_count_tiles(k.keys, MOST_KEYS), k.most);
    if (is_sm90(v)) {
        const int fewest = find_fewest_blocks(p, k.keys);
        const bool is_timed = has_timed_cut(v) && tasks > MOST_FEW_TASKS &&
                              tasks <= MOST_TIMED_ROUNDS * BLOCKS_TOGETHER * k.multiprocessors;
        if (fewest == LENGTHS_DIFFER && has_timed_cut(v) && find_cut_of_lengths(&k, v, &best))
            return best;
        if (fewest < LENGTHS_DIFFER && is_timed) return find_timed_cut(&k, v);
        if (tasks > MOST_FEW_TASKS) return find_cut_of_rounds(&k, v, fewest);
        if (fewest == 0) return find_cut_of_one_round(&k, v);
    }
    if (is_sm90(v)) k.part_bytes = (int64_t)(2 * rows * row_floats(v) * sizeof(float));
    try_cuts(&k, fitting, &best);
    if (fitting == 3 && !p->block_table && !is_sm90(v)) try_cuts(&k, 2, &best);
    for (int blocks = fitting - 1; is_sm90(v) && blocks >= FEWEST_BLOCKS; blocks--)
        try_cuts(&k, blocks, &best);
    return best;
}

void fa_cuda_cut_decode(fa_cuda_plan_launch *l, int64_t whole, int64_t parts, int64_t least)
{
    const fa_variant *v = &fa_variants[l->variant];
    const size_t rows = (size_t)l->decode.heads * (size_t)l->decode.queries;
    l->decode.whole = (int32_t)whole;
    l->decode.parts = (int32_t)parts;
    l->decode.least = (int32_t)at_least_one(least / block_keys(v));
    l->grid = fa_cuda_grid(whole + (l->tasks - whole) * parts);
    if (l->decode.blocks > 0 && l->grid > (uint32_t)l->decode.blocks)
        l->grid = (uint32_t)l->decode.blocks;
    l->workspace_bytes = 0;
    if (parts > 1)
        l->workspace_bytes =
            (size_t)(l->tasks - whole) * (size_t)parts * rows * row_floats(v) * sizeof(float);
}

/* Whether rows of 8-bit elements are whole groups of 16 bytes. */
static bool has_whole_vectors(const fa_view *v, int64_t columns)
{
    const uint64_t bytes = (uint64_t)columns | (uint64_t)v->stride[0] | (uint64_t)v->stride[1] |
                           (uint64_t)v->stride[2] | (uintptr_t)v->data;
    return v->stride[3] == 1 && bytes % 16 == 0;
}

/* ---- The launch ------------------------------------------------------------------------------ */

void fa_cuda_set_decode_params(const fa_problem *p, const fa_cuda_plan_launch *l, int step,
                               int32_t counters, fa_decode_params *params)
{
    fa_cuda_set_params(p, l, &params->attention);
    if (has_8_bits(&p->k)) {
        if (has_whole_vectors(&p->k, p->d)) params->attention.k.vector = 16;
        if (has_whole_vectors(&p->v, p->d_v)) params->attention.v.vector = 16;
    }
    params->heads = l->decode.heads;
    params->queries = l->decode.queries;
    params->chunks = l->decode.chunks;
    params->whole = l->decode.whole;
    params->parts = l->decode.parts;
    params->least = l->decode.least;
    params->most_queries = l->decode.most_queries;
    params->step = step;
    params->counters = counters;
    params->sums = NULL;
    if (l->workspace_bytes > 0)
        params->sums = (float *)(void *)((char *)p->workspace + l->workspace_offset);
}

fa_decode_divisors fa_cuda_decode_divisors(const fa_problem *p, const fa_cuda_plan_launch *l)
{
    const int64_t units = p->heads_kv * l->decode.chunks;
    return (fa_decode_divisors){.tasks = fa_reciprocal_of(l->tasks - l->decode.whole),
                                .tiles = fa_reciprocal_of(l->tiles),
                                .units = fa_reciprocal_of(units),
                                .chunks = fa_reciprocal_of(l->decode.chunks),
                                .parts = fa_reciprocal_of(l->decode.parts),
                                .page_rows = fa_reciprocal_of(p->block_table ? p->rows_k : 1),
                                .units_of_batch = (int32_t)units,
                                .group = (int32_t)(p->heads_q / p->heads_kv)};
}

fa_cuda_plan_launch fa_cuda_decode_merge_launch(const fa_cuda_plan_launch *l)
{
    const fa_variant *v = &fa_variants[l->variant];
    fa_cuda_plan_launch merge = *l;
    if (is_persistent(v)) return merge;
    const int64_t turns = merges_in_turns(v) ? count_merge_turns(l) : 1;
    merge.grid = fa_cuda_grid(l->decode.whole + (l->tasks - l->decode.whole) * turns);
    if (merges_in_turns(v)) merge.smem_bytes = 0;
    return merge;
}

static bool queue_step(void *kernel, const fa_cuda_plan *plan, const fa_cuda_plan_launch *l,
                       const fa_cuda_call *call, void *more, int step, int32_t counters,
                       fa_cuda_fault *fault)
{
    fa_decode_params params;
    const fa_cuda_plan_launch now = step == FA_DECODE_MERGE ? fa_cuda_decode_merge_launch(l) : *l;
    fa_cuda_set_decode_params(call->problem, l, step, counters, &params);
    return fa_cuda_queue(kernel, plan, &now, call->stream, (void *[]){&params, more}, fault);
}

/* Sets of counters of a kernel, and how many a set has. */
static int32_t count_sets(const fa_variant *v)
{
    return is_persistent(v) ? FA_DECODE_SM90_COUNTER_SETS : FA_DECODE_COUNTER_SETS;
}
static int64_t most_counted(const fa_variant *v)
{
    return is_persistent(v) ? FA_DECODE_SM90_COUNTERS : FA_DECODE_COUNTERS;
}

/* One launch if the last block of each work tile merges its parts, for which there must be counters.
 * Otherwise a second launch merges them, with the same result. Persistent blocks also take parts by a
 * counter; without one their schedule is static. */
bool fa_cuda_queue_decode(void *kernel, const fa_cuda_plan *plan, const fa_cuda_plan_launch *l,
                          const fa_cuda_call *call, void *more, fa_cuda_fault *fault)
{
    const fa_variant *v = &fa_variants[l->variant];
    const bool merges = l->decode.parts > 1;
    fa_cuda_counter counters = {-1, NULL};
    if (!merges && !is_persistent(v))
        return queue_step(kernel, plan, l, call, more, FA_DECODE_LAST, 0, fault);
    if (!l->decode.merges_apart && (!merges || l->tasks - l->decode.whole <= most_counted(v)))
        counters = fa_cuda_counter_take(call->stream, FA_SM90_COUNTERS);
    const bool counted = counters.number >= 0 && counters.number < count_sets(v);
    const int32_t set = counted ? counters.number : -1;
    const bool fine =
        counted || !merges
            ? queue_step(kernel, plan, l, call, more, FA_DECODE_LAST, set, fault)
            : queue_step(kernel, plan, l, call, more, FA_DECODE_STORE, set, fault) &&
                  queue_step(kernel, plan, l, call, more, FA_DECODE_MERGE, set, fault);
    fa_cuda_counter_release(counters, call->stream);
    return fine;
}

static bool queue_decode(void *kernel, const fa_cuda_plan *plan, const fa_cuda_plan_launch *l,
                         const fa_cuda_call *call, fa_cuda_fault *fault)
{
    return fa_cuda_queue_decode(kernel, plan, l, call, NULL, fault);
}

/* ---- The plan -------------------------------------------------------------------------------- */

bool fa_cuda_has_small_pages(const fa_problem *p)
{
    enum { LEAST_PAGE = 16 };
    return p->block_table && (p->rows_k % 8 || p->rows_k < LEAST_PAGE);
}

bool fa_cuda_has_copied_columns(const fa_problem *p) { return p->d % 8 == 0 && p->d_v % 8 == 0; }

/* With 8 rows of up to 128 columns, four warps that copy are also faster than TMA with pages of fewer than 32 rows; with larger ones
 * if there are few work tiles (H200, us, by TMA and copied; 8 key/value heads of 128: one sequence of 454 keys, pages of 64, 9.5, 7.7;
 * of 30k 38.0, 36.2; 16 sequences of 479 to 19k, pages of 16, 209.7, 210.9, of 32, 198.1, 208.4; with 32 rows, 8 sequences of 2k to 4k,
 * pages of 16, 36.7, 38.7; head dim 256, 8 rows, 58.2, 59.5). */
bool fa_cuda_copies_keys(const fa_problem *p)
{
    enum { MOST_ROWS = 8, MOST_COLUMNS = 128, LARGE_PAGE = 32, FEW_TILES = 16 };
    if (fa_cuda_has_small_pages(p)) return true;
    if (!p->block_table || !fa_cuda_has_copied_columns(p) || fa_cuda_has_8bit_cache(p))
        return false;
    return p->d <= MOST_COLUMNS && p->d_v <= MOST_COLUMNS &&
           fa_cuda_count_decode_rows(p) <= MOST_ROWS &&
           (p->rows_k < LARGE_PAGE || (!p->batch_invariant && p->batch * p->heads_kv <= FEW_TILES));
}

/* Whether few short sequences have few tiles of 128 keys: then tiles of 64 keys are faster, also where a quarter of their columns is empty
 * (H200, us, head dim 192, 560 keys, 8 key/value heads, 6.3, here 7.3; 8 rows, 592 keys, 7.4 and 7.2; 983 keys 8.3, 7.4). */
static bool has_few_tiles(const fa_problem *p)
{
    enum { FEW_KEYS = 576, FEW_ROWS = 8 };
    return !p->batch_invariant && p->n_k < FEW_KEYS && p->batch * p->heads_kv <= MOST_FEW_TASKS &&
           fa_cuda_count_decode_rows(p) <= FEW_ROWS;
}

/* Whether packed sequences have few rows on average, but the longest one has more than a work tile of so many: its keys would be read more
 * often than with 32. */
static bool has_longer_sequences(const fa_problem *p, int64_t rows)
{
    return p->cu_seqlens_q && !p->batch_invariant && p->max_q * group_size(p) > rows;
}

/* copied: of fa_cuda_copies_keys. */
static bool takes(const fa_variant *v, const fa_problem *p, int64_t dim, bool copied)
{
    const bool fits = has_8_bits(&p->k) ? v->cache == (fa_element)p->k.dtype
                                        : !is_8bit(v) && v->element == (fa_element)p->q.dtype;
    if (is_sm90(v) && v->copied != copied) return false;
    if (is_sm90(v) && v->head_dim == 192 && has_few_tiles(p)) return false;
    if (is_sm90(v) && !is_8bit(v) && v->group_rows == 16 && has_longer_sequences(p, 16))
        return false;
    return v->head_dim >= dim && fits && is_latent_kernel(v) == fa_cuda_is_latent(p) &&
           (v->options == FA_DECODE_BY_ROWS || !has_row_options(p));
}

/* Among the narrowest variants of a family that are wide enough, the first with room for this many rows,
 * or the last. first, end: the family's ids. */
static const fa_variant *find_in_family(const fa_problem *p, int64_t rows, int first, int end)
{
    const int64_t dim = p->d > p->d_v ? p->d : p->d_v;
    const bool copied = fa_cuda_copies_keys(p);
    const fa_variant *found = NULL;
    for (int i = first; i < end; i++) {
        const fa_variant *v = &fa_variants[i];
        if (!takes(v, p, dim, copied)) continue;
        if (found && (v->head_dim > found->head_dim || rows <= found->group_rows)) break;
        found = v;
    }
    return found;
}

static const fa_variant *find_variant(const fa_problem *p, int64_t rows)
{
    return find_in_family(p, rows, FA_FIRST_decode_sm80, FA_END_decode_sm80);
}

int64_t fa_cuda_count_decode_rows(const fa_problem *p) { return group_size(p) * count_queries(p); }

const fa_variant *fa_cuda_find_decode_sm90(const fa_problem *p)
{
    return find_in_family(p, fa_cuda_count_decode_rows(p), FA_FIRST_decode_sm90,
                          FA_END_decode_sm90);
}

bool fa_cuda_refuse_decode(const fa_problem *p, int64_t most_rows, char *why, size_t size)
{
    return refuse_dtypes(p, why, size) || fa_cuda_refuse_options(p, why, size) ||
           refuse_options(p, why, size) || fa_cuda_refuse_rows(p, max_rows, why, size) ||
           refuse_queries(p, most_rows, why, size);
}

static const char *arithmetic_of(const fa_variant *v)
{
    if (is_8bit(v)) return FA_DECODE_ARITHMETIC_8BIT;
    return v->element == FA_ELEMENT_BFLOAT16 ? "bfloat16 products (mma.sync), float32 sums"
                                             : "float16 products (mma.sync), float32 sums";
}

/* Cuts the keys of the plan's last launch. tasks: work tiles that count. */
static bool cut_keys(const fa_problem *p, const fa_variant *v, const fa_cuda_device *device,
                     int64_t tasks, fa_cuda_plan *plan, char *why, size_t size)
{
    fa_cuda_plan_launch *l = &plan->launches[plan->count - 1];
    const cut found = find_cut(p, device, v, l, tasks);
    if (l->tasks > INT32_MAX / found.parts) {
        fa_cuda_say(why, size, "there are %" PRId64 " work tiles", l->tasks);
        return false;
    }
    int blocks = found.blocks;
    l->decode.merges_apart = merges_apart(v, l, found.parts);
    l->decode.alone = found.alone;
    if (is_sm90(v)) { /* fewer blocks have more stages each */
        const int64_t needed =
            fa_cuda_count_tiles(at_least_one(tasks * found.parts), device->multiprocessors);
        if (needed < blocks && !found.timed) blocks = (int)needed;
        const int64_t longest = count_keys(p, l) / (found.whole > 0 ? 1 : found.parts);
        l->decode.stages = choose_stages(device, v, blocks, longest);
    }
    l->smem_bytes = smem_for(device, v, blocks);
    fa_cuda_cut_decode(l, found.whole, found.parts,
                       found.length > 0 ? found.length * block_keys(v)
                                        : least_of_parts(p, v, tasks, found.parts, device));
    plan->workspace_bytes = l->workspace_bytes;
    return true;
}

bool fa_cuda_add_decode(const fa_problem *p, const fa_variant *v, int threads,
                        fa_cuda_queue_function *queue, const fa_cuda_device *device,
                        fa_cuda_plan *plan, char *why, size_t size)
{
    fa_cuda_plan_launch *l =
        fa_cuda_plan_add(v, threads, count_smem(v), queue, device, plan, why, size);
    if (!l) return false;
    l->tile_k = (int)block_keys(v);
    set_rows(p, v, l);
    set_tasks(p, v, l);
    return cut_keys(p, v, device, l->tasks, plan, why, size);
}

bool fa_cuda_add_few_by(const fa_problem *p, const fa_variant *v, int threads, int32_t blocks,
                        fa_cuda_queue_function *queue, const fa_cuda_device *device,
                        fa_cuda_plan *plan, char *why, size_t size)
{
    const int64_t most = fa_cuda_most_few(p);
    fa_cuda_plan_launch *l =
        fa_cuda_plan_add(v, threads, count_smem(v), queue, device, plan, why, size);
    if (!l) return false;
    l->tile_k = (int)block_keys(v);
    set_rows(p, v, l);
    l->decode.blocks = blocks;
    if (l->decode.queries > most) l->decode.queries = (int32_t)most;
    l->decode.most_queries = (int32_t)most;
    l->tile_q = l->decode.queries;
    const int64_t tiles = fa_cuda_count_tiles(most, l->decode.queries);
    const int64_t sequences = p->batch * p->heads_kv * l->decode.chunks;
    fa_cuda_set_tasks(l, tiles, tiles * sequences);
    return cut_keys(p, v, device, sequences, plan, why, size);
}

bool fa_cuda_add_few(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                     char *why, size_t size)
{
    const fa_variant *v = find_variant(p, group_size(p));
    plan->arithmetic = arithmetic_of(v);
    return fa_cuda_add_few_by(p, v, FA_DECODE_THREADS(v->warps), 0, queue_decode, device, plan, why,
                              size);
}

bool fa_cuda_plan_decode(const fa_problem *p, const fa_cuda_device *device, int64_t most_rows,
                         fa_cuda_plan *plan, char *why, size_t size)
{
    if (fa_cuda_refuse_decode(p, most_rows, why, size)) return false;
    const fa_variant *v = find_variant(p, fa_cuda_count_decode_rows(p));
    plan->arithmetic = arithmetic_of(v);
    return fa_cuda_add_decode(p, v, FA_DECODE_THREADS(v->warps), queue_decode, device, plan, why,
                              size);
}

/* If each query head has its own keys and there are enough heads for the whole device, forward_sm90 also
 * reads keys once. It is faster because it has no parts to merge (16 x 32 heads of 8,192 keys on an
 * H200: 4,248 GB/s, here 4,227). Pages are read faster here. */
static bool is_slower_than_sm90(const fa_problem *p, const fa_cuda_device *device)
{
    fa_cuda_plan other;
    if (fa_cuda_architecture(device) != 90 || group_size(p) > 1 || p->block_table ||
        p->batch_invariant || has_row_options(p) ||
        p->batch * p->heads_q < FORWARD_ROUNDS * (int64_t)device->multiprocessors)
        return false;
    fa_cuda_plan_begin(device, &fa_cuda_forward_sm90, &other);
    return fa_cuda_forward_sm90.plan(p, device, &other, NULL, 0);
}

static int64_t most_rows(const fa_problem *p)
{
    return p->pass == FA_PASS_DECODE ? MOST_DECODE_ROWS : MOST_FORWARD_ROWS;
}

/* With fewer keys decode_sm90 leaves more rows than MOST_FORWARD_ROWS to other kernels. */
enum { LEAST_N_K_OF_MANY_ROWS = 512 };

/* Beside these, decode_sm90 may be faster with more rows: if the host knows all lengths, the models of the time tell. Otherwise with few
 * work tiles of many keys, in two work tiles that read the same keys: its parts are smaller than those of forward_sm90_split (H200, us:
 * 7k keys, 2 sequences of 4 key/value heads with 56 rows 22.3 and 19.0; 550 keys, 4 of 8 heads with 56 rows 12.7, here 16.3). */
int64_t fa_cuda_most_decode_sm90_rows(const fa_problem *p, const fa_cuda_device *device)
{
    enum { ROWS = 64, LONG = 2048, LEAST_PARTS = 4 };
    const int64_t m = device->multiprocessors;
    if (p->pass != FA_PASS_FORWARD || p->batch_invariant || p->cu_seqlens_q) return most_rows(p);
    if (!fa_cuda_has_own_lengths(p)) return MOST_DECODE_ROWS;
    const bool is_short =
        p->n_k < LEAST_N_K_OF_MANY_ROWS || (p->n_k < LONG && 2 * p->batch * p->heads_q > m);
    const bool few = !is_short && LEAST_PARTS * p->batch * p->heads_kv <= m;
    return few ? ROWS : most_rows(p);
}

/* The time of decode_sm90 for queries of which the host knows all lengths. Few keys of wide heads take longer than the model says (H200, us,
 * here and the fastest form of forward_sm90_split: 9 queries and 597 keys of ten sequences, 15 heads of 3, 23.8, 17.9; 27 and 1,378
 * of two, 16 of 8, 22.9, 18.0; 14 and 1,299 of 33, 4 of 1, 36.3, 27.6; 30 and 669, 16 of 8, 13.8, 12.3). */
static double decode_sm90_seconds(const fa_problem *p, const fa_cuda_device *device)
{
    enum { FEW_WIDE_KEYS = 2048 };
    const double more = p->d > 128 && p->n_k < FEW_WIDE_KEYS ? 5e-6 : 0.0;
    fa_cuda_plan plan;
    fa_cuda_plan_begin(device, &fa_cuda_decode_sm90, &plan);
    if (!fa_cuda_decode_sm90.plan(p, device, &plan, NULL, 0)) return INFINITY;
    const fa_cuda_plan_launch *l = &plan.launches[0];
    const keys_to_cut k = {.tasks = l->tasks,
                           .keys = count_keys(p, l),
                           .key_bytes = 2 * (p->d + p->d_v),
                           .multiprocessors = device->multiprocessors,
                           .merge_turns = count_merge_turns(l)};
    return more + 1e-9 * rounds_ns(&k, &fa_variants[l->variant], l->decode.parts);
}

/* Whether there are more rows than the other kernels leave to this one, and these are faster. */
static bool is_slower_with_many_rows(const fa_problem *p, const fa_cuda_device *device)
{
    if (p->pass != FA_PASS_FORWARD || p->n_q <= fa_cuda_most_few(p) || fa_cuda_has_own_lengths(p))
        return false;
    return p->n_k < LEAST_N_K_OF_MANY_ROWS ||
           !(decode_sm90_seconds(p, device) < fa_cuda_forward_split_sm90.seconds(p, device));
}

static bool has_no_need_of_parts(const fa_problem *p, const fa_cuda_device *device, char *why,
                                 size_t size)
{
    if (!is_slower_than_sm90(p, device)) return false;
    fa_cuda_say(why, size,
                "%" PRId64 " sequences with %" PRId64
                " heads of k and of q fill the device without splitting keys",
                p->batch, p->heads_q);
    return true;
}

/* How often decode_sm90 reads the keys of the longest packed sequence: once for each work tile. */
static int64_t count_reads(const fa_problem *p)
{
    const fa_variant *v = fa_cuda_find_decode_sm90(p);
    const int64_t rows = v ? v->group_rows : MOST_FORWARD_ROWS, group = group_size(p);
    return fa_cuda_count_tiles(p->max_q, group < rows ? rows / group : 1);
}

/* Whether a packed sequence may have so many queries that these kernels would read its keys again and again, and forward_sm90_split
 * takes the batch. Work tiles of wide heads read slowly, unless a window leaves them few keys. (H200, us, head dim 128: a sequence of
 * 96 queries and 41 decodes, 16 heads of 8, 98, 90; of 36 and 20, 40 of 8, 77, 68; of 192 and 11, 32 of 32, 69, 48; but of 48 and
 * 6, 4 of 4, 18, 23. Head dim 256: of 24 and 12 decodes, 16 of 8, 131, 112; of 120 and 26, 24 of 8, 113, 59; 24 sequences of up to
 * 15, 24 of 8, 42, 36; with a window of 1,024 one of 24 and 57 decodes, 8 of 4, 62, 79.) */
static bool may_read_keys_often(const fa_problem *p, const fa_cuda_device *device)
{
    enum { MOST_READS = 8, MOST_READS_WIDE = 1 };
    const bool wide = p->d > 128 && p->window_left < 0;
    const fa_cuda_family *const split = &fa_cuda_forward_split_sm90;
    fa_cuda_plan other;
    if (p->pass != FA_PASS_FORWARD || !p->cu_seqlens_q || !fa_cuda_is_tried(split, device) ||
        count_reads(p) <= (wide ? MOST_READS_WIDE : MOST_READS))
        return false;
    fa_cuda_plan_begin(device, split, &other);
    return split->plan(p, device, &other, NULL, 0);
}

/* fa_forward gives no reason if these kernels refuse many queries: that is plain. */
bool fa_cuda_is_decode_slower(const fa_problem *p, const fa_cuda_device *device, char *why,
                              size_t size)
{
    if (p->pass == FA_PASS_FORWARD && refuse_queries(p, MOST_FORWARD_ROWS, NULL, 0)) return true;
    if (may_read_keys_often(p, device)) return true;
    return has_no_need_of_parts(p, device, why, size);
}

bool fa_cuda_is_decode_sm90_slower(const fa_problem *p, const fa_cuda_device *device, char *why,
                                   size_t size)
{
    const int64_t most = fa_cuda_most_decode_sm90_rows(p, device);
    if (p->pass == FA_PASS_FORWARD && refuse_queries(p, most, NULL, 0)) return true;
    if (is_slower_with_many_rows(p, device) || may_read_keys_often(p, device)) return true;
    const bool is_long = p->n_k >= LONG_BYTES / (2 * (p->d + p->d_v));
    return !is_long && has_no_need_of_parts(p, device, why, size);
}

static bool is_slower(const fa_problem *p, const fa_cuda_device *device, char *why, size_t size)
{
    const fa_cuda_family *const split = &fa_cuda_forward_split_sm80;
    if (fa_cuda_is_decode_slower(p, device, why, size)) return true;
    return p->pass == FA_PASS_FORWARD && !p->cu_seqlens_q && fa_cuda_is_tried(split, device) &&
           !split->slower(p, device, NULL, 0);
}

static bool plan_decode(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                        char *why, size_t size)
{
    const bool latent = p->pass == FA_PASS_DECODE && fa_cuda_is_latent(p);
    const int64_t most = latent ? MOST_LATENT_ROWS : most_rows(p);
    return fa_cuda_plan_decode(p, device, most, plan, why, size);
}

const fa_cuda_family fa_cuda_decode = {
    .name = "decode",
    .oldest = 80,
    .newest = FA_CUDA_NEWEST,
    .slower = is_slower,
    .plan = plan_decode,
};
