/*
 * A warp's loop over its key tiles: S = Q K^T, logits, weights by a running max, O += P V.
 */
#ifndef FA_KERNELS_DECODE_SM80_ATTEND_CUH
#define FA_KERNELS_DECODE_SM80_ATTEND_CUH

#include "decode_sm80/config.cuh"
#include "decode_sm80/fragments.cuh"

#if LATENT
#include "decode_sm80/latent.cuh"
#else
#include "common/mma.cuh"
#include "common/nonfinite_values.cuh"
#include "common/reduce.cuh"
#include "decode_sm80/bytes.cuh"
#include "decode_sm80/bytes_load.cuh"
#include "decode_sm80/bytes_softmax.cuh"
#include "decode_sm80/load.cuh"
#include "decode_sm80/softmax.cuh"
#include "decode_sm80/work.cuh"
#include "ptx/ldmatrix.cuh"

#if !EIGHT_BITS /* 8-bit caches: bytes.cuh and bytes_softmax.cuh */
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
/* Whether there is no register for the address of the stage: the compiler would spill it. */
#if CACHE == FA_ELEMENT_FLOAT8_E4M3 && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define STAGE_BY_NUMBER (HEAD_DIM == 64)
#else
#define STAGE_BY_NUMBER false
#endif

/* The warp's sums over its key tiles. The copies of the first ones have been issued. halves: the
 * number of halves of 16 rows; options: whether there may be options that are applied row by
 * row. */
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
    find_queries(&q, at->q, halves, score_unit(d, w));
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
        scale_scores(d, k_scaled, &q, halves, keys + KEYS * PITCH, &s);
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
        add_tile(v_scaled, halves, &s, &vectors, values, values + KEYS * PITCH, careful, o);
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
