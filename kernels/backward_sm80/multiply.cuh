/*
 * The five products of a tile. A warp's scores are transposed: its keys are the rows, its queries
 * the columns. So weights and dS are already in the registers that dV and dK read. Only what other
 * warps read goes to shared memory.
 *
 *     S^T  = K Q^T    dP^T = V dO^T    if warps share these: slices.cuh
 *     dV  += P^T dO   dK  += dS^T Q    the warp's share of the columns; weights of the other
 *                                      queries from shared memory
 *     dQ   = dS K                      from all keys, the warp's rows and columns
 */
#ifndef FA_KERNELS_BACKWARD_SM80_MULTIPLY_CUH
#define FA_KERNELS_BACKWARD_SM80_MULTIPLY_CUH

#include "backward_sm80/layout.cuh"
#include "common/mma.cuh"
#include "ptx/ldmatrix.cuh"

typedef enum score_kind { SCORES, DP } score_kind;

/* As mma returns them: with g = lane / 4 and t = lane % 4, queries 8n + 2t + i of key 16m + g + 8r
 * are in [m][n][2r + i]. */
typedef struct fa_scores {
    float at[WEIGHT_M_TILES][WEIGHT_N_TILES][4];
} fa_scores;

/* The same, of the keys and queries whose products the warp computes. If warps share products,
 * these are parts of the scores of several warps. */
#if SHARED_SCORES
typedef struct fa_score_sums {
    float at[M_TILES][N_TILES][4];
} fa_score_sums;
#else
typedef fa_scores fa_score_sums;
#endif

/* The same in 16 bits: [m][n][r] is an x2. Two neighbours along n are an A fragment. In float32,
 * query 8n + 2t + i is in [2i + r]. */
typedef struct fa_weights {
    uint32_t at[WEIGHT_M_TILES][WEIGHT_N_TILES][HIGH_LOW ? 4 : 2];
} fa_weights;

/* dK or dV: columns 8n + 2t + i of the warp's share, of the same keys. In float32, column 32b + 4
 * gradient_unit(t, i) + c is in [m][4b + c][2r + i]: a thread has two vectors of 32. The same holds
 * for dQ. */
typedef struct fa_gradient {
    float at[M_TILES][D_TILES][4];
} fa_gradient;

typedef struct fa_dq {
    float at[DQ_M_TILES][DQ_N_TILES][4];
} fa_dq;

/* ---- S^T = K Q^T, dP^T = V dO^T -------------------------------------------------------------- */

/* Whether B fragments of queries are loaded for two steps along the columns: they are if a warp has
 * 8 queries. */
enum { PAIRS = N_TILES == 1 };

FA_DEVICE void clear_scores(fa_score_sums *s)
{
#pragma unroll
    for (int i = 0; i < M_TILES * N_TILES * 4; i++)
        s->at[i / 4 / N_TILES][i / 4 % N_TILES][i % 4] = 0.0f;
}

#if !HIGH_LOW /* otherwise own_parts.cuh has the products, or, if warps share them, high_low.cuh */

enum { QUERY_WORDS = PAIRS ? 4 : 2 * N_TILES }; /* words of fragments that are loaded together */

FA_DEVICE void load_key_fragments(uint32_t a[M_TILES][4], uint32_t rows, int step)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
        ptx_ldmatrix_x4(a[m], fragment_at(rows + (uint32_t)(m * 16 * PITCH), 2 * step));
}

FA_DEVICE void load_query_fragments(uint32_t b[QUERY_WORDS], uint32_t columns, int step)
{
#pragma unroll
    for (int n = 0; n < QUERY_WORDS / 4; n++)
        ptx_ldmatrix_x4(b + 4 * n, fragment_at(columns + (uint32_t)(n * 16 * PITCH), 2 * step));
}

/* rows, columns: where the lane's fragments of keys and of queries begin. Fragments are loaded one
 * step ahead of their products. */
FA_DEVICE void make_scores(fa_score_sums *s, uint32_t rows, uint32_t columns)
{
    uint32_t a[2][M_TILES][4], b[2][QUERY_WORDS];
    clear_scores(s);
    load_key_fragments(a[0], rows, 0);
    load_query_fragments(b[0], columns, 0);
#pragma unroll
    for (int step = 0; step < D_STEPS; step++) {
        const int next = step + 1;
        const uint32_t *queries = PAIRS ? b[step / 2 % 2] + step % 2 * 2 : b[step % 2];
        if (next < D_STEPS) {
            load_key_fragments(a[next % 2], rows, next);
            if (!PAIRS) load_query_fragments(b[next % 2], columns, next);
            else if (next % 2 == 0) load_query_fragments(b[next / 2 % 2], columns, next);
        }
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
                fa_mma(s->at[m][n], a[step % 2][m], queries[2 * n], queries[2 * n + 1]);
        }
    }
}

