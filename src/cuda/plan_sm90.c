/*
 * forward_sm90 and forward_sm90_wide: Hopper's tensor cores (wgmma) and tensor copies (TMA),
 * float16 and bfloat16. forward_tf32_sm90: the same for float32 inputs that may be rounded to tf32.
 * forward_f16x3_sm90: for float32 inputs that may not.
 */
#include "cuda/plan_sm90.h"

#include <inttypes.h>
#include <string.h>

#include "../../kernels/common/flat_rows.h"
#include "../../kernels/forward_f16x3_sm90/forward_f16x3_sm90.h"
#include "../../kernels/forward_tf32_sm90/forward_tf32_sm90.h"
#include "cuda/counters.h"
#include "cuda/family.h"
#include "cuda/parameters.h"
#include "cuda/view_map.h"

/* The kernel of a variant: forward_sm90_wide, whose blocks are in clusters; forward_tf32_sm90;
 * forward_f16x3_sm90, whose blocks may be in clusters; or, if all are false, forward_sm90. */
static bool is_tf32(const fa_variant *v)
{
    return v->element == FA_ELEMENT_TF32 && v->cluster == 1;
}

/* Of high parts alone, too. */
static bool is_f16x3(const fa_variant *v)
{
    return v->element == FA_ELEMENT_FLOAT16X3 || (v->element == FA_ELEMENT_TF32 && v->cluster > 1);
}

static bool is_wide(const fa_variant *v) { return v->cluster > 1 && !is_f16x3(v); }

/* Kernels for float32, which have warps that change tiles, and no scheduler warp. */
static bool is_float32(const fa_variant *v) { return is_tf32(v) || is_f16x3(v); }

static int count_queries(const fa_variant *v) { return FA_SM90_QUERIES(v->consumers); }

static int count_threads(const fa_variant *v)
{
    return is_f16x3(v) ? FA_F16X3_SM90_THREADS(v->consumers)
                       : FA_SM90_THREADS(v->consumers + v->copied);
}

static int count_smem(const fa_variant *v)
{
    if (is_wide(v))
        return FA_SM90_WIDE_SMEM(v->element, v->head_dim, v->consumers, v->keys, v->stages,
                                 v->chunk);
    if (is_tf32(v))
        return FA_TF32_SM90_SMEM(v->element, v->head_dim, v->consumers, v->keys, v->stages);
    if (is_f16x3(v) && v->cluster > 1)
        return FA_F16X3_SM90_CLUSTER_SMEM(v->value_dim, v->consumers, v->keys, v->stages, v->chunk);
    if (is_f16x3(v))
        return FA_F16X3_SM90_SMEM(v->head_dim, v->consumers, v->keys, v->stages, v->chunk);
    return FA_SM90_SMEM(v->element, v->head_dim, v->value_dim, v->options, v->consumers, v->keys,
                        v->stages, v->q_stages);
}

/* Rows of keys and of values that are loaded at once. */
static int rows_k(const fa_variant *v) { return is_wide(v) ? v->keys / v->cluster : v->keys; }

static int rows_v(const fa_variant *v)
{
    return is_tf32(v) ? FA_TF32_SM90_VALUE_ROWS : is_wide(v) ? v->v_rows : v->keys;
}

/* The kernel counts rows and keys of a sequence, plus a tile and a mask's edge, in 32 bits. */
static const int64_t max_rows = (1 << 30) - 4096;

static int64_t count_heads(const fa_problem *p) { return p->batch * p->heads_q; }

/* Query tiles of a head. */
static int64_t count_tiles(const fa_problem *p, const fa_variant *v)
{
    return fa_cuda_count_tiles(p->rows_q, count_queries(v));
}

/* Whether a block for each work tile is enough. */
static bool fits_one_round(const fa_problem *p, const fa_variant *v, const fa_cuda_device *device)
{
    return count_heads(p) * count_tiles(p, v) <= device->multiprocessors;
}

/* Whether each row sees few keys. Lengths that only the device knows are ignored, because the choice
 * would depend on the batch. */
static bool has_short_rows(const fa_problem *p)
{
    int64_t keys = p->n_k;
    if (fa_cuda_has_own_lengths(p)) return false;
    if (p->window_left >= 0 && p->window_left < keys) {
        const int64_t right = p->causal ? 0 : p->window_right;
        if (right >= 0 && right < keys - p->window_left) keys = p->window_left + 1 + right;
    }
    return FA_HAS_SHORT_ROWS(p, keys);
}

/* Rows times keys of a head that the variant computes without a mask. */
static double count_padded_pairs(const fa_problem *p, const fa_variant *v)
{
    return (double)(count_tiles(p, v) * count_queries(v)) *
           (double)(fa_cuda_count_tiles(p->n_k, v->keys) * v->keys);
}

