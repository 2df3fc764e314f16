/*
 * Sizes that follow from the numbers of a variant of forward_sm90, and its second parameter. Shared by
 * the kernel and the planner.
 *
 * The numbers are those of kernels/variants.h:
 *
 *   head_dim, value_dim  multiples of 16
 *   consumers            warpgroups that compute, 64 queries each; one more loads
 *   keys                 a multiple of 16: with more keys there are fewer barriers; with fewer, less is wasted at
 *                        the end of a row. `stages` tiles of keys and of values and the queries must fit into shared
 *                        memory; scores, weights and outputs must fit into the consumers' registers
 *   q_stages             with more than one, the queries of the next work tiles are loaded before they are needed.
 *                        1 with a bias, whose tiles need the shared memory
 *   single_tiles         1: only for rows whose keys are one tile
 *   short_rows           1: only for rows of few keys (common/flat_rows.h)
 *   few_queries          1: only for few queries, or if a larger last tile would be mostly empty
 *                        (src/cuda/plan_sm90.c)
 *   beside               1: the launch runs at the same time as the previous one (src/cuda/plan_mixed.c)
 *   split                1: a work tile has a part of the keys (split.h)
 *   copied               1: keys and values are copied by a warpgroup of its own, from pages of any size, where TMA cannot load
 *                        them or is slower (src/cuda/plan_sm90.c)
 *   overlapped           1: a work tile starts before the previous one ends; only if sequences have equally many queries
 *   tracked              1: plain tiles always track the max (softmax.cuh), which costs 0 to 2% at
 *                        head dims above 128
 */
#ifndef FA_KERNEL_FORWARD_SM90_H
#define FA_KERNEL_FORWARD_SM90_H

#include <stdint.h>

#include "../common/divide.h"
#include "../common/element.h"
#include "split.h"

#define FA_SM90_QUERIES(consumers) (64 * (consumers)) /* of a work tile */
#define FA_SM90_THREADS(consumers) (128 * (1 + (consumers)))

/* Whether plain kernels have the dynamic schedule. Head dim 64 with three consumers, which is for long rows, has no register to
 * spare. */
#define FA_SM90_HAS_DYNAMIC(consumers, dim) (!((consumers) == 3 && (dim) <= 64))

/* Options that change scores and weights. */
#define FA_SM90_SOFTCAP 1
#define FA_SM90_SCALED 2 /* a scale that scores are multiplied by before the softmax */
#define FA_SM90_ALIBI 4
#define FA_SM90_BIAS 8     /* one that TMA loads */
#define FA_SM90_BY_ROWS 16 /* a boolean mask, any other bias */
#define FA_SM90_DROPOUT 32
#define FA_SM90_ALL 63
#define FA_SM90_FLOAT32_ALL 55 /* of kernels for float32: every bias is read by its strides */

/* The largest softcap of kernels for a softcap alone. */
#define FA_SM90_LARGEST_SOFTCAP 256.0f

/* Scales from here on are folded into the softmax's exponents (find_units in work_tile.cuh). */
#define FA_SM90_MIN_SCALE 1e-6f

enum {
    FA_SM90_KEY_ALIGNMENT = 32,        /* the first key of a work tile is a multiple of it */
    FA_SM90_LARGEST_BOX = 256,         /* rows that TMA loads at once, at most */
    FA_SM90_MAX_BALANCED_BLOCKS = 160, /* blocks of a launch with a balanced schedule */
    FA_SM90_MAX_BALANCED_TASKS = 64    /* balanced tasks of a block */
};

/* Bytes of a row in shared memory: blocks of 128 bytes, over which the swizzle goes. */
#define FA_SM90_ROW_BYTES(dim, element) (((dim)*FA_ELEMENT_BYTES(element) + 127) / 128 * 128)

/* Bytes of the buffer through which outputs are stored, 64 columns at a time, if there is room. */
#define FA_SM90_OUT_BUFFER(dim, consumers) ((dim) <= 192 ? FA_SM90_QUERIES(consumers) * 128 : 0)

/* Entries of the work-tile queue, as many as fit: an even number; and the largest size of an entry in bytes. */
#define FA_SM90_QUEUE_ENTRIES(dim, dim_v) ((dim) > 192 ? 6 : (dim) > 128 && (dim_v) <= 128 ? 4 : 16)
#define FA_SM90_ENTRY_BYTES 192

/* Bytes of the consumers' tiles of the bias, in 16 bits. */
#define FA_SM90_BIAS_BYTES(consumers, keys, options)                                               \
    ((options)&FA_SM90_BIAS ? FA_SM90_QUERIES(consumers) * (keys)*2 : 0)

