/*
 * What the kernels of backward_sm90 are told, and what follows from the numbers of a variant. Shared by the kernels
 * and the planner.
 *
 * Three launches, or four; a JOINED variant does what the three do in one (joined.cuh), behind one that clears its counters. `prepare` writes a query's log-sum-exp and delta, and zeros where the gradients of queries are to be
 * summed; `backward_sm90` computes all gradients; `finish` rounds those of the queries. Where few key
 * tiles keep few multiprocessors busy, blocks share one: each takes some of the query heads, and `finish_keys` adds up
 * what they leave of the gradients of keys and values, in one order. The workspace is made of query tiles
 * of FA_BACKWARD_SM90_QUERIES rows, the last one of a sequence padded. Tile i of a sequence has the number that
 * common/packed.h gives it, or i; the tiles of a head follow each other, then those of the next head.
 *
 *   sums   of a tile: a float for each query and column, in the order of the accumulators that hold them: of the
 *          columns' blocks of eight, the four words of each of the 128 threads that share one (store.cuh)
 *   rows   of a tile: of the queries the log-sum-exp in units of log 2 (infinity where weights are to be 0), then delta, each
 *          where FA_BACKWARD_SM90_ROW_AT says. Weights are 2^FA_BACKWARD_SM90_WEIGHT_BITS times as large as they should be: so
 *          the log-sum-exp is less these bits, and delta times 2^-bits
 *   key_sums   of a split, and of a block's keys: a float for each key and column of dK, then of dV; of 64 keys in the same
 *          order
 *   semaphores   of a tile, where sums have one order: for each consumer's columns how many key tiles have been added
 *   cleared   of a group of heads: how many blocks have cleared their shares of its sums
 *   left   of a 16-bit dbias that batch items or heads share: counters, and dS of the blocks that have left it
 */
#ifndef FA_KERNEL_BACKWARD_SM90_H
#define FA_KERNEL_BACKWARD_SM90_H

#include "../backward_simt/backward_simt.h"
#include "../forward_sm90/forward_sm90.h"

#define FA_BACKWARD_SM90_QUERIES 64 /* of a tile */
#define FA_BACKWARD_SM90_KEYS 128   /* of a block: two consumers with 64 each */
#define FA_BACKWARD_SM90_THREADS 384
/* With two, a consumer waits until the other one has read dS; head dim 128 has no room for three beside three stages, 192 none
 * beside two. */
#define FA_BACKWARD_SM90_DS_BUFFERS(dim, stages)                                                   \
    ((dim) > 128 || ((dim) > 64 && (stages) > 2) ? 2 : 3)
#define FA_BACKWARD_SM90_PASS_THREADS 256 /* of a block of prepare and finish */
#define FA_BACKWARD_SM90_SLICE_TILES 4    /* query tiles of a block of a JOINED variant's passes */

/* Whether options hide keys from queries that their positions do not hide: a boolean mask, or a bias of -infinity. */
#define FA_BACKWARD_SM90_HIDES(options) (((options) & (FA_SM90_BIAS | FA_SM90_BY_ROWS)) != 0)

/* Whether a variant has room for a tile of a bias in 16 bits, which TMA loads where it can. */
#define FA_BACKWARD_SM90_BIAS_TILE(dim, stages, options)                                           \
    (FA_BACKWARD_SM90_HIDES(options) && ((dim) <= 64 || (stages) <= 2))

#define FA_BACKWARD_SM90_SUM_BYTES(dim) (FA_BACKWARD_SM90_QUERIES * (dim)*4)
/* The buffer of dQ, of at most 128 columns at a time: also of dS in 32 bits. */
#define FA_BACKWARD_SM90_DQ_BYTES(dim, tile)                                                       \
    ((tile) ? FA_BACKWARD_SM90_QUERIES * FA_BACKWARD_SM90_KEYS * 4                                 \
            : FA_BACKWARD_SM90_SUM_BYTES((dim) > 128 ? 128 : (dim)))
#define FA_BACKWARD_SM90_ROW_BYTES (FA_BACKWARD_SM90_QUERIES * 8)
/* A thread's four of 16 queries, 2 (lane % 4) + {0, 1, 8, 9}, lie together. */
#define FA_BACKWARD_SM90_ROW_AT(q)                                                                 \
    (((q) & ~15) | ((q) >> 1 & 3) << 2 | ((q) >> 3 & 1) << 1 | ((q)&1))
/* In float16 weights below 2^-14 would lose bits. */
#define FA_BACKWARD_SM90_WEIGHT_BITS(element) ((element) == FA_ELEMENT_FLOAT16 ? 10 : 0)
/* Floats that a block leaves of its keys. */
#define FA_BACKWARD_SM90_KEY_SUMS(keys, dim, value_dim) ((keys) * ((dim) + (value_dim)))
#define FA_BACKWARD_SM90_SEMAPHORES 2 /* of a tile, 4 bytes each */

/* What a block aligns its buffers with. Static memory is in front of dynamic memory, which a
 * persistent variant counts on. */
#define FA_BACKWARD_SM90_PADDING(persistent) ((persistent) ? 768 : 1024)

/* Bytes of dynamic shared memory, with room to align to 1024: keys and values; stages of queries,
 * of dout and of their rows; buffers of dS; of dQ (0: one); one of a bias. */