/* At head dims 65 to 96 smaller query tiles have larger key tiles. They are better but in short rows, and where they compute
 * some 7% more: n 941 with head dim 96 takes 1,024 rows and keys, or 960. If lengths are on the device, the longest sequence
 * counts, which must not matter under FA_BATCH_INVARIANT. */
static bool has_better_key_tiles(const fa_problem *p, const fa_variant *fewer,
                                 const fa_variant *more)
{
    const int64_t short_row = 512;
    if (p->causal) return true;
    if (fa_cuda_has_own_lengths(p)) return !p->batch_invariant && p->max_q > short_row;
    return p->n_k > short_row &&
           100 * count_padded_pairs(p, fewer) <= 107 * count_padded_pairs(p, more);
}

/* Whether the window is narrower than a query tile: then most key tiles are masked, and a consumer of a larger tile waits for others'
 * key tiles (H200, 2 sequences of 5,831, 64/16 heads of 64, window 105, us: 192 queries 222, 128 queries 203; 3,389 queries, 6/2
 * heads, window 120, 29.0, 28.2). */
static bool has_narrow_window(const fa_problem *p, const fa_variant *v)
{
    const int64_t right = p->causal ? 0 : p->window_right, rows = count_queries(v);
    return p->window_left >= 0 && p->window_left < rows && right >= 0 &&
           right < rows - p->window_left;
}

/* The time of a row in query tiles of 128 relative to tiles of 192, at head dim 64 (H200, 50 shapes of 1,024 to 8,000 rows: without a
 * mask 1.11 to 1.16 above 1,500 rows; causal 1.03 to 1.04 to 1,500 rows, 1.00 to 1.08 to 2,048, 1.06 to 1.13 above). */
static double slowness_of_fewer(const fa_problem *p, int64_t tiles, const fa_cuda_device *device)
{
    const int64_t short_row = 1536, long_row = 2048, many = 16; /* work tiles of a multiprocessor */
    if (!p->causal) return 1.13;
    if (p->rows_q <= short_row) return 1.03;
    return p->rows_q > long_row || p->batch_invariant || tiles < many * device->multiprocessors
               ? 1.08
               : 1.03;
}

/* Rows that are computed at head dim 64, with those behind the last query. Work tiles that are equal need whole rounds of blocks. */
static double count_computed_rows(const fa_problem *p, const fa_variant *v,
                                  const fa_cuda_device *device)
{
    const int64_t tiles = count_heads(p) * count_tiles(p, v), blocks = device->multiprocessors;
    const bool rounds = !p->causal && !p->batch_invariant && !fa_cuda_has_own_lengths(p);
    return (double)((rounds ? fa_cuda_count_tiles(tiles, blocks) * blocks : tiles) *
                    count_queries(v));
}

/* Whether work tiles of one consumer are better, in float32: if each has a multiprocessor for itself, where two consumers would leave half
 * of them idle (H200, us, two, one: 2 x 20 heads of 128, n 192 18.6, 14.8, with a bias 22.8, 18.7; 192, 20 heads, n 256 35.4, 28.9; 256, 16,
 * n 384 58.0, 44.5; 128, 16, n 512 35.3, 28.3). Long rows have their keys split. Results have the same bits, unless a window moves the
 * first key of a query tile, and its key tiles with it. */
static bool wants_one_consumer(const fa_problem *p, const fa_variant *v,
                               const fa_cuda_device *device)
{
    enum { MOST_KEYS = 640 };
    if (p->batch_invariant && p->window_left >= 0) return false;
    return !fa_cuda_has_own_lengths(p) && p->n_k <= MOST_KEYS && fits_one_round(p, v, device);
}

/* Larger tiles of queries keep more warps busy, so they are used even if they compute some more rows. For few queries smaller tiles
 * are better: the fixed work of a tile takes a larger share there, and a causal mask hides more of a larger tile (measured on an
 * H200), unless the larger ones need one round of blocks, and the smaller ones two. */
static bool wants_fewer_queries(const fa_problem *p, const fa_variant *fewer,
                                const fa_variant *more, const fa_cuda_device *device)
{
    if (is_float32(fewer) && fewer->consumers == 1) return wants_one_consumer(p, fewer, device);
    if (!is_float32(fewer) && fewer->head_dim > 64) return has_better_key_tiles(p, fewer, more);
    if (p->cu_seqlens_q) return !is_float32(fewer); /* smaller tiles have the dynamic schedule */
    if (!is_float32(fewer) && has_narrow_window(p, more)) return true;
    if (!is_float32(fewer) && !p->batch_invariant && fits_one_round(p, more, device) &&
        !fits_one_round(p, fewer, device))
        return false;
    if (p->rows_q <= (p->causal && is_float32(fewer) ? 2048 : 1024)) return true;
    if (is_float32(fewer))
        return 32 * count_tiles(p, more) * count_queries(more) >
               33 * count_tiles(p, fewer) * count_queries(fewer);
    const double slowness = slowness_of_fewer(p, count_heads(p) * count_tiles(p, fewer), device);
    return slowness * count_computed_rows(p, fewer, device) < count_computed_rows(p, more, device);
}

