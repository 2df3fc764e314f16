/*
 * The numbers of a variant (kernels/variants.h), which forward_simt.h explains, and constants that
 * follow from them.
 */
#ifndef FA_KERNELS_FORWARD_SIMT_CONFIG_CUH
#define FA_KERNELS_FORWARD_SIMT_CONFIG_CUH

#include "forward_simt/forward_simt.h"

#if !defined(HEAD_DIM) || !defined(KEYS) || !defined(CHUNK) || !defined(ROWS)
#error                                                                                             \
    "forward_simt: HEAD_DIM, KEYS, CHUNK or ROWS is missing: a row of kernels/variants.h defines them"
#endif

#define HAS_INT8 1 /* keys and values */

/* For common/simt.cuh: own rows are queries, the others keys and values. */
#define OWN FA_SIMT_QUERIES(ROWS)
#define OTHERS KEYS

enum {
    CHUNKS = HEAD_DIM / CHUNK,
    QUERIES = OWN /* of a work tile */
};

/* If three blocks share a multiprocessor, there are not enough registers for a tile's sums of all
 * columns. */
#if HEAD_DIM == 128
#define PART_GROUPS 2
#define CHAIN_STEPS 1
#endif

/* Blocks of a multiprocessor, at least, which limits the registers: three, if shared memory is
 * large enough. */
#if HEAD_DIM == 64 || (HEAD_DIM == 128 && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900)
#define BLOCKS 3
#else
#define BLOCKS 2
#endif

#endif