#define FA_BACKWARD_SM90_SMEM(element, dim, value_dim, stages, options, dq_buffers, persistent)    \
    ((FA_BACKWARD_SM90_KEYS + (stages)*FA_BACKWARD_SM90_QUERIES) *                                 \
         (FA_SM90_ROW_BYTES(dim, element) + FA_SM90_ROW_BYTES(value_dim, element)) +               \
     (stages)*FA_BACKWARD_SM90_ROW_BYTES +                                                         \
     FA_BACKWARD_SM90_DS_BUFFERS(dim, stages) * FA_BACKWARD_SM90_QUERIES * FA_BACKWARD_SM90_KEYS * \
         FA_ELEMENT_BYTES(element) +                                                               \
     ((dq_buffers) ? (dq_buffers) : 1) *                                                           \
         FA_BACKWARD_SM90_DQ_BYTES(dim, FA_BACKWARD_SM90_BIAS_TILE(dim, stages, options)) +        \
     FA_BACKWARD_SM90_BIAS_TILE(dim, stages, options) * FA_BACKWARD_SM90_QUERIES *                 \
         FA_BACKWARD_SM90_KEYS * 2 +                                                               \
     FA_BACKWARD_SM90_PADDING(persistent))

/* Whether blocks clear sums of dQ for later ones, where the planner asks for it (clear_ahead.cuh). */
#define FA_BACKWARD_SM90_CLEARS_AHEAD(ordered, options, joined)                                    \
    (!(ordered) && !(options) && !(joined))

/* Who makes dbias: threads by its strides, or TMA, from dS in 16 bits as products take it, or in 32 bits. LEFT: dS in 16 bits is left
 * in the workspace, and added up there (dbias_sums.cuh). */
enum {
    FA_BACKWARD_SM90_DBIAS_BY_STRIDES,
    FA_BACKWARD_SM90_DBIAS_STORED,
    FA_BACKWARD_SM90_DBIAS_LEFT,
    FA_BACKWARD_SM90_DBIAS_STORED_FLOATS,
    FA_BACKWARD_SM90_DBIAS_ADDED
};

/* Where blocks leave dS (dbias_sums.cuh). A unit is `blocks` blocks that follow each other: those of the same keys whose shares of
 * dbias are added up. */
typedef struct fa_backward_sm90_left {
    char *ds;          /* of `room` units: of each block, head and query tile a tile of dS */
    int32_t *counters; /* two of each unit: store warps that have left all of theirs; whether all is
                          added up */
    int32_t units, room, blocks;
    int32_t summed; /* units that the last of their blocks add up; the others: dbias.cu */
} fa_backward_sm90_left;

/* The second parameter of all of them. */
typedef struct fa_backward_sm90_params {
    fa_sm90_map q, k, v, dout; /* boxes of 64 rows of q and dout, of 128 of k and v */
    fa_sm90_steps q_step, k_step, v_step, dout_step;
    int64_t q_tiles; /* of a head */
    float *sums;
    float *rows;
    int32_t *semaphores; /* NULL: sums are added in any order */
    int64_t
        heads_together; /* key/value heads of the batch whose blocks take turns; 1: head follows head */
    int32_t
        splits; /* blocks that share the keys of a key/value head, each with some of the query heads */
    int32_t keys, head_dim, value_dim; /* of a block; columns of its sums */
    float *key_sums;                   /* NULL: there is one split */
    fa_sm90_map bias, dbias; /* with the axes (key, query, head, batch), boxes of 64 x 64 */
    fa_sm90_steps bias_step, dbias_step;
    int32_t bias_mapped;     /* 0: it is read by its strides, or there is none */
    int32_t dbias_mapped;    /* FA_BACKWARD_SM90_DBIAS_...; the map of sums is in dbias as well */
    int32_t items_together;  /* all batch items, if their blocks take turns; 1: item follows item */
    int64_t heads_ascending; /* the first so many heads have blocks that ascend (work.cuh) */
    int32_t first_stored;    /* a query tile's first key tile stores its dQ; 0: all add theirs */
    uint32_t *next_work;     /* work tiles that persistent blocks have taken; NULL: every so many */
    /* Of a JOINED variant (joined.cuh), whose blocks are of three kinds. A unit is a key/value head
     * of a batch item with its query heads, or a split of it. */
    int32_t *counters; /* two of each unit: its slices whose rows are there; store warps that have
                          added all of theirs */
    int32_t units, units_together; /* all; those whose blocks follow each other */
    int32_t unit_heads;            /* query heads of a unit */
    int32_t slices, head_slices;   /* blocks for the rows of a unit; of a query head */
    float *delta; /* of prepare: like lse, for launches behind; NULL: nobody wants it */
    fa_backward_sm90_left left; /* units 0: no dS is left */
    /* Sums that blocks clear for later ones (clear_ahead.cuh): of a group, which is heads_together heads, or of fewer if it is the
     * last one. */
    int32_t *
        cleared; /* of each group: blocks that have cleared their shares; NULL: prepare clears all */
    int32_t groups, groups_ahead;
    int32_t group_blocks, group_tiles; /* of a group: blocks; tiles of sums */
    int32_t sum_tiles, prepared_tiles; /* all; those that prepare clears, the first ones */
} fa_backward_sm90_params;

#endif