#endif

/* ---- dV += P^T dO, dK += dS^T Q -------------------------------------------------------------- */

FA_DEVICE void clear_gradient(fa_gradient *g)
{
#pragma unroll
    for (int i = 0; i < M_TILES * D_TILES * 4; i++)
        g->at[i / 4 / D_TILES][i / 4 % D_TILES][i % 4] = 0.0f;
}

#if !HIGH_LOW

/* Products of STEP queries. tile: where the lane's fragment of the first of these rows of dout or
 * of queries begins; unit: of the first column of the warp's share. */
FA_DEVICE void add_gradient_step(fa_gradient *g, uint32_t a[M_TILES][4], uint32_t tile, int unit)
{
#pragma unroll
    for (int n = 0; n < D_TILES; n += 2) {
        uint32_t b[4];
        ptx_ldmatrix_x4_trans(b, fragment_at(tile, unit + n));
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            fa_mma(g->at[m][n], a[m], b[0], b[1]);
            fa_mma(g->at[m][n + 1], a[m], b[2], b[3]);
        }
    }
}

/* The products of the warp's own queries, with weights in registers. tile: where the rows of these
 * queries begin. */
FA_DEVICE void add_own_gradient(fa_gradient *g, const fa_weights *x, uint32_t tile, int unit)
{
#pragma unroll
    for (int step = 0; step < CHUNK / STEP; step++) {
        uint32_t a[M_TILES][4];
#pragma unroll
        for (int i = 0; i < M_TILES * 4; i++)
            a[i / 4][i % 4] = x->at[i / 4][2 * step + i % 4 / 2][i % 2];
        add_gradient_step(g, a, tile + (uint32_t)(step * STEP * PITCH), unit);
    }
}

FA_DEVICE void load_weight_fragments(uint32_t a[M_TILES][4], uint32_t weights, int step)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
        ptx_ldmatrix_x4(a[m], fragment_at(weights + (uint32_t)(m * 16 * SCORE_PITCH), 2 * step));
}

/* The products of all other queries of the tile. weights: where the lane's fragments of the warp's
 * keys begin. */
FA_DEVICE void add_other_gradient(fa_gradient *g, uint32_t weights, uint32_t tile, int unit,
                                  int share)
{
    enum { OWN_STEPS = OWN_QUERIES / STEP, STEPS = QUERIES / STEP - OWN_STEPS };
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        uint32_t a[M_TILES][4];
        const int step = i < share * OWN_STEPS ? i : i + OWN_STEPS;
        load_weight_fragments(a, weights, step);
        add_gradient_step(g, a, tile + (uint32_t)(step * STEP * PITCH), unit);
    }
}

#endif

/* ---- dQ = dS K ------------------------------------------------------------------------------- */

FA_DEVICE void clear_dq(fa_dq *dq)
{
#pragma unroll
    for (int i = 0; i < DQ_M_TILES * DQ_N_TILES * 4; i++)
        dq->at[i / 4 / DQ_N_TILES][i / 4 % DQ_N_TILES][i % 4] = 0.0f;
}

#if !HIGH_LOW

/* ds: where the lane's fragments of dS of all queries begin; keys: those of keys. The warp's rows
 * start at 16-row block `block`, and its columns at unit `unit`. */
FA_DEVICE void make_dq(fa_dq *dq, uint32_t ds, uint32_t keys, int block, int unit)
{
    clear_dq(dq);
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) {
        uint32_t a[DQ_M_TILES][4];
#pragma unroll
        for (int m = 0; m < DQ_M_TILES; m++)
            ptx_ldmatrix_x4_trans(
                a[m], fragment_at(ds + (uint32_t)(step * 16 * SCORE_PITCH), 2 * (block + m)));
#pragma unroll
        for (int n = 0; n < DQ_N_TILES; n += 2) {
            uint32_t b[4];
            ptx_ldmatrix_x4_trans(b, fragment_at(keys + (uint32_t)(step * 16 * PITCH), unit + n));
#pragma unroll
            for (int m = 0; m < DQ_M_TILES; m++) {
                fa_mma(dq->at[m][n], a[m], b[0], b[1]);
                fa_mma(dq->at[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

#endif

#endif
