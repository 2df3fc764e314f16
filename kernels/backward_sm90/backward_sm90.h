/*
 * Parameters of the kernels of backward_sm90, and sizes that follow from the numbers of a variant.
 * The kernels and the planner share them.
 *
 * There are three or four launches. `prepare` writes each query's log-sum-exp and delta, and zeros
 * to the sums of the gradients of queries; `backward_sm90` computes all gradients; `finish` rounds
 * those of the queries. A JOINED variant does all three in one launch (joined.cuh), after a launch
 * that clears its counters. If there are too few key tiles to keep the multiprocessors busy,
 * several blocks share one: each takes some of the query heads, and `finish_keys` adds up their
 * sums of the gradients of keys and values, in one order. The workspace consists of query tiles of
 * FA_BACKWARD_SM90_QUERIES rows; the last tile of a sequence is padded. Tile i of a sequence has
 * the number that common/packed.h computes, or i; the tiles of a head are contiguous, and the next
 * head's tiles follow.
 *
 *   sums        of a tile: a float for each query and column, in the order of the accumulators:
 *               for each block of eight columns, the four words of each of the 128 threads that
 *               share it (store.cuh). If dQ is computed transposed: for each block of eight queries
 *   rows        of a tile: the log-sum-exp of the queries in units of log 2 (infinity if weights
 *               must be 0), then delta, both at the places of FA_BACKWARD_SM90_ROW_AT. Weights are
 *               computed 2^FA_BACKWARD_SM90_WEIGHT_BITS times as large. So these bits are
 *               subtracted from the log-sum-exp, and delta is multiplied by 2^-bits
 *   key_sums    of a split and a block's keys: a float for each key and column of dK, then of dV;
 *               for each 64 keys in the same order
 *   semaphores  of a tile, for each consumer's columns: how many key tiles have been added, if sums
 *               have one order (ORDERED variants with one block for the keys use the first one,
 *               for all columns). If the first block of a head runs ahead: of a sequence's last
 *               tile, how many shares this block has stored
 *   cleared     of a group of heads: how many blocks have cleared their shares of its sums
 *   left        of a 16-bit dbias that batch items or heads share: counters, and dS that blocks
 *               have left
 */
#ifndef FA_KERNEL_BACKWARD_SM90_H
#define FA_KERNEL_BACKWARD_SM90_H

#include "../backward_simt/backward_simt.h"
#include "../common/key_work.h"
#include "../forward_sm90/forward_sm90.h"

#define FA_BACKWARD_SM90_QUERIES 64 /* of a tile */
#define FA_BACKWARD_SM90_KEYS 128   /* of a block: two consumers with 64 each */
#define FA_BACKWARD_SM90_THREADS 384
/* With two buffers, a consumer waits until the other one has read dS. Three do not fit with three
 * stages at head dim 128, nor with two stages at head dim 192. */
#define FA_BACKWARD_SM90_DS_BUFFERS(dim, stages)                                                   \
    ((dim) > 128 || ((dim) > 64 && (stages) > 2) ? 2 : 3)
#define FA_BACKWARD_SM90_PASS_THREADS 256 /* of a block of prepare and finish */
#define FA_BACKWARD_SM90_CHAIN 8          /* most key tiles of a head of a CHAINED variant */
#define FA_BACKWARD_SM90_SLICE_TILES 4    /* query tiles of a block of a JOINED variant's passes */

/* Whether options hide keys from queries that their positions do not hide: a boolean mask, or a
 * bias of -infinity. */
#define FA_BACKWARD_SM90_HIDES(options) (((options) & (FA_SM90_BIAS | FA_SM90_BY_ROWS)) != 0)

/* Whether a variant has a buffer for a tile of a 16-bit bias, which TMA loads if the layout allows
 * it. */
#define FA_BACKWARD_SM90_BIAS_TILE(dim, stages, options)                                           \
    (FA_BACKWARD_SM90_HIDES(options) && ((dim) <= 64 || (stages) <= 2))

/* Tiles whose log-sum-exp and delta have room. */
#define FA_BACKWARD_SM90_ROW_SLOTS(dim, stages, chained) ((chained) ? (dim) > 64 ? 4 : 8 : (stages))

#define FA_BACKWARD_SM90_SUM_BYTES(dim) (FA_BACKWARD_SM90_QUERIES * (dim)*4)
/* The buffer of dQ, of at most 128 columns at a time. dS in 32 bits uses it too. */
#define FA_BACKWARD_SM90_DQ_BYTES(dim, tile)                                                       \
    ((tile) ? FA_BACKWARD_SM90_QUERIES * FA_BACKWARD_SM90_KEYS * 4                                 \
            : FA_BACKWARD_SM90_SUM_BYTES((dim) > 128 ? 128 : (dim)))