/* Bytes of dynamic shared memory, with room to align to 1024: queries, keys and values, outputs, work tiles, bias. */
#define FA_SM90_SMEM(element, dim, dim_v, options, consumers, keys, stages, q_stages)              \
    ((q_stages)*FA_SM90_QUERIES(consumers) * FA_SM90_ROW_BYTES(dim, element) +                     \
     (stages) * (keys) * (FA_SM90_ROW_BYTES(dim, element) + FA_SM90_ROW_BYTES(dim_v, element)) +   \
     FA_SM90_OUT_BUFFER(dim, consumers) +                                                          \
     FA_SM90_QUEUE_ENTRIES(dim, dim_v) * FA_SM90_ENTRY_BYTES +                                     \
     FA_SM90_BIAS_BYTES(consumers, keys, options) + 1024)

/* A tensor map with the axes (dim, row, head, block), which are the axes (3, 1, 2, 0) of the caller's tensors,
 * and boxes of 64 columns. */
typedef struct fa_sm90_map {
#ifdef __cplusplus
    alignas(64)
#else
    _Alignas(64)
#endif
        uint64_t opaque[16];
} fa_sm90_map;

/* Factors of the indices of heads and blocks in a map: 0 for an axis that is broadcast. */
typedef struct fa_sm90_steps {
    int32_t head, block;
} fa_sm90_steps;

/* Larger than every key, and small enough that additions to it do not overflow. */
#define FA_SM90_UNBOUNDED (1 << 30)

FA_SHARED_FUNCTION int32_t fa_sm90_saturate(int64_t x)
{
    if (x > FA_SM90_UNBOUNDED) return FA_SM90_UNBOUNDED;
    return x < -FA_SM90_UNBOUNDED ? -FA_SM90_UNBOUNDED : (int32_t)x;
}

/* The keys [lo, hi) that query 0 of a sequence may see by its position, or would see: they need not exist. */
typedef struct fa_sm90_reach {
    int32_t lo, hi;
} fa_sm90_reach;

/* By a causal mask and a window; of -1: no limit. */
FA_SHARED_FUNCTION fa_sm90_reach fa_sm90_find_reach(int32_t causal, int64_t window_left,
                                                    int64_t window_right, int64_t diagonal)
{
    fa_sm90_reach reach = {-FA_SM90_UNBOUNDED, FA_SM90_UNBOUNDED};
    const int64_t right = causal ? 0 : window_right;
    if (window_left >= 0) reach.lo = fa_sm90_saturate(diagonal - window_left);
    if (right >= 0 && right < FA_SM90_UNBOUNDED) reach.hi = fa_sm90_saturate(diagonal + right + 1);
    return reach;
}

/* Counters of an image for the dynamic schedule: one for launches that follow each other. */
#define FA_SM90_COUNTERS 16384

/* The kind of a task: a work tile, or a causal pair of one head: the first and the last, the second and the second
 * to last ... With an odd number of work tiles, the middle ones of two heads are a pair. */
enum { FA_SM90_WORK_TILES, FA_SM90_CAUSAL_PAIRS };

/* The kernel's second parameter. */
typedef struct fa_sm90_params {
    fa_sm90_map q, k, v; /* boxes of 64 rows of q, of as many of k and v as are loaded at once */
    fa_sm90_steps q_step, k_step, v_step;
    int32_t box_rows;  /* rows of v's boxes; paged: also of k's, a divisor of the page's rows */
    int32_t task_kind; /* FA_SM90_WORK_TILES ... */
    int64_t tasks;     /* of the static or dynamic schedule */
    fa_sm90_map bias;  /* with the axes (key, query, head, batch), boxes of 64 x 64 */
    fa_sm90_steps bias_step;
    int32_t bias_mapped; /* 0: it is read by its strides, or there is none */
    /* With causal pairs: how many of the last heads are no part of them, but have the balanced schedule, or the
     * alternating one (balance.cuh); at most one of the two is not 0. In the dynamic schedule: of how many of the last heads
     * the longest work tiles are taken first; if lengths are on the device, how many heads take turns (taken_order.cuh). */
    int32_t balanced_heads, alternating_heads;
    /* With single work tiles: the counter of the dynamic schedule; below 0: the schedule is static. */
    int32_t counter;
    /* 1: all sequences have the same lengths, and there are less than 2^31 tasks. Then a work tile is described by what
     * the host knows: a block's first load waits for that. */
    int32_t uniform;
    fa_sm90_reach reach;
    fa_reciprocal by_tiles; /* query tiles of a head */
    fa_reciprocal by_heads; /* query heads */
    fa_reciprocal by_group; /* query heads of a key head */
    fa_reciprocal by_pairs; /* with causal pairs: those of a head, or of two */
    fa_sm90_split split;    /* of forward_sm90_split; other kernels do not read it */
} fa_sm90_params;

#endif
