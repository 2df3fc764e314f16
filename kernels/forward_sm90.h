/*
 * The shapes that forward_sm90 is compiled for, and what it is told besides fa_attention_params.
 * Shared by the kernel and the planner.
 *
 * A shape has a name, SHAPE in the kernel's definitions, and
 *   FA_SM90_DIM_<shape>        the widest head dim of queries and keys, a multiple of 16
 *   FA_SM90_DIM_V_<shape>      the same of values
 *   FA_SM90_CONSUMERS_<shape>  warpgroups that compute, 64 queries each; one more loads
 *   FA_SM90_KEYS_<shape>       keys of a tile, a multiple of 16: the more, the fewer barriers; the
 *                              fewer, the less is wasted at the end of a row. FA_SM90_STAGES tiles
 *                              of keys and as many of values fit into shared memory beside the
 *                              queries; scores, weights and outputs into the consumers' registers
 *   FA_SM90_SINGLE_TILES_<shape>  1: only for rows whose keys are one tile
 * The shapes called general are those of the kernels with every option; their tiles are multiples
 * of 32 keys, which is what a block of dropout bits covers.
 */
#ifndef FA_KERNEL_FORWARD_SM90_H
#define FA_KERNEL_FORWARD_SM90_H

#include <stdint.h>

#define FA_SM90_DIM_d64 64
#define FA_SM90_DIM_V_d64 64
#define FA_SM90_CONSUMERS_d64 3
#define FA_SM90_KEYS_d64 128
#define FA_SM90_STAGES_d64 4
#define FA_SM90_Q_PLACES_d64 2
#define FA_SM90_SINGLE_TILES_d64 0

/* For short rows, and those whose last 192 queries would be few. */
#define FA_SM90_DIM_d64_two 64
#define FA_SM90_DIM_V_d64_two 64
#define FA_SM90_CONSUMERS_d64_two 2
#define FA_SM90_KEYS_d64_two 128
#define FA_SM90_STAGES_d64_two 4
#define FA_SM90_Q_PLACES_d64_two 4
#define FA_SM90_SINGLE_TILES_d64_two 0

/* The same where no row has more than 128 keys. */
#define FA_SM90_DIM_d64_one 64
#define FA_SM90_DIM_V_d64_one 64
#define FA_SM90_CONSUMERS_d64_one 2
#define FA_SM90_KEYS_d64_one 128
#define FA_SM90_STAGES_d64_one 4
#define FA_SM90_Q_PLACES_d64_one 4
#define FA_SM90_SINGLE_TILES_d64_one 1

#define FA_SM90_DIM_d80 80
#define FA_SM90_DIM_V_d80 80
#define FA_SM90_CONSUMERS_d80 3
#define FA_SM90_KEYS_d80 96
#define FA_SM90_STAGES_d80 3
#define FA_SM90_Q_PLACES_d80 1
#define FA_SM90_SINGLE_TILES_d80 0

#define FA_SM90_DIM_d96 96
#define FA_SM90_DIM_V_d96 96
#define FA_SM90_CONSUMERS_d96 3
#define FA_SM90_KEYS_d96 80
#define FA_SM90_STAGES_d96 3
#define FA_SM90_Q_PLACES_d96 1
#define FA_SM90_SINGLE_TILES_d96 0

#define FA_SM90_DIM_d128 128
#define FA_SM90_DIM_V_d128 128
#define FA_SM90_CONSUMERS_d128 2
#define FA_SM90_KEYS_d128 128
#define FA_SM90_STAGES_d128 2
#define FA_SM90_Q_PLACES_d128 2
#define FA_SM90_SINGLE_TILES_d128 0

#define FA_SM90_DIM_d192_128 192
#define FA_SM90_DIM_V_d192_128 128
#define FA_SM90_CONSUMERS_d192_128 2
#define FA_SM90_KEYS_d192_128 128
#define FA_SM90_STAGES_d192_128 2
#define FA_SM90_Q_PLACES_d192_128 1
#define FA_SM90_SINGLE_TILES_d192_128 0

