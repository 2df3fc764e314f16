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
#if ELEMENT != FA_ELEMENT_FLOAT16 && ELEMENT != FA_ELEMENT_BFLOAT16
#error "forward_sm80: ELEMENT must be FA_ELEMENT_FLOAT16 or FA_ELEMENT_BFLOAT16"
#endif

enum {
    THREADS = FA_SM80_THREADS(WARPS),
    GROUPS = WARPS / SPLIT, /* of warps that share rows */
    M_TILES = GROUP_ROWS / 16,
    QUERIES = GROUPS * GROUP_ROWS,
    OWN_KEYS = KEYS / SPLIT,    /* of a key tile, whose scores a warp computes */
    COLUMNS = HEAD_DIM / SPLIT, /* of the output, which a warp computes */
    D_STEPS = HEAD_DIM / 16,    /* of mma along the head dim in Q K^T */
    D_TILES = COLUMNS / 8,      /* of 8 columns of the output */
    KEY_STEPS = KEYS / 16,      /* of mma along the keys in P V */
    KEY_TILES = OWN_KEYS / 8,   /* of 8 columns of the scores */
    KEY_BLOCKS = OWN_KEYS / 16, /* of 16 keys, which one ldmatrix loads */
    ROW_VECTORS = HEAD_DIM / 8, /* of 16 bytes */
    PITCH = FA_SM80_PITCH(HEAD_DIM, ELEMENT),
    TILE_BYTES = KEYS * PITCH,
    WEIGHTS_PITCH = FA_SM80_WEIGHTS_PITCH(KEYS, ELEMENT),
    SMEM_BYTES = FA_SM80_SMEM(ELEMENT, HEAD_DIM, WARPS, SPLIT, GROUP_ROWS, KEYS, STAGES, AHEAD),
    QUEUE_ENTRIES = 2 * AHEAD /* of the work-tile queue */
};
static_assert(SPLIT == 1 || GROUPS <= 15, "named barriers are numbered to 15");
static_assert(WARPS % SPLIT == 0 && OWN_KEYS % 16 == 0 && COLUMNS % 16 == 0, "whole fragments");
static_assert(KEYS % 32 == 0, "a block of dropout bits covers 32 keys");

/* For score_fragments.cuh. */
#define FRAGMENT_KEYS OWN_KEYS

/* Along the head dim: the fragments of Q of so many steps stay in registers. */
#ifndef REGISTER_STEPS
#define REGISTER_STEPS (OPTIONS ? 0 : HEAD_DIM == 64 ? 4 : HEAD_DIM == 256 ? 3 : 0)
#endif

/* Whether there are key tiles without a running max (softmax.cuh), and how many of a warp's keys are weighed at once
 * there. */
#define UNTRACKED (!OPTIONS && SPLIT <= 2)
#ifndef CHUNK_KEYS
#define CHUNK_KEYS (SPLIT > 1 ? OWN_KEYS : HEAD_DIM == 192 ? 16 : 32)
#endif
static_assert(!UNTRACKED || CHUNK_KEYS <= 32, "at most 8 weights a thread and row");

#endif