#define FA_BACKWARD_SM90_ROW_BYTES (FA_BACKWARD_SM90_QUERIES * 8)
/* A thread's four of 16 queries, 2 (lane % 4) + {0, 1, 8, 9}, are contiguous. */
#define FA_BACKWARD_SM90_ROW_AT(q)                                                                 \
    (((q) & ~15) | ((q) >> 1 & 3) << 2 | ((q) >> 3 & 1) << 1 | ((q)&1))
/* In float16, weights below 2^-14 would lose bits. */
#define FA_BACKWARD_SM90_WEIGHT_BITS(element) ((element) == FA_ELEMENT_FLOAT16 ? 10 : 0)
/* The number of floats that a block writes for its keys. */
#define FA_BACKWARD_SM90_KEY_SUMS(keys, dim, value_dim) ((keys) * ((dim) + (value_dim)))
/* Blocks of finish_keys for such keys: one for each 32 columns. */
#define FA_BACKWARD_SM90_KEY_SLICES(dim, value_dim) (((dim) + (value_dim)) / 32)
#define FA_BACKWARD_SM90_SEMAPHORES 2 /* of a tile, 4 bytes each */

/* The alignment of a block's buffers. Static shared memory comes before dynamic shared memory; a
 * persistent or chained variant relies on that, and one with dropout at head dim 128, which has no
 * other room for the bits that its warps exchange. */
#define FA_BACKWARD_SM90_RELIES(dim, options, persistent, chained)                                 \
    ((persistent) || (chained) || ((dim) == 128 && (options) == FA_SM90_DROPOUT))
#define FA_BACKWARD_SM90_PADDING(relies) ((relies) ? 512 : 1024)

/* Bytes of dynamic shared memory, with room to align to 1024: keys and values; stages of queries
 * and of dout; slots of their rows; buffers of dS; of dQ (0: one); one of a bias. */
#define FA_BACKWARD_SM90_SMEM(element, dim, value_dim, stages, slots, options, dq_buffers, relies) \
    ((FA_BACKWARD_SM90_KEYS + (stages)*FA_BACKWARD_SM90_QUERIES) *                                 \
         (FA_SM90_ROW_BYTES(dim, element) + FA_SM90_ROW_BYTES(value_dim, element)) +               \
     (slots)*FA_BACKWARD_SM90_ROW_BYTES +                                                          \
     FA_BACKWARD_SM90_DS_BUFFERS(dim, stages) * FA_BACKWARD_SM90_QUERIES * FA_BACKWARD_SM90_KEYS * \
         FA_ELEMENT_BYTES(element) +                                                               \
     ((dq_buffers) ? (dq_buffers) : 1) *                                                           \
         FA_BACKWARD_SM90_DQ_BYTES(dim, FA_BACKWARD_SM90_BIAS_TILE(dim, stages, options)) +        \
     FA_BACKWARD_SM90_BIAS_TILE(dim, stages, options) * FA_BACKWARD_SM90_QUERIES *                 \
         FA_BACKWARD_SM90_KEYS * 2 +                                                               \
     FA_BACKWARD_SM90_PADDING(relies))

/* Whether blocks clear sums of dQ for later ones, if the planner asks for it (clear_ahead.cuh). */
#define FA_BACKWARD_SM90_CLEARS_AHEAD(ordered, options, joined)                                    \
    (!(ordered) && !(options) && !(joined))

/* How dbias is stored: by threads, using its strides, or by TMA, from dS in 16 bits (as products
 * read it) or in 32 bits. LEFT: dS in 16 bits is left in the workspace and added up there
 * (dbias_sums.cuh). */
enum {
    FA_BACKWARD_SM90_DBIAS_BY_STRIDES,
    FA_BACKWARD_SM90_DBIAS_STORED,
    FA_BACKWARD_SM90_DBIAS_LEFT,
    FA_BACKWARD_SM90_DBIAS_STORED_FLOATS,
    FA_BACKWARD_SM90_DBIAS_ADDED
};

/* Where blocks leave dS (dbias_sums.cuh). A unit is `blocks` consecutive blocks: those of the same
 * keys whose shares of dbias are added up. */
typedef struct fa_backward_sm90_left {
    char *ds; /* of `room` units: for each block, head and query tile, a tile of dS */
    /* Two counters for each unit: store warps that have left all their dS; whether all of it has
       been added up. */
    int32_t *counters;
    int32_t units, room, blocks;
    /* The number of units that the last of their blocks adds up; dbias.cu adds up the others. */
    int32_t summed;
} fa_backward_sm90_left;

