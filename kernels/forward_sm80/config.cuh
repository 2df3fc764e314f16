/*
 * The numbers of a variant (kernels/variants.h), which forward_sm80.h explains, and constants that
 * follow from them.
 */
#ifndef FA_KERNELS_FORWARD_SM80_CONFIG_CUH
#define FA_KERNELS_FORWARD_SM80_CONFIG_CUH

#include "common/dialect.h"
#include "common/element.h"
#include "forward_sm80/forward_sm80.h"

#if !defined(ARCHITECTURE) || !defined(ELEMENT) || !defined(HEAD_DIM) || !defined(OPTIONS)
#error                                                                                             \
    "forward_sm80: ARCHITECTURE, ELEMENT, HEAD_DIM or OPTIONS is missing: a row of kernels/variants.h defines them"
#endif
#if !defined(WARPS) || !defined(SPLIT) || !defined(GROUP_ROWS) || !defined(KEYS)
#error                                                                                             \
    "forward_sm80: WARPS, SPLIT, GROUP_ROWS or KEYS is missing: a row of kernels/variants.h defines them"
#endif
#if !defined(STAGES) || !defined(BLOCKS) || !defined(AHEAD)
#error "forward_sm80: STAGES, BLOCKS or AHEAD is missing: a row of kernels/variants.h defines them"
#endif
#if ELEMENT != FA_ELEMENT_FLOAT16 && ELEMENT != FA_ELEMENT_BFLOAT16 &&                             \
    ELEMENT != FA_ELEMENT_TF32 && ELEMENT != FA_ELEMENT_TF32X3
#error                                                                                             \
    "forward_sm80: ELEMENT must be FA_ELEMENT_FLOAT16, FA_ELEMENT_BFLOAT16, FA_ELEMENT_TF32 or FA_ELEMENT_TF32X3"
#endif

/* 1: forward_sm80_split, whose tasks have a part of the keys (split.h). May be left out. */
#ifndef SPLIT_KEYS
#define SPLIT_KEYS 0
#endif

/* Operands are float32 in memory. Differences from 16 bits: how values are loaded, and so which
 * columns of the output a thread has (layout.cuh); operands are rounded (multiply.cuh); all key
 * tiles are tracked (softmax.cuh). */
#define TF32 (ELEMENT == FA_ELEMENT_TF32 || ELEMENT == FA_ELEMENT_TF32X3)

/* Each operand is the sum of two tf32 numbers, and a product is computed by three products of these
 * (multiply.cuh). */
#define THREE_PRODUCTS (ELEMENT == FA_ELEMENT_TF32X3)

enum {
    ELEMENT_BYTES = FA_ELEMENT_BYTES(ELEMENT),
    VECTOR = 16 / ELEMENT_BYTES, /* elements that are copied at once */
    STEP = 32 / ELEMENT_BYTES,   /* elements of an mma step, along the head dim or the keys */
    VALUE_TILES = TF32 ? 4 : 2,  /* tiles of 8 columns, whose values are loaded at once */
    THREADS = FA_SM80_THREADS(WARPS),
    GROUPS = WARPS / SPLIT, /* groups of warps that share rows */
    M_TILES = GROUP_ROWS / 16,
    QUERIES = GROUPS * GROUP_ROWS,
    OWN_KEYS = KEYS / SPLIT,         /* keys of a key tile for which a warp computes scores */
    COLUMNS = HEAD_DIM / SPLIT,      /* columns of the output that a warp computes */
    D_STEPS = HEAD_DIM / STEP,       /* mma steps along the head dim in Q K^T */
    D_TILES = COLUMNS / 8,           /* of 8 columns of the output */
    KEY_STEPS = KEYS / STEP,         /* mma steps along the keys in P V */
    KEY_TILES = OWN_KEYS / 8,        /* of 8 columns of the scores */
    KEY_BLOCKS = OWN_KEYS / 16,      /* blocks of 16 keys, each loaded by one ldmatrix */
    ROW_VECTORS = HEAD_DIM / VECTOR, /* of 16 bytes */
    PITCH = FA_SM80_PITCH(HEAD_DIM, ELEMENT),
    TILE_BYTES = KEYS * PITCH,
    WEIGHTS_PITCH = FA_SM80_WEIGHTS_PITCH(KEYS, ELEMENT),
    SMEM_BYTES = FA_SM80_SMEM(ELEMENT, HEAD_DIM, WARPS, SPLIT, GROUP_ROWS, KEYS, STAGES, AHEAD),
    QUEUE_ENTRIES = 2 * AHEAD /* of the work-tile queue */
};
static_assert(!SPLIT_KEYS || !OPTIONS, "parts need no options: planners refuse them");
static_assert(SPLIT == 1 || GROUPS <= 15, "named barriers are numbered to 15");
static_assert(WARPS % SPLIT == 0 && OWN_KEYS % 16 == 0 && COLUMNS % (8 * VALUE_TILES) == 0,
              "whole fragments");
static_assert(KEYS % 32 == 0, "a block of dropout bits covers 32 keys");

/* With one stage: whether a block's first values are copied with their keys, not while these are used. Parts are short, so
 * this latency counts. With 32 rows a warp it would cost registers. */
#define FIRST_TOGETHER (SPLIT_KEYS && STAGES == 1 && M_TILES == 1)

/* For score_fragments.cuh. */
#define FRAGMENT_KEYS OWN_KEYS

/* The fragments of Q of this many steps along the head dim stay in registers. */
#ifndef REGISTER_STEPS
#define REGISTER_STEPS (OPTIONS || TF32 ? 0 : HEAD_DIM == 64 ? 4 : HEAD_DIM == 256 ? 3 : 0)
#endif

/* Whether there is a loop for plain key tiles; whether they may do without a running max
 * (softmax.cuh); and for how many of a warp's keys weights are computed at once there. */
#define PLAIN_LOOP (!OPTIONS && SPLIT <= 2)
#define UNTRACKED (PLAIN_LOOP && !TF32)
#ifndef CHUNK_KEYS
#define CHUNK_KEYS (SPLIT > 1 || THREE_PRODUCTS ? OWN_KEYS : HEAD_DIM == 192 || TF32 ? 16 : 32)
#endif
static_assert(!UNTRACKED || CHUNK_KEYS <= 32, "at most 8 weights a thread and row");

#endif
