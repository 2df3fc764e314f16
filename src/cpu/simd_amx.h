/*
 * AMX: eight tile registers of 16 rows of 16 words of 32 bits, beside the vectors of simd_avx512.h.
 *   tile_configure() tile_release()  of the calling thread: all eight become whole; none are left
 *   tile_zero(t)
 *   tile_load(t, p, stride) tile_store(t, p, stride)  stride: words from one row to the next
 *   tile_dot(c, a, b)  row r, word n of c (floats) += the dot product over k of row r, word k of a and
 *                      row k, word n of b (two bfloat16 a word)
 * t, c, a and b are literals.
 *
 * With FA_AMX_EMULATED the tiles are memory, and C code emulates the instructions as Intel's manual
 * defines them, so that the engine can be tested on processors without AMX.
 */
#ifndef FA_CPU_SIMD_AMX_H
#define FA_CPU_SIMD_AMX_H

#include "simd_base.h"

enum { FA_AMX_TILE = 16 }; /* rows of a tile, and words of a row */

#ifndef FA_AMX_EMULATED
#include <immintrin.h>
#include <stdatomic.h>

/* What ldtilecfg reads. */
typedef struct fa_tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} fa_tile_shapes;
_Static_assert(sizeof(fa_tile_shapes) == 64, "the layout is the processor's");

FA_INLINE void tile_configure(void)
{
    static const fa_tile_shapes whole = {
        1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&whole);
}
FA_INLINE void tile_release(void) { _tile_release(); }
#define tile_zero(t) _tile_zero(t)
/* gcc's intrinsic is not declared to read memory: the fence keeps earlier stores before it. */
#define tile_load(t, p, stride)                                                                    \
    do {                                                                                           \
        atomic_signal_fence(memory_order_seq_cst);                                                 \
        _tile_loadd(t, p, (size_t)(stride)*4);                                                     \
    } while (0)
#define tile_store(t, p, stride) _tile_stored(t, p, (size_t)(stride)*4)
#define tile_dot(c, a, b) _tile_dpbf16ps(c, a, b)

#else
#include <float.h>
#include <stdlib.h>

typedef struct fa_emulated_tiles {
    bool configured;
    uint32_t tile[8][FA_AMX_TILE][FA_AMX_TILE];
} fa_emulated_tiles;

static _Thread_local fa_emulated_tiles fa_tiles_here;

/* A tile instruction without a configuration ends the program, as on a real processor. */
FA_INLINE uint32_t (*fa_tile(int t))[FA_AMX_TILE]
{
    if (!fa_tiles_here.configured) abort();
    return fa_tiles_here.tile[t];
}

FA_INLINE void tile_configure(void)
{
    memset(&fa_tiles_here, 0, sizeof fa_tiles_here);
    fa_tiles_here.configured = true;
}
FA_INLINE void tile_release(void) { fa_tiles_here.configured = false; }
FA_INLINE void tile_zero(int t) { memset(fa_tile(t), 0, sizeof fa_tiles_here.tile[0]); }
FA_INLINE void tile_load(int t, const void *p, int64_t stride)
{
    for (int r = 0; r < FA_AMX_TILE; r++)
        memcpy(fa_tile(t)[r], (const char *)p + r * stride * 4, sizeof fa_tiles_here.tile[0][0]);
}
FA_INLINE void tile_store(int t, void *p, int64_t stride)
{
    for (int r = 0; r < FA_AMX_TILE; r++)
        memcpy((char *)p + r * stride * 4, fa_tile(t)[r], sizeof fa_tiles_here.tile[0][0]);
}

/* Subnormal numbers count as zero, and become zero. */
FA_INLINE float fa_flush(float x) { return fabsf(x) < FLT_MIN ? copysignf(0.0f, x) : x; }
FA_INLINE float fa_low(uint32_t word) { return fa_flush(fa_bits_float(word << 16)); }
FA_INLINE float fa_high(uint32_t word) { return fa_flush(fa_bits_float(word & 0xffff0000u)); }

/* TDPBF16PS: the low and the high products are summed apart, by fused steps; C is added to at the end. */
static void tile_dot(int c, int a, int b)
{
    uint32_t(*const tc)[FA_AMX_TILE] = fa_tile(c), (*const ta)[FA_AMX_TILE] = fa_tile(a),
                    (*const tb)[FA_AMX_TILE] = fa_tile(b);
    for (int r = 0; r < FA_AMX_TILE; r++) {
        float low[FA_AMX_TILE] = {0}, high[FA_AMX_TILE] = {0};
        for (int k = 0; k < FA_AMX_TILE; k++) {
            const float a_low = fa_low(ta[r][k]), a_high = fa_high(ta[r][k]);
            for (int n = 0; n < FA_AMX_TILE; n++) {
                low[n] = fa_flush(fmaf(a_low, fa_low(tb[k][n]), low[n]));
                high[n] = fa_flush(fmaf(a_high, fa_high(tb[k][n]), high[n]));
            }
        }
        for (int n = 0; n < FA_AMX_TILE; n++) {
            const float sum = fa_flush(fa_bits_float(tc[r][n]) + fa_flush(low[n] + high[n]));
            memcpy(&tc[r][n], &sum, sizeof sum);
        }
    }
}
#endif

#endif
