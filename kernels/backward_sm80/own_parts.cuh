/*
 * The products of a tile by float16 parts, one or three for each float32 product, if a warp has its
 * own scores (head dims to 256). high_low.cuh explains where parts are and what their powers of two
 * are.
 *
 *     S, dP        a sum is multiplied by the inverse powers of its key and then its query
 *                  (split.cuh)
 *     dV = P^T dO  weights have the inverse powers of dO's rows; each key's row of weights has a
 *                  power of its own
 *     dK = dS^T Q  likewise, with the inverse powers of queries
 *     dQ = dS K    likewise, with those of keys; a row is a query's, of the warp's own keys
 *
 * A warp knows the largest numbers of these rows before it splits them, because lanes exchange
 * them. So each warp has its own powers. Their inverses are the factors of sums when these are
 * added to a gradient: the addition becomes a multiply-add.
 */
#ifndef FA_KERNELS_BACKWARD_SM80_OWN_PARTS_CUH
#define FA_KERNELS_BACKWARD_SM80_OWN_PARTS_CUH

#include "backward_sm80/high_low.cuh"
#include "backward_sm80/layout.cuh"
#include "backward_sm80/load.cuh"
#include "backward_sm80/multiply.cuh"
#include "backward_sm80/split.cuh"
#include "backward_sm80/tile_part.cuh"
#include "common/reduce.cuh"
#include "ptx/shared.cuh"

#if OWN_PARTS

/* ---- S^T = K Q^T, dP^T = V dO^T -------------------------------------------------------------- */

/* The products of 16 columns. With three products, sums start from 0. */
FA_DEVICE void add_score_step(fa_score_sums *s, uint32_t rows, uint32_t columns)
{
    high_low a[M_TILES];
#pragma unroll
    for (int m = 0; m < M_TILES; m++) load_high_low(&a[m], rows, m * 16 * PITCH);
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
        high_low b;
        load_high_low(&b, columns, n * 8 * PITCH);
#if THREE_PRODUCTS
        float sum[M_TILES][2][4] = {{{0.0f}}};
#pragma unroll
        for (int i = 0; i < PRODUCTS * M_TILES; i++)
            multiply_parts(sum[i % M_TILES], &a[i % M_TILES], &b, i / M_TILES);
#pragma unroll
        for (int i = 0; i < M_TILES * 8; i++)
            s->at[i / 8][n + i / 4 % 2][i % 4] += sum[i / 8][i / 4 % 2][i % 4];
#else
#pragma unroll
        for (int m = 0; m < M_TILES; m++) multiply_parts(s->at[m] + n, &a[m], &b, 0);
#endif
    }
}

/* In one iteration of the loop: with more, there would not be enough registers. */
enum { SCORE_STEPS = M_TILES == 1 ? 4 : 2 };

/* rows, columns: where the lane's fragments of keys and of queries begin. */
FA_DEVICE void make_scores(fa_score_sums *s, uint32_t rows, uint32_t columns)
{
    clear_scores(s);
#pragma unroll SCORE_STEPS
    for (int step = 0; step < D_STEPS; step++) {
        const int unit = step / 2 * 8 + step % 2 * 2;
        add_score_step(s, fragment_at(rows, unit), fragment_at(columns, unit));
    }
}

/* part: the addresses of powers. */
FA_DEVICE void scale_scores(fa_scores *s, const tile_part *part, score_kind kind)
{
    key_powers keys[M_TILES];
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
        keys[m] = load_key_powers(part->key_powers + 128 * (uint32_t)m);
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
        const query_powers queries = load_query_powers(part->query_powers + 64 * (uint32_t)n);
#pragma unroll
        for (int i = 0; i < M_TILES * 4; i++) {
            const key_powers *key = &keys[i / 4];
            float *x = &s->at[i / 4][n][i % 4];
            *x *= kind == DP ? key->value[i / 2 % 2] : key->key[i / 2 % 2];
            *x *= kind == DP ? queries.dout[i % 2] : queries.query[i % 2];
        }
    }
}

