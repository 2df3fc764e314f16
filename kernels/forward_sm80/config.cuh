/*
 * The numbers of a variant (kernels/variants.h) and what follows from them. forward_sm80.h says what the numbers are.
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

/* Operands are float32 in memory. What differs from 16 bits: how values are loaded, and with them which columns of the
 * output a thread has (layout.cuh), that operands are rounded (multiply.cuh), and that all key tiles are tracked
 * (softmax.cuh). */
#define TF32 (ELEMENT == FA_ELEMENT_TF32 || ELEMENT == FA_ELEMENT_TF32X3)

/* Each operand is the sum of two tf32 numbers, and a product three of theirs (multiply.cuh). */
#define THREE_PRODUCTS (ELEMENT == FA_ELEMENT_TF32X3)

enum {
    ELEMENT_BYTES = FA_ELEMENT_BYTES(ELEMENT),
    VECTOR = 16 / ELEMENT_BYTES, /* elements that are copied at once */
    STEP = 32 / ELEMENT_BYTES,   /* elements of an mma step, along the head dim or the keys */
    VALUE_TILES = TF32 ? 4 : 2,  /* of 8 columns, whose values are loaded at once */
    THREADS = FA_SM80_THREADS(WARPS),
    GROUPS = WARPS / SPLIT, /* of warps that share rows */
    M_TILES = GROUP_ROWS / 16,
    QUERIES = GROUPS * GROUP_ROWS,
    OWN_KEYS = KEYS / SPLIT,         /* of a key tile, whose scores a warp computes */
    COLUMNS = HEAD_DIM / SPLIT,      /* of the output, which a warp computes */
    D_STEPS = HEAD_DIM / STEP,       /* of mma along the head dim in Q K^T */
    D_TILES = COLUMNS / 8,           /* of 8 columns of the output */
    KEY_STEPS = KEYS / STEP,         /* of mma along the keys in P V */
    KEY_TILES = OWN_KEYS / 8,        /* of 8 columns of the scores */
    KEY_BLOCKS = OWN_KEYS / 16,      /* of 16 keys, which one ldmatrix loads */
    ROW_VECTORS = HEAD_DIM / VECTOR, /* of 16 bytes */
    PITCH = FA_SM80_PITCH(HEAD_DIM, ELEMENT),
    TILE_BYTES = KEYS * PITCH,
    WEIGHTS_PITCH = FA_SM80_WEIGHTS_PITCH(KEYS, ELEMENT),
    SMEM_BYTES = FA_SM80_SMEM(ELEMENT, HEAD_DIM, WARPS, SPLIT, GROUP_ROWS, KEYS, STAGES, AHEAD),
    QUEUE_ENTRIES = 2 * AHEAD /* of the work-tile queue */
};
static_assert(SPLIT == 1 || GROUPS <= 15, "named barriers are numbered to 15");
static_assert(WARPS % SPLIT == 0 && OWN_KEYS % 16 == 0 && COLUMNS % (8 * VALUE_TILES) == 0,
              "whole fragments");
static_assert(KEYS % 32 == 0, "a block of dropout bits covers 32 keys");

/* For score_fragments.cuh. */
#define FRAGMENT_KEYS OWN_KEYS

/* Along the head dim: the fragments of Q of so many steps stay in registers. */
#ifndef REGISTER_STEPS
#define REGISTER_STEPS (OPTIONS || TF32 ? 0 : HEAD_DIM == 64 ? 4 : HEAD_DIM == 256 ? 3 : 0)
#endif

/* Whether there is a loop of plain key tiles, whether they may do without a running max (softmax.cuh), and how many of a
 * warp's keys are weighed at once there. */
#define PLAIN_LOOP (!OPTIONS && SPLIT <= 2)
#define UNTRACKED (PLAIN_LOOP && !TF32)
#ifndef CHUNK_KEYS
#define CHUNK_KEYS (SPLIT > 1 || THREE_PRODUCTS ? OWN_KEYS : HEAD_DIM == 192 || TF32 ? 16 : 32)
#endif
static_assert(!UNTRACKED || CHUNK_KEYS <= 32, "at most 8 weights a thread and row");

#endif