/* ---- Maps ------------------------------------------------------------------------------------ */

/* Rows of keys or values that are loaded at once. With pages, this number divides the page and the
 * position of a work tile's first key. */
static int32_t find_box(const fa_problem *p, const fa_variant *v, int rows)
{
    if (!p->block_table) return rows;
    int32_t box = p->window_left < 0 ? FA_SM90_LARGEST_BOX : FA_SM90_KEY_ALIGNMENT;
    while (p->rows_k % box || rows_k(v) % box || rows_v(v) % box) box /= 2;
    return box;
}

static void make_map_shapes(const fa_problem *p, const fa_variant *v, fa_tensor_map_shape maps[3])
{
    const int32_t box_k = find_box(p, v, rows_k(v)), box_v = find_box(p, v, rows_v(v));
    if (v->split)
        fa_cuda_map_groups(&maps[0], &p->q, p->d, p->rows_q, p->heads_q, p->blocks_q, 1, 64);
    else fa_cuda_map_view(&maps[0], &p->q, p->d, p->rows_q, p->heads_q, p->blocks_q, 64);
    fa_cuda_map_view(&maps[1], &p->k, p->d, p->rows_k, p->heads_kv, p->blocks_k, box_k);
    fa_cuda_map_view(&maps[2], &p->v, p->d_v, p->rows_k, p->heads_kv, p->blocks_k, box_v);
    for (int i = 0; i < 3 && is_tf32(v); i++) maps[i].element = v->element; /* TMA rounds to it */
}

/* ---- What can be done, and how --------------------------------------------------------------- */

static bool refuse_sizes(const fa_problem *p, char *why, size_t size)
{
    return fa_cuda_refuse_rows(p, max_rows, why, size);
}

/* Kernels with at most one option assume that the largest score gives the largest logit, which is wrong for a
 * negative scale. With a bias, the bias divided by the scale must not overflow. */
int fa_cuda_sm90_options(const fa_problem *p, fa_tensor_map_shape *bias)
{
    const bool mapped = bias && fa_cuda_map_bias(p, bias);
    int options = 0;
    if (p->softcap > 0) options |= FA_SM90_SOFTCAP;
    if (p->alibi_slopes) options |= FA_SM90_ALIBI;
    if (mapped) options |= FA_SM90_BIAS;
    if (p->mask.data || (p->bias.data && !mapped)) options |= FA_SM90_BY_ROWS;
    if (p->dropout_threshold) options |= FA_SM90_DROPOUT;
    if (!(p->scale > 0) || (options && p->scale < FA_SM90_MIN_SCALE)) options |= FA_SM90_SCALED;
    if (p->softcap > FA_SM90_LARGEST_SOFTCAP) options |= FA_SM90_SCALED; /* by kernels with all */
    return options;
}

/* The next variant of the same element type. */
static const fa_variant *next_variant(const fa_variant *v)
{
    const fa_element element = v->element;
    do v++;
    while (v->element != element);
    return v;
}

/* Whether the variant has these options, or all options. Those whose keys are copied have no variant without options. */
static bool has_options(const fa_variant *v, int options)
{
    const bool several = v->options & (v->options - 1);
    return v->options == options || (several && (options || v->copied) && !(options & ~v->options));
}

/* Whether all sequences have equally many queries. Parts of work tiles of few queries beside others are slower if they overlap (H200, us,
 * one after the other and overlapped: a chunk of 512 and 15 decodes at 8k, 16 heads of 4, 123, 129, 32 of 8 224, 233; four
 * sequences of 19 queries at 25k, 32 of 4, 113, 97; 64 of 16 at 4k, 32 of 8, 274, 264; full, n 150, 32 of 8, 104, 97). */
static bool has_equal_queries(const fa_problem *p)
{
    return !p->cu_seqlens_q || (p->batch > 0 && p->max_q <= fa_divide(p->rows_q, p->batch));
}

/* Whether rows of keys or values are whole vectors of 16 bytes, at most 2^32 of them apart, as copies need them. (That rows are aligned,
 * maps ask for as well.) */
static bool has_copied_rows(const fa_problem *p, const fa_view *view, int64_t d)
{
    const int64_t vector = 8;
    const double last =
        (double)p->blocks_k * (double)view->stride[0] + (double)p->rows_k * (double)view->stride[1];
    return d % vector == 0 && last / (double)vector < (double)UINT32_MAX;
}

