/*
 * The register-tiled products that all passes use: C = A B on top of alpha * C, for tiles that
 * lie in cache.
 *
 *   A   rows x depth, broadcast word by word: element (r, k) at a[r*a_row + k*a_col]
 *   B   depth x columns, read a vector at a time: row k at b + k*ldb; columns padded to whole vectors
 *   C   rows x columns floats, ldc
 *
 * A and B hold words of 32 bits: a float, or (bfloat16 dot products) two neighbours along the depth.
 * Rows are padded: a tile of 5 rows may be computed as 8, so A and C need FA_MR - 1 rows to spare.
 */
#ifndef FA_CPU_GEMM_H
#define FA_CPU_GEMM_H

#include "simd.h"

/* Rows of a full register tile and vectors across: accumulators, plus the vectors of B and one word of
 * A, fill the register file (32 with AVX-512, 16 otherwise). A wide tile has as many accumulators. */
#if defined(FA_ISA_AVX512)
enum { FA_MR = 12, FA_NV = 2 };
#else
enum { FA_MR = 6, FA_NV = 2 };
#endif
enum { FA_NR = FA_NV * VL };

FA_INLINE vf fa_mac_float(uint32_t a, const uint32_t *b, vf c)
{
    float x;
    memcpy(&x, &a, sizeof x);
    vf y;
    memcpy(&y, b, sizeof y);
    return v_fma(v_set1(x), y, c);
}

#ifdef FA_ISA_AVX512_BF16
FA_INLINE vf fa_mac_bfloat(uint32_t a, const uint32_t *b, vf c)
{
    return _mm512_dpbf16_ps(c, (__m512bh)_mm512_set1_epi32((int)a),
                            (__m512bh)_mm512_loadu_si512(b));
}
#define FA_MAC(bfloat, a, b, c) ((bfloat) ? fa_mac_bfloat(a, b, c) : fa_mac_float(a, b, c))
#else
#define FA_MAC(bfloat, a, b, c) fa_mac_float(a, b, c)
#endif

typedef struct fa_gemm {
    int64_t depth;
    const uint32_t *a;
    int64_t a_row, a_col; /* one of them is 1 */
    const uint32_t *b;
    int64_t ldb;
    float *c;
    int64_t ldc;
    const float *alpha; /* (rows) scales what C holds; NULL: C is overwritten */
} fa_gemm;

/* One register tile. mr, nv, bfloat and by_rows are constants where this is inlined. */
FA_INLINE void fa_gemm_tile(const int mr, const int nv, const bool bfloat, const bool by_rows,
                            const fa_gemm *g, const uint32_t *a, const uint32_t *b, float *c,
                            const float *alpha)
{
    vf acc[FA_MR * FA_NV];
    (void)bfloat;
    FA_UNROLL
    for (int r = 0; r < mr; r++) {
        FA_UNROLL
        for (int v = 0; v < nv; v++) acc[r * nv + v] = v_zero();
    }
    const int64_t a_row = by_rows ? g->a_row : 1;
    const int64_t a_col = by_rows ? 1 : g->a_col;
    const int64_t ldb = g->ldb;
    /* Half of A's rows have their own pointer: the offsets of 12 rows from one pointer would need too
     * many registers. The empty asm prevents gcc from computing it from `a` again. */
    const int half = mr > 5 ? mr / 2 : mr;
    const uint32_t *upper = a + half * a_row;
    __asm__("" : "+r"(upper));
    for (int64_t k = 0; k < g->depth; k++) {
        FA_UNROLL
        for (int r = 0; r < mr; r++) {
            const uint32_t *from = r < half ? a + r * a_row : upper + (r - half) * a_row;
            FA_UNROLL
            for (int v = 0; v < nv; v++)
                acc[r * nv + v] = FA_MAC(bfloat, *from, b + v * VL, acc[r * nv + v]);
        }
        upper += a_col;
        a += a_col;
        b += ldb;
    }
    /* What C holds is added at the end, not summed onto: shorter sums round less. Unrolled, because
     * a loop over the accumulators would keep all of them in memory. */
    FA_UNROLL
    for (int r = 0; r < mr; r++) {
        float *row = c + r * g->ldc;
        FA_UNROLL
        for (int v = 0; v < nv; v++) {
            if (alpha)
                acc[r * nv + v] = v_fma(v_set1(alpha[r]), v_load(row + v * VL), acc[r * nv + v]);
            v_store(row + v * VL, acc[r * nv + v]);
        }
    }
}

typedef void fa_tile_function(const fa_gemm *g, const uint32_t *a, const uint32_t *b, float *c,
                              const float *alpha);

