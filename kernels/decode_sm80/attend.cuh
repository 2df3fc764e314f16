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
#include "decode_sm80/bytes_load.cuh"
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

#if EIGHT_BITS
/* ---- Values with scales ---------------------------------------------------------------------- */

/* Updates bases for weights that will be multiplied by the values' scales. No row is beyond its base
 * if its largest logit is not with the largest scale: that is looked at first. */
FA_DEVICE void update_scaled_bases(fa_output *o, int halves, const fa_scores *s,
                                   const float2 scale[KEY_TILES])
{
    fa_scores raised;
    float largest = 0.0f;
    bool grown = false;
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++)
        largest = fmaxf(largest, fmaxf(fabsf(scale[n].x), fabsf(scale[n].y)));
    const float by = scale_exponent(largest);
#pragma unroll
    for (int i = 0; i < halves; i++)
        grown |= find_top(s, i / 2, i % 2) + by > o->base[i / 2][i % 2] + RESCALE_ABOVE;
    if (!__any_sync(0xffffffffu, grown)) return;
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++) {
        const float each[2] = {scale_exponent(scale[n].x), scale_exponent(scale[n].y)};
#pragma unroll
        for (int i = 0; i < 2 * halves; i++)
            raised.at[i / 4][n][i % 4] = s->at[i / 4][n][i % 4] + each[i % 2];
    }
    update_bases(o, &raised, halves);
}

/* A weight of 0 leaves its value out, whatever the scale is. */
FA_DEVICE float scale_weight(float weight, float scale)
{
    return weight != 0.0f ? weight * scale : weight;
}

/* As make_weights, times the scales of the values. */
FA_DEVICE void make_scaled_weights(const fa_scores *s, const float2 scale[KEY_TILES], int step,
                                   int halves, fa_output *o, uint32_t a[M_TILES][4])
{
#pragma unroll
    for (int i = 0; i < M_TILES * 4; i++) {
        const int m = i / 4, half = i % 2, n = 2 * step + i % 4 / 2;
        a[m][i % 4] = 0;
        if (2 * m + half >= halves) continue;
        const float first = ptx_ex2(s->at[m][n][2 * half] - o->base[m][half]);
        const float second = ptx_ex2(s->at[m][n][2 * half + 1] - o->base[m][half]);
        o->sum[m][half] += first + second;
        a[m][i % 4] = fa_pack_x2(scale_weight(first, scale[n].x), scale_weight(second, scale[n].y));
    }
}

/* The softmax of a tile and O += P V. scaled: keys' values have scales of their own; carefully: some
 * are NaN and hidden from some rows. */
FA_DEVICE void add_tile(bool scaled, int halves, const fa_scores *s, const fa_vectors *at,
                        uint32_t tile, bool carefully, fa_output *o)
{
    uint32_t a[KEY_STEPS][M_TILES][4];
    if (scaled) {
        float2 scale[KEY_TILES];
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++) scale[n] = get_scales(tile, n);
        update_scaled_bases(o, halves, s, scale);
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++)
            make_scaled_weights(s, scale, step, halves, o, a[step]);
    } else {
        update_bases(o, s, halves);
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++) make_weights(s, step, halves, o, a[step]);
    }
    if (carefully) {
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++)
            add_values_carefully(o, halves, a[step], at, tile, step);
        return;
    }
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++) add_values(o, halves, a[step], at, tile, step);
}
#else
/* The softmax of a tile and O += P V. carefully: some values are not finite. */
FA_DEVICE void add_tile(const fa_scores *s, uint32_t tile, bool carefully, fa_output *o)
{
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++) {
        const uint32_t v = tile + value_lane() + (uint32_t)(step * 16 * PITCH);
        uint32_t a[M_TILES][4];
        make_weights(s, step, 2 * M_TILES, o, a);
        add_products(o, a, v, carefully);
    }
}

#endif

/* ---- The loop -------------------------------------------------------------------------------- */

