/*
 * The two products: S = Q K^T and O += P V.
 */
#ifndef FA_KERNELS_FORWARD_SM80_MULTIPLY_CUH
#define FA_KERNELS_FORWARD_SM80_MULTIPLY_CUH

#include "common/mma.cuh"
#include "common/three_products.cuh"
#include "forward_sm80/layout.cuh"
#include "ptx/ldmatrix.cuh"

/* Steps of a plain key tile before copies are issued between its products. */
enum { FIRST_STEPS = THREE_PRODUCTS ? 2 : 1 }; /* one chain */

/* ---- S = Q K^T ------------------------------------------------------------------------------- */

/* The warp's fragments of Q: those in registers, and the address that this lane passes for the
 * others. */
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

#if THREE_PRODUCTS

/*
 * Sums start from 0 again every CHAIN steps along the head dim and every VALUE_CHAIN along the
 * keys. Infinities may produce NaN where the result should be something else; then the work tile is
 * recomputed carefully.
 */
enum { CHAIN = 2, VALUE_CHAIN = 4 };
static_assert(D_STEPS % CHAIN == 0 && KEY_STEPS % VALUE_CHAIN == 0, "whole chains");

#endif

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

#if THREE_PRODUCTS

/* The sums of CHAIN steps of 16 keys. k: the address of this lane's fragments of the first step. */
FA_DEVICE void add_chain(fa_scores *s, fa_parts q[CHAIN][M_TILES], uint32_t k, int block,
                         bool careful)
{
    fa_parts b[CHAIN];
#pragma unroll
    for (int i = 0; i < CHAIN; i++) {
        uint32_t x[4];
        ptx_ldmatrix_x4(x, k + (uint32_t)(block * 16 * PITCH + i * 32));
        fa_split_four(&b[i], x, careful);
    }
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float sum[4] = {0.0f};
#pragma unroll
            for (int i = 0; i < CHAIN; i++)
                fa_multiply_parts(sum, &q[i][m], &b[i], 2 * n, 2 * n + 1);
#pragma unroll
            for (int e = 0; e < 4; e++) s->at[m][2 * block + n][e] += sum[e];
        }
}

/* The products of CHAIN steps along the head dim. */
FA_DEVICE void add_chains(fa_scores *s, const fa_queries *q, uint32_t k, int step, bool careful)
{
    fa_parts a[CHAIN][M_TILES];
#pragma unroll
    for (int i = 0; i < CHAIN; i++) {
        uint32_t x[M_TILES][4];
        get_query_fragments(x, q, step + i);
#pragma unroll
        for (int m = 0; m < M_TILES; m++) fa_split_four(&a[i][m], x[m], careful);
    }
#pragma unroll
    for (int block = 0; block < KEY_BLOCKS; block++)
        add_chain(s, a, k + (uint32_t)(step * 32), block, careful);
}

/* Steps from .. to - 1 along the head dim, in whole chains. */
FA_DEVICE void add_scores(fa_scores *s, const fa_queries *q, uint32_t k, int from, int to)
{
#pragma unroll
    for (int step = from; step < to; step += CHAIN) add_chains(s, q, k, step, false);
}

/* This is rare and must not take registers from the other paths, so the loop is not unrolled.
 * Scores are multiplied by the scale here: in the fused multiply-add of a weight, a huge score
 * would differ from the base that is equal to it. */
FA_DEVICE void make_careful_scores(fa_scores *s, const fa_queries *q, uint32_t k, float scale)
{
    clear_scores(s);
#pragma unroll 1
    for (int step = 0; step < D_STEPS; step += CHAIN) add_chains(s, q, k, step, true);
#pragma unroll
    for (int i = 0; i < M_TILES * KEY_TILES * 4; i++)
        s->at[i / 4 / KEY_TILES][i / 4 % KEY_TILES][i % 4] *= scale;
}

#else

#if TF32
FA_DEVICE void round_four(uint32_t x[4], const uint32_t loaded[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = fa_near_tf32(loaded[i]);
}
#endif

/* Steps from .. to - 1 along the head dim. Fragments are loaded one step ahead of their
 * products. */
FA_DEVICE void add_scores(fa_scores *s, const fa_queries *q, uint32_t k, int from, int to)
{
    uint32_t a[2][M_TILES][4], b[2][4];
    get_query_fragments(a[from % 2], q, from);
    load_key_fragments(b[0], k, from * KEY_BLOCKS);
#pragma unroll
    for (int i = 0; i < (to - from) * KEY_BLOCKS; i++) {
        const int step = from + i / KEY_BLOCKS, block = i % KEY_BLOCKS;
#if TF32
        uint32_t now[4];
        round_four(now, b[i % 2]);
#else
        const uint32_t *now = b[i % 2];
#endif
        if (i + 1 < (to - from) * KEY_BLOCKS)
            load_key_fragments(b[(i + 1) % 2], k, from * KEY_BLOCKS + i + 1);
        if (block == KEY_BLOCKS - 1 && step + 1 < to) /* queries have been rounded already */
            get_query_fragments(a[(step + 1) % 2], q, step + 1);
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            fa_mma(s->at[m][2 * block], a[step % 2][m], now[0], now[1]);
            fa_mma(s->at[m][2 * block + 1], a[step % 2][m], now[2], now[3]);
        }
    }
}