/* Groups of heads whose units pass sums on. */
typedef struct fa_backward_sm90_left_groups {
    float *sums;          /* for each key tile and query tile; of the group at the moment */
    int32_t count, units; /* of those that share elements, 1: nothing is passed on; of each group */
} fa_backward_sm90_left_groups;

/* The second parameter of all of these kernels. */
typedef struct fa_backward_sm90_params {
    fa_sm90_map q, k, v, dout; /* boxes of 64 rows of q and dout, of 128 of k and v */
    fa_sm90_steps q_step, k_step, v_step, dout_step;
    int64_t q_tiles; /* of a head */
    float *sums;
    float *rows;
    int32_t *semaphores; /* NULL: no block waits for another one's shares of dQ */
    int64_t
        heads_together; /* key/value heads whose blocks take turns; 1: one head after the other */
    int32_t
        splits; /* blocks that share a key/value head's keys, each with some of the query heads */
    int32_t keys, head_dim, value_dim; /* of a block; columns of its sums */
    float *key_sums;                   /* NULL: there is one split */
    fa_sm90_map bias; /* with the axes (key, query, head, batch), boxes of 64 x 64 */
    union {
        fa_sm90_map dbias; /* the same */
        fa_sm90_map dq;    /* of a SINGLE_TILES variant; boxes of the rows that a consumer has */
    };
    fa_sm90_steps bias_step, dbias_step;
    int32_t bias_mapped;  /* 0: it is read by its strides, or there is none */
    int32_t dbias_mapped; /* FA_BACKWARD_SM90_DBIAS_...; the map of sums is in dbias as well */
    /* All batch items, if their blocks take turns; 1: one item after the other. */
    int32_t items_together;
    int64_t heads_ascending; /* the number of first heads whose blocks ascend (work.cuh) */
    /* A query tile's first key tile stores its dQ, so that the sums need no zeros; 0: all key tiles
     * add theirs. */
    int32_t first_stored;
    /* The same where sums have any order: a head's first block stores its shares, from the last
     * query tile to the first one, and runs ahead of the head's other blocks. */
    int32_t first_ahead;
    /* Work tiles that persistent blocks have taken; NULL: block b takes work
     * tiles b, b + grid, and so on. */
    uint32_t *next_work;
    /* For a JOINED variant (joined.cuh), which has blocks of three kinds. A unit is a key/value
     * head of a batch item with its query heads, or a split of it. It has two counters: slices
     * whose rows have been prepared; store warps that have added all their dQ. */
    int32_t *counters;
    int32_t units, units_together; /* all; those whose blocks are consecutive */
    int32_t unit_heads;            /* query heads of a unit */
    int32_t slices, head_slices;   /* blocks for the rows of a unit; of a query head */
    /* From prepare: like lse, for later launches; NULL: not needed. */
    float *delta;
    fa_backward_sm90_left left; /* 0 units: no dS is left */
    /* Sums that blocks clear for later ones (clear_ahead.cuh), by groups of heads_together heads;
     * the last group may have fewer. cleared: for each group, how many blocks have cleared their
     * shares; NULL: prepare clears all. */
    int32_t *cleared;
    int32_t groups, groups_ahead;
    int32_t group_blocks, group_tiles; /* of a group: blocks; tiles of sums */
    int32_t sum_tiles, prepared_tiles; /* all; the first ones, which prepare clears */
    int32_t sums_transposed;           /* sums are in the order of DQ_TRANSPOSED */
    int64_t ascending_together;        /* of heads_ascending: those whose blocks take turns */
    int32_t counts_pairs; /* where sums have one order: two tiles of dQ are counted together */
    /* A persistent block takes its next work tile when so many query tiles, or fewer, of the one
     * before have not been loaded. */
    int32_t tiles_ahead;
    fa_key_divisors divisors;
    fa_uniform_lengths uniform;
    fa_turns ascending;
    fa_reciprocal by_items; /* by items_together */
    int64_t item_tasks;     /* tasks of an item */
    /* Blocks that share a head's queries (QUERY_PARTS in config.cuh). The number of a split is that
     * of its query heads times these, plus that of its queries. */
    int32_t query_parts;
    /* Of a CHAINED variant: its blocks do what `prepare` does. */
    int32_t prepares;
    fa_backward_sm90_left_groups left_groups;
} fa_backward_sm90_params;

#endif
