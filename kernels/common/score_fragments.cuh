/*
 * The score options for kernels on tensor cores, on fragments. A thread has elements of two rows r of a tile. Element
 * 4j + 2r + c is for key 8j + c, counted from the thread's first key (c is 0 or 1). This is the layout of accumulators
 * of both wgmma and mma.m16n8k16.
 *
 * Each option has its own loop, and no branches for single keys: they would cost more than they save. The arithmetic
 * of one score is in score_options.cuh. The including file defines FRAGMENT_KEYS, the number of keys of a tile.
 */
#ifndef FA_KERNELS_COMMON_SCORE_FRAGMENTS_CUH
#define FA_KERNELS_COMMON_SCORE_FRAGMENTS_CUH

#include "common/score_options.cuh"
#include "common/softmax.cuh"

#ifndef FRAGMENT_KEYS
#error "common/score_fragments.cuh: FRAGMENT_KEYS is missing"
#endif

/* One row of a thread: its query, the first key that the thread holds, and the keys that the row may see,
 * counted from there on. */
typedef struct fa_fragment_row {
    fa_logit_row logit;
    int64_t j;
    int lo, hi;
} fa_fragment_row;

/* Softcap and the scale: scores become exponents of 2. */
FA_DEVICE void fa_scale_fragment(const fa_attention_params *p, float scale, float *s)
{
    if (p->softcap > 0.0f) {
        const float inner = scale / p->softcap, cap = p->softcap * FA_LOG2E;
#pragma unroll
        for (int i = 0; i < FRAGMENT_KEYS / 2; i++) s[i] = fa_softcap_score_fast(s[i] * inner, cap);
        return;
    }
#pragma unroll
    for (int i = 0; i < FRAGMENT_KEYS / 2; i++) s[i] *= scale * FA_LOG2E;
}

/* slope: in the units of the scores; distance: from the query to the thread's first key. */
FA_DEVICE void fa_add_alibi(float *s, int r, float slope, float distance)
{
#pragma unroll
    for (int j = 0; j < FRAGMENT_KEYS / 8; j++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float *x = s + 4 * j + 2 * r + c;
            *x = fa_alibi_score(*x, -slope, distance - (float)(8 * j + c));
        }
}

/* The bias and the mask of keys that the row does not see must not be read. The nearest key that the row sees (fa_inside)
 * is read instead, because the scores are hidden afterwards anyway. A row that sees no key has no such key: with a causal
 * mask and more queries than keys, its window [lo, hi) ends before key 0. */

FA_DEVICE bool fa_sees_nothing(const fa_fragment_row *row)
{
    return row->lo >= row->hi || row->j + row->hi <= 0;
}

FA_DEVICE int fa_inside(const fa_fragment_row *row, int i)
{
    const int last = i < row->hi ? i : row->hi - 1;
    return last > row->lo ? last : row->lo;
}

/* Elements 8j and 8j + 1 of a row of the bias. side_by_side: both are loaded at once; the row sees them. */
FA_DEVICE float2 fa_fetch_two(const char *first, int dtype, int64_t stride,
                              const fa_fragment_row *row, int j, bool side_by_side)
{
    const int size = fa_element_size(dtype);
    if (side_by_side && dtype == FA_KERNEL_FLOAT32) return *(const float2 *)(first + 8 * j * size);
    if (side_by_side) return fa_unpack_x2(*(const uint32_t *)(first + 8 * j * size), dtype);
    return make_float2(fa_load_element(first, dtype, fa_inside(row, 8 * j) * stride),
                       fa_load_element(first, dtype, fa_inside(row, 8 * j + 1) * stride));
}

/* The compiler knows dtype and side_by_side. unit: a logit of 1 in the units of the scores. */
FA_DEVICE void fa_add_bias_of(float *s, int r, const fa_fragment_row *row, const char *first,
                              int64_t stride, float unit, int dtype, bool side_by_side)
{
#pragma unroll
    for (int j = 0; j < FRAGMENT_KEYS / 8; j++) {
        const float2 b = fa_fetch_two(first, dtype, stride, row, j, side_by_side);
        float *x = s + 4 * j + 2 * r;
        x[0] = fa_bias_score(x[0], b.x, unit);
        x[1] = fa_bias_score(x[1], b.y, unit);
    }
}

