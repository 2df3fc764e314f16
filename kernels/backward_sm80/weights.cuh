/*
 * Between the products: computes weights from scores, and dS from dP. The masks by position are
 * here; options.cuh has the options.
 */
#ifndef FA_KERNELS_BACKWARD_SM80_WEIGHTS_CUH
#define FA_KERNELS_BACKWARD_SM80_WEIGHTS_CUH

#include "backward_sm80/multiply.cuh"
#include "backward_sm80/options.cuh"
#include "backward_sm80/work.cuh"
#include "common/x2.cuh"
#include "ptx/shared.cuh"

/* Numbers of two adjacent queries. */
typedef struct query_pair {
    float lse[2], delta[2];
} query_pair;

/* rows: where the rows of the lane's first two queries are. */
FA_DEVICE query_pair load_pair(uint32_t rows, int n)
{
    const uint4 two = ptx_ld_shared_v4(rows + 64 * (uint32_t)n);
    const query_pair pair = {{fa_bits_float(two.x), fa_bits_float(two.z)},
                             {fa_bits_float(two.y), fa_bits_float(two.w)}};
    return pair;
}

#if !OPTIONS

/* Whether some queries of a tile do not see all of the warp's keys, from `first` on. */
FA_DEVICE bool is_masked(const block_work *w, int first, int tile)
{
    const int last = first + GROUP_ROWS - 1;
    return tile * QUERIES < w->first_query + last || (tile + 1) * QUERIES > w->end_query + first ||
           last >= w->num_keys;
}

/* P = exp(S - lse). */
FA_DEVICE void weigh(fa_scores *s, float scale, uint32_t rows)
{
#pragma unroll
    for (int n = 0; n < WEIGHT_N_TILES; n++) {
        const query_pair pair = load_pair(rows, n);
#pragma unroll
        for (int i = 0; i < WEIGHT_M_TILES * 4; i++) {
            float *x = &s->at[i / 4][n][i % 4];
            *x = find_weight(fmaf(*x, scale, -pair.lse[i % 2]));
        }
    }
}

#if THREE_PRODUCTS

/* factors: where those of the lane's first two queries are. */
FA_DEVICE void correct_weights(fa_scores *weights, uint32_t factors)
{
#pragma unroll
    for (int n = 0; n < WEIGHT_N_TILES; n++) {
        const float2 two = ptx_ld_shared_f32x2(factors + 32 * (uint32_t)n);
#pragma unroll
        for (int i = 0; i < WEIGHT_M_TILES * 4; i++)
            weights->at[i / 4][n][i % 4] *= i % 2 ? two.y : two.x;
    }
}

#endif

/* Clears the weights of queries that do not see the thread's keys. query, key: the thread's first
 * ones. */
FA_DEVICE void mask_weights(const block_work *w, fa_scores *weights, int query, int key)
{
#pragma unroll
    for (int i = 0; i < WEIGHT_M_TILES * 2; i++) {
        const int own = key + 8 * i;
        const int from = w->first_query + own - query;
        const int to = own < w->num_keys ? w->end_query + own - query : -1;
#pragma unroll
        for (int n = 0; n < WEIGHT_N_TILES; n++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                if (8 * n + c < from || 8 * n + c >= to)
                    weights->at[i / 2][n][i % 2 * 2 + c] = 0.0f;
    }
}

#endif

/* Replaces dP by dS = P (dP - delta). unit: the factor of dP; delta has it already. masked: if a
 * weight is 0, its dS is 0 whatever dP is. */
FA_DEVICE void make_ds(const fa_scores *weights, fa_scores *dp, uint32_t rows, float unit,
                       bool masked)
{
#pragma unroll
    for (int n = 0; n < WEIGHT_N_TILES; n++) {
        const query_pair pair = load_pair(rows, n);
#pragma unroll
        for (int i = 0; i < WEIGHT_M_TILES * 4; i++) {
            float *x = &dp->at[i / 4][n][i % 4];
            *x = weights->at[i / 4][n][i % 4] * fmaf(*x, unit, -pair.delta[i % 2]);
        }
    }
    if (!masked) return;
#pragma unroll
    for (int i = 0; i < WEIGHT_M_TILES * WEIGHT_N_TILES * 4; i++)
        if (weights->at[i / 4 / WEIGHT_N_TILES][i / 4 % WEIGHT_N_TILES][i % 4] == 0.0f)
            dp->at[i / 4 / WEIGHT_N_TILES][i / 4 % WEIGHT_N_TILES][i % 4] = 0.0f;
}

FA_DEVICE void pack(fa_weights *to, const fa_scores *from)
{
#if HIGH_LOW
#pragma unroll
    for (int i = 0; i < WEIGHT_M_TILES * WEIGHT_N_TILES * 4; i++)
        to->at[i / 4 / WEIGHT_N_TILES][i / 4 % WEIGHT_N_TILES][i % 2 * 2 + i % 4 / 2] =
            __float_as_uint(from->at[i / 4 / WEIGHT_N_TILES][i / 4 % WEIGHT_N_TILES][i % 4]);
#else
#pragma unroll
    for (int i = 0; i < WEIGHT_M_TILES * WEIGHT_N_TILES * 2; i++) {
        const float *x = from->at[i / 2 / WEIGHT_N_TILES][i / 2 % WEIGHT_N_TILES] + i % 2 * 2;
        to->at[i / 2 / WEIGHT_N_TILES][i / 2 % WEIGHT_N_TILES][i % 2] = fa_pack_x2(x[0], x[1]);
    }
#endif
}

#if !HIGH_LOW

/* Stores weights in shared memory, a row for each key. to: the address of the lane's word of its
 * first key and the tile's query 0; unit: of the first query. */
FA_DEVICE void share_weights(const fa_weights *x, uint32_t to, int unit)
{
#pragma unroll
    for (int n = 0; n < WEIGHT_N_TILES; n++)
#pragma unroll
        for (int i = 0; i < WEIGHT_M_TILES * 2; i++)
            ptx_st_shared_u32(fragment_at(to + (uint32_t)(8 * i * SCORE_PITCH), unit + n),
                              x->at[i / 2][n][i % 2]);
}

#endif

#endif