#define FA_SM90_DIM_d192 192
#define FA_SM90_DIM_V_d192 192
#define FA_SM90_CONSUMERS_d192 2
#define FA_SM90_KEYS_d192 96
#define FA_SM90_STAGES_d192 2
#define FA_SM90_Q_PLACES_d192 1
#define FA_SM90_SINGLE_TILES_d192 0

#define FA_SM90_DIM_d256 256
#define FA_SM90_DIM_V_d256 256
#define FA_SM90_CONSUMERS_d256 2
#define FA_SM90_KEYS_d256 80
#define FA_SM90_STAGES_d256 2
#define FA_SM90_Q_PLACES_d256 1
#define FA_SM90_SINGLE_TILES_d256 0

#define FA_SM90_DIM_general64 64
#define FA_SM90_DIM_V_general64 64
#define FA_SM90_CONSUMERS_general64 2
#define FA_SM90_KEYS_general64 128
#define FA_SM90_STAGES_general64 4
#define FA_SM90_Q_PLACES_general64 1
#define FA_SM90_SINGLE_TILES_general64 0

#define FA_SM90_DIM_general128 128
#define FA_SM90_DIM_V_general128 128
#define FA_SM90_CONSUMERS_general128 2
#define FA_SM90_KEYS_general128 128
#define FA_SM90_STAGES_general128 2
#define FA_SM90_Q_PLACES_general128 1
#define FA_SM90_SINGLE_TILES_general128 0

#define FA_SM90_DIM_general256 256
#define FA_SM90_DIM_V_general256 256
#define FA_SM90_CONSUMERS_general256 2
#define FA_SM90_KEYS_general256 64
#define FA_SM90_STAGES_general256 2
#define FA_SM90_Q_PLACES_general256 1
#define FA_SM90_SINGLE_TILES_general256 0

#define FA_SM90_LOOK_UP(field, shape) FA_SM90_##field##_##shape
#define FA_SM90_DIM(shape) FA_SM90_LOOK_UP(DIM, shape)
#define FA_SM90_DIM_V(shape) FA_SM90_LOOK_UP(DIM_V, shape)
#define FA_SM90_CONSUMERS(shape) FA_SM90_LOOK_UP(CONSUMERS, shape)
#define FA_SM90_KEYS(shape) FA_SM90_LOOK_UP(KEYS, shape)
#define FA_SM90_STAGES(shape) FA_SM90_LOOK_UP(STAGES, shape)
#define FA_SM90_Q_PLACES(shape) FA_SM90_LOOK_UP(Q_PLACES, shape)
#define FA_SM90_SINGLE_TILES(shape) FA_SM90_LOOK_UP(SINGLE_TILES, shape)

#define FA_SM90_QUERIES(shape) (64 * FA_SM90_CONSUMERS(shape)) /* of a piece of work */
#define FA_SM90_THREADS(shape) (128 * (1 + FA_SM90_CONSUMERS(shape)))

/* Options that change scores and weights. */
#define FA_SM90_SOFTCAP 1
#define FA_SM90_SCALED 2 /* a scale that scores are multiplied by on their own */
#define FA_SM90_ALIBI 4
#define FA_SM90_BIAS 8     /* one that the copy engine loads */
#define FA_SM90_BY_ROWS 16 /* a boolean mask, any other bias */
#define FA_SM90_DROPOUT 32
#define FA_SM90_ALL 63

/* Scores are in units of the scale or the softcap when they come to the softmax, which multiplies by it
 * anyway; but not of a scale so small that a bias in such units overflows, or below 0, which would turn
 * round what is the largest. */
#define FA_SM90_LEAST_SCALE 1e-6f

enum {
    FA_SM90_ALIGN = 32,         /* the first key of a piece is a multiple of it */
    FA_SM90_MOST_DEALERS = 160, /* blocks of a launch that deals pieces out */
    FA_SM90_MOST_DEALT = 64     /* of these pieces, so many a block */
};

/* Bytes of a row in shared memory: blocks of 64 columns. */
#define FA_SM90_ROW_BYTES(dim) (((dim) + 63) / 64 * 128)

