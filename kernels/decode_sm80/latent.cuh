/*
 * Latent attention: a key's first columns are its value, so each row is read once. All warps share
 * a key tile:
 *
 *   S   each warp computes the scores of 8 of the 64 keys, with the queries' fragments in registers
 *   P   warps exchange maxima, so that all have the same bases, and weights, as fragments
 *   O   each warp computes an eighth of the columns, from all keys
 *
 * A tile takes three barriers. Meanwhile two of the three stages are being filled.
 */
#ifndef FA_KERNELS_DECODE_SM80_LATENT_CUH
#define FA_KERNELS_DECODE_SM80_LATENT_CUH

#include "decode_sm80/config.cuh"
#include "decode_sm80/fragments.cuh"

#if LATENT
#include "common/mma.cuh"
#include "common/nonfinite_values.cuh"
#include "common/reduce.cuh"
#include "common/rows.cuh"
#include "common/x2.cuh"
#include "decode_sm80/queries.cuh"
#include "decode_sm80/softmax.cuh"
#include "decode_sm80/work.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/shared.cuh"

/* ---- Copies ---------------------------------------------------------------------------------- */

/* Eight lanes copy a row, 128 bytes at a time. */
enum { ROW_LANES = 8, ROWS_A_PASS = THREADS / ROW_LANES, PASSES = KEYS / ROWS_A_PASS };
static_assert(KEYS % ROWS_A_PASS == 0 && HEAD_DIM % (8 * ROW_LANES) == 0, "whole passes");

FA_DEVICE int copied_row(int pass) { return pass * ROWS_A_PASS + ptx_thread_id() / ROW_LANES; }

FA_DEVICE uint32_t copied_at(uint32_t tile, int pass)
{
    return tile + (uint32_t)(copied_row(pass) * PITCH + ptx_thread_id() % ROW_LANES * 16);
}

/* The pages of the rows of a tile that this thread copies, and the rows' numbers in them; page 0
 * without pages, and for keys that are not seen. */
typedef struct fa_pages {
    int number[PASSES], row[PASSES];
} fa_pages;

/* The block's key tiles: the first key of the first tile, and the number of tiles. */
typedef struct fa_key_tiles {
    int first, count;
} fa_key_tiles;

FA_DEVICE bool is_seen(const fa_work *w, int key) { return key >= w->from && key < w->to; }

/* Finds page and row of key `first` + r. If a tile has at most two pages, there is one division for
 * all its keys. */
FA_DEVICE void divide_by_page(int first, int r, int size, int *page, int *row)
{
    const int key = size >= KEYS ? first : first + r;
    *page = (int)((uint32_t)key / (uint32_t)size);
    *row = key - *page * size;
    if (size < KEYS) return;
    *row += r;
    if (*row < size) return;
    *row -= size;
    ++*page;
}

FA_DEVICE fa_pages find_pages(const fa_decode_params *d, const fa_work *w, int first)
{
    const fa_attention_params *p = &d->attention;
    fa_pages pages;
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        int page;
        pages.number[i] = 0;
        pages.row[i] = first + copied_row(i);
        if (!p->block_table || !is_seen(w, first + copied_row(i))) continue;
        divide_by_page(first, copied_row(i), (int)p->rows_k, &page, &pages.row[i]);
        pages.number[i] =
            fa_clamp_page(p, p->block_table[w->tile.batch * p->block_table_stride + page]);
    }
    return pages;
}

/* Issues the copies of tile n, which has these pages, and finds the pages of the next tile. */
FA_DEVICE void issue_tile(const fa_decode_params *d, const fa_work *w, const fa_key_tiles *tiles,
                          uint32_t stages, int n, fa_pages *pages)
{
    const fa_kernel_view *k = &d->attention.k;
    const int first = tiles->first + n * KEYS, column = ptx_thread_id() % ROW_LANES * 8;
    if (n < tiles->count) {
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            const bool wanted = is_seen(w, first + copied_row(i));
            const char *from = w->k + 2 * (pages->number[i] * k->stride[0] +
                                           pages->row[i] * k->stride[1] + column);
            const uint32_t to = copied_at(stages + (uint32_t)(n % STAGES * TILE_BYTES), i);
#pragma unroll
            for (int c = 0; c < HEAD_DIM; c += 8 * ROW_LANES)
                ptx_cp_async_16_once(to + (uint32_t)(2 * c), from + 2 * c,
                                     wanted && c + column < d->attention.d);
        }
        *pages = find_pages(d, w, first + KEYS);
    }
    ptx_cp_async_commit();
}

