/*
 * Code that the kernels on FMA units of backward and weights share in addition to simt.cuh: their shared memory, a
 * product of scores over all columns, and the sequence of a tile. The build defines OWN.
 */
#ifndef FA_KERNELS_COMMON_PASS_TILES_CUH
#define FA_KERNELS_COMMON_PASS_TILES_CUH

#include "common/pass_tiles.h"

#ifndef OWN
#error "common/pass_tiles.cuh: OWN is missing: a row of kernels/variants.h defines it"
#endif
#define HAS_ATTENTION_CHUNKS 1
#define OTHERS FA_PASS_OTHERS
#define CHUNK FA_PASS_CHUNK

#include "common/simt.cuh"

static_assert(THREADS == FA_PASS_THREADS && PITCH == FA_PASS_PITCH && WEIGHTS_PITCH == PITCH,
              "as the planner counts shared memory");

/* The two operands of a product of scores. */
typedef struct fa_operands {
    fa_rows own, other;
} fa_operands;

FA_DEVICE fa_shared fa_shared_of(float *memory)
{
    fa_shared s;
    s.own = memory;
    s.other = s.own + OWN * PITCH;
    s.weights = s.other + OTHERS * PITCH;
    s.queries = (float4 *)(void *)(s.weights + OWN * PITCH);
    s.of = (fa_operands *)(void *)(s.queries + OTHERS);
    s.flags = (int *)(void *)((char *)s.of + FA_PASS_OPERANDS);
    return s;
}

#include "common/simt_scores.cuh"

/* scores = own other^T. The last chunk of the other rows stays in shared memory; returns whether
 * something in it is not finite. */
FA_DEVICE bool make_scores(const fa_attention_params *p, const fa_tile *t, const fa_shared *shared,
                           const fa_operands *of, float scores[ROWS][COLUMNS])
{
    bool bad = false;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) scores[r][c] = 0.0f;
#pragma unroll 1
    for (int column = 0; column < of->own.columns; column += CHUNK) {
        const int left = of->own.columns - column;
        float seen = 0.0f;
        __syncthreads(); /* the buffers have been used */
#pragma unroll 1
        for (int side = 0; side < 2; side++)
            seen = load_rows(p, t, side ? &of->other : &of->own, side ? OTHERS : OWN,
                             side ? shared->other : shared->own, column);
        bad = __syncthreads_or(seen != 0.0f) != 0;
        add_scores(shared, left < CHUNK ? left : CHUNK, scores);
    }
    return bad;
}

/* ---- Sequences ------------------------------------------------------------------------------- */

#endif
