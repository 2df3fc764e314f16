/*
 * A consumer's loop over the block's 8-bit key tiles. Each warp has its own rows, bases and sums, so no warp
 * waits for another before the end.
 */
#ifndef FA_KERNELS_DECODE_SM90_BYTES_ATTEND_CUH
#define FA_KERNELS_DECODE_SM90_BYTES_ATTEND_CUH

#include "decode_sm90/config.cuh"

#if EIGHT_BITS
#include "decode_sm80/bytes.cuh"
#include "decode_sm80/bytes_softmax.cuh"
#include "decode_sm80/logits.cuh"
#include "decode_sm80/merge.cuh"
#include "decode_sm80/nonfinite.cuh"
#include "decode_sm90/pipeline.cuh"
#include "ptx/tma.cuh"

/* ---- Keys that must not be seen -------------------------------------------------------------- */

/* Hides what a row does not see by position. first: the warp's first key. */
FA_DEVICE void hide_keys(const fa_decode_params *d, const fa_work *w, int first, fa_scores *s)
{
#pragma unroll
    for (int i = 0; i < HALVES; i++) {
        const int query = min(query_of(d, row_of(i / 2, i % 2)), w->queries - 1);
        const fa_range range = fa_tile_visible(&d->attention, &w->tile, w->tile.first + query);
        const int lo = (int)range.lo - first, hi = (int)range.hi - first;
#pragma unroll
        for (int e = 0; e < 2 * KEY_TILES; e++) {
            const int key = 8 * (e / 2) + key_of(e % 2);
            if (key < lo || key >= hi) s->at[i / 2][e / 2][i % 2 * 2 + e % 2] = -INFINITY;
        }
    }
}

#if CACHE == FA_ELEMENT_INT8
/* All numbers are finite. */
FA_DEVICE void clear_unseen(const fa_work *w, uint32_t tile, int first)
{
    (void)w, (void)tile, (void)first;
}

FA_DEVICE bool has_nonfinite_values(uint32_t tile)
{
    (void)tile;
    return false;
}
#else
/* Each lane has a key. It goes through the key's vectors, and lanes are at different vectors. */
FA_DEVICE uint32_t own_vector(uint32_t tile, int i)
{
    return tile + (uint32_t)(lane_id() * PITCH + (i + lane_id()) % 8 * 16 + i / 8 * COLUMNS_BYTES);
}

/* Sets values of keys that no row sees to 0, because a weight of 0 times such a value might be NaN. */
FA_DEVICE void clear_unseen(const fa_work *w, uint32_t tile, int first)
{
    const int key = first + lane_id();
    const bool seen = key >= w->from && key < w->to;
#pragma unroll 1
    for (int i = 0; i < HEAD_DIM / 16; i++)
        if (!seen) ptx_st_shared_v4(own_vector(tile, i), make_uint4(0, 0, 0, 0));
    ptx_fence_proxy_async(); /* before TMA writes there again */
    __syncwarp();
}

FA_DEVICE bool has_nonfinite_values(uint32_t tile)
{
    uint32_t seen = 0;
#pragma unroll 1
    for (int i = 0; i < HEAD_DIM / 16; i++) {
        const uint4 x = ptx_ld_shared_v4(own_vector(tile, i));
        seen |=
            find_nonfinite(x.x) | find_nonfinite(x.y) | find_nonfinite(x.z) | find_nonfinite(x.w);
    }
    return __any_sync(0xffffffffu, seen != 0);
}
#endif

/* ---- The loop -------------------------------------------------------------------------------- */

/* The warp's rows of the tile at this place, and their scales. */
FA_DEVICE uint32_t own_rows(const pipeline *pipe, const fa_place *at)
{
    return ptx_shared_address(stage_at(pipe, at)) + (uint32_t)(warp_id() * WARP_TILE);
}

FA_DEVICE uint32_t own_scales(const pipeline *pipe, const fa_place *at)
{
    return scales_at(pipe, at) + (uint32_t)(warp_id() * 4 * KEYS);
}

/* Called when all lanes have used the tile at this place. Advances past it. */
FA_DEVICE void release_rows(const pipeline *pipe, fa_place *at)
{
    __syncwarp();
    release_tile(pipe, *at);
#pragma unroll
    for (int i = 0; i < TILE_STAGES; i++) go_on(pipe, at);
}

FA_DEVICE void attend_tiles(const pipeline *pipe, const fa_decode_params *d, const fa_work *w,
                            fa_place *at, fa_output *o)
{
    const key_tiles tiles = find_uniform_key_tiles(w);
    fa_queries q;
    find_queries(&q, ptx_shared_address(pipe->q), HALVES, score_unit(d, w));
#pragma unroll 1
    for (int n = 0; n < tiles.count; n++) {
        const int first = tiles.first + n * BLOCK_KEYS + warp_id() * KEYS;
        const bool masked = first < w->all_from || first + KEYS > w->all_to;
        const fa_vectors vectors = find_vectors(); /* found anew: registers are few */
        bool careful = false;
        fa_scores s;
        acquire_tile(pipe, *at);
        make_scores(&q, HALVES, &vectors, own_rows(pipe, at), &s);
        scale_scores(d, w->k_scale != NULL, &q, HALVES, own_scales(pipe, at), &s);
        release_rows(pipe, at);
        acquire_tile(pipe, *at);
        const uint32_t values = own_rows(pipe, at);
        if (masked) {
            hide_keys(d, w, first, &s);
            if (first < w->from || first + KEYS > w->to) clear_unseen(w, values, first);
            careful = hides_keys(d, w, first) && has_nonfinite_values(values);
        }
        add_tile(w->v_scale != NULL, HALVES, &s, &vectors, values, own_scales(pipe, at), careful,
                 o);
        release_rows(pipe, at);
    }
}

/* Writes the warps' sums over the block's part to shared memory, in the form that merge() takes. */
FA_DEVICE void attend(const pipeline *pipe, const fa_decode_params *d, const fa_work *w,
                      fa_place *at, float *sums)
{
    fa_output o;
    load_queries(d, w, ptx_shared_address(pipe->q));
    clear_output(&o);
    sync_consumers();
    attend_tiles(pipe, d, w, at, &o);
    sync_consumers(); /* all have used the stages */
    store_warp(&o, sums + warp_id() * (ROWS * ROW_FLOATS));
}
#endif

#endif
