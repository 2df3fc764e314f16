/*
 * A warp's loop over its key tiles: S = Q K^T, logits, weights by a running max, O += P V.
 */
#ifndef FA_KERNELS_DECODE_SM80_ATTEND_CUH
#define FA_KERNELS_DECODE_SM80_ATTEND_CUH

#include "decode_sm80/config.cuh"

#if LATENT
#include "decode_sm80/latent.cuh"
#else
#include "common/mma.cuh"
#include "common/nonfinite_values.cuh"
#include "common/reduce.cuh"
#include "decode_sm80/bytes.cuh"
#include "decode_sm80/load.cuh"
#include "decode_sm80/softmax.cuh"
#include "decode_sm80/work.cuh"
#include "ptx/ldmatrix.cuh"

#if !EIGHT_BITS /* those of 8 bits are in bytes.cuh */
/* ---- Scores ---------------------------------------------------------------------------------- */

typedef struct fa_queries {
#if QUERIES_IN_REGISTERS
    uint32_t fragments[D_STEPS][M_TILES][4];
#endif
    uint32_t at; /* the address that this lane passes */
} fa_queries;

FA_DEVICE void find_queries(fa_queries *q, const fa_memory *at)
{
    q->at = at->q + value_lane();
#if QUERIES_IN_REGISTERS
#pragma unroll
    for (int i = 0; i < D_STEPS * M_TILES; i++)
        ptx_ldmatrix_x4(q->fragments[i / M_TILES][i % M_TILES],
                        q->at + (uint32_t)(i % M_TILES * 16 * PITCH + i / M_TILES * 32));
#endif
}

FA_DEVICE void get_query_fragments(const fa_queries *q, int step, uint32_t a[M_TILES][4])
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#if QUERIES_IN_REGISTERS
#pragma unroll
        for (int i = 0; i < 4; i++) a[m][i] = q->fragments[step][m][i];
#else
        ptx_ldmatrix_x4(a[m], q->at + (uint32_t)(m * 16 * PITCH + step * 32));
#endif
    }
}

FA_DEVICE void make_scores(const fa_queries *q, uint32_t tile, fa_scores *s)
{
    const uint32_t k = tile + key_lane();
#pragma unroll
    for (int i = 0; i < M_TILES * KEY_TILES * 4; i++)
        s->at[i / 4 / KEY_TILES][i / 4 % KEY_TILES][i % 4] = 0.0f;
#pragma unroll
    for (int step = 0; step < D_STEPS; step++) {
        uint32_t a[M_TILES][4];
        get_query_fragments(q, step, a);
#pragma unroll
        for (int block = 0; block < KEY_STEPS; block++) {
            uint32_t b[4];
            ptx_ldmatrix_x4(b, k + (uint32_t)(block * 16 * PITCH + step * 32));
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                fa_mma(s->at[m][2 * block], a[m], b[0], b[1]);
                fa_mma(s->at[m][2 * block + 1], a[m], b[2], b[3]);
            }
        }
    }
}

#endif

/* ---- Weights --------------------------------------------------------------------------------- */

FA_DEVICE void update_bases(fa_output *o, const fa_scores *s)
{
    float top[M_TILES][2];
    bool grown = false;
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) {
        float x = s->at[i / 2][0][i % 2 * 2];
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++)
            x = fmaxf(x, fmaxf(s->at[i / 2][n][i % 2 * 2], s->at[i / 2][n][i % 2 * 2 + 1]));
        top[i / 2][i % 2] = fa_max_over_lanes(x, 4);
        grown |= top[i / 2][i % 2] > o->base[i / 2][i % 2] + RESCALE_ABOVE;
    }
    if (__any_sync(0xffffffffu, grown)) raise_bases(o, top);
}

/* The A fragments of the weights of 16 keys. */
FA_DEVICE void make_weights(const fa_scores *s, int step, fa_output *o, uint32_t a[M_TILES][4])
{
#pragma unroll
    for (int i = 0; i < M_TILES * 4; i++) {
        const int m = i / 4, half = i % 2;
        const float *x = s->at[m][2 * step + i % 4 / 2] + 2 * half;
        const float first = ptx_ex2(x[0] - o->base[m][half]);
        const float second = ptx_ex2(x[1] - o->base[m][half]);
        o->sum[m][half] += first + second;
        a[m][i % 4] = fa_pack_x2(first, second);
    }
}