/* Bytes through which a consumer's results go out, 64 columns at a time, where there is room. */
#define FA_SM90_STAGING(shape) (FA_SM90_DIM(shape) <= 192 ? FA_SM90_QUERIES(shape) * 128 : 0)

/* Pieces that are described ahead, as many as there is room for: an even number; bytes of each, at most. */
#define FA_SM90_SLOTS(shape)                                                                       \
    (FA_SM90_DIM(shape) > 192                                  ? 6                                 \
     : FA_SM90_DIM(shape) > 128 && FA_SM90_DIM_V(shape) <= 128 ? 4                                 \
                                                               : 16)
#define FA_SM90_SLOT 192

/* Bytes of dynamic shared memory for one place of queries, with room to align to 1024. */
#define FA_SM90_SMEM_LEAST(shape)                                                                  \
    (FA_SM90_QUERIES(shape) * FA_SM90_ROW_BYTES(FA_SM90_DIM(shape)) +                              \
     FA_SM90_STAGES(shape) * FA_SM90_KEYS(shape) *                                                 \
         (FA_SM90_ROW_BYTES(FA_SM90_DIM(shape)) + FA_SM90_ROW_BYTES(FA_SM90_DIM_V(shape))) +       \
     FA_SM90_STAGING(shape) + FA_SM90_SLOTS(shape) * FA_SM90_SLOT + 1024)

/* With more places, queries of the pieces ahead are there when they are needed: FA_SM90_Q_PLACES. */
#define FA_SM90_SMEM(shape)                                                                        \
    (FA_SM90_SMEM_LEAST(shape) + (FA_SM90_Q_PLACES(shape) - 1) * FA_SM90_QUERIES(shape) *          \
                                     FA_SM90_ROW_BYTES(FA_SM90_DIM(shape)))

/* The same of a kernel with a bias: a tile of it, in 16 bits, for each consumer, and one place of queries. */
#define FA_SM90_SMEM_BIAS(shape)                                                                   \
    (FA_SM90_SMEM_LEAST(shape) + FA_SM90_QUERIES(shape) * FA_SM90_KEYS(shape) * 2)

/* A map of the copy engine with the axes (dim, row, head, block), that is the axes (3, 1, 2, 0) of
 * the caller's tensors; boxes of 64 columns. */
typedef struct fa_sm90_map {
#ifdef __cplusplus
    alignas(64)
#else
    _Alignas(64)
#endif
        uint64_t opaque[16];
} fa_sm90_map;

/* What an index of a head or a block is multiplied by to be the map's: 0 for an axis that is
 * broadcast. */
typedef struct fa_sm90_steps {
    int32_t head, block;
} fa_sm90_steps;

/* Counters of an image, from which blocks draw pieces: one for launches that follow each other. */
#define FA_SM90_COUNTERS 16384

/* How blocks go through pieces: one by one; or those of a head in pairs of equal length under a causal mask,
 * the first and the last, the second and the last but one ... */
enum { FA_SM90_IN_ORDER, FA_SM90_PAIRS };

/* The kernel's second parameter. */
typedef struct fa_sm90_params {
    fa_sm90_map q, k, v; /* boxes of 64 rows of q, of as many of k and v as are loaded at once */
    fa_sm90_steps q_step, k_step, v_step;
    int32_t box_rows; /* rows of v's boxes; paged: of k's, too, a divisor of the page's rows */
    int32_t order;    /* FA_SM90_IN_ORDER ... */
    int64_t tasks;    /* pieces, or pairs of them */
    fa_sm90_map bias; /* with the axes (key, query, head, batch), boxes of 64 x 64 */
    fa_sm90_steps bias_step;
    int32_t bias_mapped; /* 0: it is read by its strides, or there is none */
    int32_t mixed;       /* FA_SM90_PAIRS: last heads, no part of tasks (forward_sm90/pieces.cuh) */
    int32_t counter; /* from which blocks draw their pieces, FA_SM90_IN_ORDER; below 0: from none */
} fa_sm90_params;

#endif