/* Whether two neighbours can be loaded at once: the warp sees the whole tile, and they are aligned. */
FA_DEVICE bool fa_is_side_by_side(const fa_fragment_row *row, const char *first, int64_t stride,
                                  int size)
{
    const bool whole = row->lo <= 0 && row->hi >= FRAGMENT_KEYS;
    const bool aligned = stride == 1 && (uintptr_t)first % (uintptr_t)(2 * size) == 0;
    return !__any_sync(0xffffffff, !whole || !aligned);
}

FA_DEVICE void fa_add_bias(const fa_kernel_view *bias, float *s, int r, const fa_fragment_row *row,
                           float unit)
{
    const int64_t stride = bias->stride[3];
    const int size = fa_element_size(bias->dtype);
    const char *first = row->logit.bias + row->j * stride * size;
    const bool side_by_side = fa_is_side_by_side(row, first, stride, size);
    if (fa_sees_nothing(row)) return;
    if (bias->dtype == FA_KERNEL_BFLOAT16 && side_by_side)
        fa_add_bias_of(s, r, row, first, stride, unit, FA_KERNEL_BFLOAT16, true);
    else if (bias->dtype == FA_KERNEL_BFLOAT16)
        fa_add_bias_of(s, r, row, first, stride, unit, FA_KERNEL_BFLOAT16, false);
    else if (bias->dtype == FA_KERNEL_FLOAT16 && side_by_side)
        fa_add_bias_of(s, r, row, first, stride, unit, FA_KERNEL_FLOAT16, true);
    else if (bias->dtype == FA_KERNEL_FLOAT16)
        fa_add_bias_of(s, r, row, first, stride, unit, FA_KERNEL_FLOAT16, false);
    else if (side_by_side) fa_add_bias_of(s, r, row, first, stride, unit, FA_KERNEL_FLOAT32, true);
    else fa_add_bias_of(s, r, row, first, stride, unit, FA_KERNEL_FLOAT32, false);
}

FA_DEVICE void fa_apply_mask(const fa_kernel_view *mask, float *s, int r,
                             const fa_fragment_row *row)
{
    const uint8_t *first = row->logit.mask + row->j * mask->stride[3];
    if (fa_sees_nothing(row)) return;
#pragma unroll
    for (int j = 0; j < FRAGMENT_KEYS / 8; j++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float *x = s + 4 * j + 2 * r + c;
            *x = fa_mask_score(*x, first[fa_inside(row, 8 * j + c) * mask->stride[3]] != 0);
        }
}

/* The mask by position: hides keys outside [lo, hi), counted from the thread's first one, from row r. */
FA_DEVICE void fa_hide_fragment(float *s, int r, int lo, int hi)
{
#pragma unroll
    for (int j = 0; j < FRAGMENT_KEYS / 8; j++)
#pragma unroll
        for (int c = 0; c < 2; c++)
            if (8 * j + c < lo || 8 * j + c >= hi) s[4 * j + 2 * r + c] = -INFINITY;
}

/* The same if nothing is hidden on the left. */
FA_DEVICE void fa_hide_behind(float *s, int r, int hi)
{
#pragma unroll
    for (int j = 0; j < FRAGMENT_KEYS / 8; j++)
#pragma unroll
        for (int c = 0; c < 2; c++)
            if (8 * j + c >= hi) s[4 * j + 2 * r + c] = -INFINITY;
}

/* Whether there are options that fa_change_row applies. */
FA_DEVICE bool fa_has_row_options(const fa_attention_params *p)
{
    return p->alibi_slopes || p->bias.data || p->mask.data;
}

/* The options that are read or computed row by row. s: exponents of 2. */
FA_DEVICE void fa_change_row(const fa_attention_params *p, float *s, int r,
                             const fa_fragment_row *row)
{
    if (p->alibi_slopes)
        fa_add_alibi(s, r, row->logit.slope * FA_LOG2E, (float)(row->logit.center - row->j));
    if (p->bias.data) fa_add_bias(&p->bias, s, r, row, FA_LOG2E);
    if (p->mask.data) fa_apply_mask(&p->mask, s, r, row);
}

#endif