/* Whether one of the values that this thread has copied of a tile is not finite. */
FA_DEVICE bool has_nonfinite_values(uint32_t tile)
{
    uint32_t seen = 0;
#pragma unroll 1
    for (int i = 0; i < PASSES * (VALUE_DIM / 8 / ROW_LANES); i++) {
        const uint4 x =
            ptx_ld_shared_v4(copied_at(tile, i % PASSES) + (uint32_t)(i / PASSES * 16 * ROW_LANES));
        seen |= fa_x2_not_finite(x.x) | fa_x2_not_finite(x.y) | fa_x2_not_finite(x.z) |
                fa_x2_not_finite(x.w);
    }
    return seen != 0;
}

/* ---- Scores ---------------------------------------------------------------------------------- */

typedef struct fa_queries {
    uint32_t fragments[D_STEPS][4];
} fa_queries;

FA_DEVICE void find_queries(const fa_decode_params *d, const fa_work *w, fa_queries *q)
{
    const fa_attention_params *p = &d->attention;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const char *row = find_query(d, w, row_of(0, half));
#pragma unroll
        for (int i = 0; i < D_STEPS * 2; i++)
            q->fragments[i / 2][i % 2 * 2 + half] = fetch_two(p, row, i * 8 + lane_id() % 4 * 2);
    }
}

/* The scores of the warp's keys, in four independent sums. */
FA_DEVICE void make_scores(const fa_queries *q, uint32_t tile, fa_scores *s)
{
    const uint32_t k =
        tile + (uint32_t)((warp_id() * 8 + lane_id() % 8) * PITCH) + (uint32_t)(lane_id() / 8 * 16);
    float sums[4][4];
#pragma unroll
    for (int i = 0; i < 16; i++) sums[i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int step = 0; step < D_STEPS; step += 2) {
        uint32_t b[4];
        ptx_ldmatrix_x4(b, k + (uint32_t)(step * 32));
        fa_mma(sums[step % 4], q->fragments[step], b[0], b[1]);
        fa_mma(sums[step % 4 + 1], q->fragments[step + 1], b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        s->at[0][0][i] = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
}

/* ---- Exchange between warps ------------------------------------------------------------------ */

/* The address of the fragments of the weights. */
FA_DEVICE uint32_t weights_at(const fa_memory *at, int step)
{
    return at->q + (uint32_t)((step * 32 + lane_id()) * 16);
}

/* After them: for each row, a number of each warp. */
FA_DEVICE uint32_t numbers_at(const fa_memory *at, int r)
{
    return at->q + (uint32_t)(2 * ROWS * KEYS + r * 4 * WARPS);
}

/* Stores the warp's maxima for all warps. */
FA_DEVICE void show_tops(const fa_scores *s, const fa_memory *at)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float x =
            fa_max_over_lanes(fmaxf(s->at[0][0][2 * half], s->at[0][0][2 * half + 1]), 4);
        if (lane_id() % 4 == 0)
            ptx_st_shared_f32(numbers_at(at, row_of(0, half)) + (uint32_t)(4 * warp_id()), x);
    }
}

/* Raises the bases to the maxima of all warps, so that all warps have the same bases. */
FA_DEVICE void update_bases(const fa_memory *at, fa_output *o)
{
    float top[M_TILES][2];
    bool grown = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float x = -INFINITY;
#pragma unroll
        for (int i = 0; i < WARPS / 4; i++) {
            const uint4 of = ptx_ld_shared_v4(numbers_at(at, row_of(0, half)) + (uint32_t)(16 * i));
            x = fmaxf(x, fmaxf(fmaxf(fa_bits_float(of.x), fa_bits_float(of.y)),
                               fmaxf(fa_bits_float(of.z), fa_bits_float(of.w))));
        }
        top[0][half] = x;
        grown |= x > o->base[0][half] + RESCALE_ABOVE;
    }
    if (__any_sync(0xffffffffu, grown)) raise_bases(o, 2 * M_TILES, top);
}