/*
 * Whether keys and values are copied: from pages that TMA cannot load, and where that is faster, because TMA needs an instruction for each
 * page and block of columns, one after the other. (H200, us, TMA, copies, FlashAttention-3, 32/8 heads, prompts of 2,048, 512 and 256
 * behind 6k, 3.5k and 1.8k: head dim 64, page 16, 362, 334, 300; 32 333, 336, 301; 128, 16 577, 477, 492; 32 501, 480, 494; 64 474, 482,
 * 499; 256, 16 1,104, 883, 822; 64 1,054, 916, 844; 256 1,075, 924, 877.) Few rows of a key head wait for memory, which TMA reads faster but in small
 * boxes (64 sequences of 16 queries at 4k: 64, page 16, 166, 148, 159; 128 267, 279, 265; 32 259, 277, 262; 256, 16 559, 550, 530; 64 530, 540, 525).
 * With a softcap copies are faster there, too (149 sequences of 11 queries at 1,500, 128, page 16, 301, 271, 263).
 */
static bool wants_copies(const fa_problem *p)
{
    enum { NARROW_DIM = 64, MIDDLE_DIM = 128, WIDE_DIM = 192, SMALL_PAGE = 16 };
    const bool few_rows = p->max_q * p->heads_q <= FA_SM90_BOX_ROWS * p->heads_kv;
    if (!p->block_table || !has_copied_rows(p, &p->k, p->d) || !has_copied_rows(p, &p->v, p->d_v))
        return false;
    if (p->rows_k % FA_SM90_LEAST_PAGE) return true;
    if (p->d <= NARROW_DIM) return p->rows_k <= SMALL_PAGE;
    if (p->d <= MIDDLE_DIM) return (!few_rows || p->softcap > 0) && p->rows_k <= 2 * SMALL_PAGE;
    return p->d > WIDE_DIM; /* others have narrower variants by TMA */
}

bool fa_cuda_fits_pages(const fa_variant *v, const fa_problem *p)
{
    if (v->copied) return wants_copies(p);
    return !p->block_table || p->rows_k % FA_SM90_LEAST_PAGE == 0;
}

/* overlaps: work tiles may overlap whatever their queries. */
static bool takes(const fa_variant *v, const fa_problem *p, int options, bool overlaps,
                  const fa_cuda_device *device)
{
    if (!is_float32(v) && v->element != (fa_element)p->q.dtype) return false;
    if (p->d > v->head_dim || p->d_v > v->value_dim * v->cluster) return false;
    if (v->single_tiles && (fa_cuda_has_own_lengths(p) || p->n_k > v->keys)) return false;
    if (!has_options(v, options)) return false;
    if ((v->short_rows && !has_short_rows(p)) || !fa_cuda_fits_pages(v, p)) return false;
    if (v->for_bias && !p->bias.data) return false;
    if (v->overlapped && !overlaps && !has_equal_queries(p)) return false;
    return !v->few_queries || wants_fewer_queries(p, v, next_variant(v), device);
}

static const fa_variant *find_variant(const fa_problem *p, int first, int end, int options,
                                      bool overlaps, const fa_cuda_device *device)
{
    for (int i = first; i < end; i++)
        if (takes(&fa_variants[i], p, options, overlaps, device)) return &fa_variants[i];
    return NULL;
}

static bool may_pair(const fa_problem *p) { return p->causal && !p->cu_seqlens_q; }

/* Whether a window leaves nearly all query tiles equally many keys. Pairs balance nothing then, and a balanced schedule takes longer
 * to compute than they last (H200, us, with and without pairs: 8 heads of 8,449 rows of 64, window 126, 44.5, 21.7; 28 of 4,096 of
 * 128, 128, 54, 38; 12 of 7,006 of 192, 116, 62, 40). */
static bool has_equal_tiles(const fa_problem *p, const fa_variant *v)
{
    return p->window_left >= 0 && p->window_left < p->n_k / 4 - count_queries(v) &&
           !fa_cuda_has_own_lengths(p);
}

/* The causal pairs of so many heads: with an odd number of work tiles, two heads share one for their middle tiles. */
static int64_t count_pairs(int64_t heads, int64_t tiles) { return (heads * tiles + 1) / 2; }

/* If only the device knows the lengths, each block takes few tasks, and the hardware starts a block when another has
 * ended. But a block can load a task's first keys in time only during a previous task. So it takes several tasks, as long
 * as enough blocks are left to start. Its tasks are spread evenly over those of a head, so that they rarely belong to one
 * sequence. On an H200, packed sequences: +4 to +20%, short ones up to twice as fast. */
static int64_t count_shares(int64_t takers, const fa_cuda_plan_launch *l)
{
    int64_t each = l->tasks / (8 * takers);
    if (each == 0) return l->tasks;
    if (each < 2) each = 2;
    if (each > 8) each = 8;
    const int64_t blocks = (l->tasks + each - 1) / each, apart = (l->tiles + each - 1) / each;
    return blocks + (apart - blocks % l->tiles + l->tiles) % l->tiles;
}