#define FA_TILE(kind, bfloat, by_rows, mr, nv)                                                     \
    static void fa_tile_##kind##_##mr##_##nv(const fa_gemm *g, const uint32_t *a,                  \
                                             const uint32_t *b, float *c, const float *alpha)      \
    {                                                                                              \
        fa_gemm_tile(mr, nv, bfloat, by_rows, g, a, b, c, alpha);                                  \
    }
#define FA_TILES(kind, bfloat, by_rows, mr)                                                        \
    FA_TILE(kind, bfloat, by_rows, mr, 1)                                                          \
    FA_TILE(kind, bfloat, by_rows, mr, 2)

/* Heights of register tiles: the full one, and what rounds a remainder up. */
#if defined(FA_ISA_AVX512)
#define FA_HEIGHTS(m) m(1) m(2) m(4) m(8) m(12)
#else
#define FA_HEIGHTS(m) m(1) m(2) m(4) m(6)
#endif
#define FA_HEIGHT(mr) mr,
static const int fa_heights[] = {FA_HEIGHTS(FA_HEIGHT)};
enum { FA_NUM_HEIGHTS = sizeof fa_heights / sizeof *fa_heights };

/* A family of tiles: all heights and widths of one kind of product. */
typedef struct fa_tiles {
    fa_tile_function *tile[FA_NUM_HEIGHTS][FA_NV];
    bool by_rows;
    fa_tile_function *wide; /* FA_MR / 2 rows by 2 * FA_NR columns, or NULL */
} fa_tiles;

#define FA_TILE_NAMES(kind, mr) {fa_tile_##kind##_##mr##_1, fa_tile_##kind##_##mr##_2},

/* Computes the leading columns of C by wide tiles, which load 10 times for 24 multiply-adds where full
 * tiles load 14 times. Returns how many columns it computed. */
static inline int64_t fa_gemm_run_wide(const fa_tiles *tiles, const fa_gemm *g, int64_t rows,
                                       int64_t columns)
{
    const int64_t a_step = tiles->by_rows ? g->a_row : 1;
    int64_t col = 0;
    if (!tiles->wide || rows % (FA_MR / 2) != 0) return 0;
    for (; col + 2 * FA_NR <= columns; col += 2 * FA_NR)
        for (int64_t r = 0; r < rows; r += FA_MR / 2)
            tiles->wide(g, g->a + r * a_step, g->b + col, g->c + r * g->ldc + col,
                        g->alpha ? g->alpha + r : NULL);
    return col;
}

/* Runs all tiles of C; rows in steps of FA_MR, columns in steps of FA_NR. A stays in the first-level
 * cache and B streams from the second; its columns serve all rows one after the other. */
static inline void fa_gemm_run(const fa_tiles *tiles, const fa_gemm *g, int64_t rows,
                               int64_t columns)
{
    const int64_t a_step = tiles->by_rows ? g->a_row : 1;
    for (int64_t col = fa_gemm_run_wide(tiles, g, rows, columns); col < columns; col += FA_NR) {
        const int width = columns - col > VL ? FA_NV - 1 : 0;
        for (int64_t r = 0; r < rows; r += FA_MR) {
            int height = FA_NUM_HEIGHTS - 1;
            while (height > 0 && fa_heights[height - 1] >= rows - r) height--;
            tiles->tile[height][width](g, g->a + r * a_step, g->b + col, g->c + r * g->ldc + col,
                                       g->alpha ? g->alpha + r : NULL);
        }
    }
}

/* The product that skips zeros of A. It is used if B may hold NaN or infinity in rows that a row of A
 * must not see, because 0 * NaN is NaN. It is slow, and rarely needed. */
static inline void fa_gemm_skip_zeros(const fa_gemm *g, bool bfloat, bool by_rows, int64_t rows,
                                      int64_t columns)
{
    for (int64_t r = 0; r < rows; r++) {
        float *c = g->c + r * g->ldc;
        for (int64_t j = 0; j < columns; j++) c[j] = g->alpha ? c[j] * g->alpha[r] : 0.0f;
        for (int64_t k = 0; k < g->depth; k++) {
            uint32_t word = g->a[by_rows ? r * g->a_row + k : k * g->a_col + r];
            float low = bfloat ? fa_bits_float(word << 16) : fa_bits_float(word);
            float high = bfloat ? fa_bits_float(word & 0xffff0000u) : 0.0f;
            const uint32_t *b = g->b + k * g->ldb;
            for (int64_t j = 0; j < columns && low != 0.0f; j++)
                c[j] += low * fa_bits_float(bfloat ? b[j] << 16 : b[j]);
            for (int64_t j = 0; j < columns && high != 0.0f; j++)
                c[j] += high * fa_bits_float(b[j] & 0xffff0000u);
        }
    }
}

#endif
