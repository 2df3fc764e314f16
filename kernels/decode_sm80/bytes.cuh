/*
 * Products of 16-bit queries with keys and values of 8 bits: float8 e4m3 or int8. Both types are
 * exact in float16, to which a warp converts them between shared memory and the fragments of mma.
 * Queries are converted to float16, too, and each row is multiplied by a power of two. So the range
 * of bfloat16 fits, and a row loses nothing above 2^-38 of its largest element.
 *
 *   S = Q K^T      a lane loads 16 adjacent bytes of its key: four steps along the head dim. Two
 *                  neighbours are one register of K's fragments, so columns have another order than
 *                  with 16 bits. Those of queries have the same order
 *   O^T = V^T P^T  ldmatrix transposes pairs of bytes. The even bytes are rows g of the product,
 *                  the odd ones rows g + 8. Weights are its columns, eight rows of the work tile at
 *                  a time: eight rows take half as many products as sixteen
 *
 * halves: the number of halves of 16 rows that are computed. The other rows have no query.
 */
#ifndef FA_KERNELS_DECODE_SM80_BYTES_CUH
#define FA_KERNELS_DECODE_SM80_BYTES_CUH

#include "decode_sm80/config.cuh"
#include "decode_sm80/fragments.cuh"

#if EIGHT_BITS
#include "common/mma.cuh"
#include "common/nonfinite_values.cuh"
#include "common/softmax.cuh"
#include "decode_sm80/queries.cuh"
#include "decode_sm80/work.cuh"
#include "ptx/convert.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/shared.cuh"

/* ---- Conversion ------------------------------------------------------------------------------ */

/* Two numbers of float8 as float16. They are in bytes 1 and 3; the other bytes are 0. The
 * exponent's bits are shifted by one, so a number becomes 2^-8 times as large. NaN gets all bits of
 * float16's exponent. */
FA_DEVICE uint32_t unpack_float8(uint32_t x)
{
    const uint32_t nan = ((x & 0x7f007f00u) + 0x01000100u) & 0x80008000u;
    const uint32_t bits = (x & 0x80008000u) | (x >> 1 & 0x3f803f80u);
    return ptx_mul_f16x2(bits | (nan - (nan >> 5)), 0x5c005c00u);
}

/* Four bytes as float16: bytes 0 and 1, and bytes 2 and 3. An int8 x is exact in 1152 + x, whose
 * last byte has the bits of x with the sign inverted. */
FA_DEVICE void unpack_neighbours(uint32_t x, uint32_t *low, uint32_t *high)
{
#if CACHE == FA_ELEMENT_INT8
    const uint32_t biased = x ^ 0x80808080u;
    *low = ptx_sub_f16x2(ptx_permute_bytes(biased, 0x64646464u, 0x4140), 0x64806480u);
    *high = ptx_sub_f16x2(ptx_permute_bytes(biased, 0x64646464u, 0x4342), 0x64806480u);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    ptx_unpack_e4m3x4(x, low, high);
#else
    *low = unpack_float8(ptx_permute_bytes(x, 0, 0x1404));
    *high = unpack_float8(ptx_permute_bytes(x, 0, 0x3424));
#endif
}

/* The same for bytes 0 and 2, and for bytes 1 and 3. */
FA_DEVICE void unpack_alternate(uint32_t x, uint32_t *even, uint32_t *odd)
{
#if CACHE == FA_ELEMENT_INT8
    *even = ptx_sub_f16x2((x & 0x00ff00ffu) ^ 0x64806480u, 0x64806480u);
    *odd = ptx_sub_f16x2((x >> 8 & 0x00ff00ffu) ^ 0x64806480u, 0x64806480u);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    ptx_unpack_e4m3x4(ptx_permute_bytes(x, 0, 0x3120), even, odd);
#else
    *even = unpack_float8(x << 8 & 0xff00ff00u);
    *odd = unpack_float8(x & 0xff00ff00u);
#endif
}

/* ---- Queries --------------------------------------------------------------------------------- */

/* Where a lane's 16 bytes are for each 16 rows and each step. Queries are in shared memory in the
 * order of A's fragments. */
FA_DEVICE uint32_t fragment_at(int m, int step, int lane)
{
    return (uint32_t)(((m * D_STEPS + step) * 32 + lane) * 16);
}

