/*
 * Scores and outputs of a warp, as mma returns them. Shared with decode_sm90 for 8-bit caches.
 */
#ifndef FA_KERNELS_DECODE_SM80_FRAGMENTS_CUH
#define FA_KERNELS_DECODE_SM80_FRAGMENTS_CUH

#include "decode_sm80/config.cuh"

/* The row of the work tile of elements 2 * half and 2 * half + 1 of tile m. */
FA_DEVICE int row_of(int m, int half) { return 16 * m + 8 * half + lane_id() / 4; }

/* S as mma returns it: with g = lane / 4 and t = lane % 4, keys 8n + 2t and 8n + 2t + 1 of row
 * 16m + g + 8h are in [m][n][2h] and [m][n][2h + 1]. */
typedef struct fa_scores {
    float at[M_TILES][KEY_TILES][4];
} fa_scores;

/* O in the same order. With 8-bit values it is transposed: columns 16n + 2g and 16n + 2g + 1 of row
 * 8i + 2t are in [i][n][0] and [i][n][2], those of row 8i + 2t + 1 in [i][n][1] and [i][n][3]. */
typedef struct fa_output {
#if EIGHT_BITS
    float at[2 * M_TILES][D_STEPS][4];
#else
    float at[M_TILES][D_TILES][4];
#endif
    float base[M_TILES][2]; /* of the weights, in powers of two */
    float sum[M_TILES][2];  /* of the thread's own columns */
} fa_output;

#endif