/* The scheduler is persistent: blocks stay and take task after task. */
static uint32_t count_blocks(const fa_problem *p, const fa_cuda_device *device,
                             const fa_cuda_plan_launch *l)
{
    int64_t clusters = ((int64_t)device->multiprocessors + l->cluster - 1) / l->cluster;
    if (fa_cuda_has_own_lengths(p))
        clusters = may_pair(p) ? count_pairs(count_heads(p), l->tiles) : count_shares(clusters, l);
    if (clusters > l->tasks) clusters = l->tasks;
    const int64_t max = fa_cuda_grid(INT64_MAX) / l->cluster;
    return (uint32_t)(clusters < max ? clusters : max) * l->cluster;
}

/* For heads in causal pairs: whether the work tiles of the last heads have a balanced schedule, so that blocks end
 * together. The keys of these heads are then read at the same time. For large head dims this costs more than it gains,
 * unless rows are long (on an H200, two work tiles a block: head dim 64 +4%, 128 and 256 +2% from 4096 queries on and -1%
 * at 2048). */
static bool wants_balance(const fa_problem *p, const fa_cuda_plan_launch *l)
{
    const int64_t many = 32;
    if (fa_cuda_has_own_lengths(p)) return false;
    if (l->sm90.bias_mapped) return false; /* the warp that balances loads the bias there */
    if (is_float32(&fa_variants[l->variant])) return false; /* it changes tiles there */
    if (l->cluster > 1 || l->grid > FA_SM90_MAX_BALANCED_BLOCKS) return false;
    return l->tasks <= INT32_MAX && (p->d <= 64 || l->tiles >= many);
}

/* How many of the last heads are in no pairs, if they have so many work tiles at least. With an odd number of work tiles
 * the other heads are an even number. */
static int64_t count_last_heads(const fa_cuda_plan_launch *l, int64_t tasks)
{
    const int64_t heads = l->tasks / l->tiles, last = (tasks + l->tiles - 1) / l->tiles;
    if (last >= heads) return heads;
    return last + (l->tiles & (heads - last) & 1);
}

/* The number of heads with a balanced schedule: enough for two work tiles for each block. The schedule takes some 15 us to
 * compute, in which each block needs pairs to work on. 0: there are too few, or there is no such schedule (H200, head
 * dim 64, us with the alternating schedule of all heads and with a balanced one: 84 heads of 1,152 rows, 18 key tiles a
 * block, 46.4, 52.9; 72 of 1,984, 57, 95.2, 98.7; 200 of 1,280, 72, 128.0, 123.9). */
static int64_t count_balanced_heads(const fa_problem *p, const fa_cuda_plan_launch *l)
{
    const double enough = 64 * 128 * 64; /* key tiles times queries times columns, of a block */
    const int64_t heads = count_heads(p), blocks = l->grid;
    if (!wants_balance(p, l) || has_equal_tiles(p, &fa_variants[l->variant])) return 0;
    const int64_t balanced = count_last_heads(l, 2 * blocks);
    const int64_t pairs = count_pairs(heads - balanced, l->tiles);
    const fa_variant *v = &fa_variants[l->variant];
    const int64_t key_tiles = fa_cuda_count_tiles((l->tiles + 1) * count_queries(v), v->keys);
    const double work =
        (double)(key_tiles * count_queries(v) * p->d) / (double)blocks; /* of a pair */
    if (pairs < blocks || (double)pairs * work < enough) return 0;
    return balanced * l->tiles <= FA_SM90_MAX_BALANCED_TASKS / 2 * blocks ? balanced : 0;
}

/* The number of heads with the alternating schedule, if none is balanced: those of the last two to four work tiles of a
 * block. The others are in pairs, so that a head's keys are read at the same time; all are if blocks have nearly equally
 * many pairs. */
static int64_t count_alternating_heads(const fa_problem *p, const fa_cuda_plan_launch *l)
{
    const int64_t blocks = l->grid / l->cluster, tasks = l->tasks,
                  pairs = count_pairs(count_heads(p), l->tiles);
    if (fa_cuda_has_own_lengths(p) || is_wide(&fa_variants[l->variant])) return 0;
    if (has_equal_tiles(p, &fa_variants[l->variant])) return count_heads(p);
    if (100 * pairs > 96 * fa_cuda_count_tiles(pairs, blocks) * blocks) return 0;
    const int64_t paired_rounds = tasks / (2 * blocks) - 1;
    if (paired_rounds < 1) return count_heads(p);
    return count_last_heads(l, tasks - 2 * blocks * paired_rounds);
}