#if EIGHT_BITS
/* Updates bases for weights that will be multiplied by the values' scales. */
FA_DEVICE void update_scaled_bases(fa_output *o, const fa_scores *s, uint32_t tile)
{
    fa_scores raised;
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++) {
        const float2 scale = get_scales(tile, n);
        const float by[2] = {scale_exponent(scale.x), scale_exponent(scale.y)};
#pragma unroll
        for (int i = 0; i < M_TILES * 4; i++)
            raised.at[i / 4][n][i % 4] = s->at[i / 4][n][i % 4] + by[i % 2];
    }
    update_bases(o, &raised);
}

/* A weight of 0 leaves its value out, whatever the scale is. */
FA_DEVICE float scale_weight(float weight, float scale)
{
    return weight == 0.0f ? 0.0f : weight * scale;
}

/* As make_weights, times the scales of the values. */
FA_DEVICE void make_scaled_weights(const fa_scores *s, uint32_t tile, int step, fa_output *o,
                                   uint32_t a[M_TILES][4])
{
#pragma unroll
    for (int i = 0; i < M_TILES * 4; i++) {
        const int m = i / 4, half = i % 2, n = 2 * step + i % 4 / 2;
        const float2 scale = get_scales(tile, n);
        const float first = ptx_ex2(s->at[m][n][2 * half] - o->base[m][half]);
        const float second = ptx_ex2(s->at[m][n][2 * half + 1] - o->base[m][half]);
        o->sum[m][half] += first + second;
        a[m][i % 4] = fa_pack_x2(scale_weight(first, scale.x), scale_weight(second, scale.y));
    }
}

/* The softmax of a tile and O += P V. */
FA_DEVICE void add_tile(const fa_decode_params *d, const fa_work *w, int first, const fa_scores *s,
                        uint32_t tile, fa_output *o)
{
    const bool scaled = w->v_scale;
    if (scaled) update_scaled_bases(o, s, tile);
    else update_bases(o, s);
    const bool carefully = hides_keys(d, w, first) && has_nonfinite_values(tile);
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++) {
        uint32_t a[M_TILES][4];
        if (scaled) make_scaled_weights(s, tile, step, o, a);
        else make_weights(s, step, o, a);
        if (carefully) add_values_carefully(o->at, a, tile, step);
        else add_values(o->at, a, tile, step);
    }
}
#else
/* The softmax of a tile and O += P V. carefully: some values are not finite. */
FA_DEVICE void add_tile(const fa_scores *s, uint32_t tile, bool carefully, fa_output *o)
{
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++) {
        const uint32_t v = tile + value_lane() + (uint32_t)(step * 16 * PITCH);
        uint32_t a[M_TILES][4];
        make_weights(s, step, o, a);
        add_products(o, a, v, carefully);
    }
}

#endif

/* ---- The loop -------------------------------------------------------------------------------- */

/* The warp's sums over its key tiles of a part. */
FA_DEVICE void attend(const fa_decode_params *d, const fa_work *w, const fa_memory *at,
                      fa_output *o)
{
    const fa_key_tiles tiles = find_key_tiles(w);
    fa_places places;
    fa_queries q;
    begin_pipeline(d, w, &tiles, at, &places);
    load_queries(d, w, at->q);
    clear_output(o);
    __syncthreads();
    find_queries(&q, at);
#pragma unroll 1
    for (int n = 0; n < tiles.count; n++) {
        const uint32_t stage = (uint32_t)(n % STAGES * TILE_BYTES);
        const int first = tiles.first + n * BLOCK_KEYS;
        fa_scores s;
        wait_for_tile();
        make_scores(&q, at->k + stage, &s);
#if EIGHT_BITS
        scale_scores(d, w, &q, at->k + stage, &s);
#endif
        __syncwarp(); /* all lanes have used the keys */
        issue_keys(d, w, &tiles, at, n + STAGES, &places);
        make_logits(d, w, first, &s);
#if EIGHT_BITS
        wait_for_tile();
        add_tile(d, w, first, &s, at->v + stage, o);
#else
        update_bases(o, &s);
        wait_for_tile();
        const bool careful = hides_keys(d, w, first) && has_nonfinite_values(at->v + stage);
        add_tile(&s, at->v + stage, careful, o);
#endif
        __syncwarp();
        issue_values(d, w, &tiles, at, n + STAGES, &places);
    }
    ptx_cp_async_wait(0);
}
#endif

#endif