/* Computes the weights of the warp's 8 keys and stores them for all warps: half of the 16 keys of a
 * step. */
FA_DEVICE void show_weights(const fa_scores *s, const fa_memory *at, fa_output *o)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float first = ptx_ex2(s->at[0][0][2 * half] - o->base[0][half]);
        const float second = ptx_ex2(s->at[0][0][2 * half + 1] - o->base[0][half]);
        o->sum[0][half] += first + second;
        ptx_st_shared_u32(weights_at(at, warp_id() / 2) + (uint32_t)(warp_id() % 2 * 8 + 4 * half),
                          fa_pack_x2(first, second));
    }
}

/* ---- The loop -------------------------------------------------------------------------------- */

/* O += P V for the warp's columns. carefully: some values are not finite. */
FA_DEVICE void add_tile(const fa_memory *at, uint32_t tile, bool carefully, fa_output *o)
{
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++) {
        const uint32_t v = tile + value_lane() +
                           (uint32_t)(step * 16 * PITCH + warp_id() * (VALUE_DIM / WARPS * 2));
        const uint4 x = ptx_ld_shared_v4(weights_at(at, step));
        uint32_t a[M_TILES][4] = {{x.x, x.y, x.z, x.w}};
        add_products(o, a, v, carefully);
    }
}

/* The block's sums over its key tiles of a part. */
FA_DEVICE void attend(const fa_decode_params *d, const fa_work *w, const fa_memory *at,
                      fa_output *o)
{
    const int before = w->part * w->per_part;
    const fa_key_tiles tiles = {w->start + before * KEYS, min(w->per_part, w->tiles - before)};
    fa_pages pages = find_pages(d, w, tiles.first);
    fa_queries q;
#pragma unroll 1
    for (int n = 0; n < STAGES - 1; n++) issue_tile(d, w, &tiles, at->k, n, &pages);
    find_queries(d, w, &q);
    clear_output(o);
#pragma unroll 1
    for (int n = 0; n < tiles.count; n++) {
        const uint32_t tile = at->k + (uint32_t)(n % STAGES * TILE_BYTES);
        const int first = tiles.first + n * KEYS;
        const bool hides = hides_keys(d, w, first);
        bool careful = false;
        fa_scores s;
        ptx_cp_async_wait(STAGES - 2);
        __syncthreads(); /* also: the previous tile is no longer used */
        issue_tile(d, w, &tiles, at->k, n + STAGES - 1, &pages);
        make_scores(&q, tile, &s);
        make_logits(d, w, first + 8 * warp_id(), &s);
        show_tops(&s, at);
        __syncthreads();
        update_bases(at, o);
        show_weights(&s, at, o);
        if (hides) careful = __syncthreads_or(has_nonfinite_values(tile));
        else __syncthreads();
        add_tile(at, tile, careful, o);
    }
    ptx_cp_async_wait(0);
}

/* Stores the block's sums in shared memory, over the stages. The warps' sums of weights are added
 * in the order of the warps. */
FA_DEVICE void store_block(const fa_output *o, const fa_memory *at, float *to)
{
    __syncthreads(); /* all warps have finished with the stages and the maxima */
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float *row = to + row_of(0, half) * ROW_FLOATS;
        const float sum = fa_sum_over_lanes(o->sum[0][half], 4);
#pragma unroll
        for (int n = 0; n < D_TILES; n++)
            *(float2 *)(row + warp_id() * (VALUE_DIM / WARPS) + 8 * n + lane_id() % 4 * 2) =
                make_float2(o->at[0][n][2 * half], o->at[0][n][2 * half + 1]);
        if (lane_id() % 4 == 0)
            ptx_st_shared_f32(numbers_at(at, row_of(0, half)) + (uint32_t)(4 * warp_id()), sum);
    }
    __syncthreads();
    if (warp_id() > 0 || lane_id() % 4 > 0) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int r = row_of(0, half);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; i++)
            sum += ptx_ld_shared_f32(numbers_at(at, r) + (uint32_t)(4 * i));
        *(float2 *)(to + r * ROW_FLOATS + VALUE_DIM) = make_float2(o->base[0][half], sum);
    }
}

#endif

#endif