FA_DEVICE uint32_t row_factors(uint32_t queries) { return queries + M_TILES * 16 * 2 * HEAD_DIM; }

/* Columns c to c + 3 of row r. */
FA_DEVICE void store_query_columns(uint32_t queries, int r, int c, const float x[4])
{
    const int step = c / 64 * 4 + c / 4 % 4, lane = r % 8 * 4 + c / 16 % 4;
    const uint32_t to = queries + fragment_at(r / 16, step, lane) + (uint32_t)(r / 8 % 2 * 4);
    ptx_st_shared_u32(to, fa_pack_x2(x[0], x[1]));
    ptx_st_shared_u32(to + 8, fa_pack_x2(x[2], x[3]));
}

/* Eight columns of a row of queries; zeros for a row without a query. */
FA_DEVICE void fetch_query(const fa_decode_params *d, const fa_work *w, int r, int column,
                           float x[8])
{
    const fa_attention_params *p = &d->attention;
    const fa_tile *t = &w->tile;
    const int query = query_of(d, r), head = head_of(d, r);
    uint4 bits = make_uint4(0, 0, 0, 0);
    if (query < w->queries && head < w->heads && column < p->d) {
        const char *row =
            fa_view_row(&p->q, t->block_q, t->start_q + t->first + query, t->head + head);
        bits = p->q.vector == 8 ? *(const uint4 *)(row + 2 * column)
                                : fa_gather_vector(row, column, p->d);
    }
    const uint32_t x2[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 two = fa_unpack_x2(x2[i], p->q.dtype);
        x[2 * i] = two.x;
        x[2 * i + 1] = two.y;
    }
}

/* QUERY_THREADS threads load the rows of the work tile. A row is multiplied by a power of two, so
 * that its largest element is between 2^14 and 2^15. The inverse of that factor is stored after the
 * rows. */
FA_DEVICE void load_queries(const fa_decode_params *d, const fa_work *w, uint32_t queries)
{
    static_assert(ROWS * QUERY_VECTORS % QUERY_THREADS == 0, "a row's lanes meet");
#pragma unroll 1
    for (int i = ptx_thread_id(); i < ROWS * QUERY_VECTORS; i += QUERY_THREADS) {
        const int r = i / QUERY_VECTORS, column = i % QUERY_VECTORS * 8;
        float x[8], top = 0.0f;
        fetch_query(d, w, r, column, x);
#pragma unroll
        for (int e = 0; e < 8; e++)
            if (fabsf(x[e]) < INFINITY) top = fmaxf(top, fabsf(x[e]));
#pragma unroll
        for (int other = QUERY_VECTORS / 2; other > 0; other /= 2)
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, other));
        const uint32_t exponent = (uint32_t)max((int)(__float_as_uint(top) >> 23), 15);
        const float factor = fa_bits_float((268u - exponent) << 23);
#pragma unroll
        for (int e = 0; e < 8; e++) x[e] *= factor;
        store_query_columns(queries, r, column, x);
        store_query_columns(queries, r, column + 4, x + 4);
        if (column == 0)
            ptx_st_shared_f32(row_factors(queries) + (uint32_t)(4 * r),
                              fa_bits_float((exponent - 14u) << 23));
    }
}

typedef struct fa_queries {
    uint32_t at;                             /* of this lane's fragments */
    uint32_t fragments[M_TILES][D_STEPS][4]; /* if they are in registers */
    float factor[M_TILES][2];                /* the factor of a row's scores */
} fa_queries;

/* Whether there are registers for numbers that could be computed again in each tile, if eight rows
 * are computed. Conversion takes many registers on devices before Ada. */
#if CACHE == FA_ELEMENT_FLOAT8_E4M3 && defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
#define KEEPS_MORE false
#else
#define KEEPS_MORE true
#endif

/* Whether the queries' fragments stay in registers. There are at most 32 of these. */
FA_DEVICE bool keeps_queries(int halves) { return halves == 1 && HEAD_DIM <= 128 && KEEPS_MORE; }

/* queries: their address; unit: of the scores. */
FA_DEVICE void find_queries(fa_queries *q, uint32_t queries, int halves, float unit)
{
    q->at = queries + fragment_at(0, 0, lane_id());
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++)
        q->factor[i / 2][i % 2] =
            ptx_ld_shared_f32(row_factors(queries) + (uint32_t)(4 * row_of(i / 2, i % 2))) * unit;
    if (!keeps_queries(halves)) return;
