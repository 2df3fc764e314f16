/*
 * The shapes that forward_sm90_wide is compiled for. Its second parameter is forward_sm90's. Shared by the
 * kernel and the planner.
 *
 * A shape has a name, SHAPE in the kernel's definitions, and
 *   FA_SM90_WIDE_DIM_<shape>    the widest head dim of queries, keys and values, a multiple of 64
 *   FA_SM90_WIDE_CHUNK_<shape>  bytes of a place for a chunk of keys or values
 *   FA_SM90_WIDE_STAGES_<shape> such places. Chunks of keys are whole blocks of 64 columns of the 64 keys
 *                               that a block takes of a tile
 *   FA_SM90_WIDE_V_ROWS_<shape> rows of a chunk of values, of the columns that are a block's
 */
#ifndef FA_KERNEL_FORWARD_SM90_WIDE_H
#define FA_KERNEL_FORWARD_SM90_WIDE_H

#include "forward_sm90.h"

#define FA_SM90_WIDE_DIM_d320 320
#define FA_SM90_WIDE_CHUNK_d320 24576
#define FA_SM90_WIDE_STAGES_d320 4
#define FA_SM90_WIDE_V_ROWS_d320 64

#define FA_SM90_WIDE_DIM_d384 384
#define FA_SM90_WIDE_CHUNK_d384 24576
#define FA_SM90_WIDE_STAGES_d384 4
#define FA_SM90_WIDE_V_ROWS_d384 64

#define FA_SM90_WIDE_DIM_d512 512
#define FA_SM90_WIDE_CHUNK_d512 16384
#define FA_SM90_WIDE_STAGES_d512 4
#define FA_SM90_WIDE_V_ROWS_d512 32

#define FA_SM90_WIDE_LOOK_UP(field, shape) FA_SM90_WIDE_##field##_##shape
#define FA_SM90_WIDE_DIM(shape) FA_SM90_WIDE_LOOK_UP(DIM, shape)
#define FA_SM90_WIDE_CHUNK(shape) FA_SM90_WIDE_LOOK_UP(CHUNK, shape)
#define FA_SM90_WIDE_STAGES(shape) FA_SM90_WIDE_LOOK_UP(STAGES, shape)
#define FA_SM90_WIDE_V_ROWS(shape) FA_SM90_WIDE_LOOK_UP(V_ROWS, shape)

enum {
    FA_SM90_WIDE_CLUSTER = 2,   /* blocks that share a piece of work */
    FA_SM90_WIDE_CONSUMERS = 2, /* warpgroups that compute, 64 queries each */
    FA_SM90_WIDE_QUERIES = 64 * FA_SM90_WIDE_CONSUMERS,
    FA_SM90_WIDE_KEYS = 128, /* of a tile: each block finds the weights of half of them */
    FA_SM90_WIDE_THREADS = 128 * (1 + FA_SM90_WIDE_CONSUMERS),
    /* What the blocks of a cluster send each other: two numbers for each query. */
    FA_SM90_WIDE_EXCHANGE = 2 * FA_SM90_WIDE_QUERIES * 4,
};

/* Bytes of the value columns of a block in a row of shared memory. */
#define FA_SM90_WIDE_V_BYTES(shape) FA_SM90_ROW_BYTES(FA_SM90_WIDE_DIM(shape) / 2)

/* Bytes of dynamic shared memory, with room to align to 1024: queries, chunks, weights, exchange. */
#define FA_SM90_WIDE_SMEM(shape)                                                                   \
    (FA_SM90_WIDE_QUERIES * FA_SM90_ROW_BYTES(FA_SM90_WIDE_DIM(shape)) +                           \
     FA_SM90_WIDE_STAGES(shape) * FA_SM90_WIDE_CHUNK(shape) +                                      \
     FA_SM90_WIDE_QUERIES * FA_SM90_WIDE_KEYS * 2 + FA_SM90_WIDE_EXCHANGE + 1024)

#endif
