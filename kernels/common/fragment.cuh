/*
 * Options that change scores, for kernels on tensor cores: a thread holds of two rows r of a tile the
 * elements 4j + 2r + c, which are the keys 8j + c from its first one on (the accumulators of wgmma and of
 * mma.m16n8k16 alike).
 *
 * Option by option, so that each loop has one thing to do, and without branches for single keys: they would
 * cost more than what they leave out. Who includes this has defined FRAGMENT_KEYS, the keys of a tile.
 */
#ifndef FA_KERNEL_FRAGMENT_H
#define FA_KERNEL_FRAGMENT_H

#include "common/logits.cuh"
#include "common/softmax.cuh"

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
        for (int i = 0; i < FRAGMENT_KEYS / 2; i++) s[i] = cap * fa_tanh_fast(s[i] * inner);
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
            *x = fmaf(-slope, fabsf(distance - (float)(8 * j + c)), *x);
        }
}

/* Two 16-bit numbers that lie side by side. */
FA_DEVICE float2 fa_float_pair(uint32_t two, int dtype)
{
    if (dtype == FA_KERNEL_BFLOAT16)
        return make_float2(fa_bits_float(two << 16), fa_bits_float(two & 0xffff0000u));
    return make_float2(fa_widened_half((uint16_t)two), fa_widened_half((uint16_t)(two >> 16)));
}

/* Keys outside the row's are not read; their scores are hidden afterwards, so any number does for them. The
 * nearest that the row sees stands in for them, which a row that sees none does not have: under a causal
 * mask, where there are more queries than keys, its window [lo, hi) ends in front of key 0. */

FA_DEVICE bool fa_sees_nothing(const fa_fragment_row *row)
{
    return row->lo >= row->hi || row->j + row->hi <= 0;
}

FA_DEVICE int fa_inside(const fa_fragment_row *row, int i)
{
    const int last = i < row->hi ? i : row->hi - 1;
    return last > row->lo ? last : row->lo;
}

/* Elements 8j and 8j + 1 of a row of the bias, which lie side by side if pairs is true. Keys are inside. */
FA_DEVICE float2 fa_fetch_two(const char *first, int dtype, int64_t stride,
                              const fa_fragment_row *row, int j, bool pairs)
{
    const int size = fa_element_size(dtype);
    if (pairs && dtype == FA_KERNEL_FLOAT32) return *(const float2 *)(first + 8 * j * size);
    if (pairs) return fa_float_pair(*(const uint32_t *)(first + 8 * j * size), dtype);
    return make_float2(fa_load_element(first, dtype, fa_inside(row, 8 * j) * stride),
                       fa_load_element(first, dtype, fa_inside(row, 8 * j + 1) * stride));
}

/* dtype and pairs are known to the compiler; unit is what a logit of 1 is in the units of the scores. */
FA_DEVICE void fa_add_bias_of(float *s, int r, const fa_fragment_row *row, const char *first,
                              int64_t stride, float unit, int dtype, bool pairs)
{
#pragma unroll
    for (int j = 0; j < FRAGMENT_KEYS / 8; j++) {
        const float2 b = fa_fetch_two(first, dtype, stride, row, j, pairs);
        float *x = s + 4 * j + 2 * r;
        x[0] = fmaf(b.x, unit, x[0]);
        x[1] = fmaf(b.y, unit, x[1]);
    }
}

/* Whether pairs of neighbours can be fetched at once: the warp sees the whole tile, and they are aligned. */
FA_DEVICE bool fa_has_pairs(const fa_fragment_row *row, const char *first, int64_t stride, int size)
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
    const bool pairs = fa_has_pairs(row, first, stride, size);
    if (fa_sees_nothing(row)) return;
    if (bias->dtype == FA_KERNEL_BFLOAT16 && pairs)
        fa_add_bias_of(s, r, row, first, stride, unit, FA_KERNEL_BFLOAT16, true);
    else if (bias->dtype == FA_KERNEL_BFLOAT16)
        fa_add_bias_of(s, r, row, first, stride, unit, FA_KERNEL_BFLOAT16, false);
    else if (bias->dtype == FA_KERNEL_FLOAT16 && pairs)
        fa_add_bias_of(s, r, row, first, stride, unit, FA_KERNEL_FLOAT16, true);
    else if (bias->dtype == FA_KERNEL_FLOAT16)
        fa_add_bias_of(s, r, row, first, stride, unit, FA_KERNEL_FLOAT16, false);
    else if (pairs) fa_add_bias_of(s, r, row, first, stride, unit, FA_KERNEL_FLOAT32, true);
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
        for (int c = 0; c < 2; c++)
            if (!first[fa_inside(row, 8 * j + c) * mask->stride[3]])
                s[4 * j + 2 * r + c] = -INFINITY;
}

/* Hides the keys that row r must not see, those outside [lo, hi) from the thread's first one on. */
FA_DEVICE void fa_hide_fragment(float *s, int r, int lo, int hi)
{
#pragma unroll
    for (int j = 0; j < FRAGMENT_KEYS / 8; j++)
#pragma unroll
        for (int c = 0; c < 2; c++)
            if (8 * j + c < lo || 8 * j + c >= hi) s[4 * j + 2 * r + c] = -INFINITY;
}

/* The same where nothing is hidden on the left. */
FA_DEVICE void fa_hide_behind(float *s, int r, int hi)
{
#pragma unroll
    for (int j = 0; j < FRAGMENT_KEYS / 8; j++)
#pragma unroll
        for (int c = 0; c < 2; c++)
            if (8 * j + c >= hi) s[4 * j + 2 * r + c] = -INFINITY;
}

/* Whether an option changes single rows. */
FA_DEVICE bool fa_changes_rows(const fa_attention_params *p)
{
    return p->alibi_slopes || p->bias.data || p->mask.data;
}

/* What is read or computed row by row. s: exponents of 2. */
FA_DEVICE void fa_change_row(const fa_attention_params *p, float *s, int r,
                             const fa_fragment_row *row)
{
    if (p->alibi_slopes)
        fa_add_alibi(s, r, row->logit.slope * FA_LOG2E, (float)(row->logit.center - row->j));
    if (p->bias.data) fa_add_bias(&p->bias, s, r, row, FA_LOG2E);
    if (p->mask.data) fa_apply_mask(&p->mask, s, r, row);
}

#endif