#if !SCORES_ALONE

/* The numbers of accumulator tiles whose products alternate, so that none waits for its own sum. */
enum { ROW_TOGETHER = M_TILES == 1 ? 4 : 2, DQ_TOGETHER = DQ_M_TILES == 1 ? 4 : 2 };
static_assert(D_TILES % ROW_TOGETHER == 0 && DQ_N_TILES % DQ_TOGETHER == 0, "whole groups");

/* ---- dV += P^T dO, dK += dS^T Q -------------------------------------------------------------- */

/* Weights or dS of a chunk as A fragments, and the factors of keys g and g + 8. */
typedef struct row_parts {
    high_low at[CHUNK / 16][M_TILES];
    float factors[M_TILES][2];
} row_parts;

/* Splits weights, which are multiplied with dout's rows, or dS, which is multiplied with rows of
 * queries. Four lanes share a row. */
FA_DEVICE void make_row_parts(row_parts *to, const fa_weights *x, const tile_part *part,
                              bool of_dout)
{
    float y[M_TILES][N_TILES][4], largest[M_TILES][2] = {{0.0f}};
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
        const query_powers powers = load_query_powers(part->query_powers + 64 * (uint32_t)n);
        const float *inverses = of_dout ? powers.dout : powers.query;
#pragma unroll
        for (int i = 0; i < M_TILES * 4; i++) { /* one of two queries, key g or g + 8 */
            const int m = i / 4, r = i % 2;
            y[m][n][i % 4] = fa_bits_float(x->at[m][n][i % 4]) * inverses[i % 4 / 2];
            largest[m][r] = fmaxf(largest[m][r], fabsf(y[m][n][i % 4]));
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; i++) {
        const int m = i / 2, r = i % 2;
        const float power = find_power(fa_max_over_lanes(largest[m][r], 4));
        to->factors[m][r] = find_gradient_factor(power);
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
            high_low *tile = &to->at[n / 2][m];
            const int word = n % 2 * 2 + r;
            tile->high[word] =
                split_two(y[m][n][r] * power, y[m][n][2 + r] * power, &tile->low[word]);
        }
    }
}

/* Adds the products of a chunk to g. tile: where the lane's fragments of the chunk's rows of dout
 * or queries begin, in the warp's columns. */
FA_DEVICE void add_row_parts(fa_gradient *g, const row_parts *x, uint32_t tile)
{
#pragma unroll
    for (int n = 0; n < D_TILES; n += ROW_TOGETHER) {
        float sum[M_TILES][ROW_TOGETHER][4] = {{{0.0f}}};
#pragma unroll
        for (int step = 0; step < CHUNK / 16; step++) {
            high_low b[ROW_TOGETHER / 2];
#pragma unroll
            for (int i = 0; i < ROW_TOGETHER / 2; i++)
                load_high_low_trans(&b[i], fragment_at(tile, high_unit(n + 2 * i)),
                                    step * 16 * PITCH);
#pragma unroll
            for (int i = 0; i < PRODUCTS * M_TILES * (ROW_TOGETHER / 2); i++) {
                const int product = i / (M_TILES * (ROW_TOGETHER / 2));
                const int m = i % M_TILES, pair = i / M_TILES % (ROW_TOGETHER / 2);
                multiply_parts(sum[m] + 2 * pair, &x->at[step][m], &b[pair], product);
            }
        }
#pragma unroll
        for (int i = 0; i < M_TILES * ROW_TOGETHER * 4; i++) {
            const int m = i / 4 / ROW_TOGETHER, tile_n = i / 4 % ROW_TOGETHER;
            float *y = &g->at[m][n + tile_n][i % 4];
            *y = fmaf(sum[m][tile_n][i % 4], x->factors[m][i % 4 / 2], *y);
        }
    }
}

/* Stores parts in shared memory, a row for each key, if warps share keys. to: the address of the
 * lane's word of its first key and the tile's query 0; factors: the address for the factor of the
 * lane's first key. */
