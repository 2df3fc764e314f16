/*
 * Values that are not finite, and hidden from some rows. A weight of 0 makes NaN of them, and NaN of the result.
 *
 * They are rare, so they are not looked for at first. If a result is not finite and something was hidden, the block
 * computes
 * the work tile again: then it looks for values that are not finite in the key tiles that hide something. Where it
 * finds
 * some, the product is computed from what is finite, and infinities and NaN are added where the weight is not 0.
 */
#ifndef FA_KERNELS_FORWARD_SM80_RECOMPUTE_CUH
#define FA_KERNELS_FORWARD_SM80_RECOMPUTE_CUH

#include "common/params.h"
#include "forward_sm80/layout.cuh"
#include "common/nonfinite_values.cuh"
#include "forward_sm80/multiply.cuh"
#include "forward_sm80/scheduler.cuh"
#include "forward_sm80/scores.cuh"

/* O += P V with values that are not finite. The weights are in local memory: this rare path must not take registers from the others. */
FA_DEVICE void add_nonfinite_values(fa_output *o, const fa_weights *p, uint32_t rows, uint32_t v)
{
    uint32_t waiting[KEY_STEPS][M_TILES][4];
#pragma unroll
    for (int step = 0; step < KEY_STEPS && SPLIT == 1; step++)
        get_weight_fragments(waiting[step], p, rows, step);
#pragma unroll 1
    for (int step = 0; step < KEY_STEPS; step++) {
        const uint32_t values = v + (uint32_t)(step * 16 * PITCH);
        uint32_t a[M_TILES][4];
        if (SPLIT > 1) get_weight_fragments(a, p, rows + (uint32_t)(32 * step), 0);
#pragma unroll
        for (int i = 0; i < M_TILES * 4 && SPLIT == 1; i++)
            a[i / 4][i % 4] = waiting[step][i / 4][i % 4];
        fa_add_values_carefully(o->at, a, values);
    }
}

/* Whether a hidden value that is not finite may have reached one of the thread's rows: its product with a weight
 * of 0 is NaN. */
FA_DEVICE bool is_suspect(const fa_attention_params *p, const fa_key_tiles *w, const fa_output *o)
{
    float zero[4] = {0.0f};
#if OPTIONS
    const bool hides = hides_keys(p);
#else
    const bool hides = false;
    (void)p;
#endif
    if (!hides && w->block.all_from <= w->block.from && w->block.all_to >= w->block.to)
        return false;
#pragma unroll
    for (int i = 0; i < M_TILES * D_TILES * 4; i++)
        zero[i % 4] = fmaf(o->at[i / 4 / D_TILES][i / 4 % D_TILES][i % 4], 0.0f, zero[i % 4]);
    return zero[0] + zero[1] + zero[2] + zero[3] != 0.0f;
}

#endif
