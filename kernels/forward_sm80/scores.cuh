/*
 * Between the products: computes logits from scores. The options' arithmetic is in
 * common/score_options.cuh.
 */
#ifndef FA_KERNELS_FORWARD_SM80_SCORES_CUH
#define FA_KERNELS_FORWARD_SM80_SCORES_CUH

#include "forward_sm80/config.cuh"

#include "common/score_fragments.cuh"
#include "forward_sm80/layout.cuh"
#include "forward_sm80/scheduler.cuh"

/* The keys [lo, hi), counted from `first`, that row r of the work tile sees. Rows after the last
 * query see the same as the last query. */
FA_DEVICE void visible_keys(const fa_key_tiles *w, int r, int first, int *lo, int *hi)
{
#if SPLIT_KEYS
    r >>= w->group_bits;
#endif
    const int row = r < w->last ? r : w->last, end = w->hi + row;
    *lo = w->lo + row - first;
    *hi = (end < w->keys ? end : w->keys) - first;
}

#if !OPTIONS

/* left: whether some rows do not see the first keys. */
FA_DEVICE void hide_by_position(const fa_key_tiles *w, int first, bool left, fa_scores *s)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int lo, hi;
            const int column = 2 * (lane_id() % 4);
            visible_keys(w, row_of(m, half), first + column, &lo, &hi);
            if (left) fa_hide_fragment(s->at[m][0], half, lo, hi);
            else fa_hide_behind(s->at[m][0], half, hi);
        }
}

#else

/* Replaces scores by logits, as exponents of 2. */
FA_DEVICE void apply_options(const fa_attention_params *p, const fa_tile *t, const fa_key_tiles *w,
                             int first, float scale, fa_scores *s)
{
    const int column = 2 * (lane_id() % 4);
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        fa_scale_fragment(p, scale, s->at[m][0]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int lo, hi;
            const int r = row_of(m, half);
            visible_keys(w, r, first + column, &lo, &hi);
            if (fa_has_row_options(p)) {
                const int64_t i = fa_min64(t->first + r, t->n_q - 1);
                const fa_fragment_row row = {fa_logit_row_of(p, t, i), w->start + first + column,
                                             lo, hi};
                fa_change_row(p, s->at[m][0], half, &row);
            }
            fa_hide_fragment(s->at[m][0], half, lo, hi);
        }
    }
}

/* Whether weights can be 0 for keys that a row sees by position. */
FA_DEVICE bool hides_keys(const fa_attention_params *p)
{
    return p->bias.data || p->mask.data || p->dropout_threshold;
}

/* Drops weights of one row: of 32 keys, or of the warp's share of them. A thread's columns 2t,
 * 2t + 1, 2t + 8, ... take their bits from one Philox block. key: the first key's number among the
 * 32. */
FA_DEVICE void drop_row(const fa_attention_params *p, const uint32_t block[4], int key, int m,
                        int half, int first, fa_weights *weights)
{
    enum { COUNT = KEY_TILES < 4 ? KEY_TILES : 4 };
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        const uint32_t bits = COUNT == 4 || key == 0 ? block[n] : block[n + 4 - COUNT];
        const uint32_t kept = fa_dropout_mask_x2(p, bits);
#if TF32
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const bool keeps = (c ? kept >> 16 : kept & 0xffffu) != 0;
            set_weight(weights, m, first + n, half, c,
                       keeps ? get_weight(weights, m, first + n, half, c) : 0);
        }
#else
        set_x2(weights, m, first + n, half, get_x2(weights, m, first + n, half) & kept);
#endif
    }
}

/* start: the position of the warp's first key. */
FA_DEVICE void drop_weights(const fa_attention_params *p, const fa_tile *t, int64_t start,
                            fa_weights *weights)
{
    const fa_dropout d = fa_dropout_of(p, t);
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int n = 0; n < KEY_TILES; n += 4) {
                uint32_t block[4];
                fa_dropout_block(d.seed, d.offset, d.batch_head, t->first + row_of(m, half),
                                 start / 32 + n / 4, lane_id() % 4, block);
                drop_row(p, block, (int)(start & 31), m, half, n, weights);
            }
}

#endif

#endif