FA_DEVICE void share_row_parts(const row_parts *x, const tile_part *part, uint32_t to,
                               uint32_t factors)
{
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; i++) {
        const int m = i / 2, r = i % 2;
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
            const uint32_t at = fragment_at(to + (uint32_t)(8 * i * SCORE_PITCH), part->unit + n);
            ptx_st_shared_u32(at, x->at[n / 2][m].high[n % 2 * 2 + r]);
            if (THREE_PRODUCTS) ptx_st_shared_u32(at ^ 64, x->at[n / 2][m].low[n % 2 * 2 + r]);
        }
        if (ptx_thread_id() % 4 == 0)
            ptx_st_shared_f32(factors + 64 * (uint32_t)i, x->factors[m][r]);
    }
}

/* The products of all queries, whose weights or dS are shared. x: where the lane's fragments of the
 * group's keys begin; factors: those of the lane's first key; tile: as above. */
FA_DEVICE void add_shared_rows(fa_gradient *g, uint32_t x, uint32_t factors, uint32_t tile)
{
#pragma unroll 1 /* unrolled chunks would need more registers than there are */
    for (int chunk = 0; chunk < QUERIES / CHUNK; chunk++) {
        row_parts parts;
#pragma unroll
        for (int i = 0; i < CHUNK / 16 * M_TILES; i++) {
            const int step = i / M_TILES, m = i % M_TILES;
            load_high_low(&parts.at[step][m],
                          fragment_at(x, high_unit(chunk * (CHUNK / 8) + 2 * step)),
                          m * 16 * SCORE_PITCH);
        }
#pragma unroll
        for (int i = 0; i < 2 * M_TILES; i++)
            parts.factors[i / 2][i % 2] =
                ptx_ld_shared_f32(factors + (uint32_t)(8 * (chunk * (CHUNK / 16) * KEYS + 8 * i)));
        add_row_parts(g, &parts, tile + (uint32_t)(chunk * CHUNK * PITCH));
    }
}

/* ---- dQ = dS K ------------------------------------------------------------------------------- */

/* Exchanges numbers of two lanes and keeps the larger ones. The lane with the bit keeps the second
 * half. */
FA_DEVICE void halve_maxima(float *x, int count, int bit)
{
    const bool upper = (ptx_thread_id() & bit) != 0;
#pragma unroll
    for (int i = 0; i < count / 2; i++) {
        const float other = upper ? x[i] : x[i + count / 2];
        x[i] = fmaxf(upper ? x[i + count / 2] : x[i], __shfl_xor_sync(0xffffffffu, other, bit));
    }
}

/* Stores the factor of each query of the chunk. largest: of the lane's keys, of queries 8n + 2t + i
 * in [2n + i]; it is overwritten. Afterwards all lanes' stores are visible. */
FA_DEVICE void share_ds_factors(float largest[2 * N_TILES], uint32_t factors)
{
    const int group = ptx_thread_id() % 32 / 4;
    int query = group; /* the lane's element of [2n + i] */
    halve_maxima(largest, 2 * N_TILES, 16);
    halve_maxima(largest, N_TILES, 8);
    if (N_TILES == 4) halve_maxima(largest, 2, 4);
    else {
        query = group / 2;
        largest[0] = fmaxf(largest[0], __shfl_xor_sync(0xffffffffu, largest[0], 4));
    }
    if (N_TILES == 4 || group % 2 == 0)
        ptx_st_shared_f32(factors + (uint32_t)(query / 2 * 32 + query % 2 * 4),
                          find_gradient_factor(find_power(largest[0])));
    __syncwarp();
}

