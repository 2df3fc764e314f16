/*
 * Values that are not finite and are hidden from some rows. Times a weight of 0 they are NaN, and
 * so is the result.
 *
 * They are rare, so at first the block does not look for them. If a result is not finite and
 * something was hidden, the block recomputes the work tile. Then it searches the key tiles that
 * hide something for values that are not finite. If it finds some, it computes the product from the
 * finite values only, and adds infinities and NaN where the weight is not 0.
 */
#ifndef FA_KERNELS_FORWARD_SM80_RECOMPUTE_CUH
#define FA_KERNELS_FORWARD_SM80_RECOMPUTE_CUH

#include "common/params.h"
#include "forward_sm80/layout.cuh"
#include "forward_sm80/load.cuh"
#include "forward_sm80/multiply.cuh"
#include "forward_sm80/scheduler.cuh"
#include "forward_sm80/scores.cuh"

#if !TF32
#include "common/nonfinite_values.cuh"
#endif

#if TF32

#define ONE 0x3f800000u

/* The number 1 if x is not finite, except the infinity of sign `without`; else 0. */
FA_DEVICE uint32_t mark_value(uint32_t x, uint32_t without)
{
    return is_not_finite(x) && x != (0x7f800000u | without) ? ONE : 0;
}

/* The number 1 if a weight is not 0. In tf32 the weight has been rounded, but the bits that mma
 * ignores have not been cleared. */
FA_DEVICE uint32_t mark_weights(uint32_t x)
{
    return x & (THREE_PRODUCTS ? 0x7fffffffu : 0x7fffe000u) ? ONE : 0;
}

/* c += a b, for weights and finite values. */
FA_DEVICE void add_product(float c[4], const uint32_t a[4], uint32_t even, uint32_t odd)
{
#if THREE_PRODUCTS
    const uint32_t x[4] = {even, odd, 0, 0};
    float sum[4] = {0.0f};
    fa_parts weights, values;
    fa_split_four(&weights, a, false);
    fa_split_four(&values, x, false);
    fa_multiply_parts(sum, &weights, &values, 0, 1);
#pragma unroll
    for (int e = 0; e < 4; e++) c[e] += sum[e];
#else
    fa_mma(c, a, fa_to_tf32(even), fa_to_tf32(odd));
#endif
}

/* O += P V for 8 keys and finite values. v: the address of this lane's fragments of these keys. */
FA_DEVICE void add_finite_values(fa_output *o, uint32_t a[M_TILES][4], uint32_t v)
{
#pragma unroll
    for (int block = 0; block < D_TILES / 4; block++) {
        fa_values b;
        load_values(&b, v, 0, block);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t even = is_not_finite(b.even[i]) ? 0 : b.even[i];
            const uint32_t odd = is_not_finite(b.odd[i]) ? 0 : b.odd[i];
#pragma unroll
            for (int m = 0; m < M_TILES; m++) add_product(o->at[m][4 * block + i], a[m], even, odd);
        }
    }
}

/* Adds infinity, or minus infinity, to elements for which one of these keys' values is that
 * infinity or NaN and has a weight other than 0. marks: mark_weights of the weights. */
FA_DEVICE void add_infinities(fa_output *o, uint32_t marks[M_TILES][4], uint32_t v, bool negative)
{
    const uint32_t without = negative ? 0 : 0x80000000u;
    const float infinity = negative ? -INFINITY : INFINITY;
#pragma unroll
    for (int block = 0; block < D_TILES / 4; block++) {
        fa_values b;
        load_values(&b, v, 0, block);
#pragma unroll
        for (int i = 0; i < M_TILES * 4; i++) {
            const int m = i / 4, tile = i % 4;
            float count[4] = {0.0f};
            fa_mma(count, marks[m], mark_value(b.even[tile], without),
                   mark_value(b.odd[tile], without));
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (count[e] > 0.0f) o->at[m][4 * block + tile][e] += infinity;
        }
    }
}

/* O += P V for 8 keys, in two steps. Changes a. */
FA_DEVICE void add_values_carefully(fa_output *o, uint32_t a[M_TILES][4], uint32_t v)
{
    add_finite_values(o, a, v);
#pragma unroll
    for (int i = 0; i < M_TILES * 4; i++) a[i / 4][i % 4] = mark_weights(a[i / 4][i % 4]);
#pragma unroll 1
    for (int negative = 0; negative < 2; negative++) add_infinities(o, a, v, negative);
}

#else

FA_DEVICE void add_values_carefully(fa_output *o, uint32_t a[M_TILES][4], uint32_t v)
{
    fa_add_values_carefully(o->at, a, v);
}

#endif

/* O += P V with values that are not finite: products of the finite ones, then infinities of both
 * signs, whose sum is NaN. The weights are in local memory, because this rare path must not take
 * registers from the others. */
FA_DEVICE void add_nonfinite_values(fa_output *o, const fa_weights *p, uint32_t rows, uint32_t v)
{
    uint32_t waiting[KEY_STEPS][M_TILES][4];
#pragma unroll
    for (int step = 0; step < KEY_STEPS && SPLIT == 1; step++)
        get_weight_fragments(waiting[step], p, rows, step);
#pragma unroll 1
    for (int step = 0; step < KEY_STEPS; step++) {
        const uint32_t values = v + (uint32_t)(step * STEP * PITCH);
        uint32_t a[M_TILES][4];
        if (SPLIT > 1) get_weight_fragments(a, p, rows + (uint32_t)(32 * step), 0);
#pragma unroll
        for (int i = 0; i < M_TILES * 4 && SPLIT == 1; i++)
            a[i / 4][i % 4] = waiting[step][i / 4][i % 4];
        add_values_carefully(o, a, values);
    }
}

/* Whether a hidden value that is not finite may have reached one of the thread's rows: its product
 * with a weight of 0 is NaN. */
FA_DEVICE bool is_suspect(const fa_attention_params *p, const fa_key_tiles *w, const fa_output *o)
{
    float zero[4] = {0.0f};
#if OPTIONS
    const bool hides = hides_keys(p);
#else
    const bool hides = false;
    (void)p;
#endif
    if (!THREE_PRODUCTS && !hides && w->block.all_from <= w->block.from &&
        w->block.all_to >= w->block.to)
        return false;
#pragma unroll
    for (int i = 0; i < M_TILES * D_TILES * 4; i++)
        zero[i % 4] = fmaf(o->at[i / 4 / D_TILES][i / 4 % D_TILES][i % 4], 0.0f, zero[i % 4]);
    return zero[0] + zero[1] + zero[2] + zero[3] != 0.0f;
}

#endif