/* Whether the schedule is dynamic: if rows are so short that memory limits the rate, because multiprocessors get unequal
 * shares of memory's rate (on an H200, 8192 rows of 128 at head dim 128: with equal shares of the work the first block
 * ended after 196 us, the last after 290). Under a causal mask it also lets the work tiles of a head run at the same time
 * (256 heads of 384 rows at head dim 256: 77.6 us in alternation, 71.7 dynamic; 456 of 640: 242, 244; 64 of 2,048: 248,
 * 413). And if lengths are on the device: then nobody knows equal shares (H200, us, packed, a block for some work tiles and dynamic:
 * 7 sequences of 53 to 608 rows, 64/16 heads 80, 52; 82 of 195 on average 492, 427; 4 chunks of 4k at 16k in pages
 * 6,436, 6,107; without a mask 29 sequences of up to 354 rows, 24/8 heads 75, 56, but 9 of up to 2,542, 16 heads of 256, 290, 312). */
static bool wants_dynamic(const fa_problem *p, const fa_cuda_plan_launch *l, int options)
{
    if (p->batch == 0) return false; /* it would read the length of a sequence */
    const int64_t short_row = p->causal && p->d > 128 ? 384 : 256, long_row = 2048;
    const fa_variant *v = &fa_variants[l->variant];
    if (is_float32(v) || v->rounded || !FA_SM90_HAS_DYNAMIC(v->consumers, v->head_dim))
        return false;
    if (l->cluster > 1 || v->options & (FA_SM90_BIAS | FA_SM90_BY_ROWS) || l->tasks >= INT32_MAX)
        return false;
    if (fa_cuda_has_own_lengths(p)) return p->causal || p->d <= 128 || p->max_q < long_row;
    return !options && p->n_k <= short_row && l->tasks >= 4 * (int64_t)l->grid;
}

/* How many heads take turns in the dynamic schedule, if lengths are on the device. Under a causal mask all of them, so that
 * the longest work tiles of a sequence come first: at the end of a head few are long (H200, us, in the last 264 work tiles and in
 * all: 4 sequences of 135 to 2,129 rows, 64/32 heads 203, 189; one of 4,016, 48/16 heads of 80, 260, 240; 17 of up to 8k, 16
 * heads 1,012, 965). Others, and those beside decode, which reads other keys (60 decodes at 8k and 4 chunks of 2,048 1,716,
 * 1,931): those that read the same keys. */
static int64_t count_heads_in_step(const fa_problem *p, const fa_cuda_plan_launch *l)
{
    if (p->causal && !fa_variants[l->variant].beside) return p->heads_q;
    return p->heads_kv < 1 ? 1 : p->heads_q / p->heads_kv;
}

/* ---- The launch ------------------------------------------------------------------------------ */

/* How blocks iterate over work tiles, and what a task is. */
void fa_cuda_set_sm90_order(const fa_problem *p, const fa_cuda_plan_launch *l,
                            fa_sm90_params *params)
{
    const int64_t takers = l->grid / l->cluster; /* blocks, or clusters of them */
    params->task_kind = FA_SM90_WORK_TILES;
    params->tasks = l->tasks;
    params->balanced_heads = params->alternating_heads = 0;
    params->counter = -1; /* the launch may give it one */
    params->by_pairs = fa_reciprocal_of(1);
    const bool own_lengths = fa_cuda_has_own_lengths(p);
    if (own_lengths) params->alternating_heads = (int32_t)count_heads_in_step(p, l);
    if (!p->causal || l->tiles == 1 || takers >= l->tasks || l->tasks > INT32_MAX) return;
    if (l->sm90.dynamic) {
        if (!own_lengths) params->alternating_heads = (int32_t)count_last_heads(l, 2 * takers);
        return;
    }
    if (!may_pair(p)) return;
    params->by_pairs = fa_reciprocal_of(l->tiles % 2 ? l->tiles : l->tiles / 2);
    params->task_kind = FA_SM90_CAUSAL_PAIRS;
    const int64_t balanced = count_balanced_heads(p, l);
    const int64_t alternating = balanced ? 0 : count_alternating_heads(p, l);
    params->balanced_heads = (int32_t)balanced;
    params->alternating_heads = (int32_t)alternating;
    params->tasks = count_pairs(count_heads(p) - balanced - alternating, l->tiles);
}

/* 1 in place of numbers by which nothing is divided. */
static fa_reciprocal reciprocal_of(int64_t b)
{
    return fa_reciprocal_of(b < 1 || b > INT32_MAX ? 1 : b);
}

/* What the host knows of work tiles. */
static void set_uniform(const fa_problem *p, const fa_cuda_plan_launch *l, fa_sm90_params *params)
{
    const int64_t diagonal = p->diagonal_given ? p->diagonal : p->n_k - p->rows_q;
    params->uniform = !fa_cuda_has_own_lengths(p) && l->tasks <= INT32_MAX;
    params->reach = fa_sm90_find_reach(p->causal, p->window_left, p->window_right, diagonal);
    params->by_tiles = reciprocal_of(l->tiles);
    params->by_heads = reciprocal_of(p->heads_q);
    params->by_group = reciprocal_of(p->heads_kv < 1 ? 1 : p->heads_q / p->heads_kv);
}