/* Splits dS, which is multiplied with rows of keys, and stores it for all warps. */
FA_DEVICE void share_ds(const fa_weights *ds, const tile_part *part)
{
    float x[M_TILES][N_TILES][4], largest[2 * N_TILES];
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; i++) {
        const float inverse =
            ptx_ld_shared_f32(part->key_powers + 64 * (uint32_t)i) * (SPLIT_UNIT / KEY_UNIT);
#pragma unroll
        for (int j = 0; j < 2 * N_TILES; j++) {
            const int m = i / 2, n = j / 2, e = j % 2 * 2 + i % 2;
            x[m][n][e] = fa_bits_float(ds->at[m][n][e]) * inverse;
            largest[j] = i == 0 ? fabsf(x[m][n][e]) : fmaxf(largest[j], fabsf(x[m][n][e]));
        }
    }
    share_ds_factors(largest, part->ds_factors);
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
        const float2 factors = ptx_ld_shared_f32x2(part->ds_factors + 32 * (uint32_t)n);
        const float powers[2] = {find_factor_power(factors.x), find_factor_power(factors.y)};
#pragma unroll
        for (int i = 0; i < 2 * M_TILES; i++) {
            const float *two = x[i / 2][n] + i % 2;
            const uint32_t at =
                fragment_at(part->ds_word + (uint32_t)(8 * i * SCORE_PITCH), part->unit + n);
            uint32_t low;
            ptx_st_shared_u32(at, split_two(two[0] * powers[0], two[2] * powers[1], &low));
            if (THREE_PRODUCTS) ptx_st_shared_u32(at ^ 64, low);
        }
    }
}

/* Like make_dq. keys: where the lane's fragments of the warp's columns begin; factors: those of the
 * lane's first query. */
FA_DEVICE void make_own_dq(fa_dq *dq, uint32_t ds, uint32_t keys, uint32_t factors, int block)
{
    enum { GROUP_STEPS = GROUP_ROWS / 16 };
    clear_dq(dq);
#pragma unroll 4
    for (int group = 0; group < GROUPS; group++) {
        high_low a[GROUP_STEPS][DQ_M_TILES];
        float own[DQ_M_TILES][2];
#pragma unroll
        for (int i = 0; i < 2 * DQ_M_TILES; i++)
            own[i / 2][i % 2] =
                ptx_ld_shared_f32(factors + (uint32_t)(4 * (group * QUERIES + 8 * i)));
#pragma unroll
        for (int i = 0; i < GROUP_STEPS * DQ_M_TILES; i++)
            load_high_low_trans(&a[i / DQ_M_TILES][i % DQ_M_TILES],
                                fragment_at(ds, high_unit(2 * (block + i % DQ_M_TILES))),
                                (group * GROUP_ROWS + i / DQ_M_TILES * 16) * SCORE_PITCH);
#pragma unroll
        for (int n = 0; n < DQ_N_TILES; n += DQ_TOGETHER) {
            float sum[DQ_M_TILES][DQ_TOGETHER][4] = {{{0.0f}}};
#pragma unroll
            for (int step = 0; step < GROUP_STEPS; step++) {
                high_low b[DQ_TOGETHER / 2];
#pragma unroll
                for (int i = 0; i < DQ_TOGETHER / 2; i++)
                    load_high_low_trans(&b[i], fragment_at(keys, high_unit(n + 2 * i)),
                                        (group * GROUP_ROWS + step * 16) * PITCH);
#pragma unroll
                for (int i = 0; i < PRODUCTS * DQ_M_TILES * (DQ_TOGETHER / 2); i++) {
                    const int product = i / (DQ_M_TILES * (DQ_TOGETHER / 2));
                    const int m = i % DQ_M_TILES, pair = i / DQ_M_TILES % (DQ_TOGETHER / 2);
                    multiply_parts(sum[m] + 2 * pair, &a[step][m], &b[pair], product);
                }
            }
#pragma unroll
            for (int i = 0; i < DQ_M_TILES * DQ_TOGETHER * 4; i++) {
                const int m = i / 4 / DQ_TOGETHER, tile = i / 4 % DQ_TOGETHER;
                float *y = &dq->at[m][n + tile][i % 4];
                *y = fmaf(sum[m][tile][i % 4], own[m][i % 4 / 2], *y);
            }
        }
    }
}

#endif

#endif

#endif