#if EIGHT_BITS
/* Whether a register for the address of the stage is one too many: the compiler spills it. */
#if CACHE == FA_ELEMENT_FLOAT8_E4M3 && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define STAGE_BY_NUMBER (HEAD_DIM == 64)
#else
#define STAGE_BY_NUMBER false
#endif

/* The warp's sums over its key tiles, whose first ones are on their way. halves: of 16 rows each, how
 * many there are; options: there can be some that are applied row by row. */
FA_DEVICE void attend_tiles(const fa_decode_params *d, const fa_work *w, const fa_memory *at,
                            const fa_key_tiles *tiles, int halves, bool options, fa_places *places,
                            fa_output *o)
{
    const bool known_k = w->k_scale, known_v = w->v_scale;
    const fa_vectors known = find_vectors();
    const bool keeps = halves == 1 && KEEPS_MORE;
    const fa_span seen = find_span(tiles, w->all_from, w->all_to); /* by all rows */
    uint32_t stage = at->k;
    fa_queries q;
    find_queries(&q, at, halves, score_unit(d, w));
#pragma unroll 1
    for (int n = 0; n < tiles->count; n++) {
        const uint32_t keys = STAGE_BY_NUMBER ? at->k + (uint32_t)(n % STAGES * TILE_BYTES) : stage;
        const uint32_t values = keys + STAGES * TILE_BYTES;
        const int first = tiles->first + n * BLOCK_KEYS;
        const fa_vectors vectors = keeps ? known : find_vectors();
        const bool k_scaled = keeps ? known_k : w->k_scale != NULL;
        const bool v_scaled = keeps ? known_v : w->v_scale != NULL;
        bool careful = false;
        fa_scores s;
        wait_for_tile();
        make_scores(&q, halves, &vectors, keys, &s);
        scale_scores(d, k_scaled, &q, halves, keys, &s);
        __syncwarp(); /* all lanes have used the keys */
        issue_keys(d, w, tiles, n + STAGES, k_scaled, keys, places);
        wait_for_tile();
        const bool plain =
            keeps ? is_within(seen, n) : first >= w->all_from && first + KEYS <= w->all_to;
        if (!plain || (options && has_row_options(d))) {
#pragma unroll
            for (int i = 0; i < halves; i++) change_row(d, w, first, i / 2, i % 2, options, &s);
            careful = hides_keys(d, w, first) && has_nonfinite_values(values);
        }
        add_tile(v_scaled, halves, &s, &vectors, values, careful, o);
        __syncwarp();
        issue_values(d, w, tiles, n + STAGES, v_scaled, values, places);
        stage += TILE_BYTES;
        if (stage == at->k + STAGES * TILE_BYTES) stage = at->k;
    }
    ptx_cp_async_wait(0);
}

/* The warp's sums over its key tiles of a part. */
FA_DEVICE void attend(const fa_decode_params *d, const fa_work *w, const fa_memory *at,
                      fa_output *o)
{
    const fa_key_tiles tiles = find_key_tiles(w);
    fa_places places;
    begin_pipeline(d, w, &tiles, at, &places);
    load_queries(d, w, at->q);
    clear_output(o);
    __syncthreads();
    if (M_TILES == 1 && w->rows <= 8 && !has_row_options(d))
        attend_tiles(d, w, at, &tiles, 1, false, &places, o);
    else attend_tiles(d, w, at, &tiles, 2 * M_TILES, true, &places, o);
}
#else
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
        __syncwarp(); /* all lanes have used the keys */
        issue_keys(d, w, &tiles, at, n + STAGES, &places);
        make_logits(d, w, first, &s);
        update_bases(o, &s, 2 * M_TILES);
        wait_for_tile();
        const bool careful = hides_keys(d, w, first) && has_nonfinite_values(at->v + stage);
        add_tile(&s, at->v + stage, careful, o);
        __syncwarp();
        issue_values(d, w, &tiles, at, n + STAGES, &places);
    }
    ptx_cp_async_wait(0);
}
#endif
#endif

#endif