#pragma unroll
    for (int i = 0; i < M_TILES * D_STEPS; i++) {
        const uint4 x = ptx_ld_shared_v4(q->at + fragment_at(i / D_STEPS, i % D_STEPS, 0));
        uint32_t *to = q->fragments[i / D_STEPS][i % D_STEPS];
        to[0] = x.x;
        to[1] = x.y;
        to[2] = x.z;
        to[3] = x.w;
    }
}

FA_DEVICE void get_query_fragment(const fa_queries *q, int halves, int m, int step, uint32_t a[4])
{
    if (keeps_queries(halves)) {
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = q->fragments[m][step][i];
        return;
    }
    const uint4 x = ptx_ld_shared_v4(q->at + fragment_at(m, step, 0));
    a[0] = x.x;
    a[1] = x.y;
    a[2] = x.z;
    a[3] = x.w;
}

/* ---- Scores ---------------------------------------------------------------------------------- */

/* Where a lane's first vectors are in a tile of keys, in a tile of values, and in a tile that it
 * copies. Swizzles are exclusive ors, so the offsets to its other vectors within 128 bytes are
 * exclusive ors too. */
typedef struct fa_vectors {
    uint32_t key, value;
} fa_vectors;

FA_DEVICE fa_vectors find_vectors(void)
{
    return (fa_vectors){vector_at(lane_id() / 4, lane_id() % 4),
                        vector_at(lane_id() % 16, lane_id() / 16)};
}

/* The vector this many bytes after the first vector of its row. */
FA_DEVICE uint32_t behind(uint32_t tile, uint32_t first, int bytes)
{
    return tile + (first ^ (uint32_t)(bytes % 128)) + (uint32_t)(bytes / 128 * COLUMNS_BYTES);
}

/* Adds the products of four steps, which use the same 16 bytes of a key. */
FA_DEVICE void add_scores(const fa_queries *q, int halves, const fa_vectors *at, uint32_t tile,
                          int steps, fa_scores *s)
{
    const uint32_t from = behind(tile, at->key, 64 * steps);
    uint32_t a[4][M_TILES][4];
#pragma unroll
    for (int i = 0; i < 4 * M_TILES; i++)
        get_query_fragment(q, halves, i % M_TILES, 4 * steps + i / M_TILES,
                           a[i / M_TILES][i % M_TILES]);
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++) {
        const uint4 x = ptx_ld_shared_v4(from + (uint32_t)(8 * n * PITCH));
        const uint32_t bytes[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t low, high;
            unpack_neighbours(bytes[i], &low, &high);
#pragma unroll
            for (int m = 0; m < M_TILES; m++) fa_mma(s->at[m][n], a[i][m], low, high);
        }
    }
}

FA_DEVICE void make_scores(const fa_queries *q, int halves, const fa_vectors *at, uint32_t tile,
                           fa_scores *s)
{
#pragma unroll
    for (int i = 0; i < M_TILES * KEY_TILES * 4; i++)
        s->at[i / 4 / KEY_TILES][i / 4 % KEY_TILES][i % 4] = 0.0f;
#pragma unroll
    for (int steps = 0; steps < D_STEPS / 4; steps++) add_scores(q, halves, at, tile, steps, s);
}

/* The scales of this lane's keys in tile n of the scores. scales: those of the warp's tile. */
FA_DEVICE float2 get_scales(uint32_t scales, int n)
{
    const uint32_t at = scales + (uint32_t)(32 * n);
    return make_float2(ptx_ld_shared_f32(at + (uint32_t)(4 * key_of(0))),
                       ptx_ld_shared_f32(at + (uint32_t)(4 * key_of(1))));
}

/* The unit of scores: exponents of 2, or arguments of the softcap. */
FA_DEVICE float score_unit(const fa_decode_params *d, const fa_work *w)
{
    const float softcap = d->attention.softcap;
    return w->scale * (softcap > 0.0f ? 1.0f / softcap : FA_LOG2E);
}

/* Replaces scores by exponents of 2: multiplies them by their keys' scales and their rows' factors,
 * and applies the softcap. */