bool fa_cuda_sm90_params(const fa_problem *p, const fa_cuda_plan_launch *l, fa_cuda_encoder *encode,
                         fa_sm90_params *params, fa_cuda_fault *fault)
{
    const fa_view bias = fa_cuda_score_rows(&p->bias);
    params->q_step = fa_cuda_map_steps(&p->q);
    params->k_step = fa_cuda_map_steps(&p->k);
    params->v_step = fa_cuda_map_steps(&p->v);
    params->box_rows = (int32_t)l->sm90.maps[2].box[1];
    fa_cuda_set_sm90_order(p, l, params);
    set_uniform(p, l, params);
    params->bias_step = fa_cuda_map_steps(&bias);
    params->bias_mapped = l->sm90.bias_mapped;
    params->split.parts = 0; /* it may have split keys */
    fa_sm90_map *const maps[] = {&params->q, &params->k, &params->v, &params->bias};
    return fa_cuda_encode_maps(l->sm90.maps, maps, l->sm90.bias_mapped ? 4 : 3, encode, fault);
}

static bool queue_sm90(void *kernel, const fa_cuda_plan *plan, const fa_cuda_plan_launch *l,
                       const fa_cuda_call *call, fa_cuda_fault *fault)
{
    fa_attention_params attention;
    fa_sm90_params params;
    fa_cuda_set_params(call->problem, l, &attention);
    if (!fa_cuda_sm90_params(call->problem, l, fa_cuda_encode_map, &params, fault)) return false;
    void *parameters[] = {&attention, &params};
    if (!l->sm90.dynamic) return fa_cuda_queue(kernel, plan, l, call->stream, parameters, fault);
    const fa_cuda_counter counter = fa_cuda_counter_take(call->stream, FA_SM90_COUNTERS);
    fa_cuda_plan_launch now = *l;
    params.counter = counter.number;
    if (counter.number < 0) now.grid = l->sm90.static_grid;
    const bool fine = fa_cuda_queue(kernel, plan, &now, call->stream, parameters, fault);
    fa_cuda_counter_release(counter, call->stream);
    return fine;
}

/* ---- The plan -------------------------------------------------------------------------------- */

static const char *arithmetic_of(const fa_variant *v)
{
    switch (v->element) {
    case FA_ELEMENT_TF32:
        return is_tf32(v) ? "tf32 products (wgmma), float32 sums"
                          : "float16 products (wgmma), float32 sums";
    case FA_ELEMENT_FLOAT16X3: return "three float16 products for each (wgmma), float32 sums";
    case FA_ELEMENT_BFLOAT16: return "bfloat16 products (wgmma), float32 sums";
    default: return "float16 products (wgmma), float32 sums";
    }
}

/* The launch of a variant. Its maps are found before its shared memory is known to fit. */
static bool plan_variant(const fa_problem *p, const fa_variant *v, int options,
                         const fa_cuda_device *device, fa_cuda_plan *plan, char *why, size_t size)
{
    fa_tensor_map_shape *maps = plan->launches[plan->count].sm90.maps;
    make_map_shapes(p, v, maps);
    static const char *const names[] = {"q", "k", "v"};
    if (fa_cuda_refuse_block_strides(p, why, size) || !fa_cuda_maps_fit(maps, names, 3, why, size))
        return false;
    fa_cuda_plan_launch *l =
        fa_cuda_plan_add(v, count_threads(v), count_smem(v), queue_sm90, device, plan, why, size);
    if (!l) return false;
    plan->arithmetic = arithmetic_of(v);
    l->tile_k = v->keys;
    l->cluster = (uint32_t)v->cluster;
    l->sm90.bias_mapped = options & FA_SM90_BIAS;
    fa_cuda_set_query_tasks(p, count_queries(v), l);
    l->grid = l->sm90.static_grid = count_blocks(p, device, l);
    l->sm90.dynamic = wants_dynamic(p, l, options);
    if (l->sm90.dynamic) /* blocks stay */
        l->grid =
            (uint32_t)(l->tasks < device->multiprocessors ? l->tasks : device->multiprocessors);
    return true;
}

/* The launch of the first of these variants that takes the problem. */
static bool plan_any(const fa_problem *p, int first, int end, int options, bool overlaps,
                     const fa_cuda_device *device, fa_cuda_plan *plan, char *why, size_t size)
{
    const fa_variant *v = find_variant(p, first, end, options, overlaps, device);
    if (v) return plan_variant(p, v, options, device, plan, why, size);
    if (p->block_table && p->rows_k % FA_SM90_LEAST_PAGE) {
        fa_cuda_say(why, size, "k.shape[1] is %" PRId64 ", not a multiple of %d (rows of a page)",
                    p->rows_k, FA_SM90_LEAST_PAGE);
        return false;
    }
    fa_cuda_say(why, size, "the head dims are %" PRId64 " and %" PRId64, p->d, p->d_v);
    return false;
}

