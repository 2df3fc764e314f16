/*
 * The two products: S = Q K^T and O += P V.
 */
#ifndef FA_KERNELS_FORWARD_SM80_MULTIPLY_CUH
#define FA_KERNELS_FORWARD_SM80_MULTIPLY_CUH

#include "common/mma.cuh"
#include "forward_sm80/layout.cuh"
#include "ptx/ldmatrix.cuh"

/* ---- S = Q K^T ------------------------------------------------------------------------------- */

/* The warp's fragments of Q: those in registers, and the address that this lane passes for the others. */
typedef struct fa_queries {
#if REGISTER_STEPS > 0
    uint32_t fragments[M_TILES][REGISTER_STEPS][4];
#endif
    uint32_t at;
} fa_queries;

FA_DEVICE void find_queries(fa_queries *q, const fa_memory *at)
{
    q->at = at->q + (uint32_t)(group_row() * PITCH) + value_lane(lane_id());
}

FA_DEVICE void load_query_fragments(fa_queries *q, const fa_memory *at)
{
#if REGISTER_STEPS > 0
    find_queries(q, at);
#pragma unroll
    for (int i = 0; i < M_TILES * REGISTER_STEPS; i++) {
        const int m = i / REGISTER_STEPS, step = i % REGISTER_STEPS;
        ptx_ldmatrix_x4(q->fragments[m][step], q->at + (uint32_t)(m * 16 * PITCH + step * 32));
    }
#else
    (void)q, (void)at;
#endif
}

FA_DEVICE void clear_scores(fa_scores *s)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) s->at[m][n][e] = 0.0f;
}

FA_DEVICE void get_query_fragments(uint32_t a[M_TILES][4], const fa_queries *q, int step)
{
#if REGISTER_STEPS > 0
    if (step < REGISTER_STEPS) {
#pragma unroll
        for (int i = 0; i < M_TILES * 4; i++) a[i / 4][i % 4] = q->fragments[i / 4][step][i % 4];
        return;
    }
#endif
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
        ptx_ldmatrix_x4(a[m], q->at + (uint32_t)(m * 16 * PITCH + step * 32));
}

FA_DEVICE void load_key_fragments(uint32_t b[4], uint32_t k, int i)
{
    ptx_ldmatrix_x4(b, k + (uint32_t)(i % KEY_BLOCKS * 16 * PITCH + i / KEY_BLOCKS * 32));
}

/* Steps from .. to - 1 along the head dim. Fragments are loaded one step ahead of their products. */
FA_DEVICE void add_scores(fa_scores *s, const fa_queries *q, uint32_t k, int from, int to)
{
    uint32_t a[2][M_TILES][4], b[2][4];
    get_query_fragments(a[from % 2], q, from);
    load_key_fragments(b[0], k, from * KEY_BLOCKS);
#pragma unroll
    for (int i = 0; i < (to - from) * KEY_BLOCKS; i++) {
        const int step = from + i / KEY_BLOCKS, block = i % KEY_BLOCKS;
        const uint32_t *now = b[i % 2];
        if (i + 1 < (to - from) * KEY_BLOCKS)
            load_key_fragments(b[(i + 1) % 2], k, from * KEY_BLOCKS + i + 1);
        if (block == KEY_BLOCKS - 1 && step + 1 < to)
            get_query_fragments(a[(step + 1) % 2], q, step + 1);
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            fa_mma(s->at[m][2 * block], a[step % 2][m], now[0], now[1]);
            fa_mma(s->at[m][2 * block + 1], a[step % 2][m], now[2], now[3]);
        }
    }
}

FA_DEVICE void make_scores(fa_scores *s, const fa_queries *q, uint32_t k)
{
    clear_scores(s);
    add_scores(s, q, k, 0, D_STEPS);
}

/* ---- O += P V -------------------------------------------------------------------------------- */

/* The A fragments of 16 keys. rows: the address that this lane passes (weight_rows). */
FA_DEVICE void get_weight_fragments(uint32_t a[M_TILES][4], const fa_weights *p, uint32_t rows,
                                    int step)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#if SPLIT > 1
        ptx_ldmatrix_x4(a[m], rows + (uint32_t)(m * 16 * WEIGHTS_PITCH + 32 * step));
    (void)p;
#else
#pragma unroll
        for (int i = 0; i < 4; i++) a[m][i] = p->at[m][2 * step + i / 2][i % 2];
    (void)rows;
#endif
}

/* The products of 16 keys and of columns 16 * block .. 16 * block + 15. One transposed ldmatrix gives both B
 * fragments. */
FA_DEVICE void add_values_step(fa_output *o, uint32_t a[M_TILES][4], uint32_t v, int step,
                               int block)
{
    uint32_t b[4];
    ptx_ldmatrix_x4_trans(b, v + (uint32_t)(step * 16 * PITCH + block * 32));
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        fa_mma(o->at[m][2 * block], a[m], b[0], b[1]);
        fa_mma(o->at[m][2 * block + 1], a[m], b[2], b[3]);
    }
}

FA_DEVICE void add_values(fa_output *o, const fa_weights *p, uint32_t rows, uint32_t v)
{
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++) {
        uint32_t a[M_TILES][4];
        get_weight_fragments(a, p, rows, step);
#pragma unroll
        for (int block = 0; block < D_TILES / 2; block++) add_values_step(o, a, v, step, block);
    }
}

#endif