FA_DEVICE void scale_scores(const fa_decode_params *d, bool by_keys, const fa_queries *q,
                            int halves, uint32_t scales, fa_scores *s)
{
    const float softcap = d->attention.softcap;
    if (by_keys) {
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++) {
            const float2 scale = get_scales(scales, n);
#pragma unroll
            for (int i = 0; i < 2 * halves; i++)
                s->at[i / 4][n][i % 4] *= i % 2 ? scale.y : scale.x;
        }
    }
#pragma unroll
    for (int i = 0; i < halves; i++)
#pragma unroll
        for (int e = 0; e < KEY_TILES * 2; e++)
            s->at[i / 2][e / 2][i % 2 * 2 + e % 2] *= q->factor[i / 2][i % 2];
    if (softcap <= 0.0f) return;
#pragma unroll
    for (int i = 0; i < halves * KEY_TILES * 2; i++) {
        const int half = i / 2 / KEY_TILES;
        float *x = &s->at[half / 2][i / 2 % KEY_TILES][half % 2 * 2 + i % 2];
        *x = fa_softcap_score_fast(*x, softcap * FA_LOG2E);
    }
}

/* ---- Values ---------------------------------------------------------------------------------- */

/* The power of two of a value's scale, bounded. It is added to logits when bases are found, so that
 * weights times scales fit into float16. The sum of weights is without scales, in float32. */
FA_DEVICE float scale_exponent(float scale)
{
    const uint32_t biased = __float_as_uint(scale) >> 23 & 0xffu;
    const float exponent = fa_bits_float(biased | 0x4b000000u) - (8388608.0f + 127.0f);
    return fminf(fmaxf(exponent, -60.0f), 60.0f);
}

/* The A fragments of V^T of 16 keys and 32 columns. */
FA_DEVICE void get_values(const fa_vectors *at, uint32_t tile, int step, int block,
                          uint32_t a[2][4])
{
    uint32_t x[4];
    ptx_ldmatrix_x4_trans(x, behind(tile, at->value, 32 * block) + (uint32_t)(16 * step * PITCH));
#pragma unroll
    for (int i = 0; i < 4; i++)
        unpack_alternate(x[i], &a[i / 2][i % 2 * 2], &a[i / 2][i % 2 * 2 + 1]);
}

/* O^T += V^T P^T of 16 keys. weights: A fragments of P; each half of one is a B fragment of P^T. */
FA_DEVICE void add_values(fa_output *o, int halves, uint32_t weights[M_TILES][4],
                          const fa_vectors *at, uint32_t tile, int step)
{
#pragma unroll
    for (int block = 0; block < D_STEPS / 2; block++) {
        uint32_t a[2][4];
        get_values(at, tile, step, block, a);
#pragma unroll
        for (int i = 0; i < 2 * halves; i++) {
            const uint32_t *b = &weights[i / 4][i / 2 % 2];
            fa_mma(o->at[i / 2][2 * block + i % 2], a[i % 2], b[0], b[2]);
        }
    }
}

/* The same if some values are NaN and hidden from some rows: only rows that have a weight other
 * than 0 for such a value become NaN. */
FA_DEVICE void add_values_carefully(fa_output *o, int halves, uint32_t weights[M_TILES][4],
                                    const fa_vectors *at, uint32_t tile, int step)
{
    uint32_t seen[M_TILES][4];
#pragma unroll
    for (int i = 0; i < M_TILES * 4; i++)
        seen[i / 4][i % 4] = fa_mark_weights(weights[i / 4][i % 4]);
#pragma unroll
    for (int block = 0; block < D_STEPS / 2; block++) {
        uint32_t a[2][4], bad[2][4];
        get_values(at, tile, step, block, a);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t mask = fa_x2_spread(fa_x2_not_finite(a[i / 4][i % 4]));
            a[i / 4][i % 4] &= ~mask;
            bad[i / 4][i % 4] = FA_X2_ONES & mask;
        }
#pragma unroll
        for (int i = 0; i < 2 * halves; i++) {
            const uint32_t *b = &weights[i / 4][i / 2 % 2], *marks = &seen[i / 4][i / 2 % 2];
            float *to = o->at[i / 2][2 * block + i % 2], count[4] = {0.0f};
            fa_mma(to, a[i % 2], b[0], b[2]);
            fa_mma(count, bad[i % 2], marks[0], marks[2]);
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (count[e] > 0.0f) to[e] = NAN;
        }
    }
}

#endif

#endif