bool fa_cuda_add_sm90(const fa_problem *p, int first, int end, bool overlaps,
                      const fa_cuda_device *device, fa_cuda_plan *plan, char *why, size_t size)
{
    const int options = fa_cuda_sm90_options(p, &plan->launches[plan->count].sm90.maps[3]);
    if (fa_cuda_refuse_dtypes(p, true, why, size) || fa_cuda_refuse_options(p, why, size) ||
        refuse_sizes(p, why, size))
        return false;
    return plan_any(p, first, end, options, overlaps, device, plan, why, size);
}

static bool plan_sm90(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                      char *why, size_t size)
{
    if (!fa_cuda_add_sm90(p, FA_FIRST_forward_sm90, FA_END_forward_sm90, false, device, plan, why,
                          size))
        return false;
    fa_cuda_plan_launch *l = &plan->launches[plan->count - 1];
    l->overlaps = l->cluster == 1; /* forward_sm90_wide does not wait */
    return true;
}

bool fa_cuda_add_rounded(const fa_problem *halves, const fa_cuda_device *device, fa_cuda_plan *plan,
                         char *why, size_t size)
{
    return !refuse_sizes(halves, why, size) &&
           plan_any(halves, FA_FIRST_forward_tf32_rounded, FA_END_forward_tf32_rounded, 0, false,
                    device, plan, why, size);
}

/* The largest head dims for which other kernels of forward_sm90 are much faster. */
enum { NARROW = 96 };

bool fa_cuda_add_beside(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                        char *why, size_t size)
{
    if (p->d <= NARROW && p->d_v <= NARROW) {
        fa_cuda_say(why, size, "the head dims are %" PRId64 " and %" PRId64, p->d, p->d_v);
        return false;
    }
    if (!fa_cuda_add_sm90(p, FA_FIRST_forward_sm90_beside, FA_END_forward_sm90_beside, false,
                          device, plan, why, size))
        return false;
    plan->launches[plan->count - 1].overlaps = true;
    return true;
}

const fa_variant *fa_cuda_find_tf32_sm90(const fa_problem *p, const fa_cuda_device *device)
{
    return find_variant(p, FA_FIRST_forward_tf32_sm90, FA_END_forward_tf32_sm90,
                        fa_cuda_sm90_options(p, NULL), false, device);
}

const fa_variant *fa_cuda_find_f16x3_sm90(const fa_problem *p, const fa_cuda_device *device)
{
    return find_variant(p, FA_FIRST_forward_f16x3_sm90, FA_END_forward_f16x3_sm90,
                        fa_cuda_sm90_options(p, NULL), false, device);
}

static bool plan_tf32(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                      char *why, size_t size)
{
    if (fa_cuda_refuse_tf32(p, why, size) || fa_cuda_refuse_options(p, why, size) ||
        refuse_sizes(p, why, size))
        return false;
    return plan_any(p, FA_FIRST_forward_tf32_sm90, FA_END_forward_tf32_sm90,
                    fa_cuda_sm90_options(p, NULL), false, device, plan, why, size);
}

static bool plan_f16x3(const fa_problem *p, const fa_cuda_device *device, fa_cuda_plan *plan,
                       char *why, size_t size)
{
    if (fa_cuda_refuse_other_than_float32(p, why, size)) return false;
    const bool wide = p->d > 256 || p->d_v > 256; /* the same kernel, with all parts */
    if (p->precision == FA_PRECISION_IEEE || (p->precision == FA_PRECISION_TF32 && !wide)) {
        fa_cuda_say(why, size, "options.precision is not FA_PRECISION_FLOAT32");
        return false;
    }
    if (fa_cuda_refuse_options(p, why, size) || refuse_sizes(p, why, size)) return false;
    return plan_any(p, FA_FIRST_forward_f16x3_sm90, FA_END_forward_f16x3_sm90,
                    fa_cuda_sm90_options(p, NULL), false, device, plan, why, size);
}

const fa_cuda_family fa_cuda_forward_f16x3_sm90 = {
    .name = "f16x3_sm90",
    .oldest = 90,
    .newest = 90,
    .plan = plan_f16x3,
};

const fa_cuda_family fa_cuda_forward_tf32_sm90 = {
    .name = "tf32_sm90",
    .oldest = 90,
    .newest = 90,
    .without_workspace = &fa_cuda_forward_tf32,
    .plan = plan_tf32,
};

const fa_cuda_family fa_cuda_forward_sm90 = {
    .name = "sm90",
    .oldest = 90,
    .newest = 90,
    .plan = plan_sm90,
};