#endif

FA_DEVICE void make_scores(fa_scores *s, const fa_queries *q, uint32_t k)
{
    clear_scores(s);
    add_scores(s, q, k, 0, D_STEPS);
}

/* ---- O += P V -------------------------------------------------------------------------------- */

/* The A fragments of a step of keys. rows: the address that this lane passes (weight_rows). */
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
        for (int i = 0; i < 4; i++)
            a[m][i] = TF32 ? p->at[m][step][i] : p->at[m][2 * step + i / 2][i % 2];
    (void)rows;
#endif
}

#if TF32

/* Values of keys 2t and 2t + 1 of 8, in columns 4g .. 4g + 3 of 32: one for each of four tiles of 8
 * columns. */
typedef struct fa_values {
    uint32_t even[4], odd[4];
} fa_values;

FA_DEVICE void load_values(fa_values *b, uint32_t v, int step, int block)
{
    const uint32_t at = v + (uint32_t)(step * 8 * PITCH + block * 128);
    const uint4 even = ptx_ld_shared_v4(at), odd = ptx_ld_shared_v4(at + PITCH);
    b->even[0] = even.x, b->even[1] = even.y, b->even[2] = even.z, b->even[3] = even.w;
    b->odd[0] = odd.x, b->odd[1] = odd.y, b->odd[2] = odd.z, b->odd[3] = odd.w;
}

#if !THREE_PRODUCTS

/* The products of 8 keys and of columns 32 * block .. 32 * block + 31. */
FA_DEVICE void add_values_step(fa_output *o, uint32_t a[M_TILES][4], uint32_t v, int step,
                               int block)
{
    fa_values b;
    load_values(&b, v, step, block);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t even = fa_near_tf32(b.even[i]), odd = fa_near_tf32(b.odd[i]);
#pragma unroll
        for (int m = 0; m < M_TILES; m++) fa_mma(o->at[m][4 * block + i], a[m], even, odd);
    }
}

#endif

#else

/* The products of 16 keys and of columns 16 * block .. 16 * block + 15. One transposed ldmatrix
 * gives both B fragments. */
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

#endif

#if THREE_PRODUCTS

/* The products of VALUE_CHAIN steps along the keys, and of columns 32 * block ..
 * 32 * block + 31. */
FA_DEVICE void add_value_chain(fa_output *o, const fa_weights *p, uint32_t rows, uint32_t v,
                               int from, int block)
{
    float sum[M_TILES][4][4];
#pragma unroll
    for (int i = 0; i < M_TILES * 16; i++) sum[i / 16][i / 4 % 4][i % 4] = 0.0f;
#pragma unroll
    for (int step = from; step < from + VALUE_CHAIN; step++) {
        uint32_t x[M_TILES][4];
        fa_values loaded;
        fa_parts a[M_TILES], even, odd;
        get_weight_fragments(x, p, rows, step);
        load_values(&loaded, v, step, block);
        fa_split_four(&even, loaded.even, false);
        fa_split_four(&odd, loaded.odd, false);
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            fa_split_four(&a[m], x[m], false);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                fa_mma(sum[m][i], a[m].small, even.big[i], odd.big[i]);
                fa_mma(sum[m][i], a[m].big, even.small[i], odd.small[i]);
                fa_mma(sum[m][i], a[m].big, even.big[i], odd.big[i]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < M_TILES * 16; i++)
        o->at[i / 16][4 * block + i / 4 % 4][i % 4] += sum[i / 16][i / 4 % 4][i % 4];
}

FA_DEVICE void add_values(fa_output *o, const fa_weights *p, uint32_t rows, uint32_t v)
{
#pragma unroll
    for (int block = 0; block < D_TILES / VALUE_TILES; block++)
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step += VALUE_CHAIN)
            add_value_chain(o, p, rows, v, step, block);
}

#else

FA_DEVICE void add_values(fa_output *o, const fa_weights *p, uint32_t rows, uint32_t v)
{
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++) {
        uint32_t a[M_TILES][4];
        get_weight_fragments(a, p, rows, step);
#pragma unroll
        for (int block = 0; block < D_TILES / VALUE_TILES; block++)
            add_values_step(o, a, v, step, block);
    }
}

#endif

#endif
