/*
 * What the kernels on FMA units of backward and weights share beside simt.cuh: their shared memory, a product of
 * scores over all columns, and the sequence of a tile. The build defines OWN.
 */
#ifndef FA_KERNELS_COMMON_PASS_TILES_CUH
#define FA_KERNELS_COMMON_PASS_TILES_CUH

#include "common/pass_tiles.h"

#ifndef OWN
#error "common/pass_tiles.cuh: OWN is missing: a row of kernels/variants.h defines it"
#endif
#define OTHERS FA_PASS_OTHERS
#define CHUNK FA_PASS_CHUNK
#define RESULT_GROUPS (CHUNK / 32)

#include "common/simt.cuh"

static_assert(THREADS == FA_PASS_THREADS && PITCH == FA_PASS_PITCH && WEIGHTS_PITCH == PITCH,
              "as the planner counts shared memory");

/* The two operands of a product of scores. */
typedef struct fa_operands {
    fa_rows own, other;
} fa_operands;

/* Shared memory. Gradients replace the own rows once scores have been computed. */
typedef struct fa_shared {
    float *own;      /* OWN x CHUNK */
    float *other;    /* OTHERS x CHUNK */
    float *weights;  /* OWN x OTHERS */
    float4 *queries; /* of the tile: log-sum-exp, delta, first and last key that it sees + 1 */
    fa_operands *of; /* of dP and of S: registers are for the products */
    int *flags;      /* THREADS */
} fa_shared;

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
        add_scores(shared->own, shared->other, left < CHUNK ? left : CHUNK, scores);
    }
    return bad;
}

/* ---- Sequences ------------------------------------------------------------------------------- */

/* Sequence b and a query head: where its queries and keys are. The first query of the tile is not set. */
FA_DEVICE void fa_locate_sequence(const fa_attention_params *p, int64_t b, int64_t head, fa_tile *t)
{
    t->batch = b;
    t->head = head;
    t->head_kv = head / (p->heads_q / p->heads_kv);
    if (p->cu_seqlens_q) {
        t->block_q = 0;
        t->start_q = fa_packed_start(p, b + 1);
        t->first = 0;
        t->room_q = t->n_q = fa_max64(0, fa_packed_start(p, b + 2) - t->start_q);
        if (p->seqlens_q) t->n_q = fa_max64(0, fa_min64(p->seqlens_q[b], t->room_q));
    } else {
        fa_locate_padded(p, 0, 1, t);
    }
    fa_locate_keys(p, t);
    t->diagonal = p->diagonal_given ? p->diagonal : t->n_k - t->n_q;
}

#endif
